"""Carry out seeded faults on elastic runs, and check what is promised after each.

    python -m benchmarks.chaos [--faults N] [--seed S] [--recipe R ...] [--seconds LIMIT]
                               [--only RUN] [--kind KIND ...] [--list] [--parallel P]

Each run has 4 workers, processes that train a small model, and a coordinator. Workers are killed,
told to leave, and stopped for a short or a long time, at any time or inside a phase of a step; the
coordinator is killed and started again empty; donors and newcomers are lost; two faults come at
once. One run of three has a host, a network namespace, for each worker: cables are cut, and packets
are dropped one way (`benchmarks.chaos.network`; needs root). Every lost worker is replaced, and the
next fault comes when all have recovered.

Checked:

1. All models are equal, bit for bit, after each step in which the recipe makes them equal, and
   after `finish`.
2. No step of a survivor takes longer than the deadline of `Members.deadline` and a margin. Steps in
   which too few workers are left are not counted. Longer steps than 1 s after a worker was killed
   are counted and shown.
3. No run is lost: each worker that was not killed ends normally, but for those that hung or were
   cut off for long, which end with the documented message, and newcomers whose donor was lost.

The seed determines the faults: `--list` prints them, and `--only RUN` repeats one run. Times and
the order of threads differ from run to run. The exit code is 1 if anything fails; the files of that
run are kept: ``story`` says what was done and when, ``log-N`` is what worker N wrote.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from benchmarks.chaos.plan import KINDS, ON_HOSTS_KINDS, RECIPES, Plan, plan
from benchmarks.chaos.run import SOFT, Run, die_with_parent, summary

PRELOADED = ("torch._dynamo", "torch.optim", "laconic", "benchmarks.chaos.worker")
"""Imported before processes are forked, so that a worker begins at once."""


class EndedError(Exception):
    """A signal has ended this process."""


def end_on_signals() -> None:
    """Have SIGTERM and SIGINT raise `EndedError`, once."""

    def ended(*_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        raise EndedError

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ended)


def carry_out(job: Plan, folder: Path, parent: int) -> int:
    """Carry out one run in this process, a fork. Returns the exit status."""
    die_with_parent(parent)
    os.setsid()
    end_on_signals()
    run = Run(job, folder)
    try:
        wrong = run.carry_out_all()
        (folder / "result").write_text(json.dumps(summary(run, wrong)))
        return int(bool(wrong))
    except EndedError:
        return 1
    finally:
        run.end_all()


class Pool:
    """Runs under way, each in a fork."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[int, tuple[Plan, Path]] = {}

    def start(self, job: Plan) -> None:
        """Begin a run."""
        place = self.folder / f"run-{job.number}"
        place.mkdir()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 2
            try:
                status = carry_out(job, place, parent)
            except BaseException as error:
                with contextlib.suppress(Exception):
                    (place / "failed").write_text(repr(error))
                sys.excepthook(type(error), error, error.__traceback__)
            finally:
                sys.stderr.flush()
                os._exit(status)
        self.running[pid] = job, place

    def wait(self) -> tuple[Plan, Path]:
        """Wait for the next run that ends."""
        while True:
            for pid in list(self.running):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    return self.running.pop(pid)
            time.sleep(0.05)

    def end(self) -> None:
        """End all runs."""
        for pid in self.running:
            os.kill(pid, signal.SIGTERM)
        for pid, (_, place) in self.running.items():
            os.waitpid(pid, 0)
            shutil.rmtree(place)
        self.running.clear()


def line_of(job: Plan, result: dict[str, Any]) -> str:
    """What came of one run."""
    outcomes = [o for o in result["outcomes"] if o["struck"]]
    kills = [o["worst"] for o in outcomes if o["bound"] != float("inf") and not is_long(o["kind"])]
    hangs = [o["worst"] for o in outcomes if o["bound"] != float("inf") and is_long(o["kind"])]
    return (
        f"{job.title}: {len(outcomes)} faults, {result['steps']} steps, "
        f"{result['workers']} workers, worst step {max(kills, default=0.0):.1f} s, "
        f"where something hangs {max(hangs, default=0.0):.1f} s: {result['wrong'] or 'ok'}"
    )


def is_long(kind: str) -> bool:
    """Whether a deadline must pass, or packets are sent again."""
    return any(word in kind for word in ("long", "stop", "cut", "one-way", "coordinator"))


def table(title: str, groups: dict[str, list[dict[str, Any]]]) -> Iterable[str]:
    """A table of the outcomes by group."""
    yield ""
    yield (
        f"| {title} | faults | survivors identical | lost runs | worst step | over {SOFT:g} s | "
        "late | median recovery |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for name, group in groups.items():
        struck = [o for o in group if o["struck"]]
        if not struck:
            continue
        timed = [o for o in struck if o["bound"] != float("inf")]
        over = sum(o["worst"] > SOFT for o in timed)
        late = sum(o["worst"] > o["bound"] for o in timed)
        recovered = sorted(o["recovered"] for o in struck)
        yield (
            f"| {name} | {len(struck)} | {sum(o['identical'] for o in struck)} | "
            f"{sum(bool(o['lost']) for o in struck)} | "
            f"{max((o['worst'] for o in timed), default=0.0):.2f} s | {over} | {late} | "
            f"{recovered[len(recovered) // 2]:.1f} s |"
        )


def report(outcomes: Sequence[dict[str, Any]]) -> None:
    """Print the tables."""
    kinds: dict[str, list[dict[str, Any]]] = {k: [] for k in (*KINDS, *ON_HOSTS_KINDS)}
    phases: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for outcome in outcomes:
        kinds[outcome["kind"]].append(outcome)
        if outcome["phase"]:
            phases[outcome["phase"]].append(outcome)
    kinds["all"] = list(outcomes)
    print(*table("kind", kinds), sep="\n")
    print(*table("phase", phases), sep="\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--faults", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--recipe", nargs="+", default=list(RECIPES), help="default: all")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run later")
    parser.add_argument("--only", type=int, metavar="RUN", help="carry out this run alone")
    parser.add_argument("--kind", nargs="+", help="only faults of these kinds")
    parser.add_argument("--list", action="store_true", help="print the faults, and end")
    parser.add_argument("--parallel", type=int, default=2 * (os.cpu_count() or 1), metavar="P")
    parser.add_argument("--local", action="store_true", help="no hosts, and no cut cables")
    parser.add_argument("--keep", action="store_true", help="keep the files of all runs")
    return parser.parse_args()


def main() -> int:
    options = parse()
    hosts = os.geteuid() == 0 and not options.local
    jobs = plan(
        *(options.seed, options.recipe, options.faults),
        may_have_hosts=hosts,
        kinds=options.kind,
    )
    if options.only is not None:
        jobs = [job for job in jobs if job.number == options.only]
    for job in jobs:
        print(f"{job.title}", flush=True)
        for fault in job.faults:
            print(f"    {fault}")
    if options.list:
        return 0
    torch.set_num_threads(1)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    begun = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="laconic-chaos-"))
    pool, outcomes, failed = Pool(folder), list[dict[str, Any]](), 0
    signal.signal(signal.SIGTERM, lambda number, frame: interrupt(number, frame))
    waiting = list(jobs)
    try:
        while waiting or pool.running:
            if time.monotonic() - begun > options.seconds:
                waiting.clear()
            while waiting and len(pool.running) < options.parallel:
                pool.start(waiting.pop(0))
            if not pool.running:
                break
            job, place = pool.wait()
            path = place / "result"
            if path.exists():
                result = json.loads(path.read_text())
                outcomes += result["outcomes"]
                print(line_of(job, result), flush=True)
                bad = bool(result["wrong"])
            else:
                print(f"{job.title}: the benchmark failed", flush=True)
                bad = True
            failed += bad
            if bad:
                print(f"    files: {place}; again: --only {job.number}", flush=True)
            elif not options.keep:
                shutil.rmtree(place)
    except KeyboardInterrupt:
        print("ended early")
        failed += 1
    finally:
        pool.end()
    with contextlib.suppress(OSError):
        folder.rmdir()
    report(outcomes)
    minutes = (time.monotonic() - begun) / 60
    struck = sum(o["struck"] for o in outcomes)
    print(
        f"\n{struck} faults in {minutes:.1f} minutes, {struck / max(minutes, 1e-9):.0f} a minute; "
        f"{len(outcomes) - struck} did not come; {failed} runs failed"
    )
    return int(failed > 0)


def interrupt(number: int, frame: FrameType | None) -> None:
    """End as by Ctrl-C."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    raise SystemExit(main())
