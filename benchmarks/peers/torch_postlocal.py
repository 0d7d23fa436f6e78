"""torch's PostLocalSGDOptimizer: averages gradients in the first ``start`` steps, then parameters
every ``period`` steps, beginning immediately.

The setup follows its documentation: a PeriodicModelAverager, and DistributedDataParallel with the
matching hook, without the hook's optional averaging of gradients inside a node.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import laconic
from laconic.algorithms.exchanges import Mean
from laconic.algorithms.updates import Average
from laconic.lab.race.rivals import Attached, Rival


@dataclass(frozen=True)
class FromStart:
    """The steps ``start + 1, start + 1 + period, ...``, at which the averager averages."""

    start: int
    period: int

    def __call__(self, step: int) -> bool:
        return step > self.start and (step - 1 - self.start) % self.period == 0


def peer(start: int = 0, period: int = 12) -> Rival:
    gradients = laconic.post_local_sgd(start, period)[0]
    averages = laconic.Round(FromStart(start, period), Average(), Mean())

    def attach(model: nn.Module, optimizer: Optimizer) -> Attached:
        from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
            PostLocalSGDState,
            post_localSGD_hook,
        )
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        state = PostLocalSGDState(None, None, start, post_local_gradient_allreduce=False)
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(period=period, warmup_steps=start)
        return Attached(wrapped, PostLocalSGDOptimizer(optimizer, averager).step)

    return Rival("torch", (gradients, averages), attach)
