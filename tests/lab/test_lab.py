"""Hosts that are emulated: their names, rates and latencies, what ``laconic lab`` prints and keeps,
faults, and that nothing is left behind. All quick tests with emulated hosts are in this file."""

from __future__ import annotations

import functools
import json
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from benchmarks import stress

from laconic.cli import main
from laconic.lab.emulation import cluster as clusters_of_lab
from laconic.lab.emulation import program
from laconic.lab.emulation.cluster import (
    Cluster,
    ForwardError,
    Loopback,
    NamespacesUnavailable,
    Network,
    launch,
)
from laconic.lab.emulation.injection import Injection

pytestmark = pytest.mark.hosts

RATE, LATENCY, SIZE = 20e6, 0.04, 1_000_000


@functools.cache
def refusal() -> str | None:
    """Return why hosts with latencies cannot be emulated here, or None where they can."""
    try:
        with Cluster(Network(1, latency=0.01)):
            return None
    except (NamespacesUnavailable, ForwardError) as error:
        return str(error)


def with_namespaces(test: Callable[..., None]) -> Callable[..., None]:
    """Run ``test`` where hosts can be emulated; elsewhere check that the refusal has a reason."""

    @functools.wraps(test)
    def checked(*arguments: object, **named: object) -> None:
        if refusal() is None:
            test(*arguments, **named)
        else:
            assert re.match(r"no network namespaces: \S|.*latency, jitter and loss", str(refusal()))

    return checked


def clusters() -> Iterator[Cluster | Loopback]:
    """Yield each kind of cluster with two hosts, as far as it can be had here."""
    if refusal() is None:
        with Cluster(Network(2)) as emulated:
            yield emulated
    with Loopback(Network(2)) as loopback:
        yield loopback


def until(condition: Callable[[], bool], seconds: float = 100.0) -> None:
    """Wait until ``condition`` holds of the world outside, which notifies nobody."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def of_launcher(pid: int) -> list[psutil.Process]:
    """The processes of a lab."""
    found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    return found


# -- hosts ----

TALK = """
import os, socket, sys, time
host, size = int(os.environ["GROUP_RANK"]), int(sys.argv[1])
names = [socket.gethostbyname(name) for name in ("host0", "host1", "localhost")]
print(socket.gethostname(), *names, socket.getnameinfo(("10.77.0.2", 0), 0)[0])
if host == 1:
    with socket.create_server(("", 5000)) as server:
        connection, _ = server.accept()
        for _ in range(5): connection.sendall(connection.recv(1))
        got = 0
        while got < size: got += len(connection.recv(1 << 20))
        connection.sendall(b"!")
else:
    while True:
        try: connection = socket.create_connection(("host1", 5000)); break
        except ConnectionRefusedError: time.sleep(0.02)
    trips = []
    for _ in range(5):
        start = time.perf_counter(); connection.sendall(b"x"); connection.recv(1)
        trips.append(time.perf_counter() - start)
    start = time.perf_counter(); connection.sendall(bytes(size)); connection.recv(1)
    print(min(trips), time.perf_counter() - start)
"""


@with_namespaces
def test_two_hosts_have_names_a_rate_and_a_latency_and_count_what_they_send() -> None:
    before = Path("/etc/hosts").read_bytes(), socket.gethostname()
    with Cluster(Network(2, RATE, LATENCY)) as cluster:
        job = launch(cluster, [sys.executable, "-I", "-S", "-c", TALK, str(SIZE)])
        assert [outcome.exit_code for outcome in job.wait(100)] == [0, 0], job.stderr(0)
        said = [job.stdout(host).splitlines() for host in (0, 1)]
        addresses = " ".join([*cluster.addresses, "127.0.0.1"])
        assert [lines[0] for lines in said] == [f"host{h} {addresses} host1" for h in (0, 1)]
        trip, seconds = map(float, said[0][1].split())
        assert trip >= LATENCY, "never less than given"
        assert seconds >= 0.9 * (SIZE * 8 / RATE) + LATENCY / 2 - 24 * 1024 * 8 / RATE
        sent = cluster.tx_bytes()
        assert SIZE < sent[0] < 1.2 * SIZE and sent[1] < 0.1 * SIZE
        assert cluster.counts()[0].lost == 0
    assert (Path("/etc/hosts").read_bytes(), socket.gethostname()) == before


def test_ranks_get_the_variables_of_torchrun_and_one_that_dies_ends_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("RANK", "17")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK OMP_NUM_THREADS MINE"
    script = "; ".join(f"printf '%s ' ${name}" for name in names.split())
    script += "; echo $TORCHELASTIC_USE_AGENT_STORE $MASTER_ADDR"
    for cluster in clusters():
        job = launch(cluster, ["sh", "-c", script], per_host=2, env={"MINE": "m"})
        assert [outcome.exit_code for outcome in job.wait(100)] == [0] * 4
        for rank in range(4):
            line = f"{rank} 4 {rank % 2} 2 {rank // 2} 1 m {cluster.addresses[0]}\n"
            assert job.stdout(rank) == line
        for death, how in (("exit 3", "exit code 3"), ("kill -9 $$", "SIGKILL")):
            dies = f'echo "rank $RANK" >&2; test $RANK = 2 && {death}; exec sleep 1000'
            outcomes = launch(cluster, ["sh", "-c", dies], per_host=2).wait(100, grace=0.5)
            assert [(o.rank, o.host) for o in outcomes] == [(0, 0), (1, 0), (2, 1), (3, 1)]
            assert [o.failed for o in outcomes] == [False, False, True, False]
            assert [o.stopped for o in outcomes] == [True, True, False, True]
            assert str(outcomes[2]) == f"rank 2 on host1: {how}" and outcomes[2].stderr == "rank 2"
        missing = launch(cluster, ["no-such-program"]).wait(20)[0]
        assert missing.exit_code == 127 and "cannot start no-such-program" in missing.stderr
        waiting = launch(cluster, ["sleep", "1000"])
        with pytest.raises(TimeoutError, match="2 of 2 ranks still running"):
            waiting.wait(0.1)
        cluster.close()
        with pytest.raises(ValueError, match="closed"):
            cluster.start(1, ["true"], env={})


WAYS = [pytest.param(w, marks=[pytest.mark.slow] * (w != "kill -9")) for w in stress.WAYS]


@with_namespaces
@pytest.mark.parametrize("way", WAYS)
def test_every_way_out_of_a_lab_leaves_nothing(way: str, tmp_path: Path) -> None:
    """One of each; ``make stress`` does 200."""
    assert stress.start_and_end(way, str(tmp_path)) == []


# -- laconic lab ----


def lab(*arguments: str, script: str) -> int:
    """Run a shell script on two hosts of a lab; return the exit code."""
    return main(["lab", "--hosts", "2", *arguments, "--", "sh", "-c", script])


def test_lines_say_whose_they_are_and_files_have_every_byte(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "for i in 1 2 3; do printf $RANK-; echo $i; done; printf 'a\\377\\r\\ne\\r!' >&2"
    options = ["--per-host", "2", "--out", str(tmp_path), "--bandwidth", "host1=40mbit"]
    assert lab(*options, "--bandwidth", "20mbit", "--latency", "40ms", script=script) == 0
    said = capfd.readouterr()
    for rank in range(4):
        prefix = f"host{rank // 2}/rank{rank} | "
        own = [line for line in said.out.splitlines() if line.startswith(prefix)]
        assert own == [f"{prefix}{rank}-{number}" for number in (1, 2, 3)]
        assert (tmp_path / f"rank{rank}.err").read_bytes() == b"a\xff\r\ne\r!"
    assert "2 hosts, 20 Mbit/s each, host1 40 Mbit/s, 40 ms latency\n" in said.err
    kept = json.loads((tmp_path / "rates.json").read_text())
    assert kept["failed"] is None and kept["command"][:2] == ["sh", "-c"]
    assert [host["bandwidth"] for host in kept["hosts"]] == [20e6, 40e6]
    assert [host["latency"] for host in kept["hosts"]] == [0.04, 0.04]
    assert bool(kept["sent"]) == (refusal() is None) == (kept["network"] == "emulated")


def test_torchrun_starts_once_on_a_host_and_finds_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torchrun = tmp_path / "torchrun"
    names = ["NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT"]
    torchrun.write_text(f"#!/bin/sh\necho {' '.join(f'$PET_{name}' for name in names)} $RANK\n")
    torchrun.chmod(0o755)
    assert main(["lab", "--hosts", "2", "--per-host", "3", "--", str(torchrun)]) == 0
    first, second = sorted(capfd.readouterr().out.splitlines())
    assert re.fullmatch(r"host0 \| 2 0 3 [\d.]+ \d+", first)
    assert second == first.replace("host0 | 2 0", "host1 | 2 1")
    assert main(["lab", "--", str(torchrun), "--nproc-per-node", "2", "train.py"]) == 2
    assert "--per-host in place of torchrun's --nproc-per-node" in capfd.readouterr().err


def test_the_first_failure_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "GRACE_SECONDS", 0.5)
    script = "test $RANK = 0 && exec sleep 1000; seq 20 >&2; exit 3"
    assert lab("--out", str(tmp_path), script=script) == 3
    last = capfd.readouterr().err.partition("host1/rank1 failed first: exit code 3;")[2]
    assert re.findall(r"laconic:   (\d+)\n", last) == [str(number) for number in range(11, 21)]
    failed = json.loads((tmp_path / "rates.json").read_text())["failed"]
    assert failed == {"process": "host1/rank1", "how": "exit code 3"}


def test_without_namespaces_it_says_what_is_not_slowed_down(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Cluster:
        raise NamespacesUnavailable("no network namespaces: on purpose")

    monkeypatch.setattr(clusters_of_lab, "Cluster", refuse)
    script = 'echo "$LACONIC_BANDWIDTH $LACONIC_LATENCY"'
    options = ["--bandwidth", "10mbit", "--bandwidth", "1=unlimited", "--latency", "20ms"]
    assert lab(*options, script=script) == 0
    said = capfd.readouterr()
    told = sorted(line.partition(" | ")[2] for line in said.out.splitlines())
    assert told == [" 0.02", "10000000.0 0.02"]
    assert "no network namespaces: on purpose" in said.err
    assert "NOT slowed down: programs without laconic." in said.err
    assert lab("--loss", "1%", script="true") == 2
    assert "jitter and loss need emulated hosts" in capfd.readouterr().err


def test_faults_happen_and_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed program is started again; one that fails after a hang is, too; the lab goes on."""
    act = Injection.act
    first, again, out = (tmp_path / name for name in ("first", "again", "out"))

    def when_started(self: Injection, now: float) -> None:  # however long that takes
        if first.exists():
            act(self, now)

    monkeypatch.setattr(Injection, "act", when_started)
    script = f"""
    echo "$LACONIC_COORDINATOR"
    if test $RANK = 0; then until test -e {again}; do sleep 0.05; done; rm {again}; exit; fi
    if mkdir {first} 2>/dev/null; then END; fi
    touch {again}
    """
    for option, ends, happened in (
        ("--kill 1@0.1s", "exec sleep 1000", ["killed", "started again"]),
        ("--hang 1@0.1s..0.3s", "sleep 1; exit 3",
         ["stopped", "continued", "failed after its fault: exit code 3", "started again"]),
    ):  # fmt: skip
        options = [*option.split(), "--repair", "0.1s", "--out", str(out)]
        assert lab(*options, script=script.replace("END", ends)) == 0
        said = capfd.readouterr()
        summary = said.err.partition("laconic: faults:\n")[2]
        assert re.findall(r"s: host1 (.*)\n", summary) == happened
        assert len(re.findall(r"^host1/rank1 \| \S+:\d+$", said.out, re.M)) == 2
        rates = json.loads((out / "rates.json").read_text())
        assert [fault["what"] for fault in rates["faults"]] == happened
        assert rates["failed"] is None and (out / "rank1.out").read_text().count("\n") == 2
        first.rmdir()


# -- a host that nothing reaches any more ----

TRAIN = """
import torch, laconic
torch.set_num_threads(1)
laconic.init()
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sync = laconic.attach(model, optimizer, laconic.local_sgd(2))
try:
    while True:
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        if sync.step == 20:
            print("trains", flush=True)
except laconic.LinkError as error:
    print("LinkError", list(error.ranks))
"""


@pytest.mark.slow  # a minute, of which 10 s pass without a byte
@with_namespaces
def test_an_isolated_host_is_named_long_before_the_time_out() -> None:
    """Which is 600 s."""
    with Cluster(Network(2)) as cluster:
        job = launch(cluster, [sys.executable, "-c", TRAIN])
        until(lambda: job.stdout(0) == job.stdout(1) == "trains\n", 200)
        cluster.cut([(0, 1)])
        job.wait(200)
        said = [job.stdout(rank).splitlines()[1] for rank in (0, 1)]
        assert said == ["LinkError [1]", "LinkError [0]"], job.stderr(0)
