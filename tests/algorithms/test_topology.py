"""The gossip graphs and their mixing matrices, without processes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.algorithms.topology import GRAPHS, Graph

from tests.references import reference_gossip as gossip

Matrix = npt.NDArray[np.float64]
SIZES = range(1, 18)
LISTED = [name for name in GRAPHS if name not in ("ring", "complete", "exponential", "random")]


def edges(graph: Graph, n: int, k: int, seed: int = 0) -> list[tuple[int, ...]]:
    return [graph.out_peers(rank, n, k, seed) for rank in range(n)]


def push_matrix(graph: Graph, n: int, k: int, seed: int = 0) -> Matrix:
    """P[i, j]: the part of worker j's x that worker i holds after gossip k of SGP."""
    p = np.zeros((n, n))
    for j, out in enumerate(edges(graph, n, k, seed)):
        p[[j, *out], j] = 1 / (len(out) + 1)
    return p


def mixing_matrix(graph: Graph, n: int, k: int, seed: int = 0) -> Matrix:
    """W of D-PSGD, as `Push` and `Mix` build it row by row."""
    w = np.zeros((n, n))
    for i in range(n):
        for j in graph.in_peers(i, n, k, seed):
            w[i, j] = graph.share(i, j, n, k, seed)
        w[i, i] = 1 - w[i].sum()
    return w


def over_a_cycle(name: str) -> Iterator[tuple[Graph, int, int]]:
    """For p = 1, 2, 3 and all n: k over a cycle at least, as no list of peers is longer than n."""
    for peers in (1, 2, 3):
        for n in SIZES:
            for k in range(n):
                yield Graph(name, peers), n, k


def test_peers_by_hand() -> None:
    def first(name: str, rank: int, n: int, gossips: int, peers: int = 1) -> list[list[int]]:
        return [list(Graph(name, peers).out_peers(rank, n, k)) for k in range(gossips)]

    assert first("exponential", 5, 8, 4) == [[6], [7], [1], [6]]
    assert first("exponential", 0, 9, 3, 2) == [[1, 2], [3, 6], [1, 2]]
    assert first("exponential", 0, 6, 2, 2) == [[1, 2], [3]], "hop 6 is rank 0 itself"
    assert first("directed_exponential", 0, 8, 4, 2) == [[1, 7], [2, 6], [1, 4], [2, 7]]
    assert first("bipartite_exponential", 1, 12, 7) == [[2], [0], [4], [10], [6], [8], [2]]
    assert first("directed_linear", 0, 8, 5) == [[1], [7], [3], [5], [1]]
    assert first("bipartite_linear", 0, 5, 3) == [[1], [3], [1]]
    assert first("ring", 3, 4, 2) == [[0], [0]]
    assert first("ring", 3, 4, 1, 2) == [[0, 2]]
    assert first("complete", 2, 4, 1) == [[0, 1, 3]]


def test_logarithms_are_those_of_integers() -> None:
    """log3(243) is 4.999... in floating point, and would leave out hops 243 and 486."""
    assert Graph("exponential", 2).out_peers(0, 244, 5) == (242, 243)
    assert Graph("exponential", 2).out_peers(0, 243, 5) == (1, 2)


@pytest.mark.parametrize("name", GRAPHS)
def test_peers_are_others_ascending_and_no_more_than_asked(name: str) -> None:
    for graph, n, k in over_a_cycle(name):
        for rank, out in enumerate(edges(graph, n, k)):
            assert list(out) == sorted(set(out) - {rank}), (graph, n, k, rank)
            assert all(0 <= peer < n for peer in out)
            assert len(out) <= graph.peers or name == "complete"
            assert out or n == 1 or (name == "random" and n % 2)


@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "random"])
def test_peers_are_those_of_the_reference(name: str) -> None:
    for graph, n, k in over_a_cycle(name):
        for rank, out in enumerate(edges(graph, n, k)):
            expected = gossip.out_peers(name, rank, n, k, graph.peers)
            assert list(out) == sorted(expected), (graph, n, k, rank)


ANY_GRAPH = st.builds(Graph, st.sampled_from(GRAPHS), st.integers(1, 5), st.booleans())


@given(ANY_GRAPH, st.integers(1, 40), st.integers(0, 10**6), st.integers(0, 5), st.data())
@settings(max_examples=200, deadline=None)
def test_who_sends_to_whom_is_alike_on_both_sides(
    graph: Graph, n: int, k: int, seed: int, data: Any
) -> None:
    rank = data.draw(st.integers(0, n - 1))
    sources = graph.in_peers(rank, n, k, seed)
    assert list(sources) == [r for r in range(n) if rank in graph.out_peers(r, n, k, seed)]
    if graph.both:
        assert sources == graph.out_peers(rank, n, k, seed)


@pytest.mark.parametrize("name", LISTED)
def test_a_list_is_gone_round_without_gaps(name: str) -> None:
    """All of a rank's peers come up equally often, whatever p."""
    for n in (2, 5, 8, 13):
        everyone = {peer for k in range(2 * n) for peer in Graph(name).out_peers(0, n, k)}
        for p in (1, 2, 3):
            if p <= len(everyone):
                told = [r for k in range(len(everyone)) for r in Graph(name, p).out_peers(0, n, k)]
                assert sorted(told) == sorted(p * list(everyone)), (n, p)


@given(st.integers(1, 40), st.integers(0, 1000), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_random_pairs_are_disjoint_and_drawn_anew(n: int, k: int, seed: int) -> None:
    graph = Graph("random")
    out = edges(graph, n, k, seed)
    assert sum(not peers for peers in out) == n % 2
    assert all(out[peers[0]] == (rank,) for rank, peers in enumerate(out) if peers)
    if n > 9:
        assert edges(graph, n, k + 1, seed) != out != edges(graph, n, k, seed + 1)


def test_every_pair_is_drawn_equally_often() -> None:
    times = np.zeros((5, 5))
    for k in range(3000):
        for rank, peers in enumerate(edges(Graph("random"), 5, k)):
            times[rank, list(peers)] += 1
    assert np.abs(times + 600 * np.eye(5) - 600).max() < 100  # four standard deviations: 88


def gossips(name: str, n: int) -> int:
    """As many as mix: the ring is slow."""
    return (12 if name == "ring" else 5) * n


@pytest.mark.parametrize("name", GRAPHS)
def test_push_matrices_are_column_stochastic_and_mix(name: str) -> None:
    """Nothing is lost on the way; ranks that take alike hops keep equal weights; and whoever
    started with what, all end with the mean."""
    for graph, n in itertools.product([Graph(name, p) for p in (1, 2, 3)], SIZES):
        total, weights_move = np.eye(n), False
        for k in range(gossips(name, n)):
            p = push_matrix(graph, n, k)
            assert (p >= 0).all() and np.abs(p.sum(0) - 1).max() < 1e-12
            weights_move |= bool(np.abs(p.sum(1) - 1).max() > 1e-9)
            total = p @ total
        assert weights_move == (name.startswith("bipartite") and n % 2 == 1 and n > 1), (graph, n)
        debiased = total / total.sum(1, keepdims=True)
        assert np.abs(debiased - 1 / n).max() < 0.01, (graph, n)


@pytest.mark.parametrize("name", GRAPHS)
def test_d_psgd_matrices_are_symmetric_doubly_stochastic_and_mix(name: str) -> None:
    for n in SIZES:
        graph, total = Graph(name, both=True), np.eye(n)
        for k in range(gossips(name, n)):
            w = mixing_matrix(graph, n, k)
            assert np.array_equal(w, w.T) and (w >= 0).all()
            assert np.abs(w.sum(0) - 1).max() < 1e-12
            total = w @ total
        assert np.abs(total - 1 / n).max() < 0.01, n


def test_metropolis_weights_where_degrees_differ() -> None:
    """Bipartite among five: the star of the first gossip is no regular graph."""
    w = mixing_matrix(Graph("bipartite_linear", both=True), 5, 0)
    assert np.array_equal(w, gossip.symmetric_matrix("bipartite_linear", 5, 0))
    assert len(set(np.count_nonzero(w, axis=1))) > 1, "degrees differ"
    assert np.allclose(mixing_matrix(Graph("ring", both=True), 5, 0).diagonal(), 1 / 3)


def test_the_one_peer_exponential_graph_averages() -> None:
    """Exactly after log2(n) gossips where n is a power of two, nearly elsewhere."""

    def deviation(n: int, gossips: int) -> float:
        total = np.eye(n)
        for k in range(gossips):
            total = push_matrix(Graph(), n, k) @ total
        return float(np.abs(total - 1 / n).max())

    for n in (4, 8, 16):
        assert deviation(n, n.bit_length() - 1) == 0
        assert deviation(n, n.bit_length() - 2) > 0.05
    assert deviation(6, 3) == pytest.approx(1 / 12, rel=1e-12)
    assert deviation(12, 4) == pytest.approx(1 / 24, rel=1e-12)


def test_the_ring_mixes_as_fast_as_its_second_eigenvalue() -> None:
    """1/3 + 2/3*cos(2*pi/n) for neighbours' exchange."""
    for n in (3, 5, 8, 17):
        values = np.sort(np.linalg.eigvalsh(mixing_matrix(Graph("ring", both=True), n, 0)))
        assert values[-1] == pytest.approx(1)
        assert values[-2] == pytest.approx(1 / 3 + 2 / 3 * math.cos(2 * math.pi / n))
