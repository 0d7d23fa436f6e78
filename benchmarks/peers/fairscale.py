"""fairscale's SlowMoDistributedDataParallel over its local SGD.

It was written for CUDA. On a machine without, the one call of its local SGD that needs a card,
``torch.cuda.synchronize()`` after a round, is replaced by one that does nothing; nothing else is
changed: there is no other stream to wait for on a CPU.
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
            warnings.simplefilter("ignore", FutureWarning)  # old names of torch's, as it is loaded
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

        def seek(step: int) -> None:
            wrapped.num_updates = step

        return Attached(wrapped, step, seek)

    return Rival("fairscale==0.4.13", rounds, attach)
