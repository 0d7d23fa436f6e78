"""Answer the question of a race in a few sentences. The table has the figures.

Rows for reference, without communication or on a free network, do not compete. Every text names the
network, and says if a link was throttled instead of emulated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.round import Round
from laconic.algorithms.updates import Elastic
from laconic.lab.race.comparison import (
    Group,
    Summary,
    common,
    compared_runs,
    finished,
    groups,
    limit,
    reached,
    standing,
    summary,
)
from laconic.lab.race.result import FREE_NETWORK, SECONDS, Axis, Result, Row, number
from laconic.lab.race.wording import bandwidth, loss_format
from laconic.units import three_digits


def question(result: Result) -> str:
    """Return the question that the race answers."""
    seconds, steps = number(result, "seconds"), number(result, "steps")
    much = (
        f" in {three_digits(seconds)} s" if seconds else f" in {steps:,.0f} steps" if steps else ""
    )
    return f"Which recipe reaches the lowest loss{much}{_where(result, 'a ')}?"


def verdict(result: Result) -> str:
    """Return the answer as one text."""
    return " ".join(sentences(result))


def sentences(result: Result) -> list[str]:
    """Return which recipe leads, what was not counted, and how the rows for reference compare.

    Recipes whose losses are equal as displayed are tied, and so are those of repeated runs that
    differ by less than their spread.
    """
    axis = limit(result)
    order = standing(result, axis)
    lost = dict.fromkeys(f"{row.recipe} {row.status}" for row in result.rows if row.status != "ok")
    left_out = [f"Not counted: {listed([*lost])}."] if lost else []
    if not order:
        return [f"No recipe finished{_where(result, 'this ')}.", *left_out]
    return [_lead(result, axis, order), *left_out, *_references(result, axis, *order[0])]


def listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def chosen(auto: Row) -> str:
    """Return the recipe that `auto` chose last, or "" if it chose none."""
    found = re.search(r": (\w+\([^:]*\)) takes ", auto.notes[-1]) if auto.notes else None
    return found[1] if found else ""


def has_outer_step(row: Row) -> bool:
    """Return whether the recipe of ``row``, or the one that `auto` chose there, is known to have an
    outer step, a second optimizer."""
    try:
        recipe = parse_recipe(chosen(row) or row.recipe)
    except ValueError:  # another library's row
        return False
    return isinstance(recipe, tuple) and any(
        isinstance(r, Round) and r.update.anchor and not isinstance(r.update, Elastic)
        for r in recipe
    )


def _where(result: Result, article: str) -> str:
    if not bandwidth(result):
        return ""
    if result.settings.get("network") == "throttled":
        return f" on a link throttled to {bandwidth(result)}"
    return f" on {article}{bandwidth(result)} network"


def _lead(result: Result, axis: Axis, order: list[tuple[Group, Summary]]) -> str:
    """Return which recipes lead, and how they compare with DDP, or else with the next one."""
    show, best = loss_format(result), order[0][1]
    tied = [
        rank
        for rank, (_, loss) in enumerate(order)
        if show(loss.mean) == show(best.mean)
        or loss.mean - best.mean < max(loss.spread, best.spread)
    ]
    ahead, behind = order[: tied[-1] + 1], order[tied[-1] + 1 :]
    names = listed([group.name for group, _ in ahead])
    how = "reached" if len(ahead) == 1 else "are tied at"
    position = common(result, axis) or 0
    span = f"In {three_digits(position)} s" if axis is SECONDS else f"After {position:,.0f} steps"
    text = f"{span} per recipe{_where(result, 'this ')}, {names} {how} the lowest validation loss, "
    text += show(best.mean)
    if len(order) == 1:
        return f"{text}; no other recipe finished."
    ddp = [pair for pair in behind if pair[0].name.partition("(")[0] == "ddp"]
    for rival, loss in (ddp or behind)[:1]:
        text += f"; {rival.name} reached {show(loss.mean)}"
        soon = summary(reached(row, SECONDS, loss.mean) for row in ahead[0][0].runs)
        if axis is SECONDS and len(ahead) == 1 and soon and 0 < 1.05 * soon.mean < position:
            times = position / soon.mean
            text += (
                f", which {names} had after {three_digits(soon.mean)} s, {times:.1f} times as fast"
            )
        second = [group.name for group, _ in ahead if has_outer_step(group.first)]
        if len(second) == len(ahead) and not has_outer_step(rival.first):
            steps = f"the outer step of {listed(second)}, a second optimizer"
            text += f". Part of that may be due to {steps}"
    return f"{text}."


def _references(result: Result, axis: Axis, leader: Group, best: Summary) -> list[str]:
    """Return how far the leader is from each row on a free network, and whether it is behind
    workers without communication, as in a race that is too short."""
    show, notes, done = loss_format(result), list[str](), finished(result)
    for group in groups(result):
        loss = compared_runs(result, group, axis)
        if loss is None or not group.first.reference or group.first not in done:
            continue
        if group.first.free:
            percent = 100 * (best.mean / loss.mean - 1)
            place = f"{abs(percent):.1f}% {'above' if percent >= 0 else 'below'}"
            name = group.name.removesuffix(FREE_NETWORK)
            notes.append(
                f"Without a network, {name} is at {show(loss.mean)}: {leader.name} is {place} that."
            )
        elif float(show(loss.mean)) < float(show(best.mean)):
            notes.append(
                f"Workers that never communicate are at {show(loss.mean)}: so early in training, "
                "steps matter more than agreement; give the race more time."
            )
    return notes
