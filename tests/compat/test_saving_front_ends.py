"""laconic.save and laconic.load with the front ends, in processes that did not save."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic import SlowMoBaseAlgorithm

from tests.support import gloo
from tests.support import slowmo_training as loop

pytestmark = [
    pytest.mark.filterwarnings("ignore:slowmo_memory_efficient=True sends"),
]
STEPS, SAVES = 24, 3
LATE = {"slowmo_base_algorithm": SlowMoBaseAlgorithm.SGP, "overlap": True, "synch_freq": 2}
SLOW: dict[str, dict[str, Any]] = {
    "local SGD": {"slowmo_frequency": 6},
    "SGP in flight": {**LATE, "slowmo_frequency": 12},
    "masters": {**LATE, "slowmo_frequency": 12},
}
NAMES = [*SLOW, "EASGD", "LSGD", "DDP", "EASGD by hand"]


@pytest.fixture(scope="module")
def fresh() -> Iterator[gloo.Pool]:
    pool = gloo.Pool(2)
    yield pool
    pool.close()


class Run:
    """A training of one kind on one rank."""

    def __init__(self, name: str, rank: int) -> None:
        torch.manual_seed(rank)
        self.name, self.rank = name, rank
        inner: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 2))
        self.params = list(inner.parameters())
        self.held: list[Tensor] = list(self.params)
        self.flat: Tensor | None = None
        if name == "masters":
            inner = inner.half()
        self.model: Any = inner
        if name in SLOW:
            self.model = la.SlowMoDistributedDataParallel(inner, 1, **SLOW[name])
        if name == "masters":
            self.flat = torch.cat([p.detach().float().view(-1) for p in self.params])
            self.held = [self.flat]
        local = torch.optim.SGD(self.held, lr=0.05, momentum=0.9)
        self.optimizer: Any = local
        self.dist: Any = None
        if name in ("EASGD", "LSGD", "DDP"):
            self.optimizer = la.CommOptimizer(local, name, 2, 5, 0.3, 0.1, model=inner)
        elif name == "EASGD by hand":
            self.dist = la.EASGD(local, 2, 0.1, 0.3, 5, model=inner)
        self.scheduler = torch.optim.lr_scheduler.StepLR(local, 5, 0.7)

    def step(self) -> None:
        dtype = self.params[0].dtype
        x = torch.randn(4, 6).to(dtype)
        loss = self.model(x).square().mean()
        loss.backward()
        if self.flat is not None:
            grads = [p.grad.float().view(-1) for p in self.params if p.grad is not None]
            self.flat.grad = torch.cat(grads)
        if self.name == "LSGD":
            self.optimizer.report_loss(loss)
        self.optimizer.step()
        self.scheduler.step()
        if self.flat is not None:
            sizes = [p.numel() for p in self.params]
            for p, values in zip(self.params, torch.split(self.flat, sizes), strict=True):
                p.data.copy_(values.view_as(p))
        self.model.zero_grad(set_to_none=True)
        if self.dist is not None:
            self.dist.step()
        if self.name in SLOW:
            self.model.perform_slowmo(self.optimizer, self.flat)

    @property
    def about(self) -> dict[str, Any]:
        return {"others": {"scheduler": self.scheduler}}

    def save(self, path: Path) -> None:
        la.save(path, self.model, self.optimizer, self.dist, **self.about)

    def load(self, path: Path) -> dict[str, Any]:
        if self.flat is not None:
            self.model.bind(self.optimizer, self.flat)
        return la.load(path, self.model, self.optimizer, self.dist, **self.about)

    def values(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1).clone() for p in self.held])


def saving(rank: int, name: str, at: list[int], base: Path) -> list[Tensor]:
    with loop.over_gloo(2):
        run = Run(name, rank)
        if name == "masters":
            run.model.bind(run.optimizer, run.flat)
        trace = []
        for t in range(STEPS + 1):
            if t:
                run.step()
            trace.append(run.values())
            if t in at:
                run.save(base / str(t))
        return trace


def resuming(rank: int, name: str, at: int, base: Path) -> list[Tensor]:
    with loop.over_gloo(2):
        run = Run(name, rank)
        said = run.load(base / str(at))
        assert said == {"step": at}
        trace = [run.values()]
        for _ in range(at, STEPS):
            run.step()
            trace.append(run.values())
        return trace


@pytest.mark.parametrize("name", NAMES)
def test_front_ends_go_on_bit_for_bit(
    pool: gloo.Pool, fresh: gloo.Pool, name: str, tmp_path: Path
) -> None:
    at = [0, *sorted(random.Random(name).sample(range(1, STEPS), SAVES - 1))]
    runs = pool.run(saving, name, at, tmp_path, ranks=2)
    for t in at:
        again = fresh.run(resuming, name, t, tmp_path, ranks=2)
        for trace, resumed in zip(runs, again, strict=True):
            assert len(resumed) == STEPS - t + 1
            assert all(map(torch.equal, resumed, trace[t:]))


def test_the_inner_optimizer_alone_is_refused(tmp_path: Path) -> None:
    """The front end's own count would be lost."""

    def run(rank: int) -> bool:
        made = Run("EASGD", rank)
        made.step()
        with pytest.raises(ValueError, match="a front end follows this optimizer: pass it"):
            la.save(tmp_path, made.model, made.optimizer.optimizer)
        return True

    assert la.simulate(run, workers=2) == [True, True]


def test_without_communication_there_is_nothing_to_agree_on(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = la.CommOptimizer(inner, None, 1)
    with pytest.raises(ValueError, match=r"torch\.save where nothing is communicated"):
        la.save(tmp_path, model, optimizer)
    assert not list(tmp_path.iterdir())
