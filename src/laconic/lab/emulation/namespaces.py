"""Anonymous network namespaces: the part of the emulated cluster that talks to the kernel.

This file is also a program. `cluster.py` starts it with only the standard library, so that the
launcher, which has many threads, never changes its own namespace. Its commands are:

    keep    build the switch and the hosts, send their descriptors to the launcher, and wait until
            the launcher closes its socket or dies.
    enter   run a program in the namespaces of one host.

On its channel, the launcher can also tell the keeper which hosts a host cannot reach.

All programs of a lab are in one PID namespace. Its first process dies with the keeper, and the
keeper ends with the launcher, however that ends; then the kernel kills all that is left in the
namespace. No namespace here has a name or a mount. It exists as long as a descriptor or a process
refers to it, so nothing else is left either.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from laconic.lab.emulation.forward import Forward

__all__ = ["Entry", "Plan"]

_CLONE_NEWNS: Final = 0x00020000
_CLONE_NEWUTS: Final = 0x04000000
_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWPID: Final = 0x20000000
_CLONE_NEWNET: Final = 0x40000000
_MS_BIND: Final = 0x1000
_MS_REC: Final = 0x4000
_MS_PRIVATE: Final = 1 << 18
_MNT_DETACH: Final = 2
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_NUD_PERMANENT: Final = 0x80  # a neighbor that is not asked for its hardware address
_NOBODY: Final = "02:00:00:00:00:00"  # a hardware address that no interface has

_HOSTS_FILE: Final = "/etc/hosts"
_SCRATCH: Final = "/tmp"  # covered briefly, in a mount namespace private to the process

# Ring all-reduce of 3.46 MB on 4 hosts at 100 Mbit/s, compared with bytes / rate: 0.9% more with
# frames of 9000 bytes, 4.4% more with 1500.
_MTU: Final = 9000
# A bucket of 128 KiB makes that all-reduce 2% faster after a pause, and lets 50 kB pass at no cost
# at 10 Mbit/s. With these values it takes 0.7 to 2.6% more than bytes / rate from 10 Mbit/s to
# 1 Gbit/s, with and without pauses, on two busy cores.
_BURST_SECONDS: Final = 0.001
_LEAST_BURST: Final = 24 * 1024
_GSO_SLACK: Final = 4 * 1024
_GSO_MOST: Final = 65536
# Long enough to hold a full socket buffer, so that nothing is ever dropped.
_QUEUE_SECONDS: Final = 0.2
_LEAST_QUEUE: Final = 4 << 20

_CONGESTION_CONTROL: Final = "ipv4/tcp_congestion_control"
_SETTINGS: Final = {
    # No router solicitations and the like: they would count as traffic of the host.
    "ipv6/conf/default/disable_ipv6": "1",
    # The machine's default may be BBR, which paces by its own estimate of the rate: 3% slower.
    _CONGESTION_CONTROL: "reno",
}
# With latency and loss the choice matters, so it is Linux's usual default. The kernel refuses it if
# the machine's tcp_allowed_congestion_control lacks it; it remains reno then.
_FORWARDED: Final = {_CONGESTION_CONTROL: "cubic"}


@dataclass(frozen=True)
class Plan:
    """What `keep` builds: one switch and `len(addresses)` hosts.

    `rates` limits what each host sends, in bytes per second; None means no limit. `forward` has the
    fields of `laconic.lab.emulation.forward.Forward`; with None, packets are neither delayed nor
    lost. `congestion_control` is TCP's default on the hosts; None means the lab's choice.
    Everything ends when the process `launcher` dies. `path` is the import path on which to find
    pyroute2.
    """

    launcher: int
    addresses: list[str]
    prefix: int
    rates: list[int | None]
    path: list[str]
    forward: dict[str, Any] | None = None
    congestion_control: str | None = None

    def command(self, channel: int) -> list[str]:
        """Return the command line of the keeper, which reports on the descriptor `channel`."""
        return [sys.executable, "-I", __file__, "keep", str(channel), json.dumps(asdict(self))]


@dataclass(frozen=True)
class Entry:
    """What `enter` does before it becomes the program.

    `user`, `pid` and `net` are inherited descriptors of the namespaces to join. Without `net`,
    `enter` joins no namespace and only makes the program die with `launcher`.
    """

    launcher: int
    user: int | None = None
    pid: int | None = None
    net: int | None = None
    name: str = ""
    hosts_file: str = ""

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command line that becomes `argv`."""
        spec = json.dumps(asdict(self))
        return [sys.executable, "-I", "-S", __file__, "enter", spec, *argv]

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors that the command must inherit."""
        return tuple(d for d in (self.user, self.pid, self.net) if d is not None)


def enter(entry: Entry, argv: Sequence[str]) -> None:
    """Join the namespaces of `entry`, arrange to die with the launcher, and run `argv`.

    Never returns. Raises OSError if the kernel refuses or the program cannot be run.
    """
    if entry.user is not None:
        _setns(entry.user, _CLONE_NEWUSER)
    if entry.pid is not None:
        _setns(entry.pid, _CLONE_NEWPID)
    if entry.net is not None:
        _setns(entry.net, _CLONE_NEWNET)
        _unshare(_CLONE_NEWNS | _CLONE_NEWUTS)
        name = entry.name.encode()
        _call("sethostname", name, len(name))
        _mount_hosts_file(entry.hosts_file)
    for descriptor in entry.descriptors():
        os.close(descriptor)
    # Must come last: joining a user namespace clears it. The launcher may have died before.
    _die_with_parent()
    if os.getppid() != entry.launcher:
        os.kill(os.getpid(), signal.SIGKILL)
    if entry.pid is not None:
        _become_parent()
    os.execvp(argv[0], list(argv))


def _become_parent() -> None:
    """Return in a child, which is in the PID namespace that was joined; end as the child does.

    The child is in the same process group, so a signal to the group reaches it, too.
    """
    child = os.fork()
    if not child:
        _die_with_parent()
        # Refused in some containers. Programs then see the processes of this machine in /proc.
        with contextlib.suppress(OSError):
            _call("mount", b"proc", b"/proc", b"proc", 0, None)
        return
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        _call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _die_with_parent() -> None:
    _call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _new_pid_namespace() -> int:
    """Return a descriptor of a new PID namespace, of which all later children are.

    Its first process dies with this one.
    """
    _unshare(_CLONE_NEWPID)
    if not os.fork():
        _die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # have the kernel reap orphans
        os.closerange(0, 1 << 16)
        while True:
            signal.pause()
    return os.open("/proc/self/ns/pid_for_children", os.O_RDONLY)


def keep(channel_descriptor: int, plan: Plan) -> None:
    """Build the cluster of `plan`, report on the channel, wait until the launcher ends, clean up.

    The report is one JSON message: `{"error": reason, "forward": whether packets cannot be
    forwarded}`, or `{"user": bool, "congestion_control": name}` with the descriptors [user
    namespace if any, PID namespace, counters, hosts...]. The counters are the switch's interfaces'
    or the forwarder's.
    """
    # Imported here because `enter` starts with every process and does not need them.
    import select
    import socket

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher decides when to end
    with socket.socket(fileno=channel_descriptor) as channel:
        try:
            launcher = os.pidfd_open(plan.launcher)
            if os.getppid() != plan.launcher:
                return
            user, descriptors, switch, forwarder = _build(plan)
        except OSError as error:
            kind = type(error).__name__
            report = {"error": f"{error.strerror or error}", "forward": kind == "ForwardError"}
            channel.send(json.dumps(report).encode())
            return
        with contextlib.suppress(BrokenPipeError):  # the launcher died meanwhile
            report = {"user": user, "congestion_control": _congestion_control()}
            socket.send_fds(channel, [json.dumps(report).encode()], descriptors)
            ends = {launcher, *([] if forwarder is None else [os.pidfd_open(forwarder)])}
            readable = [channel.fileno(), *ends]
            while ends.isdisjoint(select.select(readable, [], [])[0]):
                if not (command := channel.recv(1 << 16)):
                    break
                hosts = descriptors[-len(plan.addresses) :]
                channel.send(_set_unreachable(plan, hosts, switch, **json.loads(command)))


def _set_unreachable(
    plan: Plan, hosts: Sequence[int], switch: int, host: int, before: list[int], now: list[int]
) -> bytes:
    """Let `host` reach all hosts but those of `now`, where it could not reach those of `before`.

    Returns the answer to the launcher: JSON, `{}` or `{"error": reason}`. What `host` sends to an
    unreachable host is addressed to an interface that does not exist, so it is lost without a word,
    as in a network whose cable is cut.
    """
    pyroute2 = importlib.import_module("pyroute2")
    _setns(hosts[host], _CLONE_NEWNET)
    try:
        with pyroute2.IPRoute() as route:
            (link,) = route.link_lookup(ifname="eth0")
            for other in {*before, *now}:
                entry = {"dst": plan.addresses[other], "ifindex": link, "lladdr": _NOBODY}
                if other in now:
                    route.neigh("replace", **entry, state=_NUD_PERMANENT)
                else:
                    route.neigh("del", **entry)
    except (OSError, pyroute2.NetlinkError) as error:
        return json.dumps({"error": f"the kernel refuses to cut a connection: {error}"}).encode()
    finally:
        _setns(switch, _CLONE_NEWNET)
    return b"{}"


def _build(plan: Plan) -> tuple[bool, list[int], int, int | None]:
    """Build switch and hosts.

    Returns whether a user namespace was created, the launcher's descriptors, the switch, and the
    number of the forwarder's process if there is one.
    """
    own_user = _may_unshare_network()
    pid = _new_pid_namespace()
    forward: Forward | None = None
    if plan.forward is not None:
        forward = _forward_module().Forward(**plan.forward)
    settings = [*_SETTINGS.items(), *(_FORWARDED.items() if forward is not None else ())]
    if plan.congestion_control is not None:
        settings.append((_CONGESTION_CONTROL, plan.congestion_control))
    hosts = [_new_network(settings) for _ in plan.addresses]
    switch = _new_network(settings)
    if plan.congestion_control not in (None, _congestion_control()):
        raise OSError(0, f"the kernel refuses the congestion control {plan.congestion_control}")
    sys.path[:] = plan.path
    try:
        pyroute2 = importlib.import_module("pyroute2")
    except ImportError as error:
        raise OSError(
            0, f"pyroute2 is needed to set up the network ({error}): pip install pyroute2"
        ) from error
    try:
        with pyroute2.IPRoute() as route:
            if forward is None:
                _add_switch(route, hosts)
        taps: list[int] = []
        for host, address, rate in zip(hosts, plan.addresses, plan.rates, strict=True):
            _setns(host, _CLONE_NEWNET)
            with pyroute2.IPRoute() as route:
                if forward is not None:
                    taps.append(_forward_module().add_tap(route, "eth0", len(taps)))
                _configure_host(route, address, plan.prefix, rate)
    except pyroute2.NetlinkError as error:
        reason = f"the kernel refuses to set up the network: {os.strerror(error.code)}"
        raise OSError(error.code, reason) from error
    _setns(switch, _CLONE_NEWNET)
    forwarder = None
    if forward is None:
        counters = os.open("/proc/self/net/dev", os.O_RDONLY)
    else:
        forwarder, counters = forward.start(taps)
        for tap in taps:
            os.close(tap)
    user = [os.open("/proc/self/ns/user", os.O_RDONLY)] if own_user else []
    return own_user, [*user, pid, counters, *hosts], switch, forwarder


def _forward_module() -> Any:
    """Return forward.py. Importing it by its name would import torch, which takes seconds."""
    name = "forward"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None and spec.loader is not None, "it is next to this file"
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _add_switch(route: Any, hosts: Sequence[int]) -> None:
    """Connect `eth0` of each host to a bridge in the current namespace."""
    route.link("add", ifname="switch", kind="bridge", mtu=_MTU, state="up")
    (bridge,) = route.link_lookup(ifname="switch")
    for index, host in enumerate(hosts):
        far_end = {"ifname": "eth0", "net_ns_fd": host, "mtu": _MTU}
        port = f"host{index}"
        route.link("add", ifname=port, kind="veth", mtu=_MTU, peer=far_end)
        (link,) = route.link_lookup(ifname=port)
        route.link("set", index=link, master=bridge, state="up")


def _configure_host(route: Any, address: str, prefix: int, rate: int | None) -> None:
    """Bring up `lo` and `eth0` of the current namespace and shape the latter to `rate` byte/s."""
    (loopback,) = route.link_lookup(ifname="lo")
    route.link("set", index=loopback, state="up")
    (link,) = route.link_lookup(ifname="eth0")
    route.addr("add", index=link, address=address, prefixlen=prefix)
    if rate is not None:
        # The bucket starts full and refills in every pause, so traffic up to its size takes no
        # time. Make it as small as timer delays allow. The stack must not build packets larger
        # than the bucket, or the shaper splits them; the slack covers a frame's headers.
        burst = max(_LEAST_BURST, int(rate * _BURST_SECONDS))
        route.link("set", index=link, gso_max_size=min(_GSO_MOST, burst - _GSO_SLACK))
        limit = burst + max(_LEAST_QUEUE, int(rate * _QUEUE_SECONDS))
        route.tc("add", "tbf", link, rate=rate, burst=burst, limit=limit)
    route.link("set", index=link, state="up")


def _may_unshare_network() -> bool:
    """Make sure that this process may create network namespaces.

    Returns whether that required a new user namespace, in which its user and group map to
    themselves. Raises OSError if the kernel allows neither.
    """
    try:
        _unshare(_CLONE_NEWNET)
        return False
    except PermissionError:
        pass
    user, group = os.geteuid(), os.getegid()
    try:
        _unshare(_CLONE_NEWUSER)
        # An unprivileged process may map a group only after it gives up setgroups.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        _unshare(_CLONE_NEWNET)
    except OSError as error:
        reason = "needs root, or a kernel that allows user namespaces to other users"
        raise OSError(error.errno, f"{reason} ({error.strerror})") from error
    return True


def _new_network(settings: Iterable[tuple[str, str]]) -> int:
    """Move to a new network namespace and return a descriptor of it.

    A setting replaces an earlier one of the same name, unless the kernel refuses it.
    """
    _unshare(_CLONE_NEWNET)
    for setting, value in settings:
        # Read-only in some containers. Results are then slightly less exact.
        with contextlib.suppress(OSError):
            Path("/proc/sys/net", setting).write_text(value)
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def _congestion_control() -> str:
    """Return the default congestion control of the current network namespace, or ""."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/net", _CONGESTION_CONTROL).read_text().strip()
    return ""


def _mount_hosts_file(text: str) -> None:
    """Cover /etc/hosts with `text` in the current mount namespace, without leaving a file."""
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    if not os.path.exists(_HOSTS_FILE):
        return
    scratch = _SCRATCH.encode()
    _call("mount", b"laconic", scratch, b"tmpfs", 0, b"size=1m")
    path = f"{_SCRATCH}/hosts"
    Path(path).write_text(text)
    os.chmod(path, 0o644)
    _call("mount", path.encode(), _HOSTS_FILE.encode(), None, _MS_BIND, None)
    _call("umount2", scratch, _MNT_DETACH)  # the bind mount keeps the file alive


def _unshare(flags: int) -> None:
    _call("unshare", flags)


def _setns(descriptor: int, kind: int) -> None:
    _call("setns", descriptor, kind)


def _call(name: str, *arguments: int | bytes | None) -> None:
    """Call the function `name` of the C library. Raises OSError with the name if it fails."""
    function: Callable[..., int] = getattr(_libc(), name)
    converted = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    if function(*converted) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _main(arguments: Sequence[str]) -> int:
    """Run as a program. See the module docstring."""
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
    return 127  # the exit code of shells for a command that cannot be run


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
