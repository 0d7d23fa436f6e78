from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import gloo

HOSTS = {"cluster", "compare", "doctor", "example", "lab", "own", "timeline"}
"""Tests that emulate hosts: they look for namespaces left behind, and must not see each other's."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several processes (pytest-xdist): a file's tests in one, and all of HOSTS in one."""
    for item in items:
        name = item.path.stem.removeprefix("test_")
        item.add_marker(pytest.mark.xdist_group("hosts" if name in HOSTS else name))


@pytest.fixture(scope="session")
def pool() -> Iterator[gloo.Pool]:
    """Four gloo processes, shared by the tests that need some."""
    pool = gloo.Pool(4)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
