"""Gradient rounds: averaging while the backward pass still runs.

Buckets in reverse order of the parameters, about the order in which gradients appear; the same
on every rank. A bucket is sent as soon as its gradients and all buckets before it are there.
What is left is sent when the backward pass ends, and ``backward()`` returns when all is averaged,
so that clipping and unscaling see the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from laconic.algorithms.exchange import Collect, Exchange
from laconic.algorithms.exchanges.mean import Mean
from laconic.algorithms.round import GradientRound
from laconic.algorithms.update import Clock, State
from laconic.buckets import BUCKET_BYTES, Bucket, Segment, bucketize, is_sharded, local, state_dtype
from laconic.engine.channel import Channel
from laconic.engine.nonfinite import NonfiniteCheck
from laconic.errors import LinkError, NotFiniteError
from laconic.links.comm_thread import CommThread, Pending
from laconic.links.link import Link

FIRST_BYTES = 2**20
"""The first bucket is small, so that sending starts early in the backward pass."""
CODED_BUCKETS, LEAST_BYTES = 3, 2**18
"""Gradients that travel coded are cut into at most so many buckets, of a multiple of so many bytes:
the last one's way begins when the backward pass ends, so that it must be short, and each has its
price, which a few bytes left over would not be worth."""
REENTRANT = (
    "checkpointing needs use_reentrant=False, and where other passes run within one, put "
    "no_sync() around it: optimizer.step() averages then"
)
LOOKS = 8
"""Elements of a gradient that are looked at first, to see whether there is one."""


def bucket_bytes(exchange: Exchange, total: int) -> tuple[int, int]:
    """Most bytes of the first bucket, and of the others, for ``total`` bytes of gradients."""
    if not exchange.slots:
        return FIRST_BYTES, BUCKET_BYTES
    least = max(-(-total // CODED_BUCKETS // LEAST_BYTES), 1)
    each = min(least * LEAST_BYTES, BUCKET_BYTES)
    return each, each


def bucket_sizes(exchange: Exchange, total: int, largest: int = 0) -> list[int]:
    """About how many bytes each bucket has, of ``total`` bytes of gradients, where the ``largest``
    tensor has so many."""
    first, each = bucket_bytes(exchange, total)
    if exchange.whole:
        first, each = max(first, largest), max(each, largest)
    whole, rest = divmod(max(total - first, 0), each)
    return [min(first, total), *[each] * whole, *([rest] if rest else [])]


def _places(bucket: Bucket) -> Tensor:
    """Of each segment the places of `LOOKS` elements, by which most are told from zeros: of those
    that were coded in 4 bits many are 0."""
    starts = [0, *accumulate(bucket.sizes[:-1])]
    rows = [
        [start + size * k // LOOKS for k in range(LOOKS)]
        for start, size in zip(starts, bucket.sizes, strict=True)
    ]
    return torch.tensor(rows, device=bucket.device)


def _by_segment(bucket: Bucket, state: State) -> Iterator[tuple[str, Segment, Tensor]]:
    """Every tensor of ``state`` that is as long as ``bucket``, in views of its segments."""
    for name, whole in state.items():
        if whole.shape == (bucket.length,):
            for segment, values in zip(bucket.segments, bucket.split(whole), strict=True):
                yield name, segment, values


class _Flat:
    """Room for a bucket's gradients, ``whole``, and in it the place of each segment, in the shape
    of its tensor where it is all of it."""

    def __init__(self, bucket: Bucket) -> None:
        self.whole = bucket.empty()
        self.pieces = bucket.split(self.whole)
        self._segments = bucket.segments
        self._padding = self.whole[bucket.numel :]
        self._places = [
            piece.view(segment.tensor.shape) if _is_all(segment) else piece
            for segment, piece in zip(bucket.segments, self.pieces, strict=True)
        ]

    def gather(self) -> None:
        """The gradients of the segments' parameters; those that are None count as zero."""
        places, gradients = [], []
        for segment, place in zip(self._segments, self._places, strict=True):
            gradient = segment.tensor.grad
            if gradient is None:
                place.zero_()
            elif gradient.is_sparse:
                raise ValueError("sparse gradients cannot be averaged: use sparse=False")
            else:
                places.append(place)
                gradients.append(_part(gradient, segment))
        _copy(gradients, places)
        self._padding.zero_()

    def scatter(self, unused: set[int]) -> None:
        """All back into the gradients, but for those of the ``unused`` parameters."""
        places, gradients = [], []
        for segment, place in zip(self._segments, self._places, strict=True):
            p = segment.tensor
            if id(p) in unused:
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            elif local(p).is_contiguous() and not local(p.grad).is_contiguous():
                # p may be cut, and its gradient must be too; any other layout is kept, as
                # fused optimisers walk p and its gradient side by side
                p.grad = p.grad.contiguous()
            if local(p.grad).is_contiguous():
                places.append(place)
                gradients.append(_part(p.grad, segment))
            else:
                Segment(p.grad, segment.start, segment.stop).write(place.view(-1))
        _copy(places, gradients)


def _copy(sources: list[Tensor], to: list[Tensor]) -> None:
    if to:  # or torch raises
        torch._foreach_copy_(to, sources)


def _is_all(segment: Segment) -> bool:
    return not is_sharded(segment.tensor) and segment.stop - segment.start == segment.tensor.numel()


def _part(gradient: Tensor, segment: Segment) -> Tensor:
    """The segment's elements of the gradient, as `_Flat` has their places."""
    if _is_all(segment):
        return gradient.detach()
    return local(gradient).reshape(-1)[segment.start : segment.stop]


@dataclass(frozen=True)
class Host:
    """What gradient rounds ask of who runs them. ``params()``: whose gradients; ``scale()``: what
    the loss is multiplied with, where a GradScaler looks at the result, so that what is not finite
    on one rank comes to all of them, where an error would end the run."""

    lane: CommThread
    nonfinite: NonfiniteCheck
    params: Callable[[], Iterable[Tensor]]
    scale: Callable[[], float] | None


class GradientRunner:
    """Averages the gradients by ``r.exchange``, and the `combine` of ``r.update``, over ``link`` in
    every backward pass for which ``active()``. ``announce()`` tells the other ranks of the pass,
    and returns what to call it; ``clock()`` is asked when it begins. ``left``: what a round before
    it has left over."""

    def __init__(
        self,
        r: GradientRound,
        link: Link,
        host: Host,
        active: Callable[[], bool],
        announce: Callable[[], str],
        clock: Callable[[], Clock],
        left: Mapping[tuple[str, int], Tensor],
    ) -> None:
        self.channels: list[Channel] = []
        self.scale = 1.0
        """That of the loss, by a GradScaler, in which gradients are that were not sent yet."""
        self.round = r
        self.exchange = r.exchange
        self._update = r.update
        self._link = link
        self._lane = host.lane
        self._host = host
        self._active = active
        self._announce = announce
        self._clock = clock
        self._left = left
        self._asked: list[int] = []
        self._params: list[Tensor] = []
        self._hooks: dict[int, RemovableHandle] = {}
        self._flats: list[_Flat] = []
        self._pending: list[Pending[None]] = []
        self._missing: list[int] = []
        self._seen: set[int] = set()
        self._task: int | None = None
        self._averaged = False
        self._label = ""
        self.refresh()

    def refresh(self, *, keep: bool = False) -> bool:
        """Follow the parameters: groups added, parameters frozen or thawed. Returns whether any
        joined. ``keep``: in a backward pass, where none may leave, as its gradient may be due."""
        before = {id(p) for p in self._params}
        learning = [p for p in self._host.params() if p.requires_grad or (keep and id(p) in before)]
        asked = [id(p) for p in learning]
        if asked == self._asked:
            return False
        params = [p for p in learning if local(p).numel()]
        if [id(p) for p in params] == [id(p) for p in self._params]:
            self._asked = asked
            return False
        if not self.broken:
            self._discard()
        left = {**self._left, **self.left_over()}
        total = sum(local(p).numel() * p.element_size() for p in params)
        first, each = bucket_bytes(self.exchange, total)
        buckets = bucketize(
            [params[::-1]],
            self.exchange.multiple(self._link.size),
            most_bytes=each,
            first_bytes=first,
            whole=self.exchange.whole,
        )
        channels = [self._open(bucket, left) for bucket in buckets]
        places = [_places(bucket) for bucket in buckets]
        # nothing is changed before it is known that all can be
        self._params, self.channels, self._left = params, channels, {}
        self._places, self._flats = places, []
        members = [[id(s.tensor) for s in bucket.segments] for bucket in buckets]
        self._counts = [len(set(m)) for m in members]
        self._homes: dict[int, list[int]] = {}
        for index, member in enumerate(members):
            for key in dict.fromkeys(member):
                self._homes.setdefault(key, []).append(index)
        self._forget(before - set(asked))
        self.listen()
        self._asked = asked
        return any(id(p) not in before for p in params)

    def listen(self) -> None:
        """Have the parameters tell when their gradients are there."""
        for p in self._params:
            if id(p) not in self._hooks:
                hook = p.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
                self._hooks[id(p)] = hook

    def left_over(self) -> dict[tuple[str, int], Tensor]:
        """What the exchange keeps for each parameter, by name and parameter, for whoever takes this
        one's place; as if no GradScaler had multiplied it."""
        found: dict[tuple[str, int], Tensor] = {}
        for channel in self.channels:
            state = channel.exchange_state
            if isinstance(self.exchange, Collect):
                self.exchange.collect(state, channel.region, self._link.size)
            for name, segment, values in _by_segment(channel.bucket, state):
                key = name, id(segment.tensor)
                if key not in found:
                    found[key] = values.new_zeros(local(segment.tensor).numel())
                found[key][segment.start : segment.stop] = values / self._scale_of(name)
        return found

    def _scale_of(self, name: str) -> float:
        """What this state is multiplied with: 1 where it is no gradient."""
        return self.scale if self._is_gradient(name) else 1.0

    def _is_gradient(self, name: str) -> bool:
        return self.exchange.slots[name] != "everywhere"

    def _open(self, bucket: Bucket, left: Mapping[tuple[str, int], Tensor]) -> Channel:
        exchange = self.exchange.shaped(bucket.shapes)
        region = exchange.region(self._link, bucket.length)
        channel = Channel(bucket, exchange, slice(0, bucket.length), region)
        if not exchange.slots:
            return channel
        zeros = torch.zeros(bucket.length, dtype=state_dtype(bucket.dtype), device=bucket.device)
        channel.exchange_state = state = exchange.init(zeros, channel.owned)
        for name, segment, values in _by_segment(bucket, state):
            if (name, id(segment.tensor)) in left:
                whole = left[name, id(segment.tensor)]
                values.copy_(whole[segment.start : segment.stop] * self._scale_of(name))
        return channel

    def _buckets(self) -> list[Bucket]:
        return [channel.bucket for channel in self.channels]

    def detach(self) -> None:
        """Take the hooks off."""
        self._forget(self._hooks.keys())

    def _forget(self, keys: Iterable[int]) -> None:
        for key in list(keys):
            self._hooks.pop(key).remove()

    @property
    def broken(self) -> bool:
        """Whether a backward pass ended with some of its buckets sent and others not."""
        return 0 < len(self._pending) < len(self.channels)

    # -- during backward ----

    def _begin(self, task: int) -> None:
        if self.broken:
            raise LinkError(
                f"{self._label}: a backward pass raised after a part of its gradients was sent (or "
                "another ran within it), so this rank cannot join the others any more: start again "
                f"from the last checkpoint; {REENTRANT}"
            )
        self._discard()
        self.refresh(keep=True)
        self._rescale()
        self._task = task
        self._missing = list(self._counts)
        self._seen = set()
        if not self._flats:
            self._flats = [_Flat(bucket) for bucket in self._buckets()]

    def _discard(self) -> None:
        """Wait for what a backward pass has sent that raised after it had sent everything: the room
        it is in is used again."""
        for pending in self._pending:
            pending.wait_quietly()
        self._pending = []

    def _arrived(self, p: Tensor) -> None:
        """A parameter's gradient is complete."""
        if not self._active():
            self._averaged = False  # what no_sync() adds is averaged with the next pass, or step
            return
        task = torch._C._current_graph_task_id()
        if self._task != task:
            self._begin(task)
            Variable._execution_engine.queue_callback(self._end)
        if id(p) in self._seen:
            raise RuntimeError(
                "a parameter's gradient arrived twice in one backward pass, after it may have been "
                f"sent: {REENTRANT}"
            )
        self._seen.add(id(p))
        for index in self._homes[id(p)]:
            self._missing[index] -= 1
        while len(self._pending) < len(self.channels) and not self._missing[len(self._pending)]:
            self._send()

    def _rescale(self) -> None:
        """What was not sent yet, to the scale of the gradients to come."""
        scale = 1.0 if self._host.scale is None else self._host.scale()
        if scale != self.scale:
            for channel in self.channels:
                for name, values in channel.exchange_state.items():
                    if self._is_gradient(name):
                        values.mul_(scale / self.scale)
            self.scale = scale

    @torch.no_grad()
    def _send(self) -> None:
        """The next bucket, in order."""
        channel, flat = self.channels[len(self._pending)], self._flats[len(self._pending)]
        flat.gather()
        if not self._pending:
            self._label, self._now = self._announce(), self._clock()
        now = replace(self._now, bucket=len(self._pending))
        job = partial(self._carry, channel.exchange, flat.whole, channel.exchange_state, now)
        self._pending.append(self._lane.submit(job, self._label))

    def _carry(self, exchange: Exchange, flat: Tensor, state: State, clock: Clock) -> None:
        """``flat`` <- the mean over the ranks, or what the update makes of it."""

        def combine(mean: Tensor) -> Tensor:
            return self._update.combine(mean, {}, clock)

        try:
            mean = exchange.run(self._link, flat, combine, clock, state).flat
        except NotFiniteError as error:
            if self._host.scale is None:
                self._host.nonfinite.report(error)
            mean = flat.fill_(math.nan)
        if mean is not flat:
            flat.copy_(mean)

    def _end(self) -> None:
        """The backward pass is over: send what is left, wait, and write the means back."""
        if torch._C._current_autograd_node() is not None:  # of the pass that began this one
            raise RuntimeError(
                f"a backward pass ran within another, and cannot be averaged by itself: {REENTRANT}"
            )
        self._task = None
        while len(self._pending) < len(self.channels):
            self._send()
        for pending in self._pending:
            pending.wait()
        self._pending = []
        self._write()
        self._averaged = True

    def before_step(self) -> None:
        """Average now, where no backward pass did: this rank had no gradient at all, all its
        backward passes were under ``no_sync()``, or parameters have joined after it."""
        before, params = {id(p) for p in self._params}, self._params
        # one frozen since its gradient came is averaged with the others
        joined = self.refresh(keep=self._active() and not self._averaged)
        if not (self._active() and self.channels) or (self._averaged and not joined):
            return
        if self._averaged and self.exchange.slots:
            self._average_dense([p for p in self._params if id(p) not in before], joined=True)
            self._average_dense(params, joined=False)
            return
        self._begin(-1)
        self._end()
        self.refresh()

    @torch.no_grad()
    def _average_dense(self, params: Sequence[Tensor], joined: bool) -> None:
        """Where some ``joined`` after the others were averaged. Once more as the others were, what
        was not sent of these would be sent twice; and left as they are, they may have been
        multiplied by what each rank made of the gradients of those that joined, as clipping does.
        """
        if not params:
            return
        label, clock = self._announce(), self._clock()
        had = torch.tensor([float(p.grad is not None) for p in params])
        had = had.to(self.channels[0].bucket.device)
        self._lane.call(partial(self._link.mean, had), label)
        used = [p for p, share in zip(params, had.tolist(), strict=True) if share > 0]
        for bucket in bucketize([used], self._link.size):
            flat = _Flat(bucket)
            flat.gather()
            again = partial(self._link.mean, flat.whole)
            first = partial(self._carry, Mean(), flat.whole, {}, clock)
            self._lane.call(first if joined else again, label)
            flat.scatter(set())

    def after_step(self, next_due: bool) -> None:
        """Forget the step's averaging; give back the room if the next step averages nothing."""
        self._averaged = False
        if not next_due:
            self._flats = []

    @torch.no_grad()
    def _write(self) -> None:
        """The means into ``.grad``; a parameter that no rank had a gradient for keeps None, so
        that the optimiser leaves it alone, as it would in one process."""
        unused = self._unused()
        for flat in self._flats:
            flat.scatter(unused)

    def _unused(self) -> set[int]:
        """Parameters without a gradient on any rank. All ranks see the same means, so all see
        the same parameters with a mean of nothing but zeros; only for those do they ask each
        other, which is seldom, and for frozen ones, of which something may have been left over."""
        alive: set[int] = set()
        for bucket, flat, places in zip(self._buckets(), self._flats, self._places, strict=True):
            seen = flat.whole[places].any(1).tolist()
            for segment, piece, some in zip(bucket.segments, flat.pieces, seen, strict=True):
                if some or bool(piece.any()):
                    alive.add(id(segment.tensor))
        doubtful = [p for p in self._params if id(p) not in alive or not p.requires_grad]
        if not doubtful:
            return set()
        had = torch.tensor([float(p.grad is not None) for p in doubtful])
        had = had.to(self._flats[0].whole.device)
        self._lane.call(partial(self._link.mean, had), self._label)
        return {id(p) for p, share in zip(doubtful, had.tolist(), strict=True) if share == 0}
