"""The cost model's terms by hand, one at a time; what rounds keep; what is read from numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import laconic as la
from laconic.advisor.advice import guides, memory
from laconic.advisor.numbers import facts_from
from laconic.algorithms.round import GradientRound, Recipe, Round, describe
from laconic.buckets import itemsize_of
from laconic.candidates import candidates, delay_for
from laconic.engine import overlap
from laconic.predict import Facts, Net, often, predict, work_key

FACTS = Facts(4, ((8_000_000,),), 4, 0.5, 80e6, 0.0)
WHOLE = 4.8
"""Seconds of an all-reduce: 2 * 3/4 * 32 MB at 80 Mbit/s."""


def seconds(recipe: Recipe, **known: Any) -> float:
    return predict(recipe, replace(FACTS, **known)).seconds


def work_of(recipe: Recipe, each: float) -> dict[str, float]:
    return {work_key(r): each for r in recipe}


def test_work_of_a_round_is_waited_for() -> None:
    recipe = la.local_sgd(10)
    assert seconds(recipe, work=work_of(recipe, 0.2)) == pytest.approx(0.5 + (WHOLE + 0.2) / 10)
    assert seconds(la.diloco(10), work=work_of(recipe, 0.2)) == pytest.approx(0.5 + WHOLE / 10)


def test_work_is_known_for_any_period_and_delay() -> None:
    (one,), (other,) = la.local_sgd(10), la.local_sgd(3, delay=2)
    assert work_key(one) == work_key(other) != work_key(la.local_sgd(3, codec="int4")[0])
    first, *_, last = la.streaming_diloco(8, 4)
    assert work_key(first) == work_key(last)


def test_work_beside_the_training_costs_what_processors_are_shared() -> None:
    """A round that is hidden: 0.2 s of coding and 48 MB of sending at 1 ns a byte."""
    recipe = la.local_sgd(20, delay=19)
    known = {"work": work_of(recipe, 0.2), "carry": 1e-9}
    assert seconds(recipe, **known) == pytest.approx(0.5)
    assert seconds(recipe, **known, contention=0.5) == pytest.approx(0.5 + 0.5 * 0.248 / 20)


def test_who_meets_seldom_waits_less_for_the_slowest() -> None:
    assert seconds(la.local_sgd(1), skew=0.1) == pytest.approx(0.5 + WHOLE + 0.1)
    assert seconds(la.local_sgd(16), skew=0.1) == pytest.approx(
        0.5 + WHOLE / 16 + 0.1 / 4, rel=1e-3
    )
    for free in (la.local_sgd(16, delay=15), la.sgp()):
        assert seconds(free, skew=0.1) == seconds(free)


@pytest.mark.parametrize(
    "recipe",
    [la.local_sgd(4), la.slowmo(la.local_sgd(4), 8), la.streaming_diloco(16, 4, 0, codec=None)],
    ids=["local_sgd", "slowmo", "streaming"],
)
def test_who_meets_as_often_waits_as_long(recipe: Recipe) -> None:
    assert seconds(recipe, skew=0.1) - seconds(recipe) == pytest.approx(0.05, rel=1e-3)


def test_each_bucket_takes_its_messages_latencies() -> None:
    """25 MiB and the rest of 32 MB, two messages each; a fragment of a quarter is one bucket."""
    late = {"one_way": 0.1}
    assert seconds(la.local_sgd(1), **late) == pytest.approx(0.5 + WHOLE + 2 * 2 * 0.1)
    streaming = la.streaming_diloco(4, 4, 0, codec=None)
    assert seconds(streaming, **late) == pytest.approx(0.5 + WHOLE / 4 + 2 * 0.1)


def test_messages_of_two_models_cost_two() -> None:
    assert predict(la.noloco(1), FACTS).bytes == 64e6
    odd = replace(FACTS, workers=7)  # one of which sits still, another one each time
    assert predict(la.noloco(1), odd).bytes == pytest.approx(64e6)


@pytest.mark.parametrize(
    ("recipe", "share"),
    [
        (la.local_sgd(10_000), 1e-4),
        (la.post_local_sgd(100, 10_000), 1e-4),
        (la.post_local_sgd(10_000, 16), 1 / 16),
        (la.local_sgd(48), 1 / 48),
    ],
    ids=["rare", "rare in the end", "late", "usual"],
)
def test_the_long_run_counts(recipe: Recipe, share: float) -> None:
    assert often(next(r for r in recipe if isinstance(r, Round))) == pytest.approx(share, rel=1e-3)
    assert sum(often(r) for r in recipe if isinstance(r, GradientRound)) == 0


def test_sums_travel_where_nothing_is_coded() -> None:
    """Of 2 ranks a node an all-reduce passes the card once, what goes to every rank twice, but for
    what stays in the node."""
    facts = facts_from(**{**NUMBERS, "backward_share": 0.0}, nprocs_per_node=2)
    coded = predict(la.ddp(codec="int8"), facts)
    assert coded.exposed == pytest.approx(coded.bytes * 8 / (80e6 / 2), rel=1e-6)
    low = predict(la.power_sgd(4), facts)
    assert low.exposed == pytest.approx(2 * low.bytes * 8 / 80e6, rel=1e-6)


def test_whole_tensors_make_larger_buckets() -> None:
    whole = Facts(4, ((4096, 4096),) * 4, 4, 0.5, 80e6, 0.1, backward=0.0, overlapping=False)
    message = predict(la.power_sgd(4), replace(whole, one_way=0.0)).exposed
    assert predict(la.power_sgd(4), whole).exposed == pytest.approx(message + 4 * 4 * 0.1)


def test_gossip_has_a_net_of_its_own() -> None:
    peers = {"peers": Net(160e6, 0.01)}
    assert seconds(la.sgp(), nets=peers) == pytest.approx(0.5 + 32e6 * 8 / 160e6 + 2 * 0.01)
    assert seconds(la.local_sgd(1), nets=peers) == pytest.approx(0.5 + WHOLE)


def test_a_burst_passes_at_once_and_never_more_than_is_sent() -> None:
    net = Net(80e6, 0.0, burst=1e6)
    assert seconds(la.local_sgd(1), nets={"workers": net}) == pytest.approx(0.5 + WHOLE - 0.1)
    huge = {"workers": Net(80e6, 0.0, burst=1e12)}
    assert seconds(la.local_sgd(1), nets=huge) == pytest.approx(0.5)


def test_what_backward_hides_is_what_it_takes() -> None:
    """Int8 gradients in 3 buckets of 0.3 s each, behind a backward pass of b seconds: the last
    begins when the one before it has arrived, or at the end of the pass."""
    coded = la.ddp(codec="int8")
    known = {"shapes": ((3 * 2**21,),)}  # which can be cut into three alike
    each = predict(la.local_sgd(1, codec="int8"), replace(FACTS, **known)).exposed / 3
    for share in (0.2, 1.0):
        b = 0.5 * share
        end = 0.0
        for bucket in range(1, 4):
            end = max(end, b * bucket / 3) + each
        assert seconds(coded, backward=share, **known) == pytest.approx(0.5 - b + end, rel=1e-4)


@pytest.mark.parametrize("small", [True, False])
def test_over_long_round_trips_buckets_overlap(
    small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Int8 gradients in 3 buckets, each of which takes s to send in each of two messages. ``small``
    messages are sent before the second one of the bucket before."""
    monkeypatch.setattr(overlap, "SMALL_BYTES", 1e9 if small else 0)
    coded, same = la.ddp(codec="int8"), {"shapes": ((3 * 2**21,),)}
    s = predict(la.local_sgd(1, codec="int8"), replace(FACTS, **same)).exposed / 6

    def exposed(latency: float, backward: float, **more: Any) -> float:
        """``backward``: seconds."""
        known = {**same, "compute": 10.0, "backward": backward / 10}
        return predict(coded, replace(FACTS, one_way=latency, **known, **more)).seconds - 10

    def check(found: float, expected: float) -> None:
        assert found == pytest.approx(expected, rel=1e-4)

    fast: dict[str, Any] = {"rate": 1e15}
    check(exposed(0.1, 1.0, **fast), 2 * 0.1)  # the last bucket's
    check(exposed(0.1, 0.0, overlapping=False, **fast), 3 * 2 * 0.1)
    if small:
        # when the first has arrived the third leaves, and when that has arrived its second
        check(exposed(0.1, 0.0, **fast), 3 * 0.1)
        # sent from 0, s; when the first has arrived 4 s, 5 s; then 6 s; when the third has, 9 s
        check(exposed(3 * s, 0.0), (9 + 1 + 3) * s)
        # the network is busy from the first message to the last, which then travels
        check(exposed(0.02, 0.0), 6 * s + 0.02)
        # a long backward pass hides all but the last bucket and the second message before it
        check(exposed(0.02, 9.0), 3 * s + 0.02)
    else:
        check(exposed(0.1, 0.0, **fast), 4 * 0.1)
        check(exposed(0.02, 9.0), 2 * s + 2 * 0.02)


def test_hidden_is_the_share_that_nobody_waits_for() -> None:
    assert predict(la.local_sgd(4), FACTS).hidden == pytest.approx(0.0, abs=1e-9)
    assert predict(la.local_sgd(20, delay=19), FACTS).hidden == pytest.approx(1.0)
    half = predict(la.local_sgd(20, delay=4), FACTS)
    assert half.hidden == pytest.approx(2.0 / WHOLE)
    assert predict((), FACTS).hidden == 0.0


def test_ranks_of_a_worker_carry_a_part_each() -> None:
    """2 ranks a worker: half of the model between the workers, all of it back inside, where also
    gradients are averaged: one bucket's last part shows."""
    nets = {"workers": Net(80e6, 0.0), "replica": Net(8e9, 0.0), "world": Net(80e6, 0.0)}
    known = {"ranks": 2, "nets": nets}
    inside = seconds(la.local_sgd(10**9), **known) - 0.5
    assert 0 < inside < 0.032
    back = 0.5 * 32e6 * 8 / 8e9
    assert seconds(la.local_sgd(1), **known) == pytest.approx(0.5 + inside + WHOLE / 2 + back)
    assert predict(la.local_sgd(1), replace(FACTS, **known)).bytes == pytest.approx(24e6)


def test_parts_of_a_worker_are_as_long_as_rounds_cut_them() -> None:
    """An odd size on 3 workers of 2 ranks: padded as in training, not sent whole to everyone."""
    odd = replace(FACTS, shapes=((7_999_999,),), workers=3, ranks=2)
    even = replace(odd, shapes=((8_000_004,),))
    for recipe in (la.local_sgd(4), la.slowmo(la.local_sgd(4), 8), la.diloco(4, codec="int4")):
        ours, theirs = predict(recipe, odd), predict(recipe, even)
        assert ours.bytes == pytest.approx(theirs.bytes, rel=1e-4)
        assert ours.seconds == pytest.approx(theirs.seconds, rel=1e-4)


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


def test_the_size_of_an_element_is_the_mean_where_tensors_differ() -> None:
    single, half = torch.zeros(2), torch.zeros(1000, dtype=torch.bfloat16)
    assert itemsize_of([single]) == 4 and itemsize_of([single, half]) == 2
    assert itemsize_of([torch.zeros(1000), half]) == 3


def test_rounds_per_step() -> None:
    base, slow = la.slowmo(la.local_sgd(4), 8)
    assert often(base) == pytest.approx(1 / 8) and often(slow) == pytest.approx(1 / 8)


@pytest.mark.parametrize(
    ("recipe", "models"),
    [
        (la.local_sgd(4), 0.0),
        (la.ddp(), 1.0),
        (la.ddp(codec="int4"), 1 + 1 + 1 / 4),
        (la.slowmo(la.local_sgd(4), 48), 2 / 4),
        (la.slowmo(la.local_sgd(4), 48, sharded=False), 2.0),
        (la.diloco(8, codec="int4"), 2 / 4 + 2 + 1 / 4),
        (la.local_sgd(8, delay=4), 0.5 * 2),
    ],
    ids=lambda value: describe(value) if isinstance(value, tuple) else str(value),
)
def test_what_rounds_keep_in_models(recipe: Recipe, models: float) -> None:
    """Anchor and momentum with their owner, residual and reference on every worker, a gradient's
    bucket, and y and its message for half of the time."""
    assert memory(recipe, FACTS) == pytest.approx(models * 32e6, rel=1e-3)


# -- the guide's inequality ----


def test_the_guides_example() -> None:
    """t_backward = 150 ms, t_node = 50 ms, t_allreduce = 270 ms, H = 3, as in docs/slowmo.md."""
    allreduce = Net(1e6 * 8 * 1.5 / 2 / 0.27, 0.0)
    node = Net(1e6 * 8 / 0.05, 0.0)
    facts = Facts(
        4, ((250_000,),), 4, 0.25, 1e8, 0.0, ranks=2,
        nets={"workers": allreduce, "replica": node},
    )  # fmt: skip
    three, *_, gossip = guides(facts)
    assert (three.frequency, gossip.frequency) == (3, 1.5)
    assert three.allreduce == pytest.approx(0.27) and three.node == pytest.approx(0.05)
    assert three.backward == pytest.approx(0.15) and three.saved == pytest.approx(0.18)
    assert three.pays_here and not three.pays_there
    assert gossip.saved == pytest.approx(0.09) and not gossip.pays_here


def test_the_guide_counts_latencies_as_the_rows_do() -> None:
    """A round after every step, of two workers of two ranks and some buckets, is the guide's
    all-reduce, and gradients averaged inside a worker that nothing hides are its node's."""
    nets = {"workers": Net(1e9, 0.03), "replica": Net(1e10, 0.01)}
    facts = Facts(2, ((32_000_000,),), 4, 0.9, 1e9, 0.0, backward=0.0, ranks=2, nets=nets)
    (three, *_) = guides(facts)
    inside = predict(la.local_sgd(10**9), facts).exposed
    assert three.node == pytest.approx(inside, rel=1e-4)
    back = 5 * 0.01 + 8 * 64e6 / 1e10
    assert three.allreduce == pytest.approx(
        predict(la.local_sgd(1), facts).exposed - inside - back, rel=1e-4
    )


# -- from numbers ----

NUMBERS: dict[str, Any] = {
    "params": 8_000_000, "step_time": 0.5, "bandwidth": 80e6, "one_way": 0.0, "nodes": 4,
}  # fmt: skip


def test_numbers_make_the_same_facts() -> None:
    facts = facts_from(**NUMBERS)
    assert facts.elements == 8_000_000
    assert predict(la.local_sgd(10), facts).seconds == pytest.approx(0.5 + WHOLE / 10)
    half = facts_from(**NUMBERS, dtype="bfloat16")
    assert predict(la.local_sgd(10), half).seconds == pytest.approx(0.5 + WHOLE / 20)


def test_ranks_of_a_node_share_its_card() -> None:
    """Between nodes, 8 ranks with an eighth of the model each take as long as one with all of it;
    an all-reduce over all 32 ranks passes each card once."""
    facts = facts_from(**NUMBERS, nprocs_per_node=8)
    assert predict(la.local_sgd(10), facts).seconds == pytest.approx(0.5 + WHOLE / 10)
    ddp = predict(la.ddp(), replace(facts, backward=0.0))
    assert ddp.seconds == pytest.approx(0.5 + 2 * 31 / 32 * 3.2)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"params": 0}, "params"),
        ({"params": 10**30}, "params must be at most 1e[+]13"),
        ({"step_time": 0.0}, "step-time"),
        ({"bandwidth": 0.0}, "bandwidth"),
        ({"one_way": -1.0}, "latency"),
        ({"nodes": 1}, "nodes"),
        ({"nprocs_per_node": 0}, "nprocs-per-node"),
        ({"backward_share": 1.5}, "backward-share"),
        ({"dtype": "int3"}, "'float32', 'bfloat16'"),
        ({"local_bandwidth": 1e9}, "nprocs-per-node > 1"),
        ({"local_bandwidth": 1e6, "nprocs_per_node": 2}, "count each rank as a node"),
    ],
)
def test_numbers_at_odds_are_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        facts_from(**{**NUMBERS, **wrong})


def test_a_size_that_is_no_multiple_keeps_its_parameters() -> None:
    assert facts_from(**{**NUMBERS, "params": 12_345}).elements == 12_345
    assert torch.Size(facts_from(**{**NUMBERS, "params": 7}).shapes[0]) == (7,)


@pytest.mark.parametrize(
    ("recipe", "bytes_each"),
    [
        (la.ddp(), 4),  # the buckets
        (la.ddp(codec="int4"), 4 + 4 + 4 / 8),  # residuals, and the owner's
        (la.sparse_loco(16), 3 * 4),  # anchor, reference, residual; nothing is an owner's
        (la.power_sgd(4), 4 + 4 + 4 * 4 / 1000),  # and 4 numbers for each of 1000 columns
    ],
    ids=["ddp", "int4", "sparse_loco", "power_sgd"],
)
def test_what_coded_rounds_keep(recipe: Recipe, bytes_each: float) -> None:
    facts = replace(FACTS, workers=8, shapes=((1000, 1000),))
    assert memory(recipe, facts) / 10**6 == pytest.approx(bytes_each, rel=1e-6)


def test_a_lost_packet_is_a_round_trip_and_a_quarter_late() -> None:
    """An all-reduce of 1,448,000 bytes: 2 messages of 375 packets from each of 3 ranks, 1125 in
    all, of which at least one is lost with probability 1 - 0.999**1125. Above 8 Mbit/s and 50 ms
    each way, the last round trip has 100,000 bytes, or 70 packets from each rank. They take 0.1 s,
    and half of it remains when a packet is lost."""
    facts = Facts(3, ((362_000,),), 4, 0.5, 1e12, 0.05)
    lossy = replace(facts, loss=0.001)
    recipe = la.local_sgd(1)
    more = predict(recipe, lossy).seconds - predict(recipe, facts).seconds
    packets = 3 * math.ceil(1_448_000 * 2 / 3 / 1448)
    assert more == pytest.approx(2 * 1.25 * 0.1 * (1 - 0.999**packets), rel=1e-4)
    slow, slow_lossy = replace(facts, rate=8e6), replace(lossy, rate=8e6)
    more = predict(recipe, slow_lossy).seconds - predict(recipe, slow).seconds
    assert more == pytest.approx(2 * (0.125 - 0.1 / 2) * (1 - 0.999 ** (3 * 70)), rel=1e-6)


def test_the_network_is_not_busy_while_a_message_travels() -> None:
    """With a delay, what is sent takes at most 0.7 of the time that latency leaves: 0.2 s of bytes
    and 2 x 0.1 s of latency in every second step."""
    facts = Facts(2, ((500_000,),), 4, 0.1, 8e7, 0.1)
    seconds = predict(la.local_sgd(2, delay=2), facts).seconds
    assert seconds == pytest.approx((0.2 / 0.7 + 2 * 0.1) / 2)


def test_with_losses_messages_are_longer_hidden() -> None:
    """The delay of what `auto` may choose covers packets that are sent again."""
    facts = Facts(4, ((845, 1024),), 4, 0.15, 5e7, 0.04)
    plain, lossy = (candidates(replace(facts, loss=loss)) for loss in (0.0, 0.01))
    for one, other in zip(plain, lossy, strict=True):
        before, after = one.recipe[0].delay, other.recipe[0].delay
        assert after >= before
    assert delay_for(16, replace(facts, loss=0.01))[0] > delay_for(16, facts)[0]
