"""Links of accelerators: by way of host memory, on a stand-in that does nothing early; and whether
ranks get that one, or the accelerator's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic as la
from laconic.links import Link, torch_link
from laconic.links.staged import StagedLink
from laconic.links.tcp import TcpLink
from laconic.links.torch_link import Choice, inner_link, world_link

from tests.support import gloo, late

SIZES = (1, 7, 24, 300)
"""Elements per rank."""


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
            mine = link.reduce_scatter(on(data(rank, n * m, dtype=dtype))).clone()
            out = on(torch.zeros(n * m, dtype=dtype))
            link.all_gather(mine, out)
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
    return found


def brought(rank: int, size: int, on_stand_in: bool) -> list[bytes]:
    """`everything` on the stand-in, or on CPUs."""
    link, to = gloo.link_of(size), torch.device("cpu")
    with ExitStack() as ending:
        if on_stand_in:
            to = ending.enter_context(late.device())
            link = StagedLink(link, to)
            stream = late.LateAccelerator().new_stream(to)
            ending.enter_context(late.LateAccelerator().on_stream(stream))
        ending.callback(link.close)
        found = everything(link, lambda x: x.to(to) if on_stand_in else x)
        return [x.view(torch.uint8).numpy().tobytes() for x in found]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives_bring_the_same_bits_as_on_cpus(late_pool: gloo.Pool, size: int) -> None:
    expected = late_pool.run(brought, size, False, ranks=size)
    assert late_pool.run(brought, size, True, ranks=size) == expected


def calls(rank: int, name: str) -> list[str]:
    """What a collective calls of the device."""
    with late.device() as device:
        link = StagedLink(gloo.link_of(3), device)
        x, out = (torch.zeros(3, 2**20).to(device) for _ in range(2))
        late.calls.clear()
        if name == "all_to_all":
            link.all_to_all(x, out)
        elif name == "all_gather":
            link.all_gather(x[rank], out.view(-1))
        else:
            getattr(link, name)(x.view(-1))
        found = [what for _, what in late.calls]
        link.close()
        return found


@pytest.mark.parametrize("name", ["mean", "reduce_scatter", "all_gather", "all_to_all"])
def test_a_collective_makes_few_calls(late_pool: gloo.Pool, name: str) -> None:
    """Each holds Python's lock, which training needs: a copy to the host, and one back."""
    assert late_pool.run(calls, name, ranks=3) == [["copy_", "copy_"]] * 3


SECONDS = timedelta(seconds=20)


class Own(StagedLink):
    """Stands for the accelerator's own collectives."""

    queues = True


made: list[Own] = []


def own_over(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> Own:
    made.append(Own(TcpLink.over(group, timeout), device))
    return made[-1]


def chosen(rank: int, choice: Choice, local: int, gpus: int) -> list[Any]:
    """The kind of the link, whether an own one was made, and a mean over it. ``local``: how many
    ranks the launcher has started on this host; ``gpus``: how many they share."""
    with late.device() as device, pytest.MonkeyPatch.context() as patched:
        patched.setattr(late.LateAccelerator, "backend", "gloo")
        patched.setattr(torch_link, "OWN", {"gloo": own_over})
        patched.setenv("LOCAL_WORLD_SIZE", str(local if rank else 4))
        made.clear()
        link = world_link(torch.device(device.type, rank % gpus), SECONDS, choice)
        x = torch.full((4,), float(rank)).to(device)
        link.mean(x)
        found = [isinstance(link, Own), len(made), x.tolist()]
        link.close()
        return found


@pytest.mark.parametrize(
    ("choice", "local", "gpus", "own"),
    [
        ("auto", 4, 4, True),
        ("auto", 2, 4, False),  # two hosts, of which rank 0 knows nothing
        ("auto", 4, 3, False),  # two ranks share one
        ("tcp", 4, 4, False),
    ],
)
def test_the_link_is_the_same_on_all_ranks(
    late_pool: gloo.Pool, choice: Choice, local: int, gpus: int, own: bool
) -> None:
    found = late_pool.run(chosen, choice, local, gpus, ranks=4)
    assert found == [[own, int(own), [1.5] * 4]] * 4


def test_rounds_with_a_quorum_take_the_link_that_has_polls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attaching, chosen = import_module("laconic.attach"), list[Any]()
    make = attaching.agreed_link

    def noted(*given: Any) -> Link:
        chosen.append(given[-1])
        return make(*given)  # type: ignore[no-any-return]

    def run(rank: int) -> None:
        for recipe in ("diloco(2, quorum=1)", "diloco(2)"):
            model = nn.Linear(2, 1)
            la.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe).detach()

    monkeypatch.setattr(attaching, "agreed_link", noted)
    la.simulate(run, workers=1)
    assert chosen == ["tcp", "auto"]


def inside(rank: int) -> list[float]:
    with late.device() as device, pytest.MonkeyPatch.context() as patched:
        patched.setattr(late.LateAccelerator, "backend", "gloo")
        patched.setattr(torch_link, "OWN", {"gloo": own_over})
        link = inner_link([[0, 1], [2, 3]], device, SECONDS)
        x = torch.full((4,), float(rank)).to(device)
        link.mean(x)
        link.close()
        return [float(link.queues), *x.unique(sorted=True).cpu().tolist()]


def test_ranks_of_one_worker_use_the_accelerators_own(late_pool: gloo.Pool) -> None:
    assert late_pool.run(inside, ranks=4) == [[1.0, 0.5], [1.0, 0.5], [1.0, 2.5], [1.0, 2.5]]


def refused(rank: int) -> list[str]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = []
    wrong: list[dict[str, Any]] = [{"link": "fast"}, {"link": "nccl"}, {"offload": 1}]
    for given in wrong:
        with pytest.raises(ValueError) as raised:
            la.attach(model, optimizer, la.local_sgd(2), **given)
        said.append(str(raised.value))
    with late.device() as device:
        optimizer = torch.optim.SGD(model.to(device).parameters(), lr=0.1)
        for recipe in ("ddp()", "sgp(delay=1)", "local_sgd(2, optimizer_state='average')"):
            with pytest.raises(ValueError, match="offload=True keeps"):
                la.attach(model, optimizer, recipe, offload=True)
    return said


@pytest.mark.fault("offload=True did nothing for recipes that store nothing between rounds")
def test_what_cannot_be_is_refused_on_all_ranks(late_pool: gloo.Pool) -> None:
    link, nccl, offload = (set(said) for said in zip(*late_pool.run(refused, ranks=4), strict=True))
    assert link == {"link must be one of 'auto', 'tcp', 'nccl', not 'fast'"}
    (text,) = nccl
    assert "link='nccl' needs a model on GPUs" in text and "Use link='tcp' or 'auto'" in text
    assert offload == {"offload must be True or False, not 1"}
