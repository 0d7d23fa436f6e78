"""Load a user's own files: workloads to train and recipes to race.

Each process that needs a file, including the launcher, runs it once, with the file's directory on
the import path. Any error in it becomes a ``ValueError`` of one line with the file and line number.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache, wraps
from pathlib import Path
from textwrap import shorten
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from laconic.algorithms.recipes import RECIPES
from laconic.algorithms.round import Recipe, is_recipe
from laconic.errors import check_float
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

MISSING = object()
PROTOCOL = {
    "model": "a function () that builds the nn.Module",
    "optimizer": "a function (model) that builds its torch optimizer, at the peak learning rate",
    "batches": "a function (worker, workers, seed) that returns each worker's endless batches",
    "loss": "a function (model, batch) that returns the mean loss, a tensor with one element",
    "validation": "a list of batches of equal size",
}
"""Required attributes of a workload. `Workload` describes them in detail."""
OPTIONS = ("name", "warmup", "final")
"""Optional attributes."""


def is_workload(text: str) -> bool:
    """Return whether ``text`` names a function in a user's file, not a built-in workload."""
    return text.endswith(".py") or ".py:" in text


def load_workload(name: str, data: str | None) -> Workload:
    """Return the workload called ``name``, ours or a user's."""
    make = workload if is_workload(name) else workloads.load
    return make(name, data=None if data is None else Path(data))


def workload(text: str, data: Path | None) -> Workload:
    """Return the workload from the function in ``FILE.py:FUNCTION``, by default ``make``.

    The function is called with ``data`` if given. Raises ``ValueError`` if the result is not a
    workload.
    """
    path, function = _split(text)
    make = getattr(load(path), function, None)
    if not callable(make):
        functions = [n for n, f in vars(load(path)).items() if inspect.isfunction(f)]
        raise ValueError(
            f"{path} has no function {function!r}: it has {', '.join(functions) or 'none'}"
        )
    arguments = () if data is None else (data,)
    try:
        inspect.signature(make).bind(*arguments)
    except TypeError:
        problem = "takes no argument, but --data was given" if arguments else "needs --data FILE"
        raise ValueError(f"{text}: {function} {problem}") from None
    with _user_code():
        made = make(*arguments)
    return made if isinstance(made, Workload) else _from_names(text, made)


def _split(text: str) -> tuple[Path, str]:
    if text.endswith(".py"):
        return Path(text), "make"
    file, _, function = text.rpartition(":")
    return Path(file), function


def _from_names(text: str, made: object) -> Workload:
    """Return a workload from a dictionary's items or an object's attributes."""
    fields: dict[str, Any] = {}
    for name in (*PROTOCOL, *OPTIONS):
        value = made.get(name, MISSING) if isinstance(made, Mapping) else MISSING
        value = getattr(made, name, MISSING) if value is MISSING else value
        if value is not MISSING:
            fields[name] = value
    missing = [f"{name} ({what})" for name, what in PROTOCOL.items() if name not in fields]
    if missing:
        raise ValueError(f"{text} returned nothing called {', '.join(missing)}")
    return Workload(**{"name": text, **fields})


def try_out(workload: Workload, text: str, workers: int, seed: int) -> None:
    """Check ``workload`` with one model and a few batches, in the launcher.

    This finds errors before many processes start. Raises ``ValueError``.
    """

    def require(met: bool, name: str, found: str) -> None:
        if not met:
            raise ValueError(f"{text}: {name} must be {PROTOCOL[name]}; {found}")

    for name in ("model", "optimizer", "batches", "loss"):
        value = getattr(workload, name)
        require(callable(value), name, f"it is {_shown(value)}")
    check_float(f"{text}: warmup", workload.warmup, 0.0)
    check_float(f"{text}: final", workload.final, 0.0)
    validation = workload.validation
    require(isinstance(validation, Sequence), "validation", f"it is {_shown(validation)}")
    sizes = {_size(batch) for batch in validation}
    found = f"batches of {', '.join(sorted(map(str, sizes)))}" if sizes else "none"
    require(len(sizes) == 1, "validation", f"it has {found}")
    with _user_code():
        torch.manual_seed(seed)
        model = workload.model()
    require(isinstance(model, nn.Module), "model", f"it built {_shown(model)}")
    with _user_code():
        optimizer = workload.optimizer(model)
    is_optimizer = isinstance(optimizer, torch.optim.Optimizer)
    require(is_optimizer, "optimizer", f"it built {_shown(optimizer)}")
    tried = [validation[0]]
    for worker in sorted({0, workers - 1}):
        with _user_code():
            stream = workload.batches(worker, workers, seed)
        is_stream = isinstance(stream, Iterator)
        require(is_stream, "batches", f"it returned {_shown(stream)}, which is not an iterator")
        with _user_code():
            batch = next(stream, None)
        require(batch is not None, "batches", f"worker {worker} has none")
        assert batch is not None
        tried.append(batch)
    for batch in tried:
        with _user_code():
            loss = workload.loss(model, batch)
        is_scalar = isinstance(loss, Tensor) and loss.numel() == 1
        require(is_scalar, "loss", f"it returned {_shown(loss)}")
        require(loss.requires_grad, "loss", "it returned one without a gradient")


def _size(batch: object) -> int | None:
    """Return the length of a batch's first tensor, the number of samples. None without tensor."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(parts, Iterable) or isinstance(parts, str):
        return None
    return next((size for size in map(_size, parts) if size is not None), None)


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return shorten(repr(value), 60, placeholder=" ...")


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
            raise ValueError(f"must return a tuple of laconic.Round, not {_shown(rounds)}")
        return rounds  # type: ignore[no-any-return]

    return recipe
