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


def leave_host() -> None:
    """Move this process into a namespace of its own."""
    _check(_libc.unshare(_CLONE_NEWNET))
    _run("ip link set lo up")


def _run(command: str, namespace: int | None = None) -> None:
    given = () if namespace is None else (namespace,)
    enter = [f"--net=/proc/self/fd/{each}" for each in given]
    words = [*(["nsenter", *enter] if enter else []), *command.split()]
    done = subprocess.run(words, pass_fds=given, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")


class Network:
    """``count`` hosts at a switch in the namespace of this process."""

    def __init__(self, count: int) -> None:
        switch = own()
        self._hosts: list[int] = []
        self._healing: list[tuple[int | None, str]] = []
        _run("ip link add switch type bridge")
        _run("ip link set switch up")
        for number in range(count):
            _check(_libc.unshare(_CLONE_NEWNET))
            inside = own()
            self._hosts.append(inside)
            enter(switch)
            peer = f"peer name eth0 netns /proc/{os.getpid()}/fd/{inside}"
            _run(f"ip link add host{number} type veth {peer}")
            _run(f"ip link set host{number} master switch up")
            _run("ip link set lo up", inside)
            _run(f"ip addr add {self.address(number)}/24 dev eth0", inside)
            _run("ip link set eth0 up", inside)
        os.close(switch)

    def address(self, host: int) -> str:
        """Its address."""
        return f"10.77.0.{host + 1}"

    def enter(self, host: int) -> None:
        """Move this process to a host."""
        enter(self._hosts[host])

    def isolate(self, how: str, host: int, other: int) -> None:
        """Cut off ``host`` in one way of the table; "pair": from ``other``, "peers": from all."""
        inside = self._hosts[host]
        match how.split()[-1]:
            case "cut":
                self._do(None, f"ip link set host{host} down", f"ip link set host{host} up")
            case "out":
                self._drop(inside, "eth0")
            case "in":
                self._drop(None, f"host{host}")
            case _:
                workers = set(range(len(self._hosts) - 1)) - {host}
                for to in map(self.address, [other] if how.endswith("pair") else workers):
                    lost = f"ip neigh replace {to} lladdr {_NOBODY} nud permanent dev eth0"
                    self._do(inside, lost, f"ip neigh del {to} dev eth0")

    def _drop(self, inside: int | None, port: str) -> None:
        change = f"tc qdisc {{}} dev {port} root"
        self._do(inside, change.format("replace") + " blackhole", change.format("del"))

    def _do(self, inside: int | None, command: str, back: str) -> None:
        _run(command, inside)
        self._healing.append((inside, back))

    def heal(self) -> None:
        """End all of these."""
        for inside, command in self._healing:
            _run(command, inside)
        self._healing.clear()

    def close(self) -> None:
        """Let the hosts end with their processes."""
        for namespace in self._hosts:
            os.close(namespace)
