"""What a plan describes: sites with workers, the links between them, failures, and prices.

Units are seconds, bit/s, bytes. Latencies are one way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal, get_args

from laconic.advisor.numbers import facts_from
from laconic.errors import check_choice, check_float, check_int
from laconic.links.cost import Shared
from laconic.policy.facts import BACKWARD, Facts
from laconic.units import format_share

Distribution = Literal["lognormal", "normal", "exponential", "constant"]
Policy = Literal["elastic", "static"]

SPREAD = 0.05
"""Default standard deviation of a worker's step times, as a share of their mean. It is an
assumption: measure yours with ``--from-metrics``."""
MOST_LOSS = 0.1
"""Share of lost packets above which the model does not hold: TCP comes nearly to a halt."""


@dataclass(frozen=True)
class Site:
    """A place with ``workers`` that see the same network.

    ``rate``: bit/s at which each worker sends. ``download``: bit/s at which it receives; None: as
    it sends. ``uplink``: bit/s that all its workers share toward other sites; None: no limit.
    ``latency``: a round trip between its workers. ``step``: seconds of a step of its workers; None:
    the cluster's. ``price``: of a worker per hour.
    """

    name: str
    workers: int
    rate: float
    uplink: float | None = None
    latency: float = 0.0
    step: float | None = None
    price: float = 0.0
    download: float | None = None

    def __post_init__(self) -> None:
        check_int("workers", self.workers, 1)
        check_float("rate", self.rate, 0.0, strict=True)
        for name in ("uplink", "download"):
            if getattr(self, name) is not None:
                check_float(name, getattr(self, name), 0.0, strict=True)
        check_float("latency", self.latency, 0.0)
        if self.step is not None:
            check_float("step", self.step, 0.0, strict=True)
        check_float("price", self.price, 0.0)

    @property
    def receives(self) -> float:
        """The bit/s at which each worker receives."""
        return self.rate if self.download is None else self.download


@dataclass(frozen=True)
class Path:
    """The connection ``between`` two sites, where it differs from the others. ``latency``: a round
    trip. ``rate``: bit/s that all messages in one direction share; None: no limit."""

    between: tuple[str, str]
    latency: float | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.latency is not None:
            check_float("latency", self.latency, 0.0)
        if self.rate is not None:
            check_float("rate", self.rate, 0.0, strict=True)


@dataclass(frozen=True)
class Failures:
    """What fails, and what happens then.

    ``mtbf``: mean seconds between two failures of one chip, while it runs; infinite: never. They
    are exponentially distributed. A worker has `Cluster.chips`. ``repair``: seconds until a failed
    machine is available again; ``repairs`` is their distribution. ``restart``: seconds until its
    process runs then. ``detection``: seconds until the others notice a loss; None: the rule for a
    host that falls silent (docs/elastic.md).

    ``policy``: in an ``elastic`` run the others go on, and the worker joins when it is back. A
    ``static`` run starts again from its checkpoint, when the machine is back. ``checkpoint``: steps
    between two checkpoints; None: a run that is lost begins anew. ``save``: seconds to write one.
    ``min_workers``: with fewer, an elastic run waits.

    With `Cluster.slices`, a failure costs a worker a slice, and not its state: it pauses for
    ``reconfigure`` seconds and continues with the slices left, and pauses again when the slice is
    back. Failures and repairs during a pause do not make it longer.

    ``at``: workers, by number, that fail at these times, beside those that fail at random.
    """

    mtbf: float = math.inf
    repair: float = 600.0
    repairs: Literal["exponential", "constant"] = "constant"
    restart: float = 30.0
    detection: float | None = None
    policy: Policy = "elastic"
    checkpoint: int | None = None
    save: float = 0.0
    min_workers: int = 1
    reconfigure: float = 30.0
    at: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not self.mtbf > 0:
            raise ValueError(f"mtbf must be greater than 0, not {self.mtbf!r}")
        for name in ("repair", "restart", "save", "reconfigure"):
            check_float(name, getattr(self, name), 0.0)
        check_choice("repairs", self.repairs, ("exponential", "constant"))
        if self.detection is not None:
            check_float("detection", self.detection, 0.0)
        check_choice("policy", self.policy, get_args(Policy))
        if self.checkpoint is not None:
            check_int("checkpoint", self.checkpoint, 1)
        check_int("min_workers", self.min_workers, 1)

    @property
    def happen(self) -> bool:
        """Whether there are any."""
        return bool(self.at) or math.isfinite(self.mtbf)


@dataclass(frozen=True)
class Cluster:
    """Workers that train a model together.

    ``parameters`` of ``dtype``. ``step``: mean seconds of a step without communication; ``spread``:
    the standard deviation of a worker's step times, as a share of that, with this ``distribution``.
    ``backward``: the share of a step in which gradients become available. ``latency``: a round trip
    between workers of different sites. ``jitter``: it takes up to so many seconds more or less, and
    each message half of that, uniformly. ``loss``: share of the packets that are lost, at most 10%.
    ``tokens``: in a step of one worker, for the loss. ``chips`` and ``slices`` of a worker: see
    `Failures`. ``gigabyte``: price of 10**9 bytes that leave a site. ``measured``: costs to use in
    place of those that follow from the numbers."""

    parameters: int
    sites: tuple[Site, ...]
    step: float = 1.0
    dtype: str = "float32"
    spread: float = SPREAD
    distribution: Distribution = "lognormal"
    backward: float = BACKWARD
    latency: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    links: tuple[Path, ...] = ()
    tokens: int | None = None
    chips: int = 1
    slices: int = 1
    gigabyte: float = 0.0
    failures: Failures = field(default_factory=Failures)
    measured: Facts | None = None

    def __post_init__(self) -> None:
        check_int("parameters", self.parameters, 1)
        if not self.sites:
            raise ValueError("sites must have at least one site")
        names = [site.name for site in self.sites]
        if len({*names}) < len(names):
            raise ValueError(f"sites must have different names, not {', '.join(names)}")
        check_float("step", self.step, 0.0, strict=True)
        check_float("spread", self.spread, 0.0)
        check_choice("distribution", self.distribution, get_args(Distribution))
        check_float("backward", self.backward, 0.0, most=1.0)
        for name in ("latency", "jitter", "gigabyte"):
            check_float(name, getattr(self, name), 0.0)
        if check_float("loss", self.loss, 0.0) > MOST_LOSS:
            raise ValueError(
                f"loss must be at most {MOST_LOSS:.0%}, not {format_share(self.loss)}: with more, "
                "TCP comes nearly to a halt, and the model of lost packets does not hold"
            )
        for name in ("chips", "slices"):
            check_int(name, getattr(self, name), 1)
        if self.slices > self.chips:
            raise ValueError(f"slices must be at most chips, {self.chips}, not {self.slices}")
        seen: dict[frozenset[str], int] = {}
        for k, link in enumerate(self.links):
            for end in link.between:
                check_choice(f"links[{k}].between", end, names)
            a, b = link.between
            if a == b:
                raise ValueError(f"links[{k}].between must be two different sites, not {a} twice")
            before = seen.setdefault(frozenset(link.between), k)
            if before != k:
                raise ValueError(
                    f"links[{k}].between must be a pair without another link, and links[{before}] "
                    f"is between {a} and {b} too"
                )
        if self.failures.min_workers > self.workers:
            raise ValueError(
                f"failures.min_workers must be at most the number of workers, {self.workers}, not "
                f"{self.failures.min_workers}"
            )

    @property
    def workers(self) -> int:
        """How many there are, on all sites."""
        return sum(site.workers for site in self.sites)

    @cached_property
    def site_of(self) -> tuple[int, ...]:
        """The index of each worker's site. Ranks follow the order of the sites."""
        return tuple(s for s, site in enumerate(self.sites) for _ in range(site.workers))

    @cached_property
    def steps(self) -> tuple[float, ...]:
        """The mean seconds of a step on each worker."""
        own = [self.step if site.step is None else site.step for site in self.sites]
        return tuple(own[s] for s in self.site_of)

    @property
    def everybody(self) -> tuple[int, ...]:
        """The number of workers on each site."""
        return tuple(site.workers for site in self.sites)

    @property
    def deterministic(self) -> bool:
        """Whether all runs are alike."""
        varies = self.spread and self.distribution != "constant"
        return not (varies or self.jitter or self.failures.happen)

    def facts(self, present: Sequence[int] | None = None) -> Facts:
        """Return what the cost model needs, with ``present`` workers on each site (None: all)."""
        return _facts(self, self.everybody if present is None else tuple(present))

    def link(self, a: int, b: int) -> Path:
        """The connection between two sites, by index."""
        if not self.links:
            return Path(("", ""))
        ends = {self.sites[a].name, self.sites[b].name}
        return next((each for each in self.links if {*each.between} == ends), Path(("", "")))


def _facts(cluster: Cluster, present: tuple[int, ...]) -> Facts:
    n, here = sum(present), [s for s, count in enumerate(present) if count]
    sites = cluster.sites
    begins = dict(zip(here, accumulate((present[s] for s in here), initial=0), strict=False))
    latencies = [sites[s].latency for s in here if present[s] > 1]
    shared = []
    for a in here:
        uplink = sites[a].uplink
        if uplink is not None and n > present[a]:
            shared.append(Shared(present[a], n - present[a], uplink, begins[a]))
        for b in here:
            if a == b:
                continue
            link = cluster.link(a, b)
            latencies.append(cluster.latency if link.latency is None else link.latency)
            if link.rate is not None:
                shared.append(Shared(present[a], present[b], link.rate, begins[a], begins[b]))
    rate = min(min(sites[s].rate, sites[s].receives) for s in here)
    one_way = max(latencies, default=0.0) / 2
    steps = {s: cluster.step if (own := sites[s].step) is None else own for s in here}
    compute = max(steps.values())
    if cluster.measured is None:
        base = facts_from(
            params=cluster.parameters,
            step_time=compute,
            bandwidth=rate,
            one_way=one_way,
            workers=max(n, 2),
            backward_share=cluster.backward,
            dtype=cluster.dtype,
            loss=cluster.loss,
        )
    else:
        base = replace(cluster.measured, compute=compute, skew=0.0)
    rates = {s: sites[s].rate for s in here}
    receives = {s: sites[s].receives for s in here}
    unlike = len({*rates.values(), *receives.values()}) > 1
    known = {k: replace(net, rate=min(net.rate, rate)) for k, net in base.nets.items()}
    return replace(
        base,
        workers=n,
        compute=compute,
        rate=rate,
        one_way=one_way,
        nets=known,
        rates=_by_worker(rates, present) if unlike else (),
        receives=_by_worker(receives, present) if unlike else (),
        computes=_by_worker(steps, present) if len({*steps.values()}) > 1 else (),
        shared=tuple(shared),
    )


def _by_worker(of: dict[int, float], present: Sequence[int]) -> tuple[float, ...]:
    """Return what each worker has, by site."""
    return tuple(value for s, value in of.items() for _ in range(present[s]))


def uniform(
    workers: int,
    sites: int,
    *,
    rate: float,
    latency: float,
    uplink: float | None = None,
    download: float | None = None,
    price: float = 0.0,
) -> tuple[Site, ...]:
    """Return ``sites`` with about equally many of the ``workers``. ``latency``: a round trip
    inside a site if there is only one; otherwise messages inside a site take no time."""
    check_int("workers", workers, 1)
    if check_int("sites", sites, 1) > workers:
        raise ValueError(f"sites must be at most the number of workers, {workers}, not {sites}")
    inside = latency if sites == 1 else 0.0
    counts = [workers // sites + (k < workers % sites) for k in range(sites)]
    return tuple(
        Site(f"site{k}", count, rate, uplink, inside, price=price, download=download)
        for k, count in enumerate(counts, 1)
    )
