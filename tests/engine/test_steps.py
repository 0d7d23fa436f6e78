"""Which steps laconic sees, and of which parameters."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la

from tests.support.loops import data, flat, loss_of, network, refusal, sgd, train


def backward(model: nn.Module, rank: int, step: int) -> None:
    loss_of(model, data()[rank][step]).backward()


# -- steps ----


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization, whose loop calls its two steps."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)

    def first_step(self) -> None:
        self.zero_grad()

    def second_step(self) -> None:
        self.base.step()
        self.zero_grad()


class SamWithStep(Sam):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step()
        closure()
        self.second_step()


@pytest.mark.fault("an optimizer whose step() the loop never calls: no round, and no word of it")
def test_a_step_that_is_not_seen() -> None:
    def train(rank: int, kind: type[Sam], base: bool, attach: bool = True) -> tuple[int, int]:
        model = network()
        optimizer = kind(model.parameters(), lr=0.05)
        sync = la.attach(model, optimizer.base if base else optimizer, la.local_sgd(2))
        if not attach:
            sync.detach()
        for step in range(8):
            backward(model, rank, step)
            optimizer.first_step()
            backward(model, rank, step)
            optimizer.second_step()
        sync.detach()
        return sync.step, sync.stats().rounds

    with pytest.raises(ValueError, match=r"Sam has no step.*attach the optimizer inside"):
        la.simulate(partial(train, kind=Sam, base=False), workers=2)
    with pytest.warns(UserWarning, match=r"SamWithStep.step\(\) was never called"):
        la.simulate(partial(train, kind=SamWithStep, base=False), workers=2)
    assert la.simulate(partial(train, kind=Sam, base=True), workers=2) == [(8, 4)] * 2
    # a warning would be an error
    silent = partial(train, kind=SamWithStep, base=False, attach=False)
    assert la.simulate(silent, workers=2) == [(0, 0)] * 2


class Lookahead(torch.optim.Optimizer):
    """A wrapper that torch has not prepared for hooks, since it skips ``__init__``."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)


class Logged(torch.optim.SGD):
    """Moves the parameters again after its parent's step, and after another one that raises."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        with suppress(ValueError):
            super().step(lambda: int("no number"))
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.01)
        return found


@pytest.mark.fault("an optimizer that torch has not prepared for hooks: no round")
@pytest.mark.fault("a step() that calls super().step() is counted twice")
@pytest.mark.fault("a step() that catches an exception of super().step() is not counted")
@pytest.mark.parametrize("several", [False, True])
def test_a_step_within_a_step_is_one(several: bool) -> None:
    sgd(network())  # from now on torch calls hooks in both classes

    def train(rank: int) -> tuple[int, int, Tensor]:
        model = network()
        parts = [model[0], model[2]] if several else [model]
        optimizers: list[Any] = [Logged(part.parameters(), lr=0.05) for part in parts]
        optimizers += [Lookahead(optimizers.pop())]
        sync = la.attach(model, optimizers, la.local_sgd(4))
        for step in range(8):
            backward(model, rank, step)
            for optimizer in optimizers:
                optimizer.step()
        sync.detach()
        return sync.step, sync.stats().rounds, flat(model)

    one, other = la.simulate(train, workers=2)
    assert one[:2] == other[:2] == (8, 2) and torch.equal(one[2], other[2]), "rounds come last"


def test_a_closure_of_the_optimizers_own_is_refused_where_gradients_are_averaged() -> None:
    """A step that raises is taken again."""

    class Own(torch.optim.SGD):
        closure: Any = None

        def step(self, closure: Any = None) -> Any:
            if self.closure is None:
                raise OverflowError
            return super().step(self.closure)

    def train(rank: int, recipe: la.Recipe) -> int:
        model = network()
        optimizer = Own(model.parameters(), lr=0.05)
        sync = la.attach(model, optimizer, recipe)
        with pytest.raises(OverflowError):
            optimizer.step()
        optimizer.closure = lambda: backward(model, rank, 0)
        optimizer.step()
        optimizer.step()
        return sync.stats().rounds

    sgd(network())
    assert la.simulate(partial(train, recipe=la.local_sgd(2)), workers=2) == [1, 1]
    with pytest.raises(ValueError, match=r"makes a closure.*Pass the closure"):
        la.simulate(partial(train, recipe=la.ddp()), workers=2)


# -- parameters that are frozen, replaced ----


def lora(rank: int, everything: bool, recipe: la.Recipe) -> Any:
    """Train a head on a frozen base, which the optimizer holds if ``everything``."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 1)).double()
    base = model[0].requires_grad_(False)
    primes = torch.tensor([2654435761, 805459861])
    base.register_parameter("primes", nn.Parameter(primes, requires_grad=False))
    start = flat(base)
    held = model if everything else model[1]
    optimizer = torch.optim.AdamW(held.parameters(), lr=0.01)
    sync = la.attach(model, optimizer, recipe)
    before = sync.stats().bytes_sent
    train(model, optimizer, data()[rank])
    sent = sync.stats().bytes_sent - before
    sync.finish()
    return sent, torch.equal(flat(base), start), flat(model)


@pytest.mark.fault("frozen parameters that the optimizer holds are sent, rounded, or ruined")
@pytest.mark.parametrize("recipe", [la.local_sgd(1), la.streaming_diloco(4), la.ddp()])
def test_frozen_parameters_are_left_out(recipe: la.Recipe) -> None:
    whole, head = (
        la.simulate(partial(lora, everything=e, recipe=recipe), workers=3) for e in (True, False)
    )
    for one, other in zip(whole, head, strict=True):
        assert one[0] == other[0] and one[1] and torch.equal(one[2], other[2])


@pytest.mark.fault("gradients of parameters that different ranks had frozen were averaged together")
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("codec", [None, "int4"])
def test_ranks_must_freeze_the_same_parameters(codec: str | None, alone: bool) -> None:
    """``alone``: one rank freezes a layer, and else each another one, of the same shape."""

    def train(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        la.attach(model, optimizer, la.ddp(codec=codec))
        for step in range(4):
            if step == 2 and (rank or not alone):
                model[rank].requires_grad_(False)
            optimizer.zero_grad()
            x = torch.full((1, 3), rank + 1.0)
            (model[0](x) + model[1](x)).square().sum().backward()
            optimizer.step()

    with pytest.raises(la.LinkError, match=r"frozen parameters: 2.*freeze the same parameters"):
        la.simulate(train, workers=2)


@pytest.mark.fault("parameters replaced after attach: rounds go on about the old ones")
@pytest.mark.parametrize("recipe", [la.diloco(2), la.ddp()])
@pytest.mark.parametrize("how", ["replaced", "data", "appended"])
def test_replaced_parameters(recipe: la.Recipe, how: str) -> None:
    """Where the change can be taken in, workers stay alike; else the error says what to do."""

    def train(rank: int) -> Tensor:
        torch.manual_seed(0)
        model: Any = nn.Module()
        old = model.p = nn.Parameter(torch.randn(5, 3))
        optimizer = torch.optim.SGD([old], lr=0.05)
        sync = la.attach(model, optimizer, recipe)
        for step in range(6):
            if step == 4:
                sync.finish()
                rows = torch.cat([old.detach(), old.detach()[:2]])
                if how == "data":
                    old.data = rows
                else:
                    model.p = nn.Parameter(rows)
                    kept = [] if how == "replaced" else [old]
                    optimizer.param_groups[0]["params"] = [*kept, model.p]
            optimizer.zero_grad()
            noise = torch.Generator().manual_seed(9 * rank + step)
            (model.p - torch.randn(model.p.shape, generator=noise)).square().sum().backward()
            optimizer.step()
        sync.detach()
        return flat(model)

    if how == "appended" or (how, recipe) == ("replaced", la.ddp()):
        one, other = la.simulate(train, workers=2)
        assert torch.equal(one, other)
    else:
        with pytest.raises(ValueError, match=r"sync.detach\(\), and laconic.attach after it"):
            la.simulate(train, workers=2)


@pytest.mark.fault("groups removed before others: IndexError, or another group's lr in slow steps")
@pytest.mark.fault("an optimizer without an lr failed at the first slow step, and not in attach")
@pytest.mark.parametrize("several", [False, True])
def test_slow_steps_use_the_lr_of_their_group(several: bool) -> None:
    def train(rank: int, gone: int) -> Tensor:
        model = network()
        model[0].requires_grad_(False)
        parts = [model[0].parameters(), [model[2].weight], [model[2].bias]]
        groups = [{"params": part, "lr": 0.1 * k} for k, part in enumerate(parts)]
        apart = [groups[:2], groups[2:]] if several else [groups]
        optimizers = [torch.optim.SGD(own) for own in apart]
        optimizers[0].param_groups[1]["lr"] = None
        assert "no 'lr'" in refusal(lambda: la.attach(model, optimizers, "slowmo(None, 2)"))
        sync = la.attach(model, optimizers, la.ddp())
        assert "no 'lr'" in refusal(lambda: sync.switch("slowmo(None, 2)"))
        optimizers[0].param_groups[1]["lr"] = 0.1
        sync.switch("slowmo(None, 2, 0.5)")
        for step in range(8):
            if step == gone:
                optimizers[0].param_groups.pop(0)
            backward(model, rank, step)
            for optimizer in optimizers:
                optimizer.step()
        sync.detach()
        return flat(model)

    early, late = (la.simulate(partial(train, gone=gone), workers=2) for gone in (9, 3))
    assert all(map(torch.equal, early, late))


@pytest.mark.fault("ranks whose parameters lie in the same shared memory move them together")
@pytest.mark.parametrize(("part", "warns"), [("weight", True), ("bias", False), (None, False)])
def test_trained_parameters_in_shared_memory_are_a_warning(part: str | None, warns: bool) -> None:
    """The bias is frozen."""

    def train(_: int) -> None:
        model = nn.Linear(6, 1)
        model.bias.requires_grad_(False)
        if part is not None:
            getattr(model, part).share_memory_()
        la.attach(model, sgd(model), la.ddp()).detach()

    with pytest.warns(RuntimeWarning, match="in each process") if warns else nullcontext():
        la.simulate(train, workers=2)


@pytest.mark.fault("a model attached twice averages the same gradients twice")
def test_a_second_attach_is_refused() -> None:
    def train(_: int) -> None:
        model = network()
        first, second = sgd(model), sgd(model)
        sync = la.attach(model, first, la.ddp())
        assert "attached already" in refusal(lambda: la.attach(model, second, la.ddp()))
        assert "sync.detach() first" in refusal(lambda: la.attach(model, first, la.ddp()))
        sync.detach()
        la.attach(model, second, la.ddp()).detach()

    la.simulate(train, workers=2)


@pytest.mark.fault("drift from different learning rates is blamed on processors and memory")
@pytest.mark.fault("finish() and consensus() left replicas under ddp() that had drifted apart")
def test_drift_names_what_differs_and_ends_in_the_mean() -> None:
    def train(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        model = network()
        optimizer = sgd(model, 0.01 * (1 + rank), momentum=0.9)
        sync = la.attach(model, optimizer, la.ddp())
        for step in range(4):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
        before = flat(model)
        with sync.consensus():
            inside = flat(model)
        sync.finish()
        return before, inside, flat(model)

    with pytest.warns(UserWarning, match="settings differ, such as the learning rate"):
        one, other = la.simulate(train, workers=2)
    assert not torch.equal(one[0], other[0]), "nothing was handed on, which would have hidden it"
    assert all(torch.equal(x, one[1]) for x in (*one[1:], *other[1:]))
