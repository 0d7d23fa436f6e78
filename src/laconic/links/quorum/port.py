"""The interface between a worker and rounds with a quorum, and the data that passes through it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor


def count_of(value: Any) -> int:
    """``value``, which must be a nonnegative integer; raises ``ValueError``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a nonnegative integer")
    return value


@dataclass(frozen=True)
class Rules:
    """When a round of one kind closes: ``grace`` seconds after ``quorum`` workers have arrived, or
    as soon as all expected workers have."""

    quorum: int
    grace: float


@dataclass(frozen=True)
class Announcement:
    """What a worker announces when it arrives at a round of the ``kind`` (an index).

    ``base``: the number of the round whose result the worker last received; 0: the common start.
    ``steps``: the number of steps since then, which took ``seconds``. ``step``: the number of steps
    in total. ``rates``: the learning rate of each bucket, where it counts. ``known``: whether rank
    0 has what the worker started from, bit for bit.
    """

    kind: int
    base: int
    steps: int
    seconds: float
    step: int
    rates: tuple[float, ...] = ()
    known: bool = True

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Announcement:
        """The inverse of ``vars``, from JSON. Raises ``LookupError``, ``TypeError`` or
        ``ValueError`` if ``fields`` do not have that form."""
        counts = [count_of(fields[name]) for name in ("kind", "base", "steps", "step")]
        kind, base, steps, step = counts
        seconds, rates = float(fields["seconds"]), tuple(float(r) for r in fields["rates"])
        if not 0 <= seconds < math.inf:
            raise ValueError(f"seconds must be finite and at least 0, not {seconds}")
        if not isinstance(known := fields["known"], bool):
            raise TypeError(f"known must be true or false, not {known!r}")
        return cls(kind, base, steps, seconds, step, rates, known)


class Delivery(NamedTuple):
    """What a worker delivers when it arrives: ``tensors``, and the results from which they started,
    ``bases``, if rank 0 needs them and may not have them. ``room``: tensors that whole results may
    be received into; None: ``tensors``."""

    announcement: Announcement
    tensors: Sequence[Tensor]
    bases: Sequence[Tensor] | None = None
    room: Sequence[Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of what is sent."""
        return sum(t.nbytes for t in (*self.tensors, *(self.bases or ())))


Result = Tensor | Sequence[Tensor]
"""What a worker receives for one tensor: a whole result, or the codes of all changes since the last
result that it received, in order."""


def tensors_of(results: Sequence[Result]) -> list[Tensor]:
    """The tensors of ``results``, in order."""
    groups = ([result] if isinstance(result, Tensor) else result for result in results)
    return [tensor for group in groups for tensor in group]


@dataclass(frozen=True)
class Closing:
    """A round with a quorum that has closed. `as_json` and `of` convert it to and from JSON data.

    Args:
        kind: 0, or the index of the fragment in its order of rounds.
        number: how many of the kind have closed, this one included.
        roster: the ranks of the workers that contributed, ascending.
        paces: for each of them, the number of steps until it arrives again; 0: as the schedule
            says.

    Examples:
        >>> laconic.Closing(kind=0, number=1, roster=(0, 2), paces=(12, 4)).pace(2)
        4
    """

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
        roster, paces = (tuple(map(count_of, fields[name])) for name in ("roster", "paces"))
        if len(roster) != len(paces):
            raise ValueError("a roster and its paces must have the same length")
        return cls(count_of(fields["kind"]), count_of(fields["number"]), roster, paces)


class Outcome(NamedTuple):
    """What a worker receives when its round has closed. It must not change the results."""

    closing: Closing
    results: Sequence[Result]

    @property
    def nbytes(self) -> int:
        """The bytes of the results."""
        return sum(t.nbytes for t in tensors_of(self.results))


def no_quorum(link: object) -> ValueError:
    """The error if rounds with a quorum are used over a ``link`` that does not support them."""
    return ValueError(
        "rounds with a quorum run between processes with models on the CPU, and in "
        f"laconic.simulate without link=, not over a {type(link).__name__}"
    )


class Merge(Protocol):
    """Called on rank 0 when a round closes, with what each worker of the roster delivers."""

    def __call__(
        self, closing: Closing, deliveries: Mapping[int, Delivery]
    ) -> Mapping[int, Sequence[Result]]:
        """Return what each of these workers receives for each of its tensors."""


class Speed(NamedTuple):
    """The latest measurement of a worker: its ``steps`` per second, and the seconds that its
    message took to reach rank 0, ``sending``."""

    steps: float
    sending: float


class Appointment(NamedTuple):
    """When a worker takes part again: after this many ``steps`` (0: as the schedule says), in the
    round that comes this many ``rounds`` later."""

    steps: int
    rounds: int = 1


Paces = Callable[[int, Mapping[int, Speed], Sequence[int]], Sequence[Appointment]]
"""A function of a kind, the latest speed of each worker (by rank), and the ranks of a roster.
Returns when each rank of the roster takes part again."""


class Port(Protocol):
    """The port of one worker. Only one thread at a time calls its methods."""

    @property
    def closings(self) -> list[Closing]:
        """All rounds so far, in the order in which they have closed. Empty except on rank 0."""

    def seconds(self, step: int) -> float:
        """The time, now that this worker has taken ``step`` steps: real, or virtual."""

    def worked(self, step: int, waited: float) -> float:
        """As `seconds`, but without the time spent waiting, which is ``waited`` real seconds."""

    def quiet(self) -> AbstractContextManager[object]:
        """A context in which no round closes in this process."""

    def restart(self, step: int) -> None:
        """Continue a loaded run from ``step`` at the present time."""

    @property
    def served(self) -> tuple[int, int]:
        """The bytes that this process has sent to other workers, and received from them, in all
        closed rounds; 0 except on rank 0."""

    def deliver(self, delivery: Delivery) -> Outcome:
        """Contribute to the next round that closes, and wait for that."""

    def meet(self, step: int) -> None:
        """Announce that this worker, after ``step`` steps, enters a call that waits for all
        workers. Until all of them have entered it, this worker counts as arrived, so that the other
        workers' rounds close."""

    def close(self) -> None:
        """Announce that this worker takes part in no more rounds."""

    def abandon(self) -> None:
        """Announce that this worker has failed, so that all others raise an error at their next
        round. Another thread may call this."""
