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
refused        the same with the address of one more host, which has B's IP address, too: it resets
               A's connections to B, as a NAT does that was restarted
=============  =================================================================================

The namespaces have no names. They end with the last process that has them open.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

_CLONE_NEWNET = 0x40000000
_NOBODY, _REFUSES = "02:00:00:00:00:de", "02:00:00:00:00:ad"
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def own() -> int:
    """A descriptor of the present namespace."""
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def enter(namespace: int) -> None:
    """Move this thread into a namespace."""
    _check(_libc.setns(namespace, _CLONE_NEWNET))


@contextmanager
def within(namespace: int | None) -> Iterator[None]:
    """A context in which this thread makes its connections in a namespace."""
    assert namespace is not None, "the host has one"
    before = own()
    enter(namespace)
    try:
        yield
    finally:
        enter(before)
        os.close(before)


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
        self._workers = range(count - 1)
        _run("ip link add switch type bridge")
        _run("ip link set switch up")
        for number in range(count + 1):
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
        _run("ip link set eth0 address " + _REFUSES, self._hosts[-1])
        for name in ("arp_ignore=1", "arp_announce=2"):  # it is known by its own address alone
            _run(f"sysctl -qw net.ipv4.conf.eth0.{name}", self._hosts[-1])
        os.close(switch)

    def address(self, host: int) -> str:
        """Its address."""
        return f"10.77.0.{host + 1}"

    def enter(self, host: int) -> None:
        """Move this process to a host."""
        enter(self._hosts[host])

    def isolate(self, how: str, host: int, other: int) -> None:
        """Cut off ``host`` in one way of the table; "pair": from ``other``, "peers": from all;
        "half": with ``other``, from the rest; "whole": all workers; "refused": from ``other``."""
        inside = self._hosts[host]
        match how.split()[-1]:
            case "cut":
                for each in self._workers if how.startswith("whole") else [host]:
                    self._do(None, f"ip link set host{each} down", f"ip link set host{each} up")
            case "out":
                self._drop(inside, "eth0")
            case "in":
                self._drop(None, f"host{host}")
            case "half":
                for each in (host, other):
                    self._misdirect(each, {*self._workers, len(self._workers)} - {host, other})
            case "refused":
                at = f"{self.address(host)}/32 dev lo"
                self._do(self._hosts[-1], f"ip addr add {at}", f"ip addr del {at}")
                self._misdirect(other, {host}, _REFUSES)
            case _:
                everybody = {*self._workers} - {host}
                self._misdirect(host, {other} if how.endswith("pair") else everybody)

    def _misdirect(self, host: int, others: set[int], at: str = _NOBODY) -> None:
        for to in map(self.address, others):
            lost = f"ip neigh replace {to} lladdr {at} nud permanent dev eth0"
            self._do(self._hosts[host], lost, f"ip neigh del {to} dev eth0")

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
