"""What on this host could keep a training between hosts, or the lab, from working; each finding
with its remedy. What can be seen only together with other hosts is in `meeting.py`."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from laconic import __version__
from laconic.codecs import kernels
from laconic.device import ACCELERATORS
from laconic.errors import install
from laconic.lab.emulation.cluster import Cluster, NamespacesUnavailable
from laconic.links import wire
from laconic.links.addresses import address_of, address_towards

Level = Literal["ok", "warning", "problem"]
Environment = Mapping[str, str]

OLDEST_TORCH = (2, 6)
OLDEST_PYTHON = (3, 10)
GIB = 2**30
LEAST_MEMORY = 2 * GIB
LEAST_DISK = 2 * GIB
LEAST_SHARED_MEMORY = GIB // 4
MOST_HOSTS = 250
DESCRIPTORS_PER_HOST = 7
"""A rank has a connection to every other in each of its process groups: the default one, laconic's
own, and those of workers and replicas where there are several; and in the links of the latter."""
DESCRIPTORS_ELSE = 128
TRY_SECONDS = 30.0
_SIOCGIFFLAGS, _IFF_UP = 0x8913, 1


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; ``remedy`` is empty where all is well."""

    level: Level
    group: str
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Interface:
    """A network interface of this host."""

    up: bool
    addresses: tuple[str, ...]


def examine(environ: Environment = os.environ) -> list[Finding]:
    """Everything that can be seen from this host alone. Raises ``ValueError`` for variables of
    torchrun that hold no number."""
    return [*software(environ), *network(environ), *machine(environ), *lab()]


def number(environ: Environment, name: str, default: int) -> int:
    """A variable that torchrun sets to an integer."""
    text = environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the variable {name} must be an integer, not {text!r}") from None


# -- software ----


def versions() -> dict[str, str]:
    """What has to be alike on all hosts."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "laconic": __version__,
    }


def software(environ: Environment) -> list[Finding]:
    """Python, torch, and what it can communicate with."""
    group = "software"
    known = versions()
    found = [Finding("ok", group, ", ".join(f"{name} {v}" for name, v in known.items()))]
    if sys.version_info[:2] < OLDEST_PYTHON or _release(known["torch"]) < OLDEST_TORCH:
        found = [
            Finding("problem", group, found[0].text, "laconic needs Python 3.10 and torch 2.6")
        ]
    if not (dist.is_available() and dist.is_gloo_available()):
        remedy = "install a torch that is built with it, as those from pytorch.org are"
        found.append(Finding("problem", group, "this torch has no gloo back end", remedy))
    found.append(_kernels())
    cuda = ACCELERATORS["cuda"]
    cards = cuda.count()
    wanted = number(environ, "LOCAL_WORLD_SIZE", 1)
    if not cards and Path("/dev/nvidia0").exists():
        found.append(
            Finding(
                "warning",
                group,
                "this host has an NVIDIA card, but torch cannot use it",
                "install a CUDA build of torch, and a driver at least as new (nvidia-smi)",
            )
        )
    elif not cards:
        found.append(Finding("ok", group, "no CUDA device: training runs on CPUs, with gloo"))
    elif not cuda.can_communicate():
        remedy = "install a torch that is built with it, as those from pytorch.org are"
        found.append(Finding("problem", group, f"{cards} CUDA devices but no NCCL", remedy))
    elif wanted > cards:
        found.append(
            Finding(
                "problem",
                group,
                f"{wanted} processes (LOCAL_WORLD_SIZE) share {cards} CUDA devices",
                f"start at most one per device: torchrun --nproc-per-node {cards}",
            )
        )
    else:
        names = sorted({cuda.model_name(card) for card in range(cards)})
        found.append(Finding("ok", group, f"NCCL, {cards} CUDA devices ({', '.join(names)})"))
    return found


def _kernels() -> Finding:
    """Whether codecs and messages are as fast as they can be."""
    parts = {"the codecs' kernels": kernels.library(), "what moves messages": wire.library()}
    missing = [name for name, found in parts.items() if found is None]
    if not missing:
        return Finding("ok", "software", f"{' and '.join(parts)} are compiled")
    remedy = "with GCC or Clang at hand, pip install --force-reinstall --no-deps --no-cache-dir"
    remedy += " laconic"
    text = f"{' and '.join(missing)} not compiled: rounds take up to 3 times the processor's time"
    return Finding("warning", "software", text, remedy)


def _release(version: str) -> tuple[int, ...]:
    numbers = version.split("+")[0].split(".")[:2]
    return tuple(int(n) for n in numbers if n.isdigit())


# -- network ----


def interfaces() -> dict[str, Interface]:
    """This host's, by name; no addresses where the system is not Linux."""
    found = {}
    for _, name in socket.if_nameindex():
        addresses, up = [], True
        if sys.platform == "linux":
            import fcntl

            request = name.encode().ljust(40, b"\0")
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                try:
                    flags = fcntl.ioctl(probe, _SIOCGIFFLAGS, request)[16:18]
                    up = bool(int.from_bytes(flags, sys.byteorder) & _IFF_UP)
                except OSError:
                    pass  # it has just gone
            address = address_of(name)
            addresses += [address] if address else []
            addresses += _ipv6(name)
        found[name] = Interface(up, tuple(addresses))
    return found


def _ipv6(name: str) -> list[str]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().split("\n")
    except OSError:
        return []
    fields = [line.split() for line in lines]
    packed = [f[0] for f in fields if len(f) == 6 and f[5] == name]
    return [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(p)) for p in packed]


def network(
    environ: Environment,
    cards: Mapping[str, Interface] | None = None,
    hostname_addresses: Sequence[str] | None = None,
) -> list[Finding]:
    """Interfaces, and which of them gloo and NCCL will use. The arguments after ``environ`` stand
    in for what the system says."""
    group = "network"
    cards = interfaces() if cards is None else cards
    usable = {n: c for n, c in cards.items() if c.up and c.addresses}
    told = "; ".join(f"{n} {', '.join(c.addresses)}" for n, c in usable.items())
    found = [Finding("ok", group, f"interfaces: {told or 'none with an address'}")]
    others = [n for n, c in usable.items() if not all(map(_is_loopback, c.addresses))]
    if not others:
        found.append(
            Finding(
                "warning",
                group,
                "only the loopback interface has an address: no other host can be reached",
                "bring the network up, if there are to be other hosts",
            )
        )
    chosen = environ.get("GLOO_SOCKET_IFNAME", "")
    named = [n for n in chosen.split(",") if n]
    for name in named:
        if name not in usable:
            what = "has no address or is down" if name in cards else "does not exist here"
            remedy = f"set it to one of {', '.join(usable) or 'none'}, or unset it"
            found.append(Finding("problem", group, f"GLOO_SOCKET_IFNAME={name} {what}", remedy))
    master = environ.get("MASTER_ADDR", "")
    if master:
        found.append(_way_to(master, usable, named))
    if not named:
        found += _hostname(master, others, hostname_addresses)
    return found


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _way_to(master: str, usable: Mapping[str, Interface], named: Sequence[str]) -> Finding:
    own = address_towards(master)
    if own is None:
        remedy = "set it to the address of rank 0's host, or add the name to /etc/hosts"
        text = f"MASTER_ADDR={master} does not resolve, or there is no route to it"
        return Finding("problem", "network", text, remedy)
    leading = [n for n, c in usable.items() if own in c.addresses]
    text = f"MASTER_ADDR={master} is reached from {own}, {', '.join(leading) or 'an unknown one'}"
    if named and leading and not set(named) & set(leading):
        return Finding(
            "warning",
            "network",
            f"{text}; but GLOO_SOCKET_IFNAME={','.join(named)}",
            f"set GLOO_SOCKET_IFNAME={leading[0]}, unless that other network is meant",
        )
    return Finding("ok", "network", text)


def _hostname(master: str, others: Sequence[str], given: Sequence[str] | None) -> list[Finding]:
    """Where no interface is named, gloo listens at the address that the host's name stands for."""
    name = socket.gethostname()
    if given is None:
        try:
            given = [str(i[4][0]) for i in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
        except OSError:
            given = []
    addresses = list(dict.fromkeys(given))
    interface = others[0] if others else "eth0"
    remedy = (
        f"export GLOO_SOCKET_IFNAME={interface} on this host, or map {name} to its own address in "
        "/etc/hosts"
    )
    if addresses and not any(map(_is_loopback, addresses)):
        return [Finding("ok", "network", f"host name {name} is {', '.join(addresses)}")]
    if addresses:
        what = f"the host name {name} resolves to {addresses[0]}, where no other host reaches gloo"
    else:
        what = f"the host name {name} does not resolve, so gloo listens on loopback alone"
    elsewhere = bool(master) and not _is_loopback(address_towards(master) or "127.0.0.1")
    text = what if elsewhere else f"{what} (one host alone works)"
    return [Finding("problem" if elsewhere else "warning", "network", text, remedy)]


# -- machine ----


def machine(environ: Environment) -> list[Finding]:
    """Cores, memory, disk and descriptors, against what runs here."""
    return [
        _cores(environ, cores()),
        *_memory(),
        _disk(shutil.disk_usage(os.getcwd()).free),
        *_descriptors(environ),
    ]


def cores() -> int:
    """Those that this process may use."""
    usable = getattr(os, "sched_getaffinity", None)
    count = len(usable(0)) if usable else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return count if quota == "max" else min(count, max(int(quota) // int(period), 1))
    except (OSError, ValueError):
        return count


def _cores(environ: Environment, count: int) -> Finding:
    processes = number(environ, "LOCAL_WORLD_SIZE", 1)
    threads = number(environ, "OMP_NUM_THREADS", 0)
    text = f"{count} cores for {processes} process{'es' * (processes > 1)}"
    if processes > count:
        remedy = "start fewer processes on this host; they share its cores and slow each other"
        return Finding("warning", "machine", text, remedy)
    if processes * threads > count or (processes > 1 and not threads):
        each = max(count // processes, 1)
        said = f"{threads} threads" if threads else "as many threads as there are cores"
        remedy = f"export OMP_NUM_THREADS={each}"
        return Finding("warning", "machine", f"{text} of {said} each", remedy)
    return Finding("ok", "machine", text)


def _memory() -> list[Finding]:
    try:
        text = Path("/proc/meminfo").read_text()
        free = int(text.split("MemAvailable:")[1].split()[0]) * 1024
    except (OSError, LookupError, ValueError):
        return []
    found = [_room("memory available", free, LEAST_MEMORY, "end other programs, or add memory")]
    try:
        shared = shutil.disk_usage("/dev/shm").free
    except OSError:
        return found
    if shared < LEAST_SHARED_MEMORY:
        remedy = "docker run --shm-size=1g: DataLoader workers pass their batches there"
        found.append(_room("free in /dev/shm", shared, LEAST_SHARED_MEMORY, remedy))
    return found


def _disk(free: int) -> Finding:
    remedy = "make room before the first checkpoint: a full disk ends a training"
    return _room("free on this directory's disk", free, LEAST_DISK, remedy)


def _room(what: str, free: int, least: int, remedy: str) -> Finding:
    text = f"{free / GIB:.1f} GiB {what}"
    if free < least:
        return Finding("warning", "machine", text, remedy)
    return Finding("ok", "machine", text)


def _descriptors(environ: Environment, limit: int | None = None) -> list[Finding]:
    if limit is None:
        try:
            import resource
        except ImportError:
            return []
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit == resource.RLIM_INFINITY:
            limit = 2**31
    world = number(environ, "WORLD_SIZE", 0)
    needed = DESCRIPTORS_ELSE + DESCRIPTORS_PER_HOST * (world or MOST_HOSTS)
    enough = max((limit - DESCRIPTORS_ELSE) // DESCRIPTORS_PER_HOST, 0)
    if limit >= needed:
        return [Finding("ok", "machine", f"{limit} open files (ulimit -n)")]
    text = f"{limit} open files (ulimit -n) are enough for about {enough} ranks"
    level: Level = "problem" if world else "warning"
    return [Finding(level, "machine", text, f"ulimit -n {needed}, or LimitNOFILE= of the service")]


# -- lab ----

TRY = """
import json, pyroute2
said = {}
with pyroute2.IPRoute() as route:
    for kind, (card, options) in json.loads('%s').items():
        (link,) = route.link_lookup(ifname=card)
        try:
            route.tc("add", kind, link, **options)
        except Exception as error:
            said[kind] = f"{error}"
print(json.dumps(said))
"""
SHAPERS = {
    "tbf": ("eth0", {"rate": 12_500_000, "burst": 32_768, "limit": 1_000_000}),
    "netem": ("lo", {"delay": 1000}),
}


ALLOW_NAMESPACES = (
    "run as root, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1; on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0); without, a throttled link stands in"
)


def lab() -> list[Finding]:
    """What ``laconic compare`` needs of the kernel, tried on a host made for it and gone again."""
    missing = [
        name
        for name in ("rich", "matplotlib", "sklearn", "pyroute2")
        if importlib.util.find_spec(name) is None
        and not (name == "pyroute2" and sys.platform != "linux")
    ]
    found = []
    if missing:
        remedy = install("lab")
        found.append(Finding("warning", "lab", f"not installed: {', '.join(missing)}", remedy))
    try:
        refused = _try_shapers()
    except NamespacesUnavailable as error:
        remedy = install("lab") if "pyroute2" in missing else ALLOW_NAMESPACES
        return [*found, Finding("warning", "lab", str(error), remedy)]
    found.append(Finding("ok", "lab", "network namespaces can be made"))
    if "tbf" in refused:
        remedy = "modprobe sch_tbf; without, a throttled link stands in"
        found.append(Finding("warning", "lab", f"no tbf: {refused['tbf']}", remedy))
    else:
        found.append(Finding("ok", "lab", "tbf limits the bandwidth of emulated hosts"))
    if "netem" in refused:
        text = "no netem in this kernel: the link adds latency, not the network"
        found.append(Finding("ok", "lab", text))
    else:
        found.append(Finding("ok", "lab", "netem can delay packets"))
    return found


def _try_shapers() -> dict[str, str]:
    """Which shapers the kernel refuses, and why."""
    program = TRY % json.dumps(SHAPERS)
    with Cluster(1, bandwidth=None) as cluster:
        process = cluster.start(
            0,
            [sys.executable, "-c", program],
            env=dict(os.environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            said, _ = process.communicate(timeout=TRY_SECONDS)
            refused: dict[str, str] = json.loads(said)
            return refused
        except (subprocess.TimeoutExpired, json.JSONDecodeError):
            return dict.fromkeys(SHAPERS, "trying it failed")
