"""A worker's port to rounds that close with a quorum, and what goes over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor


def _count(value: Any) -> int:
    """``value``, a number of something; raises ``ValueError``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no number of anything")
    return value


@dataclass(frozen=True)
class Rules:
    """When a round of one kind closes: ``grace`` seconds after ``quorum`` workers have arrived, or
    as soon as all have."""

    quorum: int
    grace: float


@dataclass(frozen=True)
class Announcement:
    """What a worker says when it arrives at a round of the ``kind`` (an index).

    ``base``: the number of the round whose result its x began with; 0: the common start. ``steps``:
    taken since, in ``seconds``. ``step``: taken in all. ``rates``: the learning rate of each
    parameter group.
    """

    kind: int
    base: int
    steps: int
    seconds: float
    step: int
    rates: tuple[float, ...] = ()

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Announcement:
        """The inverse of ``vars``, from JSON. Raises ``LookupError``, ``TypeError`` and
        ``ValueError`` where ``fields`` are not of that form."""
        counts = [_count(fields[name]) for name in ("kind", "base", "steps", "step")]
        kind, base, steps, step = counts
        seconds, rates = float(fields["seconds"]), tuple(float(r) for r in fields["rates"])
        return cls(kind, base, steps, seconds, step, rates)


class Delivery(NamedTuple):
    """What a worker delivers when it arrives: ``tensors``, and, if rank 0 may not know them, the
    ``bases`` that these began with."""

    announcement: Announcement
    tensors: Sequence[Tensor]
    bases: Sequence[Tensor] | None = None


@dataclass(frozen=True)
class Closing:
    """A round with a quorum that has closed. ``kind``: 0, or the index of the fragment in its
    order of rounds. ``number``: how many of the kind have closed, this one included. ``roster``:
    the ranks of the workers that contributed, ascending. ``paces``: for each of them, how many
    steps it takes until it arrives again; 0: as the schedule says. `as_json` and `of` convert it to
    and from what JSON holds."""

    kind: int
    number: int
    roster: tuple[int, ...]
    paces: tuple[int, ...]

    def pace(self, rank: int) -> int:
        """The steps of ``rank``, one of the roster, until it arrives again."""
        return self.paces[self.roster.index(rank)]

    def as_json(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return {**asdict(self), "roster": [*self.roster], "paces": [*self.paces]}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Closing:
        """The inverse of `as_json`; raises as `Announcement.of`."""
        roster, paces = (tuple(map(_count, fields[name])) for name in ("roster", "paces"))
        if len(roster) != len(paces):
            raise ValueError("each rank of a roster has a pace")
        return cls(_count(fields["kind"]), _count(fields["number"]), roster, paces)


def no_quorum(link: object) -> ValueError:
    """The error where rounds with a quorum would run over ``link``."""
    return ValueError(
        "rounds with a quorum run between processes with models on the CPU, and in "
        f"laconic.simulate without link=, not over a {type(link).__name__}"
    )


class Merge(Protocol):
    """Called on rank 0 when a round closes, with what each worker of the roster delivers."""

    def __call__(self, closing: Closing, deliveries: Mapping[int, Delivery]) -> list[Tensor]:
        """Return the result of each tensor, for all of them."""


class Speed(NamedTuple):
    """What was last seen of a worker: its ``steps`` per second, and the seconds that its message
    took to rank 0, ``sending``."""

    steps: float
    sending: float


class Appointment(NamedTuple):
    """When a worker takes part again: after so many ``steps`` (0: as the schedule says), in the
    round that is so many ``rounds`` later."""

    steps: int
    rounds: int = 1


Paces = Callable[[int, Mapping[int, Speed], Sequence[int]], Sequence[Appointment]]
"""From a kind, the last known speed of each worker, by rank, and the ranks of a roster: when each
of these takes part again."""


class Port(Protocol):
    """One worker's. The calls come from one thread at a time."""

    @property
    def closings(self) -> list[Closing]:
        """All rounds so far, in the order in which they have closed. Empty except on rank 0."""

    def seconds(self, step: int) -> float:
        """The time, now that this worker has taken ``step`` steps: real, or virtual."""

    def worked(self, step: int, waited: float) -> float:
        """As `seconds`, without the time spent waiting, of which ``waited`` real seconds."""

    def quiet(self) -> AbstractContextManager[object]:
        """A context in which no round closes in this process."""

    def restart(self, step: int) -> None:
        """A loaded run goes on from ``step`` at the present time."""

    def deliver(self, delivery: Delivery) -> Closing:
        """Contribute to the next round that closes. Wait for that, and write the results into the
        tensors."""

    def meet(self, step: int) -> None:
        """This worker, after ``step`` steps, goes into a call that waits for all workers. Until all
        of them do, it counts as arrived, so that rounds of the others close."""

    def close(self) -> None:
        """This worker takes part in no more rounds."""

    def abandon(self) -> None:
        """This worker has failed. All others raise that at their next round. May come from another
        thread."""
