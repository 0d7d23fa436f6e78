"""Plan a load: which saved ranks a rank goes on from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from laconic.checkpoints.all_ranks import AllRanks, rank_list
from laconic.checkpoints.manifest import Manifest
from laconic.engine.synchronizer import Synchronizer


@dataclass(frozen=True)
class Plan:
    """What each rank loads.

    ``visible``: by rank, the saved ranks whose files it can see. ``available``: those that any rank
    can see. ``averaged``: those of them whose consensus the run goes on from, if it does
    (``regroup``). ``shards``: in how many parts each worker has the model. ``ranks_per_worker``: 1
    if the saved run had another number of ranks or workers. ``note``: the line for the log.
    """

    visible: Sequence[Sequence[int]]
    available: Sequence[int]
    averaged: Sequence[int]
    regroup: bool
    shards: int
    ranks_per_worker: int
    note: str = ""

    def source(self, rank: int) -> int:
        """The saved rank whose optimizer state and ``others`` ``rank`` takes."""
        if rank in self.available:
            return rank
        same_shard = [r for r in self.available if r % self.shards == rank % self.shards]
        per_worker = self.ranks_per_worker
        same_worker = [r for r in same_shard if r // per_worker == rank // per_worker]
        choices = same_worker or same_shard
        return choices[rank // self.shards % len(choices)]

    def models(self, rank: int) -> list[int]:
        """The saved ranks whose models ``rank`` loads: to average, those with its shard."""
        if not self.regroup:
            return [rank]
        return [r for r in self.averaged if r % self.shards == rank % self.shards]


def make_plan(folder: Path, manifest: Manifest, sync: Synchronizer, all_ranks: AllRanks) -> Plan:
    """Plan the load, alike on every rank. Raises ``ValueError`` if too many files are lost."""
    saved_ranks = range(manifest.ranks)
    visible = all_ranks.share(lambda: [r for r in saved_ranks if manifest.file(folder, r).exists()])
    available = sorted({r for ranks_seen in visible for r in ranks_seen})
    lost = [r for r in saved_ranks if r not in available]
    ranks, workers = len(visible), sync.workers
    per_worker, saved_per_worker = ranks // workers, manifest.ranks // manifest.workers
    same = (manifest.ranks, manifest.workers) == (ranks, workers)
    shards = per_worker if sync.sharded else 1
    saved = f"saved by {manifest.workers} workers ({_count(manifest.ranks, 'rank')})"
    files = f"; the files of {rank_list(lost)} are lost" if lost else ""
    if not available:
        raise all_ranks.error(f"{saved}{files}: there is nothing to go on from")
    if shards > 1 and saved_per_worker != shards:
        raise all_ranks.error(
            f"{saved} with {saved_per_worker} ranks each, and each worker has {per_worker} now: a "
            "sharded model needs as many"
        )
    if {r % shards for r in available} != set(range(shards)):
        raise all_ranks.error(f"{saved}{files}, and with them the last copy of a part of the model")
    if same and not lost:
        return Plan(visible, available, available, False, shards, per_worker)
    complete = [
        r for r in available if all(r // shards * shards + k in available for k in range(shards))
    ]
    averaged = complete or available
    count = len({r // saved_per_worker for r in averaged})
    note = (
        f"{all_ranks.call}: {saved}{files}. {_count(workers, 'worker')} ({_count(ranks, 'rank')}) "
        f"continue after step {manifest.step} from the mean of {_count(count, 'saved worker')}; "
        "outer state is redistributed, private state averaged"
    )
    return Plan(visible, available, averaged, True, shards, per_worker if same else 1, note)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
