"""Plan a load: which saved ranks a rank goes on from, and which files ranks send each other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from io import BufferedWriter
from pathlib import Path

import torch

from laconic.checkpoints.all_ranks import AllRanks
from laconic.checkpoints.manifest import Manifest, make_folder
from laconic.engine.synchronizer import Synchronizer
from laconic.errors import after_step
from laconic.links.agreement import rank_list
from laconic.tensors import raw_bytes

_CHUNK = 2**24
"""Bytes of a file that are sent at a time."""


@dataclass(frozen=True)
class Plan:
    """What each rank loads.

    ``visible``: by rank, the saved ranks whose files it can see. ``available``: those that any rank
    can see. ``averaged``: those of them whose consensus the run goes on from; none if each goes
    on from its own. ``shards``: in how many parts each worker has the model. ``note``: the line for
    the log.
    """

    visible: Sequence[Sequence[int]]
    available: Sequence[int]
    averaged: Sequence[int]
    shards: int
    note: str = ""

    def source(self, rank: int) -> int:
        """The saved rank whose optimizer state and ``others`` ``rank`` takes."""
        if rank in self.available:
            return rank
        same_shard = [r for r in self.available if r % self.shards == rank % self.shards]
        return same_shard[rank // self.shards % len(same_shard)]

    def models(self, rank: int) -> list[int]:
        """The saved ranks whose models ``rank`` loads: to average, those with its shard."""
        return [r for r in self.averaged if r % self.shards == rank % self.shards] or [rank]


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
    saved = f"saved by {_count(manifest.workers, 'worker')} ({_count(manifest.ranks, 'rank')})"
    files = f"; the files of {rank_list(lost)} are lost" if lost else ""
    if not available:
        raise all_ranks.error(f"{saved}{files}: there is nothing to load")
    if shards > 1 and saved_per_worker != shards:
        raise all_ranks.error(
            f"{saved} with {saved_per_worker} ranks each, and each worker has {per_worker} now: a "
            "sharded model needs as many"
        )
    if {r % shards for r in available} != set(range(shards)):
        raise all_ranks.error(
            f"{saved}{files}, and with them the last copy of a shard of the model"
        )
    if same and not lost:
        return Plan(visible, available, [], shards)
    complete = [
        r for r in available if all(r // shards * shards + k in available for k in range(shards))
    ]
    averaged = complete or available
    count = len({r // saved_per_worker for r in averaged})
    note = (
        f"{all_ranks.call}: {saved}{files}. {_count(workers, 'worker')} ({_count(ranks, 'rank')}) "
        f"continue {after_step(manifest.step)} from the mean of {_count(count, 'saved worker')}; "
        "outer state is redistributed, private state averaged"
    )
    return Plan(visible, available, averaged, shards, note)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def send_missing(
    folder: Path, manifest: Manifest, plan: Plan, sync: Synchronizer, all_ranks: AllRanks
) -> None:
    """Send the files that some ranks need and cannot see. They stay until the next save."""
    wanted = {
        source
        for rank, visible in enumerate(plan.visible)
        for source in {*plan.models(rank), plan.source(rank)} - {*visible}
    }
    for source in sorted(wanted):
        sender = next(r for r, visible in enumerate(plan.visible) if source in visible)
        receives = source not in plan.visible[sync.rank]
        _send(manifest.file(folder, source), sender, receives, sync, all_ranks)


def _send(file: Path, sender: int, receives: bool, sync: Synchronizer, all_ranks: AllRanks) -> None:
    """Send ``file`` from ``sender`` to the ranks that cannot see it."""
    part = file.with_suffix(f".part{sync.rank}")  # ranks may share the directory
    size = all_ranks.share(lambda: file.stat().st_size if sync.rank == sender else 0)[sender]
    with ExitStack() as stack:

        def open_files() -> tuple[torch.Tensor | None, BufferedWriter | None]:
            if sync.rank == sender:
                return torch.from_file(str(file), size=size, dtype=torch.uint8), None
            if receives:
                make_folder(part.parent)
            return None, stack.enter_context(part.open("wb")) if receives else None

        whole, sink = all_ranks.do(open_files)
        for start in range(0, size, _CHUNK):
            length = min(_CHUNK, size - start)
            chunk = torch.empty(length, dtype=torch.uint8)
            if whole is not None:
                chunk.copy_(whole[start : start + length])
            sync.share_bytes(chunk, sender)

            def write(chunk: torch.Tensor = chunk) -> None:
                if sink is not None:
                    sink.write(raw_bytes(chunk))
                    sink.flush()  # closing then raises nothing, on one rank alone

            all_ranks.do(write)
    all_ranks.do(partial(os.replace, part, file) if receives else lambda: None)
