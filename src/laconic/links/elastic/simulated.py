"""The links of a simulated elastic run: the same units, among the workers that a plan names."""

from __future__ import annotations

import contextvars
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from laconic.errors import LinkError
from laconic.links.calls import Call
from laconic.links.elastic.faults import Plan
from laconic.links.elastic.feed import Feed
from laconic.links.elastic.link import ElasticLink
from laconic.links.elastic.members import nobody
from laconic.links.elastic.relay import RelayError
from laconic.links.elastic.relay_frames import Frame, Snapshot, Start
from laconic.links.elastic.rendezvous import Reporting
from laconic.links.elastic.units import Units
from laconic.links.polls import CALLS, Decision
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
    present_now: list[int] | None = None
    """Where rounds have a quorum: who takes part, in a plan in steps, since the latest poll."""
    polled_in: int = 0
    """In which unit that was, and the ``decision`` of it; ``begun``: the newcomers that take part,
    or did so."""
    decision: Decision = field(default_factory=lambda: Decision(CALLS))
    begun: set[int] = field(default_factory=set)

    def present(self, serial: int, call: Call) -> list[int]:
        """Those that take part in the unit ``serial`` of ``call``."""
        if self.present_now is not None:
            return self.present_now
        return self.plan.present(serial, call)

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


class _Planned:
    """In place of `Rendezvous` and `Reception`: nothing is ever interrupted, since the plan knows
    beforehand who completes a unit, and who is a newcomer's donor."""

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

    def callers(self, step: int) -> list[_Relay]:
        """The newcomers that the plan has this worker send its state to after ``step`` steps."""
        plan, active = self._cast.plan, [int(id) for id in self._units.active]
        called = [w for w in range(plan.workers) if plan.joins(w) == step]
        called = [w for w in called if plan.donor(w, active) == self._me]
        self._cast.donors.update(dict.fromkeys(called, self._me))
        return [_Relay(self._cast, w) for w in called if w not in self._cast.feeds]

    def call_donor(self, number: int, look: Callable[[], None]) -> Feed:
        """See `Reception.call_donor`."""
        frames = self._cast.feeds.get(self._me, [])
        if number or not frames:
            raise EndedError  # the run has ended before this worker could take part
        stream: Any = _Stream(frames)
        return Feed(stream, str(self._cast.donors[self._me]), look)

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

    moved = most_waiting = math.inf

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


class SimulatedElasticLink(ElasticLink):
    """The link of the worker ``me`` of a simulated run."""

    threaded = False

    def __init__(self, cast: Cast, me: int, reports: Reporting) -> None:
        units = Units(str(me))
        planned: Any = _Planned(cast, me, units)
        super().__init__(nobody(str(me), me + 1), units, planned, planned, reports)
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
