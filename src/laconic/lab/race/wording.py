"""Format the values and settings of a race as text."""

from __future__ import annotations

import math
from collections.abc import Callable
from textwrap import shorten

from laconic.lab.emulation.impairments import described
from laconic.lab.race.comparison import losses
from laconic.lab.race.result import SECONDS, STEPS, Result, Row, number
from laconic.units import format_rate
from laconic.units import three_digits as short


def three_digits(value: float | None) -> str:
    """Format ``value`` with three significant digits, zeros included, or as a dash if missing."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 6)}f}"


def loss_format(result: Result) -> Callable[[float | None], str]:
    """Return a formatter with as many decimals as the smallest loss of this result needs."""
    every = [loss for axis in (SECONDS, STEPS) for loss in losses(result, axis).values()]
    smallest = min(every, default=1.0)
    decimals = 2 if smallest >= 1 else 3 if smallest >= 0.1 else 4
    return lambda loss: "–" if loss is None else f"{loss:.{decimals}f}"


def bandwidth(result: Result) -> str:
    """Return the bandwidth, such as "100 Mbit/s", or "" if the network has no limit."""
    bits = number(result, "bandwidth")
    return format_rate(bits) if bits and math.isfinite(bits) else ""


def network(result: Result) -> str:
    """Describe the network: hosts, rates, impairments, and whether it is emulated or throttled."""
    parts = []
    hosts, per_host = number(result, "hosts"), number(result, "per_host")
    if hosts is not None:
        plural = "es" * (per_host != 1)
        processes = f" × {per_host:.0f} process{plural}" if per_host is not None else ""
        parts.append(f"{hosts:.0f} host{'s' * (hosts != 1)}{processes}")
    size = number(result, "group_size")
    parts.append(f"groups of {size:.0f}" if size else "")
    parts.append(bandwidth(result))
    for host, bits in _by_host(result, "host_bandwidth"):
        parts.append(f"host {host}: {format_rate(bits)}")
    for host, factor in _by_host(result, "slow_hosts"):
        parts.append(f"host {host} computes {short(factor)} times as long")
    for name in ("latency", "jitter", "loss"):
        value = number(result, name)
        parts.append(described(name, value) if value else "")
        for host, single in _by_host(result, f"host_{name}"):
            parts.append(f"host {host}: {described(name, single)}")
    if result.settings.get("network") == "throttled":
        parts.append("throttled link: this system does not allow network namespaces")
    elif result.settings.get("network") == "emulated":
        parts.append("emulated with network namespaces")
    return ", ".join(part for part in parts if part)


def _by_host(result: Result, key: str) -> list[tuple[str, float]]:
    """Return a setting of single hosts, by host."""
    values = result.settings.get(key)
    items = values.items() if isinstance(values, dict) else ()
    return sorted(items, key=lambda item: int(item[0]))


def task(result: Result) -> str:
    """Describe the workload: name, data, parameters, length of each run, seeds."""
    parts = []
    workload, data = result.settings.get("workload"), result.settings.get("data")
    if workload is not None:
        parts.append(f"workload {workload}" + (f" ({data})" if data else ""))
    parameters, seconds = number(result, "parameters"), number(result, "seconds")
    parts.append(f"{parameters:,.0f} parameters" if parameters else "")
    steps = number(result, "steps")
    if seconds:
        parts.append(f"{short(seconds)} s per recipe")
    elif steps:
        parts.append(f"{steps:,.0f} steps per recipe")
    seeds = list(dict.fromkeys(row.seed for row in result.rows))
    runs = "one run each, seed" if len(seeds) < 2 else f"{len(seeds)} runs each, seeds"
    parts.append(f"{runs} {', '.join(map(str, seeds))}" if seeds else "")
    return ", ".join(part for part in parts if part)


def reason(row: Row) -> str:
    """Return why a row has no result, in one line: "diverged: ...". "" if it finished."""
    if row.status == "ok":
        return ""
    lines = (row.error or "").strip().splitlines()
    return row.status + (f": {shorten(lines[0], 160, placeholder=' …')}" if lines else "")
