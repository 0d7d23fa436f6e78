"""hivemind's DecentralizedAverager, which averages parameters every ``period`` steps.

It finds its group anew for each average, and a group may be smaller than all ranks. This adapter
fails if one is. hivemind's Optimizer, which counts samples over some seconds instead of steps, is
not used, so that the period is the same in all runs.
"""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import laconic
from laconic.lab.race.rivals import Attached, Rival


def peer(period: int = 12) -> Rival:
    def attach(model: nn.Module, optimizer: Optimizer) -> Attached:
        from hivemind import DHT
        from hivemind.averaging import DecentralizedAverager

        rank, ranks, done = dist.get_rank(), dist.get_world_size(), 0
        parameters = list(model.parameters())
        own = [f"/ip4/{socket.gethostbyname(socket.gethostname())}/tcp/0"]
        first = DHT(host_maddrs=own, start=True) if rank == 0 else None
        found = [[str(a) for a in first.get_visible_maddrs()] if first else None, os.getpid()]
        dist.broadcast_object_list(found, src=0)
        dht = first or DHT(host_maddrs=own, initial_peers=found[0], start=True)
        averager = DecentralizedAverager(
            [p.detach().clone() for p in parameters],
            dht,
            start=True,
            prefix=f"race{found[1]}",
            target_group_size=ranks,
            min_group_size=ranks,
        )

        def step() -> None:
            nonlocal done
            optimizer.step()
            done += 1
            if done % period:
                return
            with torch.no_grad(), averager.get_tensors() as tensors:
                torch._foreach_copy_(tensors, parameters)
            group = averager.step(timeout=60)
            if group is None or len(group) != ranks:
                raise RuntimeError("hivemind did not average over all ranks")
            with torch.no_grad(), averager.get_tensors() as tensors:
                torch._foreach_copy_(parameters, tensors)

        def close() -> None:
            dist.barrier()  # no rank leaves while others still send to it
            averager.shutdown()
            dht.shutdown()

        return Attached(model, step, close=close)

    return Rival("hivemind==1.1.12", laconic.local_sgd(period), attach)
