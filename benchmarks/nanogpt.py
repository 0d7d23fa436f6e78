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
of one worker's iteration; by default, it is measured.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laconic
from benchmarks.study import Study, sources_digest
from laconic.algorithms.auto import Auto
from laconic.algorithms.parse import as_recipe
from laconic.policy.candidates import turning
from laconic.policy.facts import Facts
from laconic.policy.predict import predict

LAYERS, HEADS, WIDTH, BLOCK, BATCH = 4, 4, 128, 64, 12
WARMUP, BETAS, DECAY, CLIP = 100, (0.9, 0.99), 0.1, 1.0
LRS = (1e-3, 2.5e-3, 5e-3, 1e-2)
RATES = {"1 Gbit/s": 1e9, "100 Mbit/s": 1e8, "10 Mbit/s": 1e7, "1 Mbit/s": 1e6}
LATENCY = 0.5e-3
ROWS = (
    "ddp()",
    "ddp(codec='int4')",
    "power_sgd(4, codec='int8')",
    "outer_step(ddp(), 8)",
    "outer_step(ddp(), 8, outer='muon')",
    "outer_step(ddp(codec='int4'), 8, outer='muon')",
    "outer_step(power_sgd(4, codec='int8'), 8, outer='muon')",
    "diloco(8, lr=1.0, momentum=0.6, outer='muon')",
    "streaming_diloco(8, 4, 2, outer='muon')",
    "streaming_diloco(16)",
    "slowmo(local_sgd(8), 48)",
    "local_sgd(8)",
)


class Block(nn.Module):
    """Attention and a feed-forward network, each over a norm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.qkv, self.out, self.up, self.down = (
            nn.Linear(WIDTH * i, WIDTH * o, bias=False) for i, o in ((1, 3), (1, 1), (1, 4), (4, 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """GPT-2 without biases; the embedding is also the head."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * LAYERS if last else 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.blocks(self.characters(x) + self.places.weight[: x.shape[1]])
        logits = F.linear(self.norm(h), self.characters.weight)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


@cache
def texts(path: str) -> tuple[Tensor, Tensor, int]:
    """Training and validation text, 9 to 1, and the number of different characters."""
    text = Path(path).read_text()
    number = {c: i for i, c in enumerate(sorted(set(text)))}
    data = torch.tensor([number[c] for c in text])
    split = int(0.9 * len(data))
    return data[:split], data[split:], len(number)


def batches(data: Tensor, *seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(sum(s * 1000**i for i, s in enumerate(seed)))
    while True:
        at = torch.randint(len(data) - BLOCK, (BATCH,), generator=generator)[:, None]
        places = at + torch.arange(BLOCK)
        yield data[places], data[places + 1]


def optimizers_of(model: nn.Module, kind: str, lr: float) -> list[torch.optim.Optimizer]:
    """``muon``: its step, as large as AdamW's, for the matrices inside the blocks. It needs torch
    2.9 or newer."""
    inside = [p for n, p in model.named_parameters() if p.dim() == 2 and n.startswith("blocks")]
    own = inside if kind == "muon" else []
    rest = [p for p in model.parameters() if not any(p is q for q in own)]
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr, betas=BETAS)
    if not own:
        return [adam]
    muon = torch.optim.Muon(own, lr, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    return [muon, adam]


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
    """``loss`` of the consensus model; ``sent``: bytes by each worker in each iteration."""

    loss: float
    sent: float


def train(job: Job) -> Outcome:
    warnings.simplefilter("ignore")
    train_text, validation, characters = texts(job.text)

    def worker(rank: int) -> tuple[float, int]:
        torch.manual_seed(job.seed)
        model = GPT(characters)
        optimizers = optimizers_of(model, job.optimizer, job.lr)
        sync = laconic.attach(model, optimizers, job.recipe, seed=job.seed)
        for t, batch in zip(
            range(job.iterations), batches(train_text, job.seed, rank + 1), strict=False
        ):
            share = (t - WARMUP) / max(1, job.iterations - WARMUP)
            cosine = 0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi * share))
            for group in (g for o in optimizers for g in o.param_groups):
                group["lr"] = job.lr * (cosine if t >= WARMUP else (t + 1) / (WARMUP + 1))
            model.zero_grad()
            model(*batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for optimizer in optimizers:
                optimizer.step()
        sent = sync.stats().bytes_sent
        sync.finish()
        pieces = validation.unfold(0, BLOCK + 1, BLOCK)
        own = pieces[rank :: job.workers]
        with torch.no_grad():
            losses = [len(p) * float(model(p[:, :-1], p[:, 1:])) for p in own.split(4 * BATCH)]
        return sum(losses) / len(pieces), sent

    runs = laconic.simulate(worker, workers=job.workers)
    return Outcome(sum(loss for loss, _ in runs), fmean(s for _, s in runs) / job.iterations)


def iteration(text: str) -> float:
    """Return the seconds of one worker's iteration, the shortest of ten."""
    train_text, _, characters = texts(text)
    model = GPT(characters)
    (optimizer,) = optimizers_of(model, "adamw", 1e-3)
    seconds = []
    for _, batch in zip(range(10), batches(train_text, 0, 0), strict=False):
        start = time.perf_counter()
        model.zero_grad()
        model(*batch).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def facts_of(text: str, workers: int, compute: float) -> Facts:
    """The facts of the network that is the slowest of `RATES`."""
    shapes = tuple(tuple(p.shape) for p in GPT(texts(text)[2]).parameters())
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
    parser.add_argument("--compute", type=float, metavar="SECONDS")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--journal", type=Path, default=Path("build/nanogpt.jsonl"))
    given = parser.parse_args()
    recipes = {row: as_recipe(row) for row in given.rows}
    if any(isinstance(recipe, Auto) for recipe in recipes.values()):
        parser.error("auto() chooses a recipe by the network, and these workers have none")
    jobs = [
        Job(row, given.text, given.workers, iterations, lr, seed, given.optimizer)
        for iterations in given.iterations
        for seed in given.seeds
        for lr in given.lrs
        for row in given.rows
    ]
    sources = sources_digest((Path(__file__), Path(given.text)))
    study = Study(given.journal, Job, Outcome, train, sources)

    def progress(done: int, of: int) -> None:
        print(f"{done} of {of}", file=sys.stderr)

    found = study.outcomes(jobs, given.processes, progress)
    losses = defaultdict[tuple[str, int], dict[float, list[float]]](lambda: defaultdict(list))
    sent = {}
    for job, outcome in found.items():
        losses[job.recipe, job.iterations][job.lr].append(outcome.loss)
        sent[job.recipe, job.iterations] = outcome.sent
    torch.set_num_threads(1)
    facts = facts_of(given.text, given.workers, given.compute or iteration(given.text))
    print(f"One worker's iteration: {facts.compute:.3f} s.\n")
    print(f"| recipe | iterations | loss | lr | kB per iteration | s at {' | '.join(RATES)} |")
    print(f"|---|---:|---:|---:|---:|{'---:|' * len(RATES)}")
    for (row, iterations), by_lr in losses.items():
        lr = min(by_lr, key=lambda lr: fmean(by_lr[lr]))
        rate = f"{lr:g}" if min(by_lr) < lr < max(by_lr) else f"{lr:g}, an end"
        runs = (predict(recipes[row], replace(facts, rate=r)).seconds for r in RATES.values())
        each = " | ".join(f"{iterations * run:,.0f}" for run in runs)
        loss, kilo = fmean(by_lr[lr]), sent[row, iterations] / 1e3
        print(f"| `{row}` | {iterations} | {loss:.3f} | {rate} | {kilo:,.1f} | {each} |")


if __name__ == "__main__":
    main()
