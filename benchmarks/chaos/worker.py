"""One worker of a run. It tells its step by shared memory, and writes two files:

- digests: for each step in which the recipe makes all models equal, the step and a digest of the
  parameters, 16 bytes in all;
- events: a line of JSON each for the start, slow steps, new views, and the end.

`watch_phases` wraps what `WRAPPED` lists, so that a worker can send itself a signal inside it.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import hashlib
import inspect
import json
import logging
import os
import random
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before processes are forked, so that a worker begins at once

import laconic
from benchmarks.chaos.shared import (
    ALL_LOST,
    DONE,
    LATE,
    PHASES,
    READY,
    SOME_LOST,
    STARTED,
    Board,
    Slot,
)
from laconic.algorithms.update import Update
from laconic.codecs.codec import Codec
from laconic.engine.donor import Donor
from laconic.engine.newcomers import Newcomer
from laconic.links.collectives import Collectives
from laconic.links.elastic.client import Client
from laconic.links.elastic.leases import Beat
from laconic.links.elastic.members import Members
from laconic.links.elastic.mesh import Mesh
from laconic.links.elastic.relay import Relay
from laconic.links.elastic.rendezvous import Rendezvous
from laconic.links.elastic.units import Units
from laconic.links.wire import Transfer

SLOW_SECONDS = 0.25
"""Steps that take longer are written down."""
WAIT = 45.0
"""How long a worker waits for others."""
PACE = 0.004
"""Seconds that a worker sleeps in each step."""
WRAPPED: tuple[tuple[type, str, str, str], ...] = (
    # class, method, phase, and whether that is before the call or after it (coroutines: after it)
    (Codec, "encode", "encode", "before"),
    (Codec, "decode", "decode", "before"),
    (Codec, "decode_mean", "decode", "before"),
    (Transfer, "__init__", "send", "after"),  # what the kernel accepted is on its way
    (Collectives, "_mean", "reduce", "after"),
    (Collectives, "_reduce_scatter", "reduce", "after"),
    (Collectives, "_all_to_all", "reduce", "after"),
    (Units, "complete", "complete", "after"),
    (Donor, "_state", "state", "before"),
    (Relay, "put", "feed", "after"),
    (Newcomer, "_replay", "replay", "before"),
    (Newcomer, "_load", "replay", "after"),
    (Mesh, "connect", "connect", "before"),
    (Rendezvous, "_compare", "compare", "before"),
    (Members, "leave", "leave", "before"),
)


@dataclass(frozen=True)
class Job:
    """What one worker runs. ``equal(step)``: whether all models are equal after that step.
    ``save``: calls `laconic.save` each so many steps; 0: never."""

    number: int
    recipe: str
    coordinator: str
    min_workers: int | None
    workers: int
    folder: Path
    equal: Callable[[int], bool]
    save: int = 0

    def file(self, kind: str) -> Path:
        """Where it writes."""
        return self.folder / f"{kind}-{self.number}"


def digest_of(tensors: Iterable[torch.Tensor]) -> bytes:
    """8 bytes."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.detach().numpy().data)
    return digest.digest()


def watch_phases(board: Board, number: int) -> Callable[[str], None]:
    """Send this process the signal that is armed for a phase. Returns what the training loop calls
    in its phases."""
    slot, pid = board.slots[number], os.getpid()

    def enter(phase: str) -> None:
        if slot.phase != PHASES.index(phase) + 1:
            return
        slot.entry -= 1
        if slot.entry > 0:
            return
        slot.phase, slot.struck = 0, time.monotonic()
        if phase in ("state", "feed"):  # any worker may be the donor: hit only one
            for other in board.slots:
                other.phase = 0
        os.kill(pid, slot.signal)

    def wrap(owner: type, name: str, phase: str, when: str) -> None:
        original = getattr(owner, name)

        async def awaited(*arguments: Any, **options: Any) -> Any:
            result = await original(*arguments, **options)
            enter(phase)
            return result

        def called(*arguments: Any, **options: Any) -> Any:
            if when == "before":
                enter(phase)
            result = original(*arguments, **options)
            if when == "after":
                enter(phase)
            return result

        wrapper = awaited if inspect.iscoroutinefunction(original) else called
        setattr(owner, name, functools.wraps(original)(wrapper))

    for place in WRAPPED:
        wrap(*place)
    for update in (Update, *_subclasses(Update)):
        for name in {"combine", "fold"} & set(vars(update)):
            wrap(update, name, "outer step", "before")
    return enter


def _subclasses(kind: type) -> list[type]:
    found: list[type] = kind.__subclasses__()
    return [*found, *(s for each in found for s in _subclasses(each))]


def disturb_beats(slot: Slot) -> None:
    """Delay or lose this process's messages to the coordinator, as ``slot`` says."""
    original, rng = Client.beat, random.Random()

    def beat(client: Client, said: Beat) -> None:
        if slot.beats == LATE:
            time.sleep(rng.uniform(0.0, 1.5))
        if slot.beats == ALL_LOST or (slot.beats == SOME_LOST and rng.random() < 0.5):
            return
        original(client, said)

    Client.beat = beat  # type: ignore[method-assign]


def make_model(enter: Callable[[str], None]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The same on all workers."""
    torch.manual_seed(0)
    first = torch.nn.Linear(20, 100)
    rest = torch.nn.BatchNorm1d(100), torch.nn.Tanh(), torch.nn.Linear(100, 5)
    model = torch.nn.Sequential(first, *rest)
    first.weight.register_hook(lambda gradient: enter("backward"))  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # before laconic's hooks, which run what follows a step
    optimizer.register_step_post_hook(lambda *_: enter("inner step"))
    return model, optimizer


def train(job: Job, board: Board) -> None:
    """Train until the board says stop."""
    slot = board.slots[job.number]
    slot.stage = STARTED
    enter = watch_phases(board, job.number)
    disturb_beats(slot)
    events = job.file("events").open("w", buffering=1)

    def tell(event: str, **more: Any) -> None:
        events.write(json.dumps({"event": event, "time": time.monotonic(), **more}) + "\n")

    tell("start", pid=os.getpid())
    digests = os.open(job.file("digests"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    model, optimizer = make_model(enter)
    elastic = laconic.Elastic(
        job.coordinator, min_workers=job.min_workers, workers=job.workers, wait=WAIT
    )
    recipe = eval(job.recipe, {"laconic": laconic})
    sync = laconic.attach(model, optimizer, recipe, elastic=elastic, timeout=60)
    link = sync.driver.session.elastic
    assert link is not None
    tell("ready", step=sync.step, workers=len(sync.view.workers), id=link.members.me.id)
    sync.on_change(
        lambda view: tell("view", epoch=view.epoch, workers=len(view.workers), step=sync.step)
    )
    generator = torch.Generator().manual_seed(job.number)
    slot.stage = READY
    while sync.step < board.stop:
        begin = time.monotonic()
        x = torch.randn(16, 20, generator=generator)
        loss = (model(x) - x[:, :5].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step = sync.step
        if job.equal(step):
            os.write(digests, struct.pack("q", step) + digest_of(model.parameters()))
        if job.save and step % job.save == 0:
            enter("save")
            laconic.save(job.folder / "checkpoint", model, optimizer)
        took = time.monotonic() - begin
        slot.step, slot.workers = step, len(sync.view.workers)
        slot.deadline = link.members.signs.deadline
        if took > SLOW_SECONDS:
            tell("slow", begin=begin, seconds=round(took, 3), step=step)
        time.sleep(PACE)
    sync.finish()
    slot.stage = DONE
    averaged = [b for b in model.buffers() if b.is_floating_point()]
    digest = digest_of([*model.parameters(), *averaged]).hex()
    tell("done", digest=digest, loss=loss.item(), step=sync.step)


def run(job: Job, board: Board) -> None:
    """Be this worker, in a fork, and end the process."""
    code = 0
    log = os.open(job.file("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        style = f"%(relativeCreated)d {job.number} %(message)s"
        logging.basicConfig(level=logging.INFO, format=style, stream=sys.stderr)
        train(job, board)
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        atexit._run_exitfuncs()
        sys.stderr.flush()
    finally:
        os._exit(code)
