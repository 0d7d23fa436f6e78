"""What studies share: a journal of finished runs, tables, and pages with marker comments.

A journal has a line of JSON for each finished run, so that a study goes on where it was. Of several
runs with the same identity, the last counts. A line with an ``about`` is a remark for readers.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

import laconic

DOCS = Path(__file__).resolve().parents[1] / "docs"


@cache
def digits() -> tuple[Tensor, Tensor]:
    """The images of scikit-learn's digits, scaled to 0..1, and their digits."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


# -- journals --------------------------------------------------------------------------------------


class Run(Protocol):
    """A finished run."""

    @property
    def identity(self) -> Hashable:
        """What was run, with which settings."""

    def document(self) -> dict[str, Any]:
        """The line of the journal."""


R = TypeVar("R", bound=Run)


@dataclass(frozen=True)
class Journal(Generic[R]):
    """The runs in the file at ``path``. ``parse`` makes a run of a line, and raises ``KeyError``,
    ``TypeError`` or ``ValueError`` for a line of something else."""

    path: Path
    parse: Callable[[dict[str, Any]], R]

    def load(self) -> list[R]:
        """Return the last run of each identity, in the order of the file.

        Returns none if there is no file, and ignores incomplete lines. Raises ``ValueError`` for
        any other line.
        """
        found: dict[Hashable, R] = {}
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                fields = json.loads(line)
            except json.JSONDecodeError:
                continue  # incomplete, after a power failure or on a full disk
            try:
                if "about" in fields:
                    continue
                run = self.parse(fields)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{self.path}, line {number}: not a run: {error!r}") from None
            found.pop(run.identity, None)
            found[run.identity] = run
        return list(found.values())

    @contextmanager
    def opened(self) -> Iterator[Callable[[R], None]]:
        """Yield a function that appends a run, and returns when it is on the disk.

        Raises ``ValueError`` if another process uses the journal: two studies at once would compete
        for processors.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another study writes to {self.path}: wait for its end") from None

            def append(run: R) -> None:
                before = self.path.read_bytes()[-1:]
                file.write("\n" * (before not in (b"", b"\n")))  # the last line is incomplete
                file.write(json.dumps(run.document()) + "\n")
                file.flush()
                os.fsync(file.fileno())

            yield append


def key(shared: Mapping[str, object]) -> str:
    """Return a key of eight hexadecimal digits for settings that runs share."""
    text = json.dumps(shared, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def checked(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the shared settings of a line. Raises ``ValueError`` if its key is not theirs."""
    shared: Mapping[str, Any] = fields["shared"]
    if not isinstance(shared, dict) or fields["key"] != key(shared):
        raise ValueError("its settings and key disagree")
    return shared


def machine() -> dict[str, object]:
    """Return what runs must share for their times to be comparable."""
    from laconic.lab.race import runner  # needs packages that a machine with GPUs may lack

    about = runner.machine()
    return {
        "processor": about["processor"],
        "cores": about["cores"],
        "torch": str(torch.__version__),
    }


# -- simulated runs, many at a time ----------------------------------------------------------------

Job = TypeVar("Job")
Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Trial(Generic[Job, Outcome]):
    """A job and its outcome, by the code with the digest ``sources``."""

    job: Job
    outcome: Outcome
    sources: str | None

    @property
    def identity(self) -> Hashable:
        return self.job, self.sources

    def document(self) -> dict[str, Any]:
        about = {} if self.sources is None else {"sources": self.sources}
        return {**about, "job": asdict(self.job), "outcome": asdict(self.outcome)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class Study(Generic[Job, Outcome]):
    """Outcomes of ``train(job)``, in the file at ``path``. Both types are dataclasses of plain
    data. Outcomes of other ``sources`` do not count; None: all count."""

    path: Path
    job: type[Job]
    outcome: type[Outcome]
    train: Callable[[Job], Outcome]
    sources: str | None = None

    @property
    def journal(self) -> Journal[Trial[Job, Outcome]]:
        return Journal(self.path, self._parse)

    def _parse(self, fields: dict[str, Any]) -> Trial[Job, Outcome]:
        job, outcome = self.job(**fields["job"]), self.outcome(**fields["outcome"])
        return Trial(job, outcome, fields.get("sources"))

    def load(self) -> dict[Job, Outcome]:
        """Return the outcomes in the file."""
        trials = self.journal.load()
        return {t.job: t.outcome for t in trials if self.sources in (None, t.sources)}

    def outcomes(
        self,
        jobs: Iterable[Job],
        processes: int,
        progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> dict[Job, Outcome]:
        """Return the outcome of each job, from the file or from running it. New outcomes are added
        to the file. ``progress`` is called with the number of finished jobs and of all jobs."""
        jobs, known = list(dict.fromkeys(jobs)), self.load()
        missing = [job for job in jobs if job not in known]
        done = len(jobs) - len(missing)
        progress(done, len(jobs))
        if missing:
            spawn = multiprocessing.get_context("spawn")
            workers = min(processes, len(missing))
            pool = ProcessPoolExecutor(workers, spawn, initializer=_prepare)
            try:
                with self.journal.opened() as append:
                    futures = {pool.submit(self.train, job): job for job in missing}
                    for number, future in enumerate(as_completed(futures), done + 1):
                        job = futures[future]
                        known[job] = future.result()
                        append(Trial(job, known[job], self.sources))
                        progress(number, len(jobs))
            finally:
                pool.shutdown(cancel_futures=True)
        return {job: known[job] for job in jobs}


def _prepare() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends this process


def sources_digest(own: Sequence[Path]) -> str:
    """Return a digest of the code that runs depend on: laconic's, and the files ``own``."""
    core = sorted(Path(laconic.__file__).parent.rglob("*.py"))
    digest = hashlib.sha256(torch.__version__.encode())
    for path in (*own, *core):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


# -- pages -----------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a table of Markdown. All columns but the first ``left`` are aligned right."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def inserted(text: str, name: str, content: str) -> str:
    """Return the page ``text`` with ``content`` between its comments ``<!-- begin: NAME -->`` and
    ``<!-- end -->``. Raises ``ValueError`` for a page without them."""
    begin, end = f"<!-- begin: {name} -->", "<!-- end -->"
    before, found, rest = text.partition(begin)
    _, also, after = rest.partition(end)
    if not (found and also):
        raise ValueError(f"the page must have a line {begin!r} and after it a line {end!r}")
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


def write(page: Path, name: str, content: str) -> None:
    """Write ``content`` between the marker comments of a page."""
    text = inserted(page.read_text(encoding="utf-8"), name, content)
    page.write_text(text, encoding="utf-8")


# -- commands --------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """A parser with one-line error messages."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def command(name: str, run: Callable[[], int]) -> int:
    """Return the exit code of ``run``, and print its errors as one line."""
    try:
        return run()
    except (ValueError, ImportError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted; run the same command to resume", file=sys.stderr)
        return 130
