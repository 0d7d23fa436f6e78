"""The results of this folder's programs, each of which runs once for all processes of pytest."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.support import forked


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The results of the program for a library."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen-") else base

    @cache
    def of(library: str) -> Any:
        return forked.results_of(f"{library}_runs", shared / f"integration-{library}")

    return of
