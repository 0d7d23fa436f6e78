"""SlowMoDistributedDataParallel: fairscale's order of operations, graphs, and traffic."""

from __future__ import annotations

import itertools
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
from tests.references.problem import NAMES, SGD, SHAPES, AdamW, Optimizer
from tests.references.slowmo_ddp import GRAPHS, Settings
from tests.support import training
from tests.support.training import Job

pytestmark = [
    pytest.mark.filterwarnings("ignore:these arguments have no effect"),
    pytest.mark.filterwarnings("ignore:slowmo_memory_efficient=True sends"),
    pytest.mark.filterwarnings("ignore:there is one node only"),
]
STEPS = 17
"""Two slow steps of every frequency below, and one step more."""
Trace = list[dict[str, Any]]

# -- the reference computes what fairscale computes ----

PLAIN: list[Optimizer] = [SGD(weight_decay=0.1)] * 2
NESTEROV: list[Optimizer] = [SGD(0.9, True), SGD(0.5, False, 0.1)]
ADAMW: list[Optimizer] = [AdamW(weight_decay=0.1), AdamW((0.8, 0.95), weight_decay=0.0)]
sgp = partial(Settings, 4, base="sgp", slowmo_frequency=4)
no_average = partial(Settings, 4, base="sgp", slowmo_frequency=3, memory_efficient=False)
FAIRSCALE: list[tuple[Settings, list[Optimizer], float]] = [
    (Settings(4, slowmo_frequency=6, slowmo_lr=0.7), NESTEROV, 89.8828196755594),
    (Settings(2, 2, slowmo_frequency=4), ADAMW, 145.01906493900074),
    (Settings(2, 2, slowmo_frequency=6, memory_efficient=False), NESTEROV, 84.00038300978599),
    (Settings(2, 2, momentum=0.0, localsgd_frequency=4), ADAMW, 81.40890330570012),
    (Settings(1, 4, slowmo_frequency=4), NESTEROV, 81.11688803573006),
    (sgp(), NESTEROV, 80.62507348731532),
    (Settings(2, 2, "sgp", slowmo_frequency=4), ADAMW, 135.33698310394752),
    (no_average(), NESTEROV, 80.6884742368244),
    (no_average(sgp_average_params=True), PLAIN, 78.76014286141918),
    (sgp(graph=GRAPHS[0], peers_per_itr=2), NESTEROV, 80.81209056460484),
    (sgp(graph=GRAPHS[1]), NESTEROV, 80.83102785075877),
    # of four nodes: all send to the next, and to the one before
    *((sgp(graph=graph), NESTEROV, 80.8121930621775) for graph in GRAPHS[2:5]),
    (sgp(graph=GRAPHS[5]), NESTEROV, 80.65429112248177),
    (sgp(graph="RingGraph", peers_per_itr=2), NESTEROV, 81.21604452471615),
]
"""Sums of squares of the parameters of the four ranks after 11 calls, times 1 to 4, summed, as
fairscale 0.4.13 itself computes them: run over gloo, with torch.cuda's calls switched off, its
dtype check and mixing weights set to float64, several messages of one gossip not sharing a buffer
(which it frees while it is being sent), `_init_global_momentum_buffers` called before the first
step, as its own tests do, and all ranks starting alike. Chosen where the reference claims to follow
it."""


@pytest.mark.parametrize(("s", "rules", "expected"), FAIRSCALE)
def test_against_fairscale(s: Settings, rules: list[Optimizer], expected: float) -> None:
    """With batches and initial parameters that need no random numbers."""
    rows, columns = np.arange(20.0).reshape(4, 5), np.arange(44.0).reshape(4, 11)
    data = [
        [(np.sin((1 + 0.1 * r) * rows + t), np.cos(0.3 * columns + r - 0.2 * t)) for t in range(11)]
        for r in range(4)
    ]
    x0 = {
        name: 0.5 * np.sin(1.0 + i + np.arange(np.prod(shape))).reshape(shape)
        for i, (name, shape) in enumerate(SHAPES.items())
    }
    last = ref.run(s, 11, rules, lambda g, t: (0.2, 0.1)[g] / (1 + 0.1 * t), data, [x0]).z[-1]
    squares = [sum(float(np.sum(p[name] ** 2)) for name in NAMES) for p in last]
    assert np.dot(squares, [1, 2, 3, 4]) == pytest.approx(expected, rel=1e-11)


# -- the wrapper computes what the reference computes ----


def job_of(given: Settings, optimizer: str = "nesterov", steps: int = STEPS) -> Job:
    return Job((), given.nodes * given.ranks_per_node, steps, optimizer)


def train(rank: int, given: Settings, job: Job, shards: int = 32) -> tuple[Trace, Any]:
    """The parameters after every iteration of the guide's loop, and the wrapper."""
    options: dict[str, Any] = {
        "slowmo_base_algorithm": given.base,
        "slowmo_momentum": given.momentum,
        "slowmo_lr": given.slowmo_lr,
        "slowmo_frequency": given.slowmo_frequency,
        "localsgd_frequency": given.localsgd_frequency,
        "slowmo_memory_efficient": given.memory_efficient,
        "slowmo_sgp_average_params": given.sgp_average_params,
        "push_sum": given.push_sum,
        "slowmo_num_shards": shards,
    }
    if given.base == "sgp" and given.nodes > 1:
        graph, node = getattr(la, given.graph), rank // given.ranks_per_node
        options["graph"] = graph(node, given.nodes, peers_per_itr=given.peers_per_itr)
    module, optimizer = training.build(job, rank)
    model = SlowMoDistributedDataParallel(module, given.ranks_per_node, **options)
    trace = []
    for t in range(1, job.steps + 1):
        for group, each in enumerate(optimizer.param_groups):
            each["lr"] = job.lr(group, t)
        x, y = (torch.from_numpy(a) for a in job.data()[rank][t - 1])
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        model.perform_slowmo(optimizer)
        trace.append(training.values(module))
    return trace, model


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in NAMES)


def check(given: Settings, optimizer: str = "nesterov", steps: int = STEPS) -> list[Trace]:
    """To 1e-10 after every call; replicas equal to the last bit after every slow step."""
    job = job_of(given, optimizer, steps)
    runs = la.simulate(lambda rank: train(rank, given, job)[0], workers=job.workers)
    rules, init = training.OPTIMIZERS[optimizer][1], problem.initial(job.workers, job.seed)
    trace = ref.run(given, steps, rules, job.lr, job.data(), init)
    agrees = given.base == "localsgd" or given.memory_efficient or given.sgp_average_params
    for t, (rank, run) in itertools.product(range(steps), enumerate(runs)):
        for name in NAMES:
            np.testing.assert_allclose(run[t][name], trace.z[t][rank][name], rtol=0, atol=1e-10)
        if trace.slow[t] and agrees:
            assert equal(run[t], runs[0][t])
    assert any(trace.slow) or not given.momentum or given.nodes == 1, "the slow step was seen"
    return runs


BASES: tuple[Literal["localsgd", "sgp"], ...] = ("localsgd", "sgp")
GRID = [
    Settings(nodes, 4 // nodes, base, momentum, 1.0, slow, local, efficient, average)
    for nodes, base, momentum, (local, slow), (efficient, average) in itertools.product(
        (4, 2),
        BASES,
        (0.0, 0.5),
        ((3, 6), (2, 8)),
        ((True, False), (False, False), (False, True)),
    )
    if base == "sgp" or not average
]


@pytest.mark.parametrize(
    "given",
    [pytest.param(g, marks=[pytest.mark.slow] * bool(i % 5)) for i, g in enumerate(GRID)],
    ids=str,
)
def test_equals_the_original_order_of_operations(given: Settings) -> None:
    """Each of two optimizers meets every value of every setting, and every two of them."""
    values = (given.nodes == 2, given.momentum == 0, given.slowmo_frequency == 8)
    check(given, ("nesterov", "adamw")[(sum(values) + given.memory_efficient) % 2])


@pytest.mark.filterwarnings("ignore:slowmo_frequency=8 is not a multiple")
@pytest.mark.parametrize("efficient", [True, False])
def test_a_slow_step_between_two_rounds_averages_too(efficient: bool) -> None:
    """Which the original does where it is memory efficient alone."""
    check(Settings(4, 1, "localsgd", 0.5, 1.0, 8, 3, memory_efficient=efficient))


@pytest.mark.parametrize(
    ("graph", "nodes", "efficient"),
    [
        pytest.param(graph, nodes, (i + j) % 2 == 0, marks=[pytest.mark.slow] * (j != i % 2 + 1))
        for i, graph in enumerate(GRAPHS)
        for j, nodes in enumerate((2, 4, 6, 8) if "Bipartite" in graph else (2, 3, 4, 5, 8))
    ],
)
def test_every_graph_gossips_as_the_original_does(graph: str, nodes: int, efficient: bool) -> None:
    """Bipartite ones on even numbers of nodes: on odd ones the original fails."""
    given = Settings(nodes, 1, "sgp", 0.5, 0.9, 6, memory_efficient=efficient, graph=graph)
    check(given, steps=13)


@pytest.mark.parametrize("graph", ["RingGraph", "DynamicDirectedExponentialGraph"])
@pytest.mark.parametrize(("peers", "push_sum"), [(1, False), (2, True)])
def test_two_peers_and_gossip_without_push_weights(graph: str, peers: int, push_sum: bool) -> None:
    given = Settings(5, 1, "sgp", 0.5, 1.0, 6, graph=graph, peers_per_itr=peers, push_sum=push_sum)
    check(given, steps=13)


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_name_the_peers_of_the_original(name: str) -> None:
    for size, k in itertools.product((1, 2, 3, 5, 6, 8, 12), range(7)):
        nodes = size + ("Bipartite" in name and size % 2)
        given = Settings(nodes, base="sgp", graph=name)
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
def test_shards_divide_the_slow_state_and_change_no_bit(shards: int, per_node: int) -> None:
    """Two tensors over the number of shards on owners, and nothing elsewhere: counted in elements
    of all tensors that the rounds keep, numbers aside."""
    given = Settings(4 // per_node, per_node, slowmo_frequency=6)
    job = job_of(given, steps=7)

    def run(rank: int) -> tuple[Trace, int, int]:
        trace, model = train(rank, given, job, shards)
        assert model.slowmo_num_shards == min(shards, 4)
        state = model.synchronizer.state_dict()
        kept = [t for r in state["rounds"] for s in r["state"] for t in s.values() if t.dim()]
        return trace, sum(t.numel() for t in kept), sum(p.numel() for p in model.parameters())

    owners = min(shards, 4)
    padding = 2 * 2 * 4  # two tensors, two buckets, up to three elements each
    whole = la.simulate(lambda rank: train(rank, given, job)[0], workers=4)
    for rank, (trace, kept, params) in enumerate(la.simulate(run, workers=4)):
        assert all(map(equal, trace, whole[rank]))
        assert kept <= (2 * params / owners + padding if rank < owners else 0)
        assert kept >= 2 * params / owners - padding or rank >= owners


class Wide(nn.Module):
    """With statistics of its batches; what counts is the model's bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 64))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def test_by_default_three_times_less_goes_across_nodes_than_with_ddp() -> None:
    def run(rank: int, wrap: bool) -> int:
        torch.manual_seed(0)
        model = Wide()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        wrapped: Any = SlowMoDistributedDataParallel(model, 1, False) if wrap else model
        counted = wrapped if wrap else la.attach(model, optimizer, la.ddp(), buffers="keep")
        before = 0
        for t in range(49):
            if t == 1:  # what is sent once, at the start, aside
                before = counted.stats().bytes_sent
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * rank + t))
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
    for size in (1, 2):
        given = Settings(2, size, slowmo_frequency=6)

        def run(rank: int, given: Settings = given) -> Any:
            return train(rank, given, job_of(given, steps=6))[1].stats().bytes_by_set

        sent[size] = la.simulate(run, workers=2 * size)
    assert not any("replica" in each for each in sent[1])
    assert all(each["replica"] > 0 for each in sent[2])
    both = sum(each["workers"] for each in sent[2][:2])
    assert both == pytest.approx(sent[1][0]["workers"], rel=0.05)  # padding


@pytest.mark.parametrize("broadcast", [True, False])
def test_neither_forward_nor_eval_sends_anything_and_buffers_meet_at_rounds(
    broadcast: bool,
) -> None:
    def run(rank: int) -> list[Tensor]:
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
        for t in range(3):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * rank + t))
            model(x).square().mean().backward()
            optimizer.step()
            model.zero_grad()
            model.perform_slowmo(optimizer)
            means.append(model.module.state_dict()["layers.1.running_mean"].clone())
        return means

    runs = la.simulate(run, workers=3)
    apart = [not torch.equal(runs[0][t], runs[1][t]) for t in range(3)]
    assert apart == [True, True, not broadcast]
