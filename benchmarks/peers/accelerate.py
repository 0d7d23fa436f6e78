"""Hugging Face Accelerate's LocalSGD, which averages parameters every ``period`` steps."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

import laconic
from laconic.lab.race.rivals import Attached, Rival


def peer(period: int = 12) -> Rival:
    def attach(model: nn.Module, optimizer: Optimizer) -> Attached:
        from accelerate import Accelerator
        from accelerate.local_sgd import LocalSGD

        accelerator = Accelerator(cpu=True)
        wrapped, stepped = accelerator.prepare(model, optimizer)
        local_sgd = LocalSGD(accelerator, wrapped, local_sgd_steps=period)
        if not local_sgd.enabled:
            raise RuntimeError(f"accelerate sees no other rank: {accelerator.distributed_type}")
        local_sgd.__enter__()

        def step() -> None:
            stepped.step()
            local_sgd.step()

        return Attached(wrapped, step)

    return Rival("accelerate==1.15.0", laconic.local_sgd(period), attach)
