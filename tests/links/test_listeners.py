"""Where a process listens: ports for a firewall, an address for a NAT, and never everywhere."""

from __future__ import annotations

import errno
import re
import signal
import socket
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import laconic as la
from laconic.errors import LinkError
from laconic.links import addresses, handshake, health
from laconic.links.addresses import Address, listen
from laconic.links.talks import EndedError, Talks

from tests.support import gloo, job_keys, launched
from tests.support import strangers as s
from tests.support.elastic_runs import Coordinator
from tests.support.loops import descend

SECRET = bytes(range(32))


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    names = addresses.PORTS, addresses.BIND, addresses.ADDRESS, "MASTER_ADDR", "GLOO_SOCKET_IFNAME"
    for name in (*names, "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_the_first_free_port_of_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an error that says what is missing, where all are taken; or that there is no range."""
    for text in ("a", "1-", "-1", "0", "0-9", "9-8", "1-65536", "1,2", "²", "1.5"):
        monkeypatch.setenv(addresses.PORTS, text)
        with pytest.raises(ValueError, match="LACONIC_PORTS must be a range of ports, such as 29"):
            listen("127.0.0.1")
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
    for text in (str(given[0]), " "):
        monkeypatch.setenv(addresses.PORTS, text)
        listen("127.0.0.1")[0].close()


def test_the_address_to_listen_at_and_the_one_that_others_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As behind a NAT."""
    for bind, announced, at in (
        ("", "", ("127.0.0.1", "127.0.0.1")),
        ("127.0.0.2", "", ("127.0.0.2", "127.0.0.2")),
        ("127.0.0.1", "127.0.0.77", ("127.0.0.1", "127.0.0.77")),
        ("0.0.0.0", "", ("0.0.0.0", "127.0.0.1")),  # only where that is asked for
    ):
        monkeypatch.setenv(addresses.BIND, bind)
        monkeypatch.setenv(addresses.ADDRESS, announced)
        server, address = listen("127.0.0.1")
        with server:
            assert (server.getsockname()[0], address.host) == at
    for variable, text, said in (
        (addresses.BIND, "192.0.2.1", "this host has no such addre"),  # for documentation
        (addresses.BIND, "no such name.invalid", "is not an address"),
        (addresses.ADDRESS, "no such name.invalid", "is not an address"),
        (addresses.ADDRESS, "0.0.0.0", "is not an address that other worke"),
    ):
        with monkeypatch.context() as patched:
            patched.setenv(addresses.BIND, "")
            patched.setenv(variable, text)
            with pytest.raises(ValueError, match=f"{variable}={re.escape(text)}.*{said}"):
                listen("127.0.0.1")


def test_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return  # this host has no IPv6
    for text in ("::1", "[::1]"):
        monkeypatch.setenv(addresses.BIND, text)
        beacon = health.Beacon()
        address = beacon.enroll(SECRET)
        assert (
            Address.parse(address).host == "::1" and not health.ask_all([address], SECRET)[0].lost
        )
        beacon.close()


def test_the_interface_is_gloos_or_the_one_toward_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toward = {"10.0.0.1": "10.0.0.9"}
    monkeypatch.setattr(addresses, "address_toward", lambda host: toward.get(host, host))
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "name")
    assert addresses.own_address() == "name"  # nobody says where the others are
    for master, more, address in (
        ("10.0.0.1", {}, "10.0.0.9"),
        ("127.0.0.1", {}, "127.0.0.1"),
        ("127.0.0.1", {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, "127.0.0.1"),
        ("127.0.0.1", {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "name"),
        ("10.0.0.1", {"GLOO_SOCKET_IFNAME": "lo,eth7"}, "127.0.0.1"),
        ("10.0.0.1", {"GLOO_SOCKET_IFNAME": "none-such"}, "10.0.0.9"),
    ):
        with monkeypatch.context() as patched:
            for name, value in {"MASTER_ADDR": master, **more}.items():
                patched.setenv(name, value)
            assert addresses.own_address() == address


def test_callers_that_reset_their_connections_end_no_listener(
    monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs
) -> None:
    """Under TLS, while one is accepted and its handshake begins."""
    job_keys.turn_on(monkeypatch, jobs.one)
    beacon = health.Beacon()
    address = beacon.enroll(SECRET)
    for _ in range(200):
        with socket.create_connection(("127.0.0.1", Address.parse(address).port)) as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, s.RESET)
    assert not health.ask_all([address], SECRET)[0].lost
    beacon.close()


class Gone(socket.socket):
    """A connection whose caller is gone, on macOS."""

    def setsockopt(self, *_: Any) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


class Accepts(socket.socket):
    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        return Gone(fileno=connection.detach()), address


@pytest.mark.fault("on macOS, a caller that was gone when it was accepted ended the listener")
def test_a_caller_that_is_gone_when_it_is_accepted() -> None:
    server, ended = Accepts(fileno=listen("127.0.0.1")[0].detach()), list[Exception | None]()
    talks, answer = Talks(), handshake.answer([b""], lambda key: None, lambda *_: b"")
    talks.serve([server], lambda: answer, 5, lambda talk, error: ended.append(error))
    with server:
        socket.create_connection(server.getsockname()).close()
        while not ended:
            talks.turn(1)
    assert isinstance(ended[0], EndedError)


# -- nothing listens everywhere ----


@pytest.mark.parametrize("encrypted", [False, True])
def test_the_command_listens_at_its_address_only(
    monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs, encrypted: bool
) -> None:
    """And says whether it uses TLS. Under TLS, it listens at no other port."""
    job_keys.turn_off(monkeypatch)
    if encrypted:
        job_keys.turn_on(monkeypatch, jobs.one)
    coordinator = Coordinator(port := gloo.free_port())
    assert s.listening(coordinator.process.pid) == {("127.0.0.1", port)}
    assert f"coordinator at 127.0.0.1:{port}" in coordinator.errors
    assert (", with TLS; end it with Ctrl-C" in coordinator.errors) == encrypted
    coordinator.send(signal.SIGTERM)
    assert coordinator.end() == 0
    coordinator.kill()


def train(pipe: Any) -> list[float]:
    """Six steps of one gradient. Returns by how much the parameters have changed."""
    la.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), model.weight.detach().clone()
    with la.attach(model, optimizer, la.local_sgd(2), timeout=60):
        for step in range(6):
            if step == 1:
                pipe.send("attached")
                pipe.recv()
            descend(optimizer, model(torch.ones(1, 3)).sum())
    return (before - model.weight.detach()).view(-1).tolist()


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_program_listens_at_its_address_only(count: int) -> None:
    """A single process, and rank 0, whose store is torch's. Its rounds are the same while strangers
    call all ports but that of the store."""
    world = launched.of_torchrun(2) if count == 2 else [{}]
    with launched.running(world, train) as made:
        assert [rank.next() for rank in made] == ["attached"] * count
        found = [s.listening(rank.process.pid) for rank in made]
        store = ("127.0.0.1", int(world[0].get("MASTER_PORT", 0)))
        assert found[0] and (store in found[0]) == (count == 2)
        assert not any(host in ("0.0.0.0", "::") for places in found for host, _ in places)
        genuine = [s.recorded(bytes(32), health.PURPOSE, bytes(8), 1), s.client_hello()]
        for _, port in set.union(*found) - {store}:
            attack = s.Attack(port, {})
            # gloo, which also listens, would keep them waiting
            ends = s.strangers(genuine).map(lambda each: each._replace(end="reset"))
            s.drawn(ends, 20, attack.visit)
        for rank in made:
            rank.pipe.send("go on")
        for rank in made:
            assert rank.next() == pytest.approx([0.6] * 6)
