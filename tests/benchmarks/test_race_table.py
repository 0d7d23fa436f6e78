"""The race of docs/race.md: what it runs, the journal, and the tables made from it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.race import __main__ as command
from benchmarks.race import journal, page, rows, summary
from benchmarks.race.journal import Entry, Job
from benchmarks.race.networks import FORM, Network, parse_network

from laconic.algorithms.parse import parse_recipe
from laconic.lab.emulation import cluster
from laconic.lab.race import rivals, runner
from laconic.lab.race.result import NO_COMMUNICATION, Point, Result, Row

SHARED = {
    "workload": "text", "data": "some.txt", "sha256": "0" * 16, "hosts": 4, "seconds": 30.0,
    "validations": 3, "processor": "P", "cores": "8", "torch": "2.0",
}  # fmt: skip
MARKS = f"# page\n\n{page.BEGIN}\nold\n{page.END}\n\nafter\n"
DOCS = Path(__file__).parents[2] / "docs"


def ended(
    row: str, seed: int, loss: float, pace: float = 0.1, megabytes: float = 2.0, **fields: Any
) -> Row:
    """A run of 30 s that was validated four times."""
    steps = round(30 / pace)
    times = (0.0, 10.0, 20.0, 30.0)
    curve = [Point(round(t / pace), t, 1.0, loss + (30 - t) / 10) for t in times]
    known = Row(
        recipe=NO_COMMUNICATION if row == rows.NONE else row,
        status="ok",
        error=None,
        steps=steps,
        seconds=30.0,
        seconds_per_step=pace,
        loss=loss,
        ledger_bytes_per_step=math.nan,
        interface_bytes_per_step=1e6 * megabytes,
        waiting=0.5,
        curve=tuple(curve),
        seed=seed,
        peer=rows.is_peer(row),
    )
    return replace(known, **fields)


def result(row: Row) -> Result:
    settings: dict[str, object] = {"seconds": 30.0, "parameters": 865_280, "reason": None}
    return Result((row,), settings, {"cores": "8"}, {"python": "3.11", "commit": "c0ffee"}, "race")


def entry(
    row: str,
    network: Network | float | None,
    seed: int,
    loss: float,
    shared: Any = SHARED,
    **fields: Any,
) -> Entry:
    network = Network(network) if isinstance(network, float) else network
    return Entry(shared, Job(row, network, seed), result(ended(row, seed, loss, **fields)))


RUNS = (
    entry("none", None, 0, 3.0, pace=0.05, megabytes=1e-6),
    entry("none", None, 1, 3.2, pace=0.05, megabytes=1e-6),
    *(entry("ddp()", 1e8, seed, 2.5, pace=0.2, megabytes=5.25) for seed in (0, 1)),
    entry("torch-ddp", 1e8, 0, 2.3, pace=0.1),
    entry("torch-ddp", 1e8, 1, 2.5, pace=0.1),
    entry("local_sgd(24)", 1e8, 0, 1.0),
    entry("local_sgd(24)", 1e8, 1, 9.0, status="failed", error="rank 1 on host1: SIGKILL"),
    entry("sgp()", 1e8, 0, 2.0, notes=("it is short",)),
    entry("ddp()", 1e7, 0, 3.5, pace=2.0),
    entry("torch-ddp", 1e7, 0, 3.4, pace=2.0),
)


FAR = Network(1e8, 0.08, 0.0, 0.001)
FAR_RUNS = (
    *(entry("auto()", FAR, seed, loss) for seed, loss in ((0, 2.0), (1, 2.2))),
    *(entry("auto()", 1e8, seed, loss) for seed, loss in ((0, 1.5), (1, 1.8))),
    *(entry("torch-ddp", FAR, seed, loss) for seed, loss in ((0, 2.5), (1, 2.5))),
    entry("sgp()", FAR, 1, 2.1),
    entry("ddp()", FAR, 0, 9.0, status="failed", error="why"),
)


def written(path: Path, *entries: Entry) -> Path:
    with journal.opened(path) as file:
        for one in entries:
            journal.append(file, one)
    return path


# -- the journal ----


def test_the_journal_keeps_runs_and_drops_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = written(tmp_path / "some" / "journal.jsonl", *RUNS[:2])
    assert journal.load(path) == list(RUNS[:2])
    path.write_text(path.read_text() + RUNS[2].to_line()[:200])
    assert journal.load(path) == list(RUNS[:2])
    written(path, *RUNS[2:])
    assert journal.load(path) == list(RUNS)
    assert all(len(json.loads(line)["key"]) == 8 for line in path.read_text().splitlines()[3:])


def test_a_later_run_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    again = entry("ddp()", 1e8, 0, 1.75)
    other = entry("ddp()", 1e8, 0, 1.25, shared={**SHARED, "seconds": 280.0})
    known = journal.load(written(tmp_path / "j", *RUNS, other, again))
    assert len(known) == len(RUNS) + 1
    assert [e for e in known if e.job == again.job] == [other, again]
    apart = journal.by_key(known)
    assert [len(entries) for entries in apart.values()] == [len(RUNS), 1]


@pytest.mark.parametrize(
    "change", [{"key": "00000000"}, {"shared": {"hosts": 3}}, {"row": None, "result": {}}]
)
def test_a_line_of_another_kind_is_refused_by_its_number(
    tmp_path: Path, change: dict[str, object]
) -> None:
    fields = json.loads(RUNS[0].to_line())
    path = tmp_path / "j"
    path.write_text(f"{RUNS[0].to_line()}\n{json.dumps({**fields, **change})}\n")
    with pytest.raises(ValueError, match="j, line 2: "):
        journal.load(path)
    path.write_text("[3]\n")
    with pytest.raises(ValueError, match="j, line 1: not a run"):
        journal.load(path)


def test_a_line_carries_the_network(tmp_path: Path) -> None:
    """Runs with latency are other jobs, and lines that had a bandwidth only are still read."""
    whole = Network(1e8, 0.08, 0.01, 0.001, "bbr")
    runs = [entry("ddp()", network, 0, 2.0) for network in (1e8, FAR, whole, None)]
    path = written(tmp_path / "j", *runs)
    assert journal.load(path) == runs and len({e.job for e in runs}) == 4
    plain, far, full, none = map(json.loads, path.read_text().splitlines())
    before = ["key", "shared", "row", "bandwidth", "seed", "result"]
    assert list(plain) == list(none) == before and none["bandwidth"] is None
    assert (far["bandwidth"], far["latency"], far["loss"]) == (1e8, 0.08, 0.001)
    assert (full["jitter"], full["control"]) == (0.01, "bbr")
    earlier = journal.load(DOCS / "race.jsonl")
    assert {e.job.network for e in earlier} >= {None, Network(1e7), Network(1e8)}


def test_two_races_do_not_write_to_one_journal(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with (
        journal.opened(path),
        pytest.raises(ValueError, match="another race is writing"),
        journal.opened(path),
    ):
        pass
    with journal.opened(path):
        pass


# -- networks ----


@pytest.mark.parametrize(
    ("text", "network", "shown"),
    [
        ("50mbit", Network(50e6), "50 Mbit/s"),
        ("10 Gbit/s", Network(10e9), "10 Gbit/s"),
        ("50mbit/80ms", Network(50e6, 0.08), "50 Mbit/s, 80 ms latency"),
        ("50mbit/80ms/0.1%", Network(50e6, 0.08, 0.0, 0.001),
         "50 Mbit/s, 80 ms latency, 0.1% loss"),
        ("50 Mbit/s / 80 ms +- 10ms / 0.001", Network(50e6, 0.08, 0.01, 0.001),
         "50 Mbit/s, 80 ms latency, 10 ms jitter, 0.1% loss"),
        ("50mbit/0/0/BBR", Network(50e6, control="bbr"), "50 Mbit/s, TCP bbr"),
        ("50mbit/80ms/0.1%/bbr", Network(50e6, 0.08, 0.0, 0.001, "bbr"),
         "50 Mbit/s, 80 ms latency, 0.1% loss, TCP bbr"),
    ],
)  # fmt: skip
def test_a_network_is_read_and_shown(text: str, network: Network, shown: str) -> None:
    assert parse_network(text) == network and str(network) == shown
    assert network.alone == Network(network.rate)
    found = network.impairments(7)
    assert (found.latency, found.jitter, found.loss) == (
        network.latency, network.jitter, network.loss,
    )  # fmt: skip
    assert found.seed == 7


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fast", "not a rate: 'fast'"),
        ("50mbit/", "not a network: '50mbit/'"),
        ("50mbit/0.1%", "not a duration: '0.1%'"),
        ("50mbit/80ms+-x", "not a duration: 'x'"),
        ("50mbit/80ms/5", "not a share: '5'"),
        ("50mbit/80ms/0/bbr/x", "not a network"),
    ],
)
def test_a_network_that_is_none_is_refused_with_the_form(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="a network is") as caught:
        parse_network(text)
    assert words in str(caught.value) and FORM in str(caught.value)


# -- what is run ----


def test_the_rows_of_the_table_are_all_there_are() -> None:
    assert len(set(rows.ROWS)) == len(rows.ROWS)
    for text in rows.ROWS:
        if rows.is_peer(text):
            assert rivals.find(text).rounds
        elif text != rows.NONE:
            assert parse_recipe(text)


def test_rows_are_chosen_by_patterns_and_texts_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rivals.Rival, "version", lambda self: "1")
    assert rows.chosen(None) == list(rows.ROWS)
    texts = ["sgp()", "local_sgd(2", "none", "torch-ddp*", "sgp()", "local_sgd(24)"]
    with pytest.raises(ValueError, match="cannot read the recipe"):
        rows.chosen(texts)
    texts.remove("local_sgd(2")
    ddps = [row for row in rows.ROWS if row.startswith("torch-ddp")]
    assert len(ddps) > 1
    assert rows.chosen(texts) == ["none", "local_sgd(24)", *ddps, "sgp()"]


def test_jobs_go_seed_by_seed_and_the_compute_alone_once_for_all_networks() -> None:
    slow, far = Network(1e7), FAR
    found = command.jobs(["none", "ddp()", "torch-ddp"], [slow, far], [0, 1])
    assert [(j.row, j.network) for j in found if j.seed == 0] == [
        ("none", None), ("ddp()", slow), ("torch-ddp", slow), ("ddp()", far), ("torch-ddp", far),
    ]  # fmt: skip
    assert [j.seed for j in found] == [0] * 5 + [1] * 5


@contextmanager
def no_cluster(hosts: int, **network: object) -> Iterator[None]:
    yield


class Lab:
    """In place of the lab: ends a run at once, or is killed, or has a row that fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[tuple[tuple[str, ...], float, tuple[int, ...]]] = []
        self.settings: list[runner.Settings] = []
        self.killed_after = 1000
        self.failing = ""
        monkeypatch.setattr(command, "Cluster", no_cluster)
        monkeypatch.setattr(runner, "run", self.run)

    def run(self, settings: runner.Settings, told: str, watch: object) -> Iterator[Result]:
        if len(self.ran) == self.killed_after:
            raise KeyboardInterrupt
        texts = (*([NO_COMMUNICATION] * settings.baseline), *settings.recipes, *settings.rivals)
        (text,) = texts
        self.settings.append(settings)
        self.ran.append((texts, settings.bandwidth, settings.seeds))
        (seed,) = settings.seeds
        failed = {"status": "failed", "error": "why"} if text == self.failing else {}
        yield result(ended(text, seed, 2.0, **failed))


def test_a_race_that_was_killed_goes_on_and_tries_again_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Lab(monkeypatch)
    said = ["--rows", "none", "ddp()", "torch-ddp", "--networks", "10mbit", "100mbit", "--seeds",
            "0", "--seconds", "30", "--journal", str(tmp_path / "j")]  # fmt: skip
    lab.killed_after, lab.failing = 3, "torch-ddp"
    assert command.main(said) == 130
    assert "interrupted" in capsys.readouterr().err
    assert [texts for texts, _, _ in lab.ran] == [(NO_COMMUNICATION,), ("ddp()",), ("torch-ddp",)]
    assert [rate for _, rate, _ in lab.ran[1:]] == [1e7, 1e7]
    lab.ran, lab.failing, lab.killed_after = [], "", 1000
    assert command.main(said) == 0
    assert [(texts[0], rate) for texts, rate, _ in lab.ran] == [
        ("torch-ddp", 1e7), ("ddp()", 1e8), ("torch-ddp", 1e8),
    ]  # fmt: skip
    assert all(e.run.status == "ok" for e in journal.load(tmp_path / "j"))
    lab.ran = []
    assert command.main(said) == 0 and not lab.ran
    assert "5 runs, 0 to run" in capsys.readouterr().out
    assert command.main([*said, "--again"]) == 0 and len(lab.ran) == 5
    lab.ran = []
    assert command.main([*said, "--seconds", "31"]) == 0 and len(lab.ran) == 5
    assert sorted(map(len, journal.by_key(journal.load(tmp_path / "j")).values())) == [5, 5]
    lab.failing = "ddp()"
    assert command.main([*said, "--seconds", "32"]) == 1
    assert "failed: why" in capsys.readouterr().out


def test_a_race_over_latency_and_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each network is a job of its own, and each seed loses other packets."""
    lab = Lab(monkeypatch)
    monkeypatch.setattr(cluster, "congestion_controls", lambda: ["bbr", "cubic"])
    said = ["--rows", "none", "ddp()", "--networks", "50mbit", "50mbit/80ms/0.1%/bbr",
            "50 Mbit/s / 0.08 / 0.001 / bbr", "--seeds", "0", "3", "--seconds", "30",
            "--journal", str(tmp_path / "j")]  # fmt: skip
    assert command.main(said) == 0
    told = capsys.readouterr().out
    assert "6 runs, 6 to run" in told
    assert "50 Mbit/s, 80 ms latency, 0.1% loss, TCP bbr, seed 3, ddp(): " in told
    raced = [(s.impairments.latency, s.impairments.loss, s.impairments.seed, s.congestion_control)
             for s in lab.settings if s.recipes]  # fmt: skip
    plain, far = (0.0, 0.0, 0, None), (0.08, 0.001, 0, "bbr")
    assert raced[:2] == [plain, far] and raced[3] == (0.08, 0.001, 3, "bbr")
    assert not any(s.impairments or s.congestion_control for s in lab.settings if s.baseline)
    lab.settings = []
    assert command.main(said) == 0 and not lab.settings
    assert command.main([*said, "--networks", "50mbit/90ms"]) == 0
    assert [s.impairments.latency for s in lab.settings] == [0.09, 0.09]


def test_a_network_that_cannot_be_emulated_is_refused_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Lab(monkeypatch)

    def refuse(hosts: int, **network: Any) -> None:
        raise OSError(f"packets cannot have {network['impairments']}")

    monkeypatch.setattr(command, "Cluster", refuse)
    said = ["--rows", "ddp()", "--networks", "50mbit/80ms"]
    assert command.main([*said, "--journal", str(tmp_path / "j")]) == 2
    assert capsys.readouterr().err == "benchmarks.race: packets cannot have 80 ms latency\n"
    assert not lab.ran


def test_the_lab_runs_a_row_without_the_compute_alone_or_that_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def skipped(settings: runner.Settings, cluster: object, text: str, *rest: object) -> object:
        return ended(text or rows.NONE, 0, 2.0), 7

    monkeypatch.setattr(runner, "_row", skipped)
    monkeypatch.setattr(runner, "Cluster", lambda hosts, **rates: runner.Loopback(hosts))
    settings = runner.Settings(recipes=("ddp()",), baseline=False)
    (one,) = runner.run(settings, "", lambda name, event: None)
    assert [row.recipe for row in one.rows] == ["ddp()"]
    (one,) = runner.run(runner.Settings(recipes=()), "", lambda name, event: None)
    assert [row.recipe for row in one.rows] == [NO_COMMUNICATION]
    runner.Settings(recipes=(), steps=1, seconds=None, workload="digits").check()
    with pytest.raises(ValueError, match="give at least one recipe"):
        runner.Settings(recipes=(), baseline=False).check()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("--rows nonsense", "no row 'nonsense': give none, a recipe (ddp, "),
        ("--rows ddp(codecs='int4')", "ddp has no option 'codecs'"),
        ("--rows torch-ddp(hook=3)", "hook must be one of"),
        ("--rows x*", "no row 'x*'"),
        ("--rows ddp() --networks 5foo", "not a rate: '5foo'"),
        ("--rows ddp() --networks 1000gbit", "bandwidth must be"),
        ("--rows ddp() --networks 1gbit/20s", "latency must be"),
        ("--rows ddp() --networks 1gbit/20ms+-30ms", "jitter must be"),
        ("--rows ddp() --networks 1gbit/x", "a network is RATE[/LATENCY"),
        ("--rows ddp() --networks 1gbit/1ms/0/fast", "the congestion control must be one of "),
        ("--rows ddp() --seeds 0 0", "seeds must differ"),
        ("--rows ddp() --seeds a", "argument --seeds: invalid int value: 'a'"),
        ("--rows ddp() --seconds 0", "seconds must be"),
        ("--rows ddp() --hosts 0", "hosts must be"),
        ("--rows ddp() --data /no/such/file", "cannot read the training text: /no/such/file"),
        ("tabel", "unrecognized arguments: tabel"),
        ("table", "no runs in"),
        ("compare", "no runs in"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    said: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    lab = Lab(monkeypatch)
    try:
        code = command.main(said.split())
    except SystemExit as left:  # argparse's own
        code = int(left.code or 0)
    told = capsys.readouterr()
    assert code == 2 and words in told.err and told.err.count("\n") == 1, told.err
    assert not lab.ran and not any(tmp_path.iterdir())


def test_a_peer_that_is_not_installed_is_refused_beforehand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rivals.Rival, "version", lambda self: None)
    with pytest.raises(ValueError, match=r"torchft\(24\) needs torchft==.*: run make peers"):
        rows.chosen(["torchft(24)"])


# -- the page ----

TABLE_100 = """\
### 100 Mbit/s

| row | s per step | speed | MB per step | loss | least to most | steps |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
| `none` | 0.0500 | 100% | 0 | 3.100 | 3.000 to 3.200 | 600 |
| `ddp()` | 0.200 | 25% | 5.25 | 2.500 | 2.500 to 2.500 | 150 |
| `local_sgd(24)` | 0.100 | 50% | 2.00 | 1.000 | 1.000 to 1.000 | 300 |
| `torch-ddp` | 0.100 | 50% | 2.00 | **2.400** | 2.300 to 2.500 | 300 |
| `sgp()` | 0.100 | 50% | 2.00 | 2.000 | 2.000 to 2.000 | 300 |

- `local_sgd(24)`, seed 1, failed: rank 1 on host1: SIGKILL.
- `sgp()` was not run with seed 1.
- `sgp()`: it is short.
"""


def test_the_tables_and_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row that lacks a seed is shown, and is not the best."""
    target, path = tmp_path / "race.md", written(tmp_path / "j", *RUNS)
    target.write_text(MARKS)
    said = ["table", "--journal", str(path), "--page", str(target)]
    assert command.main(said) == 0
    assert command.main(said) == 0  # over its own
    text = target.read_text()
    assert text.startswith(f"# page\n\n{page.BEGIN}\n") and text.endswith(f"{page.END}\n\nafter\n")
    assert "old" not in text and TABLE_100 in text
    low = text.partition("### 10 Mbit/s")[2].partition("###")[0]
    assert "| `torch-ddp` | 2.00 | 2% | 2.00 | **3.400** |" in low and "| `none` |" in low
    assert "was not run with" not in low
    assert "some.txt, 4 hosts, 30 s of training each, P, 8 cores" in text
    assert "865,280 parameters, seeds 0, 1. With python 3.11." in text
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")
    assert "written: " in capsys.readouterr().out


def test_every_row_is_in_the_picture_of_its_network() -> None:
    figure = page.picture(RUNS)
    slow, fast, slow_end, fast_end = figure.axes
    assert [axes.get_title(loc="left") for axes in (slow, fast)] == ["10 Mbit/s", "100 Mbit/s"]
    assert (len(slow.lines), len(fast.lines)) == (3, 5)
    names = [label.get_text() for label in slow_end.get_yticklabels()]
    assert sorted(names) == ["ddp()", "local_sgd(24)", "none", "sgp()", "torch-ddp"]
    heights = [label.get_position()[1] for label in slow_end.get_yticklabels()]
    diamonds = {
        axes: [line.get_ydata()[0] for line in axes.lines if line.get_marker() == "D"]
        for axes in (slow_end, fast_end)
    }
    best = heights[names.index("torch-ddp")]
    assert diamonds == {slow_end: [best], fast_end: [best]}


def test_networks_with_latency_have_names_a_reader_understands(tmp_path: Path) -> None:
    figure = page.picture([*RUNS, *FAR_RUNS])
    titles = [axes.get_title(loc="left") for axes in figure.axes[:3]]
    assert titles == ["10 Mbit/s", "100 Mbit/s", "100 Mbit/s\n80 ms latency, 0.1% loss"]
    text = page.markdown([*RUNS, *FAR_RUNS], "race.png")
    far = text.partition("### 100 Mbit/s, 80 ms latency, 0.1% loss\n")[2]
    assert "| `auto()` | 0.100 | 50% | 2.00 | **2.100** | 2.000 to 2.200 | 300 |" in far
    assert "| `none` |" in far and "| `local_sgd(24)` |" not in far


SUMMARY = """\
100 Mbit/s, 80 ms latency, 0.1% loss
row        seeds  loss               s per step  to auto()       to auto() at 100 Mbit/s
none       0,1    3.100 ± 0.141      0.05        +1.000 ± 0.000  +1.450 ± 0.071
ddp()      –      – (seed 0 failed)  –           –               –
auto()     0,1    2.100 ± 0.141 *    0.1         +0.000 ± 0.000  +0.450 ± 0.071
torch-ddp  0,1    2.500 ± 0.000      0.1         +0.400 ± 0.141  +0.850 ± 0.212
sgp()      1      2.100              0.1         -0.100          +0.300
"""


def test_how_far_each_row_is_from_auto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Differences are between runs with the same seeds; +0.3 is 2.1 - 1.8, of seed 1."""
    said = ["compare", "--journal", str(written(tmp_path / "j", *RUNS, *FAR_RUNS))]
    assert command.main([*said, "--networks", "100mbit/80ms/0.1%"]) == 0
    told = capsys.readouterr().out
    assert SUMMARY in told and told.endswith(summary.LEGEND + "\n")
    assert "4 hosts, 30 s of training each" in told and "\n10 Mbit/s" not in told
    assert command.main(said) == 0
    told = capsys.readouterr().out
    assert SUMMARY in told and "\n10 Mbit/s\n" in told and told.count("to auto() at") == 1
    assert command.main([*said, "--networks", "5mbit"]) == 2
    assert capsys.readouterr().err == (
        "benchmarks.race: no runs on 5 Mbit/s; the journal has runs on 10 Mbit/s; 100 Mbit/s; "
        "100 Mbit/s, 80 ms latency, 0.1% loss\n"
    )


def test_a_loss_is_taken_when_the_time_is_up() -> None:
    """Of a run that took longer than it was given, where it was by then."""
    late = entry("ddp()", 1e8, 0, 2.0)
    curve = (*late.run.curve[:-1], Point(400, 40.0, 1.0, 1.0))
    late = replace(late, result=result(replace(late.run, curve=curve, seconds=40.0, loss=1.0)))
    assert page.Line("ddp()", (late,)).losses == [pytest.approx(2.0)]


def test_runs_of_other_settings_have_tables_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [replace(e, shared={**SHARED, "hosts": 3}) for e in RUNS[2:6]]
    target, path = tmp_path / "race.md", written(tmp_path / "j", *RUNS, *others)
    target.write_text(MARKS)
    said = ["table", "--journal", str(path), "--page", str(target)]
    assert command.main(said) == 2
    told = capsys.readouterr().err
    theirs = journal.key(others[0].shared)
    assert f"{theirs} (text workload on some.txt, 3 hosts" in told and "4 runs" in told
    assert command.main([*said, "--key", "nokey"]) == 2 and target.read_text() == MARKS
    assert command.main([*said, "--key", theirs]) == 0
    text = target.read_text()
    assert "3 hosts" in text and "`none`" not in text and "4 hosts" not in text
    assert "| `ddp()` | 0.200 | – | 5.25 |" in text


def test_a_page_without_marks_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "j", *RUNS)
    target = tmp_path / "other.md"
    target.write_text("no marks")
    assert command.main(["table", "--journal", str(path), "--page", str(target)]) == 2
    assert "must have a line" in capsys.readouterr().err
    assert target.read_text() == "no marks" and not (tmp_path / "other.png").exists()
    text = (DOCS / "race.md").read_text()
    assert text.count(page.BEGIN) == text.count(page.END) == 1
    assert text.index(page.BEGIN) < text.index(page.END)
