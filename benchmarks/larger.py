"""Compare recipes on larger models for equal numbers of steps.

    python -m benchmarks.larger [--widths 128 384 768] [--workers 4] [--steps 160] [--seeds 0]
                                [--rows RECIPE ...]

Byte transformers of 0.9, 7 and 29 million parameters learn the race's text in `laconic.simulate`,
so losses do not depend on the machine. Seconds do not come from a race: a step's time is measured
with one worker and one thread, and `laconic.predict` computes from it, for workers with a processor
each, what a step takes on every network. `auto()` is the recipe that it would choose there. Its
choice and the delays that it takes follow from the measured step.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from statistics import fmean, median

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import laconic
from laconic.algorithms.parse import parse_recipe
from laconic.auto import choose
from laconic.candidates import takes_muon, turning
from laconic.lab.race import workloads
from laconic.lab.race.workloads import WIDTH, Batch, ByteTransformer, lr_factor
from laconic.predict import Facts, predict

LR, LATENCY = 2e-3, 0.5e-3
"""The learning rate of the narrowest model; it falls with the width."""
RATES = {"1 Gbit/s": 1e9, "100 Mbit/s": 1e8, "10 Mbit/s": 1e7}
ROWS = {
    "ddp()": "gradients in every step: torch's DDP",
    "ddp(codec='int4')": "",
    "local_sgd(24)": "as torch's post-local SGD and Accelerate's local SGD",
    "slowmo(local_sgd(24), 24, momentum=0.2)": "as fairscale's SlowMo",
    "diloco(24, momentum=0.5)": "as torchft's DiLoCo",
    "streaming_diloco(24, 2, 4, codec=None, lr=0.7, momentum=0.5)": "as torchft's streaming DiLoCo",
}
"""Recipes, and the peers whose mathematics they have."""


def optimizer_of(model: nn.Module, width: int) -> Optimizer:
    options = {"lr": LR * WIDTH / width, "betas": (0.9, 0.95), "weight_decay": 0.1}
    return AdamW(model.parameters(), **options)


def train(text: str, width: int, workers: int, steps: int, seed: int) -> float:
    """Return the consensus model's validation loss after ``steps``."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    workload = workloads.load("text")

    def worker(rank: int) -> float:
        torch.manual_seed(seed)
        model = ByteTransformer(width)
        optimizer = optimizer_of(model, width)
        peak = optimizer.param_groups[0]["lr"]
        sync = laconic.attach(model, optimizer, parse_recipe(text), seed=seed)
        batches = workload.batches(rank, workers, seed)
        for step in range(1, steps + 1):
            optimizer.param_groups[0]["lr"] = peak * lr_factor(step, steps, workload)
            backward(workload.loss(model, next(batches)), optimizer)
            optimizer.step()
        sync.finish()
        model.eval()
        with torch.no_grad():
            part = [float(workload.loss(model, b)) for b in workload.validation[rank::workers]]
        return sum(part)

    return sum(laconic.simulate(worker, workers=workers)) / len(workload.validation)


def backward(loss: Tensor, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]


def facts_of(width: int, workers: int) -> Facts:
    """What `auto` would measure, but for the network: the median of ten steps of one worker."""
    torch.set_num_threads(1)
    workload, model = workloads.load("text"), ByteTransformer(width)
    optimizer = optimizer_of(model, width)
    batch: Batch = next(workload.batches(0, 1, 0))
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        backward(workload.loss(model, batch), optimizer)
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    shapes = tuple(tuple(p.shape) for p in model.parameters())
    return Facts(
        workers,
        shapes,
        4,
        median(seconds),
        math.inf,
        LATENCY,
        muon=takes_muon(optimizer, shapes),
        turning=turning(shapes, torch.device("cpu")),
    )


def chosen(facts: Facts) -> str:
    return choose(laconic.auto(), facts, None, {})[0]


def seconds_of(text: str, facts: Facts) -> float:
    recipe = parse_recipe(text)
    assert isinstance(recipe, tuple), "a recipe of its own"
    return predict(recipe, facts).seconds


def table(facts: Facts, steps: int, losses: dict[str, float]) -> str:
    """The rows of one model: losses, and seconds per step by network."""
    nets = {name: replace(facts, rate=rate) for name, rate in RATES.items()}
    choices = {name: chosen(net) for name, net in nets.items()}
    lines = [
        f"{facts.elements:,} parameters, {facts.workers} workers, {steps} steps; a step computes "
        f"for {facts.compute:.2f} s",
        "",
        f"| recipe | loss | {' | '.join(RATES)} |",
        f"|---|---:|{'---:|' * len(RATES)}",
    ]
    for text, loss in losses.items():
        seconds = [
            f"{'**' if choices[name] == text else ''}{seconds_of(text, net):.2f}"
            f"{'**' if choices[name] == text else ''}"
            for name, net in nets.items()
        ]
        lines.append(f"| `{text}` | {loss:.3f} | {' | '.join(seconds)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.larger")
    parser.add_argument("--widths", nargs="+", type=int, default=[128, 384, 768])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), metavar="RECIPE")
    options = parser.parse_args(arguments)
    for width in options.widths:
        facts = facts_of(width, options.workers)
        texts = [*options.rows, *(chosen(replace(facts, rate=rate)) for rate in RATES.values())]
        with ProcessPoolExecutor() as pool:
            runs = {
                text: [
                    pool.submit(train, text, width, options.workers, options.steps, seed)
                    for seed in options.seeds
                ]
                for text in dict.fromkeys(texts)
            }
            losses = {text: fmean(r.result() for r in each) for text, each in runs.items()}
        print(f"\n{table(facts, options.steps, losses)}", flush=True)


if __name__ == "__main__":
    main()
