"""Time the processor work of a round, on tensors like the model's and a link without a network."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from laconic.algorithms.recipes import ddp
from laconic.algorithms.round import AnyRound, GradientRound, Recipe
from laconic.attach import attach
from laconic.device import synchronize
from laconic.links.null import NullLink
from laconic.policy.facts import Facts
from laconic.policy.predict import takes_time, typical, work_key

MOST_BYTES = 2**26
"""Maximum size of the tensors used. The time of a larger model's rounds is scaled up."""
WARMUP, REPEATS = 2, 4


def rehearsals(recipes: Iterable[Recipe]) -> dict[str, AnyRound]:
    """Return one round of each kind that differs in its work, by `work_key`."""
    found: dict[str, AnyRound] = {}
    for r in (r for recipe in recipes for r in recipe):
        if takes_time(r):
            found.setdefault(work_key(r), r)
    return found


def rehearse(
    r: AnyRound, facts: Facts, dtype: torch.dtype, device: torch.device, begin: Callable[[], object]
) -> float:
    """Return the processor seconds of one round like ``r`` for a model with these ``facts``.

    ``begin()`` is called before each timed round, so that all ranks work at once, as in training.
    """
    shapes = _sample_shapes(facts)
    share = facts.elements / max(sum(map(math.prod, shapes)), 1)
    canonical = typical(r)
    n = facts.workers * (facts.ranks if isinstance(r, GradientRound) else 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all workers have the same gradients here
        base = () if r.exchange.communicates else ddp()  # it needs equal workers
        with_round = _seconds((*base, canonical), shapes, n, dtype, device, begin)
        averaged = isinstance(r, GradientRound)
        baseline = _seconds(base, shapes, n, dtype, device, begin, gradients=averaged)
    return max(with_round - baseline, 0.0) * share


def _sample_shapes(facts: Facts) -> list[tuple[int, ...]]:
    """Return the shapes of the first tensors, or first rows of a large one, up to `MOST_BYTES`."""
    left, found = MOST_BYTES // facts.itemsize, []
    for shape in facts.shapes:
        row = max(math.prod(shape[1:]), 1)
        if math.prod(shape) > left:
            shape = (min(left // row, shape[0]), *shape[1:]) if row <= left else (left,)
        if left <= 0:
            break
        left -= math.prod(shape)
        found.append(shape)
    return [shape for shape in found if math.prod(shape)]


def _seconds(
    recipe: Recipe,
    shapes: Sequence[tuple[int, ...]],
    n: int,
    dtype: torch.dtype,
    device: torch.device,
    begin: Callable[[], object],
    gradients: bool = False,
) -> float:
    """Return the seconds of one optimizer step, which itself does very little, with its rounds."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    model = nn.ParameterList([nn.Parameter(x) for x in tensors])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    if gradients or any(isinstance(r, GradientRound) for r in recipe):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(device, dtype)
    # Without a backward pass, the step itself averages the gradients.
    sync = attach(model, optimizer, recipe, link=NullLink(n))
    spans = []
    for _ in range(WARMUP + REPEATS):
        begin()
        start = now(device)
        optimizer.step()
        spans.append(now(device) - start)
    sync.detach()
    return statistics.median(spans[WARMUP:])


def now(device: torch.device) -> float:
    """Return the time in seconds, after all work queued on the GPU is done."""
    synchronize(device)
    return time.perf_counter()
