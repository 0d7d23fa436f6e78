"""Saving and loading a synchronizer's state: this rank's own, or that of other workers, whose
number has changed, or of which some are lost.

Every saved worker first comes to rest as in `Synchronizer.finish`, which folds its rounds in
flight. What a worker then continues with depends on the state's slot
(`laconic.algorithms.update.Slot`):

    x           the mean over the saved workers: their consensus
    owner       divided again; elements that no worker has any more start again from this x
    everywhere  unchanged
    private     the mean over the saved workers
    pooled      unchanged where the same worker saved it, else the mean over the saved workers; a
                common correction keeps the mean over workers when there are fewer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laconic.engine import saved_state
from laconic.engine.consensus import successor
from laconic.engine.gradient_rounds import GradientRunner
from laconic.engine.joint_optimizer import JointOptimizer
from laconic.engine.parameter_rounds import ParameterRunner
from laconic.engine.recipe_run import RecipeRun
from laconic.engine.saved_state import (
    Others,
    Saved,
    Source,
    States,
    channel_states,
    difference,
    load_channels,
    load_round,
    round_state,
    wide,
)
from laconic.engine.session import Session
from laconic.links.agreement import agree
from laconic.links.simulated import idle_link
from laconic.parts import module_buffers
from laconic.tensors import copies, local, overwrite, restore

LoadModel = Callable[[int | None], None]
_DIFFERENT_WEIGHTS = (
    "this state comes from other ranks, so every rank must load the same weights before it, such "
    "as those of consensus_state_dict(): here they differ"
)


def _stateful(run: RecipeRun) -> list[GradientRunner]:
    """The gradient rounds with state. Averages inside a worker have none; another layout of ranks
    need not have them."""
    return [gradients for gradients in run.gradients if gradients.exchange.slots]


def header(run: RecipeRun) -> Saved:
    """What tells whether a saved state belongs to this run and rank."""
    session = run.session
    return {
        "version": saved_state.VERSION,
        **run.describe(),
        "text": run.text(),
        "ranks": session.world.size,
        "workers": session.workers.size,
        "rank": session.world.rank,
        "parameters": saved_state.checksum([p for group in session.held() for p in group]),
    }


@torch.no_grad()
def state_dict(run: RecipeRun) -> Saved:
    """See `Synchronizer.state_dict`."""
    policy = run.session.policy
    if run.quorum is not None:
        run.quorum.settle(failed=True)
    run.session.comm.drain()
    with nullcontext() if run.quorum is None else run.quorum.port.quiet():
        return {
            **header(run),
            "step": run.session.step,
            "in_step": run.session.in_step,
            "rounds": [saved_state.round_state(running) for running in run.rounds],
            "gradients": [{**channel_states(g), "scale": g.set.scale} for g in _stateful(run)],
            "auto": None if policy is None else policy.state_dict(),
            "scores": None if run.scores is None else run.scores.state_dict(),
            "quorum": None if run.quorum is None else run.quorum.state_dict(),
        }


@dataclass
class Loading:
    """One load on one rank. Until `complete` nothing has changed that `cancel` does not restore.

    ``problem``: what is wrong, None if nothing is; it is not raised, since the other ranks must
    learn of it. ``mark``: numbers on which the ranks must agree: whether they regroup, from which
    states, and from which model. ``run``, ``step``, ``in_step``: what to go on with.
    """

    run: RecipeRun
    problem: str | None = None
    mark: tuple[int, int, int] = (0, 0, 0)
    step: int = 0
    in_step: bool = False
    _load: list[Callable[[], None]] = field(default_factory=list)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    def prepare(cls, run: RecipeRun, state: States, load_model: LoadModel | None) -> Loading:
        """Read ``state``, as the user passes it, or, with ``load_model``, saved states by rank.
        ``load_model(rank)`` loads that rank's model into this one, and ``load_model(None)`` the one
        that this rank goes on with."""
        loading = cls(run)
        try:
            loading._read(state, load_model)
        except ValueError as error:
            loading.problem = str(error)
        except (LookupError, TypeError, AttributeError, RuntimeError) as error:
            kind = type(error).__name__
            loading.problem = f"this is not what sync.state_dict() returned: {kind}: {error}"
        return loading

    def _read(self, state: States, load_model: LoadModel | None) -> None:
        here = header(self.run)
        parts: Any = saved_state.parts_of(state, here) if load_model is None else state
        policy = self.run.session.policy
        if policy is not None:
            self._undo.append(policy.undo())
        mine = saved_state.own_part(parts, here, regroup=load_model is not None)
        if mine is None and self.run.quorum is not None:
            raise ValueError(
                "rounds with a quorum are resumed by the same ranks, each from its own state: to "
                "go on with others, call sync.finish(), save the model, and attach again"
            )
        if mine is None and self.run.session.sharded:
            parts = _of_own_shard(self.run.session, parts)
        ranks = sorted(parts) if mine is None else [mine]
        first = parts[ranks[0]]
        source: Source = None if mine is not None else _others(self.run.session, parts)
        joined = {k for r in first["rounds"] for batch in r["joined"] for k in batch}
        if joined:
            self._undo.append(self.run.session.join_at(joined))
        self.run.refresh()
        if policy is not None:
            policy.load_state_dict(first["auto"])
            self.run, undo = successor(self.run, policy.recipe, {})
            self._undo.append(undo)
        run = self.run
        saved = [parts[rank] for rank in ranks]
        rounds = [[part["rounds"][i] for part in saved] for i in range(len(run.rounds))]
        if mine is None:
            rounds = _consensus_of(run, parts, load_model)
            params = run.session.params()
            self.mark = (1, saved_state.digest(parts), saved_state.checksum(params))
        for running, states in zip(run.rounds, rounds, strict=True):
            self._load.append(saved_state.load_round(running, states, source))
        for index, gradients in enumerate(_stateful(run)):
            states = [part["gradients"][index] for part in saved]
            self._load.append(load_channels(gradients, states, source))
            self._load.append(partial(setattr, gradients.set, "scale", float(states[0]["scale"])))
        if run.scores is not None and mine is not None:
            self._load.append(run.scores.loader(first["scores"]))
        self.step, self.in_step = int(first["step"]), bool(first["in_step"])
        if run.quorum is not None:
            self._load.append(partial(run.quorum.load, first["quorum"], self.step))

    def agree(self, session: Session) -> None:
        """Raise ``ValueError`` on every rank, with nothing changed, if any rank has a problem or
        they load different states."""
        everyone = session.gather(torch.tensor([int(self.problem is not None), *self.mark]))
        problem = self.problem
        if not bool(everyone[:, 0].any()):
            problem = _disagreement(session, everyone[:, 1:])
            everyone[:, 0] = int(problem is not None)
        failed = everyone[:, 0]
        if bool(failed.any()):
            self.cancel()
        agree(session.gather, problem, failed)

    def cancel(self) -> None:
        """Restore what `prepare` has changed."""
        for undo in self._undo:
            undo()

    def complete(self, session: Session) -> None:
        """Put the loaded state in place."""
        for load in self._load:
            load()
        session.restart(self.step)
        if isinstance(session.optimizer, JointOptimizer):
            session.optimizer.reset()


def _disagreement(session: Session, marks: Tensor) -> str | None:
    """What is wrong if not all ranks go on from the same: from all ranks' `Loading.mark`."""
    shards = session.world.size // session.workers.size if session.sharded else 1
    of_each = marks.view(-1, shards, 3)  # ranks with the same shard have the same
    apart = (of_each != of_each[0]).flatten(0, 1).any(0)
    if bool(apart[:2].any()) or bool((marks[:, 0] != marks[0, 0]).any()):
        return (
            "the ranks were given different states: pass each rank's own on every rank, or the "
            "same list of all ranks' states, with None for the same ranks"
        )
    return _DIFFERENT_WEIGHTS if bool(apart[2]) else None


def _of_own_shard(session: Session, parts: Mapping[int, Saved]) -> dict[int, Saved]:
    """Those of ``parts``, by the rank that saved them, that have the same shard of the model."""
    shards = session.world.size // session.workers.size
    first = parts[min(parts)]
    if first["ranks"] != shards * first["workers"]:
        raise ValueError(
            f"the state was saved with {first['ranks'] // first['workers']} ranks in each worker, "
            f"and there are {shards} now: a sharded model needs as many"
        )
    own = {r: part for r, part in parts.items() if r % shards == session.world.rank % shards}
    if not own:
        raise ValueError("the last copy of this rank's shard of the state is lost")
    return own


def _others(session: Session, parts: Mapping[int, Saved]) -> Others:
    """``parts``, by the rank that saved them, as the source of this rank's state."""
    first = parts[min(parts)]
    ranks_per_worker = first["ranks"] // first["workers"]
    savers = [rank // ranks_per_worker for rank in sorted(parts)]
    return Others(savers, session.workers.rank, session.workers.size)


def _consensus_of(
    run: RecipeRun, parts: Mapping[int, Saved], load_model: LoadModel | None
) -> list[list[Saved]]:
    """What other ranks' rounds keep at rest, by round and rank. With ``load_model`` their consensus
    is written into the model, which otherwise stays as it is."""
    session = run.session
    params = {id(p): p for p in session.params()}
    tensors = {id(t): t for t in (*session.model.parameters(), *session.model.buffers())} | params
    before = [] if load_model else copies(tensors.values())
    kept = session.settings.buffers == "keep"
    averaged = {} if kept else module_buffers(session.model)[0]
    buffers = {id(b): b for b in averaged.values()}
    try:
        found, mean = _come_to_rest(
            run, parts, list(params.values()), list(buffers.values()), load_model
        )
    finally:
        restore(before)
    if load_model is not None:
        load_model(None)
        for tensor, values in zip((*params.values(), *buffers.values()), mean, strict=True):
            overwrite(local(tensor), values)
    return found


def _places(saved: Saved, sharded: bool) -> dict[str, tuple[int, int]]:
    """The size of each named set of ranks in the run that ``saved``, and this rank's place there:
    ranks are in workers of consecutive ones, and those in groups. ``sharded``: each rank of a
    worker had a shard of the model."""
    ranks, workers, group = saved["ranks"], saved["workers"], saved["group_size"] or 1
    worker, within = divmod(saved["rank"], ranks // workers)
    return {
        "world": (ranks, saved["rank"]),
        "workers": (workers, worker),
        "group": (group, worker % group),
        "replica": (1, 0) if sharded else (ranks // workers, within),
    }


@torch.no_grad()
def _come_to_rest(
    run: RecipeRun,
    parts: Mapping[int, Saved],
    params: Sequence[Tensor],
    buffers: Sequence[Tensor],
    load: LoadModel | None,
) -> tuple[list[list[Saved]], list[Tensor]]:
    """Bring the saved ranks (``parts``, by rank) to rest. Return the state of their rounds then, by
    round and rank, and float64 means as in `Synchronizer.finish`: of ``params`` over the saved
    workers, then of ``buffers`` over the saved ranks.

    ``load(rank)`` loads a saved rank's model into this one. None: that model is unknown, and there
    are no means.
    """
    at_rest: list[list[Saved]] = [[] for _ in run.rounds]
    means = [_Mean() for _ in (*params, *buffers)]
    seen: set[int] = set()  # workers, whose ranks all have the same x
    for rank, part in sorted(parts.items()):
        if load is not None:
            load(rank)
        places, weights = _places(part, run.session.sharded), dict[int, float]()
        for index, running in enumerate(run.rounds):
            saved, of_round = _at_rest(running, part["rounds"][index], part, places)
            at_rest[index].append(saved)
            weights.update(of_round)
        worker = places["workers"][1]
        if load is not None:
            for k, t in enumerate((*params, *buffers)):
                if k >= len(params) or worker not in seen:
                    means[k].add(local(t), weights.get(id(t), 1.0))
        seen.add(worker)
    return at_rest, [mean.value for mean in means if mean.value is not None]


class _Mean:
    """A running weighted mean of tensors, exact if they are equal."""

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self._total = 0.0

    def add(self, x: Tensor, weight: float) -> None:
        """Add ``x`` to the mean."""
        self._total += weight
        if self.value is None:
            self.value = wide(x)
        else:
            self.value.add_(difference(x, self.value), alpha=weight / self._total)


def _at_rest(
    running: ParameterRunner, saved: Saved, part: Saved, places: Mapping[str, tuple[int, int]]
) -> tuple[Saved, dict[int, float]]:
    """Return a rank's `round_state` after ``finish()``, from its state ``saved``, of its ``part``.
    The parameters are that rank's, and come to rest too. Also return their push weights, by tensor
    id, if gossip has given them some. Lost workers' weights are missing, so that the sum need not
    be the number of workers."""
    update = running.round.update
    if running.set.vary:  # tensors that come and go are averaged as they were at the save
        return {**saved, "flights": []}, {}
    if not saved["flights"] and update.quiesce is None:
        return saved, {}
    step, links = part["step"], {name: idle_link(*place) for name, place in places.items()}
    former = running.fresh(saved["joined"], links)
    load_round(former, [saved], None)()
    if part["in_step"]:
        former.undo_before_step(step + 1)
    former.fold_at_end(step)
    weights = former.push_weights()
    former.finish(step, weighted=bool(weights))
    return round_state(former), weights
