"""``laconic plan``: what a run would take on a cluster that you describe."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from laconic.cli.compare import needs
from laconic.errors import check_int
from laconic.units import (
    parse_bandwidth,
    parse_count,
    parse_duration,
    parse_latency,
    parse_share,
)

if TYPE_CHECKING:
    from laconic.advisor.plan.cluster import Cluster
    from laconic.advisor.plan.measured import Measured

DESCRIBES = ("workers", "sites", "rate", "download", "uplink", "latency", "jitter", "loss",
             "parameters", "dtype", "step", "spread", "tokens", "price", "egress", "mtbf",
             "repair", "checkpoint")  # fmt: skip
"""Options that describe a cluster, which a file does otherwise."""
FIELDS = {"gigabyte": "egress"}
"""Fields of a cluster whose option has another name."""
NOT_TRAINED = (*DESCRIBES, "cluster", "from_metrics", "curve", "runs", "json", "plot")
"""Options that have no effect with ``--train``."""
STEPS, TRAINED = 10_000, 100
"""Default lengths: of a plan, and of a training with ``--train``."""

T = TypeVar("T")


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "plan",
        help="simulate a run on a cluster that you describe, before you rent it",
        description="Simulate a training run on a described cluster: how long it takes, what the "
        "time goes to, what it sends and costs, what limits it, and what would help.",
        epilog="""\
8 machines with one GPU each, in 3 countries, and a model of a billion parameters:

    laconic plan --workers 8 --sites 3 --rate 100mbit --latency 80ms --parameters 1b --step 1s

The same for one recipe, with a machine that fails once a month:

    laconic plan --workers 8 --sites 3 --rate 100mbit --latency 80ms --parameters 1b --step 1s \\
        --mtbf 30d 'diloco(100)'

For unequal sites, write a file, and change it:

    laconic plan --example > cluster.yaml
    laconic plan --cluster cluster.yaml

docs/planning.md explains every number.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "recipes",
        nargs="*",
        metavar="RECIPE",
        help="recipes to simulate, such as 'diloco(100)' (default: the most promising ones of "
        "those that laconic advise compares)",
    )
    what = parser.add_argument_group("the cluster, all of whose workers are alike")
    what.add_argument(
        "--workers", type=int, metavar="N", help="number of workers, such as machines"
    )
    what.add_argument("--sites", type=int, metavar="N", help="sites with equal shares of them (1)")
    what.add_argument("--rate", metavar="RATE", help="at which each worker sends, such as 100mbit")
    what.add_argument("--download", metavar="RATE", help="at which it receives (as it sends)")
    what.add_argument(
        "--uplink", metavar="RATE", help="that a site's workers share toward others (no limit)"
    )
    what.add_argument(
        "--latency", metavar="TIME", help="round trip between sites (ping), such as 80ms (0)"
    )
    what.add_argument("--jitter", metavar="TIME", help="by which a round trip varies (0)")
    what.add_argument("--loss", metavar="SHARE", help="of packets that are lost, such as 0.1%% (0)")
    what.add_argument("--parameters", metavar="COUNT", help="of the model, such as 1b")
    what.add_argument("--dtype", help="of parameters and messages (float32)")
    what.add_argument("--step", metavar="TIME", help="computing of one step on one worker (1s)")
    what.add_argument(
        "--spread", metavar="SHARE", help="standard deviation of step times over their mean (5%%)"
    )
    what.add_argument(
        "--tokens", metavar="COUNT", help="of one worker in a step, for the expected loss"
    )
    what.add_argument("--price", type=float, help="of a worker per hour")
    what.add_argument("--egress", type=float, metavar="PRICE", help="of a GB that leaves a site")
    what.add_argument("--mtbf", metavar="TIME", help="between two failures of a worker (never)")
    what.add_argument("--repair", metavar="TIME", help="until a failed machine is back (10min)")
    what.add_argument(
        "--checkpoint",
        type=int,
        metavar="STEPS",
        help="between two checkpoints, for a run that starts again from one after a failure "
        "(default: an elastic run, which goes on without the lost worker)",
    )
    files = parser.add_argument_group("from files")
    files.add_argument(
        "--cluster", type=Path, metavar="FILE", help="the cluster in YAML or JSON; see --example"
    )
    files.add_argument("--example", action="store_true", help="print such a file, and nothing else")
    files.add_argument(
        "--from-metrics",
        type=Path,
        metavar="FILE",
        help="records of a real run, by attach(..., metrics=FILE): use its step times, failures "
        "and network, and show its timeline beside the planned one",
    )
    files.add_argument(
        "--curve",
        type=Path,
        metavar="FILE",
        help="lines step,loss of a short run of the one recipe, to continue its loss",
    )
    parser.add_argument(
        "--steps",
        type=_count,
        metavar="COUNT",
        help=f"length of the run (default: {STEPS:,}; with --train {TRAINED})",
    )
    parser.add_argument(
        "--runs",
        type=int,
        metavar="N",
        help="simulated runs of a recipe (default: 5, or 2 of large plans)",
    )
    parser.add_argument(
        "--train",
        type=int,
        metavar="N",
        help="train a tiny model with N simulated workers, up to 256, under each recipe instead, "
        "to see what it learns: the real mathematics, in this process",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the timelines into FILE")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan and return 0."""
    from laconic.advisor.plan.fields import EXAMPLE

    if arguments.example:
        options = (*NOT_TRAINED, "steps", "train")
        given = [name for name in options if getattr(arguments, name) not in (None, False)]
        if given or arguments.recipes:
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
        needs("plan")
        from rich.console import Console

        from laconic.advisor.plan import show

        show.show(made, Console(), measured)
    if arguments.plot is not None:
        from laconic.advisor.plan import show

        show.plot(made, arguments.plot, measured)
    return 0


def _train(arguments: argparse.Namespace) -> int:
    """Train a tiny model, and print what it has learned."""
    given = [name for name in NOT_TRAINED if getattr(arguments, name) not in (None, False)]
    if given:
        raise ValueError(
            f"--train cannot be combined with {_option(given[0])}, only with recipes and --steps"
        )
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


def _count(text: str) -> int:
    """Return a count, or raise argparse's error, which has the accepted forms."""
    try:
        return parse_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


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

    given = [name for name in DESCRIBES if getattr(arguments, name) is not None]
    if arguments.cluster is not None:
        if given:
            raise ValueError(
                f"--{given[0]} describes a cluster, and so does --cluster {arguments.cluster}: "
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
    missing = [f"--{name}" for name in ("workers", "rate", "parameters")
               if getattr(arguments, name) is None]  # fmt: skip
    if missing:
        raise ValueError(
            f"plan also needs {', '.join(missing)}, or --cluster FILE; for example: laconic plan "
            "--workers 8 --sites 3 --rate 100mbit --latency 80ms --parameters 1b --step 1s"
        )
    if arguments.mtbf is None:
        for name in ("repair", "checkpoint"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name} has no effect without --mtbf, such as --mtbf 30d")
    if arguments.sites in (None, 1):
        for name in ("uplink", "egress"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name} has no effect without --sites, such as --sites 2")
    if arguments.loss is not None and not parse_latency(arguments.latency or "0"):
        raise ValueError(
            "--loss has no effect without --latency, such as --latency 20ms: a packet that is lost "
            "arrives round trips later"
        )
    with _named_as_options():
        return _of_options(arguments)


@contextmanager
def _named_as_options() -> Iterator[None]:
    """Let an error that begins with the name of a field begin with its option."""
    try:
        yield
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        option = FIELDS.get(name, name)
        if option not in DESCRIBES:
            raise
        raise ValueError(f"--{option} {rest}") from None


def _parsed(arguments: argparse.Namespace, name: str, parse: Callable[[str], T], default: T) -> T:
    """Return an option's value, or the ``default`` if it is not given."""
    text = getattr(arguments, name)
    if text is None:
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"--{name}: {error}") from None


def _of_options(arguments: argparse.Namespace) -> Cluster:
    from laconic.advisor.plan.cluster import Cluster, Failures, uniform

    latency = _parsed(arguments, "latency", parse_latency, 0.0)
    sites = uniform(
        arguments.workers,
        1 if arguments.sites is None else arguments.sites,
        rate=_parsed(arguments, "rate", parse_bandwidth, 0.0),
        latency=latency,
        uplink=_parsed(arguments, "uplink", parse_bandwidth, None),
        download=_parsed(arguments, "download", parse_bandwidth, None),
        price=arguments.price or 0.0,
    )
    failures = Failures()
    for name in ("mtbf", "repair"):
        value = _parsed(arguments, name, parse_duration, getattr(failures, name))
        failures = replace(failures, **{name: value})
    if arguments.checkpoint is not None:
        failures = replace(failures, policy="static", checkpoint=arguments.checkpoint)
    parsers: dict[str, Callable[[str], Any]] = {
        "step": parse_duration,
        "spread": parse_share,
        "tokens": parse_count,
        "jitter": parse_latency,
        "loss": parse_share,
        "dtype": str,
    }
    optional: dict[str, Any] = {
        name: _parsed(arguments, name, parse, None)
        for name, parse in parsers.items()
        if getattr(arguments, name) is not None
    }
    return Cluster(
        _parsed(arguments, "parameters", parse_count, 0),
        sites,
        latency=latency,
        gigabyte=arguments.egress or 0.0,
        failures=failures,
        **optional,
    )
