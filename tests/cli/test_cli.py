"""What all commands have in common: the overview, options that are given once, errors in one line,
and streams that fail."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import laconic
from laconic.cli import COMMANDS, main
from laconic.cli.commands import commands
from laconic.cli.options import OPTIONS
from laconic.lab.race import report

from tests.support.races import FULL

LACONIC = [sys.executable, "-m", "laconic"]


def exits(words: list[str], code: int) -> None:
    """The command ends by itself, as ``--help`` and wrong options do."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == code


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    exits([], 0)
    overview = capsys.readouterr().out
    assert all(f" {name} " in overview for name in COMMANDS)
    for name in COMMANDS:
        exits([name, "--help"], 0)
        assert capsys.readouterr().out.startswith(f"usage: laconic {name} ")


@pytest.mark.fault("a second value for the same option replaced the first silently")
@pytest.mark.parametrize(
    "line", ["lab --hosts 2", "advise --dtype bfloat16", "plan --bandwidth 1gbit", "keys --days 3"]
)
def test_an_option_with_one_value_is_given_once(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *option = line.split()
    exits([name, *option, *option], 2)
    assert "is given twice" in capsys.readouterr().err


@pytest.mark.fault("lab took the last of two values for a host; compare did not know host2")
@pytest.mark.parametrize("option", ["bandwidth", "latency"])
@pytest.mark.parametrize("command", ["lab", "compare"])
def test_a_host_has_one_value(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value = "1mbit" if option == "bandwidth" else "1ms"
    twice = [f"--{option}", f"host1={value}", f"--{option}", f"1={value}"]
    exits([command, *twice, "true" if command == "lab" else "ddp"], 2)
    assert f"--{option}: has two values for host 1" in capsys.readouterr().err


def test_an_option_is_one_thing_everywhere() -> None:
    _, each = commands()
    actions = [a for parser in each.values() for a in parser._actions if a.option_strings]
    found = {name: a.help or "" for a in actions for name in a.option_strings}
    assert {*found} == {*OPTIONS, "-h", "--help"}
    for action in actions[1:]:
        for name in {*action.option_strings} & {*OPTIONS}:
            value, about = OPTIONS[name]
            assert (action.help or "").startswith(about.replace("%", "%%"))
            assert (action.metavar or "") in (value, f"[HOST=]{value}")
    assert len({about for _, about in OPTIONS.values()}) == len(OPTIONS)


@pytest.mark.fault("--latency was a round trip in lab and compare, and half of one elsewhere")
def test_a_latency_is_a_round_trip(capsys: pytest.CaptureFixture[str]) -> None:
    """An average of two workers takes two messages, one round trip."""
    numbers = "--params 1k --step-time 1s --bandwidth 1000gbit --workers 2"
    assert main(["advise", *numbers.split(), "--latency", "200ms", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["recipe"] == "ddp()" and rows[0]["seconds"] == pytest.approx(1.2)
    numbers = "--params 1k --step-time 1s --bandwidth 1000gbit --spread 0% --workers 2 --sites 2"
    plan = ["plan", *numbers.split(), "--steps", "8", "--latency", "200ms", "--json"]
    assert main([*plan, "local_sgd(1)"]) == 0
    found = json.loads(capsys.readouterr().out)["recipes"][0]
    assert found["seconds"]["median"] == pytest.approx(8 * 1.2)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("one\n  two\n"), 2, "one; two"),
        (PermissionError(errno.EACCES, "Permission denied", "a/b"), 2, "a/b: Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "laconic: No space left on device"),
        (ModuleNotFoundError("no", name="rich.table"), 2, "pip install -e '.[lab]'"),
        (KeyError("x"), 1, "KeyError: 'x': set LACONIC_TRACEBACK=1 to see where"),
        (laconic.LinkError("rank 1 ended"), 2, "rank 1 ended"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_every_error_is_one_line_with_the_next_step_and_an_exit_code(
    error: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr("laconic.cli.report.run", fail)
    assert main(["report", "x"]) == code
    told = capsys.readouterr().err
    assert re.fullmatch(r"laconic: .*\n", told) and said in told
    monkeypatch.setenv("LACONIC_TRACEBACK", "1")
    if isinstance(error, Exception):
        with pytest.raises(type(error)):
            main(["report", "x"])


# -- in programs of their own ----


def run(shell: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash, in which ``laconic`` is the command."""
    script = f'set -o pipefail; laconic() {{ {sys.executable} -m laconic "$@"; }}; {shell}'
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=250)


@pytest.mark.slow
def test_streams_that_fail_are_no_error_or_one_line(tmp_path: Path) -> None:
    report.save(FULL, tmp_path)
    for words in ("", "compare --help", f"report {tmp_path}"):
        ended = run(f"laconic {words} | true")
        assert ended.returncode in (0, 1) and ended.stderr == ""
    assert (tmp_path / "report.html").exists(), "whoever reads"
    ended = run(f"laconic report {tmp_path} >/dev/full")
    assert ended.returncode == 2 and ended.stderr.startswith("laconic: No space left on device")
    assert run("laconic nonsense 2>/dev/full").returncode == 2
    said = run(f"PYTHONIOENCODING=ascii laconic report {tmp_path}").stdout
    assert "4 hosts" in said


@pytest.mark.slow
def test_words_are_completed(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    line = "laconic compare --works"
    told = {"_ARGCOMPLETE": "1", "COMP_LINE": line[:-1], "COMP_POINT": str(len(line) - 1)}
    told["_ARGCOMPLETE_STDOUT_FILENAME"] = str(tmp_path / "found")
    subprocess.run(LACONIC, env={**os.environ, **told}, check=False)
    assert (tmp_path / "found").read_text().split() == ["--workload"]
