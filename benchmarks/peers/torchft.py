"""torchft's LocalSGD, and with ``outer=True`` its DiLoCo, streaming or not, over gloo.

Every rank is a replica with its own Manager and store. Rank 0 also runs the lighthouse, through
which replicas find each other. All replicas start from the same model, so none has to be healed.

Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512) splits the parameters into ``fragments``,
ranges of whole tensors of about the same size, each with its own outer optimizer. Every ``period /
fragments`` steps it sends one of them, so each is sent once per ``period``. The result is applied
``delay`` steps later (torchft's fragment_sync_delay): x becomes ``alpha`` times itself plus 1 -
``alpha`` times the new global parameters (fragment_update_alpha). ``bucketed`` sends one message
per fragment instead of one per tensor.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import laconic
from laconic.errors import check_bool, check_float, check_int
from laconic.lab.race.rivals import Attached, Rival


@dataclass(frozen=True)
class Ahead:
    """``delay`` steps before the steps ``period, 2*period, ...``, at which torchft sends."""

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
) -> Rival:
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
            "must be applied before the next one is sent"
        )
    rounds = laconic.diloco(turn, lr, momentum) if outer else laconic.local_sgd(turn)
    rounds = tuple(replace(r, when=Ahead(delay, turn), delay=delay) for r in rounds)

    options = Options(period, turn, outer, lr, momentum, fragments, delay, alpha, bucketed)

    def attach(model: nn.Module, optimizer: Optimizer) -> Attached:
        running = Running(options, model, optimizer)
        consensus = running.consensus if outer else lambda: None
        return Attached(model, running.step, consensus, running.close)

    return Rival("torchft==0.2.0", rounds, attach)


@dataclass(frozen=True)
class Options:
    """The options of `peer`, and ``turn``, the number of steps from one fragment to the next."""

    period: int
    turn: int
    outer: bool
    lr: float
    momentum: float
    fragments: int
    delay: int
    alpha: float
    bucketed: bool


class Running:
    """torchft running on ``model``, with hooks on its ``optimizer``."""

    def __init__(self, options: Options, model: nn.Module, optimizer: Optimizer) -> None:
        self._options = options
        self._optimizer = optimizer
        self._size = dist.get_world_size()
        self._manage()
        self._algorithm = self._hook(model)
        self._algorithm.__enter__()

    def _manage(self) -> None:
        """Start the manager, its store, and on rank 0 the lighthouse."""
        from torchft import Manager, ProcessGroupGloo
        from torchft.coordination import LighthouseServer

        rank, host = dist.get_rank(), socket.gethostname()
        serves = rank == 0
        self._lighthouse = (
            LighthouseServer(bind="[::]:0", min_replicas=self._size) if serves else None
        )
        address = [self._lighthouse.address() if self._lighthouse else None]
        dist.broadcast_object_list(address, src=0)
        self._store: dist.TCPStore | None = dist.TCPStore(
            "0.0.0.0", 0, is_master=True, wait_for_workers=False
        )
        timeout = timedelta(seconds=60)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=timeout),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=self._size,
            use_async_quorum=False,
            timeout=timeout,
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=self._store.port,
            lighthouse_addr=address[0],
            replica_id=f"replica_{rank}",
            hostname=host,
            init_sync=False,
        )

    def _hook(self, model: nn.Module) -> Any:
        from torchft.local_sgd import DiLoCo, LocalSGD

        options = self._options
        if not options.outer:
            return LocalSGD(self._manager, model, self._optimizer, sync_every=options.period)
        parts = cut(model, options.fragments)
        outer = {"lr": options.lr, "momentum": options.momentum, "nesterov": True}
        return DiLoCo(
            self._manager,
            parts,
            self._optimizer,
            # One per fragment: a step of a shared one would also move the parameters of the others.
            [torch.optim.SGD(p.parameters(), **outer) for p in parts],
            sync_every=options.period,
            use_bucketization=options.bucketed,
            fragment_sync_delay=options.delay,
            fragment_update_alpha=options.alpha,
        )

    def step(self) -> None:
        rounds = self._manager.current_step()
        due = self._algorithm._local_step + 1 == self._options.turn
        self._optimizer.step()
        alone = due and self._manager.num_participants() != self._size
        if self._manager.current_step() != rounds + due or alone:
            raise RuntimeError("torchft did not average over all ranks")

    def consensus(self) -> list[Tensor]:
        return [x for f in self._algorithm._fragments for x in f.original_parameters.values()]

    def close(self) -> None:
        dist.barrier()  # no rank leaves while others still use its store
        self._manager.shutdown(wait=False)
        self._store = None
        if self._lighthouse is not None:
            self._lighthouse.shutdown()


def cut(model: nn.Module, fragments: int) -> list[nn.Module]:
    """Split the parameters into ranges of whole tensors.

    Each tensor goes to the range that contains its middle. Raises ``ValueError`` if a range would
    be empty.
    """
    parameters = list(model.parameters())
    total, begin = sum(p.numel() for p in parameters), 0
    parts: list[list[nn.Parameter]] = [[] for _ in range(fragments)]
    for p in parameters:
        parts[min(int((begin + p.numel() / 2) * fragments / total), fragments - 1)].append(p)
        begin += p.numel()
    if not all(parts):
        raise ValueError(
            f"{len(parameters)} tensors of these sizes cannot form {fragments} fragments"
        )
    return [nn.ParameterList(part) for part in parts]
