"""The example for Ray Train: what it trains, and what a worker that Ray starts again does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import laconic as la

ROOT = Path(__file__).parents[2]


def made(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def by_hand(rank: int) -> tuple[float, list[torch.Tensor]]:
    """The same training without Ray: the mean loss of the last step, and the parameters before
    the training ends."""
    model, optimizer = made(rank)
    with la.attach(model, optimizer, la.diloco(10)) as sync:
        while sync.step < 200:
            x = torch.randn(32, 16)
            loss = nn.functional.mse_loss(model(x), x.square().sum(1, keepdim=True) / 16)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        own = [p.detach().clone() for p in model.parameters()]
        return sync.mean(loss), own


@pytest.mark.slow
def test_a_worker_that_is_killed_goes_on_to_the_bit(tmp_path: Path) -> None:
    paths = [ROOT / "src", ROOT / "examples", ROOT]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.integrations.ray_runs", str(tmp_path)],
        env={**env, "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, said = program.communicate(timeout=250)
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
            program.communicate()
    assert program.returncode == 0, said
    assert (tmp_path / "marker").exists(), "rank 1 was killed"
    found = json.loads(out.splitlines()[-1])
    hand = la.simulate(by_hand, workers=2)
    assert found["metrics"] == {"step": 200, "loss": hand[0][0]}

    def loaded(rank: int) -> list[torch.Tensor]:
        model, optimizer = made(rank)
        with la.attach(model, optimizer, la.diloco(10)):
            la.load(found["checkpoint"], model, optimizer)
            return [p.detach().clone() for p in model.parameters()]

    for own, (_, expected) in zip(la.simulate(loaded, workers=2), hand, strict=True):
        assert all(map(torch.equal, own, expected))
