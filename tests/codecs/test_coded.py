"""Coded rounds: against plain loops with the codec's rounding in them, what they conserve, what
they send, how they go on after a stop, and what they refuse."""

from __future__ import annotations

import contextlib
import importlib
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.algorithms.exchange import Exchange
from laconic.algorithms.exchanges import CodedMean, GatheredMean
from laconic.algorithms.update import Clock, State
from laconic.buckets import optimizer_state
from laconic.codecs import CODECS, Cast, Codec, Int4, Int8, TopK, codec_of
from laconic.engine import channel, gradient_rounds
from laconic.errors import NotFiniteError
from laconic.links import Link, Metered, Parts
from laconic.links.cost import Cost
from laconic.links.simulated import current_link
from laconic.links.wrapped import Wrapped

from tests.references import reference_coded as ref
from tests.support import gloo
from tests.support.training import Interrupted

STEPS = 14
SHAPES = ((7, 5), (7,), (11, 7), (11,), (3, 40))
CLOSE = 1e-9
MODULE = importlib.import_module("laconic.algorithms.exchanges.coding")


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
        values = [torch.from_numpy(p).to(dtype) for p in start()]
        self.x = nn.ParameterList([nn.Parameter(p) for p in values])


def build(dtype: torch.dtype = torch.float64) -> tuple[Vectors, torch.optim.Optimizer]:
    model = Vectors(dtype)
    return model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)


def step_of(model: Vectors, optimizer: torch.optim.Optimizer, rank: int, t: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate(t)
    optimizer.zero_grad()
    dtype = model.x[0].dtype
    wanted = [torch.from_numpy(v).to(dtype) for v in target(rank, t)]
    loss = sum(torch.log(torch.cosh(p - w)).sum() for p, w in zip(model.x, wanted, strict=True))
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def flat(model: Vectors) -> Any:
    return torch.cat([p.detach().reshape(-1) for p in model.x]).numpy().copy()


Trace = list[tuple[Any, Any]]


def train(
    rank: int,
    recipe: la.Recipe,
    link: la.links.Link | None = None,
    dtype: torch.dtype = torch.float64,
    consensus: bool = True,
    **options: Any,
) -> Trace:
    """(parameters, consensus) after every step."""
    model, optimizer = build(dtype)
    sync = la.attach(model, optimizer, recipe, link=link, **options)
    trace = []
    for t in range(1, STEPS + 1):
        step_of(model, optimizer, rank, t)
        mine, agreed = flat(model), None
        if consensus:
            with sync.consensus(mean=False):
                agreed = flat(model)
        trace.append((mine, agreed))
    sync.detach()
    return trace


@dataclass(frozen=True)
class Row:
    recipe: la.Recipe
    plain: Callable[[], ref.Algorithm]


def coded(name: str) -> ref.Codec:
    kinds = {"int8": partial(ref.int8, 256), "int4": partial(ref.int4, 256)}
    return kinds[name]() if name in kinds else ref.cast(name)


SMALL = Int4(block=8)
small = partial(ref.int4, 8)

ROWS = {
    "ddp, int4": Row(la.ddp(codec="int4"), lambda: ref.DDP(coded("int4"))),
    "ddp, int8": Row(la.ddp(codec="int8"), lambda: ref.DDP(coded("int8"))),
    "ddp, float16": Row(la.ddp(codec="float16"), lambda: ref.DDP(coded("float16"))),
    "ddp, small blocks": Row(la.ddp(codec=SMALL), lambda: ref.DDP(small())),
    "local": Row(la.local_sgd(3, codec=SMALL), lambda: ref.LocalSGD(3, small())),
    "local, late": Row(
        la.local_sgd(4, delay=3, codec=SMALL), lambda: ref.LocalSGD(4, small(), delay=3)
    ),
    "slowmo": Row(
        la.slowmo(la.local_sgd(2, codec=SMALL), 6, 0.6, 0.8, codec="int8"),
        lambda: ref.SlowMo(ref.LocalSGD(2, small()), 6, coded("int8"), 0.6, 0.8),
    ),
    "easgd": Row(la.easgd(3, 0.7, codec=SMALL), lambda: ref.EASGD(3, small(), 0.7)),
    "diloco": Row(la.diloco(3, 0.6, 0.8, codec=SMALL), lambda: ref.DiLoCo(3, small(), 0.6, 0.8)),
    "diloco, late": Row(
        la.diloco(4, 0.6, 0.8, delay=2, mix=0.3, codec=SMALL),
        lambda: ref.DiLoCo(4, small(), 0.6, 0.8, delay=2, mix=0.3),
    ),
    "streaming": Row(
        la.streaming_diloco(4, 2, 2, 0.3, SMALL, lr=0.6, momentum=0.8),
        lambda: ref.StreamingDiLoCo(4, 2, small(), 0.6, 0.8, delay=2, mix=0.3),
    ),
    "streaming, int2": Row(
        la.streaming_diloco(4, 2, 2, 0.3, la.codecs.Int2(4), lr=0.6, momentum=0.8),
        lambda: ref.StreamingDiLoCo(4, 2, ref.int2(4), 0.6, 0.8, delay=2, mix=0.3),
    ),
    "sparse": Row(
        la.sparse_loco(3, 5, 32, values="float32"),
        lambda: ref.SparseLoCo(3, 5, 32, ref.cast("float32")),
    ),
    "sparse, int8": Row(
        la.sparse_loco(3, 5, 32, decay=0.8, lr=0.7, values="int8"),
        lambda: ref.SparseLoCo(3, 5, 32, ref.int8(256), feedback=0.8, lr=0.7),
    ),
}


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("row", ROWS)
def test_equals_the_plain_loop(row: str, workers: int) -> None:
    """x of every worker and the consensus, at every step: with 8 values to a block and three
    workers, blocks, slices and padding all lie across the tensors' borders."""
    expected = ref.run(ROWS[row].plain(), workers, STEPS, start(), gradient, rate, 0.5)
    runs = la.simulate(lambda rank: train(rank, ROWS[row].recipe), workers=workers)
    for rank, run in enumerate(runs):
        for t, (mine, agreed) in enumerate(run):
            plain = np.concatenate([p.reshape(-1) for p in expected.workers[t][rank]])
            assert np.abs(mine - plain).max() < CLOSE, f"x of worker {rank} after step {t + 1}"
            assert np.abs(agreed - expected.consensus[t]).max() < CLOSE, f"after step {t + 1}"


@pytest.mark.parametrize("row", ["ddp, int4", "local", "diloco, late", "streaming", "sparse"])
def test_processes_do_what_the_simulation_does(pool: gloo.Pool, row: str) -> None:
    there = pool.run(over_gloo, row, ranks=3)
    here = la.simulate(lambda rank: train(rank, ROWS[row].recipe, dtype=torch.float32), workers=3)
    for theirs, ours in zip(there, here, strict=True):
        for (a, b), (c, d) in zip(theirs, ours, strict=True):
            assert np.array_equal(a, c) and np.array_equal(b, d)


def over_gloo(rank: int, row: str) -> Trace:
    return train(rank, ROWS[row].recipe, gloo.link_of(3), torch.float32)


AGREE = ["ddp, int4", "local", "slowmo", "diloco", "sparse"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", AGREE)
def test_replicas_are_alike_to_the_last_bit(row: str, dtype: torch.dtype) -> None:
    """After every round: for the periods here, after step 6."""

    def run(rank: int) -> list[Tensor]:
        model, optimizer = build(dtype)
        sync = la.attach(model, optimizer, ROWS[row].recipe)
        for t in range(1, 7):
            step_of(model, optimizer, rank, t)
        sync.detach()
        return [p.detach().clone() for p in model.x]

    first, *others = la.simulate(run, workers=3)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    assert first[0].dtype == dtype


# -- what is sent, and what is left, is what went in ----


def rounds_of(
    exchange: Exchange, rank: int, link: la.links.Link, count: int, length: int = 96
) -> tuple[Tensor, Tensor, State, Tensor]:
    """The sums over ``count`` rounds of what went in and what came out, the state that is left, and
    the last that came out; messages are random, of very different sizes."""
    generator = torch.Generator().manual_seed(rank)
    zeros = torch.zeros(length, dtype=torch.float64)
    x = torch.linspace(-1, 1, length, dtype=torch.float64)
    state = exchange.init(x.clone(), exchange.region(link, length))
    put, got, last = zeros.clone(), zeros.clone(), x
    for t in range(1, count + 1):
        size = 10.0 ** torch.randint(-3, 3, (length,), generator=generator)
        m = size * torch.randn(length, generator=generator, dtype=torch.float64)
        put += m
        clock = Clock(t, math.nan, t - 1, 0, link.size, link.rank)
        last = exchange.run(link, m.clone(), lambda mean: mean, clock, state).flat
        got += last
    return put, got, state, last


LOSSY: dict[str, Codec] = {
    "int4": Int4(block=8),
    "int2": CODECS["int2"],
    "e3m0": CODECS["e3m0"],
    "bfloat16": Cast("bfloat16"),
    "stochastic": Int4(block=8, stochastic=True),
}


@pytest.mark.parametrize("codec", LOSSY)
def test_gradients_sent_and_left_add_up(codec: str) -> None:
    """sum of what came out + owner's residual + mean residual = mean of the sums that went in."""
    exchange = CodedMean(LOSSY[codec], relative=False)
    length = 96 if exchange.multiple(3) <= 96 else exchange.multiple(3)

    def run(rank: int) -> Any:
        link = la.links.simulated.current_link.get()
        assert link is not None
        return rounds_of(exchange, rank, link, 20, length)

    found = la.simulate(run, workers=3)
    mean = torch.stack([put for put, *_ in found]).mean(0)
    lag = torch.cat([state["lag"] for _, _, state, _ in found])
    left = torch.stack([state["residual"] for _, _, state, _ in found]).mean(0)
    for _, got, _, _ in found:
        assert torch.equal(got, found[0][1])
        assert float((got + lag + left - mean).abs().max()) < 1e-9
    assert float(left.abs().max()) > 0


@pytest.mark.parametrize("k", [3, 32])
def test_sparse_messages_sent_and_left_add_up(k: int) -> None:
    exchange = GatheredMean(TopK(k, 32), relative=False)

    def run(rank: int) -> Any:
        link = la.links.simulated.current_link.get()
        assert link is not None
        return rounds_of(exchange, rank, link, 20)

    found = la.simulate(run, workers=3)
    mean = torch.stack([put for put, *_ in found]).mean(0)
    left = torch.stack([state["residual"] for _, _, state, _ in found]).mean(0)
    for _, got, _, _ in found:
        assert float((got + left - mean).abs().max()) < 1e-3 * float(mean.abs().max())
    assert (float(left.abs().max()) > 1) == (k == 3), "all that is kept whole is sent"


@pytest.mark.parametrize("delay", [0, 2])
def test_averaging_keeps_the_mean_but_for_what_is_left(delay: int) -> None:
    """local_sgd(3), without gradients: mean(x) + mean(e) + o never changes."""

    def run(rank: int) -> Any:
        model = nn.Linear(9, 11).double()
        nn.init.normal_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = la.attach(model, optimizer, la.local_sgd(3, delay=delay, codec=SMALL))
        generator = torch.Generator().manual_seed(rank)
        added = torch.zeros(110, dtype=torch.float64)
        begin = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        for _ in range(3 * 5 + delay):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            added -= torch.cat(
                [p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]
            )
            optimizer.step()
        (saved,) = sync.state_dict()["rounds"]
        (kept,) = saved["carried"]
        end = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        return begin + added, end, kept["residual"][:110], kept["lag"]

    found = la.simulate(run, workers=3)
    put, end, left = (torch.stack([f[i] for f in found]).mean(0) for i in range(3))
    lag = torch.cat([f[3] for f in found])[:110]
    assert float((end + left + lag - put).abs().max()) < 1e-10
    assert float(left.abs().max()) > 1e-3


@pytest.mark.parametrize("layout", [{}, {"nprocs_per_node": 2}])
@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("codec", ["int4", "top64"])
def test_averages_after_gradients_code_what_has_moved_since(
    codec: str, slow: bool, layout: dict[str, int]
) -> None:
    """And not all the way from the start: that would put every weight back to what the code leaves
    of it. Where workers' weights have drifted apart before, they meet."""

    def run(rank: int) -> tuple[torch.Tensor, ...]:
        model = nn.Linear(40, 30, bias=False)
        torch.manual_seed(0)
        nn.init.normal_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), 0.3)
        recipe = la.post_local_sgd(6, 4, codec=codec)
        la.attach(
            model, optimizer, la.slowmo(recipe, 3, momentum=0.5) if slow else recipe, **layout
        )
        worker = rank // layout.get("nprocs_per_node", 1)
        trace = []
        for t in range(1, 9):
            if t == 6 and worker == 1:
                with torch.no_grad():
                    model.weight += 1e-6  # as processors of another kind might
            if t == 7:
                optimizer.param_groups[0]["lr"] = 1e-4
            (model.weight - torch.full((30, 40), 3.0 + worker)).square().sum().backward()
            if t == 8:
                before = model.weight.detach() - 1e-4 * model.weight.grad
            optimizer.step()
            optimizer.zero_grad()
            trace.append(model.weight.detach().clone())
        return trace[5], before, trace[7]

    starts, before, ends = zip(*la.simulate(run, workers=4), strict=True)
    step = layout.get("nprocs_per_node", 1)
    mean = torch.stack(before[::step]).mean(0)
    moved = max(float((b - starts[0]).abs().max()) for b in before)
    assert 0 < moved < 0.01
    assert all(torch.equal(end, ends[0]) for end in ends)
    assert float((ends[0] - mean).abs().max()) < (moved / 6 if codec == "int4" else 2 * moved)


# -- identities ----


SAME = {
    "ddp": (la.ddp(), la.ddp(codec="float32"), 1e-7),
    "local": (la.local_sgd(3, delay=1), la.local_sgd(3, delay=1, codec="float32"), 1e-6),
    "diloco": (la.diloco(3, 0.6, 0.8), la.diloco(3, 0.6, 0.8, codec="float32"), 1e-6),
    "downpour": (la.downpour(3), la.downpour(3, codec="float32"), 1e-6),
    "post": (la.post_local_sgd(4, 3), la.post_local_sgd(4, 3, codec="float32"), 1e-6),
    "one fragment": (
        la.diloco(3, 0.4, 0.9),
        la.streaming_diloco(3, 1, 0, codec=None, lr=0.4, momentum=0.9),
        0.0,
    ),
    "one fragment, coded": (
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", SAME)
def test_special_cases_are_the_same(name: str, dtype: torch.dtype) -> None:
    one, other, close = SAME[name]
    if dtype == torch.float32 and close:
        close = 1e-5
    runs = [
        la.simulate(partial(train, recipe=r, dtype=dtype, consensus=False), workers=3)
        for r in (one, other)
    ]
    for mine, theirs in zip(*runs, strict=True):
        for (a, _), (b, _) in zip(mine, theirs, strict=True):
            assert np.abs(a - b).max() <= close


def test_fragments_hold_everything_once() -> None:
    """Any model, any number of fragments up to its elements: about equal bytes, nothing twice."""
    model = nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30), nn.Linear(30, 2))
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    for count in (1, 2, 3, 5, 8, 40):
        parts = [
            la.buckets.Fragment(k, count).segments(model, (weights, biases)) for k in range(count)
        ]
        for group, held in enumerate((weights, biases)):
            seen = [s for part in parts for s in part[group]]
            assert sum(s.stop - s.start for s in seen) == sum(p.numel() for p in held)
            spans = sorted((id(s.tensor), s.start, s.stop) for s in seen)
            for a, b in pairwise(spans):
                assert a[0] != b[0] or a[2] == b[1], "one stretch after the other"
            sizes = [sum(s.stop - s.start for s in part[group]) for part in parts]
            if sum(sizes) >= 8 * count:  # else single elements decide
                assert min(sizes) > 0 and max(sizes) <= 2 * -(-sum(sizes) // count)


def test_layers_stay_whole() -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(6)))
    params = list(blocks.parameters())
    for k in range(3):
        (held,) = la.buckets.Fragment(k, 3, "layers").segments(blocks, [params])
        wanted = [id(p) for block in blocks[2 * k : 2 * k + 2] for p in block.parameters()]
        assert [id(s.tensor) for s in held] == wanted


# -- bytes ----


def test_bytes_are_the_laws() -> None:
    """Scales and padding included: 250 elements are padded to 3 slices of 11 blocks of 8."""
    payload = SMALL.nbytes(264)
    assert payload == 33 * 6
    model = 4 * 250
    expected = {
        "ddp, small blocks": {"all_to_all": payload * 2 // 3, "all_gather": payload * 2 // 3},
        "sparse": {"gather": 2 * TopK(5, 32, Cast("float32")).nbytes(250)},
    }

    def run(rank: int, row: str) -> dict[str, int]:
        trained, optimizer = build(torch.float32)
        sync = la.attach(trained, optimizer, ROWS[row].recipe)
        for t in range(1, 3):
            step_of(trained, optimizer, rank, t)
        before = dict(sync.stats().bytes_by_collective)
        step_of(trained, optimizer, rank, 3)
        after = sync.stats().bytes_by_collective
        return {k: v - before.get(k, 0) for k, v in after.items() if v != before.get(k, 0)}

    for row, bytes_of in expected.items():
        for found in la.simulate(lambda rank, r=row: run(rank, r), workers=3):  # type: ignore[misc]
            assert found == bytes_of
    assert 2 * payload < 0.2 * 2 * model


@pytest.mark.parametrize("row", ["ddp, int4", "local", "diloco", "sparse", "easgd"])
def test_the_cost_model_knows_the_bytes(row: str) -> None:
    """`Exchange.cost` is what a round makes the link count."""
    (r,) = ROWS[row].recipe
    length = -(-250 // r.exchange.multiple(3)) * r.exchange.multiple(3)

    def run(rank: int) -> int:
        link = la.links.simulated.current_link.get()
        assert link is not None
        metered = Metered(link)
        rounds_of(r.exchange, rank, metered, 1, length)
        return metered.ledger.bytes_sent

    assert la.simulate(run, workers=3) == [r.exchange.cost(length, 8, 3).bytes] * 3


# -- going on after a stop ----


@pytest.mark.parametrize("row", ROWS)
def test_resume_in_mid_flight(row: str) -> None:
    """Residuals, references and messages under way are part of what is saved, bit for bit."""
    whole = la.simulate(lambda rank: train(rank, ROWS[row].recipe, consensus=False), workers=3)
    saves = (1, 4, 5, 6, 9)

    def saving(rank: int) -> Any:
        model, optimizer = build()
        sync = la.attach(model, optimizer, ROWS[row].recipe)
        kept = {}
        for t in range(1, STEPS + 1):
            step_of(model, optimizer, rank, t)
            if t in saves:
                parts = (model, optimizer, sync)
                kept[t] = [{**part.state_dict()} for part in parts]
                kept[t][0] = {k: v.clone() for k, v in kept[t][0].items()}
                kept[t][1] = torch.load(_copied(kept[t][1]), weights_only=True)
        return kept

    saved = la.simulate(saving, workers=3)

    def resumed(rank: int, after: int) -> list[Any]:
        model, optimizer = build()
        sync = la.attach(model, optimizer, ROWS[row].recipe)
        for part, state in zip((model, optimizer, sync), saved[rank][after], strict=True):
            part.load_state_dict(state)
        trace = []
        for t in range(after + 1, STEPS + 1):
            step_of(model, optimizer, rank, t)
            trace.append(flat(model))
        return trace

    for after in saves:
        for run, tail in zip(
            whole, la.simulate(partial(_call, resumed, after), workers=3), strict=True
        ):
            for (expected, _), mine in zip(run[after:], tail, strict=True):
                assert np.array_equal(expected, mine), f"saved after step {after}"


def _call(function: Callable[[int, int], Any], after: int, rank: int) -> Any:
    return function(rank, after)


def _copied(state: Any) -> Any:
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("row", ["ddp, small blocks", "diloco", "streaming, at once"])
def test_another_number_of_workers_goes_on_with_what_is_left(row: str, ranks: int) -> None:
    """What was agreed on, and the mean of what workers had not sent: so nothing gets lost."""
    recipe = {
        "streaming, at once": la.streaming_diloco(4, 2, 0, codec=SMALL),
        **{name: r.recipe for name, r in ROWS.items()},
    }[row]

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

    def totals(states: Sequence[Any]) -> list[Tensor]:
        """Mean residual and lag, of each bucket of each round."""
        found = []
        for kind in ("rounds", "gradients"):
            for index in range(len(states[0][kind])):
                for bucket, size in enumerate(states[0][kind][index]["sizes"]):
                    kept = [state[kind][index]["carried"][bucket] for state in states]
                    found.append(torch.stack([k["residual"][:size] for k in kept]).mean(0))
                    found.append(torch.cat([k["lag"] for k in kept])[:size])
        return found

    before = totals([state for _, state in saved])
    after = totals(la.simulate(second, workers=ranks))
    assert len(before) == len(after) > 0
    for a, b in zip(before, after, strict=True):
        assert float((a - b).abs().max()) < 1e-12 and float(a.abs().max()) > 0


def test_a_frozen_parameter_keeps_what_is_left_of_the_others() -> None:
    """Buckets are made anew when a parameter is frozen; what was not sent yet moves along."""

    def run(rank: int) -> tuple[Tensor, Tensor]:
        model, optimizer = build()
        sync = la.attach(model, optimizer, la.ddp(codec=SMALL))
        for t in range(1, 5):
            step_of(model, optimizer, rank, t)
        before = _owed(sync.state_dict()["gradients"], rank)
        model.x[1].requires_grad_(False)
        optimizer.zero_grad()
        sync.driver.run.gradients[0].refresh()
        after = _owed(sync.state_dict()["gradients"], rank)
        return before, after

    found = la.simulate(run, workers=3)
    before, after = (torch.stack([f[i] for f in found]).mean(0) for i in range(2))
    last = slice(11 + 120, 11 + 120 + 77)  # of the parameters in reverse, before the one frozen
    kept = torch.cat([before[: last.stop], before[last.stop + 7 :]])
    assert float((after - kept).abs().max()) < 1e-12 and float(kept.abs().max()) > 0


def test_a_parameter_frozen_between_steps_moves_no_more() -> None:
    """Though something was left of it, which the next pass might bring."""

    def run(rank: int) -> bool:
        model, optimizer = build()
        la.attach(model, optimizer, la.ddp(codec=SMALL))
        for t in range(1, 5):
            step_of(model, optimizer, rank, t)
        model.x[1].requires_grad_(False)
        before = model.x[1].detach().clone()
        for t in range(5, 7):
            step_of(model, optimizer, rank, t)
        return torch.equal(before, model.x[1]) and model.x[1].grad is None

    assert la.simulate(run, workers=2) == [True] * 2


def test_a_round_of_chosen_parameters_averages_them() -> None:
    """Its reference is what all started with, in every round."""
    chosen = la.Round(la.every(2), la.updates.Average(), CodedMean(SMALL, relative=True), some)

    def run(rank: int) -> list[Tensor]:
        model, optimizer = build()
        with la.attach(model, optimizer, (chosen,)):
            for t in range(1, 7):
                step_of(model, optimizer, rank, t)
            return [x.detach().clone() for x in model.x]

    one, other = la.simulate(run, workers=2)
    same = [torch.equal(a, b) for a, b in zip(one, other, strict=True)]
    assert same == [True, True, *[False] * (len(same) - 2)]
    (alone,) = la.simulate(run, workers=1)
    assert float((one[0] - alone[0]).abs().max()) > 1e-3, "that of both, not of one"


def some(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """The first two parameters."""
    return [dict(list(model.named_parameters())[:2])]


def late(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """Momenta, of which there are none at first."""
    return optimizer_state(model, optimizer)


@pytest.mark.parametrize("delay", [0, 1])
def test_coded_rounds_of_what_comes_later_are_refused(delay: int) -> None:
    """Their reference would be another one on every worker."""
    exchange = CodedMean(SMALL, relative=True)
    with pytest.raises(ValueError, match="a round of the optimizer's state needs an update"):
        la.Round(la.every(2), la.updates.Average(), exchange, optimizer_state)
    hidden = la.Round(la.every(2), la.updates.Average(), exchange, late, delay=delay)

    def run(rank: int) -> str:
        model, optimizer = build()
        la.attach(model, optimizer, (hidden,))
        step_of(model, optimizer, rank, 1)
        with pytest.raises(ValueError, match="had nothing then") as told:
            step_of(model, optimizer, rank, 2)
        return str(told.value)

    one, other = la.simulate(run, workers=2)
    assert one == other


def _owed(states: Any, rank: int) -> Tensor:
    """The residual, and the owner's as n times its slice."""
    (kept,) = states[0]["carried"]
    total: Tensor = kept["residual"].clone()
    (begin,) = states[0]["starts"]
    total[begin : begin + len(kept["lag"])] += 3 * kept["lag"]
    return total[: states[0]["sizes"][0]]


# -- what is refused ----


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("row", ["ddp, int4", "local", "diloco", "sparse", "ddp, float16"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_is_not_finite_is_named_on_every_rank(
    row: str, bad: float, dtype: torch.dtype
) -> None:
    messages: dict[int, str] = {}
    untouched: dict[int, bool] = {}

    def run(rank: int) -> None:
        model, optimizer = build(dtype)
        sync = la.attach(model, optimizer, ROWS[row].recipe)
        for t in range(1, 6):
            step_of(model, optimizer, rank, t)
        if rank == 1:
            with torch.no_grad():
                model.x[2][3, 4] = bad
        kept = repr(_carried(sync))
        try:
            step_of(model, optimizer, rank, 6)
        except NotFiniteError as error:
            messages[rank] = str(error)
        untouched[rank] = kept == repr(_carried(sync))

    la.simulate(run, workers=3)
    assert sorted(messages) == [0, 1, 2]
    assert all("ranks [1]" in text for text in messages.values())
    assert "is nan" in messages[1] or "is inf" in messages[1]
    assert all(untouched.values())


def _carried(sync: la.Synchronizer) -> list[Any]:
    state = sync.state_dict()
    return [round["carried"] for kind in ("rounds", "gradients") for round in state[kind]]


def test_a_scaler_sees_what_is_not_finite() -> None:
    """It comes to all ranks, as it does uncoded, so that all of them skip the step."""

    def run(rank: int) -> tuple[bool, bool]:
        model, optimizer = build(torch.float32)
        scaler = torch.amp.GradScaler("cpu")
        sync = la.attach(model, optimizer, la.ddp(codec="int4"), scaler=scaler)
        optimizer.zero_grad()
        loss = (model.x[0] * (math.inf if rank == 1 else 1.0)).sum() + model.x[1].sum()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        before = [p.detach().clone() for p in model.x]
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.x, strict=True))
        (state,) = sync.state_dict()["gradients"]
        clean = all(not k["residual"].any() for k in state["carried"])
        return moved, clean and sync.step == 1

    assert la.simulate(run, workers=2) == [(False, True)] * 2


def test_a_scaler_that_is_switched_off_sees_nothing() -> None:
    """It takes every step, so what is not finite is an error, as without it."""

    def run(rank: int) -> str:
        model, optimizer = build(torch.float32)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        la.attach(model, optimizer, la.ddp(codec="int4"), scaler=scaler)
        loss = (model.x[0] * (math.inf if rank == 1 else 1.0)).sum() + model.x[1].sum()
        with pytest.raises(NotFiniteError) as caught:
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
        return str(caught.value)

    assert all("ranks [1]" in said for said in la.simulate(run, workers=2))


def test_wrong_options_are_named() -> None:
    with pytest.raises(ValueError, match="codec must be one of 'float32', 'bfloat16'"):
        la.ddp(codec="int5")
    with pytest.raises(ValueError, match="codec"):
        la.local_sgd(4, codec=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing to code"):
        la.slowmo(None, average=False, codec="int4")
    with pytest.raises(ValueError, match="fragments must be at most the period, 3, not 4"):
        la.streaming_diloco(3)
    with pytest.raises(ValueError, match="merge must be one of 'mix'"):
        la.diloco(3, delay=1, merge="add")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mix"):
        la.diloco(3, delay=1, mix=1.5)
    with pytest.raises(ValueError, match="by must be one of"):
        la.streaming_diloco(8, by="names")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="feedback"):
        CodedMean(Int8(), relative=True, feedback=1.5)
    with pytest.raises(ValueError, match="not relative"):
        la.GradientRound(la.every(1), la.updates.Average(), CodedMean(Int8(), True))
    assert codec_of(Int8()) == codec_of("int8")


# -- tensors larger than a bucket, stochastic rounding, workers of several ranks ----


@pytest.mark.parametrize("recipe", [la.ddp(codec="int8"), la.local_sgd(2, codec="int8")])
def test_a_tensor_larger_than_a_bucket(recipe: la.Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gradient_rounds, channel, la.buckets):
        monkeypatch.setattr(module, "BUCKET_BYTES", 256)
    monkeypatch.setattr(gradient_rounds, "LEAST_BYTES", 64)
    dense = {1: la.ddp(), 2: la.local_sgd(2)}[2 if isinstance(recipe[0], la.Round) else 1]
    runs = [
        la.simulate(lambda rank, r=r: train(rank, r, consensus=False), workers=3)  # type: ignore[misc]
        for r in (dense, recipe)
    ]
    for mine, theirs in zip(*runs, strict=True):
        assert np.abs(mine[-1][0] - theirs[-1][0]).max() < 0.05


@pytest.mark.parametrize("total", [1, 2**18, 3 * 2**18, 865_280 * 4, 30 * 2**20, 10**9])
def test_coded_gradients_leave_no_crumbs(total: int) -> None:
    sizes = gradient_rounds.bucket_sizes(CodedMean(Int4(), relative=False), total)
    assert sum(sizes) == total
    assert len(sizes) == max(min(-(-total // 2**18), 3), -(-total // la.buckets.BUCKET_BYTES))
    assert all(size % 2**18 == 0 for size in sizes[:-1])


def test_stochastic_rounding_draws_anew_and_alike_after_a_resume() -> None:
    exchange = CodedMean(Int4(block=8, stochastic=True), relative=False, feedback=0.0)

    def run(rank: int) -> list[Tensor]:
        link = la.links.simulated.current_link.get()
        assert link is not None
        outs = []
        for t in (1, 2, 1):
            m = torch.linspace(-1, 1, 48)
            clock = Clock(t, math.nan, 0, 0, link.size, link.rank)
            outs.append(exchange.run(link, m, lambda mean: mean, clock, {}).flat)
        return outs

    for first, second, again in la.simulate(run, workers=2):
        assert torch.equal(first, again) and not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("codec", [Int4(), Int8(), Int4(stochastic=True), Cast("float16"), TopK()])
def test_what_is_taken_off_is_what_is_decoded(codec: Codec, dtype: torch.dtype) -> None:
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    left = x.clone()
    payload = codec.encode(left, torch.Generator().manual_seed(1), subtract=True)
    assert torch.equal(left, x - codec.decode(payload, len(x)))


def test_every_message_is_rounded_by_numbers_of_its_own() -> None:
    """Of each worker, step, bucket and way, and of another run of the same seed the same."""
    generator = sys.modules["laconic.algorithms.exchanges.coding"].generator_for
    seeds = [
        generator(Clock(t, math.nan, 0, 0, 3, worker, bucket=bucket), torch.device("cpu"), way)
        for t, worker, bucket, way in product((1, 2), (0, 1, 2), (0, 1), (0, 1))
    ]
    assert len({g.initial_seed() for g in seeds}) == len(seeds)


@pytest.mark.parametrize("row", ["local", "diloco", "streaming"])
def test_workers_of_two_ranks(row: str) -> None:
    """Each rank of a worker carries, and keeps what is left of, its part: the worker's are alike,
    and close to two workers of one rank on the mean of their gradients."""

    def run(rank: int) -> Any:
        model, optimizer = build()
        sync = la.attach(model, optimizer, ROWS[row].recipe, nprocs_per_node=2)
        for t in range(1, 9):
            step_of(model, optimizer, rank, t)
        return flat(model), sum(
            len(k.get("reference", ())) for kept in _carried(sync) for k in kept
        )

    a, b, c, d = la.simulate(run, workers=4)
    assert np.array_equal(a[0], b[0]) and np.array_equal(c[0], d[0])
    assert 2 * a[1] >= 250 > a[1], "half the model"


def test_late_and_out_of_order_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that arrive long after they are due, beside training that goes on, fold into the
    same run."""
    recipe = la.streaming_diloco(4, 2, 2, 0.3, SMALL, lr=0.6, momentum=0.8)
    quick = la.simulate(lambda rank: train(rank, recipe, consensus=False), workers=2)
    slow = la.simulate(
        lambda rank: train(rank, recipe, consensus=False),
        workers=2,
        link=lambda link: la.links.Throttled(link, "1mbit", "3ms"),
    )
    for mine, theirs in zip(quick, slow, strict=True):
        for (a, _), (b, _) in zip(mine, theirs, strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize(("workers", "inner"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("switched", [False, True])
def test_residuals_follow_the_scale_of_the_loss(workers: int, inner: int, switched: bool) -> None:
    """At half the scale, what was not sent is half as much: unscaled gradients are as without a
    scaler, but for rounding; also where another recipe sends what is left."""

    def run(rank: int, scales: list[float] | None) -> list[Tensor]:
        model, optimizer = build(torch.float32)
        scaler = None if scales is None else torch.amp.GradScaler("cpu", init_scale=1.0)
        if scaler is not None:
            scaler.scale(torch.zeros(()))  # which makes its scale
        recipe = la.ddp(codec=SMALL)
        sync = la.attach(model, optimizer, recipe, nprocs_per_node=inner, scaler=scaler)
        found = []
        for t in range(1, 7):
            if switched and t == 4:
                sync.switch(la.ddp(codec=Int4(block=16)))
            optimizer.zero_grad()
            wanted = [torch.from_numpy(v).float() for v in target(rank, t)]
            pairs = zip(model.x, wanted, strict=True)
            loss = torch.stack([torch.log(torch.cosh(p - w)).sum() for p, w in pairs]).sum()
            scale = 1.0 if scales is None else scales[t - 1]
            if scaler is not None:
                scaler.update(scale)
            (loss * scale).backward()  # type: ignore[no-untyped-call]
            gradients = [p.grad for p in model.x if p.grad is not None]
            found.append(torch.cat([g.reshape(-1) / scale for g in gradients]))
        sync.detach()
        return found

    scales = [4.0, 4.0, 1024.0, 0.5, 0.5, 64.0]
    plain = la.simulate(lambda rank: run(rank, None), workers=workers)
    scaled = la.simulate(lambda rank: run(rank, scales), workers=workers)
    for a, b in zip(plain[0], scaled[0], strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_parameter_thawed_in_the_step_is_averaged_once() -> None:
    """After the backward pass, which has averaged the others already: those are left alone."""

    def run(rank: int) -> tuple[Tensor, Tensor]:
        model, optimizer = build()
        model.x[0].requires_grad_(False)
        la.attach(model, optimizer, la.ddp(codec=SMALL))
        step_of(model, optimizer, rank, 1)
        optimizer.zero_grad()
        torch.cat([p.reshape(-1) * (rank + 1) for p in model.x]).sum().backward()  # type: ignore[no-untyped-call]
        model.x[0].requires_grad_(True)
        model.x[0].grad = torch.full_like(model.x[0], rank + 1.0)
        assert model.x[1].grad is not None
        before = model.x[1].grad.clone()
        optimizer.step()
        assert torch.equal(before, model.x[1].grad)
        return model.x[0].grad, model.x[0].detach().clone()

    (a, x), (b, y) = la.simulate(run, workers=2)
    assert torch.equal(a, torch.full_like(a, 1.5)) and torch.equal(a, b) and torch.equal(x, y)


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
            torch.stack([(scale * p).square().sum() for p in model.x]).sum().backward()  # type: ignore[no-untyped-call]
            if t == 3 and how == "late":
                late.requires_grad_(True).grad = torch.full_like(late, scale)
            held = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(held, 0.1)
            optimizer.step()
            found.append(torch.cat([p.detach().reshape(-1) for p in model.x]))
        return found

    for x, y in zip(*la.simulate(run, workers=2), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("codec", [None, SMALL])
def test_an_overflow_in_a_parameter_that_joins_is_skipped_by_all(codec: Codec | None) -> None:
    def run(rank: int) -> tuple[list[Tensor], float]:
        model, optimizer = build()
        late = model.x[0]
        late.requires_grad_(False)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        la.attach(model, optimizer, la.ddp(codec=codec), scaler=scaler)
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
            found.append(torch.cat([p.detach().reshape(-1) for p in model.x]))
        return found, scaler.get_scale()

    (a, scale), (b, other) = la.simulate(run, workers=2)
    assert scale == other == 2.0
    assert all(torch.equal(x, y) and bool(x.isfinite().all()) for x, y in zip(a, b, strict=True))
    assert torch.equal(a[1], a[2]) and not torch.equal(a[2], a[3]), "one step is skipped"


def test_parameters_that_cannot_join_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no memory for what is kept of them: the next step finds all as it was."""

    def run(rank: int) -> tuple[Tensor, Tensor]:
        model, optimizer = build()
        model.x[0].requires_grad_(False)
        sync = la.attach(model, optimizer, la.ddp(codec=SMALL))
        step_of(model, optimizer, rank, 1)
        (gradients,) = sync.driver.run.gradients
        hooks, owed = dict(gradients._hooks), gradients.left_over()
        model.x[0].requires_grad_(True)
        with monkeypatch.context() as patched:
            patched.setattr(gradients, "_open", lambda *_: fail())
            with pytest.raises(MemoryError):
                gradients.refresh()
        again = gradients.left_over()
        assert gradients._hooks == hooks and again.keys() == owed.keys()
        assert all(torch.equal(again[key], value) for key, value in owed.items())
        assert gradients.refresh() and len(gradients._hooks) == len(hooks) + 1
        step_of(model, optimizer, rank, 2)
        return model.x[0].detach().clone(), model.x[1].detach().clone()

    (a, x), (b, y) = la.simulate(run, workers=2)
    assert torch.equal(a, b) and torch.equal(x, y)


def fail() -> None:
    raise MemoryError


def test_a_codec_tells_its_settings() -> None:
    """By which ranks are compared: two of other settings must not look alike."""

    class Untold(Int4):
        __repr__ = object.__repr__

    makers = (
        lambda c: la.ddp(codec=c),
        lambda c: la.power_sgd(2, codec=c),
        lambda c: TopK(values=c),
    )
    for make in makers:
        with pytest.raises(
            ValueError, match="codec Untold needs a repr that shows all its settings"
        ):
            make(Untold())


def test_a_parameter_thawed_in_the_step_that_nobody_used_keeps_no_gradient() -> None:
    """So that its optimizer leaves it alone, weight decay included."""

    def run(rank: int) -> bool:
        model, optimizer = build()
        model.x[0].requires_grad_(False)
        la.attach(model, optimizer, la.ddp(codec=SMALL))
        step_of(model, optimizer, rank, 1)
        optimizer.zero_grad()
        sum(p.sum() for p in list(model.x)[1:]).backward()  # type: ignore[union-attr]
        model.x[0].requires_grad_(True)
        optimizer.step()
        return model.x[0].grad is None

    assert la.simulate(run, workers=2) == [True, True]


def test_a_thawed_parameter_gets_what_the_update_makes_of_its_mean() -> None:
    """Under DeMo its sign, as the others."""

    def run(rank: int) -> Tensor:
        model, optimizer = build()
        model.x[0].requires_grad_(False)
        la.attach(model, optimizer, la.demo())
        step_of(model, optimizer, rank, 1)
        optimizer.zero_grad()
        torch.cat([p.reshape(-1) for p in model.x]).sum().backward()  # type: ignore[no-untyped-call]
        model.x[0].requires_grad_(True)
        model.x[0].grad = torch.full_like(model.x[0], rank + 1.0)
        optimizer.step()
        return model.x[0].grad

    for gradient in la.simulate(run, workers=2):
        assert torch.equal(gradient, torch.ones_like(gradient))


def aborted(rank: int, tried: bool) -> list[Tensor]:
    """Gradients after two steps, before the second of which a pass raises that has sent all."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    with la.attach(model, optimizer, la.ddp()):
        for t in range(2):
            x = torch.full((2, 300), 1.0 + t)
            if tried and t:
                time.sleep(0.3 * (rank == 1))  # the others have sent theirs, and go on
                with pytest.raises(RuntimeError, match="interrupted"):
                    (10 * model(Interrupted.apply(x.requires_grad_())).square().sum()).backward()
                optimizer.zero_grad()
                x = x.detach()
            model(x * (rank + 1)).square().sum().backward()
            optimizer.step()
            found.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
            optimizer.zero_grad()
    return found


def test_a_pass_that_raised_leaves_its_room_alone_until_it_was_sent(pool: gloo.Pool) -> None:
    straight = pool.run(aborted, False, ranks=4)
    for own, other in zip(straight, pool.run(aborted, True, ranks=4), strict=True):
        for a, b in zip(own, other, strict=True):
            assert torch.equal(a, b)


def test_messages_of_several_models_are_not_coded() -> None:
    (pairs,) = la.noloco(4)
    with pytest.raises(ValueError, match="those of NoLoCo are 2 times as long"):
        replace(pairs, exchange=CodedMean(Int4(), relative=True))


def test_exchanges_for_gradients_are_refused_on_parameters() -> None:
    with pytest.raises(ValueError, match="LowRank is for rounds on gradients: use GradientRound"):
        la.Round(la.every(1), la.updates.Average(), la.exchanges.LowRank(1))


@pytest.mark.parametrize("codec", [None, "int4"])
def test_sending_begins_in_the_backward_pass_whatever_the_groups(codec: str | None) -> None:
    """Parameters without weight decay, which are in all layers, are a group of their own."""

    def one(rank: int) -> tuple[int, int]:
        torch.manual_seed(0)
        layers = [nn.Linear(300, 300) for _ in range(8)]
        model = nn.Sequential(*layers)
        groups = [
            {"params": [layer.weight for layer in layers], "weight_decay": 0.1},
            {"params": [layer.bias for layer in layers], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        sent = []
        layers[3].weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _: sent.append(sync.stats().bytes_sent)
        )
        sync = la.attach(model, optimizer, la.ddp(codec=codec))
        before = sync.stats().bytes_sent
        model(torch.randn(4, 300)).square().mean().backward()
        return sent[0] - before, sync.stats().bytes_sent - before

    for early, total in la.simulate(one, workers=2):
        assert early > total / 5, "of the half whose gradients are there"


# -- at rest, and within a worker ----


def test_nothing_is_owed_twice_after_finish() -> None:
    """finish() hands out the anchor as it is, what its owner had still to send included. With outer
    steps of size 1 x then is the mean of all that was sent."""

    def run(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        model, optimizer = build()
        recipe = la.diloco(2, lr=1.0, momentum=0.0, codec=SMALL)
        sync = la.attach(model, optimizer, recipe)
        for t in range(1, 5):
            step_of(model, optimizer, rank, t)
        sync.finish(mean=False)
        agreed = torch.from_numpy(flat(model))
        (before,) = sync.state_dict()["rounds"]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.zero_grad()
        optimizer.step()
        optimizer.step()
        with sync.consensus(mean=False):
            after = torch.from_numpy(flat(model))
        (left,) = sync.state_dict()["rounds"]
        residuals = [s["carried"][0]["residual"][: s["sizes"][0]] for s in (before, left)]
        return agreed, after, residuals[0] - residuals[1]

    found = la.simulate(run, workers=3)
    sent = torch.stack([f[2] for f in found]).mean(0)
    agreed, after, _ = found[0]
    assert float(sent.abs().max()) > 0
    assert float((after - agreed - sent).abs().max()) < 1e-12


def test_what_one_rank_of_a_worker_carries_is_refused_by_the_others() -> None:
    refused = []

    def run(rank: int) -> None:
        model, optimizer = build()
        sync = la.attach(model, optimizer, la.local_sgd(1, codec="int4"), nprocs_per_node=2)
        step_of(model, optimizer, rank, 1)
        with torch.no_grad():
            model.x[0].view(-1)[0] = math.nan  # in what the first rank of each worker carries
        try:
            optimizer.zero_grad()
            optimizer.step()
        except NotFiniteError:
            refused.append(rank)
        assert sync.step >= 1

    la.simulate(run, workers=4)
    assert sorted(refused) == [0, 1, 2, 3]


# -- what an exchange lends --


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fold_may_overwrite_what_arrived(codec: Codec | str, dtype: torch.dtype) -> None:
    """And not what the workers agreed on, which the next message builds upon."""
    average = la.local_sgd(1, codec=codec)
    spoils = (replace(average[0], update=Spoils()),)
    runs = [
        la.simulate(partial(train, recipe=recipe, dtype=dtype), workers=3)
        for recipe in (average, spoils)
    ]
    assert same(runs[0], runs[1])


# -- part by part, or all before the first is sent --

IN_PARTS = ("ddp, small blocks", "local", "local, late", "slowmo", "easgd", "diloco", "streaming")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("row", IN_PARTS)
def test_coding_part_by_part_changes_nothing(
    row: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = partial(train, recipe=ROWS[row].recipe, dtype=dtype)
    whole = la.simulate(run, workers=3)
    monkeypatch.setattr(MODULE, "MIN_ROW_BYTES", 0)
    assert same(la.simulate(run, workers=3), whole)


def test_ranks_may_cut_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those with a card and those without do."""
    monkeypatch.setattr(MODULE, "MIN_ROW_BYTES", 0)
    run = partial(train, recipe=ROWS["diloco"].recipe, dtype=torch.float32)
    alike = la.simulate(run, workers=3)
    parts = wayward(monkeypatch)
    assert same(la.simulate(run, workers=3), alike)
    assert set(parts) == {1, 4}


def wayward(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has every third row cut in one part; returns in how many others were."""
    of, parts = MODULE._Split.of, []

    def cut(*arguments: Any) -> Any:
        found = of(*arguments)
        found = replace(found, ends=found.ends[-1:]) if len(parts) % 3 == 0 else found
        parts.append(len(found.ends))
        return found

    monkeypatch.setattr(MODULE._Split, "of", cut)
    return parts


@pytest.mark.parametrize(
    ("relative", "delay", "parts"), [(True, 0, 4), (True, 2, 1), (False, 0, 1)]
)
def test_what_goes_on_beside_the_training_is_cut_where_it_is_longer(
    relative: bool, delay: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 16 grains, of 6 bytes each, and of 64."""
    monkeypatch.setattr(MODULE, "MIN_ROW_BYTES", 96)
    of, found = MODULE._Split.of, []

    def told(*arguments: Any) -> Any:
        found.append(of(*arguments))
        return found[-1]

    monkeypatch.setattr(MODULE._Split, "of", told)
    exchange = CodedMean(SMALL, relative, 0.0)

    def run(grains: int) -> None:
        x = torch.zeros(grains * SMALL.block)
        clock = Clock(1, math.nan, 0, delay, 1)
        exchange.run(simulated_link(), x, lambda mean: mean, clock, exchange.init(x, slice(0, 0)))

    for grains, expected in ((16, parts), (64, 4)):
        found.clear()
        la.simulate(lambda _, grains=grains: run(grains), workers=1)
        assert {len(cut.ends) for cut in found} == {expected}


LENGTH = 3 * 8 * 16
"""Elements for 3 ranks: 16 grains of `SMALL` for each."""
Told = tuple[list[str], bool]


def spoilt(link: Link, exchange: CodedMean, dtype: torch.dtype, places: Sequence[int]) -> Told:
    """What this rank is told of rounds in which rank 1 has an infinity at one of the ``places``
    each, and whether it keeps what it had."""
    MODULE.MIN_ROW_BYTES, least = 0, MODULE.MIN_ROW_BYTES
    try:
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
    finally:
        MODULE.MIN_ROW_BYTES = least


def check_told(found: Sequence[Told], places: Sequence[int]) -> None:
    assert all(kept for _, kept in found)
    late = 0
    for place, said, of_others in zip(places, found[1][0], found[0][0], strict=True):
        told = re.search(r"element (\d+) is inf(?:, counting from element (\d+))?", said)
        assert told is not None
        index, start = told.groups()
        assert int(index) + int(start or 0) == place
        assert "element" not in of_others
        late += start is not None
    assert late > len(places) // 2


@pytest.mark.parametrize("feedback", [1.0, 0.8, 0.0])
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_finite_anywhere_changes_nothing(
    dtype: torch.dtype, relative: bool, feedback: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts before it may have been sent by then; the next round is as if it had never been. So
    it is where ranks cut at other places."""
    exchange, places = CodedMean(SMALL, relative, feedback), range(0, LENGTH, 7)

    def run(rank: int) -> Told:
        return spoilt(simulated_link(), exchange, dtype, places)

    check_told(la.simulate(run, workers=3), places)
    wayward(monkeypatch)
    assert all(kept for _, kept in la.simulate(run, workers=3))


def spoilt_over_gloo(rank: int, relative: bool, places: Sequence[int]) -> Told:
    return spoilt(gloo.link_of(3), CodedMean(SMALL, relative), torch.float32, places)


@pytest.mark.parametrize("relative", [True, False])
def test_what_is_not_finite_over_processes(pool: gloo.Pool, relative: bool) -> None:
    places = range(0, LENGTH, 37)
    check_told(pool.run(spoilt_over_gloo, relative, places, ranks=3), places)


@dataclass(frozen=True)
class Careful(Int8):
    """Decodes nothing that it has not coded."""

    def encode_flat(self, x: Tensor, payload: Tensor, *rest: Any) -> Tensor | bool:
        payload.fill_(7)
        return bool(x.isfinite().all())

    def mean_of_rows(self, rows: Tensor, out: Tensor) -> None:
        assert bool((rows == 7).all())
        out.fill_(0.0)


def test_after_a_refusal_no_code_goes_out_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", torch.zeros)  # whatever was in that memory before
    exchange = CodedMean(Careful(block=8), False, 0.0)

    def run(rank: int) -> list[str]:
        return spoilt(simulated_link(), exchange, torch.float32, range(0, LENGTH, 7))[0]

    assert len(la.simulate(run, workers=3)[0]) == len(range(0, LENGTH, 7))


@dataclass(frozen=True)
class Unruly(Int8):
    """Breaks the rule that no code is bytes of 255 alone, but at both ends of a row."""

    def encode_flat(self, x: Tensor, payload: Tensor, *rest: Any) -> Tensor | bool:
        payload.fill_(255 if len(x) > 2 * self.grain else 1)
        return True

    def decode_flat(self, payload: Tensor, out: Tensor, add: bool) -> None:
        out.copy_(out + payload[0] if add else payload[0].float().expand_as(out))

    def mean_of_rows(self, rows: Tensor, out: Tensor) -> None:
        out.copy_(rows[0, 0].float().expand_as(out))


@pytest.mark.parametrize("relative", [True, False])
def test_a_part_that_looks_refused_is_used_where_its_row_was_not(
    relative: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "MIN_ROW_BYTES", 0)
    exchange, means = CodedMean(Unruly(block=8), relative, 0.0), []

    def combine(mean: Tensor) -> Tensor:
        means.append(mean.clone())
        return mean

    def run(rank: int) -> Tensor:
        link = simulated_link()
        clock = Clock(1, math.nan, 0, 0, link.size, link.rank)
        state = exchange.init(torch.zeros(LENGTH), exchange.region(link, LENGTH))
        return exchange.run(link, torch.zeros(LENGTH), combine, clock, state).flat.clone()

    found = la.simulate(run, workers=3)
    row = torch.tensor([1.0] * 16 + [255.0] * 96 + [1.0] * 16)
    assert len(means) == 3 and all(torch.equal(mean, row) for mean in means)
    if relative:
        assert all(torch.equal(x, row.repeat(3)) for x in found)


def parts_over_gloo(rank: int, row: str) -> Trace:
    MODULE.MIN_ROW_BYTES, least = 0, MODULE.MIN_ROW_BYTES
    try:
        return train(rank, ROWS[row].recipe, gloo.link_of(3), torch.float32)
    finally:
        MODULE.MIN_ROW_BYTES = least


@pytest.mark.parametrize("row", IN_PARTS)
def test_parts_over_processes(pool: gloo.Pool, row: str) -> None:
    threads = la.simulate(partial(train, recipe=ROWS[row].recipe, dtype=torch.float32), workers=3)
    assert same(pool.run(parts_over_gloo, row, ranks=3), threads)


Seen = tuple[list[tuple[int, int]], list[tuple[int, int]], Tensor]


def in_parts(rank: int, link: Link, call: str) -> Seen:
    """Which parts of rows are filled and used, in which order, and how each looked when it was
    used; rank r is slower, the greater r is."""
    n, owners = link.size, 2 if call == "gather from two" else link.size
    filled: list[tuple[int, int]] = []
    used: list[tuple[int, int]] = []
    x, out, seen = (torch.full((rows, 5), -1.0) for rows in (n, owners, owners))
    source = x if call == "all-to-all" else out

    def fill(r: int, part: slice) -> None:
        time.sleep(0.01 * rank)
        filled.append((r, part.stop))
        source[r, part] = torch.arange(5.0)[part] + 100 * rank + 10 * r

    def use(r: int, part: slice) -> None:
        used.append((r, part.stop))
        seen[r, part] = out[r, part]

    parts = Parts([2, 3, 5], fill, use)
    if call == "all-to-all":
        link.all_to_all(x, out, parts)
    else:
        mine = out[rank] if rank < owners else torch.empty(0)
        if rank == 0:  # where it is not its own place
            source = torch.full((1, 5), -1.0)
            mine = source[0]
        link.all_gather(mine, out.view(-1), owners, parts)
    return filled, used, seen


def simulated_link() -> Link:
    link = current_link.get()
    assert link is not None
    return link


def in_parts_over_gloo(rank: int, n: int, call: str) -> Seen:
    return in_parts(rank, gloo.link_of(n), call)


@pytest.mark.parametrize("call", ["all-to-all", "gather", "gather from two"])
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("processes", [True, False])
def test_parts_are_filled_and_used_once_each(
    pool: gloo.Pool, processes: bool, n: int, call: str
) -> None:
    if processes:
        found = pool.run(in_parts_over_gloo, n, call, ranks=n)
    else:
        found = la.simulate(lambda rank: in_parts(rank, simulated_link(), call), workers=n)
    for rank, (filled, used, seen) in enumerate(found):
        to = [(rank + hop) % n for hop in range(1, n + 1)]
        come = to[::-1]
        assert come[0] == rank, "its own first"
        if call != "all-to-all":
            to = [rank] if rank < len(seen) else []
        come = [r for r in come if r < len(seen)]
        assert filled == [(r, end) for end in (2, 3, 5) for r in to]
        assert used == [(r, end) for end in (2, 3, 5) for r in come]
        for r, row in enumerate(seen):
            says = 100 * r + 10 * (rank if call == "all-to-all" else r)
            assert torch.equal(row, torch.arange(5.0) + says)


@dataclass(frozen=True)
class Bursts(la.Update):
    """An outer step that is not finite, on the rank that owns the last slice."""

    def combine(self, mean: Tensor, state: State, clock: Clock) -> Tensor:
        return mean * math.inf if clock.worker == clock.workers - 1 else mean


@pytest.mark.parametrize("codec", [SMALL, TopK(k=4, chunk=32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nobody_goes_on_from_an_outer_step_that_is_not_finite(
    dtype: torch.dtype, codec: Codec
) -> None:
    """Some slices of what is agreed on may have moved by then: it is of no use."""

    def run(rank: int) -> tuple[str, bool, Any, Any]:
        model, optimizer = build(dtype)
        (average,) = la.local_sgd(1)
        coded = replace(average, update=Bursts(), exchange=CodedMean(codec, relative=True))
        sync = la.attach(model, optimizer, (coded,))
        before = flat(model)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.zero_grad()
        with pytest.raises(NotFiniteError, match=r"ranks \[2\] of its link") as raised:
            optimizer.step()
        (kept,) = sync.state_dict()["rounds"]
        useless = bool(kept["carried"][0]["reference"].isnan().all())
        state = sync.state_dict()
        sync.detach()
        again = la.attach(*build(dtype), (coded,))
        with pytest.raises(ValueError, match="'reference' is not finite: the state was saved"):
            again.load_state_dict(state)
        return str(raised.value), useless, before, flat(model)

    for _, useless, before, after in la.simulate(run, workers=3):
        assert useless and np.array_equal(before, after)


def test_nobody_goes_on_from_a_gathering_that_ended_half_way() -> None:
    class Ends(Wrapped):
        """Rank 1 loses the others after its first part."""

        def around(
            self, collective: str, amount: Cost, received: int
        ) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

        def like(self, link: Link) -> Link:
            return Ends(link)

        def all_gather(
            self,
            mine: Tensor,
            out: Tensor,
            owners: int | None = None,
            parts: Parts | None = None,
        ) -> None:
            assert parts is not None

            def once(r: int, part: slice) -> None:
                assert parts is not None and parts.use is not None
                parts.use(r, part)
                if self.rank == 1:
                    raise la.LinkError("lost")

            self.link.all_gather(mine, out, owners, replace(parts, use=once))

    whole: dict[int, bool] = {}

    def run(rank: int) -> None:
        model, optimizer = build(torch.float32)
        link = current_link.get()
        assert link is not None
        sync = la.attach(model, optimizer, la.local_sgd(1, codec=SMALL), link=Ends(link))
        optimizer.zero_grad()
        try:
            optimizer.step()
        except la.LinkError:
            assert rank == 1
        (kept,) = sync.state_dict()["rounds"]
        whole[rank] = bool(kept["carried"][0]["reference"].isfinite().all())

    la.simulate(run, workers=3)
    assert whole == {0: True, 1: False, 2: True}


def same(ones: Any, others: Any) -> bool:
    """Bit for bit."""
    if isinstance(ones, Tensor):
        return torch.equal(ones, others)
    if isinstance(ones, np.ndarray):
        return bool(np.array_equal(ones, others))
    if isinstance(ones, (list, tuple)):
        return all(same(a, b) for a, b in zip(ones, others, strict=True))
    return bool(ones == others)
