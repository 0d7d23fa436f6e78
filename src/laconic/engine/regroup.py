"""Continue from what other workers saved: their number has changed, or some of them are lost.

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
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.engine.parameter_rounds import ParameterRunner
from laconic.engine.saved_pieces import Saved, difference, wide
from laconic.engine.saved_state import load_round, round_state
from laconic.links.simulated import idle_link
from laconic.tensors import local


@dataclass(frozen=True)
class Former:
    """The run that saved: ``ranks`` in ``workers`` workers of consecutive ranks, in groups of
    ``group_size`` workers (0: none). ``sharded``: each rank of a worker had a shard of the model.
    """

    ranks: int
    workers: int
    group_size: int
    sharded: bool

    @property
    def ranks_per_worker(self) -> int:
        """Ranks in each worker."""
        return self.ranks // self.workers

    def places(self, rank: int) -> dict[str, tuple[int, int]]:
        """The size of each named set of ranks, and the position of ``rank`` in it."""
        worker, within = divmod(rank, self.ranks_per_worker)
        return {
            "world": (self.ranks, rank),
            "workers": (self.workers, worker),
            "group": (self.group_size or 1, worker % (self.group_size or 1)),
            "replica": (1, 0) if self.sharded else (self.ranks_per_worker, within),
        }

    def first_of_each_worker(self, ranks: Sequence[int]) -> list[int]:
        """The first of ``ranks`` in each worker, whose ranks all have the same x."""
        firsts: dict[int, int] = {}
        for rank in sorted(ranks):
            firsts.setdefault(rank // self.ranks_per_worker, rank)
        return sorted(firsts.values())


@torch.no_grad()
def come_to_rest(
    rounds: Sequence[ParameterRunner],
    parts: Mapping[int, Saved],
    former: Former,
    params: Sequence[Tensor],
    buffers: Sequence[Tensor],
    load: Callable[[int | None], None] | None,
) -> tuple[list[list[Saved]], list[Tensor]]:
    """Bring the saved ranks (``parts``, by rank) to rest. Return the state of ``rounds`` then, by
    round and rank, and float64 means as in `Synchronizer.finish`: of ``params`` over the saved
    workers, then of ``buffers`` over the saved ranks.

    ``load(rank)`` loads a saved rank's model into this one. None: that model is unknown, and there
    are no means.
    """
    at_rest: list[list[Saved]] = [[] for _ in rounds]
    means = [_Mean() for _ in (*params, *buffers)]
    firsts = former.first_of_each_worker(list(parts))
    for rank in sorted(parts):
        if load is not None:
            load(rank)
        weights: dict[int, float] = {}
        for index, running in enumerate(rounds):
            saved, places = parts[rank]["rounds"][index], former.places(rank)
            at = int(parts[rank]["step"]), bool(parts[rank]["in_step"]), places
            saved, round_weights = _at_rest(running, saved, *at)
            at_rest[index].append(saved)
            weights.update(round_weights)
        if load is not None:
            for k, t in enumerate((*params, *buffers)):
                if k >= len(params) or rank in firsts:
                    means[k].add(local(t), weights.get(id(t), 1.0))
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
    running: ParameterRunner,
    saved: Saved,
    step: int,
    in_step: bool,
    places: Mapping[str, tuple[int, int]],
) -> tuple[Saved, dict[int, float]]:
    """Return a rank's `round_state` after ``finish()``, from its state ``saved`` at ``step``, or
    ``in_step``: inside the next one. The parameters are that rank's, and come to rest too. Also
    return their push weights, by tensor id, if gossip has given them some. Lost workers' weights
    are missing, so that the sum need not be the number of workers."""
    update = running.round.update
    if running.set.vary:  # tensors that come and go are averaged as they were at the save
        return {**saved, "flights": []}, {}
    if not saved["flights"] and update.quiesce is None:
        return saved, {}
    over, replica = places[running.round.over], places["replica"]
    former = running.elsewhere(idle_link(*over), idle_link(*replica))
    load_round(former, [saved], None)()
    if in_step:
        former.undo_before_step(step + 1)
    weights = former.finish_weighted(step)
    return round_state(former), weights
