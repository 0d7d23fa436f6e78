"""The file in which a lab stores what its hosts have sent, and what has happened to them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laconic.lab.emulation.cluster import Cluster, Loopback
    from laconic.lab.emulation.program import Ended, Settings


def write_rates(
    path: Path,
    settings: Settings,
    cluster: Cluster | Loopback,
    samples: Sequence[tuple[float, Sequence[int]]],
    ended: Ended,
) -> None:
    """Write the file. ``samples``: seconds since the start, and the bytes that each host had sent.

    Raises ``OSError`` with the name of the file.
    """
    network = settings.network
    hosts = []
    addresses = cluster.addresses[: network.hosts]
    for host, (address, rate) in enumerate(zip(addresses, network.rates(), strict=True)):
        latency, jitter, loss = network.impairments.of_host(host)
        described = {"name": f"host{host}", "address": address, "bandwidth": rate}
        hosts.append({**described, "latency": latency, "jitter": jitter, "loss": loss})
    document: dict[str, Any] = {
        "command": settings.argv,
        "network": "emulated" if cluster.emulated else "throttled",
        "network_seed": network.impairments.seed,
        "congestion_control": cluster.congestion_control,
        "hosts": hosts,
        "seconds": ended.seconds,
        "failed": ended.first and {"process": ended.first.process.name, "how": ended.first.how},
        "samples": [{"seconds": round(seconds, 3), "sent": sent} for seconds, sent in samples],
    }
    if settings.faults is not None:
        document["faults"] = [vars(happened) for happened in ended.happened]
    if ended.goodput is not None:
        document["elastic"] = ended.goodput.document()
    try:
        path.write_text(json.dumps(document, indent=1) + "\n")
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}") from error
