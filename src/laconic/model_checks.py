"""What a model must be for laconic to keep it in step with the other ranks'."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

NO_DDP, IDLE_DDP, USED_DDP = 0.0, 1.0, 2.0
"""What `ddp_use` returns."""
AVERAGED_BY_DDP = (
    "the model is trained through a DistributedDataParallel wrapper, which averages all gradients "
    "at every step beside laconic: call the plain module (model.module) in the training loop, and "
    "drop the wrapper; for several ranks per worker pass nprocs_per_node="
)


def check_unwrapped(model: nn.Module) -> None:
    """Raise ``ValueError`` where the model is, or holds, one of torch's data-parallel wrappers."""
    for name, module in model.named_modules():
        where = f"the model's {name!r} is" if name else "the model is"
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                f"{where} wrapped in DistributedDataParallel, which averages all gradients at "
                "every step: pass the plain module (model.module), as laconic averages by itself; "
                "for several ranks per worker pass nprocs_per_node="
            )
        if isinstance(module, nn.DataParallel):
            raise ValueError(
                f"{where} wrapped in nn.DataParallel: pass the plain module (model.module), and "
                "start one process for each GPU; for several ranks per worker pass nprocs_per_node="
            )
        if _is_fsdp1(module):
            raise ValueError(
                f"{where} wrapped in FullyShardedDataParallel (FSDP1): shard the plain module over "
                "the ranks of one worker with torch.distributed.fsdp.fully_shard, and pass mesh="
            )


def _is_fsdp1(module: nn.Module) -> bool:
    if "torch.distributed.fsdp" not in sys.modules:  # slow to import, and seldom needed
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(module, FullyShardedDataParallel)


def check_devices(
    model: nn.Module, params: Iterable[Tensor], *, cpu_buffers: bool | None = None
) -> None:
    """Raise ``ValueError`` where the model's parameters and ``params`` are on several devices, or
    its buffers on another one. ``cpu_buffers``: whether the link takes CPU tensors from ranks with
    CUDA parameters (None: as torch's process group does)."""
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, str] = {}
    for p in (*params, *model.parameters()):
        found.setdefault(str(p.device), names.get(id(p), "one that only the optimizer holds"))
    if len(found) > 1:
        held = ", ".join(f"{device} ({name})" for device, name in found.items())
        raise ValueError(
            f"the parameters are on several devices: {held}. Move the whole model to one of them "
            "with model.to(device) before making the optimizer"
        )
    for device in found:
        for name, buffer in model.named_buffers():
            if str(buffer.device) == device:
                continue
            if buffer.device.type != "cpu" or not device.startswith("cuda"):
                raise ValueError(
                    f"the parameters are on {device}, and the buffer {name!r} is on "
                    f"{buffer.device}: move it with model.to({device!r})"
                )
            if not (_takes_cpu_tensors() if cpu_buffers is None else cpu_buffers):
                raise ValueError(
                    f"the parameters are on {device}, the buffer {name!r} is on the CPU, and the "
                    f"process group is for CUDA tensors alone: move it with model.to({device!r}), "
                    "or set up the process group with laconic.init()"
                )


def _takes_cpu_tensors() -> bool:
    """Whether torch's process group has a back end for CPU tensors."""
    return dist.is_initialized() and "cpu" in str(dist.get_backend_config())


def ddp_use(params: Sequence[Tensor]) -> float:
    """Whether a DistributedDataParallel that still exists holds one of ``params``, `IDLE_DDP`, and
    the training ran through it, as far as it tells, `USED_DDP`. Looks at every object of this
    process, which takes some 0.1 s."""
    if not dist.is_initialized():  # or none could have been made
        return NO_DDP
    own = {id(p) for p in params}
    if _use_now(own) == NO_DDP:
        return NO_DDP
    gc.collect()  # wrappers that nobody holds any more are in cycles, and stay until then
    return _use_now(own)


def _use_now(own: set[int]) -> float:
    found = NO_DDP
    for value in gc.get_objects():
        if issubclass(type(value), DistributedDataParallel):
            wrapper: DistributedDataParallel = value
            if any(id(p) in own for p in wrapper.parameters()):
                found = max(found, USED_DDP if _averages(wrapper) else IDLE_DDP)
    return found


def _averages(wrapper: DistributedDataParallel) -> bool:
    """Whether its latest forward pass was one whose gradients it averages: one with gradients, and
    not under its ``no_sync()``."""
    return bool(wrapper._lazy_init_ran and wrapper.require_forward_param_sync)
