"""SlowMoDistributedDataParallel in hard places: what fairscale's gets wrong, and what users do."""

from __future__ import annotations

import contextlib
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
from torch import Tensor, nn

import laconic as la
import slowmo_training as loop
from laconic import SlowMoBaseAlgorithm, SlowMoDistributedDataParallel

import gloo

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:slowmo_memory_efficient=True sends"),
    pytest.mark.filterwarnings("ignore:there is one node only"),
    pytest.mark.filterwarnings("ignore:the optimizer moves float16 parameters"),
]
SGP = SlowMoBaseAlgorithm.SGP


# -- what the original gets wrong, and other hard places ----


def simulate(run: Any, workers: int = 4) -> list[Any]:
    return la.simulate(run, workers=workers)


def tiny(rank: int, **given: Any) -> tuple[SlowMoDistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(rank)
    model = SlowMoDistributedDataParallel(
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        **{"nprocs_per_node": 1, **given},
    )
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


def test_differently_seeded_ranks_start_from_rank_0s_parameters() -> None:
    def run(rank: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(rank)
        inner = nn.Linear(3, 2)
        own = loop.flat(inner)
        return own, loop.flat(SlowMoDistributedDataParallel(inner, 1))

    runs = simulate(run)
    assert not torch.equal(runs[0][0], runs[1][0])
    assert all(torch.equal(wrapped, runs[0][0]) for _, wrapped in runs)


def test_lr_zero_leaves_finite_equal_replicas() -> None:
    def run(rank: int) -> list[Tensor]:
        model, optimizer = tiny(rank, slowmo_frequency=4, localsgd_frequency=2)
        first = go(model, optimizer, rank, 4)
        optimizer.param_groups[0]["lr"] = 0.0
        return [*first, *go(model, optimizer, rank, 4)]

    runs = simulate(run)
    for t in (3, 7):
        assert torch.isfinite(runs[0][t]).all()
        assert all(torch.equal(run[t], runs[0][t]) for run in runs)
    assert all(torch.equal(x, runs[0][3]) for x in runs[0][4:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("base", list(SlowMoBaseAlgorithm))
def test_half_precision_parameters_without_masters(
    dtype: torch.dtype, base: SlowMoBaseAlgorithm
) -> None:
    def run(rank: int) -> list[Tensor]:
        torch.manual_seed(rank)
        model = SlowMoDistributedDataParallel(
            nn.Linear(6, 3).to(dtype),
            1,
            slowmo_frequency=4,
            localsgd_frequency=2,
            slowmo_base_algorithm=base,
        )
        return go(model, torch.optim.SGD(model.parameters(), lr=0.05), rank, 8)

    runs = simulate(run)
    for t in (3, 7):
        assert runs[0][t].dtype == dtype and torch.isfinite(runs[0][t]).all()
        assert all(torch.equal(run[t], runs[0][t]) for run in runs)


def test_frozen_parameters_stay_and_are_equal() -> None:
    def run(rank: int) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(rank)
        inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        inner[0].requires_grad_(False)
        model = SlowMoDistributedDataParallel(inner, 2, slowmo_frequency=4, localsgd_frequency=2)
        start = loop.flat(inner[0])
        trainable = [p for p in model.parameters() if p.requires_grad]
        trace = go(model, torch.optim.SGD(trainable, lr=0.1), rank, 4)
        assert torch.equal(loop.flat(inner[0]), start)
        return start, trace

    runs = simulate(run)
    assert all(torch.equal(start, runs[0][0]) for start, _ in runs)
    assert all(torch.equal(trace[3], runs[0][1][3]) for _, trace in runs)


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
        model = SlowMoDistributedDataParallel(
            Branching(), per_node, slowmo_frequency=4, localsgd_frequency=2, slowmo_momentum=0.0
        )
        start = loop.flat(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(1, 6) * (1 + rank)
        for _ in range(4):
            model(x, both=rank != 1).sum().backward()
            optimizer.step()
            model.zero_grad(set_to_none=True)
            model.perform_slowmo(optimizer)
        return start, loop.flat(model)

    runs = simulate(run)
    assert all(torch.equal(end, runs[0][1]) for _, end in runs)
    moved = runs[0][0] - runs[0][1]
    # gradients of a linear loss are constant: 4 steps of 0.1 times the mean over ranks of x
    bias = moved[-3:]
    assert torch.allclose(bias, torch.full((3,), 4 * 0.1 * 3 / 4))


def test_a_rank_that_never_has_a_gradient_does_not_hang_the_others(pool: gloo.Pool) -> None:
    assert pool.run(_one_without_gradients, ranks=4) == [True] * 4


def _one_without_gradients(rank: int) -> bool:
    with loop.over_gloo(4):
        torch.manual_seed(0)
        model = SlowMoDistributedDataParallel(
            nn.Linear(2, 2), 2, slowmo_frequency=2, localsgd_frequency=1
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            if rank != 3:
                model(torch.ones(1, 2) * rank).sum().backward()
            optimizer.step()
            model.zero_grad(set_to_none=True)
            model.perform_slowmo(optimizer)
        return True


def test_one_node_has_no_base_algorithm_and_says_so() -> None:
    def run(rank: int) -> tuple[list[Tensor], Any]:
        model, optimizer = tiny(rank, nprocs_per_node=4, slowmo_frequency=4)
        return go(model, optimizer, rank, 4), model.stats()

    with pytest.warns(UserWarning, match=r"there is one node only: .*; the slow step is on"):
        runs = simulate(run)
    for t in range(4):  # gradients are averaged at every step
        assert all(torch.equal(trace[t], runs[0][0][t]) for trace, _ in runs)
    assert runs[0][1].rounds == 1, "the slow step"


def test_momentum_0_and_slow_lr_1_switch_the_slow_step_off() -> None:
    def run(rank: int) -> tuple[int, Any]:
        model, optimizer = tiny(rank, slowmo_momentum=0.0, slowmo_frequency=4, localsgd_frequency=2)
        go(model, optimizer, rank, 8)
        return model.stats().rounds, model.synchronizer.state_dict()["rounds"]

    rounds, state = simulate(run)[0]
    assert rounds == 4 and len(state) == 1 and not any(state[0]["state"])


@pytest.mark.filterwarnings("ignore:the learning rate rose")
def test_a_scaler_that_skips_a_step_on_one_rank_hangs_nobody() -> None:
    """The first step, too, at which the wrapper learns of its optimiser."""

    def run(rank: int) -> tuple[int, Tensor]:
        model, optimizer = tiny(0, nprocs_per_node=1, slowmo_frequency=6)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for t, x in enumerate(loop.batches(rank, 6)):
            loss = model(x[:, :6]).square().mean()
            if (t, rank) in ((0, 2), (2, 1)):
                loss = loss * math.inf
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad(set_to_none=True)
            model.perform_slowmo(optimizer)
        return model.num_updates, loop.flat(model)

    runs = simulate(run)
    assert [calls for calls, _ in runs] == [6] * 4
    assert all(torch.equal(x, runs[0][1]) for _, x in runs)


def test_clipping_sees_the_nodes_mean_from_the_first_step_on() -> None:
    """Gradients are averaged inside the node when backward() returns, before any optimiser step
    told which optimiser there is."""

    def run(rank: int) -> list[Tensor]:
        torch.manual_seed(rank)
        model = SlowMoDistributedDataParallel(nn.Linear(3, 2), 2)
        model(torch.ones(1, 3) * (rank + 1)).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    runs = simulate(run)
    for rank, gradients in enumerate(runs):
        mean = 1.5 if rank < 2 else 3.5
        assert torch.equal(gradients[0], torch.full((2, 3), mean))


def test_gradients_accumulate_under_no_sync() -> None:
    def run(rank: int) -> tuple[Tensor, int]:
        torch.manual_seed(0)
        model = SlowMoDistributedDataParallel(nn.Linear(3, 2), 2)
        with model.no_sync():
            model(torch.ones(1, 3) * (rank + 1)).sum().backward()
        sent = model.stats().bytes_by_set.get("replica", 0)
        model(torch.ones(1, 3) * (rank + 1)).sum().backward()
        gradient = next(model.parameters()).grad
        assert gradient is not None
        return gradient.clone(), sent

    for rank, (gradient, sent) in enumerate(simulate(run)):
        assert sent == 0
        assert torch.equal(gradient, torch.full((2, 3), 3.0 if rank < 2 else 7.0))


def test_overlapped_gossip_conserves_what_there_is() -> None:
    """x and w of all workers and messages add up; after the slow step all are equal."""

    def run(rank: int, freq: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = SlowMoDistributedDataParallel(
            nn.Linear(6, 3).double(), 1, slowmo_base_algorithm=SGP, overlap=True, synch_freq=freq,
            slowmo_frequency=8, slowmo_momentum=0.3,
        )  # fmt: skip
        return go(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, 16)

    for freq in (0, 1, 3):
        runs = simulate(partial(run, freq=freq))
        for t in (7, 15):
            assert all(torch.equal(trace[t], runs[0][t]) for trace in runs)
        assert not torch.equal(runs[0][5], runs[1][5])


# -- half precision with float32 masters ----


def masters_run(
    rank: int, kind: str, dtype: torch.dtype, steps: int = 8, lose: bool = False, **given: Any
) -> tuple[list[Tensor], list[Tensor], Any]:
    torch.manual_seed(rank)
    model = SlowMoDistributedDataParallel(
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype),
        1, slowmo_frequency=4, localsgd_frequency=2, **given,
    )  # fmt: skip
    params = list(model.parameters())
    whole = torch.cat([p.detach().float().view(-1) for p in params])
    pieces = list(torch.split(whole, [p.numel() for p in params]))
    held = [whole] if kind in ("flat", "dict") else [piece.clone() for piece in pieces]
    fp32: Any = {"flat": whole, "list": held, "dict": {"all": whole}}[kind]
    optimizer = torch.optim.SGD(held, lr=0.05, momentum=0.9)
    masters, halves = [], []
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        x, y = (torch.randn(5, k, generator=generator).to(dtype) for k in (6, 3))
        nn.functional.mse_loss(model(x), y).backward()
        gradient = torch.cat([p.grad.float().view(-1) for p in params if p.grad is not None])
        for master, g in zip(held, torch.split(gradient, [h.numel() for h in held]), strict=True):
            master.grad = g.clone()
        optimizer.step()
        flat = torch.cat([master.view(-1) for master in held])
        for p, values in zip(params, torch.split(flat, [p.numel() for p in params]), strict=True):
            p.data.copy_(values.view_as(p))
        model.zero_grad(set_to_none=True)
        model.perform_slowmo(optimizer, fp32)
        masters.append(torch.cat([master.clone().view(-1) for master in held]))
        halves.append(loop.flat(model))
    return masters, halves, model.stats()


@pytest.mark.parametrize("kind", ["flat", "list", "dict"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_in_float32_are_what_is_averaged(kind: str, dtype: torch.dtype) -> None:
    """Averages travel in half precision and what rounding cuts off stays: their mean is conserved;
    slow steps leave equal masters."""
    runs = simulate(lambda rank: masters_run(rank, kind, dtype))
    for t in (3, 7):
        assert all(torch.equal(masters[t], runs[0][0][t]) for masters, _, _ in runs)
    for masters, halves, _ in runs:
        for t in (1, 3, 5, 7):
            assert torch.equal(masters[t].to(dtype), halves[t])
    spread = max((masters[1] - runs[0][0][1]).abs().max() for masters, _, _ in runs)
    assert 0 < spread < 0.01, "each keeps what rounding cut off"


def test_masters_follow_the_formula_of_rounded_averages() -> None:
    """Against a loop without laconic, whose ranks are this process's."""
    steps, n, dtype = 4, 3, torch.float16
    runs = simulate(lambda rank: masters_run(rank, "flat", dtype, steps), n)
    plain = [masters_run_alone(rank, dtype, steps) for rank in range(n)]
    assert len(plain) == n
    x0, before = plain[0][0], torch.stack([p[1] for p in plain])
    rounded = before.to(dtype)
    mean = sum(rounded[r].float() for r in range(n)) / n
    expected = before - rounded.float() + mean.to(dtype).float()
    for rank, (masters, _, _) in enumerate(runs):
        assert torch.allclose(masters[1], expected[rank], rtol=0, atol=1e-7)
        assert not torch.equal(masters[1], x0)


def masters_run_alone(rank: int, dtype: torch.dtype, steps: int) -> tuple[Tensor, Tensor]:
    """The start, and the masters after two local steps, from rank 0's start."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    params = list(model.parameters())
    master = torch.cat([p.detach().float().view(-1) for p in params])
    start = master.clone()
    optimizer = torch.optim.SGD([master], lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(2):
        x, y = (torch.randn(5, k, generator=generator).to(dtype) for k in (6, 3))
        model.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        master.grad = torch.cat([p.grad.float().view(-1) for p in params if p.grad is not None])
        optimizer.step()
        for p, values in zip(params, torch.split(master, [p.numel() for p in params]), strict=True):
            p.data.copy_(values.view_as(p))
    return start, master.clone()


def test_masters_travel_in_half_precision_and_slow_steps_in_float32() -> None:
    def bytes_of(**given: Any) -> int:
        runs = simulate(lambda rank: masters_run(rank, "flat", torch.float16, 4, **given))
        return int(runs[0][2].bytes_by_set["workers"])

    elements = 6 * 8 + 8 + 8 * 3 + 3
    padded = math.ceil(elements / 4) * 4
    once = 2 * 3 * padded // 4  # 2(n-1)/n of the elements
    assert bytes_of(slowmo_momentum=0.0) == 2 * once * 2  # two averages of two bytes
    assert bytes_of() == once * 2 + once * 4  # one of them in the slow step, of four


# -- arguments ----


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nprocs_per_node": 0}, "nprocs_per_node .* must be an integer of at least 1"),
        ({"nprocs_per_node": 3}, "divide their number: there are 4 ranks"),
        ({"slowmo_base_algorithm": "adpsgd"}, "must be one of .*localsgd.*'adpsgd'|LOCALSGD"),
        ({"slowmo_momentum": 1.0}, "slowmo_momentum must be"),
        ({"slowmo_momentum": "much"}, "slowmo_momentum must be"),
        ({"slowmo_lr": 0.0}, "slowmo_lr must be"),
        ({"slowmo_frequency": 0}, "slowmo_frequency must be"),
        ({"localsgd_frequency": 2.5}, "localsgd_frequency must be"),
        ({"slowmo_num_shards": 0}, "slowmo_num_shards must be"),
        ({"broadcast_buffers": 1}, "broadcast_buffers must be True or False"),
        ({"graph": "ring"}, "graph must be one of laconic's .*RingGraph"),
        ({"graph": la.RingGraph(0, 7)}, "graph is of node 0 of 7"),
        ({"mixing": 0.5}, "mixing must be a laconic.UniformMixing"),
        ({"overlap": True}, "overlap=True is for .*SGP; local SGD"),
        ({"process_world_size": 5}, "process_world_size is 5, where laconic finds 4"),
        ({"process_rank": 9}, "process_rank is 9"),
        ({"comm_device": "cuda"}, "comm_device must be"),
    ],
)
def test_bad_arguments_are_one_line_on_every_rank(given: dict[str, Any], message: str) -> None:
    def run(rank: int) -> bool:
        with pytest.raises(ValueError, match=message) as caught:
            SlowMoDistributedDataParallel(nn.Linear(2, 2), **{"nprocs_per_node": 1, **given})
        assert "\n" not in str(caught.value)
        return True

    assert simulate(run) == [True] * 4


def test_gossip_without_push_weights_refuses_uneven_graphs() -> None:
    def run(rank: int) -> bool:
        graph = la.DynamicBipartiteExponentialGraph(rank, 3)
        with pytest.raises(ValueError, match="push_sum=False needs a graph"):
            SlowMoDistributedDataParallel(
                nn.Linear(2, 2), 1, slowmo_base_algorithm=SGP, graph=graph, push_sum=False
            )
        return True

    assert simulate(run, 3) == [True] * 3


def test_ranks_that_say_different_things_all_get_an_error() -> None:
    def run(rank: int) -> bool:
        with pytest.raises(ValueError, match="attach something else than rank 0"):
            SlowMoDistributedDataParallel(nn.Linear(2, 2), 1, slowmo_frequency=9 + 3 * (rank == 2))
        return True

    assert simulate(run) == [True] * 4


def test_nodes_of_unequal_size_are_an_error_on_every_rank(pool: gloo.Pool) -> None:
    """Under torchrun LOCAL_WORLD_SIZE tells: here three ranks on one host and one on another."""
    messages = pool.run(_unequal_nodes, ranks=4)
    assert all("must divide the number of ranks on every host" in m for m in messages)
    assert all("[3, 3, 3, 1]" in m for m in messages)


def _unequal_nodes(rank: int) -> str:
    patch = pytest.MonkeyPatch()
    with patch.context() as env:
        env.setenv("LOCAL_WORLD_SIZE", "1" if rank == 3 else "3")
        # the wrapper's own link, not one that a simulation would give it
        with pytest.raises(ValueError) as caught:
            SlowMoDistributedDataParallel(nn.Linear(2, 2), 2)
    return str(caught.value)


def test_what_the_original_advises_against_is_warned_of() -> None:
    def messages(**given: Any) -> list[str]:
        def run(rank: int) -> None:
            SlowMoDistributedDataParallel(nn.Linear(2, 2), 1, **given)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            simulate(run, 2)
        return [str(w.message) for w in caught]

    assert messages() == []
    assert "no multiple of localsgd_frequency=3" in messages(slowmo_frequency=10)[0]
    assert messages(slowmo_frequency=10, slowmo_momentum=0.0) == []
    assert "sends an all-reduce" in messages(slowmo_base_algorithm=SGP)[0]
    assert messages(slowmo_base_algorithm=SGP, slowmo_memory_efficient=False) == []
    assert "without effect here: use_streams=False" in messages(use_streams=False)[0]
    assert (
        "without effect here: synch_freq"
        in messages(slowmo_base_algorithm=SGP, slowmo_memory_efficient=False, synch_freq=2)[0]
    )


def test_a_call_out_of_order_is_an_error_that_says_so() -> None:
    def run(rank: int) -> bool:
        model, optimizer = tiny(rank)
        stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        with pytest.raises(ValueError, match="holds none of the module's parameters"):
            model.perform_slowmo(stranger)
        go(model, optimizer, rank, 1)
        other = torch.optim.SGD([next(model.parameters())], lr=0.1)
        with pytest.raises(ValueError, match="another optimizer than the one that moved"):
            model.perform_slowmo(other)
        same = torch.optim.SGD(model.parameters(), lr=0.1)
        model.perform_slowmo(same)  # the same parameters: a wrapper around the optimiser, say
        with pytest.raises(ValueError, match="attached already"):
            la.attach(model, optimizer, la.ddp())
        return True

    assert simulate(run, 2) == [True, True]


def test_parameters_outside_the_optimizer_are_named() -> None:
    def run(rank: int) -> bool:
        model, _ = tiny(rank)
        some = torch.optim.SGD(list(model.parameters())[:2], lr=0.1)
        with pytest.warns(UserWarning, match="2 trainable parameters of the module are not in"):
            go(model, some, rank, 1)
        return True

    assert simulate(run, 2) == [True, True]


# -- profile and logs ----


def test_profile_mode_prints_the_parts_and_writes_a_trace(pool: gloo.Pool, tmp_path: Path) -> None:
    tables = pool.run(_profiled, str(tmp_path), ranks=2)
    lines = [line.split() for line in tables[0].splitlines()]
    assert tables[1] == ""
    heads = [line for line in lines if line[:2] == ["part", "calls"]]
    assert len(heads) == 2, "one table for each slow step"
    parts = {" ".join(line[:-3]): line[-3:] for line in lines if len(line) > 3}
    assert parts["SlowMomentum round"][0] == "1"
    assert parts["Average round"][0] == "1"
    assert parts["forward"][0] == parts["perform_slowmo, all of it"][0] == "6"
    # 75 numbers in float32, padded to 76, twice half of them
    assert float(parts["Average round"][2]) == pytest.approx(76 * 4 / 1e6, abs=6e-4)
    for rank in range(2):
        trace = json.loads((tmp_path / f"slowmo_trace.rank{rank}.json").read_text())
        names = [event.get("name") for event in trace["traceEvents"]]
        assert names.count("slowmo: perform_slowmo, all of it") >= 4


def _profiled(rank: int, directory: str) -> str:

    patch = pytest.MonkeyPatch()
    with (
        loop.over_gloo(2),
        patch.context() as env,
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
        simulate(run, 2)
    records = [json.loads(r.message) for r in caplog.records if r.name == "laconic.slowmo"]
    own = [r for r in records if r["rank"] == 1 and r["event"] == "steps"]
    assert [r["step"] for r in own] == [1, 2, 3, 4, 5, 6]
    assert [call["name"] for call in own[5]["calls"]] == ["SlowMomentum round"]
