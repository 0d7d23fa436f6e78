"""Check whether this host can run training across hosts, and the lab.

Each finding that is not "ok" has a remedy. Checks that need several hosts are in
`network_checks.py`.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from laconic.codecs import kernels
from laconic.device import ACCELERATORS
from laconic.errors import install
from laconic.lab.doctor.finding import Finding, check
from laconic.lab.emulation.cluster import (
    Cluster,
    ForwardError,
    NamespacesUnavailable,
    Network,
)
from laconic.links import frames, job_secret, tls
from laconic.links.addresses import address_of, address_toward
from laconic.version import __version__

Environment = Mapping[str, str]


def examine(environ: Environment = os.environ) -> list[Finding]:
    """Run all checks that need this host alone."""
    return [*software(), *network(environ), *connections(), *lab()]


# -- software ----


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all hosts."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "laconic": __version__,
    }


def software() -> list[Finding]:
    """Check Python, torch, torch's communication backends, and laconic's C extensions."""
    current, cuda = versions(), ACCELERATORS["cuda"]
    described = ", ".join(f"{name} {version}" for name, version in current.items())
    gloo = dist.is_available() and dist.is_gloo_available()
    parts = {"the codec kernels": kernels.library(), "the message transport": frames.library()}
    missing = [name for name, library in parts.items() if library is None]
    gpus = cuda.count()
    names = ", ".join(sorted({cuda.model_name(gpu) for gpu in range(gpus)}))
    build = "install a torch build with {}, such as those from pytorch.org"
    return [
        check(
            "software",
            described,
            (not gloo, "problem", "this torch has no gloo backend", build.format("gloo")),
        ),
        check(
            "software",
            f"{' and '.join(parts)} are compiled",
            (
                bool(missing),
                "warning",
                f"not compiled: {' and '.join(missing)}; rounds take up to 3 times the processor "
                "time",
                "install GCC or Clang, then run pip install --force-reinstall --no-deps "
                "--no-cache-dir laconic",
            ),
        ),
        check(
            "software",
            f"NCCL, {gpus} CUDA devices ({names})"
            if gpus
            else "no CUDA device: training runs on CPUs, with gloo",
            (
                not gpus and Path("/dev/nvidia0").exists(),
                "warning",
                "this host has an NVIDIA GPU, but torch cannot use it",
                "install a CUDA build of torch and a driver at least as new (see nvidia-smi)",
            ),
            (
                gpus > 0 and not cuda.can_communicate(),
                "problem",
                f"{gpus} CUDA devices but no NCCL",
                build.format("NCCL"),
            ),
        ),
    ]


# -- network ----


def interfaces() -> dict[str, list[str]]:
    """Return the address of each of this host's interfaces, by name."""
    names = [name for _, name in socket.if_nameindex()]
    return {name: [found] if (found := address_of(name)) else [] for name in names}


def network(
    environ: Environment,
    all_interfaces: Mapping[str, Sequence[str]] | None = None,
    hostname_addresses: Sequence[str] | None = None,
) -> list[Finding]:
    """Check the interfaces, and which of them gloo and NCCL will use.

    ``all_interfaces`` and ``hostname_addresses`` override what the system reports.
    """
    group = "network"
    all_interfaces = interfaces() if all_interfaces is None else all_interfaces
    usable = {name: addresses for name, addresses in all_interfaces.items() if addresses}
    described = "; ".join(f"{name} {', '.join(each)}" for name, each in usable.items())
    others = [name for name, each in usable.items() if not all(map(_is_loopback, each))]
    found = [
        check(
            group,
            f"interfaces: {described or 'none with an address'}",
            (
                not others,
                "warning",
                "only the loopback interface has an address: no other host can be reached",
                "to train with other hosts, bring up the network",
            ),
        )
    ]
    variable = environ.get("GLOO_SOCKET_IFNAME", "")
    named = [n for n in variable.split(",") if n]
    for name in named:
        if name not in usable:
            known = name in all_interfaces
            what = "has no address" if known else "does not exist here"
            remedy = f"set it to one of {', '.join(usable) or 'none'}, or unset it"
            found.append(Finding("problem", group, f"GLOO_SOCKET_IFNAME={name} {what}", remedy))
    master = environ.get("MASTER_ADDR", "")
    if not named:
        found += _hostname(master, others, hostname_addresses)
    return found


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


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


# -- laconic's own connections ----


def connections() -> list[Finding]:
    """Check the variables of laconic's own connections, and how they are secured."""
    group = "connections"
    try:
        found, secret = tls.contexts(), job_secret.read()
    except ValueError as error:
        return [Finding("problem", group, str(error), "correct the variable or the file")]
    if found is not None:
        text = "TLS is on: what workers send can be neither read nor changed on the way"
    elif secret is not None:
        text = "TLS is off, and workers prove that they have the secret: packets can be read"
    else:
        text = "TLS is off: who reads packets can read the model, and can take a worker's place"
    return [Finding("ok", group, text)]


# -- lab ----

ALLOW_NAMESPACES = (
    "run as root, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1; on Ubuntu "
    "kernel.apparmor_restrict_unprivileged_userns=0) and run modprobe sch_tbf; otherwise laconic "
    "throttles its own link"
)


def lab() -> list[Finding]:
    """Check what ``laconic compare`` needs, by building an emulated host and removing it."""
    needed = ("rich", "sklearn", *(["pyroute2"] if sys.platform == "linux" else []))
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    remedy = install("lab")
    found = [Finding("warning", "lab", f"not installed: {', '.join(missing)}", remedy)]
    found = found if missing else []
    allow = remedy if "pyroute2" in missing else ALLOW_NAMESPACES
    plain = "laconic lab and compare work without --latency, --jitter and --loss"
    for network, text, remedy in (
        (Network(1), "hosts with limited bandwidth can be emulated", allow),
        (Network(1, latency=0.01), "packets of emulated hosts can be delayed and lost", plain),
    ):
        try:
            Cluster(network).close()
            found.append(Finding("ok", "lab", text))
        except NamespacesUnavailable as error:
            return [*found, Finding("warning", "lab", str(error), allow)]
        except ForwardError as error:
            found.append(Finding("warning", "lab", str(error), remedy))
    return found
