"""State of a synchroniser as plain data, and back.

Three kinds of state: what all workers share, what is cut into one slice per owner, and what is
this worker's own. Each rank saves its own part; a run with another number of workers is given
the parts of all ranks and cuts them anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.lane import Pending
from laconic.round import State
from laconic.running import Flight, Message, RunningRound
from laconic.tensors import Bucket, local

VERSION = 1
Saved = dict[str, Any]


def checksum(tensors: Sequence[Tensor]) -> int:
    """A number that tells apart parameters that differ in any bit (but for rare accidents)."""
    total = 0
    for index, tensor in enumerate(tensors, 1):
        words = local(tensor).contiguous().view(-1).view(torch.uint8)
        pad = -words.numel() % 4
        words = torch.nn.functional.pad(words, (0, pad)).view(torch.int32).long()
        place = torch.arange(1, words.numel() + 1, device=words.device) % 65521
        total += index * int((words * place).sum())
    return total % 2**61


def round_state(running: RunningRound) -> Saved:
    """What ``running`` needs to go on: waits for what is in flight, sends nothing."""
    return {
        "executed": running.executed,
        "sizes": [bucket.numel for bucket in running.buckets],
        "state": [{k: t.clone() for k, t in state.items()} for state in running.states],
        "flights": [_flight_state(flight) for flight in running.flights],
    }


def _flight_state(flight: Flight) -> Saved:
    return {
        "due": flight.due,
        "sent": [None if m.sent is None else m.sent.clone() for m in flight.messages],
        "received": [m.pending.wait().clone() for m in flight.messages],
    }


def load_round(running: RunningRound, parts: Sequence[Saved], mine: int | None) -> None:
    """Put back what `round_state` returned on every rank (``parts``), or, where the number of
    workers is the same, on this one: ``parts[mine]``.

    Raises ``ValueError`` where the parts do not fit the model, or cannot be cut anew.
    """
    own = parts[mine] if mine is not None else parts[0]
    stateless = not running.round.update.slots
    sizes = [bucket.numel for bucket in running.buckets]
    if own["sizes"] != sizes and not (stateless and not own["flights"]):
        raise ValueError("the state was saved for other parameters: their sizes differ")
    if mine is None and any(part["flights"] for part in parts):
        raise ValueError(
            "a message was in flight when the state was saved, and it cannot be given to another "
            "number of workers: save after sync.finish()"
        )
    running.executed = own["executed"]
    if not stateless:
        for index, (bucket, state) in enumerate(zip(running.buckets, running.states, strict=True)):
            saved = [part["state"][index] for part in parts]
            _load_state(running, bucket, state, saved, mine)
    running.flights = [_load_flight(running, flight) for flight in own["flights"]]


def _load_state(
    running: RunningRound,
    bucket: Bucket,
    state: State,
    saved: Sequence[Mapping[str, Tensor]],
    mine: int | None,
) -> None:
    names = saved[0] if mine is None else saved[mine]
    for name in names:
        if mine is not None:
            value = saved[mine][name]
        elif running.round.update.slots.get(name) == "private":
            raise ValueError(f"{name!r} is each worker's own: it needs the same number of workers")
        else:
            value = _cut_anew(running, bucket, [part[name] for part in saved])
        state[name] = value.to(bucket.device if value.dim() else "cpu", copy=True)


def _cut_anew(running: RunningRound, bucket: Bucket, slices: Sequence[Tensor]) -> Tensor:
    """This rank's slice of what other slices make up together."""
    if not slices[0].dim():
        return slices[0]
    sharded = slices[0].numel() < bucket.numel
    whole = torch.cat(list(slices)) if sharded else slices[0]
    padded = whole.new_zeros(bucket.length)
    padded[: bucket.numel] = whole[: bucket.numel]
    return padded[running.region(bucket)]


def _load_flight(running: RunningRound, saved: Saved) -> Flight:
    messages = []
    for bucket, state, sent, received in zip(
        running.buckets, running.states, saved["sent"], saved["received"], strict=True
    ):
        arrived = received.to(bucket.device, copy=True)
        kept = None if sent is None else sent.to(bucket.device, copy=True)
        messages.append(Message(bucket, state, kept, Pending.of(arrived)))
    return Flight(saved["due"], messages)
