"""What `laconic.attach` refuses, by name and alike on every rank, and what it warns of."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic as la

from tests.engine.test_tensors import Scaled
from tests.support import gloo
from tests.support.loops import attached, data, descend, refusal, sgd, train

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
    ({"recipe": GROUPS, "elastic": la.Elastic()}, "is inside groups .*where workers come and go"),
    ({"seed": -1}, "seed must be"),
    ({"buffers": "mean"}, "'average', 'keep', 'broadcast', not 'mean'"),
    ({"nprocs_per_node": 3}, "divide .* 4 ranks"),
    ({"timeout": 0}, "timeout must be .* greater than 0"),
    ({"scaler": True}, "scaler must be .*GradScaler"),
    ({"recipe": la.diloco(2, quorum=1), "buffers": "broadcast"}, "rounds have a quorum"),
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

grad_scaler = partial(torch.amp.GradScaler, "cpu")
UNLIKE: dict[str, Callable[[int], dict[str, Any]]] = {
    "momentum": lambda rank: {"recipe": la.slowmo(None, 4, 0.5 + 0.1 * (rank == 1))},
    "seed": lambda rank: {"recipe": la.sgp("random"), "seed": rank},
    "shapes": lambda rank: {"width": 3 + (rank == 1)},
    "frozen": lambda rank: {"frozen": rank == 1},
    "nprocs_per_node": lambda rank: {"nprocs_per_node": 1 + (rank == 1)},
    "group_size": lambda rank: {"recipe": la.hierarchical(1, 2), "group_size": 1 + (rank == 1)},
    "scaler": lambda rank: {"recipe": la.ddp(), "scaler": grad_scaler(enabled=rank == 1)},
}


def attach(rank: int, what: str) -> str:
    given: dict[str, Any] = {"recipe": la.local_sgd(2), "timeout": 60.0}
    given |= UNLIKE[what](rank)
    last = nn.Linear(given.pop("width", 3), 2)
    model = nn.Sequential(nn.Linear(4, last.in_features), last.requires_grad_(False))
    model[0].bias.requires_grad_(not given.pop("frozen", False))
    return refusal(lambda: la.attach(model, sgd(model[0]), **given))


def test_ranks_that_attach_unlike_things_are_told_so_on_every_rank(pool: gloo.Pool) -> None:
    """In threads, and in processes."""
    for what in UNLIKE:
        for text in la.simulate(partial(attach, what=what), workers=2):
            assert "must be the same" in text, what
            assert "[1]" in text or what in ("nprocs_per_node", "group_size")
    for text in pool.run(attach, "shapes", ranks=4):
        assert "must be the same" in text and "ranks [1]" in text


# -- an argument that is wrong on one rank ----

MIXED = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, device="meta"))
LATE = la.diloco(2, quorum=9)
SWITCHES = "broadcast_buffers slowmo_memory_efficient push_sum use_streams verbose profile_mode"
FREQUENCIES = ("slowmo_frequency", "slowmo_lr", "slowmo_num_shards", "localsgd_frequency")
GROUPS_OF_3 = ("global_group", "master_group", "local_node_group")
SAVED = dict.fromkeys(["path", "model", "optimizer", "sync"], 5)
WRONG_ON_ONE: dict[str, dict[str, Any]] = {
    "attach": {"model": (5, MIXED), "optimizer": (5, sgd(MIXED[0])), "recipe": (4, LATE)}
    | {"link": ("nccl", 5), "elastic": (5, la.ddp), "mesh": 3, "buffers": "mean", "offload": 1}
    | {"nprocs_per_node": 0, "group_size": 0, "metrics": 5, "scaler": True}
    | {"seed": -1, "timeout": 0},
    "CommOptimizer": {"optimizer": 5, "dist_optim_name": "EASGDX", "world_size": (0, 3)}
    | {"local_pulling_strength": 2.0, "dist_pulling_strength": "x", "comm_period": 0}
    | {"model": 5, "scaler": 5, "link": "tcp", "timeout": 0},
    "SlowMoDistributedDataParallel": {"module": 5, "nprocs_per_node": 0, "graph": 5, "mixing": 5}
    | {"slowmo_base_algorithm": 5, "slowmo_momentum": 1.0, "slowmo_sgp_average_params": 5}
    | dict.fromkeys(SWITCHES.split(), 5)
    | dict.fromkeys(FREQUENCIES, 0)
    | {"overlap": True}
    | {"synch_freq": -1, "comm_device": "x", "timeout": 0, "process_rank": 7}
    | {"process_world_size": 7, **dict.fromkeys(GROUPS_OF_3)},
    "advise": {"model": 5, "step_fn": 5, "optimizer": 5, "nprocs_per_node": 0, "steps": 1}
    | {"recipes": (5, ["diloco(4, quorum=9)"]), "link": 5, "timeout": 0},
    "switch": {"recipe": ("nonsense(3)", 5, la.hierarchical(2, 4), la.auto(), LATE)},
    "mean": {"value": ("x", torch.ones(3))},
    "average": {"tensors": (5, [3])},
    "consensus": {"mean": 5},
    "finish": {"mean": 5},
    "save": {**SAVED, "others": (5, {3: 4})},
    "load": {**SAVED, "others": 5, "missing_ok": (5, False)},
    "load_state_dict": {"state": 5},
    "load_optimizer": {"state_dict": (5, {})},
    "bind": {"optimizer": 5, "fp32_params": 5},
    "perform_slowmo": {"optimizer": 5, "fp32_params": 5},
}
"""What rank 1 alone passes: for every argument of every call that all ranks make."""


def refused_in_turn(rank: int, folder: Path) -> list[str]:
    """What is raised, call by call, before the processes train."""
    model, said = nn.Linear(4, 3), list[str]()
    optimizer, groups = sgd(model), len(dist.distributed_c10d._world.pg_map)

    def refuse(call: Any, good: dict[str, Any], name: str = "") -> None:
        table = WRONG_ON_ONE[name or call.__name__]
        assert signature(call).parameters.keys() == table.keys(), call
        for argument, values in table.items():
            for value in values if type(values) is tuple else (values,):
                wrong = gloo._groups[3] if argument in GROUPS_OF_3 else value
                try:
                    call(**good | ({argument: wrong} if rank == 1 else {}))
                    said.append(f"{call}: nothing is said of {argument}={value}")
                except Exception as error:
                    said.append(f"{type(error).__name__}: {error}")

    def step() -> None:
        descend(optimizer, model(torch.full((2, 4), 1.0 + rank)).sum())

    def consensus(mean: bool) -> None:
        with sync.consensus(mean=mean):
            pass

    late, both = {"timeout": 20.0}, {"model": model, "optimizer": optimizer}
    each = {"world_size": 4, "comm_period": 4, "dist_pulling_strength": 0.5, **late}
    refuse(la.attach, {**both, "recipe": "local_sgd(2)", **late})
    refuse(la.CommOptimizer, {"optimizer": optimizer, "dist_optim_name": "EASGD", **each})
    refuse(la.SlowMoDistributedDataParallel, {"module": model, "nprocs_per_node": 1, **late})
    refuse(la.advise, {**both, "step_fn": step, "steps": 2, **late})
    assert len(dist.distributed_c10d._world.pg_map) == groups, "none is left"
    with la.attach(model, optimizer, "local_sgd(2)", timeout=20.0) as sync:
        step()
        refuse(sync.switch, {"recipe": "ddp()"})
        refuse(sync.mean, {"value": 1.0})
        refuse(sync.average, {"tensors": [torch.ones(3)]})
        refuse(sync.load_state_dict, {"state": sync.state_dict()})
        refuse(consensus, {"mean": True})
        refuse(sync.finish, {})
        refuse(la.save, {**both, "path": folder})
        refuse(la.load, {**both, "path": folder, "missing_ok": True})
        step()
    wrapper: Any = la.CommOptimizer(optimizer, "EASGD", 4, 4, 0.5, timeout=20.0)
    refuse(wrapper.load_state_dict, {"state_dict": wrapper.state_dict()}, "load_optimizer")
    wrapper.sync.detach()
    net = la.SlowMoDistributedDataParallel(model, 1, timeout=20.0)
    refuse(net.bind, {"optimizer": optimizer})
    refuse(net.perform_slowmo, {"optimizer": optimizer})
    net.perform_slowmo(optimizer)
    return said


def test_what_is_wrong_on_one_rank_is_raised_on_all(pool: gloo.Pool, tmp_path: Path) -> None:
    """At once, as a ValueError in the same words; then the processes can go on."""
    for first, own, *others in zip(*pool.run(refused_in_turn, tmp_path, ranks=4), strict=True):
        text = own.removeprefix("ValueError: ")
        assert text != own, (own, first)
        assert {first, *others} <= {own, f"ValueError: rank 1: {text}"}, (own, first)


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
        optimizer.state[p]["exp_avg"] = Scaled(torch.zeros(p.shape).char(), torch.ones(()))
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


@pytest.mark.fault("complex parameters under sgp() and a codec failed in the middle of a step")
def test_complex_parameters_are_trained_or_refused() -> None:
    def run(rank: int) -> Tensor:
        p = nn.Parameter(torch.arange(5).to(torch.complex64))
        optimizer, model = torch.optim.SGD([p], 0.1), nn.ParameterList([p])
        said = refusal(lambda: la.attach(model, optimizer, la.ddp(codec="int4")))
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
    (nn.DataParallel, "the model is wrapped in DataParallel", "model.module"),
    (in_fsdp1, "the model is wrapped in FullyShardedDataParallel,", "fully_shard"),
    (lambda m: nn.Sequential(nn.Linear(3, 3), Own(m)), "'1' is wrapped in Own", "model.module"),
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
            descend(optimizer, run(torch.randn(4, 3, generator=draw)).square().mean())
    return " ".join(str(each.message) for each in said)


def test_training_through_ddp_is_noticed_at_the_first_step(pool: gloo.Pool) -> None:
    """And a wrapper that is not used any more is none of laconic's business."""
    assert set(pool.run(beside, False, ranks=4)) == {""}
    for said in pool.run(beside, True, ranks=4):
        assert "through a DistributedDataParallel" in said
