"""Resume a checkpoint with another number of workers, and without one host's directory."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import laconic as la
from benchmarks.traps import Trapped, trap
from benchmarks.traps.consensus import RECIPES, Worker, loss_of, simulate

SAVED_AT, FOLLOW = 37, 24
"""At the first, no outer step is due, and recipes with a delay have messages in flight."""
RESTARTS = 5
"""Restarts with the same number of workers and different batches, to measure their spread."""
CLOSE = 1.001
"""Maximum loss of the loaded consensus, relative to that of the saved one."""


@dataclass(frozen=True)
class Restart:
    """Losses of the consensus: as loaded, and after `FOLLOW` more steps."""

    loaded: float
    after: float


def grouped(size: int | None, workers: int) -> int | None:
    """Return the group size for a number of workers, for recipes with groups."""
    return None if size is None else (size if workers % size == 0 else 1)


def save(
    recipe: la.Recipe, size: int | None, folders: Sequence[Path], load: Sequence[Path] | None
) -> float:
    """Train `SAVED_AT` steps, from ``load`` if given, and save. Return the consensus loss."""

    def run(rank: int) -> float:
        worker = Worker(recipe, rank, grouped(size, len(folders)))
        if load is not None:
            la.load(load[rank], worker.model, worker.optimizer)
        worker.go(worker.sync.step + SAVED_AT)
        la.save(folders[rank], worker.model, worker.optimizer)
        with worker.sync.consensus() as model:
            return loss_of(model)

    return float(simulate(run, len(folders))[0])


def restart(recipe: la.Recipe, size: int | None, folders: Sequence[Path], data: int) -> Restart:
    """Resume from a checkpoint, with batches selected by ``data``."""

    def run(rank: int) -> Restart:
        worker = Worker(recipe, rank, grouped(size, len(folders)), data)
        la.load(folders[rank], worker.model, worker.optimizer)
        with worker.sync.consensus() as model:
            loaded = loss_of(model)
        worker.go(worker.sync.step + FOLLOW)
        with worker.sync.consensus() as model:
            return Restart(loaded, loss_of(model))

    first: Restart = simulate(run, len(folders))[0]
    return first


def judge(name: str, saved: float, one: Restart, others: Sequence[Restart], what: str) -> str:
    """Raise `Trapped` unless the later loss is within the spread of restarts with equal workers.

    It may exceed their mean by their range, or by 5% if that is more.
    """
    losses = [other.after for other in others]
    mean = sum(losses) / len(losses)
    most = mean + max(max(losses) - min(losses), 0.05 * mean)
    text = (
        f"{name}, {what}: loss {saved:.4f} when saved, {one.loaded:.4f} as loaded, {one.after:.4f} "
        f"after {FOLLOW} steps (restarts as before: {min(losses):.4f} to {max(losses):.4f})"
    )
    print(text, flush=True)
    if not one.after <= most:
        raise Trapped(text)
    return text


def _each_recipe(check: Callable[[str, la.Recipe, int | None, Path], None]) -> str:
    logging.getLogger("laconic").setLevel(logging.ERROR)
    for name, (recipe, size) in RECIPES.items():
        with tempfile.TemporaryDirectory() as folder:
            check(name, recipe, size, Path(folder))
    return f"{len(RECIPES)} recipes resume"


def _check_accepted(name: str, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (ValueError, OSError) as error:
        raise Trapped(f"{name}: {' '.join(str(error).split())[:300]}") from error


@trap("every recipe, saved in the middle of a period, resumes with 4 -> 3 -> 5 workers", 1200)
def other_workers() -> str:
    def check(name: str, recipe: la.Recipe, size: int | None, base: Path) -> None:
        four, three = [base / "four"] * 4, [base / "three"] * 3
        saved = save(recipe, size, four, None)
        others = [restart(recipe, size, four, 1 + k) for k in range(RESTARTS)]
        fewer = _check_accepted(name, lambda: restart(recipe, size, four[:3], 1))
        if not fewer.loaded <= CLOSE * saved:
            raise Trapped(f"{name}: loss {saved:.4f} when saved, {fewer.loaded:.4f} as loaded by 3")
        judge(name, saved, fewer, others, "4 -> 3")
        again = save(recipe, size, three, four[:3])
        others = [restart(recipe, size, three, 1 + k) for k in range(RESTARTS)]
        more = _check_accepted(name, lambda: restart(recipe, size, [base / "three"] * 5, 1))
        if not more.loaded <= CLOSE * again:
            raise Trapped(f"{name}: loss {again:.4f} when saved, {more.loaded:.4f} as loaded by 5")
        judge(name, again, more, others, "3 -> 5")

    return _each_recipe(check)


@trap("every recipe resumes after one of four hosts loses its directory", 1200)
def lost_directory() -> str:
    def check(name: str, recipe: la.Recipe, size: int | None, base: Path) -> None:
        hosts = [base / f"host{rank}" for rank in range(4)]
        saved = save(recipe, size, hosts, None)
        others = [restart(recipe, size, hosts, 1 + k) for k in range(RESTARTS)]
        shutil.rmtree(hosts[2])
        left = _check_accepted(name, lambda: restart(recipe, size, hosts, 1))
        judge(name, saved, left, others, "without host 2")

    return _each_recipe(check)
