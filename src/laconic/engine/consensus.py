"""The consensus: the model that all workers together have trained."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from laconic.algorithms.exchanges import Mean
from laconic.algorithms.round import Round, workers_differ
from laconic.algorithms.schedules import every
from laconic.algorithms.updates import Average
from laconic.engine.modes import evaluation, in_training, modal, training_weights
from laconic.engine.parameter_rounds import ParameterRunner
from laconic.engine.recipe_run import RecipeRun
from laconic.engine.session import Session
from laconic.errors import check_bool
from laconic.parts import optimizer_state
from laconic.tensors import copies, is_sharded, local, reshard, restore, sums, with_mean


@torch.no_grad()
def write_consensus(run: RecipeRun, *, mean: bool = True, state: bool = False) -> None:
    """Write the consensus into the model.

    ``mean``: the mean over workers of x after `ParameterRunner.write_finished`; otherwise anchors
    where rounds keep them, and the mean over workers of the rest. What no round is about, and x
    where workers should not differ, is compared: see `_make_equal`. ``state``: average the
    optimizer's state, too, where workers differ. That of optimizers with modes always is, since it
    holds the weights of the other mode.
    """
    optimizer = run.session.optimizer
    training = in_training(optimizer)
    _write_own(run, mean)
    for each in training:
        each.eval()
    _write_mean(run, mean)
    if workers_differ(run.recipe) and (state or modal(optimizer)):
        run.average_optimizer_state(Round(every(1), Average(), Mean(), optimizer_state))
    for each in training:
        each.train()


def _write_own(run: RecipeRun, mean: bool) -> None:
    """Write what this worker contributes."""
    session = run.session
    reshard(session.model)
    run.undo_before_step()
    for running in run.rounds:
        running.write_finished(session.step)
    if run.quorum is not None:
        run.quorum.catch_up(keep=False)
    for running in _anchored(run, mean):
        running.write_anchor(session.step)


def _write_mean(
    run: RecipeRun, mean: bool, saved: list[tuple[Tensor, list[Tensor]]] | None = None
) -> None:
    """Average what `_write_own` wrote, where it differs between workers."""
    session = run.session
    covered = {
        id(segment.tensor)
        for running in _anchored(run, mean)
        if running.round.exchange.agrees and not modal(session.optimizer)
        for channel in running.channels
        for segment in channel.bucket.segments
    }
    if workers_differ(run.recipe):
        groups = [[p for p in group if id(p) not in covered] for group in session.groups()]
        session.write_mean(groups, session.workers)
    _make_equal(run, saved)


def _make_equal(run: RecipeRun, saved: list[tuple[Tensor, list[Tensor]]] | None) -> None:
    """Make equal on all ranks what differs between them and was not just averaged: the mean of
    floating-point and complex numbers, rank 0's values of the rest. Copies of what that changes are
    added to ``saved``."""
    session = run.session
    buffers = {id(b) for b in session.model.buffers()}
    kept = buffers if session.settings.buffers == "keep" else set()
    alone = session.links["replica"].size == 1  # else a worker's ranks may have drifted apart
    if workers_differ(run.recipe) and alone:
        kept = kept.union(map(id, session.params()))
    rest = {name: t for name, t in session.state().items() if id(t) not in kept}
    differing = list(session.differing(rest).values())
    if saved is not None:
        saved += copies(differing)
    shared = buffers if session.settings.buffers == "broadcast" else ()
    means = [t for t in differing if id(t) not in shared and with_mean(local(t)) is not None]
    for link, sharded in ((session.world, False), (session.workers, True)):
        numbers = [with_mean(local(t)) for t in means if is_sharded(t) == sharded]
        session.write_mean([[x for x in numbers if x is not None]], link)
    averaged = set(map(id, means))
    session.broadcast([t for t in differing if id(t) not in averaged])


def _anchored(run: RecipeRun, mean: bool) -> list[ParameterRunner]:
    return [r for r in run.rounds if r.round.update.anchor and not mean]


@contextmanager
def consensus(run: RecipeRun, *, mean: bool) -> Iterator[nn.Module]:
    """See `Synchronizer.consensus`."""
    session = run.session
    if session.holds_consensus is not None:
        if session.holds_consensus != mean:
            raise ValueError(
                f"sync.consensus(mean={mean}) inside sync.consensus(mean={not mean}): leave the "
                "outer context first"
            )
        yield session.model
        return
    session.check_complete()
    with session.checked("consensus()"):
        session.joining(fixed=bool(run.rounds))  # raises if x is no longer the optimizer's
        check_bool("mean", mean)
    with torch.no_grad():
        saved = copies([*session.params(), *session.model.buffers()])
    session.holds_consensus = mean
    try:
        with training_weights(session.optimizer):
            with torch.no_grad():
                _write_own(run, mean)
            with evaluation(session.optimizer, session.params()):
                with torch.no_grad():
                    _write_mean(run, mean, saved)
                    written = sums([local(p) for p in session.params()])
                session.status("in consensus()")
                yield session.model
                _check_unchanged(session, written)
    finally:
        restore(reversed(saved))
        reshard(session.model)
        session.holds_consensus = None
        session.status("computing")


@torch.no_grad()
def _check_unchanged(session: Session, written: Tensor) -> None:
    """Warn if the program has replaced the consensus weights, whose `sums` were ``written``."""
    if in_training(session.optimizer):
        return  # it has asked for the other mode's weights
    now = sums([local(p) for p in session.params()])
    if not torch.allclose(now, written, 0, 0, equal_nan=True):
        warnings.warn(
            "the model's weights changed inside sync.consensus(), and leaving it discards that. If "
            "the program swaps weights, such as a moving average, swap them in and out inside the "
            "block, or in before and out after it: else it trains on with other weights than its "
            "own",
            stacklevel=5,
        )


def state_dict_copy(model: nn.Module) -> dict[str, Any]:
    """A copy of ``model.state_dict()``, with its attribute: the modules' versions."""
    state = model.state_dict()
    for key, value in state.items():
        if isinstance(value, Tensor):
            state[key] = value.detach().clone()
    return state
