"""Workers as threads of one process: exact, fast, the same from run to run.

Only one worker runs at a time. A worker runs until it waits on a link; then the next one runs, with
its own random state. Sums are taken in rank order, as in `TcpLink`, so a simulated run gives the
same bits as a real run on CPUs. (NCCL sums in its own order, so with three or more workers the last
digits differ from these.)
"""

from __future__ import annotations

import contextvars
import ctypes
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from laconic.device import ACCELERATORS
from laconic.errors import LinkError
from laconic.links.calls import SAME_CALLS, Call
from laconic.links.link import Link, Quiet
from laconic.tensors import mean_in_rank_order

T = TypeVar("T")
Compute = Callable[[list[Tensor]], Tensor]

current_link: contextvars.ContextVar[Link | None] = contextvars.ContextVar("link", default=None)
"""The link of the simulated worker that runs in this thread."""
TWISTER_BYTES = 624 * 4 + 4
"""Of the memory of NumPy's Mersenne Twister: its words and the position in them."""


@dataclass
class _Collective:
    """One collective under way, and the tensors that have come so far, by rank."""

    call: str
    received: dict[int, Tensor] = field(default_factory=dict)
    digests: dict[int, int] = field(default_factory=dict)
    result: Tensor | None = None
    joined: float = 0.0


class _NumpyState(NamedTuple):
    """NumPy's global random ``state``, and the generator's ``memory`` where that is all of it."""

    state: Any
    memory: bytes | None

    @classmethod
    def now(cls, known: _NumpyState | None) -> _NumpyState:
        """The state of now, perhaps the ``known`` one. To read or write it takes 45 us, as long as
        a small step, and few programs draw from it. So a change is detected in the memory."""
        random, memory = sys.modules["numpy"].random, None
        if hasattr(random, "get_bit_generator"):  # NumPy 1.24 or newer
            generator = random.get_bit_generator()
            if type(generator).__name__ == "MT19937":
                memory = ctypes.string_at(generator.ctypes.state_address, TWISTER_BYTES)
        if known is not None and memory is not None and memory == known.memory:
            return known
        state = random.get_state()
        keeps_gaussian = memory is not None and state[3]
        return cls(state, None if keeps_gaussian else memory)


class RandomState:
    """torch's, Python's and (where loaded) NumPy's global random state, of one worker, and that of
    accelerators in use."""

    current: ClassVar[_NumpyState | None] = None
    """NumPy's state that was saved or restored last, by any worker."""

    def __init__(self) -> None:
        self.numpy: _NumpyState | None = None
        self.save()

    def save(self) -> None:
        self.torch = torch.get_rng_state()
        self.python = random.getstate()
        used = [kind for kind in ACCELERATORS.values() if kind.in_use()]
        self.accelerators = [(kind, kind.random_state()) for kind in used]
        if "numpy" in sys.modules:
            self.numpy = RandomState.current = _NumpyState.now(RandomState.current)

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        for kind, state in self.accelerators:
            kind.set_random_state(state)
        if self.numpy is not None and self.numpy is not RandomState.current:
            sys.modules["numpy"].random.set_state(self.numpy.state)
            RandomState.current = self.numpy


class Stage:
    """Lets one worker at a time run, and has the collectives under way. Only the worker whose turn
    it is reads or writes the attributes."""

    def __init__(self, workers: int, step_seconds: Sequence[float] | None = None) -> None:
        self.turns = [threading.Lock() for _ in range(workers)]
        for turn in self.turns[1:]:
            turn.acquire()  # rank 0 begins; passing the turn to a rank releases its lock
        self.runnable = [True] * workers
        self.random = [RandomState() for _ in range(workers)]
        self.collectives: dict[tuple[tuple[int, ...], int], _Collective] = {}
        self.failure: str | None = None
        self.blamed: list[int] = []
        self.left: list[int] = []
        self.step_seconds = [1.0] * workers if step_seconds is None else list(step_seconds)
        """The virtual seconds of each worker's steps, for rounds that close with a quorum."""
        self.clocks = [0.0] * workers
        self.recorded: Sequence[Iterator[Any]] | None = None
        """For each worker, the rounds of an earlier run (`laconic.Closing`) that it repeats."""
        self.polled = False
        """Whether there was a round with a quorum."""

    def take_turn(self, rank: int) -> None:
        self.turns[rank].acquire()
        self.random[rank].restore()

    def pass_turn(self, rank: int) -> None:
        """Let the next worker run that can; if none can, they all wait for each other: an error."""
        self.random[rank].save()
        size = len(self.runnable)
        order = [(rank + i) % size for i in range(1, size + 1)]
        able = [r for r in order if self.runnable[r]]
        if not able and len(self.left) < size:
            waiting = [c for c in self.collectives.values() if c.result is None]
            stuck = "; ".join(f"ranks {sorted(c.received)} in {c.call}" for c in waiting)
            ended = ""
            if self.left:
                ended = f"; ranks {sorted(self.left)} have ended. {SAME_CALLS}"
            self.fail(f"the workers wait for each other in vain: {stuck}{ended}", self.left)
            able = [r for r in order if self.runnable[r]]
        if able:
            self.turns[able[0]].release()  # wakes only that one

    def fail(self, reason: str, ranks: Sequence[int] = ()) -> None:
        """Raise ``reason`` in every worker that waits or will wait; ``ranks`` are to blame."""
        if self.failure is None:
            self.failure, self.blamed = reason, list(ranks)
        self.runnable = [r not in self.left for r in range(len(self.runnable))]

    def error(self) -> LinkError:
        """What every worker raises after `fail`."""
        return LinkError(self.failure, ranks=self.blamed)

    def leave(self, rank: int, error: BaseException | None) -> None:
        self.left.append(rank)
        self.runnable[rank] = False
        if error is not None:
            self.fail(f"rank {rank} failed: {type(error).__name__}: {error}", [rank])
        self.pass_turn(rank)


class SimulatedLink(Quiet):
    """The link of one simulated worker to the ``members`` of its set. The stage sees workers
    end."""

    threaded = False

    def __init__(self, stage: Stage, me: int, members: Sequence[int]) -> None:
        self.stage = stage
        self.me = me
        self._members = members
        self._count = 0
        self.joined = 0.0
        self._digest = 0
        self._digests: Sequence[int] = []
        self.rank = members.index(me)
        self.size = len(members)

    def join(self, call: str, x: Tensor, compute: Compute) -> Tensor:
        """Contribute ``x`` to ``call``, and wait for the other members. Returns ``compute`` of what
        all contribute, in rank order."""
        stage, me, members = self.stage, self.me, self._members
        self._count += 1
        call = f"{call}{list(x.shape)}"
        if stage.failure is not None:
            raise stage.error()
        key = (tuple(members), self._count)
        collective = stage.collectives.setdefault(key, _Collective(call))
        if collective.call != call:
            stage.fail(
                f"ranks disagree on what comes next: rank {me} calls {call} where ranks "
                f"{sorted(collective.received)} call {collective.call}. {SAME_CALLS}"
            )
            raise stage.error()
        collective.received[me] = x
        collective.digests[me] = self._digest
        if len(collective.received) == len(members):
            collective.result = compute([collective.received[r] for r in members])
            collective.joined = time.perf_counter()
            collective.received.clear()
            del stage.collectives[key]
            for r in members:
                stage.runnable[r] = True
        else:
            stage.runnable[me] = False
            stage.pass_turn(me)
            stage.take_turn(me)
        if collective.result is None:
            raise stage.error()
        self.joined = collective.joined
        self._digests = [collective.digests[r] for r in members]
        return collective.result

    def begin_call(self, call: Call, *, wait: bool) -> bool:
        self.begin_digest(call.digest)
        self.join(f"{call} ", torch.zeros(0), lambda everyone: everyone[0])
        return wait

    def begin_digest(self, digest: int) -> None:
        """As `Collectives.begin_digest`."""
        self._digest, self._digests = digest, []

    def digests(self) -> Sequence[int]:
        return self._digests

    def mean(self, x: Tensor) -> None:
        x.copy_(self.join("mean", x, mean_in_rank_order))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        mean = self.join("reduce_scatter", x, mean_in_rank_order)
        return mean.view(self.size, -1)[self.rank].clone()

    def all_gather(self, mine: Tensor, out: Tensor) -> None:
        out.copy_(self.join("all_gather", mine.to(out.dtype), torch.cat))

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        out.copy_(self.join("all_to_all", x, torch.stack)[:, self.rank])

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        x.copy_(self.join("broadcast", x, lambda everyone: everyone[root].clone()))

    def swap(self, x: Tensor, to: Sequence[int], source: Sequence[int]) -> list[Tensor]:
        everyone = self.join("swap", x, torch.stack)
        return [everyone[r].clone() for r in source]

    def gather(self, x: Tensor) -> Tensor:
        return self.join("gather", x, torch.stack).clone()

    def split(self, sets: Sequence[Sequence[int]]) -> Link:
        mine = next(ranks for ranks in sets if self.rank in ranks)
        return SimulatedLink(self.stage, self.me, [self._members[r] for r in mine])
