"""`ReplicatedMean` against its formulas, written as loops, with another n in every round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from laconic.algorithms.compile import STATIC, replicated
from laconic.algorithms.exchange import Combine
from laconic.algorithms.exchanges.coded import ReplicatedMean
from laconic.algorithms.exchanges.mean import Mean
from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.recipes import RECIPES
from laconic.algorithms.update import Clock, State
from laconic.codecs import CODECS, Codec, Int2, Int4, Int8
from laconic.codecs.integers import Integers
from laconic.errors import NotFiniteError
from laconic.links.simulated import current_link
from laconic.links.simulation import simulate

from tests.support.exchanges import sent_by

KINDS: list[Codec] = [
    replace(codec, block=4) if isinstance(codec, Integers) else codec for codec in CODECS.values()
]
ROUNDS = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 2, 3, 4], [2, 3, 4], [2, 4], [4], [4, 5], [4, 5, 6]]
"""The ids of the workers of each round, by rank. Those that were lost never come again."""


def halfway(mean: Tensor) -> Tensor:
    """An outer step without state."""
    return mean.mul_(0.5).add_(0.25)


def unchanged(mean: Tensor) -> Tensor:
    return mean


def clock_of(step: int, rank: int, n: int) -> Clock:
    return Clock(step, 0.1, step - 1, 0, n, worker=rank, seed=3)


def q(codec: Codec, x: Tensor) -> Tensor:
    """Q(x)."""
    return codec.decode(codec.encode(x.clone()), x.numel()).to(x.dtype)


@dataclass
class Loop:
    """The round on one tensor of ``length`` elements, for any n, as loops over workers and
    owners. ``e``, ``o``: by worker."""

    codec: Codec
    relative: bool
    r: Tensor
    e: dict[int, Tensor]
    o: dict[int, Tensor]

    def round(self, messages: dict[int, Tensor], combine: Combine) -> Tensor:
        """The result for all of the workers that have a message, by rank."""
        n, length = len(messages), self.r.numel()
        slices = self.slices(n, length)
        end = slices[-1].stop
        r = self.padded(self.r, end) if self.relative else torch.zeros(end, dtype=self.r.dtype)
        arrived = {}
        for i, m in messages.items():
            v = self.padded(m, end) - r + self.padded(self.e[i], end)
            arrived[i] = torch.cat([q(self.codec, v[at]) for at in slices])
            self.e[i] = (v - arrived[i])[:length]
        p = torch.zeros_like(r)
        for owner, at in zip(messages, slices, strict=True):
            total = torch.zeros_like(p[at])
            for i in messages:
                total += arrived[i][at]
            w = total / n + self.padded(self.o[owner], end)[at]
            p[at] = q(self.codec, w)
            for k in range(length):
                if at.start <= k < at.stop:
                    self.o[owner][k] = w[k - at.start] - p[k]
                else:  # it was the owner there: the next mean divides it by n
                    self.e[owner][k] += n * self.o[owner][k]
                    self.o[owner][k] = 0
        result = combine((r + p)[:length])
        if self.relative:
            self.r = result.clone()
        return result

    def padded(self, t: Tensor, length: int) -> Tensor:
        return torch.cat([t, torch.zeros(length - t.numel(), dtype=t.dtype)])

    def slices(self, n: int, length: int) -> list[slice]:
        """Of as many whole units for each owner as are enough."""
        each = self.codec.grain
        while n * each < length:
            each += self.codec.grain
        return [slice(k * each, (k + 1) * each) for k in range(n)]


def together(
    exchange: ReplicatedMean | Mean,
    states: dict[int, State],
    messages: dict[int, Tensor],
    step: int,
    combine: Combine,
) -> dict[int, Tensor]:
    """One round of the simulated workers ``messages``; returns their results by id."""
    ids = list(messages)

    def work(rank: int) -> Tensor:
        link, i = current_link.get(), ids[rank]
        assert link is not None and link.size == len(ids)
        clock = clock_of(step, rank, len(ids))
        return sent_by(exchange, link, messages[i].clone(), combine, clock, states[i]).flat.clone()

    return dict(zip(ids, simulate(work, len(ids)), strict=True))


def state_of(exchange: ReplicatedMean, start: Tensor) -> State:
    return exchange.init(start.clone(), slice(0, start.numel()))


def rounds(
    exchange: ReplicatedMean, rounds: Iterable[Sequence[int]], length: int, dtype: torch.dtype
) -> tuple[Loop, dict[int, State]]:
    """Check rounds of workers that come and go, bit for bit; returns the states after them."""
    generator = torch.Generator().manual_seed(length)
    start = torch.randn(length, generator=generator).to(dtype)
    loop = Loop(exchange.codec, exchange.relative, start.clone(), {}, {})
    states: dict[int, State] = {}
    combine: Callable[[Tensor], Tensor] = halfway if exchange.relative else unchanged
    for step, ids in enumerate(rounds, 1):
        for i in set(ids) - set(states):  # as newcomers begin: what all have, no residuals
            states[i] = state_of(exchange, loop.r)
            loop.e[i], loop.o[i] = torch.zeros_like(start), torch.zeros_like(start)
        messages = {i: torch.randn(length, generator=generator).to(dtype) for i in ids}
        expected = loop.round({i: m.clone() for i, m in messages.items()}, combine)
        results = together(exchange, states, messages, step, combine)
        for i, result in results.items():
            assert result.dtype == dtype
            assert torch.equal(result, expected), f"round {step}, worker {i}"
            assert torch.equal(states[i]["residual"], loop.e[i]), f"e of {i}, round {step}"
            assert torch.equal(states[i]["lag"], loop.o[i]), f"o of {i}, round {step}"
            if exchange.relative:
                assert torch.equal(states[i]["reference"], loop.r)
    return loop, states


@pytest.mark.parametrize("codec", KINDS, ids=str)
@pytest.mark.parametrize("relative", [False, True])
def test_the_rounds_of_workers_that_come_and_go(codec: Codec, relative: bool) -> None:
    rounds(ReplicatedMean(codec, relative), ROUNDS, 13, torch.float32)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("length", [1, 7, 16, 41])
def test_lengths_that_are_no_multiple(n: int, length: int) -> None:
    """Some owners' slices then lie behind the end."""
    rounds(ReplicatedMean(Int4(block=4), True), [range(n)] * 3, length, torch.float32)


def test_a_lost_worker_takes_its_residual_only() -> None:
    _, states = rounds(ReplicatedMean(Int2(block=4), True), ROUNDS[:2], 23, torch.float32)
    before = {i: {k: t.clone() for k, t in s.items()} for i, s in states.items()}
    rest = [0, 2, 3, 4]
    messages = {i: torch.zeros(23) for i in rest}
    together(ReplicatedMean(Int2(block=4), True), states, messages, 3, unchanged)
    for name, t in before[1].items():
        assert torch.equal(states[1][name], t), "it was not there"
    assert all(bool(before[i]["residual"].any()) for i in rest), "there was something to keep"


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_message_that_is_not_finite_changes_no_state(relative: bool, n: int) -> None:
    exchange = ReplicatedMean(Int8(block=4), relative)
    _, states = rounds(exchange, [range(n)] * 2, 23, torch.float32)
    before = {i: {k: t.clone() for k, t in s.items()} for i, s in states.items()}

    def work(rank: int) -> str:
        link = current_link.get()
        assert link is not None
        message = torch.full((23,), float("nan") if rank == n - 1 else 1.0)
        with pytest.raises(NotFiniteError) as error:
            sent_by(exchange, link, message, unchanged, clock_of(3, rank, n), states[rank])
        return str(error.value)

    assert all(f"ranks [{n - 1}]" in said and "NaN" in said for said in simulate(work, n))
    for i, state in states.items():
        assert all(torch.equal(t, before[i][k]) for k, t in state.items())


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [7, 24])
def test_what_it_sends(n: int, length: int) -> None:
    """2(n-1)/n of the coded message, padded to n slices of whole blocks."""
    each = -(-length // (4 * n)) * (4 + 2)  # bytes: 4 elements of a byte each, and a scale
    cost = ReplicatedMean(Int8(block=4), False).cost(length, 4, n)
    assert cost.bytes == 2 * (n - 1) * each


def test_all_recipes_but_those_named_are_for_workers_that_come_and_go() -> None:
    texts = {name: f"{name}()" for name in RECIPES}
    texts |= {name: f"{name}(4)" for name in ("local_sgd", "easgd", "lsgd")}
    texts |= {name: f"{name}(2, 4)" for name in ("post_local_sgd", "hierarchical")}
    texts |= {name: f"{name}(ddp())" for name in ("slowmo", "outer_step")}
    for name, text in texts.items():
        recipe = parse_recipe(text)
        assert isinstance(recipe, tuple)
        if name not in STATIC:
            replicated(recipe)
            continue
        with pytest.raises(ValueError) as raised:
            replicated(recipe)
        assert "over all workers" in str(raised.value) or "outer_step, auto" in str(raised.value)
