"""The options of all commands: one name for one thing, with one meaning wherever it appears.

`VOCABULARY` has them in the form in which ``--help`` shows them: the name, the name of the value,
two spaces, and the help. The name of the value gives its type, by `TYPES`; without one, the option
is a flag.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from laconic.units import (
    parse_bandwidth,
    parse_count,
    parse_duration,
    parse_share,
    parse_time,
)

if TYPE_CHECKING:
    from laconic.lab.emulation.network import Network

VOCABULARY = """
--workers COUNT  number of workers
--ranks COUNT  ranks of each worker, such as the GPUs of a node
--hosts COUNT  number of hosts
--per-host COUNT  processes per host, each one worker
--group-size COUNT  workers per group, for recipes such as hierarchical
--slow-host HOST=FACTOR  make one host compute more slowly, such as 2=1.5; repeatable
--sites COUNT  sites with equal shares of the workers

--bandwidth RATE  rate at which each host or worker sends, such as 20mbit
--download RATE  rate at which each worker receives, if it is not that at which it sends
--uplink RATE  rate that a site's workers share toward others
--local-bandwidth RATE  rate between the ranks of a worker
--latency TIME  round-trip time of a packet and its answer (ping), such as 50ms
--jitter TIME  how far a ping may differ from the latency, such as 10ms
--loss SHARE  share of packets lost in each direction, such as 0.1% or 0.001

--params COUNT  number of parameters of the model, such as 1.3B
--dtype DTYPE  dtype of parameters and gradients
--step-time TIME  compute time of an optimizer step with all batches that it accumulates
--backward-share SHARE  share of the step time spent in the backward pass
--spread SHARE  standard deviation of step times over their mean

--workload WORKLOAD  digits, text, text-few, or your own, such as my.py:make
--lr-scale FACTOR  what the workload's learning rates are multiplied with, such as 0.5
--data FILE  training data of the text workload or your own
--rules FILE  file with your own recipes, such as my_rules.py
--free RECIPE  a recipe on a free network: what the others can reach; repeatable
--peer PEER  another library to race against, such as torch-ddp; repeatable
--seconds SECONDS  training time of each run
--steps COUNT  steps of each run
--seed N  random seed
--repeat COUNT  runs of each recipe, with as many seeds

--price PRICE  price of a worker per hour
--egress PRICE  price of a GB that leaves a site
--mtbf TIME  mean time between two failures of a worker, such as 30d
--repair TIME  time until a failed machine, or a killed program, is back
--checkpoint STEPS  steps between checkpoints, from which a run starts again (else it is elastic)
--cluster FILE  the cluster in YAML or JSON; see --example
--example  print such a file, and nothing else

--kill HOST@TIME  kill a host's program; repeatable
--hang HOST@TIME[..TIME]  stop a host's program, and continue it at the end; repeatable
--cut HOST[-HOST]@TIME..TIME  lose all packets between two hosts, or of one host; repeatable

--address ADDRESS  address to listen at, such as 10.0.0.1:29400
--master ADDRESS  address of rank 0's host with a free port, such as 10.0.0.1:29500
--rank N  rank of this host, from 0
--timeout TIME  how long to wait for the other hosts

--all  also print a table of all recipes, and how they compare
--json  print JSON
--out DIR  directory for the results

--days COUNT  days for which the certificates are valid
"""


def _option(row: str) -> tuple[str, tuple[str, str]]:
    spec, _, about = row.partition("  ")
    name, _, value = spec.partition(" ")
    return name, (value, about)


OPTIONS = dict(map(_option, filter(None, VOCABULARY.splitlines())))
"""The name of the value and the help of each option."""


def parse_host(text: str) -> int:
    """Return the number of a host written as ``2`` or ``host2``."""
    number = text.strip().removeprefix("host")
    if not number.isascii() or not number.isdecimal():
        raise ValueError(f"not a host: {text!r}; give its number, such as 2 or host2")
    return int(number)


def parse_limit(text: str) -> float | None:
    """Return a rate in bit/s, or None for ``unlimited``."""
    return None if text.strip().lower() == "unlimited" else parse_bandwidth(text)


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and the port of an address."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"not an address with a port, such as 10.0.0.1:29500: {text!r}")
    return host.strip("[]"), int(port)


TYPES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("N", "STEPS"), int),
    **dict.fromkeys(("PRICE", "FACTOR"), float),
    **dict.fromkeys(("DIR", "FILE"), Path),
    "--data": lambda text: str(Path(text).resolve()),
    "--rules": str,
    "COUNT": parse_count,
    "ADDRESS": parse_address,
    "RATE": parse_bandwidth,
    "SECONDS": parse_duration,
    "SHARE": parse_share,
    "TIME": parse_time,
}
"""Of an option, or of a value with this name; else text."""


class OfHost(NamedTuple):
    """A value of one host, such as ``2=10mbit``."""

    host: int
    value: Any


def host_and(parse: Callable[[str], Any], required: bool) -> Callable[[str], Any]:
    """Return a parser of ``HOST=VALUE``, and of ``VALUE`` unless the host is ``required``."""

    def read(text: str) -> Any:
        host, equals, value = text.rpartition("=")
        if required and not equals:
            raise ValueError(f"not HOST=VALUE: {text!r}")
        return OfHost(parse_host(host), parse(value)) if equals else parse(value)

    return read


def worded(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return ``parse`` with errors that argparse prints as they are."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


class Stored(argparse.Action):
    """Stores what is given for an option, and adds its name to ``given`` of the arguments.

    A second value is an error where it would replace the first silently. Values of single hosts are
    in the arguments as a dictionary, under the name that `single` returns.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        name = self.dest
        if isinstance(values, OfHost):
            name = single(name)
            found = getattr(namespace, name)
            if values.host in found:
                raise argparse.ArgumentError(self, f"has two values for host {values.host}")
            values = {**found, values.host: values.value}
        elif isinstance(self.default, list):
            values = [*getattr(namespace, name), values]
        elif option_string and name in namespace.given:
            raise argparse.ArgumentError(self, "is given twice: leave out one of them")
        namespace.given = (*namespace.given, name)
        setattr(namespace, name, True if self.nargs == 0 else values)


def attribute(option: str) -> str:
    """Return the name of an option among the arguments."""
    return option.removeprefix("--").replace("-", "_")


def single(name: str) -> str:
    """Return the name under which the arguments have the values of single hosts."""
    return name.removesuffix("_host") + "_host"


NETWORK = "--bandwidth --latency --jitter --loss"
"""Of emulated hosts, with values for single ones; see `network_of`."""
BETWEEN = (
    "HOST= gives one host another value, such as --latency 2=50ms. Between two hosts, the mean of "
    "their latencies, jitters and losses counts."
)
FREE: dict[str, Any] = {"latency": "0", "jitter": "0", "loss": "0"}


def declare(
    parser: Any,
    options: str,
    *,
    by_host: bool = False,
    types: Mapping[str, Callable[[str], Any]] = TYPES,
    **defaults: Any,
) -> None:
    """Add ``options`` to a parser, or a group of one. Their help states their ``defaults``.

    With ``by_host`` they have a value for all hosts, and others for single hosts.
    """
    for name in options.split():
        value, about = OPTIONS[name]
        default = defaults.get(attribute(name))
        about += "" if default is None else f" (default: {default})"
        more: dict[str, Any] = {"help": about.replace("%", "%%"), "default": default}
        if not value:
            parser.add_argument(name, nargs=0, **{**more, "default": False})
            continue
        kind = value.removeprefix("HOST=")
        parse = types.get(name, types.get(kind, str))
        if isinstance(default, str):  # argparse would not, beside a value of one host
            more["default"] = parse(default)
        if by_host or kind != value:
            parse = host_and(parse, required=kind != value)
            value = value if kind != value else f"[HOST=]{value}"
        elif about.endswith("; repeatable"):
            more["default"] = []
        more["type"] = parse if parse in (int, float) else worded(parse)
        parser.add_argument(name, metavar=value, **more)
        parser.set_defaults(**{single(attribute(name)): {}} if "HOST=" in value else {})


def given(arguments: argparse.Namespace, options: str) -> list[str]:
    """Return which of the options are given."""
    names = {option: attribute(option) for option in options.split()}
    return [o for o, name in names.items() if {name, single(name)} & {*arguments.given}]


def network_of(arguments: argparse.Namespace) -> Network:
    """Return the network that the options in `NETWORK` describe, with its hosts."""
    from laconic.lab.emulation.network import QUANTITIES, Network

    return Network(
        arguments.hosts,
        **{name: getattr(arguments, name) for name in QUANTITIES},
        single={name: getattr(arguments, single(name)) for name in QUANTITIES},
        seed=arguments.seed,
    )
