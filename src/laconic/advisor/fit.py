"""The network's latency and rate from timed messages of several sizes.

    seconds = messages * latency + 8 * (bytes - burst) / rate

A straight line through (bytes, seconds) with the least sum of absolute relative errors, so that
single messages that something held up do not count: iteratively reweighted least squares. Where it
begins below what the smallest messages take, the card lets a burst pass before it slows down.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

from laconic.predict import Net

ROUNDS = 50
"""Of reweighting; the line has come to rest after about 20."""
LEAST = 1e-3
"""Relative errors below this weigh alike: weights stay finite."""
BEGINS = 0.1
"""By how much the smallest message may be above the line for it to begin there."""
FASTEST = 1e13
"""bit/s, where larger messages take no longer."""


class Sample(NamedTuple):
    """``seconds`` that a collective took in which a rank sends ``bytes``, in ``messages``, one
    after the other."""

    bytes: int
    messages: int
    seconds: float


def fit(samples: Sequence[Sample]) -> Net:
    """The net on which these took so long. All have as many messages. The smallest of at least
    three sizes gives the latency, the others the line."""
    sizes = sorted({s.bytes for s in samples})
    if len(sizes) < 3:
        raise ValueError(f"a fit needs messages of at least three sizes, not {len(sizes)}")
    messages = max(samples[0].messages, 1)
    least = statistics.median(s.seconds for s in samples if s.bytes == sizes[0])
    start, slope = line([(s.bytes, s.seconds) for s in samples if s.bytes > sizes[0]])
    rate = min(8 / slope, FASTEST) if slope > 0 else FASTEST
    if least <= (1 + BEGINS) * (start + slope * sizes[0]):
        return Net(rate, max(start, 0.0) / messages)
    # more than half of the largest message at once is no burst but a line that is none
    return Net(rate, least / messages, min((least - start) * rate / 8, sizes[-1] / 2))


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) with the least ``sum |a + b*x - y| / y``."""
    x, y = torch.tensor(points, dtype=torch.float64).unbind(1)
    scale = x.max()
    design = torch.stack([torch.ones_like(x), x / scale], 1) / y[:, None]
    weights = torch.ones_like(y)
    for _ in range(ROUNDS):
        root = weights.sqrt()[:, None]
        solution = torch.linalg.lstsq(design * root, root).solution
        error = (design @ solution - 1).abs().squeeze(1)
        weights = 1 / error.clamp(min=LEAST)
    start, slope = solution.flatten().tolist()
    return start, slope / float(scale)
