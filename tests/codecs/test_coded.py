"""Coded exchanges: what they conserve, alone and in a training, and what is refused.
`test_contract` compares recipes that code with their references."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.algorithms.exchange import Exchange
from laconic.algorithms.exchanges import CodedMean
from laconic.algorithms.update import Clock, State
from laconic.codecs import Cast, Int2, Int4, Int8
from laconic.errors import NotFiniteError
from laconic.links import Link
from laconic.links.simulated import current_link
from laconic.parts import optimizer_state

from tests.support.exchanges import sent_by
from tests.support.loops import flat

SHAPES = ((7, 5), (7,), (11, 7), (11,), (3, 40))
SMALL = Int4(block=8)
DDP, DILOCO = la.ddp(codec=SMALL), la.diloco(3, 0.6, 0.8, codec=SMALL)
SLOWMO = la.slowmo(la.local_sgd(2, codec=SMALL), 6, 0.6, 0.8, codec="int8")
STREAMING = la.streaming_diloco(4, 2, 2, 0.3, SMALL, lr=0.6, momentum=0.8)


def build(dtype: torch.dtype = torch.float64) -> tuple[nn.ParameterList, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = nn.ParameterList([torch.randn(shape).to(dtype) for shape in SHAPES])
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def backward(model: nn.ParameterList, rank: int, t: int, scale: float = 1.0) -> None:
    numbers = torch.Generator().manual_seed(100 * rank + t)
    wanted = [rank + 2 * torch.randn(p.shape, generator=numbers).to(p.dtype) for p in model]
    losses = [torch.log(torch.cosh(p - w)).sum() for p, w in zip(model, wanted, strict=True)]
    (torch.stack(losses).sum() * scale).backward()


def steps(
    model: nn.ParameterList, optimizer: torch.optim.Optimizer, rank: int, *ts: int
) -> list[Tensor]:
    found = []
    for t in ts:
        optimizer.zero_grad()
        backward(model, rank, t)
        optimizer.step()
        found.append(flat(model))
    return found


def train(
    rank: int, recipe: la.Recipe, dtype: torch.dtype = torch.float64, link: Link | None = None
) -> list[Tensor]:
    model, optimizer = build(dtype)
    with la.attach(model, optimizer, recipe, link=link):
        return steps(model, optimizer, rank, *range(1, 13))


def same(ones: Sequence[Sequence[Tensor]], others: Sequence[Sequence[Tensor]]) -> bool:
    return all(all(map(torch.equal, a, b)) for a, b in zip(ones, others, strict=True))


def link_here() -> Link:
    link = current_link.get()
    assert link is not None
    return link


def carried(sync: la.Synchronizer) -> list[Any]:
    state = sync.state_dict()
    return [kept for kind in ("rounds", "gradients") for r in state[kind] for kept in r["carried"]]


# -- what is sent, and what is left, is what went in ----

LOSSY: dict[str, Exchange] = {
    "int4": CodedMean(SMALL, relative=False),
    "int2": CodedMean(Int2(), relative=False),
    "bfloat16": CodedMean(Cast("bfloat16"), relative=False),
}


@pytest.mark.parametrize("name", LOSSY)
def test_what_was_sent_and_what_is_left_add_up(name: str) -> None:
    """sum of what came out + owner's residual + mean residual = mean of the sums that went in."""
    exchange = LOSSY[name]
    length = -(-96 // exchange.multiple(3)) * exchange.multiple(3)

    def run(rank: int) -> tuple[Tensor, Tensor, State]:
        link, numbers = link_here(), torch.Generator().manual_seed(rank)
        state = exchange.init(torch.zeros(length).double(), exchange.region(link, length))
        put, got = torch.zeros(2, length, dtype=torch.float64)
        for t in range(1, 21):
            size = 10.0 ** torch.randint(-3, 3, (length,), generator=numbers)
            m = size * torch.randn(length, generator=numbers, dtype=torch.float64)
            clock = Clock(t, math.nan, t - 1, 0, 3, rank)
            put, got = (
                put + m,
                got + sent_by(exchange, link, m.clone(), unchanged, clock, state).flat,
            )
        return put, got, state

    found = la.simulate(run, workers=3)
    mean = torch.stack([put for put, _, _ in found]).mean(0)
    left = torch.stack([state["residual"] for _, _, state in found]).mean(0)
    owed = left + torch.cat([state["lag"] for _, _, state in found])
    for _, got, _ in found:
        assert torch.equal(got, found[0][1])
        assert float((got + owed - mean).abs().max()) < 1e-9
    assert float(left.abs().max()) > 0


def unchanged(mean: Tensor) -> Tensor:
    return mean


@pytest.mark.parametrize(("slow", "per_worker"), [(False, 1), (True, 2)])
def test_averages_after_gradients_code_what_has_moved_since(slow: bool, per_worker: int) -> None:
    """And not all the way from the start: that would put every weight back to what the code leaves
    of it. Where workers' weights have drifted apart before, they meet."""

    def run(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(40, 30, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.3)
        recipe = la.post_local_sgd(6, 4, codec="int4")
        recipe = la.slowmo(recipe, 3, momentum=0.5) if slow else recipe
        la.attach(model, optimizer, recipe, nprocs_per_node=per_worker)
        trace = []
        for t in range(1, 9):
            if t == 6 and rank // per_worker == 1:
                with torch.no_grad():
                    model.weight += 1e-6  # as processors of another kind might
            if t == 7:
                optimizer.param_groups[0]["lr"] = 1e-4
            (model.weight - 3.0 - rank // per_worker).square().sum().backward()
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
    assert float((ends[0] - mean).abs().max()) < moved / 6


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


@pytest.mark.parametrize(
    ("recipe", "ranks"),
    [(DDP, 2), (DDP, 4), (DILOCO, 4), (la.streaming_diloco(4, 2, 0, codec=SMALL), 2)],
)
def test_another_number_of_workers_goes_on_with_what_is_left(
    recipe: la.Recipe, ranks: int, tmp_path: Path
) -> None:
    """The mean of what workers had not sent is the same, so nothing gets lost."""

    def first(rank: int) -> Any:
        model, optimizer = build()
        sync = la.attach(model, optimizer, recipe)
        steps(model, optimizer, rank, *range(1, 7))
        la.save(tmp_path, model, optimizer)
        return sync.state_dict()

    def second(rank: int) -> Any:
        model, optimizer = build()
        sync = la.attach(model, optimizer, recipe)
        la.load(tmp_path, model, optimizer)
        return sync.state_dict()

    before, after = owed(la.simulate(first, workers=3)), owed(la.simulate(second, workers=ranks))
    assert len(before) == len(after) > 0
    for a, b in zip(before, after, strict=True):
        assert float((a - b).abs().max()) < 1e-12 and float(a.abs().max()) > 0


@pytest.mark.parametrize(("workers", "inner"), [(2, 1), (4, 2)])
def test_residuals_follow_the_scale_of_the_loss(workers: int, inner: int) -> None:
    """At half the scale, what was not sent is half as much: unscaled gradients are as without a
    scaler, but for rounding."""

    def run(rank: int, scales: Sequence[float]) -> list[Tensor]:
        model, optimizer = build(torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=len({*scales}) > 1)
        scaler.scale(torch.zeros(()))  # which makes its scale
        la.attach(model, optimizer, DDP, nprocs_per_node=inner, scaler=scaler)
        found = []
        for t, scale in enumerate(scales):
            optimizer.zero_grad()
            scaler.update(scale)
            backward(model, rank, t, scale)
            grads = [p.grad for p in model if p.grad is not None]
            found.append(torch.cat([g.reshape(-1) / scale for g in grads]))
        return found

    scales = [4.0, 4.0, 1024.0, 0.5, 0.5, 64.0]
    plain = la.simulate(lambda rank: run(rank, [1.0] * 6), workers=workers)
    scaled = la.simulate(lambda rank: run(rank, scales), workers=workers)
    for a, b in zip(plain[0], scaled[0], strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


# -- fragments, and tensors larger than a bucket ----


def test_fragments_hold_everything_once() -> None:
    """Any model, any number of fragments up to its elements: about equal bytes, nothing twice."""
    model = nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30), nn.Linear(30, 2))
    groups = [[p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False)]
    for count in (1, 2, 3, 8, 40):
        parts = [la.parts.Fragment(k, count).segments(model, groups) for k in range(count)]
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
        (whole,) = la.parts.Fragment(k, 3, "layers").segments(blocks, [list(blocks.parameters())])
        layers = [id(p) for block in list(blocks)[2 * k : 2 * k + 2] for p in block.parameters()]
        assert [id(s.tensor) for s in whole] == layers


@pytest.mark.parametrize("recipe", [la.ddp(codec="int8"), la.local_sgd(1, codec="int8")])
def test_a_tensor_larger_than_a_bucket(recipe: la.Recipe) -> None:
    length = la.buckets.BUCKET_BYTES // 4 + 300_001
    slopes = torch.arange(length).remainder(99)

    def run(rank: int) -> Tensor:
        x = nn.Parameter(torch.zeros(length))
        optimizer = torch.optim.SGD([x], lr=1.0)
        with la.attach(nn.ParameterList([x]), optimizer, recipe):
            (x * slopes * (rank + 1)).sum().backward()
            optimizer.step()
        return x.detach()

    for found in la.simulate(run, workers=2):
        assert float((found + 1.5 * slopes).abs().max()) < 2


# -- parameters that are frozen, thawed, added ----


def test_a_frozen_parameter_keeps_what_is_left_of_the_others() -> None:
    """Buckets are made anew when a parameter is frozen; what was not sent yet moves along: the next
    gradient, of nothing, is what is sent of it. The frozen one does not move."""

    def run(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        model, optimizer = build()
        sync = la.attach(model, optimizer, DDP)

        def held() -> Tensor:
            """The residual, and the owner's as n times its slice."""
            (state,) = sync.state_dict()["gradients"]
            (kept,), (begin,), (size,) = state["carried"], state["starts"], state["sizes"]
            total: Tensor = kept["residual"].clone()
            total[begin : begin + len(kept["lag"])] += 3 * kept["lag"]
            return total[:size]

        steps(model, optimizer, rank, 1, 2, 3, 4)
        before = held()
        model[1].requires_grad_(False)
        frozen = model[1].detach().clone()
        optimizer.zero_grad()
        backward(model, rank, 5, 0.0)
        grads = [p.grad for i, p in enumerate(model) if i != 1 and p.grad is not None]
        sent = torch.cat([g.reshape(-1) for g in reversed(grads)])
        optimizer.step()
        assert torch.equal(frozen, model[1]) and model[1].grad is None
        return before, sent, held()

    found = la.simulate(run, workers=3)
    before, sent, after = (torch.stack([f[i] for f in found]).mean(0) for i in range(3))
    last = 11 + 120 + 77  # of the parameters in reverse, before the one frozen
    kept = torch.cat([before[:last], before[last + 7 :]])
    assert float((after + sent - kept).abs().max()) < 1e-12 and float(sent.abs().max()) > 0


@pytest.mark.parametrize(("recipe", "norm"), [(DDP, 0.1), (DDP, 1e9), (la.power_sgd(2), 1e9)])
@pytest.mark.parametrize("how", ["thawed", "added", "late"])
def test_parameters_that_join_are_averaged_once(how: str, recipe: la.Recipe, norm: float) -> None:
    """Ranks would clip by other norms, were what joins not averaged. Where they join after the
    backward pass, which has averaged the others, that is refused."""

    def run(rank: int) -> list[Tensor]:
        model, optimizer = build()
        late = model[0].requires_grad_(how == "added")
        if how == "added":
            optimizer = torch.optim.SGD(list(model)[1:], lr=0.1)
        la.attach(model, optimizer, recipe)
        for t in range(1, 5):
            if t == 3 and how == "thawed":
                late.requires_grad_(True)
            elif t == 3 and how == "added":
                optimizer.add_param_group({"params": [late]})
            optimizer.zero_grad()
            scale = (rank + 1.0) * t
            torch.stack([(scale * p).sum() for p in model]).sum().backward()
            nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], norm)
            if t == 3 and how == "late":
                late.requires_grad_(True)
                with pytest.raises(ValueError, match="thawed, after"):
                    optimizer.step()
                break
            optimizer.step()
        return [p.detach().clone() for p in model]

    assert same(*([run] for run in la.simulate(run, workers=2)))


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


def average_of(part: Any, delay: int = 0) -> la.Recipe:
    exchange = CodedMean(SMALL, relative=True)
    return (la.Round(la.every(2), la.updates.Average(), exchange, part, delay=delay),)


def test_a_round_of_chosen_parameters_averages_them() -> None:
    """Its reference is what all started with. Where there is nothing at the start, it would be
    another one on every worker."""

    def run(rank: int) -> list[Tensor]:
        model, optimizer = build()
        with la.attach(model, optimizer, average_of(first_two)):
            steps(model, optimizer, rank, *range(1, 7))
            return [x.detach().clone() for x in model]

    def refused(rank: int, delay: int) -> str:
        model, optimizer = build()
        la.attach(model, optimizer, average_of(momenta, delay))
        with pytest.raises(ValueError, match="had nothing then") as caught:
            steps(model, optimizer, rank, 1, 2)
        return str(caught.value)

    one, other = la.simulate(run, workers=2)
    assert list(map(torch.equal, one, other)) == [True, True, False, False, False]
    (alone,) = la.simulate(run, workers=1)
    assert float((one[0] - alone[0]).abs().max()) > 1e-3, "that of both, not of one"
    for delay in (0, 1):
        assert len({*la.simulate(partial(refused, delay=delay), workers=2)}) == 1


@dataclass(frozen=True)
class Spoils(la.Update):
    """``x <- mean(x)``, as an average has it; what arrived is overwritten, as a fold may."""

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        x.copy_(received)
        received.fill_(7.0)
        return x


def test_a_fold_may_overwrite_what_arrived() -> None:
    """And not what the workers agreed on, which the next message builds upon."""
    (average,) = la.local_sgd(1, codec="int4")
    recipes = ((average,), (replace(average, update=Spoils()),))
    for dtype in (torch.float32, torch.float64):
        runs = [la.simulate(partial(train, recipe=r, dtype=dtype), workers=3) for r in recipes]
        assert same(*runs)


def test_options_that_are_refused() -> None:
    class Untold(Int4):
        __repr__ = object.__repr__

    average, mean = la.updates.Average(), la.exchanges.Mean()
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: la.local_sgd(4, codec=4), "codec"),  # type: ignore[arg-type]
        (lambda: la.slowmo(None, average=False, codec="int4"), "nothing to code"),
        (lambda: la.streaming_diloco(3), "fragments must be at most the period, 3, not 4"),
        (lambda: la.GradientRound(la.every(1), average, CodedMean(Int8(), True)), "not relative"),
        (lambda: la.ddp(codec=Untold()), "codec Untold needs a repr that shows all its settings"),
        (lambda: la.power_sgd(2, codec=Untold()), "codec Untold needs a repr"),
        (lambda: average_of(optimizer_state), "a round of the optimizer's state needs an update"),
        (lambda: la.Round(la.every(4), average, mean, optimizer_state, delay=2), "use delay=0"),
    ]
    for make, message in cases:
        with pytest.raises(ValueError, match=message):
            make()


# -- what is not finite ----


@pytest.mark.parametrize(
    ("recipe", "ranks"), [(la.ddp(codec="float16"), 1), (DILOCO, 1), (DILOCO, 2)]
)
def test_what_is_not_finite_is_named_on_every_rank(recipe: la.Recipe, ranks: int) -> None:
    """And leaves what is carried as it was: of workers of two ranks, each carries half of the
    model. A scaler that is switched off changes nothing."""

    def run(rank: int, bad: float) -> tuple[str, int]:
        model, optimizer = build(torch.float32)
        off = torch.amp.GradScaler("cpu", enabled=False)
        sync = la.attach(model, optimizer, recipe, scaler=off, nprocs_per_node=ranks)
        steps(model, optimizer, rank, *range(1, 6))
        if rank // ranks == 1:
            with torch.no_grad():
                model[0][0, 0] = bad  # in what the first rank of a worker carries
        kept = carried(sync)
        with pytest.raises(NotFiniteError) as raised:
            steps(model, optimizer, rank, 6)
        assert ranks > 1 or repr(kept) == repr(carried(sync))
        return str(raised.value), sum(len(each.get("reference", ())) for each in kept)

    for bad in (math.nan, math.inf):
        found = la.simulate(partial(run, bad=bad), workers=3 * ranks)
        assert all("ranks [1]" in text for text, _ in found[::ranks])
        assert "is nan" in found[ranks][0] or "is inf" in found[ranks][0]
        assert recipe is not DILOCO or all(250 <= ranks * held < 300 for _, held in found)


LENGTH = 3 * 8 * 16
"""Elements for 3 ranks: 16 grains of `SMALL` for each."""


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_finite_anywhere_changes_nothing(relative: bool, dtype: torch.dtype) -> None:
    """The next round is as if it had never been."""
    exchange = CodedMean(SMALL, relative)

    def run(rank: int) -> list[str]:
        link, clock, texts = link_here(), Clock(1, math.nan, 0, 0, 3, rank), []
        state = exchange.init(torch.zeros(LENGTH, dtype=dtype), exchange.region(link, LENGTH))
        x = torch.randn(LENGTH, generator=torch.Generator().manual_seed(rank), dtype=dtype)
        sent_by(exchange, link, x.clone(), unchanged, clock, state)
        before = {name: t.clone() for name, t in state.items()}
        for place in range(0, LENGTH, 17):
            bad = x.clone()
            bad[place] = math.inf if rank == 1 else bad[place]
            with pytest.raises(NotFiniteError, match=r"ranks \[1\] of its link had NaN") as raised:
                sent_by(exchange, link, bad, unchanged, clock, state)
            texts.append(str(raised.value))
        assert all(torch.equal(t, state[name]) for name, t in before.items())
        return texts

    first, second, _ = la.simulate(run, workers=3)
    assert all("element" in text and "is inf" in text for text in second)
    assert not any("element" in text for text in first)


@dataclass(frozen=True)
class Bursts(la.Update):
    """An outer step that is not finite, on the rank that owns the last slice."""

    def combine(self, mean: Tensor, state: State, clock: Clock) -> Tensor:
        return mean * math.inf if clock.worker == clock.workers - 1 else mean


def test_nobody_goes_on_from_an_outer_step_that_is_not_finite() -> None:
    """What is agreed on stays as it was, on all ranks."""
    (average,) = la.local_sgd(1)
    burst = replace(average, update=Bursts(), exchange=CodedMean(SMALL, relative=True))

    def run(_: int) -> bool:
        model, optimizer = build()
        sync = la.attach(model, optimizer, (burst,))
        before, kept = flat(model), carried(sync)
        with pytest.raises(NotFiniteError, match=r"ranks \[2\] of its link"):
            optimizer.step()
        return torch.equal(before, flat(model)) and repr(kept) == repr(carried(sync))

    assert la.simulate(run, workers=3) == [True] * 3
