"""An emulated cluster on one machine: hosts with their own network, and programs run on them.

`Cluster` is the network, `Loopback` the same interface where there is none to be had, `launch`
starts one program on every host with the variables that torchrun sets.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import pwd
import re
import socket
import struct
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, final

from laconic.lab.emulation import orphans
from laconic.lab.emulation.jobs import (
    KILL_SECONDS,
    Job,
    Outcome,
    Output,
    Processes,
    close_all,
    open_logs,
    read_all,
    signals_deferred,
    tail,
    terminate_as_exit,
)
from laconic.lab.emulation.namespaces import DOOR, Entry, Plan

__all__ = [
    "Cluster",
    "Job",
    "Loopback",
    "NamespacesUnavailable",
    "Outcome",
    "launch",
    "terminate_as_exit",
]

_MOST_HOSTS: Final = 250  # descriptors in one message (253) and addresses in a /24
_SLOWEST: Final = 8e3  # bit/s
_BUILD_SECONDS: Final = 60.0  # for the keeper to set up the network; it takes 0.2
_FASTEST: Final = 32e9  # bit/s; the shaper counts bytes per second in 32 bits


class NamespacesUnavailable(OSError):  # noqa: N818
    """Network namespaces cannot be had here; the message says why in one line."""


@final
class Cluster:
    """Hosts joined by a switch on this machine, each with its own address, name and bandwidth.

    Host h is `host{h}` at `addresses[h]`, reachable from the other hosts and from nowhere else.
    `bandwidth` (bit/s) is what each host may send, None for no limit; `host_bandwidth` sets
    another one, or None, for single hosts. What arrives at a host is limited by the senders alone.

    Everything ends with the `with` block, and with this process however it ends. Raises ValueError
    for arguments out of range and NamespacesUnavailable where the kernel refuses.
    """

    emulated: Final = True
    interface: Final = "eth0"

    def __init__(
        self,
        hosts: int = 4,
        *,
        bandwidth: float | None = 100e6,
        host_bandwidth: Mapping[int, float | None] | None = None,
    ) -> None:
        check_hosts(hosts)
        rates = [bandwidth] * hosts
        for host, rate in (host_bandwidth or {}).items():
            check_host(host, hosts)
            rates[host] = rate
        self.addresses = [f"10.77.0.{host + 1}" for host in range(hosts)]
        self._ports = itertools.cycle(range(29500, 32000))  # below the ephemeral ones
        plan = Plan(
            launcher=os.getpid(),
            addresses=self.addresses,
            prefix=24,
            rates=[_bytes_per_second(rate) for rate in rates],
            path=[os.path.abspath(entry) for entry in sys.path],
        )
        mark = orphans.new_mark()
        with signals_deferred():
            keeper, channel, user, descriptors = _start_keeper(plan, mark)
            held = [channel, *user, *descriptors]
            self._release = weakref.finalize(self, _end_keeper, keeper, held)
            self._user = user
            self._counters, _, *self._networks = descriptors
            self._processes = Processes(mark)

    def start(
        self,
        host: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: Output = None,
        stderr: Output = None,
    ) -> subprocess.Popen[bytes]:
        """Start `argv` on `host` in a session of its own, with the environment `env` and the mark
        that `laconic lab clean` looks for.

        The process dies with this one. Where the program cannot be run it ends with exit code 127
        and says so on its stderr. Raises ValueError for a host that does not exist and once the
        cluster is closed.
        """
        entry = self.entry(host)
        command = entry.command(argv)
        return self._processes.start(command, env, stdout, stderr, entry.descriptors())

    def entry(self, host: int) -> Entry:
        """Return the way into `host` for a child of this process."""
        check_host(host, len(self.addresses))
        user = self._user[0] if self._user else None
        return _entry(host, user, self._networks[host], self.addresses)

    def tx_bytes(self) -> list[int]:
        """Return the bytes each host has sent so far, counted at its end of the switch.

        Link-layer frames: the payload, protocol headers and acknowledgements. Raises ValueError
        once the cluster is closed.
        """
        if not self._release.alive:
            raise ValueError("the cluster is closed")
        received = {}  # at the switch, hence sent by the host
        for line in read_all(self._counters).decode().splitlines():
            name, colon, counts = line.partition(":")
            if colon:
                received[name.strip()] = int(counts.split()[0])
        return [received[f"host{host}"] for host in range(len(self.addresses))]

    def free_port(self) -> int:
        """Return a port for a server on a host, another one at each call."""
        return next(self._ports)

    def close(self) -> None:
        """End all processes on the hosts and remove the network; a second call does nothing."""
        with signals_deferred():
            self._processes.close()
            self._release()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@final
class Loopback:
    """The interface of `Cluster` without a network: every host is this machine, nothing is shaped.

    Raises ValueError for a number of hosts out of range.
    """

    emulated: Final = False
    interface: Final = "lo" if sys.platform == "linux" else "lo0"

    def __init__(self, hosts: int = 4) -> None:
        check_hosts(hosts)
        self.addresses = ["127.0.0.1"] * hosts
        self._processes = Processes(orphans.new_mark())

    def start(
        self,
        host: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: Output = None,
        stderr: Output = None,
    ) -> subprocess.Popen[bytes]:
        """Start `argv` as `Cluster.start` does, on this machine.

        The process dies with this one; what it started itself does so only after `close`.
        """
        check_host(host, len(self.addresses))
        command = Entry(launcher=os.getpid()).command(argv)
        return self._processes.start(command, env, stdout, stderr, ())

    def tx_bytes(self) -> None:
        """Return None: all hosts share one interface, so nothing is known of a single one."""

    def free_port(self) -> int:
        """Return a port on which nobody listens now."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    def close(self) -> None:
        """End all processes; a second call does nothing."""
        with signals_deferred():
            self._processes.close()
            orphans.end_all(self._processes.mark)

    def __enter__(self) -> Loopback:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def launch(
    cluster: Cluster | Loopback,
    argv: Sequence[str],
    *,
    per_host: int = 1,
    env: Mapping[str, str] | None = None,
    log_dir: str | Path | None = None,
) -> Job:
    """Start `argv` `per_host` times on every host, as torchrun would on a real cluster.

    The processes see this process's environment, over it `env`, and over that RANK and the other
    variables of torchrun, and the network interface to use. OMP_NUM_THREADS is 1 if not set. What
    they print goes to `log_dir`/rank{r}.out and .err, or to unnamed files which `Job.stdout` and
    `Job.stderr` read. Raises ValueError for a `per_host` below 1.
    """
    if per_host < 1:
        raise ValueError(f"per_host must be at least 1, not {per_host}")
    hosts = [host for host in range(len(cluster.addresses)) for _ in range(per_host)]
    logs = [open_logs(log_dir, rank) for rank in range(len(hosts))]
    job = Job(cluster._processes, hosts, logs)
    shared = job_environment(cluster, env or {})
    try:
        for rank, host in enumerate(hosts):
            variables = {**shared, **rank_variables(rank, host, per_host, len(hosts))}
            out, err = logs[rank]
            job.add(cluster.start(host, argv, env=variables, stdout=out, stderr=err))
    except BaseException:
        job.kill()
        raise
    return job


def running() -> list[str]:
    """Return the names of this machine's clusters whose hosts `join` can enter, oldest first."""
    try:
        lines = Path("/proc/net/unix").read_text().splitlines()
    except OSError:
        return []
    # Whoever is on this machine may name a socket as he likes; what is no name of ours is left out.
    names = (re.fullmatch(rf"{DOOR}\d+-\d+", line.rpartition("@")[2]) for line in lines)
    sockets = [name.group() for name in names if name]
    # A connection on its way is listed too, by the same name.
    return sorted(set(sockets), key=lambda name: int(name.rpartition("-")[2]))


def trusted(name: str) -> bool:
    """Whether the cluster `name` runs as this user or root, so that `join` enters it."""
    with contextlib.suppress(OSError), _at_door(name) as door:
        return _owner(door) in (0, os.geteuid())
    return False


def join(name: str, host: int) -> Entry:
    """Return the way into a host of the running cluster `name`, for a child of this process.

    The caller closes the descriptors. Raises ValueError for a host that it does not have and for
    a cluster of another user, OSError where it has ended meanwhile.
    """
    with _at_door(name) as door:
        owner = _owner(door)
        if owner not in (0, os.geteuid()):
            # Else anyone on this machine could have root enter namespaces of his making.
            raise ValueError(
                f"the lab of process {name.split('-')[2]} runs as {_user(owner)}, and only your "
                "own labs and root's are joined: start one by laconic lab --hosts 4"
            )
        door.send(str(host).encode())
        message, descriptors, _, _ = socket.recv_fds(door, 1 << 16, 2)
    answer = json.loads(message or b'{"error": "the lab does not answer"}')
    if "error" in answer:
        raise ValueError(answer["error"])
    plan = Plan(**answer)
    *user, net = descriptors
    return _entry(host, user[0] if user else None, net, plan.addresses)


def _at_door(name: str) -> socket.socket:
    """A connection to the keeper of the cluster `name`."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        door.settimeout(5.0)
        door.connect(f"\0{name}")
    except BaseException:
        door.close()
        raise
    return door


def _owner(connection: socket.socket) -> int:
    """The user of the process that listened at the other end, as the kernel knows it. The socket
    has a name in the kernel's memory alone, so no file has permissions that could be asked."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)


def _user(number: int) -> str:
    try:
        return f"{pwd.getpwuid(number).pw_name} (user {number})"
    except KeyError:
        return f"user {number}"


def _entry(host: int, user: int | None, net: int, addresses: Sequence[str]) -> Entry:
    # Twice each: torch's store asks for the names of the addresses as IPv6 sockets see them,
    # which without an answer here is a look-up in vain and a warning on every rank.
    forms = ("", "::ffff:")
    names = [f"{form}{a} host{h}" for form in forms for h, a in enumerate(addresses)]
    return Entry(
        launcher=os.getpid(),
        user=user,
        net=net,
        name=f"host{host}",
        hosts_file="\n".join(["127.0.0.1 localhost", *names, ""]),
    )


def _start_keeper(
    plan: Plan, mark: str
) -> tuple[subprocess.Popen[bytes], int, list[int], list[int]]:
    """Start the process that builds the network.

    Returns it, our end of its channel, the user namespace if it made one, and the counters'
    descriptor followed by those of the switch and the hosts. Raises NamespacesUnavailable.
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
                env={**os.environ, orphans.MARK: mark},
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
            said = tail(errors.fileno()).rpartition("\n")[2] or f"exit code {keeper.returncode}"
            reason = report["error"] if message else f"setting them up failed, {said}"
            raise NamespacesUnavailable(f"no network namespaces: {reason}")
        user = [descriptors.pop(0)] if report["user"] else []
        return keeper, ours.detach(), user, descriptors


def _end_keeper(keeper: subprocess.Popen[bytes], held: Sequence[int]) -> None:
    """Close our descriptors; the keeper sees it, kills what strayed from its session, and ends."""
    close_all(held)
    try:
        keeper.wait(KILL_SECONDS)
    except subprocess.TimeoutExpired:
        keeper.kill()
        keeper.wait()


def job_environment(cluster: Cluster | Loopback, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that is alike on all ranks: this process's, over it `env`, and over
    that the variables of a job on `cluster`."""
    # An outer torchrun's variables would make the ranks look for its store.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    return {
        "OMP_NUM_THREADS": "1",
        **inherited,
        **env,
        **interface_variables(cluster.interface),
        "MASTER_ADDR": cluster.addresses[0],
        "MASTER_PORT": str(cluster.free_port()),
        "GROUP_WORLD_SIZE": str(len(cluster.addresses)),
        "ROLE_NAME": "default",
    }


def interface_variables(interface: str) -> dict[str, str]:
    """Return the variables that tell torch's back ends to use `interface`."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
    return dict.fromkeys(names, interface)


def rank_variables(rank: int, host: int, per_host: int, world: int) -> dict[str, str]:
    """Return the variables of one rank, named as torchrun names them."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank % per_host),
        "LOCAL_WORLD_SIZE": str(per_host),
        "GROUP_RANK": str(host),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
    }


def check_hosts(hosts: int) -> None:
    if not 1 <= hosts <= _MOST_HOSTS:
        raise ValueError(f"hosts must be from 1 to {_MOST_HOSTS}, not {hosts}")


def check_host(host: int, hosts: int) -> None:
    if not 0 <= host < hosts:
        raise ValueError(f"there is no host {host}; hosts are numbered 0 to {hosts - 1}")


def _bytes_per_second(rate: float | None) -> int | None:
    """Return `rate` (bit/s) for the shaper; raises ValueError where it cannot be kept."""
    if rate is None:
        return None
    check_rate(rate)
    return round(rate / 8)


def check_rate(rate: float) -> None:
    """Raise ValueError for a rate (bit/s) that the shaper cannot keep."""
    if not (math.isfinite(rate) and _SLOWEST <= rate <= _FASTEST):
        accepted = f"{_SLOWEST:g} to {_FASTEST:g} bit/s, or None for no limit"
        raise ValueError(f"bandwidth must be {accepted}, not {rate!r}")
