"""What is tuned: a recipe in which free names stand for numbers, and the values each may take."""

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
Rules = Mapping[str, Callable[..., Recipe]]
"""A user's own recipes by name."""

LR = "lr"
"""The name that is always tuned: the local optimiser's peak learning rate, in multiples of the
workload's own. At one learning rate a comparison favours the settings that it suits."""
MOST_SETTINGS = 10_000
"""Of a grid: all of them are checked before anything is trained."""

KNOWN = {
    "ddp": "ddp()",
    "local_sgd": "local_sgd(period)",
    "slowmo": "slowmo(local_sgd(period), period=period, momentum=momentum, lr=outer_lr)",
    "diloco": "diloco(period, lr=outer_lr, momentum=outer_momentum)",
    "sgp": "sgp(peers=peers)",
    "easgd": "easgd(period, beta=beta)",
    "eamsgd": "eamsgd(period, beta=beta)",
}
"""What a recipe's name alone stands for."""
GRIDS: dict[str, tuple[Value, ...]] = {
    "period": (4, 12, 24, 48),
    "momentum": (0.0, 0.1, 0.2, 0.4, 0.6),
    "outer_lr": (0.7, 1.0),
    "outer_momentum": (0.0, 0.3, 0.6, 0.9),
    "beta": (0.5, 0.7, 0.9),
    "peers": (1, 2),
    LR: (0.5, 1.0, 2.0, 4.0),
}
"""The values of names that are given none."""
STARTS: dict[str, Value] = {
    "period": 12, "outer_lr": 1.0, "outer_momentum": 0.6, "beta": 0.9, "peers": 1, LR: 1.0
}  # fmt: skip
"""Where to begin; the grid's value next to it. Momentum depends on the number of workers."""


@dataclass(frozen=True)
class Space:
    """A ``recipe`` with free names, the ``grids`` of values by name (numbers in ascending order),
    and the setting to ``start`` with."""

    recipe: str
    grids: Mapping[str, tuple[Value, ...]]
    start: Setting

    @property
    def size(self) -> int:
        """How many settings there are."""
        return math.prod(len(values) for values in self.grids.values())

    def settings(self) -> Iterator[dict[str, Value]]:
        """All of the grid."""
        for values in product(*self.grids.values()):
            yield dict(zip(self.grids, values, strict=True))

    def ordered(self, name: str) -> bool:
        """Whether the values of ``name`` are numbers, of which neighbours are alike."""
        return all(_is_number(value) for value in self.grids[name])

    def text(self, setting: Setting) -> str:
        """The recipe under ``setting``, as one writes it in Python."""
        return ast.unparse(_Fill(setting).visit(ast.parse(self.recipe, mode="eval")))


class _Fill(ast.NodeTransformer):
    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._setting[node.id]) if node.id in self._setting else node


def space_of(
    recipe: str, given: Mapping[str, Sequence[Value]], workers: int, rules: Rules | None = None
) -> Space:
    """The space of ``recipe``: a name of `KNOWN`, or a text with free names. Each name has the
    values ``given``, else those of `GRIDS`. Every recipe of the grid is made once.

    Raises ``ValueError``, in one line that names the choices, for a text that is no recipe, names
    without values, values of names that are not there, and values that the recipe refuses.
    """
    text = KNOWN.get(recipe.strip(), recipe.strip())
    names = [*_free(text, {*RECIPES, "auto", *(rules or {})}), LR]
    for name in given:
        if name not in names:
            raise ValueError(f"{name!r} is not free in {text!r}: tuned are {', '.join(names)}")
    grids = {}
    for name in names:
        values = given.get(name) or GRIDS.get(name)
        if values is None:
            raise ValueError(f"no values for {name!r} in {text!r}: give --param {name}=A,B,...")
        grids[name] = _grid(name, values)
    for value in grids[LR]:
        check_float(LR, value, 0.0, strict=True)
    starts = {**STARTS, "momentum": momentum_for(workers)}
    start = {name: _nearest(grids[name], starts.get(name)) for name in names}
    space = Space(text, grids, start)
    if space.size > MOST_SETTINGS:
        raise ValueError(
            f"the grid has {space.size} settings, more than {MOST_SETTINGS}: give fewer values"
        )
    _check(space, rules)
    return space


def parse_values(text: str) -> tuple[str, tuple[Value, ...]]:
    """Name and values from ``"momentum=0,0.2,0.4"``: numbers, True, False, None, else words.

    Raises ``ValueError`` for another form.
    """
    name, equals, listed = text.partition("=")
    words = [word.strip() for word in listed.split(",")]
    if not equals or not name.strip().isidentifier() or not all(words):
        raise ValueError(
            f"--param must be NAME=VALUE,VALUE,..., such as momentum=0,0.2,0.4, not {text!r}"
        )
    return name.strip(), tuple(_value(word) for word in words)


def _value(word: str) -> Value:
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word
    return value if isinstance(value, (int, float, str, bool, type(None))) else word


def _free(text: str, functions: set[str]) -> list[str]:
    """Names in ``text`` that are no recipe, in order. One that is called is a mistake, which
    parsing the recipe will name."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        parse_recipe(text)  # says what is wrong
        raise
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and id(n) not in called]
    found = [n.id for n in sorted(nodes, key=lambda n: (n.lineno, n.col_offset))]
    if isinstance(tree.body, ast.Name):  # nothing but a name: a recipe's, misspelled or not
        return []
    free = list(dict.fromkeys(name for name in found if name not in functions))
    if LR in free:
        raise ValueError(
            f"{LR!r} is the local optimiser's learning rate, which is always tuned: give the "
            f"name in {text!r} another, such as outer_lr"
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
    """The value next to what is usual, the lower of two as near; the middle where nothing is."""
    if not _is_number(usual) or not all(_is_number(value) for value in values):
        return usual if usual in values else values[(len(values) - 1) // 2]
    return min(values, key=lambda value: (abs(float(value) - float(usual)), float(value)))  # type: ignore[arg-type]


def _check(space: Space, rules: Rules | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said again when the recipe is trained
        for text in {space.text(setting): None for setting in space.settings()}:
            if not isinstance(parse_recipe(text, rules), tuple):
                raise ValueError("auto() chooses by itself while it trains: nothing is to be tuned")
