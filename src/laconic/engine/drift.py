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
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from laconic.engine.comparison import digest
from laconic.engine.messages import Difference
from laconic.engine.parameter_rounds import ParameterRunner
from laconic.engine.session import Session
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


class DriftCheck:
    """Compares the values of the workers of ``session``. ``found``: the number of steps in which
    they differed."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sent = False
        """Whether digests of x were sent with gradients since the last check."""
        self.found = 0
        self._found_in = -1
        """The last step in which they differed."""

    # -- recipes that average gradients ----

    def digest(self) -> Digest:
        """The digest that the gradients of the next step carry. 0 if their messages cannot carry
        any, or not every rank hears from all others."""
        session = self._session
        alone = session.elastic is None and not session.workers.size == session.world.size > 1
        if alone or session.world.queues or session.sharded:
            return no_digest
        self._sent = True
        return partial(digest, parts_of(session.params(), session.step))

    @torch.no_grad()
    def after_step(self) -> None:
        """Check whether the workers differed before this step. All ranks see the same digests, so
        all of them do the same."""
        if not self._sent:
            return
        session = self._session
        self._sent, found = False, Difference.of(session.workers.digests())
        if found is None:
            return
        what = (
            f"the workers' parameters have drifted apart: at step {session.step} ranks "
            f"{found.others} differ from rank {found.root}, though all took the same steps"
        )
        self._report(found, what, session.world)

    # -- parameter rounds ----

    def digest_of(self, running: ParameterRunner) -> Digest:
        """The digest that the messages of the next round carry. 0 if rounds are still in flight,
        because they change the state."""
        if not self._possible(running) or running.in_flight:
            return no_digest
        return partial(self._digest_of, running, OF_ROUND * running.executed)

    def _digest_of(self, running: ParameterRunner, first: int) -> int:
        state = self._equal_state(running)
        return digest(parts_of(state, first, OF_ROUND)) if state else 0

    @torch.no_grad()
    def after_start(self, running: ParameterRunner, step: int) -> None:
        """After the round after ``step`` has started, check whether the workers differed before it.
        All of them see the same digests. A delayed round is checked when it is complete, and
        reported when it is folded (`report_round`)."""
        if not self._possible(running) or not running.communicates:
            return
        compare = partial(_difference, running.link)
        if running.round.delay:
            running.in_flight[-1].apart = self._session.comm.submit(compare, running.label(step))
        else:
            self.report_round(running, compare())

    def report_round(self, running: ParameterRunner, found: Difference | None) -> None:
        """Report what a check of a round has found."""
        if found is None:
            return
        what = (
            f"the workers have drifted apart: at step {self._session.step} ranks {found.others} of "
            f"the {running.round.over} differ from rank {found.root} in what should be equal on "
            f"all of them after each {running.round.name}: outer state"
        )
        self._report(found, what, running.link)

    def _possible(self, running: ParameterRunner) -> bool:
        """Whether all workers receive the same result, and every worker sees all digests."""
        return running.exchange.agrees and not running.link.queues

    def _workers(self, running: ParameterRunner) -> int:
        """The number of workers. In an elastic run, nothing here depends on it."""
        return 1 if self._session.elastic is not None else running.link.size

    def _equal_state(self, running: ParameterRunner) -> list[Tensor]:
        """The state that is the same on all workers, and that each of them keeps."""
        every_worker_owns = running.exchange.owners(self._workers(running)) is None
        slots = ("everywhere", "owner") if every_worker_owns else ("everywhere",)
        update, exchange = running.round.update, running.exchange
        return [
            t
            for channel in running.channels
            for kept, state in ((update, channel.state), (exchange, channel.exchange_state))
            for k, t in sorted(state.items())
            if kept.slots.get(k, "owner") in slots and t.dim()
        ]

    def _report(self, found: Difference, what: str, link: Link) -> None:
        """Count the difference, and warn about the first one. ``what``: the warning's text."""
        session = self._session
        if session.elastic is not None and session.elastic.replaying:
            return  # this newcomer did not take part
        if self._found_in != session.step:
            self.found, self._found_in = self.found + 1, session.step
        if self.found == 1 and link.rank == 0:
            warnings.warn(
                f"{what}. Their optimizers' settings differ, such as the learning rate, their "
                "processors round differently, memory is faulty, or the training program does "
                "something else on some ranks. sync.consensus() and sync.finish() average what "
                "differs",
                stacklevel=2,
            )
        session.recorder.event("drift", ranks=found.others)


def _difference(link: Link) -> Difference | None:
    return Difference.of(link.digests())
