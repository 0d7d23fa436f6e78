"""A recipe at work: everything that changes when the recipe is switched."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from laconic.algorithms.compile import parameter_rounds, score_window
from laconic.algorithms.exchanges import QuorumMean
from laconic.algorithms.round import (
    GradientRound,
    Recipe,
    describe,
    gradient_rounds,
    recipe_text,
    workers_differ,
)
from laconic.algorithms.schedules import any_of
from laconic.algorithms.scores import Scores
from laconic.engine.drift import Digest, DriftCheck, no_digest
from laconic.engine.gradient_rounds import GradientRunner
from laconic.engine.model_checks import check_tensors
from laconic.engine.parameter_rounds import ParameterRunner
from laconic.engine.quorum_rounds import QuorumRounds
from laconic.engine.session import Session
from laconic.links.calls import GRADIENTS, Call
from laconic.links.link import Link
from laconic.parts import module_buffers, parameters
from laconic.tensors import describe as describe_tensor
from laconic.tensors import is_sharded


class RecipeRun:
    """The rounds of ``recipe`` with their state, for one `Session`.

    Making one sends nothing. `start_gradient_rounds` puts hooks on the parameters, and `start`
    makes the state of the parameter rounds from the x that all workers share then.
    """

    def __init__(self, session: Session, recipe: Recipe, drift: DriftCheck) -> None:
        self.session, self.drift = session, drift
        self.recipe = recipe = session.settings.arrange(recipe)
        averaged = session.settings.buffers == "average"
        buffers = averaged and bool(module_buffers(session.model)[0])
        self._planned = parameter_rounds(recipe, buffers=buffers)
        self.scores = Scores(session.params, score_window(recipe))
        self.rounds: list[ParameterRunner] = []
        self.joined: list[list[Tensor]] = []
        """The parameters in x, in the batches in which they joined it: those share buckets."""
        self.gradients: list[GradientRunner] = []
        self.differ = workers_differ(recipe)
        """Whether workers may hold different models after a step."""
        self.quorum: QuorumRounds | None = None
        self._announced = -1
        """The step in which a round was announced last."""

    # -- starting ----

    def start(self) -> None:
        """Make the parameter rounds, and their state, from the present x."""
        session = self.session
        session.scratch.clear()  # of the recipe before this one
        self.rounds = [ParameterRunner(r, session, self.scores) for r in self._planned]
        self._add(session.params())
        if any(isinstance(r.exchange, QuorumMean) for r in self._planned):
            self.quorum = QuorumRounds(session, self.rounds)

    def start_gradient_rounds(self) -> None:
        """Make the gradient rounds, and have the parameters' hooks call them."""
        for r in gradient_rounds(self.recipe):  # one by one: `detach` finds those that were made
            announce = partial(self._announce_gradients, r)
            self.gradients.append(GradientRunner(r, self.session, announce))

    def _announce_gradients(self, r: GradientRound) -> str:
        session, step = self.session, self.session.step + 1
        if step == 1:
            session.note_first_gradients()
        label = f"{r.name} of step {step}"
        session.status(label)
        digest = no_digest if self.differ else self.drift.digest_of_x()
        self._announce(session.links[r.over], GRADIENTS, step, digest, _frozen(session))
        return label

    def take_in(self) -> None:
        """Take parameters that were added to the optimizer, or thawed, into x, with rank 0's
        values. Every rank must have done the same with them."""
        session = self.session
        new = session.joining(fixed=bool(self.rounds))
        if not new:
            return
        if self.quorum is not None:
            raise ValueError(
                "rounds with a quorum are about the parameters of the start: add groups, and thaw "
                "parameters, before laconic.attach"
            )
        check_tensors(session.model, new)
        session.call("parameters added")
        check_alike(self)
        session.broadcast(new)
        session.join(new)
        self._add(new)
        session.note_order()

    def _add(self, params: list[Tensor]) -> None:
        self.joined.append(params)
        for running in self.rounds:
            known = len(running.channels)
            running.set.add(params)
            if self.session.in_step:  # between the steps of two optimizers
                running.before_step(self.session.step + 1, known)

    def detach(self) -> None:
        """Remove the gradient rounds' hooks."""
        for gradients in self.gradients:
            gradients.detach()

    def rebase(self) -> None:
        """x is the anchor on all workers now. All ranks must call it."""
        for running in self.rounds:
            if running.round.update.anchor and running.round.exchange.agrees:
                running.rebase()
        if self.quorum is not None:
            self.quorum.rebase()

    def close(self) -> None:
        """End what the rounds have opened. They do not run again."""
        if self.quorum is not None:
            self.quorum.close()

    # -- what it is ----

    def describe(self) -> dict[str, Any]:
        """What decides which rounds there are, except the number of ranks."""
        session, settings, links = self.session, self.session.settings, self.session.links
        return {
            "recipe": self._own if session.policy is None else session.policy.text,
            "options": f"buffers={settings.buffers}, seed={settings.seed}",
            "group_size": links["group"].size if "group" in links else 0,
        }

    @property
    def _own(self) -> str:
        """The recipe in force, without what the layout of ranks adds."""
        return describe(tuple(r for r in self.recipe if r.over != "replica"))

    def text(self) -> str:
        """The recipe as a user wrote it."""
        policy = self.session.policy
        return recipe_text(self.recipe) if policy is None else policy.text

    def lacks_lr(self) -> str | None:
        """The error message where an update needs a learning rate and a group of x has none."""
        optimizer, x = self.session.optimizer, set(map(id, self.session.params()))
        update = next((r.update for r in self._planned if r.update.uses_lr), None)
        groups = [] if optimizer is None else optimizer.param_groups
        without = [p for g in groups if g.get("lr") is None for p in g["params"]]
        if update is None or not any(p.requires_grad or id(p) in x for p in without):
            return None
        return (
            f"{type(update).__name__} needs a learning rate, and a parameter group of "
            f"{type(optimizer).__name__} has no 'lr': use an optimizer whose groups have one, or "
            "another recipe"
        )

    @property
    def reweighted(self) -> bool:
        """Whether a push weight differs from 1, so that x is not the model."""
        weights = (w for running in self.rounds for w in running.push_weights().values())
        return any(w != 1.0 for w in weights)

    def settle(self) -> None:
        """As `GradientRunner.settle`."""
        for gradients in self.gradients:
            gradients.settle()

    def before_call(self) -> bool:
        """Complete what a backward pass that raised has begun, and rounds with a quorum. Returns
        whether workers may have taken different numbers of steps."""
        self.settle()
        if self.quorum is None:
            return False
        self.quorum.settle()
        return True

    def quiet(self) -> AbstractContextManager[object]:
        """A context in which no round changes the state of this worker. No job may be submitted
        inside."""
        return nullcontext() if self.quorum is None else self.quorum.quiet()

    # -- one step ----

    def before_step(self, step: int) -> None:
        """The updates' `before_step`; ``step`` is the one about to be taken."""
        if self.quorum is not None:
            self.quorum.before_step()
        for running in self.rounds:
            running.before_step(step)
        self.scores.before_step()

    @torch.no_grad()
    def undo_before_step(self) -> None:
        """Let x be the model again, where a step has begun that is not counted yet."""
        if self.session.in_step:
            for running in self.rounds:
                running.undo_before_step(self.session.step + 1)

    @contextmanager
    def outside_step(self) -> Iterator[None]:
        """A context in which x may change where a step has begun that is not counted yet: as if its
        first part were a step by itself. Updates then take for the optimizer's only what that has
        moved."""
        step = self.session.step + 1
        begun = self.rounds if self.session.in_step else []
        rounds = [running for running in begun if running.round.update.before_step is not None]
        for running in rounds:
            running.after_step(step)
        try:
            yield
        finally:
            for running in rounds:
                running.before_step(step)

    def average_gradients(self) -> None:
        """Average the gradients that are due and that no backward pass has averaged."""
        for gradients in self.gradients:
            gradients.before_step()

    def check_gradients(self) -> None:
        """Where a model is sharded, raise if another rank's gradients were not finite. All ranks
        call it at the same place, whatever parameters they have."""
        step = self.session.step + 1
        for gradients in self.gradients:
            if gradients.round.when(step):
                label = f"{gradients.round.name} of step {step}"
                gradients.nonfinite.check(label).wait()

    def averages_gradients(self, step: int) -> bool:
        """Whether gradients are averaged in that step."""
        return any(gradients.round.when(step) for gradients in self.gradients)

    def refresh(self, *, keep: bool = False) -> None:
        """Follow parameters that were added, frozen or thawed; see `GradientRunner.refresh`."""
        for gradients in self.gradients:
            gradients.refresh(keep=keep)

    @torch.no_grad()
    def pull(self) -> None:
        """The updates' `after_step`; no communication. The recipe's last round comes first."""
        for running in reversed(self.rounds):
            running.after_step(self.session.step)

    def communicate(self) -> int:
        """Run the rounds that are due after this step. Returns how many ran."""
        step, ran = self.session.step, 0
        if self.quorum is not None:
            return self.quorum.communicate(step)
        for running in self.rounds:
            running.fold_due(step)
            if running.round.when(step):
                self._prepare(running)
                running.start(step)
                self.drift.after_start(running, step)
                self.session.status("computing")
                ran += 1
        if self._averaging_ends():
            for running in self.rounds:
                if running.starts_relative:
                    self._announce_round(running)
                    running.rebase(step)
        return ran

    def leaves_equal(self, step: int) -> bool:
        """Whether all workers have the same parameters after the rounds of ``step``."""
        due = [r for r in self._planned if r.part is parameters and r.when(step)]
        if not due or any(r.delay for r in self._planned):
            return False
        last = due[-1]
        everyone = last.over in ("world", "workers") and not isinstance(last.exchange, QuorumMean)
        return everyone and last.exchange.agrees and last.update.replaces

    def _prepare(self, running: ParameterRunner) -> None:
        """Quiesce the other rounds where ``running`` asks for it, and announce it."""
        step = self.session.step
        if running.round.quiesces_others:
            for other in self.rounds:
                if other is not running:
                    other.quiesce(step, averaged=running.round.exchange.agrees)
        self.session.status(running.label(step))
        self._announce_round(running, self.drift.digest_of(running))

    def _announce_round(self, running: ParameterRunner, digest: Digest = no_digest) -> None:
        if running.communicates:
            self._announce(running.link, running.round.name, self.session.step, digest)

    def _announce(self, link: Link, name: str, step: int, digest: Digest, of: str = "") -> None:
        """Tell the other ranks which round of ``step`` the next message belongs to."""
        first, self._announced = self._announced != step, step
        at, once = self.session.step, cache(digest)  # another attempt may find a part changed

        def begin() -> None:
            link.begin_call(Call(at, name, first, once(), of), wait=False)

        self.session.comm.before_next(begin)

    def _averaging_ends(self) -> bool:
        """Whether gradients were averaged over all workers in every step so far, and are not in the
        next one: workers differ from then on."""
        over_all = [g.round.when for g in self.gradients if g.round.over in ("world", "workers")]
        if not over_all:
            return False
        averaged, step = any_of(*over_all), self.session.step
        ends = averaged(step) and not averaged(step + 1)
        return ends and all(averaged(s) for s in range(1, step))


def _frozen(session: Session) -> str:
    """Which parameters are frozen: buckets are cut without them, so all ranks must freeze the
    same."""
    frozen = [k for k, p in enumerate(session.differentiated()) if not p.requires_grad]
    if not frozen:
        return ""
    return f" (frozen parameters: {len(frozen)}, {crc32(repr(frozen).encode()):x})"


def _described(tensor: Tensor) -> str:
    """Equal on ranks that can exchange values of ``tensor``."""
    return f"{tensor.shape} {tensor.dtype}" if is_sharded(tensor) else describe_tensor(tensor)


def check_alike(run: RecipeRun, *, module: bool = True) -> None:
    """Raise ``ValueError`` on every rank unless all ranks run the same recipe on the same
    parameters, with the learning rates that it needs, and all or none scale the gradients that it
    averages. ``module``: compare the module's tensors, too."""
    session = run.session
    groups = [[(_described(p), p.requires_grad) for p in group] for group in session.held()]
    problem = run.lacks_lr()
    rest = [*session.model.parameters(), *session.model.buffers()] if module else []
    shapes = list(map(_described, rest))
    workers = None if session.elastic is not None else session.workers.size
    scaled = bool(gradient_rounds(run.recipe)) and session.settings.scaler is not None
    text = repr((run.describe(), run._own, groups, shapes, workers, scaled, problem))
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    everyone = session.gather(torch.tensor([digest])).flatten().tolist()
    other = [rank for rank, value in enumerate(everyone) if value != everyone[0]]
    if other:
        raise ValueError(
            f"ranks {other} attach something other than rank 0: recipe, buffers=, the model's "
            "parameters and buffers (shapes, dtypes), the optimizer's groups (also requires_grad, "
            "and whether they have an 'lr'), and, where gradients are averaged, whether scaler= is "
            "enabled must be the same"
        )
    if problem is not None:
        raise ValueError(problem)
