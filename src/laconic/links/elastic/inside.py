"""The ranks of one worker of an elastic run, and what they tell each other.

Rank 0 takes part in the run for its worker: the coordinator and the other workers know no other
rank of it. The others reach the run through rank 0. A worker ends as a whole: a rank that finds
another one lost ends its own process.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from laconic.links.tcp import TcpLink

log = logging.getLogger("laconic")

WATCH_SECONDS = 0.1
"""How often a rank looks whether another rank of its worker has ended."""
GRACE_SECONDS = 1.0
"""How long after that it waits for the news that the run has finished."""


class Inside:
    """What the ranks of one worker tell each other over ``link``, a set of connections that nothing
    else uses. None: the worker has one rank. All ranks make the same calls in the same order."""

    def __init__(self, link: TcpLink | None = None) -> None:
        self.link = link
        self.rank, self.size = (0, 1) if link is None else (link.rank, link.size)

    @property
    def _others(self) -> range:
        return range(1, self.size)

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Send ``sends[r]`` to rank r, and receive ``receives[r]`` from it, of known lengths."""
        if self.link is not None:
            self.link.exchange(sends, receives)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """The ``numbers`` of all ranks, as many on each."""
        if self.link is None:
            return [list(numbers)]
        rows: list[list[int]] = self.link.gather(torch.tensor(numbers)).tolist()
        return rows

    def any(self, *flags: bool) -> list[bool]:
        """Whether any rank has set each of its ``flags``."""
        return [any(column) for column in zip(*self.gather([*map(int, flags)]), strict=True)]

    def say(self, value: Any = None) -> Any:
        """What rank 0 says, as far as JSON can hold it; on all ranks."""
        return json.loads(bytes(self._send([_bytes(json.dumps(value).encode())] * self.size)))

    def deal(self, states: Sequence[Any] | None) -> Any:
        """What rank 0 has for this rank among its ``states``, by rank: plain data with tensors."""
        own = self._send(None if states is None else list(map(_packed, states)))
        return _unpacked(own) if states is None else states[0]

    def collect(self, state: Any) -> list[Any]:
        """The ``state`` of every rank, by rank: plain data with tensors. On other ranks than 0 none
        but their own."""
        if self.rank:
            packed = _packed(state)
            self.exchange({0: torch.tensor([len(packed)])}, {})
            self.exchange({0: packed}, {})
            return [state]
        sizes = {r: torch.zeros(1, dtype=torch.int64) for r in self._others}
        self.exchange({}, sizes)
        rows = {r: torch.empty(int(size), dtype=torch.uint8) for r, size in sizes.items()}
        self.exchange({}, rows)
        return [state, *(_unpacked(row) for row in rows.values())]

    def _send(self, parts: Sequence[Tensor] | None) -> Tensor:
        """Rank 0 has ``parts``, by rank. Returns this rank's."""
        if self.rank == 0:
            assert parts is not None, "rank 0 has them"
            self.exchange({r: torch.tensor([len(parts[r])]) for r in self._others}, {})
            self.exchange({r: parts[r] for r in self._others}, {})
            return parts[0]
        size = torch.zeros(1, dtype=torch.int64)
        self.exchange({}, {0: size})
        own = torch.empty(int(size), dtype=torch.uint8)
        self.exchange({}, {0: own})
        return own

    def union(self, names: Sequence[str]) -> set[str]:
        """The ``names`` of all ranks."""
        if self.link is None or not self.any(bool(names))[0]:
            return set(names)
        everyone = self.collect(list(names))
        found: list[str] = self.say(sorted({name for own in everyone for name in own}))
        return set(found)

    def shutdown(self) -> None:
        """The process ends: end what another thread waits for."""
        if self.link is not None:
            self.link.wire.shutdown()


class Watch:
    """Ends this process once another rank of its worker is lost, whatever it is doing: it may wait
    for that rank in a collective of torch's. ``link``: a set of connections that nothing else uses.
    """

    def __init__(self, link: TcpLink) -> None:
        self._link = link
        self.over: Callable[[], bool] = lambda: False
        """Whether the other ranks may end."""
        self._found = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="laconic-ranks")
        self._thread.start()
        sys.excepthook = partial(self._uncaught, sys.excepthook)

    def stop(self) -> None:
        """The ranks have not joined a run, and need not end together."""
        self.over = lambda: True

    def _run(self) -> None:
        while not (closed := self._link.wire.closed()):
            time.sleep(WATCH_SECONDS)
        self._found.set()
        end = time.monotonic() + GRACE_SECONDS
        while not self.over():
            if time.monotonic() >= end:
                self._end(sorted(closed))
            time.sleep(WATCH_SECONDS)

    def _end(self, ranks: Sequence[int]) -> None:
        names = " and ".join(f"rank {r}" for r in ranks)
        log.error(
            "%s of this worker has ended, and so does rank %d: a worker of an elastic run ends as "
            "a whole. The others go on without it: start it again, and it joins them",
            *(names, self._link.rank),
        )
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)

    def _uncaught(
        self,
        hook: Callable[[type[BaseException], BaseException, TracebackType | None], object],
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        """A collective of torch's may fail first, without saying why."""
        if issubclass(kind, RuntimeError) and self._found.wait(2 * GRACE_SECONDS):
            self._thread.join()
        hook(kind, error, traceback)


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _packed(state: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return _bytes(buffer.getvalue())


def _unpacked(data: Tensor) -> Any:
    return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
