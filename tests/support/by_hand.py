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


def refusal(rank: int, cause: Callable[[int], object]) -> str:
    """The error for what cannot work."""
    try:
        cause(rank)
    except ValueError as error:
        return str(error)
    return ""


def main(
    of_library: Callable[..., Any],
    by_hand: Callable[..., Any],
    shipped: Callable[..., Any],
    checkpoint: str,
    states: str,
    run_the_rest: Callable[[dict[str, Any]], None],
    **causes: Callable[[int], object],
) -> None:
    """A program's: trainings with a library, resumed from its ``checkpoint``, and written by hand;
    and what else it runs, and errors, unless it is told to run but one. ``states``: the folder with
    what laconic saves."""
    folder, only, found = Path(sys.argv[1]), sys.argv[2], dict[str, Any]()
    for run, (ranks, recipe) in RUNS.items():
        if only in ("", run):
            found[run] = {
                "hand": forked.run(ranks, by_hand, ranks, recipe),
                "trainer": forked.run(ranks, of_library, ranks, recipe, False),
                "resumed": forked.run(ranks, of_library, ranks, recipe, True),
                "shipped": forked.run(1, shipped, folder / run / checkpoint)[0],
                "states": len(list((folder / run / states).glob("rank-*"))),
            }
    if not only:
        run_the_rest(found)
        for path in (folder / "diloco-2" / states).glob("*"):
            path.unlink()
        causes["checkpoint"] = lambda rank: of_library(rank, 2, "diloco", True)
        found["refused"] = {what: forked.run(2, refusal, cause) for what, cause in causes.items()}
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


def whole(ranks: int) -> tuple[Tensor, Tensor]:
    """All samples of a training."""
    return samples(STEPS * ACCUMULATE * BATCH * ranks)


def rate(step: int) -> float:
    return 1.0 / (1.0 + step / 20)


def plain(
    rank: int, ranks: int, recipe: str, rows: Callable[[int, int, int], list[int]], times: int = 1
) -> dict[str, Any]:
    """The training by hand: ``rows(rank, ranks, k)`` are those of batch k, and the scheduler takes
    so many ``times`` a step."""
    la.init()
    model, (x, y) = network(), whole(ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def after_step() -> None:
        for _ in range(times):
            scheduler.step()

    def loss(step: int, part: int) -> Tensor:
        own = rows(rank, ranks, step * ACCUMULATE + part)
        return nn.functional.mse_loss(model(x[own]), y[own]) / ACCUMULATE

    return train(recipe, model, optimizer, after_step, loss)
