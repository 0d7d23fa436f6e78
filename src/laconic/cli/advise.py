"""``laconic advise``: predict which recipe is worthwhile, from numbers or a measurement."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from laconic.cli.hosts import parse_factor, values_by_host
from laconic.errors import check_int, install
from laconic.units import (
    parse_bandwidth,
    parse_count,
    parse_duration,
    parse_latency,
    parse_share,
)

if TYPE_CHECKING:
    from laconic.advisor import Advice

NUMBERS = ("params", "step_time", "bandwidth", "latency", "nodes")
"""Options required for advice from numbers."""
ONLY_NUMBERS = ("params", "step_time", "nodes", "nprocs_per_node", "backward_share", "dtype",
                "local_bandwidth", "buffers")  # fmt: skip
ONLY_MEASURED = ("hosts", "per_host", "data", "steps", "seed", "bandwidth_host", "slow_host")


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "advise",
        description="Say which recipe laconic.auto() would choose, how fast it is, what it costs, "
        "and which others to consider: from numbers (--params, --step-time, --bandwidth, "
        "--latency, --nodes), or from a measurement of a workload on emulated hosts (--workload). "
        "On your own machines, call laconic.advise().",
    )
    parser.add_argument("--bandwidth", metavar="RATE", help="bandwidth of each node, such as 1gbit")
    parser.add_argument(
        "--latency",
        metavar="TIME",
        help="round-trip time of a packet and its answer (ping), such as 60ms",
    )
    parser.add_argument(
        "--loss", metavar="SHARE", help="share of packets that are lost each way, such as 0.1%%"
    )
    numbers = parser.add_argument_group("from numbers")
    numbers.add_argument(
        "--params", metavar="COUNT", help="number of parameters of the model, such as 1.3B"
    )
    numbers.add_argument("--step-time", metavar="TIME", help="compute time of a step, such as 0.9s")
    numbers.add_argument("--nodes", type=int, help="number of nodes, 2 or more")
    numbers.add_argument(
        "--nprocs-per-node",
        "--per-node",
        type=int,
        metavar="N",
        help="ranks per node, which together form one worker (default: 1)",
    )
    numbers.add_argument(
        "--backward-share",
        type=float,
        metavar="SHARE",
        help="share of the step time spent in the backward pass (default: 0.6)",
    )
    numbers.add_argument("--dtype", help="dtype of parameters and gradients (default: float32)")
    numbers.add_argument(
        "--local-bandwidth",
        metavar="RATE",
        help="bandwidth between the ranks of a node (default: unlimited)",
    )
    numbers.add_argument(
        "--buffers",
        metavar="COUNT",
        help="numbers in the model's buffers that change in training, such as BatchNorm's "
        "statistics (default: 0)",
    )
    measured = parser.add_argument_group("measured on emulated hosts")
    measured.add_argument(
        "--workload", help="digits, text, text-small, or your own, such as my.py:make"
    )
    measured.add_argument("--data", metavar="FILE", help="training data of the workload")
    measured.add_argument("--hosts", type=int, help="number of hosts (default: 4)")
    measured.add_argument(
        "--per-host", type=int, help="processes per host, each one worker (default: 1)"
    )
    measured.add_argument(
        "--bandwidth-host",
        action="append",
        metavar="HOST=RATE",
        help="bandwidth of one host, such as 2=10mbit; repeatable",
    )
    measured.add_argument(
        "--slow-host",
        action="append",
        metavar="HOST=FACTOR",
        help="make one host compute more slowly, such as 2=1.5; repeatable",
    )
    measured.add_argument("--steps", type=int, help="steps per timing (default: 20)")
    measured.add_argument("--seed", type=int, help="random seed (default: 0)")
    parser.add_argument(
        "--recipe",
        action="append",
        default=[],
        metavar="RECIPE",
        help="another recipe to predict, such as 'power_sgd(2)'; repeatable",
    )
    parser.add_argument(
        "--all", action="store_true", help="also print a table of all recipes, and how they compare"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="write a plot to FILE, such as advice.png"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the advice and return 0."""
    if arguments.all and arguments.json:
        raise ValueError("--json has all recipes: leave out --all")
    if arguments.plot is not None:
        _check_plot_path(arguments.plot)
    advice, reason = _measured(arguments) if arguments.workload else (_numbers(arguments), None)
    from laconic.advisor import show

    if reason is not None:
        note = f"laconic: hosts could not be emulated ({reason}): using a throttled link instead"
        print(note, file=sys.stderr)
    if arguments.json:
        print(advice.to_json())
    else:
        lines = show.everything if arguments.all else show.answer
        width = get_terminal_size().columns if sys.stdout.isatty() else None
        print("\n".join(lines(advice, width)))
        if not arguments.all:
            print("\n--all adds a table of all recipes.")
    if arguments.plot is not None:
        show.plot(advice, arguments.plot)
    return 0


def _check_plot_path(path: Path) -> None:
    """Check the path before a measurement that takes minutes."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(f"--plot needs matplotlib: {install('lab')}") from None

    suffixes = Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in suffixes:
        raise ValueError(f"--plot must end in one of {', '.join(sorted(suffixes))}, not {path}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: no such directory")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _numbers(arguments: argparse.Namespace) -> Advice:
    from laconic.advisor import advice_on
    from laconic.advisor.numbers import facts_from

    missing = [_option(name) for name in NUMBERS if getattr(arguments, name) is None]
    if missing:
        raise ValueError(
            f"advise also needs {', '.join(missing)}; or give --workload to measure instead"
        )
    _refuse(arguments, ONLY_MEASURED, "applies only to a measurement: add --workload or remove it")
    optional: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in ("nprocs_per_node", "backward_share", "dtype")
        if getattr(arguments, name) is not None
    }
    if arguments.local_bandwidth is not None:
        optional["local_bandwidth"] = parse_bandwidth(arguments.local_bandwidth)
    if arguments.buffers is not None:
        optional["buffers"] = parse_count(arguments.buffers)
    if arguments.loss is not None:
        optional["loss"] = parse_share(arguments.loss)
        if optional["loss"] and not parse_latency(arguments.latency):
            raise ValueError(
                "--loss has no effect with a --latency of 0: a packet that is lost arrives round "
                "trips later"
            )
    facts = facts_from(
        params=parse_count(arguments.params),
        step_time=parse_duration(arguments.step_time),
        bandwidth=parse_bandwidth(arguments.bandwidth),
        one_way=parse_latency(arguments.latency) / 2,
        nodes=arguments.nodes,
        **optional,
    )
    return advice_on(facts, arguments.recipe)


def _measured(arguments: argparse.Namespace) -> tuple[Advice, str | None]:
    from laconic.advisor import advice_on, cluster
    from laconic.advisor.choices import PLAIN, choices
    from laconic.lab.emulation.impairments import Impairments
    from laconic.lab.emulation.jobs import terminate_as_exit
    from laconic.lab.race.runner import Settings

    _refuse(arguments, ONLY_NUMBERS, "is measured with --workload: remove one of the two")
    hosts = 4 if arguments.hosts is None else check_int("hosts", arguments.hosts, 1)
    per_host = 1 if arguments.per_host is None else check_int("per-host", arguments.per_host, 1)
    choices(PLAIN, arguments.recipe)
    steps = 20 if arguments.steps is None else check_int("steps", arguments.steps, 2)
    settings = Settings(
        recipes=(),
        hosts=hosts,
        per_host=per_host,
        bandwidth=parse_bandwidth(arguments.bandwidth or "100mbit"),
        host_bandwidth=values_by_host("bandwidth-host", arguments.bandwidth_host, parse_bandwidth),
        impairments=Impairments(
            latency=parse_latency(arguments.latency or "0"),
            loss=parse_share(arguments.loss or "0"),
        ),
        slow_hosts=values_by_host("slow-host", arguments.slow_host, parse_factor),
        workload=arguments.workload,
        data=arguments.data and str(Path(arguments.data).resolve()),
        seeds=(0 if arguments.seed is None else arguments.seed,),
    )
    cluster.check(settings)
    with terminate_as_exit():
        measured, reason = cluster.measure_on_hosts(settings, arguments.recipe, steps)
    advice = advice_on(
        measured.facts,
        arguments.recipe,
        computes=measured.computes,
        held=measured.held,
        peak=measured.peak,
    )
    return advice, reason


def _refuse(arguments: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    conflicting = [_option(name) for name in names if getattr(arguments, name) is not None]
    if conflicting:
        raise ValueError(f"{', '.join(conflicting)} {why}")
