"""``laconic plan``: what a run would take on a cluster that you describe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.cli.options import declare, given, names
from laconic.errors import check_int

if TYPE_CHECKING:
    from laconic.advisor.plan.cluster import Cluster
    from laconic.advisor.plan.measured import Measured

NEEDED = {
    **dict.fromkeys(("repair", "checkpoint"), "mtbf 30d"),
    **dict.fromkeys(("uplink", "egress"), "sites 2"),
}
"""What options have no effect without."""
FIELDS = {"gigabyte": "egress"}
"""Fields of a cluster whose option has another name."""
STEPS = 10_000
"""Default length of the run."""
EPILOG = """\
8 machines with one GPU each, in 3 countries, and a model of a billion parameters:

    laconic plan --workers 8 --sites 3 --rate 100mbit --latency 80ms --parameters 1b --step 1s

The same for one recipe, with a machine that fails once a month:

    laconic plan --workers 8 --sites 3 --rate 100mbit --latency 80ms --parameters 1b --step 1s \\
        --mtbf 30d 'diloco(100)'

For unequal sites, write a file, and change it:

    laconic plan --example > cluster.yaml
    laconic plan --cluster cluster.yaml

docs/planning.md explains every number."""
CLUSTER = """
--workers N  number of workers, such as machines
--sites N  sites with equal shares of them (1)
--rate RATE  at which each worker sends, such as 100mbit
--download RATE  at which it receives (as it sends)
--uplink RATE  that a site's workers share toward others (no limit)
--latency TIME  round trip between sites (ping), such as 80ms (0)
--jitter TIME  by which a round trip varies (0)
--loss SHARE  of packets that are lost, such as 0.1%% (0)
--parameters COUNT  of the model, such as 1b
--dtype DTYPE  of parameters and messages (float32)
--step TIME  computing of one step on one worker (1s)
--spread SHARE  standard deviation of step times over their mean (5%%)
--price PRICE  of a worker per hour
--egress PRICE  of a GB that leaves a site
--mtbf TIME  between two failures of a worker (never)
--repair TIME  until a failed machine is back (10min)
--checkpoint STEPS  between two checkpoints, for a run that starts again from one after a failure
    (default: an elastic run, which goes on without the lost worker)
"""
FILES = """
--cluster FILE  the cluster in YAML or JSON; see --example
--from-metrics FILE  records of a real run, by attach(..., metrics=FILE): use its step times,
    failures and network
--example  print a file for --cluster, and nothing else
"""
OPTIONS = """
--steps COUNT  length of the run
--runs N  simulated runs of a recipe (default: 5, or 2 of large plans)
--json
"""


def add(parser: Any) -> None:
    """Add the description and the options of the command."""
    parser.description = (
        "Simulate a training run on a described cluster: how long it takes, what the time goes to, "
        "what it sends and costs, what limits it, and what would help."
    )
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "recipes",
        nargs="*",
        metavar="RECIPE",
        help="recipes to simulate, such as 'diloco(100)' (default: the most promising ones of "
        "those that laconic advise compares)",
    )
    what = parser.add_argument_group("the cluster, all of whose workers are alike")
    declare(what, CLUSTER)
    files = parser.add_argument_group("from files")
    declare(files, FILES)
    declare(parser, OPTIONS, steps=STEPS)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan and return 0."""
    from laconic.advisor.plan.fields import EXAMPLE
    from laconic.advisor.plan.report import plan

    if arguments.example:
        if given(arguments, [*names(CLUSTER + OPTIONS), "cluster", "from_metrics"]):
            raise ValueError("--example prints a file, and nothing else: leave out all others")
        print(EXAMPLE, end="")
        return 0
    runs = None if arguments.runs is None else check_int("--runs", arguments.runs, 1)
    cluster, measured = _cluster(arguments)
    recipes = arguments.recipes
    if measured is not None and not recipes:
        recipes = [_recipe_of(measured, arguments.from_metrics)]
    made = plan(cluster, recipes, steps=arguments.steps, seeds=runs)
    if arguments.json:
        print(made.to_json())
        return 0
    from rich.console import Console

    from laconic.advisor.plan.show import show

    show(made, Console())
    if measured is not None:
        print(measured)
    return 0


def _recipe_of(measured: Measured, path: Path) -> str:
    """Return the recipe of a measured run, to plan it."""
    from laconic.algorithms.parse import parse_recipe

    if not measured.recipe:
        raise ValueError(f"{path} does not name the run's recipe: give one, such as 'diloco(100)'")
    try:
        parse_recipe(measured.recipe)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; or give a recipe to plan") from None
    return measured.recipe


def _cluster(arguments: argparse.Namespace) -> tuple[Cluster, Measured | None]:
    from laconic.advisor.plan import fields

    if arguments.cluster is not None:
        for name in given(arguments, names(CLUSTER)):
            raise ValueError(
                f"{name} describes a cluster, and so does --cluster {arguments.cluster}: "
                "change it there"
            )
        cluster = fields.read(arguments.cluster)
    else:
        cluster = _described(arguments)
    if arguments.from_metrics is None:
        return cluster, None
    from laconic.advisor.plan.measured import calibrated

    return calibrated(cluster, arguments.from_metrics)


def _described(arguments: argparse.Namespace) -> Cluster:
    from laconic.advisor.plan.cluster import Cluster, Failures, uniform

    known = {name: getattr(arguments, name) for name in names(CLUSTER)}
    known = {name: value for name, value in known.items() if value is not None}
    if missing := [f"--{name}" for name in ("workers", "rate", "parameters") if name not in known]:
        raise ValueError(
            f"plan also needs {', '.join(missing)}, or --cluster FILE; for example: laconic plan "
            "--workers 8 --sites 3 --rate 100mbit --latency 80ms --parameters 1b --step 1s"
        )
    if known.get("sites") == 1:
        del known["sites"]
    for name, needed in NEEDED.items():
        if name in known and needed.split()[0] not in known:
            raise ValueError(
                f"--{name} has no effect without --{needed.split()[0]}, such as --{needed}"
            )
    if "loss" in known and not known.get("latency"):
        raise ValueError(
            "--loss has no effect without --latency, such as --latency 20ms: a packet that is lost "
            "arrives round trips later"
        )

    def take(*names: str) -> dict[str, Any]:
        return {name: known.pop(name) for name in names if name in known}

    try:
        egress = known.pop("egress", 0.0)
        workers, sites = known.pop("workers"), known.pop("sites", 1)
        site = take("rate", "uplink", "download", "price")
        fails = take("mtbf", "repair", "checkpoint")
        return Cluster(
            sites=uniform(workers, sites, latency=known.get("latency", 0.0), **site),
            gigabyte=egress,
            failures=Failures(**fails, policy="static" if "checkpoint" in fails else "elastic"),
            **known,
        )
    except ValueError as error:  # begins with the name of a field, which is that of an option
        name, _, rest = str(error).partition(" ")
        option = FIELDS.get(name, name)
        if option not in names(CLUSTER):
            raise
        raise ValueError(f"--{option} {rest}") from None
