"""The measurements that a prediction is based on."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from laconic.links.cost import Cost, Shared
from laconic.links.link import FAR_SECONDS

BACKWARD = 0.6
"""Default for B, the share of a step's compute time during which gradients become available."""
PACKET = 1448
"""Payload bytes of a TCP packet on Ethernet."""
RECOVERY = 1.25
"""The number of round trips by which a lost packet arrives late. It is sent again when packets that
were sent a quarter of a round trip after it are acknowledged (RACK, RFC 8985)."""


@dataclass(frozen=True)
class Net:
    """The network as one rank sees it.

    ``rate`` is in bit/s, ``one_way`` in seconds per message, half of a round trip."""

    rate: float
    one_way: float

    def seconds(self, amount: Cost, buckets: int = 1) -> float:
        """Return the seconds of a collective split into ``buckets``.

        Each bucket pays the latency of its messages.
        """
        whole = amount.seconds(self.rate, self.one_way)
        return whole + (buckets - 1) * amount.messages * self.one_way


@dataclass(frozen=True)
class Facts:
    """Measurements that a prediction is based on.

    Required: ``compute``, seconds per step; ``rate``, bit/s of one worker's network interface;
    ``one_way``, seconds per message, half of a round trip; the ``shapes`` of the model's tensors
    and the ``itemsize`` of an element in bytes.

    Optional: ``loss``, the share of packets that are lost; ``backward``, B; ``ranks`` per worker;
    ``work``, w by `work_key`; ``contention``, k; ``carry``, processor seconds per byte sent;
    ``skew``, s. ``nets`` gives the network by rank set, as one rank sees it when all ranks use it
    at once: ``"workers"``, ``"world"``, ``"replica"``. ``computes`` are the seconds of a step on
    each worker, and ``rates`` the bit/s at which each one sends, by rank; empty if they are alike.
    ``compute`` and ``rate`` are then those of the slowest, for which the others wait. ``receives``
    are the bit/s at which each one receives; empty if as it sends. ``overlapping`` is whether
    buckets overlap (`Link.overlapping`); None: where the latency says so. ``muon``: whether outer
    steps in Muon's direction may be chosen (`laconic.policy.candidates.takes_muon`), and ``own``
    whether each worker may take its own (`laconic.policy.candidates.takes_own`); ``turning``: the
    seconds for which training stops to turn the steps of all matrices once; ``largest``: the share
    of the model in the largest fragment by layers, 0 if unknown.
    """

    workers: int
    shapes: tuple[tuple[int, ...], ...]
    itemsize: int
    compute: float
    rate: float
    one_way: float
    loss: float = 0.0
    backward: float = BACKWARD
    ranks: int = 1
    nets: Mapping[str, Net] = field(default_factory=dict)
    work: Mapping[str, float] = field(default_factory=dict)
    contention: float = 0.0
    carry: float = 0.0
    skew: float = 0.0
    computes: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    receives: tuple[float, ...] = ()
    overlapping: bool | None = None
    muon: bool = False
    own: bool = False
    turning: float = 0.0
    largest: float = 0.0
    shared: tuple[Shared, ...] = ()

    @property
    def alone(self) -> float:
        """The seconds of a step if no worker waits for another: the harmonic mean of theirs."""
        return statistics.harmonic_mean(self.computes) if self.computes else self.compute

    @property
    def elements(self) -> int:
        """The number of elements in the model."""
        return sum(math.prod(shape) for shape in self.shapes)

    def net(self, *names: str) -> Net:
        """Return the first known network among ``names``, else one of ``rate`` and ``one_way``.

        Its rate is at most what shared connections leave for each worker."""
        known = (self.nets[name] for name in names if name in self.nets)
        net = next(known, Net(self.rate, self.one_way))
        least = min((each.per_rank(self.workers) for each in self.shared), default=math.inf)
        return net if net.rate <= least or "replica" in names else replace(net, rate=least)

    def overlaps(self, *names: str) -> bool:
        """Return whether buckets overlap on the first known network among ``names``."""
        far = 2 * self.net(*names).one_way >= FAR_SECONDS
        return far if self.overlapping is None else self.overlapping

    def travel(self, names: Sequence[str], amount: Cost, n: int, buckets: int) -> float:
        """Return the seconds that ``amount``, split into ``buckets``, takes among n ranks on the
        first known network among ``names``, with the delay by lost packets."""
        net = self.net(*names)
        messages = amount.messages * buckets
        if not messages or not self.loss:
            return net.seconds(amount, buckets)
        last = min(amount.bytes / messages, net.rate * 2 * net.one_way / 8)
        some_lost = 1 - (1 - self.loss) ** (n * math.ceil(last / PACKET))
        late = RECOVERY * 2 * net.one_way - 8 * last / net.rate / 2
        return net.seconds(amount, buckets) + messages * late * some_lost
