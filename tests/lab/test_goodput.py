"""What the lab says of an elastic run: how many of its steps counted, and who was present when."""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.survive import events

import laconic
from laconic.cli import main
from laconic.engine import reports
from laconic.lab.emulation import orphans, program
from laconic.lab.emulation.cluster import Cluster, NamespacesUnavailable
from laconic.lab.emulation.goodput import Killed, Worker, read, report, summary
from laconic.lab.emulation.injection import Injection

ROOT = Path(__file__).parents[2]
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


HISTORY: dict[str, list[dict[str, Any]]] = {
    # a is there from the beginning to the end. b is killed, and c replaces it. d hangs.
    "a": [
        view(1, 0, 0, "abd"),
        begin(1.5, "host0"),
        view(5.25, 50, 48, "ad", b=[47, 44]),
        view(10, 90, 88, "acd"),
        view(20, 150, 148, "ac", d=[120, 116]),
        event("finished", 30, 200, 200),
    ],
    "b": [view(1, 0, 0, "abd"), begin(1.75, "host1")],
    "d": [
        view(1, 0, 0, "abd"),
        begin(1.25, "host2"),
        view(5.25, 50, 48, "ad", b=[47, 44]),
        view(10, 90, 88, "acd"),
    ],
    "c": [
        view(10, 0, 0, "acd"),
        begin(10.5, "host1"),
        view(20, 60, 59, "ac", d=[120, 116]),
        event("finished", 29.5, 110, 110),
    ],
    "never": [view(10, 0, 0, "acd")],
}


def test_a_run_with_a_kill_a_loss_and_a_newcomer() -> None:
    kills = [
        Killed("host1", BEGAN + 5, BEGAN + 5.5)
    ]  # the others notice before the lab has ended it
    found = summary(HISTORY, kills, BEGAN, 31.0)
    assert found is not None
    assert list(found.workers) == [
        Worker("a", "host0", 1.5, 30.0, "finished", 200, 200),
        Worker("b", "host1", 1.75, 5.0, "killed by plan", 47, 44),
        Worker("c", "host1", 10.5, 29.5, "finished", 110, 110),
        Worker("d", "host2", 1.25, 20.0, "lost", 120, 116),
    ]
    assert (found.computed, found.counted) == (477, 470)
    assert found.document() == {
        "goodput": 470 / 477,
        "computed": 477,
        "counted": 470,
        "runs_lost": 0,
        "workers": [vars(worker) for worker in found.workers],
    }
    lines = report(found, 4, 36.0)
    assert lines[:2] == [
        "goodput 98.5%: 470 of 477 steps counted",
        "who was present, in seconds since the start:",
    ]
    assert lines[3] == ("  host1  b      1.8 to     5.0  killed by plan       44 of  47 counted")
    assert lines[6:] == [  # 2 characters a second
        "  host0  ...##########################################################...........",
        "  host1  ...#######x..........#######################################............",
        "  host2  ..######################################x...............................",
        "  host3  " + 72 * ".",
        "         0 s" + 65 * " " + "36 s",
    ]


def test_a_goodput_below_1_is_not_shown_as_100_percent() -> None:
    run = {
        "a": [begin(0, "host0"), view(2, 1, 1, "a", b=[1, 0]), event("finished", 3, 9999, 9999)],
        "b": [begin(0, "host0")],
    }
    found = summary(run, [], BEGAN, 3.0)
    assert found is not None
    assert report(found, 1, 3.0)[0] == "goodput 99.9%: 9999 of 10000 steps counted"


def test_no_steps() -> None:
    found = summary({"a": [begin(1, "host0")]}, [], BEGAN, 3.0)
    assert found is not None and found.ratio is None
    assert report(found, 1, 3.0)[0] == "goodput: no step was computed"
    assert [worker.how for worker in found.workers] == ["ended with the lab"]
    assert summary({}, [], BEGAN, 3.0) is None
    assert summary({"a": [view(1, 0, 0, "a")]}, [], BEGAN, 3.0) is None


@pytest.mark.parametrize(
    ("heard", "after", "found"),
    [
        ([40, 40], [], Worker("b", "host1", 1.0, 5.0, "finished", 40, 40)),
        ([60, 58], [], Worker("b", "host1", 1.0, 8.0, "killed by plan", 60, 58)),
        ([40, 40], [50, 48], Worker("b", "host1", 1.0, 8.0, "killed by plan", 50, 48)),
    ],
)
def test_a_worker_ends_with_finish_unless_it_has_gone_on(
    heard: list[int], after: list[int], found: Worker
) -> None:
    run = {
        "a": [begin(1, "host0"), view(9, 70, 68, "a", b=heard)],
        "b": [begin(1, "host1"), event("finished", 5, 40, 40)],
    }
    if after:  # a newcomer came, for example
        run["b"].append(view(7, *after, "abc"))
    result = summary(run, [Killed("host1", BEGAN + 8, BEGAN + 8)], BEGAN, 10.0)
    assert result is not None and result.workers[1] == found


def test_a_worker_leaves_and_the_lab_ends_the_others() -> None:
    run = {
        "a": [begin(1, "host0"), view(4, 9, 8, "a", b=[8, 8]), event("left", 12, 30, 28)],
        "b": [begin(1, "host1"), event("left", 4, 9, 8)],
    }
    found = summary(run, [Killed("host1", BEGAN + 9, BEGAN + 9)], BEGAN, 10.0)
    assert found is not None
    assert list(found.workers) == [
        Worker("a", "host0", 1.0, 10.0, "ended with the lab", 30, 28),
        Worker("b", "host1", 1.0, 4.0, "left", 9, 8),
    ]


def test_a_host_that_was_left_behind_is_not_killed_by_a_later_kill() -> None:
    run = {
        "a": [begin(1, "host0"), view(4, 9, 8, "a", b=[8, 8]), event("finished", 9, 30, 30)],
        "b": [begin(1, "host1")],
    }
    found = summary(run, [Killed("host1", BEGAN + 6, BEGAN + 6)], BEGAN, 10.0)
    assert found is not None
    assert (found.workers[1].how, found.workers[1].end) == ("lost", 4.0)


def test_nothing_is_left_of_a_run_whose_workers_were_all_killed() -> None:
    run = {
        "a": [view(1, 0, 0, "ab"), begin(1, "host0"), view(3, 20, 20, "a", b=[19, 16])],
        "b": [view(1, 0, 0, "ab"), begin(1, "host1")],
        "c": [view(8, 0, 0, "c"), begin(8, "host0"), event("finished", 9, 5, 5)],
    }
    kills = [Killed("host1", BEGAN + 2, BEGAN + 2), Killed("host0", BEGAN + 4, BEGAN + 4)]
    found = summary(run, kills, BEGAN, 10.0)
    assert found is not None
    assert [(w.id, w.how, w.computed, w.counted) for w in found.workers] == [
        ("a", "killed by plan", 20, 0),
        ("c", "finished", 5, 5),
        ("b", "killed by plan", 19, 0),
    ]
    assert found.runs_lost == 1
    assert report(found, 2, 10.0)[:2] == [
        "goodput 11.3%: 5 of 44 steps counted",
        "a run was lost, with all workers: none of the steps counted",
    ]


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


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_happened_to_each_step_and_at_each_moment(seed: int, tmp_path: Path) -> None:
    truth = Truth(seed)
    truth.run(300)
    for id, own in truth.events.items():
        lines = [json.dumps(each) + "\n" for each in [{"unit": 1}, *own]]
        (tmp_path / f"{id}.jsonl").write_text("".join(lines) + '{"presence": "vi')
    assert read(tmp_path) == truth.events
    found = summary(read(tmp_path), truth.kills, BEGAN, truth.now + 1.0)
    assert found is not None
    assert found.computed == len(truth.steps)
    assert found.counted == sum(truth.steps.values())
    assert {w.id: w.host for w in found.workers} == truth.hosts
    assert len(truth.kills) == sum(w.how == "killed by plan" for w in found.workers)
    for moment, here in truth.present:
        # a killed worker ends 0.4 s before the others notice
        assert {w.id for w in found.workers if w.begin <= moment < w.end} == here


# Host 1's first process sleeps after 42 steps, 40 of which it has shared. When host 0 has heard of
# the 42, the lab kills it. When its replacement has come, they train on for 42 steps.
PROGRAM = """
import json, os, sys, threading, time
from pathlib import Path
import torch, laconic
sys.path.insert(0, sys.argv[2])
from benchmarks.survive.events import Recorder

directory, host = Path(sys.argv[1]), os.environ["GROUP_RANK"]
first = host == "1" and not (directory / "first").exists()
if first:
    (directory / "first").touch()

def write(name, text):
    (directory / f"{name}.new").write_text(text)
    (directory / f"{name}.new").rename(directory / name)

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
elastic = laconic.Elastic(workers=2, min_workers=1, wait=250.0)
sync = laconic.attach(model, optimizer, laconic.local_sgd(4), elastic=elastic, timeout=250)
me = sync.view.workers[sync.view.place]
log = os.open(directory / f"{me}.steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
recorder = Recorder(directory, int(host))
before = list(sync.view.workers)

def listen():
    notes = sync.driver.session.elastic.members.signs.notes
    other, = set(before) - {me}
    while json.loads(notes.get(other, "[0, 0]"))[1] < 42:
        time.sleep(0.02)
    write("heard", other)

def changed(view):
    if host == "0" and len(view.workers) == 2 and list(view.workers) != before:
        write("last", str(sync.step + 42))

sync.on_change(changed)
if host == "0":
    threading.Thread(target=listen, daemon=True).start()
last = directory / "last"
while not (last.exists() and sync.step >= int(last.read_text())):
    if first and sync.step == 42:
        time.sleep(1000)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    os.write(log, b"s")
    recorder.step()
    if sync.step % 4 == 0:
        recorder.round(sync.step // 4)
    time.sleep(0.005)
sync.finish()
recorder.round(sync.step // 4 + 1)
write(f"{me}.lost", str(sync.stats().steps_lost))
"""


def emulated() -> bool:
    """Whether hosts are network namespaces here."""
    try:
        with Cluster(1):
            return True
    except NamespacesUnavailable:
        return False


@pytest.mark.parametrize("namespaces", [True, False])
def test_a_killed_worker_and_its_replacement_in_the_lab(
    namespaces: bool,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if namespaces and not emulated():
        return
    if not namespaces:

        def refuse(*_: object, **__: object) -> Cluster:
            raise NamespacesUnavailable("no network namespaces: on purpose")

        monkeypatch.setattr(program, "Cluster", refuse)
    heard, act, next_due = tmp_path / "heard", Injection.act, Injection.next_due

    def act_after_that(self: Injection, now: float) -> None:
        act(self, now if heard.exists() else 0.0)

    def due_after_that(self: Injection) -> float:
        return next_due(self) if heard.exists() else float("inf")

    monkeypatch.setattr(Injection, "act", act_after_that)  # however long the processes take
    monkeypatch.setattr(Injection, "next_due", due_after_that)
    (tmp_path / "program.py").write_text(PROGRAM)
    out = tmp_path / "out"
    (out / "trace").mkdir(parents=True)
    (out / "trace" / "old.jsonl").write_text('{"presence": "begin", "time": 0, "steps": [9, 9]}\n')
    options = ["--hosts", "2", "--kill", "1@0.1s", "--restart", "0.1s", "--out", str(out)]
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path), str(ROOT)]
    assert main(["lab", *options, "--", *command]) == 0

    steps = {path.stem: path.stat().st_size for path in tmp_path.glob("*.steps")}
    said, rates = capfd.readouterr().err, json.loads((out / "rates.json").read_text())
    elastic = rates["elastic"]
    killed = heard.read_text()
    assert steps[killed] == 42
    assert {w["id"]: w["computed"] for w in elastic["workers"]} == steps
    assert {w["id"]: w["counted"] for w in elastic["workers"]} == steps | {killed: 40}
    assert elastic["computed"] == sum(steps.values())
    assert elastic["counted"] == sum(steps.values()) - 2
    assert elastic["goodput"] == elastic["counted"] / elastic["computed"]
    assert [path.read_text() for path in tmp_path.glob("*.lost")] == ["2", "2"]
    measured = events.summary(events.read(tmp_path), rates["faults"])
    assert {name: elastic[name] for name in ("computed", "counted", "goodput")} == {
        name: measured[name] for name in ("computed", "counted", "goodput")
    }, "the benchmark counts the same"
    assert f": {elastic['counted']} of {elastic['computed']} steps counted\n" in said
    assert [(w["host"], w["how"]) for w in elastic["workers"]] == [
        ("host0", "finished"), ("host1", "killed by plan"), ("host1", "finished"),
    ]  # fmt: skip
    first, lost, second = elastic["workers"]
    kill, again = rates["faults"]
    assert lost["end"] == round(kill["at"], 3) > lost["begin"]
    assert again["at"] < second["begin"] < second["end"] <= rates["seconds"]
    assert first["begin"] < lost["end"] and second["begin"] < first["end"]
    for worker in elastic["workers"]:
        assert f"laconic:   {worker['host']}  {worker['id']}  " in said
    assert max(len(line) for line in said.splitlines() if line.startswith("laconic: ")) <= 100
    assert laconic.Trace(out / "trace").workers == 3, "the trace is that of Elastic(trace=)"


def test_programs_that_are_not_elastic_have_no_goodput(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    script = f'test -d "$LACONIC_TRACE" && echo "$LACONIC_TRACE" > {tmp_path}/said'
    options = ["--hosts", "1", "--kill", "coordinator@1h"]
    assert main(["lab", *options, "--", "sh", "-c", script]) == 0
    assert "goodput" not in capfd.readouterr().err
    trace = Path((tmp_path / "said").read_text().strip())
    assert trace.parent == tmp_path and not trace.exists(), "it is removed"


def test_the_environment_names_the_directory_unless_the_program_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert laconic.Elastic("a:1").trace_directory() is None
    monkeypatch.setenv("LACONIC_TRACE", "/there")
    assert laconic.Elastic("a:1").trace_directory() == Path("/there")
    assert laconic.Elastic("a:1", trace="/here").trace_directory() == Path("/here")


def test_workers_know_the_labs_name_for_the_host() -> None:
    assert reports.LAB_HOST == orphans.HOST
