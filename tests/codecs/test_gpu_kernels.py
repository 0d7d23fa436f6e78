"""The kernels for GPUs: what they compute, by Triton's interpreter, and that they compile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from laconic.codecs import Int4, Int8, kernels

ROOT = Path(__file__).parents[2]
SHAPES, PARTS = 500, 2


def program(name: str, *arguments: object) -> str:
    """What a module beside this one prints."""
    command = [sys.executable, "-W", "ignore", "-m", f"tests.codecs.{name}", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_they_give_the_bits_of_the_kernels_in_c(part: int) -> None:
    each = SHAPES // PARTS
    assert program("interpreted", part * each, each) == f"{each} shapes, all equal"


@pytest.mark.slow
def test_they_compile_for_gpus() -> None:
    """The interpreter accepts more than the compiler does."""
    assert program("compiled_for_gpus") == "all compiled"


def test_who_serves_which_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def on_gpu(device: torch.device) -> object:
        asked.append(device)
        return "gpu"

    monkeypatch.setattr(kernels, "gpu_kernels", on_gpu)
    four, here = Int4(), torch.ones(8)
    assert four.kernels(here, here) is (kernels if kernels.library() else None)
    assert four.kernels(here.double()) is None
    assert four.kernels(torch.ones(4, 4)[:, 0]) is None
    assert four.kernels(here, torch.ones(8, device="meta")) is None
    there = OnGpu(torch.ones(8))
    assert str(four.kernels(there)) == "gpu"
    assert Int8(kernels.MAX_BLOCK + 1).kernels(there) is None
    assert asked == [torch.device("cuda", 0)]


class OnGpu(torch.Tensor):
    """Stands in for a tensor on a GPU."""

    device = torch.device("cuda", 0)


def test_without_triton_tensor_operations_code(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert kernels.gpu_kernels.__wrapped__(device) is None


def test_kernels_that_do_not_compile_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler\nmore")

    monkeypatch.setattr(torch, "ones", fail)
    with pytest.warns(UserWarning, match=r"\(Failed to find C compiler\): codecs use tensor"):
        assert kernels.gpu_kernels.__wrapped__(torch.device("cuda", 0)) is None
