"""Options for latency, jitter and loss of an emulated network."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from laconic.cli.hosts import values_by_host
from laconic.units import parse_latency, parse_share

if TYPE_CHECKING:
    from laconic.lab.emulation.impairments import Impairments

HELP = {
    "latency": ("TIME", "50ms", "round-trip time of a packet and its answer (ping), such as 50ms"),
    "jitter": ("TIME", "10ms", "how far a ping may differ from the latency, such as 10ms"),
    "loss": ("SHARE", "0.1%", "share of packets lost in each direction, such as 0.1%% or 0.001"),
}
"""For each option, the kind of its value, an example, and the help."""
NAMES = (*HELP, *(f"{name}_host" for name in HELP), "network_seed")
"""The names of all of these options."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    for name, (kind, example, text) in HELP.items():
        parser.add_argument(f"--{name}", metavar=kind, help=f"{text} (default: 0)")
        parser.add_argument(
            f"--{name}-host",
            action="append",
            metavar=f"HOST={kind}",
            help=f"{name} of one host, such as 2={example.replace('%', '%%')}; between two hosts, "
            "the mean of their values applies; repeatable",
        )
    parser.add_argument(
        "--network-seed", type=int, metavar="N", help="seed of jitter and loss (default: 0)"
    )


def impairments_of(arguments: argparse.Namespace) -> Impairments:
    """Return what the options describe. Raises ``ValueError`` for bad values."""
    from laconic.lab.emulation.impairments import Impairments

    latency, jitter, loss = (_value(arguments, name) for name in HELP)
    by_host = (
        values_by_host(f"{name}-host", getattr(arguments, f"{name}_host"), _parser(name))
        for name in HELP
    )
    host_latency, host_jitter, host_loss = by_host
    seed = arguments.network_seed or 0
    random = (jitter, loss, *host_jitter.values(), *host_loss.values())
    if arguments.network_seed is not None and seed >= 0 and not any(random):
        raise ValueError("--network-seed is the seed of jitter and loss: give --jitter or --loss")
    return Impairments(latency, jitter, loss, host_latency, host_jitter, host_loss, seed)


def _value(arguments: argparse.Namespace, name: str) -> float:
    text = getattr(arguments, name)
    return 0.0 if text is None else _parser(name)(text)


def _parser(name: str) -> Callable[[str], float]:
    return parse_share if name == "loss" else parse_latency
