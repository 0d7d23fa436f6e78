"""The references of coded rounds checked: by hand, by what they conserve, by special cases."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.references import reference
from tests.references.reference import NAMES, SGD, Recipe, initial, make_data
from tests.references.reference_coded import (
    Algorithm,
    Array,
    Codec,
    CodedMean,
    GatheredMean,
    NoLoCo,
    Params,
    Trace,
    Worker,
    bfloat16_of,
    cast,
    cosines,
    ddp,
    demo,
    diloco,
    divisor,
    easgd,
    exact,
    flat,
    int2,
    int4,
    int8,
    largest_scale,
    local_sgd,
    matrix,
    noloco,
    orthonormal,
    partners,
    power_sgd,
    run,
    slowmo,
    sparse_loco,
    split,
    streaming_diloco,
    topk,
    unflat,
)
from tests.references.reference_decade import Rounds
from tests.references.reference_decade import run as run_rounds
from tests.references.reference_elastic import EASGD

n, steps = 3, 13
data, init = make_data(4, 40, seed=1), initial(1, seed=2)
x0 = [init[0][name] for name in NAMES]
CODECS = [int8(8), int4(4), int2(4), cast("float16"), cast("bfloat16"), topk(2, 8, int4(8))]


def single(*values: float) -> Array:
    return np.array(values, np.float32)


def lr(t: int) -> float:
    return 0.2 / (1 + 0.1 * t)


def gradient(i: int, t: int, x: Params) -> Params:
    g = reference.gradient(dict(zip(NAMES, x, strict=True)), data[i][t - 1])
    return [g[name] for name in NAMES]


def go(algorithm: Algorithm, momentum: float = 0.5, dtype: type = np.float64) -> Trace:
    return run(algorithm, n, steps, x0, gradient, lr, momentum, dtype)


def dense(recipe: Recipe, momentum: float = 0.5) -> reference.Trace:
    """The references without codecs on the same problem."""
    rules, loop = [SGD(momentum)] * 2, run_rounds if isinstance(recipe, Rounds) else reference.run
    return loop(recipe, n, steps, rules, lambda group, t: lr(t), data, init)


def gap(one: Trace, other: reference.Trace) -> float:
    worst = 0.0
    for mine, yours in zip(one.workers, other.workers, strict=True):
        for x, p in zip(mine, yours, strict=True):
            worst = max(worst, float(np.abs(flat(x) - flat([p[k] for k in NAMES])).max()))
    for a, p in zip(one.consensus, other.consensus, strict=True):
        worst = max(worst, float(np.abs(a - flat([p[k] for k in NAMES])).max()))
    return worst


def difference(one: Trace, other: Trace) -> float:
    def pieces(trace: Trace) -> list[Array]:
        return [flat(x) for step in trace.workers for x in step] + trace.consensus

    pairs = zip(pieces(one), pieces(other), strict=True)
    return max(float(np.abs(x - y).max()) for x, y in pairs)


# ---------------------------------------------------------------- codecs
@pytest.mark.parametrize(
    ("codec", "given", "arrives"),
    [
        (int8(4), single(127, -64, 0.4, 0.6), single(127, -64, 0, 1)),  # s = 1
        (int8(5), single(127, 0.5, 1.5, 2.5, -0.5), single(127, 0, 2, 2, 0)),  # ties to even
        (int8(2), single(127, 1.5, 254, 1.2), single(127, 2, 254, 2)),  # s = 1 and 2
        (int2(2), single(2, 0.9, -0.25), single(2, 0, -0.25)),  # a short last block
        (int4(4), single(7, 3.5, 2.5, -1.5), single(7, 4, 2, -2)),
        (int2(4), single(2, 0.9, 1.1, -1), single(2, 0, 2, 0)),  # s = 2
        (int2(2), single(1 + 2**-9, 0), single(1, 0)),  # s halfway: to the even bfloat16
        (int2(2), single(1 + 3 * 2**-9, 0), single(1 + 2**-7, 0)),
        (int4(2), single(0, 0), single(0, 0)),
        (int2(2), single(2.0**-140, 2.0**-126), single(0, 2.0**-126)),
        (int2(2), single(2.0**-140, 0), single(0, 0)),  # the scale is 2^-126 at least
        (cast("bfloat16"), single(1 + 2**-8, 1 + 3 * 2**-8, -3), single(1, 1 + 2**-6, -3)),
        (cast("float16"), single(1 + 2**-11, 1 + 3 * 2**-11, 2049), single(1, 1 + 2**-9, 2048)),
        (cast("float32"), single(0.1, -2), single(0.1, -2)),
        (topk(2, 4, exact()), single(1, -3, 3, 2, 5), single(0, -3, 3, 0, 5)),
        (topk(2, 4, exact()), single(2, -2, 2, 1), single(2, -2, 0, 0)),  # ties: lower index
        (topk(4, 4, int2(2)), single(1, 8, 2, 4), single(0, 8, 0, 4)),  # blocks by index
        (topk(2, 3, int2(2)), single(0.9, 0.5, -2, 0, 3, 1), single(0, 0, -2, 0, 3, 0)),
    ],
)
def test_codecs_by_hand(codec: Codec, given: Array, arrives: Array) -> None:
    found = codec(given)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, arrives)


def test_the_scale_of_the_largest_numbers_is_finite() -> None:
    largest = np.float32(np.finfo(np.float32).max)
    for top, codec in ((127, int8(2)), (7, int4(2)), (1, int2(2))):
        s = largest_scale(top)
        above = (np.asarray(s).view(np.uint32) + 0x10000).view(np.float32)
        assert np.isfinite(s * np.float32(top))
        assert float(above) * top > float(largest)
        found = codec(np.array([largest, -largest], np.float32))
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, [largest, -largest], rtol=2**-7)


def test_casts_as_torch() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 20000, dtype=np.uint64).astype(np.uint32)
    x = bits.view(np.float32)[np.isfinite(bits.view(np.float32))]
    found = torch.from_numpy(x.copy()).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(bfloat16_of(x), found)


def test_a_codec_in_float64_rounds_to_float32_first() -> None:
    x = np.array([1.0 + 2.0**-40, 0.25])
    np.testing.assert_array_equal(cast("float32")(x), [1.0, 0.25])
    assert cast("float32")(x).dtype == np.float64
    np.testing.assert_array_equal(exact()(x), x)


# ---------------------------------------------------------------- the coded mean
def test_coded_mean_by_hand() -> None:
    """Two workers, s the larger of each two elements; worker 1 owns only padding."""
    mean = CodedMean(int2(2), 2, np.zeros(2), relative=False)
    m = [np.array([4.0, 1.0]), np.array([2.0, 2.0])]
    np.testing.assert_array_equal(mean.round(m), [3, 0])  # sent [4 0] and [2 2]; w = [3 1]
    np.testing.assert_array_equal(mean.e, [[0, 1, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(mean.o, [0, 1, 0, 0])
    # v = [4 2] and [2 2], 2/4 a tie: sent [4 0] and [2 2]; w = [0 1] + [3 1] = [3 2]
    np.testing.assert_array_equal(mean.round(m), [3, 3])
    np.testing.assert_array_equal(mean.e, [[0, 2, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(mean.o, [0, -1, 0, 0])


def test_a_relative_coded_mean_by_hand() -> None:
    mean = CodedMean(int2(1), 2, np.array([10.0, 20.0]), relative=True)
    assert mean.size == 2
    found = mean.round([np.array([12.0, 20.0]), np.array([10.0, 19.0])])
    np.testing.assert_array_equal(found, [11, 19.5])  # differences 2, 0 and 0, -1: sent exactly
    np.testing.assert_array_equal(mean.r, [11, 19.5])
    slow = CodedMean(int2(1), 1, np.array([10.0]), relative=True)
    assert slow.round([np.array([12.0])], lambda mean, own: mean + 1) == 13


def test_without_feedback_nothing_is_owed() -> None:
    mean = CodedMean(int2(2), 2, np.zeros(2), relative=False, feedback=0.0)
    m = [np.array([4.0, 1.0]), np.array([2.0, 2.0])]
    for _ in range(3):
        np.testing.assert_array_equal(mean.round(m), [3, 0])
    assert not np.any(mean.e) and not np.any(mean.o)


def test_a_gathered_mean_by_hand() -> None:
    mean = GatheredMean(topk(1, 2, exact()), 2, np.array([1.0, 1.0]), relative=True, feedback=0.5)
    m = [np.array([4.0, 2.0]), np.array([1.0, 3.0])]  # differences [3 1] and [0 2]
    np.testing.assert_array_equal(mean.round(m), [2.5, 2])
    np.testing.assert_array_equal([e[:2] for e in mean.e], [[0, 1], [0, 0]])
    # differences [1.5 0] + 0.5*[0 1] and [-1.5 1]: sent [1.5 0] and [-1.5 0]
    np.testing.assert_array_equal(mean.round(m), [2.5, 2])
    np.testing.assert_array_equal([e[:2] for e in mean.e], [[0, 0.5], [0, 1]])


@pytest.mark.parametrize("feedback", [1.0, 0.9])
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("kind", [CodedMean, GatheredMean])
@pytest.mark.parametrize("codec", CODECS)
def test_what_is_not_sent_is_owed(
    codec: Codec, kind: type[CodedMean], relative: bool, feedback: float
) -> None:
    """received + (o + mean(e)) = mean(m) + b*(o + mean(e) before), whatever the codec rounds."""
    rng = np.random.default_rng(3)
    mean = kind(codec, n, rng.standard_normal(50), relative=relative, feedback=feedback)
    received, sent, owed, inputs = np.zeros(50), np.zeros(50), np.zeros(50), np.zeros(50)
    for _ in range(6):
        m = [rng.standard_normal(50) for _ in range(n)]
        before, owed_before = mean.r[:50].copy(), owed
        received = mean.round(m)
        owed = (mean.o + np.mean(mean.e, axis=0))[:50]
        average = np.mean(m, axis=0)
        np.testing.assert_allclose(received + owed, average + feedback * owed_before, atol=1e-12)
        inputs += average - before
        sent += received - before
        np.testing.assert_array_equal(mean.r[:50], received if relative else 0)
    assert np.abs(owed).max() > 1e-4
    if feedback == 1.0:
        np.testing.assert_allclose(sent + owed, inputs, atol=1e-12)


def test_slices_are_whole_blocks() -> None:
    for codec in CODECS:
        mean = CodedMean(codec, n, np.zeros(50), relative=False)
        assert mean.size >= 50 and mean.size % (n * codec.unit) == 0
        assert mean.size - 50 < n * codec.unit


# ---------------------------------------------------------------- special cases
PAIRS: dict[str, tuple[Callable[[Codec], Algorithm], Callable[[], Recipe]]] = {
    "ddp": (lambda c: ddp(c), reference.ddp),
    "local": (lambda c: local_sgd(4, c), lambda: reference.local_sgd(4)),
    "local delayed": (lambda c: local_sgd(4, c, 2), lambda: reference.local_sgd(4, 2)),
    "local, as late as a period": (lambda c: local_sgd(3, c, 3), lambda: reference.local_sgd(3, 3)),
    "slowmo": (
        lambda c: slowmo(local_sgd(2, c), 4, c, 0.6, 0.9),
        lambda: reference.slowmo(reference.local_sgd(2), 4, 0.6, 0.9),
    ),
    "slowmo over a delayed base": (
        lambda c: slowmo(local_sgd(3, c, 2), 5, c),
        lambda: reference.slowmo(reference.local_sgd(3, 2), 5),
    ),
    "diloco": (lambda c: diloco(3, c, 0.5, 0.6), lambda: reference.diloco(3, 0.5, 0.6)),
    "diloco delayed": (
        lambda c: diloco(3, c, 0.5, 0.6, delay=2),
        lambda: reference.diloco(3, 0.5, 0.6, delay=2),
    ),
    "easgd": (lambda c: easgd(3, c, 0.8), lambda: EASGD(3, 0.8)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_without_rounding_they_are_the_dense_ones(name: str) -> None:
    coded, plain = PAIRS[name]
    assert gap(go(coded(exact())), dense(plain())) < 1e-12
    assert gap(go(coded(cast("float32")), dtype=np.float32), dense(plain())) < 5e-6
    assert gap(go(coded(cast("float32"))), dense(plain())) < 5e-6


@pytest.mark.parametrize("name", PAIRS)
def test_codecs_change_the_run_a_little(name: str) -> None:
    """8 bits are near the dense run, 2 bits further off; float32 is near float64."""
    coded, plain = PAIRS[name]
    fine, coarse = gap(go(coded(int8(8))), dense(plain())), gap(go(coded(int2(8))), dense(plain()))
    assert 1e-5 < fine < 0.05 and 2 * fine < coarse < 1.0


def test_slowmo_at_lr_zero() -> None:
    """A slow step at lr 0 between two others, the workers apart: it moves a, and leaves u."""

    def rate(t: int) -> float:
        return 0.0 if t == 8 else lr(t)

    found = run(slowmo(local_sgd(2, exact()), 4, exact()), n, steps, x0, gradient, rate, 0.5)
    rules = [SGD(0.5)] * 2
    recipe = reference.slowmo(reference.local_sgd(2), 4)
    assert (
        gap(found, reference.run(recipe, n, steps, rules, lambda g, t: rate(t), data, init)) < 1e-12
    )


def test_ddp_codes_one_bucket_in_reverse_order() -> None:
    """[4 | 3 1] is coded as [3 1][4]: 3, 1 are one block, 4 alone; r is 0."""
    algorithm = ddp(int2(2))
    algorithm.start([np.zeros(1), np.zeros(2)], 1)
    (found,) = algorithm.gradients(1, [[np.array([4.0]), np.array([3.0, 1.0])]], 0.1)
    np.testing.assert_array_equal(found[0], [4])
    np.testing.assert_array_equal(found[1], [3, 0])


def test_slowmo_keeps_two_references() -> None:
    algorithm = slowmo(local_sgd(2, int4(8)), 4, int4(8))
    trace = run(algorithm, n, 4, x0, gradient, lr)
    length = algorithm.mean.length
    for x in trace.workers[3]:
        np.testing.assert_array_equal(flat(x), algorithm.mean.r[:length])
    np.testing.assert_array_equal(flat(trace.workers[1][0]), algorithm.base.mean.r[:length])


def test_easgd_what_workers_lose_the_center_gains() -> None:
    algorithm = easgd(1, exact(), 0.8)
    algorithm.start(x0, n)
    rng = np.random.default_rng(0)
    apart = [[p + rng.standard_normal(p.shape) for p in x0] for _ in range(n)]
    workers = [Worker(x, [0 * p for p in x]) for x in apart]
    before, a = sum(w.vector for w in workers), algorithm.a
    algorithm.after_step(1, workers, 0.1)
    lost = before - sum(w.vector for w in workers)
    np.testing.assert_allclose(lost, algorithm.a - a, atol=1e-12)


# ---------------------------------------------------------------- fragments
@pytest.mark.parametrize(
    ("sizes", "k", "parts"),
    [
        ([4, 4, 4, 4], 2, [[0, 1], [2, 3]]),
        ([1, 1, 14], 2, [[0, 1], [2]]),  # middles .5, 1.5, 9 of 16
        ([14, 1, 1], 2, [[0], [1, 2]]),  # middle 7
        ([8, 8], 4, [[], [0], [], [1]]),  # middles 4 and 12 of 16: fragments 1 and 3
        ([16], 2, [[], [0]]),  # the middle itself belongs to the upper half
        ([3, 5, 2], 1, [[0, 1, 2]]),
    ],
)
def test_fragments_by_hand(sizes: list[int], k: int, parts: list[list[int]]) -> None:
    assert split(sizes, k) == parts


@pytest.mark.parametrize(("delay", "mix"), [(0, None), (2, None), (2, 0.3), (0, 0.2)])
def test_one_fragment_is_diloco(delay: int, mix: float | None) -> None:
    one = go(streaming_diloco(4, 1, int4(8), 0.5, 0.6, delay, mix))
    assert difference(one, go(diloco(4, int4(8), 0.5, 0.6, delay, mix))) == 0.0


def toward(i: int, t: int, x: Params) -> Params:
    """Each tensor is drawn to a target of worker i and step t, whatever the other tensors are."""
    return [p - np.cos(np.arange(p.size) + i + t + p.size) for p in x]


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_fragment_is_diloco_at_its_own_steps(delay: int) -> None:
    """Where tensors do not touch each other, fragment 1 of 2 is DiLoCo every 4 steps, and
    fragment 0 the same two steps later, the first two standing still."""
    begin: Params = [np.sin(np.arange(10.0)), np.cos(np.arange(11.0))]
    both = run(streaming_diloco(4, 2, int4(4), delay=delay), n, steps, begin, toward, lr)

    def later(i: int, t: int, x: Params) -> Params:
        return [0 * x[0]] if t <= 2 else toward(i, t - 2, x)

    first = run(
        diloco(4, int4(4), delay=delay), n, steps + 2, begin[:1], later, lambda t: lr(t - 2)
    )
    second = run(diloco(4, int4(4), delay=delay), n, steps, begin[1:], toward, lr)
    for t in range(steps):
        for i in range(n):
            np.testing.assert_array_equal(both.workers[t][i][0], first.workers[t + 2][i][0])
            np.testing.assert_array_equal(both.workers[t][i][1], second.workers[t][i][0])
        consensus = [first.consensus[t + 2], second.consensus[t]]
        np.testing.assert_array_equal(both.consensus[t], np.concatenate(consensus))


def test_fragments_move_at_their_own_steps() -> None:
    """Four tensors, H = 4, K = 3: fragments after steps 1, 2 and 4 of four."""
    trace = go(streaming_diloco(4, 3, int4(8)))
    parts = split([p.size for p in x0], 3)
    assert parts == [[0, 1], [2], [3]]
    like, sizes = x0, []
    for t in range(1, steps):
        old, new = unflat(trace.consensus[t - 1], like), unflat(trace.consensus[t], like)
        moved = {k for k in range(3) for p in parts[k] if np.any(old[p] != new[p])}
        sizes.append(moved)
    due = {1: {0}, 2: {1}, 0: {2}, 3: set()}
    assert sizes == [due[t % 4] for t in range(2, steps + 1)]


# ---------------------------------------------------------------- SparseLoCo
def test_whole_chunks_are_local_sgd() -> None:
    """k = chunk, nothing rounded, alpha 1: the mean of x; whatever the feedback, e stays 0."""
    for feedback in (0.0, 0.95, 1.0):
        trace = go(sparse_loco(4, 8, 8, exact(), feedback))
        assert gap_workers(trace, dense(reference.local_sgd(4))) < 1e-12


def gap_workers(one: Trace, other: reference.Trace) -> float:
    """The anchor is the consensus of the one, the mean of x of the other: the workers alone."""
    return gap(Trace(one.workers), reference.Trace(other.workers))


def test_sparse_loco_with_whole_chunks_is_an_outer_sgd() -> None:
    """alpha alone: DiLoCo without momentum."""
    sparse = go(sparse_loco(4, 8, 8, exact(), lr=0.6))
    assert gap(sparse, dense(reference.diloco(4, 0.6, 0.0))) < 1e-12


def test_sparse_loco_as_the_paper_writes_it() -> None:
    """e <- b*e + (a - x) ;  q = topk(e) ;  e <- e - q ;  a <- a - alpha*mean(q) ;  x <- a"""
    b, alpha, codec = 0.9, 0.7, topk(2, 8, int2(8))
    algorithm = sparse_loco(3, 2, 8, int2(8), b, alpha)
    found = go(algorithm)
    x = [flat(x0) for _ in range(n)]
    a, e, v = x[0], [0 * x[0] for _ in range(n)], [0 * x[0] for _ in range(n)]
    for t in range(1, steps + 1):
        for i in range(n):
            v[i] = 0.5 * v[i] + flat(gradient(i, t, unflat(x[i], x0)))
            x[i] = x[i] - lr(t) * v[i]
        if t % 3 == 0:
            e = [b * e[i] + (a - x[i]) for i in range(n)]
            q = [codec(e[i]) for i in range(n)]
            e = [e[i] - q[i] for i in range(n)]
            a = a - alpha * np.mean(q, axis=0)
            x = [a.copy() for _ in range(n)]
        for i in range(n):
            np.testing.assert_allclose(flat(found.workers[t - 1][i]), x[i], atol=1e-12)
    kept = [-owed[: a.size] for owed in algorithm.mean.e]
    np.testing.assert_allclose(kept, e, atol=1e-12)
    assert np.abs(e).max() > 1e-3


# ---------------------------------------------------------------- NoLoCo
def test_partners_by_hand() -> None:
    assert partners([2, 0, 3, 1]) == [2, 3, 0, 1]
    assert partners([1, 2, 0]) == [0, 2, 1]
    assert partners([0]) == [0]


def test_a_pair_on_its_own_is_heavy_ball() -> None:
    """Two workers always paired: their anchors stay equal, gamma has nothing to do."""
    rules = [SGD(0.5)] * 2
    found = run(noloco(3, [[1, 0]] * 9, 0.6, 0.4), 2, steps, x0, gradient, lr, 0.5)
    heavy = reference.heavy_ball_outer(2, steps, 3, 0.4, 0.6, rules, lambda g, t: lr(t), data, init)
    assert gap(found, heavy) < 1e-12


def test_an_odd_one_out_goes_on_alone() -> None:
    found = run(noloco(3, [[1, 0, 2]] * 9), 3, steps, x0, gradient, lr)
    alone = run(noloco(3, [[0]] * 9), 1, steps, x0, lambda i, t, x: gradient(2, t, x), lr)
    for both, one in zip(found.workers, alone.workers, strict=True):
        np.testing.assert_allclose(flat(both[2]), flat(one[0]), atol=1e-14)


def test_noloco_by_hand() -> None:
    """One number a worker; worker 0 and 1 are a pair."""
    algorithm = NoLoCo(1, [[1, 0]], lr=0.5, momentum=0.25, gamma=0.75)
    algorithm.start([np.zeros(1)], 2)
    algorithm.a, algorithm.m = [np.array([4.0]), np.array([8.0])], [np.ones(1), 2 * np.ones(1)]
    workers = [Worker([np.array([3.0])], []), Worker([np.array([5.0])], [])]
    algorithm.after_step(1, workers, 0.1)
    # mean(a - x) = 2, mean(a) = 6: m = .25*1 + .5*2 + .75*(-2) and .25*2 + .5*2 + .75*2
    np.testing.assert_array_equal(algorithm.m, [[-0.25], [3.0]])
    np.testing.assert_array_equal([w.vector for w in workers], [[4.25], [5.0]])


def test_gamma_one_brings_pairs_to_their_mean() -> None:
    algorithm = NoLoCo(1, [partners([0, 2, 3, 1])], momentum=0.0, gamma=1.0)
    algorithm.start([np.zeros(2)], 4)
    algorithm.a = [np.array([float(i), i * i]) for i in range(4)]
    workers = [Worker([a.copy()], []) for a in algorithm.a]
    algorithm.after_step(1, workers, 0.1)
    expected = [[1, 2], [2, 5], [1, 2], [2, 5]]
    np.testing.assert_allclose([w.vector for w in workers], expected, atol=1e-14)


def test_pairs_change_from_gossip_to_gossip() -> None:
    """Two gossips with gamma 1 bring four workers to the mean of all."""
    algorithm = NoLoCo(1, [[1, 0, 3, 2], [2, 3, 0, 1]], momentum=0.0, gamma=1.0)
    algorithm.start([np.zeros(1)], 4)
    algorithm.a = [np.array([float(2**i)]) for i in range(4)]
    workers = [Worker([a.copy()], []) for a in algorithm.a]
    for t in (1, 2):
        algorithm.after_step(t, workers, 0.1)
    np.testing.assert_allclose([w.vector for w in workers], 3.75 * np.ones((4, 1)), atol=1e-14)


# ---------------------------------------------------------------- PowerSGD
def queries(rank: int, dtype: type = np.float64) -> list[Array | None]:
    rng = np.random.default_rng(5)
    columns = [matrix(p).shape[1] if p.ndim > 1 else 0 for p in x0]
    least = [min(matrix(p).shape) for p in x0]
    sizes = zip(columns, least, strict=True)
    return [
        rng.standard_normal((c, min(rank, low))).astype(dtype) if c else None for c, low in sizes
    ]


def test_full_rank_is_the_mean() -> None:
    assert gap(go(power_sgd(queries(99))), dense(reference.ddp())) < 1e-12
    single = go(power_sgd(queries(99)), dtype=np.float32)
    assert gap(single, dense(reference.ddp())) < 2e-5


def test_power_sgd_by_hand() -> None:
    """mean(M) = [[3 1] [4 2]], Q = (1 0): P = (3 4)/5, Q <- (5 2.2)."""
    algorithm = power_sgd([np.array([[1.0], [0.0]]), None])
    algorithm.start([np.zeros((2, 2)), np.zeros(2)], 2)
    shift = np.array([[1.0, 0.0], [0.0, 0.0]])
    m = np.array([[3.0, 1.0], [4.0, 2.0]])
    grads = [[m + shift, np.ones(2)], [m - shift, 3 * np.ones(2)]]
    found = algorithm.gradients(1, grads, 0.1)
    product = np.array([[3, 1.32], [4, 1.76]])
    for g in found:
        np.testing.assert_allclose(g[0], product)
        np.testing.assert_array_equal(g[1], [2, 2])
    assert algorithm.q[0] is not None and algorithm.q[1] is None
    np.testing.assert_allclose(algorithm.q[0], [[5.0], [2.2]])
    np.testing.assert_allclose(algorithm.e[0][0], m + shift - product)
    np.testing.assert_allclose(algorithm.e[1][0], m - shift - product)


def test_power_sgd_owes_what_it_does_not_send() -> None:
    """Round by round: result + mean(e) = mean(g) + mean(e before); and three dimensions."""
    rng = np.random.default_rng(0)
    like = [np.zeros((4, 3, 2)), np.zeros((5, 7))]
    algorithm = power_sgd([rng.standard_normal((6, 2)), rng.standard_normal((7, 1))])
    algorithm.start(like, n)
    for t in range(5):
        grads = [[rng.standard_normal(p.shape) for p in like] for _ in range(n)]
        before = [np.mean([e[p] for e in algorithm.e], axis=0) for p in range(2)]
        found = algorithm.gradients(t, grads, 0.1)[0]
        for p in range(2):
            owed = np.mean([e[p] for e in algorithm.e], axis=0)
            expected = np.mean([g[p] for g in grads], axis=0) + before[p]
            np.testing.assert_allclose(found[p] + owed, expected, atol=1e-12)
            assert np.linalg.matrix_rank(matrix(found[p])) == 2 - p
            assert found[p].shape == like[p].shape


def test_only_the_span_of_q_matters() -> None:
    """Why it makes no difference whether Q is orthonormalized too."""
    mixed = [q if q is None else q @ np.array([[2.0, 1.0], [0.5, -3.0]]) for q in queries(2)]
    assert difference(go(power_sgd(queries(2))), go(power_sgd(mixed))) < 1e-10
    assert difference(go(power_sgd(queries(2))), go(power_sgd(queries(1)))) > 1e-3


def test_warm_start_finds_the_leading_directions() -> None:
    """Of the same matrix again and again, without what is owed: the best approximation."""
    rng = np.random.default_rng(1)
    left, right = orthonormal(rng.standard_normal((6, 4))), orthonormal(rng.standard_normal((5, 4)))
    m = left @ np.diag([4.0, 2.0, 0.2, 0.1]) @ right.T
    algorithm = power_sgd([rng.standard_normal((5, 2))])
    algorithm.start([m], 1)
    for t in range(20):
        algorithm.e[0][0] = 0 * m
        found = algorithm.gradients(t, [[m]], 0.1)[0][0]
    np.testing.assert_allclose(found, left[:, :2] @ np.diag([4.0, 2.0]) @ right[:, :2].T, atol=1e-9)


def test_orthonormal_is_gram_schmidt() -> None:
    p = np.random.default_rng(2).standard_normal((7, 3))
    found, q = orthonormal(p), p.copy()
    for c in range(3):
        for before in range(c):
            q[:, c] -= (q[:, before] @ p[:, c]) * q[:, before]
        q[:, c] /= np.linalg.norm(q[:, c])
    np.testing.assert_allclose(found, q, atol=1e-12)


# ---------------------------------------------------------------- DeMo
@pytest.mark.parametrize(
    ("size", "part"),
    [(64, 64), (128, 64), (96, 48), (100, 50), (130, 26), (7, 7), (67, 1), (134, 2), (1, 1)],
)
def test_chunks_divide_a_tensor(size: int, part: int) -> None:
    assert divisor(size, 64) == part


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_cosines(size: int) -> None:
    c = cosines(size)
    np.testing.assert_allclose(c @ c.T, np.eye(size), atol=1e-14)
    np.testing.assert_allclose(c @ np.ones(size), np.sqrt(size) * np.eye(size)[0], atol=1e-14)
    angles = np.pi * (np.arange(size) + 0.5) / size
    for f in range(1, size):
        np.testing.assert_allclose(
            c @ np.cos(f * angles), np.sqrt(size / 2) * np.eye(size)[f], atol=1e-13
        )


def test_demo_by_hand() -> None:
    """Chunks of two: coefficients (x + y)/sqrt(2) and (x - y)/sqrt(2). Worker 0 sends the sum
    of [4 3], worker 1 the difference of [2 -2] and of both chunks only one coefficient each."""
    algorithm = demo(decay=0.5, k=1, chunk=2)
    algorithm.start([np.zeros(4)], 2)
    grads = [[np.array([4.0, 3.0, 1.0, 1.0])], [np.array([2.0, -2.0, 3.0, 3.0])]]
    found = algorithm.gradients(1, grads, 1.0)
    # chunk 0: sum 7, sent by 0; difference 4, sent by 1: [7 7]/2 + [4 -4]/2 = [5.5 1.5]
    # chunk 1: sums 2 and 6, both sent: their mean, [2 2]
    np.testing.assert_allclose(found[0][0], [1, 1, 1, 1])
    assert abs(algorithm.margin - 1.5) < 1e-12
    np.testing.assert_allclose(algorithm.m[0][0], [0.5, -0.5, 0, 0], atol=1e-12)
    np.testing.assert_allclose(algorithm.m[1][0], [0, 0, 0, 0], atol=1e-12)
    left, update = algorithm.exchange([matrix(g[0]) for g in grads])
    np.testing.assert_allclose(update, [[5.5, 1.5, 2, 2]])
    over_all = demo(decay=0.5, k=1, chunk=2, over="workers").exchange([g[0][None] for g in grads])
    np.testing.assert_allclose(over_all[1], [[2.75, 0.75, 2, 2]])
    np.testing.assert_allclose(over_all[0], left)


@pytest.mark.parametrize("over", ["senders", "workers"])
def test_demo_sending_all_is_sign_sgd(over: str) -> None:
    """k = the chunk: nothing stays, every step is the sign of the mean gradient."""
    found = go(demo(k=99, chunk=64, over=over), momentum=0.0)
    x = flat(x0)
    for t in range(1, steps + 1):
        grads = [flat(gradient(i, t, unflat(x, x0))) for i in range(n)]
        x = x - lr(t) * np.sign(np.mean(grads, axis=0))
        np.testing.assert_allclose(flat(found.workers[t - 1][0]), x, atol=1e-10)


def test_demo_keeps_what_it_does_not_send() -> None:
    """One worker: what is left and what is sent make decay*m + lr*g; k coefficients a chunk."""
    rng = np.random.default_rng(4)
    algorithm = demo(decay=0.9, k=3, chunk=4)
    m = [rng.standard_normal((8, 6))]
    left, update = algorithm.exchange(m)
    np.testing.assert_allclose(left[0] + update, m[0], atol=1e-13)
    for i in (0, 4):
        for j in (0, 3):  # 6 columns: chunks of 3, the largest divisor not above 4
            chunk = cosines(4) @ update[i : i + 4, j : j + 3] @ cosines(3).T
            rest = cosines(4) @ left[0][i : i + 4, j : j + 3] @ cosines(3).T
            assert (np.abs(chunk) > 1e-12).sum() == 3
            assert np.abs(rest).max() <= np.abs(chunk)[np.abs(chunk) > 1e-12].min()


def test_demo_scales_the_gradient_by_lr_before_the_momentum() -> None:
    algorithm = demo(decay=0.5, k=1, chunk=2)
    algorithm.start([np.zeros((2, 2, 1))], 1)
    algorithm.m[0][0] = np.array([[[2.0], [4.0]], [[0.0], [0.0]]])
    algorithm.gradients(1, [[np.array([[[10.0], [0.0]], [[0.0], [-10.0]]])]], 0.1)
    # m = [[2 2] [0 -1]]: coefficients 3/2, 1/2, 5/2, -1/2; 5/2 of [[1 1] [-1 -1]]/2 is sent
    np.testing.assert_allclose(algorithm.m[0][0][..., 0], [[0.75, 0.75], [1.25, 0.25]])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_all_algorithms_keep_the_dtype_and_run_again(dtype: type) -> None:
    algorithms: list[Algorithm] = [
        ddp(int8(8)),
        slowmo(local_sgd(2, int4(8)), 4, int4(8)),
        diloco(4, int4(8), delay=2),
        streaming_diloco(4, 2, int4(8), delay=2),
        easgd(3, int4(8)),
        sparse_loco(4, 2, 8, int2(8)),
        noloco(4, [partners([0, 2, 1])] * 4),
        power_sgd(queries(2)),
        demo(k=2, chunk=4),
    ]
    for algorithm in algorithms:
        once = go(algorithm, dtype=dtype)
        assert {p.dtype for step in once.workers for x in step for p in x} == {np.dtype(dtype)}
        assert {a.dtype for a in once.consensus} == {np.dtype(dtype)}
        assert difference(once, go(algorithm, dtype=dtype)) == 0.0
