"""``laconic compare`` as a user runs it: real races, mistakes, accidents and interruptions."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.recipes import RECIPES
from laconic.cli import main
from laconic.lab.emulation.cluster import NamespacesUnavailable
from laconic.lab.race import runner
from laconic.lab.race.report import NO_COMMUNICATION, Result, Row, read
from laconic.links import cost

from tests.lab.test_cluster import MARK, holders, marked, refusal, until
from tests.support import programs

DIGITS = 9_610
"""Parameters of the digits workload's model: 64 x 128 + 128 + 128 x 10 + 10."""
SLOW = ("--bandwidth", "2mbit", "--steps", "400")
"""A race in which averaging once takes 0.15 s, so ddp takes a minute and others a second."""


@dataclass
class Race:
    """A run of the command that has ended."""

    code: int
    out: str
    err: str
    directory: Path

    @property
    def text(self) -> str:
        """What was printed, as if on one long line."""
        return " ".join(self.out.split())

    @property
    def result(self) -> Result:
        return read(self.directory)

    def row(self, recipe: str) -> Row:
        (row,) = [row for row in self.result.rows if row.recipe == recipe]
        return row


class Running:
    """A run of the command that has not ended, or not yet been seen to."""

    def __init__(self, recipes: Sequence[str], options: Sequence[str], directory: Path) -> None:
        self.directory = directory
        self._mark = str(uuid.uuid4())
        directory.parent.mkdir(exist_ok=True)
        workload = ["--workload", "digits", "--out", str(directory)]
        self.process = subprocess.Popen(
            [*programs.NEW, "-m", "laconic", "compare", *recipes, *options, *workload],
            env={**os.environ, MARK: self._mark, "COLUMNS": "160"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=directory.parent,
            start_new_session=True,
        )

    def workers(self, recipe: str) -> dict[int, int]:
        """The processes by rank that train `recipe`, empty for the row without communication."""
        ranks: dict[int, int] = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if json.dumps({"recipe": recipe})[1:-1] in " ".join(child.cmdline()):
                    ranks[int(child.environ()["RANK"])] = child.pid
            except (psutil.Error, KeyError, OSError):
                pass  # ended meanwhile, or is only starting
        return ranks

    def worker(self, recipe: str, rank: int) -> int | None:
        """The process that trains `recipe` as `rank`, once it has taken a step."""
        ranks = self.workers(recipe)
        try:
            said = Path(f"/proc/{ranks[0]}/fd/1").read_text()
            return ranks[rank] if '"event": "step"' in said else None
        except (OSError, KeyError):
            return None

    def training(self, recipe: str, rank: int = 0) -> int:
        """Wait until `recipe` is being trained; the process that does so as `rank`."""
        until(lambda: self.worker(recipe, rank) is not None, 200)
        pid = self.worker(recipe, rank)
        assert pid is not None
        return pid

    def namespaces(self) -> set[int]:
        """Those that its processes are in now, but for this one's own."""
        return set(marked(self._mark).values()) - {os.stat("/proc/self/ns/net").st_ino}

    def end(self, seconds: float) -> Race:
        """Wait for its end, and see that it left no process running."""
        out, err = self.process.communicate(timeout=seconds)
        until(lambda: not marked(self._mark))
        return Race(self.process.returncode, out, err, self.directory)


@contextmanager
def running(recipes: Sequence[str], options: Sequence[str], directory: Path) -> Iterator[Running]:
    started = Running(recipes, options, directory)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.communicate(timeout=250)


def check(row: Row, result: Result) -> None:
    """What holds of every row that came to its end."""
    assert row.status == "ok" and row.error is None
    assert row.steps > 0 and row.seconds > 0
    assert row.seconds_per_step == pytest.approx(row.seconds / row.steps)
    assert 0 <= row.waiting <= 1
    first, last = row.curve[0], row.curve[-1]
    assert (first.step, first.seconds, first.megabytes) == (0, 0.0, 0.0)
    assert last.step == row.steps and last.loss == row.loss
    assert first.loss is not None and row.loss is not None
    assert 0 < row.loss < first.loss == pytest.approx(math.log(10), rel=0.1)
    assert last.seconds == pytest.approx(row.seconds, rel=0.3, abs=0.3)
    assert last.megabytes * 1e6 == pytest.approx(row.ledger_bytes_per_step * row.steps, rel=1e-3)
    for before, after in pairwise(row.curve):
        assert before.step < after.step
        assert before.seconds < after.seconds
        assert before.megabytes <= after.megabytes
    assert len(row.curve) <= 8 + 2
    check_record(row, result)
    assert set(result.settings) >= {"workload", "hosts", "per_host", "bandwidth", "seed", "network"}
    assert result.settings["parameters"] == DIGITS


def check_record(row: Row, result: Result) -> None:
    """The timeline of every rank, as long as its training clock ran; rounds as scheduled; and how
    far the workers are apart."""
    assert len(row.timeline) == result.settings["hosts"]
    trained = waited = 0.0
    for spans in row.timeline:
        assert all(0 <= start <= end for start, end, _ in spans)
        training = [(start, end) for start, end, kind in spans if kind != "send"]
        assert all(before[1] <= after[0] + 1e-4 for before, after in pairwise(training))
        trained += sum(end - start for start, end in training) / len(row.timeline)
        waits = [end - start for start, end, kind in spans if kind == "wait"]
        waited += sum(waits) / len(row.timeline)
    # roughly, as the machine may be busy between two looks at the clock; exactly in test_timeline
    assert trained == pytest.approx(row.seconds, rel=0.3, abs=0.3)
    assert waited == pytest.approx(row.waiting * row.seconds, rel=0.3, abs=0.3)
    due = () if row.recipe == NO_COMMUNICATION else parse_recipe(row.recipe)
    steps = [step for step in range(1, row.steps + 1) if any(r.when(step) for r in due)]
    assert sorted(step for rounds in row.rounds for step in rounds.steps()) == steps
    sent = sum(rounds.bytes * len(rounds.steps()) for rounds in row.rounds)
    assert sent == pytest.approx(row.ledger_bytes_per_step * row.steps, abs=100)
    assert row.curve[0].distance == pytest.approx(0, abs=1e-7)
    apart = row.curve[-1].distance
    assert apart is not None
    assert apart < 1e-7 if row.recipe.startswith("ddp") else apart > 1e-6


def law(recipe: str, steps: int, hosts: int) -> float:
    """Bytes that each host sends per step, by the formula."""
    rounds = sum(r.when(step) for r in parse_recipe(recipe) for step in range(1, steps + 1))
    padded = -(-DIGITS // hosts) * hosts * 4
    if recipe == "sgp":  # to one peer, with the push weight
        return padded + 8
    return rounds / steps * 2 * (hosts - 1) / hosts * padded


def network() -> str:
    """What the command finds on this machine."""
    return "emulated" if refusal() is None else "throttled"


# -- races ----


def test_a_race_of_steps(tmp_path: Path) -> None:
    hosts, steps = 3, 24
    recipes = ("ddp", "slowmo(local_sgd(4), period=12)", "sgp")
    options = ["--hosts", str(hosts), "--steps", str(steps), "--bandwidth", "50mbit", "--seed", "3"]
    with running(recipes, options, tmp_path / "new" / "out") as started:
        race = started.end(240)
    assert race.code == 0, race.err
    assert "Traceback" not in race.err and "Warning" not in race.err

    # results.json: standard JSON, complete and consistent
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    text = (race.directory / "results.json").read_text()
    assert json.loads(text, parse_constant=refuse)["rows"]
    result = race.result
    assert [row.recipe for row in result.rows] == [NO_COMMUNICATION, *recipes]
    expected = {
        "workload": "digits", "data": None, "hosts": hosts, "per_host": 1, "bandwidth": 50e6,
        "latency": 0.0, "seconds": None, "steps": steps, "seed": 3, "network": network(),
    }  # fmt: skip
    assert expected.items() <= result.settings.items()
    assert result.versions.keys() == {"python", "torch"}
    assert int(result.machine["cores"]) >= 1
    assert result.command.startswith(
        "laconic compare ddp 'slowmo(local_sgd(4), period=12)' sgp --hosts"
    )
    for row in result.rows:
        check(row, result)
        assert row.steps == steps

    # bytes: by the law, and by the interface's counter
    silent, *rivals = result.rows
    small = 24 * (hosts - 1)  # once: an announcement of 8 bytes, and two figures of 8
    assert silent.ledger_bytes_per_step <= small
    for row in rivals:
        sent = law(row.recipe, steps, hosts)
        assert sent <= row.ledger_bytes_per_step <= sent + small
        if network() == "emulated":
            assert row.interface_bytes_per_step is not None
            ratio = row.interface_bytes_per_step / row.ledger_bytes_per_step
            assert 0.95 <= ratio <= 1.05 + 1500 / sent
        else:
            assert row.interface_bytes_per_step is None
    ddp, slowmo, _ = rivals
    assert ddp.ledger_bytes_per_step / slowmo.ledger_bytes_per_step == pytest.approx(4, rel=0.01)
    seconds = cost.mean(DIGITS * 4, hosts).seconds(50e6, 0.0)
    assert ddp.seconds_per_step > 0.5 * seconds  # the token bucket starts full

    # what is shown
    for name in (f"{NO_COMMUNICATION}†", *recipes):
        assert re.search(rf"^{re.escape(name)} .*\b24\b", race.out, re.MULTILINE), race.out
    assert "3 hosts × 1 process, 50 Mbit/s" in race.out
    assert "After 24 steps per recipe on" in race.text
    for name in recipes:
        assert f"{name}: ok: 24 steps" in race.err
    check_plots(race)


def check_plots(race: Race) -> None:
    """Pictures are there, are told, and show something."""
    assert {path.name for path in race.directory.iterdir()} == {
        "report.html", "results.json", "results.csv", "rows.csv", "loss.png", "loss.svg",
    }  # fmt: skip
    for path in race.directory.iterdir():
        assert str(path) in race.out.replace("\n", "")
    png = (race.directory / "loss.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n") and b"IEND" in png[-12:]
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    assert width >= 600 and height >= 200 and len(png) > 20_000
    svg = ElementTree.parse(race.directory / "loss.svg").getroot()
    assert len(svg.findall(".//{http://www.w3.org/2000/svg}path")) > 20


def test_a_race_of_seconds_with_a_recipe_that_diverges_and_one_that_is_killed(
    tmp_path: Path,
) -> None:
    wild, fine = "diloco(1, lr=1e30, momentum=0.0)", "local_sgd(8)"
    recipes = (wild, "ddp", fine)
    options = ["--hosts", "2", "--seconds", "3", "--bandwidth", "10mbit"]
    with running(recipes, options, tmp_path / "out") as started:
        victim = started.training("ddp", rank=1)
        namespaces = started.namespaces()
        assert len(namespaces) == (3 if network() == "emulated" else 0)
        os.kill(victim, signal.SIGKILL)
        race = started.end(240)
    assert not holders(namespaces)
    assert race.code == 1, race.err
    assert "Traceback" not in race.err
    result = race.result
    assert [row.recipe for row in result.rows] == [NO_COMMUNICATION, *recipes]
    assert (result.settings["seconds"], result.settings["steps"]) == (3.0, None)

    diverged = race.row(wild)
    assert diverged.status == "diverged" and diverged.loss is None
    assert 0 < diverged.steps < race.row(fine).steps
    assert diverged.error == f"the loss is not a number after step {diverged.steps}"
    failed = race.row("ddp")
    assert failed.status == "failed" and failed.loss is None and failed.curve == ()
    assert failed.error == "rank 1 on host1: SIGKILL"
    for row in (diverged, failed):
        assert re.search(rf"^{re.escape(row.recipe)} .* {row.status}", race.out, re.MULTILINE)
        assert f"{row.recipe}: {row.status}: {row.error}" in race.text
        assert f"{row.recipe}: {row.status}: {row.error}" in race.err
    assert f"not counted: {wild} diverged and ddp failed." in race.text

    for name in (NO_COMMUNICATION, fine):
        row = race.row(name)
        check(row, result)
        assert 1.0 <= row.seconds <= 15.0
        assert len(row.curve) >= 4
        assert f"\n{name}" in f"\n{race.out}"
    steps = race.row(fine).steps
    assert steps % 8 == 0
    assert law(fine, steps, 2) <= race.row(fine).ledger_bytes_per_step <= law(fine, steps, 2) + 24
    check_plots(race)


def test_workers_of_different_speeds_in_a_race(tmp_path: Path) -> None:
    """One worker computes three times as long, and one link is ten times slower. Every worker
    trains for the time of the race, and takes as many steps as it can."""
    recipe = 'diloco(24, momentum=0.9, quorum=3, grace=0.01, pace="own")'
    options = ["--slow-host", "3=3", "--bandwidth-host", "2=10mbit", "--seconds", "3"]
    with running([recipe], options, tmp_path / "out") as started:
        race = started.end(200)
    assert race.code == 0, race.err
    assert "Traceback" not in race.err
    row = race.row(recipe)
    if refusal() is not None:
        assert row.status == "absent"
        return
    assert row.status == "ok" and row.loss is not None
    assert len(row.worker_steps) == 4 and min(row.worker_steps) > 24
    assert row.worker_steps[3] < row.worker_steps[0]  # by how much: test_own's slow host
    assert abs(row.steps - sum(row.worker_steps) / 4) <= 0.5
    assert row.seconds_per_step == pytest.approx(row.seconds / row.steps)
    assert 3.0 <= row.seconds < 15.0, "each worker has all of the time, and ends its last step"
    assert len(row.curve) == 9 and row.curve[-1].step == row.steps
    for before, after in pairwise(row.curve):
        assert before.step < after.step and before.megabytes < after.megabytes
        assert before.seconds < after.seconds
    distances = [point.distance for point in row.curve[1:]]
    assert None not in distances and max(distances) > 1e-6, "0 right after a round of all workers"
    first = row.curve[0].loss
    assert first is not None and row.loss < first

    # the note, and what it was made of
    numbers = ", ".join(f"{steps:,}" for steps in row.worker_steps[:3])
    took = f"workers took {numbers} and {row.worker_steps[3]:,} steps, and part in "
    assert row.notes[0].startswith(took) and took in race.text
    parts = [*map(int, re.findall(r"\d+", row.notes[0].replace(",", "").split("part in")[1]))]
    *parts, rounds = parts
    assert len(parts) == 4 and 0 < max(parts) <= rounds
    sent = 2 * (sum(parts) - parts[0]) * DIGITS * 4 / 4  # there and back, the mean over 4 hosts
    assert row.ledger_bytes_per_step * row.steps == pytest.approx(sent, rel=0.02)
    assert sum(r.bytes * len(r.steps()) for r in row.rounds) == pytest.approx(sent, rel=0.05)
    few = "outer rounds; below about 100 an outer momentum of 0.9 may overshoot" in race.text
    assert few == (sum(parts) // 4 < 100), "those that a worker took part in, on average"

    # the timelines: what each worker did for all of the time
    assert len(row.timeline) == 4
    trained = [sum(b - a for a, b, kind in spans if kind != "send") for spans in row.timeline]
    assert sum(trained) / 4 == pytest.approx(row.seconds, rel=0.3)
    slow_link = sum(b - a for a, b, kind in row.timeline[2] if kind == "send")
    usual_link = sum(b - a for a, b, kind in row.timeline[1] if kind == "send")
    assert slow_link / parts[2] > usual_link / parts[1]
    check_plots(race)


def test_a_quorum_needs_emulated_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object, **options: object) -> NoReturn:
        raise NamespacesUnavailable("the kernel says no")

    monkeypatch.setattr(runner, "Cluster", refuse)
    recipe, out = "local_sgd(4, quorum=2)", tmp_path / "out"
    options = ["--hosts", "2", "--seconds", "1", "--workload", "digits", "--out", str(out)]
    assert main(["compare", recipe, *options]) == 0
    row = Race(0, "", "", out).row(recipe)
    assert (row.status, row.steps) == ("absent", 0)
    assert row.error == (
        "it needs emulated hosts: rounds with a quorum do not run over a throttled link"
    )
    assert "absent: it needs emulated hosts" in " ".join(capsys.readouterr().out.split())


def test_without_permission_for_namespaces_a_throttled_link_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "no network namespaces: the kernel says no"

    def refuse(*arguments: object, **options: object) -> NoReturn:
        raise NamespacesUnavailable(why)

    monkeypatch.setattr(runner, "Cluster", refuse)
    monkeypatch.setattr(sys, "argv", ["laconic", "compare", "on purpose"])
    monkeypatch.setenv("COLUMNS", "160")
    options = [
        "--hosts",
        "2",
        "--steps",
        "6",
        "--bandwidth",
        "5mbit",
        "--latency",
        "10ms",
        "--workload",
        "digits",
    ]
    code = main(["compare", "ddp()", *options, "--out", str(tmp_path / "out")])
    said = capsys.readouterr()
    ended = Race(code, said.out, said.err, tmp_path / "out")
    assert code == 0, said.err
    result = ended.result
    assert result.settings["network"] == "throttled"
    assert result.settings["reason"] == why
    assert result.command == "laconic compare 'on purpose'"
    assert "5 Mbit/s, 10 ms latency, throttled link: this system does not allow" in ended.text
    assert "on a link throttled to 5 Mbit/s" in ended.text
    assert "emulated" not in ended.out
    ddp = ended.row("ddp()")
    check(ddp, result)
    assert ddp.interface_bytes_per_step is None
    assert law("ddp", 6, 2) <= ddp.ledger_bytes_per_step <= law("ddp", 6, 2) + 24
    seconds = cost.mean(4 * DIGITS, 2).seconds(5e6, 0.005)  # half of the ping each way
    assert ddp.seconds_per_step >= seconds
    assert ddp.waiting > 0
    check_plots(ended)


# -- interruptions ----


def named_namespaces() -> list[str] | None:
    return sorted(os.listdir("/run/netns")) if Path("/run/netns").exists() else None


def test_an_interrupted_race_keeps_what_there_is(tmp_path: Path) -> None:
    before = named_namespaces()
    with running(["ddp", "local_sgd(4)"], ["--hosts", "2", *SLOW], tmp_path / "out") as started:
        started.training("ddp")
        namespaces = started.namespaces()
        assert len(namespaces) == (3 if network() == "emulated" else 0)
        started.process.send_signal(signal.SIGINT)
        race = started.end(200)
    assert race.code == 130, race.err
    assert not holders(namespaces) and named_namespaces() == before
    assert race.err.splitlines()[-1] == "laconic: interrupted"
    assert "Traceback" not in race.err
    (silent,) = race.result.rows
    check(silent, race.result)
    assert f"\n{NO_COMMUNICATION}†" in f"\n{race.out}"
    assert "No recipe finished" in race.out
    check_plots(race)


def test_a_race_that_is_terminated_at_its_start_leaves_nothing(tmp_path: Path) -> None:
    before = named_namespaces()
    with running(["ddp"], ["--hosts", "2", *SLOW], tmp_path / "out") as started:
        until(lambda: len(started.workers("")) == 2, 200)
        namespaces = started.namespaces()
        started.process.send_signal(signal.SIGTERM)
        race = started.end(200)
    assert race.code == 143, race.err
    assert not holders(namespaces) and named_namespaces() == before
    assert race.out == "" and "Traceback" not in race.err
    assert not (race.directory / "results.json").exists()


# -- mistakes ----


@pytest.fixture
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*arguments: object, **options: object) -> NoReturn:
        raise AssertionError(f"something was started: {arguments}")

    for name in ("Cluster", "Loopback", "launch"):
        monkeypatch.setattr(runner, name, started)


def mistake(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the one line on stderr says after its beginning."""
    assert main(["compare", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    match = re.fullmatch(r"laconic: (\S.*)\n", said.err)
    assert match, said.err
    return match[1]


ALL = f"choose from {', '.join(RECIPES)}, auto"
MISTAKES: dict[str, tuple[str, str]] = {
    "recipe": ("sgd(3)", ALL),
    "second recipe": ("ddp slowmo(sgd(3))", ALL),
    "empty recipe": ("''", "write it as in Python, such as 'local_sgd(12)'"),
    "silence": ("'no communication'", "write it as in Python, such as 'local_sgd(12)'"),
    "option": ("local_sgd(12,perod=3)", "its options are period, delay, codec, optimizer_state"),
    "argument": (
        "local_sgd",
        "local_sgd(period, *, delay=0, codec=None, optimizer_state='keep', ",
    ),
    "period": ("local_sgd(0)", "period must be an integer of at least 1, not 0"),
    "rate": ("ddp --bandwidth fast", "not a rate: 'fast'; give a positive number with bit"),
    "unit": ("ddp --bandwidth 3MB/s", "with bit, kbit, mbit or gbit (100mbit, 10 Gbit/s)"),
    "no unit": ("ddp --bandwidth 100", "not a rate: '100'; give a positive number with bit, kbit"),
    "no unit of one host": ("ddp --bandwidth-host 1=10", "not a rate: '10'"),
    "latency without a unit": ("ddp --latency 5", "not a latency: '5'; give 0, or a positive"),
    "no rate": ("ddp --bandwidth 0", "not a rate: '0'"),
    "below zero": ("ddp --bandwidth=-5mbit", "not a rate: '-5mbit'"),
    "too slow": ("ddp --bandwidth 1bit", "bandwidth must be"),
    "too fast": ("ddp --bandwidth 1000gbit", "bandwidth must be"),
    "latency": ("ddp --latency soon", "not a latency: 'soon'; give 0, or a positive number"),
    "latency below zero": (
        "ddp --latency=-1ms",
        "with us, ms, s, min, h or d (20ms, 1.5 s)",
    ),
    "workload": ("ddp --workload imagenet", "digits"),
    "no data": ("ddp --workload text --data missing.txt", "missing.txt: No such file"),
    "a directory": ("ddp --workload text --data .", "Is a directory"),
    "little data": (
        "ddp --workload text --data file",
        "the training text is too short: it has 3 bytes",
    ),
    "data for digits": ("ddp --data file", "the digits workload uses built-in data"),
    "hosts": ("ddp --hosts 0", "hosts must be"),
    "hosts below zero": ("ddp --hosts=-2", "hosts must be"),
    "many hosts": ("ddp --hosts 1000", "hosts must be from 1 to 250, not 1000"),
    "processes": ("ddp --per-host 0", "per-host must be an integer of at least 1, not 0"),
    "workers": ("ddp --hosts 200 --per-host 10", "2000 workers are too many for 1437 training im"),
    "steps": ("ddp --steps 0", "steps must be an integer of at least 1, not 0"),
    "steps below zero": ("ddp --steps=-3", "steps must be an integer of at least 1, not -3"),
    "no seconds": ("ddp --seconds 0", "seconds must be a finite number of at least 1, not 0"),
    "seconds below zero": (
        "ddp --seconds=-3",
        "seconds must be a finite number of at least 1, not -3",
    ),
    "steps with a quorum": (
        "diloco(8,quorum=3) --steps 9",
        "workers take different numbers of steps under diloco(8,quorum=3): give --seconds",
    ),
    "quorum": ("local_sgd(8,quorum=3) --hosts 2", "at most the number of workers, 2, not 3"),
    "seconds, no number": ("ddp --seconds nan", "seconds must be"),
    "seconds without end": ("ddp --seconds inf", "seconds must be"),
    "out, a file": ("ddp --steps 3 --out file", "file"),
    "out, under a file": ("ddp --steps 3 --out file/below", "file/below"),
    "out, taken": ("ddp --steps 3 --out taken", "taken"),
    "out, not to be written": ("ddp --steps 3 --out /proc", "/proc"),
}


@pytest.mark.usefixtures("_nothing_starts")
@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("abc")
    Path("taken/results.json").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    line, said = MISTAKES[case]
    words = ["" if word == "''" else word for word in line.split()]
    if "'no" in words:
        words = ["no communication"]
    workload = [] if "--workload" in words else ["--workload", "digits"]
    told = mistake([*words, *workload], capsys)
    assert said in told
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("_nothing_starts")
def test_an_unknown_workload_is_told_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    said = mistake(["ddp", "--workload", "imagenet"], capsys)
    choices = "digits, text, text-small, or your own, such as my.py:make"
    assert f"no workload 'imagenet': choose from {choices}" in said


@pytest.mark.usefixtures("_nothing_starts")
@pytest.mark.parametrize(
    "line",
    ["--hosts two", "--hosts 2.5", "--seconds soon", "--steps 1e3", "--seconds 3 --steps 4", "--x"],
)
def test_what_is_no_number_is_refused(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as raised:
        main(["compare", "ddp", *line.split()])
    assert raised.value.code == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.splitlines()[-1].startswith("laconic")
    assert line.split()[0] in said.err.splitlines()[-1]
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("_nothing_starts")
@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("rich", "laconic compare needs rich: pip install -e '.[lab]' in laconic's repository"),
        (
            "matplotlib",
            "laconic compare needs matplotlib: pip install -e '.[lab]' in laconic's repository",
        ),
        ("sklearn", "scikit-learn"),
    ],
)
def test_a_package_that_is_missing_is_named(
    missing: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    assert said in mistake(["ddp", "--workload", "digits", "--steps", "3"], capsys)
    assert not [*tmp_path.iterdir()]


def test_a_mistake_by_itself_in_a_shell(tmp_path: Path) -> None:
    """Nothing but the line, whatever Python and the libraries print while they are loaded."""
    ended = subprocess.run(
        [sys.executable, "-m", "laconic", "compare", "local_sgd(12)", "sgd(3)"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=200,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    said = "laconic: no recipe 'sgd' in 'sgd(3)' (did you mean 'lsgd'?)"
    assert ended.stderr == f"{said}: {ALL}\n"
    assert not [*tmp_path.iterdir()]


def test_handlers_of_signals_are_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After an interruption within the race, in this very process."""

    def interrupted(*arguments: object, **options: object) -> NoReturn:
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    monkeypatch.setattr(runner, "Cluster", interrupted)
    arguments = ["compare", "ddp", "--workload", "digits", "--steps", "3", "--out", str(tmp_path)]
    assert main(arguments) == 130
    assert capsys.readouterr().err == "laconic: interrupted\n"
    assert [signal.getsignal(number) for number in numbers] == before
    assert not [*tmp_path.iterdir()]
