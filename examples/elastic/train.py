"""A run whose workers come and go. On one machine, in three terminals:

    laconic coordinator
    python examples/elastic/train.py
    python examples/elastic/train.py

Kill a worker, and start it again: it joins the run. `docs/elastic.md` explains the program.
"""

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import laconic


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 16, generator=generator)
    return TensorDataset(x, x.square().sum(1, keepdim=True) / 16)


def train(options: argparse.Namespace) -> str:
    """Train one worker. Returns a digest of the model."""
    torch.manual_seed(0)
    data = dataset()
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=options.steps)
    sampler = laconic.ElasticSampler(data, seed=1)

    elastic = laconic.Elastic(
        options.coordinator,  # None: LACONIC_COORDINATOR, or a simulated run
        workers=options.workers,
        min_workers=options.min_workers,
        others={"lr": scheduler, "data": sampler},
        trace=options.trace,
    )
    sync = laconic.attach(
        model, optimizer, laconic.local_sgd(4), elastic=elastic, metrics=options.metrics
    )
    sync.on_change(lambda view: say(f"step {sync.step}: {len(view.workers)} workers"))
    say(f"worker {sync.view.workers[sync.view.place]} begins after step {sync.step}")

    batches = iter(DataLoader(data, batch_size=32, sampler=sampler))
    while sync.step < options.steps:
        x, y = next(batches)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if sync.step % 100 == 0:
            say(f"step {sync.step}: loss {loss.item():.4f}")
        time.sleep(options.pause)
    sync.finish()

    stats = sync.stats()
    say(f"lost: {stats.workers_lost} workers and {stats.steps_lost} of their steps")
    if options.model is not None and sync.view.place == 0:
        torch.save(model.state_dict(), f"{options.model}.new")
        os.replace(f"{options.model}.new", options.model)
    return hashlib.sha256(b"".join(p.detach().numpy() for p in model.parameters())).hexdigest()[:16]


def say(text: str) -> None:
    print(f"[{os.getpid()}] {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", help="default: what LACONIC_COORDINATOR says")
    parser.add_argument("--workers", type=int, default=2, help="how many the start waits for")
    parser.add_argument("--min-workers", type=int, default=1, help="with fewer, the others wait")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--pause", type=float, default=0.01, help="seconds after each step")
    parser.add_argument("--model", type=Path, help="store the model here at the end")
    parser.add_argument("--metrics", type=Path, help="a file for the metrics")
    parser.add_argument("--trace", type=Path, help="a directory that records who took part in what")
    parser.add_argument("--repeat", type=Path, help="repeat the run of such a directory, and exit")
    options = parser.parse_args()

    torch.set_num_threads(1)
    if options.repeat is not None:
        options.pause, options.trace, options.model, options.metrics = 0.0, None, None, None
        trace = laconic.Trace(options.repeat)
        digests = laconic.simulate(lambda number: train(options), faults=trace)
        say(f"digests: {[digest for digest in digests if digest is not None]}")
    elif options.model is not None and options.model.exists():
        say(f"{options.model} exists: the run has ended")
    else:
        say(f"digest: {train(options)}")


if __name__ == "__main__":
    main()
