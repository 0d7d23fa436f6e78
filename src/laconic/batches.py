"""Are the workers reading the same batches? The most common mistake in a data-parallel loop, and
one that nothing else shows: the loss falls, and the other workers are wasted."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.tensors import local

CHUNK = 2**20
"""Elements summed at a time, so that no copy of a large gradient is made."""


def fingerprint(params: Sequence[Tensor], device: torch.device) -> Tensor:
    """Two sums over a rank's own gradients, as float64 of shape (2,) on ``device``."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for p in params:
        if p.grad is not None and not p.grad.is_sparse:
            for piece in torch.split(local(p.grad).reshape(-1), CHUNK):
                g = piece.abs().double()  # abs: of complex gradients too
                total += torch.stack([g.sum(), g.square().sum()]).to(device)
    return total


def warn_if_identical(everyone: Sequence[Sequence[float]]) -> None:
    """Warn where all ranks' fingerprints are the same and not of nothing."""
    first = everyone[0]
    if len(everyone) > 1 and first[1] > 0 and all(other == first for other in everyone):
        warnings.warn(
            "the first gradients are identical on all workers: they are reading the same "
            "batches. Give each its share of the data (DistributedSampler, or seed by rank)",
            stacklevel=2,
        )
