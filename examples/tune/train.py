"""Train for some seconds with a recipe and a learning rate, and print the consensus model's loss.

laconic lab -- python examples/tune/train.py "local_sgd(8)" 0.003 20
"""

import sys
import time

import torch
from torch import nn

import laconic

CHECKS = 8


def batches(seed):
    """Yield endless batches: random points, and the mean of their squared coordinates."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(32, 16, generator=generator)
        yield x, x.square().mean(1, keepdim=True)


def main(recipe, lr, seconds):
    laconic.init()
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    x_test, y_test = next(batches(0))
    start, check = time.monotonic(), 0

    with laconic.attach(model, optimizer, recipe) as sync:
        for step, (x, y) in enumerate(batches(1 + rank), 1):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10:
                continue
            share = sync.mean((time.monotonic() - start) / seconds)  # the same on all ranks
            optimizer.param_groups[0]["lr"] = lr * max(1 - share, 0.0)
            if share < (check + 1) / CHECKS:
                continue
            check += 1
            with sync.consensus(), torch.no_grad():
                loss = nn.functional.mse_loss(model(x_test), y_test)
            if rank == 0:
                print(f"check {check}: loss {loss:.5f}", flush=True)
            if check == CHECKS:
                break
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
