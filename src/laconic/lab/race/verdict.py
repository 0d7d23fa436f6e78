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
    NO_COMMUNICATION,
    SECONDS,
    STEPS,
    Axis,
    Result,
    grouped,
    line,
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

    The first sentence says which recipe leads at the limit of the race (time or steps), by how
    much, and how much sooner than DDP. The second gives the cost: which recipe leads along the
    other axis, and the bytes. Losses that are equal as displayed are a tie, and so are those of
    repeated runs that differ by less than their spread. Rows that failed or diverged are listed as
    not counted.
    """
    left_out = [f"{row.name} {row.status}" for row in result.rows if row.status != "ok"]
    left_out = list(dict.fromkeys(left_out))
    end = f"; not counted: {listed(left_out)}." if left_out else "."
    where = _where(result, "this ")
    by_steps = bool(number(result, "steps")) and not number(result, "seconds")
    first, second = (STEPS, SECONDS) if by_steps else (SECONDS, STEPS)
    order = standing(result, first)
    if not order:
        suffix = ": only rows for reference did" if finished(result) else ""
        return [f"No recipe finished{where}{suffix}{end}"]
    if len(order) == 1:
        (only, loss), seconds = order[0], line(order[0][0].mean, SECONDS)[-1][0]
        return [
            f"{only.name} reached a validation loss of {loss_format(result)(loss)} in "
            f"{only.mean.steps:,} steps and {brief(seconds)} s{where}; no other recipe finished to "
            f"compare it with{end}",
            *_free_notes(result, first, order[0]),
        ]
    ahead = leaders(result, first)
    price = filter(None, (_other_axis(result, second, ahead), _bytes(result, first)))
    cost = "; ".join(price)
    cost = cost[:1].upper() + cost[1:] + end if cost else ""
    return [
        text
        for text in (
            _at_the_limit(result, first, where) + ("." if cost else end),
            cost,
            _means(result),
            _baseline_note(result, first, order[0][1]),
            *_free_notes(result, first, order[0]),
        )
        if text
    ]


def _means(result: Result) -> str:
    if repeats(result) < 2:
        return ""
    return (
        f"These are means of {repeats(result)} runs; recipes that differ by less than the spread "
        "of their runs count as tied."
    )


def _baseline_note(result: Result, axis: Axis, best: float) -> str:
    """Return a note if workers without communication are ahead, as in a race that is too short."""
    show = loss_format(result)
    baseline = [row for row in finished(result) if row.recipe == NO_COMMUNICATION]
    for runs in grouped(baseline):
        loss = compared_runs(result, runs, axis)
        if loss is not None and float(show(loss.mean)) < float(show(best)):
            return (
                f"Workers that never communicate are at {show(loss.mean)}: so early in training, "
                "steps matter more than agreement; give the race more time."
            )
    return ""


def _free_notes(result: Result, axis: Axis, best: tuple[Group, float]) -> list[str]:
    """Return for each row on a free network how far the best recipe is behind it."""
    show, notes = loss_format(result), []
    for runs in grouped(row for row in finished(result) if row.free):
        loss = compared_runs(result, runs, axis)
        if loss is not None:
            percent = 100 * (best[1] / loss.mean - 1)
            place = f"{abs(percent):.1f}% {'above' if percent >= 0 else 'below'}"
            at = f"{runs[0].recipe.removesuffix(FREE_NETWORK)} is at {show(loss.mean)}"
            notes.append(f"Without a network, {at}: {best[0].name} is {place} that.")
    return notes


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


def span(result: Result, axis: Axis) -> str:
    position = common(result, axis) or 0
    return f"{brief(position)} s" if axis is SECONDS else f"{position:,.0f} steps"


def _rival(others: Standing) -> tuple[Group, float]:
    """Return what to compare with: DDP if it is there, else the next best."""
    ddp = [pair for pair in others if _is_ddp(pair[0])]
    return (ddp or others)[0]


def _is_ddp(group: Group) -> bool:
    return group.mean.recipe.partition("(")[0] == "ddp"


def _at_the_limit(result: Result, axis: Axis, where: str) -> str:
    """Return which recipe leads when the race ends, and how it compares with a rival."""
    order, show = standing(result, axis), loss_format(result)
    ahead = leaders(result, axis)
    within = f"{'In' if axis is SECONDS else 'After'} {span(result, axis)} per recipe{where}"
    names, best = listed([group.name for group in ahead]), show(order[0][1])
    others = order[len(ahead) :]
    if not others:
        return f"{within}, {names} are tied at a validation loss of {best}"
    rival, loss = _rival(others)
    against = f"{rival.name} ({show(loss)})"
    if len(ahead) > 1:
        return f"{within}, {names} share the lowest validation loss ({best}) ahead of {against}"
    sooner = _sooner(result, ahead[0], loss) if axis is SECONDS and _is_ddp(rival) else ""
    return (
        f"{within}, {names} reached the lowest validation loss ({best}), "
        f"{_pace(result, ahead[0], rival, axis)} {against}{sooner}"
    )


def _sooner(result: Result, leader: Group, loss: float) -> str:
    """Return how much sooner the leader reached the loss that DDP has at the end."""
    end, there = common(result, SECONDS), reached(leader.mean, SECONDS, loss)
    if not end or not there or end < 1.05 * there:
        return ""
    return f", a loss that it reached after {brief(there)} s, {_times(end / there)} times as fast"


def _bytes(result: Result, axis: Axis) -> str:
    """Return what the leader and its rival send."""
    order = standing(result, axis)
    ahead = leaders(result, axis)
    others = order[len(ahead) :]
    if len(ahead) > 1 or not others:
        return ""
    leader, (rival, _) = ahead[0], _rival(others)
    mine, theirs = megabytes_per_step(leader.mean), megabytes_per_step(rival.mean)
    if not mine and not theirs:
        return ""
    if three_digits(mine) == three_digits(theirs):
        return f"both send {three_digits(mine)} MB per host and step"
    return (
        f"{leader.name} sends {three_digits(mine)} MB per host and step, "
        f"{rival.name} {three_digits(theirs)}"
    )


def _pace(result: Result, leader: Group, rival: Group, axis: Axis) -> str:
    """Compare the leader's speed with the rival's. The text ends before the rival's name."""
    mine, theirs = leader.mean, rival.mean
    if axis is STEPS:
        ratio = mine.seconds_per_step / theirs.seconds_per_step if theirs.seconds_per_step else 0.0
        if not ratio > 0:  # zero or NaN: not measured
            return "ahead of"
        return f"at {_times(ratio)} times the time per step of"
    if number(result, "seconds") is None:  # the runs differ in length
        return "ahead of"
    ratio = mine.steps / theirs.steps if theirs.steps else 0.0
    if 0.95 < ratio < 1.05:
        return "in as many steps as"
    if ratio < 1:
        return f"in {mine.steps:,} steps against the {theirs.steps:,} of"
    return f"with {_times(ratio)} times as many steps as"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}" if ratio < 1 else f"{ratio:.1f}"


def _other_axis(result: Result, axis: Axis, before: list[Group]) -> str:
    """Return which recipe leads after equal steps in a race over time, or vice versa."""
    order, show = standing(result, axis), loss_format(result)
    if len(order) < 2:
        return ""
    ahead, losses = leaders(result, axis), {group.name: loss for group, loss in order}
    within = f"{'in' if axis is SECONDS else 'after'} the same {span(result, axis)}"
    best, others = show(order[0][1]), order[len(ahead) :]
    if not others:
        return f"{within} {'both' if len(ahead) == 2 else 'all'} are tied ({best})"
    if [group.name for group in ahead] == [group.name for group in before]:
        it, (rival, loss) = "it is" if len(ahead) == 1 else "they are", others[0]
        return f"{within} {it} ahead too ({best} against {show(loss)} for {rival.name})"
    names = listed([group.name for group in ahead])
    if len(ahead) > 1:
        return f"{within} {names} share the lead ({best})"
    first = before[0].name
    beaten = first if first != names and first in losses else others[0][0].name
    name = "" if beaten == first else f" for {beaten}"
    return f"{within} {names} is ahead ({best} against {show(losses[beaten])}{name})"
