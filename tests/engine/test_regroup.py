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
from laconic.algorithms.recipes import RECIPES

from tests.support import gloo
from tests.support.all_recipes import ROWS, Row, Run

SAVED_AT, END = 7, 13
"""No outer step of the recipes falls on the first, and messages are in flight then."""


def test_every_recipe_has_a_row() -> None:
    assert {name.partition(" ")[0].rstrip(",") for name in ROWS} >= RECIPES.keys()


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


@pytest.mark.parametrize("name", ROWS)
def test_another_number_goes_on_from_the_consensus(name: str, tmp_path: Path) -> None:
    """4 -> 3 -> 5 -> 1 workers, each saved in the middle of a period."""
    row, ranks = ROWS[name], 4
    before = saved_runs(row, ranks, tmp_path, shared=True)
    for number in (3, 5, 1):
        agreed = before[0].consensus

        def run(rank: int, number: int = number, ranks: int = ranks) -> Saved:
            own = Run(row, number, rank)
            found = own.load(tmp_path / "all")
            assert found["rank"] == rank % ranks and found["step"] == own.sync.step
            loaded, momenta = own.flat(), own.momenta().clone()
            assert torch.allclose(own.consensus(), loaded, rtol=0, atol=1e-12)
            own.go(own.sync.step + SAVED_AT)
            own.save(tmp_path / "all")
            agreed = own.consensus()
            return Saved(loaded, agreed, momenta, [], [])

        after = la.simulate(run, workers=number)
        for rank, one in enumerate(after):
            assert torch.equal(one.x, after[0].x)
            assert float((one.x - agreed).abs().max()) < 1e-12
            if ranks == 4:
                assert torch.equal(one.momenta, before[rank % 4].momenta)
        before, ranks = after, number


@pytest.mark.parametrize("name", ROWS)
def test_a_lost_directory_is_made_up_for(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    saved = saved_runs(row, 4, tmp_path, shared=False)
    shutil.rmtree(folder_of(tmp_path, 2, False))

    def run(rank: int) -> tuple[Tensor, Tensor, bool]:
        own = Run(row, 4, rank)
        found = own.load(folder_of(tmp_path, rank, False))
        loaded, momenta = own.flat(), own.momenta().clone()
        kept = [0, 1, 3]
        assert found["rank"] == (rank if rank in kept else kept[rank % 3])
        own.go(END)
        return loaded, momenta, bool(own.flat().isfinite().all())

    found = la.simulate(run, workers=4)
    assert all(torch.equal(loaded, found[0][0]) and finite for loaded, _, finite in found)
    for rank in (0, 1, 3):
        assert torch.equal(found[rank][1], saved[rank].momenta)
    weighted = any("w" in s for r in saved[0].rounds for s in r["state"])
    if not weighted and name != "diloco, eager":
        mean = (saved[0].x + saved[1].x + saved[3].x) / 3
        assert float((found[0][0] - mean).abs().max()) < 1e-12


def test_replicas_lose_nothing_with_a_directory(tmp_path: Path) -> None:
    """Under ddp() every rank has all there is."""
    row = ROWS["ddp"]
    saved = saved_runs(row, 3, tmp_path, shared=False)
    shutil.rmtree(folder_of(tmp_path, 0, False))

    def run(rank: int) -> list[Tensor]:
        own = Run(row, 3, rank)
        own.load(folder_of(tmp_path, rank, False))
        return own.go(END)

    for rank, trace in enumerate(la.simulate(run, workers=3)):
        assert all(torch.equal(a, b) for a, b in zip(trace, saved[rank].after, strict=True))


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


def test_private_state_is_averaged(tmp_path: Path) -> None:
    row = ROWS["noloco"]
    saved = saved_runs(row, 4, tmp_path, shared=True)

    def run(rank: int) -> Any:
        own = Run(row, 3, rank)
        own.load(tmp_path / "all")
        return own.sync.state_dict()["rounds"][0]

    for loaded in la.simulate(run, workers=3):
        for name in ("anchor", "m"):
            before = [one.rounds[0]["state"][0][name][: loaded["sizes"][0]] for one in saved]
            own = loaded["state"][0][name][: loaded["sizes"][0]]
            assert float((own - torch.stack(before).mean(0)).abs().max()) < 1e-12
            assert not torch.equal(before[0], before[1])


def test_workers_of_two_ranks_count_once(tmp_path: Path) -> None:
    """Of three workers of two ranks one has lost a rank's file, and still counts as much."""

    def save(rank: int) -> Tensor:
        own = Run(ROWS["local_sgd"], 6, rank, nprocs_per_node=2)
        own.go(SAVED_AT)
        own.save(tmp_path / "all")
        return own.flat()

    saved = la.simulate(save, workers=6)
    next((tmp_path / "all").glob("rank-3-*.pt")).unlink()

    def run(rank: int) -> Tensor:
        own = Run(ROWS["local_sgd"], 2, rank)
        own.load(tmp_path / "all")
        return own.flat()

    mean = (saved[0] + saved[2] + saved[4]) / 3
    for x in la.simulate(run, workers=2):
        assert float((x - mean).abs().max()) < 1e-12


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


def test_more_hosts_than_saved_need_no_directory(tmp_path: Path) -> None:
    row = ROWS["easgd"]
    saved = saved_runs(row, 2, tmp_path, shared=False)

    def run(rank: int) -> Tensor:
        own = Run(row, 4, rank)
        own.load(folder_of(tmp_path, rank, False))
        return own.flat()

    for x in la.simulate(run, workers=4):
        assert float((x - saved[0].consensus).abs().max()) < 1e-12


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


def test_a_damaged_file_of_another_number_changes_nothing(tmp_path: Path) -> None:
    row = ROWS["sgp, late"]
    saved_runs(row, 3, tmp_path, shared=True)
    file = next((tmp_path / "all").glob("rank-1-*.pt"))
    file.write_bytes(file.read_bytes()[:-200])

    def run(rank: int) -> str:
        own = Run(row, 2, rank)
        before = own.flat()
        with pytest.raises(ValueError) as caught:
            own.load(tmp_path / "all")
        assert torch.equal(before, own.flat()) and own.sync.step == 0
        return str(caught.value)

    assert all("rank-1-of-3" in text for text in la.simulate(run, workers=2))


@pytest.mark.parametrize("name", ["sgp, late", "diloco, eager", "noloco", "slowmo"])
def test_states_of_ones_own_files_go_on_from_weights_that_are_alike(name: str) -> None:
    row = ROWS[name]

    def save(rank: int) -> Any:
        own = Run(row, 4, rank)
        own.go(SAVED_AT)
        return own.sync.consensus_state_dict(), own.sync.state_dict()

    saved = la.simulate(save, workers=4)

    def run(rank: int) -> tuple[Tensor, bool]:
        own = Run(row, 3, rank)
        own.model.load_state_dict(saved[0][0])
        loaded = own.flat()
        own.sync.load_state_dict([state for _, state in saved])
        assert torch.equal(own.flat(), loaded)
        own.go(END)
        return own.consensus(), bool(own.flat().isfinite().all())

    found = la.simulate(run, workers=3)
    assert all(finite and torch.equal(x, found[0][0]) for x, finite in found)

    def apart(rank: int) -> str:
        own = Run(row, 3, rank)
        with torch.no_grad():
            own.model[0].bias.add_(rank)
        with pytest.raises(ValueError) as caught:
            own.sync.load_state_dict([state for _, state in saved])
        return str(caught.value)

    assert all("the same weights" in text for text in la.simulate(apart, workers=3))


@pytest.mark.parametrize("name", ["ddp", "local_sgd, late", "slowmo", "sgp", "noloco"])
def test_one_of_two_hosts_is_enough(name: str, tmp_path: Path) -> None:
    """The survivor goes on from the same as the newcomer."""
    saved = saved_runs(ROWS[name], 2, tmp_path, shared=False)
    shutil.rmtree(folder_of(tmp_path, 1, False))

    def run(rank: int) -> tuple[Tensor, int]:
        own = Run(ROWS[name], 2, rank)
        own.load(folder_of(tmp_path, rank, False))
        loaded = own.flat()
        own.go(END)
        return loaded, own.sync.step

    for loaded, step in la.simulate(run, workers=2):
        assert float((loaded - saved[0].x).abs().max()) < 1e-12 and step == END


def test_lists_that_differ_between_ranks_are_refused_on_all() -> None:
    row = ROWS["diloco"]

    def save(rank: int) -> Any:
        own = Run(row, 3, rank)
        own.go(SAVED_AT)
        return own.sync.consensus_state_dict(), own.sync.state_dict()

    saved = la.simulate(save, workers=3)

    def run(rank: int) -> str:
        own = Run(row, 2, rank)
        own.model.load_state_dict(saved[0][0])
        states = [state for _, state in saved]
        states[2] = None if rank else states[2]
        with pytest.raises(ValueError) as caught:
            own.sync.load_state_dict(states)
        return str(caught.value)

    assert all("different states" in text for text in la.simulate(run, workers=2))


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


def test_a_save_deletes_what_a_load_that_was_killed_has_left(tmp_path: Path) -> None:
    left = tmp_path / "all" / "received-abc"
    left.mkdir(parents=True)
    saved_runs(ROWS["ddp"], 2, tmp_path, shared=True)
    assert not left.exists()


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


def sharded(rank: int, path: Path, ranks: int, load: bool) -> tuple[list[float], list[float]]:
    """On the first ``ranks`` of four, in workers of two; x before it goes on, and the consensus."""
    mesh = DeviceMesh("cpu", torch.arange(ranks).view(-1, 2), mesh_dim_names=("workers", "shards"))
    if rank >= ranks:
        return [], []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fully_shard(model, mesh=mesh["shards"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        recipe = la.slowmo(la.sgp(delay=2), 5, 0.4)
        sync = la.attach(model, optimizer, recipe, mesh=mesh, link=gloo.link_of(ranks))
        if load:
            la.load(path, model, optimizer)
        before = whole(model)
        for t in range(4 if load else SAVED_AT):
            optimizer.zero_grad()
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * t + rank))
            model(x).square().mean().backward()
            optimizer.step()
        if not load:
            la.save(path, model, optimizer)
        with sync.consensus():
            agreed = whole(model)
        sync.detach()
    return before, agreed


def whole(model: nn.Module) -> list[float]:
    return torch.cat([p.full_tensor().reshape(-1) for p in model.parameters()]).tolist()


def test_a_sharded_model_goes_on_in_fewer_workers(pool: gloo.Pool, tmp_path: Path) -> None:
    saved = pool.run(sharded, tmp_path, 4, False, ranks=4)
    loaded = pool.run(sharded, tmp_path, 2, True, ranks=4)
    for before, _ in loaded[:2]:
        assert before == pytest.approx(saved[0][1], abs=1e-6)


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
