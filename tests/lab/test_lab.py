"""`laconic lab`: output, exit codes, ways out, leftovers, shells, and what bad input is told."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks import stress
from hypothesis import given
from hypothesis import strategies as st

import laconic
from laconic.cli import lab, main
from laconic.lab.emulation import orphans, program
from laconic.lab.emulation.cluster import Cluster, Impairments, NamespacesUnavailable
from laconic.lab.emulation.join import join, running, trusted
from laconic.lab.emulation.output import Lines
from laconic.lab.emulation.torchrun import find
from laconic.links import Throttled
from laconic.links.rank_sets import BANDWIDTH_VARIABLE, LATENCY_VARIABLE, own_link

from tests.support import programs

LAB = [*programs.NEW, "-m", "laconic", "lab"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp.py"
# Sends argv[1] bytes from each host to the next one in the ring.
RING = """
import os, socket, sys, threading, time
host, hosts, size = int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"]), sys.argv[1]
server = socket.create_server(("", 5000))
def receive():
    connection, _ = server.accept()
    while connection.recv(1 << 20): pass
thread = threading.Thread(target=receive); thread.start()
while True:
    try:
        with socket.create_connection((f"host{(host + 1) % hosts}", 5000)) as next_one:
            next_one.sendall(bytes(int(size)))
        break
    except ConnectionRefusedError: time.sleep(0.02)  # attempts are sent, too
thread.join()
"""


def emulated() -> bool:
    """Whether hosts are network namespaces here; where not, all but they is tested."""
    try:
        with Cluster(1):
            return True
    except NamespacesUnavailable as error:
        assert re.fullmatch(r"no network namespaces: \S.*", str(error))
        return False


def until(condition: Callable[[], bool], seconds: float = 100.0) -> None:
    """Wait for something outside, which notifies nobody."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def of_launcher(pid: int) -> list[str]:
    """The command lines of a lab's processes."""
    return [member.command for member in orphans.members() if member.launcher == pid]


def start(*arguments: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*LAB, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )


@pytest.fixture
def no_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Cluster:
        raise NamespacesUnavailable("no network namespaces: on purpose")

    monkeypatch.setattr(program, "Cluster", refuse)


def test_lines_are_whole_and_say_whose_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    script = 'for i in $(seq 200); do printf "$RANK-"; echo "$i"; done; printf "e$RANK" >&2'
    assert main(["lab", "--hosts", "2", "--per-host", "2", "--", "sh", "-c", script]) == 0
    said = capfd.readouterr()
    for rank in range(4):
        prefix = f"host{rank // 2}/rank{rank} | "
        own = [line for line in said.out.splitlines() if line.startswith(prefix)]
        assert own == [f"{prefix}{rank}-{number}" for number in range(1, 201)]
        assert f"{prefix}e{rank}\n" in said.err
    assert len(said.out.splitlines()) == 800
    assert "laconic: 2 hosts, 100 Mbit/s each\n" in said.err
    assert re.search(r"^laconic: \d+\.\d s$", said.err, re.MULTILINE)


@pytest.mark.parametrize(
    ("death", "how", "code"), [("exit 3", "exit code 3", 3), ("kill -9 $$", "SIGKILL", 137)]
)
def test_the_first_failure_is_told(
    death: str,
    how: str,
    code: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(program, "GRACE_SECONDS", 0.5)
    # Rank 0 fails because rank 1 is gone, rank 2 does not notice.
    script = f"""
    cd {tmp_path}
    case $RANK in
      0) until test -e pid; do sleep 0.1; done; while kill -0 $(cat pid); do sleep 0.1; done
         exit 9;;
      1) echo $$ > new; mv new pid; for i in $(seq 20); do echo line $i >&2; done; {death};;
      2) exec sleep 1000;;
    esac
    """
    assert main(["lab", "--hosts", "3", "--", "sh", "-c", script]) == code
    said = capfd.readouterr().err
    assert f"laconic: host1/rank1 failed: {how}; the others are ended within 0.5 s\n" in said
    last = said.partition(f"laconic: host1/rank1 failed first: {how}; its last lines:\n")[2]
    assert last.splitlines()[:-1] == [f"laconic:   line {number}" for number in range(11, 21)]


def test_rates_and_output_are_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    size, there = 3_000_000, emulated()
    out = tmp_path / "a" / "b"
    command = [sys.executable, "-c", RING, str(size)] if there else ["sleep", "1"]
    options = ["--hosts", "2", "--bandwidth", "20mbit", "--bandwidth-host", "host1=40mbit"]
    assert main(["lab", *options, "--latency", "0", "--out", str(out), *command]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "rank0.err", "rank0.out", "rank1.err", "rank1.out", "rates.json",
    ]  # fmt: skip
    kept = json.loads((out / "rates.json").read_text())
    assert kept["command"] == command
    assert kept["failed"] is None
    assert [host["name"] for host in kept["hosts"]] == ["host0", "host1"]
    assert [host["bandwidth"] for host in kept["hosts"]] == [20e6, 40e6]
    assert bool(kept["samples"]) == there == (kept["network"] == "emulated")
    if there:
        times = [sample["seconds"] for sample in kept["samples"]]
        assert times == sorted(times) and times[0] == 0.0 and len(times) >= 2
        for host in range(2):
            sent = [sample["sent"][host] for sample in kept["samples"]]
            assert sent == sorted(sent) and sent[0] == 0
            # Headers, and the acknowledgements of what came.
            assert size < sent[-1] < 1.1 * size
            told = f"laconic:   host{host}  {sent[-1] / 1e6:10.2f} MB"
            assert told in capfd.readouterr().err or host


def test_latency_jitter_and_loss_reach_the_hosts_and_are_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        with Cluster(1, impairments=Impairments(latency=0.01)):
            pass
    except OSError:
        return
    options = ["--hosts", "2", "--bandwidth", "20mbit", "--latency", "40ms", "--jitter", "2ms"]
    options += ["--loss", "0.1%", "--loss-host", "1=0.005", "--latency-host", "host1=0.08s"]
    options += ["--network-seed", "7", "--out", str(tmp_path)]
    before = time.monotonic()
    assert main(["lab", *options, sys.executable, "-c", RING, "1000000"]) == 0
    assert time.monotonic() - before > 0.45  # bytes over rate, and a round trip
    err = capfd.readouterr().err
    words = "40 ms latency, host1 80 ms latency, 2 ms jitter, 0.1% loss, host1 0.5% loss"
    assert f"laconic: 2 hosts, 20 Mbit/s each, {words}\n" in err
    kept = json.loads((tmp_path / "rates.json").read_text())
    assert kept["network_seed"] == 7 and kept["congestion_control"] in ("cubic", "reno")
    named = [(host["latency"], host["jitter"], host["loss"]) for host in kept["hosts"]]
    assert named == [(0.04, 0.002, 0.001), (0.08, 0.002, 0.005)]
    assert all(1_000_000 < sent < 1_500_000 for sent in kept["samples"][-1]["sent"])


def test_what_is_printed_is_kept_to_the_byte(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "import sys; sys.stdout.buffer.write(b'a\\xff\\r\\nb\\rc\\x1b[1m'); sys.exit('no')"
    assert main(["lab", "--hosts", "1", "--out", str(tmp_path), sys.executable, "-c", script]) == 1
    assert (tmp_path / "rank0.out").read_bytes() == b"a\xff\r\nb\rc\x1b[1m"
    assert (tmp_path / "rank0.err").read_bytes() == b"no\n"
    assert json.loads((tmp_path / "rates.json").read_text())["failed"] == {
        "process": "host0/rank0",
        "how": "exit code 1",
    }


@given(st.lists(st.text("ab\n", max_size=6)))
def test_lines_do_not_depend_on_the_pieces(pieces: list[str]) -> None:
    lines, said = Lines(), []
    for piece in pieces:
        said += lines.feed(piece.encode(), 0.0)
    *whole, rest = "".join(pieces).encode().split(b"\n")
    assert [*said, *lines.end()] == whole + [rest] * bool(rest)


def test_of_a_progress_bar_one_state_a_second_is_shown() -> None:
    for before, after in (("\r", ""), ("", "\r")):  # tqdm's way, and the other one
        lines, said = Lines(), []
        for tenth in range(35):
            said += lines.feed(f"{before}{tenth}%{after}".encode(), tenth / 10)
        said += lines.feed(b"\ndone\n", 3.5)
        shown = [int(line[:-1]) for line in said[:-2]]
        assert len(shown) == 4
        assert all(late - soon >= 10 for soon, late in itertools.pairwise(shown))
        assert said[-2:] == [b"34%", b"done"]
    lines = Lines()
    assert lines.feed(b"x" * 70_000, 0.0) == [b"x" * 70_000]  # and not kept for ever
    assert lines.feed(b"\n", 0.0) == [b""]


def test_torchrun_gets_what_it_needs_on_every_host() -> None:
    quiet = ["--log-dir", "/dev/null"]
    meet = ["--master-addr", "A", "--master-port", "5"]
    started = find(["torchrun", "t.py", "--nnodes", "7"], 2, None)
    assert started is not None
    assert started.command(1, "A", 5) == [
        "torchrun", "--nnodes", "2", "--nproc-per-node", "1", *quiet, "--node-rank", "1", *meet,
        "t.py", "--nnodes", "7",
    ]  # fmt: skip
    module = ["/usr/bin/python3", "-u", "-m", "torch.distributed.run"]
    started = find([*module, "--nproc_per_node=3", "--tee", "3", "-m", "t"], 2, 3)
    assert started is not None and started.per_host == "3"
    assert started.command(0, "A", 5) == [
        *module, "--nnodes", "2", "--node-rank", "0", *meet, "--nproc_per_node=3", "--tee", "3",
        "-m", "t",
    ]  # fmt: skip
    started = find(["torchrun", "--rdzv-backend=c10d", "t.py"], 2, 4)
    assert started is not None
    assert started.command(1, "A", 5) == [
        "torchrun", "--nnodes", "2", "--nproc-per-node", "4", *quiet, "--rdzv-endpoint", "A:5",
        "--rdzv-backend=c10d", "t.py",
    ]  # fmt: skip
    for other in (["python", "t.py"], ["python", "t.py", "-m", "torch.distributed.run"], ["sh"]):
        assert find(other, 2, None) is None


def test_torchrun_itself_runs_on_every_host(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("RANK", "17")
    script = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK on $GROUP_RANK"
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    options = ["--hosts", "2", "--per-host", "2"]
    assert main(["lab", *options, "--", *torchrun, "--no-python", "sh", "-c", script]) == 0
    told = sorted(capfd.readouterr().out.splitlines())
    assert told == [f"host{r // 2} | {r} of 4, {r % 2} on {r // 2}" for r in range(4)]
    assert not [*tmp_path.iterdir()]


BAD: Mapping[str, tuple[list[str], str]] = {
    "no program": ([], "no program given: try laconic lab -- python train.py"),
    "unknown program": (["--", "no-such"], "program not found: 'no-such'"),
    "rate": (["--bandwidth", "fast", "true"], "not a rate: 'fast'; give a positive number"),
    "no unit": (["--bandwidth", "100", "true"], "not a rate: '100'; give a positive number with"),
    "no unit of one host": (["--bandwidth-host", "1=10", "true"], "not a rate: '10'"),
    "latency without a unit": (["--latency", "5", "true"], "not a latency: '5'; give 0, or"),
    "jitter without a unit": (["--jitter", "5", "true"], "not a latency: '5'"),
    "slow": (["--bandwidth", "1bit", "true"], "bandwidth must be 8000 to 3.2e+10 bit/s"),
    "latency": (["--latency", "-1", "true"], "not a latency: '-1'"),
    "long": (["--latency", "1min", "true"], "latency must be from 0 to 10 s, not 60.0"),
    "jitter": (["--latency", "5ms", "--jitter", "6ms", "true"], "jitter must be from 0 to the lat"),
    "loss": (["--loss", "2", "true"], "not a share: '2'; give a number from 0 to 1, or one with %"),
    "all lost": (["--loss", "100%", "true"], "loss must be from 0 to less than 1, not 1.0"),
    "no such host": (["--loss-host", "9=1%", "true"], "there is no host 9; hosts are numbered 0"),
    "host's loss": (["--loss-host", "1%", "true"], "--loss-host must be HOST=VALUE, such as 2="),
    "twice": (
        ["--latency-host", "1=5ms", "--latency-host", "host1=6ms", "true"],
        "--latency-host has two values for host 1",
    ),
    "network seed": (["--network-seed", "-1", "true"], "the network's seed must be an integer"),
    "hosts": (["--hosts", "0", "true"], "hosts must be an integer of at least 1, not 0"),
    "per host": (["--per-host", "0", "true"], "per-host must be an integer of at least 1, not 0"),
    "host": (["--bandwidth-host", "4=1mbit", "true"], "there is no host 4; hosts are numbered 0"),
    "name": (["--bandwidth-host", "x=1mbit", "true"], "not a host: 'x'; give its number"),
    "single": (["--bandwidth-host", "1", "true"], "--bandwidth-host must be HOST=VALUE"),
    "shell": (["--hosts", "2", "--shell", "2"], "there is no host 2; hosts are numbered 0 to 1"),
    "no lab": (["--shell", "1@0"], "no lab of process '0' runs here; running labs: "),
    "both": (["--shell", "2", "--", "true"], "give a program or --shell, not both"),
    "directory": (["--out", "/dev/null/x", "true"], "cannot create /dev/null/x: Not a directory"),
    "nodes": (
        ["--", sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "t.py"],
        "torchrun's --nnodes 2 differs from the lab's --hosts 4",
    ),
    "standalone": (
        ["--", sys.executable, "-m", "torch.distributed.run", "--standalone", "t.py"],
        "torchrun --standalone isolates each host: leave it out",
    ),
    "processes": (
        ["--per-host", "1", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
         "t.py"],
        "torchrun's --nproc-per-node 2 differs from the lab's --per-host 1",
    ),
    "torchrun": (
        ["--", sys.executable, "-m", "torch.distributed.run", "--no-such", "t.py"],
        "torchrun: unrecognized arguments: --no-such",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_one_line_and_starts_nothing(
    case: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def nothing(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(Cluster, "__init__", nothing)
    arguments, message = BAD[case]
    assert main(["lab", *arguments]) == 2
    said = capfd.readouterr()
    assert said.err.count("\n") == 1 and said.out == ""
    assert said.err.startswith(f"laconic: {message}")


@pytest.mark.usefixtures("no_namespaces")
def test_without_namespaces_it_says_what_is_not_slowed_down(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LACONIC_BANDWIDTH", "1")
    script = 'setsid sleep 1000 & echo "$LACONIC_BANDWIDTH $LACONIC_LATENCY"'
    options = ["--hosts", "2", "--per-host", "2", "--bandwidth", "10mbit"]
    options += ["--bandwidth-host", "1=unlimited", "--latency", "20ms"]
    assert main(["lab", *options, "--", "sh", "-c", script]) == 0
    said = capfd.readouterr()
    told = sorted(line.partition(" | ")[2] for line in said.out.splitlines())
    assert told == [" 0.02"] * 2 + ["5000000.0 0.02"] * 2
    assert "laconic: no network namespaces: on purpose; all hosts are this machine\n" in said.err
    assert "laconic: NOT slowed down: programs without laconic." in said.err
    assert "laconic: latency: half of it is added by laconic to each of its own mess" in said.err
    assert not of_launcher(os.getpid())


def test_laconic_slows_itself_down_as_the_lab_says(monkeypatch: pytest.MonkeyPatch) -> None:
    device, timeout = torch.device("cpu"), 20.0
    for name in ("RANK", BANDWIDTH_VARIABLE, LATENCY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    laconic.init()
    try:
        assert not isinstance(own_link(device, timeout), Throttled)
        monkeypatch.setenv(LATENCY_VARIABLE, "0.02")
        link = own_link(device, timeout)
        assert isinstance(link, Throttled)
        assert (link.latency, link.bandwidth) == (0.02, None)
        monkeypatch.setenv(BANDWIDTH_VARIABLE, "5000000.0")
        link = own_link(device, timeout)
        assert isinstance(link, Throttled)
        assert (link.latency, link.bandwidth) == (0.02, "5000000.0")
    finally:
        dist.destroy_process_group()


HELLO = ["--", "sh", "-c", "setsid sleep 1000 & echo hello; echo hello >&2; exit 0"]


def check_full(what: str, code: int, said: str, pid: int) -> None:
    own = [line for line in said.splitlines() if " | " not in line]
    assert own[-1] == f"laconic: cannot write {what}: No space left on device"
    assert "Traceback" not in said and "Exception" not in said
    assert code == 2
    until(lambda: not of_launcher(pid))


def test_a_full_disk_under_its_output_is_one_readable_line() -> None:
    with Path("/dev/full").open("w") as stdout:
        process = subprocess.Popen(
            [*LAB, "--hosts", "2", *HELLO], stdout=stdout, stderr=subprocess.PIPE, text=True
        )
        said = process.communicate(timeout=200)[1]
    check_full("to standard output", process.returncode, said, process.pid)


@pytest.mark.parametrize("full", ["rank1.out", "rank0.err", "rates.json"])
def test_a_full_disk_under_a_file_is_one_readable_line(
    full: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / full).symlink_to("/dev/full")
    code = main(["lab", "--hosts", "2", "--out", str(tmp_path), *HELLO])
    check_full(str(tmp_path / full), code, capfd.readouterr().err, os.getpid())


def test_two_labs_and_what_a_killed_one_leaves(capfd: pytest.CaptureFixture[str]) -> None:
    script = "setsid sleep 1000 & echo ready; wait"
    killed, stays = (start("--hosts", "2", "--", "sh", "-c", script) for _ in range(2))
    for process in (killed, stays):
        assert process.stdout is not None
        assert {process.stdout.readline() for _ in range(2)} == {
            "host0/rank0 | ready\n",
            "host1/rank1 | ready\n",
        }
        until(lambda pid=process.pid: of_launcher(pid).count("sleep 1000") == 2)  # type: ignore[misc]
    # A keeper that lives ends all that is left; with it the lab loses its last hold.
    for member in orphans.members():
        if member.launcher == killed.pid and "namespaces.py keep " in member.command:
            os.kill(member.pid, signal.SIGKILL)
    killed.kill()
    killed.wait()  # until then it is a zombie, which does not count as alive either
    until(lambda: of_launcher(killed.pid) == ["sleep 1000"] * 2)
    others = of_launcher(stays.pid)
    assert main(["lab", "clean"]) == 0
    cleaned = capfd.readouterr().out
    lab_of = f"of the lab of process {killed.pid}\n"
    assert len(re.findall(rf"^ended process \d+ \(sleep 1000\) {lab_of}", cleaned, re.M)) == 2
    assert f"not touched: the lab of process {stays.pid}, which is running\n" in cleaned
    assert not of_launcher(killed.pid)
    assert of_launcher(stays.pid) == others != []
    assert main(["lab", "clean"]) == 0
    assert str(killed.pid) not in capfd.readouterr().out
    stays.send_signal(signal.SIGINT)
    said = stays.communicate(timeout=200)[1]
    assert stays.returncode == 130
    assert said.endswith("laconic: interrupted\n")
    assert not of_launcher(stays.pid)
    for stream in (killed.stdout, killed.stderr):
        assert stream is not None
        stream.close()


@pytest.mark.parametrize("how", ["lives", "has ended", "is a zombie", "was replaced"])
def test_a_process_that_ends_by_itself_is_not_stuck(how: str) -> None:
    """`laconic lab clean` may find a process that ends before it is killed."""
    mark, words = orphans.new_mark(), ["sleep", "0" if how == "is a zombie" else "30"]
    own = "another" if how == "was replaced" else mark
    process = subprocess.Popen(words, env={**os.environ, orphans.MARK: own})
    if how == "has ended":
        process.kill()
        process.wait()
    if how == "is a zombie":
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert orphans.end(orphans.Member(process.pid, "sleep", mark, os.getpid(), True))
    replaced = how == "was replaced"
    assert (process.poll() is None) == replaced
    process.kill()
    process.wait()


def test_every_way_out_leaves_nothing(tmp_path: Path) -> None:
    """One of each, two at a time; ``make stress`` does 200."""

    def wrong(way: str) -> list[str]:
        directory = tmp_path / way
        directory.mkdir()
        return stress.start_and_end(way, str(directory))

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(stress.WAYS, pool.map(wrong, stress.WAYS), strict=True))
    assert len(found) == 6 and not any(found.values()), found


@pytest.mark.parametrize(
    ("wrong", "said", "code"),
    [
        ([], "2 labs started and ended, 2 of them without leaving anything\n", 0),
        (
            ["sleep 1000"],
            "lab 2, a rank crashes: sleep 1000\n"
            "2 labs started and ended, 1 of them without leaving anything\n",
            1,
        ),
    ],
)
def test_stress_tells_what_is_left(
    wrong: list[str],
    said: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["stress", "2"])
    monkeypatch.setattr(
        stress, "start_and_end", lambda way, directory: wrong if way == "a rank crashes" else []
    )
    assert stress.main() == code
    assert capsys.readouterr().out == said


class Terminal:
    """A command on a terminal of 80 columns, and what it shows."""

    def __init__(self, *arguments: str) -> None:
        self.shown = ""
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="xterm", COLUMNS="80", LINES="24")
            os.execv(sys.executable, [*LAB, *arguments])

    def expect(self, pattern: str, seconds: float = 100.0) -> re.Match[str]:
        """Read until what is shown from here on matches; forget it."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.shown)):
            assert time.monotonic() < deadline, (pattern, self.shown)
            if select.select([self._descriptor], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self._descriptor, 1 << 16).decode()
                except OSError:  # its end
                    break
        match = match or re.search(pattern, self.shown)
        assert match, (pattern, self.shown)
        self.shown = self.shown[match.end() :]
        return match

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def end(self) -> int:
        self.expect(r"\Z")
        _, status = os.waitpid(self.pid, 0)
        os.close(self._descriptor)
        return os.waitstatus_to_exitcode(status)


def test_a_terminal_shows_lines_above_the_rates() -> None:
    script = "for i in 1 2 3; do echo say $i; sleep 0.5; done"
    terminal = Terminal("--hosts", "2", "--", "sh", "-c", script)
    terminal.expect(r"host0/rank0 | ")
    if emulated():
        terminal.expect(r"host0 ↑ \S+  host1 ↑ \S+  Mbit/s  \d s")
    terminal.expect(r"say 3")
    terminal.expect(r"laconic: \d+\.\d s\r\n")
    assert terminal.end() == 0


def test_what_is_started_while_one_looks_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process that had ended when its turn to be looked at came."""
    late = orphans.Member(1, "sleep 1000", "ours", 2, False)
    other = orphans.Member(3, "sleep 1000", "theirs", 4, False)
    looks = iter([[other], [late, other], [other], [other]])
    ended: list[orphans.Member] = []
    monkeypatch.setattr(orphans, "members", lambda: next(looks))
    monkeypatch.setattr(orphans, "end", ended.append)
    orphans.end_all("ours")
    assert ended == [late] and next(looks, None) is None


def test_a_shell_is_on_its_host() -> None:
    if not emulated():
        assert main(["lab", "--hosts", "2", "--shell", "1"]) == 2
        return
    first = Terminal("--hosts", "2", "--bandwidth", "1gbit", "--shell", "1")
    first.expect(r"2 hosts, 1 Gbit/s each")
    first.expect(r"\[host1\] ")
    first.type("hostname; cat /proc/net/dev | grep -c eth0; sleep 1000\n")
    first.expect(r"host1\r\n1\r\n")
    second = Terminal("--shell", f"host0@{first.pid}")
    second.expect(rf"host0 of the lab of process {first.pid}[^\n]*; Ctrl-D leaves")
    second.expect(r"\[host0\] ")
    second.type("hostname; setsid sleep 1000 &\n")
    second.expect(r"host0\r\n")
    second.expect(r"\[host0\] ")
    first.type("\x03")  # Ctrl-C is for what runs in the shell
    first.expect(r"\^C")
    first.expect(r"\[host1\] ")
    second.type("\x04")
    second.expect(r"exit")
    assert second.end() == 0
    assert not of_launcher(second.pid)
    assert [name for name in running() if name.split("-")[2] == str(first.pid)]
    first.type("\x04")
    first.expect(r"exit")
    assert first.end() == 130  # the shell's own, here that of its last command
    assert not of_launcher(first.pid)
    assert not [name for name in running() if name.split("-")[2] == str(first.pid)]


# Listens at the name argv[1], as user argv[2] if that is not empty, and hands out its namespace.
PLANTED = """
import json, os, socket, sys
if sys.argv[2]:
    os.setgroups([]), os.setgid(int(sys.argv[2])), os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
    door.bind("\\0" + sys.argv[1])
    door.listen()
    print("listening", flush=True)
    while True:
        with door.accept()[0] as peer:
            plan = dict(launcher=1, addresses=["10.0.0.1"], prefix=24, rates=[None], path=[])
            if peer.recv(16):
                net = os.open("/proc/self/ns/net", os.O_RDONLY)
                socket.send_fds(peer, [json.dumps(plan).encode()], [net])
                os.close(net)
"""


@contextlib.contextmanager
def planted(name: str, user: str = "") -> Iterator[None]:
    argv = [*programs.NEW, "-c", PLANTED, name, user]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as planter:
        try:
            assert planter.stdout is not None
            assert planter.stdout.readline() == "listening\n"
            yield
        finally:
            planter.kill()


def test_a_socket_that_another_user_has_planted_is_not_joined(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It could be anyone's, and lead root's shell into a namespace of his choice."""
    own, other = (f"laconic-lab-{os.getpid()}-{number}" for number in (1, 2))
    root = os.geteuid() == 0
    with planted(other, "65534" if root else ""), planted(own), planted("laconic-lab-no-number"):
        assert {own, other} <= set(running())
        assert "laconic-lab-no-number" not in running()
        if not root:  # who cannot have another user listen is another user himself
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert not trusted(other)
        whose = "65534" if root else str(os.getuid())
        with pytest.raises(
            ValueError, match=rf"process {os.getpid()} belongs to .*user {whose}.*root's"
        ):
            join(other, 0)
        monkeypatch.undo()
        assert trusted(own)
        entry = join(own, 0)  # the same answer, of a user that is trusted
        assert entry.net is not None and entry.user is None
        os.close(entry.net)


def test_a_shell_is_refused_at_a_socket_of_another_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = os.geteuid() == 0
    with planted(f"laconic-lab-{os.getpid()}-1", "65534" if root else ""):
        if not root:
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert main(["lab", "--shell", f"0@{os.getpid()}"]) == 2
    said = capsys.readouterr().err
    assert "only your own labs and root's can be joined" in said and said.count("\n") == 1


def test_the_example_has_no_word_of_laconic_and_sends_what_it_says(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = EXAMPLE.read_text()
    assert len(source.splitlines()) < 65
    assert "laconic" not in source.rpartition('"""')[0].rpartition('"""')[2] + source[400:]
    steps = 4
    options = ["--hosts", "2", "--bandwidth", "1gbit", "--out", str(tmp_path)]
    assert main(["lab", *options, sys.executable, str(EXAMPLE), str(steps)]) == 0
    said = capfd.readouterr().out
    sent = float(re.findall(r", (\d+\.\d+) MB sent per step$", said, re.MULTILINE)[0]) * 1e6
    assert re.search(r"\d s per step, \d\.\d+ s without communication$", said, re.MULTILINE)
    if emulated():
        # Two steps of warming up before; only rank 0 sends the parameters, at the start.
        last = json.loads((tmp_path / "rates.json").read_text())["samples"][-1]["sent"][1]
        assert last == pytest.approx((steps + 2) * sent, rel=0.08)


def test_rates_fit_a_line() -> None:
    shown = lab.rates_line(12.4, [93.123e6, 0.0, 9.87e6, 1.2345e9])
    assert shown == "host0 ↑ 93.1  host1 ↑ 0  host2 ↑ 9.87  host3 ↑ 1234  Mbit/s  12 s"
    assert len(shown) < 80
    assert lab.rates_line(3.0, None) == "3 s"
