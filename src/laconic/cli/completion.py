"""``laconic completion``: let a shell complete commands, options, recipes and files.

The shell's script asks ``laconic __complete WORDS`` what may follow, so it is right for every
version. The answers come from the commands' parsers and need no torch.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import Any

from laconic import MODULE_OF
from laconic.cli.commands import COMMANDS, parsers

BASH = """\
_laconic() {
    local IFS=$'\\n' line current=${COMP_WORDS[COMP_CWORD]}
    [[ $current == = ]] && current=
    COMPREPLY=()
    for line in $("${COMP_WORDS[0]}" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null); do
        case $line in
            :files) compopt -o filenames; COMPREPLY+=($(compgen -f -- "$current")) ;;
            :directories) compopt -o filenames; COMPREPLY+=($(compgen -d -- "$current")) ;;
            *) COMPREPLY+=("${line%%$'\\t'*}") ;;
        esac
    done
}
complete -F _laconic laconic
"""
ZSH = """\
#compdef laconic
_laconic() {
    local line
    local -a found
    for line in "${(@f)$("$words[1]" __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        case $line in
            :files) _files ;;
            :directories) _files -/ ;;
            ?*) found+=("${${line//:/\\\\:}/$'\\t'/:}") ;;
        esac
    done
    (( $#found )) && _describe laconic found
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _laconic "$@"
else
    compdef _laconic laconic
fi
"""
FISH = """\
function __laconic_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    for line in ($words[1] __complete $words[2..-1] "$current" 2>/dev/null)
        switch $line
            case ':files'
                __fish_complete_path "$current"
            case ':directories'
                __fish_complete_directories "$current"
            case '*'
                echo $line
        end
    end
end
complete -c laconic -f -a '(__laconic_complete)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
HOW = {
    "bash": 'eval "$(laconic completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(laconic completion zsh)" in ~/.zshrc, after compinit',
    "fish": "laconic completion fish | source in ~/.config/fish/config.fish",
}
FILES, DIRECTORIES = ":files", ":directories"
"""Answers in place of which the shell offers its own names."""
RECIPES = [*sorted(name for name in MODULE_OF if MODULE_OF[name].endswith("recipes")), "auto"]
VALUES = {
    "DIR": [DIRECTORIES],
    "OLD": [DIRECTORIES],
    "DTYPE": ["float32", "bfloat16", "float16", "float64"],
    "FILE": [FILES],
    "PATH": [FILES],
    "WORKLOAD": ["digits", "text", "text-small", FILES],
    "COMMAND": ["clean", FILES],
}
"""What may stand for a value with this name in the help. ``RECIPE`` is in `_values`."""


def add(parser: Any) -> None:
    """Add the description and the options of the command."""
    parser.description = (
        "Print a script that lets a shell complete laconic's commands, options, recipes and files."
    )
    parser.epilog = "To use it, write: " + "; ".join(HOW.values()) + "."
    parser.add_argument("shell", choices=SCRIPTS, metavar="SHELL", help="bash, zsh or fish")


def run(arguments: argparse.Namespace) -> int:
    """Print the script and return 0."""
    print(SCRIPTS[arguments.shell], end="")
    return 0


def complete(words: Sequence[str]) -> int:
    """Print what the last of the ``words`` after ``laconic`` may become, and return 0."""
    for line in candidates(list(words)):
        print(line)
    return 0


def candidates(words: list[str]) -> Iterator[str]:
    """Yield what the last of ``words`` may become, each with its help after a tab."""
    *before, current = words or [""]
    if not before or before == ["help"]:
        known = {name: command.help for name, command in COMMANDS.items()}
        if not before:
            known |= {"--help": "list the commands", "--version": "print the version"}
        yield from (f"{name}\t{text}" for name, text in known.items() if name.startswith(current))
        return
    if before[0] not in COMMANDS:
        return
    parser = parsers([before[0]])[1][before[0]]
    if current == "=":  # bash takes it for a word
        before, current = [*before, "="], ""
    action, given = _place(parser, [word for word in before[1:] if word != "="])
    option, equals, value = current.partition("=")
    options = {name: a for a in parser._actions for name in a.option_strings}
    if action is None and equals and option in options:
        yield from _values(options[option], value, f"{option}=")
    elif action is not None:
        yield from _values(action, current, "")
    elif current.startswith("-"):
        for name, each in options.items():
            if name.startswith(current) and each not in given:
                yield f"{name}\t{_help(each)}"
    else:
        rest = [a for a in parser._actions if not a.option_strings and a not in given]
        yield from _values(rest[0], current, "") if rest else ()


def _place(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[argparse.Action | None, list[argparse.Action]]:
    """Return the action whose value comes after ``words``, if it is certain, and those that need
    not be offered again."""
    options = {name: a for a in parser._actions for name in a.option_strings}
    positional = [a for a in parser._actions if not a.option_strings]
    due: argparse.Action | None = None
    given: list[argparse.Action] = []
    for word in words:
        if due is not None:
            due = None
        elif word in options or word.partition("=")[0] in options:
            action = options[word.partition("=")[0]]
            if not isinstance(action, argparse._AppendAction):
                given.append(action)
            due = action if action.nargs != 0 and word in options else None
        elif word == "--" and positional:
            return positional[0], given
        elif rest := [a for a in positional if a not in given]:
            if rest[0].nargs == argparse.REMAINDER:  # a program with its own arguments
                return argparse.Action([], "file"), given
            if rest[0].nargs is None:
                given.append(rest[0])
    return due, given


def _values(action: argparse.Action, current: str, prefix: str) -> Iterator[str]:
    """Yield the values of ``action`` that begin with ``current``, after ``prefix``."""
    name = action.metavar if isinstance(action.metavar, str) else action.dest
    choices = action.choices
    values = VALUES.get(name.upper(), []) if choices is None else list(choices)
    if name == "RECIPE":  # also inside another one, such as slowmo(local
        match = re.fullmatch(r"(.*?)(\w*)", current, re.DOTALL)
        assert match, "matches any text"
        values = [match[1] + recipe for recipe in RECIPES]
    for value in values:
        if value in (FILES, DIRECTORIES):
            yield value
        elif value.startswith(current):
            yield prefix + value


def _help(action: argparse.Action) -> str:
    return (action.help or "") % vars(action)
