"""Every recipe on a stand-in for a GPU that does nothing before it must (`late`)."""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import laconic as la
from laconic.engine import gradient_rounds
from laconic.engine.gradient_rounds import GradientRunner
from laconic.engine.offload import HostState
from laconic.errors import LinkError
from laconic.links import Link, comm_thread
from laconic.links.comm_thread import CommThread, Pending
from laconic.links.staged import StagedLink
from laconic.links.tcp import TcpLink

from tests.support import gloo, late
from tests.support.all_recipes import ROWS, Run

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
    rank: int,
    name: str,
    ranks: int,
    far: bool = False,
    offload: bool = False,
    inverts: bool = False,
) -> list[Tensor]:
    with late.device(inverts=inverts) as device, pytest.MonkeyPatch.context() as patched:
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
        if offload and name not in ("easgd", "lsgd"):  # whose every step uses it
            assert all(t.device.type == "cpu" for t in held)
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


@pytest.mark.parametrize("name", ["ddp", "ddp, coded", "local_sgd, coded", "sparse_loco"])
def test_a_mean_of_three_is_a_division(late_pool: gloo.Pool, name: str) -> None:
    """A GPU multiplies by the inverse of a Python number, which gives other bits."""
    expected = late_pool.run(on_cpu, name, 3, ranks=3)
    assert_same(late_pool.run(on_late, name, 3, False, False, True, ranks=3), expected)


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


class OnStream(torch.autograd.Function):
    """Itself; its gradient, and that of what comes before it, is computed on another stream."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: Any) -> Tensor:  # type: ignore[override]
        ctx.stream = stream
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        late.switch(ctx.stream)  # autograd has it wait for this gradient, and for no other
        return gradient.clone(), None


def on_two_streams(rank: int, device: bool, follows: bool) -> list[Tensor]:
    """A layer's gradients are computed on another stream than those of the layer after it."""
    with late.device() as found, pytest.MonkeyPatch.context() as patched:
        if not follows:
            patched.setattr(GradientRunner, "_follow_stream", lambda _: None)
        torch.manual_seed(0)
        inner = gloo.link_of(2)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        link: Link = StagedLink(inner, found) if device else inner
        if device:
            model.to(found)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stream = late.LateAccelerator().new_stream(found)
        with la.attach(model, optimizer, la.ddp(), link=link) as sync:
            for k in range(6):
                x = torch.full((3, 4), float(rank + k + 1)).to(next(model.parameters()).device)
                hidden = model[0](x)
                hidden = OnStream.apply(hidden, stream) if device else hidden
                out = model[1](hidden)
                out = OnStream.apply(out, late.DEFAULT) if device else out
                with sync.no_sync() if k % 2 == 0 else nullcontext():
                    out.square().mean().backward()  # the second one adds in place
                stream.record_event().wait(late.DEFAULT)  # as autograd does at its end
                if k % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("follows", [True, False])
def test_a_bucket_waits_for_the_streams_of_all_its_gradients(
    late_pool: gloo.Pool, follows: bool
) -> None:
    expected = late_pool.run(on_two_streams, False, True, ranks=2)
    found = late_pool.run(on_two_streams, True, follows, ranks=2)
    same = all(
        torch.equal(a, b)
        for x, y in zip(found, expected, strict=True)
        for a, b in zip(x, y, strict=True)
    )
    assert same == follows


def waits_of(rank: int, name: str, offload: bool = False) -> list[str]:
    """What training waits for, in steps and backward passes after the first."""
    with late.device() as device:
        link = StagedLink(gloo.link_of(2), device)
        run = Run(ROWS[name], 2, rank, device=device, link=link, offload=offload)
        run.sync.report_loss = lambda loss: None  # type: ignore[method-assign]
        run.model[1].eval()  # without statistics, whose rounds agree on their names
        with run.sync:
            run.go(1)
            late.waits.clear()
            run.go(STEPS)
            found = [what for thread, what in late.waits if thread != "laconic-comm"]
            late.waits.clear()
        return found


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", ["local_sgd, late", "diloco, eager", "sgp, late"])
def test_training_does_not_wait_for_the_device(
    late_pool: gloo.Pool, name: str, offload: bool
) -> None:
    """Where rounds have a delay, it only queues work."""
    assert late_pool.run(waits_of, name, offload, ranks=2) == [[], []]
    assert all(late_pool.run(waits_of, "ddp", ranks=2)), "nothing is counted"


def elastic(rank: int, recipe: str, on_device: bool, offload: bool) -> list[list[Tensor] | None]:
    """A simulated run whose workers come and go: each worker's parameters at the end."""
    with late.device() as device:

        def worker(number: int) -> list[Tensor]:
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 3))
            model.to(device if on_device else "cpu")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            sampler = la.ElasticSampler(1000, seed=1)
            among = la.Elastic("simulated", others={"data": sampler})
            sync = la.attach(model, optimizer, eval(recipe), elastic=among, offload=offload)
            data, samples = torch.randn(1000, 6), iter(sampler)
            while sync.step < 24:
                x = data[[next(samples) for _ in range(4)]].to(next(model.parameters()).device)
                optimizer.zero_grad()
                (model(x) - x[:, :3].sin()).square().mean().backward()
                optimizer.step()
            sync.finish()
            return [p.detach().cpu() for p in model.parameters()]

        torch.manual_seed(5)
        faults = la.Faults(4, kill=((0, 3), (2, 9)), join=(5,))
        return la.simulate(worker, faults=faults)


@pytest.mark.parametrize(
    "recipe",
    [
        "la.ddp()",
        "la.ddp(codec='int4')",
        "la.local_sgd(4, delay=2, codec='int8')",
        "la.diloco(8, merge='eager', delay=3)",
        "la.sgp()",
    ],
)
@pytest.mark.parametrize("offload", [False, True])
def test_workers_come_and_go(late_pool: gloo.Pool, recipe: str, offload: bool) -> None:
    (expected,) = late_pool.run(elastic, recipe, False, False, ranks=1)
    (found,) = late_pool.run(elastic, recipe, True, offload, ranks=1)
    assert [worker is None for worker in found] == [worker is None for worker in expected]
    assert_same(*([worker for worker in each if worker is not None] for each in (found, expected)))


def captured(rank: int, name: str) -> str:
    with late.device() as device, pytest.MonkeyPatch.context() as patched:
        run = Run(ROWS[name], 1, rank, device=device, link=StagedLink(gloo.link_of(1), device))
        patched.setattr(late.LateAccelerator, "captures", lambda *_: True)
        with pytest.raises(RuntimeError) as raised:
            # not by a backward pass: an error there ends a process whose device is in Python
            for gradients in run.sync.driver.run.gradients:
                gradients._begin(0)
            run.go(1)
        run.sync.detach()
        return str(raised.value)


def test_what_a_graph_would_repeat_is_refused(late_pool: gloo.Pool) -> None:
    for name, what in (("local_sgd", "optimizer.step()"), ("ddp", "a backward pass whose")):
        (text,) = late_pool.run(captured, name, ranks=1)
        assert text.startswith(what) and "call optimizer.step() outside of the graph" in text


def host_state(rank: int) -> list[float]:
    """A state that is computed with on two streams in turn, and read by the host."""
    with late.device() as device:
        kind = late.LateAccelerator()
        streams = kind.new_stream(device), kind.new_stream(device)
        state = HostState({"a": torch.zeros(3), "n": torch.tensor(0.0)}, device)
        read = []
        for k in range(5):
            with kind.on_stream(streams[k % 2]), state.on_device() as there:
                there["a"].add_(1).mul_(2)
                there["n"].add_(1)
            if k % 3 == 2:
                read += state["a"].tolist()
                state["a"] = torch.full((3,), 7.0)
        with kind.on_stream(streams[0]), state.on_device() as there:
            there["b"] = there.pop("a")
            assert list(there) == ["n", "b"] and "a" not in there
        assert len(state) == 2
        return [*read, *state["b"].tolist(), float(state["n"])]


def test_a_state_in_host_memory_is_used_in_the_order_of_the_program(late_pool: gloo.Pool) -> None:
    (found,) = late_pool.run(host_state, ranks=1)
    assert found == [14.0] * 3 + [34.0] * 3 + [5.0]


def failed(rank: int) -> list[float]:
    """Memory that is freed and used again after a job that has failed with a copy under way."""
    with late.device(settles=True) as device:
        thread = CommThread(True, device, lambda: None)
        host = late.LateAccelerator().pinned(16).view(torch.float32)
        host.fill_(5)
        x = torch.zeros(4, device=device)

        def fail() -> None:
            x.copy_(host, non_blocking=True)
            raise LinkError("a rank is lost")

        seen: list[Tensor] = []
        tell = Pending.fail

        def told(self: Pending[Any], error: BaseException) -> None:
            seen.append(x.raw.clone())  # type: ignore[attr-defined]  # whatever is still queued
            tell(self, error)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Pending, "fail", told)
            with pytest.raises(LinkError, match="a job: a rank is lost"):
                thread.submit(fail, "a job").wait()
        thread.close()
        return [float(value) for value in seen[0]]


def test_nothing_is_under_way_after_a_job_that_failed(late_pool: gloo.Pool) -> None:
    assert late_pool.run(failed, ranks=1) == [[5.0] * 4]


def kept(rank: int) -> int:
    """How many tensors are on the device after a round, beside x."""
    with late.device(settles=True) as device:
        link, before = StagedLink(gloo.link_of(2), device), {m.key for m in late.alive}
        model = torch.nn.Linear(50, 1, bias=False).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recipe = la.diloco(2, codec="int8", delay=1)
        with la.attach(model, optimizer, recipe, link=link, offload=True) as sync:
            for _ in range(5):
                model(torch.ones(1, 50).to(device)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert not any(r.in_flight for r in sync.driver.run.rounds)
            gc.collect()
            return len({m.key for m in late.alive} - before) - 1


def test_between_rounds_no_outer_state_is_on_the_device(late_pool: gloo.Pool) -> None:
    assert late_pool.run(kept, ranks=2) == [0, 0]


def copy_out(host: Tensor, x: Tensor) -> None:
    host.copy_(x, non_blocking=True)


def dropped(rank: int) -> list[float]:
    """What a job has sent of a tensor that it alone still held, and whose memory training uses
    again."""
    with late.device(settles=True) as device:
        thread = CommThread(True, device, lambda: None)
        host = late.LateAccelerator().pinned(16).view(torch.float32)
        x = torch.full((4,), 5.0).to(device)
        thread.submit(partial(copy_out, host, x), "a job")
        del x
        thread.close_and_wait(time.monotonic() + 10)
        late.DEFAULT.run()
        for stream in late.STREAMS:
            stream.run()
        return [float(value) for value in host]


def test_a_job_holds_its_tensors_until_its_work_is_done(late_pool: gloo.Pool) -> None:
    """As where training detaches with a round in flight, and goes on."""
    assert late_pool.run(dropped, ranks=1) == [[5.0] * 4]
