"""What a plan describes: sites with workers, failures, and prices.

Units are seconds, bit/s, bytes. Latencies are round trips.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal, TypeVar, get_args

from laconic.advisor.numbers import facts_from
from laconic.errors import check_choice, check_float, check_int
from laconic.links.cost import Shared
from laconic.policy.facts import BACKWARD, Facts
from laconic.units import format_share

T = TypeVar("T")
Policy = Literal["elastic", "static"]

SPREAD = 0.05
"""Default standard deviation of a worker's step times, as a share of their mean. It is an
assumption."""
MOST_LOSS = 0.1
"""Share of lost packets above which the model does not hold: TCP comes nearly to a halt."""


@dataclass(frozen=True)
class Site:
    """A place with ``workers`` that see the same network.

    ``bandwidth``: bit/s at which each worker sends. ``download``: bit/s at which it receives; None:
    as it sends. ``uplink``: bit/s that all its workers share toward other sites; None: no limit.
    ``latency``: a round trip between its workers. ``step_time``: seconds of a step of its workers;
    None: the cluster's. ``price``: of a worker per hour.
    """

    name: str
    workers: int
    bandwidth: float
    uplink: float | None = None
    latency: float = 0.0
    step_time: float | None = None
    price: float = 0.0
    download: float | None = None

    def __post_init__(self) -> None:
        check_int("workers", self.workers, 1)
        check_float("bandwidth", self.bandwidth, 0.0, strict=True)
        for name in ("uplink", "download", "step_time"):
            if getattr(self, name) is not None:
                check_float(name, getattr(self, name), 0.0, strict=True)
        check_float("latency", self.latency, 0.0)
        check_float("price", self.price, 0.0)

    @property
    def receives(self) -> float:
        """The bit/s at which each worker receives."""
        return self.bandwidth if self.download is None else self.download


@dataclass(frozen=True)
class Failures:
    """What fails, and what happens then.

    ``mtbf``: mean seconds between two failures of one worker, while it runs; infinite: never. They
    are exponentially distributed. ``repair``: seconds until a failed machine is available again.
    ``restart``: seconds until its process runs then. ``detection``: seconds until the others notice
    a loss; None: the rule for a host that falls silent (docs/elastic.md).

    ``policy``: in an ``elastic`` run the others go on, and the worker joins when it is back. A
    ``static`` run starts again from its checkpoint, when the machine is back. ``checkpoint``: steps
    between two checkpoints; None: a run that is lost begins anew. ``save``: seconds to write one.
    ``min_workers``: with fewer, an elastic run waits.

    ``at``: workers, by number, that fail at these times, beside those that fail at random.
    """

    mtbf: float = math.inf
    repair: float = 600.0
    restart: float = 30.0
    detection: float | None = None
    policy: Policy = "elastic"
    checkpoint: int | None = None
    save: float = 0.0
    min_workers: int = 1
    at: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not self.mtbf > 0:
            raise ValueError(f"mtbf must be greater than 0, not {self.mtbf!r}")
        for name in ("repair", "restart", "save"):
            check_float(name, getattr(self, name), 0.0)
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

    ``params`` of ``dtype``. ``step_time``: mean seconds of a step without communication;
    ``spread``: the standard deviation of a worker's step times, as a share of that (lognormal).
    ``backward_share``: the share of a step in which gradients become available. ``latency``: a
    round trip between workers of different sites. ``jitter``: it takes up to so many seconds more
    or less, and each message half of that, uniformly. ``loss``: share of the packets that are lost,
    at most 10%. ``egress``: price of 10**9 bytes that leave a site."""

    params: int
    sites: tuple[Site, ...]
    step_time: float = 1.0
    dtype: str = "float32"
    spread: float = SPREAD
    backward_share: float = BACKWARD
    latency: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    egress: float = 0.0
    failures: Failures = field(default_factory=Failures)

    def __post_init__(self) -> None:
        check_int("params", self.params, 1)
        if not self.sites:
            raise ValueError("sites must have at least one site")
        names = [site.name for site in self.sites]
        if len({*names}) < len(names):
            raise ValueError(f"sites must have different names, not {', '.join(names)}")
        check_float("step_time", self.step_time, 0.0, strict=True)
        check_float("backward_share", self.backward_share, 0.0, most=1.0)
        for name in ("spread", "latency", "jitter", "egress"):
            check_float(name, getattr(self, name), 0.0)
        if check_float("loss", self.loss, 0.0) > MOST_LOSS:
            raise ValueError(
                f"loss must be at most {MOST_LOSS:.0%}, not {format_share(self.loss)}: with more, "
                "TCP comes nearly to a halt, and the model of lost packets does not hold"
            )
        if self.failures.min_workers > self.workers:
            raise ValueError(
                f"failures.min_workers must be at most the number of workers, {self.workers}, not "
                f"{self.failures.min_workers}"
            )

    @property
    def workers(self) -> int:
        """How many there are, on all sites."""
        return sum(self.everybody)

    @property
    def everybody(self) -> tuple[int, ...]:
        """The number of workers on each site."""
        return tuple(site.workers for site in self.sites)

    @cached_property
    def site_of(self) -> tuple[int, ...]:
        """The index of each worker's site. Ranks follow the order of the sites."""
        return _by_worker(range(len(self.sites)), self.everybody)

    @cached_property
    def steps(self) -> tuple[float, ...]:
        """The mean seconds of a step on each worker."""
        return _by_worker(self._own_steps(), self.everybody)

    def _own_steps(self) -> list[float]:
        return [self.step_time if site.step_time is None else site.step_time for site in self.sites]

    def facts(self, present: Sequence[int] | None = None) -> Facts:
        """Return what the cost model needs, with ``present`` workers on each site (None: all)."""
        counts = self.everybody if present is None else tuple(present)
        n, here = sum(counts), [s for s, count in enumerate(counts) if count]
        sites = [self.sites[s] for s in here]
        latencies = [site.latency for s, site in zip(here, sites, strict=True) if counts[s] > 1]
        if len(here) > 1:
            latencies.append(self.latency)
        first = [*accumulate((counts[s] for s in here), initial=0)]
        shared = [
            Shared(counts[s], n - counts[s], site.uplink, begin)
            for s, site, begin in zip(here, sites, first[:-1], strict=True)
            if site.uplink is not None and n > counts[s]
        ]
        steps = self._own_steps()
        known = facts_from(
            params=self.params,
            step_time=max(steps[s] for s in here),
            bandwidth=min(min(site.bandwidth, site.receives) for site in sites),
            one_way=max(latencies, default=0.0) / 2,
            workers=max(n, 2),
            backward_share=self.backward_share,
            dtype=self.dtype,
            loss=self.loss,
        )
        unlike = len({rate for site in sites for rate in (site.bandwidth, site.receives)}) > 1
        rates = _by_worker([site.bandwidth for site in self.sites], counts)
        receives = _by_worker([site.receives for site in self.sites], counts)
        computes = _by_worker(steps, counts)
        return replace(
            known,
            workers=n,
            rates=rates if unlike else (),
            receives=receives if unlike else (),
            computes=computes if len({*computes}) > 1 else (),
            shared=tuple(shared),
        )


def _by_worker(of: Sequence[T], present: Sequence[int]) -> tuple[T, ...]:
    """Return what each worker has, by site."""
    return tuple(value for value, count in zip(of, present, strict=True) for _ in range(count))


def uniform(
    workers: int,
    sites: int,
    *,
    bandwidth: float,
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
        Site(f"site{k}", count, bandwidth, uplink, inside, price=price, download=download)
        for k, count in enumerate(counts, 1)
    )
