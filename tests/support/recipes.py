"""The one table of recipes that tests read: each row has a recipe and its plain-loop reference.

A new recipe needs one row here. `all_recipes` has the rows that the golden digests name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch

import laconic as la
from laconic.algorithms.exchanges import LowRank
from laconic.algorithms.topology import Graph
from laconic.codecs import Int2, Int4

from tests.references import coded, gossip, outer, parameters
from tests.references.gradients import BUCKET, DDP, PowerSGD
from tests.references.problem import LAYERS, SHAPES, Recipe
from tests.support import own_updates
from tests.support.training import Job

Reference: TypeAlias = Callable[[int], Recipe]  # by the size of groups


@dataclass(frozen=True)
class Row:
    """``tags``: what the row is about, and what does not hold for it:

    golden: the golden digests have it, under this name
    grouped: it has rounds inside groups of workers
    gossip: a round sends to some workers, of which 3 or more make a graph
    whole: not for workers of several ranks, or other numbers come out with them
    lags: `consensus(mean=False)` is not a model that has seen all steps
    irregular: not every rank sends as many bytes
    moments: a round sends the optimizer's state
    conserves: without learning, rounds keep the mean of x
    equal: after every step all workers hold the same x
    variant: `make test` runs another row that is nearly this one (gossip: among more workers)
    """

    recipe: la.Recipe
    reference: Reference | None = None
    tags: frozenset[str] = frozenset()
    bound: float = 1e-10
    """The largest difference from the reference."""
    job: dict[str, Any] = field(default_factory=dict)
    """What the training must be like, as arguments of `Job`."""

    def group_size(self, n: int) -> int | None:
        """A size of groups of ``n`` workers."""
        return (2 if n % 2 == 0 else 1) if "grouped" in self.tags else None

    def job_of(self, workers: int, ranks: int = 1, **more: Any) -> Job:
        """Its training on so many processes, ``ranks`` to a worker."""
        options: dict[str, Any] = {"nprocs_per_node": ranks} if ranks > 1 else {}
        if (size := self.group_size(workers // ranks)) is not None:
            options["group_size"] = size
        given: dict[str, Any] = {"options": tuple(options.items()), **more}
        return Job(self.recipe, workers, **{**given, **self.job})

    def expected(self, job: Job) -> Recipe | None:
        size = dict(job.options).get("group_size", 1)
        return None if self.reference is None else self.reference(size)


def pairs(k: int, n: int) -> list[tuple[int, int]]:
    """The random pairs, as the references want to be told them."""
    edges = [(r, p) for r in range(n) for p in Graph("random").out_peers(r, n, k)]
    return [(a, b) for a, b in edges if a < b]


def first_basis(rank: int) -> Any:
    """Where PowerSGD begins."""
    shapes = [torch.Size(SHAPES[name]) for name in BUCKET]
    x = torch.zeros(sum(shape.numel() for shape in shapes), dtype=torch.float64)
    return LowRank(rank).shaped(shapes).init(x, slice(0, len(x)))["basis"].numpy()


ROWS: dict[str, Row] = {}


def row(
    name: str,
    recipe: la.Recipe,
    reference: Callable[..., Recipe] | None = None,
    tags: str = "",
    bound: float = 1e-10,
    **job: Any,
) -> None:
    """Add a row. ``reference`` takes the size of groups if it is grouped."""
    found = frozenset(tags.split())
    if reference is not None and "grouped" not in found:
        without = reference
        reference = lambda size: without()  # noqa: E731
    assert name not in ROWS
    ROWS[name] = Row(recipe, reference, found, bound, job)


def alike(
    name: str,
    tags: str,
    kinds: tuple[Any, Any],
    *given: Any,
    codec: tuple[Any, Any] | None = None,
    **options: Any,
) -> None:
    """A row whose recipe and reference take the same arguments, but for the ``codec`` of each.
    ``kinds``: what makes the recipe, and the reference."""
    make, loop = kinds
    own, its = ({} if codec is None else {"codec": codec[i]} for i in (0, 1))
    row(name, make(*given, **options, **own), partial(loop, *given, **options, **its), tags)


def adam(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(tensors, lr=0.01)


p_, o_, g_ = parameters, outer, gossip
SMALL, small = Int4(8), partial(coded.int4, 8)
BYTE, BLOCKS = ("int8", coded.int8(256)), (SMALL, small())
MUON = 1e-8
"""Muon's direction multiplies small singular values by up to 423, and with them rounding errors,
which depend on the processor: up to 3e-10 was seen."""


LOCAL, DILOCO = (la.local_sgd, p_.LocalSGD), (la.diloco, o_.DiLoCo)
SGP, DPSGD = (la.sgp, g_.SGP), (la.d_psgd, g_.DPSGD)


def by_adam(period: int) -> Recipe:
    return o_.DiLoCo(period, outer=o_.adam_outer(0.01))


def slow(name: str, base: Any, of: Any, period: int, tags: str = "", **options: Any) -> None:
    """A row of slowmo; ``options`` are alike in the recipe and in the reference, and ``of`` takes
    the size of groups if it is grouped."""
    unsharded: dict[str, Any] = {"sharded": False} if "unsharded" in name else {}
    momentum, lr = options.pop("momentum", 0.5), options.pop("lr", 1.0)
    if options.get("optimizer_state") == "average":
        tags += " moments"
    recipe = la.slowmo(base, period, momentum, lr, **options, **unsharded)

    def reference(*size: int) -> Recipe:
        return o_.SlowMo(of and of(*size), period, momentum, lr, **options)

    row(name, recipe, reference, f"lags {tags}")


# ---------------------------------------------------------------- recorded in the golden digests
row("ddp", la.ddp(), DDP, "golden equal")
row("ddp, coded", la.ddp(codec="int4"), lambda: DDP(coded.int4(256)), "golden whole equal")
low = la.power_sgd(2), lambda: PowerSGD(2, first_basis(2))
row("power_sgd", *low, "golden whole equal")
row("local_sgd", la.local_sgd(4), lambda: p_.LocalSGD(4), "golden conserves")
row("local_sgd, late", la.local_sgd(6, delay=4), lambda: p_.LocalSGD(6, 4), "golden conserves")
alike("local_sgd, average", "golden moments conserves", LOCAL, 3, optimizer_state="average")
alike("local_sgd, coded", "golden", LOCAL, 3, codec=BYTE)
row("post_local_sgd", la.post_local_sgd(5, 4), lambda: p_.post_local_sgd(5, 4), "golden conserves")
alike("hierarchical", "golden grouped conserves", (la.hierarchical, p_.Hierarchical), 2, 6)
local2 = la.local_sgd(2), lambda: p_.LocalSGD(2)
slow("slowmo", *local2, 5, "golden", momentum=0.4)
slow("slowmo, unsharded", None, None, 5, "golden", momentum=0.4)
slow("slowmo, no average", la.sgp(), g_.SGP, 5, "golden gossip", momentum=0.4, average=False)
late_sgp = la.sgp(delay=2), lambda: g_.SGP(delay=2)
slow("slowmo over late sgp", *late_sgp, 5, "golden gossip", momentum=0.4)
row("sgp", la.sgp(), g_.SGP, "golden gossip conserves")
alike("sgp, bipartite", "golden gossip irregular conserves", SGP, "bipartite_linear")
row("sgp, late", la.sgp(delay=2), lambda: g_.SGP(delay=2), "golden gossip conserves")
row("d_psgd", la.d_psgd(), g_.DPSGD, "golden gossip conserves")
row("d_psgd, late", la.d_psgd(delay=1), lambda: g_.DPSGD(delay=1), "golden gossip conserves")
row("easgd", la.easgd(3, pull=0.1), lambda: p_.EASGD(3, pull=0.1), "golden lags")
row("lsgd", la.lsgd(4, local_period=0), lambda: p_.LSGD(4), "golden")
groups = la.lsgd(4, local_period=2)
row("lsgd, groups", groups, lambda size: p_.LSGD(4, 2, group_size=size), "golden grouped")
row("diloco", la.diloco(5, momentum=0.5), lambda: o_.DiLoCo(5, 0.7, 0.5), "golden lags")
alike("diloco, late", "golden lags", DILOCO, 5, 0.7, 0.5, delay=4)
row("diloco, Adam", la.diloco(3, outer=adam), lambda: by_adam(3), "golden lags")
alike("diloco, loscar", "golden lags", DILOCO, 5, 1.0, 0.0, delay=4, merge="loscar")
STREAMING = partial(la.streaming_diloco, 6, 3, 3, momentum=0.5)
row("streaming_diloco", STREAMING(codec="int4"), None, "golden lags")
row("streaming_diloco, int2", STREAMING(codec="int2"), None, "golden lags")
late = la.diloco(5, momentum=0.6, outer="muon", delay=4)
row("diloco, muon, late", late, lambda: o_.DiLoCo(5, 0.7, 0.6, 4, muon=True), "golden lags", MUON)
coded_muon = la.diloco(5, momentum=0.6, outer="muon", codec="int2")
row("diloco, muon, coded", coded_muon, None, "golden lags")

# ---------------------------------------------------------------- other settings
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "delay=.* is longer than the period")
    row("nothing", (), Recipe, "conserves")
    row("local_sgd(1)", la.local_sgd(1), lambda: p_.LocalSGD(1), "conserves equal variant")
    alike("local_sgd(4, delay=2)", "conserves variant", LOCAL, 4, delay=2)
    row("local_sgd(3, delay=7)", la.local_sgd(3, delay=7), lambda: p_.LocalSGD(3, 7), "conserves")
    alike("local_sgd(1, delay=1)", "conserves variant", LOCAL, 1, delay=1)
    alike("local_sgd(4, reset)", "conserves", LOCAL, 4, optimizer_state="reset")
    alike("local_sgd(4, delay=3, coded)", "", LOCAL, 4, delay=3, codec=BLOCKS)
    begun = la.power_sgd(1, start=4), lambda: PowerSGD(1, first_basis(1), 4)
    row("power_sgd(1, start=4)", *begun, "whole equal")
    row("power_sgd(2, coded)", la.power_sgd(2, codec="int8"), None, "whole equal")
    for codec, expected, tags in (
        ("int8", coded.int8(256), "whole equal variant"),
        ("float16", coded.cast("float16"), "whole equal"),
        (SMALL, small(), "whole equal variant"),
    ):
        row(f"ddp({codec})", la.ddp(codec=codec), partial(DDP, expected), tags)

    slow("slowmo(None, 4)", None, None, 4, "variant")
    slow("slowmo(local_sgd(2), 6)", *local2, 6, "variant", momentum=0.6, lr=0.9)
    slow("slowmo(local_sgd(2), 6, unsharded)", *local2, 6, "variant")
    slow("slowmo(local_sgd(2), 6, no average)", *local2, 6, "variant", average=False)
    slow("slowmo(local_sgd(2), 6, reset)", *local2, 6, optimizer_state="reset")
    own, its = (partial(kind, 2, optimizer_state="average") for kind in LOCAL)
    slow("slowmo(local_sgd(2), 6, average)", own(), its, 6, optimizer_state="average")
    slow("slowmo(local_sgd(3, delay=4), 5)", la.local_sgd(3, delay=4), lambda: p_.LocalSGD(3, 4), 5)
    post = la.post_local_sgd(5, 2), lambda: p_.post_local_sgd(5, 2)
    slow("slowmo(post_local_sgd(5, 2), 4)", *post, 4, "variant")
    slow("slowmo(ddp, 3)", la.ddp(), DDP, 3, "equal")
    slow("slowmo(sgp(), 4)", la.sgp(), g_.SGP, 4, "gossip variant", momentum=0.6)
    slow("slowmo(sgp(delay=2), 5)", *late_sgp, 5, "gossip variant")
    uneven = (la.sgp("bipartite_linear", delay=2), lambda: g_.SGP("bipartite_linear", delay=2))
    slow("slowmo(sgp(bipartite), 5)", *uneven, 5, "gossip irregular variant")
    slow("slowmo(sgp(bipartite), 5, no average)", *uneven, 5, "gossip irregular", average=False)
    slow("slowmo(sgp(), 4, reset)", la.sgp(), g_.SGP, 4, "gossip variant", optimizer_state="reset")
    symmetric = la.d_psgd(delay=1), lambda: g_.DPSGD(delay=1)
    slow("slowmo(d_psgd(delay=1), 4)", *symmetric, 4, "gossip variant")
    slow("slowmo(easgd, 6)", la.easgd(2, pull=0.2), lambda: p_.EASGD(2, pull=0.2), 6, "variant")
    slow("slowmo(lsgd(2), 4)", la.lsgd(2, local_period=0), lambda: p_.LSGD(2), 4, "variant")
    row(
        "slowmo(local_sgd(2), 6, coded)",
        la.slowmo(la.local_sgd(2, codec=SMALL), 6, 0.6, 0.8, codec="int8"),
        lambda: o_.SlowMo(p_.LocalSGD(2, codec=small()), 6, 0.6, 0.8, codec=coded.int8(256)),
        "lags",
    )
    inner = la.hierarchical(2, 3), lambda size: p_.Hierarchical(2, 3, size)
    slow("slowmo(hierarchical(2, 3), 6)", *inner, 6, "grouped variant")
    leaders = la.lsgd(3, local_period=1), lambda size: p_.LSGD(3, 1, group_size=size)
    slow("slowmo(lsgd(3, local_period=1), 6)", *leaders, 6, "grouped")

    def over(name: str, base: Any, of: Any, period: int, tags: str = "", **options: Any) -> None:
        """A row of outer_step."""
        recipe = la.outer_step(base, period, 0.9, 0.5, **options)
        muon, state = options.get("outer") == "muon", options.get("optimizer_state", "keep")
        codec = small() if "codec" in options else None
        outer = o_.DiLoCo(period, 0.9, 0.5, muon=muon, codec=codec)
        reference = lambda: o_.OuterStep(of(), outer, state)  # noqa: E731
        row(f"outer_step({name})", recipe, reference, f"lags {tags}", MUON if muon else 1e-10)

    over("ddp, 3", la.ddp(), DDP, 3, "equal")
    rough = la.ddp(codec=SMALL), lambda: DDP(small())
    over("ddp, coded, 2, muon", *rough, 2, "equal whole", outer="muon")
    over("power_sgd, 3, reset", *low, 3, "equal whole", optimizer_state="reset")
    over("local_sgd(2), 6", *local2, 6, "moments", optimizer_state="average")
    over("local_sgd(2), 6, coded", *local2, 6, codec=SMALL)
    over("sgp(bipartite), 5, muon", *uneven, 5, "gossip irregular variant", outer="muon")
    over("easgd, 6", la.easgd(2, pull=0.2), lambda: p_.EASGD(2, pull=0.2), 6)

    def own_steps(name: str, base: Any, of: Any, tags: str = "", **options: Any) -> None:
        """A row of outer_step whose steps are each worker's own."""
        recipe = la.outer_step(base, 4, 0.9, 0.5, average=False, **options)
        muon, state = options.get("outer") == "muon", options.get("optimizer_state", "keep")
        reference = lambda: o_.OwnStep(of(), 4, 0.9, 0.5, muon, state)  # noqa: E731
        row(f"outer_step({name}, own)", recipe, reference, tags, MUON if muon else 1e-10)

    at_once: dict[str, Any] = {"lr": 1.0, "momentum": 0.3, "merge": "loscar"}
    far = la.streaming_diloco(6, 2, 4, codec=None, by="layers", **at_once)
    parts = partial(o_.DiLoCo, *(6, 1.0, 0.3, 4), merge="loscar", fragments=LAYERS)
    own_steps("streaming_diloco(6)", far, parts, "lags", outer="muon")
    own_steps("local_sgd(5)", la.local_sgd(5), lambda: p_.LocalSGD(5), "")
    own_steps("sgp()", la.sgp(), g_.SGP, "gossip", outer="muon")

    graphs: list[tuple[str, dict[str, Any], str]] = [
        ("directed_exponential", {}, ""),
        ("complete", {}, "variant"),
        ("bipartite_exponential", {"delay": 2}, ""),
        ("directed_linear", {"peers": 3}, "variant"),
        ("ring", {"peers": 2, "delay": 3}, ""),
        ("exponential", {"peers": 2}, "variant"),
    ]
    irregular = "gossip irregular conserves"
    for name, options, tags in graphs:
        alike(f"sgp({name}, {options})", f"{irregular} {tags}", SGP, name, **options)
    drawn = la.sgp("random", delay=1), partial(g_.SGP, "random_pairs", delay=1, pairing=pairs)
    row("sgp(random, delay=1)", *drawn, irregular)
    alike("d_psgd(exponential, delay=2)", f"{irregular} variant", DPSGD, "exponential", delay=2)
    alike("d_psgd(bipartite_linear)", irregular, DPSGD, "bipartite_linear")
    even = la.d_psgd("random"), partial(g_.DPSGD, "random_pairs", pairing=pairs)
    row("d_psgd(random)", *even, f"{irregular} variant")
    alike("easgd(2, 0.5, pull=0.3)", "lags", (la.easgd, p_.EASGD), 2, 0.5, pull=0.3)
    alike("easgd(3, 0.7, coded)", "lags", (la.easgd, p_.EASGD), 3, 0.7, codec=BLOCKS)
    given: dict[str, Any] = {"pull": 0.4, "drift": 0.3, "window": 3}
    row("lsgd(4, pulls)", la.lsgd(4, local_period=0, **given), partial(p_.LSGD, 4, **given))
    local: dict[str, Any] = {"local_drift": 0.4, "local_pull": 0.3}
    score: dict[str, Any] = {"score": "gradient", "score_includes_pulls": False}
    scored = partial(p_.LSGD, 4, 2, **local, **score)
    led = la.lsgd(4, local_period=2, **local)
    row("lsgd(4, by gradients)", led, lambda n: scored(group_size=n), "grouped", reports=False)
    row("diloco(4)", la.diloco(4), lambda: o_.DiLoCo(4), "lags variant")
    row("diloco(4, unsharded)", la.diloco(4, sharded=False), lambda: o_.DiLoCo(4), "lags variant")
    alike("diloco(4, no momentum)", "lags", DILOCO, 4, 0.5, 0.0)
    unsharded = la.diloco(4, outer=adam, sharded=False)
    row("diloco(4, Adam, unsharded)", unsharded, lambda: by_adam(4), "lags")
    alike("diloco(4, delay=2, coded)", "lags", DILOCO, 4, 0.6, 0.8, delay=2, mix=0.3, codec=BLOCKS)
    for own_codec, codec_of, tags in (
        (None, None, "lags variant"),
        (SMALL, small(), "lags"),
        (Int2(4), coded.int2(4), "lags"),
    ):
        row(
            f"streaming_diloco(4, 2, {own_codec})",
            la.streaming_diloco(*(4, 2, 2, 0.3, own_codec), lr=0.6, momentum=0.8, by="layers"),
            partial(o_.DiLoCo, *(4, 0.6, 0.8, 2, 0.3), codec=codec_of, fragments=LAYERS),
            tags,
        )
    recipe = la.streaming_diloco(3, 1, 2, codec=None, outer="muon")
    muon = partial(o_.DiLoCo, 3, 1.0, 0.6, 2, merge="loscar", muon=True)
    row("streaming_diloco(3, 1, muon)", recipe, muon, "lags", MUON)
    muon = partial(o_.DiLoCo, 4, 0.7, 0.6, muon=True)
    row("diloco(4, muon)", la.diloco(4, 0.7, 0.6, outer="muon"), muon, "lags variant", MUON)


# ---------------------------------------------------------------- of a user's own
coarse = la.Round(la.every(3), own_updates.Coarse(), la.exchanges.Mean())
row("own, coarse", (coarse,), lambda: own_updates.CoarseLoop(3))
for delay in (0, 4):
    row(
        f"own, delay={delay}",
        (la.Round(la.every(3), own_updates.Homemade(), la.exchanges.Mean(), delay=delay),),
        partial(own_updates.HomemadeLoop, 3, delay),
        "lags" if delay else "variant",
    )


def tagged(*tags: str) -> list[str]:
    """The names of the rows that have all of ``tags``."""
    return [name for name, each in ROWS.items() if each.tags >= {*tags}]
