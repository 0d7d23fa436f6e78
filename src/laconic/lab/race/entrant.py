"""What a race trains under: laconic's rounds, or another library, behind one face, so that both
have the same training loop, clock and validation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import laconic
from laconic.algorithms.compile import in_groups
from laconic.algorithms.round import Recipe
from laconic.auto import Auto
from laconic.lab.race.rivals import Peer
from laconic.lab.race.timeline import Recorder, Watched
from laconic.links import Link


class Contender(Protocol):
    """A model and its optimizer in training on this rank, as one of several."""

    model: nn.Module
    """What to compute the training loss with."""

    @property
    def recorder(self) -> Recorder | None:
        """Of what this rank does when; None where nobody knows."""

    def report(self, loss: float) -> None:
        """Tell this step's training loss, before `step`."""

    def step(self, look: bool) -> None:
        """The optimizer's step, and the rounds that fall due after it. ``look``: at the parameters
        between the two, for `distance`."""

    def distance(self) -> float:
        """How far the workers' parameters were apart at the last look (before the first, at the
        start); NaN where nobody knows. Every rank must call it, while the clock stands."""

    def seek(self, step: int) -> None:
        """Go on as if ``step`` steps had been taken."""

    def consensus(self) -> AbstractContextManager[object]:
        """A context in which the bare model holds what the workers agree on."""

    def mean(self, value: float) -> float:
        """The mean over the ranks, which all must call it."""

    def waiting(self) -> float:
        """Seconds spent waiting for the network so far; NaN where nobody knows."""

    def sent(self) -> float:
        """Bytes of payload sent so far; NaN where nobody knows."""

    def close(self) -> None:
        """End what was started."""


SAMPLED = 2**16
"""Parameters at most over which the workers' distance is taken: averaging all takes a round."""


class Laconic:
    """Under a recipe's rounds. ``group_size``: workers that make up a group, for a recipe with
    rounds inside groups, else without effect; ``interface``: the
    network card that is this rank's alone, if any."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        recipe: Recipe | Auto,
        link: Link,
        group_size: int | None = None,
        interface: str | None = None,
    ) -> None:
        self.model = model
        self.recorder = Recorder(interface)
        self._optimizer = optimizer
        self._link = link
        self._look = False
        # hooks run in the order in which they come: this one before the synchroniser's
        optimizer.register_step_post_hook(lambda *_: self._stepped())
        watched = Watched(link, self.recorder)
        grouped = isinstance(recipe, tuple) and in_groups(recipe)
        size = group_size if grouped else None
        self.sync = laconic.attach(model, optimizer, recipe, link=watched, group_size=size)
        self.sync.observe_waiting(self.recorder.waited)
        self.consensus = self.sync.consensus
        self.mean = self.sync.mean
        self.report = self.sync.report_loss
        self._note()

    def step(self, look: bool) -> None:
        self._look = look
        self._optimizer.step()

    def _stepped(self) -> None:
        """The optimizer has moved the parameters, and no round has run since."""
        if self._look:
            self._note()

    @torch.no_grad()
    def _note(self) -> None:
        """Keep this worker's parameters; above `SAMPLED`, so many of them, evenly spread."""
        flat = torch.cat([p.detach().reshape(-1).float() for p in self.model.parameters()])
        self._noted = flat[:: -(-flat.numel() // SAMPLED)].clone()

    @torch.no_grad()
    def distance(self) -> float:
        """Of the workers' models x_i from their mean m = (1/n) sum_i x_i, the root mean square over
        the P parameters, averaged over n workers,

            d = (1/n) sum_i sqrt((1/P) sum_p (x_ip - m_p)^2)

        in units of the parameters, just before the rounds of the last step with a look."""
        mean = self._noted.clone()
        self.sync.mean(0.0)  # all messages in flight have arrived: the link is free
        self._link.mean(mean)
        return self.sync.mean(float((self._noted - mean).square().mean().sqrt()))

    def seek(self, step: int) -> None:
        self.sync.step = step

    def waiting(self) -> float:
        return self.sync.stats().seconds_waiting

    def sent(self) -> float:
        return self.sync.stats().bytes_sent

    def close(self) -> None:
        self.sync.detach()


class Other:
    """In another library's hands, which keeps no ledger."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, peer: Peer) -> None:
        self._bare = model
        self._attached = peer.attach(model, optimizer)
        self.model = self._attached.model
        self.seek = self._attached.seek
        self.close = self._attached.close

    recorder = None

    def report(self, loss: float) -> None:
        """No library here asks for it."""

    def step(self, look: bool) -> None:
        self._attached.step()

    def distance(self) -> float:
        return math.nan

    @contextmanager
    def consensus(self) -> Iterator[None]:
        parameters = [p.data for p in self._bare.parameters()]
        tensors = [*parameters, *(b for b in self._bare.buffers() if b.is_floating_point())]
        kept = [t.clone() for t in tensors]
        agreed = self._attached.consensus()
        if agreed is not None:
            for t, values in zip(parameters, agreed, strict=True):
                t.copy_(values)
        for t in tensors[0 if agreed is None else len(parameters) :]:
            dist.all_reduce(t)
            t /= dist.get_world_size()
        try:
            yield
        finally:
            for t, values in zip(tensors, kept, strict=True):
                t.copy_(values)

    def mean(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def waiting(self) -> float:
        return math.nan

    def sent(self) -> float:
        return math.nan
