"""The package: what importing it costs, and where its version and its names come from."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Mapping
from graphlib import TopologicalSorter
from importlib.metadata import version
from pathlib import Path

import pytest

import laconic
from laconic.algorithms.recipes import RECIPES

PROGRAM = """
import sys, laconic, laconic.cli
for words in (["--help"], ["compare", "--help"]):
    try:
        laconic.cli.main(words)
    except SystemExit:
        pass
heavy = {"torch", "numpy", "matplotlib", "rich", "cryptography"}
print(sorted(heavy & {*sys.modules}), file=sys.stderr)
import laconic.attach
from laconic import attach
assert callable(laconic.attach) and laconic.attach is attach
assert callable(laconic.auto) and laconic.auto(0.5).target == 0.5
assert laconic.errors.LinkError is laconic.LinkError
"""


def test_torch_is_imported_when_it_is_needed_and_functions_keep_their_names() -> None:
    argv = [sys.executable, "-s", "-c", PROGRAM]
    ended = subprocess.run(argv, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr.strip()) == (0, "[]")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = laconic.nothing  # type: ignore[attr-defined]


def test_every_name_is_what_a_type_checker_sees() -> None:
    for name, module in laconic.MODULE_OF.items():
        there = importlib.import_module(module)
        if not hasattr(there, name) or module in ("laconic", "laconic.algorithms"):
            assert getattr(laconic, name) is importlib.import_module(f"{module}.{name}")
        else:
            assert getattr(laconic, name) is getattr(there, name)
    assert {*RECIPES} <= {*laconic.__all__}


def test_the_version_is_the_same_everywhere() -> None:
    cited = (Path(__file__).parents[1] / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", cited, re.MULTILINE) == [laconic.__version__]
    assert version("laconic-torch") == laconic.__version__


ROOMS = (
    "version errors units native processor tensors buckets parts device sampler muon < codecs < "
    "links < algorithms elastic metrics < engine < policy < "
    "attach compat checkpoints checkpoint integrations < lab advisor cli __init__ __main__"
)
"""From the bottom to the top: what is in a room imports nothing above it."""


def imported(path: Path, modules: Mapping[str, Path]) -> set[str]:
    """The modules of laconic that a file imports, also inside functions, and for types only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules.keys()


def test_imports_go_down_and_never_in_a_circle() -> None:
    root = Path(laconic.__file__).parent
    names = {p: [root.name, *p.relative_to(root).with_suffix("").parts] for p in root.rglob("*.py")}
    modules = {".".join(n).removesuffix(".__init__"): p for p, n in names.items()}
    rooms = {room: rank for rank, each in enumerate(ROOMS.split(" < ")) for room in each.split()}
    above = {name: imported(path, modules) - {"laconic"} for name, path in modules.items()}
    for name, used in ((name, used) for name, uses in above.items() for used in uses):
        ranks = [rooms[names[modules[each]][1]] for each in (name, used)]
        assert ranks[0] >= ranks[1], f"{name} imports {used}, which is above it"
    TopologicalSorter(above).prepare()  # raises for a circle
