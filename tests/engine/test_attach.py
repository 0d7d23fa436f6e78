"""What `laconic.attach` refuses, by name and alike on every rank, and what it warns of."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic as la

from tests.support import gloo
from tests.support.loops import attached, data, refusal, sgd, train

# -- arguments ----

CHOICES = "'keep', 'average', 'reset'"
CALLS = [
    *((f"local_sgd({p})", f"period must be an integer of at least 1, not {p}") for p in (0, 2.0)),
    *((f"{name}(True)", "period must be") for name in ("local_sgd", "easgd", "downpour", "lsgd")),
    ("sgp('circle')", "graph must be one of 'exponential', .*'ring'.*'circle'"),
    ("easgd(4, 0.0)", "beta must be .* greater than 0 and at most 1, not 0.0"),
    ("lsgd(4, drift='0.1')", "drift must be .*, not '0.1'"),
    ("local_sgd(2, optimizer_state='drop')", CHOICES),
    ("slowmo(la.local_sgd)", r"base must be .*local_sgd\(12\)"),
    ("diloco(4, outer=0.7)", "outer"),
    ("auto(1.5)", "target"),
    ("slowmo(la.auto())", "base must be a recipe"),
    ("Round(la.every(1), la.updates.Average(), la.exchanges.Mean(), over='all')", "'workers'"),
    ("simulate(print, workers=0)", "workers must be an integer of at least 1"),
]


def test_a_bad_argument_is_a_value_error_that_names_what_is_allowed() -> None:
    for call, text in CALLS:
        with pytest.raises(ValueError, match=text):
            eval(f"la.{call}")


GROUPS = la.lsgd(4, local_period=1)
OPTIONS: list[tuple[dict[str, Any], str]] = [
    *(({"recipe": r}, r"as laconic\.local_sgd\(12\)") for r in (la.local_sgd, 3, None)),
    ({"recipe": "locl_sgd(4)"}, "did you mean 'local_sgd'"),
    ({"recipe": la.ddp()[0]}, r"as laconic\.local_sgd\(12\)"),
    ({"recipe": GROUPS}, r"attach\(\.\.\., group_size=4\)"),
    ({"recipe": GROUPS, "group_size": 3}, "3 does not divide 4"),
    ({"recipe": GROUPS, "group_size": 4, "nprocs_per_node": 2}, "4 does not divide 2"),
    ({"seed": -1}, "seed must be"),
    ({"buffers": "mean"}, "'average', 'keep', 'broadcast', not 'mean'"),
    ({"nprocs_per_node": 3}, "divide .* 4 ranks"),
    ({"timeout": 0}, "timeout must be .* greater than 0"),
    ({"scaler": True}, "scaler must be .*GradScaler"),
    ({"recipe": la.slowmo(None, 2, quorum=1), "buffers": "broadcast"}, "rounds have a quorum"),
    ({"buffers": "broadcast", "elastic": la.Elastic()}, "'broadcast' .*workers come and go"),
]


@pytest.mark.parametrize(("options", "text"), OPTIONS)
def test_a_bad_option_is_refused_alike_on_every_rank(options: dict[str, Any], text: str) -> None:
    """What was refused can be done right afterward."""

    def run(rank: int) -> str:
        model = nn.Linear(5, 3).double()
        optimizer = sgd(model)
        with pytest.raises(ValueError, match=text) as caught:
            la.attach(model, optimizer, **{"recipe": la.local_sgd(2), **options})
        sync = la.attach(model, optimizer, la.local_sgd(2))
        train(model, optimizer, data()[rank % 3][:1])
        assert sync.step == 1
        return str(caught.value)

    assert len(set(la.simulate(run, workers=4))) == 1


@pytest.mark.fault("attach(..., elastic=, link='nccl') and LACONIC_COORDINATOR ignored options")
@pytest.mark.parametrize("option", [{"link": "nccl"}, {"link": "tcp"}, {"group_size": 2}])
@pytest.mark.parametrize("by_environment", [False, True])
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
    "recipe": lambda rank: {"recipe": la.local_sgd(2 + (rank == 1))},
    "momentum": lambda rank: {"recipe": la.slowmo(None, 4, 0.5 + 0.1 * (rank == 1))},
    "seed": lambda rank: {"recipe": la.sgp("random"), "seed": rank},
    "shapes": lambda rank: {"width": 3 + (rank == 1)},
    "frozen": lambda rank: {"frozen": rank == 1},
    "nprocs_per_node": lambda rank: {"nprocs_per_node": 1 + (rank == 1)},
    "group_size": lambda rank: {"recipe": la.hierarchical(1, 2), "group_size": 1 + (rank == 1)},
}


def attach_unlike(rank: int, what: str) -> str:
    options = UNLIKE[what](rank)
    model = nn.Linear(4, options.pop("width", 3))
    model.bias.requires_grad_(not options.pop("frozen", False))
    recipe = options.pop("recipe", la.local_sgd(2))
    return refusal(lambda: la.attach(model, sgd(model), recipe, timeout=60, **options))


def test_ranks_that_attach_unlike_things_are_told_so_on_every_rank() -> None:
    for what in UNLIKE:
        for text in la.simulate(partial(attach_unlike, what=what), workers=2):
            assert "must be the same" in text, what
            assert "[1]" in text or what in ("nprocs_per_node", "group_size")


WRONG_ON_ONE: dict[str, tuple[dict[str, Any], str]] = {
    "recipe": ({"recipe": 4}, "recipe must be what a recipe function returns"),
    "groups": ({"recipe": GROUPS}, "give the number of workers in a group"),
    "buffers": ({"buffers": "mean"}, "'average', 'keep'"),
    "timeout": ({"timeout": 0.0}, "timeout must be"),
    "nprocs_per_node": ({"nprocs_per_node": 0}, "nprocs_per_node"),
    "no parameter": ({"other": True}, "has no parameter of the model"),
    "mesh": ({"mesh": 3}, "AttributeError"),
    "devices": ({"device": "meta"}, "on several devices: cpu (0.weight), meta (1.weight)"),
    "wrapped": ({"wrap": nn.DataParallel}, "the model is wrapped in nn.DataParallel"),
}
"""What rank 1 alone passes, and what it is told; the others wait for nobody."""


def attach_wrong(rank: int, what: str) -> tuple[str, int]:
    """What it is told, and how many process groups are left."""
    given = dict(WRONG_ON_ONE[what][0]) if rank == 1 else {}
    last = nn.Linear(3, 2, device=given.pop("device", "cpu")).requires_grad_(False)
    model: nn.Module = nn.Sequential(nn.Linear(4, 3), last)
    held = nn.Linear(4, 3) if given.pop("other", False) else model
    optimizer = torch.optim.SGD([p for p in held.parameters() if p.requires_grad], 0.1)
    model = given.pop("wrap", lambda module: module)(model)
    recipe = given.pop("recipe", la.local_sgd(2))
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    said = refusal(lambda: la.attach(model, optimizer, recipe, **{"timeout": 20.0, **given}))
    return said, len(groups) - before


def test_what_is_wrong_on_one_rank_is_an_error_on_all(pool: gloo.Pool) -> None:
    """In threads, and in processes, where no process group is left."""
    runs = [(what, la.simulate(partial(attach_wrong, what=what), 3)) for what in WRONG_ON_ONE]
    runs += [(what, pool.run(attach_wrong, what, ranks=4)) for what in ("recipe", "timeout")]
    for what, found in runs:
        (first, _), (second, _), *_ = found
        assert WRONG_ON_ONE[what][1] in second
        assert [text for text, _ in found].count(f"rank 1: {second}") == len(found) - 1, first
        assert [left for _, left in found] == [0] * len(found)
    for text in pool.run(attach_unlike, "shapes", ranks=4):
        assert "must be the same" in text and "ranks [1]" in text


# -- optimizers and tensors ----


class Wrapper(torch.optim.Optimizer):
    """Wraps an optimizer without torch's __init__, as Accelerate's does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    param_groups: Any = property(lambda self: self.inner.param_groups)


class Coded(Tensor):
    """A tensor made of another one, as torchao's state of 8 bits."""

    @staticmethod
    def __new__(cls, codes: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Any:
        return Coded(inner["codes"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, f: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f)


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
        optimizer.state[p]["exp_avg"] = Coded(torch.zeros(p.shape))
    optimizer.step()


@pytest.mark.parametrize(
    ("mistake", "said"),
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


class Warming(torch.optim.SGD):
    """Its rate rises by itself, in its settings; its number of steps is no tensor."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        (p,) = self.param_groups[0]["params"]
        self.state[p]["seen"] = self.state[p].get("seen", 0) + 1
        self.param_groups[0]["lr"] *= 1.1


def test_an_outer_optimizer_that_keeps_numbers_is_refused() -> None:
    """They would begin anew in every round."""

    def run(rank: int) -> str:
        model, optimizer, _ = attached(rank, la.diloco(2, outer=lambda x: Warming(x, lr=0.5)))
        return refusal(lambda: train(model, optimizer, data()[rank][:2]))

    (said,) = set(la.simulate(run, workers=3))
    assert re.search(r"outer= stores \[.*'seen'.*\] as Python numbers", said), said


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.fault("complex parameters under sgp() and demo() failed in the middle of a step")
def test_complex_parameters_are_trained_or_refused(dtype: torch.dtype) -> None:
    def run(rank: int) -> Tensor:
        p = nn.Parameter(torch.arange(5).to(dtype))
        optimizer, model = torch.optim.SGD([p], 0.1), nn.ParameterList([p])
        said = refusal(lambda: la.attach(model, optimizer, la.demo()))
        assert f"not {dtype}: choose a recipe" in said
        with la.attach(model, optimizer, la.sgp(delay=2)):
            for _ in range(4):
                p.grad = torch.full_like(p, rank - 1j)
                optimizer.step()
        return p.detach()

    expected = torch.arange(5).to(dtype) - 0.4 * (1 - 1j)
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


WRAPS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "ddp": (Own, "the model is wrapped in DistributedDataParallel"),
    "fsdp1": (in_fsdp1, "the model is wrapped in FullyShardedDataParallel (FSDP1)"),
    "within": (
        lambda module: nn.Sequential(nn.Linear(3, 3), Own(module)),
        "the model's '1' is wrapped in DistributedDataParallel",
    ),
}


def attach_wrapped(rank: int, kind: str) -> str:
    model = WRAPS[kind][0](plain())
    return refusal(lambda: la.attach(model, sgd(model), la.local_sgd(2), timeout=60))


@pytest.mark.parametrize("kind", WRAPS)
def test_a_wrapped_model_is_refused(pool: gloo.Pool, kind: str) -> None:
    (said,) = set(pool.run(attach_wrapped, kind, ranks=4))
    assert WRAPS[kind][1] in said and "\n" not in said
    assert ("fully_shard" if kind == "fsdp1" else "model.module") in said


def beside(rank: int, recipe: la.Recipe, use: str) -> str:
    """What is raised in two steps, where a wrapper averages gradients, or did before."""
    module = plain()
    wrapper: Any = None if use == "after" else Own(module)
    optimizer = sgd(module)
    if wrapper is not None and use != "before":
        wrapper(torch.ones(1, 3)).sum().backward()
        optimizer.zero_grad()
    sync = la.attach(module, optimizer, recipe, timeout=60)
    wrapper = Own(module) if use == "after" else wrapper
    run: Any = module if use == "no more" else wrapper
    generator = torch.Generator().manual_seed(rank)
    try:
        for _ in range(2):
            run(torch.randn(4, 3, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except ValueError as error:
        return str(error)
    finally:
        sync.detach()
    return "nothing"


@pytest.mark.parametrize(
    ("recipe", "use"),
    [
        *((la.local_sgd(4), use) for use in ("after", "used before", "no more")),
        (la.ddp(codec="int8"), "before"),
    ],
)
def test_training_through_ddp_is_found_at_the_first_step(
    pool: gloo.Pool, recipe: la.Recipe, use: str
) -> None:
    """And a wrapper that is not used any more is none of laconic's business."""
    (said,) = set(pool.run(beside, recipe, use, ranks=4))
    assert ("trained through a DistributedDataParallel" in said) == (use != "no more")
    assert said == "nothing" or "identical" not in said
