"""The names of `problem`, for tests that import them from here."""

from tests.references.problem import *  # noqa: F403
