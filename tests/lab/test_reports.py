"""The report on a race, from results made by hand: what is compared, who wins, the table, the page,
the files, and ``laconic report``."""

from __future__ import annotations

import html
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from laconic.cli import compare, main
from laconic.lab.race import report, table
from laconic.lab.race.comparison import groups, losses
from laconic.lab.race.result import NO_COMMUNICATION, SECONDS, STEPS, Result, Row

from tests.support.races import DDP, DIVERGED, FAILED, FULL, LOCAL, SILENT, rendered, result, row

WRITTEN = {"report.html", "results.json", "loss.svg"}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")


def test_losses_are_compared_where_the_first_row_ended() -> None:
    assert losses(FULL, STEPS) == {
        NO_COMMUNICATION: pytest.approx(5.5 - 2.5 * 75 / 200),
        "ddp()": 2.45,
        "local_sgd(12)": pytest.approx(2.6),
    }
    times = losses(FULL, SECONDS)  # half a second late: counted with what it ended with
    assert times == {NO_COMMUNICATION: 2.9, "ddp()": 2.45, "local_sgd(12)": 2.01}
    # the row without communication does not hold back a race over steps
    silent = row(NO_COMMUNICATION, (0, 0, 5.5), (100, 5, 3.0))
    slow = row("ddp()", (0, 0, 5.5), (100, 50, 2.0))
    fast = row("local_sgd(4)", (0, 0, 5.5), (100, 20, 2.5))
    race = result(silent, slow, fast, seconds=None, steps=100)
    assert losses(race, SECONDS) == {"ddp()": pytest.approx(5.5 - 3.5 * 0.4), "local_sgd(4)": 2.5}


def test_json_is_standard_and_keeps_everything() -> None:
    odd = replace(DDP, seconds_per_step=math.nan, interface_bytes_per_step=math.inf)
    race = result(odd, DIVERGED, limit=math.inf, data=Path("a", "b.txt"), nested={1: math.nan})
    written = json.loads(race.to_json(), parse_constant=pytest.fail)
    assert written["rows"][0]["seconds_per_step"] is None
    assert written["rows"][1]["curve"][-1]["loss"] is None
    assert written["settings"]["limit"] is None and written["settings"]["nested"] == {"1": None}
    assert written["settings"]["data"] == str(Path("a", "b.txt"))
    assert Result.from_json(FULL.to_json()) == FULL


def test_a_table_loses_nothing_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    compare.show(FULL, Path("out"))
    found = capsys.readouterr().out.split()
    assert {word for word in rendered(FULL).split() if word[0] != "─"} <= set(found)


# -- who wins ----


def runs(name: str, *losses: float) -> tuple[Row, ...]:
    """With one seed after another."""
    made = [row(name, (0, 0, 5.0), (100, 30, loss)) for loss in losses]
    return tuple(replace(run, seed=seed) for seed, run in enumerate(made))


LAST = (240, 30, 2.0)
NOTE = ("after step 4: a step computes: outer_step(ddp(), 4, outer='muon') takes 90 ms per step",)

VERDICTS: dict[str, tuple[Result, list[str]]] = {
    "time and steps disagree": (
        result(row(NO_COMMUNICATION, (0, 0, 5.5), (300, 30, 1.9)), DDP, LOCAL),
        ["In 30 s per recipe on this 100 Mbit/s network, local_sgd(12) reached the lowest",
         "validation loss, 2.01; ddp() reached 2.45, which local_sgd(12) had after 11.4 s, 2.6",
         " Workers that never communicate are at 1.90: so early in training"],
    ),
    "a first validation below the others' last one": (
        result(row("ddp()", (0, 0, 5.5), (75, 30, 4.0)), row("local_sgd(4)", (9, 3, 3.9), LAST)),
        ["ddp() reached 4.00, which local_sgd(4) had after 3 s, 10.0 times as fast."],
    ),
    "the winner has an outer step": (
        result(DDP, row("diloco(4)", (0, 0, 5.5), LAST)),
        ["times as fast. Part of that may be due to the outer step of diloco(4), a second"],
    ),
    "auto() has chosen one": (
        result(
            row("peer", (0, 0, 5.5), (9, 30, 3.0)), row("auto()", (0, 0, 5.5), LAST, notes=NOTE)
        ),
        ["peer reached 3.00, which", "Part of that may be due to the outer step of auto()"],
    ),
    "both have one": (
        result(row("slowmo(ddp(), 8)", (0, 0, 5.5), (9, 30, 3.0)), row("diloco(4)", LAST)),
        ["slowmo(ddp(), 8) reached 3.00."],
    ),
    "neither has one": (result(DDP, row("easgd(4)", LAST)), ["ddp() reached 2.45."]),
    "one of the winners has none": (
        result(DDP, row("easgd(4)", LAST), row("diloco(4)", LAST)), ["ddp() reached 2.45."],
    ),
    "worse than at the beginning": (
        result(row("ddp()", (0, 0, 5.5), (75, 30, 5.6)), row("easgd(4)", (0, 0, 5.5), LAST)),
        ["ddp() reached 5.60."],
    ),
    "a race over steps": (
        result(
            row("ddp()", (0, 0, 5.5), (100, 50, 2.0)),
            row("local_sgd(4)", (0, 0, 5.5), (100, 20, 2.5)),
            seconds=None, steps=100,
        ),
        ["After 100 steps per recipe on this 100", "loss, 2.00; local_sgd(4) reached 2.50."],
    ),
    "rows that did not finish": (
        FULL, [" Not counted: easgd(4, beta=3.0) diverged and sgp() failed."]
    ),
    "a tie": (
        result(LOCAL, replace(LOCAL, recipe="b"), row("a(), free network", (0, 0, 5), (9, 30, 2))),
        ["local_sgd(12) and b are tied at the lowest", "a() is at 2.00: local_sgd(12) is 0.5% ab"]
    ),
    "alone beside a free network": (
        result(LOCAL, row("a(), free network", (0, 0, 5), (9, 30, 2))), ["0.5% above that."]
    ),
    "less than the spread": (
        result(*runs("ddp()", 2.3, 2.4), *runs("local_sgd(12)", 2.3, 2.5)),
        ["ddp() and local_sgd(12) are tied at the lowest validation loss, 2.35."],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict(name: str) -> None:
    race, phrases = VERDICTS[name]
    said = report.verdict(race)
    assert all(phrase in said for phrase in phrases), said
    assert ("Part of that" in said) == ("Part of that" in " ".join(phrases)), said


def test_runs_of_one_recipe_have_a_mean_curve_and_a_band() -> None:
    """The second is half as long, and is read at the same fractions of its length."""
    long = row("a()", (0, 0, 6.0), (50, 10, 4.0), (100, 20, 2.0))
    short = replace(row("a()", (0, 0, 4.0), (50, 10, 3.0)), seed=1)
    failed = replace(row("a()", status="failed"), seed=2)
    (group,) = groups(result(long, short, failed))
    points = [(point.step, point.seconds, point.loss) for point in group.curve]
    assert points == [(0, 0.0, 5.0), (38, 7.5, 3.75), (75, 15.0, 2.5)]
    assert group.low == (4.0, 3.5, 2.0) and group.high == (6.0, 4.0, 3.0)
    assert group.status == "failed" and group.lost == [failed]


# -- the table ----


def test_the_table_shows_figures_notes_networks_peers_and_spreads() -> None:
    text = rendered(FULL, 80)
    assert max(map(len, text.splitlines())) <= 80
    (line,) = (line for line in text.splitlines() if line.startswith("ddp() "))
    assert line.split()[1:] == ["2.45", "30.0", "75", "2.45", "0.400", "2.00", "25%"]
    names = [group.name for group in table.rows(FULL)]
    order = [LOCAL, DDP, DIVERGED, FAILED, SILENT]
    assert names == [row.recipe for row in order], "the best first, those for reference last"
    words = " ".join(text.split())
    assert "4 hosts, 100 Mbit/s each, emulated" in words
    assert "diverged: the loss is not finite at step 20" in words
    assert "sgp(): failed: worker 2 did not answer" in words and "Traceback" not in words
    peer = row(
        "torch-ddp", (0, 0, 5.0), (100, 30, 2.0), peer=True, interface_bytes_per_step=3.21e6,
        ledger_bytes_per_step=math.nan, waiting=math.nan, notes=("a [red] note",),
    )  # fmt: skip
    text = rendered(result(SILENT, *runs("ddp()", 2.3, 2.5), peer, latency=0.08, loss=0.001))
    assert re.search(r"^torch-ddp‡ .*\b3\.21 +– *$", text, re.MULTILINE)
    assert "torch-ddp: a [red] note" in text, "markup is text"
    assert re.search(r"^ddp\(\) .*\b2\.40\b", text, re.MULTILINE) and "±0.14" in text
    assert "80 ms latency, 0.1% loss" in " ".join(text.split())


@pytest.mark.filterwarnings("error")
def test_any_result_has_a_report(tmp_path: Path) -> None:
    assert rendered(result(), 80) and rendered(replace(result(), settings={}), 100)
    odd = result(FAILED, row("flat()", (0, 0, 2.0), (1, 1, 2.0)), row("x()", (0, 0, 1e9)))
    paths = report.write(odd, tmp_path / "new" / "place")
    assert {path.name for path in paths} == WRITTEN
    assert report.read(tmp_path / "new" / "place") == odd


# -- the page ----


def test_the_page_says_what_the_terminal_says_and_needs_nothing_else() -> None:
    odd = row("</script><b>&{{data}}</b>", (0, 0, 3.0), (9, 9, 2.0), notes=("<i>a note</i>",))
    race = result(SILENT, DDP, LOCAL, FAILED, odd, row("mine(3)"))
    race = replace(race, command="laconic compare '<script>'")
    page = report.write(race, Path("out"))[0].read_text()
    text = html.unescape(re.sub("<[^>]*>", " ", page))
    assert report.verdict(race) in " ".join(text.split())
    # names are text and never markup
    assert "<b>" not in page and "<i>" not in page and "</script>" not in page
    assert "laconic compare '<script>'" in text and "&{{data}}</b>: <i>a note</i>" in text
    # nothing from elsewhere
    assert not re.search(r'<[^>]* (src|action|srcset)=|href="(?!data:,)|@import|url\(', page)
    assert {*re.findall(r"\w+://[^\s\"')]+", page)} == {"http://www.w3.org/2000/svg"}
    # by time, by traffic, by steps
    charts = [*map(ElementTree.fromstring, re.findall("<figure>(.*?)</figure>", page, re.S))]
    assert len(charts) == 3
    for chart in charts:
        (plot,) = chart.findall(f"{SVG}svg")
        lines = [str(path.get("d")) for path in plot if path.get("fill") == "none"]
        longest = max(float(line.rpartition("L")[2].partition(",")[0]) for line in lines)
        assert LOCAL.recipe in [*chart.itertext()] and longest == float(str(plot.get("width")))


# -- the command ----


def told(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command prints, as if on one long line."""
    assert main(["report", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return " ".join(captured.out.split())


def test_a_report_is_made_anew_and_shown_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    again = replace(DDP, seed=1, seconds_per_step=DDP.seconds_per_step + 0.2)
    race = result(SILENT, replace(DDP, recipe="odd(1, 2)"), LOCAL, FAILED, DDP, again)
    report.save(race, Path("run"))
    assert report.verdict(race) in told("run", capsys=capsys)
    assert report.read(Path("run")) == race
    assert {path.name for path in Path("run").iterdir()} == WRITTEN
    found = json.loads(told("run", "--json", capsys=capsys), parse_constant=pytest.fail)
    assert " ".join(found["answer"]) == report.verdict(race)
    assert (found["equal_time"], found["equal_steps"]) == (30.0, 75)
    rows = {made["recipe"]: made for made in found["rows"]}
    assert rows["sgp()"]["status"] == "failed" and rows["sgp()"]["loss_at_equal_time"] is None
    assert rows["local_sgd(12)"]["seconds_to_ddp"] == pytest.approx(11.4, rel=0.01)
    spread = rows["ddp()"]["spread"]["seconds_per_step"]
    assert rows["ddp()"]["runs"] == 2 and spread == pytest.approx(0.2 / 2**0.5)
