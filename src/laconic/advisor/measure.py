"""Measure the inputs of the cost model on all ranks at once.

Every rank takes part in every measurement, because ranks share the network and possibly processors.
The figures are gathered, and every rank computes the same facts from all of them.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.advisor.bench import Bench, error_context
from laconic.advisor.network import network_of, unequal_workers
from laconic.advisor.rehearse import now, rehearsals, rehearse
from laconic.algorithms.exchanges import QuorumMean
from laconic.algorithms.round import Recipe
from laconic.device import seconds_between, time_mark
from laconic.policy.candidates import largest_fragment, takes_muon, takes_own
from laconic.policy.facts import BACKWARD, Facts
from laconic.tensors import itemsize_of

WARMUP = 3
"""Steps that are not measured, because the first ones are slow."""
TURNS = 4
"""How often each kind of step is timed in turn."""
TRIM = 0.1
"""Fraction of the slowest, and of the fastest, steps to ignore."""
LOAD_BYTES = 2**22
"""Bytes that the background thread copies repeatedly."""


def measure(
    bench: Bench,
    model: nn.Module,
    step: Callable[[], object],
    recipes: Sequence[Recipe],
    steps: int,
    optimizer: Optimizer | None = None,
) -> tuple[Facts, tuple[float, ...]]:
    """Measure ``step``, the network, and the rounds of ``recipes``. Takes some seconds.

    Return the facts, and the seconds of a step on each rank.
    """
    params = trained(model, optimizer)
    timed = _Steps(bench, step, params)
    timed.run(WARMUP)
    computes, pace = _pace(bench, timed, steps)
    facts = Facts(
        workers=bench.workers.size,
        shapes=tuple(tuple(p.shape) for p in params),
        itemsize=itemsize_of(params),
        ranks=bench.replica.size,
        **pace,
        **network_of(bench),
        overlapping=bench.world.overlapping is not None,
        muon=bool(bench.gather(float(takes_muon(optimizer, [p.shape for p in params]))).min()),
        own=bool(bench.gather(float(takes_own(optimizer))).min()),
        largest=0.0 if optimizer is None else largest_fragment(model, _groups(optimizer)),
    )
    quorums = bench.replica.size == 1 and bench.device.type == "cpu"  # see `check_quorum`
    if not quorums:
        facts = replace(facts, rates=())
    elif unequal_workers(torch.tensor(computes)):
        facts = replace(facts, computes=computes)
    work = {}
    for key, r in rehearsals(recipes).items():
        if isinstance(r.exchange, QuorumMean) and not quorums:
            continue
        with error_context(f"timing {type(r.update).__name__} and {type(r.exchange).__name__}"):
            seconds = rehearse(r, facts, params[0].dtype, bench.device, bench.barrier)
        work[key] = float(bench.gather(seconds).max())
    return replace(facts, work=work), computes


def trained(model: nn.Module, optimizer: Optimizer | None) -> list[Tensor]:
    """Return the parameters that rounds communicate."""
    if optimizer is None:
        found: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    else:
        found = [p for group in _groups(optimizer) for p in group]
    if not found:
        raise ValueError("the model has no parameter to train")
    return found


def _groups(optimizer: Optimizer) -> list[list[Tensor]]:
    return [[p for p in g["params"] if p.requires_grad] for g in optimizer.param_groups]


class _Steps:
    """Times the user's steps."""

    def __init__(self, bench: Bench, step: Callable[[], object], params: Sequence[Tensor]) -> None:
        self._bench, self._step = bench, step
        self._params = [p for p in params if p.requires_grad]
        self.backward = self.total = 0.0

    def run(self, count: int, *, barrier: bool = False) -> list[float]:
        """Return the seconds of each of ``count`` steps.

        ``barrier`` includes a barrier after each step. Sets ``total`` to the seconds per step until
        all ranks have finished all steps, and ``backward`` to those between the first and the last
        gradient of a step. Gradients that accumulate over several passes are sent after the last.
        """
        bench, spans, windows = self._bench, [], []
        marks: dict[int, Any] = {}

        def arrived(p: Tensor) -> None:
            marks.pop(id(p), None)  # keep the order of the last arrivals
            # On a GPU, a hook runs when the work is queued, not when it is done.
            marks[id(p)] = time_mark(bench.device)

        with ExitStack() as stack:
            for p in self._params:
                stack.callback(p.register_post_accumulate_grad_hook(arrived).remove)  # type: ignore[no-untyped-call]
            bench.barrier()
            begin = now(bench.device)
            for _ in range(count):
                marks.clear()
                start = now(bench.device)
                with error_context("step_fn"):
                    self._step()
                if barrier:
                    bench.barrier()
                spans.append(now(bench.device) - start)
                if seen := list(marks.values()):
                    windows.append(seconds_between(seen[0], seen[-1]))
            if not barrier:
                bench.barrier()
            self.total = (now(bench.device) - begin) / count
        self.backward = statistics.median(windows) if windows else math.nan
        return spans


def _mean(spans: Sequence[float]) -> float:
    """Return the mean without the fastest and slowest spans, which a single delay may affect."""
    cut = int(TRIM * len(spans))
    trimmed = sorted(spans)[cut : len(spans) - cut]
    return statistics.fmean(trimmed)


def _pace(bench: Bench, timed: _Steps, steps: int) -> tuple[tuple[float, ...], dict[str, Any]]:
    """Time steps alone, steps followed by a barrier, and steps next to a background load.

    The kinds alternate, so that a machine that slows down affects all of them. Return the seconds
    of a step on each rank alone, and fields of `Facts`.
    """
    each = max(-(-steps // TURNS), 2)
    free, loaded, windows, per_run, per_step = [], [], [], [], []
    with _BackgroundLoad() as load:
        bench.barrier()
        load.calibrate()  # on all ranks at once, but without training
        for _ in range(TURNS):
            free += timed.run(each)
            windows.append(timed.backward)
            per_run.append(timed.total)
            timed.run(each, barrier=True)
            per_step.append(timed.total)
            load.go.set()
            loaded += timed.run(each)
            load.go.clear()
    barrier = _mean([_barrier_seconds(bench) for _ in range(each)])
    own = _mean(free)
    longer = (_mean(loaded) - own) * len(loaded) / max(load.seconds, 1e-9)
    m_1, m_h = statistics.median(per_step) - barrier, statistics.median(per_run) - barrier / each
    gathered = bench.gather(own, statistics.median(windows), longer, m_1, m_h)
    contention = min(max(float(gathered[:, 2].median()), 0.0), 1.5)
    m_1, m_h = gathered[:, 3:].amax(0).tolist()
    computes = tuple(gathered[:, 0].tolist())
    compute, skew = max(computes), 0.0
    if bench.world.threaded:  # simulated workers take turns, so a barrier waits for all steps
        compute, skew = compute_and_skew(computes, m_1, m_h, each)
    window = float(gathered[:, 1].median())
    backward = BACKWARD if math.isnan(window) else min(window / compute, 1.0)
    return computes, dict(compute=compute, backward=backward, skew=skew, contention=contention)


def compute_and_skew(
    computes: Sequence[float], m_1: float, m_h: float, period: int
) -> tuple[float, float]:
    """Return c and s of `predict`.

    ``computes``: seconds of a step on each rank alone. ``m_1``, ``m_h``: M_H, the seconds of a step
    with a barrier after each step, and after each ``period`` H, without the time of the barrier
    itself. By the model, c + s = M_1 and c + s/sqrt(H) = M_H. c is at least the average over ranks
    of their steps alone. If ranks share processors, the steps of a single rank may be too fast or
    too slow, depending on the share of the processor it got.
    """
    alone = m_h - max(m_1 - m_h, 0.0) / (math.sqrt(period) - 1)
    compute = max(alone, statistics.harmonic_mean(computes))
    return compute, max(m_1 - compute, 0.0)


def _barrier_seconds(bench: Bench) -> float:
    start = time.perf_counter()
    bench.barrier()
    return time.perf_counter() - start


class _BackgroundLoad:
    """A thread that copies bytes during a third of the time, while ``go`` is set."""

    def __init__(self) -> None:
        self._source = torch.zeros(LOAD_BYTES, dtype=torch.uint8)
        self._target = torch.zeros_like(self._source)
        self.go, self._end = threading.Event(), False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._count, self._each = 0, 0.0

    def __enter__(self) -> _BackgroundLoad:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end = True
        self.go.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        """The work done so far, in seconds that it takes undisturbed."""
        return self._count * self._each

    def calibrate(self) -> None:
        """Measure the time of one copy."""
        spans = []
        for _ in range(20):
            start = time.perf_counter()
            self._target.copy_(self._source)
            spans.append(time.perf_counter() - start)
        self._each = statistics.median(spans)

    def _work(self) -> None:
        while self.go.wait() and not self._end:
            self._target.copy_(self._source)
            self._count += 1
            time.sleep(2 * self._each)
