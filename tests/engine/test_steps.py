"""Which steps laconic sees, and of which parameters."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic

from tests.support import gloo


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def backward(model: nn.Module, rank: int, step: int) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * rank + step))
    (model(x) - x.square().sum(1, keepdim=True)).square().mean().backward()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization, whose loop calls its two steps."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["moved"] = 0.01 * p.grad
            p += self.state[p]["moved"]
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p -= self.state[p]["moved"]
        self.base.step()
        self.zero_grad()


class SamWithStep(Sam):
    def step(self, closure: Any = None) -> None:
        self.first_step()
        closure()
        self.second_step()


class Lookahead(torch.optim.Optimizer):
    """A wrapper that torch has not prepared for hooks, since it skips ``__init__``."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)


def train_sam(kind: type[Sam], base: bool) -> Callable[[int], tuple[int, int]]:
    def train(rank: int) -> tuple[int, int]:
        model = net()
        optimizer = kind(model.parameters(), lr=0.05)
        attached = optimizer.base if base else optimizer
        sync = laconic.attach(model, attached, laconic.local_sgd(2))
        for step in range(8):
            backward(model, rank, step)
            optimizer.first_step()
            backward(model, rank, step)
            optimizer.second_step()
        sync.detach()
        return sync.step, sync.stats().rounds

    return train


@pytest.mark.fault("an optimizer whose step() the loop never calls: no round, and no word of it")
def test_a_step_that_is_not_seen() -> None:
    with pytest.raises(ValueError, match=r"Sam has no step.*attach the optimizer inside"):
        laconic.simulate(train_sam(Sam, base=False), workers=2)
    with pytest.warns(UserWarning, match=r"SamWithStep.step\(\) was never called"):
        laconic.simulate(train_sam(SamWithStep, base=False), workers=2)
    assert laconic.simulate(train_sam(Sam, base=True), workers=2) == [(8, 4)] * 2


@pytest.mark.fault("an optimizer that torch has not prepared for hooks: no round")
def test_a_wrapper_that_skips_init_is_prepared() -> None:
    def train(rank: int) -> int:
        model = net()
        optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.05))
        with laconic.attach(model, optimizer, laconic.local_sgd(2)) as sync:
            for step in range(4):
                backward(model, rank, step)
                optimizer.step()
        return sync.stats().rounds

    assert laconic.simulate(train, workers=2) == [2, 2]


class Logged(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.fault("a step() that calls super().step() is counted twice")
@pytest.mark.parametrize("several", [False, True])
def test_a_step_within_a_step_is_one(several: bool) -> None:
    torch.optim.SGD(net().parameters(), lr=1.0)  # from now on torch calls hooks in both classes

    def train(rank: int) -> tuple[int, int]:
        model = net()
        optimizers = [Logged(part.parameters(), lr=0.05) for part in (model[0], model[2])]
        if not several:
            optimizers = [Logged(model.parameters(), lr=0.05)]
        sync = laconic.attach(model, optimizers, laconic.local_sgd(4))
        for step in range(8):
            backward(model, rank, step)
            for optimizer in optimizers:
                optimizer.step()
        sync.detach()
        return sync.step, sync.stats().rounds

    assert laconic.simulate(train, workers=2) == [(8, 2)] * 2


def test_a_step_that_raised_is_taken_again() -> None:
    class Fails(torch.optim.SGD):
        fail = True

        def step(self, closure: Any = None) -> Any:
            if self.fail:
                raise OverflowError
            return super().step(closure)

    def train(rank: int) -> int:
        model = net()
        optimizer = Fails(model.parameters(), lr=0.05)
        with laconic.attach(model, optimizer, laconic.local_sgd(2)) as sync:
            backward(model, rank, 0)
            with pytest.raises(OverflowError):
                optimizer.step()
            optimizer.fail = False
            optimizer.step()
            optimizer.step()
            return sync.step

    assert laconic.simulate(train, workers=2) == [2, 2]


RECIPES = {
    "local_sgd": laconic.local_sgd(1),
    "diloco": laconic.diloco(2),
    "sgp": laconic.sgp(),
    "easgd": laconic.easgd(2),
    "streaming": laconic.streaming_diloco(4),
    "ddp": laconic.ddp(),
}


def lora(rank: int, recipe: laconic.Recipe, everything: bool, thaw: int = -1) -> Any:
    torch.manual_seed(0)
    model = nn.ModuleDict({"base": nn.Linear(6, 6), "head": nn.Linear(6, 1)})
    model["base"].requires_grad_(False)
    primes = torch.tensor([2654435761, 805459861])
    model["base"].register_parameter("primes", nn.Parameter(primes, requires_grad=False))
    start = model["base"].weight.clone()
    held = model if everything else model["head"]
    optimizer = torch.optim.AdamW(held.parameters(), lr=0.01)
    sync = laconic.attach(model, optimizer, recipe)
    before = sync.stats().bytes_sent
    for step in range(12):
        if step == thaw:
            model["base"].weight.requires_grad_()
        optimizer.zero_grad()
        backward(nn.Sequential(model["base"], model["head"]), rank, step)
        optimizer.step()
    sent = sync.stats().bytes_sent - before
    sync.finish()
    same = torch.equal(model["base"].weight, start) and torch.equal(model["base"].primes, primes)
    return sent, same, flat(model).double()


@pytest.mark.fault("frozen parameters that the optimizer holds are sent, rounded, or ruined")
@pytest.mark.parametrize("name", RECIPES)
def test_frozen_parameters_are_left_out(name: str) -> None:
    recipe = RECIPES[name]
    whole = laconic.simulate(lambda rank: lora(rank, recipe, True), workers=3)
    head = laconic.simulate(lambda rank: lora(rank, recipe, False), workers=3)
    for one, other in zip(whole, head, strict=True):
        assert one[0] == other[0] and one[1] and torch.equal(one[2], other[2])


@pytest.mark.parametrize("name", RECIPES)
def test_a_thawed_parameter_joins(name: str) -> None:
    results = laconic.simulate(lambda rank: lora(rank, RECIPES[name], True, thaw=5), workers=3)
    assert not results[0][1], "it was trained"
    assert all(torch.equal(r[2], results[0][2]) for r in results)


def test_a_state_saved_after_a_thaw_is_loaded_before_it() -> None:
    """The loaded state says which parameters take part."""

    def train(rank: int, steps: range, state: Any = None) -> Any:
        model = net()
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        sync = laconic.attach(model, optimizer, laconic.diloco(3, momentum=0.5))
        if state is not None:
            for each, saved in zip((model, optimizer, sync), state, strict=True):
                each.load_state_dict(saved)
        for step in steps:
            model[0].requires_grad_(step >= 4)
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
        saved = [each.state_dict() for each in (model, optimizer, sync)]
        sync.detach()
        return saved, flat(model)

    whole = laconic.simulate(lambda rank: train(rank, range(11)), workers=2)
    half = laconic.simulate(lambda rank: train(rank, range(7))[0], workers=2)
    resumed = laconic.simulate(lambda rank: train(rank, range(7, 11), half[rank]), workers=2)
    for one, other in zip(whole, resumed, strict=True):
        assert torch.equal(one[1], other[1])


def test_what_was_frozen_when_it_was_saved_joins_after_the_load() -> None:
    def train(rank: int, frozen: bool, state: Any = None) -> Any:
        model = net()
        model[0].requires_grad_(not frozen)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = laconic.attach(model, optimizer, laconic.local_sgd(2))
        if state is not None:
            model.load_state_dict(state[0])
            sync.load_state_dict(state[1])
        for step in range(4):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
        saved = model.state_dict(), sync.state_dict()
        sync.detach()
        return saved, flat(model)

    saved = laconic.simulate(lambda rank: train(rank, True)[0], workers=2)
    one, other = laconic.simulate(lambda rank: train(rank, False, saved[rank])[1], workers=2)
    assert torch.equal(one, other)


def test_a_state_of_version_3_is_loaded() -> None:
    """It counts parameter groups, and its text is that of today."""

    def train(rank: int) -> bool:
        model = net()
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.05)
        sync = laconic.attach(model, optimizer, laconic.diloco(3, momentum=0.5))
        for step in range(4):
            backward(model, rank, step)
            optimizer.step()
        state = sync.state_dict()
        assert "part=<function parameters>" in state["recipe"]
        older = {**state, "version": 3, "rounds": [{**r, "joined": [2]} for r in state["rounds"]]}
        sync.load_state_dict(older)
        again = sync.state_dict()
        sync.detach()
        return bool(again["rounds"][0]["joined"] == state["rounds"][0]["joined"])

    assert laconic.simulate(train, workers=2) == [True, True]


def test_a_frozen_tensor_that_is_not_plain_is_saved() -> None:
    def train(rank: int) -> int:
        model = net()
        odd = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
        model.register_parameter("odd", odd)
        optimizer = torch.optim.SGD([*model[0].parameters(), *model[2].parameters(), odd], lr=0.05)
        with laconic.attach(model, optimizer, laconic.local_sgd(2)) as sync:
            backward(model[:3], rank, 0)
            optimizer.step()
            sync.load_state_dict(sync.state_dict())
            return sync.step

    assert laconic.simulate(train, workers=2) == [1, 1]


def test_a_closure_of_the_optimizers_own_is_refused_where_gradients_are_averaged() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(self.closure)

    def train(rank: int, recipe: laconic.Recipe) -> int:
        model = net()
        optimizer = Own(model.parameters(), lr=0.05)
        optimizer.closure = lambda: backward(model, rank, 0)
        torch.optim.SGD(net().parameters(), lr=1.0)
        with laconic.attach(model, optimizer, recipe) as sync:
            optimizer.step()
            optimizer.step()
        return sync.stats().rounds

    assert laconic.simulate(lambda rank: train(rank, laconic.local_sgd(2)), workers=2) == [1, 1]
    with pytest.raises(ValueError, match=r"makes a closure.*Pass the closure"):
        laconic.simulate(lambda rank: train(rank, laconic.ddp()), workers=2)


def test_no_warning_after_detach() -> None:
    def train(rank: int) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        laconic.attach(model, optimizer, laconic.local_sgd(2)).detach()
        for step in range(6):
            backward(model, rank, step)
            optimizer.step()

    laconic.simulate(train, workers=2)


def replace(model: Any, optimizer: torch.optim.Optimizer, how: str) -> None:
    rows = torch.cat([model.p.detach(), model.p.detach()[:2]])
    if how == "data":
        model.p.data = rows
        return
    old, model.p = model.p, nn.Parameter(rows)
    optimizer.param_groups[0]["params"] = [model.p] if how == "replaced" else [old, model.p]


@pytest.mark.fault("parameters replaced after attach: rounds go on about the old ones")
@pytest.mark.parametrize("name", ["local_sgd", "diloco", "ddp"])
@pytest.mark.parametrize("how", ["replaced", "data", "appended"])
def test_replaced_parameters(name: str, how: str) -> None:
    """Where the change can be taken in, workers stay alike; else the error says what to do."""

    def train(rank: int) -> Tensor:
        torch.manual_seed(0)
        model: Any = nn.Module()
        model.p = nn.Parameter(torch.randn(5, 3))
        optimizer = torch.optim.SGD([model.p], lr=0.05)
        sync = laconic.attach(model, optimizer, RECIPES[name])
        for step in range(8):
            if step == 4:
                sync.finish()
                replace(model, optimizer, how)
            optimizer.zero_grad()
            noise = torch.Generator().manual_seed(9 * rank + step)
            (model.p - torch.randn(model.p.shape, generator=noise)).square().sum().backward()
            optimizer.step()
        sync.detach()
        return model.p.detach().clone()

    if how == "appended" or (how, name) == ("replaced", "ddp"):
        one, other = laconic.simulate(train, workers=2)
        assert torch.equal(one, other)
    else:
        with pytest.raises(ValueError, match=r"sync.detach\(\), and laconic.attach after it"):
            laconic.simulate(train, workers=2)


def test_a_parameter_taken_out_under_ddp_is_forgotten() -> None:
    def train(rank: int) -> int:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with laconic.attach(model, optimizer, laconic.ddp()) as sync:
            for step in range(4):
                if step == 2:
                    optimizer.param_groups[0]["params"] = list(model[2].parameters())
                backward(model, rank, step)
                optimizer.step()
            return sync.step

    assert laconic.simulate(train, workers=2) == [4, 4]


@pytest.mark.fault("ranks whose parameters lie in the same shared memory move them together")
def test_shared_memory_is_refused() -> None:
    weight = torch.zeros(1, 6).share_memory_()

    def train(rank: int, own: bool) -> None:
        model = nn.Linear(6, 1, bias=False)
        model.weight = nn.Parameter(weight.clone().share_memory_() if own else weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        laconic.attach(model, optimizer, laconic.ddp()).detach()

    laconic.simulate(lambda rank: train(rank, own=True), workers=2)
    with pytest.raises(ValueError, match="in the same memory"):
        laconic.simulate(lambda rank: train(rank, own=False), workers=2)


@pytest.mark.fault("a model attached twice averages the same gradients twice")
def test_a_second_attach_is_refused() -> None:
    def train(_: int) -> None:
        model = net()
        first, second = (torch.optim.SGD(model.parameters(), lr=0.05) for _ in range(2))
        sync = laconic.attach(model, first, laconic.ddp())
        with pytest.raises(ValueError, match="attached already"):
            laconic.attach(model, second, laconic.ddp())
        sync.detach()
        laconic.attach(model, second, laconic.ddp()).detach()

    laconic.simulate(train, workers=2)


@pytest.mark.fault("drift from different learning rates is blamed on processors and memory")
def test_drift_names_what_differs() -> None:
    def train(rank: int) -> Tensor:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (1 + rank), momentum=0.9)
        sync = laconic.attach(model, optimizer, laconic.ddp())
        for step in range(4):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
        sync.detach()
        return flat(model)

    with pytest.warns(UserWarning, match=r"lr of parameter group 0 is 0.01 on rank 0, 0.02 on"):
        one, other = laconic.simulate(train, workers=2)
    assert not torch.equal(one, other), "nothing was handed on, which would have hidden it"


class ImpatientError(Exception):
    """Raised by a signal handler."""


def interrupted(rank: int, rung: Path) -> str:
    """Rank 1's signal handler raises while it waits for rank 0, and the program goes on."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = laconic.attach(model, optimizer, laconic.local_sgd(2), link=gloo.link_of(2))

    def ring(*_: object) -> None:
        rung.touch()
        raise ImpatientError

    before = signal.signal(signal.SIGALRM, ring)
    try:
        for step in range(6):
            backward(model, rank, step)
            if step == 1 and rank == 1:
                signal.setitimer(signal.ITIMER_REAL, 0.5)
            while step == 1 and rank == 0 and not rung.exists():
                time.sleep(0.01)
            with suppress(ImpatientError):
                optimizer.step()
    except laconic.LinkError as error:
        sync.driver.failed(error)
        return str(error)
    finally:
        signal.signal(signal.SIGALRM, before)
        sync.detach()
    return f"{sync.stats().rounds} rounds"


@pytest.mark.fault("an exception from a signal handler in a round: the rank lacks the round")
def test_an_interrupted_round_is_an_error(tmp_path: Path) -> None:
    own_pool = gloo.Pool(2)
    _, text = own_pool.run(interrupted, tmp_path / "rung", ranks=2)
    own_pool.close()
    assert "the rounds after step 2 were interrupted on this rank" in text
