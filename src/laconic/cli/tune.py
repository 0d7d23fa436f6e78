"""``laconic tune``: find good settings of a recipe on your workload."""

from __future__ import annotations

import argparse
import hashlib
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.cli.options import declare
from laconic.errors import check_float, check_int

if TYPE_CHECKING:
    import optuna

    from laconic.advisor.tune.runs import Length, Task
    from laconic.advisor.tune.space import Space
    from laconic.advisor.tune.tuning import Trial

TRIALS, STEPS = 20, 240
"""Defaults."""
OPTIONS = (
    "--values --workload --data --rules --workers --group-size --bandwidth --latency --step-time "
    "--emulated --no-stop --repeat --seed --out"
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
        help="slowmo (default), local_sgd, diloco, ddp, sgp, easgd or eamsgd with the parameters "
        "usually tuned, or a recipe with free names",
    )
    network = {"workers": 4, "bandwidth": "100mbit", "latency": "0"}
    declare(parser, OPTIONS, **network, workload="digits", repeat=1, seed=0, out="laconic-tune")
    declare(parser.add_mutually_exclusive_group(), "--steps --seconds --megabytes", steps=STEPS)
    declare(parser.add_mutually_exclusive_group(), "--trials --budget", trials=TRIALS)


def run(arguments: argparse.Namespace) -> int:
    """Return 0 if a setting was found."""
    import matplotlib  # noqa: F401
    import rich  # noqa: F401

    from laconic.advisor.tune import tuning
    from laconic.advisor.tune.journal import open_journal
    from laconic.advisor.tune.space import LR
    from laconic.lab.emulation.jobs import terminate_as_exit

    trials, seconds = _budget(arguments)
    space, task = _space_and_task(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    settings = _settings(arguments, space, task)
    with terminate_as_exit(), open_journal(arguments.out / "journal.jsonl", settings) as study:
        timed = _timed(study, space, task)

        def evaluate(setting: Any, report_loss: Any) -> Any:
            return timed.run(space.text(setting), float(setting[LR]), report_loss)

        limits: dict[str, Any] = {"trials": trials, "seconds": seconds, "seed": arguments.seed}
        done = len(tuning.ended(study, space))
        try:
            for trial in tuning.tune(study, space, evaluate, prune=not arguments.no_stop, **limits):
                done += 1
                _log(f"{done}/{trials or '?'} {_trial_text(space, trial)}")
        finally:
            if finished := tuning.ended(study, space):
                _show(space, finished, timed, arguments.out)
        tuning.best(tuning.ended(study, space))  # raises if no trial succeeded
    return 0


def _budget(arguments: argparse.Namespace) -> tuple[int | None, float]:
    """Return the maximum number of trials and seconds."""
    if arguments.budget is not None:
        return None, check_float("budget", arguments.budget, 0.0, strict=True)
    return check_int("trials", arguments.trials, 1), math.inf


def _space_and_task(arguments: argparse.Namespace) -> tuple[Space, Task]:
    """Return what to tune, and on what. Raises ``ValueError`` for bad options."""
    from laconic.advisor.tune.runs import Task
    from laconic.advisor.tune.space import parse_values, space_of
    from laconic.lab.emulation.impairments import Impairments
    from laconic.lab.race.runner import Settings

    workers = check_int("workers", arguments.workers, 1)
    check_int("seed", arguments.seed, 0)
    repeat = check_int("repeat", arguments.repeat, 1)
    if repeat > 1 and arguments.emulated:
        raise ValueError("--repeat works with simulated workers only: remove --emulated")
    grids: dict[str, Any] = {}
    for text in arguments.values:
        name, values = parse_values(text)
        if name in grids:
            raise ValueError(f"--values is given twice for {name}")
        grids[name] = values
    if arguments.step_time is not None and arguments.emulated:
        raise ValueError(
            "--step-time is for predicted times, but --emulated measures them: remove one"
        )
    length = _length(arguments)
    settings = Settings(
        recipes=(),
        rules=arguments.rules,
        hosts=workers if arguments.emulated else 1,
        per_host=1 if arguments.emulated else workers,
        group_size=arguments.group_size,
        bandwidth=arguments.bandwidth,
        impairments=Impairments(latency=arguments.latency),
        workload=arguments.workload,
        data=arguments.data,
        seconds=length.amount if arguments.emulated and length.unit == "seconds" else None,
        steps=None if arguments.emulated and length.unit == "seconds" else STEPS,
        seeds=tuple(range(arguments.seed, arguments.seed + repeat)),
    )
    space = space_of(arguments.recipe, grids, workers, settings.user_recipes())
    compute = math.nan
    if arguments.step_time is not None:
        compute = check_float("step-time", arguments.step_time, 0.0, strict=True)
    task = Task(settings, length, arguments.emulated, compute)
    settings.check()
    return space, task


def _length(arguments: argparse.Namespace) -> Length:
    from laconic.advisor.tune.runs import Length

    if arguments.seconds is not None:
        return Length("seconds", check_float("seconds", arguments.seconds, 0.0, strict=True))
    if arguments.megabytes is not None:
        return Length("megabytes", check_float("megabytes", arguments.megabytes, 0.0, strict=True))
    return Length("steps", arguments.steps)


def _settings(arguments: argparse.Namespace, space: Space, task: Task) -> dict[str, Any]:
    """Return all that the trials' results depend on. A journal belongs to one set of these."""
    import torch

    workload = arguments.workload.rpartition(":")[0] or arguments.workload
    files = [Path(name) for name in (workload, arguments.rules, arguments.data) if name]
    return {
        "recipe": space.recipe,
        "values": {name: list(values) for name, values in space.grids.items()},
        "length": f"{task.length.amount:g} {task.length.unit}",
        "workload": arguments.workload,
        "files": {f.name: _digest(f) for f in files if f.is_file()},
        "workers": task.workers,
        "group_size": arguments.group_size,
        "bandwidth": task.race.bandwidth,
        "latency": task.race.impairments.latency,
        "step_time": arguments.step_time,
        "emulated": task.emulated,
        "no_stop": arguments.no_stop,
        "seed": arguments.seed,
        "repeat": arguments.repeat,
        "torch": torch.__version__,
    }


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


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


def _title(space: Space, task: Task) -> str:
    from laconic.units import format_rate, format_seconds

    how = "emulated hosts" if task.emulated else "simulated workers, times predicted"
    latency = format_seconds(task.race.impairments.latency)
    network = f"{format_rate(task.race.bandwidth)}, {latency} round trip"
    length = f"{task.length.amount:g} {task.length.unit} each"
    return f"{space.recipe}\n{task.race.workload}, {task.workers} {how}, {network}, {length}"


def _trial_text(space: Space, trial: Trial) -> str:
    from laconic.advisor.tune.report import setting_text

    endings = {"ok": "", "stopped": f", stopped after {trial.run.steps} steps"}
    ending = endings.get(trial.status, f", diverged after {trial.run.steps} steps")
    return f"{setting_text(space, trial.setting)}: loss {trial.run.loss:.4f}{ending}"


def _log(text: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)


def _show(space: Space, trials: list[Trial], task: Task, out: Path) -> None:
    """Print the table, the summary and the paths of the files."""
    from rich.console import Console

    from laconic.advisor.tune import report

    if not any(trial.status == "ok" for trial in trials):
        report.write_csv(space, trials, out / "trials.csv")
        return
    console, title = Console(), _title(space, task)
    paths = report.write(space, trials, title, out)
    console.print(title, highlight=False, markup=False)
    console.print()
    console.print(report.table(space, trials))
    text = report.summary(space, trials, task.race.group_size)
    console.print(text, highlight=False, markup=False, soft_wrap=True)
    written = ", ".join(map(str, (*paths, out / "journal.jsonl")))
    console.print(f"Written: {written}", highlight=False, soft_wrap=True)
