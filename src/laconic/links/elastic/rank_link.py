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
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from laconic.errors import LinkError, NotFiniteError
from laconic.links.calls import FINISH, GRADIENTS, Call
from laconic.links.elastic.inside import Inside
from laconic.links.elastic.link import ElasticLink, Settings
from laconic.links.elastic.mesh import Interrupted
from laconic.links.elastic.relay import Relay, RelayError
from laconic.links.elastic.relay_frames import Snapshot, Start
from laconic.links.elastic.rendezvous import Reporting
from laconic.links.elastic.replay import Replay
from laconic.links.elastic.units import Units
from laconic.links.health import LinkRecord
from laconic.links.link import Parts, Quiet, Sent, arrivals, at_once, hops
from laconic.links.wrapped import Around

T = TypeVar("T")
DONE, BEGIN, SIZE, MEAN, ALL_GATHER, ALL_TO_ALL, GATHER, BROADCAST, SWAP = range(9)
"""What a rank is about to do in a job. Done: it has no more to do."""
DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.int8),
    *(torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128),
)
WITH_ALL = BEGIN, SIZE, SWAP
"""What all ranks do, or none."""
PROBLEM = 2**64 - 1
"""The digest of a rank that cannot make a call: see `laconic.engine.session`."""
Rows = Sequence[Tensor | None]
"""What a collective brings; None for messages that are lost."""
Swap = tuple[Sequence[int], Sequence[int]]
"""To whom, and from whom: see `Link.swap`."""


class Turn(NamedTuple):
    """What a rank is about to do: an ``op`` on ``rows`` of ``columns`` elements of a dtype, which
    brings ``results`` rows. ``first``, ``second``: numbers that depend on the op."""

    op: int
    rows: int = 0
    columns: int = 0
    dtype: int = 0
    results: int = 0
    first: int = 0
    second: int = 0


class RankLink(Quiet):
    """Of the rank ``inside.rank`` of a worker. ``outer``: the worker's link to the others, on rank
    0. ``threaded``, ``settings`` and more: as those of `ElasticLink`, as far as the engine uses
    them."""

    threaded = True

    def __init__(self, inside: Inside, outer: ElasticLink | None, reports: Reporting) -> None:
        self.inside, self.outer, self.reports = inside, outer, reports
        stub = _stub()
        self.members: Any = stub if outer is None else outer.members
        self.reception: Any = stub if outer is None else outer.reception
        self.units = Units("") if outer is None else outer.units
        self.replay = Replay(lambda: None) if outer is None else outer.replay
        self.settings: Callable[[Call], tuple[Settings, Callable[[], Snapshot] | None]]
        self.over = False
        """Whether the ranks may end: the run has finished, or goes on without this worker."""
        self._place = 0, 1
        """This worker's rank among the workers, and their number."""
        self._digests: list[int] = []
        self._problem = False
        """Whether a rank of this worker cannot make the present call."""
        self._told = False
        """Whether the other ranks know that the unit under way has failed."""
        self._thread: int | None = None
        """The one in which a job is at work."""
        self._replayed: int | None = None
        """How many workers took part in the donor's unit, once this is known."""
        if outer is not None:
            outer.settings = self._all_settings

    # -- what the engine uses of an `ElasticLink` ----

    @property
    def joined(self) -> float:
        return 0.0 if self.outer is None else self.outer.joined

    @property
    def relays(self) -> list[Relay]:
        """The newcomers that receive this worker's state; on rank 0."""
        return [] if self.outer is None else self.outer.relays

    @property
    def replaying(self) -> bool:
        """See `ElasticLink.replaying`."""
        return self.units.done is None

    @property
    def wake(self) -> Callable[[Callable[[], None]], None]:
        """See `ElasticLink`."""
        assert self.outer is not None, "rank 0 hears of views"
        return self.outer.wake

    @wake.setter
    def wake(self, poke: Callable[[Callable[[], None]], None]) -> None:
        if self.outer is not None:
            self.outer.wake = poke

    def take_part_from(self, start: Start) -> None:
        """See `ElasticLink.take_part_from`."""
        if self.outer is not None:
            self.outer.take_part_from(start)
        self.units.call, self.units.done = start.call, start.serial - 1

    def interrupt(self) -> None:
        """See `ElasticLink.interrupt`."""
        if self.outer is not None:
            self.outer.interrupt()
        self.inside.shutdown()

    def digests(self) -> Sequence[int]:
        if self._problem:
            return [PROBLEM]
        return self._digests if self.outer is None else self.outer.digests()

    def sent(self) -> Mapping[int, Sent]:
        return {} if self.outer is None else self.outer.sent()

    def leave(self, broken: bool) -> None:
        if self.outer is not None:
            self.outer.leave(broken)

    def status(self, text: str) -> None:
        self.members.status(text)

    def close(self) -> None:
        self.over = True
        if self.outer is not None:
            self.outer.close()

    def split(self, sets: Sequence[Sequence[int]]) -> NoReturn:
        raise ValueError("the workers of an elastic run cannot be divided into sets")

    # -- who takes part ----

    @property
    def rank(self) -> int:
        return self._place[0] if self.outer is None else self.outer.rank

    @property
    def size(self) -> int:
        if not self.replaying or self._thread != threading.get_ident():
            return self._place[1] if self.outer is None or self.replaying else self.outer.size
        if self._replayed is None:
            self._turns(Turn(SIZE))
            outer = self.outer
            said = self._wait() if outer is None else self._serve(lambda: {"size": outer.size})
            self._replayed = int(said["size"])
        return self._replayed

    def _news(self) -> dict[str, Any]:
        """What rank 0 tells the others of the run."""
        units, reports, outer = self.units, self.reports, self.outer
        assert outer is not None, "rank 0 says it"
        return {
            "me": units.me,
            "done": units.done,
            "active": units.active,
            "place": [0, 1] if self.replaying else [outer.rank, outer.size],
            "view": [self.members.number, self.members.view.number, self.members.view.ids],
            "lost": [reports.workers_lost, reports.steps_lost],
            "digests": list(outer.digests()),
        }

    def tell(self) -> None:
        """Rank 0 tells the others of the run, before the first unit."""
        self._hear(self.inside.say(self._news() if self.outer is not None else None))

    def _hear(self, news: Mapping[str, Any]) -> None:
        if self.outer is not None:
            return
        self.units.me, self.units.done, self.units.active = news["me"], news["done"], news["active"]
        self._place = news["place"][0], news["place"][1]
        view = self.members.view
        self.members.number, view.number, view.ids = news["view"]
        self.reports.workers_lost, self.reports.steps_lost = news["lost"]
        self._digests = news["digests"]

    # -- units ----

    def unit(self, job: Callable[[], T]) -> T:
        """Run ``job``, which makes collectives, all or nothing for all ranks of the worker."""
        if self.outer is None:
            return self._follow(job)
        self._told = False
        try:
            result = self.outer.unit(partial(self._attempt, job))
        except (LinkError, RelayError) as error:
            if not self._told:
                self.inside.say({"failed": str(error), "donor": isinstance(error, RelayError)})
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
            while self._next(Turn(DONE)) is not None:
                continue
        finally:
            self._thread = None
        if error is not None:
            raise error
        return result

    # -- turns ----

    def _turns(self, own: Turn) -> list[Turn]:
        """What each rank does next; raises `LinkError` where they do not belong together."""
        turns = [Turn(*row) for row in self.inside.gather(own)]
        alike = {t._replace(columns=0, second=0) for t in turns if t.op != DONE}
        if len(alike) > 1 or (own.op == DONE and any(t.op in WITH_ALL for t in alike)):
            raise LinkError(
                "the ranks of this worker make different calls: every rank must take the same "
                "optimizer steps and make the same laconic calls"
            )
        return turns

    def _next(self, own: Turn, x: Tensor | None = None, swap: Swap = ((), ())) -> Rows | None:
        """Take part in the next collective of the ranks: this one in ``own``, with the message
        ``x``. Returns the rows that come for it, None for those that are lost; or None where all
        ranks are done."""
        turns = self._turns(own)
        turn = next((t for t in turns if t.op != DONE), None)
        if turn is None:
            return None
        columns = [0 if t.op == DONE else t.columns for t in turns]
        pieces = [torch.empty(turn.rows, m, dtype=DTYPES[turn.dtype]) for m in columns]
        if x is not None:
            pieces[self.inside.rank] = x.reshape(turn.rows, -1).contiguous()
        if self.inside.rank:
            self.inside.exchange({0: pieces[self.inside.rank].view(-1)}, {})
            lost = self._wait()["lost"]
            rows = pieces[0].new_empty(turn.results, columns[self.inside.rank])
            self.inside.exchange({}, {0: rows.view(-1)})
        else:
            self.inside.exchange({}, {r: p.view(-1) for r, p in enumerate(pieces) if r})
            whole, found = torch.cat(pieces, 1), list[Tensor | None]()

            def serve() -> dict[str, Any]:
                found.extend(self._outer(turn, whole, swap))
                return {"lost": [r for r, row in enumerate(found) if row is None]}

            lost = self._serve(serve)["lost"]
            zeros = whole.new_zeros(whole.shape[1])
            came = [zeros if row is None else row for row in found]
            together = torch.stack(came) if came else whole[:0]
            parts = [part.contiguous().view(-1) for part in torch.split(together, columns, 1)]
            self.inside.exchange({r: part for r, part in enumerate(parts) if r}, {})
            rows = parts[0].view(turn.results, columns[0])
        return [None if r in lost else row for r, row in enumerate(rows.unbind())]

    def _serve(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Do ``work`` on rank 0, and tell the others what it returns, or raises."""
        said: dict[str, Any] = {"failed": "rank 0 of this worker has failed", "donor": False}
        try:
            said = work()
        except Interrupted:
            said = {"again": True}
            raise
        except (LinkError, RelayError) as error:
            said = {"failed": str(error), "donor": isinstance(error, RelayError)}
            raise
        finally:
            self._told = "failed" in said
            self.inside.say(said)
        return said

    def _wait(self) -> dict[str, Any]:
        """Wait for `_serve` on rank 0."""
        while "ask" in (said := self.inside.say()):
            own: list[Any] = [0, None]
            if self.units.call.name == GRADIENTS:
                (digest, *_), state = self.settings(self.units.call)
                own = [digest, None if state is None else state().state[0]]
            self.inside.collect(own)
        if "again" in said:
            raise Interrupted("rank 0 of this worker has to repeat the unit")
        _raise_failure(said)
        return dict(said)

    def _outer(self, turn: Turn, whole: Tensor, swap: Swap) -> Rows:
        """Make the collective ``turn`` of all ranks' messages, on rank 0. Returns its rows."""
        outer, flat = self.outer, whole.view(-1)
        assert outer is not None
        if not whole.numel():
            return list(whole.new_empty(turn.results, 0).unbind())
        if turn.op == GATHER:
            return list(outer.gather(flat).unbind())
        if turn.op == SWAP:
            return [None if piece is None else piece.clone() for piece in outer.swap(flat, *swap)]
        if turn.op == ALL_GATHER:
            out = whole.new_empty(turn.results, whole.shape[1])
            outer.all_gather(flat, out.view(-1))
        elif turn.op == ALL_TO_ALL:
            out = torch.empty_like(whole)
            outer.all_to_all(whole, out)
        elif turn.op == MEAN:
            outer.mean(flat)
            out = whole
        else:
            outer.broadcast(flat, turn.first)
            out = whole
        return list(out.unbind())

    # -- calls ----

    def begin_call(self, call: Call, *, wait: bool) -> bool:
        self.units.call, self.over = call, False
        signed = call.digest - 2**64 * (call.digest >= 2**63)
        turns = self._turns(Turn(BEGIN, first=call.id, second=signed))
        digest = combined([turn.second % 2**64 for turn in turns])
        self._problem = digest == PROBLEM

        def serve() -> dict[str, Any]:
            assert self.outer is not None
            begun = self.outer.begin_call(call._replace(digest=digest), wait=wait)
            return {"begun": begun, "news": self._news()}

        said = self._wait() if self.outer is None else self._serve(serve)
        self._hear(said["news"])
        return bool(said["begun"])

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

    def _rows(self, op: int, x: Tensor, rows: int, results: int, **more: Any) -> Rows:
        """Make a collective of ``rows`` of ``x``, which brings so many ``results``."""
        swap = more.pop("swap", ((), ()))
        columns = x.numel() // max(rows, 1)
        turn = Turn(op, rows, columns, DTYPES.index(x.dtype), results, **more)
        found = self._next(turn, x, swap)
        assert found is not None, "this rank is not done"
        return found

    def mean(self, x: Tensor) -> None:
        (mean,) = _all(self._rows(MEAN, x, 1, 1))
        x.copy_(mean.view(x.shape))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        raise ValueError("a worker of an elastic run owns no part of the outer state: use mean")

    def all_gather(self, mine: Tensor, out: Tensor, parts: Parts | None = None) -> None:
        n = self.size
        with at_once(parts, [self.rank], range(n)):
            rows = _all(self._rows(ALL_GATHER, mine.to(out.dtype), 1, n))
            for row, into in zip(rows, out.view(n, -1), strict=True):
                into.copy_(row)

    def all_to_all(self, x: Tensor, out: Tensor, parts: Parts | None = None) -> None:
        n = self.size
        with at_once(parts, hops(self.rank, n), arrivals(self.rank, n)):
            rows = _all(self._rows(ALL_TO_ALL, x, n, n))
            for row, into in zip(rows, out.view(n, -1), strict=True):
                into.copy_(row)

    def gather(self, x: Tensor) -> Tensor:
        if self._thread != threading.get_ident():  # before there is a communication thread
            return self.unit(partial(self.gather, x))
        n = self.size
        return torch.stack(_all(self._rows(GATHER, x, 1, n))).view(n, *x.shape)

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        (sent,) = _all(self._rows(BROADCAST, x, 1, 1, first=root))
        x.copy_(sent.view(x.shape))

    def swap(self, x: Tensor, to: Sequence[int], source: Sequence[int]) -> list[Tensor | None]:
        return list(self._rows(SWAP, x, 1, len(source), swap=(to, source)))


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


def _all(rows: Rows) -> list[Tensor]:
    return [row for row in rows if row is not None]


def _raise_failure(said: Mapping[str, Any]) -> None:
    if "failed" in said:
        raise RelayError(said["failed"]) if said["donor"] else LinkError(said["failed"])


def _stub() -> Any:
    """What other ranks than 0 have in place of `laconic.links.elastic.members.Members` and
    `laconic.links.elastic.reception.Reception`."""

    def nothing(*_: object) -> None:
        pass

    def nobody(step: int) -> list[Any]:
        return []

    return SimpleNamespace(
        number=0,
        view=SimpleNamespace(number=1, ids=[]),
        record=LinkRecord(),
        ended=False,
        **dict.fromkeys(["status", "leave", "open", "bequeath"], nothing),
        **dict.fromkeys(["callers", "leaves", "bequests"], nobody),
    )
