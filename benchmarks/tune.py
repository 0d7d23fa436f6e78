"""Compare the tuner with a full grid search at a third of the grid's cost.

python -m benchmarks.tune [--first N] [--seeds N] [--tuners N] [--out DIR]

The workload is the lab's digits on 8 simulated workers, and the recipe SlowMo over local SGD. For
each seed of the workload, every setting of the grid is trained to the end. Then tuners with
different seeds each get a third of the grid's steps, including those of stopped runs. The same is
done with the mean of three seeds, as --repeat 3 tunes it. Simulated runs are deterministic, so the
tuners look up their runs in the grid. For comparison, the table also shows what random settings,
trained to the end, find at the same cost. The grids are stored in DIR, so an interrupted benchmark
can resume.
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
from laconic.advisor.tune.runs import VALIDATIONS, Report, Run, Task
from laconic.advisor.tune.space import Setting, Space, space_of
from laconic.advisor.tune.tuning import Evaluate, Trial
from laconic.lab.emulation.network import Network
from laconic.lab.race import runner
from laconic.lab.race.plan import Schedule

RECIPE = "slowmo(local_sgd(period), period=period, momentum=momentum)"
WORKERS, STEPS = 8, 240
REPEAT = 3
"""Number of seeds whose mean is also tuned."""
SHARE = 3
"""The grid's cost divided by the tuner's."""
NEAR = 1.05
"""A loss at most this many times the grid's lowest counts as found."""


def task(seed: int) -> Task:
    """Return the task: digits, as in docs/science.md, with 8 workers and 240 steps."""
    settings = runner.Settings(
        recipes=(), network=Network(1), per_host=WORKERS, workload="digits", seconds=None,
        steps=STEPS, seeds=(seed,),
    )  # fmt: skip
    return Task(settings, compute=1e-3)


def grid(space: Space, seed: int, out: Path, progress: Callable[[int], None]) -> list[Trial]:
    """Train every setting to the end and return the trials."""
    here = task(seed)
    settings = {"recipe": space.recipe, "grids": dict(space.grids), "seed": seed, "steps": STEPS}
    with open_journal(out / f"grid-{seed}.jsonl", settings) as study:

        def train(setting: Setting, report: Report) -> Run:
            return here.run(space.text(setting), float(setting["lr"] or 1), report)

        for _ in tuning.tune(study, space, train, prune=False):
            progress(len(tuning.ended(study, space)))
        return tuning.ended(study, space)


def mean(grids: list[list[Trial]]) -> list[Trial]:
    """Return the grid that --repeat trains, with losses averaged over several seeds."""
    found = []
    for runs in zip(*map(in_order, grids), strict=True):
        curve = {check: statistics.fmean(t.curve[check] for t in runs) for check in runs[0].curve}
        loss = statistics.fmean(t.run.loss for t in runs)
        found.append(replace(runs[0], run=replace(runs[0].run, loss=loss), curve=curve))
    return found


def in_order(trials: list[Trial]) -> list[Trial]:
    """Sort the trials by setting."""
    return sorted(trials, key=lambda trial: str(trial.setting))


def replay(space: Space, runs: list[Trial]) -> Evaluate:
    """Return a function that looks up runs in the grid instead of training."""
    known = {tuple(trial.setting.items()): trial for trial in runs}
    here = task(0)

    def train(setting: Setting, report: Report) -> Run:
        trial = known[tuple((name, setting[name]) for name in space.grids)]
        planned = Schedule(here.recipe(space.text(setting)), None, STEPS, VALIDATIONS)
        for step in range(1, STEPS + 1):
            if planned.is_check(step) and planned.check(step, 0.0):
                report(step, STEPS, trial.curve[VALIDATIONS * step // STEPS])
        return trial.run

    return train


@dataclass(frozen=True)
class Found:
    """The tuner's lowest loss and its cost, both divided by the grid's, and its trials."""

    ratio: float
    cost: float
    trials: int
    stopped: int


def search(space: Space, runs: list[Trial], seed: int) -> Found:
    """Tune until another trial might exceed the tuner's share of the grid's cost."""
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
    """Return the same ratio for random settings trained to the end."""
    drawn = random.Random(seed).sample(runs, len(runs) // SHARE)
    return tuning.best(drawn).run.loss / tuning.best(runs).run.loss


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune")
    parser.add_argument("--seeds", type=int, default=6, help="seeds of the workload (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="first of these seeds (%(default)s)")
    parser.add_argument("--tuners", type=int, default=10, help="tuners per seed (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("laconic-tune-benchmark"), metavar="DIR")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=100)
    space = space_of(RECIPE, {}, WORKERS)
    table = Table("seeds", "lowest loss", "ratio: median", "worst", "within 5%", "cost", "trials",
                  "stopped", "random: median", "within 5%", box=None)  # fmt: skip
    grids = []
    seeds = range(options.first, options.first + options.seeds)
    for seed in seeds:
        with console.status("") as status:
            prefix = f"seed {seed}: of {space.size} settings "
            runs = grid(space, seed, options.out, lambda n, t=prefix: status.update(f"{t}{n}"))  # type: ignore[misc]
        grids.append(runs)
    named = {str(seed): runs for seed, runs in zip(seeds, grids, strict=True)}
    for first in range(0, len(grids) - REPEAT + 1, REPEAT):
        several = grids[first : first + REPEAT]
        named[f"{seeds[first]}-{seeds[first + REPEAT - 1]}"] = mean(several)
    for name, runs in named.items():
        table.add_row(name, *figures(space, runs, options.tuners))
    console.print(table)


def figures(space: Space, runs: list[Trial], tuners: int) -> list[str]:
    """Return the table cells for several tuners on one grid."""
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
