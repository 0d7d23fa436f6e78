"""Seconds a step will take under a recipe, from what was measured: the one cost model, which
`laconic.auto` chooses by, `laconic advise` tells, and `make validate-model` checks.

Symbols: c, seconds of forward, backward and optimiser of one step; B, the share of c in which
gradients appear; T_r, seconds of round r on the network, by `Exchange.cost` on the net of its set
of ranks; w_r, seconds of processors for packing, coding and folding it; f_r, its rounds per step;
d_r, its delay; s, seconds that workers which meet after every step wait for the slowest of them;
k, the share of work beside the training that the training pays for, as they share processors.

    exposed_r = f_r * (T_r + w_r)                            a round on parameters
    exposed_r = f_r * max(0, T_r + w_r - d_r * c)            the same with a delay
    exposed_r = f_r * (e_K - B * c)                          gradients, in buckets 1 to K:
      e_j = max(e_{j-1}, B * c * (share of the gradients in buckets 1 to j)) + T_rj + w_rj
    seconds   = max(c + sum_r exposed_r, min(sum_r f_r * T_r / U_r, c + sum_r f_r * (T_r + w_r)))

c is longer by k times the work done meanwhile: w_r, and what sending takes of processors.
s * sqrt(f): the steps between two meetings differ independently, so that what the slowest is behind
grows as the root of their number; gossip waits for no slowest of all. The second term of the
maximum: the network is one at a time; and collectives with a delay, of which a message begins when
the last of the ranks has come to it, keep it busy for the share U of the time at most (U_r = 1 for
the others, and for gossip), though no step takes longer than if nothing were hidden.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from laconic.algorithms.compile import within_workers
from laconic.algorithms.exchange import Exchange, Gossip
from laconic.algorithms.round import (
    AnyRound,
    GradientRound,
    Recipe,
    describe,
    fragments_of,
    typical,
)
from laconic.algorithms.schedules import After, Every, Schedule
from laconic.buckets import BUCKET_BYTES
from laconic.engine.gradient_rounds import bucket_sizes
from laconic.links import cost
from laconic.links.cost import Cost

BACKWARD = 0.6
"""B where it was not measured: the share of a step's computing in which gradients appear."""
UTILISATION = 0.7
"""U. Measured with the text model on 4 emulated hosts at 10 Mbit/s: a recipe whose messages would
have filled the network, were all ranks alike, kept it busy for 0.6 of the time."""
HORIZON = 15 * 512
"""Steps over which rounds are counted of schedules that are not plainly periodic: all of them, for
periods that divide it."""
LATER = 10_000 * HORIZON
"""The step after which they are: what begins has begun, and what ends has ended."""


@dataclass(frozen=True)
class Net:
    """What one rank gets of the network: ``rate`` in bit/s, ``latency`` in seconds per message, and
    the ``burst``, bytes that pass at once after a pause, as a shaped card lets them."""

    rate: float
    latency: float
    burst: float = 0.0

    def seconds(self, amount: Cost, buckets: int = 1) -> float:
        """Of a collective in so many ``buckets``, each of which takes its messages' latencies; as
        `Cost.seconds`, but for the burst: the card rests before the first one alone."""
        whole = amount.seconds(self.rate, self.latency)
        whole += (buckets - 1) * amount.messages * self.latency
        return whole - 8 * min(self.burst, amount.bytes) / self.rate


@dataclass(frozen=True)
class Facts:
    """What was measured: ``compute`` in seconds per step; ``rate`` in bit/s of one worker's card;
    ``latency`` in seconds per message; of the model its tensors' ``shapes``, of ``itemsize`` bytes
    an element.

    What else may be known: ``backward``, B; ``ranks`` of each worker; ``nets`` by set of ranks, one
    rank's part where all ranks use it at once: ``"workers"``, ``"world"``, ``"replica"``, and
    ``"peers"``, a message to another worker alone; ``work``, w by `work_key`; ``contention``, k;
    ``carry``, seconds of processors for a byte sent; ``skew``, s.
    """

    workers: int
    shapes: tuple[tuple[int, ...], ...]
    itemsize: int
    compute: float
    rate: float
    latency: float
    backward: float = BACKWARD
    ranks: int = 1
    nets: Mapping[str, Net] = field(default_factory=dict)
    work: Mapping[str, float] = field(default_factory=dict)
    contention: float = 0.0
    carry: float = 0.0
    skew: float = 0.0

    @property
    def elements(self) -> int:
        """Of the model."""
        return sum(math.prod(shape) for shape in self.shapes)

    def net(self, *names: str) -> Net:
        """The first of these sets whose net is known, else one of ``rate`` and ``latency``."""
        known = (self.nets[name] for name in names if name in self.nets)
        return next(known, Net(self.rate, self.latency))


@dataclass(frozen=True)
class Prediction:
    """``seconds`` per step, of which ``exposed`` are waiting; ``bytes`` sent per step to other
    workers by each rank; ``busy``: the share of the time in which the network is in use;
    ``hidden``: the share of the communication behind which training went on."""

    seconds: float
    exposed: float
    bytes: float
    busy: float
    hidden: float = 0.0


def itemsize_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of an element: where tensors differ, of the mean one."""
    sizes = [t.numel() * t.element_size() for t in tensors]
    return round(sum(sizes) / max(sum(t.numel() for t in tensors), 1)) or 1


def work_key(r: AnyRound) -> str:
    """What rounds have in common that keep processors busy for as long."""
    return describe((typical(r),))


@dataclass(frozen=True)
class _Load:
    """One round's: seconds on the ``network``, those ``exposed``, and by how many it makes
    computing longer (``stretch``); bytes ``sent`` by a rank."""

    network: float
    exposed: float
    stretch: float
    sent: float


def predict(recipe: Recipe, facts: Facts) -> Prediction:
    """What a step under ``recipe`` takes. Rounds inside a group are taken for free, and so is all
    work that ``facts`` do not tell of."""
    rounds = (*within_workers(recipe), *recipe) if facts.ranks > 1 else recipe
    exposed = network = waited = least = alone = sent = meetings = 0.0
    for r in rounds:
        share = often(r)
        if r.over == "group" or not share or not r.exchange.communicates:
            continue
        load = (_gradients if isinstance(r, GradientRound) else _parameters)(r, facts)
        exposed += share * (load.exposed + load.stretch)
        if r.over != "replica":
            meetings += 0.0 if r.delay or isinstance(r.exchange, Gossip) else share
            network += share * load.network
            waited += share * min(load.exposed, load.network)
            alone += share * (load.network + facts.work.get(work_key(r), 0.0))
            joint = r.delay and not isinstance(r.exchange, Gossip)
            least += share * load.network / (UTILISATION if joint else 1)
            sent += share * load.sent
    exposed += facts.skew * math.sqrt(min(meetings, 1.0))
    # a delay never makes a step longer than waiting for each message would
    total = max(facts.compute + exposed, min(least, facts.compute + alone))
    waited = min(waited + max(total - facts.compute - exposed, 0.0), network)
    hidden = 1 - waited / network if network else 0.0
    return Prediction(total, total - facts.compute, sent, network / total, hidden)


def travel(r: AnyRound, facts: Facts) -> float:
    """Seconds that the messages of one round ``r`` take on the network."""
    return (_gradients if isinstance(r, GradientRound) else _parameters)(r, facts).network


def often(r: AnyRound) -> float:
    """How many rounds there are per step, in the long run."""
    return _share(r.when) if isinstance(r.when, Hashable) else _count(r.when) / HORIZON


@lru_cache(maxsize=256)
def _share(when: Hashable) -> float:
    if isinstance(when, Every):
        return 1 / when.period
    if isinstance(when, After):
        return _share(cast("Hashable", when.schedule))
    return _count(cast("Schedule", when)) / HORIZON


def _count(when: Schedule) -> int:
    return sum(when(step) for step in range(LATER + 1, LATER + HORIZON + 1))


def _parameters(r: AnyRound, facts: Facts) -> _Load:
    n, share = facts.workers, facts.ranks if r.over == "workers" else 1
    if r.over == "world":
        n *= facts.ranks
    length = _elements(r, facts, n, share) // share  # the ranks of a worker carry a part each
    amount = _shaped(r, facts).cost(length, facts.itemsize, n)
    names = ("peers", "workers") if isinstance(r.exchange, Gossip) else (r.over, "workers")
    size = length * share * facts.itemsize
    buckets = -(-size // BUCKET_BYTES)  # one after the other
    seconds = facts.net(*names).seconds(amount, buckets)
    if share > 1:
        seconds += facts.net("replica").seconds(cost.all_gather(size, share), buckets)
    work = facts.work.get(work_key(r), 0.0)
    if not r.delay:
        return _Load(seconds, seconds + work, 0.0, amount.bytes)
    stretch = facts.contention * (work + facts.carry * amount.bytes)
    meanwhile = r.delay * (facts.compute + often(r) * stretch)
    return _Load(seconds, max(seconds + work - meanwhile, 0.0), stretch, amount.bytes)


def _gradients(r: AnyRound, facts: Facts) -> _Load:
    n = {"replica": facts.ranks, "workers": facts.workers}.get(r.over, facts.workers * facts.ranks)
    amount = _shaped(r, facts).cost(_elements(r, facts, n), facts.itemsize, n)
    names = ("direct", r.over, "workers") if r.exchange.direct else (r.over, "workers")
    net = facts.net(*names)
    largest = max(math.prod(shape) for shape in facts.shapes) * facts.itemsize
    sizes = bucket_sizes(r.exchange, facts.elements * facts.itemsize, largest)
    seconds = net.seconds(amount, len(sizes))
    work = facts.work.get(work_key(r), 0.0)
    backward = facts.backward * facts.compute
    each = [(seconds + work) * size / sum(sizes) for size in sizes]
    end = done = 0.0
    for size, own in zip(sizes, each, strict=True):
        done += size / sum(sizes)
        end = max(end, backward * done) + own
    exposed = end - backward
    meanwhile = 1 - min(exposed / (seconds + work), 1.0) if seconds + work else 0.0
    beside = meanwhile * (work + facts.carry * amount.bytes)
    stretch = facts.contention * beside
    return _Load(seconds, exposed, stretch, _leaving(r, facts) * amount.bytes)


def _leaving(r: AnyRound, facts: Facts) -> float:
    """The share of what ranks send in a round over all ranks that leaves their worker: of what goes
    to every other rank, that for ranks elsewhere; of a mean, which passes from rank to rank in a
    ring, what one rank of each worker sends on."""
    if r.over != "world" or facts.ranks == 1:
        return 1.0
    if not r.exchange.direct:
        return 1 / facts.ranks
    return (facts.workers - 1) * facts.ranks / (facts.workers * facts.ranks - 1)


def _shaped(r: AnyRound, facts: Facts) -> Exchange:
    return r.exchange.shaped([torch.Size(shape) for shape in facts.shapes])


def _elements(r: AnyRound, facts: Facts, n: int, carriers: int = 1) -> int:
    """How many elements a message of ``r`` has, padded as its exchange needs them, and so that each
    of the ``carriers`` in a worker has a part as long as the others'."""
    share = fragments_of(r)
    multiple = r.exchange.multiple(n) * carriers
    return -(-facts.elements * r.update.models // share // multiple) * multiple
