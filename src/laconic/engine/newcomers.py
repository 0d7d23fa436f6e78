"""Newcomers of an elastic run: a donor (`laconic.engine.donor`) sends its state, and the newcomer
catches up.

The newcomer loads the donor's state after some step, and `laconic.attach` returns. Its first step
may take minutes, as to compile the model, and the others do not wait for it. When its first
backward pass is complete, it repeats what the donor's rounds have brought since: the same engine
runs the same rounds, over a link that returns what the donor has received
(`laconic.links.elastic.relay`). Outer state is therefore the same as on all workers, bit
for bit. So are the model and the optimizer's state where gradients are averaged in every step;
else the newcomer has the donor's, without the steps since.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from laconic.engine.donor import RESIDUALS, Donor, digest_of, steps_before
from laconic.engine.driver import Driver
from laconic.engine.joint_optimizer import members
from laconic.engine.saved_state import Runner
from laconic.errors import LinkError, after_step
from laconic.links.calls import FINISH, GRADIENTS, Call
from laconic.links.elastic.feed import Feed
from laconic.links.elastic.link import ElasticLink
from laconic.links.elastic.rank_link import RankLink, combined
from laconic.links.elastic.relay import RelayError
from laconic.links.elastic.relay_frames import Frame, Record, Snapshot, Start
from laconic.links.polls import POLL
from laconic.tensors import is_sharded, local, on_mesh_of, reshard, unpacked

log = logging.getLogger("laconic")

RETRY_SECONDS = 0.5
NEAR_SECONDS = 0.1
"""With steps left that take so long to repeat, a newcomer has caught up."""


class Newcomer:
    """A worker that joins a run. ``later``: what it is for others once it takes part. In a worker
    of several ranks, rank 0 hears from the donor, and says what all ranks do next."""

    def __init__(self, driver: Driver, link: ElasticLink | RankLink, later: Donor) -> None:
        self._driver, self._link, self._later = driver, link, later
        self._inside = driver.session.inside
        self._pace = math.inf
        """How many seconds the latest step took to repeat."""
        self._said_ready = False
        """Whether this worker may be in a view: then the others wait for it."""
        self._donors = itertools.count()
        self._feed: Feed | None = None
        """Of the present donor, once it has sent its state."""
        self._snapshot = Snapshot(0, [])
        """That state."""
        self._handles: list[RemovableHandle] = []

    # -- until the first step ----

    def begin(self) -> None:
        """Load the state of a worker of the run. `arrive` follows by itself, at the end of this
        worker's first backward pass, or else in its first step."""
        session = self._driver.session
        self._with_donor(lambda feed: self._load_all(self._snapshot))
        session.wait_as(self)
        for p in session.params():
            if p.requires_grad:
                hook = p.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
                self._handles.append(hook)

    def _on_gradient(self, _: Tensor) -> None:
        Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        # a pass within another one needs the parameters as they are, and one under no_sync()
        # averages nothing: another one follows, or the step
        session, within = self._driver.session, torch._C._current_autograd_node()
        if session.newcomer is not None and session.sync_gradients and not within:
            self.arrive()
            self._driver.run.average_gradients()

    def arrive(self) -> None:
        """Take part from the next step on. The gradients that this worker has computed are those of
        an older model: they become zeros."""
        session = self._driver.session
        session.wait_as(None)
        while self._handles:
            self._handles.pop().remove()
        with_gradients = [p for p in session.params() if p.grad is not None]
        self._with_donor(self._follow)
        self._close_feed()
        for p in with_gradients:
            p.grad = torch.zeros_like(p)
        self._later.open()

    def finish(self) -> None:
        """Load what `Synchronizer.finish` leaves on the workers of the run."""
        self._with_donor(self._follow_to_end)

    def _follow_to_end(self, feed: Feed) -> None:
        finished = False
        while not isinstance(frame := feed.pop(), Start):
            if isinstance(frame, Record):
                finished = finished or frame.call.name == FINISH
            elif finished and isinstance(frame, Snapshot):
                self._snapshot = frame
                self._load_all(frame)
                return
        raise LinkError(
            f"{FINISH} comes before this worker's first step in a plan that has it step"
        )

    def _with_donor(self, work: Callable[[Feed], None]) -> None:
        """Have ``work`` take in what a donor sends after its state. If that donor is lost, again
        with the next one."""
        if self._inside.rank:
            self._follow_rank_0()
            return
        try:
            end = time.monotonic() + self._link.members.wait
            while not self._try_donor(work, end):
                if self._feed is not None:  # it had sent its state
                    end = time.monotonic() + self._link.members.wait
                self._close_feed()
                time.sleep(RETRY_SECONDS)
            self._tell("end")
        except BaseException:
            self._link.close()  # it may be in a view, and the others wait for it
            raise

    def _try_donor(self, work: Callable[[Feed], None], end: float) -> bool:
        reception, wait = self._link.reception, self._link.members.wait
        try:
            if self._feed is None:
                feed = reception.call_donor(next(self._donors), self._link.look)
                snapshot = feed.pop(wait)
                if not isinstance(snapshot, Snapshot):
                    raise RelayError("the donor violates the protocol")
                self._feed, self._snapshot = feed, snapshot
            work(self._feed)
            return True
        except RelayError as error:
            if self._said_ready:
                raise LinkError(
                    f"the worker that sent its state was lost ({error}): start this one again"
                ) from None
            self._recover()
            log.info("a donor was lost (%s): asking another one", error)
            if self._feed is None and time.monotonic() >= end:
                raise LinkError(
                    f"no worker of the run has sent its state within {wait:g} s: {error}"
                ) from None
            return False

    def _recover(self) -> None:
        """Begin again: a donor was lost."""
        self._driver.session.comm.drain()  # a job may have met the error first
        self._driver.session.comm.recover()

    def _close_feed(self) -> None:
        if self._feed is not None:
            self._feed.close()
        self._feed = None

    # -- all ranks of this worker ----

    def _tell(self, what: str, about: Any = None) -> None:
        """On rank 0: the other ranks do the same."""
        self._inside.deal([[what, about]] * self._inside.size)

    def _follow_rank_0(self) -> None:
        """On another rank: do what rank 0 says, until the end."""
        while True:
            what, about = self._inside.deal(None)
            try:
                if what == "load":
                    self._recover()
                    self._load(None)
                elif what == "replay":
                    self._replay(*about)
                elif what == "start":
                    self._start(Start(**{**about, "call": Call(*about["call"])}))
                else:
                    return
            except RelayError:
                self._recover()  # rank 0 begins again

    def _load_all(self, snapshot: Snapshot) -> None:
        self._tell("load")
        self._load(snapshot.state)

    # -- catching up ----

    def _follow(self, feed: Feed) -> None:
        """Take in what ``feed`` brings until this worker takes part."""
        replay = self._link.replay
        replay.feed = None
        self._load_all(self._snapshot)  # the first step may have changed buffers
        replay.feed = feed.record
        while not isinstance(frame := self._next(feed), Start):
            if isinstance(frame, Snapshot):
                feed.pop()
                self._load_all(frame)
                continue
            assert isinstance(frame, Record), "settings were taken out"
            run, step = self._driver.run, steps_before(frame.call)
            if run.quorum is not None and frame.call[:2] == POLL[:2] and frame.outputs:
                run.quorum.follow()
                continue
            rounds = {GRADIENTS, *(running.round.name for running in run.rounds)}
            if frame.call.name in rounds and step >= self._driver.session.step:
                begun = time.perf_counter()
                averaged = run.averages_gradients(step + 1)
                groups = feed.settings_of(step) if averaged else None
                self._tell("replay", [step, groups])
                self._replay(step, groups)
                if feed.waiting:  # else it has waited for a frame
                    self._pace = time.perf_counter() - begun
            else:
                feed.pop()
                replay.note(frame)
        feed.pop()
        self._tell("start", {**vars(frame), "call": list(frame.call)})
        self._start(frame, feed)
        self._link.units.note({"donor": feed.donor, "step": feed.first_step})

    def _next(self, feed: Feed) -> Frame:
        """The next frame. Where none has come, or so few that the others can wait for them, this
        worker has caught up, and says so."""
        if not self._said_ready and (feed.idle() or feed.waiting * self._pace <= NEAR_SECONDS):
            self._said_ready = True
            feed.say_ready()
        return feed.peek()

    def _load(self, states: Sequence[Tensor] | None) -> None:
        """Load a donor's ``states``, which rank 0 has for all ranks, as from a checkpoint: see
        `Donor`."""
        session, state = self._driver.session, unpacked(self._inside.deal(states))
        reshard(session.model)
        sharded = [p for p in session.params() if is_sharded(p)]
        if sharded:
            state = on_mesh_of(state, sharded[0])
        world, workers = session.world, session.workers.size  # those of the donor's latest unit
        here = {"ranks": world.size, "workers": workers, "rank": world.rank}
        sync = {**state["sync"], **here, "in_step": False, "stepped": []}
        try:
            session.model.load_state_dict(state["model"])
            session.bound.load_state_dict(state["optimizer"])
            self._driver.load([sync], alone=True)
        except (RuntimeError, ValueError) as error:
            raise LinkError(f"the state of another worker cannot be loaded: {error}") from error
        for running in self._driver.run.rounds:
            if running.round.exchange.out_degree is not None:
                running.in_flight.clear()
        self._load_others(state["others"])

    def _load_others(self, data: Tensor | None) -> None:
        for name, state in ({} if data is None else unpacked(data)).items():
            self._later.others[name].load_state_dict(state)

    def _replay(self, step: int, groups: list[dict[str, Any]] | None) -> None:
        """Repeat the step after ``step`` steps. ``groups``: the numbers in the optimizer's
        parameter groups then, if its gradients were averaged."""
        session = self._driver.session
        self._skip_to(step)
        if groups is not None:
            self._use(groups)
            for p in session.params():  # nothing is sent of a shard without elements
                p.grad = None if local(p).numel() else torch.zeros_like(p)
        if groups is None or _needs_closure(session.bound):  # `Start` brings what that step gives
            self._driver.advance()
        else:
            for each in members(session.bound):
                each.step()  # its hook averages: the gradients of the donor
        session.comm.drain()  # delayed rounds take their records in the communication thread

    def _skip_to(self, steps: int) -> None:
        """Count steps in which there was no round."""
        while self._driver.session.step < steps:
            self._driver.advance()
            self._driver.session.comm.drain()

    def _use(self, groups: list[dict[str, float]]) -> None:
        optimizer = self._driver.session.bound
        for group, numbers in zip(optimizer.param_groups, groups, strict=True):
            for name, number in numbers.items():
                if isinstance(value := group.get(name), Tensor):
                    value.fill_(number)
                else:
                    group[name] = number

    def _start(self, start: Start, feed: Feed | None = None) -> None:
        """Take part from the unit on that ``start`` names. ``feed``: on rank 0."""
        quorum = self._driver.run.quorum
        if quorum is None:
            self._skip_to(steps_before(start.call))
        session = self._driver.session
        own = self._inside.gather(digest_of(session) if start.digest else 0)
        if start.digest != (combined(own) if own[1:] else own[0]):
            log.info("the repeated steps gave another result: this worker gets the state again")
            self._load(None if feed is None else feed.ask_for_state().state)
        if quorum is None:
            self._use(start.groups)
        self._load_others(start.others)
        run = self._driver.run
        for running in run.rounds:
            running.present = start.present
            weight = running.round.update.weight
            for channel in running.channels:
                if weight is not None:
                    channel.state[weight].fill_(1.0)
        runners: list[Runner] = [*run.rounds, *run.gradients]
        for state in (channel.exchange_state for each in runners for channel in each.channels):
            for name in state.keys() & RESIDUALS:
                state[name].zero_()
        self._link.take_part_from(start)
        if quorum is not None:
            quorum.start()
        for p in session.params():
            p.grad = None
        log.info("caught up %s", after_step(session.step))


def _needs_closure(optimizer: Optimizer) -> bool:
    """Whether its ``step`` computes gradients itself, as that of LBFGS does. Several optimizers
    refuse that."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
