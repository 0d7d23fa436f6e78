"""Check the cost model against emulated networks; the figures of docs/validation.md.

    python -m benchmarks.validate [--quick] [--hosts N ...] [--rates RATE ...] [--per-host N ...]
    python -m benchmarks.validate --table

The first runs one launch for each network and appends it to the journal once it is finished; what
is in it is not run again, so that a validation that was killed goes on with the same command. Then,
or with --table at once, it writes the tables and the picture. Exit code 1 where a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks.validate import journal, page
from benchmarks.validate.journal import Launch, Timed
from benchmarks.validate.rows import HOSTS, QUICK, RATES, ROWS, Network
from benchmarks.validate.worker import STEPS, Job
from laconic.advisor import cluster
from laconic.advisor.worker import Spec, facts_of
from laconic.lab.emulation.cluster import Cluster, check_hosts, check_rate
from laconic.lab.emulation.jobs import terminate_as_exit
from laconic.lab.race import runner
from laconic.units import format_rate, parse_rate

HERE = Path(__file__).resolve().parents[2]
JOURNAL = Path("laconic-validate", "journal.jsonl")
LONGEST = 1800.0
"""Seconds after which a launch that has not ended has failed."""


class Parser(argparse.ArgumentParser):
    """One whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> Parser:
    made = Parser(prog="benchmarks.validate", description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--quick", action="store_true", help=f"one network: {told(QUICK)}")
    made.add_argument("--hosts", nargs="+", type=int, default=list(HOSTS))
    made.add_argument("--rates", nargs="+", metavar="RATE", default=[str(r) for r in RATES])
    made.add_argument("--per-host", nargs="+", type=int, default=[1], help="processes (1)")
    made.add_argument("--seconds", type=float, default=200, help="of each network (%(default)g)")
    made.add_argument("--table", action="store_true", help="run nothing")
    made.add_argument("--again", action="store_true", help="also what the journal has")
    made.add_argument("--journal", type=Path, metavar="FILE", default=JOURNAL)
    made.add_argument("--page", type=Path, metavar="FILE", default=HERE / "docs" / "validation.md")
    return made


def told(network: Network) -> str:
    each = f" of {network.per_host} processes" if network.per_host > 1 else ""
    return f"{network.hosts} hosts{each}, {format_rate(network.rate)}"


def asked(options: Any) -> list[Network]:
    """Raises ``ValueError`` for what cannot be."""
    if options.quick:
        return [QUICK]
    rates = [parse_rate(text) for text in options.rates]
    for hosts in options.hosts:
        check_hosts(hosts)
        if hosts < 2:
            raise ValueError("hosts must be at least 2: one has nobody to talk to")
    for rate in rates:
        check_rate(rate)
    if min(options.per_host) < 1 or not 1 <= options.seconds < 1000:
        raise ValueError("per-host must be at least 1, and seconds from 1 to 1000")
    return [
        Network(per_host, hosts, rate)
        for per_host in options.per_host
        for hosts in options.hosts
        for rate in rates
    ]


def shared(seconds: float) -> dict[str, object]:
    """What launches must have in common to stand in one table."""
    machine = runner.machine()
    return {
        "workload": "text",
        "rows": list(ROWS),
        "seconds": seconds,
        "processor": machine["processor"],
        "cores": machine["cores"],
        "torch": str(torch.__version__),
    }


def launch(network: Network, common: dict[str, object], seconds: float) -> Launch:
    """One launch: the facts, and all rows."""
    spec = Spec("text", None, [], STEPS, 0, None, 0.0, cluster.TIMEOUT)
    told = json.dumps([asdict(spec), asdict(Job(list(ROWS), seconds))])
    with Cluster(network.hosts, bandwidth=network.rate) as hosts:
        argv = ["-m", "benchmarks.validate.worker", told]
        lines = cluster.output_lines(hosts, argv, network.per_host, LONGEST)
    first, *rest = map(json.loads, lines)
    rows = tuple(Timed(**{n: event["row"][n] for n in Timed.__annotations__}) for event in rest)
    return Launch(common, network, facts_of(first["measured"]["facts"]), rows)


def run(options: Any) -> int:
    """0 where all bounds are kept, 1 where one is missed."""
    todo, common = asked(options), shared(options.seconds)
    if not options.table:
        with terminate_as_exit(), journal.opened(options.journal) as file:
            kept = {entry.network for entry in mine(options.journal, common)}
            missing = [n for n in todo if options.again or n not in kept]
            print(f"{len(todo)} networks, {len(missing)} to do", flush=True)
            for number, network in enumerate(missing, 1):
                start = time.monotonic()
                print(f"{number}/{len(missing)} {told(network)}: ", end="", flush=True)
                found = launch(network, common, options.seconds)
                journal.append(file, found)
                errors = [abs(found.error(row)) for row in found.rows]
                print(
                    f"error {statistics.median(errors):.1%}, at most {max(errors):.1%}; "
                    f"{time.monotonic() - start:.0f} s",
                    flush=True,
                )
    launches = mine(options.journal, common)
    if not launches:
        raise ValueError(f"there are no launches with these settings in {options.journal}")
    paths = page.write(options.page, launches)
    single = [entry for entry in launches if entry.network.per_host == 1] or launches
    print(*page.verdict(single), sep="\n")
    print("written: " + ", ".join(map(str, paths)))
    return 0 if page.kept(single) else 1


def mine(path: Path, common: dict[str, object]) -> list[Launch]:
    """The journal's launches with these settings."""
    return [e for e in journal.load(path) if journal.key(e.shared) == journal.key(common)]


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(parser().parse_args(argv))
    except (ValueError, ImportError, OSError) as error:
        print(f"benchmarks.validate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nbenchmarks.validate: interrupted; the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
