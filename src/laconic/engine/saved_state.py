"""A synchronizer's state as plain data, and back.

State is shared by all workers, divided into one slice per owner, or private to a worker. Each rank
saves its own part. A run with another number of workers loads the parts of all ranks, and divides
them again.

A piece of state has an address: who has saved it, and where it begins in a bucket of this run. So a
rank's own state, that of all ranks, and that of another number of workers are restored by one
function.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from laconic.algorithms.exchange import Arrival
from laconic.algorithms.round import AnyRound
from laconic.algorithms.update import Slot, State
from laconic.buckets import Bucket
from laconic.engine.channel import ByGroup, Channel
from laconic.engine.messages import Difference, InFlightBucket, InFlightRound
from laconic.engine.parameter_rounds import ParameterRunner
from laconic.links.comm_thread import Pending
from laconic.tensors import as_bytes, local
from laconic.tensors import parts as plain_parts

VERSION = 5
WRAPPER = "SlowMoDistributedDataParallel("
"""Begins the text of a recipe that a wrapped module has, and cannot switch."""
_CHUNK = 2**20


@runtime_checkable
class Stateful(Protocol):
    """An object with state to save: a scheduler, a GradScaler, a sampler, another module."""

    def state_dict(self) -> Any:
        """Return the state as plain data."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load the state."""


def checksum(tensors: Sequence[Tensor]) -> int:
    """A number that differs if any bit of ``tensors`` differs (except for rare collisions)."""
    total = 0
    for index, tensor in enumerate(tensors, 1):
        for part in plain_parts(local(tensor)).values():
            data = as_bytes(part).contiguous().reshape(-1)
            for number, chunk in enumerate(torch.split(data, _CHUNK), 1):
                weights = torch.arange(1, len(chunk) + 1, device=chunk.device) % 65521
                total += index * number * int((chunk * weights).sum())
    return total % 2**61


def own_part(parts: Mapping[int, Saved], here: Saved, *, regroup: bool) -> int | None:
    """Return the key (the saved rank) of the part that this rank, with `header` ``here``, loads
    unchanged. None if it combines all ``parts`` (`laconic.engine.loading`): the number of ranks or
    workers has changed, parts are lost, or the ranks have decided to ``regroup``. Raises
    ``ValueError`` if the parts do not fit this run."""
    first = parts[min(parts)]
    if first["version"] != VERSION:
        raise ValueError(
            f"the state has version {first['version']}, not {VERSION}: load it with the version of "
            "laconic that saved it"
        )
    same = all(first[key] == here[key] for key in ("ranks", "workers"))
    # options of auto() are those of later choices: the recipe in force is saved, too
    alike = all(header["recipe"].startswith("auto(") for header in (first, here))
    keys = ["options"] if alike else ["options", "recipe"]
    keys += ["group_size"] if same else []
    if any(first[key] != here[key] for key in keys):
        raise ValueError(_another_recipe(first, here, keys))
    for rank, part in parts.items():
        if part["rank"] != rank or any(
            part[key] != first[key]
            for key in ("version", "recipe", "options", "ranks", "workers", "step")
            if key != "step" or part["quorum"] is None  # then workers take different ones
        ):
            raise ValueError(
                f"the states must be those of all {first['ranks']} ranks of one run at one step, "
                f"by rank: number {rank} is of rank {part['rank']} after {part['step']} steps"
            )
    mine = int(here["rank"])
    only_mine = len(parts) == 1 and mine in parts
    if regroup or not same or not (only_mine or len(parts) == first["ranks"]):
        return None
    if parts[mine]["parameters"] != here["parameters"]:
        raise ValueError(
            "the model's parameters differ from those saved with this state: call laconic.attach "
            "first, then load the model that this rank saved, then call sync.load_state_dict"
        )
    return mine


def parts_of(state: States, here: Saved) -> dict[int, Saved]:
    """The user's ``state`` by the rank that saved it: one rank's own state, or a list of all ranks'
    states, with None for lost ones."""
    states = [state] if isinstance(state, Mapping) else list(state)
    parts = {rank: dict(part) for rank, part in enumerate(states) if part is not None}
    if not parts:
        raise ValueError(
            "there is no state in the list: pass all ranks' states, None for lost ones"
        )
    first = parts[min(parts)]
    if len(states) == first["ranks"]:
        return parts
    ranks, workers = first["ranks"], first["workers"]
    if len(states) != 1 or (ranks, workers) != (here["ranks"], here["workers"]):
        raise ValueError(
            f"the state was saved by {ranks} ranks in {workers} workers, and there are "
            f"{here['ranks']} in {here['workers']} now: pass the list of all ranks' states, by "
            "rank, with None for lost ones"
        )
    if first["rank"] != here["rank"]:
        raise ValueError(
            f"this is rank {here['rank']}, and the state is rank {first['rank']}'s: each rank "
            "saves and loads its own"
        )
    return {int(first["rank"]): first}


def digest(parts: Mapping[int, Saved]) -> int:
    """A number that differs for different sets of saved states."""
    text = repr([(rank, part["step"], part["parameters"]) for rank, part in sorted(parts.items())])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _another_recipe(saved: Saved, here: Saved, keys: Sequence[str]) -> str:
    """The error message for a state that differs in one of ``keys``."""
    if "recipe" not in keys or saved["recipe"] == here["recipe"]:
        before, now = (f"{s['options']}, group_size={s['group_size']}" for s in (saved, here))
        return (
            f"the state was saved by a run with {before}, and this run has {now}: use the same "
            "options, and load again"
        )
    name, name_now = saved["text"], here["text"]
    if name == name_now:
        return (
            f"the state was saved by another recipe with the same text, {name}: its rounds were "
            f"{saved['recipe']}, and in this run they are {here['recipe']}"
        )
    texts = f"the state was saved under {name}, and this run follows {name_now}"
    if name_now.startswith(WRAPPER):
        return f"{texts}: make the module with the saved settings, and load again"
    return (
        f"{texts} (arguments at their defaults are left out): attach the saved recipe, load, then "
        "call sync.switch(...)"
    )


def round_state(running: ParameterRunner) -> Saved:
    """The state of ``running``. Waits for its rounds in flight; sends nothing."""
    flights = [
        _flight_state(running, f) for f in running.in_flight
    ]  # first: arrivals may change the state
    return {
        **channel_states(running),
        "joined": running.set.positions,
        "executed": running.executed,
        "digest": running.x_digest,
        "flights": flights,
    }


def _flight_state(running: ParameterRunner, flight: InFlightRound) -> Saved:
    arrivals, apart = [b.pending.wait() for b in flight.buckets], flight.apart.wait()
    groups = [flight.copies.get(key, {}) for key in running.set.varying()] if flight.copies else []
    sent = {id(s.tensor) for b in flight.buckets for s in b.channel.bucket.segments}
    return {
        "due": flight.due,
        "names": [[k for k, t in group.items() if id(t) in sent] for group in groups],
        "sizes": [b.channel.bucket.numel for b in flight.buckets],
        "sent": [None if b.sent is None else b.sent.clone() for b in flight.buckets],
        "received": [arrival.flat.clone() for arrival in arrivals],
        "weights": [arrival.weight for arrival in arrivals],
        "workers": [None if a.present is None else a.present[0] for a in arrivals],
        "apart": None if apart is None else tuple(apart),
    }


def load_round(
    running: ParameterRunner, parts: Sequence[Saved], source: Source
) -> Callable[[], None]:
    """Return a function that loads results of `round_state` from ``source``. Those of `Others` are
    at rest (`laconic.engine.loading`), and this rank already has their x. Nothing changes before
    it is called.

    Raises ``ValueError`` if the parts do not fit the model.
    """
    own, target = parts[0], running
    assert source is None or not any(part["flights"] for part in parts), "they are at rest"
    load_states = None
    if not running.set.vary:
        if source is not None or own["joined"] != running.set.positions:
            running = running.fresh(own["joined"])  # begins at this x: lost state starts from it
        load_states = load_channels(running, parts, source)
    executed = int(own["executed"])
    first = executed - len(own["flights"])
    flights = [_load_flight(running, f, first + k) for k, f in enumerate(own["flights"])]

    def load() -> None:
        if load_states is not None:
            load_states()
        running.executed, running.in_flight = executed, flights
        running.x_digest = own["digest"] if source is None else 0
        target.become(running)

    return load


def _load_flight(running: ParameterRunner, saved: Saved, executed: int) -> InFlightRound:
    channels, copies = running.channels, ByGroup()
    if running.set.vary:
        copies = running.set.copies()
        groups = zip(copies.values(), saved["names"], strict=False)
        sent = [[group[k] for k in own if k in group] for group, own in groups]
        channels = running.set.cut(sent)
    sizes = [channel.bucket.numel for channel in channels]
    fewer = not running.set.vary and saved["sizes"] == sizes[: len(saved["sizes"])]
    if saved["sizes"] != sizes and not fewer:  # groups added since sent nothing
        raise ValueError(
            "the state was saved with a round in flight, and its tensors are not those of this "
            "run: load the model and the optimizer first, or save after sync.finish()"
        )
    buckets = []
    each = zip(saved["sent"], saved["received"], saved["weights"], saved["workers"], strict=True)
    for channel, (sent, flat, weight, n) in zip(channels, each, strict=False):
        device = channel.bucket.device
        present = None if n is None else (n, running.present[1])
        arrived = Arrival(flat.to(device, copy=True), weight, present=present)
        y = None if sent is None else sent.to(device, copy=True)
        buckets.append(InFlightBucket(channel, y, Pending.of(arrived)))
    flight = InFlightRound(saved["due"], executed, Pending.of(buckets), copies)
    if saved["apart"] is not None:
        flight.apart = Pending.of(Difference(*saved["apart"]))
    return flight


Saved = dict[str, Any]
States = Mapping[Any, Any] | Sequence[Mapping[str, Any] | None]
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
