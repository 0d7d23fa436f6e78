"""Real races on emulated hosts, and losses of packets."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.stress import alive

from laconic.algorithms.parse import parse_recipe
from laconic.cli import main
from laconic.lab.emulation import cluster as clusters_of_lab
from laconic.lab.emulation.cluster import Cluster, NamespacesUnavailable, Network
from laconic.lab.race import rivals
from laconic.lab.race.result import NO_COMMUNICATION, Result, read
from laconic.lab.race.wording import task

from tests.lab.test_lab import of_launcher, refusal, until, with_namespaces

pytestmark = [pytest.mark.slow, pytest.mark.hosts]

ROOT = Path(__file__).parents[2]
WORKLOAD, RULES = ROOT / "examples" / "my_workload.py", ROOT / "examples" / "my_rules.py"
DIGITS = 9_610
"""Parameters of the digits workload's model: 64 x 128 + 128 + 128 x 10 + 10."""


def compare(directory: Path, *arguments: str, code: int = 0) -> Result:
    assert main(["compare", *arguments, "--out", str(directory)]) == code
    return read(directory)


def law(recipe: str, steps: int, hosts: int) -> float:
    """Bytes that each host sends per step, by the formula."""
    made = parse_recipe(recipe)
    assert isinstance(made, tuple)
    rounds = sum(r.when(step) for r in made for step in range(1, steps + 1))
    padded = -(-DIGITS // hosts) * hosts * 4
    if recipe == "sgp":  # to one peer, with the push weight
        return padded + 8
    return rounds / steps * 2 * (hosts - 1) / hosts * padded


def test_a_race_of_steps_counts_bytes_by_the_law_and_on_the_interface(tmp_path: Path) -> None:
    hosts, steps = 3, 24
    recipes = ("ddp", "slowmo(local_sgd(4), period=12)", "sgp")
    options = ["--hosts", "3", "--steps", "24", "--bandwidth", "50mbit", "--workload", "digits"]
    race = compare(tmp_path, *recipes, *options)
    assert [row.recipe for row in race.rows] == [NO_COMMUNICATION, *recipes]
    for row in race.rows:
        assert row.status == "ok" and row.steps == steps and 0 <= row.waiting <= 1
        first, last = row.curve[0], row.curve[-1]
        assert first.loss is not None and row.loss is not None
        assert 0 < row.loss < first.loss == pytest.approx(math.log(10), rel=0.1)
        assert (last.step, last.loss) == (steps, row.loss)
        sent = row.ledger_bytes_per_step * steps
        assert last.megabytes * 1e6 == pytest.approx(sent, rel=1e-3)
        assert row.curve[-1].distance is not None
        if row.recipe == NO_COMMUNICATION:
            continue
        expected = law(row.recipe, steps, hosts)
        assert expected <= row.ledger_bytes_per_step <= expected + 24 * (hosts - 1)
        if refusal() is None:
            assert row.interface_bytes_per_step is not None
            ratio = row.interface_bytes_per_step / row.ledger_bytes_per_step
            assert 0.95 <= ratio <= 1.05 + 1500 / expected


def test_without_namespaces_a_race_slows_down_its_own_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Cluster:
        raise NamespacesUnavailable("no network namespaces: on purpose")

    monkeypatch.setattr(clusters_of_lab, "Cluster", refuse)
    options = ["--hosts", "2", "--steps", "8", "--bandwidth", "2mbit", "--workload", "digits"]
    race = compare(tmp_path, "ddp()", *options, "--free", "ddp()")
    assert race.settings["network"] == "throttled"
    _, slow, free = race.rows
    least = 8 * slow.ledger_bytes_per_step / 2e6
    assert slow.seconds_per_step > 0.9 * least > free.seconds_per_step
    assert slow.loss == free.loss and slow.interface_bytes_per_step is None
    scaled = compare(tmp_path, "ddp()", *options, "--lr-scale", "2")
    assert scaled.rows[1].loss != slow.loss and "learning rates times 2" in task(scaled)


@with_namespaces
def test_a_race_goes_on_after_a_recipe_that_diverges(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two seeds, own rules and workload, unlike hosts."""
    wild, own = "diloco(1, lr=1e30, momentum=0.0)", "slowmo(sign_pull(4, size=0.02), period=8)"
    options = ["--hosts", "2", "--steps", "16", "--rules", str(RULES)]
    options += ["--seed", "3", "--repeat", "2"]
    unlike = ["--bandwidth", "1=20mbit", "--slow-host", "0=1.5"]
    unlike += ["--workload", str(WORKLOAD)]
    race = compare(tmp_path / "out", wild, own, *options, *unlike, code=1)
    said = " ".join(capsys.readouterr().out.split())
    rows = {(row.seed, row.recipe): row for row in race.rows}
    assert list(rows) == [(s, n) for s in (3, 4) for n in (NO_COMMUNICATION, wild, own)]
    assert rows[3, wild].status == "diverged" and rows[3, wild].loss is None
    assert rows[3, own].status == rows[4, own].status == "ok"
    assert rows[3, own].loss != rows[4, own].loss
    assert race.settings["host_bandwidth"] == {"1": 20e6}
    assert f"Not counted: {wild} diverged" in said and "2 runs each, seeds 3, 4" in said


@with_namespaces
def test_other_libraries_and_quorums_beside_the_recipes(tmp_path: Path) -> None:
    """Those that are installed train as well as laconic's; the others say what to install."""
    options = ["--workload", str(WORKLOAD), "--hosts", "2", "--steps", "16"]
    peers = ["torch-ddp", "accelerate(4)", "torchft(4)"]
    flags = [word for name in peers for word in ("--peer", name)] + ["--free", "local_sgd(4)"]
    race = compare(tmp_path / "peers", "ddp()", "local_sgd(4)", *options, *flags)
    rows = {row.recipe: row for row in race.rows}
    assert rows["local_sgd(4), free network"].loss == rows["local_sgd(4)"].loss
    for name, ours in zip(peers, ("ddp()", "local_sgd(4)", "local_sgd(4)"), strict=True):
        row = rows[name]
        if rivals.find(name).version() is None:
            assert row.status == "absent" and "not installed: run make peers" in (row.error or "")
        else:
            assert row.peer and row.status == "ok" and row.interface_bytes_per_step, row.error
            assert row.loss == pytest.approx(rows[ours].loss, rel=1e-3)
    recipe = 'diloco(24, momentum=0.9, quorum=3, grace=0.01, pace="own")'
    unlike = ["--slow-host", "3=3", "--bandwidth", "2=10mbit", "--seconds", "3"]
    race = compare(tmp_path / "quorum", recipe, *unlike, "--workload", "digits")
    row = race.rows[-1]
    assert row.status == "ok" and len(row.worker_steps) == 4 and row.seconds >= 3.0
    assert row.worker_steps[3] < row.worker_steps[0], "the slow host takes fewer"
    assert row.notes[0].startswith("workers took ")


@with_namespaces
def test_an_interrupted_race_keeps_what_there_is(tmp_path: Path) -> None:
    recipes = ["local_sgd(4)", "--hosts", "2", "--bandwidth", "2mbit", "--seconds", "20"]
    command = ["compare", *recipes, "--workload", "digits", "--out", str(tmp_path)]
    argv = [sys.executable, "-m", "laconic", *command]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        members: list[psutil.Process] = []

        def trains() -> bool:
            members[:] = of_launcher(process.pid)
            with contextlib.suppress(psutil.NoSuchProcess):
                return any("local_sgd" in " ".join(member.cmdline()) for member in members)
            return False

        until(trains, 250)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=200)
    assert process.returncode == 130 and said.endswith("laconic: interrupted\n")
    assert "Traceback" not in said
    until(lambda: not alive(members))
    assert [row.recipe for row in read(tmp_path).rows] == [NO_COMMUNICATION]


@with_namespaces
def test_jitter_and_losses_are_as_given_and_follow_the_seed() -> None:
    take = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)
    s.bind(("", 7001))
    print("ready", flush=True)
    while (data := s.recv(100)) != b"end": print(data.decode())
"""
    give = """
import socket, sys, time
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.sendto(b"-1", (sys.argv[1], 7001)); time.sleep(0.3)  # the kernel drops what waits for ARP
    for number in range(20_000): s.sendto(str(number).encode(), (sys.argv[1], 7001))
    time.sleep(0.5)
    for _ in range(20): s.sendto(b"end", (sys.argv[1], 7001))
"""
    arrived, argv = [], [sys.executable, "-I", "-S", "-c"]
    for seed in (0, 0, 1):
        network = Network(2, None, 0.01, 0.005, single={"loss": {1: 0.2}}, seed=seed)
        with Cluster(network) as cluster:
            known: Any = {"env": dict(os.environ), "stdout": subprocess.PIPE}
            receiver = cluster.start(1, [*argv, take], **known)
            assert receiver.stdout is not None and receiver.stdout.readline() == b"ready\n"
            sender = cluster.start(0, [*argv, give, cluster.addresses[1]], **known)
            numbers = [int(line) for line in receiver.communicate(timeout=200)[0].split()][1:]
            sender.communicate(timeout=100)
            lost = 20_000 - len(numbers)
            assert numbers == sorted(numbers), "jitter keeps the order"
            assert lost == pytest.approx(2000, rel=0.1)
            assert 0 <= cluster.counts()[0].lost - lost <= 21
            arrived.append(numbers)
    assert arrived[0] == arrived[1] != arrived[2]
