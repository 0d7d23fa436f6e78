"""Run a study, print its table, and keep its runs; or write docs/evidence.md from the runs.

python -m benchmarks.evidence muloco|outer|... --task "text, small" [--processes N] [--runs FILE]
python -m benchmarks.evidence signals [--processes N]
python -m benchmarks.evidence page [--runs FILE]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.evidence import signals
from benchmarks.evidence.runs import DATA, Job, Outcome, study
from benchmarks.evidence.studies import STUDIES
from benchmarks.evidence.tasks import NAMES, TUNED
from benchmarks.study import DOCS

PAGE = DOCS / "evidence.md"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence")
    parser.add_argument("study", choices=(*STUDIES, "signals", "page"))
    parser.add_argument("--task", choices=(*NAMES, *TUNED), default=NAMES[0])
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--runs", type=Path, default=DATA, metavar="FILE")
    options = parser.parse_args()
    tasks = TUNED if options.study == "tuned" else NAMES
    if options.task not in tasks:
        parser.error(f"the tasks of {options.study} are {'; '.join(tasks)}")

    if options.study == "page":
        from benchmarks.evidence import page  # matplotlib takes a second

        page.write(PAGE, study(options.runs).load())
        page.write_signals(PAGE, signals.lines(signals.study().load()))
        return

    def progress(done: int, of: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {of} runs ", end="", file=sys.stderr)

    if options.study == "signals":
        known = signals.study().outcomes(signals.jobs(), options.processes, progress)
        for line in signals.lines(known):
            print(line)
        return

    def runs(jobs: Sequence[Job]) -> Mapping[Job, Outcome]:
        return study(options.runs).outcomes(jobs, options.processes, progress)

    for row in STUDIES[options.study](runs, options.task):
        job = row.job
        about = f"{job.task:14} {job.inner:6} {job.workers:2} workers {job.steps:5} steps"
        print(
            f"{about}  lr {job.lr:g}  {row.mean:.4f} +- {row.spread:.4f}  {job.recipe}", flush=True
        )


if __name__ == "__main__":
    main()
