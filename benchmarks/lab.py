"""Check that an emulated network takes as long as physics requires, with plain DDP.

    python -m benchmarks.lab [RATE ...]

DDP sends while it computes, so a step takes between the longer of the two and their sum: at least
max(c, b / r) and at most c + b / r, for c seconds of processor work, b bytes sent and a rate of r.
The work of a step is measured twice: without communication, for the lower bound's c, and with an
unlimited network, on which the processors also copy what is sent, for the upper bound's c.
"""

from __future__ import annotations

import re
import subprocess
import sys

from rich.console import Console
from rich.table import Table

from laconic.units import format_rate, parse_rate

STEPS = 40
TOLERANCE = 0.1


def measure(bandwidth: str) -> tuple[float, float, float]:
    """Return a rank's bytes per step, and seconds per step with and without communication."""
    program = [sys.executable, "examples/ddp.py", str(STEPS)]
    lab = [sys.executable, "-m", "laconic", "lab", "--bandwidth", bandwidth, "--", *program]
    ended = subprocess.run(lab, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(ended.stderr)
    (sent,) = re.findall(r"([\d.]+) MB sent", ended.stdout)
    ((step, alone),) = re.findall(r"([\d.]+) s per step, ([\d.]+) s without", ended.stdout)
    return float(sent) * 1e6, float(step), float(alone)


def main() -> int:
    table = Table(title=f"A step of DDP under laconic lab, in ms, within {TOLERANCE:.0%}")
    for column in ("rate", "bytes / rate", "alone", "unlimited", "min", "max", "measured", ""):
        table.add_column(column, justify="right")
    _, unlimited, _ = measure("unlimited")
    outside = 0
    for rate in map(parse_rate, sys.argv[1:] or ["100mbit", "1gbit"]):
        sent, step, alone = measure(str(rate))
        wire = 8 * sent / rate
        least, most = max(wire, alone), wire + unlimited
        within = (1 - TOLERANCE) * least <= step <= (1 + TOLERANCE) * most
        outside += not within
        figures = [f"{s * 1e3:.1f}" for s in (wire, alone, unlimited, least, most, step)]
        table.add_row(format_rate(rate), *figures, "within" if within else "outside")
    Console(width=100).print(table)
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
