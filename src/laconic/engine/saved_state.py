"""A synchronizer's state as plain data, and back.

State is shared by all workers, divided into one slice per owner, or private to a worker. Each rank
saves its own part. A run with another number of workers loads the parts of all ranks, and divides
them again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from laconic.algorithms.exchange import Arrival
from laconic.engine.in_flight import Difference, InFlightBucket, InFlightRound
from laconic.engine.parameter_rounds import ParameterRunner
from laconic.engine.saved_pieces import Saved, Source, States, channel_states, load_channels
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


def header(
    recipe: str, text: str, ranks: int, workers: int, rank: int, params: Sequence[Tensor]
) -> Saved:
    """Identify the recipe, rank and parameters of a state. ``recipe`` has all rounds and options,
    and is compared; ``text`` names it in messages."""
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
    """Return the key (the saved rank) of the part that this rank, with `header` ``here``, loads
    unchanged. None if it combines all ``parts`` (`laconic.engine.regroup`): the number of ranks or
    workers has changed, parts are lost, or the ranks have decided to ``regroup``. Raises
    ``ValueError`` if the parts do not fit this run."""
    first = parts[min(parts)]
    if first["version"] != VERSION:
        raise ValueError(
            f"the state has version {first['version']}, not {VERSION}: load it with the version of "
            "laconic that saved it"
        )
    same = all(first[key] == here[key] for key in ("ranks", "workers"))
    saved, now = (_AUTO.sub("Auto()", header["recipe"]) for header in (first, here))
    if not same:
        saved, now = without_group_size(saved), without_group_size(now)
    if saved != now:
        raise ValueError(_another_recipe(first, here))
    for rank, part in parts.items():
        if part["rank"] != rank or any(
            part[key] != first[key]
            for key in ("version", "recipe", "ranks", "workers", "step")
            if key != "step" or part.get("quorum") is None  # then workers take different ones
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


_AUTO = re.compile(r"^Auto\([^)]*\)")
"""Its options are those of later choices: the recipe in force is saved, too."""
_GROUP_SIZE = re.compile(r", group_size=(\d+)$")


def without_group_size(recipe: str) -> str:
    """Remove the group size, which depends on the number of workers, from a recipe's text."""
    return _GROUP_SIZE.sub("", recipe)


def group_size_of(recipe: str) -> int:
    """The group size in a recipe's text; 0 without groups."""
    match = _GROUP_SIZE.search(recipe)
    return int(match[1]) if match else 0


def _another_recipe(saved: Mapping[str, Any], here: Saved) -> str:
    """The error message for a state with another recipe or other options."""
    rounds, options = _split(saved["recipe"])
    rounds_now, options_now = _split(here["recipe"])
    name, name_now = saved["text"], here["text"]
    if rounds == rounds_now:
        return (
            f"the state was saved by a run with {options}, and this run has {options_now}: use "
            "the same options, and load again"
        )
    if name == name_now:
        return (
            f"the state was saved by another recipe with the same text, {name}: its rounds were "
            f"{rounds}, and in this run they are {rounds_now}"
        )
    texts = f"the state was saved under {name}, and this run follows {name_now}"
    if name_now.startswith(WRAPPER):
        return f"{texts}: make the module with the saved settings, and load again"
    return (
        f"{texts} (arguments at their defaults are left out): attach the saved recipe, load, then "
        "call sync.switch(...)"
    )


def _split(recipe: str) -> tuple[str, str]:
    """Split a header's ``recipe`` into its rounds and the options of `laconic.attach`."""
    rounds, separator, options = recipe.rpartition(", buffers=")
    return (rounds, f"buffers={options}") if separator else (recipe, "other options")


def round_state(running: ParameterRunner) -> Saved:
    """The state of ``running``. Waits for its rounds in flight; sends nothing."""
    flights = [_flight_state(f) for f in running.in_flight]  # first: arrivals may change the state
    return {
        **channel_states(running),
        "joined": running.set.positions,
        "executed": running.executed,
        "digest": running.x_digest,
        "flights": flights,
    }


def _flight_state(flight: InFlightRound) -> Saved:
    arrivals, apart = [b.pending.wait() for b in flight.buckets], flight.apart.wait()
    sent = {id(s.tensor) for b in flight.buckets for s in b.channel.bucket.segments}
    return {
        "due": flight.due,
        "names": [[k for k, t in group.items() if id(t) in sent] for group in flight.copies],
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
    at rest (`laconic.engine.regroup`), and this rank already has their x. Nothing changes before
    it is called.

    Raises ``ValueError`` if the parts do not fit the model.
    """
    own, target = parts[0], running
    assert source is None or not any(part["flights"] for part in parts), "they are at rest"
    load_states = None
    if not running.set.vary:
        if source is not None or own["joined"] != running.set.positions:
            running = running.like(own["joined"])  # begins at this x: lost state starts from it
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
    channels, copies = running.channels, []
    if running.set.vary:
        copies = running.set.copies()
        groups = zip(copies, saved["names"], strict=False)
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
