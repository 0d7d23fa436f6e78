"""Estimate the network's latency and rate from timed messages of several sizes.

    seconds = messages * latency + 8 * (bytes - burst) / rate

The rate is the slope of a straight line through (bytes, seconds) of the larger third of the sizes.
The line minimizes the sum of absolute relative errors, by iteratively reweighted least squares, so
single delayed messages do not matter, and small messages, which a busy machine delays most, do not
bend it.

The smallest size gives the latency. If the line's intercept is below it, the difference is a burst
that passes at once, as a traffic shaper allows. If it is above, the intercept is the latency.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

from laconic.policy.facts import Net

ROUNDS = 50
"""Iterations of reweighting. The line converges after about 20."""
LEAST = 1e-3
"""Relative errors below this get equal weights, which keeps the weights finite."""
FASTEST = 1e13
"""In bit/s, if larger messages take no longer."""


class Sample(NamedTuple):
    """A timed collective: ``bytes`` sent by a rank in ``messages``, one after the other; the
    ``seconds`` of the slowest rank, and the processor seconds ``used`` by a rank on average."""

    bytes: int
    messages: int
    seconds: float
    used: float = 0.0


def fit(samples: Sequence[Sample]) -> Net:
    """Return the network that explains the samples.

    All samples must have the same number of messages. At least three sizes are required.
    """
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
    """Return (a, b) that minimizes ``sum |a + b*x - y| / y``."""
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
