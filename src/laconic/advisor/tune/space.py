"""The search space: a recipe with free names, and the values that each may take."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.recipes import RECIPES
from laconic.algorithms.round import Recipe
from laconic.algorithms.updates import momentum_for
from laconic.errors import check_float

Value = float | int | str | bool | None
Setting = Mapping[str, Value]
"""One value for each name."""

LR = "lr"
"""The name that is always tuned: the local optimizer's peak learning rate, as a multiple of the
workload's. Comparing settings at one learning rate favors those that it suits."""
MOST_SETTINGS = 10_000
"""Maximum size of a grid. All its settings are checked before anything is trained."""

KNOWN = {
    "ddp": "ddp()",
    "local_sgd": "local_sgd(period)",
    "slowmo": "slowmo(local_sgd(period), period=period, momentum=momentum, lr=outer_lr)",
    "diloco": "diloco(period, lr=outer_lr, momentum=outer_momentum)",
    "sgp": "sgp(peers=peers)",
    "easgd": "easgd(period, beta=beta)",
}
"""What the name of a recipe stands for."""
GRIDS: dict[str, tuple[Value, ...]] = {
    "period": (4, 12, 24, 48),
    "momentum": (0.0, 0.1, 0.2, 0.4, 0.6),
    "outer_lr": (0.7, 1.0),
    "outer_momentum": (0.0, 0.3, 0.6, 0.9),
    "beta": (0.5, 0.7, 0.9),
    "peers": (1, 2),
    LR: (0.5, 1.0, 2.0, 4.0),
}
"""Default values by name."""
STARTS: dict[str, Value] = {
    "period": 12, "outer_lr": 1.0, "outer_momentum": 0.6, "beta": 0.9, "peers": 1, LR: 1.0
}  # fmt: skip
"""Starting values; the nearest value in the grid is used. Momentum depends on the workers."""


@dataclass(frozen=True)
class Space:
    """A ``recipe`` with free names, the ``grids`` of values by name, and the ``start`` setting.

    Values that are numbers are in ascending order.
    """

    recipe: str
    grids: Mapping[str, tuple[Value, ...]]
    start: Setting

    @property
    def size(self) -> int:
        """The number of settings."""
        return math.prod(len(values) for values in self.grids.values())

    def settings(self) -> Iterator[dict[str, Value]]:
        """Yield all settings of the grid."""
        for values in product(*self.grids.values()):
            yield dict(zip(self.grids, values, strict=True))

    def ordered(self, name: str) -> bool:
        """Return whether the values of ``name`` are numbers, so that adjacent ones are similar."""
        return all(_is_number(value) for value in self.grids[name])

    def text(self, setting: Setting) -> str:
        """Return the recipe under ``setting``, as Python code."""
        return ast.unparse(_Fill(setting).visit(ast.parse(self.recipe, mode="eval")))


class _Fill(ast.NodeTransformer):
    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._setting[node.id]) if node.id in self._setting else node


def space_of(
    recipe: str,
    values: Mapping[str, Sequence[Value]],
    workers: int,
    rules: Mapping[str, Callable[..., Recipe]] | None = None,
) -> Space:
    """Return the space of ``recipe``, a name in `KNOWN` or a text with free names.

    Each name takes its ``values``, or those of `GRIDS`. ``rules``: a user's own recipes by name.
    Every recipe of the grid is built once.

    Raises ``ValueError`` for a text that is not a recipe, names without values, values of unknown
    names, and values that the recipe rejects.
    """
    text = KNOWN.get(recipe.strip(), recipe.strip())
    names = [*_free(text, {*RECIPES, "auto", *(rules or {})}), LR]
    for name in values:
        if name not in names:
            raise ValueError(f"{name!r} is not free in {text!r}: choose from {', '.join(names)}")
    grids = {}
    for name in names:
        grid = values.get(name) or GRIDS.get(name)
        if grid is None:
            raise ValueError(f"no values for {name!r} in {text!r}: give --values {name}=A,B,...")
        grids[name] = _grid(name, grid)
    for value in grids[LR]:
        check_float(LR, value, 0.0, strict=True)
    starts = {**STARTS, "momentum": momentum_for(workers)}
    start = {name: _nearest(grids[name], starts.get(name)) for name in names}
    space = Space(text, grids, start)
    if space.size > MOST_SETTINGS:
        raise ValueError(
            f"the grid has {space.size} settings; the maximum is {MOST_SETTINGS}: give fewer values"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # repeated when the recipe is trained
        for made in {space.text(setting): None for setting in space.settings()}:
            if not isinstance(parse_recipe(made, rules), tuple):
                raise ValueError("auto() chooses by itself during training: nothing to tune")
    return space


def parse_values(text: str) -> tuple[str, tuple[Value, ...]]:
    """Parse ``"momentum=0,0.2,0.4"`` into a name and numbers, True, False, None, or strings.

    Raises ``ValueError`` for any other form.
    """
    name, equals, listed = text.partition("=")
    words = [word.strip() for word in listed.split(",")]
    if not equals or not name.strip().isidentifier() or not all(words):
        raise ValueError(
            f"--values must be NAME=VALUE,VALUE,... (for example, momentum=0,0.2,0.4), not {text!r}"
        )
    return name.strip(), tuple(_value(word) for word in words)


def _value(word: str) -> Value:
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word
    return value if isinstance(value, (int, float, str, bool, type(None))) else word


def _free(text: str, functions: set[str]) -> list[str]:
    """Return the names in ``text`` that are not recipes, in order.

    A called name is not free: parsing the recipe reports it.
    """
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        parse_recipe(text)  # raises an error with the reason
        raise
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and id(n) not in called]
    found = [n.id for n in sorted(nodes, key=lambda n: (n.lineno, n.col_offset))]
    if isinstance(tree.body, ast.Name):  # only a name: a recipe's, possibly misspelled
        return []
    free = list(dict.fromkeys(name for name in found if name not in functions))
    if LR in free:
        raise ValueError(
            f"{LR!r} is the local optimizer's learning rate, which is always tuned: rename it in "
            f"{text!r}, for example to outer_lr"
        )
    return free


def _is_number(value: Value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _grid(name: str, values: Sequence[Value]) -> tuple[Value, ...]:
    if len({repr(value) for value in values}) < len(values):
        raise ValueError(f"a value of {name!r} is given twice: {', '.join(map(str, values))}")
    if all(_is_number(value) for value in values):
        return tuple(sorted(values, key=float))  # type: ignore[arg-type]
    return tuple(values)


def _nearest(values: Sequence[Value], usual: Value) -> Value:
    """Return the value nearest to ``usual``, the lower on a tie; without ``usual``, the middle."""
    if not _is_number(usual) or not all(_is_number(value) for value in values):
        return usual if usual in values else values[(len(values) - 1) // 2]
    return min(values, key=lambda value: (abs(float(value) - float(usual)), float(value)))  # type: ignore[arg-type]
