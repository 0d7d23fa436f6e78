"""The references checked by closed forms: what they conserve, and small cases by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.references import coded, gossip, outer
from tests.references.problem import (
    FLAT,
    NAMES,
    SGD,
    SHAPES,
    AdamW,
    Array,
    Params,
    Worker,
    add,
    copy,
    gradient,
    initial,
    loss,
    make_data,
    mean,
    run,
    scale,
)
from tests.support.recipes import ROWS, tagged

N, STEPS = 3, 13
DATA, INIT = make_data(4, STEPS, seed=1), initial(4, seed=2)


def single(*values: float) -> Array:
    return np.array(values, np.float32)


def gap(p: Params, q: Params) -> float:
    return max(float(np.abs(p[k] - q[k]).max()) for k in p)


def test_gradients_are_finite_differences() -> None:
    p, batch, g = INIT[0], DATA[0][0], gradient(INIT[0], DATA[0][0])
    for name in NAMES:
        for at in np.ndindex(p[name].shape):
            low, high = copy(p), copy(p)
            low[name][at] -= 1e-6
            high[name][at] += 1e-6
            assert abs((loss(high, batch) - loss(low, batch)) / 2e-6 - g[name][at]) < 1e-8


@pytest.mark.parametrize("rule", [SGD(0.9, True, 0.02), SGD(0.5, False, 0.1), AdamW((0.8, 0.95))])
def test_optimizers_are_those_of_torch(rule: SGD | AdamW) -> None:
    worker = Worker(copy(INIT[0]))
    params = {k: torch.nn.Parameter(torch.from_numpy(v.copy())) for k, v in INIT[0].items()}
    options = {k: v for k, v in vars(rule).items()}
    kind = torch.optim.SGD if isinstance(rule, SGD) else torch.optim.AdamW
    optimizer = kind(params.values(), lr=0.1, **options)
    for t in range(1, 5):
        g = gradient(worker.x, DATA[0][t])
        worker.step(g, [rule, rule], lambda group, step: 0.1, t)
        for k, p in params.items():
            p.grad = torch.from_numpy(g[k])
        optimizer.step()
    assert all(np.abs(worker.x[k] - p.detach().numpy()).max() < 1e-14 for k, p in params.items())


# -- what is conserved ----


@pytest.mark.parametrize("name", [*tagged("conserves"), "easgd(2, 0.5, pull=0.3)"])
def test_rounds_keep_the_mean(name: str) -> None:
    """Without learning from step 6 on, the consensus stays, and is what x comes from; what elastic
    workers lose, the center gains."""
    row = ROWS[name]
    assert row.reference is not None
    recipe = row.reference(2)
    recipe.pull = 0.0  # type: ignore[attr-defined]
    trace = run(recipe, 4, STEPS, [SGD(0.9), SGD()], lambda _, t: 0.1 * (t < 6), DATA, INIT)
    for t in range(6, STEPS):
        if "easgd" in name:
            sums = [add(scale(4.0, mean(trace.workers[k])), trace.consensus[k]) for k in (5, t)]
            assert gap(*sums) < 1e-12
        else:
            assert gap(trace.consensus[t], trace.consensus[5]) < 1e-12


@pytest.mark.parametrize("graph", gossip.GRAPHS)
@pytest.mark.parametrize("delay", [0, 2])
def test_weights_are_conserved(graph: str, delay: int) -> None:
    recipe = gossip.SGP(graph, 2, delay)
    run(recipe, 5, 7, [SGD(), SGD()], lambda group, t: 0.1, DATA + DATA[:1], INIT)
    assert recipe.total_weight() == pytest.approx(5, abs=1e-12)


@pytest.mark.parametrize("relative", [False, True])
def test_what_is_not_sent_is_owed(relative: bool) -> None:
    """received + (o + mean(e)) = mean(m) + (o + mean(e) before), whatever the codec rounds."""
    rng = np.random.default_rng(3)

    def draw() -> Params:
        return {k: rng.standard_normal(shape) for k, shape in SHAPES.items()}

    for codec in (coded.int8(8), coded.int2(4)):
        means = coded.CodedMean(codec, [FLAT], draw(), N, relative=relative)
        owed = scale(0.0, INIT[0])
        for _ in range(4):
            m = [draw() for _ in range(N)]
            received, before = means(m), owed
            owed = add(means.o, mean(means.e))
            assert gap(add(received, owed), add(mean(m), before)) < 1e-12
            assert gap(means.r, received if relative else scale(0.0, received)) == 0.0
        assert gap(owed, scale(0.0, owed)) > 1e-4


# -- by hand ----


@pytest.mark.parametrize(
    ("codec", "given", "arrives"),
    [
        (coded.int8(4), single(127, -64, 0.4, 0.6), single(127, -64, 0, 1)),  # s = 1
        (coded.int8(5), single(127, 0.5, 1.5, 2.5, -0.5), single(127, 0, 2, 2, 0)),  # to even
        (coded.int2(2), single(2, 0.9, -0.25), single(2, 0, -0.25)),  # a short last block
        (coded.int4(4), single(7, 3.5, 2.5, -1.5), single(7, 4, 2, -2)),
        (coded.int2(2), single(1 + 2**-9, 0), single(1, 0)),  # s halfway: to the even bfloat16
        (coded.int2(2), single(2.0**-140, 0), single(0, 0)),  # the scale is 2^-126 at least
        (coded.cast("bfloat16"), single(1 + 2**-8, 1 + 3 * 2**-8), single(1, 1 + 2**-6)),
        (coded.cast("float16"), single(1 + 2**-11, 2049), single(1, 2048)),
    ],
)
def test_codecs(codec: coded.Codec, given: Array, arrives: Array) -> None:
    np.testing.assert_array_equal(codec(given), arrives)


def test_directions() -> None:
    """Singular vectors remain, singular values come near each other, and the length stays."""
    s = np.random.default_rng(0).standard_normal((7, 5))
    u, sigma, vt = np.linalg.svd(s, full_matrices=False)
    found = np.diag(u.T @ outer.muon_direction(s) @ vt.T)
    assert found.max() / found.min() < 1.5 < sigma.max() / sigma.min()
    assert outer.length(outer.muon_direction(s)) == pytest.approx(outer.length(s))
