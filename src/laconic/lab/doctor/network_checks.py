"""Check the network between hosts, by the connections that training uses.

Hosts announce themselves in torch's store, which rank 0 serves at MASTER_ADDR:MASTER_PORT. Once all
are there, they connect as for `laconic.attach`, and measure the network as `laconic.auto` does.
Every wait has a timeout: a host that does not join, or that another one does not reach, is a
finding.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from laconic.advisor.network import own_rates, speed_to, unequal_hosts
from laconic.lab.doctor.finding import Finding, Level, check
from laconic.lab.doctor.host_checks import Environment, versions
from laconic.links import congestion
from laconic.links.attempts import listen_at, serve
from laconic.links.rank_sets import agreed_link
from laconic.policy.choice import lost_share
from laconic.policy.probe import probe
from laconic.units import format_rate, format_seconds, format_share, three_digits

GROUP = "between hosts"
GRACE_SECONDS = 5.0
"""How much longer than rank 0 the others wait for the hosts, and rank 0 for the others' end."""
PROBE_SECONDS = 30.0
"""The most that measuring takes."""
BBR_REMEDY = (
    "load BBR on every host (modprobe tcp_bbr), and allow it to users: "
    'sysctl net.ipv4.tcp_allowed_congestion_control="reno cubic bbr"'
)


@dataclass(frozen=True)
class Rendezvous:
    """How this host joins the check: as ``rank`` of ``world``, at ``host``:``port``.

    ``agent`` means that another program (torchrun's agent) already serves the store there.
    """

    rank: int
    world: int
    host: str
    port: int
    agent: bool = False

    def __post_init__(self) -> None:
        if self.world < 1 or not 0 <= self.rank < self.world:
            raise ValueError(
                f"rank must be from 0 to world - 1, and world at least 1, not rank {self.rank} of "
                f"{self.world}"
            )
        if not self.host or not 0 < self.port < 65536:
            raise ValueError(
                f"master must be HOST:PORT with a port from 1 to 65535, not {self.host}:{self.port}"
            )

    @property
    def remedy(self) -> str:
        """What to do where hosts do not reach each other."""
        return (
            "check that --master (or MASTER_ADDR) is an address of rank 0's host with a free port, "
            "and that GLOO_SOCKET_IFNAME, if set, names the network between the hosts; let the "
            f"firewalls pass TCP between all hosts: port {self.port}, and the ports of "
            "net.ipv4.ip_local_port_range or LACONIC_PORTS"
        )


def rendezvous_of(environ: Environment) -> Rendezvous:
    """Return the rendezvous in torchrun's variables.

    Raises ``ValueError`` if some of the variables are missing or no numbers.
    """
    by_host = "GROUP_RANK" in environ and "GROUP_WORLD_SIZE" in environ
    names = ("GROUP_RANK", "GROUP_WORLD_SIZE") if by_host else ("RANK", "WORLD_SIZE")
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        rank, world, port = (int(environ[name]) for name in (*names, "MASTER_PORT"))
        return Rendezvous(rank, world, environ["MASTER_ADDR"], port, agent)
    except KeyError as error:
        raise ValueError(f"RANK is set, as by torchrun, but {error.args[0]} is not") from None


@dataclass
class Report:
    """What this host has found: its ``findings``, and ``numbers`` for JSON."""

    findings: list[Finding] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def add(self, level: Level, text: str, remedy: str = "") -> None:
        """Add a finding."""
        self.findings.append(Finding(level, GROUP, text, remedy))


def check_network(
    rendezvous: Rendezvous,
    host_findings: Sequence[Finding] = (),
    *,
    timeout: float = 60.0,
) -> Report:
    """Check the network together with the other hosts, in a process of its own.

    Hosts have ``timeout`` seconds to join, and as long to connect. Rank 0 also receives the other
    hosts' ``host_findings``.
    """
    report = Report()
    # Where training would listen: `laconic.links.addresses.own_address` reads these.
    os.environ.update(
        MASTER_ADDR=rendezvous.host, WORLD_SIZE=str(rendezvous.world), LOCAL_WORLD_SIZE="1"
    )
    card = {
        "host": socket.gethostname(),
        "versions": versions(),
        "bbr": congestion.LONG in congestion.available(),
        "findings": [asdict(f) for f in host_findings if f.level != "ok"],
    }

    def run() -> None:
        stage = f"rank 0 cannot be reached at {rendezvous.host}:{rendezvous.port}"
        try:
            store = _store(rendezvous, timeout)
            stage = "the check was interrupted"
            hosts = _meet(rendezvous, card, store, timeout, report)
            if hosts:
                stage = "the hosts cannot connect to each other"
                _measure(rendezvous, hosts, store, timeout, report)
            _leave(rendezvous, store, len(hosts))
        except (RuntimeError, OSError, ValueError) as error:
            report.add("problem", f"{stage}: {str(error).splitlines()[0]}", rendezvous.remedy)

    # torch's store waits for a host that vanished. In that case this thread is abandoned.
    thread = threading.Thread(target=run, daemon=True, name="laconic-doctor")
    thread.start()
    thread.join(3 * timeout + GRACE_SECONDS + PROBE_SECONDS)
    if thread.is_alive():
        text = f"the check did not end: {rendezvous.host}:{rendezvous.port} no longer answers"
        report.add("problem", text, rendezvous.remedy)
    return report


def _store(rendezvous: Rendezvous, timeout: float) -> Any:
    """Return torch's store at the rendezvous, which rank 0 serves unless an agent does."""
    host, port, seconds = rendezvous.host, rendezvous.port, timedelta(seconds=timeout)
    serves = rendezvous.rank == 0 and not rendezvous.agent
    listening = listen_at(host, port) if serves else None
    if listening is not None:
        store = serve(listening, host, port, None, wait=False)
    else:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=serves, timeout=seconds, wait_for_workers=False
        )
    store.set_timeout(seconds)
    return dist.PrefixStore("laconic doctor", store)  # type: ignore[attr-defined]


def _meet(
    rendezvous: Rendezvous, card: Mapping[str, Any], store: Any, timeout: float, report: Report
) -> list[dict[str, Any]]:
    """Return what all hosts have announced, by rank; nothing if one of them is missing."""
    rank, ranks = rendezvous.rank, range(rendezvous.world)
    if store.add(f"taken/{rank}", 1) > 1:
        report.add(
            "problem",
            f"another host already joined as rank {rank}",
            "give every host a different rank, from 0 up",
        )
        return []
    store.set(f"host/{rank}", json.dumps(card))
    if rank == 0:
        absent = _missing(store, [f"host/{r}" for r in ranks], timeout)
        store.set("absent", json.dumps([r for r in ranks if f"host/{r}" in absent]))
    elif _missing(store, ["absent"], timeout + GRACE_SECONDS):
        report.add("problem", "rank 0 did not say who is there", rendezvous.remedy)
        return []
    absent = json.loads(store.get("absent"))
    present = {r: json.loads(store.get(f"host/{r}")) for r in ranks if r not in absent}
    report.numbers["hosts"] = [
        {"rank": r, "host": h["host"], **h["versions"]} for r, h in present.items()
    ]
    if rank == 0:
        for r, host in present.items():
            for finding in map(lambda f: Finding(**f), host["findings"] if r else ()):
                text = f"rank {r} ({host['host']}): {finding.text}"
                report.findings.append(Finding(finding.level, finding.group, text, finding.remedy))
    if absent:
        report.add(
            "problem",
            f"{ranks_text(absent)} of {rendezvous.world} did not join within {timeout:g} s",
            "run laconic doctor there too, with the same --master and --hosts; it then says why it "
            f"does not reach {rendezvous.host}:{rendezvous.port}",
        )
        return []
    return [*present.values()]


def _missing(store: Any, keys: Sequence[str], seconds: float) -> list[str]:
    """Wait until the store has all ``keys``. Return those that are missing."""
    end = time.monotonic() + seconds
    missing = list(keys)
    while missing := [key for key in missing if not store.check([key])]:
        if time.monotonic() >= end:
            break
        time.sleep(0.05)
    return missing


def _leave(rendezvous: Rendezvous, store: Any, hosts: int) -> None:
    """Leave the store. It ends with rank 0, which therefore is the last."""
    store.add("left", 1)
    if rendezvous.rank == 0 and not rendezvous.agent:
        end = time.monotonic() + GRACE_SECONDS
        while store.add("left", 0) < hosts and time.monotonic() < end:
            time.sleep(0.05)


def _measure(
    rendezvous: Rendezvous,
    hosts: Sequence[Mapping[str, Any]],
    store: Any,
    timeout: float,
    report: Report,
) -> None:
    """Connect all hosts, and add what they measure together, which is the same on each of them."""
    report.findings += differences([host["versions"] for host in hosts])
    seconds, cpu = timedelta(seconds=timeout), torch.device("cpu")
    dist.init_process_group(
        "gloo", store=store, rank=rendezvous.rank, world_size=rendezvous.world, timeout=seconds
    )
    link = agreed_link(None, cpu, timeout)
    before = link.sent()
    found = probe(link, cpu)
    own = [speed_to(rank, before, link.sent()) for rank in range(link.size)]
    rates = own_rates(link.gather(torch.tensor(own, dtype=torch.float64)))
    packets = link.gather(torch.tensor([found.packets, found.again], dtype=torch.float64)).sum(0)
    link.close()
    dist.destroy_process_group()
    lost = lost_share(float(packets[0]), float(packets[1]), found.latency, len(hosts))
    trip = 2 * found.latency
    report.numbers |= {"rate": found.rate, "round_trip": trip, "loss": lost}
    text = f"{len(hosts)} hosts connect; all at once, each sends {format_rate(found.rate)} or more"
    slow = unequal_hosts(rates)
    factor = float(rates.median() / rates.min()) if slow else 1.0
    report.findings.append(
        check(
            GROUP,
            f"{text}; a round trip takes {format_seconds(trip)}; {format_share(lost)} of the "
            "packets are lost",
            (
                slow,
                "warning",
                f"{text}; the network of rank {int(rates.argmin())} is {factor:.2g} times slower "
                "than the median rank's, and the others wait for it",
                "check that host's network interface, its cable and other traffic",
            ),
        )
    )
    without = [rank for rank, host in enumerate(hosts) if not host["bbr"]]
    if trip >= congestion.LONG_SECONDS and without:
        far = f"round trips of {format_seconds(trip)} need BBR, which {ranks_text(without)} "
        report.add(
            "warning", f"{far}cannot use: a lost packet slows them down for long", BBR_REMEDY
        )
    network = f"--bandwidth {_plain(found.rate / 1e6)}mbit --latency {_plain(1e3 * trip)}ms"
    command = f"laconic advise --params P --step-time T {network} --workers {len(hosts)}"
    report.add("ok", f"which recipe pays, with P and T of your model: {command}")


def _plain(value: float) -> str:
    return three_digits(value).replace(",", "")


def differences(by_rank: Sequence[Mapping[str, str]]) -> list[Finding]:
    """Return which versions are not the same on all hosts."""
    found = []
    for name in by_rank[0]:
        ranks: dict[str, list[int]] = {}
        for rank, own in enumerate(by_rank):
            ranks.setdefault(own[name], []).append(rank)
        if len(ranks) > 1:
            level: Level = "warning" if name == "python" else "problem"
            parts = "; ".join(f"{value} on {ranks_text(each)}" for value, each in ranks.items())
            remedy = f"install the same {name} on all hosts"
            found.append(Finding(level, GROUP, f"{name} differs: {parts}", remedy))
    return found


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the ranks for display, such as "ranks 0, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
