"""The link of one rank of a worker of several ranks (`laconic.links.elastic.inside`).

All ranks of a worker run the same jobs. In a collective, rank 0 gets the messages of the others,
makes the collective with all of them side by side, and gives each rank its part of what has come.
So a unit is all or nothing for the whole worker: where rank 0 has to repeat it, all ranks repeat
it, among the same workers.

A job may make a collective on some ranks only, such as to compare tensors of which each rank has
others. Ranks whose job has ended then contribute nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from laconic.errors import LinkError, NotFiniteError
from laconic.links.calls import FINISH, GRADIENTS, SAME_CALLS, Call
from laconic.links.elastic.inside import Inside
from laconic.links.elastic.link import ElasticLink, Settings, Undivided
from laconic.links.elastic.members import nobody
from laconic.links.elastic.mesh import Interrupted
from laconic.links.elastic.relay import RelayError
from laconic.links.elastic.relay_frames import Snapshot, Start
from laconic.links.elastic.rendezvous import Reporting
from laconic.links.elastic.replay import Replay
from laconic.links.elastic.units import Units
from laconic.links.link import Quiet
from laconic.links.wrapped import Around, inner

T = TypeVar("T")
DONE, BEGIN, SIZE = "done", "begin", "size"
"""What a rank is about to do, if no collective. Done: it has no more to do in this job."""
WITH_ALL = BEGIN, SIZE, "swap"
"""What all ranks do, or none."""
PROBLEM = 2**64 - 1
"""The digest of a rank that cannot make a call: see `laconic.engine.session`."""
Turn = list[Any]
"""What a rank is about to do; about what, the same on all ranks; and a number of its own."""


class RankLink(Undivided, Around):
    """Of the rank ``inside.rank`` of a worker. ``outer``: the worker's link to the others, on rank
    0. Its attributes are those of `ElasticLink`, as far as the engine uses them."""

    link: Any
    overlapping = None
    members: Any = inner("members")
    reception: Any = inner("reception")
    replay: Replay = inner("replay")
    units: Units = inner("units")
    replaying: bool = inner("replaying")
    relays: Any = inner("relays")
    take_part_from = inner("take_part_from")
    look: Callable[[], None] = inner("look")
    wake: Callable[[Callable[[], None]], None] = inner("wake")

    def __init__(self, inside: Inside, outer: ElasticLink | None, reports: Reporting) -> None:
        super().__init__(cast("Any", outer or _Followed()))
        self.inside, self.reports = inside, reports
        self.settings: Callable[[Call], tuple[Settings, Callable[[], Snapshot] | None]]
        self.over = False
        """Whether the ranks may end: the run has finished, or goes on without this worker."""
        self._problem = False
        """Whether a rank of this worker cannot make the present call."""
        self._told = False
        """Whether the other ranks know that the unit under way has failed."""
        self._thread: int | None = None
        """The one in which a job is at work."""
        self._replayed: int | None = None
        """How many workers took part in the donor's unit, once this is known."""
        self.link.settings = self._all_settings

    def interrupt(self) -> None:
        """See `ElasticLink.interrupt`."""
        self.link.interrupt()
        self.inside.shutdown()

    def digests(self) -> Sequence[int]:
        return [PROBLEM] if self._problem else self.link.digests()

    def close(self) -> None:
        self.over = True
        self.link.close()

    # -- who takes part ----

    @property
    def size(self) -> int:  # type: ignore[override]
        if not self.replaying:
            return self.link.size  # type: ignore[no-any-return]
        if self._thread != threading.get_ident():
            return 1
        if self._replayed is None:
            self._turns(SIZE)
            self._replayed = int(self._serve(lambda: self.link.size))
        return self._replayed

    def _news(self) -> dict[str, Any]:
        """What rank 0 tells the others of the run."""
        units, reports, members = self.units, self.reports, self.members
        return {
            "me": units.me,
            "done": units.done,
            "active": units.active,
            "place": [0, 1] if self.replaying else [self.link.rank, self.link.size],
            "view": [members.number, members.view.number, members.view.ids],
            "lost": [reports.workers_lost, reports.steps_lost],
            "digests": list(self.link.digests()),
        }

    def tell(self) -> None:
        """Rank 0 tells the others of the run, before the first unit."""
        self._hear(self.inside.say(None if self.inside.rank else self._news()))

    def _hear(self, news: Mapping[str, Any]) -> None:
        if self.inside.rank == 0:
            return
        self.units.me, self.units.done, self.units.active = news["me"], news["done"], news["active"]
        self.link.rank, self.link.size = news["place"]
        view = self.members.view
        self.members.number, view.number, view.ids = news["view"]
        self.reports.workers_lost, self.reports.steps_lost = news["lost"]
        self.link.heard = news["digests"]

    # -- units ----

    def unit(self, job: Callable[[], T]) -> T:
        """Run ``job``, which makes collectives, all or nothing for all ranks of the worker."""
        if self.inside.rank:
            return self._follow(job)
        self._told = False
        try:
            result: T = self.link.unit(partial(self._attempt, job))
        except (LinkError, RelayError) as error:
            if not self._told:
                self.inside.say(_failure(error))
            raise
        except NotFiniteError:
            self.inside.say({"end": self._news()})
            raise
        self.over = self.units.call.name == FINISH
        self.inside.say({"end": self._news()})
        return result

    def _attempt(self, job: Callable[[], T]) -> T:
        self.inside.say({"attempt": self._news()})
        return self._run(job)

    def _follow(self, job: Callable[[], T]) -> T:
        """As `unit`, on other ranks than 0."""
        error: NotFiniteError | None = None
        results: list[T] = []
        while "attempt" in (said := self.inside.say()):
            self._hear(said["attempt"])
            try:
                results, error = [self._run(job)], None
            except NotFiniteError as raised:
                error = raised
            except Interrupted:
                continue
        _raise_failure(said)
        self._hear(said["end"])
        self.over = self.members.ended = self.units.call.name == FINISH
        if error is not None:
            raise error
        return results[0]

    def _run(self, job: Callable[[], T]) -> T:
        """Run ``job`` once, and wait until the other ranks have run theirs."""
        self._thread, self._replayed = threading.get_ident(), None
        error: NotFiniteError | None = None
        try:
            try:
                result = job()
            except NotFiniteError as raised:
                error = raised
            while self._next(DONE) is not None:
                continue
        finally:
            self._thread = None
        if error is not None:
            raise error
        return result

    # -- together with the other ranks ----

    def _turns(self, what: str, *about: Any, sends: int = 0) -> list[Turn]:
        """What all ranks are about to do; raises `LinkError` where they do not belong together."""
        turns = self.inside.gather([what, [*about], sends])
        alike = [each[:2] for each in turns if each[0] != DONE]
        some = len(alike) not in (0, len(turns)) and alike[0][0] in WITH_ALL
        if some or any(each != alike[0] for each in alike):
            self._told = True
            raise LinkError(f"the ranks of this worker make different calls. {SAME_CALLS}")
        return turns

    def _serve(self, work: Callable[[], Any]) -> Any:
        """Do ``work`` on rank 0. Returns its result on all ranks, or raises what it raises."""
        if self.inside.rank:
            return self._answer()
        said = _failure(LinkError("rank 0 of this worker has failed"))
        try:
            said = {"is": work()}
        except Interrupted:
            said = {"again": True}
            raise
        except (LinkError, RelayError) as error:
            said = _failure(error)
            raise
        finally:
            self._told = "failed" in said
            self.inside.say(said)
        return said["is"]

    def _answer(self) -> Any:
        """What `_serve` returns on rank 0."""
        while "ask" in (said := self.inside.say()):
            own: list[Any] = [0, None]
            if self.units.call.name == GRADIENTS:
                (digest, *_), state = self.settings(self.units.call)
                own = [digest, None if state is None else state().state[0]]
            self.inside.collect(own)
        if "again" in said:
            raise Interrupted("rank 0 of this worker has to repeat the unit")
        _raise_failure(said)
        return said["is"]

    # -- calls ----

    def begin_call(self, call: Call, *, wait: bool) -> bool:
        self.units.call, self.over = call, False
        digest = combined([each[2] for each in self._turns(BEGIN, call.id, sends=call.digest)])
        self._problem = digest == PROBLEM

        def begin() -> list[Any]:
            begun = self.link.begin_call(call._replace(digest=digest), wait=wait)
            return [begun, self._news()]

        begun, news = self._serve(begin)
        self._hear(news)
        return bool(begun)

    def _all_settings(self, call: Call) -> tuple[Settings, Callable[[], Snapshot] | None]:
        """See `ElasticLink.settings`: of all ranks, on rank 0, while the others wait."""
        (digest, *settings), state = self.settings(call)
        own = None if state is None else state()
        self.inside.say({"ask": True})
        everyone = self.inside.collect([digest, None if own is None else own.state[0]])
        of_all = (combined([said[0] for said in everyone]), *settings)
        if own is None:
            return of_all, None  # type: ignore[return-value]
        snapshot = Snapshot(own.step, [said[1] for said in everyone])
        return of_all, lambda: snapshot  # type: ignore[return-value]

    # -- collectives ----

    def _rows(self, what: str, x: Tensor, rows: int, results: int, *about: Any) -> Tensor:
        """Make a collective of ``rows`` of ``x``, which brings so many ``results``, as rows."""
        x = x.reshape(rows, x.numel() // max(rows, 1)).contiguous()
        found = self._next(what, str(x.dtype).removeprefix("torch."), rows, results, *about, x=x)
        assert found is not None, "this rank is not done"
        return found

    def _next(self, what: str, *about: Any, x: Tensor | None = None) -> Tensor | None:
        """Take part in the next collective of the ranks: this one in ``what``, with its rows ``x``.
        Returns the rows that it brings; or None where all ranks are done."""
        inside, me = self.inside, self.inside.rank
        turns = self._turns(what, *about, sends=0 if x is None else x.shape[1])
        turn = next((each for each in turns if each[0] != DONE), None)
        if turn is None:
            return None
        (what, (dtype, rows, results, *about), _), columns = turn, [sends for _, _, sends in turns]
        pieces = [torch.empty(rows, m, dtype=getattr(torch, dtype)) for m in columns]
        if x is not None:
            pieces[me] = x
        out = pieces[0].new_empty(results, columns[me])
        if me:
            inside.exchange({0: pieces[me].view(-1)}, {})
            self._answer()
            inside.exchange({}, {0: out.view(-1)})
            return out
        inside.exchange({}, {r: p.view(-1) for r, p in enumerate(pieces) if r})
        whole, brought = torch.cat(pieces, 1), list[Tensor]()

        def make() -> None:
            brought.append(self._outer(what, whole, *about) if whole.numel() else whole[:0])

        self._serve(make)
        together = brought[0].view(results, whole.shape[1])
        parts = [p.contiguous() for p in torch.split(together, columns, 1)]
        inside.exchange({r: p.view(-1) for r, p in enumerate(parts) if r}, {})
        return parts[0]

    def _outer(self, what: str, x: Tensor, *about: Any) -> Tensor:
        """Make the collective ``what`` with all ranks' messages ``x``, on rank 0."""
        flat, out = x.view(-1), x
        if what == "swap":
            out = torch.stack([flat, *self.link.swap(flat, *about)])[1:]
        elif what == "gather":
            out = self.link.gather(flat)
        elif what == "all_gather":
            out = x.new_empty(self.size, x.shape[1])
            self.link.all_gather(flat, out.view(-1))
        elif what == "all_to_all":
            out = torch.empty_like(x)
            self.link.all_to_all(x, out)
        else:
            getattr(self.link, what)(flat, *about)
        return out

    def mean(self, x: Tensor) -> None:
        x.copy_(self._rows("mean", x, 1, 1).view(x.shape))

    def all_gather(self, mine: Tensor, out: Tensor) -> None:
        out.copy_(self._rows("all_gather", mine.to(out.dtype), 1, self.size).view(out.shape))

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        n = self.size
        out.copy_(self._rows("all_to_all", x, n, n).view(out.shape))

    def gather(self, x: Tensor) -> Tensor:
        if self._thread != threading.get_ident():  # before there is a communication thread
            return self.unit(partial(self.gather, x))
        n = self.size
        return self._rows("gather", x, 1, n).view(n, *x.shape)

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        x.copy_(self._rows("broadcast", x, 1, 1, root).view(x.shape))

    def swap(self, x: Tensor, to: Sequence[int], source: Sequence[int]) -> list[Tensor | None]:
        if self.replaying:
            return [None] * len(source)
        return [*self._rows("swap", x, 1, len(source), list(to), list(source))]


class WorldLink(Around):
    """The link to all ranks of all workers, of which those of one worker follow each other. For
    what ranks compare and share."""

    def __init__(self, link: RankLink) -> None:
        super().__init__(link)
        assert link.inside.link is not None, "there are several ranks"
        self._inside = link.inside.link

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self.link.rank * self._inside.size + self._inside.rank

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.link.size * self._inside.size

    def gather(self, x: Tensor) -> Tensor:
        by_rank = self._inside.gather(self.link.gather(x))
        return by_rank.transpose(0, 1).reshape(-1, *x.shape)

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        worker, rank = divmod(root, self._inside.size)
        self.link.broadcast(x, worker)
        self._inside.broadcast(x, rank)

    def mean(self, x: Tensor) -> None:
        self.link.mean(x)
        self._inside.mean(x)


def combined(digests: Sequence[int]) -> int:
    """One digest for those of a worker's ranks: 0 if one of them has nothing to compare."""
    if PROBLEM in digests:
        return PROBLEM
    packed = blake2b(repr(list(digests)).encode(), digest_size=7).digest()
    return 0 if 0 in digests else 1 + int.from_bytes(packed, "big")


def _failure(error: Exception) -> dict[str, Any]:
    return {"failed": str(error), "donor": isinstance(error, RelayError)}


def _raise_failure(said: Mapping[str, Any]) -> None:
    if "failed" in said:
        raise RelayError(said["failed"]) if said["donor"] else LinkError(said["failed"])


class _Followed(Quiet):
    """What other ranks than 0 have in place of the worker's link: what rank 0 tells them of it."""

    threaded = True
    rank, size, joined = 0, 1, 0.0
    wake: Any = None

    def __init__(self) -> None:
        self.units, self.replay, self.relays = Units(""), Replay(lambda: None), list[Any]()
        self.heard: Sequence[int] = []
        self.members = nobody("", 0)
        self.reception = SimpleNamespace(open=lambda: None, callers=lambda step: [])

    @property
    def replaying(self) -> bool:
        return self.units.done is None

    def digests(self) -> Sequence[int]:
        return self.heard

    def take_part_from(self, start: Start) -> None:
        """See `ElasticLink.take_part_from`."""
        self.units.call, self.units.done = start.call, start.serial - 1

    def interrupt(self) -> None:
        """Does nothing."""
