"""Several optimizers under one synchronizer: equal to one optimizer with as many groups."""

from __future__ import annotations

from copy import deepcopy
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


@pytest.mark.fault("inside a step, consensus() and finish() multiplied by push weights twice")
def test_push_weights_count_once_inside_a_step(tmp_path: Path) -> None:
    def run(rank: int, load: bool) -> None:
        model = nn.Linear(2, 2)
        nn.init.ones_(model.weight), nn.init.ones_(model.bias)
        one, other = (torch.optim.SGD([p], 0.0) for p in model.parameters())
        sync = la.attach(model, [one, other], la.sgp(delay=1))
        if load:
            for wrong in ([other, one], one):
                with pytest.raises(ValueError, match="in the same order"):
                    la.load(tmp_path, model, wrong)
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


@pytest.mark.fault("finish() inside a step was taken for a part of the optimizers' own steps")
def test_an_own_outer_step_leaves_out_a_consensus_inside_a_step() -> None:
    """Where the optimizers move nothing, it moves nothing either."""

    def run(rank: int) -> Tensor:
        model = nn.Linear(2, 2)
        optimizers: list[Optimizer] = [torch.optim.SGD([p], 0.0) for p in model.parameters()]
        base = la.local_sgd(100)
        sync = la.attach(model, optimizers, la.outer_step(base, 2, momentum=0.0, average=False))
        for p in model.parameters():
            nn.init.constant_(p, float(rank))
        for one in (*optimizers, *optimizers):
            model(torch.ones(2) + rank).sum().backward()
            one.step()
            if one is optimizers[0]:
                sync.finish()
        return flat(model)

    assert all(close(x, torch.full((6,), 0.5)) for x in la.simulate(run, workers=2))


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
        torch.manual_seed(rank)
        model = nn.Linear(4, 2)
        optimizers = [torch.optim.Muon([model.weight], 0.02), torch.optim.AdamW([model.bias], 0.01)]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        sync = la.attach(model, optimizers, la.ddp(), scaler=scaler)
        with sync.no_sync():
            scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
        skipped: Any = (model.weight, model.bias)[first]
        skipped.grad.fill_(float("inf"))
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert sync.step == 1
        return flat(model)

    assert torch.equal(*la.simulate(run, workers=2))


@pytest.mark.fault(
    "a state saved between two optimizers' steps went on with rounds half a step off"
)
def test_a_state_between_the_steps_goes_on() -> None:
    def train(rank: int, saved: dict[int, list[Any]], first: int) -> tuple[int, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in model]
        sync = la.attach(model, optimizers, la.local_sgd(2))
        for t in range(first, 5):
            if t > first or not first:
                model.zero_grad()
                torch.manual_seed(10 * t + rank)
                model(torch.randn(4, 3)).square().mean().backward()
                optimizers[0].step()
            if t == 2 and not first:
                gradients = [p.grad for p in model.parameters()]
                saved[rank] = deepcopy([model.state_dict(), sync.state_dict(), gradients])
            elif t == first and first:
                model.load_state_dict(saved[rank][0])
                sync.load_state_dict(saved[rank][1])
                for p, gradient in zip(model.parameters(), saved[rank][2], strict=True):
                    p.grad = gradient
            optimizers[1].step()
        return sync.step, flat(model)

    saved: dict[int, list[Any]] = {}
    whole = la.simulate(partial(train, saved=saved, first=0), workers=2)
    resumed = la.simulate(partial(train, saved=saved, first=2), workers=2)
    assert [step for step, _ in whole] == [step for step, _ in resumed] == [5, 5]
    assert all(torch.equal(a[1], b[1]) for a, b in zip(whole, resumed, strict=True))
