"""Which view may come next, and who counts as lost: without threads, with a clock of its own."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Container, Sequence
from typing import Any

import pytest
import torch

import laconic
from laconic.errors import LinkError
from laconic.links import health
from laconic.links.calls import Call, CallPosition
from laconic.links.elastic import founding, signs
from laconic.links.elastic import members as module
from laconic.links.elastic.founding import RestoredError, found
from laconic.links.elastic.members import Members, Rules
from laconic.links.elastic.registry import CoordinatorError, Registry
from laconic.links.elastic.view import Member, View

SECRET = bytes(range(32))
KEY = "00" * 8


def member(number: int) -> Member:
    return Member(f"{number:012x}", *(f"10.0.0.{number}|{port}|{KEY}" for port in (1, 2, 3)))


ALL = [member(n) for n in range(1, 9)]
ME = ALL[0]


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Store:
    """A registry in memory. While ``lost``, it can't be reached."""

    host, port = "10.0.0.99", 29400

    def __init__(self) -> None:
        self.views: dict[int, View] = {}
        self.tickets: dict[int, Member] = {}
        self.lost = False
        self.restored: list[View] = []
        self.same_job = True
        self.drawn = SECRET
        self.strangers: set[str] = set()
        self.was_put_back = False

    def put_back(self) -> None:
        self.was_put_back = True

    def _reach(self) -> None:
        if self.lost:
            raise CoordinatorError("no coordinator answers")

    def secret(self) -> bytes:
        self._reach()
        return self.drawn

    def view(self, epoch: int) -> View | None:
        self._reach()
        return self.views.get(epoch)

    def latest(self) -> View | None:
        self._reach()
        return self.views[max(self.views)] if self.views else None

    def propose(self, view: View, gone: Container[str] = ()) -> View:
        self._reach()
        return self.views.setdefault(view.epoch, view)

    def restore(self, secret: bytes, about: str, view: View) -> View | None:
        self._reach()
        self.restored.append(view)
        return self.propose(view) if self.same_job else None

    def enter(self, member: Member) -> int:
        number = len(self.tickets) + 1
        self.tickets[number] = member
        return number

    def entered(self, known: Container[int] = ()) -> dict[int, Member]:
        self._reach()
        return {n: m for n, m in self.tickets.items() if n not in known}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(signs, "time", clock)
    monkeypatch.setattr(founding, "time", clock)
    return clock


@pytest.fixture
def mute() -> set[str]:
    """The ids of the members whose beacons are out of reach from here."""
    return set()


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch, mute: set[str]) -> set[str]:
    """The ids of the members that have ended."""
    ids: set[str] = set()
    ids_of = {m.beacon: m.id for m in ALL}

    def ask(address: str, secret: bytes) -> health.Answer:
        assert secret == SECRET
        if ids_of[address] in ids:
            return health.GONE
        return health.UNREACHABLE if ids_of[address] in mute else health.Answer("trains")

    def ask_all(addresses: Sequence[str], secret: bytes) -> list[health.Answer]:
        return [ask(address, secret) for address in addresses]

    monkeypatch.setattr(module.health, "ask", ask)
    monkeypatch.setattr(module.health, "ask_all", ask_all)
    return ids


def made(
    count: int, min_workers: int | None = None, *, newcomers: int = 0, **rules: Any
) -> Members:
    """This worker, one of ``count`` active ones, in view 1 with so many ``newcomers``."""
    given = {"workers": None, "wait": 60.0, "limit": 600.0, **rules}
    members = Members(Store(), ME, SECRET, "about", Rules(min_workers, **given))  # type: ignore[arg-type]
    members._view = View(1, tuple(ALL[: count + newcomers]))
    members._entered_view = True
    members.signs.active = {m.id for m in ALL[:count]}
    return members


def store(members: Members) -> Store:
    assert isinstance(members.registry, Store)
    return members.registry


def gone(members: Members, *places: int) -> dict[str, str]:
    """The members at ``places`` have ended."""
    members.signs.gone |= {ALL[p].id for p in places}
    return {ALL[p].id: "has ended" for p in places}


def silent(members: Members, seconds: float, *places: int) -> dict[str, str]:
    """The members at ``places`` have not answered for so long."""
    for p in places:
        members.signs._silent_since[ALL[p].id] = module.time.monotonic() - seconds
    return {ALL[p].id: "has not answered" for p in places}


# -- the majority ----


def short(members: Members) -> tuple[int, int] | None:
    """How many are left of how many, if too few are."""
    return None if members._short is None else members._short[:2]


@pytest.mark.parametrize(
    ("count", "lost", "may"),
    [
        *[(1, 0, True), (2, 0, True), (2, 1, False), (3, 1, True), (3, 2, False)],
        *[(4, 1, True), (4, 2, False), (5, 2, True), (5, 3, False), (6, 3, False), (7, 3, True)],
    ],
)
def test_more_than_half_must_be_left(
    clock: Clock, dead: set[str], count: int, lost: int, may: bool
) -> None:
    for losing in (gone, lambda m, *p: silent(m, 1000.0, *p)):
        members = made(count)
        assert members._may(members.view, losing(members, *range(1, 1 + lost))) is may
        assert short(members) == (None if may else (count - lost, count // 2 + 1))


@pytest.mark.parametrize("least", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("lost", [0, 1, 2, 3, 4])
def test_min_workers_must_be_left(clock: Clock, dead: set[str], least: int, lost: int) -> None:
    members = made(5, least)
    may = members._may(members.view, gone(members, *range(1, 1 + lost)))
    assert may is (5 - lost >= least)
    assert short(members) == (None if may else (5 - lost, least))


def test_those_that_wait_to_join_count(clock: Clock, dead: set[str]) -> None:
    """If they live, and are not in the view."""
    members = made(4, 4)
    lost = gone(members, 3)
    store(members).tickets = {1: ALL[0], 2: ALL[3], 3: ALL[4]}
    dead |= {ALL[3].id, ALL[4].id}
    assert not members._may(members.view, lost)
    assert short(members) == (3, 4)
    dead.remove(ALL[4].id)
    assert members._may(members.view, lost)
    assert members._short is None


def test_too_few_workers_wait_from_when_they_are_too_few(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """However long others take to answer whether they live: each question, 5 s, is longer than what
    `next` sleeps. Said once, with what would help."""
    members = made(2, wait=9.0)
    lost = gone(members, 1)
    seen = []

    def asked(*_: Any) -> list[Member]:
        clock.sleep(5.0)
        seen.append(short(members))
        return []

    monkeypatch.setattr(module, "alive", asked)
    monkeypatch.setattr(
        members._changed, "wait", lambda _: members._may(members.view, lost) and None
    )
    start = clock.now
    with (
        caplog.at_level(logging.WARNING, "laconic"),
        pytest.raises(LinkError, match=r"1 of at least 2 workers are left\. Nothing has changed"),
    ):
        members.next(1)
    assert clock.now - start <= 5.0 + 9.0 + 5.0
    assert seen[0] is None and set(seen[1:]) == {(1, 2)}, "as before while it asks"
    (record,) = caplog.records
    assert record.getMessage() == (
        "1 of at least 2 workers are left: training waits up to 9 s for others "
        "(Elastic(min_workers=1) goes on with so many)"
    )


def test_a_silence_that_has_ended_does_not_shorten_the_next_wait(
    clock: Clock, dead: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    members = made(2, wait=9.0)
    lost = gone(members, 1)
    monkeypatch.setattr(members, "_lost", lambda view: lost)
    members._turn()
    assert short(members) == (1, 2)
    lost = {}
    members._turn()
    assert members._short is None
    clock.now += 100.0
    lost = gone(members, 1)
    members._turn()
    assert members._short == (1, 2, clock.now)


def test_broken_connections_do_not_begin_the_wait_anew(
    clock: Clock, dead: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of at least three are left, and nobody was lost since: each view proposed to connect
    again is too small."""
    members = made(2, 3, wait=9.0)
    members._broken_since = clock.now
    clock.now += 5.0
    members._turn()
    since = clock.now
    assert members._short == (2, 3, since)
    clock.now += 5.0
    members._turn()
    assert members._short == (2, 3, since)


def test_newcomers_that_are_not_active_do_not_count(clock: Clock, dead: set[str]) -> None:
    members = made(3, newcomers=3)
    assert not members._may(members.view, gone(members, 1, 2)), "1 of 3, whoever has joined"
    assert members._may(members.view, gone(members, 3, 4, 5)), "all that are active are left"


def test_all_active_workers_are_lost(clock: Clock, dead: set[str]) -> None:
    """A newcomer cannot go on: it has no state."""
    members = made(2, 1, newcomers=1)
    members.me = ALL[2]
    assert not members._may(members.view, gone(members, 0, 1))
    assert short(members) == (0, 1)


# -- partitions ----


def test_the_half_behind_a_partition_waits(clock: Clock, dead: set[str]) -> None:
    """2 of 4 may go on by min_workers. The other 2 may be a majority in the coordinator's eyes: let
    them be first, for as long as it takes until they count this half as lost."""
    members = made(4, 2)
    lost = silent(members, 0.0, 2, 3)
    grace = 2 * members.signs.deadline
    for seconds in (0.0, members.signs.deadline, grace - 0.1, grace + 0.1):
        clock.now = 1000.0 + seconds
        assert members._may(members.view, lost) is (seconds > grace)
        assert members._short is None


def test_the_one_that_was_silent_last_counts(clock: Clock, dead: set[str]) -> None:
    members = made(4, 2)
    lost = silent(members, 100.0, 2) | silent(members, 1.0, 3)
    assert not members._may(members.view, lost)


@pytest.mark.parametrize(
    ("count", "ended", "unheard", "at_once"),
    [
        *[(4, 0, 2, False), (4, 0, 1, True), (5, 0, 3, False), (5, 0, 2, True), (2, 0, 1, False)],
        *[(4, 2, 0, True), (4, 1, 1, True), (5, 1, 2, False), (6, 2, 2, False), (6, 3, 1, True)],
        (3, 2, 0, True),
    ],
)
def test_those_that_have_ended_are_on_no_far_side(
    clock: Clock, dead: set[str], count: int, ended: int, unheard: int, at_once: bool
) -> None:
    """More than half of those that may live still go on at once."""
    members = made(count, 1)
    lost = gone(members, *range(1, 1 + ended))
    lost |= silent(members, members.signs.deadline, *range(1 + ended, 1 + ended + unheard))
    assert members._may(members.view, lost) is at_once
    clock.now += members.signs.deadline
    assert members._may(members.view, lost)


@pytest.mark.parametrize(
    ("count", "lost", "unheard", "at_once"),
    [(5, 2, 0, True), (5, 1, 1, True), (5, 2, 1, False), (7, 2, 1, True), (7, 2, 2, False)],
)
def test_those_that_are_silent_and_not_lost_yet_are_on_the_far_side(
    clock: Clock, dead: set[str], count: int, lost: int, unheard: int, at_once: bool
) -> None:
    members = made(count, 1)
    losing = silent(members, members.signs.deadline, *range(1, 1 + lost))
    silent(members, members.signs.deadline / 2, *range(1 + lost, 1 + lost + unheard))
    assert members._may(members.view, losing) is at_once
    clock.now += members.signs.deadline
    assert members._may(members.view, losing), "it counts from when those were silent"


def test_half_that_is_stuck_is_left_behind(clock: Clock, dead: set[str]) -> None:
    members = made(2, 1)
    assert members._may(members.view, {ALL[1].id: "has not come to the round"}), "it answers"


def test_a_lost_newcomer_does_not_make_half_a_majority(clock: Clock, dead: set[str]) -> None:
    members = made(4, 2, newcomers=1)
    lost = silent(members, members.signs.deadline, 2, 3) | gone(members, 4)
    assert not members._may(members.view, lost)


# -- leaving ----


def test_leaving_needs_no_majority(clock: Clock, dead: set[str]) -> None:
    members = made(2, 2)
    members._leaving = True
    assert members._may(members.view, {ME.id: "leaves"})


def test_the_last_one_cannot_leave_a_view(clock: Clock, dead: set[str]) -> None:
    members = made(1, 1)
    members._leaving = True
    assert not members._may(members.view, {ME.id: "leaves"})


def test_leaving_removes_nobody_else(clock: Clock, dead: set[str]) -> None:
    """Whom it suspects is for the others to say."""
    members = made(4)
    silent(members, members.signs.deadline, 2, 3)
    members._leaving = True
    members._turn()
    assert list(store(members).views[2].members) == ALL[1:4]


def test_the_last_note_of_a_worker_that_leaves(clock: Clock, dead: set[str]) -> None:
    leaving, stays = made(3), made(3)
    leaving._leaving, leaving.farewell = True, lambda: "said last"
    leaving._turn()
    view = store(leaving).views[2]
    assert view.farewell == (ME.id, "said last")
    stays.me, stays.signs.notes[ME.id] = ALL[1], "said before"
    store(stays).views[2] = view
    stays._turn()
    assert stays.view == view and stays.signs.notes[ME.id] == "said last"


def test_a_worker_that_leaves_is_not_in_the_next_view(clock: Clock, dead: set[str]) -> None:
    members = made(3)
    members._leaving = True
    members._turn()
    view = store(members).views[2]
    assert list(view.members) == ALL[1:3] and view.why == f"{ME.name} leaves"
    assert members._removed == view.why
    with pytest.raises(LinkError, match=r"go on without this one .*: start it again"):
        members.next(1)


# -- who is lost ----


@pytest.mark.parametrize(
    ("pace", "limit", "deadline"),
    [
        (0.0, 600.0, 5.0),
        (2.49, 600.0, 5.0),
        (2.5, 600.0, 5.0),
        (4.0, 600.0, 8.0),
        (14.9, 600.0, 29.8),
        (15.0, 600.0, 30.0),
        (1000.0, 600.0, 30.0),
        (0.0, 3.0, 3.0),
        (10.0, 12.0, 12.0),
    ],
)
def test_the_deadline_follows_the_pace(
    clock: Clock, pace: float, limit: float, deadline: float
) -> None:
    members = made(3, limit=limit)
    members.signs.pace = pace
    assert members.signs.deadline == pytest.approx(deadline)
    silent(members, deadline - 0.01, 1)
    assert members._lost(members.view) == {}
    clock.now += 0.02
    assert members._lost(members.view) == {ALL[1].id: f"has not answered for {deadline:.0f} s"}


@pytest.mark.parametrize(
    ("pace", "limit", "deadline"),
    [(0.0, 600.0, 60.0), (3.0, 600.0, 60.0), (4.0, 600.0, 80.0), (50.0, 600.0, 600.0), (0, 9, 9)],
)
def test_who_does_not_come_to_a_round(
    clock: Clock, pace: float, limit: float, deadline: float
) -> None:
    members = made(4, limit=limit)
    members.signs.pace = pace
    assert members.signs.stuck_deadline == deadline
    members.position = CallPosition(7, Call(6, "round"))
    for place, serial in ((1, 6), (2, 7)):
        members._heard([ALL[place]], clock.now, 0, health.Answer("", CallPosition(serial)))
    assert members._lost(members.view) == {}, "this worker does not wait"
    members.waiting_since = clock.now
    clock.now += deadline - 0.01
    assert members._lost(members.view) == {}
    clock.now += 0.02
    why = f"has not come to round after 6 steps for {deadline:.0f} s"
    assert members._lost(members.view) == {ALL[1].id: why}, "one is there, of one nothing is known"


def test_what_answers_mean(clock: Clock) -> None:
    members, start = made(8), clock.now
    left = health.Answer("", CallPosition(3, None, left=True))
    answers = [health.GONE, left, health.SILENT, health.UNREACHABLE, health.ENDING, health.OTHER]
    for place, answer in enumerate(answers, 1):
        members._heard([ALL[place]], clock.now, 0, answer)
    assert members._lost(members.view) == {ALL[p].id: "has ended" for p in (1, 2)}
    clock.now += 4.0
    members._heard([ALL[3]], clock.now, 0, health.SILENT)
    position = CallPosition(9, Call(8, "round"))
    members._heard([ALL[4]], clock.now, 0, health.Answer("", position, note="noted"))
    clock.now = start + members.signs.deadline
    assert members._lost(members.view) == {
        ALL[1].id: "has ended",
        ALL[2].id: "has ended",
        **{ALL[p].id: "has not answered for 5 s" for p in (3, 5, 6)},
    }, "since the first time without an answer; one has answered since"
    assert members.signs._positions[ALL[4].id] == position
    assert members.signs.notes == {ALL[4].id: "noted"}


def test_only_members_of_the_view_are_lost(clock: Clock) -> None:
    members = made(2)
    gone(members, 1, 5)
    assert list(members._lost(members.view)) == [ALL[1].id]
    members.signs.gone = {ME.id}
    assert members._lost(members.view) == {}, "this worker lives"


def test_each_asks_the_next_ones(clock: Clock) -> None:
    members = made(5)
    members.me = ALL[3]
    assert members._others(members.view) == [ALL[4], *ALL[:3]]
    members.me = ALL[7]  # in no view
    assert members._others(members.view) == ALL[:5]


# -- views ----


def test_nothing_has_happened(clock: Clock, dead: set[str]) -> None:
    members = made(3)
    members._turn()
    assert store(members).views == {}


def test_a_view_without_the_lost_ones(clock: Clock, dead: set[str]) -> None:
    seen: list[View] = []
    members = made(3)
    members.on_view = seen.append
    gone(members, 1)
    members._turn()
    view = store(members).views[2]
    assert list(view.members) == [ALL[0], ALL[2]] and view.why == f"{ALL[1].name} has ended"
    assert members.view == view and seen == [view]
    assert members.next(1) == view
    members._turn()
    assert list(store(members).views) == [2], "once"


def test_another_worker_was_first(clock: Clock, dead: set[str]) -> None:
    """What was decided counts, whatever this worker has wanted."""
    members = made(4)
    gone(members, 1)
    other = View(2, (ALL[0], ALL[1], ALL[3]), "another one")
    store(members).propose = lambda view, gone=(): other  # type: ignore[method-assign]
    members._turn()
    assert members.view == other


def test_views_that_were_decided_are_followed_in_order(clock: Clock, dead: set[str]) -> None:
    seen: list[int] = []
    members = made(3)
    members.on_view = lambda view: seen.append(view.epoch)
    store(members).views = {e: View(e, tuple(ALL[:3])) for e in (2, 3, 4, 6)}
    members._turn()
    assert seen == [2, 3, 4]
    members._decided(View(3, tuple(ALL[:1])))
    assert members.view.epoch == 4, "a late one changes nothing"


def test_newcomers(clock: Clock, dead: set[str]) -> None:
    """At the end of the next view, once."""
    members = made(2)
    members.add(ALL[5])
    members.add(ALL[4])
    members._turn()
    assert list(members.view.members) == [*ALL[:2], ALL[5], ALL[4]]
    members._turn()
    assert members.view.epoch == 2


def test_newcomers_wait_for_an_idle_moment(clock: Clock, dead: set[str]) -> None:
    """A view ends the transfers under way. They wait within limits only."""
    for pace, patience in ((0.0, module.NEWCOMER_SECONDS), (3.0, 6.0)):
        members = made(2)
        members.signs.pace, members.waiting_since = pace, clock.now
        members.add(ALL[5])
        clock.now += patience - 0.01
        members._turn()
        assert store(members).views == {}
        clock.now += 0.02
        members._turn()
        assert list(members.view.members) == [*ALL[:2], ALL[5]]
    members = made(2)
    members.waiting_since = clock.now
    members.add(ALL[5])
    members._turn()
    members._wake_read.clear()
    members.idle()
    assert members._wake_read.is_set(), "nothing is transferred now"
    members._turn()
    assert list(members.view.members) == [*ALL[:2], ALL[5]]


def test_a_newcomer_that_does_not_answer(clock: Clock, dead: set[str], mute: set[str]) -> None:
    """The others would wait for it in vain."""
    members = made(2)
    dead.add(ALL[4].id)
    mute.add(ALL[5].id)
    for place in (4, 5):
        with pytest.raises(LinkError, match="does not answer: are its address and ports open"):
            members.add(ALL[place])
    members._turn()
    assert store(members).views == {}


def test_broken_connections_are_made_again(clock: Clock, dead: set[str]) -> None:
    members = made(2)
    members.broken()
    members._turn()
    clock.now += module.RECONNECT - 0.01
    members.broken()
    members._turn()
    assert store(members).views == {}
    clock.now += 0.02
    members._turn()
    assert members.view.why == "the connections are made again"
    assert list(members.view.members) == ALL[:2]
    members.mended()
    clock.now += 10.0
    members._turn()
    assert members.view.epoch == 2


def test_a_newcomer_proposes_nothing(clock: Clock, dead: set[str]) -> None:
    members = made(2)
    members.me = ALL[6]
    gone(members, 1)
    members._turn()
    assert store(members).views == {}


def test_a_worker_that_has_ended_proposes_only_in_a_call(clock: Clock, dead: set[str]) -> None:
    """At the end of training the others end too."""
    members = made(3)
    members.ended = True
    gone(members, 1)
    members._turn()
    assert store(members).views == {}
    members.waiting_since = clock.now
    members._turn()
    assert list(store(members).views) == [2]


def test_the_coordinator_is_back(clock: Clock, dead: set[str]) -> None:
    members = made(2)
    members._coordinator_lost = "no coordinator answers"
    store(members).lost = True
    with pytest.raises(CoordinatorError):
        members._turn()
    assert members._coordinator_lost
    store(members).lost = False
    members._turn()
    assert store(members).restored == [View(1, tuple(ALL[:2]))] and not members._coordinator_lost
    store(members).same_job, members._coordinator_lost = False, "lost again"
    with pytest.raises(CoordinatorError, match="serves another job of this name"):
        members._turn()


def test_another_view_counts_than_this_worker_has_known(clock: Clock, dead: set[str]) -> None:
    """Where the coordinator has lost both, and another worker was first to restore."""
    members = made(3)
    members._coordinator_lost = "no coordinator answers"
    store(members).views[1] = View(1, (ALL[0], ALL[2]), "one was lost")
    members._turn()
    assert list(members.view.members) == [ALL[0], ALL[2]] and members.view.epoch == 2
    assert not members._removed and not members._coordinator_lost


def test_the_others_have_gone_on_without_this_worker(clock: Clock, dead: set[str]) -> None:
    members = made(3, 1)
    members._coordinator_lost = "no coordinator answers"
    store(members).views[1] = View(1, (ALL[1], ALL[2]))
    members._turn()
    said = "another view was decided while the coordinator was lost"
    with pytest.raises(LinkError, match=rf"go on without this one \({said}\)"):
        members.next(1)


def test_a_worker_that_was_left_behind_proposes_nothing(clock: Clock, dead: set[str]) -> None:
    members = made(3, 1)
    members._coordinator_lost = "no coordinator answers"
    store(members).views[1] = View(1, (ALL[1], ALL[2]))
    gone(members, 2)
    members._turn()
    assert list(store(members).views) == [1]


def test_what_is_damaged_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    clock: Clock,
    dead: set[str],
) -> None:
    """And is no reason to restore. If a view is needed, the run ends with it."""
    members, turns = made(2, wait=9.0), []

    def damaged(epoch: int) -> View | None:
        raise LinkError("what the coordinator has as view/2: not a view")

    def wait(seconds: float) -> None:
        turns.append(seconds)
        members.closed = len(turns) == 10

    store(members).view = damaged  # type: ignore[method-assign]
    monkeypatch.setattr(members._wake_read, "wait", wait)
    with caplog.at_level(logging.INFO, "laconic"):
        members._read()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert len(turns) == 10 and store(members).restored == []
    members.closed = False
    monkeypatch.setattr(members._changed, "wait", clock.sleep)
    with pytest.raises(LinkError, match=r"a worker was lost, and what the coord.* within 9 s"):
        members.next(1)


@pytest.mark.parametrize(
    ("short", "coordinator", "said"),
    [
        ((1, 2), "", "1 of at least 2 workers are left. Nothing has changed within 9"),
        (
            None,
            "no coordinator answers",
            "a worker was lost, and no coordinator answers. Nothing has",
        ),
    ],
)
def test_too_few_for_too_long(
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    short: tuple[int, int] | None,
    coordinator: str,
    said: str,
) -> None:
    members = made(2, wait=9.0)
    start = clock.now
    members._short = None if short is None else (*short, start)
    members._coordinator_lost = coordinator
    monkeypatch.setattr(members._changed, "wait", clock.sleep)
    with pytest.raises(LinkError, match=said):
        members.next(1)
    assert clock.now - start == pytest.approx(9.0, abs=1.0)


# -- the start ----


def starting(
    me: Member,
    registry: Store,
    workers: int | None = 3,
    min_workers: int | None = None,
    wait: float = 60.0,
) -> tuple[View, bool]:
    """The view that the worker ``me`` begins with, and whether it was under way."""
    need = workers or min_workers or 2
    at: Any = registry
    return found(at, me, SECRET, need=need, expected=workers, wait=wait)


def test_the_first_worker_proposes_the_first_view(clock: Clock, dead: set[str]) -> None:
    registry = Store()
    registry.tickets = {1: ALL[0], 2: ALL[5]}
    dead.add(ALL[0].id)
    registry.tickets |= {4: ALL[3], 5: ALL[4]}
    registry.enter = lambda member: 3  # type: ignore[method-assign]
    registry.tickets[3] = ALL[2]
    with pytest.raises(LinkError, match="4 of 3 workers"):
        starting(ALL[2], registry)  # number 2 lives, and is the first
    dead.add(ALL[5].id)
    view, under_way = starting(ALL[2], registry)
    assert not under_way and view.epoch == 1
    assert list(view.members) == [ALL[2], ALL[3], ALL[4]], "in the order in which they came"


def test_too_few_workers_come(clock: Clock, dead: set[str]) -> None:
    start = clock.now
    said = "1 of 3 workers have come to the coordinator at 10.0.0.99:29400 within 7 s: start more"
    with pytest.raises(LinkError, match=said):
        starting(ME, Store(), wait=7.0)
    assert clock.now - start == pytest.approx(7.0, abs=0.1)


def test_more_may_come_for_a_moment(clock: Clock, dead: set[str]) -> None:
    """Where no number is given: until none has come for a second."""
    registry = Store()
    registry.tickets = {1: ALL[0]}
    registry.enter = lambda member: 1  # type: ignore[method-assign]
    arrive = {1001.0: (2, ALL[1]), 1001.9: (3, ALL[2]), 1002.8: (4, ALL[3])}
    entered = registry.entered

    def later(known: Container[int] = ()) -> dict[int, Member]:
        for at in [t for t in arrive if t <= clock.now]:
            number, new = arrive.pop(at)
            registry.tickets[number] = new
        return entered(known)

    registry.entered = later  # type: ignore[method-assign]
    view, under_way = starting(ME, registry, workers=None, min_workers=2)
    assert not under_way and list(view.members) == ALL[:4]
    assert clock.now == pytest.approx(1002.8 + founding.SETTLE, abs=0.15)


def test_a_run_is_under_way(clock: Clock, dead: set[str]) -> None:
    registry = Store()
    registry.views[4] = View(4, (ALL[1], ALL[2]))
    assert starting(ME, registry) == (registry.views[4], True)


def test_another_program_begins_a_run_at_the_same_moment(clock: Clock, dead: set[str]) -> None:
    registry = Store()
    registry.views[4] = View(4, (ALL[1], ALL[2]))
    registry.strangers = {ALL[2].id}
    with pytest.raises(LinkError, match="another program has begun a run under this job"):
        starting(ME, registry)
    assert registry.was_put_back


def test_a_run_that_has_died(clock: Clock, dead: set[str]) -> None:
    """Its views count on."""
    registry = Store()
    registry.views[4] = View(4, (ALL[1], ALL[2]))
    dead |= {ALL[1].id, ALL[2].id}
    registry.tickets = {1: ALL[1], 2: ALL[2]}
    view, under_way = starting(ME, registry, workers=1)
    assert (view, under_way) == (View(5, (ME,), "the run begins"), False)


def test_a_run_that_is_out_of_reach(clock: Clock, dead: set[str], mute: set[str]) -> None:
    """Nobody answers, and not all have ended: it is not over, until that is so for long."""
    registry = Store()
    registry.views[4] = View(4, (ALL[1], ALL[2]))
    dead.add(ALL[1].id)
    mute.add(ALL[2].id)
    said = "the workers of the run at 10.0.0.99:29400 cannot be reached from here: do their addr"
    with pytest.raises(LinkError, match=said):
        starting(ME, registry, workers=1, wait=founding.UNCLEAR_SECONDS / 2)
    assert list(registry.views) == [4]
    mute.clear()
    assert starting(ME, registry, workers=1)[1], "it was under way"
    mute.add(ALL[2].id)
    start = clock.now
    registry.tickets.clear()
    view, under_way = starting(ALL[3], registry, workers=1, wait=600.0)
    assert (view, under_way) == (View(5, (ALL[3],), "the run begins"), False)
    assert clock.now - start == pytest.approx(founding.UNCLEAR_SECONDS, abs=0.2)


def test_a_run_was_restored_meanwhile(clock: Clock, dead: set[str]) -> None:
    """Its workers have another secret: this one begins again, with that."""
    registry = Store()
    registry.drawn = bytes(32)
    with pytest.raises(RestoredError):
        starting(ME, registry)


@pytest.mark.parametrize(
    ("min_workers", "workers", "least"),
    [(None, 1, 1), (None, 2, 2), (None, 3, 2), (None, 4, 3), (None, 5, 3), (1, 8, 1), (5, 2, 5)],
)
def test_the_least_number(min_workers: int | None, workers: int, least: int) -> None:
    assert Rules(min_workers, None, 1.0, 1.0).least(workers) == least


def test_the_fake_does_what_the_registry_does() -> None:
    """Its methods have the names and arguments of `Registry`."""
    for name in ("secret", "view", "latest", "propose", "restore", "enter", "entered"):
        real, fake = (inspect.signature(getattr(cls, name)) for cls in (Registry, Store))
        assert list(real.parameters) == list(fake.parameters), name


def test_a_thread_that_fails_ends_the_wait(clock: Clock) -> None:
    """Nobody waits in vain: neither this worker for a view, nor the others for this worker."""
    members = made(3)

    def fails() -> None:
        raise AssertionError("something that cannot be")

    with pytest.raises(AssertionError):
        members._run(fails)
    with pytest.raises(LinkError, match="a thread of this worker has failed"):
        members.next(1)
    members.is_at(CallPosition(9, Call(8, "round")))
    assert members.record.position.left and members.closed


def test_a_question_that_was_answered_later_counts(clock: Clock) -> None:
    """Questions overlap: one asked before another that was answered says nothing any more."""
    members, start = made(3), clock.now
    members._heard([ALL[1]], start + 0.5, 0, health.Answer("trains"))
    clock.now += 2.0
    members._heard([ALL[1]], start, 0, health.SILENT)
    clock.now += 60.0
    assert members._lost(members.view) == {}
    members._heard([ALL[1]], start + 0.6, 0, health.SILENT)
    assert members._lost(members.view) == {}, "this process was stopped when it asked"
    members._heard([ALL[1]], clock.now, 0, health.SILENT)
    clock.now += members.signs.deadline
    assert set(members._lost(members.view)) == {ALL[1].id}


def test_a_message_is_a_sign_of_life(clock: Clock) -> None:
    """A host is cut off twice within the deadline, and rounds were complete in between. A newcomer
    that is not active yet has no part in them."""
    members = made(3, newcomers=1)
    silent(members, 3.0, 1, 3)
    members.signs.in_touch = clock.now - 1.0
    clock.now += 4.0
    assert set(members._lost(members.view)) == {ALL[3].id}
    again = clock.now
    members._heard([ALL[1]], again, 0, health.SILENT)
    clock.now += members.signs.deadline - 0.1
    members._heard([ALL[1]], clock.now, 0, health.SILENT)
    assert set(members._lost(members.view)) == {ALL[3].id}
    clock.now = again + members.signs.deadline
    assert set(members._lost(members.view)) == {ALL[1].id, ALL[3].id}


def test_a_round_says_since_when_workers_are_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of another worker may be as old as the beginning of the round before."""
    clock = Clock()

    def train(number: int) -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = laconic.attach(model, optimizer, laconic.local_sgd(1), elastic=laconic.Elastic())
        known = sync.driver.session.elastic.members.signs
        for step in range(1, 5):
            clock.now = 1000.0 + step
            optimizer.step()
            if step > 1:
                assert known.in_touch == clock.now - 1

    monkeypatch.setattr("laconic.links.elastic.link.time", clock)
    laconic.simulate(train, faults=laconic.Faults(start=1))
