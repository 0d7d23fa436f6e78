"""Find the clusters that run on this machine, and enter their hosts."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from laconic.lab.emulation.namespaces import SOCKET_PREFIX, Entry, Plan

__all__ = ["host_entry", "join", "running", "trusted"]


def running() -> list[str]:
    """Return the names of this machine's clusters whose hosts `join` can enter, oldest first."""
    try:
        lines = Path("/proc/net/unix").read_text().splitlines()
    except OSError:
        return []
    # Any user may create sockets with any name, so skip names that are not in our format.
    names = (re.fullmatch(rf"{SOCKET_PREFIX}\d+-\d+", line.rpartition("@")[2]) for line in lines)
    sockets = [name.group() for name in names if name]
    # A pending connection is listed under the same name.
    return sorted(set(sockets), key=lambda name: int(name.rpartition("-")[2]))


def trusted(name: str) -> bool:
    """Return whether the cluster `name` belongs to this user or root, so that `join` enters it."""
    with contextlib.suppress(OSError), _connect(name) as connection:
        return _owner(connection) in (0, os.geteuid())
    return False


def join(name: str, host: int) -> Entry:
    """Return how a child of this process enters a host of the running cluster `name`.

    The caller closes the descriptors. Raises ValueError for a host that does not exist and for a
    cluster of another user, and OSError if the cluster has ended.
    """
    with _connect(name) as connection:
        owner = _owner(connection)
        if owner not in (0, os.geteuid()):
            # Otherwise any user could make root enter namespaces of that user's choice.
            raise ValueError(
                f"the lab of process {name.split('-')[2]} belongs to {_user(owner)}; only your "
                "own labs and root's can be joined: start one with laconic lab --hosts 4"
            )
        connection.send(str(host).encode())
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 2)
    answer = json.loads(message or b'{"error": "the lab does not answer"}')
    if "error" in answer:
        raise ValueError(answer["error"])
    plan = Plan(**answer)
    *user, net = descriptors
    return host_entry(host, user[0] if user else None, net, plan.addresses)


def host_entry(host: int, user: int | None, net: int, addresses: Sequence[str]) -> Entry:
    """Return how to enter `host` by the descriptors of its user and network namespaces."""
    # List each address twice. torch's store looks up the names of IPv4-mapped IPv6 addresses;
    # without an entry here, every rank prints a warning about the failed lookup.
    forms = ("", "::ffff:")
    names = [f"{form}{a} host{h}" for form in forms for h, a in enumerate(addresses)]
    return Entry(
        launcher=os.getpid(),
        user=user,
        net=net,
        name=f"host{host}",
        hosts_file="\n".join(["127.0.0.1 localhost", *names, ""]),
    )


def _connect(name: str) -> socket.socket:
    """Return a connection to the keeper of the cluster `name`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(5.0)
        connection.connect(f"\0{name}")
    except BaseException:
        connection.close()
        raise
    return connection


def _owner(connection: socket.socket) -> int:
    """Return the user id of the listening process, as reported by the kernel.

    The socket's name is in the kernel's abstract namespace, so there are no file permissions.
    """
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)


def _user(number: int) -> str:
    try:
        return f"{pwd.getpwuid(number).pw_name} (user {number})"
    except KeyError:
        return f"user {number}"
