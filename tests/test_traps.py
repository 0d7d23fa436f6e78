"""Ways to lose a run silently that no other test is about."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import laconic
from laconic.lab.emulation.cluster import Loopback, launch


def test_slow_momentum_of_few_workers() -> None:
    """A momentum of 0.5 costs a lot with four workers and few slow steps: the default is lower."""

    def loss(momentum: float | None) -> float:
        recipe = laconic.slowmo(laconic.local_sgd(3), period=48, momentum=momentum)

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
            for _ in range(96):
                batch = torch.randint(0, 1024, (16,), generator=generator)
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
                optimizer.step()
            sync.finish()
            with torch.no_grad():
                return float(nn.functional.mse_loss(model(x), y))

        return laconic.simulate(run, workers=4)[0]

    plain = loss(0.0)
    assert loss(None) < 2 * plain < loss(0.5)


PROGRAM = """
import os, signal, sys, time
import torch, laconic

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(1000 if index == 3 else 0)  # one worker is busy, the others are idle
        return torch.zeros(4)

torch.set_num_threads(1)
laconic.init()
rank, what = torch.distributed.get_rank(), sys.argv[1]
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
period = 2 if what == "in a round" else 10**6
sync = laconic.attach(model, optimizer, laconic.local_sgd(period))
if "round" in what:
    loader = torch.utils.data.DataLoader(Data(), batch_size=1, num_workers=5, prefetch_factor=1)
    next(iter(loader))
if what == "finish":
    sync.finish()
try:
    for step in range(10**6 if "round" in what else 150):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        if rank == 1 and step == 20:
            if "round" in what:
                os.kill(os.getpid(), signal.SIGKILL)
            sys.exit()
    print("trained alone")
    if what == "no finish":
        sync.finish()
except laconic.LinkError as error:
    print("LinkError", list(error.ranks))
sys.stdout.flush()
os._exit(0)  # do not wait for DataLoader workers
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("in a round", "LinkError [1]\n"),
        ("between rounds", "LinkError [1]\n"),
        ("finish", "trained alone\n"),
        ("no finish", "trained alone\nLinkError [1]\n"),
    ],
)
def test_a_rank_that_is_lost_or_ends(what: str, said: str) -> None:
    """A killed rank is named although its DataLoader workers, which have its sockets, live on. One
    that ended normally does not fail others that go on alone, until their next round."""
    with Loopback(2) as hosts:
        job = launch(hosts, [sys.executable, "-c", PROGRAM, what])
        job.wait(250, grace=200.0)
        assert job.stdout(0) == said, job.stderr(0)
