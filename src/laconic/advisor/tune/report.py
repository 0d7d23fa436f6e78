"""Report the results of a search: a table, and the code to paste."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from laconic.advisor import rows
from laconic.advisor.tune.space import LR, Setting, Space
from laconic.advisor.tune.tuning import Trial, best
from laconic.algorithms.parse import qualified


def setting_text(space: Space, setting: Setting) -> str:
    """Return the setting as text, without names that have only one value."""
    return " ".join(f"{name}={setting[name]}" for name in tuned(space)) or "the only setting"


def tuned(space: Space) -> list[str]:
    """Return the names that have more than one value."""
    return [name for name, values in space.grids.items() if len(values) > 1]


def trial_text(space: Space, trial: Trial) -> str:
    """Return a line about a trial."""
    ending = "" if trial.status == "ok" else f", {trial.status} after {trial.run.steps} steps"
    return f"{setting_text(space, trial.setting)}: loss {trial.run.loss:.4f}{ending}"


def table(space: Space, trials: Sequence[Trial]) -> Iterator[str]:
    """Yield the lines of a table of the finished trials, the lowest loss first."""
    lines = [(*tuned(space), "loss", "ms/step", "MB/step", "steps")]
    for trial in sorted((t for t in trials if t.status == "ok"), key=lambda t: t.run.loss):
        run = trial.run
        lines.append(
            (
                *(str(trial.setting[name]) for name in tuned(space)),
                f"{run.loss:.4f}",
                f"{run.seconds_per_step * 1e3:.4g}",
                f"{run.bytes_per_step / 1e6:.3g}",
                str(run.steps),
            )
        )
    return rows.table(lines)


def summary(space: Space, trials: Sequence[Trial], group_size: int | None = None) -> str:
    """Summarize the trials: their outcomes, the best setting, and the code for it.

    The code has groups of ``group_size`` workers if the trials had groups.
    """
    stopped = sum(trial.status == "stopped" for trial in trials)
    diverged = sum(trial.status == "diverged" for trial in trials)
    steps = sum(trial.run.steps for trial in trials)
    winner = best(trials)
    lines = [
        f"{len(trials)} of {space.size} settings tried, in {steps} steps: {stopped} stopped early, "
        f"{diverged} diverged.",
        f"Lowest validation loss: {winner.run.loss:.4f}, {setting_text(space, winner.setting)}.",
    ]
    if names := edges(space, winner.setting):
        lines.append(f"Try values beyond the ends of {', '.join(names)}: --values {names[0]}=...")
    return "\n".join([*lines, "Code:", "", *code(space, winner.setting, group_size)])


def edges(space: Space, setting: Setting) -> list[str]:
    """Return names whose best value is the smallest or largest of at least three.

    A better value may be outside the grid. 0 and 1 do not count, since there often is nothing
    beyond.
    """
    ends = {n: (v[0], v[-1]) for n, v in space.grids.items() if space.ordered(n) and len(v) > 2}
    return [n for n, values in ends.items() if setting[n] in values and setting[n] not in (0, 1)]


def code(space: Space, setting: Setting, group_size: int | None = None) -> list[str]:
    """Return the lines of a training program."""
    recipe = qualified(space.text(setting))
    groups = "" if group_size is None else f", group_size={group_size}"
    lines = [f"    sync = laconic.attach(model, optimizer, {recipe}{groups})"]
    if setting[LR] != 1:
        lines[:0] = [
            "    for group in optimizer.param_groups:",
            f'        group["lr"] *= {setting[LR]}  # of the workload\'s own',
        ]
    return lines
