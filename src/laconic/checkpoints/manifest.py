"""The manifest of a checkpoint, and the files in its directory."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from laconic.checkpoints.all_ranks import AllRanks
from laconic.links.agreement import rank_list

MANIFEST = "laconic.json"
_FORMAT, _VERSION = "laconic checkpoint", 1
_RANK_FILE = re.compile(r"rank-\d+-of-\d+\.(\d+)-[0-9a-f]+\.(pt|json|part\d+)")


@dataclass(frozen=True)
class Manifest:
    """Names the valid save. ``token`` is random, and in all its files."""

    serial: int
    token: str
    ranks: int
    workers: int
    step: int

    def file(self, folder: Path, rank: int) -> Path:
        """The file of ``rank`` in ``folder``."""
        return folder / f"rank-{rank}-of-{self.ranks}.{self.serial}-{self.token}.pt"

    def text(self) -> str:
        """The content of the manifest's file."""
        content = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        return json.dumps(content, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest | None:
    """Read and check the manifest in ``folder``; None if there is none."""
    try:
        text = (folder / MANIFEST).read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        saved = json.loads(text)
        kind = saved.pop("format"), saved.pop("version")
        manifest = Manifest(**saved) if kind == (_FORMAT, _VERSION) else None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} is damaged: {type(error).__name__}: {error}") from error
    if manifest is None:
        raise ValueError(
            f"{MANIFEST} has format and version {kind}, not {(_FORMAT, _VERSION)}: load it with "
            "the version of laconic that saved it"
        )
    return manifest


def newest(manifests: Sequence[Manifest | None], all_ranks: AllRanks) -> Manifest:
    """Return the newest of all ranks' manifests. They differ if a save was stopped after some hosts
    had renamed theirs. Raises ``ValueError`` if they are of several runs, or there is none."""
    by_rank = {rank: manifest for rank, manifest in enumerate(manifests) if manifest is not None}
    if not by_rank:
        raise all_ranks.error(
            f"there is no {MANIFEST}, so no checkpoint of laconic.save, in that directory; pass "
            "missing_ok=True to start without one"
        )
    serial = max(manifest.serial for manifest in by_rank.values())
    latest = {rank: manifest for rank, manifest in by_rank.items() if manifest.serial == serial}
    first = min(latest)
    differ = [rank for rank, manifest in latest.items() if manifest != latest[first]]
    if differ:
        raise all_ranks.error(
            f"{rank_list(differ)} see a checkpoint of another run than rank {first}: pass the "
            "directories of one run"
        )
    return latest[first]


def serials(folder: Path) -> dict[str, int]:
    """The serials of the rank files in ``folder``, and of files not yet renamed, by name."""
    matches = {file: _RANK_FILE.fullmatch(file) for file in os.listdir(folder)}
    return {file: int(match[1]) for file, match in matches.items() if match is not None}


def delete_files(folder: Path, unwanted: Callable[[str, int], bool]) -> None:
    """Delete the rank files that are ``unwanted``, by name and serial. The next save deletes what
    cannot be deleted now."""
    with suppress(OSError):
        for file, serial in serials(folder).items():
            if unwanted(file, serial):
                (folder / file).unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make ``folder`` and its missing parents, and have them survive a power loss."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


def sync_folder(folder: Path) -> None:
    """Have the file names in ``folder`` survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
