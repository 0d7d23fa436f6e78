"""Measure the network of the ranks, with the probes of `laconic.auto`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laconic.advisor.bench import MOST_FIGURES, Bench
from laconic.links.link import Link, Sent
from laconic.policy.choice import lost_share, nets_of
from laconic.policy.facts import Net
from laconic.policy.probe import probe

UNEQUAL_WORKERS, UNEQUAL_HOSTS = 1.25, 2.5
"""The slowest worker or host is reported if it is slower than the median by this factor."""


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
    after, ranks = link.sent(), range(link.size)
    sent = sum(s.bytes for s in after.values()) - sum(s.bytes for s in before.values())
    figures = bench.gather(found.rate, found.latency, found.packets, found.again, used, sent)
    rate, latency = float(figures[:, 0].min()), float(figures[:, 1].max())
    packets, again, used, sent = figures[:, 2:].sum(0).tolist()
    loss = lost_share(packets, again, latency, len(figures))
    own = [speed_to(rank, before, after) for rank in ranks]
    speeds = [bench.gather(*own[k : k + MOST_FIGURES]) for k in ranks[::MOST_FIGURES]]
    carry = used / sent if sent else 0.0
    return Net(rate, latency), {"loss": loss, "carry": carry}, torch.cat(speeds, 1)


def speed_to(rank: int, before: Mapping[int, Sent], after: Mapping[int, Sent]) -> float:
    """The bit/s at which this rank's bytes have arrived at ``rank``; 0 if that is not known."""
    if rank not in before or rank not in after:
        return 0.0
    seconds = after[rank].seconds - before[rank].seconds
    return 8 * (after[rank].bytes - before[rank].bytes) / seconds if seconds > 0 else 0.0


def unequal_workers(computes: Tensor) -> bool:
    """Whether the slowest rank's steps take so much longer than the median rank's."""
    usual = float(computes.median())
    return usual > 0 and float(computes.max()) >= UNEQUAL_WORKERS * usual


def own_rates(speeds: Tensor) -> Tensor:
    """How fast each rank's network is, relative to the others, from the speeds at which each rank
    (rows) sends to each (columns): as fast as its fastest connection, in the slower of the two
    directions."""
    return torch.minimum(speeds.amax(0), speeds.amax(1))


def unequal_hosts(rates: Tensor) -> bool:
    """Whether the slowest network is so much slower than the median one. Which of two is slow,
    nobody can tell."""
    slowest = float(rates.min())
    return len(rates) > 2 and slowest > 0 and float(rates.median()) >= UNEQUAL_HOSTS * slowest
