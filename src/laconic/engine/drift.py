"""Finds workers whose parameters should be equal and are not, and repairs them.

Where only gradients are averaged, every worker takes the same steps, and all should hold the same
x. Processors of different kinds round differently, and memory can fail. So every worker computes a
digest of a part of its x, another part in each step. The messages of the step's gradients carry it,
at no cost. If the digests differ, all workers know it at the end of the same step.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laconic.buckets import local

if TYPE_CHECKING:
    from laconic.engine.session import Session

PART, PARTS = 2**14, 256
"""The least elements of a part, and the most parts that x is cut into."""
REPAIR_STEPS = 1000
"""The least number of steps between two repairs. Where processors differ, workers drift apart by
roundings at every step, which does no harm for long, and a repair costs as much as a round."""
_PIECE = 2**16
_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # odd, so that every change of one element shows
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(pieces: Sequence[Tensor]) -> int:
    """A number from 1 to 2**64 - 1 that depends on every bit of the flat tensors ``pieces``, and on
    their order: the sum of all elements' bits as integers, times odd numbers, modulo 2**64."""
    total = torch.zeros((), dtype=torch.int64)
    for piece in pieces:
        for x in torch.split(torch.view_as_real(piece) if piece.is_complex() else piece, _PIECE):
            bits = x.reshape(-1).view(_INTEGERS[x.element_size()]).to(torch.int64) + 1
            weights = 2 * torch.arange(len(bits), dtype=torch.int64) + 1
            total = total * _FACTOR + (bits * weights).sum()
    return int(total) % 2**64 or 1


def part_of(tensors: Sequence[Tensor], number: int) -> Iterator[Tensor]:
    """The part ``number``, counted around, of the ``tensors`` one after the other."""
    flat = [local(t).detach().reshape(-1) for t in tensors]
    total = sum(map(len, flat))
    each = max(PART, -(-total // PARTS))
    start = number % max(-(-total // each), 1) * each
    for x in flat:
        if start < len(x) and start + each > 0:
            yield x[max(start, 0) : start + each]
        start -= len(x)


def largest_group(digests: Sequence[int]) -> int:
    """The first rank of the largest group of ranks with equal digests; of two, of the first."""
    ((most, _),) = Counter(digests).most_common(1)
    return digests.index(most)


class DriftCheck:
    """Compares what the workers of ``session`` hold. ``found``: in how many steps they differed."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._repaired: int | None = None
        """The step of the last repair."""
        self._sent = False
        """Whether digests were sent since the last look."""
        self.found = 0

    @property
    def possible(self) -> bool:
        """Whether this run's messages can carry digests, and every rank hears from all others."""
        session = self._session
        alike = session.elastic is None and session.workers.size == session.world.size > 1
        return alike and session.device.type == "cpu" and not session.sharded

    def digest(self) -> int:
        """What the gradients of the next step carry."""
        if not self.possible:
            return 0
        self._sent = True
        return digest(list(part_of(self._session.params(), self._session.step)))

    @torch.no_grad()
    def after_step(self) -> None:
        """Look whether the workers differed before this step, and repair them. All ranks see the
        same digests, so all of them do the same."""
        if not self._sent:
            return
        self._sent, digests = False, self._session.workers.digests()
        if len(set(digests)) < 2:
            return
        session, root = self._session, largest_group(digests)
        other = [r for r, value in enumerate(digests) if value != digests[root]]
        self.found += 1
        repairs = self._repaired is None or session.step - self._repaired >= REPAIR_STEPS
        if self.found == 1 and session.world.rank == 0:
            warnings.warn(
                f"the workers' parameters have drifted apart: at step {session.step} ranks {other} "
                f"differ from rank {root}, though all took the same steps. Their processors round "
                "differently, memory is faulty, or the training changes parameters on some ranks "
                f"only. They get rank {root}'s parameters and optimizer state, now and whenever it "
                f"is found again, at most every {REPAIR_STEPS} steps",
                stacklevel=2,
            )
        session.recorder.event("drift", ranks=other, repaired=repairs)
        if repairs:
            self._repaired = session.step
            self._repair(root)

    def _repair(self, root: int) -> None:
        session = self._session
        session.call("repairing replicas")
        assert session.optimizer is not None, "a step was taken"
        states = [session.optimizer.state.get(p, {}) for p in session.params()]
        tensors = [v for s in states for _, v in sorted(s.items()) if isinstance(v, Tensor)]
        session.broadcast([*session.params(), *tensors], root)
