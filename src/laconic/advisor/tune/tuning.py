"""Search the settings of a recipe: Optuna chooses them, and bad runs are stopped early.

Each trial is a setting of a finite grid, in which numeric values are represented by their indices
in ascending order. The first trial is the usual setting. Optuna's tree-structured Parzen estimator
(Bergstra et al., NeurIPS 2011) proposes the others. No setting is tried twice: if the estimator
proposes one again, a random untried setting takes its place. (Taking the nearest untried setting
instead found worse results.) Asynchronous successive halving (Li et al., MLSys 2020, arXiv
1810.05934) stops trials early. The estimator's random state depends only on the seed and the number
of ended trials, so a search that was killed resumes with the same trials.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from laconic.advisor.tune.runs import VALIDATIONS, Report, Run
from laconic.advisor.tune.space import Setting, Space
from laconic.errors import NotFiniteError

Indices = tuple[int, ...]
"""A setting, as the index of each value in its grid."""
Evaluate = Callable[[Setting, Report], Run]
"""Trains under a setting and reports validation losses. If training diverges, it returns a
nonfinite loss or raises `NotFiniteError`."""

STARTUP = 6
"""Number of random trials before the estimator is used."""
STOPS_AT = 3
"""A run may be stopped after this many of its `VALIDATIONS`, and again after twice as many."""


@dataclass(frozen=True)
class Trial:
    """A ``setting`` that was tried, and its result.

    A trial with status "stopped" ended early because its loss was behind others. "diverged" means a
    nonfinite loss, or one far above the first. ``curve`` is the validation loss by eighth of the
    run. ``seconds`` is how long the trial took here.
    """

    setting: Setting
    status: Literal["ok", "stopped", "diverged"]
    run: Run
    curve: Mapping[int, float]
    seconds: float


class _Stop(Exception):  # noqa: N818
    """Ends a run from inside."""


class _Reporter:
    """Receives a run's validation losses, stores them in the journal, and may end the run."""

    def __init__(self, trial: optuna.Trial) -> None:
        self._trial = trial
        self._index = 0
        self.step, self.loss = 0, math.nan
        self.closed = False

    def __call__(self, step: int, steps: int, loss: float) -> None:
        if self.closed:  # interrupted; simulated workers are threads, which outlive the call
            raise _Stop
        index = VALIDATIONS * step // steps
        if index <= self._index:
            return
        self._index, self.step, self.loss = index, step, loss
        self._trial.report(loss if math.isfinite(loss) else math.inf, index)
        if not math.isfinite(loss) or (index < VALIDATIONS and self._trial.should_prune()):
            raise _Stop


def tune(
    study: optuna.Study,
    space: Space,
    evaluate: Evaluate,
    *,
    trials: int | None = None,
    seconds: float = math.inf,
    seed: int = 0,
    prune: bool = True,
) -> Iterator[Trial]:
    """Continue ``study`` and yield each trial as it ends.

    Ends after ``trials`` trials, after trials that took ``seconds`` in total (both including those
    of earlier processes), or when no setting is left. `ended` returns all trials. An error in
    ``evaluate`` propagates, and its trial runs again next time.
    """
    most = space.size if trials is None else min(trials, space.size)
    study.pruner = pruner() if prune else optuna.pruners.NopPruner()
    while len(done := ended(study, space)) < most and sum(t.seconds for t in done) < seconds:
        yield _next(study, space, evaluate, f"{seed} {len(done)}")


def pruner() -> optuna.pruners.BasePruner:
    """Return the pruner, which stops trials outside the better half of all trials so far.

    It acts after three eighths and again after three quarters of a trial. Earlier losses say
    little: large learning rates are behind until the schedule has lowered them.
    """
    return _Halving()


class _Halving(optuna.pruners.BasePruner):
    """Asynchronous successive halving over ended trials only.

    A trial that was cut off with its process and ran again counts once.
    """

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        *before, index = [0, *sorted(trial.intermediate_values)]
        rung = next((r for r in (2 * STOPS_AT, STOPS_AT) if before[-1] < r <= index), None)
        if rung is None:
            return False
        states = (TrialState.COMPLETE, TrialState.PRUNED)
        others = [_value(t, rung) for t in study.get_trials(deepcopy=False, states=states)]
        loss = trial.intermediate_values[index]
        losses = sorted([loss, *(other for other in others if other is not None)])
        return loss > losses[max(len(losses) // 2, 1) - 1]


def _value(trial: FrozenTrial, rung: int) -> float | None:
    """Return the loss at the first validation from ``rung`` on. Rare rounds may skip some."""
    indices = [index for index in trial.intermediate_values if index >= rung]
    return trial.intermediate_values[min(indices)] if indices else None


def ended(study: optuna.Study, space: Space) -> list[Trial]:
    """Return the trials that have ended, in order."""
    states = (TrialState.COMPLETE, TrialState.PRUNED)
    return [_trial(trial, space) for trial in study.get_trials(deepcopy=False, states=states)]


def pareto(trials: Sequence[Trial]) -> list[Trial]:
    """Return finished trials not beaten in both seconds per step and loss, the fastest first."""
    front: list[Trial] = []
    done = [trial for trial in trials if trial.status == "ok"]
    for trial in sorted(done, key=lambda t: (t.run.seconds_per_step, t.run.loss)):
        if not front or trial.run.loss < front[-1].run.loss:
            front.append(trial)
    return front


def best(trials: Sequence[Trial]) -> Trial:
    """Return the finished trial with the lowest loss, the first on a tie.

    Raises ``ValueError`` if none finished.
    """
    done = [trial for trial in trials if trial.status == "ok"]
    if not done:
        if any(trial.status == "stopped" for trial in trials):
            raise ValueError("no trial finished: give more --trials, or --no-stop")
        raise ValueError("every trial diverged: try smaller values of lr")
    return min(done, key=lambda trial: trial.run.loss)


def _trial(trial: FrozenTrial, space: Space) -> Trial:
    setting = {name: space.grids[name][index] for name, index in trial.params.items()}
    curve, run = trial.intermediate_values, Run(**trial.user_attrs["run"])
    complete = trial.state == TrialState.COMPLETE
    stopped = "stopped" if math.isfinite(run.loss) else "diverged"
    return Trial(setting, "ok" if complete else stopped, run, curve, trial.user_attrs["seconds"])  # type: ignore[arg-type]


def _next(study: optuna.Study, space: Space, evaluate: Evaluate, key: str) -> Trial:
    """Choose a setting and try it. ``key`` seeds the choice."""
    trial = _ask(study, space, random.Random(key))
    reporter, start = _Reporter(trial), time.perf_counter()
    setting = {name: space.grids[name][index] for name, index in trial.params.items()}
    try:
        run, finished = evaluate(setting, reporter), True
    except _Stop:
        run, finished = Run(reporter.loss, reporter.step, math.nan, math.nan), False
    except NotFiniteError:  # raised by recipes with codecs when training diverges
        run, finished = Run(math.inf, reporter.step, math.nan, math.nan), False
    finally:
        reporter.closed = True
    finished = finished and math.isfinite(run.loss)
    trial.set_user_attr("run", asdict(run))
    trial.set_user_attr("seconds", time.perf_counter() - start)
    state = TrialState.COMPLETE if finished else TrialState.PRUNED
    return _trial(study.tell(trial, run.loss if finished else None, state=state), space)


def _ask(study: optuna.Study, space: Space, rng: random.Random) -> optuna.Trial:
    """Return a trial with a setting that was not tried before."""
    begun = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.WAITING)
    if not study.get_trials(deepcopy=False, states=begun):
        study.enqueue_trial({n: space.grids[n].index(v) for n, v in space.start.items()})
    study.sampler = optuna.samplers.TPESampler(
        n_startup_trials=STARTUP, multivariate=True, seed=rng.getrandbits(32)
    )
    states = (TrialState.COMPLETE, TrialState.PRUNED)
    tried = {_indices(t.params, space) for t in study.get_trials(deepcopy=False, states=states)}
    trial = study.ask(_distributions(space))
    if _indices(trial.params, space) not in tried:
        return trial
    study.tell(trial, state=TrialState.FAIL)
    grids = space.grids.values()
    left = [p for p in product(*(range(len(grid)) for grid in grids)) if p not in tried]
    study.enqueue_trial(dict(zip(space.grids, rng.choice(left), strict=True)))
    return study.ask(_distributions(space))


def _indices(params: Mapping[str, int], space: Space) -> Indices:
    return tuple(params[name] for name in space.grids)


def _distributions(space: Space) -> dict[str, BaseDistribution]:
    return {
        name: IntDistribution(0, len(values) - 1)
        if space.ordered(name)
        else CategoricalDistribution(range(len(values)))
        for name, values in space.grids.items()
    }
