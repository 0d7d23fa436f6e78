"""``laconic plan``: its simulation, against the cost model and what is known in closed form; files
of clusters, and the answer."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic as la
from laconic.advisor.plan import fields
from laconic.advisor.plan.cluster import Cluster, Failures, Site, uniform
from laconic.advisor.plan.quorum import Quorum
from laconic.advisor.plan.report import plan
from laconic.advisor.plan.rounds import Price, Rounds
from laconic.advisor.plan.simulate import simulate_plan
from laconic.advisor.quorum import predict
from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.round import Recipe
from laconic.cli import main
from laconic.policy.predict import LATER

Capture = pytest.CaptureFixture[str]
CALM = Cluster(8_000_000, uniform(4, 1, bandwidth=80e6, latency=0.0), step_time=0.5, spread=0.0)
"""An all-reduce of 8 million numbers takes 4.8 s."""


def of(text: str) -> Recipe:
    recipe = parse_recipe(text)
    assert isinstance(recipe, tuple)
    return recipe


def per_step(recipe: Recipe, cluster: Cluster, steps: int, first: int = LATER) -> float:
    """Seconds per step in the long run."""
    short = simulate_plan(recipe, cluster, steps, first=first)
    long = simulate_plan(recipe, cluster, 2 * steps, first=first)
    return (long.seconds - short.seconds) / steps


def failing(workers: int = 8, **known: Any) -> Cluster:
    """A cluster whose rounds take no time."""
    sites = uniform(workers, 1, bandwidth=1e15, latency=0.0)
    return Cluster(1000, sites, step_time=1.0, spread=0.0, failures=Failures(**known))


CERTAIN = [
    *("ddp()", "power_sgd(2)", "local_sgd(3)", "local_sgd(6, delay=3)", "sgp()"),
    *("slowmo(local_sgd(3), 12)", "streaming_diloco(12, 4, 2)", "easgd(4)"),
]


def test_without_chance_a_plan_is_the_prediction() -> None:
    for text in CERTAIN:
        recipe = of(text)
        for rate, latency in ((80e6, 0.0), (4e9, 0.03)):
            cluster = replace(CALM, sites=uniform(4, 1, bandwidth=rate, latency=latency))
            expected = predict(recipe, cluster.facts())
            short, long = (simulate_plan(recipe, cluster, n, first=LATER) for n in (24, 48))
            assert (long.seconds - short.seconds) / 24 == pytest.approx(expected.seconds), text
            assert (long.bytes - short.bytes) / 24 == pytest.approx(expected.bytes), text
    for text in ("diloco(10, quorum=3, grace=1.0)", "diloco(10, pace='own', codec='int8')"):
        found = per_step(of(text), replace(CALM, latency=0.02), 120, 0)
        assert found == pytest.approx(predict(of(text), CALM.facts()).seconds, rel=1e-9), text


# -- sites ----


def test_a_shared_uplink_is_the_bottleneck() -> None:
    """Of 4 workers, 3 are on a site whose uplink passes 3 * 1 of their 12 ordered pairs. Each sends
    48 MB in a mean: a third of it to each other worker, so 48 MB pass the uplink in all."""
    site = Site("a", 3, 1e9, uplink=80e6)  # two buckets of 25 MiB share the latency
    cluster = replace(CALM, sites=(site, Site("b", 1, 1e9)), latency=0.05)
    assert per_step(la.local_sgd(1), cluster, 8) == pytest.approx(0.5 + 48e6 * 8 / 80e6 + 2 * 0.025)
    wide = replace(cluster, sites=(replace(site, uplink=None), cluster.sites[1]))
    assert per_step(la.local_sgd(1), wide, 8) - 0.5 == pytest.approx(0.384 + 2 * 0.025)


def test_a_late_worker_finds_what_the_others_have_sent() -> None:
    """Three workers have sent their slices when the fourth comes. It receives their means part by
    part while it sends its own slices, and computes on while the mean of its slice leaves."""
    sites = (Site("late", 1, 80e6, step_time=1.0), Site("others", 3, 80e6))
    cluster = Cluster(80_000, sites, step_time=0.5, spread=0.0)
    whole = 8 * 1.5 * 320_000 / 80e6
    found = simulate_plan(la.local_sgd(1), cluster, 10)
    # ten steps and halves of what it sends, of which the last ends when all have its mean
    assert found.seconds == pytest.approx(10 * (1.0 + whole / 2) + whole / 2)
    # an outer step needs all of the mean, so the second half begins when the first is over
    apart = simulate_plan(la.diloco(1), cluster, 10)
    assert apart.seconds == pytest.approx(10 * (1.0 + whole))


def test_bytes_between_sites_take_time_and_cost_money() -> None:
    """Each worker sends 7/4 of 4 MB in a mean, also with a quorum; 4/7 of it to the other site."""
    sites = tuple(Site(name, 4, 1e9, uplink=8e6) for name in "ab")
    cluster = Cluster(1_000_000, sites, step_time=1.0, spread=0.0)
    recipe = la.diloco(10, quorum=8)
    found = per_step(recipe, cluster, 100, 0) * 10
    assert found == pytest.approx(10 + 4 * 32e6 / 8e6)
    assert predict(recipe, cluster.facts()).seconds * 10 == pytest.approx(found)
    sent = simulate_plan(recipe, cluster, 100)
    assert sent.bytes * 8 == pytest.approx(10 * 2 * 7 * 4e6)
    assert sent.crossed == pytest.approx(10 * 2 * 4 * 4e6)
    one, two = (
        replace(CALM, egress=2.0, sites=uniform(4, n, bandwidth=1e9, latency=0, price=3600.0))
        for n in (1, 2)
    )
    assert simulate_plan(la.local_sgd(1), one, 4).crossed == 0
    sent = simulate_plan(la.local_sgd(1), two, 4)
    assert sent.crossed == pytest.approx(4 * sent.bytes * 2 / 3)
    assert sent.money == pytest.approx(4 * sent.seconds + 2 * sent.crossed / 1e9)


def test_the_slowest_of_n_steps_is_the_order_statistic() -> None:
    """Of 100 lognormal steps: exp of the largest of 100 standard normal variables, whose
    distribution function is that of one to the power of 100, in quadrature."""
    sigma = math.sqrt(math.log1p(0.1**2))
    x = torch.linspace(-2, 8, 10_001, dtype=torch.float64)
    largest = torch.special.ndtr(x) ** 100
    mean = torch.trapezoid(sigma * torch.exp(sigma * x) * (1 - largest), x)
    expected = math.exp(-(sigma**2) / 2) * (math.exp(-2 * sigma) + float(mean))
    known = replace(
        CALM, sites=uniform(100, 1, bandwidth=1e15, latency=0.0), step_time=1.0, spread=0.1
    )
    found = simulate_plan(la.ddp(), known, 600).seconds / 600
    assert found == pytest.approx(expected, rel=0.01)


# -- failures ----


def test_a_static_run_takes_as_long_as_dalys_formula() -> None:
    """Exponential failures with rate r of all workers, checkpoints every w s that take s s, and R s
    to come back: (1/r + R) * (exp(r * (w + s)) - 1) per checkpoint."""
    known = failing(4, mtbf=4000.0, policy="static", checkpoint=200, save=10.0, repair=60.0,
                    restart=15.0, detection=5.0)  # fmt: skip
    expected = (1000.0 + 75.0) * (math.exp(210.0 / 1000.0) - 1)
    # the run fails at any time, so it does not matter how rare its rounds are; checkpoints lie
    # between them
    run = simulate_plan(la.local_sgd(750), known, 60_000)
    assert run.seconds / 300 == pytest.approx(expected, rel=0.08)
    assert 200 * 300 / run.seconds == pytest.approx(run.goodput, rel=0.05)
    hopeless = failing(4, mtbf=40.0, policy="static", checkpoint=500, repair=1.0)
    with pytest.raises(ValueError, match=r"from step 0 to the next checkpoint"):
        simulate_plan(la.local_sgd(10), hopeless, 1000)


def test_an_elastic_run_has_the_workers_that_are_not_in_repair() -> None:
    """A worker lives 1000 s and is away for 250 s: four of five workers are there on average. Each
    step is a round, so a lost worker loses at most a step, and its loss is known at once."""
    known = failing(20, mtbf=1000.0, repair=250.0, restart=0.0, detection=0.0)
    run = simulate_plan(la.local_sgd(1), known, 2000)
    assert run.goodput == pytest.approx(0.8, abs=0.06)
    assert run.failures == pytest.approx(20 * 2000 / 1250, rel=0.4)
    for recipe in (la.diloco(10, quorum=3), la.power_sgd(2)):
        with pytest.raises(ValueError, match=r"elastic|come and go"):
            simulate_plan(recipe, failing(mtbf=1e5), 10)


def test_a_lost_worker_is_waited_for_until_its_silence_counts() -> None:
    """Worker 1 is lost during the 5th step. The others wait for 5 s of silence, and go on; the
    worker is away for 60 s and the transfer of the state, and takes part again."""
    known = failing(3, repair=50.0, restart=10.0, detection=5.0, at=((1, 4.5),))
    run = simulate_plan(la.local_sgd(1), known, 200)
    lost, joined = run.events
    assert lost == (4.5, 1, "lost") and joined[1:] == (1, "joined")
    assert 64.5 <= joined[0] <= 66.5 + 5
    calm = simulate_plan(la.local_sgd(1), replace(known, failures=Failures()), 200)
    assert run.seconds == pytest.approx(calm.seconds + 4.5, abs=1e-6)
    # two are lost after 9 s and 9.5 s of 10; nobody computes until silence counts
    known = failing(4, repair=1e6, detection=5.0, at=((1, 9.0), (2, 9.5)))
    done = simulate_plan(la.local_sgd(10), known, 10)
    assert done.seconds == pytest.approx(9.5 + 5.0)
    assert done.utilization == pytest.approx((9.0 + 9.5 + 2 * 10.0) / (4 * 14.5))
    assert done.goodput == pytest.approx(2 * 10.0 / (4 * 14.5))


def test_seeds_decide_everything() -> None:
    known, quorum = (replace(each, spread=0.2) for each in (failing(5, mtbf=3000.0), CALM))
    for cluster, recipe in ((known, la.diloco(5)), (quorum, la.diloco(5, quorum=3, pace="own"))):
        first, again, other = (simulate_plan(recipe, cluster, 60, seed=k) for k in (3, 3, 4))
        assert first == again != other


# -- rounds with a quorum, against the rules of docs/quorum.md ----


def test_rounds_close_as_the_rules_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of 4 steps closes a grace after its quorum is there, or when all have come. Workers
    go on from there; at own pace, as many steps as fit before the next round. While one is
    exchanged, no other closes: those that arrive meanwhile share the next one."""

    def closes(text: str, second: float = 1.0, network: float = 0.0) -> list[tuple[Any, ...]]:
        steps = (1.0, second, 2.5)
        sites = tuple(Site(f"site{k}", 1, 1e9, step_time=step) for k, step in enumerate(steps))
        run = Quorum(Rounds(of(text), Cluster(1000, sites, spread=0.0)), torch.Generator())
        run.kinds[0].price, close, found = Price(network=network), run.close, []

        def closed(kind: int, until: float) -> None:
            found.append((pytest.approx(until), tuple(sorted(run.kinds[kind].arrived))))
            close(kind, until)

        monkeypatch.setattr(run, "close", closed)
        run.run(40)
        return found[:4]

    every, two = (0, 1, 2), (0, 1)
    for text, expected in (
        ("diloco(4, quorum=3)", [(10, every), (20, every), (30, every), (40, every)]),
        ("diloco(4, quorum=2)", [(4, two), (8, two), (12, every), (16, two)]),
        ("diloco(4, quorum=2, grace=2)", [(6, two), (10, every), (16, two)]),
        ("diloco(4, quorum=3, pace='own')", [(10, every), (14, every), (18, every)]),
    ):
        assert closes(text)[: len(expected)] == expected, text
    slow = closes("diloco(4, quorum=1)", 1.25, network=6.0)
    assert slow == [(4, (0,)), (10, (1, 2)), (16, (0,)), (22, (1,))]


# -- the command ----

SMALL = ["plan", "--workers", "4", "--sites", "2", "--bandwidth", "100mbit", "--latency", "20ms",
         "--params", "2m", "--step-time", "200ms", "--steps", "32"]  # fmt: skip


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_example_is_a_cluster_and_so_is_json(tmp_path: Path, capsys: Capture) -> None:
    assert main(["plan", "--example"]) == 0
    cluster = fields.read(written(tmp_path / "cluster.yaml", capsys.readouterr().out))
    assert [site.name for site in cluster.sites] == ["paris", "oslo", "ohio"]
    assert cluster.workers == 8 and cluster.params == 10**9 and cluster.latency == 0.08
    assert cluster.sites[2].step_time == 1.2 and cluster.sites[0].uplink == 500e6
    assert cluster.failures.mtbf == 30 * 86400 and cluster.egress == 0.05
    facts = cluster.facts()
    assert facts.one_way == 0.04 and facts.compute == 1.2 and len(facts.shared) == 3
    failures = {"mtbf": "10d", "policy": "static", "checkpoint": 100}
    sites = [{"name": "a", "workers": 2, "bandwidth": "1gbit"}]
    values = {"params": "8m", "step_time": 0.5, "sites": sites, "failures": failures}
    cluster = fields.read(written(tmp_path / "cluster.json", json.dumps(values)))
    assert cluster.step_time == 0.5 and cluster.sites == (Site("a", 2, 1e9),)
    assert cluster.failures == Failures(mtbf=864000.0, policy="static", checkpoint=100)


# -- the answer ----


def test_the_answer_comes_first(capsys: Capture) -> None:
    assert main([*SMALL, "--mtbf", "1d", "--price", "2", "diloco(16)"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("diloco(16): 32 steps of 4 workers on 2 sites take ")
    assert "Limited by " in said and "Goodput " in said
    assert "laconic.diloco(16), elastic=laconic.Elastic" in said
    assert main([*SMALL, "--json", "--spread", "30%", "ddp()", "local_sgd(4)"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recommendation"] in ("ddp()", "local_sgd(4)")
    for row in found["recipes"]:
        seconds = row["seconds"]
        assert 0 < seconds["low"] <= seconds["median"] <= seconds["high"] != seconds["low"]
        assert sum(row["shares"].values()) == pytest.approx(1.0)


def test_what_limits_a_run_is_named() -> None:
    near = Cluster(1000, uniform(4, 1, bandwidth=1e9, latency=0.0), spread=0.0)
    far = replace(near, sites=uniform(4, 2, bandwidth=1e9, latency=0.5), latency=0.5)
    failing = replace(near, failures=Failures(mtbf=500.0))
    shared = uniform(4, 2, bandwidth=1e10, latency=0.0, uplink=1e8)
    narrow = Cluster(10_000_000, shared, spread=0.0)
    limits = {
        "computing": near,
        "the bandwidth of the uplink of site": narrow,
        "the latency, 500 ms per": far,
        "failures": failing,
    }
    for limit, cluster in {**limits, "slowest worker": replace(near, spread=0.5)}.items():
        assert limit in plan(cluster, ["ddp()"], steps=200).limit
