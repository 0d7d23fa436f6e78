"""Buckets of gradients that share their round trips: the same bits, in an order that waits less."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.engine import gradient_rounds
from laconic.errors import NotFiniteError
from laconic.links import Link, tcp

from tests.support import gloo
from tests.support.training import Interrupted

RECIPES = {
    "ddp": la.ddp(codec="float16"),
    "int4": la.ddp(codec="int4"),
    "power_sgd": la.power_sgd(2, codec="int8"),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    hidden = (layer for _ in range(3) for layer in (nn.Linear(31, 31), nn.Tanh()))
    return nn.Sequential(*hidden, nn.Linear(31, 1))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 31, generator=torch.Generator().manual_seed(100 * step + rank))


def train(rank: int, recipe: str, trouble: str = "", link: Link | None = None) -> tuple[Any, ...]:
    """The model after each step, and the bytes sent; or the error. Buckets are small."""
    model, found = network(), list[Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with pytest.MonkeyPatch.context() as patched:
        for name in ("FIRST_BYTES", "LEAST_BYTES", "BUCKET_BYTES"):
            patched.setattr(gradient_rounds, name, 2**12)
        try:
            with la.attach(model, optimizer, RECIPES[recipe], link=link) as sync:
                for step in range(4):
                    if (step, trouble) == (2, "raises"):  # after all buckets were sent
                        x = Interrupted.apply(batch(rank, 99).requires_grad_())
                        with pytest.raises(RuntimeError, match="interrupted"):
                            model(x).square().mean().backward()
                        optimizer.zero_grad()
                    x = model[:2](batch(rank, step))
                    if (rank, step, trouble) == (2, 1, "leaves"):  # after the first were sent
                        x = Interrupted.apply(x)
                    loss = model[2:](x).square().mean()
                    if (rank, step, trouble) == (1, 1, "infinite"):
                        loss = loss * torch.inf
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    found.append(nn.utils.parameters_to_vector(model.parameters()).detach())
                sent = sync.stats().bytes_by_collective
        except (la.LinkError, NotFiniteError, RuntimeError) as error:
            time.sleep(0.2)
            return (str(error),)
    return found, [sent.get(name) for name in ("mean", "all_to_all", "all_gather")]


def train_far(rank: int, recipe: str, trouble: str) -> tuple[Any, ...]:
    """Over a link whose round trips seem to take long."""
    link: Any = gloo.link_of(3)
    assert link.overlapping is None, "near ranks do not overlap"
    link.close()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tcp, "FAR_SECONDS", 0.0)
        link = gloo.link_of(3)
        assert link.overlapping is not None
        return train(rank, recipe, trouble, link)


@pytest.mark.parametrize(
    ("recipe", "trouble"),
    [("ddp", ""), ("int4", ""), ("power_sgd", ""), ("ddp", "raises"), ("int4", "raises")],
)
def test_the_same_bits_and_bytes_as_one_after_the_other(
    pool: gloo.Pool, recipe: str, trouble: str
) -> None:
    here = la.simulate(partial(train, recipe=recipe, trouble=trouble), workers=3)
    there = pool.run(train_far, recipe, trouble, ranks=3)
    for (ours, sent), (theirs, theirs_sent) in zip(here, there, strict=True):
        assert all(map(torch.equal, ours, theirs)) and sent == theirs_sent


@pytest.mark.parametrize("recipe", ["int4", "power_sgd"])
def test_what_is_not_finite_or_gone_on_one_rank_is_an_error_on_all(
    pool: gloo.Pool, recipe: str
) -> None:
    for (text,) in pool.run(train_far, recipe, "infinite", ranks=3):
        assert "had NaN" in text and " of step 2: " in text
    (first,), (second,), (third,) = pool.run(train_far, recipe, "leaves", ranks=3)
    assert third == "interrupted" and "rank 2" in first and "rank 2" in second
