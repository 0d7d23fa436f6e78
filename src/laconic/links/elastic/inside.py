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
from typing import Any

import torch
from torch import Tensor

from laconic.errors import when_uncaught
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
        return self._deal(None if self.rank else [value] * self.size, _JSON)

    def tell(self, value: Any) -> list[Any]:
        """The ``value`` of every rank, by rank, as far as JSON can hold it. On other ranks than 0
        none but their own."""
        return self._collect(value, _JSON)

    def deal(self, states: Sequence[Any] | None) -> Any:
        """What rank 0 has for this rank among its ``states``, by rank: plain data with tensors."""
        return self._deal(states, _STATE)

    def collect(self, state: Any) -> list[Any]:
        """As `tell`, of plain data with tensors."""
        return self._collect(state, _STATE)

    def _deal(self, values: Sequence[Any] | None, codec: _Codec) -> Any:
        if self.rank:
            return self._take([0], codec)[0]
        assert values is not None, "rank 0 has them"
        self._post({r: codec[0](values[r]) for r in self._others})
        return values[0]

    def _collect(self, value: Any, codec: _Codec) -> list[Any]:
        if self.rank:
            self._post({0: codec[0](value)})
            return [value]
        return [value, *self._take(self._others, codec)]

    def _post(self, packed: Mapping[int, bytes]) -> None:
        rows = {r: torch.frombuffer(bytearray(d), dtype=torch.uint8) for r, d in packed.items()}
        self.exchange({r: torch.tensor([len(row)]) for r, row in rows.items()}, {})
        self.exchange(rows, {})

    def _take(self, ranks: Sequence[int], codec: _Codec) -> list[Any]:
        sizes = {r: torch.zeros(1, dtype=torch.int64) for r in ranks}
        self.exchange({}, sizes)
        rows = {r: torch.empty(int(size), dtype=torch.uint8) for r, size in sizes.items()}
        self.exchange({}, rows)
        return [codec[1](row.numpy().tobytes()) for row in rows.values()]

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
        when_uncaught(self._wait_for_news)

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

    def _wait_for_news(self, error: BaseException) -> None:
        """A collective of torch's may fail first, without saying why."""
        if isinstance(error, RuntimeError) and self._found.wait(2 * GRACE_SECONDS):
            self._thread.join()


def _saved(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


_Codec = tuple[Callable[[Any], bytes], Callable[[bytes], Any]]
_JSON: _Codec = (lambda value: json.dumps(value).encode()), json.loads
_STATE: _Codec = _saved, lambda data: torch.load(io.BytesIO(data), weights_only=True)
