"""What was compiled when laconic was installed, where there was a C compiler: everything also runs
without."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec


def load(module: str, version: int) -> ctypes.CDLL | None:
    """The library of extension ``module``, if it is there, can be used, and is of this version: an
    updated checkout may still have what it compiled before."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return None
    try:
        found = ctypes.CDLL(spec.origin)
        return found if found.laconic_version() == version else None
    except (OSError, AttributeError):  # cut short, of another machine, on a disk mounted noexec
        return None
