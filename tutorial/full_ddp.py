"""Data-parallel training with torch's DistributedDataParallel: a whole program.

python -m tutorial.full_ddp -g 2 -e 10                      one machine, two processes
torchrun --nproc-per-node 2 -m tutorial.full_ddp -e 10      the same, started by torchrun

Two machines with four processes each, the first of them 10.0.0.1; on the second -nr 1:

MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python -m tutorial.full_ddp -n 2 -g 4 -nr 0

On a cluster with Slurm: sbatch tutorial/full_ddp.slurm
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tutorial.naive_ddp import Sample, free_port, init_process
from tutorial.toy import SEED, FFNet, ToyDataset, sgd

T = TypeVar("T")
PROG = "python -m tutorial.full_ddp"
UNDER_TORCHRUN = "LOCAL_RANK"  # of the variables that torchrun sets, the one nobody else does
ENDED = ProcessRaisedException, ProcessExitedException
PRECISIONS = ("float32", "float64", "mixed")
ORDER = 7 * 1_000_003  # the seed that makes DistributedSampler shuffle as chapter 3 does

# --- data ----------------------------------------------------------------------------------------


def share_of(
    data: Dataset[Sample], batch_size: int, rank: int, world_size: int
) -> tuple[DataLoader[Sample], DistributedSampler[Sample]]:
    """Batches of this rank's share of ``data``, and the sampler, which needs `set_epoch`.

    ``batch_size`` is that of all ranks together.
    """
    if batch_size % world_size:
        raise ValueError(f"{world_size} processes can't share batches of {batch_size} equally")
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, seed=ORDER)
    return DataLoader(data, batch_size // world_size, sampler=sampler), sampler


# --- training ------------------------------------------------------------------------------------


def train_epoch(
    wrapped: DistributedDataParallel,
    loader: DataLoader[Sample],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    precision: str,
) -> float:
    """Train once on this rank's share. Returns the mean loss per sample of all ranks."""
    first = next(wrapped.parameters())
    kind = first.device.type
    half = torch.float16 if kind == "cuda" else torch.bfloat16
    sums = torch.zeros(2, dtype=torch.float64, device=first.device)
    for x, y in loader:
        x, y = x.to(first), y.to(first)  # its device and its dtype
        optimizer.zero_grad()
        with torch.autocast(kind, dtype=half, enabled=precision == "mixed"):
            loss = nn.functional.mse_loss(wrapped(x).to(y.dtype), y)
        scaler.scale(loss).backward()  # meanwhile gradients are averaged over the ranks
        scaler.step(optimizer)
        scaler.update()
        sums[0] += loss.detach() * len(x)
        sums[1] += len(x)
    dist.all_reduce(sums)  # once an epoch, and by every rank
    return float(sums[0] / sums[1])


def train(
    rank: int,
    world_size: int,
    *,
    input_size: int = 100,
    num_samples: int = 1024,
    num_hl: int = 0,
    hl_size: int = 100,
    epochs: int = 10,
    batch_size: int = 24,
    precision: str = "float32",
    device: str = "cpu",
    checkpoint: str | None = None,
    verbose: bool = False,
) -> dict[str, Any]:
    """Train an `FFNet` as ``rank``. Returns its parameters and losses.

    ``precision``: "float32", "float64", or "mixed". ``checkpoint``: a file that rank 0 writes after
    every epoch; if it exists, training continues from it.
    """
    settings = {
        "input_size": input_size,
        "num_samples": num_samples,
        "num_hl": num_hl,
        "hl_size": hl_size,
        "batch_size": batch_size,
        "precision": precision,
    }
    torch.manual_seed(SEED + rank)  # the ranks' parameters differ until DDP sends rank 0's to all
    dtype = torch.float64 if precision == "float64" else torch.float32
    model = FFNet(input_size, num_hl, hl_size).to(device, dtype)
    wrapped = DistributedDataParallel(model)
    optimizer = sgd(model)
    kind = torch.device(device).type
    scaler = torch.amp.GradScaler(kind, enabled=precision == "mixed" and kind == "cuda")
    loader, sampler = share_of(ToyDataset(input_size, num_samples), batch_size, rank, world_size)

    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    losses = load(Path(checkpoint), parts, settings) if checkpoint else []
    begin = time.perf_counter()
    for epoch in range(len(losses), epochs):
        sampler.set_epoch(epoch)
        losses.append(train_epoch(wrapped, loader, optimizer, scaler, precision))
        if checkpoint:
            save(Path(checkpoint), parts, settings, losses)
        if verbose and rank == 0:
            print(f"epoch {epoch + 1:2d}: loss {losses[-1]:.6f}", flush=True)
    return {
        "parameters": nn.utils.parameters_to_vector(model.parameters()).tolist(),
        "losses": losses,
        "seconds": time.perf_counter() - begin,
    }


# --- checkpoints ---------------------------------------------------------------------------------


def on_first_rank(work: Callable[[], T]) -> T:
    """Call ``work`` on rank 0, and return its result, or raise its error, on every rank."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = work()
        except Exception as error:
            answer[1] = f"{error}"
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise RuntimeError(answer[1])
    return answer[0]


def save(path: Path, parts: dict[str, Any], settings: dict[str, Any], losses: list[float]) -> None:
    """Write everything that training needs to continue. ``path`` is always the whole old file or
    the whole new one. No rank continues before the new one is in place."""

    def write() -> None:
        states = {name: part.state_dict() for name, part in parts.items()}
        beside = path.with_name(path.name + ".partial")
        with beside.open("wb") as file:
            torch.save({"settings": settings, "losses": losses, **states}, file)
            file.flush()
            os.fsync(file.fileno())  # the content is on the disk before the name
        beside.replace(path)

    on_first_rank(write)


def load(path: Path, parts: dict[str, Any], settings: dict[str, Any]) -> list[float]:
    """Load what `save` wrote, on every rank. Returns the losses of the completed epochs, an empty
    list without a file. Rank 0 reads for all, so machines need not share a disk."""

    def read() -> dict[str, Any] | None:
        if not path.exists():
            return None
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
            return {name: found[name] for name in ("settings", "losses", *parts)}
        except Exception as error:
            raise ValueError(f"{path} is no checkpoint of this program, or damaged") from error

    saved = on_first_rank(read)
    if saved is None:
        return []
    for name, value in settings.items():
        if saved["settings"][name] != value:
            was = saved["settings"][name]
            raise ValueError(f"{path} is of a run with {name} {was}, not {value}")
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved["losses"]


# --- processes -----------------------------------------------------------------------------------


def work(
    local_rank: int, before: int, world_size: int, address: str, options: dict[str, Any]
) -> None:
    """Run one process. Its rank is ``local_rank`` plus ``before``, the processes of other nodes."""
    rank, device = before + local_rank, options["device"]
    if device == "cuda":
        torch.cuda.set_device(local_rank)  # NCCL, too, uses the current one
        device = f"cuda:{local_rank}"
    backend = "nccl" if options["device"] == "cuda" else "gloo"
    result = init_process(rank, world_size, train, {**options, "device": device}, backend, address)
    if rank == 0:
        how = f"{world_size} process{'es' if world_size > 1 else ''}, {backend}"
        seconds, loss = result["seconds"], result["losses"][-1]
        print(f"{how}: {seconds:.2f} s; loss {loss:.6f}", flush=True)


def launch(nodes: int, per_node: int, node_rank: int, options: dict[str, Any]) -> None:
    """Start this node's processes and wait for them. If one fails, the others are ended."""
    here = "127.0.0.1", str(free_port())  # only this node needs to know the port
    address = here if nodes == 1 else (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    arguments = node_rank * per_node, nodes * per_node, "tcp://" + ":".join(address), options
    if per_node == 1:
        return work(0, *arguments)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # our line suffices
    spawn(work, arguments, per_node)  # if this process is killed, they end, too


def under_torchrun(options: dict[str, Any]) -> None:
    """Run the process whose rank torchrun has set in the environment."""
    rank, local_rank, world_size = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    )
    work(local_rank, rank - local_rank, world_size, "env://", options)


# --- the command line ----------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROG, description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("-n", "--nodes", type=int, help="machines (1); torchrun sets it")
    add("-g", "--gpus", type=int, help="processes on each, one per GPU (1); torchrun sets it")
    add("-nr", "--node-rank", type=int, help="which machine this is (0); torchrun sets it")
    add("-s", "--batch-size", type=int, default=24, help="of all processes together")
    add("-i", "--input-size", type=int, default=100, help="numbers in a sample")
    add("-nb", "--num-samples", type=int, default=1024, help="in an epoch")
    add("-d", "--num-hl", type=int, default=0, help="hidden layers after the first")
    add("-z", "--hl-size", type=int, default=100, help="width of a hidden layer")
    add("-e", "--epochs", type=int, default=10, help="total, including those of a checkpoint")
    add("-p", "--precision", choices=PRECISIONS, default="float32")
    add(
        "-c",
        "--checkpoint",
        metavar="FILE",
        help="written after each epoch; if it exists, training continues",
    )
    add("--device", choices=("cpu", "cuda"), help="by default cuda if there is a GPU")
    add("-v", "--verbose", type=int, default=1, choices=(0, 1), help="1: each epoch's loss")
    return parser


def parse(arguments: Sequence[str] | None) -> dict[str, Any]:
    """The checked options. Exits with a one-line error if they are not possible."""
    by = parser()
    given = vars(by.parse_args(arguments))
    given["device"] = given["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        check(given)
    except ValueError as error:
        by.error(str(error))
    return given


def check(given: dict[str, Any]) -> None:
    """Fill in the number of nodes and processes. Raises `ValueError` for what is not possible."""
    for name, value in given.items():
        least = 0 if name in ("num_hl", "node_rank", "verbose") else 1
        if isinstance(value, int) and value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
    nodes, per_node, node_rank = (given[name] for name in ("nodes", "gpus", "node_rank"))
    if UNDER_TORCHRUN in os.environ:
        if (nodes, per_node, node_rank) != (None, None, None):
            raise ValueError("leave -n, -g and -nr to torchrun, by which this was started")
        per_node, world_size = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    else:
        nodes, per_node, node_rank = nodes or 1, per_node or 1, node_rank or 0
        given.update(nodes=nodes, gpus=per_node, node_rank=node_rank)
        world_size = nodes * per_node
        if node_rank >= nodes:
            raise ValueError(f"nodes are counted from 0: {node_rank} is none of {nodes}")
        if nodes > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise ValueError("set MASTER_ADDR and MASTER_PORT to where the nodes meet")
    if given["device"] == "cuda" and per_node > torch.cuda.device_count():
        there = torch.cuda.device_count()
        raise ValueError(f"{per_node} processes, {there} GPUs: start fewer, or say --device cpu")
    if given["batch_size"] % world_size:
        batch = given["batch_size"]
        raise ValueError(f"{world_size} processes can't share batches of {batch} equally")
    if given["checkpoint"] and not Path(given["checkpoint"]).absolute().parent.is_dir():
        raise ValueError(f"there is no directory for the checkpoint {given['checkpoint']}")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    cluster = options.pop("nodes"), options.pop("gpus"), options.pop("node_rank")
    try:
        if UNDER_TORCHRUN in os.environ:
            under_torchrun(options)
        else:
            launch(*cluster, options)
    except (ValueError, RuntimeError, OSError, *ENDED) as error:
        line = str(error).strip().splitlines()[-1]  # above it there may be a process's traceback
        sys.exit(f"{PROG}: {re.sub(r'^[A-Za-z.]+Error: ', '', line)}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
