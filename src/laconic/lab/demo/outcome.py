"""The recipes of ``laconic demo``, and what it says about their race.

All sentences are made from the figures of the race. Losses are compared as displayed, so that no
sentence contradicts the table.
"""

from __future__ import annotations

import re

from rich import box
from rich.table import Table

from laconic.lab.race.comparison import compared, competing, reached
from laconic.lab.race.result import FREE_NETWORK, NO_COMMUNICATION, SECONDS, Result, Row, number
from laconic.lab.race.verdict import listed
from laconic.lab.race.wording import bandwidth, brief, loss_format

DDP, AUTO = "ddp()", "auto()"
FREE = 'outer_step(ddp(), 4, outer="muon")'
FREE_ROW = FREE + FREE_NETWORK

RECIPES = {
    DDP: "the hosts average their gradients in every step, as with torch's DDP",
    "local_sgd(24)": "each host trains alone for 24 steps; then they average their models",
    "slowmo(local_sgd(24), period=24)": "the same, and a step with momentum each time",
    'streaming_diloco(16, outer="muon")': "a quarter of the model travels at a time, in 4 bits, "
    "while the hosts train on",
    AUTO: "measures the network and a step, and then chooses a recipe itself",
}
"""What is raced, and how its hosts communicate."""
EXPLAINED = {
    NO_COMMUNICATION: "each host trains alone, all the time",
    **RECIPES,
    FREE_ROW: "an optimizer like that of auto(), without a network: the best to hope for",
}


MORE = 1.03
"""A larger ratio of steps to those without communication is not possible on a quiet machine."""
SLOWER = 1.5
"""The same of the seconds that a step computes. Messages, which share the processors, make it up to
1.3."""


def sentences(result: Result) -> list[str]:
    """Return what the race shows: about DDP, about `auto` and its optimizer without a network, and
    about hosts that never communicate.

    The last sentence names the rows that did not finish.
    """
    lost = [f"{row.recipe} {row.status}" for row in result.rows if row.status != "ok"]
    end = f"; not counted: {listed(lost)}." if lost else "."
    return [_about_ddp(result), _about_auto(result), _about_alone(result) + end]


def disturbed(result: Result) -> str | None:
    """Return a warning if hosts took more steps with a network than without one, or computed much
    longer for each."""
    rows = {row.recipe: row for row in _finished(result)}
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


def finals(result: Result) -> dict[str, float]:
    """Return the loss of each recipe that finished, at equal time."""
    losses = {row.recipe: compared(result, row, SECONDS) for row in _finished(result)}
    return {name: loss for name, loss in losses.items() if loss is not None}


def seconds_to_ddp(result: Result) -> dict[str, float]:
    """Return after how many seconds each recipe first had DDP's final loss, if it did."""
    target = finals(result).get(DDP)
    if target is None:
        return {}
    found = {row.recipe: reached(row, SECONDS, target) for row in _finished(result)}
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def _computes(row: Row) -> float:
    """Return the seconds of a step without its waiting."""
    return row.seconds * (1 - row.waiting) / row.steps if row.steps else 0.0


def _finished(result: Result) -> list[Row]:
    return [row for row in result.rows if row.status == "ok"]


def _row(result: Result, recipe: str) -> Row:
    return next(row for row in result.rows if row.recipe == recipe)


def _about_ddp(result: Result) -> str:
    losses, show = finals(result), loss_format(result)
    if DDP not in losses:
        return f"{DDP} did not finish, so there is no loss to compare with."
    row, alone = _row(result, DDP), ""
    if NO_COMMUNICATION in losses:
        steps = _row(result, NO_COMMUNICATION).steps
        alone = f" where hosts that never communicate take {steps:,},"
    return (
        f"{DDP} waits for the network ({bandwidth(result)} per host) during {row.waiting:.0%} of "
        f"its {brief(number(result, 'seconds') or row.seconds)} s: it takes {row.steps:,} steps,"
        f"{alone} and ends at a loss of {show(losses[DDP])}."
    )


def _about_auto(result: Result) -> str:
    losses, show = finals(result), loss_format(result)
    if AUTO not in losses:
        return f"{AUTO} did not finish."
    free = losses.pop(FREE_ROW, None)
    others = {n: loss for n, loss in losses.items() if n not in (AUTO, NO_COMMUNICATION)}
    ahead = [name for name, loss in others.items() if float(show(loss)) < float(show(losses[AUTO]))]
    level = [name for name, loss in others.items() if show(loss) == show(losses[AUTO])]
    place = f"level with {listed(level)}" if level else "the lowest of all recipes"
    if ahead:
        place = f"behind {listed([f'{name} ({show(others[name])})' for name in ahead])}"
    elif not others:
        place = "with no other recipe to compare it with"
    chose = chosen(_row(result, AUTO))
    text = f"{AUTO} chose {chose}, " if chose else f"{AUTO} "
    if DDP in losses:
        seconds = seconds_to_ddp(result)
        if AUTO not in seconds:
            text += f"did not reach the loss of {DDP}, "
        else:
            times = seconds[DDP] / seconds[AUTO]
            faster = f" ({times:.1f} times as fast)" if times > 1.05 else ""
            text += f"had that loss after {seconds[AUTO]:.1f} s{faster}, "
    hope = "" if free is None else f"; without a network, {FREE} ended at {show(free)}"
    gains = losses[AUTO] < losses.get(DDP, 0.0)
    advice = f" Begin with {AUTO} in your own program." if gains else ""
    return f"{text}and ended at {show(losses[AUTO])}, {place}{hope}.{advice}"


def _about_alone(result: Result) -> str:
    losses, show = finals(result), loss_format(result)
    alone = losses.pop(NO_COMMUNICATION, None)
    losses.pop(FREE_ROW, None)
    if alone is None:
        return "Hosts that never communicate did not finish"
    if not losses:
        return f"Hosts that never communicate end at {show(alone)}, and no recipe finished"
    mine = float(show(alone))
    ahead = [name for name, loss in losses.items() if float(show(loss)) < mine]
    rest = [name for name in losses if name not in ahead]
    if not rest:
        order = "all recipes are ahead of them"
    elif not ahead:
        order = "no recipe is ahead of them: communication has not paid here"
    elif len(ahead) < len(rest):
        order = f"only {listed(ahead)} {'is' if len(ahead) == 1 else 'are'} ahead of them"
    else:
        order = f"all recipes but {listed(rest)} are ahead of them"
    mean = "the mean loss of their own models"
    seldom = [name for name in ahead if name not in (DDP, AUTO)]
    told = ". What hosts learn from each other is worth a few messages" if seldom else ""
    return f"Hosts that never communicate end at {show(alone)}, {mean}: {order}{told}"


def chosen(auto: Row) -> str:
    """Return the recipe that `auto` chose last, or "" if it chose none."""
    found = re.search(r": (\w+\([^:]*\)) takes ", auto.notes[-1]) if auto.notes else None
    return found[1] if found else ""


def table(result: Result) -> Table:
    """Return the figures behind the sentences."""
    losses, show, seconds = finals(result), loss_format(result), seconds_to_ddp(result)
    whole = brief(number(result, "seconds") or 0.0)
    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("", overflow="fold")
    for header in (
        f"loss at\n{whole} s",
        "s to loss\nof ddp()",
        "steps\ndone",
        "waiting for\nnetwork",
    ):
        shown.add_column(header, justify="right", no_wrap=True, vertical="bottom")
    lowest = show(min((losses[row.recipe] for row in competing(result)), default=None))
    for row in result.rows:
        final = losses.get(row.recipe)
        best = not row.reference and final is not None and show(final) == lowest
        time = f"{seconds[row.recipe]:.1f}" if row.recipe in seconds else "–"
        figures = (show(final), time, f"{row.steps:,}", f"{row.waiting:.0%}")
        if row.status != "ok":
            figures = (row.status, "–", "–", "–")
        shown.add_row(row.recipe, *figures, style="bold" if best else None)
    return shown
