"""Go on from what other workers saved: another number of workers, or some of them are lost.

Every saved worker first comes to rest as in `Synchronizer.finish`, with what was in flight folded.
What then goes on depends on where a state lives (`laconic.algorithms.update.Slot`):

    x           the mean over the saved workers: their consensus
    owner       cut anew; a stretch that nobody has any more begins anew from this x
    everywhere  as it was
    private     the mean over the saved workers
    pooled      the mean over the saved workers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.algorithms.update import Quiesce
from laconic.buckets import local
from laconic.engine.parameter_rounds import ParameterRunner
from laconic.engine.saved_state import Saved, load_round, round_state
from laconic.links.simulated import idle_link


@dataclass(frozen=True)
class Former:
    """The ranks that saved: ``ranks`` in ``workers`` workers of neighboring ranks, in groups of
    ``group_size`` workers (0: none). ``sharded``: each rank of a worker held a part of the model,
    and not all of it."""

    ranks: int
    workers: int
    group_size: int
    sharded: bool

    @property
    def inner(self) -> int:
        """Ranks of a worker."""
        return self.ranks // self.workers

    def places(self, rank: int) -> dict[str, tuple[int, int]]:
        """By the name of a set of ranks: its size, and the place of ``rank`` in it."""
        worker, within = divmod(rank, self.inner)
        return {
            "world": (self.ranks, rank),
            "workers": (self.workers, worker),
            "group": (self.group_size or 1, worker % (self.group_size or 1)),
            "replica": (1, 0) if self.sharded else (self.inner, within),
        }

    def first_of_each_worker(self, ranks: Sequence[int]) -> list[int]:
        """Of ``ranks`` one for each worker: those of a worker hold the same x."""
        found: dict[int, int] = {}
        for rank in sorted(ranks):
            found.setdefault(rank // self.inner, rank)
        return sorted(found.values())


@torch.no_grad()
def come_to_rest(
    rounds: Sequence[ParameterRunner],
    parts: Mapping[int, Saved],
    former: Former,
    params: Sequence[Tensor],
    buffers: Sequence[Tensor],
    load: Callable[[int | None], None] | None,
) -> tuple[list[list[Saved]], list[Tensor]]:
    """What the saved ranks (``parts``, by rank) keep for each of ``rounds`` once they are at rest,
    by round and rank. And in float64 the mean of ``params`` over the saved workers, then that of
    ``buffers`` over the saved ranks, as `Synchronizer.finish` takes them.

    ``load(rank)`` puts what a saved rank had into the model, which is overwritten. None: it is
    not known, and there is no mean.
    """
    found: list[list[Saved]] = [[] for _ in rounds]
    means = [_Mean() for _ in (*params, *buffers)]
    firsts = former.first_of_each_worker(list(parts))
    for rank in sorted(parts):
        if load is not None:
            load(rank)
        weights: dict[int, float] = {}
        for index, running in enumerate(rounds):
            saved, step = parts[rank]["rounds"][index], int(parts[rank]["step"])
            saved, own_weights = _at_rest(running, saved, step, former.places(rank))
            found[index].append(saved)
            weights.update(own_weights)
        if load is not None:
            for k, t in enumerate((*params, *buffers)):
                if k >= len(params) or rank in firsts:  # the ranks of a worker hold the same x
                    means[k].add(local(t), weights.get(id(t), 1.0))
    return found, [mean.value for mean in means if mean.value is not None]


class _Mean:
    """A weighted mean of tensors that come one after the other; exact where they are equal."""

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self._total = 0.0

    def add(self, x: Tensor, weight: float) -> None:
        """Take in ``x``."""
        x = x.to(torch.promote_types(x.dtype, torch.float64), copy=True)
        self._total += weight
        if self.value is None:
            self.value = x
        else:
            self.value.add_(x.sub_(self.value), alpha=weight / self._total)


def _at_rest(
    running: ParameterRunner, saved: Saved, step: int, places: Mapping[str, tuple[int, int]]
) -> tuple[Saved, dict[int, float]]:
    """What `checkpoint.round_state` would have returned of a rank after ``finish()``, from what it
    ``saved`` at ``step``; the parameters are that rank's, and are at rest afterwards, too. Also
    their push weights, by the tensor's id, where gossip gives them some. Weights of lost workers
    are missing, so that the weights need not sum to the number of workers."""
    update = running.round.update
    if running.set.vary:  # tensors that come and go are averaged as they were at the save
        return {**saved, "flights": []}, {}
    if not saved["flights"] and not isinstance(update, Quiesce):
        return saved, {}
    over, inner = (places[name] for name in (running.round.over, "replica"))
    before = running.elsewhere(idle_link(*over), idle_link(*inner))
    load_round(before, [saved], 0)()
    weights = before.finish_weighted(step)
    return round_state(before), weights
