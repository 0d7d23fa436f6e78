"""Guards the calls of a link: are all ranks in the same call, and is any of them lost?

Every rank makes the same calls in the same order. A guard notices where they do not, where a
process has ended or hangs, and where a host is unreachable. The first rank that notices tells all
others before it raises, so all ranks raise the same `LinkError`, which names the ranks to blame.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from laconic.errors import LinkError
from laconic.links import health, job_secret, long_wait
from laconic.links.addresses import Address
from laconic.links.calls import FINISH, SAME_CALLS, Call, CallPosition
from laconic.links.health import Answer, LinkRecord, Unreachable, Verdict
from laconic.links.long_wait import LongWait
from laconic.links.rendezvous import ADVICE, Rendezvous
from laconic.links.wire import ChangedError, LostError, OtherCallError, StalledError, Wire

PEERS_SECONDS = 0.5
"""How often `CallGuard.check_peers` looks whether the connections are still open."""
ASK_SECONDS = 3.0
"""How often a rank that waits asks the others."""

NO_ANSWER = "silent", "unreachable"
"""The kinds of `Answer.missing` of a rank whose process may live."""

ENDED = (
    "all processes live, and a connection between two of them has ended, as where a firewall or "
    "NAT has forgotten it"
)
AGAIN = "Start all ranks again from the last checkpoint. A run with elastic= goes on by itself"

Answers = dict[int, Answer]
"""What beacons answered, by rank of the link."""


class CallGuard:
    """Guards the calls of one link, over ``wire``. Links that were split from one share its
    ``record``. A guard can say who is lost once `meet` has returned.

    ``rank``: this rank's place in the link; ``ranks``: the world ranks of the link's members, for
    messages.
    """

    def __init__(self, wire: Wire, record: LinkRecord | None = None) -> None:
        self.wire, self.rank, self.ranks = wire, wire.rank, list(wire.connections.names)
        self.size = len(self.ranks)
        self._record = record or LinkRecord()
        self._beacon = health.beacon()
        self._addresses: list[str] = []
        self._closed: set[int] = set()
        """The ranks that live, and whose connections are closed."""
        self._unreachable, self._wait = Unreachable(), LongWait()
        self._ask_at = self._peers_checked = 0.0

    # -- setting up ----

    @property
    def secret(self) -> bytes:
        """What all ranks of the link know, and nobody else."""
        assert self._record.secret is not None, "the ranks have met"
        return self._record.secret

    def meet(self, rendezvous: Rendezvous) -> list[str]:
        """Exchange the addresses of the beacons, and derive the link's secret from that of the
        ``rendezvous``. Returns the addresses of all wires, by rank. All ranks must call it."""
        address = self._beacon.enroll()
        self._record = self._beacon.links[Address.parse(address).key]
        received = rendezvous.exchange(
            f"{address}/{self.wire.address}", self.wire.connections.timeout
        )
        self._addresses = [said.partition("/")[0] for said in received]
        salt = self._addresses[0].encode()  # it has a random key
        self._record.secret = job_secret.derive(rendezvous.secret, "link", salt=salt)
        return [said.partition("/")[2] for said in received]

    def split(self, members: Sequence[int], wire: Wire) -> CallGuard:
        """The guard of a link of some ``members`` of this one, this rank included."""
        guard = CallGuard(wire, self._record)
        guard._addresses = [self._addresses[r] for r in members]
        return guard

    def answering(self) -> Callable[[int], bool]:
        """A function that says whether the process of a rank answers. It holds no connection."""
        return health.answering(self._addresses, self.secret)

    def check_connecting(self) -> None:
        """Raise if a rank's process has ended while the ranks connect to each other."""
        self._raise_verdict()
        if self._should_ask():
            answers = self._ask()
            if any(answer.missing == "gone" for answer in answers.values()):
                self._blame(answers, "while the ranks connected")

    # -- calls ----

    @property
    def position(self) -> CallPosition:
        """Where this rank is in the sequence of calls."""
        return self._record.position

    def header(self) -> tuple[int, int]:
        """What the messages of the current call carry, and must carry."""
        return self._record.header

    def begin(self, call: Call) -> None:
        """``call`` is the next one; raises what another rank found wrong."""
        self._raise_verdict()
        self._record.begin(call)

    def leave(self, broken: bool) -> None:
        """This rank makes no more calls, and, if ``broken``, does not complete the last one."""
        self._record.position = self.position._replace(left=True, broken=broken)

    def status(self, text: str) -> None:
        """What this process is doing, for other ranks' messages."""
        self._beacon.set(text)

    # -- looking after the other ranks ----

    def check(self, progress: float = 0.0) -> None:
        """Raise if another rank is known not to come to the current call, and log which ranks this
        one has waited for long. Called by a thread that waits, about once a second. ``progress``:
        changes whenever something has come over the link."""
        self.wire.connections.check_fork()
        try:
            self._raise_verdict()
            long = self._wait.due((self.position.serial, progress), time.monotonic())
            if self._should_ask() or long:
                answers = self._ask_where()
                if long:
                    self._report(long, answers)
        except LinkError:
            self.wire.connections.shutdown()  # for the thread that waits for messages
            raise

    def check_peers(self, last: float) -> None:
        """Raise if another rank is lost. Called between two calls; ``last``: when
        (`time.perf_counter`) the last collective was complete. Cheap where all is well."""
        now = time.perf_counter()
        if now - max(self._peers_checked, last) < PEERS_SECONDS:
            return
        self._peers_checked, status = now, self._beacon.status
        try:
            self._raise_verdict()
            self._check_connections()
        except LinkError as error:
            at = f"{status}, between rounds (the last one: {self.position})"
            self.wire.connections.shutdown()
            raise LinkError(f"{at}: {error}", ranks=error.ranks) from None

    def _should_ask(self) -> bool:
        """Whether it is time to ask the other ranks again."""
        now = time.monotonic()
        due = now >= self._ask_at
        if due:
            self._ask_at = now + max(ASK_SECONDS, self.size / 4)  # all ask all others
        return due

    def _report(self, seconds: float, answers: Answers) -> None:
        """Log that ranks have not come to this call: those that do not answer, or are in an earlier
        one. The lowest rank of those that have come does so for all."""
        mine = self.position
        late = [
            r
            for r, a in sorted(answers.items())
            if a.lost or (a.position is not None and a.position.serial < mine.serial)
        ]
        if late and self.rank == min(r for r in range(self.size) if r not in late):
            self.report(late, seconds, str(mine), answers)

    def report(
        self, late: Sequence[int], seconds: float, where: str = "", answers: Answers | None = None
    ) -> None:
        """Log that this rank has waited for ``late`` ranks. ``where``: what it does, if not its
        `status`; ``answers``: theirs, if they were asked."""
        answers = answers or self._ask(ranks=late)
        why = "; ".join(self._describe(r, answers[r]) for r in late)
        names = [self.ranks[r] for r in late]
        at = self.ranks[self.rank], names, seconds, where or self._beacon.status, why
        long_wait.report(*at, self.wire.connections.timeout)

    def _ask_where(self) -> Answers:
        """Ask the other ranks where they are, and return their answers; raise if one will not
        come."""
        answers = self._ask()
        self._raise_verdict()
        positions = {r: a.position for r, a in answers.items() if a.position is not None}
        self._check_positions({**positions, self.rank: self.position})
        # where a process has ended, the wait for its message ends by itself
        heard = self.wire.connections.heard
        if lost := self._unreachable.lost(answers, time.monotonic(), heard):
            seconds = health.UNREACHABLE_SECONDS
            self._blame(answers, f"nothing came from it for {seconds:g} s", only=lost)
        return answers

    def _check_connections(self) -> None:
        """Raise if a connection is closed that should be open."""
        closed = {r: e for r, e in self.wire.closed().items() if r not in self._closed}
        finished = self.position.call is not None and self.position.call.name == FINISH
        if not closed or finished:
            return
        answers = self._ask()
        for r, failed in closed.items():
            if not answers[r].lost:  # it has closed its link
                self._closed.add(r)
            elif failed or answers[r].missing == "gone":
                self._blame(answers, "its connection is closed")

    def _check_positions(self, positions: Mapping[int, CallPosition]) -> None:
        """Raise if ranks at these ``positions``, by rank of the link, cannot meet."""
        mine = self.position
        if any(
            (p.serial == mine.serial and (p.call != mine.call or p.broken))
            or (p.serial < mine.serial and p.left)
            for p in positions.values()
        ):
            self._refuse(positions)

    def _ask(self, verdict: Verdict | None = None, ranks: Sequence[int] | None = None) -> Answers:
        """The answers of the other ranks of this link (or those of ``ranks``) to ``verdict``."""
        others = [r for r in (range(self.size) if ranks is None else ranks) if r != self.rank]
        addresses = [self._addresses[r] for r in others]
        received = health.ask_all(addresses, self.secret, verdict)
        for answer in received:
            if answer.verdict is not None:
                self._record.adopt(answer.verdict)
        return dict(zip(others, received, strict=True))

    # -- errors ----

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """A context for messages: an error inside is raised as one that names the ranks to
        blame."""
        try:
            yield
        except OtherCallError as error:
            if error.header == self._record.header:  # the same call, a message of another length
                self.conclude(str(error), [])
            there = self._ask(ranks=[error.rank])[error.rank].position
            if there is None or there[:2] == self.position[:2]:  # the beacon does not know better
                there = CallPosition(error.header[0])
            self._refuse({error.rank: there, self.rank: self.position})
        except ChangedError as error:
            self.conclude(str(error), [])
        except StalledError as error:
            self.conclude(f"{error}. {AGAIN}", [])
        except LostError as error:
            self.lost(error)

    def lost(self, error: RuntimeError) -> NoReturn:
        """A back end reported ``error``, and not which rank is lost: ask, and raise."""
        self._raise_verdict()  # without asking
        self._blame(self._ask(), (str(error) or type(error).__name__).splitlines()[0])

    def conclude(self, text: str, ranks: Iterable[int], answers: Answers | None = None) -> NoReturn:
        """Raise ``text``, which blames the world ``ranks``, here and on all ranks of the link; or
        the verdict that counts before it: one that is known already, or of a lower rank. Ranks that
        are lost according to ``answers`` do not receive it."""
        self._raise_verdict()
        self._record.adopt(Verdict(text, tuple(sorted(ranks)), self.ranks[self.rank]))
        self.status("stopped")
        lost = {r for r, answer in (answers or {}).items() if answer.lost}
        self._ask(self._record.verdict, [r for r in range(self.size) if r not in lost])
        # no message will come; this wakes a thread that waits for one
        self.wire.connections.shutdown()
        self._raise_verdict()
        raise AssertionError("there is a verdict")

    def _raise_verdict(self) -> None:
        """Raise what a rank has found wrong, if one has."""
        verdict = self._record.verdict
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
        mine = self.position.serial
        silent = list(only) or [r for r, a in answers.items() if a.missing in NO_ANSWER]
        gone = [r for r, a in answers.items() if a.missing == "gone"]
        cut = bool(self.wire.closed())
        behind = [  # and can still come
            r for r, a in answers.items() if not cut and a.position and a.position.serial < mine
        ]
        blamed = silent or gone or behind
        parts = [self._describe(r, answers[r]) for r in silent + gone or behind or answers]
        if len(silent) == self.size - 1 > 1:
            parts.append("all others at once: this rank's own network may be down")
        if cut and not blamed:
            parts.append(ENDED)
        text = f"{'; '.join(parts)}. {ADVICE}. ({reason})"
        self.conclude(text, [self.ranks[r] for r in blamed], answers)

    def _describe(self, rank: int, answer: Answer) -> str:
        """What is known of a rank."""
        return f"rank {self.ranks[rank]} {'' if answer.lost else 'is '}{answer.status}"
