"""Predict the cost of each recipe and recommend one.

The recommendation is the recipe that `laconic.auto` would choose from the same facts: both call
`laconic.policy.choice.choose`. The other recipes are for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
from laconic.advisor.network import unequal_hosts, unequal_workers
from laconic.advisor.quorum import predict
from laconic.advisor.show import Advice, Row
from laconic.algorithms.auto import Auto
from laconic.algorithms.compile import with_replicas
from laconic.algorithms.parse import qualified
from laconic.algorithms.round import AnyRound, GradientRound, Recipe, Round, fragments_of
from laconic.policy.choice import TIE, choose
from laconic.policy.facts import Facts
from laconic.policy.predict import often
from laconic.units import three_digits

MOST_ALTERNATIVES = 5
"""The number of other recipes shown beside the recommended one."""
LEAST_SHARE = 1 / 3
"""The least progress of an alternative, as a share of that of the recommended recipe."""


def advice_on(
    facts: Facts,
    recipes: Sequence[str] = (),
    *,
    computes: tuple[float, ...] | None = None,
) -> Advice:
    """Predict all `choices` and the user's own ``recipes`` from ``facts``, and recommend one."""
    compared = choices(facts, recipes)
    rows = rows_of(compared, facts)
    text, _ = choose(Auto(), facts, None, {})
    best = next(row for row in rows if row.recipe == text)
    slow = slow_ranks(facts, computes or facts.computes)
    node = f", nprocs_per_node={facts.ranks}" if facts.ranks > 1 else ""
    return Advice(
        facts=facts,
        rows=tuple(rows),
        recommendation=text,
        code=f"sync = laconic.attach(model, optimizer, {qualified(text)}{node})",
        reason=" ".join([*reason(rows[0], best), *slow]),
        computes=computes,
        slow=slow,
        alternatives=tuple(row.recipe for row in alternatives(rows, best)),
    )


def slow_ranks(facts: Facts, computes: Sequence[float]) -> tuple[str, ...]:
    """Return a sentence on the rank whose steps take much longer than the median rank's, from each
    rank's seconds, and on that whose network is much slower, by `Facts.rates`."""
    found, each = [], torch.tensor(computes, dtype=torch.float64)
    wait = "the median rank, and the others wait for it."
    if len(each) and unequal_workers(each):
        factor, gain = float(each.max() / each.median()), float((each.max() / each).mean())
        found.append(
            f"Rank {int(each.argmax())} computes {factor:.2g} times as long as {wait} If none "
            f"waited, all together would take {gain:.2g} times as many steps per second."
        )
    rates = torch.tensor(facts.rates, dtype=torch.float64)
    if len(rates) and unequal_hosts(rates):
        factor = float(rates.median() / rates.min())
        found.append(f"Rank {int(rates.argmin())} sends {factor:.2g} times as slowly as {wait}")
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
    for row in sorted(rows[1:], key=lambda row: -row.progress):
        enough = row.progress >= LEAST_SHARE * best.progress
        if enough and not row.own and _kind(row) != _kind(best):
            kinds.setdefault(_kind(row), row)
    others = sorted(
        kinds.values(),
        key=lambda row: (row.quality != OWN_PACE, row.steps_from.startswith("assumed")),
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
    length = math.ceil(facts.elements / share)
    owned = slice(0, length // (exchange.owners(n) or n))
    state = exchange.init(torch.empty(length, device="meta"), owned)
    total += sum(tensor.numel() for tensor in state.values()) * each / carriers
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
