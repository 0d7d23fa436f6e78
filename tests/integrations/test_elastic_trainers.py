"""Workers of a trainer that are killed, and that join a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.elastic_trainers import EVALUATED, SAMPLES, STEPS, samples_of
from tests.support import gloo

ROOT = Path(__file__).parents[2]
SECONDS = 200.0
Line = dict[str, Any]


class Worker:
    """A process of `tests.integrations.elastic_trainers`, which waits until `go`."""

    def __init__(self, library: str, port: int, folder: Path, *more: str) -> None:
        self.log = folder.with_suffix(".log")
        at = [library, str(port), str(folder), *more]
        command = [sys.executable, "-m", "tests.integrations.elastic_trainers", *at]
        kept = {k: v for k, v in os.environ.items() if not k.startswith("LACONIC_")}
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        environ = {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as file:
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": file, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(command, env=environ, cwd=ROOT, **pipes)

    @property
    def lines(self) -> list[Line]:
        texts = self.log.read_text().splitlines()
        return [json.loads(text) for text in texts if text[:2] == '{"' and text[-1] == "}"]

    def of(self, name: str) -> list[Any]:
        """The values of the lines that have this name."""
        return [line[name] for line in self.lines if name in line]

    def wait_for(self, name: str, least: int) -> None:
        end = time.monotonic() + SECONDS
        while not any(value >= least for value in self.of(name)):
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

    def end(self) -> None:
        assert self.process.wait(SECONDS) == 0, self.log.read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(SECONDS)
        if self.process.stdin is not None:
            self.process.stdin.close()


@contextmanager
def workers(library: str, folder: Path, count: int, *more: str) -> Iterator[list[Worker]]:
    """So many, and a coordinator. The first one has one argument ``more``."""
    port = gloo.free_ports(1)[0]
    folder.mkdir()
    with ExitStack() as ending:
        at = ["--address", f"127.0.0.1:{port}"]
        command = [sys.executable, "-m", "laconic", "coordinator", *at]
        coordinator = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT)
        ending.callback(coordinator.wait)
        ending.callback(coordinator.kill)
        made = [Worker(library, port, folder / f"worker{k}", *more[k:]) for k in range(count)]
        for each in made:
            ending.callback(each.close)
        for each in made:
            each.wait_for("ready", 1)
        yield made


def check(kept: list[Worker]) -> None:
    """They end together: with one model and schedule, after the same validations."""
    first, *others = kept
    (digest,) = first.of("digest")
    losses = dict(zip(first.of("evaluated"), first.of("loss"), strict=True))
    for each in others:
        assert each.of("digest") == [digest] and each.of("lr") == first.of("lr")
        assert each.of("step")[-1] == STEPS
        since = {at: losses[at] for at in each.of("evaluated")}
        assert since and since == dict(zip(each.of("evaluated"), each.of("loss"), strict=True))


@pytest.mark.parametrize(
    ("library", "number"),
    [
        ("accelerate", signal.SIGKILL),
        pytest.param("transformers", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("transformers", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("lightning", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("lightning", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_worker_is_lost_and_another_one_joins(
    library: str, number: signal.Signals, tmp_path: Path
) -> None:
    with workers(library, tmp_path / "run", 3) as (stays, lost, joins):
        stays.go()
        lost.go()
        lost.wait_for("step", 60)
        lost.process.send_signal(number)
        joins.go()
        for each in (stays, joins):
            each.end()
        assert lost.process.wait(SECONDS) == (143 if number == signal.SIGTERM else -number)
        check([stays, joins])
        (begins,) = joins.of("begins")
        assert 60 <= begins < STEPS, "where the others are"
        steps = joins.of("step")
        assert [b - a for a, b in pairwise(steps)] == [1] * (len(steps) - 1)
        assert stays.of("evaluated") == list(range(EVALUATED, STEPS + 1, EVALUATED))
        drawn = {i for each in (stays, lost, joins) for i in samples_of(each.lines)}
        missing = {*range(SAMPLES)} - drawn
        # Lightning has read one batch more when the worker is killed
        assert len(missing) <= (4 if library == "lightning" else 0), "each was trained on"


@pytest.mark.slow
def test_the_trainer_resumes_with_new_workers(tmp_path: Path) -> None:
    """One of which has no checkpoint."""
    with workers("transformers", tmp_path / "first", 2) as first:
        for each in first:
            each.go()
        for each in first:
            each.wait_for("step", 120)
    checkpoint = str(tmp_path / "first" / "worker1" / "checkpoint-100")
    with workers("transformers", tmp_path / "second", 2, checkpoint) as second:
        second[0].go()
        second[1].go()
        for each in second:
            each.end()
        check(second)
        assert [each.of("begins") for each in second] == [[100], [100]]
        assert second[0].of("evaluated") == list(range(100 + EVALUATED, STEPS + 1, EVALUATED))
