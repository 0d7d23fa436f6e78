"""Predict the seconds per step of recipes with a quorum. Of others: `laconic.policy.predict`, which
has the symbols.

Rounds with a quorum of q workers, at most every H steps, let worker i arrive after k_i steps of c_i
seconds; k_i = H, or at own pace the steps that it takes while the fastest takes H. Then

    t_i     = k_i * c_i + sum_r (T_ri + w_r) + s * sqrt(H)
    closed  = min(largest t, q-th smallest t + grace)
    seconds = n / sum_i k_i / max(t_i, closed)                              per step of a worker

T_ri is the time of what rank 0 receives from all and then sends to all (`QuorumMean.busiest`), or
longer if worker i's own network needs more for its message or for the result. Rank 0's own message
does not travel, so T_r0 = 0.
"""

from __future__ import annotations

import math
import statistics
from functools import lru_cache, partial
from itertools import pairwise

from laconic.algorithms.exchanges import QuorumMean
from laconic.algorithms.round import AnyRound, Recipe
from laconic.algorithms.schedules import own_pace
from laconic.links.cost import Cost
from laconic.policy import predict as plain
from laconic.policy.facts import Facts
from laconic.policy.predict import Prediction, elements, often, work_key


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
    network, sent = [0.0] * n, 0.0
    other = facts.skew * math.sqrt(period)
    sendings = [0.0] * n
    for r in recipe:
        there, back = quorum_travel(r, facts)
        sendings = [a + b for a, b in zip(sendings, there, strict=True)]
        network = [a + b + c for a, b, c in zip(network, there, back, strict=True)]
        sent += r.exchange.cost(elements(r, facts, n), facts.itemsize, n).bytes
        other += facts.work.get(work_key(r), 0.0)
    steps = [period] * n
    if exchange.pace == "own":
        skip = (exchange.workers or n) < n
        usual = statistics.median_low(sendings)
        pace = partial(own_pace, period, fastest=fastest, grace=exchange.grace, skip=skip)
        steps = [
            pace(1 / c if c else fastest, sending=t - usual)[0]
            for c, t in zip(computes, sendings, strict=True)
        ]
    ends = [k * c + t + other for k, c, t in zip(steps, computes, network, strict=True)]
    reached = sorted(ends)[min(exchange.workers or n, n) - 1]
    closed = min(max(ends), reached + exchange.grace)
    spans = [max(end, closed) for end in ends]
    rounds = sum(1 / span for span in spans) / n  # of a mean worker, per second
    seconds = n / sum(k / span for k, span in zip(steps, spans, strict=True))
    return Prediction(seconds, sent * rounds * seconds)


def quorum_travel(
    r: AnyRound, facts: Facts, remote: int | None = None
) -> tuple[list[float], list[float]]:
    """Return, by worker, the seconds of its message to rank 0, and those of the result, in a round
    of which so many ``remote`` workers are part, that is, all but rank 0 (None: all of them). The
    messages of a round are under way together."""
    n = facts.workers
    remote = n - 1 if remote is None else remote
    assert isinstance(r.exchange, QuorumMean), "it has a quorum"
    amount = r.exchange.busiest(elements(r, facts, n), facts.itemsize, remote + 1)
    way = Cost(amount.bytes // 2, amount.messages // 2)
    known = facts.nets.get("workers")
    rates = facts.rates or (facts.rate if known is None else known.rate,) * n
    receives = facts.receives or rates

    @lru_cache
    def seconds(home: float, away: float, shared: float) -> float:
        return facts.travel((r.over, "workers"), way, n, 1, min(home, remote * away, shared))

    there, back = [0.0] * n, [0.0] * n
    for first, last in pairwise(_alike(facts)):
        up = _through(facts, first, to_first=True)
        down = _through(facts, first, to_first=False)
        for worker in range(max(first, 1), last):
            there[worker] = seconds(receives[0], rates[worker], up)
            back[worker] = seconds(rates[0], receives[worker], down)
    return there, back


def _alike(facts: Facts) -> list[int]:
    """Return the ranks, and n, between which all workers share the same connections."""
    ends = {0, facts.workers}
    for each in facts.shared:
        ends |= {each.begin, each.begin + each.ranks}
        ends |= {each.end, each.end + each.others} if each.end is not None else set()
    return sorted(ends)


def _through(facts: Facts, worker: int, *, to_first: bool) -> float:
    """Return the bit/s of all messages to rank 0 together, or from it, that the connections which
    this ``worker`` shares with others allow. As many of each round's workers are behind each
    connection as there are of all."""
    least = math.inf
    for each in facts.shared:
        if to_first and each.sends(worker) and each.receives(0):
            least = min(least, each.rate * (facts.workers - 1) / each.ranks)
        elif not to_first and each.sends(0) and each.receives(worker):
            ways = each.others if each.end is not None else facts.workers - each.ranks
            least = min(least, each.rate * (facts.workers - 1) / ways)
    return least
