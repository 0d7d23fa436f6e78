"""What ranks compare: which tensors all of them have, and whether the values are the same, by
digests, so that equal tensors cost no more than a few bytes; whether messages were finite, where a
worker's model is sharded; and their first gradients, which show identical batches.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from laconic.algorithms.exchange import Exchange
from laconic.errors import NotFiniteError
from laconic.links.comm_thread import CommThread, Pending
from laconic.links.frames import crc32
from laconic.links.link import Link
from laconic.tensors import as_bytes, describe, local, parts, sums

_COUNTED = 2**24
"""More than the number of tensors."""


def digest(pieces: Iterable[Tensor]) -> int:
    """A number from 1 to 2**32 that depends on every bit of the plain tensors ``pieces``, and on
    their order: the CRC-32 of all bytes, plus 1. Those of an accelerator are copied to the host."""
    crc = 0
    for x in pieces:
        data = as_bytes(x).contiguous().cpu()
        crc = crc32(data.data_ptr(), data.numel(), crc)
    return 1 + crc


def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")


def held_by_all(
    link: Link, groups: Sequence[Mapping[str, Tensor]], *, differing: bool = False
) -> list[dict[str, Tensor]]:
    """The tensors of each group that all ranks of ``link`` have, by name, shape and dtype; with
    ``differing``, those of them whose values are not the same on all ranks.

    Sends one number, and one for each tensor; with ``differing`` two for each, or none if nothing
    differs.
    """
    rows = [
        (
            _number(f"{g} {name} {describe(local(t))}"),
            digest(parts(local(t)).values()) if differing and link.size > 1 else 0,
        )
        for g, group in enumerate(groups)
        for name, t in group.items()
    ]
    columns = 2 if differing else 1
    summary = len(rows) + (_number(repr(rows)) % 2**32 * _COUNTED if differing else 0)
    everyone = {int(number) for number in link.gather(torch.tensor([summary])).flatten()}
    most = max(number % _COUNTED for number in everyone)
    if not most or (differing and len(everyone) == 1):
        return [{} for _ in groups]
    padded = torch.zeros(most, columns, dtype=torch.int64)
    padded[: len(rows)] = torch.tensor(rows)[:, :columns] if rows else padded[:0]
    held = [dict((row[0], row[-1]) for row in own) for own in link.gather(padded).tolist()]

    def found(key: int) -> bool:
        values = {own.get(key) for own in held}
        return None not in values and (len(values) > 1 or not differing)

    keys = iter(rows)
    return [{name: t for name, t in group.items() if found(next(keys)[0])} for group in groups]


class NonfiniteCheck:
    """Raises a `NotFiniteError` on all ranks of a worker if any had one. They are the ranks of
    ``inside``, and each of them carries its own part of the worker's messages by ``exchange``."""

    def __init__(self, inside: Link, exchange: Exchange, comm: CommThread) -> None:
        self._inside = inside
        self._needed = inside.size > 1 and bool(exchange.slots)
        self._comm = comm
        self._error: NotFiniteError | None = None

    def report(self, error: NotFiniteError) -> None:
        """Raise ``error``, or keep it for `check` if there are other ranks. Runs in the
        communication thread."""
        if not self._needed:
            raise error
        self._error = self._error or error

    def check(self, label: str) -> Pending[None]:
        """Behind all messages of a round, compare the ranks. The result raises if any of them had
        an error."""
        return self._comm.submit(self._compare, label) if self._needed else Pending.of(None)

    def _compare(self) -> None:
        failed = self._inside.gather(torch.tensor([float(self._error is not None)]))
        error, self._error = self._error, None
        if bool(failed.any()):
            raise error or NotFiniteError("what another rank of this worker carries is not finite")


def fingerprint(params: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sums of g, of |g| and of 1 over a rank's own gradients, as float64 on ``device``."""
    own = [local(p.grad) for p in params if p.grad is not None]
    count = torch.tensor([sum(g.numel() for g in own)], dtype=torch.float64)
    return torch.cat([sums(own), count]).to(device)


def check_first_gradients(everyone: Tensor) -> None:
    """Warn if all ranks' fingerprints are identical, and not zero. With recipes that average
    gradients, they are taken before any averaging."""
    size = float(everyone[0, 1])
    if len(everyone) > 1 and 0 < size < math.inf and bool((everyone == everyone[0]).all()):
        warnings.warn(
            "the first gradients are identical on all workers. Either they are reading the same "
            "batches: give each its share of the data (DistributedSampler, ElasticSampler, or seed "
            "by rank). Or the loop trains through a DistributedDataParallel around the model, "
            "which averages all gradients at every step: call the plain module (model.module)",
            stacklevel=2,
        )
