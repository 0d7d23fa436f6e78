"""Data-parallel training by hand: processes, a share of the data each, gradients averaged.

python -m tutorial.naive_ddp -s 2 -i 100 -n 1024 -d 0 -z 100 -e 10 -v 1
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from tutorial.toy import SEED, FFNet, ToyDataset, sgd

Sample = tuple[Tensor, Tensor]
STARTS = ("broadcast", "seed", "different")
TIMEOUT = timedelta(seconds=60)  # a rank that is waited for longer than this is an error
LEAVING = 5.0  # seconds for a process to end after it has answered, or another has failed

# --- processes -----------------------------------------------------------------------------------


def check_backend(backend: str) -> None:
    """Raise `ValueError`, naming the choices, if this machine lacks ``backend``."""
    if not dist.is_available():
        raise ValueError("this build of PyTorch has no torch.distributed: install another")
    choices = {
        "gloo": dist.is_gloo_available(),  # CPUs
        "nccl": dist.is_nccl_available() and torch.cuda.is_available(),  # Nvidia's GPUs
        "mpi": dist.is_mpi_available(),  # only where PyTorch was built with MPI
    }
    if not choices.get(backend):
        at_hand = ", ".join(name for name, there in choices.items() if there)
        raise ValueError(f"no back end {backend!r} here: choose from {at_hand}")


def init_process(
    rank: int,
    world_size: int,
    train_fn: Callable[..., Any],
    train_fn_kwargs: dict[str, Any],
    backend: str = "gloo",
    address: str = "tcp://127.0.0.1:29500",
) -> Any:
    """Join the process group as ``rank``, run ``train_fn(rank, world_size, ...)``, and leave."""
    check_backend(backend)
    if sys.platform == "linux" and "127.0.0.1" in address:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    torch.set_num_threads(1)  # ranks share the cores: one for each
    dist.init_process_group(
        backend, init_method=address, rank=rank, world_size=world_size, timeout=TIMEOUT
    )
    try:
        dist.barrier()  # no rank may finish and leave while another still connects
        return train_fn(rank, world_size, **train_fn_kwargs)
    finally:
        dist.destroy_process_group()


def _child(answer: Any, *arguments: Any) -> None:
    answer.send(init_process(*arguments))


def spawn_and_join(
    world_size: int, train_fn: Callable[..., Any], backend: str = "gloo", **train_fn_kwargs: Any
) -> list[Any]:
    """Run ``train_fn`` in ``world_size`` processes. Returns what each returned, by rank.

    ``train_fn``, its arguments and its result are pickled, so it must be a function of a module and
    not of a notebook. If a process fails, the others would wait for it. They are therefore ended,
    and a `RuntimeError` names those that failed, the first one first.
    """
    check_backend(backend)
    # Each process is a copy of one that has already imported torch, which takes seconds, and what
    # torch's optimizers import when the first one is made.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "tutorial.toy"])
    address = f"tcp://127.0.0.1:{free_port()}"
    processes, answers = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (theirs, rank, world_size, train_fn, train_fn_kwargs, backend, address)
        process = context.Process(target=_child, args=arguments)
        process.start()
        theirs.close()  # now only the child has it: if the child ends, so does the pipe
        processes.append(process)
        answers.append(ours)
    returned: dict[int, Any] = {}
    try:
        first = _collect(answers, returned)
        for process in processes:
            process.join(LEAVING)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    if first is not None:
        later = [rank for rank in range(world_size) if rank not in returned and rank != first]
        codes = [f"rank {rank}: exit code {processes[rank].exitcode}" for rank in (first, *later)]
        after = f"; then {', '.join(codes[1:])} (-9: ended from here)" if later else ""
        raise RuntimeError(f"a process failed: {codes[0]}{after}")
    return [returned[rank] for rank in range(world_size)]


def _collect(answers: list[Any], returned: dict[int, Any]) -> int | None:
    """Put results into ``returned`` as they arrive, by rank.

    Stops at the first process that ends without a result, and returns its rank. None: all have one.
    """
    waiting = list(answers)
    while waiting:
        for ready in wait(waiting):
            rank = answers.index(ready)
            waiting.remove(ready)
            try:
                returned[rank] = ready.recv()
            except EOFError:
                return rank
    return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- data ----------------------------------------------------------------------------------------


class DatasetPartition(Dataset[Sample]):
    """The samples of ``data`` whose numbers are in ``indices``."""

    def __init__(self, data: Dataset[Sample], indices: Tensor) -> None:
        self.data, self.indices = data, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        return self.data[int(self.indices[index])]


class DataPartitioner:
    """Shuffles ``data``, then gives one sample to each rank in turn.

    Parts differ by at most one sample. All ranks use the same seed, so they agree on the order.
    """

    def __init__(self, data: Dataset[Sample], world_size: int, seed: int = 7) -> None:
        self.data, self.world_size, self.seed = data, world_size, seed

    def use(self, i: int, epoch: int = 0) -> DatasetPartition:
        """Rank ``i``'s part in ``epoch``."""
        if not 0 <= i < self.world_size:
            raise ValueError(f"rank {i} is not one of {self.world_size} ranks counted from 0")
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
        order = torch.randperm(len(self.data), generator=generator)
        return DatasetPartition(self.data, order[i :: self.world_size])


def partition_dataset(
    data: Dataset[Sample],
    world_size: int,
    rank: int,
    batch_size: int,
    epoch: int = 0,
    seed: int = 7,
) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield the rank's part of each global batch: inputs, targets, and its share of the samples.

    ``batch_size`` is that of all ranks together. All get the same number of batches. In the last
    one a rank may have one sample less, or none.
    """
    if batch_size % world_size:
        raise ValueError(f"a batch of {batch_size} can't be cut into {world_size} equal parts")
    part = DataPartitioner(data, world_size, seed).use(rank, epoch)
    own = batch_size // world_size
    samples = len(data)
    for batch, start in enumerate(range(0, samples, batch_size)):
        numbers = range(batch * own, min((batch + 1) * own, len(part)))
        together = min(batch_size, samples - start)
        nothing = torch.empty(0), torch.empty(0)
        x, y = default_collate([part[number] for number in numbers]) if numbers else nothing
        yield x, y, len(numbers) / together


# --- training ------------------------------------------------------------------------------------


def reduce_gradients(model: nn.Module, share: float) -> None:
    """Replace every gradient by the mean over the global batch: sum over ranks of share * gradient.

    ``share`` is this rank's part of the batch. A parameter without a gradient counts as zeros: if a
    rank left it out, the others would wait.
    """
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.mul_(share)
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)


def broadcast_parameters(model: nn.Module) -> None:
    """Give every rank the parameters of rank 0."""
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)


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
    start: str = "broadcast",
    dtype: torch.dtype = torch.float32,
    weighted: bool = True,
    verbose: bool = False,
) -> dict[str, Any]:
    """Train an `FFNet` on this rank's share. Returns its parameters, losses and seconds.

    ``start``: "broadcast": from rank 0's parameters; "seed": every rank makes its own from the same
    seed; "different": each rank uses another seed, which is a mistake. ``weighted``: weight a
    gradient by its rank's samples. Without weights all count the same, which is also a mistake.
    """
    torch.manual_seed(SEED if start == "seed" else SEED + rank)
    model = FFNet(input_size, num_hl, hl_size).to(dtype)
    if start == "broadcast":
        broadcast_parameters(model)
    data = ToyDataset(input_size, num_samples)
    optimizer = sgd(model)
    losses, waiting, begin = [], 0.0, time.perf_counter()
    for epoch in range(epochs):
        total = torch.zeros((), dtype=torch.float64)
        for x, y, share in partition_dataset(data, world_size, rank, batch_size, epoch):
            optimizer.zero_grad()
            if share:
                loss = nn.functional.mse_loss(model(x.to(dtype)), y.to(dtype))
                loss.backward()
                total += loss.item() * len(x)
            before = time.perf_counter()
            reduce_gradients(model, share if weighted else 1 / world_size)
            waiting += time.perf_counter() - before
            optimizer.step()
        dist.all_reduce(total)
        losses.append(float(total) / num_samples)
        if verbose and rank == 0:
            print(f"epoch {epoch + 1:2d}: loss {losses[-1]:.4f}", flush=True)
    return {
        "parameters": nn.utils.parameters_to_vector(model.parameters()).detach().tolist(),
        "losses": losses,
        "seconds": time.perf_counter() - begin,
        "waiting": waiting,
    }


def train_alone(**options: Any) -> dict[str, Any]:
    """The same training in plain PyTorch, without processes or messages, for comparison."""
    given = {"input_size": 100, "num_samples": 1024, "num_hl": 0, "hl_size": 100, "epochs": 10}
    given |= {"batch_size": 24, "dtype": torch.float32} | options
    torch.manual_seed(SEED)
    model = FFNet(given["input_size"], given["num_hl"], given["hl_size"]).to(given["dtype"])
    data = ToyDataset(given["input_size"], given["num_samples"])
    optimizer = sgd(model)
    losses, begin = [], time.perf_counter()
    for epoch in range(given["epochs"]):
        total = 0.0
        for x, y in DataLoader(DataPartitioner(data, 1).use(0, epoch), given["batch_size"]):
            loss = nn.functional.mse_loss(model(x.to(given["dtype"])), y.to(given["dtype"]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        losses.append(total / len(data))
    return {
        "parameters": nn.utils.parameters_to_vector(model.parameters()).detach().tolist(),
        "losses": losses,
        "seconds": time.perf_counter() - begin,
    }


# --- to try out --------------------------------------------------------------------------------


def who(rank: int, world_size: int) -> int:
    """This process's number."""
    return os.getpid()


def die(rank: int, world_size: int, victim: int) -> None:
    """The process ``victim`` ends without a result; the others wait for it."""
    if rank == victim:
        os._exit(3)
    dist.barrier()


def time_all_reduce(rank: int, world_size: int, numbers: list[int], repeats: int) -> list[float]:
    """Seconds of the fastest of several all-reduces, for each of these sizes in ``numbers``."""
    fastest = []
    for number in numbers:
        tensor, seconds = torch.zeros(number), []
        for _ in range(repeats):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            seconds.append(time.perf_counter() - begin)
        fastest.append(min(seconds))
    return fastest


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tutorial.naive_ddp", description=__doc__)
    add = parser.add_argument
    add("-s", "--world-size", type=int, default=2, help="processes")
    add("-i", "--input-size", type=int, default=100, help="numbers in a sample")
    add("-n", "--num-samples", type=int, default=1024)
    add("-d", "--num-hl", type=int, default=0, help="hidden layers after the first")
    add("-z", "--hl-size", type=int, default=100, help="width of a hidden layer")
    add("-e", "--epochs", type=int, default=10)
    add("-b", "--batch-size", type=int, default=24, help="of all processes together")
    add("-v", "--verbose", type=int, default=1, choices=(0, 1))
    given = vars(parser.parse_args())
    for name, value in given.items():
        if value < (0 if name in ("num_hl", "verbose") else 1):
            parser.error(f"{name} must be positive, not {value}")
    world_size = given.pop("world_size")
    if given["batch_size"] % world_size:
        parser.error(f"{world_size} processes can't share batches of {given['batch_size']} equally")
    try:
        result = spawn_and_join(world_size, train, **given)[0]
    except (ValueError, RuntimeError) as error:
        sys.exit(f"{parser.prog}: {error}")
    print(
        f"{world_size} processes, {result['seconds']:.2f} s, of these "
        f"{result['waiting']:.2f} s in reduce_gradients; loss {result['losses'][-1]:.4f}"
    )


if __name__ == "__main__":
    main()
