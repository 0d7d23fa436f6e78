"""Tasks for simulated runs: text and images, each with a small model and one eight times larger;
series, for which nothing was tuned; and two of fine-tuning: MiniLM's lowest layer, and a small
model of text that has been trained before."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.study import digits
from laconic.lab.race import workloads
from laconic.lab.race.workloads import Batch

CONTEXT, VOCABULARY, HEADS = 32, 128, 2
LENGTH, HIDDEN = 24, 64
"""Steps of a series, and hidden units of the network that predicts it."""
HELD_OUT = 360
"""Images that are not trained on: a fifth of scikit-learn's 1,797."""


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """The mean cross-entropy, in nats."""
    inputs, targets = batch
    scores = model(inputs)
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten())


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    """The mean squared error."""
    return F.mse_loss(model(batch[0]), batch[1])


@dataclass(frozen=True)
class Task:
    """A ``model``, ``batches(worker, workers, seed, size)``, and data to ``evaluate`` on."""

    model: Callable[[], nn.Module]
    batches: Callable[[int, int, int, int], Iterator[Batch]]
    evaluation: Batch
    loss: Callable[[nn.Module, Batch], Tensor] = cross_entropy


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.first(x)).view(batch, length, 3, HEADS, width // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(heads.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.second(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A decoder over bytes below 128."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.bytes(inputs) + self.positions.weight
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


@cache
def _corpus() -> tuple[Tensor, Tensor]:
    """Python's standard library as bytes below 128, for training and for evaluation."""
    source = bytes(b for b in workloads.standard_library() if b < VOCABULARY)
    corpus = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    split = len(corpus) * 9 // 10
    return corpus[:split], corpus[split:]


def _crops(corpus: Tensor, starts: Tensor) -> Batch:
    crops = corpus[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return crops[:, :-1], crops[:, 1:]


def _text_batches(
    worker: int,
    workers: int,
    seed: int,
    size: int,
    texts: Callable[[], tuple[Tensor, Tensor]] = _corpus,
) -> Iterator[Batch]:
    corpus = texts()[0]
    generator = torch.Generator().manual_seed(1000 * seed + worker)
    while True:
        starts = torch.randint(len(corpus) - CONTEXT, (size,), generator=generator)
        yield _crops(corpus, starts)


@cache
def _digits() -> tuple[Tensor, Tensor]:
    inputs, targets = digits()
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    return inputs[order], targets[order]


def _image_batches(worker: int, workers: int, seed: int, size: int) -> Iterator[Batch]:
    """Images of this worker's share, drawn at random, with noise: no epoch repeats another."""
    inputs, targets = _digits()
    share = torch.arange(HELD_OUT + worker, len(targets), workers)
    generator = torch.Generator().manual_seed(1000 * seed + worker)
    while True:
        chosen = share[torch.randint(len(share), (size,), generator=generator)]
        noise = 0.3 * torch.randn(size, inputs.shape[1], generator=generator)
        yield inputs[chosen] + noise, targets[chosen]


def _series_batches(worker: int, workers: int, seed: int, size: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1000 * seed + worker)
    while True:
        yield series(generator, size)


def _mlp(width: int) -> nn.Module:
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


class Network(nn.Module):
    """A GRU and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.GRU(1, HIDDEN, batch_first=True)
        self.readout = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.first(x)[0])  # type: ignore[no-any-return]


def series(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Sums of two sines of random rates and phases, with noise; and the values that follow."""
    rate = 0.2 + torch.rand(count, 1, 2, generator=generator)
    phase = 2 * math.pi * torch.rand(count, 1, 2, generator=generator)
    at = torch.arange(LENGTH + 1.0)[None, :, None]
    clean = torch.sin(rate * at + phase).sum(2, keepdim=True)
    noisy = clean + 0.3 * torch.randn(clean.shape, generator=generator)
    return noisy[:, :-1], clean[:, 1:]


# -- fine-tuning ----

PRETRAINING = 1500, 32, 8e-3
"""Steps, samples per step, and the peak learning rate."""


@cache
def _english() -> tuple[Tensor, Tensor]:
    """The reference of Python's language in English, for training and for evaluation."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")
    corpus = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    split = len(corpus) * 9 // 10
    return corpus[:split], corpus[split:]


@cache
def _pretrained() -> nn.Module:
    """The small model of text, trained on the source of the standard library."""
    steps, size, lr = PRETRAINING
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Transformer(24, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.05)
    batches = _text_batches(0, 1, 0, size)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model, next(batches)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return model


TOKENS, SAMPLES_HELD_OUT = 16, 1024
"""Tokens of a sample, and samples that are not trained on."""
LIBRARIES = (
    *("asyncio", "ctypes", "email", "http", "importlib"),
    *("logging", "multiprocessing", "tkinter", "unittest", "xml"),
)
"""The packages that MiniLM learns to tell from one another by a few tokens of their source."""


class Layer(nn.Module):
    """MiniLM's lowest layer, and a new readout of the mean over a sample's tokens. Of the layer,
    all but the MLP is trained."""

    def __init__(self, lowest: nn.Module) -> None:
        super().__init__()
        self.lowest = deepcopy(lowest)
        for mlp in (self.lowest.intermediate, self.lowest.output):
            mlp.requires_grad_(False)
        self.readout = nn.Linear(self.lowest.output.dense.out_features, len(LIBRARIES))

    def forward(self, embedded: Tensor) -> Tensor:
        return self.readout(self.lowest(embedded).mean(1))  # type: ignore[no-any-return]


@cache
def _minilm() -> tuple[nn.Module, nn.Module, Any]:
    """MiniLM's embeddings, its lowest layer, without dropout, and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    from benchmarks.cuda.tuning import folder_of_model

    folder = folder_of_model()
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.embeddings, model.encoder.layer[0], AutoTokenizer.from_pretrained(folder)


@cache
def _samples() -> tuple[Tensor, Tensor]:
    """The tokens of all samples, and the numbers of their packages."""
    tokens, labels = [], []
    for label, name in enumerate(LIBRARIES):
        files = sorted(Path(sysconfig.get_paths()["stdlib"], name).rglob("*.py"))
        library = [path for path in files if not {"test", "tests"} & {*path.parts}]
        text = "\n".join(path.read_text("utf-8") for path in library)
        ids = torch.tensor(_minilm()[2](text, add_special_tokens=False, verbose=False)["input_ids"])
        tokens.append(ids[: len(ids) // TOKENS * TOKENS].view(-1, TOKENS))
        labels.append(torch.full((len(tokens[-1]),), label))
    order = torch.randperm(sum(map(len, labels)), generator=torch.Generator().manual_seed(0))
    return torch.cat(tokens)[order], torch.cat(labels)[order]


@torch.no_grad()
def _embedded(chosen: Tensor) -> Batch:
    tokens, labels = _samples()
    return _minilm()[0](tokens[chosen]), labels[chosen]


def _sample_batches(worker: int, workers: int, seed: int, size: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1000 * seed + worker)
    count = len(_samples()[1])
    while True:
        yield _embedded(torch.randint(SAMPLES_HELD_OUT, count, (size,), generator=generator))


@cache
def task(name: str) -> Task:
    """The task of this name: see `NAMES` and `TUNED`; or ``"series"``."""
    if name == "MiniLM":
        layer = partial(Layer, _minilm()[1])
        return Task(layer, _sample_batches, _embedded(torch.arange(SAMPLES_HELD_OUT)))
    if name == "text, tuned":
        rest = _english()[1]
        starts = torch.arange(1024) * (len(rest) // 1024 - 1)
        batches = partial(_text_batches, texts=_english)
        return Task(partial(deepcopy, _pretrained()), batches, _crops(rest, starts))
    if name == "series":
        held_out = series(torch.Generator().manual_seed(10**6), 512)
        return Task(Network, _series_batches, held_out, squared_error)
    kind, size = name.split(", ")
    if kind == "text":
        rest = _corpus()[1]
        starts = torch.arange(512) * (len(rest) // 512 - 1)
        width, layers = {"small": (24, 2), "large": (64, 3)}[size]
        return Task(partial(Transformer, width, layers), _text_batches, _crops(rest, starts))
    inputs, targets = _digits()
    noise = 0.3 * torch.randn(HELD_OUT, 64, generator=torch.Generator().manual_seed(1))
    evaluation = inputs[:HELD_OUT] + noise, targets[:HELD_OUT]
    return Task(partial(_mlp, {"small": 24, "large": 106}[size]), _image_batches, evaluation)


NAMES = ("text, small", "text, large", "images, small", "images, large")
TUNED = "MiniLM", "text, tuned"
"""The tasks of fine-tuning."""
