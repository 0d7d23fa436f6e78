"""Synchronizers that a test leaves attached are detached when the test, or its task, ends.

Else the thread of each goes on beside later tests in the same process, and slows them.
"""

from __future__ import annotations

import weakref
from typing import Any

import laconic as la

_made: weakref.WeakSet[la.Synchronizer] = weakref.WeakSet()


def track_synchronizers() -> None:
    """Remember every synchronizer that is made from now on in this process."""
    original = la.Synchronizer.__init__

    def init(self: la.Synchronizer, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        _made.add(self)

    la.Synchronizer.__init__ = init  # type: ignore[method-assign]


def detach_synchronizers() -> None:
    """Detach all that were made since the last call. No communication."""
    left = list(_made)
    _made.clear()
    for sync in left:
        sync.detach()
