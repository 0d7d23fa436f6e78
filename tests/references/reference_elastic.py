"""The names of `parameters`, for tests that import them from here."""

from tests.references.parameters import *  # noqa: F403
