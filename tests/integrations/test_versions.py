"""Versions of other libraries that are too old, or missing, are one line that says what to do."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from laconic.integrations import versions

from tests.support import programs

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        (
            "2.4.9",
            "lightning 2.4.9 is too old: run pip install 'lightning>=2.6'",
        ),
        (
            "1.99",
            "lightning 1.99 is too old: run pip install 'lightning>=2.6'",
        ),
        (
            None,
            "lightning is not installed: run pip install 'lightning>=2.6'",
        ),
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
    with pytest.raises(ImportError, match=re.escape(f"laconic.integrations.lightning: {said}")):
        versions.check_versions("lightning")


@pytest.mark.parametrize("installed", ["2.6", "2.6.0.post0", "2.10.1", "3.0.0rc1"])
def test_others_are_not(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(versions, "version", lambda library: installed)
    versions.check_versions("lightning")


@pytest.mark.parametrize("integration", versions.OLDEST)
def test_the_extra_of_each_asks_for_the_same(integration: str) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (extra,) = re.findall(rf"^{integration} = (.*)$", text, re.MULTILINE)
    assert dict(re.findall(r'"(\w+)>=([\d.]+)"', extra)) == versions.OLDEST[integration]


@pytest.mark.parametrize("integration", versions.OLDEST)
def test_each_integration_checks_before_it_imports(integration: str) -> None:
    program = f"""
import sys
from laconic.integrations import versions
versions.version = lambda library: "0.1"
try:
    import laconic.integrations.{integration}
except ImportError as error:
    print(error, "{integration}" in sys.modules)
"""
    ended = subprocess.run([*programs.NEW, "-c", program], capture_output=True, text=True)
    library = next(iter(versions.OLDEST[integration]))
    assert ended.stdout.startswith(f"laconic.integrations.{integration}: {library} 0.1 is too old")
    assert ended.stdout.endswith("False\n")
