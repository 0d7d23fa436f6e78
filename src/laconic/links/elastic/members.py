"""Who takes part, as one worker knows it.

Two threads run beside the training. One renews this worker's lease, and asks the beacons of other
workers for signs of life while this one waits for them. The other hears from the coordinator which
view was decided (`laconic.links.elastic.leases` says how).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from laconic.errors import LinkError
from laconic.links import health
from laconic.links.addresses import Address
from laconic.links.calls import FINISH, Call, CallPosition
from laconic.links.elastic.client import (
    CALL_SECONDS,
    RETRY_SECONDS,
    Client,
    CoordinatorError,
    RemovedError,
)
from laconic.links.elastic.embedded import serve
from laconic.links.elastic.leases import Beat
from laconic.links.elastic.signs import Signs
from laconic.links.elastic.units import Units
from laconic.links.elastic.view import Member, View
from laconic.links.health import LinkRecord

log = logging.getLogger("laconic")

BEAT, FAST_BEAT = 0.5, 0.05
"""Seconds between questions to a beacon; the second while the connections are broken."""
RENEW = 1.0
"""Seconds after which a lease is renewed, where nothing has changed."""
RECONNECT = 1.0
"""Seconds after which broken connections are made again, if nobody was found to be lost. They
double each time, up to `MOST_PATIENCE`."""
MOST_PATIENCE = 30.0
QUESTIONS = 3
"""How often a newcomer is asked for a sign of life before it is refused."""
NEWCOMER_SECONDS = 2.0
"""How long a newcomer that is ready waits at least until it interrupts a transfer."""


class Members:
    """The members of one run, as the worker ``me``, which does ``units``, knows them by ``client``.
    ``wait``: seconds to wait for enough workers; ``limit``: the longest silence in seconds.
    ``beacon``: answers the other members; they hear ``note()`` of this worker once it is gone.

    ``on_view`` is called, in the thread that hears, when a view was decided.

    Which thread writes what. `changed` guards what `next` waits for. The rest are single values,
    which another thread may see a moment later.

    ============================  ===================================================
    the thread that beats         `signs`
    the thread that hears         the view, why this worker was removed, and why no
                                  view can be decided
    the communication thread      where it is, and that it waits (`is_at`, `broken`,
                                  `mended`, `idle`), and when rounds begin
    a donor's relay               the newcomers (`add`)
    the main thread               that this worker leaves
    ============================  ===================================================
    """

    def __init__(
        self,
        client: Client,
        me: Member,
        beacon: health.Beacon,
        units: Units,
        note: Callable[[], str],
        wait: float,
        limit: float,
    ) -> None:
        self.client, self.me, self._units, self._note = client, me, units, note
        self.wait, self.limit = wait, limit
        self.on_view: Callable[[View], None] = lambda view: None
        self.moved: Callable[[str], int] = lambda id: 0
        """How many bytes have come from a member."""
        self.signs = Signs(limit)
        self.waiting_since: float | None = None
        """Since when (`time.monotonic`) this worker is in a call, and `position` in the calls."""
        self.position = CallPosition()
        self.record = beacon.links[Address.parse(me.beacon).key]
        """What the other members hear when they ask."""
        self.status, self.silence = beacon.set, beacon.close
        """Set what they are told that this process is doing; end the answers to them."""
        self.ended = False
        """Whether this worker needs no further view, unless a call begins."""
        self.latest: View | None = None
        self.changed = threading.Condition()
        self._removed = ""
        self.founding = True
        """Until a run was found (`laconic.links.elastic.start`)."""
        self.entered_view = False
        """Whether this worker has been in a view."""
        self._newcomers: dict[str, float] = {}
        """The ids of newcomers that this worker takes in, and when they were ready."""
        self._leaving = False
        self._broken_since: float | None = None
        self.come = 0
        """How many workers wait for a run to begin."""
        self._short: tuple[int, int, float] | None = None
        """How many workers are left, how many are needed, and since when (`time.monotonic`), where
        too few are left."""
        self.coordinator_lost: CoordinatorError | None = CoordinatorError(
            f"the coordinator at {client.at} does not answer"
        )
        """Why the coordinator cannot be reached, if so."""
        self._called = 0.0
        """When this worker called the coordinator last."""
        self._reconnects = 0
        """How many of the latest views had no other members than the view before."""
        self._wake_beat = threading.Event()
        self.closed = False
        for work, name in ((self._beat, "laconic-heartbeat"), (self._hear, "laconic-members")):
            threading.Thread(target=partial(self._run, work), daemon=True, name=name).start()

    # -- what is known ----

    @property
    def number(self) -> int:
        """This worker's number, from 1."""
        return self.client.number

    @property
    def view(self) -> View:
        """The latest decided view."""
        assert self.latest is not None, "the run has begun"
        return self.latest

    def _others(self) -> list[Member]:
        return [m for m in self.view.members if m.id != self.me.id]

    def _run(self, work: Callable[[], None]) -> None:
        """Do a thread's ``work``. If it fails, this worker cannot follow the views any more: it
        must not wait for one, nor the others for it."""
        try:
            work()
        except BaseException:
            self._remove("a thread of this worker has failed; its error is in the output")
            self.record.position = self.position._replace(left=True)
            self.close()
            raise

    def close(self) -> None:
        """End the threads, and this worker's lease."""
        with self.changed:
            first, self.closed = not self.closed, True
            self.changed.notify_all()
        self._wake_beat.set()
        if first:
            self.client.over("has left" if self._leaving else "has ended")
            self.client.close()

    # -- for the link ----

    def is_at(self, serial: int, call: Call) -> None:
        """This worker begins ``call``, in the unit ``serial``."""
        self.position = CallPosition(serial, health.shown(call))
        if not self._removed:
            self.record.position = self.position
        self._reconnects = 0

    def round_begins(self) -> None:
        """A round begins. The coordinator hears at once how long the lease is now: a worker that is
        cut off before its next beat would keep the one before."""
        before = self.signs.deadline
        self.signs.begins(time.monotonic())
        if self.signs.deadline != before:
            self._wake_beat.set()

    def broken(self) -> None:
        """The connections of the present view are broken: find out why."""
        # it waits for others: nobody waits for it to come to another call
        self.record.position = self.position._replace(serial=self.position.serial + 1)
        self._broken_since = self._broken_since or time.monotonic()
        self._wake_beat.set()

    def mended(self) -> None:
        """The connections of the latest view stand."""
        self.record.position = self.position
        self._broken_since = None

    def next(self, epoch: int) -> View:
        """Wait for a view after ``epoch``, and return the latest. Raises `LinkError` if this worker
        is not in it, or there are too few workers for too long."""
        stalled_since: float | None = None
        while True:
            with self.changed:
                if not (self._removed or self.closed) and self.view.epoch <= epoch:
                    self.changed.wait(0.5)
            self.check()
            if self.view.epoch > epoch:
                return self.view
            short, other = self._short, self.coordinator_lost
            stalled_since = (stalled_since or time.monotonic()) if short or other else None
            since = stalled_since if short is None else short[2]  # in views before this one, too
            if since is not None and time.monotonic() - since >= self.wait:
                why = f"a worker was lost, and {other}" if short is None else _too_few(*short[:2])
                raise LinkError(
                    f"{why}. Nothing has changed within {self.wait:g} s: start the coordinator or "
                    "workers again, or lower min_workers="
                )

    def check(self) -> None:
        """Raise `LinkError` if this worker is not in the run any more."""
        if self._removed:
            raise LinkError(
                f"the other workers go on without this one ({self._removed}): start it again, and "
                "it joins them"
            )
        if self.closed:
            raise LinkError("this worker has left the run")

    def add(self, newcomer: Member) -> None:
        """Take in ``newcomer``. Raises `LinkError` if it does not answer: the others would wait for
        it in vain."""
        asked = [newcomer.beacon], self.client.secret
        if all(health.ask_all(*asked)[0].lost for _ in range(QUESTIONS)):
            raise LinkError(f"{newcomer.name} does not answer: are its address and ports open?")
        self._newcomers[newcomer.id] = time.monotonic()
        self._wake_beat.set()

    def idle(self) -> None:
        """No transfer is under way."""
        before, self.ended = self.ended, self._units.call.name == FINISH
        self.waiting_since = None
        if self._newcomers or self.ended != before:
            self._wake_beat.set()

    def leave(self) -> None:
        """Leave the view, and wait until that was decided."""
        if self._units.active == [self.me.id]:
            return
        self._leaving = True
        self._wake_beat.set()
        end = time.monotonic() + 2 * self.signs.deadline
        with self.changed:
            while not self._removed and time.monotonic() < end:
                if self.view.ids == [self.me.id]:  # the others leave, too
                    return
                self.changed.wait(0.5)

    # -- what this worker says ----

    def _beat(self) -> None:
        said, renewed = Beat(lease=0.0), 0.0
        while not self.closed and not self._removed:
            broken = self._broken_since is not None
            waits = broken or self.waiting_since is not None
            if self.entered_view and (waits or any(map(self._is_silent, self._others()))):
                ask = threading.Thread(target=self._ask, args=(self._others(),), daemon=True)
                ask.start()
                ask.join(BEAT)  # who does not answer does not delay the next questions
            beat = self._own_beat()
            if beat != said or time.monotonic() - renewed >= RENEW:
                try:
                    self.client.beat(beat)
                    said, renewed = beat, time.monotonic()
                except CoordinatorError:
                    said = Beat(lease=0.0)  # the thread that hears connects again
            self._wake_beat.wait(FAST_BEAT if broken else BEAT)
            self._wake_beat.clear()

    def _is_silent(self, member: Member) -> bool:
        """Whether it has neither answered the last question nor sent anything since. It is asked
        again, since it may be back."""
        return self.signs.silent_since(member.id) is not None

    def _own_beat(self) -> Beat:
        view, reports = self.latest, dict[str, tuple[str, str]]()
        if self.entered_view and not self._leaving:  # whom it suspects is for others to say
            for member in self._others():
                self.signs.moved(member.id, self.moved(member.id))
            reports = self.signs.reports(self._others(), self.waiting_since, self.position)
        broken = self._broken_since
        patience = min(RECONNECT * 2**self._reconnects, MOST_PATIENCE)
        again = broken is not None and time.monotonic() - broken >= patience
        return Beat(
            lease=self.signs.deadline,
            founding=view is None,
            active=self.me.id in self._units.active,
            ended=self.ended and self.waiting_since is None,
            leaving=self._leaving,
            again=view.epoch if again and view is not None else 0,
            note=self._note(),
            ready=self._due_newcomers(),
            reports=reports,
        )

    def _ask(self, asked: Sequence[Member]) -> None:
        start = time.monotonic()
        beacons = [m.beacon for m in asked]
        health.ask_all(beacons, self.client.secret, heard=partial(self._answered, asked, start))

    def _answered(
        self, asked: Sequence[Member], start: float, index: int, answer: health.Answer
    ) -> None:
        """One of the members ``asked`` at the time ``start`` has answered, or not."""
        if self.signs.hear(asked[index].id, start, answer):
            self._reconnects = self._reconnects if answer.lost else 0
            self._wake_beat.set()

    def _due_newcomers(self) -> list[str]:
        """Those to be in the next view. A view ends the transfers under way, so they wait until
        there is none, within limits."""
        limit = time.monotonic() - max(NEWCOMER_SECONDS, 2 * self.signs.pace)
        busy = self.waiting_since is not None
        return [id for id, ready in list(self._newcomers.items()) if not busy or ready <= limit]

    # -- what the coordinator says ----

    def _hear(self) -> None:
        while not self.closed and not self._removed:
            try:
                if self.coordinator_lost is not None:
                    self._connect()
                self._take(self.client.receive(CALL_SECONDS))
            except RemovedError as error:
                self._remove(str(error))
            except CoordinatorError as error:
                self._lose(error)
        self.client.over("has ended")  # it may have connected again meanwhile
        self.client.close()

    def _connect(self) -> None:
        self._called = time.monotonic()
        with self.changed:
            if self.founding and not self.entered_view:
                self.latest = None  # that of the coordinator's run follows, perhaps another one
            known = self.latest
        self.client.connect(known)
        self.record.secret = self.client.secret
        if not self.founding:
            log.warning("the coordinator is back")
        self.coordinator_lost = None
        self._wake_beat.set()

    def _lose(self, error: CoordinatorError) -> None:
        """The coordinator cannot be reached: serve its address, or wait before the next call."""
        if self.closed:
            return
        if str(error) != str(self.coordinator_lost) and not self.founding:
            log.warning("%s; training goes on with the workers of now", error)
        with self.changed:
            self.coordinator_lost = error
            self.changed.notify_all()
        self.client.close()
        if not (self.client.embedded and serve(self.client.host, self.client.port)):
            # at once where a connection has stood for a while: see `leases.CLOSED_SECONDS`
            time.sleep(max(self._called + RETRY_SECONDS - time.monotonic(), 0.0))

    def _take(self, said: Any) -> None:
        """A message of the coordinator's."""
        match said:
            case {"view": str(text)}:
                try:
                    view = View.unpack(text)
                except ValueError as error:
                    raise CoordinatorError(f"{self.client.at} sends no view: {error}") from None
                self._decided(view)
            case {"come": int(come), "short": None}:
                with self.changed:
                    self.come, self._short = come, None
            case {"come": int(come), "short": [int(left), int(least)]}:
                self.come = come
                self._fall_short(left, least)
            case {"again": True}:
                raise CoordinatorError("the coordinator has another run of this name")

    def _remove(self, why: str) -> None:
        with self.changed:
            self._removed = why
            self.changed.notify_all()

    def _fall_short(self, left: int, least: int) -> None:
        """Too few workers are ``left``: `next` waits for others."""
        if self._short is None:
            more = f"Elastic(min_workers={left}) goes on with so many" if left else ""
            text = f"{_too_few(left, least)}: training waits up to {self.wait:g} s for others"
            log.warning("%s", text + (more and f" ({more})"))
        since = self._short[2] if self._short else time.monotonic()
        self._short = left, least, since

    def _decided(self, view: View) -> None:
        with self.changed:
            before = self.latest
            if before is not None and view.epoch <= before.epoch:
                return
            again = before is not None and view.members == before.members
            self._reconnects = self._reconnects + 1 if again else 0
            self.latest, self._short = view, self._short if again else None
            if self.me.id in view.ids:
                self.entered_view = True
            elif self.entered_view:
                self._removed = view.why or "it was removed"
            if self._broken_since is not None:
                self._broken_since = time.monotonic()
            self.signs.notes.update(view.farewells)
            for id in {m.id for m in view.members} & set(self._newcomers):
                del self._newcomers[id]
            self.changed.notify_all()
        log.info("view %d, %d workers: %s", view.number, len(view.members), view.why)
        self.on_view(view)


def nobody(me: str, number: int) -> Any:
    """In place of `Members`, of the worker ``me``, where there is nobody to look after."""

    def nothing(*_: object) -> None:
        pass

    does = "is_at", "round_begins", "check", "status", "leave", "idle", "close", "silence"
    return SimpleNamespace(
        me=SimpleNamespace(id=me),
        number=number,
        view=SimpleNamespace(number=1, epoch=1, ids=[]),
        wait=0.0,
        limit=0.0,
        record=LinkRecord(),
        ended=False,
        **dict.fromkeys(does, nothing),
    )


def _too_few(left: int, least: int) -> str:
    return f"{left} of at least {least} workers are left"
