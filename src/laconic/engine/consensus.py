"""The consensus: the model that all workers together have trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laconic.algorithms.compile import workers_differ
from laconic.buckets import local, module_buffers, reshard
from laconic.engine.recipe_run import RecipeRun
from laconic.links.link import held_by_all


@torch.no_grad()
def write_consensus(run: RecipeRun, had_buffers: bool, *, mean: bool = True) -> None:
    """Write the consensus weights, and averaged buffers, into the model.

    ``mean``: the mean over workers of x after `ParameterRunner.write_finished`; without parameter
    rounds all replicas are equal already. Otherwise anchors where rounds keep them, and the mean
    over workers of the rest. ``had_buffers``: the module had buffers when it was attached, on all
    ranks.
    """
    session = run.session
    reshard(session.model)
    for running in run.rounds:
        running.write_finished(session.step)
    if run.quorum is not None:
        run.quorum.catch_up(keep=False)
    anchored = [r for r in run.rounds if r.round.update.anchor and not mean]
    covered = {
        id(segment.tensor)
        for running in anchored
        if running.round.exchange.agrees
        for channel in running.channels
        for segment in channel.bucket.segments
    }
    for running in anchored:
        running.write_anchor(session.step)
    if workers_differ(run.recipe):
        groups = [[p for p in group if id(p) not in covered] for group in session.groups()]
        session.write_mean(groups, session.workers)
    buffers = module_buffers(session.model)
    if session.settings.average_buffers and (had_buffers or buffers[0]):
        job = partial(held_by_all, session.world, buffers)
        session.write_mean(session.comm.call(job, "consensus"), session.world)


@contextmanager
def consensus(run: RecipeRun, had_buffers: bool, *, mean: bool) -> Iterator[nn.Module]:
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
    tensors = [*session.params(), *session.model.buffers()]
    session.check_complete()
    session.joining(fixed=bool(run.rounds))  # raises if x is no longer the optimizer's
    session.call("consensus()")
    with torch.no_grad():
        saved = [local(t).clone() for t in tensors]
    session.holds_consensus = mean
    try:
        write_consensus(run, had_buffers, mean=mean)
        session.status("in consensus()")
        yield session.model
    finally:
        with torch.no_grad():
            for tensor, values in zip(tensors, saved, strict=True):
                local(tensor).copy_(values)
        reshard(session.model)
        session.holds_consensus = None
        session.status("computing")


def state_dict_copy(model: nn.Module) -> dict[str, Any]:
    """A copy of ``model.state_dict()``."""
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else value
        for key, value in model.state_dict().items()
    }
