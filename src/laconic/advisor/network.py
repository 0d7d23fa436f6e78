"""Measure the network of the ranks, with the probes of `laconic.auto`."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from laconic.advisor.bench import MOST_FIGURES, Bench
from laconic.links.link import Link
from laconic.policy.choice import lost_share, nets_of
from laconic.policy.facts import Net
from laconic.policy.probe import own_rates, probe, unequal_hosts


def network_of(bench: Bench) -> dict[str, Any]:
    """Measure the network between workers, and inside workers of several ranks. Return fields of
    `Facts`."""
    workers, ranks = bench.workers.size, bench.replica.size
    net, found, speeds = _probed(bench, bench.workers)
    nets = {"workers": net, **nets_of(workers, ranks, net.rate, net.one_way)}
    if ranks > 1:
        nets["replica"], *_ = _probed(bench, bench.replica)
    else:  # a rank's network is that of its worker
        own = own_rates(speeds)
        if unequal_hosts(own):
            found["rates"] = tuple((own * net.rate / own.min()).tolist())
    return {"rate": net.rate, "one_way": net.one_way, "nets": nets, **found}


def _probed(bench: Bench, link: Link) -> tuple[Net, dict[str, Any], Tensor]:
    """Return the slowest rank's rate and latency, the share of lost packets and processor seconds
    per byte, and the speed from each rank to each."""
    bench.barrier()
    before, start = link.sent(), time.process_time()
    found = probe(link, bench.device)
    used = time.process_time() - start
    sent = sum(s.bytes for s in link.sent().values()) - sum(s.bytes for s in before.values())
    figures = bench.gather(found.rate, found.latency, found.packets, found.again, used, sent)
    rate, latency = float(figures[:, 0].min()), float(figures[:, 1].max())
    packets, again, used, sent = figures[:, 2:].sum(0).tolist()
    loss = lost_share(packets, again, latency, len(figures))
    speeds = [
        bench.gather(*found.speeds[k : k + MOST_FIGURES]) for k in range(0, link.size, MOST_FIGURES)
    ]
    carry = used / sent if sent else 0.0
    return Net(rate, latency), {"loss": loss, "carry": carry}, torch.cat(speeds, 1)
