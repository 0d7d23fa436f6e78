"""Fixtures, and what keeps tests apart.

This process may only distribute tests to others (pytest-xdist), so nothing heavy is imported at the
top of this file.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support import gloo, job_keys

# pytest keeps the test modules that it has rewritten: half of the time of collecting the tests
sys.dont_write_bytecode = False

# under nohup, all programs that tests start would ignore SIGHUP, which some tests send them: a
# handler, unlike SIG_IGN, ends with exec, and lets the tests themselves go on
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
# in the background of a script (`make test &`) the same holds for SIGINT
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ALONE = os.open(Path(tempfile.gettempdir(), f"laconic-tests-{os.getuid()}.lock"), os.O_CREAT)
"""Locked while a file runs that emulates hosts: those look for namespaces left behind."""


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the time limit of the test begins
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """One file of those marked `hosts` at a time, whichever processes they run in."""
    if item.get_closest_marker("hosts"):
        fcntl.flock(ALONE, fcntl.LOCK_EX)
    try:
        return (yield)
    finally:  # not between two of them: fixtures of the file may have left hosts in place
        if nextitem is None or not nextitem.get_closest_marker("hosts"):
            fcntl.flock(ALONE, fcntl.LOCK_UN)


@pytest.fixture(scope="session")
def pool() -> Iterator[gloo.Pool]:
    """Four gloo processes, shared by the tests that need some."""
    from tests.support import gloo

    pool = gloo.Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def late_pool() -> Iterator[gloo.Pool]:
    """Four gloo processes that have the device "late" (`late`)."""
    from tests.support import gloo, late

    pool = gloo.Pool(4)
    pool.run(late.prepare, ranks=4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> job_keys.Jobs:
    """Directories with keys and certificates."""
    pytest.importorskip("cryptography")
    from tests.support import job_keys

    return job_keys.Jobs(tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="session", autouse=True)
def _tracked() -> None:
    from tests.support import synchronizers

    synchronizers.track_synchronizers()


@pytest.fixture(autouse=True)
def _as_it_was(_tracked: None) -> Iterator[None]:
    """One thread for torch; afterward, no synchronizer is left attached."""
    import torch

    from tests.support import synchronizers

    torch.set_num_threads(1)
    yield
    synchronizers.detach_synchronizers()
