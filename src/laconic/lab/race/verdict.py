"""Summarize a race in text: the question, and the answer in two sentences.

Rows for reference, without communication or on a free network, do not compete. Every text names the
network, and says if a link was throttled instead of emulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from laconic.lab.emulation.seeds import Group, groups
from laconic.lab.race.comparison import common, compared_runs, competing, finished, reached
from laconic.lab.race.result import (
    FREE_NETWORK,
    SECONDS,
    STEPS,
    Axis,
    Result,
    grouped,
    megabytes_per_step,
    number,
    repeats,
)
from laconic.lab.race.wording import bandwidth, brief, loss_format, three_digits


def question(result: Result) -> str:
    """Return the question that the race answers."""
    seconds, steps = number(result, "seconds"), number(result, "steps")
    much = f" in {brief(seconds)} s" if seconds else f" in {steps:,.0f} steps" if steps else ""
    return f"Which recipe reaches the lowest loss{much}{_where(result, 'a ')}?"


def verdict(result: Result) -> str:
    """Return the answer and caveats as one text."""
    return " ".join(sentences(result))


def sentences(result: Result) -> list[str]:
    """Return the answer in two sentences, and caveats if needed.

    The first sentence says which recipe leads at the limit of the race (time or steps), and how it
    compares with DDP, or else with the next one. The second gives the cost: which recipe leads
    along the other axis, and the bytes. Losses that are equal as displayed are a tie, and so are
    those of repeated runs that differ by less than their spread.
    """
    by_steps = bool(number(result, "steps")) and not number(result, "seconds")
    first, second = (STEPS, SECONDS) if by_steps else (SECONDS, STEPS)
    order = standing(result, first)
    if not order:
        text = f"No recipe finished{_where(result, 'this ')}."
        return [text, *_left_out(result)]
    rival = _rival(order, leaders(result, first))
    return [
        _at_the_limit(result, first, rival),
        *_other_axis(result, second),
        *_bytes(order[0][0], rival),
        *_left_out(result),
        *_means(result),
        *_references(result, first, order[0]),
    ]


def listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


Standing = list[tuple[Group, float]]
"""The recipes that compete, with the mean loss of their runs, lowest first."""


def standing(result: Result, axis: Axis) -> Standing:
    losses = [
        (group, compared_runs(result, group.runs, axis))
        for group in groups(replace(result, rows=tuple(competing(result))))
    ]
    return sorted(
        ((group, loss.mean) for group, loss in losses if loss is not None),
        key=lambda pair: pair[1],
    )


def leaders(result: Result, axis: Axis) -> list[Group]:
    """Return the recipes tied for the lead, and all that rank between them.

    A recipe is tied if its loss is displayed as the lowest one is, or differs from it by less than
    the larger spread of the two.
    """
    order, show = standing(result, axis), loss_format(result)
    (best, lowest), last = order[0], 0
    for rank, (group, loss) in enumerate(order):
        spread = max(_spread(result, best, axis), _spread(result, group, axis))
        if show(loss) == show(lowest) or loss - lowest < spread:
            last = rank
    return [group for group, _ in order[: last + 1]]


def _spread(result: Result, group: Group, axis: Axis) -> float:
    losses = compared_runs(result, group.runs, axis)
    return losses.spread if losses is not None else 0.0


def _where(result: Result, article: str) -> str:
    if not bandwidth(result):
        return ""
    if result.settings.get("network") == "throttled":
        return f" on a link throttled to {bandwidth(result)}"
    return f" on {article}{bandwidth(result)} network"


def _span(result: Result, axis: Axis) -> str:
    position = common(result, axis) or 0
    return f"{brief(position)} s" if axis is SECONDS else f"{position:,.0f} steps"


def _rival(order: Standing, ahead: list[Group]) -> tuple[Group, float] | None:
    """Return what to compare the leaders with: DDP if it is behind them, else the next recipe."""
    behind = order[len(ahead) :]
    ddp = [pair for pair in behind if pair[0].mean.recipe.partition("(")[0] == "ddp"]
    return next(iter(ddp or behind), None)


def _at_the_limit(result: Result, axis: Axis, rival: tuple[Group, float] | None) -> str:
    """Return which recipe leads when the race ends, and how it compares with a rival."""
    order, show = standing(result, axis), loss_format(result)
    ahead = leaders(result, axis)
    within = f"{'In' if axis is SECONDS else 'After'} {_span(result, axis)} per recipe"
    names, best = listed([group.name for group in ahead]), show(order[0][1])
    text = f"{within}{_where(result, 'this ')}, {names}"
    if len(ahead) > 1:
        text += f" are tied at the lowest validation loss, {best}"
    else:
        effort = _effort(ahead[0], axis)
        text += f" reached the lowest validation loss, {best}{effort}"
    if rival is None:
        return f"{text}." if len(order) > 1 else f"{text}; no other recipe finished."
    group, loss = rival
    text += f"; {group.name} reached {show(loss)}{_effort(group, axis)}"
    there, end = reached(ahead[0].mean, SECONDS, loss), common(result, SECONDS)
    if axis is SECONDS and len(ahead) == 1 and there and end and end > 1.05 * there:
        times = end / there
        text += f", which {names} had after {brief(there)} s, {times:.1f} times as fast"
    return f"{text}."


def _effort(group: Group, axis: Axis) -> str:
    """Return what the race does not fix: steps in a race over time, seconds in one over steps."""
    mean = group.mean
    return f" in {mean.steps:,} steps" if axis is SECONDS else f" in {brief(mean.seconds)} s"


def _other_axis(result: Result, axis: Axis) -> list[str]:
    """Return which recipe leads after equal steps in a race over time, or vice versa."""
    order, show = standing(result, axis), loss_format(result)
    if len(order) < 2:
        return []
    ahead = leaders(result, axis)
    names = listed([group.name for group in ahead])
    lead = f"{names} {'leads' if len(ahead) == 1 else 'share the lead'} at {show(order[0][1])}"
    behind = [f"{group.name} at {show(loss)}" for group, loss in order[len(ahead) :][:1]]
    within = f"{'In' if axis is SECONDS else 'After'} the same {_span(result, axis)}"
    return [f"{within}, {', before '.join([lead, *behind])}."]


def _bytes(leader: Group, rival: tuple[Group, float] | None) -> list[str]:
    """Return what the leader and its rival send."""
    if rival is None:
        return []
    mine, theirs = (megabytes_per_step(group.mean) for group in (leader, rival[0]))
    name = rival[0].name
    text = f"{leader.name} sends {three_digits(mine)} MB per host and step, {name}"
    return [f"{text} {three_digits(theirs)}."] if mine or theirs else []


def _left_out(result: Result) -> list[str]:
    lost = [f"{row.recipe} {row.status}" for row in result.rows if row.status != "ok"]
    return [f"Not counted: {listed(list(dict.fromkeys(lost)))}."] if lost else []


def _means(result: Result) -> list[str]:
    text = (
        f"These are means of {repeats(result)} runs; recipes that differ by less than the spread "
        "of their runs count as tied."
    )
    return [text] if repeats(result) > 1 else []


def _references(result: Result, axis: Axis, best: tuple[Group, float]) -> list[str]:
    """Return how far the best recipe is behind each row on a free network, and whether it is behind
    workers without communication, as in a race that is too short."""
    show, notes = loss_format(result), []
    for runs in grouped(row for row in finished(result) if row.reference):
        loss = compared_runs(result, runs, axis)
        if loss is None:
            continue
        if runs[0].free:
            percent = 100 * (best[1] / loss.mean - 1)
            place = f"{abs(percent):.1f}% {'above' if percent >= 0 else 'below'}"
            name = runs[0].recipe.removesuffix(FREE_NETWORK)
            at = f"{name} is at {show(loss.mean)}"
            notes.append(f"Without a network, {at}: {best[0].name} is {place} that.")
        elif float(show(loss.mean)) < float(show(best[1])):
            notes.append(
                f"Workers that never communicate are at {show(loss.mean)}: so early in training, "
                "steps matter more than agreement; give the race more time."
            )
    return notes
