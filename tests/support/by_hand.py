"""Training written by hand, which what trainers do with laconic must equal to the bit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import laconic as la

from tests.support import forked

STEPS, ACCUMULATE, SAVED, EVALUATED = 25, 2, 11, 5
"""Steps; batches that each accumulates; the one after which a checkpoint is saved; and between two
evaluations."""
CLIP = 0.5
RECIPES = {
    "ddp": la.ddp(codec="int8"),
    "diloco": la.diloco(4, codec="int8"),
    "delayed": la.local_sgd(4, delay=2),
}
RUNS = {"diloco-2": (2, "diloco"), "ddp-2": (2, "ddp"), "delayed-4": (4, "delayed")}
"""The number of ranks, and the recipe."""


def flat(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().copy()


def rounds(sync: la.Synchronizer) -> dict[str, tuple[int, int]]:
    """How many rounds of each kind, and their bytes."""
    return {k: (t.count, t.bytes) for k, t in sync.calls().items() if "round" in k or "grad" in k}


def spoil(rank: int, model: nn.Module) -> nn.Module:
    """Another start than rank 0's, whose counts."""
    if rank:
        for p in model.parameters():
            nn.init.zeros_(p)
    return model


def train(
    recipe: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    after_step: Callable[[], None],
    loss: Callable[[int, int], Tensor],
) -> dict[str, Any]:
    """``loss(step, part)``: of one of the batches of a step, divided as gradients are."""
    sync = la.attach(model, optimizer, RECIPES[recipe])
    model.train()
    evaluated, saved = {}, None
    for step in range(STEPS):
        for part in range(ACCUMULATE):
            if part < ACCUMULATE - 1:
                with sync.no_sync():
                    loss(step, part).backward()
            else:
                loss(step, part).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        after_step()
        optimizer.zero_grad()
        if (step + 1) % EVALUATED == 0:
            with sync.consensus():
                evaluated[step + 1] = flat(model)
        if step + 1 == SAVED:
            saved = {k: v.clone() for k, v in sync.consensus_state_dict().items()}
    sync.finish()
    return {"flat": flat(model), "rounds": rounds(sync), "evaluated": evaluated, "saved": saved}


def main(
    of_library: Callable[..., Any],
    by_hand: Callable[..., Any],
    shipped: Callable[..., Any],
    checkpoint: str,
    run_the_rest: Callable[[dict[str, Any]], None],
) -> None:
    """A program's: trainings with a library, resumed from its ``checkpoint``, and written by hand;
    and what else it runs, unless it is told to run but one."""
    folder, only, found = Path(sys.argv[1]), sys.argv[2], dict[str, Any]()
    for run, (ranks, recipe) in RUNS.items():
        if only in ("", run):
            found[run] = {
                "hand": forked.run(ranks, by_hand, ranks, recipe),
                "trainer": forked.run(ranks, of_library, ranks, recipe, False),
                "resumed": forked.run(ranks, of_library, ranks, recipe, True),
                "shipped": forked.run(1, shipped, folder / run / checkpoint)[0],
            }
    if not only:
        run_the_rest(found)
    forked.save(found)


# -- a small problem ----

BATCH = 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 2))


def samples(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, generator=generator)
    return x, x[:, :2] * x[:, 2:4]


def rate(step: int) -> float:
    return 1.0 / (1.0 + step / 20)
