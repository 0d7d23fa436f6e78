"""Every recipe, with a small model that every rank trains on batches of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import laconic as la


@dataclass(frozen=True)
class Row:
    """A recipe, and the size of groups that it takes with n workers."""

    recipe: la.Recipe
    group_size: Callable[[int], int | None] = lambda n: None


ROWS: dict[str, Row] = {
    "ddp": Row(la.ddp()),
    "ddp, coded": Row(la.ddp(codec="int4")),
    "power_sgd": Row(la.power_sgd(2)),
    "demo": Row(la.demo(k=8, chunk=8)),
    "local_sgd": Row(la.local_sgd(4)),
    "local_sgd, late": Row(la.local_sgd(6, delay=4)),
    "local_sgd, average": Row(la.local_sgd(3, optimizer_state="average")),
    "local_sgd, coded": Row(la.local_sgd(3, codec="int8")),
    "post_local_sgd": Row(la.post_local_sgd(5, 4)),
    "hierarchical": Row(la.hierarchical(2, 6), lambda n: 2 if n % 2 == 0 else 1),
    "slowmo": Row(la.slowmo(la.local_sgd(2), 5, 0.4)),
    "slowmo, unsharded": Row(la.slowmo(None, 5, 0.4, sharded=False)),
    "slowmo, no average": Row(la.slowmo(la.sgp(), 5, 0.4, average=False)),
    "slowmo over late sgp": Row(la.slowmo(la.sgp(delay=2), 5, 0.4)),
    "sgp": Row(la.sgp()),
    "sgp, bipartite": Row(la.sgp("bipartite_linear")),
    "sgp, late": Row(la.sgp(delay=2)),
    "d_psgd": Row(la.d_psgd()),
    "d_psgd, late": Row(la.d_psgd(delay=1)),
    "easgd": Row(la.easgd(3, pull=0.1)),
    "eamsgd": Row(la.eamsgd(3)),
    "downpour": Row(la.downpour(4)),
    "lsgd": Row(la.lsgd(4, local_period=0)),
    "lsgd, groups": Row(la.lsgd(4, local_period=2), lambda n: 2 if n % 2 == 0 else 1),
    "diloco": Row(la.diloco(5, momentum=0.5)),
    "diloco, late": Row(la.diloco(5, momentum=0.5, delay=4)),
    "diloco, Adam": Row(la.diloco(3, outer=lambda t: torch.optim.Adam(t, lr=0.01))),
    "diloco, eager": Row(la.diloco(5, momentum=0.5, delay=4, merge="eager")),
    "diloco, loscar": Row(la.diloco(5, 1.0, 0.0, delay=4, merge="loscar")),
    "streaming_diloco": Row(la.streaming_diloco(6, 3, 3, codec="int4", momentum=0.5)),
    "streaming_diloco, int2": Row(la.streaming_diloco(6, 3, 3, codec="int2", momentum=0.5)),
    "muloco": Row(la.muloco(5)),
    "muloco, outer, late": Row(la.muloco(5, outer="muon", delay=4)),
    "muloco, outer, coded": Row(la.muloco(5, outer="muon", codec="int2")),
    "diloco, rda": Row(la.diloco(5, momentum=0.5, average="rda")),
    "diloco, rda, coded": Row(la.diloco(5, momentum=0.5, average="rda", codec="int8")),
    "des_loc": Row(la.des_loc(2, 4, 6)),
    "sparse_loco": Row(la.sparse_loco(3, 8, 64)),
    "noloco": Row(la.noloco(3)),
}
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
            self.optimizer.zero_grad()
            loss = (self.model(x) - x.roll(1, 1)).square().mean()
            loss.backward()
            self.sync.report_loss(loss)
            self.optimizer.step()
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
