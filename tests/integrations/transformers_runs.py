"""Runs of the Trainer with laconic, and of the same training written by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.optimization import get_linear_schedule_with_warmup

import laconic as la
from laconic.integrations.transformers import LaconicCallback, LaconicTrainer

import forked
from by_hand import (
    ACCUMULATE,
    CLIP,
    EVALUATED,
    RECIPES,
    RUNS,
    SAVED,
    STEPS,
    flat,
    rounds,
    spoil,
    train,
)

BATCH, LENGTH = 2, 8
FOLDER = Path(sys.argv[1])


class Text(Dataset[dict[str, torch.Tensor]]):
    """Made-up text."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(0, 64, (count, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def network() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    free: dict[str, Any] = {n: 0.0 for n in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    free["use_cache"] = False  # as the Trainer sets it
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, **free)
    )


def text(ranks: int) -> Text:
    return Text(STEPS * ACCUMULATE * BATCH * ranks)


class InOrder(LaconicTrainer):
    """Takes the samples in order, so that a loop written by hand can take the same ones. Keeps the
    weights that it evaluates, by step."""

    def prediction_step(self, model: torch.nn.Module, *given: Any, **more: Any) -> Any:
        evaluated = self.__dict__.setdefault("evaluated", {})
        evaluated.setdefault(self.state.global_step, flat(model))
        return super().prediction_step(model, *given, **more)

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    known: dict[str, Any] = {
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATE,
        "max_steps": STEPS,
        "learning_rate": 0.01,
        "warmup_steps": 5,
        "max_grad_norm": CLIP,
        "optim": "adamw_torch",
        "eval_strategy": "steps",
        "eval_steps": EVALUATED,
        "save_strategy": "steps",
        "save_steps": SAVED,
        "logging_steps": 10,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    return TrainingArguments(output_dir=str(folder), **{**known, **more})


def by_trainer(rank: int, ranks: int, recipe: str, resume: bool, **more: Any) -> dict[str, Any]:
    folder = FOLDER / f"{recipe}-{ranks}"
    model = spoil(rank, network())
    trainer = InOrder(
        model,
        arguments(folder, **more),
        train_dataset=text(ranks),
        eval_dataset=Text(8),
        recipe=RECIPES[recipe],
    )
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}") if resume else None)
    assert trainer.sync is not None
    return {
        "flat": flat(model),
        "rounds": rounds(trainer.sync),
        "history": trainer.state.log_history,
        "evaluated": trainer.__dict__["evaluated"],
        "attached": trainer.sync.attached,
        "step": trainer.sync.step,
    }


def by_hand(rank: int, ranks: int, recipe: str) -> dict[str, Any]:
    la.init()
    model, data = network(), text(ranks)
    names = Trainer.get_decay_parameter_names(Trainer.__new__(Trainer), model)
    decay = [p for name, p in model.named_parameters() if name in names]
    other = [p for name, p in model.named_parameters() if name not in names]
    groups = [{"params": decay, "weight_decay": 0.0}, {"params": other, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.999), eps=1e-8)
    scheduler = get_linear_schedule_with_warmup(optimizer, 5, STEPS)
    # as the Trainer counts labels of GPT-2
    items = torch.tensor(ACCUMULATE * BATCH * LENGTH)
    if recipe == "ddp":
        items = items * ranks  # average_tokens_across_devices

    def loss(step: int, part: int) -> torch.Tensor:
        first = ((step * ACCUMULATE + part) * ranks + rank) * BATCH
        x = torch.stack([data.rows[first + i] for i in range(BATCH)])
        own: torch.Tensor = model(input_ids=x, labels=x, num_items_in_batch=items).loss
        return own * ranks if recipe == "ddp" else own

    return train(recipe, model, optimizer, scheduler.step, loss)


def shipped(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in GPT2LMHeadModel.from_pretrained(folder).state_dict().items()}


def refused(rank: int, ranks: int, what: str) -> str:
    """The error for settings that cannot work."""
    folder, more = FOLDER / "refused", {}
    try:
        if what == "callback":
            callbacks = [LaconicCallback(RECIPES["diloco"])]
            data = {"train_dataset": text(1), "eval_dataset": Text(8)}
            Trainer(network(), arguments(folder), **data, callbacks=callbacks)
        if what == "batch size":
            more = {"auto_find_batch_size": True}
        if what == "checkpoint":
            by_trainer(rank, ranks, "diloco", resume=True)
        InOrder(network(), arguments(folder, **more), eval_dataset=Text(8), recipe=RECIPES["ddp"])
    except ValueError as error:
        return str(error)
    return ""


def by_callback(rank: int, ranks: int) -> np.ndarray:
    model = network()
    quiet = {"eval_strategy": "no", "save_strategy": "no"}

    class Plain(Trainer):
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    callback = LaconicCallback(RECIPES["diloco"])
    quiet["average_tokens_across_devices"] = False
    at = arguments(FOLDER / "callback", **quiet)
    Plain(model, at, train_dataset=text(ranks), callbacks=[callback]).train()
    return flat(model)


def main() -> None:
    found: dict[str, Any] = {}
    for run, (ranks, recipe) in RUNS.items():
        hand = forked.run(ranks, by_hand, ranks, recipe)
        trainer = forked.run(ranks, by_trainer, ranks, recipe, False)
        resumed = forked.run(ranks, by_trainer, ranks, recipe, True)
        folder = FOLDER / run / f"checkpoint-{SAVED}"
        (model,) = forked.run(1, shipped, folder)
        found[run] = {
            **{"hand": hand, "trainer": trainer, "resumed": resumed, "shipped": model},
            "files": sorted(str(p.relative_to(folder)) for p in folder.rglob("*")),
        }
    found["callback"] = forked.run(2, by_callback, 2)
    found["refused"] = {
        what: forked.run(2, refused, 2, what) for what in ("callback", "batch size")
    }
    for path in (FOLDER / "diloco-2" / f"checkpoint-{SAVED}" / "laconic").glob("*"):
        path.unlink()
    found["refused"]["checkpoint"] = forked.run(2, refused, 2, "checkpoint")
    forked.save(found)


if __name__ == "__main__":
    main()
