"""Faults in the lab: plans, and what happens to hosts, connections and programs."""

from __future__ import annotations

import itertools
import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.cli import main
from laconic.lab.emulation import faults, program
from laconic.lab.emulation.cluster import Cluster, Loopback, NamespacesUnavailable, launch
from laconic.lab.emulation.faults import COORDINATOR, Cut, Hang, Kill, Plan
from laconic.lab.emulation.injection import Injection
from laconic.lab.emulation.jobs import Job

from tests.lab.test_cluster import until

PYTHON = [sys.executable, "-I", "-S", "-c"]
# Host 1 answers each byte that host 0 sends every 10 ms. Host 0 prints when the answers came.
ECHO = """
import os, socket, sys, time
if os.environ["GROUP_RANK"] == "1":
    with socket.create_server(("", 5000)) as server:
        connection, _ = server.accept()
        while piece := connection.recv(1): connection.sendall(piece)
while os.environ["GROUP_RANK"] == "0":
    try: connection = socket.create_connection(("host1", 5000)); break
    except ConnectionRefusedError: time.sleep(0.02)
while os.environ["GROUP_RANK"] == "0" and not os.path.exists(sys.argv[1]):
    connection.sendall(b"x"); connection.recv(1)
    print(time.monotonic(), flush=True)
    time.sleep(0.01)
"""


def emulated() -> bool:
    """Whether hosts are network namespaces here."""
    try:
        with Cluster(1):
            return True
    except NamespacesUnavailable:
        return False


@pytest.mark.parametrize(
    ("parse", "text", "fault"),
    [
        (faults.parse_kill, "2@30s", Kill(30.0, 2)),
        (faults.parse_kill, "host2@1min", Kill(60.0, 2)),
        (faults.parse_kill, "coordinator@30", Kill(30.0, COORDINATOR)),
        (faults.parse_hang, "1@40s", Hang(40.0, 1)),
        (faults.parse_hang, "1@40s..1min", Hang(40.0, 1, 60.0)),
        (faults.parse_cut, "0-3@50s..60s", Cut(50.0, 0, 3, 60.0)),
        (faults.parse_cut, "0@50s..60s", Cut(50.0, 0, None, 60.0)),
        (faults.parse_cut, "0@50s", Cut(50.0, 0)),
    ],
)
def test_faults_are_parsed(parse, text: str, fault: object) -> None:
    assert parse(text) == fault


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (faults.parse_kill, "2"),
        (faults.parse_kill, "x@30s"),
        (faults.parse_kill, "2@soon"),
        (faults.parse_kill, "2@1s..2s"),
        (faults.parse_hang, "@1s"),
        (faults.parse_cut, "0-x@1s..2s"),
        (faults.parse_cut, "0-@1s..2s"),
    ],
)
def test_a_text_that_is_no_fault_is_an_error_with_an_example(parse, text: str) -> None:
    with pytest.raises(ValueError, match=r"^not a (fault|kill): .*give .*, such as"):
        parse(text)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Kill(1.0, 4), "names 4, which does not exist: choose from 0 to 3, or coordinator"),
        (Cut(1.0, 0, 4, 2.0), "names 4, which does not exist"),
        (Cut(1.0, 2, 2, 2.0), "cuts 2 from itself"),
        (Hang(2.0, 1, 2.0), "begins at 2 cannot end at 2: its end must be later"),
        (Kill(-1.0, 1), "the time of a fault must be"),
    ],
)
def test_a_plan_is_checked(fault: faults.Fault, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan((fault,)).check(4)


def test_events_are_in_order_and_an_end_comes_before_a_beginning() -> None:
    cut, hang, kill = Cut(2.0, 0, 1, 3.0), Hang(3.0, 2, 4.0), Kill(1.0, COORDINATOR)
    plan = Plan((hang, cut, kill))
    plan.check(3)
    events = plan.events()
    assert [(event.at, event.fault, event.begins) for event in events] == [
        (1.0, kill, True), (2.0, cut, True), (3.0, cut, False), (3.0, hang, True),
        (4.0, hang, False),
    ]  # fmt: skip
    assert str(plan).splitlines() == ["1 kill coordinator", "2 cut 0-1 until 3", "3 hang 2 until 4"]


def test_times_can_be_steps() -> None:
    assert faults.parse_hang("1@40..70", time=int) == Hang(40, 1, 70)


@given(st.integers(0, 2**32), st.floats(0.0, 1000.0), st.floats(0.0, 1000.0))
def test_a_longer_horizon_only_adds_kills(seed: int, shorter: float, more: float) -> None:
    short = faults.random_kills(10.0, 4, seed, shorter).faults
    long = faults.random_kills(10.0, 4, seed, shorter + more).faults
    assert long[: len(short)] == short
    assert all(fault.at > shorter for fault in long[len(short) :])


def test_random_kills_have_the_mean_time_and_take_all_workers_alike() -> None:
    kills = faults.random_kills(60.0, 4, 7, 600_000.0).faults
    assert kills == faults.random_kills(60.0, [0, 1, 2, 3], 7, 600_000.0).faults
    assert kills != faults.random_kills(60.0, 4, 8, 600_000.0).faults
    gaps = [late.at - soon.at for soon, late in itertools.pairwise(kills)]
    assert len(kills) == pytest.approx(10_000, rel=0.05)
    assert sum(gap < 60.0 for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.02)
    for worker in range(4):
        assert sum(kill.worker == worker for kill in kills) == pytest.approx(2500, rel=0.1)


def test_a_cut_connection_carries_nothing_and_goes_on_after_it(tmp_path: Path) -> None:
    if not emulated():
        with Loopback(2) as loopback, pytest.raises(NamespacesUnavailable, match="cannot be cut"):
            loopback.cut([(0, 1)])
        return
    with Cluster(3) as cluster:
        job = launch(cluster, [*PYTHON, ECHO, str(tmp_path / "end")])
        until(lambda: job.stdout(0) != "")
        cluster.cut([(0, 1)])
        begin = time.monotonic()
        time.sleep(1.0)
        end, before = time.monotonic(), job.stdout(0)
        cluster.cut(())
        until(lambda: job.stdout(0) != before)
        (tmp_path / "end").touch()
        assert all(outcome.exit_code == 0 for outcome in job.wait(100))
        answers = [float(line) for line in job.stdout(0).splitlines()]
    # what has come before may still be printed
    assert not [at for at in answers if begin + 0.5 < at < end]


def said_last(job: Job) -> str:
    """Wait until host 1 prints nothing more while host 0 goes on; all that it has printed."""
    before, other, silent = job.stdout(1), job.stdout(0), 0
    end = time.monotonic() + 60
    while silent < 10:  # lines of the other host in a row, which come as often
        assert time.monotonic() < end
        time.sleep(0.01)
        if job.stdout(1) != before:
            before, silent = job.stdout(1), 0
        if job.stdout(0) != other:
            other, silent = job.stdout(0), silent + 1
    return before


@pytest.mark.parametrize("kind", [Cluster, Loopback])
def test_a_signal_reaches_all_processes_of_a_host(kind: type[Cluster] | type[Loopback]) -> None:
    if kind is Cluster and not emulated():
        return
    with kind(2) as cluster:
        script = "setsid sh -c 'while :; do echo x; sleep 0.05; done' & wait"
        job = launch(cluster, ["sh", "-c", script])
        until(lambda: job.stdout(0) != "" != job.stdout(1))
        cluster.signal(1, signal.SIGSTOP)
        before = said_last(job)
        cluster.signal(1, signal.SIGCONT)
        until(lambda: job.stdout(1) != before)
        cluster.signal(1, signal.SIGKILL)
        said_last(job)
        assert [outcome.signal for outcome in job.poll() or ()] == [None, "SIGKILL"]


def lab(*arguments: str, script: str) -> int:
    """Run a shell script on two hosts of a lab; return the exit code."""
    return main(["lab", "--hosts", "2", *arguments, "--", "sh", "-c", script])


def happened(said: str) -> list[str]:
    """What the summary says has happened, without the times."""
    lines = said.partition("laconic: faults:\n")[2].splitlines()
    return [line.split("s: ", 1)[1] for line in lines if line.startswith("laconic:   ")]


def hold_faults(monkeypatch: pytest.MonkeyPatch, until: Path) -> None:
    """Carry out no fault before the file ``until`` exists. A plan knows times only, and a busy
    machine may take longer than that to start a program."""
    act = Injection.act
    monkeypatch.setattr(
        Injection, "act", lambda self, now: act(self, now) if until.exists() else None
    )


@pytest.mark.parametrize("namespaces", [True, False])
def test_a_killed_program_is_started_again(
    namespaces: bool,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not namespaces:

        def refuse(*_: object, **__: object) -> Cluster:
            raise NamespacesUnavailable("no network namespaces: on purpose")

        monkeypatch.setattr(program, "Cluster", refuse)
    hold_faults(monkeypatch, tmp_path / "first")
    script = f"""
    echo "$LACONIC_COORDINATOR $GROUP_WORLD_SIZE"
    if test $RANK = 1 && mkdir {tmp_path}/first 2>/dev/null; then exec sleep 1000; fi
    if test $RANK = 0; then until test -e {tmp_path}/again; do sleep 0.05; done; fi
    test $RANK = 0 || touch {tmp_path}/again
    """
    out = tmp_path / "out"
    options = ["--kill", "1@0.5s", "--restart", "0.2s", "--out", str(out)]
    assert lab(*options, script=script) == 0
    said = capfd.readouterr()
    found = re.findall(r"^host(\d)/rank\d \| (\S+):(\d+) 2$", said.out, re.M)
    assert sorted(host for host, _, _ in found) == ["0", "1", "1"]
    if namespaces and emulated():
        assert {tuple(rest) for _, *rest in found} == {("10.77.0.3", "29400")}
    assert happened(said.err) == ["host1 killed", "host1 started again"]
    rates = json.loads((out / "rates.json").read_text())
    assert [(fault["host"], fault["what"]) for fault in rates["faults"]] == [
        ("host1", "killed"), ("host1", "started again"),
    ]  # fmt: skip
    assert rates["failed"] is None
    assert len(rates["hosts"]) == 2
    assert (out / "rank1.out").read_text().count("\n") == 2, "the log goes on"


def test_a_program_that_is_killed_for_good_does_not_end_the_lab(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert lab("--kill", "1@0.2s", "--kill", "1@1s", script="sleep $((2 + 998 * RANK))") == 0
    said = capfd.readouterr()
    assert happened(said.err) == ["host1 killed", "host1 not killed: it does not run"]
    assert "failed" not in said.err


def test_the_coordinator_is_killed_and_started_again(capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--kill", "coordinator@0.3s", "--restart", "0.3s"]
    assert lab(*options, script="sleep 2") == 0
    assert happened(capfd.readouterr().err) == ["coordinator killed", "coordinator started again"]


def test_a_host_hangs_and_fails_after_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an elastic worker does that was left behind."""
    hold_faults(monkeypatch, tmp_path / "first")
    script = f"""
    if test $RANK = 0; then until test -e {tmp_path}/again; do sleep 0.05; done; exit; fi
    if ! mkdir {tmp_path}/first 2>/dev/null; then touch {tmp_path}/again; exit; fi
    sleep 2; exit 3
    """
    options = ["--hang", "1@0.2s..1s", "--restart", "0.1s"]
    assert lab(*options, script=script) == 0
    assert happened(capfd.readouterr().err) == [
        "host1 stopped",
        "host1 continued",
        "host1 failed after its fault: exit code 3",
        "host1 started again",
    ]


def test_a_host_that_hangs_for_good_does_not_keep_the_lab(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert lab("--hang", "1@0.2s", script="sleep $((1 + 999 * RANK))") == 0
    assert happened(capfd.readouterr().err) == ["host1 stopped"]


def test_a_failure_that_no_fault_explains_ends_the_lab(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "GRACE_SECONDS", 0.2)
    script = "if test $RANK = 0; then sleep 1; exit 3; fi; exec sleep 1000"
    assert lab("--kill", "1@0.1s", "--restart", "0.1s", script=script) == 3
    assert "laconic: host0/rank0 failed: exit code 3" in capfd.readouterr().err


def test_cuts_from_the_command_line(capfd: pytest.CaptureFixture[str]) -> None:
    if not emulated():
        assert lab("--cut", "0-1@0.1s..0.3s", script="true") == 2
        assert "connections cannot be cut here: " in capfd.readouterr().err
        return
    options = ["--cut", "0-1@0.1s..0.4s", "--cut", "1@0.2s..0.3s"]
    assert lab(*options, script="sleep 1.5") == 0
    assert happened(capfd.readouterr().err) == [
        "host0 cut from host1",
        "host1 cut",
        "host1 connected again",
        "host0 connected again to host1",
    ]


def test_faults_are_listed(capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--mtbf", "60s", "--seed", "7", "--kill", "coordinator@30s"]
    assert main(["lab", *options, "--list-faults", "60s"]) == 0
    assert (
        capfd.readouterr().out
        == "23.4789 kill 1\n30 kill coordinator\n53.613 kill 0\n58.1246 kill 0\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "7", "true"], "--seed is the seed of random kills: give --mtbf"),
        (["--restart", "5s", "true"], "--restart needs faults: give --kill, --hang, --cut or"),
        (["--list-faults", "5s"], "--list-faults needs faults"),
        (["--kill", "4@1s", "true"], "a fault names 4, which does not exist: choose from 0 to 3"),
        (["--mtbf", "0", "true"], "mtbf must be"),
        (["--mtbf", "1s", "--restart", "x", "true"], "not a duration: 'x'"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", *arguments]) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"laconic: {message}") and said.count("\n") == 1
