"""Parameter averaging from its papers' formulas, and the same by laconic, in one process.

A `Team` is all workers at once: ``team.x`` is a matrix whose row i holds worker i's parameters, so
that a formula of a paper is a line of code. `by_laconic` trains the same workers, each for itself,
with a recipe attached.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import laconic
from tutorial.toy import SEED, FFNet, ToyDataset

SGD = partial(torch.optim.SGD, lr=0.05)
TWICE = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True)
ADAM = partial(torch.optim.AdamW, lr=0.003)
BATCH, INPUTS, HIDDEN, SAMPLES = 8, 20, 24, 1024

# --- workers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What the workers train: a small network in float64, and a share of the samples for each.

    Args:
        optimizer: makes an optimizer from parameters.
        workers: how many.
        alike: whether samples are distributed in turn. Otherwise they are ordered by their target
            first, so that one worker sees the small ones and another the large ones.
        norm: whether the network has a BatchNorm layer.
        seed: of the samples, the first parameters and the batches.
    """

    optimizer: Callable[..., torch.optim.Optimizer] = SGD
    workers: int = 4
    alike: bool = False
    norm: bool = False
    seed: int = SEED

    def network(self) -> nn.Module:
        torch.manual_seed(self.seed)
        model = FFNet(INPUTS, num_hl=0, hl_size=HIDDEN)
        if self.norm:
            model.layers.insert(1, nn.BatchNorm1d(HIDDEN))
        return model.double()

    def samples(self) -> tuple[Tensor, Tensor]:
        data = ToyDataset(INPUTS, SAMPLES, self.seed)
        return data.x.double(), data.y.double()

    def shard(self, rank: int) -> tuple[Tensor, Tensor]:
        """The samples of worker ``rank``, which no other worker has."""
        x, y = self.samples()
        order = torch.arange(SAMPLES) if self.alike else y.flatten().argsort()
        own = order[rank :: self.workers] if self.alike else order.chunk(self.workers)[rank]
        return x[own], y[own]

    def loss(self, model: nn.Module, rank: int | None = None) -> float:
        """The loss of all samples, or of worker ``rank``'s, with BatchNorm in evaluation mode."""
        model.eval()
        x, y = self.samples() if rank is None else self.shard(rank)
        with torch.no_grad():
            loss = nn.functional.mse_loss(model(x), y).item()
        model.train()
        return loss


class Worker:
    """One worker: its network, its optimizer and its batches."""

    def __init__(self, task: Task, rank: int) -> None:
        self.model = task.network()
        self.optimizer = task.optimizer(self.model.parameters())
        self.shard = task.shard(rank)
        self.generator = torch.Generator().manual_seed(1000 * task.seed + rank)

    def backward(self) -> float:
        """Compute the loss of the next batch, and its gradient into the parameters' ``.grad``."""
        x, y = self.shard
        drawn = torch.randint(len(x), (BATCH,), generator=self.generator)
        loss = nn.functional.mse_loss(self.model(x[drawn]), y[drawn])
        self.optimizer.zero_grad()
        loss.backward()
        return loss.item()

    @property
    def x(self) -> Tensor:
        """All parameters, in one flat tensor."""
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()


class Team:
    """All workers of a task. ``x``: row i holds worker i's parameters; ``g``: the gradients.

    What is written to ``x`` or ``g`` is one row for each worker, or one for all.
    """

    def __init__(self, task: Task) -> None:
        self.workers = [Worker(task, rank) for rank in range(task.workers)]

    def backward(self) -> Tensor:
        return torch.tensor([worker.backward() for worker in self.workers])

    def step(self) -> None:
        for worker in self.workers:
            worker.optimizer.step()

    def train(self) -> Tensor:
        """A step of each worker's own optimizer along its own gradient; their losses."""
        losses = self.backward()
        self.step()
        return losses

    @property
    def x(self) -> Tensor:
        return torch.stack([worker.x for worker in self.workers])

    @x.setter
    def x(self, new: Tensor) -> None:
        for worker, row in zip(self.workers, new.expand_as(self.x), strict=True):
            nn.utils.vector_to_parameters(row.clone(), worker.model.parameters())

    @property
    def g(self) -> Tensor:
        rows = [[p.grad.flatten() for p in w.model.parameters()] for w in self.workers]
        return torch.stack([torch.cat(row) for row in rows])

    @g.setter
    def g(self, new: Tensor) -> None:
        for worker, row in zip(self.workers, new.expand_as(self.g), strict=True):
            parameters = list(worker.model.parameters())
            parts = row.split([p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter).clone()


# --- from the papers -----------------------------------------------------------------------------


def gradient_averaging(team: Team, steps: int) -> Tensor:
    """every step: g <- mean(g), and all take the same step"""
    for _ in range(steps):
        team.backward()
        team.g = team.g.mean(0)
        team.step()
    return team.x[0]


def local_sgd(team: Team, steps: int, period: int) -> Tensor:
    """every H steps: x_i <- mean(x)"""
    for t in range(1, steps + 1):
        team.train()
        if t % period == 0:
            team.x = team.x.mean(0)
    return team.x.mean(0)


def slowmo(
    team: Team, steps: int, base: int, period: int, beta: float, lr: float, alpha: float = 1.0
) -> Tensor:
    """every tau steps: u <- beta*u + (a - mean(x))/lr ; a <- a - alpha*lr*u ; x_i <- a"""
    a, u = team.x[0], torch.zeros_like(team.x[0])
    for t in range(1, steps + 1):
        team.train()
        if t % period == 0:
            u = beta * u + (a - team.x.mean(0)) / lr
            a = a - alpha * lr * u
            team.x = a
        elif t % base == 0:  # between two slow steps: local SGD
            team.x = team.x.mean(0)
    return a


def easgd(team: Team, steps: int, period: int, beta: float = 0.9) -> Tensor:
    """every tau steps: x_i <- x_i - (beta/n)*(x_i - a) ; a <- (1 - beta)*a + beta*mean(x)"""
    a, n = team.x[0], len(team.workers)
    for t in range(1, steps + 1):
        team.train()
        if t % period == 0:
            x = team.x
            team.x = x - beta / n * (x - a)
            a = (1 - beta) * a + beta * x.mean(0)  # x as it was before the pull
    return a


def lsgd(
    team: Team, steps: int, period: int, local_period: int, group: int, c: float = 0.1
) -> Tensor:
    """every step:    x_i <- x_i + c/tau*(leader of all - x_i), and c/tau_l toward the group's
    every tau_l steps: x_i <- x_i + c*(leader of its group - x_i)
    every tau steps:   x_i <- x_i + c*(leader of all - x_i)      leader: of the least loss"""
    of_group, of_all, losses = team.x, team.x[0], []
    for t in range(1, steps + 1):
        losses.append(team.train())
        score = torch.stack(losses[-10:]).mean(0)
        x = team.x + c / period * (of_all - team.x)
        x = x + c / local_period * (of_group - x)
        if t % local_period == 0:
            groups = zip(x.split(group), score.split(group), strict=True)
            of_group = torch.cat([rows[s.argmin()].expand_as(rows) for rows, s in groups])
            x = x + c * (of_group - x)
        if t % period == 0:
            of_all = x[score.argmin()]
            x = x + c * (of_all - x)
        team.x = x
    return team.x.mean(0)


def sgp(team: Team, steps: int, shares: Callable[[int, int], Tensor]) -> Tensor:
    """every step: x <- P x and w <- P w, the gradient being taken at z = x/w"""
    n = len(team.workers)
    x, w = team.x, torch.ones(n, 1, dtype=torch.float64)
    for k in range(steps):
        z = team.x
        team.train()
        x = x + (team.x - z)  # x makes the step that was computed at z
        x, w = shares(n, k) @ x, shares(n, k) @ w
        team.x = x / w
    return x.sum(0) / w.sum()


def diloco(team: Team, steps: int, period: int, eta: float, mu: float) -> Tensor:
    """every H steps: D = a - mean(x) ; m <- mu*m + D ; a <- a - eta*(D + mu*m) ; x_i <- a"""
    a, m = team.x[0], torch.zeros_like(team.x[0])
    for t in range(1, steps + 1):
        team.train()
        if t % period == 0:
            d = a - team.x.mean(0)
            m = mu * m + d
            a = a - eta * (d + mu * m)
            team.x = a
    return a


# --- who sends to whom: column j says what becomes of worker j's x, so it adds up to 1 ------------


def exponential(n: int, k: int) -> Tensor:
    """Keep half, send half 1, 2, 4 ... ranks on, in turn."""
    hop = 2 ** (k % (int(math.log2(n - 1)) + 1))
    keep = torch.eye(n, dtype=torch.float64) / 2
    return keep + keep.roll(hop, dims=0)


def row_of_three(n: int, k: int) -> Tensor:
    """Keep half. The outer two send half to the middle one, which sends right and left in turn."""
    left, right = (0.0, 0.5) if k % 2 == 0 else (0.5, 0.0)
    shares = [[0.5, left, 0.0], [0.5, 0.5, 0.5], [0.0, right, 0.5]]
    return torch.tensor(shares, dtype=torch.float64)


# --- the same by laconic -------------------------------------------------------------------------


class Trained(NamedTuple):
    """``x``: row i holds worker i's parameters. ``model``: what the workers agree on, and its
    ``loss``. ``sent``: bytes sent for one step, on average over workers, in models."""

    x: Tensor
    model: Tensor
    loss: float
    sent: float
    workers: list[Worker]


def by_laconic(task: Task, recipe: laconic.Recipe, steps: int, **options: Any) -> Trained:
    """Train ``task`` with ``recipe``; ``options`` are `laconic.attach`'s."""

    def train(rank: int) -> tuple[Worker, Tensor, float, float]:
        worker = Worker(task, rank)
        sync = laconic.attach(worker.model, worker.optimizer, recipe, **options)
        begun = sync.stats().bytes_sent
        for _ in range(steps):
            sync.report_loss(worker.backward())  # leaders are chosen by it
            worker.optimizer.step()
        sent = sync.stats().bytes_sent - begun
        with sync.consensus(mean=False):  # as by hand: the anchor or center
            model, loss = worker.x, task.loss(worker.model)
        sync.detach()
        return worker, model, loss, sent / (8 * len(model) * steps)

    workers, models, losses, sent = zip(*laconic.simulate(train, task.workers), strict=True)
    x = torch.stack([worker.x for worker in workers])
    return Trained(x, models[0], losses[0], sum(sent) / len(sent), list(workers))


def remembered(team: Team, name: str) -> Tensor:
    """What the workers' optimizers keep under ``name``: a row for each."""
    return torch.stack(
        [
            torch.cat([w.optimizer.state[p][name].flatten() for p in w.model.parameters()])
            for w in team.workers
        ]
    )


def apart(rows: Tensor) -> float:
    """The largest difference between a worker's row and the first's."""
    return float((rows - rows[0]).abs().max())


Losses = dict[str, list[float]]
"""For each algorithm, by seed."""


def times(losses: Losses, name: str, other: str) -> tuple[float, float]:
    """The loss of ``name`` over that of ``other``, seed by seed: the least and the most."""
    ratios = [a / b for a, b in zip(losses[name], losses[other], strict=True)]
    return min(ratios), max(ratios)


def check_claims(ordered: Losses, shuffled: Losses, sent: dict[str, float]) -> None:
    """Assert what chapter 6 says about its table of losses."""
    # what a longer period costs
    assert times(ordered, "local_sgd(4)", "ddp()")[1] < 2
    assert times(ordered, "local_sgd(16)", "ddp()")[0] > 10
    assert times(ordered, "local_sgd(64)", "ddp()")[0] > 30
    assert times(shuffled, "local_sgd(64)", "ddp()")[1] < 1.5
    # longer steps pay off here, with any algorithm
    assert times(ordered, "ddp()", "ddp(), lr 0.1")[0] > 1.5
    assert times(shuffled, "ddp()", "ddp(), lr 0.1")[0] > 1.5
    # what slow momentum gains, and where it is no more than a larger lr, or too much
    assert times(ordered, "local_sgd(16)", "slowmo(.., 16, 0.5)")[0] > 5
    assert times(ordered, "local_sgd(16), lr 0.1", "slowmo(.., 16, 0.5)")[0] > 2
    assert times(shuffled, "local_sgd(16)", "slowmo(.., 16, 0.5)")[0] > 1.5
    least, most = times(shuffled, "local_sgd(16), lr 0.1", "slowmo(.., 16, 0.5)")
    assert 1 / 1.7 < least <= most < 1.7
    assert times(shuffled, "slowmo(.., 16, 0.9)", "local_sgd(16)")[0] > 1.5
    # DiLoCo's longer steps, gossip, and loosely coupled workers
    assert times(shuffled, "ddp()", "diloco(16)")[0] > 1.5
    assert times(ordered, "local_sgd(16)", "diloco(16)")[0] > 5
    assert times(shuffled, "local_sgd(16)", "diloco(16)")[0] > 1.5
    for losses in (ordered, shuffled):
        least, most = times(losses, "sgp()", "ddp()")
        assert 1 / 1.3 < least <= most < 1.3
        for name in ("easgd(16)", "lsgd(16, 4)"):
            assert times(losses, name, "local_sgd(16)")[0] > 1.2
    # bytes
    for name in ("slowmo(.., 16, 0.5)", "diloco(16)", "easgd(16)"):
        assert abs(sent[name] / sent["local_sgd(16)"] - 1) < 0.05
    assert abs(sent["sgp()"] - 1) < 0.05
    assert sent["local_sgd(64)"] < 1.02 * 1.5 / 64
