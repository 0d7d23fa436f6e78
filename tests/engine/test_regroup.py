"""Runs go on with another number of workers: from a checkpoint, or when workers come and go."""

from __future__ import annotations

import logging
import random
import shutil
import warnings
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic import buckets
from laconic.algorithms.update import Clock, Slot, State, Update
from laconic.engine import gradient_channels

from tests.support import gloo
from tests.support.all_recipes import ROWS, Run
from tests.support.loops import close, data, equal, flat, network, sgd, train
from tests.support.recipes import Row

SAVED_AT = 7
"""No outer step of the recipes falls on it, and messages are in flight then."""


# -- workers that are alike, whose number must not show ----

ALIKE: dict[str, la.Recipe] = {
    "local_sgd": la.local_sgd(3, delay=2),
    "slowmo": la.slowmo(la.local_sgd(2), 5, 0.5),
    "slowmo, unsharded": la.slowmo(None, 4, 0.5, sharded=False),
    "diloco, own optimizer": la.diloco(3, outer=lambda x: torch.optim.SGD(x, 0.5, 0.9)),
    "sgp": la.sgp(delay=1),
}
TOLD: dict[int, set[int]] = defaultdict(set)
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
    number: int,
    recipe: la.Recipe,
    end: int,
    load: Path | None = None,
    save: Path | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Every worker trains on the same batch, up to step ``end``."""
    model = network(0, dtype)
    optimizer = sgd(model, momentum=0.9)
    sync = la.attach(model, optimizer, recipe)
    if load:
        torch.manual_seed(number)
        before = torch.get_rng_state()
        la.load(load, model, optimizer)
        assert torch.equal(torch.get_rng_state(), before), "two could draw alike"
    while sync.step < end:
        train(model, optimizer, [data()[0][0].to(dtype)])
    if save:
        la.save(save, model, optimizer)
    return flat(model)


@same_batches
@pytest.mark.parametrize("name", ALIKE)
def test_the_number_of_workers_does_not_show(name: str, tmp_path: Path) -> None:
    """It counts as of each round where workers are lost: one that was read a moment too early would
    scale what is averaged. From a checkpoint, outer state is cut anew for another number."""
    run = partial(alike, recipe=ALIKE[name])
    (alone,) = la.simulate(partial(run, end=20), workers=1)
    runs = la.simulate(partial(run, end=20), faults=la.Faults(5, kill=((0, 4), (2, 6), (4, 9))))
    left = [x for x in runs if x is not None]
    assert len(left) == 2
    assert all(close(x, alone, 1e-9) for x in (*left, *in_turns(ALIKE[name], tmp_path)))


def in_turns(recipe: la.Recipe, folder: Path, **more: Any) -> list[Tensor]:
    """Train with 4, 1, 6 and 3 workers, from checkpoint to checkpoint."""
    found: list[Tensor] = []
    for workers, end in ((4, 7), (1, 10), (6, 16), (3, 20)):
        run = partial(alike, recipe=recipe, save=folder, **more)
        found = la.simulate(partial(run, end=end, load=folder if found else None), workers=workers)
        assert len([*folder.iterdir()]) == 1 + workers, "files of ranks that are gone are deleted"
    return found


@same_batches
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.fault("outer state of complex parameters loaded with as many workers only")
def test_outer_state_of_complex_parameters_is_cut_anew(tmp_path: Path) -> None:
    kind: dict[str, Any] = {"recipe": la.diloco(3), "dtype": torch.complex128}
    (alone,) = la.simulate(partial(alike, end=20, **kind), workers=1)
    assert all(close(x, alone, 1e-9) for x in in_turns(folder=tmp_path, **kind))


# -- what each worker holds ----


class Holding(Update):
    """Each worker's state is 10 times its number; SEEN is what a round finds."""

    slots: ClassVar[dict[str, Slot]] = {"own": "private", "all": "everywhere"}

    def init(self, x: Tensor) -> State:
        return {name: torch.zeros_like(x) for name in self.slots}

    def send(self, x: Tensor, state: State, clock: Clock) -> Tensor:
        if clock.executed == 0:
            state["own"].fill_(10 * clock.worker)
            state["all"].fill_(7)
        SEEN[clock.workers, clock.executed].append({k: float(v[0]) for k, v in state.items()})
        return x


SEEN: dict[tuple[int, int], list[dict[str, float]]] = defaultdict(list)


@same_batches
def test_private_state_is_averaged(tmp_path: Path) -> None:
    recipe = (la.Round(la.every(3), Holding(), la.exchanges.Mean()),)
    run = partial(alike, recipe=recipe)
    la.simulate(partial(run, end=4, save=tmp_path), workers=4)
    for workers in (2, 3, 6):
        SEEN.clear()
        la.simulate(partial(run, end=6, load=tmp_path), workers=workers)
        assert SEEN[workers, 1] == [{"own": 15.0, "all": 7.0}] * workers


# -- from a checkpoint ----

Whole = dict[tuple[str, int, str, str], Tensor]
"""Each state tensor of a run, by kind, round, place and name: the mean over all that have saved an
element of it."""


def whole(run: la.Synchronizer, states: list[Any]) -> Whole:
    """The state of all ranks of a run, whatever they are cut into."""
    found: Whole = {}
    kinds: dict[str, Any] = {
        "rounds": run.driver.run.rounds,
        "gradients": run.driver.run.gradients,
    }
    rounds: list[Any] = [
        (k, index, r.round) for k, rs in kinds.items() for index, r in enumerate(rs)
    ]
    places = ((*each, place) for each in rounds for place in ("state", "carried"))
    for kind, index, r, place in places:
        if index >= len(states[0][kind]):
            continue  # a mean inside a worker, which keeps nothing
        slots = r.update.slots if place == "state" else r.exchange.slots
        sums: dict[str, Tensor] = {}
        for part in (state[kind][index] for state in states):
            start = 0
            for k, size in enumerate(part["sizes"]):
                for name, values in part[place][k].items():
                    total = sums.setdefault(name, torch.zeros(2, sum(part["sizes"])).double())
                    owned = slots.get(name, "owner") == "owner"
                    at = part["starts"][k] if owned else part["parts"][k] * (place == "carried")
                    number = not values.dim()
                    own = values.expand(size) if number else values.reshape(-1)[: max(size - at, 0)]
                    first = start + at * (not number)
                    total[0, first : first + len(own)] += own
                    total[1, first : first + len(own)] += 1
                start += size
        found |= {(kind, index, place, name): t[0] / t[1] for name, t in sums.items()}
    return found


FEW = ("slowmo over late sgp", "diloco, Adam", "streaming_diloco", "ddp, coded")


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in ROWS]
)
def test_other_workers_go_on_from_what_finish_leaves(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 workers, then 3, then 5, from steps at random, with messages in flight: no element of any
    state is lost, or counts twice."""
    for module in (buckets, gradient_channels):
        monkeypatch.setattr(module, "BUCKET_BYTES", 640)
    monkeypatch.setattr(gradient_channels, "FIRST_BYTES", 320)
    row, drawn = ROWS[name], random.Random(name)
    left: list[tuple[Tensor, Whole]] = []
    ends = (first := drawn.randint(3, 9), first + drawn.randint(2, 7), 0)
    for ranks, end in zip((4, 3, 5), ends, strict=True):

        def run(rank: int, ranks: int = ranks, end: int = end) -> tuple[Any, ...]:
            own = Run(row, ranks, rank)
            before = None
            if left:
                own.load(tmp_path)
                before = own.flat(), own.sync.state_dict()
            own.go(end)
            own.save(tmp_path)
            own.sync.finish()
            return own.sync, before, (own.flat(), own.sync.state_dict())

        found = la.simulate(run, workers=ranks)
        syncs, loaded_by, finished_by = zip(*found, strict=True)
        if left:
            x, expected = left.pop()
            assert all(close(own, x, 1e-12) for own, _ in loaded_by)
            present = whole(syncs[0], [state for _, state in loaded_by])
            assert present.keys() == expected.keys()
            for key, value in present.items():
                assert torch.allclose(value, expected[key], 0, 1e-12, equal_nan=True), key
        left.append((finished_by[0][0], whole(syncs[0], [state for _, state in finished_by])))


def save_and_lose(row: Row, ranks: int, folder: Path) -> list[tuple[Tensor, Any]]:
    """The parameters and the state of the first round at the save, of which rank 2's file is
    lost."""

    def run(rank: int) -> tuple[Tensor, Any]:
        own = Run(row, ranks, rank)
        own.go(SAVED_AT)
        own.save(folder)
        return own.flat(), own.sync.state_dict()["rounds"][0]["state"][0]

    saved = la.simulate(run, workers=ranks)
    next(folder.glob("rank-2-*.pt")).unlink()
    return saved


def loaded(row: Row, ranks: int, folder: Path) -> list[tuple[Tensor, Any]]:
    """The parameters and the state of the first round."""

    def run(rank: int) -> tuple[Tensor, Any]:
        own = Run(row, ranks, rank)
        own.load(folder)
        return own.flat(), own.sync.state_dict()["rounds"][0]

    return la.simulate(run, workers=ranks)


def test_the_weights_of_gossip_count_in_what_is_left(tmp_path: Path) -> None:
    """The push weights of lost workers are missing from the sum that the others' are divided by."""
    saved = save_and_lose(ROWS["sgp, bipartite"], 5, tmp_path)
    weights = torch.tensor([float(state["w"]) for _, state in saved]).double()
    assert float(weights.std()) > 0.1, "they are worth a test"
    kept = [0, 1, 3, 4]
    mean = torch.stack([weights[r] * saved[r][0] for r in kept]).sum(0) / weights[kept].sum()
    assert all(close(x, mean) for x, _ in loaded(ROWS["sgp, bipartite"], 5, tmp_path))


def test_a_lost_slice_of_outer_state_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so."""
    saved = save_and_lose(ROWS["diloco"], 4, tmp_path)
    with caplog.at_level(logging.WARNING, "laconic"):
        found = loaded(ROWS["diloco"], 4, tmp_path)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "the files of rank 2 are lost" in said and "step 7" in said
    for rank, (x, first) in enumerate(found):
        state, start = first["state"][0], first["starts"][0]
        if rank == 2:
            part = x[start : start + state["anchor"].numel()]
            assert torch.equal(state["anchor"][: len(part)], part) and not state["m"].any()
        else:
            assert torch.equal(state["m"], saved[rank][1]["m"]) and state["m"].any()


@pytest.mark.parametrize("buffers", ["average", "keep"])
def test_what_finish_does_not_average_stays_the_ranks_own(buffers: Any, tmp_path: Path) -> None:
    """Buffers are averaged over all ranks, or kept; the infinite numbers of a mask stay infinite,
    and a buffer that is not saved stays."""
    mask = nn.Transformer.generate_square_subsequent_mask(3)

    def make(rank: int, ranks: int) -> Run:
        own = Run(ROWS["local_sgd"], ranks, rank, nprocs_per_node=2, buffers=buffers)
        own.model.register_buffer("mask", mask.clone())
        own.model.register_buffer("other", mask.clone(), persistent=False)
        return own

    def save(rank: int) -> dict[str, Tensor]:
        own = make(rank, 6)
        own.go(SAVED_AT)
        own.save(tmp_path)
        own.sync.finish()
        return dict(own.model.state_dict())

    def load(rank: int) -> dict[str, Tensor]:
        own = make(rank, 4)
        own.load(tmp_path)
        assert torch.equal(own.model.get_buffer("other"), mask)
        return dict(own.model.state_dict())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved, found = la.simulate(save, workers=6), la.simulate(load, workers=4)
    for one, expected in zip(found, saved[:4], strict=True):
        for key, value in one.items():
            assert torch.allclose(value, expected[key], rtol=0, atol=1e-12), key
    means = [each["1.running_mean"] for each in saved]
    assert equal(means) == (buffers == "average")


def test_a_first_attempt_finds_no_checkpoint(tmp_path: Path) -> None:
    """Nor does one whose first save was cut short, or on a host that is new. Where all files are
    lost, that is an error, which changes nothing."""
    (tmp_path / "host0").mkdir()
    (tmp_path / "host0" / "rank-0-of-2.1-0123456789abcdef.pt").write_bytes(b"half")

    def first(rank: int) -> None:
        own = Run(ROWS["local_sgd"], 2, rank)
        folder = tmp_path / f"host{rank}"
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


def in_processes(rank: int, base: Path, ranks: int, load: bool) -> list[float]:
    """Two ranks on each host, which has its own directory."""
    own = Run(ROWS["slowmo over late sgp"], ranks, rank, link=gloo.link_of(ranks))
    folder = base / f"host{rank // 2}"
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
    assert len(list(tmp_path.glob("host0/*.pt"))) == 4 and not list(tmp_path.glob("*/*.part*"))
