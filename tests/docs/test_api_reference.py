"""The API reference: docstrings describe every argument, and their examples run.

The reference's tables are made from these docstrings and from the signatures (docs/reference.py).
"""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic

from tests.docs.test_code_blocks import write_trace

PUBLIC = {
    name: value
    for name in laconic.__all__
    if name != "Recipe" and not inspect.ismodule(value := getattr(laconic, name))
}
METHODS: dict[str, Any] = {
    "Synchronizer.consensus": laconic.Synchronizer.consensus,
}
WITHOUT_ARGUMENTS = ("Synchronizer", "SlowMoBaseAlgorithm", "Update", "Exchange")
"""Users make none of them, or give nothing to make one."""


def documented(value: Any) -> dict[str, str]:
    """What is said of each argument, also by the class that a class inherits its constructor of."""
    for owner in inspect.getmro(value)[:-1] if inspect.isclass(value) else (value,):
        text = (inspect.getdoc(owner) or "") + "\n"
        found = re.search(r"^(?:Args|Attributes):\n((?:    .*\n|\n(?=    ))+)", text, re.M)
        if found:
            entries = re.findall(r"^    (\w+): ((?:.*\n)(?:     +.*\n)*)", found[1], re.M)
            return {name: " ".join(meaning.split()) for name, meaning in entries}
    return {}


def test_every_argument_is_described_and_every_public_name_has_an_example() -> None:
    for name, value in {**PUBLIC, **METHODS}.items():
        told = documented(value)
        taken = () if name in WITHOUT_ARGUMENTS else inspect.signature(value).parameters
        assert list(told) == [each for each in taken if each not in ("self", "cls")], name
        assert name in METHODS or ">>> " in (inspect.getdoc(value) or ""), name


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


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    laconic.init()
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:there is one node only")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in PUBLIC]
)
def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_trace(tmp_path)
    value = PUBLIC[name]
    test = doctest.DocTestParser().get_doctest(
        inspect.getdoc(value) or "", names(), name, None, None
    )
    assert test.examples
    said: list[str] = []
    ended = doctest.DocTestRunner(verbose=False).run(test, out=said.append, clear_globs=False)
    if "sync" in test.globs:
        test.globs["sync"].detach()  # its files are in this directory
    assert ended.failed == 0, "".join(said)
