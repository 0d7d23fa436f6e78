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
from laconic.lab.peers import Peer
from laconic.links import Link
from laconic.round import Recipe


class Contender(Protocol):
    """A model and its optimizer in training on this rank, as one of several."""

    model: nn.Module
    """What to compute the training loss with."""

    def step(self) -> None:
        """The optimizer's step, and the rounds that fall due after it."""

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


class Laconic:
    """Under a recipe's rounds."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, recipe: Recipe, link: Link) -> None:
        self.model = model
        self._optimizer = optimizer
        self.sync = laconic.attach(model, optimizer, recipe, link=link)
        self.consensus = self.sync.consensus
        self.mean = self.sync.mean

    def step(self) -> None:
        self._optimizer.step()

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

    def step(self) -> None:
        self._attached.step()

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
