"""``laconic doctor``: what could keep a training, or the lab, from working, and what to do."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laconic.lab.doctor.host_checks import Finding, Level
    from laconic.lab.doctor.network_checks import Place

WIDTH = 80
COLOURS = {"ok": "32", "warning": "33", "problem": "31"}


def add(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "doctor",
        help="check this host, and the way to the others",
        description="Check torch, network, machine and kernel, and say what to do about each "
        "finding. Run on every host at about the same time, under torchrun or with --master, "
        "--rank and --world, it also checks who reaches whom, clocks, versions and speed.",
    )
    parser.add_argument("--master", metavar="HOST:PORT", help="of rank 0; any free port there")
    parser.add_argument("--rank", type=int, help="this host's number, from 0")
    parser.add_argument("--world", type=int, metavar="N", help="how many hosts there are")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds to wait for the others (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0 where there is no problem, 1 where there is one."""
    from laconic.errors import check_float
    from laconic.lab.doctor import host_checks, network_checks

    check_float("timeout", arguments.timeout, 0.0, strict=True)
    place = _place(arguments)
    if place is not None and arguments.master is None and os.environ.get("LOCAL_RANK", "0") != "0":
        return 0  # the first process of a host speaks for it
    findings = host_checks.examine()
    numbers: dict[str, Any] = {}
    if place is not None and place.world > 1:
        if not arguments.json:
            print(f"meeting {place.world - 1} other host(s) ...", file=sys.stderr, flush=True)
        met = network_checks.meet(place, findings, timeout=arguments.timeout)
        findings += met.findings
        numbers = met.numbers()
    if arguments.json:
        print(json.dumps({"findings": [asdict(f) for f in findings], **numbers}, indent=2))
    else:
        for line in report(findings, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ):
            print(line)
    return 1 if any(finding.level == "problem" for finding in findings) else 0


def _place(arguments: argparse.Namespace) -> Place | None:
    from laconic.lab.doctor.network_checks import Place, place_of

    given = (arguments.master, arguments.rank, arguments.world)
    if given == (None, None, None):
        return place_of(os.environ) if "RANK" in os.environ else None
    if None in given:
        raise ValueError("--master, --rank and --world belong together: give all three")
    host, colon, port = arguments.master.rpartition(":")
    if not colon or not port.isdecimal():
        raise ValueError(f"--master must be HOST:PORT, like 10.0.0.1:29500, not {given[0]!r}")
    return Place(arguments.rank, arguments.world, host.strip("[]"), int(port))


def report(findings: Iterable[Finding], *, colour: bool = False) -> list[str]:
    """The findings in lines of at most 80 columns, by group, worst first within each."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.group, []).append(finding)
    lines = []
    order: tuple[Level, ...] = ("problem", "warning", "ok")
    for group, found in groups.items():
        lines.append(group)
        for finding in sorted(found, key=lambda f: order.index(f.level)):
            mark = f"{finding.level:8}"
            if colour:
                mark = f"\033[{COLOURS[finding.level]}m{mark}\033[0m"
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
