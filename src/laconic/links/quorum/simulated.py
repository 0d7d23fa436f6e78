"""Ports of simulated workers: arrivals follow a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from laconic.links.quorum.port import Closing, Delivery, Outcome
from laconic.links.quorum.syncer import Syncer
from laconic.links.quorum.tcp import Clock
from laconic.links.simulated import SimulatedLink, Stage


class SimulatedSyncer:
    """What the simulated workers of one set share. Each worker's virtual time advances by its
    seconds per step, and its messages arrive after its message time. A round closes only when every
    worker waits, because then all arrival times are known."""

    def __init__(self, stage: Stage, core: Syncer) -> None:
        self.stage, self.core = stage, core
        self.failure: BaseException | None = None
        stage.when_idle.append(self.close_next)

    def __str__(self) -> str:
        return self.core.waiting()

    def close_next(self) -> bool:
        """Close the round with the earliest closing time. Returns whether there was one."""
        for rank in self.stage.left:
            self.core.leave(rank)
        found = self.core.next_closing()
        if found is None:
            return False
        time, kind = found
        try:
            roster = self.core.close(kind, time)
        except Exception as error:  # every worker raises it
            self.failure = error
            self.stage.when_idle.remove(self.close_next)
            self.stage.runnable = [r not in self.stage.left for r in range(self.core.workers)]
            return True
        for rank in roster:
            self.stage.clocks[rank] = time
            self.stage.runnable[rank] = True
        return True


class VirtualClock(Clock):
    """The virtual time of worker ``me``. ``step``: how many steps it has taken so far."""

    def __init__(self, stage: Stage, me: int, step: int) -> None:
        self.stage, self._me, self._step = stage, me, step

    def seconds(self, step: int) -> float:
        """See `Port.seconds`."""
        return self.stage.clocks[self._me] + (step - self._step) * self.stage.step_seconds[self._me]

    def worked(self, step: int, waited: float) -> float:
        """See `Port.worked`."""
        return step * self.stage.step_seconds[self._me]

    def restart(self, step: int) -> None:
        """See `Port.restart`."""
        self._step = step

    def advance(self, step: int) -> float:
        """This worker has taken ``step`` steps. Returns the time."""
        now = self.stage.clocks[self._me] = self.seconds(step)
        self._step = step
        return now

    def arrive(self, step: int) -> float:
        """See `Clock.arrive`: the message takes some time to come."""
        return self.advance(step) + self.stage.message_seconds[self._me]

    def waited(self, since: float) -> float:
        """See `Clock.waited`. It is not known yet at which time the worker goes on: at 0."""
        return -since


class SimulatedPort(VirtualClock):
    """The port of worker ``me``."""

    def __init__(self, shared: SimulatedSyncer, me: int, step: int) -> None:
        super().__init__(shared.stage, me, step)
        self._shared = shared

    @property
    def closings(self) -> list[Closing]:
        return self._shared.core.closings if self._me == 0 else []

    @property
    def served(self) -> tuple[int, int]:
        return self._shared.core.served if self._me == 0 else (0, 0)

    def quiet(self) -> AbstractContextManager[object]:
        return nullcontext()  # only one worker runs at a time

    def deliver(self, delivery: Delivery) -> Outcome:
        shared, stage = self._shared, self._shared.stage
        if stage.failure is not None:
            raise stage.error()
        now = self.advance(delivery.announcement.step)
        sending = stage.message_seconds[self._me]
        shared.core.arrive(self._me, delivery, now + sending, sending)
        stage.runnable[self._me] = False
        stage.pass_turn(self._me)
        stage.take_turn(self._me)
        outcome = shared.core.outcomes.pop(self._me, None)
        if outcome is None:
            raise shared.failure or stage.error()
        return outcome

    def meet(self, step: int) -> None:
        together = self._shared.core.meet(self._me, self.advance(step))
        if together is not None:
            self._shared.stage.clocks[:] = [together] * self._shared.core.workers

    def close(self) -> None:
        self._shared.core.leave(self._me)

    def abandon(self) -> None:
        """Does nothing: the stage sees workers end."""


def open_simulated(link: SimulatedLink, step: int, make: Callable[[], Syncer]) -> SimulatedPort:
    """The port of this worker. Rank 0's ``make`` makes the syncer."""
    key = link.members, link.ports
    link.ports += 1
    syncers = link.stage.syncers
    if link.rank == 0:
        syncers[key] = SimulatedSyncer(link.stage, make())
    link.gather(torch.zeros(1))  # rank 0 comes first
    shared = syncers[key]
    assert isinstance(shared, SimulatedSyncer), "the stage holds nothing else"
    return SimulatedPort(shared, link.me, step)
