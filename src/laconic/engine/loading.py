"""Saving and loading a synchronizer's state: this rank's own, or that of other workers, whose
number has changed, or of which some are lost.

Every saved worker first comes to rest as in `Synchronizer.finish`, which folds its rounds in
flight. What a worker then continues with depends on the state's slot
(`laconic.algorithms.update.Slot`):

    x           the mean over the saved workers: their consensus
    owner       divided again; elements that no worker has any more start again from this x
    everywhere  unchanged
    private     the mean over the saved workers
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from laconic.engine import saved_state
from laconic.engine.consensus import successor
from laconic.engine.gradient_rounds import GradientRunner
from laconic.engine.joint_optimizer import JointOptimizer
from laconic.engine.recipe_run import RecipeRun
from laconic.engine.saved_state import Saved, difference, wide
from laconic.engine.session import Sets
from laconic.links.agreement import agree
from laconic.links.null import NullLink
from laconic.links.texts import Gather
from laconic.parts import module_buffers
from laconic.tensors import local, overwrite

LoadModel = Callable[[int | None], None]
"""Loads the model that a rank has saved into this one's; of None, the one to go on with."""


def _stateful(run: RecipeRun) -> list[GradientRunner]:
    """The gradient rounds with state. Averages inside a worker have none; another layout of ranks
    need not have them."""
    return [gradients for gradients in run.gradients if gradients.round.exchange.slots]


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
        "parameters": saved_state.checksum(chain(*session.held())),
    }


def _positions(run: RecipeRun) -> list[list[int]]:
    """`RecipeRun.joined`, as positions in the optimizer's order."""
    position = {id(p): k for k, p in enumerate(chain(*run.session.held()))}
    return [[position[id(p)] for p in batch if id(p) in position] for batch in run.joined]


@torch.no_grad()
def state_dict(run: RecipeRun) -> dict[str, Any]:
    """See `Synchronizer.state_dict`. All that is in flight has arrived."""
    policy, optimizer = run.session.policy, run.session.optimizer
    with run.quiet():
        return {
            **header(run),
            "step": run.session.step,
            "in_step": run.session.in_step,
            "stepped": sorted(optimizer.stepped) if isinstance(optimizer, JointOptimizer) else [],
            "joined": _positions(run),
            "rounds": [saved_state.round_state(running) for running in run.rounds],
            "gradients": [
                {**saved_state.channel_states(g), "scale": g.set.scale, "positions": g.positions}
                for g in _stateful(run)
            ],
            "auto": None if policy is None else policy.state_dict(),
            "scores": run.scores.state_dict(),
            "quorum": None if run.quorum is None else run.quorum.state_dict(),
        }


@torch.no_grad()
def load(
    run: RecipeRun,
    parts: Sequence[Saved],
    load_model: LoadModel | None = None,
    *,
    alone: bool = False,
) -> RecipeRun:
    """Load the state of this rank, the only one of ``parts``, or, with ``load_model``, those of
    other ranks, which have this rank's shard of the model. Returns what to go on with in place of
    ``run``. Raises ``ValueError``, and has changed nothing, where any rank cannot load; ``alone``:
    where this one cannot."""
    session, problem, seen = run.session, None, list[int]()
    put = list[Callable[[], None]]()
    with ExitStack() as undo:
        try:
            run = _prepared(run, parts, load_model, put, undo)
            seen = [] if run.quorum is None else parts[0]["quorum"]["rounds"]
        except ValueError as error:
            problem = str(error)
        except (LookupError, TypeError, AttributeError, RuntimeError) as error:
            kind = type(error).__name__
            problem = f"this is not what sync.state_dict() returned: {kind}: {error}"
        _check_all(NullLink().gather if alone else session.gather, problem, seen)
        undo.pop_all()
    for each in put:
        each()
    run.drift.restart()
    session.restart(int(parts[0]["step"]), in_step=bool(parts[0]["in_step"]))
    if isinstance(session.optimizer, JointOptimizer):
        session.optimizer.restart(parts[0].get("stepped", ()) if load_model is None else ())
    return run


def _check_all(gather: Gather, problem: str | None, seen: Sequence[int]) -> None:
    """Raise on all ranks where any has a ``problem``, or they would not go on from the same rounds
    with a quorum. ``seen``: how many of these this worker has seen close, by kind."""
    agree(gather, problem)
    if seen:
        everyone = gather(torch.tensor(seen))
        if bool((everyone != everyone[0]).any()):
            raise ValueError(
                "the workers continue from different rounds: load states that all ranks saved in "
                "one call of laconic.save, or while no rank was in optimizer.step()"
            )


def _prepared(
    run: RecipeRun,
    saved: Sequence[Saved],
    load_model: LoadModel | None,
    put: list[Callable[[], None]],
    undo: ExitStack,
) -> RecipeRun:
    """Prepare what ``put`` puts in place, see `saved_state.loaded`, for the run that is returned.
    ``undo`` restores what this changes."""
    session, first = run.session, saved[0]
    saved_state.check(first, header(run), own=load_model is None)
    if load_model is not None and run.quorum is not None:
        raise ValueError(
            "rounds with a quorum are resumed by the same ranks, each from its own state: to go on "
            "with others, call sync.finish(), save the model, and attach again"
        )
    if first["joined"]:  # else no optimizer was bound
        undo.callback(session.join_at(list(chain(*first["joined"]))))
    run.refresh()
    if session.policy is not None:
        undo.callback(session.policy.undo())
        session.policy.load_state_dict(first["auto"])
        before, run = run, RecipeRun(session, session.policy.recipe, run.drift)
        undo.callback(successor(before, run))
    held = list(chain(*session.held()))
    joined = [[held[k] for k in batch] for batch in first["joined"]] or run.joined
    workers = None
    if load_model is not None:
        saved = _at_rest(run, saved, joined, load_model)
        workers = [_worker(part) for part in saved]
    for index, running in enumerate(run.rounds):
        states = [part["rounds"][index] for part in saved]
        put.append(partial(running.become, saved_state.loaded(running, states, joined, workers)))
    put.append(partial(setattr, run, "joined", joined))
    for index, gradients in enumerate(_stateful(run)):
        states = [part["gradients"][index] for part in saved]
        undo.callback(gradients.refresh)
        gradients.follow(states[0].get("positions", gradients.positions))
        for state, values in saved_state.loaded_states(gradients, states, workers):
            put.append(partial(state.update, values))
        put.append(partial(setattr, gradients.set, "scale", float(states[0]["scale"])))
    if workers is None:
        put.append(partial(run.scores.load_state_dict, first["scores"]))
    if run.quorum is not None:
        put.append(partial(run.quorum.load, first["quorum"], int(first["step"])))
    return run


def _worker(part: Saved) -> int:
    """The worker that saved ``part``: ranks are in workers of consecutive ones."""
    return int(part["rank"] // (part["ranks"] // part["workers"]))


def _at_rest(
    run: RecipeRun,
    parts: Sequence[Saved],
    joined: Sequence[Sequence[Tensor]],
    load_model: LoadModel,
) -> list[Saved]:
    """Other ranks' ``parts`` after ``finish()``. Their consensus is written into the model."""
    session = run.session
    params = session.params()
    kept = session.settings.buffers == "keep"
    buffers = [] if kept else list(module_buffers(session.model)[0].values())
    means, totals = dict[int, Tensor](), defaultdict[int, float](float)
    found: list[Saved] = []
    seen: set[int] = set()  # workers, whose ranks all have the same x
    for part in parts:
        load_model(part["rank"])
        rounds, weights = _finished(run, part, joined)
        found.append({**part, "rounds": rounds})
        for t in (*(() if _worker(part) in seen else params), *buffers):
            x, weight = local(t), weights.get(id(t), 1.0)
            totals[id(t)] += weight
            if (mean := means.get(id(t))) is None:
                means[id(t)] = wide(x)
            else:  # exact if all are equal
                mean.add_(difference(x, mean), alpha=weight / totals[id(t)])
        seen.add(_worker(part))
    load_model(None)
    for t in (*params, *buffers):
        overwrite(local(t), means[id(t)])
    return found


def _idle_links(part: Saved, sharded: bool) -> Sets:
    """Links by named set of ranks, which know their size, and the place of the rank that saved
    ``part``: workers were in groups. ``sharded``: each rank of a worker had a shard of the
    model."""
    ranks, workers, group = part["ranks"], part["workers"], part["group_size"] or 1
    worker, each = _worker(part), ranks // workers
    return {
        "world": NullLink(ranks, part["rank"]),
        "workers": NullLink(workers, worker),
        "group": NullLink(group, worker % group),
        "replica": NullLink(1, 0) if sharded else NullLink(each, part["rank"] % each),
    }


@torch.no_grad()
def _finished(
    run: RecipeRun, part: Saved, joined: Sequence[Sequence[Tensor]]
) -> tuple[list[Saved], dict[int, float]]:
    """What the rank that saved ``part``, and whose x the model has, would have after ``finish()``:
    the state of its rounds, and in the model its x. Also the push weights of that, by tensor id, if
    gossip has given it some. Lost workers' weights are missing, so that the sum need not be the
    number of workers."""
    links, step = _idle_links(part, run.session.sharded), part["step"]
    found, weights = list[Saved](), dict[int, float]()
    for index, running in enumerate(run.rounds):
        saved = part["rounds"][index]
        if running.set.vary or not (saved["flights"] or running.round.update.quiesce):
            # tensors that come and go are averaged as they were at the save
            found.append({**saved, "flights": []})
            continue
        former = saved_state.loaded(running, [saved], joined, None, links)
        if part["in_step"]:
            former.undo_before_step(step + 1)
        weights.update(former.finish(step, weighted=True))
        found.append(saved_state.round_state(former))
    return found, weights
