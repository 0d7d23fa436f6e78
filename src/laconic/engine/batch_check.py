"""Check that workers read different batches.

Reading the same ones is the most common mistake in a data-parallel loop, and nothing else shows it:
the loss falls, and the other workers are wasted. Gradients that are alike because
DistributedDataParallel has averaged them already are an error.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from laconic.buckets import local
from laconic.engine.model_checks import (
    AVERAGED_BY_DDP,
    IDLE_DDP,
    NO_DDP,
    USED_DDP,
    ddp_use,
    wrappers_used,
)

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


def check_first_gradients(everyone: Sequence[Sequence[float]]) -> None:
    """Check all ranks' `BatchCheck.row`.

    Raises ``ValueError``, on every rank alike, where DistributedDataParallel averages the
    gradients, too. It does if one ran the forward pass; or if there is one, and the gradients
    are identical. Warns where gradients are identical, and not zero, without it. With recipes
    that average gradients, fingerprints are taken before any averaging, so identical ones mean
    identical batches.
    """
    if len(everyone) == 1:
        return
    total, squares, _ = everyone[0]
    identical = 0 < squares < math.inf and all(
        tuple(row[:2]) == (total, squares) for row in everyone
    )
    ddp = max((row[2] for row in everyone), default=NO_DDP)
    if ddp == USED_DDP or (identical and ddp == IDLE_DDP):
        raise ValueError(AVERAGED_BY_DDP)
    if identical:
        warnings.warn(
            "the first gradients are identical on all workers: they are reading the same "
            "batches. Give each its share of the data (DistributedSampler, ElasticSampler, or seed "
            "by rank)",
            stacklevel=2,
        )


class BatchCheck:
    """Compares all ranks' gradients of the first step, before any averaging."""

    def __init__(self, model: nn.Module) -> None:
        self._wrappers_before = wrappers_used(list(model.parameters()))
        self._fingerprint: Tensor | None = None

    def note(self, params: Sequence[Tensor], device: torch.device) -> None:
        """Record the fingerprint of ``params``' gradients, once."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(params, device)

    def row(self, params: Sequence[Tensor]) -> Tensor:
        """What the ranks compare: the fingerprint, and whether DistributedDataParallel is in use
        on any of ``params``."""
        recorded, self._fingerprint = self._fingerprint, None
        assert recorded is not None, "recorded before or after the first step"
        ddp = ddp_use(params, self._wrappers_before)
        return torch.cat([recorded, recorded.new_tensor([ddp])])
