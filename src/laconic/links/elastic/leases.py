"""Who takes part in one job: what its coordinator knows, and how it decides.

Every worker holds a *lease*, which it renews by a `Beat`. A beat says all that the coordinator must
know of a worker, so one that is lost or late does no harm. Workers report; only the coordinator
decides, and it decides one view after another:

- A member leaves the view if it says so; if its lease expires; if its host's system has closed its
  connection and another member finds nobody at its address; or if it is one of the fewest without
  whom all others reach each other, by their reports. These never evict more than half.
- If more than half of the members fall silent at once, the network or the coordinator is cut off.
  When they are back, everybody has the time of a lease to come back.
- Only a member of the latest view can be followed by a next one. A run begins where no lease of the
  view before lives: so no newcomer ends a run.
- A coordinator that was started again knows nothing. It adopts the latest view that its workers
  know, and decides nothing before all members of it are back or have had the time to.

There are no sockets and no clocks here: every method gets the time ``now``.
"""

from __future__ import annotations

import secrets
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from laconic.links.elastic.view import NONCE_BITS, Member, View
from laconic.links.handshake import SECRET_BYTES
from laconic.links.texts import clean

SETTLE = 1.0
"""Seconds without another newcomer after which a run begins."""
START_SECONDS = 7.0
"""How long a coordinator waits for the workers of a run under way before it begins another one:
they need 5.5 s to notice that the one before is gone, and call again."""
CLOSED_SECONDS = 0.3
"""How long a worker whose system has closed its connection has to come back."""
ENDED_SECONDS = 2.0
"""The same where all members' connections were closed."""
REPORTS_SECONDS = 1.0
"""How long reports are collected: all that are about one event come within this time."""
HEARD_SECONDS = 2.0
"""Workers that were not heard for so long are silent. They can be neither reported nor report:
their leases say enough. If the reports of most others counted, some would be evicted after outages
shorter than their lease: a reporter's own outage looks like that of the others."""
TWO_SECONDS = 3.0
"""The same of two workers that report each other: one that is cut off altogether is known by
then."""
WEAK_SECONDS = 30.0
"""How long a report stands that at most half of the others share, before it counts."""
CUT_SECONDS = 90.0
"""How long more than half of the members may be silent at once."""
RETURN_SECONDS = 10.0
"""How long the members of a view have at least to come back to a coordinator that was started
again."""
STOPPED_SECONDS = 1.0
"""A coordinator that has not looked for so long was stopped itself."""
LONGEST_LEASE = 60.0
KEPT_VIEWS = 64
MOST_NOTE = 1000
SILENT, GONE = "silent", "gone"
"""What a report says: no sign of life for too long; or that nobody listens at its address."""


class RefusedError(Exception):
    """The worker cannot take part. ``about``: what the job is about, if that is why. ``removed``:
    the run goes on without it."""

    def __init__(self, text: str, about: str = "", *, removed: bool = False) -> None:
        super().__init__(text)
        self.about, self.removed = about, removed


@dataclass(frozen=True)
class Beat:
    """What a worker says of itself; its `vars` travel as JSON. ``lease``: how long it may be
    silent, in seconds. ``founding``: it waits for a run to begin. ``active``: it takes part in
    rounds. ``ended``: it needs no further view. ``again``: the epoch of the view whose connections
    are to be made again. ``ready``: the ids of newcomers that it takes in. ``reports``: by id,
    `SILENT` or `GONE`, and why."""

    lease: float = 5.0
    founding: bool = False
    active: bool = True
    ended: bool = False
    leaving: bool = False
    again: int = 0
    note: str = ""
    ready: Collection[str] = ()
    reports: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def unpack(cls, value: Any) -> Beat:
        """From what JSON holds; raises ``ValueError``."""
        try:
            beat = cls(**value)
            said = [(str(id), str(k), clean(str(why))) for id, [k, why] in beat.reports.items()]
            reports = {id: (kind, why[:200]) for id, kind, why in said}
            at: Any = {"again": int(beat.again), "note": clean(beat.note)[:MOST_NOTE]}
            if 0 < beat.lease <= LONGEST_LEASE:
                return replace(beat, ready=[*map(str, beat.ready)], reports=reports, **at)
        except (AttributeError, OverflowError, TypeError):
            pass
        raise ValueError("not a beat of laconic's")


@dataclass(frozen=True)
class Need:
    """How many workers a run needs: to begin, ``start``, and no more are waited for once there are
    ``expected``; to go on, ``least``; None: more than half of those before."""

    start: int
    expected: int | None
    least: int | None


@dataclass
class Lease:
    """One worker, as the coordinator knows it. ``heard``: when it gave the last sign of life.
    ``closed``: since when its system has closed its connection. ``over``: how it has ended, if it
    says so. ``since``: since when it reports whom as silent."""

    member: Member
    number: int
    need: Need
    heard: float
    beat: Beat = field(default_factory=Beat)
    closed: float | None = None
    over: str = ""
    since: dict[str, float] = field(default_factory=dict)

    def lives(self, now: float) -> bool:
        """Whether it has given a sign of life lately."""
        return not self.over and self.closed is None and now - self.heard < self.beat.lease


class Job:
    """One job. ``nonce`` makes this coordinator's epochs its own; it was started at ``begun``."""

    def __init__(self, nonce: int, begun: float) -> None:
        self._nonce = nonce % 2**NONCE_BITS
        self.salt = secrets.token_hex(SECRET_BYTES)
        """From which the workers of this run derive their secret."""
        self.about = ""
        self.numbers = 0
        """How many workers there have ever been."""
        self.leases: dict[str, Lease] = {}
        self.views: deque[View] = deque(maxlen=KEPT_VIEWS)
        self.short: tuple[int, int] | None = None
        """How many workers are left, and how many are needed, where too few are left."""
        self._begun = self._arrived = self._looked = begun
        self._cut = float("-inf")
        """When more than half of the members were silent last."""
        self._adopted: float | None = None
        """Since when a view of an earlier coordinator counts, until its members are back."""
        self._adopted_number = 0

    @property
    def view(self) -> View | None:
        """The latest one."""
        return self.views[-1] if self.views else None

    def founders(self, now: float) -> list[Lease]:
        """Those that wait for a run to begin, in order of their numbers."""
        waiting = (w for w in self.leases.values() if w.beat.founding and w.lives(now))
        return sorted(waiting, key=lambda worker: worker.number)

    def _members(self) -> list[Lease]:
        """Those of the latest view."""
        ids = () if self.view is None else self.view.ids
        return [self.leases[id] for id in ids if id in self.leases]

    def is_over(self, now: float) -> bool:
        """Whether no lease of the latest view lives."""
        return all(self._is_over(worker, now) for worker in self._members())

    def _is_over(self, worker: Lease, now: float) -> bool:
        closed = worker.closed is not None and now - worker.closed >= ENDED_SECONDS
        return bool(worker.over) or closed or now - worker.heard >= CUT_SECONDS

    # -- what workers say ----

    def join(
        self,
        member: Member,
        about: str,
        need: Need,
        now: float,
        *,
        number: int = 0,
        salt: str = "",
        view: View | None = None,
    ) -> Lease:
        """A worker has connected. ``number``, ``salt``: what it was told before; ``view``: the
        latest that it knows, once it follows a run. Raises `RefusedError`."""
        if view is not None:
            self._return(member.id, view, salt, now)
        elif member.id not in self.leases:
            self._arrived = now
        others = self._members() if self.view is not None else self.founders(now)
        present = any(worker.closed is None and not worker.over for worker in others)
        if self.about and about != self.about and present:
            raise RefusedError("the job is about something else", self.about)
        if self.view is None or view is not None:
            self.about = about
        self.numbers = max(self.numbers, number) if number else self.numbers + 1
        before = self.leases.get(member.id)
        worker = Lease(member, number or self.numbers, need, now)
        if before is not None:
            worker.beat = replace(before.beat, reports={})
        self.leases[member.id] = worker
        return worker

    def _return(self, id: str, view: View, salt: str, now: float) -> None:
        """A worker of a run comes back, and knows ``view``."""
        if salt != self.salt:
            if self.view is not None:
                raise RefusedError("another run has begun under this name")
            if id not in view.ids:
                raise RefusedError("no worker of its run is here")
            self._reset(salt)
        latest = self.view
        decided = latest is not None and latest.number > self._adopted_number
        if latest is None or (not decided and view.epoch > latest.epoch):
            self._adopt(view, now)
            return
        own = view.epoch % 2**NONCE_BITS == self._nonce
        if decided and not own and view.number > self._adopted_number:
            # an earlier coordinator has decided it, and only this worker has heard of it
            self.close(id, now, why="knows another view")
            why = "another view was decided while the coordinator was lost"
            raise RefusedError(why, removed=True)
        if id in view.ids and id not in latest.ids:
            raise RefusedError(latest.why, removed=True)

    def _reset(self, salt: str) -> None:
        """Begin with another run. Workers that wait notice by the ``salt``, and join again."""
        self.salt, self.about, self.short = salt, "", None
        self.leases.clear()
        self.views.clear()
        self._adopted, self._adopted_number = None, 0
        self._nonce = secrets.randbits(NONCE_BITS)

    def _adopt(self, view: View, now: float) -> None:
        """A worker knows a later ``view`` than this coordinator."""
        self.views.append(view)
        self._adopted, self._adopted_number = now, view.number
        for member in view.members:
            nobody = Lease(member, 0, Need(1, None, None), now)
            self.leases.setdefault(member.id, nobody)

    def renew(self, id: str, beat: Beat, now: float) -> bool:
        """A worker says ``beat``. Returns whether it has said something else before."""
        worker = self.leases.get(id)
        if worker is None:
            raise ValueError("this worker has no lease any more")
        if now - worker.heard >= HEARD_SECONDS:  # what was said meanwhile is not about now
            worker.since = {}
            for lease in self.leases.values():
                if id in lease.since:
                    lease.since[id] = now
        silent = (other for other, (kind, _) in beat.reports.items() if kind == SILENT)
        worker.since = {other: worker.since.get(other, now) for other in silent}
        changed = replace(beat, note="") != replace(worker.beat, note="")
        worker.heard, worker.beat = now, beat
        return changed

    def close(self, id: str, now: float, *, why: str = "", by_system: bool = False) -> None:
        """A worker's connection has ended. ``by_system``: its host has closed it, as it does when
        a process ends; ``why``: the worker says that it ends."""
        if id in self.leases:
            worker = self.leases[id]
            worker.over, worker.since = why, {}
            worker.closed = now if by_system or why else None

    # -- decisions ----

    def decide(self, now: float) -> None:
        """Decide what is due."""
        if now - self._looked > STOPPED_SECONDS:
            self._cut = now
        self._looked = now
        if self.view is not None and self._adopted is None and self.is_over(now):
            if any(w.closed is None and not w.over for w in self._members()):
                self._begun = now  # they were silent: they may come back
            self._reset(secrets.token_hex(SECRET_BYTES))
        view = self.view
        if view is None:
            self._found(now)
        elif self._may_decide(view, now):
            while self._follow(now):
                pass
        self._forget(now)

    def _found(self, now: float) -> None:
        founders = self.founders(now)
        if not founders or now - self._begun < START_SECONDS:
            return
        need, count = founders[0].need, len(founders)
        settled = now - self._arrived >= SETTLE or count == need.expected
        if count >= need.start and settled:
            members = tuple(worker.member for worker in founders)
            self._add(View(1, members, "the run begins"))

    def _may_decide(self, view: View, now: float) -> bool:
        """Whether the members of an adopted view are back, or have had the time to."""
        if self._adopted is None:
            return True
        heard = all(self.leases[id].heard > self._adopted for id in view.ids)
        wait = max(RETURN_SECONDS, *(self.leases[id].beat.lease for id in view.ids))
        if heard or now - self._adopted >= wait:
            self._adopted = None
        return self._adopted is None

    def _follow(self, now: float) -> bool:
        """Decide the next view of a run, if there is a reason for one; returns whether it was."""
        view = self.view
        assert view is not None
        workers = {id: self.leases[id] for id in view.ids if id in self.leases}
        self._notice_cut(workers.values(), now)
        active = {id for id, worker in workers.items() if worker.beat.active}
        leaving = {id: "leaves" for id, w in workers.items() if w.beat.leaving and not w.over}
        if leaving and active - leaving.keys():
            self._add(view.after(leaving, []))
            return True
        lost = self._lost(view, workers, now)
        heard = {id: w for id, w in workers.items() if now - w.heard < HEARD_SECONDS}
        cut_off = self._cut_off(view, {i: w for i, w in heard.items() if i not in lost}, now)
        tangled = 2 * len(cut_off) > len(heard)  # nobody knows who is cut off
        lost |= {} if tangled else {id: why for id, why in cut_off.items() if why}
        new = self._ready(view, workers, now)
        again = any(w.beat.again == view.epoch for id, w in workers.items() if id not in lost)
        left = active - lost.keys()
        if left and all(workers[id].beat.ended for id in left):
            lost = {}  # nobody needs another view
        least, count = self._least(view, len(active)), len(left)
        if tangled:
            self.short = max(count - len(cut_off), 1), max(least, 2)
        if not (lost or new or again):
            self.short = self.short if tangled else None
            return False
        if count < least:
            count += len(self._waiting(view, now))
        if count < least or not left:
            self.short = count, least
            return False
        self._add(view.after(lost, new))
        return True

    def _least(self, view: View, active: int) -> int:
        known = [w.need.least for w in map(self.leases.get, view.ids) if w is not None and w.number]
        return next((least for least in known if least), None) or active // 2 + 1

    def _notice_cut(self, workers: Collection[Lease], now: float) -> None:
        expected = [w for w in workers if not w.over and w.closed is None]
        # before the first lease expires: they were renewed at different moments
        if 2 * sum(now - w.heard < HEARD_SECONDS for w in expected) < len(expected):
            self._cut = now

    def _lost(self, view: View, workers: Mapping[str, Lease], now: float) -> dict[str, str]:
        """The members that are lost, and why."""
        reports = [w.beat.reports for w in workers.values() if w.lives(now)]
        refused = {id for said in reports for id, (kind, _) in said.items() if kind == GONE}
        lost = {id: "has ended" for id in view.ids if id not in workers}
        for id, worker in workers.items():
            silent, closed = now - worker.heard, worker.closed
            whole = silent >= worker.beat.lease and now - self._cut >= worker.beat.lease
            if worker.over:
                lost[id] = worker.over
            elif closed is not None and now - closed >= CLOSED_SECONDS and id in refused:
                lost[id] = "has ended"
            elif whole or silent >= CUT_SECONDS:
                lost[id] = f"has not answered for {silent:.0f} s"
        return lost

    def _cut_off(self, view: View, workers: Mapping[str, Lease], now: float) -> dict[str, str]:
        """Those of the ``workers``, whom the coordinator hears, that are cut off from others: the
        fewest without whom nobody reports anybody. Why, or "" while that is not certain."""
        why, since = dict[tuple[str, str], str](), dict[frozenset[str], float]()
        for reporter, worker in workers.items():
            for id, began in worker.since.items():
                there = id in workers and id != reporter  # both were heard since then
                if there and min(worker.heard, workers[id].heard) > began:
                    why[reporter, id] = worker.beat.reports[id][1]
                    pair = frozenset((reporter, id))
                    since[pair] = min(began, since.get(pair, now))
        found, left = dict[str, str](), [id for id in view.ids if id in workers]
        ripe = True
        begun = bool(since) and now - min(since.values()) >= REPORTS_SECONDS
        while begun and since and 2 * len(found) <= len(workers):
            degree = Counter(id for pair in since for id in pair)
            said = Counter(id for _, id in why)
            idle = {id: not workers[id].beat.active for id in left}
            *_, worst = max((degree[id], idle[id], said[id], k, id) for k, id in enumerate(left))
            oldest = min(began for pair, began in since.items() if worst in pair)
            enough = REPORTS_SECONDS if 2 * degree[worst] > len(left) - 1 else WEAK_SECONDS
            ripe = ripe and now - oldest >= (TWO_SECONDS if len(left) == 2 else enough)
            texts = (text for (_, id), text in why.items() if id == worst)
            found[worst] = next(texts, "does not reach the others") if ripe else ""
            left.remove(worst)
            since = {pair: began for pair, began in since.items() if worst not in pair}
            why = {pair: text for pair, text in why.items() if worst not in pair}
        return found

    def _waiting(self, view: View, now: float) -> list[Lease]:
        return [w for id, w in self.leases.items() if id not in view.ids and w.lives(now)]

    def _ready(self, view: View, workers: Mapping[str, Lease], now: float) -> list[Member]:
        """The newcomers that members take in."""
        named = {id for w in workers.values() if w.lives(now) for id in w.beat.ready}
        return [w.member for w in self._waiting(view, now) if w.member.id in named]

    def _add(self, view: View) -> None:
        """``view`` is decided, in the next epoch."""
        before = self.view
        count = 1 if before is None else before.number + 1
        gone = [] if before is None else [id for id in before.ids if id not in view.ids]
        notes = {id: self.leases.pop(id).beat.note for id in gone if id in self.leases}
        epoch = count << NONCE_BITS | self._nonce
        self.views.append(replace(view, epoch=epoch, farewells=tuple(notes.items())))
        self._adopted = None
        if before is None or view.ids != before.ids:
            self.short = None

    def _forget(self, now: float) -> None:
        """Forget workers that are in no view and do not live."""
        view = self.view
        for id, worker in list(self.leases.items()):
            absent = worker.over or worker.closed is not None or now - worker.heard >= CUT_SECONDS
            if absent and (view is None or id not in view.ids):
                del self.leases[id]
