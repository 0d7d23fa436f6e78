"""A small model, batches by worker and step, and the loop that a user would write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la

WORKERS, STEPS = 3, 8
RECIPES: dict[str, la.Recipe] = {
    "ddp": la.ddp(),
    "local_sgd": la.local_sgd(3),
    "delayed": la.local_sgd(3, delay=2),
    "slowmo": la.slowmo(la.local_sgd(2), 4, momentum=0.5),
    "no average": la.slowmo(la.local_sgd(2), 4, average=False, momentum=0.5),
    "streaming": la.streaming_diloco(4, 2, 1),
    "sgp": la.sgp(),
    "overlapped sgp": la.sgp("bipartite_linear", 2, delay=2),
    "d_psgd": la.d_psgd(delay=1),
    "easgd": la.easgd(3, pull=0.3),
    "lsgd": la.lsgd(3, local_period=0),
    "slowmo over sgp": la.slowmo(la.sgp(delay=2), 4, momentum=0.5),
}


def data(workers: int = WORKERS, steps: int = STEPS) -> list[list[Tensor]]:
    """Batches by worker and step."""
    generator = torch.Generator().manual_seed(5)

    def batch() -> Tensor:
        return torch.randn(4, 5, generator=generator, dtype=torch.float64)

    return [[batch() for _ in range(steps)] for _ in range(workers)]


def joined(batches: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """All workers' rows, step by step."""
    return [torch.cat(list(parts)) for parts in zip(*batches, strict=True)]


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr, **options)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """In float32 at least."""
    out: Tensor = model(x)
    return (out.to(torch.promote_types(out.dtype, torch.float32)) - 1.0).abs().square().mean()


def descend(
    optimizer: torch.optim.Optimizer, loss: Tensor, sync: la.Synchronizer | None = None
) -> None:
    """One step, whose loss ``sync`` hears of."""
    optimizer.zero_grad()
    loss.backward()
    if sync is not None:
        sync.report_loss(loss)
    optimizer.step()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Tensor]
) -> list[Tensor]:
    """The parameters after every step."""
    trace = []
    for x in batches:
        descend(optimizer, loss_of(model, x))
        trace.append(flat(model))
    return trace


def attached(rank: int, recipe: Any, **options: Any) -> tuple[nn.Sequential, Any, la.Synchronizer]:
    model = network(rank)
    optimizer = sgd(model, momentum=0.9)
    return model, optimizer, la.attach(model, optimizer, recipe, **options)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def equal(tensors: Sequence[Tensor]) -> bool:
    return all(torch.equal(t, tensors[0]) for t in tensors)


def close(a: Tensor, b: Tensor, atol: float = 1e-12) -> bool:
    return torch.allclose(a, b, rtol=0, atol=atol)


def refusal(call: Callable[[], object], kind: type[Exception] = ValueError) -> str:
    """What the error says."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)
