"""Lost ranks and strangers in whole runs, which benchmarks/traps reproduces on earlier versions."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from benchmarks.traps import network, strangers


class Forked:
    """In place of `subprocess.Popen`: a program in a process that has imported torch already."""

    def __init__(
        self,
        context: ForkServerContext,
        argv: Sequence[str],
        env: Mapping[str, str],
        out: Any,
        err: Any,
    ) -> None:
        given = list(argv[1:]), dict(env), out.name, err.name
        self.process = context.Process(target=run_program, args=given)
        self.process.start()
        self.kill = self.process.kill

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> None:
        self.process.join()

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode


def run_program(argv: list[str], env: dict[str, str], out: str, err: str) -> None:
    for number, name in ((1, out), (2, err)):
        os.dup2(os.open(name, os.O_WRONLY), number)
    os.environ.update(env)
    sys.argv = argv
    multiprocessing.set_start_method("fork", force=True)  # a program's own workers, as by default
    exec(compile(Path(argv[0]).read_text(), argv[0], "exec"), {"__name__": "__main__"})


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "trap",
    [
        network.killed_with_data_loader,
        network.hung_rank,
        network.absent_from_attach,
        strangers.stranger_with_a_verdict,
        strangers.idle_strangers,
        network.ended_in_order,
    ],
)
def test_a_trap_that_is_closed(
    trap: Callable[[], str], context: ForkServerContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(argv: Sequence[str], env: Mapping[str, str], stdout: Any, stderr: Any) -> Forked:
        return Forked(context, argv, env, stdout, stderr)

    monkeypatch.setattr("benchmarks.traps.subprocess.Popen", start)
    trap()
