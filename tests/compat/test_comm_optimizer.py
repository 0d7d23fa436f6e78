"""CommOptimizer: a torch optimizer in all respects, and the algorithms exactly."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.compat.comm_optimizer import KEY

from tests.references import gradients, parameters, problem
from tests.support import training
from tests.support.loops import descend, flat
from tests.support.training import Job, build, changing_lr, largest_difference, same_bits

Parts = tuple[nn.Module, la.CommOptimizer]
Trace = list[Any]

# -- the algorithms: against plain loops, and against attach ----


BY_GRADIENTS = {"score": "gradient", "score_includes_pulls": False}


def lsgd(**score: Any) -> Any:
    recipe = la.lsgd(4, local_period=0, pull=0.4, drift=0.3)
    return ("LSGD", 4, 0.4, 0.3), recipe, parameters.lsgd(4, pull=0.4, drift=0.3, **score)


ROWS: dict[str, tuple[tuple[Any, ...], la.Recipe, problem.Recipe]] = {
    "EASGD": (("EASGD", 3, 0.5, 0.3), la.easgd(3, 0.5, pull=0.3), parameters.easgd(3, 0.5, 0.3)),
    "LSGD, reports": lsgd(),
    "LSGD": lsgd(**BY_GRADIENTS),
    "DDP": (("DDP",), la.ddp(), gradients.DDP()),
}
"""By name, which says how losses are reported: what follows world_size, the recipe, and the
reference."""


def job_of(row: str, workers: int = 3) -> Job:
    return Job(ROWS[row][1], workers, 14, "nesterov", changing_lr, reports="," in row)


def made(row: str, job: Job, rank: int) -> Parts:
    model, inner = build(job, rank)
    name, *numbers = ROWS[row][0]
    return model, la.CommOptimizer(inner, name, job.workers, *numbers)


def sync_of(optimizer: la.CommOptimizer) -> la.Synchronizer:
    assert optimizer.sync is not None
    return optimizer.sync


def train_step(job: Job, rank: int, parts: Parts, t: int) -> Any:
    """One step; returns (parameters, consensus) after it."""
    model, optimizer = parts
    training.step(job, model, optimizer, job.data()[rank][t - 1], t, optimizer)  # type: ignore[arg-type]
    with sync_of(optimizer).consensus(mean=False):
        consensus = training.values(model)
    return training.values(model), consensus


def train(rank: int, row: str, job: Job) -> Trace:
    parts = made(row, job, rank)
    return [train_step(job, rank, parts, t) for t in range(1, job.steps + 1)]


@pytest.mark.parametrize("row", ROWS)
def test_equals_the_plain_loop_and_attach(row: str) -> None:
    """The same bits as attach gives."""
    job = job_of(row)
    runs = la.simulate(partial(train, row=row, job=job), workers=3)
    assert largest_difference(runs, job.expected(ROWS[row][2])) < 1e-10
    assert same_bits(runs, training.simulated(job))


# -- a small problem ----


def small(rank: int) -> tuple[nn.Module, torch.optim.SGD]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def wrapped(rank: int, name: str = "EASGD", workers: int = 2, *more: Any, **options: Any) -> Parts:
    model, inner = small(rank)
    numbers = more or (2, 0.5)
    return model, la.CommOptimizer(inner, name, workers, *numbers, **options)


def loss_of(model: nn.Module, rank: int, t: int) -> Tensor:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * rank + t))
    loss: Tensor = model(x).square().mean()
    return loss


def steps(parts: Parts, rank: int, first: int, last: int) -> Iterator[int]:
    model, optimizer = parts
    for t in range(first, last + 1):
        descend(optimizer, loss_of(model, rank, t))
        yield t


def go(parts: Parts, rank: int, first: int, last: int) -> None:
    for _ in steps(parts, rank, first, last):
        pass


# -- a torch optimizer in all respects ----


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20)


def scheduled(parts: Any, scheduler: Any) -> list[tuple[float, float]]:
    seen = []
    for _ in steps(parts, 0, 1, 10):
        scheduler.step()
        group = parts[1].param_groups[0]
        seen.append((group["lr"], group["momentum"]))
    return seen


def test_schedulers_made_before_and_after() -> None:
    """Warnings are errors here, those about the order of calls included."""

    def run(rank: int) -> None:
        bare, inner = small(0)
        expected = scheduled((bare, inner), one_cycle(inner))
        for before in (True, False):
            model, inner = small(0)
            scheduler = one_cycle(inner) if before else None
            optimizer = la.CommOptimizer(inner, "EASGD", 1, 4 if before else 20, 0.5)
            assert scheduled((model, optimizer), scheduler or one_cycle(optimizer)) == expected
            assert torch.equal(flat(model), flat(bare)) != before, "the round after step 4"

    la.simulate(run, workers=1)


def test_hooks_groups_and_state_are_those_of_one_optimizer() -> None:
    called: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: called.append(name)

    def run(rank: int) -> None:
        model, optimizer = wrapped(0, "EASGD", 1)
        inner = optimizer.optimizer
        assert isinstance(optimizer, torch.optim.Optimizer) and optimizer.local_optimizer is inner
        optimizer.register_step_pre_hook(note("before"))
        optimizer.register_step_post_hook(note("after"))
        optimizer.register_state_dict_pre_hook(note("saving"))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})
        optimizer.register_load_state_dict_pre_hook(
            lambda _, state: called.append(f"loading {state.pop('more')}")
        )
        optimizer.register_load_state_dict_post_hook(note("loaded"))
        inner.register_step_post_hook(note("inner"))
        go((model, optimizer), rank, 1, 2)
        assert called == ["before", "inner", "after"] * 2
        called.clear()
        saved = optimizer.state_dict()
        assert saved["more"] == 1 and len(saved["state"]) == 6
        optimizer.load_state_dict(saved)
        assert called == ["saving", "loading 1", "loaded"] and saved["more"] == 1
        optimizer.param_groups[0]["lr"] = 0.125
        optimizer.param_groups = inner.param_groups[:]
        optimizer.state = copy.copy(inner.state)
        for name in ("param_groups", "state", "defaults"):
            assert getattr(optimizer, name) is getattr(inner, name)
        p = next(model.parameters())
        optimizer.zero_grad(set_to_none=False)
        assert p.grad is not None and not p.grad.any()
        optimizer.zero_grad()
        assert p.grad is None and "lr: 0.125" in repr(optimizer)

    la.simulate(run, workers=1)


def test_groups_added_to_either_join() -> None:
    def run(rank: int) -> Tensor:
        model, _ = small(rank)
        inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        first = nn.Parameter(torch.full((2,), float(rank + 1)))
        second = nn.Parameter(torch.full((3,), float(rank + 5)))
        optimizer = la.CommOptimizer(inner, "EASGD", 2, 2, 1.0, model=model)
        optimizer.add_param_group({"params": [first], "lr": 0.5})
        assert inner.param_groups[1]["lr"] == 0.5 and inner.param_groups[1]["momentum"] == 0.9
        go((model, optimizer), rank, 1, 2)
        inner.add_param_group({"params": second})
        with pytest.raises(ValueError, match="more than one"):
            optimizer.add_param_group(inner.param_groups[2])
        go((model, optimizer), rank, 3, 4)
        assert sync_of(optimizer).stats().rounds == 4, "parameters and buffers, twice"
        return torch.cat([first.detach(), second.detach()])

    for x in la.simulate(run, workers=2):
        assert x.tolist() == [1.0, 1.0, 5.0, 5.0, 5.0], "rank 0's"


@pytest.mark.parametrize("whole", [True, False])
def test_the_model_is_for_its_buffers(whole: bool) -> None:
    """All parameters start from rank 0 and are averaged, also where no model is given. Buffers are
    averaged where it is."""

    def run(rank: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        model, inner = small(rank)
        optimizer = la.CommOptimizer(inner, "EASGD", 2, 2, 0.5, model=model if whole else None)
        start = flat(model).clone()
        go((model, optimizer), rank, 1, 3)
        optimizer.finish()
        return start, flat(model), list(model.buffers())

    (a, x, left), (b, y, right) = la.simulate(run, workers=2)
    assert torch.equal(a, b) and torch.equal(x, y) and not torch.equal(a, x)
    assert all(map(torch.equal, left, right)) == whole


def test_closures() -> None:
    """LBFGS calls its own several times in a step."""

    def run(rank: int) -> None:
        model = small(rank)[0].eval()
        inner = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        lbfgs = la.CommOptimizer(inner, "LSGD", 2, 2, 0.5)

        def closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, rank, 1)
            loss.backward()
            return loss

        losses = [lbfgs.step(partial(closure, model, lbfgs)).item() for _ in range(6)]
        assert sync_of(lbfgs).stats().rounds == 3 and losses[-1] < losses[0] / 2

    la.simulate(run, workers=2)


def test_nothing_needs_no_other_ranks() -> None:
    model, inner = small(0)
    twin, bare = small(0)
    optimizer = la.CommOptimizer(inner, None, world_size=8)
    for t in steps((model, optimizer), 0, 1, 5):
        descend(bare, loss_of(twin, 0, t))
    optimizer.report_loss(1.0)
    optimizer.finish()
    assert torch.equal(flat(model), flat(twin))
    assert optimizer.sync is None and KEY not in optimizer.state_dict()
    optimizer.load_state_dict(bare.state_dict())
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            attempt(optimizer)


# -- GradScaler ----


@pytest.mark.parametrize("clips", [False, True])
def test_a_scaler_does_what_it_does_without_the_wrapper(clips: bool) -> None:
    """A scale whose inverse is rounded, and two overflows, which count as steps."""

    def run(wrap: bool) -> tuple[Tensor, float]:
        model = small(0)[0]
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=3.0, growth_interval=3, growth_factor=1.7)
        if wrap:
            optimizer = la.CommOptimizer(optimizer, "DDP", 1, scaler=scaler)
        for t in range(1, 12):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, 0, t) * (math.inf if t in (2, 7) else 1.0)).backward()
            if clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
        assert not wrap or optimizer.sync.step == 11
        return flat(model), scaler.get_scale()

    bare, scaled = run(False), la.simulate(lambda rank: run(True), workers=1)[0]
    assert torch.equal(bare[0], scaled[0]) and bare[1] == scaled[1] != 3.0


def test_a_scaler_that_nobody_passed_is_named_where_ranks_disagree() -> None:
    def run(rank: int) -> None:
        model, optimizer = wrapped(0, "EASGD", 2, 2, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for t in range(1, 7):
            optimizer.zero_grad()
            overflows = rank == 1 and t == 3
            scaler.scale(loss_of(model, rank, t) * (math.inf if overflows else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.finish()

    with pytest.raises(la.LinkError, match="a GradScaler that skips steps is passed as scaler="):
        la.simulate(run, workers=2)


# -- saving and loading ----


def test_states_that_do_not_fit_are_refused_on_all_ranks() -> None:
    """Where one rank alone has communication state; and of other parameters."""

    def run(rank: int) -> str:
        model, optimizer = parts = wrapped(0, "EASGD", 2, 4, 0.5)
        go(parts, rank, 1, 2)
        state = optimizer.state_dict()
        with pytest.raises(ValueError, match="this state has no communication state"):
            optimizer.load_state_dict({k: v for k, v in state.items() if rank == 0 or k != KEY})
        next(model.parameters()).data.add_(1.0)
        with pytest.raises(ValueError, match="differ from those saved with this state") as caught:
            optimizer.load_state_dict(state)
        return str(caught.value)

    assert len({*la.simulate(run, workers=2)}) == 1


# -- what is refused ----

GOOD: dict[str, Any] = {"dist_optim_name": "EASGD", "world_size": 2, "comm_period": 4}
GOOD["dist_pulling_strength"] = 0.5
BAD: list[tuple[dict[str, Any], str]] = [
    ({"dist_optim_name": "ADAM"}, r"must be one of 'EASGD', 'LSGD', 'DDP', not 'ADAM'"),
    ({"dist_pulling_strength": 0.0}, "dist_pulling_strength must be .* greater than 0"),
    ({"dist_optim_name": "LSGD", "dist_pulling_strength": 1.0}, "must be .* below 1"),
    ({"world_size": 3}, "world_size must be the number of ranks, 2, not 3"),
]
UNLIKE: list[tuple[dict[str, Any], str]] = [
    ({"dist_optim_name": "LSGD"}, "attach something other"),
    ({"local_pulling_strength": 0.1}, "attach something other"),
]
"""On rank 1."""


def test_bad_arguments_are_refused_on_every_rank() -> None:
    def run(rank: int) -> list[str]:
        texts = []
        for table, here in ((BAD, True), (UNLIKE, rank == 1)):
            for changed, pattern in table:
                given = {"optimizer": small(0)[1], **GOOD, **(changed if here else {})}
                with pytest.raises(ValueError, match=pattern) as caught:
                    la.CommOptimizer(**given)
                texts.append(str(caught.value))
        return texts[len(BAD) :]

    one, other = la.simulate(run, workers=2)
    assert one == other


@pytest.mark.filterwarnings("ignore:there is one node only")
def test_one_optimizer_is_followed_once() -> None:
    def run(rank: int) -> None:
        model, optimizer = wrapped(0, "EASGD", 1)
        wrapper = la.SlowMoDistributedDataParallel(model, 1)
        attempts: list[Callable[[], object]] = [
            lambda: la.CommOptimizer(optimizer.optimizer, "EASGD", 1, 4, 0.5),
            lambda: la.attach(model, optimizer.optimizer, la.easgd(4)),
            lambda: la.attach(model, optimizer, la.easgd(4)),
            lambda: wrapper.bind(optimizer),
        ]
        for attempt in attempts:
            with pytest.raises(ValueError, match="attached already"):
                attempt()
        meta = torch.optim.SGD(nn.Linear(2, 2, device="meta").parameters())
        for given, message in ((optimizer, "not a CommOptimizer"), (meta, "meta")):
            with pytest.raises(ValueError, match=message):
                la.CommOptimizer(given, "EASGD", 1, 4, 0.5)

    la.simulate(run, workers=1)


def test_it_follows_the_inner_optimizer_until_it_is_detached() -> None:
    def run(rank: int) -> tuple[Tensor, Tensor]:
        model, optimizer = parts = wrapped(rank, "DDP")
        sync = sync_of(optimizer)
        go((model, optimizer.optimizer), rank, 1, 3)  # type: ignore[arg-type]
        alike, before = flat(model).clone(), sync.stats().bytes_sent
        assert before > 0
        sync.detach()
        go(parts, rank, 4, 8)
        assert sync.stats().bytes_sent == before
        return alike, flat(model)

    with pytest.warns(UserWarning, match="no effect with dist_optim_name='DDP'"):
        (a, x), (b, y) = la.simulate(run, workers=2)
    assert torch.equal(a, b) and not torch.equal(x, y)
