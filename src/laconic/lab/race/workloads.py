"""Built-in workloads: small, real tasks that make progress within a minute on two cores.

A workload defines a task without any communication: how to build the model and its optimizer, each
worker's endless stream of batches, the loss, and a validation set that is equal for all. Data and
crops depend only on (seed, worker, workers), so two runs that differ in the recipe use the same
batches.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import count
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.errors import install

Batch = tuple[Tensor, Tensor]
"""Inputs and targets; the first dimension counts samples."""


@dataclass(frozen=True)
class Workload:
    """A task to train.

    Args:
        name: name on the command line.
        model: builds the model. Call it under `torch.manual_seed` to get the same one everywhere.
        optimizer: builds the optimizer for a model, at the peak learning rate.
        batches: (worker, workers, seed) -> endless batches, deterministic and different for each
            worker. Raises `ValueError` unless 0 <= worker < workers.
        loss: mean loss over a batch, in nats, with a gradient.
        validation: batches of equal size, so that the mean of their losses is the loss. Workers
            may evaluate a share each.
        warmup: share of the steps over which the learning rate rises linearly from 0 to 1.
        final: learning rate at the last step, as a share of the peak.
    """

    name: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batches: Callable[[int, int, int], Iterator[Batch]]
    loss: Callable[[nn.Module, Batch], Tensor]
    validation: Sequence[Batch]
    warmup: float = 0.05
    final: float = 0.1


def lr_factor(step: float, steps: float, workload: Workload) -> float:
    """Return the share of the peak learning rate at `step` of `steps`, counted from 1.

    It rises linearly during the first `warmup` of the run and then falls from 1 to `final` along a
    half cosine. After `steps` it stays at `final`. Only the ratio of the two matters, so seconds
    work as well as steps.

    Raises:
        ValueError: `step` or `steps` is not positive.
    """
    if step <= 0 or steps <= 0:
        raise ValueError(f"step ({step}) and steps ({steps}) must be positive")
    progress = min(step / steps, 1.0)
    if progress < workload.warmup:
        return progress / workload.warmup
    if workload.warmup >= 1:
        return 1.0
    cosine = math.cos(math.pi * (progress - workload.warmup) / (1 - workload.warmup))
    return workload.final + (1 - workload.final) * (1 + cosine) / 2


def load(name: str, *, data: Path | None = None) -> Workload:
    """Return the workload called `name`: "digits", "text" or "text-few".

    Args:
        data: for the texts, the file with the training data; by default, Python's standard library.

    Raises:
        ValueError: the name is unknown, or the data file is missing, unreadable, too small, or
            given to a workload that takes none.
        ImportError: "digits" without scikit-learn.
    """
    if name not in _LOADERS:
        choices = ", ".join(sorted(_LOADERS))
        text = f"no workload {name!r}: choose from {choices}, or your own, such as my.py:make"
        raise ValueError(text)
    return _LOADERS[name](data)


def _generator(*keys: int) -> torch.Generator:
    """Return a generator seeded by `keys`, equal in all processes. Similar keys are independent."""
    digest = blake2b(repr(keys).encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def _check_worker(worker: int, workers: int) -> None:
    if not 0 <= worker < workers:
        raise ValueError(f"worker must be from 0 to {workers - 1}, not {worker}")


# --- digits: 8x8 images of digits, an MLP ---------------------------------------------------------

DIGITS_BATCH = 8
"""Images per worker and step."""
_DIGITS_HELD_OUT = 360  # of 1797: a fifth, divisible into equal batches
_DIGITS_VALIDATION_BATCH = 45


def _digits(data: Path | None) -> Workload:
    if data is not None:
        raise ValueError(f"the digits workload uses built-in data: omit --data (you gave {data})")
    table = _digits_table()
    order = torch.randperm(len(table), generator=_generator(0))  # one split for every seed
    inputs = (table[:, :-1].float() / 16)[order]
    targets = table[:, -1].long()[order]
    held_out = zip(
        torch.split(inputs[:_DIGITS_HELD_OUT], _DIGITS_VALIDATION_BATCH),
        torch.split(targets[:_DIGITS_HELD_OUT], _DIGITS_VALIDATION_BATCH),
        strict=True,
    )
    return Workload(
        name="digits",
        model=_mlp,
        optimizer=_nesterov,
        batches=partial(_digits_batches, inputs[_DIGITS_HELD_OUT:], targets[_DIGITS_HELD_OUT:]),
        loss=_classification_loss,
        validation=tuple(held_out),
    )


def _digits_table() -> Tensor:
    """Return a row per image: 64 gray levels from 0 to 16, and the class.

    Reads the file behind scikit-learn's ``load_digits``, because importing the package takes every
    process a second.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise ImportError(f"the digits workload needs the package scikit-learn: {install('lab')}")
    path = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    numpy = importlib.import_module("numpy")
    return torch.from_numpy(numpy.loadtxt(path, delimiter=","))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def _nesterov(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def _classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def _digits_batches(
    inputs: Tensor, targets: Tensor, worker: int, workers: int, seed: int
) -> Iterator[Batch]:
    """Stream a worker's share of the images, all of it in every epoch."""
    _check_worker(worker, workers)
    if workers > len(targets):
        raise ValueError(f"{workers} workers are too many for {len(targets)} training images")
    share = torch.arange(worker, len(targets), workers)

    def stream() -> Iterator[Batch]:
        queue = share[:0]
        for epoch in count():
            shuffled = torch.randperm(len(share), generator=_generator(seed, worker, epoch))
            queue = torch.cat((queue, share[shuffled]))  # a batch may span two epochs
            while len(queue) >= DIGITS_BATCH:
                batch, queue = queue[:DIGITS_BATCH], queue[DIGITS_BATCH:]
                yield inputs[batch], targets[batch]

    return stream()


# --- text: the bytes of any file, a decoder-only transformer -------------------------------------

VOCABULARY, WIDTH, LAYERS, HEAD, CONTEXT = 256, 128, 4, 32, 64
TEXT_BATCH = 16
"""Crops per worker and step: 1024 bytes, about 70 ms on one core."""
FEW, FEW_BATCH, FEW_BYTES = "text-few", 4, 4096
"""The text workload with fewer crops per worker and step, about 20 ms on one core, so that seconds
of training are hundreds of steps, and with so many bytes of text for each worker."""
_VALIDATION_CROPS, _FEW_VALIDATION_CROPS = 640, 320
_CORPUS_BYTES = 4_000_000
_NOT_PROSE = {"encodings", "pydoc_data"}  # tables and one giant string, nothing to learn from
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def _text(
    data: Path | None,
    name: str = "text",
    batch: int = TEXT_BATCH,
    validation: int = _VALIDATION_CROPS,
    own: int | None = None,
) -> Workload:
    source = standard_library() if data is None else _read(data)
    if len(source) < 10 * (CONTEXT + 1):
        raise ValueError(
            f"the training text is too short: it has {len(source)} bytes, and at least "
            f"{10 * (CONTEXT + 1)} are needed"
        )
    corpus = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    split = len(corpus) * 9 // 10
    return Workload(
        name=name,
        model=ByteTransformer,
        optimizer=_adamw,
        batches=partial(_text_batches, corpus[:split], batch, own),
        loss=_next_byte_loss,
        validation=_validation_crops(corpus[split:], validation),
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the training text: {path}: {error.strerror}") from error


def standard_library() -> bytes:
    """Return the source of Python's standard library: modules by name, up to 4 MB.

    The bytes depend only on the Python version: tests, installed packages and files generated by
    the installation are excluded.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in _NOT_LIBRARY | _NOT_PROSE and not name.startswith("config-")
        ]
        paths += [
            Path(folder, name)
            for name in files
            if name.endswith(".py")
            and not name.startswith(("_sysconfigdata", "sitecustomize", "usercustomize"))
        ]
    source = bytearray()
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        source += path.read_bytes()
        if len(source) >= _CORPUS_BYTES:
            break
    return bytes(source[:_CORPUS_BYTES])


def _text_batches(
    corpus: Tensor, batch: int, own: int | None, worker: int, workers: int, seed: int
) -> Iterator[Batch]:
    """Stream random crops of the corpus, or of so many bytes of the worker's own part of it, with a
    generator per worker."""
    _check_worker(worker, workers)

    def stream() -> Iterator[Batch]:
        generator, text = _generator(seed, worker), corpus
        if own is not None:
            text = corpus.chunk(workers)[worker]
            start = int(torch.randint(max(len(text) - own, 1), (), generator=generator))
            text = text[start : start + own]
        while True:
            starts = torch.randint(len(text) - CONTEXT, (batch,), generator=generator)
            yield _crops(text, starts)

    return stream()


def _crops(corpus: Tensor, starts: Tensor) -> Batch:
    """Return (crops, CONTEXT) bytes from each start, and the byte that follows each of them."""
    crops = corpus[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return crops[:, :-1], crops[:, 1:]


def _validation_crops(corpus: Tensor, most: int) -> tuple[Batch, ...]:
    """Return at most so many evenly spaced crops without overlap, in batches of equal size."""
    crops = min(most, len(corpus) // (CONTEXT + 1))
    size = min(TEXT_BATCH, crops)
    crops -= crops % size
    starts = torch.arange(crops) * (len(corpus) // crops)
    return tuple(_crops(corpus, part) for part in torch.split(starts, size))


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, HEAD)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, HEAD)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(heads.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class ByteTransformer(nn.Module):
    """Decoder-only transformer over bytes, learned positions, untied head: 865,280 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, length <= CONTEXT) bytes to (batch, length, VOCABULARY) logits."""
        x = self.bytes(inputs) + self.positions.weight[: inputs.shape[1]]
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95))


def _next_byte_loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


_LOADERS: dict[str, Callable[[Path | None], Workload]] = {
    "digits": _digits,
    "text": _text,
    FEW: partial(_text, name=FEW, batch=FEW_BATCH, validation=_FEW_VALIDATION_CROPS, own=FEW_BYTES),
}
