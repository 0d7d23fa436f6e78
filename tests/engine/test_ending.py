"""The warning at the end of a program that has left the ranks with different models."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import laconic as la
from laconic.engine import ending

from tests.support import gloo, programs

Ends = Callable[[nn.Module, torch.optim.Optimizer, la.Synchronizer], object]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()


def warned(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    recipe: la.Recipe,
    steps: int,
    end: Ends = lambda model, optimizer, sync: None,
    workers: int = 2,
) -> list[str]:
    """The warnings of a simulation whose workers take ``steps`` and then ``end``."""

    def run(rank: int) -> None:
        torch.manual_seed(rank)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = la.attach(model, optimizer, recipe)
        for _ in range(steps):
            step(model, optimizer)
        end(model, optimizer, sync)

    monkeypatch.setattr(ending, "_warned", [])
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="laconic"):
        la.simulate(run, workers=workers)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("recipe", "steps", "workers", "expected"),
    [
        (la.local_sgd(4), 3, 2, True),
        (la.local_sgd(4), 0, 2, False),
        (la.local_sgd(4), 3, 1, False),
        (la.local_sgd(4), 8, 2, False),  # a round has just made them equal
        (la.local_sgd(4, delay=2), 8, 2, True),
        (la.des_loc(4, 4, 4), 8, 2, False),
        (la.diloco(4), 8, 2, False),
        (la.streaming_diloco(4, 2), 8, 2, True),
        (la.diloco(4, quorum=2), 8, 2, True),
        (la.easgd(4), 8, 2, True),
        (la.d_psgd(), 8, 3, True),
        (la.slowmo(la.local_sgd(2), 4), 8, 2, False),
        (la.ddp(), 3, 2, False),
        (la.ddp(codec="int4"), 3, 2, False),
    ],
)
def test_ranks_that_hold_different_models_are_warned_of(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    recipe: la.Recipe,
    steps: int,
    workers: int,
    expected: bool,
) -> None:
    found = warned(caplog, monkeypatch, recipe, steps, workers=workers)
    assert found == [ending.WARNING] * expected


def in_consensus(model: nn.Module, optimizer: torch.optim.Optimizer, sync: la.Synchronizer) -> None:
    with sync.consensus():
        pass


ENDS: dict[str, Ends] = {
    "finish": lambda model, optimizer, sync: sync.finish(),
    "detach": lambda model, optimizer, sync: sync.detach(),
    "with": lambda model, optimizer, sync: sync.__exit__(None, None, None),
    "consensus": in_consensus,
    "state_dict": lambda model, optimizer, sync: sync.state_dict(),
    "switch": lambda model, optimizer, sync: sync.switch(la.local_sgd(9)),
}


@pytest.mark.parametrize("end", ENDS)
def test_who_has_averaged_or_saved_after_the_last_step_is_not_warned(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    assert warned(caplog, monkeypatch, la.local_sgd(4), 3, ENDS[end]) == []

    def and_a_step(
        model: nn.Module, optimizer: torch.optim.Optimizer, sync: la.Synchronizer
    ) -> None:
        ENDS[end](model, optimizer, sync)
        step(model, optimizer)
        step(model, optimizer)

    still_attached = end not in ("detach", "with")
    found = warned(caplog, monkeypatch, la.local_sgd(4), 3, and_a_step)
    assert found == [ending.WARNING] * still_attached


def test_a_saved_or_loaded_run_is_complete_until_its_next_step(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def save(model: nn.Module, optimizer: torch.optim.Optimizer, sync: la.Synchronizer) -> None:
        la.save(tmp_path / "saved", model, optimizer)

    def load(model: nn.Module, optimizer: torch.optim.Optimizer, sync: la.Synchronizer) -> None:
        la.load(tmp_path / "saved", model, optimizer)

    def load_and_step(
        model: nn.Module, optimizer: torch.optim.Optimizer, sync: la.Synchronizer
    ) -> None:
        load(model, optimizer, sync)
        step(model, optimizer)
        step(model, optimizer)

    assert warned(caplog, monkeypatch, la.local_sgd(4), 3, save) == []
    assert warned(caplog, monkeypatch, la.local_sgd(4), 2, load) == []
    assert warned(caplog, monkeypatch, la.local_sgd(4), 0, load_and_step) == [ending.WARNING]


def test_the_warning_comes_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(warned(caplog, monkeypatch, la.local_sgd(4), 3, workers=4)) == 1


def test_what_is_kept_until_the_end_does_not_hold_the_model() -> None:
    models: list[weakref.ref[nn.Module]] = []
    endings: list[ending.Ending] = []

    def run(rank: int) -> None:
        torch.manual_seed(rank)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = la.attach(model, optimizer, la.local_sgd(4))
        step(model, optimizer)
        models.append(weakref.ref(model))
        endings.append(sync.driver.ending)

    la.simulate(run, workers=2)
    gc.collect()
    assert [model() for model in models] == [None, None]
    assert [each.unfinished for each in endings] == [True, True]


PROGRAM = """
    import sys
    import torch
    import laconic

    def main():
        laconic.init()
        torch.manual_seed(torch.distributed.get_rank())
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = laconic.attach(model, optimizer, laconic.local_sgd(4))
        for _ in range(3):
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
        if sys.argv[1] == "finishes":
            sync.finish()
        if sys.argv[1] == "raises":
            raise ArithmeticError("the user's own")

    main()
"""


@pytest.mark.parametrize("how", ["forgets", "finishes", "raises"])
def test_every_rank_warns_when_its_program_ends(tmp_path: Path, how: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PROGRAM))
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(gloo.free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [*programs.NEW, str(script), how],
            env={**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for each in ranks:
        _, said = each.communicate(timeout=120)
        assert (each.returncode == 0) == (how != "raises"), said
        assert said.count(ending.WARNING) == (how == "forgets"), said
