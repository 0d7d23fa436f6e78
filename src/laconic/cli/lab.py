"""``laconic lab``: run any program on an emulated slow network on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from laconic.cli.options import (
    BETWEEN,
    FREE,
    NETWORK,
    TYPES,
    declare,
    given,
    network_of,
    parse_limit,
)
from laconic.units import format_rate

if TYPE_CHECKING:
    from laconic.lab.emulation.faults import Plan
    from laconic.lab.emulation.injection import Happened
    from laconic.lab.emulation.program import Ended, Failure, Process, Settings

COLORS = (36, 32, 33, 35, 34)
"""Of the hosts' names on a terminal: ANSI's cyan, green, yellow, magenta and blue."""


def add(parser: Any) -> None:
    """Add the description and the options of the command."""
    parser.description = (
        "Run any program on hosts connected by a slow network, emulated on this machine. The "
        "program is started as by torchrun; if it is torchrun, it runs on every host."
    )
    parser.usage = "laconic lab [OPTIONS] [--] PROGRAM [ARGUMENTS]"
    declare(parser, "--hosts --per-host --out --seed", hosts=4, seed=0)
    network = parser.add_argument_group("network", f"{BETWEEN} RATE may be unlimited.")
    types = {**TYPES, "RATE": parse_limit}
    declare(network, NETWORK, by_host=True, types=types, bandwidth="100mbit", **FREE)
    faults = parser.add_argument_group(
        "faults",
        "With any of them the lab runs a coordinator, and LACONIC_COORDINATOR names it to the "
        "program. TIME counts from the start; HOST may be coordinator. Without --repair, killed "
        "programs do not come back.",
    )
    declare(faults, "--kill --hang --cut --repair")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Return the exit code of the first process that failed, or 0."""
    command: list[str] = arguments.command
    if command[:1] == ["--"]:
        command = command[1:]
    from laconic.lab.emulation import program
    from laconic.lab.emulation.jobs import terminate_as_exit

    network = network_of(arguments)
    network.check()
    if given(arguments, "--seed") and not given(arguments, "--jitter --loss"):
        raise ValueError("--seed is the seed of --jitter and --loss: give one of them")
    settings = program.Settings(
        tuple(command),
        network,
        arguments.per_host,
        arguments.out,
        faults_of(arguments, network.hosts),
        arguments.repair,
    )
    with terminate_as_exit():
        ended = program.run(settings, Display(settings))
    return (ended.first and ended.first.outcome.exit_code) or 0


def faults_of(arguments: argparse.Namespace, hosts: int) -> Plan | None:
    """Return the faults that the options describe, or None without such options."""
    from laconic.lab.emulation import faults

    found = [
        *(faults.parse("kill", text) for text in arguments.kill),
        *(faults.parse("hang", text) for text in arguments.hang),
        *(faults.parse("cut", text) for text in arguments.cut),
    ]
    if not found:
        if arguments.repair is not None:
            raise ValueError("--repair needs --kill, --hang or --cut")
        return None
    plan = faults.Plan(tuple(found))
    plan.check(hosts)
    return plan


class Display:
    """Shows the processes' output, and a summary.

    Each line of output starts with the name of its process. The processes' stdout goes to our
    stdout; their stderr and everything else goes to our stderr.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def started(self, reason: str | None) -> None:
        """Print what the programs run on, and what is not emulated."""
        network = self._settings.network
        log(str(network))
        if reason is not None:
            log(f"{reason}; all hosts are this machine")
            log("NOT slowed down: programs without laconic. laconic slows its own messages")
            if network.impaired:
                log("latency: half of it is added by laconic to each of its own messages")

    def printed(self, process: Process, error: bool, lines: Sequence[bytes]) -> None:
        """Print lines of a process."""
        stream, prefix = sys.stderr if error else sys.stdout, f"{process.name} | "
        if stream.isatty():
            prefix = f"\x1b[{COLORS[process.host % len(COLORS)]}m{prefix}\x1b[0m"
        write(stream, b"".join(prefix.encode() + line + b"\n" for line in lines))

    def happened(self, happened: Happened) -> None:
        """Print what the lab did to a host."""
        log(str(happened))

    def failed(self, first: Failure) -> None:
        """Print which process failed, and how."""
        from laconic.lab.emulation.program import GRACE_SECONDS

        single = self._settings.network.hosts * (self._settings.per_host or 1) == 1
        others = "" if single else f"; the others are ended within {GRACE_SECONDS:g} s"
        log(f"{first.process.name} failed: {first.outcome.how}{others}")

    def ended(self, ended: Ended) -> None:
        """Print a summary."""
        if ended.sent is not None:
            log("sent, with all headers, and the mean rate:")
            for host, sent in enumerate(ended.sent):
                rate = format_rate(8 * sent / ended.seconds)
                log(f"  host{host}  {sent / 1e6:10.2f} MB  {rate}")
        if ended.happened:
            log("faults:")
            for happened in ended.happened:
                log(f"  {happened}")
        if ended.first is not None:
            name = ended.first.process.name
            log(f"{name} failed first: {ended.first.outcome.how}; its last lines:")
            for last in ended.first.last:
                log(f"  {last.decode(errors='replace')}")
        log(f"{ended.seconds:.1f} s")


def log(text: str) -> None:
    """Print one line of our own on stderr."""
    write(sys.stderr, f"laconic: {text}\n".encode())


def write(stream: TextIO, data: bytes) -> None:
    """Write to one of our streams."""
    stream.buffer.write(data)
    stream.flush()
