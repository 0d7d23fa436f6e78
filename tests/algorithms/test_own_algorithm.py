"""Algorithms written by a user: what the engine tells them, and mistakes that it names.
`test_contract_of_options` trains some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.algorithms.exchanges import CodedMean, Mean, Push, ShardedMean
from laconic.algorithms.update import Clock, Seen, Slot, State, Tensors, Update
from laconic.algorithms.updates import Average, MuonStep, OuterStep
from laconic.codecs import Int4
from laconic.parts import Fragment

from tests.support.loops import descend
from tests.support.own_updates import half
from tests.support.training import Job, same_bits, simulated


def test_selected_parts_cover_the_model_like_one_round() -> None:
    whole = la.Round(la.every(4), OuterStep(0.7, 0.9), Mean())
    parts = tuple(replace(whole, part=half(which)) for which in (0, 1))
    assert same_bits(simulated(Job(parts, 3, 12)), simulated(Job((whole,), 3, 12)))


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


METHODS = "send", "combine", "fold", "after_step"


class Faulty(Average):
    """``what`` says which mistake it makes."""

    what = ""
    slots: ClassVar[dict[str, Any]] = {"a": "everywhere"}

    def init(self, x: Tensor) -> State:
        return {"a": x}

    def uses(self, method: str, state: State, clock: la.Clock) -> None:
        if self.what == f"{method} lr":
            clock.lr  # noqa: B018
        if self.what in (f"{method} owner", f"{method} everywhere"):
            state["a"].add_(1.0)

    def send(self, x: Tensor, state: State, clock: la.Clock) -> Tensor:
        self.uses("send", state, clock)
        return state["a"] if self.what == "state" else x

    def combine(self, mean: Tensor, state: State, clock: la.Clock) -> Tensor:
        self.uses("combine", state, clock)
        return None if self.what == "combine" else mean  # type: ignore[return-value]

    def fold(self, x: Any, received: Any, sent: Any, state: State, clock: la.Clock) -> Tensor:
        self.uses("fold", state, clock)
        return None if self.what == "fold" else received  # type: ignore[return-value]

    def after_step(self, x: Tensor, state: State, clock: la.Clock) -> None:
        self.uses("after_step", state, clock)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("state", r"Wrong.send must not return state\['a'\] itself.*return state\['a'\].clone"),
        ("combine", "Wrong.combine must return a tensor, not NoneType"),
        ("fold", "Wrong.fold must return a tensor, not NoneType"),
        ("combine everywhere", r"Wrong.combine uses state\['a'\], whose slot is \"everywhere\""),
        ("slots", r"Wrong.slots\['a'\] must be one of 'owner', 'everywhere'.*did you mean"),
        *((f"{m} lr", "because Wrong does not say .*give that class uses_lr") for m in METHODS),
        *(
            (f"{m} owner", rf"Wrong.{m} uses state\['a'\].*\"owner\".*\"everywhere\"")
            for m in METHODS
            if m != "combine"
        ),
    ],
)
def test_mistakes_in_an_update_are_named(what: str, words: str, delay: int) -> None:
    slots: dict[str, Any] = {"a": "everywere"} if what == "slots" else dict(Faulty.slots)
    if what.endswith("owner"):
        slots = {"a": "owner"}
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


class Matrices(Average):
    scope = "tensors"


class Rated(Average):
    uses_lr = True


class NoFold(Update):
    def combine(self, mean: Tensor, state: State, clock: Clock) -> Tensor:
        return mean


class Weighted(Average):
    slots: ClassVar[dict[str, Slot]] = {"w": "private"}
    weight = "w"

    def init(self, x: Tensor) -> State:
        return {"w": torch.ones(())}


class Anchored(Average):
    anchor = "q"


class Misspelled(Average):
    scope = "tensor"  # type: ignore[assignment]


class NotAsync(Mean):
    def run(self, *arguments: Any) -> Any: ...


def round_of(update: Update, exchange: la.Exchange | None = None, **more: Any) -> la.Round:
    return la.Round(la.every(2), update, exchange or Mean(), **more)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: round_of(NoFold(), delay=1), "lose the steps since: give it a `fold`"),
    (lambda: round_of(Weighted()), r"which Mean would leave out: use exchanges.Push"),
    (lambda: round_of(Average(), NotAsync()), "NotAsync.run must be a coroutine: async def run"),
    (lambda: la.GradientRound(la.every(1), Average(), NotAsync()), "NotAsync.run must be"),
    (lambda: round_of(Misspelled()), "Misspelled.scope must be one of 'elements', 'tensors', not"),
    (lambda: Tensors().map(torch.ones(2), torch.neg), "clock.tensors is for `send` and `fold`"),
    (lambda: round_of(Anchored()), r"the anchor 'q', which is not among its slots \(none\)"),
    (lambda: round_of(Average(), CodedMean(Int4(), relative=False)), "CodedMean.*relative=True"),
    (lambda: round_of(MuonStep(0.1, 0.6), part=Fragment(0, 2)), 'whole tensors.*by="layers"'),
    (lambda: la.GradientRound(la.every(1), Matrices(), Mean()), "Matrices needs whole tensors"),
    (lambda: la.GradientRound(la.every(1), Rated(), Mean()), "Rated uses the learning rate"),
    (lambda: Fragment(0, 2, "layer"), "by must be"),
    (lambda: Fragment(2, 2), "index must be below count"),
    (lambda: Fragment(0, 0), "count must"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_cannot_work_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_like_it_and_works() -> None:
    for each in (
        round_of(OuterStep(1.0, 0.0), delay=1),
        round_of(Average(), CodedMean(Int4(), relative=True)),
    ):
        first, second = simulated(Job((each,), 2, 4))
        (_, last), (_, other), (_, begin) = first[-1], second[-1], first[0]
        twice = [[(last, last)]]
        assert same_bits(twice, [[(other, other)]]), "they agree on the consensus"
        assert not same_bits(twice, [[(begin, begin)]]), "which has moved"
    round_of(NoFold())
    round_of(Weighted(), Push(la.topology.Graph("exponential")))


def test_gradients_take_any_mean_that_all_workers_hold() -> None:
    means = [(la.GradientRound(la.every(1), Average(), e),) for e in (Mean(), ShardedMean())]
    assert same_bits(*(simulated(Job(recipe, 3, 4)) for recipe in means))


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


def test_a_round_that_is_no_recipe_says_what_to_write() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone: Any = la.Round(la.every(2), Average(), Mean())
    with pytest.raises(ValueError, match=r"put the round in a tuple, \(round,\)"):
        la.attach(model, optimizer, alone)


@pytest.mark.parametrize("kind", [la.Round, la.GradientRound])
def test_an_exchange_does_not_get_an_unknown_learning_rate(kind: Callable[..., la.Round]) -> None:
    class Scaled(Mean):
        async def run(self, link: Any, flat: Any, combine: Any, clock: Any, state: Any) -> Any:
            return await super().run(link, flat.mul_(clock.lr), combine, clock, state)

    def run(rank: int) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        la.attach(model, optimizer, (kind(la.every(1), Average(), Scaled()),))
        with pytest.raises(ValueError, match=r"clock.lr is not known, because Average does not"):
            model(torch.ones(1, 1) + rank).sum().backward()
            optimizer.step()

    la.simulate(run, workers=2)


def test_a_method_lists_the_state_that_it_may_use() -> None:
    """So an outer optimizer of torch's, which gets all that `combine` may use, leaves alone what a
    subclass keeps besides."""

    @dataclass(frozen=True)
    class Besides(OuterStep):
        slots: ClassVar[dict[str, Slot]] = {**OuterStep.slots, "e": "everywhere"}

        def init(self, x: Tensor) -> State:
            return {**super().init(x), "e": x.clone()}

    update = Besides(0.7, 0.0, lambda params: torch.optim.Adam(params, lr=0.01))
    state = {"e": torch.ones(2), "anchor": torch.ones(2), "step": torch.tensor(1.0)}
    assert [*Seen(state, update, "combine")] == ["anchor", "step"]
    assert {**Seen(state, update, "send")}.keys() == {"e", "step"}
    assert "anchor" not in Seen(state, update, "send") and len(Seen(state, update, "fold")) == 2

    def run(rank: int) -> Tensor:
        torch.manual_seed(rank)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with la.attach(model, optimizer, (la.Round(la.every(2), update, Mean()),)):
            for _ in range(4):
                descend(optimizer, model(torch.full((1, 3), rank + 1.0)).sum())
        return model.weight.detach().clone()

    first, other = la.simulate(run, workers=2)
    assert torch.equal(first, other) and bool(first.isfinite().all())


def test_owner_state_has_an_element_for_each_of_x() -> None:
    """Else ranks beyond the first would get an empty slice of it."""

    class Norm(Average):
        slots: ClassVar[dict[str, Slot]] = {"norm": "owner"}

        def init(self, x: Tensor) -> State:
            return {"norm": x.norm().view(1)}

    def run(rank: int) -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"'norm' with the shape \[1\]"):
            la.attach(model, optimizer, (la.Round(la.every(2), Norm(), ShardedMean()),))

    la.simulate(run, workers=2)


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
