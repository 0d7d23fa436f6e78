"""The network's latency and rate from timed messages of several sizes.

    seconds = messages * latency + 8 * (bytes - burst) / rate

The rate is that of a straight line through (bytes, seconds) of the larger third of the sizes, with
the least sum of absolute relative errors, so that single messages that something held up do not
count: iteratively reweighted least squares. Small messages, which a busy machine holds up most, do
not bend it. They give the latency; where the line begins below it, a burst passes at once, as a
shaped card lets it, and where above, it is the latency of messages that matter.
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
FASTEST = 1e13
"""bit/s, where larger messages take no longer."""


class Sample(NamedTuple):
    """``seconds`` that a collective took in which a rank sends ``bytes``, in ``messages``, one
    after the other."""

    bytes: int
    messages: int
    seconds: float


def fit(samples: Sequence[Sample]) -> Net:
    """The net on which these took so long. All have as many messages. There are at least
    three sizes."""
    sizes = sorted({s.bytes for s in samples})
    if len(sizes) < 3:
        raise ValueError(f"a fit needs messages of at least three sizes, not {len(sizes)}")
    messages = max(samples[0].messages, 1)
    least = statistics.median(s.seconds for s in samples if s.bytes == sizes[0])
    large = sizes[2 * len(sizes) // 3 - 1]
    start, slope = line([(s.bytes, s.seconds) for s in samples if s.bytes >= large])
    rate = min(8 / slope, FASTEST) if slope > 0 else FASTEST
    return Net(rate, max(least, start) / messages, max(least - start, 0.0) * rate / 8)


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
