"""A loop of Accelerate with laconic, and the same training written by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import laconic as la
from laconic.integrations import accelerate as integration

import forked
from by_hand import (
    ACCUMULATE,
    BATCH,
    CLIP,
    EVALUATED,
    RECIPES,
    RUNS,
    SAVED,
    STEPS,
    flat,
    network,
    rate,
    rounds,
    samples,
    spoil,
    train,
)

FOLDER = Path(sys.argv[1])


def by_accelerate(rank: int, ranks: int, recipe: str, resume: bool) -> dict[str, Any]:
    folder = FOLDER / f"{recipe}-{ranks}"
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = spoil(rank, network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = LambdaLR(optimizer, rate)
    loader = DataLoader(
        TensorDataset(*samples(STEPS * ACCUMULATE * BATCH * ranks)), batch_size=BATCH
    )
    model, optimizer, sync = integration.attach(accelerator, model, optimizer, RECIPES[recipe])
    loader, scheduler = accelerator.prepare(loader, scheduler)
    first, evaluated, steps = 0, {}, 0
    if resume:
        accelerator.load_state(str(folder))
        first = steps = SAVED
    batches = loader if not first else accelerator.skip_first_batches(loader, first * ACCUMULATE)
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        steps += accelerator.sync_gradients
        if accelerator.sync_gradients and steps % EVALUATED == 0:
            with sync.consensus():
                evaluated[steps] = flat(model)
        if accelerator.sync_gradients and steps == SAVED and not resume:
            accelerator.save_state(str(folder))
    sync.finish()
    accelerator.end_training()
    return {"flat": flat(model), "rounds": rounds(sync), "evaluated": evaluated, "step": sync.step}


def by_hand(rank: int, ranks: int, recipe: str) -> dict[str, Any]:
    la.init()
    model, (x, y) = network(), samples(STEPS * ACCUMULATE * BATCH * ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = LambdaLR(optimizer, rate)

    def after_step() -> None:
        for _ in range(ranks):  # as Accelerate's scheduler
            scheduler.step()

    def loss(step: int, part: int) -> Tensor:
        first = ((step * ACCUMULATE + part) * ranks + rank) * BATCH
        own = slice(first, first + BATCH)
        # copies: products of a part of a tensor may be rounded differently
        return nn.functional.mse_loss(model(x[own].clone()), y[own].clone()) / ACCUMULATE

    return train(recipe, model, optimizer, after_step, loss)


def shipped(rank: int, folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    model = network()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return {k: v.clone() for k, v in model.state_dict().items()}


def refused(rank: int, ranks: int, what: str) -> str:
    accelerator = Accelerator(cpu=True)
    model: Any = network()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    try:
        if what == "model":
            model = accelerator.prepare_model(model)
        if what == "optimizer":
            optimizer = accelerator.prepare_optimizer(optimizer)
        integration.attach(accelerator, model, optimizer, RECIPES["ddp"])
        if what == "checkpoint":
            accelerator.load_state(str(FOLDER / "diloco-2"))
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    found: dict[str, Any] = {}
    for run, (ranks, recipe) in RUNS.items():
        folder = FOLDER / run
        found[run] = {
            "hand": forked.run(ranks, by_hand, ranks, recipe),
            "trainer": forked.run(ranks, by_accelerate, ranks, recipe, False),
            "resumed": forked.run(ranks, by_accelerate, ranks, recipe, True),
            "shipped": forked.run(1, shipped, folder)[0],
        }
    found["refused"] = {what: forked.run(2, refused, 2, what) for what in ("model", "optimizer")}
    for path in (FOLDER / "diloco-2" / "laconic").glob("*"):
        path.unlink()
    found["refused"]["checkpoint"] = forked.run(2, refused, 2, "checkpoint")
    forked.save(found)


if __name__ == "__main__":
    main()
