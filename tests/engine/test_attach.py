"""What `laconic.attach` refuses, by name and alike on every rank, and what it warns of."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic as la

from tests.engine.test_tensors import Scaled
from tests.support import gloo
from tests.support.loops import attached, data, refusal, sgd, train

# -- arguments ----

CALLS = [
    *((f"local_sgd({p})", f"period must be an integer of at least 1, not {p}") for p in (0, 2.0)),
    ("easgd(True)", "period must be"),
    ("sgp('circle')", "graph must be one of 'exponential', .*'ring'.*'circle'"),
    ("easgd(4, 0.0)", "beta must be .* greater than 0 and at most 1, not 0.0"),
    ("local_sgd(2, optimizer_state='drop')", "'keep', 'average', 'reset'"),
    ("slowmo(la.local_sgd)", r"base must be .*local_sgd\(12\)"),
    ("Round(la.every(1), la.updates.Average(), la.exchanges.Mean(), over='all')", "'workers'"),
    ("simulate(print, workers=0)", "workers must be an integer of at least 1"),
]
GROUPS = la.lsgd(4, local_period=1)
OPTIONS: list[tuple[dict[str, Any], str]] = [
    *(({"recipe": r}, r"as laconic\.local_sgd\(12\)") for r in (la.local_sgd, la.ddp()[0], None)),
    ({"recipe": "locl_sgd(4)"}, "did you mean 'local_sgd'"),
    ({"recipe": GROUPS}, r"attach\(\.\.\., group_size=4\)"),
    ({"recipe": GROUPS, "group_size": 3}, "3 does not divide 4"),
    ({"seed": -1}, "seed must be"),
    ({"buffers": "mean"}, "'average', 'keep', 'broadcast', not 'mean'"),
    ({"nprocs_per_node": 3}, "divide .* 4 ranks"),
    ({"timeout": 0}, "timeout must be .* greater than 0"),
    ({"scaler": True}, "scaler must be .*GradScaler"),
    ({"recipe": la.slowmo(None, 2, quorum=1), "buffers": "broadcast"}, "rounds have a quorum"),
    ({"buffers": "broadcast", "elastic": la.Elastic()}, "'broadcast' .*workers come and go"),
]


def test_a_bad_option_is_refused_alike_on_every_rank() -> None:
    """It is a ValueError that names what is allowed. What was refused can be done right
    afterward."""
    for call, text in CALLS:
        with pytest.raises(ValueError, match=text):
            eval(f"la.{call}")

    def run(rank: int) -> list[str]:
        model = nn.Linear(5, 3).double()
        optimizer, found = sgd(model), []
        for options, text in OPTIONS:
            with pytest.raises(ValueError, match=text) as caught:
                la.attach(model, optimizer, **{"recipe": la.local_sgd(2), **options})
            found.append(str(caught.value))
        sync = la.attach(model, optimizer, la.local_sgd(2))
        train(model, optimizer, data()[rank % 3][:1])
        assert sync.step == 1
        return found

    first, *others = la.simulate(run, workers=4)
    assert all(found == first for found in others)


@pytest.mark.fault("attach(..., elastic=, link='nccl') and LACONIC_COORDINATOR ignored options")
@pytest.mark.parametrize(
    ("option", "by_environment"),
    [({"link": "nccl"}, False), ({"link": "tcp"}, True), ({"group_size": 2}, True)],
)
def test_what_an_elastic_run_cannot_follow_is_refused(
    option: dict[str, Any], by_environment: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_environment:
        monkeypatch.setenv("LACONIC_COORDINATOR", "127.0.0.1:1")
    else:
        option = {**option, "elastic": la.Elastic("127.0.0.1:1", wait=0.1)}
    model = nn.Linear(2, 2)
    recipe = la.hierarchical(2, 4) if "group_size" in option else la.local_sgd(4)
    with pytest.raises(ValueError, match="cannot be used with elastic="):
        la.attach(model, sgd(model), recipe, timeout=0.1, **option)


# -- ranks that are not alike ----

UNLIKE: dict[str, Callable[[int], dict[str, Any]]] = {
    "momentum": lambda rank: {"recipe": la.slowmo(None, 4, 0.5 + 0.1 * (rank == 1))},
    "seed": lambda rank: {"recipe": la.sgp("random"), "seed": rank},
    "shapes": lambda rank: {"width": 3 + (rank == 1)},
    "frozen": lambda rank: {"frozen": rank == 1},
    "nprocs_per_node": lambda rank: {"nprocs_per_node": 1 + (rank == 1)},
    "group_size": lambda rank: {"recipe": la.hierarchical(1, 2), "group_size": 1 + (rank == 1)},
}
WRONG_ON_ONE: dict[str, tuple[dict[str, Any], str]] = {
    "recipe": ({"recipe": 4}, "recipe must be what a recipe function returns"),
    "timeout": ({"timeout": 0.0}, "timeout must be"),
    "no parameter": ({"other": True}, "has no parameter of the model"),
    "mesh": ({"mesh": 3}, "AttributeError"),
    "devices": ({"device": "meta"}, "on several devices: cpu (0.weight), meta (1.weight)"),
}
"""What rank 1 alone passes, and what it is told; the others wait for nobody."""


def attach(rank: int, what: str) -> tuple[str, int]:
    """What it is told, and how many process groups are left."""
    given: dict[str, Any] = {"recipe": la.local_sgd(2), "timeout": 60.0}
    given |= UNLIKE[what](rank) if what in UNLIKE else WRONG_ON_ONE[what][0] if rank == 1 else {}
    last = nn.Linear(given.pop("width", 3), 2, device=given.pop("device", "cpu"))
    model = nn.Sequential(nn.Linear(4, last.in_features), last.requires_grad_(False))
    model[0].bias.requires_grad_(not given.pop("frozen", False))
    held = nn.Linear(4, 3) if given.pop("other", False) else model[0]
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    said = refusal(lambda: la.attach(model, sgd(held), **given))
    return said, len(groups) - before


def test_ranks_that_attach_unlike_things_are_told_so_on_every_rank(pool: gloo.Pool) -> None:
    """In threads, and in processes, where no process group is left."""
    for what in UNLIKE:
        for text, _ in la.simulate(partial(attach, what=what), workers=2):
            assert "must be the same" in text, what
            assert "[1]" in text or what in ("nprocs_per_node", "group_size")
    runs = [(what, la.simulate(partial(attach, what=what), 3)) for what in WRONG_ON_ONE]
    for what, found in [*runs, ("timeout", pool.run(attach, "timeout", ranks=4))]:
        (first, _), (second, _), *_ = found
        assert WRONG_ON_ONE[what][1] in second
        assert [text for text, _ in found].count(f"rank 1: {second}") == len(found) - 1, first
        assert [left for _, left in found] == [0] * len(found)
    for text, _ in pool.run(attach, "shapes", ranks=4):
        assert "must be the same" in text and "ranks [1]" in text


# -- optimizers and tensors ----


class Wrapper(torch.optim.Optimizer):
    """Wraps an optimizer without torch's __init__, as Accelerate's does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    param_groups: Any = property(lambda self: self.inner.param_groups)


def wrapped(model: nn.Module) -> None:
    la.attach(model, Wrapper(sgd(model)), la.local_sgd(2))


def in_backward(model: nn.Module) -> None:
    own = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}
    la.attach(model, list(own.values()), la.ddp())
    for p in own:
        p.register_post_accumulate_grad_hook(lambda p: own[p].step())
    model(torch.ones(1, 3)).sum().backward()


def coded_state(model: nn.Module) -> None:
    optimizer = sgd(model)
    la.attach(model, optimizer, la.local_sgd(1, optimizer_state="average"))
    for p in model.parameters():
        optimizer.state[p]["exp_avg"] = Scaled(
            torch.zeros(p.shape, dtype=torch.int8), torch.ones(())
        )
    optimizer.step()


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (wrapped, "Wrapper has no hooks of torch's Optimizer"),
        (in_backward, r"step\(\) was called inside the backward pass"),
        (coded_state, "keeps 'exp_avg' in tensors of Scaled"),
    ],
)
@pytest.mark.fault("errors for wrapped, fused-in-backward and 8-bit optimizers named other causes")
def test_unusual_optimizers_are_refused_by_name(mistake: Any, said: str) -> None:
    def run(rank: int) -> None:
        torch.manual_seed(rank)
        with pytest.raises(ValueError, match=said):
            mistake(nn.Linear(3, 2))

    la.simulate(run, workers=2)


class Counting(torch.optim.SGD):
    """Its number of steps is no tensor."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        (p,) = self.param_groups[0]["params"]
        self.state[p]["seen"] = self.state[p].get("seen", 0) + 1


def test_an_outer_optimizer_that_keeps_numbers_is_refused() -> None:
    """They would begin anew in every round."""

    def run(rank: int) -> str:
        model, optimizer, _ = attached(rank, la.diloco(2, outer=lambda x: Counting(x, lr=0.5)))
        return refusal(lambda: train(model, optimizer, data()[rank][:2]))

    (said,) = set(la.simulate(run, workers=3))
    assert re.search(r"outer= stores \[.*'seen'.*\] as Python numbers", said), said


@pytest.mark.fault("complex parameters under sgp() and demo() failed in the middle of a step")
def test_complex_parameters_are_trained_or_refused() -> None:
    def run(rank: int) -> Tensor:
        p = nn.Parameter(torch.arange(5).to(torch.complex64))
        optimizer, model = torch.optim.SGD([p], 0.1), nn.ParameterList([p])
        said = refusal(lambda: la.attach(model, optimizer, la.demo()))
        assert "not torch.complex64: choose a recipe" in said
        with la.attach(model, optimizer, la.sgp(delay=2)):
            for _ in range(4):
                p.grad = torch.full_like(p, rank - 1j)
                optimizer.step()
        return p.detach()

    expected = torch.arange(5).to(torch.complex64) - 0.4 * (1 - 1j)
    assert all(torch.allclose(x, expected) for x in la.simulate(run, workers=3))


# -- torch's own data-parallel wrappers ----


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


class Own(DistributedDataParallel):
    """A wrapper of somebody's, as trainers have."""


def in_fsdp1(module: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


WRAPS: list[tuple[Callable[[nn.Module], nn.Module], str, str]] = [
    (nn.DataParallel, "the model is wrapped in nn.DataParallel", "model.module"),
    (in_fsdp1, "the model is wrapped in FullyShardedDataParallel (FSDP1)", "fully_shard"),
    (lambda m: nn.Sequential(nn.Linear(3, 3), Own(m)), "'1' is wrapped in D", "model.module"),
]


def attach_wrapped(rank: int) -> list[str]:
    models = [wrap(plain()) for wrap, *_ in WRAPS]
    return [refusal(partial(la.attach, m, sgd(m), "local_sgd(2)", timeout=60)) for m in models]


def test_a_wrapped_model_is_refused(pool: gloo.Pool) -> None:
    first, *others = pool.run(attach_wrapped, ranks=4)
    assert all(said == first for said in others)
    for said, (_, *words) in zip(first, WRAPS, strict=True):
        assert all(word in said for word in words) and "\n" not in said


def beside(rank: int, through: bool) -> str:
    """The warnings of two steps, where a wrapper averages gradients, or did before."""
    module = plain()
    wrapper = Own(module)
    wrapper(torch.ones(1, 3)).sum().backward()
    optimizer = sgd(module)
    run, draw = wrapper if through else module, torch.Generator().manual_seed(rank)
    sync = la.attach(module, optimizer, "local_sgd(4)", timeout=60)
    with sync, warnings.catch_warnings(record=True) as said:
        for _ in range(2):
            optimizer.zero_grad()
            run(torch.randn(4, 3, generator=draw)).square().mean().backward()
            optimizer.step()
    return " ".join(str(each.message) for each in said)


def test_training_through_ddp_is_noticed_at_the_first_step(pool: gloo.Pool) -> None:
    """And a wrapper that is not used any more is none of laconic's business."""
    assert set(pool.run(beside, False, ranks=4)) == {""}
    assert all(
        "through a DistributedDataParallel" in said for said in pool.run(beside, True, ranks=4)
    )
