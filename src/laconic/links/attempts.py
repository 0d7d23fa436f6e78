"""Where the ranks meet: a store for each attempt of torchrun, which starts all ranks again after
one has failed.

torchrun's agent keeps one store for all attempts, and torch's process groups look in it for the
addresses of the other ranks, under the same keys each time. A rank of a second attempt that is
faster than another one finds that rank's address of the first attempt there, and waits for a
process that has ended.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store, default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from laconic.errors import LinkError

POLL = 0.02
"""Seconds after which rank 0 looks again for ranks that are still missing."""


def open_store() -> tuple[Store, int, int]:
    """A store that the ranks of this attempt alone use, this process's rank, and their number, from
    torchrun's environment variables."""
    store, rank, size = next(rendezvous("env://"))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = PrefixStore(f"laconic/{agree_on_attempt(store, rank, size)}", store)
    return store, rank, size


def agree_on_attempt(
    store: Store, rank: int, size: int, timeout: timedelta = default_pg_timeout
) -> str:
    """A name for this attempt, which rank 0 draws; every rank must call it.

    Each other rank asks under a name of its own process, and rank 0 answers that process, so that
    nothing an earlier attempt has left in the store is taken for an answer. The number of restarts
    (TORCHELASTIC_RESTART_COUNT) cannot serve: agents on several hosts count on their own, and one
    whose ranks were stopped because those of another failed counts nothing.
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
    """Tell the process of every other rank the name of the ``attempt``; returns when all have heard
    of it. What is under a rank's key may be a process that has ended, until the rank's own is
    there."""
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
