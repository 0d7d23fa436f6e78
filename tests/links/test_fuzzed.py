"""Whatever strangers send to where ranks connect: they are refused, and the ranks go on."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from laconic.links import connect, talks
from laconic.links.addresses import Address
from laconic.links.collectives import Collectives
from laconic.links.wire import Wire

from tests.support import job_keys
from tests.support import strangers as s
from tests.support.strangers import OURS, RAW, Attack, Stranger, Usage

SECRET = bytes(range(32))
PLAIN = ("not a hello of laconic", "does not know this job's secret")
SECURE = ("does not speak TLS", "no certificate", "certificate has expired", "local issuer")
EVERYBODY = (RAW, RAW, RAW, OURS, OURS, "none", "other", "expired", "old")


class Alone:
    """What collectives ask about the only call."""

    size, header = 3, (3, 7)

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def blaming(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("encrypted", [False, True])
def test_ranks_connect_and_agree(
    count: int,
    encrypted: bool,
    monkeypatch: pytest.MonkeyPatch,
    jobs: job_keys.Jobs,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Some strangers have come before, and gone. Then two ranks wait for the third one, while some
    stay, and others send a byte at a time. ``count``: how many are drawn besides."""
    job_keys.turn_off(monkeypatch)
    if encrypted:
        job_keys.turn_on(monkeypatch, jobs.one)
    monkeypatch.setattr(talks, "_reasons", set())
    certificates = EVERYBODY if encrypted else (RAW,)
    wires = [Wire(rank, "127.0.0.1", 20, range(3)) for rank in range(3)]
    addresses = [wire.address for wire in wires]
    at = Address.parse(addresses[0])
    genuine = [
        s.recorded(secret, connect.PURPOSE, bytes.fromhex(at.key), number)
        for secret, number in ((SECRET, 2), (bytes(32), 2), (SECRET, 0), (SECRET, 2**32 - 1))
    ]
    calls = Attack(at.port, s.contexts_of(jobs) if encrypted else {})
    for end in ("reset", "close"):
        for data in (b"", b"x" * 9, *genuine):
            Attack(at.port, {}).visit(Stranger(data, (), end))

    def come(rank: int) -> Collectives:
        wires[rank].connect(addresses, SECRET, lambda: None)
        return Collectives(Alone(rank), wires[rank])

    with ThreadPoolExecutor(3) as pool:
        coming = [pool.submit(come, rank) for rank in range(2)]
        time.sleep(0.1)
        before = Usage.of()
        with s.slow(at.port, genuine[0]):
            for certificate in dict.fromkeys(certificates):
                for end in ("reset", "close", "wait"):
                    for data in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, s.client_hello(), *genuine):
                        calls.visit(Stranger(data, (), end, certificate))
            s.drawn(s.strangers([*genuine, s.client_hello()], certificates), count, calls.visit)
        assert not any(rank.done() for rank in coming)
        calls.close()
        s.nothing_is_left(before)
        coming.append(pool.submit(come, 2))
        links = [rank.result() for rank in coming]
        for number in range(3):
            x = torch.arange(30_000.0).mul(number + 1)
            mine = [x + 3 * rank for rank in range(3)]
            list(pool.map(lambda link, mine: link.mean(mine), links, mine))
            assert all(torch.equal(each, x + 3) for each in mine)
    for wire in wires:
        wire.close()
    lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    s.check_lines(lines, *(SECURE if encrypted else PLAIN))
