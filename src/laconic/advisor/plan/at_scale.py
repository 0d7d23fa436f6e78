"""The real mathematics with many workers: a tiny model, trained by simulated workers.

A plan says what a recipe costs. What it learns with 64 or 256 workers can be seen here: every line
of the algorithm runs, as in training, on threads of one process.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laconic.advisor.measure import peak_bytes
from laconic.algorithms.compile import check_quorum, in_groups
from laconic.algorithms.round import Recipe
from laconic.errors import check_int

MOST_WORKERS, LEAST_STEPS = 256, 10
INPUTS, HIDDEN = 16, 32
BATCH = 16
NOISE = 0.1
LR = 0.02
TAIL = 5


@dataclass(frozen=True)
class Learned:
    """What ``workers`` have learned in ``steps`` steps: the ``losses`` of their mean model on held
    out samples, at ten points of the run; the least possible one is 0. ``distance``: the root mean
    square of what a worker's parameters differ from the mean before the last step. It took
    ``seconds`` and at most ``memory`` bytes of the process."""

    workers: int
    steps: int
    losses: tuple[float, ...]
    distance: float
    seconds: float
    memory: int


def learn(recipe: Recipe, workers: int, steps: int = 200, seed: int = 0) -> Learned:
    """Train a tiny model under ``recipe`` with up to 256 simulated ``workers``.

    The task is to imitate a random network of the same form, from samples with noise that differ
    between workers. Raises the errors of `check_learnable`.
    """
    import laconic

    check_learnable(recipe, str(recipe), workers, steps)
    torch.manual_seed(seed)
    teacher = _network()
    held_out = torch.randn(512, INPUTS)
    with torch.no_grad():
        answers = teacher(held_out)
    scale = float(answers.square().mean())
    points = {round(steps * (k + 1) / 10) for k in range(10)}

    def work(rank: int) -> tuple[list[float], Tensor]:
        torch.manual_seed(seed + 1)
        model = _network()
        optimizer = torch.optim.AdamW(model.parameters(), LR)
        sync = laconic.attach(model, optimizer, recipe)
        draw = torch.Generator().manual_seed(1000 * seed + rank + 1)
        losses: list[float] = []
        flat = torch.zeros(0)
        while sync.step < steps:
            x = torch.randn(BATCH, INPUTS, generator=draw)
            with torch.no_grad():
                y = teacher(x)
                y = y + NOISE * scale**0.5 * torch.randn(y.shape, generator=draw)
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            sync.report_loss(loss)
            optimizer.step()
            if sync.step in points:
                with sync.consensus(), torch.no_grad():
                    if rank == 0:
                        losses.append(float((model(held_out) - answers).square().mean()) / scale)
            if sync.step == steps - 1:
                flat = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])
        sync.finish()
        return losses, flat

    begin = time.perf_counter()
    results = laconic.simulate(work, workers=workers)
    seconds = time.perf_counter() - begin
    ends = torch.stack([flat for _, flat in results])
    distance = float((ends - ends.mean(0)).square().mean().sqrt())
    memory = peak_bytes(torch.device("cpu"))
    return Learned(workers, steps, tuple(results[0][0]), distance, seconds, memory)


def check_learnable(recipe: Recipe, text: str, workers: int, steps: int) -> None:
    """Raise ``ValueError`` for fewer than 10 steps, more than 256 workers, or a recipe that they
    cannot run. ``text``: what the recipe is called."""
    check_int("steps", steps, LEAST_STEPS)
    if check_int("workers", workers, 1) > MOST_WORKERS:
        raise ValueError(f"workers must be at most {MOST_WORKERS} in one process, not {workers}")
    if in_groups(recipe):
        raise ValueError(f"{text} has rounds inside groups of workers, and here are no groups")
    check_quorum(recipe, workers, plain=True)


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))


def final(learned: Learned) -> float:
    """Return the loss at the end: the median of the last points."""
    return statistics.median(learned.losses[-TAIL:])
