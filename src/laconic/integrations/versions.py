"""The oldest versions of other libraries that work. Each integration checks before it imports
them."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

OLDEST = {
    "accelerate": {"accelerate": "1.3"},
    "lightning": {"lightning": "2.6"},
    "transformers": {"accelerate": "1.14", "transformers": "4.51"},
}
"""By integration, what it needs: tests fail with older versions. The extras of `pyproject.toml` are
the same."""


def check_versions(integration: str) -> None:
    """Raise ``ImportError`` with what to install, if a library is missing or too old."""
    for library, oldest in OLDEST[integration].items():
        try:
            installed = version(library)
        except PackageNotFoundError:
            problem = "is not installed"
        else:
            if _parts(installed) >= _parts(oldest):
                continue
            problem = f"{installed} is too old"
        raise ImportError(
            f"laconic.integrations.{integration}: {library} {problem}: run pip install "
            f"'{library}>={oldest}'",
            name=library,
        )


def _parts(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text)[:2]]
