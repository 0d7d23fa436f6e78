"""Algorithms written by a user, with what the shipped recipes do not use: a pull at every step, a
center on every worker, a private residual, a part of the parameters."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic import buckets
from laconic.algorithms.exchanges import CodedMean, Mean, Push, ShardedMean
from laconic.algorithms.update import Clock, Slot, State, Update
from laconic.algorithms.updates import Average, OuterStep
from laconic.buckets import Fragment, parameters
from laconic.codecs import Int4
from laconic.engine import channel

from tests.references import reference as ref
from tests.support.training import (
    Job,
    build,
    largest_difference,
    same_bits,
    simulated,
    step,
    values,
)


@dataclass(frozen=True)
class Elastic(Update):
    """x <- x - beta/n*(x - a) ;  a <- (1-beta)*a + beta*mean(x)
    every step before:  x <- (1-p)*x + p*a"""

    beta: float
    pull: float

    slots: ClassVar[dict[str, Slot]] = {"a": "everywhere"}
    anchor = "a"
    replaces = False
    every_step = True

    def init(self, x: Tensor) -> State:
        return {"a": x}

    def after_step(self, x: Tensor, state: State, clock: Clock) -> None:
        x.lerp_(state["a"], self.pull)

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        a = state["a"]
        x = x - self.beta / clock.workers * (x - a)
        a.lerp_(received, self.beta)
        return x


@dataclass
class ElasticLoop(ref.Recipe):
    """The same, over a list of workers."""

    period: int
    beta: float
    pull: float
    a: ref.Params = field(default_factory=dict)

    def start(self, x0: ref.Params, n: int) -> None:
        self.a = ref.copy(x0)

    def after_step(self, t: int, workers: list[ref.Worker], lr: ref.Rates) -> None:
        for w in workers:
            for k in w.x:
                w.x[k] = (1 - self.pull) * w.x[k] + self.pull * self.a[k]
        if t % self.period == 0:
            mean = ref.mean([w.x for w in workers])
            for w in workers:
                for k in w.x:
                    w.x[k] = w.x[k] - self.beta / len(workers) * (w.x[k] - self.a[k])
            self.a = {k: (1 - self.beta) * self.a[k] + self.beta * mean[k] for k in self.a}

    def consensus(self, workers: list[ref.Worker]) -> ref.Params:
        return self.a


@dataclass(frozen=True)
class Coarse(Update):
    """q = round(x + e, 1/4) ;  e <- x + e - q ;  x <- mean(q)"""

    slots: ClassVar[dict[str, Slot]] = {"e": "private"}

    def init(self, x: Tensor) -> State:
        return {"e": torch.zeros_like(x)}

    def send(self, x: Tensor, state: State, clock: Clock) -> Tensor:
        wanted = x + state["e"]
        q = (wanted * 4).round() / 4
        state["e"].copy_(wanted - q)
        return q


@dataclass
class CoarseLoop(ref.Recipe):
    """The same, over a list of workers."""

    period: int
    e: list[ref.Params] = field(default_factory=list)

    def start(self, x0: ref.Params, n: int) -> None:
        self.e = [{k: np.zeros_like(v) for k, v in x0.items()} for _ in range(n)]

    def after_step(self, t: int, workers: list[ref.Worker], lr: ref.Rates) -> None:
        if t % self.period:
            return
        wanted = [{k: w.x[k] + e[k] for k in e} for w, e in zip(workers, self.e, strict=True)]
        q = [{k: np.round(v * 4) / 4 for k, v in x.items()} for x in wanted]
        self.e = [{k: x[k] - y[k] for k in x} for x, y in zip(wanted, q, strict=True)]
        for w in workers:
            w.x = ref.copy(ref.mean(q))


@dataclass(frozen=True)
class MatrixStep(Update):
    """u <- mu*u + (a - mean(x)) ;  a <- a - lr*orthogonal(u) for each matrix, a - lr*u for each
    vector ;  x <- a. As Muon (Jordan et al. 2024), in outer steps."""

    lr: float
    momentum: float

    slots: ClassVar[dict[str, Slot]] = {"a": "everywhere", "u": "everywhere"}
    anchor = "a"
    whole = True

    def init(self, x: Tensor) -> State:
        return {"a": x, "u": torch.zeros_like(x)}

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        a, u = state["a"], state["u"]
        u.mul_(self.momentum).add_(a - received)
        sizes = [shape.numel() for shape in clock.shapes]
        pieces = (t[: sum(sizes)].split(sizes) for t in (a, u))
        for shape, own, direction in zip(clock.shapes, *pieces, strict=True):
            d = direction.view(shape)
            own.sub_((orthogonal(d) if d.dim() == 2 else d).flatten(), alpha=self.lr)
        return x.copy_(a)


def orthogonal(d: Tensor) -> Tensor:
    """Five Newton-Schulz steps."""
    y = d / d.norm().clamp_min(1e-12)
    for _ in range(5):
        gram = y @ y.T
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return y


@dataclass
class MatrixLoop(ref.Recipe):
    """The same, over a list of workers."""

    period: int
    lr: float
    momentum: float
    a: ref.Params = field(default_factory=dict)
    u: ref.Params = field(default_factory=dict)

    def start(self, x0: ref.Params, n: int) -> None:
        self.a = ref.copy(x0)
        self.u = {k: np.zeros_like(v) for k, v in x0.items()}

    def after_step(self, t: int, workers: list[ref.Worker], lr: ref.Rates) -> None:
        if t % self.period:
            return
        mean = ref.mean([w.x for w in workers])
        for k in self.a:
            self.u[k] = self.momentum * self.u[k] + self.a[k] - mean[k]
            step = self.u[k]
            if step.ndim == 2:
                left, sigma, right = np.linalg.svd(step, full_matrices=False)
                sigma = sigma / np.sqrt((sigma**2).sum())
                for _ in range(5):  # the polynomial acts on singular values
                    sigma = 3.4445 * sigma - 4.7750 * sigma**3 + 2.0315 * sigma**5
                step = left * sigma @ right
            self.a[k] = self.a[k] - self.lr * step
        for w in workers:
            w.x = ref.copy(self.a)

    def consensus(self, workers: list[ref.Worker]) -> ref.Params:
        return self.a


OWN: dict[str, tuple[la.Recipe, Callable[[], ref.Recipe]]] = {
    "elastic": (
        (la.Round(la.every(3), Elastic(0.9, 0.05), Mean()),),
        lambda: ElasticLoop(3, 0.9, 0.05),
    ),
    "coarse": ((la.Round(la.every(3), Coarse(), Mean()),), lambda: CoarseLoop(3)),
    "matrices": (
        (la.Round(la.every(3), MatrixStep(0.1, 0.6), Mean()),),
        lambda: MatrixLoop(3, 0.1, 0.6),
    ),
}


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("name", OWN)
def test_own_algorithm_equals_its_loop(name: str, workers: int) -> None:
    recipe, loop = OWN[name]
    job = Job(recipe, workers)
    assert largest_difference(simulated(job), job.expected(loop())) < 1e-10


@pytest.mark.parametrize("name", OWN)
def test_own_algorithm_with_workers_of_two_ranks(name: str) -> None:
    runs = simulated(Job(OWN[name][0], 4, options=(("nprocs_per_node", 2),)))
    assert same_bits([runs[0], runs[2]], [runs[1], runs[3]])
    assert not same_bits([runs[0]], [runs[2]])


@pytest.mark.parametrize("name", OWN)
def test_own_algorithm_resumes_exactly(name: str) -> None:
    job = Job(OWN[name][0], 2)
    whole = simulated(job)

    def resumed(rank: int) -> list[object]:
        model, optimizer = build(job, rank)
        sync = la.attach(model, optimizer, job.recipe)
        for t in range(1, 8):
            step(job, model, optimizer, job.data()[rank][t - 1], t)
        saved = torch.load(
            _bytes((sync.state_dict(), model.state_dict(), optimizer.state_dict())),
            weights_only=True,
        )
        sync.detach()
        model, optimizer = build(job, rank)
        sync = la.attach(model, optimizer, job.recipe)
        model.load_state_dict(saved[1])
        optimizer.load_state_dict(saved[2])
        sync.load_state_dict(saved[0])
        trace = []
        for t in range(8, job.steps + 1):
            step(job, model, optimizer, job.data()[rank][t - 1], t)
            with sync.consensus(mean=False):
                consensus = values(model)
            trace.append((values(model), consensus))
        return trace

    assert same_bits(la.simulate(resumed, workers=2), [run[7:] for run in whole])


def _bytes(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def half(which: int) -> Callable[..., list[dict[str, Tensor]]]:
    """A selector: the first or the second parameter of each group."""

    def select(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
        groups = parameters(model, optimizer)
        return [{k: p for k, p in group.items() if int(k) % 2 == which} for group in groups]

    return select


def test_fragments_cover_the_model_like_one_round() -> None:
    whole = la.Round(la.every(4), OuterStep(0.7, 0.9), Mean())
    fragments = tuple(replace(whole, part=half(which)) for which in (0, 1))
    assert same_bits(simulated(Job(fragments, 3)), simulated(Job((whole,), 3)))


def test_matrices_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """In buckets smaller than they are, sharded exchanges, and fragments of layers."""
    update = MatrixStep(0.1, 0.6)
    one = simulated(Job((la.Round(la.every(3), update, Mean()),), 3))
    fragments = [Fragment(index, 2, by="layers") for index in range(2)]
    parts = tuple(la.Round(la.every(3), update, Mean(), part=part) for part in fragments)
    assert same_bits(simulated(Job(parts, 3)), one)
    for module in (buckets, channel):
        monkeypatch.setattr(module, "BUCKET_BYTES", 24)
    for exchange in (Mean(), ShardedMean()):
        assert same_bits(simulated(Job((la.Round(la.every(3), update, exchange),), 3)), one)


def test_after_a_step_an_update_of_matrices_sees_each_with_its_shape() -> None:
    seen: list[tuple[int, list[tuple[int, ...]]]] = []

    @dataclass(frozen=True)
    class Look(Update):
        whole = True

        def after_step(self, x: Tensor, state: State, clock: Clock) -> None:
            seen.append((x.numel(), [tuple(shape) for shape in clock.shapes]))

    def worker(rank: int) -> None:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        la.attach(model, optimizer, (la.Round(la.every(3), Look(), Mean()),))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    la.simulate(worker, workers=1)
    assert seen == [(12, [(3, 4)]), (3, [(3,)])]


def test_a_fragment_that_may_cut_a_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match=r'needs whole tensors.*by="layers"'):
        la.Round(la.every(3), MatrixStep(0.1, 0.6), Mean(), part=Fragment(0, 2))


def test_a_round_of_its_own_on_the_workers_of_a_node() -> None:
    """`over="replica"`: the ranks of one worker, each for itself."""
    recipe = (la.Round(la.every(1), Average(), Mean(), over="replica"),)

    def run(rank: int) -> float:
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        la.attach(model, optimizer, recipe, nprocs_per_node=2)
        with torch.no_grad():
            model.weight.fill_(float(rank))
        optimizer.step()
        return model.weight.item()

    assert la.simulate(run, workers=4) == [0.5, 0.5, 2.5, 2.5]


def test_gradients_of_workers_of_two_ranks_are_averaged_over_all() -> None:
    """A gradient round over the workers, as is the default, beside the one inside each worker."""

    def run(rank: int, over: str) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recipe = (la.GradientRound(la.every(1), Average(), Mean(), over=over),)
        groups = 1 if over == "group" else None
        la.attach(model, optimizer, recipe, nprocs_per_node=2, group_size=groups)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 3, generator=generator)).square().sum().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    workers, world = (
        la.simulate(lambda rank, over=over: run(rank, over), workers=4)  # type: ignore[misc]
        for over in ("workers", "world")
    )
    assert all(torch.equal(x, world[0]) for x in (*workers, *world))
    with pytest.raises(ValueError, match="needs workers of one rank"):
        la.simulate(lambda rank: run(rank, "group"), workers=4)


def test_whole_tensors_are_refused_for_gradients() -> None:
    class Matrices(Average):
        whole = True

    with pytest.raises(ValueError, match="Matrices needs whole tensors, which rounds on gradients"):
        la.GradientRound(la.every(1), Matrices(), Mean())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((0, 2, "layer"), "by must be"),
        ((2, 2), "index must be below count"),
        ((0, 0), "count must"),
    ],
)
def test_a_fragment_that_is_none_is_refused(given: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Fragment(*given)


class Faulty(Average):
    """``what`` says which mistake it makes."""

    what = ""
    slots: ClassVar[dict[str, Any]] = {"a": "everywhere"}

    def init(self, x: Tensor) -> State:
        return {"a": x}

    def send(self, x: Tensor, state: State, clock: la.Clock) -> Tensor:
        return state["a"] if self.what == "state" else x

    def combine(self, mean: Tensor, state: State, clock: la.Clock) -> Tensor:
        return None if self.what == "combine" else mean  # type: ignore[return-value]

    def fold(self, x: Any, received: Any, sent: Any, state: State, clock: la.Clock) -> Tensor:
        return None if self.what == "fold" else received  # type: ignore[return-value]


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("state", r"Wrong.send must not return state\['a'\] itself.*return state\['a'\].clone"),
        ("combine", "Wrong.combine must return a tensor, not NoneType"),
        ("fold", "Wrong.fold must return a tensor, not NoneType"),
        ("slots", r"Wrong.slots\['a'\] must be one of 'owner', 'everywhere'.*did you mean"),
    ],
)
def test_mistakes_in_an_update_are_named(what: str, words: str, delay: int) -> None:
    slots = {"a": "everywere"} if what == "slots" else Faulty.slots
    kind = type("Wrong", (Faulty,), {"what": what, "slots": slots, "replaces": False})
    recipe = (la.Round(la.every(1), kind(), Mean(), delay=delay),)

    def run(rank: int) -> None:
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = la.attach(model, optimizer, recipe)
        for _ in range(3):
            model(torch.ones(1, 1) + rank).sum().backward()
            optimizer.step()
        sync.finish()

    with pytest.raises(ValueError, match=words):
        la.simulate(run, workers=2)


def test_a_delay_needs_a_fold() -> None:
    """Without one, what arrives would replace x, and the steps since it was sent be lost."""

    class Other(Update):
        """a <- mean(x)"""

        def combine(self, mean: Tensor, state: State, clock: Clock) -> Tensor:
            return mean

    la.Round(la.every(2), Other(), Mean())
    with pytest.raises(ValueError, match="lose the steps since: give it a `fold`"):
        la.Round(la.every(2), Other(), Mean(), delay=1)
    la.Round(la.every(2), OuterStep(1.0, 0.0), Mean(), delay=1)


def test_a_weight_needs_an_exchange_that_carries_it() -> None:
    """With others, a weighted mean would be a plain one."""

    class Weighted(Average):
        slots: ClassVar[dict[str, Slot]] = {"w": "private"}
        weight = "w"

        def init(self, x: Tensor) -> State:
            return {"w": torch.ones(())}

    graph = la.topology.Graph("exponential")
    la.Round(la.every(1), Weighted(), Push(graph))
    with pytest.raises(ValueError, match=r"which Mean would leave out: use exchanges.Push"):
        la.Round(la.every(1), Weighted(), Mean())


def test_an_anchor_is_one_of_the_slots() -> None:
    class Other(Average):
        anchor = "q"

    with pytest.raises(ValueError, match=r"the anchor 'q', which is not among its slots \(none\)"):
        la.Round(la.every(1), Other(), Mean())


@pytest.mark.parametrize("delay", [0, 1, 3, 7])
def test_a_fold_knows_its_own_round(delay: int) -> None:
    """The rounds before it, also while later ones are in flight, and at the end."""

    @dataclass(frozen=True)
    class Counting(Update):
        seen: list[tuple[int, int]] = field(default_factory=list)

        def send(self, x: Tensor, state: State, clock: Clock) -> Tensor:
            return torch.full_like(x, float(clock.executed))

        def fold(
            self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
        ) -> Tensor:
            self.seen.append((int(received[0]), clock.executed))
            return x

    def train(rank: int) -> list[tuple[int, int]]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        update = Counting()
        sync = la.attach(model, optimizer, (la.Round(la.every(2), update, Mean(), delay=delay),))
        for _ in range(9):
            model(torch.full((1, 2), 1.0 + rank)).sum().backward()
            optimizer.step()
        with sync.consensus():
            pass
        sync.finish()
        return update.seen

    for seen in la.simulate(train, workers=2):
        assert all(sent == executed for sent, executed in seen)
        assert {sent for sent, _ in seen} == {0, 1, 2, 3}


def test_parameters_are_not_coded_as_they_are() -> None:
    """In every round, a code of four bits would take their low bits."""
    with pytest.raises(ValueError, match=r"CodedMean.*give the exchange relative=True"):
        la.Round(la.every(2), Average(), CodedMean(Int4(), relative=False))
    la.Round(la.every(2), Average(), CodedMean(Int4(), relative=True))


def test_a_round_that_is_no_recipe_says_what_to_write() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone: Any = la.Round(la.every(2), Average(), Mean())
    with pytest.raises(ValueError, match=r"put the round in a tuple, \(round,\)"):
        la.attach(model, optimizer, alone)


def test_an_attach_that_failed_leaves_no_hooks() -> None:
    class NoSlots(Average):
        def init(self, x: Tensor) -> State:
            return {"forgotten": x}

    def run(rank: int) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrong = (*la.ddp(), la.Round(la.every(2), NoSlots(), Mean()))
        with pytest.raises(ValueError, match="slots do not list"):
            la.attach(model, optimizer, wrong)
        la.attach(model, optimizer, la.local_sgd(2))
        model(torch.ones(1, 1) + rank).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad.flatten().tolist()

    assert la.simulate(run, workers=2) == [[1.0], [2.0]]
