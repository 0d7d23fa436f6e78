"""Sockets that a forked child must not keep.

A child of `os.fork`, such as a worker of torch's DataLoader, inherits every open socket. A
connection ends only when its last copy is closed, so the other ranks would not notice that this
process was killed as long as one of its children lives. The child closes its copies at once.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class Closable(Protocol):
    """An object that has file descriptors. Once it has closed them, closing it again does
    nothing."""

    def close(self) -> None:
        """Close the descriptors. Closing again does nothing."""


guard = threading.RLock()
"""To be locked from the opening of a socket until `close_in_child` knows it, so that no fork
happens in between. No blocking call may run under it."""
_held: weakref.WeakValueDictionary[int, Closable] = weakref.WeakValueDictionary()


def close_in_child(thing: Closable) -> None:
    """Have every child that is forked from now on close its copy of ``thing``."""
    _held[id(thing)] = thing


def _in_child() -> None:
    for thing in list(_held.values()):
        thing.close()  # the parent's own stays open
    _held.clear()
    guard.release()


os.register_at_fork(before=guard.acquire, after_in_parent=guard.release, after_in_child=_in_child)
