"""What the lab says of an elastic run: how many of its steps counted, and who was present when; and
the plans of faults."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from laconic.cli import main
from laconic.lab.emulation import faults
from laconic.lab.emulation.faults import COORDINATOR, Cut, Hang, Kill, Plan
from laconic.lab.emulation.goodput import Killed, read, report, summary

BEGAN = 1_800_000_000.0
"""When the lab began, in seconds since 1970."""


def event(kind: str, at: float, computed: int, counted: int, **more: Any) -> dict[str, Any]:
    return {"presence": kind, "time": BEGAN + at, "steps": [computed, counted], **more}


def view(at: float, computed: int, counted: int, workers: str, **gone: Any) -> dict[str, Any]:
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
    assert report(found, 2, 10.0)[0] == "goodput 11.3%: 5 of 44 steps counted"
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
        self.steps: dict[str, list[bool]] = {}
        """Whether each step counts, by worker."""
        self.present: list[tuple[int, frozenset[str]]] = []
        self.hosts: dict[str, str] = {}
        self.now = 0
        self.here: list[str] = []

    def join(self) -> None:
        free = {f"host{i}" for i in range(4)} - {self.hosts[id] for id in self.here}
        id = f"w{len(self.hosts)}"
        self.hosts[id], self.steps[id] = self.chance.choice(sorted(free)), []
        self.here.append(id)
        self.meet({})
        self.events[id].append(begin(self.now, self.hosts[id]))

    def counts(self, id: str) -> list[int]:
        return [len(self.steps[id]), sum(self.steps[id])]

    def meet(self, gone: dict[str, list[int]]) -> None:
        for id in self.here:
            about = {"workers": [*self.here], "gone": gone}
            self.events[id].append(event("view", self.now, *self.counts(id), **about))

    def lose(self, how: str) -> None:
        id = self.chance.choice(self.here)
        self.here.remove(id)
        if how == "kill":
            at = BEGAN + self.now
            self.kills.append(Killed(self.hosts[id], at - 0.4, at + 0.4))
        elif how == "leave":
            self.events[id].append(event("left", self.now, *self.counts(id)))
        self.meet({id: self.counts(id)})

    def run(self, moments: int) -> None:
        kinds = ["kill", "hang", "leave", "join", "round", "step"]
        for what in ["join"] * 3 + self.chance.choices(kinds, [1, 1, 1, 3, 5, 15], k=moments):
            self.now += 1
            if what == "step":
                for id in self.here:
                    self.steps[id].append(False)
            elif what == "round":
                for id in self.here:
                    self.steps[id] = [True] * len(self.steps[id])
            elif what == "join":
                if len(self.here) < 4:
                    self.join()
            elif len(self.here) > 1:
                self.lose(what)
            self.present.append((self.now, frozenset(self.here)))
        self.now += 1
        for id in self.here:
            self.events[id].append(event("finished", self.now, *self.counts(id)))


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
    every = [counts for own in truth.steps.values() for counts in own]
    assert (found.computed, found.counted) == (len(every), sum(every))
    assert {w.id: w.host for w in found.workers} == truth.hosts
    assert len(truth.kills) == sum(w.how == "killed by plan" for w in found.workers)
    for moment, here in truth.present:
        # a killed worker ends 0.4 s before the others notice
        assert {w.id for w in found.workers if w.begin <= moment < w.end} == here


# -- plans of faults ----


def test_events_are_in_order_and_random_kills_have_the_mean_time() -> None:
    cut, hang, kill = Cut(2.0, 0, 1, 3.0), Hang(3.0, 2, 4.0), Kill(1.0, COORDINATOR)
    assert [(e.at, e.fault, e.begins) for e in Plan((hang, cut, kill)).events()] == [
        (1.0, kill, True), (2.0, cut, True), (3.0, cut, False), (3.0, hang, True),
        (4.0, hang, False),
    ]  # fmt: skip
    kills = faults.random_kills(60.0, 4, 7, 600_000.0).faults
    gaps = [late.at - soon.at for soon, late in itertools.pairwise(kills)]
    assert len(kills) == pytest.approx(10_000, rel=0.05)
    assert sum(gap < 60.0 for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.02)
    for worker in range(4):
        assert sum(kill.worker == worker for kill in kills) == pytest.approx(2500, rel=0.1)
    shorter = faults.random_kills(60.0, 4, 7, 6_000.0).faults
    assert shorter == tuple(k for k in kills if k.at <= 6_000.0), "a longer time only adds kills"


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
