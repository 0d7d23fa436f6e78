"""``laconic advise``: which recipe will pay, predicted from numbers or from a measurement."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.cli.compare import needs
from laconic.errors import check_int
from laconic.units import parse_count, parse_duration, parse_rate

if TYPE_CHECKING:
    from laconic.advisor import Advice

NUMBERS = ("params", "step_time", "bandwidth", "latency", "nodes")
"""What advice from numbers needs."""
ONLY_NUMBERS = ("params", "step_time", "nodes", "nprocs_per_node", "backward_share", "dtype",
                "local_bandwidth")  # fmt: skip
ONLY_MEASURED = ("hosts", "per_host", "data", "steps", "seed")


def add(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "advise",
        help="predict what each recipe will cost, and say which one pays",
        description="Predict seconds, bytes and memory of a step under each recipe: from numbers "
        "(--params, --step-time, --bandwidth, --latency, --nodes), or from a measurement of "
        "a workload on emulated hosts (--workload). On your own machines call laconic.advise.",
    )
    parser.add_argument("--bandwidth", metavar="RATE", help="of each node, such as 1gbit")
    parser.add_argument("--latency", metavar="TIME", help="of each message, such as 30ms")
    numbers = parser.add_argument_group("from numbers")
    numbers.add_argument("--params", metavar="COUNT", help="of the model, such as 1.3B")
    numbers.add_argument("--step-time", metavar="TIME", help="computing of a step, such as 0.9s")
    numbers.add_argument("--nodes", type=int, help="2 or more")
    numbers.add_argument(
        "--nprocs-per-node",
        "--per-node",
        type=int,
        metavar="N",
        help="ranks of each, which are one worker (1)",
    )
    numbers.add_argument(
        "--backward-share", type=float, metavar="SHARE", help="of the step time (0.6)"
    )
    numbers.add_argument("--dtype", help="of parameters and gradients (float32)")
    numbers.add_argument(
        "--local-bandwidth", metavar="RATE", help="between the ranks of a node (unlimited)"
    )
    measured = parser.add_argument_group("measured on emulated hosts")
    measured.add_argument("--workload", help="digits, text, or your own: my.py:make")
    measured.add_argument("--data", metavar="FILE", help="what the workload learns")
    measured.add_argument("--hosts", type=int, help="default: 4")
    measured.add_argument("--per-host", type=int, help="processes on each, each a worker (1)")
    measured.add_argument("--steps", type=int, help="timed at a time (20)")
    measured.add_argument("--seed", type=int, help="default: 0")
    parser.add_argument(
        "--recipe",
        action="append",
        default=[],
        metavar="RECIPE",
        help="one more to predict, such as 'power_sgd(2)'; may be given for several",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture, such as advice.png")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0 with the advice printed."""
    needs("advise")
    if arguments.plot is not None:
        _check_picture(arguments.plot)
    advice, reason = _measured(arguments) if arguments.workload else (_numbers(arguments), None)
    from laconic.advisor import show

    if reason is not None:
        note = f"laconic: hosts could not be emulated ({reason}): a throttled link stands in"
        print(note, file=sys.stderr)
    if arguments.json:
        print(advice.to_json())
    else:
        from rich.console import Console

        show.show(advice, Console())
    if arguments.plot is not None:
        show.plot(advice, arguments.plot)
    return 0


def _check_picture(path: Path) -> None:
    """Before a measurement of minutes is lost."""
    from matplotlib.figure import Figure

    endings = Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in endings:
        raise ValueError(f"--plot must end in one of {', '.join(sorted(endings))}, not {path}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: there is no such directory")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _numbers(arguments: argparse.Namespace) -> Advice:
    from laconic.advisor import advice_on
    from laconic.advisor.numbers import facts_from

    missing = [_option(name) for name in NUMBERS if getattr(arguments, name) is None]
    if missing:
        raise ValueError(
            f"advise needs {', '.join(missing)} as well, or --workload to measure instead"
        )
    _refuse(arguments, ONLY_MEASURED, "belongs to a measurement: give --workload, or leave it out")
    optional: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in ("nprocs_per_node", "backward_share", "dtype")
        if getattr(arguments, name) is not None
    }
    if arguments.local_bandwidth is not None:
        optional["local_bandwidth"] = parse_rate(arguments.local_bandwidth)
    facts = facts_from(
        params=parse_count(arguments.params),
        step_time=parse_duration(arguments.step_time),
        bandwidth=parse_rate(arguments.bandwidth),
        latency=parse_duration(arguments.latency),
        nodes=arguments.nodes,
        **optional,
    )
    return advice_on(facts, arguments.recipe)


def _measured(arguments: argparse.Namespace) -> tuple[Advice, str | None]:
    from laconic.advisor import advice_on, cluster
    from laconic.advisor.choices import PLAIN, choices
    from laconic.advisor.worker import Spec
    from laconic.lab.emulation.jobs import terminate_as_exit

    _refuse(arguments, ONLY_NUMBERS, "is measured with --workload: leave one of the two out")
    hosts = 4 if arguments.hosts is None else check_int("hosts", arguments.hosts, 1)
    per_host = 1 if arguments.per_host is None else check_int("per-host", arguments.per_host, 1)
    bandwidth = parse_rate(arguments.bandwidth or "100mbit")
    choices(PLAIN, arguments.recipe)
    spec = Spec(
        workload=arguments.workload,
        data=arguments.data and str(Path(arguments.data).resolve()),
        recipes=arguments.recipe,
        steps=20 if arguments.steps is None else check_int("steps", arguments.steps, 2),
        seed=0 if arguments.seed is None else check_int("seed", arguments.seed, 0),
        bandwidth=None,
        latency=parse_duration(arguments.latency or "0"),
        timeout=cluster.TIMEOUT,
    )
    cluster.check(spec, hosts, per_host, bandwidth)
    with terminate_as_exit():
        found, reason = cluster.measure_on_hosts(spec, hosts, per_host, bandwidth)
    at = found.computes, found.held, found.peak
    advice = advice_on(found.facts, arguments.recipe, computes=at[0], held=at[1], peak=at[2])
    return advice, reason


def _refuse(arguments: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    given = [_option(name) for name in names if getattr(arguments, name) is not None]
    if given:
        raise ValueError(f"{', '.join(given)} {why}")
