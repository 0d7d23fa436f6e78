"""A worker of an elastic run sends its state to newcomers, and leaves on SIGTERM."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from laconic.engine import loading
from laconic.engine.driver import Driver
from laconic.engine.saved_state import Stateful, checksum
from laconic.engine.session import Session
from laconic.errors import LinkError, after_step, when_uncaught
from laconic.links.calls import GRADIENTS, Call
from laconic.links.elastic.link import ElasticLink, Settings
from laconic.links.elastic.rank_link import RankLink
from laconic.links.elastic.relay import Relay, numbers_of
from laconic.links.elastic.relay_frames import Snapshot, StepSettings
from laconic.tensors import packed

log = logging.getLogger("laconic")

RESIDUALS = "residual", "lag"
"""What a worker has left out of its own messages, in the state of an exchange. A newcomer has left
out nothing."""
LEFT = 128 + signal.SIGTERM
"""The exit code of a worker that has left on SIGTERM: for supervisors it has not finished."""
_Settings = tuple[list[dict[str, Any]], Tensor]
"""The numbers in the optimizer's parameter groups, and the state of the user's objects."""


class PolicyState(NamedTuple):
    """The state that a newcomer's policy continues from, as that of one of the user's objects: see
    `Policy.handover` and `Policy.take_over`."""

    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], None]


class Donor:
    """Sends the state of ``driver`` to newcomers that ask for it, with that of the ``others``, the
    user's objects and the policy. In a worker of several ranks, rank 0 does so for all, and all
    leave together."""

    def __init__(
        self, driver: Driver, link: ElasticLink | RankLink, others: Mapping[str, Stateful]
    ) -> None:
        self._driver, self._link = driver, link
        self.others, self._inside = others, driver.session.inside
        self._settings: dict[int, _Settings] = {}
        """By the number of steps before the one that begins with them."""
        self._rounds = 0
        self._leaving = False
        self._process = os.getpid()
        driver.on("failure", self._failed)
        main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGTERM)
        former = getattr(before, "__self__", None)  # of a run that this process has left
        free = before is signal.SIG_DFL or (isinstance(former, Donor) and not former.needed)
        if main and free:
            signal.signal(signal.SIGTERM, self._leave)

    @property
    def needed(self) -> bool:
        """Whether other workers may wait for this one."""
        taking_part = self._driver.attached and not self._link.replaying
        # a forked child has this object, too
        return taking_part and not self._link.members.ended and os.getpid() == self._process

    def open(self) -> None:
        """This worker takes part from now on, and sends newcomers its state."""
        driver, link = self._driver, self._link
        link.settings = self._settings_for
        driver.on("step begins", self._before_step)
        driver.on("step ended", self._after_step)
        driver.on("finish", self._after_finish)
        driver.on("switch", self._send_state)

    def _leave(self, *_: object) -> None:
        if self._leaving or not self.needed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        log.info("SIGTERM: this worker leaves after the present step")
        self._leaving = True
        # the signal may have ended the processes of a DataLoader, too: its handler raises that
        # wherever this thread is, and its iterator, when no batch is left
        signal.signal(signal.SIGCHLD, lambda *_: None)
        when_uncaught(self._failed)

    def _failed(self, error: BaseException) -> None:
        """The training has ended by ``error``. After SIGTERM this worker leaves all the same."""
        leaves = self._leaving and self._inside.size == 1  # other ranks would have to leave, too
        if leaves and isinstance(error, Exception) and not isinstance(error, LinkError):
            log.warning("after SIGTERM: %s: %s", type(error).__name__, error)
            self._leave_run()

    def _before_step(self) -> None:
        """Send the settings of the step that begins."""
        if not self._link.relays or self._driver.run.quorum is not None:
            self._settings.clear()
            return
        step, begun = self._driver.session.step, self._link.units.call.step
        for old in [s for s in self._settings if s < begun - 1]:
            del self._settings[old]
        others = self._read_others()
        if others is None:
            return
        self._settings[step] = numbers_of(self._driver.session.bound.param_groups), others
        for relay in list(self._link.relays):
            relay.put(StepSettings(step, self._settings[step][0]))

    def _read_others(self) -> Tensor | None:
        """The state of the user's objects. If it cannot be read, this worker's training goes on,
        and newcomers are refused."""
        try:
            return packed({name: each.state_dict() for name, each in self.others.items()})
        except LinkError:  # of auto(), which waits for what workers compare
            raise
        except Exception:  # anything, of the user's objects
            log.exception("the state of others= cannot be read, so no worker can join")
            for relay in self._link.relays:
                relay.refuse(
                    "the worker that sends its state cannot read the state of others=, and has the "
                    "error in its output"
                )
            return None

    def _settings_for(self, call: Call) -> tuple[Settings, Callable[[], Snapshot] | None]:
        """See `ElasticLink.settings`. In the communication thread. In front of a gradient round the
        step has not begun, and nothing changes the state. All workers have the same then, and a
        newcomer that has another asks for it: gradients may have been changed (clipped) after they
        were averaged."""
        session, run = self._driver.session, self._driver.run
        if run.quorum is not None:  # a newcomer goes on from the step after which it was sent x
            return (0, [], None), None
        if call.name != GRADIENTS:
            return (0, *self._settings[steps_before(call)]), None

        def state() -> Snapshot:  # a relay calls it, in its own thread
            with session.comm.on_stream_of_jobs():
                return Snapshot(session.step, [self._state(loading.state_dict(run))])

        settings = numbers_of(session.bound.param_groups), self._read_others()
        return (digest_of(session), *settings), state

    def _after_step(self) -> None:
        """Between two steps: begin to send to the newcomers that have called; leave the run if
        this process is to end."""
        session, rounds = self._driver.session, self._driver.rounds_done
        began = rounds > self._rounds or self._driver.run.averages_gradients(session.step)
        self._rounds = rounds
        self._link.reports.after_step(session.comm.latest() if began else None)
        reception, inside = self._link.reception, self._inside
        callers = [] if self._leaving else reception.callers(session.step)
        left, called = inside.any(self._leaving, bool(callers))
        if left:
            with self._driver.run.quiet():
                self._leave_run()
        if called:
            with self._driver.run.quiet():
                self._answer(callers)

    def _answer(self, callers: Sequence[Relay]) -> None:
        """Begin to send the state to the newcomers that have called."""
        snapshot, step = self._snapshot(), self._driver.session.step
        for relay in callers:
            self._link.relays.append(relay)
            relay.begin(snapshot)
            log.info("sending the state %s to a newcomer", after_step(step))

    def _leave_run(self) -> None:
        self._driver.session.comm.drain()
        self._driver.run.close()
        self._link.reports.finish(mean=False)
        self._link.members.leave()
        self._inside.say()  # the other ranks end after rank 0 has left
        self._link.close()
        raise SystemExit(LEFT)

    def _after_finish(self, mean: bool) -> None:
        self._link.reports.finish(mean=mean)
        self._send_state()
        for relay in self._link.relays:
            relay.flush(self._link.members.limit)

    def _send_state(self) -> None:
        """Newcomers repeat rounds only: they begin again with the state that `finish` or a change
        of recipe has left."""
        if self._inside.any(bool(self._link.relays))[0]:
            snapshot = self._snapshot()
            for relay in self._link.relays:
                relay.put(snapshot)

    def _snapshot(self) -> Snapshot:
        """The state of all ranks, on rank 0, as between two steps."""
        own = self._state(self._driver.state_dict(), self._read_others())
        return Snapshot(self._driver.session.step, self._inside.collect(own))

    def _state(self, sync: dict[str, Any], others: Tensor | None = None) -> Tensor:
        """The state of this rank, with that of the synchronizer and the user's objects."""
        session = self._driver.session
        leave_out_residuals(sync)
        state = {"model": session.model.state_dict(), "optimizer": session.bound.state_dict()}
        return packed({**state, "sync": sync, "others": others})


def leave_out_residuals(sync: Mapping[str, Any]) -> None:
    """Take out of the state ``sync`` what a newcomer begins without: residuals, and, with a quorum,
    the results from which this worker has started."""
    for saved in (*sync["rounds"], *sync["gradients"]):
        for carried in saved["carried"]:
            for name in RESIDUALS:
                carried.pop(name, None)
    if sync["quorum"] is not None:  # it starts from the anchor
        given = sync["quorum"]
        given["bases"] = [[None] * len(each) for each in given["bases"]]


def digest_of(session: Session) -> int:
    """Differs if any bit of the parameters or of the optimizer's state differs; not 0."""
    states = session.bound.state
    own = [states.get(p, {}) for p in session.params()]
    tensors = [t for state in own for _, t in sorted(state.items()) if isinstance(t, Tensor)]
    return checksum([*session.params(), *tensors])


def steps_before(call: Call) -> int:
    """How many steps were complete before the step that ``call`` belongs to."""
    return call.step if call.name == GRADIENTS else call.step - 1
