"""Run many jobs in parallel and store their outcomes in a file, so that a benchmark can resume."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

import laconic

Job = TypeVar("Job")
Outcome = TypeVar("Outcome")


def sources_digest(own: Sequence[Path]) -> str:
    """Return a digest of the code that runs depend on: laconic's, and the files ``own``."""
    core = sorted(Path(laconic.__file__).parent.rglob("*.py"))
    digest = hashlib.sha256(torch.__version__.encode())
    for path in (*own, *core):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Journal(Generic[Job, Outcome]):
    """Outcomes of ``train(job)``, in the file at ``path``. Both types are dataclasses of plain
    data. Outcomes of other ``sources`` do not count; None: all count."""

    path: Path
    job: type[Job]
    outcome: type[Outcome]
    train: Callable[[Job], Outcome]
    sources: str | None = None

    def load(self) -> dict[Job, Outcome]:
        """Return the outcomes in the file."""
        known = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # incomplete: the run was interrupted
            if self.sources is None or entry["sources"] == self.sources:
                known[self.job(**entry["job"])] = self.outcome(**entry["outcome"])
        return known

    def outcomes(
        self,
        jobs: Iterable[Job],
        processes: int,
        progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> dict[Job, Outcome]:
        """Return the outcome of each job, from the file or from running it. New outcomes are added
        to the file. ``progress`` is called with the number of finished jobs and of all jobs."""
        jobs = list(dict.fromkeys(jobs))
        known = self.load()
        missing = [job for job in jobs if job not in known]
        progress(len(jobs) - len(missing), len(jobs))
        if missing:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            pool = ProcessPoolExecutor(
                min(processes, len(missing)),
                multiprocessing.get_context("spawn"),
                initializer=_prepare,
            )
            try:
                with self.path.open("a") as file:
                    if file.tell():
                        file.write("\n")  # the last line may be incomplete
                    futures = {pool.submit(self.train, job): job for job in missing}
                    finished = len(jobs) - len(missing)
                    for done, future in enumerate(as_completed(futures), finished + 1):
                        job, outcome = futures[future], future.result()
                        known[job] = outcome
                        file.write(f"{json.dumps(self._entry(job, outcome))}\n")
                        file.flush()
                        progress(done, len(jobs))
            finally:
                pool.shutdown(cancel_futures=True)
        return {job: known[job] for job in jobs}

    def _entry(self, job: Any, outcome: Any) -> dict[str, Any]:
        about = {} if self.sources is None else {"sources": self.sources}
        return {**about, "job": asdict(job), "outcome": asdict(outcome)}


def _prepare() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends this process
