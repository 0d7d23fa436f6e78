"""Versions of other libraries that are too old, or missing, are one line that says what to do."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from laconic.integrations import versions

ROOT = Path(__file__).parents[2]


TOO_OLD = {"2.4.9": "lightning 2.4.9 is too old", "1.99": "lightning 1.99 is too old"}


def test_what_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed in ("2.4.9", "1.99", None, "2.6", "2.6.0.post0", "2.10.1", "3.0.0rc1"):

        def version(library: str, found: str | None = installed) -> str:
            if found is None:
                raise PackageNotFoundError(library)
            return found

        monkeypatch.setattr(versions, "version", version)
        if installed in TOO_OLD or installed is None:
            problem = TOO_OLD.get(str(installed), "lightning is not installed")
            said = f"laconic.integrations.lightning: {problem}: run pip install 'lightning>=2.6'"
            with pytest.raises(ImportError, match=re.escape(said)):
                versions.check_versions("lightning")
        else:
            versions.check_versions("lightning")


def test_the_extra_of_each_asks_for_the_same() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for integration, oldest in versions.OLDEST.items():
        (extra,) = re.findall(rf"^{integration} = (.*)$", text, re.MULTILINE)
        assert dict(re.findall(r'"(\w+)>=([\d.]+)"', extra)) == oldest


@pytest.mark.parametrize("integration", versions.OLDEST)
def test_each_integration_checks_before_it_imports(
    integration: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "version", lambda library: "0.1")
    monkeypatch.delitem(sys.modules, f"laconic.integrations.{integration}", raising=False)
    monkeypatch.setitem(sys.modules, integration, None)  # whose import is another error
    library = next(iter(versions.OLDEST[integration]))
    with pytest.raises(ImportError, match=f"{integration}: {library} 0.1 is too old"):
        importlib.import_module(f"laconic.integrations.{integration}")
