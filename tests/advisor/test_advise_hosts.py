"""``laconic advise --workload`` as a user runs it, on emulated hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laconic.cli import main

LONG_STEPS = """
import time
import torch
from torch import nn

def loss(model, batch):
    time.sleep(0.05)  # a step takes so long on every machine, whatever else that does
    return model(batch).square().mean()

def stream():
    while True:
        yield torch.randn(8, 64)

def make():
    return {
        "model": lambda: nn.Linear(64, 200),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "batches": lambda worker, workers, seed: stream(),
        "loss": loss,
        "validation": [torch.randn(8, 64)],
    }
"""
BROKEN = """
import torch
from torch import nn

class Broken(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        Broken.calls += 1
        if Broken.calls > 6:
            raise RuntimeError("out of luck")
        return self.layer(x)

def stream():
    while True:
        yield torch.randn(8, 4)

def make():
    return {
        "model": Broken,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "batches": lambda worker, workers, seed: stream(),
        "loss": lambda model, batch: model(batch).square().mean(),
        "validation": [torch.randn(8, 4)],
    }
"""


def test_a_workload_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--hosts", "2", "--bandwidth", "20mbit", "--steps", "6", "--json"]
    assert main(["advise", "--workload", "digits", "--recipe", "noloco(8)", *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["facts"]["workers"] == 2 and told["facts"]["parameters"] == 9_610
    # presence only: how fast the network seems depends on the machine, see `fit` and `measure`
    assert 1e6 < told["facts"]["rate"] < 1e9
    assert told["rows"][-1]["recipe"] == "noloco(8)"
    assert len(told["computes"]) == 2 and told["facts"]["compute"] > min(told["computes"])


def test_a_slow_host_a_slow_network_and_lost_packets_are_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(LONG_STEPS)
    network = ["--bandwidth", "20mbit", "--bandwidth-host", "1=2mbit", "--loss", "2%"]
    options = ["--hosts", "3", "--slow-host", "2=4", "--latency", "5ms", "--steps", "6", "--json"]
    assert main(["advise", "--workload", f"{tmp_path}/mine.py:make", *network, *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert 0 < told["facts"]["loss"] < 0.2
    assert 2.4e-3 < told["facts"]["one_way"] < 1, "never less than was given"
    assert [(s["rank"], s["what"]) for s in told["slow"]] == [(2, "steps"), (1, "network")]
    assert any("quorum=2" in row["recipe"] for row in told["rows"])


def test_what_fails_in_a_workload_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(BROKEN)
    options = ["--hosts", "2", "--steps", "6", "--workload", f"{tmp_path}/mine.py:make"]
    assert main(["advise", *options]) == 2
    said = capsys.readouterr().err
    assert "out of luck" in said and said.count("\n") == 1
