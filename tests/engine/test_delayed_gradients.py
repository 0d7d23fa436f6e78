"""Gradients with a delay: the optimizer uses the mean of some steps before, exactly."""

from __future__ import annotations

import copy
import io
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.algorithms.exchanges import Mean
from laconic.algorithms.updates import Average

import gloo

WORKERS, STEPS = 3, 9
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}


def build(name: str = "sgd") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5))
    return model, MAKERS[name](model.parameters())


def loss(model: nn.Module, rank: int, t: int) -> Tensor:
    x = torch.randn(6, 7, generator=torch.Generator().manual_seed(1000 * rank + t))
    return nn.functional.mse_loss(model(x), torch.sin(x[:, :5]))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, t: int) -> None:
    optimizer.zero_grad()
    loss(model, rank, t).backward()
    optimizer.step()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def reference(name: str, delay: int, steps: int = STEPS, clip: float = 0.0) -> Tensor:
    """In one process: the mean of all workers' gradients, from ``delay`` steps before."""
    model, optimizer = build(name)
    params = list(model.parameters())
    waiting: deque[list[Tensor]] = deque()
    for t in range(1, steps + 1):
        each = [torch.autograd.grad(loss(model, rank, t), params) for rank in range(WORKERS)]
        waiting.append([torch.stack(gradients).mean(0) for gradients in zip(*each, strict=True)])
        if len(waiting) <= delay:
            continue
        for p, gradient in zip(params, waiting.popleft(), strict=True):
            p.grad = gradient
        if clip:
            nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
    return weights(model)


def train(rank: int, name: str, recipe: la.Recipe, steps: int = STEPS) -> Tensor:
    model, optimizer = build(name)
    sync = la.attach(model, optimizer, recipe)
    for t in range(1, steps + 1):
        step(model, optimizer, rank, t)
    sync.finish()
    sync.detach()
    return weights(model)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("delay", [0, 1, 2, 5])
def test_it_equals_its_reference(name: str, delay: int) -> None:
    recipe = la.ddp(delay=delay)
    found = la.simulate(lambda rank: train(rank, name, recipe), workers=WORKERS)
    expected = reference(name, delay)
    assert all(torch.equal(x, found[0]) for x in found), "all workers hold the same"
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-6)


def test_clipping_sees_the_mean_that_the_optimizer_uses() -> None:
    def clipped(rank: int) -> Tensor:
        model, optimizer = build()
        sync = la.attach(model, optimizer, la.ddp(delay=1))
        for t in range(1, STEPS + 1):
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        sync.finish()
        return weights(model)

    expected = reference("sgd", 1, clip=0.05)
    for x in la.simulate(clipped, workers=WORKERS):
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)


def _over_processes(rank: int, recipe: la.Recipe) -> Tensor:
    model, optimizer = build("adamw")
    sync = la.attach(model, optimizer, recipe, link=gloo.link_of(WORKERS))
    for t in range(1, STEPS + 1):
        step(model, optimizer, rank, t)
    sync.finish()
    sync.detach()
    return weights(model)


@pytest.mark.parametrize("codec", [None, "int4", "int8"])
def test_processes_equal_the_simulation(pool: gloo.Pool, codec: str | None) -> None:
    recipe = la.ddp(codec=codec, delay=2)
    found = pool.run(_over_processes, recipe, ranks=WORKERS)
    simulated = la.simulate(lambda rank: train(rank, "adamw", recipe), workers=WORKERS)
    for x, y in zip(found, simulated, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("codec", [None, "int4"])
@pytest.mark.parametrize("stop", [1, 2, 5])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(codec: str | None, stop: int) -> None:
    """With as many workers. The means in flight are part of the state."""
    recipe = la.ddp(codec=codec, delay=2)

    def first(rank: int) -> bytes:
        model, optimizer = build("adamw")
        sync = la.attach(model, optimizer, recipe)
        for t in range(1, stop + 1):
            step(model, optimizer, rank, t)
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict(), sync.state_dict()], file)
        return file.getvalue()

    saved = la.simulate(first, workers=WORKERS)

    def second(rank: int) -> Tensor:
        model, optimizer = build("adamw")
        sync = la.attach(model, optimizer, recipe)
        parts = torch.load(io.BytesIO(saved[rank]), weights_only=True)
        for part, state in zip((model, optimizer, sync), parts, strict=True):
            part.load_state_dict(state)
        for t in range(stop + 1, STEPS + 1):
            step(model, optimizer, rank, t)
        sync.finish()
        return weights(model)

    whole = la.simulate(lambda rank: train(rank, "adamw", recipe), workers=WORKERS)
    for x, y in zip(la.simulate(second, workers=WORKERS), whole, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("workers", [2, 4])
def test_another_number_of_workers_uses_what_was_in_flight(workers: int) -> None:
    recipe = la.ddp(delay=1)

    def first(rank: int) -> Any:
        model, optimizer = build()
        sync = la.attach(model, optimizer, recipe)
        for t in range(1, 4):
            step(model, optimizer, rank, t)
        states = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sync.state_dict()))
        before = weights(model).clone()
        step(model, optimizer, rank, 4)
        return states, before, weights(model).clone()

    saved = la.simulate(first, workers=WORKERS)
    (_, before, after), *_ = saved

    def second(rank: int) -> Tensor:
        model, optimizer = build()
        sync = la.attach(model, optimizer, recipe)
        model.load_state_dict(saved[0][0][0])
        optimizer.load_state_dict(copy.deepcopy(saved[0][0][1]))
        sync.load_state_dict([states[2] for states, _, _ in saved])
        assert torch.equal(weights(model), before)
        step(model, optimizer, rank, 100)
        return weights(model)

    for x in la.simulate(second, workers=workers):
        assert torch.equal(x, after), "the mean of step 3, whatever this step's batches are"


def test_accumulated_gradients_are_averaged_once() -> None:
    """Two passes in a step, the first under no_sync(): as one pass over both batches."""

    def halves(rank: int) -> Tensor:
        model, optimizer = build()
        sync = la.attach(model, optimizer, la.ddp(delay=1))
        for t in range(1, STEPS + 1):
            optimizer.zero_grad()
            with sync.no_sync():
                (loss(model, rank, t) / 2).backward()
            (loss(model, rank, t) / 2).backward()
            optimizer.step()
        sync.finish()
        return weights(model)

    expected = reference("sgd", 1)
    for x in la.simulate(halves, workers=WORKERS):
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)


def test_a_second_averaged_pass_in_a_step_is_an_error() -> None:
    def twice(rank: int) -> str:
        model, optimizer = build()
        la.attach(model, optimizer, la.ddp(delay=1))
        loss(model, rank, 1).backward()
        with pytest.raises(RuntimeError, match="no_sync") as caught:
            loss(model, rank, 2).backward()
        return str(caught.value)

    assert len({*la.simulate(twice, workers=2)}) == 1


class Branches(nn.Module):
    """The second layer has a gradient in odd steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        y: Tensor = self.first(x)
        if both:
            y = self.second(y)
        return y


def test_parameters_without_a_gradient_then_are_left_alone_later() -> None:
    """Momentum does not move the layer that no worker used ``delay`` steps before."""

    def run(rank: int) -> list[bool]:
        torch.manual_seed(0)
        model = Branches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sync = la.attach(model, optimizer, la.ddp(delay=1))
        moved = []
        for t in range(1, 8):
            before = model.second.weight.detach().clone()
            x = torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * rank + t))
            optimizer.zero_grad()
            model(x, t % 2 == 1).square().mean().backward()
            optimizer.step()
            moved.append(not torch.equal(before, model.second.weight))
        sync.finish()
        return moved

    for moved in la.simulate(run, workers=2):
        assert moved == [False, True, False, True, False, True, False]


def test_a_rank_without_a_backward_pass_takes_part() -> None:
    """Its gradient counts as zero, a step later."""

    def run(rank: int) -> Tensor:
        model, optimizer = build()
        sync = la.attach(model, optimizer, la.ddp(delay=1))
        for t in range(1, 6):
            optimizer.zero_grad()
            if rank == 0 or t != 2:
                loss(model, rank, t).backward()
            optimizer.step()
        sync.finish()
        return weights(model)

    x, y = la.simulate(run, workers=2)
    assert torch.equal(x, y)


def test_the_loss_scale_of_a_gradient_in_flight_is_that_of_its_step() -> None:
    """A scale that grows between does not make an older gradient smaller."""

    def run(rank: int, growth: float) -> Tensor:
        model, optimizer = build()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        scaler.set_growth_factor(growth)
        sync = la.attach(model, optimizer, la.ddp(delay=1), scaler=scaler)
        for t in range(1, STEPS + 1):
            optimizer.zero_grad()
            scaler.scale(loss(model, rank, t)).backward()
            scaler.step(optimizer)
            scaler.update()
        sync.finish()
        return weights(model)

    grown = la.simulate(lambda rank: run(rank, 2.0), workers=2)
    constant = la.simulate(lambda rank: run(rank, 1.0 + 1e-12), workers=2)
    torch.testing.assert_close(grown[0], constant[0], rtol=1e-5, atol=1e-7)
    assert torch.equal(grown[0], grown[1])


def test_switching_drops_what_is_in_flight() -> None:
    def run(rank: int) -> Tensor:
        model, optimizer = build()
        sync = la.attach(model, optimizer, la.ddp(delay=2))
        for t in range(1, 5):
            step(model, optimizer, rank, t)
        sync.switch(la.ddp())
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        step(model, optimizer, rank, 5)
        other, alone = build()
        other.load_state_dict(before[0])
        alone.load_state_dict(before[1])
        both = [torch.autograd.grad(loss(other, r, 5), list(other.parameters())) for r in range(2)]
        for p, a, b in zip(other.parameters(), *both, strict=True):
            p.grad = (a + b) / 2
        alone.step()
        torch.testing.assert_close(weights(model), weights(other))
        return weights(model)

    x, y = la.simulate(run, workers=2)
    assert torch.equal(x, y)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="delay"):
        la.ddp(delay=-1)
    with pytest.raises(ValueError, match="every"):
        la.GradientRound(la.every(2), Average(), Mean(), delay=1)

    def elastic(rank: int) -> None:
        model, optimizer = build()
        la.attach(model, optimizer, la.ddp(delay=1), elastic=la.Elastic())

    with pytest.raises(ValueError, match="without a delay"):
        la.simulate(elastic, faults=la.Faults(start=2))
