"""Send rank files between ranks that do not share a directory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from io import BufferedReader, BufferedWriter
from pathlib import Path

import torch

from laconic.checkpoints.all_ranks import AllRanks
from laconic.checkpoints.manifest import Manifest, make_folder
from laconic.checkpoints.plan import Plan
from laconic.engine.synchronizer import Synchronizer

RECEIVED = "received-"
"""Begins the names of temporary folders for the files that other ranks send."""
_CHUNK = 2**24
"""Bytes of a file that are sent at a time."""


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
