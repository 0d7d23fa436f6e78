"""Guards the calls of a link: are all ranks in the same call, and is any of them lost?

Every rank makes the same calls in the same order. A guard notices where they do not, where a
process has ended or hangs, and where a host is unreachable. The first rank that notices tells all
others before it raises, so all ranks raise the same `LinkError`, which names the ranks to blame.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch

from laconic.errors import TIMEOUT, LinkError
from laconic.links import health, job_secret, long_wait
from laconic.links.addresses import Address
from laconic.links.calls import FINISH, SAME_CALLS, Call, CallPosition
from laconic.links.handshake import SECRET_BYTES
from laconic.links.health import NOTHING, Answer, Request, Verdict
from laconic.links.long_wait import LongWait, Patience
from laconic.links.rendezvous import ADVICE, UNREACHABLE_SECONDS
from laconic.links.stalls import Counted, Stalls
from laconic.links.texts import ExchangeTexts, Gather
from laconic.links.wire import ChangedError, LostError, OtherCallError, Wire

PEERS_SECONDS = 0.5
"""How often `CallGuard.check_peers` looks whether the connections are still open."""

NO_ANSWER = "silent", "unreachable"
"""The kinds of `Answer.missing` of a rank whose process may live."""

SWALLOWED = (
    "all connections are open and small messages pass, but no large one arrives: a part of the "
    "path may drop full packets, since its MTU is smaller than this host's. `laconic doctor` tests "
    "that between hosts; a smaller MTU of the network interfaces avoids it"
)

Answers = dict[int, Answer]
"""What beacons answered, by rank of the link."""


class CallSequence:
    """The calls of this process over one link to all ranks and the links split from it. All of them
    count as one sequence. The beacon of the process reports the position in it to other ranks."""

    def __init__(self) -> None:
        self.position = CallPosition()  # only the thread that makes the calls changes it
        self.header = 0, 0
        """The serial number and the id of the current call, which every message carries."""
        self.address = health.beacon().enroll()
        self.record = health.beacon().links[health.key_of(self.address)]

    @property
    def serial(self) -> int:
        """How many calls there were."""
        return self.position.serial

    @property
    def finished(self) -> bool:
        """Whether the last call was the one after which ranks may end."""
        return self.position.call is not None and self.position.call.name == FINISH

    def share(self, secret: bytes, rank: int, beacons: Mapping[int, str]) -> None:
        """The ranks share ``secret`` from now on. ``rank``: this one; ``beacons``: the addresses of
        all, by world rank."""
        self.record.secret, self.record.rank = secret, rank
        self.record.others = {r: address for r, address in beacons.items() if r != rank}

    def begin(self, call: Call) -> None:
        """``call`` is the next one."""
        self.position = CallPosition(self.serial + 1, health.shown(call))
        self.header = self.serial, call.id
        self.record.position = self.position

    def leave(self, broken: bool) -> None:
        """No more calls; ``broken``: the last one is not completed."""
        self.record.position = self.position._replace(left=True, broken=broken)


class CallGuard:
    """Guards the calls of one link. Links that were split from one share a `CallSequence`.

    ``rank``: this rank's place in the link; ``ranks``: the world ranks of the link's members, for
    messages. ``transport``: the link's connections, None where they cannot be seen (NCCL).
    ``timeout``: how many seconds the link waits for a message, for the log. A guard can say who is
    lost once `meet` has returned.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        transport: Wire | None,
        sequence: CallSequence | None = None,
        *,
        timeout: float = TIMEOUT,
    ) -> None:
        self.rank, self.ranks, self.size = rank, list(ranks), len(ranks)
        self._transport, self._timeout = transport, timeout
        self._sequence = CallSequence() if sequence is None else sequence
        self._beacon, self._process = health.beacon(), os.getpid()
        self._addresses: list[str] = []
        self._answered: set[int] = set()
        """The ranks whose beacons have answered: if one is gone later, its process has ended."""
        self._closed: set[int] = set()
        """The ranks that have closed their connections in order."""
        self._unreachable: dict[int, float] = {}
        """Since when (`time.monotonic`) a rank's beacon cannot be reached."""
        self._wait, self._patience = LongWait(), Patience()
        self._peers_checked = 0.0

    # -- setting up ----

    @property
    def secret(self) -> bytes:
        """What all ranks of the link know, and nobody else."""
        assert self._sequence.record.secret is not None, "the ranks have met"
        return self._sequence.record.secret

    def meet(self, exchange: ExchangeTexts, text: str) -> list[str]:
        """Exchange the addresses of the beacons, and adopt rank 0's secret; or, where all ranks
        have one already, derive this link's from it and rank 0's salt. Returns every rank's
        ``text``, by rank. All ranks must call it."""
        own = "/".join([self._sequence.address, secrets.token_hex(SECRET_BYTES), text])
        try:
            received = [said.split("/", 2) for said in exchange(own)]
        except LinkError:
            raise
        except RuntimeError as error:
            self.lost(error)
        secret, shared = bytes.fromhex(received[0][1]), job_secret.read()
        if shared is not None:
            secret = job_secret.derive(shared, "link", salt=secret)
        self._addresses = [said[0] for said in received]
        beacons = dict(zip(self.ranks, self._addresses, strict=True))
        self._sequence.share(secret, self.ranks[self.rank], beacons)
        return [said[2] for said in received]

    def split(self, members: Sequence[int], transport: Wire | None) -> CallGuard:
        """The guard of a link of some ``members`` of this one, this rank included."""
        ranks = [self.ranks[r] for r in members]
        at = members.index(self.rank), ranks, transport, self._sequence
        guard = CallGuard(*at, timeout=self._timeout)
        guard._addresses = [self._addresses[r] for r in members]
        return guard

    def stalls(self, addresses: Sequence[str], connections: Counted) -> Stalls:
        """What finds stalled ``connections``. ``addresses``: of all ranks' ends of them."""
        keys = [Address.parse(address).key for address in addresses]
        others = list(zip(self._addresses, keys, strict=True))
        at = self._sequence.record, keys[self.rank], self.rank, self.ranks, others, connections
        return Stalls(*at)

    def check_connecting(self) -> None:
        """Raise if a rank's process has ended while the ranks connect to each other."""
        self._raise_verdict()
        if self._should_ask():
            answers = self._ask()
            if any(answer.missing == "gone" for answer in answers.values()):
                self._blame(answers, "while the ranks connected")

    # -- calls ----

    @property
    def header(self) -> tuple[int, int]:
        """What the messages of the current call carry, and must carry."""
        return self._sequence.header

    @property
    def call(self) -> Call | None:
        """The current call, as other ranks show it."""
        return self._sequence.position.call

    def begin(self, call: Call) -> None:
        """``call`` is the next one; raises what another rank found wrong."""
        self._raise_verdict()
        self._sequence.begin(call)

    def compare(self, call: Call, gather: Gather) -> None:
        """Raise if not all ranks of the link have begun ``call``. All of them must call it."""
        ids = gather(torch.tensor([call.id])).flatten().tolist()
        other = [r for r, number in enumerate(ids) if number != call.id]
        if other:
            answers, serial = self._ask(ranks=other), self._sequence.serial
            positions = dict.fromkeys(range(self.size), self._sequence.position)
            positions.update({r: self._position(answers.get(r), serial) for r in other})
            self._refuse(positions)

    def leave(self, broken: bool) -> None:
        """This rank makes no more calls, and, if ``broken``, does not complete the last one."""
        self._sequence.leave(broken)

    def status(self, text: str) -> None:
        """What this process is doing, for other ranks' messages."""
        self._beacon.set(text)

    # -- looking after the other ranks ----

    def check(self, progress: float = 0.0) -> None:
        """Raise if another rank is known not to come to the current call, and log which ranks this
        one has waited for long. Called by a thread that waits, about once a second. ``progress``:
        changes whenever something has come over the link."""
        if os.getpid() != self._process:
            raise LinkError("a forked process cannot use its parent's link: start it with spawn")
        try:
            self._raise_verdict()
            long = self._wait.due((self._sequence.serial, progress), time.monotonic())
            if self._should_ask() or long:
                answers = self._ask_where()
                if long:
                    self._report(long, answers)
        except LinkError:
            self._shutdown()  # for the thread that waits for messages
            raise

    def check_peers(self, last: float) -> None:
        """Raise if another rank is lost. Called between two calls; ``last``: when
        (`time.perf_counter`) the last collective was complete. Cheap where all is well."""
        now = time.perf_counter()
        if self._transport is None or now - max(self._peers_checked, last) < PEERS_SECONDS:
            return
        self._peers_checked, status = now, self._beacon.status
        try:
            self._raise_verdict()
            self._check_connections(self._transport)
        except LinkError as error:
            at = f"{status}, between rounds (the last one: {self._sequence.position})"
            self._shutdown()
            raise LinkError(f"{at}: {error}", ranks=error.ranks) from None

    def _should_ask(self) -> bool:
        """Whether it is time to ask the other ranks again."""
        again = bool(self._unreachable)
        return self._patience.ends(self._sequence.serial, time.monotonic(), again)

    def _report(self, seconds: float, answers: Answers) -> None:
        """Log that ranks have not come to this call: those that do not answer, or are in an earlier
        one. The lowest rank of those that have come does so for all."""
        mine = self._sequence.position
        late = [
            r
            for r, a in sorted(answers.items())
            if a.lost or (a.position is not None and a.position.serial < mine.serial)
        ]
        if late and self.rank == min(r for r in range(self.size) if r not in late):
            why = "; ".join(self._describe(r, answers[r]) for r in late)
            names = [self.ranks[r] for r in late]
            at = self.ranks[self.rank], names, seconds, str(mine), why, self._timeout
            long_wait.report(*at)

    def _ask_where(self) -> Answers:
        """Ask the other ranks where they are, and return their answers; raise if one will not
        come."""
        answers = self._ask()
        self._raise_verdict()
        positions = {r: a.position for r, a in answers.items() if a.position is not None}
        self._check_positions({**positions, self.rank: self._sequence.position})
        if self._transport is None:
            return answers  # NCCL finds lost ranks by itself, and its connections cannot be seen
        serial, closed = self._sequence.serial, self._transport.closed()
        for r, answer in answers.items():
            ended = r in self._answered or r in closed  # and not kept away by a firewall
            if answer.missing == "gone" and ended and self._ended_after(r) < serial:
                self._blame(answers, "its connection is closed")
        now, lost = time.monotonic(), Answers()
        for r, answer in answers.items():
            if answer.missing != "unreachable":
                self._unreachable.pop(r, None)
                continue
            silence = now - self._unreachable.setdefault(r, now)
            if min(silence, self._transport.heard(r)) >= UNREACHABLE_SECONDS:
                lost[r] = answer
        if lost:
            self._blame(answers, f"nothing came from it for {UNREACHABLE_SECONDS:g} s", only=lost)
        return answers

    def _check_connections(self, transport: Wire) -> None:
        """Raise if a connection is closed that should be open."""
        ended = transport.closed()
        self._closed &= set(ended)  # the others were made again
        closed = {r: e for r, e in ended.items() if r not in self._closed}
        if not closed or self._sequence.finished:
            return
        answers = self._ask()
        for r, failed in closed.items():
            if self._ended_after(r) >= 0 or not answers[r].lost:
                # in order, or its process lives: it has closed its link, or the next call makes
                # the connection again
                self._closed.add(r)
            elif failed or answers[r].missing == "gone":
                self._blame(answers, "its connection is closed")

    def _check_positions(self, positions: Mapping[int, CallPosition]) -> None:
        """Raise if ranks at these ``positions``, by rank of the link, cannot meet."""
        mine = self._sequence.position
        if any(
            (p.serial == mine.serial and (p.call != mine.call or p.broken))
            or (p.serial < mine.serial and p.left)
            for p in positions.values()
        ):
            self._refuse(positions)

    def _ended_after(self, rank: int) -> int:
        """After how many calls the process of ``rank`` ended in order; -1 if it did not, as far as
        is known."""
        return self._sequence.record.left.get(self.ranks[rank], -1)

    def _position(self, answer: Answer | None, serial: int) -> CallPosition:
        """Where a rank is that has sent a message of another call, its ``serial``-th: what its
        beacon answered, if it did."""
        position = None if answer is None else answer.position
        mine = self._sequence.position
        if position is None or (position.serial, position.call) == (mine.serial, mine.call):
            return CallPosition(serial)
        return position

    def _ask(self, request: Request = NOTHING, ranks: Sequence[int] | None = None) -> Answers:
        """The answers of the other ranks of this link (or those of ``ranks``) to ``request``."""
        secret = self._sequence.record.secret
        if secret is None:  # the ranks have not met
            return {}
        others = [r for r in (range(self.size) if ranks is None else ranks) if r != self.rank]
        addresses = [self._addresses[r] for r in others]
        received = health.ask_all(addresses, secret, self.ranks[self.rank], request)
        answers = dict(zip(others, received, strict=True))
        for r, answer in answers.items():
            if answer.verdict is not None:
                self._sequence.record.adopt(answer.verdict)
            if not answer.lost:
                self._answered.add(r)
        return answers

    # -- errors ----

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """A context for messages: an error inside is raised as one that names the ranks to
        blame."""
        try:
            yield
        except OtherCallError as error:
            if error.header == self.header:  # the same call, a message of another length
                self.conclude(str(error), [])
            answer = self._ask(ranks=[error.rank]).get(error.rank)
            self._raise_verdict()
            there = self._position(answer, error.header[0])
            self._refuse({error.rank: there, self.rank: self._sequence.position})
        except ChangedError as error:
            self.conclude(str(error), [])
        except LostError as error:
            self.lost(error)

    def lost(self, error: RuntimeError) -> NoReturn:
        """A back end reported ``error``, and not which rank is lost: ask, and raise."""
        self._raise_verdict()
        self._blame(self._ask(), (str(error) or type(error).__name__).splitlines()[0])

    def conclude(self, text: str, ranks: Iterable[int], answers: Answers | None = None) -> NoReturn:
        """Raise ``text``, which blames the world ``ranks``, here and on all ranks of the link; or
        the verdict that counts before it. Ranks that are lost according to ``answers`` do not
        receive it."""
        record = self._sequence.record
        record.adopt(Verdict(text, tuple(sorted(ranks)), self.ranks[self.rank]))
        self.status("stopped")
        lost = {r for r, answer in (answers or {}).items() if answer.lost}
        self._ask(Request(record.verdict), [r for r in range(self.size) if r not in lost])
        self._shutdown()  # no message will come; this wakes a thread that waits for one
        self._raise_verdict()
        raise AssertionError("there is a verdict")

    def report(self, text: str, ranks: Iterable[int]) -> NoReturn:
        """As `conclude`, but a verdict that is known already counts, whoever has found it."""
        self._raise_verdict()
        self.conclude(text, ranks)

    def _raise_verdict(self) -> None:
        """Raise what a rank has found wrong, if one has."""
        verdict = self._sequence.record.verdict
        if verdict is not None:
            raise LinkError(verdict.text, ranks=verdict.ranks) from None

    def _refuse(self, positions: Mapping[int, CallPosition]) -> NoReturn:
        """The ranks of the link are at ``positions``, which cannot meet."""
        where = "; ".join(f"rank {self.ranks[r]}: {positions[r]}" for r in sorted(positions))
        text = f"the ranks are at different places ({where}). {SAME_CALLS}"
        # a rank that has not seen it yet will only see this process end
        self.conclude(text, [self.ranks[r] for r, p in positions.items() if p.left or p.broken])

    def _blame(self, answers: Answers, reason: str, only: Iterable[int] = ()) -> NoReturn:
        """Conclude from the other ranks' ``answers`` who is to blame for the ``reason`` why this
        rank cannot go on. That is a rank that does not answer; else one that has ended; else one
        that is behind; or ``only`` the given ones."""
        self._raise_verdict()
        mine = self._sequence.serial
        silent = list(only) or [r for r, a in answers.items() if a.missing in NO_ANSWER]
        gone = [
            r for r, a in answers.items() if a.missing == "gone" and self._ended_after(r) < mine
        ]
        behind = [r for r, a in answers.items() if a.position and a.position.serial < mine]
        blamed = silent or gone or behind
        parts = [self._describe(r, answers[r]) for r in silent + gone or behind or answers]
        if len(silent) == self.size - 1 > 1:
            parts.append("all others at once: this rank's own network may be down")
        if answers and not blamed and self._transport is not None and not self._transport.closed():
            parts.append(SWALLOWED)
        who = "; ".join(parts) or "a rank was lost before the ranks had met"
        text = f"{who}. {ADVICE}. ({reason})"
        self.conclude(text, [self.ranks[r] for r in blamed], answers)

    def _describe(self, rank: int, answer: Answer) -> str:
        at = self._ended_after(rank), self._sequence.serial
        return _described(self.ranks[rank], answer, *at)

    def _shutdown(self) -> None:
        if self._transport is not None:
            self._transport.shutdown()


def _described(name: int, answer: Answer, last: int, mine: int) -> str:
    """What is known of rank ``name``, whose process has ended in order after call ``last`` (-1: as
    far as is known, it has not), for a rank in call ``mine``."""
    what = answer.status if answer.lost else f"is {answer.status}"
    if answer.missing == "gone" and last >= 0:
        what = f"has left: its program ended in order after call {last} of {mine}"
    return f"rank {name} {what}"
