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
from torch import Tensor, nn

import laconic as la
from laconic import SlowMoBaseAlgorithm, SlowMoDistributedDataParallel
from laconic.compat import fairscale

from tests.support import gloo
from tests.support import slowmo_training as loop

pytestmark = [
    pytest.mark.filterwarnings("ignore:slowmo_memory_efficient=True sends"),
    pytest.mark.filterwarnings("ignore:there is one node only"),
    pytest.mark.filterwarnings("ignore:the optimizer updates float16 parameters"),
]
SGP = SlowMoBaseAlgorithm.SGP


def test_the_timeout_is_that_of_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def own_link(device: torch.device, timeout: float) -> la.links.Link:
        given.append(timeout)
        return original(device, timeout)

    original = fairscale.own_link
    monkeypatch.setattr(fairscale, "own_link", own_link)
    simulate(lambda rank: tiny(rank, timeout=7.0)[0].detach(), workers=2)
    simulate(lambda rank: tiny(rank)[0].detach(), workers=1)
    assert given == [7.0, 7.0, la.errors.TIMEOUT]


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
    """The first step, too, at which the wrapper learns of its optimizer."""

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
    """Gradients are averaged inside the node when backward() returns, before any optimizer step
    told which optimizer there is."""

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
    """x and w of all workers and messages add up; after the slow step all are equal. A message is
    sent every max(1, synch_freq) calls."""

    def run(rank: int, freq: int) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        model = SlowMoDistributedDataParallel(
            nn.Linear(6, 3).double(), 1, slowmo_base_algorithm=SGP, overlap=True, synch_freq=freq,
            slowmo_frequency=8, slowmo_momentum=0.3,
        )  # fmt: skip
        trace = go(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, 16)
        return trace, model.stats().rounds

    for freq, gossips in ((0, 14), (1, 14), (3, 5)):
        made = simulate(partial(run, freq=freq))
        assert [rounds for _, rounds in made] == [2 + gossips] * 4, "and two slow steps"
        runs = [trace for trace, _ in made]
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
        with pytest.raises(ValueError, match="attach something other than rank 0"):
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
    assert "not a multiple of localsgd_frequency=3" in messages(slowmo_frequency=10)[0]
    assert messages(slowmo_frequency=10, slowmo_momentum=0.0) == []
    assert "sends an all-reduce" in messages(slowmo_base_algorithm=SGP)[0]
    assert messages(slowmo_base_algorithm=SGP, slowmo_memory_efficient=False) == []
    assert "these arguments have no effect: use_streams=False" in messages(use_streams=False)[0]
    assert (
        "these arguments have no effect: synch_freq"
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
        model.perform_slowmo(same)  # the same parameters: a wrapper around the optimizer, say
        with pytest.raises(ValueError, match="attached already"):
            la.attach(model, same, la.ddp())
        model.perform_slowmo(optimizer)  # and back
        with pytest.raises(ValueError, match="attached already"):
            la.attach(model, optimizer, la.ddp())
        return True

    assert simulate(run, 2) == [True, True]


def test_parameters_outside_the_optimizer_are_named() -> None:
    def run(rank: int) -> None:
        model, _ = tiny(rank)
        go(model, torch.optim.SGD(list(model.parameters())[:2], lr=0.1), rank, 1)

    with pytest.warns(UserWarning, match="2 trainable parameters of the module are not in"):
        simulate(run, 2)


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
    assert parts["forward"][0] == parts["perform_slowmo, total"][0] == "6"
    # 75 numbers in float32, padded to 76, twice half of them
    assert float(parts["Average round"][2]) == pytest.approx(76 * 4 / 1e6, abs=6e-4)
    for rank in range(2):
        trace = json.loads((tmp_path / f"slowmo_trace.rank{rank}.json").read_text())
        names = [event.get("name") for event in trace["traceEvents"]]
        assert names.count("slowmo: perform_slowmo, total") >= 4


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


# -- what users do ----


def test_half_and_full_precision_in_one_module_with_masters_for_some() -> None:
    """The node's gradients are the same at every step, masters or not."""

    def run(rank: int) -> list[bool]:
        torch.manual_seed(rank)
        half, norm = nn.Linear(6, 6).half(), nn.LayerNorm(6)
        module = nn.ModuleList([half, norm])
        model = SlowMoDistributedDataParallel(module, 2, slowmo_frequency=6)
        masters = [p.detach().float() for p in half.parameters()]
        masters += list(norm.parameters())
        optimizer = torch.optim.SGD(masters, lr=0.1)
        same = []
        for x in loop.batches(rank, 4):
            norm(half(x[:, :6].half()).float()).square().sum().backward()
            flat = torch.cat(
                [p.grad.float().view(-1) for p in module.parameters() if p.grad is not None]
            )
            with torch.no_grad():
                for p, master in zip(half.parameters(), masters, strict=False):
                    assert p.grad is not None
                    master.grad = p.grad.float()
            optimizer.step()
            model.zero_grad(set_to_none=True)
            model.perform_slowmo(optimizer, masters)
            same.append(flat)
        return same

    runs = simulate(run)
    for t in range(4):
        assert torch.equal(runs[0][t], runs[1][t]) and torch.equal(runs[2][t], runs[3][t])


def test_sharded_modules_are_refused(pool: gloo.Pool) -> None:
    messages = pool.run(_sharded, ranks=4)
    assert all("use laconic.attach(..., laconic.slowmo(...), mesh=)" in m for m in messages)


def _sharded(rank: int) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = nn.Linear(4, 4)
    fully_shard(module, mesh=init_device_mesh("cpu", (4,)))
    with pytest.raises(ValueError) as caught:
        SlowMoDistributedDataParallel(module, 1)
    return str(caught.value)


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

    runs = simulate(run)
    mean = torch.stack([own for own, _, _, _ in runs]).mean(0)
    for own, inside, back, end in runs:
        assert torch.equal(own, back)
        assert torch.allclose(inside, mean, rtol=0, atol=1e-6)
        assert torch.equal(end, inside)


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
        for found in simulate(run):
            assert torch.allclose(found, torch.tensor([1 - 3 * 0.1 * 2.5]))
    else:
        with pytest.raises(ValueError, match="put parameters of your own into the module"):
            simulate(run)


def test_another_optimizer_over_the_same_parameters_takes_over_with_its_lr() -> None:
    def run(rank: int, fresh: bool) -> Tensor:
        model, optimizer = tiny(rank, slowmo_frequency=3)
        go(model, optimizer, rank, 4)
        if fresh:
            state = optimizer.state_dict()["state"]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
            for index, p in enumerate(model.parameters()):
                optimizer.state[p].update(state[index])
        else:
            optimizer.param_groups[0]["lr"] = 0.02
        return go(model, optimizer, rank, 8)[-1]

    changed, taken = (simulate(partial(run, fresh=fresh)) for fresh in (False, True))
    assert all(map(torch.equal, changed, taken))


def test_it_takes_over_with_its_lr_where_its_first_step_is_skipped() -> None:
    def run(rank: int, fresh: bool) -> Tensor:
        model, optimizer = tiny(rank, slowmo_frequency=3)
        go(model, optimizer, rank, 2)
        optimizer.param_groups[0]["lr"] = 0.1 if fresh else 0.02
        if fresh:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        model.perform_slowmo(optimizer)
        kept = model.synchronizer.state_dict()["rounds"][-1]["state"][0]["u"]
        return kept.clone()

    changed, taken = (simulate(partial(run, fresh=fresh)) for fresh in (False, True))
    assert all(map(torch.equal, changed, taken)) and any(bool(u.any()) for u in taken)


class Unseen(torch.optim.SGD):
    """Its instances' step() has none of torch's hooks."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.step = self._bare  # type: ignore[method-assign]

    @torch.no_grad()
    def _bare(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])


def test_an_optimizer_whose_first_step_is_not_seen_is_refused() -> None:
    def run(rank: int) -> bool:
        model, _ = tiny(rank)
        optimizer = Unseen(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="no step of this optimizer was seen"):
            go(model, optimizer, rank, 1)
        return True

    assert simulate(run, 2) == [True, True]


def test_a_second_optimizer_of_the_same_module_is_an_error() -> None:
    def run(rank: int) -> bool:
        model, _ = tiny(rank)
        halves = list(model.parameters())
        body, head = (torch.optim.SGD(part, lr=0.1) for part in (halves[:2], halves[2:]))
        model(torch.ones(1, 6)).sum().backward()
        body.step()
        with pytest.raises(
            ValueError, match="a second optimizer updates parameters of this module"
        ):
            head.step()
        return True

    assert simulate(run, 1) == [True]


def test_one_optimizer_of_two_wrapped_modules_is_an_error_on_every_rank(pool: gloo.Pool) -> None:
    assert pool.run(_two_wrapped, ranks=2) == [True, True]


def _two_wrapped(rank: int) -> bool:
    with loop.over_gloo(2):
        one = SlowMoDistributedDataParallel(nn.Linear(2, 2), 1)
    with loop.over_gloo(2):
        other = SlowMoDistributedDataParallel(nn.Linear(2, 2), 1)
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    (one(torch.ones(1, 2)) + other(torch.ones(1, 2))).sum().backward()
    with pytest.raises(ValueError, match="one optimizer moves one wrapped module"):
        optimizer.step()
    return True


def test_two_wrapped_modules_with_an_optimizer_each() -> None:
    """As in adversarial training."""

    def run(rank: int) -> list[Tensor]:
        pairs = [tiny(rank, slowmo_frequency=6), tiny(10 + rank, slowmo_frequency=6)]
        for _ in range(6):
            for model, optimizer in pairs:
                go(model, optimizer, rank, 1)
        return [loop.flat(model) for model, _ in pairs]

    runs = simulate(run)
    assert all(torch.equal(run[k], runs[0][k]) for run in runs for k in (0, 1))
    assert not torch.equal(runs[0][0], runs[0][1])


def test_a_collective_of_the_users_after_a_skipped_first_step(pool: gloo.Pool) -> None:
    """Nothing is sent while the optimizer steps, which one rank does not do."""
    assert pool.run(_logs_in_between, ranks=2) == [True, True]


def _logs_in_between(rank: int) -> bool:
    import torch.distributed as dist

    with loop.over_gloo(2):
        model, optimizer = tiny(0, slowmo_frequency=3)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        group = gloo._groups[2]
        for t, x in enumerate(loop.batches(rank, 3)):
            loss = model(x[:, :6]).square().mean() * (math.inf if (rank, t) == (1, 0) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            dist.all_reduce(torch.ones(1), group=group)
            scaler.update()
            model.zero_grad(set_to_none=True)
            model.perform_slowmo(optimizer)
        return model.num_updates == 3


def test_state_between_the_optimizers_step_and_the_call() -> None:
    """With push weights other than 1 x is then not the model's; and going back without the call."""

    def run(rank: int) -> tuple[bool, bool]:
        graph = la.DynamicBipartiteExponentialGraph(rank, 3)

        def make() -> tuple[SlowMoDistributedDataParallel, torch.optim.Optimizer]:
            return tiny(rank, slowmo_base_algorithm=SGP, graph=graph)

        def half_a_step(model: Any, optimizer: Any, x: Tensor) -> None:
            model(x[:, :6]).square().mean().backward()
            optimizer.step()

        data = loop.batches(rank, 4)
        model, optimizer = make()
        go(model, optimizer, rank, 3)
        good = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        half_a_step(model, optimizer, data[0])
        middle = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        model.zero_grad()
        model.perform_slowmo(optimizer)
        end = loop.flat(model)

        other, second = make()
        go(other, second, rank, 1)
        other.load_state_dict(middle[0])
        second.load_state_dict(middle[1])
        other.perform_slowmo(second)
        resumed = torch.equal(loop.flat(other), end)

        half_a_step(other, second, data[1])  # and no call: back to what was good
        other.load_state_dict(good[0])
        second.load_state_dict(good[1])
        other.zero_grad()
        half_a_step(other, second, data[0])
        other.zero_grad()
        other.perform_slowmo(second)
        return resumed, torch.equal(loop.flat(other), end)

    assert simulate(run, 3) == [(True, True)] * 3


def test_one_node_without_a_slow_step_still_averages_buffers() -> None:
    def run(rank: int) -> Tensor:
        torch.manual_seed(0)
        model = SlowMoDistributedDataParallel(loop.Wide(8, 4), 2, slowmo_momentum=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in loop.batches(rank, 3):
            loop.square_step(model, optimizer, x)
        means: Tensor = model.module.layers[1].running_mean  # type: ignore[index, assignment, union-attr]
        return means.clone()

    one, other = simulate(run, 2)
    assert torch.equal(one, other) and bool(one.any())


class Cached(nn.Module):
    """A buffer whose length follows the data, as that of positions does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.zeros(len(x))
        out: Tensor = self.inner(x)
        return out


def test_a_buffer_whose_shape_follows_the_data() -> None:
    def run(rank: int) -> Tensor:
        torch.manual_seed(0)
        model = SlowMoDistributedDataParallel(Cached(), 1, slowmo_frequency=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in loop.batches(rank, 3):
            loop.square_step(model, optimizer, x[: 4 + rank, :6])
        return loop.flat(model)

    one, other = simulate(run, 2)
    assert torch.equal(one, other)


def test_a_consensus_of_buffers_whose_shape_follows_the_data() -> None:
    """Those that not all ranks have alike are each rank's own."""

    def run(rank: int) -> tuple[Tensor, int]:
        torch.manual_seed(0)
        model = Cached()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with la.attach(model, optimizer, la.local_sgd(2)):
            for x in loop.batches(rank, 3):
                optimizer.zero_grad()
                model(x[: 4 + rank, :6]).square().mean().backward()
                optimizer.step()
        return loop.flat(model), len(model.seen)

    (one, seen), (other, there) = simulate(run, 2)
    assert torch.equal(one, other) and (seen, there) == (4, 5)


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

    (one, calls), (other, _) = simulate(run, 2)
    assert torch.equal(one, other) and calls == 6


def test_detached_it_averages_no_more_and_can_be_wrapped_again() -> None:
    def run(rank: int) -> tuple[int, list[Tensor]]:
        model, optimizer = tiny(rank, slowmo_frequency=3)
        go(model, optimizer, rank, 3)
        model.detach()
        before = model.stats().bytes_sent
        go(model, optimizer, rank, 3)
        assert model.stats().bytes_sent == before and model.num_updates == 3
        again = SlowMoDistributedDataParallel(model.module, 1, slowmo_frequency=3)
        return again.num_updates, go(again, optimizer, rank, 3)

    runs = simulate(run, 2)
    assert runs[0][0] == 0 and torch.equal(runs[0][1][2], runs[1][1][2])


def test_a_wrapper_that_is_dropped_leaves_nothing_behind() -> None:
    def run(rank: int) -> int:
        module = nn.Linear(6, 3)
        for _ in range(3):
            SlowMoDistributedDataParallel(module, 2)
            gc.collect()
        hooks = [p._post_accumulate_grad_hooks for p in module.parameters()]
        return sum(len(h or ()) for h in hooks)

    assert simulate(run, 2) == [0, 0]


def test_channels_last_half_precision_with_masters() -> None:
    def run(rank: int) -> Tensor:
        torch.manual_seed(rank)
        inner = nn.Conv2d(3, 4, 3).half().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model = SlowMoDistributedDataParallel(inner, 1, slowmo_frequency=3)
        masters = [p.detach().float() for p in inner.parameters()]
        optimizer = torch.optim.SGD(masters, lr=0.1)
        for step in range(3):
            for master in masters:
                master.grad = torch.full_like(master, float(rank + step))
            optimizer.step()
            model.perform_slowmo(optimizer, masters)
        assert inner.weight.is_contiguous(memory_format=torch.channels_last)
        assert all(map(torch.equal, inner.parameters(), (m.half() for m in masters)))
        return loop.flat(model)

    one, other = simulate(run, 2)
    assert torch.equal(one, other)


def test_arguments_that_are_wrong_on_one_rank_are_an_error_on_all() -> None:
    def run(rank: int) -> str:
        with pytest.raises(ValueError) as caught:
            SlowMoDistributedDataParallel(
                nn.Linear(2, 2), 1, slowmo_base_algorithm=SGP, graph=la.RingGraph(0, 3)
            )
        return str(caught.value)

    messages = simulate(run, 3)
    assert messages[0] == f"rank 1: {messages[1]}; rank 2: {messages[2]}"
    assert all("graph is of node 0 of 3, but this is node" in m for m in messages[1:])


def test_settings_are_fixed_when_the_module_is_wrapped() -> None:
    def run(rank: int) -> bool:
        model, _ = tiny(rank)
        for name in ("slowmo_momentum", "slowmo_frequency", "slowmo_num_shards"):
            with pytest.raises(AttributeError, match=f"{name} is fixed when the module is wrapped"):
                setattr(model, name, 0.1)
        return True

    assert simulate(run, 1) == [True]


def test_a_trace_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor is one begun where the user has a profiler at work."""
    link = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    model, optimizer = la.simulate(
        lambda rank: tiny(rank, profile_mode=True, slowmo_frequency=3), workers=1
    )[0]
    profile = model._profile
    assert profile is not None
    profile._traces = True
    with link:
        go(model, optimizer, 0, 6)
    assert "torch profiler trace" not in capsys.readouterr().out
    assert any("slowmo" in event.name for event in link.events() or ())

    model, optimizer = la.simulate(
        lambda rank: tiny(rank, profile_mode=True, slowmo_frequency=3), workers=1
    )[0]
    profile = model._profile
    assert profile is not None
    profile._traces = True
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.warns(UserWarning, match="cannot write the profiler trace"):
        go(model, optimizer, 0, 6)
