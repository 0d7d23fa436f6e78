"""Traps of defaults, messages, and the tutorial's own example."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import laconic
from benchmarks.traps import Outcome, Trapped, run_ranks, trap
from laconic.algorithms.round import Recipe, Round


def _loss(recipe: Recipe, workers: int, steps: int) -> float:
    """Return the loss after some steps of regression, with separate samples per worker."""

    def run(rank: int) -> float:
        task = torch.Generator().manual_seed(0)
        teacher = torch.randn(16, 4, generator=task)
        x = torch.randn(1024, 16, generator=task)
        y = torch.tanh(x @ teacher)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sync = laconic.attach(model, optimizer, recipe)
        generator = torch.Generator().manual_seed(100 + rank)
        for _ in range(steps):
            batch = torch.randint(0, 1024, (16,), generator=generator)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
            optimizer.step()
        sync.finish()
        with torch.no_grad():
            return float(nn.functional.mse_loss(model(x), y))

    return laconic.simulate(run, workers=workers)[0]


@trap("slow momentum by default with few workers, in the README's example")
def slow_momentum_of_few_workers() -> str:
    base = laconic.local_sgd(3)
    loss = _loss(laconic.slowmo(base, period=48), 4, 96)
    plain = _loss(laconic.slowmo(base, period=48, momentum=0.0), 4, 96)
    half = _loss(laconic.slowmo(base, period=48, momentum=0.5), 4, 96)
    text = (
        f"a loss of {loss:.3f} after 96 steps of 4 workers, {plain:.3f} without momentum, and "
        f"{half:.3f} with 0.5"
    )
    if loss > 2 * plain:
        raise Trapped(text)
    return text


@trap("streaming_diloco with its defaults equals the recipe that auto uses")
def streaming_defaults() -> str:
    default = laconic.streaming_diloco()
    advised = laconic.streaming_diloco(16, 4, 2, 0.5, "int4", lr=0.7, momentum=0.6)
    if default != advised:
        raise Trapped(f"the defaults differ from auto's settings: {default[0].update}")
    return "the same"


@trap("lsgd(4), as the README has it, without group_size")
def lsgd_without_groups() -> str:
    def run(rank: int) -> int:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sync = laconic.attach(model, optimizer, laconic.lsgd(4))
        for _ in range(4):
            model(torch.full((1, 2), rank + 1.0)).sum().backward()
            sync.report_loss(float(rank))
            optimizer.step()
        return sync.rounds

    try:
        rounds = laconic.simulate(run, workers=2)
    except ValueError as error:
        raise Trapped(str(error)) from None
    return f"{rounds[0]} round after 4 steps"


@trap("group_size with a recipe that has no groups")
def groups_without_effect() -> str:
    def run(rank: int) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        laconic.attach(model, optimizer, laconic.local_sgd(4), group_size=2)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        laconic.simulate(run, workers=4)
    messages = [str(w.message) for w in caught if "group_size" in str(w.message)]
    if not messages:
        raise Trapped("group_size is ignored without a warning, and no groups are averaged")
    return messages[0]


@trap("laconic advise recommends only periods that auto considers")
def advice_that_auto_leaves_out() -> str:
    from laconic.advisor.choices import choices
    from laconic.candidates import candidates
    from laconic.predict import Facts

    facts = Facts(4, ((845, 1024),), 4, 0.15, 1e7, 1e-3)
    kinds = ("streaming_diloco(", "local_sgd(2, delay=")
    advised = {c.recipe for c in choices(facts) if c.text.startswith(kinds)}
    chosen = {c.recipe for c in candidates(facts) if isinstance(c.recipe[0], Round)}
    if advised != chosen:
        other = [c.text for c in choices(facts) if c.recipe in advised - chosen]
        raise Trapped(f"advise has {', '.join(other) or 'fewer'}, which auto does not consider")
    return f"{len(chosen)} periods, the same for both"


@trap("TUTORIAL_SCALE=0.1 python -m tutorial 3, the tutorial's own example", seconds=240.0)
def scaled_tutorial() -> str:
    root = Path(laconic.__file__).parents[2]  # the tutorial next to this version of laconic
    if not (root / "tutorial").is_dir():
        raise RuntimeError(f"no tutorial next to {laconic.__file__}")
    env = {**os.environ, "TUTORIAL_SCALE": "0.1", "MPLBACKEND": "agg"}
    env["PYTHONPATH"] = os.pathsep.join([str(root / "src"), str(root)])
    argv = [sys.executable, "-m", "tutorial", "3"]
    ended = subprocess.run(argv, cwd=root, env=env, capture_output=True, text=True, timeout=220)
    if ended.returncode:
        lines = ended.stderr.strip().splitlines()
        where = [line.strip() for line in lines if "chapter3.py" in line]
        raise Trapped(f"it fails: {lines[-1]} {where[-1] if where else ''}")
    return "it runs to the end"


SAVING = """
import os, torch, laconic
laconic.init()
rank = int(os.environ["RANK"])
torch.manual_seed(rank)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
sync = laconic.attach(model, optimizer, laconic.local_sgd(2), timeout=20)
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    if step == 2 and rank == 0:
        laconic.save({path!r}, model, optimizer, sync)
"""


@trap("laconic.save called on rank 0 only: how much is printed, and whether it is readable")
def save_on_one_rank() -> str:
    with tempfile.TemporaryDirectory() as folder:
        ended: list[Outcome] = run_ranks(SAVING.format(path=f"{folder}/checkpoint"), 2)
    if any(outcome.code in (0, None) for outcome in ended):
        raise Trapped(f"the ranks ended with {[outcome.code for outcome in ended]}")
    lines = sum(len(outcome.err.splitlines()) for outcome in ended)
    chains = sum(outcome.err.count("another exception") for outcome in ended)
    chains += sum(outcome.err.count("direct cause") for outcome in ended)
    if chains or lines > 100 or "laconic.save" not in ended[0].last_line:
        raise Trapped(f"{lines} lines with {chains} chained tracebacks of laconic's own")
    return f"{lines} lines from two ranks, the last of which says what to do"


def _load_error(saved: Recipe, now: Recipe) -> str:
    """Return the error of a run under ``now`` that loads the state of ``saved``."""

    def run(rank: int) -> str:
        sync = []
        for recipe in (saved, now):
            model = nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            sync.append(laconic.attach(model, optimizer, recipe))
        state = sync[0].state_dict()
        try:
            sync[1].load_state_dict(state)
        except ValueError as error:
            return str(error)
        raise Trapped("the state of another recipe is loaded")

    return laconic.simulate(run, workers=1)[0]


@trap("a checkpoint that is resumed under another recipe")
def resumed_under_another_recipe() -> str:
    message = _load_error(laconic.local_sgd(12), laconic.local_sgd(24))
    if "switch" not in message or "Round(" in message:
        raise Trapped(f"the error has no remedy: {message}")
    return message


@trap("a misspelled option, in Python and as text")
def misspelled_option() -> str:
    from laconic.algorithms.parse import parse_recipe

    calls: dict[str, Callable[[], object]] = {
        "period": lambda: laconic.local_sgd(perod=3),  # type: ignore[call-arg]
        "local_sgd": lambda: parse_recipe("locl_sgd(3)"),
        "int4": lambda: laconic.ddp(codec="in4"),
    }
    for meant, call in calls.items():
        try:
            call()
        except (ValueError, TypeError) as error:
            if f"did you mean {meant!r}?" not in str(error):
                raise Trapped(f"the error does not suggest {meant!r}: {error}") from None
        else:
            raise Trapped(f"a misspelling of {meant!r} is accepted")
    return f"the errors suggest {', '.join(calls)}"
