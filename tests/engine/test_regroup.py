"""A checkpoint goes on with another number of workers, or without the files of some of them."""

from __future__ import annotations

import logging
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import laconic as la

from tests.support import gloo
from tests.support.all_recipes import ROWS, Run
from tests.support.recipes import Row

SAVED_AT, END = 7, 13
"""No outer step of the recipes falls on the first, and messages are in flight then."""


@dataclass(frozen=True)
class Saved:
    """What a rank had when it saved, and after it had gone on."""

    x: Tensor
    consensus: Tensor
    momenta: Tensor
    rounds: list[Any]
    after: list[Tensor]


def folder_of(base: Path, rank: int, shared: bool) -> Path:
    return base / ("all" if shared else f"host{rank}")


def saved_runs(row: Row, ranks: int, base: Path, *, shared: bool) -> list[Saved]:
    def run(rank: int) -> Saved:
        own = Run(row, ranks, rank)
        own.go(SAVED_AT)
        own.save(folder_of(base, rank, shared))
        rounds = own.sync.state_dict()["rounds"]
        before = own.flat(), own.consensus(), own.momenta().clone(), rounds
        return Saved(*before, own.go(END))

    return la.simulate(run, workers=ranks)


def test_the_weights_of_gossip_count_in_what_is_left(tmp_path: Path) -> None:
    """The push weights of lost workers are missing from the sum that the others' are divided by."""
    row = ROWS["sgp, bipartite"]
    saved = saved_runs(row, 5, tmp_path, shared=True)
    next((tmp_path / "all").glob("rank-2-*.pt")).unlink()

    def run(rank: int) -> tuple[Tensor, float]:
        own = Run(row, 5, rank)
        own.load(tmp_path / "all")
        (state,) = own.sync.state_dict()["rounds"][0]["state"]
        return own.flat(), float(state["w"])

    weights = torch.tensor([float(one.rounds[0]["state"][0]["w"]) for one in saved]).double()
    assert float(weights.std()) > 0.1, "they are worth a test"
    kept = [0, 1, 3, 4]
    mean = torch.stack([weights[r] * saved[r].x for r in kept]).sum(0) / weights[kept].sum()
    for x, w in la.simulate(run, workers=5):
        assert float((x - mean).abs().max()) < 1e-12 and w == 1.0


def test_a_lost_slice_of_outer_state_begins_anew(tmp_path: Path) -> None:
    row = ROWS["diloco"]
    saved = saved_runs(row, 4, tmp_path, shared=True)
    next((tmp_path / "all").glob("rank-2-*.pt")).unlink()

    def run(rank: int) -> tuple[Tensor, Any]:
        own = Run(row, 4, rank)
        own.load(tmp_path / "all")
        return own.flat(), own.sync.state_dict()["rounds"][0]

    for rank, (x, loaded) in enumerate(la.simulate(run, workers=4)):
        state, start = loaded["state"][0], loaded["starts"][0]
        if rank == 2:
            stop = min(start + state["anchor"].numel(), x.numel())
            assert torch.equal(state["anchor"][: stop - start], x[start:stop])
            assert not state["m"].any()
        else:
            before = saved[rank].rounds[0]["state"][0]
            assert torch.equal(state["anchor"], before["anchor"])
            assert torch.equal(state["m"], before["m"]) and before["m"].any()


def test_ranks_that_changed_hosts_go_on_bit_for_bit(tmp_path: Path) -> None:
    """Each host has its own directory, and the launcher numbers the hosts anew."""
    row = ROWS["slowmo over late sgp"]
    saved = saved_runs(row, 3, tmp_path, shared=False)

    def run(rank: int) -> list[Tensor]:
        own = Run(row, 3, rank)
        own.load(folder_of(tmp_path, (rank + 1) % 3, False))
        return own.go(END)

    for rank, trace in enumerate(la.simulate(run, workers=3)):
        assert all(torch.equal(a, b) for a, b in zip(trace, saved[rank].after, strict=True))
    assert not list(tmp_path.glob("*/received-*")), "what was sent is deleted"


def test_one_line_says_what_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved_runs(ROWS["local_sgd"], 4, tmp_path, shared=True)
    next((tmp_path / "all").glob("rank-2-*.pt")).unlink()
    with caplog.at_level(logging.WARNING, "laconic"):
        la.simulate(lambda r: Run(ROWS["local_sgd"], 3, r).load(tmp_path / "all"), workers=3)
    (record,) = caplog.records
    said = record.getMessage()
    for text in ("4 workers (4 ranks)", "the files of rank 2 are lost", "3 workers (3", "step 7"):
        assert text in said


def test_nothing_left_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    saved_runs(ROWS["local_sgd"], 2, tmp_path, shared=True)
    for file in (tmp_path / "all").glob("*.pt"):
        file.unlink()

    def run(rank: int) -> str:
        own = Run(ROWS["local_sgd"], 2, rank)
        before = own.flat()
        with pytest.raises(ValueError) as caught:
            own.load(tmp_path / "all")
        assert torch.equal(before, own.flat())
        return str(caught.value)

    found = la.simulate(run, workers=2)
    assert found[0] == found[1] and "the files of ranks 0, 1 are lost" in found[0]


def test_a_state_that_is_refused_leaves_the_model_as_it_was() -> None:
    row = ROWS["sgp, late"]

    def save(rank: int) -> Any:
        own = Run(row, 3, rank)
        own.go(SAVED_AT)
        return own.sync.state_dict()

    saved = la.simulate(save, workers=3)
    del saved[2]["rounds"][0]["state"]

    def run(rank: int) -> bool:
        own = Run(row, 2, rank)
        before = own.flat()
        with pytest.raises(ValueError, match="not what"):
            own.sync.load_state_dict(saved)
        return torch.equal(before, own.flat())

    assert all(la.simulate(run, workers=2))


@pytest.mark.parametrize("buffers", ["average", "keep"])
def test_what_finish_does_not_average_stays_the_ranks_own(buffers: Any, tmp_path: Path) -> None:
    """Buffers are averaged over all ranks, or kept; a personal layer is nobody else's."""

    class Both(Run):
        def __init__(self, rank: int, ranks: int) -> None:
            super().__init__(ROWS["local_sgd"], ranks, rank, nprocs_per_node=2, buffers=buffers)
            torch.manual_seed(50 + rank)
            self.head = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2)).double()
            self.optimizer.add_param_group({"params": [self.head[1].weight]})

        def every(self) -> dict[str, Tensor]:
            both = {**self.model.state_dict(), **self.head.state_dict(prefix="head.")}
            return {k: v.clone() for k, v in both.items()}

        def steps(self, end: int) -> None:
            while self.sync.step < end:
                self.optimizer.zero_grad()
                x = torch.randn(4, 8, dtype=torch.float64) + self.rank
                (self.model(x).sum() + self.head(x).square().sum()).backward()
                self.optimizer.step()

    others = lambda own: {"head": own.head}  # noqa: E731

    def save(rank: int) -> dict[str, Tensor]:
        own = Both(rank, 6)
        own.steps(SAVED_AT)
        la.save(tmp_path, own.model, own.optimizer, others=others(own))
        before = own.every()
        own.sync.finish()
        kept = ("head.0.running_mean", "head.1.bias")
        return {k: before[k] if k in kept else v for k, v in own.every().items()}

    def load(rank: int) -> dict[str, Tensor]:
        own = Both(rank, 4)
        la.load(tmp_path, own.model, own.optimizer, others=others(own))
        return own.every()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved, loaded = la.simulate(save, workers=6), la.simulate(load, workers=4)
    for rank, found in enumerate(loaded):
        for key, value in found.items():
            assert torch.allclose(value, saved[rank][key], rtol=0, atol=1e-12), key
    assert not torch.equal(saved[0]["head.0.running_mean"], saved[1]["head.0.running_mean"])


@pytest.mark.parametrize("persistent", [True, False])
def test_infinities_of_a_buffer_stay_infinite(persistent: bool, tmp_path: Path) -> None:
    """As in a causal mask, whose differences between workers are not numbers."""
    mask = nn.Transformer.generate_square_subsequent_mask(3)

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        model.register_buffer("mask", mask.clone(), persistent=persistent)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def save(rank: int) -> None:
        model, optimizer = made()
        la.attach(model, optimizer, la.local_sgd(2))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 3), 1.0 + rank)).square().sum().backward()
            optimizer.step()
        la.save(tmp_path, model, optimizer)

    def load(rank: int) -> Tensor:
        model, optimizer = made()
        la.attach(model, optimizer, la.local_sgd(2))
        la.load(tmp_path, model, optimizer)
        return model.get_buffer("mask").clone()

    la.simulate(save, workers=3)
    for workers in (1, 2):
        for found in la.simulate(load, workers=workers):
            assert torch.equal(found, mask)


def test_a_first_attempt_finds_no_checkpoint(tmp_path: Path) -> None:
    """Nor does one whose first save was cut short, or on a host that is new."""
    (tmp_path / "host0").mkdir()
    (tmp_path / "host0" / "rank-0-of-2.1-0123456789abcdef.pt").write_bytes(b"half")

    def first(rank: int) -> tuple[dict[str, Any], dict[str, Any], int]:
        own = Run(ROWS["local_sgd"], 2, rank)
        folder = folder_of(tmp_path, rank, False)
        nothing = la.load(folder, own.model, own.optimizer, missing_ok=True)
        with pytest.raises(ValueError, match=r"there is no laconic.json"):
            own.load(folder)
        own.go(SAVED_AT)
        own.save(folder)
        if rank == 0:
            shutil.rmtree(tmp_path / "host1", ignore_errors=True)
        return nothing, la.load(folder, own.model, own.optimizer, missing_ok=True), own.sync.step

    for nothing, found, step in la.simulate(first, workers=2):
        assert nothing == {} and found["step"] == step == SAVED_AT


# -- models sharded inside each worker ----


def sharded_momenta(rank: int, path: Path, load: bool) -> list[list[float]]:
    """Of two workers of two ranks, from a checkpoint or before it is saved."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(-1, 2), mesh_dim_names=("workers", "shards"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))  # cut unevenly
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fully_shard(model, mesh=mesh["shards"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        sync = la.attach(model, optimizer, la.local_sgd(2), mesh=mesh, link=gloo.link_of(4))
        if load:
            la.load(path, model, optimizer)
        else:
            for t in range(3):
                optimizer.zero_grad()
                x = torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * t + rank))
                model(x).square().mean().backward()
                optimizer.step()
            la.save(path, model, optimizer)
        sync.detach()
    states = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    return [s.to_local().flatten().tolist() for s in states]


def test_a_lost_shard_is_replaced_by_the_same_shard(pool: gloo.Pool, tmp_path: Path) -> None:
    saved = pool.run(sharded_momenta, tmp_path, False, ranks=4)
    next(tmp_path.glob("rank-3-*.pt")).unlink()
    loaded = pool.run(sharded_momenta, tmp_path, True, ranks=4)
    assert loaded == [*saved[:3], saved[1]]


def in_processes(rank: int, base: Path, ranks: int, load: bool) -> list[float]:
    """Two ranks on each host, which has its own directory."""
    own = Run(ROWS["slowmo over late sgp"], ranks, rank, link=gloo.link_of(ranks))
    folder = folder_of(base, rank // 2, False)
    if load:
        own.load(folder)
        return own.flat().tolist()
    own.go(SAVED_AT)
    own.save(folder)
    return own.consensus().tolist()


def test_files_are_sent_between_processes(pool: gloo.Pool, tmp_path: Path) -> None:
    saved = pool.run(in_processes, tmp_path, 4, False, ranks=4)
    for x in pool.run(in_processes, tmp_path, 3, True, ranks=3):
        assert x == pytest.approx(saved[0], abs=1e-12)
