"""The ranks of one worker of an elastic run, and what they tell each other.

Rank 0 takes part in the run for its worker: the coordinator and the other workers know no other
rank of it. The others reach the run through rank 0. A worker ends as a whole: a rank that finds
another one lost ends its own process.
"""

from __future__ import annotations

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
from laconic.links.texts import exchange_texts
from laconic.tensors import packed, unpacked

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

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        """Send ``sends[r]`` to rank r, and receive ``receives[r]`` from it, of known lengths."""
        if self.link is not None:
            self.link.exchange(sends, receives)

    def gather(self, value: Any) -> list[Any]:
        """The ``value`` of every rank, by rank, as far as JSON can hold it."""
        if self.link is None:
            return [value]
        return [json.loads(text) for text in exchange_texts(self.link.gather, json.dumps(value))]

    def any(self, *flags: bool) -> list[bool]:
        """Whether any rank has set each of its ``flags``."""
        return [any(column) for column in zip(*self.gather(flags), strict=True)]

    def union(self, names: Sequence[str]) -> set[str]:
        """The ``names`` of all ranks."""
        return {name for own in self.gather([*names]) for name in own}

    def say(self, value: Any = None) -> Any:
        """What rank 0 says, as far as JSON can hold it; on all ranks."""
        return self.gather(value)[0]

    def deal(self, states: Sequence[Any] | None) -> Any:
        """What rank 0 has for this rank among its ``states``, by rank: plain data with tensors."""
        if self.rank:
            return self._take([0])[0]
        assert states is not None, "rank 0 has them"
        self._post({r: states[r] for r in range(1, self.size)})
        return states[0]

    def collect(self, state: Any) -> list[Any]:
        """The ``state`` of every rank, by rank: plain data with tensors. On other ranks than 0 none
        but their own."""
        if self.rank:
            self._post({0: state})
            return [state]
        return [state, *self._take(range(1, self.size))]

    def _post(self, states: Mapping[int, Any]) -> None:
        data = {r: packed(state) for r, state in states.items()}
        self.exchange({r: torch.tensor([len(own)]) for r, own in data.items()}, {})
        self.exchange(data, {})

    def _take(self, ranks: Sequence[int]) -> list[Any]:
        sizes = {r: torch.zeros(1, dtype=torch.int64) for r in ranks}
        self.exchange({}, sizes)
        rows = {r: torch.empty(int(size), dtype=torch.uint8) for r, size in sizes.items()}
        self.exchange({}, rows)
        return [unpacked(row) for row in rows.values()]

    def shutdown(self) -> None:
        """The process ends: end what another thread waits for."""
        if self.link is not None:
            self.link.connections.shutdown()


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
