"""Where a process listens: ports for a firewall, an address for a NAT, and never everywhere."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

import laconic.links.addresses as module
from laconic.errors import LinkError
from laconic.links import health
from laconic.links.addresses import Address, listen, ports
from laconic.links.elastic.registry import serve

from tests.support import gloo, job_keys, programs

SECRET = bytes(range(32))
EVERYWHERE = {"0.0.0.0", "::"}


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (module.PORTS, module.BIND, module.ADDRESS, "MASTER_ADDR", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6")


@pytest.mark.parametrize("text", ["", " "])
def test_any_port_where_none_is_given(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(module.PORTS, text)
    assert ports() == range(1)
    server, host = listen("127.0.0.1")
    with server:
        assert host == "127.0.0.1" and server.getsockname()[1] > 0


@pytest.mark.parametrize(
    "text", ["a", "1-", "-1", "0", "0-9", "9-8", "1-65536", "1,2", "1--2", "1-2-3", "²", "1.5"]
)
def test_a_range_that_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(module.PORTS, text)
    with pytest.raises(ValueError, match="LACONIC_PORTS must be a range of ports, such as 29500-"):
        listen("127.0.0.1")


def test_the_first_free_port_of_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an error that says what is missing, where all are taken."""
    given = gloo.free_ports(3)
    monkeypatch.setenv(module.PORTS, f"{given[0]}-{given[-1]}")
    with ExitStack() as closing:
        taken = [closing.enter_context(listen("127.0.0.1")[0]) for _ in given]
        assert [server.getsockname()[1] for server in taken] == list(given)
        said = rf"no port of LACONIC_PORTS={given[0]}-{given[-1]} is free at 127\.0\.0\.1: a worke"
        with pytest.raises(LinkError, match=said):
            listen("127.0.0.1")
        taken[1].close()
        again = closing.enter_context(listen("127.0.0.1")[0])
        assert again.getsockname()[1] == given[1]
    monkeypatch.setenv(module.PORTS, str(given[0]))
    assert ports() == range(given[0], given[0] + 1)


def test_a_beacon_uses_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    given = gloo.free_ports(2)
    monkeypatch.setenv(module.PORTS, f"{given[0]}-{given[-1]}")
    beacon = health.Beacon("127.0.0.1")
    address = beacon.enroll(SECRET)
    assert Address.parse(address).port == given[0]
    assert health.ask(address, SECRET).status.startswith("starting")
    beacon.close()


def test_an_address_that_others_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a NAT: the beacon listens at one, and announces the other."""
    monkeypatch.setenv(module.ADDRESS, "127.0.0.77")
    monkeypatch.setenv(module.BIND, "127.0.0.1")
    beacon = health.Beacon()
    address = Address.parse(beacon.enroll(SECRET))
    assert address.host == "127.0.0.77"
    assert beacon._server.getsockname()[0] == "127.0.0.1"
    beacon.close()
    monkeypatch.delenv(module.BIND)
    server, host = listen("127.0.0.1")
    with server:
        assert (server.getsockname()[0], host) == ("127.0.0.1", "127.0.0.77")
    monkeypatch.setenv(module.ADDRESS, "localhost")
    server, host = listen("127.0.0.1")
    with server:
        assert host in ("127.0.0.1", "::1"), "numeric: it travels"


def test_the_address_to_listen_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everywhere only where that is asked for; what is announced is still an address."""
    monkeypatch.setenv(module.BIND, "127.0.0.2")
    server, host = listen("127.0.0.1")
    with server:
        assert (server.getsockname()[0], host) == ("127.0.0.2", "127.0.0.2")
    monkeypatch.setenv(module.BIND, "0.0.0.0")
    server, host = listen("127.0.0.1")
    with server:
        assert (server.getsockname()[0], host) == ("0.0.0.0", "127.0.0.1")
    monkeypatch.setenv(module.BIND, "192.0.2.1")  # reserved for documentation
    with pytest.raises(ValueError, match=r"LACONIC_BIND=192\.0\.2\.1: this host has no such addre"):
        listen()


@pytest.mark.parametrize("variable", [module.BIND, module.ADDRESS])
def test_no_address(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "no such name.invalid")
    with pytest.raises(ValueError, match=f"{variable}=no such name.invalid is not an address"):
        listen("127.0.0.1")


@pytest.mark.parametrize("text", ["0.0.0.0", "::"])
def test_nobody_can_call_all_addresses(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(module.ADDRESS, text)
    with pytest.raises(
        ValueError, match=f"LACONIC_ADDRESS={text} is not an address that other worke"
    ):
        listen("127.0.0.1")


@ipv6
@pytest.mark.parametrize("text", ["::1", "[::1]"])
def test_ipv6(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    given = gloo.free_ports(1)
    monkeypatch.setenv(module.BIND, text)
    monkeypatch.setenv(module.PORTS, str(given[0]))
    beacon = health.Beacon()
    address = beacon.enroll(SECRET)
    assert Address.parse(address)[:2] == ("::1", given[0])
    assert not health.ask(address, SECRET).lost
    beacon.close()


@ipv6
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no dual stack")
def test_both_protocols(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.BIND, "::")
    server, host = listen("127.0.0.1")
    with server, socket.create_connection((host, server.getsockname()[1]), 5):
        assert host == "127.0.0.1"


@ipv6
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_address_of_an_interface_with_ipv6_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ipv4_of", lambda interface: None)
    with open("/proc/net/if_inet6") as file:
        rows = [line.split() for line in file]
    for interface in {row[5] for row in rows}:
        expected = [row[0] for row in rows if row[5] == interface and row[3] == "00"]
        found = module.address_of(interface)
        if not expected:
            assert found is None
        else:
            assert found is not None
            assert socket.inet_pton(socket.AF_INET6, found).hex() == expected[0]


# -- nothing listens everywhere ----


def listening(process: int | str = "self") -> set[tuple[str, int]]:
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


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
@pytest.mark.parametrize("encrypted", [False, True])
def test_a_coordinator_listens_at_its_address_only(
    monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs, encrypted: bool
) -> None:
    """And under TLS, at no other port."""
    job_keys.turn_off(monkeypatch)
    if encrypted:
        job_keys.turn_on(monkeypatch, jobs.one)
    before, port = listening(), gloo.free_port()
    server = serve("127.0.0.1", port)
    assert listening() - before == {("127.0.0.1", port)}
    del server


PROGRAM = """
import sys, torch, laconic as la
la.init()
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with la.attach(model, optimizer, la.local_sgd(2), timeout=20) as sync:
    optimizer.step()
    print("attached", flush=True)
    sys.stdin.read()
    optimizer.step()
"""


@linux
@pytest.mark.parametrize("count", [1, 2])
def test_a_program_listens_at_its_address_only(tmp_path: Path, count: int) -> None:
    """A single process, and rank 0, whose store is torch's."""
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(gloo.free_port())}
    processes = []
    for rank in range(count):
        own = {"RANK": str(rank), "WORLD_SIZE": str(count), **where} if count > 1 else {}
        processes.append(
            subprocess.Popen(
                [*programs.NEW, str(program)],
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **own},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "attached\n"
        found = [listening(process.pid) for process in processes]
        if count > 1:
            assert ("127.0.0.1", int(where["MASTER_PORT"])) in found[0]
        assert not any(host in EVERYWHERE for places in found for host, _ in places), found
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        assert [process.wait(30) for process in processes] == [0] * count
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@linux
def test_the_command_listens_at_its_address_only() -> None:
    port = gloo.free_port()
    run = "import sys; from laconic.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [*programs.NEW, "-c", run, "coordinator", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(f"coordinator at 127.0.0.1:{port}; end it")
        assert listening(process.pid) == {("127.0.0.1", port)}
        process.terminate()
        assert process.wait(10) == 0
