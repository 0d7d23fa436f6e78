"""Seconds a step will take under a recipe, from what was measured: the cost model put to use.

Symbols: c, seconds of forward, backward and optimiser of one step; T_r, seconds of round r on the
network, by `Exchange.cost` at the given rate and latency; f_r, its rounds per step; d_r, its delay.

    exposed_r = f_r * max(0, T_r - d_r * c)                       a round on parameters
    exposed_r = l * T_r + max(0, (1 - l) * T_r - B * c)           gradients, sent while the backward
                                                                  pass, B of c, runs, the last
                                                                  bucket's share l after it
    seconds   = max(c + sum_r exposed_r, sum_r f_r * T_r / U_r)

The second term of the maximum: the network is one at a time; and rounds with a delay, of which a
message begins when the last of the ranks has come to it, keep it busy for the share U of the time
at most (U_r = 1 for the others).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from laconic.gradients import bucket_sizes
from laconic.round import Recipe, Round
from laconic.tensors import Fragment

BACKWARD = 0.6
"""B: the share of a step's computing in which gradients appear."""
UTILISATION = 0.7
"""U. Measured with the text model on 4 emulated hosts at 10 Mbit/s: a recipe whose messages would
have filled the network, were all ranks alike, kept it busy for 0.6 of the time."""
HORIZON = 15 * 512
"""Steps over which a schedule's rounds are counted: all of them, for periods that divide it."""


@dataclass(frozen=True)
class Facts:
    """What was measured: ``compute`` in seconds per step; ``rate`` in bit/s of one worker's card;
    ``latency`` in seconds per message; of the model its tensors' ``shapes``, of ``itemsize`` bytes
    an element."""

    workers: int
    shapes: tuple[tuple[int, ...], ...]
    itemsize: int
    compute: float
    rate: float
    latency: float

    @property
    def elements(self) -> int:
        """Of the model."""
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Prediction:
    """``seconds`` per step, of which ``exposed`` are waiting; ``bytes`` sent per step; ``busy``:
    the share of the time in which the network is in use."""

    seconds: float
    exposed: float
    bytes: float
    busy: float


def predict(recipe: Recipe, facts: Facts) -> Prediction:
    """What a step under ``recipe`` takes. Rounds inside a worker or a group are taken for free."""
    exposed = network = least = sent = 0.0
    for r in recipe:
        if r.over not in ("workers", "world"):
            continue
        often = sum(r.when(step) for step in range(1, HORIZON + 1)) / HORIZON
        exchange = r.exchange.shaped([torch.Size(shape) for shape in facts.shapes])
        cost = exchange.cost(_elements(r, facts), facts.itemsize, facts.workers)
        seconds = cost.seconds(facts.rate, facts.latency)
        if r.on == "gradients":
            sizes = bucket_sizes(r.exchange, facts.elements * facts.itemsize)
            seconds += (len(sizes) - 1) * cost.messages * facts.latency
            last = seconds * sizes[-1] / sum(sizes)
            exposed += often * (last + max(seconds - last - BACKWARD * facts.compute, 0.0))
        else:
            exposed += often * max(seconds - r.delay * facts.compute, 0.0)
        network += often * seconds
        least += often * seconds / (UTILISATION if r.delay else 1)
        sent += often * cost.bytes
    total = max(facts.compute + exposed, least)
    return Prediction(total, total - facts.compute, sent, network / total)


def _elements(r: Round, facts: Facts) -> int:
    """How many elements a message of ``r`` has, padded as its exchange needs them."""
    share = r.part.count if isinstance(r.part, Fragment) else 1
    multiple = r.exchange.multiple(facts.workers)
    return -(-facts.elements // share // multiple) * multiple
