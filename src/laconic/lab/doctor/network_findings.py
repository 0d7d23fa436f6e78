"""Turn the measurements between hosts into findings."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from laconic.lab.doctor.finding import Finding, check
from laconic.lab.doctor.outlook import Outlook
from laconic.lab.doctor.probes import HostInfo, Pair, Rate
from laconic.links import congestion, job_secret
from laconic.units import format_rate, format_seconds, format_share

GROUP = "between hosts"
BBR_REMEDY = (
    "load BBR on every host (modprobe tcp_bbr), and allow it to users: "
    'sysctl net.ipv4.tcp_allowed_congestion_control="reno cubic bbr"'
)


@dataclass
class NetworkReport:
    """The findings and measurements of this host. On rank 0, of all hosts."""

    findings: list[Finding] = field(default_factory=list)
    hosts: list[HostInfo] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    outlook: Outlook | None = None

    @property
    def round_trip(self) -> float | None:
        """The longest round trip in seconds, None if no host reaches another."""
        return max((pair.latency for pair in self.pairs if not pair.error), default=None)

    @property
    def rate(self) -> float | None:
        """The bit/s of the slowest host, None if no host could send."""
        return min((rate.rate for rate in self.rates if not rate.error), default=None)

    def problem(self, text: str, remedy: str) -> None:
        self.findings.append(Finding("problem", GROUP, text, remedy))

    def numbers(self) -> dict[str, Any]:
        """Return the measurements for JSON."""
        return {
            "hosts": [asdict(host) for host in self.hosts],
            "pairs": [asdict(pair) for pair in self.pairs],
            "rates": [asdict(rate) for rate in self.rates],
            **({} if self.outlook is None else {"outlook": asdict(self.outlook)}),
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
    trips = [pair.latency for pair in report.pairs if not pair.error]
    if trips:
        text = (
            f"{len(trips)} of {len(report.pairs)} connections to arbitrary ports work; round trips "
            f"take {format_seconds(min(trips))} to {format_seconds(max(trips))}"
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
    """Return whether one host sends more slowly than the others, and what was lost meanwhile."""
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
    lost = max((rate.lost for rate in good if rate.lost is not None), default=None)
    if lost is not None:
        text += f"; at most {format_share(lost)} of the packets were sent again"
    remedy = (
        "a round takes as long as its slowest host: check its network interface, its cable and "
        "other traffic"
    )
    return [*found, check(GROUP, text, (slowest.rate < median / 2, "warning", text, remedy))]


def congestion_findings(report: NetworkReport) -> list[Finding]:
    """Return which congestion control laconic's connections between these hosts use."""
    trip = report.round_trip
    by_name: dict[str, list[int]] = {}
    for rate in report.rates:
        if rate.congestion:
            by_name.setdefault(rate.congestion, []).append(rate.source)
    if trip is None or not by_name:
        return []
    listed = _by_value(by_name)
    text = f"with round trips of {format_seconds(trip)}, laconic's connections use {listed}"
    named = {host.rank for host in report.hosts if host.settings.get(congestion.VARIABLE)}
    others = [r for name, ranks in by_name.items() if name != congestion.LONG for r in ranks]
    slow = trip >= congestion.LONG_SECONDS and not named.issuperset(others)
    loss = f"{text}: a lost packet slows them down for long"
    return [check(GROUP, text, (slow, "warning", loss, BBR_REMEDY))]


def security_findings(hosts: Sequence[HostInfo]) -> list[Finding]:
    """Return whether TLS and the job's secret are the same on all hosts."""
    hosts = [host for host in hosts if host.settings]
    if len(hosts) < 2:
        return []
    by_switch = _ranks_by(hosts, [f"TLS is {host.settings['TLS']}" for host in hosts])
    secrets = {host.settings["secret"] for host in hosts}
    found = []
    if len(by_switch) > 1:
        text = f"{_by_value(by_switch)}: workers refuse each other"
        remedy = "set the variables that `laconic keys` prints on all hosts, or on none"
        found.append(Finding("problem", GROUP, text, remedy))
    if len(secrets) > 1:
        # Ranks with equal secrets, without showing what a secret's fingerprint is.
        names = {secret: f"secret {n}" for n, secret in enumerate(sorted(secrets - {"none"}), 1)}
        shown = [names.get(host.settings["secret"], "none") for host in hosts]
        listed = _by_value(_ranks_by(hosts, shown))
        text = f"{job_secret.VARIABLE} differs: {listed}: workers refuse each other"
        found.append(Finding("problem", GROUP, text, "give every host the same file"))
    if not found:
        both = "the same secret" if secrets != {"none"} else f"no {job_secret.VARIABLE}"
        text = f"{_by_value(by_switch)}, with {both}"
        found.append(Finding("ok", GROUP, text))
    return found


def version_findings(hosts: Sequence[HostInfo]) -> list[Finding]:
    """Return whether all hosts run the same software."""
    found = []
    for name in hosts[0].versions if len(hosts) > 1 else ():
        by_version = _ranks_by(hosts, [host.versions.get(name, "none") for host in hosts])
        if len(by_version) > 1:
            text = f"{name} differs: {_by_value(by_version)}"
            remedy = f"install the same {name} on all hosts"
            found.append(Finding("warning" if name == "python" else "problem", GROUP, text, remedy))
    if len(hosts) > 1 and not found:
        text = f"{len(hosts)} hosts, all with the same python, torch and laconic"
        found.append(Finding("ok", GROUP, text))
    return found


def _ranks_by(hosts: Sequence[HostInfo], values: Sequence[str]) -> dict[str, list[int]]:
    """Return the ranks of hosts by the hosts' ``values``."""
    ranks: dict[str, list[int]] = {}
    for host, value in zip(hosts, values, strict=True):
        ranks.setdefault(value, []).append(host.rank)
    return ranks


def _by_value(ranks: Mapping[str, Sequence[int]]) -> str:
    """Return values with their ranks for display, such as "bbr on ranks 0, 1; cubic on rank 2"."""
    if len(ranks) == 1:
        return f"{next(iter(ranks))} on all hosts"
    return "; ".join(f"{value} on {ranks_text(found)}" for value, found in ranks.items())


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the ranks for display, such as "ranks 0, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
