"""Callers that do not belong to a job: what they send is drawn by hypothesis."""

from __future__ import annotations

import re
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import psutil
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laconic.links import handshake, tls
from laconic.links.talks import _MOST_REASONS

from tests.support import job_keys

SOON = 60.0
RESET = struct.pack("ii", 1, 0)
MOST_OPEN = 60
"""How many callers stay connected at a time."""
RAW, OURS = "raw", "one"
"""Without TLS, and with a certificate of the job."""


class Stranger(NamedTuple):
    """Sends ``data`` in pieces that end at ``cuts``, with TLS and this ``certificate`` or without.
    Then it closes or resets the connection, waits until the other side closes it, or stays."""

    data: bytes
    cuts: tuple[int, ...] = ()
    end: str = "wait"
    certificate: str = RAW


def recorded(secret: bytes, purpose: bytes, key: bytes, number: int, text: bytes = b"") -> bytes:
    """What a member sends in a handshake."""
    caller = handshake.call(secret, purpose, key, number, text)
    callee = handshake.answer([purpose], lambda _: secret, lambda hello, said: b"")
    next(callee)
    hello, _ = next(caller)
    challenge, _ = callee.send(hello)
    frame, _ = caller.send(challenge)
    return hello + frame


def client_hello() -> bytes:
    """How a TLS handshake begins."""
    out = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        anybody().wrap_bio(ssl.MemoryBIO(), out).do_handshake()
    return out.read()


def anybody() -> ssl.SSLContext:
    """The settings of a caller that trusts everybody, and shows no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@st.composite
def changed(draw: st.DrawFn, genuine: Sequence[bytes]) -> bytes:
    """Something genuine: cut off, with other bytes in places, followed by more, or as it was."""
    data = bytearray(draw(st.sampled_from(genuine)))
    match draw(st.sampled_from(("changed", "length", "cut", "more", "as it was"))):
        case "changed" if data:
            for place in draw(st.lists(st.integers(0, len(data) - 1), min_size=1, max_size=3)):
                data[place] = draw(st.integers(0, 255))
        case "length":  # such as an enormous one
            place = draw(st.integers(0, len(data)))
            lengths = (b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff")
            data[place : place + 4] = draw(st.sampled_from(lengths))
        case "cut":
            del data[draw(st.integers(0, len(data))) :]
        case "more":
            data += draw(st.binary(max_size=8))
    return bytes(data)


def strangers(
    genuine: Sequence[bytes], certificates: Sequence[str] = (RAW,)
) -> st.SearchStrategy[Stranger]:
    """``genuine``: what members send."""
    return st.builds(
        Stranger,
        st.binary(max_size=150) | changed(genuine),
        st.lists(st.integers(0, 120), max_size=2).map(lambda cuts: tuple(sorted(cuts))),
        st.sampled_from(("close", "reset", "wait", "wait", "stay")),
        st.sampled_from(certificates),
    )


def contexts_of(jobs: job_keys.Jobs) -> dict[str, ssl.SSLContext]:
    """Callers' settings, by the certificate that they show."""
    made = {name: anybody() for name in (OURS, "other", "expired", "none", "old")}
    for name, folder in ((OURS, jobs.one), ("other", jobs.other), ("expired", jobs.expired)):
        files = job_keys.variables(folder)
        made[name].load_cert_chain(files[tls.CERTIFICATE], files[tls.KEY])
    made["old"].maximum_version = ssl.TLSVersion.TLSv1_2
    return made


class Attack:
    """Strangers that call ``port`` on this host. ``most``: the bytes that one may receive."""

    def __init__(
        self, port: int, contexts: dict[str, ssl.SSLContext], most: int = handshake.NONCE_BYTES
    ) -> None:
        self._port, self._contexts, self._most = port, contexts, most
        self._open: deque[socket.socket] = deque()

    def visit(self, stranger: Stranger) -> None:
        """Call once, and check what comes back."""
        received = b""
        connection = socket.create_connection(("127.0.0.1", self._port), SOON)
        try:
            if stranger.certificate != RAW:
                connection = self._contexts[stranger.certificate].wrap_socket(connection)
            for start, end in zip((0, *stranger.cuts), (*stranger.cuts, None), strict=True):
                connection.sendall(stranger.data[start:end])
            if stranger.end == "wait":
                socket.socket.shutdown(connection, socket.SHUT_WR)
                while piece := connection.recv(2**12):
                    received += piece
            elif stranger.end == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        except TimeoutError:
            raise AssertionError(f"it was left waiting: {stranger}") from None
        except OSError:
            pass  # it was refused
        if stranger.certificate == RAW and self._contexts:
            assert received[:1] in (b"", b"\x15", b"\x16"), "an alert of TLS, or its certificate"
        else:
            assert len(received) <= self._most, (received, stranger)
        if stranger.end != "stay":
            connection.close()
            return
        self._open.append(connection)
        if len(self._open) > MOST_OPEN:
            self._open.popleft().close()

    def close(self) -> None:
        """Close the connections that have stayed."""
        while self._open:
            self._open.popleft().close()


def drawn(strategy: st.SearchStrategy[Any], count: int, check: Callable[[Any], None]) -> None:
    """``check`` so many examples, the same ones in every run."""
    same: Any = {"derandomize": True, "database": None, "deadline": None}
    quiet = settings(max_examples=count, suppress_health_check=list(HealthCheck), **same)
    quiet(given(strategy)(lambda example: check(example)))()


@contextmanager
def slow(port: int, data: bytes) -> Iterator[None]:
    """Some callers that send ``data`` a byte at a time."""
    ended = threading.Event()

    def drip() -> None:
        place = 0
        while not ended.is_set():
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), SOON) as made:
                while not ended.wait(0.05):
                    made.sendall(data[place % len(data) :][:1])
                    place += 1

    threads = [threading.Thread(target=drip) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(SOON)


class Usage(NamedTuple):
    """What a process holds."""

    descriptors: int
    threads: int
    memory: int

    @classmethod
    def of(cls, process: int | None = None) -> Usage:
        found = psutil.Process(process)
        return cls(found.num_fds(), found.num_threads(), found.memory_info().rss)


def nothing_is_left(before: Usage, process: int | None = None, mebibytes: int = 48) -> None:
    """Wait until the process holds no more than before, and little more memory."""
    end = time.monotonic() + SOON
    while True:
        now = Usage.of(process)
        if now.descriptors <= before.descriptors and now.threads <= before.threads:
            break
        assert time.monotonic() < end, (before, now)
        time.sleep(0.02)
    assert now.memory - before.memory < mebibytes * 2**20, (before, now)


def check_lines(lines: Sequence[str], *parts: str) -> None:
    """Each reason is in the log once, and these ``parts`` are among them."""
    assert all(line.startswith("refused a caller at 127.0.0.1: ") for line in lines), lines
    kinds = [re.sub(r"\d+", "", line) for line in lines]
    assert len(set(kinds)) == len(kinds) <= _MOST_REASONS
    for part in parts:
        assert any(part in line for line in lines), (part, lines)


def listening(process: int | None) -> set[tuple[str, int]]:
    """Where a process listens."""
    found = psutil.Process(process).net_connections("tcp")
    return {tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN}
