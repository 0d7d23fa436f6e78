"""Ranks in processes that a test may kill, over the default gloo process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist

from tests.support import gloo

SECONDS = 200.0
"""After so many a process hangs."""


@dataclass
class Ranks:
    """What each rank sends over its connection is heard here."""

    processes: list[ForkServerProcess] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)

    def hear(self, rank: int) -> Any:
        assert self.connections[rank].poll(SECONDS), f"rank {rank} is silent"
        return self.connections[rank].recv()

    def send(self, rank: int, signal_number: int) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal_number)

    def ended(self, ranks: list[int]) -> bool:
        """Whether these processes end by themselves, and well."""
        for rank in ranks:
            self.processes[rank].join(SECONDS)
        return all(self.processes[rank].exitcode == 0 for rank in ranks)


def _live(rank: int, ranks: int, port: int, task: Any, arguments: Any, connection: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        task(rank, connection, *arguments)
    except Exception as error:
        connection.send((type(error).__name__, str(error)))


@contextmanager
def running(
    context: ForkServerContext, ranks: int, task: Callable[..., None], *arguments: Any
) -> Iterator[Ranks]:
    """``task(rank, connection, *arguments)`` in processes, of which none is left afterward. A rank
    that raises sends the name and the text of its error."""
    here, port = Ranks(), gloo.free_port()
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        given = (rank, ranks, port, task, arguments, theirs)
        process = context.Process(target=_live, args=given, daemon=True)
        process.start()
        theirs.close()
        here.processes.append(process)
        here.connections.append(ours)
    try:
        yield here
    finally:
        for process in here.processes:
            process.kill()
            process.join()
