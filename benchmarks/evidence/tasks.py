"""Tasks for simulated runs: text and images, each with a small model and one eight times larger;
and series, for which nothing was tuned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

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


def _text_batches(worker: int, workers: int, seed: int, size: int) -> Iterator[Batch]:
    corpus = _corpus()[0]
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


@cache
def task(name: str) -> Task:
    """The task of this name: see `NAMES`; or ``"series"``."""
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
