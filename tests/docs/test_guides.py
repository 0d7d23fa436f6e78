"""The examples of the guides whose users change an import: typed in as they are printed, but for
the import and the placeholders, and run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import laconic

WORKERS, NODE = 16, 8  # the guide's nodes are of 8 ranks

SLOWMO_TUTORIAL = """
import torch
from laconic import SlowMoDistributedDataParallel as SlowMoDDP


def train(
    rank: int,
    world_size: int,
    epochs: int,
    use_slowmo: bool):

    # process group init
    dist_init(rank, world_size)

    # Problem statement
    model = MyAwesomeModel().to(rank)
    if use_slowmo:
        # Wrap the model into SlowMoDDP
        model = SlowMoDDP(model, slowmo_momentum=0.5, nprocs_per_node=8)
    else:
        model = DDP(model, device_ids=[rank])

    dataloader = MySuperFastDataloader()
    loss_ln = MyVeryRelevantLoss()
    optimizer = MyAmazingOptimizer()

    # Any relevant training loop, with a line at the very end specific to SlowMoDDP, e.g.:
    model.train()
    for e in range(epochs):
        for (data, target) in dataloader:
            data, target = data.to(rank), target.to(rank)
            # Train
            outputs = model(data)
            loss = loss_fn(outputs, target)
            loss.backward()
            optimizer.step()
            model.zero_grad(set_to_none=use_slowmo)  # free memory for the perform_slowmo() call below
            if use_slowmo:
                model.perform_slowmo(optimizer)
"""  # noqa: E501

SLOWMO_DOCSTRING = """
net = laconic.SlowMoDistributedDataParallel(model, nprocs_per_node=8)
loss = criterion(net(inputs), targets)
loss.backward()
optimizer.step()
net.perform_slowmo(optimizer)
"""


class Placeholders(dict[str, Any]):
    """What the tutorial leaves to its reader, for the worker ``rank``. Its code calls `to` with the
    rank, here a device."""

    def __init__(self, rank: int) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.losses: list[float] = []
        super().__init__(
            dist_init=lambda *_: None,
            MyAwesomeModel=lambda: self.model,
            MySuperFastDataloader=lambda: list(self.batches(rank)),
            MyVeryRelevantLoss=nn.MSELoss,
            MyAmazingOptimizer=lambda: torch.optim.SGD(self.model.parameters(), lr=0.05),
            loss_fn=self.loss,
        )

    def batches(self, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(rank)
        for _ in range(12):
            x = torch.randn(16, 4, generator=generator)
            yield x, x.sum(1, keepdim=True)

    def loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(outputs, target)
        self.losses.append(float(loss.detach()))
        return loss


def test_the_slowmo_tutorial_runs_and_learns() -> None:
    def run(rank: int) -> tuple[list[float], Tensor]:
        torch.manual_seed(rank)
        given = Placeholders(rank)
        exec(SLOWMO_TUTORIAL, given)
        given["train"](torch.device("cpu"), WORKERS, epochs=8, use_slowmo=True)
        return given.losses, torch.cat([p.detach().view(-1) for p in given.model.parameters()])

    runs = laconic.simulate(run, workers=WORKERS)
    for losses, weights in runs:
        assert len(losses) == 96
        assert sum(losses[-12:]) < 0.2 * sum(losses[:12])
        assert torch.equal(weights, runs[0][1]), "96 calls end with a slow step"


def test_the_slowmo_docstrings_example_runs() -> None:
    def run(rank: int) -> int:
        torch.manual_seed(rank)
        model = nn.Linear(3, 2)
        given: dict[str, Any] = {
            "laconic": laconic,
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "criterion": nn.MSELoss(),
            "inputs": torch.randn(4, 3),
            "targets": torch.randn(4, 2),
        }
        exec(SLOWMO_DOCSTRING, given)
        updates: int = given["net"].num_updates
        return updates

    assert laconic.simulate(run, workers=WORKERS) == [1] * WORKERS
