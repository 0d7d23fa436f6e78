"""Several optimizers under one synchronizer: equal to one optimizer with as many groups."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import laconic as la

from tests.support.loops import close, flat, refusal
from tests.support.training import Job, build, same_bits, simulated, values

RECIPES: dict[str, la.Recipe] = {
    "ddp, int8": la.ddp(codec="int8"),
    "local_sgd": la.local_sgd(4, delay=2, optimizer_state="average"),
    "slowmo": la.slowmo(la.sgp(delay=2), 4, 0.5),
}


def train_jointly(job: Job, rank: int) -> list[Any]:
    """As `training.train`, with one optimizer for each group, called in changing order."""
    model, single = build(job, rank)
    optimizers: list[Optimizer] = [type(single)([g]) for g in single.param_groups]  # type: ignore[call-arg]
    sync = la.attach(model, optimizers, job.recipe)
    trace = []
    for t in range(1, job.steps + 1):
        x, y = (torch.from_numpy(a) for a in job.data()[rank][t - 1])
        for number, one in enumerate(optimizers):
            one.param_groups[0]["lr"] = job.lr(number, t)
            one.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        sync.report_loss(loss)
        for one in optimizers[:: 1 if t % 2 else -1]:
            one.step()
        assert sync.step == t
        with sync.consensus(mean=False):
            consensus = values(model)
        trace.append((values(model), consensus))
    return trace


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_list_of_optimizers_equals_one_with_as_many_groups(recipe: str) -> None:
    job = Job(RECIPES[recipe], 3, optimizer="adamw" if recipe == "local_sgd" else "nesterov")
    runs = la.simulate(lambda rank: train_jointly(job, rank), workers=3)
    assert same_bits(runs, simulated(job))


class Task:
    """A small model with Muon for the matrices and AdamW for the vectors."""

    def __init__(self, rank: int, recipe: la.Recipe, **options: Any) -> None:
        torch.manual_seed(rank)
        self.rank = rank
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        params = list(self.model.parameters())
        self.optimizers: list[Optimizer] = [
            torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.02),
            torch.optim.AdamW([p for p in params if p.dim() == 1], lr=0.01),
        ]
        self.sync = la.attach(self.model, self.optimizers, recipe, **options)

    def loss(self, t: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.rank + t)
        loss: Tensor = self.model(torch.randn(8, 4, generator=generator)).square().mean()
        return loss

    def steps(self, first: int, last: int) -> list[Tensor]:
        trace = []
        for t in range(first, last + 1):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.loss(t).backward()
            for optimizer in self.optimizers:
                optimizer.step()
            trace.append(flat(self.model))
        return trace


def test_a_saved_list_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        task, again = (Task(r, RECIPES["local_sgd"]) for r in (rank, rank + 9))
        task.steps(1, 5)
        la.save(tmp_path / "saved", task.model, task.optimizers)
        wrong: list[Any] = [again.optimizers[::-1], again.optimizers[0]]
        for given in wrong:
            with pytest.raises(ValueError, match="in the same order"):
                la.load(tmp_path / "saved", again.model, given)
        la.load(tmp_path / "saved", again.model, again.optimizers)
        again.rank = rank
        assert all(map(torch.equal, again.steps(6, 12), task.steps(6, 12)))

    la.simulate(run, workers=2)


@pytest.mark.fault("inside a step, consensus() and finish() multiplied by push weights twice")
def test_push_weights_count_once_inside_a_step(tmp_path: Path) -> None:
    def run(rank: int, load: bool) -> None:
        model = nn.Linear(2, 2)
        nn.init.ones_(model.weight), nn.init.ones_(model.bias)
        one, other = (torch.optim.SGD([p], 0.0) for p in model.parameters())
        sync = la.attach(model, [one, other], la.sgp(delay=1))
        if load:
            la.load(tmp_path, model, [one, other])
        for step in range(1, 6):
            assert close(flat(model), torch.ones(6), 1e-6) or step % 2 == 0
            model(torch.rand(2) + rank).sum().backward()
            (one if step % 2 else other).step()
        assert not close(flat(model), torch.ones(6), 1e-6), "it holds w*z"
        la.save(tmp_path, model, [one, other])
        with sync.consensus():
            assert close(flat(model), torch.ones(6), 1e-6)
        (sync.detach if load else sync.finish)()
        assert close(flat(model), torch.ones(6), 1e-6)

    la.simulate(partial(run, load=False), workers=2)
    la.simulate(partial(run, load=True), workers=3)


def test_mistakes_name_the_remedy() -> None:
    def run(rank: int) -> None:
        model = nn.Linear(2, 2)
        weight = torch.optim.SGD([model.weight], 0.1)
        bias = torch.optim.AdamW([model.bias], 0.1)
        both = torch.optim.SGD(model.parameters())

        def attach(*optimizers: Any) -> la.Synchronizer:
            return la.attach(model, [*optimizers], la.local_sgd(2))

        assert "a list of optimizers: []" in refusal(attach)
        assert "AdamW" in refusal(lambda: attach(weight, "AdamW"))
        said = refusal(lambda: attach(weight, both))
        assert "a parameter is in two of the optimizers (SGD, SGD)" in said
        sync = attach(weight, bias)
        assert "attached already" in refusal(lambda: attach(bias))
        model(torch.ones(2) + rank).sum().backward()
        weight.step()
        said = refusal(weight.step)
        assert "SGD stepped twice before AdamW did" in said and "call step() once" in said
        said = refusal(lambda: bias.step(lambda: model(torch.ones(2)).sum()))
        assert "closures work with one optimizer only" in said and sync.step == 0
        bias.step()
        assert sync.step == 1

    la.simulate(run, workers=2)


@pytest.mark.parametrize("first", [0, 1])
def test_gradients_are_averaged_before_any_step_where_one_is_skipped(first: int) -> None:
    """One optimizer's gradients overflow on all ranks, in passes that did not average them."""

    def run(rank: int) -> Tensor:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        task = Task(rank, la.ddp(), scaler=scaler)
        with task.sync.no_sync():
            scaler.scale(task.loss(1)).backward()
        for group in task.optimizers[first].param_groups:
            for p in group["params"]:
                p.grad.fill_(float("inf"))
        for optimizer in task.optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert task.sync.step == 1
        return flat(task.model)

    runs = la.simulate(run, workers=2)
    assert torch.equal(runs[0], runs[1])
