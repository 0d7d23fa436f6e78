"""Drives the rounds of a recipe for one model and optimiser, and owns all their state."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from laconic.algorithms.compile import (
    check_groups,
    gradient_rounds,
    parameter_rounds,
    score_window,
    workers_differ,
)
from laconic.algorithms.exchanges import Mean
from laconic.algorithms.round import (
    Clock,
    Recipe,
    Round,
    describe,
    is_recipe,
    recipe_text,
    unchanged,
)
from laconic.algorithms.schedules import every
from laconic.algorithms.scores import Scores
from laconic.algorithms.updates import Average
from laconic.auto import Choice, Chooser
from laconic.buckets import (
    Scratch,
    bucketize,
    is_sharded,
    local,
    module_buffers,
    optimizer_state,
    reshard,
)
from laconic.engine import batch_check, regroup, saved_state
from laconic.engine.gradient_rounds import GradientRound, Host
from laconic.engine.model_checks import ddp_use, wrappers_used
from laconic.engine.nonfinite import Refusals
from laconic.engine.parameter_rounds import RunningRound, Surroundings
from laconic.links.agreement import agree
from laconic.links.calls import FINISH, GRADIENTS, Call
from laconic.links.comm_thread import CommThread
from laconic.links.link import Link, held_by_all
from laconic.links.metered import CallTotals, Ledger, Metered
from laconic.metrics import Metrics, Recorder

ADOPTED = (
    "_recipe",
    "_parameter_rounds",
    "_scores",
    "_shared",
    "_rounds",
    "_groups",
    "_gradient_rounds",
)
"""What a recipe brings with it, as attributes of a `Synchronizer`."""

BUFFERS = ("average", "keep")
"""What becomes of the module's buffers in rounds."""

SAVE = "laconic.save (every rank must call it)"
LOAD = "laconic.load"
"""The calls of `Synchronizer.gathering`, as errors name them on all ranks."""

_APART = (
    "this state comes from other ranks, so every rank must load the same weights before it, such "
    "as those of consensus_state_dict(): here they differ"
)


@dataclass(frozen=True)
class Stats:
    """What a synchroniser did so far on this rank; payload bytes, seconds of waiting.

    ``bytes_by_set``: sent to the other ``"workers"``, to those of the own ``"group"``, inside a
    worker (``"replica"``; ``"shards"`` where its model is cut), and in what concerns all ranks
    (``"world"``). ``seconds_waiting``: host time in which training stood still for a round. On CUDA
    a round that is not delayed waits on the card, which this does not see.
    """

    steps: int
    rounds: int
    bytes_sent: int
    bytes_received: int
    bytes_by_collective: Mapping[str, int]
    bytes_by_set: Mapping[str, int]
    seconds_waiting: float


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Synchronizer:
    """The rounds of ``recipe`` at work on ``model`` and ``optimizer``; made by `laconic.attach`.

    One step's way: ``backward()`` runs the gradient rounds; ``optimizer.step()`` moves x; the
    optimiser's post-step hook counts the step and, round by round in recipe order, folds what is
    due and sends what falls due.

    A front end with a loop of its own gives no optimiser at first, while gradient rounds are at
    work already; then `bind`, and `advance` after every step of the optimiser.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        recipe: Recipe,
        sets: Mapping[str, Link],
        device: torch.device,
        buffers: str,
        seed: int = 0,
        scale: Callable[[], float] | None = None,
        chooser: Chooser | None = None,
        arrange: Callable[[Recipe], Recipe] = unchanged,
    ) -> None:
        ledger = Ledger()
        self._links = {name: Metered(link, ledger, name) for name, link in sets.items()}
        self._world, self._workers = self._links["world"], self._links["workers"]
        self._ledger = ledger
        self._model = model
        self._optimizer = optimizer
        self._in_step = False
        self._closure = False
        """Whether the step's gradients are a closure's."""
        self.hooked = optimizer is not None
        """Whether the optimiser's own steps run what follows them, and not `advance`."""
        assert buffers in BUFFERS, "checked before"
        self._average_buffers = buffers == "average"
        self._had_buffers = bool(module_buffers(model)[0])
        """When it was attached, and then on all ranks."""
        threaded = self._world.threaded and self._world.size > 1
        self._lane = CommThread(threaded, device, self._world.check)
        self._refusals = Refusals(self._links["shards"], self._lane)
        self._device = device
        self._sync_gradients = True
        self._fingerprint: Tensor | None = None
        self._wrappers_before = wrappers_used(list(model.parameters()))
        self._handles: list[RemovableHandle] = []
        self._rounds_done = 0
        self._seed = seed
        self._scale = scale
        self._chooser = chooser
        self._chosen: list[Choice] = []
        self._arrange = arrange
        self._recorder = Recorder()
        self._in_consensus: bool | None = None
        """``mean`` of the `consensus` that the model holds, if it holds one."""
        self._scalers_differ = False
        self.scaler: torch.amp.GradScaler | None = None
        self.scaling = False
        """Whether ``scaler`` has stepped and not been updated, so that its scale is in use."""
        self.step = 0
        """Optimiser steps taken since `laconic.attach`."""
        self._rounds: list[RunningRound] = []
        self._gradient_rounds: list[tuple[Round, GradientRound]] = []
        self._read(arrange(recipe))
        self._agree_on_setup()
        if chooser is not None:
            at = self._workers, self._world, self._lane
            chooser.meet(*at, self._shapes, self._traffic, device)
        self._broadcast()
        self._note_order()
        self._start_gradient_rounds({})
        if optimizer is not None:
            self._start_rounds(optimizer)
            self._listen(optimizer)
            after = optimizer.register_step_post_hook(lambda *_: self._after_step())
            self._handles.append(after)
        self._status("computing")

    # -- setting up ----

    def _read(self, recipe: Recipe) -> None:
        """Take ``recipe`` for the one to follow; its rounds are to be started."""
        buffers = self._average_buffers and bool(module_buffers(self._model)[0])
        self._recipe = recipe
        self._parameter_rounds = parameter_rounds(recipe, buffers=buffers)
        window = score_window(recipe)
        self._scores = Scores(self._held, window) if window else None

    def bind(self, optimizer: Optimizer) -> None:
        """Run the parameter rounds from now on, on ``optimizer``'s parameters, which are still the
        common start; its steps are told of by `advance`. No communication: `agree_on_binding` is
        to follow before any round."""
        assert self._optimizer is None, "an optimiser is bound once"
        self._optimizer = optimizer
        self._start_rounds(optimizer)
        self._listen(optimizer)

    def follow(self, optimizer: Optimizer) -> None:
        """``optimizer`` takes the bound one's place: it moves the same parameters, and has their
        learning rates."""
        self._optimizer = self._shared.optimizer = optimizer
        for handle in self._handles:
            handle.remove()
        self._listen(optimizer)

    def _listen(self, optimizer: Optimizer) -> None:
        self._handles = [optimizer.register_step_pre_hook(self._pre_hook)]

    def agree_on_binding(self, start: Tensor | None, problem: str | None) -> None:
        """Compare what the ranks have bound: the shapes, and ``start``, which sums up the common
        start (None: a run goes on, whose workers differ). Every rank must call it. Raises
        ``ValueError`` on all of them where one has a ``problem``."""
        self._call("binding the optimizer", 0)  # some ranks may have loaded a state, and others not
        self._agree_on_setup(module=False)
        start = torch.zeros(2, dtype=torch.float64) if start is None else start
        row = torch.tensor([float(problem is not None), *start.tolist()], dtype=torch.float64)
        everyone = self._gather(row)
        agree(self._gather, problem, everyone[:, 0])
        other = [r for r, said in enumerate(everyone.tolist()) if said != everyone[0].tolist()]
        if other:
            raise ValueError(
                f"the optimizer's parameters differ from rank 0's on ranks {other}, before its "
                "first step: load the same weights, or a saved state, on every rank, make float32 "
                "masters from the wrapped module's parameters, and put parameters of your own into "
                "the module"
            )

    @property
    def bound(self) -> Optimizer | None:
        """The optimiser that moves its parameters, once it is known."""
        return self._optimizer

    @property
    def reweighted(self) -> bool:
        """Whether a push weight is other than 1, so that x and the model differ."""
        weights = [
            float(state[r.round.update.weight])
            for r in self._rounds
            if r.round.update.weight is not None
            for state in r.states
        ]
        return any(weight != 1.0 for weight in weights)

    def _agree_on_setup(self, *, module: bool = True, chosen: bool = False) -> None:
        groups = [
            [(tuple(p.shape), str(p.dtype), p.requires_grad) for p in group]
            for group in self._groups_held()
        ]
        rest = [*self._model.parameters(), *self._model.buffers()] if module else []
        shapes = [(tuple(t.shape), str(t.dtype)) for t in rest]
        text = repr((self._describe(chosen=chosen), groups, shapes, self._workers.size))
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        everyone = self._gather(torch.tensor([digest], dtype=torch.int64)).flatten().tolist()
        other = [rank for rank, value in enumerate(everyone) if value != everyone[0]]
        if other:
            raise ValueError(
                f"ranks {other} attach something else than rank 0: recipe, buffers=, the model's "
                "parameters and buffers (shapes, dtypes) and the optimiser's groups (also "
                "requires_grad) must be alike"
            )

    def _describe(self, *, chosen: bool = False) -> str:
        """What decides which rounds there are, but for the number of ranks; ``chosen``: the recipe
        in force even where it is to be chosen again."""
        own = tuple(r for r in self._recipe if r.over != "replica")
        auto = None if chosen or self._chooser is None else self._chooser.auto
        recipe = describe(own) if auto is None else repr(auto)
        buffers = "average" if self._average_buffers else "keep"
        groups = f", group_size={self._links['group'].size}" if "group" in self._links else ""
        return f"{recipe}, buffers={buffers}, seed={self._seed}{groups}"

    def _recipe_text(self, *, chosen: bool = False) -> str:
        """The recipe as a user wrote it; ``chosen`` as for `_describe`."""
        auto = None if chosen or self._chooser is None else self._chooser.auto
        return recipe_text(self._recipe) if auto is None else auto.text

    def _broadcast(self, tensors: Sequence[Tensor] | None = None) -> None:
        """Rank 0's parameters and buffers to everyone; shards, to who holds the same shard."""
        if tensors is None:
            tensors = [*self._model.parameters(), *self._model.buffers(), *self._held()]
        unique = list({id(t): t for t in tensors}.values())
        shards = [t for t in unique if is_sharded(t)]
        whole = [t for t in unique if not is_sharded(t)]
        for link, those in ((self._world, whole), (self._workers, shards)):
            for bucket in bucketize([those], 1):
                flat = bucket.pack(bucket.empty())
                self._lane.call(partial(link.broadcast, flat), "sharing rank 0's parameters")
                bucket.unpack(flat)

    def _start_rounds(self, optimizer: Optimizer) -> None:
        self._shared = Surroundings(
            self._model,
            optimizer,
            self._lane,
            Scratch(),
            Scratch(),
            self._links["replica"],
            self._refusals,
            self._scores,
            self._seed,
        )
        self._rounds = [
            RunningRound(r, self._links[r.over], self._shared) for r in self._parameter_rounds
        ]
        for running in self._rounds:
            running.grow()
        self._groups = len(optimizer.param_groups)

    def _note_order(self) -> None:
        """The module's parameters, where FSDP puts others into their place in a backward pass."""
        reshard(self._model)
        own = list(self._model.parameters())
        self._order = own if any(is_sharded(p) for p in own) else []

    def _start_gradient_rounds(self, left: Mapping[tuple[str, int], Tensor]) -> None:
        """What is ``left``, as gradient rounds before these have not sent it, is sent by these."""
        before = [running for _, running in self._gradient_rounds]
        for running in before:
            running.detach()
        self._gradient_rounds = [
            (r, self._gradient_round(r, left)) for r in gradient_rounds(self._recipe)
        ]

    def _gradient_round(self, r: Round, left: Mapping[tuple[str, int], Tensor]) -> GradientRound:
        link = self._links[r.over]

        def active() -> bool:
            return self._sync_gradients and r.when(self.step + 1)

        def announce() -> str:
            if self.step == 0:
                self._note_fingerprint()
            label = f"{r.name} of step {self.step + 1}"
            self._status(label)
            call = Call(self.step, GRADIENTS)
            self._lane.before_next(partial(link.begin_call, call, wait=False))
            return label

        def clock() -> Clock:
            step = self.step + 1
            return Clock(step, math.nan, step - 1, 0, link.size, link.rank, seed=self._seed)

        host = Host(self._lane, self._refusals, self._differentiated, self._scale)
        return GradientRound(r, link, host, active, announce, clock, left)

    # -- one step ----

    @torch.no_grad()
    def begin_step(self, closure: bool) -> None:
        """The optimiser is about to step; with a closure, its gradients are still to come."""
        self._refuse_in_consensus("optimizer.step()")
        if len(self._groups_held()) > self._groups:
            self._grow()
        self._closure = closure
        if closure:
            for _, gradient_round in self._gradient_rounds:
                gradient_round.refresh(keep=True)
        else:
            if self.step == 0:
                self._note_fingerprint()
            self.average_gradients()
            self._hear()
        if self._in_step:  # it raised, or takes several steps that count as one
            return
        self._in_step = True
        for running in self._rounds:
            running.before_step(self.step + 1)
        if self._scores is not None:
            self._scores.before_step()

    @torch.no_grad()
    def _after_step(self, *, skipped: bool = False) -> None:
        self.count()
        self.observe()
        self.pull()
        self.communicate()
        self.note(skipped=skipped)
        if self._chooser is not None and self._chooser.after_step(self.step):
            self._switch(self._chooser.recipe)

    def advance(self) -> None:
        """The optimiser's step is done, which no hook told: what follows it is run. One that it did
        not take counts, too: a GradScaler skips one after an overflow, on this rank alone perhaps,
        and ranks that disagree on the step would wait in vain."""
        self._after_step(skipped=not self._in_step)

    # -- the parts of what follows a step, for a front end that has them apart ----

    @torch.no_grad()
    def count(self) -> None:
        """Count the step of the optimiser, or the one that it did not take."""
        self._refuse_in_consensus("optimizer.step()")
        if not self._in_step:
            self.begin_step(closure=False)
            if self._scores is not None:
                self._scores.skip_step()
        if self._closure:
            self._hear()
            for _, gradient_round in self._gradient_rounds:
                gradient_round.refresh()
        self.step += 1
        self._in_step = False
        self._status("computing")
        self._world.check_peers()
        if self.step == 1:
            self._note_fingerprint()
            self._call("first step", self.step)
            self._check_first_gradients()
        for r, gradient_round in self._gradient_rounds:
            gradient_round.after_step(r.when(self.step + 1))

    def _refuse_in_consensus(self, call: str) -> None:
        """Raise where a call would change weights that leaving `consensus` puts back."""
        if self._in_consensus is not None:
            raise ValueError(
                f"{call} inside sync.consensus(): its result would be discarded when the worker's "
                "own weights come back. Call it after the `with` block"
            )

    def _hear(self) -> None:
        """Where a model is sharded: of what other shards' gradients were refused, in a place to
        which all ranks come, whatever they have hooks on."""
        for r, gradient_round in self._gradient_rounds:
            if r.when(self.step + 1):
                label = f"{r.name} of step {self.step + 1}"
                self._refusals.tell(gradient_round.exchange, label).wait()

    def _parts_here(self) -> bool:
        """Whether workers, all of whose gradients were averaged so far, go their own ways from the
        next step on."""

        def averaged(step: int) -> bool:
            over_all = ("world", "workers")
            return any(r.over in over_all and r.when(step) for r, _ in self._gradient_rounds)

        if averaged(self.step + 1) or not averaged(self.step):
            return False
        return all(averaged(step) for step in range(1, self.step))

    def note(self, *, skipped: bool = False) -> None:
        """Tell the metrics of the step, at its end."""
        self._recorder.after_step(skipped=skipped)

    @torch.no_grad()
    def observe(self) -> None:
        """Take note of what the step says about this worker's score; moves nothing."""
        if self._scores is not None:
            self._scores.after_step()

    @torch.no_grad()
    def pull(self) -> None:
        """Every update's `Update.after_step`; no communication."""
        for running in reversed(self._rounds):
            running.after_step(self.step)

    @torch.no_grad()
    def communicate(self, *, now: bool = False) -> None:
        """The rounds that fall due after this step; ``now``: all of the recipe's."""
        for running in self._rounds:
            running.fold_due(self.step)
            if now or running.round.when(self.step):
                self._run(running)
        if self._parts_here():
            for running in self._rounds:
                if running.begins_at_x:
                    self._announce(running)
                    running.begin_here(self.step)

    def _pre_hook(self, _: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        given = [*args, options.get("closure")]
        closures = [g for g in given if callable(g) and not isinstance(g, Optimizer)]
        self.begin_step(closure=bool(closures))

    def _run(self, running: RunningRound) -> None:
        if running.round.update.settles:
            for other in self._rounds:
                if other is not running:
                    other.settle(self.step, averaged=running.round.exchange.agrees)
        self._status(running.label(self.step))
        self._announce(running)
        running.start(self.step)
        self._rounds_done += 1
        self._status("computing")

    def _announce(self, running: RunningRound) -> None:
        """Begin the round's call right before its first collective."""
        if running.communicates:
            call = Call(self.step, running.round.name)
            self._lane.before_next(partial(running.link.begin_call, call, wait=False))

    def _call(self, name: str, step: int) -> None:
        """Tell the other ranks which call of the user's comes next, after which step."""
        self._status(f"{name} after step {self.step}")
        self._lane.call(
            partial(self._world.begin_call, Call(step, name), wait=True),
            f"{name} after step {self.step}",
        )

    def _status(self, text: str) -> None:
        self._world.status(f"{text} ({self.step} steps done)")

    def _grow(self) -> None:
        """Parameter groups were added: they join with rank 0's values."""
        new = self._groups_held()[self._groups :]
        self._call("groups added", self.step)
        self._agree_on_setup()
        self._broadcast([p for group in new for p in group])
        for running in self._rounds:
            running.grow()
        self._groups = len(self._groups_held())
        self._note_order()

    # -- are the workers reading the same batches? ----

    def _note_fingerprint(self) -> None:
        if self._fingerprint is None:
            self._fingerprint = batch_check.fingerprint(self._held(), self._device)

    def _check_first_gradients(self) -> None:
        assert self._fingerprint is not None, "noted before or after the first step"
        ddp = ddp_use([*self._held(), *self._model.parameters()], self._wrappers_before)
        said = torch.cat([self._fingerprint, self._fingerprint.new_tensor([ddp])])
        batch_check.check_first_gradients(self._gather(said).tolist())

    def _gather(self, x: Tensor) -> Tensor:
        return self._lane.call(
            partial(self._world.gather, x.to(self._device)), "comparing the ranks"
        )

    # -- what the workers agree on ----

    @torch.no_grad()
    def _write_consensus(self, mean: bool = True) -> None:
        """Consensus weights (and averaged buffers) into the model: the mean over workers of x at
        rest; without parameter rounds replicas are equal already. Without ``mean``, anchors where
        rounds keep them, and the mean over workers where these differ, or there are none."""
        reshard(self._model)
        for running in self._rounds:
            running.write_at_rest(self.step)
        anchored = [r for r in self._rounds if r.round.update.anchor and not mean]
        covered = {
            id(segment.tensor)
            for running in anchored
            if running.round.exchange.agrees
            for bucket in running.buckets
            for segment in bucket.segments
        }
        for running in anchored:
            running.write_anchor()
        if workers_differ(self._recipe):
            groups = [[p for p in group if id(p) not in covered] for group in self._groups_held()]
            self._write_mean(groups, self._workers)
        buffers = module_buffers(self._model)
        if self._average_buffers and (self._had_buffers or buffers[0]):
            job = partial(held_by_all, self._world, buffers)
            self._write_mean(self._lane.call(job, "consensus"), self._world)

    def _write_mean(self, groups: Sequence[Sequence[Tensor]], link: Link) -> None:
        for bucket in bucketize(groups, link.size):
            flat = bucket.pack(bucket.empty())
            self._lane.call(partial(link.mean, flat), "consensus")
            bucket.unpack(flat)

    @contextmanager
    def consensus(self, *, mean: bool = True) -> Iterator[nn.Module]:
        """A context in which the model holds the consensus weights, for validation; every rank
        must enter it. The model holds what `finish` would leave now: the mean of the workers'
        models. Afterwards the worker's own weights are back, bit for bit. Steps of the optimizer
        are refused inside.

        ``mean=False``: what the last outer step or elastic round left (the anchor, the center)
        where the recipe keeps such a model; it lacks the steps taken since.

        Inside another `consensus` of the same kind it does nothing. Needs room for one copy of the
        model."""
        if self._in_consensus is not None:
            if self._in_consensus != mean:
                raise ValueError(
                    f"sync.consensus(mean={mean}) inside sync.consensus(mean={not mean}): leave "
                    "the outer context first"
                )
            yield self._model
            return
        tensors = [*self._held(), *self._model.buffers()]
        self._call("consensus()", self.step)
        kept = [local(t).clone() for t in tensors]
        self._in_consensus = mean
        try:
            self._write_consensus(mean)
            self._status("in consensus()")
            yield self._model
        finally:
            for tensor, values in zip(tensors, kept, strict=True):
                local(tensor).copy_(values)
            reshard(self._model)
            self._in_consensus = None
            self._status("computing")

    def consensus_state_dict(self) -> dict[str, Any]:
        """A copy of the model's ``state_dict()`` with the consensus weights, to ship. Every rank
        must call it."""
        with self.consensus() as model:
            return {
                key: value.detach().clone() if isinstance(value, Tensor) else value
                for key, value in model.state_dict().items()
            }

    @torch.no_grad()
    def switch(self, recipe: Recipe) -> None:
        """Go on under another ``recipe``; every rank must call it, after the same step.

        Nothing is in flight afterwards, and all workers start anew from the consensus, the mean of
        their models, and from the mean of their optimizers' state where they differed: with AdamW
        that sends about as much as four models. State that some ranks lack begins anew, and numbers
        in it, and the GradScaler, go on as rank 0's. The state that rounds keep starts anew, too,
        but for gradients that a codec has not sent yet, where the new recipe codes gradients.
        Raises ``ValueError``, on every rank, where they ask for different ones.
        """
        if not is_recipe(recipe):
            raise ValueError(f"recipe must be what a recipe function returns, not {recipe!r}")
        self._switch(recipe)
        if not self.scaling:
            self.align_scaler()
        self._chosen, self._chooser = self.choices, None

    def _switch(self, recipe: Recipe) -> None:
        assert self._optimizer is not None, "rounds are bound to an optimiser"
        self._refuse_in_consensus("sync.switch()")
        check_groups(recipe, "group" in self._links)  # while the rounds before are still at work
        if len(self._groups_held()) > self._groups:
            self._grow()
        self._call("switch()", self.step)
        for running in self._rounds:
            running.finish(self.step)
        self._write_consensus()
        if workers_differ(self._recipe):
            state = Round(every(1), Average(), Mean(), optimizer_state)
            RunningRound(state, self._workers, self._shared).start(self.step)
            self._align_state()
            self._scalers_differ = True
        for running in self._rounds:  # which may go on, if the ranks do not agree
            running.rest()
        left: dict[tuple[str, int], Tensor] = {}
        for _, gradients in self._gradient_rounds:
            left.update(gradients.left_over())
        undo = self._adopt(recipe, left)
        try:
            self._agree_on_setup(module=False, chosen=True)
        except ValueError:
            undo()
            raise
        self._recorder.event("switch", recipe=self._recipe_text(chosen=True))
        self._status("computing")

    def _align_state(self) -> None:
        """What the mean of the optimisers' state leaves: its numbers (steps that a rank skipped are
        not counted there) become rank 0's; state that some ranks lack, as a parameter had no
        gradient there, begins anew on all."""
        assert self._optimizer is not None
        states, held = self._optimizer.state, self._held()
        has = self._gather(torch.tensor([float(bool(states.get(p))) for p in held]))
        numbers: list[tuple[dict[str, Any], str]] = []
        for p, everywhere in zip(held, has.amin(0).tolist(), strict=True):
            if not everywhere:
                states.pop(p, None)
                continue
            state = states[p]
            numbers += [(state, name) for name in sorted(state) if _is_number(state[name])]
        if not numbers:
            return
        flat = self._from_rank_0([float(state[name]) for state, name in numbers])
        for (state, name), value in zip(numbers, flat, strict=True):
            if isinstance(state[name], Tensor):
                state[name].fill_(value)
            else:
                state[name] = type(state[name])(value)

    def align_scaler(self) -> None:
        """After a switch from workers that differed, each with overflows of its own, the scaler
        goes on as rank 0's: gradients that are averaged must be scaled alike. Called between two
        steps, when the scaler has been updated."""
        scaler = self.scaler
        if scaler is None or not self._scalers_differ:
            return
        self._scalers_differ = False
        self._call("switch()", self.step)
        state = scaler.state_dict()
        scale, tracker = self._from_rank_0([state["scale"], float(state["_growth_tracker"])])
        scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": int(tracker)})

    def _from_rank_0(self, numbers: Sequence[float]) -> list[float]:
        """Rank 0's, of as many on all ranks."""
        flat = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        self._lane.call(partial(self._world.broadcast, flat), "sharing rank 0's optimizer state")
        told: list[float] = flat.tolist()
        return told

    def _adopt(self, recipe: Recipe, left: Mapping[tuple[str, int], Tensor]) -> Callable[[], None]:
        """Start the rounds of ``recipe``, on workers that hold the same x, the gradient rounds with
        what is ``left`` of those before; returns what puts those back, as they were."""
        assert self._optimizer is not None, "rounds are bound to an optimiser"
        before = {name: getattr(self, name) for name in ADOPTED}

        def undo() -> None:
            for _, running in self._gradient_rounds:
                running.detach()
            vars(self).update(before)
            for _, running in self._gradient_rounds:
                running.listen()

        try:
            self._read(self._arrange(recipe))
            self._start_gradient_rounds(left)
            self._start_rounds(self._optimizer)
        except BaseException:  # out of memory, say
            undo()
            raise
        return undo

    @property
    def recipe(self) -> Recipe:
        """The one in force."""
        return self._recipe

    @property
    def choices(self) -> list[Choice]:
        """What `laconic.auto` has chosen so far, after which step, and why."""
        return list(self._chosen if self._chooser is None else self._chooser.choices)

    def _shapes(self) -> tuple[tuple[tuple[int, ...], ...], int]:
        held = self._held()
        return tuple(tuple(local(p).shape) for p in held), held[0].element_size()

    def _traffic(self) -> tuple[float, float]:
        calls = list(self._ledger.by_call.values())
        return float(sum(c.bytes for c in calls)), sum(c.seconds for c in calls)

    @torch.no_grad()
    def finish(self, *, mean: bool = True) -> None:
        """Leave every worker with the consensus model: the mean of the workers' models, which
        contains every step taken. Nothing is in flight afterwards.

        Every rank must call it, after the same number of steps. Training may go on afterwards.
        ``mean=False``: see `consensus`; it discards the steps since the last outer step.
        """
        self._refuse_in_consensus("sync.finish()")
        self._call(FINISH, self.step)
        for running in self._rounds:
            running.finish(self.step)
        self._write_consensus(mean)  # which finds all rounds at rest
        for running in () if mean else self._rounds:
            running.rest()
        self._recorder.event("finish")
        self._status("finished")

    @property
    def attached(self) -> bool:
        """Whether the optimiser's steps still run the rounds."""
        return bool(self._handles)

    def detach(self) -> None:
        """Take the hooks off the optimiser and the parameters; no communication. The model keeps
        the weights that it has."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for _, gradient_round in self._gradient_rounds:
            gradient_round.detach()
        self._lane.close()
        self._recorder.close()
        self._status("detached")

    def drain(self) -> None:
        """Wait for what is on its way, whatever becomes of it: the link is free then."""
        self._lane.drain()

    def __enter__(self) -> Synchronizer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
        else:
            self._recorder.failed(error)
            broken = self._lane.abandon() or any(g.broken for _, g in self._gradient_rounds)
            self._world.leave(broken)
        self.detach()

    # -- saving ----

    def _groups_held(self) -> list[list[Tensor]]:
        """The papers' x, by parameter group."""
        if self._optimizer is None:
            return [list(self._model.parameters())]
        return [group["params"] for group in self._optimizer.param_groups]

    def _held(self) -> list[Tensor]:
        return [p for group in self._groups_held() for p in group]

    def _differentiated(self) -> list[Tensor]:
        """The parameters that get gradients: the optimiser's, and for a front end the module's,
        of which the optimiser may have copies in another precision, and what else gets some. In the
        module's order, as backward passes come to them in about the reverse; groups of parameters
        with and without weight decay, say, would have the first gradients wait for the last."""
        held, own = self._held(), self._order or list(self._model.parameters())
        wanted, known = {id(p) for p in held}, {id(p) for p in own}
        first = [p for p in own if not self.hooked or id(p) in wanted]
        rest = [p for p in held if id(p) not in known and (self.hooked or p.grad_fn is None)]
        return first + rest

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """This rank's state: every rank saves its own, with its model's and optimiser's. Starts no
        communication; waits for what is in flight, and stores it as arrived but not folded."""
        return {
            **self._header(),
            "step": self.step,
            "in_step": self._in_step,
            "rounds": [saved_state.round_state(running) for running in self._rounds],
            "gradients": [
                {**saved_state.carried_state(g), "scale": g.scale}
                for g in self._keeping_gradient_rounds()
            ],
            "auto": None if self._chooser is None else self._chooser.state_dict(),
            "scores": None if self._scores is None else self._scores.state_dict(),
        }

    def _keeping_gradient_rounds(self) -> list[GradientRound]:
        """Those with state; averages inside a worker, which another layout need not have, have
        none."""
        return [running for _, running in self._gradient_rounds if running.exchange.slots]

    def _header(self) -> dict[str, Any]:
        return saved_state.header(
            self._describe(),
            self._recipe_text(),
            self._world.size,
            self._workers.size,
            self._world.rank,
            self._held(),
        )

    @torch.no_grad()
    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any] | None]
    ) -> None:
        """Put back what `state_dict` returned: this rank's own, or the list of all ranks' by rank,
        with None for those that are lost. Every rank must call it, after `laconic.attach` and after
        loading the model's and the optimiser's own state.

        For another number of ranks, or where some are lost, load the consensus weights, the same on
        every rank, before it (`consensus_state_dict`). Outer state is then cut anew, and begins
        anew where it is lost; of state that was each worker's own the mean goes on; what was in
        flight is folded.

        Raises ``ValueError`` on every rank where any of them cannot load its part.
        """
        self._load_on_all(lambda: saved_state.parts_of(state, self._header()), None)

    def load_parts(
        self, parts: Mapping[int, saved_state.Saved], load: Callable[[int | None], None]
    ) -> None:
        """Go on from the consensus of another run's ranks. ``parts`` holds their saved states by
        rank. ``load(rank)`` loads that rank's model into this one, and ``load(None)`` the one that
        this rank goes on with; of this only what `finish` averages becomes the consensus."""
        self._load_on_all(lambda: dict(parts), load)

    @torch.no_grad()
    def _load_on_all(
        self,
        parts: Callable[[], dict[int, saved_state.Saved]],
        load: Callable[[int | None], None] | None,
    ) -> None:
        self._call("load_state_dict()", 0)  # ranks may have come to it after different steps
        loaded: list[Callable[[], None]] = []
        undo: list[Callable[[], None]] = []
        problem, mark = self._load(parts, load, loaded, undo)
        everyone = self._gather(torch.tensor([int(problem is not None), *mark]))
        if not bool(everyone[:, 0].any()):
            problem = self._disagreement(everyone[:, 1:])
            everyone[:, 0] = int(problem is not None)
        failed = everyone[:, 0]
        for restore in undo if bool(failed.any()) else ():
            restore()
        agree(self._gather, problem, failed)
        for put_back in loaded:
            put_back()

    def _disagreement(self, marks: Tensor) -> str | None:
        """What is wrong where not all ranks go on from the same, by what `_load` returned."""
        shards = self._world.size // self._workers.size if self.sharded else 1
        of_each = marks.view(-1, shards, 3)  # those of a shard have the same
        apart = (of_each != of_each[0]).flatten(0, 1).any(0)
        if bool(apart[:2].any()) or bool((marks[:, 0] != marks[0, 0]).any()):
            return (
                "the ranks were given different states: pass each rank's own on every rank, or the "
                "same list of all ranks' states, with None for the same ranks"
            )
        return _APART if bool(apart[2]) else None

    @torch.no_grad()
    def load_here(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any] | None]
    ) -> str | None:
        """As `load_state_dict`, without any communication: returns what is wrong, if something is,
        and nothing was put back."""
        loaded: list[Callable[[], None]] = []
        undo: list[Callable[[], None]] = []
        problem, _ = self._load(
            lambda: saved_state.parts_of(state, self._header()), None, loaded, undo
        )
        for put_back in loaded if problem is None else undo:
            put_back()
        return problem

    @property
    def rank(self) -> int:
        """This process's place among all ranks."""
        return self._world.rank

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self._workers.size

    @property
    def sharded(self) -> bool:
        """Whether each rank of a worker holds a part of the model alone."""
        return any(is_sharded(p) for p in self._held())

    @contextmanager
    def gathering(self, call: str) -> Iterator[Callable[[Any], list[Any]]]:
        """A context for `SAVE` or `LOAD`, which every rank must enter: yields a function that
        returns what each rank passes to it (anything that JSON holds), by rank."""
        if self._in_consensus is not None:
            raise ValueError(
                "inside sync.consensus() the model holds the consensus weights and not this "
                "worker's own: save and load outside it"
            )

        def gather(note: Any) -> list[Any]:
            self._call(call, self.step if call == SAVE else 0)  # before loading, steps may differ
            own = torch.tensor(list(json.dumps(note).encode()), dtype=torch.uint8)
            lengths = self._gather(torch.tensor([len(own)])).flatten().tolist()
            padded = torch.zeros(max(lengths), dtype=torch.uint8)
            padded[: len(own)] = own
            rows = self._gather(padded).tolist()
            self._status(f"in {call}")
            return [json.loads(bytes(row[:n])) for row, n in zip(rows, lengths, strict=True)]

        yield gather
        self._status("computing")

    def share_bytes(self, data: Tensor, root: int) -> None:
        """``data`` (uint8, of one length on all ranks) <- rank ``root``'s; inside `gathering`."""
        own = data.to(self._device)
        self._lane.call(partial(self._world.broadcast, own, root), "sharing a checkpoint's files")
        data.copy_(own)

    def _load(
        self,
        given: Callable[[], dict[int, saved_state.Saved]],
        load: Callable[[int | None], None] | None,
        loaded: list[Callable[[], None]],
        undo: list[Callable[[], None]],
    ) -> tuple[str | None, tuple[int, int, int]]:
        """Append to ``loaded`` what puts the state back, and to ``undo`` what takes back what has
        changed already. Returns what is wrong, if something is, rather than raise it on one rank
        alone; and a mark on which the ranks must agree: whether they regroup, from which states,
        and from which model."""
        mark = (0, 0, 0)
        try:
            parts = given()
            if self._chooser is not None:
                undo.append(self._chooser.undo())
            mine = saved_state.own_part(parts, self._header(), regroup=load is not None)
            saved = [parts[rank] for rank in sorted(parts)] if mine is None else [parts[mine]]
            first, index_of_mine = saved[0], None if mine is None else 0
            for _, gradient_round in self._gradient_rounds:
                gradient_round.refresh()
            if self._chooser is not None:
                self._chooser.load_state_dict(first["auto"])
                undo.append(self._adopt(self._chooser.recipe, {}))
            rounds = [[part["rounds"][i] for part in saved] for i in range(len(self._rounds))]
            if mine is None:
                rounds = self._go_on_from_consensus(parts, load)
                mark = (1, saved_state.digest(parts), saved_state.checksum(self._held()))
            for running, kept in zip(self._rounds, rounds, strict=True):
                loaded.append(saved_state.load_round(running, kept, index_of_mine))
            for index, gradient_round in enumerate(self._keeping_gradient_rounds()):
                gradients = [part["gradients"][index] for part in saved]
                loaded.append(saved_state.load_carried(gradient_round, gradients, index_of_mine))
                scale = float(gradients[0]["scale"])
                loaded.append(partial(setattr, gradient_round, "scale", scale))
            if self._scores is not None and mine is not None:
                loaded.append(self._scores.loader(first["scores"]))
            for name, value in (("step", int), ("_in_step", bool)):
                loaded.append(partial(setattr, self, name, value(first[name.lstrip("_")])))
        except ValueError as error:
            return str(error), mark
        except (LookupError, TypeError, AttributeError, RuntimeError) as error:
            text = f"this is not what sync.state_dict() returned: {type(error).__name__}: {error}"
            return text, mark
        return None, mark

    def _go_on_from_consensus(
        self, parts: Mapping[int, saved_state.Saved], load: Callable[[int | None], None] | None
    ) -> list[list[saved_state.Saved]]:
        """What other ranks keep at rest, by round and rank; with ``load``, their consensus into the
        model, which otherwise stays as it is."""
        first = parts[min(parts)]
        former = regroup.Former(
            first["ranks"],
            first["workers"],
            saved_state.group_size_of(first["recipe"]),
            self.sharded,
        )
        every = {id(t): t for t in (*self._model.parameters(), *self._model.buffers())}
        every.update((id(t), t) for t in self._held())
        before = [(t, local(t).clone()) for t in every.values()] if load is None else []
        held = {id(p): p for p in self._held()}
        buffers = module_buffers(self._model)[0] if self._average_buffers else {}
        apart = {id(b): b for b in buffers.values()}
        try:
            found, mean = regroup.come_to_rest(
                self._rounds, parts, former, list(held.values()), list(apart.values()), load
            )
        finally:
            for tensor, value in before:
                local(tensor).copy_(value)
        if load is not None:
            load(None)
            for tensor, value in zip((*held.values(), *apart.values()), mean, strict=True):
                local(tensor).copy_(value)
        return found

    # -- for the user's loop ----

    def average_gradients(self) -> None:
        """Average the gradients now, if the recipe does so in this step and no backward pass did:
        for a rank that had no loss to differentiate, before it clips. ``optimizer.step()`` does it
        by itself otherwise."""
        for _, gradient_round in self._gradient_rounds:
            gradient_round.before_step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward passes average no gradients, to accumulate several; those
        of the next backward pass outside it (or the step) are averaged as a whole."""
        before, self._sync_gradients = self._sync_gradients, False
        try:
            yield
        finally:
            self._sync_gradients = before

    def report_loss(self, loss: Tensor | float) -> None:
        """Tell the training loss of this step's batch, by which recipes with a leader choose it; no
        communication. For other recipes it does nothing."""
        if self._scores is not None:
            self._scores.report(float(torch.as_tensor(loss).detach()))

    def mean(self, value: Tensor | float) -> float:
        """The mean of a number (a loss) over all ranks; every rank must call it."""
        with torch.inference_mode(False):  # validation may run in that mode; the link does not
            own = torch.as_tensor(value, dtype=torch.float64).detach().reshape(1).clone()
        own = own.to(self._device)
        self._call("mean()", self.step)
        self._lane.call(partial(self._world.mean, own), "mean()")
        self._status("computing")
        return float(own)

    def record(self, places: Sequence[Metrics]) -> None:
        """Have ``places`` told how this run goes, from now on."""
        about = {
            "step": self.step,
            "rank": self._world.rank,
            "ranks": self._world.size,
            "workers": self._workers.size,
            "recipe": self._recipe_text(),
            "schedule": [f"{r.name}, {r.when}" for r in self._recipe if r.over != "replica"],
        }
        self._recorder = Recorder(places, self.stats, self._ledger, self._rates, about)

    @property
    def rounds(self) -> int:
        """Rounds so far."""
        return self._rounds_done

    def calls(self) -> dict[str, CallTotals]:
        """What went over the links so far, by round and call."""
        return {name: copy(call) for name, call in dict(self._ledger.by_call).items()}

    def stats(self) -> Stats:
        """Bytes, rounds and waiting so far, on this rank."""
        return Stats(
            self.step,
            self._rounds_done,
            self._ledger.bytes_sent,
            self._ledger.bytes_received,
            dict(self._ledger.by_collective),
            dict(self._ledger.by_set),
            self._lane.seconds_waiting,
        )

    def _rates(self) -> list[object]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return [group.get("lr") for group in groups]

    def observe_waiting(self, observer: Callable[[float, float], None]) -> None:
        """Have ``observer(start, end)`` (`time.perf_counter`) called after every time that training
        stood still for a round: what adds up to ``stats().seconds_waiting``."""
        self._lane.observer = observer
