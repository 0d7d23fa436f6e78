"""Coded exchanges: against plain loops with the codec's rounding in them, what they conserve and
send, part by part and over processes, and what is refused."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.algorithms.exchange import Exchange
from laconic.algorithms.exchanges import CodedMean, GatheredMean, coding
from laconic.algorithms.exchanges.coded import coded as mean_of
from laconic.algorithms.update import Clock, State
from laconic.buckets import optimizer_state
from laconic.codecs import CODECS, Cast, Codec, Int2, Int4, Int8, TopK
from laconic.errors import NotFiniteError
from laconic.links import Link, Metered, Parts
from laconic.links.cost import Cost
from laconic.links.simulated import current_link
from laconic.links.wrapped import Wrapped

from tests.references import coded as codecs
from tests.references import reference_coded as ref
from tests.support import gloo

STEPS = 14
SHAPES = ((7, 5), (7,), (11, 7), (11,), (3, 40))


# -- the problem: sum(log cosh(x - target)), whose gradient is tanh(x - target) ----


def target(worker: int, step: int) -> list[Any]:
    rng = np.random.default_rng([worker, step])
    return [worker + 2.0 * rng.standard_normal(shape) for shape in SHAPES]


def start() -> list[Any]:
    rng = np.random.default_rng(7)
    return [rng.standard_normal(shape) for shape in SHAPES]


def gradient(worker: int, step: int, x: list[Any]) -> list[Any]:
    return [np.tanh(p - t) for p, t in zip(x, target(worker, step), strict=True)]


def rate(step: int) -> float:
    return 0.1 + 0.05 * math.sin(step)


class Vectors(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.x = nn.ParameterList([nn.Parameter(torch.from_numpy(p).to(dtype)) for p in start()])


def build(dtype: torch.dtype = torch.float64) -> tuple[Vectors, torch.optim.Optimizer]:
    model = Vectors(dtype)
    return model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)


def loss_of(model: Vectors, rank: int, t: int) -> Tensor:
    wanted = [torch.from_numpy(v).to(model.x[0].dtype) for v in target(rank, t)]
    pairs = zip(model.x, wanted, strict=True)
    return torch.stack([torch.log(torch.cosh(p - w)).sum() for p, w in pairs]).sum()


def step_of(model: Vectors, optimizer: torch.optim.Optimizer, rank: int, t: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate(t)
    optimizer.zero_grad()
    loss_of(model, rank, t).backward()
    optimizer.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def link_here() -> Link:
    link = current_link.get()
    assert link is not None
    return link


Trace = list[tuple[Tensor, Tensor]]
SAVES = (1, 4, 5, 6, 9)


def train(
    rank: int,
    recipe: la.Recipe,
    link: Link | None = None,
    dtype: torch.dtype = torch.float64,
    saved: dict[int, Any] | None = None,
) -> Trace:
    """(parameters, consensus) after every step; what is saved after some of them."""
    model, optimizer = build(dtype)
    sync = la.attach(model, optimizer, recipe, link=link)
    trace = []
    for t in range(1, STEPS + 1):
        step_of(model, optimizer, rank, t)
        mine = flat(model)
        if saved is not None and t in SAVES:
            momenta = [s["momentum_buffer"].clone() for s in optimizer.state.values()]
            saved[t] = mine, momenta, sync.state_dict()
        with sync.consensus(mean=False):
            trace.append((mine, flat(model)))
    sync.detach()
    return trace


def resumed(rank: int, recipe: la.Recipe, at: int, saved: Any) -> list[Tensor]:
    model, optimizer = build()
    sync = la.attach(model, optimizer, recipe)
    mine, momenta, state = saved[rank][at]
    nn.utils.vector_to_parameters(mine, model.parameters())
    for p, momentum in zip(model.x, momenta, strict=True):
        optimizer.state[p]["momentum_buffer"] = momentum.clone()
    sync.load_state_dict(state)
    trace = []
    for t in range(at + 1, STEPS + 1):
        step_of(model, optimizer, rank, t)
        trace.append(flat(model))
    return trace


def same(ones: Sequence[Trace], others: Sequence[Trace]) -> bool:
    """Bit for bit."""
    return all(
        torch.equal(a, c) and torch.equal(b, d)
        for one, other in zip(ones, others, strict=True)
        for (a, b), (c, d) in zip(one, other, strict=True)
    )


def quickly(names: Iterable[str], quick: Sequence[str]) -> list[Any]:
    """The others are slow."""
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


SMALL = Int4(block=8)
small = partial(codecs.int4, 8)
ROWS: dict[str, tuple[la.Recipe, Callable[[], ref.Algorithm]]] = {
    "ddp, int4": (la.ddp(codec="int4"), lambda: ref.DDP(codecs.int4(256))),
    "ddp, float16": (la.ddp(codec="float16"), lambda: ref.DDP(codecs.cast("float16"))),
    "ddp, small blocks": (la.ddp(codec=SMALL), lambda: ref.DDP(small())),
    "local": (la.local_sgd(3, codec=SMALL), lambda: ref.LocalSGD(3, small())),
    "local, late": (
        la.local_sgd(4, delay=3, codec=SMALL),
        lambda: ref.LocalSGD(4, small(), delay=3),
    ),
    "slowmo": (
        la.slowmo(la.local_sgd(2, codec=SMALL), 6, 0.6, 0.8, codec="int8"),
        lambda: ref.SlowMo(ref.LocalSGD(2, small()), 6, codecs.int8(256), 0.6, 0.8),
    ),
    "easgd": (la.easgd(3, 0.7, codec=SMALL), lambda: ref.EASGD(3, small(), 0.7)),
    "diloco": (la.diloco(3, 0.6, 0.8, codec=SMALL), lambda: ref.DiLoCo(3, small(), 0.6, 0.8)),
    "diloco, late": (
        la.diloco(4, 0.6, 0.8, delay=2, mix=0.3, codec=SMALL),
        lambda: ref.DiLoCo(4, small(), 0.6, 0.8, delay=2, mix=0.3),
    ),
    "streaming": (
        la.streaming_diloco(4, 2, 2, 0.3, SMALL, lr=0.6, momentum=0.8),
        lambda: ref.StreamingDiLoCo(4, 2, small(), 0.6, 0.8, delay=2, mix=0.3),
    ),
    "streaming, int2": (
        la.streaming_diloco(4, 2, 2, 0.3, Int2(4), lr=0.6, momentum=0.8),
        lambda: ref.StreamingDiLoCo(4, 2, codecs.int2(4), 0.6, 0.8, delay=2, mix=0.3),
    ),
    "sparse": (
        la.sparse_loco(3, 5, 32, values="float32"),
        lambda: ref.SparseLoCo(3, 5, 32, codecs.cast("float32")),
    ),
    "sparse, int8": (
        la.sparse_loco(3, 5, 32, decay=0.8, lr=0.7, values="int8"),
        lambda: ref.SparseLoCo(3, 5, 32, codecs.int8(256), feedback=0.8, lr=0.7),
    ),
}
QUICK = ("ddp, small blocks", "local, late", "slowmo", "easgd", "streaming", "sparse, int8")
AGREE = ("ddp, int4", "local", "slowmo", "diloco", "sparse")
"""Whose workers have met after step 6."""


@pytest.mark.parametrize("row", quickly(ROWS, QUICK))
def test_equals_the_plain_loop_and_resumes_in_mid_flight(row: str) -> None:
    """x of every worker and the consensus, at every step: with 8 values to a block and three
    workers, blocks, slices and padding all lie across the tensors' borders. Residuals, references
    and messages under way are part of what is saved, bit for bit."""
    recipe, plain = ROWS[row]
    expected = ref.run(plain(), 3, STEPS, start(), gradient, rate, 0.5)
    saved: list[dict[int, Any]] = [{}, {}, {}]
    runs = la.simulate(lambda rank: train(rank, recipe, saved=saved[rank]), workers=3)
    for rank, run in enumerate(runs):
        for t, (mine, agreed) in enumerate(run):
            wanted = np.concatenate([p.reshape(-1) for p in expected.workers[t][rank]])
            assert np.abs(mine.numpy() - wanted).max() < 1e-9, f"worker {rank}, step {t + 1}"
            assert np.abs(agreed.numpy() - expected.consensus[t]).max() < 1e-9, f"step {t + 1}"
        assert row not in AGREE or torch.equal(run[5][0], runs[0][5][0])
    for at in SAVES:
        tails = la.simulate(partial(resumed, recipe=recipe, at=at, saved=saved), workers=3)
        for run, tail in zip(runs, tails, strict=True):
            assert all(torch.equal(a, b) for (a, _), b in zip(run[at:], tail, strict=True)), at


def over_gloo(rank: int, row: str) -> Trace:
    """With rows coded in parts on rank 0 alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coding, "MIN_ROW_BYTES", 2**30 * (rank > 0))
        return train(rank, ROWS[row][0], gloo.link_of(3), torch.float32)


@pytest.mark.parametrize("row", ["ddp, small blocks", "slowmo", "streaming"])
def test_processes_and_parts_of_rows_change_no_bit(
    pool: gloo.Pool, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks may cut their rows differently: as those with a GPU and those without do."""
    for dtype in (torch.float64, torch.float32):
        run = partial(train, recipe=ROWS[row][0], dtype=dtype)
        monkeypatch.setattr(coding, "MIN_ROW_BYTES", 2**30)
        whole = la.simulate(run, workers=3)
        monkeypatch.setattr(coding, "MIN_ROW_BYTES", 0)
        assert same(la.simulate(run, workers=3), whole)
    assert same(pool.run(over_gloo, row, ranks=3), whole)


SAME = {
    "float32": (la.diloco(3, 0.6, 0.8), la.diloco(3, 0.6, 0.8, codec="float32"), 1e-6),
    "float32, gradients": (la.ddp(), la.ddp(codec="float32"), 1e-7),
    "float32, late": (la.local_sgd(3, delay=1), la.local_sgd(3, delay=1, codec="float32"), 1e-6),
    "float32, downpour": (la.downpour(3), la.downpour(3, codec="float32"), 1e-6),
    "float32, post": (la.post_local_sgd(4, 3), la.post_local_sgd(4, 3, codec="float32"), 1e-6),
    "one fragment": (
        la.diloco(3, 0.4, 0.9, codec="int4"),
        la.streaming_diloco(3, 1, 0, codec="int4", lr=0.4, momentum=0.9),
        0.0,
    ),
    "loscar is local_sgd": (
        la.local_sgd(3, delay=2),
        la.diloco(3, 1.0, 0.0, delay=2, merge="loscar"),
        1e-12,
    ),
    "average is mix": (
        la.diloco(3, delay=2, merge="average"),
        la.diloco(3, delay=2, mix=0.5),
        0.0,
    ),
    "density 1": (la.diloco(3, 1.0, 0.0), la.sparse_loco(3, 32, 32, values="float32"), 1e-6),
}


@pytest.mark.parametrize("name", quickly(SAME, ("float32, gradients", "one fragment")))
def test_special_cases_are_the_same(name: str) -> None:
    *recipes, close = SAME[name]
    one, other = (la.simulate(partial(train, recipe=r), workers=2) for r in recipes)
    for mine, theirs in zip(one, other, strict=True):
        for (a, _), (b, _) in zip(mine, theirs, strict=True):
            assert float((a - b).abs().max()) <= close


def test_a_link_that_is_late_changes_nothing() -> None:
    run = partial(train, recipe=ROWS["streaming"][0])
    slow = la.simulate(run, workers=2, link=lambda link: la.links.Throttled(link, "1mbit", "3ms"))
    assert same(la.simulate(run, workers=2), slow)


# -- what is sent, and what is left, is what went in ----


def rounds_of(
    exchange: Exchange, link: Link, count: int, length: int
) -> tuple[Tensor, Tensor, State]:
    """The sums over ``count`` rounds of what went in and what came out, and the state that is
    left; messages are random, of very different sizes."""
    generator = torch.Generator().manual_seed(link.rank)
    x = torch.linspace(-1, 1, length, dtype=torch.float64)
    state = exchange.init(x.clone(), exchange.region(link, length))
    put, got = torch.zeros(2, length, dtype=torch.float64)
    for t in range(1, count + 1):
        size = 10.0 ** torch.randint(-3, 3, (length,), generator=generator)
        m = size * torch.randn(length, generator=generator, dtype=torch.float64)
        clock = Clock(t, math.nan, t - 1, 0, link.size, link.rank)
        put, got = (
            put + m,
            got + exchange.run(link, m.clone(), lambda mean: mean, clock, state).flat,
        )
    return put, got, state


LOSSY: dict[str, Exchange] = {
    "int4": CodedMean(SMALL, relative=False),
    "int2": CodedMean(CODECS["int2"], relative=False),
    "e3m0": CodedMean(CODECS["e3m0"], relative=False),
    "bfloat16": CodedMean(Cast("bfloat16"), relative=False),
    "stochastic": CodedMean(Int4(block=8, stochastic=True), relative=False),
    "top 3 of 32": GatheredMean(TopK(3, 32), relative=False),
}


@pytest.mark.parametrize("name", LOSSY)
def test_what_was_sent_and_what_is_left_add_up(name: str) -> None:
    """sum of what came out + owner's residual + mean residual = mean of the sums that went in."""
    exchange = LOSSY[name]
    length = -(-96 // exchange.multiple(3)) * exchange.multiple(3)
    found = la.simulate(lambda _: rounds_of(exchange, link_here(), 20, length), workers=3)
    mean = torch.stack([put for put, _, _ in found]).mean(0)
    left = torch.stack([state["residual"] for _, _, state in found]).mean(0)
    owed = left.clone()
    if isinstance(exchange, CodedMean):
        owed += torch.cat([state["lag"] for _, _, state in found])
    close = 1e-9 if isinstance(exchange, CodedMean) else 1e-3 * float(mean.abs().max())
    for _, got, _ in found:
        assert torch.equal(got, found[0][1])
        assert float((got + owed - mean).abs().max()) < close
    assert float(left.abs().max()) > 0


@pytest.mark.parametrize(
    ("codec", "slow", "per_worker"),
    [("int4", False, 1), ("int4", True, 2), ("top64", True, 1), ("top64", False, 2)],
)
def test_averages_after_gradients_code_what_has_moved_since(
    codec: str, slow: bool, per_worker: int
) -> None:
    """And not all the way from the start: that would put every weight back to what the code leaves
    of it. Where workers' weights have drifted apart before, they meet."""

    def run(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(40, 30, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.3)
        recipe = la.post_local_sgd(6, 4, codec=codec)
        recipe = la.slowmo(recipe, 3, momentum=0.5) if slow else recipe
        la.attach(model, optimizer, recipe, nprocs_per_node=per_worker)
        trace = []
        for t in range(1, 9):
            if t == 6 and rank // per_worker == 1:
                with torch.no_grad():
                    model.weight += 1e-6  # as processors of another kind might
            if t == 7:
                optimizer.param_groups[0]["lr"] = 1e-4
            goal = torch.full((30, 40), 3.0 + rank // per_worker)
            (model.weight - goal).square().sum().backward()
            assert model.weight.grad is not None
            before = model.weight.detach() - 1e-4 * model.weight.grad
            optimizer.step()
            optimizer.zero_grad()
            trace.append(model.weight.detach().clone())
        return trace[5], before, trace[7]

    starts, before, ends = zip(*la.simulate(run, workers=4), strict=True)
    mean = torch.stack(before[::per_worker]).mean(0)
    moved = max(float((b - starts[0]).abs().max()) for b in before)
    assert 0 < moved < 0.01
    assert all(torch.equal(end, ends[0]) for end in ends)
    assert float((ends[0] - mean).abs().max()) < (moved / 6 if codec == "int4" else 2 * moved)


def test_nothing_is_owed_twice_after_finish() -> None:
    """finish() hands out the anchor as it is, what its owner had still to send included. With outer
    steps of size 1 x then is the mean of all that was sent."""

    def run(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        model, optimizer = build()
        sync = la.attach(model, optimizer, la.diloco(2, lr=1.0, momentum=0.0, codec=SMALL))
        for t in range(1, 5):
            step_of(model, optimizer, rank, t)
        sync.finish(mean=False)
        agreed, residuals = flat(model), []
        for lr in (0.0, 0.0):
            residuals.append(sync.state_dict()["rounds"][0]["carried"][0]["residual"][:250].clone())
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.zero_grad()
            optimizer.step()
        residuals.append(sync.state_dict()["rounds"][0]["carried"][0]["residual"][:250])
        with sync.consensus(mean=False):
            return agreed, flat(model), residuals[0] - residuals[-1]

    found = la.simulate(run, workers=3)
    sent = torch.stack([f[2] for f in found]).mean(0)
    agreed, after, _ = found[0]
    assert float(sent.abs().max()) > 0
    assert float((after - agreed - sent).abs().max()) < 1e-12


def carried(sync: la.Synchronizer) -> list[Any]:
    state = sync.state_dict()
    return [round["carried"] for kind in ("rounds", "gradients") for round in state[kind]]


def owed(states: Sequence[Any]) -> list[Tensor]:
    """Mean residual and the owners', of each bucket of each round."""
    found = []
    for kind in ("rounds", "gradients"):
        for index, first in enumerate(states[0][kind]):
            for bucket, size in enumerate(first["sizes"]):
                kept = [state[kind][index]["carried"][bucket] for state in states]
                found.append(torch.stack([k["residual"][:size] for k in kept]).mean(0))
                found.append(torch.cat([k["lag"] for k in kept])[:size])
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("row", ["ddp, small blocks", "diloco", "streaming, at once"])
def test_another_number_of_workers_goes_on_with_what_is_left(row: str, ranks: int) -> None:
    """What was agreed on, and the mean of what workers had not sent: so nothing gets lost."""
    at_once = la.streaming_diloco(4, 2, 0, codec=SMALL)
    recipe = at_once if row not in ROWS else ROWS[row][0]

    def first(rank: int) -> Any:
        model, optimizer = build()
        sync = la.attach(model, optimizer, recipe)
        for t in range(1, 7):
            step_of(model, optimizer, rank, t)
        return model.state_dict(), sync.state_dict()

    saved = la.simulate(first, workers=3)

    def second(rank: int) -> Any:
        model, optimizer = build()
        sync = la.attach(model, optimizer, recipe)
        model.load_state_dict(saved[0][0])
        sync.load_state_dict([state for _, state in saved])
        return sync.state_dict()

    before, after = owed([state for _, state in saved]), owed(la.simulate(second, workers=ranks))
    assert len(before) == len(after) > 0
    for a, b in zip(before, after, strict=True):
        assert float((a - b).abs().max()) < 1e-12 and float(a.abs().max()) > 0


@pytest.mark.parametrize("switched", [False, True])
@pytest.mark.parametrize(("workers", "inner"), [(2, 1), (4, 2)])
def test_residuals_follow_the_scale_of_the_loss(workers: int, inner: int, switched: bool) -> None:
    """At half the scale, what was not sent is half as much: unscaled gradients are as without a
    scaler, but for rounding; also where another recipe sends what is left."""

    def run(rank: int, scales: list[float] | None) -> list[Tensor]:
        model, optimizer = build(torch.float32)
        scaler = None if scales is None else torch.amp.GradScaler("cpu", init_scale=1.0)
        if scaler is not None:
            scaler.scale(torch.zeros(()))  # which makes its scale
        sync = la.attach(
            model, optimizer, la.ddp(codec=SMALL), nprocs_per_node=inner, scaler=scaler
        )
        found = []
        for t in range(1, 7):
            if switched and t == 4:
                sync.switch(la.ddp(codec=Int4(block=16)))
            optimizer.zero_grad()
            scale = 1.0 if scales is None else scales[t - 1]
            if scaler is not None:
                scaler.update(scale)
            (loss_of(model, rank, t) * scale).backward()
            grads = [p.grad for p in model.x if p.grad is not None]
            found.append(torch.cat([g.reshape(-1) / scale for g in grads]))
        sync.detach()
        return found

    scales = [4.0, 4.0, 1024.0, 0.5, 0.5, 64.0]
    plain = la.simulate(lambda rank: run(rank, None), workers=workers)
    scaled = la.simulate(lambda rank: run(rank, scales), workers=workers)
    for a, b in zip(plain[0], scaled[0], strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


# -- bytes, fragments, and tensors larger than a bucket ----


@pytest.mark.parametrize("row", ["ddp, int4", "local", "diloco", "sparse", "easgd"])
def test_the_cost_model_knows_the_bytes(row: str) -> None:
    """`Exchange.cost` is what a round makes the link count; of gradients, scales and padding
    included: 250 elements are padded to 3 slices of 11 blocks of 8."""
    (r,) = ROWS[row][0]
    length = -(-250 // r.exchange.multiple(3)) * r.exchange.multiple(3)

    def run(_: int) -> int:
        metered = Metered(link_here())
        rounds_of(r.exchange, metered, 1, length)
        return metered.ledger.bytes_sent

    assert la.simulate(run, workers=3) == [r.exchange.cost(length, 8, 3).bytes] * 3
    if row == "local":
        assert r.exchange.cost(264, 8, 3).bytes == 2 * (33 * 6 * 2 // 3)


def test_fragments_hold_everything_once() -> None:
    """Any model, any number of fragments up to its elements: about equal bytes, nothing twice."""
    model = nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30), nn.Linear(30, 2))
    groups = [[p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False)]
    for count in (1, 2, 3, 8, 40):
        parts = [la.buckets.Fragment(k, count).segments(model, groups) for k in range(count)]
        for index, held in enumerate(groups):
            sizes = [sum(s.stop - s.start for s in part[index]) for part in parts]
            assert sum(sizes) == sum(p.numel() for p in held)
            found = [(id(s.tensor), s.start, s.stop) for part in parts for s in part[index]]
            for a, b in pairwise(sorted(found)):
                assert a[0] != b[0] or a[2] == b[1], "one stretch after the other"
            if sum(sizes) >= 8 * count:  # else single elements decide
                assert min(sizes) > 0 and max(sizes) <= 2 * -(-sum(sizes) // count)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(6)))
    for k in range(3):
        (whole,) = la.buckets.Fragment(k, 3, "layers").segments(blocks, [list(blocks.parameters())])
        layers = [id(p) for block in list(blocks)[2 * k : 2 * k + 2] for p in block.parameters()]
        assert [id(s.tensor) for s in whole] == layers


@pytest.mark.parametrize("recipe", [la.ddp(codec="int8"), la.local_sgd(1, codec="int8")])
def test_a_tensor_larger_than_a_bucket(recipe: la.Recipe) -> None:
    length = la.buckets.BUCKET_BYTES // 4 + 300_001

    def run(rank: int) -> Tensor:
        x = nn.Parameter(torch.zeros(length))
        optimizer = torch.optim.SGD([x], lr=1.0)
        model = nn.ParameterList([x])
        with la.attach(model, optimizer, recipe):
            (x * torch.arange(length).remainder(99) * (rank + 1)).sum().backward()
            optimizer.step()
        return x.detach()

    wanted = -1.5 * torch.arange(length).remainder(99)
    for found in la.simulate(run, workers=2):
        assert float((found - wanted).abs().max()) < 2


def test_workers_of_two_ranks() -> None:
    """Each rank of a worker carries, and keeps what is left of, its part: the worker's are alike.
    What is not finite in one rank's part is refused by all."""

    def run(rank: int) -> tuple[Tensor, int]:
        model, optimizer = build()
        sync = la.attach(model, optimizer, ROWS["diloco"][0], nprocs_per_node=2)
        for t in range(1, 9):
            step_of(model, optimizer, rank, t)
        end = flat(model)
        with torch.no_grad():
            model.x[0].view(-1)[0] = math.nan  # in what the first rank of each worker carries
        optimizer.zero_grad()
        with pytest.raises(NotFiniteError):
            optimizer.step()
        return end, sum(len(k.get("reference", ())) for kept in carried(sync) for k in kept)

    a, b, c, d = la.simulate(run, workers=4)
    assert torch.equal(a[0], b[0]) and torch.equal(c[0], d[0])
    assert 2 * a[1] >= 250 > a[1], "half the model"


def test_rounding_at_random_draws_anew_and_alike_after_a_resume() -> None:
    exchange = CodedMean(Int4(block=8, stochastic=True), relative=False, feedback=0.0)

    def run(_: int) -> list[Tensor]:
        link, m = link_here(), torch.linspace(-1, 1, 48)
        clocks = [Clock(t, math.nan, 0, 0, link.size, link.rank) for t in (1, 2, 1)]
        return [exchange.run(link, m.clone(), lambda mean: mean, c, {}).flat for c in clocks]

    for first, second, again in la.simulate(run, workers=2):
        assert torch.equal(first, again) and not torch.equal(first, second)
    seeds = {  # of each worker, step, bucket and way
        coding.generator_for(
            Clock(t, math.nan, 0, 0, 3, worker, bucket=bucket), torch.device("cpu"), way
        ).initial_seed()
        for t, worker, bucket, way in product((1, 2), (0, 1, 2), (0, 1), (0, 1))
    }
    assert len(seeds) == 24


# -- parameters that are frozen, thawed, added ----


def test_a_frozen_parameter_keeps_what_is_left_of_the_others() -> None:
    """Buckets are made anew when a parameter is frozen; what was not sent yet moves along: the next
    gradient, of nothing, is what is sent of it. The frozen one does not move."""

    def run(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        model, optimizer = build()
        sync = la.attach(model, optimizer, la.ddp(codec=SMALL))

        def held() -> Tensor:
            """The residual, and the owner's as n times its slice."""
            (state,) = sync.state_dict()["gradients"]
            (kept,), (begin,), (size,) = state["carried"], state["starts"], state["sizes"]
            total: Tensor = kept["residual"].clone()
            total[begin : begin + len(kept["lag"])] += 3 * kept["lag"]
            return total[:size]

        for t in range(1, 5):
            step_of(model, optimizer, rank, t)
        before = held()
        model.x[1].requires_grad_(False)
        frozen = model.x[1].detach().clone()
        optimizer.zero_grad()
        (0 * loss_of(model, rank, 5)).backward()
        grads = [p.grad for i, p in enumerate(model.x) if i != 1 and p.grad is not None]
        sent = torch.cat([g.reshape(-1) for g in reversed(grads)])
        optimizer.step()
        assert torch.equal(frozen, model.x[1]) and model.x[1].grad is None
        return before, sent, held()

    found = la.simulate(run, workers=3)
    before, sent, after = (torch.stack([f[i] for f in found]).mean(0) for i in range(3))
    last = 11 + 120 + 77  # of the parameters in reverse, before the one frozen
    kept = torch.cat([before[:last], before[last + 7 :]])
    assert float((after + sent - kept).abs().max()) < 1e-12 and float(sent.abs().max()) > 0


@pytest.mark.parametrize("used", [True, False])
def test_a_parameter_thawed_in_the_step_is_averaged_once(used: bool) -> None:
    """After the backward pass, which has averaged the others already: those are left alone. Under
    DeMo it gets the sign of its mean, as they did. One that nobody used keeps no gradient."""

    def run(rank: int, recipe: la.Recipe) -> list[Tensor]:
        model, optimizer = build()
        late, other = model.x[:2]
        late.requires_grad_(False)
        la.attach(model, optimizer, recipe)
        step_of(model, optimizer, rank, 1)
        optimizer.zero_grad()
        torch.cat([p.reshape(-1) * (rank + 1) for p in model.x]).sum().backward()
        late.requires_grad_(True)
        late.grad = torch.full_like(late, rank + 1.0) if used else None
        assert other.grad is not None
        before = other.grad.clone()
        optimizer.step()
        assert torch.equal(before, other.grad) and (late.grad is not None) == used
        return [torch.ones(1) if late.grad is None else late.grad, late.detach().clone()]

    for recipe, mean in ((la.ddp(codec=SMALL), 1.5), (la.demo(), 1.0)):
        one, two = la.simulate(partial(run, recipe=recipe), workers=2)
        assert all(map(torch.equal, one, two))
        assert not used or torch.equal(one[0], torch.full_like(one[0], mean))


@pytest.mark.parametrize("how", ["thawed", "added", "late"])
def test_replicas_stay_equal_when_parameters_join_and_gradients_are_clipped(how: str) -> None:
    """Ranks would clip by other norms, were what joins not averaged in the backward pass, and do
    where it joins after it."""

    def run(rank: int) -> list[Tensor]:
        model, optimizer = build()
        late = model.x[0]
        if how == "added":
            optimizer = torch.optim.SGD(list(model.x)[1:], lr=0.1)
        else:
            late.requires_grad_(False)
        la.attach(model, optimizer, la.ddp(codec=SMALL))
        found = []
        for t in range(1, 5):
            if t == 3 and how == "thawed":
                late.requires_grad_(True)
            elif t == 3 and how == "added":
                optimizer.add_param_group({"params": [late]})
            optimizer.zero_grad()
            scale = (rank + 1.0) * t
            torch.stack([(scale * p).square().sum() for p in model.x]).sum().backward()
            if t == 3 and how == "late":
                late.requires_grad_(True).grad = torch.full_like(late, scale)
            held = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(held, 0.1)
            optimizer.step()
            found.append(flat(model))
        return found

    for x, y in zip(*la.simulate(run, workers=2), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("codec", [None, SMALL])
def test_an_overflow_is_skipped_by_all(codec: Codec | None) -> None:
    """Of one rank, in a parameter that joins; what was to be sent is not spoilt by it."""

    def run(rank: int) -> tuple[list[Tensor], float]:
        model, optimizer = build(torch.float32)
        late = model.x[0]
        late.requires_grad_(False)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        sync = la.attach(model, optimizer, la.ddp(codec=codec), scaler=scaler)
        found = []
        for t in range(1, 5):
            if t == 3:
                late.requires_grad_(True)
            optimizer.zero_grad()
            weight = math.inf if (rank, t) == (0, 3) else 1.0
            terms = [(weight if p is late else 1.0) * (rank + 1) * p.sum() for p in model.x]
            scaler.scale(torch.stack(terms).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            found.append(flat(model))
        kept = [t for c in carried(sync) for state in c for t in state.values()]
        assert sync.step == 4 and all(bool(t.isfinite().all()) for t in kept)
        return found, scaler.get_scale()

    (a, scale), (b, other) = la.simulate(run, workers=2)
    assert scale == other == 2.0
    assert all(torch.equal(x, y) and bool(x.isfinite().all()) for x, y in zip(a, b, strict=True))
    assert torch.equal(a[1], a[2]) and not torch.equal(a[2], a[3]), "one step is skipped"


@pytest.mark.parametrize("codec", [None, "int4"])
def test_sending_begins_in_the_backward_pass_whatever_the_groups(codec: str | None) -> None:
    """Parameters without weight decay, which are in all layers, are a group of their own."""

    def one(_: int) -> tuple[int, int]:
        torch.manual_seed(0)
        layers = [nn.Linear(300, 300) for _ in range(8)]
        model = nn.Sequential(*layers)
        groups = [
            {"params": [layer.weight for layer in layers], "weight_decay": 0.1},
            {"params": [layer.bias for layer in layers], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        sent: list[int] = []
        layers[3].weight.register_post_accumulate_grad_hook(
            lambda _: sent.append(sync.stats().bytes_sent)
        )
        sync: la.Synchronizer = la.attach(model, optimizer, la.ddp(codec=codec))
        before = sync.stats().bytes_sent
        model(torch.randn(4, 300)).square().mean().backward()
        return sent[0] - before, sync.stats().bytes_sent - before

    for early, total in la.simulate(one, workers=2):
        assert early > total / 5, "of the half whose gradients are there"


# -- rounds of one's own ----


def first_two(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    return [dict(list(model.named_parameters())[:2])]


def momenta(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """Of which there are none at first."""
    return optimizer_state(model, optimizer)


def test_a_round_of_chosen_parameters_averages_them() -> None:
    """Its reference is what all started with, in every round."""
    chosen = la.Round(la.every(2), la.updates.Average(), CodedMean(SMALL, True), first_two)

    def run(rank: int) -> list[Tensor]:
        model, optimizer = build()
        with la.attach(model, optimizer, (chosen,)):
            for t in range(1, 7):
                step_of(model, optimizer, rank, t)
            return [x.detach().clone() for x in model.x]

    one, other = la.simulate(run, workers=2)
    assert list(map(torch.equal, one, other)) == [True, True, False, False, False]
    (alone,) = la.simulate(run, workers=1)
    assert float((one[0] - alone[0]).abs().max()) > 1e-3, "that of both, not of one"


@pytest.mark.parametrize("delay", [0, 1])
def test_coded_rounds_of_what_comes_later_are_refused(delay: int) -> None:
    """Their reference would be another one on every worker."""
    hidden = la.Round(
        la.every(2), la.updates.Average(), CodedMean(SMALL, True), momenta, delay=delay
    )

    def run(rank: int) -> str:
        model, optimizer = build()
        la.attach(model, optimizer, (hidden,))
        step_of(model, optimizer, rank, 1)
        with pytest.raises(ValueError, match="had nothing then") as told:
            step_of(model, optimizer, rank, 2)
        return str(told.value)

    one, other = la.simulate(run, workers=2)
    assert one == other


@dataclass(frozen=True)
class Spoils(la.Update):
    """``x <- mean(x)``, as an average has it; what arrived is overwritten, as a fold may."""

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        x.copy_(received)
        received.fill_(7.0)
        return x


@pytest.mark.parametrize("codec", ["int4", TopK(k=16)])
def test_a_fold_may_overwrite_what_arrived(codec: Codec | str) -> None:
    """And not what the workers agreed on, which the next message builds upon."""
    (average,) = la.local_sgd(1, codec=codec)
    recipes = ((average,), (replace(average, update=Spoils()),))
    for dtype in (torch.float32, torch.float64):
        runs = [la.simulate(partial(train, recipe=r, dtype=dtype), workers=3) for r in recipes]
        assert same(*runs)


@dataclass(frozen=True)
class Gathered(Int4):
    """Whose sums are not coded again."""

    gathered: ClassVar[bool] = True


def test_options_that_are_refused() -> None:
    class Untold(Int4):
        __repr__ = object.__repr__

    (pairs,) = la.noloco(4)
    average = la.updates.Average()
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: la.ddp(codec="int5"), "codec must be one of 'float32', 'bfloat16'"),
        (lambda: la.local_sgd(4, codec=4), "codec"),  # type: ignore[arg-type]
        (lambda: la.slowmo(None, average=False, codec="int4"), "nothing to code"),
        (lambda: la.streaming_diloco(3), "fragments must be at most the period, 3, not 4"),
        (lambda: la.diloco(3, delay=1, merge="add"), "merge must be one of 'mix'"),  # type: ignore[arg-type]
        (lambda: la.diloco(3, delay=1, mix=1.5), "mix"),
        (lambda: la.streaming_diloco(8, by="names"), "by must be one of"),  # type: ignore[arg-type]
        (lambda: CodedMean(Int8(), relative=True, feedback=1.5), "feedback"),
        (lambda: la.GradientRound(la.every(1), average, CodedMean(Int8(), True)), "not relative"),
        (lambda: la.ddp(codec=Untold()), "codec Untold needs a repr that shows all its settings"),
        (lambda: la.power_sgd(2, codec=Untold()), "codec Untold needs a repr"),
        (lambda: replace(pairs, exchange=CodedMean(Int4(), True)), "NoLoCo are 2 times as long"),
        (lambda: la.Round(la.every(1), average, la.exchanges.LowRank(1)), "use GradientRound"),
        (
            lambda: la.Round(la.every(2), average, CodedMean(SMALL, True), optimizer_state),
            "a round of the optimizer's state needs an update",
        ),
    ]
    for make, message in cases:
        with pytest.raises(ValueError, match=message):
            make()
    assert isinstance(mean_of(Gathered(), relative=False), GatheredMean)
    assert isinstance(mean_of(Int4(), relative=False), CodedMean)


# -- what is not finite ----


@pytest.mark.parametrize("row", ["ddp, int4", "local", "diloco", "sparse", "ddp, float16"])
def test_what_is_not_finite_is_named_on_every_rank(row: str) -> None:
    """And leaves what is carried as it was. A scaler that is switched off changes nothing."""

    def run(rank: int, bad: float) -> tuple[str, bool]:
        model, optimizer = build(torch.float32)
        off = torch.amp.GradScaler("cpu", enabled=False)
        sync = la.attach(model, optimizer, ROWS[row][0], scaler=off)
        for t in range(1, 6):
            step_of(model, optimizer, rank, t)
        if rank == 1:
            with torch.no_grad():
                model.x[2][3, 4] = bad
        kept = repr(carried(sync))
        with pytest.raises(NotFiniteError, match=r"ranks \[1\]") as raised:
            step_of(model, optimizer, rank, 6)
        return str(raised.value), kept == repr(carried(sync))

    for bad in (math.nan, math.inf):
        found = la.simulate(partial(run, bad=bad), workers=3)
        assert all(kept for _, kept in found)
        assert "is nan" in found[1][0] or "is inf" in found[1][0]


LENGTH = 3 * 8 * 16
"""Elements for 3 ranks: 16 grains of `SMALL` for each."""
Told = tuple[list[str], bool]


def spoilt(link: Link, exchange: CodedMean, dtype: torch.dtype, places: Sequence[int]) -> Told:
    """What this rank is told of rounds in which rank 1 has an infinity at one of the ``places``
    each, and whether it keeps what it had."""
    clock = Clock(1, math.nan, 0, 0, link.size, link.rank)
    state = exchange.init(torch.zeros(LENGTH, dtype=dtype), exchange.region(link, LENGTH))
    x = torch.randn(LENGTH, generator=torch.Generator().manual_seed(link.rank), dtype=dtype)
    exchange.run(link, x.clone(), lambda mean: mean, clock, state)
    before, texts = {name: t.clone() for name, t in state.items()}, []
    for place in places:
        bad = x.clone()
        if link.rank == 1:
            bad[place] = math.inf
        with pytest.raises(NotFiniteError, match=r"ranks \[1\] of its link had NaN") as raised:
            exchange.run(link, bad, lambda mean: mean, clock, state)
        texts.append(str(raised.value))
    return texts, all(torch.equal(t, state[name]) for name, t in before.items())


def spoilt_over_gloo(rank: int, exchange: CodedMean, places: Sequence[int]) -> Told:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coding, "MIN_ROW_BYTES", 0)
        return spoilt(gloo.link_of(3), exchange, torch.float32, places)


@pytest.mark.parametrize("feedback", [1.0, 0.8, 0.0])
@pytest.mark.parametrize("relative", [True, False])
def test_what_is_not_finite_anywhere_changes_nothing(
    relative: bool, feedback: float, monkeypatch: pytest.MonkeyPatch, pool: gloo.Pool
) -> None:
    """Parts before it may have been sent by then; the next round is as if it had never been."""
    exchange, places = CodedMean(SMALL, relative, feedback), range(0, LENGTH, 17)
    monkeypatch.setattr(coding, "MIN_ROW_BYTES", 0)
    runs = [
        la.simulate(
            lambda _, d=dtype: spoilt(link_here(), exchange, d, places),  # type: ignore[misc]
            workers=3,
        )
        for dtype in (torch.float32, torch.float64)
    ]
    if feedback == 1.0:
        runs.append(pool.run(spoilt_over_gloo, exchange, places, ranks=3))
    for found in runs:
        assert all(kept for _, kept in found)
        assert all("element" in text and "is inf" in text for text in found[1][0])
        assert not any("element" in text for text in found[0][0])


@dataclass(frozen=True)
class Bursts(la.Update):
    """An outer step that is not finite, on the rank that owns the last slice."""

    def combine(self, mean: Tensor, state: State, clock: Clock) -> Tensor:
        return mean * math.inf if clock.worker == clock.workers - 1 else mean


@pytest.mark.parametrize("codec", [SMALL, TopK(k=4, chunk=32)])
def test_nobody_goes_on_from_an_outer_step_that_is_not_finite(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some slices of what is agreed on may have moved by then: it is of no use."""
    monkeypatch.setattr(coding, "MIN_ROW_BYTES", 0)

    def run(_: int) -> bool:
        model, optimizer = build()
        (average,) = la.local_sgd(1)
        burst = replace(average, update=Bursts(), exchange=CodedMean(codec, relative=True))
        sync = la.attach(model, optimizer, (burst,))
        before = flat(model)
        with pytest.raises(NotFiniteError, match=r"ranks \[2\] of its link"):
            optimizer.step()
        state = sync.state_dict()
        sync.detach()
        again = la.attach(*build(), (burst,))
        with pytest.raises(ValueError, match="'reference' is not finite: the state was saved"):
            again.load_state_dict(state)
        return torch.equal(before, flat(model))

    assert la.simulate(run, workers=3) == [True] * 3


class Ends(Wrapped):
    """Rank 1 loses the others after its first part."""

    def around(
        self, collective: str, amount: Cost, received: int
    ) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def like(self, link: Link) -> Link:
        return Ends(link)

    def all_gather(
        self, mine: Tensor, out: Tensor, owners: int | None = None, parts: Parts | None = None
    ) -> None:
        assert parts is not None
        use = parts.use

        def once(r: int, part: slice) -> None:
            assert use is not None
            use(r, part)
            if self.rank == 1:
                raise la.LinkError("lost")

        self.link.all_gather(mine, out, owners, replace(parts, use=once))


def test_nobody_goes_on_from_a_gathering_that_ended_half_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coding, "MIN_ROW_BYTES", 0)

    def run(rank: int) -> bool:
        model, optimizer = build(torch.float32)
        sync = la.attach(model, optimizer, la.local_sgd(1, codec=SMALL), link=Ends(link_here()))
        with pytest.raises(la.LinkError) if rank == 1 else contextlib.nullcontext():
            optimizer.step()
        (kept,) = sync.state_dict()["rounds"]
        return bool(kept["carried"][0]["reference"].isfinite().all())

    assert la.simulate(run, workers=3) == [True, False, True]
