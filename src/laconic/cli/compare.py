"""``laconic compare``: race recipes on an emulated slow network on this machine."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.cli.options import BETWEEN, FREE, NETWORK, declare, network_of
from laconic.cli.progress import Display
from laconic.cli.streams import print_json

if TYPE_CHECKING:
    from laconic.lab.race.result import Result

DEFAULT = (
    "ddp()",
    "local_sgd(12)",
    "slowmo(local_sgd(12), period=24, momentum=0.2)",
    "auto()",
)
"""The recipes to compare by default."""


OPTIONS = (
    "--hosts --per-host --group-size --slow-host --workload --lr-scale --data --rules --peer "
    "--free --seed --repeat --json --out"
)


def add(parser: Any) -> None:
    """Add the description and the options of the command."""
    parser.description = (
        "Train the same model under each recipe on hosts connected by a slow network, emulated on "
        "this machine, and show what each recipe costs and gains."
    )
    parser.epilog = "Write recipes as in Python, such as 'slowmo(local_sgd(12), period=48)'."
    parser.add_argument(
        "recipes", nargs="*", metavar="RECIPE", help=f"default: {', '.join(DEFAULT)}"
    )
    usual: dict[str, Any] = {"hosts": 4, "per_host": 1, "workload": "text", "seed": 0, "repeat": 1}
    declare(parser, OPTIONS, **usual, lr_scale=1.0, out="laconic-compare")
    network = parser.add_argument_group("network", BETWEEN)
    declare(network, NETWORK, by_host=True, bandwidth="100mbit", **FREE)
    declare(parser.add_mutually_exclusive_group(), "--seconds --steps", seconds="30")


def run(arguments: argparse.Namespace) -> int:
    """Return 0 if every recipe finished, 1 if one failed or diverged."""
    # before a race of minutes
    import rich  # noqa: F401

    from laconic.lab.emulation.jobs import terminate_as_exit
    from laconic.lab.race import report, runner
    from laconic.lab.race.result import NO_COMMUNICATION

    settings = runner.Settings(
        recipes=tuple(arguments.recipes or DEFAULT),
        rivals=tuple(arguments.peer),
        free=tuple(arguments.free),
        rules=arguments.rules,
        network=network_of(arguments),
        per_host=arguments.per_host,
        group_size=arguments.group_size,
        slow_hosts=arguments.slow_host,
        workload=arguments.workload,
        lr_scale=arguments.lr_scale,
        data=arguments.data,
        seconds=arguments.seconds if arguments.steps is None else None,
        steps=arguments.steps,
        seeds=tuple(range(arguments.seed, arguments.seed + arguments.repeat)),
    )
    settings.check()
    names = (NO_COMMUNICATION, *settings.names())
    report.prepare(arguments.out)
    command = shlex.join(["laconic", *sys.argv[1:]])
    result = None
    try:
        with terminate_as_exit(), Display(dict.fromkeys(names, ""), arguments.repeat) as display:
            for result in runner.run(settings, command, display.watch):
                report.save(result, arguments.out)
    finally:
        if result is not None:
            show(result, arguments.out, as_json=arguments.json)
    assert result is not None, "a race has at least the row without communication"
    return 0 if all(row.status in ("ok", "absent") for row in result.rows) else 1


def show(result: Result, directory: Path, *, as_json: bool = False) -> None:
    """Write the report in ``directory``, and print the table, the verdict and the paths, or all of
    it as JSON."""
    from rich.console import Console
    from rich.measure import Measurement

    from laconic.lab.race import report

    paths = [str(path) for path in report.write(result, directory)]
    if as_json:
        print_json({**report.summary(result), "files": paths})
        return
    console, table = Console(), report.table(result)
    wide = console.options.update(width=1000)
    least = Measurement.get(console, wide, table).minimum  # without what separates columns
    # in narrower terminals lines break, but nothing is lost
    Console(width=max(console.width, least + len(table.columns))).print(table)
    console.print(report.verdict(result), highlight=False, markup=False)
    console.print("Written: " + ", ".join(paths), highlight=False, markup=False)
