"""Workers that come and go in the simulator: newcomers equal the others, whatever happens."""

from __future__ import annotations

import datetime
import logging
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic.engine import newcomers
from laconic.links.calls import Call
from laconic.links.elastic import simulated
from laconic.links.elastic.feed import Feed
from laconic.links.elastic.relay_frames import Record, Snapshot, Start
from laconic.policy import chooser
from laconic.policy.chooser import Chooser
from laconic.policy.probe import Probed, probe

Optimizers = Sequence[torch.optim.Optimizer]
Step = Callable[[nn.Module, Any, torch.Tensor, laconic.Synchronizer], object]


def late(recipe: str) -> Any:
    return pytest.param(recipe, marks=pytest.mark.slow)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - x[:, :3].sin()).square().mean()
    return loss


def plain(model: nn.Module, optimizers: Any, x: torch.Tensor, sync: Any) -> None:
    loss_of(model, x).backward()
    for optimizer in optimizers:
        optimizer.step()


def accumulated(model: nn.Module, optimizers: Any, x: torch.Tensor, sync: Any) -> None:
    """Two backward passes, each of which averages, and one that does not. Also as a program that
    throws a step away, since its loss is NaN."""
    loss_of(model, x).backward()
    model.zero_grad()
    with sync.no_sync():
        loss_of(model, x).backward()
    loss_of(model, x).backward()
    plain(model, optimizers, x, sync)


def withheld(model: nn.Module, optimizers: Any, x: torch.Tensor, sync: Any) -> None:
    """Only the last backward pass averages."""
    with sync.no_sync():
        loss_of(model, x).backward()
    plain(model, optimizers, x, sync)


def averaged(model: nn.Module, optimizers: Any, x: torch.Tensor, sync: Any) -> None:
    """No backward pass averages, and the mean is clipped."""
    with sync.no_sync():
        loss_of(model, x).backward()
    sync.average_gradients()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    for optimizer in optimizers:
        optimizer.step()


def clipped(model: nn.Module, optimizers: Any, x: torch.Tensor, sync: Any) -> None:
    """Gradients are changed after they were averaged."""
    loss_of(model, x).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for optimizer in optimizers:
        optimizer.step()


def closure(model: nn.Module, optimizers: Any, x: torch.Tensor, sync: Any) -> None:
    def compute() -> torch.Tensor:
        model.zero_grad()
        value = loss_of(model, x)
        value.backward()
        return value

    for optimizer in optimizers:
        optimizer.step(compute)


def adamw(model: Any) -> Optimizers:
    return [torch.optim.AdamW(model.parameters(), lr=1e-2)]


def two(model: Any) -> Optimizers:
    momentum = torch.optim.SGD(model[0].parameters(), lr=1e-2, momentum=0.9)
    return [momentum, torch.optim.AdamW(model[2].parameters(), lr=1e-2)]


def lbfgs(model: Any) -> Optimizers:
    return [torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)]


def program(
    recipe: str, step: Step = plain, make: Callable[[Any], Optimizers] = adamw, steps: int = 24
) -> Callable[[int], dict[str, Any]]:
    """What a worker runs. Returns its first step, the batches that its
    norm layer had seen then, the parameters of its model before and after
    `finish`, the samples it has drawn, how many workers were lost, its learning rate, and what
    `auto` has chosen."""

    def train(number: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
        optimizers = make(model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 5, 0.9)
        sampler = laconic.ElasticSampler(10_000, seed=1)
        elastic = laconic.Elastic("simulated", others={"data": sampler, "rate": schedule})
        given: Any = optimizers if len(optimizers) > 1 else optimizers[0]
        sync = laconic.attach(model, given, eval(recipe), elastic=elastic)
        data = torch.randn(10_000, 9, generator=torch.Generator().manual_seed(5))
        begun, samples, drawn = sync.step, iter(sampler), list[int]()
        batches = int(model.state_dict()["1.num_batches_tracked"])
        while sync.step < steps:
            batch = [next(samples) for _ in range(4)]
            drawn += batch
            model.zero_grad()
            step(model, optimizers, data[batch], sync)
            schedule.step()
        before, step_now = [p.tolist() for p in model.parameters()], sync.step
        chosen = [(c.step, c.text, c.facts.workers) for c in getattr(sync, "choices", [])]
        sync.finish()
        return {
            "begun": begun,
            "batches": batches,
            "step": step_now,
            "before": before,
            "values": [x.tolist() for x in model.state_dict().values()],
            "drawn": drawn,
            "lost": sync.stats().workers_lost,
            "rate": optimizers[0].param_groups[0]["lr"],
            "choices": chosen,
        }

    return train


def left(results: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
    return [result for result in results if result is not None]


def only(results: Sequence[dict[str, Any]], key: str) -> Any:
    """What is the same on all workers."""
    assert all(result[key] == results[0][key] for result in results), key
    return results[0][key]


@pytest.mark.parametrize(
    "recipe",
    [
        *("ddp(codec='int4')", "local_sgd(4, delay=2, codec='int8')", "streaming_diloco(8)"),
        *("sgp(delay=2)", late("easgd(3)"), late("d_psgd()")),
        late("slowmo(laconic.local_sgd(3), period=6)"),
        late("diloco(8, delay=3)"),
        late("post_local_sgd(6, 4)"),
        "outer_step(laconic.ddp(), 3)",  # in steps that newcomers repeat
        late("outer_step(laconic.local_sgd(3), 6, outer='muon')"),
        "outer_step(laconic.streaming_diloco(8), 4, outer='muon', average=False)",
    ],
)
def test_workers_come_and_go(recipe: str) -> None:
    faults = laconic.Faults(4, kill=((0, 3), (2, 9), (4, 20)), join=(5, 14))
    results = laconic.simulate(program(f"laconic.{recipe}", clipped), faults=faults)
    assert [number for number, result in enumerate(results) if result is None] == [0, 2, 4]
    present = left(results)
    only(present, "values")
    assert all(result["batches"] == result["begun"] for result in present), "buffers, too"
    assert only(present, "lost") == 3
    assert only(present, "rate") == pytest.approx(1e-2 * 0.9**4)
    drawn = [sample for result in present for sample in result["drawn"]]
    assert len(drawn) == len(set(drawn)), "no sample twice among those that are left"


def test_the_push_weight_of_a_newcomer_is_one() -> None:
    """Whatever its donor has, here 0.5: so all of them sum to the number of workers."""
    weights: list[float] = []

    def step(model: nn.Module, optimizers: Any, x: torch.Tensor, sync: Any) -> None:
        if sync.step == 7:
            weights.append(float(sync.state_dict()["rounds"][0]["state"][0]["w"]))
        plain(model, optimizers, x, sync)

    train = program("laconic.sgp('bipartite_linear')", step, steps=8)
    laconic.simulate(train, faults=laconic.Faults(3, join=(5,)))
    assert sum(weights) == pytest.approx(len(weights)) == 4 and max(weights) != 1.0


@pytest.mark.parametrize(
    ("step", "make"),
    [(accumulated, adamw), (withheld, adamw), (averaged, adamw), (closure, lbfgs), (plain, two)],
)
def test_a_newcomer_equals_the_others_whatever_a_step_is(
    step: Step, make: Callable[[Any], Optimizers]
) -> None:
    recipe = "laconic.ddp()" if step is plain else "laconic.ddp(codec='int8')"
    plan = laconic.Faults(start=3, kill=((1, 12),), join=(7, 15))
    found = left(laconic.simulate(program(recipe, step, make), faults=plan))
    assert sorted(result["begun"] for result in found) == [0, 0, 7, 15]
    only(found, "before")


def test_a_newcomer_repeats_steps_with_their_settings(caplog: pytest.LogCaptureFixture) -> None:
    """Such as the rate of each. It then has the same, and is not sent the model again."""
    with caplog.at_level(logging.INFO):
        plan = laconic.Faults(start=2, join=(7, 15))
        found = laconic.simulate(program("laconic.ddp()"), faults=plan)
    only(left(found), "before")
    assert "caught up" in caplog.text and "gave another result" not in caplog.text


@pytest.mark.parametrize("recipe", ["ddp()", "local_sgd(4)"])
def test_a_newcomer_has_the_scale_and_the_rate_of_the_others(recipe: str) -> None:
    """Also a rate in a tensor, which the schedule computes from the one before."""

    def train(number: int) -> tuple[float, float, list[Any]]:
        torch.manual_seed(0)
        model = nn.Linear(9, 3)
        rate = torch.tensor(0.1, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, foreach=False)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
        elastic = laconic.Elastic("simulated", others={"rate": schedule})
        sync = laconic.attach(model, optimizer, recipe, scaler=scaler, elastic=elastic)
        data = torch.Generator().manual_seed(number)
        while sync.step < 20:
            model.zero_grad()
            scaler.scale(loss_of(model, torch.randn(4, 9, generator=data))).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        rate = optimizer.param_groups[0]["lr"]
        return scaler.get_scale(), float(rate), [p.tolist() for p in model.parameters()]

    found = laconic.simulate(train, faults=laconic.Faults(start=2, join=(9,)))
    assert len(found) == 3 and found[0] == found[1] == found[2]


@pytest.mark.fault("a newcomer that had repeated steps could not load another state")
def test_a_newcomer_whose_donor_is_lost_asks_another_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here it has repeated steps of the first one."""
    ask, monkey = simulated._Planned.call_donor, monkeypatch
    monkey.setattr(newcomers, "NEAR_SECONDS", -1.0)  # it is never ready before the last frame
    monkey.setattr(Feed, "idle", lambda self: False)
    monkey.setattr(newcomers, "RETRY_SECONDS", 0.0)

    def call_donor(self: Any, number: int, awake: Callable[[], None]) -> Feed:
        if number:
            return ask(self, 0, awake)
        frames = self._cast.feeds[self._me]
        lost = next(k for k, frame in enumerate(frames) if isinstance(frame, Start))
        stream: Any = simulated._Stream(frames[:lost])
        return Feed(stream, "lost", awake)

    monkey.setattr(simulated._Planned, "call_donor", call_donor)
    with caplog.at_level(logging.INFO):
        found = laconic.simulate(program("laconic.ddp()"), faults=laconic.Faults(2, join=(7,)))
    only(left(found), "before")
    assert len(left(found)) == 3 and "a donor was lost" in caplog.text


@pytest.mark.fault("a trace ended a newcomer that had caught up with more than its memory held")
def test_a_simulated_newcomer_takes_in_any_number_of_frames() -> None:
    """In the run they came one after the other, and here all are there at once."""
    record = Record(Call(1, "gradients"), ["0"], [torch.empty(2**24)])
    stream: Any = simulated._Stream([Snapshot(1, []), record, record])
    feed = Feed(stream, "0", lambda: None)
    feed.join(time.monotonic() + 60)
    assert isinstance(feed.pop(), Snapshot)
    assert [feed.pop(), feed.pop()] == [record, record]


@pytest.mark.fault("a worker that joined at the end of a run did not get its result")
def test_a_newcomer_that_joins_at_the_end_finishes() -> None:
    for recipe in ("laconic.local_sgd(4)", "laconic.ddp()"):
        results = laconic.simulate(program(recipe, steps=8), faults=laconic.Faults(2, join=(8,)))
        assert None not in results
        only(left(results), "values")


def plan_at_random(seed: int) -> laconic.Faults:
    """Kills over 80 steps, with 10 steps between two on average. A worker joins 8 steps later."""
    chance, alive, time = random.Random(seed), dict.fromkeys(range(4), 0), 0.0
    kill, join = list[tuple[int, int]](), list[int]()
    while (time := time + chance.expovariate(1 / 10)) < 80:
        step = int(time)
        able = [worker for worker, since in alive.items() if since < step]
        if len(able) > 1:
            worker = chance.choice(able)
            del alive[worker]
            kill.append((worker, step))
            if step + 8 < 80:
                alive[4 + len(join)] = step + 9
                join.append(step + 8)
    return laconic.Faults(4, tuple(kill), tuple(join))


@pytest.mark.parametrize("seeds", [[1], pytest.param(range(20), marks=pytest.mark.slow)])
def test_plans_at_random(seeds: Sequence[int]) -> None:
    for each in seeds:
        plan = plan_at_random(each)
        found = laconic.simulate(program("laconic.diloco(8)", steps=80), faults=plan)
        killed = {worker for worker, _ in plan.kill}
        assert killed and all(found[w] is not None for w in range(4) if w not in killed)
        if left(found):  # a plan at random may kill them all
            only(left(found), "values")


def test_plans_that_cannot_work() -> None:
    for options, text in (
        ({"start": 0}, "start must be"),
        ({"start": 2, "kill": ((2, 5),)}, "workers 0 to 1, not 2"),
        ({"start": 2, "kill": ((0, 5), (0, 6))}, "killed once"),
        ({"start": 2, "kill": ((0, 5), (1, 6))}, "no worker is left after step 6"),
        ({"start": 2, "join": (5, 4)}, "must ascend"),
    ):
        with pytest.raises(ValueError, match=text):
            laconic.Faults(**options)


def test_traces_that_cannot_be_repeated(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no worker has recorded"):
        laconic.Trace(tmp_path)
    (tmp_path / "00.jsonl").write_text('{"unit": 1, "call": "", "workers": ["00", "01"]}\n')
    with pytest.raises(ValueError, match="lacks what these workers have recorded: 01"):
        laconic.Trace(tmp_path)
    (tmp_path / "00.jsonl").write_text('{"unit": 1, "call": "", "workers": ["00"]}\n')
    with pytest.raises(ValueError, match=r"a trace cannot repeat auto\(\)"):
        laconic.simulate(program("laconic.auto()"), faults=laconic.Trace(tmp_path))


def test_state_that_cannot_be_sent_is_an_error_at_the_start() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    for unsendable in (datetime.datetime(2026, 1, 1), [object()]):
        schedule.__dict__["last_epoch"] = unsendable
        elastic = laconic.Elastic("127.0.0.1:9", others={"rate": schedule}, wait=0.1)
        message = r"others\['rate'\]\.state_dict\(\) has something that cannot be sent"
        with pytest.raises(ValueError, match=message):
            laconic.attach(model, optimizer, laconic.local_sgd(2), elastic=elastic)


def test_a_checkpoint_deals_the_samples_to_other_workers(tmp_path: Path) -> None:
    def run(load: bool, steps: int, number: int) -> list[int]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = laconic.ElasticSampler(10_000, seed=1)
        elastic = laconic.Elastic("simulated", others={"data": sampler})
        sync = laconic.attach(model, optimizer, laconic.diloco(4), elastic=elastic)
        if load:
            laconic.load(tmp_path, model, optimizer, others={"data": sampler})
        samples, drawn = iter(sampler), list[int]()
        while sync.step < steps:
            drawn.append(next(samples))
            model(torch.ones(1, 4) * drawn[-1] / 1e4).sum().backward()
            optimizer.step()
        if not load:
            laconic.save(tmp_path, model, optimizer, others={"data": sampler})
        return drawn

    before = laconic.simulate(partial(run, False, 10), faults=laconic.Faults(3))
    for workers in (3, 4, 2):
        after = laconic.simulate(partial(run, True, 20), faults=laconic.Faults(workers))
        drawn = sorted(sample for samples in (*before, *after) for sample in samples)
        assert len(drawn) == len(set(drawn)) == 30 + 10 * workers


# -- auto ----


@pytest.fixture
def slow_then_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network is slow at first and fast later, choices are reviewed often, and all steps take
    as long."""

    def found(self: Chooser) -> Probed:
        self._world.gather(torch.tensor([1.0]))
        if self._world.size == 1:
            return probe(self._world, self._device)
        rate = (3e5, 1e12)[len(self.choices) % 2]
        return Probed(rate, 1e-4, 0, 0)

    monkeypatch.setattr(Chooser, "_probe", found)
    for name, value in {"REVIEW": 10, "LATER": 4, "WARMUP": 1, "WINDOW": 3}.items():
        monkeypatch.setattr(chooser, name, value)
    monkeypatch.setattr(
        chooser, "usual", lambda spans, cycle: (0.01, 0.005) if spans else (0.0, 0.0)
    )


@pytest.mark.parametrize("join", [4, pytest.param(25, marks=pytest.mark.slow)])
def test_auto_lets_newcomers_choose_as_the_others(join: int, slow_then_fast: None) -> None:
    """Whenever a worker joins: before the first choice, while paces are compared, and after a
    change of recipe."""
    plan = laconic.Faults(start=3, kill=((1, 40), (2, 60)), join=(join, join + 1, 50))
    found = left(laconic.simulate(program("laconic.auto()", steps=90), faults=plan))
    assert sorted(r["begun"] for r in found)[1:] == [join, join + 1, 50]
    choices = only(found, "choices")
    assert len({text for _, text, _ in choices}) > 1, "the recipe has changed"
    assert len({workers for *_, workers in choices}) > 1, "it measures again with other workers"
    assert only(found, "step") == 90
    only(found, "values")


def test_auto_chooses_nothing_for_a_worker_that_is_alone(slow_then_fast: None) -> None:
    """Until another one joins."""
    train = program("laconic.auto()", steps=60)
    found = left(laconic.simulate(train, faults=laconic.Faults(start=1, join=(30,))))
    choices = only(found, "choices")
    assert choices[0][2] == 2 and all(step > 30 for step, _, _ in choices)


@pytest.mark.fault("auto() divided by zero in the last worker of an elastic run")
def test_auto_goes_on_with_the_last_worker(
    slow_then_fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It then measures a network of nobody, while messages have slowed its steps down before."""
    monkeypatch.setattr(Chooser, "_used", lambda _: (0.0, 1e-9, 0.5))
    plan = laconic.Faults(start=2, kill=((1, 40),))
    found = left(laconic.simulate(program("laconic.auto()", steps=80), faults=plan))
    assert only(found, "step") == 80
    assert only(found, "choices")


@pytest.mark.fault("a newcomer with other buffers ended with a RuntimeError that named no worker")
def test_a_newcomer_with_another_buffer() -> None:
    def train(number: int) -> None:
        model = nn.Linear(2, 1)
        model.register_buffer("seen", torch.zeros(1 + (number == 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        elastic = laconic.Elastic("simulated")
        sync = laconic.attach(model, optimizer, laconic.ddp(), elastic=elastic)
        while sync.step < 12:
            model(torch.full((4, 2), 1.0 + number)).sum().backward()
            optimizer.step()

    said = "the state of another worker cannot be loaded: Error.s. in loading state_dict for Linear"
    with pytest.raises(laconic.LinkError, match=said):
        laconic.simulate(train, faults=laconic.Faults(2, join=(5,)))
