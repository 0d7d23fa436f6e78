"""Run many jobs in parallel and store the results in a file, so that a benchmark can resume."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch

import laconic
from benchmarks.science import experiment
from benchmarks.science.experiment import Job, Outcome, train


@cache
def sources() -> str:
    """Return a digest of the code that runs depend on. Runs of other code do not count."""
    core = sorted(Path(laconic.__file__).parent.rglob("*.py"))
    digest = hashlib.sha256(torch.__version__.encode())
    for path in (Path(experiment.__file__), *core):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def load(path: Path) -> dict[Job, Outcome]:
    """Return the runs in the file at ``path`` that were made by this code."""
    known = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue  # incomplete: the run was interrupted
        if entry["sources"] == sources():
            known[Job(**entry["job"])] = Outcome(**entry["outcome"])
    return known


def _prepare() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends this process


def outcomes(
    jobs: Iterable[Job], path: Path, processes: int, progress: Callable[[int, int], None]
) -> dict[Job, Outcome]:
    """Return the outcome of each job, from the file at ``path`` or from running it.

    New outcomes are added to the file. ``progress`` is called with the number of finished jobs and
    the number of all jobs.
    """
    jobs = list(dict.fromkeys(jobs))
    known = load(path)
    missing = [job for job in jobs if job not in known]
    progress(len(jobs) - len(missing), len(jobs))
    if missing:
        path.parent.mkdir(parents=True, exist_ok=True)
        pool = ProcessPoolExecutor(
            min(processes, len(missing)),
            multiprocessing.get_context("spawn"),
            initializer=_prepare,
        )
        try:
            with path.open("a") as file:
                if file.tell():
                    file.write("\n")  # the last line may be incomplete
                futures = {pool.submit(train, job): job for job in missing}
                for done, future in enumerate(as_completed(futures), len(jobs) - len(missing) + 1):
                    job, outcome = futures[future], future.result()
                    known[job] = outcome
                    entry = {"sources": sources(), "job": asdict(job), "outcome": asdict(outcome)}
                    file.write(f"{json.dumps(entry)}\n")
                    file.flush()
                    progress(done, len(jobs))
        finally:
            pool.shutdown(cancel_futures=True)
    return {job: known[job] for job in jobs}
