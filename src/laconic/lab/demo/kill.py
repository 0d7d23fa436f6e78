"""``laconic demo --elastic``: a worker is killed and replaced, before the user's eyes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from laconic.lab.demo.worker import HOSTS, RECIPE
from laconic.lab.emulation import program
from laconic.lab.emulation.faults import Fault, Plan
from laconic.lab.emulation.injection import Happened
from laconic.lab.emulation.network import Network
from laconic.lab.emulation.program import Ended, Failure, Process, Settings
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

    ``began``: the training. ``noticed``: the others go on without the killed worker. ``round``:
    their first step after that, whose messages have all arrived. ``asked``, ``joined``: the
    replacement asks to take part, and takes part, with ``bytes`` of state. ``digests``: of the
    final models, by host. ``steps``: of the whole run.
    """

    began: float | None = None
    killed: float | None = None
    noticed: float | None = None
    round: float | None = None
    asked: float | None = None
    joined: float | None = None
    bytes: int = 0
    digests: dict[int, str] = field(default_factory=dict)
    steps: int = 0

    @property
    def early(self) -> bool:
        """Whether the worker was killed before the training began, as on a very slow machine."""
        return self.killed is not None and (self.began is None or self.killed < self.began)

    @property
    def equal(self) -> bool:
        """Whether all workers have finished with one model."""
        return len(self.digests) == HOSTS and len(set(self.digests.values())) == 1


def sentences(record: Record) -> list[str]:
    """Return what the run shows: about the loss of a worker, about its replacement, and about the
    final models."""
    return [_about_loss(record), _about_replacement(record), _about_models(record)]


def _about_loss(record: Record) -> str:
    if record.killed is None:
        return f"host{VICTIM} was not killed: its program had ended before."
    if record.early:
        return f"host{VICTIM} was killed before the training had begun, so nothing was lost."
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
    if record.early:
        return "Its replacement began with the others."
    return (
        f"Its replacement received {record.bytes / 1e6:.1f} MB of state from another worker and "
        f"what had changed meanwhile, and took part {record.joined - record.asked:.1f} s after it "
        "had asked to."
    )


def _about_models(record: Record) -> str:
    if len(record.digests) < HOSTS:
        hosts = [f"host{host}" for host in sorted(record.digests)]
        return f"Only {listed(hosts)} finished." if hosts else "No worker finished."
    models = f"After {record.steps} steps, the models of all {HOSTS} workers"
    return f"{models} are equal in every bit." if record.equal else f"{models} are NOT equal."


class Watch:
    """Prints what happens, and records it."""

    def __init__(self, console: Console) -> None:
        self.record, self._console = Record(), console
        self._start = 0.0

    def _log(self, at: float, text: str) -> None:
        self._console.print(f"{at - self._start:6.1f} s  {text}")

    def started(self, reason: str | None) -> None:
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
        record, at, kind = self.record, event["time"], event["event"]
        replaces = record.killed is not None and host == VICTIM
        if kind == "end":
            record.digests[host], record.steps = event["digest"], event["step"]
            self._log(at, f"host{host} has finished: its model's digest is {event['digest']}")
        elif kind == "attach" and replaces:
            record.asked = at
            self._log(at, f"host{host}'s new program asks to take part")
        elif kind == "begin" and replaces:
            record.joined, record.bytes = at, event["bytes"]
            took = at - (record.asked or at)
            self._log(at, f"host{host} has received {event['bytes'] / 1e6:.1f} MB in {took:.1f} s")
        elif host == 0:  # the others see the same
            self._event_of_all(at, kind, event)

    def _event_of_all(self, at: float, kind: str, event: dict[str, Any]) -> None:
        record = self.record
        if kind == "begin":
            record.began = at
            self._log(at, f"the training begins with {event['workers']} workers")
        elif kind == "view":
            self._log(at, f"step {event['step']}: now {event['workers']} workers take part")
            if record.killed is not None and record.noticed is None:
                record.noticed = at
        elif kind == "step":
            if record.noticed is not None and record.round is None and event["round"]:
                record.round = at
                since = at - (record.killed or at)
                self._log(at, f"the next round is complete, {since:.1f} s after the kill")
            if event["step"] % SHOWN_STEPS == 0:
                text = f"step {event['step']}: training loss {event['loss']:.2f}"
                self._log(at, f"{text}, {event['workers']} workers")

    def rates(self, seconds: float, rates: Sequence[float] | None) -> None:
        """Do nothing: the events tell enough."""

    def happened(self, happened: Happened) -> None:
        if happened.what == "killed":
            self.record.killed = happened.time
        self._log(happened.time, f"{happened.host} is {happened.what}")

    def failed(self, first: Failure) -> None:
        last = b" ".join(first.last[-1:]).decode(errors="replace")
        self._console.print(f"{first.process.name} failed ({first.outcome.how}): {last}")

    def ended(self, ended: Ended) -> None:
        """Do nothing: the sentences follow."""


def run() -> int:
    """Run the demo, and return 0 if all workers have finished with equal models."""
    from laconic.lab.emulation.jobs import terminate_as_exit

    console = Console(highlight=False, markup=False)
    console.width = min(console.width, 80)
    console.print(" ".join(INTRODUCTION.split()), end="\n\n")
    watch = Watch(console)
    argv = (sys.executable, "-m", "laconic.lab.demo.worker", str(STEPS))
    plan = Plan((Fault("kill", KILL_SECONDS, VICTIM),))
    settings = Settings(argv, Network(HOSTS), faults=plan, restart=RESTART_SECONDS)
    with terminate_as_exit():
        ended = program.run(settings, watch)
    console.print()
    for number, sentence in enumerate(sentences(watch.record), start=1):
        console.print(f"{number}. {sentence}")
    return 0 if ended.first is None and watch.record.equal else 1
