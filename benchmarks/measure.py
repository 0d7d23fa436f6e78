"""Run one benchmark in one process. ``python -m benchmarks`` starts this module."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.round import GradientRound
from laconic.buckets import BUCKET_BYTES
from laconic.cli import main as cli
from laconic.cli.keys import CA, CERTIFICATE, KEY
from laconic.engine import gradient_channels
from laconic.lab.emulation.cluster import Cluster
from laconic.lab.race import workloads
from laconic.lab.race.worker import interface_bytes
from laconic.links import tls
from laconic.links.elastic.coordinator import Coordinator
from laconic.links.tcp import TcpLink

PAIRS = 40
PARAMETERS = 865_280
OUTER_PERIOD = 8
SHARE_STEPS = 16
"""Timed steps in each turn of `share`, a multiple of the period."""
SHARE_AROUND = 4
"""Steps before and after them, at least the delay."""
ELASTIC_STEPS, ELASTIC_PAIRS = 8, 14


@dataclass(frozen=True)
class Figure:
    """A ratio: its median over ``pairs``, its quartiles if there are pairs, and its bound."""

    detail: str
    median: float
    low: float | None
    high: float | None
    pairs: int
    bound: float


def emit(figure: Figure) -> None:
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(asdict(figure)), flush=True)


def ratio(detail: str, ones: list[float], others: list[float], bound: float) -> Figure:
    """Return the figure of ``ones`` over ``others``, pair by pair."""
    ratios = [one / other for one, other in zip(ones, others, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return Figure(detail, median, low, high, len(ratios), bound)


def slowest(seconds: float) -> float:
    """Return the time of the slowest rank."""
    mine = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return float(mine)


def timed(job: Callable[[], object]) -> float:
    """Return the seconds of ``job``, from a common start until the last rank has finished."""
    dist.barrier()
    start = time.perf_counter()
    job()
    return slowest(time.perf_counter() - start)


def processor_time(job: Callable[[], object]) -> float:
    """Return the processor seconds of ``job`` in all threads, as the mean over the ranks."""
    dist.barrier()
    start = time.process_time()
    job()
    return mean(time.process_time() - start)


def mean(mine: float) -> float:
    """Return the mean over the ranks."""
    figure = torch.tensor([mine], dtype=torch.float64)
    dist.all_reduce(figure)
    return float(figure) / dist.get_world_size()


def pairs(
    one: Callable[[], object],
    other: Callable[[], object],
    count: int = PAIRS,
    timed: Callable[[Callable[[], object]], float] = timed,
) -> tuple[list[float], list[float]]:
    """Time both jobs alternately after a warmup. Each runs first in half of the pairs."""
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(count + 4):
        order = (0, 1) if index % 2 else (1, 0)
        for which in order:
            seconds = timed((one, other)[which])
            if index >= 4:
                times[which].append(seconds)
    return times


class Training:
    """The text model and its optimizer."""

    def __init__(self, wrap: bool = False) -> None:
        rank = int(os.environ["RANK"])
        self.workload = workloads.load("text")
        torch.manual_seed(0)
        self.model = self.workload.model()
        self.optimizer = self.workload.optimizer(self.model)
        self.forward: nn.Module = DistributedDataParallel(self.model) if wrap else self.model
        self.batches = self.workload.batches(rank, dist.get_world_size(), 0)

    def step(self) -> None:
        loss = self.workload.loss(self.forward, next(self.batches))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def step(every: str = "") -> None:
    """Measure a step. ``every`` is the interval of metrics records in seconds; "" writes none."""
    bare, attached = Training(), Training()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "run.jsonl")
        metrics = laconic.JsonLines(path, float(every)) if every else None
        recipe = laconic.local_sgd(10**9)
        sync = laconic.attach(attached.model, attached.optimizer, recipe, metrics=metrics)
        emit(ratio("", *pairs(attached.step, bare.step), bound=1.02))
        sync.detach()


def round() -> None:
    training, bare = Training(), Training()
    # Without gradients, a step changes nothing. The optimizer's remaining overhead is on both
    # sides.
    laconic.attach(training.model, training.optimizer, laconic.local_sgd(1))
    flat = torch.randn(PARAMETERS)

    def all_reduce() -> None:
        bare.optimizer.step()
        dist.all_reduce(flat)

    ours, theirs = pairs(training.optimizer.step, all_reduce, count=6 * PAIRS)
    milliseconds = statistics.median(theirs) * 1e3
    detail = f"n = {dist.get_world_size()}, {milliseconds:.1f} ms bare"
    emit(ratio(detail, ours, theirs, bound=1.10))


def ddp() -> None:
    theirs, ours = Training(wrap=True), Training()
    laconic.attach(ours.model, ours.optimizer, laconic.ddp())
    emit(ratio("", *pairs(ours.step, theirs.step), bound=1.05))


def outer() -> None:
    """Measure `OUTER_PERIOD` steps with an outer step against as many without."""
    theirs, ours = Training(), Training()
    laconic.attach(theirs.model, theirs.optimizer, laconic.ddp())
    recipe = laconic.outer_step(laconic.ddp(), OUTER_PERIOD, outer="muon")
    laconic.attach(ours.model, ours.optimizer, recipe)

    def period(training: Training) -> None:
        for _ in range(OUTER_PERIOD):
            training.step()

    emit(ratio("", *pairs(partial(period, ours), partial(period, theirs)), bound=1.02))


def processor() -> None:
    """Measure processor time, which limits a step if ranks share processors."""
    for codec in (None, "bfloat16", "int8", "int4"):
        theirs, ours = Training(wrap=True), Training()
        sync = laconic.attach(ours.model, ours.optimizer, laconic.ddp(codec=codec))
        times = pairs(ours.step, theirs.step, timed=processor_time)
        sync.detach()
        emit(ratio(repr(codec), *times, bound=1.05))


def share(text: str, count: str = "16") -> None:
    """Measure a step under the recipe relative to one without communication, and processor times.

    The two alternate in turns, and each turn with communication is compared with the mean of the
    bare turns before and after it, since the machine's speed varies. (So neighboring ratios share a
    turn.) Without communication, each rank continues for the same time and the rates are averaged.
    Otherwise a rank that finished its steps early would leave its share of a processor to the
    others. Around the timed steps of every turn are others that are not timed, so that messages on
    their way at the end of a turn count neither less nor for the other one.
    """
    bare, attached = Training(), Training()
    recipe = parse_recipe(text)
    assert isinstance(recipe, tuple), "auto is not supported here"
    for r in recipe:
        due = [r.when(step) for step in range(1, 2 * SHARE_STEPS + 1)]
        if due[:SHARE_STEPS] != due[SHARE_STEPS:] or getattr(r, "delay", 0) > SHARE_AROUND:
            raise SystemExit(
                f"{text}: the period must divide {SHARE_STEPS}, and the delay be at most "
                f"{SHARE_AROUND}: see SHARE_STEPS and SHARE_AROUND"
            )
    laconic.attach(attached.model, attached.optimizer, recipe)

    def steps(training: Training, count: int) -> None:
        for _ in range(count):
            training.step()

    def with_rounds() -> tuple[float, float]:
        dist.barrier()
        steps(attached, SHARE_AROUND)
        start, cpu = time.perf_counter(), time.process_time()
        steps(attached, SHARE_STEPS)
        span, used = time.perf_counter() - start, time.process_time() - cpu
        steps(attached, SHARE_AROUND)
        return mean(span) / SHARE_STEPS, mean(used) / SHARE_STEPS

    def alone(seconds: float) -> tuple[float, float]:
        dist.barrier()
        steps(bare, SHARE_AROUND)
        start, cpu, done = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - start < seconds:
            bare.step()
            done += 1
        span, used = time.perf_counter() - start, time.process_time() - cpu
        steps(bare, SHARE_AROUND)
        return 1 / mean(done / span), mean(used) / mean(done)

    bare.step()
    before = alone(SHARE_STEPS * with_rounds()[0])
    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    for _ in range(int(count)):
        ours.append(with_rounds())
        after = alone(SHARE_STEPS * ours[-1][0])
        theirs.append(((before[0] + after[0]) / 2, (before[1] + after[1]) / 2))
        before = after
    gradients = any(isinstance(r, GradientRound) for r in recipe)
    bound = 1 / (0.85 if gradients else 0.97)
    for which, detail in enumerate((text, f"{text}, processor time")):
        times = [each[which] for each in ours], [each[which] for each in theirs]
        emit(ratio(detail, *times, bound=bound))


def elastic(text: str) -> None:
    """Measure a step of an elastic run without faults relative to a static one, and its bytes. Each
    job is `ELASTIC_STEPS` steps."""
    recipe = parse_recipe(text)
    assert isinstance(recipe, tuple), "auto is not supported here"
    host, port, rank = os.environ["MASTER_ADDR"], 29411, int(os.environ["RANK"])
    if rank == 0:
        Coordinator(host, port)  # until this process ends
    dist.barrier()
    static, other = Training(), Training()
    laconic.attach(static.model, static.optimizer, recipe)
    coordinator = laconic.Elastic(f"{host}:{port}", workers=dist.get_world_size())
    sync = laconic.attach(other.model, other.optimizer, recipe, elastic=coordinator)
    sent = {"static": 0.0, "elastic": 0.0}

    def job(training: Training, name: str) -> None:
        before = interface_bytes(Cluster.interface)
        for _ in range(ELASTIC_STEPS):
            training.step()
        sent[name] += interface_bytes(Cluster.interface) - before

    times = pairs(lambda: job(other, "elastic"), lambda: job(static, "static"), ELASTIC_PAIRS)
    emit(ratio(text, *times, bound=1.02))
    bytes_ratio = mean(sent["elastic"]) / mean(sent["static"])
    emit(Figure(f"{text}, bytes", bytes_ratio, None, None, 1, 1.01))
    sync.finish()
    dist.barrier()


def slow() -> None:
    recipes = {
        "local_sgd": laconic.local_sgd(1),
        "slowmo": laconic.slowmo(None, 1),
        "diloco": laconic.diloco(1),
    }
    n = dist.get_world_size()
    ideal = 8 * 2 * (n - 1) / n * 4 * PARAMETERS / 100e6
    for name, recipe in recipes.items():
        training = Training()
        sync = laconic.attach(training.model, training.optimizer, recipe)
        times = [timed(training.optimizer.step) for _ in range(33)][3:]
        sync.detach()
        emit(ratio(f"{name}, {ideal:.3f} s", times, [ideal] * len(times), bound=1.10))


def own_link() -> TcpLink:
    """Return a link of its own over all ranks."""
    group = dist.new_group()
    return TcpLink.over(group, timedelta(seconds=60))


def from_common_start(job: Callable[[], object]) -> float:
    """Return the seconds of ``job`` from one moment on all ranks until the last rank has finished.

    The hosts are emulated, so they have one clock. A barrier over a network with latency would end
    at a different time on each rank.
    """
    start = torch.tensor([time.monotonic() + 0.5], dtype=torch.float64)
    dist.broadcast(start, 0)
    time.sleep(max(float(start) - time.monotonic(), 0.0))
    job()
    return slowest(time.monotonic() - float(start))


def buckets() -> None:
    """Measure steps with coded gradients in three buckets, relative to steps in which each bucket
    is averaged before the next one is sent, and to steps with a single bucket."""
    recipe, trainings = laconic.ddp(codec="int4"), {}
    for name in ("together", "one after the other", "in a single bucket"):
        gradient_channels.CODED_BUCKETS = 1 if "single" in name else 3
        trainings[name], link = Training(), own_link()
        assert link.far, "the network has a long round trip"
        link.far = name != "one after the other"
        laconic.attach(trainings[name].model, trainings[name].optimizer, recipe, link=link)
    together, *others = trainings
    for other in others:
        one, two = trainings[together].step, trainings[other].step
        times = pairs(one, two, timed=from_common_start)
        detail = f"{statistics.median(times[0]):.3f} s {together} / {other}"
        emit(ratio(detail, *times, bound=1.0))


def far() -> None:
    """Measure a mean of 16 MB relative to its bytes over the rate, back to back and with pauses.

    BBR sends next to nothing for 0.2 s and a round trip in every 10 s in which a connection was
    never idle, to find the round trip. With pauses, as between the rounds of a training, it often
    finds it at their ends.
    """
    n, x = dist.get_world_size(), nn.Parameter(torch.randn(4_000_000))
    optimizer = torch.optim.SGD([x], lr=0.1)
    model = nn.Module()
    model.x = x
    laconic.attach(model, optimizer, laconic.local_sgd(1))
    ideal = 8 * 2 * (n - 1) / n * 4 * x.numel() / 100e6
    optimizer.step()  # finds the rate
    for pause in (1.0, 0.0):
        times = []
        for _ in range(15):
            time.sleep(pause)
            times.append(from_common_start(optimizer.step))
        name = f"{pause:g} s between rounds" if pause else "back to back"
        mean = statistics.fmean(times) / ideal
        detail = f"{ideal:.2f} s, {name}, mean {mean:.2f}"
        emit(ratio(detail, times, [ideal] * len(times), bound=1.20))


def secured() -> None:
    """Measure a round over connections with TLS relative to one over connections without."""

    # laconic.attach without a link refuses to mix both in a job
    plain = Training()
    laconic.attach(plain.model, plain.optimizer, laconic.local_sgd(1), link=own_link())
    keys = [tempfile.mkdtemp(prefix="laconic-keys-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(keys)
    directory = Path(keys[0]) / "keys"
    if dist.get_rank() == 0:
        with contextlib.redirect_stdout(None):
            cli(["keys", str(directory)])
    dist.barrier()
    files = {tls.KEY: KEY, tls.CERTIFICATE: CERTIFICATE, tls.CA_FILE: CA}
    os.environ.update({tls.SWITCH: "1"}, **{n: str(directory / f) for n, f in files.items()})
    other = Training()
    laconic.attach(other.model, other.optimizer, laconic.local_sgd(1), link=own_link())
    times = pairs(other.optimizer.step, plain.optimizer.step)
    emit(ratio(f"{statistics.median(times[1]):.3f} s without", *times, bound=1.03))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(keys[0])


def coded() -> None:
    """Measure encoded rounds relative to their bytes, including scales, over the rate."""
    n = dist.get_world_size()
    for codec, bound in (("int4", 1.15), ("int8", 1.15)):
        for name, recipe in {
            "local_sgd": laconic.local_sgd(1, codec=codec),
            "diloco": laconic.diloco(1, codec=codec),
        }.items():
            training = Training()
            ideal = 8 * recipe[0].exchange.cost(PARAMETERS, 4, n).bytes / 100e6
            sync = laconic.attach(training.model, training.optimizer, recipe)
            times = [timed(training.optimizer.step) for _ in range(33)][3:]
            sync.detach()
            detail = f"{name}, {codec}, {ideal:.3f} s"
            emit(ratio(detail, times, [ideal] * len(times), bound=bound))


def coded_large() -> None:
    """Measure the same with one bucket of the maximum size."""
    n, count = dist.get_world_size(), BUCKET_BYTES // 4
    for codec in ("int4", "int8"):
        weights = nn.ParameterList([nn.Parameter(torch.randn(count // 16)) for _ in range(16)])
        optimizer = torch.optim.SGD(weights.parameters(), lr=0.0)
        recipe = laconic.local_sgd(1, codec=codec)
        ideal = 8 * recipe[0].exchange.cost(count, 4, n).bytes / 100e6
        sync = laconic.attach(weights, optimizer, recipe)
        times = []
        for _ in range(33):
            dist.barrier()
            times.append(timed(optimizer.step))
        sync.detach()
        emit(ratio(f"local_sgd, {codec}, {ideal:.3f} s", times[3:], [ideal] * 30, bound=1.15))


def peak() -> int:
    """Return the maximum resident memory in bytes since the last `reset_peak`."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def memory(name: str) -> None:
    count = 48 * 2**20
    n = dist.get_world_size()
    recipe = {"slowmo": laconic.slowmo(None, 1), "diloco": laconic.diloco(1)}[name]
    # Exclude the cost of the first use and the backend's own buffers.
    small = nn.Linear(4, 4)
    warm = torch.optim.SGD(small.parameters(), lr=0.1)
    laconic.attach(small, warm, recipe)
    warm.step()
    dist.all_reduce(torch.ones(BUCKET_BYTES // 4))
    model = nn.ParameterList([nn.Parameter(torch.ones(count // 16)) for _ in range(16)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reset_peak()
    before = peak()
    laconic.attach(model, optimizer, recipe)
    for _ in range(3):
        optimizer.step()
    extra = peak() - before
    allowed = 8 / n * count + 2 * BUCKET_BYTES
    detail = f"{name}, {count / 2**20:.0f} Mi parameters, n = {n}, {extra / 2**20:.0f} MiB"
    emit(Figure(detail, extra / allowed, None, None, 1, 1.0))


def calls() -> None:
    """Measure a call of each drop-in without a round, in microseconds divided by 50."""
    wrapped, plain = Training(), Training()
    model = laconic.SlowMoDistributedDataParallel(
        wrapped.model, 1, localsgd_frequency=10**9, slowmo_frequency=10**9
    )
    wrapped.optimizer.step()
    model.perform_slowmo(wrapped.optimizer)
    seconds = [timed(lambda: model.perform_slowmo(wrapped.optimizer)) for _ in range(PAIRS)]
    emit(microseconds("perform_slowmo", seconds))
    world = dist.get_world_size()
    comm = laconic.CommOptimizer(plain.optimizer, "EASGD", world, 10**9, 0.9)
    comm.step()
    bare = Training().optimizer
    bare.step()
    with_comm, without = pairs(comm.step, bare.step)
    extra = [one - other for one, other in zip(with_comm, without, strict=True)]
    emit(microseconds("CommOptimizer.step, beyond the inner one's", extra))


def microseconds(detail: str, seconds: list[float]) -> Figure:
    low, median, high = (1e6 * q / 50 for q in statistics.quantiles(seconds, n=4))
    return Figure(f"{detail}: {50 * median:.0f} us", median, low, high, len(seconds), 1.0)


def main() -> None:
    torch.set_num_threads(1)
    laconic.init()
    name, *arguments = sys.argv[1:]
    jobs: dict[str, Callable[..., None]] = {
        "step": step,
        "round": round,
        "ddp": ddp,
        "outer": outer,
        "processor": processor,
        "share": share,
        "elastic": elastic,
        "slow": slow,
        "far": far,
        "buckets": buckets,
        "secured": secured,
        "coded": coded,
        "coded_large": coded_large,
        "memory": memory,
        "calls": calls,
    }
    jobs[name](*arguments)
    os._exit(0)


if __name__ == "__main__":
    main()
