"""Models on one device; the meta device stands for a second one, and stand-ins for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import laconic as la
from laconic.device import common_device
from laconic.engine.model_checks import check_devices

from tests.support import gloo


def told(attach: Callable[[], Any]) -> str:
    try:
        attach()
    except ValueError as error:
        return str(error)
    return "nothing"


def split(frozen: bool = True) -> nn.Sequential:
    """A model whose second layer, which nothing trains, is elsewhere."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1, device="meta"))
    model[1].requires_grad_(not frozen)
    return model


def attached(kind: str) -> str:
    model = split()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    makers: dict[str, Callable[[], Any]] = {
        "attach": lambda: la.attach(model, optimizer, la.local_sgd(2)),
        "slowmo": lambda: la.SlowMoDistributedDataParallel(model, 1),
        "comm_optimizer": lambda: la.CommOptimizer(optimizer, "EASGD", 2, 2, 0.5, model=model),
    }
    return told(makers[kind])


@pytest.mark.parametrize("kind", ["attach", "slowmo", "comm_optimizer"])
def test_parameters_on_two_devices_are_refused(kind: str) -> None:
    said = la.simulate(lambda _: attached(kind), workers=2)
    assert len(set(said)) == 1
    assert "on several devices: cpu (" in said[0], said
    assert "0.weight), meta (" in said[0] and "1.weight)" in said[0]
    assert "model.to(device)" in said[0] and "\n" not in said[0]


def test_the_slow_part_may_be_on_one_rank() -> None:
    """As where only some ranks ran out of memory, and moved a part of the model."""

    def one(rank: int) -> str:
        model = split() if rank else nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        return told(lambda: la.attach(model, optimizer, la.local_sgd(2)))

    said = la.simulate(one, workers=2)
    assert said[0] == f"rank 1: {said[1]}"
    assert "on several devices" in said[1]


def test_an_optimizers_own_parameter_elsewhere_is_refused() -> None:
    model = nn.Linear(3, 4)
    alone = nn.Parameter(torch.ones(3, device="meta"))
    with pytest.raises(ValueError, match=r"cpu \(weight\), meta \(one that only the optimizer"):
        check_devices(model, [*model.parameters(), alone])


class Placed:
    """As much of a tensor as `check_devices` looks at, on a device that need not be there."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


class Model:
    """As much of a module."""

    def __init__(self, params: dict[str, str], buffers: dict[str, str]) -> None:
        self._params = {name: Placed(device) for name, device in params.items()}
        self._buffers = {name: Placed(device) for name, device in buffers.items()}

    def parameters(self) -> list[Placed]:
        return list(self._params.values())

    def named_parameters(self) -> list[tuple[str, Placed]]:
        return list(self._params.items())

    def named_buffers(self) -> list[tuple[str, Placed]]:
        return list(self._buffers.items())


def verdict(model: Model, cpu_buffers: bool | None = None) -> str:
    checked: Any = model
    return told(lambda: check_devices(checked, checked.parameters(), cpu_buffers=cpu_buffers))


def test_two_gpus_are_two_devices() -> None:
    said = verdict(Model({"a": "cuda:0", "b": "cuda:1"}, {}))
    assert "on several devices: cuda:0 (a), cuda:1 (b)" in said
    assert verdict(Model({"a": "cuda:1", "b": "cuda:1"}, {"c": "cuda:1"})) == "nothing"


@pytest.mark.parametrize(("group", "works"), [("cpu:gloo,cuda:nccl", True), ("cuda:nccl", False)])
def test_buffers_on_the_cpu_need_a_process_group_for_them(
    monkeypatch: pytest.MonkeyPatch, group: str, works: bool
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: group)
    said = verdict(Model({"a": "cuda:0"}, {"table": "cpu"}))
    assert (said == "nothing") == works
    assert works or ("buffer 'table' is on the CPU" in said and "laconic.init()" in said)


def test_buffers_on_another_gpu_are_refused() -> None:
    said = verdict(Model({"a": "cuda:0"}, {"table": "cuda:1"}), cpu_buffers=True)
    assert "on cuda:0, and the buffer 'table' is on cuda:1: move it with model.to('cuda:0')" in said
    assert "buffer 'table' is on cuda:0" in verdict(Model({"a": "cpu"}, {"table": "cuda:0"}))
    assert verdict(Model({"a": "cuda:0"}, {"table": "cpu"}), cpu_buffers=True) == "nothing"


def test_ranks_without_parameters_meet_on_their_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By number: in the communication thread, "cuda" would be the first one."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert common_device() == torch.device("cuda", 3)


def test_masters_on_another_gpu_are_refused() -> None:
    """A module on one GPU, and an optimizer over parameters on another."""

    def one(_: int) -> str:
        model = la.SlowMoDistributedDataParallel(nn.Linear(2, 2), 1)
        model._binding._device = torch.device("cpu", 1)  # stands for where the module was
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        said = told(lambda: model.bind(optimizer))
        model.detach()
        return said

    said = la.simulate(one, workers=2)
    assert all("the module was on cpu:1 when it was wrapped" in text for text in said), said


def buffers_beside(rank: int) -> list[list[float]]:
    """The collectives that buffers need, of a link for CUDA tensors, on CPU tensors."""
    link = gloo.nccl_link_of(2)
    own = torch.tensor([1.0 + rank, 10.0 * rank])
    mean, root = own.clone(), own.clone()
    link.mean(mean)
    link.broadcast(root)
    (other,) = link.swap(own, [1 - rank], [1 - rank])
    return [mean.tolist(), root.tolist(), other.tolist(), link.gather(own).flatten().tolist()]


def test_a_link_for_cuda_tensors_carries_buffers_on_the_cpu(pool: gloo.Pool) -> None:
    """By the process group's back end for the CPU."""
    ranks = pool.run(buffers_beside, ranks=2)
    for rank, (mean, root, other, everyone) in enumerate(ranks):
        assert mean == [1.5, 5.0]
        assert root == [1.0, 0.0]
        assert other == [2.0 - rank, 10.0 * (1 - rank)]
        assert everyone == [1.0, 0.0, 2.0, 10.0]
