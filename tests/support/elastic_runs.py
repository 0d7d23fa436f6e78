"""Elastic runs over processes, for tests."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from laconic.links.elastic.registry import serve

from tests.support import gloo, programs

SECONDS = 200.0
ROOT = Path(__file__).parents[2]
MANY = 100_000
"""Steps that a run never takes: its test ends it before, however fast or slow the machine is."""


class Worker:
    """A process of ``elastic_worker.py``."""

    def __init__(
        self, name: int, recipe: str, steps: int, coordinator: str, **options: Any
    ) -> None:
        # a stopped stand-in of a preloaded process would not stop that process
        python = programs.NEW if options.pop("fresh", False) else [sys.executable]
        command = [
            *python,
            "-m",
            "tests.support.elastic_worker",
            str(name),
            recipe,
            str(steps),
            coordinator,
        ]
        pipes = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "start_new_session": True,
            "cwd": ROOT,
        }
        self.process = subprocess.Popen([*command, json.dumps(options)], **pipes)  # type: ignore[call-overload]
        self.events: list[dict[str, Any]] = []
        self.errors = ""
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._readers = [threading.Thread(target=self._read), threading.Thread(target=self._drain)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(json.loads(line))
        self._lines.put(None)

    def _drain(self) -> None:
        with self.process.stderr as text:
            self.errors = text.read()

    def wait_for(self, event: str, **wanted: Any) -> dict[str, Any]:
        """Wait for such an event, and return it."""
        end = time.monotonic() + SECONDS
        while True:
            for found in self.events:
                if found["event"] == event and wanted.items() <= found.items():
                    return found
            line = self._lines.get(timeout=max(end - time.monotonic(), 0.01))
            if line is None:
                status = self.end()
                said = f"{self.events} {self.errors}"
                raise AssertionError(f"it ended with {status} before {event} {wanted}: {said}")
            self.events.append(line)

    def go(self) -> None:
        """Let a worker attach that was started with ``hold``."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def wait_for_nothing(self, seconds: float) -> None:
        """Check that nothing comes for so long."""
        with contextlib.suppress(queue.Empty):
            raise AssertionError(self._lines.get(timeout=seconds))

    def end(self) -> int:
        """Wait for the end, and return the exit status."""
        status = self.process.wait(SECONDS)
        self.process.stdin.close()
        for reader in self._readers:
            reader.join(SECONDS)
        return status

    def send(self, number: signal.Signals) -> float:
        """Send a signal; returns when."""
        self.process.send_signal(number)
        return time.monotonic()


class Run:
    """A coordinator and its workers. Ends all of them on leaving."""

    def __init__(self, recipe: str, count: int, steps: int, **options: Any) -> None:
        self.port = gloo.free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.recipe, self.steps = recipe, steps
        self._folder = tempfile.TemporaryDirectory()
        self.options = {"workers": count, "min_workers": 1, "wait": 30.0, **options}
        self.store: Any = serve("127.0.0.1", self.port)
        self.workers: list[Worker] = []
        for _ in range(count):
            self.add()

    def add(self, **more: Any) -> Worker:
        """Start another worker; with ``hold``, it attaches when `Worker.go` is called."""
        name = len(self.workers) + 1
        given = {"signs": self._folder.name, **self.options, **more}
        worker = Worker(name, self.recipe, self.steps, self.address, **given)
        self.workers.append(worker)
        return worker

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

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.process.kill()
            worker.end()
        self.store = None
        self._folder.cleanup()
