from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import gloo


@pytest.fixture(scope="session")
def pool() -> Iterator[gloo.Pool]:
    """Four gloo processes, shared by the tests that need some."""
    pool = gloo.Pool(4)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
