"""Calls: what all ranks do together, and where a rank is in its sequence of them."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

GRADIENTS = "gradients"
"""The name of the call in which gradients are averaged; it begins before its step is counted."""
FINISH = "finish()"
"""The name of the call after which the ranks owe each other nothing until the next one."""


SAME_CALLS = (
    "Every rank must take the same optimizer steps, freeze the same parameters, and make the same "
    "laconic calls, outside any `if rank == 0`; a GradScaler that skips steps is passed as scaler= "
    "to laconic.attach or laconic.CommOptimizer"
)
"""What to do where ranks are in different calls, for messages."""


class Call(NamedTuple):
    """One thing that all ranks do together, such as a round: its ``name``, and the number of
    optimizer steps taken before it; 0 also where ranks need not have taken equally many. A call may
    consist of several collectives. ``starts``: it is the first of the rounds of its step, from
    which newcomers can take part. ``digest``: of what all ranks should hold alike, from 0 to 2**64
    - 1; the messages carry it, and ranks compare it. ``of``: what else must be the same on all
    ranks, as the name goes on."""

    step: int
    name: str
    starts: bool = False
    digest: int = 0
    of: str = ""

    def __str__(self) -> str:
        what = self.name + self.of
        return f"{what} after {self.step} steps" if self.step else what

    @property
    def id(self) -> int:
        """A hash of step, name and ``of``, the same in every process, at least 0 and below 2**63.
        Every message carries it, so messages of different calls are never mixed up."""
        digest = blake2b(str(self).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


class CallPosition(NamedTuple):
    """Where a rank is in its sequence of calls.

    ``serial``: the number of calls so far. ``call``: the last one; None where it is unknown, or
    there was none. ``left``: no more calls will come. ``broken``: even that one is not completed.
    """

    serial: int = 0
    call: Call | None = None
    left: bool = False
    broken: bool = False

    def __str__(self) -> str:
        if not self.serial:
            what = "no call yet"
        else:
            what = "another call" if self.call is None else str(self.call)
        return f"{what}, and has left" if self.left else what
