"""Predict the seconds per training step of a recipe from measured costs.

This is the cost model. `laconic.auto` chooses recipes with it, `laconic advise` reports its
predictions, and `make validate-model` compares them with measurements.

Symbols:

    c    seconds of one step's forward pass, backward pass and optimizer
    B    the share of c during which gradients become available
    T_r  network seconds of round r: `Exchange.cost` on the network of its rank set
    b_r  those of them in which the network is busy: round r's bytes over the rate
    w_r  processor seconds to pack, encode and fold round r
    f_r  rounds r per step
    d_r  delay of round r, in steps
    s    seconds per step that workers wait for the slowest one if they communicate every step
    k    slowdown of training per second of other work, because both share processors

    exposed_r = f_r * (T_r + w_r)                            parameter round
    exposed_r = f_r * max(0, T_r + w_r - d_r * c)            parameter round with a delay
    exposed_r = f_r * (e_K - B * c)                          gradient round, in buckets 1 to K:
      e_j = max(e_{j-1}, B * c * (share of the gradients in buckets 1 to j)) + T_rj + w_rj
    seconds   = max(c + sum_r exposed_r,
                    min(sum_r f_r * (T_r + (1 / U_r - 1) * b_r), c + sum_r f_r * (T_r + w_r)))

Buckets overlap where a round trip takes at least `FAR_SECONDS`. Then e_K is when the communication
thread has averaged the last one: each message is sent when it is its turn, and arrives after the
latency and the mean delay by lost packets. In a parameter round, as many as are under way
together share the latency.

Concurrent work makes c longer by k times its processor seconds: w_r and the cost of sending.

With f synchronous rounds per step, waiting adds s * sqrt(f) to a step: step times vary
independently, so the lag of the slowest worker grows as the square root of the number of steps
between two rounds. Gossip does not wait for the slowest worker.

A packet that is lost arrives 1.25 round trips later: the sender detects the loss after a quarter of
a round trip, and sending again takes one more. A collective waits for the last packet of all of its
n ranks, so each of its messages takes

    (1.25 * 2 * one_way - S / 2) * (1 - (1 - loss)**packets)

longer on average. ``packets`` is the number of packets that the n ranks send in the last round trip
of the message, which takes S seconds; half of them remain when a packet is lost. Packets that are
lost earlier are sent again while others are still being sent.

The second term of the maximum is the network's capacity. A collective starts only when its last
rank has reached it, so collectives with a delay can keep the network busy for at most the share U
of the time that latency leaves. U_r = 1 for all other rounds and for gossip. A step never takes
longer than it would without overlap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import torch

from laconic.algorithms.compile import with_replicas
from laconic.algorithms.exchange import Exchange
from laconic.algorithms.exchanges import QuorumMean
from laconic.algorithms.round import (
    AnyRound,
    GradientRound,
    Recipe,
    Round,
    describe,
    fragments_of,
)
from laconic.algorithms.schedules import After, Every, Schedule, every
from laconic.buckets import BUCKET_BYTES
from laconic.engine.gradient_channels import bucket_bytes
from laconic.engine.overlap import AHEAD, turns_at_once
from laconic.links import cost
from laconic.parts import Fragment
from laconic.policy.facts import Facts

UTILIZATION = 0.7
"""U. Chosen after a measurement with the text model on 4 emulated hosts at 10 Mbit/s: a recipe
whose exchanges would have saturated the network, had all ranks been equally fast, kept it busy 0.6
of the time."""
HORIZON = 15 * 512
"""Steps over which the rounds of a schedule that is not simply periodic are counted. The count is
exact for periods that divide it."""
LATER = 10_000 * HORIZON
"""Counting begins after this step, when every schedule has reached its long-run pattern."""


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of a step.

    At workers' own pace, ``seconds`` are per step of a mean worker. ``bytes`` is what each rank
    sends to other workers per step, and ``hidden`` the share of communication that overlaps with
    training.
    """

    seconds: float
    bytes: float
    hidden: float = 0.0


def typical(r: AnyRound) -> AnyRound:
    """Return ``r`` at every step, over the workers, without delay, of the first fragment: rounds
    that are equal then cost the processors the same."""
    if isinstance(r, GradientRound):
        return replace(r, when=every(1), over="workers")
    part, exchange = r.part, r.exchange
    if isinstance(part, Fragment):
        part = replace(part, index=0)
    if isinstance(exchange, QuorumMean):
        exchange = replace(exchange, workers=None, grace=0.0, pace="equal")
    return replace(r, when=every(1), delay=0, part=part, over="workers", exchange=exchange)


def work_key(r: AnyRound) -> str:
    """Return a key that is equal for rounds with equal processor work."""
    return describe((typical(r),))


@dataclass(frozen=True)
class Load:
    """The cost of one round: ``network`` seconds, of which the network is ``sending`` (the others
    are latency and lost packets); ``exposed`` seconds; ``stretch``, the seconds it adds to the
    compute time; and the bytes ``sent`` by a rank."""

    network: float
    sending: float
    exposed: float
    stretch: float
    sent: float


def predict(recipe: Recipe, facts: Facts) -> Prediction:
    """Predict the cost of a step under ``recipe``.

    Rounds inside a group, and all processor work that ``facts`` lacks, count as free. Rounds have
    no quorum: `laconic.advisor.quorum` predicts those.
    """
    rounds = with_replicas(recipe) if facts.ranks > 1 else recipe
    exposed = network = waited = least = serial = sent = synchronous = 0.0
    for r in rounds:
        share = often(r)
        if not share or not takes_time(r):
            continue
        load = load_of(r, facts)
        exposed += share * (load.exposed + load.stretch)
        if r.over != "replica":
            meets = r.exchange.communicates and r.exchange.out_degree is None
            synchronous += share if meets and not r.delay else 0.0
            network += share * load.network
            waited += share * min(load.exposed, load.network)
            serial += share * (load.network + facts.work.get(work_key(r), 0.0))
            least += share * (load.network + idle(r, load))
            sent += share * load.sent
    exposed += facts.skew * math.sqrt(min(synchronous, 1.0))
    # A delay never makes a step longer than waiting for each message would.
    total = max(facts.compute + exposed, min(least, facts.compute + serial))
    waited = min(waited + max(total - facts.compute - exposed, 0.0), network)
    hidden = 1 - waited / network if network else 0.0
    return Prediction(total, sent, hidden)


def takes_time(r: AnyRound) -> bool:
    """Whether ``r`` counts: it sends something between workers, or computes Muon's direction."""
    computes = isinstance(r, Round) and r.update.scope == "tensors"
    return r.over != "group" and (r.exchange.communicates or computes)


def undisturbed(recipe: Recipe, facts: Facts) -> Facts:
    """``facts`` whose ``compute`` was measured beside the rounds of ``recipe``, without what their
    processor time has added to it."""
    if not facts.contention:
        return facts
    beside = predict(recipe, facts).seconds
    stretch = beside - predict(recipe, replace(facts, contention=0.0)).seconds
    return replace(facts, compute=max(facts.compute - stretch, facts.compute / 2))


def load_of(r: AnyRound, facts: Facts) -> Load:
    """Return the cost of one round ``r``."""
    return (_gradients if isinstance(r, GradientRound) else _parameters)(r, facts)


def idle(r: AnyRound, load: Load) -> float:
    """Return the seconds for which the network is idle until the last rank joins the round ``r``:
    those of the capacity, see the top of the file."""
    overlapped = r.delay and r.exchange.out_degree is None
    return (1 / UTILIZATION - 1) * load.sending if overlapped else 0.0


def travel(r: AnyRound, facts: Facts) -> float:
    """Return the network seconds of one round ``r``."""
    return load_of(r, facts).network


def often(r: AnyRound) -> float:
    """Return the number of rounds ``r`` per step in the long run."""
    try:
        return _share(r.when)  # type: ignore[arg-type]
    except TypeError:  # one of the user's that cannot be hashed
        return _share.__wrapped__(r.when)


@lru_cache(maxsize=256)
def _share(when: Schedule) -> float:
    if isinstance(when, Every):
        return 1 / when.period
    if isinstance(when, After):
        return _share(when.schedule)  # type: ignore[arg-type]
    return sum(when(step) for step in range(LATER + 1, LATER + HORIZON + 1)) / HORIZON


def _parameters(r: AnyRound, facts: Facts) -> Load:
    n, share = facts.workers, facts.ranks if r.over == "workers" else 1
    if r.over == "world":
        n *= facts.ranks
    length = elements(r, facts, n, share) // share  # each rank of a worker carries one part
    amount = _shaped(r, facts).cost(length, facts.itemsize, n)
    names = (r.over, "workers")
    size = length * share * facts.itemsize
    buckets = -(-size // BUCKET_BYTES)
    if r.update.weight is not None:  # 8 bytes, to each peer with each bucket
        weights = 8 * buckets * amount.bytes // (length * facts.itemsize)
        amount = replace(amount, bytes=amount.bytes + weights)
    seconds = facts.travel(names, amount, n, buckets)
    if facts.overlaps(*names):  # each waits for latencies beside the others of its window
        window = buckets if r.delay else min(buckets, AHEAD + 1)
        seconds = max(facts.travel(names, amount, n, 1), seconds / window)
    if share > 1:
        seconds += facts.net("replica").seconds(cost.all_gather(size, share), buckets)
    work = facts.work.get(work_key(r), 0.0)
    turning = facts.turning / fragments_of(r) if r.update.scope == "tensors" else 0.0
    sending = min(seconds, amount.seconds(facts.net(*names).rate, 0.0))
    if not r.delay:
        return Load(seconds, sending, seconds + work + turning, 0.0, amount.bytes)
    stretch = facts.contention * (work + facts.carry * amount.bytes)
    overlap = r.delay * (facts.compute + often(r) * stretch)
    exposed = max(seconds + work - overlap, 0.0) + turning
    return Load(seconds, sending, exposed, stretch, amount.bytes)


def _gradients(r: AnyRound, facts: Facts) -> Load:
    n = {"replica": facts.ranks, "workers": facts.workers}.get(r.over, facts.workers * facts.ranks)
    amount = _shaped(r, facts).cost(elements(r, facts, n), facts.itemsize, n)
    names = ("direct", r.over, "workers") if r.exchange.direct else (r.over, "workers")
    largest = max(math.prod(shape) for shape in facts.shapes) * facts.itemsize
    sizes = bucket_sizes(r.exchange, facts.elements * facts.itemsize, largest)
    work = facts.work.get(work_key(r), 0.0)
    backward = facts.backward * facts.compute
    whole = sum(sizes)
    ready = [backward * part / whole for part in accumulate(sizes)]
    net = facts.net(*names)
    if facts.overlaps(*names) and len(sizes) > 1 and amount.messages:
        way = facts.travel(names, amount, n, 1) / amount.messages
        send = max(net.seconds(amount) / amount.messages - net.one_way, 0.0)
        at_once = turns_at_once(amount.bytes / amount.messages * max(sizes) / sum(sizes))
        end = _overlapped(sizes, ready, send, way - send, amount.messages, work, at_once)
        seconds = min(facts.travel(names, amount, n, 1), end - ready[0])
    else:
        seconds, end = facts.travel(names, amount, n, len(sizes)), 0.0
        for size, since in zip(sizes, ready, strict=True):
            end = max(end, since) + (seconds + work) * size / whole
    exposed = end - backward
    overlap = 1 - min(exposed / (seconds + work), 1.0) if seconds + work else 0.0
    concurrent = overlap * (work + facts.carry * amount.bytes)
    stretch = facts.contention * concurrent
    sent = _external_share(r, facts) * amount.bytes
    sending = min(seconds, amount.seconds(net.rate, 0.0))
    return Load(seconds, sending, exposed, stretch, sent)


def _overlapped(
    sizes: Sequence[int],
    ready: Sequence[float],
    send: float,
    way: float,
    messages: int,
    work: float,
    at_once: int,
) -> float:
    """Return when all buckets are averaged that overlap, as `GradientRunner` does it.

    A bucket of the ``sizes`` begins when it is ``ready``. It sends several ``messages``, one after
    the other: all buckets together take ``send`` seconds for each. A message then is on its ``way``
    for so many seconds. ``at_once``: see `turns_at_once`.
    """
    now, begun = 0.0, 0
    arrive: list[float] = []
    sent: list[int] = []
    while begun < len(sizes) or min(sent) <= messages:
        if begun < len(sizes):
            now = max(now, ready[begun])
            arrive.append(0.0)
            sent.append(0)
            begun += 1
        for k in [*reversed(range(begun))] * (at_once if begun < len(sizes) else 1):
            if sent[k] <= messages:
                now = max(now, arrive[k])
                if sent[k] < messages:
                    now += (send + (0.0 if sent[k] else work)) * sizes[k] / sum(sizes)
                    arrive[k] = now + way
                sent[k] += 1
    return now


def _external_share(r: AnyRound, facts: Facts) -> float:
    """Return the share of the bytes that a round over all ranks sends to other workers.

    A direct exchange sends to every rank, and the share is that of ranks of other workers. A mean
    travels around a ring, in which one rank of each worker sends to the next worker.
    """
    if r.over != "world" or facts.ranks == 1:
        return 1.0
    if not r.exchange.direct:
        return 1 / facts.ranks
    return (facts.workers - 1) * facts.ranks / (facts.workers * facts.ranks - 1)


def _shaped(r: AnyRound, facts: Facts) -> Exchange:
    return r.exchange.shaped([torch.Size(shape) for shape in facts.shapes])


def elements(r: AnyRound, facts: Facts, n: int, carriers: int = 1) -> int:
    """Return the number of elements in an exchange of ``r``.

    The number is padded to what the exchange requires and to equal parts for the ``carriers``, the
    ranks of a worker that share the exchange.
    """
    share = fragments_of(r)
    multiple = r.exchange.multiple(n) * carriers
    return -(-facts.elements // share // multiple) * multiple


def bucket_sizes(exchange: Exchange, total: int, largest: int) -> list[int]:
    """The approximate bytes of each bucket, for ``total`` bytes of gradients, of which the largest
    tensor has ``largest``."""
    first, each = bucket_bytes(exchange, total)
    if exchange.scope == "tensors":
        first, each = max(first, largest), max(each, largest)
    whole, rest = divmod(max(total - first, 0), each)
    return [min(first, total), *[each] * whole, *([rest] if rest else [])]
