"""What programs do with an elastic run while workers join it, in the simulator."""

from __future__ import annotations

import datetime
import hashlib
import inspect
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic.links.elastic.link import ElasticLink
from laconic.links.elastic.mesh import Interrupted
from laconic.links.elastic.simulated import SimulatedElasticLink

Step = Callable[[nn.Module, Any, torch.Tensor, Any], object]


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x[:, :3].sin()).square().mean()


def plain(model: nn.Module, optimizers: Any, x: torch.Tensor, sync: Any) -> None:
    loss(model, x).backward()
    for optimizer in optimizers:
        optimizer.step()


def twice(model: nn.Module, optimizers: Any, x: torch.Tensor, sync: Any) -> None:
    """Two backward passes, each of which averages."""
    loss(model, x).backward()
    plain(model, optimizers, x, sync)


def repeated(model: nn.Module, optimizers: Any, x: torch.Tensor, sync: Any) -> None:
    """As a program that throws a step away, since its loss is NaN."""
    loss(model, x).backward()
    model.zero_grad()
    plain(model, optimizers, x, sync)


def accumulated(model: nn.Module, optimizers: Any, x: torch.Tensor, sync: Any) -> None:
    with sync.no_sync():
        loss(model, x).backward()
    plain(model, optimizers, x, sync)


def closure(model: nn.Module, optimizers: Any, x: torch.Tensor, sync: Any) -> None:
    def compute() -> torch.Tensor:
        model.zero_grad()
        value = loss(model, x)
        value.backward()
        return value

    for optimizer in optimizers:
        optimizer.step(compute)


def adamw(model: nn.Sequential) -> Any:
    return [torch.optim.AdamW(model.parameters(), lr=1e-2)]


def two(model: nn.Sequential) -> Any:
    return [
        torch.optim.SGD(model[0].parameters(), lr=1e-2, momentum=0.9),
        torch.optim.AdamW(model[2].parameters(), lr=1e-2),
    ]


def lbfgs(model: nn.Sequential) -> Any:
    return [torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)]


def program(
    recipe: str, step: Step = plain, make: Callable[[nn.Sequential], Any] = adamw, steps: int = 30
) -> Callable[[int], tuple[int, str]]:
    """What a worker runs: returns its first step and the digest of its model before `finish`."""

    def train(number: int) -> tuple[int, str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3))
        optimizers = make(model)
        given = optimizers if len(optimizers) > 1 else optimizers[0]
        sync = laconic.attach(model, given, eval(recipe), elastic=laconic.Elastic())
        begun, generator = sync.step, torch.Generator().manual_seed(number)
        while sync.step < steps:
            model.zero_grad()
            step(model, optimizers, torch.randn(4, 9, generator=generator), sync)
        digest = hashlib.sha256()
        for p in model.parameters():
            digest.update(p.detach().numpy().tobytes())
        sync.finish()
        return begun, digest.hexdigest()

    return train


@pytest.mark.parametrize("recipe", ["laconic.ddp()", "laconic.ddp(codec='int8')"])
@pytest.mark.parametrize(
    ("step", "make"),
    [
        (plain, adamw),
        (twice, adamw),
        (repeated, adamw),
        (accumulated, adamw),
        (closure, adamw),
        (closure, lbfgs),
        (plain, two),
    ],
)
def test_a_newcomer_equals_the_others_whatever_a_step_is(
    recipe: str, step: Step, make: Callable[[nn.Sequential], Any]
) -> None:
    plan = laconic.Faults(start=3, kill=((1, 12),), join=(7, 15))
    found = [r for r in laconic.simulate(program(recipe, step, make), faults=plan) if r]
    assert sorted(begun for begun, _ in found) == [0, 0, 7, 15]
    assert len({digest for _, digest in found}) == 1


def test_a_newcomer_repeats_steps_with_their_settings(caplog: pytest.LogCaptureFixture) -> None:
    """It then has the same, and is not sent the model again."""

    def decaying(model: nn.Module, optimizers: Any, x: torch.Tensor, sync: Any) -> None:
        optimizers[0].param_groups[0]["lr"] = 0.1 / (sync.step + 1)
        plain(model, optimizers, x, sync)

    with caplog.at_level(logging.INFO):
        plan = laconic.Faults(start=2, join=(7, 15))
        found = laconic.simulate(program("laconic.ddp()", decaying), faults=plan)
    assert len({digest for _, digest in found}) == 1
    assert "caught up" in caplog.text and "gave another result" not in caplog.text


class Clock:
    """An object with state, as a scheduler."""

    def __init__(self, state: Any, fails_after: int = 10**9) -> None:
        self.state, self.calls, self.fails_after = state, 0, fails_after

    def state_dict(self) -> Any:
        self.calls += 1
        if self.calls > self.fails_after:
            raise RuntimeError("no state yet")
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize(
    "state",
    [
        {"time": datetime.datetime(2026, 1, 1)},
        {"function": lambda: None},
        torch.Generator(),
        {"set of objects": [object()]},
    ],
)
def test_state_that_cannot_be_sent_is_an_error_at_the_start(state: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = laconic.Elastic("127.0.0.1:9", others={"clock": Clock(state)}, wait=0.1)
    message = r"others\['clock'\]\.state_dict\(\) has something that cannot be sent"
    with pytest.raises(ValueError, match=message):
        laconic.attach(model, optimizer, laconic.local_sgd(2), elastic=elastic)


def test_state_that_fails_later_ends_a_simulated_run(caplog: pytest.LogCaptureFixture) -> None:
    def train(number: int) -> int:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        elastic = laconic.Elastic(others={"clock": Clock({"n": 1}, fails_after=1)})
        sync = laconic.attach(model, optimizer, laconic.local_sgd(2), elastic=elastic)
        while sync.step < 20:
            model(torch.full((1, 2), float(number))).sum().backward()
            optimizer.step()
        return sync.step

    message = "worker 2 cannot join: the worker that sends its state cannot read the state of other"
    with caplog.at_level(logging.ERROR), pytest.raises(laconic.LinkError, match=message):
        laconic.simulate(train, faults=laconic.Faults(2, join=(5,)))
    assert "no state yet" in caplog.text


@pytest.mark.parametrize("recipe", ["laconic.local_sgd(4)", "laconic.sgp(delay=1)"])
def test_a_plan_that_kills_a_donor(recipe: str) -> None:
    """A newcomer gets the state of the worker that is killed last."""
    plan = laconic.Faults(start=3, kill=((0, 7), (1, 9)), join=(6,))
    assert plan.joins(3) == 6 and plan.donor(3, [0, 1, 2]) == 2
    found = laconic.simulate(program(recipe), faults=plan)
    assert [r is None for r in found] == [True, True, False, False]


@pytest.mark.parametrize("seed", range(20))
def test_plans_at_random(seed: int) -> None:
    plan = laconic.Faults.random(start=4, steps=200, mtbf=25, seed=seed, restart=20)
    found = laconic.simulate(program("laconic.diloco(8)", steps=200), faults=plan)
    killed = {worker for worker, _ in plan.kill}
    assert all(found[w] is not None for w in range(4) if w not in killed)


def test_a_trace_that_lacks_a_worker(tmp_path: Path) -> None:
    """It would give other bits."""
    (tmp_path / "00.jsonl").write_text('{"unit": 1, "call": "", "workers": ["00", "01"]}\n')
    with pytest.raises(ValueError, match="lacks what these workers have recorded: 01"):
        laconic.Trace(tmp_path)


@pytest.mark.parametrize(
    "recipe",
    [
        "laconic.ddp()",
        "laconic.ddp(codec='int4')",
        "laconic.local_sgd(4, delay=2, codec='int8')",
        "laconic.diloco(4, merge='eager', delay=2)",
        "laconic.streaming_diloco(8)",
        "laconic.slowmo(laconic.sgp(), period=6)",
        "laconic.sgp(peers=2)",
        "laconic.sgp(delay=1)",
        "laconic.noloco(4)",
        "laconic.easgd(3)",
        "laconic.auto()",
    ],
)
def test_the_number_of_workers_is_read_inside_units_only(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere it may change at any time, and workers would do different things. Where a runner is
    made, its number is that of the start; which slice a worker owns is not asked in these runs."""
    reads: list[str] = []
    trains: set[int] = set()
    harmless = {("parameter_rounds.py", "__init__"), ("exchange.py", "region")}
    harmless.add(("auto.py", "_choose"))  # who logs

    def guarded(name: str) -> property:
        original = vars(ElasticLink)[name].fget

        def read(self: ElasticLink) -> int:
            training = threading.get_ident() in trains
            if training and not self.replaying and not self.units.under_way:
                stack = ((Path(f.filename), f.function) for f in inspect.stack(0)[1:])
                file, function = next((f, n) for f, n in stack if f.parent.name != "links")
                if file.is_relative_to(package) and (file.name, function) not in harmless:
                    reads.append(f"{file.name} {function}: {name}")
            value: int = original(self)
            return value

        return property(read)

    package = Path(laconic.__file__).parent
    for name in ("size", "rank"):
        monkeypatch.setattr(SimulatedElasticLink, name, guarded(name), raising=False)

    def train(number: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sync = laconic.attach(model, optimizer, eval(recipe), elastic=laconic.Elastic())
        generator = torch.Generator().manual_seed(number)
        trains.add(threading.get_ident())
        while sync.step < 14:
            model.zero_grad()
            loss(model, torch.randn(4, 9, generator=generator)).backward()
            optimizer.step()
            if sync.step == 9:
                with sync.consensus():
                    pass
                late = nn.Parameter(torch.zeros(3))
                model.register_parameter("late", late)
                optimizer.add_param_group({"params": [late]})
        sync.mean(1.0)
        sync.finish()

    laconic.simulate(train, faults=laconic.Faults(start=2))
    assert reads == []


def test_a_broadcast_that_is_interrupted_leaves_its_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The unit runs again, perhaps from this worker's tensor."""
    sent: list[list[float]] = []

    class Torn:
        def broadcast(self, x: torch.Tensor, root: int) -> None:
            sent.append(x.tolist())
            if len(sent) == 1:
                x[:2] = 7.0
                raise Interrupted("rank 0 is lost")

        def digests(self) -> list[int]:
            return []

    def train(number: int) -> list[float]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = laconic.attach(model, optimizer, laconic.local_sgd(2), elastic=laconic.Elastic())
        link = sync.driver.session.elastic
        assert link is not None
        rendezvous: Any = link.rendezvous
        take_part = rendezvous.take_part

        def torn(ids: Any) -> None:
            take_part(ids)
            rendezvous.link = Torn()

        monkeypatch.setattr(rendezvous, "take_part", torn)
        monkeypatch.setattr(rendezvous, "resolve", lambda: False, raising=False)
        x = torch.ones(4)
        link.unit(lambda: link.broadcast(x))
        values: list[float] = x.tolist()
        return values

    assert laconic.simulate(train, faults=laconic.Faults(start=1)) == [[1.0] * 4]
    assert sent == [[1.0] * 4] * 2
