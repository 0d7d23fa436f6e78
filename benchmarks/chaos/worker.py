"""One worker of a run. It tells its step by shared memory, and writes two files:

- digests: for each step in which the recipe makes all models equal, the step and a digest of the
  parameters, 16 bytes in all;
- slow: when each slow step began, and its seconds.

`watch_phases` wraps what `WRAPPED` lists: there a worker can send itself a signal.
"""

from __future__ import annotations

import faulthandler
import functools
import hashlib
import inspect
import logging
import os
import pkgutil
import random
import signal
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before processes are forked, so that a worker begins at once

import laconic
from benchmarks.chaos.check import END
from benchmarks.chaos.plan import WORKERS, Plan
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
from laconic.links.elastic.client import Client
from laconic.links.elastic.leases import Beat

SLOW_SECONDS = 0.25
"""Steps that take longer are written down."""
WAIT = 75.0
"""How long a worker waits for others."""
PACE = 0.004
"""Seconds that a worker sleeps in each step."""
CODEC, JOINING = "laconic.codecs.codec:Codec.", "laconic.engine.newcomers:Newcomer."
COLLECTIVES, ELASTIC = "laconic.links.collectives:Collectives.", "laconic.links.elastic."
WRAPPED = {
    # what is wrapped: the phase that its end is
    CODEC + "encode": "encode",
    CODEC + "decode": "decode",
    CODEC + "decode_mean": "decode",
    "laconic.links.wire:Transfer.__init__": "send",  # what the kernel accepted is on its way
    COLLECTIVES + "_mean": "reduce",
    COLLECTIVES + "_reduce_scatter": "reduce",
    COLLECTIVES + "_all_to_all": "reduce",
    ELASTIC + "units:Units.complete": "complete",
    "laconic.engine.donor:Donor._state": "state",
    ELASTIC + "relay:Relay.put": "feed",
    JOINING + "_replay": "replay",
    JOINING + "_load": "replay",
    ELASTIC + "mesh:Mesh.connect": "connect",
    ELASTIC + "rendezvous:Rendezvous._compare": "compare",
    ELASTIC + "members:Members.leave": "leave",
}


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

    def wrap(owner: type, name: str, phase: str) -> None:
        original = getattr(owner, name)

        async def awaited(*arguments: Any, **options: Any) -> Any:
            result = await original(*arguments, **options)
            enter(phase)
            return result

        def called(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            enter(phase)
            return result

        wrapper = awaited if inspect.iscoroutinefunction(original) else called
        setattr(owner, name, functools.wraps(original)(wrapper))

    for place, phase in WRAPPED.items():
        owner, _, name = place.rpartition(".")
        wrap(pkgutil.resolve_name(owner), name, phase)
    for update in (Update, *_subclasses(Update)):
        for name in {"combine", "fold"} & set(vars(update)):
            wrap(update, name, "outer step")
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


def train(plan: Plan, number: int, coordinator: str, folder: Path, board: Board) -> None:
    """Train until the board says stop."""
    slot = board.slots[number]
    slot.stage = STARTED
    enter = watch_phases(board, number)
    disturb_beats(slot)
    model, optimizer = make_model(enter)
    elastic = laconic.Elastic(coordinator, min_workers=plan.min_workers, workers=WORKERS, wait=WAIT)
    recipe = eval(plan.recipe, {"laconic": laconic})
    sync = laconic.attach(model, optimizer, recipe, elastic=elastic, timeout=60)
    link = sync.driver.session.elastic
    assert link is not None
    generator = torch.Generator().manual_seed(number)
    slot.stage = READY
    slow = (folder / f"slow-{number}").open("w", buffering=1)
    digests = (folder / f"digests-{number}").open("wb", buffering=0)
    while sync.step < board.stop:
        begin = time.monotonic()
        x = torch.randn(16, 20, generator=generator)
        loss = (model(x) - x[:, :5].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step = sync.step
        if plan.equal(step):
            digests.write(struct.pack("q", step) + digest_of(model.parameters()))
        if plan.save and step % plan.save == 0:
            enter("save")
            laconic.save(folder / "checkpoint", model, optimizer)
        took = time.monotonic() - begin
        slot.step, slot.workers = step, len(sync.view.workers)
        slot.deadline = link.members.signs.deadline
        if took > SLOW_SECONDS:
            slow.write(f"{begin} {took}\n")
        time.sleep(PACE)
    sync.finish()
    averaged = [b for b in model.buffers() if b.is_floating_point()]
    digests.write(struct.pack("q", END) + digest_of([*model.parameters(), *averaged]))
    slot.stage = DONE


def run(plan: Plan, number: int, coordinator: str, folder: Path, board: Board) -> None:
    """Be this worker, in a fork. SIGUSR1 shows what its threads do."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    style = f"%(relativeCreated)d {number} %(message)s"
    logging.basicConfig(level=logging.INFO, format=style)
    train(plan, number, coordinator, folder, board)
