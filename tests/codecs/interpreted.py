"""Compares the kernels for GPUs, run by Triton's interpreter on the CPU, with those in C.

    python -m tests.codecs.interpreted FIRST COUNT

Runs COUNT random shapes, from the one numbered FIRST, and prints how many were compared.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from torch import Tensor

from laconic.codecs import gpu_kernels, kernels
from laconic.codecs.integers import largest_scale

BLOCKS = (1, 2, 3, 7, 8, 31, 64, 100, 128, 255, 256, 256, 257, 300, 512, 1000, 4096)
MOST = torch.finfo(torch.float32).max
EDGES = (0.0, -0.0, 1e-45, -1e-45, 1.1754944e-38, MOST, -MOST, 0.5, 1.5, 2.5)
LARGEST = {2: 1.0, 4: 7.0, 8: 127.0}
"""By bits."""
OUTSIDE = (float("nan"), float("inf"), -float("inf"))


class Shape:
    """One case, drawn from the seed ``number``."""

    def __init__(self, number: int) -> None:
        self.generator = torch.Generator().manual_seed(number)
        self.bits = (2, 4, 8)[self.draw(3)]
        self.block = BLOCKS[self.draw(len(BLOCKS))]
        whole = self.block * self.draw(4)
        self.length = (whole, whole + 1, max(whole - 1, 0), self.draw(2500))[self.draw(4)]
        self.offset = self.draw(4)
        """Bytes and elements before each tensor in its memory."""

    def draw(self, below: int) -> int:
        return int(torch.randint(below, (), generator=self.generator))

    def numbers(self) -> Tensor:
        scale = (1.0, 1e-38, 1e-42, 1e30, 3e37)[self.draw(5)]
        x = torch.randn(self.offset + self.length, generator=self.generator)
        x = (x * scale)[self.offset :]
        for value in EDGES[: self.draw(len(EDGES) + 1)]:
            if self.length:
                x[self.draw(self.length)] = value
        return x

    def nbytes(self) -> int:
        whole, rest = divmod(self.length, self.block)
        sizes = [2 + -(-m * self.bits // 8) for m in (self.block, rest)]
        return whole * sizes[0] + (sizes[1] if rest else 0)

    def payload(self) -> Tensor:
        return torch.zeros(self.offset + self.nbytes(), dtype=torch.uint8)[self.offset :]

    def scales(self, code: Tensor) -> Tensor:
        """The high byte of each."""
        return code[1 :: 2 + -(-self.block * self.bits // 8)]

    def compare(self) -> None:
        x, less, plus = self.numbers(), self.numbers(), self.numbers()
        given = (less if self.draw(2) else None, plus if self.draw(2) else None)
        if self.draw(8) == 0 and self.length:
            x[self.draw(self.length)] = OUTSIDE[self.draw(3)]
        most = largest_scale(LARGEST[self.bits])
        codes, lefts, fine = [], [], []
        keeps = bool(self.draw(4))
        for module in (kernels, gpu_kernels):
            code, left = self.payload(), torch.clone(x)
            at = (left, *given, code, left if keeps else None)
            found = module.encode(self.bits, self.block, *at, most)
            fine.append(bool((self.scales(code) != 255).all()) if found is None else found)
            codes.append(code)
            lefts.append(left)
        assert fine[0] == fine[1], self
        if not fine[0]:
            return  # all that is used then is where the first such value is
        same(self, *codes)
        same(self, *lefts)
        add, outs = bool(self.draw(2)), [torch.clone(less), torch.clone(less)]
        for module, out in zip((kernels, gpu_kernels), outs, strict=True):
            module.decode(self.bits, self.block, codes[0], out, add)
        same(self, *outs)
        n = 1 + self.draw(4)
        rows = torch.zeros(n, self.nbytes() + self.offset, dtype=torch.uint8)[:, self.offset :]
        for row in rows:
            kernels.encode(
                self.bits, self.block, torch.randn(self.length), None, None, row, None, most
            )
        offsets = given[: self.draw(3)]
        for module, out in zip((kernels, gpu_kernels), outs, strict=True):
            module.decode_mean(self.bits, self.block, rows, out, *offsets)
        same(self, *outs)

    def __str__(self) -> str:
        return f"{self.bits} bits, blocks of {self.block}, {self.length} elements"


def same(shape: Shape, a: Tensor, b: Tensor) -> None:
    bits = (torch.clone(t).view(torch.uint8) for t in (a, b))
    assert torch.equal(*bits), shape


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    gpu_kernels.ELEMENTS = 2**14  # the interpreter takes as long for a large program
    for number in range(first, first + count):
        Shape(number).compare()
    print(f"{count} shapes, all equal")
