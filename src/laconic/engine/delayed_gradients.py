"""Gradients in flight: averaged while later steps compute, and used ``delay`` steps later."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.engine.channel import Channel
from laconic.engine.flat_gradients import FlatGradients
from laconic.links.comm_thread import Pending


@dataclass(frozen=True)
class Flight:
    """The gradients of one backward pass on their way: by bucket, the memory that the mean comes
    to, and what is waited for. ``had``: by parameter, whether this rank had a gradient. ``scale``:
    the loss scale of the gradients. ``label`` names the round in messages to the user."""

    channels: Sequence[Channel]
    samples: Sequence[Tensor]
    flats: list[FlatGradients]
    pending: Sequence[Pending[None]]
    had: Mapping[int, bool]
    scale: float
    label: str

    def wait(self) -> None:
        """Wait until the means have come."""
        for pending in self.pending:
            pending.wait()


class Flights:
    """The gradients in flight, oldest first, at most ``delay`` passes'."""

    def __init__(self, delay: int) -> None:
        self.delay = delay
        self._flights: deque[Flight] = deque()

    def after(self, flight: Flight) -> Flight | None:
        """``flight`` has begun. Returns the one that is due now, if there is one."""
        self._flights.append(flight)
        return self._flights.popleft() if len(self._flights) > self.delay else None

    def state_dict(self, params: Sequence[Tensor]) -> list[dict[str, Any]]:
        """The means in flight, as plain data. Waits for them; sends nothing."""
        found = []
        for flight in self._flights:
            flight.wait()
            wholes = zip(flight.channels, flight.flats, strict=True)
            found.append(
                {
                    "sizes": [channel.bucket.numel for channel in flight.channels],
                    "means": [flat.whole[: c.bucket.numel].clone() for c, flat in wholes],
                    "had": [flight.had.get(id(p), False) for p in params],
                    "scale": flight.scale,
                }
            )
        return found

    def prepare(
        self,
        saved: Sequence[Mapping[str, Any]],
        channels: Sequence[Channel],
        samples: Sequence[Tensor],
        params: Sequence[Tensor],
    ) -> deque[Flight]:
        """What `load` puts in place of the present flights. Raises ``ValueError``."""
        found: deque[Flight] = deque()
        for state in saved:
            sizes = [channel.bucket.numel for channel in channels]
            if list(state["sizes"]) != sizes or len(state["had"]) != len(params):
                raise ValueError(
                    f"the state has gradients in flight of other parameters: "
                    f"{sum(state['sizes'])} elements, and this run has {sum(sizes)}"
                )
            flats = [FlatGradients(channel.bucket) for channel in channels]
            for flat, mean in zip(flats, state["means"], strict=True):
                flat.whole.zero_()
                flat.whole[: len(mean)].copy_(mean)
            had = {id(p): bool(some) for p, some in zip(params, state["had"], strict=True)}
            come = [Pending.of(None) for _ in flats]
            label = "gradients in flight"
            found.append(Flight(channels, samples, flats, come, had, float(state["scale"]), label))
        return found

    def load(self, flights: deque[Flight]) -> None:
        """Go on with ``flights``, from `prepare`."""
        self._flights = flights


def clear(params: Sequence[Tensor], *, scaled: bool) -> None:
    """While no mean has come: no gradients, so the optimizer moves nothing. With a GradScaler
    (``scaled``), which refuses to step without any, zeros."""
    for p in params:
        if not scaled:
            p.grad = None
        elif p.grad is not None:
            p.grad = torch.zeros_like(p)
