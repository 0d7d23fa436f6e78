"""``laconic demo``: what it races, and what it says, from results made by hand."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from laconic.algorithms.parse import parse_recipe
from laconic.lab.demo import kill, outcome, picture, worker
from laconic.lab.demo.outcome import AUTO, DDP, sentences
from laconic.lab.emulation.faults import COORDINATOR
from laconic.lab.emulation.injection import KILLED, Happened
from laconic.lab.emulation.program import Process
from laconic.lab.race.report import NO_COMMUNICATION, Result

from tests.lab.test_report import result, row

CHOSE = (
    "after step 4: a step computes for 40 ms; the network sends 97 Mbit/s and takes 0.5 ms per "
    "message: ddp(codec='int4') takes 90 ms per step, 40% of the speed without communication",
    "after step 68: a step computes for 41 ms; the network sends 97 Mbit/s and takes 0.5 ms per "
    "message: streaming_diloco(8, delay=1, outer='muon') takes 42 ms per step, 97% of the speed",
)


def rows(**finals: float) -> Result:
    """A race in which each row falls from 5.5 to 3 in 10 s, and to its final loss in 30 s."""
    names = {"alone": NO_COMMUNICATION, "ddp": DDP, "auto": AUTO, "local": "local_sgd(24)"}
    steps = {"alone": 400, "ddp": 40, "auto": 380, "local": 300}
    made = [
        row(names[key], (0, 0, 5.5), (steps[key] // 3, 10, 3.0), (steps[key], 30, final))
        for key, final in finals.items()
    ]
    noted = [replace(r, notes=CHOSE) if r.recipe == AUTO else r for r in made]
    return result(*noted)


def test_the_recipes_are_read_and_all_are_explained() -> None:
    for text in outcome.RECIPES:
        parse_recipe(text)
    assert list(outcome.EXPLAINED) == [NO_COMMUNICATION, *outcome.RECIPES]
    assert {DDP, AUTO} <= {*outcome.RECIPES}
    parse_recipe(worker.RECIPE)


def test_a_race_as_hoped_for() -> None:
    ddp, auto, alone = sentences(rows(alone=2.5, ddp=2.9, local=2.4, auto=2.2))
    assert ddp == (
        "ddp() waits for the network (100 Mbit/s per host) during 25% of its 30 s: it takes 40 "
        "steps, where hosts that never communicate take 400, and ends at a loss of 2.90."
    )
    assert auto == (
        "auto() chose streaming_diloco(8, delay=1, outer='muon'), had that loss after 12.5 s (2.4 "
        "times as fast), and ended at 2.20, the lowest of all recipes."
    )
    assert alone == (
        "Hosts that never communicate end at 2.50, the mean loss of their own models: all recipes "
        "but ddp() are ahead of them."
    )


def test_auto_behind_others_and_behind_ddp() -> None:
    _, auto, alone = sentences(rows(alone=2.1, ddp=2.3, local=2.2, auto=2.4))
    assert "did not reach the loss of ddp(), and ended at 2.40, behind" in auto
    assert auto.endswith("behind ddp() (2.30) and local_sgd(24) (2.20).")
    assert alone.endswith("no recipe is ahead of them: communication has not paid here.")


def test_equal_as_displayed_is_not_ahead() -> None:
    _, auto, alone = sentences(rows(alone=2.201, ddp=2.9, local=2.204, auto=2.199))
    assert auto.endswith("ended at 2.20, level with local_sgd(24).")
    assert "no recipe is ahead" in alone


def test_auto_that_is_as_slow_as_ddp_is_not_called_faster() -> None:
    _, auto, _ = sentences(rows(alone=2.5, ddp=2.2, auto=2.19))
    assert "times as fast" not in auto and "had that loss after 29.8 s, and" in auto


def test_rows_that_did_not_finish() -> None:
    race = rows(alone=2.5, ddp=2.9, local=2.4, auto=2.2)

    def without(*names: str) -> list[str]:
        lost = [
            replace(r, status="failed", error="it broke") if r.recipe in names else r
            for r in race.rows
        ]
        return sentences(replace(race, rows=tuple(lost)))

    ddp, auto, alone = without(DDP)
    assert ddp == "ddp() did not finish, so there is no loss to compare with."
    assert "that loss" not in auto and alone.endswith("; not counted: ddp() failed.")
    ddp, auto, alone = without(AUTO, NO_COMMUNICATION)
    assert "never communicate" not in ddp and auto == "auto() did not finish."
    assert alone == (
        "Hosts that never communicate did not finish; not counted: no communication failed and "
        "auto() failed."
    )
    assert "no recipe finished; not counted" in without(DDP, AUTO, "local_sgd(24)")[2]
    assert len(without(*[r.recipe for r in race.rows])) == 3


def test_more_steps_than_without_communication_are_a_disturbed_run() -> None:
    race = rows(alone=2.5, auto=2.2, ddp=2.9)
    computing = [replace(r, waiting=1 - r.steps / 400) for r in race.rows]
    race = replace(race, rows=tuple(computing))
    assert outcome.disturbed(race) is None
    alone = next(row for row in race.rows if row.recipe == NO_COMMUNICATION)
    busy = [replace(row, steps=row.steps // 2) if row is alone else row for row in race.rows]
    warning = outcome.disturbed(replace(race, rows=tuple(busy)))
    assert warning is not None and "took more steps than hosts that never" in warning
    assert outcome.disturbed(replace(race, rows=tuple(r for r in busy if r.steps > 1)[1:])) is None


def test_steps_that_compute_far_longer_are_a_disturbed_run() -> None:
    """Those of DDP, which wait for a quarter of the time."""
    race = rows(alone=2.5, ddp=2.9)
    alone, ddp = race.rows[0], next(row for row in race.rows if row.recipe == DDP)
    each = 0.75 * ddp.seconds / ddp.steps
    for factor, said in ((1.3, False), (1.6, True)):
        usual = replace(alone, waiting=0.0, steps=1000, seconds=1000 * each / factor)
        warning = outcome.disturbed(replace(race, rows=(usual, ddp)))
        assert (warning is not None) == said
    assert warning is not None and "computed more than 1.5 times as long" in warning


def test_without_a_choice_none_is_named() -> None:
    assert outcome.chosen(row(AUTO)) == ""
    assert outcome.chosen(row(AUTO, notes=CHOSE[:1])) == "ddp(codec='int4')"


def test_the_table_agrees_with_the_sentences_in_80_columns() -> None:
    race = rows(alone=2.5, ddp=2.9, local=2.4, auto=2.2)
    broken = row('streaming_diloco(16, outer="muon")', status="failed", error="it broke")
    console = Console(width=80, file=io.StringIO())
    console.print(outcome.table(replace(race, rows=(*race.rows, broken))))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    cells = {line[:34].strip(): line[34:].split() for line in lines[3:]}
    assert cells[DDP] == ["2.90", "30.0", "40", "25%"]
    assert cells[AUTO] == ["2.20", "12.5", "380", "25%"]
    assert cells[broken.recipe][0] == "failed"


@pytest.mark.parametrize("status", ["ok", "failed"])
def test_the_picture_shows_every_row(tmp_path: Path, status: str) -> None:
    race = rows(alone=2.5, ddp=2.9, local=2.4, auto=2.2)
    last = row("sgp()", status="failed") if status == "failed" else race.rows[-1]
    path = picture.draw(replace(race, rows=(*race.rows[:-1], last)), tmp_path / "demo.png")
    assert path.read_bytes().startswith(b"\x89PNG")


# --- a worker is killed --------------------------------------------------------------------------

RECORD = kill.Record(
    began=11.0,
    killed=100.0,
    round=100.4,
    asked=106.0,
    joined=108.0,
    bytes=20_800_000,
    digests=dict.fromkeys(range(4), "0123456789abcdef"),
    steps=500,
)


def test_what_a_kill_shows() -> None:
    assert kill.sentences(RECORD) == [
        "host2 was killed, and 0.4 s later the others had completed their next round without it.",
        "Its replacement received 20.8 MB of state from another worker and what had changed "
        "meanwhile, and took part 2.0 s after it had asked to.",
        "After 500 steps, the models of all 4 workers are equal in every bit.",
    ]


def test_a_kill_that_went_wrong_is_told() -> None:
    other = {**RECORD.digests, 3: "fedcba9876543210"}
    differs = replace(RECORD, digests=other)
    assert RECORD.equal and not differs.equal
    assert kill.sentences(differs)[2].endswith("all 4 workers are NOT equal.")
    some = {host: RECORD.digests[host] for host in (0, 1)}
    gone = replace(RECORD, round=None, joined=None, digests=some)
    assert kill.sentences(gone) == [
        "host2 was killed, and the others did not go on.",
        "No replacement has taken part.",
        "Only host0 and host1 finished.",
    ]
    assert kill.sentences(replace(RECORD, began=101.0))[:2] == [
        "host2 was killed before the training had begun, so nothing was lost.",
        "Its replacement began with the others.",
    ]
    assert kill.sentences(kill.Record())[0].startswith("host2 was not killed")
    assert kill.sentences(kill.Record())[2] == "No worker finished."


def say(host: int, **event: object) -> tuple[Process, bool, list[bytes]]:
    process = Process(f"host{host}/rank{host}", host, (), {})
    return process, False, [json.dumps(event).encode()]


def test_the_watch_records_what_happens(capsys: pytest.CaptureFixture[str]) -> None:
    watch = kill.Watch(Console(width=80, highlight=False))
    watch.started(None)
    for host in range(4):
        watch.printed(*say(host, event="attach", time=10.0))
        watch.printed(*say(host, event="begin", time=11.0, workers=4, bytes=10**7))
    watch.printed(*say(0, event="step", time=12.0, step=50, workers=4, loss=3.0, round=True))
    assert watch.record == kill.Record(began=11.0)
    watch.happened(Happened(25.0, "host2", KILLED, 100.0))
    watch.printed(*say(0, event="step", time=100.05, step=98, workers=4, loss=3.0, round=True))
    watch.printed(*say(0, event="view", time=100.1, step=99, workers=3))
    watch.printed(*say(0, event="step", time=100.2, step=99, workers=3, loss=3.0, round=False))
    watch.printed(*say(0, event="step", time=100.4, step=100, workers=3, loss=3.0, round=True))
    watch.printed(*say(0, event="step", time=100.6, step=102, workers=3, loss=3.0, round=True))
    watch.printed(*say(2, event="attach", time=106.0))
    watch.printed(*say(2, event="begin", time=108.0, workers=4, bytes=20_800_000))
    watch.printed(*say(0, event="view", time=108.1, step=261, workers=4))
    for host in range(4):
        watch.printed(*say(host, event="end", time=120.0, step=500, digest="0123456789abcdef"))
    assert watch.record == replace(RECORD, noticed=100.1)
    said = capsys.readouterr().out
    assert "step 99: now 3 workers take part" in said and "0.4 s after the kill" in said


def test_other_output_of_the_programs_is_not_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    watch = kill.Watch(Console())
    watch.printed(Process("coordinator", COORDINATOR, (), {}), False, [b"coordinator at x"])
    watch.printed(Process("host0/rank0", 0, (), {}), True, [b'{"event": "attach"}'])
    assert watch.record == kill.Record() and capsys.readouterr().out == ""
