"""``laconic advise``: predict which recipe is worthwhile, from numbers or a measurement."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from laconic.cli.options import declare, flag, given, names
from laconic.errors import check_int

OPTIONS = """
--bandwidth RATE  bandwidth of each node, such as 1gbit
--latency
--loss SHARE  share of packets that are lost each way, such as 0.1%%
--recipe RECIPE  another recipe to predict, such as 'power_sgd(2)'; repeatable
--all  also print a table of all recipes, and how they compare
--json
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
    form = "json" if arguments.json else "everything" if arguments.all else "answer"
    if arguments.workload:
        print(_measured(arguments, form))
    else:
        print(_numbers(arguments, form))
    return 0


def _numbers(arguments: argparse.Namespace, form: str) -> str:
    from laconic.advisor import advice_on, show
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
    return show.text(advice_on(facts, arguments.recipe), form)


def _measured(arguments: argparse.Namespace, form: str) -> str:
    from laconic.advisor import cluster
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
        text, reason = cluster.advise_on_hosts(settings, arguments.recipe, steps, form)
    if reason is not None:
        note = f"laconic: hosts could not be emulated ({reason}): using a throttled link instead"
        print(note, file=sys.stderr)
    return text


def _refuse(arguments: argparse.Namespace, options: str, why: str) -> None:
    if conflicting := given(arguments, names(options)):
        raise ValueError(f"{', '.join(conflicting)} {why}")
