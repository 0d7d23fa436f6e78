"""What all commands have in common: the overview, errors in one line, streams that fail, JSON."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import laconic
from laconic.cli import COMMANDS, main, overview, parsers, streams
from laconic.lab.race import report
from laconic.lab.race.result import NO_COMMUNICATION, Point, Result, Row

from tests.support import programs

LACONIC = [*programs.NEW, "-m", "laconic"]
ADVISE = ["advise", "--params", "1M", "--step-time", "0.1s", "--bandwidth", "1gbit", "--latency",
          "1ms", "--nodes", "4"]  # fmt: skip


def row(recipe: str) -> Row:
    return Row(
        recipe=recipe,
        status="ok",
        error=None,
        steps=10,
        seconds=20.0,
        seconds_per_step=2.0,
        loss=2.0,
        ledger_bytes_per_step=1e6,
        interface_bytes_per_step=1.05e6,
        waiting=0.25,
        curve=(Point(0, 0.0, 0.0, 5.0), Point(10, 20.0, 10.0, 2.0)),
    )


RACE = Result(
    rows=tuple(map(row, (NO_COMMUNICATION, "ddp()", "local_sgd(12)"))),
    settings={"hosts": 4, "per_host": 1, "bandwidth": 1e8, "seconds": 20.0, "seed": 0},
    machine={},
    versions={},
    command="laconic compare",
)


def run(words: list[str], shell: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command, with redirections in ``shell`` such as ``2>&-``."""
    line = 'exec "$@" ' + shell if "|" not in shell else f'"$@" {shell}'
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line, "bash", *LACONIC, *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=250,
    )


# -- the overview ----


def test_the_overview_lists_each_command_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    text = overview()
    lines = text.splitlines()
    assert len(lines) <= 16 and max(map(len, lines)) <= 80
    listed, group = {}, ""
    for line in lines[2:]:
        if not line:
            break
        group = line[:8].strip() or group
        name, help_text = line[8:].split(maxsplit=1)
        listed[name] = (group, help_text)
    assert listed == {name: tuple(c) for name, c in COMMANDS.items() if c.group}
    assert [c.group for c in COMMANDS.values()] == sorted(
        (c.group for c in COMMANDS.values()), key=["learn", "decide", "run", "look", ""].index
    )
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert main(words) == 0
        assert capsys.readouterr().out == text + "\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([name, "--help"], ["help", name]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: laconic {name} ")
    parser = parsers([name])[1][name]
    assert all(action.help for action in parser._actions)


@pytest.mark.fault("a second value for the same option replaced the first silently")
@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_with_one_value_is_given_once(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for action in parsers([name])[1][name]._actions:
        if isinstance(action, argparse._StoreAction) and action.option_strings:
            option = action.option_strings[0]
            value = str(next(iter(action.choices or ["1"])))
            with pytest.raises(SystemExit) as ended:
                parsers([name])[1][name].parse_args([option, value, option, value])
            assert ended.value.code == 2
            assert "is given twice" in capsys.readouterr().err


@pytest.mark.fault("lab took the last of two values for a host; compare did not know host2")
@pytest.mark.parametrize("option", ["bandwidth-host", "latency-host"])
@pytest.mark.parametrize("command", [["lab", "true"], ["compare", "ddp"]])
def test_a_host_has_one_value(
    command: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value = "1mbit" if option == "bandwidth-host" else "1ms"
    first, *rest = command
    twice = [f"--{option}", f"host1={value}", f"--{option}", f"1={value}"]
    assert main([first, *twice, *rest]) == 2
    assert f"--{option} has two values for host 1" in capsys.readouterr().err


@pytest.mark.fault("--latency was a round trip in lab and compare, and half of one elsewhere")
def test_a_latency_is_a_round_trip(capsys: pytest.CaptureFixture[str]) -> None:
    """An average of two workers takes two messages, one round trip."""
    network = ["--latency", "200ms", "--json"]
    numbers = ["--params", "1k", "--step-time", "1s", "--bandwidth", "1000gbit", "--nodes", "2"]
    assert main(["advise", *numbers, *network]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["recipe"] == "ddp()" and rows[0]["seconds"] == pytest.approx(1.2)
    numbers = ["--parameters", "1k", "--step", "1s", "--rate", "1000gbit", "--spread", "0%"]
    numbers += ["--workers", "2", "--sites", "2", "--steps", "8"]
    assert main(["plan", *numbers, *network, "local_sgd(1)"]) == 0
    found = json.loads(capsys.readouterr().out)["recipes"][0]
    assert found["seconds"]["median"] == pytest.approx(8 * 1.2)


def test_help_loads_no_other_command_and_no_torch() -> None:
    code = (
        "import sys\n"
        "from laconic.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print(*sorted(sys.modules), file=sys.stderr)"
    )
    for words, own in ([], set()), (["watch", "--help"], {"laconic.cli.watch"}):
        ended = subprocess.run(
            [*programs.NEW, "-c", code, *words], capture_output=True, text=True, check=True
        )
        loaded = set(ended.stderr.split())
        assert not loaded & {"torch", "numpy", "rich", "matplotlib"}
        commands = {f"laconic.cli.{name}" for name in COMMANDS}
        assert loaded & commands == own


# -- errors ----


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["advice"], "no command 'advice' (did you mean 'advise'?): choose from the commands "),
        (["--verbose"], "no option '--verbose': choose from the commands demo, "),
        (["help", "me"], "no command 'me': choose from the commands "),
        ([*ADVISE, "--recipe", "locl_sgd(3)"], "no recipe 'locl_sgd' in 'locl_sgd(3)' (did you"),
        ([*ADVISE, "--recipe", "ddp("], "cannot read the recipe 'ddp(': write it as in Python"),
        ([*ADVISE, "--recipe", "local_sgd(0)"], "local_sgd: period must be an integer of at least"),
        ([*ADVISE, "--plot", "no/such/a.png"], "--plot no/such/a.png: no such directory"),
        (["report", "missing"], "cannot read a result from missing: No such file or directory"),
        (["report", "text"], "cannot read a result from text: not the result of a race: "),
        (["report", "directory"], "cannot read a result from directory/results.json: No such file"),
        (["report", "bytes"], "cannot read a result from bytes: 'utf-8' codec can't decode"),
        (["report", "good", "--out", "text"], "text: File exists: give the path of a directory"),
        (["report", "good", "--out", "text/a"], "text/a: Not a directory: give a path whose"),
        (["keys", "text"], "text: File exists: give the path of a directory, or a new one"),
        (["watch", "missing", "--once"], "no metrics in missing: check that the run writes there"),
        (["watch", "text", "--once"], "text contains no metrics of laconic"),
        (["compare", "--rules", "missing.py"], "no file missing.py: check the path"),
        (["compare", "--data", "directory"], "cannot read the training text: "),
        (["compare", "--workload", "text:make"], "no workload 'text:make': choose from"),
        (["compare", "--out", "text", "ddp()"], "text: File exists: give the path of a directory"),
        (["coordinator", "--host", "192.0.2.1"], "cannot listen at 192.0.2.1:29400: "),
        (["doctor", "--rank", "1"], "--master, --rank and --world belong together: give all three"),
        (["tune", "ddp", "--out", "text"], "text: File exists: give the path of a directory"),
        (["lab", "--out", "text", "true"], "cannot create text: File exists"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("{\n")
    Path("bytes").write_bytes(b"\xff\xfe\xfd")
    Path("directory").mkdir()
    report.save(RACE, Path("good"))
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"laconic: {said}") and captured.err.count("\n") == 1
    assert not captured.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", "--hosts", "x"], "argument --hosts: invalid int value: 'x'"),
        (["advise", "--params"], "argument --params: expected one argument"),
        (["completion", "csh"], "argument SHELL: invalid choice: 'csh' (choose from 'bash', "),
        (["report"], "the following arguments are required: DIR"),
        (["watch", "x", "--onc", "--zzz"], "unrecognized arguments: --zzz"),
    ],
)
def test_a_mistake_in_options_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    name = words[0]
    assert captured.err.startswith(f"laconic {name}: {said}") and captured.err.count("\n") == 1
    assert captured.err.endswith(f"; see laconic {name} --help\n")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\n  two\n"), "one; two"),
        (PermissionError(errno.EACCES, "Permission denied", "a/b"),
         "a/b: Permission denied: choose a path that you may use"),
        (OSError(errno.EROFS, "Read-only file system", "a"),
         "a: Read-only file system: choose a directory that can be written"),
        (OSError(errno.ENOSPC, "No space left on device"),
         "No space left on device: free some space, or choose another disk"),
        (OSError(errno.EPERM, "no namespaces here"), "no namespaces here"),
        (OSError("no browser"), "no browser"),
        (ModuleNotFoundError("No module named 'rich.table'", name="rich.table"),
         "the package rich is missing: pip install -e '.[lab]' in laconic's repository"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"),
         "the package torch is missing: install torch"),
        (ImportError("tune needs optuna: pip"), "tune needs optuna: pip"),
        (MemoryError(), "not enough memory: try a smaller model or fewer workers"),
        (KeyError("x"),
         "KeyError: 'x': set LACONIC_TRACEBACK=1 to see where, and report it"),
        (laconic.LinkError("rank 1 ended"), "rank 1 ended"),
    ],
)  # fmt: skip
def test_every_error_is_one_line_with_the_next_step(error: Exception, line: str) -> None:
    assert streams.error_line(error) == line


def failing(error: BaseException) -> Any:
    def fail(_: object) -> int:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code"),
    [(ValueError("x"), 2), (OSError("x"), 2), (laconic.LinkError("x"), 2), (TypeError("x"), 1),
     (KeyboardInterrupt(), 130)],
)  # fmt: skip
def test_exit_codes(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("laconic.cli.report.run", failing(error))
    assert main(["report", "x"]) == code
    assert re.fullmatch(r"laconic: .*\n", capsys.readouterr().err)
    monkeypatch.setenv("LACONIC_TRACEBACK", "1")
    if isinstance(error, Exception):
        with pytest.raises(type(error)):
            main(["report", "x"])


def test_what_may_not_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root may write everywhere but into /proc."""
    report.save(RACE, tmp_path)
    assert main(["report", str(tmp_path), "--out", "/proc/report"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "laconic: /proc/report: No such file or directory: check the path\n"


# -- streams ----


@pytest.mark.parametrize("words", [[], ["compare", "--help"], [*ADVISE, "--all"]])
def test_a_reader_that_ends_early_is_no_error(words: list[str]) -> None:
    ended = run(words, "| true")
    assert ended.returncode in (0, 1) and ended.stderr == ""


def test_a_report_is_written_whoever_reads(tmp_path: Path) -> None:
    report.save(RACE, tmp_path)
    ended = run(["report", str(tmp_path)], "| true")
    assert ended.returncode in (0, 1) and ended.stderr == ""
    assert (tmp_path / "report.html").exists() and (tmp_path / "loss.svg").exists()


def test_a_full_disk_is_one_line() -> None:
    ended = run([], ">/dev/full")
    assert ended.returncode == 2
    assert ended.stderr == (
        "laconic: No space left on device: free some space, or choose another disk\n"
    )


def test_closed_streams_are_no_error(tmp_path: Path) -> None:
    report.save(RACE, tmp_path)
    assert run(["report", str(tmp_path)], "<&- >&- 2>&-").returncode == 0
    assert run(["nonsense"], "2>&-").returncode == 2
    assert run(["nonsense"], "2>/dev/full").returncode == 2


@pytest.mark.parametrize("encoding", ["ascii"])
def test_any_encoding_will_do(encoding: str, tmp_path: Path) -> None:
    report.save(RACE, tmp_path)
    ended = subprocess.run(
        [*LACONIC, "report", str(tmp_path)],
        env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "120"},
        capture_output=True,
    )
    assert ended.returncode == 0 and ended.stderr == b""
    said = ended.stdout.decode(encoding)
    assert "4 hosts x 1 process" in said or "4 hosts × 1 process" in said
    assert "?" not in said


def test_a_narrow_terminal_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report.save(RACE, tmp_path)
    monkeypatch.setenv("COLUMNS", "20")
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "…" not in said and "local_sgd(12)" in said and "waiting" in said
    monkeypatch.setenv("COLUMNS", "1")
    for name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0


def test_names_that_are_not_text_are_shown_as_far_as_possible() -> None:
    ended = subprocess.run([*LACONIC, "report", b"a\xffb"], capture_output=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith(b"laconic: cannot read a result from a?b: ")


def test_without_numpy_an_error_is_one_line() -> None:
    code = "import sys; sys.modules['numpy'] = None; from laconic.cli import main; "
    command = [
        sys.executable,
        "-W",
        "default",
        "-c",
        code + "sys.exit(main(['plan', '--rate', '1gbit']))",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended.stderr


def test_ctrl_c_is_one_line() -> None:
    with subprocess.Popen(
        [*LACONIC, "coordinator", "--port", "29473"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("coordinator at ")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=250)
    assert process.returncode == 130 and said == "laconic: interrupted\n"


# -- JSON ----


def test_json_has_keys_in_one_order_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    once = run([*ADVISE, "--json"])
    assert main([*ADVISE, "--json"]) == 0  # by a process of other hashes
    assert once.stdout == capsys.readouterr().out and once.stderr == ""
    assert once.stdout.isascii()
    found = json.loads(once.stdout)
    assert list(found)[:5] == ["facts", "rows", "guide", "recommendation", "code"]
