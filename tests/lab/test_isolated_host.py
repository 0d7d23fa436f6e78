"""A host that nothing reaches any more, on an emulated network."""

from __future__ import annotations

from benchmarks.traps import network


def test_an_isolated_host_is_named_long_before_the_time_out() -> None:
    assert network.isolated_host().startswith("after ")
