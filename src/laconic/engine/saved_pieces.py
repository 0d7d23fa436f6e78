"""State tensors from the pieces that ranks have saved of them.

A piece has an address: who has saved it, and where it begins in a bucket of this run. So a rank's
own state, that of all ranks, and that of another number of workers are restored by one function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from laconic.algorithms.round import AnyRound
from laconic.algorithms.update import Slot, State
from laconic.buckets import Bucket
from laconic.engine.channel import Channel

Saved = dict[str, Any]
States = Mapping[str, Any] | Sequence[Mapping[str, Any] | None]
"""What `Synchronizer.state_dict` has returned: a rank's own, or that of all ranks, by rank."""


class Runner(Protocol):
    """A running round, whose update and exchange may have state."""

    @property
    def round(self) -> AnyRound:
        """The round."""

    @property
    def channels(self) -> Sequence[Channel]:
        """One for each bucket."""


class Others(NamedTuple):
    """The saved parts are those of all workers: ``saved`` is the worker that saved each. This rank
    belongs to worker ``worker`` of ``workers``."""

    saved: Sequence[int]
    worker: int
    workers: int


Source = Others | None
"""Whose parts a rank loads: those of all ranks, combined; None: the only part is its own."""


class Piece(NamedTuple):
    """``values`` of a saved state tensor that begin at element ``start`` of a bucket of this run,
    which may be negative. ``worker``: who saved them."""

    worker: int
    start: int
    values: Tensor


def channel_states(runner: Runner) -> Saved:
    """The states of a round's channels, and where they begin."""
    channels = runner.channels
    return {
        "sizes": [c.bucket.numel for c in channels],
        "starts": [c.region.start for c in channels],
        "parts": [c.part.start for c in channels],
        "state": [{k: t.clone() for k, t in c.state.items()} for c in channels],
        "carried": [{k: t.clone() for k, t in c.exchange_state.items()} for c in channels],
    }


def load_channels(runner: Runner, parts: Sequence[Saved], source: Source) -> Callable[[], None]:
    """Return a function that loads results of `channel_states` from ``source``. Elements that no
    rank has saved stay as they are. Nothing changes before it is called. Raises ``ValueError`` if
    the parts do not fit the model."""
    for part in parts:
        check_sizes(part, runner, source)
    loaded = []
    for index, channel in enumerate(runner.channels):
        state, carried = (_state_of(runner, index, parts, source, k) for k in ("state", "carried"))
        if bad := [name for name, value in carried.items() if not bool(value.isfinite().all())]:
            raise ValueError(
                f"{bad[0]!r} is not finite: the state was saved after a round that failed "
                "halfway, and cannot be used; load an earlier one"
            )
        loaded.append((channel, state, carried))

    def load() -> None:
        for channel, state, carried in loaded:
            channel.state.clear()
            channel.state.update(state)
            channel.exchange_state.update(carried)

    return load


def check_sizes(saved: Saved, runner: Runner, source: Source) -> None:
    """Raise ``ValueError`` if ``saved`` has other elements than ``runner``. `Others` may have cut
    them into other buckets."""
    before, sizes = saved["sizes"], [channel.bucket.numel for channel in runner.channels]
    if before != sizes and (source is None or sum(before) != sum(sizes)):
        raise ValueError(
            f"the state was saved for other parameters: {sum(before)} elements in {len(before)} "
            f"buckets, and this run has {sum(sizes)} in {len(sizes)}"
        )


def _state_of(
    runner: Runner, index: int, parts: Sequence[Saved], source: Source, key: str
) -> State:
    """Bucket ``index`` of the update's "state", or of the exchange's, which is "carried"."""
    channel, of_update, found = runner.channels[index], key == "state", {}
    slots = runner.round.update.slots if of_update else runner.round.exchange.slots
    now = channel.state if of_update else channel.exchange_state
    first, _ = _buckets_at(runner, index, parts[0])[0]
    for name, t in parts[0][key][first].items():
        slot = slots.get(name, "owner")  # an outer optimizer names its own
        if slot == "owner" and t.dim():
            where, begins = channel.region, "starts"
        elif of_update:
            where, begins = slice(0, channel.bucket.length), ""
        else:
            where, begins = channel.part, "parts"
        pieces = _pieces_of(runner, index, parts, source, (key, name, begins))
        value = _restored(name, pieces, channel.bucket, where, now.get(name), slot, source)
        found[name] = value.to(channel.home(now) if value.dim() else "cpu", copy=True)
    return found


def _buckets_at(runner: Runner, index: int, saved: Saved) -> list[tuple[int, int]]:
    """The saved buckets that have elements of bucket ``index``, each with its start there."""
    before, sizes = saved["sizes"], [channel.bucket.numel for channel in runner.channels]
    if before == sizes:
        return [(index, 0)]
    start, stop = sum(sizes[:index]), sum(sizes[: index + 1])
    spans = pairwise(accumulate(before, initial=0))
    return [(k, a - start) for k, (a, b) in enumerate(spans) if a < stop and b > start]


def _pieces_of(
    runner: Runner, index: int, parts: Sequence[Saved], source: Source, keys: tuple[str, str, str]
) -> list[Piece]:
    """What ``parts`` have of a state tensor of bucket ``index``. ``keys``: that of the states, the
    tensor's name, and the key of where the tensor begins in a saved bucket. Without that, it begins
    at 0, and all ranks of a worker have the same."""
    key, name, begins = keys
    if source is None:
        return [Piece(0, 0, parts[0][key][index][name])]
    found: list[Piece] = []
    buckets = _buckets_at(runner, index, parts[0])  # all ranks have the same
    for worker, part in zip(source.saved, parts, strict=True):
        if not begins and any(piece.worker == worker for piece in found):
            continue
        for k, start in buckets:
            values, within = part[key][k][name], part[begins][k] if begins else 0
            if values.dim() == 1:  # without the padding
                values = values[: max(part["sizes"][k] - within, 0)]
            found.append(Piece(worker, start + within, values))
    return found


def wide(x: Tensor) -> Tensor:
    """A copy of ``x`` in float64, or complex128, to take means of."""
    return x.to(torch.promote_types(x.dtype, torch.float64), copy=True)


def difference(x: Tensor, mean: Tensor) -> Tensor:
    """``x - mean``; 0 where they are equal, also where both are infinite, as in masks."""
    return (x - mean).masked_fill_(x == mean, 0.0)


def _mean_of_pieces(
    bucket: Bucket, pieces: Iterable[Piece], where: slice, default: Tensor
) -> Tensor:
    """Elements ``where`` of a bucket: the mean of the pieces that have them, exact if these are
    equal; ``default`` for those in no piece."""
    mean = wide(torch.zeros(bucket.length, dtype=default.dtype))
    count = torch.zeros(bucket.length)
    for _, start, values in pieces:
        first = max(start, 0)
        at = slice(first, max(min(start + values.numel(), bucket.numel), first))
        count[at] += 1
        new = values[at.start - start : at.stop - start].cpu()
        mean[at] += difference(new, mean[at]) / count[at]
    return torch.where(count[where] > 0, mean[where].to(default.dtype), default.cpu())


def _restored(
    name: str,
    pieces: Sequence[Piece],
    bucket: Bucket,
    where: slice,
    now: Tensor | None,
    slot: Slot,
    source: Source,
) -> Tensor:
    """Elements ``where`` of the state tensor ``name`` in ``slot``, from saved pieces; as ``now``
    where there are none.

    The mean of the pieces. A worker that has saved a pooled tensor keeps its own, plus what the
    mean over those that stay lacks of the mean over all: so the mean over workers is unchanged.
    A tensor with a size of its own is the same everywhere.
    """
    first = value = pieces[0].values
    if source is not None and first.dim() == 0:
        values = torch.stack([wide(piece.values) for piece in pieces])
        return first + (values - first).mean().to(first.dtype)
    if source is not None and first.dim() == 1:
        if now is None:  # an outer optimizer makes its state in its first step
            now = first.new_zeros(where.stop - where.start)
        value = _mean_of_pieces(bucket, pieces, where, now)
        own = [piece for piece in pieces if piece.worker == source.worker]
        if slot == "pooled" and own:
            staying = [piece for piece in pieces if piece.worker < source.workers]
            lacking = value - _mean_of_pieces(bucket, staying, where, value)
            value = _mean_of_pieces(bucket, own, where, value - lacking) + lacking
    expected = now.shape if first.dim() > 1 and now is not None else (where.stop - where.start,)
    if first.dim() and value.shape != expected:
        raise ValueError(f"{name!r} has {value.numel()} elements, not {math.prod(expected)}")
    return value
