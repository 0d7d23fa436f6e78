"""Anonymous network namespaces: the part of the emulated cluster that talks to the kernel.

This file is also a program, started by `cluster.py` with nothing but the standard library in
reach, so that the launcher itself, full of threads as it is, never changes a namespace:

    keep    builds switch and hosts, hands their descriptors to the launcher, then waits until
            the launcher closes its socket or dies, and kills whatever still runs in the hosts;
            meanwhile it hands a host's descriptor to whoever asks for it at its door
    enter   becomes a program inside one host: joins its namespaces and calls exec

A namespace here has no name and no mount: it lives as long as a descriptor or a process holds
it, so no way out of the launcher, SIGKILL included, leaves anything behind. The door is a socket
with a name in the kernel's memory, not on a disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import socket

__all__ = ["DOOR", "Entry", "Plan"]

DOOR: Final = "laconic-lab-"  # and the launcher's number, a dash, and the keeper's

_CLONE_NEWNS: Final = 0x00020000
_CLONE_NEWUTS: Final = 0x04000000
_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000
_MS_BIND: Final = 0x1000
_MS_REC: Final = 0x4000
_MS_PRIVATE: Final = 1 << 18
_MNT_DETACH: Final = 2
_PR_SET_PDEATHSIG: Final = 1

_HOSTS_FILE: Final = "/etc/hosts"
_SCRATCH: Final = "/tmp"  # covered for a moment, in a mount namespace nobody else sees

# Measured at 100 Mbit/s, ring all-reduce of 3.46 MB on 4 hosts against bytes / rate: 0.9% more
# with frames of 9000 bytes, 4.4% more with 1500.
_MTU: Final = 9000
# A bucket of 128 KiB makes that all-reduce 2% faster after a pause (and one of 50 kB at 10 Mbit/s
# free of charge); with these it takes 0.7 to 2.6% more than bytes / rate from 10 Mbit/s to
# 1 Gbit/s, with pauses and without, on two busy cores.
_BURST_SECONDS: Final = 0.001
_LEAST_BURST: Final = 24 * 1024
_GSO_SLACK: Final = 4 * 1024
_GSO_MOST: Final = 65536
# Long enough that nothing is ever dropped: a full socket's buffer.
_QUEUE_SECONDS: Final = 0.2
_LEAST_QUEUE: Final = 4 << 20

_SETTINGS: Final = {
    # No router solicitations and the like: they would count as traffic of the host.
    "ipv6/conf/default/disable_ipv6": "1",
    # Else that of the machine. BBR paces by its own estimate of the rate: 3% slower.
    "ipv4/tcp_congestion_control": "reno",
}


@dataclass(frozen=True)
class Plan:
    """What `keep` builds: one switch and `len(addresses)` hosts.

    `rates` are bytes per second of each host's egress, None where it is not shaped; `launcher` is
    the process whose death ends it all; `path` is where to find pyroute2.
    """

    launcher: int
    addresses: list[str]
    prefix: int
    rates: list[int | None]
    path: list[str]

    def command(self, channel: int) -> list[str]:
        """Return the command line of the keeper that answers on the descriptor `channel`."""
        return [sys.executable, "-I", __file__, "keep", str(channel), json.dumps(asdict(self))]


@dataclass(frozen=True)
class Entry:
    """What `enter` does before it becomes the program.

    `user` and `net` are inherited descriptors of the namespaces to join; without `net` it joins
    none and only ties the program's life to `launcher`.
    """

    launcher: int
    user: int | None = None
    net: int | None = None
    name: str = ""
    hosts_file: str = ""

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command line that becomes `argv`."""
        spec = json.dumps(asdict(self))
        return [sys.executable, "-I", "-S", __file__, "enter", spec, *argv]

    def descriptors(self) -> tuple[int, ...]:
        """Return those that the command must inherit."""
        return tuple(d for d in (self.user, self.net) if d is not None)


def enter(entry: Entry, argv: Sequence[str]) -> None:
    """Join the namespaces of `entry`, ask to die with the launcher, and become `argv`.

    Never returns; raises OSError where the kernel refuses or the program cannot be run.
    """
    if entry.user is not None:
        _setns(entry.user, _CLONE_NEWUSER)
    if entry.net is not None:
        _setns(entry.net, _CLONE_NEWNET)
        _unshare(_CLONE_NEWNS | _CLONE_NEWUTS)
        name = entry.name.encode()
        _call("sethostname", name, len(name))
        _mount_hosts_file(entry.hosts_file)
    for descriptor in entry.descriptors():
        os.close(descriptor)
    # Last, since joining a user namespace clears it; then the launcher may have died before.
    _call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != entry.launcher:
        os.kill(os.getpid(), signal.SIGKILL)
    os.execvp(argv[0], list(argv))


def keep(channel_descriptor: int, plan: Plan) -> None:
    """Build the cluster of `plan`, report on the channel, wait for the launcher's end, clean up.

    The report is one message of JSON: `{"error": reason}`, or `{"user": bool}` with the
    descriptors [user namespace if any, switch's interface counters, switch, hosts...].
    """
    # Not at the top: `enter` starts with every process and does without these two.
    import select
    import socket

    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher decides when it is over
    with door, socket.socket(fileno=channel_descriptor) as channel:
        try:
            launcher = os.pidfd_open(plan.launcher)
            if os.getppid() != plan.launcher:
                return
            door.bind(f"\0{DOOR}{plan.launcher}-{os.getpid()}")
            user, descriptors = _build(plan)
        except OSError as error:
            channel.send(json.dumps({"error": f"{error.strerror or error}"}).encode())
            return
        namespaces = {os.fstat(descriptor).st_ino for descriptor in descriptors}
        with contextlib.suppress(BrokenPipeError):  # the launcher died meanwhile
            socket.send_fds(channel, [json.dumps({"user": user}).encode()], descriptors)
            door.listen()
            awaited = [channel.fileno(), launcher, door.fileno()]
            while select.select(awaited, [], [])[0] == [door.fileno()]:
                _answer(door, plan, user, descriptors)
        while killed := list(_kill_inside(namespaces)):
            select.select(killed, [], [], 1.0)
            for descriptor in killed:
                os.close(descriptor)


def _answer(door: socket.socket, plan: Plan, user: bool, descriptors: Sequence[int]) -> None:
    """Hand the host that the next one at the door asks for to it, if it is the same user or root.

    The answer is JSON: the plan, with descriptors [user namespace if any, host], or `{"error":
    reason}`.
    """
    import socket
    import struct

    with contextlib.suppress(OSError, ValueError), door.accept()[0] as peer:
        peer.settimeout(1.0)
        owner = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        hosts = descriptors[-len(plan.addresses) :]
        host = int(peer.recv(16))
        answer: dict[str, Any] = asdict(plan)
        handed = [*descriptors[: int(user)], *hosts[host : host + 1]]
        if struct.unpack("3i", owner)[1] not in (0, os.geteuid()):
            answer, handed = {"error": "this lab is another user's"}, []
        elif not 0 <= host < len(hosts):
            numbers = f"hosts are numbered 0 to {len(hosts) - 1}"
            answer, handed = {"error": f"there is no host {host}; {numbers}"}, []
        socket.send_fds(peer, [json.dumps(answer).encode()], handed)


def _kill_inside(namespaces: set[int]) -> Iterable[int]:
    """Kill every other process in one of these network namespaces, and yield a pidfd of each."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        descriptor = -1
        try:
            descriptor = os.pidfd_open(int(entry))
            # Looked at after the pidfd is held, so that the number cannot have changed hands.
            if os.stat(f"/proc/{entry}/ns/net").st_ino in namespaces:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                yield descriptor
                continue
        except OSError:
            pass  # it ended, is a zombie, or belongs to somebody else: not one of ours
        if descriptor >= 0:
            os.close(descriptor)


def _build(plan: Plan) -> tuple[bool, list[int]]:
    """Build switch and hosts; return whether in a user namespace of our own, and descriptors."""
    own_user = _may_unshare_network()
    hosts = [_new_network() for _ in plan.addresses]
    switch = _new_network()
    sys.path[:] = plan.path
    try:
        pyroute2 = importlib.import_module("pyroute2")
    except ImportError as error:
        raise OSError(0, f"pyroute2 is needed to set up the network ({error})") from error
    try:
        with pyroute2.IPRoute() as route:
            route.link("add", ifname="switch", kind="bridge", mtu=_MTU, state="up")
            (bridge,) = route.link_lookup(ifname="switch")
            for index, host in enumerate(hosts):
                far_end = {"ifname": "eth0", "net_ns_fd": host, "mtu": _MTU}
                port = f"host{index}"
                route.link("add", ifname=port, kind="veth", mtu=_MTU, peer=far_end)
                (link,) = route.link_lookup(ifname=port)
                route.link("set", index=link, master=bridge, state="up")
        for host, address, rate in zip(hosts, plan.addresses, plan.rates, strict=True):
            _setns(host, _CLONE_NEWNET)
            with pyroute2.IPRoute() as route:
                _configure_host(route, address, plan.prefix, rate)
    except pyroute2.NetlinkError as error:
        reason = f"the kernel refuses to set up the network: {os.strerror(error.code)}"
        raise OSError(error.code, reason) from error
    _setns(switch, _CLONE_NEWNET)
    counters = os.open("/proc/self/net/dev", os.O_RDONLY)
    user = [os.open("/proc/self/ns/user", os.O_RDONLY)] if own_user else []
    return own_user, [*user, counters, switch, *hosts]


def _configure_host(route: Any, address: str, prefix: int, rate: int | None) -> None:
    """Bring up `lo` and `eth0` of the current namespace and shape the latter to `rate` byte/s."""
    (loopback,) = route.link_lookup(ifname="lo")
    route.link("set", index=loopback, state="up")
    (link,) = route.link_lookup(ifname="eth0")
    route.addr("add", index=link, address=address, prefixlen=prefix)
    if rate is not None:
        # The bucket starts full and fills up in every pause, so its size is traffic that costs no
        # time: as small as a late timer allows. The stack must then build no packet larger than
        # the bucket, or the shaper cuts it into frames; a frame's headers are inside the slack.
        burst = max(_LEAST_BURST, int(rate * _BURST_SECONDS))
        route.link("set", index=link, gso_max_size=min(_GSO_MOST, burst - _GSO_SLACK))
        limit = burst + max(_LEAST_QUEUE, int(rate * _QUEUE_SECONDS))
        route.tc("add", "tbf", link, rate=rate, burst=burst, limit=limit)
    route.link("set", index=link, state="up")


def _may_unshare_network() -> bool:
    """Make sure that this process may create network namespaces.

    Returns whether that took a user namespace of its own, with its user and group mapped to
    themselves; raises OSError where the kernel allows neither.
    """
    try:
        _unshare(_CLONE_NEWNET)
        return False
    except PermissionError:
        pass
    user, group = os.geteuid(), os.getegid()
    try:
        _unshare(_CLONE_NEWUSER)
        # A group may be mapped without privilege only by who gives up setgroups.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        _unshare(_CLONE_NEWNET)
    except OSError as error:
        reason = "needs root, or a kernel that allows user namespaces to other users"
        raise OSError(error.errno, f"{reason} ({error.strerror})") from error
    return True


def _new_network() -> int:
    """Move to a fresh network namespace and return a descriptor of it."""
    _unshare(_CLONE_NEWNET)
    for setting, value in _SETTINGS.items():
        # Read-only in some containers; then the figures are a little less exact, no more.
        with contextlib.suppress(OSError):
            Path("/proc/sys/net", setting).write_text(value)
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def _mount_hosts_file(text: str) -> None:
    """Cover /etc/hosts by `text` in the current mount namespace; no file is left anywhere."""
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    if not os.path.exists(_HOSTS_FILE):
        return
    scratch = _SCRATCH.encode()
    _call("mount", b"laconic", scratch, b"tmpfs", 0, b"size=1m")
    path = f"{_SCRATCH}/hosts"
    Path(path).write_text(text)
    os.chmod(path, 0o644)
    _call("mount", path.encode(), _HOSTS_FILE.encode(), None, _MS_BIND, None)
    _call("umount2", scratch, _MNT_DETACH)  # the bind mount holds the file


def _unshare(flags: int) -> None:
    _call("unshare", flags)


def _setns(descriptor: int, kind: int) -> None:
    _call("setns", descriptor, kind)


def _call(name: str, *arguments: int | bytes | None) -> None:
    """Call the C library's `name`; raises OSError naming it where it returns an error."""
    function: Callable[..., int] = getattr(_libc(), name)
    converted = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    if function(*converted) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _main(arguments: Sequence[str]) -> int:
    """Run as a program: see the top of the file."""
    command, *rest = arguments
    if command == "keep":
        keep(int(rest[0]), Plan(**json.loads(rest[1])))
        return 0
    assert command == "enter", command
    argv = rest[1:]
    try:
        enter(Entry(**json.loads(rest[0])), argv)
    except OSError as error:
        print(f"cannot start {argv[0]}: {error.strerror or error}", file=sys.stderr)
    return 127  # as a shell says it


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
