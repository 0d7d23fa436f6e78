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
import io
import multiprocessing
import os
import shlex
import shutil
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.chaos.check import Outcome
from benchmarks.chaos.plan import EMBEDDED_KINDS, HOST_KINDS, KINDS, RECIPES, Plan, plan
from benchmarks.chaos.run import Run, die_with_parent
from laconic.cli import main as laconic

SOFT = 1.0
"""Seconds that a step may take in which a worker was killed. More are counted."""


def carry_out(folder: Path, end: float, job: Plan) -> tuple[Plan, dict[str, Any] | None]:
    """Carry out one run in this process. None: it is too late to begin one."""
    if time.monotonic() > end:
        return job, None
    place = folder / f"run-{job.number}"
    place.mkdir()
    try:
        run = Run(job, place)
        return job, run.summary(run.carry_out_all())
    except Exception as error:
        return job, {"wrong": f"the benchmark failed: {error!r}", "outcomes": []}


def begin(parent: int) -> None:
    """Prepare a process of the pool, which ends with its parent."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def turn_tls_on(folder: Path) -> None:
    """Make keys, and set the variables that name them, for this process and its children."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        laconic(["keys", str(folder)])
    for line in printed.getvalue().splitlines():
        if line.startswith("export "):
            name, _, value = line.removeprefix("export ").partition("=")
            os.environ[name] = shlex.split(value)[0]


def line_of(job: Plan, result: dict[str, Any]) -> str:
    """What came of one run."""
    struck = [out for out in result["outcomes"] if out.struck]
    worst = max((out.worst for out in struck if out.bound != float("inf")), default=0.0)
    return (
        f"{job.title}: {len(struck)} faults, {result.get('steps', 0)} steps, "
        f"{result.get('workers', 0)} workers, worst step {worst:.1f} s: {result['wrong'] or 'ok'}"
    )


def table(
    title: str, outcomes: Sequence[Outcome], group: Callable[[Outcome], str]
) -> Iterable[str]:
    """A table of the ``outcomes`` by ``group``, and of all."""
    columns = ("faults", "survivors identical", "hangs", "healthy workers evicted", "lost runs")
    columns += ("worst step", f"over {SOFT:g} s", "late", "median recovery")
    yield ""
    yield f"| {title} | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for out in outcomes:
        if out.struck and group(out):
            groups[group(out)].append(out)
            groups["all"].append(out)
    order = [*KINDS, *HOST_KINDS, *EMBEDDED_KINDS, *groups]
    for name in sorted(set(groups), key=lambda name: (name == "all", order.index(name))):
        struck = groups[name]
        timed = [out for out in struck if out.bound != float("inf")]
        recovered = sorted(out.recovered for out in struck)
        cells = (
            len(struck),
            sum(out.identical for out in struck),
            sum(out.hung for out in struck),
            sum(out.evicted for out in struck),
            sum(bool(out.lost) for out in struck),
            f"{max((out.worst for out in timed), default=0.0):.2f} s",
            sum(out.worst > SOFT for out in timed),
            sum(out.worst > out.bound for out in timed),
            f"{recovered[len(recovered) // 2]:.1f} s",
        )
        yield f"| {name} | {' | '.join(map(str, cells))} |"


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
    kinds = [*KINDS, *HOST_KINDS]
    parser.add_argument("--kind", nargs="+", default=[], choices=kinds, metavar="KIND")
    parser.add_argument("--list", action="store_true", help="print the faults, and end")
    parser.add_argument("--parallel", type=int, default=2 * (os.cpu_count() or 1), metavar="P")
    parser.add_argument("--local", action="store_true", help="no hosts, and no cut cables")
    parser.add_argument("--tls", action="store_true", help="with TLS and a secret")
    parser.add_argument("--keep", action="store_true", help="keep the files of all runs")
    return parser.parse_args()


def carry_out_all(options: argparse.Namespace, jobs: Sequence[Plan], folder: Path) -> int:
    """Carry out the runs, and print what came of them. Returns how many failed."""
    begun, failed, outcomes = time.monotonic(), 0, list[Outcome]()
    fork = multiprocessing.get_context("fork")
    with fork.Pool(options.parallel, begin, (os.getpid(),), maxtasksperchild=1) as pool:
        work = partial(carry_out, folder, begun + options.seconds)
        for job, result in pool.imap_unordered(work, jobs):
            if result is None:
                continue
            outcomes += result["outcomes"]
            print(line_of(job, result), flush=True)
            place = folder / f"run-{job.number}"
            if result["wrong"]:
                failed += 1
                print(f"    files: {place}; again: --only {job.number}", flush=True)
            elif not options.keep:
                shutil.rmtree(place)
    print(*table("kind", outcomes, lambda out: out.kind), sep="\n")
    print(*table("phase", outcomes, lambda out: out.phase), sep="\n")
    minutes = (time.monotonic() - begun) / 60
    struck = sum(out.struck for out in outcomes)
    print(
        f"\n{struck} faults in {minutes:.1f} minutes; "
        f"{len(outcomes) - struck} did not come; {failed} runs failed"
    )
    return failed


def main() -> int:
    options = parse()
    hosts = os.geteuid() == 0 and not options.local
    jobs = plan(options.seed, options.recipe, options.faults, options.kind, hosts)
    if options.only is not None:
        jobs = [job for job in jobs if job.number == options.only]
    if options.list:
        for job in jobs:
            print(job.title, *job.faults, sep="\n    ")
        return 0
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="laconic-chaos-"))
    if options.tls:
        turn_tls_on(folder / "keys")
    failed = carry_out_all(options, jobs, folder)
    if not failed and not options.keep:
        shutil.rmtree(folder)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
