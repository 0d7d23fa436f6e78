"""What is raced, and where: the table to extend."""

from __future__ import annotations

from fnmatch import fnmatchcase

from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.recipes import RECIPES
from laconic.lab.race import rivals

OURS = (*RECIPES, "auto")
"""Names that laconic reads itself."""

NONE = "none"
"""The row whose workers never talk: the compute alone. Its network is none, so it is run once."""

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
"""In the order in which the tables have them. A row is ``none``, a recipe as
`laconic.algorithms.parse` reads it, or a peer as ``laconic compare --peer`` does."""

NETWORKS = ("10mbit", "100mbit", "1000mbit")
"""What each host may send."""

SEEDS = (0, 1, 2)


def is_peer(text: str) -> bool:
    """Whether the row is another library's."""
    return text != NONE and _name(text) not in OURS


def check(text: str) -> None:
    """Raise ``ValueError``, in one line that names the choices, for what is no row."""
    if text == NONE:
        return
    if not is_peer(text):
        parse_recipe(text)
        return
    adapters = sorted(path.stem.replace("_", "-") for path in rivals.ADAPTERS.glob("[!_]*.py"))
    if _name(text) not in adapters and not _name(text).endswith(".py"):
        raise ValueError(
            f"no row {text!r}: give {NONE}, a recipe ({', '.join(OURS)}), a peer "
            f"({', '.join(adapters)}), or a pattern of rows of the table, as 'torchft*'"
        )
    peer = rivals.find(text)
    if peer.version() is None:
        raise ValueError(
            f"{text} needs {peer.package}: make peers installs it, --rows leaves it out"
        )


def _name(text: str) -> str:
    return text.partition("(")[0].strip()


def chosen(patterns: list[str] | None) -> list[str]:
    """The table's rows that match one of the patterns (``*`` and ``?`` as in file names), in the
    table's order, then the texts that match none, which are rows of their own. All of the table for
    None. Raises ``ValueError`` for what is no row."""
    asked = list(ROWS if patterns is None else patterns)
    rows = [row for row in ROWS if any(row == p or fnmatchcase(row, p) for p in asked)]
    others = [p for p in asked if p not in rows and not any(fnmatchcase(r, p) for r in ROWS)]
    rows += dict.fromkeys(others)
    for row in rows:
        check(row)
    return rows
