"""What ``attach(..., metrics=)`` writes, and that nothing it meets stops a training."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laconic as la
from laconic.engine import recorder

from tests.support import gloo

Records = list[dict[str, Any]]


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def read(path: Path) -> Records:
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def train(
    rank: int,
    given: Any,
    steps: int = 6,
    recipe: la.Recipe | None = None,
    link: la.links.Link | None = None,
    lr: float = 0.1,
) -> tuple[list[float], la.Stats]:
    """A small training in a `with`; its parameters and statistics."""
    torch.manual_seed(rank)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    recipe = recipe or la.local_sgd(2)
    with la.attach(model, optimizer, recipe, link=link, metrics=given) as sync:
        for _ in range(steps):
            step(model, optimizer)
    values = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return values, sync.stats()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 5)).square().mean().backward()
    optimizer.step()


class Kept(la.Metrics):
    """Keeps what it is given."""

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
    assert [(r["event"], r["step"], r["steps"]) for r in steps] == [
        ("steps", t, 1) for t in range(1, 8)
    ]
    stats = runs[0][1]
    totals = (end["step"], end["rounds"], end["bytes_sent"], end["bytes_received"], end["skipped"])
    assert totals == (7, 3, stats.bytes_sent, stats.bytes_received, 0)
    # both parameters, 18 numbers of 4 bytes, to one other worker and from it
    assert [r["sent"] for r in steps[1:]] == [72, 0, 72, 0, 72, 0]
    assert sum(r["sent"] for r in rest) == stats.bytes_sent - (steps[0]["bytes_sent"] - 8 - 24)
    assert math.isclose(end["seconds_waiting"], stats.seconds_waiting, abs_tol=1e-5)
    assert all(0 <= r["waiting"] <= 1 and r["lr"] == [0.1] for r in rest)


def test_the_first_record_says_what_runs_where(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    la.simulate(lambda rank: train(rank, path, recipe=la.diloco(3)), workers=3)
    start = read(path)[0]
    assert start["recipe"] == "diloco(3)"
    assert start["schedule"] == ["OuterStep round, Every(period=3)"]
    assert (start["rank"], start["ranks"], start["workers"], start["step"]) == (0, 3, 3, 0)
    assert (start["torch"], start["laconic"]) == (torch.__version__, la.__version__)
    assert start["pid"] == os.getpid() and start["every"] == 1.0


def test_rounds_are_told_by_name_with_their_bytes(pool: gloo.Pool, tmp_path: Path) -> None:
    pool.run(recorded, str(tmp_path), ranks=2)
    for rank in range(2):
        calls: dict[str, tuple[int, int]] = {}
        for record in read(tmp_path / f"rank{rank}.jsonl"):
            for call in record.get("calls", []):
                count, size = calls.get(call["name"], (0, 0))
                calls[call["name"]] = count + call["count"], size + call["bytes"]
                assert 0 <= call["seconds"] < 60
        # 12 steps: an average after 2, 4, 8, 10, a slow step after 6 and 12; 72 bytes
        assert calls["Average round"] == (4, 4 * 72)
        assert calls["SlowMomentum round"] == (2, 2 * 72)
        assert calls["finish()"][0] == 1


def recorded(rank: int, directory: str) -> None:
    recipe = la.slowmo(la.local_sgd(2), 6, momentum=0.5)
    given = la.JsonLines(directory, every=0)
    train(rank, given, steps=12, recipe=recipe, link=gloo.link_of(2))


def test_no_more_records_than_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    train_alone = partial(train, given=la.JsonLines(path, every=3600), steps=50)
    la.simulate(train_alone, workers=1)
    assert [r["event"] for r in read(path)] == ["start", "finish", "end"]


def test_each_place_has_its_own_interval() -> None:
    def run(rank: int) -> list[list[str]]:
        often, rarely = Kept(every=0), Kept(every=3600)
        train(rank, [often, rarely], steps=3)
        return [[r["event"] for r in kept.records] for kept in (often, rarely)]

    ((often, rarely),) = la.simulate(run, workers=1)
    assert often == ["start", "steps", "steps", "steps", "finish", "end"]
    assert rarely == ["start", "finish", "end"]


def test_numbers_that_json_does_not_have_are_null(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    la.simulate(lambda rank: train(rank, la.JsonLines(path, 0), lr=math.inf), workers=1)
    assert read(path)[1]["lr"] == [None]


def test_steps_that_a_scaler_skips_are_counted() -> None:
    def run(rank: int) -> tuple[Records, int]:
        kept = Kept()
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu")
        sync = la.attach(model, optimizer, la.local_sgd(2), scaler=scaler, metrics=kept)
        for t in range(4):
            optimizer.zero_grad()
            loss = model(torch.full((4, 5), math.inf if t == 2 else 1.0)).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        sync.detach()
        return kept.records, sync.step

    ((records, steps),) = la.simulate(run, workers=1)
    assert [r["skipped"] for r in records[1:]] == [0, 0, 1, 1, 1]
    assert steps == records[-1]["step"] == 4


def test_a_second_run_is_appended_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    la.simulate(lambda rank: train(rank, path), workers=1)
    first = path.read_text()
    path.write_text(first + '{"event": "ste')
    la.simulate(lambda rank: train(rank, path), workers=1)
    text = path.read_text()
    assert text.startswith(first + '{"event": "ste\n')
    rest = text.removeprefix(first + '{"event": "ste\n').splitlines()
    assert [json.loads(line)["event"] for line in rest] == ["start", "finish", "end"]


# -- who writes ----


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("run.jsonl", ["run.jsonl"]),
        ("run{rank}.jsonl", ["run0.jsonl", "run1.jsonl", "run2.jsonl"]),
        ("", ["rank0.jsonl", "rank1.jsonl", "rank2.jsonl"]),
    ],
)
def test_which_ranks_write(tmp_path: Path, name: str, files: list[str]) -> None:
    la.simulate(lambda rank: train(rank, tmp_path / name), workers=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == files
    assert [read(tmp_path / f)[0]["rank"] for f in files] == list(range(len(files)))


def test_a_loop_may_give_metrics_to_one_rank_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    la.simulate(lambda rank: train(rank, path if rank == 0 else None), workers=2)
    assert read(path)[-1]["step"] == 6


def test_without_metrics_there_is_no_thread() -> None:
    def run(rank: int) -> list[str]:
        train(rank, None)
        return [t.name for t in threading.enumerate()]

    before = [t.name for t in threading.enumerate()]
    assert "laconic-metrics" not in before
    assert "laconic-metrics" not in la.simulate(run, workers=1)[0]


def test_the_thread_ends_with_the_run(tmp_path: Path) -> None:
    la.simulate(lambda rank: train(rank, [tmp_path, Kept()]), workers=2)
    assert "laconic-metrics" not in [t.name for t in threading.enumerate()]


# -- mistakes ----


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "metrics must be a path, laconic.JsonLines"),
        (b"run.jsonl", "metrics must be a path"),
        (["run.jsonl", None], "metrics must be a path"),
        ("", "must be the path of a file or directory, not ''"),
        ("a\0b", "must be the path of a file"),
        ([Kept() for _ in range(9)], "at most 8 sinks"),
    ],
)
def test_what_is_no_place_is_refused_on_every_rank(given: Any, said: str) -> None:
    def run(rank: int) -> str:
        with pytest.raises(ValueError) as caught:
            train(rank, given)
        return str(caught.value)

    assert all(said in text for text in la.simulate(run, workers=2))


@pytest.mark.parametrize("every", [-1, math.nan, math.inf, "1", True])
def test_an_impossible_interval_is_refused(every: Any) -> None:
    with pytest.raises(ValueError, match="every must be a finite number at least 0"):
        la.JsonLines("run.jsonl", every=every)


@pytest.mark.parametrize("name", ["no/run.jsonl", "no/{rank}.jsonl", "no/"])
def test_a_directory_that_does_not_exist_is_refused_on_every_rank(
    tmp_path: Path, name: str
) -> None:
    def run(rank: int) -> str:
        with pytest.raises(ValueError) as caught:
            train(rank, f"{tmp_path}/{name}")
        return str(caught.value)

    texts = la.simulate(run, workers=2)
    assert all("no such directory on rank" in text for text in texts)
    assert all(str(tmp_path) in text for text in texts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["{rank}.jsonl", ""])
def test_a_directory_that_one_host_lacks_is_refused_on_every_rank(
    pool: gloo.Pool, tmp_path: Path, name: str
) -> None:
    (tmp_path / "here").mkdir()
    texts = pool.run(lacking, str(tmp_path), name, ranks=3)
    assert all("no such directory on rank 2: create it first" in text for text in texts)


def lacking(rank: int, directory: str, name: str) -> str:
    given = f"{directory}/{'there' if rank == 2 else 'here'}/{name}".rstrip("/")
    with pytest.raises(ValueError) as caught:
        train(rank, given, link=gloo.link_of(3))
    return str(caught.value)


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


def test_a_place_that_fails_takes_no_other_along() -> None:
    class Failing(Kept):
        def write(self, record: Mapping[str, Any]) -> None:
            super().write(record)
            if record["event"] == "steps":
                raise KeyError("mine")

    def run(rank: int) -> tuple[Records, Records]:
        failing, kept = Failing(), Kept()
        # the places are copied, but for the lists that they keep
        train(rank, [failing, kept])
        return failing.records, kept.records

    with pytest.warns(RuntimeWarning, match=r"Failing: KeyError: 'mine'"):
        ((failed, kept),) = la.simulate(run, workers=1)
    assert [r["event"] for r in failed] == ["start", "steps"]
    assert [r["step"] for r in kept] == [0, 1, 2, 3, 4, 5, 6, 6, 6]


def test_a_place_that_hangs_does_not_hold_up_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "CLOSING_SECONDS", 0.2)
    released = threading.Event()

    class Hanging(la.Metrics):
        def write(self, record: Mapping[str, Any]) -> None:
            released.wait()

        def __copy__(self) -> Hanging:
            return self

    for steps, said in ((recorder.UNWRITTEN + 20, "accepts no more"), (3, "not written within")):
        with pytest.warns(RuntimeWarning, match=said):
            run = partial(train, given=Hanging(every=0), steps=steps)
            ((_, stats),) = la.simulate(run, workers=1)
        assert stats.steps == steps
    released.set()


def test_an_error_is_recorded(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        torch.manual_seed(rank)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with la.attach(model, optimizer, la.local_sgd(2), metrics=tmp_path):
            step(model, optimizer)
            raise OverflowError("of the loop's own")

    with pytest.raises(OverflowError):
        la.simulate(run, workers=1)
    *_, error, end = read(tmp_path / "rank0.jsonl")
    assert (error["event"], error["error"]) == ("error", "OverflowError: of the loop's own")
    assert end["event"] == "end" and end["step"] == 1


@pytest.mark.parametrize("in_with", [True, False])
def test_a_lost_round_is_recorded_once(tmp_path: Path, in_with: bool) -> None:
    def run(rank: int) -> None:
        torch.manual_seed(rank)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
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
        errors = [r for r in read(tmp_path / f"rank{rank}.jsonl") if r["event"] == "error"]
        (error,) = [r["error"] for r in errors]
        assert "ranks disagree on what comes next" in error
        assert ("finish()" if rank == 0 else "Average round") in error


@pytest.mark.parametrize("ending", ["raise RuntimeError('boom')", "pass"])
def test_a_program_that_just_ends_still_writes_its_last_record(tmp_path: Path, ending: str) -> None:
    program = f"""
import torch, laconic
laconic.init()
model = torch.nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
sync = laconic.attach(model, optimizer, laconic.local_sgd(2), metrics="run.jsonl")
model(torch.randn(4, 5)).sum().backward()
optimizer.step()
{ending}
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=250
    )
    records = read(tmp_path / "run.jsonl")
    if ending == "pass":
        assert (ended.returncode, ended.stderr) == (0, "")
        assert [r["event"] for r in records] == ["start", "end"]
    else:
        assert ended.returncode == 1 and "boom" in ended.stderr
        assert [r["event"] for r in records] == ["start", "error", "end"]
        assert records[1]["error"] == "RuntimeError: boom"
    assert records[-1]["step"] == 1


# -- TensorBoard ----


class FakeSummaryWriter:
    made: list[FakeSummaryWriter]

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.scalars: list[tuple[str, float, int]] = []
        self.text: list[str] = []
        self.closed = False
        self.made.append(self)

    def add_scalar(self, name: str, value: float, step: int, walltime: float) -> None:
        assert walltime > 1e9
        self.scalars.append((name, value, step))

    def add_text(self, name: str, text: str, step: int) -> None:
        self.text.append(text)

    def flush(self) -> None:
        assert not self.closed

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fake_tensorboard(monkeypatch: pytest.MonkeyPatch) -> list[FakeSummaryWriter]:
    package = types.ModuleType("tensorboard")
    package.__spec__ = ModuleSpec("tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard", package)
    front = types.ModuleType("torch.utils.tensorboard")
    FakeSummaryWriter.made = []
    monkeypatch.setattr(front, "SummaryWriter", FakeSummaryWriter, raising=False)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", front)
    return FakeSummaryWriter.made


@pytest.mark.parametrize(("name", "directories"), [("tb", ["tb"]), ("{rank}", ["0", "1"])])
def test_tensorboard_is_given_scalars(
    fake_tensorboard: list[FakeSummaryWriter], name: str, directories: list[str]
) -> None:
    la.simulate(lambda rank: train(rank, la.TensorBoard(name, every=0)), workers=2)
    assert sorted(w.directory for w in fake_tensorboard) == directories
    for writer in fake_tensorboard:
        assert writer.closed and "local_sgd(2)" in writer.text[0]
        by_name: dict[str, list[tuple[float, int]]] = {}
        for scalar, value, at in writer.scalars:
            by_name.setdefault(scalar, []).append((value, at))
        assert [at for _, at in by_name["laconic/seconds per step"]] == [1, 2, 3, 4, 5, 6]
        assert by_name["laconic/rounds"][:6] == [(0, 1), (1, 2), (1, 3), (2, 4), (2, 5), (3, 6)]
        assert {value for value, _ in by_name["laconic/lr/group 0"]} == {0.1}
        assert by_name["laconic/MB sent"][5][0] > by_name["laconic/MB sent"][0][0] > 0


def test_tensorboard_itself_reads_what_was_written(tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorboard") is None:
        with pytest.raises(ImportError, match="pip install tensorboard"):
            la.TensorBoard(tmp_path)
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    la.simulate(lambda rank: train(rank, la.TensorBoard(tmp_path, every=0)), workers=1)
    events = EventAccumulator(str(tmp_path)).Reload()
    seen = [(event.step, event.value) for event in events.Scalars("laconic/rounds")]
    assert seen[:6] == [(1, 0.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 3.0)]


def test_without_tensorboard_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name)
    )
    with pytest.raises(ImportError, match="pip install tensorboard"):
        la.TensorBoard("runs")


@pytest.mark.parametrize("directory", [3, "", None])
def test_a_directory_for_tensorboard_is_a_path(directory: Any) -> None:
    with pytest.raises(ValueError, match="directory must be the path of a directory"):
        la.TensorBoard(directory)


def test_a_sink_that_fails_at_the_start_is_an_error_on_all_ranks() -> None:
    class Uninitialized(la.Metrics):
        def __init__(self) -> None:
            pass

    class Broken(la.Metrics):
        def survey(self, rank: int) -> int:
            raise OSError("no such place")

    def run(rank: int, sink: type[la.Metrics]) -> str:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError) as caught:
            la.attach(model, optimizer, la.local_sgd(1), metrics=sink() if rank == 0 else None)
        own_cause = rank == 0 and sink is Broken
        assert isinstance(caught.value.__cause__, OSError) == own_cause, "where it was raised"
        la.attach(model, optimizer, la.local_sgd(1))
        return str(caught.value)

    for sink, words in ((Uninitialized, "must call super().__init__()"), (Broken, "no such place")):
        for said in la.simulate(lambda rank, sink=sink: run(rank, sink), workers=2):  # type: ignore[misc]
            assert words in said
