"""The links of a simulated elastic run: the same units, among the workers that a plan names."""

from __future__ import annotations

import contextvars
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from laconic.errors import LinkError
from laconic.links.calls import Call
from laconic.links.elastic.faults import Plan
from laconic.links.elastic.feed import Feed
from laconic.links.elastic.link import ElasticLink
from laconic.links.elastic.members import nobody
from laconic.links.elastic.polling import Polling
from laconic.links.elastic.relay import RelayError
from laconic.links.elastic.relay_frames import Frame, Snapshot, Start
from laconic.links.elastic.rendezvous import Reporting
from laconic.links.elastic.units import Units
from laconic.links.quorum.polls import CALLS, POLL, Decision, Polls, Standing
from laconic.links.quorum.simulated import VirtualClock
from laconic.links.simulated import SimulatedLink, Stage

current_part: contextvars.ContextVar[tuple[Cast, int] | None] = contextvars.ContextVar(
    "part", default=None
)
"""The simulated run that this thread's worker is in, and its number."""


class EndedError(BaseException):
    """The plan has this worker end here. No ``except Exception`` of a program catches it."""


@dataclass
class Cast:
    """What the workers of one simulated run share. ``feeds``: what each newcomer receives.
    ``donors``: from whom. ``reporting``: the reports of each worker that has attached. ``dealt``:
    whom samples were dealt to last."""

    plan: Plan
    stage: Stage
    feeds: dict[int, list[Frame]] = field(default_factory=dict)
    donors: dict[int, int] = field(default_factory=dict)
    reporting: dict[int, Reporting] = field(default_factory=dict)
    dealt: list[int] = field(default_factory=list)
    dealt_in: tuple[int, bool] = (-1, False)
    """In which unit, and whether to those that begin with it."""
    polls: SimulatedPolls | None = None
    """Where rounds have a quorum."""

    def present(self, serial: int, call: Call) -> list[int]:
        """Those that take part in the unit ``serial`` of ``call``."""
        there = None if self.polls is None else self.polls.present
        return self.plan.present(serial, call) if there is None else there

    def deal(self, members: Sequence[int], serial: int, *, newcomer: bool = False) -> None:
        """Deal the samples to these ``members`` in the unit ``serial``, once all have attached.
        ``newcomer``: one begins with it."""
        when = serial, newcomer
        changed = set(members) != set(self.dealt) and when > self.dealt_in
        if changed and all(w in self.reporting for w in members):
            self.dealt, self.dealt_in = [*members], when
            reports = {str(w): self.reporting[w].report() for w in members}
            for worker in members:
                self.reporting[worker].hear(json.loads(json.dumps(reports)), str(worker))


class _Waiting(NamedTuple):
    """What a worker says in the poll of the unit ``serial``: ``own``. It began to wait at the
    ``time``. The rest is the same on all workers: see `Polling.poll`."""

    own: Standing
    time: float
    serial: int
    active: Sequence[str]
    polls: Polls
    admit: bool


class SimulatedPolls:
    """What the workers share where rounds have a quorum. As in
    `laconic.links.quorum.simulated.SimulatedSyncer`, a round closes only when every worker waits. A
    worker that has not arrived takes part, without a contribution, when it waits next.

    ``present``: who takes part, in a plan in steps; None before the first poll.
    """

    def __init__(self, cast: Cast) -> None:
        self._cast = cast
        self._waiting: dict[int, _Waiting] = {}
        self._serial, self._decided = 0, Decision(CALLS)
        """The latest decision, and in which unit."""
        self._begun: set[int] = set()
        """The newcomers that take part, or did so."""
        self.present: list[int] | None = None
        cast.stage.when_idle.append(self._decide)

    def wait(self, me: int, waiting: _Waiting) -> Decision:
        """Wait, as worker ``me``, for what is decided."""
        stage = self._cast.stage
        if self._serial < waiting.serial:  # else a newcomer begins with it
            self._waiting[me] = waiting
            stage.runnable[me] = False
            stage.pass_turn(me)
            stage.take_turn(me)
        if self._serial != waiting.serial:
            raise stage.error()
        return self._decided

    def _decide(self) -> bool:
        """Decide what is next, if all workers wait. Returns whether there is something."""
        cast, waiting = self._cast, self._waiting
        if not waiting:
            return False
        one = next(iter(waiting.values()))
        present = self._left([int(id) for id in one.active], one.serial)
        if any(worker not in waiting for worker in present):
            return False
        found = self._next({str(worker): waiting[worker] for worker in present})
        if found is None and present:
            return False
        time, self._decided = found or (0.0, Decision(CALLS))  # where none is left, all end
        self._serial = one.serial
        joining = self._joining(one.serial, present) if one.admit else []
        self._begun.update(joining)
        if not cast.plan.recorded:
            self.present = [*present, *joining]
        calls, roster = self._decided.kind == CALLS, self._decided.roster
        for worker in [w for w in present if calls or str(w) in roster] + joining:
            cast.stage.clocks[worker] = time
        for worker in waiting:
            cast.stage.runnable[worker] = True
        waiting.clear()
        return True

    def _left(self, active: Sequence[int], serial: int) -> list[int]:
        """Those of the ``active`` workers that take part in the unit ``serial``."""
        plan, waiting, gone = self._cast.plan, self._waiting, self._cast.stage.left
        active = [worker for worker in active if worker not in gone]
        if plan.recorded:
            return [w for w in active if w in plan.present(serial, POLL)]
        return [w for w in active if w not in waiting or not plan.killed(w, waiting[w].own.step)]

    def _joining(self, serial: int, present: Sequence[int]) -> list[int]:
        """The newcomers that begin with the unit ``serial``, to which a donor sends its state."""
        plan, fed = self._cast.plan, [w for w in self._cast.feeds if w not in self._begun]
        if plan.recorded:
            return [w for w in fed if w in plan.present(serial, POLL)]
        return [w for w in fed if self._cast.donors[w] in present]

    def _next(self, waiting: Mapping[str, _Waiting]) -> tuple[float, Decision] | None:
        """When these workers' next round closes, or call begins, and what is decided then."""
        if not waiting:
            return None
        one, plan = next(iter(waiting.values())), self._cast.plan
        decided = plan.decided(one.serial)
        if decided is not None:
            return max(each.time for each in waiting.values()), decided
        said = {id: each.own._replace(waited=-each.time) for id, each in waiting.items()}
        found = one.polls.next_closing(said)
        if found is None or (plan.recorded and found[1] != CALLS):
            return None
        return found[0], one.polls.close(said, found[1], found[0])


class _Rendezvous:
    """In place of `laconic.links.elastic.rendezvous.Rendezvous`: nothing is ever interrupted, since
    the plan knows beforehand who completes a unit."""

    def __init__(self, cast: Cast, me: int, units: Units) -> None:
        self._cast, self._me, self._units = cast, me, units
        self.link: SimulatedLink | None = None

    @property
    def ids(self) -> list[str]:
        """Those that the unit under way can be among."""
        return [str(worker) for worker in self._present()]

    def _present(self) -> list[int]:
        return self._cast.present(self._units.serial, self._units.call)

    def adopt(self) -> None:
        """Drop the workers that are gone."""
        if self._units.done is None:
            return
        present = self._present()
        if self._me not in present:
            raise EndedError
        self._units.active = [id for id in self._units.active if int(id) in present]
        if not self._units.under_way:
            self.take_part(self._units.active)

    def take_part(self, ids: Sequence[str]) -> None:
        """The unit under way is among the workers ``ids``."""
        self._units.ranks = list(ids)
        workers = [int(id) for id in ids]
        if self._me not in workers:
            return  # a newcomer: it begins with the next call that starts a step's rounds
        self.link = SimulatedLink(self._cast.stage, self._me, workers)
        self.link.begin_digest(self._units.call.digest)

    def drop(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class _Relay:
    """In place of `laconic.links.elastic.relay.Relay`: the ``newcomer`` begins when all frames are
    there."""

    def __init__(self, cast: Cast, newcomer: int) -> None:
        self._cast, self._number = cast, newcomer
        self.newcomer = SimpleNamespace(id=str(newcomer))
        self.ended = False

    def begin(self, snapshot: Snapshot) -> None:
        """See `Relay.begin`."""
        self._cast.feeds[self._number] = [snapshot]

    def put(self, frame: Frame) -> None:
        """See `Relay.put`. After the last frame the newcomer needs nothing."""
        if self.ended:
            return
        self._cast.feeds[self._number].append(frame)

    def flush(self, seconds: float) -> None:
        """See `Relay.flush`. The newcomer begins, and finds that the run has finished."""
        self._cast.stage.runnable[self._number] = True

    def refuse(self, why: str) -> None:
        """See `Relay.refuse`. The plan goes on with the newcomer, so the run ends."""
        raise LinkError(f"worker {self._number} cannot join: {why}")

    def finish(self, start: Start, state: Callable[[], Snapshot] | None) -> None:
        """See `Relay.finish`. The newcomer looks at the state if it needs it."""
        self.put(start)
        if state is not None:
            self.put(state())
        self.ended = True
        self._cast.stage.runnable[self._number] = True


class _Stream:
    """In place of `laconic.links.elastic.relay.Stream`: all ``frames`` are there."""

    moved = math.inf

    def __init__(self, frames: Sequence[Frame]) -> None:
        self._takes_part = any(isinstance(frame, Start) for frame in frames)
        self._frames = iter(frames)

    def receive(self) -> Frame:
        """See `Stream.receive`."""
        frame = next(self._frames, None)
        if frame is None:
            raise RelayError("there is nothing more")
        return frame

    def say(self, word: bytes) -> None:
        """Do nothing; but the run has ended if the plan never has this worker take part."""
        if not self._takes_part:
            raise EndedError

    def close(self) -> None:
        """Do nothing."""


class _Reception:
    """In place of `laconic.links.elastic.reception.Reception`."""

    def __init__(self, cast: Cast, me: int, units: Units) -> None:
        self._cast, self._me, self._units = cast, me, units

    def open(self) -> None:
        """Do nothing."""

    def callers(self, step: int) -> list[_Relay]:
        """The newcomers that the plan has this worker send its state to after ``step`` steps."""
        plan, active = self._cast.plan, [int(id) for id in self._units.active]
        called = [w for w in range(plan.workers) if plan.joins(w) == step]
        called = [w for w in called if plan.donor(w, active) == self._me]
        self._cast.donors.update(dict.fromkeys(called, self._me))
        return [_Relay(self._cast, w) for w in called if w not in self._cast.feeds]

    def call_donor(self, number: int, awake: Callable[[], None]) -> Feed:
        """See `Reception.call_donor`."""
        frames = self._cast.feeds.get(self._me, [])
        if number or not frames:
            raise EndedError  # the run has ended before this worker could take part
        return Feed(_Stream(frames), str(self._cast.donors[self._me]), awake)

    def close(self) -> None:
        """Do nothing."""


class SimulatedElasticLink(ElasticLink):
    """The link of the worker ``me`` of a simulated run."""

    def __init__(self, cast: Cast, me: int, reports: Reporting) -> None:
        units = Units(str(me))
        parts: Any = _Rendezvous(cast, me, units), _Reception(cast, me, units), reports
        super().__init__(nobody(str(me), me + 1), units, *parts, threaded=False)
        self.cast = cast
        cast.reporting[me] = reports
        deals = cast.plan.deals(me)
        self._deals = deals is None
        if deals is not None:
            reports.follow(deals)
        if cast.plan.joins(me) is None:
            self.begin([str(w) for w in cast.plan.present(1, units.call)])
            self.deal([int(id) for id in units.active], 0)
        elif any(isinstance(frame, Start) for frame in cast.feeds.get(me, [])):
            start = next(frame for frame in cast.feeds[me] if isinstance(frame, Start))
            present = cast.present(start.serial, start.call)
            self.deal(present, start.serial, newcomer=True)

    def deal(self, workers: Sequence[int], serial: int, *, newcomer: bool = False) -> None:
        """See `Cast.deal`; a trace has the deals."""
        if self._deals:
            self.cast.deal(workers, serial, newcomer=newcomer)

    def begin_call(self, call: Call, *, wait: bool) -> bool:
        if not self.replaying:  # a plan in steps needs the call to say who is gone
            self.units.call = call
            self.rendezvous.adopt()
            self.rendezvous.take_part(self.units.active)
            self.deal([int(id) for id in self.units.active], self.units.serial)
        return super().begin_call(call, wait=wait)


class SimulatedPolling(Polling):
    """`Polling` where all decisions are those of `SimulatedPolls`."""

    def __init__(self, link: SimulatedElasticLink) -> None:
        super().__init__(link)
        self._simulated = link

    def decide(self, own: Standing, polls: Polls, admit: bool) -> Decision:
        link, units, cast = self._simulated, self.link.units, self._simulated.cast
        shared = cast.polls = cast.polls or SimulatedPolls(cast)
        at = units.serial, list(units.active), polls, admit
        decision = shared.wait(int(units.me), _Waiting(own, -own.waited, *at))
        link.rendezvous.adopt()  # raises if this worker has ended meanwhile
        units.attempt(units.active)
        link.rendezvous.take_part(units.active)
        link.deal([int(id) for id in units.active], units.serial)
        if admit:
            link.admit(POLL)
        return decision

    def clock(self, step: int) -> VirtualClock:
        return VirtualClock(self._simulated.cast.stage, int(self.link.units.me), step)
