"""Options of the commands, in the form in which ``--help`` shows them.

A row is an option with the name of its value, two spaces, and its help. Rows without a help name
options of `SHARED`. The name of the value gives its type, by `TYPES`; without one, the option is a
flag.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.units import (
    parse_bandwidth,
    parse_count,
    parse_duration,
    parse_latency,
    parse_share,
)

if TYPE_CHECKING:
    from laconic.lab.emulation.impairments import Impairments

SHARED = """
--hosts N  number of hosts
--per-host N  processes per host, each one worker
--group-size N  workers per group, for recipes such as hierarchical
--bandwidth RATE  bandwidth of each host, such as 20mbit
--bandwidth-host HOST=RATE  bandwidth of one host, such as 2=10mbit; repeatable
--slow-host HOST=FACTOR  make one host compute more slowly, such as 2=1.5; repeatable
--latency TIME  round-trip time of a packet and its answer (ping), such as 50ms
--workload WORKLOAD  digits, text, text-small, or your own, such as my.py:make
--data FILE  training data of the text workload or your own
--rules FILE  file with your own recipes, such as my_rules.py
--seed N  random seed
--open  show the report in a browser
--json  print JSON
--out DIR  directory for the results
--plot FILE  write a plot to FILE, such as plot.png
"""
NETWORK = """
--latency
--latency-host HOST=TIME  latency of one host, such as 2=50ms; between two hosts, the mean of their
    values applies; repeatable
--jitter TIME  how far a ping may differ from the latency, such as 10ms
--jitter-host HOST=TIME  jitter of one host, such as 2=10ms; between two hosts, the mean of their
    values applies; repeatable
--loss SHARE  share of packets lost in each direction, such as 0.1%% or 0.001
--loss-host HOST=SHARE  loss of one host, such as 2=0.1%%; between two hosts, the mean of their
    values applies; repeatable
--network-seed N  seed of jitter and loss
"""
"""Of an emulated network; see `impairments_of`."""
NO_IMPAIRMENTS = {"latency": "0", "jitter": "0", "loss": "0", "network_seed": 0}


def parse_host(text: str) -> int:
    """Return the number of a host written as ``2`` or ``host2``."""
    number = text.strip().removeprefix("host")
    if not number.isascii() or not number.isdecimal():
        raise ValueError(f"not a host: {text!r}; give its number, such as 2 or host2")
    return int(number)


def parse_limit(text: str) -> float | None:
    """Return a rate in bit/s, or None for ``unlimited``."""
    return None if text.strip().lower() == "unlimited" else parse_bandwidth(text)


TYPES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("N", "STEPS"), int),
    **dict.fromkeys(("SECONDS", "MEGABYTES", "PRICE", "FACTOR"), float),
    **dict.fromkeys(("DIR", "OLD", "FILE"), Path),
    **dict.fromkeys(("latency", "jitter"), parse_latency),
    "data": lambda text: text and str(Path(text).resolve()),
    **dict.fromkeys(("rules", "compute", "restart"), str),
    "COUNT": parse_count,
    "LIMIT": parse_limit,
    "RATE": parse_bandwidth,
    "SHARE": parse_share,
    "TIME": parse_duration,
}
"""Of the value of an option with this name, or else of a value with this name; else text."""


class ByHost(argparse.Action):
    """An option with values by host, such as ``2=10mbit``. Another value for a host is an error."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        host, value = values
        found = getattr(namespace, self.dest)
        if host in found:
            raise argparse.ArgumentError(self, f"has two values for host {host}")
        setattr(namespace, self.dest, {**found, host: value})


def rows(text: str) -> Iterator[tuple[list[str], str, str]]:
    """Yield the flags, the name of the value, and the help of each option."""
    for row in re.split(r"\n(?=-)", text.strip()):
        spec, _, about = row.partition("  ")
        words = spec.split()
        flags = [word for word in words if word.startswith("--")]
        if about:
            yield flags, " ".join(words[len(flags) :]), " ".join(about.split())
        else:
            yield from (next(row for row in rows(SHARED) if row[0] == [name]) for name in flags)


def names(text: str) -> list[str]:
    """Return the names of the options, as attributes of the arguments."""
    return [flags[0].removeprefix("--").replace("-", "_") for flags, _, _ in rows(text)]


def declare(parser: Any, text: str, **defaults: Any) -> None:
    """Add the options to a parser, or a group of one. Their help states their ``defaults``."""
    for name, (flags, value, about) in zip(names(text), rows(text), strict=True):
        default = defaults.get(name)
        more: dict[str, Any] = {"help": about, "default": default}
        if default is not None:
            more["help"] += " (default: %(default)s)"
        if not value:
            parser.add_argument(*flags, action="store_true", help=about)
            continue
        _, by_host, kind = value.rpartition("HOST=")
        parse = TYPES.get(name.removesuffix("_host"), TYPES.get(kind, str))
        if by_host:
            more |= {"action": ByHost, "default": {}}
        elif about.endswith("; repeatable"):
            more |= {"action": "append", "default": []}
        if by_host or parse not in (int, float):  # whose errors argparse words itself
            parse = _reader(parse, bool(by_host))
        parser.add_argument(*flags, metavar=value, type=parse, **more)


def _reader(parse: Callable[[str], Any], by_host: bool) -> Callable[[str], Any]:
    """Return ``parse``, after a host and = or not, with errors as argparse prints them."""

    def read(text: str) -> Any:
        try:
            if not by_host:
                return parse(text)
            host, equals, value = text.partition("=")
            if not equals:
                raise ValueError(f"not HOST=VALUE: {text!r}")
            return parse_host(host), parse(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def flag(name: str) -> str:
    """Return the option of this name as it is written."""
    return "--" + name.replace("_", "-")


def given(arguments: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Return which of the options are given, as they are written."""
    return [
        flag(name)
        for name in names
        if name in arguments.given
        or (value := getattr(arguments, name)) is True
        or (isinstance(value, (list, dict)) and value)
    ]


def impairments_of(arguments: argparse.Namespace) -> Impairments:
    """Return what the options of `NETWORK` describe. Raises ``ValueError`` for bad values."""
    from laconic.lab.emulation.impairments import Impairments

    found = Impairments(
        arguments.latency,
        arguments.jitter,
        arguments.loss,
        arguments.latency_host,
        arguments.jitter_host,
        arguments.loss_host,
        arguments.network_seed,
    )
    random = (found.jitter, found.loss, *found.host_jitter.values(), *found.host_loss.values())
    if given(arguments, ["network_seed"]) and found.seed >= 0 and not any(random):
        raise ValueError("--network-seed is the seed of jitter and loss: give --jitter or --loss")
    return found
