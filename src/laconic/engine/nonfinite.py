"""NaN and infinity in encoded messages, where a worker's model is sharded.

The ranks of such a worker each exchange their shard with other ranks, and so learn of different
errors. A rank that knows of none would go on, and wait for the others in FSDP's next collective.
"""

from __future__ import annotations

import torch

from laconic.algorithms.exchange import Exchange
from laconic.errors import NotFiniteError
from laconic.links.comm_thread import CommThread, Pending
from laconic.links.link import Link


class NonfiniteCheck:
    """Raises a `NotFiniteError` on all ranks of a worker, its ``shards``, if any had one."""

    def __init__(self, shards: Link, comm: CommThread) -> None:
        self._shards = shards
        self._comm = comm
        self._error: NotFiniteError | None = None

    def report(self, error: NotFiniteError) -> None:
        """Raise ``error``, or keep it for `check` if there are other shards. Runs in the
        communication thread."""
        if self._shards.size == 1:
            raise error
        self._error = self._error or error

    def check(self, exchange: Exchange, label: str) -> Pending[None]:
        """Behind all messages of a round, compare the shards. The result raises if any shard had an
        error."""
        needed = self._shards.size > 1 and exchange.slots
        return self._comm.submit(self._compare, label) if needed else Pending.of(None)

    def _compare(self) -> None:
        failed = self._shards.gather(torch.tensor([float(self._error is not None)]))
        error, self._error = self._error, None
        if bool(failed.any()):
            raise error or NotFiniteError("another shard of this worker's model was not finite")
