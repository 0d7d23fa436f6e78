"""Hosts of a run: network namespaces at a switch, whose packets can be dropped one way.

The kernel of many containers has no packet filter and no classifiers for ``tc``, so this uses what
every kernel with traffic control has:

=============  =================================================================================
cable cut      ``ip link set PORT down`` at the switch's end: the host sees that the carrier is lost
all packets    ``tc qdisc replace dev eth0 root blackhole`` on the host, which drops them without
out of A       an error; packets to A arrive
all packets    the same on the switch's end
into A
from A to B    a permanent neighbor on A: ``ip neigh replace B lladdr 02:...`` where no host has
               that address; packets from B to A arrive
=============  =================================================================================

The namespaces have no names. They end with the last process that has them open.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence

_CLONE_NEWNET = 0x40000000
_NOBODY = "02:00:00:00:00:de"
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def own() -> int:
    """A descriptor of the present namespace."""
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def enter(namespace: int) -> None:
    """Move this process, which has one thread, into a namespace."""
    _check(_libc.setns(namespace, _CLONE_NEWNET))


def leave_host() -> bool:
    """Move this process into a namespace of its own. Returns whether it may."""
    try:
        _check(_libc.unshare(_CLONE_NEWNET))
    except PermissionError:
        return False
    _run("ip", "link", "set", "lo", "up")
    return True


def _run(*command: str, namespace: int | None = None) -> None:
    if namespace is not None:
        command = ("nsenter", f"--net=/proc/self/fd/{namespace}", *command)
    given = () if namespace is None else (namespace,)
    done = subprocess.run(command, pass_fds=given, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


class Network:
    """``count`` hosts at a switch in the namespace of this process."""

    def __init__(self, count: int) -> None:
        switch = own()
        self._hosts: list[int] = []
        self._healing: list[tuple[int | None, Sequence[str]]] = []
        _run("ip", "link", "add", "switch", "type", "bridge")
        _run("ip", "link", "set", "switch", "up")
        for number in range(count):
            _check(_libc.unshare(_CLONE_NEWNET))
            self._hosts.append(own())
            enter(switch)
            at = f"/proc/{os.getpid()}/fd/{self._hosts[-1]}"
            peer = ("peer", "name", "eth0", "netns", at)
            _run("ip", "link", "add", f"host{number}", "type", "veth", *peer)
            _run("ip", "link", "set", f"host{number}", "master", "switch", "up")
            inside = self._hosts[-1]
            _run("ip", "link", "set", "lo", "up", namespace=inside)
            address = f"{self.address(number)}/24"
            _run("ip", "addr", "add", address, "dev", "eth0", namespace=inside)
            _run("ip", "link", "set", "eth0", "up", namespace=inside)
        os.close(switch)

    def address(self, host: int) -> str:
        """Its address."""
        return f"10.77.0.{host + 1}"

    def enter(self, host: int) -> None:
        """Move this process to a host."""
        enter(self._hosts[host])

    def _do(self, inside: int | None, command: str, back: str) -> None:
        _run(*command.split(), namespace=inside)
        self._healing.append((inside, back.split()))

    def cut(self, host: int) -> None:
        """Unplug a host."""
        self._do(None, f"ip link set host{host} down", f"ip link set host{host} up")

    def drop_out(self, host: int) -> None:
        """Drop all that a host sends."""
        change = "tc qdisc {} dev eth0 root"
        at = self._hosts[host]
        self._do(at, change.format("replace") + " blackhole", change.format("del"))

    def drop_in(self, host: int) -> None:
        """Drop all that is sent to a host."""
        change = f"tc qdisc {{}} dev host{host} root"
        self._do(None, change.format("replace") + " blackhole", change.format("del"))

    def drop_between(self, host: int, to: int) -> None:
        """Drop what ``host`` sends to the host ``to``."""
        other = f"{self.address(to)} dev eth0"
        lost = f"ip neigh replace {self.address(to)} lladdr {_NOBODY} nud permanent dev eth0"
        self._do(self._hosts[host], lost, f"ip neigh del {other}")

    def heal(self) -> None:
        """End all of these."""
        for inside, command in self._healing:
            _run(*command, namespace=inside)
        self._healing.clear()
