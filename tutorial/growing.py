"""What chapter 2 runs in threads and processes."""

from __future__ import annotations

import time
from threading import Thread

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn

from tutorial.toy import FFNet, sgd


def steps_of_one(steps: int) -> None:
    """Train a network so small that most of the work is Python and starting operations."""
    torch.set_num_threads(1)  # applies to the calling thread only
    model = FFNet(input_size=100, num_hl=0, hl_size=10)
    optimizer = sgd(model)
    x, y = torch.randn(32, 100), torch.randn(32, 1)
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def time_threads(workers: int, steps: int) -> float:
    """Seconds until ``workers`` threads of this process have made ``steps`` steps each."""
    threads = [Thread(target=steps_of_one, args=(steps,)) for _ in range(workers)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def time_process(rank: int, world_size: int, steps: int) -> float:
    """Seconds until every process of the group has made ``steps`` steps."""
    steps_of_one(1)  # the first step allocates memory: not timed
    dist.barrier()
    begin = time.perf_counter()
    steps_of_one(steps)
    dist.barrier()
    return time.perf_counter() - begin


def draw(models: list[tuple[str, float, float, str]]) -> None:
    """Plot the sizes of language models by year."""
    _, axes = plt.subplots(figsize=(7, 4))
    axes.semilogy([year for _, year, _, _ in models], [size for _, _, size, _ in models], "o")
    for name, year, size, _ in models:
        axes.annotate(name, (year, size), xytext=(5, -10), textcoords="offset points", fontsize=8)
    axes.set(
        xlabel="year",
        ylabel="parameters",
        xlim=(2017.8, 2026.5),
        ylim=(3e7, 3e12),
        title="Language models",
    )
    axes.grid(alpha=0.3)
