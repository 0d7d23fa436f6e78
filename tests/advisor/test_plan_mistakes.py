"""What ``laconic plan`` says about input that is wrong, incomplete, or would have no effect."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from laconic.advisor.plan import at_scale, fields, measured, show
from laconic.advisor.plan import report as reports
from laconic.advisor.plan.cluster import Cluster, uniform
from laconic.advisor.plan.cluster import Path as Link
from laconic.advisor.plan.report import Change
from laconic.cli import main

SMALL = ["plan", "--workers", "4", "--sites", "2", "--rate", "100mbit", "--latency", "20ms",
         "--parameters", "2m", "--step", "200ms", "--steps", "64"]  # fmt: skip


def but(option: str, value: str) -> list[str]:
    """The same with another value of this option."""
    at = SMALL.index(option) if option in SMALL else len(SMALL)
    return [*SMALL[:at], option, value, *SMALL[at + 2 :]]


TWO = """\
parameters: 1m
sites:
- {name: a, workers: 1, rate: 1gbit}
- {name: b, workers: 1, rate: 1gbit}
"""


def written(tmp_path: Path, text: str | bytes, name: str = "cluster.yaml") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# -- files ----

FILES: dict[str, tuple[str | bytes, str]] = {
    "a control character": (TWO + "dtype: \x01", r"yaml, line 5: the character U\+0001 is not all"),
    "an alias to itself": (TWO + "failures: &x\n  mtbf: *x", "line 6: failures.mtbf: an alias"),
    "a list as a name": (TWO + "? [a, b]\n: 1", "line 5: the name of a field must be text"),
    "a merge key": (
        "b: &b {workers: 1}\nsites:\n- {<<: *b, name: a}",
        r"line 3: merge keys \(<<\) are not supported",
    ),
    "a field twice": (TWO + "dtype: float32\ndtype: bfloat16", "line 6: dtype: .*in line 5"),
    "depth": ("[" * 3000, "too many lists or fields inside each other"),
    "another encoding": (b"step: 1\xff", "cluster.yaml is not a text file in UTF-8"),
    "too many workers": (
        TWO + "failures:\n  mtbf: 1d\n  min_workers: 5",
        "line 7: failures.min_workers: must be at most the number of workers, 2, not 5",
    ),
    "a price": (TWO + "prices:\n  worker_hour: nan", "line 6: prices.worker_hour: not a price"),
    "failures that never happen": (
        TWO + "failures:\n  policy: static\n  checkpoint: 5",
        "line 6: failures.policy: has no effect without failures.mtbf",
    ),
    "a typing mistake in failures": (TWO + "failures: {mtfb: 1d}", "did you mean 'mtbf'"),
    "a link to itself": (
        TWO + "links:\n- {between: [a, a]}",
        r"line 6: links\[0\].between: must be two different sites, not a twice",
    ),
    "two links of a pair": (
        TWO + "links:\n- {between: [a, b]}\n- {between: [b, a]}",
        r"line 7: links\[1\].between: must be a pair without another link, and links\[0\]",
    ),
    "lost packets": (TWO + "loss: 11%", "line 5: loss: must be at most 10%, not 11%: .* TCP"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_with_a_mistake_is_an_error_with_its_place(name: str, tmp_path: Path) -> None:
    text, message = FILES[name]
    with pytest.raises(ValueError, match=message):
        fields.read(written(tmp_path, text))


def test_json_has_every_field_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cluster.json: step is given twice"):
        fields.read(written(tmp_path, '{"step": 1, "step": 2}', "cluster.json"))


def test_an_alias_to_another_part_is_its_value(tmp_path: Path) -> None:
    text = TWO.replace("rate: 1gbit", "rate: &r 1gbit", 1) + "links:\n- {between: [a, b], rate: *r}"
    assert fields.read(written(tmp_path, text)).links[0].rate == 1e9


def test_a_tenth_of_the_packets_may_be_lost() -> None:
    sites = uniform(2, 1, rate=1e9, latency=0.0)
    assert Cluster(1, sites, loss=0.1).loss == 0.1
    with pytest.raises(ValueError, match="loss must be at most 10%, not 50%"):
        Cluster(1, sites, loss=0.5)


# -- options ----

OPTIONS = {
    "--runs 0": "--runs must be an integer of at least 1",
    "--egress inf": "--egress must be a finite number",
    "--price nan": "--price must be a finite number",
    "--rate 100mbut": "--rate: not a rate",
    "--spread 500%": "--spread: not a share",
    "--parameters x": "--parameters: not a count",
    "--latency x": "--latency: not a latency",
    "--workers 0": "--workers must be an integer of at least 1",
    "--loss 20%": "--loss must be at most 10%",
    "--repair 1h": "--repair has no effect without --mtbf",
    "--checkpoint 5": "--checkpoint has no effect without --mtbf",
    "--plot no/such/plan.svg": "--plot no/such/plan.svg: no such directory",
    "--plot plan.xyz": "--plot must end in one of ",
}


@pytest.mark.parametrize("words", OPTIONS)
def test_errors_name_the_option(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def simulated(*_: Any, **__: Any) -> None:
        raise AssertionError("checked before the simulation")

    monkeypatch.setattr(reports, "runs", simulated)
    assert main([*but(*words.split()), "ddp()"]) == 2
    assert capsys.readouterr().err.startswith(f"laconic: {OPTIONS[words]}")


def test_a_length_that_is_no_count_names_the_forms(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--steps", "x"])
    message = capsys.readouterr().err
    assert "argument --steps: not a count: 'x'; give a positive whole number" in message


TRAINING = {
    "--json": "--train cannot be combined with --json, only with recipes and --steps",
    "--plot a.svg": "--train cannot be combined with --plot",
    "--cluster a.yaml": "--train cannot be combined with --cluster",
    "--curve a.csv": "--train cannot be combined with --curve",
    "--from-metrics a": "--train cannot be combined with --from-metrics",
    "--runs 3": "--train cannot be combined with --runs",
    "--mtbf 1d": "--train cannot be combined with --mtbf",
    "--steps 5": "--steps must be an integer of at least 10",
    "ddp() dilco(3)": "no recipe 'dilco'",
    "ddp() diloco(5,quorum=9)": "quorum must be at most the number of workers, 2, not 9",
    "ddp() hierarchical(4,8)": "hierarchical(4,8) has rounds inside groups",
}


@pytest.mark.parametrize("words", TRAINING)
def test_everything_is_checked_before_a_training(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at_scale, "learn", lambda *_: pytest.fail("trained"))
    assert main(["plan", "--train", "2", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"laconic: {TRAINING[words]}")


def test_at_most_256_workers_are_trained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--train", "257"]) == 2
    assert capsys.readouterr() == ("", "laconic: --train must be at most 256, not 257\n")


# -- measured runs ----


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
    "a call without bytes": (
        lambda: run(calls=[{"seconds": 1.0}]),
        r"run.jsonl, line 2: calls\[0\]: bytes is missing",
    ),
    "calls": (lambda: run(calls=[3]), "line 2: calls must be a list"),
    "text": (lambda: run(seconds="1 s"), "line 2: seconds must be a number from 0 up, not '1 s'"),
    "NaN": (lambda: run(waiting=float("nan")), "line 2: waiting must be a number from 0 up"),
    "no recipe": (lambda: without("recipe"), "run.jsonl does not name the run's recipe: give one"),
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
    line = capsys.readouterr().err
    with pytest.raises(ValueError, match=message):
        raise ValueError(line)


def test_fields_may_be_null(tmp_path: Path) -> None:
    path = written(tmp_path, lines(run(waiting=None, calls=None)), "run.jsonl")
    assert measured.read_records(path).step == pytest.approx(0.5)


def test_an_incomplete_last_line_does_not_count(tmp_path: Path) -> None:
    text = lines(run())
    whole = measured.read_records(written(tmp_path, text, "run.jsonl"))
    cut = text + text.splitlines()[-1][:40]
    assert measured.read_records(written(tmp_path, cut, "run.jsonl")) == whole
    with pytest.raises(ValueError, match="line 21: not a record"):
        measured.read_records(written(tmp_path, cut + "\n", "run.jsonl"))


def test_timelines_of_different_runs_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, lines(run()), "run.jsonl")
    assert main([*SMALL, "--from-metrics", str(path)]) == 0
    out = capsys.readouterr().out
    assert "no timelines: 3 workers were measured, and 4 are planned" in out
    three = [*but("--workers", "3"), "--from-metrics", str(path)]
    assert main([*three, "ddp()"]) == 0
    out = capsys.readouterr().out
    assert "no timelines: local_sgd(8) was measured, and not ddp()" in out
    assert main([*three, "ddp()", "local_sgd(period=8)"]) == 0
    out = capsys.readouterr().out
    assert "no timelines" not in out and "difference" in out


def test_a_measured_rate_includes_what_workers_share(tmp_path: Path) -> None:
    path = written(tmp_path, lines(run()), "run.jsonl")
    sites = uniform(4, 2, rate=1e9, latency=0.0, uplink=1e8)
    cluster = Cluster(1000, sites, links=(Link(("site1", "site2"), 0.01, 1e8),))
    changed, found = measured.calibrated(cluster, path)
    assert [site.uplink for site in changed.sites] == [None, None]
    assert changed.links[0] == Link(("site1", "site2"), 0.01)
    (note,) = found.notes
    assert "the uplinks of sites and the rates of links are left out" in note
    few = written(tmp_path, lines(run(calls=[])), "run.jsonl")
    changed, found = measured.calibrated(cluster, few)
    assert changed.sites[0].uplink == 1e8 and changed.links == cluster.links and not found.notes


def test_the_note_is_among_the_assumptions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, lines(run()), "run.jsonl")
    assert main([*SMALL, "--uplink", "50mbit", "--from-metrics", str(path)]) == 0
    assert "the measured rate, 80 Mbit/s per worker, includes" in capsys.readouterr().out


# -- the cheapest change ----


def test_an_upgrade_is_without_its_price() -> None:
    upgrade = Change("uplinks twice as fast", 0.5, 3.0, False)
    free = Change("diloco(100) instead", 0.25, 4.0, True)

    def text(*changes: Change) -> str:
        return show._help(SimpleNamespace(changes=changes))  # type: ignore[arg-type]

    assert text(upgrade, free) == (
        "Cheapest change that helps: diloco(100) instead, 25% shorter, for 4 in all. Also: uplinks "
        "twice as fast (50%, without the price of the upgrade)."
    )
    assert text(upgrade) == (
        "Change that helps: uplinks twice as fast, 50% shorter, for 3 in all, without the price of "
        "the upgrade."
    )
    assert text(replace(upgrade, money=0.0)) == (
        "Change that helps: uplinks twice as fast, 50% shorter, without the price of the upgrade."
    )
