"""How well do recipes train larger models? The workers are simulated on one GPU.

The texts are in the folder that LACONIC_TEXTS names: ``tinyshakespeare.txt``, and ``corpus.txt.xz``
or ``corpus.txt``, any English text of 20 MB or more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.cuda import Numbers, Part
from benchmarks.cuda.speed import PARTS  # which come first
from benchmarks.gpt import GPT, Setting, Text, characters, text_bytes, train
from laconic.algorithms.parse import as_recipe
from laconic.policy.candidates import turning
from laconic.policy.facts import Facts
from laconic.policy.predict import predict

SHAKESPEARE = Setting(layers=6, heads=6, width=384, block=256, batch=64, dropout=0.2, half=True)
"""nanoGPT's README: Shakespeare's characters on a GPU, 5,000 iterations, a loss of 1.4697."""
ENGLISH = Setting(layers=12, heads=12, width=768, block=1024, batch=8, half=True, betas=(0.9, 0.95))
"""GPT-2's smallest model, 85 million parameters without its tokens."""
WORKERS = 4
RECIPES = {
    "ddp": "ddp()",
    "outer": "outer_step(ddp(), 4, outer='muon')",
    "int4": "outer_step(ddp(codec='int4'), 4, outer='muon')",
    "fragments": "streaming_diloco(8, 4, 2, outer='muon')",
    "fragments_16": "streaming_diloco(16, 4, 2, outer='muon')",
    "nesterov": "streaming_diloco(16)",
}
"""What `auto` chooses among from 1 Gbit/s down to 10 Mbit/s, DDP, and the mathematics of torchft's
streaming DiLoCo."""
RATES = {"1 Gbit/s": 1e9, "100 Mbit/s": 1e8, "10 Mbit/s": 1e7}
LATENCY = 0.5e-3
MOST = 240.0


def text_folder() -> Path:
    return Path(os.environ.get("LACONIC_TEXTS", "texts"))


def text_path(setting: Setting) -> Path:
    folder = text_folder()
    if setting == SHAKESPEARE:
        return folder / "tinyshakespeare.txt"
    packed = folder / "corpus.txt.xz"
    return packed if packed.exists() else folder / "corpus.txt"


def no_text(setting: Setting) -> str:
    """What is missing."""
    path = text_path(setting)
    return "" if path.exists() else f"there is no {path}: LACONIC_TEXTS names its folder"


def trained(
    setting: Setting,
    workers: int,
    recipe: str,
    iterations: int,
    lr: float,
    pieces: int | None,
    device: torch.device,
) -> Numbers:
    """The loss, its cost, and the seconds that are predicted for real workers of this pace."""
    path = str(text_path(setting))
    known: Text = characters(path) if setting == SHAKESPEARE else text_bytes(path)
    one = replace(setting, batch=setting.batch // workers if setting == SHAKESPEARE else 8)
    found = train(one, known, recipe, workers, iterations, lr, device=device, pieces=pieces)
    compute = found.seconds / workers
    numbers = {
        "loss": found.loss,
        "MB per iteration": found.sent / 1e6,
        "ms per iteration of a worker": 1e3 * compute,
    }
    if workers > 1:
        shapes = tuple(tuple(p.shape) for p in GPT(one, known.characters).parameters())
        facts = Facts(
            workers,
            shapes,
            4,
            compute,
            min(RATES.values()),
            LATENCY,
            turning=turning(shapes, device),
        )
        for name, rate in RATES.items():
            seconds = predict(as_recipe(recipe), replace(facts, rate=rate)).seconds
            numbers[f"s at {name}, predicted"] = iterations * seconds
    return numbers


def parts() -> Iterator[Part]:
    """The most important first."""
    shakespeare, lacks = partial(trained, SHAKESPEARE), partial(no_text, SHAKESPEARE)
    title = "nanoGPT's GPU setting, 5,000 iterations"
    run = partial(shakespeare, 1, "ddp()", 5000, 1e-3, None)
    yield Part("shakespeare_one", f"{title}, one worker", run, True, MOST, lacks)
    for name, recipe in RECIPES.items():
        run = partial(shakespeare, WORKERS, recipe, 5000, 1e-3, None)
        yield Part(f"shakespeare_{name}", f"{title}, `{recipe}`", run, True, MOST, lacks)
    for name, recipe in RECIPES.items():
        run = partial(trained, ENGLISH, WORKERS, recipe, 1000, 6e-4, 256)
        title = f"85 million parameters, English, 1,000 iterations, `{recipe}`"
        yield Part(f"english_{name}", title, run, True, MOST, partial(no_text, ENGLISH))


PARTS.extend(parts())
