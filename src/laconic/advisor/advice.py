"""Predict the cost of each recipe and recommend one.

The recommendation is the recipe that `laconic.auto` would choose from the same facts: both call
`laconic.auto.choose`. The other recipes are for comparison.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from laconic.advisor.choices import (
    KNOWN,
    OWN,
    OWN_PACE,
    UNKNOWN,
    Choice,
    Steps,
    choices,
    more_steps,
    steps_of,
)
from laconic.algorithms.compile import with_replicas
from laconic.algorithms.exchange import Exchange
from laconic.algorithms.parse import qualified
from laconic.algorithms.round import AnyRound, GradientRound, Recipe, Round, fragments_of
from laconic.auto import TIE, Auto, choose
from laconic.buckets import BUCKET_BYTES
from laconic.links import cost
from laconic.predict import Facts, often, predict
from laconic.probe import unequal_hosts, unequal_workers
from laconic.units import finite, three_digits

MOST_ALTERNATIVES = 5
"""The number of other recipes shown beside the recommended one."""
LEAST_SHARE = 1 / 3
"""The least progress of an alternative, as a share of that of the recommended recipe."""
FLATTERED = ("sparse_loco",)
"""Recipes that are not offered as alternatives, because they need more steps than assumed: the one
setting that was measured needs more than twice those of DDP."""
GUIDE_PERIODS = (3, 12, 48)
"""H for which the inequality is evaluated: the guide's own value and the SlowMo paper's two."""


@dataclass(frozen=True)
class Row:
    """The prediction for a recipe.

    ``seconds``: per step. ``hidden``: share of communication that overlaps with training.
    ``megabytes``: sent per step to other workers by a rank. ``memory``: bytes that rounds keep on a
    rank. ``speedup``: relative to DDP. ``share``: of the speed without communication. ``steps``:
    needed per step of DDP. ``steps_from``: the source of ``steps``, from `steps_of`; or that they
    are unknown and count as 1. ``quality``: what the literature or this repository says. ``own``:
    whether the user asked for the recipe.
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
    own: bool = False

    @property
    def progress(self) -> float:
        """Progress per second relative to DDP: its seconds, over ``seconds * steps``."""
        return self.speedup / self.steps


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
    together would take if none waited for slower ones; None for a network. ``ranks``: how many
    ranks were compared.
    """

    rank: int
    what: Literal["steps", "network"]
    factor: float
    ddp: float
    ddp_without: float
    gain: float | None
    ranks: int

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
        other = "the median rank" if self.ranks > 2 else f"rank {1 - self.rank}"
        return (
            f"Rank {self.rank} computes {factor} as long as {other}: {waiting}. If none waited, "
            f"all together would take {self.gain:.2g} times as many steps per second."
        )


@dataclass(frozen=True)
class Advice:
    """The result of `laconic.advise`, equal on every rank.

    Attributes:
        facts: what was measured, or given.
        rows: the prediction for each recipe.
        guide: fairscale's rule of thumb for SlowMo, for several periods.
        recommendation: the text of the recipe that `laconic.auto` would choose from ``facts``.
        code: the line for a training loop.
        reason: the explanation.
        computes: seconds of a step on each rank. None without a measurement.
        held: bytes of parameters, gradients and optimizer state. None without a measurement.
        peak: bytes of memory in use. None without a measurement.
        slow: the ranks that the others wait for.
        alternatives: other recipes to consider, at most 5.

    As text, an advice is what ``laconic advise`` prints.

    Examples:
        >>> from laconic.advisor.advice import advice_on
        >>> from laconic.predict import Facts
        >>> shapes = ((1024, 1024),) * 4  # 4 workers, 0.1 s per step, 1 Gbit/s in bytes per second
        >>> advice = advice_on(Facts(4, shapes, 4, compute=0.1, rate=1.25e8, one_way=0.001))
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
    alternatives: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the answer, the lines to paste, and the alternatives."""
        from laconic.advisor.show import answer  # imports this module

        return "\n".join(answer(self))

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
        for row, made in zip(plain["rows"], self.rows, strict=True):
            row["progress"] = made.progress
        for guide, source in zip(plain["guide"], self.guide, strict=True):
            for name in ("saved", "pays_there", "pays_here"):
                guide[name] = getattr(source, name)
        return json.dumps(finite(plain), indent=2)


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
    text, _ = choose(Auto(), facts, None, {})
    best = next(row for row in rows if row.recipe == text)
    slow = slow_ranks(facts, computes or facts.computes, compared[0].recipe)
    node = f", nprocs_per_node={facts.ranks}" if facts.ranks > 1 else ""
    return Advice(
        facts=facts,
        rows=tuple(rows),
        guide=tuple(guides(facts)),
        recommendation=text,
        code=f"sync = laconic.attach(model, optimizer, {qualified(text)}{node})",
        reason=" ".join([*reason(rows[0], best), *map(str, slow)]),
        computes=computes,
        held=held,
        peak=peak,
        slow=slow,
        alternatives=tuple(row.recipe for row in alternatives(rows, best)),
    )


def slow_ranks(facts: Facts, computes: Sequence[float], ddp: Recipe) -> tuple[Slow, ...]:
    """Return the rank whose steps take much longer than the median rank's, from each rank's
    seconds, and that whose network is much slower, by `Facts.rates`."""
    found, each = [], torch.tensor(computes, dtype=torch.float64)
    now = predict(ddp, facts).seconds
    if len(each) and unequal_workers(each):
        factor = float(each.max() / each.median())
        without = predict(ddp, replace(facts, compute=facts.compute / factor)).seconds
        gain = float((each.max() / each).mean())
        found.append(Slow(int(each.argmax()), "steps", factor, now, without, gain, len(each)))
    rates = torch.tensor(facts.rates, dtype=torch.float64)
    if len(rates) and unequal_hosts(rates):
        factor = float(rates.median() / rates.min())
        nets = {k: replace(net, rate=net.rate * factor) for k, net in facts.nets.items()}
        faster = replace(facts, rate=facts.rate * factor, nets=nets)
        without = predict(ddp, faster).seconds
        found.append(Slow(int(rates.argmin()), "network", factor, now, without, None, len(rates)))
    return tuple(found)


def rows_of(candidates: Sequence[Choice], facts: Facts) -> list[Row]:
    """Return a row per candidate. The first candidate must be DDP."""
    ddp = predict(candidates[0].recipe, facts).seconds
    return [_row(c, facts, ddp) for c in candidates]


def _row(choice: Choice, facts: Facts, ddp: float) -> Row:
    p = predict(choice.recipe, facts)
    factor = Steps(1.0, UNKNOWN) if choice.quality == OWN else steps_of(choice.recipe)
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
        own=choice.own,
    )


def reason(ddp: Row, best: Row) -> list[str]:
    """Return sentences: what the recommended recipe gains, and what it costs in steps."""
    pace = (
        f"{best.recipe}: {three_digits(best.seconds)} s per step, {best.share:.0%} of the speed "
        "without communication"
    )
    if best is ddp:
        return [
            f"Keep {pace}.",
            f"No other recipe that auto() chooses from makes over {TIE:.0%} more progress per "
            "second.",
        ]
    steps = f"{more_steps(best.steps)} than ddp()"
    if best.steps_from in KNOWN:
        needs = f"It needs {steps}"
    else:
        needs = f"It is expected to need {steps} ({best.steps_from})"
    found = [
        f"Use {pace} (ddp(): {three_digits(ddp.seconds)} s).",
        f"{needs}, and makes up to {three_digits(best.progress)} times as much progress per "
        "second.",
    ]
    if "outer='muon'" in best.recipe:
        found.append(
            "Part of that is its outer step, a second optimizer (which outer_step(ddp(), 4, "
            "outer='muon') has, too): look at the learning rate again."
        )
    return found


def alternatives(rows: Sequence[Row], best: Row) -> list[Row]:
    """Return at most `MOST_ALTERNATIVES` rows to consider beside the ``best`` one.

    They are the user's own recipes; DDP; and of each other kind of recipe the one with the most
    progress per second, unless it makes much less than the ``best`` one: first recipes at each
    worker's own pace, which there are only if workers are unequal, then those whose steps were
    measured, and then those whose steps are assumed.
    """
    kinds: dict[str, Row] = {}
    for row in rows[1:]:
        kind = _kind(row)
        if row.own or kind in (_kind(best), *FLATTERED):
            continue
        if row.progress < LEAST_SHARE * best.progress:
            continue
        if kind not in kinds or row.progress > kinds[kind].progress:
            kinds[kind] = row
    others = sorted(
        kinds.values(),
        key=lambda row: (
            row.quality != OWN_PACE,
            row.steps_from.startswith("assumed"),
            -row.progress,
        ),
    )
    own = [row for row in rows if row.own and row is not best]
    ddp = [] if best is rows[0] or rows[0].own else [rows[0]]
    found = [*own, *ddp, *others]
    return found[:MOST_ALTERNATIVES]


def _kind(row: Row) -> str:
    """Return the name of the recipe, and how it differs from others of this name."""
    name = row.recipe.partition("(")[0]
    if row.quality == OWN_PACE:
        return f"{name} at own pace"
    return f"{name} with codec" if "codec=" in row.recipe else name


def guides(facts: Facts) -> list[Guide]:
    """Return the inequality for each of `GUIDE_PERIODS` and for SGP."""
    size = facts.elements * facts.itemsize
    # Each rank of a worker sends one part, all at once.
    part = cost.mean(size // facts.ranks, facts.workers)
    buckets = 1 if facts.overlaps("workers") else -(-size // BUCKET_BYTES)
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
