"""``laconic completion``: what shells offer, asked as a user asks, with the Tab key."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import laconic
from laconic.cli import COMMANDS, parsers
from laconic.cli.completion import FISH, candidates

STARTS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
}
PREPARES = {"bash": "PS1='> '; ", "zsh": "PS1='> '; autoload -Uz compinit; compinit -u -D; "}


def names(*words: str) -> list[str]:
    return [line.partition("\t")[0] for line in candidates(list(words))]


def test_commands_come_with_their_help() -> None:
    lines = [line.split("\t") for line in candidates([""])]
    assert {name: text for name, text in lines if not name.startswith("-")} == {
        name: command.help for name, command in COMMANDS.items()
    }
    assert names("ad") == ["advise"] and names("help", "ad") == ["advise"]
    assert names("nonsense", "") == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_every_command_is_offered_once(command: str) -> None:
    parser = parsers([command])[1][command]
    options = [name for action in parser._actions for name in action.option_strings]
    assert names(command, "-") == options
    assert all("%(" not in line and "%%" not in line for line in candidates([command, "-"]))


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
    assert names(*words.split(" ")) == found


def test_an_option_is_offered_again_only_if_it_is_repeatable() -> None:
    assert "--hosts" not in names("compare", "--hosts", "3", "--")
    assert "--hosts" not in names("compare", "--hosts=3", "--")
    assert "--peer" in names("compare", "--peer", "torchft", "--")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which ``laconic`` is this one."""
    command = tmp_path / "bin" / "laconic"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m laconic "$@"\n')
    command.chmod(0o755)
    source = str(Path(laconic.__file__).parents[1])
    path = f"{command.parent}:{os.environ['PATH']}"
    home = {"HOME": str(tmp_path), "ZDOTDIR": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    return {**os.environ, "PATH": path, "PYTHONPATH": source, "TERM": "dumb", **home}


TYPED = [
    ("laconic adv\t", "laconic advise "),
    ("laconic advise --work\t", "laconic advise --workload "),
    ("laconic advise --workload dig\t", "--workload digits "),
    ("laconic compare --rules my_\t", "--rules my_rules.py "),
    ("laconic report --out some_\t", "--out some_directory/"),
    ("laconic compare local\t", "laconic compare local_sgd "),
    ("laconic completion fi\t", "laconic completion fish "),
]
"""What is typed, with a tab at the end, and what the line becomes."""


@pytest.mark.parametrize("shell", [shell for shell in STARTS if shutil.which(shell)])
def test_tab_completes(shell: str, environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "my_rules.py").touch()
    (tmp_path / "some_directory").mkdir()
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        os.execvpe(STARTS[shell][0], STARTS[shell], environment)
    try:
        setup = f'{PREPARES[shell]}eval "$(laconic completion {shell})"; echo "rea"dy\n'
        os.write(terminal, setup.encode())
        read_until(terminal, "ready\r\n")
        for keys, line in TYPED:
            os.write(terminal, keys.encode())
            read_until(terminal, line)
            os.write(terminal, b"\x15")  # Ctrl-U: an empty line
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)


def test_fish_completes(environment: dict[str, str], tmp_path: Path) -> None:
    """With fish where it is installed; its script is complete in any case."""
    assert FISH.count("\n    end\n") == 1 and FISH.rstrip().endswith("'(__laconic_complete)'")
    if shutil.which("fish") is None:
        return
    (tmp_path / "my_rules.py").touch()
    (tmp_path / "some_directory").mkdir()
    for keys, line in TYPED:
        typed = keys.rstrip("\t")
        ask = f"laconic completion fish | source; complete -C '{typed}'"
        ended = subprocess.run(
            ["fish", "-c", ask], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        found = [each.partition("\t")[0] for each in ended.stdout.splitlines()]
        assert line.split()[-1] in found, (typed, ended)


def read_until(terminal: int, text: str) -> str:
    found = ""
    while text not in found:
        assert select.select([terminal], [], [], 20)[0], f"no {text!r} in {found!r}"
        found += os.read(terminal, 4096).decode(errors="replace").replace("\a", "")  # no beeps
    return found
