"""``laconic plan``: what a run would take on a cluster that you describe."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from laconic.cli.options import attribute, declare, given

if TYPE_CHECKING:
    from laconic.advisor.plan.cluster import Cluster

NEEDED = {
    **dict.fromkeys(("--repair", "--checkpoint"), "--mtbf 30d"),
    **dict.fromkeys(("--uplink", "--egress"), "--sites 2"),
}
"""What options have no effect without."""
STEPS = 10_000
"""Default length of the run."""
EXAMPLE = (
    "laconic plan --workers 8 --sites 3 --bandwidth 100mbit --latency 80ms --params 1b "
    "--step-time 1s"
)
EPILOG = f"""\
8 machines with one GPU each, in 3 countries, and a model of a billion parameters:

    {EXAMPLE}

For unequal sites, write a file with --example, and change it.
docs/planning.md explains every number."""
CLUSTER = (
    "--workers --sites --bandwidth --download --uplink --latency --jitter --loss --params --dtype "
    "--step-time --spread --price --egress --mtbf --repair --checkpoint"
)


def add(parser: Any) -> None:
    """Add the description and the options of the command."""
    parser.description = (
        "Simulate a training run on a described cluster: how long it takes, what the time\n"
        "goes to, what it sends and costs, and what limits it."
    )
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "recipes",
        nargs="*",
        metavar="RECIPE",
        help="recipes to simulate, such as 'diloco(100)' (default: the most promising ones of "
        "those that laconic advise compares)",
    )
    what = parser.add_argument_group(
        "the cluster, all of whose workers are alike; --latency is the round trip between sites"
    )
    numbers: dict[str, Any] = {"sites": 1, "dtype": "float32", "step_time": "1s", "spread": "5%"}
    declare(what, CLUSTER, **numbers, latency="0", jitter="0", loss="0")
    declare(parser.add_argument_group("from a file"), "--cluster --example")
    declare(parser, "--steps --repeat --json", steps=STEPS)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan and return 0."""
    from laconic.advisor.plan import fields
    from laconic.advisor.plan.report import plan

    if arguments.example:
        if arguments.recipes or {*arguments.given} - {"example", "recipes"}:
            raise ValueError("--example prints a file, and nothing else: leave out the rest")
        print(fields.EXAMPLE, end="")
        return 0
    if arguments.cluster is None:
        cluster = _described(arguments)
    else:
        for name in given(arguments, CLUSTER):
            raise ValueError(
                f"{name} describes a cluster, and so does --cluster {arguments.cluster}: "
                "change it there"
            )
        cluster = fields.read(arguments.cluster)
    made = plan(cluster, arguments.recipes, steps=arguments.steps, seeds=arguments.repeat)
    if arguments.json:
        print(made.to_json())
        return 0
    from laconic.advisor.plan.show import text

    print("\n".join(text(made)))
    return 0


def _described(arguments: argparse.Namespace) -> Cluster:
    from laconic.advisor.plan.cluster import Cluster, Failures, uniform

    known = {name: getattr(arguments, attribute(name)) for name in given(arguments, CLUSTER)}
    if missing := [n for n in ("--workers", "--bandwidth", "--params") if n not in known]:
        raise ValueError(
            f"plan also needs {', '.join(missing)}, or --cluster FILE; for example: {EXAMPLE}"
        )
    if known.get("--sites") == 1:
        del known["--sites"]
    for name, needed in NEEDED.items():
        if name in known and needed.split()[0] not in known:
            raise ValueError(f"{name} has no effect without {needed.split()[0]}, such as {needed}")
    if "--loss" in known and not known.get("--latency"):
        raise ValueError(
            "--loss has no effect without --latency, such as --latency 20ms: a packet that is lost "
            "arrives round trips later"
        )
    fields = {attribute(name): value for name, value in known.items()}

    def take(*names: str) -> dict[str, Any]:
        return {name: fields.pop(name) for name in names if name in fields}

    try:
        workers, sites = fields.pop("workers"), fields.pop("sites", 1)
        site = take("bandwidth", "uplink", "download", "price")
        fails = take("mtbf", "repair", "checkpoint")
        return Cluster(
            sites=uniform(workers, sites, latency=fields.get("latency", 0.0), **site),
            failures=Failures(**fails, policy="static" if "checkpoint" in fails else "elastic"),
            **fields,
        )
    except ValueError as error:  # begins with the name of a field
        name, _, rest = str(error).partition(" ")
        options = {attribute(option): option for option in CLUSTER.split()}
        if name not in options:
            raise
        raise ValueError(f"{options[name]} {rest}") from None
