"""The package: what importing it costs, and where its version and its names come from."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import laconic
from laconic.algorithms.recipes import RECIPES

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "program",
    [
        "import laconic",
        "import laconic.cli; laconic.cli.main(['--help'])",
        "import laconic.cli; laconic.cli.main(['compare', '--help'])",
    ],
)
def test_torch_is_imported_when_it_is_needed(program: str) -> None:
    heavy = ("torch", "numpy", "matplotlib", "rich", "cryptography")
    check = f"import sys; print([m for m in {heavy} if m in sys.modules], file=sys.stderr)"
    watched = f"""
try:
    {program}
except SystemExit:
    pass
{check}
"""
    ended = subprocess.run([sys.executable, "-s", "-c", watched], capture_output=True, text=True)
    assert ended.stderr.strip() == "[]"


def test_every_name_is_what_a_type_checker_sees() -> None:
    """The imports for type checkers, the table of modules, and `__all__`."""
    tree = ast.parse(Path(laconic.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(seen) == sorted(laconic.__all__)
    for name, module in seen.items():
        assert module is not None
        there = importlib.import_module(module)
        if not hasattr(there, name) or module in ("laconic", "laconic.algorithms"):
            assert getattr(laconic, name) is importlib.import_module(f"{module}.{name}")
        else:
            assert getattr(laconic, name) is getattr(there, name)
            assert name in laconic.NAMES_BY_MODULE[module]
    assert set(laconic.NAMES_BY_MODULE["laconic.algorithms.recipes"]) == set(RECIPES)


@pytest.mark.slow
def test_a_function_keeps_its_name_when_its_module_is_imported() -> None:
    program = """
import laconic.attach, laconic.auto
from laconic import attach
assert callable(laconic.attach) and laconic.attach is attach
assert callable(laconic.auto) and laconic.auto(0.5).target == 0.5
assert laconic.errors.LinkError is laconic.LinkError
"""
    subprocess.run([sys.executable, "-s", "-c", program], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = laconic.nothing


def test_the_version_is_the_same_everywhere() -> None:
    assert version("laconic-torch") == laconic.__version__
    (cited,) = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == laconic.__version__
