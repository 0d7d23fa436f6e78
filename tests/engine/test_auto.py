"""The recipe that chooses: what it chooses from which facts, alike on every rank, and when it looks
again."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic import probe
from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.round import Round
from laconic.candidates import candidates
from laconic.links import Link, Throttled
from laconic.predict import Facts, predict

from tests.support.clock import Clock, controlled
from tests.support.loops import flat, refusal

auto = import_module("laconic.auto")  # `laconic.auto` is also the name of a function
TEXT = Facts(workers=4, shapes=((845, 1024),), itemsize=4, compute=0.15, rate=100e6, one_way=1e-3)
MUON = replace(TEXT, muon=True)


def chosen(facts: Facts, target: float | None = None, **options: Any) -> str:
    now, measured = options.get("now"), options.get("measured", {})
    text, reason = auto.choose(la.auto(target), facts, now, measured)
    assert text in reason
    return str(text)


def recipe_of(text: str) -> la.Recipe:
    recipe = parse_recipe(text)
    assert isinstance(recipe, tuple)
    return recipe


# -- the choice ----


def test_the_slower_the_network_the_less_is_sent() -> None:
    """From dense gradients over ever shorter codes to ever longer periods; never in every step."""
    rates = (1e11, 1e9, 3e8, 1e8, 3e7, 1e7, 3e6, 1e6, 1e5)
    found = [chosen(replace(TEXT, rate=rate)) for rate in rates]
    assert found[0] == "ddp()" and found[3] == "ddp(codec='int4')"
    assert all(text.startswith("streaming_diloco(") for text in found[-4:])
    sent = [predict(recipe_of(text), TEXT).bytes for text in found]
    assert sent == sorted(sent, reverse=True)
    for facts in (replace(fast, rate=rate) for fast in (TEXT, MUON) for rate in (1e10, 1e7, 1e4)):
        for each in candidates(facts):
            assert parse_recipe(each.text) == each.recipe
            if isinstance(each.recipe[0], Round):
                assert sum(any(r.when(t) for r in each.recipe) for t in range(1, 17)) <= 8
    assert "outer='muon'" in chosen(replace(MUON, rate=1e7))


def test_the_one_in_force_stays_unless_another_is_clearly_better() -> None:
    close, slow = replace(TEXT, rate=1e9), replace(TEXT, rate=1e7)
    best, rare = chosen(close), "streaming_diloco(512)"
    assert chosen(close, now=auto.Candidate(rare, parse_recipe(rare), 1.0)) == best
    # rounds that take longer than predicted are not left for rarer ones, which would as well
    now = next(c for c in candidates(slow) if c.text == chosen(slow))
    assert chosen(slow, now=now, measured={now.kind: 0.12 * slow.compute}) == now.text
    # a delay in force stays while it hides the messages
    first = next(c for c in candidates(replace(TEXT, rate=3e6)) if "(8, " in c.text)
    slower = replace(TEXT, rate=0.8 * 3e6)
    again, fresh = (
        next(c for c in candidates(slower, n) if "(8, " in c.text) for n in (first, None)
    )
    assert again == first != fresh


# -- in training ----


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Simulated steps take 10 ms, and messages what their link says, on a machine of any speed."""
    CLOCKS.append(controlled(monkeypatch))
    LINKS.clear()
    yield CLOCKS[0]
    CLOCKS.clear()


CLOCKS: list[Clock] = []


class Changing(Throttled):
    """A network whose rate the test changes."""

    def set(self, rate: float) -> None:
        self._rate = rate

    def like(self, link: Link) -> Link:
        inner = Changing(link, self.bandwidth, self.latency)
        inner.set(self._rate)
        LINKS.append(inner)
        return inner


LINKS: list[Changing] = []


def network(link: Link, rate: float) -> Link:
    outer = Changing(link, "1gbit")
    outer.set(rate)
    LINKS.append(outer)
    return outer


def build(rank: int, link: Link | None = None) -> tuple[Any, ...]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, la.attach(model, optimizer, la.auto(), link=link)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, t: int) -> None:
    for clock in CLOCKS:
        clock.sleep(0.01)
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(1000 * rank + t))
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), torch.sin(x[:, :30])).backward()
    optimizer.step()


def run(rank: int, steps: int, rates: dict[int, float] | None = None) -> tuple[Any, Tensor]:
    """``rates``: the network's rate in bit/s from that step on."""
    model, optimizer, sync = build(rank)
    for t in range(1, steps + 1):
        for link in LINKS if t in (rates or {}) else ():
            link.set((rates or {})[t])
        step(model, optimizer, rank, t)
    sync.finish()
    return sync.choices, flat(model)


def test_every_rank_makes_the_same_choice_and_says_why(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="laconic"):
        found = la.simulate(partial(run, steps=40), 3, link=partial(network, rate=1e6))
    (choices, x), *others = found
    assert choices and all(other == choices and torch.equal(x, y) for other, y in others)
    assert choices[0].step == 4 and choices[0].facts.rate == pytest.approx(1e6, rel=0.1)
    assert choices[0].text.startswith(("local_sgd(2, delay=", "streaming_diloco("))
    told = [record.message for record in caplog.records]
    assert len(told) == len(choices) and choices[0].reason in told[0]
    assert la.simulate(partial(run, steps=8), workers=1)[0][0] == [], "nothing to choose"

    def sent(rank: int) -> la.Stats:
        found: la.Stats = build(rank)[2].stats()
        return found

    for stats in la.simulate(sent, 3, link=partial(network, rate=1e6)):
        by = stats.bytes_by_collective
        assert by["measurement"] > 10 * by.get("all_to_all", 0), "booked apart"
        assert sum(by.values()) == stats.bytes_sent


def test_it_looks_again_when_the_network_gets_slow(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 1 Gbit/s to 1 Mbit/s, though it may have chosen to send little by then."""
    monkeypatch.setattr(auto, "LEAST_TRAFFIC", 2**10)
    monkeypatch.setattr(probe, "LEAST", 2**10)
    monkeypatch.setattr(auto.Chooser, "_used", lambda self, **_: (0.0, 0.0))
    steps = 50 + auto.REVIEW + auto.LATER + 1
    one = partial(run, steps=steps, rates={50: 1e6})
    (choices, _), *others = la.simulate(one, 3, link=partial(network, rate=1e9))
    early, late = ([c for c in choices if (c.step > 50) == side] for side in (False, True))
    assert early and late and late[-1].facts.rate < early[-1].facts.rate / 5
    assert all(other == choices for other, _ in others)


def test_a_choice_is_saved_and_loaded(clock: Clock) -> None:
    """Into a fresh run, where the recipe that was in force goes on, with its state."""
    slow = partial(network, rate=1e6)

    def first(rank: int) -> Any:
        model, optimizer, sync = parts = build(rank)
        for t in range(1, 21):
            step(model, optimizer, rank, t)
        saved, tail = copy.deepcopy([part.state_dict() for part in parts]), []
        for t in range(21, 26):
            step(model, optimizer, rank, t)
            tail.append(flat(model))
        return saved, sync.recipe, sync.choices, tail

    saved = la.simulate(first, workers=2, link=slow)
    assert saved[0][2]

    def second(rank: int) -> Any:
        model, optimizer, sync = parts = build(rank)
        start = sync.recipe
        model.load_state_dict(saved[rank][0][0])
        short = {**saved[rank][0][2], **({"rounds": []} if rank else {})}
        assert "not what sync" in refusal(lambda: sync.load_state_dict(short))
        assert sync.recipe == start and sync.choices == []
        for part, state in zip(parts, copy.deepcopy(saved[rank][0]), strict=True):
            part.load_state_dict(state)
        tail = []
        for t in range(21, 26):
            step(model, optimizer, rank, t)
            tail.append(flat(model))
        return sync.recipe, sync.choices, tail

    again = la.simulate(second, workers=2)
    for (_, recipe, choices, tail), (theirs, others, late) in zip(saved, again, strict=True):
        assert recipe == theirs and choices == others and all(map(torch.equal, tail, late))
