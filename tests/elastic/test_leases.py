"""Who takes part, as a coordinator decides it: a model of its workers and the network, searched
exhaustively to a depth, and the cases that once ended healthy runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from laconic.links.elastic.leases import GONE, SILENT, Beat, Job, Need, RefusedError
from laconic.links.elastic.view import Member, View

LEASE = 5.0


def member(id: str) -> Member:
    address = "127.0.0.1|1|" + "00" * 8
    return Member(id * 12, address, address)


@dataclass
class Worker:
    """``linked``: it reaches the coordinator; ``silent``: the process was stopped; ``alone``: no
    other worker reaches it; ``hears``: what the coordinator says reaches it at once."""

    member: Member
    view: View | None = None
    salt: str = ""
    at: int = 0
    """The coordinator that it has joined."""
    alive: bool = True
    linked: bool = True
    silent: bool = False
    alone: bool = False
    hears: bool = True
    ready: set[str] = field(default_factory=set)
    removed: bool = False


class World:
    """Workers "a", "b", ... and their coordinator."""

    def __init__(self, workers: str = "abc", *, least: int | None = 1) -> None:
        self.now, self.nonce, self.least = 100.0, 1, least
        self.job: Job | None = Job(self.nonce, self.now - 10)
        self.workers: dict[str, Worker] = {}
        self.decided: dict[int, View] = {}
        self.part, self.refusing = set[str](), set[str]()
        """Those that do not reach each other; those that refuse connections."""
        self.idle, self.deaf = set[str](), set[str]()
        """Those that take part in no rounds yet; those that report nobody."""
        for name in workers:
            self.come(name, len(workers))
        self.pass_time(1.5)
        assert self.ids() == workers

    def come(self, name: str, need: int = 1) -> None:
        self.workers[name] = Worker(member(name))
        self.need = Need(need, None, self.least)
        self._join(self.workers[name])

    def ids(self) -> str:
        """The latest view."""
        view = None if self.job is None else self.job.view
        return "" if view is None else "".join(id[0] for id in view.ids)

    def _reaches(self, worker: Worker) -> bool:
        return worker.alive and worker.linked and not worker.silent and not worker.removed

    def _join(self, worker: Worker) -> None:
        assert self.job is not None
        at = worker.member, "about", self.need, self.now
        try:
            self.job.join(*at, salt=worker.salt, view=worker.view)
            worker.salt, worker.at = self.job.salt, self.nonce
        except RefusedError as error:
            worker.removed = error.removed

    def _reports(self, worker: Worker) -> dict[str, tuple[str, str]]:
        found = {}
        for name, other in self.workers.items():
            if worker.view is None or other.member.id not in worker.view.ids:
                continue
            if not other.alive or name in self.refusing:
                found[other.member.id] = GONE, "has ended"
            parted = {name, own := worker.member.id[0]} <= self.part and own not in self.deaf
            unheard = other.silent or other.alone or worker.alone or parted
            if other.alive and unheard and other is not worker:
                found[other.member.id] = SILENT, "is silent"
        return found

    def _beat(self, worker: Worker) -> Beat:
        active = worker.view is not None and worker.member.id in worker.view.ids
        active = active and worker.member.id[0] not in self.idle
        return Beat(
            lease=LEASE, founding=worker.view is None, active=active,
            ready=[w * 12 for w in sorted(worker.ready)], reports=self._reports(worker),
        )  # fmt: skip

    def look(self) -> None:
        """All workers that reach the coordinator renew their leases, and it decides."""
        job = self.job
        if job is None:
            return
        for worker in self.workers.values():
            worker.at = worker.at if worker.linked else 0  # it has to connect again
            known = worker.member.id in job.leases and worker.at == self.nonce
            if self._reaches(worker) and not (known and worker.salt == job.salt):
                worker.salt = worker.salt if worker.view is not None else ""
                self._join(worker)
            joined = worker.at == self.nonce and worker.salt == job.salt
            if self._reaches(worker) and joined:
                job.renew(worker.member.id, self._beat(worker), self.now)
        before = job.view
        job.decide(self.now)
        for view in job.views:
            same = self.decided.setdefault(view.epoch, view)
            assert same == view, "two views of one epoch"
        self._check(before, job.view)
        for worker in self.workers.values():
            joined = worker.at == self.nonce and worker.salt == job.salt
            if worker.hears and self._reaches(worker) and joined:
                self.hear(worker)

    def hear(self, worker: Worker) -> None:
        assert self.job is not None
        view = self.job.view
        if view is not None and (worker.view is None or worker.view.epoch < view.epoch):
            entered = worker.view is not None and worker.member.id in worker.view.ids
            worker.view = view
            worker.removed = entered and worker.member.id not in view.ids

    def _check(self, before: View | None, view: View | None) -> None:
        """Nobody is evicted who is well, and nobody follows without a member of the last view."""
        if view is None or before is None or view == before:
            return
        assert set(view.ids) & set(before.ids), "a view without a member of the last one"
        there = [w for w in self.workers.values() if self._reaches(w) and w.member.id in before.ids]
        well = [w for w in there if not w.alone]
        if self.part or 2 * len(well) <= len(there):
            return  # of two that do not reach each other, either may be the one
        for worker in well:
            foreign = worker.view is not None and worker.view.epoch not in self.decided
            assert worker.member.id in view.ids or foreign, "a healthy one is out"

    def pass_time(self, seconds: float) -> None:
        pace = 0.5 if seconds < 5 else 1.0
        for _ in range(round(seconds / pace)):
            self.now += pace
            self.look()

    # -- what happens ----

    def kill(self, name: str) -> None:
        worker = self.workers[name]
        worker.alive = False
        if self.job is not None and worker.linked:
            self.job.close(worker.member.id, self.now, by_system=True)

    def turn(self, name: str, what: str) -> None:
        """Turn a property of a worker on or off."""
        vars(self.workers[name])[what] ^= True

    def take_in(self, name: str) -> None:
        self.workers["a"].ready.add(name)

    def restart(self) -> None:
        """The coordinator is started again."""
        self.nonce += 1
        self.job = Job(self.nonce, self.now)

    def copy(self) -> World:
        new, job = copy.copy(self), copy.copy(self.job)
        if job is not None:
            job.leases = {id: replace(w, since=dict(w.since)) for id, w in job.leases.items()}
            job.views = job.views.copy()
        new.job, new.decided = job, dict(self.decided)
        new.workers = {n: replace(w, ready=set(w.ready)) for n, w in self.workers.items()}
        return new

    def key(self) -> int:
        """Equal for worlds from which the same can follow."""
        job = self.job
        assert job is not None
        known = [
            (id, round(self.now - w.heard), w.closed and round(self.now - w.closed), w.over,
             sorted((i, round(self.now - t)) for i, t in w.since.items()), w.beat)
            for id, w in sorted(job.leases.items())
        ]  # fmt: skip
        cut = min(round(self.now - job._cut), 99) if job._cut > 0 else -1
        adopted = job._adopted and round(self.now - job._adopted)
        there = [(w.salt == job.salt, w.at == self.nonce) for w in self.workers.values()]
        seen = [vars(w) | {"salt": "", "at": 0} for w in self.workers.values()], there
        return hash(repr((known, job.view, cut, adopted, min(self.now - job._begun, 9), seen)))


def actions(world: World) -> Iterator[tuple[str, Callable[[World], object]]]:
    """What may happen next."""
    for name, worker in world.workers.items():
        if worker.alive:
            yield f"kill {name}", partial(World.kill, name=name)
            others = (w for w in world.workers.values() if w is not worker)
            more = () if any(w.alone for w in others) else ("alone",)
            for what in ("linked", "silent", "hears", *more):
                yield f"{what} {name}", partial(World.turn, name=name, what=what)
    if "n" not in world.workers:
        yield "come", partial(World.come, name="n")
    elif world.workers["n"].view is not None:
        yield "ready", partial(World.take_in, name="n")
    yield "restart", World.restart
    for seconds in (0.5, 4.0, 40.0):
        yield f"{seconds:g} s", partial(World.pass_time, seconds=seconds)


def search(depth: int) -> int:
    """Try all that can happen in so many steps; returns how many different worlds there are."""
    layer, seen = {0: (World(), "")}, set[int]()
    for _ in range(depth):
        following = dict[int, tuple[World, str]]()
        for world, how in layer.values():
            for name, act in actions(world):
                new = world.copy()
                try:
                    act(new)
                    new.look()
                except AssertionError as error:
                    raise AssertionError(f"{error} after:{how}, {name}") from error
                following[new.key()] = new, f"{how}, {name}"
        layer = {key: each for key, each in following.items() if key not in seen}
        seen |= layer.keys()
    return len(seen)


# -- what once ended healthy runs ----


def ids_after(world: World, seconds: float) -> str:
    world.pass_time(seconds)
    return world.ids()


@pytest.mark.fault("a newcomer that did not reach the workers ended a healthy run")
def test_a_newcomer_ends_no_run() -> None:
    world = World("ab")
    world.come("n", need=1)
    assert ids_after(world, 200.0) == "ab"
    assert world.workers["n"].view == world.workers["a"].view, "it knows whom to ask"


@pytest.mark.fault("an isolated worker evicted three healthy ones")
def test_one_that_is_cut_off_is_evicted_and_evicts_nobody() -> None:
    """Whichever it is. Of two that do not reach each other, the later one goes, after longer."""
    for name in "abcdefgh":
        world = World("abcdefgh")
        world.workers[name].alone = True
        assert ids_after(world, 4.0) == "abcdefgh".replace(name, "")
    world = World("abcd")
    world.part = {"a", "c"}
    assert ids_after(world, 20.0) == "abcd"
    assert ids_after(world, 20.0) == "abd"


@pytest.mark.fault("a refused connection, as of a NAT that restarts, counted as the end")
def test_one_that_refuses_connections_stays() -> None:
    """Unless its system has closed the connection to the coordinator, too."""
    world = World("abc")
    world.refusing = {"b"}
    assert ids_after(world, 200.0) == "abc"
    world.kill("b")
    assert ids_after(world, 1.0) == "ac"
    world.kill("c")
    world.workers["c"].alive = world.workers["c"].silent = True
    assert ids_after(world, 4.0) == "ac", "a tunnel was started again"


@pytest.mark.fault("after the network was cut, the first to come back evicted the others")
@pytest.mark.parametrize("cut", ["abcd", "bcd"])
@pytest.mark.parametrize("between", [0.0, 0.5])
def test_the_network_is_cut(cut: str, between: float) -> None:
    """All, or most, are silent for a minute, and come back one after another. Their leases were
    renewed at moments ``between`` which so many seconds passed."""
    world = World("abcd")
    for name in cut:
        world.workers[name].linked = False
        world.pass_time(between)
    world.pass_time(60.0)
    for name in cut:
        world.workers[name].linked = True
        world.pass_time(1.0)
    assert ids_after(world, 20.0) == "abcd"
    world.workers["b"].linked = False
    assert ids_after(world, 4.0) == "abcd"
    assert ids_after(world, 2.0) == "acd"
    for name in "cd":
        world.workers[name].linked = False
    assert ids_after(world, 80.0) == "acd"
    assert ids_after(world, 15.0) == "a"


@pytest.mark.fault("two of four were stopped; when they went on, one that was not was evicted")
def test_half_of_the_workers_are_stopped() -> None:
    """When they go on, the others report them a moment longer, and that does not count."""
    world = World("abcd", least=None)
    for name in "cd":
        world.workers[name].silent = True
    assert ids_after(world, 13.0) == "abcd"
    for name in "cd":
        world.workers[name].silent = False
    world.part, world.deaf = set("acd"), set("cd")
    assert ids_after(world, 0.6) == "abcd"
    world.part = set()
    assert ids_after(world, 20.0) == "abcd"


def test_too_few_are_left() -> None:
    """They wait for others; one that stopped may come back."""
    world = World("abc", least=None)
    world.kill("b")
    assert ids_after(world, 1.0) == "ac"
    world.workers["c"].silent = True
    assert ids_after(world, 6.0) == "ac" and world.job is not None
    assert world.job.short == (1, 2)
    world.workers["c"].silent = False
    assert ids_after(world, 1.0) == "ac" and world.job.short is None
    world.workers["c"].silent = True
    world.pass_time(6.0)
    world.come("n")
    assert ids_after(world, 1.0) == "a", "one that waits will take part"
    world = World("abc", least=None)
    world.workers["c"].alone, world.workers["c"].hears = True, False
    assert ids_after(world, 4.0) == "ab"
    world.kill("b")
    assert ids_after(world, 4.0) == "ab", "one that was evicted does not count"


def test_a_coordinator_that_was_started_again() -> None:
    """It waits for all workers of the run; what only one of them has heard of does not count; and
    a newcomer that comes first begins no other run."""
    world = World("abc")
    assert world.job is not None
    for name in "ac":
        world.workers[name].hears = False
    world.kill("b")
    world.pass_time(1.0)
    world.workers["c"].hears = True
    world.look()
    world.workers["c"].hears = world.workers["c"].linked = False
    world.workers["a"].linked = False
    world.restart()
    world.come("n")
    assert ids_after(world, 5.0) == ""
    world.workers["a"].linked = world.workers["a"].hears = True
    assert ids_after(world, 1.0) == "abc", "a has not heard that b is lost"
    world.workers["c"].linked = True
    assert ids_after(world, 1.0) == "ac"
    world.workers["c"].linked = False
    world.restart()
    assert ids_after(world, 9.0) == "ac"
    assert ids_after(world, 3.0) == "a", "c has had the time to come back"
    world.workers["c"].linked = world.workers["c"].hears = True
    world.pass_time(1.0)
    assert world.workers["c"].removed and world.ids() == "a"


@pytest.mark.parametrize("late", [False, True])
def test_one_that_was_evicted_comes_back_first(late: bool) -> None:
    """To a coordinator that was cut off for so long that it has forgotten the run. If the others
    are too ``late``, it goes on without them, in another epoch."""
    world = World("ab")
    world.workers["b"].hears = world.workers["b"].linked = False
    assert ids_after(world, 6.0) == "a"
    world.workers["a"].linked = False
    assert ids_after(world, 95.0) == ""
    world.workers["b"].linked = world.workers["b"].hears = True
    world.come("n")
    assert ids_after(world, 5.0) == "ab", "no other run begins, and all have the time to come back"
    world.pass_time(15.0 * late)
    world.workers["a"].linked = True
    assert ids_after(world, 5.0) == ("b" if late else "a")
    assert world.workers["a" if late else "b"].removed


def test_nobody_reaches_anybody() -> None:
    """As where all ports are closed: nobody is evicted, and all are told that they wait."""
    world = World("abc")
    world.part = set("abc")
    assert ids_after(world, 200.0) == "abc" and world.job is not None
    assert world.job.short is not None
    world.part = set()
    world.pass_time(2.0)
    assert world.job.short is None


@pytest.mark.parametrize("reporting", ["nb", "n"])
def test_a_newcomer_goes_first(reporting: str) -> None:
    """If it and a member do not reach each other."""
    world = World("ab")
    world.come("n")
    world.pass_time(1.0)
    world.take_in("n")
    world.idle = {"n"}
    assert ids_after(world, 1.0) == "abn"
    world.part, world.deaf = {"b", "n"}, {"b"} - set(reporting)
    assert ids_after(world, 40.0) == "ab"


def test_only_a_newcomer_is_left() -> None:
    """It has no state: the run waits for those that have one."""
    world = World("a")
    world.come("n")
    world.pass_time(1.0)
    world.take_in("n")
    world.idle = {"n"}
    world.pass_time(1.0)
    world.kill("a")
    assert ids_after(world, 20.0) == "an" and world.job is not None
    assert world.job.short == (0, 1)


@pytest.mark.fault("joining took longer with every worker that had ever come")
def test_workers_that_have_gone_are_forgotten() -> None:
    world = World("ab")
    for name in "cdef0123456789":
        world.come(name)
        world.kill(name)
        world.pass_time(0.5)
    assert world.job is not None and len(world.job.leases) == 2


@pytest.mark.parametrize("steps", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_all_that_can_happen(steps: int) -> None:
    assert search(steps) > 10**steps
