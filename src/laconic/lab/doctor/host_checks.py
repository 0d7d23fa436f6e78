"""Check whether this host can run training across hosts, and the lab.

Each finding that is not "ok" has a remedy. Checks that need several hosts are in
`network_checks.py`.
"""

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

import torch
import torch.distributed as dist

from laconic.codecs import kernels
from laconic.device import ACCELERATORS
from laconic.errors import install
from laconic.lab.doctor.connections import connections
from laconic.lab.doctor.finding import Finding, Level
from laconic.lab.emulation.cluster import (
    Cluster,
    ForwardError,
    Impairments,
    NamespacesUnavailable,
)
from laconic.links import frames
from laconic.links.addresses import address_of, address_toward
from laconic.version import __version__

Environment = Mapping[str, str]

OLDEST_TORCH = (2, 7)
OLDEST_PYTHON = (3, 10)
GIB = 2**30
LEAST_MEMORY = 2 * GIB
LEAST_DISK = 2 * GIB
LEAST_SHARED_MEMORY = GIB // 4
MOST_HOSTS = 250
DESCRIPTORS_PER_HOST = 7
"""A rank has a connection to every other rank in each of its process groups: the default group,
laconic's own, those of workers and replicas if there are several, and the links of the latter."""
OTHER_DESCRIPTORS = 128
TRY_SECONDS = 30.0
_SIOCGIFFLAGS, _IFF_UP = 0x8913, 1


@dataclass(frozen=True)
class Interface:
    """A network interface of this host."""

    up: bool
    addresses: tuple[str, ...]


def examine(environ: Environment = os.environ) -> list[Finding]:
    """Run all checks that need this host alone.

    Raises ``ValueError`` if a variable of torchrun is not an integer.
    """
    return [*software(environ), *network(environ), *connections(), *machine(environ), *lab()]


def number(environ: Environment, name: str, default: int) -> int:
    """Return the integer in a variable that torchrun sets."""
    text = environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the variable {name} must be an integer, not {text!r}") from None


# -- software ----


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all hosts."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "laconic": __version__,
    }


def software(environ: Environment) -> list[Finding]:
    """Check Python, torch, and torch's communication backends."""
    group = "software"
    current = versions()
    found = [Finding("ok", group, ", ".join(f"{name} {v}" for name, v in current.items()))]
    if sys.version_info[:2] < OLDEST_PYTHON or _release(current["torch"]) < OLDEST_TORCH:
        found = [
            Finding("problem", group, found[0].text, "laconic needs Python 3.10 and torch 2.7")
        ]
    if not (dist.is_available() and dist.is_gloo_available()):
        remedy = "install a torch build with gloo, such as those from pytorch.org"
        found.append(Finding("problem", group, "this torch has no gloo backend", remedy))
    found.append(_kernels())
    cuda = ACCELERATORS["cuda"]
    gpus = cuda.count()
    processes = number(environ, "LOCAL_WORLD_SIZE", 1)
    if not gpus and Path("/dev/nvidia0").exists():
        found.append(
            Finding(
                "warning",
                group,
                "this host has an NVIDIA GPU, but torch cannot use it",
                "install a CUDA build of torch and a driver at least as new (see nvidia-smi)",
            )
        )
    elif not gpus:
        found.append(Finding("ok", group, "no CUDA device: training runs on CPUs, with gloo"))
    elif not cuda.can_communicate():
        remedy = "install a torch build with NCCL, such as those from pytorch.org"
        found.append(Finding("problem", group, f"{gpus} CUDA devices but no NCCL", remedy))
    elif processes > gpus:
        found.append(
            Finding(
                "problem",
                group,
                f"{processes} processes (LOCAL_WORLD_SIZE) share {gpus} CUDA devices",
                f"start at most one per device: torchrun --nproc-per-node {gpus}",
            )
        )
    else:
        names = sorted({cuda.model_name(gpu) for gpu in range(gpus)})
        found.append(Finding("ok", group, f"NCCL, {gpus} CUDA devices ({', '.join(names)})"))
    return found


def _kernels() -> Finding:
    """Check whether the C extensions for codecs and messages are available."""
    parts = {"the codec kernels": kernels.library(), "the message transport": frames.library()}
    missing = [name for name, library in parts.items() if library is None]
    if not missing:
        return Finding("ok", "software", f"{' and '.join(parts)} are compiled")
    remedy = "install GCC or Clang, then run pip install --force-reinstall --no-deps "
    remedy += "--no-cache-dir laconic"
    text = f"not compiled: {' and '.join(missing)}; rounds take up to 3 times the processor time"
    return Finding("warning", "software", text, remedy)


def _release(version: str) -> tuple[int, ...]:
    numbers = version.split("+")[0].split(".")[:2]
    return tuple(int(n) for n in numbers if n.isdigit())


# -- network ----


def interfaces() -> dict[str, Interface]:
    """Return this host's interfaces by name. On systems other than Linux they lack addresses."""
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
                    pass  # the interface has just disappeared
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
    all_interfaces: Mapping[str, Interface] | None = None,
    hostname_addresses: Sequence[str] | None = None,
) -> list[Finding]:
    """Check the interfaces, and which of them gloo and NCCL will use.

    ``all_interfaces`` and ``hostname_addresses`` override what the system reports.
    """
    group = "network"
    all_interfaces = interfaces() if all_interfaces is None else all_interfaces
    usable = {n: i for n, i in all_interfaces.items() if i.up and i.addresses}
    described = "; ".join(f"{n} {', '.join(i.addresses)}" for n, i in usable.items())
    found = [Finding("ok", group, f"interfaces: {described or 'none with an address'}")]
    others = [n for n, i in usable.items() if not all(map(_is_loopback, i.addresses))]
    if not others:
        found.append(
            Finding(
                "warning",
                group,
                "only the loopback interface has an address: no other host can be reached",
                "to train with other hosts, bring up the network",
            )
        )
    variable = environ.get("GLOO_SOCKET_IFNAME", "")
    named = [n for n in variable.split(",") if n]
    for name in named:
        if name not in usable:
            known = name in all_interfaces
            what = "has no address or is down" if known else "does not exist here"
            remedy = f"set it to one of {', '.join(usable) or 'none'}, or unset it"
            found.append(Finding("problem", group, f"GLOO_SOCKET_IFNAME={name} {what}", remedy))
    master = environ.get("MASTER_ADDR", "")
    if master:
        found.append(_route(master, usable, named))
    if not named:
        found += _hostname(master, others, hostname_addresses)
    return found


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _route(master: str, usable: Mapping[str, Interface], named: Sequence[str]) -> Finding:
    """Check which interface leads to the host of rank 0."""
    address = address_toward(master)
    if address is None:
        remedy = "set it to the address of rank 0's host, or add the name to /etc/hosts"
        text = f"MASTER_ADDR={master} does not resolve, or there is no route to it"
        return Finding("problem", "network", text, remedy)
    names = [n for n, i in usable.items() if address in i.addresses]
    interface = ", ".join(names) or "an unknown interface"
    text = f"MASTER_ADDR={master} is reached from {address}, {interface}"
    if named and names and not set(named) & set(names):
        return Finding(
            "warning",
            "network",
            f"{text}; but GLOO_SOCKET_IFNAME={','.join(named)}",
            f"set GLOO_SOCKET_IFNAME={names[0]}, unless you mean to use the other network",
        )
    return Finding("ok", "network", text)


def _hostname(master: str, others: Sequence[str], resolved: Sequence[str] | None) -> list[Finding]:
    """Check the host name. Unless an interface is named, gloo listens at the name's address."""
    name = socket.gethostname()
    if resolved is None:
        try:
            infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            resolved = [str(info[4][0]) for info in infos]
        except OSError:
            resolved = []
    addresses = list(dict.fromkeys(resolved))
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
        what = f"the host name {name} does not resolve, so gloo listens on loopback only"
    remote = bool(master) and not _is_loopback(address_toward(master) or "127.0.0.1")
    text = what if remote else f"{what} (a single host works)"
    return [Finding("problem" if remote else "warning", "network", text, remedy)]


# -- machine ----


def machine(environ: Environment) -> list[Finding]:
    """Check cores, memory, disk and file descriptors."""
    return [
        _cores(environ, cores()),
        *_memory(),
        _disk(shutil.disk_usage(os.getcwd()).free),
        *_descriptors(environ),
    ]


def cores() -> int:
    """Return the number of cores that this process may use."""
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
        remedy = "start fewer processes on this host: they share its cores and slow each other down"
        return Finding("warning", "machine", text, remedy)
    if processes * threads > count or (processes > 1 and not threads):
        each = max(count // processes, 1)
        per_process = f"{threads} threads" if threads else "as many threads as there are cores"
        remedy = f"export OMP_NUM_THREADS={each}"
        return Finding("warning", "machine", f"{text} of {per_process} each", remedy)
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
        remedy = "docker run --shm-size=1g: DataLoader workers pass batches through it"
        found.append(_room("free in /dev/shm", shared, LEAST_SHARED_MEMORY, remedy))
    return found


def _disk(free: int) -> Finding:
    remedy = "free some space: training ends if a checkpoint does not fit on the disk"
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
    needed = OTHER_DESCRIPTORS + DESCRIPTORS_PER_HOST * (world or MOST_HOSTS)
    enough = max((limit - OTHER_DESCRIPTORS) // DESCRIPTORS_PER_HOST, 0)
    if limit >= needed:
        return [Finding("ok", "machine", f"{limit} open files (ulimit -n)")]
    text = f"{limit} open files (ulimit -n) are enough for about {enough} ranks"
    level: Level = "problem" if world else "warning"
    remedy = f"ulimit -n {needed}, or set LimitNOFILE= of the service"
    return [Finding(level, "machine", text, remedy)]


# -- lab ----

SHAPER_PROGRAM = """
import json, pyroute2
errors = {}
with pyroute2.IPRoute() as route:
    for kind, (interface, options) in json.loads('%s').items():
        (link,) = route.link_lookup(ifname=interface)
        try:
            route.tc("add", kind, link, **options)
        except Exception as error:
            errors[kind] = f"{error}"
print(json.dumps(errors))
"""
SHAPERS = {
    "tbf": ("eth0", {"rate": 12_500_000, "burst": 32_768, "limit": 1_000_000}),
}


ALLOW_NAMESPACES = (
    "run as root, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1; on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0); otherwise laconic throttles its own link"
)


def lab() -> list[Finding]:
    """Check what ``laconic compare`` needs, by building an emulated host and removing it."""
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
    found.append(Finding("ok", "lab", "network namespaces are available"))
    if "tbf" in refused:
        remedy = "modprobe sch_tbf; otherwise laconic throttles its own link"
        found.append(Finding("warning", "lab", f"no tbf: {refused['tbf']}", remedy))
    else:
        found.append(Finding("ok", "lab", "tbf limits the bandwidth of emulated hosts"))
    return [*found, _forwarder()]


def _forwarder() -> Finding:
    """Check what latency, jitter and loss need."""
    try:
        with Cluster(1, impairments=Impairments(latency=0.01)):
            return Finding("ok", "lab", "packets of emulated hosts can be delayed and lost")
    except (NamespacesUnavailable, ForwardError) as error:
        remedy = "laconic lab and compare work without --latency, --jitter and --loss"
        return Finding("warning", "lab", str(error), remedy)


def _try_shapers() -> dict[str, str]:
    """Return the shapers that the kernel refuses, with the reasons."""
    program = SHAPER_PROGRAM % json.dumps(SHAPERS)
    with Cluster(1, bandwidth=None) as cluster:
        process = cluster.start(
            0,
            [sys.executable, "-c", program],
            env=dict(os.environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            output, _ = process.communicate(timeout=TRY_SECONDS)
            refused: dict[str, str] = json.loads(output)
            return refused
        except (subprocess.TimeoutExpired, json.JSONDecodeError):
            return dict.fromkeys(SHAPERS, "the trial failed")
