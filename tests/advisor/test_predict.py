"""The cost model's terms by hand, one at a time: rates, latencies, losses, waiting, unequal workers
and networks, ranks of a worker, and what is made of numbers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import laconic as la
from laconic.advisor import advice_on
from laconic.advisor.numbers import facts_from
from laconic.advisor.quorum import predict
from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.round import Recipe
from laconic.policy.candidates import candidates
from laconic.policy.facts import Facts, Net
from laconic.policy.predict import work_key

FACTS = Facts(4, ((8_000_000,),), 4, 0.5, 80e6, 0.0)
WHOLE = 4.8
"""Seconds of an all-reduce: 2 * 3/4 * 32 MB at 80 Mbit/s."""
BITS = 32 * 1200
SLOW_WORKER = Facts(3, ((1200,),), 4, 2.0, BITS, 0.5, computes=(1.0, 1.0, 2.0))
"""A message takes a second, and rank 0's share of a round 4 s and two latencies: 5 s."""
NUMBERS: dict[str, Any] = {
    "params": 8_000_000, "step_time": 0.5, "bandwidth": 80e6, "one_way": 0.0, "workers": 4,
}  # fmt: skip


def seconds(recipe: Recipe | str, facts: Facts = FACTS, **known: Any) -> float:
    made = parse_recipe(recipe) if isinstance(recipe, str) else recipe
    assert isinstance(made, tuple)
    return predict(made, replace(facts, **known)).seconds


def test_work_of_a_round_is_waited_for_or_shares_the_processors() -> None:
    """0.2 s of coding, and 48 MB of sending at 1 ns a byte. The cost is known of a round's kind,
    whatever its period and delay."""
    recipe = la.local_sgd(10)
    work = {work_key(r): 0.2 for r in recipe}
    assert seconds(recipe, work=work) == pytest.approx(0.5 + (WHOLE + 0.2) / 10)
    assert seconds(la.diloco(10), work=work) == pytest.approx(0.5 + WHOLE / 10)
    assert work_key(la.local_sgd(3, delay=2)[0]) in work
    assert work_key(la.local_sgd(3, codec="int4")[0]) not in work
    known: dict[str, Any] = {"work": work, "carry": 1e-9}
    hidden = la.local_sgd(20, delay=19)
    assert seconds(hidden, **known) == pytest.approx(0.5)
    assert seconds(hidden, **known, contention=0.5) == pytest.approx(0.5 + 0.5 * 0.248 / 20)


def test_muons_direction_takes_its_time_whether_or_not_the_round_sends() -> None:
    """0.8 s, every 8 steps; over `ddp` the round sends nothing, and no rank waits there."""
    facts = replace(FACTS, turning=0.8, skew=0.1)
    pairs = [
        (la.diloco(8), la.diloco(8, outer="muon")),
        (la.outer_step(la.ddp(), 8), la.outer_step(la.ddp(), 8, outer="muon")),
    ]
    for plain, turned in pairs:
        assert seconds(turned, facts) - seconds(plain, facts) == pytest.approx(0.1)
    assert predict(pairs[1][1], facts).bytes == predict(la.ddp(), facts).bytes
    assert seconds(pairs[1][0], facts) == pytest.approx(seconds(la.ddp(), facts))


def test_who_meets_seldom_waits_less_for_the_slowest() -> None:
    """Over the square root of as many steps."""
    for text, waits in (
        ("local_sgd(1)", 0.1),
        ("local_sgd(16)", 0.1 / 4),
        ("slowmo(local_sgd(4), 8)", 0.05),
        ("streaming_diloco(16, 4, 0, codec=None)", 0.05),
        ("local_sgd(16, delay=15)", 0.0),
        ("sgp()", 0.0),
    ):
        more = seconds(text, skew=0.1) - seconds(text)
        assert more == pytest.approx(waits, rel=1e-3, abs=1e-9), text


def test_what_a_round_sends_by_hand() -> None:
    # each bucket takes its messages' latencies: 25 MiB and the rest of 32 MB, two messages each;
    # where they are long, buckets share them
    assert seconds(la.local_sgd(1), one_way=0.005) == pytest.approx(0.5 + WHOLE + 2 * 2 * 0.005)
    assert seconds(la.local_sgd(1), one_way=0.1) == pytest.approx(0.5 + WHOLE + 2 * 0.1)
    streaming = la.streaming_diloco(4, 4, 0, codec=None)  # a quarter is one bucket
    assert seconds(streaming, one_way=0.1) == pytest.approx(0.5 + WHOLE / 4 + 2 * 0.1)
    # of 7 workers one sits still, another one each time
    assert predict(la.d_psgd("random"), FACTS).bytes == 32e6
    assert predict(la.d_psgd("random"), replace(FACTS, workers=7)).bytes == pytest.approx(32e6)


def test_sums_travel_where_nothing_is_coded() -> None:
    """Of 2 ranks a node an all-reduce passes the card once, what goes to every rank twice, but for
    what stays in the node."""
    facts = facts_from(**{**NUMBERS, "backward_share": 0.0}, ranks=2)
    coded = predict(la.ddp(codec="int8"), facts)
    exposed = coded.seconds - facts.compute
    assert exposed == pytest.approx(coded.bytes * 8 / (80e6 / 2), rel=1e-6)
    low = predict(la.power_sgd(4), facts)
    assert low.seconds - facts.compute == pytest.approx(2 * low.bytes * 8 / 80e6, rel=1e-6)


def test_what_backward_hides_is_what_it_takes() -> None:
    """Int8 gradients in 3 buckets of 0.3 s each, behind a backward pass of b seconds: the last
    begins when the one before it has arrived, or at the end of the pass."""
    coded = la.ddp(codec="int8")
    known: dict[str, Any] = {"shapes": ((3 * 2**21,),)}  # which can be cut into three alike
    each = (seconds(la.local_sgd(1, codec="int8"), **known) - 0.5) / 3
    for share in (0.2, 1.0):
        b = 0.5 * share
        end = 0.0
        for bucket in range(1, 4):
            end = max(end, b * bucket / 3) + each
        assert seconds(coded, backward=share, **known) == pytest.approx(0.5 - b + end, rel=1e-4)


def test_hidden_is_the_share_that_nobody_waits_for() -> None:
    recipes = (), la.local_sgd(4), la.local_sgd(20, delay=19), la.local_sgd(20, delay=4)
    hidden = [predict(recipe, FACTS).hidden for recipe in recipes]
    assert hidden == pytest.approx([0.0, 0.0, 1.0, 2.0 / WHOLE], abs=1e-9)


def test_ranks_of_a_worker_carry_a_part_each() -> None:
    """2 ranks a worker: half of the model between the workers, all of it back inside, where also
    gradients are averaged: one bucket's last part shows."""
    nets = {"workers": Net(80e6, 0.0), "replica": Net(8e9, 0.0), "world": Net(80e6, 0.0)}
    known: dict[str, Any] = {"ranks": 2, "nets": nets}
    inside = seconds(la.local_sgd(10**9), **known) - 0.5
    assert 0 < inside < 0.032
    back = 0.5 * 32e6 * 8 / 8e9
    assert seconds(la.local_sgd(1), **known) == pytest.approx(0.5 + inside + WHOLE / 2 + back)
    assert predict(la.local_sgd(1), replace(FACTS, **known)).bytes == pytest.approx(24e6)


def test_bytes_of_gradients_are_those_that_leave_a_worker() -> None:
    """4 workers of 8 ranks. In a ring, each card passes the sum on once; what all send to all
    stays in the worker for 7 of 31 others."""
    alone = predict(la.ddp(), FACTS).bytes
    several = replace(FACTS, ranks=8)
    assert predict(la.ddp(), several).bytes == pytest.approx(alone / 8 * (31 / 32) / (3 / 4))
    coded = predict(la.ddp(codec="int4"), FACTS).bytes
    whole = coded * (31 / 32) / (3 / 4)
    found = predict(la.ddp(codec="int4"), several).bytes
    assert found == pytest.approx(whole * 24 / 31, rel=1e-3)


def test_what_rounds_keep_in_models() -> None:
    """Anchor and momentum with their owner, residual and reference on every worker, a gradient's
    bucket, and y and its message for half of the time."""
    models = {
        "local_sgd(4)": 0.0,
        "ddp()": 1.0,
        "ddp(codec='int4')": 1 + 1 + 1 / 4,
        "slowmo(local_sgd(4), 48)": 2 / 4,
        "slowmo(local_sgd(4), 48, sharded=False)": 2.0,
        "diloco(8, codec='int4')": 2 / 4 + 2 + 1 / 4,
        "local_sgd(8, delay=4)": 0.5 * 2,
    }
    rows = {row.recipe: row for row in advice_on(FACTS, list(models)).rows}
    for text, count in models.items():
        assert rows[text].memory == pytest.approx(count * 32e6, rel=1e-3), text


# -- from numbers ----


def test_numbers_make_the_same_facts() -> None:
    facts = facts_from(**NUMBERS)
    assert facts.elements == 8_000_000
    assert seconds(la.local_sgd(10), facts) == pytest.approx(0.5 + WHOLE / 10)
    half = facts_from(**NUMBERS, dtype="bfloat16")
    assert seconds(la.local_sgd(10), half) == pytest.approx(0.5 + WHOLE / 20)
    # ranks of a node share its network interface: an eighth each takes as long as all of it; an
    # all-reduce over all 32 ranks passes each interface once
    shared = facts_from(**NUMBERS, ranks=8)
    assert seconds(la.local_sgd(10), shared) == pytest.approx(0.5 + WHOLE / 10)
    assert seconds(la.ddp(), shared, backward=0.0) == pytest.approx(0.5 + 2 * 31 / 32 * 3.2)


# -- lost packets ----


def test_a_lost_packet_is_a_round_trip_and_a_quarter_late() -> None:
    """An all-reduce of 1,448,000 bytes: 2 messages of 375 packets from each of 3 ranks, 1125 in
    all, of which at least one is lost with probability 1 - 0.999**1125. Above 8 Mbit/s and 50 ms
    each way, the last round trip has 100,000 bytes, or 70 packets from each rank. They take 0.1 s,
    and half of it remains when a packet is lost."""
    packets = 3 * math.ceil(1_448_000 * 2 / 3 / 1448)
    for rate, late in (
        (1e12, 1.25 * 0.1 * (1 - 0.999**packets)),
        (8e6, (0.125 - 0.1 / 2) * (1 - 0.999 ** (3 * 70))),
    ):
        facts = Facts(3, ((362_000,),), 4, 0.5, rate, 0.05)
        more = seconds(la.local_sgd(1), facts, loss=0.001) - seconds(la.local_sgd(1), facts)
        assert more == pytest.approx(2 * late, rel=1e-4)


def test_latency_and_losses_are_part_of_what_a_delay_hides() -> None:
    """What is sent takes at most 0.7 of the time that latency leaves: 0.2 s of bytes and 2 x 0.1 s
    of latency in every second step. The delays that `auto` may choose cover lost packets."""
    facts = Facts(2, ((500_000,),), 4, 0.1, 8e7, 0.1)
    assert seconds("local_sgd(2, delay=2)", facts) == pytest.approx((0.2 / 0.7 + 2 * 0.1) / 2)
    far = Facts(4, ((845, 1024),), 4, 0.15, 5e7, 0.04)
    plain, lossy = (
        [c.recipe[0].delay for c in candidates(replace(far, loss=p))] for p in (0, 0.01)
    )
    assert all(b >= a for a, b in zip(plain, lossy, strict=True)) and sum(lossy) > sum(plain)


# -- quorums, slow workers, slow networks ----

ROUND = 8 / 6 + 1
"""Seconds of a round under `SLOW_WORKER`."""


def test_at_own_pace_a_step_takes_the_harmonic_mean_and_the_round() -> None:
    # 4, 4 and 2 steps in 4 s, and then the mean: 4/3 of a message, in 8/6 s, and two latencies
    found = predict(la.diloco(4, pace="own"), SLOW_WORKER)
    assert found.seconds == pytest.approx((4 + ROUND) / (10 / 3))
    assert SLOW_WORKER.alone == pytest.approx(1.2)
    assert seconds("diloco(4)", SLOW_WORKER) == pytest.approx(2 + ROUND / 4)
    long = seconds("diloco(40000, pace='own')", SLOW_WORKER)
    assert long == pytest.approx(SLOW_WORKER.alone, rel=1e-3)


def test_a_round_closes_with_its_quorum_and_grace() -> None:
    # rank 2 arrives after 8 s, the others after 4
    late = 3 / (2 * 4 / (4 + ROUND) + 4 / (8 + ROUND))
    assert seconds("diloco(4, quorum=2)", SLOW_WORKER) == pytest.approx(late)
    a_little = 3 / (2 * 4 / (5 + ROUND) + 4 / (8 + ROUND))
    assert seconds("diloco(4, quorum=2, grace=1)", SLOW_WORKER) == pytest.approx(a_little)
    for text in ("diloco(4, quorum=2, grace=9)", "diloco(4, quorum=3)"):
        assert seconds(text, SLOW_WORKER) == pytest.approx((8 + ROUND) / 4)


def test_all_wait_for_a_slow_network() -> None:
    facts = Facts(3, ((1200,),), 4, 1.0, BITS / 10, 0.5, rates=(BITS, BITS, BITS / 10))
    for text in ("diloco(4, quorum=3)", "diloco(4, quorum=2)"):
        assert seconds(text, facts) == pytest.approx((4 + 80 / 6 + 1) / 4)


def test_a_round_with_a_quorum_costs_what_one_of_all_does() -> None:
    equal = replace(SLOW_WORKER, compute=1.0, computes=())
    found = predict(la.diloco(4, quorum=3), equal)
    assert found.seconds == pytest.approx(1 + ROUND / 4) and found.hidden == 0
    assert found.bytes == pytest.approx(2 * 2 * 4800 / 3 / 4)
    recipe = la.diloco(4, quorum=2, grace=1.0)
    work = {work_key(recipe[0]): 3.0}
    assert work_key(la.diloco(8, pace="own")[0]) in work, "the processors do the same"
    assert seconds(recipe, equal, skew=0.5, work=work) == pytest.approx(1 + (ROUND + 3 + 1) / 4)


def test_a_better_network_is_never_slower() -> None:
    better: dict[str, tuple[float, ...]] = {
        **{"rate": (1e6, 1e7, 1e8, 1e10), "one_way": (0.3, 0.1, 0.01, 0.0)},
        **{"loss": (0.05, 0.01, 1e-4, 0.0), "workers": (16, 8, 4, 2)},
    }
    base = replace(FACTS, one_way=0.01)
    for text in ("ddp()", "ddp(codec='int4')", "local_sgd(4)", "streaming_diloco(8)", "sgp()"):
        for name, values in better.items():
            found = [seconds(text, base, **{name: value}) for value in values]
            assert all(a >= b * (1 - 1e-9) for a, b in itertools.pairwise(found)), (text, name)


@pytest.mark.parametrize(
    "recipe",
    [
        *(la.ddp(), la.streaming_diloco(8), la.local_sgd(4, delay=2, codec="int4"), la.sgp()),
        la.diloco(4, quorum=2),
    ],
    ids=str,
)
def test_as_many_bytes_are_predicted_as_are_sent(recipe: Recipe) -> None:
    shapes = (32, 5), (32,), (4, 32), (4,)

    def worker(rank: int) -> int:
        model = nn.ParameterList([torch.ones(shape).double() for shape in shapes])
        sync = la.attach(model, optimizer := torch.optim.SGD(model.parameters(), 0.01), recipe)
        sent = [0, 0]
        for step in range(16):
            torch.stack([(rank + p).square().sum() for p in model]).sum().backward()
            optimizer.step()
            sent[step // 8] = sync.stats().bytes_sent
        return sent[1] - sent[0]

    facts = Facts(4, shapes, 8, compute=0.1, rate=1e9, one_way=0.0)
    sent = sum(la.simulate(worker, 4)) / 4 / 8
    assert predict(recipe, facts).bytes == pytest.approx(sent)
