"""Load laconic's optional C extensions.

They are compiled at installation if a C compiler is available. Everything also runs without them,
except for emulated latency, jitter and loss.
"""

from __future__ import annotations

import ctypes
from importlib.util import find_spec


def load(module: str, version: int) -> ctypes.CDLL | None:
    """Return the library of the extension ``module``, or None if it is missing or unusable.

    The library must report ``version``: after an update, a source checkout may still contain the
    previous build.
    """
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
        return library if library.laconic_version() == version else None
    # The file is truncated, was built for another machine, or is on a disk mounted noexec.
    except (OSError, AttributeError):
        return None


def path(module: str, version: int) -> str | None:
    """Return the file of the extension ``module``, or None if `load` returns None."""
    library = load(module, version)
    return None if library is None else library._name
