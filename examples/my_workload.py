"""Your own workload for `laconic compare`: fit sums of squares with a small network.

laconic compare "ddp()" "local_sgd(8)" --workload examples/my_workload.py:make --seconds 5
"""

import torch
from torch import nn


def make():
    return {
        "model": lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)),
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        "batches": lambda worker, workers, seed: stream(1 + seed * workers + worker),
        "loss": lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        "validation": [next(stream(0)) for _ in range(8)],
    }


def stream(seed):
    """Yield endless batches: random points, and the mean of their squared coordinates."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(32, 16, generator=generator)
        yield x, x.square().mean(1, keepdim=True)
