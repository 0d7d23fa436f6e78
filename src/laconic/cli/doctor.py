"""``laconic doctor``: check whether training and the lab can run here, and say what to do."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from laconic.cli.options import declare, given
from laconic.cli.streams import print_json

if TYPE_CHECKING:
    from laconic.lab.doctor.finding import Finding
    from laconic.lab.doctor.network_checks import Rendezvous

WIDTH = 80
LEVELS = ("problem", "warning", "ok")


OPTIONS = "--master --rank --hosts --timeout --json"


def add(parser: Any) -> None:
    """Add the description and the options of the command."""
    parser.description = (
        "Check torch, the network, the machine and the kernel, and say what to do about each "
        "problem. Run it on every host at about the same time, under torchrun or with --master, "
        "--rank and --hosts, to also check versions, connections and speed between hosts, "
        "and for the command that predicts which recipe pays on this network."
    )
    declare(parser, OPTIONS, timeout="60s")


def run(arguments: argparse.Namespace) -> int:
    """Return 0 if there is no problem, else 1."""
    from laconic.errors import check_float
    from laconic.lab.doctor import host_checks, network_checks

    timeout = check_float("timeout", arguments.timeout, 0.0, strict=True)
    rendezvous = _rendezvous(arguments)
    if given(arguments, "--timeout") and (rendezvous is None or rendezvous.world == 1):
        raise ValueError("--timeout is for several hosts: give --master, --rank and --hosts, too")
    under_torchrun = rendezvous is not None and arguments.master is None
    if under_torchrun and os.environ.get("LOCAL_RANK", "0") != "0":
        return 0  # only the first process of each host runs the checks
    findings = host_checks.examine()
    numbers: dict[str, Any] = {}
    if rendezvous is not None and rendezvous.world > 1:
        if not arguments.json:
            others = rendezvous.world - 1
            print(f"waiting for {others} other host(s) ...", file=sys.stderr, flush=True)
        network = network_checks.check_network(rendezvous, findings, timeout=timeout)
        findings += network.findings
        numbers = network.numbers
    if arguments.json:
        print_json({"findings": [asdict(f) for f in findings], **numbers})
    else:
        print("\n".join(report(findings)))
    return 1 if any(finding.level == "problem" for finding in findings) else 0


def _rendezvous(arguments: argparse.Namespace) -> Rendezvous | None:
    from laconic.lab.doctor.network_checks import Rendezvous, rendezvous_of

    options = (arguments.master, arguments.rank, arguments.hosts)
    if options == (None, None, None):
        return rendezvous_of(os.environ) if "RANK" in os.environ else None
    if None in options:
        raise ValueError("--master, --rank and --hosts belong together: give all three")
    return Rendezvous(arguments.rank, arguments.hosts, *arguments.master)


def report(findings: Sequence[Finding]) -> list[str]:
    """Return lines of at most 80 columns with the findings by group, the worst first in each."""
    lines = []
    for group in dict.fromkeys(finding.group for finding in findings):
        lines.append(group)
        found = [finding for finding in findings if finding.group == group]
        for finding in sorted(found, key=lambda finding: LEVELS.index(finding.level)):
            mark, space = f"  {finding.level:8} ", " " * 11
            lines += textwrap.wrap(
                finding.text, WIDTH, initial_indent=mark, subsequent_indent=space
            )
            remedy = f"-> {finding.remedy}" if finding.remedy else ""
            more = f"{space}   "
            lines += textwrap.wrap(remedy, WIDTH, initial_indent=space, subsequent_indent=more)
    counts = [sum(finding.level == level for finding in findings) for level in LEVELS]
    named = zip(counts, LEVELS, strict=True)
    return [
        *lines,
        ", ".join(f"{n} {level}{'s' * (n != 1 and level != 'ok')}" for n, level in named),
    ]
