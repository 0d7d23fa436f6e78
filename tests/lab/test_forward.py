from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, stdev
from typing import Any

import pytest

import laconic
from laconic import native
from laconic.cli import main
from laconic.lab.emulation import orphans
from laconic.lab.emulation.cluster import (
    Cluster,
    ForwardError,
    Impairments,
    NamespacesUnavailable,
    congestion_controls,
)
from laconic.lab.emulation.forward import VERSION
from laconic.lab.emulation.program import Network, emulate

from tests.support import programs

ENDS = 20  # packets that mean the end, since some are lost
PYTHON = [sys.executable, "-I", "-S", "-c"]

# Runs as soon as it can: else a busy machine's wait for a processor would count as latency.
PROMPT = """
import contextlib, os
with contextlib.suppress(OSError):
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
"""
ECHO = (
    PROMPT
    + """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.bind(("", 7000))
    print("ready", flush=True)
    while True:
        data, sender = s.recvfrom(2000)
        s.sendto(data, sender)
"""
)
# Sends numbered packets at regular times, and prints number and seconds of each answer.
PING = (
    PROMPT
    + """
import json, socket, struct, sys, time
count, gap, answers = int(sys.argv[2]), float(sys.argv[3]), []
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.connect((sys.argv[1], 7000))
    start, sent = time.perf_counter(), 0
    while len(answers) < count and (now := time.perf_counter()) < start + count * gap + 2:
        if sent < count and now >= start + sent * gap:
            s.send(struct.pack("dI", now, sent))
            sent += 1
            continue
        s.settimeout(max(start + sent * gap - now, 1e-3))
        try:
            then, number = struct.unpack("dI", s.recv(100))
            answers.append((number, time.perf_counter() - then))
        except TimeoutError:
            pass
print(json.dumps(answers))
"""
)
# Prints for each packet its number, when it was sent, and when it reached the kernel: this process
# may have to wait for a processor. The hosts share a clock. Numbers from argv[1] on mean the end.
TAKE = """
import json, socket, struct, sys
SO_RCVBUFFORCE, SO_TIMESTAMPNS, taken = 33, 35, []
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 26)
    s.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    s.bind(("", 7001))
    s.settimeout(100)
    print("ready", flush=True)
    while True:
        data, ((_, _, clock),), _, _ = s.recvmsg(2000, 100)
        then, number = struct.unpack("dI", data[:12])
        if number >= int(sys.argv[1]):
            break
        seconds, nanoseconds = struct.unpack("qq", clock)
        taken.append((number, then, seconds + nanoseconds / 1e9))
print(json.dumps(taken))
"""
GIVE = f"""
import socket, struct, sys, time
count, size, gap = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.sendto(b"", (sys.argv[1], 7003))  # the kernel drops and reorders what waits for ARP
    time.sleep(0.3)
    start = time.perf_counter()
    for number in range(count + {ENDS}):
        if gap:
            time.sleep(max(start + number * gap - time.perf_counter(), 0))
        data = struct.pack("dI", time.time(), number).ljust(size, b".")
        s.sendto(data, (sys.argv[1], 7001))
"""
STREAM = """
import hashlib, socket, sys
with socket.create_server(("", 7002)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    digest = hashlib.sha256()
    while piece := connection.recv(1 << 20):
        digest.update(piece)
print(digest.hexdigest())
"""
POUR = """
import socket, sys
with socket.socket() as s:
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, sys.argv[2].encode())
    s.connect((sys.argv[1], 7002))
    print(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\\0").decode())
    s.sendall(bytes(range(256)) * int(sys.argv[3]))
"""
# As in test_cluster.py: the lab alone.
LAUNCHER = f"""
import sys, types
for name in ("laconic", "laconic.lab"):
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [{str(Path(laconic.__file__).parents[1])!r} + "/" + name.replace(".", "/")]
import os
from laconic.lab.emulation.cluster import Cluster, Impairments
with Cluster(2, impairments=Impairments(latency=0.01)) as cluster:
    cluster.start(1, ["sleep", "1000"], env=dict(os.environ))
    print("ready", flush=True)
    sys.stdin.read()
"""


@functools.cache
def refusal() -> str | None:
    """Return why packets cannot be delayed here, or None where they can."""
    try:
        with Cluster(1, impairments=Impairments(latency=0.01)):
            return None
    except (NamespacesUnavailable, ForwardError) as error:
        return str(error)


def with_forwarder(test: Callable[..., None]) -> Callable[..., None]:
    """Run `test` where packets can be delayed; elsewhere check that the refusal has a reason."""

    @functools.wraps(test)
    def checked(*arguments: object, **named: object) -> None:
        reason = refusal()
        if reason is None:
            test(*arguments, **named)
        else:
            assert re.match(r"no network namespaces: \S|.*latency, jitter and loss need \S", reason)

    return checked


def start(cluster: Cluster, host: int, program: str, *arguments: object) -> subprocess.Popen[bytes]:
    argv = [*PYTHON, program, *map(str, arguments)]
    return cluster.start(host, argv, env=dict(os.environ), stdout=subprocess.PIPE)


def serve(cluster: Cluster, host: int, program: str, *arguments: object) -> subprocess.Popen[bytes]:
    """Start a program that says when it is ready, and return when it is."""
    process = start(cluster, host, program, *arguments)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def answer(process: subprocess.Popen[bytes]) -> Any:
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    return json.loads(output)


def pings(cluster: Cluster, pairs: Sequence[tuple[int, int]], count: int, gap: float) -> list[Any]:
    """Return the answers between each pair of hosts, all pairs at once."""
    servers = [serve(cluster, host, ECHO) for host in {b for _, b in pairs}]
    addresses = cluster.addresses
    clients = [start(cluster, a, PING, addresses[b], count, gap) for a, b in pairs]
    answers = [answer(client) for client in clients]
    for server in servers:
        server.kill()
        server.communicate()
    return answers


def packets(
    cluster: Cluster, a: int, b: int, count: int, size: int = 12, gap: float = 0.0
) -> list[tuple[int, float, float]]:
    """Send packets and return number, start and end of those that have arrived."""
    receiver = serve(cluster, b, TAKE, count)
    sender = start(cluster, a, GIVE, cluster.addresses[b], count, size, gap)
    taken = answer(receiver)
    assert sender.wait(100) == 0
    sender.communicate()
    return [(number, then, now) for number, then, now in taken]


def until(condition: Callable[[], bool], seconds: float = 100.0) -> None:
    """Wait until `condition` holds of the world outside, which notifies nobody."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, inspect.getsource(condition)
        time.sleep(0.05)


def processes_of(launcher: int) -> dict[str, int]:
    """Return the processes of a launcher's labs, by what they are."""
    kinds = {"sleep 1000": "sleep", "forward.py {": "forwarder", "namespaces.py keep": "keeper"}
    found = [member for member in orphans.members() if member.launcher == launcher]
    return {
        kind: member.pid
        for member in found
        for words, kind in kinds.items()
        if words in member.command and "namespaces.py enter" not in member.command
    }


@with_forwarder
def test_a_ping_takes_the_mean_of_its_hosts_latencies() -> None:
    impairments = Impairments(latency=0.04, host_latency={2: 0.12})
    with Cluster(3, impairments=impairments) as cluster:
        near, far = pings(cluster, [(0, 1), (0, 2)], 150, 0.01)
    for answers, latency in ((near, 0.04), (far, 0.08)):
        seconds = [spent for _, spent in answers]
        assert len(seconds) == 150
        assert latency <= min(seconds) <= median(seconds) < latency + 0.04  # less than the next


@with_forwarder
def test_jitter_spreads_pings_by_as_much_as_given_around_the_latency() -> None:
    latency, jitter = 0.06, 0.02
    impairments = Impairments(latency=latency, jitter=jitter)
    with Cluster(2, impairments=impairments) as cluster:
        (answers,) = pings(cluster, [(0, 1)], 1500, 0.004)
    seconds = [spent for _, spent in answers]
    # Each way: a random value every 2 * jitter, uniform within jitter / 2, and a line in between.
    # A busy machine adds to some of them.
    assert median(seconds) == pytest.approx(latency, rel=0.15)
    assert stdev(seconds) > 0.8 * jitter / 3
    assert latency - jitter <= min(seconds) < latency - jitter / 2
    assert sorted(seconds)[-150] <= latency + jitter


@with_forwarder
def test_jitter_keeps_packets_in_order_and_their_mean_delay() -> None:
    impairments = Impairments(latency=0.04, jitter=0.02)
    with Cluster(2, bandwidth=None, impairments=impairments) as cluster:
        taken = packets(cluster, 0, 1, 10_000, gap=0.0005)
    assert [number for number, _, _ in taken] == list(range(10_000))
    delays = [now - then for _, then, now in taken]
    assert median(delays) == pytest.approx(0.02, rel=0.2)
    assert 0.01 <= min(delays) < 0.013 and max(delays) > 0.027
    # A delay changes at most half as fast as time, so by 2.5 ms in 10 packets: it does not jump.
    changes = sorted(
        abs(after - before) for before, after in zip(delays, delays[10:], strict=False)
    )
    assert changes[len(changes) * 9 // 10] < 0.004  # but for those that a busy machine delays


@with_forwarder
def test_packets_are_lost_at_random_by_seed_and_counted() -> None:
    lost: list[set[int]] = []
    count = 20_000
    for seed in (0, 0, 1):
        impairments = Impairments(host_loss={1: 0.2}, seed=seed)
        with Cluster(3, bandwidth=None, impairments=impairments) as cluster:
            arrived = [number for number, _, _ in packets(cluster, 0, 1, count)]
            lost.append(set(range(count)) - set(arrived))
            counted = cluster.counts()
            assert len(packets(cluster, 2, 0, 1000)) == 1000
            assert cluster.counts()[2].lost == 0
        assert arrived == sorted(arrived)
        assert len(lost[-1]) == pytest.approx(0.1 * count, rel=0.05)
        assert 0 <= counted[0].lost - len(lost[-1]) <= ENDS
        assert counted[0].failed == 0
        assert 0 <= counted[0].frames - count <= 2 * ENDS
    assert lost[0] == lost[1] != lost[2]
    # Neighbors are as often lost together as chance has it.
    together = sum(number + 1 in lost[0] for number in lost[0])
    assert together == pytest.approx(0.1 * len(lost[0]), rel=0.25)


@with_forwarder
def test_a_host_sends_at_its_rate_and_lost_packets_count_as_sent() -> None:
    rate, count, size, frame = 10e6, 1500, 1400, 1442
    impairments = Impairments(latency=0.05, jitter=0.01, loss=0.1)
    with Cluster(2, bandwidth=rate, impairments=impairments) as cluster:
        taken = packets(cluster, 0, 1, count, size)
        sent = cluster.tx_bytes()
    seconds = taken[-1][2] - taken[0][2]
    # A bucket of 24 KiB passes at once.
    law = (count * frame - 24 * 1024) * 8 / rate
    assert 0.95 * law < seconds < 3 * law
    assert len(taken) < 0.95 * count
    assert count * frame <= sent[0] <= (count + ENDS) * frame + 1000
    assert sent[1] < 0.01 * sent[0]  # that there is no receiver for the last packets


@with_forwarder
def test_a_stream_arrives_whole_with_any_congestion_control() -> None:
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    whole = hashlib.sha256(bytes(range(256)) * 2000).hexdigest()
    impairments = Impairments(latency=0.01, jitter=0.005, loss=0.02)
    with Cluster(2, impairments=impairments) as cluster:
        assert cluster.congestion_control in ("cubic", "reno")
        for name in known:
            receiver = serve(cluster, 1, STREAM)
            sender = start(cluster, 0, POUR, cluster.addresses[1], name, 2000)
            assert sender.communicate(timeout=200)[0].decode().strip() == name
            assert receiver.communicate(timeout=200)[0].decode().strip() == whole
        assert cluster.counts()[0].lost > 0
    with Cluster(2) as cluster:
        assert cluster.congestion_control == "reno"
        with pytest.raises(ValueError, match="counted only with latency, jitter or loss"):
            cluster.counts()


@with_forwarder
def test_the_hosts_default_congestion_control_can_be_chosen() -> None:
    """A program that chooses none, such as gloo, uses it."""
    program = (
        "import socket; s = socket.socket();"
        "print(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b'\\0').decode())"
    )
    names = congestion_controls()
    assert names
    for number, name in enumerate(names):
        impairments = Impairments(latency=0.01) if number % 2 else None
        with Cluster(2, impairments=impairments, congestion_control=name) as cluster:
            assert cluster.congestion_control == name
            assert start(cluster, 1, program).communicate(timeout=200)[0].decode().strip() == name
    with pytest.raises(ValueError, match=f"must be one of {', '.join(names)} .*, not 'fast'"):
        Cluster(2, congestion_control="fast")


@with_forwarder
def test_a_connection_is_cut_and_restored() -> None:
    with Cluster(3, impairments=Impairments(latency=0.02)) as cluster:
        for cut, first, second in (([], 10, 10), ([(0, 1)], 0, 10), ([], 10, 10)):
            cluster.cut(cut)
            answers = pings(cluster, [(0, 1), (0, 2)], 10, 0.01)
            assert [len(answer) for answer in answers] == [first, second]


@with_forwarder
def test_nothing_is_left_behind() -> None:
    ways = {"exit": [], "launcher": ["launcher"], "keeper": ["keeper", "launcher"]}
    for way, victims in ways.items():
        with subprocess.Popen(
            [*programs.NEW, "-c", LAUNCHER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as launcher:
            assert launcher.stdin is not None and launcher.stdout is not None
            assert launcher.stdout.readline() == b"ready\n"
            pid = launcher.pid
            until(lambda pid=pid: "sleep" in processes_of(pid))  # type: ignore[misc]
            found = {**processes_of(pid), "launcher": pid}
            assert found.keys() == {"forwarder", "keeper", "sleep", "launcher"}
            network = os.stat(f"/proc/{found['sleep']}/ns/net").st_ino
            assert network != os.stat("/proc/self/ns/net").st_ino
            for victim in victims:
                os.kill(found[victim], signal.SIGKILL)
            launcher.stdin.close()
            assert (way, launcher.wait(100)) == (way, -signal.SIGKILL if victims else 0)
        until(lambda pid=pid: not processes_of(pid))  # type: ignore[misc]


@with_forwarder
def test_programs_end_if_the_forwarder_does() -> None:
    with Cluster(2, impairments=Impairments(latency=0.01)) as cluster:
        process = cluster.start(1, ["sleep", "1000"], env=dict(os.environ))
        until(lambda: "sleep" in processes_of(os.getpid()))
        os.kill(processes_of(os.getpid())["forwarder"], signal.SIGKILL)
        assert process.wait(100) == -signal.SIGKILL


def test_without_a_compiler_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reason = refusal() or ""
    if reason.startswith("no network namespaces"):
        return
    monkeypatch.setattr(native, "load", lambda module, version: None)
    assert native.path("laconic.lab.emulation._forward", VERSION) is None
    with Cluster(2, impairments=Impairments()) as cluster:  # it needs no forwarder
        assert len(cluster.tx_bytes()) == 2
    with pytest.raises(ForwardError, match="install a C compiler, such as gcc"):
        Cluster(2, impairments=Impairments(loss=0.1))
    assert main(["lab", "--latency", "20ms", "--", "true"]) == 2
    said = capfd.readouterr().err
    assert said.startswith("laconic: latency, jitter and loss need laconic's C extensions")


def test_a_throttled_link_stands_in_for_latency_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NamespacesUnavailable("no network namespaces: on purpose")

    monkeypatch.setattr(Cluster, "__init__", refuse)
    with emulate(Network(2, impairments=Impairments(latency=0.1))) as (cluster, reason):
        assert not cluster.emulated and reason == "no network namespaces: on purpose"
    for impairments in (Impairments(loss=0.1), Impairments(0.1, host_jitter={1: 0.05})):
        with (
            pytest.raises(OSError, match="jitter and loss need emulated hosts: no network"),
            emulate(Network(2, impairments=impairments)),
        ):
            pass


def test_values_out_of_range_are_refused() -> None:
    for impairments, message in (
        (Impairments(latency=-0.1), r"latency must be from 0 to 10 s, not -0\.1"),
        (Impairments(latency=float("nan")), "latency must be from 0 to 10 s, not nan"),
        (Impairments(latency=0.01, jitter=0.02), "jitter must be .* which is 10 ms, not 0.02"),
        (Impairments(latency=0.03, jitter=0.02, host_latency={1: 0.01}), "which is 10 ms"),
        (Impairments(loss=1.0), r"loss must be from 0 to less than 1, not 1\.0"),
        (Impairments(host_loss={2: 0.1}), "no host 2; hosts are numbered 0 to 1"),
        (Impairments(seed=-1), "the network's seed must be an integer of at least 0, not -1"),
    ):
        with pytest.raises(ValueError, match=message):
            Cluster(2, impairments=impairments)


def test_impairments_are_described() -> None:
    assert not Impairments(seed=3) and str(Impairments()) == ""
    assert Impairments(host_loss={1: 0.1})
    impairments = Impairments(0.08, 0.01, 0.001, host_latency={2: 0.2}, host_loss={1: 0.05})
    words = "80 ms latency, host2 200 ms latency, 10 ms jitter, 0.1% loss, host1 5% loss"
    assert str(impairments) == words
    assert impairments.of_host(2) == (0.2, 0.01, 0.001)
    assert impairments.round_trip(2) == 0.2
