"""The recipes that the golden digests name, with a small model that every rank trains on batches of
its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import laconic as la

from tests.support import recipes
from tests.support.loops import descend
from tests.support.recipes import Row

ROWS: dict[str, Row] = {name: recipes.ROWS[name] for name in recipes.tagged("golden")}
"""Every recipe, and variants whose states live elsewhere."""


class Run:
    """One worker's training on ``device``; its batches are those of ``data``, by step and rank."""

    def __init__(
        self,
        row: Row,
        ranks: int,
        rank: int,
        data: int = 0,
        device: torch.device | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(rank)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)).double()
        self.device = device or torch.device("cpu")
        self.model.to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.5)
        self.data, self.rank = data, rank
        options = {"group_size": row.group_size(ranks), **options}
        self.sync = la.attach(self.model, self.optimizer, row.recipe, **options)

    def go(self, end: int) -> list[Tensor]:
        trace = []
        while self.sync.step < end:
            seed = 10_000 * self.data + 100 * self.sync.step + self.rank
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).double()
            x = x.to(self.device)
            loss = (self.model(x) - x.roll(1, 1)).square().mean()
            descend(self.optimizer, loss, self.sync)
            trace.append(self.flat())
        return trace

    def flat(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])

    def consensus(self) -> Tensor:
        with self.sync.consensus():
            return self.flat()

    def momenta(self) -> Tensor:
        states = [self.optimizer.state[p]["momentum_buffer"] for p in self.model.parameters()]
        return torch.cat([s.reshape(-1) for s in states])

    def save(self, path: Path) -> None:
        la.save(path, self.model, self.optimizer, others={"rank": self.rank})

    def load(self, path: Path) -> dict[str, Any]:
        return la.load(path, self.model, self.optimizer)
