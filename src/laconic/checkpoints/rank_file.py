"""The file of one rank: written as plain data, and checked when it is read."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from laconic.checkpoints.all_ranks import one_line
from laconic.checkpoints.manifest import MANIFEST, Manifest


def write_rank_file(file: Path, payload: Mapping[str, Any]) -> None:
    """Write ``payload`` to ``file`` and to the disk (not the file's name: see `sync_folder`).

    Raises ``ValueError`` if ``payload`` is not plain data.
    """
    with file.open("wb") as opened:
        try:
            torch.save(payload, opened)
        except RuntimeError as error:  # torch replaces the file's own error
            cause = error.__context__
            raise cause if isinstance(cause, OSError) else error from error
        opened.flush()
        os.fsync(opened.fileno())
    foreign = torch.serialization.get_unsafe_globals_in_checkpoint(str(file))
    if foreign:
        raise ValueError(
            f"the state has {', '.join(sorted(foreign))}, which is no plain data: save numbers, "
            "strings, tensors, and lists and dicts of these"
        )


def read_rank_file(
    folder: Path, manifest: Manifest, rank: int, *, mapped: bool = False
) -> dict[str, Any]:
    """Read what `write_rank_file` wrote for ``rank`` in the save of ``manifest``. With ``mapped``
    the tensors stay on disk until they are used."""
    file = manifest.file(folder, rank)
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()  # torch.load compares no checksums
        if damaged is not None:
            raise ValueError(f"{file.name} is damaged (at {damaged})")
        payload = torch.load(str(file), map_location="cpu", weights_only=True, mmap=mapped)
    except (zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{file.name} is damaged or truncated: {one_line(error)}") from error
    except pickle.UnpicklingError as error:
        raise ValueError(f"{file.name} has more than plain data, and is not loaded") from error
    if not isinstance(payload, dict) or payload.get("token") != manifest.token:
        raise ValueError(f"{file.name} is not of the save that {MANIFEST} names")
    if payload["rank"] != rank:
        raise ValueError(f"{file.name} is the file of rank {payload['rank']}")
    return payload
