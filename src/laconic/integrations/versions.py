"""The oldest versions of other libraries that work. Each integration checks before it imports
them."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

OLDEST = {
    "accelerate": "1.3",
    "lightning": "2.5",
    "transformers": "4.48",
}
"""With the versions before these, tests of the integration fail. `pyproject.toml` has the same."""


def check_version(library: str) -> None:
    """Raise ``ImportError`` with what to install, if ``library`` is missing or too old."""
    oldest = OLDEST[library]
    try:
        installed = version(library)
    except PackageNotFoundError:
        problem = "is not installed"
    else:
        if _parts(installed) >= _parts(oldest):
            return
        problem = f"{installed} is too old"
    raise ImportError(f"{library} {problem}: pip install '{library}>={oldest}'", name=library)


def _parts(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text)[:2]]
