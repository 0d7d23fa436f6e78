"""Rounds average the module's buffers, as far as training changes them. `laconic.predict`,
`laconic.auto` and `laconic.advise` count what that sends."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.cli import main
from laconic.predict import Facts, predict

WORKERS, FEATURES = 4, 32
CHANGING = 2 * 4 * FEATURES
"""The bytes of BatchNorm's mean and variance."""
MASK = 4 * FEATURES**2


class Normed(nn.Sequential):
    """BatchNorm's statistics change."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, FEATURES), nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 4))


class Masked(nn.Sequential):
    """A causal mask is constant."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, FEATURES), nn.Linear(FEATURES, 4))
        self.register_buffer("mask", torch.ones(FEATURES, FEATURES).tril())


MODELS = {"changing": Normed, "constant": Masked}
RECIPES = {
    "ddp": la.ddp(),
    "local_sgd": la.local_sgd(4),
    "streaming_diloco": la.streaming_diloco(8),
    "delayed": la.local_sgd(4, delay=2, codec="int4"),
    "sgp": la.sgp(),
    "quorum": la.diloco(4, quorum=2),
}


class Training:
    def __init__(self, kind: str, rank: int) -> None:
        torch.manual_seed(0)
        self.model = MODELS[kind]()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self._generator = torch.Generator().manual_seed(rank)

    def step(self) -> None:
        x: Tensor = torch.randn(8, 8, generator=self._generator)
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()


@cache
def measured(kind: str) -> Facts:
    """What `laconic.advise` measures of the model."""

    def worker(rank: int) -> Facts:
        t = Training(kind, rank)
        return la.advise(t.model, t.step, optimizer=t.optimizer, steps=2).facts

    return replace(la.simulate(worker, 2)[0], workers=WORKERS, nets={}, rates=(), computes=())


def sent(kind: str, recipe: la.Recipe, buffers: Literal["average", "keep", "broadcast"]) -> float:
    """The bytes that a mean worker sends per step."""

    def worker(rank: int) -> int:
        t = Training(kind, rank)
        sync = la.attach(t.model, t.optimizer, recipe, buffers=buffers)
        before = 0
        for step in range(16):
            if step == 8:
                before = sync.stats().bytes_sent
            t.step()
        found = sync.stats().bytes_sent - before
        sync.detach()
        return found

    return sum(la.simulate(worker, WORKERS)) / WORKERS / 8


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", RECIPES)
def test_as_many_bytes_are_predicted_as_are_sent(name: str, kind: str) -> None:
    facts = measured(kind)
    assert predict(RECIPES[name], facts).bytes == pytest.approx(
        sent(kind, RECIPES[name], "average")
    )


@pytest.mark.parametrize("kind", MODELS)
def test_buffers_that_rank_0_shares_in_every_step_are_counted(kind: str) -> None:
    model = MODELS[kind]()
    sizes = tuple(b.numel() * b.element_size() for b in model.buffers())
    changing = sum(sizes) if kind == "changing" else 0
    counter = 8 if kind == "changing" else 0  # of batches: as on rank 0, so it is not sent
    facts = replace(measured(kind), buffers=sizes, changing=changing - counter, broadcast=True)
    found = predict(la.local_sgd(4), facts)
    assert found.bytes == pytest.approx(sent(kind, la.local_sgd(4), "broadcast"))
    far = replace(facts, rate=1e9, one_way=0.1)
    alone = replace(far, buffers=(), changing=0, broadcast=False)
    more = predict(la.local_sgd(4), far).seconds - predict(la.local_sgd(4), alone).seconds
    messages = 4 if kind == "changing" else 1  # two of digests, and a broadcast in two
    assert more == pytest.approx(0.1 * messages, rel=1e-3)


def test_it_is_measured_what_training_changes() -> None:
    assert measured("changing").buffers == (CHANGING // 2,) * 2
    assert measured("changing").changing == CHANGING
    assert measured("constant").buffers == (MASK,) and measured("constant").changing == 0


def test_messages_of_buffers_take_time_behind_those_in_flight() -> None:
    """80 ms for the model, of two messages with 1 ms each; with 10 MB of buffers, whose digests
    travel first, 80 ms more."""
    facts = Facts(2, ((2_500_000,),), 4, 0.1, 1e9, 1e-3)
    large = replace(facts, buffers=(10**7,), changing=10**7)

    def more(recipe: la.Recipe) -> float:
        return predict(recipe, large).exposed - predict(recipe, facts).exposed

    assert more(la.local_sgd(4)) == pytest.approx(0.084 / 4, rel=1e-3)
    assert more(la.local_sgd(4, delay=1)) == pytest.approx((0.082 + 0.084 - 0.1) / 4, rel=1e-3)
    assert more(la.local_sgd(4, delay=2)) == more(la.ddp()) == 0


@pytest.mark.parametrize(
    ("buffers", "sizes"),
    [("average", (CHANGING // 2,) * 2), ("keep", ()), ("broadcast", (CHANGING // 2,) * 2 + (8,))],
)
def test_auto_counts_what_its_run_sends(
    buffers: Literal["average", "keep", "broadcast"], sizes: tuple[int, ...]
) -> None:
    def worker(rank: int) -> Facts:
        t = Training("changing", rank)
        sync = la.attach(t.model, t.optimizer, la.auto(), buffers=buffers)
        while not sync.choices:
            t.step()
        sync.detach()
        return sync.choices[0].facts

    facts = la.simulate(worker, 2)[0]
    assert facts.buffers == sizes and facts.changing == sum(sizes)
    assert facts.broadcast == (buffers == "broadcast")


def test_the_command_is_told_how_many_numbers_change(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--params", "1M", "--step-time", "0.1s", "--bandwidth", "1gbit", "--latency", "1ms",
               "--nodes", "2", "--recipe", "local_sgd(4)", "--json"]  # fmt: skip

    def megabytes(*more: str) -> float:
        assert main(["advise", *options, *more]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        return next(float(r["megabytes"]) for r in rows if r["recipe"] == "local_sgd(4)")

    assert megabytes("--buffers", "1M") == pytest.approx(2 * megabytes(), rel=1e-4)
