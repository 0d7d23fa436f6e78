"""The consensus is the mean of the workers' models, whatever the recipe: no step is lost."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la

from tests.support.all_recipes import ROWS, Run
from tests.support.loops import (
    RECIPES,
    WORKERS,
    attached,
    close,
    data,
    equal,
    flat,
    joined,
    loss_of,
    network,
    refusal,
    sgd,
    train,
)

# -- what it is ----

QUICK = ["ddp, coded", "local_sgd, late", "slowmo", "sgp, late", "easgd", "lsgd, groups"]
QUICK += ["diloco, eager", "streaming_diloco"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ROWS if name not in QUICK]


def is_plain_mean(name: str) -> bool:
    """Whether a model is x, and not x divided by a push weight or lacking what comes late."""
    return "sgp" not in name and name not in ("slowmo, no average", "diloco, eager")


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_finish_leaves_the_mean_of_all_steps(name: str) -> None:
    """The same as `consensus()` shows, bit for bit: on an outer step, and after it."""

    def run(rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        found = []
        for stop in (5, 7):
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
            assert torch.equal(agreed, finished) and torch.equal(finished, runs[0][2])
            assert not is_plain_mean(name) or close(finished, mean)


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_validation_changes_nothing(name: str) -> None:
    def run(rank: int, validate: bool) -> list[Tensor]:
        own, trace = Run(ROWS[name], 4, rank), []
        for stop in range(1, 11):
            trace += own.go(stop)
            if validate:
                own.consensus()
        own.sync.detach()
        return trace

    plain, validated = (la.simulate(partial(run, validate=v), workers=4) for v in (False, True))
    for one, other in zip(plain, validated, strict=True):
        assert all(map(torch.equal, one, other))


def life(rank: int, recipe: la.Recipe, inference: bool) -> list[Tensor]:
    """A run with a validation, whose body raises, a model to ship, and `finish` in the middle."""
    model, optimizer, sync = attached(rank, recipe, timeout=60)
    xs = data(4)[rank]
    train(model, optimizer, xs[:5])
    before, places = flat(model), [p.data_ptr() for p in model.parameters()]
    inside = Tensor()
    with torch.inference_mode(inference), suppress(ZeroDivisionError), sync.consensus() as same:
        assert same is model
        inside = flat(model)
        loss_of(model, xs[0])
        raise ZeroDivisionError
    assert torch.equal(before, flat(model))
    assert places == [p.data_ptr() for p in model.parameters()]
    with torch.inference_mode(inference):
        shipped = sync.consensus_state_dict()
        sync.mean(1.0)
    fresh = network(9)
    fresh.load_state_dict(shipped)
    assert torch.equal(flat(fresh), inside)
    sync.finish()
    first = flat(model)
    sync.finish()
    assert close(first, inside, 1e-14) and close(first, flat(model), 1e-14)
    with sync:
        train(model, optimizer, xs[5:])
        assert torch.equal(torch.cat([v.reshape(-1) for v in shipped.values()]), inside), "a copy"
    last, sent = flat(model), sync.stats().bytes_sent
    assert not sync.attached and not close(first, last, 1e-4), "training went on"
    train(model, optimizer, xs[:2])
    assert sync.stats().bytes_sent == sent
    return [inside, first, last]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (k % 2)) for k, n in enumerate(RECIPES)],
)
def test_a_run_with_validations_and_ends(name: str) -> None:
    usual, inference = (
        la.simulate(partial(life, recipe=RECIPES[name], inference=i), workers=4)
        for i in (False, True)
    )
    assert all(equal(found) for found in zip(*usual, *inference, strict=True))


def test_simulations_repeat_bit_for_bit() -> None:
    """Each worker has random state of its own, and the caller's is untouched."""

    def run(rank: int) -> tuple[Tensor, list[float]]:
        model, optimizer, sync = attached(rank, RECIPES["slowmo"])
        torch.manual_seed(rank)
        drawn = []
        for x in data()[rank]:
            train(model, optimizer, [x])
            drawn.append(float(torch.rand(())))
            sync.mean(0.0)  # another worker draws in between
        sync.finish()
        return flat(model), drawn

    torch.manual_seed(7)
    before = torch.get_rng_state()
    one, other = la.simulate(run, workers=WORKERS), la.simulate(run, workers=WORKERS)
    assert equal([x for x, _ in (*one, *other)])
    for rank in range(WORKERS):
        generator = torch.Generator().manual_seed(rank)
        alone = [float(torch.rand((), generator=generator)) for _ in data()[rank]]
        assert one[rank][1] == other[rank][1] == alone
    assert torch.equal(before, torch.get_rng_state())


def test_the_last_outer_steps_model_is_there_on_request_and_the_anchor_stays() -> None:
    """`finish` takes no outer step: the next one takes all steps since."""

    def run(rank: int) -> tuple[Tensor, ...]:
        own = Run(ROWS["diloco"], 2, rank)
        own.go(5)
        outer = own.flat()
        own.go(7)
        with own.sync.consensus(mean=False):
            asked = own.flat()
        own.sync.finish()
        (before, after) = own.flat(), own.go(10)[-1]
        own.go(12)
        own.sync.finish(mean=False)
        return outer, asked, before, after, own.flat()

    runs = la.simulate(run, workers=2)
    assert all(equal(found) for found in zip(*runs, strict=True))
    outer, asked, before, after, finished = runs[0]
    assert close(outer, asked) and close(after, finished) and not close(before, outer, 1e-6)


@pytest.mark.parametrize("recipe", [la.ddp(), la.local_sgd(2), la.diloco(3), la.sgp(delay=2)])
def test_nothing_that_changes_weights_is_done_inside(recipe: la.Recipe) -> None:
    """A consensus inside a consensus is the same, but not of another kind."""

    def run(rank: int) -> None:
        model, optimizer, sync = attached(rank, recipe)
        train(model, optimizer, data()[rank][:3])
        before, shipped = flat(model), sync.consensus_state_dict()
        with sync.consensus():
            with sync.consensus():
                pass
            inner = sync.consensus_state_dict()
            assert all(torch.equal(shipped[key], inner[key]) for key in shipped)
            calls: list[Callable[[], Any]] = [
                *(optimizer.step, lambda: optimizer.step(lambda: loss_of(model, data()[0][0]))),
                *(sync.finish, lambda: sync.switch(la.local_sgd(4))),
            ]
            assert all("inside sync.consensus()" in refusal(call) for call in calls)
            with pytest.raises(ValueError, match=r"consensus\("), sync.consensus(mean=False):
                pass
        assert sync.step == 3 and torch.equal(before, flat(model))

    la.simulate(run, workers=2)


# -- optimizers with modes, and averages that are swapped in ----


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


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("recipe", [la.ddp(), la.local_sgd(2), la.diloco(4), la.sgp()])
@pytest.mark.fault("evaluating in an optimizer's eval mode, as schedule-free ones need, trained on")
def test_evaluating_in_another_mode_changes_no_training(recipe: la.Recipe, swaps: bool) -> None:
    """A consensus is the mean of what one evaluates, whatever the mode when it begins; and a
    finished model is one in both modes."""

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
        trained, found = flat(model), []
        if not evaluating:
            return trained, []
        for mode in ("train", "eval"):
            for each in optimizers:
                getattr(each, mode)()
            with sync.consensus():
                found.append(flat(model))
        sync.finish()
        for mode in ("train", "eval"):
            for each in optimizers:
                getattr(each, mode)()
            found.append(flat(model))
        return trained, found

    plain, evaluated = (la.simulate(partial(run, evaluating=e), workers=2) for e in (False, True))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(plain, evaluated, strict=True))
    (agreed, again, *finished), (_, _, *others) = (found for _, found in evaluated)
    assert all(map(torch.equal, finished, others))
    assert close(agreed, finished[1]) and close(agreed, again)


@pytest.mark.parametrize(("first", "last", "warns"), [(1, 1, 0), (0, 2, 0), (1, 2, 1), (0, 1, 1)])
@pytest.mark.fault("weights swapped inside consensus() and swapped back after it, without a word")
def test_a_swap_across_the_edge_of_the_block_warns(first: int, last: int, warns: int) -> None:
    """``first``, ``last``: whether an average is swapped in, and out, before the block, inside or
    after it."""

    def run(rank: int) -> int:
        model, _, sync = attached(rank, la.local_sgd(2))
        average = flat(model).mul(0.5)
        backup = average

        def place(at: int) -> None:
            nonlocal backup
            if at == first:
                backup = flat(model)
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
        optimizer.zero_grad()
        self(torch.ones(2, 3) * (rank + 1)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.5)
            self.teacher.weight += rank
            self.seen += 10 + rank
            self.phase += 1j * rank

    def _load_from_state_dict(self, state: Any, prefix: str, about: Any, *others: Any) -> None:
        assert about["version"] == 2
        super()._load_from_state_dict(state, prefix, about, *others)


@pytest.mark.fault("finish() and consensus() left each rank its own momentum encoder or teacher")
@pytest.mark.parametrize("recipe", [la.ddp(), la.local_sgd(2), la.diloco(2, sharded=True)])
@pytest.mark.parametrize("buffers", ["average", "keep"])
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
        else:
            assert equal(after), name
            expected = before[0] if name in ("seen", "base") else before.mean(0)
            assert torch.allclose(after[0], expected)
    assert all(sent < 40_000 for _, _, sent in runs), "the base has 40,000 bytes"


@pytest.mark.fault("consensus_state_dict() lost the versions of modules, which then refused it")
def test_the_consensus_has_the_versions_of_modules() -> None:
    def run(rank: int) -> None:
        model = Encoder()
        sync = la.attach(model, sgd(model.student), la.local_sgd(2))
        model.load_state_dict(sync.consensus_state_dict())

    la.simulate(run, workers=2)


@pytest.mark.fault("finish() and consensus() left replicas under ddp() that had drifted apart")
def test_replicas_that_drifted_are_averaged() -> None:
    def run(rank: int) -> list[Tensor]:
        model = network()
        optimizer = sgd(model, 0.01 * (1 + rank))
        sync = la.attach(model, optimizer, la.ddp())
        train(model, optimizer, data()[rank][:3])
        with sync.consensus():
            inside = flat(model)
        sync.finish()
        return [inside, flat(model)]

    with pytest.warns(UserWarning, match="drifted apart"):
        runs = la.simulate(run, workers=2)
    assert all(equal(found) for found in zip(*runs, strict=True))


@pytest.mark.fault("a buffer that grew under inference_mode ended the next round or finish()")
@pytest.mark.parametrize("recipe", [la.ddp(), la.local_sgd(2), la.local_sgd(2, delay=1)])
@pytest.mark.parametrize("lengths", [(9, 9), (9, 7)], ids=["equal", "other shapes"])
def test_buffers_may_be_made_under_inference_mode(
    recipe: la.Recipe, lengths: tuple[int, int]
) -> None:
    def run(rank: int) -> Tensor:
        model = Encoder()
        optimizer = sgd(model.student, 0.01)
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
        assert torch.equal(tables[0], tables[1]) and float(tables[0][0]) == 0.5
    else:
        assert [len(t) for t in tables] == list(lengths)


# -- numbers and tensors beside the model ----


def test_the_mean_of_a_loss() -> None:
    """Of a number or a tensor, which is left alone, even with a graph."""

    def run(rank: int) -> float:
        model, _, sync = attached(rank, la.ddp())
        for value in (1.5 * rank, torch.tensor(1.5 * rank), torch.tensor([1.5 * rank])):
            assert sync.mean(value) == 1.5 and float(value) == 1.5 * rank
        loss = loss_of(model, data()[rank][0])
        mean = sync.mean(loss)
        loss.backward()
        return mean

    expected = float(loss_of(network(), joined(data())[0]).detach())
    assert la.simulate(run, workers=3) == pytest.approx([expected] * 3, rel=1e-12)


def test_tensors_beside_the_model_are_averaged_in_place() -> None:
    """Or not at all, where ranks have different ones."""

    def run(rank: int) -> None:
        _, _, sync = attached(rank, la.local_sgd(2))
        tensors = [torch.full((2, 3), 4.0 * rank, dtype=torch.float64), torch.tensor(float(rank))]
        grown = nn.Parameter(torch.full((1,), 3.0 * rank, dtype=torch.bfloat16))
        with torch.inference_mode():
            sync.average(iter([*tensors, grown]))
        assert [t.tolist() for t in (*tensors, grown)] == [[[4.0] * 3] * 2, 1.0, [3.0]]
        said = refusal(lambda: sync.average([torch.ones(2 + rank // 2)]))
        assert "those of rank 2 are not as rank 0's" in said
        said = refusal(lambda: sync.average([torch.ones(2, dtype=torch.int32)]))
        assert "a floating-point dtype" in said
        sync.average([])

    la.simulate(run, workers=3)


def test_stats_count_steps_rounds_bytes_and_waiting() -> None:
    def run(rank: int) -> list[la.Stats]:
        model, optimizer, sync = attached(rank, la.slowmo(la.local_sgd(2), 4, momentum=0.5))
        found = [sync.stats()]
        for x in data()[rank]:
            train(model, optimizer, [x])
            found.append(sync.stats())
        return found

    for stats in la.simulate(run, workers=2):
        assert [s.steps for s in stats] == list(range(9))
        assert [s.rounds for s in stats] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
        for before, after in itertools.pairwise(stats):
            sent = after.bytes_sent > before.bytes_sent
            assert sent == (after.rounds > before.rounds or after.steps == 1)
        last = stats[-1]
        assert last.bytes_sent == last.bytes_received == sum(last.bytes_by_collective.values())
        assert last.seconds_waiting > stats[0].seconds_waiting >= 0.0


# -- a program that ends without `finish` ----

Ends = Callable[[nn.Module, Any, la.Synchronizer, Path], object]


def in_consensus(model: nn.Module, optimizer: Any, sync: la.Synchronizer, path: Path) -> None:
    with sync.consensus():
        pass


ENDS: dict[str, Ends] = {
    "finish": lambda model, optimizer, sync, path: sync.finish(),
    "detach": lambda model, optimizer, sync, path: sync.detach(),
    "consensus": in_consensus,
    "state_dict": lambda model, optimizer, sync, path: sync.state_dict(),
    "switch": lambda model, optimizer, sync, path: sync.switch(la.local_sgd(9)),
    "save": lambda model, optimizer, sync, path: la.save(path, model, optimizer),
}


@pytest.fixture
def warned(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., bool]:
    """Whether a simulation warns whose workers take some steps, end in some way, and go on."""

    def train_and_end(recipe: la.Recipe, steps: int, end: str = "", more: int = 0) -> bool:
        def run(rank: int) -> None:
            model, optimizer, sync = attached(rank, recipe)
            train(model, optimizer, data(4)[rank][:steps])
            if end:
                ENDS[end](model, optimizer, sync, tmp_path / "saved")
            train(model, optimizer, data(4)[rank][:more])

        monkeypatch.setattr("laconic.engine.ending._warned", [])  # once in a process
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="laconic"):
            la.simulate(run, workers=4)
        texts = [record.getMessage() for record in caplog.records]
        assert len(texts) <= 1 and all("sync.finish() was not called" in text for text in texts)
        return bool(texts)

    return train_and_end


@pytest.mark.parametrize(
    ("recipe", "steps", "expected"),
    [
        (la.local_sgd(4), 3, True),
        (la.local_sgd(4), 0, False),
        (la.local_sgd(4), 8, False),  # a round has just made them equal
        (la.local_sgd(4, delay=2), 8, True),
        (la.des_loc(4, 4, 4), 8, False),
        (la.diloco(4), 8, False),
        (la.streaming_diloco(4, 2), 8, True),
        (la.diloco(4, quorum=2), 8, True),
        (la.easgd(4), 8, True),
        (la.d_psgd(), 8, True),
        (la.slowmo(la.local_sgd(2), 4), 8, False),
        (la.ddp(codec="int4"), 3, False),
    ],
)
def test_ranks_that_hold_different_models_are_warned_of(
    warned: Callable[..., bool], recipe: la.Recipe, steps: int, expected: bool
) -> None:
    assert warned(recipe, steps) == expected


@pytest.mark.parametrize("end", ENDS)
def test_who_has_averaged_or_saved_after_the_last_step_is_not_warned(
    warned: Callable[..., bool], end: str
) -> None:
    assert not warned(la.local_sgd(4), 3, end)
    assert warned(la.local_sgd(4), 3, end, more=2) == (end != "detach")
