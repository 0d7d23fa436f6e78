"""What ``attach(..., metrics=)`` writes, and that nothing it meets stops a training."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laconic as la

from tests.support import gloo
from tests.support.loops import flat, refusal, sgd

Records = list[dict[str, Any]]


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def read(path: Path) -> Records:
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 5)).square().mean().backward()
    optimizer.step()


def train(
    rank: int, given: Any, steps: int = 6, recipe: la.Recipe | None = None, lr: float = 0.1
) -> tuple[list[float], la.Stats]:
    """A small training in a `with`; its parameters and statistics."""
    torch.manual_seed(rank)
    model = nn.Linear(5, 3)
    optimizer = sgd(model, lr)
    with la.attach(model, optimizer, recipe or la.local_sgd(2), metrics=given) as sync:
        for _ in range(steps):
            step(model, optimizer)
    return flat(model).tolist(), sync.stats()


class Kept(la.Metrics):
    """Keeps what it is given; it is copied, but for the list."""

    def __init__(self, every: float = 0.0) -> None:
        super().__init__(every)
        self.records: Records = []

    def write(self, record: Mapping[str, Any]) -> None:
        self.records.append(dict(record))


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
    totals = (end["step"], end["rounds"], end["bytes_sent"], end["bytes_received"], end["skipped"])
    assert totals == (7, 3, stats.bytes_sent, stats.bytes_received, 0)
    # both parameters, 18 numbers of 4 bytes, to one other worker and from it
    assert [r["sent"] for r in steps[1:]] == [72, 0, 72, 0, 72, 0]
    assert math.isclose(end["seconds_waiting"], stats.seconds_waiting, abs_tol=1e-5)
    assert all(0 <= r["waiting"] <= 1 and r["lr"] == [0.1] for r in rest)
    assert start["recipe"] == "local_sgd(2)"
    assert start["schedule"] == ["Average round, Every(period=2)"]
    assert (start["rank"], start["ranks"], start["workers"], start["step"]) == (0, 2, 2, 0)
    assert (start["torch"], start["laconic"]) == (torch.__version__, la.__version__)
    assert start["pid"] == os.getpid()


def recorded(rank: int, directory: str) -> None:
    recipe = la.slowmo(la.local_sgd(2), 6, momentum=0.5)
    train(rank, la.JsonLines(directory, every=0), steps=12, recipe=recipe)


def test_rounds_are_told_by_name_with_their_bytes(pool: gloo.Pool, tmp_path: Path) -> None:
    pool.run(recorded, str(tmp_path), ranks=4)
    for rank in range(4):
        calls: dict[str, int] = {}
        for record in read(tmp_path / f"rank{rank}.jsonl"):
            for call in record.get("calls", []):
                calls[call["name"]] = calls.get(call["name"], 0) + call["count"]
                assert call["seconds"] >= 0 and call["bytes"] >= 0
        # 12 steps: an average after 2, 4, 8, 10, a slow step after 6 and 12
        assert (calls["Average round"], calls["SlowMomentum round"], calls["finish()"]) == (4, 2, 1)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("run.jsonl", ["run.jsonl"]),
        ("run{rank}.jsonl", ["run0.jsonl", "run1.jsonl", "run2.jsonl"]),
        ("", ["rank0.jsonl", "rank1.jsonl", "rank2.jsonl"]),
    ],
)
def test_which_ranks_write(tmp_path: Path, name: str, files: list[str]) -> None:
    """And no thread outlives the run. A loop may give metrics to one rank alone."""
    one = name == "run.jsonl"
    la.simulate(lambda r: train(r, tmp_path / name if r == 0 or not one else None), workers=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == files
    assert [read(tmp_path / f)[0]["rank"] for f in files] == list(range(len(files)))
    assert "laconic-metrics" not in [t.name for t in threading.enumerate()]


# -- mistakes ----


class Uninitialized(la.Metrics):
    def __init__(self) -> None:
        pass


class Broken(la.Metrics):
    def survey(self, rank: int) -> int:
        raise OSError("no such place")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "metrics must be a path, laconic.JsonLines"),
        (["run.jsonl", None], "metrics must be a path"),
        ("", "must be the path of a file or directory, not ''"),
        ("a\0b", "must be the path of a file"),
        ([Kept() for _ in range(9)], "at most 8 sinks"),
        ("/nowhere/run.jsonl", "no such directory on rank 0"),
        ("/nowhere/{rank}.jsonl", "no such directory on rank 0"),
        (Uninitialized(), "must call super().__init__()"),
        (Broken(), "no such place"),
    ],
)
def test_what_is_no_place_is_refused_on_every_rank(given: Any, said: str) -> None:
    texts = la.simulate(lambda r: refusal(lambda: train(r, None if r else given)), workers=2)
    assert all(said in text for text in texts)


def lacking(rank: int, directory: str, name: str) -> str:
    given = f"{directory}/{'there' if rank == 2 else 'here'}/{name}".rstrip("/")
    return refusal(lambda: train(rank, given))


def test_a_directory_that_one_host_lacks_is_refused_on_every_rank(
    pool: gloo.Pool, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    for name in ("{rank}.jsonl", ""):
        texts = pool.run(lacking, str(tmp_path), name, ranks=4)
        assert all("no such directory on rank 2: create it first" in text for text in texts)


# -- accidents ----


@pytest.mark.parametrize(
    ("path", "said"),
    [("/dev/full", "No space left on device"), ("/proc/run.jsonl", "No such file")],
)
def test_a_file_that_takes_nothing_is_one_warning(path: str, said: str) -> None:
    plain = la.simulate(lambda rank: train(rank, None), workers=2)
    with pytest.warns(RuntimeWarning) as caught:
        runs = la.simulate(lambda rank: train(rank, la.JsonLines(path, 0)), workers=2)
    (warning,) = [str(w.message) for w in caught]
    assert said in warning and path in warning and "training continues" in warning
    assert [run[0] for run in runs] == [run[0] for run in plain]


def test_a_place_that_hangs_does_not_hold_up_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laconic.engine.recorder.CLOSING_SECONDS", 0.2)
    monkeypatch.setattr("laconic.engine.recorder.UNWRITTEN", 10)
    released = threading.Event()

    class Hanging(la.Metrics):
        def write(self, record: Mapping[str, Any]) -> None:
            released.wait()

        def __copy__(self) -> Hanging:
            return self

    for steps, said in ((30, "accepts no more"), (3, "not written within")):
        with pytest.warns(RuntimeWarning, match=said):
            run = partial(train, given=Hanging(every=0), steps=steps)
            ((_, stats),) = la.simulate(run, workers=1)
        assert stats.steps == steps
    released.set()


@pytest.mark.parametrize("in_with", [True, False])
def test_a_lost_round_is_recorded_once(tmp_path: Path, in_with: bool) -> None:
    def run(rank: int) -> None:
        torch.manual_seed(rank)
        model = nn.Linear(5, 3)
        optimizer = sgd(model)
        sync = la.attach(model, optimizer, la.local_sgd(2), metrics=tmp_path)

        def loop() -> None:
            for _ in range(3 if rank == 0 else 5):
                step(model, optimizer)
            sync.finish()

        with pytest.raises(la.LinkError):
            if in_with:
                with sync:
                    loop()
            else:
                loop()
        sync.detach()

    la.simulate(run, workers=2)
    for rank in range(2):
        records = read(tmp_path / f"rank{rank}.jsonl")
        (error,) = [r["error"] for r in records if r["event"] == "error"]
        assert "ranks disagree on what comes next" in error
        assert ("finish()" if rank == 0 else "Average round") in error


PROGRAM = """
import sys, torch, laconic
laconic.init()
torch.manual_seed(torch.distributed.get_rank())
model = torch.nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
sync = laconic.attach(model, optimizer, laconic.local_sgd(4), metrics="{rank}.jsonl")
model(torch.randn(4, 5)).square().sum().backward()
optimizer.step()
if sys.argv[1] == "raises":
    raise RuntimeError("boom")
"""


@pytest.mark.parametrize("how", ["ends", pytest.param("raises", marks=pytest.mark.slow)])
def test_a_program_that_just_ends_writes_its_last_record_and_warns(
    tmp_path: Path, how: str
) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(gloo.free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, how],
            env={**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [each.communicate(timeout=250)[1] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    for rank, (each, said) in enumerate(zip(ranks, texts, strict=True)):
        assert (each.returncode == 0) == (how == "ends"), said
        assert said.count("sync.finish() was not called after the last step") == (how == "ends")
        records = read(tmp_path / f"{rank}.jsonl")
        middle = [] if how == "ends" else ["error"]
        events = [r["event"] for r in records if r["event"] != "steps"]  # a slow machine has one
        assert events == ["start", *middle, "end"] and records[-1]["step"] == 1
        assert not middle or records[-2]["error"] == "RuntimeError: boom"


# -- TensorBoard ----


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    for directory in (3, "", None):
        said = refusal(lambda directory=directory: la.TensorBoard(directory))  # type: ignore[misc]
        assert "directory must be the path of a directory" in said
    given = la.TensorBoard(f"{tmp_path}/{{rank}}", every=0)
    la.simulate(lambda rank: train(rank, given), workers=2)
    for rank in range(2):
        events = EventAccumulator(str(tmp_path / str(rank))).Reload()
        seen = [(event.step, event.value) for event in events.Scalars("laconic/rounds")]
        assert seen[:6] == [(1, 0.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 3.0)]
        assert {round(e.value, 6) for e in events.Scalars("laconic/lr/group 0")} == {0.1}
