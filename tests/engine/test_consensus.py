"""The consensus is the mean of the workers' models, whatever the recipe: no step is lost."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.algorithms.exchanges import Mean
from laconic.algorithms.round import Round
from laconic.algorithms.schedules import every
from laconic.algorithms.update import State
from laconic.algorithms.updates import Replace

from tests.support.all_recipes import ROWS, Row, Run

STOPS = (1, 4, 5, 7, 9)
"""Before the first outer step, on one, and between two."""


def is_plain_mean(name: str) -> bool:
    """Whether a model is x, and not x divided by a push weight or lacking what comes late."""
    return "sgp" not in name and name not in ("slowmo, no average", "diloco, eager")


@pytest.mark.parametrize("name", ROWS)
def test_finish_leaves_the_mean_of_all_steps(name: str) -> None:
    """The same as `consensus()` shows, bit for bit."""

    def run(rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        found = []
        for stop in STOPS:
            own = Run(ROWS[name], 4, rank)
            own.go(stop)
            x, agreed = own.flat(), own.consensus()
            own.sync.finish()
            found.append((x, agreed, own.flat()))
            own.sync.detach()
        return found

    for runs in zip(*la.simulate(run, workers=4), strict=True):
        mean = torch.stack([x for x, _, _ in runs]).mean(0)
        for _, agreed, finished in runs:
            assert torch.equal(agreed, finished)
            assert torch.equal(finished, runs[0][2])
            if is_plain_mean(name):
                assert float((finished - mean).abs().max()) < 1e-12


@dataclass(frozen=True)
class Resting(Replace):
    """An update of the user's own: what arrives replaces x, whatever happened since it was sent."""

    def quiesce(self, x: Tensor, state: State, averaged: bool) -> None:
        assert averaged


def test_messages_in_flight_stay_out_of_the_consensus() -> None:
    """They are copies of an x that has moved on since."""

    def run(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        own = Run(Row((Round(every(4), Resting(), Mean(), delay=3),)), 2, rank)
        own.go(6)
        x, agreed = own.flat(), own.consensus()
        own.sync.finish()
        return x, agreed, own.flat()

    runs = la.simulate(run, workers=2)
    mean = torch.stack([x for x, _, _ in runs]).mean(0)
    for _, agreed, finished in runs:
        assert torch.equal(agreed, finished)
        assert float((agreed - mean).abs().max()) < 1e-12


@pytest.mark.parametrize("name", ROWS)
def test_validation_changes_nothing(name: str) -> None:
    def run(rank: int) -> bool:
        own = Run(ROWS[name], 4, rank)
        trace = own.go(12)
        own.sync.detach()
        other = Run(ROWS[name], 4, rank)
        for stop in range(1, 13):
            other.go(stop)
            other.consensus()
            same = torch.equal(other.flat(), trace[stop - 1])
            if not same:
                return False
        return True

    assert all(la.simulate(run, workers=4))


def test_training_goes_on_after_finish_without_a_step_back() -> None:
    """The anchor stays where it was: the next outer step takes all steps since."""

    def run(rank: int) -> tuple[list[Tensor], Tensor]:
        own = Run(ROWS["diloco"], 2, rank)
        own.go(7)
        (before,) = (r["state"][0]["anchor"].clone() for r in own.sync.state_dict()["rounds"][:1])
        own.sync.finish()
        (after,) = (r["state"][0]["anchor"] for r in own.sync.state_dict()["rounds"][:1])
        return [before, after], own.go(10)[-1]

    runs = la.simulate(run, workers=2)
    assert all(torch.equal(before, after) for (before, after), _ in runs)
    assert torch.equal(runs[0][1], runs[1][1]), "an outer step brings all to one anchor"


def test_the_last_outer_steps_model_is_there_on_request() -> None:
    def run(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        own = Run(ROWS["diloco"], 2, rank)
        own.go(5)
        anchor = own.flat()
        own.go(8)
        with own.sync.consensus(mean=False):
            asked = own.flat()
        own.sync.finish(mean=False)
        return anchor, asked, own.flat()

    for anchor, asked, finished in la.simulate(run, workers=2):
        assert float((anchor - asked).abs().max()) < 1e-12
        assert torch.equal(asked, finished)


def refused(call: Any) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("recipe", [la.ddp(), la.local_sgd(2), la.diloco(3)])
def test_nothing_that_changes_weights_is_done_inside(recipe: la.Recipe) -> None:
    def run(rank: int) -> tuple[list[str], int, bool]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sync = la.attach(model, optimizer, recipe)
        before = model.weight.detach().clone()
        with sync.consensus():
            said = [
                refused(optimizer.step),
                refused(lambda: optimizer.step(lambda: model(torch.ones(2)).sum())),
                refused(sync.finish),
                refused(lambda: sync.switch(la.local_sgd(4))),
                refused(sync.driver.advance),
            ]
        return said, sync.step, torch.equal(before, model.weight)

    for said, step, same in la.simulate(run, workers=2):
        assert all("inside sync.consensus()" in text for text in said)
        assert step == 0 and same


def test_front_ends_refuse_steps_inside_too() -> None:
    def run(rank: int) -> list[str]:
        model = nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = la.CommOptimizer(inner, "EASGD", 2, 2, 0.5)
        model(torch.full((2,), 1.0 + rank)).sum().backward()
        with optimizer.consensus():
            said = [refused(optimizer.step)]
        wrapped = la.SlowMoDistributedDataParallel(nn.Linear(2, 1), 1)
        own = torch.optim.SGD(wrapped.parameters(), 0.1)
        wrapped(torch.full((2,), 1.0 + rank)).sum().backward()
        own.step()
        wrapped.perform_slowmo(own)
        with wrapped.consensus():
            said.append(refused(own.step))
        return said

    for said in la.simulate(run, workers=2):
        assert all("inside sync.consensus()" in text for text in said)


def anchor_of(sync: la.Synchronizer) -> None:
    with sync.consensus(mean=False):
        pass


def test_consensus_inside_consensus_is_the_same() -> None:
    def run(rank: int) -> tuple[bool, list[str], int]:
        own = Run(ROWS["sgp, late"], 3, rank)
        own.go(7)
        shipped = own.sync.consensus_state_dict()
        with own.sync.consensus():
            inner = own.sync.consensus_state_dict()
            with own.sync.consensus():
                pass
            said = [refused(own.optimizer.step), refused(lambda: anchor_of(own.sync))]
        same = all(torch.equal(shipped[k], inner[k]) for k in shipped)
        return same, said, own.sync.step

    for same, said, step in la.simulate(run, workers=3):
        assert same and step == 7
        assert all("consensus(" in text for text in said)


def test_eager_outer_steps_lack_nothing() -> None:
    """At outer rate 1 without momentum the consensus is where the mean of the workers went."""

    def run(rank: int) -> list[Tensor]:
        found = []
        for stop in (5,):
            recipe = la.diloco(5, 1.0, 0.0, delay=4, merge="eager")
            own = Run(Row(recipe), 4, rank)
            own.go(stop)
            own.sync.finish()
            found.append(own.flat())
            own.sync.detach()
        return found

    def averaged(rank: int) -> list[Tensor]:
        own = Run(Row(la.local_sgd(5)), 4, rank)
        return own.go(5)[-1:]

    eager, plain = la.simulate(run, workers=4), la.simulate(averaged, workers=4)
    assert float((eager[0][0] - plain[0][0]).abs().max()) < 1e-12


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (arXiv 2405.15682): parameters hold y in train mode, and x in eval mode.
    ``swaps``: x is in the state meanwhile, and not computed from y and z."""

    def __init__(self, params: Any, swaps: bool) -> None:
        super().__init__(params, {"lr": 0.05, "train_mode": False, "steps": 0})
        self.swaps = swaps

    def _go(self, mode: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] != mode:
                group["train_mode"] = mode
                for p in (p for p in group["params"] if self.state[p]):
                    z = self.state[p]["nested"]["z"]
                    other = self.state[p].setdefault("other", p.detach().clone())
                    if self.swaps:
                        p.data, self.state[p]["other"] = other, p.detach().clone()
                    else:
                        p.data.lerp_(z, weight)

    def train(self) -> None:
        self._go(True, 1 - 0.9)

    def eval(self) -> None:
        self._go(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
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


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("recipe", [la.ddp(), la.local_sgd(2), la.diloco(4), la.sgp()])
@pytest.mark.fault("evaluating in an optimizer's eval mode, as schedule-free ones need, trained on")
def test_evaluating_in_another_mode_changes_no_training(recipe: la.Recipe, swaps: bool) -> None:
    """A consensus is the mean of what one evaluates, and a finished model is one in both modes."""

    def run(rank: int, evaluating: bool) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2).double()
        optimizers = [ScheduleFree([p], swaps) for p in model.parameters()]
        sync = la.attach(model, optimizers, recipe)
        draw = torch.Generator().manual_seed(rank)
        for step in range(6):
            for each in optimizers:
                each.train()
                each.zero_grad()
            model(torch.randn(4, 3, generator=draw).double()).square().mean().backward()
            for each in optimizers:
                each.step()
            if evaluating and step % 2:
                with sync.consensus():
                    for each in optimizers:
                        each.eval()
                    for each in optimizers[: step // 2]:
                        each.train()
        trained = vector(model)
        if not evaluating:
            return trained, []
        with sync.consensus():
            found = [vector(model)]
        sync.finish()
        found += [vector(model)]
        for each in optimizers:
            each.eval()
        found += [vector(model)]
        return trained, found

    plain, evaluated = (la.simulate(lambda r, e=e: run(r, e), workers=2) for e in (False, True))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(plain, evaluated, strict=True))
    (agreed, *finished), (_, *others) = (found for _, found in evaluated)
    assert all(map(torch.equal, finished, others))
    assert float((agreed - finished[1]).abs().max()) < 1e-12


@pytest.mark.parametrize("mean", [False, True])
def test_the_consensus_does_not_depend_on_the_mode_of_the_optimizer(mean: bool) -> None:
    def run(rank: int, evaluate: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(3, 2).double()
        optimizer = ScheduleFree(list(model.parameters()), False)
        optimizer.train()
        sync = la.attach(model, optimizer, la.diloco(4))
        draw = torch.Generator().manual_seed(rank)
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(4, 3, generator=draw).double()).square().mean().backward()
            optimizer.step()
        if evaluate:
            optimizer.eval()
        with sync.consensus(mean=mean):
            return vector(model)

    one, other = (la.simulate(lambda r, e=e: run(r, e), workers=2)[0] for e in (False, True))
    assert float((one - other).abs().max()) < 1e-12


@pytest.mark.parametrize("first, last, warns", [(1, 1, 0), (0, 2, 0), (1, 2, 1), (0, 1, 1)])
@pytest.mark.fault("weights swapped inside consensus() and swapped back after it, without a word")
def test_a_swap_across_the_edge_of_the_block_warns(first: int, last: int, warns: int) -> None:
    """``first``, ``last``: whether an average is swapped in, and out, before the block, inside or
    after it."""

    def run(rank: int) -> int:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sync = la.attach(model, optimizer, la.local_sgd(2))
        average = vector(model).mul(0.5)
        backup = average

        def place(at: int) -> None:
            nonlocal backup
            if at == first:
                backup = vector(model)
                nn.utils.vector_to_parameters(average, model.parameters())
            if at == last:
                nn.utils.vector_to_parameters(backup, model.parameters())

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            place(0)
            with sync.consensus():
                place(1)
            place(2)
        return sum("changed inside sync.consensus()" in str(w.message) for w in caught)

    assert la.simulate(run, workers=1) == [warns]


# -- tensors that no round is about ----


class Encoder(nn.Module):
    """A teacher that follows the student, a counter, a buffer that grows with the batch, and
    weights that do not change."""

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
        return self.student(x).squeeze(1) + self.table[: len(x)]

    def step(self, optimizer: torch.optim.Optimizer, rank: int) -> None:
        optimizer.zero_grad()
        self(torch.ones(2, 3) * (rank + 1)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.5)
            self.teacher.weight += rank
            self.seen += 10 + rank
            self.phase += 1j * rank


@pytest.mark.fault("finish() and consensus() left each rank its own momentum encoder or teacher")
@pytest.mark.parametrize("recipe", [la.ddp(), la.local_sgd(2), la.diloco(2, sharded=True)])
@pytest.mark.parametrize("buffers", ["average", "keep"])
def test_what_no_round_is_about_is_equal_in_the_end(recipe: la.Recipe, buffers: Any) -> None:
    """Floating-point and complex numbers are averaged, others are rank 0's; `buffers="keep"` keeps
    buffers; inside `consensus()` nothing else is seen, and it undoes what it does. Weights that are
    equal everywhere cost next to nothing."""

    def run(rank: int) -> tuple[Any, ...]:
        model = Encoder()
        optimizer = torch.optim.SGD(model.student.parameters(), 0.01)
        sync = la.attach(model, optimizer, recipe, buffers=buffers)
        for _ in range(3):
            model.step(optimizer, rank)
        own = {name: t.clone() for name, t in model.state_dict().items()}
        inside = sync.consensus_state_dict()
        back = model.state_dict()
        assert all(torch.equal(back[name], t) for name, t in own.items())
        sync.finish()
        assert all(torch.equal(t, inside[name]) for name, t in model.state_dict().items())
        return own, inside, sync.stats().bytes_sent

    runs = la.simulate(run, workers=3)
    for name in runs[0][1]:
        before = torch.stack([own[name] for own, _, _ in runs])
        after = [inside[name] for _, inside, _ in runs]
        if buffers == "keep" and name in ("seen", "phase"):
            assert torch.equal(torch.stack(after), before)
            continue
        assert all(torch.equal(t, after[0]) for t in after), name
        if name == "seen":
            assert int(after[0]) == int(before[0])
        elif name != "base":
            assert torch.allclose(after[0], before.mean(0))
    assert all(sent < 40_000 for _, _, sent in runs), "the base has 40,000 bytes"


@pytest.mark.fault("finish() and consensus() left replicas under ddp() that had drifted apart")
def test_replicas_that_drifted_are_averaged() -> None:
    def run(rank: int) -> list[Tensor]:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01 * (1 + rank))
        sync = la.attach(model, optimizer, la.ddp())
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3) * (rank + step)).square().mean().backward()
            optimizer.step()
        inside = sync.consensus_state_dict()["weight"]
        sync.finish()
        return [inside, model.weight.detach()]

    with pytest.warns(UserWarning, match="drifted apart"):
        (first, second) = la.simulate(run, workers=2)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.fault("a buffer that grew under inference_mode ended the next round or finish()")
@pytest.mark.parametrize("recipe", [la.ddp(), la.local_sgd(2), la.local_sgd(2, delay=1)])
@pytest.mark.parametrize("lengths", [(9, 9), (9, 7)], ids=["equal", "other shapes"])
def test_buffers_may_be_made_under_inference_mode(
    recipe: la.Recipe, lengths: tuple[int, int]
) -> None:
    def run(rank: int) -> Tensor:
        model = Encoder()
        optimizer = torch.optim.SGD(model.student.parameters(), 0.01)
        sync = la.attach(model, optimizer, recipe)
        model.step(optimizer, rank)
        with torch.inference_mode():
            model(torch.ones(lengths[rank], 3))
            model.table += rank
        with sync.consensus():
            model(torch.ones(2, 3))
        for _ in range(3):
            model.step(optimizer, rank)
        sync.finish()
        return model.table

    tables = la.simulate(run, workers=2)
    if lengths[0] == lengths[1]:
        assert torch.equal(tables[0], tables[1])
        assert float(tables[0][0]) == 0.5
    else:
        assert [len(t) for t in tables] == list(lengths)
