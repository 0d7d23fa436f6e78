"""Checks that laconic can train a model: it has no data-parallel wrapper, is on one device, and its
tensors can be compared and averaged."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic.tensors import check_values, is_sharded, local, parts


def check_unwrapped(model: nn.Module) -> None:
    """Raise ``ValueError`` if the model is, or contains, one of torch's data-parallel wrappers, or
    is none."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, not {model!r}")
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import, and seldom needed
    fsdp1: Any = getattr(fsdp, "FullyShardedDataParallel", nn.DataParallel)
    for name, module in model.named_modules():
        if isinstance(module, (DistributedDataParallel, nn.DataParallel, fsdp1)):
            where = f"the model's {name!r} is" if name else "the model is"
            raise ValueError(
                f"{where} wrapped in {type(module).__name__}, which communicates by itself: pass "
                "the plain module (model.module), with one process for each GPU; for several ranks "
                "per worker pass nprocs_per_node=, or shard the plain module over them with "
                "torch.distributed.fsdp.fully_shard, and pass mesh="
            )


def check_tensors(model: nn.Module, params: Sequence[Tensor]) -> None:
    """Raise ``ValueError`` if a tensor of the model has no values that ranks can compare, or if one
    of ``params`` is trained and consists of several tensors, so that rounds cannot average it, or
    is whole beside sharded ones. Warn of trained parameters in memory that other processes may
    train, too."""
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        check_values(repr(name), t)
    names = {id(p): name for name, p in model.named_parameters()}
    sharded = any(map(is_sharded, (*params, *model.parameters())))
    for p in params:
        if sharded and p.requires_grad and not is_sharded(p):
            raise ValueError(
                f"the optimizer trains {names.get(id(p), 'a parameter')!r}, which is not sharded, "
                "beside parameters that are: nothing would average its gradients over the ranks of "
                "a worker. Shard all of the model, by fully_shard(model, mesh=mesh['shards']) "
                "after its blocks, or freeze the parameter (requires_grad_(False))"
            )
        if id(p) not in names:
            check_values("a parameter of the optimizer alone", p)
        if p.requires_grad and "" not in parts(local(p)):
            raise ValueError(
                f"the optimizer trains {names.get(id(p), 'a parameter')!r}, a {type(p).__name__} "
                f"(layout {p.layout}) that consists of several tensors, so it has no mean: freeze "
                "it (requires_grad_(False)), and train plain parameters beside it, such as LoRA's"
            )
    trained = (local(p) for p in params if p.requires_grad and p.device.type == "cpu")
    if any(p.is_shared() for p in trained):  # type: ignore[no-untyped-call]
        warnings.warn(
            "the model's parameters are in memory shared with other processes, as "
            "torch.multiprocessing.spawn leaves a model that it passes on: if several ranks train "
            "them, all move the same weights. Make the model in each process",
            RuntimeWarning,
            stacklevel=2,
        )


def check_devices(model: nn.Module, params: Iterable[Tensor]) -> None:
    """Raise ``ValueError`` if the model's parameters and ``params`` are on several devices, or a
    buffer is on another one."""
    names = {id(p): name for name, p in model.named_parameters()}
    devices: dict[str, str] = {}
    for p in (*params, *model.parameters()):
        devices.setdefault(str(p.device), names.get(id(p), "one that only the optimizer has"))
    if len(devices) > 1:
        places = ", ".join(f"{device} ({name})" for device, name in devices.items())
        raise ValueError(
            f"the parameters are on several devices: {places}. Move the whole model to one of them "
            "with model.to(device) before making the optimizer"
        )
    for device, (name, buffer) in product(devices, model.named_buffers()):
        if str(buffer.device) != device:
            raise ValueError(
                f"the parameters are on {device}, and the buffer {name!r} is on {buffer.device}: "
                f"move it with model.to({device!r})"
            )
