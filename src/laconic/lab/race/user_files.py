"""A user's own files: a workload to train, and recipes to race.

A file is run once in every process that needs it, the launcher included, with its own directory
importable. Whatever goes wrong in it becomes a ``ValueError`` of one line that names the line.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache, wraps
from itertools import islice
from pathlib import Path
from textwrap import shorten
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from laconic.algorithms.recipes import RECIPES
from laconic.algorithms.round import Recipe, is_recipe
from laconic.errors import check_float
from laconic.lab.race.workloads import Workload

_loaded: dict[str, Path] = {}
"""Files that were run, by their absolute path, as the user spelled them."""


def told(error: BaseException) -> str:
    """``error`` in one line, with the last line of a user's own file that had a part in it."""
    said = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".rstrip(": ")
    if isinstance(error, SyntaxError) and error.filename in _loaded:
        return (
            f"{_loaded[error.filename]}, line {error.lineno}: {type(error).__name__}: {error.msg}"
        )
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in _loaded:
            return f"{_loaded[frame.filename]}, line {frame.lineno}: {said}"
    return said


@contextmanager
def _in_one_line() -> Iterator[None]:
    """Around a user's code: what it raises in one line; what it prints is no result of ours."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        raise ValueError(told(error)) from error


@cache
def load(path: Path, *, importable: bool = True) -> ModuleType:
    """The module that the file at ``path`` is; ``importable``: with the files beside it. Raises
    ``ValueError`` where there is none, or for an error in it."""
    absolute = path.resolve()
    if not absolute.is_file():
        raise ValueError(f"no file {path}")
    name = f"laconic_own_{absolute.stem}_{len(_loaded)}"
    spec = importlib.util.spec_from_file_location(name, absolute)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file: its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    _loaded[str(absolute)] = path
    sys.modules[name] = module  # dataclasses look their module up
    if importable and str(absolute.parent) not in sys.path:
        sys.path.append(str(absolute.parent))  # last, so that it hides no module of others
    with _in_one_line():
        spec.loader.exec_module(module)
    return module


# --- workloads ------------------------------------------------------------------------------------

MISSING = object()
PROTOCOL = {
    "model": "a function () that builds the nn.Module",
    "optimizer": "a function (model) that builds its torch optimizer, at the peak learning rate",
    "batches": "a function (worker, workers, seed) that gives endless batches, each worker's own",
    "loss": "a function (model, batch) that gives the mean loss, a tensor of one number",
    "validation": "a list of batches of equal size",
}
"""What a workload must have, and what each is. `Workload` says the same at length."""
OPTIONS = ("name", "warmup", "final")
"""What it may have."""
TRIED_BATCHES, TRIED_SECONDS = 1000, 1.0
"""How many batches, and for how long, are drawn to see whether they end."""


def is_workload(text: str) -> bool:
    """Whether ``text`` names a function in a user's file, rather than one of laconic's own."""
    return text.endswith(".py") or ".py:" in text


def workload(text: str, data: Path | None) -> Workload:
    """What the function in ``FILE.py:FUNCTION`` returns; ``make`` where none is named. It is called
    with ``data`` if there is any. Raises ``ValueError`` for what is no workload."""
    path, function = _split(text)
    make = getattr(load(path), function, None)
    if not callable(make):
        functions = [n for n, f in vars(load(path)).items() if inspect.isfunction(f)]
        raise ValueError(
            f"{path} has no function {function!r}: it has {', '.join(functions) or 'none'}"
        )
    given = () if data is None else (data,)
    try:
        inspect.signature(make).bind(*given)
    except TypeError:
        lacks = "takes no argument, but --data was given" if given else "needs --data FILE"
        raise ValueError(f"{text}: {function} {lacks}") from None
    with _in_one_line():
        made = make(*given)
    return made if isinstance(made, Workload) else _from_names(text, made)


def _split(text: str) -> tuple[Path, str]:
    if text.endswith(".py"):
        return Path(text), "make"
    file, _, function = text.rpartition(":")
    return Path(file), function


def _from_names(text: str, made: object) -> Workload:
    """From a dictionary's items, or any object's attributes."""
    given: dict[str, Any] = {}
    for name in (*PROTOCOL, *OPTIONS):
        value = made.get(name, MISSING) if isinstance(made, Mapping) else MISSING
        value = getattr(made, name, MISSING) if value is MISSING else value
        if value is not MISSING:
            given[name] = value
    missing = [f"{name} ({what})" for name, what in PROTOCOL.items() if name not in given]
    if missing:
        raise ValueError(f"{text} returned nothing called {', '.join(missing)}")
    return Workload(**{"name": text, **given})


def try_out(workload: Workload, text: str, workers: int, seed: int) -> None:
    """Raise ``ValueError`` unless ``workload`` keeps the protocol, as far as one model and a few
    batches show: in the launcher, before many processes find out."""

    def refusal(name: str, found: str) -> ValueError:
        return ValueError(f"{text}: {name} must be {PROTOCOL[name]}; {found}")

    for name in ("model", "optimizer", "batches", "loss"):
        if not callable(getattr(workload, name)):
            raise refusal(name, f"it is {_shown(getattr(workload, name))}")
    check_float(f"{text}: warmup", workload.warmup, 0.0)
    check_float(f"{text}: final", workload.final, 0.0)
    with _in_one_line():
        torch.manual_seed(seed)
        model = workload.model()
    if not isinstance(model, nn.Module):
        raise refusal("model", f"it built {_shown(model)}")
    with _in_one_line():
        optimizer = workload.optimizer(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise refusal("optimizer", f"it built {_shown(optimizer)}")
    if not isinstance(workload.validation, Sequence):
        raise refusal("validation", f"it is {_shown(workload.validation)}")
    sizes = {_size(batch) for batch in workload.validation}
    if len(sizes) != 1:
        found = f"batches of {', '.join(map(str, sorted(sizes, key=str)))}" if sizes else "none"
        raise refusal("validation", f"it has {found}")
    tried = [workload.validation[0]]
    for worker in sorted({0, workers - 1}):
        with _in_one_line():
            stream = workload.batches(worker, workers, seed)
        if not isinstance(stream, Iterator):
            raise refusal("batches", f"it gave {_shown(stream)}, which is no iterator")
        with _in_one_line():
            first, count = _draw(stream)
        if count is not None:
            raise refusal("batches", f"those of worker {worker} end after {count}")
        tried.append(first)
    for batch in tried:
        with _in_one_line():
            loss = workload.loss(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise refusal("loss", f"it gave {_shown(loss)}")
        if not loss.requires_grad:
            raise refusal("loss", "it gave one without a gradient")


def _draw(stream: Iterator[Any]) -> tuple[Any, int | None]:
    """The first batch, and after how many they end, if that is soon."""
    first, count, start = None, 0, time.monotonic()
    for count, batch in enumerate(islice(stream, TRIED_BATCHES), 1):
        first = batch if count == 1 else first
        if time.monotonic() - start > TRIED_SECONDS:
            return first, None
    return first, None if count == TRIED_BATCHES else count


def _size(batch: object) -> int | None:
    """Samples in a batch: the length of its first tensor; None where it has none."""
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
    """Recipes by name: the public functions defined in the file at ``path``."""
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
    taken = ", ".join(name for name in functions if name in RECIPES)
    if taken:
        raise ValueError(f"{path} defines {taken}, which laconic has: give it another name")
    return {name: _checked(function) for name, function in functions.items()}


def _checked(function: Callable[..., Any]) -> Callable[..., Recipe]:
    @wraps(function)
    def recipe(*arguments: Any, **options: Any) -> Recipe:
        try:
            with redirect_stdout(sys.stderr):
                rounds = function(*arguments, **options)
        except ValueError:
            raise  # meant for the user as it is
        except Exception as error:
            raise ValueError(told(error)) from error
        if not is_recipe(rounds):
            raise ValueError(f"must return a tuple of laconic.Round, not {_shown(rounds)}")
        return rounds  # type: ignore[no-any-return]

    return recipe
