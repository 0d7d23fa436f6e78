"""``laconic compare``: race recipes on a slow network, on this machine."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.algorithms.recipes import RECIPES
from laconic.errors import check_int, install
from laconic.units import parse_duration, parse_rate

if TYPE_CHECKING:
    from laconic.lab.race.result import Result
    from laconic.lab.race.runner import Event

DEFAULT = (
    "ddp()",
    "local_sgd(12)",
    "slowmo(local_sgd(12), period=24, momentum=0.2)",
    "diloco(48, momentum=0.3)",
)
"""What is compared when no recipe is named."""


def add(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "compare",
        help="race recipes on an emulated slow network",
        description="Train the same model under each recipe on hosts joined by a slow network, "
        "emulated on this machine, and show what each costs and gains.",
        epilog=f"Recipes: {', '.join(RECIPES)}; written as in Python, such as "
        "'slowmo(local_sgd(12), period=48)'.",
    )
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"default: {DEFAULT}")
    parser.add_argument("--hosts", type=int, default=4, help="default: %(default)s")
    parser.add_argument(
        "--per-host", type=int, default=1, help="processes on each, each a worker (%(default)s)"
    )
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="workers that make up a group, for recipes such as hierarchical",
    )
    parser.add_argument(
        "--bandwidth", default="100mbit", help="of each host, such as 20mbit (%(default)s)"
    )
    parser.add_argument(
        "--bandwidth-host",
        action="append",
        default=[],
        metavar="HOST=RATE",
        help="of one host, such as 2=10mbit; may be given for several",
    )
    parser.add_argument(
        "--slow-host",
        action="append",
        default=[],
        metavar="HOST=FACTOR",
        help="have one host compute more slowly, such as 2=1.5; may be given for several",
    )
    parser.add_argument("--latency", default="0", help="added to each message, such as 20ms")
    parser.add_argument(
        "--workload", default="text", help="digits, text, or your own: my.py:make (%(default)s)"
    )
    parser.add_argument("--data", metavar="FILE", help="what the text workload, or yours, learns")
    parser.add_argument("--rules", metavar="FILE", help="recipes of your own, such as my_rules.py")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="PEER",
        help="another library beside the recipes, such as torch-ddp; may be given for several",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, help="training time of each recipe (30)")
    length.add_argument("--steps", type=int, help="steps of each recipe, in place of seconds")
    parser.add_argument("--seed", type=int, help="default: 0")
    parser.add_argument(
        "--repeat", metavar="SEEDS", help="runs of each: a number of them, or seeds such as 3,7,11"
    )
    parser.add_argument("--open", action="store_true", help="show the report in a browser")
    parser.add_argument("--out", type=Path, default=Path("laconic-compare"), metavar="DIR")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0 when every recipe finished; 1 when one failed or diverged."""
    needs("compare")
    from laconic.lab.emulation.jobs import terminate_as_exit
    from laconic.lab.race import report, runner

    seconds = arguments.seconds
    if seconds is None and arguments.steps is None:
        seconds = 30.0
    settings = runner.Settings(
        recipes=tuple(arguments.recipes or DEFAULT),
        peers=tuple(arguments.peer),
        rules=arguments.rules and str(Path(arguments.rules)),
        hosts=arguments.hosts,
        per_host=arguments.per_host,
        group_size=arguments.group_size,
        bandwidth=parse_rate(arguments.bandwidth),
        host_bandwidth=_per_host("bandwidth-host", arguments.bandwidth_host, parse_rate),
        latency=parse_duration(arguments.latency),
        slow_hosts=_per_host("slow-host", arguments.slow_host, _factor),
        workload=arguments.workload,
        data=arguments.data and str(Path(arguments.data).resolve()),
        seconds=seconds,
        steps=arguments.steps,
        seeds=_seeds(arguments.seed, arguments.repeat),
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
            each = 1 + len(settings.recipes) + len(settings.peers)
            again = sum(row.status != "absent" for row in result.rows[:each])
            left = each + again * (len(settings.seeds) - 1) - len(result.rows)
            show(result, arguments.out, left)
    assert result is not None, "a race has at least the row without communication"
    if arguments.open:
        report.show(arguments.out)
    return 0 if all(row.status in ("ok", "absent") for row in result.rows) else 1


def needs(command: str) -> None:
    """Raise ``ImportError`` where a package is missing that the command is sure to need."""
    try:
        import matplotlib  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        raise ImportError(f"laconic {command} needs {error.name}: {install('lab')}") from None


def _per_host(option: str, texts: Sequence[str], parse: Callable[[str], float]) -> dict[int, float]:
    """Values by host, from texts such as ``2=10mbit``."""
    values: dict[int, float] = {}
    for text in texts:
        host, equals, value = text.partition("=")
        if not equals or not host.strip().isdecimal():
            raise ValueError(
                f"--{option} must be HOST=VALUE, such as 2={EXAMPLES[option]}, not {text!r}"
            )
        if int(host) in values:
            raise ValueError(f"--{option} is given twice for host {int(host)}")
        values[int(host)] = parse(value)
    return values


EXAMPLES = {"bandwidth-host": "10mbit", "slow-host": "1.5"}


def _factor(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"not a factor: {text!r}; give a number from 1 up, such as 1.5") from None


def _seeds(first: int | None, repeat: str | None) -> tuple[int, ...]:
    """The seeds of the runs: so many from ``first`` on, or those listed."""
    start = 0 if first is None else first
    if repeat is None:
        return (start,)
    texts = repeat.split(",")
    try:
        numbers = tuple(int(text) for text in texts)
    except ValueError:
        raise ValueError(
            f"--repeat must be a number of runs or a list of seeds, as 3 or 3,7,11, not {repeat!r}"
        ) from None
    if len(numbers) == 1:
        return tuple(range(start, start + check_int("repeat", numbers[0], 1)))
    if first is not None:
        raise ValueError("--repeat with a list of seeds leaves no room for --seed")
    return numbers


def show(result: Result, directory: Path, left: int = 0) -> None:
    """The table, the verdict, and where the rest is; ``left`` recipes did not have their turn."""
    from rich.console import Console

    from laconic.lab.race import report

    console = Console()
    console.print(report.table(result))
    if left:
        console.print(f"Interrupted: {left} of the runs had no turn.", highlight=False)
    console.print(report.verdict(result), highlight=False, markup=False)
    paths = report.write(result, directory)
    console.print("Written: " + ", ".join(str(path) for path in paths), highlight=False)


class Display:
    """A bar for each recipe while the race runs; plain lines where nobody watches."""

    def __init__(self, settings: Any) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(stderr=True)
        self._live = console.is_terminal
        self._console = console
        self._progress = Progress(
            TextColumn("{task.fields[short]}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[told]}"),
            console=console,
            disable=not self._live,
        )
        from laconic.lab.race.result import NO_COMMUNICATION

        self._tasks = {
            name: self._progress.add_task(
                name, total=None, start=False, told="waiting", short=_short(name)
            )
            for name in (NO_COMMUNICATION, *settings.recipes, *settings.peers)
        }
        self._steps: dict[str, int] = {}

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def watch(self, name: str, event: Event) -> None:
        """Show what a row's worker said."""
        task = self._tasks[name]
        kind = event["event"]
        if kind in ("launched", "planning"):
            told = {"launched": "starting", "planning": "timing its steps"}[kind]
            self._progress.start_task(task)
            self._progress.update(task, told=told)
        elif kind == "start":
            self._steps[name] = event["steps"]
            self._progress.update(task, total=event["steps"], told="training")
        elif kind == "step":
            self._steps[name] = event["steps"]
            sent = "" if math.isnan(event["sent"]) else f"  {event['sent'] / 1e6:.1f} MB"
            told = (
                f"{event['step']}/{event['steps']}  loss {event['loss']:.2f}  "
                f"{event['pace']:.3g} s/step{sent}"
            )
            self._progress.update(task, total=event["steps"], completed=event["step"], told=told)
        elif kind == "done":
            self._finish(name, event["row"])

    def _finish(self, name: str, row: Any) -> None:
        loss = "" if row.loss is None else f"loss {row.loss:.3f}  "
        told = row.error or f"{row.steps} steps  {loss}{row.seconds_per_step:.3g} s/step"
        task = self._tasks[name]
        total = self._steps.get(name, 1)
        self._progress.update(
            task, total=total, completed=row.steps if row.status != "failed" else 0, told=told
        )
        if not self._live:
            self._console.print(f"{name}: {row.status}: {told}", highlight=False, markup=False)


def _short(name: str) -> str:
    """A recipe's name in the room that a terminal of 80 columns leaves for it."""
    return name if len(name) <= 24 else name[:23] + "…"
