"""Is it right? Each part compares a GPU with the CPU."""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import laconic as la
from benchmarks.cuda import PARTS, FailedError, Numbers, part
from laconic.codecs import Cast, Codec, Int2, Int4, Int8
from laconic.links.staged import StagedLink
from laconic.links.torch_link import TorchLink

__all__ = ["PARTS"]

SHAPES = 500
CODECS: list[Codec] = [Cast("bfloat16"), Int8(), Int4(), Int2(), Int8(100), Int4(7), Int2(4096)]
RECIPES: dict[str, la.Recipe] = {
    "ddp()": la.ddp(),
    "ddp(codec='int4')": la.ddp(codec="int4"),
    "power_sgd(2)": la.power_sgd(2),
    "local_sgd(3)": la.local_sgd(3),
    "local_sgd(4, delay=2, codec='int8')": la.local_sgd(4, delay=2, codec="int8"),
    "slowmo(local_sgd(2), 6)": la.slowmo(la.local_sgd(2), 6, 0.5),
    "sgp(delay=1)": la.sgp(delay=1),
    "d_psgd()": la.d_psgd(),
    "easgd(3, pull=0.1)": la.easgd(3, pull=0.1),
    "lsgd(4)": la.lsgd(4),
    "diloco(5)": la.diloco(5, momentum=0.5),
    "diloco(5, delay=2)": la.diloco(5, momentum=0.5, delay=2),
    "streaming_diloco(6, codec='int4')": la.streaming_diloco(6, 3, 3, codec="int4"),
}
STEPS, RANKS = 14, 2
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Of the largest parameter's size: the two devices' matrix products round differently."""


@part("codecs: bit-identical on GPU and CPU")
def codecs(device: torch.device) -> Numbers:
    count = 0
    for number in range(SHAPES):
        generator = torch.Generator().manual_seed(number)
        length = int(torch.randint(5000, (), generator=generator))
        x, less, plus = torch.randn(3, length + 3, generator=generator) * 10.0 ** (number % 9 - 4)
        offset = number % 4
        x, less, plus = (t[offset : offset + length] for t in (x, less, plus))
        for codec in CODECS:
            found = [_coded(codec, *(t.to(d) for t in (x, less, plus))) for d in ("cpu", device)]
            for a, b in zip(*found, strict=True):
                if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                    raise FailedError(f"{codec}, {length} elements, shape number {number}")
            count += 1
    return {"shapes": count}


def _coded(codec: Codec, x: Tensor, less: Tensor, plus: Tensor) -> list[Tensor]:
    """All that a codec does, on the CPU."""
    left = x.clone()
    code = codec.encode(left, less=less, plus=plus, subtract=True)
    plain = codec.encode(x)
    added = codec.decode(code, len(x), less.clone(), add=True)
    found = [code, left, plain, codec.decode(plain, len(x)), added]
    if len(x) % codec.grain == 0:
        found.append(codec.decode_mean(torch.stack([code, plain, code]), torch.empty_like(x)))
    return [t.cpu() for t in found]


Task = Callable[[int, torch.device], Any]


def in_processes(task: Task, device: torch.device) -> list[Any]:
    """``task(rank, device)`` in two processes on one device, with a process group of gloo."""
    context = mp.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ours, processes = [], []
    for rank in range(RANKS):
        mine, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(task, rank, device, port, theirs))
        process.start()
        ours.append(mine)
        theirs.close()  # else the end of a process would not be seen
        processes.append(process)
    try:
        found = []
        for connection in ours:
            if not connection.poll(200):
                raise FailedError("a process is silent")
            try:
                found.append(torch.load(io.BytesIO(connection.recv_bytes())))
            except EOFError:
                raise FailedError("a process has ended") from None
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
    for value in found:
        if isinstance(value, str):
            raise FailedError(value)
    return found


def _serve(task: Task, rank: int, device: torch.device, port: int, connection: Connection) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("gloo", rank=rank, world_size=RANKS)
        found = task(rank, device)
        dist.destroy_process_group()
    except Exception as error:
        found = f"{type(error).__name__}: {error}".splitlines()[0]
    data = io.BytesIO()
    torch.save(found, data)  # torch's own way to send tensors needs this process to go on
    connection.send_bytes(data.getvalue())


def trained(
    recipe: la.Recipe, rank: int, device: torch.device, dtype: torch.dtype, **options: Any
) -> Tensor:
    """The parameters after each step, on the CPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = []
    stream = options.pop("stream", None)
    with la.attach(model, optimizer, recipe, link="tcp", **options) as sync, ExitStack() as stack:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))
            stack.enter_context(torch.cuda.stream(stream))
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(100 * step + rank)
            x = torch.randn(16, 8, generator=generator).to(device, dtype)
            optimizer.zero_grad()
            loss = (model(x) - x[:, :4].sin()).square().mean()
            loss.backward()
            sync.report_loss(loss)
            optimizer.step()
            rows.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        return torch.stack(rows).cpu()  # at the end: reading on the way would hide missing waits


def all_recipes(rank: int, device: torch.device) -> dict[str, Tensor]:
    """By recipe and dtype: `trained`."""
    return {
        f"{name}, {str(dtype).removeprefix('torch.')}": trained(recipe, rank, device, dtype)
        for name, recipe in RECIPES.items()
        for dtype in (torch.float64, torch.float32)
    }


@part("every recipe: two processes on one GPU by way of host memory, compared with two on CPUs")
def recipes(device: torch.device) -> Numbers:
    found, expected = (in_processes(all_recipes, d) for d in (device, torch.device("cpu")))
    worst: Numbers = {}
    for ours, theirs in zip(found, expected, strict=True):
        for name, trace in ours.items():
            difference = float((trace - theirs[name]).abs().max() / theirs[name].abs().max())
            kind = torch.float64 if name.endswith("float64") else torch.float32
            # codes and elections are discontinuous: what rounds differently may jump
            exact = "codec" not in name
            if not difference < (TOLERANCE[kind] if exact else 0.05):
                raise FailedError(f"{name}: the relative difference is {difference:.2g}")
            label = f"largest difference, {str(kind).removeprefix('torch.')}"
            worst[label] = max(worst.get(label, 0.0), difference) if exact else worst.get(label, 0)
    return {"recipes": len(RECIPES), **worst}


def offloaded(rank: int, device: torch.device) -> list[Tensor]:
    """`trained` with and without offload, and on a stream that is not the default one."""
    diloco = RECIPES["diloco(5, delay=2)"]
    other = torch.cuda.Stream(device) if device.type == "cuda" else None
    kinds: list[dict[str, Any]] = [{}, {"offload": device.type != "cpu"}, {"stream": other}]
    return [trained(diloco, rank, device, torch.float32, **kind) for kind in kinds]


@part("outer state in host memory, and another stream, change no bit")
def offload(device: torch.device) -> Numbers:
    for plain, *others in in_processes(offloaded, device):
        for what, other in zip(("offload=True", "another stream"), others, strict=True):
            if not torch.equal(plain, other):
                raise FailedError(f"{what} gives another result")
    return {}


def in_place(rank: int, device: torch.device) -> list[Tensor]:
    """Means and other collectives of large tensors, in quick succession, without waiting."""
    group = dist.new_group()
    link = TorchLink(group, device, dist.default_pg_timeout)
    assert device.type == "cpu" or isinstance(link, StagedLink)
    found = []
    for k in range(20):
        x = torch.randn(3_000_000 + k, generator=torch.Generator().manual_seed(31 * k + rank))
        x = x.to(device).mul_(k + 1)
        link.mean(x) if k % 3 else link.broadcast(x, k % 2)
        found.append(x.sum(dtype=torch.float64) if k % 2 else x[:1000])
    link.close()
    return [t.cpu() for t in found]


@part("collectives by way of host memory, in quick succession, give the bits of CPUs")
def collectives(device: torch.device) -> Numbers:
    found, expected = (in_processes(in_place, d) for d in (device, torch.device("cpu")))
    for ours, theirs in zip(found, expected, strict=True):
        for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if not (torch.allclose(a, b, rtol=1e-12) if k % 2 else torch.equal(a, b)):
                raise FailedError(f"collective {k}")
    return {"collectives": len(found[0])}
