"""Find the clusters that run on this machine, and enter their hosts.

A cluster's keeper (`namespaces.py`) has its namespaces open, and the kernel lets its user enter
them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from laconic.lab.emulation import namespaces
from laconic.lab.emulation.namespaces import Entry, Plan

__all__ = ["host_entry", "join", "running"]


def running() -> list[int]:
    """Return the processes that have launched the clusters which `join` can enter, oldest first."""
    return [plan.launcher for _, plan in _keepers()]


def join(launcher: int, host: int) -> Entry:
    """Return how a child of this process enters a host of the cluster that a process has launched.

    The caller closes the descriptors. Raises ValueError for a host that does not exist, and OSError
    if the cluster has ended.
    """
    found = [(keeper, plan) for keeper, plan in _keepers() if plan.launcher == launcher]
    if not found:
        raise OSError(f"the lab of process {launcher} has ended")
    keeper, plan = found[-1]
    if not 0 <= host < len(plan.addresses):
        last = len(plan.addresses) - 1
        raise ValueError(f"there is no host {host}; hosts are numbered 0 to {last}")
    # The descriptors of the hosts' networks are its first ones.
    open_files = sorted((keeper / "fd").iterdir(), key=lambda path: int(path.name))
    networks = [path for path in open_files if os.readlink(path).startswith("net:")]
    if len(networks) <= len(plan.addresses):
        raise OSError(f"the lab of process {launcher} has only just begun: try again")
    own_user = os.readlink(keeper / "ns" / "user") != os.readlink("/proc/self/ns/user")
    user = os.open(keeper / "ns" / "user", os.O_RDONLY) if own_user else None
    pid = os.open(keeper / "ns" / "pid_for_children", os.O_RDONLY)
    return host_entry(host, user, pid, os.open(networks[host], os.O_RDONLY), plan.addresses)


def host_entry(host: int, user: int | None, pid: int, net: int, addresses: Sequence[str]) -> Entry:
    """Return how to enter `host` by the descriptors of its namespaces."""
    # List each address twice. torch's store looks up the names of IPv4-mapped IPv6 addresses;
    # without an entry here, every rank prints a warning about the failed lookup.
    forms = ("", "::ffff:")
    names = [f"{form}{a} host{h}" for form in forms for h, a in enumerate(addresses)]
    return Entry(
        launcher=os.getpid(),
        user=user,
        pid=pid,
        net=net,
        name=f"host{host}",
        hosts_file="\n".join(["127.0.0.1 localhost", *names, ""]),
    )


def _keepers() -> list[tuple[Path, Plan]]:
    """Return the keepers of this user, in /proc, and their plans, oldest first.

    Any user may run a program that looks like a keeper: it could lead root into a namespace of that
    user's choice.
    """
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text().split("\0")
            if words[2:4] == [namespaces.__file__, "keep"] and _trusted(process):
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                plan = Plan(**json.loads(words[5]))
                if int(fields[1]) == plan.launcher:  # else it is a child of the keeper
                    found.append((int(fields[19]), process, plan))
        except (OSError, ValueError):
            continue  # it has ended
    return [(process, plan) for _, process, plan in sorted(found, key=lambda each: each[0])]


def _trusted(process: Path) -> bool:
    """Return whether a process is this user's, and not another user's with this user's rights."""
    status = (process / "status").read_text().partition("\nUid:")[2].split("\n")[0]
    return {*map(int, status.split())} == {os.geteuid()}
