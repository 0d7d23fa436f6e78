"""SlowMoDistributedDataParallel in hard places: what fairscale's gets wrong, and what users do."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic import SlowMoBaseAlgorithm, SlowMoDistributedDataParallel

from tests.support import gloo
from tests.support.loops import flat

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


def batch(rank: int, t: int = 0) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * rank + t))


def go(
    model: SlowMoDistributedDataParallel, optimizer: torch.optim.Optimizer, rank: int, steps: int
) -> list[Tensor]:
    """Parameters after every step of an ordinary loop."""
    trace, dtype = [], next(model.parameters()).dtype
    for t in range(steps):
        model(batch(rank, t).to(dtype)).square().mean().backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        model.perform_slowmo(optimizer)
        trace.append(flat(model))
    return trace


# -- what the original gets wrong, and other hard places ----


def test_ranks_start_alike_and_a_slow_step_at_lr_0_is_harmless() -> None:
    """Differently seeded; frozen parameters stay rank 0's."""

    def run(rank: int) -> tuple[Tensor, list[Tensor]]:
        model, _ = tiny(rank, **SHORT)
        frozen = next(model.module.children()).requires_grad_(False)
        start = flat(frozen)
        held = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(held, lr=0.1, momentum=0.9)
        first = go(model, optimizer, rank, 4)
        optimizer.param_groups[0]["lr"] = 0.0
        last = go(model, optimizer, rank, 4)
        assert torch.equal(flat(frozen), start)
        return start, [*first, *last]

    runs = simulate(run, 4)
    for start, trace in runs:
        assert torch.equal(start, runs[0][0]) and torch.isfinite(trace[7]).all()
        assert all(torch.equal(x, runs[0][1][3]) for x in trace[3:])


@pytest.mark.filterwarnings("ignore:the learning rate rose")
def test_a_scaler_that_skips_a_step_on_one_rank_hangs_nobody() -> None:
    """The first step, too, at which the wrapper learns of its optimizer."""

    def run(rank: int) -> tuple[int, Tensor]:
        model, optimizer = tiny(0, slowmo_frequency=6)
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)  # before training, which is no optimizer's step
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for t in range(6):
            factor = math.inf if (t, rank) in ((0, 1), (2, 0)) else 1.0
            scaler.scale(model(batch(rank, t)).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad(set_to_none=True)
            model.perform_slowmo(optimizer)
        return model.num_updates, flat(model)

    (calls, one), (others_calls, other) = simulate(run)
    assert calls == others_calls == 6 and torch.equal(one, other)


def test_gradients_are_the_nodes_mean_when_backward_returns() -> None:
    """From the first step on, before any optimizer step told which optimizer there is; under
    no_sync() they accumulate."""

    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = SlowMoDistributedDataParallel(nn.Linear(3, 2), 2)
        weight, x = next(model.parameters()), torch.ones(1, 3) * (rank + 1)
        with model.no_sync():
            model(x).sum().backward()
        assert weight.grad is not None
        own = weight.grad.clone()
        model(x).sum().backward()
        return own, weight.grad

    for rank, (own, both) in enumerate(simulate(run, 4)):
        assert torch.equal(own, torch.full((2, 3), rank + 1.0))
        assert torch.equal(both, torch.full((2, 3), 3.0 if rank < 2 else 7.0))


# -- half precision with float32 masters ----


def test_masters_in_float32_are_what_is_averaged() -> None:
    """Averages travel in half precision and what rounding cuts off stays; slow steps travel in
    float32 and leave equal masters."""

    def run(rank: int, **given: Any) -> tuple[list[Tensor], list[Tensor], int]:
        """The masters before and after every call, and the bytes sent between nodes."""
        model, _ = tiny(rank, torch.float16, **SHORT, **given)
        params = list(model.parameters())
        masters = [p.detach().float() for p in params]
        optimizer = torch.optim.SGD(masters, lr=0.05, momentum=0.9)
        before, after = [], []
        for t in range(4):
            model(batch(rank, t).half()).square().mean().backward()
            for p, master in zip(params, masters, strict=True):
                assert p.grad is not None
                master.grad = p.grad.float()
            optimizer.step()
            before.append(torch.cat([master.flatten() for master in masters]))
            for p, master in zip(params, masters, strict=True):
                p.data.copy_(master)
            model.zero_grad(set_to_none=True)
            model.perform_slowmo(optimizer, masters)
            after.append(torch.cat([master.flatten() for master in masters]))
            assert torch.equal(flat(model), after[t].half())
        return before, after, model.stats().bytes_by_set["workers"]

    runs, once = simulate(run, 4), 2 * 3 * 84 // 4  # 2(n-1)/n of the elements, 83, padded
    rounded = torch.stack([before[1].half().float() for before, _, _ in runs])
    mean = (rounded.sum(0) / 4).half().float()
    for rank, (before, after, sent) in enumerate(runs):
        assert torch.allclose(after[1], before[1] - rounded[rank] + mean, rtol=0, atol=1e-7)
        assert torch.equal(after[3], runs[0][1][3]) and sent == once * 2 + once * 4
    assert not torch.equal(runs[0][1][1], runs[1][1][1]), "each keeps what rounding cut off"
    assert simulate(partial(run, slowmo_momentum=0.0), 4)[0][2] == once * 2 * 2


# -- arguments ----


BAD: list[tuple[dict[str, Any], str]] = [
    ({"nprocs_per_node": 2}, "divide their number: there are 3 ranks"),
    ({"slowmo_base_algorithm": "adpsgd"}, "must be one of .*localsgd.*'adpsgd'|LOCALSGD"),
    ({"graph": "ring"}, "graph must be one of laconic's .*RingGraph"),
    ({"graph": la.RingGraph(0, 7)}, "graph is of node 0 of 7"),
    ({"overlap": True}, "overlap=True needs .*SGP; local SGD"),
    ({"process_world_size": 5}, "process_world_size is 5, where laconic finds 3"),
    ({"module": nn.DataParallel(nn.Linear(2, 2))}, "DataParallel"),
]


def test_bad_arguments_are_one_line_on_every_rank() -> None:
    """Also what differs between ranks; what is wrong on one alone is in `test_attach`."""

    def run(rank: int) -> None:
        uneven = la.DynamicBipartiteExponentialGraph(rank, 3)
        unlike: list[tuple[dict[str, Any], str]] = [
            ({"slowmo_frequency": 9 + 3 * (rank == 2)}, "attach something other than rank 0"),
            ({**LATE, "graph": uneven, "push_sum": False}, "push_sum=False needs a graph"),
            ({**LATE, "graph": la.RingGraph(0, 3)}, "graph is of node 0 of 3, but this is node"),
            # in tests, warnings are errors
            ({"slowmo_frequency": 7 if rank == 1 else 9}, "not a multiple"),
        ]
        for given, message in [*BAD, *unlike]:
            with pytest.raises(ValueError, match=message) as caught:
                wrap(**{"nprocs_per_node": 1, **given})
            assert "\n" not in str(caught.value)

    simulate(run, 3)


def test_nodes_and_modules_that_do_not_fit_are_an_error_on_every_rank(pool: gloo.Pool) -> None:
    """Under torchrun LOCAL_WORLD_SIZE tells: here three ranks on one host and one on another."""
    for uneven, sharded in pool.run(misfits, ranks=4):
        assert "must divide the number of ranks on every host" in uneven and "3, 3, 3, 1" in uneven
        assert "use laconic.attach(..., laconic.slowmo(...), mesh=)" in sharded


def misfits(rank: int) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = nn.Linear(4, 4)
    with pytest.MonkeyPatch.context() as env, pytest.raises(ValueError) as uneven:
        env.setenv("LOCAL_WORLD_SIZE", "1" if rank == 3 else "3")
        SlowMoDistributedDataParallel(module, 2)
    fully_shard(module, mesh=init_device_mesh("cpu", (4,)))
    with pytest.raises(ValueError) as sharded:
        SlowMoDistributedDataParallel(module, 1)
    return [str(uneven.value), str(sharded.value)]


def wrap(**given: Any) -> SlowMoDistributedDataParallel:
    return SlowMoDistributedDataParallel(**{"module": nn.Linear(2, 2), **given})


def waits(rank: int) -> str:
    """Rank 0 averages, and the other one does not."""
    model, optimizer = tiny(rank, localsgd_frequency=1, timeout=1.5)
    if rank:
        return ""
    with pytest.raises(la.LinkError) as caught:
        go(model, optimizer, rank, 1)
    return str(caught.value)


def test_who_does_not_come_within_the_timeout_is_named() -> None:
    pool = gloo.Pool(2)  # for this test alone: connections are lost
    try:
        said, _ = pool.run(waits, ranks=2, timeout=50)  # the default would be 600 s
    finally:
        pool.close()
    assert "1.5 s" in said, said


def test_what_the_original_advises_against_is_warned_of() -> None:
    sgp = {"slowmo_base_algorithm": SGP, "slowmo_memory_efficient": False}
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, ""),
        ({"slowmo_frequency": 10}, "not a multiple of localsgd_frequency=3"),
        ({"slowmo_frequency": 10, "slowmo_momentum": 0.0}, "no effect: slowmo_frequency"),
        ({"slowmo_base_algorithm": SGP}, "sends an all-reduce"),
        (sgp, ""),
        ({"nprocs_per_node": 2}, "there is one node only"),
        ({"use_streams": False}, "these arguments have no effect: use_streams=False"),
        ({**sgp, "synch_freq": 2}, "these arguments have no effect: synch_freq"),
    ]
    for given, message in cases:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            simulate(lambda rank, g={"nprocs_per_node": 1, **given}: wrap(**g))
        told = " ".join(str(w.message) for w in caught)
        assert message in told and bool(message) == bool(told)


# -- optimizers ----


class Unseen(torch.optim.SGD):
    """Its instances' step() has none of torch's hooks."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.step = self.bare  # type: ignore[method-assign]

    @torch.no_grad()
    def bare(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1)


def test_optimizers_that_do_not_fit_are_refused() -> None:
    def refused(message: str, call: Callable[[], object], kind: type = ValueError) -> None:
        with pytest.raises(kind, match=message):
            call()

    def run(rank: int) -> None:
        (model, optimizer), (moved, _) = tiny(rank), tiny(rank)
        sgd, perform = partial(torch.optim.SGD, lr=0.1), model.perform_slowmo
        stranger, unseen = sgd(nn.Linear(2, 2).parameters()), Unseen(moved.parameters(), lr=0.1)
        refused("holds none of the module's parameters", lambda: perform(stranger))
        refused("no step of this optimizer was seen", lambda: go(moved, unseen, rank, 1))
        go(model, optimizer, rank, 1)
        other = sgd([next(model.parameters())])
        refused("another optimizer than the one that moved", lambda: perform(other))
        for each in (sgd(model.parameters()), optimizer):  # the same parameters: a wrapper, say
            perform(each)
            refused("attached already", partial(la.attach, model, each, la.ddp()))
        for name in ("slowmo_momentum", "slowmo_frequency", "slowmo_num_shards"):
            text = f"{name} is fixed when the module is wrapped"
            refused(text, partial(setattr, model, name, 0.1), AttributeError)
        one, other_model = tiny(rank)[0], tiny(rank)[0]
        both = sgd([*one.parameters(), *other_model.parameters()])
        (one(batch(rank)) + other_model(batch(rank))).sum().backward()
        refused("one optimizer moves one wrapped module", both.step)
        model, _ = tiny(rank)
        params = list(model.parameters())
        body, head = sgd(params[:2]), sgd(params[2:])
        model(batch(rank)).sum().backward()
        body.step()
        refused("a second optimizer updates parameters", head.step)
        model, _ = tiny(rank)
        model(batch(rank)).sum().backward()
        own = sgd([*model.parameters(), nn.Parameter(torch.tensor([1.0 + rank]))])
        own.step()
        refused("put parameters of your own into", partial(model.perform_slowmo, own))

    simulate(run)


def test_optimizers_of_parts_and_of_two_modules() -> None:
    def part(rank: int) -> None:
        model, _ = tiny(rank)
        go(model, torch.optim.SGD(list(model.parameters())[:2], lr=0.1), rank, 1)

    def pair(rank: int) -> list[Tensor]:
        """As in adversarial training."""
        pairs = [tiny(rank, slowmo_frequency=6), tiny(10 + rank, slowmo_frequency=6)]
        for _ in range(6):
            for model, optimizer in pairs:
                go(model, optimizer, rank, 1)
        return [flat(model) for model, _ in pairs]

    with pytest.warns(UserWarning, match="2 trainable parameters of the module are not in"):
        simulate(part)
    one, two = simulate(pair)
    assert all(map(torch.equal, one, two)) and not torch.equal(*one)


def test_another_optimizer_over_the_same_parameters_takes_over_with_its_lr() -> None:
    def run(rank: int, fresh: bool) -> Any:
        model, optimizer = tiny(rank, slowmo_frequency=3)
        go(model, optimizer, rank, 2)
        if fresh:
            state = optimizer.state_dict()["state"]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
            for index, p in enumerate(model.parameters()):
                optimizer.state[p].update(state[index])
        optimizer.param_groups[0]["lr"] = 0.02
        go(model, optimizer, rank, 8)
        slow = model.synchronizer.state_dict()["rounds"][-1]["state"][0]["u"]
        return slow.clone(), flat(model)

    changed, taken = (simulate(partial(run, fresh=fresh)) for fresh in (False, True))
    for one, other in zip(changed, taken, strict=True):
        assert all(map(torch.equal, one, other))
    assert any(bool(slow.any()) for slow, _ in taken)


# -- what users do ----


def test_state_between_the_optimizers_step_and_the_call() -> None:
    """With push weights other than 1 x is then not the model's; and going back without the call."""

    def run(rank: int) -> None:
        graph = la.DynamicBipartiteExponentialGraph(rank, 3)
        (model, optimizer), (other, its) = (
            tiny(rank, slowmo_base_algorithm=SGP, graph=graph) for _ in range(2)
        )

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, t: int) -> None:
            model.zero_grad()
            model(batch(rank, t)).square().mean().backward()
            optimizer.step()
            model.zero_grad()

        def saved() -> Any:
            return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

        go(model, optimizer, rank, 3)
        good = saved()
        step(model, optimizer, 8)
        middle = saved()
        model.perform_slowmo(optimizer)
        go(other, its, rank, 1)
        for (weights, moments), left in ((middle, False), (good, True)):
            other.load_state_dict(weights)
            its.load_state_dict(moments)
            if left:
                step(other, its, 8)
            other.perform_slowmo(its)
            assert torch.equal(flat(other), flat(model))
            step(other, its, 9)  # and no call: back to what was good

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


def test_buffers_whose_shape_follows_the_data_are_each_ranks_own() -> None:
    """The others are averaged, here on one node without a slow step."""

    def run(rank: int) -> tuple[Tensor, Any, int]:
        torch.manual_seed(0)
        given = {**SHORT, "slowmo_frequency": 3, "slowmo_momentum": 0.0}
        model = SlowMoDistributedDataParallel(Cached(), 2, **given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for t in range(2):
            model(batch(rank, t)[: 3 + rank]).square().mean().backward()
            optimizer.step()
            model.zero_grad()
            model.perform_slowmo(optimizer)
        state = model.module.state_dict()
        return flat(model), state["inner.1.running_mean"], len(state["seen"])

    (x, mean, one), (y, other_mean, two) = simulate(run)
    assert torch.equal(x, y) and torch.equal(mean, other_mean) and bool(mean.any())
    assert (one, two) == (3, 4)


def test_detached_it_leaves_nothing_behind() -> None:
    def run(rank: int) -> Tensor:
        model, optimizer = tiny(rank, slowmo_frequency=3)
        go(model, optimizer, rank, 3)
        model.detach()
        before = model.stats().bytes_sent
        go(model, optimizer, rank, 3)
        assert model.stats().bytes_sent == before and model.num_updates == 3
        again = SlowMoDistributedDataParallel(model.module, 1, slowmo_frequency=3)
        assert again.num_updates == 0
        return go(again, optimizer, rank, 3)[2]

    assert torch.equal(*simulate(run))
