"""Tune every recipe of the table, run it on fresh seeds, and check the claims.

python -m benchmarks.science full|quick [--processes N]

The full run writes the table and the plot of docs/science.md. The quick run, with fewer seeds and
settings, only prints. Runs are stored in laconic-science/, so an interrupted benchmark can resume.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.science import experiment, page
from benchmarks.science.experiment import Job, Outcome, train
from benchmarks.science.rows import ROWS, Finding, Row, Setting, claims
from benchmarks.study import DOCS, Study, sources_digest

RUNS = Path("laconic-science", "runs.jsonl")


@dataclass(frozen=True)
class Scope:
    """How much to run: the seeds for tuning, the fresh seeds to report, and whether the grid
    contains only settings next to the best ones found before (``near``)."""

    tuning: range
    fresh: range
    near: bool


SCOPES = {
    "full": Scope(range(5), range(100, 120), near=False),
    "quick": Scope(range(2), range(100, 110), near=True),
}


def measure(
    console: Console, what: str, cases: Iterable[tuple[Row, Setting]], seeds: range, processes: int
) -> list[Finding]:
    """Run each row at each setting, over the seeds."""
    cases = list(cases)
    jobs = [row.job(setting, seed) for row, setting in cases for seed in seeds]
    study = Study(RUNS, Job, Outcome, train, sources_digest([Path(experiment.__file__)]))
    with console.status(what) as status:
        known = study.outcomes(
            jobs, processes, lambda done, of: status.update(f"{what}: {done} of {of} runs")
        )
    return [
        Finding(row, setting, [known[row.job(setting, seed)] for seed in seeds])
        for row, setting in cases
    ]


def best(findings: Sequence[Finding]) -> list[tuple[Row, Setting]]:
    """Return the setting with the lowest loss for each row."""
    return [
        (row, min((f for f in findings if f.row is row), key=lambda f: f.loss).setting)
        for row in dict.fromkeys(f.row for f in findings)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.science")
    parser.add_argument("scope", choices=SCOPES)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    options = parser.parse_args()
    if options.processes < 1:
        parser.error("--processes must be 1 or more")
    scope, console = SCOPES[options.scope], Console()
    grid = [(row, setting) for row in ROWS for setting in row.settings(scope.near)]
    tuned = best(measure(console, "tuning", grid, scope.tuning, options.processes))
    findings = measure(console, "fresh seeds", tuned, scope.fresh, options.processes)
    console.print(page.terminal(findings))
    if options.scope == "full":
        page.write(findings, len(scope.tuning))
        console.print(f"written: {DOCS / 'science.md'} and science.png")
        for row, setting in tuned:
            if setting != row.best:
                console.print(
                    f"{row.name}: the best setting is now {setting}; rows.py has {row.best}"
                )
    results = claims({f.row: f.loss for f in findings})
    for claim, holds in results.items():
        console.print(f"{'holds' if holds else '[bold red]fails'}: {claim}", highlight=False)
    raise SystemExit(0 if all(results.values()) else 1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("interrupted: run the same command to resume") from None
