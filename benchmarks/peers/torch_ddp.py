"""torch's DistributedDataParallel, optionally with a communication hook that sends fewer bytes.

``hook``: "none"; "fp16", which divides gradients by n, rounds them to float16 and sums them; or
"powersgd", which sends matrices of gradients as products of rank ``rank`` with error feedback, from
step ``start + 1`` on (Vogels et al. 2019, arXiv 1905.13727). torch recommends a tenth of the steps
as ``start``.

With PowerSGD, all gradients are in one bucket. With several, DDP's default from 1 MiB of gradients
on, its hook sends from callbacks in gloo's threads, whose order differs between ranks, so messages
of different buckets are mixed up ("Received data size doesn't match expected size", torch 2.13).
The price is that nothing is sent before the end of the backward pass.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import laconic
from laconic.errors import check_choice, check_int
from laconic.lab.race.rivals import Attached, Rival

HOOKS = ("none", "fp16", "powersgd")


def peer(hook: str = "none", *, rank: int = 1, start: int = 10) -> Rival:
    check_choice("hook", hook, HOOKS)
    check_int("rank", rank, 1)
    # DDP rebuilds its buckets after the first step, and the hook stores tensors of their size.
    check_int("start", start, 2)

    def attach(model: nn.Module, optimizer: Optimizer) -> Attached:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
            PowerSGDState,
            powerSGD_hook,
        )

        if hook == "powersgd":
            size = sum(p.numel() * p.element_size() for p in model.parameters())
            wrapped = DistributedDataParallel(model, bucket_cap_mb=1 + size // 2**20)
            state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
            wrapped.register_comm_hook(state, powerSGD_hook)
            return Attached(wrapped, optimizer.step)
        wrapped = DistributedDataParallel(model)
        if hook == "fp16":
            wrapped.register_comm_hook(None, fp16_compress_hook)
        return Attached(wrapped, optimizer.step)

    return Rival("torch", laconic.ddp(), attach)
