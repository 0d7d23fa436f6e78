"""Save a checkpoint in the three phases that `laconic.checkpoints` describes."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from laconic.checkpoints.all_ranks import AllRanks
from laconic.checkpoints.manifest import (
    MANIFEST,
    Manifest,
    delete_files,
    make_folder,
    read_manifest,
    serials,
    sync_folder,
)
from laconic.checkpoints.rank_file import write_rank_file
from laconic.checkpoints.training_state import TrainingState


def save(folder: Path, training: TrainingState, all_ranks: AllRanks) -> None:
    """Save ``training`` in ``folder``; every rank calls it."""
    rank = training.sync.rank

    def prepare() -> tuple[int, str]:
        training.check_names()
        make_folder(folder)
        return max(serials(folder).values(), default=0), secrets.token_hex(8)

    prepared = all_ranks.share(prepare)
    training.bind()
    manifest = Manifest(
        serial=max(serial for serial, _ in prepared) + 1,
        token=prepared[0][1],
        ranks=len(prepared),
        workers=training.sync.workers,
        step=training.sync.step,
    )
    own = manifest.file(folder, rank)
    own_manifest = own.with_suffix(".json")

    def write_files() -> None:
        write_rank_file(own, {"token": manifest.token, "rank": rank, **training.state_dict()})
        with own_manifest.open("w") as opened:
            opened.write(manifest.text())
            opened.flush()
            os.fsync(opened.fileno())
        sync_folder(folder)

    def commit() -> None:
        other = read_manifest(folder)
        if other and other.serial >= manifest.serial and other.token != manifest.token:
            raise ValueError("another run saves to this directory: give each run its own")
        os.replace(own_manifest, folder / MANIFEST)
        sync_folder(folder)

    try:
        all_ranks.do(write_files)
    except (OSError, ValueError):  # all ranks know, so none commits; after a LinkError some may
        delete_files(
            folder,
            lambda name, serial: serial == manifest.serial and name.startswith(f"rank-{rank}-"),
        )
        raise
    all_ranks.do(commit)
    delete_files(folder, lambda _, serial: serial < manifest.serial)
