"""Rounds with a quorum where workers come and go: all decide, from what all say, when one closes.

In a poll every worker says whether it has arrived (`Standing`). All compute the same from that, so
no worker is needed to decide, and any may be lost.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laconic.links.calls import Call
from laconic.links.quorum.port import Paces, Rules, Speed
from laconic.links.quorum.syncer import closing_time

BUSY, ARRIVED, CALLING = range(3)
"""What a worker does: it computes, waits for a round, or waits in a call of all workers."""
CALLS = -1
"""In place of a kind of round: the call of all workers, in which all are now."""
POLL = Call(0, "round with a quorum")
"""The call that polls, and the rounds that close by them, belong to."""


class Standing(NamedTuple):
    """What one worker says in a poll.

    ``state``: `BUSY`, `ARRIVED` at a round of the ``kind``, or `CALLING`; ``waited``: for how many
    seconds it has been so. ``step``: the number of its steps; ``speed``: how many it takes per
    second, 0 if unknown. ``expected``: by kind, the number of the first round that waits for it
    during the grace. ``rates``: see `laconic.links.quorum.port.Announcement`.
    """

    state: int
    kind: int
    waited: float
    step: int
    speed: float
    expected: tuple[int, ...]
    rates: tuple[float, ...]

    def row(self) -> Tensor:
        """As numbers."""
        return torch.tensor([*self[:5], *self.expected, *self.rates], dtype=torch.float64)

    @classmethod
    def of(cls, row: Sequence[float], kinds: int) -> Standing:
        """The inverse of `row`."""
        state, kind, waited, step, speed, *rest = row
        expected = tuple(map(int, rest[:kinds]))
        return cls(int(state), int(kind), waited, int(step), speed, expected, tuple(rest[kinds:]))


@dataclass(frozen=True)
class Decision:
    """A round that closes: the workers of the ``roster`` (their ids) contribute to number
    ``number`` of its ``kind``. ``paces``: as in `Closing`. ``step`` and ``rates``: those of the
    first worker. Or the call of all workers (`CALLS`)."""

    kind: int
    number: int = 0
    roster: tuple[str, ...] = ()
    paces: tuple[int, ...] = ()
    step: int = 0
    rates: tuple[float, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Decision:
        """The inverse of `as_json`, also of what has been through JSON."""
        values: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        return cls(**values)

    def pack(self) -> Tensor:
        """As bytes."""
        text = json.dumps(self.as_json()).encode()
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    @classmethod
    def unpack(cls, data: Tensor) -> Decision:
        """The inverse of `pack`."""
        return cls.of(json.loads(bytes(data.tolist())))


class Polls:
    """Decides, from what all workers say, by id in the order of their ranks. ``rounds``: how many
    of each kind have closed."""

    def __init__(self, rules: Sequence[Rules], paces: Paces) -> None:
        self._rules, self._paces = rules, paces
        self.rounds = [0] * len(rules)

    def standings(self, ids: Sequence[str], rows: Tensor) -> dict[str, Standing]:
        """What each of the workers ``ids`` has said."""
        kinds = len(self._rules)
        return {id: Standing.of(r, kinds) for id, r in zip(ids, rows.tolist(), strict=True)}

    def next_closing(self, standings: Mapping[str, Standing]) -> tuple[float, int] | None:
        """The time, in seconds from now, and the kind of the next closing, if no other worker
        arrives before it. None: another one must arrive first."""
        there = {id: -s.waited for id, s in standings.items() if s.state != BUSY}
        if all(s.state == CALLING for s in standings.values()):
            return max(there.values()), CALLS
        found = []
        for kind, rules in enumerate(self._rules):
            mine = [-s.waited for s in standings.values() if (s.state, s.kind) == (ARRIVED, kind)]
            quorum, next_number = min(rules.quorum, len(standings)), self.rounds[kind] + 1
            expected = [id for id, s in standings.items() if s.expected[kind] <= next_number]
            time = closing_time(quorum, rules.grace, mine, there, expected)
            if time is not None:
                found.append((time, kind))
        return min(found, default=None)

    def overdue(self, standings: Mapping[str, Standing], limit: float) -> list[str]:
        """The workers that have computed for more than ``limit`` seconds, if another one has waited
        as long, and no round closes without them."""
        long = {id: s for id, s in standings.items() if s.waited > limit}
        if self.next_closing(standings) is not None or all(s.state == BUSY for s in long.values()):
            return []
        return [id for id, s in long.items() if s.state == BUSY]

    def close(self, standings: Mapping[str, Standing], kind: int, until: float) -> Decision:
        """Close a round of this ``kind`` with the workers that have arrived by the time
        ``until``."""
        if kind == CALLS:
            return Decision(CALLS)
        ids = list(standings)
        roster = [
            rank
            for rank, s in enumerate(standings.values())
            if (s.state, s.kind) == (ARRIVED, kind) and -s.waited <= until
        ]
        speeds = {r: Speed(s.speed, 0.0) for r, s in enumerate(standings.values()) if s.speed}
        paces = self._paces(kind, speeds, roster)
        first = standings[ids[roster[0]]]
        return Decision(
            *(kind, self.rounds[kind] + 1, tuple(ids[rank] for rank in roster)),
            *(tuple(each.steps for each in paces), first.step, first.rates),
        )


def rules_of(quorum: int | None, grace: float) -> Rules:
    """The rules where the number of workers changes. ``quorum``: None for all."""
    return Rules(sys.maxsize if quorum is None else quorum, grace)
