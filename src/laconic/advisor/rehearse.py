"""What a round keeps the processors busy for: timed on tensors like the model's, over a link that
carries nothing."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from laconic.algorithms.round import AnyRound, GradientRound, Recipe, typical
from laconic.attach import attach
from laconic.device import synchronize
from laconic.links.null import NullLink
from laconic.predict import Facts, work_key

MOST_BYTES = 2**26
"""Of the tensors rehearsed with; a larger model's rounds are taken to last longer in proportion."""
WARMUP, REPEATS = 2, 4


def rehearsals(recipes: Iterable[Recipe]) -> dict[str, AnyRound]:
    """One of each kind of round that differ in what they do, by `work_key`."""
    found: dict[str, AnyRound] = {}
    for r in (r for recipe in recipes for r in recipe):
        if r.over != "group" and r.exchange.communicates:
            found.setdefault(work_key(r), r)
    return found


def rehearse(
    r: AnyRound, facts: Facts, dtype: torch.dtype, device: torch.device, begin: Callable[[], object]
) -> float:
    """Seconds of processors for one round like ``r`` of a model of such ``facts``. ``begin()`` is
    called before each timed one, so that all ranks can work at once, as they will in training."""
    shapes = _some(facts)
    share = facts.elements / max(sum(map(math.prod, shapes)), 1)
    one = typical(r)
    n = facts.workers * (facts.ranks if isinstance(r, GradientRound) else 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of workers with the same gradients, as all are here
        with_round = _seconds((one,), shapes, n, dtype, device, begin)
        without = _seconds(
            (), shapes, n, dtype, device, begin, gradients=isinstance(r, GradientRound)
        )
    return max(with_round - without, 0.0) * share


def _some(facts: Facts) -> list[tuple[int, ...]]:
    """The first of the model's tensors, up to `MOST_BYTES`; of a larger one its first rows."""
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
    """Of one optimiser step, which does next to nothing itself, with its rounds."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    model = nn.ParameterList([nn.Parameter(x) for x in tensors])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    if gradients or any(isinstance(r, GradientRound) for r in recipe):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(device, dtype)
    # a step whose gradients no backward pass has averaged averages them itself
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
    """Seconds, when all that was asked of the card is done."""
    synchronize(device)
    return time.perf_counter()
