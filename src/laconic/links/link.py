"""The interface to the network: collectives over a set of ranks.

Every method blocks until its result is there. Collectives run beside the training because the
communication thread (`laconic.links.comm_thread`) calls these methods, which also gives all ranks
one order of collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace, coroutine
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from laconic.device import accelerator
from laconic.links.calls import Call

FAR_SECONDS = 0.02
"""The least round trip for which collectives overlap: see `Link.overlapping`."""

T = TypeVar("T")
Job = Coroutine[Any, Any, T]
"""Work that pauses (`sent`) when it has sent messages, before it waits for those of other ranks.
Meanwhile other work can send its own. Returns a T."""


@coroutine
def sent() -> Generator[None, None, None]:
    """Messages are on their way: let other work send its own."""
    yield


def complete(job: Job[T]) -> T:
    """Run ``job`` to the end, and return its result."""
    while True:
        try:
            job.send(None)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


class Sent(NamedTuple):
    """What a rank has sent to another one: ``packets``, how many of them were sent ``again``,
    ``bytes`` that have arrived, and the ``seconds`` in which some were under way."""

    packets: int
    again: int
    bytes: int
    seconds: float


class AsyncLink(Protocol):
    """The collectives of `Link`, to be awaited. While one waits for other ranks, those of other
    messages can be under way, where the link can do that (`Link.overlapping`)."""

    @property
    def rank(self) -> int:
        """As `Link.rank`."""

    @property
    def size(self) -> int:
        """As `Link.size`."""

    @property
    def queues(self) -> bool:
        """As `Link.queues`."""

    async def mean(self, x: Tensor) -> None:
        """As `Link.mean`."""

    async def reduce_scatter(self, x: Tensor) -> Tensor:
        """As `Link.reduce_scatter`."""

    async def all_gather(self, mine: Tensor, out: Tensor) -> None:
        """As `Link.all_gather`."""

    async def all_to_all(self, x: Tensor, out: Tensor) -> None:
        """As `Link.all_to_all`."""

    async def broadcast(self, x: Tensor, root: int = 0) -> None:
        """As `Link.broadcast`."""

    async def swap(
        self, x: Tensor, to: Sequence[int], source: Sequence[int]
    ) -> Sequence[Tensor | None]:
        """As `Link.swap`."""

    async def gather(self, x: Tensor) -> Tensor:
        """As `Link.gather`."""


COLLECTIVES = ["mean", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "swap", "gather"]


def awaiting(link: Any, make: Callable[[str], Callable[..., Job[Any]]]) -> AsyncLink:
    """The collectives that ``make(name)`` returns, between the ranks of ``link``."""
    made: Any = SimpleNamespace(rank=link.rank, size=link.size, queues=link.queues)
    vars(made).update({name: make(name) for name in COLLECTIVES})
    return cast("AsyncLink", made)


def one_by_one(link: Link) -> AsyncLink:
    """The collectives of ``link``, which never pause: each is complete once it is awaited."""

    async def collective(name: str, *args: Any, **options: Any) -> Any:
        return getattr(link, name)(*args, **options)

    kind = type(link)
    if isinstance(link, Blocking) and all(
        getattr(kind, name) is getattr(Blocking, name) for name in COLLECTIVES
    ):
        return link.awaited
    # also where a subclass has its own of some
    return awaiting(link, lambda name: partial(collective, name))


def memory_for(link: AsyncLink, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Bytes for messages that are made on ``device``, where ``link`` can send them from without
    another copy: in host memory, unless an accelerator's own collectives carry them."""
    kind = None if link.queues else accelerator(device)
    if kind is None:
        return torch.empty(shape, dtype=torch.uint8, device=device)
    return kind.pinned(math.prod(shape)).view(shape)


class Link(Protocol):
    """Collectives over one set of ranks, on flat contiguous tensors.

    Sizes are in elements; ``n`` is the link's ``size``. All ranks of the set must make the same
    calls in the same order. Raises `laconic.LinkError` if one does not, or is lost.
    """

    @property
    def rank(self) -> int:
        """This process's place in the set, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks in the set."""

    @property
    def threaded(self) -> bool:
        """Whether calls may come from a thread beside the training."""

    @property
    def queues(self) -> bool:
        """Whether collectives on an accelerator return once they are work of the current stream, as
        NCCL's do, and not when the result is there."""

    @property
    def joined(self) -> float:
        """When (`time.perf_counter`) the last collective completed, as far as this rank knows."""

    @property
    def overlapping(self) -> AsyncLink | None:
        """The collectives, of which several can be under way: where a round trip takes long,
        several messages then share it. All ranks must resume them in the same order. None where
        round trips are short, or the link cannot do it; the same on all ranks."""

    def begin_call(self, call: Call, *, wait: bool) -> bool:
        """Begin ``call``: the collectives from now on belong to it. Where ranks begin different
        calls, nothing is averaged that does not belong together, and all ranks raise `LinkError`:
        here if ``wait``, else in the call's collectives or in `check`. Returns whether messages
        were sent."""

    def digests(self) -> Sequence[int]:
        """The ranks' `Call.digest` of the current call, by rank, once every rank has heard from
        every other; empty before that, and where messages carry none."""

    def sent(self) -> Mapping[int, Sent]:
        """What this rank has sent to each other over the present connections; empty where that is
        not known."""

    def check(self) -> None:
        """Raise `LinkError` if another rank is known to be in another call, or to have left. For
        threads that wait for a collective which another thread makes."""

    def check_peers(self) -> None:
        """Raise `LinkError` if another rank is known to be lost. To be called between two calls,
        as often as you like: it is cheap, and sends nothing unless a connection has closed. After
        `finish`, a rank may end."""

    def leave(self, broken: bool) -> None:
        """Tell the other ranks, when they ask, that this one makes no more calls, and, if
        ``broken``, that it does not complete the last one."""

    def mean(self, x: Tensor) -> None:
        """``x <- mean over ranks of x``, in place; the same bits on every rank."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Cut ``x`` into n slices, and return the mean over ranks of slice ``rank``. Sums in
        float32 at least. Overwrites ``x``. The result belongs to the link or is a view of x, and
        is valid until the next call. The length of x is a multiple of n."""

    def all_gather(self, mine: Tensor, out: Tensor) -> None:
        """``out`` <- all ranks' ``mine`` one after the other, cast to ``out``'s dtype. ``mine`` may
        be its own slice of ``out``."""

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        """Send row r of ``x``, of shape (n, m), to rank r. ``out``, of the same size, receives the
        rows of all ranks for this one, in the order of their ranks. Nothing is summed, so any dtype
        works."""

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        """``x`` <- rank ``root``'s ``x``, in place."""

    def swap(self, x: Tensor, to: Sequence[int], source: Sequence[int]) -> Sequence[Tensor | None]:
        """Send ``x`` to each of the ranks ``to``, and return what the ranks ``source`` send to this
        one, in that order: as many elements each. Valid until the next call. A newcomer of an
        elastic run that repeats rounds gets None in place of each: nobody else has these messages.
        """

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' ``x``, stacked: shape ``(n, *x.shape)``. For small tensors."""

    def split(self, sets: Sequence[Sequence[int]]) -> Link:
        """The link of the set, among disjoint ``sets`` of ranks, that this rank belongs to."""

    def status(self, text: str) -> None:
        """Record what this rank is doing, for other ranks' error messages."""

    def close(self) -> None:
        """Free what belongs to this link alone, such as its connections. To be called on all its
        ranks. A collective that is under way on another rank fails."""


class Quiet:
    """What a link does that learns nothing of its ranks but by its collectives."""

    queues = False
    overlapping = None

    def digests(self) -> Sequence[int]:
        return []

    def sent(self) -> Mapping[int, Sent]:
        return {}

    def check(self) -> None:
        """Does nothing."""

    def check_peers(self) -> None:
        """Does nothing."""

    def leave(self, broken: bool) -> None:
        """Does nothing."""

    def status(self, text: str) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def _to_its_end(name: str) -> Callable[..., Any]:
    def collective(link: Blocking, *args: Any, **options: Any) -> Any:
        return complete(getattr(link.awaited, name)(*args, **options))

    return collective


class Blocking:
    """The collectives of a link, each made of one that is awaited."""

    mean: Callable[..., None] = _to_its_end("mean")
    reduce_scatter: Callable[..., Tensor] = _to_its_end("reduce_scatter")
    all_gather: Callable[..., None] = _to_its_end("all_gather")
    all_to_all: Callable[..., None] = _to_its_end("all_to_all")
    broadcast: Callable[..., None] = _to_its_end("broadcast")
    swap: Callable[..., Sequence[Tensor | None]] = _to_its_end("swap")
    gather: Callable[..., Tensor] = _to_its_end("gather")

    @property
    def awaited(self) -> AsyncLink:
        """Those, of which one at a time is under way."""
        raise NotImplementedError
