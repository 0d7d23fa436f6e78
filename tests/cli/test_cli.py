"""What all commands have in common: the overview, errors in one line, streams that fail, JSON, and
what shells complete."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import laconic
from laconic.cli import COMMANDS, main, overview
from laconic.cli.completion import candidates
from laconic.lab.race import report

from tests.support.gloo import free_port
from tests.support.races import FULL

LACONIC = [sys.executable, "-m", "laconic"]
ADVISE = ["advise", "--params", "1M", "--step-time", "0.1s", "--bandwidth", "1gbit", "--latency",
          "1ms", "--nodes", "4"]  # fmt: skip


def exits(words: list[str], code: int) -> None:
    """The command ends by itself, as ``--help`` and wrong options do."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == code


def test_the_overview_lists_each_command_and_each_explains_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = overview()
    assert all(f" {name} " in text and c.help in text for name, c in COMMANDS.items() if c.group)
    assert len(text.splitlines()) <= 16 and max(map(len, text.splitlines())) <= 80
    for words in ([], ["--help"], ["help"]):
        assert main(words) == 0
        assert capsys.readouterr().out == text + "\n"
    for name in COMMANDS:
        for words in ([name, "--help"], ["help", name]):
            exits(words, 0)
            assert capsys.readouterr().out.startswith(f"usage: laconic {name} ")
    monkeypatch.setenv("COLUMNS", "1")
    exits(["compare", "--help"], 0)


@pytest.mark.fault("a second value for the same option replaced the first silently")
@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("compare", "--hosts", "3"),
        ("compare", "--bandwidth", "1mbit"),
        ("lab", "--hosts", "2"),
        ("advise", "--params", "1M"),
        ("advise", "--dtype", "bfloat16"),
        ("plan", "--rate", "1gbit"),
        ("tune", "--trials", "3"),
        ("doctor", "--rank", "1"),
        ("demo", "--seconds", "3"),
        ("keys", "--days", "3"),
        ("report", "--out", "x"),
    ],
)
def test_an_option_with_one_value_is_given_once(
    command: str, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exits([command, option, value, option, value], 2)
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("advice", "no command 'advice' (did you mean 'advise'?): choose from the commands "),
        ("--verbose", "no option '--verbose': choose from the commands demo, "),
        ("help me", "no command 'me': choose from the commands "),
        (f"{' '.join(ADVISE)} --recipe locl_sgd(3)", "no recipe 'locl_sgd' in 'locl_sgd(3)' (did"),
        (f"{' '.join(ADVISE)} --recipe ddp(", "cannot read the recipe 'ddp(': write it as in Pyth"),
        (f"{' '.join(ADVISE)} --plot no/such/a.png", "--plot no/such/a.png: no such directory"),
        ("report bytes", "cannot read a result from bytes: 'utf-8' codec can't decode"),
        ("report good --out text", "text: File exists: give the path of a directory"),
        ("report good --out text/a", "text/a: Not a directory: give a path whose"),
        ("report good --out /proc/report", "/proc/report: No such file or directory"),
        ("keys text", "text: File exists: give the path of a directory, or a new one"),
        ("watch missing --once", "no metrics in missing: check that the run writes there"),
        ("coordinator --host 192.0.2.1", "cannot listen at 192.0.2.1:29400: "),
        ("tune ddp --out text", "text: File exists: give the path of a directory"),
        ("lab --out text true", "cannot create text: File exists"),
    ],
)
def test_a_mistake_is_one_line(
    words: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("{\n")
    Path("bytes").write_bytes(b"\xff\xfe\xfd")
    report.save(FULL, Path("good"))
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"laconic: {said}") and captured.err.count("\n") == 1
    assert not captured.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("compare --hosts x", "argument --hosts: invalid int value: 'x'"),
        ("compare ddp --seconds 3 --steps 4", "not allowed with argument"),
        ("tune --trials 9 --budget 9min", "not allowed with argument"),
        ("plan --steps x", "argument --steps: not a count: 'x'; give a positive whole number"),
        ("completion csh", "argument SHELL: invalid choice: 'csh' (choose from "),
        ("report", "the following arguments are required: DIR"),
        ("watch x --zzz", "unrecognized arguments: --zzz"),
    ],
)
def test_a_mistake_in_options_is_one_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exits(words.split(), 2)
    captured = capsys.readouterr()
    name = words.split()[0]
    assert captured.err.startswith(f"laconic {name}: ") and captured.err.count("\n") == 1
    assert said in captured.err and captured.err.endswith(f"; see laconic {name} --help\n")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("one\n  two\n"), 2, "one; two"),
        (PermissionError(errno.EACCES, "Permission denied", "a/b"), 2, "choose a path that you ma"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "free some space, or choose anoth"),
        (ModuleNotFoundError("no", name="rich.table"), 2, "pip install -e '.[lab]'"),
        (MemoryError(), 1, "not enough memory: try a smaller model or fewer workers"),
        (KeyError("x"), 1, "KeyError: 'x': set LACONIC_TRACEBACK=1 to see where"),
        (laconic.LinkError("rank 1 ended"), 2, "rank 1 ended"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
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


# -- streams, in programs of their own ----


def run(words: list[str], shell: str) -> subprocess.CompletedProcess[str]:
    """Run a command with redirections in ``shell``, such as ``2>&-``."""
    line = 'exec "$@" ' + shell if "|" not in shell else f'"$@" {shell}'
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line, "bash", *LACONIC, *words],
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.mark.slow
def test_streams_that_fail_are_no_error_or_one_line(tmp_path: Path) -> None:
    report.save(FULL, tmp_path)
    for words in ([], ["compare", "--help"], [*ADVISE, "--all"], ["report", str(tmp_path)]):
        ended = run(words, "| true")
        assert ended.returncode in (0, 1) and ended.stderr == ""
    assert (tmp_path / "report.html").exists(), "whoever reads"
    ended = run([], ">/dev/full")
    assert ended.returncode == 2 and ended.stderr.startswith("laconic: No space left on device: ")
    assert run(["report", str(tmp_path)], "<&- >&- 2>&-").returncode == 0
    assert run(["nonsense"], "2>&-").returncode == run(["nonsense"], "2>/dev/full").returncode == 2
    said = run(["report", str(tmp_path)], "").stdout
    assert "4 hosts" in said and "?" not in said


@pytest.mark.slow
def test_help_loads_no_torch_and_ctrl_c_is_one_line() -> None:
    code = "import sys; from laconic.cli import main; main([]); print(*sys.modules)"
    command = [sys.executable, "-s", "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = set(ended.stdout.split())
    assert "laconic.cli" in loaded and not loaded & {"torch", "numpy", "rich", "matplotlib"}
    with subprocess.Popen(
        [*LACONIC, "coordinator", "--port", str(free_port())],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("coordinator at ")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=250)
    assert process.returncode == 130 and said == "laconic: interrupted\n"


# -- completion ----


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("compare --wor", ["--workload"]),
        ("compare --workload ", ["digits", "text", "text-small", ":files"]),
        ("compare --workload t", ["text", "text-small", ":files"]),
        ("compare --workload=t", ["--workload=text", "--workload=text-small", ":files"]),
        (
            "compare --workload = t",
            ["text", "text-small", ":files"],
        ),  # bash makes three words of it
        ("compare --workload =", ["digits", "text", "text-small", ":files"]),
        ("compare --hosts ", []),
        ("compare --hosts 3 loc", ["local_sgd"]),
        ("compare ddp() stream", ["streaming_diloco"]),
        ("compare slowmo(local", ["slowmo(local_sgd"]),
        ("compare 'dilo", ["'diloco"]),
        ("advise --dtype b", ["bfloat16"]),
        ("advise --recipe power", ["power_sgd"]),
        ("tune demo", ["demo"]),
        ("report ", [":directories"]),
        ("report one --out ", [":directories"]),
        ("watch ", [":files"]),
        ("keys --ca ", [":directories"]),
        ("keys made ", []),
        ("lab cl", ["clean", ":files"]),
        ("lab -- ", ["clean", ":files"]),
        ("lab --hosts 2 python ", [":files"]),
        ("completion ", ["bash", "zsh", "fish"]),
    ],
)
def test_what_may_follow(words: str, found: list[str]) -> None:
    assert [line.partition("\t")[0] for line in candidates(words.split(" "))] == found


def test_commands_and_options_are_offered_with_their_help_and_once() -> None:
    lines = [line.split("\t") for line in candidates([""])]
    assert {name: text for name, text in lines if not name.startswith("-")} == {
        name: command.help for name, command in COMMANDS.items()
    }
    for name in COMMANDS:
        found = [line.split("\t") for line in candidates([name, "-"])]
        assert sorted({"--help", "-h"} & {option for option, _ in found}) == ["--help", "-h"]
        assert all(text and "%(" not in text and "%%" not in text for _, text in found)
    again = [line.partition("\t")[0] for line in candidates(["compare", "--hosts=3", "--"])]
    assert "--hosts" not in again and "--peer" in again


@pytest.mark.slow
def test_the_script_of_a_shell_completes(tmp_path: Path) -> None:
    command = tmp_path / "laconic"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m laconic "$@"\n')
    command.chmod(0o755)
    script = """
    eval "$(laconic completion bash)"
    function=$(complete -p laconic | sed "s/.*-F //; s/ .*//")
    COMP_WORDS=(laconic adv) COMP_CWORD=1
    $function laconic adv laconic
    echo "${COMPREPLY[@]}"
    """
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    assert ended.stdout.strip() == "advise", ended
