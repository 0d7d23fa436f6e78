"""A host that nothing reaches any more, on an emulated network."""

from __future__ import annotations

import pytest
from benchmarks.traps import network


def test_an_isolated_host_is_named_long_before_the_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "ISOLATED", 50.0)  # of 60, and usually 10
    assert network.isolated_host().startswith("after ")
