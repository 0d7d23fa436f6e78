"""``laconic compare``: race recipes on an emulated slow network on this machine."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic import NAMES_BY_MODULE
from laconic.cli.options import BETWEEN, FREE, NETWORK, declare, impairments_of
from laconic.cli.streams import print_json
from laconic.errors import check_int

if TYPE_CHECKING:
    from laconic.lab.race.result import Result
    from laconic.lab.race.runner import Event

DEFAULT = (
    "ddp()",
    "local_sgd(12)",
    "slowmo(local_sgd(12), period=24, momentum=0.2)",
    "diloco(48, momentum=0.3)",
)
"""The recipes to compare by default."""


TABLE_WIDTH = 80
"""The least columns of the table. In narrower terminals its lines break, but nothing is lost."""


OPTIONS = (
    "--hosts --per-host --group-size --slow-host --workload --data --rules --peer --free --seed "
    "--repeat --json --open --out"
)


def add(parser: Any) -> None:
    """Add the description and the options of the command."""
    recipes = ", ".join(NAMES_BY_MODULE["laconic.algorithms.recipes"])
    parser.description = (
        "Train the same model under each recipe on hosts connected by a slow network, emulated on "
        "this machine, and show what each recipe costs and gains."
    )
    parser.epilog = (
        f"Recipes: {recipes}. Write them as in Python, such as 'slowmo(local_sgd(12), period=48)'."
    )
    parser.add_argument(
        "recipes", nargs="*", metavar="RECIPE", help=f"default: {', '.join(DEFAULT)}"
    )
    hosts = {"hosts": 4, "per_host": 1}
    declare(parser, OPTIONS, **hosts, workload="text", seed=0, repeat=1, out="laconic-compare")
    network = parser.add_argument_group("network", BETWEEN)
    declare(network, NETWORK, by_host=True, bandwidth="100mbit", **FREE)
    declare(parser.add_mutually_exclusive_group(), "--seconds --steps", seconds="30")


def run(arguments: argparse.Namespace) -> int:
    """Return 0 if every recipe finished, 1 if one failed or diverged."""
    # before a race of minutes
    import matplotlib  # noqa: F401
    import rich  # noqa: F401

    from laconic.lab.emulation.jobs import terminate_as_exit
    from laconic.lab.race import report, runner

    repeat = check_int("repeat", arguments.repeat, 1)
    settings = runner.Settings(
        recipes=tuple(arguments.recipes or DEFAULT),
        rivals=tuple(arguments.peer),
        free=tuple(arguments.free),
        rules=arguments.rules,
        hosts=arguments.hosts,
        per_host=arguments.per_host,
        group_size=arguments.group_size,
        bandwidth=arguments.bandwidth,
        host_bandwidth=arguments.bandwidth_host,
        impairments=impairments_of(arguments),
        slow_hosts=arguments.slow_host,
        workload=arguments.workload,
        data=arguments.data,
        seconds=arguments.seconds if arguments.steps is None else None,
        steps=arguments.steps,
        seeds=tuple(range(arguments.seed, arguments.seed + repeat)),
    )
    settings.check()
    report.prepare(arguments.out)
    command = shlex.join(["laconic", *sys.argv[1:]])
    result = None
    try:
        with terminate_as_exit(), Display(settings) as display:
            for result in runner.run(settings, command, display.watch):
                report.save(result, arguments.out)
    finally:
        if result is not None:
            entrants = 1 + len(settings.names())
            available = sum(row.status != "absent" for row in result.rows[:entrants])
            left = entrants + available * (len(settings.seeds) - 1) - len(result.rows)
            show(result, arguments.out, left, as_json=arguments.json)
    assert result is not None, "a race has at least the row without communication"
    if arguments.open:
        report.show(arguments.out)
    return 0 if all(row.status in ("ok", "absent") for row in result.rows) else 1


def show(result: Result, directory: Path, left: int = 0, *, as_json: bool = False) -> None:
    """Write the report in ``directory``, and print the table, the verdict and the paths, or all of
    it as JSON. ``left`` is how many runs did not start."""
    from rich.console import Console

    from laconic.lab.race import report

    paths = [str(path) for path in report.write(result, directory)]
    if as_json:
        print_json({**report.summary(result), "runs_left": left, "files": paths})
        return
    console = Console()
    Console(width=max(console.width, TABLE_WIDTH)).print(report.table(result))
    if left:
        console.print(f"Interrupted: {left} run{'s' * (left != 1)} did not start.", highlight=False)
    console.print(report.verdict(result), highlight=False, markup=False)
    console.print("Written: " + ", ".join(paths), highlight=False, markup=False)


class Display:
    """Shows a progress bar per row during a race, or prints plain lines if there is no terminal."""

    def __init__(self, settings: Any) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(stderr=True)
        self._live = console.is_terminal
        self._console = console
        self._progress = Progress(
            TextColumn("{task.fields[short]}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[status]}"),
            console=console,
            disable=not self._live,
        )
        from laconic.lab.race.result import NO_COMMUNICATION

        self._tasks = {
            name: self._progress.add_task(
                name, total=None, start=False, status="waiting", short=_short(name)
            )
            for name in (NO_COMMUNICATION, *settings.names())
        }
        self._steps: dict[str, int] = {}

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def watch(self, name: str, event: Event) -> None:
        """Show an event from a row's worker."""
        task = self._tasks[name]
        kind = event["event"]
        if kind in ("launched", "planning"):
            status = {"launched": "starting", "planning": "timing its steps"}[kind]
            self._progress.start_task(task)
            self._progress.update(task, status=status)
        elif kind == "start":
            self._steps[name] = event["steps"]
            self._progress.update(task, total=event["steps"], status="training")
        elif kind == "step":
            self._steps[name] = event["steps"]
            sent = "" if math.isnan(event["sent"]) else f"  {event['sent'] / 1e6:.1f} MB"
            status = (
                f"{event['step']}/{event['steps']}  loss {event['loss']:.2f}  "
                f"{event['pace']:.3g} s/step{sent}"
            )
            self._progress.update(
                task, total=event["steps"], completed=event["step"], status=status
            )
        elif kind == "done":
            self._finish(name, event["row"])

    def _finish(self, name: str, row: Any) -> None:
        loss = "" if row.loss is None else f"loss {row.loss:.3f}  "
        status = row.error or f"{row.steps} steps  {loss}{row.seconds_per_step:.3g} s/step"
        task = self._tasks[name]
        total = self._steps.get(name, 1)
        completed = row.steps if row.status != "failed" else 0
        self._progress.update(task, total=total, completed=completed, status=status)
        if not self._live:
            self._console.print(f"{name}: {row.status}: {status}", highlight=False, markup=False)


def _short(name: str) -> str:
    """Shorten a recipe's name for a terminal of 80 columns."""
    return name if len(name) <= 24 else name[:23] + "…"
