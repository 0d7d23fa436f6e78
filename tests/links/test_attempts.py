"""torchrun starts all ranks again after one has failed: they meet anew, and go on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore, Store

import laconic as la
from laconic.errors import LinkError
from laconic.links.attempts import agree_on_attempt, listen_at

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
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_attempts_under_torchrun_go_on_from_the_checkpoint(tmp_path: Path, rendezvous: str) -> None:
    """The first two attempts lose a rank, which leaves addresses of both in the agent's store."""
    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    port = gloo.free_port()
    where = {
        "static": ["--master-addr=127.0.0.1", f"--master-port={port}"],
        "c10d": ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=run"],
    }
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2"]
    ended = subprocess.run(
        [sys.executable, *launcher, *where[rendezvous], str(program), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr
    assert [(tmp_path / f"rank{r}").read_text() for r in range(2)] == ["2 4 6"] * 2


def attempt(store: Store, ranks: int) -> list[str]:
    """What each of so many processes takes for the attempt's name, of which rank 0 comes first."""
    with ThreadPoolExecutor(ranks) as pool:
        patience = timedelta(seconds=20)
        asked = [pool.submit(agree_on_attempt, store, r, ranks, patience) for r in range(ranks)]
        return [future.result() for future in asked]


def test_every_attempt_has_a_name_of_its_own() -> None:
    store = HashStore()
    first, second = attempt(store, 3), attempt(store, 3)
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]


class Noting(HashStore):
    """Lets one know when rank 0 has looked at what an attempt before has left."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.looked = threading.Event()

    def check(self, keys: list[str]) -> bool:
        found: bool = super().check(keys)
        self.looks += 1
        if self.looks >= 10:
            self.looked.set()
        return found


def test_a_rank_that_comes_late_is_waited_for() -> None:
    """And not taken for the process that had its rank in the attempt before, which has heard of
    that attempt, and not of this one."""
    store = Noting()
    before = attempt(store, 2)
    store.looks = 0
    store.looked.clear()
    patience = timedelta(seconds=20)
    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(agree_on_attempt, store, 0, 2, patience)
        assert store.looked.wait(20)
        assert not zero.done()
        one = pool.submit(agree_on_attempt, store, 1, 2, patience)
        assert zero.result() == one.result() != before[0]


def test_a_rank_that_does_not_come_is_an_error() -> None:
    store, short = HashStore(), timedelta(seconds=0.2)
    with pytest.raises(LinkError, match=r"ranks \[1, 2\] have not come to laconic.init\(\)"):
        agree_on_attempt(store, 0, 3, short)
    with pytest.raises(LinkError, match=r"rank 0 has not come to laconic.init\(\)"):
        agree_on_attempt(HashStore(), 1, 3, short)


# -- which GPU is a rank's own ----


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The GPUs that `laconic.init` makes the current one, on a machine that seems to have some; no
    process group is set up."""
    found: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    monkeypatch.delenv("RANK", raising=False)
    return found


@pytest.mark.parametrize(
    ("visible", "local", "on_host", "expected"),
    [(1, "0", "1", 0), (1, "3", "8", 0), (8, "3", "8", 3), (8, "3", None, 3), (4, None, None, 0)],
)
def test_the_gpu_of_a_rank(
    monkeypatch: pytest.MonkeyPatch,
    chosen: list[int],
    visible: int,
    local: str | None,
    on_host: str | None,
    expected: int,
) -> None:
    """Where each process sees one alone, that one, whatever LOCAL_RANK is."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    for name, value in (("LOCAL_RANK", local), ("LOCAL_WORLD_SIZE", on_host)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    la.init()
    assert chosen == [expected]


@pytest.mark.parametrize("local", ["1", "5"])
def test_more_ranks_than_gpus_are_refused_on_all_of_the_host(
    monkeypatch: pytest.MonkeyPatch, chosen: list[int], local: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", local)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    with pytest.raises(ValueError, match=f"4 GPUs are visible to LOCAL_RANK {local} of 6"):
        la.init()
    assert not chosen


# -- rank 0's store ----


def test_it_listens_where_the_address_is_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    """None: torch's, which listens on every interface, so that no run fails that worked."""
    port = gloo.free_port()
    for host in ("127.0.0.1", "localhost"):
        server = listen_at(host, port)
        assert server is not None
        with server:
            assert server.getsockname()[1] == port
            assert server.getsockname()[0] in ("127.0.0.1", "::1")
            with pytest.raises(OSError):  # an earlier process group has it
                listen_at(host, port)
    assert listen_at("127.0.0.1", 0) is None and listen_at("", port) is None
    name = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: name)
    assert listen_at("this-host", port) is None, "other hosts have another address for it"


def init_again(pipe: object) -> list[object]:
    la.init()
    found = [torch.distributed.get_world_size(), torch.distributed.get_backend()]
    la.init()
    torch.distributed.destroy_process_group()
    la.init()
    return found


@pytest.mark.parametrize("by_torchrun", [False, True])
def test_a_process_may_init_again(by_torchrun: bool) -> None:
    world = launched.of_torchrun(1) if by_torchrun else [{}]
    assert launched.results(world, init_again) == [[1, "gloo"]]
