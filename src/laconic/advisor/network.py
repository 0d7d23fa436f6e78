"""Measure the network of the ranks, with the probes of `laconic.auto`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import torch

from laconic.advisor.bench import MOST_FIGURES, Bench
from laconic.links.link import Link
from laconic.policy.choice import lost_share, nets_of
from laconic.policy.facts import Net
from laconic.policy.probe import own_rates, probe, unequal_hosts


class Network(NamedTuple):
    """The measured network.

    ``nets``: by rank set. ``carry``: processor seconds per byte sent. ``loss``: the share of
    packets between workers that were sent again. ``rates``: see `Facts`.
    """

    nets: dict[str, Net]
    carry: float
    loss: float
    rates: tuple[float, ...]


@dataclass(frozen=True)
class _Probed:
    """What all ranks have measured: the slowest rate and latency, and each rank's ``speeds``."""

    net: Net
    loss: float
    carry: float
    speeds: torch.Tensor


def network_of(bench: Bench) -> Network:
    """Measure the network between workers, and inside workers of several ranks."""
    workers, ranks = bench.workers.size, bench.replica.size
    found = _probed(bench, bench.workers)
    net = found.net
    nets = {"workers": net, **nets_of(workers, ranks, net.rate, net.one_way)}
    rates: tuple[float, ...] = ()
    if ranks > 1:
        nets["replica"] = _probed(bench, bench.replica).net
    else:  # a rank's network is that of its worker
        own = own_rates(found.speeds)
        if unequal_hosts(own):
            rates = tuple((own * net.rate / own.min()).tolist())
    return Network(nets, found.carry, found.loss, rates)


def _probed(bench: Bench, link: Link) -> _Probed:
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
    return _Probed(Net(rate, latency), loss, used / sent if sent else 0.0, torch.cat(speeds, 1))
