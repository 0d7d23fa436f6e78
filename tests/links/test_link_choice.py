"""Which link the ranks of a process group get: over the host, or the accelerator's own."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import laconic as la
from laconic.links import tcp, torch_link
from laconic.links.staged import StagedLink
from laconic.links.tcp import TcpLink
from laconic.links.torch_link import Choice, inner_link, world_link

from tests.support import gloo, late

SECONDS = timedelta(seconds=20)


class Own(StagedLink):
    """Stands for the accelerator's own collectives."""

    queues = True
    closed = False

    def close(self) -> None:
        self.closed = True
        super().close()

    def abort(self) -> None:
        self.close()


made: list[Own] = []


def own_over(
    group: dist.ProcessGroup, device: torch.device, timeout: timedelta, *, owned: bool = False
) -> Own:
    made.append(Own(TcpLink.over(group, torch.device("cpu"), timeout, owned=owned), device))
    return made[-1]


def chosen(rank: int, choice: Choice, seconds: tuple[float, float], far: bool) -> list[Any]:
    """The kind of the link, whether an own one was made and closed, and a mean over it.
    ``seconds``: of the host's link, and of the other, on rank 1; on others both are as fast. -1: it
    raises, and others wait in vain."""
    with late.device() as device, pytest.MonkeyPatch.context() as patched:
        patched.setattr(late.LateAccelerator, "backend", "gloo")
        patched.setattr(torch_link, "OWN", {"gloo": own_over})
        measured = torch_link._seconds

        def taken(link: Any, *at: Any) -> float:
            if isinstance(link, Own) and seconds[1] < 0:
                if rank == 1:
                    raise RuntimeError("internal error\nDuplicate GPU detected")
                time.sleep(5)
            measured(link, *at)
            return seconds[isinstance(link, Own)] if rank == 1 else 0.01

        patched.setattr(torch_link, "_seconds", taken)
        patched.setattr(torch_link, "DEADLINE", 0.5 if seconds[1] < 0 else 100.0)
        patched.setattr(tcp, "FAR_SECONDS", 0.0 if far else 1.0)
        made.clear()
        link = world_link(device, SECONDS, choice)
        x = torch.full((4,), float(rank)).to(device)
        link.mean(x)
        own = isinstance(link, Own)
        found = [own, [each.closed for each in made], x.tolist()]
        link.close()
        return found


@pytest.mark.parametrize(
    ("choice", "seconds", "far", "own", "closed"),
    [
        ("auto", (0.03, 0.02), False, True, [False]),
        ("auto", (0.03, 0.025), False, False, [True]),  # not by enough
        ("auto", (0.03, -1.0), False, False, [True]),  # it fails on one rank, and hangs on others
        ("auto", (0.03, 0.001), True, False, [True]),  # not tried over a long way
        ("tcp", (0.03, 0.02), False, False, []),
    ],
)
def test_the_faster_link_is_the_same_on_all_ranks(
    late_pool: gloo.Pool,
    choice: Choice,
    seconds: tuple[float, float],
    far: bool,
    own: bool,
    closed: list[bool],
) -> None:
    found = late_pool.run(chosen, choice, seconds, far, ranks=4)
    assert found == [[own, closed, [1.5] * 4]] * 4


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


def refused(rank: int, given: dict[str, Any]) -> str:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError) as raised:
        la.attach(model, optimizer, la.local_sgd(2), **given)
    return str(raised.value)


def test_what_cannot_be_is_refused_on_all_ranks(pool: gloo.Pool) -> None:
    said = set(pool.run(refused, {"link": "fast"}, ranks=4))
    assert said == {"link must be one of 'auto', 'tcp', 'nccl', not 'fast'"}
    (text,) = set(pool.run(refused, {"link": "nccl"}, ranks=4))
    assert "link='nccl' needs a model on GPUs" in text and "Use link='tcp' or 'auto'" in text
    (text,) = set(pool.run(refused, {"offload": 1}, ranks=4))
    assert text == "offload must be True or False, not 1"
