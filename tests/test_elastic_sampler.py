"""`ElasticSampler` against a reference that keeps the set of remaining positions."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from laconic.sampler import ElasticSampler, Progress

TIMEOUT = 100.0
COMMON = ("num_samples", "shuffle", "seed", "gaps", "frontier", "workers", "samples_lost")


# -- the reference ----


def order(samples: int, shuffle: bool, seed: int, epoch: int) -> list[int]:
    if not shuffle:
        return list(range(samples))
    digest = hashlib.sha256(f"{seed},{epoch}".encode()).digest()
    generator = torch.Generator()
    generator.manual_seed(int.from_bytes(digest[:4], "little"))
    return torch.randperm(samples, generator=generator).tolist()


def sequence(samples: int, shuffle: bool, seed: int, epochs: int) -> list[int]:
    return [s for epoch in range(epochs) for s in order(samples, shuffle, seed, epoch)]


@dataclass
class Worker:
    sampler: ElasticSampler
    number: int
    drawn: int = 0
    contributed: int = 0
    positions: list[int] = field(default_factory=list)
    """The positions of its share that it has drawn."""


class Simulation:
    """Workers with samplers, beside a set of remaining positions and the shares dealt from it."""

    def __init__(self, samples: int, shuffle: bool, epochs: int | None, lost: str) -> None:
        self.epochs, self.samples = epochs, samples
        more = {"shuffle": shuffle, "seed": 7, "epochs": epochs, "lost": lost}
        self.sampler: Callable[[], ElasticSampler] = lambda: ElasticSampler(samples, **more)  # type: ignore[arg-type]
        # For epochs=None, more than any test draws.
        self.sequence = sequence(samples, shuffle, 7, epochs or math.ceil(4000 / samples))
        self.remaining = set(range(len(self.sequence)))
        self.final: Counter[int] = Counter()
        """How often each position was drawn, without draws that are to be repeated."""
        self.forgotten = 0
        self.largest_bound = 0
        self.workers = [Worker(self.sampler(), 0)]
        self.share_out()

    def share_out(self) -> None:
        ascending = sorted(self.remaining)
        self.shares = [ascending[r :: len(self.workers)] for r in range(len(self.workers))]

    def draw(self, worker: Worker, count: int) -> None:
        share = self.shares[worker.number]
        for sample in itertools.islice(worker.sampler, count):
            position = share[worker.drawn]
            assert sample == self.sequence[position]
            worker.positions.append(position)
            worker.drawn += 1
        if self.epochs is not None:
            assert len(worker.sampler) == len(share) - worker.drawn

    def deal(self, lost: set[int], rotation: int, newcomers: int) -> None:
        counts, lost_samples = [], 0
        for worker in self.workers:
            assert worker.sampler.freeze() == Progress(worker.drawn, worker.contributed)
            count = worker.drawn
            if worker.number in lost:
                count, more = worker.sampler.counts_for(worker.drawn, worker.contributed)
                lost_samples += more
            counts.append(count)
            self.final.update(worker.positions[:count])
            self.remaining -= set(worker.positions[:count])
        spread = max(counts) - min(counts)
        self.largest_bound = max(self.largest_bound, len(counts) * spread)
        self.forgotten += lost_samples

        stay = [worker for worker in self.workers if worker.number not in lost]
        saved = stay[-1].sampler.state_dict()
        joined = [Worker(self.sampler(), 0) for _ in range(newcomers)]
        for worker in joined:
            worker.sampler.freeze()
            worker.sampler.load_state_dict(json.loads(json.dumps(saved)))
        everyone = [*joined, *stay]
        rotation %= len(everyone)
        self.workers = everyone[rotation:] + everyone[:rotation]
        for number, worker in enumerate(self.workers):
            worker.sampler.deal(counts, number, len(self.workers), lost_samples)
            worker.number, worker.drawn, worker.contributed, worker.positions = number, 0, 0, []
        self.share_out()
        self.check_states()

    def check_states(self) -> None:
        states = [worker.sampler.state_dict() for worker in self.workers]
        common = [{key: state[key] for key in COMMON} for state in states]
        assert all(state == common[0] for state in common)
        for number, state in enumerate(states):
            assert (state["worker"], state["drawn"], state["contributed"]) == (number, 0, 0)
        drawn = set(range(len(self.sequence))) - self.remaining
        frontier = max(drawn, default=-1) + 1
        assert states[0]["frontier"] == frontier
        assert states[0]["gaps"] == sorted(p for p in self.remaining if p < frontier)
        assert len(states[0]["gaps"]) <= self.largest_bound
        assert states[0]["samples_lost"] == self.forgotten == self.workers[0].sampler.samples_lost

    def finish(self) -> None:
        for worker in self.workers:
            self.draw(worker, len(self.sequence) + 1)
            self.final.update(worker.positions)


@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_each_position_is_drawn_once_in_any_history(data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, 30), "samples")
    epochs = data.draw(st.sampled_from([None, 1, 2, 5]), "epochs")
    lost = data.draw(st.sampled_from(["again", "counted"]), "lost")
    simulation = Simulation(samples, data.draw(st.booleans(), "shuffle"), epochs, lost)
    for _ in range(data.draw(st.integers(0, 6), "deals")):
        for _ in range(data.draw(st.integers(0, 6), "draws")):
            worker = data.draw(st.sampled_from(simulation.workers), "worker")
            simulation.draw(worker, data.draw(st.integers(0, 15), "count"))
            if data.draw(st.booleans(), "mark"):
                worker.sampler.mark()
                worker.contributed = worker.drawn
        present = len(simulation.workers)
        numbers = st.sets(st.integers(0, present - 1), max_size=present - 1)
        simulation.deal(
            data.draw(numbers, "lost workers"),
            data.draw(st.integers(0, 5), "rotation"),
            data.draw(st.integers(0, 3 if present < 5 else 0), "newcomers"),
        )
    if epochs is not None:
        simulation.finish()
        assert simulation.final == dict.fromkeys(range(samples * epochs), 1)


# -- the sequence ----


def test_one_worker_draws_the_sequence() -> None:
    """The seeds must not change: a resumed run continues in the order of the saved one."""
    assert list(ElasticSampler(3, shuffle=False, epochs=2)) == [0, 1, 2, 0, 1, 2]
    drawn = list(ElasticSampler(range(5), seed=3, epochs=3))
    assert drawn == sequence(5, True, 3, 3)
    epochs = [drawn[i : i + 5] for i in (0, 5, 10)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert drawn != sequence(5, True, 4, 3) and epochs[0] != epochs[1] != epochs[2]
    before = torch.get_rng_state()
    with torch.device("meta"):  # as a program may set it
        endless = list(itertools.islice(ElasticSampler(5, seed=3), 150))
    assert endless == sequence(5, True, 3, 30)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(TypeError, match="no length with epochs=None"):
        len(ElasticSampler(10))


# -- deals ----


def test_cost_of_a_deal_does_not_depend_on_what_is_drawn() -> None:
    """A loop over 10**15 drawn positions would not end."""
    sampler = ElasticSampler(10, shuffle=False)
    sampler.deal([0], 0, 2)
    sampler.deal([10**15 + 1, 10**15], 1, 2)
    state = sampler.state_dict()
    assert (state["gaps"], state["frontier"]) == ([], 2 * 10**15 + 1)
    sampler.deal([2, 0], 0, 1)
    state = sampler.state_dict()
    assert (state["gaps"], state["frontier"]) == ([2 * 10**15 + 2], 2 * 10**15 + 4)


def test_draws_block_between_freeze_and_deal() -> None:
    sampler = ElasticSampler(100, shuffle=False)
    sampler.freeze()
    with ThreadPoolExecutor(1) as pool:
        drawn = pool.submit(lambda: list(itertools.islice(sampler, 3)))

        def blocks() -> None:
            with pytest.raises(TimeoutError):
                drawn.result(timeout=0.1)

        blocks()
        sampler.mark()
        sampler.load_state_dict(sampler.state_dict())
        blocks()
        assert sampler.freeze() == (0, 0), "the blocked draw does not count"
        with pytest.raises(ValueError, match="drawn must have 1 numbers"):
            sampler.deal([0, 0], 0, 1)
        blocks()
        sampler.deal([0], worker=1, workers=2)
        assert drawn.result(timeout=TIMEOUT) == [1, 3, 5]


# -- DataLoader ----


def test_data_loader() -> None:
    """A `DataLoader` made in the middle continues, and a deal between batches takes effect."""
    dataset = TensorDataset(torch.arange(10) * 10)
    sampler = ElasticSampler(dataset, seed=4, epochs=2)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    assert len(loader) == 5
    expected = [10 * sample for sample in sequence(10, True, 4, 2)]
    batches = iter(loader)
    assert next(batches)[0].tolist() == expected[:4]
    assert len(loader) == 4
    sampler.deal([sampler.freeze().drawn], worker=1, workers=2)
    assert next(batches)[0].tolist() == expected[5:12:2]
    loader = DataLoader(dataset, batch_size=3, sampler=sampler)
    assert [batch.tolist() for (batch,) in loader] == [expected[13:18:2], expected[19:]]
    assert list(loader) == []


# -- errors ----


class Stream(IterableDataset[int]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"data_source": 0}, "data_source, unless it has a length, must be an integer of at"),
        ({"data_source": Stream()}, "data_source, unless it has a length, must be"),
        ({"seed": -1}, "seed must be an integer of at least 0, not -1"),
        ({"epochs": 0}, "epochs, unless None, must be an integer of at least 1, not 0"),
        ({"lost": "agian"}, "lost must be one of 'again', 'counted', not 'agian'"),
    ],
)
def test_arguments(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ElasticSampler(**{"data_source": 10, **arguments})


def test_deals_that_do_not_fit_change_nothing() -> None:
    sampler = ElasticSampler(7, epochs=1)
    sampler.deal([0], 1, 2)
    before = sampler.state_dict()
    for drawn, worker, workers, match in (
        ([1], 0, 2, "drawn must have 2 numbers, one for each worker of the old deal, not 1"),
        ([1, 4], 0, 2, r"drawn\[1\] must be at most 3, the share of worker 1 of 2 in epochs=1"),
        ([1, 1], 0, 0, "workers must be an integer of at least 1, not 0"),
        ([1, 1], 2, 2, r"worker must be below workers \(2\), not 2"),
    ):
        with pytest.raises(ValueError, match=match):
            sampler.deal(drawn, worker, workers)
        assert sampler.state_dict() == before
    sampler.deal([4, 3], 0, 1)
    assert len(sampler) == 0


def test_states_that_do_not_fit_change_nothing() -> None:
    saved = ElasticSampler(10, shuffle=False)
    saved.deal([0], 0, 2)
    saved.deal([3, 0], 1, 2)
    list(itertools.islice(saved, 2))
    state = saved.state_dict()
    sampler = ElasticSampler(10, shuffle=False, epochs=2)
    before = sampler.state_dict()
    changes: list[tuple[dict[str, Any], str]] = [
        ({"num_samples": 11}, "saved with num_samples=11, this ElasticSampler has num_samples=10"),
        ({"seed": torch.zeros(2)}, "seed in the state must be an integer"),
        ({"extra": 1}, "not a state of an ElasticSampler: it must have .*'extra'"),
        ({"worker": 2}, "worker in the state must be at most 1, not 2"),
        ({"gaps": [1, "3"]}, "a gap in the state must be an integer of at least 0, not '3'"),
        ({"gaps": [3, 1]}, "gaps in the state must ascend"),
        ({"gaps": [1, 4]}, r"below the last drawn position \(4\), not \[1, 4\]"),
        ({"frontier": 21}, "the state has drawn from epoch 3 of epochs=2"),
        ({"drawn": 10}, "drawn in the state must be at most 8, the share of worker 1 of 2"),
    ]
    for changed, match in changes:
        with pytest.raises(ValueError, match=match):
            sampler.load_state_dict({**state, **changed})
        assert sampler.state_dict() == before
    sampler.load_state_dict(state)
    assert sampler.state_dict() == state
