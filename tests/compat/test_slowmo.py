"""SlowMoDistributedDataParallel: fairscale's order of operations, graphs, and traffic."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic import SlowMoDistributedDataParallel

from tests.references import problem
from tests.references import slowmo_ddp as ref
from tests.support import gloo, training
from tests.support import slowmo_training as loop
from tests.support.slowmo_training import Settings, Wide

pytestmark = [
    pytest.mark.filterwarnings("ignore:these arguments have no effect"),
    pytest.mark.filterwarnings("ignore:slowmo_memory_efficient=True sends"),
    pytest.mark.filterwarnings("ignore:there is one node only"),
]
STEPS = 17
"""Two slow steps of every frequency below, and one step more."""


def settings_of(given: ref.Settings, optimizer: str = "nesterov", steps: int = STEPS) -> Settings:
    """The wrapper's, from the reference's."""
    options: dict[str, Any] = {
        "slowmo_base_algorithm": given.base,
        "slowmo_momentum": given.momentum,
        "slowmo_lr": given.slowmo_lr,
        "slowmo_frequency": given.slowmo_frequency,
        "localsgd_frequency": given.localsgd_frequency,
        "slowmo_memory_efficient": given.memory_efficient,
        "slowmo_sgp_average_params": given.sgp_average_params,
        "push_sum": given.push_sum,
    }
    if given.base == "sgp" and given.nodes > 1:
        options["graph"] = given.graph, given.peers_per_itr
    ranks = given.nodes * given.ranks_per_node
    return Settings(ranks, given.ranks_per_node, steps, optimizer, options=options)


def train(settings: Settings, rank: int) -> list[dict[str, Any]]:
    """As `slowmo_training.train`, the graph made where its node is known."""
    given, size = dict(settings.options), settings.nprocs_per_node
    if "graph" in given:
        name, peers = given["graph"]
        nodes = settings.ranks // size
        given["graph"] = getattr(la, name)(rank // size, nodes, peers_per_itr=peers)
    return loop.train(replace(settings, options=given), rank)


def train_over_gloo(rank: int, settings: Settings) -> list[dict[str, Any]]:
    with loop.over_gloo(settings.ranks), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(settings, rank)


def check(given: ref.Settings, settings: Settings) -> list[list[dict[str, Any]]]:
    """To 1e-10 after every call; replicas equal to the last bit after every slow step."""
    runs = la.simulate(partial(train, settings), workers=settings.ranks)
    rules = training.OPTIMIZERS[settings.optimizer][1]
    init = problem.initial(settings.ranks, settings.job_seed)
    trace = ref.run(given, settings.steps, rules, settings.lr, settings.job.data(), init)
    agrees = given.base == "localsgd" or given.memory_efficient or given.sgp_average_params
    for t, (rank, run) in itertools.product(range(settings.steps), enumerate(runs)):
        for name in problem.NAMES:
            np.testing.assert_allclose(run[t][name], trace.z[t][rank][name], rtol=0, atol=1e-10)
        if trace.slow[t] and agrees:
            assert loop.equal(run[t], runs[0][t])
    if given.momentum and given.nodes > 1:
        assert any(trace.slow), "the slow step was seen"
    return runs


BASES: tuple[Literal["localsgd", "sgp"], ...] = ("localsgd", "sgp")
GRID = [
    ref.Settings(nodes, 4 // nodes, base, momentum, 1.0, slow, local, efficient, average)
    for nodes, base, momentum, (local, slow), (efficient, average) in itertools.product(
        (4, 2),
        BASES,
        (0.0, 0.5),
        ((3, 6), (2, 8)),
        ((True, False), (False, False), (False, True)),
    )
    if base == "sgp" or not average
]


def optimizer_of(given: ref.Settings) -> str:
    """One of two, such that each meets every value of every setting, and every two of them."""
    values = (given.nodes == 2, given.momentum == 0, given.slowmo_frequency == 8)
    return ("nesterov", "adamw")[(sum(values) + given.memory_efficient) % 2]


@pytest.mark.parametrize(
    "given",
    [pytest.param(g, marks=[pytest.mark.slow] * bool(i % 5)) for i, g in enumerate(GRID)],
    ids=str,
)
def test_equals_the_original_order_of_operations(given: ref.Settings) -> None:
    check(given, settings_of(given, optimizer_of(given)))


@pytest.mark.filterwarnings("ignore:slowmo_frequency=8 is not a multiple")
@pytest.mark.parametrize("efficient", [True, False])
def test_a_slow_step_between_two_rounds_averages_too(efficient: bool) -> None:
    """Which the original does where it is memory efficient alone."""
    given = ref.Settings(4, 1, "localsgd", 0.5, 1.0, 8, 3, memory_efficient=efficient)
    check(given, settings_of(given))


@pytest.mark.parametrize("given", GRID[::9], ids=str)
def test_processes_give_the_same_bits_with_any_number_of_shards(
    pool: gloo.Pool, given: ref.Settings
) -> None:
    settings = settings_of(given)
    runs = check(given, settings)
    for shards in (32, 3, 1) if given.memory_efficient else (32,):
        options = {**settings.options, "slowmo_num_shards": shards}
        found = pool.run(train_over_gloo, replace(settings, options=options), ranks=4)
        pairs = zip(itertools.chain(*runs), itertools.chain(*found), strict=True)
        assert all(loop.equal(one, other) for one, other in pairs), f"{shards} shards"


@pytest.mark.parametrize(
    ("graph", "nodes", "efficient"),
    [
        pytest.param(graph, nodes, (i + j) % 2 == 0, marks=[pytest.mark.slow] * (j != i % 2 + 1))
        for i, graph in enumerate(ref.GRAPHS)
        for j, nodes in enumerate((2, 4, 6, 8) if "Bipartite" in graph else (2, 3, 4, 5, 8))
    ],
)
def test_every_graph_gossips_as_the_original_does(graph: str, nodes: int, efficient: bool) -> None:
    """Bipartite ones on even numbers of nodes: on odd ones the original fails."""
    given = ref.Settings(nodes, 1, "sgp", 0.5, 0.9, 6, memory_efficient=efficient, graph=graph)
    check(given, settings_of(given, steps=13))


@pytest.mark.parametrize(("peers", "push_sum"), [(1, False), (2, True)])
def test_two_peers_and_gossip_without_push_weights(peers: int, push_sum: bool) -> None:
    for graph in ("RingGraph", "DynamicDirectedExponentialGraph"):
        given = ref.Settings(
            5, 1, "sgp", 0.5, 1.0, 6, graph=graph, peers_per_itr=peers, push_sum=push_sum
        )
        check(given, settings_of(given, steps=13))


@pytest.mark.parametrize("name", ref.GRAPHS)
def test_graphs_name_the_peers_of_the_original(name: str) -> None:
    for size, k in itertools.product((1, 2, 3, 5, 6, 8, 12), range(7)):
        nodes = size + ("Bipartite" in name and size % 2)
        given = ref.Settings(nodes, base="sgp", graph=name)
        out = [ref.out_peers(given, rank, k) if nodes > 1 else [] for rank in range(nodes)]
        for rank in range(nodes):
            graph = getattr(la, name)(rank, nodes)
            for turn in range(k + 1):
                peers = graph.get_peers(rotate=turn > 0)
            came = [source for source in range(nodes) if rank in out[source]]
            assert (sorted(peers[0]), sorted(peers[1])) == (sorted(out[rank]), came)


def test_mixing_and_what_graphs_refuse() -> None:
    mixing = la.UniformMixing(la.RingGraph(0, 4, peers_per_itr=2), torch.device("cpu"))
    weights = mixing.get_mixing_weights()
    assert weights["lo"].item() == pytest.approx(1 / 3)
    assert weights["uniform"].item() == weights[1].item() == weights[3].item() == 1.0
    assert mixing.get_mixing_weights(False)[1].item() == pytest.approx(1 / 3)
    assert mixing.is_regular() and mixing.is_uniform()
    with pytest.raises(ValueError, match="graph must be a GraphManager"):
        la.UniformMixing("ring")  # type: ignore[arg-type]
    for given, message in (((4, 4), "rank 4 must be below world_size 4"), ((0, 0), "world_size")):
        with pytest.raises(ValueError, match=message):
            la.RingGraph(*given)
    with pytest.raises(ValueError, match=r"graph must be one of .*RingGraph"):
        la.GraphManager(0, 4)


# -- state and traffic ----


@pytest.mark.parametrize(("shards", "per_node"), [(1, 1), (3, 1), (32, 1), (2, 2)])
def test_slow_state_is_two_over_shards_on_owners_and_nowhere_else(
    shards: int, per_node: int
) -> None:
    """Counted in elements of all tensors that the rounds keep, numbers aside."""

    def run(rank: int) -> tuple[int, int]:
        settings = Settings(4, per_node, 1, options={"slowmo_num_shards": shards})
        model, optimizer = loop.build(settings, rank)
        loop.step(settings, model, optimizer, settings.job.data()[rank][0], 1)
        assert model.slowmo_num_shards == min(shards, 4)
        state = model.synchronizer.state_dict()
        kept = [t for r in state["rounds"] for s in r["state"] for t in s.values() if t.dim()]
        return sum(t.numel() for t in kept), sum(p.numel() for p in model.module.parameters())

    owners = min(shards, 4)
    padding = 2 * 2 * 4  # two tensors, two buckets, up to three elements each
    for rank, (kept, params) in enumerate(la.simulate(run, workers=4)):
        assert kept <= (2 * params / owners + padding if rank < owners else 0)
        assert kept >= 2 * params / owners - padding or rank >= owners


def test_by_default_three_times_less_goes_across_nodes_than_with_ddp() -> None:
    steps = 48

    def run(rank: int, wrap: bool) -> int:
        torch.manual_seed(0)
        model = Wide()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        wrapped: Any = SlowMoDistributedDataParallel(model, 1, False) if wrap else model
        counted = wrapped if wrap else la.attach(model, optimizer, la.ddp(), buffers="keep")
        before = 0
        for t, x in enumerate(loop.batches(rank, steps + 1)):
            if t == 1:  # what is sent once, at the start, aside
                before = counted.stats().bytes_sent
            wrapped(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if wrap:
                wrapped.perform_slowmo(optimizer)
        return int(counted.stats().bytes_sent) - before

    slowmo, ddp = (la.simulate(partial(run, wrap=wrap), workers=4)[0] for wrap in (True, False))
    assert ddp == pytest.approx(3 * slowmo, rel=0.001)


def test_inside_a_node_gradients_and_across_nodes_a_part_for_each_rank() -> None:
    """Across nodes every rank sends its part of the model, as if the node had one rank."""
    sent = {}
    for per_node in (1, 2):

        def run(rank: int, size: int = per_node) -> Any:
            settings = Settings(2 * size, size, 6, options={"slowmo_frequency": 6})
            model, optimizer = loop.build(settings, rank)
            before = dict(model.stats().bytes_by_set)
            for t in range(1, 7):
                loop.step(settings, model, optimizer, settings.job.data()[rank][t - 1], t)
            after = model.stats().bytes_by_set
            return after["workers"] - before.get("workers", 0), after.get("replica", 0)

        sent[per_node] = la.simulate(run, workers=2 * per_node)
    assert [inside for _, inside in sent[1]] == [0, 0]
    assert all(inside > 0 for _, inside in sent[2])
    both = sum(across for across, _ in sent[2][:2])
    assert both == pytest.approx(sent[1][0][0], abs=2 * 2 * 2 * 8 * 4)  # padding


def test_neither_forward_nor_eval_sends_anything_and_buffers_meet_at_rounds() -> None:
    def run(rank: int, broadcast: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = SlowMoDistributedDataParallel(Wide(), 1, broadcast)
        before = model.stats().bytes_sent
        for mode in (False, True):
            model.train(mode)
            model(torch.ones(8, 64))
        model.state_dict()
        assert model.stats().bytes_sent == before and model.module.training
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        means = []
        for x in loop.batches(rank, 3):
            loop.square_step(model, optimizer, x)
            (norm,) = (m for m in model.modules() if isinstance(m, nn.BatchNorm1d))
            assert norm.running_mean is not None
            means.append(norm.running_mean.clone())
        return means

    for broadcast in (True, False):
        runs = la.simulate(partial(run, broadcast=broadcast), workers=3)
        apart = [not torch.equal(runs[0][t], runs[1][t]) for t in range(3)]
        assert apart == [True, True, not broadcast]
