"""``laconic plan``: clusters from files and options, records of real runs, the law of losses, and
what is answered and refused."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
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


def but(option: str, value: str) -> list[str]:
    """The same with another value of this option."""
    at = SMALL.index(option) if option in SMALL else len(SMALL)
    return [*SMALL[:at], option, value, *SMALL[at + 2 :]]


def written(tmp_path: Path, text: str | bytes, name: str = "cluster.yaml") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
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


TWO = """\
parameters: 1m
sites:
- {name: a, workers: 1, rate: 1gbit}
- {name: b, workers: 1, rate: 1gbit}
"""
EXAMPLE = fields.EXAMPLE
MISTAKES: dict[str, tuple[str | bytes, str]] = {
    "a rate": (EXAMPLE.replace("500mbit ", "500mbut "), r"line 14: sites\[0\].uplink: not a rate"),
    "a field": (EXAMPLE.replace("    rate: 1gbit", "    rat: 1gbit", 1), "line 11: .*rate is miss"),
    "unknown": (EXAMPLE.replace("latency: 80ms", "latencies: 80ms"), "line 6: latencies: unknown"),
    "a choice": (
        EXAMPLE.replace("policy: elastic", "policy: elastik"),
        "failures.policy: .*static",
    ),
    "a number": (EXAMPLE.replace("price: 2.0", "price: two"), "line 16: .*not a price: 'two'"),
    "a name": (EXAMPLE.replace("[paris, oslo]", "[paris, rome]"), "line 21: .*site must be one of"),
    "a pair": (EXAMPLE.replace("[paris, oslo]", "paris"), "line 21: .*must be the names of two"),
    "syntax": (EXAMPLE.replace("sites:", "sites: ["), "line [0-9]+: "),
    "a share": (EXAMPLE.replace("spread: 5%", "spread: 500%"), "line 5: spread: not a share"),
    "a section": (TWO + "prices: 3", "prices: must have fields"),
    "a control character": (TWO + "dtype: \x01", r"line 5: the character U\+0001 is not all"),
    "an alias to itself": (TWO + "failures: &x\n  mtbf: *x", "line 6: failures.mtbf: an alias"),
    "a list as a name": (TWO + "? [a, b]\n: 1", "line 5: the name of a field must be text"),
    "a merge key": ("b: &b {workers: 1}\nsites:\n- {<<: *b, name: a}", "line 3: merge keys"),
    "a field twice": (TWO + "dtype: float32\ndtype: bfloat16", "line 6: dtype: .*in line 5"),
    "depth": ("[" * 3000, "too many lists or fields inside each other"),
    "another encoding": (b"step: 1\xff", "is not a text file in UTF-8"),
    "too many workers": (
        TWO + "failures:\n  mtbf: 1d\n  min_workers: 5",
        "line 7: .*workers, 2",
    ),
    "failures that never happen": (TWO + "failures:\n  policy: static", "without failures.mtbf"),
    "misspelled in failures": (TWO + "failures: {mtfb: 1d}", "did you mean 'mtbf'"),
    "a link to itself": (TWO + "links:\n- {between: [a, a]}", "line 6: .*two different sites"),
    "two links of a pair": (
        TWO + "links:\n- {between: [a, b]}\n- {between: [b, a]}",
        r"line 7: links\[1\].between: must be a pair without another link",
    ),
    "lost packets": (TWO + "loss: 11%", "line 5: loss: must be at most 10%, not 11%"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_file_with_a_mistake_is_an_error_with_its_place(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, message = MISTAKES[name]
    path = written(tmp_path, text)
    assert main(["plan", "--cluster", str(path)]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said) and said.count("\n") == 1 and "cluster.yaml" in said


OPTIONS = {
    "--runs 0": "--runs must be an integer of at least 1",
    "--egress inf": "--egress must be a finite number",
    "--rate 100mbut": "--rate: not a rate",
    "--spread 500%": "--spread: not a share",
    "--parameters x": "--parameters: not a count",
    "--latency x": "--latency: not a latency",
    "--workers 0": "--workers must be an integer of at least 1",
    "--loss 20%": "--loss must be at most 10%",
    "--repair 1h": "--repair has no effect without --mtbf",
    "--plot no/such/plan.svg": "--plot no/such/plan.svg: no such directory",
    "--plot plan.xyz": "--plot must end in one of ",
    "--cluster x.yaml": "and so does --cluster x.yaml",
    "--train 2": "--train cannot be combined with ",
    "--mtbf 1d hierarchical(4,8)": "hierarchical(4,8) has rounds inside groups",
    "--mtbf 1d dilco(3)": "no recipe 'dilco'",
}
TRAINING = {
    "--train 2 --json": "--train cannot be combined with --json",
    "--train 2 --steps 5": "--steps must be an integer of at least 10",
    "--train 2 diloco(5,quorum=9)": "quorum must be at most the number of workers, 2, not 9",
    "--train 257": "--train must be at most 256, not 257",
    "--workers 8": "plan also needs --rate, --parameters, or --cluster FILE",
}


@pytest.mark.parametrize("words", [*OPTIONS, *TRAINING])
def test_errors_name_the_option(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", *words.split()] if words in TRAINING else [*but(*words.split()[:2]), "ddp()"]
    given += words.split()[2:] if words in OPTIONS else []
    assert main(given) == 2
    captured = capsys.readouterr()
    assert {**OPTIONS, **TRAINING}[words] in captured.err and captured.err.count("\n") == 1
    assert not captured.out


# -- the answer ----


def test_the_answer_comes_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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
    moneys = [round(change.money, 6) for change in made.changes]
    assert moneys == sorted(moneys)
    fast = replace(cluster, sites=tuple(replace(s, uplink=2e8) for s in sites))
    faster = plan(fast, ["ddp()"], steps=200, seeds=1, changes=False).best.seconds.median
    gain = next(c.gain for c in made.changes if c.what == "uplinks twice as fast")
    assert gain == pytest.approx(1 - faster / made.best.seconds.median)


def test_what_limits_a_run_is_named() -> None:
    near = Cluster(1000, uniform(4, 1, rate=1e9, latency=0.0), spread=0.0)
    far = replace(near, sites=uniform(4, 2, rate=1e9, latency=0.5), latency=0.5)
    frail = replace(near, failures=Failures(mtbf=500.0))
    for cluster, steps, limit in (
        (near, 50, "computing"),
        (far, 50, "the latency between"),
        (replace(near, spread=0.5), 50, "slowest worker"),
        (frail, 500, "failures"),
    ):
        assert limit in plan(cluster, ["ddp()"], steps=steps, changes=False).limit


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


OUTSIDE = """\
diloco(30)|1e7|4|20|parameters
diloco(30)|4e9|8|20|parameters
diloco(30)|1e9|16|20|workers
diloco(30)|1e9|4|5|tokens
diloco(500)|1e9|4|20|periods of 30 to 100, and this run has 500
local_sgd(30)|1e9|4|20|
streaming_diloco(30)|1e9|4|20|
diloco(30, codec='int4')|1e9|4|20|
diloco(30, quorum=3)|1e9|4|20|
ddp(codec='int4')|1e9|4|20|
diloco(30, momentum=0.5)|1e9|4|20|an outer momentum of 0.9, and this run has 0.5
diloco(30, lr=0.01)|1e9|4|20|outer learning rates of 0.4 to 1
diloco(30, outer='muon')|1e9|4|20|
diloco(30, delay=4)|1e9|4|20|
power_sgd(2)|1e9|4|20|"""


@pytest.mark.parametrize("line", OUTSIDE.splitlines())
def test_outside_of_its_domain_the_law_has_no_number(line: str) -> None:
    text, parameters, workers, ratio, why = line.split("|")
    recipe = parse_recipe(text)
    assert isinstance(recipe, tuple)
    size = int(float(parameters))
    found = law.expected(recipe, size, int(workers), float(ratio) * size)
    assert found.loss is found.low is found.high is None
    assert found.why.startswith("no law for this run: ") and why in found.why
    assert law.expected(la.diloco(30), 10**9, 4, None).loss is None, "unknown tokens"


def test_a_pilot_is_continued_with_a_range(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def loss(step: float) -> float:
        return float(6.0 * step**-0.1)

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
    known = ["plan", "--workers", "4", "--rate", "1gbit", "--parameters", "1m", "--steps", "200"]
    measured_by = ["--from-metrics", str(path)]
    assert main([*known, *measured_by, "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("local_sgd(8): 200 steps")
    assert "measured: local_sgd(8) on 4 workers" in out and "difference" in out
    assert "measured" in picture.read_text()
    assert main([*known, *measured_by, "--sites", "2", "--uplink", "50mbit", "ddp()"]) == 0
    out = capsys.readouterr().out
    assert "no timelines: local_sgd(8) was measured, and not ddp()" in out
    assert "the measured rate, 80 Mbit/s per worker, includes" in out, "what workers share"
    known[2] = "8"
    assert main([*known, *measured_by]) == 0
    assert "no timelines: 4 workers were measured, and 8 are planned" in capsys.readouterr().out


def run(**changes: Any) -> list[dict[str, Any]]:
    """The records of a run of 3 workers. ``changes``: of the fields of its records of steps."""
    begin = {"event": "start", "time": 0.0, "step": 0, "workers": 3, "recipe": "local_sgd(8)"}
    call = {"bytes": 2_000_000, "seconds": 0.2}
    steps = [
        {"event": "steps", "time": float(k), "step": 2 * k, "steps": 2, "seconds": 1.0,
         "waiting": 0.2, "calls": [call], **changes}
        for k in range(1, 20)
    ]  # fmt: skip
    return [begin, *steps]


def lines(records: list[dict[str, Any]]) -> str:
    return "".join(f"{json.dumps(record)}\n" for record in records)


def without(name: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k != name} for record in run()]


RECORDS: dict[str, tuple[Callable[[], list[dict[str, Any]]], str]] = {
    "nothing but waiting": (lambda: run(waiting=1.0), "run.jsonl has no time of computing"),
    "no time": (lambda: without("time"), "run.jsonl, line 1: time is missing"),
    "a call without bytes": (lambda: run(calls=[{"seconds": 1.0}]), "line 2: calls[0]: bytes is m"),
    "calls": (lambda: run(calls=[3]), "line 2: calls must be a list"),
    "text": (lambda: run(seconds="1 s"), "line 2: seconds must be a number from 0 up, not '1 s'"),
    "NaN": (lambda: run(waiting=math.nan), "line 2: waiting must be a number from 0 up"),
    "no recipe": (lambda: without("recipe"), "run.jsonl does not name the run's recipe: give one"),
    "no start": (lambda: run()[1:], "no start of a run"),
    "no steps": (lambda: run()[:1], "no records of steps"),
    "an unknown recipe": (
        lambda: [{**run()[0], "recipe": "mine(3)"}, *run()[1:]],
        "run.jsonl: no recipe 'mine'",
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_records_with_a_mistake_are_an_error_with_its_place(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, message = RECORDS[name]
    path = written(tmp_path, lines(make()), "run.jsonl")
    assert main([*SMALL, "--from-metrics", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_an_incomplete_last_line_does_not_count(tmp_path: Path) -> None:
    text = lines(run(calls=None))
    whole = measured.read_records(written(tmp_path, text, "run.jsonl"))
    cut = text + text.splitlines()[-1][:40]
    assert measured.read_records(written(tmp_path, cut, "run.jsonl")) == whole
    with pytest.raises(ValueError, match="line 21: not a record"):
        measured.read_records(written(tmp_path, cut + "\n", "run.jsonl"))
