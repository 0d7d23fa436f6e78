"""Where the metrics of a run are written, for ``laconic.attach(..., metrics=)``.

A record is a dictionary of numbers and strings, one line of a file. `docs/metrics.md` lists its
fields. There is at most one per step and one every ``every`` seconds.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from typing import Any

from laconic.errors import check_float
from laconic.units import finite


class JsonLines:
    """Append one line of JSON per record to a file.

    Args:
        path: a file: rank 0 writes it. With ``{rank}`` in it, such as ``runs/{rank}.jsonl``: every
            rank writes its own, on its own host.
        every: the least number of seconds between two records. 0: one per step.

    Examples:
        >>> metrics = laconic.JsonLines("run.jsonl", every=10)
        >>> sync = laconic.attach(model, optimizer, laconic.local_sgd(8), metrics=metrics)
    """

    def __init__(self, path: str | os.PathLike[str], every: float = 1.0) -> None:
        self.every = check_float("every", every, 0.0)
        text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
        if not isinstance(text, str) or not text or "\0" in text:
            raise ValueError(f"metrics must be the path of a file, not {path!r}")
        self.path = text

    def of(self, rank: int) -> JsonLines | None:
        """What ``rank`` writes. Raises ``ValueError`` if there is no such place."""
        path = self.path.replace("{rank}", str(rank))
        if rank and path == self.path:
            return None
        if os.path.isdir(path):
            each = os.path.join(self.path, "{rank}.jsonl")
            raise ValueError(f"metrics={self.path!r} is a directory: give a file, such as {each}")
        if not os.path.isdir(os.path.dirname(path) or "."):
            raise ValueError(f"metrics={self.path!r}: no such directory: create it first")
        return JsonLines(os.path.abspath(path), self.every)  # the program may change its directory

    def write(self, record: Mapping[str, Any]) -> bool:
        """Append ``record``, or warn. Returns whether it was written."""
        line = (json.dumps(finite(record), allow_nan=False) + "\n").encode()
        try:
            with open(self.path, "ab+", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                    line = b"\n" + line  # the last line is incomplete: an earlier run was killed
                written = file.write(line)
            if written < len(line):
                raise OSError(f"{written} of {len(line)} bytes written: is the disk full?")
        except OSError as error:
            text = f"metrics stopped, training continues: {self.path}: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return False
        return True


MetricsArgument = str | os.PathLike[str] | JsonLines | None


def check_metrics(metrics: MetricsArgument) -> JsonLines | None:
    """Return what ``metrics`` names. Raises ``ValueError`` for anything else."""
    if metrics is None or isinstance(metrics, JsonLines):
        return metrics
    if isinstance(metrics, (str, os.PathLike)):
        return JsonLines(metrics)
    raise ValueError(f"metrics must be a path or laconic.JsonLines, not {metrics!r}")
