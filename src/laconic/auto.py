"""The recipe `auto`: measure the step and the network, choose a recipe, and review the choice.

Every rank measures, and the measurements are gathered. From the slowest rank's value of each, all
ranks compute the same choice: the candidate with the most progress per second,

    argmin  seconds(candidate) * steps(candidate)

`laconic.predict` gives the seconds per step. ``steps`` is how many steps the candidate takes to do
the work of one step of dense gradient averaging, as ``python -m benchmarks.factors`` measures it.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laconic.algorithms.exchanges import Mean
from laconic.algorithms.named import checked
from laconic.algorithms.round import Recipe, Round, workers_differ
from laconic.algorithms.schedules import every
from laconic.algorithms.updates import Average
from laconic.candidates import (
    Candidate,
    candidates,
    largest_fragment,
    lateness,
    made,
    same_but_delay,
    start,
    takes_muon,
    turning,
)
from laconic.engine.comparison import BufferWatch
from laconic.engine.session import Session
from laconic.errors import check_bool, check_float
from laconic.links.calls import Call
from laconic.links.comm_thread import Pending
from laconic.predict import Facts, Net, often, predict, travel, undisturbed
from laconic.probe import Probed, probe, slow_host, unequal_workers
from laconic.processor import Usage
from laconic.units import format_rate, format_share

log = logging.getLogger("laconic")

FIRST_WARMUP, FIRST_WINDOW = 2, 2
"""Steps before the first choice: first those that are not measured, because the first steps are
slow, and then those that are. They are few, because on a slow network each takes several times as
long as after the choice. A run that starts with a delay takes `WARMUP` and `WINDOW` steps."""
SLOW_WARMUP, SLOW_WINDOW, SLOW_SECONDS = 1, 1, 1.0
"""The same where each of these steps sends for so many seconds or more. At 1 Mbit/s, gradients of
the text model in four bits take 5 s."""
WARMUP, WINDOW = 3, 8
"""The same after a choice, before it is reviewed."""
REVIEW = 64
"""Steps between reviews, in which the ranks compare their pace with the one before."""
LATER = 8
"""The least number of steps from the start of a review to its result. Training continues
meanwhile."""
CHANGE = 1.4
"""The network is measured again if the time per step (including waiting) or the time per byte has
grown or shrunk by this factor."""
GAIN = 0.05
"""The least relative gain for which the recipe is changed, because a change sends a few models over
the network."""
CHANGED_MODELS = 3
"""The models that such a change averages: the parameters and, with AdamW, two tensors of optimizer
state. It must pay off if training goes on for as many steps as it has taken: for at most the time
of a change, a recipe is then worse than the one that somebody who knows the end would choose. At 1
Mbit/s it takes two minutes, and a run of the race changed twice in 19 steps, for gains of 10%, when
other programs used the processors."""
ACROSS = 0.15
"""How much more a recipe must gain if it exchanges parameters in place of gradients, or gradients
in place of parameters. Only the present one was measured; predictions of others miss by up to 15%
(``docs/validation.md``), and an outer step begins anew. Without it, a run of the race at 1 Gbit/s,
with 4 workers on 2 cores, changed seven times in 330 steps."""
TIE = 0.02
"""Among candidates within this relative distance of the best, the first one is chosen, which
differs least from dense gradient averaging."""
SHORT, FEWEST, FEW = 2.5e-3, 10, 3
"""Where messages take less than ``SHORT`` seconds, fewer than `FEWEST` packets that were sent
again, or than `FEW` for each rank, do not count as lost. TCP sends packets again that were only
late, too: over the loopback interface, which loses none, 0 to 2 of the 1,650 of two ranks, and 3 to
6 of the 4,900 of four."""
LEAST_STEP = 0.01
"""The least seconds of the slowest rank's step for which ranks are compared. The two to eight steps
that are measured say nothing about shorter ones: two equal ranks on 2 cores, with steps of 4 ms,
differed by factors of 1.5 to 3.5 in four of six runs."""
LEAST_TRAFFIC = 2**16
"""The least number of bytes for an accurate time per byte."""

PACE, MEASURE = "comparing the pace", "measuring the network"
"""The names of the calls of a policy."""


@dataclass(frozen=True)
class Auto:
    """The result of `laconic.auto`, in place of a recipe, which is chosen during training."""

    target: float | None = None
    outer: bool = True

    @property
    def text(self) -> str:
        """The call that makes it."""
        options = [] if self.target is None else [f"target={self.target:g}"]
        options += [] if self.outer else ["outer=False"]
        return f"auto({', '.join(options)})"


@checked
def auto(target: float | None = None, *, outer: bool = True) -> Auto:
    """Measure the first steps and the network, then choose codec, period and overlap.

    Choose again when they change. Every rank makes the same choice. The logger ``laconic`` and
    `Synchronizer.choices` give the reasons. The candidates are `ddp` with and without codecs, and,
    with Int4 and a delay that hides their messages, `local_sgd` every two steps and
    `streaming_diloco` for several periods. For optimizers of Adam's kind and SGD, where most
    elements are in matrices, `ddp` also has an `outer_step`, and `streaming_diloco` takes its own,
    in Muon's direction.

    Args:
        target: the least speed, as a share in (0, 1] of the speed without communication. Only
            recipes that are predicted to reach it are considered, or the fastest one if none does.
            None: the recipe with the most progress per second, even if its steps are slower.
        outer: whether to take outer steps in Muon's direction, a second optimizer beside yours.
            They change the effective learning rate: try lower and higher ones. False: `ddp` has
            none, and those of `streaming_diloco` are Nesterov's.

    Examples:
        >>> sync = laconic.attach(model, optimizer, laconic.auto())
        >>> [choice.text for choice in sync.choices]  # one worker has nothing to choose
        []
    """
    if target is not None:
        check_float("target", target, 0.0, strict=True, most=1.0)
    return Auto(target, check_bool("outer", outer))


@dataclass(frozen=True)
class Choice:
    """A choice after ``step``: the recipe's text, the measured facts, and the reason."""

    step: int
    text: str
    facts: Facts
    reason: str


def choose(
    auto: Auto,
    facts: Facts,
    now: Candidate | None,
    extra: Mapping[str, float],
    stay: float = 0.0,
) -> tuple[str, str]:
    """The text of the best candidate, and the reason. ``now``: the current candidate, which is kept
    unless another one is better by `GAIN` (and `ACROSS`), and by ``stay`` seconds per step.
    ``extra``: measured seconds per step beyond the prediction, by `Candidate.kind`."""
    choices = list(candidates(facts, now))
    if now is not None and all(c.text != now.text for c in choices):  # its delay does not suit
        alike = (c for c in choices if same_but_delay(c.recipe, now.recipe))
        choices += [replace(now, steps=c.steps) for c in alike]
    seconds = {
        c.text: max(expected(c.recipe, facts) + extra.get(c.kind, 0.0), facts.compute)
        for c in choices
    }
    steps = {c.text: c.steps for c in choices}
    score = {text: seconds[text] * steps[text] for text in seconds}
    for c in choices:
        if now is not None and (c.kind == "rounds") != (now.kind == "rounds"):
            score[c.text] *= 1 + ACROSS
    allowed = list(seconds)
    if auto.target is not None:
        allowed = [t for t in allowed if facts.compute >= auto.target * seconds[t]]
        allowed = allowed or [min(seconds, key=seconds.__getitem__)]
    least = min(score[text] for text in allowed)
    best = next(text for text in allowed if score[text] <= (1 + TIE) * least)
    if now is not None and now.text in allowed:
        enough = (1 + GAIN) * least + stay * steps[now.text]
        best = now.text if score[now.text] <= enough else best
    lost = f", and {format_share(facts.loss)} of its packets are lost" if facts.loss else ""
    each = " per rank" if facts.ranks > 1 else ""
    network = (
        f"{format_rate(facts.rate)}{each} and takes {facts.one_way * 1e3:.2g} ms per message{lost}"
    )
    work = facts.contention * facts.carry
    slowed = f"; messages slow training by {work * 1e9:.2g} ns per byte" if work else ""
    second = ""
    if "outer='muon'" in best:
        second = (
            "; its outer step is a second optimizer: look at the learning rate again, or use "
            "auto(outer=False)"
        )
    reason = (
        f"a step computes for {facts.compute * 1e3:.3g} ms; the network sends "
        f"{network}: {best} "
        f"takes {seconds[best] * 1e3:.3g} ms per step, {facts.compute / seconds[best]:.0%} of the "
        f"speed without communication, and {counted(steps[best])} for the work of one step of "
        f"ddp(){slowed}{second}"
    )
    return best, reason


def expected(recipe: Recipe, facts: Facts) -> float:
    """The seconds of a step: as predicted, and with messages that arrive late."""
    return predict(recipe, facts).seconds + lateness(recipe, facts)


def change_seconds(facts: Facts) -> float:
    """The seconds of a change from a recipe under which workers differ."""
    average = Round(every(1), Average(), Mean())
    return CHANGED_MODELS * travel(average, facts)


def counted(steps: float) -> str:
    """So many ``steps``, in words."""
    return "one step" if steps == 1 else f"{round(steps, 2):g} steps"


def lost_share(packets: float, again: float, latency: float, ranks: int) -> float:
    """The share of the ``packets`` of all ``ranks`` that were lost, of which ``again`` were sent
    again; 0 for fewer than TCP sends again on networks that lose none."""
    few = latency < SHORT and again < max(FEWEST, FEW * ranks)
    return 0.0 if few or not packets else again / packets


def nets_of(workers: int, ranks: int, rate: float, latency: float) -> dict[str, Net]:
    """The networks of ``workers`` of several ``ranks`` each, all of which send at ``rate`` to the
    same rank of the other workers at once. What stays inside a worker is free. Empty for one rank.
    """
    if ranks == 1:
        return {}
    outside = (workers - 1) * ranks / (workers * ranks - 1)
    return {"world": Net(rate / outside, latency), "replica": Net(math.inf, 0.0)}


def slow_worker(computes: Tensor) -> str:
    """A clause about the rank whose steps take longest, from each rank's seconds; empty if they
    take about as long as the median rank's, or less than `LEAST_STEP`."""
    slowest = float(computes.max())
    if slowest < LEAST_STEP or not unequal_workers(computes):
        return ""
    rank, two = int(computes.argmax()), len(computes) == 2
    other = f"rank {1 - rank}, which waits for it" if two else "the median rank"
    gain = float((slowest / computes[computes > 0]).mean())  # newcomers have 0
    return (
        f"; rank {rank} computes {slowest / float(computes.median()):.2g} times as long as {other}"
        f"{'' if two else ', and the others wait for it'}. If no rank waited (docs/quorum.md), "
        f"{'both' if two else 'all'} together would take {gain:.2g} times as many steps per second"
    )


_PLACE = ("steps", "due", "baseline", "extra", "workers", "facts_loaded", "told", "slow_host")
"""The attributes of a `Chooser` between two reviews that are equal on all workers."""


class Chooser:
    """Measures for a synchronizer with ``workers`` workers, and decides when to change the
    recipe."""

    def __init__(self, auto: Auto, workers: int) -> None:
        self.auto = auto
        self.now = start(workers)
        self.choices: list[Choice] = []
        self._extra: dict[str, float] = {}
        self._baseline: list[float] = []
        """The pace in the first review of the current recipe."""
        self._paces: Pending[Tensor] | None = None
        self._facts: Facts | None = None
        self._facts_loaded = False
        """Whether the facts were loaded: they may be of another network."""
        self._workers = workers
        """The number of workers in the latest measurement."""
        self._step = 0
        """The optimizer steps taken."""
        self._steps, self._due = 0, 0
        """Steps with the current recipe, and the number of steps at which `_paces` is read."""
        self._spans: list[tuple[float, float]] = []
        """Seconds of each step, and of its waiting."""
        self._last = self._traffic = (0.0, 0.0)
        self._before = Usage(0.0, 0.0, 0.0, 0.0)
        """Up to where measured steps begin."""
        self._work = (0.0, 0.0)
        """What messages took of the processors when it was last measured: see `_used`."""
        self._slow_worker = self._slow_host = ""
        """What the latest measurements say about unequal workers and networks."""
        self._told = False
        """Whether the latest choice has told of unequal workers or networks."""
        self._first = FIRST_WARMUP, FIRST_WINDOW
        """Steps before the first choice, if they send gradients."""
        self._buffers: BufferWatch | None = None
        """Which of the module's buffers training changes; None: not known yet, or they stay."""
        self._probed: Probed | None = None
        """The network as `start` has measured it, until the next choice."""

    def start(self, session: Session) -> None:
        """Use ``session``: measure the link between its workers, and start with a recipe for it.
        All of its ranks choose together. In an elastic run the network is measured later, because
        others may be training already."""
        self._link, self._world, self._comm = session.workers, session.world, session.comm
        self._session, self._device, self._sent = session, session.device, session.traffic
        self._alone = session.elastic is None and session.workers.size == 1
        self._ranks = 1 if session.elastic is not None else self._world.size // self._link.size
        if session.elastic is None and not self._alone:
            self._announce(MEASURE)
            self._probed = self._comm.call(self._probe, MEASURE)
            self._before = session.usage()
            facts, _ = self._measure()
            self.now = start(facts.workers, facts)
            if travel(self.now.recipe[0], facts) >= SLOW_SECONDS:
                self._first = SLOW_WARMUP, SLOW_WINDOW

    @property
    def text(self) -> str:
        """The call that makes it, such as ``auto()``."""
        return self.auto.text

    @property
    def description(self) -> str:
        """The options of `auto`."""
        return repr(self.auto)

    @property
    def recipe(self) -> Recipe:
        """The current recipe."""
        return self.now.recipe

    def after_step(self, step: int) -> bool:
        """Measure the step, and return whether the `recipe` has changed. Every rank must call it
        after the same steps."""
        if self._alone:
            return False
        now = self._now()
        self._step = step
        self._steps += 1
        kind = self._session.settings.buffers
        if self._buffers is None and kind != "keep":
            self._buffers = BufferWatch(self._session.model, every=kind == "broadcast")
        if self._steps > (WARMUP if self.choices else self._first[0]):
            self._spans.append((now[0] - self._last[0], now[1] - self._last[1]))
        if self._steps == WARMUP:  # without the messages of a change of recipe
            self._traffic = self._sent()
        if self._steps == (WARMUP if self.choices else self._first[0]):
            self._before = self._session.usage()
        before = self.now
        self._review(step)
        self._last = self._now()
        return self.now.text != before.text

    def _now(self) -> tuple[float, float]:
        """The time, and the seconds so far in which training waited, sent, or folded."""
        waiting = self._comm.seconds_waiting + self._session.round_seconds
        return time.perf_counter(), waiting

    def _review(self, step: int) -> None:
        first = WARMUP + WINDOW
        if not self.choices:
            hurry = not workers_differ(self.now.recipe)
            if self._steps >= (sum(self._first) if hurry else first):
                self._choose_anew(step)
        elif self._paces is None and self._due_for_review():
            own = [*self._pace(), *self._used(again=True)]
            row = torch.tensor(own, dtype=torch.float64, device=self._device)
            self._announce(PACE)
            self._paces = self._comm.submit(partial(self._world.gather, row), PACE)
            self._due = self._steps + max(LATER, self.now.recipe[0].delay)  # behind other messages
        elif self._paces is not None and self._steps == self._due:
            paces, self._paces = self._paces.wait(), None
            self._slow_worker = slow_worker(paces[:, 2])
            wall, each, compute = paces[:, :3].amax(0).tolist()
            carry, contention = _busiest(paces[:, 3:])
            if paces.shape[0] // self._ranks != self._workers:
                self._choose_anew(step)  # workers have come or gone
            elif self._workers > 1:
                self._compare(step, [wall, each], (compute, carry, contention))

    def _due_for_review(self) -> bool:
        """Whether steps are to be compared: each time over whole intervals between rounds."""
        first = WARMUP + max(WINDOW, self._cycle)
        later = self._steps > first and self._steps % max(REVIEW, self._cycle) == 0
        return self._steps == first or later

    def _announce(self, name: str) -> None:
        """Announce that the next job of the communication thread is a separate call, not part of a
        round."""
        begin = partial(self._world.begin_call, Call(self._step, name), wait=False)
        self._comm.before_next(begin)

    def _pace(self) -> list[float]:
        """The usual seconds of a step, the seconds per byte on the link (0 if too few were sent),
        and the usual seconds of a step without its waiting: see `usual`."""
        spans, self._spans = self._spans, []
        traffic, each = self._sent(), 0.0
        sent, seconds = (now - then for now, then in zip(traffic, self._traffic, strict=True))
        if sent >= LEAST_TRAFFIC:
            self._traffic, each = traffic, seconds / sent
        wall, compute = usual(spans, self._cycle)
        return [wall, each, compute]

    @property
    def _cycle(self) -> int:
        """Steps between two rounds of the current recipe, of whatever fragment."""
        rounds = sum(often(r) for r in self.now.recipe if isinstance(r, Round))
        return round(1 / rounds) if rounds else 1

    def _used(self, *, again: bool = False) -> tuple[float, float]:
        """What messages take of the processors: `Usage.carry` and `Usage.contention`, or those
        before if too few were sent. ``again``: the next ones are measured from now on."""
        now = self._session.usage()
        used = now.since(self._before)
        if used.bytes >= LEAST_TRAFFIC:
            self._work = used.carry, used.contention
            self._before = now if again else self._before
        return self._work

    def _compare(self, step: int, pace: list[float], measured: tuple[float, float, float]) -> None:
        """Choose again if a step's time is not as predicted, or not as before."""
        assert self._facts is not None, "measured before the first choice"
        if not self._baseline:
            compute, carry, contention = measured
            facts = replace(self._facts, compute=compute, carry=carry, contention=contention)
            self._baseline, facts = pace, undisturbed(self.now.recipe, facts)
            ratio = pace[0] / expected(self.now.recipe, facts)
            if self._facts_loaded or not 1 / CHANGE < ratio < CHANGE:
                facts, _ = self._measure()  # the network may have changed since the choice
                if self._rests(facts):
                    return
            self._extra[self.now.kind] = pace[0] - expected(self.now.recipe, facts)
            self._choose(step, facts)
            return
        pairs = list(zip(pace, self._baseline, strict=True))
        self._baseline = [before or now for now, before in pairs]
        if any(not 1 / CHANGE < now / before < CHANGE for now, before in pairs if now * before):
            self._baseline = pace
            self._choose_anew(step, pace[0])

    def _choose_anew(self, step: int, wall: float | None = None) -> None:
        """Measure and choose. ``wall``: the usual seconds of a step, where they are known."""
        facts, lately = self._measure()
        if self._rests(facts):
            return
        beyond = (lately if wall is None else wall) - expected(self.now.recipe, facts)
        self._extra = {self.now.kind: max(beyond, 0.0)}
        self._choose(step, facts)

    def _choose(self, step: int, facts: Facts) -> None:
        self._probed = None
        differ = workers_differ(self.now.recipe)  # else a change from the first one is cheap
        before = self.now if self.choices or differ else None
        by_text = {c.text: c for c in candidates(facts, before)}
        stay = change_seconds(facts) / step if self.choices and differ else 0.0
        text, reason = choose(self.auto, facts, before, self._extra, stay)
        uneven = self._slow_worker + self._slow_host
        self._facts, self._facts_loaded = facts, False
        changed = not self.choices or text != self.now.text
        if changed or (uneven and not self._told):
            self.choices.append(Choice(step, text, facts, reason + uneven))
            if self._world.rank == 0:
                log.info("after step %d: %s. %s", step, text, reason + uneven)
        self._told = bool(uneven)
        if changed:
            self._steps, self._baseline, self._spans = 0, [], []
        self.now = by_text.get(text, self.now)

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
        wall, compute = usual(spans, self._cycle)
        used = self._used()  # without the probes
        self._announce(MEASURE)
        found = self._probed or self._comm.call(self._probe, MEASURE)
        shapes, itemsize = self._session.shapes()
        elements = sum(map(math.prod, shapes))
        optimizer = self._session.optimizer
        whole = [p.shape for p in self._session.params()]  # of FSDP's, too
        muon = self.auto.outer and takes_muon(optimizer, whole)
        turns = largest = 0.0
        if muon:
            turns = turning(whole, self._device)
            if self._session.sharded:  # the ranks of a worker share the matrices
                turns /= self._ranks
            largest = largest_fragment(self._session.model, self._session.groups())
        slowest = [compute, -found.rate, found.latency, wall, elements, -elements, -float(muon)]
        slowest += [turns, largest, itemsize]
        sizes, changing = ((), 0) if self._buffers is None else self._buffers.sizes()
        slowest.append(changing)
        rest = [found.packets, found.again, *used, *found.speeds]
        own = torch.tensor([*slowest, *rest], dtype=torch.float64, device=self._device)
        everyone = self._comm.call(partial(self._world.gather, own), MEASURE)
        compute, rate, latency, wall, most, least, muon, turns, largest, itemsize, changing = (
            everyone[:, :11].amax(0).tolist()
        )
        packets, again = everyone[:, 11:13].sum(0).tolist()
        carry, contention = _busiest(everyone[:, 13:15])
        self._workers = everyone.shape[0] // self._ranks  # those of now may be others
        self._traffic = self._sent()  # without the probes, which wait for nothing else
        self._before = self._session.usage()
        if most != -least:  # shards of different sizes: all ranks use the largest
            shapes = ((int(most),),)
        loss = lost_share(packets, again, latency, everyone.shape[0])
        self._slow_worker, self._slow_host = slow_worker(everyone[:, 0]), ""
        if self._ranks == 1:  # a rank's row is that of a worker
            self._slow_host = slow_host(everyone[:, 15:])
        known = self._workers, shapes, int(itemsize), compute, -rate, latency, loss
        ranks = 1 if self._session.sharded else self._ranks  # else each sends a part of a message
        facts = Facts(
            *known,
            ranks=ranks,
            nets=nets_of(self._workers, ranks, -rate, latency),
            contention=contention,
            carry=carry,
            overlapping=self._world.overlapping is not None,
            muon=bool(muon),  # -1 where all ranks take it
            turning=turns,
            largest=largest,
            buffers=sizes,
            changing=int(changing),
            broadcast=self._session.settings.buffers == "broadcast",
        )
        return undisturbed(self.now.recipe, facts), wall

    def _probe(self) -> Probed:
        with self._session.ledger.measuring():  # in the communication thread
            return probe(self._link, self._device)

    # -- saving ----

    def state_dict(self) -> dict[str, Any]:
        """The choices so far and the facts behind them, as plain data."""
        choices = [{**asdict(c), "facts": _saved(c.facts)} for c in self.choices]
        return {
            "choices": choices,
            "text": self.now.text,
            "facts": None if self._facts is None else _saved(self._facts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`, with its `recipe`. Step times are measured again, because the
        machine may be a different one."""
        from laconic.algorithms.parse import parse_recipe  # imports this module

        choices = [Choice(**{**c, "facts": _facts(c["facts"])}) for c in state["choices"]]
        if choices or self._link.size > 1:
            recipe = parse_recipe(state["text"])
            assert isinstance(recipe, tuple), "chosen from recipes"
            self.now = Candidate(_respelled(state["text"], recipe), recipe, 1.0)
        self._facts = None if state["facts"] is None else _facts(state["facts"])
        self.choices, self._steps, self._baseline, self._extra = choices, 0, [], {}
        self._paces, self._spans, self._facts_loaded = None, [], True
        self._probed = None if choices else self._probed
        self._last = self._now()

    def handover(self) -> dict[str, Any]:
        """See `Policy.handover`."""
        paces = self._paces
        known = paces is not None and paces.done()
        return {
            **self.state_dict(),
            **{name: getattr(self, f"_{name}") for name in _PLACE},
            "comparing": paces is not None,
            "outputs": {PACE: paces.wait()} if paces is not None and known else {},
        }

    def take_over(self, state: Mapping[str, Any], outputs: Mapping[str, Tensor]) -> None:
        """See `Policy.take_over`."""
        self.load_state_dict(state)
        for name in _PLACE:
            setattr(self, f"_{name}", state[name])
        self._traffic, self._before = self._sent(), self._session.usage()
        if state["comparing"]:
            raw = outputs[PACE].contiguous().view(-1).view(torch.uint8)  # or it is bytes already
            self._paces = Pending.of(raw.view(torch.float64).view(-1, 5))

    def undo(self) -> Callable[[], None]:
        """A function that restores the present state after a `load_state_dict`."""
        return partial(vars(self).update, dict(vars(self)))


def _respelled(text: str, recipe: Recipe) -> str:
    """The text of the candidate that equals ``recipe``, if there is one; else ``text``. Older
    versions saved all arguments. With one text per recipe, an unchanged choice does not look like a
    change."""
    same = made(recipe)
    return text if same is None else same.text


def _busiest(rows: Tensor) -> tuple[float, float]:
    """The carry and contention of the rank on which messages slow down training most. Those of a
    newcomer are 0."""
    carry, contention = rows[int(rows.prod(1).argmax())].tolist()
    return carry, contention


def usual(spans: Sequence[tuple[float, float]], cycle: int) -> tuple[float, float]:
    """The usual seconds of steps, and of steps without their waiting, from the ``spans``: the
    seconds of each step, and those in which it waited. ``cycle``: steps between two rounds.

    Computing is the median of the last steps. Waiting is the mean over whole cycles, because only
    the steps that end a round wait, and a median would miss them. A worker that has just joined has
    no ``spans`` and returns 0, because only the slowest worker's values are used.
    """
    if not spans:
        return 0.0, 0.0
    compute = statistics.median(wall - waiting for wall, waiting in spans[-WINDOW:])
    whole = spans[-(len(spans) // cycle) * cycle :] if len(spans) >= cycle else spans
    waited = sum(waiting for _, waiting in whole) / max(len(whole), cycle)
    return compute + waited, compute


def _saved(facts: Facts) -> dict[str, Any]:
    """``facts`` as plain data, without the networks, which `_facts` computes again."""
    return {name: value for name, value in asdict(facts).items() if name != "nets"}


def _facts(saved: Mapping[str, Any]) -> Facts:
    shapes = tuple(tuple(shape) for shape in saved["shapes"])
    names = ("computes", "rates", "receives", "shared", "buffers")
    alike = {name: tuple(saved.get(name, ())) for name in names}
    saved = {"one_way" if name == "latency" else name: v for name, v in saved.items()}  # of 0.2.0
    facts = Facts(**{**saved, **alike, "shapes": shapes, "nets": {}})
    nets = nets_of(facts.workers, facts.ranks, facts.rate, facts.one_way)
    return replace(facts, nets=nets)
