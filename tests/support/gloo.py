"""A pool of gloo processes on 127.0.0.1 that run functions of test modules, started once."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from laconic.links import Link, TorchLink
from laconic.links.nccl import NcclLink

from tests.support import synchronizers

TIMEOUT = timedelta(seconds=60)
Task = Callable[..., Any]


def forking() -> ForkServerContext:
    """Makes processes that are forked from one that has imported what they need: each is cheap,
    and none has run anything before."""
    context: ForkServerContext = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    return context


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> range:
    """So many free ports in a row, below those that systems give away: a connection of another test
    would take one of those before it is listened at.

    Where they are is by chance, as tests that run at the same time ask before they listen.
    """
    starts = range(20000, 32000 - count)
    for first in random.Random().sample(starts, len(starts)):  # whatever seed a test has set
        with ExitStack() as closing:
            try:
                for port in range(first, first + count):
                    closing.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return range(first, first + count)
    raise AssertionError("no ports are free")


_groups: dict[int, dist.ProcessGroup] = {}


def link_of(ranks: int, timeout: timedelta = TIMEOUT) -> Link:
    """A link over the first ``ranks`` processes; for those alone."""
    return TorchLink(_groups[ranks], torch.device("cpu"), timeout)


def nccl_link_of(ranks: int, patched: pytest.MonkeyPatch) -> Link:
    """The same by the calls of torch's that NCCL takes, which gloo takes as well. ``patched``:
    older versions of gloo have no mean."""
    patched.setattr(dist, "all_reduce", partial(_averaged, dist.all_reduce, ranks))
    patched.setattr(dist, "destroy_process_group", lambda group: None)  # others use it, too
    return NcclLink.over(_groups[ranks], torch.device("cpu"), TIMEOUT)


def _averaged(
    all_reduce: Callable[..., dist.Work], n: int, x: torch.Tensor, *, op: object, **options: Any
) -> dist.Work:
    assert op == dist.ReduceOp.AVG
    return all_reduce(x.div_(n), **options)


def _serve(rank: int, size: int, port: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    synchronizers.track_synchronizers()
    faulthandler.register(signal.SIGUSR1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=TIMEOUT)
    for ranks in range(1, size + 1):
        _groups[ranks] = dist.new_group(list(range(ranks)), timeout=TIMEOUT)
    while (message := connection.recv()) is not None:
        number, task, arguments = message
        try:
            connection.send((number, True, task(rank, *arguments)))
        except Exception:
            connection.send((number, False, traceback.format_exc()))
        synchronizers.detach_synchronizers()
    dist.destroy_process_group()


class Pool:
    """``size`` processes in one default process group; new ones after a test in which one was
    silent."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._start()

    def _start(self) -> None:
        context = forking()
        port = free_port()
        self.processes: list[ForkServerProcess] = []
        self.connections: list[Connection] = []
        self.number = 0
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            given = (rank, self.size, port, theirs)
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            self.processes.append(process)
            self.connections.append(ours)
            theirs.close()

    def run(self, task: Task, *arguments: Any, ranks: int, timeout: float = 200) -> list[Any]:
        """``task(rank, *arguments)`` on the first ``ranks`` processes; what each returns."""
        connections = self.connections[:ranks]
        self.number += 1
        for connection in connections:
            connection.send((self.number, task, arguments))
        end, answers = time.monotonic() + timeout, []
        for rank, connection in enumerate(connections):
            number = 0
            while number < self.number:  # not the late answer to what a test gave up
                if not connection.poll(max(end - time.monotonic(), 0)):
                    self._give_up()
                    raise AssertionError(f"rank {rank} is silent")
                number, *answer = connection.recv()
            answers.append(answer)
        failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok]
        assert not failures, "\n".join(failures)
        return [value for _, value in answers]

    def _give_up(self) -> None:
        """Every process prints where it is, and others take their place."""
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(0.2)  # one after the other
        for process in self.processes:
            process.kill()
            process.join()
        self._start()

    def close(self) -> None:
        for connection in self.connections:
            try:
                connection.send(None)
            except OSError:
                continue  # that process has ended
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
