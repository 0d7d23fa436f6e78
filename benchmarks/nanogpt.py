"""Train nanoGPT's setting for CPUs with every recipe, each at its best learning rate.

    python -m benchmarks.nanogpt TEXT [--rows RECIPE ...] [--workers 4] [--lrs 1e-3 2.5e-3 ...]
                                 [--iterations 500 2000] [--seeds 0] [--optimizer muon]

TEXT is github.com/karpathy/char-rnn's ``data/tinyshakespeare/input.txt``. The setting is that of
nanoGPT's README for a laptop: 4 layers, 4 heads, width 128, no dropout; each worker takes 12
samples of 64 characters in each iteration; AdamW with (0.9, 0.99), weight decay 0.1 of matrices,
gradients clipped to 1, 100 iterations of warm-up, then a cosine to a tenth of the learning rate.
nanoGPT's README gives a loss of 1.88 for one worker, 2000 iterations, and a learning rate of 1e-3.

500 iterations of 4 workers have as many characters as 2000 of one. Losses are of all the validation
text, and of simulated workers. Each row shows the best of ``--lrs``, or says that it is at the end
of them. Outcomes are kept in ``--journal``. Seconds are predicted from ``--compute``, the seconds
of one worker's iteration.

Rows can be other libraries too, as for ``laconic compare --peer``. They train on emulated hosts,
whose interfaces count the bytes, for 500 iterations.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch

from benchmarks import gpt
from benchmarks.gpt import GPT, LAPTOP, characters, train
from benchmarks.race.rows import is_peer
from benchmarks.study import Study, sources_digest
from laconic.algorithms.auto import Auto
from laconic.algorithms.parse import as_recipe
from laconic.lab.emulation.network import Network
from laconic.lab.race import rivals, runner
from laconic.policy.candidates import turning
from laconic.policy.facts import Facts
from laconic.policy.predict import predict

LRS = (1e-3, 2.5e-3, 5e-3, 1e-2)
RATES = {"1 Gbit/s": 1e9, "100 Mbit/s": 1e8, "10 Mbit/s": 1e7, "1 Mbit/s": 1e6}
LATENCY = 0.5e-3
ROWS = (
    "ddp()",
    "ddp(codec='int4')",
    "outer_step(ddp(), 8)",
    "outer_step(ddp(), 8, outer='muon')",
    "outer_step(ddp(codec='int4'), 8, outer='muon')",
    "diloco(8, lr=1.0, momentum=0.6, outer='muon')",
    "streaming_diloco(8, 4, 2, outer='muon')",
    "streaming_diloco(16)",
    "slowmo(local_sgd(8), 48)",
    "local_sgd(8)",
)


@dataclass(frozen=True)
class Job:
    recipe: str
    text: str
    workers: int
    iterations: int
    lr: float
    seed: int
    optimizer: str = "adamw"


@dataclass(frozen=True)
class Outcome:
    """``loss`` of the consensus model; ``sent``: bytes by each worker in each iteration;
    ``version`` of another library."""

    loss: float
    sent: float
    version: str = ""


def run(job: Job) -> Outcome:
    warnings.simplefilter("ignore")
    if is_peer(job.recipe):
        return run_peer(job)
    trained = train(
        LAPTOP,
        characters(job.text),
        job.recipe,
        job.workers,
        job.iterations,
        job.lr,
        seed=job.seed,
        kind=job.optimizer,
    )
    return Outcome(trained.loss, trained.sent)


def run_peer(job: Job) -> Outcome:
    settings = runner.Settings(
        recipes=(),
        rivals=(job.recipe,),
        network=Network(job.workers, bandwidth=max(RATES.values())),
        workload=f"{gpt.__file__}:workload",
        lr_scale=job.lr,
        data=job.text,
        seconds=None,
        steps=job.iterations,
        seeds=(job.seed,),
        validations=1,
        baseline=False,
    )
    (result,) = runner.run(settings, "python -m benchmarks.nanogpt", lambda *_: None)
    (row,) = result.rows
    if row.status != "ok" or row.loss is None or row.interface_bytes_per_step is None:
        raise ValueError(f"{job.recipe} at {job.lr:g}: {row.error}")
    package = rivals.find(job.recipe).name
    return Outcome(row.loss, row.interface_bytes_per_step, f"{package} {result.versions[package]}")


def facts_of(text: str, workers: int, compute: float) -> Facts:
    """The facts of the network that is the slowest of `RATES`."""
    model = GPT(LAPTOP, characters(text).characters)
    shapes = tuple(tuple(p.shape) for p in model.parameters())
    turns = turning(shapes, torch.device("cpu"))
    return Facts(workers, shapes, 4, compute, min(RATES.values()), LATENCY, turning=turns)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nanogpt")
    parser.add_argument("text")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), metavar="RECIPE")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--iterations", nargs="+", type=int, default=[500])
    parser.add_argument("--lrs", nargs="+", type=float, default=list(LRS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--compute", type=float, metavar="SECONDS", default=0.062)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--journal", type=Path, default=Path("build/nanogpt.jsonl"))
    given = parser.parse_args()
    peers = {row: rivals.find(row) for row in given.rows if is_peer(row)}
    recipes = {r: peers[r].rounds if r in peers else as_recipe(r) for r in given.rows}
    if any(isinstance(recipe, Auto) for recipe in recipes.values()):
        parser.error("auto() chooses a recipe by the network, and these workers have none")
    if peers and (given.iterations, given.optimizer) != ([500], "adamw"):
        parser.error("other libraries train for 500 iterations with AdamW")
    jobs = [
        Job(row, given.text, given.workers, iterations, lr, seed, given.optimizer)
        for iterations in given.iterations
        for seed in given.seeds
        for lr in given.lrs
        for row in given.rows
    ]
    own = (Path(__file__), Path(gpt.__file__), Path(given.text))
    sources = sources_digest((*own, *sorted(rivals.ADAPTERS.glob("*.py"))))
    study = Study(given.journal, Job, Outcome, run, sources)

    def progress(done: int, of: int) -> None:
        print(f"{done} of {of}", file=sys.stderr)

    found = study.outcomes(jobs, given.processes, progress)
    losses = defaultdict[tuple[str, int], dict[float, list[float]]](lambda: defaultdict(list))
    sent, names = {}, {}
    for job, outcome in found.items():
        losses[job.recipe, job.iterations][job.lr].append(outcome.loss)
        sent[job.recipe, job.iterations] = outcome.sent
        names[job.recipe] = f"`{job.recipe}`" + f", {outcome.version}" * bool(outcome.version)
    torch.set_num_threads(1)
    facts = facts_of(given.text, given.workers, given.compute)
    print(f"| recipe | iterations | loss | lr | kB per iteration | s at {' | '.join(RATES)} |")
    print(f"|---|---:|---:|---:|---:|{'---:|' * len(RATES)}")
    for (row, iterations), by_lr in losses.items():
        lr = min(by_lr, key=lambda lr: fmean(by_lr[lr]))
        rate = f"{lr:g}" if min(by_lr) < lr < max(by_lr) else f"{lr:g}, an end"
        recipe, kilo = recipes[row], sent[row, iterations] / 1e3
        # Another library sends at the same steps as its rounds, but not as many bytes.
        scale = predict(recipe, facts).bytes / kilo / 1e3 if row in peers else 1.0
        runs = (predict(recipe, replace(facts, rate=r * scale)).seconds for r in RATES.values())
        each = " | ".join(f"{iterations * run:,.0f}" for run in runs)
        loss = fmean(by_lr[lr])
        print(f"| {names[row]} | {iterations} | {loss:.3f} | {rate} | {kilo:,.1f} | {each} |")


if __name__ == "__main__":
    main()
