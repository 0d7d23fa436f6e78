from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gloo

HOSTS = {
    "advise_hosts",
    "cluster",
    "compare",
    "doctor",
    "example",
    "isolated_host",
    "lab",
    "own",
    "timeline",
    "tune_hosts",
    "tutorial_chapter7",
}
"""Tests that emulate hosts: they look for namespaces left behind, and must not see each other's."""
LONG = ["hosts", "tutorial", "resume", "exactness", "codecs", "tune", "science", "saving"]
"""What takes longest, and is begun first."""


def group_of(path: str) -> str:
    """With several processes (pytest-xdist): a file's tests in one, and all of HOSTS in one."""
    name = Path(path).stem.removeprefix("test_")
    return "hosts" if name in HOSTS else name


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For ``--dist loadgroup`` pytest-xdist 3.8 writes the groups where pytest 9 does not look."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid.partition("::")[0])

    config.option.loadscopereorder = False  # as they were collected
    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        group = group_of(item.path.name)
        return LONG.index(group) if group in LONG else len(LONG)

    items.sort(key=place)


@pytest.fixture(scope="session")
def pool() -> Iterator[gloo.Pool]:
    """Four gloo processes, shared by the tests that need some."""
    pool = gloo.Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def context() -> Any:
    """Makes processes that may be killed."""
    return gloo.forking()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
