"""Every recipe on a stand-in for a GPU that does nothing before it must (`late`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from laconic.engine import gradient_rounds
from laconic.links import Link, comm_thread
from laconic.links.comm_thread import CommThread, Pending
from laconic.links.staged import StagedLink
from laconic.links.tcp import TcpLink

import gloo
import late
from all_recipes import ROWS, Run

STEPS = 14
WITH_STATE = [
    "local_sgd, coded",
    "slowmo, unsharded",
    "slowmo over late sgp",
    "easgd",
    "lsgd",
    "diloco, Adam",
    "diloco, eager",
    "streaming_diloco",
    "sparse_loco",
    "noloco",
]
"""Recipes of each kind that stores something between rounds."""


def on_cpu(rank: int, name: str, ranks: int) -> list[Tensor]:
    return trained(rank, name, ranks, None)


def on_late(
    rank: int, name: str, ranks: int, far: bool = False, offload: bool = False
) -> list[Tensor]:
    with late.device() as device, pytest.MonkeyPatch.context() as patched:
        if far:  # small buckets, whose messages are under way together
            for limit in ("FIRST_BYTES", "BUCKET_BYTES", "LEAST_BYTES"):
                patched.setattr(gradient_rounds, limit, 512)
        return trained(rank, name, ranks, device, far, offload)


def trained(
    rank: int,
    name: str,
    ranks: int,
    device: torch.device | None,
    far: bool = False,
    offload: bool = False,
) -> list[Tensor]:
    """The parameters after every step, the consensus, and the outer state; saved and loaded
    halfway."""
    inner = gloo.link_of(ranks)
    assert isinstance(inner, TcpLink)
    inner.far = far
    link: Link = inner if device is None else StagedLink(inner, device)
    run = Run(ROWS[name], ranks, rank, device=device, link=link, offload=offload)
    with run.sync:
        trace = run.go(STEPS // 2)
        saved = run.sync.state_dict()
        trace += [t for t in tree_leaves(saved) if isinstance(t, Tensor)]
        run.sync.load_state_dict(saved)
        trace += [run.consensus(), *(b.clone() for b in run.model.buffers())]
        trace += run.go(STEPS)
        held = outer_state(run)
        assert not offload or all(t.device.type == "cpu" for t in held)
        trace += held
    trace.append(run.flat())
    return [t.detach().cpu() for t in trace]


def outer_state(run: Run) -> list[Tensor]:
    """All that parameter rounds store between rounds."""
    channels = [c for running in run.sync.driver.run.rounds for c in running.channels]
    return [t for c in channels for state in (c.state, c.exchange_state) for t in state.values()]


def assert_same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ROWS)
def test_the_bits_are_those_of_a_run_on_cpus(late_pool: gloo.Pool, name: str) -> None:
    ranks = 4 if "group" in name or "hier" in name else 2
    expected = late_pool.run(on_cpu, name, ranks, ranks=ranks)
    assert_same(late_pool.run(on_late, name, ranks, ranks=ranks), expected)


@pytest.mark.parametrize("name", WITH_STATE)
def test_outer_state_in_host_memory_changes_no_bit(late_pool: gloo.Pool, name: str) -> None:
    ranks = 4 if "group" in name or "hier" in name else 2
    expected = late_pool.run(on_late, name, ranks, ranks=ranks)
    assert_same(late_pool.run(on_late, name, ranks, False, True, ranks=ranks), expected)


def test_buckets_overlap_where_round_trips_are_long(late_pool: gloo.Pool) -> None:
    expected = late_pool.run(on_cpu, "ddp", 3, ranks=3)
    assert_same(late_pool.run(on_late, "ddp", 3, True, ranks=3), expected)


def job_does_not_wait(patched: pytest.MonkeyPatch) -> None:
    """The job's stream does not wait for what its message is made of."""
    original = CommThread._run_on_stream

    def early(self: CommThread, pending: Any, job: Any, preface: Any, after: Any) -> None:
        original(self, pending, job, preface, Never())

    patched.setattr(CommThread, "_run_on_stream", early)


def result_does_not_wait(patched: pytest.MonkeyPatch) -> None:
    """Who uses a result does not wait for the job's stream."""
    original = Pending.complete

    def unmarked(self: Pending[Any], result: Any, stream: Any = None) -> None:
        original(self, result, None)

    patched.setattr(Pending, "complete", unmarked)


def result_is_not_recorded(patched: pytest.MonkeyPatch) -> None:
    """The allocator does not learn that another stream uses the result."""
    patched.setattr(comm_thread, "use_on_current_stream", lambda _: None)


class Never:
    """An event that nobody waits for."""

    def wait(self, stream: Any) -> None: ...


GUARDS = [job_does_not_wait, result_does_not_wait, result_is_not_recorded]
CAUGHT = ["ddp", "local_sgd", "sgp, late"]
"""Runs in which each of them is missed."""


def unguarded(rank: int, name: str, guard: int) -> list[Tensor]:
    with late.device() as device, pytest.MonkeyPatch.context() as patched:
        GUARDS[guard](patched)
        return trained(rank, name, 2, device)


@pytest.mark.parametrize("guard", range(len(GUARDS)))
def test_each_guard_is_needed(late_pool: gloo.Pool, guard: int) -> None:
    name = CAUGHT[guard]
    expected = late_pool.run(on_cpu, name, 2, ranks=2)
    with pytest.raises(AssertionError):
        assert_same(late_pool.run(unguarded, name, guard, ranks=2), expected)
