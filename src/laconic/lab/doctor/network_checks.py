"""Check the network between hosts: who is there, who reaches whom, and versions.

Every host listens on a free port and publishes it in torch's store, which rank 0 serves at
MASTER_ADDR:MASTER_PORT. Then each host connects to every other. Every wait has a timeout: a host
that does not join or stops answering is a finding.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from laconic.lab.doctor import connections
from laconic.lab.doctor.finding import Finding
from laconic.lab.doctor.host_checks import Environment, versions
from laconic.lab.doctor.network_findings import (
    GROUP,
    NetworkReport,
    advice,
    congestion_findings,
    connection_findings,
    connection_remedy,
    differences,
    ranks_text,
    rate_findings,
)
from laconic.lab.doctor.probes import CONNECT_SECONDS, HostInfo, Listener, Pair, Rate, ping, reason
from laconic.lab.doctor.probes import send as send_bulk
from laconic.links.addresses import address_toward
from laconic.links.attempts import listen_at, serve

AT_ONCE = 16
GRACE_SECONDS = 15.0
"""Time that every stage of the check may take beyond its minimum."""
_RESTART = "check rank 0's host, then run laconic doctor again on all hosts"


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


def rendezvous_of(environ: Environment) -> Rendezvous:
    """Return the rendezvous in torchrun's variables.

    Raises ``ValueError`` if some of the variables are missing.
    """
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in environ:
            raise ValueError(f"RANK is set, as by torchrun, but {name} is not")
    by_host = "GROUP_RANK" in environ and "GROUP_WORLD_SIZE" in environ
    rank, world = ("GROUP_RANK", "GROUP_WORLD_SIZE") if by_host else ("RANK", "WORLD_SIZE")
    numbers = {}
    for name in (rank, world, "MASTER_PORT"):
        try:
            numbers[name] = int(environ[name])
        except ValueError:
            raise ValueError(
                f"the variable {name} must be an integer, not {environ[name]!r}"
            ) from None
    return Rendezvous(
        numbers[rank],
        numbers[world],
        environ["MASTER_ADDR"],
        numbers["MASTER_PORT"],
        agent=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def check_network(
    rendezvous: Rendezvous,
    host_findings: Sequence[Finding] = (),
    *,
    timeout: float = 60.0,
    address: str | None = None,
    settings: Mapping[str, str] | None = None,
) -> NetworkReport:
    """Check the network together with the other hosts.

    Takes at most ``timeout`` seconds plus the time of the tests. Rank 0 also receives the other
    hosts' ``host_findings``. ``address`` and ``settings`` override this host's.
    """
    report = NetworkReport()
    own = address_toward(rendezvous.host) or "127.0.0.1"
    settings = {**versions(), **connections.settings()} if settings is None else settings
    end = time.monotonic() + timeout
    longest = timeout + 4 * (GRACE_SECONDS + rendezvous.world / AT_ONCE * CONNECT_SECONDS)

    def run() -> None:
        try:
            with Listener(own) as listener:
                where = socket.gethostname(), address or own, listener.port
                me = HostInfo(rendezvous.rank, *where, settings)
                store = _store(rendezvous, end, timeout, report)
                if store is not None:
                    _Session(rendezvous, me, host_findings, store, end, timeout, report).run()
        except (RuntimeError, OSError) as error:  # the store's host is gone
            text = f"the check was interrupted: {str(error).splitlines()[0]}"
            report.problem(text, _RESTART)

    # torch's store waits for a host that vanished. In that case this thread is abandoned.
    thread = threading.Thread(target=run, daemon=True, name="laconic-doctor")
    thread.start()
    thread.join(longest)
    if thread.is_alive():
        text = f"the check did not end: {rendezvous.host}:{rendezvous.port} no longer answers"
        report.problem(text, _RESTART)
    return report


def _store(rendezvous: Rendezvous, end: float, timeout: float, report: NetworkReport) -> Any:
    """Return torch's store at the rendezvous. If it is unavailable, add a problem, return None."""
    where = f"{rendezvous.host}:{rendezvous.port}"
    serves = rendezvous.rank == 0 and not rendezvous.agent
    listening = None
    if serves:
        try:
            listening = listen_at(rendezvous.host, rendezvous.port)
        except OSError as error:
            report.problem(
                f"this host, which is rank 0, cannot listen at {where}: {reason(error)}",
                "give an address of rank 0's host, and a port that no program there uses "
                "(ss -ltnp), as --master (MASTER_ADDR and MASTER_PORT) on every host",
            )
            return None
    elif (failure := _connection_error(rendezvous, end)) is not None:
        text = f"cannot reach rank 0 at {where} within {timeout:g} s: {reason(failure)}"
        report.problem(text, connection_remedy(failure, "rank 0's host", rendezvous.port))
        return None
    seconds = timedelta(seconds=max(end - time.monotonic(), 1.0))
    if listening is not None:
        store = serve(listening, rendezvous.host, rendezvous.port, None, wait=False)
        store.set_timeout(seconds)
    else:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            rendezvous.host,
            rendezvous.port,
            is_master=serves,
            timeout=seconds,
            wait_for_workers=False,
        )
    return dist.PrefixStore("laconic doctor", store)  # type: ignore[attr-defined]


def _connection_error(rendezvous: Rendezvous, end: float) -> OSError | None:
    """Try to connect to rank 0 until it succeeds. Return the last error if the time is over."""
    while True:
        seconds = max(min(CONNECT_SECONDS, end - time.monotonic()), 0.1)
        try:
            socket.create_connection((rendezvous.host, rendezvous.port), timeout=seconds).close()
            return None
        except OSError as error:
            if time.monotonic() >= end:
                return error
        time.sleep(min(0.3, max(end - time.monotonic(), 0)))


@dataclass
class _Session:
    """The check as one host runs it. Fills in ``report``."""

    rendezvous: Rendezvous
    me: HostInfo
    host_findings: Sequence[Finding]
    store: Any
    end: float
    timeout: float
    report: NetworkReport

    def run(self) -> None:
        rank, world, report = self.rendezvous.rank, self.rendezvous.world, self.report
        if self.store.add(f"taken/{rank}", 1) > 1:
            text = f"another host already joined as rank {rank}"
            report.problem(text, "give every host a different rank, from 0 up")
            return
        self.store.set(f"host/{rank}", json.dumps(asdict(self.me)))
        hosts = self._hosts()
        if hosts is None:
            return
        report.hosts = list(hosts.values())
        others = [host for other, host in hosts.items() if other != rank]
        # Start with the next rank, so that not all hosts connect to the same one at once.
        others.sort(key=lambda host: (host.rank - rank) % world)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            report.pairs = list(pool.map(lambda host: ping(rank, host), others))
        rounds = len(others) / AT_ONCE * CONNECT_SECONDS
        self._barrier("pinged", hosts, GRACE_SECONDS + rounds)
        reached = [pair.target for pair in report.pairs if not pair.error]
        if others and others[0].rank in reached:
            report.rates = [send_bulk(rank, others[0])]
        self._barrier("sent", hosts, GRACE_SECONDS)
        if rank == 0:
            self._collect_reports(hosts)
        else:
            self._send_report()

    def _hosts(self) -> dict[int, HostInfo] | None:
        """Return the hosts that joined in time, as decided by rank 0."""
        store, rendezvous = self.store, self.rendezvous
        ranks = list(range(rendezvous.world))
        if rendezvous.rank == 0:
            missing = self._wait([f"host/{r}" for r in ranks], self.end - time.monotonic())
            present = [r for r in ranks if f"host/{r}" not in missing]
            store.set("present", json.dumps(present))
        elif self._wait(["present"], self.end - time.monotonic() + GRACE_SECONDS):
            text = "rank 0 did not report which hosts are present"
            self.report.problem(text, "run laconic doctor again on all hosts")
            return None
        present = json.loads(store.get("present"))
        absent = [r for r in ranks if r not in present]
        if rendezvous.rank in absent:
            text = f"rank {rendezvous.rank} joined after rank 0 had stopped waiting"
            self.report.problem(text, "start laconic doctor on all hosts within --timeout")
            return None
        if absent:
            self.report.problem(
                f"{ranks_text(absent)} of {rendezvous.world} did not join within "
                f"{self.timeout:g} s",
                "run laconic doctor there too, with the same --master and --hosts; it then says "
                f"why it does not reach {rendezvous.host}:{rendezvous.port}",
            )
        return {r: HostInfo(**json.loads(store.get(f"host/{r}"))) for r in present}

    def _wait(self, keys: Sequence[str], seconds: float) -> list[str]:
        """Wait until the store has all ``keys``. Return those that are missing."""
        end = time.monotonic() + seconds
        missing = list(keys)
        while missing := [key for key in missing if not self.store.check([key])]:
            if time.monotonic() >= end:
                break
            time.sleep(0.05)
        return missing

    def _barrier(self, stage: str, hosts: Mapping[int, HostInfo], seconds: float) -> None:
        """Wait until all hosts have finished a stage. A missing one is reported later."""
        self.store.set(f"{stage}/{self.rendezvous.rank}", "")
        self._wait([f"{stage}/{rank}" for rank in hosts], seconds)

    def _send_report(self) -> None:
        """Send this host's measurements and findings to rank 0."""
        report, store = self.report, self.store
        findings = [asdict(f) for f in self.host_findings if f.level != "ok"]
        message = json.dumps({**report.numbers(), "findings": findings})
        store.set(f"report/{self.rendezvous.rank}", message)
        self._wait(["over"], 2 * GRACE_SECONDS)
        store.add("left", 1)
        report.findings += connection_findings(report) + differences(report.hosts)
        text = "rank 0 reports rates, losses, and what differs between hosts"
        report.findings.append(Finding("ok", GROUP, text))

    def _collect_reports(self, hosts: Mapping[int, HostInfo]) -> None:
        """Collect the reports of all hosts on rank 0 and add the findings."""
        report, store = self.report, self.store
        others = [rank for rank in hosts if rank != 0]
        missing = self._wait([f"report/{rank}" for rank in others], GRACE_SECONDS)
        for rank in others:
            if f"report/{rank}" in missing:
                remedy = "look at that host's own output"
                report.problem(f"{hosts[rank]} stopped answering during the tests", remedy)
                continue
            received = json.loads(store.get(f"report/{rank}"))
            report.pairs += [Pair(**pair) for pair in received["pairs"]]
            report.rates += [Rate(**rate) for rate in received["rates"]]
            for finding in map(lambda f: Finding(**f), received["findings"]):
                text = f"{hosts[rank]}: {finding.text}"
                report.findings.append(Finding(finding.level, finding.group, text, finding.remedy))
        store.set("over", "")
        if not self.rendezvous.agent:  # the store ends with this process
            end = time.monotonic() + 2.0
            while store.add("left", 0) < len(others) - len(missing) and time.monotonic() < end:
                time.sleep(0.05)
        for findings in (connection_findings, rate_findings, congestion_findings):
            report.findings += findings(report)
        report.findings += differences(report.hosts) + advice(report, self.rendezvous.world)
