"""Elastic runs over processes, for tests."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import laconic
from laconic.cli import main

from tests.support import elastic_worker, forgetful, gloo

SECONDS = 240.0
MANY = 100_000
"""Steps that a run never takes: its test ends it before, however fast or slow the machine is."""
VARIABLES = ("LACONIC_", "GLOO_")


def variables() -> dict[str, str]:
    """This process's settings. A process of the fork server has those of an earlier time."""
    return {k: v for k, v in os.environ.items() if k.startswith(VARIABLES)}


def use(given: dict[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith(VARIABLES)]:
        del os.environ[name]
    os.environ.update(given)


class Reporter:
    """Sends events and log lines of this process to its test, from any thread."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lock = pipe, threading.RLock()

    def say(self, event: str, **more: Any) -> None:
        with self._lock, contextlib.suppress(OSError):  # the test has ended
            self._pipe.send({"event": event, **more})

    def write(self, text: str) -> None:
        self.say("text", text=text)

    def flush(self) -> None:
        """Do nothing."""


def work(
    pipe: Connection, given: dict[str, str], at: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """A worker's process."""
    os.setsid()  # a test may send a signal to all processes of the worker
    use(given)
    torch.set_num_threads(1)
    reporter = Reporter(pipe)
    logging.basicConfig(level=logging.INFO, stream=reporter, force=True)
    logging.captureWarnings(True)
    number, recipe, steps, coordinator = at
    if options.pop("hasten", False):
        forgetful.hasten()
    if options.pop("hold", False):
        reporter.say("held")
        pipe.recv()
    own = {name: options.pop(name) for name in elastic_worker.OWN if name in options}
    pace = options.pop("pace", 0.01)
    elastic = laconic.Elastic(coordinator, **options)
    try:
        elastic_worker.train(reporter.say, recipe, steps, elastic, own, number, pace)
    except Exception as error:  # as Python's last line would say it
        sys.excepthook(type(error), error, None)  # laconic may have its own
        reporter.write(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None


class Worker:
    """A process of `elastic_worker.train`."""

    def __init__(
        self, number: int, recipe: str, steps: int, coordinator: str, **options: Any
    ) -> None:
        context = gloo.forking()
        self._pipe, theirs = context.Pipe()
        arguments = theirs, variables(), (number, recipe, steps, coordinator), options
        self.process = context.Process(target=work, args=arguments)
        self.process.start()
        theirs.close()
        self.events: list[dict[str, Any]] = []
        self.errors = ""

    def _next(self, seconds: float) -> bool:
        """Take in an event; False: the process has ended."""
        assert self._pipe.poll(seconds), f"nothing comes: {self.events} {self.errors}"
        try:
            event = self._pipe.recv()
        except EOFError:
            return False
        if event["event"] == "text":
            self.errors += event["text"]
        else:
            self.events.append(event)
        return True

    def wait_for(self, event: str, **wanted: Any) -> dict[str, Any]:
        """Wait for such an event, and return it."""
        end, looked = time.monotonic() + SECONDS, 0
        while True:
            for found in self.events[looked:]:
                if found["event"] == event and wanted.items() <= found.items():
                    return found
            looked = len(self.events)
            if not self._next(max(end - time.monotonic(), 0.01)):
                raise AssertionError(
                    f"it ended before {event} {wanted}: {self.events} {self.errors}"
                )

    def wait_for_text(self, text: str) -> None:
        """Wait until it has logged that."""
        end = time.monotonic() + SECONDS
        while text not in self.errors:
            assert self._next(max(end - time.monotonic(), 0.01)), self.errors

    def go(self) -> None:
        """Let a worker attach that was started with ``hold``."""
        self._pipe.send("go")

    def end(self) -> int:
        """Wait for the end, and return the exit status."""
        with contextlib.suppress(ConnectionError):
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
        self._pipe.close()


def coordinate(pipe: Connection, given: dict[str, str], port: int) -> None:
    use(given)
    with contextlib.redirect_stdout(Reporter(pipe)):  # type: ignore[type-var]
        main(["coordinator", "--port", str(port)])


class Coordinator:
    """A process of ``laconic coordinator`` on 127.0.0.1."""

    def __init__(self, port: int) -> None:
        context = gloo.forking()
        self._pipe, theirs = context.Pipe()
        arguments = theirs, variables(), port
        self.process = context.Process(target=coordinate, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        assert self._pipe.poll(SECONDS), "the coordinator does not start"
        self.said = str(self._pipe.recv()["text"])

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


class Run:
    """A coordinator and its workers. Ends all of them on leaving."""

    def __init__(self, recipe: str, count: int, steps: int = MANY, **options: Any) -> None:
        self.port = gloo.free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.recipe, self.steps = recipe, steps
        self._folder = tempfile.TemporaryDirectory()
        self.options = {"workers": count or None, "min_workers": 1, "wait": 100.0, **options}
        self.coordinator = Coordinator(self.port)
        self.workers: list[Worker] = []
        for _ in range(count):
            self.add()

    def add(self, **more: Any) -> Worker:
        """Start another worker; with ``hold``, it attaches when `Worker.go` is called."""
        number = len(self.workers) + 1
        given = {"signs": self._folder.name, **self.options, **more}
        worker = Worker(number, self.recipe, self.steps, self.address, **given)
        self.workers.append(worker)
        return worker

    def ready(self) -> list[Worker]:
        """Wait until all workers have begun."""
        for worker in self.workers:
            worker.wait_for("ready")
        return self.workers

    def restart_coordinator(self) -> None:
        """Kill it, and start an empty one once all of its workers have noticed."""
        self.coordinator.kill()
        for worker in self.workers:
            worker.wait_for_text("training goes on with the workers of now")
        self.coordinator = Coordinator(self.port)

    def end_soon(self, *left_out: Worker) -> None:
        """Have the workers agree on a step, soon, after which they end."""
        number = next(n for n, w in enumerate(self.workers, 1) if w not in left_out)
        (Path(self._folder.name) / f"ask{number}").touch()

    def spoil(self, worker: Worker) -> None:
        """Have what all workers should have in common change on this one."""
        (Path(self._folder.name) / f"spoil{self.workers.index(worker) + 1}").touch()

    def digests(self, *left_out: Worker) -> list[str]:
        """The digests of all workers' models at the end, which comes soon."""
        self.end_soon(*left_out)
        done = [w.wait_for("done") for w in self.workers if w not in left_out]
        return [event["digest"] for event in done]

    def check_same(self, count: int, *left_out: Worker) -> None:
        """So many workers end soon, and all of them with the same model."""
        digests = self.digests(*left_out)
        assert len(digests) == count and len(set(digests)) == 1, digests

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.kill()
        self.coordinator.kill()
        self._folder.cleanup()


def listening_ports(pid: int | None) -> list[int]:
    """Where a process listens."""
    import psutil

    found = psutil.Process(pid).net_connections("tcp")
    return sorted(c.laddr.port for c in found if c.status == psutil.CONN_LISTEN)
