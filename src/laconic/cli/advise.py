"""``laconic advise``: predict from a few numbers which recipe is worthwhile."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from laconic.cli.options import attribute, declare

REQUIRED = ("--params", "--step-time", "--bandwidth", "--workers")
"""Options without which there is no advice."""
OPTIONS = (
    "--params --step-time --bandwidth --workers --latency --loss --ranks --local-bandwidth "
    "--backward-share --dtype --all --json"
)
LATENCY = 0.001
"""The round trip that is assumed where none is given, in seconds: that of a local network."""


def add(parser: Any) -> None:
    """Add the description and the options of the command."""
    parser.description = (
        "Say which recipe laconic.auto() would choose, how fast it is, what it costs, and which "
        "others to consider. To measure instead, call laconic.advise() in your program."
    )
    parser.add_argument(
        "recipes",
        nargs="*",
        metavar="RECIPE",
        help="recipes to predict besides those that are always compared, such as 'power_sgd(2)'",
    )
    numbers: dict[str, Any] = {"ranks": 1, "backward_share": 0.6, "dtype": "float32"}
    declare(parser, OPTIONS, **numbers)


def run(arguments: argparse.Namespace) -> int:
    """Print the advice and return 0."""
    if arguments.all and arguments.json:
        raise ValueError("--json has all recipes: leave out --all")
    from laconic.advisor import advice_on, show
    from laconic.advisor.numbers import facts_from

    missing = [name for name in REQUIRED if getattr(arguments, attribute(name)) is None]
    if missing:
        raise ValueError(
            f"advise also needs {', '.join(missing)}; to measure instead, call laconic.advise()"
        )
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
    form = "json" if arguments.json else "everything" if arguments.all else "answer"
    print(show.text(advice_on(facts, arguments.recipes), form))
    return 0
