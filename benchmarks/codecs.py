"""Measure the speed of the codecs, in GB/s of float32 elements on one thread.

    python -m benchmarks.codecs

Times are this thread's CPU time, the best of several, so that other programs affect only the
caches. The first line of the output is a copy of the same number of bytes, for comparison.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from laconic.codecs import Cast, Codec, Int2, Int4, Int8

LENGTH = 2**23
REPEATS = 7

CODECS: tuple[Codec, ...] = (
    Cast("bfloat16"),
    Cast("float16"),
    Int8(),
    Int4(),
    Int2(),
)


def speed(job: Callable[[], object], length: int, repeats: int) -> float:
    """Return the best GB/s of ``length`` float32 elements."""
    job()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        job()
        times.append(time.thread_time() - start)
    return 4 * length / min(times) / 1e9


def rates(codec: Codec, x: torch.Tensor, repeats: int) -> tuple[float, float]:
    """Return the GB/s of encode and decode."""
    payload, out = codec.encode(x), torch.empty_like(x)
    encode = speed(lambda: codec.encode(x), x.numel(), repeats)
    decode = speed(lambda: codec.decode(payload, x.numel(), out), x.numel(), repeats)
    return encode, decode


def main(length: int = LENGTH, repeats: int = REPEATS) -> None:
    torch.set_num_threads(1)
    x = torch.randn(length, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(x)
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"{4 * length / 2**20:.0f} MiB of float32, one thread, {capability}")
    print(f"{'copy':64} {speed(lambda: out.copy_(x), length, repeats):7.1f} GB/s")
    print(f"{'codec':64} {'encode':>7} {'decode':>7} {'bits':>7}")
    for codec in CODECS:
        encode, decode = rates(codec, x, repeats)
        bits = 8 * codec.nbytes(length) / length
        print(f"{codec!s:64} {encode:7.1f} {decode:7.1f} {bits:7.2f}", flush=True)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
