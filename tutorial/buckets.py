"""Ways to average gradients over processes, from one message per tensor to torch's own DDP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tutorial.toy import SEED, FFNet

Parameters = list[nn.Parameter]


class Network:
    """Averages tensors over all processes in a thread of its own, one after the other.

    ``rate``: bits per second. 0: without sleeping.
    """

    def __init__(self, rate: float = 0) -> None:
        self.rate, self.messages = rate, 0
        self.thread = ThreadPoolExecutor(1)  # one, so that messages leave in order

    def mean(self, tensor: Tensor) -> Future[None]:
        """Begin to replace ``tensor`` by its mean over all processes."""
        self.messages += 1
        return self.thread.submit(self._mean, tensor)

    def _mean(self, tensor: Tensor) -> None:
        if self.rate:
            time.sleep(8 * tensor.nbytes / self.rate)
        dist.all_reduce(tensor.div_(dist.get_world_size()))


# --- after the backward pass ---------------------------------------------------------------------


def one_by_one(parameters: Iterable[nn.Parameter], network: Network) -> None:
    """Send a message for each tensor, and wait for each."""
    for parameter in parameters:
        network.mean(parameter.grad).result()


def flat(parameters: Iterable[nn.Parameter], network: Network) -> None:
    """Send one message for all."""
    parameters = list(parameters)
    together = pack(parameters)
    network.mean(together).result()
    unpack(together, parameters)


def pack(parameters: Parameters) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in parameters])


def unpack(together: Tensor, parameters: Parameters) -> None:
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, values in zip(parameters, together.split(sizes), strict=True):
        parameter.grad.copy_(values.view_as(parameter))


def cut(parameters: Iterable[nn.Parameter], most: int) -> list[Parameters]:
    """Buckets of at most ``most`` bytes, but at least one parameter, in the order given."""
    buckets: list[Parameters] = []
    room = 0
    for parameter in parameters:
        if not buckets or parameter.nbytes > room:
            buckets.append([])
            room = most
        buckets[-1].append(parameter)
        room -= parameter.nbytes
    return buckets


def in_buckets(parameters: Iterable[nn.Parameter], network: Network, most: int) -> None:
    """Send a message for each bucket; begin to send all before waiting for the first."""
    buckets = cut(parameters, most)
    packed = [pack(bucket) for bucket in buckets]
    sent = [network.mean(together) for together in packed]
    for bucket, together, message in zip(buckets, packed, sent, strict=True):
        message.result()
        unpack(together, bucket)


# --- while the backward pass computes ------------------------------------------------------------


class Overlapped:
    """Sends buckets as soon as their gradients are complete, while backward computes others.

    Buckets leave in the order of ``parameters`` on every rank, whichever is complete first.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], network: Network, most: int) -> None:
        self.network, self.buckets = network, cut(parameters, most)
        self.sent: list[tuple[Tensor, Future[None]]] = []
        for bucket in self.buckets:
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(self.arrived)
        self.there: set[nn.Parameter] = set()

    def arrived(self, parameter: nn.Parameter) -> None:
        """Autograd calls this when the gradient of ``parameter`` is complete."""
        self.there.add(parameter)
        while len(self.sent) < len(self.buckets) and self.there.issuperset(
            bucket := self.buckets[len(self.sent)]
        ):
            together = pack(bucket)
            self.sent.append((together, self.network.mean(together)))

    def finish(self) -> None:
        """Wait for the buckets that have not arrived. To be called after the backward pass."""
        for bucket, (together, message) in zip(self.buckets, self.sent, strict=True):
            message.result()
            unpack(together, bucket)
        self.sent.clear()
        self.there.clear()


def torch_ddp(model: nn.Module, network: Network, most: int) -> DistributedDataParallel:
    """torch's own DDP, which sends over ``network``."""

    def send(state, bucket):  # without annotations: torch rejects those that are strings
        answer, together = torch.futures.Future(), bucket.buffer()
        network.mean(together).add_done_callback(lambda _: answer.set_result(together))
        return answer

    wrapped = DistributedDataParallel(model, bucket_cap_mb=most / 2**20)
    wrapped.register_comm_hook(None, send)
    return wrapped


# --- measured ------------------------------------------------------------------------------------


def compare(
    rank: int, world_size: int, *, steps: int, rate: float, most: int, batch: int
) -> dict[str, dict]:
    """For each way: median seconds of forward, backward and averaging; messages; gradients."""
    network, ways = Network(rate), {}
    for name in ("alone", "one by one", "flat", "buckets", "overlapped", "torch's DDP"):
        torch.manual_seed(SEED)
        model = deep_network()
        ways[name] = one_step(name, model, network, most), model, []
    generator = torch.Generator().manual_seed(rank)  # batches of each rank's own
    x, y = torch.randn(batch, 100, generator=generator), torch.randn(batch, 1, generator=generator)
    messages = {}
    for _ in range(steps + 2):  # two to warm up: torch's DDP rearranges its buckets after the first
        for name, (step, model, seconds) in ways.items():  # in turn: a disturbance affects all
            model.zero_grad()
            dist.barrier()
            before, begin = network.messages, time.perf_counter()
            step(x, y)
            seconds.append(time.perf_counter() - begin)
            messages[name] = network.messages - before
    return {
        name: {
            "seconds": median(seconds[2:]),
            "messages": messages[name],
            "gradient": pack(list(model.parameters())).tolist(),
        }
        for name, (_, model, seconds) in ways.items()
    }


def deep_network() -> FFNet:
    """Twenty layers and more, 40 and more tensors."""
    return FFNet(input_size=100, num_hl=20, hl_size=128)


def one_step(
    name: str, model: nn.Module, network: Network, most: int
) -> Callable[[Tensor, Tensor], None]:
    """A function that computes averaged gradients in the way called ``name``."""
    forward: nn.Module = model
    backwards = list(model.parameters())[::-1]
    after: Callable[[], None] = lambda: None  # noqa: E731
    if name == "one by one":
        after = lambda: one_by_one(backwards, network)  # noqa: E731
    elif name == "flat":
        after = lambda: flat(backwards, network)  # noqa: E731
    elif name == "buckets":
        after = lambda: in_buckets(backwards, network, most)  # noqa: E731
    elif name == "overlapped":
        after = Overlapped(backwards, network, most).finish
    elif name == "torch's DDP":
        forward = torch_ddp(model, network, most)

    def step(x: Tensor, y: Tensor) -> None:
        nn.functional.mse_loss(forward(x), y).backward()
        after()

    return step


def sweep(
    rank: int, world_size: int, *, sizes: list[int], steps: int, rate: float, batch: int
) -> list[float]:
    """Median seconds of an overlapped step, for buckets of at most so many bytes."""
    results = [[] for _ in sizes]
    network = Network(rate)
    ways = [one_step("overlapped", deep_network(), network, most) for most in sizes]
    x, y = torch.randn(batch, 100), torch.randn(batch, 1)
    for _ in range(steps + 1):
        for step, seconds in zip(ways, results, strict=True):
            dist.barrier()
            begin = time.perf_counter()
            step(x, y)
            seconds.append(time.perf_counter() - begin)
    return [median(seconds[1:]) for seconds in results]


def sent_during_backward(rank: int, world_size: int, *, most: int, reverse: bool) -> list[int]:
    """The number of buckets, and how many had left when half of the gradients were complete."""
    model, network = deep_network(), Network()
    parameters = list(model.parameters())
    overlapped = Overlapped(parameters[::-1] if reverse else parameters, network, most)
    left = 0

    def look(_: nn.Parameter) -> None:
        nonlocal left
        left = len(overlapped.sent)

    parameters[len(parameters) // 2].register_post_accumulate_grad_hook(look)
    model(torch.randn(8, 100)).sum().backward()
    overlapped.finish()
    return [len(overlapped.buckets), left]


def other_order(rank: int, world_size: int) -> list[float]:
    """Two tensors, a of ones and b of hundreds, summed over ranks that disagree about the order."""
    a, b = torch.ones(1), 100 * torch.ones(1)
    for tensor in (a, b) if rank == 0 else (b, a):
        dist.all_reduce(tensor)
    return [float(a), float(b)]
