"""Detects workers whose values should be equal but differ, and names the workers.

If only gradients are averaged, every worker takes the same steps, and x should be equal on all
workers. After a parameter round whose exchange agrees (`Exchange.agrees`), the state that every
worker keeps should be equal: anchors and outer momenta that are not sharded, references of coded
messages. Values can still differ, because processors of different kinds round differently and
memory can fail. Every worker therefore computes a digest of a part of these values, a different
part each time. The headers of the next gradients, or of the next round of that kind, carry the
digest, at no cost. If the digests differ, all workers know it at the end of that call. Nothing is
repaired: that would hide the cause. The consensus averages what differs.

The communication thread computes the digests, right before the first message: those of values on an
accelerator wait for its work, and for a copy.

Values that may differ are not compared: x between rounds, the state of gossip, residuals.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from laconic.engine.comparison import digest
from laconic.engine.parameter_rounds import ParameterRunner
from laconic.engine.session import Session
from laconic.links.comm_thread import Pending
from laconic.links.link import Link

PART, PARTS = 2**14, 256
"""The least number of elements in a part, and the most parts. Gradients carry the digest of one
part, and rounds, which are rarer, that of `OF_ROUND` parts."""
OF_ROUND = 16


Digest = Callable[[], int]
"""Computes a digest, in the communication thread."""


def no_digest() -> int:
    """Nothing is compared."""
    return 0


def parts_of(tensors: Sequence[Tensor], first: int, count: int = 1) -> Iterator[Tensor]:
    """``count`` parts of the concatenated ``tensors``, beginning with the part ``first`` and
    wrapping around."""
    sizes = [t.numel() for t in tensors]
    each = max(PART, -(-sum(sizes) // PARTS))
    parts = max(-(-sum(sizes) // each), 1)
    for number in range(first, first + min(count, parts)):
        start = number % parts * each
        for t, size in zip(tensors, sizes, strict=True):
            if start < size and start + each > 0:
                yield t.detach().reshape(-1)[max(start, 0) : start + each]
            start -= size


class Compared(NamedTuple):
    """What a comparison of ``what`` over ``link`` finds, to be reported after step ``due``."""

    due: int
    what: str
    link: Link
    found: Pending[tuple[int, list[int]] | None]


class DriftCheck:
    """Compares the values of the workers of ``session``. ``found``: the number of steps in which
    they differed."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sent = False
        """Whether digests of x were sent with gradients since the last check."""
        self._compared: list[Compared] = []
        """Not reported yet. A round with a delay is compared when its messages are complete."""
        self.found = 0

    def restart(self) -> None:
        """A state was loaded: what is not reported yet was about another one, or has failed."""
        self._sent, self._compared = False, []

    def digest_of_x(self) -> Digest:
        """The digest that the gradients of the next step carry. 0 if their messages cannot carry
        any, or not every rank hears from all others."""
        session = self._session
        alone = session.elastic is None and not session.workers.size == session.world.size > 1
        if alone or session.world.queues or session.sharded:
            return no_digest
        self._sent = True
        return partial(digest, parts_of(session.params(), session.step))

    def digest_of(self, running: ParameterRunner) -> Digest:
        """The digest that the messages of the next round carry. 0 if rounds are still in flight,
        because they change the state."""
        if not self._possible(running) or running.in_flight:
            return no_digest
        first = OF_ROUND * running.executed
        return lambda: digest(parts_of(self._equal_state(running), first, OF_ROUND))

    def after_start(self, running: ParameterRunner, step: int) -> None:
        """Compare the digests of the round that has started after ``step``. All workers see the
        same digests."""
        if not self._possible(running) or not running.communicates:
            return
        delay, link, label = running.round.delay, running.link, running.label(step)
        what = f"the outer state that {running.round.name} over {running.round.over!r} makes equal"
        compare = partial(_difference, link)
        found = self._session.comm.submit(compare, label) if delay else Pending.of(compare())
        self._compared.append(Compared(step + delay, what, link, found))

    def after_step(self) -> None:
        """Report which workers differed before this step, and warn in the first step with any."""
        session, compared = self._session, self._compared
        if self._sent:
            what = "the parameters, though all took the same steps"
            found = Pending.of(_difference(session.workers))
            compared.append(Compared(session.step, what, session.world, found))
        self._sent, self._compared = False, [c for c in compared if c.due > session.step]
        due = [(c, c.found.wait()) for c in compared if c.due <= session.step]
        differing = [(c, found) for c, found in due if found is not None]
        replaying = session.elastic is not None and session.elastic.replaying
        if not differing or replaying:  # this newcomer did not take part
            return
        self.found += 1
        for each, (root, others) in differing:
            if self.found == 1 and each.link.rank == 0:
                warnings.warn(
                    f"the workers have drifted apart: at step {session.step} ranks {others} differ "
                    f"from rank {root} in {each.what}. Their optimizers' settings differ, such as "
                    "the learning rate, their processors round differently, memory is faulty, or "
                    "the training program does something else on some ranks. sync.consensus() and "
                    "sync.finish() average what differs",
                    stacklevel=2,
                )
            session.recorder.event("drift", ranks=others)

    def _possible(self, running: ParameterRunner) -> bool:
        """Whether all workers receive the same result, and every worker sees all digests."""
        return running.round.exchange.agrees and not running.link.queues

    def _equal_state(self, running: ParameterRunner) -> list[Tensor]:
        """The state that is the same on all workers, and that each of them keeps. In an elastic
        run, nothing here depends on their number."""
        workers = 1 if self._session.elastic is not None else running.link.size
        every_worker_owns = running.round.exchange.owners(workers) is None
        slots = ("everywhere", "owner") if every_worker_owns else ("everywhere",)
        update, exchange = running.round.update, running.round.exchange
        return [
            t
            for channel in running.channels
            for kept, state in ((update, channel.state), (exchange, channel.exchange_state))
            for k, t in sorted(state.items())
            if kept.slots.get(k, "owner") in slots and t.dim()
        ]


def _difference(link: Link) -> tuple[int, list[int]] | None:
    """The first rank of the largest group of ranks with equal digests, and the ranks that differ
    from it; None if there are none. A rank with 0 has nothing to compare."""
    digests = link.digests()
    counts = Counter(value for value in digests if value)
    if len(counts) < 2:
        return None
    ((most, _),) = counts.most_common(1)
    return digests.index(most), [r for r, d in enumerate(digests) if d not in (0, most)]
