"""State of SlowMoDistributedDataParallel: exact resume in fresh processes, keys, refusals."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import laconic as la
from laconic import SlowMoBaseAlgorithm, SlowMoDistributedDataParallel

from tests.support import gloo, training
from tests.support import slowmo_training as loop
from tests.support.slowmo_training import Settings

pytestmark = [
    pytest.mark.filterwarnings("ignore:slowmo_memory_efficient=True sends"),
]
SGP = SlowMoBaseAlgorithm.SGP
STEPS = 26
NEXT = 13
"""How far a run is followed: the longest period, and one step more."""
SAVES = {"local SGD": 5, "SGP in flight": 5}
"""In either half of the run; 2 for the others."""
UNEVEN = {"slowmo_base_algorithm": SGP, "slowmo_frequency": 12}
RUNS = {
    "local SGD": Settings(4, 1, STEPS, options={"slowmo_frequency": 6}),
    "two nodes of two": Settings(4, 2, STEPS, "adamw", options={"slowmo_frequency": 12}),
    "two shards": Settings(4, 1, STEPS, options={"slowmo_frequency": 12, "slowmo_num_shards": 2}),
    "SGP": Settings(4, 1, STEPS, options=UNEVEN),
    "SGP, no average": Settings(4, 1, STEPS, options={**UNEVEN, "slowmo_memory_efficient": False}),
    "SGP in flight": Settings(3, 1, STEPS, options={**UNEVEN, "overlap": True, "synch_freq": 2}),
    "SGP, push weights not 1": Settings(3, 1, STEPS, options={**UNEVEN, "graph": "uneven"}),
}


@pytest.fixture(scope="module")
def fresh() -> Iterator[gloo.Pool]:
    """Processes other than those of the run that saves."""
    pool = gloo.Pool(4)
    yield pool
    pool.close()


def build(settings: Settings, rank: int) -> Any:
    given = dict(settings.options)
    if "graph" in given:
        given["graph"] = la.DynamicBipartiteExponentialGraph(rank, settings.ranks)
    return loop.build(replace(settings, options=given), rank)


def saving(rank: int, settings: Settings, at: list[int]) -> tuple[dict[int, bytes], list[Any]]:
    """Everything at each step of ``at``, and the parameters after every step."""
    with loop.over_gloo(settings.ranks):
        model, optimizer = build(settings, rank)
        data, kept, trace = settings.job.data()[rank], {}, []
        for t in range(settings.steps + 1):
            if t:
                loop.step(settings, model, optimizer, data[t - 1], t)
                trace.append(loop.flat(model))
            if t in at:
                file = io.BytesIO()
                torch.save([model.state_dict(), optimizer.state_dict()], file)
                kept[t] = file.getvalue()
        return kept, trace


def resuming(rank: int, settings: Settings, at: int, saved: list[bytes]) -> list[Any]:
    """The parameters after every step that follows."""
    with loop.over_gloo(settings.ranks):
        model, optimizer = build(settings, rank)
        states = torch.load(io.BytesIO(saved[rank]), weights_only=True)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        data, trace = settings.job.data()[rank], []
        end = min(at + NEXT, settings.steps)
        for t in range(at + 1, end + 1):
            loop.step(settings, model, optimizer, data[t - 1], t)
            trace.append(loop.flat(model))
        assert model.num_updates == end
        return trace


@pytest.mark.parametrize("name", RUNS)
def test_resuming_is_exact(pool: gloo.Pool, fresh: gloo.Pool, name: str) -> None:
    """At random steps, the start among them, in processes that did not save."""
    settings = RUNS[name]
    dice, half = random.Random(name), SAVES.get(name, 2)
    at = [0, *dice.sample(range(1, NEXT), half), *dice.sample(range(NEXT, STEPS), half)]
    runs = pool.run(saving, settings, at, ranks=settings.ranks)
    for t in at:
        parts = [kept[t] for kept, _ in runs]
        again = fresh.run(resuming, settings, t, parts, ranks=settings.ranks)
        for (_, trace), resumed in zip(runs, again, strict=True):
            assert len(resumed) == min(NEXT, STEPS - t)
            assert all(map(torch.equal, resumed, trace[t:]))


def one(rank: int, **given: Any) -> tuple[SlowMoDistributedDataParallel, torch.optim.Optimizer]:
    settings = Settings(2, options={"slowmo_frequency": 6, **given})
    return loop.build(settings, rank)


def go(model: Any, optimizer: Any, rank: int, first: int, last: int) -> None:
    settings = Settings(2)
    for t in range(first, last + 1):
        loop.step(settings, model, optimizer, settings.job.data()[rank][t - 1], t)


def test_keys_are_the_modules_own_and_the_rest_is_extra_state() -> None:
    def run(rank: int) -> None:
        model, optimizer = one(rank)
        go(model, optimizer, rank, 1, 3)
        state = model.state_dict()
        assert set(state) == {*model.module.state_dict(), "_extra_state"}
        assert state["0.weight"].data_ptr() == model.module[0].weight.data_ptr()  # type: ignore[index, union-attr, operator]
        bare = {key: value for key, value in state.items() if key != "_extra_state"}
        model.module.load_state_dict(bare)
        whole = nn.ModuleDict({"net": model}).state_dict()
        assert set(whole) == {f"net.{key}" for key in state}

    la.simulate(run, workers=2)


def test_a_module_named_module_keeps_its_keys() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    def run(rank: int) -> None:
        torch.manual_seed(rank)
        model = SlowMoDistributedDataParallel(Outer(), 1)
        state = model.state_dict()
        assert set(state) == {"module.weight", "module.bias", "_extra_state"}
        with torch.no_grad():
            model.module.module.weight.zero_()  # type: ignore[union-attr, operator]
        saved = {key: torch.ones(2, 2) if key == "module.weight" else v for key, v in state.items()}
        model.load_state_dict(saved)
        assert torch.equal(model.module.module.weight, torch.ones(2, 2))  # type: ignore[union-attr, arg-type]

    la.simulate(run, workers=2)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_weights_without_slowmo_state_load_and_are_the_new_start(prefix: str) -> None:
    """Those of the bare module, and those of DistributedDataParallel, with ``module.`` before."""
    torch.manual_seed(7)
    given = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()

    def run(rank: int) -> None:
        model, optimizer = one(rank)
        shapes = {key: value.shape for key, value in model.module.state_dict().items()}
        weights = {key: torch.ones(shape).double() for key, shape in shapes.items()}
        model.load_state_dict({prefix + key: value for key, value in weights.items()})
        assert all(torch.equal(p, torch.ones_like(p)) for p in model.parameters())
        go(model, optimizer, rank, 1, 1)
        anchors = [
            state["anchor"]
            for part in model.synchronizer.state_dict()["rounds"]
            for state in part["state"]
            if "anchor" in state
        ]
        assert anchors
        for anchor in anchors:
            assert torch.equal(anchor[anchor != 0], torch.ones_like(anchor[anchor != 0]))

    with pytest.warns(UserWarning, match="the state has no SlowMo state: counters, anchor"):
        la.simulate(run, workers=2)
    assert given is not None


def test_weights_without_slowmo_state_are_refused_in_the_middle_of_a_training() -> None:
    def run(rank: int) -> bool:
        model, optimizer = one(rank)
        go(model, optimizer, rank, 1, 2)
        with pytest.raises(ValueError, match="to start over from other weights, call detach"):
            model.load_state_dict(model.module.state_dict())
        return True

    assert la.simulate(run, workers=2) == [True, True]


def test_loading_in_the_middle_of_a_training_goes_back_to_what_was_saved() -> None:
    def run(rank: int) -> bool:
        model, optimizer = one(rank)
        go(model, optimizer, rank, 1, 4)
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        go(model, optimizer, rank, 5, 14)
        end = loop.flat(model)
        states = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        assert model.num_updates == 4
        go(model, optimizer, rank, 5, 14)
        return torch.equal(loop.flat(model), end)

    assert la.simulate(run, workers=2) == [True, True]


def test_one_ranks_state_on_all_ranks_is_refused_on_all() -> None:
    """What a script does that saves on rank 0 alone."""
    saved: dict[int, Any] = {}

    def save(rank: int) -> None:
        model, optimizer = one(rank)
        go(model, optimizer, rank, 1, 4)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        saved[rank] = file.getvalue()

    def load(rank: int) -> str:
        model, optimizer = one(rank)
        model.load_state_dict(torch.load(io.BytesIO(saved[0]), weights_only=True))
        with pytest.raises(ValueError) as caught:
            go(model, optimizer, rank, 5, 5)
        return str(caught.value)

    la.simulate(save, workers=2)
    messages = la.simulate(load, workers=2)
    assert "each rank saves and loads its own" in messages[1]
    assert messages[0] == f"rank 1: {messages[1]}"


def test_state_of_other_settings_is_refused() -> None:
    def run(rank: int) -> bool:
        model, optimizer = one(rank)
        go(model, optimizer, rank, 1, 4)
        state = model.state_dict()
        other, second = one(rank, slowmo_momentum=0.4)
        other.load_state_dict(state)
        with pytest.raises(
            ValueError, match=r"saved under SlowMo.*momentum=0.5.*momentum=0.4.*: make the module"
        ):
            go(other, second, rank, 5, 5)
        with pytest.raises(ValueError, match="this is not what get_extra_state"):
            other.set_extra_state({"else": 1})
        return True

    assert la.simulate(run, workers=2) == [True, True]


# -- float32 masters ----


class Masters:
    """A half-precision module, its wrapper, and an optimizer of one flat master."""

    def __init__(self, rank: int, **given: Any) -> None:
        torch.manual_seed(rank)
        inner = nn.Linear(6, 3).half()
        self.model = SlowMoDistributedDataParallel(inner, 1, **{"slowmo_frequency": 6, **given})
        self.params = list(self.model.parameters())
        self.flat = torch.cat([p.detach().float().view(-1) for p in self.params])
        self.optimizer = torch.optim.SGD([self.flat], lr=0.05, momentum=0.9)

    def step(self, rank: int, t: int) -> None:
        generator = torch.Generator().manual_seed(1000 * rank + t)
        x = torch.randn(4, 6, generator=generator).half()
        self.model(x).square().mean().backward()
        grads = [p.grad.float().view(-1) for p in self.params if p.grad is not None]
        self.flat.grad = torch.cat(grads)
        self.optimizer.step()
        sizes = [p.numel() for p in self.params]
        for p, values in zip(self.params, torch.split(self.flat, sizes), strict=True):
            p.data.copy_(values.view_as(p))
        self.model.zero_grad(set_to_none=True)
        self.model.perform_slowmo(self.optimizer, self.flat)

    def state(self) -> Any:
        return copy.deepcopy(
            [self.model.state_dict(), self.flat, self.optimizer.state_dict()["state"]]
        )

    def load(self, state: Any) -> None:
        weights, flat, inner = copy.deepcopy(state)
        self.model.load_state_dict(weights)
        self.flat.copy_(flat)
        if inner:
            self.optimizer.state[self.flat]["momentum_buffer"] = inner[0]["momentum_buffer"]


LATE = {"slowmo_base_algorithm": SGP, "overlap": True, "synch_freq": 3}
MASTERS = {"local SGD": {}, "SGP": {"slowmo_base_algorithm": SGP}, "overlapped SGP": LATE}


@pytest.mark.parametrize("name", MASTERS)
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.filterwarnings("ignore:these arguments have no effect")
def test_masters_resume_exactly(name: str, bound: bool) -> None:
    """By itself, or, where push weights are other than 1 at the time, once `bind` was called."""

    def run(rank: int) -> tuple[bool, bool]:
        one = Masters(rank, **MASTERS[name])
        states = [one.state()]
        ends = []
        for t in range(1, 15):
            one.step(rank, t)
            states.append(one.state())
            ends.append(one.flat.clone())
        exact, asked = True, False
        for at in range(0, 14, 2 if name == "local SGD" else 1):
            two = Masters(rank, **MASTERS[name])
            two.load(states[at])
            if bound:
                two.model.bind(two.optimizer, two.flat)
            try:
                two.step(rank, at + 1)
            except ValueError as error:
                assert "its push weights are not 1: call model.bind" in str(error)
                asked = True
                continue
            for t in range(at + 2, 15):
                two.step(rank, t)
                exact = exact and torch.equal(two.flat, ends[t - 1])
        return exact, asked

    for exact, asked in la.simulate(run, workers=3):
        assert exact
        assert asked == (name == "overlapped SGP" and not bound)


def test_the_module_is_its_masters_after_every_call_and_at_the_end() -> None:
    """With overlapped gossip, where x and the model differ between rounds; and in consensus() and
    after finish()."""

    def run(rank: int) -> Any:
        given = Masters(rank, **LATE, slowmo_frequency=48)
        same = []
        for t in range(1, 9):
            given.step(rank, t)
            same.append(torch.equal(loop.flat(given.model), given.flat.half()))
        before = loop.flat(given.model)
        with given.model.consensus() as module:
            inside = loop.flat(module)
        same.append(torch.equal(loop.flat(given.model), before))
        given.model.finish()
        same.append(torch.equal(loop.flat(given.model), given.flat.half()))
        return all(same), inside, loop.flat(given.model)

    runs = la.simulate(run, workers=2)
    for same, inside, end in runs:
        assert same
        assert torch.equal(inside, runs[0][1]) and torch.equal(end, runs[0][2])


@pytest.mark.parametrize(
    ("fp32", "message"),
    [
        ("short", "sizes of module.parameters\\(\\): 21 in total"),
        ("half", "fp32_params must be float32"),
        ("two", "a dict with one entry, not 2"),
        ("copy", "must share storage with the optimizer's parameters"),
    ],
)
def test_masters_that_do_not_fit_are_refused(fp32: str, message: str) -> None:
    def run(rank: int) -> bool:
        given = Masters(rank)
        made = {
            "short": given.flat[:-1],
            "half": given.flat.half(),
            "two": {"a": given.flat, "b": given.flat},
            "copy": given.flat.clone(),
        }
        given.model(torch.ones(1, 6).half()).sum().backward()
        with pytest.raises(ValueError, match=message):
            given.model.perform_slowmo(given.optimizer, made[fp32])
        return True

    assert la.simulate(run, workers=2) == [True, True]


def test_masters_of_other_models_are_refused() -> None:
    """Made before wrapping, on ranks seeded differently; and not named at all."""

    def run(rank: int) -> bool:
        torch.manual_seed(rank)
        inner = nn.Linear(6, 3).half()
        flat = torch.cat([p.detach().float().view(-1) for p in inner.parameters()])
        model = SlowMoDistributedDataParallel(inner, 1)
        optimizer = torch.optim.SGD([flat], lr=0.1)
        optimizer.step()
        with pytest.raises(ValueError, match="holds none of the module's parameters"):
            model.perform_slowmo(optimizer)
        with pytest.raises(ValueError, match=r"differ from rank 0's on ranks \[1\]"):
            model.perform_slowmo(optimizer, flat)
        return True

    assert la.simulate(run, workers=2) == [True, True]


def test_copying_is_refused_with_the_way_to_do_it() -> None:
    def run(rank: int) -> bool:
        model, _ = one(rank)
        for attempt in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"copy or pickle model\.module"):
                attempt(model)
        assert loop.equal(*(training.values(m) for m in (copy.deepcopy(model.module), model)))
        return True

    assert la.simulate(run, workers=2) == [True, True]
