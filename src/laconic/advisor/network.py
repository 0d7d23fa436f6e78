"""Measure the network of each set of ranks, by collectives of several sizes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.advisor.bench import MOST_FIGURES, Bench
from laconic.advisor.fit import Sample, fit
from laconic.advisor.rehearse import now
from laconic.errors import LinkError
from laconic.links import cost
from laconic.links.congestion import LONG_SECONDS
from laconic.links.cost import Cost
from laconic.links.link import Link, Sent
from laconic.policy.facts import Net
from laconic.policy.probe import own_rates, speeds, unequal_hosts

LEAST, MOST, REPEATS = 2**8, 2**26, 3
"""Bytes of the smallest and largest message of a sweep, and how often each is sent."""
MEANS = 10
"""Means by which the ranks' networks are compared: most have no lost packet on a given path."""
LONG = 0.25
"""A sweep ends with a message that takes this many seconds."""
TRIPS = 16
"""Round trips that a message over a long round trip takes at least: two cycles of BBR, which looks
for more bandwidth once in eight. A packet that is lost late then costs little."""
SETTLED, TIMES, MOST_MESSAGES = 0.95, 3, 40
"""Such messages end when so many in a row take at least this fraction of the shortest time before,
or after so many messages in all."""


class Network(NamedTuple):
    """The measured network.

    ``nets``: by rank set. ``carry``: processor seconds per byte sent. ``loss``: the share of
    packets between workers that were sent again. ``rates``: see `Facts`.
    """

    nets: dict[str, Net]
    carry: float
    loss: float
    rates: tuple[float, ...]


def network_of(bench: Bench, size: int) -> Network:
    """Measure the network of each rank set, with messages of up to ``size`` bytes, or more where a
    round trip is long."""
    world, workers, replica = bench.world, bench.workers, bench.replica
    nets, carry = {}, 0.0
    rates: tuple[float, ...] = ()
    before = workers.sent()
    if workers.size > 1:
        nets["workers"], carry = _sweep(bench, workers, "mean", size)
        if replica.size == 1:  # a rank's network is that of its worker
            rates = _rates(bench, nets["workers"].rate, size)
        nets["peers"], _ = _sweep(bench, workers, "swap", size)
    loss = _loss(bench, before, workers.sent())
    if replica.size > 1:
        nets["replica"], _ = _sweep(bench, replica, "mean", size)
        nets["world"], _ = _sweep(bench, world, "mean", size)
        nets["direct"], _ = _sweep(bench, world, "all_to_all", size)
    if "workers" not in nets:
        nets["workers"] = next(iter(nets.values()), Net(math.inf, 0.0))
    return Network(nets, carry, loss, rates)


def _loss(bench: Bench, before: Mapping[int, Sent], after: Mapping[int, Sent]) -> float:
    """Return the share of all ranks' packets that were sent again, 0 where it is not known."""
    again, packets = (
        sum(getattr(s, name) for s in after.values())
        - sum(getattr(s, name) for s in before.values())
        for name in ("again", "packets")
    )
    again, packets = bench.gather(float(again), float(packets)).sum(0).tolist()
    return again / packets if packets else 0.0


def _timed(bench: Bench, link: Link, collective: str, length: int) -> Sample:
    """Time a collective of ``length`` bytes. All ranks begin together."""
    x = torch.zeros(-(-length // (4 * link.size)) * link.size, device=bench.device)
    bench.barrier()
    start, processors = now(bench.device), time.process_time()
    amount = _send(link, collective, x)
    seconds, used = now(bench.device) - start, time.process_time() - processors
    gathered = bench.gather(seconds, used)
    slowest, mean = float(gathered[:, 0].max()), float(gathered[:, 1].mean())
    return Sample(amount.bytes, amount.messages, slowest, mean)


def _sweep(bench: Bench, link: Link, collective: str, size: int) -> tuple[Net, float]:
    """Return the network by a collective's time, and the processor seconds per byte."""
    send = partial(_timed, bench, link, collective)
    least = [send(LEAST) for _ in range(REPEATS)]
    first = statistics.median(timing.seconds for timing in least)
    trip = 2 * first / max(least[0].messages, 1)
    net, timings = _far(send, first, trip) if trip >= LONG_SECONDS else _near(send, first, size)
    busy, sent = sum(t.used for t in timings), sum(t.bytes for t in timings)
    # Different machines may round the fit differently, so all use rank 0's.
    figures = bench.gather(*astuple(net), busy / max(sent, 1))[0].tolist()
    return Net(*figures[:3]), figures[3]


def _near(send: Callable[[int], Sample], first: float, size: int) -> tuple[Net, Sequence[Sample]]:
    """Time growing messages, until one takes `LONG` seconds or has ``size`` bytes."""
    timings: list[Sample] = []
    length, longest = LEAST, 0.0
    fewest = LEAST * 2**2  # enough sizes to fit a line, on a network of any latency
    while length <= fewest or (
        length <= min(max(size, 2**18), MOST) and longest < LONG + 2 * first
    ):
        each = [send(length) for _ in range(REPEATS)]
        timings += each
        length, longest = 2 * length, statistics.median(timing.seconds for timing in each)
    return fit(timings), timings


def _far(send: Callable[[int], Sample], first: float, trip: float) -> tuple[Net, Sequence[Sample]]:
    """Time long messages, whatever the model's size, until they become no faster.

    Congestion control has then found the network's rate. The rate is that of the fastest of them,
    in which the fewest packets were lost late; `predict` counts lost packets for themselves.
    """
    enough, length, slower = max(LONG, TRIPS * trip), 2**14, 0
    timings = [send(length)]
    for _ in range(MOST_MESSAGES):
        fastest = min(timing.seconds for timing in timings)
        if fastest < enough and length < MOST:
            length *= 4 if fastest < 2 * first else 2
            timings, slower = [], 0
        elif slower == TIMES:
            break
        timings.append(send(length))
        if len(timings) > 1:
            slower = slower + 1 if timings[-1].seconds >= SETTLED * fastest else 0
    best = min(timings, key=lambda timing: timing.seconds)
    one_way = first / max(best.messages, 1)
    rate = 8 * best.bytes / max(best.seconds - first, 1e-9)
    return Net(rate, one_way), timings


def _rates(bench: Bench, rate: float, size: int) -> tuple[float, ...]:
    """Return each rank's bit/s by the speeds at which its bytes arrive in some more means, if they
    differ. The best one counts, because a lost packet delays others. ``rate`` is that of the
    slowest. Empty if they are alike, or not known."""
    link, length = bench.workers, min(max(size, 2**18), MOST, max(int(rate * LONG / 8), LEAST))
    own = [0.0] * link.size
    for _ in range(MEANS):
        before = link.sent()
        _timed(bench, link, "mean", length)
        own = [*map(max, own, speeds(before, link.sent(), link.size))]
    blocks = [own[k : k + MOST_FIGURES] for k in range(0, link.size, MOST_FIGURES)]
    found = own_rates(torch.cat([bench.gather(*block) for block in blocks], 1))
    if not unequal_hosts(found):
        return ()
    return tuple((found * rate / found.min()).tolist())


def _send(link: Link, collective: str, x: Tensor) -> Cost:
    """Run a collective, and return what it sends."""
    n, size = link.size, x.numel() * x.element_size()
    try:
        if collective == "swap":
            link.swap(x, [(link.rank + 1) % n], [(link.rank - 1) % n])
            return cost.swap(size, 1)
        if collective == "mean":
            link.mean(x)
            return cost.mean(size, n)
        rows = x.view(n, -1)
        link.all_to_all(rows, torch.empty_like(rows))
        return cost.all_to_all(size, n)
    except (MemoryError, RuntimeError) as error:  # the others are blocked in the collective
        if isinstance(error, LinkError):
            raise
        raise LinkError(f"{collective} of {x.numel()} elements failed here: {error}") from error
