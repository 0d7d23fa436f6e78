"""torch's own DistributedDataParallel: gradients averaged during every backward pass."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import laconic
from laconic.lab.peers import Attached, Peer


def peer() -> Peer:
    return Peer("torch", laconic.ddp(), attach)


def attach(model: nn.Module, optimizer: Optimizer) -> Attached:
    return Attached(DistributedDataParallel(model), optimizer.step, seek=lambda step: None)
