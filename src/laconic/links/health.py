"""Beacons: every process answers other ranks' questions about what it is doing.

A back end reports a lost rank as a closed connection or a timeout, on some ranks at once and on
others late, and does not name the rank. It does not report ranks in different calls at all. So a
rank that waits long, or whose connection closed, asks the beacons of the others. Its error can then
name the rank that has ended, hangs or is in another call. It sends this verdict to the other ranks,
and all raise the same.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

from laconic.links import handshake, tls
from laconic.links.addresses import Address, listen
from laconic.links.calls import Call, CallPosition
from laconic.links.handshake import KEY_BYTES, MOST_BYTES
from laconic.links.talks import Service, Talk, Talks, UnreachableError
from laconic.links.texts import clean

PURPOSE = b"beacon"
ANSWER_SECONDS = 2.0
"""How long a conversation with a beacon may take, from the first byte to the last."""
UNREACHABLE_SECONDS = 10.0
"""A rank counts as lost if its host cannot be reached for so long. A network that restarts a switch
needs less, and waiting for the timeout, which may be minutes, would gain nothing."""
MOST_AT_ONCE = 128
"""How many beacons are asked at a time: many systems allow a process 1024 file descriptors."""
MOST_TEXT, MOST_STATUS, MOST_NAME, MOST_RANKS = 10_000, 500, 200, 1000
"""The longest verdict, status and call's name, in characters, and the most ranks to blame.
All together fit one frame."""


class Verdict(NamedTuple):
    """What the rank ``finder`` found wrong with a link, for all ranks to raise: the ``text``, and
    the world ``ranks`` to blame. Of several verdicts the one of the lowest finder counts."""

    text: str
    ranks: tuple[int, ...]
    finder: int


@dataclass(frozen=True)
class Answer:
    """What a beacon answered about a link: the status of its process, the position in the link's
    calls, and the verdict that it knows. ``missing``, if there was no answer: ``"gone"`` (no
    program listens there any more), ``"silent"`` (the connection is open, and no answer came) or
    ``"unreachable"`` (no connection)."""

    status: str
    position: CallPosition | None = None
    verdict: Verdict | None = None
    missing: Literal["", "gone", "silent", "unreachable"] = ""

    @property
    def lost(self) -> bool:
        return bool(self.missing)


Heard = Callable[[int, Answer], None]
GONE = Answer("is gone (its process has ended)", missing="gone")
ENDING = Answer("is gone (its process is ending)", missing="gone")
OTHER = Answer("is gone (another program answers at its address)", missing="gone")
SILENT = Answer("does not answer (hung, stopped or very slow)", missing="silent")
UNREACHABLE = Answer("does not answer (its host is unreachable)", missing="unreachable")


class Unreachable:
    """Which ranks count as lost since their hosts cannot be reached."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def lost(
        self,
        answers: Mapping[int, Answer],
        now: float,
        heard: Callable[[int], float] = lambda rank: math.inf,
    ) -> list[int]:
        """The ranks that were unreachable in all ``answers`` of `UNREACHABLE_SECONDS`, up to
        ``now``. ``heard(rank)``: seconds since anything has come from there otherwise."""
        for r, answer in answers.items():
            if answer.missing == "unreachable":
                self._since.setdefault(r, now)
            else:
                self._since.pop(r, None)
        silent = {r: now - self._since[r] for r in answers if r in self._since}
        return [r for r, s in silent.items() if min(s, heard(r)) >= UNREACHABLE_SECONDS]


# -- what travels ----


def pack(status: str, position: CallPosition, verdict: Verdict | None) -> bytes:
    """What a beacon and its caller tell each other about a link, of which callers have nothing but
    perhaps a verdict to tell."""
    serial, call, left, broken = position
    where = [serial, None if call is None else call[:2], left, broken]
    found = None
    if verdict is not None:
        found = clean(verdict.text)[:MOST_TEXT], verdict.ranks[:MOST_RANKS], verdict.finder
    value = [clean(status)[:MOST_STATUS], where, found]
    data = json.dumps(value, ensure_ascii=False).encode()
    assert len(data) <= MOST_BYTES, "clipped before"
    return data


def unpack(data: bytes) -> Answer:
    """The inverse of `pack`, from any bytes; raises ``ValueError``."""
    try:
        status, (serial, call, left, broken), verdict = json.loads(data)
        if call is not None:
            call = shown(Call(int(call[0]), str(call[1])))
        if verdict is not None:
            text, ranks, finder = verdict
            verdict = Verdict(clean(str(text))[:MOST_TEXT], tuple(map(int, ranks)), int(finder))
        position = CallPosition(int(serial), call, bool(left), bool(broken))
        return Answer(clean(str(status))[:MOST_STATUS], position, verdict)
    except (ArithmeticError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"no message of this version's: {error!r}") from None


def shown(call: Call) -> Call:
    """``call`` as other ranks show it: its name without control characters, and not too long."""
    return Call(call.step, clean(call.name + call.of)[:MOST_NAME])


# -- the beacon ----


@dataclass
class LinkRecord:
    """What a beacon knows about one link of its process.

    ``secret``: None until the ranks share one. ``position``: in the calls over the link and those
    split from it, which count as one sequence. ``header``: the serial number and the id of the
    present one, which every message carries.
    """

    secret: bytes | None = None
    position: CallPosition = field(default_factory=CallPosition)
    header: tuple[int, int] = (0, 0)
    verdict: Verdict | None = None

    def begin(self, call: Call) -> None:
        """``call`` is the next one."""
        self.position = CallPosition(self.position.serial + 1, shown(call))
        self.header = self.position.serial, call.id

    def adopt(self, verdict: Verdict) -> None:
        """Adopt ``verdict`` unless the one before counts."""
        if self.verdict is None or verdict.finder < self.verdict.finder:
            self.verdict = verdict


class Beacon:
    """Answers callers that know a link's secret, from a thread of its own, and adopts the verdicts
    that they send. ``links``: by key. ``host``: the address to listen at, as in `listen`."""

    def __init__(self, host: str | None = None) -> None:
        tls.contexts()  # what is wrong with variables is raised here, and not in a thread
        server, self._address = listen(host)
        self.status = "starting"
        self.links: dict[str, LinkRecord] = {}
        self._since = time.monotonic()
        self.others: dict[bytes, Callable[[Talk], None]] = {}
        """By what else callers may come for: what is called then, and may keep the connection."""
        at = "laconic-beacon", [server], self._exchange, ANSWER_SECONDS, self._ended
        self._service = Service(*at)
        self._service.open()

    def enroll(self, secret: bytes | None = None) -> str:
        """Add a link of this process; returns the address under which others ask about it."""
        key = secrets.token_hex(KEY_BYTES)
        self.links[key] = LinkRecord(secret)
        return str(self._address._replace(key=key))

    def set(self, status: str) -> None:
        """Set what this process is doing from now on."""
        self.status, self._since = status, time.monotonic()

    def close(self) -> None:
        """Answer nobody from now on."""
        self._service.close()

    def _exchange(self) -> handshake.Exchange:
        return handshake.answer([PURPOSE, *self.others], self._secret_of, self._reply)

    def _ended(self, talk: Talk, error: Exception | None) -> None:
        if error is None:
            hello = handshake.Hello.unpack(talk.result[: handshake.HELLO_BYTES])
            if hello.purpose in self.others:
                self.others[hello.purpose](talk)

    def _secret_of(self, key: bytes) -> bytes | None:
        link = self.links.get(key.hex())
        return None if link is None else link.secret

    def _reply(self, hello: handshake.Hello, text: bytes) -> bytes:
        if hello.purpose in self.others:
            return b""
        link, verdict = self.links[hello.key.hex()], unpack(text).verdict
        if verdict is not None:
            link.adopt(verdict)
        status = f"{self.status}, for {time.monotonic() - self._since:.0f} s"
        return pack(status, link.position, link.verdict)


_beacons: list[Beacon] = []
"""The one of this process, once there is one."""
_starting = threading.Lock()


def beacon() -> Beacon:
    """The beacon of this process, started by the first call. It lives as long as the process."""
    with _starting:  # two threads may make their first link at once
        if not _beacons:
            _beacons.append(Beacon())
        return _beacons[0]


def _forget() -> None:
    """In a forked child, which starts a beacon of its own."""
    global _starting
    _beacons.clear()
    _starting = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_forget)


# -- asking ----


def _missing(error: Exception) -> Answer:
    """Why a beacon has not answered."""
    if isinstance(error, UnreachableError):
        return GONE if error.errno == errno.ECONNREFUSED else UNREACHABLE
    if isinstance(error, TimeoutError):
        return SILENT
    return OTHER if isinstance(error, handshake.RefusedError) else ENDING


def answering(addresses: Sequence[str], secret: bytes) -> Callable[[int], bool]:
    """A function that says whether the beacon at the address of that index answers."""
    return lambda index: not ask_all([addresses[index]], secret)[0].lost


def ask_all(
    addresses: Sequence[str],
    secret: bytes,
    verdict: Verdict | None = None,
    heard: Heard | None = None,
) -> list[Answer]:
    """The answers of the beacons at ``addresses`` to a ``verdict``, or why there was none, all at
    once. Waits for each at most `ANSWER_SECONDS`. ``secret``: the link's.
    ``heard(index, answer)`` is called as soon as each answer, or that there is none, is known."""
    answers, talks, begun = dict[int, Answer](), Talks(), 0

    def ended(index: int, end: Talk | Exception) -> None:
        try:
            answer = unpack(end.result) if isinstance(end, Talk) else _missing(end)
        except ValueError:
            answer = OTHER  # it knows the secret, and runs another version
        answers[index] = answer
        if heard is not None:
            heard(index, answer)

    try:
        while len(answers) < len(addresses):
            if begun < len(addresses) and begun - len(answers) < MOST_AT_ONCE:
                host, port, key = Address.parse(addresses[begun])
                text = pack("", CallPosition(), verdict)
                say = secret, PURPOSE, bytes.fromhex(key), 0, text
                deadline = time.monotonic() + ANSWER_SECONDS
                exchange, end = partial(handshake.call, *say), partial(ended, begun)
                begun += 1
                talks.call(host, port, exchange, deadline, end, again=True)
            else:
                talks.turn()
    finally:
        talks.close()
    return [answers[index] for index in range(len(addresses))]
