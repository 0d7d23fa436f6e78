"""SlowMoDistributedDataParallel in hard places: what fairscale's gets wrong, and what users do."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import logging
import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic as la
from laconic import SlowMoBaseAlgorithm, SlowMoDistributedDataParallel

from tests.support import gloo
from tests.support import slowmo_training as loop

pytestmark = [
    pytest.mark.filterwarnings("ignore:these arguments have no effect"),
    pytest.mark.filterwarnings("ignore:slowmo_memory_efficient=True sends"),
    pytest.mark.filterwarnings("ignore:there is one node only"),
    pytest.mark.filterwarnings("ignore:the optimizer updates float16 parameters"),
]
SGP = SlowMoBaseAlgorithm.SGP
LATE: dict[str, Any] = {"slowmo_base_algorithm": SGP, "overlap": True}
SHORT: dict[str, Any] = {"slowmo_frequency": 4, "localsgd_frequency": 2}


def simulate(run: Any, workers: int = 2) -> list[Any]:
    return la.simulate(run, workers=workers)


def tiny(
    rank: int, dtype: torch.dtype = torch.float32, **given: Any
) -> tuple[SlowMoDistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(rank)
    inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    model = SlowMoDistributedDataParallel(inner, **{"nprocs_per_node": 1, **given})
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def go(
    model: SlowMoDistributedDataParallel, optimizer: torch.optim.Optimizer, rank: int, steps: int
) -> list[Tensor]:
    """Parameters after every step of an ordinary loop."""
    generator = torch.Generator().manual_seed(100 + rank)
    trace = []
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        x, y = (torch.randn(5, k, generator=generator).to(dtype) for k in (6, 3))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        model.perform_slowmo(optimizer)
        trace.append(loop.flat(model))
    return trace


# -- what the original gets wrong, and other hard places ----


def test_ranks_start_alike_and_a_slow_step_at_lr_0_is_harmless() -> None:
    """Differently seeded; frozen parameters stay rank 0's."""

    def run(rank: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        torch.manual_seed(rank)
        own = loop.flat(nn.Linear(6, 8))
        model, _ = tiny(rank, **SHORT)
        frozen = next(model.module.children())
        frozen.requires_grad_(False)
        start = loop.flat(frozen)
        held = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(held, lr=0.1, momentum=0.9)
        first = go(model, optimizer, rank, 4)
        optimizer.param_groups[0]["lr"] = 0.0
        last = go(model, optimizer, rank, 4)
        assert torch.equal(loop.flat(frozen), start)
        return own, start, [*first, *last]

    runs = simulate(run, 4)
    assert not torch.equal(runs[0][0], runs[1][0])
    for _, start, trace in runs:
        assert torch.equal(start, runs[0][0])
        assert torch.isfinite(trace[7]).all()
        assert all(torch.equal(x, runs[0][2][3]) for x in trace[3:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("base", list(SlowMoBaseAlgorithm))
def test_half_precision_parameters_without_masters(
    dtype: torch.dtype, base: SlowMoBaseAlgorithm
) -> None:
    def run(rank: int) -> list[Tensor]:
        model, _ = tiny(rank, dtype, slowmo_base_algorithm=base, **SHORT)
        return go(model, torch.optim.SGD(model.parameters(), lr=0.05), rank, 8)

    runs = simulate(run, 4)
    for t in (3, 7):
        assert runs[0][t].dtype == dtype and torch.isfinite(runs[0][t]).all()
        assert all(torch.equal(run[t], runs[0][t]) for run in runs)


class Branching(nn.Module):
    """One of its layers takes part on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        out: Tensor = self.always(x)
        return out + self.sometimes(x) if both else out


@pytest.mark.parametrize("per_node", [1, 2])
def test_a_gradient_missing_on_one_rank_counts_as_zero(per_node: int) -> None:
    def run(rank: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        model = SlowMoDistributedDataParallel(Branching(), per_node, slowmo_momentum=0.0, **SHORT)
        start = loop.flat(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            model(torch.ones(1, 6) * (1 + rank), both=rank != 1).sum().backward()
            optimizer.step()
            model.zero_grad(set_to_none=True)
            model.perform_slowmo(optimizer)
        return start, loop.flat(model)

    runs = simulate(run, 4)
    assert all(torch.equal(end, runs[0][1]) for _, end in runs)
    bias = (runs[0][0] - runs[0][1])[-3:]
    # gradients of a linear loss are constant: 4 steps of 0.1 times the mean over ranks of x
    assert torch.allclose(bias, torch.full((3,), 4 * 0.1 * 3 / 4))


def test_a_rank_that_never_has_a_gradient_does_not_hang_the_others(pool: gloo.Pool) -> None:
    assert pool.run(_one_without_gradients, ranks=4) == [True] * 4


def _one_without_gradients(rank: int) -> bool:
    with loop.over_gloo(4):
        model, optimizer = tiny(
            0, nprocs_per_node=2, slowmo_frequency=2, localsgd_frequency=1, timeout=50.0
        )
        for _ in range(4):
            if rank != 3:
                model(torch.ones(1, 6) * rank).sum().backward()
            optimizer.step()
            model.zero_grad(set_to_none=True)
            model.perform_slowmo(optimizer)
        return True


def test_what_has_no_effect_is_switched_off() -> None:
    """One node has no base algorithm, and says so; momentum 0 and a slow lr of 1 no slow step."""

    def run(rank: int, **given: Any) -> tuple[list[Tensor], int, Any]:
        model, optimizer = tiny(rank, **given)
        trace = go(model, optimizer, rank, 4)
        return trace, model.stats().rounds, model.synchronizer.state_dict()["rounds"]

    with pytest.warns(UserWarning, match=r"there is one node only: .*; the slow step is on"):
        runs = simulate(partial(run, nprocs_per_node=4, slowmo_frequency=4), 4)
    for t in range(4):  # gradients are averaged at every step
        assert all(torch.equal(trace[t], runs[0][0][t]) for trace, _, _ in runs)
    assert runs[0][1] == 1, "the slow step"
    _, rounds, state = simulate(partial(run, slowmo_momentum=0.0, **SHORT))[0]
    assert rounds == 2 and len(state) == 1 and not any(state[0]["state"])


@pytest.mark.filterwarnings("ignore:the learning rate rose")
def test_a_scaler_that_skips_a_step_on_one_rank_hangs_nobody(pool: gloo.Pool) -> None:
    """The first step, too, at which the wrapper learns of its optimizer. Nothing is sent while the
    optimizer steps, which one rank does not do: a collective of the user's fits in."""
    for runs in (simulate(_skipping), pool.run(_skipping_over_gloo, ranks=2)):
        assert [calls for calls, _ in runs] == [6, 6]
        assert torch.equal(runs[0][1], runs[1][1])


def _skipping(rank: int, own: Any = None) -> tuple[int, Tensor]:
    model, optimizer = tiny(0, slowmo_frequency=6)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for t, x in enumerate(loop.batches(rank, 6)):
        loss = model(x[:, :6]).square().mean() * (math.inf if (t, rank) in ((0, 1), (2, 0)) else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        if own is not None:
            dist.all_reduce(torch.ones(1), group=own)
        scaler.update()
        model.zero_grad(set_to_none=True)
        model.perform_slowmo(optimizer)
    return model.num_updates, loop.flat(model)


def _skipping_over_gloo(rank: int) -> tuple[int, Tensor]:
    with loop.over_gloo(2), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _skipping(rank, gloo._groups[2])


def test_gradients_are_the_nodes_mean_when_backward_returns() -> None:
    """From the first step on, before any optimizer step told which optimizer there is; under
    no_sync() they accumulate, and nothing is sent."""

    def run(rank: int) -> tuple[Tensor, int, Tensor]:
        torch.manual_seed(rank)
        model = SlowMoDistributedDataParallel(nn.Linear(3, 2), 2)
        weight = next(model.parameters())
        model(torch.ones(1, 3) * (rank + 1)).sum().backward()
        assert weight.grad is not None
        first, before = weight.grad.clone(), model.stats().bytes_sent
        weight.grad = None
        with model.no_sync():
            model(torch.ones(1, 3) * (rank + 1)).sum().backward()
        sent = model.stats().bytes_sent - before
        model(torch.ones(1, 3) * (rank + 1)).sum().backward()
        assert weight.grad is not None
        return first, sent, weight.grad.clone()

    for rank, (first, sent, both) in enumerate(simulate(run, 4)):
        mean = 1.5 if rank < 2 else 3.5
        assert sent == 0 and torch.equal(first, torch.full((2, 3), mean))
        assert torch.equal(both, torch.full((2, 3), 2 * mean))


@pytest.mark.parametrize(("freq", "gossips"), [(0, 14), (3, 5)])
def test_overlapped_gossip(freq: int, gossips: int) -> None:
    """A message is sent every max(1, synch_freq) calls, and folded before the slow step: after it
    all are equal."""

    def run(rank: int) -> tuple[list[Tensor], int]:
        model, optimizer = tiny(rank, torch.float64, **LATE, synch_freq=freq, slowmo_frequency=8)
        return go(model, optimizer, rank, 16), model.stats().rounds

    made = simulate(run, 4)
    assert [rounds for _, rounds in made] == [2 + gossips] * 4, "and two slow steps"
    runs = [trace for trace, _ in made]
    for t in (7, 15):
        assert all(torch.equal(trace[t], runs[0][t]) for trace in runs)
    assert not torch.equal(runs[0][5], runs[1][5])


# -- half precision with float32 masters ----


def masters_run(
    rank: int, kind: str, dtype: torch.dtype, steps: int = 8, **given: Any
) -> tuple[list[Tensor], list[Tensor], list[Tensor], int]:
    """Masters before and after every call, the parameters, and the bytes sent between nodes."""
    model, _ = tiny(rank, dtype, **SHORT, **given)
    params = list(model.parameters())
    sizes = [p.numel() for p in params]
    whole = torch.cat([p.detach().float().view(-1) for p in params])
    pieces = [piece.clone() for piece in torch.split(whole, sizes)]
    held = pieces if kind == "list" else [whole]
    fp32: Any = {"flat": whole, "list": pieces, "dict": {"all": whole}}[kind]
    optimizer = torch.optim.SGD(held, lr=0.05, momentum=0.9)
    before, masters, halves = [], [], []
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        x, y = (torch.randn(5, k, generator=generator).to(dtype) for k in (6, 3))
        nn.functional.mse_loss(model(x), y).backward()
        gradient = torch.cat([p.grad.float().view(-1) for p in params if p.grad is not None])
        for master, g in zip(held, torch.split(gradient, [h.numel() for h in held]), strict=True):
            master.grad = g.clone()
        optimizer.step()
        before.append(torch.cat([master.clone() for master in held]))
        for p, values in zip(params, torch.split(before[-1], sizes), strict=True):
            p.data.copy_(values.view_as(p))
        model.zero_grad(set_to_none=True)
        model.perform_slowmo(optimizer, fp32)
        masters.append(torch.cat([master.clone() for master in held]))
        halves.append(loop.flat(model))
    return before, masters, halves, model.stats().bytes_by_set["workers"]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("flat", torch.float16), ("list", torch.bfloat16), ("dict", torch.float16)],
)
def test_masters_in_float32_are_what_is_averaged(kind: str, dtype: torch.dtype) -> None:
    """Averages travel in half precision and what rounding cuts off stays; slow steps leave equal
    masters."""
    runs = simulate(partial(masters_run, kind=kind, dtype=dtype), 4)
    rounded = torch.stack([before[1].to(dtype).float() for before, _, _, _ in runs])
    mean = (rounded.sum(0) / 4).to(dtype).float()
    for rank, (before, masters, halves, _) in enumerate(runs):
        expected = before[1] - rounded[rank] + mean
        assert torch.allclose(masters[1], expected, rtol=0, atol=1e-7)
        assert all(torch.equal(masters[t], runs[0][1][t]) for t in (3, 7))
        assert all(torch.equal(masters[t].to(dtype), halves[t]) for t in (1, 3, 5, 7))
    assert not torch.equal(runs[0][1][1], runs[1][1][1]), "each keeps what rounding cut off"


def test_masters_travel_in_half_precision_and_slow_steps_in_float32() -> None:
    run = partial(masters_run, kind="flat", dtype=torch.float16, steps=4)
    once = 2 * 3 * 84 // 4  # 2(n-1)/n of the elements, 83, padded
    for given, sent in (({"slowmo_momentum": 0.0}, once * 2 * 2), ({}, once * 2 + once * 4)):
        assert simulate(partial(run, **given), 4)[0][3] == sent


def test_half_and_full_precision_in_one_module_with_masters_for_some() -> None:
    """The node's gradients are the same at every step; the layout of the module is kept."""

    def run(rank: int) -> list[Tensor]:
        torch.manual_seed(rank)
        half = nn.Conv2d(3, 4, 3).half().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        norm = nn.LayerNorm(4)
        module = nn.ModuleList([half, norm])
        model = SlowMoDistributedDataParallel(module, 2, slowmo_frequency=3)
        masters = [p.detach().float() for p in half.parameters()]
        optimizer = torch.optim.SGD([*masters, *norm.parameters()], lr=0.1)
        found = []
        for x in loop.batches(rank, 4):
            out = half(x[:, :27].reshape(-1, 3, 3, 3).half()).float().flatten(1)
            norm(out).square().sum().backward()
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            found.append(torch.cat([g.float().reshape(-1) for g in grads]))
            for p, master in zip(half.parameters(), masters, strict=True):
                assert p.grad is not None
                master.grad = p.grad.float()
            optimizer.step()
            model.zero_grad(set_to_none=True)
            model.perform_slowmo(optimizer, [*masters, *norm.parameters()])
            assert all(map(torch.equal, half.parameters(), (m.half() for m in masters)))
        assert half.weight.is_contiguous(memory_format=torch.channels_last)
        return found

    runs = simulate(run, 4)
    for t in range(4):
        assert torch.equal(runs[0][t], runs[1][t]) and torch.equal(runs[2][t], runs[3][t])


# -- arguments ----


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nprocs_per_node": 0}, "nprocs_per_node .* must be an integer of at least 1"),
        ({"nprocs_per_node": 3}, "divide their number: there are 4 ranks"),
        ({"slowmo_base_algorithm": "adpsgd"}, "must be one of .*localsgd.*'adpsgd'|LOCALSGD"),
        ({"slowmo_momentum": 1.0}, "slowmo_momentum must be"),
        ({"slowmo_lr": 0.0}, "slowmo_lr must be"),
        ({"timeout": 0.0}, "timeout must be"),
        ({"slowmo_frequency": 0}, "slowmo_frequency must be"),
        ({"localsgd_frequency": 2.5}, "localsgd_frequency must be"),
        ({"slowmo_num_shards": 0}, "slowmo_num_shards must be"),
        ({"broadcast_buffers": 1}, "broadcast_buffers must be True or False"),
        ({"graph": "ring"}, "graph must be one of laconic's .*RingGraph"),
        ({"graph": la.RingGraph(0, 7)}, "graph is of node 0 of 7"),
        ({"mixing": 0.5}, "mixing must be a laconic.UniformMixing"),
        ({"overlap": True}, "overlap=True needs .*SGP; local SGD"),
        ({"process_world_size": 5}, "process_world_size is 5, where laconic finds 4"),
        ({"process_rank": 9}, "process_rank is 9"),
        ({"comm_device": "cuda"}, "comm_device must be"),
    ],
)
def test_bad_arguments_are_one_line_on_every_rank(given: dict[str, Any], message: str) -> None:
    def run(rank: int) -> None:
        with pytest.raises(ValueError, match=message) as caught:
            SlowMoDistributedDataParallel(nn.Linear(2, 2), **{"nprocs_per_node": 1, **given})
        assert "\n" not in str(caught.value)

    simulate(run, 4)


def test_what_is_wrong_on_one_rank_is_an_error_on_all() -> None:
    def run(rank: int) -> str:
        uneven = la.DynamicBipartiteExponentialGraph(rank, 3)
        cases: list[tuple[dict[str, Any], str]] = [
            ({"slowmo_frequency": 9 + 3 * (rank == 2)}, "attach something other than rank 0"),
            ({**LATE, "graph": uneven, "push_sum": False}, "push_sum=False needs a graph"),
            ({**LATE, "graph": la.RingGraph(0, 3)}, "graph is of node 0 of 3, but this is node"),
        ]
        for given, message in cases:
            with pytest.raises(ValueError, match=message) as caught:
                SlowMoDistributedDataParallel(nn.Linear(2, 2), 1, **given)
        return str(caught.value)

    messages = simulate(run, 3)
    assert messages[0] == f"rank 1: {messages[1]}; rank 2: {messages[2]}"


def test_nodes_and_modules_that_do_not_fit_are_an_error_on_every_rank(pool: gloo.Pool) -> None:
    """Under torchrun LOCAL_WORLD_SIZE tells: here three ranks on one host and one on another."""
    for uneven, sharded in pool.run(_misfits, ranks=4):
        assert "must divide the number of ranks on every host" in uneven and "3, 3, 3, 1" in uneven
        assert "use laconic.attach(..., laconic.slowmo(...), mesh=)" in sharded


def _misfits(rank: int) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module, found = nn.Linear(4, 4), []
    with pytest.MonkeyPatch.context() as env:
        env.setenv("LOCAL_WORLD_SIZE", "1" if rank == 3 else "3")
        # the wrapper's own link, not one that a simulation would give it
        with pytest.raises(ValueError) as caught:
            SlowMoDistributedDataParallel(module, 2)
    found.append(str(caught.value))
    fully_shard(module, mesh=init_device_mesh("cpu", (4,)))
    with pytest.raises(ValueError) as caught:
        SlowMoDistributedDataParallel(module, 1)
    return [*found, str(caught.value)]


def test_what_the_original_advises_against_is_warned_of() -> None:
    sgp = {"slowmo_base_algorithm": SGP, "slowmo_memory_efficient": False}
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, ""),
        ({"slowmo_frequency": 10}, "not a multiple of localsgd_frequency=3"),
        ({"slowmo_frequency": 10, "slowmo_momentum": 0.0}, "no effect: slowmo_frequency"),
        ({"slowmo_base_algorithm": SGP}, "sends an all-reduce"),
        (sgp, ""),
        ({"use_streams": False}, "these arguments have no effect: use_streams=False"),
        ({**sgp, "synch_freq": 2}, "these arguments have no effect: synch_freq"),
    ]
    for given, message in cases:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            simulate(lambda rank, g=given: SlowMoDistributedDataParallel(nn.Linear(2, 2), 1, **g))
        told = " ".join(str(w.message) for w in caught)
        assert message in told and bool(message) == bool(told)


# -- optimizers ----


class Unseen(torch.optim.SGD):
    """Its instances' step() has none of torch's hooks."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.step = self._bare  # type: ignore[method-assign]

    @torch.no_grad()
    def _bare(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1)


def test_optimizers_that_do_not_fit_are_refused() -> None:
    def run(rank: int) -> None:
        (model, optimizer), (moved, _) = tiny(rank), tiny(rank)
        stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        with pytest.raises(ValueError, match="holds none of the module's parameters"):
            model.perform_slowmo(stranger)
        with pytest.raises(ValueError, match="no step of this optimizer was seen"):
            go(moved, Unseen(moved.parameters(), lr=0.1), rank, 1)
        go(model, optimizer, rank, 1)
        other = torch.optim.SGD([next(model.parameters())], lr=0.1)
        with pytest.raises(ValueError, match="another optimizer than the one that moved"):
            model.perform_slowmo(other)
        same = torch.optim.SGD(model.parameters(), lr=0.1)
        for each in (same, optimizer):  # the same parameters: a wrapper around it, say; and back
            model.perform_slowmo(each)
            with pytest.raises(ValueError, match="attached already"):
                la.attach(model, each, la.ddp())
        for name in ("slowmo_momentum", "slowmo_frequency", "slowmo_num_shards"):
            with pytest.raises(AttributeError, match=f"{name} is fixed when the module is wrapped"):
                setattr(model, name, 0.1)

    simulate(run)


def test_optimizers_of_parts_and_of_two_modules() -> None:
    def several(rank: int) -> None:
        one, other = tiny(rank)[0], tiny(rank)[0]
        optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
        (one(torch.ones(1, 6)) + other(torch.ones(1, 6))).sum().backward()
        with pytest.raises(ValueError, match="one optimizer moves one wrapped module"):
            optimizer.step()

    def halves(rank: int) -> None:
        model, _ = tiny(rank)
        params = list(model.parameters())
        body, head = (torch.optim.SGD(part, lr=0.1) for part in (params[:2], params[2:]))
        model(torch.ones(1, 6)).sum().backward()
        body.step()
        with pytest.raises(ValueError, match="a second optimizer updates parameters"):
            head.step()

    def part(rank: int) -> None:
        model, _ = tiny(rank)
        go(model, torch.optim.SGD(list(model.parameters())[:2], lr=0.1), rank, 1)

    def pair(rank: int) -> list[Tensor]:
        """As in adversarial training."""
        pairs = [tiny(rank, slowmo_frequency=6), tiny(10 + rank, slowmo_frequency=6)]
        for _ in range(6):
            for model, optimizer in pairs:
                go(model, optimizer, rank, 1)
        return [loop.flat(model) for model, _ in pairs]

    simulate(several)
    simulate(halves, 1)
    with pytest.warns(UserWarning, match="2 trainable parameters of the module are not in"):
        simulate(part)
    one, two = simulate(pair)
    assert all(map(torch.equal, one, two)) and not torch.equal(*one)


@pytest.mark.parametrize("alike", [True, False])
def test_parameters_that_are_not_the_modules(alike: bool) -> None:
    """They are averaged too, gradients in the node included, if they start alike."""

    def run(rank: int) -> Tensor:
        model, _ = tiny(rank, nprocs_per_node=2, localsgd_frequency=1, slowmo_momentum=0.0)
        scale = nn.Parameter(torch.ones(1) if alike else torch.tensor([1.0 + rank]))
        optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
        for x in loop.batches(rank, 3):
            (scale * (rank + 1) + model(x[:, :6]).mean() * 0).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.perform_slowmo(optimizer)
        return scale.detach().clone()

    if alike:
        for found in simulate(run, 4):
            assert torch.allclose(found, torch.tensor([1 - 3 * 0.1 * 2.5]))
    else:
        with pytest.raises(ValueError, match="put parameters of your own into the module"):
            simulate(run, 4)


@pytest.mark.parametrize("steps", [0, 8])
def test_another_optimizer_over_the_same_parameters_takes_over_with_its_lr(steps: int) -> None:
    """Also where its first step is skipped, before a slow step."""

    def run(rank: int, fresh: bool) -> Any:
        model, optimizer = tiny(rank, slowmo_frequency=3)
        go(model, optimizer, rank, 2)
        if fresh:
            state = optimizer.state_dict()["state"]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
            for index, p in enumerate(model.parameters()):
                optimizer.state[p].update(state[index])
        else:
            optimizer.param_groups[0]["lr"] = 0.02
        if not steps:
            model.perform_slowmo(optimizer)
        go(model, optimizer, rank, steps)
        slow = model.synchronizer.state_dict()["rounds"][-1]["state"][0]["u"]
        return slow.clone(), loop.flat(model)

    changed, taken = (simulate(partial(run, fresh=fresh)) for fresh in (False, True))
    for one, other in zip(changed, taken, strict=True):
        assert all(map(torch.equal, one, other))
    assert any(bool(slow.any()) for slow, _ in taken)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_compiled_optimizer_step() -> None:
    def run(rank: int) -> tuple[Tensor, int]:
        model, optimizer = tiny(rank, slowmo_frequency=3)
        stepping = torch.compile(optimizer.step, backend="eager")
        for x in loop.batches(rank, 6):
            model(x[:, :6]).square().mean().backward()
            stepping()
            model.zero_grad(set_to_none=True)
            model.perform_slowmo(optimizer)
        return loop.flat(model), model.num_updates

    (one, calls), (other, _) = simulate(run)
    assert torch.equal(one, other) and calls == 6


# -- profile and logs ----


def test_profile_mode_prints_the_parts_and_writes_a_trace(pool: gloo.Pool, tmp_path: Path) -> None:
    table, nothing = pool.run(_profiled, str(tmp_path), ranks=2)
    assert nothing == "" and table.count("forward") >= 2, "one table for each slow step"
    lines = [line.split() for line in table.splitlines()]
    parts = {" ".join(line[:-3]): line[-3:] for line in lines if len(line) > 3}
    assert parts["SlowMomentum round"][0] == parts["Average round"][0] == "1"
    assert parts["forward"][0] == parts["perform_slowmo, total"][0] == "6"
    # 83 numbers in float32, padded to 84, twice half of them
    assert float(parts["Average round"][2]) == pytest.approx(84 * 4 / 1e6, abs=6e-4)
    for rank in range(2):
        trace = json.loads((tmp_path / f"slowmo_trace.rank{rank}.json").read_text())
        names = [event.get("name") for event in trace["traceEvents"]]
        assert names.count("slowmo: perform_slowmo, total") >= 4


def _profiled(rank: int, directory: str) -> str:
    with (
        loop.over_gloo(2),
        pytest.MonkeyPatch.context() as env,
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        env.chdir(directory)
        model, optimizer = tiny(rank, profile_mode=True, slowmo_frequency=6)
        go(model, optimizer, rank, 12)
    return out.getvalue()


def test_verbose_logs_a_line_of_json_for_every_call(caplog: pytest.LogCaptureFixture) -> None:
    def run(rank: int) -> None:
        model, optimizer = tiny(rank, verbose=True, slowmo_frequency=6)
        go(model, optimizer, rank, 6)
        model.synchronizer.detach()

    with caplog.at_level(logging.DEBUG, "laconic.slowmo"):
        simulate(run)
    records = [json.loads(r.message) for r in caplog.records if r.name == "laconic.slowmo"]
    own = [r for r in records if r["rank"] == 1 and r["event"] == "steps"]
    assert [r["step"] for r in own] == [1, 2, 3, 4, 5, 6]


# -- what users do ----


def test_finish_and_consensus_are_the_mean_and_lose_no_progress() -> None:
    """Also where no slow step has come yet, with its anchor at the start."""

    def run(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        model, optimizer = tiny(rank)
        own = go(model, optimizer, rank, 10)[-1]
        with model.consensus() as module:
            inside = loop.flat(module)
        back = loop.flat(model)
        model.finish()
        return own, inside, back, loop.flat(model)

    runs = simulate(run, 4)
    mean = torch.stack([own for own, _, _, _ in runs]).mean(0)
    for own, inside, back, end in runs:
        assert torch.equal(own, back) and torch.equal(end, inside)
        assert torch.allclose(inside, mean, rtol=0, atol=1e-6)


def test_state_between_the_optimizers_step_and_the_call() -> None:
    """With push weights other than 1 x is then not the model's; and going back without the call."""

    def run(rank: int) -> None:
        graph = la.DynamicBipartiteExponentialGraph(rank, 3)

        def make() -> Any:
            return tiny(rank, slowmo_base_algorithm=SGP, graph=graph)

        def state(*parts: Any) -> list[Any]:
            return copy.deepcopy([part.state_dict() for part in parts])

        def load(parts: Any, states: list[Any]) -> None:
            for part, saved in zip(parts, states, strict=True):
                part.load_state_dict(saved)

        def half_a_step(parts: Any, x: Tensor) -> None:
            parts[0].zero_grad()
            parts[0](x[:, :6]).square().mean().backward()
            parts[1].step()

        def end(parts: Any) -> Tensor:
            parts[0].zero_grad()
            parts[0].perform_slowmo(parts[1])
            return loop.flat(parts[0])

        data, first, other = loop.batches(rank, 2), make(), make()
        go(first[0], first[1], rank, 3)
        good = state(*first)
        half_a_step(first, data[0])
        middle, expected = state(*first), end(first)
        go(other[0], other[1], rank, 1)
        load(other, middle)
        assert torch.equal(end(other), expected)
        half_a_step(other, data[1])  # and no call: back to what was good
        load(other, good)
        half_a_step(other, data[0])
        assert torch.equal(end(other), expected)

    simulate(run, 3)


class Cached(nn.Module):
    """A buffer whose length follows the data, as that of positions does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.zeros(len(x))
        out: Tensor = self.inner(x)
        return out


@pytest.mark.parametrize("per_node", [1, 2])
def test_buffers_whose_shape_follows_the_data_are_each_ranks_own(per_node: int) -> None:
    """The others are averaged, on one node without a slow step as well."""

    def run(rank: int) -> tuple[Tensor, Any, int]:
        torch.manual_seed(0)
        model = SlowMoDistributedDataParallel(
            Cached(), per_node, slowmo_frequency=3, slowmo_momentum=0.0
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in loop.batches(rank, 3):
            loop.square_step(model, optimizer, x[: 4 + rank, :6])
        state = model.module.state_dict()
        return loop.flat(model), state["inner.1.running_mean"], len(state["seen"])

    (x, mean, one), (y, other_mean, two) = simulate(run)
    assert torch.equal(x, y) and torch.equal(mean, other_mean) and bool(mean.any())
    assert (one, two) == (4, 5)


def test_detached_or_dropped_it_leaves_nothing_behind() -> None:
    def run(rank: int) -> tuple[int, Tensor, int]:
        model, optimizer = tiny(rank, slowmo_frequency=3)
        go(model, optimizer, rank, 3)
        model.detach()
        before = model.stats().bytes_sent
        go(model, optimizer, rank, 3)
        assert model.stats().bytes_sent == before and model.num_updates == 3
        again = SlowMoDistributedDataParallel(model.module, 1, slowmo_frequency=3)
        updates = again.num_updates
        end = go(again, optimizer, rank, 3)[2]
        module = nn.Linear(6, 3)
        for _ in range(3):
            SlowMoDistributedDataParallel(module, 2)
            gc.collect()
        hooks = [p._post_accumulate_grad_hooks for p in module.parameters()]
        return updates, end, sum(len(h or ()) for h in hooks)

    (updates, one, hooks), (_, other, _) = simulate(run)
    assert updates == 0 and torch.equal(one, other) and hooks == 0
