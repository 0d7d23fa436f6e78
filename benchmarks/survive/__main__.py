"""Train on four hosts that are killed at random, and measure what is lost.

    python -m benchmarks.survive [--minutes 10] [--mtbf 60] [--seed 7] [--systems SYSTEM ...]
    python -m benchmarks.survive --table

Every system gets the same hosts at 100 Mbit/s, the same model and text, and the same kills at the
same times. A killed host is started again after 5 seconds. The systems are:

    undisturbed   laconic's elastic DiLoCo without any kill: the loss to compare with
    laconic       laconic's elastic DiLoCo
    torchft       torchft's DiLoCo, with its lighthouse on a fifth host that is never killed
    restarts      static DiLoCo under torchrun --max-restarts, with laconic.save every round

Each run is appended to the journal. The table shows the newest run of each system with the same
settings.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.race.__main__ import commit
from benchmarks.study import Journal, key, machine
from benchmarks.survive import events
from benchmarks.survive.events import HOSTS, STOP
from laconic.lab.emulation import faults

SYSTEMS = ("undisturbed", "laconic", "torchft", "restarts")
OUT = Path("laconic-survive")
RESTART = 5.0
AHEAD = 2
"""Rounds between the decision to end and the end. A worker is at most one round behind."""
GRACE = 20.0
"""Seconds from the end of the first worker to the end of the run. A worker that was about to join
may wait for others that are gone."""
CURVE = 900.0
"""The same for the undisturbed run, in which one worker computes the losses on the way."""
STUCK = 120.0
"""Seconds without any round after which a run is ended."""


def kills(options: argparse.Namespace) -> list[faults.Fault]:
    """Return the kills, the same for all systems. The first ``settle`` seconds have none."""
    seconds = 60 * options.minutes
    plan = faults.random_kills(options.mtbf, HOSTS, options.seed, seconds)
    return [replace(kill, at=kill.at + options.settle) for kill in plan.faults]


def command(system: str, directory: Path, options: argparse.Namespace) -> list[str]:
    """Return the lab's command line for a system."""
    python = [sys.executable, "-m"]
    worker = ["benchmarks.survive.worker", system, str(directory.resolve())]
    worker += ["--save-every", str(options.save_every)]
    if options.data is not None:
        worker += ["--data", str(options.data.resolve())]
    program = [*python, *worker]
    if system == "restarts":
        # The rendezvous is on the coordinator's host, which stays. Dead hosts are noticed sooner
        # than by default: after 3 s and not after 15 s.
        torchrun = [
            *(*python, "torch.distributed.run", "--nnodes", str(HOSTS), "--nproc-per-node", "1"),
            *("--max-restarts", "10000", "--rdzv-backend", "c10d", "--rdzv-id", "survive"),
            *("--rdzv-conf", "is_host=false,keep_alive_interval=1,keep_alive_max_attempt=3"),
            *("--log-dir", os.devnull),
        ]
        rest = shlex.join(["-m", *worker])
        # Otherwise agents that survive send their workers to the store of a rank 0 that is dead
        # (torch 2.13: DynamicRendezvousHandler keeps the address of the first rendezvous).
        torchrun = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", *torchrun]
        script = f'exec {shlex.join(torchrun)} --rdzv-endpoint "$LACONIC_COORDINATOR" {rest}'
        program = ["sh", "-c", script]
    hosts = HOSTS + (system == "torchft")
    lab = [*python, "laconic", "lab", "--hosts", str(hosts), "--bandwidth", "100mbit"]
    lab += ["--out", str(directory / "lab")]
    # A kill of no consequence starts the coordinator also for the undisturbed run.
    planned = [] if system == "undisturbed" else kills(options)
    lab += [word for k in planned for word in ("--kill", f"{k.worker}@{k.at}s")]
    if not planned:
        lab += ["--hang", "0@1000h"]
    else:
        lab += ["--repair", f"{RESTART}s"]
    return [*lab, "--", *program]


@dataclass(frozen=True)
class Ran:
    """A run of a ``system``: what runs must share to be compared, how it ended, its figures, and
    the faults that the lab made."""

    system: str
    settings: dict[str, Any]
    how: str
    summary: dict[str, Any]
    faults: list[dict[str, Any]]
    versions: dict[str, str | None]
    commit: str

    @property
    def identity(self) -> Hashable:
        return self.system, key(self.settings)

    def document(self) -> dict[str, Any]:
        """Return the line of the journal."""
        return asdict(self)


def run(system: str, options: argparse.Namespace) -> Ran:
    """Run a system."""
    directory = OUT / "runs" / f"{system}-{options.seed}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    env = {**os.environ, "TORCHFT_LOG": "warn"}
    with (directory / "output").open("wb") as output:
        lab = subprocess.Popen(
            command(system, directory, options), stdout=output, stderr=subprocess.STDOUT, env=env
        )
        try:
            seconds = options.settle + 60 * options.minutes
            how = follow(lab, directory, seconds, CURVE if system == "undisturbed" else GRACE)
        finally:
            lab.terminate()
            lab.wait(60)
    happened = json.loads((directory / "lab" / "rates.json").read_text())["faults"]
    summary = events.summary(events.read(directory), happened)
    versions = {name: _version(name) for name in ("torch", "torchft")}
    return Ran(system, settings(options), how, summary, happened, versions, commit())


def follow(lab: subprocess.Popen[bytes], directory: Path, seconds: float, grace: float) -> str:
    """Wait for the end of a run, and tell the workers when to end. Return how it ended."""
    begin = latest = time.monotonic()
    number, first_end = 0, float("inf")
    while lab.poll() is None:
        time.sleep(0.5)
        now = time.monotonic()
        processes = events.read(directory)
        reached = events.last_round(processes)
        if reached > number:
            number, latest = reached, now
        if now - begin >= seconds and not (directory / STOP).exists() and reached:
            new = directory / "new"
            new.write_text(str(reached + AHEAD))
            new.rename(directory / STOP)
        finals = sum(bool(process.of("final")) for process in processes)
        if finals:
            first_end = min(first_end, now)
        if finals == HOSTS or now > first_end + grace:
            return "ended"
        if now > latest + STUCK and not finals:
            return f"stuck: no round in {STUCK:g} s"
    return "ended" if lab.returncode == 0 else f"the lab ended with {lab.returncode}"


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return what runs must share to be compared."""
    return {
        "minutes": options.minutes,
        "mtbf": options.mtbf,
        "seed": options.seed,
        "settle": options.settle,
        "save_every": options.save_every,
        "data": None if options.data is None else options.data.name,
        **machine(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def loss_at(curve: Sequence[Sequence[float]], number: int) -> float | None:
    """Return the undisturbed loss after a round, linear between the points of the curve."""
    for (before, low), (after, high) in itertools.pairwise(curve):
        if before <= number <= after:
            return low + (high - low) * (number - before) / (after - before)
    return None


def table(runs: Sequence[Ran]) -> Table:
    """Return the table of the runs, one of each system."""
    by_system = {ran.system: ran for ran in runs}
    curve = next((r.summary.get("curve", []) for r in runs if r.system == "undisturbed"), [])
    about = runs[-1].settings
    shown = Table(
        title=f"{about['minutes']:g} minutes, a kill every {about['mtbf']:g} s on average, "
        f"seed {about['seed']}"
    )
    for column in (
        "system", "rounds", "s per round", "kills", "steps counted / computed", "loss",
        "undisturbed", "kill to next round, s", "restart to part, s",
    ):  # fmt: skip
        shown.add_column(column, justify="left" if column == "system" else "right")
    for system in SYSTEMS:
        if system not in by_system:
            continue
        figures, how = by_system[system].summary, by_system[system].how
        rounds = figures["rounds"]
        same = None if system == "undisturbed" else loss_at(curve, rounds)
        shown.add_row(
            system if how == "ended" else f"{system} ({how})",
            str(rounds),
            f"{figures['seconds'] / max(rounds - 1, 1):.2f}",
            str(figures["kills"]),
            f"{figures['counted']} / {figures['computed']} = {figures['goodput'] or 0:.1%}",
            "-" if figures["loss"] is None else f"{figures['loss']:.4f}",
            "-" if same is None else f"{same:.4f}",
            events.spread(figures["to_next_round"]),
            events.spread(figures["to_taking_part"]),
        )
    shown.caption = (
        "Undisturbed: the loss of the undisturbed run after as many rounds. Times: median / max."
    )
    return shown


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="benchmarks.survive",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--minutes", type=float, default=10.0, help="default: %(default)g")
    top.add_argument("--mtbf", type=float, default=60.0, help="seconds (default: %(default)g)")
    top.add_argument("--seed", type=int, default=7, help="of the kills (default: %(default)s)")
    top.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    top.add_argument("--data", type=Path, metavar="FILE", help="training text (Python's library)")
    top.add_argument(
        "--settle", type=float, default=30.0, help="seconds without kills (default: %(default)g)"
    )
    top.add_argument(
        "--save-every", type=int, default=1, help="rounds per checkpoint (default: %(default)s)"
    )
    top.add_argument("--table", action="store_true", help="run nothing, and print the table")
    return top


def main() -> int:
    options = parser().parse_args()
    if "torchft" in options.systems and not options.table and _version("torchft") is None:
        print("benchmarks.survive: torchft is missing: run make peers", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
    journal = Journal(OUT / "journal.jsonl", lambda fields: Ran(**fields))
    with journal.opened() as append:
        for system in () if options.table else options.systems:
            print(f"{system}: ", end="", flush=True)
            ran = run(system, options)
            append(ran)
            figures = ran.summary
            print(
                f"{ran.how}; {figures['rounds']} rounds, {figures['kills']} kills, "
                f"{figures['counted']} of {figures['computed']} steps counted, "
                f"loss {figures['loss']}",
                flush=True,
            )
    runs = journal.load()
    wanted = runs[-1].settings if options.table else settings(options)
    Console(width=None if sys.stdout.isatty() else 170).print(
        table([ran for ran in runs if ran.settings == wanted])
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
