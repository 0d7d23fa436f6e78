"""Ranks as processes of the fork server, each with an environment of its own, for tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from tests.support import gloo
from tests.support.elastic_runs import use, variables

SECONDS = 240.0


class Rank(NamedTuple):
    """``pipe``: what the task sends, and is sent."""

    process: Any
    pipe: Connection

    def next(self) -> Any:
        """What the task sends next. At its end: its result, or the line that Python prints."""
        assert self.pipe.poll(SECONDS), "nothing comes"
        return self.pipe.recv()

    def ended(self) -> int | None:
        """Let the task's process end, and return its exit status; None: it hangs."""
        self.pipe.send("end")
        self.process.join(SECONDS)
        status: int | None = self.process.exitcode
        return status


def _be(
    pipe: Connection,
    given: Mapping[str, str],
    own: Mapping[str, str],
    task: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    use(dict(given))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name, None)
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **own})
    torch.set_num_threads(1)
    try:
        said = task(pipe, *arguments)
    except Exception as error:
        said = f"{type(error).__module__}.{type(error).__name__}: {error}"
    pipe.send(said)
    pipe.poll(SECONDS)  # the others may still ask


def of_torchrun(count: int) -> list[dict[str, str]]:
    """The variables of each rank."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(gloo.free_port())}
    return [{"RANK": str(r), "WORLD_SIZE": str(count), **where} for r in range(count)]


@contextmanager
def running(
    environments: list[dict[str, str]], task: Callable[..., Any], *arguments: Any
) -> Iterator[list[Rank]]:
    """``task(pipe, *arguments)`` in one process for each of the ``environments``."""
    context, made = gloo.forking(), list[Rank]()
    for own in environments:
        ours, theirs = context.Pipe()
        at = theirs, variables(), own, task, arguments
        process = context.Process(target=_be, args=at, daemon=True)
        process.start()
        theirs.close()
        made.append(Rank(process, ours))
    try:
        yield made
    finally:
        for rank in made:
            rank.process.kill()
            rank.process.join()
            rank.pipe.close()


def results(environments: list[dict[str, str]], task: Callable[..., Any], *rest: Any) -> list[Any]:
    """What each of them returns, or the line that Python would print."""
    with running(environments, task, *rest) as made:
        return [rank.next() for rank in made]
