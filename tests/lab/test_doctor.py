"""``laconic doctor``: what it finds on a host, and what several hosts find together."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import laconic
from laconic.advisor import advice_on
from laconic.advisor.numbers import facts_from
from laconic.auto import Auto, choose
from laconic.cli import main
from laconic.cli.doctor import report
from laconic.codecs import kernels
from laconic.lab.doctor import (
    connections,
    host_checks,
    network_checks,
    network_findings,
    outlook,
    probes,
)
from laconic.lab.doctor.finding import Finding
from laconic.lab.doctor.host_checks import Interface
from laconic.lab.doctor.network_checks import Rendezvous, check_network, rendezvous_of
from laconic.lab.doctor.network_findings import NetworkReport
from laconic.lab.doctor.outlook import Task
from laconic.lab.emulation.cluster import (
    Cluster,
    ForwardError,
    Impairments,
    NamespacesUnavailable,
    launch,
)
from laconic.links import congestion, frames
from laconic.predict import predict

from tests.lab.test_cluster import refusal, with_namespaces
from tests.lab.test_forward import with_forwarder
from tests.support.gloo import free_port

LO = Interface(True, ("127.0.0.1", "::1"))
ETH = Interface(True, ("10.0.0.5",))
CARDS = {
    "lo": LO,
    "eth0": ETH,
    "eth1": Interface(True, ("10.9.0.5",)),
    "wlan0": Interface(True, ()),
}


def texts(findings: list[Finding], level: str) -> list[str]:
    return [f.text for f in findings if f.level == level]


def remedies(findings: list[Finding]) -> str:
    return " ".join(f.remedy for f in findings)


# -- one host ----


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every remote host is reached through eth0, and names do not resolve."""

    def toward(host: str) -> str | None:
        if host == "localhost" or host.startswith("127."):
            return "127.0.0.1"
        return ETH.addresses[0] if host[0].isdigit() else None

    monkeypatch.setattr(host_checks, "address_toward", toward)


@pytest.mark.parametrize(
    ("environ", "names", "level", "said", "remedy"),
    [
        ({}, ["10.0.0.5"], "ok", "host name", ""),
        ({}, ["127.0.1.1"], "warning", "resolves to 127.0.1.1", "GLOO_SOCKET_IFNAME=eth0"),
        ({}, [], "warning", "does not resolve", "GLOO_SOCKET_IFNAME=eth0"),
        ({"MASTER_ADDR": "10.0.0.1"}, ["127.0.1.1"], "problem", "no other host reaches", "export"),
        ({"MASTER_ADDR": "127.0.0.1"}, ["127.0.1.1"], "warning", "a single host works", "export"),
        ({"MASTER_ADDR": "10.0.0.1"}, ["10.0.0.5"], "ok", "reached from 10.0.0.5, eth0", ""),
        ({"MASTER_ADDR": "head"}, ["10.0.0.5"], "problem", "does not resolve", "/etc/hosts"),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, ["127.0.1.1"], "ok", "interfaces", ""),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, [], "problem", "eth7 does not exist", "lo, eth0, eth1"),
        ({"GLOO_SOCKET_IFNAME": "eth0,ib0"}, [], "problem", "ib0 does not exist", "unset"),
        ({"GLOO_SOCKET_IFNAME": "wlan0"}, [], "problem", "wlan0 has no address", "set it to"),
        (
            {"GLOO_SOCKET_IFNAME": "eth1", "MASTER_ADDR": "10.0.0.1"},
            [],
            "warning",
            "but GLOO_SOCKET_IFNAME=eth1",
            "set GLOO_SOCKET_IFNAME=eth0",
        ),
    ],
)
def test_the_network(
    routed: None, environ: dict[str, str], names: list[str], level: str, said: str, remedy: str
) -> None:
    found = host_checks.network(environ, CARDS, names)
    worst = [f for f in found if f.level != "ok"] or found
    assert {f.level for f in worst} == {level}
    assert any(said in f.text for f in worst)
    assert remedy in remedies(found)
    assert all(f.remedy for f in worst if level != "ok")


def test_a_host_without_a_network_is_told_so() -> None:
    found = host_checks.network({"GLOO_SOCKET_IFNAME": "lo"}, {"lo": LO})
    assert texts(found, "warning") == [
        "only the loopback interface has an address: no other host can be reached"
    ]


def test_this_hosts_interfaces_are_read() -> None:
    found = host_checks.interfaces()
    loopback = found.get("lo") or found["lo0"]
    assert loopback.up
    if sys.platform == "linux":
        assert loopback.addresses[0] == "127.0.0.1"
        names = Path("/proc/net/dev").read_text()
        assert all(f"{name}:" in names for name in found)


@pytest.mark.parametrize(
    ("environ", "cores", "level", "remedy"),
    [
        ({}, 1, "ok", ""),
        ({"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}, 4, "ok", ""),
        ({"LOCAL_WORLD_SIZE": "5", "OMP_NUM_THREADS": "1"}, 4, "warning", "fewer processes"),
        ({"LOCAL_WORLD_SIZE": "2"}, 8, "warning", "OMP_NUM_THREADS=4"),
        ({"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "5"}, 8, "warning", "OMP_NUM_THREADS=4"),
    ],
)
def test_cores_against_processes(
    environ: dict[str, str], cores: int, level: str, remedy: str
) -> None:
    found = host_checks._cores(environ, cores)
    assert found.level == level and remedy in found.remedy


@pytest.mark.parametrize(
    ("environ", "limit", "level"),
    [
        ({}, 4096, "ok"),
        ({}, 1024, "warning"),
        ({"WORLD_SIZE": "8"}, 256, "ok"),
        ({"WORLD_SIZE": "250"}, 1024, "problem"),
    ],
)
def test_open_files_against_ranks(environ: dict[str, str], limit: int, level: str) -> None:
    (found,) = host_checks._descriptors(environ, limit)
    assert found.level == level
    if level != "ok":
        assert "enough for about 128 ranks" in found.text and "ulimit -n 1878" in found.remedy


def test_a_disk_that_is_nearly_full() -> None:
    assert host_checks._disk(100 << 30).level == "ok"
    full = host_checks._disk(1 << 30)
    assert (full.level, full.text) == ("warning", "1.0 GiB free on this directory's disk")


@pytest.mark.parametrize(
    ("cards", "nccl", "processes", "level", "said"),
    [
        (0, False, "1", "ok", "no CUDA device"),
        (4, True, "4", "ok", "NCCL, 4 CUDA devices (H200)"),
        (4, True, "8", "problem", "8 processes (LOCAL_WORLD_SIZE) share 4 CUDA devices"),
        (4, False, "4", "problem", "no NCCL"),
    ],
)
def test_cards_and_back_ends(
    monkeypatch: pytest.MonkeyPatch, cards: int, nccl: bool, processes: str, level: str, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda card: "H200")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    first, *_, last = host_checks.software({"LOCAL_WORLD_SIZE": processes})
    assert first.text == ", ".join(f"{k} {v}" for k, v in host_checks.versions().items())
    assert last.level == level and said in last.text


def test_a_torch_without_gloo_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    assert texts(host_checks.software({}), "problem") == ["this torch has no gloo backend"]


def test_kernels_that_were_not_compiled_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "library", lambda: None)
    assert texts(host_checks.software({}), "warning")[-1].startswith(
        "not compiled: the message transport"
    )
    monkeypatch.setattr(kernels, "library", lambda: None)
    assert "kernels and the message transport" in texts(host_checks.software({}), "warning")[-1]


def test_what_the_lab_needs_is_tried() -> None:
    found = host_checks.lab()
    assert all(f.group == "lab" for f in found)
    reason = refusal()
    if reason is not None:
        assert reason in texts(found, "warning")
        return
    assert "network namespaces are available" in texts(found, "ok")
    shaped = [f for f in found if "tbf" in f.text]
    delayed = [f for f in found if "latency" in f.text or "delayed" in f.text]
    assert len(shaped) == len(delayed) == 1
    try:
        with Cluster(1, bandwidth=1e6):
            assert shaped[0].level == "ok"
    except NamespacesUnavailable:
        assert shaped[0].level == "warning"


def test_a_kernel_that_refuses_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NamespacesUnavailable("no network namespaces: not here")

    monkeypatch.setattr(host_checks, "Cluster", refuse)
    (found,) = (f for f in host_checks.lab() if f.level == "warning")
    assert found.text == "no network namespaces: not here" and "root" in found.remedy


@pytest.mark.parametrize(("refused", "levels"), [(["tbf"], 1), ([], 0)])
def test_shapers_that_the_kernel_lacks(
    monkeypatch: pytest.MonkeyPatch, refused: list[str], levels: int
) -> None:
    monkeypatch.setattr(host_checks, "_try_shapers", lambda: dict.fromkeys(refused, "no such file"))
    monkeypatch.setattr(host_checks, "Cluster", lambda *_, **__: contextlib.nullcontext())
    found = host_checks.lab()
    assert [f.text for f in found if f.level == "warning"] == ["no tbf: no such file"] * levels


def test_a_lab_that_cannot_delay_packets_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, impairments: Impairments) -> None:
        raise ForwardError("latency, jitter and loss need a compiler")

    monkeypatch.setattr(host_checks, "_try_shapers", dict)
    monkeypatch.setattr(host_checks, "Cluster", refuse)
    (found,) = (f for f in host_checks.lab() if f.level == "warning")
    assert found.text == "latency, jitter and loss need a compiler"
    assert "work without --latency" in found.remedy


# -- several hosts ----


def gather(
    world: int,
    *,
    ranks: list[int] | None = None,
    timeout: float = 20.0,
    options: Mapping[int, dict[str, Any]] | None = None,
    own: Mapping[int, list[Finding]] | None = None,
) -> dict[int, NetworkReport]:
    """A meeting of threads of this process, over loopback."""
    port = free_port()
    met: dict[int, NetworkReport] = {}

    def attend(index: int, rank: int) -> None:
        place = Rendezvous(rank, world, "127.0.0.1", port)
        more = (options or {}).get(index, {})
        met[index] = check_network(place, (own or {}).get(rank, []), timeout=timeout, **more)

    ranks = list(range(world)) if ranks is None else ranks
    threads = [threading.Thread(target=attend, args=pair) for pair in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
        assert not thread.is_alive()
    return met


def test_hosts_that_are_well_find_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "SEND_SECONDS", 0.2)
    met = gather(3)
    assert all(texts(m.findings, "problem") == [] for m in met.values())
    told = texts(met[0].findings, "ok")
    assert any("6 of 6 connections" in text for text in told)
    assert any("3 hosts, all with the same python, torch and laconic" in text for text in told)
    pairs = {(p.source, p.target): p for p in met[0].pairs}
    assert len(pairs) == 6
    for pair in pairs.values():
        assert pair.latency > 0 and abs(pair.offset) <= pair.uncertainty + 0.05
    assert [(r.source, r.target) for r in met[0].rates] == [(0, 1), (1, 2), (2, 0)]
    assert all(r.rate > 0 for r in met[0].rates)
    assert any("2 of 2 connections" in text for text in texts(met[1].findings, "ok"))
    assert any("on all hosts, with" in text for text in told)
    seen = json.loads(json.dumps(met[0].numbers()))["outlook"]
    assert seen["workers"] == 3 and seen["params"] == Task().params
    assert seen["rate"] == min(r.rate for r in met[0].rates)
    assert seen["round_trip"] == max(p.latency for p in met[0].pairs)
    assert any(f"auto() would choose {seen['recipe']}" in text for text in told)
    assert "outlook" not in met[1].numbers()
    assert any(text.startswith("rank 0 reports") for text in texts(met[1].findings, "ok"))


@with_forwarder
def test_what_hosts_far_apart_are_told() -> None:
    """Rate, round trip, loss, clocks, TLS, congestion control, and the choice for a stated task."""
    command = [sys.executable, "-m", "laconic", "doctor", "--params", "2M", "--step-time", "0.2s"]
    far = Impairments(latency=0.08, loss=0.01)
    with Cluster(2, bandwidth=20e6, impairments=far) as cluster:
        job = launch(
            cluster, [*command, "--json"], env={"LACONIC_TLS": "", "LACONIC_CONGESTION": ""}
        )
        outcomes = job.wait(200)
        assert not any(outcome.failed for outcome in outcomes), outcomes
        said = json.loads(job.stdout(0))
    told = "\n".join(finding["text"] for finding in said["findings"])
    assert re.search(r"round trips take [\d.]+ m?s to ", told)
    assert re.search(r"of the packets \(rank . to .\) had to be sent again", told)
    assert "laconic's connections use" in told and "clocks agree" in told
    assert "TLS is off on all hosts" in told
    assert "with 2,000,000 parameters, steps that compute for 200 ms, one worker per host" in told
    seen = said["outlook"]
    # a busy machine only makes them longer, and slower
    assert 0.08 <= seen["round_trip"] < 2 and 1e5 < seen["rate"] < 40e6
    facts = facts_from(
        params=2_000_000,
        step_time=0.2,
        bandwidth=seen["rate"],
        one_way=seen["round_trip"] / 2,
        nodes=2,
    )
    assert seen["recipe"] == choose(Auto(), facts, None, {})[0]


def test_a_host_that_is_not_there_is_named() -> None:
    met = gather(3, ranks=[0, 2], timeout=3)
    for one in met.values():
        (problem,) = [f for f in one.findings if f.level == "problem"]
        assert problem.text == "rank 1 of 3 did not join within 3 s"
        assert "--master" in problem.remedy
    assert any("2 of 2 connections" in text for text in texts(met[0].findings, "ok"))


def test_what_differs_between_hosts() -> None:
    ours = host_checks.versions()
    options: dict[int, dict[str, Any]] = {
        1: {
            "known": {**ours, "torch": "2.6.0", "python": "3.10.1"},
            "settings": {"TLS": "on", "secret": "none"},
        },
        2: {"clock": lambda: time.time() + 7.5},
    }
    warning = Finding("warning", "machine", "1.0 GiB memory available", "add memory")
    met = gather(3, options=options, own={1: [warning, Finding("ok", "machine", "2 cores")]})
    found = met[0].findings
    tls, problem = texts(found, "problem")
    assert tls.startswith("TLS is off on ranks 0, 2; TLS is on on rank 1")
    assert problem == f"torch differs: {ours['torch']} on ranks 0, 2; 2.6.0 on rank 1"
    warnings = texts(found, "warning")
    assert len([w for w in warnings if not w.startswith("in a ring")]) == 3  # a busy machine
    assert any(t.startswith("python differs") and "3.10.1 on rank 1" in t for t in warnings)
    assert any("the clock of rank 2 is 7.5 s ahead of rank 0's (±" in t for t in warnings)
    host = socket.gethostname()
    assert f"rank 1 ({host}, 127.0.0.1): 1.0 GiB memory available" in warnings
    assert "torch differs" in str(met[1].findings)


def test_a_host_that_cannot_be_reached_is_named() -> None:
    met = gather(3, options={1: {"address": "240.0.0.1"}})
    (problem,) = texts(met[0].findings, "problem")
    assert "rank 1 (" in problem and "cannot be reached at port" in problem
    assert "by ranks 0, 2" in problem or "by ranks 2, 0" in problem
    (own,) = texts(met[2].findings, "problem")
    assert "by rank 2:" in own
    assert texts(met[1].findings, "problem") == []
    assert [(r.source, r.target) for r in met[0].rates] == [(1, 2), (2, 0)]


def test_two_hosts_of_one_rank_are_told() -> None:
    """The others wait for rank 2 meanwhile, so that the second of rank 1 cannot come too late."""
    met = gather(3, ranks=[0, 1, 1], timeout=3)
    second = [m for m in met.values() if "already joined as rank 1" in str(m.findings)]
    assert len(second) == 1
    assert texts(met[0].findings, "problem") == ["rank 2 of 3 did not join within 3 s"]


def test_a_host_that_goes_away_during_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_checks, "GRACE_SECONDS", 0.5)
    port = free_port()
    met: list[NetworkReport] = []
    place = Rendezvous(0, 2, "127.0.0.1", port)
    thread = threading.Thread(target=lambda: met.append(check_network(place, timeout=20)))
    thread.start()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    card = {"rank": 1, "host": "beta", "address": "127.0.0.1", "port": free_port(), "versions": {}}
    dist.PrefixStore("laconic doctor", store).set("host/1", json.dumps(card))
    thread.join(200)
    problems = texts(met[0].findings, "problem")
    assert "rank 1 (beta, 127.0.0.1) stopped answering during the tests" in problems
    assert any("cannot be reached at port" in p and "connection refused" in p for p in problems)


def test_a_master_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_checks, "GRACE_SECONDS", 0.5)
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    met = check_network(Rendezvous(1, 2, "127.0.0.1", port), timeout=1)
    assert texts(met.findings, "problem") == ["rank 0 did not report which hosts are present"]
    del store


def test_a_master_that_is_not_there() -> None:
    met = check_network(Rendezvous(1, 2, "127.0.0.1", port := free_port()), timeout=1)
    (found,) = met.findings
    assert found.text == (f"cannot reach rank 0 at 127.0.0.1:{port} within 1 s: connection refused")
    assert "rank 0's host" in found.remedy


def test_a_port_that_is_no_store_does_not_hold_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_checks, "GRACE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and never says a word
        met = check_network(Rendezvous(1, 2, "127.0.0.1", server.getsockname()[1]), timeout=1)
    (found,) = met.findings
    assert found.level == "problem"
    assert re.search("interrupted|did not end", found.text)


def test_a_master_elsewhere_or_on_a_port_in_use() -> None:
    (found,) = check_network(Rendezvous(0, 2, "192.0.2.77", 29500), timeout=1).findings
    assert found.text == "192.0.2.77 is not an address of this host, which is rank 0"
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        (found,) = check_network(Rendezvous(0, 2, "127.0.0.1", port), timeout=1).findings
    assert found.text == f"port {port} is in use on this host, which is rank 0"


def test_a_slow_host_is_named() -> None:
    rates = [probes.Rate(r, (r + 1) % 4, 1e9 if r != 2 else 1e8) for r in range(4)]
    (found,) = network_findings.rate_findings(NetworkReport(rates=rates))
    assert found.level == "warning"
    assert "100 Mbit/s (rank 2 to 3) or more; median 1 Gbit/s" in found.text
    (failed,) = network_findings.rate_findings(
        NetworkReport(rates=[probes.Rate(0, 1, 0.0, "no answer")])
    )
    assert "sending from rank 0 to rank 1 failed: no answer" in failed.text


HOST = """
import json, os, sys, time
from dataclasses import asdict, replace
from pathlib import Path
from laconic.lab.doctor.host_checks import versions
from laconic.lab.doctor.network_checks import Rendezvous, check_network
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) + 1
ready = Path(sys.argv[1])
(ready / str(rank)).touch()
while len(list(ready.iterdir())) < 4:  # all have imported torch
    time.sleep(0.05)
if rank == 1:
    options = {"address": "10.77.0.99"}  # nobody
elif rank == 2:
    options = {"address": "10.77.0.1"}  # somebody else
else:
    options = {"known": {**versions(), "laconic": "0.0.1"}} if rank == 3 else {}
place = Rendezvous(rank, world, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
met = check_network(place, timeout=4, **options)
print(json.dumps({"findings": [asdict(f) for f in met.findings], **met.numbers()}))
"""


@with_namespaces
def test_hosts_of_their_own_meet(tmp_path: Path) -> None:
    with Cluster(4, bandwidth=50e6) as cluster:
        job = launch(cluster, [sys.executable, "-c", HOST, str(tmp_path)])
        outcomes = job.wait(200)
        assert not any(outcome.failed for outcome in outcomes), outcomes
        said = [json.loads(job.stdout(rank)) for rank in range(4)]
    problems = {f["text"]: f["remedy"] for f in said[0]["findings"] if f["level"] == "problem"}
    told = "\n".join(problems)
    assert re.search(r"rank 4 of 5 did not join within 4 s", told)
    assert re.search(r"rank 1 \(host1, 10\.77\.0\.99\) cannot be reached .*: no ", told)
    assert re.search(r"rank 2 \(host2, 10\.77\.0\.1\) cannot be reached .*refused", told)
    assert re.search(r"laconic differs: .* on ranks 0, 1, 2; 0\.0\.1 on rank 3", told)
    assert len(problems) == 4 and all(problems.values())
    # of the ring 0, 1, 2, 3 only these two can be reached
    rates = {(r["source"], r["target"]): r["rate"] for r in said[0]["rates"]}
    assert set(rates) == {(2, 3), (3, 0)}
    assert all(1e6 < rate < 100e6 for rate in rates.values())


# -- the command ----


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)
    found = [Finding("ok", "software", "all well"), Finding("warning", "machine", "hm", "mend it")]
    monkeypatch.setattr(host_checks, "examine", lambda: list(found))


def test_the_report_is_grouped_and_fits(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "software",
        "  ok       all well",
        "machine",
        "  warning  hm",
        "           -> mend it",
        "0 problems, 1 warning, 1 ok",
    ]
    long = report([Finding("problem", "network", "word " * 60, "do " * 60)], color=False)
    assert max(map(len, long)) <= 80
    assert "\033[31mproblem " in report([Finding("problem", "a", "b", "c")], color=True)[1]


def test_a_problem_is_exit_code_1(
    alone: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = Finding("problem", "network", "no way", "find one")
    monkeypatch.setattr(host_checks, "examine", lambda: [bad])
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"findings": [asdict(bad)]}


def test_the_command_meets_others(
    alone: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    master = f"127.0.0.1:{free_port()}"
    options = ["doctor", "--json", "--master", master, "--world", "2", "--timeout", "1"]
    assert main([*options, "--rank", "0"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert "rank 1 of 2 did not join within 1 s" in str(said["findings"])
    assert [host["rank"] for host in said["hosts"]] == [0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rank", "0"], "--master, --rank and --world belong together"),
        (["--master", "h:1", "--rank", "0"], "belong together"),
        (["--master", "h", "--rank", "0", "--world", "2"], "--master must be HOST:PORT"),
        (["--master", "h:x", "--rank", "0", "--world", "2"], "--master must be HOST:PORT"),
        (["--master", "h:0", "--rank", "0", "--world", "2"], "a port from 1 to 65535"),
        (["--master", "h:1", "--rank", "2", "--world", "2"], "rank must be from 0 to world - 1"),
        (["--master", "h:1", "--rank", "0", "--world", "0"], "world at least 1"),
        (["--timeout", "0"], "timeout must be"),
        (["--params", "1M"], "--params and --step-time belong together"),
        (["--step-time", "1s"], "belong together"),
        (["--params", "1M", "--step-time", "1s"], "are for several hosts"),
        (["--params", "many", "--step-time", "1s"], "not a count: 'many'"),
        (["--params", "1M", "--step-time", "0"], "step-time must be"),
    ],
)
def test_mistakes_are_one_line(
    alone: None, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main(["doctor", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("laconic: ") and said in line


TORCHRUN = {"RANK": "6", "WORLD_SIZE": "8", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}


def test_torchruns_variables() -> None:
    assert rendezvous_of(TORCHRUN) == Rendezvous(6, 8, "head", 29500)
    by_host = {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert rendezvous_of({**TORCHRUN, **by_host}) == Rendezvous(1, 2, "head", 29500, agent=True)
    with pytest.raises(ValueError, match="MASTER_PORT is not"):
        rendezvous_of({k: v for k, v in TORCHRUN.items() if k != "MASTER_PORT"})
    with pytest.raises(ValueError, match="WORLD_SIZE must be an integer, not 'many'"):
        rendezvous_of({**TORCHRUN, "WORLD_SIZE": "many"})


def test_one_process_speaks_for_a_host(
    alone: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**TORCHRUN, "LOCAL_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("named", "names", "trip", "name"),
    [
        ("", ["bbr", "cubic"], 0.001, ""),
        ("", ["bbr", "cubic"], 0.080, "bbr"),
        ("", ["cubic"], 0.080, ""),
        ("system", ["bbr", "cubic"], 0.080, ""),
        ("cubic", ["bbr", "cubic"], 0.080, "cubic"),
        ("cubic", ["bbr", "cubic"], 0.001, "cubic"),
    ],
)
def test_which_congestion_control_connections_use(
    named: str, names: list[str], trip: float, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LACONIC_CONGESTION", named)
    monkeypatch.setattr(congestion, "available", lambda: names)
    assert congestion.name_for(trip) == name


def test_an_unknown_congestion_control_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LACONIC_CONGESTION", "fast")
    finding = connections.congestion_control()
    assert finding.level == "problem"
    assert finding.text.startswith("LACONIC_CONGESTION must be one of system, ")


def sent(
    *names: str, trip: float = 0.08, lost: float | None = None, named: str = ""
) -> NetworkReport:
    """The report of a ring whose hosts used these congestion controls."""
    world = len(names)
    settings = {"LACONIC_CONGESTION": named}
    return NetworkReport(
        hosts=[probes.HostInfo(r, f"host{r}", "127.0.0.1", 1, {}, settings) for r in range(world)],
        pairs=[probes.Pair(0, r, trip) for r in range(1, world)],
        rates=[
            probes.Rate(r, (r + 1) % world, 1e8, lost=lost and lost * (r + 1), congestion=name)
            for r, name in enumerate(names)
        ],
    )


@pytest.mark.parametrize(
    ("report", "level", "said"),
    [
        (sent("bbr", "bbr"), "ok", "round trips of 80 ms, laconic's connections use bbr on all"),
        (sent("bbr", "cubic", "cubic"), "warning", "bbr on rank 0; cubic on ranks 1, 2: a lost"),
        (sent("cubic", "cubic", named="cubic"), "ok", "use cubic on all hosts"),
        (sent("cubic", "cubic", trip=0.001), "ok", "round trips of 1 ms"),
    ],
)
def test_which_congestion_control_hosts_used(report: NetworkReport, level: str, said: str) -> None:
    (finding,) = network_findings.congestion_findings(report)
    assert finding.level == level and said in finding.text
    assert bool(finding.remedy) == (level == "warning")


def test_how_many_packets_were_sent_again() -> None:
    def told(lost: float | None) -> list[str]:
        return [f.text for f in network_findings.loss_findings(sent("", "", lost=lost))]

    assert told(None) == [], "the system does not report it"
    assert told(0.0) == ["no packet had to be sent again meanwhile"]
    (text,) = told(0.0006)
    assert text.startswith("at most 0.12% of the packets (rank 1 to 0)")


def hosts_with(*settings: dict[str, str]) -> list[probes.HostInfo]:
    return [
        probes.HostInfo(r, f"host{r}", "127.0.0.1", 1, {}, known)
        for r, known in enumerate(settings)
    ]


def test_hosts_with_other_settings_are_told_before_their_workers_refuse_each_other() -> None:
    on, off = {"TLS": "on", "secret": "ab"}, {"TLS": "off", "secret": "none"}
    (finding,) = network_findings.security_findings(hosts_with(on, on))
    assert (finding.level, finding.text) == ("ok", "TLS is on on all hosts, with the same secret")
    (finding,) = network_findings.security_findings(hosts_with(off, off))
    assert finding.text == "TLS is off on all hosts, with no LACONIC_SECRET_FILE"
    mixed, secret = network_findings.security_findings(hosts_with(on, off, off))
    assert mixed.level == secret.level == "problem" and mixed.remedy and secret.remedy
    assert "TLS is on on rank 0; TLS is off on ranks 1, 2: workers refuse" in mixed.text
    assert "secret 1 on rank 0; none on ranks 1, 2" in secret.text
    (secret,) = network_findings.security_findings(hosts_with(on, {**on, "secret": "cd"}))
    assert "secret 1 on rank 0; secret 2 on rank 1" in secret.text and "ab" not in secret.text
    assert network_findings.security_findings(hosts_with({}, {})) == [], "of an earlier version"


def test_the_settings_of_this_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("LACONIC_TLS", "LACONIC_SECRET_FILE", "LACONIC_CONGESTION"):
        monkeypatch.delenv(name, raising=False)
    assert connections.settings() == {"TLS": "off", "secret": "none", "LACONIC_CONGESTION": ""}
    path = tmp_path / "secret"
    path.write_bytes(b"s" * 32)
    monkeypatch.setenv("LACONIC_SECRET_FILE", str(path))
    found = connections.settings()["secret"]
    path.write_bytes(b"t" * 32)
    assert len(found) == 16 and connections.settings()["secret"] not in (found, "none")
    for name in ("LACONIC_TLS", "LACONIC_SECRET_FILE", "LACONIC_CONGESTION"):
        monkeypatch.setenv(name, "/nothing")
    assert set(connections.settings().values()) == {"invalid"}


# -- the choice of a recipe ----


def test_the_outlook_is_what_auto_and_advise_would_say() -> None:
    """Messages take half of a round trip, and the slowest host counts."""
    found = outlook.outlook(4, 50e6, 0.08, Task(10_000_000, 0.5))
    facts = facts_from(params=10_000_000, step_time=0.5, bandwidth=50e6, one_way=0.04, nodes=4)
    text, _ = choose(Auto(), facts, None, {})
    assert found.recipe == text and found.recipe.startswith("streaming_diloco(")
    assert found.recipe == advice_on(facts).recommendation
    assert found.ddp == predict(laconic.ddp(), facts).seconds > 10 * found.seconds
    fast = outlook.outlook(2, 100e9, 1e-5, Task(1_000_000, 1.0))
    assert fast.recipe == "ddp()"


def test_the_command_of_the_outlook_gives_the_same_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = outlook.outlook(4, 50e6, 0.08, Task(10_000_000, 0.5))
    _, *arguments = outlook.command(found).split()
    assert main([*arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["recommendation"] == found.recipe
    assert said["facts"]["rate"] == 50e6 and said["facts"]["one_way"] == pytest.approx(0.04)


def test_an_example_says_so() -> None:
    found = outlook.outlook(2, 50e6, 0.08, Task())
    example, hint = (f.text for f in outlook.outlook_findings(found, stated=False))
    assert example.startswith(
        "for example, with 100,000,000 parameters, steps that compute for 1 s"
    )
    assert "50 Mbit/s and 80 ms per round trip" in example
    assert found.recipe in example and "ddp() would take" in example
    assert "--params and --step-time" in hint and outlook.command(found) in hint
    own, hint = (f.text for f in outlook.outlook_findings(found, stated=True))
    assert own.startswith("with 100,000,000") and hint.startswith("to compare all recipes: laconic")


def test_whether_tls_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LACONIC_TLS", raising=False)
    assert connections.security().text.startswith("TLS is off")
    monkeypatch.setenv("LACONIC_TLS", "1")
    finding = connections.security()
    assert finding.level == "problem" and "needs GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY" in finding.text


def test_the_rate_is_that_of_the_second_half() -> None:
    came = [(0, 0.0), (1, 0.9), (2, 1.0), (12, 1.5), (22, 2.0)]
    assert probes._second_half(came) == (20, 1.0)
    assert probes._second_half([(0, 0.0), (5, 1.0)]) == (5, 1.0)
    assert probes._second_half([(0, 0.0), (5, 0.1), (7, 0.2)]) == (7, 0.2), "a fast network"
