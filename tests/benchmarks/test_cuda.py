"""``make cuda`` without a GPU: what it says, and that its parts run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.cuda import PARTS, FailedError, Part, checks, page, speed
from benchmarks.cuda.__main__ import RESULTS, main, run_all

from laconic.codecs import Int8, kernels

from tests.support import gloo, late

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so where there is none")
def test_without_a_gpu_it_lists_what_was_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "There is no GPU, or this torch does not support it. Not run:"
    assert [line.split(":")[0].strip() for line in rest] == [each.name for each in PARTS]


def test_a_part_that_fails_ends_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(_: torch.device) -> dict[str, float]:
        raise FailedError("2 is not 3", {"b": 2.0})

    def broken(_: torch.device) -> dict[str, float]:
        raise RuntimeError("CUDA error\nmore")

    parts = [
        Part("wrong", "", wrong, False),
        Part("broken", "", broken, False),
        Part("fine", "", lambda _: {"a": 1.0}, True),
    ]
    found = run_all(parts, CPU)
    assert [row["error"] for row in found] == ["2 is not 3", "RuntimeError: CUDA error", ""]
    assert [row["numbers"] for row in found] == [{"b": 2.0}, {}, {"a": 1.0}]
    assert "FAILED: 2 is not 3" in capsys.readouterr().out


def test_the_page_has_the_results_that_there_are() -> None:
    assert page.PAGE.read_text() == page.rendered(page.PAGE.read_text(), page.read(RESULTS))


def test_the_table(tmp_path: Path) -> None:
    assert page.table([]).count("| never run |") == len(PARTS)
    rows = [
        {"name": "codecs", "numbers": {"shapes": 3500.0}, "error": ""},
        {"name": "offload", "numbers": {}, "error": "a | b"},
    ]
    result = {"gpu": "X", "torch": "2", "date": "2030-01-01", "parts": rows}
    (tmp_path / "x.json").write_text(json.dumps(result))
    text = page.table(page.read(tmp_path))
    assert "| part | X, torch 2, 2030-01-01 |" in text
    assert "(`codecs`) | ok. shapes 3,500 |" in text
    assert "(`offload`) | failed: a \\| b |" in text
    assert text.count("| never run |") == len(PARTS) - 2


@pytest.mark.parametrize("name", ["codecs", "recipes", "offload", "collectives"])
def test_checks_pass_between_cpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SHAPES", 4)
    run = next(each.run for each in PARTS if each.name == name)
    run(CPU)


def on_late(rank: int) -> dict[str, Any]:
    """The measurements on a stand-in, with a small model."""
    with late.device() as device, pytest.MonkeyPatch.context() as patched:
        patched.setattr(speed, "SIZES", {"25M": (1, 64)})
        small = speed.overlapped(1, 64, device, (2, 8), turns=1)
        return {**small, "held": speed.held(device, offload=True)}


def test_measurements_run(late_pool: gloo.Pool) -> None:
    (found,) = late_pool.run(on_late, ranks=1)
    assert found["with a round beside"] > 0 and found["held"] == 0


@pytest.mark.skipif(kernels.library() is None, reason="without a compiler there are none")
def test_bandwidths_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "REPEATS", 1)
    found = speed.shares(Int8(), torch.randn(2560), CPU)
    assert set(speed.LEAST) < set(found) and all(value > 0 for value in found.values())
    with pytest.raises(FailedError, match="there are no kernels for"):
        speed.shares(Int8(5000), torch.randn(2560), CPU)


def test_a_wrong_code_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = checks._coded
    calls = iter(range(10**6))

    def once_wrong(*given: Any) -> list[torch.Tensor]:
        found = original(*given)
        if next(calls) == 9 and found[0].numel():
            found[0][0] ^= 1
        return found

    monkeypatch.setattr(checks, "_coded", once_wrong)
    monkeypatch.setattr(checks, "SHAPES", 4)
    with pytest.raises(FailedError, match="elements, shape number 0"):
        checks.codecs(CPU)
