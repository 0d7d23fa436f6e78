"""The rows and networks of the race. Extend the table here."""

from __future__ import annotations

from fnmatch import fnmatchcase

from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.recipes import RECIPES
from laconic.lab.race import rivals

OURS = (*RECIPES, "auto")
"""Names that laconic parses itself."""

NONE = "none"
"""The row whose workers never communicate, which shows the compute time. It runs once, without a
network."""

ROWS = (
    NONE,
    # laconic's recipes
    "ddp()",
    "local_sgd(24)",
    "slowmo(local_sgd(12), 24, 0.2)",
    "diloco(24, momentum=0.5)",
    "ddp(codec='int4')",
    "power_sgd(4, codec='int8')",
    "streaming_diloco(16, 4, 2, codec='int4', lr=0.4, momentum=0.6)",
    "auto()",
    # other libraries: docs/compare.md says what each is and which options it has
    "torch-ddp",
    "torch-ddp('fp16')",
    "torch-ddp('powersgd', rank=4)",
    "torch-postlocal(period=24)",
    "accelerate(24)",
    "fairscale(24, 0.2)",
    "torchft(24)",
    "torchft(24, outer=True, momentum=0.5)",
    "torchft(24, outer=True, momentum=0.5, bucketed=True)",
    "torchft(24, outer=True, momentum=0.5, bucketed=True, fragments=2, delay=4, alpha=0.5)",
)
"""The rows, in the order of the tables. A row is ``none``, a recipe as parsed by
`laconic.algorithms.parse`, or another library as in ``laconic compare --peer``."""

NETWORKS = ("10mbit", "100mbit", "1000mbit")
"""Bandwidth of each host."""

SEEDS = (0, 1, 2)


def is_peer(text: str) -> bool:
    """Return whether the row is another library."""
    return text != NONE and _name(text) not in OURS


def check(text: str) -> None:
    """Raise ``ValueError`` for a text that is not a row."""
    if text == NONE:
        return
    if not is_peer(text):
        parse_recipe(text)
        return
    adapters = sorted(path.stem.replace("_", "-") for path in rivals.ADAPTERS.glob("[!_]*.py"))
    if _name(text) not in adapters and not _name(text).endswith(".py"):
        raise ValueError(
            f"no row {text!r}: give {NONE}, a recipe ({', '.join(OURS)}), a peer "
            f"({', '.join(adapters)}), or a pattern for rows of the table, such as 'torchft*'"
        )
    rival = rivals.find(text)
    if rival.version() is None:
        raise ValueError(
            f"{text} needs {rival.package}: run make peers to install it, or exclude it by --rows"
        )


def _name(text: str) -> str:
    return text.partition("(")[0].strip()


def chosen(patterns: list[str] | None) -> list[str]:
    """Return the rows that the patterns select; all rows of the table for None.

    Patterns may contain ``*`` and ``?``, as for file names. Rows of the table come first, in its
    order. A text that matches none of them is a row of its own. Raises ``ValueError`` for a text
    that is not a row.
    """
    patterns = list(ROWS if patterns is None else patterns)
    rows = [row for row in ROWS if any(row == p or fnmatchcase(row, p) for p in patterns)]
    others = [p for p in patterns if p not in rows and not any(fnmatchcase(r, p) for r in ROWS)]
    rows += dict.fromkeys(others)
    for row in rows:
        check(row)
    return rows
