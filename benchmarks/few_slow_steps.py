"""What slow momentum costs with few workers and few slow steps, for docs/algorithms/slowmo.md.

    python -m benchmarks.few_slow_steps

Prints the loss of a small regression after 96 steps of 4 workers, by momentum; in some seconds.
"""

from __future__ import annotations

import torch
from torch import nn

import laconic


def loss(momentum: float) -> float:
    recipe = laconic.slowmo(laconic.local_sgd(3), period=48, momentum=momentum)

    def run(rank: int) -> float:
        task = torch.Generator().manual_seed(0)
        teacher, x = torch.randn(16, 4, generator=task), torch.randn(1024, 16, generator=task)
        y = torch.tanh(x @ teacher)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sync = laconic.attach(model, optimizer, recipe)
        generator = torch.Generator().manual_seed(100 + rank)
        for _ in range(96):
            batch = torch.randint(0, 1024, (16,), generator=generator)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
            optimizer.step()
        sync.finish()
        with torch.no_grad():
            return float(nn.functional.mse_loss(model(x), y))

    return laconic.simulate(run, workers=4)[0]


if __name__ == "__main__":
    print({momentum: round(loss(momentum), 3) for momentum in (0.5, 0.2, 0.0)})
