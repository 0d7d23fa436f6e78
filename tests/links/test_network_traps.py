"""Lost ranks and strangers in whole runs, which benchmarks/traps reproduces on earlier versions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from benchmarks.traps import network, strangers


@pytest.mark.parametrize(
    "trap",
    [
        network.killed_with_data_loader,
        network.hung_rank,
        network.absent_from_attach,
        strangers.stranger_with_a_verdict,
        strangers.idle_strangers,
        network.ended_in_order,
    ],
)
def test_a_trap_that_is_closed(trap: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the time-outs of 30, 25 and 20 s, where those would end the waiting."""
    for name, seconds in {"KILLED": 25.0, "HUNG": 100.0, "ABSENT": 20.0, "ENDED": 100.0}.items():
        monkeypatch.setattr(network, name, seconds)
    monkeypatch.setattr(strangers, "ATTACH", 19.0)
    assert trap(), "what was measured, or it raises Trapped"
