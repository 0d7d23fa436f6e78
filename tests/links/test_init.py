"""`laconic.init`: ranks of Slurm, or of torchrun, which starts all again after one has failed;
their GPUs, and where their store listens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import laconic as la
from laconic.errors import LinkError
from laconic.links.attempts import agree_on_attempt, check_launcher, listen_at

from tests.support import gloo, launched

TRAIN = """
import os, sys
from pathlib import Path
import torch
import laconic as la

folder, attempt = Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
la.init()
rank = torch.distributed.get_rank()
torch.manual_seed(rank)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sync = la.attach(model, optimizer, la.local_sgd(2), timeout=60)
checkpoint = folder / "checkpoint"
if checkpoint.exists():
    la.load(checkpoint, model, optimizer, sync)
began = sync.step
while sync.step < 6:
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if sync.step in (2, 4):
        la.save(checkpoint, model, optimizer, sync)
    if sync.step == 2 * attempt + 3 and attempt < 2 and rank == 1:
        os._exit(3)
sync.finish()
(folder / f"rank{rank}").write_text(f"{attempt} {began} {sync.step}")
"""


@pytest.mark.slow
def test_attempts_under_torchrun_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    """The first two attempts lose a rank, which leaves addresses of both in the agent's store."""
    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    launcher = ["torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2"]
    where = ["--master-addr=127.0.0.1", f"--master-port={gloo.free_port()}"]
    ended = subprocess.run(
        [sys.executable, "-m", *launcher, *where, str(program), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr
    assert [(tmp_path / f"rank{r}").read_text() for r in range(2)] == ["2 4 6"] * 2


def test_every_attempt_has_a_name_of_its_own() -> None:
    """A rank that comes late is waited for, and not taken for the process that had its rank in the
    attempt before. One that does not come is an error."""
    store, patience, short = HashStore(), timedelta(seconds=20), timedelta(seconds=0.2)
    with ThreadPoolExecutor(3) as pool:

        def asks(rank: int, ranks: int) -> Future[str]:
            return pool.submit(agree_on_attempt, store, rank, ranks, patience)

        (first,) = {asked.result() for asked in [asks(rank, 3) for rank in range(3)]}
        zero, one = asks(0, 3), asks(1, 3)
        with pytest.raises(TimeoutError):
            zero.result(timeout=0.3)
        assert asks(2, 3).result() == zero.result() == one.result() != first
    with pytest.raises(LinkError, match=r"ranks \[1, 2\] have not come to laconic.init\(\)"):
        agree_on_attempt(HashStore(), 0, 3, short)
    with pytest.raises(LinkError, match=r"rank 0 has not come to laconic.init\(\)"):
        agree_on_attempt(HashStore(), 1, 3, short)


def test_the_gpu_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each process sees one alone, that one, whatever LOCAL_RANK is. More ranks than GPUs are
    refused on all of the host."""
    chosen = list[int]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    monkeypatch.delenv("RANK", raising=False)
    cases: tuple[tuple[int, str, str, int | None], ...] = (
        *((1, "0", "1", 0), (1, "3", "8", 0), (8, "3", "8", 3), (8, "3", "", 3)),
        *((4, "", "", 0), (4, "1", "6", None), (4, "5", "6", None)),
    )
    for visible, local, on_host, expected in cases:
        monkeypatch.setattr(torch.cuda, "device_count", lambda visible=visible: visible)
        for name, value in (("LOCAL_RANK", local), ("LOCAL_WORLD_SIZE", on_host)):
            monkeypatch.setenv(name, value)
            if not value:
                monkeypatch.delenv(name)
        chosen.clear()
        if expected is None:
            with pytest.raises(ValueError, match=f"4 GPUs are visible to LOCAL_RANK {local} of 6"):
                la.init()
        else:
            la.init()
        assert chosen == ([] if expected is None else [expected])


def test_the_store_listens_where_the_address_is_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    """None: torch's, which listens on every interface, so that no run fails that worked."""
    port = gloo.free_port()
    with listen_at("localhost", port) or pytest.fail() as server:
        assert server.getsockname()[:2] in (("127.0.0.1", port), ("::1", port))
        with pytest.raises(OSError):  # an earlier process group has it
            listen_at("localhost", port)
    assert listen_at("127.0.0.1", 0) is None and listen_at("", port) is None
    name = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: name)
    assert listen_at("this-host", port) is None, "other hosts have another address for it"


STEP = {
    **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), "4(x2),3"),
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_PROCID": "9",
}


def test_tasks_of_srun_do_not_train_one_by_one() -> None:
    for environ in (
        {},
        {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # the batch script
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},  # a shell by srun
        {**STEP, "RANK": "0", "WORLD_SIZE": "2"},  # torchrun's
        {**STEP, "SLURM_TASKS_PER_NODE": "1"},  # a batch script that a step has submitted
    ):
        check_launcher(environ)
    with pytest.raises(ValueError, match="srun has started 11 tasks, and RANK is not set: start o"):
        check_launcher(STEP)


def init_again(pipe: object) -> list[object]:
    la.init()
    la.init()
    torch.distributed.destroy_process_group()
    la.init()
    return [torch.distributed.get_rank(), torch.distributed.get_world_size()]


def init_again_with(pipe: Any, slow: str) -> float:
    """Rank ``slow`` ends the first group two seconds after the other has called it again."""
    la.init()
    time.sleep(2 * (os.environ["RANK"] == slow))
    torch.distributed.destroy_process_group()
    la.init()
    x = torch.ones(1)
    torch.distributed.all_reduce(x)
    return float(x)


@pytest.mark.fault("rank 0 waited for a rank that had called init() before it")
@pytest.mark.parametrize("slow", ["0", "1"])
def test_ranks_may_init_again_one_after_the_other(slow: str) -> None:
    assert launched.results(launched.of_torchrun(2), init_again_with, slow) == [2.0, 2.0]


def test_a_process_may_init_again() -> None:
    """By torchrun, or by itself."""
    assert launched.results([*launched.of_torchrun(1), {}], init_again) == [[0, 1]] * 2
