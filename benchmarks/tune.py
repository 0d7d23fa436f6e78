"""What the tuner finds of what the full grid has, at a third of the grid's cost.

python -m benchmarks.tune [--first N] [--seeds N] [--tuners N] [--out DIR]

The workload is the lab's digits on 8 simulated workers, the recipe SlowMo over local SGD. For every
seed of the workload all settings of the grid are trained to their end; then tuners of other seeds
each have a third of the steps, those of stopped runs counted. The same is done with the mean of
three seeds, as --repeat 3 tunes it. A simulated run is the same every
time, so what a tuner trains is looked up among the grid's runs. Beside it stands what random
settings, all trained to their end, find at the same cost. Grids are kept in DIR, so that a
benchmark that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from laconic.advisor.tune import tuning
from laconic.advisor.tune.journal import open_journal
from laconic.advisor.tune.runs import VALIDATIONS, Length, Report, Run, Task
from laconic.advisor.tune.space import Setting, Space, space_of
from laconic.advisor.tune.tuning import Evaluate, Trial
from laconic.lab.race import runner
from laconic.lab.race.plan import Schedule

RECIPE = "slowmo(local_sgd(period), period=period, momentum=momentum)"
WORKERS, STEPS = 8, 240
REPEAT = 3
"""Seeds whose mean is tuned as well."""
SHARE = 3
"""The grid's cost over the tuner's."""
NEAR = 1.05
"""A loss at most this many times the grid's lowest counts as found."""


def task(seed: int) -> Task:
    """Digits, as in docs/science.md: 8 workers, 240 steps."""
    settings = runner.Settings(
        recipes=(), hosts=1, per_host=WORKERS, workload="digits", seconds=None, steps=STEPS,
        seeds=(seed,),
    )  # fmt: skip
    return Task(settings, Length("steps", STEPS), compute=1e-3)


def grid(space: Space, seed: int, out: Path, progress: Callable[[int], None]) -> list[Trial]:
    """All settings, each trained to its end."""
    here = task(seed)
    settings = {"recipe": space.recipe, "grids": dict(space.grids), "seed": seed, "steps": STEPS}
    with open_journal(out / f"grid-{seed}.jsonl", settings) as study:

        def train(setting: Setting, told: Report) -> Run:
            return here.run(space.text(setting), float(setting["lr"] or 1), told)

        for _ in tuning.tune(study, space, train, prune=False):
            progress(len(tuning.ended(study, space)))
        return tuning.ended(study, space)


def mean(grids: list[list[Trial]]) -> list[Trial]:
    """The grid that --repeat trains: losses as means over the runs of several seeds."""
    found = []
    for runs in zip(*map(in_order, grids), strict=True):
        curve = {look: statistics.fmean(t.curve[look] for t in runs) for look in runs[0].curve}
        loss = statistics.fmean(t.run.loss for t in runs)
        found.append(replace(runs[0], run=replace(runs[0].run, loss=loss), curve=curve))
    return found


def in_order(trials: list[Trial]) -> list[Trial]:
    """By setting."""
    return sorted(trials, key=lambda trial: str(trial.setting))


def replay(space: Space, runs: list[Trial]) -> Evaluate:
    """Trains by looking up the grid's run."""
    known = {tuple(trial.setting.items()): trial for trial in runs}
    here = task(0)

    def train(setting: Setting, told: Report) -> Run:
        trial = known[tuple((name, setting[name]) for name in space.grids)]
        planned = Schedule(here.recipe(space.text(setting)), None, STEPS, VALIDATIONS, {})
        for step in range(1, STEPS + 1):
            if planned.is_check(step) and planned.check(step, 0.0):
                told(step, STEPS, trial.curve[VALIDATIONS * step // STEPS])
        return trial.run

    return train


@dataclass(frozen=True)
class Found:
    """The lowest loss a tuner found over the grid's, its cost over the grid's, and its trials."""

    ratio: float
    cost: float
    trials: int
    stopped: int


def search(space: Space, runs: list[Trial], seed: int) -> Found:
    """Tune until another trial might go beyond a share of the grid's cost."""
    whole = sum(trial.run.steps for trial in runs)
    found: list[Trial] = []
    with tempfile.TemporaryDirectory() as folder:  # noqa: SIM117
        with open_journal(Path(folder, "journal.jsonl"), {}) as study:
            for trial in tuning.tune(study, space, replay(space, runs), seed=seed):
                found.append(trial)
                if sum(t.run.steps for t in found) + STEPS > whole / SHARE:
                    break
    cost = sum(t.run.steps for t in found) / whole
    stopped = sum(t.status != "ok" for t in found)
    ratio = tuning.best(found).run.loss / tuning.best(runs).run.loss
    return Found(ratio, cost, len(found), stopped)


def at_random(runs: list[Trial], seed: int) -> float:
    """The same ratio, of settings drawn at random and trained to their end."""
    drawn = random.Random(seed).sample(runs, len(runs) // SHARE)
    return tuning.best(drawn).run.loss / tuning.best(runs).run.loss


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune")
    parser.add_argument("--seeds", type=int, default=6, help="of the workload (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="of these seeds (%(default)s)")
    parser.add_argument("--tuners", type=int, default=10, help="for each of them (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("laconic-tune-benchmark"), metavar="DIR")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=100)
    space = space_of(RECIPE, {}, WORKERS)
    table = Table("seeds", "lowest loss", "ratio: median", "worst", "within 5 %", "cost", "trials",
                  "stopped", "random: median", "within 5 %", box=None)  # fmt: skip
    grids = []
    seeds = range(options.first, options.first + options.seeds)
    for seed in seeds:
        with console.status("") as status:
            told = f"seed {seed}: of {space.size} settings "
            runs = grid(space, seed, options.out, lambda n, t=told: status.update(f"{t}{n}"))  # type: ignore[misc]
        grids.append(runs)
    named = {str(seed): runs for seed, runs in zip(seeds, grids, strict=True)}
    for first in range(0, len(grids) - REPEAT + 1, REPEAT):
        several = grids[first : first + REPEAT]
        named[f"{seeds[first]}-{seeds[first + REPEAT - 1]}"] = mean(several)
    for name, runs in named.items():
        table.add_row(name, *figures(space, runs, options.tuners))
    console.print(table)


def figures(space: Space, runs: list[Trial], tuners: int) -> list[str]:
    """Of so many tuners on one grid."""
    found = [search(space, runs, tuner) for tuner in range(tuners)]
    ratios = [f.ratio for f in found]
    chance = [at_random(runs, i) for i in range(1000)]
    return [
        f"{tuning.best(runs).run.loss:.4f}",
        f"{statistics.median(ratios):.3f}",
        f"{max(ratios):.3f}",
        f"{sum(r <= NEAR for r in ratios)} of {len(ratios)}",
        f"{max(f.cost for f in found):.3f}",
        f"{statistics.median(f.trials for f in found):g}",
        f"{statistics.median(f.stopped for f in found):g}",
        f"{statistics.median(chance):.3f}",
        f"{sum(r <= NEAR for r in chance) / len(chance):.0%}",
    ]


if __name__ == "__main__":
    main()
