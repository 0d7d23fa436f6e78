"""Predict the cost of each recipe and recommend one.

The rule is that of `laconic.auto`: the most progress per second, which is the least ``seconds *
steps``, where ``steps`` is the number of steps a recipe needs per step of DDP. Among recipes within
`WORTH` of the best, it takes the one that gives up least, so DDP stays if little is gained.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from laconic.advisor.choices import KNOWN, Choice, choices, steps_of
from laconic.algorithms.compile import with_replicas
from laconic.algorithms.exchange import Exchange
from laconic.algorithms.exchanges import QuorumMean
from laconic.algorithms.parse import qualified
from laconic.algorithms.round import AnyRound, GradientRound, Recipe, Round, fragments_of
from laconic.buckets import BUCKET_BYTES
from laconic.links import cost
from laconic.predict import Facts, often, predict
from laconic.probe import unequal_hosts, unequal_workers
from laconic.units import three_digits

WORTH = 0.05
"""How much slower than the best a recipe that gives up less may be, as a fraction."""
BY_TIME = (
    "Workers then take different numbers of steps: end the loop by time or by data, not by a "
    "number of steps (docs/quorum.md)."
)
GUIDE_PERIODS = (3, 12, 48)
"""H for which the inequality is evaluated: the guide's own value and the SlowMo paper's two."""


@dataclass(frozen=True)
class Row:
    """The prediction for a recipe.

    ``seconds``: per step. ``hidden``: share of communication that overlaps with training.
    ``megabytes``: sent per step to other workers by a rank. ``memory``: bytes that rounds keep on a
    rank. ``speedup``: relative to DDP. ``share``: of the speed without communication. ``steps``:
    needed per step of DDP. ``steps_from``: the source of ``steps``, from `steps_of`. ``quality``:
    what the literature or this repository says.
    """

    recipe: str
    period: int | None
    seconds: float
    hidden: float
    megabytes: float
    memory: float
    speedup: float
    share: float
    steps: float
    steps_from: str
    quality: str


@dataclass(frozen=True)
class Guide:
    """fairscale's rule of thumb for one ``frequency`` H.

    Local SGD, with free slow steps, is faster than DDP if

        allreduce * (1 - 1/H) > backward + node         average within a node after backward
        allreduce * (1 - 1/H) > max(backward, node)     average during backward, as laconic does

    All values are in seconds: ``allreduce`` of the model over the nodes, ``backward`` of a step,
    and ``node``, an average of gradients inside a node, with the buckets of the rows. ``saved`` is
    the left side. For SGP the guide uses H = 2, which is 2(n-1)/n for many nodes.
    """

    frequency: float
    allreduce: float
    backward: float
    node: float

    @property
    def saved(self) -> float:
        return self.allreduce * (1 - 1 / self.frequency)

    @property
    def pays_there(self) -> bool:
        """Whether it is faster with fairscale."""
        return self.saved > self.backward + self.node

    @property
    def pays_here(self) -> bool:
        """Whether it is faster with laconic."""
        return self.saved > max(self.backward, self.node)


@dataclass(frozen=True)
class Slow:
    """A rank that the others wait for.

    ``what``: "steps" if its steps take ``factor`` times as long as the median rank's, "network" if
    its network is so many times slower. ``ddp``: seconds per step of ddp(), and ``ddp_without`` if
    the rank were as fast as the median rank. ``gain``: how many times as many steps all ranks
    together would take if none waited for slower ones; None for a network.
    """

    rank: int
    what: Literal["steps", "network"]
    factor: float
    ddp: float
    ddp_without: float
    gain: float | None

    def __str__(self) -> str:
        """Return a sentence."""
        factor = f"{self.factor:.2g} times"
        waiting = (
            f"a step of ddp() takes {three_digits(self.ddp)} s because the others wait for it, and "
            f"would take {three_digits(self.ddp_without)} s otherwise"
        )
        if self.gain is None:
            return (
                f"The network of rank {self.rank} is {factor} slower than the median rank's: "
                f"{waiting}."
            )
        return (
            f"Rank {self.rank} computes {factor} as long as the median rank: {waiting}. If none "
            f"waited, all together would take {self.gain:.2g} times as many steps."
        )


@dataclass(frozen=True)
class Advice:
    """The result of `laconic.advise`, equal on every rank.

    Attributes:
        facts: what was measured, or given.
        rows: the prediction for each recipe.
        guide: fairscale's rule of thumb for SlowMo, for several periods.
        recommendation: the text of a recipe.
        code: the line for a training loop.
        reason: the explanation, including recipes that no measurement distinguishes from the
            recommended one.
        computes: seconds of a step on each rank. None without a measurement.
        held: bytes of parameters, gradients and optimizer state. None without a measurement.
        peak: bytes of memory in use. None without a measurement.
        slow: the ranks that the others wait for.

    Examples:
        >>> from laconic.advisor.advice import advice_on
        >>> from laconic.predict import Facts
        >>> shapes = ((1024, 1024),) * 4  # 4 workers, 0.1 s per step, 1 Gbit/s in bytes per second
        >>> advice = advice_on(Facts(4, shapes, 4, compute=0.1, rate=1.25e8, latency=0.001))
        >>> advice.recommendation in [row.recipe for row in advice.rows]
        True
    """

    facts: Facts
    rows: tuple[Row, ...]
    guide: tuple[Guide, ...]
    recommendation: str
    code: str
    reason: str
    computes: tuple[float, ...] | None = None
    held: int | None = None
    peak: int | None = None
    slow: tuple[Slow, ...] = ()

    @property
    def row(self) -> Row:
        """The row of the recommended recipe."""
        return next(r for r in self.rows if r.recipe == self.recommendation)

    @property
    def fastest(self) -> Row:
        """The row with the fewest seconds per step, regardless of quality."""
        return min(self.rows, key=lambda r: r.seconds)

    def to_json(self) -> str:
        """Return everything as JSON."""
        plain = asdict(self)
        facts: dict[str, Any] = plain["facts"]
        del facts["shapes"], facts["work"]
        facts["parameters"] = self.facts.elements
        for guide, source in zip(plain["guide"], self.guide, strict=True):
            for name in ("saved", "pays_there", "pays_here"):
                guide[name] = getattr(source, name)
        return json.dumps(_finite(plain), indent=2)


def advice_on(
    facts: Facts,
    recipes: Sequence[str] = (),
    *,
    computes: tuple[float, ...] | None = None,
    held: int | None = None,
    peak: int | None = None,
) -> Advice:
    """Predict all `choices` and the user's own ``recipes`` from ``facts``, and recommend one."""
    compared = choices(facts, recipes)
    rows = rows_of(compared, facts)
    best, reason = recommend(rows)
    slow = slow_ranks(facts, computes or facts.computes, compared[0].recipe)
    reason = " ".join([reason, *map(str, slow)])
    if any(may_be_late(c.recipe, facts.workers) for c in compared if c.text == best.recipe):
        reason += f" {BY_TIME}"
    node = f", nprocs_per_node={facts.ranks}" if facts.ranks > 1 else ""
    code = f"sync = laconic.attach(model, optimizer, {qualified(best.recipe)}{node})"
    guide = tuple(guides(facts))
    return Advice(facts, tuple(rows), guide, best.recipe, code, reason, computes, held, peak, slow)


def slow_ranks(facts: Facts, computes: Sequence[float], ddp: Recipe) -> tuple[Slow, ...]:
    """Return the rank whose steps take much longer than the median rank's, from each rank's
    seconds, and that whose network is much slower, by `Facts.rates`."""
    found, each = [], torch.tensor(computes, dtype=torch.float64)
    now = predict(ddp, facts).seconds
    if len(each) and unequal_workers(each):
        factor = float(each.max() / each.median())
        without = predict(ddp, replace(facts, compute=facts.compute / factor)).seconds
        gain = float((each.max() / each).mean())
        found.append(Slow(int(each.argmax()), "steps", factor, now, without, gain))
    rates = torch.tensor(facts.rates, dtype=torch.float64)
    if len(rates) and unequal_hosts(rates):
        factor = float(rates.median() / rates.min())
        nets = {k: replace(net, rate=net.rate * factor) for k, net in facts.nets.items()}
        faster = replace(facts, rate=facts.rate * factor, nets=nets)
        without = predict(ddp, faster).seconds
        found.append(Slow(int(rates.argmin()), "network", factor, now, without, None))
    return tuple(found)


def may_be_late(recipe: Recipe, workers: int) -> bool:
    """Return whether workers take different numbers of steps under ``recipe``."""
    return any(
        r.exchange.pace == "own" or (r.exchange.workers or workers) < workers
        for r in recipe
        if isinstance(r.exchange, QuorumMean)
    )


def rows_of(candidates: Sequence[Choice], facts: Facts) -> list[Row]:
    """Return a row per candidate. The first candidate must be DDP."""
    ddp = predict(candidates[0].recipe, facts).seconds
    return [_row(c, facts, ddp) for c in candidates]


def _row(choice: Choice, facts: Facts, ddp: float) -> Row:
    p, factor = predict(choice.recipe, facts), steps_of(choice.recipe)
    return Row(
        recipe=choice.text,
        period=choice.period,
        seconds=p.seconds,
        hidden=p.hidden,
        megabytes=p.bytes / 1e6,
        memory=memory(choice.recipe, facts),
        speedup=ddp / p.seconds,
        share=facts.alone / p.seconds,
        steps=factor.factor,
        steps_from=factor.source,
        quality=choice.quality,
    )


def recommend(rows: Sequence[Row]) -> tuple[Row, str]:
    """Return the recommended row and the reason."""
    ddp, best = rows[0], min(rows, key=_score)
    chosen = next(r for r in rows if _score(r) <= (1 + WORTH) * _score(best))
    if chosen is ddp and best is ddp:
        return ddp, "Keep DDP: nothing makes more progress per second."
    if chosen is ddp:
        gain = _score(ddp) / _score(best) - 1
        return ddp, f"Keep DDP: {best.recipe} would make only {gain:.1%} more progress per second."
    text = (
        f"{chosen.recipe} takes {three_digits(chosen.seconds)} s per step, ddp() "
        f"{three_digits(ddp.seconds)} s ({three_digits(chosen.speedup)} times as fast, "
        f"{chosen.share:.0%} of the speed without communication), and needs {chosen.steps:.3g} "
        "steps per step of ddp()"
    )
    if chosen.steps_from not in KNOWN:
        text += f" ({chosen.steps_from})"
    if chosen is best:
        return chosen, f"{text}: the most progress per second.{_ties(rows, chosen)}"
    more = _score(chosen) / _score(best) - 1
    text += f"; {best.recipe} makes {more:.1%} more progress but gives up more."
    return chosen, text + _ties(rows, chosen)


def _ties(rows: Sequence[Row], chosen: Row) -> str:
    """Return a note on rows that differ from ``chosen`` only in seconds or order.

    Those are rows with equal ``steps``, of which at least one was not measured, and that are slower
    by at most `WORTH`.
    """
    tied = [
        row.recipe
        for row in rows
        if row is not chosen
        and row.steps == chosen.steps
        and not {row.steps_from, chosen.steps_from} <= set(KNOWN)
        and row.seconds <= (1 + WORTH) * chosen.seconds
    ]
    if not tied:
        return ""
    return f" Its steps were not measured against {', '.join(tied)}: assumed equal."


def _score(row: Row) -> float:
    return row.seconds * row.steps


def guides(facts: Facts) -> list[Guide]:
    """Return the inequality for each of `GUIDE_PERIODS` and for SGP."""
    size = facts.elements * facts.itemsize
    # Each rank of a worker sends one part, all at once.
    part, buckets = cost.mean(size // facts.ranks, facts.workers), -(-size // BUCKET_BYTES)
    allreduce, node = facts.net("workers").seconds(part, buckets), 0.0
    if facts.ranks > 1:
        # of gradients that nothing hides
        node = predict((), replace(facts, backward=0.0, work={}, contention=0.0)).exposed
    backward = facts.backward * facts.compute
    gossip = 2 * (facts.workers - 1) / facts.workers  # the guide uses 2 for every n
    return [Guide(h, allreduce, backward, node) for h in (*GUIDE_PERIODS, gossip)]


def memory(recipe: Recipe, facts: Facts) -> float:
    """Return the bytes that rounds keep on one rank, as the mean over time.

    They are the state of updates and exchanges, gradient buckets, and messages in flight. Temporary
    buckets, at most two of 25 MiB, come on top.
    """
    rounds = with_replicas(recipe) if facts.ranks > 1 else recipe
    return sum(_round_bytes(r, facts) for r in rounds if often(r))


def _round_bytes(r: AnyRound, facts: Facts) -> float:
    n = facts.workers * (facts.ranks if isinstance(r, GradientRound) else 1)
    share = fragments_of(r)
    size = facts.elements * facts.itemsize / share
    each = max(facts.itemsize, 4)  # state is at least float32
    carriers = facts.ranks if isinstance(r, Round) else 1
    exchange = r.exchange.shaped([torch.Size(s) for s in facts.shapes])
    total = _update_share(r, n, carriers) * facts.elements / share * each
    total += _exchange_elements(exchange, math.ceil(facts.elements / share), n) * each / carriers
    if isinstance(r, GradientRound):
        return total + size
    return total + (1 + r.update.keeps_sent) * size * r.delay * often(r)


def _update_share(r: AnyRound, n: int, carriers: int) -> float:
    """Return the elements of the update's state on a rank, as a share of a message's elements.

    The ``carriers`` of one worker share what an owner has.
    """
    owners = r.exchange.owners(n) or 1
    state = r.update.init(torch.zeros(1))
    slots = r.update.slots
    return sum(
        1 / owners / carriers if slots.get(name, "owner") == "owner" else 1.0
        for name, t in state.items()
        if t.dim()
    )


def _exchange_elements(exchange: Exchange, length: int, n: int) -> int:
    """Return the number of elements that the exchange keeps per rank for messages of ``length``."""
    owned = slice(0, length // (exchange.owners(n) or n))
    state = exchange.init(torch.empty(length, device="meta"), owned)
    return sum(tensor.numel() for tensor in state.values())


def _finite(value: object) -> object:
    """Replace nonfinite numbers, which JSON does not support, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value
