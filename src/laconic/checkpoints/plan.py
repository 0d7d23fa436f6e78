"""Plan a load: which saved ranks a rank goes on from, and which files ranks send each other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path

import torch

from laconic.checkpoints.all_ranks import AllRanks
from laconic.checkpoints.manifest import Manifest, make_folder
from laconic.engine.synchronizer import Synchronizer
from laconic.errors import after_step
from laconic.links.agreement import rank_list

RECEIVED = "received-"
"""Begins the names of temporary folders for the files that other ranks send."""
_CHUNK = 2**24
"""Bytes of a file that are sent at a time."""


@dataclass(frozen=True)
class Plan:
    """What each rank loads.

    ``visible``: by rank, the saved ranks whose files it can see. ``available``: those that any rank
    can see. ``averaged``: those of them whose consensus the run goes on from; none if each goes
    on from its own. ``shards``: in how many parts each worker has the model.
    ``ranks_per_worker``: 1 if the saved run had another number of ranks or workers. ``note``: the
    line for the log.
    """

    visible: Sequence[Sequence[int]]
    available: Sequence[int]
    averaged: Sequence[int]
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
        return Plan(visible, available, [], shards, per_worker)
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
    return Plan(visible, available, averaged, shards, per_worker if same else 1, note)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


@contextmanager
def received_files(
    folder: Path, manifest: Manifest, plan: Plan, sync: Synchronizer, all_ranks: AllRanks
) -> Iterator[Callable[[int], Path]]:
    """Send the files that some ranks need and cannot see. Yields a function from a saved rank to
    the path of its file. Files that were received are deleted at the end."""
    wanted = {
        source
        for rank, visible in enumerate(plan.visible)
        for source in {*plan.models(rank), plan.source(rank)} - {*visible}
    }
    own = plan.visible[sync.rank]
    with ExitStack() as stack:

        def make_received() -> Path:
            if wanted <= {*own}:
                return folder
            make_folder(folder)
            return Path(
                stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix=RECEIVED))
            )

        received = all_ranks.do(make_received) if wanted else folder

        def path(rank: int) -> Path:
            return manifest.file(folder if rank in own else received, rank)

        for source in sorted(wanted):
            sender = next(r for r, visible in enumerate(plan.visible) if source in visible)
            _send(manifest.file(folder, source), sender, path(source), sync, all_ranks)
        yield path


def _send(file: Path, sender: int, target: Path, sync: Synchronizer, all_ranks: AllRanks) -> None:
    """Send ``file`` from ``sender`` to ``target`` on every rank that cannot see it."""
    sends, receives = sync.rank == sender, target != file
    size = all_ranks.share(lambda: file.stat().st_size if sends else 0)[sender]
    with ExitStack() as stack:

        def open_files() -> tuple[BufferedReader | None, BufferedWriter | None]:
            source = stack.enter_context(file.open("rb")) if sends else None
            return source, stack.enter_context(target.open("wb")) if receives else None

        source, sink = all_ranks.do(open_files)
        for start in range(0, size, _CHUNK):
            chunk = bytearray(min(_CHUNK, size - start))

            def read(chunk: bytearray = chunk) -> None:
                if source is not None and source.readinto(chunk) != len(chunk):
                    raise OSError(f"{file.name} became shorter while it was read")

            def write(chunk: bytearray = chunk) -> None:
                if sink is not None:
                    sink.write(chunk)

            all_ranks.do(read)
            sync.share_bytes(torch.frombuffer(chunk, dtype=torch.uint8), sender)
            all_ranks.do(write)
