"""A change of recipe in mid-training loses nothing, and is the same on all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la

from tests.support.loops import data, equal, flat, network, refusal, train

RECIPES = {
    "ddp": la.ddp(),
    "int4": la.ddp(codec="int4"),
    "local": la.local_sgd(3, delay=2),
    "diloco": la.diloco(4, momentum=0.5),
    "sgp": la.sgp(),
    "streaming": la.streaming_diloco(4, 2, 1),
}


def attached(rank: int, recipe: Any, **options: Any) -> tuple[nn.Sequential, Any, la.Synchronizer]:
    model = network(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, la.attach(model, optimizer, recipe, **options)


@pytest.mark.parametrize(
    ("before", "after"), [*zip(RECIPES, [*[*RECIPES][2:], *RECIPES], strict=False)]
)
def test_switching_starts_all_workers_from_the_consensus(before: str, after: str) -> None:
    """Alike in x and in the optimizer's state; and what the recipe before would have ended with."""

    def run(rank: int, switch: bool) -> tuple[Tensor, ...]:
        model, optimizer, sync = attached(rank, RECIPES[before])
        train(model, optimizer, data()[rank][:5])
        if not switch:
            sync.finish()
            return (flat(model),)
        sync.switch(repr(RECIPES[after]))
        x = flat(model)
        moments = torch.cat([s["exp_avg"].reshape(-1) for s in optimizer.state.values()])
        train(model, optimizer, data(steps=11)[rank][5:])
        sync.finish()
        assert sync.recipe == RECIPES[after] and sync.step == 11
        return x, moments, flat(model)

    finished, runs = (la.simulate(partial(run, switch=s), workers=2) for s in (False, True))
    assert all(equal(found) for found in zip(*runs, strict=True))
    assert torch.equal(runs[0][0], finished[0][0])


@pytest.mark.parametrize("first", [la.auto(), la.diloco(2, codec="int4")])
def test_a_refused_switch_leaves_the_rounds_at_work(first: Any) -> None:
    """All start from the consensus, whatever one rank does wrong, and nothing is owed twice."""

    def run(rank: int) -> Tensor:
        model, optimizer, sync = attached(rank, first)
        now = sync.recipe
        train(model, optimizer, data()[rank][:3])
        said = refusal(lambda: sync.switch(la.diloco(4, lr=0.5 + 0.1 * rank)))
        assert "attach something other than rank 0" in said
        consensus = sync.consensus_state_dict()
        x = torch.cat([value.reshape(-1) for value in consensus.values()])
        assert first != la.diloco(2, codec="int4") or torch.equal(flat(model), x)
        assert "group_size" in refusal(lambda: sync.switch(la.hierarchical(1, 2)))
        assert sync.recipe == now
        train(model, optimizer, data()[rank][3:6])
        sync.finish()
        return flat(model)

    assert equal(la.simulate(run, workers=2))


@pytest.mark.parametrize(("when", "inside"), [(2, False), (5, True)])
def test_a_switch_aligns_what_overflows_and_missing_gradients_left_apart(
    when: int, inside: bool
) -> None:
    """AdamW's steps, the scale, and moments of a parameter that one rank did not use: or gradients
    that are alike would move the workers differently, unseen. ``inside``: the switch comes before
    the scaler's update."""

    def run(rank: int) -> tuple[Tensor, float, list[float]]:
        model = network(dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
        sync = la.attach(model, optimizer, la.local_sgd(2), scaler=scaler)
        for t, x in enumerate(data(steps=14)[rank], 1):
            optimizer.zero_grad()
            first: Any = model[0]
            bias = first.bias if rank > 0 or t >= 6 else None
            hidden = nn.functional.linear(x.float(), first.weight, bias).tanh()
            loss = model[2](hidden).square().mean()
            loss = loss * (float("inf") if (rank, t) == (1, when) else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            if t == 5 and inside:
                sync.switch(la.ddp())
            scaler.update()
            if t == 5 and not inside:
                sync.switch(la.ddp())
        counts = [float(s["step"]) for s in optimizer.state.values()]
        return flat(model), scaler.get_scale(), counts

    first, *others = la.simulate(run, workers=3)
    for x, scale, counts in others:
        assert torch.equal(x, first[0]) and (scale, counts) == first[1:]
