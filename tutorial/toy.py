"""The network, the data and the loop that the chapters train, on one CPU."""

from __future__ import annotations

import inspect
import os
import platform
import textwrap
import time
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SCALE = float(os.environ.get("TUTORIAL_SCALE", "1"))
"""Share of the work that chapters do. Times are meaningful only at 1."""
FULL = SCALE == 1
SEED = 691


class FFNet(nn.Module):
    """Fully connected layers with ReLU between them, and one number out.

    ``num_hl``: hidden layers after the first, each ``hl_size`` wide.
    """

    def __init__(self, input_size: int, num_hl: int, hl_size: int) -> None:
        super().__init__()
        layers = [nn.Linear(input_size, hl_size), nn.ReLU()]
        for _ in range(num_hl):
            layers += [nn.Linear(hl_size, hl_size), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(hl_size, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ToyDataset(Dataset[tuple[Tensor, Tensor]]):
    """Random inputs x, and the target |x.w| with a fixed w. Depends on ``seed`` alone."""

    def __init__(self, input_size: int, num_samples: int, seed: int = SEED) -> None:
        generator = torch.Generator().manual_seed(seed)
        direction = torch.randn(input_size, 1, generator=generator) / input_size**0.5
        self.x = torch.randn(num_samples, input_size, generator=generator)
        self.y = (self.x @ direction).abs()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)


def train_epoch(
    model: nn.Module, loader: DataLoader[tuple[Tensor, Tensor]], optimizer: torch.optim.Optimizer
) -> float:
    """Train on every batch once. Returns the mean loss per sample, before the step on its batch."""
    total, samples = 0.0, 0
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
        samples += len(x)
    return total / samples


def benchmark_training(
    nn_mdl: nn.Module,
    batch_size: int = 32,
    input_size: int = 100,
    num_samples: int = 16384,
    nb_epochs: int = 10,
    repeats: int = 10,
    verbose: bool = True,
) -> list[int]:
    """Nanoseconds that ``nb_epochs`` epochs take, for each of ``repeats`` repeats.

    Batches are made beforehand, so that only training is timed, and not the loading of data. The
    model continues to train from one repeat to the next. This does not change the cost of a step.
    """
    data = ToyDataset(input_size, num_samples)
    batches = list(zip(data.x.split(batch_size), data.y.split(batch_size), strict=True))
    optimizer = sgd(nn_mdl)
    train_epoch(nn_mdl, batches[:8], optimizer)  # the first steps allocate memory: not timed
    nanoseconds = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        for _ in range(nb_epochs):
            train_epoch(nn_mdl, batches, optimizer)
        nanoseconds.append(time.perf_counter_ns() - start)
    if verbose:
        print(
            f"{count_parameters(nn_mdl):,} parameters, {num_samples:,} samples, {nb_epochs} epochs:"
            f" median {median(nanoseconds) / 1e9:.3f} s,"
            f" {min(nanoseconds) / 1e9:.3f} to {max(nanoseconds) / 1e9:.3f} s"
        )
    return nanoseconds


def scaled(number: int, least: int = 1) -> int:
    """``number`` times TUTORIAL_SCALE, rounded, and at least ``least``."""
    return max(round(number * SCALE), least)


def machine() -> str:
    """The machine on which figures were measured, and its load before that."""
    busy = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "load unknown"
    told = f"{_processor()}, {os.cpu_count()} cores, {busy}, torch {torch.__version__}"
    return told if FULL else f"{told}; scaled to {SCALE:g} of the work: times mean nothing"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def expect(usual: bool, claim: str) -> None:
    """Print a remark if a claim about measured times does not hold in this run, and go on.

    A chapter asserts what its code computes. Times depend on what else the machine does.
    """
    if FULL and not usual:
        print(f"\nNot in this run: {claim}. Was your machine busy? Run it again to see.")


def show(*pieces: object, first: str = "", last: str = "") -> None:
    """Print the source of functions and classes, so that a chapter shows what it runs.

    ``first``, ``last``: only the lines from one that begins so to one that begins so.
    """
    for number, piece in enumerate(pieces):
        lines = inspect.getsource(piece).rstrip().split("\n")
        begins = [line.strip() for line in lines]
        start = next(k for k, line in enumerate(begins) if line.startswith(first))
        end = start + next(k for k, line in enumerate(begins[start:]) if line.startswith(last))
        part = textwrap.dedent("\n".join(lines[start : end + 1 if last else None]))
        where = [f"# in {getattr(piece, '__name__', '')}:"] if first else []
        print(*["\n"] * bool(number), *where, part, sep="\n")
