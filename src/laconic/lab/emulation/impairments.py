"""What an emulated network does to packets, apart from its rate: latency, jitter and loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from laconic import native
from laconic.errors import check_int
from laconic.lab.emulation.forward import VERSION, Forward
from laconic.units import format_seconds, format_share

__all__ = ["Impairments", "described"]

MOST_SECONDS: Final = 10.0
"""The largest latency."""


@dataclass(frozen=True)
class Impairments:
    """Latency, jitter and loss between hosts.

    ``latency``: seconds that a packet and its answer take together (ping), half of it each way.
    ``jitter``: seconds by which a ping differs from that at most, either way. ``loss``: the
    probability that a packet is lost, from 0 to 1. ``host_latency``, ``host_jitter`` and
    ``host_loss`` override them for single hosts; what counts between two hosts is the mean of
    theirs. ``seed``: of jitter and loss.
    """

    latency: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    host_latency: Mapping[int, float] = field(default_factory=dict)
    host_jitter: Mapping[int, float] = field(default_factory=dict)
    host_loss: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __bool__(self) -> bool:
        """Return whether there are any."""
        single = (self.host_latency, self.host_jitter, self.host_loss)
        values = [value for by_host in single for value in by_host.values()]
        return any((self.latency, self.jitter, self.loss, *values))

    def of_host(self, host: int) -> tuple[float, float, float]:
        """Return a host's latency, jitter and loss."""
        return (
            self.host_latency.get(host, self.latency),
            self.host_jitter.get(host, self.jitter),
            self.host_loss.get(host, self.loss),
        )

    def check(self, hosts: int) -> None:
        """Raise ``ValueError`` for values out of range and for hosts that do not exist."""
        for host in (*self.host_latency, *self.host_jitter, *self.host_loss):
            if not 0 <= host < hosts:
                raise ValueError(f"there is no host {host}; hosts are numbered 0 to {hosts - 1}")
        check_int("the network's seed", self.seed, 0)
        for host in range(hosts):
            latency, jitter, loss = self.of_host(host)
            if not 0 <= latency <= MOST_SECONDS:
                raise ValueError(f"latency must be from 0 to {MOST_SECONDS:g} s, not {latency!r}")
            if not 0 <= jitter <= latency:
                raise ValueError(
                    f"jitter must be from 0 to the latency, which is {format_seconds(latency)}, "
                    f"not {jitter!r}"
                )
            if not 0 <= loss < 1:
                raise ValueError(f"loss must be from 0 to less than 1, not {loss!r}")

    def check_throttled(self, reason: str) -> None:
        """Raise ``OSError`` if a throttled link cannot stand in for these: it only has latency."""
        single = (*self.host_jitter.values(), *self.host_loss.values())
        if any((self.jitter, self.loss, *single)):
            raise OSError(f"jitter and loss need emulated hosts: {reason}")

    def round_trip(self, host: int) -> float:
        """Return the round trip of a host, for a link that is throttled, in seconds."""
        return self.of_host(host)[0]

    def forward(self, hosts: int) -> Forward:
        """Return the same for the forwarder of a cluster."""
        path = native.path("laconic.lab.emulation._forward", VERSION)
        columns = zip(*(self.of_host(host) for host in range(hosts)), strict=True)
        latency, jitter, loss = (list(column) for column in columns)
        return Forward(path, latency, jitter, loss, self.seed)

    def document(self) -> dict[str, object]:
        """Return the settings for a file of results."""
        return {
            "latency": self.latency,
            "host_latency": dict(self.host_latency),
            "jitter": self.jitter,
            "host_jitter": dict(self.host_jitter),
            "loss": self.loss,
            "host_loss": dict(self.host_loss),
            "network_seed": self.seed,
        }

    def __str__(self) -> str:
        """Return them for display, such as "80 ms latency, 0.1% loss"; "" if there are none."""
        parts = []
        for name, value, single in (
            ("latency", self.latency, self.host_latency),
            ("jitter", self.jitter, self.host_jitter),
            ("loss", self.loss, self.host_loss),
        ):
            parts += [described(name, value)] if value else []
            parts += [f"host{host} {described(name, single[host])}" for host in sorted(single)]
        return ", ".join(parts)


_FORMATS: Final[Mapping[str, Callable[[float], str]]] = {
    "latency": format_seconds,
    "jitter": format_seconds,
    "loss": format_share,
}


def described(name: str, value: float) -> str:
    """Return a latency, jitter or loss for display, such as "80 ms latency"."""
    assert math.isfinite(value), "check has raised"
    return f"{_FORMATS[name](value)} {name}"
