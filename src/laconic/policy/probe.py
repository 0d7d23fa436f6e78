"""Probe the network between the ranks of a link: its rate, latency and lost packets."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from laconic.device import synchronize
from laconic.engine.session import Session
from laconic.links import cost
from laconic.links.link import FAR_SECONDS, Link, Sent
from laconic.processor import Usage
from laconic.tensors import itemsize_of, local

LEAST, MOST, LONG = 2**16, 2**26, 0.1
"""Bytes of the first and of the largest probe. Once a probe takes `LONG` seconds, no larger one is
sent."""
SMALL = 5
"""Messages of a few bytes, of which the second fastest gives the latency. With the median of three,
a run of the race measured 82 ms where others measured 42 ms, and changed its recipe for 72 steps.
"""
LATENCIES = 8
"""The last probe must also take this many times a message's latency: in less time, congestion
control may not have found the rate yet."""
STEADY = 1.5
"""The last probe is repeated if it and the one before it do not agree on the rate within this
factor."""
CLEARLY = 1.1
"""A probe that was repeated twice, each time so much slower, was itself too fast."""
FAR_REPEATS = 4
"""How often the second of the last probes is repeated at most where round trips are long. By the
difference of two probes, 2 emulated hosts with 100 Mbit/s and a round trip of 40 ms measured 141
Mbit/s."""
ENOUGH = 1000
"""Packets from which the share of lost ones is computed for the probes alone."""


class Probed(NamedTuple):
    """What one rank measures: ``rate`` in bit/s; ``latency`` in seconds per message; ``packets``,
    the number that it has sent, and ``again``, how many of them were sent again."""

    rate: float
    latency: float
    packets: int
    again: int


def probe(link: Link, device: torch.device) -> Probed:
    """Send growing probes until one takes `LONG` seconds. Every rank of the link must call it.

    The rate is the difference in bytes between the last two probes over their difference in
    seconds, because a shaped network interface passes the first bytes at full speed. On a slow
    network, a part of the last probe may be among these; then it is repeated, and its own rate
    counts. Over long round trips, connections take a while to reach the network's rate: the last
    probe is repeated while it gets faster, and its rate counts, without the latency. Rate and
    latency are the same on all ranks.
    """
    n = link.size
    if n == 1:  # in an elastic run
        return Probed(math.inf, 0.0, 0, 0)
    earlier = link.sent()
    link.gather(torch.zeros(1, device=device))  # all ranks begin together
    latency = sorted(timed(link, device, n) for _ in range(SMALL))[1]  # lost packets delay some
    taken, size, enough = [(n, latency)], LEAST, max(LONG, LATENCIES * latency)
    while (seconds := timed(link, device, size)) < enough and size < MOST:
        taken.append((size, seconds))
        size *= 4
    taken.append((size, seconds))
    before = taken[-2]
    burst, far = False, 2 * latency >= FAR_SECONDS
    if far:  # connections take some round trips to reach the network's rate
        seconds = timed(link, device, size)  # the first one may have passed a shaper at once
        for _ in range(FAR_REPEATS):
            again = timed(link, device, size)
            faster, seconds = CLEARLY * again < seconds, min(seconds, again)
            if not faster:
                break
    elif seconds >= LONG and not _steady(taken):  # a lost packet may have delayed it
        again = timed(link, device, size)
        if again > CLEARLY * seconds:  # or a shaper may have passed its first bytes at once
            again = min(again, timed(link, device, size))
        burst = again > CLEARLY * seconds
        seconds = again if burst else min(seconds, again)
    sent = cost.all_to_all(size, n).bytes - cost.all_to_all(before[0], n).bytes
    packets, again = _packets(link.sent())
    if packets - _packets(earlier)[0] >= ENOUGH:  # else too few to tell: all that were ever sent
        packets, again = packets - _packets(earlier)[0], again - _packets(earlier)[1]
    longer = seconds - before[1]
    if far or burst or longer < seconds / 4:  # the one before was fast, or delayed: this one's rate
        sent, longer = cost.all_to_all(size, n).bytes, seconds - (latency if far else 0.0)
    rate = 8 * sent / max(longer, 1e-9)
    return Probed(rate, latency, packets, again)


def _steady(taken: Sequence[tuple[int, float]]) -> bool:
    """Whether the last two differences of the (size, seconds) of growing probes mean about the same
    rate."""
    if len(taken) < 3:
        return False
    first, second, third = taken[-3:]
    rates = [
        (large[0] - small[0]) / max(large[1] - small[1], 1e-9)
        for small, large in ((first, second), (second, third))
    ]
    return max(rates) < STEADY * min(rates)


def _packets(sent: Mapping[int, Sent]) -> tuple[int, int]:
    """How many packets were sent to all ranks, and how many of them again."""
    return sum(s.packets for s in sent.values()), sum(s.again for s in sent.values())


def timed(link: Link, device: torch.device, size: int) -> float:
    """Seconds of an all-to-all of ``size`` bytes, on the slowest rank. The ranks must have just
    communicated before, so that all begin at once."""
    x, out = torch.zeros(2, link.size, size // link.size, dtype=torch.uint8, device=device)
    start = _now(device)
    link.all_to_all(x, out)
    own = torch.tensor([_now(device) - start], dtype=torch.float64, device=device)
    return float(link.gather(own).max())


def _now(device: torch.device) -> float:
    """The time in seconds, after the GPU has finished its work."""
    synchronize(device)
    return time.perf_counter()


def shapes_of(session: Session) -> tuple[tuple[tuple[int, ...], ...], int]:
    """The shapes of x, and the bytes of one element, averaged over the elements."""
    params = [local(p) for p in session.params()]
    return tuple(tuple(p.shape) for p in params), itemsize_of(params)


def usage(session: Session) -> Usage:
    """What messages have used so far, and this thread."""
    calls = list(session.ledger.by_call.values())
    sent = float(sum(c.bytes for c in calls)), sum(c.seconds for c in calls)
    return Usage.now(*sent, session.comm.processor_seconds)
