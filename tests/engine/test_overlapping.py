"""Buckets of gradients that share their round trips: the same bits, in an order that waits less."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.engine import gradient_rounds
from laconic.errors import NotFiniteError
from laconic.links import Link, tcp
from laconic.links.tcp import TcpLink

from tests.support import gloo
from tests.support.training import Interrupted

RECIPES = {
    "ddp": la.ddp(),
    "float16": la.ddp(codec="float16"),
    "int4": la.ddp(codec="int4"),
    "power_sgd": la.power_sgd(2),
    "power_sgd, int8": la.power_sgd(2, codec="int8"),
}
BUCKETS = 3


def far(link: Link) -> TcpLink:
    """``link`` as if a round trip took long."""
    assert isinstance(link, TcpLink) and link.overlapping is None
    link.far = True
    return link


@contextmanager
def small_buckets() -> Iterator[None]:
    names = ("FIRST_BYTES", "LEAST_BYTES", "BUCKET_BYTES")
    before = [getattr(gradient_rounds, name) for name in names]
    for name in names:
        setattr(gradient_rounds, name, 2**12)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(gradient_rounds, name, value)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(layer for _ in range(3) for layer in (nn.Linear(31, 31), nn.Tanh())), nn.Linear(31, 1)
    )


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 31, generator=torch.Generator().manual_seed(100 * step + rank))


def train(
    rank: int,
    recipe: str,
    link: Link | None = None,
    interrupted_at: int = -1,
    infinite_at: int = -1,
) -> tuple[list[Tensor], int, dict[str, int]]:
    """The model after each step, the number of buckets, and the bytes sent."""
    model, found = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with la.attach(model, optimizer, RECIPES[recipe], link=link) as sync:
        for step in range(4):
            if step == interrupted_at:  # after all buckets were sent
                x = Interrupted.apply(batch(rank, 99).requires_grad_())
                with pytest.raises(RuntimeError, match="interrupted"):
                    model(x).square().mean().backward()
                optimizer.zero_grad()
            loss = model(batch(rank, step)).square().mean()
            if step == infinite_at and rank == 1:
                loss = loss * torch.inf
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone())
        buckets = len(sync._run.gradients[0].channels)
        sent = sync.stats().bytes_by_collective
    return found, buckets, dict(sent)


def train_far(rank: int, recipe: str, **options: int) -> tuple[list[Tensor], int, dict[str, int]]:
    with small_buckets():
        return train(rank, recipe, far(gloo.link_of(3)), **options)


def simulated(recipe: str, **options: Any) -> list[tuple[list[Tensor], int, dict[str, int]]]:
    with small_buckets():
        return la.simulate(partial(train, recipe=recipe, **options), workers=3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_bits_and_bytes_as_one_after_the_other(pool: gloo.Pool, recipe: str) -> None:
    here = simulated(recipe)
    there = pool.run(train_far, recipe, ranks=3)
    for (ours, buckets, sent), (theirs, others, theirs_sent) in zip(here, there, strict=True):
        assert buckets == others and buckets >= (2 if "power" in recipe else BUCKETS)
        assert all(map(torch.equal, ours, theirs))
        gradients = ("mean", "all_to_all", "all_gather")
        assert [sent.get(name) for name in gradients] == [theirs_sent.get(n) for n in gradients]


@pytest.mark.parametrize("recipe", ["ddp", "int4"])
def test_a_pass_that_raised_after_it_had_sent_everything(pool: gloo.Pool, recipe: str) -> None:
    here = simulated(recipe, interrupted_at=2)
    there = pool.run(partial(train_far, interrupted_at=2), recipe, ranks=3)
    for (ours, _, _), (theirs, _, _) in zip(here, there, strict=True):
        assert all(map(torch.equal, ours, theirs))


def fail(rank: int, recipe: str) -> str:
    try:
        train_far(rank, recipe, infinite_at=1)
    except NotFiniteError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("recipe", ["int4", "power_sgd"])
def test_what_is_not_finite_on_one_rank_is_an_error_on_all(pool: gloo.Pool, recipe: str) -> None:
    told = pool.run(fail, recipe, ranks=3)
    assert all("had NaN" in text and " of step 2: " in text for text in told)


def interrupted_half_way(rank: int) -> list[Tensor]:
    """All ranks' passes raise when the first bucket was sent; then they form a consensus."""
    link, model = far(gloo.link_of(3)), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with small_buckets():
        sync = la.attach(model, optimizer, RECIPES["int4"], link=link)
        x = Interrupted.apply(model[:2](batch(rank, 0)))
        with pytest.raises(RuntimeError, match="interrupted"):
            model[2:](x).square().mean().backward()
        assert sync._run.broken
        found = sync.consensus_state_dict()
        with pytest.raises(la.LinkError, match="cannot rejoin the others"):
            model(batch(rank, 0)).square().mean().backward()
        sync.detach()
    return [*found.values()]


def test_after_a_pass_that_raised_alike_on_all_ranks_the_model_can_be_saved(
    pool: gloo.Pool,
) -> None:
    expected = [*network().state_dict().values()]
    for found in pool.run(interrupted_half_way, ranks=3):
        assert all(map(torch.equal, found, expected))


def leave_half_way(rank: int) -> str:
    """Rank 2's backward pass raises when the first buckets were sent."""
    link, model = far(gloo.link_of(3)), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    try:
        with small_buckets(), la.attach(model, optimizer, RECIPES["int4"], link=link):
            x = model[:2](batch(rank, 0))
            x = Interrupted.apply(x) if rank == 2 else x
            model[2:](x).square().mean().backward()
    except la.LinkError as error:
        return str(error)
    except RuntimeError:
        time.sleep(0.2)
        return "interrupted"
    return ""


def test_a_rank_that_leaves_half_way_is_an_error_on_the_others(pool: gloo.Pool) -> None:
    first, second, third = pool.run(leave_half_way, ranks=3)
    assert third == "interrupted"
    assert "rank 2" in first and "rank 2" in second


def test_a_link_between_near_ranks_does_not_overlap(pool: gloo.Pool) -> None:
    assert pool.run(overlaps, ranks=3) == [False] * 3
    assert pool.run(partial(overlaps, least=0.0), ranks=3) == [True] * 3


def overlaps(rank: int, least: float | None = None) -> bool:
    with pytest.MonkeyPatch.context() as patched:
        if least is not None:
            patched.setattr(tcp, "FAR_SECONDS", least)
        link = gloo.link_of(3)
        found = link.overlapping is not None
        link.close()
    return found
