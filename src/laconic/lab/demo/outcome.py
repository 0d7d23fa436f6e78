"""The recipes of ``laconic demo``, and what it says about their race.

All sentences are made from the figures of the race. Losses are compared as displayed, so that no
sentence contradicts the table.
"""

from __future__ import annotations

from laconic.lab.race.comparison import losses, seconds_to_ddp
from laconic.lab.race.result import NO_COMMUNICATION, SECONDS, Result, Row, number
from laconic.lab.race.verdict import chosen, has_outer_step, listed
from laconic.lab.race.wording import bandwidth, loss_format
from laconic.units import three_digits

DDP, LOCAL, AUTO = "ddp()", "local_sgd(24)", "auto()"

RECIPES = {
    DDP: "the hosts average their gradients in every step, as with torch's DDP",
    LOCAL: "each host trains alone for 24 steps; then they average their models",
    "slowmo(local_sgd(24), period=24)": "the same, and a step with momentum each time",
    AUTO: "measures the network and a step, and then chooses a recipe itself",
}
"""What is raced, and how its hosts communicate."""
EXPLAINED = {NO_COMMUNICATION: "each host trains alone, all the time", **RECIPES}

COLUMNS = ("loss_at_equal_time", "seconds_to_ddp", "steps", "waiting")
"""Those of the table of a race that the demo shows."""
MORE = 1.03
"""A larger ratio of steps to those without communication is not possible on a quiet machine."""
SLOWER = 1.5
"""The same of the seconds that a step computes. Messages, which share the processors, make it up to
1.3."""


def sentences(result: Result) -> list[str]:
    """Return what the race shows: about DDP, about `auto`, and about hosts that never communicate.

    The last sentence names the rows that did not finish.
    """
    lost = [f"{row.recipe} {row.status}" for row in result.rows if row.status != "ok"]
    end = f"; not counted: {listed(lost)}." if lost else "."
    return [_about_ddp(result), _about_auto(result), _about_alone(result) + end]


def disturbed(result: Result) -> str | None:
    """Return a warning if hosts took more steps with a network than without one, or computed much
    longer for each."""
    rows = {row.recipe: row for row in result.rows if row.status == "ok"}
    alone = rows.pop(NO_COMMUNICATION, None)
    if alone is None:
        return None
    faster = [name for name, row in rows.items() if row.steps > MORE * alone.steps]
    slower = [name for name, row in rows.items() if _computes(row) > SLOWER * _computes(alone)]
    if faster:
        found = f"{listed(faster)} took more steps than hosts that never communicate"
    elif slower:
        found = (
            f"steps of {listed(slower)} computed more than {SLOWER:g} times as long as those of "
            "hosts that never communicate"
        )
    else:
        return None
    return (
        f"{found}: other programs have kept this machine busy for part of the time. Run the demo "
        "again without them."
    )


def _computes(row: Row) -> float:
    """Return the seconds of a step without its waiting."""
    return row.seconds * (1 - row.waiting) / row.steps if row.steps else 0.0


def _row(result: Result, recipe: str) -> Row:
    return next(row for row in result.rows if row.recipe == recipe)


def _about_ddp(result: Result) -> str:
    found, show = losses(result, SECONDS), loss_format(result)
    if DDP not in found:
        return f"{DDP} did not finish, so there is no loss to compare with."
    row, alone = _row(result, DDP), ""
    if NO_COMMUNICATION in found:
        steps = _row(result, NO_COMMUNICATION).steps
        alone = f" where hosts that never communicate take {steps:,},"
    return (
        f"{DDP} waits for the network ({bandwidth(result)} per host) during {row.waiting:.0%} of "
        f"its {three_digits(number(result, 'seconds') or row.seconds)} s: it takes {row.steps:,} "
        f"steps,{alone} and ends at a loss of {show(found[DDP])}."
    )


def _about_auto(result: Result) -> str:
    found, show = losses(result, SECONDS), loss_format(result)
    if AUTO not in found:
        return f"{AUTO} did not finish."
    mine = show(found[AUTO])
    others = {n: show(loss) for n, loss in found.items() if n not in (AUTO, NO_COMMUNICATION)}
    ahead = [f"{name} ({loss})" for name, loss in others.items() if float(loss) < float(mine)]
    level = [name for name, loss in others.items() if loss == mine]
    place = f"level with {listed(level)}" if level else "the lowest of all recipes"
    place = f"behind {listed(ahead)}" if ahead else place
    row = _row(result, AUTO)
    chose = chosen(row)
    text = f"{AUTO} chose {chose}, " if chose else f"{AUTO} "
    if DDP in found:
        seconds = seconds_to_ddp(result, row)
        if seconds is None:
            text += f"did not reach the loss of {DDP}, "
        else:
            times = _row(result, DDP).seconds / seconds if seconds else 0.0
            part = _about_outer_step(result, LOCAL in found) if has_outer_step(row) else ""
            faster = f" ({times:.1f} times as fast{part})" if times > 1.05 else ""
            text += f"had that loss after {seconds:.1f} s{faster}, "
    gains = found[AUTO] < found.get(DDP, 0.0)
    advice = f" Begin with {AUTO} in your own program." if gains else ""
    return f"{text}and ended at {mine}, {place}.{advice}"


def _about_outer_step(result: Result, local: bool) -> str:
    """Return that there is one, and how long a recipe without one took."""
    seconds = seconds_to_ddp(result, _row(result, LOCAL)) if local else None
    plain = "" if seconds is None else f"; {LOCAL}, which has none, took {seconds:.1f} s"
    return f", with an outer step, a second optimizer{plain}"


def _about_alone(result: Result) -> str:
    found, show = losses(result, SECONDS), loss_format(result)
    alone = found.pop(NO_COMMUNICATION, None)
    if alone is None:
        return "Hosts that never communicate did not finish"
    ahead = [name for name, loss in found.items() if float(show(loss)) < float(show(alone))]
    rest = [name for name in found if name not in ahead]
    if not ahead:
        order = "no recipe is ahead of them: communication has not paid here"
    elif len(ahead) < len(rest):
        order = f"only {listed(ahead)} {'is' if len(ahead) == 1 else 'are'} ahead of them"
    else:
        order = f"all recipes {f'but {listed(rest)} ' if rest else ''}are ahead of them"
    seldom = [name for name in ahead if name not in (DDP, AUTO)]
    told = ". What hosts learn from each other is worth a few messages" if seldom else ""
    return (
        f"Hosts that never communicate end at {show(alone)}, the mean loss of their own models: "
        f"{order}{told}"
    )
