"""Rounds with a quorum in a plan: against the engine itself, and against a loop that knows only the
rules of docs/quorum.md."""

from __future__ import annotations

import math
import random
from statistics import median_low
from typing import Any

import pytest
import torch

import laconic as la
from laconic.advisor.plan.cluster import Cluster, Site
from laconic.advisor.plan.quorum import Closed, Quorum
from laconic.advisor.plan.rounds import Rounds
from laconic.algorithms.round import Recipe


def unequal(steps: list[float]) -> Cluster:
    """A worker for each of these seconds per step."""
    sites = tuple(Site(f"site{k}", 1, 1e9, step=step) for k, step in enumerate(steps))
    return Cluster(1000, sites, spread=0.0)


class MeetsFirst(Quorum):
    """As the engine, in which all workers wait for each other once, after the first step."""

    def _go_on(self, worker: int, now: float, after: int) -> None:
        if after < 0:
            now += max(self.cluster.steps) - self.cluster.steps[worker]
        super()._go_on(worker, now, after)


def closings(
    recipe: Recipe,
    steps: list[float],
    sending: list[float],
    length: int,
    kind: type[Quorum] = Quorum,
) -> list[Closed]:
    rounds = Rounds(recipe, unequal(steps))
    run = kind(rounds, torch.Generator(), send=sending, record=True)
    run.run(length)
    return run.closings


RECIPES = {
    "quorum": la.diloco(6, quorum=3),
    "grace": la.diloco(6, quorum=2, grace=1.7),
    "asynchronous": la.local_sgd(4, quorum=1),
    "own pace": la.diloco(6, pace="own"),
    "own pace and quorum": la.diloco(6, quorum=3, grace=1.3, pace="own"),
    "fragments": la.streaming_diloco(6, 3, 0, quorum=3, grace=0.7, codec=None),
    "fragments at own pace": la.streaming_diloco(6, 2, 0, quorum=2, pace="own", codec=None),
}
STEPS = [1.0, 1.13, 0.91, 2.7]
SENDING = [0.0, 0.31, 0.12, 0.77]


@pytest.mark.parametrize("name", RECIPES)
def test_rounds_close_as_in_the_engine(name: str) -> None:
    """The same closings, rosters and paces as when the recipe really trains in the simulator. That
    closes a round when all workers wait, and so already knows how long the messages of later ones
    take. Where these decide paces, they are alike here."""
    recipe, length = RECIPES[name], 60
    sending = [0.1] * 4 if "own pace" in name else SENDING

    def train(rank: int) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        sync = la.attach(model, optimizer, recipe)
        while sync.step < length:
            optimizer.zero_grad()
            model(torch.full((1, 4), 1.0 + rank)).sum().backward()
            optimizer.step()
        found = list(sync.closings)
        sync.finish()
        return found

    engine = la.simulate(train, workers=4, step_seconds=STEPS, message_seconds=sending)[0]
    ours = closings(recipe, STEPS, sending, length, MeetsFirst)
    # until the first worker of the engine has taken all of its steps
    count = min(len(ours), len(engine)) // 2
    assert count >= 5
    for mine, theirs in zip(ours[:count], engine[:count], strict=True):
        assert (mine.kind, mine.number, mine.roster, mine.paces) == (
            theirs.kind,
            theirs.number,
            theirs.roster,
            theirs.paces,
        )


def brute(
    period: int, quorum: int, grace: float, own: bool, steps: list[float], sending: list[float],
    count: int,
) -> list[tuple[float, tuple[int, ...]]]:  # fmt: skip
    """The first ``count`` rounds: when each closes, and with whom. All workers' next arrivals are
    compared for each."""
    n = len(steps)
    taken = [period] * n
    arrives = [period * steps[k] + sending[k] for k in range(n)]
    first = [1] * n
    seen: dict[int, float] = {}
    rounds = []
    for number in range(1, count + 1):
        reached = sorted(arrives)[quorum - 1]
        expected = [arrives[k] for k in range(n) if first[k] <= number]
        closes = min(max([reached, *expected]), reached + grace)
        roster = [k for k in range(n) if arrives[k] <= closes]
        rounds.append((closes, tuple(roster)))
        for k in roster:
            seen[k] = 1 / steps[k]
        fastest = max(seen.values())
        usual = median_low([sending[k] for k in seen])
        for k in roster:
            later = 1
            taken[k] = period
            if own:
                between = period / fastest
                longer = max(sending[k] - usual, 0.0)
                if quorum < n:
                    later = max(math.ceil(longer / (0.5 * between)), 1)
                allowed = min(grace / steps[k], 0.25)
                taken[k] = max(
                    math.floor((later * between - longer) / steps[k] + allowed + 1e-6), 1
                )
            first[k] = number + later
            arrives[k] = closes + taken[k] * steps[k] + sending[k]
    return rounds


@pytest.mark.parametrize("seed", range(6))
def test_rounds_close_as_the_rules_say(seed: int) -> None:
    draw = random.Random(seed)
    n = draw.randint(2, 7)
    steps = [draw.uniform(0.5, 3.0) for _ in range(n)]
    sending = [draw.choice([0.0, draw.uniform(0.0, 4.0)]) for _ in range(n)]
    quorum, grace = draw.randint(1, n), draw.choice([0.0, draw.uniform(0.0, 5.0)])
    own, period = draw.random() < 0.5, draw.randint(1, 9)
    recipe = la.diloco(period, quorum=quorum, grace=grace, pace="own" if own else "equal")
    ours = closings(recipe, steps, sending, 40 * period)
    expected = brute(period, quorum, grace, own, steps, sending, len(ours))
    assert len(ours) >= 20
    for mine, (time, roster) in zip(ours, expected, strict=True):
        assert mine.roster == roster
        assert mine.time == pytest.approx(time, rel=1e-9)
