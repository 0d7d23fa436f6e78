"""Check the cost model against emulated networks; the figures of docs/validation.md.

    python -m benchmarks.validate [--quick] [--hosts N ...] [--rates RATE ...] [--per-host N ...]
    python -m benchmarks.validate --table

The first form runs one launch per network and appends it to the journal when it has finished.
Launches in the journal are not repeated, so an interrupted validation resumes with the same
command. Afterward, or immediately with --table, it writes the tables and the plot. With --table,
they are of the launches with the settings of the journal's last one, from whatever machine. The
exit code is 1 if a bound is missed.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.study import DOCS, Journal, Parser, command, machine
from benchmarks.validate import page
from benchmarks.validate.launches import Launch, Timed, facts_of, journal
from benchmarks.validate.rows import HOSTS, QUICK, RATES, ROWS, Network
from laconic.lab.emulation.cluster import Cluster
from laconic.lab.emulation.cluster import launch as launch_on
from laconic.lab.emulation.jobs import terminate_as_exit
from laconic.lab.emulation.network import Network as LabNetwork
from laconic.units import format_rate, parse_rate

JOURNAL = Path("laconic-validate", "journal.jsonl")
LONGEST = 1800.0
"""A launch that takes more seconds has failed."""


def parser() -> Parser:
    made = Parser(prog="benchmarks.validate", description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--quick", action="store_true", help=f"one network: {network_text(QUICK)}")
    made.add_argument("--hosts", nargs="+", type=int, default=list(HOSTS))
    made.add_argument("--rates", nargs="+", metavar="RATE", default=[str(r) for r in RATES])
    made.add_argument("--per-host", nargs="+", type=int, default=[1], help="processes per host (1)")
    made.add_argument("--seconds", type=float, default=200, help="per network (%(default)g)")
    made.add_argument("--table", action="store_true", help="write the tables without running")
    made.add_argument("--again", action="store_true", help="repeat launches in the journal")
    made.add_argument("--journal", type=Path, metavar="FILE", default=JOURNAL)
    made.add_argument("--page", type=Path, metavar="FILE", default=DOCS / "validation.md")
    return made


def network_text(network: Network) -> str:
    each = f" of {network.per_host} processes" if network.per_host > 1 else ""
    return f"{network.hosts} hosts{each}, {format_rate(network.rate)}"


def networks_from(options: Any) -> list[Network]:
    """Return the networks to run. Raises ``ValueError`` for bad options."""
    if options.quick:
        return [QUICK]
    rates = [parse_rate(text) for text in options.rates]
    for hosts in options.hosts:
        for rate in rates:
            LabNetwork(hosts, rate).check()
        if hosts < 2:
            raise ValueError("hosts must be at least 2: one host cannot communicate")
    if min(options.per_host) < 1 or not 1 <= options.seconds < 1000:
        raise ValueError("per-host must be at least 1, and seconds from 1 to 1000")
    return [
        Network(per_host, hosts, rate)
        for per_host in options.per_host
        for hosts in options.hosts
        for rate in rates
    ]


def shared(seconds: float) -> dict[str, object]:
    """Return the settings that all launches of a table must share."""
    return {"workload": "text", "rows": list(ROWS), "seconds": seconds, **machine()}


def launch(network: Network, common: dict[str, object], seconds: float) -> Launch:
    """Run one launch: measure the facts, and time all rows."""
    argv = [sys.executable, "-m", "benchmarks.validate.worker", json.dumps([list(ROWS), seconds])]
    with Cluster(LabNetwork(network.hosts, network.rate)) as hosts:
        job = launch_on(hosts, argv, per_host=network.per_host)
        for outcome in job.wait(LONGEST):
            if outcome.failed:
                raise SystemExit(f"{outcome}\n{outcome.stderr}")
        lines = [line for line in job.stdout(0).splitlines() if line.startswith("{")]
    first, *rest = map(json.loads, lines)
    rows = tuple(Timed(**{n: event["row"][n] for n in Timed.__annotations__}) for event in rest)
    return Launch(common, network, facts_of(first["measured"]["facts"]), rows)


def run(options: Any) -> int:
    """Return 0 if all bounds are met, else 1."""
    todo, common = networks_from(options), shared(options.seconds)
    known = journal(options.journal)
    if not options.table:
        with terminate_as_exit(), known.opened() as append:
            done = {entry.network for entry in matching(known, common)}
            missing = [n for n in todo if options.again or n not in done]
            print(f"{len(todo)} networks, {len(missing)} to run", flush=True)
            for number, network in enumerate(missing, 1):
                start = time.monotonic()
                print(f"{number}/{len(missing)} {network_text(network)}: ", end="", flush=True)
                result = launch(network, common, options.seconds)
                append(result)
                errors = [abs(result.error(row)) for row in result.rows]
                print(
                    f"error {statistics.median(errors):.1%}, at most {max(errors):.1%}; "
                    f"{time.monotonic() - start:.0f} s",
                    flush=True,
                )
    elif ran := known.load():
        common = dict(ran[-1].shared)
    launches = matching(known, common)
    if not launches:
        raise ValueError(f"no launches with these settings in {options.journal}")
    paths = page.write(options.page, launches)
    single = [entry for entry in launches if entry.network.per_host == 1] or launches
    print(page.verdict(single))
    print("written: " + ", ".join(map(str, paths)))
    return 0 if page.bounds_met(single) else 1


def matching(known: Journal[Launch], common: dict[str, object]) -> list[Launch]:
    """Return the journal's launches with these settings."""
    return [launch for launch in known.load() if launch.shared == common]


def main(argv: Sequence[str] | None = None) -> int:
    return command("benchmarks.validate", lambda: run(parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
