"""Format the values and settings of a race as text."""

from __future__ import annotations

import math
from collections.abc import Callable
from textwrap import shorten

from laconic.lab.emulation.network import Network
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
    settings, per_host = result.settings, number(result, "per_host") or 1
    parts = [str(Network.of(settings))] if "hosts" in settings else []
    parts.append(f"{per_host:.0f} processes per host" if per_host > 1 else "")
    size = number(result, "group_size")
    parts.append(f"groups of {size:.0f}" if size else "")
    slow = settings.get("slow_hosts")
    for host, factor in slow.items() if isinstance(slow, dict) else ():
        parts.append(f"host{host} computes {short(factor)} times as long")
    if result.settings.get("network") == "throttled":
        parts.append("throttled link: this system does not allow network namespaces")
    elif result.settings.get("network") == "emulated":
        parts.append("emulated with network namespaces")
    return ", ".join(part for part in parts if part)


def task(result: Result) -> str:
    """Describe the workload: name, data, parameters, length of each run, seeds."""
    parts = []
    workload, data = result.settings.get("workload"), result.settings.get("data")
    if workload is not None:
        parts.append(f"workload {workload}" + (f" ({data})" if data else ""))
    scale = number(result, "lr_scale") or 1.0
    parts.append(f"learning rates times {short(scale)}" if scale != 1 else "")
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
