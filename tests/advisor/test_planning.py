"""The planner's simulation: against the cost model, and against what is known in closed form."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import laconic as la
from laconic.advisor.plan.cluster import Cluster, Failures, Path, Site, uniform
from laconic.advisor.plan.report import runs
from laconic.advisor.plan.rounds import Rounds
from laconic.advisor.plan.simulate import Result, simulate_plan
from laconic.advisor.plan.times import Slices, StepTimes
from laconic.advisor.plan.together import Together
from laconic.algorithms.compile import in_groups
from laconic.algorithms.round import Recipe
from laconic.links.cost import Shared
from laconic.predict import LATER, predict

from tests.support.all_recipes import ROWS

WHOLE = 6.4 * 3 / 4
"""Seconds of an all-reduce of 8 million numbers between 4 workers at 80 Mbit/s."""
CALM = Cluster(8_000_000, uniform(4, 1, rate=80e6, latency=0.0), step=0.5, spread=0.0)
NAMES = [name for name, row in ROWS.items() if not in_groups(row.recipe)]


def per_step(recipe: Recipe, cluster: Cluster, steps: int, first: int = LATER) -> float:
    """Seconds per step in the long run."""
    short = simulate_plan(recipe, cluster, steps, first=first)
    long = simulate_plan(recipe, cluster, 2 * steps, first=first)
    return (long.seconds - short.seconds) / steps


def failing(**known: Any) -> Cluster:
    """A cluster whose rounds take no time."""
    sites = uniform(known.pop("workers", 8), 1, rate=1e15, latency=0.0)
    chips = {k: known.pop(k) for k in ("chips", "slices") if k in known}
    return Cluster(1000, sites, step=1.0, spread=0.0, failures=Failures(**known), **chips)


# -- as the cost model says ----


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rate", "latency"), [(80e6, 0.0), (4e9, 0.03)])
def test_without_chance_a_plan_is_the_prediction(name: str, rate: float, latency: float) -> None:
    recipe = ROWS[name].recipe
    cluster = replace(CALM, sites=uniform(4, 1, rate=rate, latency=latency))
    expected = predict(recipe, cluster.facts())
    found = per_step(recipe, cluster, 60)
    if name == "slowmo over late sgp":  # the slow step waits for late messages, as in training
        assert expected.seconds <= found * (1 + 1e-9) <= 1.1 * expected.seconds
    else:
        assert found == pytest.approx(expected.seconds, rel=1e-9)
    short = simulate_plan(recipe, cluster, 60, first=LATER)
    long = simulate_plan(recipe, cluster, 120, first=LATER)
    assert (long.bytes - short.bytes) / 60 == pytest.approx(expected.bytes, rel=1e-9)


@pytest.mark.parametrize(
    "recipe",
    [
        la.diloco(10, quorum=4),
        la.diloco(10, quorum=3, grace=1.0),
        la.diloco(10, pace="own", codec="int8"),
        la.streaming_diloco(12, 4, 0, quorum=4, codec="int4"),
    ],
    ids=["quorum", "grace", "own pace", "fragments"],
)
def test_equal_workers_with_a_quorum_are_as_predicted(recipe: Recipe) -> None:
    found = per_step(recipe, replace(CALM, latency=0.02), 120, 0)
    assert found == pytest.approx(predict(recipe, CALM.facts()).seconds, rel=1e-9)


def test_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="inside groups of workers"):
        simulate_plan(la.hierarchical(2, 6), CALM, 10)


# -- sites ----


def test_a_shared_uplink_is_the_bottleneck_of_a_collective() -> None:
    """Of 4 workers, 3 are on a site whose uplink passes 3 * 1 of their 12 ordered pairs. Each sends
    48 MB in a mean: a third of it to each other worker, so 48 MB pass the uplink in all."""
    site = Site("a", 3, 1e9, uplink=80e6)
    cluster = replace(CALM, sites=(site, Site("b", 1, 1e9)), latency=0.05)
    found = per_step(la.local_sgd(1), cluster, 8) - 0.5
    buckets = 2  # of 25 MiB
    assert found == pytest.approx(48e6 * 8 / 80e6 + 2 * buckets * 0.025)
    assert Shared(3, 1, 80e6).per_rank(4) == 80e6
    wide = replace(cluster, sites=(replace(site, uplink=None), cluster.sites[1]))
    assert per_step(la.local_sgd(1), wide, 8) - 0.5 == pytest.approx(0.384 + 2 * buckets * 0.025)


def test_a_link_between_two_sites_has_its_own_rate_and_latency() -> None:
    sites = (Site("a", 2, 1e9), Site("b", 1, 1e9), Site("c", 1, 1e9))
    link = Path(("c", "a"), latency=0.2, rate=40e6)
    cluster = replace(CALM, sites=sites, latency=0.05, links=(link,))
    found = per_step(la.local_sgd(1), cluster, 8) - 0.5
    # from two workers to one, a third of 48 MB each
    assert found == pytest.approx(32e6 * 8 / 40e6 + 2 * 2 * 0.1)


def test_messages_on_a_shared_link_wait_for_each_other() -> None:
    """Three messages under way at a time, each of which occupies the network for longer than the
    steps between two: the network is never idle but for the share that `predict` gives."""
    recipe = la.streaming_diloco(8, 4, 6, codec=None)
    found = per_step(recipe, replace(CALM, step=0.01), 64)
    seconds = WHOLE / 4 / 2  # a quarter of the model every other step
    assert found == pytest.approx(min(seconds / 0.7, 0.01 + seconds), rel=1e-3)


def unlike(parameters: int, step: float, **first: float) -> Cluster:
    """Four workers, the first of which is on a slower network."""
    sites = (Site("slow", 1, **{"rate": 80e6, **first}), Site("fast", 3, 80e6))
    return Cluster(parameters, sites, step=step, spread=0.0)


def test_a_slow_worker_computes_while_its_last_messages_leave() -> None:
    """A mean of 320 kB has two stages. Worker 0 sends for 0.192 s, the others for 0.048 s. It has
    received everything after 0.12 s, computes, and is back before its network is free: so only its
    own sending counts."""
    cluster = unlike(80_000, 0.05, rate=20e6, download=80e6)
    whole = 8 * 1.5 * 320_000 / 20e6
    done = simulate_plan(la.local_sgd(1), cluster, 10)
    assert done.seconds == pytest.approx(0.05 + 10 * whole)
    sums = sum(done.shares.values())
    assert sums == pytest.approx(1.0)
    slower = replace(cluster, step=whole)  # by then its network is free
    fast = whole / 4
    # a stage of the slow worker, then one that it begins when the others have sent theirs
    each = whole + max(whole / 2, fast / 2) + whole / 2
    found = per_step(la.local_sgd(1), slower, 10, 0)
    assert each - whole * 3 / 8 <= found <= each


def test_a_late_worker_finds_what_the_others_have_sent() -> None:
    """Three workers have sent their slices when the fourth comes. It receives their means part by
    part while it sends its own slices, and computes on while the mean of its slice leaves."""
    sites = (Site("late", 1, 80e6, step=1.0), Site("others", 3, 80e6))
    cluster = Cluster(80_000, sites, step=0.5, spread=0.0)
    whole = 8 * 1.5 * 320_000 / 80e6
    found = simulate_plan(la.local_sgd(1), cluster, 10)
    # ten steps and halves of what it sends, of which the last ends when all have its mean
    assert found.seconds == pytest.approx(10 * (1.0 + whole / 2) + whole / 2)
    # an outer step needs all of the mean, so the second half begins when the first is over
    apart = simulate_plan(la.diloco(1), cluster, 10)
    assert apart.seconds == pytest.approx(10 * (1.0 + whole))


def test_the_kernel_holds_half_a_megabyte_of_what_each_connection_sends() -> None:
    """A mean of 32 MB: worker 0 sends 48 MB for 19.2 s, and goes on when 1.5 MiB are left."""
    cluster = unlike(8_000_000, 10.0, rate=20e6, download=80e6)
    found = per_step(la.local_sgd(1), cluster, 10, 0)
    held = 8 * 3 * 2**19 / 20e6
    assert found == pytest.approx(10.0 + 19.2 - held)


def test_a_slow_download_is_waited_for() -> None:
    """Worker 0 receives for 0.192 s what the others send in 0.048 s; they then wait for what it
    sends in its second stage, which it begins when it has received the first one."""
    cluster = unlike(80_000, 1.0, download=20e6)
    whole = 8 * 1.5 * 320_000 / 80e6
    found = simulate_plan(la.local_sgd(1), cluster, 1).seconds
    assert found == pytest.approx(1.0 + 4 * whole)
    alike = unlike(80_000, 1.0, download=80e6)
    assert simulate_plan(la.local_sgd(1), alike, 1).seconds == pytest.approx(1.0 + whole)


def test_a_message_of_gossip_leaves_before_those_of_others_come() -> None:
    """Worker 1 takes two seconds a step. What worker 0 sends is there before it is needed."""
    sites = (Site("a", 1, 80e6), Site("b", 1, 80e6, step=2.0))
    cluster = Cluster(100_000, sites, step=1.0, spread=0.0)
    network = 8 * 4e5 / 80e6
    found = simulate_plan(la.sgp(), cluster, 20).seconds
    assert found == pytest.approx(20 * 2.0 + network)  # and the last message of worker 1
    large, held = replace(cluster, parameters=1_000_000), 8 * 2**19 / 80e6
    found = simulate_plan(la.sgp(), large, 20).seconds  # worker 1 waits until its own is held
    assert found == pytest.approx(20 * (2.0 + 10 * network - held) + held)


def test_results_of_a_quorum_leave_one_after_the_other() -> None:
    """Rank 0's own message does not travel. It receives at once what the others send in 0.4 s, and
    sends two results in 0.8 s."""
    sites = (Site("a", 3, 80e6, download=1e15),)
    cluster = Cluster(1_000_000, sites, step=1.0, spread=0.0)
    found = per_step(la.diloco(10, quorum=3), cluster, 100, 0)
    assert found == pytest.approx((10 * 1.0 + 0.4 + 0.8) / 10)
    expected = predict(la.diloco(10, quorum=3), cluster.facts()).seconds
    assert found == pytest.approx(expected)


UPLINKS = tuple(Site(name, 4, 1e9, uplink=8e6) for name in "ab")


@pytest.mark.parametrize("download", [None, 2e9])
def test_messages_of_a_quorum_pass_the_uplinks_of_its_sites(download: float | None) -> None:
    """Four messages of 4 MB leave site b, and four results leave site a."""
    sites = tuple(replace(site, download=download) for site in UPLINKS)
    cluster = Cluster(1_000_000, sites, step=1.0, spread=0.0)
    recipe = la.diloco(10, quorum=8)
    found = per_step(recipe, cluster, 100, 0) * 10
    assert found == pytest.approx(10 + 2 * 4 * 32e6 / 8e6)
    assert predict(recipe, cluster.facts()).seconds * 10 == pytest.approx(found)
    sent = simulate_plan(recipe, cluster, 100)
    assert sent.bytes * 8 == pytest.approx(10 * 2 * 7 * 4e6)
    assert sent.crossed == pytest.approx(10 * 2 * 4 * 4e6)


def test_rank_0_sends_each_result_although_it_is_in_no_round_with_others() -> None:
    """With a quorum of one, every round is that of one worker. Rank 0 sends 4 MB to each of the
    others, one after the other, at 1 Mbit/s."""
    sites = (Site("home", 1, 1e6, download=1e9), Site("away", 7, 1e9))
    cluster = Cluster(1_000_000, sites, step=1.0, spread=0.0)
    found = simulate_plan(la.diloco(10, quorum=1), cluster, 200)
    results = found.bytes * 8 / 4e6 / 2
    assert found.seconds >= (results - 7) * 32.0
    assert found.crossed == pytest.approx(found.bytes * 8)


def test_checkpoints_and_jitter_cost_a_run_with_a_quorum_time() -> None:
    fails = Failures(mtbf=1e15, policy="static", checkpoint=10)
    cluster = replace(CALM, failures=fails)
    recipe = la.diloco(10, quorum=4)
    base = simulate_plan(recipe, cluster, 200).seconds
    slow = replace(cluster, failures=replace(fails, save=100.0))
    assert simulate_plan(recipe, slow, 200).seconds - base == pytest.approx(2000, abs=101)
    varying = replace(CALM, jitter=5.0)
    assert simulate_plan(recipe, varying, 200).seconds > base + 20 * 1.0


def test_bytes_between_sites_are_those_of_pairs_that_cross() -> None:
    one = simulate_plan(la.local_sgd(1), replace(CALM, sites=uniform(4, 1, rate=1e9, latency=0)), 4)
    two = simulate_plan(la.local_sgd(1), replace(CALM, sites=uniform(4, 2, rate=1e9, latency=0)), 4)
    assert one.crossed == 0 and two.crossed == pytest.approx(4 * two.bytes * 2 / 3)
    priced = replace(CALM, sites=uniform(4, 2, rate=1e9, latency=0, price=3600.0), gigabyte=2.0)
    costs = simulate_plan(la.local_sgd(1), priced, 4)
    assert costs.money == pytest.approx(4 * costs.seconds + 2 * costs.crossed / 1e9)


# -- stragglers ----


def test_the_slowest_of_n_exponential_steps_is_the_harmonic_number() -> None:
    n, steps = 16, 20_000
    cluster = replace(
        CALM, sites=uniform(n, 1, rate=1e15, latency=0.0), step=1.0, distribution="exponential"
    )
    found = simulate_plan(la.ddp(), cluster, steps).seconds / steps
    assert found == pytest.approx(sum(1 / k for k in range(1, n + 1)), rel=0.01)


def test_the_slowest_of_n_normal_steps_is_the_order_statistic() -> None:
    """The mean of the largest of 100 standard normal variables, by its integral."""
    n, steps, spread = 100, 5000, 0.1
    x = torch.linspace(-8, 8, 100_001, dtype=torch.float64)
    below = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    density = n * below ** (n - 1) * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    largest = float(torch.trapezoid(x * density, x))
    assert largest == pytest.approx(2.5076, abs=1e-3)
    sites = uniform(n, 1, rate=1e15, latency=0.0)
    cluster = replace(CALM, sites=sites, step=1.0, spread=spread, distribution="normal")
    found = simulate_plan(la.ddp(), cluster, steps).seconds / steps
    assert found == pytest.approx(1 + spread * largest, rel=0.002)


@pytest.mark.parametrize("kind", ["lognormal", "normal", "exponential", "constant"])
def test_step_times_have_their_mean_and_spread(kind: Any) -> None:
    times = StepTimes([2.0], 0.3, kind, torch.Generator().manual_seed(3))
    drawn = times.rows(0, 200_000)
    spread = {"exponential": 1.0, "constant": 0.0}.get(kind, 0.3)
    assert float(drawn.mean()) == pytest.approx(2.0, rel=0.01)
    assert float(drawn.std()) == pytest.approx(2.0 * spread, rel=0.02, abs=1e-12)
    assert float(times.sum(1000)[0]) == pytest.approx(2000.0, rel=0.1)


def test_gossip_waits_for_its_peers_only() -> None:
    """A ring of 6 with one slow worker: in each round the delay reaches one worker more."""
    sites = (Site("slow", 1, 1e15, step=3.0), Site("fast", 5, 1e15, step=1.0))
    cluster = Cluster(1000, sites, spread=0.0)
    now = [0.0] * 6
    run = Together(Rounds(la.sgp("ring"), cluster), torch.Generator())
    for step in range(1, 8):
        own = [t + (3.0 if rank == 0 else 1.0) for rank, t in enumerate(now)]
        now = [max(own[rank], own[rank - 1]) for rank in range(6)]
        run._compute(1)
        run._event(0, "sent", step)
        assert run.now.tolist() == pytest.approx(now, abs=1e-6)
    assert min(now) < max(now) == 21.0


# -- failures ----


def test_a_static_run_takes_as_long_as_dalys_formula() -> None:
    """Exponential failures with rate r of all workers, checkpoints every w s that take s s, and R s
    to come back: (1/r + R) * (exp(r * (w + s)) - 1) per checkpoint."""
    known = failing(
        workers=4, mtbf=4000.0, policy="static", checkpoint=200, save=10.0,
        repair=60.0, restart=15.0, detection=5.0,
    )  # fmt: skip
    rate = 4 / 4000.0
    expected = (1 / rate + 75.0) * (math.exp(rate * 210.0) - 1)
    # the run fails at any time, so it does not matter how rare its rounds are
    runs = [simulate_plan(la.local_sgd(200), known, 400_000, seed) for seed in range(4)]
    found = statistics.fmean(run.seconds for run in runs) / 2000
    assert found == pytest.approx(expected, rel=0.01)
    goodput = statistics.fmean(run.goodput for run in runs)
    assert goodput == pytest.approx(200 / expected, rel=0.01)


def test_an_elastic_run_has_the_workers_that_are_not_in_repair() -> None:
    """A worker lives 1000 s and is away for 250 s: four of five workers are there on average. Each
    step is a round, so a lost worker loses at most a step, and its loss is known at once."""
    known = failing(workers=40, mtbf=1000.0, repair=250.0, restart=0.0, detection=0.0)
    run = simulate_plan(la.local_sgd(1), known, 12_000)
    assert run.goodput == pytest.approx(0.8, rel=0.01)
    assert run.seconds == pytest.approx(12_000, rel=0.03)
    assert run.failures == pytest.approx(40 * 12_000 / 1250, rel=0.1)


def test_slices_lose_capacity_and_pause() -> None:
    """32 of 1024 chips each are a slice. One that loses a slice pauses, and again when it is back:
    the share of time in pauses is that of a renewal process, and the rest runs on what is left."""
    mtbf, repair, pause = 1e6, 300.0, 20.0
    known = failing(
        workers=4, chips=1024, slices=32, mtbf=mtbf, repair=repair, reconfigure=pause
    )  # fmt: skip
    slices = Slices(known, torch.Generator().manual_seed(1))
    work = torch.full((4,), 4e6, dtype=torch.float64)
    took = slices.finish(torch.zeros(4, dtype=torch.float64), work)
    lacking, paused = 0.0, 0.0
    for _ in range(20):  # chips fail while they run; a return during a pause has none of its own
        failures = 1024 / mtbf * (1 - paused) * (1 - lacking)
        paused = failures * pause * (2 - paused)
        lacking = failures * repair / 32
    assert float(slices.paused.sum() / took.sum()) == pytest.approx(paused, rel=0.01)
    short = float(slices.short.sum() / took.sum())
    running = (repair - pause) / repair  # it begins with a pause
    assert short == pytest.approx(lacking * (1 - paused) * running, rel=0.03)


def test_a_lost_worker_is_waited_for_until_its_silence_counts() -> None:
    """The only failure happens during the 5th step. The others wait for 5 s of silence, and go on;
    the worker is away for 60 s and the transfer of the state, and takes part again."""
    known = failing(workers=3, mtbf=1e9, repair=50.0, restart=10.0)
    recipe = la.local_sgd(1)
    calm = simulate_plan(recipe, replace(known, failures=Failures()), 200)
    run = Together(Rounds(recipe, known), torch.Generator().manual_seed(0))
    assert run._lives is not None
    run._lives.fails[:] = torch.tensor([math.inf, 4.5, math.inf])
    log = run.run(200)
    lost, joined = log.events
    assert lost == (4.5, 1, "lost") and joined[1:] == (1, "joined")
    assert 64.5 <= joined[0] <= 66.5 + 5
    assert float(run.now.max()) == pytest.approx(calm.seconds + 4.5 + 5.0 - 5.0, abs=1e-6)
    away = round(joined[0] - 9.5) + 5 - 4  # the steps of the others from its last round on
    assert log.counted == pytest.approx(3 * 200 - away, abs=1)


def test_too_few_workers_wait_for_others() -> None:
    known = failing(workers=2, mtbf=1e9, repair=100.0, restart=0.0, min_workers=2, detection=0.0)
    run = Together(Rounds(la.local_sgd(1), known), torch.Generator().manual_seed(0))
    assert run._lives is not None
    run._lives.fails[:] = torch.tensor([math.inf, 10.5])
    log = run.run(100)
    assert log.counted == 199 and float(run.now.max()) == pytest.approx(100 + 99.5, rel=1e-6)


def test_a_run_that_never_gets_to_a_checkpoint_is_given_up() -> None:
    known = failing(workers=4, mtbf=40.0, policy="static", checkpoint=500, repair=1.0)
    with pytest.raises(ValueError, match=r"from step 0 to the next checkpoint"):
        simulate_plan(la.local_sgd(10), known, 1000)


def test_what_cannot_run_elastically_is_refused_with_its_reason() -> None:
    for recipe in (la.diloco(10, quorum=3), la.power_sgd(2)):
        with pytest.raises(ValueError, match=r"elastic|come and go"):
            simulate_plan(recipe, failing(mtbf=1e5), 10)


# -- properties ----


def outcome(rate: float, latency: float, spread: float, mtbf: float, n: int) -> Result:
    sites = uniform(n, min(n, 2), rate=rate, latency=latency)
    fails = Failures(mtbf=mtbf, policy="static", checkpoint=8, repair=20.0)
    cluster = Cluster(500_000, sites, spread=spread, latency=latency, failures=fails)
    return simulate_plan(la.diloco(8), cluster, 32, seed=1)


@settings(max_examples=12, deadline=None)
@given(
    rate=st.floats(1e6, 1e10),
    faster=st.floats(1.0, 100.0),
    latency=st.floats(0.0, 0.2),
    spread=st.floats(0.0, 0.5),
    n=st.integers(2, 9),
)
def test_a_better_network_never_makes_a_run_longer(
    rate: float, faster: float, latency: float, spread: float, n: int
) -> None:
    base = outcome(rate, latency, spread, math.inf, n)
    assert outcome(rate * faster, latency, spread, math.inf, n).seconds <= base.seconds * (1 + 1e-9)
    assert outcome(rate, latency / faster, spread, math.inf, n).seconds <= base.seconds * (1 + 1e-9)
    assert outcome(rate, latency, spread, math.inf, n) == base
    assert sum(base.shares.values()) == pytest.approx(1.0)
    assert all(share >= -1e-9 for share in base.shares.values())


@pytest.mark.parametrize("policy", ["static", "elastic"])
def test_more_failures_never_help(policy: Any) -> None:
    found = []
    for mtbf in (math.inf, 1e5, 1e4, 2e3):
        known = failing(workers=6, mtbf=mtbf, policy=policy, checkpoint=20, repair=30.0)
        runs = [simulate_plan(la.local_sgd(5), known, 2000, seed) for seed in range(3)]
        found.append(statistics.fmean(run.goodput for run in runs))
    assert all(a >= b for a, b in itertools.pairwise(found)) and found[0] > found[-1]


def test_seeds_decide_everything() -> None:
    known = replace(failing(workers=5, mtbf=3000.0), spread=0.2)
    first = simulate_plan(la.diloco(5), known, 400, seed=3)
    assert simulate_plan(la.diloco(5), known, 400, seed=3) == first
    assert simulate_plan(la.diloco(5), known, 400, seed=4) != first


def test_jitter_delays_the_last_message() -> None:
    calm = replace(CALM, latency=0.1, sites=uniform(4, 2, rate=1e9, latency=0.1))
    late = per_step(la.local_sgd(1), replace(calm, jitter=0.05), 400)
    base = per_step(la.local_sgd(1), calm, 400)
    expected = 0.025 * (2 * 12 / 13 - 1)  # of the largest of 12 messages, four times
    assert late - base == pytest.approx(4 * expected, rel=0.02)


# -- what the time goes to ----


@pytest.mark.parametrize("policy", ["static", "elastic"])
@pytest.mark.parametrize("recipe", [la.local_sgd(400), la.ddp(), la.diloco(20, quorum=3)])
def test_nobody_computes_for_longer_than_the_run_lasts(policy: Any, recipe: Recipe) -> None:
    if policy == "elastic" and "quorum" in str(recipe).lower():
        policy = "static"
    fails = Failures(
        mtbf=1200.0, repair=60.0, restart=30.0, policy=policy, checkpoint=400, detection=5.0
    )
    for failures in (fails, Failures()):
        cluster = Cluster(
            1_000_000,
            uniform(4, 1, rate=1e9, latency=0.0),
            step=1.0,
            spread=0.0,
            failures=failures,
        )
        done = simulate_plan(recipe, cluster, 4000, seed=3)
        assert 0 <= done.goodput <= done.utilization * (1 + 1e-9) <= 1 + 1e-9
        assert sum(done.shares.values()) == pytest.approx(1.0)
        assert all(share >= -1e-9 for share in done.shares.values())
        if failures.happen and policy == "static":
            repairs = done.restarts * 90.0 / done.seconds
            assert done.failures and done.shares["failures"] >= repairs
            # the run has 4,000 steps in the end; the others were lost
            assert done.goodput == pytest.approx(4000 / done.seconds, rel=0.02)


def test_waiting_until_silence_counts_is_no_computing() -> None:
    """Workers 1 and 2 have computed for 9 s and 9.5 s when they are lost, the others for 10 s."""
    lost = ((1, 9.0), (2, 9.5))
    cluster = failing(workers=4, repair=1e6, detection=5.0, at=lost)
    done = simulate_plan(la.local_sgd(10), cluster, 10)
    assert done.seconds == pytest.approx(9.5 + 5.0)
    assert done.utilization == pytest.approx((9.0 + 9.5 + 2 * 10.0) / (4 * 14.5))
    assert done.goodput == pytest.approx(2 * 10.0 / (4 * 14.5))


def test_steps_count_although_the_last_worker_is_lost_later() -> None:
    """Two workers that are in repair half of the time: a run begins anew when both are."""
    fails = Failures(mtbf=1800.0, repair=1800.0, restart=0.0, detection=1.0, checkpoint=200)
    cluster = Cluster(
        1000, uniform(2, 1, rate=1e15, latency=0.0), step=1.0, spread=0.0, failures=fails
    )
    done = [simulate_plan(la.local_sgd(10), cluster, 6000, seed) for seed in range(4)]
    assert any(each.restarts for each in done)
    for each in done:  # every step was that of one worker at least
        assert each.goodput * 2 * each.seconds >= 6000 * (1 - 0.02)


# -- long runs ----


@pytest.mark.parametrize(
    "recipe", [la.post_local_sgd(5000, 10), la.power_sgd(2, start=3000), la.diloco(97)]
)
def test_a_long_run_is_that_of_all_its_steps(recipe: Recipe) -> None:
    cluster = Cluster(10_000_000, uniform(4, 1, rate=1e8, latency=0.0), step=1.0, spread=0.0)
    steps = 9700
    (short,) = runs(recipe, cluster, steps, 1)
    whole = simulate_plan(recipe, cluster, steps)
    assert short.steps == steps
    for figure in ("seconds", "bytes", "crossed", "rounds"):
        assert getattr(short, figure) == pytest.approx(getattr(whole, figure), rel=1e-6), figure


def test_chance_averages_out_over_a_long_run() -> None:
    cluster = replace(CALM, spread=0.5)
    seeds, steps = 10, 8_000
    short = [each.seconds for each in runs(la.local_sgd(20), cluster, steps, seeds)]
    whole = [simulate_plan(la.local_sgd(20), cluster, steps, seed).seconds for seed in range(seeds)]
    assert statistics.fmean(short) == pytest.approx(statistics.fmean(whole), rel=0.01)
    assert 0.4 <= statistics.stdev(short) / statistics.stdev(whole) <= 2.5
