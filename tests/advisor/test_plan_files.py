"""Clusters from files, the law and its domain, records of real runs, and the command."""

from __future__ import annotations

import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import laconic as la
from laconic.advisor.plan import fields, law, measured
from laconic.advisor.plan.at_scale import learn
from laconic.advisor.plan.cluster import Cluster, Failures, uniform
from laconic.advisor.plan.report import plan
from laconic.cli import main

SMALL = ["plan", "--workers", "4", "--sites", "2", "--rate", "100mbit", "--latency", "20ms",
         "--parameters", "2m", "--step", "200ms", "--steps", "64"]  # fmt: skip


def written(tmp_path: Path, text: str, name: str = "cluster.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


# -- files ----


def test_the_example_is_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--example"]) == 0
    text = capsys.readouterr().out
    cluster = fields.read(written(tmp_path, text))
    assert [site.name for site in cluster.sites] == ["paris", "oslo", "ohio"]
    assert cluster.workers == 8 and cluster.parameters == 10**9 and cluster.latency == 0.08
    assert cluster.sites[2].step == 1.2 and cluster.sites[0].uplink == 500e6
    assert cluster.link(1, 0).latency == 0.03 and cluster.link(0, 2).latency is None
    assert cluster.failures.mtbf == 30 * 86400 and cluster.gigabyte == 0.05
    facts = cluster.facts()
    assert facts.one_way == 0.04 and facts.compute == 1.2 and len(facts.shared) == 3


def test_json_is_the_same_without_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "parameters": "8m",
        "step": 0.5,
        "sites": [{"name": "a", "workers": 2, "rate": "1gbit"}, {"name": "b", "workers": 1,
                  "rate": 1e8, "uplink": "50mbit"}],
        "failures": {"mtbf": "10d", "policy": "static", "checkpoint": 100},
    }  # fmt: skip
    path = written(tmp_path, json.dumps(values), "cluster.json")
    monkeypatch.setitem(sys.modules, "yaml", None)
    cluster = fields.read(path)
    assert cluster.step == 0.5 and cluster.sites[1].rate == 1e8
    assert cluster.failures == Failures(mtbf=864000.0, policy="static", checkpoint=100)
    with pytest.raises(ImportError, match=r"YAML needs PyYAML: pip install -e '.\[plan\]'"):
        fields.read(written(tmp_path, "parameters: 1b"))
    with pytest.raises(ValueError, match=r"cluster.json, line 1: "):
        fields.read(written(tmp_path, "{", "cluster.json"))


MISTAKES = {
    "a rate": ("uplink: 500mbit ", "uplink: 500mbut ", r"line 14: sites\[0\].uplink: not a rate"),
    "a field": ("    rate: 1gbit", "    rat: 1gbit", r"line 11: sites\[0\]: rate is missing"),
    "unknown": ("latency: 80ms", "latencies: 80ms", "line 6: latencies: unknown field .did you me"),
    "a choice": ("policy: elastic", "policy: elastik", "line 27: failures.policy: .*'static'"),
    "a number": ("price: 2.0", "price: two", r"line 16: sites\[0\].price: not a price: 'two'"),
    "a name": (
        "[paris, oslo]",
        "[paris, rome]",
        r"line 21: links\[0\].between: site must be one of",
    ),
    "a pair": ("[paris, oslo]", "paris", r"line 21: links\[0\].between: must be the names of two"),
    "a section": ("prices:\n  gigabyte: 0.05", "prices: 3", "prices: must have fields"),
    "syntax": ("sites:", "sites: [", "line [0-9]+: "),
    "a share": ("spread: 5%", "spread: 500%", "line 5: spread: not a share"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_name_the_line_and_the_field(name: str, tmp_path: Path) -> None:
    old, new, message = MISTAKES[name]
    assert old in fields.EXAMPLE
    path = written(tmp_path, fields.EXAMPLE.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        fields.read(path)


def test_the_command_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--workers", "8"]) == 2
    assert "plan also needs --rate, --parameters, or --cluster FILE" in capsys.readouterr().err
    assert main([*SMALL, "--cluster", "x.yaml"]) == 2
    assert "and so does --cluster x.yaml" in capsys.readouterr().err
    assert main([*SMALL, "dilco(3)"]) == 2
    assert "diloco" in capsys.readouterr().err


# -- the answer ----


def test_the_answer_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--mtbf", "1d", "--price", "2", "diloco(16)"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("diloco(16): 64 steps of 4 workers on 2 sites take ")
    assert "Limited by " in lines[1] and lines[2].startswith("Goodput ")
    assert lines[3].startswith("Loss: no law for this run") and "change" in lines[4]
    assert lines[5].startswith("For what 64 steps of ddp() reach, it needs about 9")
    assert "laconic.diloco(16), elastic=laconic.Elastic" in lines[6]


def test_json_has_ranges_and_the_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json", "--spread", "30%", "ddp()", "local_sgd(4)"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recommendation"] in ("ddp()", "local_sgd(4)")
    for row in found["recipes"]:
        seconds = row["seconds"]
        assert 0 < seconds["low"] <= seconds["median"] <= seconds["high"]
        assert seconds["low"] < seconds["high"]
        assert sum(row["shares"].values()) == pytest.approx(1.0)
        times = [mark[0] for mark in row["marks"]]
        assert times == sorted(times) and row["marks"][-1][1] == 64


def test_the_recipes_are_those_of_advise_and_the_best_is_recommended() -> None:
    cluster = Cluster(50_000_000, uniform(8, 2, rate=1e8, latency=0.04), latency=0.04)
    made = plan(cluster, steps=2000, seeds=1)
    assert made.rows[0].text == "ddp()" and len(made.rows) == 6 and made.compared > 20
    assert made.best.seconds.median < made.rows[0].seconds.median / 10
    assert made.reason.startswith(f"Use {made.best.text}: ")


def test_a_change_that_helps_helps() -> None:
    """DDP over a slow uplink: another recipe, or a faster uplink, shortens the run."""
    sites = uniform(4, 2, rate=1e10, latency=0.0, uplink=1e8, price=1.0)
    cluster = Cluster(10_000_000, sites, spread=0.0)
    made = plan(cluster, ["ddp()"], steps=200, seeds=1)
    assert made.limit.startswith("the bandwidth of the uplink of site")
    whats = [change.what for change in made.changes]
    assert "uplinks twice as fast" in whats and "instead" in whats[0]
    assert made.changes[0].free and all(change.gain >= 0.05 for change in made.changes)
    moneys = [round(change.money, 6) for change in made.changes]
    assert moneys == sorted(moneys)
    fast = replace(cluster, sites=tuple(replace(s, uplink=2e8) for s in sites))
    faster = plan(fast, ["ddp()"], steps=200, seeds=1, changes=False).best.seconds.median
    gain = next(c.gain for c in made.changes if c.what == "uplinks twice as fast")
    assert gain == pytest.approx(1 - faster / made.best.seconds.median)


def test_what_limits_a_run_is_named() -> None:
    near = Cluster(1000, uniform(4, 1, rate=1e9, latency=0.0), spread=0.0)
    assert plan(near, ["ddp()"], steps=50, changes=False).limit.startswith("computing")
    far = replace(near, sites=uniform(4, 2, rate=1e9, latency=0.5), latency=0.5)
    assert plan(far, ["ddp()"], steps=50, changes=False).limit.startswith("the latency between")
    uneven = replace(near, spread=0.5)
    assert "slowest worker" in plan(uneven, ["ddp()"], steps=50, changes=False).limit
    frail = replace(near, failures=Failures(mtbf=500.0))
    assert "failures" in plan(frail, ["ddp()"], steps=500, changes=False).limit


# -- the law ----


def test_the_law_agrees_with_what_the_paper_trained() -> None:
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


OUTSIDE: dict[str, tuple[Any, float, int, float | None]] = {
    "small": (la.diloco(30), 1e7, 4, 20.0),
    "large": (la.diloco(30), 1e10, 4, 20.0),
    "many workers": (la.diloco(30), 1e9, 16, 20.0),
    "large and many workers": (la.diloco(30), 4e9, 8, 20.0),
    "few tokens": (la.diloco(30), 1e9, 4, 5.0),
    "unknown tokens": (la.diloco(30), 1e9, 4, None),
    "long periods": (la.diloco(500), 1e9, 4, 20.0),
    "another algorithm": (la.local_sgd(30), 1e9, 4, 20.0),
    "fragments": (la.streaming_diloco(30), 1e9, 4, 20.0),
    "a codec": (la.diloco(30, codec="int4"), 1e9, 4, 20.0),
    "a quorum": (la.diloco(30, quorum=3), 1e9, 4, 20.0),
    "coded gradients": (la.ddp(codec="int4"), 1e9, 4, 20.0),
    "other momentum": (la.diloco(30, momentum=0.5), 1e9, 4, 20.0),
    "a small outer learning rate": (la.diloco(30, lr=0.01), 1e9, 4, 20.0),
    "a large outer learning rate": (la.diloco(30, lr=100.0), 1e9, 4, 20.0),
    "another outer optimizer": (la.diloco(30, outer="muon"), 1e9, 4, 20.0),
    "another average": (la.diloco(30, average="rda"), 1e9, 4, 20.0),
    "another merge": (la.diloco(30, delay=2, merge="average"), 1e9, 4, 20.0),
    "an eager step": (la.diloco(30, delay=4, merge="eager"), 1e9, 4, 20.0),
    "a delay": (la.diloco(30, delay=4), 1e9, 4, 20.0),
    "low-rank gradients": (la.power_sgd(2), 1e9, 4, 20.0),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_outside_of_its_domain_the_law_has_no_number(name: str) -> None:
    recipe, parameters, workers, ratio = OUTSIDE[name]
    tokens = None if ratio is None else ratio * parameters
    found = law.expected(recipe, int(parameters), workers, tokens)
    assert found.loss is found.low is found.high is None
    assert found.why.startswith("no law for this run: ")


def test_the_law_says_what_is_outside() -> None:
    def why(recipe: Any) -> str:
        return law.expected(recipe, 10**9, 4, 2e10).why

    assert "outer learning rates of 0.4 to 1, and this run has 0.01" in why(la.diloco(50, 0.01))
    assert "an outer momentum of 0.9, and this run has 0.5" in why(la.diloco(50, momentum=0.5))
    assert "periods of 30 to 100, and this run has 500" in why(la.diloco(500))
    assert "momentum=0.9), with no other options" in why(la.diloco(50, outer="muon"))
    inside = law.expected(la.diloco(50, lr=0.4, sharded=False), 10**9, 4, 2e10)
    assert inside.loss == law.expected(la.diloco(50), 10**9, 4, 2e10).loss is not None


def test_a_pilot_is_continued_with_a_range(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def loss(step: float) -> float:
        return 6.0 * step**-0.1

    rows = [f"{step},{loss(step) * (1 + 0.002 * (-1) ** step)}" for step in range(1, 201)]
    path = written(tmp_path, "\n".join(["step,loss", *rows]), "pilot.csv")
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2\n2,1.5", "at least 10 different steps"),
        ("step,loss\n1,2\n2,nan,3", "line 3: not step,loss"),
        ("1,2\n2,-1", "line 2: step and loss must be positive"),
        ("1,2\nnan,1", "line 2: step and loss must be positive and finite"),
        ("1,2\ninf,1", "line 2: step and loss must be positive and finite"),
        (
            "\n".join(f"{step},2" for step in [*range(1, 20), 10_000]),
            "pilot.csv must have at least 3 points from step 5000 on",
        ),
    ],
)
def test_other_files_are_no_curves(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        law.read_curve(written(tmp_path, text, "pilot.csv"))


# -- measured runs ----


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
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_records_give_step_times_the_network_and_failures(tmp_path: Path) -> None:
    found = measured.read_records(records(tmp_path / "run.jsonl", lost=True))
    assert found.step == pytest.approx(0.4) and found.workers == 4
    assert found.spread == pytest.approx(0.1 * math.sqrt(2) / 0.6745, rel=0.01)
    assert found.rate == pytest.approx(80e6)
    assert found.lost == 1 and found.away == pytest.approx(20.0)
    assert found.mtbf == pytest.approx(4 * 40 + 3 * 20 + 4 * 40)
    base = Cluster(10**6, uniform(8, 2, rate=1e9, latency=0.0))
    cluster, _ = measured.calibrated(base, tmp_path / "run.jsonl")
    assert cluster.step == found.step and cluster.sites[1].rate == pytest.approx(80e6)
    assert cluster.failures.mtbf == found.mtbf and cluster.failures.repair == found.away


def test_the_planned_timeline_is_beside_the_measured_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, picture = records(tmp_path / "run.jsonl"), tmp_path / "plan.svg"
    arguments = ["plan", "--workers", "4", "--rate", "1gbit", "--parameters", "1m", "--steps",
                 "200", "--from-metrics", str(path), "--plot", str(picture)]  # fmt: skip
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("local_sgd(8): 200 steps")
    assert "measured: local_sgd(8) on 4 workers" in out and "no timelines" not in out
    lines = out.splitlines()
    at = next(k for k, line in enumerate(lines) if line.split() == ["step", "measured", "planned",
                                                                    "difference"])  # fmt: skip
    steps = [int(line.split()[0].replace(",", "")) for line in lines[at + 1 : at + 5]]
    assert all(a < b for a, b in itertools.pairwise(steps)) and steps[-1] == 200
    assert picture.read_text().count("measured") >= 1


def test_other_files_are_no_records(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 1: not a record"):
        measured.read_records(written(tmp_path, "hello\n"))
    with pytest.raises(ValueError, match="no start of a run"):
        measured.read_records(written(tmp_path, '{"event": "end", "time": 0}\n'))
    with pytest.raises(ValueError, match="no records of steps"):
        measured.read_records(written(tmp_path, '{"event": "start", "time": 0}\n'))


# -- many workers ----


def test_many_workers_learn_together() -> None:
    learned = learn(la.local_sgd(5), workers=24, steps=20)
    assert len(learned.losses) == 10 and learned.losses[-1] < learned.losses[0] / 2
    assert learned.distance > 0 and learned.memory > 0
    again = learn(la.local_sgd(5), workers=24, steps=20)
    assert again.losses == learned.losses and again.distance == learned.distance
    with pytest.raises(ValueError, match="at most 256"):
        learn(la.ddp(), workers=257)
