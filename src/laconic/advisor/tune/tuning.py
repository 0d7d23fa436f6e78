"""Tuning a recipe: Optuna chooses settings, runs are stopped early where they are bad, and all is
kept in a journal.

Each trial is a setting of a finite grid, on which names whose values are numbers are places in
ascending order. The first is the usual one; the others are drawn by Optuna's tree-structured Parzen
estimator (Bergstra et al., NeurIPS 2011). No setting is tried twice: where one comes again, the
estimator has nothing new to say, and a random setting takes its place. (An untried one next to it
was tried instead, and found less.) Trials are stopped early by asynchronous successive halving
(Li et al., MLSys 2020, arXiv 1810.05934). The estimator's random state is a function of the seed
and of how many trials have ended, so a tuning that was killed goes on to the same trials.
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

from laconic.advisor.tune.runs import LOOKS, Run, Told
from laconic.advisor.tune.space import Setting, Space
from laconic.errors import NotFiniteError

Places = tuple[int, ...]
"""A setting, as the place of each value in its grid."""
Evaluate = Callable[[Setting, Told], Run]
"""Trains under a setting, telling the validation loss as it goes. Where it diverges it returns a
loss that is not finite, or raises `NotFiniteError`."""

STARTUP = 6
"""Trials before the estimator models anything: until then settings are random."""
STOPS_AT = 3
"""Of the `LOOKS` at a run, the one after which it may be stopped, and again after twice that."""


@dataclass(frozen=True)
class Trial:
    """A ``setting`` that was tried, and what came of it. ``stopped``: before its end, at a loss
    behind that of others; ``diverged``: the loss was no number, or far above the first. ``curve``:
    validation loss by eighth of the run; ``seconds``: how long the trial took, here."""

    setting: Setting
    status: Literal["ok", "stopped", "diverged"]
    run: Run
    curve: Mapping[int, float]
    seconds: float


class _Stop(Exception):  # noqa: N818
    """Ends a run from inside."""


class _Ears:
    """Hears of a run's validation losses, keeps them in the journal, and may end it."""

    def __init__(self, trial: optuna.Trial) -> None:
        self._trial = trial
        self._look = 0
        self.step, self.loss = 0, math.nan
        self.closed = False

    def __call__(self, step: int, steps: int, loss: float) -> None:
        if self.closed:  # interrupted: simulated workers are threads, which outlive the call
            raise _Stop
        look = LOOKS * step // steps
        if look <= self._look:
            return
        self._look, self.step, self.loss = look, step, loss
        self._trial.report(loss if math.isfinite(loss) else math.inf, look)
        if not math.isfinite(loss) or (look < LOOKS and self._trial.should_prune()):
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
    """Go on with ``study`` until so many ``trials`` have ended, or trials have taken so many
    ``seconds``, those of earlier processes included, or no setting is left. Yields each as it
    ends; `ended` has all. An error of ``evaluate`` is passed on, and its trial run again next time.
    """
    most = space.size if trials is None else min(trials, space.size)
    study.pruner = pruner() if prune else optuna.pruners.NopPruner()
    while len(done := ended(study, space)) < most and sum(t.seconds for t in done) < seconds:
        yield _next(study, space, evaluate, f"{seed} {len(done)}")


def pruner() -> optuna.pruners.BasePruner:
    """What stops trials: after three eighths of their length, and again after three
    quarters, those that are not in the better half of all that came so far.

    Earlier, losses say little of how a run will end: large learning rates are behind until the
    schedule has lowered them."""
    return _Halving()


class _Halving(optuna.pruners.BasePruner):
    """Asynchronous successive halving over the trials that have ended, so that one which was cut
    off with its process, and run again, counts once."""

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        *before, look = [0, *sorted(trial.intermediate_values)]
        rung = next((r for r in (2 * STOPS_AT, STOPS_AT) if before[-1] < r <= look), None)
        if rung is None:
            return False
        states = (TrialState.COMPLETE, TrialState.PRUNED)
        others = [_value(t, rung) for t in study.get_trials(deepcopy=False, states=states)]
        loss = trial.intermediate_values[look]
        losses = sorted([loss, *(other for other in others if other is not None)])
        return loss > losses[max(len(losses) // 2, 1) - 1]


def _value(trial: FrozenTrial, rung: int) -> float | None:
    """The loss at the first look from ``rung`` on: those whose rounds are rare skip looks."""
    looks = [look for look in trial.intermediate_values if look >= rung]
    return trial.intermediate_values[min(looks)] if looks else None


def ended(study: optuna.Study, space: Space) -> list[Trial]:
    """The trials that have ended, in order."""
    states = (TrialState.COMPLETE, TrialState.PRUNED)
    return [_trial(trial, space) for trial in study.get_trials(deepcopy=False, states=states)]


def pareto(trials: Sequence[Trial]) -> list[Trial]:
    """Of the trials that came to their end, those that none beats in both seconds per step and
    loss, the fastest first."""
    front: list[Trial] = []
    done = [trial for trial in trials if trial.status == "ok"]
    for trial in sorted(done, key=lambda t: (t.run.seconds_per_step, t.run.loss)):
        if not front or trial.run.loss < front[-1].run.loss:
            front.append(trial)
    return front


def best(trials: Sequence[Trial]) -> Trial:
    """The one with the lowest loss at its end; the first of several. Raises ``ValueError`` where
    none came to its end."""
    done = [trial for trial in trials if trial.status == "ok"]
    if not done:
        if any(trial.status == "stopped" for trial in trials):
            raise ValueError("no trial has come to its end: give more --trials, or --no-stop")
        raise ValueError("every trial diverged: give smaller values of lr")
    return min(done, key=lambda trial: trial.run.loss)


def _trial(trial: FrozenTrial, space: Space) -> Trial:
    setting = {name: space.grids[name][place] for name, place in trial.params.items()}
    curve, run = trial.intermediate_values, Run(**trial.user_attrs["run"])
    complete = trial.state == TrialState.COMPLETE
    stopped = "stopped" if math.isfinite(run.loss) else "diverged"
    return Trial(setting, "ok" if complete else stopped, run, curve, trial.user_attrs["seconds"])  # type: ignore[arg-type]


def _next(study: optuna.Study, space: Space, evaluate: Evaluate, key: str) -> Trial:
    """Choose a setting and try it; ``key`` seeds the choice."""
    trial = _ask(study, space, random.Random(key))
    ears, start = _Ears(trial), time.perf_counter()
    setting = {name: space.grids[name][place] for name, place in trial.params.items()}
    try:
        run, finished = evaluate(setting, ears), True
    except _Stop:
        run, finished = Run(ears.loss, ears.step, math.nan, math.nan), False
    except NotFiniteError:  # a coded recipe's way to say that it diverged
        run, finished = Run(math.inf, ears.step, math.nan, math.nan), False
    finally:
        ears.closed = True
    finished = finished and math.isfinite(run.loss)
    trial.set_user_attr("run", asdict(run))
    trial.set_user_attr("seconds", time.perf_counter() - start)
    state = TrialState.COMPLETE if finished else TrialState.PRUNED
    return _trial(study.tell(trial, run.loss if finished else None, state=state), space)


def _ask(study: optuna.Study, space: Space, rng: random.Random) -> optuna.Trial:
    """A trial with a setting that was not tried before."""
    begun = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.WAITING)
    if not study.get_trials(deepcopy=False, states=begun):
        study.enqueue_trial({n: space.grids[n].index(v) for n, v in space.start.items()})
    study.sampler = optuna.samplers.TPESampler(
        n_startup_trials=STARTUP, multivariate=True, seed=rng.getrandbits(32)
    )
    states = (TrialState.COMPLETE, TrialState.PRUNED)
    tried = {_places(t.params, space) for t in study.get_trials(deepcopy=False, states=states)}
    trial = study.ask(_distributions(space))
    if _places(trial.params, space) not in tried:
        return trial
    study.tell(trial, state=TrialState.FAIL)
    grids = space.grids.values()
    left = [p for p in product(*(range(len(grid)) for grid in grids)) if p not in tried]
    study.enqueue_trial(dict(zip(space.grids, rng.choice(left), strict=True)))
    return study.ask(_distributions(space))


def _places(params: Mapping[str, int], space: Space) -> Places:
    return tuple(params[name] for name in space.grids)


def _distributions(space: Space) -> dict[str, BaseDistribution]:
    return {
        name: IntDistribution(0, len(values) - 1)
        if space.ordered(name)
        else CategoricalDistribution(range(len(values)))
        for name, values in space.grids.items()
    }
