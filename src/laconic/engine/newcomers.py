"""Newcomers of an elastic run: a donor sends its state, and the newcomer catches up.

The newcomer loads the donor's state after some step. Then it repeats what the donor's rounds have
brought since: the same engine runs the same rounds, over a link that returns what the donor has
received (`laconic.links.elastic.relay`). Outer state is therefore the same as on all workers, bit
for bit. So are the model and the optimizer's state where gradients are averaged in every step;
else the newcomer has the donor's, without the steps since.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from typing import Any

import torch

from laconic.algorithms.exchange import Gossip
from laconic.engine.driver import Driver
from laconic.errors import LinkError
from laconic.links.calls import GRADIENTS, Call
from laconic.links.elastic.link import ElasticLink
from laconic.links.elastic.relay import (
    Frame,
    Record,
    RelayError,
    Service,
    Snapshot,
    Start,
    StepSettings,
    Stream,
    call_donor,
    numbers_of,
)

log = logging.getLogger("laconic")

RETRY_SECONDS = 0.5


class Donor:
    """Sends the state of ``driver`` to newcomers that ask for it."""

    def __init__(self, driver: Driver, link: ElasticLink) -> None:
        self._driver, self._link = driver, link
        self._service = Service(link.service, link.members.secret, link.members.add)
        self._leaving = False
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._leave)

    def _leave(self, *_: object) -> None:
        log.info("SIGTERM: this worker leaves after the present step")
        self._leaving = True

    def before_step(self) -> None:
        """Send the settings of the step that begins."""
        optimizer = self._driver.session.optimizer
        if self._link.relays and optimizer is not None:
            groups = numbers_of(optimizer.param_groups)
            for relay in self._link.relays:
                relay.put(StepSettings(self._driver.session.step, groups))

    def after_step(self) -> None:
        """Between two steps: begin to send to the newcomers that have called; leave the run if
        this process is to end."""
        if self._leaving:
            self._driver.session.comm.drain()
            self._link.members.leave()
            self._link.close()
            raise SystemExit(0)
        while not self._service.waiting.empty():
            relay = self._service.waiting.get()
            snapshot = Snapshot(self._state())
            self._link.relays.append(relay)
            relay.begin(snapshot)
            log.info("sending the state after step %d to a newcomer", self._driver.session.step)

    def _state(self) -> dict[str, Any]:
        session = self._driver.session
        session.comm.drain()
        assert session.optimizer is not None, "bound from the start"
        model = {k: v.detach().clone() for k, v in session.model.state_dict().items()}
        state = {"model": model, "optimizer": _copied(session.optimizer.state_dict())}
        return {**state, "sync": self._driver.state_dict()}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(item) for item in value]
    return value


class _Feed:
    """The frames of one donor, read by a thread, and taken by the engine in their order."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._frames: queue.SimpleQueue[Frame | RelayError] = queue.SimpleQueue()
        self._seen: list[Frame] = []
        self.settings: dict[int, list[dict[str, float]]] = {}
        threading.Thread(target=self._read, daemon=True, name="laconic-feed").start()

    def _read(self) -> None:
        try:
            while True:
                frame = self._stream.receive()
                self._frames.put(frame)
                if isinstance(frame, Start):
                    return
        except RelayError as error:
            self._frames.put(error)

    def idle(self) -> bool:
        """Whether all frames that have come were taken."""
        return not self._seen and self._frames.empty()

    def wait(self) -> None:
        """Take in the next frame."""
        frame = self._frames.get()
        if isinstance(frame, RelayError):
            raise frame
        if isinstance(frame, StepSettings):
            self.settings[frame.step] = frame.groups
        else:
            self._seen.append(frame)

    def peek(self) -> Frame:
        """The next frame that is no settings."""
        while not self._seen:
            self.wait()
        return self._seen[0]

    def pop(self) -> Frame:
        """Take that frame."""
        frame = self.peek()
        self._seen.pop(0)
        return frame

    def record(self, call: Call) -> Record:
        """The next unit of ``call``."""
        while True:
            frame = self.peek()
            if not isinstance(frame, Record):
                raise RelayError(f"the donor has sent nothing for {call}")
            self.pop()
            if frame.call[:2] == call[:2]:
                return frame


class Newcomer:
    """Catches up with a run, in front of the first step of this worker."""

    def __init__(self, driver: Driver, link: ElasticLink) -> None:
        self._driver, self._link = driver, link
        self._said_ready = False
        """Whether this worker may be in a view: then the others wait for it."""

    def catch_up(self) -> None:
        """Return when this worker takes part from the next step on."""
        members = self._link.members
        end, number = time.monotonic() + members.rules.wait, 0
        while True:
            latest = members.registry.latest() or members.view
            donor = latest.members[number % len(latest.members)]
            number += 1
            try:
                stream = call_donor(donor, members.secret, members.me)
                try:
                    self._follow(_Feed(stream), stream)
                    return
                finally:
                    stream.close()
            except RelayError as error:
                if self._said_ready:
                    self._link.leave(broken=True)
                    raise LinkError(
                        f"the worker that sent its state was lost ({error}): start this one again"
                    ) from None
                log.info("a donor was lost (%s): asking another one", error)
                if time.monotonic() >= end:
                    raise LinkError(
                        f"no worker of the run has sent its state within {members.rules.wait:g} s: "
                        f"{error}"
                    ) from None
                time.sleep(RETRY_SECONDS)

    def _follow(self, feed: _Feed, stream: Stream) -> None:
        self._link.replay.feed = None
        snapshot = feed.pop()
        if not isinstance(snapshot, Snapshot):
            raise RelayError("the donor violates the protocol")
        self._load(snapshot.state)
        self._link.replay.feed = feed.record
        names = {running.round.name for running in self._driver.run.rounds}
        while True:
            if feed.idle() and not self._said_ready:
                self._said_ready = True
                stream.say_ready()
                self._link.members.expect()
            frame = feed.peek()
            if isinstance(frame, Start):
                self._start(frame, feed)
                return
            assert isinstance(frame, Record), "one snapshot, and settings were taken out"
            if frame.call.name == GRADIENTS or frame.call.name in names:
                self._replay(frame.call, feed)
            else:
                feed.pop()

    def _load(self, state: dict[str, Any]) -> None:
        driver, session = self._driver, self._driver.session
        session.model.load_state_dict(state["model"])
        assert session.optimizer is not None, "bound from the start"
        session.optimizer.load_state_dict(state["optimizer"])
        own = {**state["sync"], "ranks": 1, "workers": 1, "rank": 0}
        problem = driver.load_here(own)
        if problem is not None:
            raise LinkError(f"the state of another worker cannot be loaded: {problem}")
        for running in driver.run.rounds:
            if isinstance(running.round.exchange, Gossip):
                running.in_flight.clear()

    def _replay(self, call: Call, feed: _Feed) -> None:
        """Repeat the step that ``call`` belongs to."""
        session, run = self._driver.session, self._driver.run
        self._skip_to(_steps_before(call))
        step = session.step + 1
        assert session.optimizer is not None, "bound from the start"
        if any(gradients.round.when(step) for gradients in run.gradients):
            while session.step not in feed.settings:
                feed.wait()
            self._use(feed.settings.pop(session.step))
            session.optimizer.zero_grad()
            session.optimizer.step()  # its hook averages the gradients: those of the donor
        else:
            self._driver.advance()
        session.comm.drain()  # delayed rounds take their records in the communication thread

    def _skip_to(self, steps: int) -> None:
        """Count steps in which there was no round."""
        while self._driver.session.step < steps:
            self._driver.advance()
            self._driver.session.comm.drain()

    def _use(self, groups: list[dict[str, float]]) -> None:
        optimizer = self._driver.session.optimizer
        assert optimizer is not None, "bound from the start"
        for group, numbers in zip(optimizer.param_groups, groups, strict=True):
            group.update(numbers)

    def _start(self, start: Start, feed: _Feed) -> None:
        """Take part from the unit on that ``start`` names."""
        self._skip_to(_steps_before(start.call))
        latest = max(feed.settings, default=None)
        if latest is not None:
            self._use(feed.settings[latest])
        run = self._driver.run
        channels = [c for r in run.rounds for c in r.channels]
        channels += [c for g in run.gradients for c in g.channels]
        for channel in channels:
            for name in ("residual", "lag"):
                if name in channel.exchange_state:
                    channel.exchange_state[name].zero_()
        for running in self._driver.run.rounds:
            weight = running.round.update.weight
            for channel in running.channels:
                if weight is not None:
                    channel.state[weight].fill_(1.0)
        self._link.take_part_from(start)
        session = self._driver.session
        for p in session.params():
            p.grad = None
        log.info("caught up after step %d", session.step)


def _steps_before(call: Call) -> int:
    """How many steps were complete before the step that ``call`` belongs to."""
    return call.step if call.name == GRADIENTS else call.step - 1
