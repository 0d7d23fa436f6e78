"""State of a synchroniser as plain data, and back.

Three kinds of state: what all workers share, what is cut into one slice per owner, and what is
this worker's own. Each rank saves its own part; a run with another number of workers is given
the parts of all ranks and cuts them anew.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from laconic.algorithms.exchange import Arrival, Exchange
from laconic.algorithms.update import State
from laconic.buckets import Bucket, local
from laconic.engine.channel import Channel, is_owned
from laconic.engine.parameter_rounds import InFlightBucket, InFlightRound, ParameterRunner
from laconic.links.comm_thread import Pending

VERSION = 3
WRAPPER = "SlowMoDistributedDataParallel("
"""How the text of a recipe begins that belongs to a module which cannot change it."""
Saved = dict[str, Any]


_CHUNK = 2**20


def checksum(tensors: Sequence[Tensor]) -> int:
    """A number that tells apart parameters that differ in any bit (but for rare accidents)."""
    total = 0
    for index, tensor in enumerate(tensors, 1):
        data = local(tensor).contiguous().reshape(-1).view(torch.uint8)
        for place, chunk in enumerate(torch.split(data, _CHUNK), 1):
            weights = torch.arange(1, len(chunk) + 1, device=chunk.device) % 65521
            total += index * place * int((chunk * weights).sum())
    return total % 2**61


def header(
    recipe: str, text: str, ranks: int, workers: int, rank: int, params: Sequence[Tensor]
) -> Saved:
    """What tells whether a saved state belongs to this recipe, this rank and these parameters.
    ``recipe`` is compared, rounds and options in full; ``text`` is what messages call it."""
    return {
        "version": VERSION,
        "recipe": recipe,
        "text": text,
        "ranks": ranks,
        "workers": workers,
        "rank": rank,
        "parameters": checksum(params),
    }


def own_part(parts: Mapping[int, Saved], here: Saved, *, regroup: bool) -> int | None:
    """Which of ``parts``, by the rank that saved it, this rank, whose `header` is ``here``, takes
    as it is. None where it goes on from all of them (`regroup`): there are other ranks or
    workers now, some parts are lost, or the ranks have decided to ``regroup``. Raises
    ``ValueError`` where the parts do not belong here."""
    first = parts[min(parts)]
    if first["version"] != VERSION:
        raise ValueError(f"the state has version {first['version']}, not {VERSION}")
    same = all(first[key] == here[key] for key in ("ranks", "workers"))
    saved, now = first["recipe"], here["recipe"]
    if not same:
        saved, now = without_group_size(saved), without_group_size(now)
    if saved != now:
        raise ValueError(_of_another_recipe(first, here))
    for rank, part in parts.items():
        if part["rank"] != rank or any(
            part[key] != first[key] for key in ("version", "recipe", "ranks", "workers", "step")
        ):
            raise ValueError(
                f"the states are not those of all {first['ranks']} ranks of one run at one step, "
                f"by rank: number {rank} is of rank {part['rank']} after {part['step']} steps"
            )
    mine = int(here["rank"])
    alone = same and len(parts) == 1 and mine in parts
    if regroup or (not alone and not (same and len(parts) == first["ranks"])):
        return None
    if parts[mine]["parameters"] != here["parameters"]:
        raise ValueError(
            "the model's parameters are not those that were saved with this state: load the "
            "model saved by this rank, after laconic.attach and before sync.load_state_dict"
        )
    return mine


def parts_of(
    state: Mapping[str, Any] | Sequence[Mapping[str, Any] | None], here: Saved
) -> dict[int, Saved]:
    """What a user passes as a state, by the rank that saved it: one rank's own, or a list of all
    ranks', with None for those that are lost."""
    parts = [state] if isinstance(state, Mapping) else list(state)
    given = {rank: dict(part) for rank, part in enumerate(parts) if part is not None}
    if not given:
        raise ValueError("there is no state in the list")
    first = given[min(given)]
    if len(parts) == first["ranks"]:
        return given
    ranks, workers = first["ranks"], first["workers"]
    if len(parts) != 1 or (ranks, workers) != (here["ranks"], here["workers"]):
        raise ValueError(
            f"the state was saved by {ranks} ranks in {workers} workers, and there are "
            f"{here['ranks']} in {here['workers']} now: pass the list of all ranks' states, by "
            "rank, with None for those that are lost"
        )
    if first["rank"] != here["rank"]:
        raise ValueError(
            f"this is rank {here['rank']}, and the state is rank {first['rank']}'s: each rank "
            "saves and loads its own"
        )
    return {int(first["rank"]): first}


def digest(parts: Mapping[int, Saved]) -> int:
    """A number that tells apart sets of saved states."""
    text = repr([(rank, part["step"], part["parameters"]) for rank, part in sorted(parts.items())])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


_GROUP_SIZE = re.compile(r", group_size=(\d+)$")


def without_group_size(recipe: str) -> str:
    """The text of a recipe but for the size of groups, which another number of workers changes."""
    return _GROUP_SIZE.sub("", recipe)


def group_size_of(recipe: str) -> int:
    """The size of groups in the text of a recipe; 0: there are none."""
    found = _GROUP_SIZE.search(recipe)
    return int(found[1]) if found else 0


def _of_another_recipe(saved: Mapping[str, Any], here: Saved) -> str:
    """What tells a user who resumes under another recipe, or other options, what to do."""
    rounds, options = _split(saved["recipe"])
    rounds_now, options_now = _split(here["recipe"])
    # a state of a version that saved no text has its rounds alone
    name, name_now = saved.get("text", rounds), here["text"]
    if rounds == rounds_now:
        return (
            f"the state was saved by a run with {options}, and this run has {options_now}: take "
            "the same options, and load again"
        )
    if name == name_now:
        return (
            f"the state was saved under another recipe that was written {name}, too: its rounds "
            f"were {rounds}, and in this run they are {rounds_now}"
        )
    remedy = "attach the saved recipe, load, then call sync.switch(...)"
    if name_now.startswith(WRAPPER):
        remedy = "make the module with the saved settings, and load again"
    return f"the state was saved under {name}, and this run follows {name_now}: {remedy}"


def _split(recipe: str) -> tuple[str, str]:
    """Of a header's ``recipe``, the rounds, and the options of `laconic.attach` at its end."""
    rounds, found, options = recipe.rpartition(", buffers=")
    return (rounds, f"buffers={options}") if found else (recipe, "other options")


def round_state(running: ParameterRunner) -> Saved:
    """What ``running`` needs to go on: waits for what is in flight, sends nothing."""
    flights = [_flight_state(f) for f in running.in_flight]  # first: arriving may change the state
    return {
        **exchange_state(running),
        "joined": list(running.joined),
        "executed": running.executed,
        "state": [{k: t.clone() for k, t in c.state.items()} for c in running.channels],
        "flights": flights,
    }


class Runner(Protocol):
    """A round at work, whose exchange may keep state."""

    channels: list[Channel]

    @property
    def exchange(self) -> Exchange:
        """With whom messages are exchanged."""


def exchange_state(runner: Runner) -> Saved:
    """What a round's exchange keeps, and where in its buckets."""
    channels = runner.channels
    return {
        "sizes": [c.bucket.numel for c in channels],
        "starts": [c.region.start for c in channels],
        "parts": [c.part.start for c in channels],
        "carried": [{k: t.clone() for k, t in c.exchange_state.items()} for c in channels],
    }


def load_exchange_state(
    runner: Runner, parts: Sequence[Saved], mine: int | None
) -> Callable[[], None]:
    """Return what restores the exchange's state that `exchange_state` returned on every rank, or
    here, as `load_round` does. What no rank kept stays as ``runner`` has it."""
    slots = runner.exchange.slots
    sizes = [channel.bucket.numel for channel in runner.channels]
    if slots and any(part["sizes"] != sizes for part in parts):
        raise ValueError("the state was saved for other parameters: their sizes differ")
    states: list[State] = []
    for index, channel in enumerate(runner.channels):
        loaded = {}
        for name, now in channel.exchange_state.items():
            if mine is not None or now.dim() > 1:  # of its own size: alike on all ranks
                value = parts[mine or 0]["carried"][index][name]
                if value.shape != now.shape:
                    raise ValueError(f"{name!r} has {value.numel()} elements, not {now.numel()}")
            else:
                owned = slots[name] == "owner"
                place = channel.region if owned else channel.part
                starts = [part["starts" if owned else "parts"][index] for part in parts]
                pieces = [part["carried"][index][name] for part in parts]
                value = _mean_of_pieces(
                    channel.bucket, zip(starts, pieces, strict=True), place, now
                )
            if not bool(value.isfinite().all()):
                raise ValueError(
                    f"{name!r} is not finite: the state was saved after a round that ended "
                    "half-way, and cannot be gone on with; load an earlier one"
                )
            loaded[name] = value.to(channel.bucket.device, copy=True)
        states.append(loaded)

    def put_back() -> None:
        for channel, loaded in zip(runner.channels, states, strict=True):
            channel.exchange_state.update(loaded)

    return put_back


def _mean_of_pieces(
    bucket: Bucket, pieces: Iterable[tuple[int, Tensor]], place: slice, start: Tensor
) -> Tensor:
    """Stretch ``place`` of a bucket's tensor from the (start, piece) that ranks kept of it; where
    several kept the same stretch their mean, which is exact where they agree; where none did,
    what is in ``start``."""
    mean = torch.zeros(bucket.length, dtype=torch.float64)
    count = torch.zeros(bucket.length)
    for begin, piece in pieces:
        at = slice(begin, max(min(begin + piece.numel(), bucket.numel), begin))
        count[at] += 1
        mean[at] += (piece[: at.stop - begin].cpu() - mean[at]) / count[at]
    return torch.where(count[place] > 0, mean[place].to(start.dtype), start.cpu())


def _flight_state(flight: InFlightRound) -> Saved:
    arrivals = [m.pending.wait() for m in flight.buckets]
    return {
        "due": flight.due,
        "sizes": [m.channel.bucket.numel for m in flight.buckets],
        "sent": [None if m.sent is None else m.sent.clone() for m in flight.buckets],
        "received": [arrival.flat.clone() for arrival in arrivals],
        "weights": [arrival.weight for arrival in arrivals],
    }


def load_round(
    running: ParameterRunner, parts: Sequence[Saved], mine: int | None
) -> Callable[[], None]:
    """What puts back what `round_state` returned here, ``parts[mine]``; or, with None, on the ranks
    of another run, at rest (`regroup`), whose x is this rank's by now. Nothing changes
    before it is called.

    Raises ``ValueError`` where the parts do not fit the model.
    """
    own = parts[mine] if mine is not None else parts[0]
    keeps_state = running.stateful
    in_flight = own["flights"] and not running.varies
    target, keeps = running, keeps_state or in_flight or running.exchange.slots
    if keeps and own["joined"] != running.joined:
        running = running.like(own["joined"])
    sizes = [channel.bucket.numel for channel in running.channels]
    if own["sizes"] != sizes and keeps:
        raise ValueError("the state was saved for other parameters: their sizes differ")
    if mine is None:
        assert not any(part["flights"] for part in parts), "they came to rest"
    if mine is None and keeps:
        running = running.like(own["joined"])  # begins at the x of now, where something is lost
    executed = int(own["executed"])
    put_exchange_state_back = load_exchange_state(running, parts, mine)
    states = [
        _load_state(running, index, parts, mine) if keeps_state else {}
        for index in range(len(running.channels))
    ]
    flights = [_load_flight(running, flight) for flight in own["flights"]]

    def put_back() -> None:
        put_exchange_state_back()
        running.executed, running.in_flight = executed, flights
        for channel, loaded in zip(running.channels, states, strict=True):
            channel.state.clear()
            channel.state.update(loaded)
        if target is not running:
            target.become(running)

    return put_back


def _load_state(
    running: ParameterRunner, index: int, parts: Sequence[Saved], mine: int | None
) -> State:
    """The state on the bucket of number ``index``."""
    bucket, region = running.channels[index].bucket, running.channels[index].region
    lengths = {bucket.length, region.stop - region.start}
    state = {}
    for name in parts[mine or 0]["state"][index]:
        if mine is not None:
            value = parts[mine]["state"][index][name]
        else:
            pieces = [(part["starts"][index], part["state"][index][name]) for part in parts]
            value = _cut_anew(running, index, name, pieces)
        if value.dim() and value.numel() not in lengths:
            raise ValueError(f"{name!r} has {value.numel()} elements where {lengths} were expected")
        state[name] = value.to(bucket.device if value.dim() else "cpu", copy=True)
    return state


def _cut_anew(
    running: ParameterRunner, index: int, name: str, pieces: Sequence[tuple[int, Tensor]]
) -> Tensor:
    """This rank's piece of a state tensor, from the (start, piece) that other ranks kept of it."""
    first = pieces[0][1]
    if first.dim() == 0:
        everyones = torch.stack([piece.to(torch.float64) for _, piece in pieces])
        return first + (everyones - first).mean().to(first.dtype)
    channel, owned = running.channels[index], is_owned(running.round.update, name, first)
    bucket = channel.bucket
    place = channel.region if owned else slice(0, bucket.length)
    start = channel.state.get(name)
    if start is None:  # an outer optimizer makes its state in its first step
        start = first.new_zeros(place.stop - place.start)
    return _mean_of_pieces(
        bucket, pieces if owned else [(0, piece) for _, piece in pieces], place, start
    )


def _load_flight(running: ParameterRunner, saved: Saved) -> InFlightRound:
    channels, copies = running.channels, []
    if running.varies:
        copies = running.copies()
        channels = running.cut([list(group.values()) for group in copies])
    sizes = [channel.bucket.numel for channel in channels]
    fewer = not running.varies and saved["sizes"] == sizes[: len(saved["sizes"])]
    if saved["sizes"] != sizes and not fewer:  # groups added since sent nothing
        raise ValueError(
            "a message was in flight when the state was saved, of other tensors than there are "
            "now: load the model and the optimiser first, or save after sync.finish()"
        )
    messages = []
    for channel, sent, flat, weight in zip(
        channels, saved["sent"], saved["received"], saved["weights"], strict=False
    ):
        device = channel.bucket.device
        arrived = Arrival(flat.to(device, copy=True), weight)
        y = None if sent is None else sent.to(device, copy=True)
        messages.append(InFlightBucket(channel, y, Pending.of(arrived)))
    return InFlightRound(saved["due"], Pending.of(messages), copies)
