"""The report on a race, from results made by hand: what is compared, who wins, the table, the page,
the files, and ``laconic report``."""

from __future__ import annotations

import csv
import json
import math
import re
import webbrowser
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from laconic.cli import main
from laconic.lab.race import report
from laconic.lab.race.result import NO_COMMUNICATION, Result, Rounds, Row, Span

from tests.support.races import DDP, DIVERGED, FAILED, FULL, LOCAL, SILENT, rendered, result, row

WRITTEN = {"report.html", "results.json", "results.csv", "rows.csv", "loss.png", "loss.svg"}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")


# -- comparing ----


def test_losses_are_compared_where_the_first_row_ended() -> None:
    assert report.equal_steps(FULL) == {
        NO_COMMUNICATION: pytest.approx(5.5 - 2.5 * 75 / 200),
        "ddp()": 2.45,
        "local_sgd(12)": pytest.approx(2.6),
    }
    times = report.equal_time(FULL)  # half a second late: counted with what it ended with
    assert times == {NO_COMMUNICATION: 2.9, "ddp()": 2.45, "local_sgd(12)": 2.01}
    late = row("late()", (0, 0, 5.5), (10, 20, 3.0), (20, 40, 2.0))
    assert report.equal_time(result(DDP, late))["late()"] == pytest.approx(2.5)
    # the row without communication does not hold back a race over steps
    silent = row(NO_COMMUNICATION, (0, 0, 5.5), (100, 5, 3.0))
    slow = row("ddp()", (0, 0, 5.5), (100, 50, 2.0))
    fast = row("local_sgd(4)", (0, 0, 5.5), (100, 20, 2.5))
    race = result(silent, slow, fast, seconds=None, steps=100)
    assert report.equal_time(race) == {"ddp()": pytest.approx(5.5 - 3.5 * 0.4), "local_sgd(4)": 2.5}
    # nothing is read outside a curve, or through a gap
    late = row("late()", (50, 5, 3.0), (60, 30, 2.0))
    early = row("early()", (0, 0, 5.5), (20, 30, math.nan), (40, 31, 2.0))
    assert report.equal_steps(result(late, early)) == {"early()": 2.0}


def test_json_is_standard_and_keeps_everything() -> None:
    odd = replace(DDP, seconds_per_step=math.nan, interface_bytes_per_step=math.inf)
    race = result(odd, DIVERGED, limit=math.inf, data=Path("a", "b.txt"), nested={1: math.nan})
    written = json.loads(race.to_json(), parse_constant=pytest.fail)
    assert written["rows"][0]["seconds_per_step"] is None
    assert written["rows"][1]["curve"][-1]["loss"] is None
    assert written["settings"]["limit"] is None and written["settings"]["nested"] == {"1": None}
    assert written["settings"]["data"] == str(Path("a", "b.txt"))
    assert Result.from_json(FULL.to_json()) == FULL
    # as written before there were seeds, recordings and other libraries
    fields = json.loads(FULL.to_json())
    for run in fields["rows"]:
        for name in ("timeline", "rounds", "source", "seed", "peer", "worker_steps"):
            del run[name]
        for point in run["curve"]:
            del point["distance"]
    assert Result.from_json(json.dumps(fields)) == FULL


# -- who wins ----


def seeds(*runs: Row) -> tuple[Row, ...]:
    return tuple(replace(run, seed=seed) for seed, run in enumerate(runs))


TWIN = replace(LOCAL, recipe="twin()")
VERDICTS: dict[str, tuple[Result, list[str]]] = {
    "time and steps disagree": (
        result(SILENT, DDP, LOCAL),
        ["In 30 s per recipe on this 100 Mbit/s network, local_sgd(12) reached the lowest",
         "validation loss (2.01), with 3.2 times as many steps as ddp() (2.45)",
         "reached after 11.4 s, 2.6 times as fast. After the same 75 steps ddp() is ahead (2.45"],
    ),
    "ddp wins": (
        result(SILENT, row("ddp()", (0, 0, 5.5), (200, 30, 1.9)), LOCAL, network="throttled"),
        ["on a link throttled to 100 Mbit/s, ddp() reached the lowest validation loss (1.90)",
         "After the same 200 steps it is ahead too (1.90 against 2.13 for local_sgd(12))"],
    ),
    "a race over steps": (
        result(
            row("ddp()", (0, 0, 5.5), (100, 50, 2.0)),
            row("local_sgd(4)", (0, 0, 5.5), (100, 20, 2.5)),
            seconds=None, steps=100,
        ),
        ["After 100 steps per recipe", "at 2.5 times the time per step of local_sgd(4) (2.50)",
         "In the same 20 s local_sgd(4) is ahead (2.50 against 4.10)"],
    ),
    "rows that did not finish": (
        FULL, ["; not counted: easgd(4, beta=3.0) diverged and sgp() failed."]
    ),
    "a tie": (result(LOCAL, TWIN), ["local_sgd(12) and twin() are tied at a validation loss of 2"]),
    "one recipe": (
        result(LOCAL, FAILED),
        ["local_sgd(12) reached a validation loss of 2.01", "no other recipe finished"],
    ),
    "none": (result(SILENT, FAILED), ["No recipe finished on this 100 Mbit/s network"]),
    "ddp rather than the next best": (
        result(LOCAL, row("sgp()", (0, 0, 5.5), (100, 30, 2.2)), replace(DDP, recipe="ddp")),
        ["as many steps as ddp (2.45)"],
    ),
    "less than the spread": (
        result(
            *seeds(*(row("ddp()", (0, 0, 5.0), (100, 30, x)) for x in (2.3, 2.4))),
            *seeds(*(row("local_sgd(12)", (0, 0, 5.0), (100, 30, x)) for x in (2.3, 2.5))),
        ),
        ["ddp() and local_sgd(12) are tied at a validation loss of 2.35",
         "These are means of 2 runs; recipes that differ by less than the spread"],
    ),
    "more than the spread": (
        result(
            *seeds(*(row("ddp()", (0, 0, 5.0), (100, 30, x)) for x in (2.3, 2.4))),
            *seeds(*(row("local_sgd(12)", (0, 0, 5.0), (100, 30, x)) for x in (2.8, 2.9))),
        ),
        ["ddp() reached the lowest validation loss (2.35)"],
    ),
    "a run of two that diverged": (
        result(DDP, LOCAL, *seeds(row("wild", (0, 0, 5.0), (9, 9, 1.0)),
                                  row("wild", status="diverged"))),
        ["local_sgd(12) reached the lowest", "not counted: wild diverged"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict(name: str) -> None:
    race, phrases = VERDICTS[name]
    said = report.verdict(race)
    assert all(phrase in said for phrase in phrases), said


# -- the table ----


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_shows_the_figures_at_every_width(width: int) -> None:
    text = rendered(FULL, width)
    assert max(map(len, text.splitlines())) <= width
    for name, figures in (
        ("ddp()", ["0.400", "4.00", "75", "2.45", "2.45", "2.00", "25%"]),
        ("local_sgd(12)", ["0.127", "1.27", "240", "2.01", "2.60", "2.00", "25%"]),
    ):
        (line,) = (line for line in text.splitlines() if line.startswith(f"{name} "))
        assert line.split()[1:] == figures
    words = " ".join(text.split())
    assert "4 hosts × 1 process, 100 Mbit/s, emulated with network namespaces" in words
    assert "easgd(4, beta=3.0): diverged: the loss is not finite at step 20" in words
    assert "sgp(): failed: worker 2 did not answer" in words and "Traceback" not in words


def test_the_table_tells_notes_networks_peers_and_spreads() -> None:
    peer = row(
        "torch-ddp", (0, 0, 5.0), (100, 30, 2.0), peer=True, interface_bytes_per_step=3.21e6,
        ledger_bytes_per_step=math.nan, waiting=math.nan, notes=("a [red] note",),
    )  # fmt: skip
    runs = seeds(*(row("ddp()", (0, 0, 5.0), (100, 30, x)) for x in (2.3, 2.5)))
    network = {"latency": 0.08, "host_latency": {"2": 0.2}, "loss": 0.001, "jitter": 0.01}
    text = rendered(result(SILENT, *runs, peer, seeds=[0, 1], network="throttled", **network))
    assert re.search(r"^torch-ddp‡ .*\b3\.21 +– *$", text, re.MULTILINE)
    assert "torch-ddp: a [red] note" in text, "markup is text"
    assert re.search(r"^ddp\(\) .*\b2\.40\b", text, re.MULTILINE) and "±0.14" in text
    words = " ".join(text.split())
    assert "80 ms latency, host 2: 200 ms latency, 10 ms jitter, 0.1% loss" in words
    assert "throttled link: this system does not allow network namespaces" in words
    assert "1 to 2 runs each, seeds 0, 1" in words


FLAT = row("flat()", (0, 0, 2.0), (1, 1, 2.0)), row("x()", (0, 0, 1e9), (9, 9, 0.01))
ODD: list[tuple[Row, ...]] = [(), (FAILED,), FLAT]


@pytest.mark.parametrize("rows", ODD)
@pytest.mark.filterwarnings("error")
def test_any_result_has_a_report(rows: tuple[Row, ...], tmp_path: Path) -> None:
    race = result(*rows)
    assert rendered(race, 80) and rendered(replace(race, settings={}), 100)
    paths = report.write(race, tmp_path / "new" / "place")
    assert {path.name for path in paths} == WRITTEN
    assert report.read(tmp_path / "new" / "place") == race
    assert Parsed((tmp_path / "new/place/report.html").read_text()).embedded()


# -- the page ----

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Parsed(HTMLParser):
    """What a browser would see: the texts by tag, attributes, ids, and whether tags match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.attributes: list[tuple[str, str, str]] = []
        self.data, self._embedded = "", False
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        self._embedded = dict(attrs).get("id") == "data"
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._embedded = False

    def handle_data(self, data: str) -> None:
        if self._embedded:
            self.data += data
        if self.open:
            self.texts[self.open[-1]][-1] += data

    def embedded(self) -> dict[str, Any]:
        found = json.loads(self.data, parse_constant=pytest.fail)
        assert isinstance(found, dict)
        return found


def test_the_page_says_what_the_terminal_says_and_needs_nothing_else() -> None:
    spans: tuple[Span, ...] = ((0.0, 0.4, "compute"), (0.4, 1.0, "wait"), (0.41, 0.93, "send"))
    odd = row("</script><b>&{{data}}</b>", (0, 0, 3.0), (9, 9, 2.0), notes=("<i>a note</i>",))
    recorded = replace(DDP, timeline=(spans, spans), rounds=(Rounds(1, 75, 1, 2_000_000),))
    race = replace(
        result(SILENT, recorded, LOCAL, FAILED, odd, row("mine(3)")),
        command="laconic compare '<script>'",
    )
    html = report.write(race, Path("out"))[0].read_text()
    seen = Parsed(html)
    data = seen.embedded()
    assert data["result"] == json.loads(race.to_json())
    for curve, run in zip(data["curves"], race.rows, strict=True):
        assert curve["name"] == run.recipe
        assert curve["points"] == [
            [p.step, p.seconds, p.megabytes, p.loss, p.loss, p.loss, p.distance] for p in run.curve
        ]
    assert seen.texts["h1"] == seen.texts["title"]
    assert " ".join(seen.texts["p"][:2]) == report.verdict(race)
    assert seen.texts["pre"] == ["laconic compare '<script>'"]
    # names are text and never markup
    assert "b" not in seen.texts and html.count("</script>") == 2
    assert "</script><b>&{{data}}</b>: <i>a note</i>" in seen.texts["p"]
    # nothing from elsewhere, and every place that the script fills is there
    for tag, key, value in seen.attributes:
        assert key not in ("src", "action", "srcset"), (tag, key, value)
        assert key != "href" or value == "data:,"
    assert set(re.findall(r"\w+://[^\s\"')]+", html)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in html and "fetch(" not in html
    ids = [value for _, key, value in seen.attributes if key == "id"]
    assert len(set(ids)) == len(ids)
    assert set(re.findall(r'byId\("([\w-]+)"\)', html)) <= set(ids)
    # the answer comes first, and details are folded
    places = [html.index(text) for text in ("<h1>", 'class="answer"', "<table>", "<details")]
    assert places == sorted(places) and "<details open" not in html
    assert "Average gradients over all ranks during every backward pass." in html


# -- the command ----


def kept(shown: Result, name: str) -> Path:
    return report.save(shown, Path(name)).parent


def told(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command prints, as if on one long line."""
    assert main(["report", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return " ".join(captured.out.split())


def test_a_report_is_made_anew_shown_as_json_and_opened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    again = replace(DDP, seed=1, seconds_per_step=DDP.seconds_per_step + 0.2)
    race = result(SILENT, replace(DDP, recipe="odd(1, 2)"), LOCAL, FAILED, DDP, again)
    directory = kept(race, "run")
    text = told("run", capsys=capsys)
    assert report.verdict(race) in text and report.read(directory) == race
    assert {path.name for path in directory.iterdir()} == WRITTEN
    assert all(f"run/{name}" in text for name in WRITTEN)
    with Path("run/results.csv").open(newline="") as file:
        points = list(csv.DictReader(file))
    assert len(points) == sum(len(run.curve) for run in race.rows)
    assert (points[3]["recipe"], points[3]["distance"]) == ("odd(1, 2)", "")
    with Path("run/rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[2]["loss_at_equal_steps"]) == pytest.approx(2.6)
    assert rows[3]["error"] == FAILED.error and rows[3]["loss_at_equal_time"] == ""
    opened: list[str] = []

    def opening(url: str) -> bool:
        opened.append(url)
        return True

    monkeypatch.setattr(webbrowser, "open", opening)
    found = json.loads(told("run", "--open", "--json", capsys=capsys), parse_constant=pytest.fail)
    assert opened == [Path("run/report.html").resolve().as_uri()]
    assert " ".join(found["answer"]) == report.verdict(race)
    assert (found["equal_time"], found["equal_steps"], found["runs_left"]) == (30.0, 75, 0)
    assert found["rows"][3]["status"] == "failed" and found["rows"][3]["loss_at_equal_time"] is None
    assert found["rows"][4]["runs"] == 2
    spread = found["rows"][4]["spread"]["seconds_per_step"]
    assert spread == pytest.approx(0.2 / 2**0.5)
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    assert main(["report", "run", "--open"]) == 2
    assert "laconic: no browser " in capsys.readouterr().err


def test_reports_are_joined_and_say_where_they_differ(capsys: pytest.CaptureFixture[str]) -> None:
    kept(result(SILENT, DDP), "monday/run")
    slow = row("ddp()", (0, 0, 5.5), (10, 15, 4.0), (20, 30, 3.5))
    other = replace(result(SILENT, slow, LOCAL, bandwidth=1e7), machine={"cpu": "eight cores"})
    kept(other, "tuesday/run")
    text = told("monday/run", "tuesday/run", capsys=capsys)
    joined = report.read(Path("laconic-report"))
    assert [run.name for run in joined.rows][:4] == [
        f"{NO_COMMUNICATION} [monday/run]", "ddp() [monday/run]",
        f"{NO_COMMUNICATION} [tuesday/run]", "ddp() [tuesday/run]",
    ]  # fmt: skip
    assert [run.curve for run in joined.rows] == [r.curve for r in (SILENT, DDP, *other.rows)]
    assert "bandwidth" not in joined.settings and joined.settings["hosts"] == 4
    assert "[monday/run]: bandwidth 100 Mbit/s" in text
    assert "ddp() [tuesday/run] 1.50 15.0 20 3.50" in text, (
        "against its own row of no communication"
    )
    assert "local_sgd(12) [tuesday/run] reached the lowest" in text
    assert joined.machine == {"cpu": "[monday/run] two cores; [tuesday/run] eight cores"}
    # runs of different length are compared where the first ended
    kept(result(SILENT, row("sgp()", (0, 0, 5.5), (30, 10, 2.0)), seconds=10.0), "short")
    text = told("monday/run", "short", capsys=capsys)
    assert "In 10 s per recipe on this 100 Mbit/s network, sgp() [short] reached" in text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nowhere", "cannot read a result from nowhere"),
        ("empty", "cannot read a result from empty/results.json"),
        ("broken", "not the result of a race"),
        ("run ./other/../run", "is given twice"),
        ("run other --out run", "run contains one of the results to combine"),
        ("run --out file", "file"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(FULL, "run")
    kept(result(DDP), "other")
    for name in ("empty", "broken"):
        Path(name).mkdir()
    Path("broken/results.json").write_text('{"rows": 3}')
    Path("file").write_text("abc")
    before = sorted(tmp_path.rglob("*"))
    assert main(["report", *line.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("laconic: ") and said in captured.err
    assert sorted(tmp_path.rglob("*")) == before
