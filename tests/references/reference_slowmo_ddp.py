"""The names of `slowmo_ddp`, for tests that import them from here."""

from tests.references.slowmo_ddp import *  # noqa: F403
