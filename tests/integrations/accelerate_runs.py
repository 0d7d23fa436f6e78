"""A loop of Accelerate with laconic, and the same training written by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from laconic.integrations import accelerate as integration

from tests.support import by_hand as hand
from tests.support import forked

FOLDER = Path(sys.argv[1])


def by_accelerate(rank: int, ranks: int, recipe: str, resume: bool) -> dict[str, Any]:
    folder = FOLDER / f"{recipe}-{ranks}"
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=hand.ACCUMULATE)
    model = hand.spoil(rank, hand.network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = LambdaLR(optimizer, hand.rate)
    loader = DataLoader(TensorDataset(*hand.whole(ranks)), batch_size=hand.BATCH)
    model, optimizer, sync = integration.attach(accelerator, model, optimizer, hand.RECIPES[recipe])
    loader, scheduler = accelerator.prepare(loader, scheduler)
    first, evaluated, steps = 0, {}, 0
    if resume:
        accelerator.load_state(str(folder))
        first = steps = hand.SAVED
    batches = accelerator.skip_first_batches(loader, first * hand.ACCUMULATE) if first else loader
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), hand.CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        steps += accelerator.sync_gradients
        if accelerator.sync_gradients and steps % hand.EVALUATED == 0:
            with sync.consensus():
                evaluated[steps] = hand.flat(model)
        if accelerator.sync_gradients and steps == hand.SAVED and not resume:
            accelerator.save_state(str(folder))
    sync.finish()
    accelerator.end_training()
    found = {"flat": hand.flat(model), "rounds": hand.rounds(sync), "evaluated": evaluated}
    return {**found, "step": sync.step}


def in_order(rank: int, ranks: int, number: int) -> list[int]:
    """As Accelerate deals samples."""
    first = (number * ranks + rank) * hand.BATCH
    return list(range(first, first + hand.BATCH))


def by_hand(rank: int, ranks: int, recipe: str) -> dict[str, Any]:
    return hand.plain(rank, ranks, recipe, in_order, times=ranks)  # as Accelerate's scheduler


class Counted(nn.Linear):
    """With state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"count": 1}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"count": 1}


def with_dropout(rank: int, ranks: int, resume: bool) -> np.ndarray:
    """Parameters after 12 steps, or of the last 6 of them. The data loader has a generator of its
    own."""
    folder = str(FOLDER / "dropout")
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(rank)
    model: Any = nn.Sequential(Counted(6, 24), nn.Dropout(0.3), nn.Linear(24, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    data, own = TensorDataset(*hand.samples(12 * hand.BATCH * ranks)), torch.Generator()
    loader = DataLoader(data, batch_size=hand.BATCH, shuffle=True, generator=own.manual_seed(9))
    recipe = hand.RECIPES["diloco"]
    model, optimizer, sync = integration.attach(accelerator, model, optimizer, recipe)
    loader = accelerator.prepare(loader)
    if resume:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, 6)
    for step, (x, y) in enumerate(loader, 7 if resume else 1):
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if step == 6:
            accelerator.save_state(folder, safe_serialization=False)
    sync.finish()
    sync.detach()
    integration.attach(accelerator, model, optimizer.optimizer, hand.RECIPES["ddp"])[2].detach()
    return hand.flat(model)


def shipped(rank: int, folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    model = hand.network()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return {k: v.clone() for k, v in model.state_dict().items()}


def prepared(what: str) -> None:
    options = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options] * (what == "options"))
    given: dict[str, Any] = {"model": (model := hand.network())}
    given["optimizer"] = torch.optim.AdamW(model.parameters())
    if what != "options":
        given[what] = accelerator.prepare(given[what])
    integration.attach(accelerator, **given, recipe=hand.RECIPES["ddp"])


def run_the_rest(found: dict[str, Any]) -> None:
    found["dropout"] = forked.run(2, with_dropout, 2, False), forked.run(2, with_dropout, 2, True)


if __name__ == "__main__":
    hand.main(
        *(by_accelerate, by_hand, shipped, ".", "laconic", run_the_rest),
        model=lambda _: prepared("model"),
        optimizer=lambda _: prepared("optimizer"),
        options=lambda _: prepared("options"),
    )
