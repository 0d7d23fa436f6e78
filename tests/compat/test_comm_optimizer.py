"""CommOptimizer: a torch optimizer in all respects, and the algorithms exactly."""

from __future__ import annotations

import copy
import json
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.algorithms.round import Recipe
from laconic.compat.comm_optimizer import KEY

from tests.references import gradients, parameters, problem
from tests.support import gloo, training
from tests.support.training import Job, build, largest_difference, plain_lr, same_bits

Trace = list[Any]
Parts = tuple[nn.Module, la.CommOptimizer]


# -- the algorithms: against plain loops, and against attach ----

ROWS: dict[str, tuple[tuple[Any, ...], la.Recipe, problem.Recipe, str]] = {
    "EASGD": (("EASGD", 4, 0.9), la.easgd(4), parameters.easgd(4), "silent"),
    "EASGD, pulled": (
        ("EASGD", 3, 0.5, 0.3),
        la.easgd(3, 0.5, pull=0.3),
        parameters.easgd(3, 0.5, 0.3),
        "silent",
    ),
    "LSGD, losses reported": (
        ("LSGD", 4, 0.4, 0.3),
        la.lsgd(4, local_period=0, pull=0.4, drift=0.3),
        parameters.lsgd(4, pull=0.4, drift=0.3),
        "reports",
    ),
    "LSGD, losses of closures": (
        ("LSGD", 3, 0.2),
        la.lsgd(3, local_period=0, pull=0.2, drift=0.0),
        parameters.lsgd(3, pull=0.2, drift=0.0),
        "closure",
    ),
    "LSGD, gradients": (
        ("LSGD", 4, 0.4, 0.3),
        la.lsgd(4, local_period=0, pull=0.4, drift=0.3),
        parameters.lsgd(4, pull=0.4, drift=0.3, score="gradient", score_includes_pulls=False),
        "silent",
    ),
    "DDP": (("DDP",), la.ddp(), gradients.DDP(), "silent"),
}
"""By name: what follows world_size, the recipe, the reference; whether losses are reported."""


def job_of(row: str, workers: int = 3, steps: int = 20) -> Job:
    _, recipe, _, way = ROWS[row]
    return Job(recipe, workers, steps, "nesterov", plain_lr, reports=way != "silent")


def comm_optimizer(
    row: str, inner: torch.optim.Optimizer, workers: int, **options: Any
) -> la.CommOptimizer:
    name, *numbers = ROWS[row][0]
    return la.CommOptimizer(inner, name, workers, *numbers, **options)


def made(row: str, job: Job, rank: int, **options: Any) -> Parts:
    model, inner = build(job, rank)
    return model, comm_optimizer(row, inner, job.workers, **options)


def train_step(row: str, job: Job, rank: int, parts: Parts, t: int) -> Any:
    """One step; returns (parameters, consensus) after it."""
    model, optimizer = parts
    way = ROWS[row][3]
    for group, options in enumerate(optimizer.param_groups):
        options["lr"] = job.lr(group, t)
    x, y = (torch.from_numpy(a) for a in job.data()[rank][t - 1])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    if way == "closure":
        assert isinstance(optimizer.step(closure), Tensor)
    else:
        loss = closure()
        if way == "reports":
            optimizer.report_loss(loss)
        optimizer.step()
    return record(parts)


def record(parts: Parts) -> Any:
    model, optimizer = parts
    sync = optimizer.sync
    assert sync is not None
    with sync.consensus(mean=False):
        consensus = training.values(model)
    return training.values(model), consensus


def train(row: str, job: Job, rank: int, **options: Any) -> Trace:
    parts = made(row, job, rank, **options)
    return [train_step(row, job, rank, parts, t) for t in range(1, job.steps + 1)]


@pytest.mark.parametrize("row", ROWS)
def test_equals_the_plain_loop_and_attach(pool: gloo.Pool, row: str) -> None:
    """The same bits as attach gives, and over processes."""
    job = job_of(row)
    runs = la.simulate(partial(train, row, job), workers=3)
    assert largest_difference(runs, job.expected(ROWS[row][2])) < 1e-10
    assert same_bits(runs, training.simulated(job))
    assert same_bits(runs, pool.run(train_over_gloo, row, job, ranks=3))


def train_over_gloo(rank: int, row: str, job: Job) -> Trace:
    return train(row, job, rank, link=gloo.link_of(job.workers))


# -- a small problem ----


def small(rank: int, momentum: float = 0.9) -> tuple[nn.Module, torch.optim.SGD]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)


def loss_of(model: nn.Module, rank: int, t: int) -> Tensor:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * rank + t))
    loss: Tensor = model(x).square().mean()
    return loss


def steps(parts: Parts, rank: int, first: int, last: int) -> Iterator[int]:
    model, optimizer = parts
    for t in range(first, last + 1):
        optimizer.zero_grad()
        loss_of(model, rank, t).backward()
        optimizer.step()
        yield t


flat = training.flat


# -- when, and who sends ----


@pytest.mark.parametrize("name", ["EASGD", "LSGD"])
def test_a_period_of_4_means_rounds_after_steps_4_8_and_12(name: str) -> None:
    """By the ledger: what was sent in each step, by kind. After the first step, once, ranks ask
    whether they all have the same batches."""

    def run(rank: int) -> tuple[list[int], dict[int, dict[str, int]]]:
        parts = small(rank)
        optimizer = la.CommOptimizer(parts[1], name, 2, 4, 0.5, 0.2)
        before, sent, rounds = optimizer.stats(), {}, []
        for t in steps((parts[0], optimizer), rank, 1, 14):
            now = optimizer.stats()
            kinds = now.bytes_by_collective
            new = {k: n - before.bytes_by_collective.get(k, 0) for k, n in kinds.items()}
            sent[t] = {k: n for k, n in new.items() if n}
            rounds += [t] * (now.rounds - before.rounds)
            before = now
        return rounds, sent

    runs = la.simulate(run, workers=2)
    for rounds, sent in runs:
        assert rounds == [4, 8, 12]
        assert sent.pop(1).keys() == {"agree", "gather"}
        assert [t for t, kinds in sent.items() if kinds] == [4, 8, 12]
    size = 4 * 30  # 29 parameters, padded for two ranks
    for t in (4, 8, 12):
        both = [sent[t] for _, sent in runs]
        if name == "EASGD":
            assert both == [{"mean": size}] * 2
        else:  # everyone's score, and the leader's x
            assert all(kinds["gather"] == 16 for kinds in both)
            assert sum(kinds.get("broadcast", 0) for kinds in both) == size


def watched(kind: type[la.DistOptimizer]) -> type[la.DistOptimizer]:
    class Watched(kind):  # type: ignore[valid-type, misc]
        log: list[tuple[str, bool, bool]]

        def _watch(self, name: str, part: Callable[[], None]) -> None:
            params = [p for g in self.local_optimizer.param_groups for p in g["params"]]
            x, sent = [p.detach().clone() for p in params], self.stats().bytes_sent
            part()
            moved = any(not torch.equal(p, q) for p, q in zip(params, x, strict=True))
            self.log.append((name, moved, self.stats().bytes_sent > sent))

        def local_pulling_step(self) -> None:
            self._watch("pull", super().local_pulling_step)

        def dist_train_step(self) -> None:
            self._watch("observe", super().dist_train_step)

        def comm_train_step(self) -> None:
            self._watch("communicate", super().comm_train_step)

    Watched.log = []
    return Watched


@pytest.mark.parametrize("kind", [la.EASGD, la.LSGD])
def test_one_part_moves_one_sends_and_one_does_neither(kind: type[la.DistOptimizer]) -> None:
    """Driven by hand, as a loop that has no CommOptimizer does it."""

    def run(rank: int) -> list[tuple[str, bool, bool]]:
        model, inner = small(rank)
        dist = watched(kind)(inner, 2, 0.3, 0.5, 3)
        counters = []
        for t in range(1, 8):
            inner.zero_grad()
            loss_of(model, rank, t).backward()
            inner.step()
            dist.step()
            counters.append(dist.counter)
        assert counters == [1, 2, 0, 1, 2, 0, 1]
        dist.comm_train_step()
        assert dist.stats().rounds == 3, "whenever it is called"
        return dist.log  # type: ignore[attr-defined, no-any-return]

    logs = la.simulate(run, workers=2)
    for log in logs:
        parts = [name for name, _, _ in log]
        assert parts[:7] == [*["observe", "pull"] * 3, "communicate"] and len(parts) == 17
        for name, moved, sends in log:
            assert sends == (name == "communicate")
            assert moved == (name == "pull") or name == "communicate"
    assert any(moved for log in logs for name, moved, _ in log if name == "communicate")


class Halves(la.DistOptimizer):
    """Rounds of its own and a statistic of its own, by overriding two of the three."""

    total = 0.0

    def dist_train_step(self) -> None:
        params = [p for g in self.local_optimizer.param_groups for p in g["params"]]
        self.total += sum(float(p.grad.abs().sum()) for p in params)

    @torch.no_grad()
    def comm_train_step(self) -> None:
        assert self.sync is not None
        for group in self.local_optimizer.param_groups:
            for p in group["params"]:
                p.mul_(self.dist_pulling_strength * self.sync.mean(1.0))


class NoRounds(la.DistOptimizer):
    pass


def test_an_algorithm_of_ones_own() -> None:
    def run(rank: int) -> float:
        model, inner = small(0, momentum=0.0)
        optimizer = la.CommOptimizer(inner, Halves, 2, 2, 0.5)
        for _ in steps((model, optimizer), rank, 1, 1):
            pass
        assert isinstance(optimizer.dist_optimizer, Halves) and optimizer.dist_optimizer.total > 0
        before = flat(model)
        model.zero_grad()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        assert torch.equal(flat(model), before / 2)
        with pytest.raises(NotImplementedError, match="must define recipe"):
            NoRounds(small(0)[1], 2, 0.0, 0.5, 2)
        return optimizer.dist_optimizer.total

    assert len(set(la.simulate(run, workers=2))) == 2


GUIDE = """
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr = args.lr, momentum = args.mom, \
weight_decay=args.wd, nesterov=True)
optimizer = CommOptimizer(optimizer, dist_optim_name=args.dist_optim_name, \
world_size = world_size, comm_period=args.comm_period, dist_pulling_strength=args.c, \
local_pulling_strength=args.p)
"""


@pytest.mark.filterwarnings("ignore:these arguments have no effect")
@pytest.mark.parametrize("name", ["EASGD", "LSGD", "DDP", None])
def test_the_example_of_the_guide_as_printed(name: str | None) -> None:
    args = SimpleNamespace(lr=0.05, mom=0.9, wd=1e-4, c=0.5, p=0.1, comm_period=4)
    args.dist_optim_name = name

    def run(rank: int) -> tuple[float, float, Tensor]:
        model = small(rank)[0]
        place: dict[str, Any] = {"model": model, "device": "cpu", "world_size": 3, "args": args}
        exec(GUIDE, {"torch": torch, "CommOptimizer": la.CommOptimizer}, place)
        optimizer = place["optimizer"]
        losses = []
        for t in range(1, 41):
            loss = loss_of(model, rank, t)
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        optimizer.finish()
        return sum(losses[:5]), sum(losses[-5:]), flat(model)

    runs = la.simulate(run, workers=3)
    assert all(last < first / 2 for first, last, _ in runs)
    alike = all(torch.equal(x, runs[0][2]) for _, _, x in runs)
    assert alike == (name is not None)


# -- a torch optimizer in all respects ----

Schedule = Callable[[torch.optim.Optimizer], Any]
SCHEDULERS: dict[str, Schedule] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 0.9**t),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=20),
}


def scheduled(
    optimizer: torch.optim.Optimizer, model: nn.Module, scheduler: Any
) -> list[tuple[float, float]]:
    seen = []
    for t in range(1, 11):
        optimizer.zero_grad()
        loss_of(model, 0, t).backward()
        optimizer.step()
        plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        scheduler.step(*([float(t // 4)] if plateau else []))
        group = optimizer.param_groups[0]
        seen.append((group["lr"], group["momentum"]))
    return seen


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_made_before_and_after(kind: str, when: str) -> None:
    """Warnings are errors here, those about the order of calls included."""
    model, inner = small(0)
    expected = scheduled(inner, model, SCHEDULERS[kind](inner))
    bare = flat(model)

    def run(rank: int) -> None:
        model, inner = small(0)
        if when == "before":
            scheduler = SCHEDULERS[kind](inner)
            optimizer = la.CommOptimizer(inner, "EASGD", 1, 4, 0.5)
        else:
            optimizer = la.CommOptimizer(inner, "EASGD", 1, 20, 0.5)
            scheduler = SCHEDULERS[kind](optimizer)
        assert scheduled(optimizer, model, scheduler) == expected
        assert len({lr for lr, _ in expected}) > 1
        assert torch.equal(flat(model), bare) == (when == "after"), "the round after step 4"

    la.simulate(run, workers=1)


def test_hooks_groups_and_state_are_those_of_one_optimizer() -> None:
    called: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: called.append(name)

    def run(rank: int) -> None:
        model, inner = small(0)
        optimizer = la.CommOptimizer(inner, "EASGD", 1, 2, 0.5)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.optimizer is inner and optimizer.local_optimizer is inner
        optimizer.register_step_pre_hook(note("before"))
        optimizer.register_step_post_hook(note("after"))
        optimizer.register_state_dict_pre_hook(note("saving"))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})
        optimizer.register_load_state_dict_pre_hook(
            lambda _, state: called.append(f"loading {state.pop('more')}")
        )
        optimizer.register_load_state_dict_post_hook(note("loaded"))
        inner.register_step_post_hook(note("inner"))
        for _ in steps((model, optimizer), rank, 1, 2):
            pass
        assert called == ["before", "inner", "after"] * 2
        called.clear()
        saved = optimizer.state_dict()
        assert saved["more"] == 1 and len(saved["state"]) == 6
        optimizer.load_state_dict(saved)
        assert called == ["saving", "loading 1", "loaded"] and saved["more"] == 1
        del saved["more"]
        inner.load_state_dict(saved)
        for name in ("param_groups", "state", "defaults"):
            assert getattr(optimizer, name) is getattr(inner, name)
        optimizer.param_groups[0]["lr"] = 0.125
        assert inner.param_groups[0]["lr"] == 0.125
        optimizer.param_groups = inner.param_groups[:]
        optimizer.state = copy.copy(inner.state)
        assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
        p = next(model.parameters())
        optimizer.zero_grad(set_to_none=False)
        assert p.grad is not None and not p.grad.any()
        optimizer.zero_grad()
        assert p.grad is None
        assert "lr: 0.125" in repr(optimizer)

    la.simulate(run, workers=1)


class Particular(torch.optim.SGD):
    """An optimizer that does something about its groups."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group({**param_group, "label": "particular"})


def test_groups_added_to_either_join() -> None:
    def run(rank: int) -> Tensor:
        model, _ = small(rank)
        inner = Particular(model.parameters(), lr=0.05, momentum=0.9)
        first = nn.Parameter(torch.full((2,), float(rank + 1)))
        second = nn.Parameter(torch.full((3,), float(rank + 5)))
        optimizer = la.CommOptimizer(inner, "EASGD", 2, 2, 1.0, model=model)
        optimizer.add_param_group({"params": [first], "lr": 0.5})
        assert inner.param_groups[1]["lr"] == 0.5 and inner.param_groups[1]["momentum"] == 0.9
        for _ in steps((model, optimizer), rank, 1, 2):
            pass
        inner.add_param_group({"params": second})
        with pytest.raises(ValueError, match="more than one"):
            optimizer.add_param_group(inner.param_groups[2])
        assert [g["label"] for g in optimizer.param_groups] == ["particular"] * 3
        for _ in steps((model, optimizer), rank, 3, 4):
            pass
        assert optimizer.stats().rounds == 4, "parameters and buffers, twice"
        return torch.cat([first.detach(), second.detach()])

    for x in la.simulate(run, workers=2):
        assert x.tolist() == [1.0, 1.0, 5.0, 5.0, 5.0], "rank 0's"


def test_whatever_the_optimizer_holds_starts_from_rank_0() -> None:
    """Also what is not of the model, and where none is given; a plain tensor, too."""

    def run(rank: int, whole: bool) -> tuple[Tensor, Tensor]:
        model = small(rank)[0]
        more = torch.full((3,), float(rank), requires_grad=True)
        inner = torch.optim.SGD([*model.parameters(), more], lr=0.1)
        optimizer = la.CommOptimizer(inner, "DDP", 2, model=model if whole else None)
        start = torch.cat([flat(model), more.detach().clone()])
        (loss_of(model, rank, 1) + (more * (rank + 1)).sum()).backward()
        assert more.grad is not None and more.grad.tolist() == [1.5] * 3, "during backward"
        optimizer.step()
        return start, torch.cat([flat(model), more.detach()])

    for whole in (True, False):
        (a, x), (b, y) = la.simulate(partial(run, whole=whole), workers=2)
        assert torch.equal(a, b) and torch.equal(x, y) and not torch.equal(a, x)


def test_buffers_are_averaged_where_the_model_is_given() -> None:
    def run(rank: int, whole: bool) -> tuple[list[Tensor], list[Tensor]]:
        model, inner = small(rank)
        optimizer = la.CommOptimizer(inner, "EASGD", 2, 2, 0.5, model=model if whole else None)
        for _ in steps((model, optimizer), rank, 1, 2):
            pass
        buffers = [b.clone() for b in model.buffers()]
        for _ in steps((model, optimizer), rank, 3, 3):
            pass
        optimizer.finish()
        return buffers, [*model.buffers(), *model.parameters()]

    for whole in (True, False):
        (a, x), (b, y) = la.simulate(partial(run, whole=whole), workers=2)
        assert all(map(torch.equal, a, b)) == whole and all(map(torch.equal, x, y)) == whole


def test_lbfgs_with_its_closure() -> None:
    def run(rank: int) -> float:
        model = small(rank)[0].eval()
        inner = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        optimizer = la.CommOptimizer(inner, "LSGD", 2, 2, 0.5)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, rank, 1)
            loss.backward()
            return loss

        losses: list[float] = [optimizer.step(closure).item() for _ in range(6)]
        assert optimizer.stats().rounds == 3
        return losses[-1] / losses[0]

    assert max(la.simulate(run, workers=2)) < 0.5


def test_a_loss_counts_once_for_each_step() -> None:
    def run(rank: int) -> list[float]:
        model, inner = small(0)
        optimizer = la.CommOptimizer(inner, "LSGD", 1, 4, 0.5)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 0, 1)
            loss.backward()
            return loss

        optimizer.report_loss(7.0)
        optimizer.step(closure)
        second = optimizer.step(closure)
        kept: list[float] = optimizer.state_dict()[KEY]["sync"]["scores"]["losses"]
        assert kept == [7.0, second.item()]
        return kept

    la.simulate(run, workers=1)


def test_nothing_needs_no_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inner = small(0)
    twin, bare = small(0)
    optimizer = la.CommOptimizer(inner, None, world_size=8)
    for t in steps((model, optimizer), 0, 1, 5):
        bare.zero_grad()
        loss_of(twin, 0, t).backward()
        bare.step()
    with optimizer.consensus():
        optimizer.report_loss(1.0)
    optimizer.finish()
    assert torch.equal(flat(model), flat(twin))
    assert optimizer.sync is None and optimizer.dist_optimizer is None
    assert optimizer.stats().bytes_sent == 0 and KEY not in optimizer.state_dict()
    with pytest.warns(UserWarning, match="is ignored"):
        optimizer.load_state_dict({**bare.state_dict(), KEY: {"counter": 1, "sync": {}}})


# -- GradScaler ----


def scaled_step(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    params: list[nn.Parameter],
    loss: Tensor,
    clips: bool,
) -> None:
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if clips:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, 0.05)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize(("clips", "fused"), [(False, False), (False, True), (True, False)])
def test_a_scaler_does_what_it_does_without_the_wrapper(clips: bool, fused: bool) -> None:
    """A scale whose inverse is rounded, and two overflows."""

    def run(wrap: bool) -> tuple[Tensor, list[Tensor], float]:
        model = small(0)[0]
        optimizer: torch.optim.Optimizer
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
        if wrap:
            optimizer = la.CommOptimizer(optimizer, None, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=3.0, growth_interval=3, growth_factor=1.7)
        grads = []
        for t in range(1, 12):
            factor = math.inf if t in (2, 7) else 1.0
            loss = loss_of(model, 0, t) * factor
            scaled_step(scaler, optimizer, list(model.parameters()), loss, clips)
            grads += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert "grad_scale" not in vars(getattr(optimizer, "optimizer", optimizer))
        return flat(model), grads, scaler.get_scale()

    bare, wrapped = run(False), run(True)
    assert torch.equal(bare[0], wrapped[0]) and bare[2] == wrapped[2] != 3.0
    assert all(
        torch.equal(g, h) for g, h in zip(bare[1], wrapped[1], strict=True) if g.isfinite().all()
    )


def overflowing(
    rank: int, name: str, attached: bool, clips: bool, link: la.links.Link | None
) -> tuple[int, int, Tensor, int]:
    """Rank 1 alone overflows in step 3, in which a group joins, and takes one step less."""
    model, inner = small(rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer: torch.optim.Optimizer = inner
    taken: list[int] = []
    inner.register_step_post_hook(lambda *_: taken.append(1))
    if attached:
        recipe = la.easgd(4, 0.5, pull=0.2)
        if name == "LSGD":
            recipe = la.lsgd(4, local_period=0, pull=0.5, drift=0.2)
        sync = la.attach(model, inner, recipe, scaler=scaler, link=link)
    else:
        comm = la.CommOptimizer(inner, name, 2, 4, 0.5, 0.2, model=model, link=link)
        optimizer, found = comm, comm.sync
        assert found is not None
        sync = found
    for t in range(1, 10):
        factor = math.inf if (rank, t) == (1, 3) else 1.0
        if t == 3:
            more = nn.Parameter(torch.full((2,), float(rank + 1)))
            optimizer.add_param_group({"params": [more]})
        params = list(model.parameters())
        scaled_step(scaler, optimizer, params, loss_of(model, rank, t) * factor, clips)
    sync.finish()
    assert more.tolist() == [1.0, 1.0], "rank 0's"
    return sync.step, len(taken), flat(model), sync.stats().rounds


def overflowing_over_gloo(rank: int, name: str, clips: bool) -> Any:
    return overflowing(rank, name, False, clips, gloo.link_of(2))


@pytest.mark.parametrize(("name", "clips"), [("EASGD", False), ("LSGD", True)])
def test_steps_that_a_scaler_skips_on_one_rank_count(
    name: str, clips: bool, pool: gloo.Pool
) -> None:
    task = partial(overflowing, name=name, clips=clips, link=None)
    expected = la.simulate(partial(task, attached=True), workers=2)
    threads = la.simulate(partial(task, attached=False), workers=2)
    processes = pool.run(overflowing_over_gloo, name, clips, ranks=2)
    assert [taken for _, taken, _, _ in expected] == [9, 8]
    for runs in (threads, processes):
        for own, other in zip(runs, expected, strict=True):
            assert own[0] == 9 and own[1] == other[1] and own[3] == 4
            assert torch.equal(own[2], other[2]) and bool(own[2].isfinite().all())


def test_a_closure_is_not_unscaled() -> None:
    model, inner = small(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model, 0, 1)).backward()
    with pytest.raises(ValueError, match="closure"):
        scaler.step(la.CommOptimizer(inner, None, 1), lambda: 0.0)


# -- saving and copying ----


def test_an_optimizers_state_alone_starts_communication_afresh() -> None:
    """From the loaded parameters, that is: the old center would pull back to before."""

    def run(rank: int) -> tuple[Tensor, Tensor]:
        model, inner = small(rank)
        optimizer = la.CommOptimizer(inner, "EASGD", 2, 4, 1.0, model=model)
        for _ in steps((model, optimizer), rank, 1, 6):
            pass
        fresh, other = small(rank)
        state = {k: v for k, v in optimizer.state_dict().items() if k != KEY}
        again = la.CommOptimizer(other, "EASGD", 2, 4, 1.0, model=fresh)
        fresh.load_state_dict(model.state_dict())
        with pytest.warns(UserWarning, match="communication starts again"):
            again.load_state_dict(state)
        assert again.sync is not None and again.sync.step == 0
        assert again.dist_optimizer is not None and again.dist_optimizer.counter == 0
        own = [v["momentum_buffer"] for v in inner.state.values()]
        loaded = [v["momentum_buffer"] for v in other.state.values()]
        assert all(map(torch.equal, own, loaded))
        start = flat(fresh)
        with again.consensus():
            assert torch.equal(flat(fresh), start), "the center is where they are"
        for _ in steps((fresh, again), rank, 7, 10):
            pass
        assert again.stats().rounds == 2
        return start, flat(model)

    (a, x), (b, y) = la.simulate(run, workers=2)
    assert torch.equal(a, b) and torch.equal(a, x) and not torch.equal(x, y)


def refused_loading(rank: int, copied: bool, link: la.links.Link | None = None) -> str:
    model, inner = small(0)
    optimizer = la.CommOptimizer(inner, "EASGD", 2, 4, 0.5, link=link)
    for _ in steps((model, optimizer), rank, 1, 2):
        pass
    state = optimizer.state_dict()
    if rank == 1:
        del state[KEY]
    if copied:
        model, optimizer = copy.deepcopy((model, optimizer))
    with warnings.catch_warnings(), pytest.raises(ValueError) as caught:
        warnings.simplefilter("ignore")
        optimizer.load_state_dict(state)
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("copied", [False, True])
def test_state_on_some_ranks_alone_is_an_error_on_all(copied: bool) -> None:
    texts = la.simulate(partial(refused_loading, copied=copied), workers=2)
    assert all("some ranks load communication state" in text for text in texts)


def test_the_state_of_other_parameters_is_refused() -> None:
    def run(rank: int) -> str:
        model, inner = small(0)
        optimizer = la.CommOptimizer(inner, "EASGD", 2, 4, 0.5)
        for _ in steps((model, optimizer), rank, 1, 2):
            pass
        state, sync = optimizer.state_dict(), optimizer.sync
        copied = copy.deepcopy((model, optimizer))
        for parts in ((model, optimizer), copied):
            with torch.no_grad():
                next(parts[0].parameters()).add_(1.0)
        with pytest.raises(ValueError, match="differ from those saved with this state") as caught:
            optimizer.load_state_dict(state)
        assert optimizer.sync is sync
        for _ in range(2):
            with pytest.raises(ValueError, match="differ from those saved with this state"):
                copied[1].step()
        assert copied[1].sync is None
        return str(caught.value)

    assert len(set(la.simulate(run, workers=2))) == 1


COPIES: dict[str, Callable[[Parts], Parts]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda parts: pickle.loads(pickle.dumps(parts)),
    "a copy of a copy": lambda parts: copy.deepcopy(pickle.loads(pickle.dumps(parts))),
}


def copies(
    rank: int, row: str, job: Job, how: str, link: la.links.Link | None = None
) -> tuple[Trace, Trace]:
    """The original and a copy after step 6, which go on in turn."""
    parts = made(row, job, rank, link=link)
    for t in range(1, 7):
        train_step(row, job, rank, parts, t)
    other = COPIES[how](parts)
    held = [p for group in other[1].param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in other[0].parameters()}
    assert other[1].optimizer is not parts[1].optimizer
    assert other[1].sync is None and other[1].stats().bytes_sent == 0
    before = other[1].state_dict()[KEY]["sync"]["step"]
    assert before == parts[1].state_dict()[KEY]["sync"]["step"] == 6
    traces: tuple[Trace, Trace] = ([], [])
    for t in range(7, 14):
        for trace, which in zip(traces, (parts, other), strict=True):
            trace.append(train_step(row, job, rank, which, t))
    return traces


@pytest.mark.parametrize(
    ("row", "how"),
    [
        ("EASGD, pulled", "deepcopy"),
        ("LSGD, losses reported", "pickle"),
        ("LSGD, gradients", "a copy of a copy"),
        ("DDP", "deepcopy"),
    ],
)
def test_a_copy_goes_on_as_the_original(row: str, how: str) -> None:
    job = job_of(row, 3)
    runs = la.simulate(partial(copies, row=row, job=job, how=how), workers=3)
    assert same_bits([own for own, _ in runs], [other for _, other in runs])
    whole = la.simulate(partial(train, row, job), workers=3)
    assert same_bits([run[6:13] for run in whole], [own for own, _ in runs])


def test_copies_in_processes(pool: gloo.Pool) -> None:
    """They make links of their own."""
    job = job_of("EASGD, pulled", 4)
    runs = pool.run(copies, "EASGD, pulled", job, "pickle", ranks=4)
    assert same_bits([own for own, _ in runs], [other for _, other in runs])


def test_a_copy_without_other_ranks_cannot_step() -> None:
    def run(rank: int) -> bytes:
        parts = small(rank)
        optimizer = la.CommOptimizer(parts[1], "EASGD", 1, 4, 0.5)
        return pickle.dumps((parts[0], optimizer))

    model, optimizer = pickle.loads(la.simulate(run, workers=1)[0])
    before = flat(model)
    loss_of(model, 0, 1).backward()
    with pytest.raises(ValueError, match="no process group"):
        optimizer.step()
    assert torch.equal(flat(model), before)


# -- what is refused ----

BAD: list[tuple[dict[str, Any], str]] = [
    ({"dist_optim_name": "ADAM"}, r"must be one of 'EASGD', 'LSGD', 'DDP', not 'ADAM'"),
    ({"dist_optim_name": nn.Module}, r"dist_optim_name \(or None\) must be one of"),
    ({"comm_period": None}, "comm_period must be an integer of at least 1"),
    ({"comm_period": 0}, "comm_period must be an integer of at least 1"),
    ({"comm_period": 0.9}, "comm_period"),  # the strength where the period stands
    ({"dist_pulling_strength": None}, "dist_pulling_strength must be"),
    ({"dist_pulling_strength": 0.0}, "dist_pulling_strength must be .* greater than 0"),
    ({"dist_pulling_strength": 1.5}, "dist_pulling_strength must be .* most 1"),
    ({"dist_optim_name": "LSGD", "dist_pulling_strength": 1.0}, "must be .* below 1"),
    ({"local_pulling_strength": 1.0}, "local_pulling_strength must be"),
    ({"local_pulling_strength": -0.1}, "local_pulling_strength must be"),
    ({"world_size": 0}, "world_size must be an integer of at least 1"),
    ({"world_size": 3}, r"world_size must be .* 2: .* \[3, 3\]"),
    ({"timeout": 0.0}, "timeout must be"),
    ({"model": 3}, "model must be a torch.nn.Module or None, not 3"),
    ({"optimizer": 3}, "optimizer must be a torch.optim.Optimizer"),
]


def test_bad_arguments_are_refused_at_construction() -> None:
    def run(rank: int) -> None:
        for changed, pattern in BAD:
            options: dict[str, Any] = {
                "optimizer": small(0)[1],
                "dist_optim_name": "EASGD",
                "world_size": 2,
                "comm_period": 4,
                "dist_pulling_strength": 0.5,
            }
            with pytest.raises(ValueError, match=pattern):
                la.CommOptimizer(**{**options, **changed})

    la.simulate(run, workers=2)


@pytest.mark.filterwarnings("ignore:there is one node only")
def test_one_optimizer_is_followed_once() -> None:
    def run(rank: int) -> None:
        model, inner = small(0)
        optimizer = la.CommOptimizer(inner, "EASGD", 1, 4, 0.5)
        with pytest.raises(ValueError, match="not a CommOptimizer"):
            la.CommOptimizer(optimizer, "EASGD", 1, 4, 0.5)
        with pytest.raises(ValueError, match="attached already"):
            la.CommOptimizer(inner, "EASGD", 1, 4, 0.5)
        for each in (inner, optimizer):
            with pytest.raises(ValueError, match="attached already"):
                la.attach(model, each, la.easgd(4))
        with pytest.raises(ValueError, match="attached already"):
            la.SlowMoDistributedDataParallel(model, 1).bind(optimizer)
        with pytest.raises(ValueError, match="local optimizer must be"):
            la.EASGD(model, 1, 0.0, 0.5, 4)  # type: ignore[arg-type]
        meta = torch.optim.SGD(nn.Linear(2, 2, device="meta").parameters())
        with pytest.raises(ValueError, match="meta"):
            la.CommOptimizer(meta, "EASGD", 1, 4, 0.5)

    la.simulate(run, workers=1)


UNLIKE: list[tuple[tuple[Any, ...], str]] = [
    (("LSGD", 2, 4, 0.5), "attach something other"),
    (("DDP", 2), "attach something other"),
    (("EASGD", 2, 5, 0.5), "attach something other"),
    (("EASGD", 2, 4, 0.6), "attach something other"),
    (("EASGD", 2, 4, 0.5, 0.1), "attach something other"),
    (("EASGD", 3, 4, 0.5), r"must be the number of ranks, 2: .* \[2, 3\]"),
]


def unlike(rank: int, over_gloo: bool = True) -> list[str]:
    texts = []
    for arguments, pattern in UNLIKE:
        own: tuple[Any, ...] = arguments if rank == 1 else ("EASGD", 2, 4, 0.5)
        link = gloo.link_of(2) if over_gloo else None
        with pytest.raises(ValueError, match=pattern) as caught:
            la.CommOptimizer(small(0)[1], *own, link=link)
        texts.append(str(caught.value))
    return texts


def test_arguments_that_differ_are_an_error_on_every_rank(pool: gloo.Pool) -> None:
    one, other = la.simulate(partial(unlike, over_gloo=False), workers=2)
    assert one == other and pool.run(unlike, ranks=2) == [one, other]


def test_a_recipe_of_ones_own() -> None:
    class Averaged(la.DistOptimizer):
        def recipe(self) -> Recipe:
            return la.local_sgd(self.comm_period)

    def run(rank: int) -> list[Tensor]:
        model, inner = small(rank)
        optimizer = la.CommOptimizer(inner, Averaged, 2, 3)
        return [flat(model) for _ in steps((model, optimizer), rank, 1, 6)]

    one, two = la.simulate(run, workers=2)
    assert [torch.equal(x, y) for x, y in zip(one, two, strict=True)] == [False, False, True] * 2


# -- what is refused, so that nothing goes wrong in silence ----


def test_what_would_go_wrong_in_silence_is_an_error() -> None:
    """Steps of the inner optimizer alone would communicate nothing; and the center would pull back
    to what was there before weights were loaded."""

    def run(rank: int) -> None:
        model, inner = small(rank)
        optimizer = la.CommOptimizer(inner, "EASGD", 2, 2, 0.5)
        for _ in steps((model, optimizer), rank, 1, 3):
            pass
        inner.step()
        with pytest.raises(ValueError, match="was stepped twice in a row"):
            inner.step()
        model, inner = small(rank)
        optimizer = la.CommOptimizer(inner, "EASGD", 2, 2, 0.5)
        with optimizer.consensus():
            pass  # writes parameters and puts them back
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
        with pytest.raises(ValueError, match="load weights before wrapping the optimizer"):
            optimizer.step()

    la.simulate(run, workers=2)


def test_rounds_that_it_cannot_run_are_refused() -> None:
    class Own(la.DistOptimizer):
        given: la.Recipe = ()

        def recipe(self) -> la.Recipe:
            return Own.given

    inner = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)

    def run(rank: int) -> None:
        slow = la.slowmo(la.local_sgd(2), period=4, momentum=0.5)
        for Own.given in (la.local_sgd(4, delay=1), slow, la.hierarchical(2, 4)):
            with pytest.raises(ValueError, match="rounds must all run every comm_period=4 steps"):
                Own(inner, 1, 0.0, 0.5, 4)

    la.simulate(run, workers=1)


def test_detached_it_is_the_inner_optimizer(tmp_path: Path) -> None:
    """Until then metrics hear of every step."""

    def run(rank: int) -> tuple[int, Tensor]:
        model, inner = small(rank)
        optimizer = la.CommOptimizer(inner, "EASGD", 2, 2, 0.5)
        assert optimizer.sync is not None
        if rank == 0:
            optimizer.sync.record([la.JsonLines(tmp_path / "run.jsonl", every=0.0)])
        for _ in steps((model, optimizer), rank, 1, 4):
            pass
        optimizer.detach()
        before = optimizer.stats().bytes_sent
        for _ in steps((model, optimizer), rank, 5, 8):
            pass
        assert optimizer.stats().bytes_sent == before
        return optimizer.stats().rounds, flat(model)

    (rounds, a), (_, b) = la.simulate(run, workers=2)
    assert rounds == 2 and not torch.equal(a, b)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "steps"] == [1, 2, 3, 4]


class Named(la.CommOptimizer):
    name = ""


def test_a_subclass_keeps_its_own_attributes_in_a_copy() -> None:
    inner = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    optimizer = Named(inner, None, 1)
    optimizer.name = "mine"
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)  # wraps step()
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert twin.name == "mine" and type(twin) is Named
        twin.step()
