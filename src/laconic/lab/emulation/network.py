"""The emulated network of a program: its hosts, their rates and impairments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from laconic.errors import check_int
from laconic.lab.emulation.cluster import (
    Cluster,
    Loopback,
    NamespacesUnavailable,
    check_congestion_control,
    check_host,
    check_hosts,
    check_rate,
)
from laconic.lab.emulation.impairments import Impairments


@dataclass(frozen=True)
class Network:
    """The emulated hosts and their network.

    ``bandwidth``: bit/s that each host may send, None for no limit. ``host_bandwidth``: overrides
    for single hosts. ``impairments``: latency, jitter and loss. ``congestion_control``: TCP's
    default on the hosts; None: the lab's choice.
    """

    hosts: int = 4
    bandwidth: float | None = 100e6
    host_bandwidth: Mapping[int, float | None] = field(default_factory=dict)
    impairments: Impairments = field(default_factory=Impairments)
    congestion_control: str | None = None

    def check(self) -> None:
        """Raise ``ValueError`` for settings that cannot be emulated."""
        check_int("hosts", self.hosts, 1)
        check_hosts(self.hosts)
        for host in self.host_bandwidth:
            check_host(host, self.hosts)
        for rate in self.rates():
            if rate is not None:
                check_rate(rate)
        self.impairments.check(self.hosts)
        check_congestion_control(self.congestion_control)

    def rates(self) -> list[float | None]:
        """Return what each host may send, in bit/s."""
        return [self.host_bandwidth.get(host, self.bandwidth) for host in range(self.hosts)]


@contextlib.contextmanager
def emulate(network: Network) -> Iterator[tuple[Cluster | Loopback, str | None]]:
    """Yield the hosts and None, or without namespaces, a `Loopback` and the reason.

    Raises ``OSError`` if jitter or loss cannot be emulated, or latency although namespaces can.
    """
    reason = None
    cluster: Cluster | Loopback
    try:
        cluster = Cluster(
            network.hosts,
            bandwidth=network.bandwidth,
            host_bandwidth=network.host_bandwidth,
            impairments=network.impairments,
            congestion_control=network.congestion_control,
        )
    except NamespacesUnavailable as error:
        network.impairments.check_throttled(str(error))
        cluster, reason = Loopback(network.hosts), str(error)
    with cluster:
        yield cluster, reason
