"""``laconic advise``: predict which recipe is worthwhile, from numbers or a measurement."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from laconic.cli.options import attribute, declare, given
from laconic.errors import check_int

REQUIRED = ("--params", "--step-time", "--bandwidth", "--workers")
"""Options required for advice from numbers."""
NUMBERS = "--params --step-time --ranks --local-bandwidth --backward-share --dtype"
MEASURED = "--data --slow-host --steps --seed"
LATENCY = 0.001
"""The round trip that is assumed where none is given, in seconds: that of a local network."""


def add(parser: Any) -> None:
    """Add the description and the options of the command."""
    parser.description = (
        "Say which recipe laconic.auto() would choose, how fast it is, what it costs, and which "
        "others to consider: from numbers (--params, --step-time, --bandwidth, --workers), or from "
        "a measurement of a workload on emulated hosts, one for each worker (--workload). On your "
        "own machines, call laconic.advise()."
    )
    parser.add_argument(
        "recipes",
        nargs="*",
        metavar="RECIPE",
        help="recipes to predict besides those that are always compared, such as 'power_sgd(2)'",
    )
    declare(parser, "--workers --latency --loss --all --json")
    declare(parser, "--bandwidth", by_host=True)
    numbers: dict[str, Any] = {"ranks": 1, "backward_share": 0.6, "dtype": "float32"}
    declare(parser.add_argument_group("from numbers"), NUMBERS, **numbers)
    measured = parser.add_argument_group("measured on emulated hosts")
    declare(measured, f"--workload {MEASURED}", steps="20", seed=0)


def run(arguments: argparse.Namespace) -> int:
    """Print the advice and return 0."""
    if arguments.all and arguments.json:
        raise ValueError("--json has all recipes: leave out --all")
    form = "json" if arguments.json else "everything" if arguments.all else "answer"
    if arguments.workload:
        print(_measured(arguments, form))
    else:
        print(_numbers(arguments, form))
    return 0


def _numbers(arguments: argparse.Namespace, form: str) -> str:
    from laconic.advisor import advice_on, show
    from laconic.advisor.numbers import facts_from

    missing = [name for name in REQUIRED if getattr(arguments, attribute(name)) is None]
    if missing:
        raise ValueError(
            f"advise also needs {', '.join(missing)}; or give --workload to measure instead"
        )
    _refuse(arguments, MEASURED, "applies only to a measurement: add --workload or remove it")
    if arguments.bandwidth_host:
        raise ValueError("workers are alike unless they are measured: give one --bandwidth")
    latency = arguments.latency
    if latency is None:
        latency = LATENCY
        note = "laconic: assuming a round trip of 1 ms, as in a local network: --latency sets it"
        print(note, file=sys.stderr)
    if arguments.loss and not latency:
        raise ValueError(
            "--loss has no effect with a --latency of 0: a packet that is lost arrives round trips "
            "later"
        )
    facts = facts_from(
        params=arguments.params,
        step_time=arguments.step_time,
        bandwidth=arguments.bandwidth,
        one_way=latency / 2,
        workers=arguments.workers,
        ranks=arguments.ranks,
        backward_share=arguments.backward_share,
        dtype=arguments.dtype,
        local_bandwidth=arguments.local_bandwidth,
        loss=arguments.loss or 0.0,
    )
    return show.text(advice_on(facts, arguments.recipes), form)


def _measured(arguments: argparse.Namespace, form: str) -> str:
    from laconic.advisor import cluster
    from laconic.advisor.choices import PLAIN, choices
    from laconic.lab.emulation.jobs import terminate_as_exit
    from laconic.lab.emulation.network import Network
    from laconic.lab.race.runner import Settings

    _refuse(arguments, NUMBERS, "is measured with --workload: remove one of the two")
    choices(PLAIN, arguments.recipes)
    steps = check_int("steps", arguments.steps, 2)
    settings = Settings(
        recipes=(),
        network=Network(
            hosts=4 if arguments.workers is None else arguments.workers,
            bandwidth=arguments.bandwidth or 100e6,
            latency=arguments.latency or 0.0,
            loss=arguments.loss or 0.0,
            single={"bandwidth": arguments.bandwidth_host},
        ),
        slow_hosts=arguments.slow_host,
        workload=arguments.workload,
        data=arguments.data,
        seeds=(arguments.seed,),
    )
    cluster.check(settings)
    with terminate_as_exit():
        text, reason = cluster.advise_on_hosts(settings, arguments.recipes, steps, form)
    if reason is not None:
        note = f"laconic: hosts could not be emulated ({reason}): using a throttled link instead"
        print(note, file=sys.stderr)
    return text


def _refuse(arguments: argparse.Namespace, options: str, why: str) -> None:
    if conflicting := given(arguments, options):
        raise ValueError(f"{', '.join(conflicting)} {why}")
