"""Turn the measurements between hosts into findings."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from laconic.lab.doctor.finding import Finding, Level, check
from laconic.lab.doctor.probes import HostInfo, Pair, Rate
from laconic.links import congestion, job_secret
from laconic.units import format_rate, format_seconds, three_digits

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
    named = {
        host.rank
        for host in report.hosts
        if host.settings.get(congestion.VARIABLE, "none") != "none"
    }
    others = [r for name, ranks in by_name.items() if name != congestion.LONG for r in ranks]
    slow = trip >= congestion.LONG_SECONDS and not named.issuperset(others)
    loss = f"{text}: a lost packet slows them down for long"
    return [check(GROUP, text, (slow, "warning", loss, BBR_REMEDY))]


def advice(report: NetworkReport, workers: int) -> list[Finding]:
    """Return the command that predicts what each recipe costs on this network."""
    rate, trip = report.rate, report.round_trip
    if not rate or trip is None:
        return []
    network = f"--bandwidth {_plain(rate / 1e6)}mbit --latency {_plain(1e3 * trip)}ms"
    command = f"laconic advise --params P --step-time T {network} --workers {workers}"
    text = f"which recipe pays here, with the parameters and the step time of your model: {command}"
    return [Finding("ok", GROUP, text)]


def _plain(value: float) -> str:
    return three_digits(value).replace(",", "")


REMEDIES = {
    "TLS": "set the variables that `laconic keys` prints on all hosts, or on none",
    job_secret.VARIABLE: "give every host the same file",
    congestion.VARIABLE: "set it on all hosts, or on none",
}


def differences(hosts: Sequence[HostInfo]) -> list[Finding]:
    """Return which settings are not the same on all hosts."""
    found = []
    for name in hosts[0].settings if len(hosts) > 1 else ():
        by_value: dict[str, list[int]] = {}
        for host in hosts:
            by_value.setdefault(host.settings.get(name, "none"), []).append(host.rank)
        if len(by_value) > 1:
            if name == job_secret.VARIABLE:  # without showing what a secret's fingerprint is
                numbered = enumerate(sorted({*by_value} - {"none"}), 1)
                shown = {value: f"secret {number}" for number, value in numbered}
                by_value = {shown.get(value, value): r for value, r in by_value.items()}
            level: Level = "warning" if name in ("python", congestion.VARIABLE) else "problem"
            remedy = REMEDIES.get(name, f"install the same {name} on all hosts")
            found.append(Finding(level, GROUP, f"{name} differs: {_by_value(by_value)}", remedy))
    if len(hosts) > 1 and not found:
        names = ", ".join(hosts[0].settings)
        found.append(Finding("ok", GROUP, f"{len(hosts)} hosts, equal in {names}"))
    return found


def _by_value(ranks: Mapping[str, Sequence[int]]) -> str:
    """Return values with their ranks for display, such as "bbr on ranks 0, 1; cubic on rank 2"."""
    if len(ranks) == 1:
        return f"{next(iter(ranks))} on all hosts"
    return "; ".join(f"{value} on {ranks_text(found)}" for value, found in ranks.items())


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the ranks for display, such as "ranks 0, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
