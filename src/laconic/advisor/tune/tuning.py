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

ENDED = (TrialState.COMPLETE, TrialState.PRUNED)
"""States of the trials that count."""
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
    run.
    """

    setting: Setting
    status: Literal["ok", "stopped", "diverged"]
    run: Run
    curve: Mapping[int, float]


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
    seed: int = 0,
    prune: bool = True,
) -> Iterator[Trial]:
    """Continue ``study`` and yield each trial as it ends.

    Ends after ``trials`` trials, including those of earlier processes, or when no setting is left.
    `ended` returns all trials. An error in ``evaluate`` propagates, and its trial runs again next
    time.
    """
    most = space.size if trials is None else min(trials, space.size)
    study.pruner = _Halving() if prune else optuna.pruners.NopPruner()
    for number in range(len(ended(study, space)), most):
        yield _next(study, space, evaluate, f"{seed} {number}")


class _Halving(optuna.pruners.BasePruner):
    """Asynchronous successive halving: stops trials outside the better half of all so far.

    It acts after three eighths and again after three quarters of a trial. Earlier losses say
    little: large learning rates are behind until the schedule has lowered them. Optuna's own
    pruner would count a trial that was cut off with its process and ran again twice.
    """

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        *before, index = [0, *sorted(trial.intermediate_values)]
        rung = next((r for r in (2 * STOPS_AT, STOPS_AT) if before[-1] < r <= index), None)
        if rung is None:
            return False
        others = [_value(t, rung) for t in study.get_trials(deepcopy=False, states=ENDED)]
        loss = trial.intermediate_values[index]
        losses = sorted([loss, *(other for other in others if other is not None)])
        return loss > losses[max(len(losses) // 2, 1) - 1]


def _value(trial: FrozenTrial, rung: int) -> float | None:
    """Return the loss at the first validation from ``rung`` on. Rare rounds may skip some."""
    indices = [index for index in trial.intermediate_values if index >= rung]
    return trial.intermediate_values[min(indices)] if indices else None


def ended(study: optuna.Study, space: Space) -> list[Trial]:
    """Return the trials that have ended, in order."""
    return [_trial(trial, space) for trial in study.get_trials(deepcopy=False, states=ENDED)]


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
    run = Run(**trial.user_attrs["run"])
    complete = trial.state == TrialState.COMPLETE
    status = "ok" if complete else "stopped" if math.isfinite(run.loss) else "diverged"
    return Trial(_setting(trial, space), status, run, trial.intermediate_values)  # type: ignore[arg-type]


def _setting(trial: optuna.Trial | FrozenTrial, space: Space) -> Setting:
    return {name: space.grids[name][index] for name, index in trial.params.items()}


def _next(study: optuna.Study, space: Space, evaluate: Evaluate, key: str) -> Trial:
    """Choose a setting and try it. ``key`` seeds the choice."""
    trial = _ask(study, space, random.Random(key))
    reporter, loss = _Reporter(trial), math.inf
    try:
        run = evaluate(_setting(trial, space), reporter)
        loss = run.loss
    except _Stop:
        run = Run(reporter.loss, reporter.step, math.nan, math.nan)
    except NotFiniteError:  # raised by recipes with codecs when training diverges
        run = Run(math.inf, reporter.step, math.nan, math.nan)
    finally:
        reporter.closed = True
    trial.set_user_attr("run", asdict(run))
    if math.isfinite(loss):
        return _trial(study.tell(trial, loss), space)
    return _trial(study.tell(trial, state=TrialState.PRUNED), space)


def _ask(study: optuna.Study, space: Space, rng: random.Random) -> optuna.Trial:
    """Return a trial with a setting that was not tried before."""
    if not study.get_trials(deepcopy=False, states=(*ENDED, TrialState.WAITING)):
        study.enqueue_trial({n: space.grids[n].index(v) for n, v in space.start.items()})
    study.sampler = optuna.samplers.TPESampler(
        n_startup_trials=STARTUP, multivariate=True, seed=rng.getrandbits(32)
    )
    tried = [t.params for t in study.get_trials(deepcopy=False, states=ENDED)]
    trial = study.ask(_distributions(space))
    if trial.params not in tried:
        return trial
    study.tell(trial, state=TrialState.FAIL)
    grids = product(*(range(len(grid)) for grid in space.grids.values()))
    every = [dict(zip(space.grids, indices, strict=True)) for indices in grids]
    study.enqueue_trial(rng.choice([params for params in every if params not in tried]))
    return study.ask(_distributions(space))


def _distributions(space: Space) -> dict[str, BaseDistribution]:
    return {
        name: IntDistribution(0, len(values) - 1)
        if space.ordered(name)
        else CategoricalDistribution(range(len(values)))
        for name, values in space.grids.items()
    }
