"""``laconic plan``: clusters from files and options, records of real runs, the law of losses, and
what is answered."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import laconic as la
from laconic.advisor.plan import fields, law, measured
from laconic.advisor.plan.cluster import Cluster, Failures, uniform
from laconic.advisor.plan.report import plan
from laconic.algorithms.parse import parse_recipe
from laconic.cli import main

SMALL = ["plan", "--workers", "4", "--sites", "2", "--rate", "100mbit", "--latency", "20ms",
         "--parameters", "2m", "--step", "200ms", "--steps", "64"]  # fmt: skip


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_example_is_a_cluster_and_so_is_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--example"]) == 0
    cluster = fields.read(written(tmp_path / "cluster.yaml", capsys.readouterr().out))
    assert [site.name for site in cluster.sites] == ["paris", "oslo", "ohio"]
    assert cluster.workers == 8 and cluster.parameters == 10**9 and cluster.latency == 0.08
    assert cluster.sites[2].step == 1.2 and cluster.sites[0].uplink == 500e6
    assert cluster.link(1, 0).latency == 0.03 and cluster.link(0, 2).latency is None
    assert cluster.failures.mtbf == 30 * 86400 and cluster.gigabyte == 0.05
    facts = cluster.facts()
    assert facts.one_way == 0.04 and facts.compute == 1.2 and len(facts.shared) == 3
    sites = [{"name": "a", "workers": 2, "rate": "1gbit"}, {"name": "b", "workers": 1, "rate": 1e8}]
    failures = {"mtbf": "10d", "policy": "static", "checkpoint": 100}
    values = {"parameters": "8m", "step": 0.5, "sites": sites, "failures": failures}
    cluster = fields.read(written(tmp_path / "cluster.json", json.dumps(values)))
    assert cluster.step == 0.5 and cluster.sites[1].rate == 1e8
    assert cluster.failures == Failures(mtbf=864000.0, policy="static", checkpoint=100)


# -- the answer ----


def test_the_answer_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--mtbf", "1d", "--price", "2", "diloco(16)"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("diloco(16): 64 steps of 4 workers on 2 sites take ")
    assert "Limited by " in said and "Goodput " in said and "no law for this run" in said
    assert "laconic.diloco(16), elastic=laconic.Elastic" in said
    assert main([*SMALL, "--json", "--spread", "30%", "ddp()", "local_sgd(4)"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recommendation"] in ("ddp()", "local_sgd(4)")
    for row in found["recipes"]:
        seconds = row["seconds"]
        assert 0 < seconds["low"] <= seconds["median"] <= seconds["high"] != seconds["low"]
        assert sum(row["shares"].values()) == pytest.approx(1.0)
        times = [mark[0] for mark in row["marks"]]
        assert times == sorted(times) and row["marks"][-1][1] == 64


def test_a_change_that_helps_helps() -> None:
    """DDP over a slow uplink: another recipe, or a faster uplink, shortens the run."""
    sites = uniform(4, 2, rate=1e10, latency=0.0, uplink=1e8, price=1.0)
    cluster = Cluster(10_000_000, sites, spread=0.0)
    made = plan(cluster, ["ddp()"], steps=200, seeds=1)
    assert made.limit.startswith("the bandwidth of the uplink of site")
    whats = [change.what for change in made.changes]
    assert "uplinks twice as fast" in whats and "instead" in whats[0]
    assert made.changes[0].free and all(change.gain >= 0.05 for change in made.changes)
    fast = replace(cluster, sites=tuple(replace(s, uplink=2e8) for s in sites))
    faster = plan(fast, ["ddp()"], steps=200, seeds=1, changes=False).best.seconds.median
    gain = next(c.gain for c in made.changes if c.what == "uplinks twice as fast")
    assert gain == pytest.approx(1 - faster / made.best.seconds.median)


def test_what_limits_a_run_is_named() -> None:
    near = Cluster(1000, uniform(4, 1, rate=1e9, latency=0.0), spread=0.0)
    far = replace(near, sites=uniform(4, 2, rate=1e9, latency=0.5), latency=0.5)
    for cluster, steps, limit in (
        (near, 50, "computing"),
        (far, 50, "the latency between"),
        (replace(near, spread=0.5), 50, "slowest worker"),
        (replace(near, failures=Failures(mtbf=500.0)), 500, "failures"),
    ):
        assert limit in plan(cluster, ["ddp()"], steps=steps, changes=False).limit


# -- the law ----


def test_the_law_agrees_with_what_the_paper_trained_and_has_a_domain() -> None:
    """Losses of arXiv 2503.09799, Tables 4 and 5."""
    trained = {
        (35e6, 8): 3.621, (180e6, 4): 2.981, (550e6, 2): 2.657, (1.3e9, 1): 2.451,
        (2.4e9, 8): 2.351, (4e9, 4): 2.230,
    }  # fmt: skip
    for (parameters, workers), loss in trained.items():
        found = law.expected(la.diloco(30), int(parameters), workers, 20 * parameters)
        assert found.low is not None and found.high is not None, found.why
        assert found.low <= loss <= found.high
    ddp = law.expected(la.ddp(), 335_000_000, 64, 20 * 335e6)
    assert ddp.loss == pytest.approx(2.784, rel=0.01)
    assert law.expected(la.diloco(30), 10**9, 4, 2e10).outer_lr == 0.6
    outside = [
        ("diloco(30)", 10**7, 4, 20, "parameters"),
        ("diloco(30)", 4 * 10**9, 8, 20, "parameters"),
        ("diloco(30)", 10**9, 16, 20, "workers"),
        ("diloco(30)", 10**9, 4, 5, "tokens"),
        ("diloco(500)", 10**9, 4, 20, "periods of 30 to 100, and this run has 500"),
        ("diloco(30, momentum=0.5)", 10**9, 4, 20, "an outer momentum of 0.9"),
        ("diloco(30, lr=0.01)", 10**9, 4, 20, "outer learning rates of 0.4 to 1"),
        *((text, 10**9, 4, 20, "") for text in (
            "local_sgd(30)", "streaming_diloco(30)", "diloco(30, codec='int4')",
            "diloco(30, quorum=3)", "ddp(codec='int4')", "diloco(30, outer='muon')",
        )),
    ]  # fmt: skip
    for text, size, workers, ratio, why in outside:
        recipe = parse_recipe(text)
        assert isinstance(recipe, tuple)
        found = law.expected(recipe, size, workers, float(ratio) * size)
        assert found.loss is found.low is found.high is None, text
        assert found.why.startswith("no law for this run: ") and why in found.why
    assert law.expected(la.diloco(30), 10**9, 4, None).loss is None, "unknown tokens"


def test_a_pilot_is_continued_with_a_range(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def loss(step: float) -> float:
        return float(6.0 * step**-0.1)

    rows = [f"{step},{loss(step) * (1 + 0.002 * (-1) ** step)}" for step in range(1, 201)]
    path = written(tmp_path / "pilot.csv", "\n".join(["step,loss", *rows]))
    curve = law.read_curve(path)
    found = law.continued(curve, 1000)
    assert found.loss is not None and found.low is not None and found.high is not None
    assert found.loss == pytest.approx(loss(1000), rel=0.02)
    assert found.low < loss(1000) < found.high < 1.2 * found.low
    far = law.continued(curve, 2001)
    assert far.loss is None and "no curve for this run" in far.why
    assert main([*SMALL, "--curve", str(path), "local_sgd(8)"]) == 0
    assert "Loss at the end: " in capsys.readouterr().out
    assert main([*SMALL, "--curve", str(path)]) == 2
    assert "give that recipe" in capsys.readouterr().err


# -- records of runs ----


def records(path: Path, *, lost: bool = False) -> Path:
    """A run of 100 s: 4 workers take two steps per second, of which they wait 20%."""
    lines: list[dict[str, Any]] = [
        {"event": "start", "time": 1000.0, "step": 0, "workers": 4, "recipe": "local_sgd(8)"}
    ]
    for k in range(1, 101):
        seconds = 1.0 + (0.1 if k % 2 else -0.1)
        call = {"name": "local_sgd", "count": 1, "step": 2 * k, "bytes": 2_000_000, "seconds": 0.2}
        lines.append(
            {"event": "steps", "time": 1000.0 + k, "step": 2 * k, "steps": 2, "seconds": seconds,
             "waiting": 0.2, "workers_lost": int(lost and k > 40), "calls": [call]}
        )  # fmt: skip
        if lost and k in (40, 60):
            n = 3 if k == 40 else 4
            lines.append({"event": "view", "time": 1000.0 + k, "workers": n, "workers_lost": 1})
    return written(path, "".join(f"{json.dumps(line)}\n" for line in lines))


def test_records_give_step_times_the_network_and_failures(tmp_path: Path) -> None:
    path = records(tmp_path / "run.jsonl", lost=True)
    found = measured.read_records(path)
    assert found.step == pytest.approx(0.4) and found.workers == 4
    assert found.spread == pytest.approx(0.1 * math.sqrt(2) / 0.6745, rel=0.01)
    assert found.rate == pytest.approx(80e6)
    assert found.lost == 1 and found.away == pytest.approx(20.0)
    assert found.mtbf == pytest.approx(4 * 40 + 3 * 20 + 4 * 40)
    base = Cluster(10**6, uniform(8, 2, rate=1e9, latency=0.0))
    cluster, _ = measured.calibrated(base, path)
    assert cluster.step == found.step and cluster.sites[1].rate == pytest.approx(80e6)
    assert cluster.failures.mtbf == found.mtbf and cluster.failures.repair == found.away
    text = path.read_text()
    cut = text + text.splitlines()[-1][:40]
    assert measured.read_records(written(path, cut)) == found, "an incomplete line does not count"
    with pytest.raises(ValueError, match="line 104: not a record"):
        measured.read_records(written(path, cut + "\n"))


def test_the_planned_timeline_is_beside_the_measured_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, picture = records(tmp_path / "run.jsonl"), tmp_path / "plan.svg"
    known = ["plan", "--rate", "1gbit", "--parameters", "1m", "--steps", "200"]
    known += ["--from-metrics", str(path), "--workers"]
    for words, said in (
        (["4", "--plot", str(picture)], "measured: local_sgd(8) on 4 workers"),
        (["8"], "no timelines: 4 workers were measured, and 8 are planned"),
    ):
        assert main([*known, *words]) == 0
        assert said in capsys.readouterr().out
    assert "measured" in picture.read_text()
