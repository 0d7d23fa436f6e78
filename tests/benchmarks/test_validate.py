"""The validation's journal, its table and its bounds, from launches made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.race.journal import key
from benchmarks.validate import journal, page
from benchmarks.validate.__main__ import main
from benchmarks.validate.journal import Launch, Timed
from benchmarks.validate.rows import Network, networks

from laconic.predict import Facts, Net

FACTS = Facts(4, ((845, 1024),), 4, 0.2, 1e8, 1e-3, nets={"workers": Net(1e8, 1e-3)})
SHARED = {"processor": "one", "cores": "2", "torch": "2"}


def launch(*factors: float, hosts: int = 4) -> Launch:
    """In which DDP, and local SGD every 4 steps, take so many times what is predicted."""
    texts = ("ddp()", "local_sgd(4)")
    rows = tuple(Timed(text, 1.0, 0.2, 8, 0.0) for text in texts)
    made = Launch(SHARED, Network(1, hosts, 1e8), FACTS, rows)
    rows = tuple(
        replace(row, seconds=factor * made.predicted(row))
        for row, factor in zip(rows, factors, strict=True)
    )
    return replace(made, rows=rows)


def test_errors_and_regret() -> None:
    found = launch(1.25, 0.5)
    assert [found.error(row) for row in found.rows] == pytest.approx([-0.2, 1.0])
    assert found.chosen().recipe == "local_sgd(4)" and found.regret() == 0.0
    wrong = launch(0.1, 1.0)
    assert wrong.regret() == pytest.approx(wrong.rows[1].seconds / wrong.rows[0].seconds - 1)
    assert page.bounds_met([launch(1.02, 0.99)] * 9)
    assert not page.bounds_met([launch(1.2, 0.99)]) and not page.bounds_met([wrong])


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with journal.opened(path) as file:
        for one in (launch(1.0, 1.0), launch(1.1, 1.0, hosts=2), launch(1.2, 1.0)):
            journal.append(file, one)
    path.write_text(path.read_text() + '{"cut')
    found = journal.load(path)
    assert found == [launch(1.2, 1.0), launch(1.1, 1.0, hosts=2)], "the last of each network"
    path.write_text('{"key": "other"}\n')
    with pytest.raises(ValueError, match="line 1: not a launch"):
        journal.load(path)


def test_the_page_keeps_what_is_around_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "validation.md"
    paths = page.write(path, [launch(1.25, 1.0), replace(launch(1, 1), network=Network(2, 4, 1e8))])
    text = path.read_text()
    assert "| `ddp()` |" in text and "(-20%)" in text and "2 processes on each host" in text
    assert all(written.exists() for written in paths)
    path.write_text(text + "\nWhat it means.\n")
    page.write(path, [launch(1.0, 1.0)])
    assert path.read_text().endswith("What it means.\n") and "-20%" not in path.read_text()


def test_all_networks_once() -> None:
    assert len(set(networks())) == 9 and len({key({"a": n}) for n in (1, 2)}) == 2


@pytest.mark.parametrize(
    "options", [["--hosts", "1"], ["--rates", "fast"], ["--per-host", "0"], ["--table"]]
)
def test_mistakes_are_one_line(
    options: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    at = ["--journal", str(tmp_path / "none.jsonl"), "--page", str(tmp_path / "page.md")]
    assert main([*at, *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith("benchmarks.validate: ") and said.count("\n") == 1


def test_the_page_is_what_its_command_writes(tmp_path: Path) -> None:
    """On any machine: a round that prints differently would lose the time that was measured for
    it."""
    docs = Path(__file__).parents[2] / "docs"
    path = tmp_path / "validation.md"
    path.write_text((docs / "validation.md").read_text())
    table = ["--table", "--journal", str(docs / "validation.jsonl"), "--page", str(path)]
    assert main(table) == 1, "one prediction misses its bound"
    assert path.read_text() == (docs / "validation.md").read_text()
