"""What the lab says of an elastic run: how many of its steps counted, and who was present when; and
the plans of faults."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.cli import main
from laconic.lab.emulation import faults
from laconic.lab.emulation.faults import COORDINATOR, Cut, Hang, Kill, Plan
from laconic.lab.emulation.goodput import Killed, read, report, summary

BEGAN = 1_800_000_000.0
"""When the lab began, in seconds since 1970."""


def event(kind: str, at: float, computed: int, counted: int, **more: Any) -> dict[str, Any]:
    return {"presence": kind, "time": BEGAN + at, "steps": [computed, counted], **more}


def view(
    at: float, computed: int, counted: int, workers: Sequence[str], **gone: list[int]
) -> dict[str, Any]:
    return event("view", at, computed, counted, workers=[*workers], gone=gone)


def begin(at: float, host: str) -> dict[str, Any]:
    return event("begin", at, 0, 0, host=host)


def test_a_lost_run_counts_nothing_and_less_than_all_is_not_100_percent() -> None:
    lost = {
        "a": [view(1, 0, 0, "ab"), begin(1, "host0"), view(3, 20, 20, "a", b=[19, 16])],
        "b": [view(1, 0, 0, "ab"), begin(1, "host1")],
        "c": [view(8, 0, 0, "c"), begin(8, "host0"), event("finished", 9, 5, 5)],
    }
    kills = [Killed(f"host{k}", BEGAN + 4 - 2 * k, BEGAN + 4 - 2 * k) for k in (1, 0)]
    found = summary(lost, kills, BEGAN, 10.0)
    assert found is not None and found.runs_lost == 1
    assert report(found, 2, 10.0)[:2] == [
        "goodput 11.3%: 5 of 44 steps counted",
        "a run was lost, with all workers: none of the steps counted",
    ]
    most = {
        "a": [begin(0, "host0"), view(2, 1, 1, "a", b=[1, 0]), event("finished", 3, 9999, 9999)],
        "b": [begin(0, "host0")],
    }
    found = summary(most, [], BEGAN, 3.0)
    assert found is not None and report(found, 1, 3.0)[0].startswith("goodput 99.9%: 9999 of 10000")
    assert summary({}, [], BEGAN, 3.0) is None


class Truth:
    """A run, step by step: what happens to each step, and who is there at each moment."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.events = defaultdict[str, list[dict[str, Any]]](list)
        self.kills: list[Killed] = []
        self.steps: dict[tuple[str, int], bool] = {}
        """Whether each step counts, by worker and number."""
        self.present: list[tuple[int, frozenset[str]]] = []
        self.hosts: dict[str, str] = {}
        self.now = 0
        self.here: list[str] = []
        for _ in range(3):
            self.join()

    def join(self) -> None:
        free = {f"host{i}" for i in range(4)} - {self.hosts[id] for id in self.here}
        id = f"w{len(self.hosts)}"
        self.hosts[id] = self.chance.choice(sorted(free))
        self.here.append(id)
        self.meet({})
        self.events[id].append(begin(self.now, self.hosts[id]))

    def steps_of(self, id: str) -> list[int]:
        own = [counts for (worker, _), counts in self.steps.items() if worker == id]
        return [len(own), sum(own)]

    def meet(self, gone: dict[str, list[int]]) -> None:
        for id in self.here:
            computed, counted = self.steps_of(id)
            self.events[id].append(view(self.now, computed, counted, self.here, **gone))

    def compute(self) -> None:
        for id in self.here:
            self.steps[id, self.steps_of(id)[0]] = False

    def round(self) -> None:
        for key in self.steps:
            if key[0] in self.here:
                self.steps[key] = True

    def lose(self, how: str) -> None:
        id = self.chance.choice(self.here)
        self.here.remove(id)
        if how == "kill":
            self.kills.append(
                Killed(self.hosts[id], BEGAN + self.now - 0.4, BEGAN + self.now + 0.4)
            )
        elif how == "leave":
            self.events[id].append(event("left", self.now, *self.steps_of(id)))
        self.meet({id: self.steps_of(id)})

    def run(self, moments: int) -> None:
        for _ in range(moments):
            self.now += 1
            what = self.chance.choices(["kill", "hang", "leave", "join", "round", "step"],
                                       [1, 1, 1, 3, 5, 15])[0]  # fmt: skip
            if what == "step":
                self.compute()
            elif what == "round":
                self.round()
            elif what == "join" and len(self.here) < 4:
                self.join()
            elif what in ("kill", "hang", "leave") and len(self.here) > 1:
                self.lose(what)
            self.present.append((self.now, frozenset(self.here)))
        self.now += 1
        self.round()
        for id in self.here:
            self.events[id].append(event("finished", self.now, *self.steps_of(id)))


@pytest.mark.parametrize("seed", range(8))
def test_it_is_what_happened_to_each_step_and_at_each_moment(seed: int, tmp_path: Path) -> None:
    truth = Truth(seed)
    truth.run(200)
    for id, own in truth.events.items():
        lines = [json.dumps(each) + "\n" for each in [{"unit": 1}, *own]]
        (tmp_path / f"{id}.jsonl").write_text("".join(lines) + '{"presence": "vi')
    assert read(tmp_path) == truth.events
    found = summary(read(tmp_path), truth.kills, BEGAN, truth.now + 1.0)
    assert found is not None
    assert (found.computed, found.counted) == (len(truth.steps), sum(truth.steps.values()))
    assert {w.id: w.host for w in found.workers} == truth.hosts
    assert len(truth.kills) == sum(w.how == "killed by plan" for w in found.workers)
    for moment, here in truth.present:
        # a killed worker ends 0.4 s before the others notice
        assert {w.id for w in found.workers if w.begin <= moment < w.end} == here


# -- plans of faults ----


def test_events_are_in_order_and_an_end_comes_before_a_beginning() -> None:
    cut, hang, kill = Cut(2.0, 0, 1, 3.0), Hang(3.0, 2, 4.0), Kill(1.0, COORDINATOR)
    assert [(e.at, e.fault, e.begins) for e in Plan((hang, cut, kill)).events()] == [
        (1.0, kill, True), (2.0, cut, True), (3.0, cut, False), (3.0, hang, True),
        (4.0, hang, False),
    ]  # fmt: skip


@settings(deadline=None)
@given(st.integers(0, 2**32), st.floats(0.0, 1000.0), st.floats(0.0, 1000.0))
def test_a_longer_horizon_only_adds_kills(seed: int, shorter: float, more: float) -> None:
    short = faults.random_kills(10.0, 4, seed, shorter).faults
    long = faults.random_kills(10.0, 4, seed, shorter + more).faults
    assert long[: len(short)] == short
    assert all(fault.at > shorter for fault in long[len(short) :])


def test_random_kills_have_the_mean_time_and_take_all_workers_alike() -> None:
    kills = faults.random_kills(60.0, 4, 7, 600_000.0).faults
    gaps = [late.at - soon.at for soon, late in itertools.pairwise(kills)]
    assert len(kills) == pytest.approx(10_000, rel=0.05)
    assert sum(gap < 60.0 for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.02)
    for worker in range(4):
        assert sum(kill.worker == worker for kill in kills) == pytest.approx(2500, rel=0.1)


# -- in the lab ----

PROGRAM = """
import os, sys, time
from pathlib import Path
import torch, laconic

directory, host = Path(sys.argv[1]), os.environ["GROUP_RANK"]
torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
elastic = laconic.Elastic(workers=2, min_workers=1, wait=250.0)
sync = laconic.attach(model, optimizer, laconic.local_sgd(4), elastic=elastic, timeout=250)
before, last = set(sync.view.workers), directory / "last"
first = not (directory / "killed").exists()

def changed(view):
    if host == "0" and len(view.workers) == 2 and set(view.workers) != before:
        last.with_suffix(".new").write_text(str(sync.step + 40))
        last.with_suffix(".new").rename(last)

sync.on_change(changed)
while not (last.exists() and sync.step >= int(last.read_text())):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if host == "1" and sync.step == 42 and first:
        (directory / "killed").touch()
        os.kill(os.getpid(), 9)
    time.sleep(0.002)
sync.finish()
"""


@pytest.mark.slow
@pytest.mark.hosts
def test_a_lost_worker_and_its_replacement_in_the_lab(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It ends by itself, 2 steps after a round; the plan's fault only allows its restart."""
    (tmp_path / "program.py").write_text(PROGRAM)
    out = tmp_path / "out"
    options = ["--hosts", "2", "--hang", "1@1ms..2ms", "--restart", "0.1s", "--out", str(out)]
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path)]
    assert main(["lab", *options, "--", *command]) == 0
    said, rates = capfd.readouterr().err, json.loads((out / "rates.json").read_text())
    elastic = rates["elastic"]
    assert 0 < elastic["computed"] - elastic["counted"] <= 2
    assert f": {elastic['counted']} of {elastic['computed']} steps counted\n" in said
    assert [w["host"] for w in elastic["workers"]] == ["host0", "host1", "host1"]
    assert [w["how"] for w in elastic["workers"]][::2] == ["finished", "finished"]
