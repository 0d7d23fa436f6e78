"""The gossip graphs and their mixing matrices, without processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.algorithms.topology import GRAPHS, Graph

from tests.references import gossip

Matrix = npt.NDArray[np.float64]
SIZES = range(1, 18)


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


def test_logarithms_are_those_of_integers() -> None:
    """log3(243) is 4.999... in floating point, and would leave out hops 243 and 486."""
    assert Graph("exponential", 2).out_peers(0, 244, 5) == (242, 243)
    assert Graph("exponential", 2).out_peers(0, 243, 5) == (1, 2)


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


@given(st.integers(1, 40), st.integers(0, 1000), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_random_pairs_are_disjoint_and_drawn_anew(n: int, k: int, seed: int) -> None:
    graph = Graph("random")
    out = edges(graph, n, k, seed)
    assert sum(not peers for peers in out) == n % 2
    assert all(out[peers[0]] == (rank,) for rank, peers in enumerate(out) if peers)
    if n > 9:
        assert edges(graph, n, k + 1, seed) != out != edges(graph, n, k, seed + 1)


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
