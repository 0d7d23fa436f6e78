"""Runs of Lightning's Trainer with laconic, and the same training written by hand."""

from __future__ import annotations

import itertools
import logging
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import laconic as la
from laconic.integrations.lightning import LaconicStrategy

from tests.support import by_hand as hand
from tests.support import forked

FOLDER = Path(sys.argv[1])


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.network = hand.network()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.network(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        x, y = batch
        self.log("loss", nn.functional.mse_loss(self.network(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        scheduler = {"scheduler": LambdaLR(optimizer, hand.rate), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Manual(Module):
    """Two optimizers, stepped by hand, and accumulation by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first, _, last = self.network
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (first, last)]

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:  # type: ignore[override]
        x, y = batch
        with nullcontext() if index % 2 else self.trainer.strategy.sync.no_sync():
            self.manual_backward(nn.functional.mse_loss(self.network(x), y))
        for optimizer in self.optimizers() if index % 2 else ():
            optimizer.step()
            optimizer.zero_grad()


class Resumable(DataLoader[Any]):
    """A loader with state, which goes on in the middle of an epoch."""

    given, skipped = 0, 0

    def __iter__(self) -> Any:
        skip, self.skipped, self.given = self.skipped, 0, self.skipped
        return self._giving(itertools.islice(super().__iter__(), skip, None))

    def _giving(self, batches: Any) -> Any:
        for batch in batches:
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped = state["given"]


class Consensus(lightning.Callback):  # type: ignore[misc]
    """Keeps the weights that were validated, and the synchronizer."""

    def __init__(self) -> None:
        self.weights: dict[int, np.ndarray] = {}
        self.sync: Any = None

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.sync = trainer.strategy.sync

    def on_validation_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self.weights[trainer.global_step] = hand.flat(module)


def trainer_of(ranks: int, recipe: str, folder: Path, **more: Any) -> Any:
    at = TorchElasticEnvironment()
    return lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=LaconicStrategy(hand.RECIPES[recipe], cluster_environment=at),
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=10,
        num_sanity_val_steps=0,
        **more,
    )


def by_lightning(rank: int, ranks: int, recipe: str, resume: bool) -> dict[str, Any]:
    quiet()
    folder = FOLDER / f"{recipe}-{ranks}"
    module, seen = hand.spoil(rank, Module()), Consensus()
    keep: dict[str, Any] = {"save_top_k": -1, "enable_version_counter": False}
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=hand.SAVED, **keep)
    trainer = trainer_of(
        ranks,
        recipe,
        folder,
        max_steps=hand.STEPS,
        accumulate_grad_batches=hand.ACCUMULATE,
        gradient_clip_val=hand.CLIP,
        val_check_interval=hand.EVALUATED * hand.ACCUMULATE,
        callbacks=[saving, seen],
        logger=CSVLogger(folder, "log"),
    )
    data, check = TensorDataset(*hand.whole(ranks)), TensorDataset(*hand.samples(8))
    trainer.fit(
        module,
        Resumable(data, batch_size=hand.BATCH, shuffle=False),
        DataLoader(check, batch_size=4),
        ckpt_path=folder / f"step={hand.SAVED}.ckpt" if resume else None,
    )
    log = (folder / "log").rglob("metrics.csv")
    logged = [path.read_text() for path in log] if not rank else []
    found = {"flat": hand.flat(module), "rounds": hand.rounds(seen.sync), "evaluated": seen.weights}
    return {**found, "step": seen.sync.step, "logged": logged}


def dealt(rank: int, ranks: int, batch: int) -> list[int]:
    """As Lightning deals the samples of a training, which are enough for all steps."""
    data: Any = range(hand.STEPS * hand.ACCUMULATE * hand.BATCH * ranks)
    sampler: Any = DistributedSampler(data, ranks, rank, shuffle=True, seed=0)
    return list(sampler)[batch * hand.BATCH : (batch + 1) * hand.BATCH]


def by_hand(rank: int, ranks: int, recipe: str) -> dict[str, Any]:
    return hand.plain(rank, ranks, recipe, dealt)


def by_hand_manually(rank: int, ranks: int) -> np.ndarray:
    la.init()
    model, (x, y) = hand.network(), hand.whole(ranks)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.05) for part in (model[0], model[2])]
    sync = la.attach(model, optimizers, hand.RECIPES["diloco"])
    for step in range(hand.STEPS * hand.ACCUMULATE):
        own = dealt(rank, ranks, step)
        with nullcontext() if step % 2 else sync.no_sync():
            nn.functional.mse_loss(model(x[own]), y[own]).backward()
        for optimizer in optimizers if step % 2 else ():
            optimizer.step()
            optimizer.zero_grad()
    sync.finish()
    return hand.flat(model)


def fit_once(module: Module, ranks: int, **more: Any) -> np.ndarray:
    """Train for an epoch, and return the parameters."""
    quiet()
    data = TensorDataset(*hand.whole(ranks))
    more = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **more}
    trainer = trainer_of(ranks, "diloco", FOLDER, **more)
    loaders = (DataLoader(data, batch_size=hand.BATCH), DataLoader(data, batch_size=hand.BATCH))
    trainer.fit(module, *loaders)
    return hand.flat(module)


def manually(rank: int, ranks: int) -> np.ndarray:
    return fit_once(Manual(), ranks)


def averaged(rank: int, ranks: int) -> list[np.ndarray]:
    """What is validated with moving averages of the weights, and what is left."""
    seen = Consensus()
    callbacks = [EMAWeightAveraging(decay=0.5), seen]
    more = {"val_check_interval": 20, "precision": "bf16-mixed", "callbacks": callbacks}
    end = fit_once(Module(), ranks, **more)
    return [*seen.weights.values(), end]


class Random(Module):
    """Draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.network.insert(2, nn.Dropout(0.2))


def with_dropout(rank: int, ranks: int, folder: Path, last: int, resume: bool) -> np.ndarray:
    """Parameters after ``last`` epochs of 6 batches in random order."""
    quiet()
    torch.manual_seed(5 + rank)
    keeping = ModelCheckpoint(
        folder, "{epoch}-{step}", enable_version_counter=False, monitor="step", mode="max",
        save_top_k=2,
    )  # fmt: skip
    own = trainer_of(ranks, "diloco", folder, max_epochs=last, callbacks=[keeping], logger=False)
    module, data = Random(), TensorDataset(*hand.samples(6 * hand.BATCH * ranks))
    path = folder / "epoch=1-step=12.ckpt" if resume else None
    own.fit(module, Resumable(data, batch_size=hand.BATCH, shuffle=True), ckpt_path=path)
    return hand.flat(module)


def shipped(rank: int, file: Path) -> dict[str, Tensor]:
    module = Module.load_from_checkpoint(file, weights_only=True)
    return {k: v.clone() for k, v in module.network.state_dict().items()}


def quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def run_the_rest(found: dict[str, Any]) -> None:
    found["manual"] = forked.run(2, manually, 2), forked.run(2, by_hand_manually, 2)
    cut = FOLDER / "dropout" / "cut"
    whole = forked.run(2, with_dropout, 2, FOLDER / "dropout" / "whole", 3, False)
    forked.run(2, with_dropout, 2, cut, 2, False)
    found["dropout"] = whole, forked.run(2, with_dropout, 2, cut, 3, True)
    found["kept"] = sorted(p.name for p in cut.iterdir())
    found["averaged"] = forked.run(2, averaged, 2)


if __name__ == "__main__":
    saved = f"step={hand.SAVED}.ckpt"
    hand.main(
        *(by_lightning, by_hand, shipped, saved, f"{saved}.laconic", run_the_rest),
        options=lambda _: LaconicStrategy(hand.RECIPES["ddp"], find_unused_parameters=True),
    )
