"""The consensus is the mean of the workers' models, whatever the recipe: no step is lost."""

from __future__ import annotations

import logging.handlers
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la

from tests.support import launched
from tests.support.all_recipes import ROWS, Run
from tests.support.loops import (
    RECIPES,
    WORKERS,
    attached,
    close,
    data,
    descend,
    equal,
    flat,
    loss_of,
    refusal,
    sgd,
    train,
)

# -- what it is ----

QUICK = ["local_sgd, late", "sgp, late", "streaming_diloco"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ROWS if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_finish_leaves_the_mean_of_all_steps_and_validation_changes_nothing(name: str) -> None:
    """What `consensus()` shows is what `finish()` leaves, bit for bit."""

    def run(rank: int, validate: bool) -> tuple[list[Tensor], Tensor, Tensor]:
        own, trace, agreed = Run(ROWS[name], 4, rank), [], Tensor()
        for stop in range(1, 8):
            trace += own.go(stop)
            agreed = own.consensus() if validate else agreed
        own.sync.finish()
        return trace, agreed, own.flat()

    plain, validated = (la.simulate(partial(run, validate=v), workers=4) for v in (False, True))
    mean = torch.stack([trace[-1] for trace, _, _ in plain]).mean(0)
    # elsewhere a model is x divided by a push weight, or lacks what comes late
    plain_mean = "sgp" not in name and name != "slowmo, no average"
    for (one, _, end), (other, agreed, finished) in zip(plain, validated, strict=True):
        assert all(map(torch.equal, one, other)) and torch.equal(end, finished)
        assert torch.equal(agreed, finished) and torch.equal(finished, plain[0][2])
        assert not plain_mean or close(finished, mean)


@pytest.mark.parametrize(("name", "inference"), [("delayed", False), ("slowmo over sgp", True)])
def test_a_run_with_validations_and_ends(name: str, inference: bool) -> None:
    """A validation whose body raises, a model to ship, and `finish` in the middle."""

    def run(rank: int) -> list[Tensor]:
        model, optimizer, sync = attached(rank, RECIPES[name])
        xs = data(4)[rank]
        train(model, optimizer, xs[:5])
        before, places = flat(model), [p.data_ptr() for p in model.parameters()]
        with torch.inference_mode(inference):
            with suppress(ZeroDivisionError), sync.consensus() as same:
                assert same is model
                inside = flat(model)
                raise ZeroDivisionError
            shipped = sync.consensus_state_dict()
        assert torch.equal(before, flat(model))
        assert places == [p.data_ptr() for p in model.parameters()]
        sync.finish()
        first = flat(model)
        sync.finish()
        assert close(first, inside, 1e-14) and close(first, flat(model), 1e-14)
        with sync:
            train(model, optimizer, xs[5:])
        assert torch.equal(torch.cat([v.reshape(-1) for v in shipped.values()]), inside), "a copy"
        assert not sync.attached and not close(first, flat(model), 1e-4), "training went on"
        return [inside, first, flat(model)]

    assert all(equal(found) for found in zip(*la.simulate(run, workers=4), strict=True))


def test_simulations_repeat_bit_for_bit() -> None:
    """Each worker has random state of its own, and the caller's is untouched."""

    def run(rank: int) -> Tensor:
        model, optimizer, sync = attached(rank, RECIPES["slowmo"])
        torch.manual_seed(rank)
        drawn = []
        for x in data()[rank]:
            train(model, optimizer, [x])
            drawn.append(float(torch.rand(())))
            sync.mean(0.0)  # another worker draws in between
        torch.manual_seed(rank)
        assert drawn == [float(torch.rand(())) for _ in drawn]
        sync.finish()
        return flat(model)

    before = torch.get_rng_state()
    one, other = la.simulate(run, workers=WORKERS), la.simulate(run, workers=WORKERS)
    assert torch.equal(before, torch.get_rng_state()) and equal([*one, *other])


@pytest.mark.fault("a synchronizer stayed attached after a `with` whose finish() raised")
@pytest.mark.fault("a state saved inside consensus() was of the consensus, and resumed another run")
def test_nothing_that_changes_weights_is_done_inside() -> None:
    """A consensus inside a consensus is the same, but not of another kind."""

    def run(rank: int) -> None:
        model, optimizer, sync = attached(rank, la.sgp(delay=2))
        train(model, optimizer, data()[rank][:3])
        before, state = flat(model), sync.state_dict()
        with sync.consensus():
            inside = flat(model)
            with sync.consensus():
                assert torch.equal(inside, flat(model))
            calls: list[Callable[[], Any]] = [
                *(optimizer.step, lambda: optimizer.step(lambda: loss_of(model, data()[0][0]))),
                *(sync.finish, lambda: sync.switch(la.local_sgd(4))),
                *(sync.state_dict, lambda: sync.load_state_dict(state)),
            ]
            assert all("inside sync.consensus()" in refusal(call) for call in calls)
            with pytest.raises(ValueError, match=r"consensus\("), sync.consensus(mean=False):
                pass
        assert sync.step == 3 and torch.equal(before, flat(model))
        with pytest.raises(ValueError, match="inside sync"), sync.consensus(), sync:
            pass
        assert not sync.attached

    la.simulate(run, workers=2)


# -- optimizers with modes, and averages that are swapped in ----


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (arXiv 2405.15682): parameters hold y in train mode, and x in eval mode."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "train_mode": False, "steps": 0})

    def _go(self, mode: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] != mode:
                group["train_mode"] = mode
                for p in (p for p in group["params"] if self.state[p]):
                    p.data.lerp_(self.state[p]["nested"]["z"], weight)

    def train(self) -> None:
        self._go(True, 1 - 0.9)

    def eval(self) -> None:
        self._go(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"]
            group["steps"] += 1
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["nested"] = {"z": p.clone()}
                z = self.state[p]["nested"]["z"]
                p.lerp_(z, 1 / group["steps"])
                p.add_(p.grad, alpha=-0.03)
                z.sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize("recipe", [la.diloco(4), la.sgp()])
@pytest.mark.fault("evaluating in an optimizer's eval mode, as schedule-free ones need, trained on")
def test_evaluating_in_another_mode_changes_no_training(recipe: la.Recipe) -> None:
    """A consensus is the mean of what one evaluates, whatever the mode when it begins; and a
    finished model is one in both modes."""

    def run(rank: int, evaluating: bool) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2).double()
        optimizers = [ScheduleFree([p]) for p in model.parameters()]

        def seen(mode: str, agreed: bool = False) -> Tensor:
            for each in optimizers:
                getattr(each, mode)()
            with sync.consensus() if agreed else nullcontext():
                return flat(model)

        sync = la.attach(model, optimizers, recipe)
        draw = torch.Generator().manual_seed(rank)
        for step in range(6):
            seen("train")
            model.zero_grad()
            model(torch.randn(4, 3, generator=draw).double()).square().mean().backward()
            for each in optimizers:
                each.step()
            if evaluating and step % 2:
                with sync.consensus():
                    seen("eval")
                    for each in optimizers[: step // 2]:
                        each.train()
        trained = flat(model)
        if not evaluating:
            return trained, []
        found = [seen(mode, agreed=True) for mode in ("train", "eval")]
        sync.finish()
        return trained, [*found, seen("train"), seen("eval")]

    plain, evaluated = (la.simulate(partial(run, evaluating=e), workers=2) for e in (False, True))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(plain, evaluated, strict=True))
    (agreed, again, *finished), (_, _, *others) = (found for _, found in evaluated)
    assert all(map(torch.equal, finished, others))
    assert close(agreed, finished[1]) and close(agreed, again)


@pytest.mark.parametrize("name", ["consensus_state_dict", "mean", "finish"])
def test_a_call_on_rank_0_alone_is_refused_with_the_reason(name: str) -> None:
    calls: dict[str, Callable[[la.Synchronizer], object]] = {
        "consensus_state_dict": lambda sync: sync.consensus_state_dict(),
        "mean": lambda sync: sync.mean(1.0),
        "finish": lambda sync: sync.finish(),
    }

    def run(rank: int) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = la.attach(model, optimizer, la.local_sgd(2))
        with pytest.raises(la.LinkError, match="outside any `if rank == 0`"):
            if rank == 0:
                calls[name](sync)
            for _ in range(2):
                model(torch.ones(1, 1) + rank).sum().backward()
                optimizer.step()

    la.simulate(run, workers=2)


# -- tensors that no round is about ----


class Encoder(nn.Module):
    """A teacher that follows the student, a counter, a buffer that grows with the batch, and
    weights that do not change."""

    _version = 2
    seen: Tensor
    phase: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = nn.Linear(3, 1), nn.Linear(3, 1).requires_grad_(False)
        self.base = nn.Parameter(torch.randn(100, 100), requires_grad=False)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < len(x):
            self.register_buffer("table", torch.arange(1.0 * len(x)), persistent=False)
        y: Tensor = self.student(x).squeeze(1) + self.table[: len(x)]
        return y

    def step(self, optimizer: torch.optim.Optimizer, rank: int) -> None:
        descend(optimizer, self(torch.ones(2, 3) * (rank + 1)).square().mean())
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.5)
            self.teacher.weight += rank
            self.seen += 10 + rank
            self.phase += 1j * rank

    def _load_from_state_dict(self, state: Any, prefix: str, about: Any, *others: Any) -> None:
        assert about["version"] == 2
        super()._load_from_state_dict(state, prefix, about, *others)


@pytest.mark.fault("finish() and consensus() left each rank its own momentum encoder or teacher")
@pytest.mark.fault("consensus_state_dict() lost the versions of modules, which then refused it")
@pytest.mark.parametrize(("recipe", "buffers"), [(la.ddp(), "average"), (la.diloco(2), "keep")])
def test_what_no_round_is_about_is_equal_in_the_end(recipe: la.Recipe, buffers: Any) -> None:
    """Floating-point and complex numbers are averaged, others are rank 0's; `buffers="keep"` keeps
    buffers; inside `consensus()` nothing else is seen, and it undoes what it does. Weights that are
    equal everywhere cost next to nothing."""

    def run(rank: int) -> tuple[Any, ...]:
        model = Encoder()
        optimizer = sgd(model.student, 0.01)
        sync = la.attach(model, optimizer, recipe, buffers=buffers)
        for _ in range(3):
            model.step(optimizer, rank)
        own = {name: t.clone() for name, t in model.state_dict().items()}
        inside = sync.consensus_state_dict()
        with sync.consensus():
            model.seen += 5  # as a validation does that forgets eval()
        back = model.state_dict()
        assert all(torch.equal(back[name], t) for name, t in own.items())
        sync.finish()
        assert all(torch.equal(t, inside[name]) for name, t in model.state_dict().items())
        model.load_state_dict(inside)
        return own, inside, sync.stats().bytes_sent

    runs = la.simulate(run, workers=3)
    for name in runs[0][1]:
        before = torch.stack([own[name] for own, _, _ in runs])
        after = [inside[name] for _, inside, _ in runs]
        if buffers == "keep" and name in ("seen", "phase"):
            assert torch.equal(torch.stack(after), before)
        else:
            assert equal(after), name
            expected = before[0] if name in ("seen", "base") else before.mean(0)
            assert torch.allclose(after[0], expected)
    assert all(sent < 40_000 for _, _, sent in runs), "the base has 40,000 bytes"


@pytest.mark.fault("a buffer that grew under inference_mode ended the next round or finish()")
@pytest.mark.parametrize(("recipe", "other"), [(la.ddp(), 9), (la.local_sgd(2, delay=1), 7)])
def test_buffers_may_be_made_under_inference_mode(recipe: la.Recipe, other: int) -> None:
    """They are averaged in the end where all have the same length."""

    def run(rank: int) -> list[float]:
        model = Encoder()
        optimizer = sgd(model.student, 0.01)
        sync = la.attach(model, optimizer, recipe)
        model.step(optimizer, rank)
        with torch.inference_mode():
            model(torch.ones(other if rank else 9, 3))
            model.table += rank
        with sync.consensus():
            model(torch.ones(2, 3))
        for _ in range(3):
            model.step(optimizer, rank)
        sync.finish()
        return [float(t) for t in model.table]

    tables = [[float(k + rank) for k in range(other if rank else 9)] for rank in range(2)]
    if other == 9:
        tables = [[k + 0.5 for k in range(9)]] * 2
    assert la.simulate(run, workers=2) == tables


# -- numbers and tensors beside the model ----


def test_numbers_and_tensors_are_averaged() -> None:
    """Numbers are left alone, even with a graph; tensors are averaged in place, or not at all where
    ranks have different ones."""

    def run(rank: int) -> None:
        _, _, sync = attached(rank, la.local_sgd(2))
        loss = torch.tensor([1.5 * rank], requires_grad=True) * 1.0
        assert [sync.mean(value) for value in (1.5 * rank, loss)] == [1.5, 1.5]
        loss.backward()
        tensors = [torch.full((2, 3), 4.0 * rank, dtype=torch.float64), torch.tensor(float(rank))]
        grown = nn.Parameter(torch.full((1,), 3.0 * rank, dtype=torch.bfloat16))
        with torch.inference_mode():
            sync.average(iter([*tensors, grown]))
        assert [t.tolist() for t in (*tensors, grown)] == [[[4.0] * 3] * 2, 1.0, [3.0]]
        said = refusal(lambda: sync.average([torch.ones(2 + rank // 2)]))
        assert "those of rank 2 are not as rank 0's" in said
        said = refusal(lambda: sync.average([torch.ones(2, dtype=torch.int32)]))
        assert "a floating-point dtype" in said

    la.simulate(run, workers=3)


# -- a program that ends without `finish` ----

ENDS: dict[str, Callable[[nn.Module, Any, la.Synchronizer, Path], object]] = {
    "nothing": lambda model, optimizer, sync, path: None,
    "finish": lambda model, optimizer, sync, path: sync.finish(),
    "detach": lambda model, optimizer, sync, path: sync.detach(),
    "consensus": lambda model, optimizer, sync, path: sync.consensus_state_dict(),
    "state_dict": lambda model, optimizer, sync, path: sync.state_dict(),
    "switch": lambda model, optimizer, sync, path: sync.switch(la.local_sgd(9)),
    "save": lambda model, optimizer, sync, path: la.save(path, model, optimizer),
}
Case = tuple[la.Recipe, int, str, int]
"""The recipe, the steps, what ends them, and the steps after it."""
LOCAL = la.local_sgd(4)
SILENT: list[Case] = [
    *((r, 8, "nothing", 0) for r in (LOCAL, la.diloco(4), la.slowmo(la.local_sgd(2), 4))),
    *((LOCAL, 3, end, 0) for end in ENDS if end != "nothing"),
    *((LOCAL, 0, "nothing", 0), (la.ddp(codec="int4"), 3, "nothing", 0), (LOCAL, 3, "detach", 2)),
]
WARNED: list[Case] = [
    *((LOCAL, 3, "nothing", 0), (LOCAL, 3, "consensus", 2), (LOCAL, 3, "save", 2)),
    *((la.streaming_diloco(4, 2), 8, "nothing", 0), (la.d_psgd(), 8, "nothing", 0)),
]


def train_and_end(_: Any, folder: Path, cases: list[Case]) -> list[str]:
    """In a process of its own, since the warning comes once in one: what is logged."""
    records = logging.handlers.BufferingHandler(99)
    logging.getLogger("laconic").addHandler(records)
    for recipe, steps, end, more in cases:

        def run(rank: int, case: Case = (recipe, steps, end, more)) -> None:
            model, optimizer, sync = attached(rank, case[0])
            train(model, optimizer, data(4)[rank][: case[1]])
            ENDS[case[2]](model, optimizer, sync, folder)
            train(model, optimizer, data(4)[rank][: case[3]])

        la.simulate(run, workers=4)
    return [record.getMessage() for record in records.buffer]


@pytest.mark.parametrize("cases", [SILENT, *([case] for case in WARNED)])
def test_ranks_that_hold_different_models_in_the_end_are_warned_of(
    cases: list[Case], tmp_path: Path
) -> None:
    """Unless they have averaged or saved after the last step."""
    (said,) = launched.results([{}], train_and_end, tmp_path / "saved", cases)
    assert len(said) == (0 if cases == SILENT else 1)
    assert all("sync.finish() was not called" in text for text in said)
