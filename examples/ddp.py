"""Plain torch DistributedDataParallel on a model of 3.5 MB: prints the seconds of a step.

laconic lab --bandwidth 100mbit -- python examples/ddp.py
laconic lab --bandwidth 1gbit -- torchrun examples/ddp.py
torchrun --nproc-per-node 4 examples/ddp.py
"""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH = int(sys.argv[1]) if len(sys.argv) > 1 else 20, 32


def seconds_per_step(model, optimizer, data, steps):
    """Return the mean over `steps` steps. All ranks start together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        x, y = data()
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (time.perf_counter() - start) / steps


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)

    def data():
        x = torch.randn(BATCH, 512, generator=generator)
        return x, x.square().sum(1, keepdim=True) / 512

    torch.manual_seed(0)
    layers = nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 320), nn.GELU(), nn.Linear(320, 1)
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    seconds_per_step(model, optimizer, data, 2)  # DDP rebuilds its buckets after the first step
    together = seconds_per_step(model, optimizer, data, STEPS)
    with model.no_sync():  # last, because the ranks' models differ from here on
        alone = seconds_per_step(model, optimizer, data, STEPS)
    if rank == 0:
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        sent = 2 * (ranks - 1) / ranks * size  # by each rank, in a ring
        print(f"{ranks} ranks, {size / 1e6:.3f} MB of gradients, {sent / 1e6:.3f} MB sent per step")
        print(f"{together:.4f} s per step, {alone:.4f} s without communication")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
