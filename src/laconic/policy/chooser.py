"""The recipe `auto`: measure the step and the network, choose a recipe, and review the choice.

Every rank measures, and the measurements are gathered. From the slowest rank's value of each, all
ranks compute the same choice: the candidate with the most progress per second,

    argmin  seconds(candidate) * steps(candidate)

`laconic.policy.predict` gives the seconds per step. ``steps`` is how many steps the candidate takes
to do the work of one step of dense gradient averaging, as ``python -m benchmarks.factors`` measures
it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laconic.algorithms.auto import Auto
from laconic.algorithms.round import Recipe, Round, first_sent, workers_differ
from laconic.engine.session import Choice, Session
from laconic.links.calls import Call
from laconic.links.comm_thread import Pending
from laconic.policy.candidates import (
    largest_fragment,
    spelled,
    start,
    takes_muon,
    takes_own,
    turning,
)
from laconic.policy.choice import (
    WARMUP,
    WINDOW,
    change_seconds,
    choose,
    expected,
    lost_share,
    nets_of,
    usual,
)
from laconic.policy.facts import Facts, Net
from laconic.policy.predict import often, travel, undisturbed
from laconic.policy.probe import Probed, probe, shapes_of, usage
from laconic.processor import Usage

log = logging.getLogger("laconic")

FIRST_WARMUP, FIRST_WINDOW = 2, 2
"""Steps before the first choice: first those that are not measured, because the first steps are
slow, and then those that are. They are few, because on a slow network each takes several times as
long as after the choice. A run that starts with a delay takes `WARMUP` and `WINDOW` steps."""
SLOW_WARMUP, SLOW_WINDOW, SLOW_SECONDS = 1, 1, 1.0
"""The same where each of these steps sends for so many seconds or more. At 1 Mbit/s, gradients of
the text model in four bits take 5 s."""
REVIEW = 64
"""Steps between reviews, in which the ranks compare their pace with the one before."""
LATER = 8
"""The least number of steps from the start of a review to its result. Training continues
meanwhile."""
CHANGE = 1.4
"""The network is measured again if the time per step (including waiting) or the time per byte has
grown or shrunk by this factor."""
LEAST_TRAFFIC = 2**16
"""The least number of bytes for an accurate time per byte."""

PACE, MEASURE = "comparing the pace", "measuring the network"
"""The names of the calls of a policy."""

_PLACE = ("steps", "due", "baseline", "extra", "workers")
"""The attributes of a `Chooser` between two reviews that are equal on all workers."""


class Chooser:
    """Measures for a synchronizer with ``workers`` workers, and decides when to change the
    recipe."""

    def __init__(self, auto: Auto, workers: int) -> None:
        self.auto, self.text = auto, auto.text
        self.now = start(workers)
        self.choices: list[Choice] = []
        self._extra: dict[str, float] = {}
        self._baseline: list[float] = []
        """The pace in the first review of the current recipe."""
        self._paces: Pending[Tensor] | None = None
        self._facts: Facts | None = None
        """None after loading: those before may be of another network."""
        self._workers = workers
        """The number of workers in the latest measurement."""
        self._steps, self._due = 0, 0
        """Steps with the current recipe, and the number of steps at which `_paces` is read."""
        self._spans: list[tuple[float, float]] = []
        """Seconds of each step, and of its waiting."""
        self._last = (0.0, 0.0)
        self._before = Usage(0.0, 0.0, 0.0, 0.0, 0.0)
        """Up to where measured steps begin."""
        self._work = (0.0, 0.0)
        """What messages took of the processors when it was last measured: see `_used`."""
        self._first = FIRST_WARMUP, FIRST_WINDOW
        """Steps before the first choice, if they send gradients."""
        self._probed: Probed | None = None
        """The network as `start` has measured it, until the next choice."""

    def start(self, session: Session) -> None:
        """Use ``session``: measure the link between its workers, and start with a recipe for it.
        All of its ranks choose together. In an elastic run the network is measured later, because
        others may be training already."""
        self._link, self._world, self._comm = session.workers, session.world, session.comm
        self._session, self._device = session, session.device
        self._alone = session.elastic is None and session.workers.size == 1
        self._ranks = 1 if session.elastic is not None else self._world.size // self._link.size
        if session.elastic is None and not self._alone:
            self._announce(MEASURE)
            self._probed = self._comm.call(self._probe, MEASURE)
            self._before = usage(session)
            facts, _ = self._measure()
            self.now = start(facts.workers, facts)
            if travel(self.now.recipe[0], facts) >= SLOW_SECONDS:
                self._first = SLOW_WARMUP, SLOW_WINDOW

    @property
    def recipe(self) -> Recipe:
        """The current recipe."""
        return self.now.recipe

    def after_step(self) -> bool:
        """Measure the step, and return whether the `recipe` has changed. Every rank must call it
        after the same steps."""
        if self._alone:
            return False
        now = self._now()
        self._steps += 1
        warmup = WARMUP if self.choices else self._first[0]
        if self._steps > warmup:
            self._spans.append((now[0] - self._last[0], now[1] - self._last[1]))
        if self._steps == warmup:  # without the messages of a change of recipe
            self._before = usage(self._session)
        before = self.now
        self._review()
        self._last = self._now()
        return self.now.text != before.text

    def _now(self) -> tuple[float, float]:
        """The time, and the seconds so far in which training waited, sent, or folded."""
        waiting = self._comm.seconds_waiting + self._session.round_seconds
        return time.perf_counter(), waiting

    def _review(self) -> None:
        first = WARMUP + WINDOW
        if not self.choices:
            hurry = not workers_differ(self.now.recipe)
            if self._steps >= (sum(self._first) if hurry else first):
                self._choose_anew()
        elif self._paces is None and self._due_for_review():
            spans, self._spans = self._spans, []
            wall, compute = usual(spans, cycle_of(self.now.recipe))
            each, *work = self._used()
            own = [wall, each, compute, *work]
            row = torch.tensor(own, dtype=torch.float64, device=self._device)
            self._announce(PACE)
            self._paces = self._comm.submit(partial(self._world.gather, row), PACE)
            delay = first_sent(self.now.recipe).delay
            self._due = self._steps + max(LATER, delay)  # behind other messages
        elif self._paces is not None and self._steps == self._due:
            paces, self._paces = self._paces.wait(), None
            wall, each, compute = paces[:, :3].amax(0).tolist()
            carry, contention = _busiest(paces[:, 3:])
            if paces.shape[0] // self._ranks != self._workers:
                self._choose_anew()  # workers have come or gone
            elif self._workers > 1:
                self._compare([wall, each], (compute, carry, contention))

    def _due_for_review(self) -> bool:
        """Whether steps are to be compared: each time over whole intervals between rounds."""
        cycle = cycle_of(self.now.recipe)
        first = WARMUP + max(WINDOW, cycle)
        later = self._steps > first and self._steps % max(REVIEW, cycle) == 0
        return self._steps == first or later

    def _announce(self, name: str) -> None:
        """Announce that the next job of the communication thread is a separate call, not part of a
        round."""
        begin = partial(self._world.begin_call, Call(self._session.step, name), wait=False)
        self._comm.before_next(begin)

    def _used(self) -> tuple[float, float, float]:
        """The seconds per byte on the link, 0 if too few bytes were sent; and what messages take of
        the processors: `Usage.carry` and `Usage.contention`, or those before if too few were sent,
        which are then measured on."""
        now = usage(self._session)
        used, each = now.since(self._before), 0.0
        if used.bytes >= LEAST_TRAFFIC:
            each, self._work = used.seconds / used.bytes, (used.carry, used.contention)
            self._before = now
        return each, *self._work

    def _compare(self, pace: list[float], measured: tuple[float, float, float]) -> None:
        """Choose again if a step's time is not as predicted, or not as before."""
        if self._facts is not None and not self._baseline:
            compute, carry, contention = measured
            facts = replace(self._facts, compute=compute, carry=carry, contention=contention)
            self._baseline, facts = pace, undisturbed(self.now.recipe, facts)
            ratio = pace[0] / expected(self.now.recipe, facts)
            if not 1 / CHANGE < ratio < CHANGE:
                facts, _ = self._measure()  # the network may have changed since the choice
                if self._rests(facts):
                    return
            self._extra[self.now.kind] = pace[0] - expected(self.now.recipe, facts)
            self._choose(facts)
            return
        pairs = list(zip(pace, self._baseline or pace, strict=True))
        self._baseline = [before or now for now, before in pairs]
        moved = (not 1 / CHANGE < now / before < CHANGE for now, before in pairs if now * before)
        if self._facts is None or any(moved):
            self._baseline = pace
            self._choose_anew(pace[0])

    def _choose_anew(self, wall: float | None = None) -> None:
        """Measure and choose. ``wall``: the usual seconds of a step, where they are known."""
        facts, lately = self._measure()
        if self._rests(facts):
            return
        beyond = (lately if wall is None else wall) - expected(self.now.recipe, facts)
        self._extra = {self.now.kind: max(beyond, 0.0)}
        self._choose(facts)

    def _choose(self, facts: Facts) -> None:
        self._probed, step = None, self._session.step
        differ = workers_differ(self.now.recipe)  # else a change from the first one is cheap
        before = self.now if self.choices or differ else None
        stay = change_seconds(facts) / step if self.choices and differ else 0.0
        text, reason = choose(self.auto, facts, before, self._extra, stay)
        self._facts = facts
        changed = not self.choices or text != self.now.text
        if changed:
            self.choices.append(Choice(step, text, facts, reason))
            if self._world.rank == 0:
                log.info("after step %d: %s. %s", step, text, reason)
            self._steps, self._baseline, self._spans = 0, [], []
        self.now = spelled(text, 1.0)  # `choose` finds its steps again

    def _rests(self, facts: Facts) -> bool:
        """Whether no choice is possible, because the other workers are lost or have not joined, or
        no worker has measured a step yet. If so, the next steps are measured again."""
        rests = facts.workers == 1 or not facts.compute
        if rests:
            self._steps, self._baseline, self._spans = 0, [], []
        return rests

    # -- measuring ----

    def _measure(self) -> tuple[Facts, float]:
        """The facts and the seconds of a step, each from the slowest rank. The network is measured,
        too, unless `start` has just done so."""
        spans = self._spans
        if len(spans) <= FIRST_WINDOW:  # a single slow one would be half of the median
            spans = sorted(spans)[:1]
        wall, compute = usual(spans, cycle_of(self.now.recipe))
        _, *used = self._used()  # without the probes
        self._announce(MEASURE)
        found = self._probed or self._comm.call(self._probe, MEASURE)
        shapes, itemsize = shapes_of(self._session)
        elements = sum(map(math.prod, shapes))
        muon = muon_costs(self._session, self._ranks) if self.auto.outer else (0.0,) * 4
        slowest = [compute, -found.rate, found.latency, wall, elements, -elements]
        rest = [*muon, itemsize, found.packets, found.again, *used]
        own = torch.tensor([*slowest, *rest], dtype=torch.float64, device=self._device)
        everyone = self._comm.call(partial(self._world.gather, own), MEASURE)
        self._workers = everyone.shape[0] // self._ranks  # those of now may be others
        self._before = usage(self._session)  # without the probes, which wait for nothing else
        ranks = 1 if self._session.sharded else self._ranks  # else each sends a part of a message
        facts, wall = _of_all(everyone, self._workers, ranks, shapes)
        facts = replace(facts, overlapping=self._world.overlapping is not None)
        return undisturbed(self.now.recipe, facts), wall

    def _probe(self) -> Probed:
        with self._session.ledger.measuring():  # in the communication thread
            return probe(self._link, self._device)

    # -- saving ----

    def state_dict(self) -> dict[str, Any]:
        """The choices so far and the facts behind them, as plain data."""
        return {"choices": [asdict(c) for c in self.choices], "text": self.now.text}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`, with its `recipe`. Step times are measured again, because the
        machine may be a different one."""
        choices = [Choice(**{**c, "facts": _facts(c["facts"])}) for c in state["choices"]]
        if choices or self._link.size > 1:
            self.now = spelled(state["text"], 1.0)
        self.choices, self._steps, self._baseline, self._extra = choices, 0, [], {}
        self._paces, self._spans, self._facts = None, [], None
        self._probed = None if choices else self._probed
        self._last = self._now()

    def handover(self) -> dict[str, Any]:
        """See `Policy.handover`."""
        return {
            **self.state_dict(),
            **{name: getattr(self, f"_{name}") for name in _PLACE},
            "facts": None if self._facts is None else asdict(self._facts),
            "paces": None if self._paces is None else self._paces.wait(),
        }

    def take_over(self, state: Mapping[str, Any]) -> None:
        """See `Policy.take_over`."""
        self.load_state_dict(state)
        for name in _PLACE:
            setattr(self, f"_{name}", state[name])
        self._facts = None if state["facts"] is None else _facts(state["facts"])
        self._before = usage(self._session)
        if state["paces"] is not None:
            self._paces = Pending.of(state["paces"])

    def undo(self) -> Callable[[], None]:
        """A function that restores the present state after a `load_state_dict`."""
        return partial(vars(self).update, dict(vars(self)))


def cycle_of(recipe: Recipe) -> int:
    """Steps between two rounds of ``recipe`` on parameters, of whatever fragment."""
    rounds = sum(often(r) for r in recipe if isinstance(r, Round) and r.exchange.communicates)
    return round(1 / rounds) if rounds else 1


def muon_costs(session: Session, ranks: int) -> tuple[float, ...]:
    """-1 where outer steps in Muon's direction may be chosen, else 0; the same of each worker's
    own; and `Facts.turning` and `Facts.largest`. ``ranks``: of a worker."""
    whole = [p.shape for p in session.params()]  # of FSDP's, too
    if not takes_muon(session.optimizer, whole):
        return (0.0,) * 4
    turns = turning(whole, session.device)
    if session.sharded:  # the ranks of a worker share the matrices
        turns /= ranks
    own = -float(takes_own(session.optimizer))
    return -1.0, own, turns, largest_fragment(session.model, session.groups())


def _busiest(rows: Tensor) -> tuple[float, float]:
    """The carry and contention of the rank on which messages slow down training most. Those of a
    newcomer are 0."""
    carry, contention = rows[int(rows.prod(1).argmax())].tolist()
    return carry, contention


def _of_all(
    rows: Tensor, workers: int, ranks: int, shapes: tuple[tuple[int, ...], ...]
) -> tuple[Facts, float]:
    """The facts and the seconds of a step, from what each rank has measured. ``ranks``: how many of
    a worker share its messages."""
    compute, rate, latency, wall, most, least, muon, own, turns, largest, itemsize = (
        rows[:, :11].amax(0).tolist()
    )
    if most != -least:  # shards of different sizes: all ranks use the largest
        shapes = ((int(most),),)
    packets, again = rows[:, 11:13].sum(0).tolist()
    carry, contention = _busiest(rows[:, 13:15])
    known = workers, shapes, int(itemsize), compute, -rate, latency
    facts = Facts(
        *known,
        loss=lost_share(packets, again, latency, len(rows)),
        ranks=ranks,
        nets=nets_of(workers, ranks, -rate, latency),
        contention=contention,
        carry=carry,
        muon=bool(muon),  # -1 where all ranks take it
        own=bool(own),
        turning=turns,
        largest=largest,
    )
    return facts, wall


def _facts(saved: Mapping[str, Any]) -> Facts:
    """The facts that became these plain data."""
    return Facts(**{**saved, "nets": {name: Net(**net) for name, net in saved["nets"].items()}})
