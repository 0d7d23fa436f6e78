"""The references' problem under rounds with a quorum, in virtual time or in processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import laconic as la

from tests.references import reference, reference_quorum
from tests.support import training
from tests.support.training import Job, build


@dataclass(frozen=True)
class Ran:
    """What one worker had: ``trace``, its parameters after each step; ``final``, after finish();
    ``closings``: of rank 0."""

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
) -> Ran:
    """Take ``steps`` steps, or fewer if ``until`` says so, then finish. ``before`` is called before
    each step."""
    model, optimizer = build(job, rank)
    sync = la.attach(model, optimizer, job.recipe, link=link)
    data, trace = job.data()[rank], []
    for t in range(1, steps + 1):
        if until is not None and until():
            break
        if before is not None:
            before(t)
        training.step(job, model, optimizer, data[t - 1], t)
        trace.append(training.values(model))
    closings = sync.closings
    with sync:
        pass
    return Ran(trace, training.values(model), sync.closings or closings)


def simulated(
    job: Job,
    steps: Sequence[int],
    seconds: Sequence[float] | None,
    closings: Any = None,
    messages: Sequence[float] | None = None,
) -> list[Ran]:
    return la.simulate(
        lambda rank: work(job, rank, steps[rank]),
        workers=job.workers,
        step_seconds=seconds,
        message_seconds=messages,
        closings=closings,
    )


def expected(
    job: Job,
    recipe: reference_quorum.Quorum,
    steps: Sequence[int],
    seconds: Sequence[float],
    messages: Sequence[float] | None = None,
) -> reference_quorum.Result:
    rules = training.OPTIMIZERS[job.optimizer][1]
    init = reference.initial(job.workers, job.seed)
    return reference_quorum.run(recipe, seconds, steps, rules, job.lr, job.data(), init, messages)


def gap(runs: Sequence[Ran], wanted: reference_quorum.Result) -> float:
    """The largest difference; infinity if some step is missing."""
    worst = 0.0
    for ran, trace in zip(runs, wanted.traces, strict=True):
        if len(ran.trace) != len(trace):
            return float("inf")
        pairs = [*zip(ran.trace, trace, strict=True), (ran.final, wanted.final)]
        for own, want in pairs:
            worst = max(worst, *(float(abs(own[k] - want[k]).max()) for k in reference.NAMES))
    return worst


def same(one: Sequence[Ran], other: Sequence[Ran]) -> bool:
    """Whether two runs are equal to the last bit."""
    return all(
        (own[k] == want[k]).all()
        for a, b in zip(one, other, strict=True)
        for own, want in [*zip(a.trace, b.trace, strict=True), (a.final, b.final)]
        for k in reference.NAMES
    )
