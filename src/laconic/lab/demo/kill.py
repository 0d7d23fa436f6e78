"""``laconic demo --kill``: a worker is killed and replaced, before the user's eyes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from laconic.lab.demo.worker import HOSTS, RECIPE
from laconic.lab.emulation import program
from laconic.lab.emulation.faults import Kill, Plan
from laconic.lab.emulation.injection import Happened
from laconic.lab.emulation.program import Ended, Failure, Network, Process, Settings
from laconic.lab.race.verdict import listed

STEPS = 500
VICTIM, KILL_SECONDS, RESTART_SECONDS = 2, 25.0, 3.0
SHOWN_STEPS = 50
"""Steps between two lines about the loss."""

INTRODUCTION = f"""\
Four workers, each on an emulated host with 100 Mbit/s, train one model together for {STEPS} steps,
under laconic.{RECIPE}. After {KILL_SECONDS:g} s, host{VICTIM} is killed, and {RESTART_SECONDS:g} s
later its program is started again. Nobody reads a checkpoint. Seconds count from the start.
"""


@dataclass
class Record:
    """What is known of the run. Times are in seconds since 1970; None: it has not happened.

    ``noticed``: the others go on without the killed worker. ``round``: their first step after that,
    whose messages have all arrived. ``asked``, ``joined``: the replacement asks to take part, and
    takes part, after ``step`` steps of the run and with ``bytes`` of state. ``digests``: of the
    final models, by host. ``goodput``: steps that count, and steps computed.
    """

    killed: float | None = None
    noticed: float | None = None
    round: float | None = None
    asked: float | None = None
    joined: float | None = None
    step: int = 0
    bytes: int = 0
    digests: dict[int, str] = field(default_factory=dict)
    goodput: tuple[int, int] | None = None


def sentences(record: Record) -> list[str]:
    """Return what the run shows: about the loss of a worker, about its replacement, and about the
    final models."""
    return [_about_loss(record), _about_replacement(record), _about_models(record)]


def _about_loss(record: Record) -> str:
    if record.killed is None:
        return f"host{VICTIM} was not killed: the training was over before."
    if record.round is None:
        return f"host{VICTIM} was killed, and the others did not go on."
    return (
        f"host{VICTIM} was killed, and {record.round - record.killed:.1f} s later the others had "
        "completed their next round without it."
    )


def _about_replacement(record: Record) -> str:
    if record.killed is None:
        return "So there was nothing to replace."
    if record.asked is None or record.joined is None:
        return "No replacement has taken part."
    return (
        f"Its replacement received {record.bytes / 1e6:.1f} MB of state from another worker and "
        f"what had changed meanwhile, took part {record.joined - record.asked:.1f} s after it had "
        f"asked to, and went on with all from step {record.step + 1}."
    )


def _about_models(record: Record) -> str:
    equal = len(set(record.digests.values())) == 1
    if len(record.digests) < HOSTS:
        hosts = [f"host{host}" for host in sorted(record.digests)]
        text = f"Only {listed(hosts)} finished" if hosts else "No worker finished"
    elif equal:
        text = f"At the end all {HOSTS} models are equal in every bit"
    else:
        text = f"At the end the {HOSTS} models differ"
    if record.goodput is None:
        return f"{text}."
    counted, computed = record.goodput
    return f"{text}; {counted:,} of the {computed:,} steps that were computed count."


class Watch:
    """Prints what happens, and records it."""

    def __init__(self, console: Console) -> None:
        self.record, self._console = Record(), console
        self._start = 0.0
        self._joins = 0

    def _log(self, time: float, text: str) -> None:
        self._console.print(f"{time - self._start:6.1f} s  {text}")

    def started(self, reason: str | None) -> None:
        import time

        self._start = time.time()
        if reason is not None:
            self._console.print(f"{reason}: laconic slows its own messages down instead.\n")
        self._log(self._start, f"{HOSTS} programs and a coordinator start")

    def printed(self, process: Process, error: bool, lines: Sequence[bytes]) -> None:
        for line in lines:
            if error or not line.startswith(b"{"):
                continue
            self._event(process.host, json.loads(line))

    def _event(self, host: int, event: dict[str, Any]) -> None:
        record, time, kind = self.record, event["time"], event["event"]
        lost = record.killed is not None
        if kind == "attach" and lost and host == VICTIM:
            record.asked = time
            self._log(time, f"host{host} has started again and asks to take part")
        elif kind == "begin" and lost and host == VICTIM:
            record.joined, record.step, record.bytes = time, event["step"], event["bytes"]
            took = time - (record.asked or time)
            self._log(
                time, f"host{host} has received {event['bytes'] / 1e6:.1f} MB in {took:.1f} s"
            )
        elif host == 0 and kind == "begin":
            self._log(time, f"the training begins with {event['workers']} workers")
        elif host == 0 and kind == "view":
            self._log(time, f"{event['workers']} workers take part after step {event['step']}")
            if lost and record.noticed is None:
                record.noticed = time
        elif host == 0 and kind == "step":
            if record.noticed is not None and record.round is None and event["round"]:
                record.round = time
                since = time - (record.killed or time)
                self._log(time, f"the next round is complete, {since:.1f} s after the kill")
            if event["step"] % SHOWN_STEPS == 0:
                text = f"step {event['step']}: loss {event['loss']:.2f}"
                self._log(time, f"{text}, {event['workers']} workers")
        elif kind == "end":
            record.digests[host] = event["digest"]
            self._log(time, f"host{host} has finished: its model's digest is {event['digest']}")

    def rates(self, seconds: float, rates: Sequence[float] | None) -> None:
        """Do nothing: the events tell enough."""

    def happened(self, happened: Happened) -> None:
        if happened.what == "killed":
            self.record.killed = happened.time
        self._log(happened.time, f"{happened.host} is {happened.what}")

    def failed(self, first: Failure) -> None:
        last = b" ".join(first.last[-1:]).decode(errors="replace")
        self._console.print(f"{first.process.name} failed ({first.how}): {last}")

    def ended(self, ended: Ended) -> None:
        if ended.goodput is not None:
            self.record.goodput = ended.goodput.counted, ended.goodput.computed


def run() -> int:
    """Run the demo, and return 0 if all workers have finished with equal models."""
    from laconic.lab.emulation.jobs import terminate_as_exit

    console = Console(highlight=False, markup=False)
    console.width = min(console.width, 80)
    console.print(" ".join(INTRODUCTION.split()), end="\n\n")
    watch = Watch(console)
    argv = (sys.executable, "-m", "laconic.lab.demo.worker", str(STEPS))
    plan = Plan((Kill(KILL_SECONDS, VICTIM),))
    settings = Settings(argv, Network(HOSTS), faults=plan, restart=RESTART_SECONDS)
    with terminate_as_exit():
        ended = program.run(settings, watch)
    console.print()
    for number, sentence in enumerate(sentences(watch.record), start=1):
        console.print(f"{number}. {sentence}")
    equal = len(set(watch.record.digests.values())) == 1
    return 0 if ended.first is None and equal and len(watch.record.digests) == HOSTS else 1
