"""Predict the seconds per step of recipes with a quorum. Of others: `laconic.policy.predict`, which
has the symbols.

Rounds with a quorum of q workers, at most every H steps, let worker i arrive after k_i steps of c_i
seconds; k_i = H, or at own pace the steps that it takes while the fastest takes H. Then

    t_i     = k_i * c_i + sum_r (T_r + w_r) + s * sqrt(H)
    closed  = min(largest t, q-th smallest t + grace)
    seconds = n / sum_i k_i / max(t_i, closed)                              per step of a worker

Every worker takes part in every round, also those that go on computing, so all wait T_r.
"""

from __future__ import annotations

import math

from laconic.algorithms.exchanges import QuorumMean
from laconic.algorithms.round import Recipe
from laconic.algorithms.schedules import own_pace
from laconic.policy import predict as plain
from laconic.policy.facts import Facts
from laconic.policy.predict import Prediction, load_of, often


def predict(recipe: Recipe, facts: Facts) -> Prediction:
    """Predict the cost of a step under ``recipe``, with a quorum or without."""
    if recipe and all(isinstance(r.exchange, QuorumMean) for r in recipe):
        return _predict_quorum(recipe, facts)
    return plain.predict(recipe, facts)


def _predict_quorum(recipe: Recipe, facts: Facts) -> Prediction:
    """Predict the cost of a step under a recipe whose rounds close with a quorum. All are due
    equally often, over workers of one rank, without a delay (`check_quorum`)."""
    exchange = recipe[0].exchange
    assert isinstance(exchange, QuorumMean), "selected by `predict`"
    n, period = facts.workers, round(1 / often(recipe[0]))
    computes = facts.computes or (facts.compute,) * n
    fastest = 1 / min(computes) if min(computes) else 0.0
    other, sent = facts.skew * math.sqrt(period), 0.0
    for load in (load_of(r, facts) for r in recipe):
        other += load.exposed
        sent += load.sent
    steps = [period] * n
    if exchange.pace == "own":
        speeds = (1 / c if c else fastest for c in computes)
        steps = [own_pace(period, speed, fastest, grace=exchange.grace) for speed in speeds]
    ends = [k * c + other for k, c in zip(steps, computes, strict=True)]
    reached = sorted(ends)[min(exchange.workers or n, n) - 1]
    closed = min(max(ends), reached + exchange.grace)
    spans = [max(end, closed) for end in ends]
    rounds = sum(1 / span for span in spans) / n  # of a mean worker, per second
    seconds = n / sum(k / span for k, span in zip(steps, spans, strict=True))
    return Prediction(seconds, sent * rounds * seconds)
