"""The buffers of modules: averaged at rounds, kept, or rank 0's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la

from tests.support.loops import RECIPES, WORKERS, close, data, equal, sgd, train


def norm_of(model: nn.Sequential) -> Any:
    """The BatchNorm of `with_norm`, whose buffers have no types."""
    return model[1]


def with_norm(rank: int) -> nn.Sequential:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def norm_run(rank: int, recipe: la.Recipe, buffers: Any, steps: int) -> tuple[Tensor, Tensor, int]:
    """Running mean before the last step's rounds and at the end, and the counter."""
    model = with_norm(rank)
    optimizer = sgd(model)
    before: list[Tensor] = []
    optimizer.register_step_post_hook(lambda *_: before.append(norm_of(model).running_mean.clone()))
    with torch.no_grad():
        norm_of(model).running_mean += rank
    la.attach(model, optimizer, recipe, buffers=buffers)
    assert norm_of(model).running_mean.tolist() == [0.0] * 4, "rank 0's at the start"
    with torch.no_grad():
        norm_of(model).num_batches_tracked += 100 * rank
    train(model, optimizer, data()[rank][:steps])
    return before[-1], norm_of(model).running_mean.clone(), int(norm_of(model).num_batches_tracked)


@pytest.mark.parametrize("recipe", ["local_sgd", "no average", "easgd"])
def test_buffers_are_averaged_at_rounds(recipe: str) -> None:
    """Counters are left alone."""
    steps = 4 if recipe == "no average" else 3
    run = partial(norm_run, recipe=RECIPES[recipe], buffers="average", steps=steps)
    runs = la.simulate(run, workers=WORKERS)
    mean = torch.stack([before for before, _, _ in runs]).mean(0)
    assert not equal([before for before, _, _ in runs])
    for rank, (_, after, counter) in enumerate(runs):
        assert close(after, mean, 1e-14) and counter == steps + 100 * rank


# -- what is sent ----


@pytest.mark.fault("constant buffers (causal masks, rotary tables) were sent with every round")
@pytest.mark.parametrize("recipe", [la.local_sgd(2, delay=1), la.streaming_diloco(8, 4)])
def test_buffers_that_no_rank_changes_are_not_sent(recipe: la.Recipe) -> None:
    def sent(rank: int, mask: bool) -> int:
        model = nn.Sequential(nn.Linear(5, 40), nn.Linear(40, 2)).double()
        if mask:
            model.register_buffer("mask", torch.ones(100, 100))
        optimizer = sgd(model)
        with la.attach(model, optimizer, recipe) as sync:
            train(model, optimizer, data(2, 16)[rank])
        return sync.stats().bytes_sent

    without, with_mask = (la.simulate(partial(sent, mask=m), workers=2)[0] for m in (False, True))
    assert with_mask < 1.05 * without


@pytest.mark.fault("recipes of fragments sent all buffers with every fragment")
def test_buffers_are_sent_once_per_period_of_fragments() -> None:
    def run(rank: int) -> tuple[list[float], int]:
        model: Any = nn.Linear(4, 4)
        model.register_buffer("rank", torch.tensor([float(rank)]))
        optimizer = sgd(model)
        seen = []
        with la.attach(model, optimizer, la.streaming_diloco(4, 2)) as sync:
            for _ in range(8):
                optimizer.step()
                seen.append(float(model.rank))
                model.rank.fill_(rank)
        return seen, sync.stats().rounds

    seen, rounds = la.simulate(run, workers=2)[0]
    assert sum(value == 0.5 for value in seen) == 2
    assert rounds >= 4 + 2, "rounds of buffers count, too"


class Codebook(nn.Module):
    """A buffer that the forward pass reads and changes by what it reads, and a counter."""

    code: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)
        self.register_buffer("code", torch.zeros(2))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) - self.code
        with torch.no_grad():
            self.code += 0.1 * y.mean(0)
            self.seen += len(x)
        return y


@pytest.mark.fault(
    "no choice gave all ranks rank 0's buffers before each forward pass, as DDP does"
)
@pytest.mark.parametrize("recipe", [la.ddp(), la.streaming_diloco(4, 2)])
def test_buffers_of_rank_0_before_every_forward_pass(recipe: la.Recipe) -> None:
    """`buffers="broadcast"`."""

    def run(rank: int) -> tuple[list[Any], Tensor]:
        model = Codebook()
        optimizer = sgd(model)
        with la.attach(model, optimizer, recipe, buffers="broadcast"):
            starts, ends = [], []
            for step in range(6):
                starts.append((model.code.tolist(), int(model.seen)))
                optimizer.zero_grad()
                x = torch.full((rank + 1, 3), 0.3 * (step + 1 + rank))
                model(x).square().mean().backward()
                ends.append((model.code.tolist(), int(model.seen)))
                optimizer.step()
        return [starts, ends], model.linear.weight.detach()

    (one, x), (other, y) = la.simulate(run, workers=2)
    assert one[0] == other[0] and one[0][1:] == one[1][:-1], "rank 0's"
    assert one[1] != other[1] and torch.equal(x, y)
