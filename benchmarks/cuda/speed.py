"""How fast is it? Ratios between things measured in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import laconic as la
from benchmarks.cuda import FailedError, Numbers, part
from benchmarks.cuda.checks import PARTS  # which come first
from laconic.codecs import Int4, Int8
from laconic.codecs.integers import Integers, largest_scale
from laconic.device import accelerator, seconds_between, synchronize, time_mark
from laconic.links.null import NullLink
from laconic.links.staged import StagedLink

__all__ = ["PARTS"]

ELEMENTS, REPEATS, CALLS = 2**26, 20, 10
LEAST = {"encode": 0.85, "decode": 0.80}
"""Shares of the bandwidth of a copy."""
MOST_STEP = 1.02
"""A step with a hidden round beside one without."""
SIZES = {"25M": (8, 512), "100M": (14, 768), "300M": (24, 1024)}
"""Layers and width of transformers by their parameters."""
LIMITED = "100M"
BUSY_BATCH = (32, 1024)
"""Sequences and their length with which the GPU is busy all the time, and not waiting for Python to
launch its kernels, as with the 8 sequences of the other parts."""
PERIODS = 3
"""Of these, the median period counts."""


def seconds_of(
    run: Callable[[], object], device: torch.device, repeats: int = REPEATS, calls: int = 1
) -> float:
    """The median seconds of ``run``, of so many ``calls`` in a row. The device first has other work
    to do, so that it finds all of them queued, and their launches are not timed."""
    taken = []
    for k in range(repeats + 3):
        if calls > 1 and device.type == "cuda":
            torch.cuda._sleep(10**7)  # type: ignore[no-untyped-call]
        start = time_mark(device)
        for _ in range(calls):
            run()
        end = time_mark(device)
        synchronize(device)
        if k >= 3:
            taken.append(seconds_between(start, end) / calls)
    return statistics.median(taken)


def shares(codec: Integers, x: Tensor, device: torch.device) -> Numbers:
    """The bandwidth of encoding and decoding, as shares of that of a copy: bytes that must be read
    and written over seconds. The kernels are called without what surrounds them in `Codec.encode`,
    which reads back whether all elements are finite."""
    kernels = codec.kernels(x)
    if kernels is None:
        raise FailedError(f"there are no kernels for {codec} on {device}")
    n, size, at = x.numel(), codec.nbytes(x.numel()), (codec.bits, codec.block)
    out, code = torch.empty_like(x), torch.empty(size, dtype=torch.uint8, device=device)
    less, plus, most = torch.zeros_like(x), torch.zeros_like(x), largest_scale(codec.levels)
    kernels.encode(*at, x, None, None, code, None, most)
    rows = torch.stack([code] * 4)
    timed: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (8 * n, lambda: out.copy_(x)),
        "encode": (4 * n + size, lambda: kernels.encode(*at, x, None, None, code, None, most)),
        "encode with feedback": (
            16 * n + size,
            lambda: kernels.encode(*at, x, less, plus, code, x, most),
        ),
        "decode": (4 * n + size, lambda: kernels.decode(*at, code, out, False)),
        "decode and add": (8 * n + size, lambda: kernels.decode(*at, code, out, True)),
        "mean of 4": (4 * n + 4 * size, lambda: kernels.decode_mean(*at, rows, out)),
    }
    rates = {what: b / seconds_of(run, device, calls=CALLS) for what, (b, run) in timed.items()}
    copy = rates.pop("copy")
    return {"copy, GB/s": copy / 1e9, **{what: rate / copy for what, rate in rates.items()}}


def _codec(codec: Integers, device: torch.device) -> Numbers:
    found = shares(codec, torch.randn(ELEMENTS, device=device), device)
    low = [f"{what} {found[what]:.2f}" for what, least in LEAST.items() if found[what] < least]
    if low:
        raise FailedError(
            f"shares of copy bandwidth below the limits {LEAST}: {', '.join(low)}", found
        )
    return found


@part("int8: throughput relative to a plain copy", figures=True)
def int8_bandwidth(device: torch.device) -> Numbers:
    return _codec(Int8(), device)


@part("int4: throughput relative to a plain copy", figures=True)
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
    turn: the median of the turns' ratios. All copies and codes are made; so none of them can hide
    behind a slow network."""
    period = 10
    model = transformer(layers, width, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    x = torch.randn(*batch, width, device=device, dtype=torch.bfloat16)
    run = steps(model, optimizer, x, period)
    run()
    without, beside = [], []
    recipe = la.diloco(period, delay=period // 2, codec="int4")
    for _ in range(turns):
        without.append(seconds_of(run, device, PERIODS))
        link = StagedLink(NullLink(2), device)
        with la.attach(model, optimizer, recipe, link=link) as sync:
            run()
            beside.append(seconds_of(run, device, PERIODS))
            waited = sync.stats().seconds_waiting
            sync.detach()
    ratio = statistics.median(a / b for a, b in zip(beside, without, strict=True))
    count = sum(p.numel() for p in model.parameters())
    return {
        "parameters, millions": count / 1e6,
        "ms per step": 1e3 * statistics.median(without) / period,
        "with a round beside": ratio,
        "ms waited in all": 1e3 * waited,
    }


def _overlap(size: str, device: torch.device, **options: Any) -> Numbers:
    found = overlapped(*SIZES[size], device, **options)
    ratio = found["with a round beside"]
    if size == LIMITED and ratio > MOST_STEP:
        raise FailedError(f"a step takes {ratio:.3f} of one without a round", found)
    return found


@part(
    "25M parameters in bfloat16: step time during a round, relative to no round",
    figures=True,
)
def overlap_25m(device: torch.device) -> Numbers:
    return _overlap("25M", device)


@part(
    "100M parameters in bfloat16: step time during a round, relative to no round",
    figures=True,
)
def overlap_100m(device: torch.device) -> Numbers:
    return _overlap("100M", device)


@part(
    "300M parameters in bfloat16: step time during a round, relative to no round",
    figures=True,
)
def overlap_300m(device: torch.device) -> Numbers:
    return _overlap("300M", device)


@part(
    "100M parameters, 32 sequences, so that the GPU limits the step: step time during a round, "
    "relative to no round",
    figures=True,
)
def overlap_100m_busy(device: torch.device) -> Numbers:
    return _overlap("100M", device, batch=BUSY_BATCH, turns=4)


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
    recipe = la.diloco(2, codec="int4")
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
