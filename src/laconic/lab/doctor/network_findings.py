"""Turn the measurements between hosts into findings."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from laconic.lab.doctor.connections import advice
from laconic.lab.doctor.finding import Finding
from laconic.lab.doctor.probes import HostInfo, Pair, Rate
from laconic.units import format_rate

GROUP = "between hosts"
CLOCK_SECONDS = 0.5
"""Clocks further apart than this make logs and metrics of several hosts hard to compare."""


@dataclass
class NetworkReport:
    """The findings and measurements of this host. On rank 0, of all hosts."""

    findings: list[Finding] = field(default_factory=list)
    hosts: list[HostInfo] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)

    def problem(self, text: str, remedy: str) -> None:
        self.findings.append(Finding("problem", GROUP, text, remedy))

    def numbers(self) -> dict[str, Any]:
        """Return the measurements for JSON."""
        return {
            "hosts": [asdict(host) for host in self.hosts],
            "pairs": [asdict(pair) for pair in self.pairs],
            "rates": [asdict(rate) for rate in self.rates],
        }


def connection_findings(report: NetworkReport) -> list[Finding]:
    """Return which hosts cannot be reached, by target."""
    by_rank = {host.rank: host for host in report.hosts}
    found = []
    for target, host in by_rank.items():
        failed = [p for p in report.pairs if p.target == target and p.error]
        if failed:
            reasons = ", ".join(sorted({pair.error for pair in failed}))
            text = (
                f"{host} cannot be reached at port {host.port} by "
                f"{ranks_text([pair.source for pair in failed])}: {reasons}"
            )
            refused = reasons == "connection refused"
            remedy = (
                "check that this is the host's address on the network between the hosts "
                "(MASTER_ADDR and GLOO_SOCKET_IFNAME determine it) and that no firewall refuses"
                if refused
                else connection_remedy(TimeoutError(), "that host")
            )
            found.append(Finding("problem", GROUP, text, remedy))
    good = [pair.latency for pair in report.pairs if not pair.error]
    if good:
        text = (
            f"{len(good)} of {len(report.pairs)} connections to arbitrary ports work; latency "
            f"{_seconds(min(good))} to {_seconds(max(good))} one way"
        )
        found.append(Finding("ok", GROUP, text))
    return found


def connection_remedy(error: OSError, who: str, port: int | None = None) -> str:
    """Return what to do about a failed connection to the host ``who``."""
    if isinstance(error, socket.gaierror):
        return "use its address, or add the name to /etc/hosts on this host"
    if isinstance(error, ConnectionRefusedError):
        return f"start laconic doctor on {who} too, and check the address"
    ports = f"port {port} and " if port else ""
    return (
        f"check the address, and let the firewall of {who} and of the network pass TCP from the "
        f"other hosts: {ports}the ports of net.ipv4.ip_local_port_range, which laconic, gloo and "
        "NCCL use"
    )


def rate_findings(report: NetworkReport) -> list[Finding]:
    """Return whether one host sends more slowly than the others."""
    good = [rate for rate in report.rates if not rate.error]
    found = [
        Finding(
            "problem",
            GROUP,
            f"sending from rank {rate.source} to rank {rate.target} failed: {rate.error}",
            "pings work but bulk data does not: check that the MTU is equal on all hosts and "
            "on the path",
        )
        for rate in report.rates
        if rate.error
    ]
    if not good:
        return found
    slowest = min(good, key=lambda rate: rate.rate)
    median = statistics.median(rate.rate for rate in good)
    text = (
        f"in a ring, all at once, hosts send {format_rate(slowest.rate)} (rank {slowest.source} "
        f"to {slowest.target}) or more; median {format_rate(median)}"
    )
    if slowest.rate < median / 2:
        remedy = (
            "a round takes as long as its slowest host: check its network interface, its cable "
            "and other traffic"
        )
        return [*found, Finding("warning", GROUP, text, remedy)]
    return [*found, Finding("ok", GROUP, text)]


def clock_findings(report: NetworkReport) -> list[Finding]:
    """Return how far the hosts' clocks differ from rank 0's."""
    measured = [pair for pair in report.pairs if pair.source == 0 and not pair.error]
    off = [pair for pair in measured if abs(pair.offset) - pair.uncertainty > CLOCK_SECONDS]
    found = [
        Finding(
            "warning",
            GROUP,
            f"the clock of rank {pair.target} is {abs(pair.offset):.3g} s "
            f"{'ahead of' if pair.offset > 0 else 'behind'} rank 0's "
            f"(± {_seconds(pair.uncertainty)}): times in logs and metrics do not compare",
            "run an NTP client there (chronyd, systemd-timesyncd)",
        )
        for pair in off
    ]
    if measured and not off:
        worst = max(measured, key=lambda pair: abs(pair.offset))
        text = (
            f"clocks agree: the largest difference from rank 0's is {_seconds(abs(worst.offset))} "
            f"± {_seconds(worst.uncertainty)}"
        )
        found.append(Finding("ok", GROUP, text))
    return found


def choice_findings(report: NetworkReport) -> list[Finding]:
    """Return what connections between these hosts use, and how many packets are lost."""
    good = [pair.latency for pair in report.pairs if not pair.error]
    lost = [rate.lost for rate in report.rates if not rate.error]
    return [advice(2 * max(good), max(lost, default=0.0))] if good else []


def version_findings(hosts: Sequence[HostInfo]) -> list[Finding]:
    """Return whether all hosts run the same software."""
    found = []
    for name in hosts[0].versions if len(hosts) > 1 else ():
        by_version: dict[str, list[int]] = {}
        for host in hosts:
            by_version.setdefault(host.versions.get(name, "none"), []).append(host.rank)
        if len(by_version) > 1:
            listed = "; ".join(f"{v} on {ranks_text(ranks)}" for v, ranks in by_version.items())
            text = f"{name} differs: {listed}"
            remedy = f"install the same {name} on all hosts"
            found.append(Finding("warning" if name == "python" else "problem", GROUP, text, remedy))
    if len(hosts) > 1 and not found:
        text = f"{len(hosts)} hosts, all with the same python, torch and laconic"
        found.append(Finding("ok", GROUP, text))
    return found


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the ranks for display, such as "ranks 0, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
