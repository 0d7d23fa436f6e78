"""What an advice consists of, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from laconic.advisor.choices import (
    KNOWN,
    MEASURED_ELEMENTS,
    MEASURED_STEPS,
    MEASURED_WORKERS,
    UNKNOWN,
)
from laconic.policy.choice import TIE
from laconic.policy.facts import Facts
from laconic.units import (
    finite,
    format_bytes,
    format_rate,
    format_seconds,
    format_share,
    three_digits,
)

COLUMNS = ("s/step", "speed", "steps", "progress", "hidden", "MB", "memory")
FEW = 4
"""Columns shown with the alternatives."""
LEGEND = (
    "speed: share of the speed without communication; steps: needed for one of ddp(), ~: not "
    "measured for this recipe, ?: unknown; progress: at most, per second, relative to ddp(). The "
    f"answer is the recipe nearest to DDP of those within {TIE:.0%} of the most progress"
)
MORE_LEGEND = (
    "hidden: share of communication that overlaps with training; MB: sent by a rank to other "
    "workers per step; memory: bytes that rounds keep on a rank"
)


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
class Advice:
    """The result of `laconic.advise`, equal on every rank.

    Attributes:
        facts: what was measured, or given.
        rows: the prediction for each recipe.
        recommendation: the text of the recipe that `laconic.auto` would choose from ``facts``.
        code: the line for a training loop.
        reason: the explanation.
        computes: seconds of a step on each rank. None without a measurement.
        slow: a sentence for each rank that the others wait for.
        alternatives: other recipes to consider, at most 5.

    As text, an advice is what ``laconic advise`` prints.

    Examples:
        >>> from laconic.advisor.advice import advice_on
        >>> from laconic.policy.facts import Facts
        >>> shapes = ((1024, 1024),) * 4  # 4 workers, 0.1 s per step, 1 Gbit/s in bytes per second
        >>> advice = advice_on(Facts(4, shapes, 4, compute=0.1, rate=1.25e8, one_way=0.001))
        >>> advice.recommendation in [row.recipe for row in advice.rows]
        True
    """

    facts: Facts
    rows: tuple[Row, ...]
    recommendation: str
    code: str
    reason: str
    computes: tuple[float, ...] | None = None
    slow: tuple[str, ...] = ()
    alternatives: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the answer, the lines to paste, and the alternatives."""
        return "\n".join(answer(self))

    @property
    def row(self) -> Row:
        """The row of the recommended recipe."""
        return next(r for r in self.rows if r.recipe == self.recommendation)

    def to_json(self) -> str:
        """Return everything as JSON."""
        plain = asdict(self)
        facts: dict[str, Any] = plain["facts"]
        del facts["shapes"], facts["work"]
        facts["parameters"] = self.facts.elements
        for row, made in zip(plain["rows"], self.rows, strict=True):
            row["progress"] = made.progress
        return json.dumps(finite(plain), indent=2)


def answer(advice: Advice) -> Iterator[str]:
    """Yield lines: the answer, the code to paste, the alternatives, and what they are based on."""
    yield advice.reason
    yield (
        f"All numbers of steps come from one task: {MEASURED_WORKERS} workers that train a "
        f"transformer of {MEASURED_ELEMENTS:,} parameters on text with AdamW, for {MEASURED_STEPS} "
        f"steps. Your model is {three_digits(advice.facts.elements / MEASURED_ELEMENTS)} times as "
        "large: on your task, measure with laconic compare."
    )
    yield ""
    yield "    import laconic"
    yield f"    {advice.code}  # before the loop"
    yield "    sync.finish()  # after the loop"
    yield ""
    by_text = {row.recipe: row for row in advice.rows}
    shown = [advice.row, *(by_text[text] for text in advice.alternatives)]
    head, *lines = _table("beside alternatives", shown, FEW)
    yield head
    for line, row in zip(lines, shown, strict=True):
        yield line
        yield f"    {known(row)}"
    yield ""
    yield LEGEND
    yield from facts_text(advice)


def everything(advice: Advice) -> Iterator[str]:
    """Yield the lines of the `answer`, and then every recipe."""
    yield from answer(advice)
    yield ""
    yield from _table("all recipes", advice.rows, len(COLUMNS))
    yield ""
    yield MORE_LEGEND
    yield ""
    yield "Quality, as far as it is known:"
    for row in advice.rows:
        yield f"  {row.recipe}: {known(row)}"


def text(advice: Advice, form: str) -> str:
    """Return the advice as ``form`` says: "answer", "everything", or "json"."""
    if form == "json":
        return advice.to_json()
    if form == "everything":
        return "\n".join(everything(advice))
    return f"{advice}\n\n--all adds a table of all recipes."


def facts_text(advice: Advice) -> Iterator[str]:
    """Yield lines about what the predictions are based on."""
    f, net = advice.facts, advice.facts.net("workers")
    lost = f", {format_share(f.loss)} of packets lost" if f.loss else ""
    ranks = f" of {f.ranks} ranks" if f.ranks > 1 else ""
    yield (
        f"{f.workers} workers{ranks}, {f.elements:,} parameters of {f.itemsize} bytes; a step "
        f"computes for {format_seconds(f.compute)}, {f.backward:.0%} of it backward; network per "
        f"rank: {format_rate(net.rate)}, {format_seconds(2 * net.one_way)} per round trip"
        f"{lost}"
    )
    if advice.computes is not None:
        yield (
            f"measured: steps of {format_seconds(min(advice.computes))} to "
            f"{format_seconds(max(advice.computes))} on {len(advice.computes)} ranks, "
            f"{format_seconds(f.skew)} per step waiting for the slowest"
        )
    else:
        yield (
            "assumed: Adam's kind of optimizer or SGD; most elements in matrices; encoding, "
            "copying, outer steps, and waiting for slower workers are free"
        )


def known(row: Row) -> str:
    """Return where the recipe's steps are from, unless they were determined for it, and what is
    known about its quality."""
    sure = row.steps_from in (*KNOWN, UNKNOWN)
    return row.quality if sure else f"steps: {row.steps_from}; {row.quality}"


def _table(title: str, rows: Sequence[Row], count: int) -> Iterator[str]:
    """Yield a heading and a line per row, with as many columns."""
    figures = ((row.recipe, *_figures(row)[:count]) for row in rows)
    return table([(title, *COLUMNS[:count]), *figures])


def _figures(row: Row) -> tuple[str, ...]:
    known = row.steps_from != UNKNOWN
    steps = f"{'' if row.steps_from in KNOWN else '~'}{row.steps:.2f}"
    return (
        three_digits(row.seconds),
        f"{row.share:.0%}",
        steps if known else "?",
        three_digits(row.progress) if known else "?",
        f"{row.hidden:.0%}",
        three_digits(row.megabytes),
        format_bytes(row.memory),
    )


def table(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table: the first column at the left, the numbers at the right."""
    first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
    for name, *cells in lines:
        cells = [cell.rjust(width + 2) for cell, width in zip(cells, widths, strict=True)]
        yield name.ljust(first) + "".join(cells)
