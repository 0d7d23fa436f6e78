"""Emulate a cluster on one machine: hosts with a network stack each, and the programs on them.

`Cluster` is the network. `Loopback` has the same methods, and does not emulate a network. `launch`
starts the same program on every host, with the environment variables that torchrun sets.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Final, final

from laconic.lab.emulation.forward import Counts, ForwardError, counts
from laconic.lab.emulation.jobs import (
    KILL_SECONDS,
    Job,
    Output,
    Processes,
    close_all,
    read_all,
    signals_deferred,
    tail,
    unnamed_file,
)
from laconic.lab.emulation.namespaces import Entry, Plan
from laconic.lab.emulation.network import Network, check_host
from laconic.links.rank_sets import BANDWIDTH_VARIABLE, LATENCY_VARIABLE

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Cluster",
    "ForwardError",
    "Loopback",
    "NamespacesUnavailable",
    "Network",
    "emulate",
    "launch",
]

INTERFACE_VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_BUILD_SECONDS: Final = 60.0  # time for the keeper to set up the network, which takes 0.2 s
_COMMAND_SECONDS: Final = 10.0  # time for the keeper to answer, which takes milliseconds


class NamespacesUnavailable(OSError):  # noqa: N818
    """Network namespaces are unavailable here. The message gives the reason in one line."""


class Hosts(ABC):
    """Hosts with their ``addresses``, and the programs on them.

    Everything ends with the `with` block, and with this process however it ends.
    """

    def __init__(self, addresses: list[str]) -> None:
        self.addresses = addresses
        self._processes = Processes()

    @abstractmethod
    def entry(self, host: int) -> Entry:
        """Return how a child of this process enters `host`."""

    @abstractmethod
    def free_port(self) -> int:
        """Return a port for a server on a host, which nothing uses now."""

    def slowdown(self, host: int, per_host: int) -> dict[str, str]:
        """Return the variables by which each of a host's ranks slows down laconic's messages."""
        return {}

    def start(
        self,
        host: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: Output = None,
        stderr: Output = None,
    ) -> subprocess.Popen[bytes]:
        """Start `argv` on `host` in its own session, with `env`.

        All that it starts dies with this process. Send signals to its process group: on an emulated
        host, the process is the program's parent. If the program cannot be run, it exits with code
        127 and prints the reason on its stderr. Raises ValueError if the host does not exist or the
        cluster is closed.
        """
        return self._processes.start(host, self.entry(host), argv, env, stdout, stderr)

    def signal(self, host: int, number: int) -> None:
        """Send a signal to the programs on `host` and to all that they have started."""
        check_host(host, len(self.addresses))
        self._processes.signal_host(host, number)

    def close(self) -> None:
        """End all processes. Idempotent."""
        with signals_deferred():
            self._processes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@final
class Cluster(Hosts):
    """Hosts connected by a switch on this machine, each with its own address, name and bandwidth.

    Host h is `host{h}` at `addresses[h]`, reachable only from the other hosts. What a host receives
    is limited only by the senders.

    Everything ends with the `with` block, and with this process however it ends. Raises ValueError
    for a network that cannot be emulated, NamespacesUnavailable if the kernel refuses, and
    ForwardError if it allows namespaces but packets cannot be delayed or dropped here.
    """

    emulated: Final = True
    interface: Final = "eth0"

    def __init__(self, network: Network) -> None:
        network.check()
        forward = network.forward()
        super().__init__([f"10.77.0.{host + 1}" for host in range(network.hosts)])
        self._ports = itertools.cycle(range(29500, 32000))  # below the ephemeral ports
        plan = Plan(
            launcher=os.getpid(),
            addresses=self.addresses,
            prefix=24,
            rates=[None if rate is None else round(rate / 8) for rate in network.each("bandwidth")],
            forward=asdict(forward) if forward is not None else None,
            path=[os.path.abspath(entry) for entry in sys.path],
            congestion_control=network.congestion_control,
        )
        with signals_deferred():
            keeper, channel, user, descriptors, report = _start_keeper(plan)
            open_descriptors = [channel, *user, *descriptors]
            self._release = weakref.finalize(self, _end_keeper, keeper, open_descriptors)
            self._channel = channel
            self._unreachable: dict[int, list[int]] = {}
            self._user = user
            self._pids, self._counters, *self._networks = descriptors
            self._forwarded = plan.forward is not None
            self.congestion_control = str(report["congestion_control"])

    def cut(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Let no packet pass between the two hosts of each pair, in either direction.

        This replaces the pairs of the call before. Connections stay open, and go on when their
        packets pass again. Raises OSError if the kernel refuses.
        """
        unreachable: dict[int, set[int]] = {}
        for a, b in pairs:
            check_host(a, len(self.addresses))
            check_host(b, len(self.addresses))
            unreachable.setdefault(a, set()).add(b)
            unreachable.setdefault(b, set()).add(a)
        for host in sorted({*self._unreachable, *unreachable}):
            before, now = self._unreachable.get(host, []), sorted(unreachable.get(host, ()))
            if before != now:
                self._command({"host": host, "before": before, "now": now})
                self._unreachable[host] = now

    def _command(self, command: Mapping[str, object]) -> None:
        """Have the keeper do something, and wait until it has."""
        if not self._release.alive:
            raise ValueError("the cluster is closed")
        with socket.socket(fileno=os.dup(self._channel)) as channel:
            channel.settimeout(_COMMAND_SECONDS)
            channel.send(json.dumps(command).encode())
            answer = json.loads(channel.recv(1 << 16) or b'{"error": "the lab has ended"}')
        if "error" in answer:
            raise OSError(answer["error"])

    def entry(self, host: int) -> Entry:
        """Return how a child of this process enters `host`."""
        check_host(host, len(self.addresses))
        # List each address twice. torch's store looks up the names of IPv4-mapped IPv6 addresses;
        # without an entry here, every rank prints a warning about the failed lookup.
        forms = ("", "::ffff:")
        names = [f"{form}{a} host{h}" for form in forms for h, a in enumerate(self.addresses)]
        return Entry(
            launcher=os.getpid(),
            user=self._user[0] if self._user else None,
            pid=self._pids,
            net=self._networks[host],
            name=f"host{host}",
            hosts_file="\n".join(["127.0.0.1 localhost", *names, ""]),
        )

    def tx_bytes(self) -> list[int]:
        """Return the bytes each host has sent so far, counted at its port of the switch.

        The count covers link-layer frames: payload, protocol headers and acknowledgments. With
        impairments, it includes frames that were lost. Raises ValueError if the cluster is closed.
        """
        if self._forwarded:
            return [count.bytes for count in self.counts()]
        if not self._release.alive:
            raise ValueError("the cluster is closed")
        received = {}  # what the switch received is what the host sent
        for line in read_all(self._counters).decode().splitlines():
            name, colon, counts = line.partition(":")
            if colon:
                received[name.strip()] = int(counts.split()[0])
        return [received[f"host{host}"] for host in range(len(self.addresses))]

    def counts(self) -> list[Counts]:
        """Return the bytes and frames that each host has sent so far, and the lost ones.

        Raises ValueError if the cluster is closed or has no impairments.
        """
        if not self._forwarded:
            raise ValueError("frames are counted only with latency, jitter or loss")
        if not self._release.alive:
            raise ValueError("the cluster is closed")
        return counts(read_all(self._counters))

    def free_port(self) -> int:
        """Return a port for a server on a host, a different one on each call."""
        return next(self._ports)

    def close(self) -> None:
        """End all processes on the hosts and remove the network. Idempotent."""
        with signals_deferred():
            super().close()
            self._release()


@final
class Loopback(Hosts):
    """The interface of `Cluster` without a network: every host is this machine.

    Only programs that use laconic are as slow as the network: see `slowdown`.
    """

    emulated: Final = False
    interface: Final = "lo" if sys.platform == "linux" else "lo0"
    congestion_control: Final = None

    def __init__(self, network: Network) -> None:
        super().__init__(["127.0.0.1"] * network.hosts)
        self._network = network

    def slowdown(self, host: int, per_host: int) -> dict[str, str]:
        rate, latency = (self._network.each(name)[host] for name in ("bandwidth", "latency"))
        shared = {} if rate is None else {BANDWIDTH_VARIABLE: str(rate / per_host)}
        return {**shared, LATENCY_VARIABLE: str(latency)} if latency else shared

    def entry(self, host: int) -> Entry:
        check_host(host, len(self.addresses))
        return Entry(os.getpid())

    def cut(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Raise NamespacesUnavailable if there are pairs: all hosts share one interface."""
        if list(pairs):
            raise NamespacesUnavailable("connections cannot be cut without network namespaces")

    def tx_bytes(self) -> None:
        """Return None: all hosts share one interface, so there are no counts per host."""

    def free_port(self) -> int:
        """Return a port that is not in use now."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])


@contextlib.contextmanager
def emulate(network: Network) -> Iterator[tuple[Cluster | Loopback, str | None]]:
    """Yield the hosts and None, or without namespaces, a `Loopback` and the reason.

    Raises ``OSError`` if jitter or loss cannot be emulated, or latency although namespaces can.
    """
    reason = None
    cluster: Cluster | Loopback
    try:
        cluster = Cluster(network)
    except NamespacesUnavailable as error:
        network.check_throttled(str(error))
        cluster, reason = Loopback(network), str(error)
    with cluster:
        yield cluster, reason


def launch(
    cluster: Cluster | Loopback,
    argv: Sequence[str],
    *,
    per_host: int = 1,
    env: Mapping[str, str] | None = None,
) -> Job:
    """Start `argv` `per_host` times on every host, as torchrun would on a real cluster.

    The environment is this process's, overridden by `env`, overridden by the variables that
    torchrun sets (RANK and so on) and the network interface to use. OMP_NUM_THREADS defaults to 1.
    `Job.stdout` and `Job.stderr` read its output. Raises ValueError for a `per_host` below 1.
    """
    if per_host < 1:
        raise ValueError(f"per_host must be at least 1, not {per_host}")
    hosts = [host for host in range(len(cluster.addresses)) for _ in range(per_host)]
    logs = [(unnamed_file(), unnamed_file()) for _ in hosts]
    job = Job(cluster._processes, hosts, logs)
    shared = job_environment(cluster, env or {})
    try:
        for rank, host in enumerate(hosts):
            variables = rank_variables(rank, host, per_host, len(hosts))
            own = {**shared, **cluster.slowdown(host, per_host), **variables}
            out, err = logs[rank]
            job.add(cluster.start(host, argv, env=own, stdout=out, stderr=err))
    except BaseException:
        job.kill()
        raise
    return job


def _start_keeper(
    plan: Plan,
) -> tuple[subprocess.Popen[bytes], int, list[int], list[int], dict[str, object]]:
    """Start the process that builds the network.

    Returns the process, our end of its channel, the user namespace if it created one, the
    descriptors of the PID namespace, the counters and the hosts, and its report. Raises
    NamespacesUnavailable or ForwardError.
    """
    if sys.platform != "linux":
        raise NamespacesUnavailable(f"network namespaces need Linux, not {sys.platform}")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, tempfile.TemporaryFile() as errors:
        with theirs:
            keeper = subprocess.Popen(
                plan.command(theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                cwd="/",
            )
        ours.settimeout(_BUILD_SECONDS)
        try:
            message, descriptors, _, _ = socket.recv_fds(ours, 1 << 16, len(plan.addresses) + 3)
        except TimeoutError:
            keeper.kill()
            message, descriptors = b"", []
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        if not message or "error" in (report := json.loads(message)):
            keeper.wait()
            last = tail(errors.fileno()).rpartition("\n")[2] or f"exit code {keeper.returncode}"
            reason = report["error"] if message else f"setup failed: {last}"
            if message and report["forward"]:
                raise ForwardError(reason)
            raise NamespacesUnavailable(f"no network namespaces: {reason}")
        user = [descriptors.pop(0)] if report["user"] else []
        return keeper, ours.detach(), user, descriptors, report


def _end_keeper(keeper: subprocess.Popen[bytes], descriptors: Sequence[int]) -> None:
    """Close our descriptors. The keeper notices and ends, and with it all processes on hosts."""
    close_all(descriptors)
    try:
        keeper.wait(KILL_SECONDS)
    except subprocess.TimeoutExpired:
        keeper.kill()
        keeper.wait()


def job_environment(cluster: Cluster | Loopback, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment common to all ranks.

    It is this process's, overridden by `env`, overridden by the variables of a job on `cluster`.
    """
    # The variables of an outer torchrun would make the ranks look for its store.
    others = ("TORCHELASTIC_", BANDWIDTH_VARIABLE, LATENCY_VARIABLE)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    return {
        "OMP_NUM_THREADS": "1",
        **inherited,
        **env,
        # make torch's backends use the interface
        **dict.fromkeys(INTERFACE_VARIABLES, cluster.interface),
        "MASTER_ADDR": cluster.addresses[0],
        "MASTER_PORT": str(cluster.free_port()),
        "GROUP_WORLD_SIZE": str(len(cluster.addresses)),
        "ROLE_NAME": "default",
    }


def rank_variables(rank: int, host: int, per_host: int, world: int) -> dict[str, str]:
    """Return the variables of one rank, with torchrun's names."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank % per_host),
        "LOCAL_WORLD_SIZE": str(per_host),
        "GROUP_RANK": str(host),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
    }
