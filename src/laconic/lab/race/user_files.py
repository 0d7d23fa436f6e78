"""Load a user's own files: workloads to train and recipes to race.

Each process that needs a file, including the launcher, runs it once, with the file's directory on
the import path. Any error in it becomes a ``ValueError`` of one line with the file and line number.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from laconic.algorithms.recipes import RECIPES
from laconic.algorithms.round import Recipe, is_recipe
from laconic.lab.race import workloads
from laconic.lab.race.workloads import Workload

_loaded: dict[str, Path] = {}
"""Files that were run: absolute path to the path that the user gave."""


def error_line(error: BaseException) -> str:
    """Return ``error`` in one line, with the innermost line of a user's file that it involves."""
    text = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".rstrip(": ")
    if isinstance(error, SyntaxError) and error.filename in _loaded:
        return (
            f"{_loaded[error.filename]}, line {error.lineno}: {type(error).__name__}: {error.msg}"
        )
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in _loaded:
            return f"{_loaded[frame.filename]}, line {frame.lineno}: {text}"
    return text


@contextmanager
def _user_code() -> Iterator[None]:
    """Run a user's code: raise its errors as one line, and send what it prints to stderr."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        raise ValueError(error_line(error)) from error


@cache
def load(path: Path, *, importable: bool = True) -> ModuleType:
    """Load the file at ``path`` as a module. ``importable`` adds its directory to the import path.

    Raises ``ValueError`` if the file is missing or has an error.
    """
    absolute = path.resolve()
    if not absolute.is_file():
        raise ValueError(f"no file {path}: check the path")
    name = f"laconic_user_{absolute.stem}_{len(_loaded)}"
    spec = importlib.util.spec_from_file_location(name, absolute)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file: its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    _loaded[str(absolute)] = path
    sys.modules[name] = module  # dataclasses look up their module
    if importable and str(absolute.parent) not in sys.path:
        sys.path.append(str(absolute.parent))  # at the end, so that it hides no other module
    with _user_code():
        spec.loader.exec_module(module)
    return module


# --- workloads ------------------------------------------------------------------------------------

PROTOCOL = {
    "model": "a function () that builds the nn.Module",
    "optimizer": "a function (model) that builds its torch optimizer, at the peak learning rate",
    "batches": "a function (worker, workers, seed) that returns each worker's endless batches",
    "loss": "a function (model, batch) that returns the mean loss, a tensor with one element",
    "validation": "a list of batches of equal size",
}
"""Required items of a workload. `Workload` describes them in detail."""


def is_workload(text: str) -> bool:
    """Return whether ``text`` names a function in a user's file, not a built-in workload."""
    return text.endswith(".py") or ".py:" in text


def load_workload(name: str, data: str | None) -> Workload:
    """Return the workload called ``name``, ours or a user's."""
    make = workload if is_workload(name) else workloads.load
    return make(name, data=None if data is None else Path(data))


def workload(text: str, data: Path | None) -> Workload:
    """Return the workload from the function in ``FILE.py:FUNCTION``, by default ``make``.

    The function is called with ``data`` if given, and returns the items of `Workload`. Raises
    ``ValueError`` if the result is not a workload.
    """
    file, _, function = (text if ".py:" in text else f"{text}:make").rpartition(":")
    module = load(Path(file))
    make = getattr(module, function, None)
    if not callable(make):
        functions = ", ".join(n for n, f in vars(module).items() if inspect.isfunction(f))
        raise ValueError(f"{file} has no function {function!r}: it has {functions or 'none'}")
    with _user_code():
        made = make() if data is None else make(data)
        fields = {"name": text, **(vars(made) if isinstance(made, Workload) else made)}
    missing = [f"{name} ({what})" for name, what in PROTOCOL.items() if name not in fields]
    if missing:
        raise ValueError(f"{text} returned nothing called {', '.join(missing)}")
    with _user_code():
        return Workload(**fields)


def try_out(workload: Workload, workers: int, seed: int) -> None:
    """Take a step in the launcher, to find errors before many processes start.

    Raises ``ValueError``.
    """
    with _user_code():
        torch.manual_seed(seed)
        model = workload.model()
        optimizer = workload.optimizer(model)
        batch = next(workload.batches(workers - 1, workers, seed))
        torch.autograd.backward(workload.loss(model, batch))
        optimizer.step()
        workload.loss(model, workload.validation[0])


# --- rules ----------------------------------------------------------------------------------------


def rules(path: Path) -> dict[str, Callable[..., Recipe]]:
    """Return the recipes by name: the public functions defined in the file at ``path``."""
    module = load(path)
    functions = {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
    }
    if not functions:
        raise ValueError(f"{path} defines no recipe: a public function that returns its rounds")
    existing = ", ".join(name for name in functions if name in RECIPES)
    if existing:
        raise ValueError(f"{path} defines {existing}, which laconic already has: rename it")
    return {name: _checked(function) for name, function in functions.items()}


def _checked(function: Callable[..., Any]) -> Callable[..., Recipe]:
    @wraps(function)
    def recipe(*arguments: Any, **options: Any) -> Recipe:
        try:
            with redirect_stdout(sys.stderr):
                rounds = function(*arguments, **options)
        except ValueError:
            raise  # the message is meant for the user
        except Exception as error:
            raise ValueError(error_line(error)) from error
        if not is_recipe(rounds):
            raise ValueError(f"must return a tuple of laconic.Round, not {rounds!r:.60}")
        return rounds  # type: ignore[no-any-return]

    return recipe
