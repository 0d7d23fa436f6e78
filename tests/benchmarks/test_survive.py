"""benchmarks.survive: what follows from the workers' journals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.survive import __main__ as survive
from benchmarks.survive import events
from benchmarks.survive.events import Process, Recorder

from laconic.lab.emulation.faults import Kill


def process(host: int, *listed: tuple[float, str, dict[str, Any]]) -> Process:
    start = {"event": "start", "time": listed[0][0] if listed else 0.0, "host": host}
    rest = [{"event": name, "time": time, **more} for time, name, more in listed]
    return Process(host, [start, *rest])


def steps(count: int, time: float) -> list[tuple[float, str, dict[str, Any]]]:
    return [(time, "step", {})] * count


def test_a_lost_worker_and_its_replacement() -> None:
    stays = process(
        0,
        *steps(10, 1.0), (2.0, "round", {"round": 1, "steps": 10}),
        *steps(10, 3.0), (4.5, "round", {"round": 2, "steps": 10}),
        *steps(10, 5.0), (9.0, "round", {"round": 3, "steps": 10}),
        (9.5, "final", {"round": 3, "loss": 2.0, "curve": []}),
    )  # fmt: skip
    killed = process(1, *steps(10, 1.0), (2.1, "round", {"round": 1, "steps": 10}), *steps(4, 3.0))
    again = process(1, *steps(6, 8.0), (9.1, "round", {"round": 3, "steps": 6}))
    faults = [
        {"time": 4.0, "host": "host1", "what": "killed"},
        {"time": 6.0, "host": "host1", "what": "started again"},
        {"time": 8.0, "host": "host1", "what": "not killed: it does not run"},
    ]
    figures = events.summary([stays, killed, again], faults)
    assert figures["computed"] == 30 + 14 + 6
    assert figures["counted"] == 30 + 10 + 6
    assert figures["kills"] == 1
    assert figures["to_next_round"] == [pytest.approx(0.5)]
    assert figures["to_taking_part"] == [pytest.approx(3.1)]
    assert (figures["rounds"], figures["loss"]) == (3, 2.0)


def test_rounds_after_a_checkpoint_count_once() -> None:
    first = process(
        0,
        *steps(10, 1.0), (2.0, "round", {"round": 1, "steps": 10}),
        *steps(10, 3.0), (4.0, "round", {"round": 2, "steps": 10}),
    )  # fmt: skip
    second = process(
        0,
        (6.0, "loaded", {"round": 1}),
        *steps(10, 7.0), (8.0, "round", {"round": 2, "steps": 10}),
    )  # fmt: skip
    assert events.counted_steps([first, second]) == 20
    # The next new round after a kill is one that was not complete before.
    figures = events.summary([first, second], [{"time": 5.0, "host": "host0", "what": "killed"}])
    assert figures["to_next_round"] == [None]


def test_a_recorder_writes_what_the_summary_reads(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 2)
    for _ in range(3):
        recorder.step()
    recorder.lost()
    recorder.step()
    assert not recorder.round(1)
    (tmp_path / events.STOP).write_text("2")
    assert recorder.round(2)
    assert Recorder(tmp_path, 2).incarnation == 1
    (tmp_path / "host0-0-1.jsonl").write_text(
        json.dumps({"event": "start", "time": 0.0, "host": 0})
    )
    found = events.read(tmp_path)
    assert [one.host for one in found] == [2, 2], "an incomplete line is left out"
    assert events.counted_steps(found) == 1
    assert events.last_round(found) == 2


def test_all_systems_get_the_same_kills_and_none_at_the_start() -> None:
    options = survive.parser().parse_args(["--minutes", "10", "--mtbf", "60", "--seed", "3"])
    planned = survive.kills(options)
    assert planned and all(isinstance(kill, Kill) and kill.at > 30.0 for kill in planned)
    lines = {s: survive.command(s, Path("x"), options) for s in survive.SYSTEMS}
    given = {
        s: [line[i + 1] for i, w in enumerate(line) if w == "--kill"] for s, line in lines.items()
    }
    assert given["laconic"] == given["torchft"] == given["restarts"] != []
    assert given["undisturbed"] == []


def test_the_undisturbed_loss_after_as_many_rounds() -> None:
    curve = [(5, 4.0), (10, 3.0), (12, 2.8)]
    assert survive.loss_at(curve, 5) == 4.0
    assert survive.loss_at(curve, 7) == pytest.approx(3.6)
    assert survive.loss_at(curve, 12) == 2.8
    assert survive.loss_at(curve, 13) is None
    assert events.spread([1.0, None, 3.0]) == "2.0 / 3.0, 1 never"
    assert events.spread([]) == "-"
