"""The further references checked: by what they conserve, by closed forms, by special cases."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from tests.references import reference
from tests.references.reference import (
    NAMES,
    SGD,
    AdamW,
    Array,
    Optimizer,
    Params,
    Rates,
    Recipe,
    Trace,
    ddp,
    initial,
    local_sgd,
    lookahead,
    loss,
    make_data,
    max_difference,
    mean,
)
from tests.references.reference_decade import SlowMo, add, run, scale, slowmo, toward
from tests.references.reference_elastic import downpour, easgd
from tests.references.reference_gossip import (
    GRAPHS,
    SGP,
    Graph,
    d_psgd,
    hierarchical,
    out_peers,
    push_matrix,
    sgp,
    symmetric_matrix,
)
from tests.references.reference_leader import LSGD, lsgd

n, steps = 4, 13
data, init = make_data(6, 40, seed=1), initial(6, seed=2)
plain: list[Optimizer] = [SGD(), SGD(weight_decay=0.1)]
nesterov: list[Optimizer] = [SGD(0.9, nesterov=True), SGD(0.8, nesterov=True, weight_decay=0.02)]
adam: list[Optimizer] = [AdamW(weight_decay=0.1), AdamW((0.8, 0.95), 1e-6, 0.0)]


def lr(group: int, t: int) -> float:
    return (0.2, 0.1)[group] / (1 + 0.1 * t)


def constant(group: int, t: int) -> float:
    return (0.2, 0.1)[group]


def zero(group: int, t: int) -> float:
    return 0.0


def go(
    recipe: Recipe, optimizer: list[Optimizer] = nesterov, rate: Rates = lr, n: int = n
) -> Trace:
    return run(recipe, n, steps, optimizer, rate, data, init)


def still(recipe: Recipe, n: int = n, steps: int = steps) -> Trace:
    """Nothing but the mixing: lr 0 (and no momentum), every worker starting from its own x."""
    return run(recipe, n, steps, [SGD(), SGD()], zero, data, init, apart=True)


def gap(p: Params, q: Params) -> float:
    return max(float(np.abs(p[name] - q[name]).max()) for name in NAMES)


def same(one: Trace, other: Trace, consensus: bool = True, limit: float = 1e-12) -> None:
    assert max_difference(one, other, consensus) <= limit


def differ(one: Trace, other: Trace) -> None:
    assert max_difference(one, other) > 1e-4


def pairing(k: int, n: int) -> list[tuple[int, int]]:
    order = np.random.default_rng([5, k]).permutation(n).tolist()
    return list(zip(order[0::2], order[1::2], strict=False))


def pairs(rank: int, n: int, k: int, peers: int) -> list[int]:
    return out_peers("random_pairs", rank, n, k, peers, pairing)


graphs: list[Graph] = [*GRAPHS, pairs]


# ---------------------------------------------------------------- graphs
def test_graphs_by_hand() -> None:
    def first(graph: str, rank: int, n: int, gossips: int, peers: int = 1) -> list[list[int]]:
        return [out_peers(graph, rank, n, k, peers) for k in range(gossips)]

    assert first("exponential", 5, 8, 4) == [[6], [7], [1], [6]]
    assert first("exponential", 0, 6, 4) == [[1], [2], [4], [1]]
    assert first("exponential", 1, 2, 2) == [[0], [0]]
    assert first("exponential", 0, 1, 2) == [[], []]
    assert first("exponential", 0, 9, 3, 2) == [[1, 2], [3, 6], [1, 2]]
    assert first("exponential", 0, 6, 3, 2) == [[1, 2], [3], [1, 2]]  # the hop 6 is rank 0 itself
    assert first("exponential", 0, 10, 4, 2)[2] == [9, 8]  # floor(log3(9)) is 2
    assert first("exponential", 0, 244, 6, 2)[5] == [243, 242]  # log3(243) is 4.999.. in floats
    assert first("exponential", 1, 3, 2, 5) == [[2, 0], [2, 0]]
    assert first("ring", 3, 4, 2) == [[0], [0]]
    assert first("ring", 3, 4, 1, 2) == [[0, 2]]
    assert first("ring", 0, 2, 1, 2) == [[1]]
    assert first("directed_exponential", 0, 8, 6) == [[1], [7], [2], [6], [4], [1]]
    assert first("directed_exponential", 0, 8, 4, 2) == [[1, 7], [2, 6], [4, 1], [7, 2]]
    assert first("directed_linear", 0, 8, 5) == [[1], [7], [3], [5], [1]]
    assert first("directed_linear", 0, 5, 5) == [[1], [4], [3], [2], [1]]
    assert first("bipartite_exponential", 1, 12, 7) == [[2], [0], [4], [10], [6], [8], [2]]
    assert first("bipartite_linear", 0, 6, 4) == [[1], [5], [3], [1]]
    assert first("bipartite_linear", 0, 5, 3) == [[1], [3], [1]]
    assert first("complete", 2, 4, 1) == [[0, 1, 3]]


@pytest.mark.parametrize("graph", graphs, ids=[*GRAPHS, "random_pairs"])
def test_mixing_matrices_are_stochastic(graph: Graph) -> None:
    for n in range(1, 14):
        # One list per rank, all alike but for a shift: a permutation, so weights stay 1.
        regular = not (isinstance(graph, str) and graph.startswith("bipartite") and n % 2)
        total, symmetric = np.eye(n), np.eye(n)
        for k in range(12 * n):
            peers = 1 if k < 6 * n else 2
            for rank in range(n):
                out = out_peers(graph, rank, n, k, peers)
                assert rank not in out and len(set(out)) == len(out), (n, k, rank)
                assert all(0 <= peer < n for peer in out)
            p = push_matrix(graph, n, k, peers)
            assert np.allclose(p.sum(axis=0), 1, atol=1e-12) and (p >= 0).all()
            assert not regular or np.allclose(p.sum(axis=1), 1, atol=1e-12)
            w = symmetric_matrix(graph, n, k)
            assert np.array_equal(w, w.T) and (w >= 0).all()
            assert np.allclose(w.sum(axis=0), 1, atol=1e-12)
            total, symmetric = p @ total, w @ symmetric
        # Information gets everywhere: de-biased, all workers hold the mean.
        debiased = total / total.sum(axis=1, keepdims=True)
        assert np.abs(debiased - 1 / n).max() < 0.01, n
        assert np.abs(symmetric - 1 / n).max() < 0.01, n


def test_the_one_peer_exponential_graph_averages() -> None:
    def deviation(n: int, gossips: int) -> float:
        total = np.eye(n)
        for k in range(gossips):
            total = push_matrix("exponential", n, k) @ total
        return float(np.abs(total - 1 / n).max())

    for n in (4, 8, 16):
        assert deviation(n, n.bit_length() - 1) < 1e-15
        assert deviation(n, n.bit_length() - 2) > 0.05
    assert deviation(6, 3) == pytest.approx(1 / 12)  # 0.083
    assert deviation(12, 4) == pytest.approx(1 / 24)  # 0.042


# ---------------------------------------------------------------- gossip
class Watched(SGP):
    """log[t]: the total weight and the push weights after step t, the last step left out."""

    def start(self, x0: Params, n: int) -> None:
        super().start(x0, n)
        self.log: list[tuple[float, list[float]]] = []

    def rebias(self, workers: list[reference.Worker]) -> None:
        self.log.append((self.total_weight(), list(self.w)))
        super().rebias(workers)


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("graph", graphs, ids=[*GRAPHS, "random_pairs"])
def test_push_sum_conserves_mass(graph: Graph, delay: int) -> None:
    for size in (1, 2, 5, 6):
        recipe = Watched(graph, 2, delay)
        trace = still(recipe, size, 40)
        assert all(abs(total - size) < 1e-12 for total, _ in recipe.log)
        for t in range(40):
            assert gap(trace.consensus[t], mean(init[:size])) < 1e-12
        assert max(gap(end, mean(init[:size])) for end in trace.workers[-1]) < 0.02
        bipartite = isinstance(graph, str) and graph.startswith("bipartite")
        leaves_one = (bipartite and size == 5) or (delay > 0 and size > 1)
        assert (max(abs(w - 1) for _, ws in recipe.log for w in ws) > 0.01) == leaves_one


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("graph", graphs, ids=[*GRAPHS, "random_pairs"])
def test_d_psgd_conserves_the_mean(graph: Graph, delay: int) -> None:
    for size in (2, 5, 6):
        trace = still(d_psgd(graph, delay), size)
        for t in range(steps):
            assert gap(trace.consensus[t], mean(init[:size])) < 1e-12
        assert max(map(gap, trace.workers[delay], init)) > 1e-3
        assert delay == 0 or max(map(gap, trace.workers[delay - 1], init)) == 0


def test_the_optimizer_sees_x_and_the_gradient_at_z() -> None:
    # Overlap on one pair: after step 1 all weights are 1/2, so at step 2 x = z/2.
    decay: list[Optimizer] = [SGD(weight_decay=0.5), SGD(weight_decay=0.5)]
    trace = run(sgp(delay=2), 2, 2, decay, constant, data, init)
    z = trace.workers[0]
    for i in (0, 1):
        g = reference.gradient(z[i], data[i][1])
        x = {k: 0.5 * z[i][k] for k in NAMES}
        for k in NAMES:
            x[k] = x[k] - constant(reference.GROUP_OF[k], 2) * (g[k] + 0.5 * x[k])
        assert gap(trace.workers[1][i], scale(2.0, x)) < 1e-12


def test_a_delayed_push_arrives_exactly_then() -> None:
    x, y = init[0], init[1]
    trace = still(sgp("ring", delay=2), 2)
    assert gap(trace.workers[1][0], x) < 1e-12  # sent at 1 and 2: only weight has left
    # At step 3 worker 0 has x/4, w 1/4, and y/2, w 1/2, comes in.
    assert gap(trace.workers[2][0], scale(4 / 3, add(scale(0.25, x), scale(0.5, y)))) < 1e-12
    # D-PSGD: the correction of step 1 comes in at 3, that of step 2 (the same) at 4.
    late = still(d_psgd("ring", delay=2), 2)
    half, d = scale(0.5, add(x, y)), scale(0.5, add(y, scale(-1.0, x)))
    assert gap(late.workers[1][0], x) == 0
    assert gap(late.workers[2][0], half) < 1e-12
    assert gap(late.workers[3][0], add(half, d)) < 1e-12


def test_gossip_special_cases() -> None:
    for optimizer in (plain, nesterov, adam):
        each_step = go(local_sgd(1), optimizer)
        same(go(sgp("complete"), optimizer), each_step)
        same(go(d_psgd("complete"), optimizer), each_step)
        same(go(d_psgd("complete", 3), optimizer), go(local_sgd(1, 3), optimizer))
        two = go(local_sgd(1), optimizer, n=2)
        same(go(sgp(), optimizer, n=2), two)
        same(go(d_psgd(), optimizer, n=2), two)
        same(go(sgp(pairs), optimizer, n=2), two)
        for alone in (sgp(), sgp(delay=2), d_psgd(delay=2), sgp("complete")):
            same(go(alone, optimizer, n=1), go(Recipe(), optimizer, n=1))
    # Three peers among four workers is the complete graph; one peer is not.
    same(go(sgp(peers=3)), go(sgp("complete")))
    # One peer: push is the mean with one's in-neighbour; D-PSGD's ring has both neighbours.
    ring = still(sgp("ring"), steps=1).workers[0]
    assert gap(ring[2], mean([init[1], init[2]])) < 1e-12
    both = still(d_psgd("ring"), steps=1).workers[0]
    assert gap(both[2], mean(init[1:4])) < 1e-12


def test_gossip_options_make_a_difference() -> None:
    runs = [go(sgp(graph)) for graph in GRAPHS]
    runs += [
        go(sgp(peers=2)),
        go(sgp(delay=1)),
        go(sgp(delay=2)),
        go(d_psgd()),
        go(d_psgd(delay=1)),
    ]
    # With four workers these have the same edges in the same order: both linear graphs.
    linear = GRAPHS.index("directed_linear"), GRAPHS.index("bipartite_linear")
    same(runs[linear[0]], runs[linear[1]])
    del runs[linear[1]]
    # 1 + 2^1 = 3 = -1 (mod 4): the bipartite exponential one is also the same.
    same(runs[linear[0]], runs.pop(GRAPHS.index("bipartite_exponential")))
    for i, one in enumerate(runs):
        for other in runs[:i]:
            differ(one, other)


def test_hierarchical() -> None:
    for delay in (0, 2):
        for policy in ("keep", "average", "reset"):
            whole = go(local_sgd(3, delay, policy), adam)
            same(go(hierarchical(3, 3, 2, delay, policy), adam), whole)
            if policy != "reset":  # a group of one averages over itself, but resets all the same
                same(go(hierarchical(2, 3, 1, delay, policy), adam), whole)
            same(go(hierarchical(3, 6, 4, delay, policy), adam), whole)
    trace = still(hierarchical(2, 5, 2))
    groups = mean(init[:2]), mean(init[2:4])
    assert gap(trace.workers[0][1], init[1]) == 0
    assert max(gap(x, groups[i // 2]) for i, x in enumerate(trace.workers[1])) < 1e-12
    assert max(gap(x, mean(groups)) for x in trace.workers[4]) < 1e-12
    a, b = go(hierarchical(2, 6, 2)), go(hierarchical(2, 6, 2, 1))
    differ(a, go(local_sgd(2)))
    differ(a, b)
    # Step 6 is both: only the larger runs, and it is sent once.
    recipe = hierarchical(2, 6, 2, 3)
    run(recipe, n, 6, nesterov, lr, data, init)
    assert [due for due, _ in recipe.flight] == [7, 9]


# ---------------------------------------------------------------- elastic
def test_easgd_conserves_and_contracts() -> None:
    period, beta = 3, 0.9
    for size in (1, 4, 5):
        trace = still(easgd(period, beta), size)
        start, a0 = mean(init[:size]), init[0]
        for t in range(1, steps + 1):
            rounds, xs, a = t // period, trace.workers[t - 1], trace.consensus[t - 1]
            # sum_i dx_i = -da: sum(x) + a stays.
            assert gap(add(scale(size, mean(xs)), a), add(scale(size, start), a0)) < 1e-12
            # Each round: spread *(1 - beta/n), distance of the mean from a *(1 - beta/n - beta).
            spread = (1 - beta / size) ** rounds
            wide = add(init[size - 1], scale(-1.0, start))
            assert gap(xs[size - 1], add(mean(xs), scale(spread, wide))) < 1e-12
            far = (1 - beta / size - beta) ** rounds
            away = add(start, scale(-1.0, a0))
            assert gap(mean(xs), add(a, scale(far, away))) < 1e-12


def test_easgd_pull_comes_every_step_and_before_the_round() -> None:
    period, beta, p = 3, 0.6, 0.4
    trace = still(easgd(period, beta, p), steps=4)
    a, keep = init[0], 1 - p / period
    for t in (1, 2):
        assert gap(trace.workers[t - 1][1], toward(init[1], a, 1 - keep**t)) < 1e-12
    pulled = [toward(x, a, 1 - keep**3) for x in init[:n]]
    after = [toward(x, a, beta / n) for x in pulled]
    center = toward(a, mean(pulled), beta)
    assert max(map(gap, trace.workers[2], after)) < 1e-12
    assert gap(trace.consensus[2], center) < 1e-12
    assert gap(trace.workers[3][1], toward(after[1], center, p / period)) < 1e-12


def test_elastic_special_cases() -> None:
    for optimizer in (plain, nesterov, adam):
        same(go(easgd(3, 0.0), optimizer), go(Recipe(), optimizer), consensus=False)
        same(go(downpour(3), optimizer, n=1), go(Recipe(), optimizer, n=1), consensus=False)
        # a + sum(x - a) = a - n*(a - xbar): a slow step with alpha = n.
        many = go(slowmo(None, 2, 0.0, 4.0), optimizer)
        same(go(downpour(2), optimizer), many, limit=1e-8)
    assert gap(go(easgd(3, 0.0)).consensus[-1], init[0]) == 0
    alone = go(downpour(3), n=1)
    assert gap(alone.consensus[5], alone.workers[5][0]) == 0
    # beta = n: the center moves as DOWNPOUR's, the workers to where it was.
    full, sums = still(easgd(3, float(n)), steps=3), still(downpour(3), steps=3)
    assert gap(full.consensus[2], sums.consensus[2]) < 1e-12
    assert max(gap(x, init[0]) for x in full.workers[2]) < 1e-12
    # p = tau: the workers are at the center after every step, which then never moves.
    assert gap(go(easgd(2, 0.9, 2.0)).consensus[-1], init[0]) < 1e-12
    for one, other in [
        (easgd(3), easgd(3, 0.5)),
        (easgd(3), easgd(3, pull=0.1)),
        (easgd(3), easgd(2)),
        (downpour(3), downpour(2)),
    ]:
        differ(go(one), go(other))


# ---------------------------------------------------------------- leader
def quiet(period: int, **options: object) -> LSGD:
    """LSGD with all strengths 0 but those given."""
    zeros = dict(pull=0.0, local_pull=0.0, drift=0.0, local_drift=0.0)
    return LSGD(period, **{**zeros, **options})  # type: ignore[arg-type]


def test_lsgd_special_cases() -> None:
    for optimizer in (plain, nesterov, adam):
        same(go(quiet(4, group_size=2), optimizer), go(Recipe(), optimizer))
        same(go(lsgd(4), optimizer, n=1), go(lsgd(4, drift=0.1, pull=0.7), optimizer, n=1))
        # Local leaders of one group of all are global ones.
        together = go(quiet(99, local_period=3, local_pull=0.4, local_drift=0.2, group_size=n))
        same(together, go(quiet(3, pull=0.4, drift=0.2)))
        # Full pull: after a round all hold the leader's parameters.
        recipe = quiet(3, pull=1.0)
        trace = go(recipe, optimizer)
        leader = recipe.leaders[0][2]
        free = go(Recipe(), optimizer).workers[2][leader]
        assert max(gap(x, free) for x in trace.workers[2]) == 0
    assert lsgd(16).local_period is None and LSGD(16).group_size is None
    for period, local in ((16, 4), (7, 1), (3, 1)):
        default = run(lsgd(period, group_size=2), n, 20, plain, lr, data, init)
        given = run(lsgd(period, local_period=local, group_size=2), n, 20, plain, lr, data, init)
        same(default, given)
    base = dict(local_period=2, group_size=2, window=3)
    options = dict(drift=0.5, local_drift=0.5, pull=0.5, local_pull=0.5, window=1, local_period=3)
    for name, value in options.items():
        differ(go(lsgd(4, **base)), go(lsgd(4, **{**base, name: value})))  # type: ignore[arg-type]
    differ(go(lsgd(4, **base)), go(lsgd(4, score="gradient", **base)))  # type: ignore[arg-type]
    differ(go(lsgd(4, **base)), go(lsgd(4)))  # type: ignore[arg-type]


def test_lsgd_ties_go_to_the_lowest_rank() -> None:
    alike = [data[0]] * n
    for score in ("loss", "gradient"):
        recipe = LSGD(4, local_period=2, group_size=2, score=score)
        run(recipe, n, 4, nesterov, lr, alike, init)
        assert recipe.leaders == [
            (2, "local", 0),
            (2, "local", 2),
            (4, "local", 0),
            (4, "local", 2),
            (4, "global", 0),
        ]


@pytest.mark.parametrize("window", [1, 3, 10])
def test_lsgd_leads_by_the_mean_of_the_last_losses(window: int) -> None:
    recipe = quiet(4, local_period=2, group_size=2, window=window)
    trace = run(recipe, n, 12, plain, lr, data, init)
    met, seen = 0, {"local": 0, "global": 0}
    for t, scope, rank in recipe.leaders:
        first = 0 if scope == "global" else rank - rank % 2
        score = {}
        for i in range(first, n if scope == "global" else first + 2):
            starts = [init[0], *(workers[i] for workers in trace.workers)]
            score[i] = np.mean([loss(starts[s], data[i][s]) for s in range(max(0, t - window), t)])
        assert score[rank] == min(score.values()), (t, scope)
        met, seen[scope] = met + 1, seen[scope] + 1
    assert seen == {"local": 12, "global": 3} and met == 15


def test_lsgd_gradient_score() -> None:
    # Plain SGD without pulls: (x_prev - x)*g is lr*g^2.
    free: list[Optimizer] = [SGD(), SGD()]
    recipe = quiet(2, score="gradient")
    trace = run(recipe, n, 12, free, lr, data, init)
    s = np.zeros(n)
    for t in range(1, 13):
        before = [init[0]] * n if t == 1 else trace.workers[t - 2]
        for i in range(n):
            g = reference.gradient(before[i], data[i][t - 1])
            squares = sum(lr(reference.GROUP_OF[k], t) * float(np.sum(g[k] ** 2)) for k in NAMES)
            s[i] = 0.9 * s[i] + 0.1 * squares
        if t % 2 == 0:
            assert recipe.leaders[t // 2 - 1] == (t, "global", int(np.argmin(s)))
    assert np.allclose(recipe.s, s, atol=1e-14)
    # At lr 0 x moves by the pull alone: it is in the score, unless that is switched off.
    for counted in (True, False):
        pulled = quiet(5, drift=0.5, score="gradient", score_includes_pulls=counted)
        still(pulled)
        assert (max(map(abs, pulled.s)) > 1e-6) == counted


def test_lsgd_pulls_toward_x0_then_the_last_leader() -> None:
    tau_g, tau_l, p2, p1 = 4, 2, 0.8, 0.5
    recipe = quiet(tau_g, local_period=tau_l, drift=p2, local_drift=p1, group_size=2)
    trace = still(recipe, steps=5)
    leaders = {(t, scope, rank // 2): rank for t, scope, rank in recipe.leaders}
    xs = list(init[:n])
    goal, own = init[0], [init[0]] * n
    for t in range(1, 6):
        # The global pull first: the local one has the last word.
        xs = [toward(x, goal, p2 / tau_g) for x in xs]
        xs = [toward(x, own[i], p1 / tau_l) for i, x in enumerate(xs)]
        assert max(map(gap, trace.workers[t - 1], xs)) < 1e-12, t
        if t % tau_l == 0:
            own = [xs[leaders[t, "local", i // 2]] for i in range(n)]
        if t % tau_g == 0:
            goal = xs[next(rank for s, kind, rank in recipe.leaders if (s, kind) == (t, "global"))]
    assert gap(goal, init[0]) > 1e-3 and gap(own[3], init[0]) > 1e-3


def test_lsgd_both_due_local_first() -> None:
    recipe = quiet(2, local_period=2, pull=0.5, local_pull=0.25, group_size=2)
    trace = still(recipe, steps=2)
    (_, _, low), (_, _, high), (t, scope, top) = recipe.leaders
    assert (t, scope) == (2, "global") and low in (0, 1) and high in (2, 3) and top in (low, high)
    for i in range(n):
        x = toward(init[i], init[(low, high)[i // 2]], 0.25)
        assert gap(trace.workers[1][i], toward(x, init[top], 0.5)) < 1e-12
    # A leader does not move; mean(x) is the consensus, of all or of the group.
    assert gap(trace.workers[1][top], init[top]) < 1e-12
    assert gap(trace.consensus[1], mean(trace.workers[1])) == 0
    ends = [reference.Worker(x) for x in trace.workers[1]]
    assert gap(recipe.group_consensus(ends, 3), mean(trace.workers[1][2:])) == 0


# ---------------------------------------------------------------- slow momentum over any base
bases: dict[str, Callable[[], Recipe]] = {
    "sgp": lambda: sgp(),
    "sgp ring": lambda: sgp("ring"),
    "sgp overlap": lambda: sgp(delay=2),
    "sgp two peers overlap": lambda: sgp(peers=2, delay=5),
    "d_psgd": lambda: d_psgd(),
    "d_psgd overlap": lambda: d_psgd("exponential", 2),
    "hierarchical": lambda: hierarchical(2, 3, 2, 1),
    "easgd": lambda: easgd(2, pull=0.2),
    "downpour": lambda: downpour(2),
    "lsgd": lambda: lsgd(4, local_period=2, group_size=2),
}


def test_slowmo_agrees_with_the_earlier_reference() -> None:
    for policy in ("keep", "average", "reset"):
        for average in (True, False):
            for rate in (lr, lambda group, t: 0.0 if t == 8 else lr(group, t)):
                for base in (None, ddp(), local_sgd(3), local_sgd(3, 2)):
                    mine = slowmo(base, 4, 0.6, 0.8, average=average)
                    theirs = reference.slowmo(base, 4, 0.6, 0.8, average=average)
                    mine.optimizer_state = theirs.optimizer_state = policy
                    there = reference.run(theirs, n, steps, adam, rate, data, init)
                    same(go(mine, adam, rate), there)


@pytest.mark.parametrize("base", bases.values(), ids=bases)
def test_slowmo_over_any_base(base: Callable[[], Recipe]) -> None:
    # beta 0, alpha 1: the slow step is a plain average.
    trace = go(slowmo(base(), 3, 0.0, 1.0))
    for t in (3, 6, 9, 12):
        assert max(gap(x, trace.workers[t - 1][0]) for x in trace.workers[t - 1]) == 0
        assert gap(trace.consensus[t - 1], trace.workers[t - 1][0]) < 1e-12
    assert gap(trace.workers[0][1], trace.workers[0][2]) > 1e-6
    name = next(key for key, value in bases.items() if value is base)
    # At period 1 the base is skipped for good, but for its pulls.
    never = go(slowmo(base(), 1, 0.0, 1.0)), go(slowmo(None, 1, 0.0, 1.0))
    (differ if name in ("easgd", "lsgd") else same)(*never)
    # Until the first slow step it is the base, and the messages in flight all fold there.
    alone, first = go(base()), go(slowmo(base(), 13, 0.5, 1.0))
    assert all(max(map(gap, alone.workers[t], first.workers[t])) < 1e-12 for t in range(12))
    differ(first, go(slowmo(base(), 13, 0.5, 0.7)))
    for options in (
        dict(average=False),
        dict(optimizer_state="reset"),
        dict(optimizer_state="average"),
        dict(skip_base_round=False),
    ):
        other = go(SlowMo(base(), 4, **options))
        # (Bases that keep the mean do not care, unless their graph moves on.)
        if "skip_base_round" not in options or name in ("sgp", "easgd", "downpour", "lsgd"):
            differ(go(slowmo(base(), 4)), other)
    # A mixing that keeps the mean, with nobody learning: everyone lands on the mean.
    if name not in ("easgd", "downpour", "lsgd"):
        ends = still(slowmo(base(), 5, 0.0, 1.0)).workers[4]
        assert max(gap(x, mean(init[:n])) for x in ends) < 1e-12
        # So, for the average, it does not matter whether the due gossip runs first.
        both = [still(slowmo(base(), 5, 0.0, 1.0, skip_base_round=skip)) for skip in (True, False)]
        assert gap(both[0].workers[4][0], both[1].workers[4][0]) < 1e-12


def test_slowmo_over_sgp_special_cases() -> None:
    for optimizer in (plain, nesterov, adam):
        each = go(local_sgd(1), optimizer)
        same(go(slowmo(sgp("complete"), 3, 0.0, 1.0), optimizer), each, consensus=False)
        same(go(slowmo(d_psgd("complete"), 3, 0.0, 1.0), optimizer), each, consensus=False)
        # No average, beta 0, alpha 1 on a regular graph: nothing but a skipped gossip.
        nothing = SlowMo(sgp(), 3, 0.0, 1.0, average=False, skip_base_round=False)
        same(go(nothing, optimizer), go(sgp(), optimizer), consensus=False)
        same(go(slowmo(None, 3, 0.0, 1.0, False), optimizer), go(Recipe(), optimizer), False)
        one = run(slowmo(sgp(delay=1), 4, 0.0, 0.6), 1, steps, optimizer, lr, data, init)
        same(one, lookahead(4, 0.6, steps, optimizer, lr, data, init))
    # The state policies, as identities of one slow step per step.
    averaged = slowmo(sgp(), 1, 0.0, 1.0, optimizer_state="average")
    same(go(averaged, [SGD(0.9, nesterov=True)] * 2), go(ddp(), [SGD(0.9, nesterov=True)] * 2))
    reset = slowmo(sgp(), 1, 0.0, 1.0, optimizer_state="reset")
    faster: Rates = lambda group, t: 1.9 * lr(group, t)  # noqa: E731  first m = g: g + 0.9*g
    same(go(reset, [SGD(0.9, nesterov=True)] * 2), go(ddp(), [SGD(), SGD()], faster))


def test_a_slow_step_does_not_advance_the_graph() -> None:
    asked: list[int] = []

    def ring(rank: int, n: int, k: int, peers: int) -> list[int]:
        asked.extend([k] if rank == 0 else [])
        return out_peers("ring", rank, n, k, peers)

    for base in (sgp(ring), d_psgd(ring)):
        for skip, expected in ((True, [0, 1, 2, 3]), (False, [0, 1, 2, 3, 4, 5])):
            asked.clear()
            run(slowmo(base, 3, skip_base_round=skip), n, 6, plain, lr, data, init)
            assert asked == expected


def test_settling_before_the_slow_step() -> None:
    # Two workers, overlap 2, slow step at 3: at 1 and 2 halves left, at 3 both come in.
    x, y = init[0], init[1]
    recipe = Watched("ring", 1, 2)
    trace = still(SlowMo(recipe, 3, 0.0, 1.0, average=False), 2)
    own = scale(1.0, add(scale(0.25, x), scale(0.75, y)))  # w = 1/4 + 1/2 + 1/4 = 1
    assert gap(trace.workers[2][0], own) < 1e-12
    assert [ws[0] for _, ws in recipe.log] == [1, 0.5, 0.25, 1, 0.5, 0.25] + [1, 0.5, 0.25] * 2 + [
        1
    ]

    # Uneven weights (an odd bipartite graph), no average: z stays what it was.
    def states(recipe: Recipe) -> list[Params]:
        return run(recipe, 3, 3, [SGD(), SGD()], zero, data, init, apart=True).workers[2]

    uneven = Watched("bipartite_linear")
    slow = states(SlowMo(uneven, 3, 0.0, 1.0, average=False, skip_base_round=False))
    assert uneven.w == [1.0] * 3 and len(set(uneven.log[2][1])) > 1
    assert max(map(gap, slow, states(sgp("bipartite_linear")))) < 1e-12
    # The slow average is the mean that gossip conserves, here that of the start; not z's.
    averaged = states(slowmo(sgp("bipartite_linear"), 3, 0.0, 1.0, skip_base_round=False))
    assert gap(averaged[0], mean(list(init[:3]))) < 1e-12
    assert gap(averaged[0], mean(slow)) > 1e-3


def test_every_trace_is_finite() -> None:
    def leaves(p: Params) -> list[Array]:
        return [p[name] for name in NAMES]

    for base in bases.values():
        for average in (True, False):
            trace = go(slowmo(base(), 4, average=average), adam)
            ends = [*trace.workers[-1], trace.consensus[-1]]
            assert all(math.isfinite(float(a.sum())) for p in ends for a in leaves(p))
