"""How fast is it? Ratios between things measured in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import laconic as la
from benchmarks.cuda import PARTS, FailedError, Numbers, part
from laconic.codecs import Codec, Int4, Int8
from laconic.device import accelerator, seconds_between, synchronize, time_mark
from laconic.links.null import NullLink
from laconic.links.staged import StagedLink

__all__ = ["PARTS"]

ELEMENTS, REPEATS = 2**26, 20
LEAST = {"encode": 0.85, "decode": 0.80}
"""Shares of the bandwidth of a copy."""
MOST_STEP = 1.02
"""A step with a hidden round beside one without."""
SIZES = {"25M": (8, 512), "100M": (14, 768), "300M": (24, 1024)}
"""Layers and width of transformers by their parameters."""
LIMITED = "100M"


def seconds_of(run: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """The median seconds of ``run``."""
    taken = []
    for k in range(repeats + 3):
        start = time_mark(device)
        run()
        end = time_mark(device)
        synchronize(device)
        if k >= 3:
            taken.append(seconds_between(start, end))
    return statistics.median(taken)


def shares(codec: Codec, x: Tensor, device: torch.device) -> Numbers:
    """The bandwidth of encoding and decoding, as shares of that of a copy: bytes that must be read
    and written over seconds."""
    n, size = x.numel(), codec.nbytes(x.numel())
    out, code = torch.empty_like(x), codec.encode(x)
    rows, less, plus = torch.stack([code] * 4), torch.zeros_like(x), torch.zeros_like(x)
    copy = 8 * n / seconds_of(lambda: out.copy_(x), device)
    timed: dict[str, tuple[int, Callable[[], object]]] = {
        "encode": (4 * n + size, lambda: codec.encode(x, out=code)),
        "encode with feedback": (
            16 * n + size,
            lambda: codec.encode(x, less=less, plus=plus, subtract=True, out=code),
        ),
        "decode": (4 * n + size, lambda: codec.decode(code, n, out)),
        "decode and add": (8 * n + size, lambda: codec.decode(code, n, out, add=True)),
        "mean of 4": (4 * n + 4 * size, lambda: codec.decode_mean(rows, out)),
    }
    found = {what: b / seconds_of(run, device) / copy for what, (b, run) in timed.items()}
    return {"copy, GB/s": copy / 1e9, **found}


def _codec(codec: Codec, device: torch.device) -> Numbers:
    found = shares(codec, torch.randn(ELEMENTS, device=device), device)
    low = [f"{what} {found[what]:.2f}" for what, least in LEAST.items() if found[what] < least]
    if low:
        raise FailedError(f"shares of copy bandwidth below the limits {LEAST}: {', '.join(low)}")
    return found


@part("int8: shares of the bandwidth of a copy", figures=True)
def int8_bandwidth(device: torch.device) -> Numbers:
    return _codec(Int8(), device)


@part("int4: shares of the bandwidth of a copy", figures=True)
def int4_bandwidth(device: torch.device) -> Numbers:
    return _codec(Int4(), device)


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(width // 64, 1)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        parts = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind()
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def transformer(layers: int, width: int, device: torch.device) -> nn.Module:
    """In bfloat16."""
    blocks = [Block(width) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.LayerNorm(width)).to(device, torch.bfloat16)


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, count: int
) -> Callable[[], None]:
    """A function that takes ``count`` training steps."""

    def run() -> None:
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            model(x).float().square().mean().backward()
            optimizer.step()

    return run


def overlapped(
    layers: int,
    width: int,
    device: torch.device,
    batch: tuple[int, int] = (8, 1024),
    turns: int = 6,
) -> Numbers:
    """Steps with rounds beside them, over a link whose other rank answers at once, and without, in
    turn. All copies and codes are made; so none of them can hide behind a slow network."""
    period = 10
    model = transformer(layers, width, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    x = torch.randn(*batch, width, device=device, dtype=torch.bfloat16)
    run = steps(model, optimizer, x, period)
    run()
    without, beside = [], []
    recipe = la.diloco(period, delay=period // 2, codec="int4")
    for _ in range(turns):
        without.append(seconds_of(run, device, 1))
        link = StagedLink(NullLink(2), device)
        with la.attach(model, optimizer, recipe, link=link) as sync:
            run()
            beside.append(seconds_of(run, device, 1))
            waited = sync.stats().seconds_waiting
            sync.detach()
    ratio = statistics.median(beside) / statistics.median(without)
    count = sum(p.numel() for p in model.parameters())
    return {
        "parameters, millions": count / 1e6,
        "ms per step": 1e3 * statistics.median(without) / period,
        "with a round beside": ratio,
        "ms waited in all": 1e3 * waited,
    }


def _overlap(size: str, device: torch.device) -> Numbers:
    found = overlapped(*SIZES[size], device)
    if size == LIMITED and found["with a round beside"] > MOST_STEP:
        raise FailedError(f"a step takes {found['with a round beside']:.3f} of one without a round")
    return found


@part("a transformer of 25M parameters in bfloat16: steps with a round beside them", figures=True)
def overlap_25m(device: torch.device) -> Numbers:
    return _overlap("25M", device)


@part("a transformer of 100M parameters in bfloat16: steps with a round beside them", figures=True)
def overlap_100m(device: torch.device) -> Numbers:
    return _overlap("100M", device)


@part("a transformer of 300M parameters in bfloat16: steps with a round beside them", figures=True)
def overlap_300m(device: torch.device) -> Numbers:
    return _overlap("300M", device)


def held(device: torch.device, offload: bool) -> float:
    """Bytes on the device after a round that training did not hold before `attach`."""
    model = transformer(*SIZES["25M"], device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(1, 64, SIZES["25M"][1], device=device, dtype=torch.bfloat16)
    steps(model, optimizer, x, 2)()
    optimizer.zero_grad(set_to_none=True)
    synchronize(device)
    before = allocated(device)
    link = StagedLink(NullLink(2), device)
    recipe = la.diloco(2, codec="int4", sharded=False)
    with la.attach(model, optimizer, recipe, link=link, offload=offload) as sync:
        steps(model, optimizer, x, 4)()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        after = allocated(device)
        sync.detach()
    return after - before


def allocated(device: torch.device) -> float:
    """Bytes of tensors on the device."""
    kind = accelerator(device)
    return float(torch.cuda.memory_allocated(device)) if device.type == "cuda" and kind else 0.0


@part("memory: outer state on the GPU, with and without offload", figures=True)
def memory(device: torch.device) -> Numbers:
    plain, offloaded = (held(device, offload) / 2**20 for offload in (False, True))
    if offloaded > 0:
        raise FailedError(f"offload=True leaves {offloaded:.2f} MiB on the GPU")
    return {"MiB of outer state": plain, "MiB with offload": offloaded}
