"""A loop of Accelerate with laconic, and the same training written by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import laconic as la
from laconic.integrations import accelerate as integration

import forked

STEPS, ACCUMULATE, BATCH, SAVED = 50, 2, 3, 23
RECIPES = {
    "ddp": la.ddp(codec="int8"),
    "diloco": la.diloco(4, codec="int8"),
    "delayed": la.local_sgd(4, delay=2),
}
FOLDER = Path(sys.argv[1])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 2))


def samples(ranks: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    count = STEPS * ACCUMULATE * BATCH * ranks
    x = torch.randn(count, 6, generator=generator)
    return x, x[:, :2] * x[:, 2:4]


def rate(step: int) -> float:
    return 1.0 / (1.0 + step / 20)


def flat(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().copy()


def rounds(sync: la.Synchronizer) -> dict[str, tuple[int, int]]:
    return {k: (t.count, t.bytes) for k, t in sync.calls().items() if "round" in k or "grad" in k}


def by_accelerate(rank: int, ranks: int, recipe: str, resume: bool) -> dict[str, Any]:
    folder = FOLDER / f"{recipe}-{ranks}"
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = network()
    if rank:  # rank 0's counts
        for p in model.parameters():
            nn.init.zeros_(p)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = LambdaLR(optimizer, rate)
    loader = DataLoader(TensorDataset(*samples(ranks)), batch_size=BATCH)
    model, optimizer, sync = integration.attach(accelerator, model, optimizer, RECIPES[recipe])
    loader, scheduler = accelerator.prepare(loader, scheduler)
    first, validated, steps = 0, {}, 0
    if resume:
        accelerator.load_state(str(folder))
        first = steps = SAVED
    batches = loader if not first else accelerator.skip_first_batches(loader, first * ACCUMULATE)
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        steps += accelerator.sync_gradients
        if accelerator.sync_gradients and steps % 10 == 0:
            with sync.consensus():
                validated[steps] = flat(model)
        if accelerator.sync_gradients and steps == SAVED and not resume:
            accelerator.save_state(str(folder))
    sync.finish()
    accelerator.end_training()
    return {"flat": flat(model), "rounds": rounds(sync), "validated": validated, "step": sync.step}


def by_hand(rank: int, ranks: int, recipe: str) -> dict[str, Any]:
    la.init()
    model, (x, y) = network(), samples(ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = LambdaLR(optimizer, rate)
    sync = la.attach(model, optimizer, RECIPES[recipe])
    validated, saved = {}, None
    for step in range(STEPS):
        for part in range(ACCUMULATE):
            at = ((step * ACCUMULATE + part) * ranks + rank) * BATCH
            own = slice(at, at + BATCH)
            loss = nn.functional.mse_loss(model(x[own].clone()), y[own].clone()) / ACCUMULATE
            if part < ACCUMULATE - 1:
                with sync.no_sync():
                    loss.backward()
            else:
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        for _ in range(ranks):  # as Accelerate's scheduler
            scheduler.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0:
            with sync.consensus():
                validated[step + 1] = flat(model)
        if step + 1 == SAVED:
            saved = {k: v.clone() for k, v in sync.consensus_state_dict().items()}
    sync.finish()
    return {"flat": flat(model), "rounds": rounds(sync), "validated": validated, "saved": saved}


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
    for ranks, recipe in ((2, "diloco"), (2, "ddp"), (4, "delayed")):
        folder = FOLDER / f"{recipe}-{ranks}"
        found[f"{recipe}-{ranks}"] = {
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
