"""Compiles the kernels for GPUs, without one, and looks at the instructions.

python -m tests.codecs.compiled_for_gpus
"""

from __future__ import annotations

import itertools
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from laconic.codecs import gpu_kernels

CAPABILITIES = (80, 90)
"""Of an A100 and an H100."""
FLOATS, BYTES = "*fp32", "*u8"


def compile_for(
    capability: int, kernel: Any, types: dict[str, str], constants: dict[str, Any]
) -> str:
    """The instructions of a kernel, in PTX. Pointers have long words, as torch's tensors."""
    aligned = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name, kind in types.items()
        if kind.startswith("*")
    }
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    text: str = made.asm["ptx"]
    assert "div.full" not in text and ".ftz" not in text, "not IEEE arithmetic"
    return text


def compile_all(capability: int) -> None:
    tensors = {"x": FLOATS, "less": FLOATS, "plus": FLOATS, "code": BYTES, "left": FLOATS}
    at = {"length": "i64", "block": "i64"}
    given = {"LESS": True, "PLUS": True, "LEFT": True}
    for (bits, width), whole in itertools.product(((8, 256), (4, 128), (2, 64)), (True, False)):
        shape = {"BITS": bits, "WHOLE": whole, "ROWS": 8, "WIDTH": width}
        scales = {"levels": "fp32", "most_scale": "fp32"}
        text = compile_for(
            capability, gpu_kernels._encode, {**tensors, **at, **scales}, {**shape, **given}
        )
        assert "div.rn.f32" in text and (not whole or "ld.global.v4" in text)
        room = {"code": BYTES, "out": FLOATS}
        compile_for(capability, gpu_kernels._decode, {**room, **at}, {**shape, "ADD": True})
        mean = {"code": BYTES, "first": FLOATS, "second": FLOATS, "out": FLOATS, **at}
        mean |= {"n": "i32", "stride": "i64"}
        shape |= {"FIRST": True, "SECOND": True}
        assert "div.rn.f32" in compile_for(capability, gpu_kernels._decode_mean, mean, shape)


if __name__ == "__main__":
    for each in CAPABILITIES:
        compile_all(each)
    print("all compiled")
