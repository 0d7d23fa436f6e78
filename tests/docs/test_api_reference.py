"""The API reference: docstrings describe every argument and every choice, and their examples run.

The reference's tables are made from these docstrings and from the signatures (docs/reference.py).
"""

from __future__ import annotations

import doctest
import inspect
import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import laconic

PUBLIC = {
    name: value
    for name in laconic.__all__
    if name != "Recipe" and not inspect.ismodule(value := getattr(laconic, name))
}
METHODS = {
    "Faults.random": laconic.Faults.random,
    "Synchronizer.consensus": laconic.Synchronizer.consensus,
    "Synchronizer.finish": laconic.Synchronizer.finish,
}

WITHOUT_ARGUMENTS = (
    laconic.Synchronizer, laconic.SlowMoBaseAlgorithm, laconic.Update, laconic.Exchange
)  # fmt: skip
"""Users make none of them, or give nothing to make one."""


def sections(value: object) -> dict[str, dict[str, str]]:
    """The tables of a docstring: title, name, meaning."""
    found: dict[str, dict[str, str]] = {}
    for title, rows in re.findall(
        r"^(Args|Attributes):\n((?:    .*\n|\n(?=    ))+)",
        (inspect.getdoc(value) or "") + "\n",
        re.M,
    ):
        entries = re.findall(r"^    (\w+): ((?:.*\n)(?:     +.*\n)*)", rows, re.M)
        found[title] = {name: " ".join(text.split()) for name, text in entries}
    return found


def documented(value: Any) -> dict[str, str]:
    """What is said of each argument, also by the class that a class inherits its constructor of."""
    owners = inspect.getmro(value)[:-1] if inspect.isclass(value) else (value,)
    tables = (rows for owner in owners for rows in sections(owner).values())
    return next(tables, {})


def parameters(value: Any) -> list[str]:
    if value in WITHOUT_ARGUMENTS:
        return []
    return [name for name in inspect.signature(value).parameters if name not in ("self", "cls")]


FOR_HINTS = {"DeviceMesh": DeviceMesh}
"""What modules import for type checkers only."""


def literals(hint: object) -> Iterator[str]:
    if get_origin(hint) is Literal:
        yield from (each for each in get_args(hint) if isinstance(each, str))
    for part in get_args(hint):
        yield from literals(part)


def test_every_argument_and_choice_is_described_and_every_public_name_has_an_example() -> None:
    for name, value in {**PUBLIC, **METHODS}.items():
        told = documented(value)
        assert list(told) == parameters(value), name
        assert name in METHODS or ">>> " in (inspect.getdoc(value) or ""), name
        function = value.__init__ if inspect.isclass(value) else value
        hints = typing.get_type_hints(function, localns=FOR_HINTS) if told else {}
        for argument, text in told.items():
            for choice in literals(hints.get(argument)):
                assert f'``"{choice}"``' in text, f"{name}({argument}=): {choice}"


def train(number: int) -> None:
    """What an example calls the program of a worker of an elastic run."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(model, optimizer, laconic.local_sgd(2), elastic=laconic.Elastic()):
        for _ in range(4):
            model(torch.randn(8, 4) + number).square().mean().backward()
            optimizer.step()


LONG = ("advise", "Advice")
"""Whose examples train for seconds."""


def names() -> dict[str, Any]:
    """What the examples take for granted."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "laconic": laconic, "torch": torch, "model": model, "optimizer": optimizer, "train": train,
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:there is one node only")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in PUBLIC]
)
def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace").mkdir()
    for worker in ("a", "b"):
        line = json.dumps({"unit": 0, "workers": ["a", "b"]})
        (tmp_path / "trace" / f"{worker}.jsonl").write_text(line + "\n")
    value = PUBLIC[name]
    test = doctest.DocTestParser().get_doctest(
        inspect.getdoc(value) or "", names(), name, None, None
    )
    assert test.examples
    said: list[str] = []
    laconic.init()
    try:
        ended = doctest.DocTestRunner(verbose=False).run(test, out=said.append, clear_globs=False)
    finally:
        if "sync" in test.globs:
            test.globs["sync"].detach()  # its files are in this directory
        torch.distributed.destroy_process_group()
    assert ended.failed == 0, "".join(said)
