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
from laconic.engine import gradient_rounds, overlap
from laconic.errors import NotFiniteError
from laconic.links import Link, Metered, frames, tcp
from laconic.links.collectives import Overlapping
from laconic.links.link import Staged, Stages
from laconic.links.tcp import TcpLink
from laconic.links.wrapped import Wrapped

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


def simulated(recipe: str, **options: int) -> list[tuple[list[Tensor], int, dict[str, int]]]:
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


class Logged(Wrapped):
    """Logs when each stage of a collective begins."""

    overlaps = True

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.log: list[str] = []

    @contextmanager
    def around(self, collective: str, amount: Any, received: int) -> Iterator[None]:
        self.log.append(f"{collective} {'begins' if amount.bytes else 'goes on'}")
        yield

    def like(self, link: Link) -> Link:
        return Logged(link)


def log_of(rank: int, recipe: str, small: int) -> list[str]:
    """What is called when in a backward pass, if ``small`` bytes are few."""
    link = Logged(far(gloo.link_of(3)))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before, overlap.SMALL_BYTES = overlap.SMALL_BYTES, small
    with small_buckets(), la.attach(model, optimizer, RECIPES[recipe], link=link):
        link.log.clear()
        model(batch(rank, 0)).square().mean().backward()
        found = list(link.log)
        optimizer.step()
    overlap.SMALL_BYTES = before
    return found


BEGINS, GOES_ON, SECOND, ENDS = (
    "all_to_all begins",
    "all_to_all goes on",
    "all_gather begins",
    "all_gather goes on",
)


def test_a_buckets_first_message_comes_before_the_second_one_of_the_bucket_before(
    pool: gloo.Pool,
) -> None:
    for log in pool.run(log_of, "int4", 10**9, ranks=3):
        assert log == [
            *(BEGINS, BEGINS, GOES_ON, SECOND),  # the second bucket begins, the first goes on
            *(BEGINS, GOES_ON, SECOND, ENDS),  # then the third
            *(GOES_ON, SECOND, ENDS, ENDS),
        ]
    for log in pool.run(log_of, "ddp", 10**9, ranks=3):
        assert log[:3] == ["mean begins", "mean begins", "mean goes on"]
        assert 3 * log.count("mean begins") == len(log) >= 3 * BUCKETS


def test_large_messages_are_sent_in_the_order_of_the_buckets(pool: gloo.Pool) -> None:
    """The next bucket begins before the second message of the one before has arrived."""
    for log in pool.run(log_of, "int4", 0, ranks=3):
        assert log == [
            *(BEGINS, GOES_ON, SECOND),
            *(BEGINS, ENDS, GOES_ON, SECOND) * 2,
            ENDS,
        ]


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


def after_a_failure(rank: int) -> tuple[str, int]:
    """Rank 1's first bucket is infinite, and rank 2 is late: what it is told, and what a gathering
    afterward brings."""
    link, model = far(gloo.link_of(3)), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    told = ""
    with small_buckets():
        sync = la.attach(model, optimizer, RECIPES["int4"], link=link)
        x = model[:2](batch(rank, 0))
        if rank == 2:
            x.register_hook(lambda _: time.sleep(0.5))
        loss = model[2:](x).square().mean()
        try:
            (loss * (torch.inf if rank == 1 else 1.0)).backward()
        except NotFiniteError as error:
            told = str(error)
        sync.detach()
    return told, len(link.gather(torch.tensor([rank])))


def test_buckets_that_follow_one_that_is_not_finite_are_completed(pool: gloo.Pool) -> None:
    """Nobody stops reading what a slower rank still sends, and the link is free."""
    for told, ranks in pool.run(after_a_failure, ranks=3):
        assert "had NaN" in told and ranks == 3


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


def interleaved(rank: int, n: int) -> list[Tensor]:
    """Three means and two gatherings under way at once, each of another length."""
    link = far(gloo.link_of(n))
    metered = Metered(link)
    means = [torch.arange(float(length)) * (rank + 1) for length in (12 * n, 5, 100_000 * n)]
    whole = [torch.zeros(n * length) for length in (3, 70_000)]
    own = [torch.full((len(x) // n,), float(rank)) for x in whole]
    staged = metered.overlapping
    assert staged is not None
    work: list[Stages[None]] = [staged.mean(x) for x in means]
    work += [staged.all_gather(x, out) for x, out in zip(own, whole, strict=True)]
    while work:
        work = [each for each in work if next(each, work) is not work]
    link.gather(torch.tensor([rank]))  # nothing is left under way
    expected = 0
    for length in (12 * n, 100_000 * n):
        expected += 2 * (n - 1) * 4 * length // n
    assert metered.ledger.by_collective.get("mean", 0) == expected + (n - 1) * 20
    link.close()
    return [*means, *whole]


def sent_in_the_first_stage(rank: int) -> list[bool]:
    """Whether each message of a mean of more than any buffer holds is on its way."""
    link = far(gloo.link_of(2))
    assert link.overlapping is not None
    stages = link.overlapping.mean(torch.zeros(2**23))
    next(stages)
    traffic = link.wire.connections.traffic
    assert traffic is not None
    found = [frames.is_complete(m) for m in traffic.messages if not m.comes]
    for _ in stages:
        pass
    link.close()
    return found


def test_a_stage_ends_when_its_messages_are_on_their_way(pool: gloo.Pool) -> None:
    """Bytes move only while a rank waits."""
    assert pool.run(sent_in_the_first_stage, ranks=2) == [[True]] * 2


@pytest.mark.parametrize("n", [2, 3, 4])
def test_collectives_under_way_at_once(pool: gloo.Pool, n: int) -> None:
    mean = sum(range(1, n + 1)) / n
    for found in pool.run(interleaved, n, ranks=n):
        for x in found[:3]:
            torch.testing.assert_close(x, torch.arange(float(len(x))) * mean)
        for x in found[3:]:
            assert torch.equal(x, torch.arange(float(n)).repeat_interleave(len(x) // n))


def test_a_link_between_near_ranks_does_not_overlap(pool: gloo.Pool) -> None:
    assert pool.run(overlaps, ranks=3) == [False] * 3
    assert pool.run(partial(overlaps, least=0.0), ranks=3) == [True] * 3


def overlaps(rank: int, least: float | None = None) -> bool:
    before = tcp.FAR_SECONDS
    tcp.FAR_SECONDS = before if least is None else least
    try:
        link = gloo.link_of(3)
        found = link.overlapping is not None
        link.close()
    finally:
        tcp.FAR_SECONDS = before
    return found


def test_a_throttled_link_takes_one_collective_at_a_time() -> None:
    class Far:
        rank, size = 0, 2
        overlapping: Staged | None = None

    Far.overlapping = Overlapping(Far())  # type: ignore[arg-type]

    far_link: Any = Far()
    assert la.links.Throttled(far_link, "1mbit").overlapping is None
    assert Metered(far_link).overlapping is not None
