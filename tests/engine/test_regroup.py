"""Runs go on with another number of workers: from a checkpoint, or when workers come and go."""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections import defaultdict
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import laconic as la
from laconic.algorithms.update import Clock, Slot, State, Update
from laconic.codecs import TopK

from tests.support import gloo
from tests.support.all_recipes import ROWS, Run
from tests.support.loops import close, data, flat, network, sgd, train
from tests.support.recipes import Row

SAVED_AT = 7
"""No outer step of the recipes falls on it, and messages are in flight then."""


# -- workers that are alike, whose number must not show ----

ALIKE: dict[str, la.Recipe] = {
    "ddp": la.ddp(),
    "power_sgd": la.power_sgd(2),
    "local_sgd": la.local_sgd(3, delay=2),
    "post_local_sgd": la.post_local_sgd(3, 2),
    "slowmo": la.slowmo(la.local_sgd(2), 5, 0.5),
    "slowmo, unsharded": la.slowmo(None, 4, 0.5, sharded=False),
    "diloco": la.diloco(3),
    "diloco, own optimizer": la.diloco(3, outer=lambda x: torch.optim.SGD(x, 0.5, 0.9)),
    "streaming": la.streaming_diloco(4, 2, 1, codec=None),
    "sgp": la.sgp(delay=1),
}
TOLD: dict[int, set[int]] = defaultdict(set)
ELASTIC = [name for name in ALIKE if name != "power_sgd"]
same_batches = pytest.mark.filterwarnings("ignore:the first gradients are identical")


class Counted(Update):
    """x <- sum(x)/n, by the numbers of workers that `combine` and `fold` are told; TOLD has them by
    step."""

    def combine(self, mean: Tensor, state: State, clock: Clock) -> Tensor:
        TOLD[clock.step].add(clock.workers)
        return mean * clock.workers

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        return received / clock.workers


def alike(
    number: int, recipe: la.Recipe, end: int, folder: Path | None = None, load: bool = False
) -> Tensor:
    """Every worker trains on the same batch, up to step ``end``; then it saves."""
    model = network(0)
    optimizer = sgd(model, momentum=0.9)
    sync = la.attach(model, optimizer, recipe)
    if folder and load:
        la.load(folder, model, optimizer)
    while sync.step < end:
        train(model, optimizer, data()[0][:1])
    if folder and not load:
        la.save(folder, model, optimizer)
    return flat(model)


@same_batches
@pytest.mark.parametrize("name", ELASTIC)
def test_a_mean_is_of_the_workers_that_are_left(name: str) -> None:
    """Their number counts as of each round: one that was read a moment too early would scale what
    is averaged."""
    run = partial(alike, recipe=ALIKE[name], end=20)
    (alone,) = la.simulate(run, workers=1)
    runs = la.simulate(run, faults=la.Faults(5, kill=((0, 4), (2, 6), (4, 9))))
    left = [x for x in runs if x is not None]
    assert len(left) == 2 and all(close(x, alone, 1e-9) for x in left)


@pytest.mark.parametrize("delay", [0, 2])
def test_an_update_is_told_how_many_take_part(delay: int) -> None:
    """As of its round, whoever comes and goes before and after it: here x stays 1."""

    def run(number: int) -> set[float]:
        model = nn.Linear(3, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer, seen = sgd(model, 0.0), set[float]()
        round = la.Round(la.every(2), Counted(), la.exchanges.Mean(), delay=delay)
        sync = la.attach(model, optimizer, (round,))
        while sync.step < 20:
            model(torch.full((1, 3), 1.0 + number)).sum().backward()
            optimizer.step()
            seen.update(model.weight.flatten().tolist())
        return seen

    TOLD.clear()
    faults = la.Faults(4, kill=((0, 4), (2, 7), (1, 10)), join=(5, 9, 14))
    left = [seen for seen in la.simulate(run, faults=faults) if seen is not None]
    assert left == [{1.0}] * 4
    told = [4, 3, 4, 3, 3, 3, 3, 4, 4, 4]
    assert [TOLD[step] for step in range(2, 21, 2)] == [{n} for n in told]


@same_batches
@pytest.mark.parametrize(
    ("name", "workers"), [(n, (1, 3, 6)[k % 3]) for k, n in enumerate(ALIKE) if n != "streaming"]
)
def test_outer_state_is_cut_anew_for_another_number_of_workers(
    name: str, workers: int, tmp_path: Path
) -> None:
    run = partial(alike, recipe=ALIKE[name], folder=tmp_path)
    (alone,) = la.simulate(partial(alike, recipe=ALIKE[name], end=20), workers=1)
    la.simulate(partial(run, end=8), workers=4)
    for x in la.simulate(partial(run, end=20, load=True), workers=workers):
        assert close(x, alone, 1e-9)


# -- what each worker holds ----


class Holding(Update):
    """Each worker's state is 10 times its number; SEEN is what a round finds."""

    slots: ClassVar[dict[str, Slot]] = {"own": "private", "pool": "pooled", "all": "everywhere"}

    def init(self, x: Tensor) -> State:
        return {name: torch.zeros_like(x) for name in self.slots}

    def send(self, x: Tensor, state: State, clock: Clock) -> Tensor:
        if clock.executed == 0:
            state["own"].fill_(10 * clock.worker)
            state["pool"].fill_(10 * clock.worker)
            state["all"].fill_(7)
        SEEN[clock.workers, clock.executed].append({k: float(v[0]) for k, v in state.items()})
        return x


SEEN: dict[tuple[int, int], list[dict[str, float]]] = defaultdict(list)


@same_batches
@pytest.mark.parametrize("workers", [2, 3, 6])
def test_private_state_is_averaged_and_of_pooled_state_the_mean_stays(
    workers: int, tmp_path: Path
) -> None:
    """Each worker keeps its own of pooled state, as far as the mean allows."""
    SEEN.clear()
    recipe = (la.Round(la.every(3), Holding(), la.exchanges.Mean()),)
    run = partial(alike, recipe=recipe, folder=tmp_path)
    la.simulate(partial(run, end=4), workers=4)
    la.simulate(partial(run, end=6, load=True), workers=workers)
    found = SEEN[workers, 1]
    assert [each["own"] for each in found] == [15.0] * workers
    assert [each["all"] for each in found] == [7.0] * workers
    pools = sorted(each["pool"] for each in found)
    assert pools == {2: [10, 20], 3: [5, 15, 25], 6: [0, 10, 15, 15, 20, 30]}[workers]


def test_residuals_count_as_much_as_before(tmp_path: Path) -> None:
    """A worker leaves, and another one takes over what its messages have left out: a gradient so
    small that a code of the largest elements does not have it."""
    for worker in "abc":
        own: dict[str, Any] = {"a": [{"from": "c", "step": 10}], "c": [{"left": 10}]}
        events = [*own.get(worker, []), {"unit": 1, "workers": ["a", "b", "c"]}]
        if worker != "c":
            events.append({"unit": 18, "workers": ["a", "b"]})  # of step 11
        (tmp_path / f"{worker}.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))

    def run(number: int, codec: Any) -> Tensor:
        model = nn.Linear(16, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = sgd(model, 1.0)
        sync = la.attach(model, optimizer, la.ddp(codec=codec))
        x = torch.zeros(1, 16)
        x[0, 3], x[0, 8:] = 0.01 * (number == 2), 1.0 + number
        with suppress(SystemExit):  # it leaves
            while sync.step < 20:
                optimizer.zero_grad()
                model(x * (sync.step < 10)).sum().backward()
                optimizer.step()
        return flat(model)

    plain, coded = (
        la.simulate(partial(run, codec=codec), faults=la.Trace(tmp_path))[:2]
        for codec in (None, TopK(k=4, chunk=16))
    )
    assert torch.equal(coded[0], coded[1])
    assert [float(x[3]) for x in (*plain, *coded)] == pytest.approx([-0.1 / 3] * 4, rel=1e-5)


# -- from a checkpoint ----


def folder_of(base: Path, host: int) -> Path:
    return base / f"host{host}"


def saved_runs(row: Row, ranks: int, folder: Path) -> list[tuple[Tensor, Any]]:
    """The parameters and the state of the first round."""

    def run(rank: int) -> tuple[Tensor, Any]:
        own = Run(row, ranks, rank)
        own.go(SAVED_AT)
        own.save(folder)
        return own.flat(), own.sync.state_dict()["rounds"][0]["state"][0]

    return la.simulate(run, workers=ranks)


def test_the_weights_of_gossip_count_in_what_is_left(tmp_path: Path) -> None:
    """The push weights of lost workers are missing from the sum that the others' are divided by."""
    row = ROWS["sgp, bipartite"]
    saved = saved_runs(row, 5, tmp_path)
    next(tmp_path.glob("rank-2-*.pt")).unlink()

    def run(rank: int) -> Tensor:
        own = Run(row, 5, rank)
        own.load(tmp_path)
        return own.flat()

    weights = torch.tensor([float(state["w"]) for _, state in saved]).double()
    assert float(weights.std()) > 0.1, "they are worth a test"
    kept = [0, 1, 3, 4]
    mean = torch.stack([weights[r] * saved[r][0] for r in kept]).sum(0) / weights[kept].sum()
    assert all(close(x, mean) for x in la.simulate(run, workers=5))


def test_a_lost_slice_of_outer_state_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so."""
    row = ROWS["diloco"]
    saved = saved_runs(row, 4, tmp_path)
    next(tmp_path.glob("rank-2-*.pt")).unlink()

    def run(rank: int) -> tuple[Tensor, Any]:
        own = Run(row, 4, rank)
        own.load(tmp_path)
        return own.flat(), own.sync.state_dict()["rounds"][0]

    with caplog.at_level(logging.WARNING, "laconic"):
        runs = la.simulate(run, workers=4)
    (said,) = [record.getMessage() for record in caplog.records]
    for text in ("4 workers (4 ranks)", "the files of rank 2 are lost", "step 7"):
        assert text in said
    for rank, (x, loaded) in enumerate(runs):
        state, start = loaded["state"][0], loaded["starts"][0]
        if rank == 2:
            stop = min(start + state["anchor"].numel(), x.numel())
            assert torch.equal(state["anchor"][: stop - start], x[start:stop])
        assert state["m"].any() == (rank != 2)
        assert rank == 2 or torch.equal(state["m"], saved[rank][1]["m"])


@pytest.mark.parametrize("buffers", ["average", "keep"])
def test_what_finish_does_not_average_stays_the_ranks_own(buffers: Any, tmp_path: Path) -> None:
    """Buffers are averaged over all ranks, or kept; a personal layer is nobody else's; the infinite
    numbers of a mask stay infinite."""
    mask = nn.Transformer.generate_square_subsequent_mask(3)

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
            self.model.register_buffer("mask", mask.clone())
            self.model.register_buffer("other", mask.clone(), persistent=False)
            while self.sync.step < end:
                self.optimizer.zero_grad()
                x = torch.randn(4, 8, dtype=torch.float64) + self.rank
                (self.model(x).sum() + self.head(x).square().sum()).backward()
                self.optimizer.step()

    def save(rank: int) -> dict[str, Tensor]:
        own = Both(rank, 6)
        own.steps(SAVED_AT)
        la.save(tmp_path, own.model, own.optimizer, others={"head": own.head})
        before = own.every()
        own.sync.finish()
        kept = ("head.0.running_mean", "head.1.bias")
        return {k: before[k] if k in kept else v for k, v in own.every().items()}

    def load(rank: int) -> dict[str, Tensor]:
        own = Both(rank, 4)
        own.steps(0)
        la.load(tmp_path, own.model, own.optimizer, others={"head": own.head})
        return {**own.every(), "other": own.model.get_buffer("other")}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved, loaded = la.simulate(save, workers=6), la.simulate(load, workers=4)
    for rank, found in enumerate(loaded):
        for key, value in found.items():
            expected = mask if key == "other" else saved[rank][key]
            assert torch.allclose(value, expected, rtol=0, atol=1e-12), key
    assert not torch.equal(saved[0]["head.0.running_mean"], saved[1]["head.0.running_mean"])


def test_a_first_attempt_finds_no_checkpoint(tmp_path: Path) -> None:
    """Nor does one whose first save was cut short, or on a host that is new. Where all files are
    lost, that is an error, which changes nothing."""
    (tmp_path / "host0").mkdir()
    (tmp_path / "host0" / "rank-0-of-2.1-0123456789abcdef.pt").write_bytes(b"half")

    def first(rank: int) -> None:
        own = Run(ROWS["local_sgd"], 2, rank)
        folder = folder_of(tmp_path, rank)
        assert la.load(folder, own.model, own.optimizer, missing_ok=True) == {}
        with pytest.raises(ValueError, match=r"there is no laconic.json"):
            own.load(folder)
        own.go(SAVED_AT)
        own.save(folder)
        if rank == 0:
            shutil.rmtree(tmp_path / "host1", ignore_errors=True)
        found = la.load(folder, own.model, own.optimizer, missing_ok=True)
        assert found["step"] == own.sync.step == SAVED_AT
        before = own.go(9)[-1]
        for file in folder.glob("*.pt"):
            file.unlink()
        with pytest.raises(ValueError, match="the files of ranks 0, 1 are lost"):
            own.load(folder)
        assert torch.equal(before, own.flat()) and own.sync.step == 9

    la.simulate(first, workers=2)


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
    folder = folder_of(base, rank // 2)
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
    assert not list(tmp_path.glob("*/received-*")), "what was sent is deleted"
