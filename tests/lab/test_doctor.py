"""``laconic doctor``: what it finds on a host, and what several hosts find together."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from laconic.cli import main
from laconic.lab.doctor import host_checks, network_checks
from laconic.lab.doctor.finding import Finding
from laconic.lab.doctor.network_checks import Rendezvous, check_network
from laconic.lab.emulation.cluster import NamespacesUnavailable

from tests.support.gloo import free_port

CARDS = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.5"], "eth1": ["10.9.0.5"], "wlan0": []}


def texts(findings: list[Finding], level: str) -> str:
    return "\n".join(f.text for f in findings if f.level == level)


# -- one host ----

MASTER, IFNAME = "MASTER_ADDR", "GLOO_SOCKET_IFNAME"


NETWORKS: list[tuple[dict[str, str], str, str, str, str]] = [
    ({}, "10.0.0.5", "ok", "host name", ""),
    ({}, "127.0.1.1", "warning", "resolves to 127.0.1.1", "GLOO_SOCKET_IFNAME=eth0"),
    ({}, "", "warning", "does not resolve", "GLOO_SOCKET_IFNAME=eth0"),
    ({MASTER: "10.0.0.1"}, "127.0.1.1", "problem", "no other host reaches", "export"),
    ({MASTER: "127.0.0.1"}, "127.0.1.1", "warning", "a single host works", "export"),
    ({IFNAME: "eth7"}, "", "problem", "eth7 does not exist", "lo, eth0, eth1"),
    ({IFNAME: "wlan0"}, "", "problem", "wlan0 has no address", "set it to"),
]
"""Variables, what the host's name resolves to, and what is found."""


def test_the_network_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def toward(host: str) -> str | None:
        """Every remote host is reached through eth0, and names do not resolve."""
        if host == "localhost" or host.startswith("127."):
            return "127.0.0.1"
        return "10.0.0.5" if host[0].isdigit() else None

    monkeypatch.setattr(host_checks, "address_toward", toward)
    for environ, name, level, said, remedy in NETWORKS:
        found = host_checks.network(environ, CARDS, [name] if name else [])
        worst = [f for f in found if f.level != "ok"] or found
        assert {f.level for f in worst} == {level} and any(said in f.text for f in worst)
        assert remedy in " ".join(f.remedy for f in found)
        assert all(f.remedy for f in worst if level != "ok")


def test_the_lab_and_connections_of_this_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NamespacesUnavailable("no network namespaces: not here")

    monkeypatch.setattr(host_checks, "Cluster", refuse)
    (warning,) = (f for f in host_checks.lab() if f.level == "warning")
    assert warning.text == "no network namespaces: not here" and "root" in warning.remedy
    names = ("LACONIC_TLS", "LACONIC_SECRET_FILE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert "can take a worker's place" in texts(host_checks.connections(), "ok")
    (tmp_path / "secret").write_bytes(b"s" * 32)
    monkeypatch.setenv("LACONIC_SECRET_FILE", str(tmp_path / "secret"))
    assert "prove that they have the secret" in texts(host_checks.connections(), "ok")
    monkeypatch.delenv("LACONIC_SECRET_FILE")
    for name in names:
        with monkeypatch.context() as patch:
            patch.setenv(name, "/nothing")
            assert [finding.level for finding in host_checks.connections()] == ["problem"], name


# -- several hosts, as processes ----

PROGRAM = """
import json, sys
from dataclasses import asdict
from laconic.lab.doctor.finding import Finding
from laconic.lab.doctor.network_checks import Rendezvous, check_network

rank, world, port = map(int, sys.argv[1:4])
own = [Finding("warning", "machine", f"of rank {rank}", "mend it")]
report = check_network(Rendezvous(rank, world, "127.0.0.1", port), own, timeout=float(sys.argv[4]))
print(json.dumps({"findings": [asdict(f) for f in report.findings], **report.numbers}))
"""


def gather(
    ranks: list[int], world: int, timeout: float = 60.0, **of_rank_0: str
) -> list[dict[str, Any]]:
    """What hosts on loopback find together. ``of_rank_0``: its additional variables."""
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(world), port, str(timeout)],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **(of_rank_0 if rank == 0 else {})},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]
    return [json.loads(process.communicate(timeout=200)[0]) for process in processes]


def said(found: dict[str, Any], level: str) -> str:
    return texts([Finding(**f) for f in found["findings"]], level)


def test_hosts_that_are_well_find_so(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, _ = gather([0, 1, 2], 3)
    assert said(first, "problem") == said(second, "problem") == ""
    assert re.search(r"3 hosts connect; .* [GM]bit/s or more", said(first, "ok"))
    assert first["rate"] == second["rate"] > 0 and first["round_trip"] == second["round_trip"] > 0
    assert [host["rank"] for host in first["hosts"]] == [0, 1, 2]
    warnings = "rank 1 ({0}): of rank 1\nrank 2 ({0}): of rank 2".format(socket.gethostname())
    assert warnings in said(first, "warning") and "of rank" not in said(second, "warning")
    *_, command = said(first, "ok").partition("laconic ")
    words = command.replace("params P", "params 100M").replace("step-time T", "step-time 1s")
    assert main([*words.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recommendation"]


def test_hosts_that_cannot_connect_find_why(tmp_path: Path) -> None:
    """Rank 0 has a secret that the other one lacks."""
    (tmp_path / "secret").write_bytes(b"s" * 32)
    for found in gather([0, 1], 2, LACONIC_SECRET_FILE=str(tmp_path / "secret")):
        (problem,) = (f for f in found["findings"] if f["level"] == "problem")
        assert problem["text"].startswith("the hosts cannot connect to each other: ")
        assert "LACONIC_SECRET_FILE" in problem["text"] and "firewalls" in problem["remedy"]


def test_a_host_that_is_not_there_or_comes_twice() -> None:
    found = gather([0, 1, 1], 3, 20.0)
    assert sum("already joined as rank 1" in said(f, "problem") for f in found) == 1
    assert said(found[0], "problem") == "rank 2 of 3 did not join within 20 s"


def test_a_master_that_is_absent_elsewhere_or_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_checks, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(network_checks, "PROBE_SECONDS", 0.0)
    for name in ("MASTER_ADDR", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):  # restored at the end
        monkeypatch.setenv(name, "1")

    def told(rank: int, host: str, port: int) -> str:
        (found,) = check_network(Rendezvous(rank, 2, host, port), timeout=1).findings
        assert found.level == "problem" and found.remedy
        return found.text

    port = free_port()
    assert f"rank 0 cannot be reached at 127.0.0.1:{port}: " in told(1, "127.0.0.1", port)
    with socket.create_server(("", 0)) as server:  # accepts, and never says a word
        port = server.getsockname()[1]
        assert re.search("cannot be reached|did not end", told(1, "127.0.0.1", port))
        assert "already in use" in told(0, "127.0.0.1", port)
    assert "192.0.2.77:29500" in told(0, "192.0.2.77", 29500)


def test_versions_that_differ_between_hosts() -> None:
    ours = host_checks.versions()
    assert network_checks.differences([ours, ours]) == []
    other = {**ours, "torch": "2.6.0", "python": "3.10.1"}
    python, torch = network_checks.differences([ours, other, ours])
    assert (python.level, torch.level) == ("warning", "problem")
    assert f"torch differs: {ours['torch']} on ranks 0, 2; 2.6.0 on rank 1" in torch.text


def test_the_command_reports_and_meets_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    warning = Finding("warning", "machine", "hm", "mend it")
    for name in ("LOCAL_WORLD_SIZE", "MASTER_ADDR", "WORLD_SIZE"):  # restored at the end
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(host_checks, "examine", lambda: [warning])
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"warning +hm\n +-> mend it\n", said) and "0 problems, 1 warning" in said
    master = ["--master", f"127.0.0.1:{free_port()}", "--hosts", "2", "--timeout", "1s"]
    assert main(["doctor", "--json", *master, "--rank", "0"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert "rank 1 of 2 did not join within 1 s" in str(found["findings"])
    assert [host["rank"] for host in found["hosts"]] == [0]
    assert asdict(warning) in found["findings"]
