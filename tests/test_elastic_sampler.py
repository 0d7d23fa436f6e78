"""`ElasticSampler` against a reference that keeps the set of remaining positions."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from laconic import ElasticSampler

OWN = ("worker", "workers", "drawn")


def sequence(samples: int, shuffle: bool, seed: int, epochs: int) -> list[int]:
    """Which sample is at each position."""
    found = list[int]()
    for epoch in range(epochs):
        digest = hashlib.sha256(f"{seed},{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
        drawn = torch.randperm(samples, generator=generator).tolist()
        found += drawn if shuffle else range(samples)
    return found


@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_each_position_is_drawn_once_in_any_history(data: st.DataObject) -> None:
    """Beside the samplers, there are a set of remaining positions, and shares dealt from it."""
    samples = data.draw(st.integers(1, 30))
    shuffle, epochs = data.draw(st.booleans()), data.draw(st.sampled_from([None, 1, 2, 5]))
    more: Any = {"shuffle": shuffle, "seed": 7, "epochs": epochs}
    samplers = [ElasticSampler(samples, **more)]
    # For epochs=None, more than this draws.
    order = sequence(samples, shuffle, 7, epochs or 4000 // samples + 1)
    remaining = set(range(len(order)))
    final: Counter[int] = Counter()
    """How often each position was drawn, without draws that are to be repeated."""
    deals = data.draw(st.integers(0, 6), "deals")
    for deal in range(deals + 1):
        workers = range(len(samplers))
        shares = [sorted(remaining)[number :: len(samplers)] for number in workers]
        drawn, received = [list[int]() for _ in workers], [0 for _ in workers]
        each = st.tuples(st.sampled_from(workers), st.integers(0, 15), st.booleans())
        draws = data.draw(st.lists(each, max_size=6), "worker, draws, whether others receive them")
        if epochs is not None and deal == deals:
            draws = [(number, len(order) + 1, False) for number in workers]
        for number, count, mark in draws:
            sampler, share, positions = samplers[number], shares[number], drawn[number]
            for sample in itertools.islice(sampler, count):
                positions.append(share[len(positions)])
                assert sample == order[positions[-1]]
            if epochs is not None:
                assert len(sampler) == len(share) - len(positions)
            if mark:
                received[number] = len(positions)
        gone = set[int]()
        if deal < deals:
            gone = data.draw(st.sets(st.sampled_from(workers), max_size=len(workers) - 1), "lost")
        counts = []
        for number, sampler in enumerate(samplers):
            count = len(drawn[number])
            sampler.freeze()
            assert sampler.drawn == count
            if number in gone:
                count = received[number]
            counts.append(count)
            final.update(drawn[number][:count])
            remaining -= set(drawn[number][:count])
        stay = [sampler for number, sampler in enumerate(samplers) if number not in gone]
        newcomers = range(data.draw(st.integers(0, 3 if len(samplers) < 5 else 0), "newcomers"))
        joined = [ElasticSampler(samples, **more) for _ in newcomers]
        for sampler in joined:
            sampler.freeze()
            sampler.load_state_dict(json.loads(json.dumps(stay[-1].state_dict())))
        samplers = data.draw(st.permutations([*joined, *stay]), "order")
        frontier = max(set(range(len(order))) - remaining, default=-1) + 1
        gaps = sorted(position for position in remaining if position < frontier)
        for number, sampler in enumerate(samplers):
            sampler.deal(counts, number, len(samplers))
            state = sampler.state_dict()
            assert [state[name] for name in OWN] == [number, len(samplers), 0]
            assert (state["gaps"], state["frontier"]) == (gaps, frontier)
    if epochs is not None:
        assert final == dict.fromkeys(range(samples * epochs), 1)


def test_one_worker_draws_the_sequence() -> None:
    """The seeds must not change: a resumed run continues in the order of the saved one."""
    assert list(ElasticSampler(3, shuffle=False, epochs=2)) == [0, 1, 2, 0, 1, 2]
    before = torch.get_rng_state()
    with torch.device("meta"):  # as a program may set it
        drawn = list(itertools.islice(ElasticSampler(range(5), seed=3), 150))
    assert drawn == sequence(5, True, 3, 30) and drawn[:5] != drawn[5:10]
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(TypeError, match="no length with epochs=None"):
        len(ElasticSampler(10))


def test_cost_of_a_deal_does_not_depend_on_what_is_drawn() -> None:
    """A loop over 10**15 drawn positions would not end."""
    sampler = ElasticSampler(10, shuffle=False)
    sampler.deal([0], 0, 2)
    sampler.deal([10**15 + 1, 10**15], 1, 2)
    sampler.deal([2, 0], 0, 1)
    state = sampler.state_dict()
    assert (state["gaps"], state["frontier"]) == ([2 * 10**15 + 2], 2 * 10**15 + 4)


def test_draws_block_between_freeze_and_deal() -> None:
    sampler = ElasticSampler(100, shuffle=False)
    sampler.freeze()
    with ThreadPoolExecutor(1) as pool:
        drawn = pool.submit(lambda: list(itertools.islice(sampler, 3)))
        sampler.load_state_dict(sampler.state_dict())
        with pytest.raises(TimeoutError):
            drawn.result(timeout=0.1)
        assert sampler.drawn == 0, "the blocked draw does not count"
        sampler.deal([0], worker=1, workers=2)
        assert drawn.result(timeout=100) == [1, 3, 5]


def test_data_loader() -> None:
    """A `DataLoader` made in the middle continues, and a deal between batches takes effect."""
    dataset = TensorDataset(torch.arange(10) * 10)
    sampler = ElasticSampler(dataset, seed=4, epochs=2)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    expected = [10 * sample for sample in sequence(10, True, 4, 2)]
    batches = iter(loader)
    assert len(loader) == 5 and next(batches)[0].tolist() == expected[:4] and len(loader) == 4
    sampler.deal([sampler.drawn], worker=1, workers=2)
    assert next(batches)[0].tolist() == expected[5:12:2]
    loader = DataLoader(dataset, batch_size=3, sampler=sampler)
    assert [batch.tolist() for (batch,) in loader] == [expected[13:18:2], expected[19:]]
    assert list(loader) == []


def test_what_does_not_fit_is_an_error_and_changes_nothing() -> None:
    with pytest.raises(ValueError, match="data_source, unless it has a length, must be an integ"):
        ElasticSampler(0)
    sampler = ElasticSampler(10, shuffle=False, epochs=2)
    sampler.deal([0], 1, 2)
    before = sampler.state_dict()
    saved = ElasticSampler(10, shuffle=False)
    saved.deal([0], 0, 2)
    saved.deal([3, 0], 1, 2)
    list(itertools.islice(saved, 2))
    state = saved.state_dict()
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"num_samples": 11}, "saved with num_samples=11, this ElasticSampler has num_samples=10"),
        ({"extra": 1}, "not a state of an ElasticSampler: it must have .*'extra'"),
        ({"frontier": 21}, "the state has drawn more than epochs=2 have"),
        ({"drawn": 10}, "the state has drawn more than epochs=2 have"),
    )
    for changed, match in wrong:
        with pytest.raises(ValueError, match=match):
            sampler.load_state_dict({**state, **changed})
    assert sampler.state_dict() == before
    sampler.load_state_dict(state)
    assert sampler.state_dict() == state
