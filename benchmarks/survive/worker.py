"""A worker of one system: ``python -m benchmarks.survive.worker SYSTEM DIRECTORY [--data FILE]``.

All systems train the same model on the same text by the same algorithm, DiLoCo. A process that was
started again draws other crops of the text than its predecessor.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn

import laconic
from benchmarks.survive.events import HOSTS, Recorder
from laconic.elastic import COORDINATOR_VARIABLE
from laconic.lab.race import workloads

PERIOD, LR, MOMENTUM = 10, 0.7, 0.5
WARMUP = 40
"""Steps over which the learning rate rises; it is constant from there on."""
LEAST = 2
"""The least number of workers with which training goes on."""
LIGHTHOUSE = 29510
EVERY = 5
"""Rounds between two points of the undisturbed run's curve."""


class Task:
    """The model, its optimizer, and this process's batches."""

    def __init__(self, data: Path | None, recorder: Recorder) -> None:
        self._workload = workloads.load("text", data=data)
        torch.manual_seed(0)
        self.model = self._workload.model()
        self.optimizer = self._workload.optimizer(self.model)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 1.0)
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]
        host = int(os.environ["GROUP_RANK"])
        seed = 1000 * recorder.incarnation
        self._batches: Iterator[workloads.Batch] = self._workload.batches(host, HOSTS, seed)
        self._recorder = recorder

    def train(self, done: int) -> None:
        """Compute one optimizer step, with the learning rate after ``done`` steps of the run."""
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * min((done + 1) / WARMUP, 1.0)
        self.optimizer.zero_grad()
        self._workload.loss(self.model, next(self._batches)).backward()
        self.optimizer.step()

    def loss(self, model: nn.Module | None = None) -> float:
        """Return the loss on held-out data."""
        with torch.no_grad():
            batches = self._workload.validation
            model = self.model if model is None else model
            return sum(float(self._workload.loss(model, b)) for b in batches) / len(batches)


def laconic_elastic(task: Task, recorder: Recorder, directory: Path, *, curve: bool) -> None:
    """laconic's elastic DiLoCo: a lost worker is left out until it comes again."""
    elastic = laconic.Elastic(min_workers=LEAST, workers=HOSTS, wait=120.0)
    recipe = laconic.diloco(PERIOD, LR, MOMENTUM)
    sync = laconic.attach(task.model, task.optimizer, recipe, elastic=elastic, timeout=60)
    recorder.say("attached", round=sync.step // PERIOD)
    models: list[tuple[int, nn.Module]] = []
    _loop(task, recorder, lambda: sync.step, models if curve else None)
    sync.finish()
    _final(task, recorder, sync.step // PERIOD, models)


def restarts(task: Task, recorder: Recorder, directory: Path, save_every: int) -> None:
    """Static DiLoCo under torchrun: when a worker is lost, all start again from a checkpoint."""
    os.environ.pop(COORDINATOR_VARIABLE)  # it would make the run elastic
    laconic.init()
    recipe = laconic.diloco(PERIOD, LR, MOMENTUM)
    sync = laconic.attach(task.model, task.optimizer, recipe, timeout=30)
    path = directory / "checkpoint"
    laconic.load(path, task.model, task.optimizer, missing_ok=True)
    recorder.say("attached", round=sync.step // PERIOD)
    recorder.say("loaded", round=sync.step // PERIOD)

    def save(number: int) -> None:
        if number % save_every == 0:
            laconic.save(path, task.model, task.optimizer)

    _loop(task, recorder, lambda: sync.step, None, save)
    sync.finish()
    _final(task, recorder, sync.step // PERIOD, [])


def _loop(
    task: Task,
    recorder: Recorder,
    done: Callable[[], int],
    models: list[tuple[int, nn.Module]] | None,
    after_round: Callable[[int], None] = lambda number: None,
) -> None:
    """Train until the round after which all workers end."""
    while True:
        task.train(done())
        recorder.step()
        if done() % PERIOD:
            continue
        number = done() // PERIOD
        ends = recorder.round(number)
        if models is not None and (ends or number % EVERY == 0):
            models.append((number, copy.deepcopy(task.model).requires_grad_(False)))
        after_round(number)
        if ends:
            return


def torchft(task: Task, recorder: Recorder, directory: Path) -> None:
    """torchft's DiLoCo, set up as in its own trainer. The lighthouse runs on a host that stays."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    host = socket.gethostname()
    store = torch.distributed.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    model, optimizer = task.model, task.optimizer

    def load_state_dict(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        recorder.lost()

    def state_dict() -> dict[str, dict[str, object]]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=LEAST,
        use_async_quorum=False,
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=60),
        connect_timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=f"http://host{HOSTS}:{LIGHTHOUSE}",
        replica_id=f"replica_{host.removeprefix('host')}",
        hostname=host,
        init_sync=False,
    )
    # Before torchft's own hook, in which a newcomer may lose the step that it has just computed.
    optimizer.register_step_post_hook(lambda *_: recorder.step())
    outer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, nesterov=True)
    recorder.say("attached", round=manager.current_step())
    # Bucketized: one message per round. Otherwise it sends one per tensor.
    with DiLoCo(manager, [model], optimizer, outer, sync_every=PERIOD, use_bucketization=True) as d:
        while True:
            before = manager.current_step()
            due = d._local_step + 1 == PERIOD
            task.train(before * PERIOD + d._local_step)
            if manager.current_step() > before:
                if recorder.round(manager.current_step()):
                    break
            elif due:
                recorder.lost()  # the round has failed, and it has restored the parameters
    _final(task, recorder, manager.current_step(), [])
    manager.shutdown(wait=False)


def lighthouse() -> None:
    """Run torchft's lighthouse for good, with the defaults of its command."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind=f"[::]:{LIGHTHOUSE}", min_replicas=LEAST, join_timeout_ms=60_000)
    print(f"lighthouse at {server.address()}", flush=True)
    while True:
        time.sleep(1000)


def _final(
    task: Task, recorder: Recorder, number: int, models: list[tuple[int, nn.Module]]
) -> None:
    curve = [(at, task.loss(model)) for at, model in models]
    recorder.say("final", round=number, loss=task.loss(), curve=curve)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--save-every", type=int, default=1)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(created).2f %(name)s %(message)s")
    logging.getLogger("laconic").setLevel(logging.INFO)
    torch.set_num_threads(1)
    host = int(os.environ["GROUP_RANK"])
    if options.system == "torchft" and host == HOSTS:
        lighthouse()
    recorder = Recorder(options.directory, host)
    task = Task(options.data, recorder)
    if options.system == "torchft":
        torchft(task, recorder, options.directory)
    elif options.system == "restarts":
        restarts(task, recorder, options.directory, options.save_every)
    else:
        curve = options.system == "undisturbed" and host == 0
        laconic_elastic(task, recorder, options.directory, curve=curve)


if __name__ == "__main__":
    main()
