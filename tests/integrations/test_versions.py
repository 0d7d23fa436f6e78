"""Versions of other libraries that are too old, or missing, are one line that says what to do."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from laconic.integrations import versions

import programs

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ("2.4.9", "lightning 2.4.9 is too old: pip install 'lightning>=2.5'"),
        ("1.99", "lightning 1.99 is too old: pip install 'lightning>=2.5'"),
        (None, "lightning is not installed: pip install 'lightning>=2.5'"),
    ],
)
def test_what_is_too_old_is_refused(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, said: str
) -> None:
    def version(library: str) -> str:
        if installed is None:
            raise PackageNotFoundError(library)
        return installed

    monkeypatch.setattr(versions, "version", version)
    with pytest.raises(ImportError, match=f"^{re.escape(said)}$"):
        versions.check_version("lightning")


@pytest.mark.parametrize("installed", ["2.5", "2.5.0.post0", "2.10.1", "3.0.0rc1"])
def test_others_are_not(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(versions, "version", lambda library: installed)
    versions.check_version("lightning")


@pytest.mark.parametrize("library", versions.OLDEST)
def test_the_extra_of_each_asks_for_the_same(library: str) -> None:
    extras = re.findall(r'"(\w+)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert {oldest for name, oldest in extras if name == library} == {versions.OLDEST[library]}


@pytest.mark.parametrize("library", versions.OLDEST)
def test_each_integration_checks_before_it_imports(library: str) -> None:
    program = f"""
import sys
from laconic.integrations import versions
versions.version = lambda library: "0.1"
try:
    import laconic.integrations.{library}
except ImportError as error:
    print(error, "{library}" in sys.modules)
"""
    ended = subprocess.run([*programs.NEW, "-c", program], capture_output=True, text=True)
    name = "accelerate" if library == "transformers" else library
    assert ended.stdout.startswith(f"{name} 0.1 is too old: pip install '{name}>="), ended.stderr
    assert ended.stdout.endswith("False\n")
