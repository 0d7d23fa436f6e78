"""Elastic runs over processes, for tests."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import laconic
from laconic.cli import main
from laconic.links.elastic import leases
from laconic.links.elastic.mesh import Mesh

from tests.support import forgetful, gloo

SECONDS = 240.0
MANY = 100_000
"""Steps that a run never takes: its test ends it before, however fast or slow the machine is."""
FEW = 40
"""More steps than a worker can be ahead of another one, or than pass while one reads a file."""
VARIABLES = ("LACONIC_", "GLOO_")
OWN = [
    *("samples", "clip", "fails_after", "linger", "signs", "loader", "timeout"),
    *("hasten", "hold", "stops"),
]
"""The options that are not those of `laconic.Elastic`."""


def variables() -> dict[str, str]:
    """This process's settings. A process of the fork server has those of an earlier time."""
    return {k: v for k, v in os.environ.items() if k.startswith(VARIABLES)}


def use(given: dict[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith(VARIABLES)]:
        del os.environ[name]
    os.environ.update(given)


# -- in a worker's process ----


class Reporter:
    """Sends events and log lines of this process to its test, from any thread."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lock = pipe, threading.RLock()
        logging.basicConfig(level=logging.INFO, stream=self, force=True)
        logging.captureWarnings(True)

    def say(self, event: str, **more: Any) -> None:
        with self._lock, contextlib.suppress(OSError):  # the test has ended
            self._pipe.send({"event": event, **more})

    def write(self, text: str) -> None:
        self.say("text", text=text)

    def flush(self) -> None:
        """Do nothing."""


class Clock:
    """An object whose state can be read ``left`` times."""

    def __init__(self, left: int) -> None:
        self.left = left

    def state_dict(self) -> dict[str, int]:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("no state any more")
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"n": 1}


def digest_of(model: torch.nn.Module) -> str:
    tensors = [t for t in model.state_dict().values() if t.is_floating_point()]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


def batches(options: dict[str, Any], sampler: Any, number: int) -> Callable[[], torch.Tensor]:
    """What draws a batch: of a dataset of so many ``samples``, through the processes of a
    DataLoader that are started by ``loader``; or each worker's own."""
    generator = torch.Generator().manual_seed(number)
    if "samples" not in options:
        return lambda: torch.randn(16, 20, generator=generator)
    data = torch.randn(options["samples"], 20, generator=torch.Generator().manual_seed(5))
    if "loader" not in options:
        samples = iter(sampler)
        return lambda: data[[next(samples) for _ in range(4)]]
    context = multiprocessing.get_context(options["loader"])
    if options["loader"] == "fork":
        context.Process(target=time.sleep, args=(1000,)).start()
    dataset: Any = data
    loaded = DataLoader(dataset, 4, sampler=sampler, num_workers=2, multiprocessing_context=context)
    iterator = iter(loaded)
    return lambda: next(iterator)


class Signs:
    """Files by which a test asks worker ``number`` for something: see `Run.ask`."""

    def __init__(self, folder: str, number: int) -> None:
        self.folder, self.number = Path(folder), number

    def asked(self, name: str) -> Path | None:
        path = self.folder / f"{name}{self.number}"
        return path if path.exists() else None

    def last_step(self, step: int) -> int:
        """The step at which all workers end, once one of them was asked to end soon."""
        agreed = self.folder / "last"
        if not agreed.exists() and self.asked("end"):
            (self.folder / "new").write_text(str(step + FEW))
            (self.folder / "new").rename(agreed)
        return int(agreed.read_text()) if agreed.exists() else MANY

    def before_step(self, step: int, model: Any) -> None:
        while self.asked("pause"):
            time.sleep(0.02)
        if path := self.asked("spoil"):
            path.unlink()
            with torch.no_grad():
                model[0].weight[0, 3] += 1e-3
        if self.folder.exists():
            (self.folder / f"step{self.number}").write_text(str(step))


def train(
    say: Callable[..., None],
    recipe: str,
    steps: int,
    elastic: laconic.Elastic,
    options: dict[str, Any],
    number: int,
    pace: float,
) -> None:
    """Train a small model. ``options``: ``clip``: clip the gradients; ``fails_after``: see `Clock`;
    ``linger``: seconds to live on after the end; ``signs``: see `Signs`; ``timeout``: of
    `laconic.attach`; and those of `batches`."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(20, 100), torch.nn.BatchNorm1d(100), torch.nn.Tanh()
    model = torch.nn.Sequential(*layers, torch.nn.Linear(100, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.95)
    sampler = laconic.ElasticSampler(options.get("samples", 1), seed=1)
    others = {"data": sampler, "rate": scheduler, "clock": Clock(options.get("fails_after", MANY))}
    more: Any = {"elastic": dataclasses.replace(elastic, others=others)}
    more["timeout"] = options.get("timeout", 60)
    sync = laconic.attach(model, optimizer, eval(recipe, {"laconic": laconic}), **more)
    assert sync.view is not None
    signs = Signs(options.get("signs", "/nowhere"), number)
    say("ready", step=sync.step, id=sync.view.workers[sync.view.place])
    sync.on_change(lambda view: say("view", workers=len(view.workers)))
    draw = batches(options, sampler, number)
    while sync.step < min(steps, signs.last_step(sync.step)):
        signs.before_step(sync.step, model)
        x = draw()
        optimizer.zero_grad()
        (model(x) - x[:, :5].sin()).square().mean().backward()
        if options.get("clip"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        time.sleep(pace)
    sync.finish()
    counts = {"workers": len(sync.view.workers), "drifted": sync.stats().steps_drifted}
    say("done", digest=digest_of(model), step=sync.step, **counts)
    time.sleep(options.get("linger", 0.0))


def work(pipe: Connection, given: dict[str, str], at: Any, options: dict[str, Any]) -> None:
    """A worker's process."""
    os.setsid()  # a test may send a signal to all processes of the worker
    use(given)
    leases.START_SECONDS = 1.0  # where the worker serves the coordinator's address
    torch.set_num_threads(1)
    reporter = Reporter(pipe)
    number, recipe, steps, coordinator = at
    own = {name: options.pop(name) for name in OWN if name in options}
    if "hasten" in own:
        forgetful.hasten()
        port = int(coordinator.rpartition(":")[2])
        signal.signal(signal.SIGUSR1, lambda *_: forgetful.drop_packets(port))
    if "stops" in own:
        connect = Mesh.connect

        def stopped(*at: Any) -> None:
            connect(*at)
            os.kill(os.getpid(), signal.SIGSTOP)

        setattr(Mesh, "connect", stopped)  # noqa: B010 (mypy)
    if "hold" in own:
        reporter.say("held")
        pipe.recv()
    elastic = laconic.Elastic(coordinator, **options)
    try:
        train(reporter.say, recipe, steps, elastic, own, number, 0.015)
    except Exception as error:  # as Python's last line would say it
        sys.excepthook(type(error), error, None)  # laconic may have its own
        reporter.write(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None


def coordinate(pipe: Connection, given: dict[str, str], port: int) -> None:
    use(given)
    leases.START_SECONDS = 1.0  # no run is under way
    with contextlib.redirect_stdout(Reporter(pipe)):  # type: ignore[type-var]
        main(["coordinator", "--address", f"127.0.0.1:{port}"])


# -- in the test's process ----


class Process:
    """A process of ``task(pipe, variables, *arguments)``, and what it has reported."""

    def __init__(self, task: Callable[..., None], *arguments: Any) -> None:
        context = gloo.forking()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=task, args=(theirs, variables(), *arguments))
        self.process.start()
        theirs.close()
        self.events: list[dict[str, Any]] = []
        self.errors = ""

    def _next(self, seconds: float) -> bool:
        """Take in an event; False: the process has ended."""
        assert self.pipe.poll(seconds), f"nothing comes: {self.events} {self.errors}"
        try:
            event = self.pipe.recv()
        except (EOFError, ConnectionError):
            return False
        if event["event"] == "text":
            self.errors += event["text"]
        else:
            self.events.append(event)
        return True

    def _until(self, found: Callable[[], Any]) -> Any:
        end = time.monotonic() + SECONDS
        while not (result := found()):
            more = self._next(max(end - time.monotonic(), 0.01))
            assert more, f"it has ended: {self.events} {self.errors}"
        return result

    def wait_for(self, event: str, **wanted: Any) -> Any:
        """Wait for such an event, and return it."""
        wanted["event"] = event
        return self._until(lambda: next((e for e in self.events if wanted.items() <= e.items()), 0))

    def wait_for_text(self, text: str) -> None:
        """Wait until it has logged that."""
        self._until(lambda: text in self.errors)

    def end(self) -> int:
        """Wait for the end, and return the exit status."""
        while self._next(SECONDS):
            continue
        self.process.join(SECONDS)
        assert self.process.exitcode is not None
        return self.process.exitcode

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End it and all that it has started."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Coordinator(Process):
    """A process of ``laconic coordinator`` on 127.0.0.1."""

    def __init__(self, port: int) -> None:
        super().__init__(coordinate, port)
        self.port = port
        self.wait_for_text("coordinator at ")


class Run:
    """A coordinator and its workers. Ends all of them on leaving. With ``apart=False``, a worker
    has the coordinator."""

    def __init__(self, recipe: str, count: int, steps: int = MANY, **options: Any) -> None:
        self.port = gloo.free_port()
        self.recipe, self.steps = recipe, steps
        self._folder = tempfile.TemporaryDirectory()
        apart = options.pop("apart", True)
        self.options = {"workers": count or None, "min_workers": 1, "wait": 100.0, **options}
        self.coordinator = Coordinator(self.port) if apart else None
        self.workers: list[Process] = []
        for _ in range(count):
            self.add()

    def add(self, **more: Any) -> Process:
        """Start another worker; with ``hold``, it attaches when something comes by its pipe."""
        at = len(self.workers) + 1, self.recipe, self.steps, f"127.0.0.1:{self.port}"
        given = {"signs": self._folder.name, **self.options, **more}
        self.workers.append(Process(work, at, given))
        return self.workers[-1]

    def ready(self) -> list[Process]:
        """Wait until all workers have begun."""
        for worker in self.workers:
            worker.wait_for("ready")
        return self.workers

    def restart_coordinator(self) -> None:
        """Kill it, and start an empty one once all of its workers have noticed."""
        assert self.coordinator is not None
        self.coordinator.kill()
        for worker in self.workers:
            worker.wait_for_text("training goes on with the workers of now")
        self.coordinator = Coordinator(self.port)

    def ask(self, what: str, number: int) -> Path:
        """Have worker ``number`` do something: "pause" before its next step while the returned file
        exists; "spoil" what all workers should have in common; or agree with the others on a step,
        soon, after which all "end"."""
        path = Path(self._folder.name) / f"{what}{number}"
        path.touch()
        return path

    def progress(self, number: int, steps: int = FEW) -> None:
        """Wait until worker ``number`` has taken more steps."""
        path, end = Path(self._folder.name) / f"step{number}", time.monotonic() + SECONDS

        def step() -> int:
            return int(path.read_text() or 0) if path.exists() else 0

        last = step() + steps
        while step() < last:
            assert time.monotonic() < end, "it does not train"
            time.sleep(0.05)

    def done(self, *left_out: Process) -> list[dict[str, Any]]:
        """What all workers report at the end, which comes soon."""
        stay = [worker for worker in self.workers if worker not in left_out]
        self.ask("end", self.workers.index(stay[0]) + 1)
        return [worker.wait_for("done") for worker in stay]

    def check_same(self, count: int, *left_out: Process) -> None:
        """So many workers end soon, and all of them with the same model."""
        digests = [event["digest"] for event in self.done(*left_out)]
        assert len(digests) == count and len(set(digests)) == 1, digests

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self.workers, *([self.coordinator] if self.coordinator else ())):
            process.kill()
        self._folder.cleanup()
