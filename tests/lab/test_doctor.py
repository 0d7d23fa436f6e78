"""``laconic doctor``: what it finds on a host, and what several hosts find together."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from laconic.cli import main
from laconic.lab.doctor import (
    connections,
    host_checks,
    network_checks,
    network_findings,
    probes,
)  # fmt: skip
from laconic.lab.doctor.finding import Finding
from laconic.lab.doctor.network_checks import Rendezvous, check_network
from laconic.lab.doctor.network_findings import NetworkReport
from laconic.lab.emulation.cluster import NamespacesUnavailable
from laconic.links.job_secret import VARIABLE

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
    ({MASTER: "10.0.0.1"}, "10.0.0.5", "ok", "reached from 10.0.0.5, eth0", ""),
    ({MASTER: "head"}, "10.0.0.5", "problem", "does not resolve", "/etc/hosts"),
    ({IFNAME: "eth7"}, "", "problem", "eth7 does not exist", "lo, eth0, eth1"),
    ({IFNAME: "wlan0"}, "", "problem", "wlan0 has no address", "set it to"),
    ({IFNAME: "eth1", MASTER: "10.0.0.1"}, "", "warning", "but GLOO_SOCKET_IFNAME=eth1", "=eth0"),
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
    names = ("LACONIC_TLS", "LACONIC_SECRET_FILE", "LACONIC_CONGESTION")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert connections.settings() == {"TLS": "off", VARIABLE: "none", "LACONIC_CONGESTION": "none"}
    path, seen = tmp_path / "secret", set()
    monkeypatch.setenv("LACONIC_SECRET_FILE", str(path))
    for letter in (b"s", b"t"):
        path.write_bytes(letter * 32)
        seen.add(connections.settings()[VARIABLE])
    assert len(seen) == 2 and not any("none" in each or "s" * 8 in each for each in seen)
    for name in names:
        monkeypatch.setenv(name, "/nothing")
    assert [finding.level for finding in connections.connections()] == ["problem", "problem"]


# -- several hosts, as threads ----


def gather(
    ranks: list[int],
    world: int,
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

    threads = [threading.Thread(target=attend, args=pair) for pair in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
        assert not thread.is_alive()
    return met


def test_hosts_that_are_well_find_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "SEND_SECONDS", 0.2)
    monkeypatch.setattr(network_checks, "GRACE_SECONDS", 60.0)
    met = gather([0, 1, 2], 3)
    assert all(texts(m.findings, "problem") == "" for m in met.values())
    told = texts(met[0].findings, "ok")
    assert "6 of 6 connections" in told and "3 hosts, equal in python, torch, laconic, TLS" in told
    assert len({(p.source, p.target) for p in met[0].pairs if p.latency > 0}) == 6
    assert [(r.source, r.target) for r in met[0].rates if r.rate > 0] == [(0, 1), (1, 2), (2, 0)]
    assert "laconic advise --params P --step-time T --bandwidth " in told
    assert "rank 0 reports" in texts(met[1].findings, "ok")


def test_what_differs_between_hosts() -> None:
    ours = host_checks.versions()
    options: dict[int, dict[str, Any]] = {
        1: {
            "settings": {**ours, "torch": "2.6.0", "python": "3.10.1", "TLS": "on"},
            "address": "240.0.0.1",
        },
    }
    warning = Finding("warning", "machine", "1.0 GiB memory available", "add memory")
    met = gather([0, 1, 2], 3, options=options, own={1: [warning]})
    problems, warnings = (texts(met[0].findings, level) for level in ("problem", "warning"))
    assert "TLS differs: off on ranks 0, 2; on on rank 1" in problems
    assert f"torch differs: {ours['torch']} on ranks 0, 2; 2.6.0 on rank 1" in problems
    assert re.search(r"rank 1 \(.*cannot be reached at port .*by ranks (0, 2|2, 0)", problems)
    assert "python differs" in warnings and "3.10.1 on rank 1" in warnings
    assert re.search(r"rank 1 \(.*240.0.0.1\): 1.0 GiB memory available", warnings)
    assert "torch differs" in str(met[1].findings)


def test_a_host_that_is_not_there_comes_twice_or_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    met = gather([0, 1, 1], 3, timeout=2)
    assert sum("already joined as rank 1" in str(m.findings) for m in met.values()) == 1
    assert texts(met[0].findings, "problem") == "rank 2 of 3 did not join within 2 s"
    monkeypatch.setattr(network_checks, "GRACE_SECONDS", 0.5)
    port, went = free_port(), []
    place = Rendezvous(0, 2, "127.0.0.1", port)
    thread = threading.Thread(target=lambda: went.append(check_network(place, timeout=20)))
    thread.start()
    store = TCPStore("127.0.0.1", port, is_master=False)
    card = {"rank": 1, "host": "beta", "address": "127.0.0.1", "port": free_port(), "settings": {}}
    PrefixStore("laconic doctor", store).set("host/1", json.dumps(card))
    thread.join(200)
    assert "rank 1 (beta, 127.0.0.1) stopped answering" in texts(went[0].findings, "problem")


def test_a_master_that_is_absent_elsewhere_or_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_checks, "GRACE_SECONDS", 0.5)

    def said(rank: int, host: str, port: int) -> str:
        (found,) = check_network(Rendezvous(rank, 2, host, port), timeout=1).findings
        assert found.level == "problem" and found.remedy
        return found.text

    assert "connection refused" in said(1, "127.0.0.1", free_port())
    with socket.create_server(("", 0)) as server:  # accepts, and never says a word
        port = server.getsockname()[1]
        assert re.search("interrupted|did not end", said(1, "127.0.0.1", port))
        assert f"cannot listen at 127.0.0.1:{port}: address already in use" in said(
            0, "127.0.0.1", port
        )
    assert "cannot listen at 192.0.2.77:29500" in said(0, "192.0.2.77", 29500)


# -- given measurements ----


def host(rank: int, **settings: str) -> probes.HostInfo:
    return probes.HostInfo(rank, f"host{rank}", "127.0.0.1", 1, settings)


def sent(*names: str) -> NetworkReport:
    """The report of a ring whose hosts used these congestion controls."""
    world = range(len(names))
    rates = [probes.Rate(r, (r + 1) % len(names), 1e8, congestion=names[r]) for r in world]
    hosts = [host(r, LACONIC_CONGESTION="none") for r in world]
    return NetworkReport([], hosts, [probes.Pair(0, r, 0.08) for r in world[1:]], rates)


def test_rates_congestion_control_and_settings() -> None:
    rates = [probes.Rate(r, (r + 1) % 4, 1e9 if r != 2 else 1e8) for r in range(4)]
    failed = [probes.Rate(0, 1, 0.0, "no answer")]
    for measured, text in ((rates, "100 Mbit/s (rank 2 to 3)"), (failed, "rank 1 failed: no answ")):
        (found,) = network_findings.rate_findings(NetworkReport(rates=measured))
        assert found.level != "ok" and text in found.text
    for report, level, said in (
        (sent("bbr", "bbr"), "ok", "round trips of 80 ms, laconic's connections use bbr on all"),
        (sent("bbr", "cubic", "cubic"), "warning", "bbr on rank 0; cubic on ranks 1, 2"),
    ):
        (found,) = network_findings.congestion_findings(report)
        assert found.level == level and said in found.text
        assert bool(found.remedy) == (level == "warning")

    def security(*secrets: str) -> list[Finding]:
        tls = [{"TLS": "off" if s == "none" else "on", VARIABLE: s} for s in secrets]
        return network_findings.differences([host(r, **s) for r, s in enumerate(tls)])

    assert {f.level for f in security("ab", "ab") + security("none", "none")} == {"ok"}
    mixed, secret = security("ab", "none", "none")
    assert mixed.level == secret.level == "problem" and mixed.remedy and secret.remedy
    assert "TLS differs: on on rank 0; off on ranks 1, 2" in mixed.text
    (secret,) = security("ab", "cd")
    assert "secret 1 on rank 0; secret 2 on rank 1" in secret.text and "ab" not in secret.text


def test_the_command_for_this_network_can_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The slowest host and the longest round trip count."""
    rates = [probes.Rate(0, 1, 5e7), probes.Rate(1, 0, 1.2345e9)]
    report = NetworkReport(pairs=[probes.Pair(0, 1, 0.08), probes.Pair(1, 0, 0.01)], rates=rates)
    (found,) = network_findings.advice(report, 2)
    *_, command = found.text.partition("laconic ")
    assert command.endswith("--bandwidth 50mbit --latency 80ms --workers 2")
    words = command.replace("params P", "params 100M").replace("step-time T", "step-time 1s")
    assert main([*words.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recommendation"]
    assert network_findings.advice(NetworkReport(), 2) == []


def test_the_command_reports_and_meets_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    warning = Finding("warning", "machine", "hm", "mend it")
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
