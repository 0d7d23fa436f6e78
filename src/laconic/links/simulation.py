"""`simulate`: runs workers as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from laconic.errors import check_float, check_int
from laconic.links.elastic.faults import Plan
from laconic.links.elastic.simulated import Cast, EndedError, current_part
from laconic.links.link import Link
from laconic.links.polls import Closing
from laconic.links.simulated import RandomState, SimulatedLink, Stage, current_link

T = TypeVar("T")

at_end: ContextVar[list[Callable[[], None]] | None] = ContextVar("laconic at_end", default=None)
"""In a simulated worker: what `simulate` calls once all workers have returned."""


def simulate(
    worker_fn: Callable[[int], T],
    workers: int | None = None,
    link: Callable[[Link], Link] | None = None,
    faults: Plan | None = None,
    *,
    step_seconds: Sequence[float] | None = None,
    closings: Sequence[Closing] | None = None,
) -> list[T]:
    """Run ``worker_fn(rank)`` for every rank, as threads that take turns.

    `laconic.attach` inside ``worker_fn`` finds its link by itself. Every worker starts from the
    caller's random state. Returns what the workers return, by rank.

    Args:
        worker_fn: the program of one worker.
        workers: how many. None: 8, or as many as ``faults`` has.
        link: wraps each worker's link, for instance ``lambda link: Throttled(link, "100mbit")``.
            None: not wrapped.
        faults: workers come and go, as in an elastic run: a `Trace` of one, or a plan in steps
            (`Faults`). ``rank`` then numbers them, and a worker that the plan has end returns None.
            None: no worker comes or goes.
        step_seconds: how long each worker takes for a step of its optimizer, in virtual seconds.
            They decide who arrives when, where rounds close with a quorum (``diloco(...,
            quorum=)``); nobody sleeps, and the result is the same from run to run. None: one second
            each.
        closings: repeat the rounds that another run has closed (`Synchronizer.closings`), whatever
            the times: with the same program, this gives the same bits. Not with
            ``faults``: a `Trace` has the rounds. None: rounds close by the times.

    Raises ``ValueError`` for fewer than one worker, and for times or ``closings`` if no round of
    the whole run could close with a quorum; and the first worker's own exception if one fails; the
    others then get a `LinkError` at their next round and end too. What `laconic.attach` is told
    about connections (``timeout``, the name of a ``link``) has no effect here: there are none.

    Examples:
        >>> def worker(rank):
        ...     model = torch.nn.Linear(4, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     with laconic.attach(model, optimizer, laconic.local_sgd(2)) as sync:
        ...         for _ in range(4):
        ...             model(torch.randn(8, 4) + rank).square().mean().backward()
        ...             optimizer.step()
        ...     return sync.stats().rounds
        >>> laconic.simulate(worker, workers=4)
        [2, 2, 2, 2]
    """
    count = _count(workers, faults, link is not None)
    if faults is not None and closings is not None:
        raise ValueError(
            "closings= repeats rounds of workers that neither come nor go: leave it out. With "
            "faults=, a laconic.Trace has the rounds that have closed"
        )
    stage = Stage(count, _seconds(step_seconds, count))
    if closings is not None:
        stage.recorded = [iter(closings) for _ in range(count)]
    cast = None if faults is None else Cast(faults, stage)
    results: dict[int, Any] = {}
    errors: list[BaseException] = []
    calls: list[Callable[[], None]] = []

    def run(rank: int) -> None:
        error: BaseException | None = None
        stage.take_turn(rank)
        try:
            if cast is not None:
                current_part.set((cast, rank))
            own: Link = SimulatedLink(stage, rank, range(count))
            current_link.set(own if link is None else link(own))
            at_end.set(calls)
            # or one thread of autograd's would run the backward passes of all workers on a GPU, and
            # wait for the second while it runs the first
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = worker_fn(rank)
        except EndedError:
            pass
        except BaseException as caught:
            error = caught
            errors.append(caught)
        stage.leave(rank, error)

    before = RandomState()
    if faults is not None:
        for rank in range(1, count):
            stage.runnable[rank] = faults.joins(rank) is None  # others begin when they are fed
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before.restore()
    if errors:
        raise errors[0]
    if not stage.polled:
        _check_unused({"step_seconds": step_seconds, "closings": closings})
    for call in calls:
        call()
    return [results.get(rank) for rank in range(count)]  # type: ignore[misc]


def _count(workers: int | None, faults: Plan | None, wrapped: bool) -> int:
    if faults is None:
        return check_int("workers", 8 if workers is None else workers, 1)
    if wrapped or workers not in (None, faults.workers):
        raise ValueError(
            f"faults= says that there are {faults.workers} workers: leave out workers= and link="
        )
    return faults.workers


def _check_unused(options: Mapping[str, object]) -> None:
    if given := [name for name, value in options.items() if value is not None]:
        raise ValueError(
            f"{', '.join(given)} had no effect, because no rounds close with a quorum: leave out, "
            "or give the recipe a quorum, such as diloco(8, quorum=2)"
        )


def _seconds(seconds: Sequence[float] | None, workers: int) -> list[float] | None:
    if seconds is None:
        return None
    if len(seconds) != workers:
        raise ValueError(
            f"step_seconds has {len(seconds)} numbers, and there are {workers} workers: give one "
            "for each"
        )
    return [check_float("step_seconds", s, 0.0, strict=True) for s in seconds]
