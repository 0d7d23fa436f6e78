"""Golden digests: what every recipe does, bit for bit, recorded so that changes can be compared.

    python -m tests.golden record|compare [--only NAME ...] [--file FILE] [--simulated]

A case is a small training run. It runs over simulated workers and again over gloo processes (but
for ``--simulated``), and both must give the same digests. Every kind of digest is one hash per step
over all ranks:

- ``params``, ``buffers``, ``optimizer``: after every step, step 0 being the attached start.
  ``optimizer`` has its state, the learning rates and the scale of a GradScaler.
- ``ledger``: what each step added to `Synchronizer.stats`, without times. Over processes the bytes
  of a delayed round are booked while training goes on, so there only the sum is compared.
- ``consensus``, ``anchor``: inside ``consensus()`` and ``consensus(mean=False)``, at three steps.
- ``state``: the tensors in ``sync.state_dict()``, whatever their names and order, at three steps.
- ``finish``: the model after ``finish()``. ``total``: all of the ledger, and the counts and bytes
  of `Synchronizer.calls`.

Each case is also saved at a step where delayed messages are in flight, with `laconic.save` and as
state dicts, loaded into fresh objects, and trained on. These runs must equal the one that was not
interrupted; a difference is reported as the kind ``resumed params`` and so on.

Some runs are not resumed: those whose workers come and go, rounds with a quorum (which are repeated
from their closings instead), ``auto()`` on a controlled clock (``choices``: what it chose), outer
state in host memory, and steps that a signal handler interrupts (``outcome``: how the run ends).

Only public names of laconic are used here, so that its inside may change.

What the digests depend on, as far as that could be tried on one machine with AVX-512:

- Gradients are elementwise products of uniform numbers that NumPy draws by integer arithmetic.
- torch's vector instructions: AVX2 and AVX-512, with one thread and two, give the same digests.
  Without fused multiply-add (``ATEN_CPU_CAPABILITY=default``) torch's optimizers round otherwise,
  and nearly all digests differ. The script sets ``avx2``.
- power_sgd multiplies matrices, and torch's square root (Adam, AdamW, `Norm`) is MKL's.
  There MKL's choice of instructions matters. The script sets ``MKL_CBWR=COMPATIBLE``, with which
  these cases give the same digests under each of MKL's instruction sets that were tried (SSE4.2,
  AVX2, AVX-512) on a processor by Intel. On one by AMD, MKL's square root differs in the last bit
  for a fifth of all numbers, so cases with square roots differ there (`comparable`).
- Muon's direction and norms of tensors differ between processors. Those cases are recorded with the
  processor, and compared on such processors only.
- A BatchNorm1d is left out: its sums depend on the vector length. `Norm` has the same buffers.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch is imported, and for the processes of a pool
    os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
    os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.links import Link, Throttled

from tests.support import clock, gloo, late
from tests.support.all_recipes import ROWS
from tests.support.own_updates import Homemade
from tests.support.recipes import adam

FILE = Path(__file__).with_suffix(".json")
SLOPE = 0.25
STEPS, SAVE, FIRST_CHECK = 14, 8, 4
SHAPES: tuple[tuple[int, ...], ...] = ((20, 30), (20,), (5, 20), (5,), ())
BATCH = 5
Trace = dict[str, dict[int, str]]
"""By kind and step: one rank's digest, or that of all ranks."""
CONTINUED = ("params", "buffers", "optimizer", "ledger", "consensus", "anchor", "state", "finish")
"""The kinds that a resumed run repeats."""


# -- the training ----


@dataclass(frozen=True)
class Case:
    """One run. ``options`` are those of `laconic.attach`, or of the front end. ``save``: the step
    after which it is saved; right after the steps ``switch_at`` and ``finish_at`` it calls
    ``switch(to)`` and ``finish()``."""

    recipe: Any = ()
    ranks: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    front: str = "attach"
    optimizer: str = "momentum"
    dtype: torch.dtype = torch.float32
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    steps: int = STEPS
    save: int = SAVE
    norm: bool = False
    """Whether the model has a `Norm`."""
    groups: bool = False
    """Two parameter groups of different learning rates, and a third from step ``JOIN`` on."""
    accumulate: bool = False
    """Two backward passes for each step, the first in ``no_sync()``."""
    overflow: tuple[int, ...] = ()
    """With a GradScaler: the steps at which rank 1's gradients overflow."""
    absent: bool = False
    """Weight decay; no gradient for the first bias on some ranks, for the scalar on none."""
    schedule: bool = False
    """The learning rate decays every three steps."""
    closure: bool = False
    reports: bool = True
    masters: bool = False
    """The optimizer moves one flat float32 tensor in place of a bfloat16 module's parameters."""
    mixed: bool = False
    """Every other parameter is bfloat16."""
    sharded: bool = False
    """Each worker's model is sharded over its two ranks (FSDP); over processes only."""
    processes: bool = True
    """False: over simulated workers only."""
    switch_at: int = 0
    to: la.Recipe = ()
    finish_at: int = 0
    broken: int = 0
    """The step whose backward pass fails on every rank, and is then repeated."""
    faults: la.Faults | str | None = None
    """Workers come and go: a plan, or the name of one of `TRACES`."""
    seconds: tuple[float, ...] = ()
    """Of each worker's step, by which rounds with a quorum close."""
    network: str = ""
    """The rate of the simulated network, on the controlled clock."""
    offload: bool = False
    """Outer state in the host memory of an emulated accelerator."""
    alarm: int = 0
    """The step in which rank 1's signal handler raises, while it waits for rank 0; the one after
    the last is ``finish()``. Over processes only."""

    @property
    def resumes(self) -> bool:
        return not (self.faults or self.seconds or self.network or self.offload)

    @property
    def checks(self) -> tuple[int, ...]:
        return (min(FIRST_CHECK, self.save - 1), self.save, self.steps - 1)

    @property
    def delayed(self) -> bool:
        """Whether bytes are booked beside the training."""
        late = any(r.delay for r in (*self.recipe, *self.to) if isinstance(r, la.Round))
        return late or bool(self.options.get("overlap"))


JOIN = 6


def numbers(shape: Sequence[int], *seed: int) -> Tensor:
    """Uniform in (-1, 1), float64, from integers and exact operations alone."""
    size = int(np.prod(shape))
    drawn = 2.0 * np.random.default_rng(seed).random(min(size, 2**16)) - 1.0
    return torch.from_numpy(np.resize(drawn, size).reshape(shape))


class Layer(nn.Module):
    """Parameters with the names of a linear layer."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)


class Norm(nn.Module):
    """A batch norm over batches of one row, so that its statistics need no sum of many numbers."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(size, dtype=dtype))
        self.register_buffer("running_mean", torch.zeros(size, dtype=dtype))
        self.register_buffer("running_var", torch.ones(size, dtype=dtype))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked += 1
        self.running_mean.mul_(0.9).add_(x, alpha=0.1)
        centered = x - self.running_mean
        self.running_var.mul_(0.9).add_(centered * centered, alpha=0.1)
        return centered / self.running_var.sqrt() * self.weight + self.bias


class Model(nn.Module):
    """The loss is ``sum(c*p) + slope/2*sum(p*p)`` over all parameters p, c being the batch."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__()
        dtypes = (torch.bfloat16 if case.mixed else case.dtype, case.dtype)
        drawn = [numbers(shape, 1, rank, index) for index, shape in enumerate(case.shapes)]
        values = [x.to(dtypes[index % 2]) for index, x in enumerate(drawn)]
        pairs = range(0, len(values) - 1, 2)
        self.layers = nn.ModuleList(Layer(values[i], values[i + 1]) for i in pairs)
        rest = values[2 * len(pairs) :]
        self.scalar = nn.Parameter(rest[0]) if rest else None
        self.norm = Norm(BATCH, case.dtype) if case.norm else None

    def forward(self, case: Case, rank: int, step: int, part: int) -> Tensor:
        terms = []
        for index, (name, p) in enumerate(self.named_parameters()):
            if case.absent and (p is self.scalar or (index == 1 and (rank + step) % 3)):
                continue
            if name.startswith("norm"):
                continue
            c = numbers(p.shape, 2, rank, step, part, index).to(p.device, p.dtype)
            if case.overflow and step in case.overflow and rank == 1:
                c = c * torch.inf
            terms.append((c * p).sum() + SLOPE / 2 * (p * p).sum())
        if self.norm is not None:
            x, c = (numbers((BATCH,), i, rank, step, part).to(case.dtype) for i in (3, 4))
            terms.append((c * self.norm(x)).sum())
        found: Tensor = torch.stack([term.float() for term in terms]).sum()
        return found


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "nesterov": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "adamw": torch.optim.AdamW,
}


class StopError(Exception):
    """What interrupts a step."""


class Training:
    """One rank's loop under `laconic.attach`, built as it is after ``begun`` steps."""

    front: Any
    """What has ``consensus()`` and ``finish()``."""
    follows = ""
    """Which attribute of ``front`` is its synchronizer; "" where ``front`` itself is one."""

    def __init__(self, case: Case, rank: int, link: Link | None, begun: int = 0) -> None:
        self.case, self.rank, self.link, self.begun = case, rank, link, begun
        start = rank - rank % 2 if case.sharded else rank  # shards of a worker start alike
        self.module = Model(case, start)
        self.model: Any = self.module
        if case.sharded:
            self._shard()
        if case.offload:
            self.module.to(late.set_up())
        self.wrap()
        self.params: list[Tensor] = list(self.module.parameters())
        self.masters: Tensor | None = None
        if case.masters:
            self.masters = torch.cat([p.detach().float().reshape(-1) for p in self.params])
        self.inners = self._optimizers(begun)
        self.inner = self.inners[0]
        self.optimizer: Any = self.inner if len(self.inners) == 1 else self.inners
        self.scaler: torch.amp.GradScaler | None = None
        if case.overflow:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=4)
        self.others: dict[str, Any] = {}
        if case.schedule:
            self.others["scheduler"] = torch.optim.lr_scheduler.StepLR(self.inner, 3, 0.7)
        if self.scaler is not None:
            self.others["scaler"] = self.scaler
        self.begin()

    def wrap(self) -> None:
        """What precedes the optimizer."""

    def _shard(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "shards"))
        fully_shard(self.module, mesh=self.mesh["shards"])

    def _optimizers(self, begun: int) -> list[torch.optim.Optimizer]:
        case = self.case
        if case.optimizer == "momentum, adamw":
            names, halves = case.optimizer.split(", "), (self.params[::2], self.params[1::2])
            return [OPTIMIZERS[n](half, lr=0.05) for n, half in zip(names, halves, strict=True)]
        make = OPTIMIZERS[case.optimizer]
        decay = {"weight_decay": 0.1} if case.absent else {}
        if self.masters is not None:
            return [make([self.masters], lr=0.05, **decay)]
        if not case.groups:
            return [make(self.params, lr=0.05, **decay)]
        groups = [{"params": self.params[:2], "lr": 0.05}, {"params": self.params[2:3], "lr": 0.02}]
        return [make([*groups, self.joining] if begun >= JOIN else groups, lr=1.0, **decay)]

    @property
    def joining(self) -> dict[str, Any]:
        return {"params": self.params[3:], "lr": 0.03}

    def begin(self) -> None:
        """Attach."""
        case = self.case
        recipe = case.to if case.switch_at and self.begun >= case.switch_at else case.recipe
        options: dict[str, Any] = {"link": self.link, "scaler": self.scaler, **case.options}
        if case.sharded:
            options["mesh"] = self.mesh
        if case.faults:
            options["elastic"] = la.Elastic("simulated", others=self.others)
        self.front = la.attach(self.model, self.optimizer, recipe, **options)

    @property
    def sync(self) -> la.Synchronizer:
        found: la.Synchronizer = getattr(self.front, self.follows) if self.follows else self.front
        return found

    # -- one step ----

    def step(self, t: int) -> None:
        case = self.case
        if case.network:
            CLOCKS[-1].sleep(0.01)
        if case.groups and t == JOIN:
            self.optimizer.add_param_group(self.joining)
        for each in self.steppers:
            each.zero_grad()
        self.model.zero_grad(set_to_none=True)
        if t == case.broken:
            self._fail(t)
        if case.closure:
            self.optimizer.step(partial(self._closure, t))
        else:
            with self.no_sync() if case.accumulate else nullcontext():
                if case.accumulate:
                    self._backward(t, 1)
            self._backward(t, 0)
            if case.reports:
                self.report(float(numbers((1,), 5, self.rank, t)))
            self.move()
        if case.schedule:
            self.others["scheduler"].step()
        self.after_step(t)
        if t == case.switch_at:
            self.sync.switch(case.to)
        if t == case.finish_at:
            self.front.finish()

    def _backward(self, t: int, part: int) -> Tensor:
        loss: Tensor = self.model(self.case, self.rank, t, part)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss

    def _fail(self, t: int) -> None:
        """A backward pass, or a closure with it, that raises when all gradients have come."""

        def stop(_: Tensor) -> None:
            raise StopError

        # what is made first is differentiated last
        early = torch.zeros((), requires_grad=True) * 1.0
        early.register_hook(stop)

        def backward() -> None:
            (self.model(self.case, self.rank, t, 0) + early).backward()

        with suppress(StopError):
            self.optimizer.step(backward) if self.case.closure else backward()
        self.model.zero_grad(set_to_none=True)

    def _closure(self, t: int) -> Tensor:
        self.optimizer.zero_grad()
        return self._backward(t, 0)

    def move(self) -> None:
        if self.masters is not None:
            grads = [p.grad.float().reshape(-1) for p in self.params if p.grad is not None]
            self.masters.grad = torch.cat(grads)
        for each in self.steppers:
            each.step() if self.scaler is None else self.scaler.step(each)
        if self.scaler is not None:
            self.scaler.update()

    @property
    def steppers(self) -> list[Any]:
        """The optimizers whose ``step()`` the loop calls."""
        return list(self.inners) if len(self.inners) > 1 else [self.optimizer]

    def after_step(self, t: int) -> None:
        """What a front end has to be told."""

    def no_sync(self) -> Any:
        return self.sync.no_sync()

    def report(self, loss: float) -> None:
        self.front.report_loss(loss)

    # -- saving ----

    @property
    def parts(self) -> dict[str, Any]:
        """What a user saves with ``state_dict()``, in the order in which it is loaded."""
        found = {f"optimizer {n}": each for n, each in enumerate(self.steppers)}
        sync = {} if self.follows else {"sync": self.sync}
        return {"model": self.model, **found, **sync}

    def states(self) -> bytes:
        found = {k: part.state_dict() for k, part in {**self.parts, **self.others}.items()}
        if self.masters is not None:
            found["masters"] = self.masters
        file = io.BytesIO()
        torch.save(found, file)
        return file.getvalue()

    def load_states(self, data: bytes) -> None:
        found = torch.load(io.BytesIO(data), weights_only=True)
        if self.masters is not None:
            self.masters.copy_(found["masters"])
        for name, part in {**self.parts, **self.others}.items():
            part.load_state_dict(found[name])

    def save(self, path: Path) -> None:
        la.save(path, self.model, self.optimizer, self.parts.get("sync"), others=self.others)

    def load(self, path: Path) -> None:
        la.load(path, self.model, self.optimizer, self.parts.get("sync"), others=self.others)

    # -- digests ----

    def weights(self) -> list[Tensor]:
        masters = [] if self.masters is None else [self.masters]
        return [*self.params, *masters]

    def moments(self) -> list[Any]:
        """The optimizer's state and learning rates, and the scale."""
        found: list[Any] = [] if self.scaler is None else [self.scaler.get_scale()]
        for inner in self.inners:
            for group in inner.param_groups:
                found.append(group["lr"])
                for p in group["params"]:
                    state = inner.state.get(p, {})
                    found += [item for name in sorted(state) for item in (name, state[name])]
        return found

    def ledger(self) -> dict[str, int]:
        """Counts of steps, rounds and bytes so far."""
        stats = self.front.stats()
        found = {"steps": stats.steps, "rounds": stats.rounds}
        found |= {"sent": stats.bytes_sent, "received": stats.bytes_received}
        found |= {f"by {name}": value for name, value in stats.bytes_by_collective.items()}
        return found | {f"among {name}": value for name, value in stats.bytes_by_set.items()}


class Comm(Training):
    """With a `CommOptimizer`, which saves its synchronizer's state with its own."""

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer 0": self.optimizer}

    def begin(self) -> None:
        name, *rest = self.case.options["arguments"]
        options: dict[str, Any] = {"model": self.model, "scaler": self.scaler, "link": self.link}
        self.optimizer = la.CommOptimizer(self.inner, name, self.case.ranks, *rest, **options)
        self.front = self.optimizer.sync


class SlowMo(Training):
    """With a `SlowMoDistributedDataParallel`; over processes it takes the default group."""

    follows = "synchronizer"

    def wrap(self) -> None:
        options = dict(self.case.options)
        nprocs = options.pop("nprocs_per_node", 1)
        if "graph" in options:
            at = self.rank // nprocs, self.case.ranks // nprocs
            options["graph"] = options["graph"](*at, nprocs, self.rank % nprocs)
        if "mixing" in options:
            options["mixing"] = options["mixing"](options["graph"])
        self.model = self.front = la.SlowMoDistributedDataParallel(self.module, nprocs, **options)

    def begin(self) -> None:
        if self.begun:
            self.model.bind(self.inner, self.masters)

    def no_sync(self) -> Any:
        return self.model.no_sync()

    def report(self, loss: float) -> None:
        """It has no leader."""

    def after_step(self, t: int) -> None:
        self.model.perform_slowmo(self.inner, self.masters)


FRONTS = {"attach": Training, "comm": Comm, "slowmo": SlowMo}


# -- digests ----


def digest(*values: Any) -> str:
    """Of tensors (dtype, shape, bytes) and plain data, in this order: 16 hexadecimal digits."""
    whole = hashlib.blake2b(digest_size=8)
    for value in values:
        if isinstance(value, Tensor):
            own = value.detach()
            own = own.to_local() if hasattr(own, "to_local") else own  # a shard
            whole.update(f"{own.dtype} {tuple(own.shape)}".encode())
            whole.update(own.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            whole.update(repr(value).encode())
    return whole.hexdigest()


def tensors_in(state: Any) -> Iterator[Tensor]:
    """All tensors in dicts, lists and tuples."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, (Mapping, list, tuple)):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from tensors_in(value)


def combined(traces: Sequence[Trace]) -> Trace:
    """For each kind and step, one digest over all ranks that have one."""
    steps: dict[str, set[int]] = {}
    for trace in traces:
        for kind, own in trace.items():
            steps.setdefault(kind, set()).update(own)

    def over_all(kind: str, t: int) -> str:
        return digest(*(trace[kind][t] for trace in traces if t in trace.get(kind, {})))

    return {kind: {t: over_all(kind, t) for t in sorted(found)} for kind, found in steps.items()}


class Recorder:
    """Takes the digests of one rank's run."""

    def __init__(self, training: Training) -> None:
        self.training, self.case = training, training.case
        self.trace: Trace = {}
        self.before: dict[str, int] = {}

    def put(self, kind: str, step: int, *values: Any) -> None:
        self.trace.setdefault(kind, {})[step] = digest(*values)

    def state(self, step: int) -> None:
        found = sorted(map(digest, tensors_in(self.training.sync.state_dict())))
        self.put("state", step, *found)

    def take(self, step: int) -> None:
        """Everything, after this step."""
        training = self.training
        buffers = list(training.module.buffers())
        self.put("params", step, *training.weights())
        if buffers:
            self.put("buffers", step, *buffers)
        self.put("optimizer", step, *training.moments())
        if step in self.case.checks:
            with training.front.consensus():
                self.put("consensus", step, *training.weights(), *buffers)
            with training.sync.consensus(mean=False):
                self.put("anchor", step, *training.weights(), *buffers)
            self.state(step)
        ledger = training.ledger()
        added = {k: v - self.before.get(k, 0) for k, v in ledger.items()}
        self.put("ledger", step, sorted((k, v) for k, v in added.items() if v))

    def go(self, first: int, last: int) -> None:
        t = first
        while t <= last:
            self.before = self.training.ledger()
            self.training.step(t)
            if self.case.faults:  # a newcomer's first step may be a later one
                t = self.training.sync.step
            self.take(t)
            t += 1

    def end(self) -> None:
        training, step = self.training, self.case.steps
        training.front.finish()
        self.put("finish", step, *training.weights(), *training.module.buffers())
        calls = sorted((c.count, c.bytes) for c in training.sync.calls().values())
        self.put("total", step, sorted(training.ledger().items()), calls)
        choices = [(choice.step, choice.text) for choice in training.sync.choices]
        if choices:
            self.put("choices", step, choices)
        training.front.detach()


def train(
    rank: int, case: Case, folder: Path, link: Link | None = None, closings: list[Any] | None = None
) -> tuple[Trace, Trace]:
    """One rank's digests, and those in which a resumed run was another. ``closings``: gets those of
    rounds with a quorum."""
    torch.set_num_threads(1)  # of this thread: it decides how matrices are multiplied
    make = FRONTS[case.front]
    straight = Recorder(make(case, rank, link))
    begun = straight.training.sync.step if case.faults else 0
    straight.take(begun)
    if not case.resumes:
        straight.go(begun + 1, case.steps)
        before = straight.training.sync.closings
        straight.end()
        if closings is not None and rank == 0:
            closings[:] = straight.training.sync.closings or before
        return straight.trace, {}
    straight.go(1, case.save)
    states = straight.training.states()
    straight.training.save(folder)
    straight.go(case.save + 1, case.steps)
    straight.end()
    wrong: Trace = {}
    for way in ("states", "folder"):
        resumed = Recorder(make(case, rank, link, case.save))
        if way == "states":
            resumed.training.load_states(states)
        else:
            resumed.training.load(folder)
        resumed.state(case.save)
        resumed.go(case.save + 1, case.steps)
        resumed.end()
        for kind in CONTINUED:
            for t, own in resumed.trace.get(kind, {}).items():
                late = kind == "ledger" and link is not None and case.delayed
                if own != straight.trace[kind][t] and not late:
                    wrong.setdefault(f"resumed {kind}", {}).setdefault(t, way)
    return straight.trace, wrong


def interrupted(rank: int, case: Case, folder: Path, link: Link) -> tuple[Trace, Trace]:
    """`train` until rank 1 is interrupted, and on as if nothing had happened."""
    main, rung = threading.get_ident(), folder / "rung"

    def stop(*_: object) -> None:
        rung.touch()
        raise StopError

    def watch() -> None:
        """Send the signal once the main thread has waited at one place in laconic for a while."""
        before, times = "", 0
        while times < 50:
            time.sleep(0.01)
            frame, place = sys._current_frames().get(main), ""
            waits = frame is not None and frame.f_code.co_name == "wait"
            while frame is not None:
                place += f"{frame.f_code.co_filename} {frame.f_lineno}\n"
                frame = frame.f_back
            times = times + 1 if waits and "laconic" in place and place == before else 0
            before = place
        signal.pthread_kill(main, signal.SIGALRM)

    def begin(t: int) -> None:
        if t == case.alarm and rank == 1:
            threading.Thread(target=watch, daemon=True).start()
        while t == case.alarm and rank == 0 and not rung.exists():
            time.sleep(0.01)

    recorder = Recorder(FRONTS[case.front](case, rank, link))
    training, t, outcome = recorder.training, 0, "finished"
    handler = signal.signal(signal.SIGALRM, stop)
    try:
        with training.sync:
            for t in range(1, case.steps + 2):
                begin(t)
                with suppress(StopError):
                    training.step(t) if t <= case.steps else training.sync.finish()
                    if rank == 1 or t < case.alarm:  # how soon the other notices depends on time
                        recorder.put("params", t, *training.weights())
    except la.LinkError:
        outcome = f"LinkError at {t if rank else 0}"
    finally:
        signal.signal(signal.SIGALRM, handler)
    recorder.put("outcome", 0, outcome)
    return recorder.trace, {}


def over_processes(rank: int, name: str, folder: Path) -> tuple[Trace, Trace]:
    """`train` in a process of `gloo.Pool`."""
    case = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = interrupted if case.alarm else train
        return run(rank, case, folder, gloo.link_of(case.ranks))


TRACES = {"sgp": (20, 22, 31), "ddp, int4": (19, 21, 27)}
"""From which unit on worker d has come, and b and c are gone."""


def trace_of(recipe: str, folder: Path) -> la.Trace:
    """As the workers of an elastic run record it: d joins after step 5, b is killed, and c leaves
    after step 10."""
    came, lost, left = TRACES[recipe]
    views = {1: "abc", came: "abcd", lost: "acd", left: "ad"}
    own = {"d": {"donor": "a", "step": 5}}
    for worker in "abcd":
        events: list[Any] = [own[worker]] if worker in own else []
        for unit, present in views.items():
            if worker in present:
                events.append({"unit": unit, "workers": list(present)})
        lines = "".join(json.dumps(event) + "\n" for event in events)
        (folder / f"{worker}.jsonl").write_text(lines)
    return la.Trace(folder)


CLOCKS: list[clock.Clock] = []
"""The controlled clock of the present case."""


@contextmanager
def surrounded(case: Case, folder: Path) -> Iterator[dict[str, Any]]:
    """What a simulated case needs around it; gives the options of `laconic.simulate`."""
    options: dict[str, Any] = {"workers": case.ranks}
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patched:
        warnings.simplefilter("ignore")
        if case.network:
            CLOCKS[:] = [clock.controlled(patched)]
            options["link"] = lambda link: Throttled(link, case.network, 1e-3)
        if isinstance(case.faults, str):
            options = {"faults": trace_of(case.faults, folder)}
        elif case.faults:
            options = {"faults": case.faults}
        if case.seconds:
            options |= {"step_seconds": case.seconds}
        with late.device(settles=True) if case.offload else nullcontext():
            yield options


def simulated(case: Case) -> tuple[Trace, list[Trace]]:
    """The digests of a case over simulated workers, and what differed after resuming."""
    closings: list[Any] = []

    def run(rank: int) -> tuple[Trace, Trace]:
        return train(rank, case, place, closings=closings)

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with surrounded(case, place) as options:
            runs = [run for run in la.simulate(run, **options) if run is not None]
            trace = combined([trace for trace, _ in runs])
            if not case.seconds:
                return trace, [wrong for _, wrong in runs]
            again = la.simulate(run, workers=case.ranks, closings=list(closings))
    repeated = combined([trace for trace, _ in again])
    wrong = {
        f"repeated {kind}": {t: "closings" for t in steps if repeated[kind][t] != steps[t]}
        for kind, steps in trace.items()
    }
    return trace, [{kind: steps for kind, steps in wrong.items() if steps}]


def in_processes(name: str, pools: dict[int, gloo.Pool]) -> tuple[Trace, list[Trace]]:
    """The same over processes; without the ledger of single steps where it depends on time."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        runs = pools[case.ranks].run(over_processes, name, Path(folder), ranks=case.ranks)
    if case.alarm and isinstance(pools, Pools):
        pools.drop(case.ranks)
    trace = combined([trace for trace, _ in runs])
    if case.delayed:
        trace.pop("ledger", None)
    return trace, [wrong for _, wrong in runs]


# -- the cases ----


def own(period: int, **changes: Any) -> la.Recipe:
    return (replace(la.local_sgd(period)[0], update=Homemade(), **changes),)


MATRIX = ((24, 7), (9,), (4, 3), (3,))
"""For low rank: the first basis has so few numbers that torch draws them one by one."""
LARGE = ((2**16 * 52,), (3,))
"""In float64 more than a bucket's 25 MiB."""


SOME: dict[str, la.Recipe] = {
    "ddp": la.ddp(),
    "ddp, int4": la.ddp(codec="int4"),
    "ddp, int8": la.ddp(codec="int8"),
    "power_sgd": la.power_sgd(2),
    "local_sgd": la.local_sgd(3),
    "local_sgd, average": la.local_sgd(3, optimizer_state="average"),
    "local_sgd, int8": la.local_sgd(3, codec="int8"),
    "local_sgd, late": la.local_sgd(6, delay=4),
    "local_sgd, late, int8": la.local_sgd(3, delay=2, codec="int8"),
    "slowmo": la.slowmo(la.local_sgd(2), 5, 0.4),
    "slowmo over sgp": la.slowmo(la.sgp(), 5, 0.4),
    "slowmo over late sgp": la.slowmo(la.sgp(delay=2), 5, 0.4),
    "sgp": la.sgp(),
    "sgp, late": la.sgp(delay=2),
    "easgd": la.easgd(3, pull=0.1),
    "lsgd": la.lsgd(4, local_period=0),
    "diloco, late": la.diloco(5, momentum=0.5, delay=4),
    "diloco, late, int4": la.diloco(5, momentum=0.5, delay=4, codec="int4"),
    "streaming_diloco": la.streaming_diloco(6, 3, 3, codec="int4"),
    "muon over ddp, int4": la.outer_step(la.ddp(codec="int4"), 4, outer="muon"),
    "streaming_diloco, muon": la.streaming_diloco(6, 3, 2, outer="muon"),
}
"""Recipes of each kind."""


CASES: dict[str, Case] = {}


def case(name: str, recipe: Any = (), ranks: int = 3, group: int = 0, **more: Any) -> None:
    """Add a case; ``group``: of so many workers."""
    assert name not in CASES, f"two cases are called {name}"
    if group:
        more["options"] = {**more.get("options", {}), "group_size": group}
    CASES[name] = Case(recipe, ranks, **more)


def _rows() -> None:
    """Every row of the shared table, with three workers and with four."""
    few = ("ddp", "local_sgd", "slowmo", "sgp", "easgd", "lsgd", "diloco, late")
    for name, row in ROWS.items():
        shapes = MATRIX if name == "power_sgd" else SHAPES
        for ranks in (2, 3, 4):
            if ranks == 2 and name not in few:
                continue
            if ranks == 3 and row.group_size(4) is not None:
                continue  # groups of one
            group = row.group_size(ranks) or 0
            case(f"{name}, {ranks} workers", row.recipe, ranks, group, shapes=shapes)


def _coded() -> None:
    for codec in ("bfloat16", "float16", "int8", "int4", "int2"):
        case(f"ddp, codec {codec}", la.ddp(codec=codec))
        case(f"local_sgd, codec {codec}", la.local_sgd(3, codec=codec), 4)
        case(f"diloco, codec {codec}", la.diloco(4, momentum=0.5, codec=codec))
    case("local_sgd, late, int4", la.local_sgd(6, delay=4, codec="int4"))
    averaged = la.local_sgd(3, codec="int8", optimizer_state="average")
    case("local_sgd, adamw, average, int8", averaged, optimizer="adamw")
    case("post_local_sgd, int8", la.post_local_sgd(5, 4, codec="int8"))
    case("hierarchical, int4", la.hierarchical(2, 6, codec="int4"), 4, group=2)
    case("easgd, int8", la.easgd(3, pull=0.1, codec="int8"))
    case("slowmo, int8", la.slowmo(la.local_sgd(2), 5, 0.4, codec="int8"), 4)
    case("slowmo, coded base", la.slowmo(la.local_sgd(2, codec="int4"), 5, 0.4))
    case("diloco, late, int4", la.diloco(5, momentum=0.5, delay=4, codec="int4"))
    case("diloco, Adam, int8", la.diloco(3, outer=adam, codec="int8"))
    for how in (None, "bfloat16"):
        recipe = la.streaming_diloco(6, 3, 3, codec=how, momentum=0.5)
        case(f"streaming_diloco, {how}", recipe, 4)
    case("streaming_diloco, by layers", la.streaming_diloco(6, 2, 2, by="layers"), save=7)
    case("streaming_diloco, Adam", la.streaming_diloco(6, 3, 6, outer=adam, codec="int8"))
    case("power_sgd, int8", la.power_sgd(2, codec="int8"), 4, shapes=MATRIX)
    case("power_sgd, start", la.power_sgd(1, start=5), shapes=MATRIX)
    case("power_sgd, adamw", la.power_sgd(1), shapes=MATRIX, optimizer="adamw")


def _delayed() -> None:
    case("local_sgd, delay = period", la.local_sgd(4, delay=4), save=9)
    case("local_sgd, 1, delay 1", la.local_sgd(1, delay=1))
    case("local_sgd, late, average", la.local_sgd(6, delay=4, optimizer_state="average"))
    case("local_sgd, late, reset", la.local_sgd(6, delay=4, optimizer_state="reset"))
    case("post_local_sgd, late", la.post_local_sgd(5, 4, delay=3), save=9)
    case("sgp, delay 1", la.sgp(delay=1), 4)
    case("sgp, ring of 2, delay 3", la.sgp("ring", 2, delay=3), 4)
    case("sgp, bipartite, late", la.sgp("bipartite_exponential", delay=2))
    case("diloco, delay = period", la.diloco(4, momentum=0.5, delay=4), 4, save=9)
    case("diloco, late, mix 0.2", la.diloco(5, momentum=0.5, delay=4, mix=0.2))
    case("diloco, late, Adam", la.diloco(5, outer=adam, delay=4))
    case("diloco, late, unsharded", la.diloco(5, delay=4, sharded=False))
    case("diloco, loscar, int4", la.diloco(5, 1.0, 0.0, delay=4, merge="loscar", codec="int4"))
    case("own update", own(3))
    case("own update, late", own(4, delay=3), save=9)


def _outer() -> None:
    bases: dict[str, la.Recipe] = {
        "ddp": la.ddp(),
        "late local_sgd": la.local_sgd(3, delay=2),
        "post_local_sgd": la.post_local_sgd(5, 2),
        "d_psgd": la.d_psgd(delay=1),
        "easgd": la.easgd(2, pull=0.2),
        "lsgd": la.lsgd(2, local_period=0),
        "late bipartite sgp": la.sgp("bipartite_linear", delay=2),
    }
    for name, base in bases.items():
        case(f"slowmo over {name}", la.slowmo(base, 5, 0.5, 0.8), save=7)
    for name in ("ddp, int4", "local_sgd, late", "sgp, late"):
        case(f"nesterov over {name}", la.outer_step(SOME[name], 5), 4, save=7)
    for name in ("muon over ddp, int4", "streaming_diloco, muon"):
        case(name, SOME[name], 4)
    late = bases["late bipartite sgp"]
    case("slowmo over late bipartite sgp, no average", la.slowmo(late, 5, 0.5, average=False))
    case("slowmo over hierarchical", la.slowmo(la.hierarchical(2, 3), 6, 0.5), 4, group=2)
    case("slowmo over lsgd in groups", la.slowmo(la.lsgd(3, local_period=1), 6, 0.5), 4, group=2)
    case("slowmo, momentum by workers", la.slowmo(la.local_sgd(2), 6), 4)
    for how in ("average", "reset"):
        inner = la.local_sgd(2, optimizer_state=how)
        case(f"slowmo, {how}", la.slowmo(inner, 6, 0.5, optimizer_state=how))
        case(f"local_sgd, adamw, {how}", la.local_sgd(4, optimizer_state=how), optimizer="adamw")
    case("local_sgd, adamw, keep", la.local_sgd(4), 4, optimizer="adamw")
    case("diloco, unsharded", la.diloco(4, sharded=False))
    case("diloco, Adam, unsharded", la.diloco(4, outer=adam, sharded=False), 4)
    case("easgd, nesterov", la.easgd(4, 0.5, pull=0.1), 4, optimizer="nesterov")
    case("lsgd, by gradients", la.lsgd(4, local_period=0, drift=0.3), reports=False)
    groups = la.lsgd(4, local_period=2, local_drift=0.4, window=2)
    case("lsgd in groups, by gradients", groups, 4, group=2, reports=False)
    case("hierarchical, one group", la.hierarchical(2, 6), 3, group=3)


def _graphs() -> None:
    names = ("exponential", "directed_exponential", "bipartite_exponential", "directed_linear")
    for graph in (*names, "bipartite_linear", "ring", "complete", "random"):
        for ranks in (3, 4):
            case(f"sgp, {graph}, {ranks} workers", la.sgp(graph), ranks)
        case(f"d_psgd, {graph}", la.d_psgd(graph), 4)
    case("sgp, 2 peers", la.sgp(peers=2), 4)
    case("sgp, random, seed, late", la.sgp("random", delay=1), 3, options={"seed": 7})


def _replicas() -> None:
    """Workers of two ranks."""
    names = "ddp; ddp, int4; local_sgd, late; local_sgd, average; local_sgd, int8; slowmo"
    names += "; sgp, late; easgd; lsgd; diloco, late, int4; streaming_diloco"
    for name in names.split("; "):
        case(f"{name}, 2 ranks a worker", SOME[name], 4, options={"nprocs_per_node": 2})
    both = {"nprocs_per_node": 2, "group_size": 2}
    case("hierarchical, 2 ranks a worker", la.hierarchical(2, 6), 4, options=both)


def _loops() -> None:
    """Recipes under what a training loop may do."""
    recipes = {**SOME, "sgp": la.sgp("bipartite_linear")}

    def loop(title: str, names: str, **changes: Any) -> None:
        for name in names.split("; "):
            case(f"{name}, {title}", recipes[name], **changes)

    two = {"nprocs_per_node": 2}
    most = "ddp; local_sgd; local_sgd, late; sgp; sgp, late; slowmo; diloco, late"
    loop("buffers", most, norm=True)
    loop("buffers kept", "local_sgd; sgp, late; ddp", norm=True, options={"buffers": "keep"})
    both = "local_sgd; local_sgd, late"
    loop("buffers, 2 ranks a worker", both, norm=True, options=two, ranks=4)
    most = "ddp; local_sgd, int8; slowmo; sgp; easgd; lsgd; diloco, late"
    loop("float64", most, dtype=torch.float64)
    most = "ddp; ddp, int8; local_sgd; local_sgd, int8; local_sgd, late; slowmo; sgp; sgp, late"
    loop("bfloat16", f"{most}; easgd; diloco, late", dtype=torch.bfloat16)
    loop("two dtypes", "ddp; local_sgd; slowmo; sgp", mixed=True)
    loop("overflow", "ddp; local_sgd; local_sgd, late; slowmo; lsgd", overflow=(3, 7, 10))
    loop("accumulated", "ddp; ddp, int8; local_sgd", accumulate=True)
    most = "ddp; ddp, int8; local_sgd, int8; local_sgd, late; slowmo; sgp, late; easgd"
    loop("groups", f"{most}; diloco, late; streaming_diloco", groups=True)
    most = "ddp; ddp, int8; local_sgd, average; sgp; slowmo; lsgd"
    loop("absent gradients", most, absent=True)
    loop("schedule", "local_sgd; slowmo; slowmo over sgp; easgd", schedule=True)
    loop("closure", "ddp; local_sgd, late; slowmo", closure=True)
    most = "local_sgd, late; diloco, late; sgp, late; slowmo; streaming_diloco; easgd"
    loop("finish", most, finish_at=7)
    pairs = "local_sgd, late to ddp; ddp, int8 to local_sgd, int8; ddp, int8 to ddp"
    pairs += "; sgp, late to slowmo; diloco, late to ddp, int8; slowmo to streaming_diloco"
    for pair in pairs.split("; "):
        start, end = (recipes[name] for name in pair.split(" to "))
        case(f"switch from {pair}", start, optimizer="adamw", switch_at=6, to=end, save=10)
    mixed: dict[str, Any] = {"switch_at": 7, "to": la.ddp(), "overflow": (3, 9), "save": 10}
    case("switch with a scaler", recipes["local_sgd"], **mixed)
    case("nothing", (), 2)
    large: dict[str, Any] = {"dtype": torch.float64, "optimizer": "sgd", "steps": 4, "save": 3}
    case("ddp, large", la.ddp(), 2, shapes=((2**17 + 99,), (3,)), **large)
    case("diloco, large", la.diloco(2, delay=2), 2, shapes=LARGE, **large)


def _front_ends() -> None:
    for name in ("EASGD", "LSGD", "DDP"):
        given: dict[str, Any] = {"arguments": (name, 4, 0.3, 0.1)}
        made = partial(case, front="comm", options=given)
        made(f"comm {name}")
        made(f"comm {name}, buffers", norm=True, ranks=4)
        made(f"comm {name}, overflow", overflow=(3, 7, 10))
        made(f"comm {name}, groups", groups=True)
        made(f"comm {name}, closure", closure=True, reports=False)
        if name == "LSGD":
            made(f"comm {name}, by gradients", reports=False)
    whole, efficient = ({"slowmo_memory_efficient": yes} for yes in (False, True))
    sgp: dict[str, Any] = {"slowmo_base_algorithm": la.SlowMoBaseAlgorithm.SGP, **whole}
    settings: dict[str, dict[str, Any]] = {
        "local SGD": {},
        "local SGD, not memory efficient": whole,
        "local SGD, 2 ranks a node": {"nprocs_per_node": 2},
        "local SGD, one node": {"nprocs_per_node": 4},
        "local SGD, no slow step": {"slowmo_momentum": 0.0, "slowmo_lr": 1.0},
        "local SGD, slow lr 0.7": {"slowmo_lr": 0.7, "slowmo_momentum": 0.2},
        "SGP": sgp,
        "SGP, memory efficient": {**sgp, **efficient},
        "SGP, average": {**sgp, "slowmo_sgp_average_params": True},
        "SGP, 2 ranks a node": {**sgp, "nprocs_per_node": 2},
        "SGP, no push-sum": {**sgp, "push_sum": False},
        "SGP, overlap": {**sgp, "overlap": True, "synch_freq": 2},
        "SGP, ring": {**sgp, "graph": la.RingGraph},
        "SGP, linear": {**sgp, "graph": la.DynamicDirectedLinearGraph},
        "SGP, bipartite": {**sgp, "graph": la.DynamicBipartiteExponentialGraph},
        "SGP, ring, mixing": {**sgp, "graph": la.RingGraph, "mixing": la.UniformMixing},
        "SGP, no push-sum, memory efficient": {**sgp, "push_sum": False, **efficient},
        "local SGD, every 2 steps": {"localsgd_frequency": 2, "use_streams": False},
    }
    for name, options in settings.items():
        given = {"slowmo_frequency": 6, **options}
        case(f"SlowMo, {name}", (), 4, options=given, front="slowmo", optimizer="nesterov")
    slow: dict[str, Any] = {"slowmo_frequency": 6}
    overlap = {**slow, **settings["SGP, overlap"]}
    uneven = {**overlap, "graph": la.DynamicBipartiteLinearGraph}

    def slowmo(name: str, ranks: int = 4, options: Any = slow, **more: Any) -> None:
        case(f"SlowMo, {name}", (), ranks, options=options, front="slowmo", **more)

    slowmo("SGP, 3 nodes, uneven", 3, uneven)
    slowmo("local SGD, 2 nodes", 2)
    slowmo("buffers", norm=True)
    slowmo("buffers kept", options={**slow, "broadcast_buffers": False}, norm=True)
    slowmo("adamw, schedule", optimizer="adamw", schedule=True)
    slowmo("overflow", overflow=(3, 7, 10))
    slowmo("accumulated", options={**slow, "nprocs_per_node": 2}, accumulate=True)
    slowmo("absent gradients", absent=True)
    slowmo("masters", dtype=torch.bfloat16, masters=True)
    slowmo("masters, overlap", options=overlap, dtype=torch.bfloat16, masters=True)
    slowmo("bfloat16", dtype=torch.bfloat16)


def _sharded() -> None:
    """Workers whose models are sharded over two ranks each."""
    recipes = {**SOME, "diloco, int4": la.diloco(4, codec="int4")}
    for name in ("ddp", "ddp, int8", "local_sgd, late", "slowmo", "sgp, late", "diloco, int4"):
        case(f"{name}, FSDP", recipes[name], 4, sharded=True, shapes=SHAPES[:4])


def _elastic() -> None:
    """Workers that are lost, that leave, and that come."""
    plan: dict[str, Any] = {"faults": la.Faults(3, kill=((0, 6), (2, 10)), join=(5,))}
    names = "ddp; ddp, int4; local_sgd, late, int8; local_sgd, average; slowmo over late sgp; sgp"
    names += "; diloco, late; streaming_diloco; easgd"
    names += "; muon over ddp, int4; streaming_diloco, muon"
    for name in names.split("; "):
        case(f"{name}, elastic", SOME[name], schedule=True, processes=False, **plan)
    for name in TRACES:
        case(f"{name}, trace", SOME[name], faults=name, schedule=True, processes=False)


def _quorums() -> None:
    """Rounds with a quorum in virtual time; the second worker is slow."""
    own: dict[str, Any] = {"quorum": 2, "pace": "own"}
    recipes: dict[str, la.Recipe] = {
        "diloco": la.diloco(3, momentum=0.5, quorum=2),
        "diloco, own pace, int8": la.diloco(4, codec="int8", **own),
    }
    for name, recipe in recipes.items():
        case(f"{name}, quorum", recipe, processes=False, seconds=(1.0, 2.25, 1.5))


def _automatic() -> None:
    """``auto()``, with networks of which the choice is clear."""
    for network in ("10gbit", "30kbit"):
        given: dict[str, Any] = {"network": network, "steps": 20, "optimizer": "sgd"}
        case(f"auto, {network}", la.auto(), processes=False, **given)


def _offloaded() -> None:
    given: dict[str, Any] = {"options": {"offload": True}, "offload": True, "processes": False}
    for name in ("local_sgd, late, int8", "diloco, late"):
        case(f"{name}, offload", SOME[name], **given)


def _several() -> None:
    """Two optimizers."""
    both: dict[str, Any] = {"optimizer": "momentum, adamw"}
    for name in ("ddp, int4", "local_sgd, average", "slowmo over late sgp", "diloco, late"):
        case(f"{name}, momentum and adamw", SOME[name], **both)
    scaled = SOME["local_sgd, late, int8"]
    case("local_sgd, momentum and adamw, overflow", scaled, overflow=(3, 7, 10), **both)


def _skips() -> None:
    """Steps that a GradScaler skips, and backward passes that fail."""
    for name in ("ddp, int4", "slowmo over late sgp", "streaming_diloco", "easgd"):
        case(f"{name}, skips", SOME[name], overflow=(3, 7, 10))
    for name in ("ddp", "ddp, int4", "power_sgd", "diloco, late", "slowmo over late sgp"):
        shapes = MATRIX if name == "power_sgd" else SHAPES
        case(f"{name}, broken", SOME[name], broken=5, shapes=shapes)
    case("ddp, broken closure", SOME["ddp"], broken=5, closure=True)
    case("ddp, broken, overflow", SOME["ddp"], broken=5, overflow=(3, 7))


def _interrupted() -> None:
    """By a signal, wherever a step waits for another rank: in the backward pass, in a round, where
    a delayed round is folded, in an outer step, and in ``finish()``."""
    places = "ddp at 3; ddp, int4 at 3; local_sgd, average at 3; diloco, late at 5; sgp at 2"
    places += "; slowmo over late sgp at 5; streaming_diloco at 2; local_sgd, average at 11"
    for name, alarm in (place.split(" at ") for place in places.split("; ")):
        case(f"{name}, interrupted at {alarm}", SOME[name], 2, alarm=int(alarm), steps=10)


for _fill in (
    *(_rows, _coded, _delayed, _outer, _graphs, _replicas, _loops, _front_ends, _sharded),
    *(_elastic, _quorums, _automatic, _offloaded, _several, _skips, _interrupted),
):
    _fill()


# -- recorded ----


Recorded = dict[str, dict[str, str]]
"""By case and kind: the digests of its steps, ascending; see `written`."""


def written(trace: Trace) -> dict[str, str]:
    """As it is recorded: "=" for a digest that is the one before; "consensus" for all anchors,
    where there is no other model."""
    found = {}
    for kind, steps in trace.items():
        digests = [steps[t] for t in sorted(steps)]
        before = ["", *digests[:-1]]
        found[kind] = " ".join(
            "=" if own == last else own for own, last in zip(digests, before, strict=True)
        )
    if "anchor" in found and found["anchor"] == found["consensus"]:
        found["anchor"] = "consensus"
    return found


def as_written(text: str) -> list[str]:
    """The digests of which `written` made ``text``."""
    found: list[str] = []
    for word in text.split():
        found.append(found[-1] if word == "=" else word)
    return found


def processor() -> str:
    """Which kind of processor this is, as Linux says."""
    kind = r"^(?:vendor_id|cpu family|model|stepping)\s*: (.*)"
    return " ".join(re.findall(kind, Path("/proc/cpuinfo").read_text(), re.M)[:4])


def read(path: Path) -> Recorded:
    if not path.exists():
        return {}
    found: Recorded = json.loads(path.read_text())
    return found


def write(path: Path, recorded: Recorded) -> None:
    """One case a line, in the order of `CASES`."""
    names = [name for name in CASES if name in recorded]
    lines = [f"{json.dumps(name)}: {json.dumps(recorded[name])}" for name in names]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def differences(name: str, trace: Trace, wrong: list[Trace], recorded: dict[str, str]) -> list[str]:
    """One text for each kind that differs from what is recorded, or after resuming."""
    found = []
    for kind, steps in trace.items():
        text = recorded.get(kind, "")
        wanted = as_written(recorded.get(text, text))
        if not wanted:
            found.append(f"{name}: {kind}: not recorded")
            continue
        pairs = zip(sorted(steps), wanted, strict=False)
        first = next((t for t, want in pairs if steps[t] != want), None)
        if first is None and len(steps) != len(wanted):
            found.append(f"{name}: {kind}: {len(steps)} digests, {len(wanted)} recorded")
        elif first is not None:
            found.append(f"{name}: {kind}: first at step {first}")
    for kind in sorted({kind for trace in wrong for kind in trace}):
        first, way = min(min(trace[kind].items()) for trace in wrong if kind in trace)
        found.append(f"{name}: {kind}: first at step {first} (from {way})")
    return found


class Pools(dict[int, gloo.Pool]):
    """Pools of processes by the number of ranks, started when they are needed: the front ends take
    the default process group."""

    def __missing__(self, ranks: int) -> gloo.Pool:
        self[ranks] = gloo.Pool(ranks)
        return self[ranks]

    def drop(self, ranks: int) -> None:
        """After an error, in which connections may be lost, others take their place."""
        if ranks in self:
            self.pop(ranks).close()

    def close(self) -> None:
        for pool in self.values():
            pool.close()


def comparable(name: str, recorded: Recorded) -> bool:
    """Whether this machine's processor can give the ``recorded`` digests of this case: see the top
    of this file."""
    here = processor()
    if recorded.get(name, {}).get("processor", here) != here:
        return False
    takes_roots = re.search(r"dam|buffers|switch from", name) is not None
    return not takes_roots or "GenuineIntel" in here


def chosen(names: Sequence[str] | None) -> list[str]:
    """The cases of these names; all of them for none. Raises ``ValueError`` for an unknown one."""
    unknown = [name for name in names or () if name not in CASES]
    if unknown:
        raise ValueError(f"unknown case {unknown[0]!r}; the cases are:\n  " + "\n  ".join(CASES))
    return list(names or CASES)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Record or compare golden digests.")
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--simulated", action="store_true", help="leave the processes out")
    given = parser.parse_args(arguments)
    try:
        names = chosen(given.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"laconic in {Path(la.__file__).parent}", file=sys.stderr)
    if any(CASES[name].offload for name in names):
        late.set_up()  # before autograd is used
    recorded = read(given.file)
    pools = Pools()
    found: list[str] = []
    digests = 0
    try:
        for name in names:
            case = CASES[name]
            runs: dict[str, Callable[[], tuple[Trace, list[Trace]]]] = {}
            if not case.sharded and not case.alarm:
                runs[name] = partial(simulated, case)
            if case.sharded or (case.processes and not given.simulated):
                runs[f"{name} (processes)"] = partial(in_processes, name, pools)
            for number, (title, run) in enumerate(runs.items()):
                try:
                    trace, wrong = run()
                except Exception as error:
                    last = str(error).strip().splitlines()[-1:]
                    news = [f"{title}: raised {type(error).__name__}: {''.join(last)}"]
                    pools.drop(case.ranks)
                else:
                    if given.command == "record" and not number:
                        recorded[name] = written(trace)
                        if re.search("muon|outer", name):
                            recorded[name]["processor"] = processor()
                    digests += sum(map(len, trace.values()))
                    news = differences(title, trace, wrong, recorded.get(name, {}))
                found += news
                for line in news:
                    print(line, flush=True)
    finally:
        pools.close()
    if given.command == "record":
        write(given.file, recorded)
    verdict = f"{len(found)} differences" if found else "all equal"
    print(f"{len(names)} cases, {digests} digests, {verdict}")
    return 1 if found else 0


if __name__ == "__main__":
    from tests import golden  # processes find the functions there by name

    sys.exit(golden.main())
