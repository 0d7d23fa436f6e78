"""fairscale's SlowMoDistributedDataParallel over its local SGD.

It was written for CUDA. Without a GPU, this adapter replaces the only call of its local SGD that
requires one, ``torch.cuda.synchronize()`` after a round, by a function that does nothing. A CPU has
no other stream to wait for. Nothing else is changed.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.optim import Optimizer

import laconic
from laconic.lab.race.rivals import Attached, Rival


def peer(
    period: int = 24, momentum: float = 0.2, lr: float = 1.0, localsgd_period: int = 12
) -> Rival:
    rounds = laconic.slowmo(laconic.local_sgd(localsgd_period), period, momentum, lr)

    def attach(model: nn.Module, optimizer: Optimizer) -> Attached:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it imports deprecated names of torch
            from fairscale.experimental.nn.data_parallel import SlowMoDistributedDataParallel

        if not torch.cuda.is_available():
            torch.cuda.synchronize = lambda device=None: None
        wrapped = SlowMoDistributedDataParallel(
            model,
            nprocs_per_node=1,
            slowmo_momentum=momentum,
            slowmo_frequency=period,
            slowmo_lr=lr,
            localsgd_frequency=localsgd_period,
        )

        def step() -> None:
            optimizer.step()
            wrapped.perform_slowmo(optimizer)

        return Attached(wrapped, step)

    return Rival("fairscale==0.4.13", rounds, attach)
