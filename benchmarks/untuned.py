"""Compare auto()'s choice with fixed recipes on a task for which nothing was tuned.

    python -m benchmarks.untuned [--seeds 0 1 2] [--optimizer adamw|sgd]

A recurrent network predicts the next value of noisy series. 4 simulated workers train for as many
steps as the cost model says the recipe takes in the time of 400 steps without communication, on
networks on which sending all gradients takes 1/2, 5 and 50 steps. So no figure depends on the speed
of the machine. `auto()` is the recipe that it would choose from the same facts.
"""

from __future__ import annotations

import argparse
import math
import warnings
from concurrent.futures import ProcessPoolExecutor
from statistics import fmean

import torch
from torch import Tensor, nn

import laconic
from laconic.algorithms.parse import parse_recipe
from laconic.auto import choose
from laconic.candidates import takes_muon
from laconic.predict import Facts, predict

WORKERS, STEPS, COMPUTE = 4, 400, 0.1
BATCH, LENGTH, HIDDEN = 4, 24, 64
SLOW = (0.5, 5.0, 50.0)
"""Steps in which the network could send all gradients."""
FIXED = (
    "ddp()",
    "ddp(codec='int8')",
    "ddp(codec='int4')",
    "power_sgd(4, codec='int8')",
    "local_sgd(4)",
    "local_sgd(16)",
    "slowmo(local_sgd(12), 48)",
    "diloco(32, momentum=0.6)",
    "streaming_diloco(8)",
    "streaming_diloco(16)",
    "streaming_diloco(64, delay=8)",
    "sparse_loco(16)",
)


class Network(nn.Module):
    """A GRU and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.GRU(1, HIDDEN, batch_first=True)
        self.readout = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.first(x)[0])  # type: ignore[no-any-return]


def series(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Sums of two sines of random rates and phases, with noise; and the values that follow."""
    rate = 0.2 + torch.rand(count, 1, 2, generator=generator)
    phase = 2 * math.pi * torch.rand(count, 1, 2, generator=generator)
    at = torch.arange(LENGTH + 1.0)[None, :, None]
    clean = torch.sin(rate * at + phase).sum(2, keepdim=True)
    noisy = clean + 0.3 * torch.randn(clean.shape, generator=generator)
    return noisy[:, :-1], clean[:, 1:]


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(text: str, steps: int, name: str, seed: int) -> float:
    """Return the consensus model's mean squared error after ``steps``."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    held_out = series(torch.Generator().manual_seed(10**6), 512)

    def worker(rank: int) -> float:
        torch.manual_seed(seed)
        model = Network()
        optimizer = optimizer_of(name, model)
        peak = optimizer.param_groups[0]["lr"]
        recipe = parse_recipe(text)
        sync = laconic.attach(model, optimizer, recipe)
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        for step in range(1, steps + 1):
            at = step / steps
            optimizer.param_groups[0]["lr"] = peak * min(at / 0.05, 1.1 - at)
            inputs, targets = series(generator, BATCH)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        sync.finish()
        sync.detach()
        with torch.no_grad():
            return float(nn.functional.mse_loss(model(held_out[0]), held_out[1]))

    return laconic.simulate(worker, workers=WORKERS)[0]


def facts_of(slow: float, name: str) -> Facts:
    """A network on which all gradients would take ``slow`` steps."""
    model = Network()
    shapes = tuple(tuple(p.shape) for p in model.parameters())
    sent = 8 * 4 * sum(map(math.prod, shapes)) * 2 * (WORKERS - 1) / WORKERS
    muon = takes_muon(optimizer_of(name, model), shapes)
    return Facts(WORKERS, shapes, 4, COMPUTE, sent / (slow * COMPUTE), 1e-3, muon=muon)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.untuned")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    options = parser.parse_args()
    jobs = []
    for slow in SLOW:
        facts = facts_of(slow, options.optimizer)
        choice, _ = choose(laconic.auto(), facts, None, {})
        for text in ("auto()", *FIXED):
            recipe = parse_recipe(choice if text == "auto()" else text)
            assert isinstance(recipe, tuple), "a recipe of its own"
            steps = round(STEPS * COMPUTE / predict(recipe, facts).seconds)
            jobs.append((slow, text, choice if text == "auto()" else text, steps))
    with ProcessPoolExecutor() as pool:
        runs = [
            [pool.submit(train, run, steps, options.optimizer, s) for s in options.seeds]
            for _, _, run, steps in jobs
        ]
        ends = [fmean(r.result() for r in each) for each in runs]
    for slow in SLOW:
        rows = [
            (loss, text, run, steps)
            for (of, text, run, steps), loss in zip(jobs, ends, strict=True)
            if of == slow
        ]
        best = min(loss for loss, text, _, _ in rows if text != "auto()")
        print(f"\nall gradients take {slow:g} steps")
        for loss, text, run, steps in sorted(rows):
            named = f"auto(): {run}" if text == "auto()" else text
            print(f"  {loss:.4f}  {loss / best - 1:+7.1%}  {steps:5d} steps  {named}")


if __name__ == "__main__":
    main()
