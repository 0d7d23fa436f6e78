"""Detects workers whose values should be equal but differ, and names what differs.

If only gradients are averaged, every worker takes the same steps, and x should be equal on all
workers. After a parameter round whose exchange agrees (`Exchange.agrees`), the state that every
worker keeps should be equal: anchors and outer momenta that are not sharded, references of coded
messages. If there is no such state, and the round replaces x at once, x should be equal right after
the round. Values can still differ, because processors of different kinds round differently and
memory can fail. Every worker therefore computes a digest of a part of these values, a different
part each time. The headers of the next gradients, or of the next round of that kind, carry the
digest, at no cost. If the digests differ, all workers know it at the end of that call. Nothing is
repaired: that would hide the cause. The consensus averages what differs.

Values that may differ are not compared: x between rounds, x if results are folded in late, the
state of gossip, residuals.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laconic.engine.channel import Channel
from laconic.engine.comparison import digest
from laconic.engine.parameter_rounds import ParameterRunner
from laconic.engine.session import Session
from laconic.links.comm_thread import Pending
from laconic.links.link import Link
from laconic.tensors import is_sharded, local

PART, PARTS = 2**14, 256
"""The least number of elements in a part, and the most parts. Gradients carry the digest of one
part. A round carries the digest of one part for every step since the last round of its kind, so
that the time per step is the same, but of at most `MOST` parts or a quarter of all parts, whichever
is more."""
MOST = 8


def parts_of(total: int) -> tuple[int, int]:
    """The number of parts for ``total`` elements, and the number of elements in a part."""
    each = max(PART, -(-total // PARTS))
    return max(-(-total // each), 1), each


def part_of(tensors: Sequence[Tensor], number: int, count: int = 1) -> Iterator[Tensor]:
    """``count`` parts of the concatenated ``tensors``, beginning with the part ``number`` and
    wrapping around."""
    sizes = [(local(t) if is_sharded(t) else t).numel() for t in tensors]
    total = sum(sizes)
    parts, each = parts_of(total)
    first, count = number % parts, min(count, parts)
    beyond = first + count - parts
    stretches = [(first * each, (first + count) * each)]
    if beyond > 0:
        stretches = [(first * each, total), (0, beyond * each)]
    for start, stop in stretches:
        at = 0
        for t, size in zip(tensors, sizes, strict=True):
            if start < at + size and at < stop:
                yield local(t).reshape(-1)[max(start - at, 0) : stop - at]
            at += size


class Difference(NamedTuple):
    """The ranks ``others`` differ from the rank ``root``, the first of the largest group."""

    root: int
    others: list[int]

    @classmethod
    def of(cls, digests: Sequence[int]) -> Difference | None:
        """The difference between the ranks' ``digests``; None if there is none. A rank with 0 has
        nothing to compare."""
        counts = Counter(value for value in digests if value)
        if len(counts) < 2:
            return None
        ((most, _),) = counts.most_common(1)
        others = [r for r, value in enumerate(digests) if value not in (0, most)]
        return cls(digests.index(most), others)


class DriftCheck:
    """Compares the values of the workers of ``session``. ``found``: the number of steps in which
    they differed. ``compared``: whether the ranks have compared their optimizers' settings."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sent = False
        """Whether digests of x were sent with gradients since the last check."""
        self.compared = False
        self.found = 0
        self._found_in = -1
        """The last step in which they differed."""

    def digest(self) -> int:
        """The digest that the gradients of the next step carry. 0 if their messages cannot carry
        any, or not every rank hears from all others."""
        session = self._session
        alone = session.elastic is None and not session.workers.size == session.world.size > 1
        if alone or session.device.type != "cpu" or session.sharded:
            return 0
        self._sent = True
        return digest(part_of(session.params(), session.step))

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
        settings = ""
        if not self.compared and session.elastic is None:  # a newcomer could not repeat it
            settings, self.compared = self._compare_settings(), True
        what = (
            f"the workers' parameters have drifted apart: at step {session.step} ranks "
            f"{found.others} differ from rank {found.root}, though all took the same steps"
        )
        self.report(found, what, session.world, settings)

    def _compare_settings(self) -> str:
        """What differs between the ranks in the numbers of the optimizer's parameter groups, such
        as the learning rate; every rank takes part."""
        session = self._session
        session.call("comparing optimizers")
        everyone = session.gather_json(_settings(session))
        session.status("computing")
        found = []
        for key in sorted({key for own in everyone for key in own}, key=lambda k: "lr" not in k):
            values = [own.get(key) for own in everyone]
            if values.count(values[0]) < len(values):
                each = ", ".join(f"{value} on rank {r}" for r, value in enumerate(values))
                found.append(f"{key} is {each}")
        return "; ".join(found[:3])

    def report(self, found: Difference, what: str, link: Link, settings: str = "") -> None:
        """Count the difference, and warn about the first one. ``what``: the warning's text.
        ``settings``: how the optimizers differ, if they do."""
        session = self._session
        if session.elastic is not None and session.elastic.replaying:
            return  # this newcomer did not take part
        if self._found_in != session.step:
            self.found, self._found_in = self.found + 1, session.step
        if self.found == 1 and link.rank == 0:
            cause = (
                f"Their optimizers differ: {settings}. Make them alike"
                if settings
                else "Their processors round differently, memory is faulty, or the training "
                "program does something else on some ranks, such as a line search on its own loss"
            )
            warnings.warn(
                f"{what}. {cause}. sync.consensus() and sync.finish() average what differs",
                stacklevel=2,
            )
        session.recorder.event("drift", ranks=found.others)


def _settings(session: Session) -> dict[str, str]:
    """The options in the optimizer's parameter groups, by name and group, as text."""
    return {
        f"{name} of parameter group {number}": str(
            float(value) if isinstance(value, Tensor) else value
        )
        for number, group in enumerate(session.bound.param_groups)
        for name, value in group.items()
        if name not in ("params", "param_names")
        and (not isinstance(value, Tensor) or value.numel() == 1)
        and not callable(value)
    }


class RoundCheck:
    """Compares what should be equal on all workers after the parameter round of ``running``."""

    def __init__(self, session: Session, drift: DriftCheck, running: ParameterRunner) -> None:
        self._session, self._check, self._running = session, drift, running
        self.x_digest = 0
        """Of x right after the last round, if that is what is compared; 0 before the first."""
        self._looking: list[tuple[int, Pending[Difference | None]]] = []
        """Of delayed rounds: the step after which they are folded in, and the result of the
        check."""

    @property
    def _possible(self) -> bool:
        """Whether all workers receive the same result, and every worker sees all digests."""
        exchange, workers = self._running.exchange, self._workers
        heard_by_all = exchange.owners(workers) in (None, workers)
        return exchange.agrees and heard_by_all and self._session.device.type == "cpu"

    @property
    def _workers(self) -> int:
        """The number of workers. In an elastic run, nothing here depends on it."""
        return 1 if self._session.elastic is not None else self._running.link.size

    def _equal_state(self, channels: Sequence[Channel]) -> list[Tensor]:
        """The state that is the same on all workers, and that each of them keeps."""
        running = self._running
        slots = ["everywhere"]
        if running.exchange.owners(self._workers) is None:
            slots.append("owner")
        found = []
        for channel in channels:
            for kept, state in (
                (running.round.update.slots, channel.state),
                (channel.exchange.slots, channel.exchange_state),
            ):
                found += [t for k, t in sorted(state.items()) if kept.get(k, "owner") in slots]
        return [t for t in found if t.dim()]

    def _digest(self, tensors: Sequence[Tensor], step: int) -> int:
        """The digest of some parts of the flat ``tensors``; the next round takes other parts."""
        when, executed = self._running.round.when, self._running.executed
        parts, _ = parts_of(sum(t.numel() for t in tensors))
        most = min(step, max(MOST, parts // 4))
        since = next((k for k in range(1, most) if when(step - k)), most)
        return digest(part_of(tensors, executed * since, since))

    @torch.no_grad()
    def digest(self, step: int) -> int:
        """The digest that the messages of the round after ``step`` carry. 0 if rounds are still in
        flight, because they change the state."""
        if not self._possible or self._running.in_flight:
            return 0
        state = self._equal_state(self._running.channels)
        return self._digest(state, step) if state else self.x_digest

    @torch.no_grad()
    def after_start(self, step: int) -> None:
        """After the round after ``step`` has started, check whether the workers differed before it.
        All of them see the same digests. A delayed round is checked when it is complete."""
        running, comm = self._running, self._session.comm
        if not self._possible or not running.communicates:
            return
        channels = list(running.channels)
        if running.round.delay:
            pending = comm.submit(self._look, running.label(step))
            self._looking.append((step + running.round.delay, pending))
            return
        self._report(self._look())
        equal_x = running.round.update.replaces and not running.set.vary
        if equal_x and not self._equal_state(channels):
            views = [c.bucket.views() or [s.view() for s in c.bucket.segments] for c in channels]
            self.x_digest = self._digest([v for each in views for v in each], step)

    def _look(self) -> Difference | None:
        return Difference.of(self._running.link.digests())

    def report_due(self, step: int) -> None:
        """Report the differences that rounds folded in after ``step`` have found."""
        while self._looking and self._looking[0][0] <= step:
            self._report(self._looking.pop(0)[1].wait())

    def _report(self, found: Difference | None) -> None:
        if found is None:
            return
        running, step = self._running, self._session.step
        what = (
            f"the workers have drifted apart: at step {step} ranks {found.others} of the "
            f"{running.round.over} differ from rank {found.root} in what should be equal on all of "
            f"them after each {running.round.name}"
        )
        what += ": outer state" if self._equal_state(running.channels) else ": the parameters"
        self._check.report(found, what, running.link)

    def state_dict(self) -> dict[str, Any]:
        """What the next comparisons and reports depend on, as plain data."""
        looking = []
        for due, pending in self._looking:
            if pending.done() and pending.error is None:
                found = pending.wait()
                looking.append((due, None if found is None else tuple(found)))
        return {"digest": self.x_digest, "looking": looking}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.x_digest = state["digest"]
        self._looking = [
            (due, Pending.of(None if found is None else Difference(*found)))
            for due, found, *_ in state["looking"]
        ]

    def forget(self) -> None:
        """Discard digests: x and the state were replaced on all workers."""
        self.x_digest = 0
        self._looking.clear()
