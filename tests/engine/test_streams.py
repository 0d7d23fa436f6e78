"""Runs on a stand-in for a GPU that does nothing before it must (`late`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import Semaphore
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pytest import MonkeyPatch
from torch import Tensor
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

import laconic as la
from laconic import buckets
from laconic.codecs import kernels
from laconic.codecs.integers import Integers
from laconic.engine import donor, drift, gradient_channels, loading
from laconic.engine.channel import HostState
from laconic.engine.overlap import Overlapping
from laconic.errors import NotFiniteError
from laconic.links import Link
from laconic.links.calls import GRADIENTS, Call
from laconic.links.comm_thread import CommThread
from laconic.links.link import AsyncLink, one_by_one, sent
from laconic.links.simulated import single_link
from laconic.links.staged import StagedLink
from laconic.links.tcp import TcpLink

from tests.support import gloo, late
from tests.support import quorum_training as quorum
from tests.support.all_recipes import ROWS, Run
from tests.support.loops import descend
from tests.support.training import Job

STEPS = 10
QUICK = ["slowmo over late sgp"]
FAR = ["ddp, coded", "slowmo over late sgp"]
STATE = ["streaming_diloco", "diloco, late", "local_sgd, coded", "diloco, Adam"]
"""Recipes of each kind that stores something between rounds."""


def slow(names: Any) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def trained(
    rank: int, name: str, ranks: int, on_device: bool, more: dict[str, bool]
) -> list[Tensor]:
    """The parameters after every step, the consensus and the states; saved and loaded halfway.
    ``far``: small buckets, whose messages are under way together; ``inverts``: see `late`."""
    with late.device(inverts=more.get("inverts", False)) as device, MonkeyPatch.context() as m:
        for limit in ("FIRST_BYTES", "BUCKET_BYTES", "LEAST_BYTES") if "far" in more else ():
            m.setattr(gradient_channels, limit, 2048)
            m.setattr(buckets, "BUCKET_BYTES", 512)
        link = staged(ranks, device, more.get("far", False)) if on_device else gloo.link_of(ranks)
        where, offload = device if on_device else None, more.get("offload", False)
        run = Run(ROWS[name], ranks, rank, device=where, link=link, offload=offload)
        with run.sync:
            trace = run.go(STEPS // 2)
            saved = run.sync.state_dict()
            trace += [t for t in tree_leaves(saved) if isinstance(t, Tensor)]
            run.sync.load_state_dict(saved)
            trace += [run.consensus(), *(b.clone() for b in run.model.buffers())]
            trace += run.go(STEPS)
            trace += [t for t in tree_leaves(run.sync.state_dict()) if isinstance(t, Tensor)]
        trace.append(run.flat())
        return [t.detach().cpu() for t in trace]


def staged(ranks: int, device: torch.device, far: bool = False) -> Link:
    inner = gloo.link_of(ranks)
    assert isinstance(inner, TcpLink)
    inner.far = far
    return StagedLink(inner, device)


def compare(pool: gloo.Pool, name: str, ranks: int, **more: Any) -> None:
    """Check that a run on the device has the bits of one on CPUs."""
    small = {"far": False} if "far" in more else {}
    expected = pool.run(trained, name, ranks, False, small, ranks=ranks)
    found = pool.run(trained, name, ranks, True, more, ranks=ranks)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, theirs)) and len(ours) == len(theirs)


@pytest.mark.parametrize("name", [*QUICK, *slow(name for name in ROWS if name not in QUICK)])
def test_the_bits_are_those_of_a_run_on_cpus(late_pool: gloo.Pool, name: str) -> None:
    compare(late_pool, name, 4 if "group" in name or "hier" in name else 2)


@pytest.mark.parametrize("name", ["local_sgd, coded", *slow(["ddp, coded"])])
def test_a_mean_of_three_is_a_division(late_pool: gloo.Pool, name: str) -> None:
    """A GPU multiplies by the inverse of a Python number, which gives other bits."""
    compare(late_pool, name, 3, inverts=True)


@pytest.mark.parametrize("name", ["slowmo over late sgp", *slow(STATE)])
def test_outer_state_in_host_memory_changes_no_bit(late_pool: gloo.Pool, name: str) -> None:
    compare(late_pool, name, 2, offload=True)


@pytest.mark.parametrize("name", [*FAR, *slow(name for name in ROWS if name not in FAR)])
def test_buckets_overlap_where_round_trips_are_long(late_pool: gloo.Pool, name: str) -> None:
    compare(late_pool, name, 4 if "group" in name or "hier" in name else 2, far=True)


async def noted(order: list[int], bucket: int, _: AsyncLink) -> None:
    order.append(bucket)
    await sent()
    order.append(bucket)


def test_a_bucket_sends_before_the_one_before_it_has_arrived() -> None:
    link, order = single_link(), list[int]()
    link.overlapping = one_by_one(link)  # type: ignore[misc]
    overlap = Overlapping(link, CommThread(False, torch.device("cpu"), lambda: None))
    assert not overlap.use(1) and overlap.use(3)
    results = [overlap.begin(partial(noted, order, bucket), "") for bucket in range(3)]
    assert [r.wait() for r in results] and order == [0, 1, 0, 2, 1, 2]


QUORUM = {
    "diloco": la.diloco(4, momentum=0.5, quorum=2),
    "diloco, int8, own pace": la.diloco(6, quorum=2, grace=0.01, pace="own", codec="int8"),
    "streaming_diloco": la.streaming_diloco(6, 3, 0, codec=None, quorum=2, by="layers"),
}


def with_quorum(rank: int, job: Job, steps: Sequence[int], offload: bool) -> quorum.Ran:
    """Worker 2 is slow. All save and load their states on the way."""
    with late.device() as device:
        more: dict[str, Any] = {"link": staged(3, device), "device": device, "offload": offload}
        seconds = (0.004, 0.006, 0.02)[rank]
        more |= {"before": lambda _: time.sleep(seconds), "reloads": True}
        return quorum.work(job, rank, steps[rank], **more)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", ["diloco", *slow(n for n in QUORUM if n != "diloco")])
def test_a_quorum_has_the_bits_of_the_same_rounds_on_cpus(
    late_pool: gloo.Pool, name: str, offload: bool
) -> None:
    """Most rounds of worker 2 are those in whose polls it takes part while its training computes,
    on the stream of the communication thread."""
    steps = (30, 30, 12)
    job = Job(QUORUM[name], 3, max(steps))
    runs = late_pool.run(with_quorum, job, steps, offload, ranks=3)
    closings = runs[0].closings
    assert any(2 not in c.roster for c in closings) and any(2 in c.roster for c in closings)
    again = quorum.simulated(job, steps, None, closings=closings, reloads=True)
    assert quorum.same(runs, again)


def drifting(rank: int, name: str) -> list[int]:
    """In how many steps the workers have differed, after each; worker 1 changes an element of what
    all should hold alike after step 4."""
    with late.device() as device:
        run = Run(ROWS[name], 3, rank, device=device, link=staged(3, device))
        found = []
        while run.sync.step < STEPS:
            run.go(run.sync.step + 1)
            found.append(run.sync.stats().steps_drifted)
            if run.sync.step == 4 and rank == 1:
                rounds = run.sync.driver.run.rounds
                x = next(run.model.parameters())
                kept = rounds[0].channels[0].state["anchor"] if rounds else x
                kept.detach().view(-1)[:1].mul_(2)
        run.sync.detach()
        return found


@pytest.mark.parametrize(("name", "first"), [("ddp", 5), ("easgd", 6)])
@pytest.mark.filterwarnings("ignore:the workers:UserWarning")
def test_workers_that_drift_are_found(late_pool: gloo.Pool, name: str, first: int) -> None:
    runs = late_pool.run(drifting, name, ranks=3)
    assert [found.index(1) + 1 for found in runs] == [first] * 3


def between_turns(rank: int) -> list[float]:
    """The communication thread adds 1 between its jobs, twice; this one multiplies by 10 between
    the two. What both read."""
    with late.device() as device:
        comm, begin, ended = CommThread(True, device, lambda: None), Semaphore(0), Semaphore(0)
        x, found = torch.zeros(4).to(device), list[float]()
        comm.submit(lambda: None, "the thread").wait()

        def add() -> float:
            begin.acquire()
            x.add_(1)
            if found:
                found.append(float(x[0]))
            ended.release()
            return 0.0

        comm.run_by(None, add)
        begin.release()
        ended.acquire()
        with comm.between_jobs():
            found.append(float(x[0]))
            x.mul_(10)
        begin.release()
        ended.acquire()
        comm.run_by(None)
        begin.release()
        comm.close()
        return found[:2]


def test_work_between_jobs_is_in_order(late_pool: gloo.Pool) -> None:
    assert late_pool.run(between_turns, ranks=1) == [[1.0, 11.0]]


class OnStream(torch.autograd.Function):
    """Itself; its gradient, and that of what comes before it, is computed on another stream."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: Any) -> Tensor:
        ctx.stream = stream
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        def end() -> None:
            ctx.stream.record_event().wait(late.DEFAULT)
            late.switch(late.DEFAULT)

        # as autograd does: this stream waits for this gradient, and for no other; at the end that
        # of the caller waits for all
        late.current().record_event().wait(ctx.stream)
        late.switch(ctx.stream)
        Variable._execution_engine.queue_callback(end)
        return gradient.clone(), None


def on_two_streams(rank: int, on_device: bool) -> list[Tensor]:
    """A layer's gradients are computed on another stream than those of the layer after it."""
    with late.device() as device:
        torch.manual_seed(0)
        where = device if on_device else torch.device("cpu")
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).to(where)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stream = late.LateAccelerator().new_stream(device) if on_device else late.DEFAULT
        link = staged(2, device) if on_device else gloo.link_of(2)
        with la.attach(model, optimizer, la.ddp(), link=link) as sync:
            for k in range(6):
                hidden = model[0](torch.full((3, 4), float(rank + k + 1)).to(where))
                hidden = OnStream.apply(hidden, stream)
                out = OnStream.apply(model[1](hidden), late.DEFAULT)
                with sync.no_sync() if k % 2 == 0 else nullcontext():
                    out.square().mean().backward()  # adds in place after the first
                if k % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        return [p.detach().cpu() for p in model.parameters()]


def test_a_bucket_waits_for_the_streams_of_all_its_gradients(late_pool: gloo.Pool) -> None:
    expected = late_pool.run(on_two_streams, False, ranks=2)
    for ours, theirs in zip(late_pool.run(on_two_streams, True, ranks=2), expected, strict=True):
        assert all(map(torch.equal, ours, theirs))


def freed_early(rank: int) -> list[float]:
    """Gradients are averaged in two steps only, so that their memory is free after the second. It
    was made on the stream of the gradients, which then does work of its own."""
    with late.device() as device:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1, bias=False).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stream = late.LateAccelerator().new_stream(device)
        recipe = la.post_local_sgd(2, 100)
        with la.attach(model, optimizer, recipe, link=staged(2, device)) as sync:
            x = torch.full((1, 4), float(rank + 1)).to(device)
            for _ in range(2):
                optimizer.zero_grad()
                OnStream.apply(model(x), stream).sum().backward()
                optimizer.step()
            stream.run()
            gradient = model.weight.grad
            assert gradient is not None
            found: list[float] = gradient.view(-1).tolist()
            sync.detach()
        return found


@pytest.mark.fault("memory of averaged gradients was free for others before all had read it")
def test_gradients_are_read_before_their_memory_is_free(late_pool: gloo.Pool) -> None:
    assert late_pool.run(freed_early, ranks=2) == [[1.5] * 4] * 2


class Sent:
    """Of a `Donor`, what `settings_for` needs."""

    def __init__(self, model: torch.nn.Module, comm: CommThread) -> None:
        self.weight = next(model.parameters())
        optimizer = torch.optim.SGD([self.weight], lr=0.1)
        session = SimpleNamespace(step=3, model=model, bound=optimizer, comm=comm)
        session.params = lambda: list(model.parameters())
        self._driver = SimpleNamespace(session=session, run=SimpleNamespace(quorum=None))

    def _read_others(self) -> None:
        """There are none."""

    def _state(self, _: object) -> Tensor:
        return self.weight.detach().cpu()


def given_to_a_newcomer(rank: int) -> list[float]:
    """A relay reads the state in its own thread, while a job waits for it."""
    with late.device() as device, MonkeyPatch.context() as patched:
        patched.setattr(loading, "state_dict", lambda run: {})
        model = torch.nn.Linear(1, 1, bias=False).to(device)
        comm = CommThread(True, device, lambda: None)
        sent = cast("donor.Donor", Sent(model, comm))

        def job() -> list[float]:
            torch.nn.init.constant_(model.weight, 5.0)
            _, state = donor.Donor._settings_for(sent, Call(3, GRADIENTS))
            assert state is not None
            model.weight.detach().mul_(2)  # what the job's stream has not done yet
            with ThreadPoolExecutor(1) as relay:
                found: list[float] = relay.submit(state).result().state[0].view(-1).tolist()
            return found

        found = comm.submit(job, "a round").wait()
        comm.close()
        return found


@pytest.mark.fault("a relay read the state for a newcomer before the GPU had computed it")
def test_a_newcomers_state_is_read_behind_the_jobs_work(late_pool: gloo.Pool) -> None:
    assert late_pool.run(given_to_a_newcomer, ranks=1) == [[10.0]]


@pytest.mark.fault("with a GradScaler, every backward pass waited for the GPU to ask for its scale")
def test_the_scale_is_asked_for_only_where_codes_need_it(monkeypatch: MonkeyPatch) -> None:
    asked: list[object] = []
    get_scale = torch.amp.GradScaler.get_scale

    def noted(scaler: torch.amp.GradScaler) -> float:
        if torch._C._current_graph_task_id() >= 0:
            asked.append(scaler)
        return get_scale(scaler)

    monkeypatch.setattr(torch.amp.GradScaler, "get_scale", noted)

    def worker(rank: int, recipe: str) -> None:
        model = torch.nn.Linear(4, 1)
        scaler = torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with la.attach(model, optimizer, recipe, scaler=scaler):
            scaler.scale(model(torch.full((1, 4), rank + 1.0)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    for recipe, times in (("ddp()", 0), ("ddp(codec='int8')", 2)):
        asked.clear()
        la.simulate(partial(worker, recipe=recipe), workers=2)
        assert len(asked) == times


def without_momentum(rank: int) -> dict[str, Tensor]:
    """A state in host memory, of which an update deletes a tensor that it has not read."""
    with late.device() as device:
        state = HostState({"momentum": torch.ones(3), "steps": torch.zeros(3)}, device)
        with state.on_device() as used:
            del used["momentum"]
            used["steps"] = used.get("momentum", used["steps"]) + 1
        return {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.fault("a state tensor that an update had deleted came back from host memory")
def test_state_in_host_memory_that_an_update_deletes_is_gone(late_pool: gloo.Pool) -> None:
    (state,) = late_pool.run(without_momentum, ranks=1)
    assert state.keys() == {"steps"} and torch.equal(state["steps"], torch.ones(3))


def written_on_two_streams(rank: int) -> list[float]:
    """A state in host memory, written from one stream and then from another."""
    with late.device() as device:
        kind, state = late.LateAccelerator(), HostState({"momentum": torch.zeros(2)}, device)
        first, second = (kind.new_stream(device) for _ in range(2))
        for stream, value in ((first, 1.0), (second, 2.0)):
            with kind.on_stream(stream), state.on_device() as used:
                used["momentum"] = torch.full((2,), value).to(device)
        found: list[float] = state["momentum"].tolist()
        first.run()
        return found + state["momentum"].tolist()


@pytest.mark.fault("an older copy to host memory could overwrite a newer one of another stream")
def test_copies_of_a_state_are_in_order(late_pool: gloo.Pool) -> None:
    assert late_pool.run(written_on_two_streams, ranks=1) == [[2.0] * 4]


def waits_of(rank: int, name: str, offload: bool = False) -> list[str]:
    """What training waits for, in steps and backward passes after the first."""
    with late.device() as device, MonkeyPatch.context() as patched:
        patched.setattr(gradient_channels, "FIRST_BYTES", 64)  # several buckets
        patched.setattr(gradient_channels, "BUCKET_BYTES", 64)
        link = staged(2, device)
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


def test_training_does_not_wait_for_the_device(late_pool: gloo.Pool) -> None:
    """Where rounds have a delay, it only queues work."""
    for name, offload in (("diloco, late", True), ("sgp, late", False)):
        assert late_pool.run(waits_of, name, offload, ranks=2) == [[], []]
    for waits in late_pool.run(waits_of, "ddp", ranks=2):
        assert len(waits) == STEPS - 1, "once per backward pass, not once per bucket"


def encode(*tensors_and_numbers: Any) -> None:
    """`gpu_kernels._encode`, by the kernel in C."""
    x, less, plus, code, left, _, block, _, most, bits, *there = tensors_and_numbers[:13]
    less, plus, left = (
        t if is_there else None for t, is_there in zip((less, plus, left), there, strict=True)
    )
    if not kernels.encode(bits, block, x, less, plus, code, left, most):
        code.zero_()
        code[1] = 255  # in the scale of one block


def decode(code: Tensor, out: Tensor, _: int, block: int, bits: int, add: bool, *rest: Any) -> None:
    kernels.decode(bits, block, code, out, add)


def decode_mean(rows: Tensor, first: Tensor, second: Tensor, out: Tensor, *given: int) -> None:
    block, bits, there = given[1], given[4], given[5:7]
    plus = (t if is_there else None for t, is_there in zip((first, second), there, strict=True))
    kernels.decode_mean(bits, block, rows, out, *plus)


@contextmanager
def eight_buckets(rank: int, recipe: str) -> Iterator[tuple[la.Synchronizer, Callable[[], None]]]:
    """A synchronizer of a model of eight buckets, whose codes are made by kernels for GPUs, and
    one step."""
    from laconic.codecs import gpu_kernels

    with late.device() as device, MonkeyPatch.context() as patched:
        patched.setattr(buckets, "BUCKET_BYTES", 4096)
        for limit in ("FIRST_BYTES", "BUCKET_BYTES", "LEAST_BYTES"):
            patched.setattr(gradient_channels, limit, 4096)
        patched.setattr(gradient_channels, "CODED_BUCKETS", 8)
        for name, work in (("encode", encode), ("decode", decode), ("decode_mean", decode_mean)):
            patched.setattr(gpu_kernels, f"_{name}", late.Kernel(work))
        patched.setattr(Integers, "kernels", lambda self, *x: gpu_kernels)
        # a copy for each tensor of which a part is compared, and a job after a delay
        patched.setattr(drift, "digest", lambda parts: 1)
        patched.setattr(drift.DriftCheck, "_possible", lambda *_: False)
        torch.manual_seed(rank)
        model = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(8)))
        optimizer = torch.optim.SGD(model.to(device).parameters(), lr=0.1)
        with la.attach(model, optimizer, recipe, link=staged(2, device)) as sync:
            x = torch.ones(1, 32).to(device)
            yield sync, lambda: descend(optimizer, model(x).square().mean())


def calls_of(rank: int, recipe: str) -> list[str]:
    """What the communication thread calls in a round, after the second step."""
    with eight_buckets(rank, recipe) as (sync, step):
        comm = sync.driver.session.comm
        for _ in range(2):
            comm.drain()
            late.calls.clear()
            step()
        comm.drain()
        return [what for thread, what in late.calls if thread == "laconic-comm"]


CODED_CALLS = {"kernel": 4, "copy_": 4, "_foreach_copy_": 1, "wait": 1, "record_event": 1}
"""Per bucket: a kernel for each code that is made or read, and a copy for each way of each of the
two messages; the residuals; and one point before the job and one after it."""
CALLS = {
    "local_sgd(1)": {"copy_": 2, "wait": 1, "record_event": 1},
    "local_sgd(1, codec='int8')": CODED_CALLS,
    "local_sgd(2, delay=1, codec='int4')": {**CODED_CALLS, "copy_": 5},  # the result is lent
    "ddp(codec='int8')": CODED_CALLS,
}


@pytest.mark.parametrize("recipe", CALLS)
def test_a_round_makes_few_calls(late_pool: gloo.Pool, recipe: str) -> None:
    """At most 4 per bucket and way of a message. Each holds Python's lock, which training needs."""
    for made in late_pool.run(calls_of, recipe, ranks=2):
        expected = CALLS[recipe]
        assert {what: made.count(what) / 8 for what in made} == expected
        assert sum(expected.values()) <= 4 * (4 if "codec" in recipe else 2)


def refused(rank: int, recipe: str) -> str:
    """The error of a round in which one element of one rank is NaN."""
    with pytest.raises(NotFiniteError) as raised, eight_buckets(rank, recipe) as (sync, step):
        if rank:
            list(sync.driver.session.model.parameters())[3].detach().view(-1)[700:701].fill_(
                math.nan
            )
        step()
        sync.finish()
    return str(raised.value)


def test_what_is_not_finite_is_found_in_the_code(late_pool: gloo.Pool) -> None:
    """A kernel for GPUs does not return whether all elements are finite."""
    for text in late_pool.run(refused, "local_sgd(1, codec='int8')", ranks=2):
        assert "ranks [1] of its link had NaN or infinite values to send" in text


def captured(rank: int, name: str) -> str:
    with late.device() as device, MonkeyPatch.context() as patched:
        run = Run(ROWS[name], 1, rank, device=device, link=staged(1, device))
        patched.setattr(late.LateAccelerator, "captures", lambda *_: True)
        with pytest.raises(RuntimeError) as raised:
            # not by a backward pass: an error there ends a process whose device is in Python
            for p in run.model.parameters():
                p.grad = torch.zeros_like(p)
            run.optimizer.step()
        run.sync.detach()
        return str(raised.value)


def test_what_a_graph_would_repeat_is_refused(late_pool: gloo.Pool) -> None:
    for name in ("local_sgd", "ddp"):
        (text,) = late_pool.run(captured, name, ranks=1)
        assert "call optimizer.step() outside of the graph" in text
