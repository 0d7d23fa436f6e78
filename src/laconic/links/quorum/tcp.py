"""Ports of workers that are processes. Rank 0 has a thread for each other worker.

Rank 0 counts a worker as arrived only after it has received the worker's whole delivery. Therefore
a round that closes never waits for a worker that is slow or stopped, or for its network.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NoReturn

import torch
from torch import Tensor

from laconic.errors import LinkError
from laconic.links.quorum.port import (
    Announcement,
    Closing,
    Delivery,
    Outcome,
    Result,
    count_of,
    tensors_of,
)
from laconic.links.quorum.syncer import Syncer
from laconic.links.rendezvous import ADVICE
from laconic.links.texts import clean
from laconic.links.wire import LostError, Transfer, Wire

NEVER = 1e6
"""Seconds that rank 0 waits for a worker to arrive. A worker may take any time."""
MORE_SECONDS = 30.0
"""The other workers wait this much longer than rank 0, which knows which ranks are missing and
should report them first."""
EXIT_SECONDS = 5.0
MOST_TEXT, MOST_SAID = 2**24, 300
"""The longest text, in bytes, and the longest part of it in an error, in characters."""
_HEADER = (1, 1)
"""The header of every message. It can be constant, because each connection carries only the
messages of one pair of workers, in order."""


Report = Callable[[str, Sequence[int]], NoReturn]
"""See `CallGuard.report`."""


class Line:
    """The connection to one other worker. Rank 0 is 0 on it, and the other worker 1."""

    def __init__(self, wire: Wire, place: int, other: int, timeout: float) -> None:
        self._wire, self._other, self._timeout = wire, other, timeout
        self._there = 1 - place

    def send(self, *tensors: Tensor) -> None:
        """Send these tensors."""
        for tensor in tensors:
            self._move({self._there: tensor}, {})

    def receive(self, *tensors: Tensor) -> None:
        """Receive these tensors, of known length."""
        for tensor in tensors:
            self._move({}, {self._there: tensor})

    def _move(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> None:
        wire, at = self._wire, (_HEADER, self._timeout, self._wire.names)
        try:
            Transfer(wire.connections, sends, receives, *at).wait()
        except LostError as error:
            text = f"rank {self._other} is lost ({error}). {ADVICE}"
            raise LinkError(text, ranks=[self._other]) from None

    def send_text(self, value: Any) -> None:
        """Send a ``value`` that JSON can represent."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        self.send(torch.tensor([len(data)]), data)

    def receive_text(self) -> dict[str, Any]:
        """Receive what `send_text` sends: a dictionary."""
        size = torch.zeros(1, dtype=torch.int64)
        self.receive(size)
        if not 0 <= int(size) <= MOST_TEXT:
            raise self.violated(f"a text of {int(size)} bytes")
        data = torch.empty(int(size), dtype=torch.uint8)
        self.receive(data)
        with self.reading():
            return dict(json.loads(bytes(data.tolist())))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context for parsing a received text. If it is malformed, raises a `LinkError` that
        names the other worker."""
        try:
            yield
        except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise self.violated(f"no message of laconic's: {error!r}") from error

    def violated(self, what: str) -> LinkError:
        """The error about the other worker, which has sent ``what``."""
        text = clean(f"rank {self._other} has sent {what}"[:MOST_SAID])
        return LinkError(f"{text}. {ADVICE}", ranks=[self._other])

    def shutdown(self) -> None:
        """End the connection, so that a waiting thread returns."""
        self._wire.shutdown()

    def close(self) -> None:
        """Free the connection."""
        self._wire.close()


class Clock:
    """The real time."""

    def seconds(self, step: int) -> float:
        """See `Port.seconds`."""
        return time.monotonic()

    def worked(self, step: int, waited: float) -> float:
        """See `Port.worked`."""
        return time.monotonic() - waited

    def restart(self, step: int) -> None:
        """See `Port.restart`."""

    def arrive(self, step: int) -> float:
        """This worker waits, after ``step`` steps. Returns the time."""
        return time.monotonic()

    def waited(self, since: float) -> float:
        """The seconds since that time."""
        return time.monotonic() - since


class Host(Clock):
    """Rank 0's port, with the syncer, and a thread for each other worker. ``like``: tensors like
    those that a worker delivers, by kind. ``timeout``: if the quorum is not reached within this
    many seconds, all workers raise an error. ``report``: makes all ranks raise an error with a
    given text and the ranks to blame."""

    def __init__(
        self,
        core: Syncer,
        lines: dict[int, Line],
        like: Sequence[Sequence[Tensor]],
        timeout: float,
        report: Report,
    ) -> None:
        self._core = core
        self._report = report
        self._timeout = timeout
        self._change = threading.Condition()
        """Guards the syncer."""
        self._lines, self._like = lines, like
        self._failure: LinkError | None = None
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, args=(rank, line), daemon=True)
            for rank, line in lines.items()
        ]
        for thread in self._threads:
            thread.name = "laconic-quorum"
            thread.start()
        _hosts.add(self)

    @property
    def closings(self) -> list[Closing]:
        return self._core.closings

    @property
    def served(self) -> tuple[int, int]:
        return self._core.served

    def quiet(self) -> AbstractContextManager[object]:
        return self._change

    def deliver(self, delivery: Delivery) -> Outcome:
        return self._deliver(0, delivery)

    def _deliver(self, rank: int, delivery: Delivery, sending: float = 0.0) -> Outcome:
        """Wait until the round of worker ``rank`` has closed. Its message took ``sending``
        seconds."""
        core, end = self._core, time.monotonic() + self._timeout
        with self._change:
            core.arrive(rank, delivery, time.monotonic(), sending)
            self._change.notify_all()
            while rank not in core.outcomes:
                if self._failure is not None:
                    raise self._failure
                if self._closed:
                    raise LinkError("the rounds have ended")
                found, now = core.next_closing(), time.monotonic()
                if found is not None and found[0] <= now:
                    try:
                        core.close(found[1], now)
                    except Exception as error:  # every worker raises it
                        self._fail(error)
                    self._change.notify_all()
                elif found is None and now > end:
                    missing = core.missing()
                    text = f"no quorum in {self._timeout:g} s: ranks {missing} have not arrived"
                    self._fail(LinkError(f"{text}. {ADVICE}", ranks=missing))
                else:
                    self._change.wait((end if found is None else found[0]) - now + 1e-3)
            return core.outcomes.pop(rank)

    def meet(self, step: int) -> None:
        self._meet(0)

    def _meet(self, rank: int) -> None:
        with self._change:
            self._core.meet(rank, time.monotonic())
            self._change.notify_all()

    def close(self) -> None:
        """Leave. The other workers may complete what they have begun, and leave by themselves."""
        self._leave(0)

    def _leave(self, rank: int) -> None:
        with self._change:
            self._core.leave(rank)
            self._change.notify_all()

    def abandon(self) -> None:
        with self._change:
            self._fail(LinkError(f"rank 0 has failed. {ADVICE}", ranks=[0]))

    def _fail(self, error: Exception) -> None:
        """Make every worker raise ``error`` at its next round. The caller must hold `_change`."""
        if self._failure is None:
            ranks = error.ranks if isinstance(error, LinkError) else ()
            self._failure = LinkError(str(error), ranks=ranks)
            self._change.notify_all()
            try:  # else ranks that see another one end would blame that one
                self._report(str(error), ranks)
            except LinkError as verdict:
                self._failure = verdict
        self._change.notify_all()

    def _serve(self, rank: int, line: Line) -> None:
        torch.set_grad_enabled(False)
        try:
            while self._serve_one(rank, line):
                pass
        except Exception as error:  # else the other workers would wait for this one
            with self._change:
                if not self._closed:
                    self._fail(error)

    def _serve_one(self, rank: int, line: Line) -> bool:
        """Serve one message of worker ``rank``. Returns whether more will come."""
        said = line.receive_text()
        what = said.get("what")
        if what == "meet":
            self._meet(rank)
            return True
        if what == "leave":
            self._leave(rank)
            return False
        if what != "arrive":
            raise line.violated(f"no message of laconic's: {what!r}")
        with line.reading():
            about = Announcement.of(said["about"])
            tensors = [torch.empty_like(t) for t in self._like[about.kind]]
        start = time.monotonic()
        line.receive(*tensors)
        bases = None
        if said.get("bases"):
            bases = [torch.empty_like(t) for t in tensors]
            line.receive(*bases)
        delivery, sending = Delivery(about, tensors, bases), time.monotonic() - start
        try:
            closing, results = self._deliver(rank, delivery, sending)
        except LinkError as error:
            line.send_text({"error": str(error), "ranks": list(error.ranks)})
            return False
        codes = [0 if isinstance(result, Tensor) else len(result) for result in results]
        line.send_text({**closing.as_json(), "codes": codes})
        line.send(*tensors_of(results))
        return True

    def end(self) -> None:
        """End the threads. Their workers may still be sending."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        for line in self._lines.values():
            line.shutdown()
        end = time.monotonic() + EXIT_SECONDS
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.0))


_hosts: weakref.WeakSet[Host] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End the threads before the interpreter does: if it stops a thread inside torch, the process
    dies of SIGABRT."""
    for host in list(_hosts):
        host.end()


class Guest(Clock):
    """The port of any other worker: ``line`` is that to rank 0. ``report``: see `Host`."""

    closings: list[Closing] = []  # noqa: RUF012  never changed
    served = 0, 0

    def __init__(self, line: Line, report: Report) -> None:
        self._line, self._report = line, report
        self._abandoned = False

    def quiet(self) -> AbstractContextManager[object]:
        return nullcontext()

    def deliver(self, delivery: Delivery) -> Outcome:
        try:
            answer = self._deliver(delivery)
            if "error" not in answer:
                with self._line.reading():
                    closing, results = Closing.of(answer), _results(answer["codes"], delivery)
                self._line.receive(*tensors_of(results))
                return Outcome(closing, results)
            with self._line.reading():
                text, ranks = clean(str(answer["error"])), [int(r) for r in answer["ranks"]]
        except LinkError as error:
            if self._abandoned:  # this worker has failed, not rank 0
                raise
            self._report(str(error), error.ranks)  # else the other ranks would blame this one
        raise LinkError(text, ranks=ranks)

    def _deliver(self, delivery: Delivery) -> dict[str, Any]:
        """Send ``delivery``, and return rank 0's answer."""
        said = {"what": "arrive", "about": vars(delivery.announcement)}
        self._line.send_text({**said, "bases": delivery.bases is not None})
        self._line.send(*delivery.tensors, *(delivery.bases or ()))
        return self._line.receive_text()

    def meet(self, step: int) -> None:
        self._line.send_text({"what": "meet"})

    def close(self) -> None:
        with suppress(LinkError):  # rank 0 may have ended
            self._line.send_text({"what": "leave"})

    def abandon(self) -> None:
        self._abandoned = True
        self._line.shutdown()


def _results(codes: Any, delivery: Delivery) -> list[Result]:
    """Memory for the results of ``delivery``, of which so many ``codes`` come each; 0: a whole one.
    Raises ``TypeError`` or ``ValueError`` if that cannot be."""
    results: list[Result] = []
    rooms = delivery.tensors if delivery.room is None else delivery.room
    for number, tensor, room in zip(map(count_of, codes), delivery.tensors, rooms, strict=True):
        if number * tensor.nbytes > room.nbytes:
            raise ValueError(f"{number} codes are longer than the result")
        results.append([torch.empty_like(tensor) for _ in range(number)] if number else room)
    return results
