"""The recipe that chooses: what it chooses from which facts, alike on every rank, when it looks
again, and that a change of recipe in mid-training loses nothing."""

from __future__ import annotations

import copy
import io
import logging
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic import probe
from laconic.advisor.numbers import facts_from
from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.round import Round, recipe_text
from laconic.candidates import lateness, start
from laconic.engine.gradient_rounds import bucket_sizes
from laconic.engine.synchronizer import Synchronizer
from laconic.links import Link, Throttled
from laconic.links.cost import Cost
from laconic.links.null import NullLink
from laconic.predict import Facts, predict, travel
from laconic.processor import Usage

from tests.support import gloo
from tests.support.clock import Clock, controlled

auto_module = __import__("laconic.auto", fromlist=["choose"])

TEXT = Facts(workers=4, shapes=((845, 1024),), itemsize=4, compute=0.15, rate=100e6, one_way=1e-3)


def chosen(facts: Facts, target: float | None = None) -> str:
    text, reason = auto_module.choose(la.auto(target), facts, None, {})
    assert text in reason
    return str(text)


def _candidate(text: str) -> Any:
    return auto_module.Candidate(text, parse_recipe(text), 1.0)


# -- the cost model ----


def test_predictions_by_hand() -> None:
    """4 workers, 8,000,000 elements of 4 bytes, 0.5 s of computing, 80 Mbit/s, no latency."""
    facts = Facts(4, ((8_000_000,),), 4, 0.5, 80e6, 0.0)
    whole = 2 * 3 / 4 * 32e6 * 8 / 80e6  # 4.8 s
    assert predict((), facts).seconds == 0.5
    assert predict(la.local_sgd(10), facts).seconds == pytest.approx(0.5 + whole / 10)
    assert predict(la.local_sgd(10, delay=4), facts).seconds == pytest.approx(0.5 + 2.8 / 10)
    hidden = predict(la.local_sgd(20, delay=10), facts)
    assert hidden.seconds == 0.5 and hidden.exposed == 0
    assert hidden.busy == pytest.approx(whole / 20 / 0.5)
    assert hidden.bytes == pytest.approx(1.5 * 32e6 / 20)
    slow = replace(facts, compute=1.0)
    crowded = predict(la.local_sgd(4, delay=4), slow)
    assert crowded.seconds == pytest.approx(whole / 4 / 0.7), "the network is not always busy"
    waiting = predict(la.local_sgd(4, delay=4), facts)
    assert waiting.seconds == pytest.approx(0.5 + whole / 4), "no longer than without a delay"
    dense = predict(la.ddp(), facts)
    first = (2**20 + 25 * 2**20) / 32e6  # of the gradients: the first bucket leaves meanwhile
    late = 0.3 * first + whole * (1 - 2**20 / 32e6) - 0.3
    assert dense.seconds == pytest.approx(0.5 + late), "hides behind backward alone"
    assert predict(la.ddp(codec="int4"), facts).bytes == pytest.approx(dense.bytes / 7.88, rel=0.01)
    inside = la.hierarchical(2, 8)
    assert predict(inside, facts).bytes == pytest.approx(1.5 * 32e6 / 8)


def test_fragments_share_what_a_period_sends() -> None:
    whole = predict(la.diloco(12, codec="int4"), TEXT)
    parts = predict(la.streaming_diloco(12, 4, 0, codec="int4"), TEXT)
    assert parts.bytes == pytest.approx(whole.bytes, rel=0.01)


# -- the choice ----


def test_the_slower_the_network_the_less_is_said() -> None:
    """From dense gradients over ever shorter codes to ever longer periods."""
    rates = (1e11, 1e9, 3e8, 1e8, 3e7, 1e7, 3e6, 1e6, 1e5)
    found = [chosen(replace(TEXT, rate=rate)) for rate in rates]
    assert found[0] == "ddp()"
    assert found[3] == "ddp(codec='int4')"
    assert all(text.startswith("streaming_diloco(") for text in found[-4:])
    bytes_of = [predict(parse_recipe(t), TEXT).bytes for t in found]
    assert bytes_of == sorted(bytes_of, reverse=True)


def test_parameters_are_not_sent_in_every_step() -> None:
    """Where no message would be waited for, it still takes processor time."""
    for rate in (1e10, 1e7, 1e4):
        for candidate in auto_module.candidates(replace(TEXT, rate=rate)):
            if isinstance(candidate.recipe[0], Round):
                due = [any(r.when(step) for r in candidate.recipe) for step in range(1, 17)]
                assert sum(due) <= 8


def test_a_target_is_reached_or_the_fastest_taken() -> None:
    slow = replace(TEXT, rate=3e7)
    for target in (0.5, 0.9, 1.0):
        best = predict(parse_recipe(chosen(slow, target)), slow)
        assert slow.compute >= target * best.seconds
    hopeless = replace(TEXT, rate=100.0)
    found = chosen(hopeless, 1.0)
    seconds = [predict(c.recipe, hopeless).seconds for c in auto_module.candidates(hopeless)]
    assert predict(parse_recipe(found), hopeless).seconds == min(seconds)


def test_the_one_in_force_stays_unless_another_is_clearly_better() -> None:
    close = replace(TEXT, rate=1e9)
    best = chosen(close)
    other = {"ddp(codec='int8')", "ddp(codec='int4')"} - {best}
    text, _ = auto_module.choose(la.auto(), close, _candidate(other.pop()), {})
    assert text != best
    far, _ = auto_module.choose(la.auto(), close, _candidate("streaming_diloco(512)"), {})
    assert far == best


def test_messages_one_after_the_other_take_their_latencies() -> None:
    """3 buckets of 2 messages each, the first of which leaves after a third of backward."""
    facts = Facts(4, ((3 * 2**21,),), 4, 0.5, 1e15, 0.05, overlapping=False)
    first = 0.3 / 3
    assert predict(la.ddp(codec="int4"), facts).seconds == pytest.approx(0.2 + first + 3 * 0.1)
    quick = replace(facts, one_way=0.01)  # each has arrived when the next one leaves
    assert predict(la.ddp(codec="int4"), quick).seconds == pytest.approx(0.5 + 0.02)
    for overlapping in (True, None):  # all of them leave before the second message of any
        together = replace(facts, overlapping=overlapping)
        assert predict(la.ddp(codec="int4"), together).seconds == pytest.approx(0.5 + 0.1)


def test_what_is_measured_counts_more_than_what_is_predicted() -> None:
    facts = replace(TEXT, rate=1e8)
    assert auto_module.choose(la.auto(), facts, None, {})[0] == "ddp(codec='int4')"
    worse, reason = auto_module.choose(
        la.auto(), facts, None, {"coded gradients": 5.0, "gradients": 5.0}
    )
    assert worse.startswith("local_sgd(2, delay=") and "speed without communication" in reason


@pytest.mark.parametrize("target", [0.0, -1.0, 1.5, "fast"])
def test_a_wrong_target_is_refused(target: Any) -> None:
    with pytest.raises(ValueError, match="target"):
        la.auto(target)


def test_it_stands_for_a_recipe_in_attach_alone() -> None:
    with pytest.raises(ValueError, match="base must be a recipe"):
        la.slowmo(la.auto())  # type: ignore[arg-type]
    assert parse_recipe("auto(0.9)") == la.auto(0.9)


# -- the start ----

FAR = replace(TEXT, rate=50e6, one_way=0.04, compute=0.0)


@pytest.mark.parametrize(
    ("rate", "latency", "text"),
    [
        (50e6, 0.04, "local_sgd(2, delay=2, codec='int4')"),
        (50e6, 0.001, "ddp(codec='int4')"),
        (5e6, 0.04, "ddp(codec='int4')"),  # its messages take longer to send than to arrive
        (1e12, 0.01, "ddp(codec='int4')"),  # three buckets of two messages: 0.06 s
        (1e12, 0.02, "local_sgd(2, delay=2, codec='int4')"),  # 0.12 s
    ],
)
def test_it_starts_without_what_would_wait_for_latencies(
    rate: float, latency: float, text: str
) -> None:
    assert len(bucket_sizes(la.ddp(codec="int4")[0].exchange, FAR.elements * 4)) == 3
    assert start(4, replace(FAR, rate=rate, one_way=latency)).text == text


def test_one_worker_starts_without_a_codec() -> None:
    assert start(1).text == "ddp()" and start(4).text == "ddp(codec='int4')"
    assert start(4, replace(FAR, workers=1)).text == "ddp(codec='int4')", "others may join"


@pytest.mark.parametrize("nprocs", [1, 2], ids=["alone", "two ranks per worker"])
@pytest.mark.parametrize(
    ("rate", "latency", "adam", "before", "after"),
    [
        (1e8, 0.06, False, "local_sgd(2, delay=2, codec='int4')", 11),
        (1e8, 0.06, True, "streaming_diloco(8, delay=2, outer='muon')", 11),
        (1e8, 0.0, False, "ddp(codec='int4')", 4),
        (4e4, 0.0, True, "ddp(codec='int4')", 2),
    ],
)
def test_the_network_is_measured_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
    rate: float,
    latency: float,
    adam: bool,
    before: str,
    after: int,
    nprocs: int,
) -> None:
    """Once: the first choice needs the steps only, the fewer the longer each of them sends. The
    starting recipe stays without a switch if it is the choice, and its delay of two steps
    suffices."""
    probed: list[int] = []

    def found(self: Any) -> probe.Probed:
        probed.append(self._step)
        return probe.Probed(rate, latency, 0, 0, [0.0] * self._link.size)

    monkeypatch.setattr(auto_module.Chooser, "_probe", found)
    monkeypatch.setattr(auto_module.Chooser, "_used", lambda self, **_: (0.0, 0.0))
    monkeypatch.setattr(auto_module, "turning", lambda shapes, device: 0.0)
    monkeypatch.setattr(
        auto_module, "usual", lambda spans, cycle: (0.15, 0.15) if spans else (0.0, 0.0)
    )

    def one(rank: int) -> Any:
        torch.manual_seed(rank)
        middle = [nn.Linear(440, 440) for _ in range(4)]
        model = nn.Sequential(nn.Linear(40, 440), *middle)  # about as large as TEXT
        kind = torch.optim.AdamW if adam else torch.optim.Adagrad
        optimizer = kind(model.parameters(), lr=1e-3)
        sync = la.attach(model, optimizer, la.auto(), nprocs_per_node=nprocs)
        run, first = sync.driver.run, recipe_text(sync.recipe)
        early = list(sync.choices)
        for _ in range(13):
            optimizer.zero_grad()
            model(torch.full((2, 40), 1.0 + rank)).square().mean().backward()
            optimizer.step()
        return first, early, sync.choices, sync.driver.run is run, weights(model)

    for first, early, choices, same, _ in la.simulate(one, workers=4):
        assert first == recipe_text(parse_recipe(before)) and early == []
        assert [c.step for c in choices] == [after], "later if no step waits"
        assert choices[0].facts.rate == rate and choices[0].facts.one_way == latency
        assert same == (choices[0].text == before)
        if latency:
            assert same
    assert probed == [0] * 4


def test_a_resumed_run_measures_the_network_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network may have changed since it was attached and loaded, with a choice."""
    probed: list[int] = []

    def found(self: Any) -> probe.Probed:
        probed.append(self._step)
        return probe.Probed(1e8, 0.0, 0, 0, [0.0] * self._link.size)

    monkeypatch.setattr(auto_module.Chooser, "_probe", found)
    monkeypatch.setattr(auto_module.Chooser, "_used", lambda self, **_: (0.0, 0.0))
    monkeypatch.setattr(auto_module, "turning", lambda shapes, device: 0.0)
    monkeypatch.setattr(
        auto_module, "usual", lambda spans, cycle: (0.15, 0.15) if spans else (0.0, 0.0)
    )

    for end in (3, 8):  # before the first choice, and after it
        saved = la.simulate(lambda rank, end=end: go_on(rank, 1, end), workers=2)
        probed.clear()
        la.simulate(lambda rank, end=end, s=saved: go_on(rank, end, 40, s[rank][0]), workers=2)
        assert len(probed) == (2 if end == 3 else 4)


# -- in training ----


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 30))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulated steps take 10 ms, and messages what their link says, on a machine of any speed."""
    clock = controlled(monkeypatch)
    CLOCKS.append(clock)
    yield
    CLOCKS.clear()


CLOCKS: list[Clock] = []


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, t: int) -> None:
    for clock in CLOCKS:
        clock.sleep(0.01)
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(1000 * rank + t))
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), torch.sin(x[:, :30])).backward()
    optimizer.step()


def go_on(rank: int, first: int, last: int, state: Any = None) -> Any:
    """Take the steps from ``first`` to before ``last``, from a ``state`` that an earlier call has
    returned beside its choices."""
    model, optimizer = build(rank)
    sync = la.attach(model, optimizer, la.auto())
    parts = model, optimizer, sync
    for part, own in () if state is None else zip(parts, state, strict=True):
        part.load_state_dict(own)
    for t in range(first, last):
        step(model, optimizer, rank, t)
    return copy.deepcopy([part.state_dict() for part in parts]), sync.choices


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


class Changing(Throttled):
    """A network whose rate follows the step, as told by its first worker."""

    rates: Iterator[float]

    def set(self, rate: float) -> None:
        self._rate = rate

    def like(self, link: Link) -> Link:
        inner = Changing(link, self.bandwidth, self.latency)
        inner.set(self._rate)
        LINKS.append(inner)
        return inner


LINKS: list[Changing] = []


def changing(link: Link) -> Link:
    outer = Changing(link, "1gbit")
    LINKS.append(outer)
    return outer


def run(rank: int, steps: int, recipe: Any, rates: dict[int, float]) -> Any:
    """``rates``: the network's rate in bit/s from that step on; 0: from before `attach`."""
    model, optimizer = build(rank)

    def change(t: int) -> None:
        for link in LINKS if t in rates else ():
            link.set(rates[t])

    change(0)
    sync = la.attach(model, optimizer, recipe)
    for t in range(1, steps + 1):
        change(t)
        step(model, optimizer, rank, t)
    sync.finish()
    return sync.choices, weights(model)


def test_measurements_are_booked_apart_and_the_total_is_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two probes of known size: in `attach`, and where the run looks again."""

    def measured(link: Link, device: torch.device) -> probe.Probed:
        link.all_to_all(torch.zeros(3, 100), torch.zeros(3, 100))
        link.gather(torch.zeros(1))
        return probe.Probed(1e9, 1e-4, 0, 0, [0.0] * 3)

    monkeypatch.setattr(auto_module, "probe", measured)

    def train(rank: int) -> tuple[int, la.Stats]:
        model, optimizer = build(rank)
        sync = la.attach(model, optimizer, la.auto())
        attached = sync.stats().bytes_by_collective
        for t in range(1, 3):
            step(model, optimizer, rank, t)
        sync.driver.session.policy._probed = None  # type: ignore[union-attr]
        for t in range(3, 7):
            step(model, optimizer, rank, t)
        sync.finish()
        return attached["measurement"], sync.stats()

    each = 2 * 100 * 4 + 2 * 4
    for attached, stats in la.simulate(train, workers=3):
        sent = dict(stats.bytes_by_collective)
        assert attached == each and sent["measurement"] % each == 0
        assert sent["measurement"] >= 2 * each
        assert sum(sent.values()) == stats.bytes_sent == sum(stats.bytes_by_set.values())


def test_the_later_look_counts_what_a_step_computes_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps are slow: what was chosen with 0.6 s of computing is not with 0.1."""
    facts = replace(TEXT, rate=3e7, compute=0.6)
    monkeypatch.setattr(auto_module.Chooser, "_measure", lambda self: (facts, 0.6))
    monkeypatch.setattr(auto_module.Chooser, "_pace", lambda self: [0.3, 0.0, 0.1])
    monkeypatch.setattr(auto_module.Chooser, "_used", lambda self, **_: (0.0, 0.0))
    for choices, _ in la.simulate(lambda rank: run(rank, 30, la.auto(), {}), workers=3):
        assert [c.facts.compute for c in choices] == [0.6, 0.1]
        assert choices[0].text.startswith("ddp(") and choices[1].text.startswith("streaming")


def test_every_rank_makes_the_same_choice_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    LINKS.clear()
    with caplog.at_level(logging.INFO, logger="laconic"):
        found = la.simulate(
            lambda rank: run(rank, 40, la.auto(), {0: 1e6}), workers=3, link=changing
        )
    (choices, x), *others = found
    assert choices and all(other == choices for other, _ in others)
    assert all(torch.equal(x, y) for _, y in others)
    assert choices[0].step == 4
    assert choices[0].facts.rate == pytest.approx(1e6, rel=0.1)
    assert choices[0].text.startswith(("local_sgd(2, delay=", "streaming_diloco("))
    told = [record.message for record in caplog.records]
    assert len(told) == len(choices) and choices[0].reason in told[0]


def test_it_looks_again_when_the_network_gets_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 1 Gbit/s to 1 Mbit/s, though it may have chosen to send little by then, as under other
    load, and what it sends be hidden. Had it just settled on a choice, as it may where steps take
    uneven time, the next review is `REVIEW` steps after that, and its outcome known `LATER` later.
    """
    monkeypatch.setattr(auto_module, "LEAST_TRAFFIC", 2**10)
    monkeypatch.setattr(auto_module.Chooser, "_used", lambda self, **_: (0.0, 0.0))
    monkeypatch.setattr(probe, "LEAST", 2**10)
    LINKS.clear()
    steps = 50 + auto_module.REVIEW + auto_module.LATER + 1
    found = la.simulate(
        lambda rank: run(rank, steps, la.auto(), {0: 1e9, 50: 1e6}), workers=3, link=changing
    )
    choices = found[0][0]
    early, late = ([c for c in choices if (c.step > 50) == side] for side in (False, True))
    assert early and late and late[-1].facts.rate < early[-1].facts.rate / 5
    assert all(other == choices for other, _ in found)


@pytest.mark.parametrize(("before", "after"), [(1e12, 1e6), (1e6, 1e12)])
def test_it_chooses_again_when_a_byte_takes_another_time(
    monkeypatch: pytest.MonkeyPatch, before: float, after: float
) -> None:
    """By what it is told to have measured: steps take the same time, bytes another."""
    fast, slow = "ddp()", "streaming_diloco("

    def rate(chooser: Any) -> float:
        return before if chooser._step <= 100 else after

    monkeypatch.setattr(auto_module.Chooser, "_pace", lambda self: [0.15, 8 / rate(self), 0.15])
    monkeypatch.setattr(
        auto_module.Chooser,
        "_measure",
        lambda self: (replace(TEXT, rate=rate(self), one_way=0.0), 0.15),
    )
    for choices, _ in la.simulate(lambda rank: run(rank, 170, la.auto(), {}), workers=3):
        texts = [c.text for c in choices]
        assert texts[0].startswith(fast if before > after else slow)
        assert texts[-1].startswith(slow if before > after else fast)
        recipe = parse_recipe(texts[0])
        assert isinstance(recipe, tuple)
        answer = max(auto_module.LATER, recipe[0].delay)  # it travels behind the messages
        first = 4 if before > after else 2  # each of them sends for seconds
        assert [c.step for c in choices] == [first, first + 128 + answer]


def test_a_network_that_changes_right_after_a_choice_is_not_taken_for_a_slow_recipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first steps under a choice are what later ones are held against."""

    def measure(self: Any) -> tuple[Facts, float]:
        return replace(TEXT, rate=1e6 if self.choices else 1e12, one_way=0.0), 0.15

    monkeypatch.setattr(auto_module.Chooser, "_pace", lambda self: [40.0, 8 / 1e6, 0.15])
    monkeypatch.setattr(auto_module.Chooser, "_measure", measure)
    for choices, _ in la.simulate(lambda rank: run(rank, 60, la.auto(), {}), workers=3):
        assert choices[0].text.startswith("ddp(")
        assert choices[1].text.startswith("streaming_diloco(") and choices[1].facts.rate == 1e6


def test_a_choice_is_part_of_what_is_saved() -> None:
    """Loaded into a fresh run, the recipe that was in force goes on, with its state."""
    LINKS.clear()

    def first(rank: int) -> Any:
        model, optimizer = build(rank)
        sync = la.attach(model, optimizer, la.auto())
        for t in range(1, 31):
            step(model, optimizer, rank, t)
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict(), sync.state_dict()], file)
        tail = []
        for t in range(31, 36):
            step(model, optimizer, rank, t)
            tail.append(weights(model))
        return file.getvalue(), sync.recipe, sync.choices, tail

    for link in LINKS:
        link.set(1e6)

    def slow(link: Link) -> Link:
        outer = changing(link)
        assert isinstance(outer, Changing)
        outer.set(1e6)
        return outer

    saved = la.simulate(first, workers=2, link=slow)

    def second(rank: int) -> Any:
        model, optimizer = build(rank)
        sync = la.attach(model, optimizer, la.auto())
        states = torch.load(io.BytesIO(saved[rank][0]), weights_only=True)
        for part, state in zip((model, optimizer, sync), states, strict=True):
            part.load_state_dict(state)
        tail = []
        for t in range(31, 36):
            step(model, optimizer, rank, t)
            tail.append(weights(model))
        return sync.recipe, sync.choices, tail

    for (_, recipe, choices, tail), (theirs, again, late) in zip(
        saved, la.simulate(second, workers=2), strict=True
    ):
        assert recipe == theirs and choices == again
        assert all(torch.equal(a, b) for a, b in zip(tail, late, strict=True))


def test_a_load_that_fails_changes_nothing() -> None:
    """Rank 1 gets a state that is cut short, and the other one a good one, of another recipe."""
    LINKS.clear()

    def slow(link: Link) -> Link:
        outer = changing(link)
        assert isinstance(outer, Changing)
        outer.set(1e6)
        return outer

    def save(rank: int) -> Any:
        model, optimizer = build(rank)
        sync = la.attach(model, optimizer, la.auto())
        for t in range(1, 15):
            step(model, optimizer, rank, t)
        assert sync.recipe != la.ddp(codec="int4")
        return model.state_dict(), sync.state_dict()

    saved = la.simulate(save, workers=2, link=slow)
    saved[1][1]["rounds"] = []

    def train(rank: int, load: bool) -> Any:
        model, optimizer = build(rank)
        sync = la.attach(model, optimizer, la.auto())
        for t in range(1, 3):
            step(model, optimizer, rank, t)
        if load:
            own = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(saved[rank][0])
            with pytest.raises(ValueError, match="not what sync"):
                sync.load_state_dict(saved[rank][1])
            model.load_state_dict(own)
        assert sync.recipe == la.ddp(codec="int4") and sync.choices == []
        for t in range(3, 4):
            step(model, optimizer, rank, t)
        return weights(model)

    without = la.simulate(lambda rank: train(rank, False), workers=2)
    with_load = la.simulate(lambda rank: train(rank, True), workers=2)
    assert all(torch.equal(x, y) for x, y in zip(without, with_load, strict=True))


def test_small_traffic_is_added_up_until_it_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """40,000 bytes a look in 0.1 s: too few to tell for one look, enough for two."""
    chooser = auto_module.Chooser(la.auto(), 2)
    looks = iter([(4e4, 0.1), (8e4, 0.2), (12e4, 0.3), (16e4, 0.4)])
    monkeypatch.setattr(chooser, "_sent", lambda: next(looks), raising=False)
    found = []
    for _ in range(4):
        chooser._spans = [(0.1, 0.0)]
        found.append(chooser._pace()[1])
    assert found == [0.0, pytest.approx(2.5e-6), 0.0, pytest.approx(2.5e-6)]


def test_a_fast_network_gets_gradients_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it begins with has no advantage in the first choice."""
    fast = replace(TEXT, rate=1e12, one_way=0.0)
    monkeypatch.setattr(auto_module.Chooser, "_measure", lambda self: (fast, fast.compute))
    for choices, _ in la.simulate(lambda rank: run(rank, 20, la.auto(), {}), workers=3):
        assert [c.text for c in choices] == ["ddp()"]


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1)])
def test_what_is_saved_before_a_choice_is_loaded_by_any_number(before: int, after: int) -> None:
    def save(rank: int) -> Any:
        model, optimizer = build(0)
        sync = la.attach(model, optimizer, la.auto())
        for t in range(1, 4):
            step(model, optimizer, rank, t)
        return copy.deepcopy((model.state_dict(), optimizer.state_dict(), sync.state_dict()))

    saved = la.simulate(save, workers=before)

    def load(rank: int) -> Tensor:
        model, optimizer = build(0)
        sync = la.attach(model, optimizer, la.auto())
        model.load_state_dict(saved[0][0])
        optimizer.load_state_dict(copy.deepcopy(saved[0][1]))  # which keeps the tensors
        sync.load_state_dict(saved[rank][2] if before == after else [s[2] for s in saved])
        for t in range(4, 8):
            step(model, optimizer, rank, t)
        assert after > 1 or sync.recipe == la.ddp()
        return weights(model)

    found = la.simulate(load, workers=after)
    assert all(torch.equal(x, found[0]) for x in found)


def test_what_was_chosen_is_told_after_a_switch_by_hand() -> None:
    def one(rank: int) -> Any:
        model, optimizer = build(rank)
        sync = la.attach(model, optimizer, la.auto())
        for t in range(1, 13):
            step(model, optimizer, rank, t)
        before = sync.choices
        sync.switch(la.local_sgd(3))
        return before, sync.choices

    for before, after in la.simulate(one, workers=2):
        assert before and before == after


def test_over_processes(pool: gloo.Pool) -> None:
    found = pool.run(over_gloo, ranks=2)
    (choices, x), (others, y) = found
    assert choices == others and choices and torch.equal(x, y)


def over_gloo(rank: int) -> Any:
    model, optimizer = build(rank)
    sync = la.attach(model, optimizer, la.auto(), link=gloo.link_of(2))
    for t in range(1, 40):
        step(model, optimizer, rank, t)
    sync.finish()
    sync.detach()
    told = [(c.step, c.text) for c in sync.choices]
    return told, weights(model)


def test_one_worker_has_nothing_to_choose() -> None:
    assert la.simulate(lambda rank: run(rank, 20, la.auto(), {}), workers=1)[0][0] == []


def test_a_run_that_goes_on_elsewhere_measures_the_network_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though its steps take what was predicted, as nothing is waited for here or there."""
    rate = {"now": 1e6}
    monkeypatch.setattr(
        auto_module.Chooser,
        "_measure",
        lambda self: (replace(TEXT, workers=self._link.size, rate=rate["now"], one_way=0.0), 0.15),
    )
    monkeypatch.setattr(auto_module.Chooser, "_pace", lambda self: [0.15, 0.0, 0.15])

    saved = la.simulate(lambda rank: go_on(rank, 1, 8), workers=2)
    assert all(choices[-1].text.startswith("streaming_diloco(") for _, choices in saved)
    rate["now"] = 1e12
    found = la.simulate(lambda rank: go_on(rank, 8, 30, saved[rank][0]), workers=2)
    assert all(choices[-1].text == "ddp()" for _, choices in found)


def test_a_comparison_behind_long_messages_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = replace(TEXT, rate=1e6, one_way=0.0)
    monkeypatch.setattr(auto_module.Chooser, "_measure", lambda self: (slow, slow.compute))
    asked: list[tuple[int, int, int]] = []

    def compare(self: Any, step: int, *_: Any) -> None:
        asked.append((step, self.now.recipe[0].delay, self._cycle))

    monkeypatch.setattr(auto_module.Chooser, "_compare", compare)
    la.simulate(lambda rank: run(rank, 80, la.auto(), {}), workers=2)
    _, delay, cycle = asked[0]
    assert delay > auto_module.LATER
    first = 2 + auto_module.WARMUP + max(auto_module.WINDOW, cycle) + delay
    assert min(step for step, _, _ in asked) == first


def test_the_first_choice_takes_the_step_that_was_not_held_up() -> None:
    def one(rank: int) -> Any:
        model, optimizer = build(rank)
        sync = la.attach(model, optimizer, la.auto())
        step(model, optimizer, rank, 1)
        chooser = sync.driver.session.policy
        assert chooser is not None
        chooser._spans = [(3.0, 0.1), (0.4, 0.15)] if rank else [(0.4, 0.2), (0.5, 0.3)]
        return chooser._measure()

    for facts, wall in la.simulate(one, workers=2):
        assert facts.compute == 0.25 and wall == 0.4


# -- changing the recipe ----

RECIPES = {
    "ddp": la.ddp(),
    "int4": la.ddp(codec="int4"),
    "local": la.local_sgd(3, delay=2),
    "diloco": la.diloco(4, momentum=0.5),
    "sgp": la.sgp(),
    "streaming": la.streaming_diloco(4, 2, 1),
}


@pytest.mark.parametrize("after", RECIPES)
@pytest.mark.parametrize("before", RECIPES)
def test_switching_starts_all_workers_from_the_consensus(before: str, after: str) -> None:
    """Alike in x and in the optimizer's state; and what the recipe before would have ended with."""

    def one(rank: int, switch: bool) -> Any:
        model, optimizer = build(rank)
        sync = la.attach(model, optimizer, RECIPES[before])
        for t in range(1, 6):
            step(model, optimizer, rank, t)
        if not switch:
            sync.finish()
            return weights(model)
        sync.switch(RECIPES[after])
        x = weights(model)
        moments = torch.cat([s["exp_avg"].reshape(-1) for s in optimizer.state.values()])
        for t in range(6, 12):
            step(model, optimizer, rank, t)
        sync.finish()
        assert sync.recipe == RECIPES[after] and sync.step == 11
        return x, moments, weights(model)

    finished = la.simulate(lambda rank: one(rank, False), workers=2)
    (x, moments, end), (y, others, last) = la.simulate(lambda rank: one(rank, True), workers=2)
    assert torch.equal(x, y) and torch.equal(moments, others) and torch.equal(end, last)
    assert torch.equal(x, finished[0])


def test_gradients_not_sent_yet_are_sent_after_a_switch() -> None:
    def one(rank: int) -> tuple[Tensor, Tensor]:
        model, optimizer = build(rank)
        sync = la.attach(model, optimizer, la.ddp(codec="int4"))
        for t in range(1, 5):
            step(model, optimizer, rank, t)
        before = owed(sync)
        sync.switch(la.ddp(codec="int8"))
        return before, owed(sync)

    found = la.simulate(one, workers=2)
    before, after = (torch.stack([f[i] for f in found]).mean(0) for i in range(2))
    assert torch.allclose(before, after, atol=1e-9) and float(before.abs().max()) > 0


def owed(sync: Synchronizer) -> Tensor:
    """What a worker has not sent, its share as an owner included, n = 2 times."""
    (state,) = sync.state_dict()["gradients"]
    found = []
    for kept, first, size in zip(state["carried"], state["starts"], state["sizes"], strict=True):
        total = kept["residual"].clone()
        total[first : first + len(kept["lag"])] += 2 * kept["lag"]
        found.append(total[:size])
    return torch.cat(found)


@pytest.mark.parametrize("first", [la.ddp(codec="int4"), la.auto()], ids=["ddp", "auto"])
def test_ranks_that_switch_to_different_recipes_all_learn_of_it(first: Any) -> None:
    """And go on under the one before."""

    def one(rank: int) -> Tensor:
        model, optimizer = build(rank)
        sync = la.attach(model, optimizer, first)
        step(model, optimizer, rank, 1)
        with pytest.raises(ValueError, match="attach something other than rank 0"):
            sync.switch(la.diloco(4, lr=0.5 + 0.1 * rank))
        for t in range(2, 4):
            step(model, optimizer, rank, t)
        assert sync.recipe == la.ddp(codec="int4")
        return weights(model)

    x, y = la.simulate(one, workers=2)
    assert torch.equal(x, y)


def test_a_refused_switch_leaves_nothing_owed_twice() -> None:
    """All start from the consensus, which is what the rounds are about from then on."""

    def one(rank: int) -> tuple[float, float]:
        model, optimizer = build(rank)
        sync = la.attach(model, optimizer, la.diloco(2, codec="int4"))
        for t in range(1, 5):
            step(model, optimizer, rank, t)
        before = float(carried(sync)["lag"].abs().max())
        with pytest.raises(ValueError, match="attach something other"):
            sync.switch(la.local_sgd(3 + rank))
        state = carried(sync)
        x = weights(model)
        assert torch.equal(state["reference"][: len(x)], x.to(state["reference"].dtype))
        return before, float(state["lag"].abs().max())

    for before, after in la.simulate(one, workers=2):
        assert before > 0 and after == 0


def carried(sync: Synchronizer) -> dict[str, Tensor]:
    """What the exchange of the only round keeps for its only bucket."""
    (running,) = sync.driver.run.rounds
    (state,) = (channel.exchange_state for channel in running.channels)
    return state


def test_what_is_no_recipe_is_not_switched_to() -> None:
    with pytest.raises(ValueError, match="recipe must be what a recipe function returns"):
        la.simulate(lambda rank: la.attach(*build(rank), la.ddp()).switch("ddp()"), workers=2)  # type: ignore[arg-type]


def test_costs_add_up() -> None:
    assert Cost(3, 1) + Cost(4, 2) == Cost(7, 3)


def test_switching_keeps_the_layout() -> None:
    """The ranks of a worker go on averaging their gradients."""

    def one(rank: int) -> Tensor:
        model, optimizer = build(0)
        sync = la.attach(model, optimizer, la.ddp(), nprocs_per_node=2)
        step(model, optimizer, rank, 1)
        sync.switch(la.local_sgd(100))
        for t in range(2, 5):
            step(model, optimizer, rank, t)
        return weights(model)

    a, b, c, d = la.simulate(one, workers=4)
    assert torch.equal(a, b) and torch.equal(c, d) and not torch.equal(a, c)


@pytest.mark.parametrize("inside", [True, False], ids=["before the update", "after it"])
@pytest.mark.parametrize("when", [2, 5], ids=["before", "in the last step"])
def test_a_switch_aligns_what_overflows_and_missing_gradients_left_apart(
    when: int, inside: bool
) -> None:
    """AdamW's steps, the scale, and moments of a parameter that one rank did not use: or gradients
    that are alike would move the workers differently, unseen."""

    def one(rank: int) -> tuple[Tensor, float, list[float]]:
        model, optimizer = build(0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
        sync = la.attach(model, optimizer, la.local_sgd(2), scaler=scaler)

        def run(t: int) -> None:
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(1000 * rank + t))
            optimizer.zero_grad()
            unused = rank == 0 and t < 6
            hidden = (
                torch.tanh(nn.functional.linear(x, model[0].weight)) if unused else model[:2](x)
            )
            loss = nn.functional.mse_loss(model[2](hidden), torch.sin(x[:, :30]))
            scaler.scale(loss * (float("inf") if (rank, t) == (1, when) else 1)).backward()
            scaler.step(optimizer)
            if t == 5 and inside:
                sync.switch(la.ddp())
            scaler.update()
            if t == 5 and not inside:
                sync.switch(la.ddp())

        for t in range(1, 15):
            run(t)
        counts = [float(s["step"]) for s in optimizer.state.values()]
        return weights(model), scaler.get_scale(), counts

    first, *others = la.simulate(one, workers=3)
    for x, scale, counts in others:
        assert torch.equal(x, first[0]) and (scale, counts) == first[1:]


def test_groups_added_right_before_a_switch_start_from_rank_0() -> None:
    def one(rank: int) -> Tensor:
        model, optimizer = build(0)
        sync = la.attach(model, optimizer, la.ddp())
        step(model, optimizer, rank, 1)
        head = nn.Parameter(torch.full((5,), float(rank)))
        optimizer.add_param_group({"params": [head]})
        sync.switch(la.ddp(codec="int4"))
        head.grad = torch.ones(5)
        step(model, optimizer, rank, 2)
        return head.detach().clone()

    a, b = la.simulate(one, workers=2)
    assert torch.equal(a, b)


def test_a_model_without_elements_has_nothing_to_choose_by() -> None:
    assert sum(bucket_sizes(la.ddp(codec="int4")[0].exchange, 0)) == 0


def test_a_switch_that_cannot_be_leaves_the_rounds_at_work() -> None:
    def one(rank: int) -> Tensor:
        model, optimizer = build(0)
        sync = la.attach(model, optimizer, la.ddp(codec="int4"))
        step(model, optimizer, rank, 1)
        with pytest.raises(ValueError, match="group_size"):
            sync.switch(la.hierarchical(1, 2))
        for t in range(2, 5):
            step(model, optimizer, rank, t)
        return weights(model)

    a, b = la.simulate(one, workers=2)
    assert torch.equal(a, b)


def test_rounds_that_take_longer_than_predicted_are_not_left_for_rarer_ones() -> None:
    """Which would take as much longer, as it is computing that does, and cost a change each."""
    slow = replace(TEXT, rate=1e7)
    now = next(c for c in auto_module.candidates(slow) if c.text == chosen(slow))
    assert now.text.startswith("streaming_diloco(")
    text, _ = auto_module.choose(la.auto(), slow, now, {now.kind: 0.12 * slow.compute})
    assert text == now.text


def test_the_delay_in_force_stays_while_it_hides() -> None:
    slow = replace(TEXT, rate=3e6)
    first = next(c for c in auto_module.candidates(slow) if "(8, " in c.text)
    assert first.recipe[0].delay > 1
    slower = replace(slow, rate=0.8 * slow.rate)
    again = next(c for c in auto_module.candidates(slower, first) if "(8, " in c.text)
    other = next(c for c in auto_module.candidates(slower) if "(8, " in c.text)
    assert again == first and other != first
    barely = replace(slow, rate=0.6 * slow.rate)  # just before the step in which it is due
    last = next(c for c in auto_module.candidates(barely, first) if "(8, " in c.text)
    assert last.recipe[0].delay > first.recipe[0].delay


def test_ranks_of_a_worker_share_its_messages() -> None:
    """4 nodes of 8 ranks with 100 Mbit/s per node, of which each rank measures an eighth: the
    choice is that of `advise` from the same numbers."""
    node, each = 1e8, 1e8 / 8
    told = facts_from(
        params=100_000_000,
        step_time=0.5,
        bandwidth=node,
        one_way=1e-3,
        nodes=4,
        nprocs_per_node=8,
        local_bandwidth=None,
    )
    nets = auto_module.nets_of(4, 8, each, 1e-3)
    found = replace(told, rate=each, nets=nets)
    alone = replace(told, rate=each, nets={}, ranks=1)
    for text in ("streaming_diloco(16, delay=3, outer='muon')", "ddp(codec='int4')"):
        recipe = parse_recipe(text)
        expected = predict(recipe, told)
        assert predict(recipe, found).seconds == pytest.approx(expected.seconds, rel=1e-6), text
    assert chosen(found) == chosen(told) != chosen(alone)
    assert auto_module.nets_of(4, 1, each, 1e-3) == {}
    saved = auto_module._saved(found)
    assert auto_module._facts(saved) == found and "nets" not in saved


def test_steps_between_rounds_do_not_hide_that_others_wait() -> None:
    """With a period of 16 in four fragments, every fourth step waits: 3 s of 4 s computed."""
    spans = [(1.0, 0.0), (1.0, 0.0), (1.0, 0.0), (4.0, 3.0)] * 3
    assert auto_module.usual(spans, 4) == (1.75, 1.0)
    assert auto_module.usual(spans[1:], 4) == (1.75, 1.0), "whole intervals"
    assert auto_module.usual(spans[-4:], 8) == (1.0 + 3 / 8, 1.0), "one round of two intervals"
    assert auto_module.usual(spans[:3], 4) == (1.0, 1.0)
    assert auto_module.usual([], 4) == (0.0, 0.0)
    early = [(9.0, 0.0)] * 40 + [(1.0, 0.0)] * 8
    assert auto_module.usual(early, 1) == (1.0, 1.0), "computing of now"


def test_a_recipe_tells_how_often_it_communicates() -> None:
    chooser = auto_module.Chooser(la.auto(), 4)
    for text, cycle in (("ddp()", 1), ("local_sgd(2)", 2), ("streaming_diloco(64)", 16)):
        chooser.now = _candidate(text)
        assert chooser._cycle == cycle


def test_processor_time_is_that_since_the_last_look() -> None:
    """Messages take 1 ns per byte. Training loses nothing at first, then as much as they take."""
    chooser = auto_module.Chooser(la.auto(), 2)
    now = [Usage(1e6, 1e-3, 10.0, 0.0)]

    class Stub:
        def usage(self) -> Usage:
            return now[0]

    chooser._session = Stub()
    assert chooser._used(again=True) == (pytest.approx(1e-9), 0.0)
    now[0] = Usage(1e6 + 100, 1e-3, 11.0, 0.0)
    assert chooser._used(again=True) == (pytest.approx(1e-9), 0.0), "too few to tell: as before"
    now[0] = Usage(2e6, 2e-3, 12.0, 1e-3)
    assert chooser._used() == (pytest.approx(1e-9), pytest.approx(1.0))
    assert chooser._used() == (pytest.approx(1e-9), pytest.approx(1.0)), "it is not forgotten"


def test_no_recipe_is_made_that_is_not_considered() -> None:
    """Such as local_sgd with the delay in force, which is longer than its period."""
    slow = replace(TEXT, rate=1e6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        now = _candidate("streaming_diloco(16, delay=4)")
        assert list(auto_module.candidates(slow, now))


def test_a_worker_that_becomes_slow_is_reported_although_the_recipe_stays() -> None:
    chooser = auto_module.Chooser(la.auto(), 4)
    facts = replace(TEXT, rate=1e11)
    chooser._world = NullLink(4)

    def look(step: int, slow: str) -> list[int]:
        chooser._slow_worker = slow
        chooser._choose(step, facts)
        return [choice.step for choice in chooser.choices]

    assert look(4, "") == [4] and look(80, "") == [4]
    assert look(144, "; rank 2 computes 3 times as long") == [4, 144]
    assert chooser.choices[1].text == chooser.choices[0].text == "ddp()"
    assert "rank 2" in chooser.choices[1].reason
    assert look(208, "; rank 2 computes 3.1 times as long") == [4, 144], "once"
    assert look(272, "") == [4, 144]
    assert look(336, "; rank 1 computes 2 times as long") == [4, 144, 336]


def test_a_change_has_to_pay_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 1 Mbit/s a change averages three models in 125 s. Computing of 0.3 s in place of 0.17 s
    makes a shorter period better by 10%: 0.04 s per step, which is worth it after 3,000 steps."""
    before = replace(TEXT, rate=1e6, compute=0.17, muon=True)
    after = replace(before, compute=0.3)
    seconds = auto_module.change_seconds(before)
    assert seconds == pytest.approx(3 * 1.5 * 4 * 845 * 1024 * 8 / 1e6, rel=0.01)
    first, better = chosen(before), chosen(after)
    assert first != better

    def last(step: int) -> str:
        chooser = auto_module.Chooser(la.auto(), 4)
        chooser._world = NullLink(4)
        chooser._choose(2, before)
        chooser._choose(step, after)
        return str(chooser.choices[-1].text)

    assert last(654) == first and last(100_000) == better

    chooser = auto_module.Chooser(la.auto(), 4)  # between gradients a change sends nothing
    chooser._world = NullLink(4)
    chooser._choose(4, replace(TEXT, rate=1e11))
    chooser._choose(23, replace(TEXT, rate=1e8))
    assert [c.text for c in chooser.choices] == ["ddp()", "ddp(codec='int4')"]


def test_another_delay_has_to_pay_for_its_change() -> None:
    """A message of 0.29 s has 0.3 s, and the last rank sends half a step later: one step of four
    waits for 0.065 s. At 3 Mbit/s a change takes 42 s."""
    facts = replace(TEXT, rate=3e6, muon=True)
    first = next(c for c in auto_module.candidates(facts) if "(16, " in c.text)
    now = replace(first, text=first.text.replace(f"delay={first.recipe[0].delay}", "delay=2"))
    now = replace(now, recipe=parse_recipe(now.text))
    other = next(c.text for c in auto_module.candidates(facts, now) if "(16, " in c.text)
    assert other != now.text
    seconds = travel(now.recipe[0], facts)
    tight = replace(facts, compute=(seconds + 0.01) / 2)
    waits = lateness(now.recipe, tight)
    assert waits == pytest.approx((0.25 * (seconds + 0.01) - 0.01) / 4)
    assert lateness(now.recipe, replace(facts, compute=seconds)) == 0.0
    stay = auto_module.change_seconds(tight)
    assert auto_module.choose(la.auto(), tight, now, {}, stay / 20)[0] == now.text
    assert auto_module.choose(la.auto(), tight, now, {})[0] != now.text


def test_two_recipes_do_not_replace_each_other_in_turn() -> None:
    """With a delay that cannot be longer than its period, messages arrive late: so they do before
    the recipe is in force, and while it is."""
    for rate in (1e7, 2e7, 3e7, 5e7, 8e7):
        facts = replace(TEXT, rate=rate, one_way=0.02)
        found = [c for c in auto_module.candidates(facts) if isinstance(c.recipe[0], Round)]
        goes = {c.text: auto_module.choose(la.auto(), facts, c, {})[0] for c in found}
        for text, other in goes.items():
            assert goes.get(other, other) == other or other == text, (rate, text, other)


def test_steps_are_compared_over_whole_intervals() -> None:
    chooser = auto_module.Chooser(la.auto(), 4)
    for text, due in (("ddp()", [11, 64, 128]), ("streaming_diloco(512)", [131, 256, 384])):
        chooser.now = _candidate(text)
        found = []
        for steps in range(1, 400):
            chooser._steps = steps
            found += [steps] * chooser._due_for_review()
        assert found[:3] == due


# -- what the others wait for ----


def test_it_names_the_worker_that_the_others_wait_for() -> None:
    """Steps of 1, 1, 1 and 3 s: at their own pace, 3 + 1/3 steps are taken per second in place of
    4/3."""
    told = auto_module.slow_worker(torch.tensor([1.0, 1.0, 3.0, 1.0]))
    assert told == (
        "; rank 2 computes 3 times as long as the median rank, and the others wait for it. If no "
        "rank waited (docs/quorum.md), all together would take 2.5 times as many steps per second"
    )
    assert auto_module.slow_worker(torch.tensor([1.0, 1.1, 1.2, 1.0])) == ""
    assert auto_module.slow_worker(torch.zeros(4)) == "", "nobody has measured a step"
    newcomer = auto_module.slow_worker(torch.tensor([0.0, 1.0, 1.0, 3.0]))
    assert "all together would take 2.3 times" in newcomer, "it has measured none"


def test_of_two_workers_the_other_one_is_named() -> None:
    for slow in (0, 1):
        seconds = [0.1, 0.1]
        seconds[slow] = 0.3
        assert auto_module.slow_worker(torch.tensor(seconds)) == (
            f"; rank {slow} computes 3 times as long as rank {1 - slow}, which waits for it. If no "
            "rank waited (docs/quorum.md), both together would take 2 times as many steps per "
            "second"
        )


def test_steps_of_a_few_milliseconds_are_not_compared() -> None:
    assert auto_module.slow_worker(torch.tensor([0.002, 0.0099])) == ""
    assert "rank 1 computes 5 times as long" in auto_module.slow_worker(
        torch.tensor([0.0022, 0.011])
    )


@pytest.mark.parametrize(
    ("packets", "again", "latency", "ranks", "share"),
    [
        (1600, 4, 2e-4, 2, 0.0),  # two equal ranks, over the loopback interface
        (4900, 11, 1e-3, 4, 0.0),
        (4900, 12, 1e-3, 4, 12 / 4900),
        (1600, 10, 2e-4, 2, 10 / 1600),
        (1600, 4, 0.04, 2, 4 / 1600),  # over a long round trip each lost packet delays messages
        (0, 0, 0.04, 2, 0.0),  # the system does not report it
    ],
)
def test_few_packets_that_were_sent_again_do_not_count_as_lost(
    packets: int, again: int, latency: float, ranks: int, share: float
) -> None:
    assert auto_module.lost_share(packets, again, latency, ranks) == share


def test_the_reason_has_lost_packets_in_percent() -> None:
    facts = Facts(4, ((1000, 1000),), 4, 0.1, 1e8, 0.04, 0.0025)
    assert "and 0.25% of its packets are lost" in auto_module.choose(la.auto(), facts, None, {})[1]
    lossless = replace(facts, loss=0.0)
    assert "lost" not in auto_module.choose(la.auto(), lossless, None, {})[1]


@pytest.mark.parametrize("slower", ["to it", "from it", "both"])
def test_it_names_the_network_that_the_others_wait_for(slower: str) -> None:
    speeds = 1e8 * (1 - torch.eye(4, dtype=torch.float64))
    assert probe.slow_host(speeds) == ""
    if slower != "from it":
        speeds[:, 1] /= 10
    if slower != "to it":
        speeds[1] /= 10
    assert "the network of rank 1 is 10 times slower" in probe.slow_host(speeds)
    assert probe.slow_host(speeds[:2, :2]) == "", "either of two may be the slow one"
    assert probe.slow_host(torch.zeros(4, 4)) == "", "the system does not report it"


def test_a_worker_that_is_lost_after_it_was_measured() -> None:
    """Three were measured, of which two are left to compare."""
    assert probe.slow_host(torch.ones(2, 3)) == ""


@pytest.mark.parametrize(
    ("seconds", "rate"),
    [
        ([0.2, 0.3, 0.7, 1.3, 1.3], 8 * 2.25 * 2**20 / 0.6),
        ([0.2, 0.3, 0.7, 0.85, 0.6], 8 * 3 * 2**20 / 0.6),  # the one before was delayed
        ([0.2, 0.3, 0.7, 5.0, 1.3], 8 * 2.25 * 2**20 / 0.6),  # the first of its size was
        ([0.2, 0.25, 0.4, 1.0], 8 * 2.25 * 2**20 / 0.6),  # two rates agree: it is not repeated
        ([0.1, 0.9, 1.5, 1.6], 8 * 0.75 * 2**18 / 1.5),  # a shaper passed its first bytes at once
        ([0.1, 0.9, 5.0, 0.9], 8 * 0.75 * (2**18 - 2**16) / 0.8),  # the second was delayed
    ],
)
def test_a_delayed_probe_is_not_taken_for_another_rate(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], rate: float
) -> None:
    """Probes of 64 KiB, 256 KiB, 1 MiB, and 4 MiB twice, of which 3/4 are sent; fewer on slow
    networks. ``seconds`` and ``rate`` are those of a network 8 times slower."""
    small = [2e-3, 1e-3, 2e-3, 1e-3, 2e-3]  # some were delayed
    times = iter([*small, *(s / 8 for s in seconds)])
    monkeypatch.setattr(probe, "timed", lambda link, device, size: next(times))
    link = NullLink(4)
    monkeypatch.setattr(link, "gather", lambda x: x)
    probed = probe.probe(link, torch.device("cpu"))
    assert probed.rate == pytest.approx(8 * rate) and probed.latency == 1e-3


@pytest.mark.parametrize("burst", [0.0, 1e6])
def test_over_long_round_trips_a_connection_reaches_its_rate_first(
    monkeypatch: pytest.MonkeyPatch, burst: float
) -> None:
    """100 Mbit/s and 20 ms one way. A probe is delayed by a round trip for each time that the bytes
    in flight have to double, from 14 kB to the 500 kB that fill the network; they double once per
    probe. A shaper may let the first large one pass at once."""
    state = {"window": 14e3, "burst": burst}

    def timed(link: Any, device: Any, size: int) -> float:
        sent = size / 2
        trips = max(0, math.ceil(math.log2(min(sent, 500e3) / state["window"])))
        state["window"] *= 2
        at_once = state["burst"] if size >= 2**20 else 0.0
        state["burst"] -= at_once
        return 0.02 + max(sent - at_once, 0.0) * 8 / 1e8 + 0.04 * trips

    monkeypatch.setattr(probe, "timed", timed)
    link = NullLink(2)
    monkeypatch.setattr(link, "gather", lambda x: x)
    probed = probe.probe(link, torch.device("cpu"))
    assert probed.rate == pytest.approx(1e8, rel=0.01)


def _measured(rank: int) -> tuple[str, float]:
    """Rank 1's steps take so much longer that those of a busy machine do not count."""
    model, optimizer = build(0)
    sync = la.attach(model, optimizer, la.auto(), link=gloo.link_of(3))
    for t in range(1, 6):
        time.sleep(0.3 if rank == 1 else 0.01)
        step(model, optimizer, rank, t)
    sync.finish()
    sync.detach()
    return sync.choices[0].reason, sync.choices[0].facts.loss


def test_processes_find_the_slow_one(pool: gloo.Pool) -> None:
    found = pool.run(_measured, ranks=3)
    assert len({reason for reason, _ in found}) == 1
    assert "rank 1 computes" in found[0][0]
    assert 0 <= found[0][1] < 0.1, "the loopback interface loses next to nothing"
