"""Which view comes next.

Two threads run beside the training. One asks the beacons of other workers for signs of life. The
other reads from the coordinator which view was decided, and proposes the next one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from laconic.errors import LinkError
from laconic.links import health
from laconic.links.calls import CallPosition
from laconic.links.elastic.founding import alive
from laconic.links.elastic.registry import CoordinatorError, Registry
from laconic.links.elastic.signs import Signs
from laconic.links.elastic.view import Member, View
from laconic.links.health import LinkRecord

log = logging.getLogger("laconic")

BEAT, FAST_BEAT = 0.5, 0.05
"""Seconds between questions to a beacon; the second while the connections are broken."""
NEIGHBORS = 3
"""How many of the next members a worker asks. While the connections are broken, it asks all."""
READ, FAST_READ = 0.25, 0.02
"""Seconds between looks for a new view."""
RECONNECT = 1.0
"""Seconds after which broken connections are made again, if nobody was found to be lost. They
double each time, up to `MOST_PATIENCE`."""
MOST_PATIENCE = 30.0
QUESTIONS = 3
"""How often a newcomer is asked for a sign of life before it is refused."""
NEWCOMER_SECONDS = 2.0
"""How long a newcomer that is ready waits at least until it interrupts a transfer."""


@dataclass(frozen=True)
class Rules:
    """``min_workers``: the least workers with which training goes on; None: more than half of those
    in the view before. ``workers``: how many to wait for at the start; None: the least number.
    ``wait``: seconds to wait for enough workers. ``limit``: the longest silence in seconds."""

    min_workers: int | None
    workers: int | None
    wait: float
    limit: float

    def least(self, workers: int) -> int:
        """How many workers the view must have that follows one with so many ``workers``."""
        return self.min_workers or workers // 2 + 1


class Members:
    """The members of one run, as the worker ``me`` knows them. `start` begins the threads.

    ``on_view`` is called, in the second thread, when a view was decided.

    Which thread writes what. `_changed` guards what `next` waits for. The rest are single values,
    which another thread may see a moment later.

    ============================  ===================================================
    the thread that asks          `signs`
    the thread that reads views   the view, why this worker was removed, and why no
                                  view can be decided
    the communication thread      where it is, and that it waits (`is_at`, `broken`,
                                  `mended`, `idle`)
    a donor's relay               the newcomers (`add`)
    the main thread               that this worker leaves, or expects a view
    ============================  ===================================================
    """

    def __init__(
        self, registry: Registry, me: Member, secret: bytes, about: str, rules: Rules
    ) -> None:
        self.registry, self.me, self.secret, self.rules = registry, me, secret, rules
        self._about = about
        self.on_view: Callable[[View], None] = lambda view: None
        self.signs = Signs(rules.limit)
        self.waiting_since: float | None = None
        """Since when (`time.monotonic`) this worker is in a call, and `position` in the calls."""
        self.position = CallPosition()
        self.record = LinkRecord()
        """What the other members hear when they ask."""
        self.status: Callable[[str], None] = lambda text: None
        """Sets what they are told that this process is doing."""
        self.silence: Callable[[], None] = lambda: None
        """Ends the answers to them."""
        self.ended = False
        """Whether this worker needs no further view, unless a call begins."""
        self._view: View | None = None
        self._changed = threading.Condition()
        self._removed = ""
        self.expecting = False
        """Whether this worker waits for the first view with it."""
        self._entered_view = False
        """Whether this worker has been in a view."""
        self._newcomers: dict[str, Member] = {}
        self._called: dict[str, float] = {}
        """When these were ready."""
        self._leaving = False
        self._broken_since: float | None = None
        self.farewell: Callable[[], str] = str
        """This worker's last note, where it leaves by itself."""
        self._short: tuple[int, int, float] | None = None
        """How many workers are left, how many are needed, and since when (`time.monotonic`), where
        too few are left."""
        self._coordinator_lost = self._damage = ""
        self._reconnects = 0
        """How many of the latest views had no other members than the view before."""
        self._wake_beat, self._wake_read = threading.Event(), threading.Event()
        self.closed = False
        self._threads: list[threading.Thread] = []

    # -- what is known ----

    @property
    def view(self) -> View:
        """The latest decided view."""
        assert self._view is not None, "the run has begun"
        return self._view

    def _others(self, view: View) -> list[Member]:
        place = view.place(self.me.id)
        members = list(view.members)
        return members if place is None else [*members[place + 1 :], *members[:place]]

    def start(self, view: View) -> None:
        """Follow the run from ``view`` on."""
        self._view = view
        self._entered_view = view.place(self.me.id) is not None
        for work, name in ((self._beat, "laconic-heartbeat"), (self._read, "laconic-members")):
            thread = threading.Thread(target=partial(self._run, work), daemon=True, name=name)
            self._threads.append(thread)
            thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        """Do a thread's ``work``. If it fails, this worker cannot follow the views any more: it
        must not wait for one, nor the others for it."""
        done = False
        try:
            work()
            done = True
        finally:
            if not done:
                self._remove("a thread of this worker has failed; its error is in the output")
                self.record.position = self.position._replace(left=True)
                self.close()

    def close(self) -> None:
        """End the threads."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        self._wake_beat.set()
        self._wake_read.set()

    def end(self, until: float) -> None:
        """End the threads, and wait for that until the time ``until``."""
        self.close()
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))
        self.registry.close(until)

    # -- for the link ----

    def is_at(self, position: CallPosition) -> None:
        """This worker begins the call at ``position``."""
        self.position = position
        if not self._removed:
            self.record.position = position
        self._reconnects = 0

    def broken(self) -> None:
        """The connections of the present view are broken: find out why, and propose a view."""
        # it waits for others: nobody waits for it to come to another call
        self.record.position = self.position._replace(serial=self.position.serial + 1)
        self._broken_since = self._broken_since or time.monotonic()
        self._wake_beat.set()
        self._wake_read.set()

    def mended(self) -> None:
        """The connections of the latest view stand."""
        self.record.position = self.position
        self._broken_since = None

    def next(self, epoch: int) -> View:
        """Wait for a view after ``epoch``, and return the latest. Raises `LinkError` if this worker
        is not in it, or there are too few workers for too long."""
        stalled_since: float | None = None
        while True:
            with self._changed:
                if not (self._removed or self.closed) and self.view.epoch <= epoch:
                    self._changed.wait(0.5)
            if self.closed and not self._removed:
                raise LinkError("this worker has left the run")
            if self._removed:
                raise LinkError(
                    f"the other workers go on without this one ({self._removed}): start it again, "
                    "and it joins them"
                )
            if self.view.epoch > epoch:
                return self.view
            short, other = self._short, self._coordinator_lost or self._damage
            stalled_since = (stalled_since or time.monotonic()) if short or other else None
            since = stalled_since if short is None else short[2]
            if since is not None and time.monotonic() - since >= self.rules.wait:
                why = f"a worker was lost, and {other}" if short is None else _too_few(*short[:2])
                raise LinkError(f"{why}. Nothing has changed within {self.rules.wait:g} s")

    def add(self, newcomer: Member) -> None:
        """Propose a view with ``newcomer``. Raises `LinkError` if it does not answer: the others
        would wait for it in vain."""
        if all(health.ask(newcomer.beacon, self.secret).lost for _ in range(QUESTIONS)):
            raise LinkError(f"{newcomer.name} does not answer: are its address and ports open?")
        self._called[newcomer.id] = time.monotonic()
        self._newcomers[newcomer.id] = newcomer
        self._wake_read.set()

    def idle(self) -> None:
        """No transfer is under way."""
        self.waiting_since = None
        if self._newcomers:
            self._wake_read.set()

    def expect(self) -> None:
        """A view with this worker is about to be proposed."""
        self.expecting = True
        self._wake_read.set()

    def leave(self) -> None:
        """Propose a view without this worker, and wait until one was decided."""
        if self.signs.active == {self.me.id}:
            return
        self._leaving = True
        self._wake_read.set()
        end = time.monotonic() + 2 * self.signs.deadline
        with self._changed:
            while not self._removed and time.monotonic() < end:
                self._changed.wait(0.5)

    # -- signs of life ----

    def _beat(self) -> None:
        while not self.closed:
            view, broken = self.view, self._broken_since is not None
            asked = self._others(view)
            if view.place(self.me.id) is None:
                asked = []  # a newcomer: its donor looks after it
            elif not broken and self.waiting_since is None:
                asked = asked[:NEIGHBORS]
            ask = threading.Thread(target=self._ask, args=(asked,), daemon=True)
            ask.start()
            ask.join(BEAT)  # who does not answer does not delay the next questions
            self._wake_beat.wait(FAST_BEAT if broken else BEAT)
            self._wake_beat.clear()

    def _ask(self, asked: Sequence[Member]) -> None:
        start = time.monotonic()
        beacons = [m.beacon for m in asked]
        health.ask_all(beacons, self.secret, heard=partial(self._heard, asked, start))

    def _heard(
        self, asked: Sequence[Member], start: float, index: int, answer: health.Answer
    ) -> None:
        """One of the members ``asked`` at the time ``start`` has answered, or not."""
        self.signs.hear(asked[index].id, start, answer)
        if answer.lost:
            self._wake_read.set()

    def _lost(self, view: View) -> dict[str, str]:
        """The members that count as lost, and why."""
        return self.signs.lost(self._others(view), self.waiting_since, self.position)

    # -- views ----

    def _read(self) -> None:
        while not self.closed and not self._removed:
            try:
                self._turn()
            except CoordinatorError as error:
                if not self._coordinator_lost:
                    log.warning("%s; training goes on with the workers of now", error)
                self._coordinator_lost = str(error)
            except LinkError as error:  # what the coordinator has is damaged
                if self._damage != str(error):
                    log.error("%s; training goes on with the workers of now", error)
                self._damage = str(error)
            fast = self._broken_since is not None or self.expecting
            self._wake_read.wait(FAST_READ if fast else READ)
            self._wake_read.clear()

    def _turn(self) -> None:
        """Follow the views that were decided, and propose one where that is due."""
        if self._coordinator_lost:
            self._restore()
        if self._removed:
            return
        view = self.view
        while (newer := self.registry.view(view.epoch + 1)) is not None:
            self._decided(newer)
            view = newer
        if view.place(self.me.id) is None:
            return
        if self._leaving:
            lost = {self.me.id: "leaves"}  # whom it suspects is for the others to say
        else:
            lost = {} if self.ended and self.waiting_since is None else self._lost(view)
        new = self._due_newcomers(view)
        broken = self._broken_since
        patience = min(RECONNECT * 2**self._reconnects, MOST_PATIENCE)
        again = broken is not None and time.monotonic() - broken >= patience
        if not (lost or new or again):
            self._short = None  # they were silent only for a while
        elif self._may(view, lost):
            proposed = view.after(lost, new)
            if self._leaving:
                proposed = replace(proposed, farewell=(self.me.id, self.farewell()))
            self._decided(self.registry.propose(proposed, lost))

    def _due_newcomers(self, view: View) -> list[Member]:
        """Those to be in the next view. A view ends the transfers under way, so they wait until
        there is none, within limits."""
        limit = time.monotonic() - max(NEWCOMER_SECONDS, 2 * self.signs.pace)
        waiting = [m for id, m in self._newcomers.items() if view.place(id) is None]
        busy = self.waiting_since is not None
        return [m for m in waiting if not busy or self._called.get(m.id, limit) <= limit]

    def _restore(self) -> None:
        """The coordinator answers again, and may have lost all that it knew."""
        view = self.view
        found = self.registry.restore(self.secret, self._about, view)
        if found is None:
            raise CoordinatorError("the coordinator now serves another job of this name")
        if found.place(self.me.id) is None and view.place(self.me.id) is not None:
            self._remove("another view was decided while the coordinator was lost")
        elif found.members != view.members:  # some had not heard of this worker's view
            both = tuple(m for m in view.members if found.place(m.id) is not None)
            self._decided(self.registry.propose(View(view.epoch + 1, both, found.why)))
        log.warning("the coordinator is back")
        self._coordinator_lost = ""

    def _remove(self, why: str) -> None:
        with self._changed:
            self._removed = why
            self._changed.notify_all()

    def _may(self, view: View, lost: dict[str, str]) -> bool:
        """Whether the view without the ``lost`` members may follow ``view``."""
        before = {m.id for m in view.members if m.id in self.signs.active}
        left = len(before - lost.keys())
        if self._leaving and left:
            return True
        active, least = left, self.rules.least(len(before))
        if left < least:  # to ask those that have come takes time: `_short` stays meanwhile
            left += len(
                alive([m for m in self._entered() if view.place(m.id) is None], self.secret)
            )
        if left < least or not active:
            self._fall_short(left, least)
            return False
        self._short = None
        # the others may be a majority on the far side of a partition: let them be first
        there = before - self.signs.gone
        silent = {id: since for id in there if (since := self.signs.silent_since(id)) is not None}
        lately = max((since for id, since in silent.items() if id in lost), default=None)
        if lately is not None and 2 * len(before - lost.keys() - silent.keys()) <= len(there):
            return time.monotonic() - lately >= 2 * self.signs.deadline
        return True

    def _fall_short(self, left: int, least: int) -> None:
        """Too few workers are ``left``: `next` waits for others."""
        if self._short is None:
            more = f"Elastic(min_workers={left}) goes on with so many" if left else ""
            log.warning(
                "%s: training waits up to %g s for others%s",
                _too_few(left, least),
                self.rules.wait,
                more and f" ({more})",
            )
        since = time.monotonic() if self._short is None else self._short[2]
        self._short = left, least, since

    def _entered(self) -> list[Member]:
        return list(self.registry.entered().values())

    def _decided(self, view: View) -> None:
        with self._changed:
            if view.epoch <= self.view.epoch:
                return
            again = self._view is not None and view.members == self._view.members
            self._reconnects = self._reconnects + 1 if again else 0
            self._view, self._short = view, None
            if view.place(self.me.id) is not None:
                self._entered_view, self.expecting = True, False
            elif self._entered_view:
                self._removed = view.why or "it was removed"
            if self._broken_since is not None:
                self._broken_since = time.monotonic()
            if view.farewell is not None:
                self.signs.notes.update([view.farewell])
            for id in {m.id for m in view.members} & set(self._newcomers):
                del self._newcomers[id]
            self._changed.notify_all()
        log.info("view %d, %d workers: %s", view.epoch, len(view.members), view.why)
        self.on_view(view)


def _too_few(left: int, least: int) -> str:
    return f"{left} of at least {least} workers are left"
