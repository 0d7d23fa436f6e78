"""``laconic tune``: find good settings of a recipe on your workload."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.cli.options import declare
from laconic.errors import check_float, check_int

if TYPE_CHECKING:
    import optuna

    from laconic.advisor.tune.runs import Task
    from laconic.advisor.tune.space import Space
    from laconic.advisor.tune.tuning import Trial

TRIALS, STEPS = 20, 240
"""Defaults."""
OPTIONS = (
    "--values --workload --data --rules --workers --group-size --bandwidth --latency --step-time "
    "--trials --no-stop --repeat --seed --out"
)


def add(parser: Any) -> None:
    """Add the description and the options of the command."""
    parser.description = (
        "Train a workload under one setting of a recipe after another, with simulated workers on "
        "this machine. Stop settings that fall behind early, and show quality against speed. To "
        "resume an interrupted run, repeat the same command."
    )
    parser.epilog = (
        "Free names in the recipe are tuned, and so is lr: the learning rate of the local "
        "optimizer, as a multiple of the workload's. For example: laconic tune "
        "'slowmo(local_sgd(12), period=outer, momentum=momentum)' --values outer=12,24,48"
    )
    parser.add_argument(
        "recipe",
        nargs="?",
        default="slowmo",
        metavar="RECIPE",
        help="slowmo (default), local_sgd, diloco, ddp, sgp or easgd with the parameters "
        "usually tuned, or a recipe with free names",
    )
    network: dict[str, Any] = {"workers": 4, "bandwidth": "100mbit", "latency": "0"}
    usual: dict[str, Any] = {"workload": "digits", "trials": TRIALS, "repeat": 1, "seed": 0}
    declare(parser, OPTIONS, **network, **usual, out="laconic-tune")
    declare(parser.add_mutually_exclusive_group(), "--steps --seconds", steps=STEPS)


def run(arguments: argparse.Namespace) -> int:
    """Return 0 if a setting was found."""
    from laconic.advisor.tune import report, tuning
    from laconic.advisor.tune.journal import open_journal
    from laconic.advisor.tune.space import LR

    space, task = _space_and_task(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    settings = _settings(arguments, space, task)
    with open_journal(arguments.out / "journal.jsonl", settings) as study:
        timed = _timed(study, space, task)

        def evaluate(setting: Any, report_loss: Any) -> Any:
            return timed.run(space.text(setting), float(setting[LR]), report_loss)

        done = len(tuning.ended(study, space))
        try:
            prune = not arguments.no_stop
            tried = tuning.tune(
                study, space, evaluate, trials=arguments.trials, seed=arguments.seed, prune=prune
            )
            for number, trial in enumerate(tried, done + 1):
                text = f"{number}/{arguments.trials} {report.trial_text(space, trial)}"
                print(text, file=sys.stderr, flush=True)
        finally:
            _show(space, tuning.ended(study, space), timed)
        tuning.best(tuning.ended(study, space))  # raises if no trial succeeded
    return 0


def _space_and_task(arguments: argparse.Namespace) -> tuple[Space, Task]:
    """Return what to tune, and on what. Raises ``ValueError`` for bad options."""
    from laconic.advisor.tune.runs import Task
    from laconic.advisor.tune.space import parse_values, space_of
    from laconic.lab.emulation.network import Network
    from laconic.lab.race.runner import Settings

    check_int("seed", arguments.seed, 0)
    grids: dict[str, Any] = {}
    for name, values in map(parse_values, arguments.values):
        if name in grids:
            raise ValueError(f"--values is given twice for {name}")
        grids[name] = values
    settings = Settings(
        recipes=(),
        rules=arguments.rules,
        network=Network(1, arguments.bandwidth, arguments.latency),
        per_host=arguments.workers,
        group_size=arguments.group_size,
        workload=arguments.workload,
        data=arguments.data,
        seconds=None,
        steps=arguments.steps,
        seeds=tuple(range(arguments.seed, arguments.seed + arguments.repeat)),
    )
    space = space_of(arguments.recipe, grids, arguments.workers, settings.user_recipes())
    compute = math.nan
    if arguments.step_time is not None:
        compute = check_float("step-time", arguments.step_time, 0.0, strict=True)
    if arguments.seconds is not None:
        check_float("seconds", arguments.seconds, 0.0, strict=True)
    settings.check()
    return space, Task(settings, compute, arguments.seconds)


def _settings(arguments: argparse.Namespace, space: Space, task: Task) -> dict[str, Any]:
    """Return all that the trials' results depend on. A journal belongs to one set of these."""
    import torch

    workload = arguments.workload.rpartition(":")[0] or arguments.workload
    files = [Path(name) for name in (workload, arguments.rules, arguments.data) if name]
    names = (
        "seconds", "workload", "workers", "group_size", "bandwidth", "latency", "step_time",
        "no_stop", "seed", "repeat",
    )  # fmt: skip
    return {
        "recipe": space.recipe,
        "values": {name: list(values) for name, values in space.grids.items()},
        "steps": task.race.steps,
        **{name: getattr(arguments, name) for name in names},
        "files": {f.name: sha256(f.read_bytes()).hexdigest() for f in files if f.is_file()},
        "torch": torch.__version__,
    }


def _timed(study: optuna.Study, space: Space, task: Task) -> Task:
    """Return the task with the compute seconds of a step: given, from the journal, or measured.

    Raises ``ValueError`` if a setting cannot run with that value.
    """
    from laconic.advisor.tune.journal import COMPUTE
    from laconic.advisor.tune.runs import measure_compute

    saved = study.user_attrs.get(COMPUTE)
    if math.isnan(task.compute):
        task = replace(task, compute=saved or measure_compute(task))
    task.check(list({space.text(setting): None for setting in space.settings()}))
    if saved is None:
        study.set_user_attr(COMPUTE, task.compute)
    return task


def _show(space: Space, trials: list[Trial], task: Task) -> None:
    """Print the table and the summary, if a trial has finished."""
    from laconic.advisor.tune import report
    from laconic.units import format_rate, format_seconds

    if not any(trial.status == "ok" for trial in trials):
        return
    latency = format_seconds(task.race.network.latency)
    print(
        f"{space.recipe}\n{task.race.workload}, {task.workers} simulated workers, times predicted, "
        f"{format_rate(task.race.network.bandwidth or math.inf)}, {latency} round trip\n"
    )
    print(*report.table(space, trials), "", sep="\n")
    print(report.summary(space, trials, task.race.group_size))
