"""Does an emulated network take the time that physics says? Plain DDP, which knows nothing of it.

    python -m benchmarks.lab [RATE ...]

DDP sends while it computes, so a step lies between the longer of the two and their sum: at least
max(c, b / r), at most c + b / r, for c seconds of computing, b bytes sent and a rate of r.
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


def measure(rate: float) -> tuple[float, float, float]:
    """Bytes that a rank sends in a step, seconds of a step, and those without communication."""
    program = [sys.executable, "examples/ddp.py", str(STEPS)]
    lab = [sys.executable, "-m", "laconic", "lab", "--bandwidth", str(rate), "--", *program]
    said = subprocess.run(lab, stdout=subprocess.PIPE, text=True, check=True).stdout
    (sent,) = re.findall(r"([\d.]+) MB sent", said)
    ((step, alone),) = re.findall(r"([\d.]+) s per step, ([\d.]+) s without", said)
    return float(sent) * 1e6, float(step), float(alone)


def main() -> int:
    table = Table(title=f"A step of DDP under laconic lab, within {TOLERANCE:.0%} of what it must")
    for column in ("rate", "bytes / rate", "computing", "at least", "at most", "a step", ""):
        table.add_column(column, justify="right")
    outside = 0
    for rate in map(parse_rate, sys.argv[1:] or ["100mbit", "1gbit"]):
        sent, step, alone = measure(rate)
        wire = 8 * sent / rate
        least, most = max(wire, alone), wire + alone
        within = (1 - TOLERANCE) * least <= step <= (1 + TOLERANCE) * most
        outside += not within
        figures = [f"{seconds * 1e3:.1f} ms" for seconds in (wire, alone, least, most, step)]
        table.add_row(format_rate(rate), *figures, "within" if within else "outside")
    Console().print(table)
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
