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
    descend,
    equal,
    flat,
    joined,
    loss_of,
    network,
    refusal,
    sgd,
    train,
)

# -- one process on the global batch ----


def test_ddp_with_groups_a_scheduler_and_clipping_is_one_process_on_the_global_batch() -> None:
    def run(rank: int, batches: list[Tensor], attach: bool) -> tuple[Tensor, list[float]]:
        model = network(rank)
        groups = [
            {"params": model[0].parameters(), "lr": 0.2},
            {"params": model[2].parameters(), "lr": 0.05, "weight_decay": 0.1},
        ]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
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


@pytest.mark.parametrize("quiet", [1, 2])
@pytest.mark.fault("a step under no_sync() averaged no gradients, and workers drifted apart")
def test_accumulation_is_one_large_batch(quiet: int) -> None:
    """Two backward passes a step, of which so many are under ``no_sync()``, and send nothing; and
    now and then none is. The step may be, too."""
    batches = data(steps=2 * STEPS)

    def run(rank: int) -> tuple[Tensor, int]:
        model, optimizer, sync = attached(rank, la.ddp())
        trace, unsent = [], 0
        for step in range(0, 2 * STEPS, 2):
            optimizer.zero_grad()
            for part in range(2):
                sent = sync.stats().bytes_sent
                silent = part < quiet and step % 8 < 6
                with sync.no_sync() if silent else contextlib.nullcontext():
                    with sync.no_sync():  # within another one
                        pass
                    (loss_of(model, batches[rank][step + part]) / 2).backward()
                unsent += (sync.stats().bytes_sent - sent) * silent
            with sync.no_sync() if quiet == 2 else contextlib.nullcontext():
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
        trained = flat(model)
        if attach:
            within: Any = partial(closure, batches[0])
            sync = la.attach(model, optimizer, la.ddp())
            with pytest.raises(ValueError, match="outside"), sync.no_sync():
                optimizer.step(within)
            with pytest.raises(ValueError, match="outside"):
                optimizer.step(sync.no_sync()(within))
        return trained

    single = run(0, joined(data()), False)
    runs = la.simulate(lambda rank: run(rank, data()[rank], True), workers=WORKERS)
    assert equal(runs) and close(runs[0], single, 1e-10)


# -- parameters without a gradient ----


def branches(seed: int) -> nn.ModuleDict:
    """Two branches and a rest that is never used."""
    torch.manual_seed(seed)
    sizes = {"common": (5, 3), "left": (3, 2), "right": (3, 2), "unused": (3, 2)}
    return nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()}).double()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_that_some_ranks_lack_counts_as_zero_there(set_to_none: bool) -> None:
    """Rank 0 takes the right branch at odd steps; rank 1 has no batch in two steps. What no rank
    uses is not even decayed."""

    def loss(model: nn.ModuleDict, rank: int, t: int) -> Tensor:
        branch = model["right" if rank == 0 and t % 2 == 1 else "left"]
        return loss_of(branch, model["common"](data()[rank][t]))

    def run(model: nn.ModuleDict, ranks: list[int], attach: bool) -> tuple[Tensor, Tensor]:
        optimizer = sgd(model, 0.2, momentum=0.9, weight_decay=0.3)
        if attach:
            la.attach(model, optimizer, la.ddp())
        for t in range(STEPS):
            optimizer.zero_grad(set_to_none=set_to_none)
            losses = [loss(model, r, t) for r in ranks if r != 1 or t > 1]
            if losses:
                (torch.stack(losses).sum() / len(ranks)).backward()
            optimizer.step()
        assert model["unused"].weight.grad is None
        return flat(model), flat(model["unused"])

    single, _ = run(branches(0), [*range(WORKERS)], False)
    runs = la.simulate(lambda rank: run(branches(rank), [rank], True), workers=WORKERS)
    assert equal([x for x, _ in runs]) and close(runs[0][0], single)
    assert torch.equal(runs[0][1], flat(branches(0)["unused"]))


# -- parameters that come later, or are frozen ----


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("recipe", ["ddp", "delayed", "streaming", "sgp"])
def test_a_group_that_is_added_or_thawed_later(recipe: str, added: bool) -> None:
    """It joins with rank 0's values, and is then part of every round."""

    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = network(rank)
        late = nn.Linear(3, 2).double().requires_grad_(added)
        whole = nn.Sequential(model, late)
        optimizer = sgd(model if added else whole, momentum=0.9)
        sync = la.attach(whole, optimizer, RECIPES[recipe])
        for t, x in enumerate(data(steps=14)[rank]):
            if t == 3:
                torch.manual_seed(rank)
                late.reset_parameters()
                late.requires_grad_()
                if added:
                    optimizer.add_param_group({"params": late.parameters(), "lr": 0.05})
            descend(optimizer, loss_of(model if t < 3 else whole, x))
        before = flat(late)
        sync.finish()
        return before, flat(whole)

    befores, runs = zip(*la.simulate(run, workers=WORKERS), strict=True)
    assert equal(runs)
    assert equal(befores) == (recipe == "ddp"), "it trains on each worker's own batches"


@pytest.mark.parametrize(("recipe", "ends"), [(la.ddp(), True), (la.ddp(codec="int8"), False)])
def test_reentrant_checkpointing_is_refused_on_all_ranks(recipe: la.Recipe, ends: bool) -> None:
    """It runs backward passes within one, each of which would be averaged on its own. ``ends``:
    whether there are trained parameters outside the blocks."""

    def run(rank: int) -> None:
        enter, *blocks, leave = (nn.Linear(5, 5).double() for _ in range(5))
        model = nn.ModuleList([enter, *blocks, leave])
        for end in (enter, leave):
            end.requires_grad_(ends)

        def backward(x: Tensor, reentrant: bool) -> None:
            x = enter(x).requires_grad_()
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=reentrant).tanh()
            leave(x).square().mean().backward()

        optimizer = sgd(model)
        la.attach(model, optimizer, recipe)
        backward(data()[rank][0], False)
        optimizer.step()
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            for x in data()[rank][1:3]:
                backward(x, True)
                optimizer.step()

    la.simulate(run, workers=WORKERS)


# -- dtypes and scaling ----


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [("ddp", torch.bfloat16), ("streaming", torch.bfloat16), ("slowmo over sgp", torch.float16)],
)
def test_low_precision_over_twenty_steps(recipe: str, dtype: torch.dtype) -> None:
    """Parameters keep their dtype and train about as in float32: sums and outer state are in it."""

    def run(rank: int, dtype: torch.dtype) -> Tensor:
        model = network(rank, dtype)
        optimizer = sgd(model, 0.02, momentum=0.5)
        with la.attach(model, optimizer, RECIPES[recipe]):
            train(model, optimizer, [x.to(dtype) for x in data(steps=20)[rank]])
        return flat(model)

    low, full = (la.simulate(partial(run, dtype=d), WORKERS) for d in (dtype, torch.float32))
    assert equal(low) and low[0].dtype == dtype
    assert torch.allclose(low[0].float(), full[0], atol=0.05)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.fault("an attached GradScaler could not be pickled, and its copy drove the original")
def test_a_copied_scaler_is_its_own(copied: Any) -> None:
    def step(scaler: Any, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    def run(rank: int) -> None:
        model, other = network(rank, torch.float32), network(rank, torch.float32)
        optimizer, elsewhere = sgd(model), sgd(other)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        sync = la.attach(model, optimizer, la.local_sgd(2), scaler=scaler)
        scaler.scale(torch.zeros(()))  # makes its state
        twin = copied(scaler)
        x = data()[rank][0].float()
        step(twin, elsewhere, loss_of(other, x) * float("inf"))
        step(scaler, optimizer, loss_of(model, x))
        assert (scaler.get_scale(), twin.get_scale(), sync.step) == (4.0, 2.0, 1)
        assert type(twin) is torch.amp.GradScaler

    la.simulate(run, workers=2)


# -- are the workers reading the same batches? ----


@pytest.mark.parametrize("recipe", ["ddp", "closure"])
def test_identical_first_gradients_warn_once_on_each_worker(recipe: str) -> None:
    def run(rank: int, source: list[int]) -> None:
        """Two steps of a worker that reads the batches of ``source``."""
        model, optimizer, _ = attached(rank, RECIPES.get(recipe, la.local_sgd(3)))
        x = data()[source[rank]][0]
        if recipe == "closure":
            optimizer.step(lambda: loss_of(model, x).backward())
        else:
            train(model, optimizer, [x, x])

    for source in ([0, 0], [0, 1], [0], [0, 0, 1]):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            la.simulate(partial(run, source=source), workers=len(source))
        found = ["reading the same batches" in str(warning.message) for warning in caught]
        assert found == ([True, True] if source == [0, 0] else []), source


# -- another recipe ----


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (la.ddp(), la.local_sgd(3, delay=2)),
        (la.ddp(codec="int4"), la.diloco(4, momentum=0.5)),
        (la.local_sgd(3, delay=2), la.sgp()),
        (la.diloco(4, momentum=0.5), la.ddp()),
        (la.sgp(), la.ddp(codec="int4")),
    ],
)
def test_switching_starts_all_workers_from_the_consensus(first: la.Recipe, then: la.Recipe) -> None:
    """Alike in x and in the optimizer's state; and what the recipe before would have ended with."""

    def run(rank: int, switch: bool) -> tuple[Tensor, ...]:
        model, optimizer, sync = attached(rank, first)
        train(model, optimizer, data()[rank][:5])
        if not switch:
            sync.finish()
            return (flat(model),)
        sync.switch(repr(then))
        x = flat(model)
        moments = torch.cat([s["momentum_buffer"].ravel() for s in optimizer.state.values()])
        train(model, optimizer, data(steps=11)[rank][5:])
        sync.finish()
        assert sync.recipe == then and sync.step == 11
        return x, moments, flat(model)

    finished, runs = (la.simulate(partial(run, switch=s), workers=2) for s in (False, True))
    assert all(equal(found) for found in zip(*runs, strict=True))
    assert torch.equal(runs[0][0], finished[0][0])


@pytest.mark.parametrize("first", [la.auto(), la.diloco(2, codec="int4")])
@pytest.mark.fault("a switch after detach() put hooks on the parameters again")
def test_a_refused_switch_leaves_the_rounds_at_work(first: Any) -> None:
    """All start from the consensus, whatever one rank does wrong, and nothing is owed twice."""

    def run(rank: int) -> Tensor:
        model, optimizer, sync = attached(rank, first)
        now = sync.recipe
        train(model, optimizer, data()[rank][:3])
        said = refusal(lambda: sync.switch(la.diloco(4, lr=0.5 + 0.1 * rank)))
        assert "attach something other than rank 0" in said
        consensus = torch.cat([v.reshape(-1) for v in sync.consensus_state_dict().values()])
        assert first == la.auto() or torch.equal(flat(model), consensus)
        assert "group_size" in refusal(lambda: sync.switch(la.hierarchical(1, 2)))
        assert sync.recipe == now
        train(model, optimizer, data()[rank][3:6])
        sync.finish()
        sync.detach()
        assert "after sync.detach()" in refusal(lambda: sync.switch(la.ddp()))
        return flat(model)

    assert equal(la.simulate(run, workers=2))


@pytest.mark.parametrize("when", [2, 5])
def test_a_switch_aligns_what_overflows_and_missing_gradients_left_apart(when: int) -> None:
    """AdamW's steps, the scale, and moments of a parameter that one rank did not use: or gradients
    that are alike would move the workers differently, unseen. The switch comes before the scaler's
    update. After it, what overflows on one rank is skipped by all."""

    def run(rank: int) -> tuple[Tensor, float, list[float]]:
        model = network(dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
        sync = la.attach(model, optimizer, la.local_sgd(2), scaler=scaler)
        for t, x in enumerate(data(steps=14)[rank], 1):
            optimizer.zero_grad()
            first: Any = model[0]
            bias = first.bias if rank > 0 or t >= 6 else None
            hidden = nn.functional.linear(x.float(), first.weight, bias).tanh()
            loss = model[2](hidden).square().mean()
            loss = loss * (float("inf") if (rank, t) in ((1, when), (1, 9)) else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            if t == 5:
                sync.switch(la.ddp())
            scaler.update()
            assert sync.step == t
        counts = [float(s["step"]) for s in optimizer.state.values()]
        return flat(model), scaler.get_scale(), counts

    one, *others = la.simulate(run, workers=3)
    assert all(torch.equal(x, one[0]) and (*rest,) == one[1:] for x, *rest in others)
    assert bool(one[0].isfinite().all())
