"""Options with a value for one host, such as ``--slow-host 2=1.5``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
EXAMPLES = {
    "bandwidth-host": "10mbit",
    "slow-host": "1.5",
    "latency-host": "50ms",
    "jitter-host": "10ms",
    "loss-host": "0.1%",
}


def values_by_host(
    option: str, texts: Sequence[str] | None, parse: Callable[[str], T]
) -> dict[int, T]:
    """Parse values by host, such as ``2=10mbit`` or ``host2=10mbit``."""
    values: dict[int, T] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(
                f"--{option} must be HOST=VALUE, such as 2={EXAMPLES[option]}, not {text!r}"
            )
        host = parse_host(name)
        if host in values:
            raise ValueError(f"--{option} has two values for host {host}")
        values[host] = parse(value)
    return values


def parse_host(text: str) -> int:
    """Return the number of a host written as ``2`` or ``host2``."""
    number = text.strip().removeprefix("host")
    if not number.isascii() or not number.isdecimal():
        raise ValueError(f"not a host: {text!r}; give its number, such as 2 or host2")
    return int(number)


def parse_factor(text: str) -> float:
    """Return the factor by which a host is slower."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"not a factor: {text!r}; give a number of at least 1, such as 1.5"
        ) from None
