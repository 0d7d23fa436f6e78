"""Traps of what runs next to laconic: torch's data-parallel wrappers, FSDP, and torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.traps import Outcome, Trapped, free_port, run_ranks, trap

WRAPPED = """
import sys, warnings
import torch
from torch.nn.parallel import DistributedDataParallel
import laconic as la

laconic_gets, recipe = sys.argv[1:]
la.init()
rank = torch.distributed.get_rank()
torch.manual_seed(0)
module = torch.nn.Linear(300, 10)
wrapper = DistributedDataParallel(module)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
attached = wrapper if laconic_gets == "wrapper" else module
try:
    with la.attach(attached, optimizer, getattr(la, recipe)(*[8] * (recipe != "ddp"))) as sync:
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            wrapper(torch.randn(4, 300, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        print("trained; payload bytes in stats():", sync.stats().bytes_sent)
except ValueError as error:
    print("ValueError:", str(error))
"""


def _last_line(outcome: Outcome) -> str:
    lines = outcome.out.strip().splitlines()
    return lines[-1] if lines else outcome.last_line


def _check_refused(outcomes: list[Outcome], lost: str) -> str:
    """Return the ranks' message, which must be the same ``ValueError`` on all of them."""
    messages = [_last_line(o) for o in outcomes]
    if any(o.code is None for o in outcomes):
        raise Trapped(f"a rank hangs: {messages}")
    if any(o.code for o in outcomes):
        codes = [o.code for o in outcomes]
        raise Trapped(f"the processes end with {codes}: {outcomes[0].last_line[:120]}")
    if not all(text.startswith("ValueError: ") for text in messages):
        warned = " and warns of identical batches" if "identical" in outcomes[0].err else ""
        raise Trapped(f"{lost}: it {messages[0]}{warned}")
    if len(set(messages)) > 1:
        raise Trapped(f"the ranks' errors differ: {messages}")
    return messages[0][:120]


@trap("a model wrapped in DistributedDataParallel is attached")
def wrapped_in_ddp() -> str:
    outcomes = run_ranks(WRAPPED, arguments=["wrapper", "local_sgd"])
    return _check_refused(outcomes, "DDP averages all gradients at every step besides laconic")


@trap("the plain module is attached, but trained through a DistributedDataParallel wrapper")
def trained_through_ddp() -> str:
    lost = "DDP averages all gradients at every step besides laconic"
    _check_refused(run_ranks(WRAPPED, arguments=["module", "ddp"]), f"{lost}'s own averages")
    return _check_refused(run_ranks(WRAPPED, arguments=["module", "local_sgd"]), lost)


SHARDED = """
import sys
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import laconic as la

la.init()
torch.manual_seed(torch.distributed.get_rank())
grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "shards"))
line = init_device_mesh("cpu", (4,))
over, attached = {"hsdp": (grid, grid), "all": (line, line)}[sys.argv[1]]
model = torch.nn.Linear(8, 8)
fully_shard(model, mesh=over)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    sync = la.attach(model, optimizer, la.local_sgd(8), mesh=attached, timeout=20)
    for _ in range(3):
        model(torch.randn(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained")
except ValueError as error:
    print("ValueError:", str(error))
"""


@trap("FSDP shards a model inside each worker and replicates it over all workers (HSDP)")
def sharded_and_replicated() -> str:
    outcomes = run_ranks(SHARDED, ranks=4, arguments=["hsdp"], timeout=90)
    return _check_refused(outcomes, "FSDP averages over all workers at every step besides laconic")


@trap("a model sharded over all ranks is attached with a mesh of workers of one rank each")
def sharded_over_all() -> str:
    outcomes = run_ranks(SHARDED, ranks=4, arguments=["all"], timeout=90)
    return _check_refused(
        outcomes, "each worker has a different part of one model, and laconic mixes them"
    )


RESTARTED = """
import os, sys, time
from pathlib import Path
import torch
import laconic as la

folder, attempt = Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt and os.environ["RANK"] == "1":
    time.sleep(3)  # start slowly, so that the other rank finds leftovers of the first attempt
la.init()
rank = torch.distributed.get_rank()
torch.manual_seed(rank)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sync = la.attach(model, optimizer, la.local_sgd(2), timeout=30)
checkpoint = folder / "checkpoint"
if checkpoint.exists():
    la.load(checkpoint, model, optimizer, sync)
start = sync.step
while sync.step < 6:
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if sync.step == 2:
        la.save(checkpoint, model, optimizer, sync)
    if sync.step == 4 and not attempt and rank == 1:
        os._exit(3)
sync.finish()
(folder / f"rank{rank}").write_text(f"from step {start} to {sync.step}")
"""


@trap("torchrun --max-restarts restarts all ranks after one has died", seconds=120)
def torchrun_restarts() -> str:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "train.py")
        program.write_text(RESTARTED)
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
        where = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
        torchrun = subprocess.Popen(
            [sys.executable, *launcher, *where, str(program), folder],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            torchrun.wait(80)
        except subprocess.TimeoutExpired:
            torchrun.terminate()  # this also ends its ranks
            torchrun.wait()
            raise Trapped("the second attempt hangs: its ranks do not find each other") from None
        ends = [Path(folder, f"rank{r}") for r in range(2)]
        if torchrun.returncode or not all(end.exists() for end in ends):
            raise Trapped(f"the second attempt fails, torchrun with {torchrun.returncode}")
        return f"the second attempt trains {ends[0].read_text()}"
