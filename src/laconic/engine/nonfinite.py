"""Refusals of codecs, where a worker's model is sharded: its ranks each send their shard to other
ranks than the rest of them do, and so learn of other refusals."""

from __future__ import annotations

import torch

from laconic.algorithms.exchange import Exchange
from laconic.errors import NotFiniteError
from laconic.links.comm_thread import Lane, Pending
from laconic.links.link import Link


class Refusals:
    """Has a `NotFiniteError` raised on all ranks of a worker, the ``shards``: those that know of
    none would go on, and wait for the others in FSDP's next call."""

    def __init__(self, shards: Link, lane: Lane) -> None:
        self._shards = shards
        self._lane = lane
        self._kept: NotFiniteError | None = None

    def keep(self, error: NotFiniteError) -> None:
        """Raise ``error``, or keep it until it is told, if there is anyone to tell; in the lane."""
        if self._shards.size == 1:
            raise error
        self._kept = self._kept or error

    def tell(self, exchange: Exchange, label: str) -> Pending[None]:
        """Behind all messages of a round: raises where one was kept on any of the ranks."""
        asked = self._shards.size > 1 and exchange.slots
        return self._lane.submit(self._tell, label) if asked else Pending.of(None)

    def _tell(self) -> None:
        told = self._shards.gather(torch.tensor([float(self._kept is not None)]))
        kept, self._kept = self._kept, None
        if bool(told.any()):
            raise kept or NotFiniteError("another shard of this worker's model was refused")
