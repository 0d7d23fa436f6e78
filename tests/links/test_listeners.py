"""Where a process listens: ports for a firewall, an address for a NAT, and never everywhere."""

from __future__ import annotations

import os
import re
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic as la
from laconic.errors import LinkError
from laconic.links import addresses, health
from laconic.links.addresses import Address, listen, ports

from tests.support import gloo, job_keys, launched
from tests.support.elastic_runs import Coordinator

SECRET = bytes(range(32))


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    names = addresses.PORTS, addresses.BIND, addresses.ADDRESS, "MASTER_ADDR", "GLOO_SOCKET_IFNAME"
    for name in (*names, "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("text", ["a", "1-", "-1", "0", "0-9", "9-8", "1-65536", "1,2", "²", "1.5"])
def test_a_range_that_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(addresses.PORTS, text)
    with pytest.raises(ValueError, match="LACONIC_PORTS must be a range of ports, such as 29500-"):
        listen("127.0.0.1")


def test_the_first_free_port_of_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an error that says what is missing, where all are taken."""
    given = gloo.free_ports(3)
    monkeypatch.setenv(addresses.PORTS, f"{given[0]}-{given[-1]}")
    with ExitStack() as closing:
        taken = [closing.enter_context(listen("127.0.0.1")[0]) for _ in given]
        assert [server.getsockname()[1] for server in taken] == list(given)
        said = rf"no port of LACONIC_PORTS={given[0]}-{given[-1]} is free at 127\.0\.0\.1: a worke"
        with pytest.raises(LinkError, match=said):
            listen("127.0.0.1")
        taken[1].close()
        again = closing.enter_context(listen("127.0.0.1")[0])
        assert again.getsockname()[1] == given[1]
    monkeypatch.setenv(addresses.PORTS, str(given[0]))
    assert ports() == range(given[0], given[0] + 1)
    monkeypatch.setenv(addresses.PORTS, " ")
    assert ports() == range(1), "any port"


@pytest.mark.parametrize(
    ("bind", "announced", "at"),
    [
        (None, None, ("127.0.0.1", "127.0.0.1")),
        ("127.0.0.2", None, ("127.0.0.2", "127.0.0.2")),
        ("127.0.0.1", "127.0.0.77", ("127.0.0.1", "127.0.0.77")),
        ("0.0.0.0", None, ("0.0.0.0", "127.0.0.1")),  # only where that is asked for
    ],
)
def test_the_address_to_listen_at_and_the_one_that_others_call(
    monkeypatch: pytest.MonkeyPatch, bind: str | None, announced: str | None, at: tuple[str, str]
) -> None:
    """As behind a NAT: what is announced is always an address."""
    for name, value in ((addresses.BIND, bind), (addresses.ADDRESS, announced)):
        if value is not None:
            monkeypatch.setenv(name, value)
    server, host = listen("127.0.0.1")
    with server:
        assert (server.getsockname()[0], host) == at
    given = gloo.free_ports(1)
    monkeypatch.setenv(addresses.PORTS, str(given[0]))
    beacon = health.Beacon("127.0.0.1")
    address = Address.parse(beacon.enroll(SECRET))
    assert (address.host, address.port) == (at[1], given[0])
    beacon.close()


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        (addresses.BIND, "192.0.2.1", "this host has no such addre"),  # for documentation
        (addresses.BIND, "no such name.invalid", "is not an address"),
        (addresses.ADDRESS, "no such name.invalid", "is not an address"),
        (addresses.ADDRESS, "0.0.0.0", "is not an address that other worke"),
        (addresses.ADDRESS, "::", "is not an address that other worke"),
    ],
)
def test_no_address(monkeypatch: pytest.MonkeyPatch, variable: str, text: str, said: str) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=f"{variable}={re.escape(text)}.*{said}"):
        listen("127.0.0.1")


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6")
@pytest.mark.parametrize("text", ["::1", "[::1]"])
def test_ipv6(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(addresses.BIND, text)
    beacon = health.Beacon()
    address = beacon.enroll(SECRET)
    assert Address.parse(address).host == "::1" and not health.ask(address, SECRET).lost
    beacon.close()


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({}, "name"),  # nobody says where the others are
        ({"MASTER_ADDR": "10.0.0.1"}, "10.0.0.9"),
        ({"MASTER_ADDR": "127.0.0.1"}, "127.0.0.1"),
        ({"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, "127.0.0.1"),
        ({"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "name"),
        ({"MASTER_ADDR": "10.0.0.1", "GLOO_SOCKET_IFNAME": "lo,eth7"}, "127.0.0.1"),
        ({"MASTER_ADDR": "10.0.0.1", "GLOO_SOCKET_IFNAME": "none-such"}, "10.0.0.9"),
    ],
)
def test_the_interface_is_gloos_or_the_one_toward_the_others(
    environ: dict[str, str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    toward = {"10.0.0.1": "10.0.0.9"}
    monkeypatch.setattr(addresses, "address_toward", lambda host: toward.get(host, host))
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "name")
    assert addresses.own_address() == address


# -- nothing listens everywhere ----


def listening(process: Any) -> set[tuple[str, int]]:
    """Where a process listens, on Linux."""
    inodes = set()
    for fd in Path(f"/proc/{process}/fd").iterdir():
        try:
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(fd)))
        except OSError:
            continue
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{process}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in inodes:
                digits, port = local.split(":")
                words = [bytes.fromhex(digits[i : i + 8]) for i in range(0, len(digits), 8)]
                raw = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
                found.add((socket.inet_ntop(family, raw), int(port, 16)))
    return found


@pytest.mark.parametrize("encrypted", [False, True])
def test_the_command_listens_at_its_address_only(
    monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs, encrypted: bool
) -> None:
    """And says whether it uses TLS. Under TLS, it listens at no other port."""
    job_keys.turn_off(monkeypatch)
    if encrypted:
        job_keys.turn_on(monkeypatch, jobs.one)
    coordinator = Coordinator(port := gloo.free_port())
    assert listening(coordinator.process.pid) == {("127.0.0.1", port)}
    assert coordinator.said.startswith(f"coordinator at 127.0.0.1:{port}")
    assert (", with TLS; end it with Ctrl-C" in coordinator.said) == encrypted
    coordinator.process.terminate()
    coordinator.process.join(60)
    assert coordinator.process.exitcode == 0
    coordinator.kill()


def train(pipe: Any) -> str:
    la.init()
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with la.attach(model, optimizer, la.local_sgd(2), timeout=60):
        optimizer.step()
        pipe.send("attached")
        pipe.recv()
        optimizer.step()
    return "done"


@pytest.mark.parametrize("count", [1, 2])
def test_a_program_listens_at_its_address_only(count: int) -> None:
    """A single process, and rank 0, whose store is torch's."""
    world = launched.of_torchrun(2) if count == 2 else [{}]
    with launched.running(world, train) as made:
        assert [rank.next() for rank in made] == ["attached"] * count
        found = [listening(rank.process.pid) for rank in made]
        if count > 1:
            assert ("127.0.0.1", int(world[0]["MASTER_PORT"])) in found[0]
        assert found[0] and not any(h in ("0.0.0.0", "::") for places in found for h, _ in places)
        for rank in made:
            rank.pipe.send("go on")
        assert [rank.next() for rank in made] == ["done"] * count
