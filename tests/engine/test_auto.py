"""The recipe that chooses: what it chooses from which facts, alike on every rank, and when it looks
again."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.round import Round
from laconic.links import Link, Throttled
from laconic.policy.candidates import Candidate, candidates, takes_muon, takes_own
from laconic.policy.choice import choose
from laconic.policy.facts import Facts
from laconic.policy.predict import predict

from tests.support.clock import Clock, controlled
from tests.support.loops import descend, flat, refusal

TEXT = Facts(workers=4, shapes=((845, 1024),), itemsize=4, compute=0.15, rate=100e6, one_way=1e-3)
MUON = replace(TEXT, muon=True, own=True)
PLAIN = la.auto(outer=False)


def chosen(facts: Facts, target: float | None = None, **options: Any) -> str:
    now, measured = options.get("now"), options.get("measured", {})
    text, reason = choose(la.auto(target), facts, now, measured)
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


def test_a_period_is_at_most_a_third_longer_than_the_network_needs() -> None:
    slow = replace(MUON, rate=1e6)
    found = [chosen(replace(slow, compute=c)) for c in (0.2, 0.28, 0.4)]
    periods = [int(text.partition("streaming_diloco(")[2].partition(",")[0]) for text in found]
    assert periods == [40, 28, 20]


def test_the_one_in_force_stays_unless_another_is_clearly_better() -> None:
    close, slow = replace(TEXT, rate=1e9), replace(TEXT, rate=1e7)
    best, rare = chosen(close), "streaming_diloco(512)"
    assert chosen(close, now=Candidate(rare, la.streaming_diloco(512), 1.0)) == best
    # rounds that take longer than predicted are not left for rarer ones, which would as well
    now = next(c for c in candidates(slow) if c.text == chosen(slow))
    assert chosen(slow, now=now, measured={now.kind: 0.12 * slow.compute}) == now.text
    # between gradients and parameters it must be clearly better than a prediction is accurate
    fast = replace(MUON, rate=1e10)
    now = next(c for c in candidates(fast) if "(8, " in c.text and "stream" in c.text)
    near = {kind: 0.4 * fast.compute for kind in ("gradients", "coded gradients")}
    assert chosen(fast, measured=near).startswith("outer_step(")
    assert chosen(fast, now=now, measured=near) == now.text
    far = {now.kind: 0.4 * fast.compute}
    assert chosen(fast, now=now, measured=far).startswith("outer_step(")
    # a delay in force stays while it hides the messages
    first = next(c for c in candidates(replace(TEXT, rate=3e6)) if "(8, " in c.text)
    slower = replace(TEXT, rate=0.8 * 3e6)
    again, fresh = (
        next(c for c in candidates(slower, n) if "(8, " in c.text) for n in (first, None)
    )
    assert again == first != fresh


# -- in training ----


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Simulated steps take 10 ms, and messages what their link says, on a machine of any speed."""
    return controlled(monkeypatch)


def slow(link: Link) -> Link:
    return Throttled(link, "1mbit")


class Run:
    def __init__(self, rank: int, clock: Clock, recipe: Any = None) -> None:
        torch.manual_seed(rank)
        self.model = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 30))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.sync = la.attach(self.model, self.optimizer, recipe or la.auto())
        self.rank, self.clock = rank, clock
        self.parts: tuple[Any, ...] = self.model, self.optimizer, self.sync

    def go(self, last: int) -> list[Tensor]:
        """Up to that step; the parameters after each."""
        trace = []
        while self.sync.step < last:
            self.clock.sleep(0.01)
            seed = 1000 * self.rank + self.sync.step
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(seed))
            descend(self.optimizer, nn.functional.mse_loss(self.model(x), torch.sin(x[:, :30])))
            trace.append(flat(self.model))
        return trace


def test_every_rank_makes_the_same_choice_and_says_why(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    def run(rank: int, steps: int) -> tuple[la.Stats, list[Any], Tensor]:
        own = Run(rank, clock)
        attached = own.sync.stats()
        own.go(steps)
        own.sync.finish()
        return attached, own.sync.choices, flat(own.model)

    with caplog.at_level(logging.INFO, logger="laconic"):
        found = la.simulate(partial(run, steps=40), 3, link=slow)
    (stats, choices, x), *others = found
    assert choices and all(other == choices and torch.equal(x, y) for _, other, y in others)
    assert choices[0].step == 4 and choices[0].facts.rate == pytest.approx(1e6, rel=0.1)
    assert choices[0].text.startswith(("local_sgd(2, delay=", "outer_step(streaming_diloco("))
    told = [record.message for record in caplog.records]
    assert len(told) == len(choices) and choices[0].reason in told[0]
    assert la.simulate(partial(run, steps=8), workers=1)[0][1] == [], "nothing to choose"
    by = stats.bytes_by_collective
    assert by["measurement"] > 10 * by.get("all_to_all", 0), "booked apart"
    assert sum(by.values()) == stats.bytes_sent


def test_outer_steps_in_muons_direction_can_be_declined(clock: Clock) -> None:
    def first(rank: int, recipe: Any) -> str:
        own = Run(rank, clock, recipe)
        own.go(12)
        return own.sync.choices[0].text

    for recipe, text in ((la.auto(), "outer_step(ddp(), 4, outer='muon')"), (PLAIN, "ddp()")):
        assert la.simulate(partial(first, recipe=recipe), 2) == [text, text]
        over_slow = la.simulate(partial(first, recipe=recipe), 2, link=slow)
        assert ("outer='muon'" in over_slow[0]) == recipe.outer


def test_own_steps_are_for_optimizers_of_adams_kind() -> None:
    """With SGD inside they raised the loss: it keeps outer steps on averages."""
    parameters = [torch.nn.Parameter(torch.ones(4, 4))]
    sgd, adamw = torch.optim.SGD(parameters, 0.1), torch.optim.AdamW(parameters)
    assert takes_own(adamw) and not takes_own(sgd) and not takes_own(None)
    assert takes_muon(adamw, [(4, 4)]) and takes_muon(sgd, [(4, 4)])
    slow = replace(MUON, rate=1e7)
    assert "average=False" in chosen(slow)
    assert chosen(replace(slow, own=False)).startswith("streaming_diloco(8, delay=2, outer='muon'")


def test_a_choice_is_saved_and_loaded(clock: Clock) -> None:
    """Into a fresh run, where the recipe that was in force goes on, with its state. It may have
    other options, as in the state of a version that had none but ``target``."""

    def first(rank: int) -> Any:
        own = Run(rank, clock)
        own.go(20)
        saved = copy.deepcopy([part.state_dict() for part in own.parts])
        return saved, own.go(25), own.sync.recipe, own.sync.choices

    saved = la.simulate(first, workers=2, link=slow)
    assert saved[0][-1]

    def second(rank: int) -> Any:
        own, states = Run(rank, clock, PLAIN), saved[rank][0]
        assert "auto()" in states[2]["recipe"]
        states = [*states[:2], {**states[2], "recipe": "auto(outer=False)"}]
        start = own.sync.recipe
        own.model.load_state_dict(states[0])
        short = {**states[2], **({"rounds": []} if rank else {})}
        assert "not what sync" in refusal(lambda: own.sync.load_state_dict(short))
        assert own.sync.recipe == start and own.sync.choices == []
        for part, state in zip(own.parts, copy.deepcopy(states), strict=True):
            part.load_state_dict(state)
        return own.go(25), own.sync.recipe, own.sync.choices

    again = la.simulate(second, workers=2)
    for (_, trace, *kept), (tail, *theirs) in zip(saved, again, strict=True):
        assert theirs == kept and all(map(torch.equal, tail, trace))
