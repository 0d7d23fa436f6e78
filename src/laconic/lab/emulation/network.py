"""Emulated hosts and what their network does to packets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from laconic import native
from laconic.errors import check_int
from laconic.lab.emulation.forward import VERSION, Forward
from laconic.units import format_rate, format_seconds, format_share

__all__ = ["Network", "check_host"]

QUANTITIES: Final = ("bandwidth", "latency", "jitter", "loss")
_IMPAIRMENTS: Final = {"latency": format_seconds, "jitter": format_seconds, "loss": format_share}
_MOST_HOSTS: Final = 250  # limits: 253 descriptors in one message, and the addresses of a /24
_MOST_SECONDS: Final = 10.0
_SLOWEST: Final = 8e3  # bit/s
_FASTEST: Final = 32e9  # bit/s; the shaper counts bytes per second in 32 bits
_ALLOWED: Final = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


@dataclass(frozen=True)
class Network:
    """Emulated hosts and their network.

    ``bandwidth``: bit/s that each host may send, None for no limit. ``latency``: seconds that a
    packet and its answer take together (ping), half of it each way. ``jitter``: seconds by which a
    ping differs from that at most, either way. ``loss``: the probability that a packet is lost,
    from 0 to 1. ``single``: what differs for single hosts, such as ``{"bandwidth": {2: 10e6}}``;
    what counts between two hosts is the mean of their latencies, jitters and losses. ``seed``: of
    jitter and loss. ``congestion_control``: TCP's default on the hosts; None: the lab's choice,
    which is reno, or cubic with latency, jitter or loss.
    """

    hosts: int = 4
    bandwidth: float | None = 100e6
    latency: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    single: Mapping[str, Mapping[int, float | None]] = field(default_factory=dict)
    seed: int = 0
    congestion_control: str | None = None

    def each(self, quantity: str) -> list[Any]:
        """Return a quantity of all hosts, such as "latency"."""
        own = self.single.get(quantity, {})
        return [own.get(host, getattr(self, quantity)) for host in range(self.hosts)]

    @property
    def impaired(self) -> bool:
        """Whether packets are delayed or lost."""
        return any(any(self.each(quantity)) for quantity in _IMPAIRMENTS)

    def check(self) -> None:
        """Raise ``ValueError`` for settings that cannot be emulated."""
        if not 1 <= check_int("hosts", self.hosts, 1) <= _MOST_HOSTS:
            raise ValueError(f"hosts must be from 1 to {_MOST_HOSTS}, not {self.hosts}")
        check_int("the network's seed", self.seed, 0)
        for own in self.single.values():
            for host in own:
                check_host(host, self.hosts)
        for rate, latency, jitter, loss in zip(*map(self.each, QUANTITIES), strict=True):
            if rate is not None and not (math.isfinite(rate) and _SLOWEST <= rate <= _FASTEST):
                accepted = f"{_SLOWEST:g} to {_FASTEST:g} bit/s, or None for no limit"
                raise ValueError(f"bandwidth must be {accepted}, not {rate!r}")
            if not 0 <= latency <= _MOST_SECONDS:
                raise ValueError(f"latency must be from 0 to {_MOST_SECONDS:g} s, not {latency!r}")
            if not 0 <= jitter <= latency:
                most = f"the latency, which is {format_seconds(latency)}"
                raise ValueError(f"jitter must be from 0 to {most}, not {jitter!r}")
            if not 0 <= loss < 1:
                raise ValueError(f"loss must be from 0 to less than 1, not {loss!r}")
        # Those of the machine's tcp_allowed_congestion_control, for root as well.
        names = _ALLOWED.read_text().split() if _ALLOWED.exists() else []  # it does on Linux
        if self.congestion_control not in (None, *names):
            raise ValueError(
                f"the congestion control must be one of {', '.join(names)} "
                f"(net.ipv4.tcp_allowed_congestion_control), not {self.congestion_control!r}"
            )

    def check_throttled(self, reason: str) -> None:
        """Raise ``OSError`` if a throttled link cannot stand in: it only has rate and latency."""
        if any(self.each("jitter") + self.each("loss")):
            raise OSError(f"jitter and loss need emulated hosts: {reason}")

    def forward(self) -> Forward | None:
        """Return what the forwarder of a cluster does, or None if packets need none."""
        if not self.impaired:
            return None
        path = native.path("laconic.lab.emulation._forward", VERSION)
        latency, jitter, loss = map(self.each, _IMPAIRMENTS)
        return Forward(path, latency, jitter, loss, self.seed)

    def document(self) -> dict[str, Any]:
        """Return the settings for a file of results; `of` reads them."""
        found: dict[str, Any] = {"hosts": self.hosts, "network_seed": self.seed}
        for name in QUANTITIES:
            found |= {name: getattr(self, name), f"host_{name}": dict(self.single.get(name, {}))}
        return found

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Network:
        """Return the network that a file of results describes."""
        latency, jitter, loss = (settings.get(name) or 0.0 for name in _IMPAIRMENTS)
        single = {
            name: {int(host): value for host, value in (settings.get(f"host_{name}") or {}).items()}
            for name in QUANTITIES
        }
        return cls(settings["hosts"], settings.get("bandwidth"), latency, jitter, loss, single)

    def __str__(self) -> str:
        """Return hosts, rates, latency, jitter and loss for display."""
        parts = [
            f"{self.hosts} host{'s' * (self.hosts > 1)}",
            f"{_rate(self.bandwidth)} each",
            *(f"host{h} {_rate(v)}" for h, v in sorted(self.single.get("bandwidth", {}).items())),
        ]
        for name, form in _IMPAIRMENTS.items():
            value, own = getattr(self, name), sorted(self.single.get(name, {}).items())
            parts += [f"{form(value)} {name}"] if value else []
            parts += [f"host{host} {form(each or 0.0)} {name}" for host, each in own]
        return ", ".join(parts)


def _rate(value: float | None) -> str:
    return "unlimited" if value is None else format_rate(value)


def check_host(host: int, hosts: int) -> None:
    """Raise ``ValueError`` unless there is such a host."""
    if not 0 <= host < hosts:
        raise ValueError(f"there is no host {host}; hosts are numbered 0 to {hosts - 1}")
