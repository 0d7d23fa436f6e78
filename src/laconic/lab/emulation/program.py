"""Run any program on emulated hosts, and report its output, what it sends and its outcome."""

from __future__ import annotations

import contextlib
import json
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from laconic.elastic import COORDINATOR_VARIABLE
from laconic.errors import check_int
from laconic.lab.emulation.cluster import (
    Cluster,
    Loopback,
    emulate,
    job_environment,
    rank_variables,
)
from laconic.lab.emulation.faults import Plan
from laconic.lab.emulation.injection import COORDINATOR_PORT, Happened, Injection
from laconic.lab.emulation.jobs import Job, Outcome, signals_deferred
from laconic.lab.emulation.network import QUANTITIES, Network
from laconic.lab.emulation.output import Stream

__all__ = ["Ended", "Network", "Process", "Settings", "Watch", "run"]

GRACE_SECONDS: Final = 5.0
"""Time for the other processes to end after one has failed."""
_POLL_SECONDS: Final = 0.1  # maximum delay until the end of a process is noticed


@dataclass(frozen=True)
class Settings:
    """The program to run, and where.

    ``argv`` runs ``per_host`` times on each host; torchrun runs once, and starts as many. ``out``
    is the directory for output and a summary; None stores none. ``faults``: what hosts undergo;
    None starts no coordinator either. ``restart``: seconds after which a lost program is started
    again; None for never.
    """

    argv: tuple[str, ...]
    network: Network
    per_host: int | None = None
    out: Path | None = None
    faults: Plan | None = None
    restart: float | None = None

    def check(self) -> None:
        """Raise ``ValueError`` for bad settings. Starts nothing."""
        if not self.argv:
            raise ValueError("no program given: try laconic lab -- python train.py")
        self.network.check()
        if self.faults is not None:
            self.faults.check(self.network.hosts)
        if self.per_host is not None:
            check_int("per-host", self.per_host, 1)
        if shutil.which(self.argv[0]) is None:
            raise ValueError(f"program not found: {self.argv[0]!r}; check its name and PATH")
        for option in self.argv if _is_torchrun(self.argv) else ():
            if option.startswith(("--nnodes", "--nproc", "--standalone")):
                raise ValueError(
                    f"give the lab's --hosts and --per-host in place of torchrun's {option}"
                )


@dataclass(frozen=True)
class Process:
    """A process to start. ``name`` is for display, such as host2/rank2."""

    name: str
    host: int
    argv: Sequence[str]
    env: Mapping[str, str]


@dataclass(frozen=True)
class Failure:
    """How a process failed, and its last lines."""

    process: Process
    outcome: Outcome
    last: Sequence[bytes]


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    ``first`` is the first failure. ``sent`` is the bytes on the wire per host, or None if the hosts
    share this machine's interface. ``happened`` is what the lab did to the hosts.
    """

    first: Failure | None
    seconds: float
    sent: Sequence[int] | None
    happened: Sequence[Happened] = ()


class Watch(Protocol):
    """Receives the events of a run."""

    def started(self, reason: str | None) -> None:
        """The hosts are ready. ``reason`` says why they are not network namespaces, if so."""

    def printed(self, process: Process, error: bool, lines: Sequence[bytes]) -> None:
        """A process has printed lines, on its stderr if ``error``."""

    def happened(self, happened: Happened) -> None:
        """The lab has carried out a part of the plan of faults."""

    def failed(self, first: Failure) -> None:
        """The first process has failed."""

    def ended(self, ended: Ended) -> None:
        """The run has ended, possibly by an exception."""


def run(settings: Settings, watch: Watch) -> Ended:
    """Run the program and report to ``watch``. All processes have ended when this returns.

    Raises ``ValueError`` for bad settings before anything is started, and ``OSError`` if output or
    logs cannot be written.
    """
    settings.check()
    if settings.out is not None:
        try:
            settings.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"cannot create {settings.out}: {error.strerror}") from error
    network, hosts = settings.network, settings.network.hosts
    if settings.faults is not None:  # the coordinator has a host of its own
        rates = {**network.single.get("bandwidth", {}), hosts: None}
        single = {**network.single, "bandwidth": rates}
        network = replace(network, hosts=hosts + 1, single=single)
    with emulate(network) as (cluster, reason), contextlib.ExitStack() as stack:
        cuts = settings.faults and any(fault.kind == "cut" for fault in settings.faults.faults)
        if cuts and reason is not None:
            raise OSError(f"connections cannot be cut here: {reason}")
        watch.started(reason)
        return _Run(settings, cluster, watch, stack).run()


class _Run:
    def __init__(
        self,
        settings: Settings,
        cluster: Cluster | Loopback,
        watch: Watch,
        stack: contextlib.ExitStack,
    ) -> None:
        self._settings, self._cluster, self._watch = settings, cluster, watch
        self._ranks = list(_processes(settings, cluster))
        coordinator = []
        if settings.faults is not None:
            coordinator = [_add_coordinator(self._ranks, cluster)]
        self._processes = [*self._ranks, *coordinator]
        self._job = Job(cluster._processes, [process.host for process in self._ranks])
        self._happened: list[Happened] = []
        self._injection: Injection | None = None
        self._coordinator: subprocess.Popen[bytes] | None = None
        if settings.faults is not None:
            self._injection = Injection(
                settings.faults, settings.restart, cluster, self._job, self, self._report
            )
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._streams: list[tuple[Stream, Stream]] = []
        for process in self._processes:
            name = process.name.rpartition("/")[2]
            logs = [settings.out and settings.out / f"{name}.{end}" for end in ("out", "err")]
            streams = Stream(logs[0]), Stream(logs[1])
            self._streams.append(streams)
            for error, stream in enumerate(streams):
                stack.callback(stream.close)
                origin = stream, process, bool(error)
                self._selector.register(stream.read_end, selectors.EVENT_READ, origin)
        self._writable = True  # whether the watch accepts output
        self._first: Failure | None = None
        self._begin = time.monotonic()
        self._before = self._sent()

    def run(self) -> Ended:
        try:
            if self._injection is not None:
                self.start_coordinator()
            for rank in range(len(self._ranks)):
                self._job.add(self._start(rank))
            while not self._settled():
                self._forward_output()
            self._report_failure()
            deadline = time.monotonic() + GRACE_SECONDS
            while self._job.running() and time.monotonic() < deadline:
                self._forward_output()
        finally:
            with signals_deferred():
                ended = self._end()
        return ended

    def start_rank(self, rank: int) -> None:
        """Start the process of a rank again."""
        process = self._ranks[rank]
        for error, stream in enumerate(self._streams[rank]):  # what its predecessor has left
            self._print(process, bool(error), stream.drain(self._seconds()))
        self._job.replace(rank, self._start(rank))

    def start_coordinator(self) -> None:
        """Start the coordinator."""
        self._coordinator = self._start(len(self._ranks))

    def coordinator_runs(self) -> bool:
        """Return whether the coordinator runs."""
        return self._coordinator is not None and self._coordinator.returncode is None

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        process, (out, err) = self._processes[index], self._streams[index]
        return self._cluster.start(
            process.host,
            process.argv,
            env=process.env,
            stdout=out.write_end,
            stderr=err.write_end,
        )

    def _report(self, happened: Happened) -> None:
        self._happened.append(happened)
        self._watch.happened(happened)

    def _settled(self) -> bool:
        """Return whether the run is over. Carries out the faults that are due."""
        if self._injection is None:
            return self._job.settled(0.0)
        self._injection.act(self._seconds())
        return self._job.settled(0.0) and not self._injection.forgive(self._seconds())

    def _seconds(self) -> float:
        return time.monotonic() - self._begin

    def _forward_output(self) -> None:
        """Forward output for up to `_POLL_SECONDS`."""
        seconds = _POLL_SECONDS
        if self._injection is not None:
            seconds = min(seconds, max(self._injection.next_due() - self._seconds(), 0.0))
        for key, _ in self._selector.select(seconds):
            stream, process, error = key.data
            self._print(process, error, stream.read(self._seconds()))

    def _print(self, process: Process, error: bool, lines: Sequence[bytes]) -> None:
        if lines and self._writable:
            self._writable = False  # stays False if the next line raises
            self._watch.printed(process, error, lines)
            self._writable = True

    def _sent(self) -> list[int] | None:
        """Return the bytes that each host of the program has sent since its network exists."""
        sent = self._cluster.tx_bytes()
        return None if sent is None else sent[: self._settings.network.hosts]

    def _report_failure(self) -> None:
        outcome = self._job.first_failure()
        if outcome is not None:
            out, err = self._streams[outcome.rank]
            for stream, error in ((out, False), (err, True)):
                self._print(self._ranks[outcome.rank], error, stream.drain(self._seconds()))
            process = self._ranks[outcome.rank]
            self._first = Failure(process, outcome, [*(err.last or out.last)])
            self._watch.failed(self._first)

    def _end(self) -> Ended:
        """End all processes, forward their remaining output, and summarize the run."""
        seconds, after = self._seconds(), self._sent()
        self._cluster.close()
        for process, streams in zip(self._processes, self._streams, strict=True):
            for error, stream in enumerate(streams):
                self._print(process, bool(error), stream.drain(self._seconds()))
        sent = None
        if self._before is not None and after is not None:
            sent = [now - then for now, then in zip(after, self._before, strict=True)]
        ended = Ended(self._first, seconds, sent, self._happened)
        if self._settings.out is not None:
            path = self._settings.out / "rates.json"
            _write_rates(path, self._settings, self._cluster, ended)
        self._watch.ended(ended)
        return ended


def _processes(settings: Settings, cluster: Cluster | Loopback) -> Iterator[Process]:
    """Yield the processes to start, by rank."""
    shared = job_environment(cluster, {"PYTHONUNBUFFERED": "1"})
    hosts, per_host = settings.network.hosts, settings.per_host or 1
    shared["GROUP_WORLD_SIZE"] = str(hosts)  # without the coordinator's host
    # torchrun takes its options from these.
    shared |= {"PET_NNODES": str(hosts), "PET_NPROC_PER_NODE": str(per_host)}
    shared |= {f"PET_{name}": shared[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    for host in range(hosts):
        env = {**shared, **cluster.slowdown(host, per_host), "PET_NODE_RANK": str(host)}
        if _is_torchrun(settings.argv):
            name = f"host{host}/rank{host}" if per_host == 1 else f"host{host}"
            yield Process(name, host, settings.argv, env)
            continue
        for rank in range(host * per_host, (host + 1) * per_host):
            variables = rank_variables(rank, host, per_host, per_host * hosts)
            yield Process(f"host{host}/rank{rank}", host, settings.argv, {**env, **variables})


def _is_torchrun(argv: Sequence[str]) -> bool:
    return Path(argv[0]).name == "torchrun" or "torch.distributed.run" in argv


def _add_coordinator(ranks: list[Process], cluster: Cluster | Loopback) -> Process:
    """Return the coordinator's process, and have elastic workers find it by their environment."""
    host = len(cluster.addresses) - 1
    address = cluster.addresses[host]
    port = str(COORDINATOR_PORT if cluster.emulated else cluster.free_port())
    for rank, process in enumerate(ranks):
        env = {**process.env, COORDINATOR_VARIABLE: f"{address}:{port}"}
        ranks[rank] = replace(process, env=env)
    command = [sys.executable, "-m", "laconic", "coordinator", "--address", f"{address}:{port}"]
    return Process("coordinator", host, command, job_environment(cluster, {}))


def _write_rates(
    path: Path,
    settings: Settings,
    cluster: Cluster | Loopback,
    ended: Ended,
) -> None:
    """Write the file. Raises ``OSError`` with its name."""
    network = settings.network
    values = zip(*map(network.each, QUANTITIES), strict=True)
    hosts = [
        {"name": f"host{host}", "address": address, **dict(zip(QUANTITIES, own, strict=True))}
        for host, (address, own) in enumerate(zip(cluster.addresses, values, strict=False))
    ]
    document: dict[str, Any] = {
        "command": settings.argv,
        "network": "emulated" if cluster.emulated else "throttled",
        "network_seed": network.seed,
        "congestion_control": cluster.congestion_control,
        "hosts": hosts,
        "seconds": ended.seconds,
        "failed": ended.first
        and {"process": ended.first.process.name, "how": ended.first.outcome.how},
        "sent": ended.sent,
    }
    if settings.faults is not None:
        document["faults"] = [vars(happened) for happened in ended.happened]
    try:
        path.write_text(json.dumps(document, indent=1) + "\n")
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}") from error
