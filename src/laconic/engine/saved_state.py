"""A synchronizer's state as plain data, and back.

State is shared by all workers, divided into one slice per owner, or private to a worker. Each rank
saves its own part, and loads it. A run with other ranks loads the parts of all, and divides them
again.

A piece of state has an address: the worker that has saved it, and its range among the elements of
its round, which are in the same order however they are cut into buckets and slices. What a rank
loads of others' state is the intersection of its own ranges with theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from laconic.algorithms.exchange import Arrival
from laconic.algorithms.update import Slot, State
from laconic.engine.channel import ByGroup, Channel, HostState
from laconic.engine.comparison import digest
from laconic.engine.gradient_rounds import GradientRunner
from laconic.engine.messages import InFlightBucket, InFlightRound
from laconic.engine.parameter_rounds import ParameterRunner
from laconic.engine.session import Sets
from laconic.links.comm_thread import Pending
from laconic.tensors import local
from laconic.tensors import parts as plain_parts

VERSION = 6
WRAPPER = "SlowMoDistributedDataParallel("
"""Begins the text of a recipe that a wrapped module has, and cannot switch."""


@runtime_checkable
class Stateful(Protocol):
    """An object with state to save: a scheduler, a GradScaler, a sampler, another module."""

    def state_dict(self) -> Any:
        """Return the state as plain data."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load the state."""


def checksum(tensors: Iterable[Tensor]) -> int:
    """A number from 1 on that differs if any bit of ``tensors`` differs (except for rare
    collisions), on whatever device they are."""
    return digest(part.cpu() for t in tensors for part in plain_parts(local(t)).values())


def check(saved: Saved, here: Saved, *, own: bool) -> None:
    """Raise ``ValueError`` unless the state ``saved`` fits this rank, with the `header` ``here``:
    as its ``own``, which it loads unchanged, or as one of those that it combines."""
    if saved["version"] != VERSION:
        raise ValueError(
            f"the state has version {saved['version']}, not {VERSION}: load it with the version of "
            "laconic that saved it"
        )
    same = all(saved[key] == here[key] for key in ("ranks", "workers"))
    # options of auto() are those of later choices: the recipe in force is saved, too
    alike = all(header["recipe"].startswith("auto(") for header in (saved, here))
    compared = {"recipe": not alike, "options": True, "group_size": same}
    for key in (key for key, counts in compared.items() if counts and saved[key] != here[key]):
        raise ValueError(_another_recipe(saved, here, key))
    if not own:
        return
    if not same or saved["rank"] != here["rank"]:
        ours, theirs = (
            f"rank {each['rank']} of {each['ranks']} in {each['workers']} workers"
            for each in (here, saved)
        )
        raise ValueError(
            f"this is {ours}, and the state is that of {theirs}: each rank saves and loads its "
            "own. Use laconic.save and laconic.load to go on with other ranks"
        )
    if saved["parameters"] != here["parameters"]:
        raise ValueError(
            "the model's parameters differ from those saved with this state: call laconic.attach "
            "first, then load the model that this rank saved, then call sync.load_state_dict"
        )


def _another_recipe(saved: Saved, here: Saved, key: str) -> str:
    """The error message for a state that differs in ``key``."""
    shown = "text" if key == "recipe" and saved["text"] != here["text"] else key
    label = "" if key == "recipe" else f"{key}: "
    remedy = "attach the saved recipe with the same options, load, then call sync.switch(...)"
    if here["text"].startswith(WRAPPER):
        remedy = "make the module with the saved settings, and load again"
    return (
        f"the state was saved under {label}{saved[shown]}, and this run follows "
        f"{label}{here[shown]} (arguments at their defaults are left out): {remedy}"
    )


Saved = Mapping[str, Any]
"""What `Synchronizer.state_dict` has returned, or a part of it."""
Runner = ParameterRunner | GradientRunner


def round_state(running: ParameterRunner) -> Saved:
    """The state of ``running``. Waits for its rounds in flight; sends nothing."""
    # first: arrivals may change the state
    flights = [_flight_state(running, f) for f in running.in_flight]
    return {
        **channel_states(running),
        "executed": running.executed,
        "flights": flights,
    }


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


def _flight_state(running: ParameterRunner, flight: InFlightRound) -> Saved:
    sent, buckets = set[int](), []
    for channel, y, pending in flight.buckets():
        arrival = pending.wait()
        sent.update(id(s.tensor) for s in channel.bucket.segments)
        buckets.append(
            {
                "size": channel.bucket.numel,
                "sent": None if y is None else y.clone(),
                "received": arrival.flat.clone(),
                "weight": arrival.weight,
                "workers": None if arrival.present is None else arrival.present[0],
            }
        )
    return {
        "due": flight.due,
        "names": [[k for k, t in group.items() if id(t) in sent] for group in flight.copies],
        "buckets": buckets,
    }


def loaded(
    running: ParameterRunner,
    parts: Sequence[Saved],
    joined: Sequence[Sequence[Tensor]],
    workers: Sequence[int] | None,
    links: Sets | None = None,
) -> ParameterRunner:
    """Return a runner like ``running``, which may be on the rank of another run (``links``: see
    `ParameterRunner.fresh`), with the results ``parts`` of `round_state`: its own, or, with the
    ``workers`` that have saved them, others'. Those are at rest (`laconic.engine.loading`), and
    this rank already has their x, from which lost state starts. Raises ``ValueError`` if the parts
    do not fit the model."""
    own, new = parts[0], running.fresh(joined, links)
    if not new.set.vary:
        for state, values in loaded_states(new, parts, workers):
            state.update(values)
    new.executed = int(own["executed"])
    first = new.executed - len(own["flights"])
    new.in_flight = [_load_flight(new, f, first + k) for k, f in enumerate(own["flights"])]
    return new


def _load_flight(running: ParameterRunner, saved: Saved, executed: int) -> InFlightRound:
    channels: Sequence[Channel] = running.channels
    copies: ByGroup = ()
    if running.set.vary:
        copies = running.set.copies()
        groups = zip(copies, saved["names"], strict=False)
        channels = running.set.cut([[g[k] for k in own if k in g] for g, own in groups])
    sizes = [channel.bucket.numel for channel in channels]
    before = [bucket["size"] for bucket in saved["buckets"]]
    # groups added since sent nothing
    if before != (sizes if running.set.vary else sizes[: len(before)]):
        raise ValueError(
            "the state was saved with a round in flight, and its tensors are not those of this "
            "run: load the model and the optimizer first, or save after sync.finish()"
        )
    buckets = []
    for channel, own in zip(channels, saved["buckets"], strict=False):
        device, y, n = channel.bucket.device, own["sent"], own["workers"]
        y = None if y is None else y.to(device, copy=True)
        present = None if n is None else (n, running.present[1])
        arrived = Arrival(own["received"].to(device, copy=True), own["weight"], present=present)
        buckets.append(InFlightBucket(channel, y, Pending.of(arrived)))
    return InFlightRound(saved["due"], executed, lambda: buckets, copies)


def loaded_states(
    runner: Runner, parts: Sequence[Saved], workers: Sequence[int] | None
) -> Iterator[tuple[State, State]]:
    """Each state of ``runner``'s channels, with what it becomes by the results ``parts`` of
    `channel_states`; ``workers``: see `loaded`. Elements that no rank has saved stay as they are.
    Changes nothing. Raises ``ValueError`` if the parts do not fit the model."""
    sizes = [channel.bucket.numel for channel in runner.channels]
    for before in (part["sizes"] for part in parts):
        if before != sizes and (workers is None or sum(before) != sum(sizes)):
            raise ValueError(
                f"the state was saved for other parameters: {sum(before)} elements in "
                f"{len(before)} buckets, and this run has {sum(sizes)} in {len(sizes)}"
            )
    for index, channel in enumerate(runner.channels):
        start = sum(sizes[:index])
        for place in _places(runner, channel):
            found = parts[0][place.key][index]
            if workers is not None:
                found = _of_others(place, range(start, start + sizes[index]), parts, workers)
            for name, value in found.items():
                if value.dim() and value.shape != (shape := place.shape(name)):
                    raise ValueError(f"{name!r} has {value.numel()} elements, not {shape.numel()}")
            # where the tensors are between rounds
            home = "cpu" if isinstance(place.state, HostState) else channel.bucket.device
            values = {k: t.to(home if t.dim() else "cpu", copy=True) for k, t in found.items()}
            yield place.state, values


class _Place(NamedTuple):
    """Where the tensors of one of a channel's states are: of the update's, under the ``key``
    "state", or of the exchange's, which is "carried". ``owned``: the elements of the bucket that
    the tensors in the slot "owner" are about; ``whole``: those of all others."""

    key: str
    state: State
    slots: Mapping[str, Slot]
    owned: slice
    whole: slice

    def is_owned(self, name: str) -> bool:
        return self.slots.get(name, "owner") == "owner"  # an outer optimizer names its own

    def where(self, name: str) -> slice:
        return self.owned if self.is_owned(name) else self.whole

    def saved_at(self, name: str, part: Saved, bucket: int) -> int:
        """Where the tensor began in a bucket of the run that has saved ``part``."""
        if self.is_owned(name):
            return int(part["starts"][bucket])
        return int(part["parts"][bucket]) if self.key == "carried" else 0

    def shape(self, name: str) -> torch.Size:
        """The shape that the tensor must have, unless it is a number. It may not be made yet: an
        outer optimizer makes its state in its first step."""
        made, where = self.state.get(name, torch.tensor(0)), self.where(name)
        return made.shape or torch.Size([where.stop - where.start])


def _places(runner: Runner, channel: Channel) -> Iterator[_Place]:
    whole, r = slice(0, channel.bucket.length), runner.round
    yield _Place("state", channel.state, r.update.slots, channel.region, whole)
    at = channel.region, channel.part
    yield _Place("carried", channel.exchange_state, r.exchange.slots, *at)


Pieces = Mapping[tuple[int, int], Tensor]
"""Values of a state tensor by the worker that has saved them, and where they begin in a bucket of
this run, perhaps before it: flat and without padding, or a number, or of a size of its own."""


def _of_others(place: _Place, at: range, parts: Sequence[Saved], workers: Sequence[int]) -> State:
    """A state of the bucket with the elements ``at`` of its round, from the ``parts`` of other
    ``workers``. Of ranks of one worker that have the same elements, the first counts."""
    found: dict[str, dict[tuple[int, int], Tensor]] = {}
    for worker, part in zip(workers, parts, strict=True):
        for k, (first, last) in enumerate(pairwise(accumulate(part["sizes"], initial=0))):
            if first >= at.stop or last <= at.start:
                continue
            for name, values in part[place.key][k].items():
                start = first + place.saved_at(name, part, k)
                own = values[: max(last - start, 0)] if values.dim() == 1 else values
                found.setdefault(name, {}).setdefault((worker, start - at.start), own)
    return {name: _combined(name, pieces, place, len(at)) for name, pieces in found.items()}


def _combined(name: str, pieces: Pieces, place: _Place, numel: int) -> Tensor:
    """The state tensor ``name`` of a bucket of ``numel`` elements: the mean of the ``pieces``, and
    as it is where there are none. A tensor with a size of its own is the same everywhere."""
    first, where = next(iter(pieces.values())), place.where(name)
    if first.dim() == 0:
        values = torch.stack([wide(value) for value in pieces.values()])
        return first + (values - first).mean().to(first.dtype)
    if first.dim() > 1:
        return first
    # an outer optimizer makes its state in its first step
    now = place.state.get(name, first.new_zeros(where.stop - where.start)).cpu()
    return _mean(pieces, range(where.start, max(min(where.stop, numel), where.start)), now)


def _mean(pieces: Pieces, at: range, default: Tensor) -> Tensor:
    """The elements ``at`` of a bucket: the mean of the pieces that have them, exact if these are
    equal; ``default`` for those in no piece, and for the padding behind them."""
    mean, count = wide(torch.zeros_like(default)), torch.zeros(len(default))
    for (_, start), values in pieces.items():
        first = max(start, at.start)
        last = max(min(start + len(values), at.stop), first)
        here = slice(first - at.start, last - at.start)
        count[here] += 1
        new = values[first - start : last - start].cpu()
        mean[here] += difference(new, mean[here]) / count[here]
    return torch.where(count > 0, mean.to(default.dtype), default)


def wide(x: Tensor) -> Tensor:
    """A copy of ``x`` in float64, or complex128, to take means of."""
    return x.to(torch.promote_types(x.dtype, torch.float64), copy=True)


def difference(x: Tensor, mean: Tensor) -> Tensor:
    """``x - mean``; 0 where they are equal, also where both are infinite, as in masks."""
    return (x - mean).masked_fill_(x == mean, 0.0)
