"""The recipe that chooses: measures the step and the network, picks what to say and how often, and
looks again when they change.

Every rank measures; the measurements are gathered, and from the slowest of each every rank works
out the same choice: of all candidates the one that makes the most progress per second,

    least  seconds(candidate) * steps(candidate)

with the seconds per step by `laconic.predict`, and ``steps`` how many steps the candidate takes
for what one step of dense gradient averaging does, as ``python -m benchmarks.factors`` measures it.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laconic.algorithms.named import checked
from laconic.algorithms.recipes import ddp, streaming_diloco
from laconic.algorithms.round import GradientRound, Recipe, Round
from laconic.device import synchronize
from laconic.engine.session import Session
from laconic.errors import check_float
from laconic.links import cost
from laconic.links.comm_thread import Pending
from laconic.predict import Facts, often, predict, travel
from laconic.units import format_rate

log = logging.getLogger("laconic")

FIRST_WARMUP, FIRST_WINDOW = 2, 2
"""Steps before the first choice that are not measured, as they are slow, and those that are: few,
as on a slow network each takes several times what it will take then."""
WARMUP, WINDOW = 3, 8
"""The same after a choice, when what it was made from is looked at again."""
REVIEW = 64
"""Steps after which the ranks compare whether it still is as it was."""
LATER = 8
"""Steps that such a comparison may take at least, beside the training."""
CHANGE = 1.4
"""How many times as long as before a step's computing, its waiting included, or a byte must take
(or as short) for the network to be measured anew."""
GAIN = 0.05
"""A choice must be better than the one in force by so much: a change costs a few models on the
network."""
TIE = 0.02
"""Of candidates that differ by less, the one that gives up least is taken."""
LEAST_PROBE, MOST_PROBE, LONG = 2**16, 2**26, 0.1
"""Bytes of the first and largest probe of the network; one that takes so many seconds is enough."""


@dataclass(frozen=True)
class Candidate:
    """A recipe, how it is written, and how many steps it takes for one of `laconic.ddp`."""

    text: str
    recipe: Recipe
    steps: float

    @property
    def kind(self) -> str:
        """Of candidates of one kind, what is measured of one holds for the others, too. All with
        rounds on parameters are of one: what they take beyond what is predicted is mostly the pace
        of the machine while nobody waits, and a change among them costs models on the network."""
        if isinstance(self.recipe[0], Round):
            return "rounds"
        return "coded gradients" if self.recipe[0].exchange.slots else "gradients"


GRADIENTS = {None: 1.0, "int8": 1.0, "int4": 1.02}
"""Codecs of gradients, with the steps they take, as measured. bfloat16 sends twice as much as Int8,
which takes no more steps."""
PERIODS = {4: 1.37, 8: 1.43, 16: 1.5, 32: 1.58, 64: 1.66, 128: 1.74, 256: 1.82, 512: 1.9}
"""Periods of `laconic.streaming_diloco` with Int4, with the steps they take: measured with a delay
of 1 up to 64, which is where a run of 480 steps has a few of them, and continued by 0.08 for each
doubling."""
SHORTEST = 8
"""The least period that is chosen: one of 4 takes 4% fewer steps, and more than that for a message
in every step, which `predict` does not see where processors are few: at 10 Mbit/s, 4 emulated hosts
on 2 cores, 0.200 s a step, where 8 took 0.181 s and 16 took 0.170 s (``docs/race.md``)."""
CHOSEN = tuple(period for period in PERIODS if period >= SHORTEST)
"""Those that `candidates` have, for `laconic.auto` and ``laconic advise`` alike."""
HALF = 0.5
"""Steps that a message begins later than where it falls due, as the last rank comes to it."""


def candidates(facts: Facts, now: Candidate | None = None) -> Iterator[Candidate]:
    """What there is to choose from, those that give up least first. The delay of ``now``, the one
    in force, is kept while it hides its messages, and half a step."""
    for codec, steps in GRADIENTS.items():
        yield _gradients(codec, steps)
    for period in CHOSEN:
        steps = PERIODS[period]
        delay, seconds = delay_for(period, facts)
        found = streaming(period, delay, steps)
        if now is not None and now.recipe[0].when == found.recipe[0].when:
            late = now.recipe[0].delay
            if seconds <= (late - HALF) * facts.compute and late <= 2 * delay:
                found = streaming(period, late, steps)
        yield found


def delay_for(period: int, facts: Facts) -> tuple[int, float]:
    """Steps in which a fragment's message arrives, a quarter of that more, and half a step, at most
    the period; and the seconds that it takes. It begins when the last rank has come to it, and none
    must wait for it: with a message on its way for 0.6 of its one step all waited for 13% of the
    time, at 10 Mbit/s on 4 emulated hosts."""
    seconds = travel(streaming(period, 1, 1.0).recipe[0], facts)
    return min(math.ceil(1.25 * seconds / facts.compute + HALF), period), seconds


def streaming(period: int, delay: int, steps: float) -> Candidate:
    """All else as by default, which is what `PERIODS` were measured with."""
    recipe = streaming_diloco(period, delay=delay)
    return Candidate(f"streaming_diloco({period}, delay={delay})", recipe, steps)


def _gradients(codec: str | None, steps: float) -> Candidate:
    text = "ddp()" if codec is None else f"ddp(codec={codec!r})"
    return Candidate(text, ddp(codec=codec), steps)


def start(workers: int) -> Candidate:
    """In force until there is a choice: cheap enough on any network, and gives up next to nothing;
    one worker, who has nothing to choose, codes nothing."""
    codec = "int4" if workers > 1 else None
    return _gradients(codec, GRADIENTS[codec])


@dataclass(frozen=True)
class Auto:
    """What `laconic.auto` returns: stands for a recipe, which is chosen in training."""

    target: float | None = None

    @property
    def text(self) -> str:
        """The call that made it."""
        return "auto()" if self.target is None else f"auto(target={self.target:g})"


@checked
def auto(target: float | None = None) -> Auto:
    """Measure the first steps and the network, then choose codec, period and overlap, and choose
    again when they have changed; every rank chooses the same, and says why to the logger
    ``laconic`` and in `Synchronizer.choices`.

    ``target``: the share of the speed without communication that must be reached, in (0, 1]: the
    choice is among the recipes predicted to reach it, or else is the fastest. None: whatever makes
    the most progress per second, be it slower. Candidates: `ddp` with and without codecs, and
    `streaming_diloco` with Int4 in several periods, with so much delay as hides its messages.
    """
    if target is not None:
        check_float("target", target, 0.0, strict=True, most=1.0)
    return Auto(target)


@dataclass(frozen=True)
class Choice:
    """A choice made after ``step``: the recipe's text, what it was made from, and why."""

    step: int
    text: str
    facts: Facts
    reason: str


def choose(
    auto: Auto, facts: Facts, now: Candidate | None, extra: Mapping[str, float]
) -> tuple[str, str]:
    """The text of the best candidate, and the reason. ``now``: the one in force, which stays unless
    another is better by `GAIN`. ``extra``: seconds per step beyond what is predicted, as measured
    for candidates of a `Candidate.kind`."""
    choices = list(candidates(facts, now))
    seconds = {
        c.text: max(predict(c.recipe, facts).seconds + extra.get(c.kind, 0.0), facts.compute)
        for c in choices
    }
    steps = {c.text: c.steps for c in choices}
    able = list(seconds)
    if auto.target is not None:
        able = [t for t in able if facts.compute >= auto.target * seconds[t]]
        able = able or [min(seconds, key=seconds.__getitem__)]
    least = min(seconds[text] * steps[text] for text in able)
    best = next(text for text in able if seconds[text] * steps[text] <= (1 + TIE) * least)
    if now is not None and now.text in able:
        best = now.text if seconds[now.text] * steps[now.text] <= (1 + GAIN) * least else best
    reason = (
        f"a step computes {facts.compute * 1e3:.3g} ms; the network does "
        f"{format_rate(facts.rate)} and takes {facts.latency * 1e3:.2g} ms a message: {best} takes "
        f"{seconds[best] * 1e3:.3g} ms a step, {facts.compute / seconds[best]:.0%} of the speed "
        f"without communication, and {steps[best]:g} steps for one of ddp()'s"
    )
    return best, reason


class Chooser:
    """Measures for one synchroniser of so many ``workers``, and says when to change the recipe."""

    def __init__(self, auto: Auto, workers: int) -> None:
        self.auto = auto
        self.now = start(workers)
        self.choices: list[Choice] = []
        self._extra: dict[str, float] = {}
        self._usual: list[float] = []
        self._asked: Pending[Tensor] | None = None
        self._facts: Facts | None = None
        self._elsewhere = False
        """Whether the facts were loaded, and may be of another network."""
        self._since, self._due = 0, 0
        self._spans: list[tuple[float, float]] = []
        self._last = self._traffic = (0.0, 0.0)

    def start(self, session: Session) -> None:
        """Measure the link between ``session``'s workers, and choose with all its ranks."""
        self._link, self._world, self._lane = session.workers, session.world, session.comm
        self._device, self._model, self._sent = session.device, session.shapes, session.traffic

    @property
    def text(self) -> str:
        """The call that made it, such as ``auto()``."""
        return self.auto.text

    @property
    def description(self) -> str:
        """All its options."""
        return repr(self.auto)

    @property
    def recipe(self) -> Recipe:
        """The one in force."""
        return self.now.recipe

    def after_step(self, step: int) -> bool:
        """Whether there is another `recipe` now; every rank must call it after the same steps."""
        if self._link.size == 1:
            return False
        now = time.perf_counter(), self._lane.seconds_waiting
        self._since += 1
        if self._since > (WARMUP if self.choices else FIRST_WARMUP):
            self._spans.append((now[0] - self._last[0], now[1] - self._last[1]))
        if self._since == WARMUP:  # not what a change of recipe has sent
            self._traffic = self._sent()
        before = self.now
        self._look(step)
        self._last = time.perf_counter(), self._lane.seconds_waiting
        return self.now.text != before.text

    def _look(self, step: int) -> None:
        first = WARMUP + WINDOW
        if not self.choices:
            if self._since >= FIRST_WARMUP + FIRST_WINDOW:
                self._choose_anew(step)
        elif self._asked is None and (self._since == first or self._since % REVIEW == 0):
            own = torch.tensor(self._pace(), dtype=torch.float64, device=self._device)
            self._asked = self._lane.submit(partial(self._world.gather, own), "comparing the pace")
            self._due = self._since + max(LATER, self.now.recipe[0].delay)  # it is behind messages
        elif self._asked is not None and self._since == self._due:
            (wall, each, compute), self._asked = self._asked.wait().amax(0).tolist(), None
            self._compare(step, [wall, each], compute)

    def _pace(self) -> list[float]:
        """Seconds of a step, the median of the last; of a byte on the link, 0 where too little was
        sent to tell; and of a step without its waiting."""
        spans, self._spans = self._spans[-WINDOW:], []
        traffic, each = self._sent(), 0.0
        sent, seconds = (now - then for now, then in zip(traffic, self._traffic, strict=True))
        if sent >= LEAST_PROBE:
            self._traffic, each = traffic, seconds / sent
        wall, compute = _medians(spans)
        return [wall, each, compute]

    def _compare(self, step: int, pace: list[float], compute: float) -> None:
        """Choose again where the step takes other than was predicted, or than it did before."""
        assert self._facts is not None, "measured before the first choice"
        if not self._usual:
            self._usual, facts = pace, replace(self._facts, compute=compute)
            ratio = pace[0] / predict(self.now.recipe, facts).seconds
            if self._elsewhere or not 1 / CHANGE < ratio < CHANGE:
                facts, _ = self._measure()  # the network may be another one since it was chosen for
            self._extra[self.now.kind] = pace[0] - predict(self.now.recipe, facts).seconds
            self._choose(step, facts)
            return
        known = [(now, usual) for now, usual in zip(pace, self._usual, strict=True) if now * usual]
        self._usual = [usual or now for now, usual in zip(pace, self._usual, strict=True)]
        if any(not 1 / CHANGE < now / usual < CHANGE for now, usual in known):
            self._usual = pace
            self._choose_anew(step)

    def _choose_anew(self, step: int) -> None:
        facts, wall = self._measure()
        beyond = wall - predict(self.now.recipe, facts).seconds
        self._extra = {self.now.kind: max(beyond, 0.0)}
        self._choose(step, facts)

    def _choose(self, step: int, facts: Facts) -> None:
        before = self.now if self.choices else None  # the first choice costs no more than another
        found = {c.text: c for c in candidates(facts, before)}
        text, reason = choose(self.auto, facts, before, self._extra)
        self._facts, self._elsewhere = facts, False
        if not self.choices or text != self.now.text:
            self.choices.append(Choice(step, text, facts, reason))
            if self._world.rank == 0:
                log.info("after step %d: %s. %s", step, text, reason)
            self._since, self._usual, self._spans = 0, [], []
        self.now = found.get(text, self.now)

    # -- measuring ----

    def _measure(self) -> tuple[Facts, float]:
        """What all ranks together find, and how long a step takes; the slowest of each counts."""
        spans = self._spans[-WINDOW:]
        if not self.choices:  # of so few steps one that was held up would be half of the median
            spans = [min(spans)]
        wall, compute = _medians(spans)
        rate, latency = self._lane.call(self._probe, "measuring the network")
        shapes, itemsize = self._model()
        elements = sum(map(math.prod, shapes))
        found = [compute, -rate, latency, wall, elements, -elements]
        own = torch.tensor(found, dtype=torch.float64, device=self._device)
        worst = self._lane.call(partial(self._world.gather, own), "comparing what was measured")
        compute, rate, latency, wall, most, least = worst.amax(0).tolist()
        self._traffic = self._sent()  # not these messages, which nothing else delays
        if most != -least:  # shards of unlike size, of which all ranks must think alike
            shapes = ((int(most),),)
        return Facts(self._link.size, shapes, itemsize, compute, -rate, latency), wall

    def _probe(self) -> tuple[float, float]:
        """Bits per second, and seconds of a message: of growing ones, until one takes long, the
        last two; a shaped card lets the first bytes pass as fast as it can."""
        n = self._link.size
        tiny = [self._timed(n) for _ in range(5)]
        latency = sorted(tiny)[2]
        before, size = (n, latency), LEAST_PROBE
        while (seconds := self._timed(size)) < LONG and size < MOST_PROBE:
            before, size = (size, seconds), 4 * size
        sent = cost.all_to_all(size, n).bytes - cost.all_to_all(before[0], n).bytes
        return 8 * sent / max(seconds - before[1], 1e-9), latency

    def _timed(self, size: int) -> float:
        """Seconds, on the slowest rank, of ``size`` bytes in an all-to-all."""
        n = self._link.size
        x, out = torch.zeros(2, n, size // n, dtype=torch.uint8, device=self._device)
        self._link.gather(x[0, :1])  # all begin together
        start = self._clock()
        self._link.all_to_all(x, out)
        own = torch.tensor([self._clock() - start], dtype=torch.float64, device=self._device)
        return float(self._link.gather(own).max())

    def _clock(self) -> float:
        """Seconds, when all that was asked of the card is done."""
        synchronize(self._device)
        return time.perf_counter()

    # -- saving ----

    def state_dict(self) -> dict[str, Any]:
        """The choices so far, and what they rest on, as plain data."""
        choices = [{**asdict(c), "facts": asdict(c.facts)} for c in self.choices]
        return {
            "choices": choices,
            "text": self.now.text,
            "facts": None if self._facts is None else asdict(self._facts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what `state_dict` returned; `recipe` is then the one that was in force. How long
        steps take is measured anew: the machine may be another."""
        from laconic.algorithms.parse import parse_recipe  # which knows all recipes, this one, too

        choices = [Choice(**{**c, "facts": _facts(c["facts"])}) for c in state["choices"]]
        if choices or self._link.size > 1:
            recipe = parse_recipe(state["text"])
            assert isinstance(recipe, tuple), "chosen from recipes"
            self.now = Candidate(_respelled(state["text"], recipe), recipe, 1.0)
        self._facts = None if state["facts"] is None else _facts(state["facts"])
        self.choices, self._since, self._usual, self._extra = choices, 0, [], {}
        self._asked, self._spans, self._elsewhere = None, [], True
        self._last = time.perf_counter(), self._lane.seconds_waiting

    def undo(self) -> Callable[[], None]:
        """What puts back all that there is now, after a `load_state_dict`."""
        return partial(vars(self).update, dict(vars(self)))


def _respelled(text: str, recipe: Recipe) -> str:
    """How `streaming` spells ``recipe``, which a version that saved it may have spelled with all
    its arguments; else ``text``. Of one spelling, a choice that stays is told from a change."""
    first = recipe[0]
    if isinstance(first, GradientRound):
        return text
    same = streaming(round(1 / often(first)), first.delay, 1.0)
    return same.text if same.recipe == recipe else text


def _medians(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of steps' seconds, and of what is not waiting of them."""
    walls = statistics.median(wall for wall, _ in spans)
    return walls, statistics.median(wall - waiting for wall, waiting in spans)


def _facts(saved: Mapping[str, Any]) -> Facts:
    return Facts(**{**saved, "shapes": tuple(tuple(shape) for shape in saved["shapes"])})
