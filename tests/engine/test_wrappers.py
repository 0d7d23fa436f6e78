"""torch's data-parallel wrappers are refused, on every rank alike: they average beside laconic."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic as la
from laconic.engine import batch_check
from laconic.engine.model_checks import IDLE_DDP, NO_DDP, USED_DDP

from tests.support import gloo

RANKS = 2
Wrap = Callable[[nn.Module], nn.Module]


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


class Own(DistributedDataParallel):
    """A wrapper of somebody's, as trainers have."""


def in_ddp(module: nn.Module) -> DistributedDataParallel:
    return Own(module, process_group=gloo._groups[RANKS])


def in_fsdp1(module: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    cpu = torch.device("cpu")
    group = gloo._groups[RANKS]
    return FullyShardedDataParallel(
        module, process_group=group, device_id=cpu, use_orig_params=True
    )


def within(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), in_ddp(module))


def told(attach: Callable[[], Any]) -> str:
    try:
        attach()
    except ValueError as error:
        return str(error)
    return "nothing"


def attached(rank: int, kind: str, only: int | None) -> str:
    wraps: dict[str, Wrap] = {
        "ddp": in_ddp,
        "data_parallel": nn.DataParallel,
        "fsdp1": in_fsdp1,
        "within": within,
    }
    model = plain()
    if only is None or rank == only:
        model = wraps[kind](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return told(lambda: la.attach(model, optimizer, la.local_sgd(2), link=gloo.link_of(RANKS)))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("ddp", "the model is wrapped in DistributedDataParallel"),
        ("data_parallel", "the model is wrapped in nn.DataParallel"),
        ("fsdp1", "the model is wrapped in FullyShardedDataParallel (FSDP1)"),
        ("within", "the model's '1' is wrapped in DistributedDataParallel"),
    ],
)
def test_a_wrapped_model_is_refused(pool: gloo.Pool, kind: str, words: str) -> None:
    said = pool.run(attached, kind, None, ranks=RANKS)
    assert len(set(said)) == 1 and words in said[0], said
    assert "fully_shard" in said[0] if kind == "fsdp1" else "model.module" in said[0]
    assert "\n" not in said[0]


def test_what_is_wrapped_on_one_rank_is_refused_on_all(pool: gloo.Pool) -> None:
    said = pool.run(attached, "data_parallel", 1, ranks=RANKS)
    assert said[0] == f"rank 1: {said[1]}"
    assert "wrapped in nn.DataParallel" in said[1]


def dropped_in(kind: str) -> str:
    model = nn.DataParallel(plain())
    if kind == "slowmo":
        return told(lambda: la.SlowMoDistributedDataParallel(model, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return told(lambda: la.CommOptimizer(optimizer, "EASGD", 2, 2, 0.5, model=model))


@pytest.mark.parametrize("kind", ["slowmo", "comm_optimizer"])
def test_drop_ins_refuse_a_wrapped_model(kind: str) -> None:
    said = la.simulate(lambda _: dropped_in(kind), workers=2)
    assert len(set(said)) == 1 and "the model is wrapped in nn.DataParallel" in said[0], said


# -- training through a wrapper that laconic was not given ----


def beside(
    rank: int, recipe: la.Recipe, use: str, same: bool, bare: bool
) -> tuple[str, list[str], list[list[float]]]:
    """What is raised in two steps, warned of, and each rank's parameters in the end. ``bare``: with
    a plain loop over the module, whatever DDP there is."""
    module = plain()
    wrapper = None if use == "after" else in_ddp(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    link = gloo.link_of(RANKS)
    if use in ("dropped", "used before") and wrapper is not None:
        wrapper(torch.ones(1, 3)).sum().backward()
        optimizer.zero_grad()
    sync = la.attach(module, optimizer, recipe, link=link)
    if use == "dropped" and wrapper is not None:
        wrapper.itself = wrapper  # in a cycle
        wrapper = None
    wrapper = in_ddp(module) if use == "after" else wrapper
    run = module if bare or wrapper is None else wrapper
    generator = torch.Generator().manual_seed(0 if same else rank)
    said = "nothing"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for _ in range(2):
                apart = use == "no_sync" and isinstance(run, DistributedDataParallel)
                with run.no_sync() if apart else nullcontext():
                    run(torch.randn(4, 3, generator=generator)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        except ValueError as error:
            said = str(error)
        finally:
            sync.detach()
    heard = [str(w.message) for w in caught if "identical" in str(w.message)]
    del wrapper, run
    return said, heard, [p.flatten().tolist() for p in module.parameters()]


@pytest.mark.parametrize(
    ("recipe", "use"),
    [
        (la.local_sgd(4), "before"),
        (la.local_sgd(4), "after"),
        (la.local_sgd(4), "used before"),
        (la.ddp(), "before"),
        (la.ddp(), "after"),
        (la.ddp(codec="int8"), "before"),
    ],
)
def test_training_through_ddp_is_found_at_the_first_step(
    pool: gloo.Pool, recipe: la.Recipe, use: str
) -> None:
    runs = pool.run(beside, recipe, use, False, False, ranks=RANKS)
    said = {run[0] for run in runs}
    assert len(said) == 1 and "trained through a DistributedDataParallel" in said.pop()
    assert not any(run[1] for run in runs)  # no word of identical batches


@pytest.mark.parametrize("recipe", [la.local_sgd(4), la.ddp()])
@pytest.mark.parametrize(
    ("use", "bare"),
    [("before", True), ("used before", True), ("no_sync", False), ("dropped", True)],
)
def test_a_wrapper_that_averages_nothing_is_none_of_laconics_business(
    pool: gloo.Pool, recipe: la.Recipe, use: str, bare: bool
) -> None:
    """One that is there and not used, or not any more, one whose passes are all under
    ``no_sync()``, and one that was used and is gone."""
    runs = pool.run(beside, recipe, use, False, bare, ranks=RANKS)
    assert [run[:2] for run in runs] == [("nothing", [])] * RANKS
    alike = runs[0][2] == runs[1][2]
    assert alike == (recipe == la.ddp())


def test_identical_batches_are_still_warned_of(pool: gloo.Pool) -> None:
    runs = pool.run(beside, la.local_sgd(4), "dropped", True, True, ranks=RANKS)
    assert all(said == "nothing" and len(heard) == 1 for said, heard, _ in runs)


@pytest.mark.parametrize("ddp", [(IDLE_DDP, IDLE_DDP), (NO_DDP, IDLE_DDP)])
def test_identical_gradients_beside_a_wrapper_are_its_work(ddp: tuple[float, float]) -> None:
    """Also where it does not tell that it was used, as under torch.compile."""
    with pytest.raises(ValueError, match="trained through a DistributedDataParallel"):
        batch_check.check_first_gradients([[1.0, 2.0, ddp[0]], [1.0, 2.0, ddp[1]]])
    batch_check.check_first_gradients([[1.0, 2.0, ddp[0]], [1.0, 3.0, ddp[1]]])
    batch_check.check_first_gradients([[0.0, 0.0, ddp[0]], [0.0, 0.0, ddp[1]]])
    batch_check.check_first_gradients([[1.0, 2.0, USED_DDP]])  # one process has nothing to average


def slow_momentum(rank: int) -> str:
    module = plain()
    front = la.SlowMoDistributedDataParallel(module, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    wrapper = DistributedDataParallel(module, process_group=dist.group.WORLD)
    wrapper(torch.full((2, 3), 1.0 + rank)).square().mean().backward()
    optimizer.step()
    try:
        return told(lambda: front.perform_slowmo(optimizer))
    finally:
        front.detach()


def test_a_drop_in_finds_it_too(pool: gloo.Pool) -> None:
    said = pool.run(slow_momentum, ranks=4)
    assert len(set(said)) == 1 and "trained through a DistributedDataParallel" in said[0], said
