"""``laconic watch``: files of metrics as they grow, break off, start again and go stale."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from rich.console import Console
from torch import nn

import laconic as la
from laconic.cli import main
from laconic.cli.watch import Watcher

START = {
    "event": "start",
    "time": 1000.0,
    "step": 0,
    "rank": 0,
    "ranks": 2,
    "workers": 2,
    "recipe": "a tuple",
    "schedule": ["Average round, Every(period=4)"],
    "host": "alpha",
    "pid": 1,
    "laconic": la.__version__,
    "torch": "2.13.0",
    "python": "3.11.7",
    "every": 1.0,
}


def line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"


def start(**more: Any) -> str:
    return line({**START, **more})


def steps(step: int, **more: Any) -> str:
    """A record of one second with ten steps, two megabytes and a quarter of waiting."""
    record = {
        "event": "steps",
        "time": 1000.0 + step / 10,
        "step": step,
        "rounds": step // 4,
        "skipped": 0,
        "bytes_sent": step * 200_000,
        "bytes_received": step * 200_000,
        "seconds_waiting": step / 40,
        "seconds": 1.0,
        "steps": 10,
        "seconds_per_step": 0.1,
        "sent": 2_000_000,
        "received": 2_000_000,
        "waiting": 0.25,
        "lr": [0.1],
        "calls": [
            {
                "name": "Average round",
                "step": step - step % 4,
                "count": 2,
                "bytes": 2_000_000,
                "seconds": 0.25,
            }
        ],
    }
    return line({**record, **more})


def page(*paths: Path) -> str:
    watched = Watcher(paths)
    watched.poll()
    return shown(watched)


def shown(watched: Watcher) -> str:
    file = io.StringIO()
    Console(file=file, width=80).print(watched.page())
    assert all(len(text) <= 80 for text in file.getvalue().splitlines())
    return file.getvalue()


def row(text: str, rank: int = 0) -> list[str]:
    """The cells of a rank's row."""
    (found,) = [r.split() for r in text.splitlines() if r.split()[:1] == [str(rank)]]
    return found


def test_the_page_tells_where_a_run_is(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(start() + steps(10) + steps(20, waiting=0.75, steps=30, sent=4_000_000))
    text = page(path)
    assert f"2 ranks, 2 workers; laconic {la.__version__}, torch 2.13.0" in text
    assert "Average round, Every(period=4)" in text
    # 40 steps and 6 MB in 2 s, half of it waiting
    assert row(text)[1:8] == ["20", "20", "3", "50%", "5", "4", "alpha"]
    assert "Average round, last after step 20: 0.125 s, 1 MB" in text


def test_rates_are_of_the_last_minute(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    old = steps(10, time=900.0, steps=1000)
    path.write_text(start() + old + steps(20, time=970.0) + steps(30, time=971.0, steps=30))
    assert row(page(path))[2] == "20"


def test_a_directory_is_shown_rank_by_rank(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        text = start(rank=rank, host=f"host{rank}") + steps(10 + rank)
        (tmp_path / f"rank{rank}.jsonl").write_text(text)
    (tmp_path / "other.jsonl").write_text('{"event": "of another program"}\n')
    text = page(tmp_path)
    ranks = [r.split()[0] for r in text.splitlines() if "host" in r and r.split()[0].isdigit()]
    assert ranks == ["0", "2", "10"]
    assert row(text, 10)[1] == "20"


def test_a_file_is_followed_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    watched = Watcher([path])
    watched.poll()
    assert f"waiting for metrics in {path}" in shown(watched).replace("\n", "")
    path.write_text(start())
    watched.poll()
    assert row(shown(watched))[1:6] == ["0", "-", "-", "-", "0"]
    whole = steps(10)
    with path.open("a") as file:
        for piece, expected in ((whole[:50], "0"), (whole[50:-1], "0"), ("\n", "10")):
            file.write(piece)
            file.flush()
            watched.poll()
            assert row(shown(watched))[1] == expected


def test_a_run_that_was_killed_and_started_again_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    ended = steps(10, event="error", error="LinkError: rank 1 is gone")
    path.write_text(start() + ended + steps(20)[:70] + "\n")
    assert "rank 0: LinkError: rank 1 is gone" in page(path)
    with path.open("a") as file:
        file.write(start(time=2000.0, host="beta") + steps(500, time=2001.0))
    text = page(path)
    assert "LinkError" not in text
    assert row(text)[1:8] == ["500", "10", "2", "25%", "125", "100", "beta"]


@pytest.mark.parametrize("how", ["replaced", "emptied"])
def test_a_file_that_begins_anew_is_read_anew(tmp_path: Path, how: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(start() + steps(10) + steps(20))
    watched = Watcher([path])
    watched.poll()
    if how == "replaced":
        path.rename(tmp_path / "run.old")
        watched.poll()
        assert row(shown(watched))[1] == "20"
    path.write_text(start() + steps(30))
    watched.poll()
    assert row(shown(watched))[1] == "30"


@pytest.mark.parametrize(
    ("age", "last", "said"),
    [
        (42, steps(10), "none for 42 s"),
        (5, steps(10), "5 s ago"),
        (42, steps(10, seconds=30.0), "42 s ago"),
        (100, steps(10, seconds=30.0), "none for 100 s"),
        (100, steps(10, event="finish"), "finished"),
        (100, steps(10, event="end"), "ended"),
        (100, steps(10, event="error", error="X: y") + steps(10, event="end"), "error"),
    ],
)
def test_the_age_of_the_last_record(tmp_path: Path, age: int, last: str, said: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(start() + last)
    os.utime(path, (0, time.time() - age))
    got = " ".join(row(page(path))[8:])
    assert got == said or got == said.replace(str(age), str(age + 1))


def test_what_a_real_run_writes_is_shown(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        torch.manual_seed(rank)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        metrics = la.JsonLines(tmp_path, every=0)
        with la.attach(model, optimizer, la.diloco(2), metrics=metrics):
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(4, 5)).square().mean().backward()
                optimizer.step()

    la.simulate(run, workers=2)
    text = page(tmp_path)
    assert "OuterStep round, Every(period=2)" in text
    assert "OuterStep round, last after step 4:" in text
    for rank in range(2):
        assert row(text, rank)[1] == "5" and row(text, rank)[-1] == "ended"


def view(step: int, ids: list[str], lost: int) -> str:
    """A record of a change of workers, with four steps lost for each lost worker."""
    about = {"epoch": step, "ids": ids, "workers": len(ids)}
    return steps(step, event="view", **about, workers_lost=lost, steps_lost=4 * lost)


def test_workers_that_left_and_joined_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    changes = view(12, ["a", "b"], 1) + view(30, ["a", "b", "c", "d"], 1) + view(40, ["b", "d"], 3)
    path.write_text(start(ranks=3, workers=3) + steps(10) + changes + steps(50))
    text = page(path)
    assert "after step 12: 2 workers, 3 before, 1 lost so far, with 4 steps" in text
    assert "after step 30: 4 workers, c d joined, 1 lost so far, with 4 steps" in text
    assert "after step 40: 2 workers, a c left, 3 lost so far, with 12 steps" in text
    with path.open("a") as file:
        file.write(start())
    assert "workers, " not in page(path).partition("laconic")[2], "another run"


@pytest.mark.parametrize("ids", [None, 3, ...])
def test_a_damaged_change_of_workers(tmp_path: Path, ids: object) -> None:
    record = json.loads(view(12, ["a"], 1))
    record = {k: v for k, v in record.items() if k != "ids" or ids is not ...}
    if ids is not ...:
        record["ids"] = ids
    path = tmp_path / "run.jsonl"
    path.write_text(start() + steps(10) + line(record) + steps(20))
    assert row(page(path))[1] == "20"


# -- the command ----


def test_once_prints_the_state_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(start() + steps(10))
    assert main(["watch", str(path), "--once"]) == 0
    assert row(capsys.readouterr().out)[1] == "10"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("run.jsonl", None, "no metrics in {path}: check that the run writes there"),
        ("", None, "no metrics in {path}: check that the run writes there"),
        ("no/run.jsonl", None, "cannot watch {path}: no directory"),
        ("run.jsonl", b"hello\n", "{path} contains no metrics of laconic"),
        ("run.jsonl", b'{"event": "start"}\n', "{path} contains no metrics of laconic"),
        ("run.jsonl", b"[1]\n", "{path} contains no metrics of laconic"),
        ("run.jsonl", b"\xff\x00" * 2_000_000, "{path} contains no metrics of laconic"),
    ],
)
def test_what_cannot_be_watched_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: bytes | None,
    said: str,
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert main(["watch", "--once", str(path)]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("laconic: " + said.format(path=path))


@contextmanager
def watching(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "laconic", "watch", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout
    finally:
        process.kill()
        process.communicate()


def test_plain_lines_follow_a_run_until_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with watching(str(path)) as (process, said):
        assert said.readline() == f"waiting for metrics in {path}\n"
        path.write_text(start() + steps(10))
        first = said.readline()
        assert first.endswith("rank 0: step 10, 10 steps/s, 2 MB/s sent, 25% waiting, 2 rounds\n")
        with path.open("a") as file:
            file.write(steps(20, event="error", error="ValueError: no"))
        assert said.readline().endswith("5 rounds, error: ValueError: no\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_plain_lines_name_workers_that_come_and_go(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(start() + view(12, ["a"], 1))
    with watching(str(path)) as (_, said):
        expected = "rank 0: after step 12: 1 workers, 2 before, 1 lost so far, with 4 steps\n"
        assert said.readline() == expected
        assert "rank 0: step 12" in said.readline()
        with path.open("a") as file:
            file.write(view(20, ["a", "b"], 1))
        assert said.readline().startswith("rank 0: after step 20: 2 workers, b joined")


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(start() + steps(10))
    with watching(str(path)) as (process, said):
        assert "step 10" in said.readline()
        said.close()
        with path.open("a") as file:
            file.write(steps(20))
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
