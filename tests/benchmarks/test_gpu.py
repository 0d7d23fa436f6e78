"""``make gpu`` on a machine without a GPU: what it runs, and how it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarks import study
from benchmarks.cuda import FailedError, Part, page, running, training, tuning
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
        return [p.name for p in gpu.run_all(todo, CPU, out, about(commit), seconds)]

    assert go("a", 200) == ["long"] and ran == ["check", "bad"]
    assert gpu.read(out)["bad"]["error"] == "no" and gpu.read(out)["bad"]["numbers"] == {"x": 1}
    assert go("a", 200) == ["long"] and ran == ["bad"], "the figures of a failure are not known"
    assert go("b", 1000) == [] and ran == ["check", "long"], "checks count at one commit"
    assert go("b", 1000) == [] and ran == []
    for _ in range(2):
        assert go("unknown", 1000) == [] and ran == ["check"], "the code may have changed"


def about(commit: str, torch: str = "2", date: str = "today") -> dict[str, str]:
    return {"gpu": "G", "commit": commit, "torch": torch, "date": date}


@pytest.mark.fault("what fails at each try took the time of all that comes after it")
def test_what_has_failed_here_comes_last() -> None:
    parts = [Part(name, name, _dies, True) for name in ("bad", "new", "elsewhere")]
    rows = {"bad": {"error": "no", "commit": "a"}, "elsewhere": {"error": "no", "commit": "b"}}
    assert [p.name for p in gpu.missing(parts, rows, "a")] == ["new", "elsewhere", "bad"]


@pytest.mark.fault("missing data counted as a failure, and were in the page")
def test_what_lacks_data_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LACONIC_TEXTS", str(tmp_path / "none"))
    monkeypatch.delenv("LACONIC_MODEL", raising=False)
    parts = [p for p in tuning.PARTS if p.most == training.MOST]
    assert gpu.run_all(parts, CPU, tmp_path / "gpu.json", about("a"), 1e6) == parts
    assert not (tmp_path / "gpu.json").exists()


def _dies(device: torch.device) -> dict[str, float]:
    os._exit(3)  # as a driver's fault does


def _works(device: torch.device) -> dict[str, float]:
    return {"x": 1}


def _hangs(device: torch.device) -> dict[str, float]:
    time.sleep(1000)
    return {}


def _has_failed(device: torch.device) -> dict[str, float]:
    raise FailedError("no", {"x": 1})


@pytest.mark.fault("after an error of CUDA all later parts failed, and one that hung never ended")
def test_an_error_stays_in_its_part() -> None:
    run = partial(running.run_apart, device=CPU)
    assert run(Part("", "", _dies, True))["error"] == "its process has ended"
    assert run(Part("", "", _hangs, True, most=0.5))["error"] == "took more than 0 s"
    row = run(Part("", "", _has_failed, True))
    assert (row["error"], row["numbers"]) == ("no", {"x": 1})


@pytest.mark.fault("results of one day were shown as those of another, with another torch")
def test_the_page_says_when_each_part_ran(tmp_path: Path) -> None:
    old = {"name": "codecs", "text": "", "seconds": 1.0, "numbers": {}, "error": ""}
    whole = {"gpu": "G", "torch": "1", "date": "then", "parts": [old]}
    out = tmp_path / "g.json"
    out.write_text(json.dumps(whole))
    for name in ("recipes", "offload"):
        part = replace(next(p for p in tuning.PARTS if p.name == name), run=lambda device: {})
        gpu.run_all([part], CPU, out, about("a"), 1000)
    head, _, *lines = page.table(page.read(tmp_path)).splitlines()
    assert head == "| part | G, torch 2, today |"
    assert [line.rpartition("`) ")[2] for line in lines[:3]] == [
        "| ok (torch 1, then) |",
        "| ok |",
        "| ok |",
    ]


def test_the_command_goes_on_and_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts are in processes of their own, whatever becomes of them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    parts = [Part("codecs", "", _works, True), Part("recipes", "", _dies, True)]
    for module, name, value in (
        (gpu, "PARTS", parts),
        (gpu, "ROOT", tmp_path),
        (gpu, "RESULTS", tmp_path),
        (page, "PAGE", tmp_path / "gpu.md"),
    ):
        monkeypatch.setattr(module, name, value)
    page.PAGE.write_text(f"<!-- begin: {page.NAME} -->\n<!-- end -->\n")
    assert gpu.main(["--only", "codecs"]) == 0 and "(`codecs`) | ok. x 1 |" in page.PAGE.read_text()
    assert gpu.main(["--seconds", "1"]) == 0 and gpu.read(tmp_path / "a-gpu.json").keys() == {
        "codecs"
    }
    assert gpu.main([]) == 1 and "(`recipes`) | failed: its process has" in page.PAGE.read_text()


def test_the_page_is_that_of_the_results() -> None:
    written = page.PAGE.read_text()
    assert study.inserted(written, page.NAME, page.table(page.read(gpu.RESULTS))) == written


@pytest.mark.fault("keeping the results, or committing them, made all checks run again")
def test_results_are_not_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "benchmarks" / "cuda" / "results"
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "RESULTS", results)
    assert gpu.commit() == "unknown"

    def commits() -> None:
        person = ["-c", "user.name=n", "-c", "user.email=e"]
        for argv in (["init", "-q"], ["add", "."], [*person, "commit", "-qm", "m"]):
            subprocess.run(["git", "-C", str(tmp_path), *argv], check=True)

    results.mkdir(parents=True)
    code = tmp_path / "src" / "code.py"
    code.parent.mkdir()
    code.write_text("")
    commits()
    at = gpu.commit()
    (results / "gpu.json").write_text("{}")
    assert gpu.commit() == at
    commits()
    assert gpu.commit() == at and at.isalnum()
    code.write_text("changed")
    assert gpu.commit() == f"{at}-dirty"


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
    part = Part("tuned", "", run, True, training.MOST, tuning.lacks)
    parts, out = [part], tmp_path / "gpu.json"
    for seconds, left in ((100.0, 1), (300.0, 0), (300.0, 0)):
        todo = gpu.missing(parts, gpu.read(out), "a")
        assert len(gpu.run_all(todo, CPU, out, about("a"), seconds)) == left
    row = gpu.read(out)["tuned"]
    assert row["error"] == "" and row["numbers"]["loss"] < row["numbers"]["loss before"]
    assert row["numbers"]["MB per iteration"] > 0


def test_the_order_is_that_of_importance() -> None:
    kinds = [each.name.partition("_")[0] for each in tuning.PARTS]
    assert kinds[0] == "codecs" and "overlap" in kinds
    assert list(dict.fromkeys(kinds))[-3:] == ["shakespeare", "english", "tuned"]
