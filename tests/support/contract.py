"""What holds for every row of the table of recipes, whatever the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import laconic as la
from laconic.parts import Fragment

from tests.references import problem
from tests.support import gloo, training
from tests.support.recipes import ROWS, Row
from tests.support.training import Job, build, values

STEPS = 12
Values = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """A training of the row ``name`` on ``workers`` processes, ``ranks`` to a worker, that is saved
    after step ``save``."""

    name: str
    workers: int
    ranks: int = 1
    optimizer: str = "nesterov"
    save: int = 5
    origin: Literal["threads", "processes"] = "threads"

    @property
    def row(self) -> Row:
        return ROWS[self.name]

    @property
    def job(self) -> Job:
        return self.row.job_of(self.workers, self.ranks, optimizer=self.optimizer, steps=STEPS)


@dataclass
class Ran:
    """What one process had: the parameters after each step, those inside ``consensus(mean=False)``
    after some, and the bytes that each step sent. At the save: the consensus and the optimizer's
    state. At the end: the consensus, what ``finish()`` left, and the names in the state."""

    x: list[Values] = field(default_factory=list)
    consensus: dict[int, Values] = field(default_factory=dict)
    sent: list[int] = field(default_factory=list)
    saved: Values = field(default_factory=dict)
    moments: list[torch.Tensor] = field(default_factory=list)
    agreed: Values = field(default_factory=dict)
    end: Values = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)


def names_in(state: Any, at: str = "") -> set[str]:
    """The paths of everything in nested states."""
    if isinstance(state, Mapping):
        return {k for key, value in state.items() for k in names_in(value, f"{at}.{key}")}
    if isinstance(state, (list, tuple)):
        return {k for key, value in enumerate(state) for k in names_in(value, f"{at}.{key}")}
    return {at}


def moments_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    return [t.clone() for s in states for t in s.values() if isinstance(t, torch.Tensor)]


def go(rank: int, setting: Setting, folder: Path, resume: bool, link: Any = None) -> Ran:
    """Train, and save on the way; or ``resume`` what was saved."""
    job, ran = setting.job, Ran()
    model, optimizer = build(job, rank)
    sync = la.attach(model, optimizer, job.recipe, link=link, **dict(job.options))
    if resume:
        found = la.load(folder, model, optimizer)
        assert found["step"] == sync.step == setting.save and found["rank"] == rank
    for t in range(sync.step + 1, job.steps + 1):
        before = sync.stats().bytes_sent
        training.step(job, model, optimizer, job.data()[rank][t - 1], t, sync)
        ran.sent.append(sync.stats().bytes_sent - before)
        ran.x.append(values(model))
        if t % 3 == 0 or t == job.steps:
            with sync.consensus(mean=False):
                ran.consensus[t] = values(model)
        if t == setting.save and not resume:
            with sync.consensus():
                ran.saved = values(model)
            la.save(folder, model, optimizer, others={"rank": rank})
            ran.moments = moments_of(optimizer)
    with sync.consensus():
        ran.agreed = values(model)
    assert same(values(model), ran.x[-1]), "the consensus has left something behind"
    ran.keys = names_in(sync.state_dict())
    sync.finish()
    ran.end = values(model)
    assert sync.step == job.steps
    sync.detach()
    return ran


def go_over(rank: int, setting: Setting, folder: Path, resume: bool) -> Ran:
    return go(rank, setting, folder, resume, gloo.link_of(setting.workers))


def same(one: Values, other: Values) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in problem.NAMES)


def gap(one: Values, other: Values) -> float:
    """NaN counts as infinity."""
    worst = max(float(np.abs(one[k] - other[k]).max()) for k in problem.NAMES)
    return worst if worst == worst else np.inf


def check(setting: Setting, folder: Path, pool: gloo.Pool) -> list[Ran]:
    """Train over one link, resume over the other; check both, and return the former."""
    threads = setting.origin == "threads"

    def over(processes: bool, resume: bool) -> list[Ran]:
        if processes:
            return pool.run(go_over, setting, folder, resume, ranks=setting.workers)
        return la.simulate(lambda rank: go(rank, setting, folder, resume), workers=setting.workers)

    first, then = over(not threads, False), over(threads, True)
    check_reference(setting, first)
    for one, other in zip(first, then, strict=True):  # bit for bit
        for a, b in zip(one.x[setting.save :], other.x, strict=True):
            assert same(a, b)
        assert all(same(one.consensus[t], x) for t, x in other.consensus.items())
        assert same(one.agreed, other.agreed) and same(one.end, other.end)
    mates = setting.workers if "equal" in setting.row.tags else setting.ranks
    for rank, ran in enumerate(first):
        assert ran.keys == first[0].keys
        assert same(ran.end, first[0].end) and same(ran.end, ran.agreed)
        other = first[rank // mates * mates]
        assert all(map(same, ran.x, other.x)), "what must be alike is not"
    check_bytes(setting, first if threads else then, 0 if threads else setting.save)
    return first


def check_reference(setting: Setting, runs: list[Ran]) -> None:
    row, job = setting.row, setting.job
    recipe = row.expected(job)
    if recipe is None:
        assert all(np.isfinite(x[k]).all() for ran in runs for x in ran.x for k in x)
        return
    trace = job.expected(recipe)
    for rank, ran in enumerate(runs):
        worker = rank // setting.ranks
        for t, x in enumerate(ran.x, 1):
            assert gap(x, trace.workers[t - 1][worker]) < row.bound, f"x after step {t}"
        for t, x in ran.consensus.items():
            assert gap(x, trace.consensus[t - 1]) < row.bound, f"consensus after step {t}"
        if "lags" not in row.tags:
            assert gap(ran.end, trace.consensus[-1]) < row.bound, "finish() has every step"


# -- bytes ----


def buckets_of(r: la.Round | la.GradientRound, job: Job) -> list[list[torch.Size]]:
    """The shapes of what the round sends together."""
    model, optimizer = build(job, 0)
    groups = [group["params"] for group in optimizer.param_groups]
    if isinstance(r, la.GradientRound):
        return [[p.shape for p in [*model.parameters()][::-1]]]
    if isinstance(r.part, Fragment):
        pieces = [
            [torch.Size([s.stop - s.start]) for s in group]
            for group in r.part.segments(model, groups)
        ]
    else:
        pieces = [[p.shape for p in group] for group in groups]
    joined = pieces if r.update.uses_lr else [[shape for group in pieces for shape in group]]
    return [shapes for shapes in joined if shapes]


def law(job: Job, t: int) -> int:
    """The bytes that each rank sends after step t, by `Exchange.cost`."""
    total = 0
    for r in job.recipe:
        n = dict(job.options)["group_size"] if r.over == "group" else job.workers
        for shapes in buckets_of(r, job) if r.when(t) and n > 1 else ():
            exchange = r.exchange.shaped(shapes)
            multiple = exchange.multiple(n)
            length = -(-sum(shape.numel() for shape in shapes) // multiple) * multiple
            total += exchange.cost(length, 8, n).bytes
            if getattr(r.update, "weight", False):
                total += 8  # push-sum's weight rides with each message
    return total


def check_bytes(setting: Setting, runs: list[Ran], start: int) -> None:
    """In the step after ``start`` ranks also compare their first gradients."""
    job, row = setting.job, setting.row
    if {"moments", "irregular"} & row.tags or setting.ranks > 1:
        return
    for ran in runs:
        for t, sent_then in enumerate(ran.sent[1:], start + 2):
            assert sent_then == law(job, t), f"bytes of step {t}"


# -- other workers ----


def check_others(setting: Setting, folder: Path, first: list[Ran], workers: int, lost: int) -> None:
    """So many workers go on from the save, the file of the rank ``lost`` (-1: none) deleted: from
    the consensus, with the optimizer's states that are left."""
    if lost >= 0:
        next(folder.glob(f"rank-{lost}-*.pt")).unlink()
    left = [rank for rank in range(setting.workers) if rank != lost]
    job = setting.row.job_of(workers, optimizer=setting.optimizer, steps=STEPS)

    def run(rank: int) -> Values:
        model, optimizer = build(job, rank)
        sync = la.attach(model, optimizer, job.recipe, **dict(job.options))
        found = la.load(folder, model, optimizer)
        own = rank if rank in left else left[rank % len(left)]
        assert found["step"] == sync.step == setting.save and found["rank"] == own
        loaded, moments = values(model), moments_of(optimizer)
        assert all(map(torch.equal, moments, first[own].moments))
        if lost < 0:
            assert gap(loaded, first[0].saved) < 1e-12
        with sync.consensus():
            assert gap(values(model), loaded) < 1e-12
        for t in range(sync.step + 1, STEPS + 1):
            training.step(job, model, optimizer, job.data()[rank][t - 1], t, sync)
        sync.finish()
        assert all(np.isfinite(v).all() for v in values(model).values())
        return {k: np.stack([loaded[k], values(model)[k]]) for k in loaded}

    found = la.simulate(run, workers=workers)
    assert all(same(x, found[0]) for x in found)
