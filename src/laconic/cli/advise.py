"""``laconic advise``: predict which recipe is worthwhile, from numbers or a measurement."""

from __future__ import annotations

import argparse
import sys
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from laconic.cli.options import declare, flag, given, names
from laconic.errors import check_int

if TYPE_CHECKING:
    from laconic.advisor import Advice

OPTIONS = """
--bandwidth RATE  bandwidth of each node, such as 1gbit
--latency
--loss SHARE  share of packets that are lost each way, such as 0.1%%
--recipe RECIPE  another recipe to predict, such as 'power_sgd(2)'; repeatable
--all  also print a table of all recipes, and how they compare
--json --plot
"""
REQUIRED = ("params", "step_time", "bandwidth", "latency", "nodes")
"""Options required for advice from numbers."""
NUMBERS = """
--params COUNT  number of parameters of the model, such as 1.3B
--step-time TIME  compute time of a step, such as 0.9s
--nodes N  number of nodes, 2 or more
--nprocs-per-node --per-node N  ranks per node, which together form one worker (default: 1)
--backward-share SHARE  share of the step time spent in the backward pass (default: 0.6)
--dtype DTYPE  dtype of parameters and gradients (default: float32)
--local-bandwidth RATE  bandwidth between the ranks of a node (default: unlimited)
--buffers COUNT  numbers in the model's buffers that change in training, such as BatchNorm's
    statistics (default: 0)
"""
MEASURED = """
--data --hosts --per-host --bandwidth-host --slow-host
--steps N  steps per timing
--seed
"""


def add(parser: Any) -> None:
    """Add the description and the options of the command."""
    parser.description = (
        "Say which recipe laconic.auto() would choose, how fast it is, what it costs, and which "
        "others to consider: from numbers (--params, --step-time, --bandwidth, --latency, "
        "--nodes), or from a measurement of a workload on emulated hosts (--workload). On your own "
        "machines, call laconic.advise()."
    )
    declare(parser, OPTIONS)
    declare(parser.add_argument_group("from numbers"), NUMBERS)
    measured = parser.add_argument_group("measured on emulated hosts")
    declare(measured, "--workload" + MEASURED, hosts=4, per_host=1, steps=20, seed=0)


def run(arguments: argparse.Namespace) -> int:
    """Print the advice and return 0."""
    if arguments.all and arguments.json:
        raise ValueError("--json has all recipes: leave out --all")
    if arguments.plot is not None:  # before a measurement that takes minutes
        from laconic.advisor.plan.show import check_plot

        check_plot(arguments.plot)
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


def _numbers(arguments: argparse.Namespace) -> Advice:
    from laconic.advisor import advice_on
    from laconic.advisor.numbers import facts_from

    missing = [flag(name) for name in REQUIRED if getattr(arguments, name) is None]
    if missing:
        raise ValueError(
            f"advise also needs {', '.join(missing)}; or give --workload to measure instead"
        )
    _refuse(arguments, MEASURED, "applies only to a measurement: add --workload or remove it")
    if arguments.loss and not arguments.latency:
        raise ValueError(
            "--loss has no effect with a --latency of 0: a packet that is lost arrives round trips "
            "later"
        )
    values = {name: getattr(arguments, name) for name in (*names(NUMBERS), "bandwidth", "loss")}
    known = {name: value for name, value in values.items() if value is not None}
    facts = facts_from(one_way=arguments.latency / 2, **known)
    return advice_on(facts, arguments.recipe)


def _measured(arguments: argparse.Namespace) -> tuple[Advice, str | None]:
    from laconic.advisor import advice_on, cluster
    from laconic.advisor.choices import PLAIN, choices
    from laconic.lab.emulation.impairments import Impairments
    from laconic.lab.emulation.jobs import terminate_as_exit
    from laconic.lab.race.runner import Settings

    _refuse(arguments, NUMBERS, "is measured with --workload: remove one of the two")
    choices(PLAIN, arguments.recipe)
    steps = check_int("steps", arguments.steps, 2)
    settings = Settings(
        recipes=(),
        hosts=arguments.hosts,
        per_host=arguments.per_host,
        bandwidth=arguments.bandwidth or 100e6,
        host_bandwidth=arguments.bandwidth_host,
        impairments=Impairments(latency=arguments.latency or 0.0, loss=arguments.loss or 0.0),
        slow_hosts=arguments.slow_host,
        workload=arguments.workload,
        data=arguments.data,
        seeds=(arguments.seed,),
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


def _refuse(arguments: argparse.Namespace, options: str, why: str) -> None:
    if conflicting := given(arguments, names(options)):
        raise ValueError(f"{', '.join(conflicting)} {why}")
