"""``make gpu`` on a machine without a GPU: what it runs, and how it goes on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarks.cuda import FailedError, Part, training, tuning
from benchmarks.cuda import __main__ as gpu

CPU = torch.device("cpu")


def test_it_goes_on_where_its_time_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, ran, tried = [0.0], list[str](), list[str]()

    def part(name: str, figures: bool, *, most: float = 60, fails: bool = False) -> Part:
        def run(device: torch.device) -> dict[str, float]:
            ran.append(name)
            tried.append(name)
            now[0] += most / 2
            if fails and tried.count(name) == 1:
                raise FailedError("no", {"x": 1})
            return {"x": 2}

        return Part(name, name, run, figures, most)

    monkeypatch.setattr(gpu, "clock", lambda: now[0])
    parts = [part("check", False), part("long", True, most=240), part("bad", True, fails=True)]
    out = tmp_path / "gpu.json"

    def go(commit: str, seconds: float) -> list[str]:
        ran.clear()
        todo = gpu.missing(parts, gpu.read(out), commit)
        return [p.name for p in gpu.run_all(todo, CPU, out, {"commit": commit}, seconds)]

    assert go("a", 200) == ["long"] and ran == ["check", "bad"]
    assert gpu.read(out)["bad"]["error"] == "no" and gpu.read(out)["bad"]["numbers"] == {"x": 1}
    assert go("a", 200) == ["long"] and ran == ["bad"], "the figures of a failure are not known"
    assert go("b", 1000) == [] and ran == ["check", "long"], "checks count at one commit"
    assert go("b", 1000) == [] and ran == []


@pytest.mark.parametrize(("workers", "rows"), [(1, 3), (2, 6)])
def test_a_small_model_learns(
    workers: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "corpus.txt").write_bytes(b"to be or not to be, " * 2000)
    monkeypatch.setenv("LACONIC_TEXTS", str(tmp_path))
    tiny = replace(training.ENGLISH, layers=1, heads=2, width=32, block=16, half=False, warmup=5)
    found = training.trained(tiny, workers, "outer_step(ddp(), 4)", 60, 1e-2, 10, CPU)
    assert found["loss"] < 2.5 < 5.5 and len(found) == rows
    assert (found["MB per iteration"] > 0) == (workers > 1)
    monkeypatch.setenv("LACONIC_TEXTS", str(tmp_path / "none"))
    with pytest.raises(FailedError, match="LACONIC_TEXTS"):
        training.trained(tiny, 1, "ddp()", 1, 1e-2, 1, CPU)


WORDS = ["to", "be", "or", "not", "that", "is", "the", "question"]


def small_model(folder: Path) -> Path:
    """A model of the kind of MiniLM, and its tokenizer."""
    from transformers import BertConfig, BertModel, BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate(words)})
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(words), intermediate_size=64, **sizes)
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["lora", pytest.param("whole", marks=pytest.mark.slow)])
def test_a_pretrained_model_is_tuned_when_there_is_time(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the Trainer, in two processes."""
    monkeypatch.setenv("LACONIC_TEXTS", str(tmp_path))
    monkeypatch.setenv("LACONIC_MODEL", str(small_model(tmp_path / "model")))
    monkeypatch.setitem(tuning.RATES, kind, 0.03)
    monkeypatch.setattr(gpu, "clock", lambda: 0.0)
    (tmp_path / "tinyshakespeare.txt").write_text(" ".join(WORDS) * 200)
    recipe = training.RECIPES["fragments"]
    run = partial(tuning.tuning, kind, recipe, iterations=24, length=16)
    parts, out = [Part("tuned", "", run, True, training.MOST)], tmp_path / "gpu.json"
    for seconds, left in ((100.0, 1), (300.0, 0), (300.0, 0)):
        todo = gpu.missing(parts, gpu.read(out), "a")
        assert len(gpu.run_all(todo, CPU, out, {"commit": "a"}, seconds)) == left
    row = gpu.read(out)["tuned"]
    assert row["error"] == "" and row["numbers"]["loss"] < row["numbers"]["loss before"]
    assert row["numbers"]["MB per iteration"] > 0
    monkeypatch.setenv("LACONIC_TEXTS", str(tmp_path / "none"))
    with pytest.raises(FailedError, match="LACONIC_TEXTS"):
        run(CPU)


def test_the_order_is_that_of_importance() -> None:
    kinds = [each.name.partition("_")[0] for each in tuning.PARTS]
    assert kinds[0] == "codecs" and "overlap" in kinds
    assert list(dict.fromkeys(kinds))[-3:] == ["shakespeare", "english", "tuned"]
