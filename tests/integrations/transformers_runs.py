"""Runs of the Trainer with laconic, and of the same training written by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.optimization import get_linear_schedule_with_warmup

import laconic as la
from laconic.integrations.transformers import LaconicCallback, LaconicTrainer

from tests.support import forked
from tests.support.by_hand import (
    ACCUMULATE,
    CLIP,
    EVALUATED,
    RECIPES,
    RUNS,
    SAVED,
    STEPS,
    flat,
    main,
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


def network(dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    free: dict[str, Any] = {n: dropout for n in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
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
        "logging_steps": 5,
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


SHORT: dict[str, Any] = {"max_steps": 12, "save_steps": 6, "eval_steps": 6}


def with_dropout(rank: int, ranks: int, resume: bool) -> np.ndarray:
    """Parameters after 12 steps, or of the last 6 of them."""
    folder = FOLDER / "dropout"
    model = network(0.2)
    at = arguments(folder, **SHORT)
    trainer = LaconicTrainer(
        model, at, train_dataset=text(ranks), eval_dataset=Text(8), recipe=RECIPES["diloco"]
    )
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-6") if resume else None)
    return flat(model)


class Worse(LaconicTrainer):
    """Takes the first model that it evaluates for the best one."""

    def _determine_best_metric(self, metrics: Any, trial: Any) -> Any:
        return super()._determine_best_metric(
            {**metrics, "eval_loss": float(self.state.global_step)}, trial
        )


def best_without_a_shared_folder(rank: int, ranks: int) -> tuple[np.ndarray, np.ndarray | None]:
    """The model in the end, and the saved one that was the best, where this host has it."""
    from safetensors.torch import load_file

    folder, model = FOLDER / f"host{rank}", spoil(rank, network())
    at = arguments(folder, load_best_model_at_end=True, **SHORT)
    data: dict[str, Any] = {"train_dataset": text(ranks), "eval_dataset": Text(8)}
    Worse(model, at, **data, recipe=RECIPES["diloco"]).train()
    saved = folder / "checkpoint-6" / "model.safetensors"
    if rank:  # of the first host only
        return flat(model), None
    best = network()
    best.load_state_dict(load_file(saved), strict=False)
    return flat(model), flat(best)


def resumed_on_one_host(rank: int, ranks: int) -> str:
    """The error where the other hosts do not have the checkpoint."""
    try:
        trainer = LaconicTrainer(
            *(network(), arguments(FOLDER / f"host{rank}", **SHORT)),
            train_dataset=text(ranks),
            eval_dataset=Text(8),
            recipe=RECIPES["diloco"],
        )
        trainer.train(resume_from_checkpoint=True)
    except ValueError as error:
        return str(error)
    return ""


def followed_by_a_trainer(rank: int, ranks: int, first: str) -> tuple[str, np.ndarray]:
    """What a Trainer of Transformers makes of the model after laconic has trained it."""
    model = network()
    data: dict[str, Any] = {"train_dataset": text(ranks)}
    at = arguments(FOLDER / first, eval_strategy="no", save_strategy="no", max_steps=4)
    if first == "callback":
        Trainer(model, at, **data, callbacks=[LaconicCallback(RECIPES["diloco"])]).train()
    else:
        LaconicTrainer(model, at, **data, recipe=RECIPES["diloco"]).train()
    second = Trainer(model, at, **data)
    second.train()
    return type(second.model_wrapped).__name__, flat(model)


def adapted(rank: int, ranks: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The adapter that is saved in the middle of a training, and the consensus then."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from safetensors.torch import load_file

    model = get_peft_model(network(), LoraConfig(r=2, target_modules=["c_attn"]))
    kept: dict[str, torch.Tensor] = {}

    class Keep(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            assert trainer.sync is not None
            if trainer.sync.step == 6:
                with trainer.sync.consensus():
                    now = get_peft_model_state_dict(model)
                    kept.update({k: v.detach().clone() for k, v in now.items()})

    folder = FOLDER / "adapter"
    trainer = LaconicTrainer(
        *(model, arguments(folder, **SHORT)),
        train_dataset=text(ranks),
        eval_dataset=Text(8),
        recipe=RECIPES["diloco"],
        callbacks=[Keep()],
    )
    trainer.train()
    return load_file(folder / "checkpoint-6" / "adapter_model.safetensors"), kept


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
    quiet: dict[str, Any] = {"eval_strategy": "no", "save_strategy": "no"}

    class Plain(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    callback = LaconicCallback(RECIPES["diloco"])
    quiet["average_tokens_across_devices"] = False
    at = arguments(FOLDER / "callback", **quiet)
    Plain(model, at, train_dataset=text(ranks), callbacks=[callback]).train()
    return flat(model)


def run_the_rest(found: dict[str, Any]) -> None:
    found["dropout"] = forked.run(2, with_dropout, 2, False), forked.run(2, with_dropout, 2, True)
    found["best"] = forked.run(2, best_without_a_shared_folder, 2)
    found["one host"] = forked.run(2, resumed_on_one_host, 2)
    found["followed"] = [
        forked.run(2, followed_by_a_trainer, 2, first) for first in ("trainer", "callback")
    ]
    found["adapter"] = forked.run(2, adapted, 2)
    found["callback"] = forked.run(2, by_callback, 2)
    found["refused"] = {
        what: forked.run(2, refused, 2, what) for what in ("callback", "batch size")
    }
    for run in RUNS:
        folder = FOLDER / run / f"checkpoint-{SAVED}" / "laconic"
        found[run]["states"] = len(list(folder.glob("rank-*")))
    for path in (FOLDER / "diloco-2" / f"checkpoint-{SAVED}" / "laconic").glob("*"):
        path.unlink()
    found["refused"]["checkpoint"] = forked.run(2, refused, 2, "checkpoint")


if __name__ == "__main__":
    main(by_trainer, by_hand, shipped, f"checkpoint-{SAVED}", run_the_rest)
