from __future__ import annotations

import functools
import inspect
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import laconic
from laconic.lab.emulation.cluster import (
    Cluster,
    Loopback,
    NamespacesUnavailable,
    launch,
    terminate_as_exit,
)
from laconic.lab.emulation.jobs import signals_deferred

from tests.support import programs

PYTHON = [sys.executable, "-I", "-S", "-c"]
RATE = 100e6  # bit/s
SIZE = 4_000_000  # bytes
TIMES = 3
MARK = "LACONIC_TEST_MARK"

RECEIVER = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    start, size = time.perf_counter(), 0
    while piece := connection.recv(1 << 20):
        size += len(piece)
    print(size, time.perf_counter() - start)
"""
SENDER = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""
# The lab alone: importing torch with the package takes longer than all the rest.
IMPORT = f"""
import sys, types
for name in ("laconic", "laconic.lab"):
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [{str(Path(laconic.__file__).parents[1])!r} + "/" + name.replace(".", "/")]
from laconic.lab.emulation.cluster import *
"""
# On every host a program that outlives SIGTERM, with a child that left its session.
LAUNCHER = f"""
{IMPORT}
import contextlib
unwind = contextlib.nullcontext if sys.argv[1] == "plain" else terminate_as_exit
with unwind(), Cluster(2) as cluster:
    program = 'setsid sleep 1000 & trap "echo term" TERM; while :; do sleep 1000 & wait; done'
    launch(cluster, ["sh", "-c", program], log_dir=sys.argv[2])
    if sys.stdin.readline() == "raise\\n":
        raise RuntimeError("on purpose")
"""
# As root without any capability: what any other user is, where files are concerned.
POWERLESS = f"""
import ctypes, os, sys
if sys.argv[1] == "drop":
    libc = ctypes.CDLL(None)
    for capability in range(64):
        libc.prctl(24, capability, 0, 0, 0)
    os.execv(sys.executable, [sys.executable, "-s", sys.argv[2], "run"])
{IMPORT}
try:
    with Cluster(2) as cluster:
        job = launch(cluster, ["hostname"])
        assert all(outcome.exit_code == 0 for outcome in job.wait(100)), job.wait(100)
        print("works on", job.stdout(0).strip(), job.stdout(1).strip())
except NamespacesUnavailable as error:
    print(error)
"""


@functools.cache
def refusal() -> str | None:
    """Return why there are no network namespaces here, or None where there are."""
    try:
        with Cluster(1):
            return None
    except NamespacesUnavailable as error:
        return str(error)


def with_namespaces(test: Callable[..., None]) -> Callable[..., None]:
    """Run `test` where namespaces can be had; elsewhere check that the refusal has a reason."""

    @functools.wraps(test)
    def checked(*arguments: object, **named: object) -> None:
        reason = refusal()
        if reason is None:
            test(*arguments, **named)
        else:
            assert re.fullmatch(r"no network namespaces: \S.*", reason)

    return checked


def clusters() -> Iterator[Cluster | Loopback]:
    """Yield each kind of cluster with two hosts, as far as it can be had here."""
    if refusal() is None:
        with Cluster(2) as cluster:
            yield cluster
    with Loopback(2) as loopback:
        yield loopback


def transfer(cluster: Cluster, sender: int, receiver: int) -> float:
    """Send SIZE bytes between two hosts and return the seconds it took."""
    address, env = cluster.addresses[receiver], dict(os.environ)
    server = cluster.start(receiver, [*PYTHON, RECEIVER, address], env=env, stdout=subprocess.PIPE)
    assert server.stdout is not None
    with server.stdout as said:
        assert said.readline() == b"ready\n"
        client = cluster.start(sender, [*PYTHON, SENDER, address, str(SIZE)], env=env)
        size, seconds = said.readline().split()
    assert (server.wait(10), client.wait(10), int(size)) == (0, 0, SIZE)
    return float(seconds)


def shortest_transfer(cluster: Cluster, sender: int, receiver: int) -> float:
    """The shortest of several: whatever else the machine does makes one longer, never shorter."""
    return min(transfer(cluster, sender, receiver) for _ in range(TIMES))


def say_ready(cluster: Cluster | Loopback) -> subprocess.Popen[bytes]:
    """Start a program that runs for long, and return when it does."""
    argv = ["sh", "-c", "echo ready; exec sleep 1000"]
    process = cluster.start(1, argv, env=dict(os.environ), stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as said:
        assert said.readline() == b"ready\n"
    return process


def marked(mark: str) -> dict[int, int]:
    """Return the network namespace of every process that has `mark` in its environment."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes()
            ):
                found[int(entry.name)] = (entry / "ns/net").stat().st_ino
        except OSError:
            pass  # ended meanwhile
    return found


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def holders(namespaces: set[int]) -> list[str]:
    """Return what keeps one of these network namespaces alive: processes, descriptors, mounts."""
    names = {f"net:[{inode}]" for inode in namespaces}
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            for link in (entry / "ns/net", *(entry / "fd").iterdir()):
                if os.readlink(link) in names:
                    found.append(str(link))
        except OSError:
            pass  # ended meanwhile
    mounts = Path("/proc/self/mountinfo").read_text()
    return found + [name for name in names if name in mounts]


def until(condition: Callable[[], bool], seconds: float = 100.0) -> None:
    """Wait until `condition` holds of the world outside, which notifies nobody."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, inspect.getsource(condition)
        time.sleep(0.1)


@with_namespaces
def test_a_transfer_takes_bytes_over_rate_and_is_counted() -> None:
    with Cluster(3, bandwidth=RATE) as cluster:
        assert len(set(cluster.addresses)) == 3
        before = cluster.tx_bytes()
        seconds = shortest_transfer(cluster, sender=0, receiver=2)
        sent = [after - start for after, start in zip(cluster.tx_bytes(), before, strict=True)]
    assert 0.9 < seconds / (SIZE * 8 / RATE) < 5  # longer on a busy machine
    assert sent[0] == pytest.approx(TIMES * SIZE, rel=0.08)
    assert sent[1] < 0.001 * SIZE
    assert sent[2] < 0.08 * TIMES * SIZE  # acknowledgements


@with_namespaces
def test_every_host_has_its_own_rate() -> None:
    with Cluster(3, bandwidth=None, host_bandwidth={1: RATE / 2}) as cluster:
        slow = shortest_transfer(cluster, sender=1, receiver=0)
        fast = shortest_transfer(cluster, sender=0, receiver=1)
    assert 0.9 < slow / (SIZE * 8 / (RATE / 2)) < 5
    assert fast < slow / 2


@with_namespaces
def test_a_host_has_its_own_name_and_hosts_file() -> None:
    before = Path("/etc/hosts").read_bytes(), socket.gethostname(), socket.if_nameindex()
    program = """
import socket
print(socket.gethostname(), [socket.gethostbyname(n) for n in ("host0", "host1", "localhost")],
      socket.getnameinfo(("::ffff:10.77.0.2", 0), 0)[0])
"""
    with Cluster(2) as cluster:
        job = launch(cluster, [*PYTHON, program])
        assert [outcome.exit_code for outcome in job.wait(100)] == [0, 0]
        addresses = [*cluster.addresses, "127.0.0.1"]
        assert [job.stdout(h) for h in (0, 1)] == [f"host{h} {addresses} host1\n" for h in (0, 1)]
    assert (Path("/etc/hosts").read_bytes(), socket.gethostname(), socket.if_nameindex()) == before


@with_namespaces
def test_nothing_is_left_behind_on_any_way_out(tmp_path: Path) -> None:
    named = Path("/run/netns")
    before = sorted(os.listdir(named)) if named.exists() else None, socket.if_nameindex()
    # way: (what the launcher reads, signals sent to it, its return code)
    ways: Mapping[str, tuple[bytes, list[signal.Signals], int]] = {
        "exit": (b"\n", [], 0),
        "exception": (b"raise\n", [], 1),
        "interrupt": (b"", [signal.SIGINT, signal.SIGINT], -signal.SIGINT),
        "terminate": (b"", [signal.SIGTERM], 143),
        "hangup": (b"", [signal.SIGHUP], 129),
        "plain": (b"", [signal.SIGTERM], -signal.SIGTERM),
        "kill": (b"", [signal.SIGKILL], -signal.SIGKILL),
    }
    marks = {way: f"{way}-{uuid.uuid4()}" for way in ways}
    launchers = {
        way: subprocess.Popen(
            [*programs.NEW, "-c", LAUNCHER, way, str(tmp_path / way)],
            env={**os.environ, MARK: mark},
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for way, mark in marks.items()
    }
    namespaces = {}
    for way, mark in marks.items():
        # Launcher, keeper and on both hosts the program, its child and the stray one.
        until(lambda mark=mark: len(marked(mark)) >= 8, 40)  # type: ignore[misc]
        namespaces[way] = set(marked(mark).values()) - {os.stat("/proc/self/ns/net").st_ino}
        assert len(namespaces[way]) == 3
    for way, (line, signals, _) in ways.items():
        launcher = launchers[way]
        assert launcher.stdin is not None
        for number in signals[:1]:
            launcher.send_signal(number)
        for number in signals[1:]:  # while the first one's cleaning up is under way
            until(lambda way=way: "term" in (tmp_path / way / "rank0.out").read_text())  # type: ignore[misc]
            launcher.send_signal(number)
        launcher.stdin.write(line)
        if not signals:
            launcher.stdin.close()
    for way, (_, _, code) in ways.items():
        assert (way, launchers[way].wait(20)) == (way, code)
        until(lambda way=way: not marked(marks[way]) and not holders(namespaces[way]))  # type: ignore[misc]
        launchers[way].stdin.close()  # type: ignore[union-attr]
    after = sorted(os.listdir(named)) if named.exists() else None, socket.if_nameindex()
    assert after == before


def test_a_killed_launcher_takes_its_programs_along_on_loopback_too() -> None:
    mark = str(uuid.uuid4())
    program = f"{IMPORT}\nlaunch(Loopback(2), ['sleep', '1000']).wait()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env={**os.environ, MARK: mark}) as launcher:
        until(lambda: sum(name_of(pid) == "sleep" for pid in marked(mark)) == 2)
        launcher.kill()
    assert launcher.returncode == -signal.SIGKILL
    until(lambda: not marked(mark))
    assert not marked(mark)


def test_cleaning_up_is_not_cut_short() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), signals_deferred():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("all")
    assert done == ["all"]


@pytest.mark.parametrize(
    ("death", "code", "name"),
    [("sys.exit(3)", 3, None), ("os.kill(os.getpid(), 9)", None, "SIGKILL")],
)
def test_a_rank_that_dies_ends_the_job(death: str, code: int | None, name: str | None) -> None:
    program = f"""
import os, sys, time
print("rank", os.environ["RANK"], file=sys.stderr, flush=True)
if os.environ["RANK"] == "2":
    {death}
time.sleep(1000)
"""
    for cluster in clusters():
        job = launch(cluster, [*PYTHON, program], per_host=2)
        outcomes = job.wait(100, grace=0.5)
        assert [outcome.rank for outcome in outcomes] == [0, 1, 2, 3]
        assert [outcome.host for outcome in outcomes] == [0, 0, 1, 1]
        assert [outcome.failed for outcome in outcomes] == [False, False, True, False]
        assert [outcome.stopped for outcome in outcomes] == [True, True, False, True]
        guilty = outcomes[2]
        assert (guilty.exit_code, guilty.signal, guilty.stderr) == (code, name, "rank 2")
        assert str(guilty) == f"rank 2 on host1: {name or 'exit code 3'}"
        assert {outcomes[rank].signal for rank in (0, 1, 3)} == {"SIGKILL"}


def test_ranks_get_the_variables_of_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("RANK", "17")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK OMP_NUM_THREADS MINE"
    elastic = "[name for name in os.environ if name.startswith('TORCHELASTIC_')]"
    values = f"*(os.environ[name] for name in '{names}'.split()), {elastic}"
    for cluster in clusters():
        logs = tmp_path / type(cluster).__name__
        program = f"import os; print({values}, os.environ['MASTER_ADDR'])"
        job = launch(cluster, [*PYTHON, program], per_host=2, env={"MINE": "m"}, log_dir=logs)
        assert [outcome.exit_code for outcome in job.wait(100)] == [0] * 4
        for rank in range(4):
            line = f"{rank} 4 {rank % 2} 2 {rank // 2} 1 m [] {cluster.addresses[0]}\n"
            assert job.stdout(rank) == line == (logs / f"rank{rank}.out").read_text()
            assert job.stderr(rank) == "" == (logs / f"rank{rank}.err").read_text()


def test_a_job_that_runs_is_left_running() -> None:
    for cluster in clusters():
        job = launch(cluster, ["sleep", "1000"])
        assert job.poll() is None
        with pytest.raises(TimeoutError, match=r"2 of 2 ranks still running after 0\.1 s"):
            job.wait(0.1)
        assert job.poll() is None
        job.kill()
        outcomes = job.poll()
        assert outcomes is not None
        assert [(outcome.signal, outcome.stopped) for outcome in outcomes] == [
            ("SIGKILL", True)
        ] * 2


def test_a_program_outlives_the_thread_that_started_it_but_not_its_cluster() -> None:
    for cluster in clusters():
        started: list[subprocess.Popen[bytes]] = []
        thread = threading.Thread(target=lambda: started.append(say_ready(cluster)))  # noqa: B023
        thread.start()
        thread.join()
        with pytest.raises(subprocess.TimeoutExpired):
            started[0].wait(0.5)
        cluster.close()
        cluster.close()
        assert started[0].returncode == -signal.SIGTERM
        with pytest.raises(ValueError, match="closed"):
            cluster.start(1, ["true"], env={})


def test_a_program_that_is_not_there_is_named() -> None:
    for cluster in clusters():
        first = launch(cluster, ["no-such-program"]).wait(20)[0]
        assert first.exit_code == 127
        assert first.stderr == "cannot start no-such-program: No such file or directory"


def test_loopback_has_the_interface_of_a_cluster() -> None:
    for name in ("start", "tx_bytes", "free_port", "close", "__enter__", "__exit__"):
        of_cluster = inspect.signature(getattr(Cluster, name))
        of_loopback = inspect.signature(getattr(Loopback, name))
        assert of_cluster.parameters.keys() == of_loopback.parameters.keys()
    with Loopback(2) as loopback:
        assert loopback.addresses == ["127.0.0.1"] * 2
        assert not loopback.emulated and Cluster.emulated
        assert loopback.tx_bytes() is None  # type: ignore[func-returns-value]
        assert loopback.free_port() > 0


@with_namespaces
def test_a_user_without_privilege_gets_a_cluster_or_a_reason(tmp_path: Path) -> None:
    script = tmp_path / "powerless.py"
    script.write_text(POWERLESS)
    said = subprocess.run(
        [*programs.NEW, str(script), "drop", str(script)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert re.fullmatch(r"works on host0 host1|no network namespaces: \S.*", said.stdout.strip()), (
        said
    )


@with_namespaces
def test_a_missing_library_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(NamespacesUnavailable, match="namespaces: pyroute2 is needed"):
        Cluster(1)


def test_bad_arguments_are_refused() -> None:
    for hosts in (0, -1, 1000):
        for kind in (Cluster, Loopback):
            with pytest.raises(ValueError, match=f"hosts must be from 1 to 250, not {hosts}"):
                kind(hosts)
    for rate in (0.0, -1.0, float("nan"), float("inf"), 1e12):
        with pytest.raises(ValueError, match="bandwidth must be"):
            Cluster(2, bandwidth=rate)
    with pytest.raises(ValueError, match="no host 2; hosts are numbered 0 to 1"):
        Cluster(2, host_bandwidth={2: 1e6})
    with Loopback(2) as loopback:
        with pytest.raises(ValueError, match="no host 2"):
            loopback.start(2, ["true"], env={})
        with pytest.raises(ValueError, match="per_host must be at least 1, not 0"):
            launch(loopback, ["true"], per_host=0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_termination_unwinds(number: signal.Signals, code: int) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as raised, terminate_as_exit():
        signal.raise_signal(number)
    assert raised.value.code == code
    assert signal.getsignal(number) is before
