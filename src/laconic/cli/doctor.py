"""``laconic doctor``: check whether training and the lab can run here, and say what to do."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from laconic.cli.options import declare, given
from laconic.cli.streams import print_json

if TYPE_CHECKING:
    from laconic.lab.doctor.finding import Finding, Level
    from laconic.lab.doctor.network_checks import Rendezvous
    from laconic.lab.doctor.outlook import Task

WIDTH = 80
COLORS = {"ok": "32", "warning": "33", "problem": "31"}


OPTIONS = "--master --rank --hosts --timeout --params --step-time --json"


def add(parser: Any) -> None:
    """Add the description and the options of the command."""
    parser.description = (
        "Check torch, the network, the machine and the kernel, and say what to do about each "
        "problem. Run it on every host at about the same time, under torchrun or with --master, "
        "--rank and --hosts, to also check connections, clocks, versions and speed between hosts, "
        "and to see which recipe auto() would choose."
    )
    declare(parser, OPTIONS, timeout="60s")


def run(arguments: argparse.Namespace) -> int:
    """Return 0 if there is no problem, else 1."""
    from laconic.errors import check_float
    from laconic.lab.doctor import host_checks, network_checks

    timeout = check_float("timeout", arguments.timeout, 0.0, strict=True)
    rendezvous, task = _rendezvous(arguments), _task(arguments)
    if given(arguments, "--timeout") and (rendezvous is None or rendezvous.world == 1):
        raise ValueError("--timeout is for several hosts: give --master, --rank and --hosts, too")
    if task is not None and (rendezvous is None or rendezvous.world == 1):
        raise ValueError(
            "--params and --step-time are for several hosts, whose network is measured: use "
            "torchrun, or --master, --rank and --hosts"
        )
    under_torchrun = rendezvous is not None and arguments.master is None
    if under_torchrun and os.environ.get("LOCAL_RANK", "0") != "0":
        return 0  # only the first process of each host runs the checks
    findings = host_checks.examine()
    numbers: dict[str, Any] = {}
    if rendezvous is not None and rendezvous.world > 1:
        if not arguments.json:
            others = rendezvous.world - 1
            print(f"waiting for {others} other host(s) ...", file=sys.stderr, flush=True)
        network = network_checks.check_network(rendezvous, findings, timeout=timeout, task=task)
        findings += network.findings
        numbers = network.numbers()
    if arguments.json:
        print_json({"findings": [asdict(f) for f in findings], **numbers})
    else:
        for line in report(findings, color=sys.stdout.isatty() and "NO_COLOR" not in os.environ):
            print(line)
    return 1 if any(finding.level == "problem" for finding in findings) else 0


def _rendezvous(arguments: argparse.Namespace) -> Rendezvous | None:
    from laconic.lab.doctor.network_checks import Rendezvous, rendezvous_of

    options = (arguments.master, arguments.rank, arguments.hosts)
    if options == (None, None, None):
        return rendezvous_of(os.environ) if "RANK" in os.environ else None
    if None in options:
        raise ValueError("--master, --rank and --hosts belong together: give all three")
    return Rendezvous(arguments.rank, arguments.hosts, *arguments.master)


def _task(arguments: argparse.Namespace) -> Task | None:
    """Return the model that the user states, if any."""
    from laconic.lab.doctor.outlook import Task

    if (arguments.params is None) != (arguments.step_time is None):
        raise ValueError("--params and --step-time belong together: give both")
    if arguments.params is None:
        return None
    return Task(arguments.params, arguments.step_time)


def report(findings: Iterable[Finding], *, color: bool = False) -> list[str]:
    """Return lines of at most 80 columns with the findings by group, the worst first in each."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.group, []).append(finding)
    lines = []
    order: tuple[Level, ...] = ("problem", "warning", "ok")
    for group, found in groups.items():
        lines.append(group)
        for finding in sorted(found, key=lambda f: order.index(f.level)):
            mark = f"{finding.level:8}"
            if color:
                mark = f"\033[{COLORS[finding.level]}m{mark}\033[0m"
            first, *rest = textwrap.wrap(finding.text, WIDTH - 11)
            lines.append(f"  {mark} {first}")
            lines += [" " * 11 + line for line in rest]
            if finding.remedy:
                remedy = textwrap.wrap(f"-> {finding.remedy}", WIDTH - 11, subsequent_indent="   ")
                lines += [" " * 11 + line for line in remedy]
    levels = [finding.level for found in groups.values() for finding in found]
    counts = {level: levels.count(level) for level in order}
    lines.append(", ".join(f"{n} {_plural(level, n)}" for level, n in counts.items()))
    return lines


def _plural(level: str, count: int) -> str:
    return level if level == "ok" or count == 1 else f"{level}s"
