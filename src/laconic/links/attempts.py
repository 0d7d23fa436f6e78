"""A store for each attempt of torchrun, which starts all ranks again after one has failed, and for
each time that a program calls `laconic.init`.

torchrun's agent, or rank 0, keeps one store for all of them. torch's process groups look in it for
the addresses of the other ranks, under the same keys in every attempt. A rank of the second attempt
may find there the address of another rank in the first attempt, and wait for a process that has
ended.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from laconic.errors import LinkError
from laconic.links.addresses import listening

POLL = 0.02
"""Seconds between rank 0's looks for ranks that are missing."""


def check_launcher(environ: Mapping[str, str]) -> None:
    """Raise ``ValueError`` if ``srun`` has started this process as one of several, and nothing has
    set torchrun's variables: each would train by itself."""
    step = environ.get("SLURM_STEP_TASKS_PER_NODE")
    # a batch script that a step has submitted inherits the step's variables, beside its own
    inherited = environ.get("SLURM_TASKS_PER_NODE", step) != step
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" not in environ and tasks != "1" and not inherited:
        raise ValueError(
            f"srun has started {tasks} tasks, and RANK is not set: start one task per node, which "
            "runs torchrun, or set torchrun's variables from Slurm's (docs/launch.md has both)"
        )


_opened: dict[tuple[int, str | None, str | None], Store] = {}
"""Rank 0's stores, by its process and where they listen. They serve as long as the process: a rank
that calls `laconic.init` again before rank 0 does comes to the one of before."""


def open_store() -> tuple[Store, int, int]:
    """From torchrun's environment variables: a store that only the ranks of this attempt use, the
    rank of this process, and the number of ranks."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    at = os.getpid(), os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    own = None
    if not agent and os.environ["RANK"] == "0":
        own = _opened.get(at) or _own_store()
    if own is not None:
        store, rank, size = own, 0, int(os.environ["WORLD_SIZE"])
    else:
        store, rank, size = next(rendezvous("env://"))
    if rank == 0 and not agent:
        _opened[at] = store
    return PrefixStore(f"laconic/{agree_on_attempt(store, rank, size)}", store), rank, size


def _own_store() -> Store | None:
    """Rank 0's store, listening at MASTER_ADDR only; None where torch's is needed, also to say what
    is wrong."""
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        size = int(os.environ["WORLD_SIZE"])
        server = listen_at(host, port)
    except (KeyError, OSError, ValueError):
        return None
    return None if server is None else serve(server, host, port, size)


def listen_at(host: str, port: int) -> socket.socket | None:
    """A socket for torch's store that listens at ``host`` only: torch's own listens on every
    interface. None where that may be too little (`is_here_only`). Raises `OSError` where ``host``
    is no address of this host (a NAT's), or the port is in use, as by an earlier process group."""
    if not port or not host or is_here_only(host):
        return None
    address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    return listening(address, port)


def is_here_only(host: str) -> bool:
    """Whether ``host`` is a name that means the loopback interface here, and may mean this host's
    address on other hosts."""
    address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    loopback = address.startswith("127.") or address == "::1"
    return loopback and host not in (address, "localhost")


def serve(
    server: socket.socket, host: str, port: int, size: int | None, *, wait: bool = True
) -> Store:
    """torch's store, which accepts connections of ``server``. ``wait``: for ``size`` ranks."""
    descriptor = server.detach()

    def store(**more: Any) -> Store:
        return dist.TCPStore(  # type: ignore[attr-defined]
            *(host, port, size, True, default_pg_timeout),
            wait_for_workers=wait,
            master_listen_fd=descriptor,
            multi_tenant=True,  # torch's own init_process_group may follow, at the same port
            **more,
        )

    try:
        return store()
    except NotImplementedError:  # torch 2.7: libuv cannot take over a socket
        return store(use_libuv=False)


def agree_on_attempt(
    store: Store, rank: int, size: int, timeout: timedelta = default_pg_timeout
) -> str:
    """A name for this attempt, which rank 0 draws. Every rank must call it.

    Every other rank asks under a random name of its process, and rank 0 answers to that name. So no
    rank takes what an earlier attempt has left in the store for an answer. The number of restarts
    (TORCHELASTIC_RESTART_COUNT) is of no use: agents on several hosts count separately, and an
    agent whose ranks were stopped because those of another failed does not count it.
    """
    own, seconds = secrets.token_hex(8), timeout.total_seconds()
    if rank == 0:
        _answer(store, own, size, seconds)
        return own
    store.set_timeout(timeout)
    store.set(_asks(rank), own)
    try:
        attempt: str = store.get(f"laconic/attempt of {own}").decode()  # waits for it
    except RuntimeError as error:
        raise LinkError(
            f"rank 0 has not come to laconic.init() within {seconds:g} s: look at its own output"
        ) from error
    store.set(_heard(attempt, own), "yes")
    return attempt


def _asks(rank: int) -> str:
    return f"laconic/process of rank {rank}"


def _heard(attempt: str, process: str) -> str:
    return f"laconic/attempt {attempt} heard of by {process}"


def _answer(store: Store, attempt: str, size: int, seconds: float) -> None:
    """Tell the process of every other rank the name of the ``attempt``; returns when all of them
    have read it. A rank's key may hold the name of a process that has ended, until the rank writes
    its own."""
    missing = dict.fromkeys(range(1, size), "")
    end = time.monotonic() + seconds
    while missing:
        for rank, answered in list(missing.items()):
            if not store.check([_asks(rank)]):
                continue
            process = store.get(_asks(rank)).decode()
            if process != answered:
                store.set(f"laconic/attempt of {process}", attempt)
                missing[rank] = process
            elif store.check([_heard(attempt, process)]):
                del missing[rank]
        if missing and time.monotonic() > end:
            raise LinkError(
                f"ranks {sorted(missing)} have not come to laconic.init() within "
                f"{seconds:g} s: look at their own output"
            )
        if missing:
            time.sleep(POLL)
