"""A worker of an elastic run in each library's trainer: LIBRARY PORT FOLDER [CHECKPOINT].

When it has imported the library, it waits for a line. It prints a line of JSON when it begins, for
each step with its samples, and at the end.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

import laconic as la

STEPS, SAMPLES, BATCH, EVALUATED, SECONDS = 240, 600, 4, 20, 0.05
RECIPE = la.local_sgd(4)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class Data(Dataset[dict[str, Tensor]]):
    """Points on a plane, which the model is to learn, and their numbers."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = self.x[index]
        return {"x": x, "labels": x[:4].sum().tanh(), "number": torch.tensor(index)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor, labels: Tensor, number: Tensor | None = None) -> dict[str, Tensor]:
        """``number``: of the samples that it trains on, to be told."""
        if self.training and number is not None:
            say(samples=number.tolist())
            time.sleep(SECONDS)
        out = self.layers(x).squeeze(-1)
        return {"loss": (out - labels).square().mean(), "logits": out}


def decaying(step: int) -> float:
    return 1 - step / (2 * STEPS)


def end(model: nn.Module, scheduler: Any, **more: Any) -> None:
    parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    say(digest=hashlib.sha256(parameters).hexdigest()[:16], lr=scheduler.get_last_lr()[0], **more)


def by_transformers(elastic: la.Elastic, folder: Path, checkpoint: str | None) -> None:
    from transformers import TrainerCallback, TrainingArguments

    from laconic.integrations.transformers import LaconicTrainer

    class Telling(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            say(begins=state.global_step)

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            say(step=state.global_step)

        def on_evaluate(self, args: Any, state: Any, *_: Any, metrics: Any, **__: Any) -> None:
            say(evaluated=state.global_step, loss=metrics["eval_loss"])

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=0.01,
        eval_strategy="steps",
        eval_steps=EVALUATED,
        save_steps=100,
        logging_steps=100,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    model = Model()
    trainer = LaconicTrainer(
        model,
        arguments,
        train_dataset=Data(),
        eval_dataset=Data(100),
        recipe=RECIPE,
        attach_options={"elastic": elastic},
        callbacks=[Telling()],
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    end(model, trainer.lr_scheduler)


def by_accelerate(elastic: la.Elastic, folder: Path, _: str | None) -> None:
    from dataclasses import replace

    from accelerate import Accelerator

    from laconic.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True)
    model: Any = Model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = LambdaLR(optimizer, decaying)
    sampler = la.ElasticSampler(SAMPLES)
    elastic = replace(elastic, others={"data": sampler, "lr": scheduler})
    model, optimizer, sync = attach(accelerator, model, optimizer, RECIPE, elastic=elastic)
    batches = iter(DataLoader(Data(), BATCH, sampler=sampler))
    test = next(iter(DataLoader(Data(100), 100)))
    say(begins=sync.step)
    while sync.step < STEPS:
        accelerator.backward(model(**next(batches))["loss"])
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        say(step=sync.step)
        if sync.step % EVALUATED == 0:
            with sync.consensus(), torch.no_grad():
                model.eval()
                say(evaluated=sync.step, loss=float(model(**test)["loss"]))
                model.train()
        if sync.step % 100 == 0:
            accelerator.save_state(str(folder / "state"))
    sync.finish()
    end(model, scheduler)


def by_lightning(elastic: la.Elastic, folder: Path, _: str | None) -> None:
    from dataclasses import replace

    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from laconic.integrations.lightning import LaconicStrategy

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def on_train_start(self) -> None:
            say(begins=self.global_step)

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss: Tensor = self.model(**batch)["loss"]
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            say(step=self.global_step)

        def validation_step(self, batch: Any, _: int) -> None:
            say(evaluated=self.global_step, loss=float(self.model(**batch)["loss"]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            schedule = {"scheduler": LambdaLR(optimizer, decaying), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    sampler = la.ElasticSampler(SAMPLES)
    elastic = replace(elastic, others={"data": sampler})
    module = Module()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=LaconicStrategy(RECIPE, attach_options={"elastic": elastic}),
        default_root_dir=folder,
        max_steps=STEPS,
        max_epochs=-1,
        use_distributed_sampler=False,
        check_val_every_n_epoch=None,
        val_check_interval=EVALUATED,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=100)],
    )
    trainer.fit(module, DataLoader(Data(), BATCH, sampler=sampler), DataLoader(Data(100), 100))
    end(module, module.lr_schedulers())


def samples_of(lines: list[dict[str, Any]]) -> Iterator[int]:
    for line in lines:
        yield from line.get("samples", ())


RUNS = {
    "transformers": by_transformers,
    "accelerate": by_accelerate,
    "lightning": by_lightning,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    library, port, folder, checkpoint = (*sys.argv[1:], None)[:4]
    assert library and port and folder
    importlib.import_module(f"laconic.integrations.{library}")
    say(ready=True)
    sys.stdin.readline()
    run = la.Elastic(f"127.0.0.1:{port}", workers=2, min_workers=1)
    RUNS[library](run, Path(folder), checkpoint)
