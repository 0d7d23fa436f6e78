"""Let traps run on earlier sources of laconic, whose modules had other places."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types

MOVED = {
    "laconic.algorithms.parse": "laconic.parse",
    "laconic.algorithms.round": "laconic.round",
    "laconic.lab.emulation.join": "laconic.lab.cluster",
    "laconic.links.comm_thread": "laconic.lane",
}
"""Modules that traps import, and where they were."""


def provide() -> None:
    """Make the modules of today importable, if this is an earlier source."""
    if importlib.util.find_spec("laconic.algorithms") is not None:
        return
    for today, before in MOVED.items():
        module = importlib.import_module(before)
        sys.modules[today] = module
        parent = today.rpartition(".")[0]
        sys.modules.setdefault(parent, types.ModuleType(parent))
    thread = sys.modules["laconic.links.comm_thread"]
    vars(thread).setdefault("CommThread", vars(thread).get("Lane"))
