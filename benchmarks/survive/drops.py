"""DiLoCo with dropped contributions: the loss when each is lost with some probability.

    python -m benchmarks.survive.drops [--workers 8] [--steps 1000] [--seeds 3]

Douillard et al. (2023, "DiLoCo", Figure 8) drop each worker's outer gradient with a probability of
up to 50%. A worker whose contribution is dropped goes on from its own parameters, the others from
the new ones. They report a perplexity at most 2.1% higher. Here the same is simulated: a small
next-byte model, a different part of the text for each worker (their non-i.i.d. setting), and
`laconic.diloco` with a link that takes out what is dropped. The mean is over those that are left.
"""

from __future__ import annotations

import argparse
import math
import statistics

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import laconic
from laconic.lab.race.workloads import standard_library
from laconic.links.simulated import SimulatedLink, current_link

PERIOD, CONTEXT, BATCH = 20, 8, 64
SHARES = (0.0, 0.1, 0.3, 0.5)
PUBLISHED = {0.5: "at most +2.1%"}


def dropped(seed: int, number: int, workers: int, share: float) -> list[bool]:
    """Return whose contributions to the round ``number`` are dropped; never all."""
    generator = torch.Generator().manual_seed(1000 * seed + number)
    lost = (torch.rand(workers, generator=generator) < share).tolist()
    return lost if not all(lost) else [False, *lost[1:]]


class Dropping:
    """A link that leaves some workers out of each mean. All else goes to the ``link`` inside."""

    def __init__(self, link: SimulatedLink, seed: int, share: float) -> None:
        self._link, self._seed, self._share = link, seed, share
        self.number = -1
        """The present round; -1: nothing is dropped."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._link, name)

    def lost(self) -> list[bool]:
        if self.number < 0:
            return [False] * self._link.size
        return dropped(self._seed, self.number, self._link.size, self._share)

    def reduce_scatter(self, x: Tensor, owners: int | None = None) -> Tensor:
        lost = self.lost()
        if lost[self._link.rank]:
            x.zero_()
        mean = self._link.reduce_scatter(x, owners)
        return mean * (len(lost) / (len(lost) - sum(lost)))


def model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(256, 24),
        nn.Flatten(),
        nn.Linear(24 * CONTEXT, 256),
        nn.GELU(),
        nn.Linear(256, 256),
    )


def loss(network: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
    inputs = text[starts[:, None] + torch.arange(CONTEXT)]
    return F.cross_entropy(network(inputs), text[starts + CONTEXT])


def train(workers: int, steps: int, seed: int, share: float) -> float:
    """Return the validation loss of the mean model in nats."""
    everything = torch.frombuffer(bytearray(standard_library()), dtype=torch.uint8).long()
    text, held_out = everything[: -len(everything) // 10], everything[-len(everything) // 10 :]
    part = len(text) // workers

    def worker(rank: int) -> float:
        torch.manual_seed(seed)
        network = model()
        optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
        own: list[Tensor] = []

        def note(*_: object) -> None:  # before laconic's hook, which runs the round
            own[:] = [p.detach().clone() for p in network.parameters()]

        optimizer.register_step_post_hook(note)
        inside = current_link.get()
        assert isinstance(inside, SimulatedLink)
        link = Dropping(inside, seed, share)
        recipe = laconic.diloco(PERIOD, lr=0.7, momentum=0.9)
        sync = laconic.attach(network, optimizer, recipe, link=link)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(100 * seed + rank)
        while sync.step < steps:
            starts = rank * part + torch.randint(part - CONTEXT - 1, (BATCH,), generator=generator)
            optimizer.zero_grad()
            loss(network, text, starts).backward()  # type: ignore[no-untyped-call]
            rounds = (sync.step + 1) // PERIOD
            link.number = rounds if (sync.step + 1) % PERIOD == 0 and sync.step + 1 < steps else -1
            lost = link.lost()[rank]
            optimizer.step()
            if lost:
                with torch.no_grad():
                    for p, before in zip(network.parameters(), own, strict=True):
                        p.copy_(before)
            link.number = -1
        sync.finish()
        with torch.no_grad():
            places = torch.arange(0, len(held_out) - CONTEXT - 1, 97)
            return float(loss(network, held_out, places))

    return laconic.simulate(worker, workers)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    losses = {
        share: [train(options.workers, options.steps, s, share) for s in range(options.seeds)]
        for share in SHARES
    }
    table = Table(title=f"{options.workers} workers, {options.steps} steps, {options.seeds} seeds")
    for column in ("dropped", "loss", "perplexity", "change", "per seed", "published"):
        table.add_column(column, justify="right")
    for share, own in losses.items():
        changes = [math.exp(a - b) - 1 for a, b in zip(own, losses[0.0], strict=True)]
        mean = statistics.mean(own)
        table.add_row(
            f"{share:.0%}",
            f"{mean:.4f}",
            f"{math.exp(mean):.3f}",
            f"{statistics.mean(changes):+.2%}",
            " ".join(f"{change:+.1%}" for change in changes),
            PUBLISHED.get(share, ""),
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
