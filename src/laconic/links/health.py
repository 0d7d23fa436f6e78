"""Who is still there, and where: a beacon in every process that tells others what it is doing.

A back end reports a lost peer as a closed connection or a time-out, on some ranks at once and on
others late, and never by rank; ranks in different calls it does not report at all. So a rank that
waits long, or whose connection broke, asks the others' beacons, and the message can name who is
gone, who hangs and who is somewhere else. Whoever found it out tells the others: one verdict.
"""

from __future__ import annotations

import functools
import json
import math
import multiprocessing.util
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from laconic.links import forks, handshake
from laconic.links.addresses import Address, own_address
from laconic.links.calls import Call, CallPosition
from laconic.links.handshake import KEY_BYTES, MOST_BYTES
from laconic.links.talks import Talk, Talks
from laconic.links.texts import clean

PURPOSE = b"beacon"
ANSWER_SECONDS = 2.0
"""How long a conversation with a beacon may take in all; it does nothing else."""
RETRY_SECONDS = 0.05
MOST_AT_ONCE = 128
"""Beacons that are asked at a time: a process has 1024 file descriptors on many systems."""
MOST_TEXT, MOST_STATUS, MOST_NAME, MOST_RANKS = 10_000, 500, 200, 1000
"""Characters of a verdict, a status and a call's name, and ranks to blame: they fit a frame."""


class Verdict(NamedTuple):
    """What one rank found wrong with a link, for all of them to raise: ``text``, the ``ranks`` to
    blame, and the rank that is the ``finder``. Of several the one of the lowest finder holds."""

    text: str
    ranks: tuple[int, ...]
    finder: int


@dataclass(frozen=True)
class Answer:
    """What a beacon said of a link: the process's status, its position in the link's calls and the
    verdict that it knows; or, if it is ``missing``, what its silence means: ``"gone"`` (nobody
    listens there any more), ``"silent"`` (the connection stands, and no answer came) or
    ``"unreachable"`` (no connection)."""

    status: str
    position: CallPosition | None = None
    verdict: Verdict | None = None
    missing: Literal["", "gone", "silent", "unreachable"] = ""

    @property
    def lost(self) -> bool:
        return bool(self.missing)


GONE = Answer("is gone (its process has ended)", missing="gone")
ENDING = Answer("is gone (its process is ending)", missing="gone")
OTHER = Answer("is gone (another program answers at its address)", missing="gone")
SILENT = Answer("does not answer (hung, stopped or very slow)", missing="silent")
UNREACHABLE = Answer("does not answer (its host is unreachable)", missing="unreachable")


# -- what travels ----


class Request(NamedTuple):
    """What a caller tells a beacon about a link: a verdict, or that it leaves in order after so
    many calls (`CallPosition.serial`); or nothing."""

    verdict: Verdict | None = None
    left: int | None = None

    def pack(self) -> bytes:
        """As bytes, at most `MOST_BYTES` of them."""
        return _json([_plain(self.verdict), self.left])

    @classmethod
    def unpack(cls, data: bytes) -> Request:
        """From bytes of a stranger's choice; raises ``ValueError``."""
        match _parse(data):
            case [verdict, None]:
                return cls(_verdict_of(verdict))
            case [verdict, left]:
                return cls(_verdict_of(verdict), _integer(left))
        raise ValueError("a request is a list of two")


NOTHING = Request()


def pack_answer(status: str, position: CallPosition, verdict: Verdict | None) -> bytes:
    """What a beacon replies."""
    serial, call, left, broken = position
    where = [serial, None if call is None else list(shown(call)), left, broken]
    return _json([clean(status)[:MOST_STATUS], where, _plain(verdict)])


def unpack_answer(data: bytes) -> Answer:
    """From bytes of a stranger's choice; raises ``ValueError``."""
    match _parse(data):
        case [str(status), [serial, call, bool(left), bool(broken)], verdict]:
            position = CallPosition(_integer(serial), _call_of(call), left, broken)
            return Answer(clean(status)[:MOST_STATUS], position, _verdict_of(verdict))
    raise ValueError("an answer is a list of a status, a position and a verdict")


def pack_verdict(verdict: Verdict) -> bytes:
    """A verdict on its own."""
    return _json(_plain(verdict))


def unpack_verdict(data: bytes) -> Verdict:
    """From bytes that may be anything; raises ``ValueError``."""
    verdict = _verdict_of(_parse(data))
    if verdict is None:
        raise ValueError("no verdict")
    return verdict


def shown(call: Call) -> Call:
    """``call`` as other ranks show it: its name without control characters, and not too long."""
    return Call(call.step, clean(call.name)[:MOST_NAME])


def _json(value: object) -> bytes:
    data = json.dumps(value, ensure_ascii=False).encode()
    assert len(data) <= MOST_BYTES, "clipped before"
    return data


def _plain(verdict: Verdict | None) -> list[object] | None:
    if verdict is None:
        return None
    text = clean(verdict.text)[:MOST_TEXT]
    return [text, list(verdict.ranks[:MOST_RANKS]), verdict.finder]


def _parse(data: bytes) -> object:
    if len(data) > MOST_BYTES:
        raise ValueError("too long")
    try:
        value: object = json.loads(data.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
        raise ValueError("a number is an integer of 64 bits")
    return value


def _verdict_of(value: object) -> Verdict | None:
    match value:
        case None:
            return None
        case [str(text), [*ranks], finder] if len(ranks) <= MOST_RANKS:
            text = clean(text)[:MOST_TEXT]
            return Verdict(text, tuple(_integer(r) for r in ranks), _integer(finder))
    raise ValueError("a verdict is a text, ranks and a rank")


def _call_of(value: object) -> Call | None:
    match value:
        case None:
            return None
        case [step, str(name)]:
            return shown(Call(_integer(step), name))
    raise ValueError("a call is a step and a name")


# -- the beacon ----


@dataclass
class Enrolled:
    """What a beacon knows of one link of its process: the ``secret``, None until the ranks share
    one; the position in its calls; the verdict; the ranks that left in order, each after how many
    calls; and, for who leaves in order itself, its own rank and the others' addresses."""

    secret: bytes | None = None
    position: CallPosition = field(default_factory=CallPosition)
    verdict: Verdict | None = None
    left: dict[int, int] = field(default_factory=dict)
    rank: int = 0
    others: dict[int, str] = field(default_factory=dict)

    def take(self, verdict: Verdict) -> Verdict:
        """The verdict that holds, ``verdict`` or the one before."""
        if self.verdict is None or verdict.finder < self.verdict.finder:
            self.verdict = verdict
        return self.verdict


class Beacon:
    """Answers callers that know a link's secret with what this process is doing, from a thread of
    its own, and takes in what they have to tell. ``links``, by key."""

    def __init__(self) -> None:
        host = own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with forks.guard:
            self._server = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
            forks.close_in_child(self._server)
        self._host, self._port = host, int(self._server.getsockname()[1])
        self.status = "starting"
        self.links: dict[str, Enrolled] = {}
        self._since = time.monotonic()
        self._doors: dict[bytes, str] = {}
        self._doors_lock = threading.Lock()
        threading.Thread(target=self._serve, daemon=True, name="laconic-beacon").start()
        # of multiprocessing, whose processes do not run what atexit has
        multiprocessing.util.Finalize(None, self.depart, exitpriority=0)

    def enroll(self, secret: bytes | None = None) -> str:
        """The address under which others ask about a new link of this process."""
        key = secrets.token_hex(KEY_BYTES)
        self.links[key] = Enrolled(secret)
        return str(Address(self._host, self._port, key))

    def door(self, secret: bytes) -> str:
        """The address under which those who know ``secret`` ask about this process, whatever
        links it has."""
        with self._doors_lock:
            if secret not in self._doors:
                self._doors[secret] = self.enroll(secret)
            return self._doors[secret]

    def set(self, status: str) -> None:
        """What this process is doing from now on."""
        self.status, self._since = status, time.monotonic()

    def depart(self) -> None:
        """Tell the other ranks of all links that this process ends in order: that its connections
        close is no failure of what they do without it. Nothing is told where it does not: an
        exception ended the program, or has made it leave a link."""
        if vars(sys).get("last_value") is not None:
            return
        asked = []
        for link in self.links.values():
            if link.secret is not None and link.verdict is None and not link.position.left:
                request = Request(left=link.position.serial)
                at = link.secret, link.rank, request
                asked += [(a, *at) for r, a in link.others.items() if r not in link.left]
        _ask_each(asked, ANSWER_SECONDS)

    def _serve(self) -> None:
        talks = Talks()
        talks.serve(self._server, self._exchange, ANSWER_SECONDS, lambda talk, error: None)
        while True:
            talks.turn()

    def _exchange(self) -> handshake.Exchange:
        return handshake.answer(PURPOSE, self._secret_of, self._reply)

    def _secret_of(self, key: bytes) -> bytes | None:
        link = self.links.get(key.hex())
        return None if link is None else link.secret

    def _reply(self, hello: handshake.Hello, text: bytes) -> bytes:
        link = self.links[hello.key.hex()]
        try:
            request = Request.unpack(text)
        except ValueError as error:
            raise handshake.RefusedError(str(error)) from None
        if request.verdict is not None:
            link.take(request.verdict)
        if request.left is not None:
            link.left[hello.number] = request.left
        seconds = time.monotonic() - self._since
        return pack_answer(f"{self.status}, for {seconds:.0f} s", link.position, link.verdict)


@functools.cache
def beacon() -> Beacon:
    """This process's own, lit at the first call and as long as the process lives."""
    return Beacon()


forks.call_in_child(beacon.cache_clear)


def key_of(address: str) -> str:
    """The last part of what `Beacon.enroll` returned."""
    return address.rpartition("|")[2]


# -- asking ----


def ask(address: str, secret: bytes, rank: int = 0, request: Request = NOTHING) -> Answer:
    """What the process at ``address`` says, or what its silence means, to ``rank``, which knows
    that link's ``secret``, and has something to tell it perhaps."""
    return ask_all([address], secret, rank, request)[0]


def ask_all(
    addresses: Iterable[str],
    secret: bytes,
    rank: int = 0,
    request: Request = NOTHING,
) -> list[Answer]:
    """All at once."""
    return _ask_each([(a, secret, rank, request) for a in addresses], ANSWER_SECONDS)


class _Question:
    """One beacon to ask, several times if need be: one that is flooded by strangers may have
    dropped this caller for the next one."""

    def __init__(self, address: str, secret: bytes, rank: int, request: Request) -> None:
        self.host, self.port, key = Address.parse(address)
        self._say = secret, PURPOSE, bytes.fromhex(key), rank, request.pack()
        self.answer: Answer | None = None
        self.again = 0.0
        """When to ask again; infinity while it is being asked."""

    def begin(self, talks: Talks, deadline: float) -> None:
        self.again = math.inf
        self._deadline = deadline
        try:
            talks.call(self.host, self.port, handshake.call(*self._say), deadline, self._ended)
        except OSError as error:
            self._failed(error, connecting=True)

    def _ended(self, talk: Talk, error: Exception | None) -> None:
        if error is not None:
            self._failed(error, connecting=talk.connecting)
            return
        try:
            self.answer = unpack_answer(talk.result)
        except ValueError:
            self.answer = OTHER  # it knows the secret, and is another version

    def _failed(self, error: Exception, *, connecting: bool) -> None:
        now = time.monotonic()
        if isinstance(error, ConnectionRefusedError):
            self.answer = GONE
        elif connecting:
            self.answer = UNREACHABLE
        elif isinstance(error, TimeoutError):
            self.answer = SILENT
        elif now + RETRY_SECONDS < self._deadline:
            self.again = now + RETRY_SECONDS
        else:
            self.answer = OTHER if isinstance(error, handshake.RefusedError) else ENDING


def _ask_each(asked: Sequence[tuple[str, bytes, int, Request]], seconds: float) -> list[Answer]:
    """The answers, in that order; each is waited for at most ``seconds``."""
    questions = [_Question(*each) for each in asked]
    waiting, under_way = deque(questions), dict[_Question, float]()
    talks = Talks()
    try:
        while waiting or under_way:
            now = time.monotonic()
            while waiting and len(under_way) < MOST_AT_ONCE:
                under_way[waiting.popleft()] = now + seconds
            for question, deadline in under_way.items():
                if question.answer is None and question.again <= now:
                    question.begin(talks, deadline)
            for question in [q for q in under_way if q.answer is not None]:
                del under_way[question]
            if under_way:
                talks.turn(min(max(min(q.again for q in under_way) - now, 0), seconds))
    finally:
        talks.close()
    answers = [question.answer for question in questions]
    return [answer for answer in answers if answer is not None]
