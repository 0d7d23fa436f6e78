"""The version of laconic."""

__version__ = "0.2.0"
