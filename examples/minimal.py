"""Training with laconic in an ordinary loop. Run it on four ranks of this machine:

    torchrun --nproc-per-node 4 examples/minimal.py

or as a single process, without torchrun. The lines that laconic adds are marked.
"""

import torch
from torch import nn

import laconic

STEPS, BATCH = 240, 32


def batches(rank: int):
    """Yield this rank's endless data: sums of squares of random points, different on every rank."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        x = torch.randn(BATCH, 16, generator=generator)
        yield x, x.square().sum(1, keepdim=True) / 16


def main() -> None:
    laconic.init()  # added; or your own torch.distributed.init_process_group
    rank = torch.distributed.get_rank()
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    recipe = laconic.slowmo(laconic.local_sgd(3), period=48, momentum=0.2)
    with laconic.attach(model, optimizer, recipe) as sync:  # added
        for step, (x, y) in zip(range(1, STEPS + 1), batches(rank), strict=False):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 48 == 0:
                mean = sync.mean(loss)  # over all ranks
                if rank == 0:
                    print(f"step {step}: loss {mean:.4f}")
    # after the `with` block, every rank holds the consensus model

    if rank == 0:
        stats = sync.stats()
        sent, size = stats.bytes_sent, sum(p.numel() * 4 for p in model.parameters())
        print(f"{stats.rounds} rounds; {sent / 1e3:.0f} kB sent for a model of {size / 1e3:.0f} kB")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
