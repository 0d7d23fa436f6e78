"""What only a worker holds that leaves an elastic run by itself, and how another one takes it over.

With n workers before, a residual e counts as e/n in the mean; with the n - 1 workers after, as
e/(n - 1). So the other worker adds e*(n - 1)/n to its own. What the leaving worker has kept of the
mean's coding error (``lag``) counts fully: the other one adds it times n - 1. With push weights it
takes over all of x and w: z = (w*z + w'*z')/(w + w'), so the mean over workers stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from laconic.engine.channel import Channel
from laconic.engine.driver import Driver

LAG, RESIDUAL = "lag", "residual"


def _channels(driver: Driver) -> Iterator[tuple[str, Channel, str | None]]:
    """Every channel with a name, and the name of its push weight."""
    run = driver.run
    for running in run.rounds:
        for index, channel in enumerate(running.channels):
            yield f"{running.round.name} {index}", channel, running.round.update.weight
    for number, gradients in enumerate(run.gradients):
        for index, channel in enumerate(gradients.channels):
            yield f"gradients {number} {index}", channel, None


def collect(driver: Driver) -> dict[str, Any]:
    """What only this worker holds. Nothing may be under way; what is in flight is folded."""
    for running in driver.run.rounds:
        if running.round.update.weight is not None:
            running.fold_due(driver.session.step, early=True)
    held: dict[str, Any] = {}
    for name, channel, weight in _channels(driver):
        slots = channel.exchange.slots
        own = {
            k: t.to("cpu", copy=True)
            for k, t in channel.exchange_state.items()
            if slots.get(k) == "pooled"
        }
        if weight is not None:
            own["x"] = channel.bucket.pack(channel.bucket.empty()).cpu()
            own["w"] = channel.state[weight].clone()
        if own:
            held[name] = own
    return held


@torch.no_grad()
def take_over(driver: Driver, held: dict[str, Any], workers: int) -> None:
    """Add what a worker ``held`` that has left; there were so many ``workers`` before. Nothing may
    be under way."""
    for name, channel, weight in _channels(driver):
        other = {slot: _on_device(t, channel) for slot, t in held.get(name, {}).items()}
        with channel.states() as (own, state):
            for slot, tensor in other.items():
                if slot == LAG and RESIDUAL in state:
                    state[RESIDUAL].add_(tensor, alpha=workers - 1)
                elif slot in state and state[slot].shape == tensor.shape:
                    state[slot].add_(tensor, alpha=(workers - 1) / workers)
            if weight is not None and "x" in other:
                w, more = float(own[weight]), float(other["w"])
                x = channel.bucket.pack(channel.bucket.empty())
                x.mul_(w / (w + more)).add_(other["x"], alpha=more / (w + more))
                channel.bucket.unpack(x)
                own[weight].fill_(w + more)


def _on_device(t: Tensor, channel: Channel) -> Tensor:
    return t.to(channel.bucket.device) if t.dim() else t
