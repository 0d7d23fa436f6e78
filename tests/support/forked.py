"""Ranks that are forked from a process which has imported a library: imported once, and never used.

A program imports what it tests, and calls `run` for each of its runs. It prints nothing, and saves
what its tests need to know; see `results_of`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  the first step of an optimizer imports it, in each rank

from tests.support import gloo

SECONDS = 280.0
TESTS = Path(__file__).parent.parent


def run(ranks: int, task: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``task(rank, *arguments)`` in one new process for each rank, with torchrun's environment."""
    port, children = gloo.free_port(), []
    for rank in range(ranks):
        reads, writes = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reads)
            _be(rank, ranks, port, writes, task, arguments)
        os.close(writes)
        children.append((pid, reads))
    answers = []
    for pid, reads in children:
        with os.fdopen(reads, "rb") as pipe:
            answers.append(pickle.loads(pipe.read() or pickle.dumps((False, "it was killed"))))
        os.waitpid(pid, 0)
    failed = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok]
    if failed:
        raise SystemExit("\n".join(failed))
    return [result for _, result in answers]


def _be(
    rank: int,
    ranks: int,
    port: int,
    writes: int,
    task: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    here |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), **here)
    try:
        answer = True, task(rank, *arguments)
    except BaseException:
        answer = False, traceback.format_exc()
    with os.fdopen(writes, "wb") as pipe:
        pipe.write(pickle.dumps(answer))
    os._exit(0)


def results_of(program: str, folder: Path, only: str = "") -> Any:
    """Run ``tests/integrations/<program>.py`` with ``folder`` to write to and perhaps the name of
    its ``only`` run; what it has saved there by `save`."""
    folder.mkdir()
    path = [str(TESTS.parent), *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "TOKENIZERS_PARALLELISM": "false"}
    env["OMP_NUM_THREADS"] = "1"  # or some libraries choose another number than a loop by hand has
    with (folder / "errors").open("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", f"tests.integrations.{program}", str(folder), only],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        try:
            process.wait(SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):  # its ranks, too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors.seek(0)
        assert not process.returncode, errors.read()[-6000:]
    return pickle.loads((folder / "results").read_bytes())


def save(results: Any) -> None:
    """Save what the tests need to know."""
    (Path(sys.argv[1]) / "results").write_bytes(pickle.dumps(results))
