"""Check that workers read different batches.

Reading the same ones is the most common mistake in a data-parallel loop, and nothing else shows it:
the loss falls, and the other workers are wasted.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.tensors import local

CHUNK = 2**20
"""Elements summed at a time, so that no copy of a large gradient is made."""


def fingerprint(params: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sums of |g|, of g^2 and of 1 over a rank's own gradients, as float64 on ``device``."""
    total = torch.zeros(3, dtype=torch.float64, device=device)
    for p in params:
        if p.grad is not None and not p.grad.is_sparse:
            for piece in torch.split(local(p.grad).reshape(-1), CHUNK):
                g = piece.abs().double()  # abs: of complex gradients too
                total += torch.stack([g.sum(), g.square().sum(), g.new_tensor(g.numel())]).to(
                    device
                )
    return total


def check_first_gradients(everyone: Tensor) -> None:
    """Warn if all ranks' fingerprints are identical, and not zero. With recipes that average
    gradients, they are taken before any averaging."""
    squares = float(everyone[0, 1])
    if len(everyone) > 1 and 0 < squares < math.inf and bool((everyone == everyone[0]).all()):
        warnings.warn(
            "the first gradients are identical on all workers. Either they are reading the same "
            "batches: give each its share of the data (DistributedSampler, ElasticSampler, or seed "
            "by rank). Or the loop trains through a DistributedDataParallel around the model, "
            "which averages all gradients at every step: call the plain module (model.module)",
            stacklevel=2,
        )
