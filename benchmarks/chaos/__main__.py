"""Carry out seeded faults on elastic runs, and check what is promised after each.

    python -m benchmarks.chaos [--faults N] [--seed S] [--seconds LIMIT] [--only RUN]
                               [--kind KIND ...] [--list] [--parallel P] [--tls]
                               [--recipe RECIPE]

Each run has 4 workers, processes that train a small model, and a coordinator. Workers are killed,
told to leave, and stopped for a short or a long time, at any time or inside a phase of a step; all
but one are lost at once, or four join at once; the coordinator is killed and started again empty,
or messages to it are late or lost; donors and newcomers are lost; two faults come at once. In one
run of three each worker has a host, a network namespace: cables are cut, of one worker, two, or
all, packets are dropped one way, and connections refused (`benchmarks.chaos.network`). In one of
five a worker serves the coordinator's address, which moves to another one when that is lost.
Every lost worker is replaced, and the next fault comes when all have recovered. Needs root, or
``unshare --map-root-user``.

Checked:

1. All models are equal, bit for bit, after each step in which the recipe makes them equal, and
   after `finish`.
2. No step of a survivor takes longer than the deadline of `Signs.deadline` and a margin. Steps in
   which too few workers are left are not counted.
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
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import torch

from benchmarks.chaos.check import Outcome
from benchmarks.chaos.plan import HOST_KINDS, KINDS, RECIPES, Plan, plan
from benchmarks.chaos.run import Run, die_with_parent
from laconic.cli import main as laconic


def carry_out(folder: Path, end: float, job: Plan) -> tuple[Plan, str, list[Outcome]]:
    """Carry out one run in this process, if it is not too late to begin one. Returns what is wrong,
    and what each fault has done."""
    if time.monotonic() > end:
        return job, "", []
    place = folder / f"run-{job.number}"
    place.mkdir()
    try:
        run = Run(job, place)
        return job, run.carry_out_all(), run.outcomes
    except Exception as error:
        return job, f"the benchmark failed: {error!r}", []


def turn_tls_on(folder: Path) -> None:
    """Make keys, and set the variables that name them, for this process and its children."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        laconic(["keys", str(folder)])
    for line in printed.getvalue().splitlines():
        if line.startswith("export "):
            name, _, value = line.removeprefix("export ").partition("=")
            os.environ[name] = shlex.split(value)[0]


def table(outcomes: Sequence[Outcome]) -> Iterable[str]:
    """A table of the ``outcomes`` by kind."""
    columns = "kind", "faults", "survivors identical", "hangs", "healthy workers evicted"
    columns += "lost runs", "worst step", "late", "median recovery"
    yield f"\n| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    all_struck = [out for out in outcomes if out.struck]
    for kind in [*dict.fromkeys(out.kind for out in all_struck), "all"] if all_struck else []:
        struck = [out for out in all_struck if kind in (out.kind, "all")]
        timed = [out for out in struck if out.bound != float("inf")]
        cells = (
            *(kind, len(struck), sum(out.identical for out in struck)),
            *(sum(out.hung for out in struck), sum(out.evicted for out in struck)),
            sum(bool(out.lost) for out in struck),
            f"{max((out.worst for out in timed), default=0.0):.2f} s",
            sum(out.worst > out.bound for out in timed),
            f"{statistics.median(out.recovered for out in struck):.1f} s",
        )
        yield f"| {' | '.join(map(str, cells))} |"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--faults", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run later")
    parser.add_argument("--only", type=int, metavar="RUN", help="carry out this run alone")
    kinds = [*KINDS, *HOST_KINDS]
    parser.add_argument("--kind", nargs="+", default=[], choices=kinds, metavar="KIND")
    parser.add_argument("--list", action="store_true", help="print the faults, and end")
    parser.add_argument("--parallel", type=int, default=2 * (os.cpu_count() or 1), metavar="P")
    parser.add_argument("--recipe", choices=RECIPES, metavar="RECIPE", help="in all runs")
    parser.add_argument("--tls", action="store_true", help="with TLS and a secret")
    options = parser.parse_args()
    local = [kind for kind in options.kind if kind in KINDS]
    if 0 < len(local) < len(options.kind):
        parser.error(f"only some kinds need a network of their own: run {local} by themselves")
    return options


def carry_out_all(options: argparse.Namespace, jobs: Sequence[Plan], folder: Path) -> int:
    """Carry out the runs, and print what came of them. Returns how many failed."""
    begun, failed, outcomes = time.monotonic(), 0, list[Outcome]()
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(options.parallel, fork, die_with_parent, (os.getpid(),)) as pool:
        work = partial(carry_out, folder, begun + options.seconds)
        for future in as_completed([pool.submit(work, job) for job in jobs]):
            job, wrong, done = future.result()
            outcomes += done
            place = folder / f"run-{job.number}"
            if done or wrong:
                worst = max((out.worst for out in done if out.bound != float("inf")), default=0.0)
                text = f"{len(done)} faults, worst step {worst:.1f} s: {wrong or 'ok'}"
                print(f"{job.title}: {text}", flush=True)
            if wrong:
                failed += 1
                print(f"    files: {place}; again: --only {job.number}", flush=True)
            elif place.exists():
                shutil.rmtree(place)
    print(*table(outcomes), sep="\n")
    minutes = (time.monotonic() - begun) / 60
    struck = sum(out.struck for out in outcomes)
    print(
        f"\n{struck} faults in {minutes:.1f} minutes; "
        f"{len(outcomes) - struck} did not come; {failed} runs failed"
    )
    return failed


def main() -> int:
    options = parse()
    jobs = plan(options.seed, options.faults, options.kind, options.recipe)
    if options.only is not None:
        jobs = [job for job in jobs if job.number == options.only]
    if options.list:
        for job in jobs:
            print(job.title, *job.faults, sep="\n    ")
        return 0
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # all end with this process
    folder = Path(tempfile.mkdtemp(prefix="laconic-chaos-"))
    if options.tls:
        turn_tls_on(folder / "keys")
    failed = carry_out_all(options, jobs, folder)
    if not failed:
        shutil.rmtree(folder)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
