"""The link of a run whose workers come and go.

Calls are all or nothing (`laconic.links.elastic.units`, `laconic.links.elastic.rendezvous`). So a
job must not change what it reads before its last collective has returned, and must use what it
returns only.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from laconic.errors import LinkError
from laconic.links.calls import SAME_CALLS, Call
from laconic.links.elastic.members import Members
from laconic.links.elastic.mesh import Everyone, Interrupted
from laconic.links.elastic.reception import Reception
from laconic.links.elastic.relay import Relay
from laconic.links.elastic.relay_frames import Record, Snapshot, Start
from laconic.links.elastic.rendezvous import Rendezvous, Reporting
from laconic.links.elastic.replay import Replay
from laconic.links.elastic.units import Outcome, Units
from laconic.links.elastic.view import View
from laconic.links.link import Quiet, Sent
from laconic.links.wire import OtherCallError

T = TypeVar("T")
Settings = tuple[int, list[dict[str, Any]], Tensor | None]
"""The ``digest``, ``groups`` and ``others`` of a `Start`."""

EXIT_SECONDS = 5.0
"""How long a process that ends waits for its threads."""


class Undivided:
    """What the workers of an elastic run cannot do."""

    def split(self, sets: Sequence[Sequence[int]]) -> NoReturn:
        raise ValueError("the workers of an elastic run cannot be divided into sets")

    def reduce_scatter(self, x: Tensor) -> NoReturn:
        raise ValueError("a worker of an elastic run owns no part of the outer state: use mean")


class ElasticLink(Undivided, Quiet):
    """The link of one worker to the others of its run. A newcomer's is a `Replay` until it has
    caught up.

    ``wake(task)`` has the communication thread run ``task`` soon. ``settings(call)``: what a
    newcomer needs for the step that begins with ``call``, see `Relay.finish`; set by the engine.
    A thread of its own looks after the other workers.
    """

    threaded = True

    def __init__(
        self,
        members: Members,
        units: Units,
        rendezvous: Rendezvous,
        reception: Reception,
        reports: Reporting,
    ) -> None:
        self.members, self.units, self.rendezvous = members, units, rendezvous
        self.reception, self.reports = reception, reports
        self.replay = Replay(rendezvous.adopt)
        self.relays: list[Relay] = []
        """The newcomers that receive what this worker's collectives bring."""
        self._failure: Exception | None = None
        self.wake: Callable[[Callable[[], None]], None] = lambda task: None
        self.settings: Callable[[Call], tuple[Settings, Callable[[], Snapshot] | None]]
        self.joined = time.perf_counter()
        members.on_view = self._view_decided

    def begin(self, ids: Sequence[str]) -> None:
        """The run begins with these workers."""
        self.units.done, self.units.active = 0, list(ids)
        self.rendezvous.adopt()

    @property
    def replaying(self) -> bool:
        """Whether this worker is a newcomer that catches up."""
        return self.units.done is None

    def take_part_from(self, start: Start) -> None:
        """This newcomer has caught up, and takes part from then on. Who is active, the members of
        its view have told it."""
        self.units.call = start.call
        self.units.kept = Outcome(self.replay.latest)  # others may not have it yet
        self.units.done, self.replay.feed = start.serial - 1, None

    @property
    def rank(self) -> int:
        return self.replay.rank if self.replaying else self.units.rank

    @property
    def ids(self) -> Sequence[str]:
        """Those of the workers that take part in the unit under way."""
        return self.replay.workers if self.replaying else self.units.ranks

    @property
    def size(self) -> int:
        return len(self.ids)

    def look(self) -> None:
        """This newcomer waits for its donor, and follows the views meanwhile. Raises `LinkError` if
        the others go on without it."""
        if self._failure is not None:
            raise self._failure
        self.members.check()
        self.replay.adopt()

    # -- units ----

    def unit(self, job: Callable[[], T]) -> T:
        """Run a ``job`` of the communication thread, which makes collectives, all or nothing."""
        if self._failure is not None:
            raise self._failure
        if self.replaying:
            return self.replay.unit(job)
        units, serial = self.units, self.units.serial
        assert not units.under_way, "one unit follows another"
        units.under_way = True
        self.members.waiting_since = time.monotonic()
        try:
            result = self._attempts(job)
        except LinkError as error:
            self._fail(error)
            raise
        finally:
            units.end()
            self.members.idle()
        if units.collectives:
            if units.serial == serial:
                units.complete()
            brought = units.outputs, list(units.kept.digests.values())
            record = Record(units.call, units.ranks, *brought)
            self.relays = [relay for relay in self.relays if not relay.ended]
            for relay in self.relays:
                relay.put(record)
        return result

    def _attempts(self, job: Callable[[], T]) -> T:
        while True:
            self.rendezvous.adopt()
            self.units.attempt(self.units.active)
            self.rendezvous.take_part(self.units.active)
            try:
                return job()
            except Interrupted:
                continue

    def _collective(self, run: Callable[[Everyone], Outcome]) -> Outcome:
        """Make a collective by ``run``. Returns its outcome, or that of another worker that has
        completed the unit, where this one is interrupted."""
        link, units = self.rendezvous.link, self.units
        assert link is not None, "a unit is under way"
        units.collectives += 1
        try:
            units.outcome = run(link)
        except OtherCallError as error:
            raise LinkError(_different(units.call)) from error
        except Interrupted:
            if not self.rendezvous.resolve():
                raise
        else:
            units.outcome.digests = dict(zip(units.ranks, link.digests(), strict=False))
        if self.relays and units.outcome.output is not None:
            units.outputs.append(units.outcome.output.clone())
        self.joined = time.perf_counter()
        return units.outcome

    def _brought(self, run: Callable[[Everyone], Tensor], own: Tensor, length: int) -> Tensor:
        """What a collective brings to all workers, ``length`` elements of the dtype of ``own``:
        ``run`` makes it, or the donor has received it. A worker alone has its ``own`` message."""
        if self.replaying:
            output = self.replay.next(own, length)
            if output is None:
                return own
        else:
            output = self._collective(lambda link: Outcome(run(link))).output
        assert output is not None, "the unit ends with this collective"
        return output.view(-1).view(torch.uint8).view(own.dtype)[:length]

    def _view_decided(self, view: View) -> None:
        """Called in another thread."""
        self.rendezvous.interrupt(view.epoch)
        self.wake(self._adopt_idle)

    def _adopt_idle(self) -> None:
        """Adopt a view while there is no unit to run, since other workers wait for this one."""
        try:
            self.rendezvous.adopt()
        except Exception as error:
            self._fail(error)  # the next unit raises it

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self.members.close()
        self.rendezvous.drop()
        self.reports.release()

    # -- calls ----

    def begin_call(self, call: Call, *, wait: bool) -> bool:
        if self.replaying:
            self.replay.begin_call(call)
            return False
        units, rendezvous = self.units, self.rendezvous
        units.call, units.heard = call, {}
        self.members.is_at(units.serial, call)
        self.members.round_begins()
        if call.starts:
            self.admit(call)
        if units.me not in units.ranks:
            raise LinkError(
                f"this worker has just joined the run, and {call} comes before its first round: "
                "take an optimizer step first"
            )
        if rendezvous.link is not None:
            rendezvous.link.begin_digest(call.digest)
        if wait and self.size > 1:
            ids = self.gather(torch.tensor([call.id])).flatten().tolist()
            if any(number != call.id for number in ids):
                raise LinkError(_different(call))
        return wait

    def admit(self, call: Call) -> None:
        """Newcomers that have caught up begin with ``call``."""
        units, rendezvous = self.units, self.rendezvous
        if len(rendezvous.ids) > len(units.ranks):
            rendezvous.take_part(rendezvous.ids)
            for relay in self.relays:
                if relay.newcomer.id in units.ranks and not relay.ended:
                    settings, state = self.settings(call)
                    present = len(units.ranks), units.ranks.index(relay.newcomer.id)
                    relay.finish(Start(units.serial, call, *settings, present), state)

    def digests(self) -> Sequence[int]:
        return self.replay.digests if self.replaying else list(self.units.heard.values())

    def sent(self) -> Mapping[int, Sent]:
        return {} if self.rendezvous.link is None else self.rendezvous.link.sent()

    def leave(self, broken: bool) -> None:
        record = self.members.record
        record.position = record.position._replace(left=True, broken=broken)

    def status(self, text: str) -> None:
        self.members.status(text)

    def close(self) -> None:
        self.leave(False)
        self.members.close()
        self.rendezvous.close()
        self.reception.close()
        self.members.silence()

    def interrupt(self) -> None:
        """The process ends: end what the communication thread waits for. In another thread."""
        self.members.close()
        self.rendezvous.interrupt()

    def end(self, until: float) -> None:
        """End all threads but the communication thread, and wait until the time ``until`` for the
        end of those that may be inside torch."""
        self.members.close()
        self.reception.end(until)
        for relay in self.relays:
            relay.end(until)

    # -- collectives ----

    def mean(self, x: Tensor) -> None:
        n = self.size
        each = -(-x.numel() // n)

        def run(link: Everyone) -> Tensor:
            padded = torch.nn.functional.pad(x.reshape(-1), (0, n * each - x.numel()))
            output = padded if n * each > x.numel() else padded.clone()
            link.mean(output)
            return output

        x.copy_(self._brought(run, x, x.numel()).view(x.shape))

    def all_gather(self, mine: Tensor, out: Tensor) -> None:
        def run(link: Everyone) -> Tensor:
            output = torch.empty_like(out)
            link.all_gather(mine, output)
            return output

        out.copy_(self._brought(run, mine.to(out.dtype), out.numel()).view(out.shape))

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        if self.replaying:  # the result does not count: that of the unit is what all_gather brings
            out.copy_(x)
            return

        def run(link: Everyone) -> Outcome:
            link.all_to_all(x, out)
            return Outcome()

        outcome = self._collective(run)
        assert outcome.output is None, "no unit ends with this collective"

    def gather(self, x: Tensor) -> Tensor:
        if not (self.replaying or self.units.under_way):  # before there is a communication thread
            return self.unit(partial(self.gather, x))
        shape = self.size, *x.shape
        return (
            self._brought(lambda link: link.gather(x), x, shape[0] * x.numel())
            .reshape(shape)
            .clone()
        )

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        def run(link: Everyone) -> Tensor:
            received = x.clone()  # an attempt that is interrupted leaves x as it was
            link.broadcast(received, root)
            return received

        x.copy_(self._brought(run, x, x.numel()).view(x.shape))

    def swap(self, x: Tensor, to: Sequence[int], source: Sequence[int]) -> list[Tensor | None]:
        if self.replaying:
            return [None] * len(source)

        def run(link: Everyone) -> Outcome:
            pieces = [piece.clone() for piece in link.swap(x, to, source) if piece is not None]
            self.units.outcome = Outcome(pieces=pieces)
            self.units.collectives += 1
            link.gather(torch.zeros(1))  # whoever completes it knows that all have their messages
            return self.units.outcome

        return [*self._collective(run).pieces]


open_links: weakref.WeakSet[ElasticLink] = weakref.WeakSet()
"""Those whose threads the process ends before it ends itself."""


@atexit.register
def _end_all() -> None:
    """The interpreter stops threads wherever they are. If one of them is inside torch, the process
    ends with SIGABRT."""
    until = time.monotonic() + EXIT_SECONDS
    for link in list(open_links):
        link.end(until)


def _different(call: Call) -> str:
    return f"the workers make different calls: this one is in {call}. {SAME_CALLS}"
