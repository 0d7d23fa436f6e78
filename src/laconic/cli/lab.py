"""``laconic lab``: run any program on hosts joined by a slow network, on this machine."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.errors import install
from laconic.units import format_rate, parse_duration, parse_rate

if TYPE_CHECKING:
    from laconic.lab.emulation.program import Ended, Failure, Network, Process, Settings

COLOURS = ("cyan", "green", "yellow", "magenta", "blue")
"""Of the hosts' names on a terminal."""


def add(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "lab",
        help="run any program on an emulated slow network",
        description="Run any program on hosts joined by a slow network, emulated on this machine: "
        "started as torchrun starts it, or torchrun itself on every host.",
        epilog="laconic lab clean ends what labs have left behind that were killed.",
        usage="laconic lab [OPTIONS] [--] PROGRAM [ARGUMENTS]\n"
        "       laconic lab [OPTIONS] --shell HOST\n"
        "       laconic lab clean",
    )
    parser.add_argument("--hosts", type=int, help="default: 4")
    parser.add_argument("--per-host", type=int, metavar="N", help="processes on each (1)")
    parser.add_argument(
        "--bandwidth", metavar="RATE", help="of each host, such as 20mbit, or unlimited (100mbit)"
    )
    parser.add_argument(
        "--bandwidth-host",
        metavar="HOST=RATE",
        action="append",
        help="of one host, such as 2=10mbit; may be repeated",
    )
    parser.add_argument(
        "--latency", metavar="TIME", help="added to each message of laconic's, such as 20ms (0)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep each rank's output and rates")
    parser.add_argument(
        "--shell",
        metavar="HOST",
        help="a shell on a host: of the lab that runs (HOST@PROCESS: of that one), or of a new one "
        "where none runs or where the network is described here",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The exit code of the first process that failed, 0 if none did."""
    command: list[str] = arguments.command
    if command == ["clean"]:
        return clean()
    if command[:1] == ["--"]:
        command = command[1:]
    try:
        import rich  # noqa: F401
    except ImportError as error:
        raise ImportError(f"laconic lab needs {error.name}: {install('lab')}") from None
    from laconic.lab.emulation import program
    from laconic.lab.emulation.jobs import terminate_as_exit

    network = network_of(arguments)
    if arguments.shell is not None:
        if command:
            raise ValueError("give a program or --shell, not both: a second terminal may join")
        return shell(arguments, network)
    settings = program.Settings(tuple(command), network, arguments.per_host, arguments.out)
    with terminate_as_exit(), Display(settings) as display:
        ended = program.run(settings, display)
    return 0 if ended.first is None else ended.first.exit_code


def network_of(arguments: argparse.Namespace) -> Network:
    """The network that the options describe."""
    from laconic.lab.emulation.program import Network

    single = {}
    for text in arguments.bandwidth_host or ():
        host, equals, rate = text.partition("=")
        if not equals:
            raise ValueError(f"not a host's bandwidth: {text!r}; give HOST=RATE, as in 2=10mbit")
        single[parse_host(host)] = parse_bandwidth(rate)
    network = Network(
        hosts=4 if arguments.hosts is None else arguments.hosts,
        bandwidth=parse_bandwidth(arguments.bandwidth or "100mbit"),
        host_bandwidth=single,
        latency=parse_duration(arguments.latency or "0"),
    )
    network.check()
    return network


def parse_bandwidth(text: str) -> float | None:
    """A rate in bit/s, None for ``unlimited``."""
    return None if text.strip().lower() == "unlimited" else parse_rate(text)


def parse_host(text: str) -> int:
    """The number of a host given as ``2`` or ``host2``."""
    number = text.strip().removeprefix("host")
    if not number.isascii() or not number.isdecimal():
        raise ValueError(f"not a host: {text!r}; give its number, as in 2 or host2")
    return int(number)


def shell(arguments: argparse.Namespace, network: Network) -> int:
    """A shell on a host of the lab that runs, or of a new one."""
    from laconic.lab.emulation import cluster
    from laconic.lab.emulation.jobs import terminate_as_exit
    from laconic.lab.emulation.shell import open_shell

    text, at, launcher = arguments.shell.partition("@")
    host = parse_host(text)
    described = (arguments.hosts, arguments.bandwidth, arguments.bandwidth_host, arguments.latency)
    found = cluster.running()
    ours = [name for name in found if cluster.trusted(name)]
    # another user may have taken the name of one of ours, or a newer one
    running = {name.split("-")[2]: name for name in (*found, *ours)}
    names = (
        []
        if any(value is not None for value in described)
        else [n.split("-")[2] for n in ours or found]
    )
    if at:
        if launcher not in running:
            choices = ", ".join(running) or "none"
            raise ValueError(f"no lab of process {launcher!r} runs here; these do: {choices}")
        names = [launcher]
    with contextlib.ExitStack() as stack:
        stack.enter_context(terminate_as_exit())
        if names:
            entry = cluster.join(running[names[-1]], host)
            for descriptor in entry.descriptors():
                stack.callback(os.close, descriptor)
            newest = f", the newest of {', '.join(names)}" if len(names) > 1 else ""
            say(f"host{host} of the lab of process {names[-1]}{newest}; Ctrl-D leaves")
        else:
            cluster.check_host(host, network.hosts)
            new = stack.enter_context(
                cluster.Cluster(
                    network.hosts,
                    bandwidth=network.bandwidth,
                    host_bandwidth=network.host_bandwidth,
                )
            )
            entry = new.entry(host)
            say(f"{describe(network)}; others join by laconic lab --shell; Ctrl-D ends it")
        return open_shell(entry, {**os.environ, **cluster.interface_variables("eth0")})


def clean() -> int:
    """End what is left of labs whose launcher is dead; 1 if something could not be ended."""
    from laconic.lab.emulation import orphans

    stuck, running = 0, set()
    found = sorted(orphans.members(), key=lambda member: member.pid)
    for member in found:
        if member.launcher_lives:
            running.add(member.launcher)
            continue
        what = f"process {member.pid} ({member.command[:60]}) of the lab of process"
        ended = orphans.end(member)
        stuck += not ended
        print(f"{'ended' if ended else 'cannot end'} {what} {member.launcher}")
    if all(member.launcher_lives for member in found):
        print("nothing is left of labs that have ended")
    for launcher in sorted(running):
        print(f"left alone: the lab of process {launcher}, which runs")
    return 1 if stuck else 0


def describe(network: Network) -> str:
    """The hosts and their rates, in words."""

    def rate(value: float | None) -> str:
        return "unlimited" if value is None else format_rate(value)

    hosts = "1 host" if network.hosts == 1 else f"{network.hosts} hosts"
    single = [f", host{h} {rate(value)}" for h, value in sorted(network.host_bandwidth.items())]
    return f"{hosts}, {rate(network.bandwidth)} each{''.join(single)}"


class Display:
    """What the processes print, each line behind their name, above a line of the hosts' rates
    while a terminal watches; and what became of it all. Their stdout goes to ours, their stderr
    and all else to stderr."""

    def __init__(self, settings: Settings) -> None:
        from rich.console import Console
        from rich.live import Live

        self._settings = settings
        watching = [stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr)]
        self._watching = watching
        # One for both: whatever is printed past it would tear the line of rates.
        self._console = Console(stderr=watching[1], highlight=False, soft_wrap=True)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Display:
        if any(self._watching):
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def started(self, reason: str | None) -> None:
        """Say what the programs run on, above all what is not emulated."""
        network = self._settings.network
        self._say(describe(network))
        if reason is not None:
            self._say(f"{reason}; all hosts are this machine")
            self._say("NOT slowed down: programs without laconic. laconic slows its own messages")
        if network.latency:
            milliseconds = f"{network.latency * 1e3:g} ms"
            self._say(f"latency {milliseconds}: by laconic, for its own messages; others have none")

    def printed(self, process: Process, error: bool, lines: Sequence[bytes]) -> None:
        """Pass on whole lines."""
        if not self._watching[error]:
            prefix = f"{process.name} | ".encode()
            write(2 if error else 1, b"".join(prefix + line + b"\n" for line in lines))
            return
        from rich.text import Text

        style = COLOURS[process.host % len(COLOURS)]
        said = Text()
        for number, line in enumerate(lines):
            said.append("\n" * (number > 0)).append(f"{process.name} | ", style)
            said.append_text(Text.from_ansi(line.decode(errors="replace")))
        self._console.print(said)

    def rates(self, seconds: float, rates: Sequence[float] | None) -> None:
        """Renew the line of rates."""
        if any(self._watching):
            self._live.update(rates_line(seconds, rates), refresh=True)

    def failed(self, first: Failure) -> None:
        """Say who failed, and how."""
        from laconic.lab.emulation.program import GRACE_SECONDS

        alone = self._settings.network.hosts * (self._settings.per_host or 1) == 1
        others = "" if alone else f"; the others are ended within {GRACE_SECONDS:g} s"
        self._say(f"{first.process.name} failed: {first.how}{others}")

    def ended(self, ended: Ended) -> None:
        """Sum up."""
        if ended.sent is not None:
            self._say("sent, with all headers, and the mean rate:")
            for host, sent in enumerate(ended.sent):
                rate = format_rate(8 * sent / ended.seconds)
                self._say(f"  host{host}  {sent / 1e6:10.2f} MB  {rate}")
        if ended.first is not None:
            name = ended.first.process.name
            self._say(f"{name} failed first: {ended.first.how}; its last lines:")
            for line in ended.first.last:
                self._say(f"  {line.decode(errors='replace')}")
        self._say(f"{ended.seconds:.1f} s")

    def _say(self, text: str) -> None:
        if self._watching[True]:
            self._console.print(f"laconic: {text}", markup=False)
        else:
            say(text)


def rates_line(seconds: float, rates: Sequence[float] | None) -> str:
    """What the hosts send now, for a line of 80 columns."""
    if rates is None:
        return f"{seconds:.0f} s"
    shown = (f"{rate / 1e6:.3g}" if rate < 1e9 else f"{rate / 1e6:.0f}" for rate in rates)
    hosts = "  ".join(f"host{host} ↑ {rate}" for host, rate in enumerate(shown))
    return f"{hosts}  Mbit/s  {seconds:.0f} s"


def say(text: str) -> None:
    """One line of our own, on stderr."""
    write(2, f"laconic: {text}\n".encode())


def write(descriptor: int, data: bytes) -> None:
    """Write all of it, past Python's buffers: what they could not write, they would try again when
    Python ends. Raises OSError saying where to."""
    name = {1: "standard output", 2: "standard error"}[descriptor]
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError as error:
        raise OSError(f"cannot write to {name}: {error.strerror}") from error
