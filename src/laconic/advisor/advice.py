"""Advice: what each recipe is predicted to take, when SlowMo pays, and what to do.

The rule of the recommendation is that of `laconic.auto`: the most progress per second, which is the
least ``seconds * steps``, with the steps that a recipe takes for one of DDP's. Of recipes that
differ by less than `WORTH`, the one that gives up least; so DDP is kept where little is gained.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from laconic.advisor.choices import KNOWN, Choice, choices, steps_of
from laconic.algorithms.compile import within_workers
from laconic.algorithms.exchange import Exchange
from laconic.algorithms.exchanges import Mean
from laconic.algorithms.parse import qualified
from laconic.algorithms.round import AnyRound, GradientRound, Recipe, Round, fragments_of
from laconic.buckets import BUCKET_BYTES
from laconic.engine.gradient_rounds import bucket_sizes
from laconic.links import cost
from laconic.predict import Facts, often, predict
from laconic.units import three_digits

WORTH = 0.05
"""How much slower than the best a recipe that gives up less may be."""
GUIDE_PERIODS = (3, 12, 48)
"""H for which the inequality is written out: the guide's own, the SlowMo paper's two."""


@dataclass(frozen=True)
class Row:
    """A recipe's prediction: ``seconds`` per step; ``hidden``, the share of communication that
    training does not wait for; ``megabytes`` per step to other workers, of a rank; ``memory``,
    bytes of a rank for what rounds keep; ``speedup`` against DDP, and ``share`` of the speed
    without communication; ``steps``, how many it takes for one of DDP's, and ``steps_from``, where
    that is from, as `steps_of` says; ``quality``: what the literature or this repository says."""

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
    """fairscale's rule for one ``frequency`` H: local SGD (SlowMo's slow steps cost nothing on top)
    is faster than DDP where

        allreduce * (1 - 1/H) > backward + node         gradients averaged in a node after backward
        allreduce * (1 - 1/H) > max(backward, node)     and during it, as laconic does

    in seconds: ``allreduce`` of the model over the nodes, ``backward`` of a step, ``node``, an
    average of gradients inside one; in buckets, as the rows have them. ``saved`` is the left side.
    For SGP the guide puts 2 for H, which is 2(n-1)/n for many nodes.
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
        """In the guide's own program."""
        return self.saved > self.backward + self.node

    @property
    def pays_here(self) -> bool:
        return self.saved > max(self.backward, self.node)


@dataclass(frozen=True)
class Advice:
    """What `laconic.advise` returns, alike on every rank. ``computes``: seconds of a step on each
    rank; ``held``, bytes of parameters, gradients and optimiser state, and ``peak``, of memory in
    use: None where nothing was measured. ``recommendation`` is a recipe's text, ``code`` the line
    for a training loop, ``reason`` why, with the recipes that no measurement tells from it."""

    facts: Facts
    rows: tuple[Row, ...]
    guide: tuple[Guide, ...]
    recommendation: str
    code: str
    reason: str
    computes: tuple[float, ...] | None = None
    held: int | None = None
    peak: int | None = None

    @property
    def row(self) -> Row:
        """The recommended one."""
        return next(r for r in self.rows if r.recipe == self.recommendation)

    @property
    def fastest(self) -> Row:
        """Whatever its quality."""
        return min(self.rows, key=lambda r: r.seconds)

    def to_json(self) -> str:
        """All of it, for programs."""
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
    own: Sequence[str] = (),
    *,
    computes: tuple[float, ...] | None = None,
    held: int | None = None,
    peak: int | None = None,
) -> Advice:
    """Predict all `choices`, and the user's ``own`` recipes, from ``facts``; and recommend one."""
    rows = rows_of(choices(facts, own), facts)
    best, reason = recommend(rows)
    node = f", nprocs_per_node={facts.ranks}" if facts.ranks > 1 else ""
    code = f"sync = laconic.attach(model, optimizer, {qualified(best.recipe)}{node})"
    guide = tuple(guides(facts))
    return Advice(facts, tuple(rows), guide, best.recipe, code, reason, computes, held, peak)


def rows_of(found: Sequence[Choice], facts: Facts) -> list[Row]:
    """One for each of the choices, of which the first is DDP."""
    ddp = predict(found[0].recipe, facts).seconds
    rows = []
    for c in found:
        p = predict(c.recipe, facts)
        kept = memory(c.recipe, facts)
        at = p.seconds, p.hidden, p.bytes / 1e6, kept, ddp / p.seconds, facts.compute / p.seconds
        rows.append(Row(c.text, c.period, *at, *steps_of(c.recipe), c.quality))
    return rows


def recommend(rows: Sequence[Row]) -> tuple[Row, str]:
    """The row to take, and why."""
    ddp, best = rows[0], min(rows, key=_score)
    taken = next(r for r in rows if _score(r) <= (1 + WORTH) * _score(best))
    if taken is ddp and best is ddp:
        return ddp, "Keep DDP: nothing makes more progress per second."
    if taken is ddp:
        gain = _score(ddp) / _score(best) - 1
        return ddp, f"Keep DDP: {best.recipe} would make {gain:.1%} more progress per second."
    told = (
        f"{taken.recipe} takes {three_digits(taken.seconds)} s a step where ddp() takes "
        f"{three_digits(ddp.seconds)} s ({three_digits(taken.speedup)} times as fast, "
        f"{taken.share:.0%} of the speed without communication), and {taken.steps:.3g} steps for "
        "one of ddp()'s"
    )
    if taken.steps_from not in KNOWN:
        told += f" ({taken.steps_from})"
    if taken is best:
        return taken, f"{told}: the most progress per second.{_ties(rows, taken)}"
    more = _score(taken) / _score(best) - 1
    told += f"; {best.recipe} makes {more:.1%} more progress, and gives up more."
    return taken, told + _ties(rows, taken)


def _ties(rows: Sequence[Row], taken: Row) -> str:
    """Which rows are left or preferred for their seconds, or their place, alone: of as many steps,
    since those of one of the two were not measured, and no slower than `WORTH`."""
    tied = [
        row.recipe
        for row in rows
        if row is not taken
        and row.steps == taken.steps
        and not {row.steps_from, taken.steps_from} <= set(KNOWN)
        and row.seconds <= (1 + WORTH) * taken.seconds
    ]
    if not tied:
        return ""
    return f" Not measured is how many steps it takes beside {', '.join(tied)}: taken for as many."


def _score(row: Row) -> float:
    return row.seconds * row.steps


def guides(facts: Facts) -> list[Guide]:
    """The inequality for each of `GUIDE_PERIODS`, and for SGP."""
    size = facts.elements * facts.itemsize
    # the ranks of a worker carry a part each, all at once
    part, buckets = cost.mean(size // facts.ranks, facts.workers), -(-size // BUCKET_BYTES)
    allreduce, node = facts.net("workers").seconds(part, buckets), 0.0
    if facts.ranks > 1:
        inside = len(bucket_sizes(Mean(), size))  # of gradients
        node = facts.net("replica").seconds(cost.mean(size, facts.ranks), inside)
    backward = facts.backward * facts.compute
    gossip = 2 * (facts.workers - 1) / facts.workers  # the guide takes 2, whatever n is
    return [Guide(h, allreduce, backward, node) for h in (*GUIDE_PERIODS, gossip)]


def memory(recipe: Recipe, facts: Facts) -> float:
    """Bytes that rounds keep on one rank: state of updates and exchanges, the gradients' buckets,
    and messages in flight, as the mean over time. Buckets of the moment, two of 25 MiB at most,
    come on top."""
    rounds = (*within_workers(recipe), *recipe) if facts.ranks > 1 else recipe
    return sum(_kept(r, facts) for r in rounds if often(r))


def _kept(r: AnyRound, facts: Facts) -> float:
    n = facts.workers * (facts.ranks if isinstance(r, GradientRound) else 1)
    share = fragments_of(r)
    size = facts.elements * facts.itemsize / share
    each = max(facts.itemsize, 4)  # state is in float32 at least
    carriers = facts.ranks if isinstance(r, Round) else 1
    exchange = r.exchange.shaped([torch.Size(s) for s in facts.shapes])
    kept = _update_share(r, n, carriers) * facts.elements / share * each
    kept += _exchange_elements(exchange, math.ceil(facts.elements / share), n) * each / carriers
    if isinstance(r, GradientRound):
        return kept + size
    return kept + (1 + r.update.keeps_sent) * size * r.delay * often(r)


def _update_share(r: AnyRound, n: int, carriers: int) -> float:
    """Of a message's elements, those that the update's state has on a rank; what owners have, the
    ``carriers`` of one worker share."""
    owners = r.exchange.owners(n) or 1
    state = r.update.init(torch.zeros(1))
    slots = r.update.slots
    return sum(
        1 / owners / carriers if slots.get(name, "owner") == "owner" else 1.0
        for name, t in state.items()
        if t.dim()
    )


def _exchange_elements(exchange: Exchange, length: int, n: int) -> int:
    """How many elements the exchange keeps on a rank for messages of ``length``."""
    owned = slice(0, length // (exchange.owners(n) or n))
    state = exchange.init(torch.empty(length, device="meta"), owned)
    return sum(tensor.numel() for tensor in state.values())


def _finite(value: object) -> object:
    """What JSON can hold: numbers that are not finite become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value
