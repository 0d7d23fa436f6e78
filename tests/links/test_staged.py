"""Collectives on an accelerator by way of host memory, on a stand-in that does nothing early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import pytest
import torch
from torch import Tensor

from laconic.links import Link, staged
from laconic.links.link import Parts
from laconic.links.staged import HostLink, StagedLink

from tests.support import gloo, late

SIZES = (1, 7, 24, 300)
"""Elements per rank; a piece has 16."""


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(rank + 1))
    return (made * 100).to(torch.uint8) if dtype == torch.uint8 else made.to(dtype)


def everything(link: Link, on: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """What the collectives bring, on a CPU. ``on`` moves a tensor to the link's device."""
    n, rank, found = link.size, link.rank, []
    for m in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            for length in (n * m, n * m + 1):
                x = on(data(rank, length, dtype=dtype))
                link.mean(x)
                found.append(x.cpu())
            for owners in (None, *range(1, n)):
                x = on(data(rank, (owners or n) * m, dtype=dtype))
                mine = link.reduce_scatter(x, owners).clone()
                out = on(torch.zeros((owners or n) * m, dtype=dtype))
                link.all_gather(mine, out, owners)
                found += [mine.cpu(), out.cpu()]
        x, out = on(data(rank, n, m, dtype=torch.uint8)), on(torch.zeros(n, m, dtype=torch.uint8))
        link.all_to_all(x, out)
        found.append(out.cpu())
        for root in range(n):
            x = on(data(rank, m))
            link.broadcast(x, root)
            found.append(x.cpu())
        several = [on(data(rank, n * m)) for _ in range(3)]
        for k, x in enumerate(several):  # none is read before all are queued
            x.mul_(k + 1)
            link.broadcast(x) if k else link.mean(x)
        found += [x.cpu() for x in several]
        x = on(data(rank, m))
        if n == 1:
            continue
        pieces = link.swap(x, [(rank + 1) % n], [(rank - 1) % n])
        found += [piece.cpu() for piece in pieces if piece is not None]
        found.append(link.gather(x).cpu())
        found += with_parts(link, on, m)
    return found


def with_parts(link: Link, on: Callable[[Tensor], Tensor], m: int) -> list[Tensor]:
    """Rows that are computed when they are sent, and used when they have come."""
    n, rank = link.size, link.rank
    x, out, total = (on(torch.zeros(n, m)) for _ in range(3))
    source = on(data(rank, n, m))

    def fill(r: int, part: slice) -> None:
        x[r, part].copy_(source[r, part])

    def use(r: int, part: slice) -> None:
        total[r, part].add_(out[r, part])

    link.all_to_all(x, out, Parts([max(m // 3, 1), m], fill, use))
    again = on(torch.zeros(n, m))

    def fill_own(r: int, part: slice) -> None:
        total[r, part].mul_(2)

    def use_again(r: int, part: slice) -> None:
        source[r, part].copy_(again[r, part])

    parts = Parts([max(m // 3, 1), m], fill_own, use_again)
    link.all_gather(total[rank], again.view(-1), parts=parts)
    return [total.cpu(), source.cpu()]


def on_late(rank: int, size: int) -> list[Tensor]:
    """`everything` on the stand-in."""
    with late.device() as device, pytest.MonkeyPatch.context() as patched:
        patched.setattr(staged, "PIECE_BYTES", 64)
        link = StagedLink(cast(HostLink, gloo.link_of(size)), device)
        stream = late.LateAccelerator().new_stream(device)
        try:
            with late.LateAccelerator().on_stream(stream):
                return everything(link, lambda x: x.to(device))
        finally:
            link.close()


def on_cpu(rank: int, size: int) -> list[Tensor]:
    link = gloo.link_of(size)
    try:
        return everything(link, lambda x: x)
    finally:
        link.close()


def same(one: Sequence[Sequence[Tensor]], two: Sequence[Sequence[Tensor]]) -> bool:
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for ours, theirs in zip(one, two, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives_bring_the_same_bits_as_on_cpus(late_pool: gloo.Pool, size: int) -> None:
    expected = late_pool.run(on_cpu, size, ranks=size)
    found = late_pool.run(on_late, size, ranks=size)
    assert same(found, expected)
