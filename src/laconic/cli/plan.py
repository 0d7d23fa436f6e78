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
STEPS, TRAINED = 10_000, 100
"""Default lengths: of a plan, and of a training with ``--train``."""
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
--tokens COUNT  of one worker in a step, for the expected loss
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
    failures and network, and show its timeline beside the planned one
--curve FILE  lines step,loss of a short run of the one recipe, to continue its loss
"""
OPTIONS = """
--runs N  simulated runs of a recipe (default: 5, or 2 of large plans)
--json --plot
"""
LENGTH = f"""
--steps COUNT  length of the run (default: {STEPS:,}; with --train {TRAINED})
--train N  train a tiny model with N simulated workers, up to 256, under each recipe instead, to see
    what it learns: the real mathematics, in this process
"""
NOT_TRAINED = CLUSTER + FILES + OPTIONS
"""Options that have no effect with ``--train``."""


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
    declare(files, FILES + "--example  print such a file, and nothing else")
    declare(parser, LENGTH + OPTIONS)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan and return 0."""
    from laconic.advisor.plan.fields import EXAMPLE

    if arguments.example:
        if given(arguments, names(NOT_TRAINED + LENGTH)) or arguments.recipes:
            raise ValueError("--example prints a file, and nothing else: leave out all others")
        print(EXAMPLE, end="")
        return 0
    from laconic.advisor.plan.law import read_curve
    from laconic.advisor.plan.report import plan

    if arguments.train is not None:
        return _train(arguments)
    if arguments.plot is not None:
        from laconic.advisor.plan.show import check_plot

        check_plot(arguments.plot)
    runs = None if arguments.runs is None else check_int("--runs", arguments.runs, 1)
    cluster, measured = _cluster(arguments)
    recipes = arguments.recipes
    if measured is not None and not recipes:
        recipes = [_recipe_of(measured, arguments.from_metrics)]
    curve = () if arguments.curve is None else read_curve(arguments.curve)
    steps = STEPS if arguments.steps is None else arguments.steps
    made = plan(cluster, recipes, steps=steps, seeds=runs, curve=curve)
    if arguments.json:
        print(made.to_json())
    else:
        from rich.console import Console

        from laconic.advisor.plan import show

        show.show(made, Console(), measured)
    if arguments.plot is not None:
        from laconic.advisor.plan import show

        show.plot(made, arguments.plot, measured)
    return 0


def _train(arguments: argparse.Namespace) -> int:
    """Train a tiny model, and print what it has learned."""
    for name in given(arguments, names(NOT_TRAINED)):
        raise ValueError(f"--train cannot be combined with {name}, only with recipes and --steps")
    from laconic.advisor.plan.at_scale import LEAST_STEPS, MOST_WORKERS, check_learnable, learn
    from laconic.algorithms.parse import parse_recipe
    from laconic.units import format_bytes, format_seconds

    texts = arguments.recipes or ["ddp()", "diloco(20)"]
    steps = TRAINED if arguments.steps is None else arguments.steps
    check_int("--steps", steps, LEAST_STEPS)
    if check_int("--train", arguments.train, 1) > MOST_WORKERS:
        raise ValueError(f"--train must be at most {MOST_WORKERS}, not {arguments.train}")
    recipes = {}
    for text in texts:
        recipe = parse_recipe(text)
        if not isinstance(recipe, tuple):
            raise ValueError(f"{text} measures a network, and there is none: give its choice")
        check_learnable(recipe, text, arguments.train, steps)
        recipes[text] = recipe
    print(f"{steps} steps of {arguments.train} workers; loss on held-out samples, at ten points")
    for text, recipe in recipes.items():
        learned = learn(recipe, arguments.train, steps)
        losses = " ".join(f"{loss:.3f}" for loss in learned.losses)
        print(
            f"{text}: {losses}; workers apart by {learned.distance:.2g}; "
            f"{format_seconds(learned.seconds)}, {format_bytes(learned.memory)} of memory",
            flush=True,
        )
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
