"""Mistakes with DistributedDataParallel that raise no error, and laconic in its place.

Each function runs on every rank and returns its result.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import laconic
from tutorial.full_ddp import share_of
from tutorial.naive_ddp import spawn_and_join
from tutorial.toy import SEED, FFNet, ToyDataset, sgd


def in_turn(
    rank: int, world_size: int, *, function: Callable[..., Any], options: Sequence[dict[str, Any]]
) -> list[Any]:
    """The results of ``function`` for each of several ``options``, in one group of processes."""
    return [function(rank, world_size, **each) for each in options]


def runs(world_size: int, function: Callable[..., Any], *options: dict[str, Any]) -> list[Any]:
    """What processes return that call a function with each of several options: a list for each."""
    returned = spawn_and_join(world_size, in_turn, function=function, options=options)
    return list(zip(*returned, strict=True))


def parameters(result: dict[str, Any]) -> Tensor:
    return torch.tensor(result["parameters"], dtype=torch.float64)


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    return float((parameters(one) - parameters(other)).abs().max())


def small_network() -> FFNet:
    torch.manual_seed(SEED)
    return FFNet(input_size=10, num_hl=0, hl_size=8).double()


def gradient(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector([p.grad for p in model.parameters()])


def train_through(rank: int, world_size: int, *, wrapper: bool) -> list[float]:
    """Parameters after an epoch of forward passes through the wrapper, or through the model."""
    model = small_network()
    wrapped = DistributedDataParallel(model)
    forward = wrapped if wrapper else model
    optimizer = sgd(model)
    loader, _ = share_of(ToyDataset(10, 64), 16, rank, world_size)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(forward(x.double()), y.double()).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


def last_gradient(rank: int, world_size: int, *, divisor: str) -> list[float]:
    """The averaged gradient of the last batch: 4 samples of all ranks, where others have 16."""
    model = small_network()
    wrapped = DistributedDataParallel(model)
    loader, _ = share_of(ToyDataset(10, 20), 16, rank, world_size)
    for x, y in loader:
        model.zero_grad()
        errors = (wrapped(x.double()) - y.double()).square()
        by = {
            "samples": len(x),  # as mse_loss does
            "batch size": 16 // world_size,  # a constant
            "samples and ranks": len(x) * world_size,  # DDP divides by the ranks, too
        }
        (errors.sum() / by[divisor]).backward()
    return gradient(model).tolist()


def own_and_mean(rank: int, world_size: int, *, dealt: bool) -> list[list[float]]:
    """The gradient of this rank's own first batch, and the average over ranks.

    ``dealt``: a sampler distributes samples; otherwise each rank shuffles all by the same seed.
    """
    model = small_network()
    wrapped = DistributedDataParallel(model)
    data = ToyDataset(10, 64)
    shuffled = DataLoader(data, 16 // world_size, shuffle=True)
    loader = share_of(data, 16, rank, world_size)[0] if dealt else shuffled
    x, y = next(iter(loader))
    with wrapped.no_sync():
        nn.functional.mse_loss(wrapped(x.double()), y.double()).backward()
    own = gradient(model).tolist()
    model.zero_grad()
    nn.functional.mse_loss(wrapped(x.double()), y.double()).backward()
    return [own, gradient(model).tolist()]


# --- laconic in its place ------------------------------------------------------------------------


def with_laconic(
    rank: int, world_size: int, *, period: int, num_samples: int, epochs: int, dealt: bool = True
) -> dict[str, Any]:
    """full_ddp's training with laconic. Averages gradients, or parameters once per ``period``."""
    torch.manual_seed(SEED + rank)
    model = FFNet(100, 0, 100).double()
    optimizer = sgd(model)
    recipe = laconic.local_sgd(period) if period else laconic.ddp()
    data = ToyDataset(100, num_samples)
    loader, sampler = share_of(data, 24, rank, world_size)
    if not dealt:
        loader = DataLoader(data, 24 // world_size)  # the same batches on every rank
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with laconic.attach(model, optimizer, recipe) as sync:  # in place of the wrapper
            for epoch in range(epochs):
                sampler.set_epoch(epoch)
                for x, y in loader:
                    loss = nn.functional.mse_loss(model(x.double()), y.double())
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
    return {
        "parameters": nn.utils.parameters_to_vector(model.parameters()).tolist(),
        "sent": sync.stats().bytes_sent,
        "warnings": [str(each.message) for each in told],
    }
