"""Measure how many steps a recipe needs per step of ddp().

    python -m benchmarks.factors [SEED ...] [--rows RECIPE ...]

Every recipe trains the text model for `STEPS` steps with 4 simulated workers. `ddp` also trains for
fewer steps. Each run has its own learning-rate schedule over its steps. Let L be the final loss of
a recipe and s the number of steps with which `ddp` would reach L, interpolated over log(steps).
Then

    factor = STEPS / s

`laconic.auto` uses these factors. They hold for this model, this number of steps and AdamW.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise

import torch

import laconic
from laconic.algorithms.parse import parse_recipe
from laconic.lab.race import workloads
from laconic.lab.race.workloads import lr_factor

STEPS, WORKERS = 480, 4
DDP_STEPS = (120, 180, 240, 320, STEPS, 640, 960)
ROWS = (
    "ddp(codec='int8')",
    "ddp(codec='int4')",
    *(f"outer_step(ddp(), {period}, outer='muon')" for period in (2, 4, 8, 16)),
    "outer_step(ddp(codec='int4'), 8, outer='muon')",
    "power_sgd(4, codec='int8')",
    "local_sgd(2, delay=2, codec='int4')",
    *(
        f"streaming_diloco({period}, 4, 1, codec='int4', lr=0.7, momentum=0.6)"
        for period in (4, 8, 16, 32, 64)
    ),
    "streaming_diloco(8, 4, 2)",
    *(f"streaming_diloco({period}, 4, 2, outer='muon')" for period in (4, 8, 16, 32, 64)),
)


def train(text: str, steps: int, seed: int) -> float:
    """Return the consensus model's validation loss after ``steps``."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    workload = workloads.load("text")

    def worker(rank: int) -> float:
        torch.manual_seed(seed)
        model = workload.model()
        optimizer = workload.optimizer(model)
        peaks = [group["lr"] for group in optimizer.param_groups]
        recipe = parse_recipe(text)
        sync = laconic.attach(model, optimizer, recipe, seed=seed)
        batches = workload.batches(rank, WORKERS, seed)
        for step in range(1, steps + 1):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * lr_factor(step, steps, workload)
            loss = workload.loss(model, next(batches))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        sync.finish()
        model.eval()
        with torch.no_grad():
            part = [float(workload.loss(model, b)) for b in workload.validation[rank::WORKERS]]
        return sum(part) / len(part)

    losses = laconic.simulate(worker, workers=WORKERS)
    return sum(losses) / WORKERS


def factor(loss: float, ddp: Mapping[int, float], steps: int = STEPS) -> float:
    """Return ``steps`` over the steps with which ``ddp`` (losses by steps) reaches ``loss``.

    Outside the range of ``ddp``'s losses, the nearest number of steps is used.
    """
    points = sorted(ddp.items())
    for (a, high), (b, low) in pairwise(points):
        if high >= loss >= low:
            share = (high - loss) / (high - low)
            return steps / math.exp(math.log(a) + share * math.log(b / a))
    return steps / (points[-1] if loss < points[-1][1] else points[0])[0]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.factors")
    parser.add_argument("seeds", nargs="*", type=int, metavar="SEED", help="default: 0")
    parser.add_argument("--rows", nargs="+", metavar="RECIPE", default=list(ROWS))
    options = parser.parse_args()
    seeds = options.seeds or [0]
    jobs = [("ddp()", steps, seed) for seed in seeds for steps in reversed(DDP_STEPS)]
    jobs += [(row, STEPS, seed) for seed in seeds for row in options.rows]
    ends: dict[tuple[str, int, int], float] = {}
    with ProcessPoolExecutor() as pool:
        for job, loss in zip(jobs, pool.map(train, *zip(*jobs, strict=True)), strict=True):
            ends[job] = loss
            ddp = {steps: ends["ddp()", steps, job[2]] for steps in DDP_STEPS if
                   ("ddp()", steps, job[2]) in ends}  # fmt: skip
            line = {"recipe": job[0], "steps": job[1], "seed": job[2], "loss": round(loss, 4)}
            if job[0] != "ddp()":
                line["factor"] = round(factor(loss, ddp), 2)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
