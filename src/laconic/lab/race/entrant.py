"""What a race trains with: a recipe or another library, behind one interface.

Both kinds of entrant share the training loop, the clock and the validation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import laconic
from laconic.algorithms.auto import Auto
from laconic.algorithms.compile import in_groups
from laconic.algorithms.round import Recipe
from laconic.lab.race.rivals import Rival
from laconic.links import Link

SAMPLE_SIZE = 2**16
"""Maximum number of parameters that `distance` uses. All of them would take a whole round."""


class RecipeEntrant:
    """Trains a model under a laconic recipe, on this rank.

    ``group_size`` is the number of workers per group, for recipes with rounds inside groups.
    ``consensus`` is a context in which the model is the consensus model, ``mean`` returns the mean
    of a number over the ranks, which all call, and ``report`` receives the training loss before
    each `step`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        recipe: Recipe | Auto,
        link: Link,
        group_size: int | None = None,
    ) -> None:
        self.model = model
        self._optimizer = optimizer
        self._link = link
        self._sample_due = False
        # Hooks run in order of registration. This one must run before the synchronizer's.
        optimizer.register_step_post_hook(lambda *_: self._after_optimizer())
        grouped = isinstance(recipe, tuple) and in_groups(recipe)
        size = group_size if grouped else None
        self.sync = laconic.attach(model, optimizer, recipe, link=link, group_size=size)
        self.consensus = self.sync.consensus
        self.mean = self.sync.mean
        self.report = self.sync.report_loss
        self.sample()

    def step(self, sample: bool) -> None:
        """Run the optimizer's step and the rounds due after it.

        ``sample`` copies the parameters before these rounds, for `distance`.
        """
        self._sample_due = sample
        self._optimizer.step()

    def _after_optimizer(self) -> None:
        """Sample after the optimizer's update and before any round."""
        if self._sample_due:
            self.sample()

    @torch.no_grad()
    def sample(self) -> None:
        """Copy this worker's parameters, or above `SAMPLE_SIZE` an evenly spaced subset."""
        flat = torch.cat([p.detach().reshape(-1).float() for p in self.model.parameters()])
        self._sample = flat[:: -(-flat.numel() // SAMPLE_SIZE)].clone()

    @torch.no_grad()
    def distance(self) -> float:
        """Return the mean root-mean-square distance of the workers' models from their mean.

        For models x_i of n workers with P parameters each and the mean m = (1/n) sum_i x_i:

            d = (1/n) sum_i sqrt((1/P) sum_p (x_ip - m_p)^2)

        in units of the parameters, just before the rounds of the last sampled step, or at first of
        the initial parameters. Call it on every rank, while the training clock is stopped.
        """
        mean = self._sample.clone()
        self.sync.mean(0.0)  # waits until all messages in flight have arrived and the link is free
        self._link.mean(mean)
        return self.sync.mean(float((self._sample - mean).square().mean().sqrt()))

    @property
    def rounds(self) -> Recipe:
        """The recipe in force."""
        return self.sync.recipe

    def waiting(self) -> float:
        """Return the seconds spent waiting for the network so far."""
        return self.sync.stats().seconds_waiting

    def sent(self) -> float:
        """Return the payload bytes sent so far."""
        return self.sync.stats().bytes_sent

    def close(self) -> None:
        """Release resources."""
        self.sync.detach()


def _average(tensors: Sequence[Tensor]) -> None:
    """Replace the tensors by their means over the ranks.

    There is one message per dtype. One per tensor took 27 s for the 46 tensors of the text model on
    4 hosts with 50 Mbit/s, round trips of 80 ms, 0.1% loss and BBR; one in all takes 1.7 s.
    """
    for dtype in dict.fromkeys(t.dtype for t in tensors):  # in the same order on all ranks
        same = [t for t in tensors if t.dtype == dtype]
        flat = torch.cat([t.reshape(-1) for t in same])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for t, mean in zip(same, torch.split(flat, [t.numel() for t in same]), strict=True):
            t.copy_(mean.view_as(t))


class RivalEntrant:
    """The same with another library, which has no ledger: what is unknown is NaN.

    ``rounds`` is a recipe that communicates at the same steps.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, rival: Rival) -> None:
        self._bare = model
        self._attached = rival.attach(model, optimizer)
        self.model = self._attached.model
        self.rounds = rival.rounds
        self.close = self._attached.close

    def report(self, loss: float) -> None:
        """Do nothing: no library here uses the loss."""

    def step(self, sample: bool) -> None:
        self._attached.step()

    def sample(self) -> None:
        """Do nothing: the distance is unknown."""

    def distance(self) -> float:
        return math.nan

    @contextmanager
    def consensus(self) -> Iterator[None]:
        parameters = [p.data for p in self._bare.parameters()]
        tensors = [*parameters, *(b for b in self._bare.buffers() if b.is_floating_point())]
        saved = [t.clone() for t in tensors]
        consensus = self._attached.consensus()
        if consensus is not None:
            for t, values in zip(parameters, consensus, strict=True):
                t.copy_(values)
        _average(tensors[0 if consensus is None else len(parameters) :])
        try:
            yield
        finally:
            for t, values in zip(tensors, saved, strict=True):
                t.copy_(values)

    def mean(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def waiting(self) -> float:
        return math.nan

    def sent(self) -> float:
        return math.nan


Entrant: TypeAlias = RecipeEntrant | RivalEntrant
"""What takes part in a race on this rank, with one training loop, clock and validation for all."""
