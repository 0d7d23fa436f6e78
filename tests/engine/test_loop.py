"""Everyday training loops: what users do between ``attach`` and ``finish`` goes on working."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import laconic as la
from laconic.algorithms.compile import in_groups
from laconic.algorithms.exchanges import Mean
from laconic.buckets import optimizer_state
from laconic.errors import LinkError

from tests.support import gloo, training

WORKERS = 3
STEPS = 8
ALL: dict[str, la.Recipe] = {
    "ddp": la.ddp(),
    "local_sgd": la.local_sgd(3),
    "delayed": la.local_sgd(3, delay=2),
    "post_local": la.post_local_sgd(3, 2),
    "slowmo": la.slowmo(la.local_sgd(2), 4, momentum=0.5),
    "no average": la.slowmo(la.local_sgd(2), 4, average=False, momentum=0.5),
    "diloco": la.diloco(3),
    "sgp": la.sgp(),
    "overlapped sgp": la.sgp("bipartite_linear", 2, delay=2),
    "d_psgd": la.d_psgd(delay=1),
    "easgd": la.easgd(3, pull=0.3),
    "downpour": la.downpour(3),
    "lsgd": la.lsgd(3, local_period=0),
    "slowmo over sgp": la.slowmo(la.sgp(delay=2), 4, momentum=0.5),
}


def data(workers: int = WORKERS, steps: int = STEPS, rows: int = 4) -> list[list[Tensor]]:
    """Batches by worker and step."""
    generator = torch.Generator().manual_seed(5)

    def batch() -> Tensor:
        return torch.randn(rows, 5, generator=generator, dtype=torch.float64)

    return [[batch() for _ in range(steps)] for _ in range(workers)]


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """In float32 at least."""
    out: Tensor = model(x)
    return (out.to(torch.promote_types(out.dtype, torch.float32)) - 1.0).square().mean()


def flat(model: nn.Module) -> Tensor:
    return training.flat(model).clone()


def equal(tensors: list[Tensor]) -> bool:
    return all(torch.equal(t, tensors[0]) for t in tensors)


def plain_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]
) -> list[Tensor]:
    """An ordinary loop; x after every step."""
    trace = []
    for x in batches:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        trace.append(flat(model))
    return trace


def global_batches(batches: list[list[Tensor]]) -> list[Tensor]:
    """All workers' rows, step by step."""
    return [torch.cat(list(parts)) for parts in zip(*batches, strict=True)]


# -- groups, schedulers, accumulation, clipping ----


def two_groups(model: nn.Sequential) -> torch.optim.Optimizer:
    groups = [
        {"params": model[0].parameters(), "lr": 0.2},
        {"params": model[2].parameters(), "lr": 0.05, "weight_decay": 0.1},
    ]
    return torch.optim.SGD(groups, momentum=0.9)


def test_groups_and_a_scheduler_under_ddp_are_one_process_on_the_global_batch() -> None:
    batches = data()

    def run(rank: int, batches: list[Tensor], attach: bool) -> list[Tensor]:
        model = network(rank)
        optimizer = two_groups(model)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.3, 0.1], total_steps=STEPS)
        if attach:
            la.attach(model, optimizer, la.ddp())
        trace = []
        for x in batches:
            trace += plain_loop(model, optimizer, [x])
            scheduler.step()
        return trace

    single = run(0, global_batches(batches), False)
    for trace in la.simulate(lambda rank: run(rank, batches[rank], True), workers=WORKERS):
        assert torch.allclose(torch.stack(trace), torch.stack(single), rtol=0, atol=1e-12)


def test_slow_momentum_follows_the_scheduler_of_each_group() -> None:
    """One worker, SlowMo after every step, beta 0: x <- a - alpha*(a - x), by hand; and u is in
    the units of each group's current rate."""
    batches = data(1)[0]

    def run(rank: int) -> tuple[list[Tensor], dict[str, Any]]:
        model = network()
        optimizer = two_groups(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        sync = la.attach(model, optimizer, la.slowmo(None, 1, 0.0, 1.0))
        before, after = Tensor(), Tensor()
        for x in batches:
            before = flat(model)
            plain_loop(model, optimizer, [x])
            after = flat(model)
            scheduler.step()
        return [before, after], sync.state_dict()

    (((before, after), state),) = la.simulate(run, workers=1)
    first = sum(p.numel() for p in network()[0].parameters())
    moved = before - after
    (slow,) = state["rounds"]
    for (part, rate), saved in zip(
        [(moved[:first], 0.2), (moved[first:], 0.05)], slow["state"], strict=True
    ):
        lr = rate * 0.8 ** (STEPS - 1)
        assert torch.allclose(saved["u"][: len(part)], part / lr, rtol=1e-9, atol=1e-12)
        assert saved["lr"].item() == pytest.approx(lr, rel=1e-6)


@pytest.mark.parametrize("last_outside", [True, False])
def test_accumulation_is_one_large_batch(last_outside: bool) -> None:
    """Two backward passes a step; the second outside ``no_sync()``, or the step itself, sends."""
    batches = data(steps=2 * STEPS)

    def run(rank: int) -> tuple[list[Tensor], int]:
        model = network(rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
        sync, trace, quiet = la.attach(model, optimizer, la.ddp()), [], 0
        for first, second in zip(batches[rank][::2], batches[rank][1::2], strict=True):
            optimizer.zero_grad()
            sent = sync.stats().bytes_sent
            with sync.no_sync():
                (loss_of(model, first) / 2).backward()
                if not last_outside:
                    (loss_of(model, second) / 2).backward()
            quiet += sync.stats().bytes_sent - sent
            if last_outside:
                (loss_of(model, second) / 2).backward()
            optimizer.step()
            trace.append(flat(model))
        return trace, quiet

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    everything = global_batches(batches)
    pairs = zip(everything[::2], everything[1::2], strict=True)
    single = torch.stack(plain_loop(model, optimizer, [torch.cat(pair) for pair in pairs]))
    for trace, quiet in la.simulate(run, workers=WORKERS):
        assert torch.allclose(torch.stack(trace), single, rtol=0, atol=1e-12)
        assert quiet == 0


def test_accumulation_without_no_sync_gives_the_same() -> None:
    """More bytes, the same weights: a mean of what is partly averaged is the mean."""
    batches = data(steps=2)

    def run(rank: int, quiet: bool) -> Tensor:
        model = network(rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.2)
        sync = la.attach(model, optimizer, la.ddp())
        for x in batches[rank]:
            if quiet and x is batches[rank][0]:
                with sync.no_sync():
                    loss_of(model, x).backward()
            else:
                loss_of(model, x).backward()
        optimizer.step()
        return flat(model)

    loud = la.simulate(lambda rank: run(rank, False), workers=WORKERS)
    quiet = la.simulate(lambda rank: run(rank, True), workers=WORKERS)
    assert equal(loud) and equal(quiet)
    assert torch.allclose(loud[0], quiet[0], rtol=0, atol=1e-13)


def test_clipping_after_backward_sees_the_global_gradient() -> None:
    batches = data()

    def loop(model: nn.Module, xs: list[Tensor], optimizer: Any) -> list[float]:
        norms = []
        for x in xs:
            optimizer.zero_grad()
            loss_of(model, x).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
            optimizer.step()
        return norms

    def run(rank: int, xs: list[Tensor], attach: bool) -> tuple[list[float], Tensor]:
        model = network(rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
        if attach:
            la.attach(model, optimizer, la.ddp())
        return loop(model, xs, optimizer), flat(model)

    norms, x = run(0, global_batches(batches), False)
    assert min(norms) > 0.05, "the clipping clips"
    for own, y in la.simulate(lambda rank: run(rank, batches[rank], True), workers=WORKERS):
        assert own == pytest.approx(norms, rel=1e-10)
        assert torch.allclose(x, y, rtol=0, atol=1e-12)


def test_steps_with_a_closure() -> None:
    """The closure's backward pass lies within ``step()``, after its pre-hooks."""
    batches = data()

    def run(rank: int) -> Tensor:
        model = network(rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
        la.attach(model, optimizer, la.ddp())

        def closure(x: Tensor) -> float:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return float(loss.detach())

        for x in batches[rank]:
            optimizer.step(partial(closure, x))
        return flat(model)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    single = plain_loop(model, optimizer, global_batches(batches))[-1]
    for x in la.simulate(run, workers=WORKERS):
        assert torch.allclose(x, single, rtol=0, atol=1e-12)


def test_a_graph_that_is_used_twice() -> None:
    """Two backward passes over one graph, as multi-task losses take them."""

    def run(rank: int) -> Tensor:
        model = network(rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.2)
        la.attach(model, optimizer, la.ddp())
        out = model(data()[rank][0])
        out.square().mean().backward(retain_graph=True)
        out.sin().mean().backward()
        optimizer.step()
        return flat(model)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    out = model(global_batches(data())[0])
    (out.square().mean() + out.sin().mean()).backward()
    optimizer.step()
    for x in la.simulate(run, workers=WORKERS):
        assert torch.allclose(x, flat(model), rtol=0, atol=1e-12)


class Fails(torch.autograd.Function):
    """The identity, whose backward pass raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise MemoryError("out of memory")


@pytest.mark.parametrize("recipe", ["ddp", "local_sgd"])
def test_a_backward_pass_that_raised_half_way_can_be_repeated(recipe: str) -> None:
    """As where memory runs out and the loop goes on with a smaller batch."""

    def run(rank: int, fails: bool) -> Tensor:
        model = network(rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.2)
        la.attach(model, optimizer, ALL[recipe])
        for t, x in enumerate(data()[rank]):
            if fails and t == 2:
                hidden = model[1](model[0](x))
                with pytest.raises(MemoryError):
                    model[2](Fails.apply(hidden)).sum().backward()
            plain_loop(model, optimizer, [x])
        return flat(model)

    calm = la.simulate(lambda rank: run(rank, False), workers=WORKERS)
    assert all(map(torch.equal, calm, la.simulate(lambda r: run(r, True), workers=WORKERS)))


def alternating(rank: int, recipe: la.Recipe, attach: bool, xs: list[Tensor]) -> list[Tensor]:
    """One model, two optimizers that step in turn after one backward pass each."""
    model = network(rank)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(model[0].parameters(), 0.2, momentum=0.9),
        torch.optim.SGD(model[2].parameters(), 0.1),
    ]
    syncs = [la.attach(model, o, recipe, timeout=20) for o in optimizers] if attach else []
    for t, x in enumerate(xs):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, x).backward()
        for optimizer in optimizers if t % 2 else reversed(optimizers):
            optimizer.step()
    for sync in syncs:
        sync.finish()
        sync.detach()
    return [flat(model)]


def test_two_optimizers_of_one_model_under_ddp() -> None:
    batches = data()
    (single,) = alternating(0, (), False, global_batches(batches))
    for (x,) in la.simulate(
        lambda rank: alternating(rank, la.ddp(), True, batches[rank]), workers=WORKERS
    ):
        assert torch.allclose(x, single, rtol=0, atol=1e-12)


def alternating_over(rank: int, recipe: la.Recipe) -> list[Tensor]:
    return alternating(rank, recipe, True, data(4)[rank])


@pytest.mark.parametrize("recipe", ["ddp", "delayed", "slowmo"])
def test_two_optimizers_over_processes_by_the_front_door(pool: gloo.Pool, recipe: str) -> None:
    """`laconic.attach` on the default process group, each optimizer with a link of its own."""
    runs = pool.run(alternating_over, ALL[recipe], ranks=4)
    assert equal([x for (x,) in runs])
    simulated = la.simulate(lambda rank: alternating_over(rank, ALL[recipe]), workers=4)
    assert torch.allclose(runs[0][0], simulated[0][0], rtol=0, atol=1e-12)


# -- parameters without a gradient ----


class Branches(nn.Module):
    """Two branches and a rest that is never used."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.common = nn.Linear(5, 3).double()
        self.left = nn.Linear(3, 2).double()
        self.right = nn.Linear(3, 2).double()
        self.unused = nn.Linear(3, 2).double()

    def loss(self, x: Tensor, branch: str) -> Tensor:
        module = self.left if branch == "left" else self.right
        out: Tensor = module(self.common(x))
        return (out - 1.0).square().mean()


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.2, momentum=0.9, weight_decay=0.3)


def branch_of(rank: int, t: int) -> str:
    """Rank 0 takes the right branch at odd steps; all others always the left."""
    return "right" if rank == 0 and t % 2 else "left"


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_on_one_rank_only_counts_as_zero_elsewhere(set_to_none: bool) -> None:
    batches = data()

    def run(rank: int) -> Tensor:
        model = Branches(rank)
        optimizer = decaying(model)
        la.attach(model, optimizer, la.ddp())
        for t, x in enumerate(batches[rank]):
            optimizer.zero_grad(set_to_none=set_to_none)
            model.loss(x, branch_of(rank, t)).backward()
            optimizer.step()
        return flat(model)

    model = Branches(0)
    optimizer = decaying(model)
    for t in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        losses = [model.loss(batches[r][t], branch_of(r, t)) for r in range(WORKERS)]
        torch.stack(losses).mean().backward()
        optimizer.step()
    runs = la.simulate(run, workers=WORKERS)
    assert equal(runs)
    assert torch.allclose(runs[0], flat(model), rtol=0, atol=1e-12)


def test_a_parameter_that_no_rank_uses_is_left_alone() -> None:
    """Weight decay does not touch it: it has no gradient, as in one process."""
    start = flat(Branches(0).unused)

    def run(rank: int) -> tuple[Tensor, bool]:
        model = Branches(rank)
        optimizer = decaying(model)
        la.attach(model, optimizer, la.ddp())
        for x in data()[rank]:
            optimizer.zero_grad()
            model.loss(x, "left").backward()
            optimizer.step()
        return flat(model.unused), model.unused.weight.grad is None

    for values, without in la.simulate(run, workers=WORKERS):
        assert torch.equal(values, start) and without


@pytest.mark.parametrize(
    "recipe", ["ddp", "post_local", "slowmo", "overlapped sgp", "easgd", "lsgd"]
)
def test_a_rank_without_any_gradient_in_a_step(recipe: str) -> None:
    """Rank 1 has no batch at step 2 but steps along: it counts as zeros, and nobody waits."""
    batches = data()

    def run(rank: int) -> Tensor:
        model = network(rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.2)
        sync = la.attach(model, optimizer, ALL[recipe])
        for t, x in enumerate(batches[rank], 1):
            optimizer.zero_grad()
            if (rank, t) != (1, 2):
                loss_of(model, x).backward()
            optimizer.step()
        sync.finish()
        return flat(model)

    runs = la.simulate(run, workers=WORKERS)
    assert equal(runs)
    if recipe == "ddp":
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.2)
        for t in range(1, STEPS + 1):
            optimizer.zero_grad()
            present = [r for r in range(WORKERS) if (r, t) != (1, 2)]
            losses = [loss_of(model, batches[r][t - 1]) for r in present]
            (torch.stack(losses).sum() / WORKERS).backward()
            optimizer.step()
        assert torch.allclose(runs[0], flat(model), rtol=0, atol=1e-12)


def test_averaged_momenta_of_a_rank_that_had_no_gradient_yet() -> None:
    """Its optimizer has no state at the first round: it takes part with zeros."""

    def run(rank: int) -> Tensor:
        model = network(rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
        sync = la.attach(model, optimizer, la.local_sgd(2, optimizer_state="average"))
        for t, x in enumerate(data()[rank]):
            optimizer.zero_grad()
            if rank != 1 or t > 2:
                loss_of(model, x).backward()
            optimizer.step()
        sync.finish()
        return flat(model)

    assert equal(la.simulate(run, workers=WORKERS))


# -- parameters that come later ----


@pytest.mark.parametrize("recipe", ALL)
def test_a_parameter_group_that_is_added_later(recipe: str) -> None:
    """It joins with rank 0's values, and is then part of every round."""

    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = network(rank)
        late = nn.Linear(3, 2).double()
        whole = nn.Sequential(model, late)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        sync = la.attach(whole, optimizer, ALL[recipe])
        for t, x in enumerate(data(steps=14)[rank]):
            if t == 3:
                optimizer.add_param_group({"params": late.parameters(), "lr": 0.05})
            optimizer.zero_grad()
            loss_of(model if t < 3 else whole, x).backward()
            optimizer.step()
        before = flat(late)
        sync.finish()
        return before, flat(whole)

    befores, runs = zip(*la.simulate(run, workers=WORKERS), strict=True)
    assert equal(list(runs))
    if recipe in ("ddp", "post_local", "slowmo", "no average"):  # averaged in the last step
        assert equal(list(befores))
    else:
        assert not equal(list(befores)), "it trains on each worker's own batches"


@pytest.mark.parametrize("how", ["thawed", "added"])
def test_replicas_under_ddp_stay_equal_when_parameters_join(how: str) -> None:
    def run(rank: int) -> list[Tensor]:
        model = network(rank)
        head = list(model[2].parameters())
        body = list(model[0].parameters())
        optimizer = torch.optim.SGD(body, 0.1, momentum=0.9)
        if how == "thawed":
            for p in head:
                p.requires_grad_(False)
            optimizer.add_param_group({"params": head})
        la.attach(model, optimizer, la.ddp())
        trace = []
        for t, x in enumerate(data()[rank]):
            if t == 3 and how == "thawed":
                for p in head:
                    p.requires_grad_(True)
            if t == 3 and how == "added":
                optimizer.add_param_group({"params": head})
            trace += plain_loop(model, optimizer, [x])
        return trace

    for t, xs in enumerate(zip(*la.simulate(run, workers=WORKERS), strict=True), 1):
        assert equal(list(xs)), f"after step {t}"


@pytest.mark.parametrize("recipe", ALL)
def test_a_frozen_parameter_is_left_alone(recipe: str) -> None:
    """But for the rounding of a mean of equal numbers, where these are sent."""

    def run(rank: int) -> Tensor:
        model = network(rank)
        model[0].weight.requires_grad_(False)
        optimizer = decaying(model)
        with la.attach(model, optimizer, ALL[recipe]):
            plain_loop(model, optimizer, data()[rank])
        return flat(model)

    runs = la.simulate(run, workers=WORKERS)
    start = flat(network(0))
    assert equal(runs)
    assert torch.allclose(runs[0][:35], start[:35], rtol=1e-14, atol=0)
    assert recipe != "ddp" or torch.equal(runs[0][:35], start[:35])
    assert (runs[0][35:] != start[35:]).all()


def test_a_parameter_frozen_between_two_parts_of_a_batch_gets_the_mean_of_the_first() -> None:
    def run(rank: int) -> Tensor:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with la.attach(model, optimizer, la.ddp()) as sync:
            with sync.no_sync():
                loss_of(model, data()[rank][0]).backward()
            model[0].weight.requires_grad_(False)
            loss_of(model, data()[rank][1]).backward()
            optimizer.step()
            return flat(model)

    runs = la.simulate(run, workers=WORKERS)
    assert equal(runs)
    assert not torch.equal(runs[0][:35], flat(network())[:35])


@pytest.mark.parametrize("codec", [None, "int8"])
@pytest.mark.parametrize("closure", [False, True])
def test_a_parameter_frozen_before_the_step_gets_the_mean(codec: str | None, closure: bool) -> None:
    """Of what came before, to which a closure may add."""

    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with la.attach(model, optimizer, la.ddp(codec=codec)) as sync:
            with sync.no_sync():
                loss_of(model, data()[rank][0]).backward()
            model[0].weight.requires_grad_(False)
            if closure:
                optimizer.step(lambda: loss_of(model, data()[rank][4]).backward())
            else:
                optimizer.step()
            frozen = flat(model)
            for x in data()[rank][1:4]:
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()
            return frozen, flat(model)

    frozen, ends = zip(*la.simulate(run, workers=WORKERS), strict=True)
    start = flat(network())
    assert equal(list(frozen)) and equal(list(ends))
    assert not torch.equal(frozen[0][:35], start[:35])
    assert torch.equal(ends[0][:35], frozen[0][:35]) and not torch.equal(ends[0], frozen[0])


@pytest.mark.parametrize("codec", [None, "int8"])
def test_a_parameter_frozen_before_a_pass_that_a_rank_has_not(codec: str | None) -> None:
    def run(rank: int) -> Tensor:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with la.attach(model, optimizer, la.ddp(codec=codec)):
            for t, x in enumerate(data()[rank]):
                model[0].weight.requires_grad_(t < 3)
                optimizer.zero_grad()
                if rank > 0 or t != 3:
                    loss_of(model, x).backward()
                optimizer.step()
        return flat(model)

    assert equal(la.simulate(run, workers=WORKERS))


@pytest.mark.parametrize("codec", [None, "int8"])
def test_a_parameter_frozen_after_only_some_ranks_have_averaged_it_is_an_error(
    codec: str | None,
) -> None:
    """One that had no batch cannot know whether the others' was before."""

    def run(rank: int) -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        la.attach(model, optimizer, la.ddp(codec=codec))
        if rank > 0:
            loss_of(model, data()[rank][0]).backward()
        model[0].weight.requires_grad_(False)
        optimizer.step()

    with pytest.raises(LinkError, match="disagree on what comes next"):
        la.simulate(run, workers=WORKERS)


class Checkpointed(nn.Module):
    """Blocks whose activations are computed anew in the backward pass; ``around`` says where there
    are parameters outside them."""

    def __init__(self, around: str, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.around, self.reentrant = around, reentrant
        wide = 20_000 if around == "a large end" else 3
        self.enter = nn.Linear(5, 7).double()
        self.blocks = nn.ModuleList(nn.Linear(7, 7).double() for _ in range(3))
        self.leave = nn.Linear(7, wide).double()
        self.enter.requires_grad_(around in ("both ends", "the beginning"))
        self.leave.requires_grad_(around in ("both ends", "the end", "a large end"))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x).requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant).tanh()
        out: Tensor = self.leave(x)
        return out


@pytest.mark.parametrize(
    "around", ["both ends", "the beginning", "the end", "nowhere", "a large end"]
)
@pytest.mark.parametrize("recipe", [la.ddp(), la.ddp(codec="int8"), la.demo()])
def test_reentrant_checkpointing_is_refused_on_all_ranks(recipe: la.Recipe, around: str) -> None:
    """It runs backward passes within one, each of which would be averaged on its own."""

    def run(rank: int, reentrant: bool, later: bool = False) -> Tensor | str:
        model = Checkpointed(around, reentrant)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sync = la.attach(model, optimizer, recipe)
        try:
            for x in data()[rank][:3]:
                optimizer.zero_grad()
                with sync.no_sync() if later else contextlib.nullcontext():
                    loss_of(model, x).backward()
                optimizer.step()
        except RuntimeError as error:
            return str(error)
        finally:
            sync.detach()
        return flat(model)

    for said in la.simulate(partial(run, reentrant=True), workers=WORKERS):
        assert isinstance(said, str) and "use_reentrant=False" in said
    for reentrant, later in ((False, False), (True, True)):
        ends = la.simulate(partial(run, reentrant=reentrant, later=later), workers=WORKERS)
        assert all(isinstance(end, Tensor) for end in ends) and equal(ends)
        assert not torch.equal(ends[0], flat(Checkpointed(around, False)))


def test_a_group_that_joins_while_momenta_travel() -> None:
    own = la.Round(la.every(2), la.updates.Average(), Mean(), optimizer_state, delay=1)

    def run(rank: int) -> list[Tensor]:
        model = network()
        optimizer = torch.optim.SGD(model[0].parameters(), 0.1, momentum=0.9)
        la.attach(model, optimizer, (own,))
        plain_loop(model, optimizer, data()[rank][:2])
        optimizer.add_param_group({"params": list(model[2].parameters())})
        before = [s["momentum_buffer"].clone() for s in optimizer.state.values()]
        plain_loop(model, optimizer, data()[rank][2:3])
        return before

    assert len(la.simulate(run, workers=WORKERS)) == WORKERS


def test_parameters_outside_the_optimizer_are_broadcast_once() -> None:
    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = network(rank)
        optimizer = torch.optim.SGD(model[2].parameters(), 0.1)
        la.attach(model, optimizer, la.local_sgd(2))
        start = flat(model[0])
        with torch.no_grad():
            for p in model[0].parameters():
                p.add_(rank)
        plain_loop(model, optimizer, data()[rank][:4])
        return start, flat(model[0])

    starts, ends = zip(*la.simulate(run, workers=WORKERS), strict=True)
    assert equal(list(starts)) and torch.equal(starts[0], flat(network(0)[0]))
    assert torch.allclose(ends[2] - ends[0], torch.full_like(ends[0], 2.0))


class Counting(torch.optim.SGD):
    """Does every second step, as it counts them; the number is no tensor."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (p,) = self.param_groups[0]["params"]
        seen = self.state[p].get("seen", 0) + 1
        self.state[p]["seen"] = seen
        if seen % 2 == 0:
            super().step()


class Warming(torch.optim.SGD):
    """Whose rate rises by itself, in its settings."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.param_groups[0]["lr"] *= 1.1


@pytest.mark.parametrize(("kind", "name"), [(Counting, "seen"), (Warming, "lr")])
def test_an_outer_optimizer_that_keeps_numbers_is_refused(kind: Any, name: str) -> None:
    """They would begin anew in every round."""

    def run(rank: int) -> str:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        la.attach(model, optimizer, la.diloco(2, outer=lambda x: kind(x, lr=0.5)))
        with pytest.raises(ValueError, match=f"outer= stores .'{name}'. as Python numbers") as told:
            plain_loop(model, optimizer, data()[rank][:2])
        return str(told.value)

    assert len(set(la.simulate(run, workers=WORKERS))) == 1


# -- module buffers ----


def norm_of(model: nn.Sequential) -> Any:
    """The BatchNorm of `with_norm`, whose buffers have no types."""
    return model[1]


def with_norm(rank: int) -> nn.Sequential:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def norm_run(rank: int, recipe: la.Recipe, buffers: Any, steps: int) -> tuple[Tensor, Tensor, int]:
    """Running mean before the last step's rounds and at the end, and the counter."""
    model = with_norm(rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before: list[Tensor] = []
    optimizer.register_step_post_hook(lambda *_: before.append(norm_of(model).running_mean.clone()))
    la.attach(model, optimizer, recipe, buffers=buffers)
    with torch.no_grad():
        norm_of(model).num_batches_tracked += 100 * rank
    plain_loop(model, optimizer, data()[rank][:steps])
    return before[-1], norm_of(model).running_mean.clone(), int(norm_of(model).num_batches_tracked)


@pytest.mark.parametrize(
    "recipe",
    ["local_sgd", "slowmo", "no average", "diloco", "easgd", "lsgd"],
)
def test_buffers_are_averaged_at_rounds(recipe: str) -> None:
    steps = 3 if recipe in ("local_sgd", "diloco", "easgd", "lsgd") else 4
    runs = la.simulate(lambda rank: norm_run(rank, ALL[recipe], "average", steps), workers=WORKERS)
    mean = torch.stack([before for before, _, _ in runs]).mean(0)
    assert not equal([before for before, _, _ in runs])
    for rank, (_, after, counter) in enumerate(runs):
        assert torch.allclose(after, mean, rtol=0, atol=1e-14)
        assert counter == steps + 100 * rank, "counters are left alone"


CONSTANT = {
    "local_sgd": la.local_sgd(2),
    "delayed": la.local_sgd(2, delay=1),
    "streaming_diloco": la.streaming_diloco(8, 4),
    "sgp": la.sgp(),
}


@pytest.mark.fault("constant buffers (causal masks, rotary tables) were sent with every round")
@pytest.mark.parametrize("name", CONSTANT)
def test_buffers_that_no_rank_changes_are_not_sent(name: str) -> None:
    def sent(rank: int, mask: bool) -> int:
        model = nn.Sequential(nn.Linear(5, 40), nn.Linear(40, 2)).double()
        if mask:
            model.register_buffer("mask", torch.ones(100, 100))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with la.attach(model, optimizer, CONSTANT[name]) as sync:
            plain_loop(model, optimizer, data(16)[rank])
        return sync.stats().bytes_sent

    without, with_mask = (
        la.simulate(partial(sent, mask=mask), workers=2)[0] for mask in (False, True)
    )
    assert with_mask < 1.05 * without


@pytest.mark.fault("recipes of fragments sent all buffers with every fragment")
def test_buffers_are_sent_once_per_period_of_fragments() -> None:
    def run(rank: int) -> list[float]:
        model = nn.Linear(4, 4)
        model.register_buffer("rank", torch.tensor([float(rank)]))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        seen = []
        with la.attach(model, optimizer, la.streaming_diloco(4, 2)):
            for _ in range(8):
                optimizer.step()
                seen.append(float(model.rank))
                model.rank.fill_(rank)
        return seen

    seen = la.simulate(run, workers=2)[0]
    assert sum(value == 0.5 for value in seen) == 2


class Codebook(nn.Module):
    """A buffer that the forward pass reads and changes by what it reads, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)
        self.register_buffer("code", torch.zeros(2))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) - self.code
        if self.training:
            with torch.no_grad():
                self.code += 0.1 * y.mean(0)
                self.seen += len(x)
        return y


@pytest.mark.fault(
    "no choice gave all ranks rank 0's buffers before each forward pass, as DDP does"
)
@pytest.mark.parametrize("recipe", [la.ddp(), la.local_sgd(2), la.sgp(), la.streaming_diloco(4, 2)])
def test_buffers_of_rank_0_before_every_forward_pass(recipe: la.Recipe) -> None:
    """`buffers="broadcast"`; with `ddp` the parameters are those of torch's
    DistributedDataParallel, which the loop on one model imitates here."""

    def run(rank: int) -> list[Any]:
        model = Codebook()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with la.attach(model, optimizer, recipe, buffers="broadcast"):
            starts = []
            for step in range(6):
                starts.append((model.code.clone(), int(model.seen)))
                optimizer.zero_grad()
                model(batch(rank, step)).square().mean().backward()
                optimizer.step()
        return [starts, model.code, model.linear.weight.detach()]

    def batch(rank: int, step: int) -> Tensor:
        return torch.full((rank + 1, 3), 0.3 * (step + 1 + rank))

    runs = la.simulate(run, workers=2)
    for at_rank_0, at_rank_1 in zip(runs[0][0], runs[1][0], strict=True):
        assert torch.equal(at_rank_0[0], at_rank_1[0])
        assert at_rank_0[1] == at_rank_1[1]
    assert torch.equal(runs[0][1], runs[1][1])
    if recipe == la.ddp():
        model = Codebook()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(6):
            optimizer.zero_grad()
            before = model.code.clone()
            (model(batch(0, step)).square().mean() / 2).backward()
            after = model.code.clone()
            model.code.copy_(before)
            (model(batch(1, step)).square().mean() / 2).backward()
            model.code.copy_(after)
            optimizer.step()
        assert torch.allclose(model.linear.weight, runs[0][2], atol=1e-6)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"recipe": la.slowmo(None, 2, quorum=1)}, "rounds have a quorum"),
        ({"recipe": la.ddp(), "elastic": la.Elastic()}, "workers come and go"),
    ],
)
def test_buffers_are_broadcast_only_where_all_workers_meet(options: Any, why: str) -> None:
    def run(rank: int) -> None:
        model = Codebook()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        la.attach(model, optimizer, buffers="broadcast", **options)

    with pytest.raises(ValueError, match=f"'broadcast' .*{why}"):
        run(0) if "elastic" in options else la.simulate(run, workers=2)


def test_buffers_of_a_delayed_round_are_folded_when_it_is() -> None:
    """As they were sent: what they took in meanwhile is lost, and no variance turns negative."""
    recipe = la.local_sgd(2, delay=1)

    def run(steps: int) -> list[tuple[Tensor, Tensor, int]]:
        return la.simulate(lambda rank: norm_run(rank, recipe, "average", steps), workers=WORKERS)

    sent = torch.stack([before for before, _, _ in run(2)])
    for _, after, _ in run(3):
        assert torch.allclose(after, sent.mean(0), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("recipe", "first"),
    [(la.local_sgd(3, delay=2), 3), (la.streaming_diloco(4, 2, 1), 2), (la.sgp(delay=2), 2)],
    ids=["local_sgd", "streaming_diloco", "sgp"],
)
def test_a_delayed_round_of_buffers_waits_for_nobody(
    pool: gloo.Pool, tmp_path: Path, recipe: la.Recipe, first: int
) -> None:
    """Rank 1 gets to a round only when rank 0 is one step from folding it."""
    late = pool.run(waiting_run, recipe, first, tmp_path / "went on", ranks=4)
    even = pool.run(waiting_run, recipe, first, None, ranks=4)
    assert [x.tolist() for x in late] == [x.tolist() for x in even]
    assert equal(late)


def waiting_run(rank: int, recipe: la.Recipe, first: int, sign: Path | None) -> Tensor:
    """Parameters and running means in the end. Rank 1 waits for ``sign`` before step ``first``,
    after which the recipe has its first round; rank 0 makes it as late as it may."""
    model = with_norm(rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with la.attach(model, optimizer, recipe):
        for step, x in enumerate(data(4)[rank], 1):
            if sign is not None and rank == 1 and step == first:
                end = time.monotonic() + 60
                while not sign.exists() and time.monotonic() < end:
                    time.sleep(0.01)
                assert sign.exists(), "rank 0 waits for this one"
            plain_loop(model, optimizer, [x])
            if sign is not None and rank == 0 and step == first + recipe[0].delay - 1:
                sign.touch()
    return torch.cat([flat(model), norm_of(model).running_mean])


def test_buffers_of_a_delayed_round_that_are_others_by_then() -> None:
    """A buffer that a module has put another in place of is found by its name; one whose shape is
    another, and one that some workers lack, are left alone."""

    def run(rank: int) -> list[Tensor]:
        model = with_norm(rank)
        model.register_buffer("own", torch.full((2,), float(rank)))
        model.register_buffer("grown", torch.full((2,), float(rank)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with la.attach(model, optimizer, la.local_sgd(2, delay=1)) as sync:
            if rank:
                model.register_buffer("alone", torch.full((2,), float(rank)))
            for name in ("own", "grown"):
                model.get_buffer(name).fill_(rank)
            plain_loop(model, optimizer, data()[rank][:2])
            model.own = torch.full((2,), 10.0 + rank)
            model.grown = torch.full((3,), 10.0 + rank)
            plain_loop(model, optimizer, data()[rank][2:3])
            names = ["own", "grown", *["alone"] * bool(rank)]
            found = [model.get_buffer(name).clone() for name in names]
            sync.finish()
        return found

    for rank, (own, grown, *alone) in enumerate(la.simulate(run, workers=WORKERS)):
        assert own.tolist() == [1.0] * 2
        assert grown.tolist() == [10.0 + rank] * 3
        assert all(x.tolist() == [float(rank)] * 2 for x in alone)


def test_delayed_gossip_of_buffers_keeps_what_they_took_in_meanwhile() -> None:
    """The sum over the workers changes by that alone, whatever is mixed."""

    def run(rank: int) -> float:
        model = with_norm(rank)
        model.register_buffer("own", torch.zeros((), dtype=torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        la.attach(model, optimizer, la.d_psgd(delay=1))
        model.get_buffer("own").fill_(4.0**rank)
        for x in data()[rank][:4]:
            plain_loop(model, optimizer, [x])
            model.get_buffer("own").add_(1 + rank)
        return float(model.get_buffer("own"))

    found = la.simulate(run, workers=WORKERS)
    assert sum(found) == pytest.approx(1 + 4 + 16 + 4 * (1 + 2 + 3), abs=1e-12)
    assert max(found) - min(found) < 15 - 1, "they were mixed"


@pytest.mark.parametrize(("buffers", "steps"), [("keep", 3), ("keep", 4), ("average", 4)])
def test_buffers_are_left_alone_between_rounds_and_where_kept(buffers: str, steps: int) -> None:
    runs = la.simulate(
        lambda rank: norm_run(rank, la.local_sgd(3), buffers, steps), workers=WORKERS
    )
    assert all(torch.equal(before, after) for before, after, _ in runs)
    assert not equal([after for _, after, _ in runs])


def test_buffers_start_from_rank_0s() -> None:
    def run(rank: int) -> Tensor:
        model = with_norm(rank)
        with torch.no_grad():
            norm_of(model).running_mean += rank + 1
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        la.attach(model, optimizer, la.local_sgd(3), buffers="keep")
        mean: Tensor = norm_of(model).running_mean
        return mean.clone()

    assert [x.tolist() for x in la.simulate(run, workers=WORKERS)] == [[1.0] * 4] * WORKERS


@pytest.mark.parametrize("recipe", ["ddp", "local_sgd", "slowmo", "overlapped sgp", "lsgd"])
@pytest.mark.parametrize("inner", [1, 2])
def test_finish_leaves_equal_buffers(recipe: str, inner: int) -> None:
    def run(rank: int) -> Tensor:
        model = with_norm(rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with la.attach(model, optimizer, ALL[recipe], nprocs_per_node=inner):
            plain_loop(model, optimizer, data(4)[rank][:5])
        return torch.cat([norm_of(model).running_mean, norm_of(model).running_var])

    assert equal(la.simulate(run, workers=4))


# -- dtypes and scaling ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", ALL)
def test_low_precision_parameters_keep_their_dtype(recipe: str, dtype: torch.dtype) -> None:
    """And train about as float32 does: sums and outer state are in float32."""

    def run(rank: int, dtype: torch.dtype) -> tuple[Tensor, list[torch.dtype]]:
        model = network(rank, dtype)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        with la.attach(model, optimizer, ALL[recipe]) as sync:
            plain_loop(model, optimizer, [x.to(dtype) for x in data()[rank]])
            with sync.consensus():
                pass
        return flat(model), [p.dtype for p in model.parameters()]

    low = la.simulate(lambda rank: run(rank, dtype), workers=WORKERS)
    full = la.simulate(lambda rank: run(rank, torch.float32), workers=WORKERS)
    assert equal([x for x, _ in low])
    for (x, dtypes), (y, _) in zip(low, full, strict=True):
        assert dtypes == [dtype] * 4
        assert torch.allclose(x.float(), y, atol=0.05)


LOW: dict[str, tuple[la.Recipe, bool]] = {
    "sgp": (la.sgp(peers=2, delay=1), False),
    "d_psgd": (la.d_psgd("bipartite_linear"), False),
    "hierarchical": (la.hierarchical(2, 4), True),
    "easgd": (la.easgd(2, pull=0.2), False),
    "downpour": (la.downpour(4), True),
    "lsgd": (la.lsgd(4), False),
    "slowmo over sgp": (la.slowmo(la.sgp("bipartite_linear", delay=2), 4, momentum=0.5), True),
    "slowmo over lsgd": (la.slowmo(la.lsgd(4, local_period=2), 4, momentum=0.5), True),
}
"""Recipes, and whether all replicas are equal after steps 4, 8, 12, ..."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOW)
def test_low_precision_over_twenty_steps(name: str, dtype: torch.dtype) -> None:
    recipe, meets = LOW[name]

    def run(rank: int) -> tuple[list[Tensor], list[float]]:
        model = network(rank, dtype)
        optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.5)
        la.attach(model, optimizer, recipe, group_size=3 if in_groups(recipe) else None)
        batches = [x.to(dtype) for x in data(3, 20)[rank % 3]]
        losses = [float(loss_of(model, batches[0]).detach())]
        trace = plain_loop(model, optimizer, batches)
        assert {p.dtype for p in model.parameters()} == {dtype}
        return trace, [*losses, float(loss_of(model, batches[0]).detach())]

    runs = la.simulate(run, workers=3)
    for t, xs in enumerate(zip(*(trace for trace, _ in runs), strict=True), 1):
        assert all(x.isfinite().all() for x in xs)
        assert equal(list(xs)) == (meets and t % (2 if name == "hierarchical" else 4) == 0)
    assert all(last < first for _, (first, last) in runs), "and they learn"


def test_large_half_precision_values_do_not_overflow() -> None:
    """The sum of three is beyond float16's 65504, the mean is not."""

    def run(rank: int) -> Tensor:
        p = nn.Parameter(torch.full((5,), 40_000.0, dtype=torch.float16))
        model = nn.ParameterList([p])
        optimizer = torch.optim.SGD([p], lr=0.0)
        la.attach(model, optimizer, la.local_sgd(1))
        p.grad = torch.full_like(p, float(rank + 1))
        optimizer.step()
        return p.detach().clone()

    assert [x.tolist() for x in la.simulate(run, workers=3)] == [[40_000.0] * 5] * 3


@pytest.mark.parametrize("recipe", ["ddp", "local_sgd", "delayed", "slowmo", "sgp", "easgd"])
def test_an_overflow_on_one_rank_skips_its_step_and_keeps_all_in_step(recipe: str) -> None:
    def run(rank: int) -> tuple[list[int], Tensor, float]:
        model = network(rank, torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        counts = []
        with la.attach(model, optimizer, ALL[recipe], scaler=scaler) as sync:
            for t, x in enumerate(data()[rank], 1):
                optimizer.zero_grad()
                factor = float("inf") if (rank, t) == (1, 2) else 1.0
                scaler.scale(loss_of(model, x.float()) * factor).backward()
                scaler.step(optimizer)
                scaler.update()
                counts.append(sync.step)
        return counts, flat(model), scaler.get_scale()

    runs = la.simulate(run, workers=WORKERS)
    assert [counts for counts, _, _ in runs] == [list(range(1, STEPS + 1))] * WORKERS
    assert equal([x for _, x, _ in runs]) and bool(runs[0][1].isfinite().all())
    scales = [scale for _, _, scale in runs]
    everywhere = recipe == "ddp"  # the mean of gradients is infinite on all ranks
    assert [scale < 2.0**10 for scale in scales] == [everywhere, True, everywhere]


def test_a_scaler_counts_for_what_is_attached_and_counts_once() -> None:
    def run(rank: int) -> list[int]:
        model = network(rank, torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu")

        def overflow() -> None:
            optimizer.zero_grad()
            loss = loss_of(model, data()[rank][0].float()) * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        first = la.attach(model, optimizer, la.local_sgd(2), scaler=scaler)
        overflow()
        first.detach()
        overflow()
        second = la.attach(model, optimizer, la.local_sgd(2), scaler=scaler)
        overflow()
        return [first.step, second.step]

    assert la.simulate(run, workers=2) == [[1, 1]] * 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.fault("an attached GradScaler could not be pickled, and its copy drove the original")
def test_a_copied_scaler_is_its_own(copied: Any) -> None:
    def run(rank: int) -> tuple[float, float, int, bool]:
        model = network(rank, torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        sync = la.attach(model, optimizer, la.local_sgd(2), scaler=scaler)
        scaler.scale(torch.zeros(()))  # makes its state
        other = copied(scaler)
        elsewhere = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
        other.scale(elsewhere.param_groups[0]["params"][0] * float("inf")).backward()
        other.step(elsewhere)
        other.update()
        scaler.scale(loss_of(model, data()[rank][0].float())).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), other.get_scale(), sync.step, type(other) is torch.amp.GradScaler

    assert la.simulate(run, workers=2) == [(4.0, 2.0, 1, True)] * 2


# -- are the workers reading the same batches? ----


def first_steps(rank: int, batch: Tensor, recipe: la.Recipe, steps: int = 2) -> None:
    model = network(rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    la.attach(model, optimizer, recipe)
    plain_loop(model, optimizer, [batch] * steps)


@pytest.mark.parametrize("recipe", ALL)
def test_identical_first_gradients_warn(recipe: str) -> None:
    batch = data()[0][0]
    with pytest.warns(UserWarning, match="reading the same batches") as caught:
        la.simulate(lambda rank: first_steps(rank, batch, ALL[recipe]), workers=2)
    assert len(caught) == 2, "once on each worker"


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("workers", [1, 2])
def test_different_gradients_and_a_single_worker_do_not_warn(recipe: str, workers: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        la.simulate(lambda rank: first_steps(rank, data()[rank][0], ALL[recipe]), workers=workers)
    assert caught == []


def test_identical_gradients_of_a_closure_warn_too() -> None:
    def run(rank: int) -> None:
        model = network(rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        la.attach(model, optimizer, la.local_sgd(2))

        def closure() -> float:
            optimizer.zero_grad()
            loss = loss_of(model, data()[0][0])
            loss.backward()
            return float(loss.detach())

        optimizer.step(closure)

    with pytest.warns(UserWarning, match="reading the same batches") as caught:
        la.simulate(run, workers=2)
    assert len(caught) == 2, "once on each worker"


def test_one_worker_that_differs_is_enough_not_to_warn() -> None:
    batches = data()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        la.simulate(
            lambda rank: first_steps(rank, batches[rank // 2][0], la.local_sgd(2)), workers=3
        )
    assert caught == []


# -- numbers, consensus, finish ----


def attached(rank: int, recipe: la.Recipe) -> tuple[nn.Module, Any, la.Synchronizer]:
    model = network(rank)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, optimizer, la.attach(model, optimizer, recipe, timeout=20)


@pytest.mark.parametrize("make", [float, torch.tensor, lambda v: torch.tensor([v])])
def test_the_mean_of_a_loss(make: Callable[[float], Any]) -> None:
    def run(rank: int) -> float:
        _, _, sync = attached(rank, la.local_sgd(2))
        value = make(1.5 * rank)
        mean = sync.mean(value)
        assert float(value) == 1.5 * rank, "the loss itself is left alone"
        return mean

    assert la.simulate(run, workers=3) == [1.5] * 3


def test_the_mean_of_a_loss_with_a_graph() -> None:
    def run(rank: int) -> float:
        model, _, sync = attached(rank, la.ddp())
        loss = loss_of(model, data()[rank][0])
        mean = sync.mean(loss)
        loss.backward()
        return mean

    model = network()
    expected = float(loss_of(model, global_batches(data())[0]).detach())
    assert la.simulate(run, workers=WORKERS) == pytest.approx([expected] * WORKERS, rel=1e-12)


def averaged(rank: int, tensors: list[torch.Tensor]) -> str | list[torch.Tensor]:
    model = nn.Linear(3, 2)
    sync = la.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), la.local_sgd(2))
    try:
        with torch.inference_mode():
            sync.average(iter(tensors))
    except ValueError as error:
        return str(error)
    finally:
        sync.detach()
    return tensors


def test_tensors_beside_the_model_are_averaged_in_place() -> None:
    def run(rank: int) -> Any:
        tensors = [torch.full((2, 3), 4.0 * rank, dtype=torch.float64), torch.tensor(float(rank))]
        grown = nn.Parameter(torch.full((1,), 3.0 * rank, dtype=torch.bfloat16))
        out = averaged(rank, [*tensors, grown])
        assert out[0] is tensors[0]
        return [t.tolist() for t in out]

    assert la.simulate(run, workers=3) == [[[[4.0] * 3] * 2, 1.0, [3.0]]] * 3


def test_nothing_is_averaged_where_ranks_have_different_tensors() -> None:
    apart = la.simulate(lambda rank: averaged(rank, [torch.ones(2 + rank // 2)]), workers=3)
    assert len(set(apart)) == 1 and "those of rank 2 are not as rank 0's" in apart[0]
    whole = la.simulate(lambda rank: averaged(rank, [torch.ones(2, dtype=torch.int32)]), workers=2)
    assert len(set(whole)) == 1 and "a floating-point dtype" in whole[0]
    assert la.simulate(lambda rank: averaged(rank, []), workers=2) == [[], []]


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("recipe", ALL)
def test_consensus_is_the_same_everywhere_and_gives_the_weights_back(
    recipe: str, raises: bool
) -> None:
    class BodyError(Exception):
        pass

    def run(rank: int) -> tuple[Tensor, bool, bool]:
        model, optimizer, sync = attached(rank, ALL[recipe])
        plain_loop(model, optimizer, data()[rank][:5])
        before, pointers = flat(model), [p.data_ptr() for p in model.parameters()]
        inside = Tensor()
        caught = False
        try:
            with sync.consensus() as same:
                assert same is model
                inside = flat(model)
                if raises:
                    raise BodyError
        except BodyError:
            caught = True
        kept = torch.equal(before, flat(model))
        there = pointers == [p.data_ptr() for p in model.parameters()]
        plain_loop(model, optimizer, data()[rank][5:])
        return inside, kept and there, caught == raises

    runs = la.simulate(run, workers=WORKERS)
    assert equal([inside for inside, _, _ in runs])
    assert all(kept and right for _, kept, right in runs)


def validated(rank: int, recipe: la.Recipe, inference: bool) -> Tensor:
    """Validation before the first round and between rounds, perhaps in inference mode."""
    model, optimizer, sync = attached(rank, recipe)
    for x in data(4)[rank]:
        with torch.inference_mode(inference), sync.consensus():
            loss_of(model, x)
            sync.mean(1.0)
        plain_loop(model, optimizer, [x])
    sync.finish()
    sync.detach()
    return flat(model)


@pytest.mark.parametrize("recipe", ALL)
def test_validation_in_inference_mode(recipe: str) -> None:
    usual = la.simulate(lambda rank: validated(rank, ALL[recipe], False), workers=4)
    assert equal(usual)
    assert equal([*usual, *la.simulate(lambda rank: validated(rank, ALL[recipe], True), workers=4)])


@pytest.mark.parametrize("recipe", ["ddp", "delayed", "slowmo", "diloco", "overlapped sgp", "lsgd"])
def test_validation_in_inference_mode_over_processes(pool: gloo.Pool, recipe: str) -> None:
    usual = pool.run(validated, ALL[recipe], False, ranks=4)
    assert equal([*usual, *pool.run(validated, ALL[recipe], True, ranks=4)])


@pytest.mark.parametrize("recipe", ["ddp", "local_sgd", "no average", "d_psgd", "sgp", "lsgd"])
def test_consensus_without_an_anchor_is_the_mean(recipe: str) -> None:
    def run(rank: int) -> tuple[Tensor, Tensor]:
        model, optimizer, sync = attached(rank, ALL[recipe])
        plain_loop(model, optimizer, data()[rank][: 4 if recipe == "no average" else 5])
        own = flat(model)
        with sync.consensus():
            return own, flat(model)

    runs = la.simulate(run, workers=WORKERS)
    mean = torch.stack([own for own, _ in runs]).mean(0)
    assert all(torch.allclose(found, mean, rtol=0, atol=1e-14) for _, found in runs)


def test_consensus_includes_buffers_and_gives_them_back() -> None:
    def run(rank: int) -> tuple[Tensor, Tensor, bool]:
        model = with_norm(rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sync = la.attach(model, optimizer, la.local_sgd(3))
        plain_loop(model, optimizer, data()[rank][:4])
        own = norm_of(model).running_mean.clone()
        with sync.consensus():
            inside = norm_of(model).running_mean.clone()
            model.train()
            model(data()[rank][4])  # validation that forgets eval() moves them
        return own, inside, torch.equal(norm_of(model).running_mean, own)

    runs = la.simulate(run, workers=WORKERS)
    mean = torch.stack([own for own, _, _ in runs]).mean(0)
    assert all(torch.allclose(found, mean, rtol=0, atol=1e-14) and kept for _, found, kept in runs)


@pytest.mark.parametrize(
    "recipe", ["ddp", "local_sgd", "delayed", "slowmo", "diloco", "overlapped sgp", "easgd"]
)
def test_consensus_state_dict_is_a_copy_to_ship(recipe: str) -> None:
    def run(rank: int) -> tuple[dict[str, Tensor], bool]:
        model, optimizer, sync = attached(rank, ALL[recipe])
        plain_loop(model, optimizer, data()[rank][:5])
        shipped = sync.consensus_state_dict()
        kept = {key: value.clone() for key, value in shipped.items()}
        with sync.consensus():
            same = all(torch.equal(v, kept[k]) for k, v in model.state_dict().items())
        plain_loop(model, optimizer, data()[rank][5:])
        fresh = network(9)
        fresh.load_state_dict(shipped)
        return shipped, same and all(torch.equal(shipped[k], v) for k, v in kept.items())

    runs = la.simulate(run, workers=WORKERS)
    assert runs[0][0].keys() == network().state_dict().keys()
    for key in runs[0][0]:
        assert equal([shipped[key] for shipped, _ in runs])
    assert all(right for _, right in runs)


@pytest.mark.parametrize("recipe", ALL)
def test_finish_leaves_the_consensus_everywhere_and_training_may_go_on(recipe: str) -> None:
    def run(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        model, optimizer, sync = attached(rank, ALL[recipe])
        plain_loop(model, optimizer, data()[rank][:5])
        sync.finish()
        first = flat(model)
        with sync.consensus():
            inside = flat(model)
        sync.finish()
        again = flat(model)
        plain_loop(model, optimizer, data()[rank][5:])
        sync.finish()
        return first, inside, again, flat(model)

    runs = la.simulate(run, workers=WORKERS)
    for which in range(4):
        assert equal([r[which] for r in runs])
    first, inside, again, last = runs[0]
    assert torch.allclose(first, inside, rtol=0, atol=1e-14)
    assert torch.allclose(first, again, rtol=0, atol=1e-14), "finishing twice changes nothing"
    assert not torch.allclose(first, last, atol=1e-4), "training went on"


def test_finish_folds_what_is_in_flight() -> None:
    """Sent after step 3, due after 5, finished after 4: the mean of all that was computed."""

    def run(rank: int) -> tuple[Tensor, Tensor]:
        model, optimizer, sync = attached(rank, la.local_sgd(3, delay=2))
        plain_loop(model, optimizer, data()[rank][:4])
        own = flat(model)
        sync.finish()
        return own, flat(model)

    runs = la.simulate(run, workers=WORKERS)
    mean = torch.stack([own for own, _ in runs]).mean(0)
    assert all(torch.allclose(found, mean, rtol=0, atol=1e-13) for _, found in runs)


@pytest.mark.parametrize("recipe", ALL)
def test_a_with_block_finishes_and_detaches(recipe: str) -> None:
    def run(rank: int) -> tuple[Tensor, bool, int]:
        model = network(rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with la.attach(model, optimizer, ALL[recipe]) as sync:
            plain_loop(model, optimizer, data()[rank])
        x, sent = flat(model), sync.stats().bytes_sent
        plain_loop(model, optimizer, data()[rank])
        return x, sync.attached, sync.stats().bytes_sent - sent

    runs = la.simulate(run, workers=WORKERS)
    assert equal([x for x, _, _ in runs])
    assert all((attached, sent) == (False, 0) for _, attached, sent in runs)


def test_one_recipe_after_another() -> None:
    """Detach, and attach another: as in post-local SGD by hand."""

    def run(rank: int) -> Tensor:
        model = network(rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with la.attach(model, optimizer, la.ddp()):
            plain_loop(model, optimizer, data()[rank][:3])
        with la.attach(model, optimizer, la.local_sgd(2)):
            plain_loop(model, optimizer, data()[rank][3:7])
        return flat(model)

    def at_once(rank: int) -> Tensor:
        model = network(rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with la.attach(model, optimizer, la.ddp()):
            plain_loop(model, optimizer, data()[rank][:3])
        sync = la.attach(model, optimizer, (la.Round(la.every(2), *round_parts()),))
        plain_loop(model, optimizer, data()[rank][3:7])
        sync.finish()
        return flat(model)

    assert equal([*la.simulate(run, workers=2), *la.simulate(at_once, workers=2)])


def round_parts() -> tuple[Any, Any]:
    (r,) = la.local_sgd(2)
    return r.update, r.exchange


# -- stats ----


def test_stats_count_steps_rounds_bytes_and_waiting() -> None:
    def run(rank: int) -> list[la.Stats]:
        model, optimizer, sync = attached(rank, la.slowmo(la.local_sgd(2), 4, momentum=0.5))
        found = [sync.stats()]
        for x in data()[rank]:
            plain_loop(model, optimizer, [x])
            found.append(sync.stats())
        return found

    for stats in la.simulate(run, workers=2):
        assert [s.steps for s in stats] == list(range(9))
        assert [s.rounds for s in stats] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
        for before, after in itertools.pairwise(stats):
            sent = after.bytes_sent > before.bytes_sent
            assert sent == (after.rounds > before.rounds or after.steps == 1)
            assert after.seconds_waiting >= before.seconds_waiting >= 0.0
        last = stats[-1]
        assert last.bytes_sent == last.bytes_received == sum(last.bytes_by_collective.values())
        assert last.seconds_waiting > stats[0].seconds_waiting


def test_rounds_of_buffers_count_too() -> None:
    def run(rank: int) -> int:
        model = with_norm(rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sync = la.attach(model, optimizer, la.local_sgd(2))
        plain_loop(model, optimizer, data()[rank][:4])
        return sync.stats().rounds

    assert la.simulate(run, workers=2) == [4, 4]


# -- the simulation itself ----


def test_simulated_workers_have_their_own_random_state() -> None:
    def run(rank: int) -> list[float]:
        _, _, sync = attached(rank, la.local_sgd(2))
        torch.manual_seed(rank)
        drawn = []
        for _ in range(3):
            drawn.append(float(torch.rand(())))
            sync.mean(0.0)  # another worker draws in between
        return drawn

    def alone(seed: int) -> list[float]:
        generator = torch.Generator().manual_seed(seed)
        return [float(torch.rand((), generator=generator)) for _ in range(3)]

    torch.manual_seed(7)
    before = torch.get_rng_state()
    assert la.simulate(run, workers=3) == [alone(rank) for rank in range(3)]
    assert torch.equal(before, torch.get_rng_state()), "the caller's is untouched"


def test_simulations_repeat_bit_for_bit() -> None:
    def run(rank: int) -> Tensor:
        model, optimizer, sync = attached(rank, ALL["slowmo"])
        plain_loop(model, optimizer, data()[rank])
        sync.finish()
        return flat(model)

    assert equal([*la.simulate(run, workers=WORKERS), *la.simulate(run, workers=WORKERS)])


# -- rare tensors and optimizers ----


@pytest.mark.parametrize("recipe", [la.sgp(), la.sgp(delay=2), la.demo()])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.fault("complex parameters under sgp() and demo() failed in the middle of a step")
def test_complex_parameters_are_trained_or_refused(recipe: la.Recipe, dtype: torch.dtype) -> None:
    def run(rank: int) -> Tensor | str:
        p = nn.Parameter(torch.arange(5).to(dtype))
        optimizer = torch.optim.SGD([p], 0.1)
        model = nn.ParameterList([p])
        if recipe == la.demo():
            with pytest.raises(ValueError, match=f"not {dtype}: choose a recipe"):
                la.attach(model, optimizer, recipe)
            return "refused"
        with la.attach(model, optimizer, recipe):
            for _ in range(4):
                p.grad = torch.full_like(p, rank - 1j)
                optimizer.step()
        return p.detach()

    expected = torch.arange(5).to(dtype) - 0.4 * (1 - 1j)
    for found in la.simulate(run, workers=3):
        assert found == "refused" or float((found - expected).abs().max()) < 1e-6


class Wrapper(torch.optim.Optimizer):
    """Wraps an optimizer without torch's __init__, as Accelerate's does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]


class Coded(Tensor):
    """A tensor made of another one, as torchao's state of 8 bits."""

    @staticmethod
    def __new__(cls, codes: Tensor) -> Coded:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Coded:
        return Coded(inner["codes"])

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(function)


def wrapped(model: nn.Module) -> None:
    la.attach(model, Wrapper(torch.optim.SGD(model.parameters(), 0.1)), la.local_sgd(2))


def in_backward(model: nn.Module) -> None:
    own = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}
    la.attach(model, list(own.values()), la.ddp())
    for p in own:
        p.register_post_accumulate_grad_hook(lambda p: own[p].step())
    model(torch.ones(1, 3)).sum().backward()


def coded_state(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    la.attach(model, optimizer, la.local_sgd(1, optimizer_state="average"))
    for p in model.parameters():
        optimizer.state[p]["exp_avg"] = Coded(torch.zeros(p.shape))
    optimizer.step()


@pytest.mark.parametrize(
    "mistake, said",
    [
        (wrapped, "Wrapper has no hooks of torch's Optimizer"),
        (in_backward, r"step\(\) was called inside the backward pass"),
        (coded_state, "keeps 'exp_avg' in tensors of Coded"),
    ],
)
@pytest.mark.fault("errors for wrapped, fused-in-backward and 8-bit optimizers named other causes")
def test_unusual_optimizers_are_refused_by_name(mistake: Any, said: str) -> None:
    def run(rank: int) -> None:
        torch.manual_seed(rank)
        with pytest.raises(ValueError, match=said):
            mistake(nn.Linear(3, 2))

    la.simulate(run, workers=2)


class Versioned(nn.Linear):
    """Refuses a state without its version, as torchvision's MNASNet does."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, about: Any, *others: Any) -> None:
        assert about["version"] == 2
        super()._load_from_state_dict(state, prefix, about, *others)


@pytest.mark.fault("consensus_state_dict() lost the versions of modules, which then refused it")
def test_the_consensus_has_the_versions_of_modules() -> None:
    def run(rank: int) -> None:
        model = nn.Sequential(Versioned(3, 2))
        sync = la.attach(model, torch.optim.SGD(model.parameters(), 0.1), la.local_sgd(2))
        model.load_state_dict(sync.consensus_state_dict())

    la.simulate(run, workers=2)
