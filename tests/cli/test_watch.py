"""``laconic watch``: files of metrics as they grow, break off, start again and go stale."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laconic as la
from laconic.cli import main
from laconic.cli.watch import Files


def line(record: dict[str, Any], **more: Any) -> str:
    return json.dumps({**record, **more}) + "\n"


def start(**more: Any) -> str:
    about = {
        "event": "start", "time": 1000.0, "step": 0, "rank": 0, "ranks": 2, "workers": 2,
        "recipe": "a tuple", "schedule": ["Average round, Every(period=4)"], "host": "alpha",
        "laconic": la.__version__, "torch": "2.13.0", "python": "3.11.7", "every": 1.0, "pid": 1,
    }  # fmt: skip
    return line(about, **more)


def steps(step: int, **more: Any) -> str:
    """A record of one second with ten steps, two megabytes and a quarter of waiting."""
    call = {"name": "Average round", "step": step - step % 4, "count": 2, "bytes": 2_000_000}
    record = {
        "event": "steps", "time": 1000.0 + step / 10, "step": step, "rounds": step // 4,
        "bytes_sent": step * 200_000, "bytes_received": step * 200_000,
        "seconds_waiting": step / 40, "seconds": 1.0, "steps": 10,
        "sent": 2_000_000, "waiting": 0.25,
        "calls": [{**call, "seconds": 0.25}],
    }  # fmt: skip
    return line(record, **more)


def view(step: int, ids: list[str], lost: int) -> str:
    """A record of a change of workers, with four steps lost for each lost worker."""
    about = {"epoch": step, "ids": ids, "workers": len(ids)}
    return steps(step, event="view", **about, workers_lost=lost, steps_lost=4 * lost)


@pytest.fixture
def page(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the command shows of some files, in 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def shown(path: Path) -> str:
        assert main(["watch", str(path), "--once"]) == 0
        text = capsys.readouterr().out
        assert all(len(line) <= 80 for line in text.splitlines())
        return text

    return shown


def row(text: str, rank: int = 0) -> list[str]:
    """The cells of a rank's row."""
    (found,) = [r.split() for r in text.splitlines() if r.split()[:1] == [str(rank)]]
    return found


def test_the_page_tells_where_a_run_is(tmp_path: Path, page: Any) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(start() + steps(10) + steps(20, waiting=0.75, steps=30, sent=4_000_000))
    text = page(path)
    # 40 steps and 6 MB in 2 s, half of it waiting
    assert row(text)[1:8] == ["20", "20", "3", "50%", "5", "4", "alpha"]
    assert "Average round, last after step 20: 0.125 s, 1 MB" in text
    old = steps(10, time=900.0, steps=1000)
    path.write_text(start() + old + steps(20, time=970.0) + steps(30, time=971.0, steps=30))
    assert row(page(path))[2] == "20", "rates are of the last minute"
    path.write_text(start() + steps(10) + steps(20)[:70])
    assert row(page(path))[1] == "10", "a line that is not complete does not count"
    path.write_text(start() + steps(10, event="error", error="LinkError: rank 1 is gone"))
    assert "rank 0: LinkError: rank 1 is gone" in page(path)
    with path.open("a") as file:
        file.write(start(time=2000.0, host="beta") + steps(500, time=2001.0))
    text = page(path)
    assert "LinkError" not in text
    assert row(text)[1:8] == ["500", "10", "2", "25%", "125", "100", "beta"]
    changes = view(12, ["a", "b"], 1) + view(30, ["a", "b", "c", "d"], 1) + view(40, ["b", "d"], 3)
    path.write_text(start(ranks=3, workers=3) + steps(10) + changes)
    text = page(path)
    assert "after step 12: 2 workers, 1 lost so far, with 4 steps" in text
    assert "after step 30: 4 workers, c d joined, 1 lost so far, with 4 steps" in text
    assert "after step 40: 2 workers, a c left, 3 lost so far, with 12 steps" in text


@pytest.mark.parametrize(
    ("age", "last", "said"),
    [
        (42, steps(10), "none for 42 s"),
        (42, steps(10, seconds=30.0), "42 s ago"),
        (100, steps(10, event="finish"), "finished"),
        (100, steps(10, event="error", error="X: y") + steps(10, event="end"), "error"),
    ],
)
def test_the_age_of_the_last_record(
    tmp_path: Path, age: int, last: str, said: str, page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(start() + last)
    now = time.time()
    os.utime(path, (now - age, now - age))
    monkeypatch.setattr("laconic.cli.watch.time.time", lambda: now)
    assert " ".join(row(page(path))[8:]) == said


def test_what_a_real_run_writes_is_shown(tmp_path: Path, page: Any) -> None:
    def run(rank: int) -> None:
        torch.manual_seed(rank)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        metrics = la.JsonLines(tmp_path / "{rank}.jsonl", every=0)
        with la.attach(model, optimizer, la.diloco(2), metrics=metrics):
            for _ in range(5):
                model(torch.randn(4, 5)).square().mean().backward()
                optimizer.step()

    la.simulate(run, workers=2)
    text = page(tmp_path)
    assert "OuterStep round, last after step 4:" in text
    for rank in range(2):
        assert row(text, rank)[1] == "5" and row(text, rank)[-1] == "ended"


def test_a_file_is_followed_and_one_that_begins_anew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    files = Files([path])
    assert files.runs() == []
    path.write_text(start() + steps(10) + steps(20)[:70])
    assert [run.latest["step"] for run in files.runs()] == [10]
    with path.open("a") as file:
        file.write(steps(20)[70:] + view(40, ["a"], 1))
    (run,) = files.runs()
    assert run.latest["step"] == 40 and len(run.changes) == 1
    path.write_text(start() + steps(30))
    (run,) = files.runs()
    assert run.latest["step"] == 30 and not run.changes
