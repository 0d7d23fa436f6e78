"""torchft's LocalSGD, and with ``outer=True`` its DiLoCo, over gloo.

Every rank is a replica of its own, with a Manager and a store; rank 0 also runs the lighthouse,
where replicas find each other. All of them start from the same model, so none has to be healed.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import laconic
from laconic.lab.peers import Attached, Peer


def peer(period: int = 12, *, outer: bool = False, lr: float = 0.7, momentum: float = 0.9) -> Peer:
    rounds = laconic.diloco(period, lr, momentum) if outer else laconic.local_sgd(period)

    def attach(model: nn.Module, optimizer: Optimizer) -> Attached:
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo, LocalSGD

        rank, size = dist.get_rank(), dist.get_world_size()
        host = socket.gethostname()
        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=size) if rank == 0 else None
        told = [lighthouse.address() if lighthouse else None]
        dist.broadcast_object_list(told, src=0)
        store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        timeout = timedelta(seconds=60)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=timeout),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=size,
            use_async_quorum=False,
            timeout=timeout,
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=store.port,
            lighthouse_addr=told[0],
            replica_id=f"replica_{rank}",
            hostname=host,
            init_sync=False,
        )
        if outer:
            slow = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=True)
            algorithm = DiLoCo(manager, [model], optimizer, slow, sync_every=period)
        else:
            algorithm = LocalSGD(manager, model, optimizer, sync_every=period)
        algorithm.__enter__()

        def step() -> None:
            rounds, due = manager.current_step(), algorithm._local_step + 1 == period
            optimizer.step()
            if manager.current_step() != rounds + due or (
                due and manager.num_participants() != size
            ):
                raise RuntimeError("torchft did not average over all ranks")

        def consensus() -> list[Tensor] | None:
            if not outer:
                return None
            last = algorithm._fragments[0].original_parameters
            return [last[name] for name, _ in model.named_parameters()]

        def seek(step: int) -> None:
            algorithm._local_step = step % period

        def close() -> None:
            nonlocal store
            dist.barrier()  # nobody leaves while others still ask
            manager.shutdown(wait=False)
            del store  # which has been there for the others to ask
            if lighthouse is not None:
                lighthouse.shutdown()

        return Attached(model, step, seek, consensus, close)

    return Peer("torchft==0.2.0", rounds, attach)
