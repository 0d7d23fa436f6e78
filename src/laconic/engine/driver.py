"""Drives a recipe run: binds it to an optimizer, and runs what follows each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from laconic.algorithms.round import Recipe, recipe_text
from laconic.device import refuse_capture
from laconic.engine import loading
from laconic.engine.consensus import ScalerAlignment, switched
from laconic.engine.drift import DriftCheck
from laconic.engine.ending import Ending
from laconic.engine.joint_optimizer import JointOptimizer, StepHooks, has_closure, listen
from laconic.engine.loading import LoadModel
from laconic.engine.recipe_run import RecipeRun, check_alike
from laconic.engine.saved_state import Saved
from laconic.engine.session import Session, Sets, Settings
from laconic.links.comm_thread import EXIT_SECONDS

Event = Literal["step begins", "step ended", "finish", "switch", "failure"]
"""Before the optimizer's step; after all of its rounds; after `Synchronizer.finish`, with ``mean``;
after a change of recipe; and, with the error that has ended the training, before the other ranks
hear of it."""
OWN_CLOSURE = (
    "the optimizer's step() makes a closure and passes it to its parent's step(): laconic has "
    "averaged the gradients before it. Pass the closure to optimizer.step(), or attach a recipe "
    "that averages parameters"
)
NOT_AVERAGED = (
    "sync.no_sync() was around all backward passes of the closure that optimizer.step() calls: the "
    "optimizer uses their gradients before laconic could average them. Leave the last pass, and "
    "the step, outside"
)


class Driver:
    """Runs the rounds of a recipe for one model and optimizer.

    In each step ``backward()`` runs the gradient rounds, ``optimizer.step()`` moves x, and the
    optimizer's post-step hook counts the step and then, round by round in recipe order, folds what
    is due and sends what is due.

    Every front end builds one in the same way, from a model, a recipe, the links by set of ranks,
    and `Settings`. One that knows its optimizer later calls `bind`, and one whose ``settings`` are
    not ``hooked`` calls `advance` after every step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        recipe: Recipe,
        sets: Sets,
        settings: Settings,
    ) -> None:
        self.session = session = Session(model, sets, settings, lambda: self.run.before_call())
        self.facade: object = None
        """The `Synchronizer`, which the optimizer's hooks keep alive by this reference."""
        self.alignment = ScalerAlignment(session)
        self._handles: list[StepHooks] = []
        self.rounds_done = 0
        self._listeners: list[tuple[Event, Callable[..., None]]] = []
        self._closure = False
        """Whether a closure computes this step's gradients."""
        if optimizer is not None:
            session.bind(optimizer)
        self.ending = Ending()
        drift = DriftCheck(session)
        self.run = RecipeRun(session, recipe, drift)
        try:
            check_alike(self.run)
            if session.policy is not None:
                session.policy.start(session)
                if session.policy.recipe != recipe:
                    self.run = RecipeRun(session, session.policy.recipe, drift)
                    check_alike(self.run)
            session.share(session.state())
            session.note_order()
            self.run.start_gradient_rounds()
            if optimizer is not None:
                self.run.start()
                self._listen(optimizer)
        except BaseException:
            self.run.detach()  # else its hooks would average the gradients of the next attempt
            session.comm.close()
            raise
        session.status("computing")

    # -- the optimizer ----

    def bind(self, optimizer: Optimizer) -> None:
        """Run the parameter rounds from now on, on ``optimizer``'s parameters, which still hold the
        common start. No communication: the ranks must compare what they have bound before any
        round."""
        assert self.session.optimizer is None, "an optimizer is bound once"
        self.session.bind(optimizer)
        self.run.start()
        self._listen(optimizer)

    def follow(self, optimizer: Optimizer) -> None:
        """Let ``optimizer``, which moves the same parameters, replace the bound one."""
        self.session.follow(optimizer)
        self._listen(optimizer)

    def _listen(self, optimizer: Optimizer) -> None:
        self._ignore()
        hooked = self.session.settings.hooked  # otherwise `advance` runs what follows a step
        after = self._after_step if hooked else lambda *_: None
        self._handles = listen(optimizer, self._before_optimizer, after, watch=hooked)

    def _ignore(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    # -- events ----

    def on(self, event: Event, listener: Callable[..., None]) -> None:
        """Call ``listener`` at each ``event``, from now on."""
        self._listeners.append((event, listener))

    def tell(self, event: Event, *about: Any) -> None:
        """Call those of ``event``."""
        for listener in [each for kind, each in self._listeners if kind == event]:
            listener(*about)

    # -- one step ----

    def _before_optimizer(self, _: Optimizer, args: tuple[Any, ...], options: Any) -> None:
        self.begin_step(closure=has_closure(args, options))

    @torch.no_grad()
    def begin_step(self, closure: bool) -> None:
        """Prepare a step of the optimizer. With a ``closure`` its gradients are still to come."""
        session = self.session
        refuse_capture(session.device, "optimizer.step()")
        session.refuse_in_consensus("optimizer.step()")
        session.check_complete()
        if session.newcomer is not None:
            session.newcomer.arrive()
        run = self.run
        run.take_in()
        had_closure, self._closure = self._closure, closure or (session.in_step and self._closure)
        if closure:
            if run.averages_gradients(session.step + 1):
                if session.in_step and not had_closure:
                    raise ValueError(OWN_CLOSURE)
                if not session.sync_gradients:
                    raise ValueError(NOT_AVERAGED)
            run.refresh(keep=True)
        else:
            if session.step == 0:
                session.note_first_gradients()
            run.average_gradients()
        if session.in_step:  # it raised, or takes several steps that count as one
            return
        if not closure:
            run.check_gradients()
        session.begin_step()
        self.tell("step begins")
        run.before_step(session.step + 1)

    @torch.no_grad()
    def _after_step(self, *_: object) -> None:
        session, run = self.session, self.run
        rounds = session.at_work(f"the rounds after step {session.step + 1}")
        with rounds if run.quorum is None else nullcontext():  # a quorum is waited for again
            self._count()
            self.ending.missing = False  # where a round fails, nobody can call `finish`
            run.scores.after_step()
            run.pull()
            with session.timing_rounds():
                self.rounds_done += run.communicate()
            self.ending.missing = run.differ and not run.leaves_equal(session.step)
            if session.settings.buffers == "broadcast":
                session.share_buffers()
        run.drift.after_step()
        session.recorder.after_step()
        policy, elastic = session.policy, session.elastic
        follows = elastic is not None and elastic.replaying  # its donor decides
        if policy is not None and not follows and policy.after_step():
            session.call("switch()")
            self.switch(policy.recipe)
        self.tell("step ended")

    def advance(self) -> None:
        """Do what follows an optimizer step, for a front end without hooks. Skipped steps count,
        too. After an overflow, a GradScaler skips a step, perhaps on this rank alone. If ranks
        disagreed on the step number, they would wait for messages that never come."""
        if not self.session.in_step:
            self.begin_step(closure=False)
            self.run.scores.skip_step()
        self._after_step()

    def skip(self, optimizer: Optimizer) -> None:
        """A GradScaler has called ``optimizer``, perhaps one of several, and no step was counted:
        count it if that completes a step."""
        bound = self.session.optimizer
        whole = not isinstance(bound, JointOptimizer) or bound.done(optimizer)
        if whole and self.session.settings.hooked:  # else the front end counts it
            self.advance()

    def _count(self) -> None:
        """Count the optimizer's step, taken or skipped."""
        session, run = self.session, self.run
        session.refuse_in_consensus("optimizer.step()")
        if self._closure:
            if any(gradients.withheld for gradients in run.gradients):
                raise ValueError(NOT_AVERAGED)
            run.check_gradients()
            run.refresh()
        session.count_step()
        session.status("computing")
        if run.differ:  # else the next step would find it, and after the last one any may end
            session.world.check_peers()
        if session.step == 1:
            session.check_first_step()
        for gradients in run.gradients:
            gradients.after_step()

    # -- the recipe ----

    def switch(self, recipe: Recipe) -> None:
        """Go on under ``recipe``. The call of all ranks has begun."""
        before, self.run = self.run, switched(self.run, recipe)
        self.alignment.due |= before.differ
        before.close()
        session = self.session
        self.ending.missing = False
        session.recorder.event("switch", recipe=recipe_text(self.run.recipe))
        session.status("computing")
        self.tell("switch")

    # -- ending ----

    def detach(self) -> None:
        """See `Synchronizer.detach`."""
        self.ending.missing = False  # the user keeps this worker's own model
        self._ignore()
        self.run.detach()
        self.run.close()
        if self.session.elastic is not None:
            self.session.comm.poke(self.session.elastic.close)  # the others go on without it
            self.session.comm.close_and_wait(time.monotonic() + EXIT_SECONDS)  # frees its ports
        self.session.comm.close()
        self.session.recorder.close()
        self.run.undo_before_step()
        self.session.leave_step()
        self.session.status("detached")

    @property
    def attached(self) -> bool:
        """Whether the optimizer's steps still run the rounds."""
        return bool(self._handles)

    # -- saving ----

    def state_dict(self) -> dict[str, Any]:
        """See `Synchronizer.state_dict`."""
        self.session.check_complete()
        if self.run.quorum is not None:
            self.run.quorum.settle(failed=True)
        self.session.comm.drain()
        saved = loading.state_dict(self.run)
        self.ending.missing = False
        return saved

    def load(
        self, parts: Sequence[Saved], load_model: LoadModel | None = None, *, alone: bool = False
    ) -> None:
        """Load ``parts`` on every rank, or raise on every rank; see `loading.load`. With
        ``load_model`` the run goes on from the consensus of other ranks: what `finish` averages is
        replaced by it, and the rest is what ``load_model(None)`` loads. ``alone``: on this rank,
        without communication."""
        session = self.session
        if not alone:
            with session.checked("load_state_dict()", 0):  # the ranks' present steps may differ
                session.refuse_in_consensus("sync.load_state_dict()")
        self.run = loading.load(self.run, parts, load_model, alone=alone)
        self.ending.missing = False
        if self.run.quorum is not None and not alone:
            session.gather(torch.zeros(1))  # no worker arrives before all have loaded
