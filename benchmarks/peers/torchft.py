"""torchft's LocalSGD, and with ``outer=True`` its DiLoCo, streaming or not, over gloo.

Every rank is a replica of its own, with a Manager and a store; rank 0 also runs the lighthouse,
where replicas find each other. All of them start from the same model, so none has to be healed.

Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512): the parameters are cut into
``fragments``, stretches of whole tensors of about the same size, each with an outer optimizer of
its own; one of them is sent every ``period / fragments`` steps, so each once in ``period``. What is
sent is applied ``delay`` steps later (torchft's fragment_sync_delay), when x becomes ``alpha`` of
itself and 1 - ``alpha`` of the new global parameters (fragment_update_alpha). ``bucketed``: one
message for each fragment in place of one for each tensor.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import laconic
from laconic.errors import check_bool, check_float, check_int
from laconic.lab.peers import Attached, Peer


@dataclass(frozen=True)
class Ahead:
    """``delay`` steps before the steps ``period, 2*period, ...``, which is where it sends."""

    delay: int
    period: int

    def __call__(self, step: int) -> bool:
        return (step + self.delay) % self.period == 0


def peer(
    period: int = 12,
    *,
    outer: bool = False,
    lr: float = 0.7,
    momentum: float = 0.9,
    fragments: int = 1,
    delay: int = 0,
    alpha: float = 0.0,
    bucketed: bool = False,
) -> Peer:
    check_int("period", period, 1)
    check_bool("outer", outer)
    check_bool("bucketed", bucketed)
    check_float("alpha", alpha, 0.0, most=1.0)
    if not outer and (fragments, delay, alpha, bucketed) != (1, 0, 0.0, False):
        raise ValueError("fragments, delay, alpha and bucketed are options of DiLoCo: outer=True")
    if period % check_int("fragments", fragments, 1):
        raise ValueError(f"fragments must divide the period of {period}, not be {fragments}")
    turn = period // fragments
    if check_int("delay", delay, 0) >= turn:
        raise ValueError(
            f"delay must be less than period / fragments, which is {turn}, not {delay}: a fragment "
            "is applied before the next is sent"
        )
    rounds = laconic.diloco(turn, lr, momentum) if outer else laconic.local_sgd(turn)
    rounds = tuple(replace(r, when=Ahead(delay, turn), delay=delay) for r in rounds)

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
            parts = cut(model, fragments)
            algorithm = DiLoCo(
                manager,
                parts,
                optimizer,
                # one for each: a step of a common one would also move the parameters of the others
                [
                    torch.optim.SGD(p.parameters(), lr=lr, momentum=momentum, nesterov=True)
                    for p in parts
                ],
                sync_every=period,
                use_bucketization=bucketed,
                fragment_sync_delay=delay,
                fragment_update_alpha=alpha,
            )
        else:
            algorithm = LocalSGD(manager, model, optimizer, sync_every=period)
        algorithm.__enter__()

        def step() -> None:
            rounds, due = manager.current_step(), algorithm._local_step + 1 == turn
            optimizer.step()
            if manager.current_step() != rounds + due or (
                due and manager.num_participants() != size
            ):
                raise RuntimeError("torchft did not average over all ranks")

        def consensus() -> list[Tensor] | None:
            if not outer:
                return None
            return [x for f in algorithm._fragments for x in f.original_parameters.values()]

        def seek(step: int) -> None:
            algorithm._local_step = step % turn
            if not delay:
                return
            fragment = algorithm._fragments[algorithm._current_fragment()]
            if fragment._allreduce_work:  # sent by the seek before this one
                fragment.perform_sync()
            if algorithm._local_step >= turn - delay:
                manager.start_quorum()
                algorithm._fragments[algorithm._current_fragment()].prepare_sync()

        def close() -> None:
            nonlocal store
            dist.barrier()  # nobody leaves while others still ask
            manager.shutdown(wait=False)
            del store  # which has been there for the others to ask
            if lighthouse is not None:
                lighthouse.shutdown()

        return Attached(model, step, seek, consensus, close)

    return Peer("torchft==0.2.0", rounds, attach)


def cut(model: nn.Module, fragments: int) -> list[nn.Module]:
    """The parameters in so many stretches of whole tensors, each tensor in the stretch that its
    middle lies in. Raises ``ValueError`` where a stretch would be empty."""
    parameters = list(model.parameters())
    total, begin = sum(p.numel() for p in parameters), 0
    parts: list[list[nn.Parameter]] = [[] for _ in range(fragments)]
    for p in parameters:
        parts[min(int((begin + p.numel() / 2) * fragments / total), fragments - 1)].append(p)
        begin += p.numel()
    if not all(parts):
        raise ValueError(f"{len(parameters)} tensors of these sizes make no {fragments} fragments")
    return [nn.ParameterList(part) for part in parts]
