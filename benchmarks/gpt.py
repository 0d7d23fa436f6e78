"""GPT-2 without biases, on characters or bytes of a text, trained by simulated workers."""

from __future__ import annotations

import lzma
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laconic

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setting:
    """A model and how it is trained: AdamW, gradients clipped to 1, a warm-up, then a cosine to a
    tenth of the learning rate. ``batch``: samples of each worker. ``half``: computes in bfloat16,
    compiled."""

    layers: int
    heads: int
    width: int
    block: int
    batch: int
    dropout: float = 0.0
    half: bool = False
    warmup: int = 100
    betas: tuple[float, float] = (0.9, 0.99)
    decay: float = 0.1


LAPTOP = Setting(layers=4, heads=4, width=128, block=64, batch=12)
"""nanoGPT's README: Shakespeare's characters on a CPU."""


class Block(nn.Module):
    """Attention and a feed-forward network, each over a norm and added to its input."""

    def __init__(self, s: Setting) -> None:
        super().__init__()
        self.heads, self.dropout = s.heads, s.dropout
        self.norms = nn.ModuleList(nn.LayerNorm(s.width, bias=False) for _ in range(2))
        self.qkv, self.out, self.up, self.down = (
            nn.Linear(s.width * i, s.width * o, bias=False)
            for i, o in ((1, 3), (1, 1), (1, 4), (4, 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        drop = self.dropout * self.training
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads, dropout_p=drop, is_causal=True)
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(-2)), drop)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), drop)


class GPT(nn.Module):
    """The embedding is also the head. Returns the mean cross-entropy, in nats."""

    def __init__(self, s: Setting, characters: int) -> None:
        super().__init__()
        self.dropout = s.dropout
        self.characters, self.places = (nn.Embedding(n, s.width) for n in (characters, s.block))
        self.blocks = nn.Sequential(*(Block(s) for _ in range(s.layers)))
        self.norm = nn.LayerNorm(s.width, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * s.layers if last else 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.characters(x) + self.places.weight[: x.shape[1]]
        h = self.norm(self.blocks(F.dropout(h, self.dropout * self.training)))
        logits = F.linear(h, self.characters.weight)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


@dataclass(frozen=True)
class Text:
    """Numbers of characters to train and to validate on, and of how many different ones."""

    train: Tensor
    validation: Tensor
    characters: int


@cache
def characters(path: str) -> Text:
    """A text by its characters, 9 to 1."""
    text = Path(path).read_text()
    number = {c: i for i, c in enumerate(sorted(set(text)))}
    data = torch.tensor([number[c] for c in text])
    split = int(0.9 * len(data))
    return Text(data[:split], data[split:], len(number))


@cache
def text_bytes(path: str) -> Text:
    """A text, perhaps in an .xz file, by its bytes; the last 2% are for validation."""
    packed = Path(path).read_bytes()
    text = lzma.decompress(packed) if path.endswith(".xz") else packed
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    split = int(0.98 * len(data))
    return Text(data[:split], data[split:], 256)


def batches(data: Tensor, s: Setting, *seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(sum(n * 1000**i for i, n in enumerate(seed)))
    offsets = torch.arange(s.block, device=data.device)
    while True:
        at = torch.randint(len(data) - s.block, (s.batch,), generator=generator)[:, None]
        places = at.to(data.device) + offsets
        yield data[places].long(), data[places + 1].long()


def optimizers_of(
    model: nn.Module, s: Setting, kind: str, lr: float
) -> list[torch.optim.Optimizer]:
    """``muon``: its step, as large as AdamW's, for the matrices inside the blocks. It needs torch
    2.9 or newer."""
    inside = [p for n, p in model.named_parameters() if p.dim() == 2 and n.startswith("blocks")]
    own = inside if kind == "muon" else []
    rest = [p for p in model.parameters() if not any(p is q for q in own)]
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": s.decay},
        {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr, betas=s.betas)
    if not own:
        return [adam]
    muon = torch.optim.Muon(own, lr, weight_decay=s.decay, adjust_lr_fn="match_rms_adamw")
    return [muon, adam]


def workload(path: Path) -> dict[str, object]:
    """`LAPTOP` on a text's characters for ``laconic compare``, which scales the learning rate of 1.

    The warm-up is that of 500 iterations. The learning rate runs one iteration ahead of `train`'s.
    """
    s, text = LAPTOP, characters(str(path))

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        (adam,) = optimizers_of(model, s, "adamw", 1.0)

        def clip(*_: object) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        adam.register_step_pre_hook(clip)
        return adam

    blocks = text.validation.unfold(0, s.block + 1, s.block)
    equal = next(size for size in range(4 * s.batch, 0, -1) if len(blocks) % size == 0)
    return {
        "model": lambda: GPT(s, text.characters),
        "optimizer": optimizer,
        "batches": lambda worker, workers, seed: batches(text.train, s, seed, worker + 1),
        "loss": lambda model, batch: model(*batch),
        "validation": [(b[:, :-1], b[:, 1:]) for b in blocks.split(equal)],
        "warmup": s.warmup / 500,
    }


@dataclass(frozen=True)
class Trained:
    """``loss`` of the consensus model on all the validation text, in nats; ``sent``: bytes by each
    worker in each iteration; ``seconds`` of an iteration of all workers, one after the other."""

    loss: float
    sent: float
    seconds: float


def train(
    s: Setting,
    text: Text,
    recipe: laconic.Recipe | str,
    workers: int,
    iterations: int,
    lr: float,
    *,
    seed: int = 0,
    kind: str = "adamw",
    device: torch.device = CPU,
    pieces: int | None = None,
) -> Trained:
    """Train and validate; on the first ``pieces`` blocks of the validation text, None: on all."""
    own, other = (t.to(device) for t in (text.train, text.validation))
    validation = other.unfold(0, s.block + 1, s.block)[:pieces]
    started = float("nan")

    def narrow() -> AbstractContextManager[object]:
        return torch.autocast(device.type, torch.bfloat16) if s.half else nullcontext()

    def worker(rank: int) -> tuple[float, int, float]:
        nonlocal started
        torch.manual_seed(seed)
        model = GPT(s, text.characters).to(device)
        optimizers = optimizers_of(model, s, kind, lr)
        loss_of = torch.compile(model) if s.half else model
        torch.manual_seed(seed * 1000 + rank)  # of dropout
        feed = batches(own, s, seed, rank + 1)
        sync = laconic.attach(model, optimizers, recipe, seed=seed)
        for t, batch in zip(range(iterations), feed, strict=False):
            if t == iterations // 10 and math.isnan(started):
                started = time.perf_counter()  # all is compiled, and memory is reserved
            share = (t - s.warmup) / max(1, iterations - s.warmup)
            cosine = 0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi * share))
            for group in (g for o in optimizers for g in o.param_groups):
                group["lr"] = lr * (cosine if t >= s.warmup else (t + 1) / (s.warmup + 1))
            model.zero_grad()
            with narrow():
                loss = loss_of(*batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
        sent = sync.stats().bytes_sent
        sync.finish()
        ended = time.perf_counter()
        model.eval()
        with torch.no_grad(), narrow():
            losses = [
                len(p) * float(loss_of(p[:, :-1].long(), p[:, 1:].long()))
                for p in validation[rank::workers].split(4 * s.batch)
            ]
        return sum(losses) / len(validation), sent, ended

    runs = laconic.simulate(worker, workers=workers)
    return Trained(
        sum(loss for loss, _, _ in runs),
        fmean(sent for _, sent, _ in runs) / iterations,
        (max(ended for _, _, ended in runs) - started) / (iterations - iterations // 10),
    )
