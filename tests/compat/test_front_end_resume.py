"""The front ends' state: exact resume from state dicts, keys, masters, and refusals. The golden
digests resume them from `laconic.save`."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic import SlowMoBaseAlgorithm, SlowMoDistributedDataParallel

from tests.support.loops import flat

pytestmark = [
    pytest.mark.filterwarnings("ignore:these arguments have no effect"),
    pytest.mark.filterwarnings("ignore:slowmo_memory_efficient=True sends"),
]
STEPS, SAVES = 12, (4, 7)
"""Steps; and those after which a run is saved."""
SGP = {"slowmo_base_algorithm": SlowMoBaseAlgorithm.SGP, "slowmo_frequency": 6}
SLOW: dict[str, tuple[int, dict[str, Any]]] = {
    "local SGD": (2, {"slowmo_frequency": 6}),
    "two nodes of two": (4, {"slowmo_frequency": 6, "nprocs_per_node": 2}),
    "SGP, push weights not 1": (3, {**SGP, "graph": "uneven"}),
    "masters": (2, {**SGP, "overlap": True, "synch_freq": 3}),
}
"""Ranks, and options."""
COMM: dict[str, tuple[Any, ...]] = {"EASGD": (5, 0.3, 0.1), "LSGD": (5, 0.3, 0.1), "DDP": ()}


class Run:
    """A training of one kind on one rank."""

    def __init__(self, name: str, rank: int) -> None:
        torch.manual_seed(rank)
        self.name, self.rank, self.t, masters = name, rank, 0, name == "masters"
        inner = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
        inner = inner.half() if masters else inner
        self.model: Any = inner
        self.params: list[Tensor] = list(inner.parameters())
        if name in SLOW:
            ranks, options = SLOW[name]
            given: dict[str, Any] = {"nprocs_per_node": 1, **options}
            if "graph" in given:
                given["graph"] = la.DynamicBipartiteExponentialGraph(rank, ranks)
            self.model = SlowMoDistributedDataParallel(inner, **given)
        self.flat = flat(inner).float() if masters else None
        held = self.params if self.flat is None else [self.flat]
        local = torch.optim.SGD(held, lr=0.05, momentum=0.9)
        self.optimizer: Any = local
        if name in COMM:
            self.optimizer = la.CommOptimizer(local, name, 2, *COMM[name], model=inner)

    def step(self) -> None:
        self.t += 1
        seed = torch.Generator().manual_seed(1000 * self.rank + self.t)
        x = torch.randn(4, 6, generator=seed).to(self.params[0].dtype)
        loss = self.model(x).square().mean()
        loss.backward()
        if self.flat is not None:
            grads = [p.grad.float().view(-1) for p in self.params if p.grad is not None]
            self.flat.grad = torch.cat(grads)
        if self.name == "LSGD":
            self.optimizer.report_loss(loss)
        self.optimizer.step()
        if self.flat is not None:
            sizes = [p.numel() for p in self.params]
            for p, values in zip(self.params, torch.split(self.flat, sizes), strict=True):
                p.data.copy_(values.view_as(p))
        self.model.zero_grad(set_to_none=True)
        if self.name in SLOW:
            masters = None if self.flat is None else {"all": self.flat}
            self.model.perform_slowmo(self.optimizer, masters)

    def go(self, steps: int) -> Run:
        for _ in range(steps):
            self.step()
        return self

    def values(self) -> Tensor:
        return flat(self.model).clone() if self.flat is None else self.flat.clone()

    def state(self) -> Any:
        states = self.model.state_dict(), self.optimizer.state_dict()
        return copy.deepcopy([self.t, self.flat, *states])

    def load(self, state: Any) -> None:
        self.t, masters, model, optimizer = copy.deepcopy(state)
        if self.flat is not None:
            self.flat.copy_(masters)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


@pytest.mark.parametrize("name", [*SLOW, *COMM][1:])
def test_state_dicts_resume_exactly(name: str) -> None:
    """In objects that are new. Where push weights are other than 1 and the module has masters, once
    `bind` was called."""
    binds, ranks = name == "masters", SLOW.get(name, (2,))[0]

    def saving(rank: int) -> tuple[list[Any], list[Tensor]]:
        run = Run(name, rank)
        states, trace = [run.state()], [run.values()]
        for _ in range(STEPS):
            run.step()
            states.append(run.state())
            trace.append(run.values())
        return states, trace

    runs = la.simulate(saving, workers=ranks)

    def resuming(rank: int) -> None:
        for at in SAVES:
            run = Run(name, rank)
            run.load(runs[rank][0][at])
            if binds and at == 4:
                with pytest.raises(ValueError, match="its push weights are not 1: call model"):
                    run.step()
                run = Run(name, rank)
                run.load(runs[rank][0][at])
            if binds:
                run.model.bind(run.optimizer, run.flat)
            for t in range(at + 1, STEPS + 1):
                run.step()
                assert torch.equal(run.values(), runs[rank][1][t]), f"saved {at}, step {t}"

    la.simulate(resuming, workers=ranks)


def test_what_laconic_save_refuses(tmp_path: Path) -> None:
    """The module without its wrapper, and an optimizer that communicates nothing."""

    def run(rank: int) -> None:
        made = Run("local SGD", rank).go(1)
        alone = la.CommOptimizer(torch.optim.SGD(made.params), None, 1)
        for optimizer, message in (
            (made.optimizer, "a wrapper of the model follows this optimizer: pass it as model"),
            (alone, r"torch\.save where nothing is communicated"),
        ):
            with pytest.raises(ValueError, match=message):
                la.save(tmp_path, made.model.module, optimizer)

    la.simulate(run, workers=2)
    assert not list(tmp_path.iterdir())


# -- the wrapper's state ----


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def test_keys_are_the_modules_own_and_the_rest_is_extra_state() -> None:
    def run(rank: int) -> None:
        made = Run("local SGD", rank).go(3)
        state = made.model.state_dict()
        assert set(state) == {*made.model.module.state_dict(), "_extra_state"}
        assert state["0.weight"].data_ptr() == made.model.module[0].weight.data_ptr()
        bare = {key: value for key, value in state.items() if key != "_extra_state"}
        made.model.module.load_state_dict(bare)
        for attempt in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"copy or pickle model\.module"):
                attempt(made.model)
        with pytest.raises(ValueError, match="to start over from other weights, call detach"):
            made.model.load_state_dict(bare)
        model: Any = SlowMoDistributedDataParallel(Outer(), 1)
        state = model.state_dict()
        assert set(state) == {"module.weight", "module.bias", "_extra_state"}
        model.load_state_dict({**state, "module.weight": torch.ones(2, 2)})
        assert torch.equal(model.module.module.weight, torch.ones(2, 2))

    la.simulate(run, workers=2)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_weights_without_slowmo_state_load_and_are_the_new_start(prefix: str) -> None:
    """Those of the bare module, and those of DistributedDataParallel, with ``module.`` before."""

    def run(rank: int) -> None:
        made = Run("local SGD", rank)
        weights = {
            prefix + k: torch.ones_like(v) for k, v in made.model.module.state_dict().items()
        }
        made.model.load_state_dict(weights)
        assert bool((made.values() == 1).all())
        made.go(1)
        rounds = made.model.synchronizer.state_dict()["rounds"]
        states = [state for part in rounds for state in part["state"]]
        (anchor,) = (state["anchor"] for state in states if "anchor" in state)
        assert bool((anchor[anchor != 0] == 1).all()) and bool(anchor.any())

    with pytest.warns(UserWarning, match="the state has no SlowMo state: counters, anchor"):
        la.simulate(run, workers=2)


def test_loading_goes_back_and_refuses_what_is_not_this_ranks() -> None:
    """In the middle of a training; the state of other settings; and rank 0's on every rank, as a
    script loads it that saves on rank 0 alone."""
    saved: dict[int, Any] = {}

    def run(rank: int) -> None:
        made = Run("local SGD", rank).go(4)
        saved[rank] = state = made.state()
        end = made.go(10).values()
        made.load(state)
        assert made.model.num_updates == 4 and torch.equal(made.go(10).values(), end)
        inner = Run("DDP", rank).model
        other = SlowMoDistributedDataParallel(inner, 1, slowmo_frequency=6, slowmo_momentum=0.4)
        other.load_state_dict(state[2])
        optimizer = torch.optim.SGD(other.parameters(), lr=0.05)
        other(torch.ones(4, 6)).square().mean().backward()
        with pytest.raises(ValueError, match=r"saved under SlowMo.*momentum=0.5.*momentum=0.4"):
            optimizer.step()
            other.perform_slowmo(optimizer)
        with pytest.raises(ValueError, match="this is not what get_extra_state"):
            other.set_extra_state({"else": 1})

    def rank_0s(rank: int) -> str:
        made = Run("local SGD", rank)
        made.load(saved[0])
        with pytest.raises(ValueError) as caught:
            made.step()
        return str(caught.value)

    la.simulate(run, workers=2)
    messages = la.simulate(rank_0s, workers=2)
    assert "each rank saves and loads its own" in messages[1]
    assert messages[0] == f"rank 1: {messages[1]}"


# -- float32 masters ----


def test_the_module_is_its_masters_after_every_call_and_at_the_end() -> None:
    """With overlapped gossip, where x and the model differ between rounds; and in consensus() and
    after finish()."""

    def run(rank: int) -> tuple[Tensor, Tensor]:
        made = Run("masters", rank)
        assert made.flat is not None
        for _ in range(9):
            made.step()
            assert torch.equal(flat(made.model), made.flat.half())
        before = flat(made.model).clone()
        with made.model.consensus() as module:
            inside = flat(module).clone()
        assert torch.equal(flat(made.model), before)
        made.model.finish()
        assert torch.equal(flat(made.model), made.flat.half())
        return inside, flat(made.model)

    for one, other in zip(*la.simulate(run, workers=2), strict=True):
        assert torch.equal(one, other)


def test_masters_that_do_not_fit_are_refused() -> None:
    def run(rank: int) -> None:
        made = Run("masters", rank)
        flat = made.flat
        assert flat is not None
        made.model(torch.ones(1, 6).half()).sum().backward()
        cases: list[tuple[Any, str]] = [
            (flat[:-1], r"sizes of module.parameters\(\): 74 in total"),
            (flat.half(), "fp32_params must be float32"),
            ({"a": flat, "b": flat}, "a dict with one entry, not 2"),
            (flat.clone(), "must share storage with the optimizer's parameters"),
        ]
        for given, message in cases:
            with pytest.raises(ValueError, match=message):
                made.model.perform_slowmo(made.optimizer, given)
        with pytest.raises(ValueError, match="holds none of the module's parameters"):
            made.model.perform_slowmo(made.optimizer)

    la.simulate(run, workers=2)
