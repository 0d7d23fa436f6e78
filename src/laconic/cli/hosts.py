"""Options with a value for one host, such as ``--slow-host 2=1.5``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

EXAMPLES = {"bandwidth-host": "10mbit", "slow-host": "1.5"}


def values_by_host(
    option: str, texts: Sequence[str], parse: Callable[[str], float]
) -> dict[int, float]:
    """Parse values by host, such as ``2=10mbit``."""
    values: dict[int, float] = {}
    for text in texts:
        host, equals, value = text.partition("=")
        if not equals or not host.strip().isdecimal():
            raise ValueError(
                f"--{option} must be HOST=VALUE, such as 2={EXAMPLES[option]}, not {text!r}"
            )
        if int(host) in values:
            raise ValueError(f"--{option} has two values for host {int(host)}")
        values[int(host)] = parse(value)
    return values


def parse_factor(text: str) -> float:
    """Return the factor by which a host is slower."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"not a factor: {text!r}; give a number of at least 1, such as 1.5"
        ) from None
