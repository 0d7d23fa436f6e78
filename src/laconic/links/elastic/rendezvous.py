"""Where the members of a new view meet: they connect, and compare how far each of them is.

A collective needs a message from every worker, so no worker is in the unit after the next one of
another worker. If a connection ends, every worker stops, closes all connections, and waits for the
next view (`laconic.links.elastic.members`). Its members connect to each other and compare how many
units each has completed:

- Some have completed a unit and others have not: one that has passes on the result of its last
  collective, and the unit is complete for all, with the same contributors. Messages for single
  workers are not passed on: a unit of these is complete once all have theirs.
- Nobody has: the unit runs again in the new view, from its inputs.
"""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from laconic.errors import LinkError
from laconic.links.calls import Call
from laconic.links.elastic.members import Members
from laconic.links.elastic.mesh import Everyone, Interrupted, Mesh
from laconic.links.elastic.units import Outcome, Units
from laconic.links.elastic.view import View
from laconic.links.texts import exchange_texts

COMPARING = Call(0, "comparing the workers of a view").id
COLLECTIVE_BITS = 16


class Reporting(Protocol):
    """What `laconic.engine.reports.Reports` has for the link."""

    heard: Mapping[str, str]
    workers_lost: int
    steps_lost: int
    record: Callable[[dict[str, Any]], None]

    def note(self) -> str:
        """What this worker says with its signs of life."""

    def report(self) -> Any:
        """What it says to the members of a new view, as JSON can hold it."""

    def hear(self, reports: Mapping[str, Any], me: str) -> None:
        """What all members have said, by id in the order of the view."""

    def deal_again(self, drawn: Mapping[str, Sequence[int]], ids: Sequence[str], me: str) -> None:
        """The samplers have loaded states of workers that had ``drawn`` so many: deal the rest."""

    def after_step(self, complete: Callable[[], bool] | None) -> None:
        """A step was computed."""

    def finish(self, *, mean: bool) -> None:
        """All rounds that were begun are complete."""

    def release(self) -> None:
        """This worker's run has failed: no view follows."""

    def follow(self, events: Sequence[Any]) -> None:
        """Repeat what `hear` has recorded in another run."""


class Rendezvous:
    """Connects this worker, which has done ``units``, to the others of its view. ``server`` accepts
    their connections. All methods but `interrupt` run in the communication thread.

    ``reports``: what the members of a new view tell each other besides.
    """

    def __init__(
        self, members: Members, server: socket.socket, units: Units, reports: Reporting
    ) -> None:
        self._members, self._server, self._units = members, server, units
        self._lock = threading.Lock()
        self._mesh: Mesh | None = None
        self._epoch = 0
        """Of the latest view that this worker has tried to adopt."""
        self.link: Everyone | None = None
        """To the workers of the unit under way."""
        self._reports = reports
        members.moved = self._moved

    def _moved(self, id: str) -> int:
        """How many bytes have come from the member ``id`` over the present connections. In another
        thread."""
        mesh = self._mesh
        if mesh is None or id not in mesh.view.ids:
            return 0
        return mesh.connections.received(mesh.view.ids.index(id))

    @property
    def ids(self) -> list[str]:
        """The members of the view that this worker is connected to, by place."""
        assert self._mesh is not None, "a unit is under way"
        return self._mesh.view.ids

    def adopt(self) -> None:
        """Connect to the members of the latest view, if that is not done yet. Between two units."""
        members = self._members
        if self._units.done is None and members.me.id not in members.view.ids:
            return  # a newcomer that is in no view yet
        while self._mesh is None or members.view.epoch > self._epoch:
            self.resolve()

    def interrupt(self, epoch: float = math.inf) -> None:
        """End the unit under way, if it is in a view before ``epoch``. In another thread."""
        with self._lock:
            if self._mesh is not None and self._mesh.view.epoch < epoch:
                self._mesh.connections.shutdown()

    def take_part(self, ids: Sequence[str]) -> None:
        """The unit under way is among the workers ``ids``, the first members of the view."""
        assert self._mesh is not None and self.ids[: len(ids)] == list(ids), "newcomers come last"
        self._units.ranks = list(ids)
        self.link = Everyone(self._mesh, len(ids), self._header)
        self.link.begin_digest(self._units.call.digest)

    def _header(self) -> tuple[int, int]:
        units = self._units
        return units.serial << COLLECTIVE_BITS | units.collectives, units.call.id

    def close(self) -> None:
        """Accept no connections any more."""
        self.drop()
        self._server.close()

    def drop(self) -> None:
        """Close the connections."""
        with self._lock:
            mesh, self._mesh = self._mesh, None
            if mesh is not None:
                mesh.connections.close()

    def resolve(self) -> bool:
        """Adopt the next view. Returns whether the unit under way is complete then, because another
        worker has completed it."""
        self.drop()
        self._members.broken()
        while True:
            view = self._members.next(self._epoch)
            self._epoch = view.epoch
            mesh = Mesh(view, self._members.me, self._members.limit)
            try:
                check, members = partial(self._check_latest, view), self._members
                try:
                    mesh.connect(self._server, members.client.secret, check)
                finally:
                    members.signs.connected(mesh.missing)
                with self._lock:
                    self._mesh = mesh
                check()
                self._members.mended()  # what follows may take long
                completed = self._compare(mesh)
            except Interrupted:
                self.drop()
                mesh.connections.close()
                self._members.broken()
                continue
            return completed

    def _check_latest(self, view: View) -> None:
        if self._members.closed or self._members.view.epoch > view.epoch:
            raise Interrupted("another view was decided")

    # -- comparing ----

    def _compare(self, mesh: Mesh) -> bool:
        """Compare the units that the members of a view have completed, and complete the last one
        for all. Returns whether that was the one under way here."""
        header = (1 << 62) + mesh.view.epoch, COMPARING
        everyone = Everyone(mesh, len(mesh.view.members), lambda: header)
        texts = exchange_texts(everyone.gather, json.dumps(self._status()))
        statuses = [json.loads(text) for text in texts]
        top = max((s["done"] for s in statuses if s["done"] is not None), default=None)
        if top is None:
            raise LinkError(
                "all workers of the run are lost, and newcomers have no state yet: start them again"
            )
        behind = [r for r, s in enumerate(statuses) if s["done"] is not None and s["done"] < top]
        far = [r for r in behind if statuses[r]["done"] < top - 1]
        if everyone.rank in far:
            raise LinkError("this worker has missed what the others have done: start it again")
        if far:
            raise Interrupted("a worker has missed what the others have done")
        root = next(r for r, s in enumerate(statuses) if s["done"] == top)
        first, units, outcome = statuses[root], self._units, None
        if first["bytes"] is not None:
            outcome = self._pass_on_output(everyone, first["bytes"], behind, root)
        elif everyone.rank in behind:
            outcome = units.outcome  # all have received their messages
        if outcome is not None:
            assert units.under_way, "it waits in that unit"
            outcome.digests = dict(first["digests"])
            units.outcome = outcome
            units.complete()
        units.active = [id for id in mesh.view.ids if id in first["active"]]
        if not units.under_way and units.done is not None:
            self.take_part(units.active)
        self._reports.hear({s["id"]: s["report"] for s in statuses}, units.me)
        return outcome is not None

    def _status(self) -> dict[str, Any]:
        """What the members of a new view compare."""
        units = self._units
        output = units.kept.output
        return {
            "id": units.me,
            "done": units.done,
            "active": units.active,
            "digests": units.kept.digests,
            "bytes": None if output is None else output.nbytes,
            "report": self._reports.report(),
        }

    def _pass_on_output(
        self, everyone: Everyone, size: int, behind: Sequence[int], root: int
    ) -> Outcome | None:
        """Send the last unit's output, ``size`` bytes, from ``root`` to the ranks ``behind``."""
        if everyone.rank == root:
            assert self._units.kept.output is not None, "its size was sent"
            raw = self._units.kept.output.contiguous().view(-1).view(torch.uint8)
            everyone.exchange(dict.fromkeys(behind, raw), {})
        elif everyone.rank in behind:
            raw = torch.empty(size, dtype=torch.uint8)
            everyone.exchange({}, {root: raw})
            return Outcome(raw)
        return None
