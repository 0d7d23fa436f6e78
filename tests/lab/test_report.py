"""The report on a race: figures, words, pictures and JSON from results made by hand."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console

from laconic.lab.emulation.impairments import Impairments
from laconic.lab.race import report, wording
from laconic.lab.race.plots import limit_loss
from laconic.lab.race.report import NO_COMMUNICATION, Point, Result, Row


def curve(*points: tuple[int, float, float]) -> tuple[Point, ...]:
    """Points from (step, seconds, loss), 2 MB sent per step."""
    return tuple(Point(step, seconds, 2.0 * step, loss) for step, seconds, loss in points)


def row(
    recipe: str,
    *points: tuple[int, float, float],
    status: Literal["ok", "diverged", "failed"] = "ok",
    error: str | None = None,
    megabytes: float = 2.0,
    notes: tuple[str, ...] = (),
) -> Row:
    steps, seconds, loss = points[-1] if points else (0, 0.0, math.nan)
    return Row(
        recipe=recipe,
        status=status,
        error=error,
        steps=steps,
        seconds=seconds,
        seconds_per_step=seconds / steps if steps else 0.0,
        loss=loss,
        ledger_bytes_per_step=megabytes * 1e6,
        interface_bytes_per_step=megabytes * 1.05e6,
        waiting=0.25,
        curve=curve(*points),
        notes=notes,
    )


SILENT = row(NO_COMMUNICATION, (0, 0, 5.5), (200, 20, 3.0), (300, 30, 2.9), megabytes=0.0)
DDP = row("ddp()", (0, 0, 5.5), (40, 16, 3.0), (75, 30, 2.45))
LOCAL = row("local_sgd(12)", (0, 0, 5.5), (70, 8, 2.7), (80, 9.2, 2.5), (240, 30.5, 2.01))
DIVERGED = row(
    "easgd(4, beta=3.0)",
    (0, 0, 5.5),
    (10, 1, 90.0),
    (20, 2, math.inf),
    status="diverged",
    error="the loss is not finite at step 20\nTraceback of no interest",
)
FAILED = row("sgp()", status="failed", error="worker 2 did not answer within 20 s in round 3")


def result(*rows: Row, **settings: object) -> Result:
    return Result(
        rows=rows,
        settings={
            "workload": "text",
            "parameters": 865280,
            "hosts": 4,
            "per_host": 1,
            "bandwidth": 1e8,
            "latency": 0.0,
            "seconds": 30.0,
            "steps": None,
            "seed": 0,
            "network": "emulated",
            "data": None,
            **settings,
        },
        machine={"cpu": "two cores"},
        versions={"torch": "2"},
        command="laconic race",
    )


FULL = result(SILENT, DDP, LOCAL, DIVERGED, FAILED)


def rendered(shown: Result, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(report.table(shown))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# --- comparing ------------------------------------------------------------------------------------


def test_equal_steps_interpolates_at_the_last_step_all_reached() -> None:
    losses = report.equal_steps(FULL)
    assert losses == {
        NO_COMMUNICATION: pytest.approx(5.5 - 2.5 * 75 / 200),
        "ddp()": 2.45,
        "local_sgd(12)": pytest.approx(2.6),
    }


def test_equal_time_interpolates_where_the_first_row_ended() -> None:
    losses = report.equal_time(FULL)
    assert losses["ddp()"] == 2.45
    assert losses[NO_COMMUNICATION] == 2.9
    assert losses["local_sgd(12)"] == 2.01  # half a second late: counted with what it ended with
    late = row("late()", (0, 0, 5.5), (10, 20, 3.0), (20, 40, 2.0))
    assert report.equal_time(result(DDP, late))["late()"] == pytest.approx(2.5)


def test_the_silent_row_does_not_hold_back_a_race_over_steps() -> None:
    silent = row(NO_COMMUNICATION, (0, 0, 5.5), (100, 5, 3.0))
    slow = row("ddp()", (0, 0, 5.5), (100, 50, 2.0))
    fast = row("local_sgd(4)", (0, 0, 5.5), (100, 20, 2.5))
    race = result(silent, slow, fast, seconds=None, steps=100)
    assert report.equal_time(race) == {"ddp()": pytest.approx(5.5 - 3.5 * 0.4), "local_sgd(4)": 2.5}
    assert report.equal_steps(race) == {NO_COMMUNICATION: 3.0, "ddp()": 2.0, "local_sgd(4)": 2.5}


def test_nothing_is_read_outside_a_curve_or_through_a_gap() -> None:
    late = row("late()", (50, 5, 3.0), (60, 30, 2.0))
    early = row("early()", (0, 0, 5.5), (20, 30, math.nan), (40, 31, 2.0))
    assert report.equal_steps(result(late, early)) == {"early()": 2.0}
    halfway = row("half()", (0, 0, 5.5), (20, 30, 1.0))
    assert report.equal_steps(result(halfway, early))["early()"] == pytest.approx(3.75)


@pytest.mark.parametrize("rows", [(), (FAILED,), (DIVERGED, FAILED), (row("empty()"),)])
def test_no_row_that_finished_is_no_comparison(rows: tuple[Row, ...]) -> None:
    assert report.equal_steps(result(*rows)) == {}
    assert report.equal_time(result(*rows)) == {}


# --- JSON -----------------------------------------------------------------------------------------


def test_json_round_trips_exactly() -> None:
    text = FULL.to_json()
    assert Result.from_json(text) == FULL
    assert Result.from_json(text).to_json() == text


def test_json_has_null_where_a_figure_is_not_finite() -> None:
    odd = replace(DDP, seconds_per_step=math.nan, interface_bytes_per_step=math.inf)
    written = json.loads(
        result(odd, DIVERGED, limit=math.inf).to_json(), parse_constant=pytest.fail
    )
    assert written["rows"][0]["seconds_per_step"] is None
    assert written["rows"][1]["curve"][-1]["loss"] is None
    assert written["settings"]["limit"] is None
    again = Result.from_json(json.dumps(written))
    assert math.isnan(again.rows[0].seconds_per_step)
    assert again.rows[0].interface_bytes_per_step is None


def test_settings_become_what_json_can_hold() -> None:
    race = result(DDP, data=Path("a", "b.txt"), recipes=("x", 1, True), nested={1: math.nan})
    assert race.settings["recipes"] == ["x", 1, True]
    assert race.settings["data"] == str(Path("a", "b.txt"))
    assert race.settings["nested"] == {"1": None}
    assert Result.from_json(race.to_json()) == race


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": []}', '{"rows": [{"recipe": "x"}]}'])
def test_json_of_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not the result of a race"):
        Result.from_json(text)


def test_write_and_read(tmp_path: Path) -> None:
    paths = report.write(FULL, tmp_path / "new" / "place")
    assert [path.name for path in paths] == [
        "report.html", "results.json", "results.csv", "rows.csv", "loss.png", "loss.svg",
    ]  # fmt: skip
    assert report.read(paths[1]) == report.read(paths[1].parent) == FULL
    with pytest.raises(ValueError, match="cannot read a result"):
        report.read(tmp_path / "nowhere.json")


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 100, 140])
def test_table_shows_the_figures_at_every_width(width: int) -> None:
    text = rendered(FULL, width)
    assert max(map(len, text.splitlines())) <= width
    ddp = next(each for each in text.splitlines() if each.startswith("ddp()"))
    assert ddp.split() == ["ddp()", "0.400", "4.00", "75", "2.45", "2.45", "2.00", "25%"]
    local = next(each for each in text.splitlines() if each.startswith("local_sgd(12)"))
    assert local.split() == ["local_sgd(12)", "0.127", "1.27", "240", "2.01", "2.60", "2.00", "25%"]
    words = " ".join(text.split())
    assert "4 hosts × 1 process, 100 Mbit/s, emulated with network namespaces" in words
    assert "865,280 parameters" in words
    assert "loss at" in words
    assert "step 75" in words
    assert "30 s" in words
    assert "mean of the workers' own models" in words
    assert "1.05 times" in words


def test_table_says_why_a_row_has_no_result() -> None:
    lines = [each.rstrip() for each in rendered(FULL, 140).splitlines()]
    assert "easgd(4, beta=3.0): diverged: the loss is not finite at step 20" in lines
    assert "sgp(): failed: worker 2 did not answer within 20 s in round 3" in lines
    failed = next(each for each in lines if each.startswith("sgp() "))
    assert failed.split() == ["sgp()", "–", "–", "0", "failed", "–", "–", "–"]


def test_table_says_that_a_link_was_throttled() -> None:
    text = " ".join(rendered(result(DDP, network="throttled", latency=0.005), 100).split())
    assert "5 ms latency, throttled link: this system does not allow network namespaces" in text


def test_table_describes_the_network() -> None:
    impaired = Impairments(0.08, 0.01, 0.001, host_latency={2: 0.2}, host_loss={3: 0.05})
    text = " ".join(rendered(result(DDP, bandwidth=5e7, **impaired.document()), 200).split())
    assert "50 Mbit/s, 80 ms latency, host 2: 200 ms latency, 10 ms jitter, 0.1% loss" in text
    assert "0.1% loss, host 3: 5% loss, emulated with network namespaces" in text
    combined = result(DDP, runs={"a": {"loss": 0.001, "host_loss": {"1": 0.05}, "jitter": 0.002}})
    assert wording.differences(combined) == ["[a]: loss 0.1%, host loss 5% of host 1, jitter 2 ms"]


def test_table_shows_notes_and_takes_markup_for_text() -> None:
    text = rendered(result(row("odd([bold])", (0, 0, 3), (9, 9, 2), notes=("a [red] note",))), 100)
    assert "odd([bold]): a [red] note" in text


def test_best_figures_are_bold_and_the_silent_row_never_competes() -> None:
    assert not _bold(result(SILENT, DDP))  # nothing to be best of
    assert [each.style for each in report.table(FULL).rows] == ["dim", None, None, None, None]
    assert _bold(FULL) == {
        *(("local_sgd(12)", column) for column in (1, 2, 3, 4, 6, 7)),
        *(("ddp()", column) for column in (5, 6, 7)),
    }


def _bold(shown: Result) -> set[tuple[str, int]]:
    table = report.table(shown)
    return {
        (str(name), index)
        for index, column in enumerate(table.columns)
        for name, cell in zip(table.columns[0].cells, column.cells, strict=True)
        if "bold" in str(getattr(cell, "style", ""))
    }


@pytest.mark.parametrize(
    "rows",
    [(), (DDP,), (SILENT,), (FAILED,), (row("empty()"),), (replace(DDP, waiting=math.nan),)],
)
@pytest.mark.parametrize("width", [80, 100, 140])
def test_table_takes_any_result(rows: tuple[Row, ...], width: int) -> None:
    race = result(*rows)
    assert rendered(race, width)
    assert rendered(replace(race, settings={}), width)


# --- the sentence ---------------------------------------------------------------------------------


def test_verdict_when_time_and_steps_disagree() -> None:
    assert report.verdict(result(SILENT, DDP, LOCAL)) == (
        "In 30 s per recipe on this 100 Mbit/s network, local_sgd(12) reached the lowest "
        "validation loss (2.01), with 3.2 times as many steps as ddp() (2.45), a loss that it "
        "reached after 11.4 s, 2.6 times as fast. After the same 75 steps ddp() is ahead (2.45 "
        "against 2.60); both send 2.00 MB per host and step."
    )


def test_verdict_when_ddp_wins() -> None:
    ahead = row("ddp()", (0, 0, 5.5), (200, 30, 1.9))
    assert report.verdict(result(SILENT, ahead, LOCAL, network="throttled")) == (
        "In 30 s per recipe on a link throttled to 100 Mbit/s, ddp() reached the lowest validation "
        "loss (1.90), in 200 steps against the 240 of local_sgd(12) (2.01). After the same "
        "200 steps it is ahead too (1.90 against 2.13 for local_sgd(12)); both send 2.00 MB per "
        "host and step."
    )


def test_verdict_of_a_race_over_steps() -> None:
    slow = row("ddp()", (0, 0, 5.5), (100, 50, 2.0))
    fast = row("local_sgd(4)", (0, 0, 5.5), (100, 20, 2.5))
    assert report.verdict(result(slow, fast, seconds=None, steps=100, bandwidth=None)) == (
        "After 100 steps per recipe, ddp() reached the lowest validation loss (2.00), at 2.5 times "
        "the time per step of local_sgd(4) (2.50). In the same 20 s local_sgd(4) is ahead "
        "(2.50 against 4.10); both send 2.00 MB per host and step."
    )


def test_verdict_leaves_out_what_did_not_finish() -> None:
    sentence = report.verdict(FULL)
    assert sentence.startswith(report.verdict(result(SILENT, DDP, LOCAL))[:-1])
    assert sentence.endswith("; not counted: easgd(4, beta=3.0) diverged and sgp() failed.")


def test_verdict_of_losses_that_are_level() -> None:
    twin = replace(LOCAL, recipe="twin()")
    third = replace(LOCAL, recipe="third()")
    assert report.verdict(result(LOCAL, twin)) == (
        "In 30 s per recipe on this 100 Mbit/s network, local_sgd(12) and twin() are tied at a "
        "validation loss of 2.01. After the same 240 steps both are tied (2.01)."
    )
    assert "all are tied" in report.verdict(result(LOCAL, twin, third))
    shared = report.verdict(result(LOCAL, twin, DDP))
    assert "local_sgd(12) and twin() share the lowest validation loss (2.01) ahead of" in shared
    assert "After the same 75 steps ddp() is ahead (2.45 against 2.60)" in shared
    late = row("late()", (0, 0, 5.5), (75, 20, 2.45), (90, 30, 2.3))
    assert "ddp() and late() share the lead (2.45)" in report.verdict(result(DDP, late, LOCAL))


def test_verdict_of_one_recipe_and_of_none() -> None:
    alone = "local_sgd(12) reached a validation loss of 2.01 in 240 steps and 30.5 s"
    assert report.verdict(result(LOCAL)).startswith(alone)
    assert "no other recipe finished to compare it with" in report.verdict(result(LOCAL, FAILED))
    assert report.verdict(result(SILENT, FAILED)) == (
        "No recipe finished on this 100 Mbit/s network: only the workers that never communicate "
        "did; not counted: sgp() failed."
    )
    assert report.verdict(result()).startswith("No recipe finished")


def test_verdict_compares_with_ddp_rather_than_with_the_next_best() -> None:
    second = row("sgp()", (0, 0, 5.5), (100, 30, 2.2))
    assert "as many steps as ddp() (2.45)" in report.verdict(result(LOCAL, second, DDP))
    plain = replace(DDP, recipe="ddp")
    assert "as many steps as ddp (2.45)" in report.verdict(result(LOCAL, second, plain))


def test_small_losses_are_written_with_more_digits() -> None:
    a = row("ddp()", (0, 0, 2.3), (100, 10, 0.0149))
    b = row("sgp()", (0, 0, 2.3), (100, 10, 0.0163))
    assert "(0.0149), in as many steps as sgp() (0.0163)" in report.verdict(result(a, b))


# --- the plots ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows",
    [
        FULL.rows,
        (),
        (DDP,),
        (SILENT,),
        (FAILED,),
        (row("flat()", (0, 0, 2.0), (1, 1, 2.0)), row("x()", (0, 0, 1e9), (9, 9, 0.01))),
        tuple(replace(DDP, recipe=f"slowmo(local_sgd({k}), period=48)") for k in range(9)),
    ],
)
@pytest.mark.filterwarnings("error")
def test_plots_take_any_result(rows: tuple[Row, ...], tmp_path: Path) -> None:
    png, svg = report.plots(result(*rows), tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert b"</svg>" in svg.read_bytes()


def test_plots_change_no_global_state(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    report.plots(FULL, tmp_path)
    assert dict(matplotlib.rcParams) == before


def test_a_huge_first_loss_does_not_flatten_the_picture() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    wild = row("ddp()", (0, 0, 1e6), (5, 2, 4.0), (75, 30, 2.45))
    limit_loss(axes, result(wild, LOCAL))
    low, high = axes.get_ylim()
    assert low < 2.01
    assert 3.0 < high < 6.0
