"""Everyday training loops: what users do between ``attach`` and ``finish`` goes on working."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import laconic as la

from tests.support.loops import (
    RECIPES,
    STEPS,
    WORKERS,
    attached,
    close,
    data,
    equal,
    flat,
    joined,
    loss_of,
    network,
    sgd,
    train,
)

# -- one process on the global batch ----


def two_groups(model: nn.Sequential) -> torch.optim.Optimizer:
    groups = [
        {"params": model[0].parameters(), "lr": 0.2},
        {"params": model[2].parameters(), "lr": 0.05, "weight_decay": 0.1},
    ]
    return torch.optim.SGD(groups, momentum=0.9)


def test_ddp_with_groups_a_scheduler_and_clipping_is_one_process_on_the_global_batch() -> None:
    def run(rank: int, batches: list[Tensor], attach: bool) -> tuple[Tensor, list[float]]:
        model = network(rank)
        optimizer = two_groups(model)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.3, 0.1], total_steps=STEPS)
        if attach:
            la.attach(model, optimizer, la.ddp())
        trace, norms = [], []
        for x in batches:
            optimizer.zero_grad()
            loss_of(model, x).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
            optimizer.step()
            scheduler.step()
            trace.append(flat(model))
        return torch.stack(trace), norms

    batches = data()
    single, norms = run(0, joined(batches), False)
    assert min(norms) > 0.05, "the clipping clips"
    for trace, own in la.simulate(lambda rank: run(rank, batches[rank], True), workers=WORKERS):
        assert close(trace, single) and own == pytest.approx(norms, rel=1e-10)


@pytest.mark.parametrize("quiet", [1, 2, 0])
def test_accumulation_is_one_large_batch(quiet: int) -> None:
    """Two backward passes a step, of which so many are under ``no_sync()``, and send nothing."""
    batches = data(steps=2 * STEPS)

    def run(rank: int) -> tuple[Tensor, int]:
        model, optimizer, sync = attached(rank, la.ddp())
        trace, unsent = [], 0
        for step in range(0, 2 * STEPS, 2):
            optimizer.zero_grad()
            for part in range(2):
                sent = sync.stats().bytes_sent
                with sync.no_sync() if part < quiet else contextlib.nullcontext():
                    (loss_of(model, batches[rank][step + part]) / 2).backward()
                unsent += (sync.stats().bytes_sent - sent) * (part < quiet)
            optimizer.step()
            trace.append(flat(model))
        return torch.stack(trace), unsent

    model, everything = network(), joined(batches)
    pairs = [torch.cat(everything[t : t + 2]) for t in range(0, 2 * STEPS, 2)]
    single = torch.stack(train(model, sgd(model, momentum=0.9), pairs))
    for trace, unsent in la.simulate(run, workers=WORKERS):
        assert close(trace, single) and unsent == 0


def test_steps_with_a_closure() -> None:
    """Its backward pass lies within ``step()``, after its pre-hooks; LBFGS calls it many times."""

    def run(rank: int, batches: list[Tensor], attach: bool) -> Tensor:
        model = network(rank)
        # with a line search every rank must see the mean loss, so none here
        optimizers = [sgd(model, 0.2), torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)]
        for optimizer in optimizers:
            sync = la.attach(model, optimizer, la.ddp()) if attach else None

            def closure(x: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, x)
                loss.backward()
                return loss

            for x in batches[:3]:
                optimizer.step(partial(closure, x))  # type: ignore[arg-type]
            if sync is not None:
                sync.detach()
        return flat(model)

    single = run(0, joined(data()), False)
    runs = la.simulate(lambda rank: run(rank, data()[rank], True), workers=WORKERS)
    assert equal(runs) and close(runs[0], single, 1e-10)


# -- parameters without a gradient ----


class Branches(nn.Module):
    """Two branches and a rest that is never used."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.common = nn.Linear(5, 3).double()
        self.left, self.right = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
        self.unused = nn.Linear(3, 2).double()

    def loss(self, x: Tensor, right: bool) -> Tensor:
        out: Tensor = (self.right if right else self.left)(self.common(x))
        return (out - 1.0).square().mean()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_that_some_ranks_lack_counts_as_zero_there(set_to_none: bool) -> None:
    """Rank 0 takes the right branch at odd steps; rank 1 has no batch in two steps. What no rank
    uses is not even decayed."""

    def run(model: Branches, ranks: list[int], attach: bool) -> tuple[Tensor, Tensor]:
        optimizer = sgd(model, 0.2, momentum=0.9, weight_decay=0.3)
        if attach:
            la.attach(model, optimizer, la.ddp())
        for t in range(STEPS):
            optimizer.zero_grad(set_to_none=set_to_none)
            present = [r for r in ranks if r != 1 or t > 1]
            losses = [model.loss(data()[r][t], r == 0 and t % 2 == 1) for r in present]
            if losses:
                (torch.stack(losses).sum() / len(ranks)).backward()
            optimizer.step()
        assert model.unused.weight.grad is None
        return flat(model), flat(model.unused)

    single, _ = run(Branches(0), [*range(WORKERS)], False)
    runs = la.simulate(lambda rank: run(Branches(rank), [rank], True), workers=WORKERS)
    assert equal([x for x, _ in runs]) and close(runs[0][0], single)
    assert torch.equal(runs[0][1], flat(Branches(0).unused))


# -- parameters that come later, or are frozen ----


@pytest.mark.parametrize("recipe", ["ddp", "delayed", "no average", "streaming", "d_psgd", "easgd"])
def test_a_parameter_group_that_is_added_later(recipe: str) -> None:
    """It joins with rank 0's values, and is then part of every round."""

    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = network(rank)
        late = nn.Linear(3, 2).double()
        whole = nn.Sequential(model, late)
        optimizer = sgd(model, momentum=0.9)
        sync = la.attach(whole, optimizer, RECIPES[recipe])
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
    assert equal(runs)
    averaged_last = recipe in ("ddp", "no average")
    assert equal(befores) == averaged_last, "it trains on each worker's own batches"


class Checkpointed(nn.Module):
    """Blocks whose activations are computed anew in the backward pass; ``ends``: whether there are
    trained parameters outside them."""

    def __init__(self, ends: bool, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.enter, self.leave = nn.Linear(5, 7).double(), nn.Linear(7, 3).double()
        self.blocks = nn.ModuleList(nn.Linear(7, 7).double() for _ in range(3))
        for end in (self.enter, self.leave):
            end.requires_grad_(ends)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x).requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant).tanh()
        out: Tensor = self.leave(x)
        return out


@pytest.mark.parametrize(
    ("recipe", "ends"), [(la.ddp(), True), (la.ddp(codec="int8"), False), (la.demo(), False)]
)
def test_reentrant_checkpointing_is_refused_on_all_ranks(recipe: la.Recipe, ends: bool) -> None:
    """It runs backward passes within one, each of which would be averaged on its own."""

    def run(rank: int, reentrant: bool) -> Tensor:
        model = Checkpointed(ends, reentrant)
        optimizer = sgd(model)
        sync = la.attach(model, optimizer, recipe)
        if reentrant:
            with pytest.raises(RuntimeError, match="use_reentrant=False"):
                train(model, optimizer, data()[rank][:3])
            sync.detach()
        else:
            train(model, optimizer, data()[rank][:3])
        return flat(model)

    la.simulate(partial(run, reentrant=True), workers=WORKERS)
    assert equal(la.simulate(partial(run, reentrant=False), workers=WORKERS))


# -- dtypes and scaling ----


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        *((name, torch.bfloat16) for name in ("ddp", "delayed", "streaming", "lsgd")),
        *((name, torch.float16) for name in ("slowmo over sgp", "easgd")),
    ],
)
def test_low_precision_over_twenty_steps(recipe: str, dtype: torch.dtype) -> None:
    """Parameters keep their dtype and train about as in float32: sums and outer state are in it."""

    def run(rank: int, dtype: torch.dtype) -> Tensor:
        model = network(rank, dtype)
        optimizer = sgd(model, 0.02, momentum=0.5)
        with la.attach(model, optimizer, RECIPES[recipe]):
            train(model, optimizer, [x.to(dtype) for x in data(steps=20)[rank]])
        return flat(model)

    low, full = (
        la.simulate(partial(run, dtype=d), workers=WORKERS) for d in (dtype, torch.float32)
    )
    assert equal(low) and low[0].dtype == dtype
    assert torch.allclose(low[0].float(), full[0], atol=0.05)


@pytest.mark.parametrize("recipe", ["ddp", "delayed", "slowmo"])
def test_an_overflow_on_one_rank_skips_its_step_and_keeps_all_in_step(recipe: str) -> None:
    def run(rank: int) -> tuple[Tensor, float]:
        model = network(rank, torch.float32)
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        with la.attach(model, optimizer, RECIPES[recipe], scaler=scaler) as sync:
            for t, x in enumerate(data()[rank], 1):
                optimizer.zero_grad()
                loss = loss_of(model, x.float()) * (float("inf") if (rank, t) == (1, 2) else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                assert sync.step == t
        return flat(model), scaler.get_scale()

    runs = la.simulate(run, workers=WORKERS)
    assert equal([x for x, _ in runs]) and bool(runs[0][0].isfinite().all())
    everywhere = recipe == "ddp"  # the mean of gradients is infinite on all ranks
    assert [scale < 2.0**10 for _, scale in runs] == [everywhere, True, everywhere]


def test_where_all_steps_are_skipped_gossip_keeps_the_mean() -> None:
    def run(rank: int) -> Tensor:
        model = network()
        optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu")
        with la.attach(model, optimizer, la.sgp("bipartite_linear", delay=2), scaler=scaler):
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(rank)
            for x in data(5)[rank]:
                optimizer.zero_grad()
                scaler.scale(loss_of(model, x) * float("inf")).backward()
                scaler.step(optimizer)
                scaler.update()
        return flat(model)

    assert all(close(x, flat(network()) + 2.0) for x in la.simulate(run, workers=5))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.fault("an attached GradScaler could not be pickled, and its copy drove the original")
def test_a_copied_scaler_is_its_own(copied: Any) -> None:
    def run(rank: int) -> tuple[float, float, int, bool]:
        model = network(rank, torch.float32)
        optimizer = sgd(model)
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


@pytest.mark.parametrize("recipe", ["ddp", "local_sgd", "closure"])
def test_identical_first_gradients_warn_once_on_each_worker(recipe: str) -> None:
    def warned(source: list[int]) -> list[str]:
        """The warnings of two steps by workers that read the batches of ``source``."""

        def run(rank: int) -> None:
            model, optimizer, _ = attached(rank, RECIPES.get(recipe, la.local_sgd(3)))
            x = data()[source[rank]][0]
            if recipe == "closure":
                optimizer.step(lambda: loss_of(model, x).backward())
            else:
                train(model, optimizer, [x, x])

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            la.simulate(run, workers=len(source))
        return [str(warning.message) for warning in caught]

    same = warned([0, 0])
    assert len(same) == 2 and all("reading the same batches" in text for text in same)
    assert not any(warned(source) for source in ([0, 1], [0], [0, 0, 1]))
