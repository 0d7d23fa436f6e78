"""Runs of the Trainer with laconic, and of the same training written by hand."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.optimization import get_linear_schedule_with_warmup

import laconic as la
from laconic.integrations.transformers import LaconicTrainer

from tests.support import by_hand as hand
from tests.support import forked

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


def network(dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    free: dict[str, Any] = {n: dropout for n in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    free["use_cache"] = False  # as the Trainer sets it
    free |= {"vocab_size": 64, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, **free))


def data_of(ranks: int) -> dict[str, Any]:
    count = hand.STEPS * hand.ACCUMULATE * BATCH * ranks
    return {"train_dataset": Text(count), "eval_dataset": Text(8)}


class Sequential:
    """Takes the samples in order, so that a loop written by hand can take the same ones."""

    train_dataset: Text

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class InOrder(Sequential, LaconicTrainer):
    """Keeps the weights that it evaluates, by step."""

    def prediction_step(self, model: torch.nn.Module, *given: Any, **more: Any) -> Any:
        evaluated = self.__dict__.setdefault("evaluated", {})
        evaluated.setdefault(self.state.global_step, hand.flat(model))
        return super().prediction_step(model, *given, **more)


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    known: dict[str, Any] = {
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": hand.ACCUMULATE,
        "max_steps": hand.STEPS,
        "learning_rate": 0.01,
        "warmup_steps": 5,
        "max_grad_norm": hand.CLIP,
        "optim": "adamw_torch",
        "eval_strategy": "steps",
        "eval_steps": hand.EVALUATED,
        "save_strategy": "steps",
        "save_steps": hand.SAVED,
        "logging_steps": 5,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    return TrainingArguments(output_dir=str(folder), **{**known, **more})


def by_trainer(rank: int, ranks: int, recipe: str, resume: bool) -> dict[str, Any]:
    folder, model = FOLDER / f"{recipe}-{ranks}", hand.spoil(rank, network())
    trainer = InOrder(model, arguments(folder), **data_of(ranks), recipe=hand.RECIPES[recipe])
    saved = str(folder / f"checkpoint-{hand.SAVED}")
    trainer.train(resume_from_checkpoint=saved if resume else None)
    assert trainer.sync is not None and not trainer.sync.attached
    return {
        "flat": hand.flat(model),
        "rounds": hand.rounds(trainer.sync),
        "history": trainer.state.log_history,
        "evaluated": trainer.__dict__["evaluated"],
        "step": trainer.sync.step,
    }


def by_hand(rank: int, ranks: int, recipe: str) -> dict[str, Any]:
    la.init()
    model, rows = network(), data_of(ranks)["train_dataset"].rows
    names = Trainer.get_decay_parameter_names(Trainer.__new__(Trainer), model)
    decay = [p for name, p in model.named_parameters() if name in names]
    other = [p for name, p in model.named_parameters() if name not in names]
    groups = [{"params": decay, "weight_decay": 0.0}, {"params": other, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.999), eps=1e-8)
    scheduler = get_linear_schedule_with_warmup(optimizer, 5, hand.STEPS)
    # as the Trainer counts labels of GPT-2
    items = torch.tensor(hand.ACCUMULATE * BATCH * LENGTH)
    if recipe == "ddp":
        items = items * ranks  # average_tokens_across_devices

    def loss(step: int, part: int) -> torch.Tensor:
        first = ((step * hand.ACCUMULATE + part) * ranks + rank) * BATCH
        x = rows[first : first + BATCH].clone()
        own: torch.Tensor = model(input_ids=x, labels=x, num_items_in_batch=items).loss
        return own * ranks if recipe == "ddp" else own

    return hand.train(recipe, model, optimizer, scheduler.step, loss)


def short(
    kind: type[LaconicTrainer], model: Any, folder: str, ranks: int, resume: Any = None, **more: Any
) -> np.ndarray:
    """Parameters after 12 steps, with a save after 6 of them."""
    steps = {"max_steps": 12, "save_steps": 6, "eval_steps": 6, **more}
    at = arguments(FOLDER / folder, **steps)
    trainer = kind(model, at, **data_of(ranks), recipe=hand.RECIPES["diloco"])
    trainer.train(resume_from_checkpoint=resume)
    return hand.flat(model)


def with_dropout(rank: int, ranks: int, resume: bool) -> np.ndarray:
    path = str(FOLDER / "dropout" / "checkpoint-6") if resume else None
    return short(LaconicTrainer, network(0.2), "dropout", ranks, path)


class Worse(LaconicTrainer):
    """Takes the first model that it evaluates for the best one."""

    def _determine_best_metric(self, metrics: Any, trial: Any) -> Any:
        metrics = {**metrics, "eval_loss": float(self.state.global_step)}
        return super()._determine_best_metric(metrics, trial)


def best_without_a_shared_folder(rank: int, ranks: int) -> tuple[np.ndarray, np.ndarray | None]:
    """The model in the end, and the saved one that was the best, which the first host has."""
    host = f"host{rank}"
    end = short(Worse, hand.spoil(rank, network()), host, ranks, load_best_model_at_end=True)
    saved = FOLDER / host / "checkpoint-6"
    return end, None if rank else hand.flat(GPT2LMHeadModel.from_pretrained(saved))


def followed_by_a_trainer(rank: int, ranks: int) -> tuple[str, np.ndarray, np.ndarray]:
    """The model after laconic has trained it, and what a Trainer of Transformers makes of it."""
    model, data = network(), data_of(ranks)
    quiet = {"eval_strategy": "no", "save_strategy": "no", "average_tokens_across_devices": False}
    at = arguments(FOLDER / "followed", **quiet)
    InOrder(model, at, **data, recipe=hand.RECIPES["diloco"]).train()
    trained = hand.flat(model)
    second = Trainer(model, arguments(FOLDER / "followed", **quiet, max_steps=4), **data)
    second.train()
    return type(second.model_wrapped).__name__, trained, hand.flat(model)


def shipped(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in GPT2LMHeadModel.from_pretrained(folder).state_dict().items()}


def refused(_: int, **options: Any) -> None:
    at = arguments(FOLDER / "refused", **options)
    InOrder(network(), at, **data_of(1), recipe=hand.RECIPES["ddp"])


def run_the_rest(found: dict[str, Any]) -> None:
    found["dropout"] = forked.run(2, with_dropout, 2, False), forked.run(2, with_dropout, 2, True)
    found["best"] = forked.run(2, best_without_a_shared_folder, 2)
    found["followed"] = forked.run(2, followed_by_a_trainer, 2)


if __name__ == "__main__":
    checkpoint = f"checkpoint-{hand.SAVED}"
    hand.main(
        *(by_trainer, by_hand, shipped, checkpoint, f"{checkpoint}/laconic", run_the_rest),
        batch_size=partial(refused, auto_find_batch_size=True),
        options=partial(refused, ddp_bucket_cap_mb=25),
        one_host=lambda rank: short(LaconicTrainer, network(), f"host{rank}", 2, resume=True),
    )
