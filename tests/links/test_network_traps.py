"""Lost ranks and strangers in whole runs, which benchmarks/traps reproduces on earlier versions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from benchmarks.traps import network


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "trap",
    [
        network.killed_with_data_loader,
        network.hung_rank,
        network.absent_from_attach,
        network.stranger_with_a_verdict,
        network.idle_strangers,
        network.ended_in_order,
    ],
)
def test_a_trap_that_is_closed(trap: Callable[[], str]) -> None:
    trap()
