"""Who is in: which view follows another one, and who counts as lost. Without threads or a network,
by a clock of its own. `Setting` is all that knows how the control plane is made."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import pytest

from laconic.errors import LinkError
from laconic.links import health
from laconic.links.calls import Call, CallPosition
from laconic.links.elastic import founding, members, signs
from laconic.links.elastic.members import Members, Rules
from laconic.links.elastic.registry import CoordinatorError
from laconic.links.elastic.view import Member, View

SECRET = bytes(range(32))
ALL = [Member(f"{n:012x}", *(f"10.0.0.{n}|{p}|{'00' * 8}" for p in (1, 2, 3))) for n in range(9)]
DEADLINE = 5.0
"""Seconds of silence after which a worker counts as lost, where rounds follow each other soon."""


class Store:
    """A coordinator in memory. While ``lost``, it can't be reached."""

    host, port = "10.0.0.99", 29400

    def __init__(self) -> None:
        self.views: dict[int, View] = {}
        self.tickets: dict[int, Member] = {}
        self.lost, self.same_job, self.drawn = False, True, SECRET
        self.strangers: set[str] = set()
        self.restored: list[View] = []
        self.was_put_back = False

    def put_back(self) -> None:
        self.was_put_back = True

    def secret(self) -> bytes:
        return self.drawn

    def view(self, epoch: int) -> View | None:
        if self.lost:
            raise CoordinatorError("no coordinator answers")
        return self.views.get(epoch)

    def latest(self) -> View | None:
        return self.views[max(self.views)] if self.views else None

    def propose(self, view: View, gone: Container[str] = ()) -> View:
        return self.views.setdefault(view.epoch, view)

    def restore(self, secret: bytes, about: str, view: View) -> View | None:
        if self.lost:
            raise CoordinatorError("no coordinator answers")
        self.restored.append(view)
        return self.propose(view) if self.same_job else None

    def enter(self, member: Member) -> int:
        known = [n for n, m in self.tickets.items() if m == member]
        number = known[0] if known else len(self.tickets) + 1
        self.tickets[number] = member
        return number

    def entered(self, known: Container[int] = ()) -> dict[int, Member]:
        return {n: m for n, m in self.tickets.items() if n not in known}


class Setting:
    """What a worker knows of the others. It stands in for the module `time`, and for questions to
    the members that are ``dead`` or ``mute``, by place."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.dead, self.mute = set[int](), set[int]()
        for module in (members, signs, founding):
            patch.setattr(module, "time", self)
        patch.setattr(health, "ask", lambda address, secret: self._answer(address))
        patch.setattr(
            health, "ask_all", lambda addresses, secret: [self._answer(a) for a in addresses]
        )
        self.store = Store()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def _answer(self, address: str) -> health.Answer:
        (place,) = (p for p, m in enumerate(ALL) if m.beacon == address)
        if place in self.dead:
            return health.GONE
        return health.UNREACHABLE if place in self.mute else health.Answer("trains")

    def worker(
        self,
        count: int,
        min_workers: int | None = None,
        *,
        newcomers: int = 0,
        me: int = 0,
        limit: float = 600.0,
        wait: float = 60.0,
    ) -> Members:
        """The worker at place ``me`` of view 1, which has ``count`` active members and so many
        ``newcomers``."""
        self.store = Store()
        at: Any = self.store
        made = Members(at, ALL[me], SECRET, "about", Rules(min_workers, None, wait, limit))
        made._view, made._entered_view = View(1, tuple(ALL[: count + newcomers])), True
        made.signs.active = {m.id for m in ALL[:count]}
        return made

    def gone(self, worker: Members, *places: int) -> None:
        """These have ended."""
        for place in places:
            worker.signs.hear(ALL[place].id, self.now, health.GONE)

    def silent(self, worker: Members, seconds: float, *places: int) -> None:
        """These have not answered for so long."""
        for place in places:
            worker.signs._silent_since[ALL[place].id] = self.now - seconds

    def turn(self, worker: Members) -> list[int] | None:
        """Let ``worker`` follow and propose views once: the places in `ALL` of the members of a new
        view, if there is one."""
        before = worker.view
        worker._turn()
        return None if worker.view is before else [ALL.index(m) for m in worker.view.members]

    def ends(self, worker: Members) -> str:
        """Turn until waiting for the next view fails: how."""

        def wait(seconds: float) -> None:
            self.now += seconds
            assert self.now < 3000.0, "it waits for good"
            if not self.store.lost:
                worker._turn()

        worker._changed.wait = wait  # type: ignore[method-assign,assignment]
        with pytest.raises(LinkError) as error:
            worker.next(worker.view.epoch)
        return str(error.value)


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Setting:
    return Setting(monkeypatch)


# -- enough workers ----


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize(
    ("count", "min_workers", "lost", "least"),
    [
        *[(2, None, 1, 2), (3, None, 1, 0), (3, None, 2, 2), (4, None, 1, 0), (4, None, 2, 3)],
        *[(5, None, 2, 0), (5, 4, 1, 0), (5, 4, 2, 4), (5, 3, 2, 0), (5, 5, 1, 5)],
    ],
)
def test_more_than_half_must_be_left(
    at: Setting, count: int, min_workers: int | None, lost: int, least: int, silent: bool
) -> None:
    """Or at least ``min_workers``. If fewer are, all end."""
    worker = at.worker(count, min_workers, wait=9.0)
    if silent:
        at.silent(worker, 100.0, *range(1, 1 + lost))
    else:
        at.gone(worker, *range(1, 1 + lost))
    if not least:
        assert at.turn(worker) == [0, *range(1 + lost, count)]
    else:
        said = f"{count - lost} of at least {least} workers are left. Nothing has changed"
        assert at.ends(worker).startswith(said)


def test_those_that_wait_to_join_count(at: Setting) -> None:
    """If they live, and are not in the view."""
    worker = at.worker(4, 4)
    at.gone(worker, 3)
    at.dead = {3, 4}
    at.store.tickets = {1: ALL[0], 2: ALL[3], 3: ALL[4]}
    assert at.turn(worker) is None
    at.dead = {3}
    assert at.turn(worker) == [0, 1, 2]


def test_newcomers_without_state_do_not_count(at: Setting) -> None:
    worker = at.worker(3, newcomers=3)
    at.gone(worker, 1, 2)
    assert at.turn(worker) is None, "1 of 3, whoever has joined"
    worker = at.worker(2, 1, newcomers=1, me=2)
    at.gone(worker, 0, 1)
    assert at.turn(worker) is None, "a newcomer cannot go on alone"
    worker = at.worker(3, newcomers=2)
    at.gone(worker, 3, 4)
    assert at.turn(worker) == [0, 1, 2], "all that are active are left"


def test_too_few_workers_wait_from_when_they_are_too_few(at: Setting) -> None:
    """A silence that has ended does not shorten the next wait, and connections that are made again
    do not prolong it."""
    worker = at.worker(2, wait=9.0)
    at.silent(worker, DEADLINE, 1)
    assert at.turn(worker) is None
    worker.signs.hear(ALL[1].id, at.now, health.Answer("trains"))
    assert at.turn(worker) is None
    at.now += 100.0
    start = at.now
    at.gone(worker, 1)
    worker.broken()
    assert "1 of at least 2 workers are left" in at.ends(worker)
    assert start + 9.0 <= at.now <= start + 10.0


# -- partitions ----


@pytest.mark.parametrize(
    ("count", "gone", "silent", "at_once"),
    [
        *[(4, 0, 2, False), (4, 0, 1, True), (5, 0, 3, False), (5, 0, 2, True), (2, 0, 1, False)],
        *[(4, 2, 0, True), (4, 1, 1, True), (5, 1, 2, False), (6, 2, 2, False), (6, 3, 1, True)],
    ],
)
def test_the_half_behind_a_partition_waits(
    at: Setting, count: int, gone: int, silent: int, at_once: bool
) -> None:
    """Those that are silent may be a majority in the coordinator's eyes: they may be first, for as
    long as it takes until they count this side as lost. Those that have ended are on no side."""
    worker = at.worker(count, 1)
    at.gone(worker, *range(1, 1 + gone))
    at.silent(worker, DEADLINE, *range(1 + gone, 1 + gone + silent))
    assert (at.turn(worker) is not None) == at_once
    if not at_once:
        at.now += DEADLINE - 0.1
        assert at.turn(worker) is None
        at.now += 0.2
        assert at.turn(worker) == [0, *range(1 + gone + silent, count)]


# -- leaving ----


def test_a_worker_that_leaves(at: Setting) -> None:
    """It needs no majority, removes nobody else, and its last note travels with the view."""
    worker = at.worker(4, 4)
    at.silent(worker, DEADLINE, 2, 3)
    worker._leaving, worker.farewell = True, lambda: "said last"
    assert at.turn(worker) == [1, 2, 3]
    with pytest.raises(LinkError, match=r"go on without this one .*leaves\): start it again"):
        worker.next(1)
    view, stays = worker.view, at.worker(4, me=1)
    at.store.views[2] = view
    assert at.turn(stays) == [1, 2, 3] and stays.signs.notes[ALL[0].id] == "said last"
    last = at.worker(1, 1)
    last._leaving = True
    assert at.turn(last) is None, "nobody is left to decide a view"


# -- who is lost ----


def lost(worker: Members) -> dict[int, str]:
    """Who counts as lost, by place, and why."""
    found = worker.signs.lost(worker.view.members[1:], worker.waiting_since, worker.position)
    return {place: found[m.id] for place, m in enumerate(ALL) if m.id in found}


@pytest.mark.parametrize(
    ("pace", "limit", "deadline"),
    [(0.0, 600.0, 5.0), (2.5, 600.0, 5.0), (4.0, 600.0, 8.0), (1e3, 600.0, 30.0), (0.0, 3.0, 3.0)],
)
def test_the_deadline_follows_the_pace(
    at: Setting, pace: float, limit: float, deadline: float
) -> None:
    worker = at.worker(3, limit=limit)
    worker.signs.pace = pace
    at.silent(worker, deadline - 0.01, 1)
    assert lost(worker) == {}
    at.now += 0.02
    assert lost(worker) == {1: f"has not answered for {deadline:.0f} s"}


@pytest.mark.parametrize(
    ("pace", "limit", "deadline"),
    [(0.0, 600.0, 60.0), (4.0, 600.0, 80.0), (50.0, 600.0, 600.0), (0.0, 9.0, 9.0)],
)
def test_who_does_not_come_to_a_round(
    at: Setting, pace: float, limit: float, deadline: float
) -> None:
    """Though it answers: one that has not come, and not one that has."""
    worker = at.worker(4, 1, limit=limit)
    worker.signs.pace, worker.position = pace, CallPosition(7, Call(6, "round"))
    for place, serial in ((1, 6), (2, 7)):
        worker.signs.hear(ALL[place].id, at.now, health.Answer("", CallPosition(serial)))
    worker.waiting_since = at.now
    at.now += deadline - 0.01
    assert lost(worker) == {}
    at.now += 0.02
    assert lost(worker) == {1: f"has not come to round after 6 steps for {deadline:.0f} s"}
    assert at.turn(worker) == [0, 2, 3], "at once: it is on no far side"
    worker.waiting_since = None
    assert lost(worker) == {}, "this worker does not wait"


def test_a_question_that_was_answered_later_counts(at: Setting) -> None:
    """Questions overlap. One without an answer says nothing once a later one has one, nor if this
    process was stopped meanwhile."""
    worker, start = at.worker(3), at.now
    worker.signs.hear(ALL[1].id, start + 0.5, health.Answer("trains"))
    at.now += 2.0
    worker.signs.hear(ALL[1].id, start, health.SILENT)
    at.now += 60.0
    worker.signs.hear(ALL[1].id, start + 0.6, health.SILENT)
    assert lost(worker) == {}
    worker.signs.hear(ALL[1].id, at.now, health.SILENT)
    at.now += DEADLINE
    assert set(lost(worker)) == {1}


# -- views ----


# -- the start ----


def starting(
    at: Setting, me: int, workers: int | None = 3, min_workers: int = 2, wait: float = 60.0
) -> tuple[list[int], bool]:
    """The view that a worker begins with, by places, and whether it was under way."""
    store: Any = at.store
    need = workers or min_workers
    view, under_way = founding.found(store, ALL[me], SECRET, need=need, expected=workers, wait=wait)
    return [ALL.index(m) for m in view.members], under_way


def test_the_first_that_lives_begins_a_run(at: Setting) -> None:
    at.store.tickets = {1: ALL[0], 2: ALL[5], 3: ALL[2], 4: ALL[3], 5: ALL[4]}
    at.dead = {0}
    with pytest.raises(LinkError, match="4 of 3 workers"):
        starting(at, 2)  # number 2 lives, and is the first
    at.dead = {0, 5}
    assert starting(at, 2) == ([2, 3, 4], False), "in the order in which they came"


def test_too_few_workers_come(at: Setting) -> None:
    with pytest.raises(LinkError, match=r"1 of 3 workers have come .* within 7 s: start more"):
        starting(at, 0, wait=7.0)
    assert 1007.0 <= at.now < 1007.1


@pytest.mark.parametrize("strangers", [False, True])
def test_a_run_is_under_way(at: Setting, strangers: bool) -> None:
    at.store.views[4] = View(4, (ALL[1], ALL[2]))
    if strangers:
        at.store.strangers = {ALL[2].id}
        with pytest.raises(LinkError, match="another program has begun a run under this job"):
            starting(at, 0)
        assert at.store.was_put_back
    else:
        assert starting(at, 0) == ([1, 2], True)


def test_a_newcomer_does_not_end_a_run_that_is_out_of_reach(at: Setting) -> None:
    """It is over once all have ended, or when nobody has answered for long; its views count on."""
    at.store.views[4] = View(4, (ALL[1], ALL[2]))
    at.dead, at.mute = {1}, {2}
    with pytest.raises(LinkError, match="cannot be reached from here: do their addresses"):
        starting(at, 0, workers=1, wait=founding.UNCLEAR_SECONDS / 2)
    assert list(at.store.views) == [4]
    start = at.now
    assert starting(at, 0, workers=1, wait=600.0) == ([0], False)
    assert at.now - start >= founding.UNCLEAR_SECONDS and list(at.store.views) == [4, 5]
    at.store.views, at.store.tickets = {4: View(4, (ALL[1], ALL[2]))}, {}
    at.dead = {1, 2}
    start = at.now
    assert starting(at, 3, workers=None, min_workers=1) == ([3], False), "it has died"
    assert at.now - start < 5.0
