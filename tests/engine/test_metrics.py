"""What ``attach(..., metrics=)`` writes, and that nothing it meets stops a training."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laconic as la
from laconic.engine import recorder

from tests.support import gloo
from tests.support.loops import descend, flat, refusal, sgd

Records = list[dict[str, Any]]


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def read(path: Path) -> Records:
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def train(rank: int, given: Any, steps: int = 6) -> tuple[list[float], la.Stats]:
    """A small training in a `with`; its parameters and statistics."""
    torch.manual_seed(rank)
    model = nn.Linear(5, 3)
    optimizer = sgd(model)
    with la.attach(model, optimizer, la.local_sgd(2), metrics=given) as sync:
        for _ in range(steps):
            descend(optimizer, model(torch.randn(4, 5)).square().mean())
    return flat(model).tolist(), sync.stats()


# -- what is written ----


def test_the_records_add_up_to_what_the_run_did(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    given = la.JsonLines(path, every=0)
    runs = la.simulate(lambda rank: train(rank, given, steps=7), workers=2)
    start, *rest = read(path)
    *steps, finish, end = rest
    assert [r["event"] for r in [start, finish, end]] == ["start", "finish", "end"]
    assert [(r["event"], r["step"]) for r in steps] == [("steps", t) for t in range(1, 8)]
    stats = runs[0][1]
    totals = (end["step"], end["rounds"], end["bytes_sent"], end["bytes_received"])
    assert totals == (7, 3, stats.bytes_sent, stats.bytes_received)
    # both parameters, 18 numbers of 4 bytes, to one other worker and from it
    assert [r["sent"] for r in steps[1:]] == [72, 0, 72, 0, 72, 0]
    assert math.isclose(end["seconds_waiting"], stats.seconds_waiting, abs_tol=1e-5)
    assert all(0 <= r["waiting"] <= 1 for r in rest)
    assert start["recipe"] == "local_sgd(2)" and "Every(period=2)" in start["schedule"][0]
    assert (start["rank"], start["ranks"], start["workers"], start["step"]) == (0, 2, 2, 0)
    assert (start["torch"], start["laconic"]) == (torch.__version__, la.__version__)


@pytest.mark.fault("after os.chdir, records of a relative path went into another file")
def test_a_relative_path_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()

    def run(rank: int) -> None:
        model = nn.Linear(5, 3)
        with la.attach(model, sgd(model), la.local_sgd(2), metrics="run.jsonl"):
            monkeypatch.chdir("other")

    la.simulate(run, workers=1)
    assert [r["event"] for r in read(tmp_path / "run.jsonl")] == ["start", "finish", "end"]


@pytest.mark.fault("a forked child that ended wrote that the run had ended")
def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def run(rank: int) -> None:
        model = nn.Linear(5, 3)
        with la.attach(model, sgd(model), la.local_sgd(2), metrics=path):
            pid = os.fork()
            if not pid:
                recorder._close_all()  # as at its end
                os._exit(0)
            os.waitpid(pid, 0)

    la.simulate(run, workers=1)
    assert [r["event"] for r in read(path)] == ["start", "finish", "end"]


def test_which_ranks_write(tmp_path: Path) -> None:
    """A loop may give metrics to one rank alone."""
    one, each = tmp_path / "one.jsonl", tmp_path / "each{rank}.jsonl"
    la.simulate(lambda r: train(r, None if r else one), workers=2)
    la.simulate(lambda r: train(r, each), workers=2)
    found = {p.name: read(p)[0]["rank"] for p in tmp_path.iterdir()}
    assert found == {"one.jsonl": 0, "each0.jsonl": 0, "each1.jsonl": 1}


# -- mistakes ----


REFUSED: list[tuple[Any, str]] = [
    (3, "metrics must be a path or laconic.JsonLines"),
    (["run.jsonl"], "metrics must be a path or laconic.JsonLines"),
    ("a\0b", "must be the path of a file"),
    ("/nowhere/{rank}.jsonl", "no such directory"),
    ("/tmp", "is a directory: give a file, such as /tmp/{rank}.jsonl"),
]


def test_what_is_no_place_is_refused_on_every_rank() -> None:
    for given, said in REFUSED:
        call = lambda r, given=given: refusal(lambda: train(r, None if r else given))  # noqa: E731
        assert all(said in text for text in la.simulate(call, workers=2)), given


def test_a_directory_that_one_rank_lacks_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    given = tmp_path / "{rank}" / "run.jsonl"
    texts = la.simulate(lambda rank: refusal(lambda: train(rank, given)), workers=2)
    assert all("no such directory" in text for text in texts)


# -- accidents ----


def test_a_file_that_takes_nothing_is_one_warning() -> None:
    plain = la.simulate(lambda rank: train(rank, None), workers=2)
    with pytest.warns(RuntimeWarning) as caught:
        runs = la.simulate(lambda rank: train(rank, la.JsonLines("/dev/full", 0)), workers=2)
    (warning,) = [str(w.message) for w in caught]
    assert all(s in warning for s in ("No space left", "/dev/full", "training continues"))
    assert [run[0] for run in runs] == [run[0] for run in plain]


def test_an_incomplete_line_of_a_run_that_was_killed_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"event": "st')
    train_alone = la.simulate(lambda rank: train(rank, path), workers=1)
    incomplete, *lines = path.read_text().splitlines()
    assert train_alone and incomplete == '{"event": "st' and json.loads(lines[0])["rank"] == 0


PROGRAM = """
import torch, laconic
laconic.init()
torch.manual_seed(torch.distributed.get_rank())
model = torch.nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
sync = laconic.attach(model, optimizer, laconic.local_sgd(4), metrics="{rank}.jsonl")
model(torch.randn(4, 5)).square().sum().backward()
optimizer.step()
raise RuntimeError("boom")
"""


@pytest.mark.slow  # a new interpreter
def test_a_program_that_raises_writes_its_last_record(tmp_path: Path) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(gloo.free_port())}
    where |= {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    argv, env = [sys.executable, "-c", PROGRAM], {**os.environ, **where}
    run = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert run.returncode == 1, run.stderr
    records = read(tmp_path / "0.jsonl")
    events = [r["event"] for r in records if r["event"] != "steps"]  # a slow machine has one
    assert events == ["start", "error", "end"] and records[-1]["step"] == 1
    assert records[-2]["error"] == "RuntimeError: boom"
