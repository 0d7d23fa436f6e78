"""What the cost model needs to know, measured on the ranks themselves, all at once.

Every rank takes part in every measurement, as they share the network and perhaps the processors;
figures are gathered, and from all ranks' every rank works out the same `Measured`.
"""

from __future__ import annotations

import math
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from laconic.advisor.bench import Bench, named
from laconic.advisor.fit import Sample, fit
from laconic.advisor.rehearse import now, rehearsals, rehearse
from laconic.algorithms.round import Recipe
from laconic.device import accelerator, seconds_between, time_mark
from laconic.errors import LinkError
from laconic.links import cost
from laconic.links.cost import Cost
from laconic.links.link import Link
from laconic.predict import BACKWARD, Facts, Net, itemsize_of

WARMUP = 3
"""Steps that are not measured: the first ones are slow."""
LEAST, MOST, REPEATS = 2**8, 2**26, 3
"""Bytes of the smallest and largest message of a sweep, and how often each is sent."""
LONG = 0.25
"""A message that takes so many seconds is the largest."""
TURNS = 4
"""How often each kind of step has its turn."""
TRIM = 0.1
"""Share of the slowest, and of the fastest, steps that do not count."""
NUISANCE = 2**22
"""Bytes that the thread beside the training copies, again and again."""


@dataclass(frozen=True)
class Measured:
    """The ``facts``, and what they do not hold: seconds of a step on each rank (``computes``), the
    model's ``parameters``, gradients and optimiser state in bytes (``held``), and the most memory
    that any rank had in use (``peak``)."""

    facts: Facts
    computes: tuple[float, ...]
    held: int
    peak: int


def measure(
    bench: Bench,
    model: nn.Module,
    step: Callable[[], object],
    recipes: Sequence[Recipe],
    steps: int,
    optimizer: Optimizer | None = None,
) -> Measured:
    """All of it: some seconds for the ``step``, the network, and the ``recipes``' rounds."""
    params = trained(model, optimizer)
    timed = _Steps(bench, step, params)
    timed.run(WARMUP)
    pace = _pace(bench, timed, steps)
    peak = _peak(bench.device)
    nets, carry = _nets(bench, sum(p.numel() * p.element_size() for p in params))
    net = nets["workers"]
    backward = BACKWARD if math.isnan(pace.backward) else min(pace.backward / pace.compute, 1.0)
    facts = Facts(
        workers=bench.workers.size,
        shapes=tuple(tuple(p.shape) for p in params),
        itemsize=itemsize_of(params),
        compute=pace.compute,
        rate=net.rate,
        latency=net.latency,
        backward=backward,
        ranks=bench.replica.size,
        nets=nets,
        contention=pace.contention,
        carry=carry,
        skew=pace.skew,
    )
    work = {}
    for key, r in rehearsals(recipes).items():
        with named(f"a rehearsal of {type(r.update).__name__} and {type(r.exchange).__name__}"):
            own_work = rehearse(r, facts, params[0].dtype, bench.device, bench.meet)
        work[key] = float(bench.everyone(own_work).max())
    facts = replace(facts, work=work)
    held = 2 * sum(p.numel() * p.element_size() for p in params) + _state_bytes(optimizer)
    most = bench.everyone(float(held), float(peak)).amax(0).tolist()
    return Measured(facts, pace.computes, int(most[0]), int(most[1]))


def trained(model: nn.Module, optimizer: Optimizer | None) -> list[Tensor]:
    """What rounds are about."""
    if optimizer is None:
        found: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    else:
        found = [p for group in optimizer.param_groups for p in group["params"]]
    if not found:
        raise ValueError("the model has no parameter to train")
    return found


class _Arrivals:
    """When each parameter's gradient was last there: gradients that are accumulated in several
    passes are sent with the last one."""

    def __init__(self, params: Sequence[Tensor], device: torch.device) -> None:
        self._params, self._device = params, device
        self._seen: dict[int, Any] = {}
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> _Arrivals:
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
            for p in self._params
            if p.requires_grad
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def clear(self) -> None:
        self._seen = {}

    def _arrived(self, p: Tensor) -> None:
        self._seen.pop(id(p), None)  # the last to come stands last
        self._seen[id(p)] = time_mark(self._device)  # a GPU's, as hooks run when work is queued

    def window(self) -> list[float]:
        """Seconds from the first to the last of them, once the step is done; none where none
        came."""
        marks = list(self._seen.values())
        if not marks:
            return []
        return [seconds_between(marks[0], marks[-1])]


class _Steps:
    """Times the user's steps."""

    def __init__(self, bench: Bench, step: Callable[[], object], params: Sequence[Tensor]) -> None:
        self._bench, self._step, self._params = bench, step, params
        self.backward = self.together = 0.0

    def run(self, count: int, *, meet: bool = False) -> list[float]:
        """Seconds of each of ``count`` steps; ``meet``: all ranks wait for each other after each,
        which counts. Then ``together`` has those of a step until all ranks have done all theirs."""
        bench, spans, windows = self._bench, [], []
        with _Arrivals(self._params, bench.device) as arrivals:
            bench.meet()
            begin = now(bench.device)
            for _ in range(count):
                arrivals.clear()
                start = now(bench.device)
                with named("step_fn"):
                    self._step()
                if meet:
                    bench.meet()
                spans.append(now(bench.device) - start)
                windows += arrivals.window()
            if not meet:
                bench.meet()
            self.together = (now(bench.device) - begin) / count
        self.backward = statistics.median(windows) if windows else math.nan
        return spans


def _mean(spans: Sequence[float]) -> float:
    """Without the fastest and the slowest: what held a single step up will not come again."""
    cut = int(TRIM * len(spans))
    kept = sorted(spans)[cut : len(spans) - cut]
    return statistics.fmean(kept)


class _Pace(NamedTuple):
    """Seconds of a step on each rank by itself; c; seconds that gradients take to appear, no number
    where none did; s; k."""

    computes: tuple[float, ...]
    compute: float
    backward: float
    skew: float
    contention: float


def _pace(bench: Bench, timed: _Steps, steps: int) -> _Pace:
    """Steps by themselves, steps after each of which all ranks meet, and steps with work beside
    them, in turn, so that a machine that slows down does so for all of them.

    With M_H the seconds of a step where ranks meet after every H, the meeting itself taken off,
    c + s = M_1 and c + s/sqrt(H) = M_H: by what `predict` takes them for; c is no less than ranks
    take on average by themselves. Where they share processors, a rank's own steps would say too
    much or too little, as it had a smaller or a larger share for a while."""
    each = max(-(-steps // TURNS), 2)
    free, beside, windows, seldom, always = [], [], [], [], []
    with _Nuisance() as nuisance:
        bench.meet()
        nuisance.calibrate()  # all ranks at once, but without the training
        for _ in range(TURNS):
            free += timed.run(each)
            windows.append(timed.backward)
            seldom.append(timed.together)
            timed.run(each, meet=True)
            always.append(timed.together)
            nuisance.resume()
            beside += timed.run(each)
            nuisance.pause()
    bare = _mean([_timed_meeting(bench) for _ in range(each)])
    own = _mean(free)
    longer = (_mean(beside) - own) * len(beside) / max(nuisance.seconds, 1e-9)
    m_1, m_h = statistics.median(always) - bare, statistics.median(seldom) - bare / each
    said = bench.everyone(own, statistics.median(windows), longer, m_1, m_h)
    contention = min(max(float(said[:, 2].median()), 0.0), 1.5)
    m_1, m_h = said[:, 3:].amax(0).tolist()
    computes = tuple(said[:, 0].tolist())
    if not bench.world.threaded:  # simulated workers take turns: to meet is to wait for all steps
        return _Pace(computes, max(computes), float(said[:, 1].median()), 0.0, contention)
    alone = m_h - max(m_1 - m_h, 0.0) / (each**0.5 - 1)
    compute = max(alone, statistics.harmonic_mean(computes))
    return _Pace(computes, compute, float(said[:, 1].median()), max(m_1 - compute, 0.0), contention)


def _timed_meeting(bench: Bench) -> float:
    start = time.perf_counter()
    bench.meet()
    return time.perf_counter() - start


class _Nuisance:
    """A thread beside the training that copies bytes, a third of the time."""

    def __init__(self) -> None:
        self._source = torch.zeros(NUISANCE, dtype=torch.uint8)
        self._target = torch.zeros_like(self._source)
        self._go, self._end = threading.Event(), False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._count, self._each = 0, 0.0

    def __enter__(self) -> _Nuisance:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end = True
        self._go.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        """What it has done so far, in seconds that it takes undisturbed."""
        return self._count * self._each

    def calibrate(self) -> None:
        """Find out what a copy takes."""
        spans = []
        for _ in range(20):
            start = time.perf_counter()
            self._target.copy_(self._source)
            spans.append(time.perf_counter() - start)
        self._each = statistics.median(spans)

    def resume(self) -> None:
        self._go.set()

    def pause(self) -> None:
        self._go.clear()

    def _work(self) -> None:
        while self._go.wait() and not self._end:
            self._target.copy_(self._source)
            self._count += 1
            time.sleep(2 * self._each)


# -- the network ----


def _nets(bench: Bench, size: int) -> tuple[dict[str, Net], float]:
    """Each set's net, messages up to ``size`` bytes; and seconds of processors for a byte sent."""
    world, workers, replica = bench.world, bench.workers, bench.replica
    found, carry = {}, 0.0
    if workers.size > 1:
        found["workers"], carry = _sweep(bench, workers, "mean", size)
        found["peers"], _ = _sweep(bench, workers, "swap", size)
    if replica.size > 1:
        found["replica"], _ = _sweep(bench, replica, "mean", size)
        found["world"], _ = _sweep(bench, world, "mean", size)
        found["direct"], _ = _sweep(bench, world, "all_to_all", size)
    if "workers" not in found:
        found["workers"] = next(iter(found.values()), Net(math.inf, 0.0))
    return found, carry


def _sweep(bench: Bench, link: Link, collective: str, size: int) -> tuple[Net, float]:
    """Growing messages, until one takes `LONG`, or is of ``size`` bytes."""
    samples: list[Sample] = []
    busy = sent = 0.0
    length, first, longest = LEAST, 0.0, 0.0
    fewest = LEAST * 2**2  # sizes to fit a line to, on a network of any latency
    while length <= fewest or (
        length <= min(max(size, 2**18), MOST) and longest < LONG + 2 * first
    ):
        x = torch.zeros(-(-length // (4 * link.size)) * link.size, device=bench.device)
        amount = _amount(collective, x, link.size)
        spans = []
        for _ in range(REPEATS):
            bench.meet()
            start, processors = now(bench.device), time.process_time()
            _send(link, collective, x)
            seconds, used = now(bench.device) - start, time.process_time() - processors
            slowest, mean = _of_all(bench, seconds, used)
            spans.append(slowest)
            busy, sent = busy + mean, sent + amount.bytes
            samples.append(Sample(amount.bytes, amount.messages, slowest))
        length, longest = 2 * length, statistics.median(spans)
        first = first or longest
    # machines that differ may fit the same samples to other last digits: rank 0's count
    found = bench.everyone(*astuple(fit(samples)), busy / max(sent, 1.0))[0].tolist()
    return Net(*found[:3]), found[3]


def _of_all(bench: Bench, seconds: float, used: float) -> tuple[float, float]:
    said = bench.everyone(seconds, used)
    return float(said[:, 0].max()), float(said[:, 1].mean())


def _amount(collective: str, x: Tensor, n: int) -> Cost:
    size = x.numel() * x.element_size()
    if collective == "swap":
        return cost.swap(size, 1)
    return cost.mean(size, n) if collective == "mean" else cost.all_to_all(size, n)


def _send(link: Link, collective: str, x: Tensor) -> None:
    n = link.size
    try:
        if collective == "swap":
            link.swap(x, [(link.rank + 1) % n], [(link.rank - 1) % n])
        elif collective == "mean":
            link.mean(x)
        else:
            rows = x.view(n, -1)
            link.all_to_all(rows, torch.empty_like(rows))
    except (MemoryError, RuntimeError) as error:  # the others wait in here, and cannot be told
        if isinstance(error, LinkError):
            raise
        raise LinkError(f"{collective} of {x.numel()} elements failed here: {error}") from error


# -- memory ----


def _state_bytes(optimizer: Optimizer | None) -> int:
    """Of the optimiser's own state."""
    states: list[dict[str, Any]] = [] if optimizer is None else list(optimizer.state.values())
    tensors = (t for state in states for t in state.values() if isinstance(t, Tensor))
    return sum(t.numel() * t.element_size() for t in tensors)


def _peak(device: torch.device) -> int:
    """Most bytes in use so far: on the card, or by the process."""
    kind = accelerator(device)
    if kind is not None:
        return kind.peak_bytes(device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
