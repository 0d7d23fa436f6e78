"""The link of a run whose workers come and go.

Calls are all or nothing. A *unit* is what the communication thread runs at a time, such as the
exchange of one bucket: a few collectives, the last of which brings what the unit changes. Each
collective needs a message from every worker, so no worker can be in the unit after the next one of
another worker. If a connection ends, every worker stops, closes all connections, and waits for the
next view (`laconic.links.elastic.members`). The members of that view connect to each other and
compare how many units each has completed:

- Some have completed a unit and others have not: one that has passes on the result of its last
  collective, and the unit is complete for all, with the same contributors.
- Nobody has: the unit runs again in the new view, from its inputs.

So a job must not change what it reads before its last collective has returned, and must use what it
returns only.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from laconic.errors import LinkError
from laconic.links.calls import FINISH, Call, CallPosition
from laconic.links.collectives import Collectives
from laconic.links.elastic.members import Members
from laconic.links.elastic.mesh import Guard, Interrupted, Mesh
from laconic.links.elastic.relay import Record, Relay, Start
from laconic.links.elastic.view import View
from laconic.links.health import Beacon, LinkRecord, shown
from laconic.links.link import Link, Parts, arrivals
from laconic.links.texts import exchange_texts
from laconic.links.wire import OtherCallError

T = TypeVar("T")

PACES = 8
"""The longest of so many times between calls counts as the time between rounds."""
COMPARING = Call(0, "comparing the workers of a view").id


@dataclass
class Outcome:
    """What a unit's last collective has brought. ``output``: a tensor that all workers receive.
    ``sent``: a worker's own message, where only some receive it (`Link.swap`). ``to``, ``source``:
    the ids of the workers that receive it, and of those whose messages this worker receives.
    ``pieces``: these messages, where another worker has completed the unit."""

    output: Tensor | None = None
    sent: Tensor | None = None
    to: Sequence[str] = ()
    source: Sequence[str] = ()
    pieces: list[Tensor | None] = field(default_factory=list)


class ElasticLink:
    """The link of one worker to the others of its run; see the top of this file.

    ``wake(task)`` has the communication thread run ``task`` soon. ``report()`` and
    ``hear(reports)``, by id, exchange what the workers of a new view must agree on.
    """

    threaded = True
    elastic = True

    def __init__(
        self,
        members: Members,
        server: socket.socket,
        service: socket.socket,
        beacon: Beacon,
        record: LinkRecord,
    ) -> None:
        self.members = members
        self.service = service
        """Where newcomers call."""
        self._server, self._beacon, self._record = server, beacon, record
        self._lock = threading.Lock()
        self._mesh: Mesh | None = None
        self._link: Collectives | None = None
        self._epoch = 0
        """Of the latest view that this worker has tried to adopt."""
        self.active: list[str] = []
        """The ids of the workers that take part in rounds, by rank."""
        self._ranks: list[str] = []
        """The same in the unit under way."""
        self.done: int | None = None
        """How many units are complete; None for a newcomer that has not caught up."""
        self._in_unit = False
        self._index = 0
        self._outcome, self._kept = Outcome(), Outcome()
        """Of the unit under way, and of the last one that was completed."""
        self._call = Call(0, "setting up")
        self._failure: LinkError | None = None
        self.relays: list[Relay] = []
        """The newcomers that receive what this worker's collectives bring."""
        self.feed: Callable[[Call], Record] | None = None
        """Where a newcomer gets the next unit of a call."""
        self._played: list[Tensor] | None = None
        self._replaying_in: int | None = None
        """The thread that replays a unit."""
        self._outputs: list[Tensor] = []
        self._workers = 1
        self._begun: deque[float] = deque(maxlen=PACES + 1)
        self.wake: Callable[[Callable[[], None]], None] = lambda task: None
        self.report: Callable[[], Any] = lambda: None
        self.hear: Callable[[Mapping[str, Any]], None] = lambda reports: None
        self.joined = time.perf_counter()
        members.on_view = self._view_decided

    def begin(self, view: View) -> None:
        """Connect to the other members of the first ``view``."""
        self.done = 0
        self._set_active(view.ids)
        self.adopt()

    # -- newcomers ----

    @property
    def replaying(self) -> bool:
        """Whether this worker is a newcomer that catches up."""
        return self.done is None

    def take_part_from(self, start: Start) -> None:
        """This newcomer has caught up, and takes part from then on."""
        self._set_active(start.active)
        self._ranks = list(start.ranks)
        self.done, self.feed = start.serial - 1, None

    def _replay(self, job: Callable[[], T]) -> T:
        """Run ``job`` with what the donor's collectives have brought; before there is a donor, as
        the only worker."""
        self._played, self._replaying_in = None, threading.get_ident()
        try:
            return job()
        finally:
            self._replaying_in = None

    def _fetch(self) -> list[Tensor] | None:
        """What the collectives of the present unit have brought to the donor, those that are left;
        None: there is no donor."""
        if self._played is None and self.feed is not None:
            record = self.feed(self._call)
            self._workers, self._played = record.workers, list(record.outputs)
        return self._played

    def _next_output(self) -> Tensor | None:
        outputs = self._fetch()
        return None if outputs is None else outputs.pop(0)

    # -- who takes part ----

    @property
    def rank(self) -> int:
        if self.replaying:
            return 0
        me = self.members.me.id
        return self._ranks.index(me) if me in self._ranks else len(self._ranks)

    @property
    def size(self) -> int:
        if not self.replaying:
            return len(self._ranks)
        if self._replaying_in == threading.get_ident():
            self._fetch()
        return self._workers

    def _take_part(self, ids: Sequence[str]) -> None:
        """The unit under way is among the workers ``ids``, the first members of the view."""
        mesh = self._mesh
        assert mesh is not None and mesh.view.ids[: len(ids)] == list(ids), "newcomers come last"
        self._ranks = list(ids)
        self._link = Collectives(Guard(mesh, len(ids), self._header), mesh)

    def _header(self) -> tuple[int, int]:
        assert self.done is not None, "a newcomer sends nothing"
        return (self.done + 1) << 16 | self._index, self._call.id

    # -- units ----

    def unit(self, job: Callable[[], T]) -> T:
        """Run ``job``, which makes collectives, all or nothing."""
        if self._failure is not None:
            raise self._failure
        if self.replaying:
            return self._replay(job)
        assert not self._in_unit and self.done is not None, "one unit follows another"
        serial = self.done + 1
        self._in_unit = True
        self.members.waiting_since = time.monotonic()
        try:
            result = self._attempts(job)
        except LinkError as error:
            self._failure = error
            raise
        finally:
            self._in_unit = False
            self.members.waiting_since = None
        if self._index and self.done < serial:
            self._complete(self._outcome)
        if self._index:
            self._send_record()
        self.members.ended = self._call.name == FINISH
        return result

    def _send_record(self) -> None:
        """Send what the unit's collectives have brought to the newcomers."""
        record = Record(self._call, len(self._ranks), self._outputs)
        for relay in list(self.relays):
            if relay.ended:
                self.relays.remove(relay)
            else:
                relay.put(record)

    def _attempts(self, job: Callable[[], T]) -> T:
        while True:
            self.adopt()
            self._take_part(self.active)
            self._index, self._outcome, self._outputs = 0, Outcome(), []
            try:
                return job()
            except Interrupted:
                continue

    def _complete(self, outcome: Outcome) -> None:
        """The unit under way is complete."""
        assert self.done is not None, "a newcomer completes nothing"
        self.done, self._kept = self.done + 1, outcome
        if self.active != self._ranks:
            self._set_active(self._ranks)

    def _set_active(self, ids: Sequence[str]) -> None:
        self.active = list(ids)
        self.members.active = set(ids)

    def _collective(self, run: Callable[[Collectives], T], passed_on: Callable[[Outcome], T]) -> T:
        """Make a collective by ``run``. Where it is interrupted, and another worker has completed
        the unit, ``passed_on`` gives its result."""
        assert self._link is not None, "a unit is under way"
        self._index += 1
        try:
            result = run(self._link)
        except OtherCallError as error:
            raise LinkError(
                f"the workers make different calls: this one is in {self._call}. Every worker must "
                "take the same optimizer steps and make the same laconic calls"
            ) from error
        except Interrupted:
            if not self._resolve():
                raise
            result = passed_on(self._outcome)
        if self.relays and self._outcome.output is not None:
            self._outputs.append(self._outcome.output.clone())
        self.joined = time.perf_counter()
        return result

    # -- views ----

    def adopt(self) -> None:
        """Connect to the members of the latest view, if that is not done yet. In the communication
        thread, between two units."""
        if self.replaying and self.members.view.place(self.members.me.id) is None:
            return
        while self._mesh is None or self.members.view.epoch > self._epoch:
            self._resolve()

    def _view_decided(self, view: View) -> None:
        """Called in another thread."""
        with self._lock:
            if self._mesh is not None and self._mesh.view.epoch < view.epoch:
                self._mesh.connections.shutdown()
        self.wake(self._adopt_idle)

    def _adopt_idle(self) -> None:
        """Adopt a view while there is no unit to run, since other workers wait for this one."""
        try:
            self.adopt()
        except LinkError as error:
            self._failure = error

    def _drop(self) -> None:
        with self._lock:
            mesh, self._mesh = self._mesh, None
            if mesh is not None:
                mesh.connections.close()

    def _resolve(self) -> bool:
        """Adopt the next view. Returns whether the unit under way is complete then, because another
        worker has completed it."""
        self._drop()
        self.members.broken()
        while True:
            view = self.members.next(self._epoch)
            self._epoch = view.epoch
            mesh = Mesh(view, self.members.me, self.members.rules.limit)
            try:
                check = partial(self._check_latest, view)
                mesh.connect(self._server, self.members.secret, check)
                with self._lock:
                    self._mesh = mesh
                check()
                completed = self._compare(mesh)
            except Interrupted:
                self._drop()
                mesh.connections.close()
                self.members.broken()
                continue
            self.members.mended()
            return completed

    def _check_latest(self, view: View) -> None:
        if self.members.view.epoch > view.epoch:
            raise Interrupted("another view was decided")

    def _compare(self, mesh: Mesh) -> bool:
        """Compare the units that the members of a view have completed, and complete the last one
        for all."""
        header = (1 << 62) + mesh.view.epoch, COMPARING
        everyone = Collectives(Guard(mesh, len(mesh.view.members), lambda: header), mesh)
        texts = exchange_texts(everyone.gather, json.dumps(self._status()))
        statuses = [json.loads(text) for text in texts]
        top = max((s["done"] for s in statuses if s["done"] is not None), default=None)
        if top is None:
            raise LinkError("all workers of the run are lost, and newcomers have no state yet")
        behind = [r for r, s in enumerate(statuses) if s["done"] is not None and s["done"] < top]
        assert all(statuses[r]["done"] == top - 1 for r in behind), "one unit at most"
        root = next(r for r, s in enumerate(statuses) if s["done"] == top)
        first, outcome = statuses[root], None
        if behind and first["swap"]:
            outcome = self._pass_on_messages(everyone, statuses, behind)
        elif behind:
            outcome = self._pass_on_output(everyone, first["bytes"], behind, root)
        if outcome is not None:
            assert self._in_unit, "it waits in that unit"
            self._outcome = outcome
            self._complete(outcome)
        self._set_active([id for id in mesh.view.ids if id in first["active"]])
        if not self._in_unit and self.done is not None:
            self._take_part(self.active)
        self.hear({s["id"]: s["report"] for s in statuses})
        return outcome is not None

    def _status(self) -> dict[str, Any]:
        """What the members of a new view compare."""
        kept, own = self._kept, self._outcome
        output = kept.output
        return {
            "id": self.members.me.id,
            "done": self.done,
            "active": self.active,
            "bytes": 0 if output is None else output.numel() * output.element_size(),
            "swap": kept.sent is not None,
            "source": list(own.source) if self._in_unit else [],
            "report": self.report(),
        }

    def _pass_on_output(
        self, everyone: Collectives, size: int, behind: Sequence[int], root: int
    ) -> Outcome | None:
        """Send the last unit's output, ``size`` bytes, from ``root`` to the ranks ``behind``."""
        if everyone.rank == root:
            assert self._kept.output is not None, "its size was sent"
            raw = self._kept.output.contiguous().view(-1).view(torch.uint8)
            everyone.exchange(dict.fromkeys(behind, raw), {})
        elif everyone.rank in behind:
            raw = torch.empty(size, dtype=torch.uint8)
            everyone.exchange({}, {root: raw})
            return Outcome(raw)
        return None

    def _pass_on_messages(
        self, everyone: Collectives, statuses: Sequence[Mapping[str, Any]], behind: Sequence[int]
    ) -> Outcome | None:
        """Send the messages of the last unit, a `Link.swap`, to the ranks ``behind``. A message of
        a lost worker is lost."""
        me, ranks = everyone.rank, {status["id"]: r for r, status in enumerate(statuses)}
        own = self._outcome if me in behind else self._kept
        sends, receives = dict[int, Tensor](), dict[int, Tensor]()
        for to in behind:
            for source in (ranks[id] for id in statuses[to]["source"] if id in ranks):
                assert own.sent is not None, "every worker is in the same unit"
                if source == me:
                    sends[to] = own.sent
                if to == me:
                    receives[source] = torch.empty_like(own.sent)
        everyone.exchange(sends, receives)
        if me not in behind:
            return None
        return replace(own, pieces=[receives.get(ranks.get(id, -1)) for id in own.source])

    # -- calls ----

    def begin_call(self, call: Call, *, wait: bool) -> bool:
        self._call = call
        if self.replaying:
            return False
        assert self.done is not None and self._mesh is not None, "a unit is under way"
        position = CallPosition(self.done + 1, shown(call))
        self._record.position = self.members.position = position
        now = time.monotonic()
        self._begun.append(now)
        self.members.pace = max((b - a for a, b in pairwise(self._begun)), default=0.0)
        if call.starts and len(self._mesh.view.members) > len(self._ranks):
            self._take_part(self._mesh.view.ids)  # newcomers begin with this step
            for relay in self.relays:
                if relay.newcomer.id in self._ranks:
                    relay.finish(Start(self.done + 1, call, self.active, self._ranks))
        if wait and self.size > 1:
            ids = self.gather(torch.tensor([call.id])).flatten().tolist()
            if any(number != call.id for number in ids):
                raise LinkError(
                    f"the workers make different calls: this one is in {call}. Every worker must "
                    "take the same optimizer steps and make the same laconic calls"
                )
        return wait

    def check(self) -> None:
        """Do nothing: a thread of its own looks after the other workers."""

    def check_peers(self) -> None:
        """Do nothing: a thread of its own looks after the other workers."""

    def leave(self, broken: bool) -> None:
        self._record.position = self._record.position._replace(left=True, broken=broken)

    def status(self, text: str) -> None:
        self._beacon.set(text)

    def close(self) -> None:
        self.leave(False)
        self.members.close()
        self._drop()
        self._server.close()
        self.service.close()

    def split(self, sets: Sequence[Sequence[int]]) -> Link:
        raise ValueError("the workers of an elastic run cannot be divided into sets")

    # -- collectives ----

    def mean(self, x: Tensor) -> None:
        if self.replaying:
            output = self._next_output()
            if output is not None:
                x.copy_(_like(output, x, x.numel()).view(x.shape))
            return
        n = self.size
        each = -(-x.numel() // n)

        def run(link: Collectives) -> Tensor:
            padded = torch.nn.functional.pad(x.reshape(-1), (0, n * each - x.numel()))
            output = torch.empty_like(padded)
            own = link.reduce_scatter(padded if n * each > x.numel() else padded.clone())
            self._index += 1
            link.all_gather(own, output)
            self._outcome = Outcome(output)
            return output

        output = self._collective(run, lambda outcome: _like(outcome.output, x, n * each))
        x.copy_(output[: x.numel()].view(x.shape))

    def reduce_scatter(self, x: Tensor, owners: int | None = None) -> Tensor:
        raise ValueError("a worker of an elastic run owns no part of the outer state: use mean")

    def all_gather(
        self,
        mine: Tensor,
        out: Tensor,
        owners: int | None = None,
        parts: Parts | None = None,
    ) -> None:
        assert owners in (None, self.size), "all workers own a slice"
        assert parts is None or parts.use is None, "nothing is used before all is complete"
        if self.replaying:
            output = self._next_output()
            value = mine if output is None else _like(output, out, out.numel())
            if parts is not None and output is None:
                parts.fill_all([self.rank])
            out.copy_(value.view(out.shape))
            return

        def run(link: Collectives) -> None:
            link.all_gather(mine, out, owners, parts)
            self._outcome = Outcome(out.clone())

        def passed_on(outcome: Outcome) -> None:
            out.copy_(_like(outcome.output, out, out.numel()).view(out.shape))

        self._collective(run, passed_on)

    def all_to_all(self, x: Tensor, out: Tensor, parts: Parts | None = None) -> None:
        if self.replaying:  # what all_gather brings then depends on nothing here
            if parts is not None:
                parts.fill_all(range(self.size))
            out.copy_(x)
            if parts is not None:
                parts.use_all(arrivals(0, self.size))
            return

        def run(link: Collectives) -> None:
            link.all_to_all(x, out, parts)

        self._collective(run, _never)

    def gather(self, x: Tensor) -> Tensor:
        if self.replaying:
            output = self._next_output()
            if output is None:
                return x.clone()[None]
            return _like(output, x, self.size * x.numel()).view(self.size, *x.shape)
        shape = self.size, *x.shape

        def run(link: Collectives) -> Tensor:
            rows = link.gather(x)
            self._outcome = Outcome(rows.clone())
            return rows

        def passed_on(outcome: Outcome) -> Tensor:
            return _like(outcome.output, x, self.size * x.numel()).view(shape)

        return self._collective(run, passed_on)

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        if self.replaying:
            output = self._next_output()
            if output is not None:
                x.copy_(_like(output, x, x.numel()).view(x.shape))
            return

        def run(link: Collectives) -> None:
            nothing, others = x.reshape(-1)[:0], [r for r in range(link.size) if r != link.rank]
            sends = dict.fromkeys(others, x if link.rank == root else nothing)
            link.exchange(sends, {r: x if r == root else nothing for r in others})
            self._outcome = Outcome(x.clone())

        def passed_on(outcome: Outcome) -> None:
            x.copy_(_like(outcome.output, x, x.numel()).view(x.shape))

        self._collective(run, passed_on)

    def swap(self, x: Tensor, to: Sequence[int], source: Sequence[int]) -> list[Tensor | None]:
        if self.replaying:
            return [None] * len(source)
        ranks = self._ranks
        ids = [ranks[r] for r in to], [ranks[r] for r in source]
        self._outcome = Outcome(None, x.clone() if self.size > 1 else x, *ids)
        outcome = self._outcome

        def run(link: Collectives) -> list[Tensor | None]:
            nothing, others = x[:0], [r for r in range(link.size) if r != link.rank]
            pieces = {r: torch.empty_like(x) if r in source else nothing for r in others}
            # every rank sends to every other, so that no worker is two units ahead of another
            link.exchange({r: x if r in to else nothing for r in others}, pieces)
            self._outcome = outcome
            return [pieces[r] for r in source]

        return self._collective(run, lambda outcome: outcome.pieces)


def _like(output: Tensor | None, x: Tensor, length: int) -> Tensor:
    """``output``, as bytes, as ``length`` elements of the dtype of ``x``."""
    assert output is not None, "the unit ends with this collective"
    return output.view(-1).view(torch.uint8).view(x.dtype)[:length]


def _never(outcome: Outcome) -> None:
    raise AssertionError("no unit ends with this collective")
