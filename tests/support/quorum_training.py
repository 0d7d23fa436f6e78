"""The references' problem under rounds with a quorum, in virtual time or in processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import laconic as la
from laconic.algorithms.exchanges import QuorumMean
from laconic.algorithms.updates import OuterStep, SlowMomentum

from tests.references import coded, problem
from tests.references import quorum as reference
from tests.references.problem import LAYERS
from tests.references.quorum import Quorum
from tests.support import training
from tests.support.training import Job, build

DELAYED: dict[str, Any] = {"rule": "delayed", "lr": 0.7, "momentum": 0.5}
NAIVE = (la.Round(la.every(4), OuterStep(0.5, 0.6), QuorumMean(1)),)
adam = partial(torch.optim.Adam, lr=0.03)
INT8, INT4 = la.codecs.Int8(8), la.codecs.Int4(8)
diloco, streaming = partial(la.diloco, momentum=0.5), partial(la.streaming_diloco, momentum=0.5)
averaged = partial(la.diloco, lr=1.0, momentum=0.0)
"""Local SGD."""
SLOW = la.Round(la.every(4), SlowMomentum(0.5, 0.9), QuorumMean(2), optimizer_state="reset")
ROWS: dict[str, tuple[la.Recipe, Quorum]] = {
    "local_sgd": (averaged(4, quorum=3), Quorum(4, 3)),
    "local_sgd, first come": (averaged(4, quorum=1), Quorum(4, 1)),
    "local_sgd, grace": (averaged(4, quorum=2, grace=1.5), Quorum(4, 2, 1.5)),
    "local_sgd, own pace": (averaged(6, pace="own"), Quorum(6, 4, own=True)),
    "local_sgd, own pace, quorum": (
        averaged(6, quorum=2, grace=0.5, pace="own"),
        Quorum(6, 2, 0.5, own=True),
    ),
    "local_sgd, int8": (averaged(4, quorum=2, codec=INT8), Quorum(4, 2, codec=coded.int8(8))),
    "diloco": (diloco(4, quorum=3), Quorum(4, 3, **DELAYED)),
    "diloco, own pace": (diloco(6, quorum=3, pace="own"), Quorum(6, 3, own=True, **DELAYED)),
    "diloco, grace": (
        diloco(4, quorum=2, grace=5.0),
        Quorum(4, 2, 5.0, **DELAYED),
    ),
    "diloco, Nesterov at each arrival": (
        NAIVE,
        Quorum(4, 1, rule="nesterov", lr=0.5, momentum=0.6),
    ),
    "diloco, int8, own pace": (
        diloco(6, quorum=2, grace=0.5, pace="own", codec=INT8),
        Quorum(6, 2, 0.5, True, codec=coded.int8(8), **DELAYED),
    ),
    "slowmo, reset": ((SLOW,), Quorum(4, 2, rule="slow", lr=0.9, momentum=0.5, reset=True)),
    "streaming_diloco": (
        streaming(5, 2, 0, codec=None, quorum=2, by="layers"),
        Quorum(5, 2, fragments=LAYERS, **DELAYED),
    ),
    "streaming_diloco, int4": (
        streaming(5, 2, 0, codec=INT4, quorum=2, by="layers"),
        Quorum(5, 2, fragments=LAYERS, codec=coded.int4(8), **DELAYED),
    ),
    "streaming_diloco, own pace, grace": (
        streaming(6, 2, 0, codec=None, quorum=3, grace=0.6, pace="own", by="layers"),
        Quorum(6, 3, 0.6, own=True, fragments=LAYERS, **DELAYED),
    ),
}
"""Recipes whose rounds close with a quorum, and the same for the reference."""


@dataclass(frozen=True)
class Ran:
    """What one worker had: ``trace``, its parameters after each step; ``final``, after finish();
    ``closings``: the rounds."""

    trace: list[Any]
    final: Any
    closings: list[Any]


def work(
    job: Job,
    rank: int,
    steps: int,
    *,
    link: la.links.Link | None = None,
    before: Callable[[int], None] | None = None,
    until: Callable[[], bool] | None = None,
    device: torch.device | str = "cpu",
    reloads: bool = False,
    **more: Any,
) -> Ran:
    """Take ``steps`` steps, or fewer if ``until`` says so, then finish. ``before`` is called before
    each step. ``reloads``: the state is saved and loaded halfway."""
    model, optimizer = build(job, rank, device)
    sync = la.attach(model, optimizer, job.recipe, link=link, **more)
    data, trace = job.data()[rank], []
    for t in range(1, steps + 1):
        if until is not None and until():
            break
        if before is not None:
            before(t)
        if reloads and t == steps // 2:
            with sync.consensus():  # after which all have seen the same rounds
                pass
            sync.load_state_dict(sync.state_dict())
        training.step(job, model, optimizer, data[t - 1], t)
        trace.append(training.values(model))
    with sync:
        pass
    return Ran(trace, training.values(model), sync.closings)


def simulated(
    job: Job,
    steps: Sequence[int],
    seconds: Sequence[float] | None,
    closings: Any = None,
    **more: Any,
) -> list[Ran]:
    return la.simulate(
        lambda rank: work(job, rank, steps[rank], **more),
        workers=job.workers,
        step_seconds=seconds,
        closings=closings,
    )


def expected(
    job: Job,
    recipe: reference.Quorum,
    steps: Sequence[int],
    seconds: Sequence[float],
) -> reference.Result:
    rules = training.OPTIMIZERS[job.optimizer][1]
    init = problem.initial(job.workers, job.seed)
    return reference.run(recipe, seconds, steps, rules, job.lr, job.data(), init)


def gap(runs: Sequence[Ran], wanted: reference.Result) -> float:
    """The largest difference; infinity if some step is missing."""
    worst = 0.0
    for ran, trace in zip(runs, wanted.traces, strict=True):
        if len(ran.trace) != len(trace):
            return float("inf")
        pairs = [*zip(ran.trace, trace, strict=True), (ran.final, wanted.final)]
        for own, want in pairs:
            worst = max(worst, *(float(abs(own[k] - want[k]).max()) for k in problem.NAMES))
    return worst


def same(one: Sequence[Ran], other: Sequence[Ran]) -> bool:
    """Whether two runs are equal to the last bit."""
    return all(
        (own[k] == want[k]).all()
        for a, b in zip(one, other, strict=True)
        for own, want in [*zip(a.trace, b.trace, strict=True), (a.final, b.final)]
        for k in problem.NAMES
    )
