"""What is measured, what is recommended, and the command: the advisor."""

from __future__ import annotations

import importlib
import json
import math
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic as la
from laconic.advisor import advice_on, measure, show
from laconic.advisor import rehearse as rehearse_module
from laconic.advisor.advice import LEAST_SHARE, MOST_ALTERNATIVES, Row, alternatives
from laconic.advisor.choices import (
    KNOWN,
    MEASURED_ELEMENTS,
    MEASURED_STEPS,
    MEASURED_WORKERS,
    OWN,
    UNKNOWN,
    choices,
    rehearsed,
    steps_of,
)
from laconic.advisor.fit import Sample, fit
from laconic.advisor.measure import compute_and_skew
from laconic.advisor.numbers import facts_from
from laconic.advisor.rehearse import MOST_BYTES, REPEATS, WARMUP, rehearsals, rehearse
from laconic.algorithms.parse import parse_recipe, qualified
from laconic.auto import TIE, Auto, choose
from laconic.candidates import candidates
from laconic.cli import main
from laconic.errors import install
from laconic.links import Throttled
from laconic.links.cost import Cost
from laconic.links.null import NullLink
from laconic.links.tcp import TcpLink
from laconic.predict import BACKWARD, Facts, predict, work_key

from tests.support import gloo
from tests.support.clock import controlled

LIKE = "4, 1, codec='int4', lr=0.7, momentum=0.6"
"""What `laconic.streaming_diloco` was measured with."""
TEXT = Facts(4, ((845, 1024),), 4, 0.15, 100e6, 1e-3)


# -- the fit ----


def samples(rate: float, latency: float, burst: float = 0.0) -> Iterator[Sample]:
    """As a sweep has them: three of each size, of two messages, noise of 1%, and one in nine held
    up by half a second."""
    noise = random.Random(1)
    for number in range(36):
        size = 2 ** (8 + number // 3)
        seconds = 2 * latency + 8 * max(size - burst, 0) / rate
        yield Sample(size, 2, seconds * noise.uniform(0.99, 1.01) + 0.5 * (number % 9 == 4))


@pytest.mark.parametrize("rate", [20e6, 1e9])
@pytest.mark.parametrize("latency", [2e-4, 0.03])
def test_a_fit_finds_rate_and_latency_past_outliers(rate: float, latency: float) -> None:
    found = fit(list(samples(rate, latency)))
    assert found.rate == pytest.approx(rate, rel=0.05)
    assert found.one_way == pytest.approx(latency, rel=0.03, abs=1e-4)
    whole = Cost(2**19, 2)
    assert found.seconds(whole) == pytest.approx(whole.seconds(rate, latency), rel=0.02)


def test_a_fit_finds_what_passes_at_once() -> None:
    found = fit(list(samples(20e6, 0.01, burst=2**15)))
    assert found.burst == pytest.approx(2**15, rel=0.1)
    assert found.one_way == pytest.approx(0.01, rel=0.03)
    assert found.rate == pytest.approx(20e6, rel=0.05)


def test_what_does_not_grow_with_size_has_no_end_of_rate() -> None:
    found = fit([Sample(2**k, 1, 0.01) for k in range(12, 20)])
    assert found.rate > 1e12 and found.one_way == pytest.approx(0.01)


def test_two_sizes_are_no_sweep() -> None:
    with pytest.raises(ValueError, match="three sizes"):
        fit([Sample(1, 1, 0.1), Sample(2, 1, 0.2)])


# -- the rehearsal ----


def test_rounds_alike_are_rehearsed_once() -> None:
    kinds = rehearsals([la.local_sgd(4), la.local_sgd(8, delay=1), la.streaming_diloco(8, 4)])
    assert len(kinds) == 2


@pytest.mark.parametrize(
    "text", ["local_sgd(4)", "ddp(codec='int4')", "sgp()", "power_sgd(2)", "diloco(4, quorum=2)"]
)
def test_a_round_over_silence_keeps_processors_busy(text: str) -> None:
    recipe = parse_recipe(text)
    assert isinstance(recipe, tuple)
    facts = Facts(3, ((3000, 500), (77,)), 4, 0.1, 1e8, 0.0)
    device, begun = torch.device("cpu"), []
    # the slowest of several: a round that took no longer than the step without it counts as 0
    spent = max(
        rehearse(recipe[0], facts, torch.float32, device, lambda: begun.append(1)) for _ in range(5)
    )
    assert spent > 0 and len(begun) == 5 * 2 * (WARMUP + REPEATS), "with and without the round"


@pytest.mark.parametrize(("size", "share"), [(1000, 1), (2 * MOST_BYTES // 4, 2)])
def test_the_time_of_a_round_is_what_it_adds_to_a_step(
    monkeypatch: pytest.MonkeyPatch, size: int, share: float
) -> None:
    """Scaled to the model where only a part of it was used."""
    used: list[int] = []

    def seconds(recipe: la.Recipe, shapes: Sequence[tuple[int, ...]], *_: Any, **__: Any) -> float:
        used.append(sum(map(math.prod, shapes)))
        return 0.5 if recipe else 0.2

    monkeypatch.setattr(rehearse_module, "_seconds", seconds)
    facts = Facts(3, ((size,),), 4, 0.1, 1e8, 0.0)
    (r,) = la.local_sgd(4)
    found = rehearse(r, facts, torch.float32, torch.device("cpu"), lambda: None)
    assert found == pytest.approx((0.5 - 0.2) * share) and used == [size // share] * 2


def test_silence_brings_what_one_has_sent() -> None:
    link, x = NullLink(3), torch.arange(6.0)
    assert torch.equal(link.gather(x), torch.stack([x] * 3))
    assert torch.equal(link.reduce_scatter(x.clone()), x[:2])
    assert all(torch.equal(y, x) for y in link.swap(x, [1], [2]))
    link.all_gather(x[:2], out := torch.empty(6))
    assert torch.equal(out, x[:2].repeat(3))
    link.all_to_all(x.view(3, 2), rows := torch.empty(3, 2))
    assert torch.equal(rows, x.view(3, 2))


# -- the recommendation ----


def recommended(rate: float, workers: int = 4) -> str:
    return advice_on(Facts(workers, TEXT.shapes, 4, 0.15, rate, 1e-4)).recommendation


def test_ddp_is_kept_on_a_fast_network_and_left_on_a_slow_one() -> None:
    fast = advice_on(Facts(4, TEXT.shapes, 4, 0.15, 1e11, 1e-5))
    assert fast.recommendation == "ddp()" and fast.reason.startswith("Keep ddp(): ")
    assert fast.code == "sync = laconic.attach(model, optimizer, laconic.ddp())"
    assert recommended(1e8) == "ddp(codec='int4')"
    assert recommended(1e6).startswith(("streaming_diloco(", "sparse_loco("))


def test_ddp_is_kept_where_another_gains_little() -> None:
    rates = [10 ** (k / 20) for k in range(168, 224)]
    found = [advice_on(Facts(4, TEXT.shapes, 4, 0.15, rate, 1e-5)) for rate in rates]
    kept = [a for a in found if a.recommendation == "ddp()"]
    assert any(max(row.progress for row in a.rows) > 1 for a in kept)
    for a in found:
        measured = [row for row in a.rows if not row.steps_from.startswith("assumed")]
        best = min(row.seconds * row.steps for row in measured)
        assert a.row.seconds * a.row.steps <= (1 + TIE) * best
        assert (a.recommendation == "ddp()") == (a.rows[0].seconds <= (1 + TIE) * best)


def grid() -> Iterator[Facts]:
    """Facts of many models and networks: of all that can be combined, one in five, in which each
    two values come together."""
    known = product(
        (2, 4, 16),
        (10**5, 10**7, 10**9),
        (0.05, 1.0),
        (1e6, 3e7, 1e9, 1e11),
        (1e-5, 5e-2),
        (0, 1e-3),
    )
    for workers, elements, compute, rate, latency, loss in islice(known, 0, None, 5):
        yield Facts(workers, ((elements // 1000, 1000),), 4, compute, rate, latency, loss)
    numbers = {"params": 10**8, "step_time": 0.5, "one_way": 0.01, "nodes": 4}
    for rate in (1e7, 1e9, 1e11):
        yield facts_from(**numbers, bandwidth=rate, nprocs_per_node=8)  # type: ignore[arg-type]
    yield replace(TEXT, rate=2e7, compute=0.45, computes=(0.15, 0.15, 0.15, 0.45))
    yield replace(TEXT, rate=2e6, rates=(2e7, 2e7, 2e6, 2e7))


def test_it_recommends_what_auto_would_choose() -> None:
    chosen = set()
    for facts in grid():
        advice = advice_on(facts)
        assert advice.recommendation == choose(Auto(), facts, None, {})[0]
        assert advice.row.recipe == advice.recommendation
        chosen.add(advice.recommendation.partition("(")[0])
        assert len(advice.alternatives) <= MOST_ALTERNATIVES
        assert advice.recommendation not in advice.alternatives
        assert "ddp()" in (advice.recommendation, advice.alternatives[0])
        rows = {row.recipe: row for row in advice.rows}
        assert set(advice.alternatives) <= set(rows)
    assert chosen == {"ddp", "local_sgd", "streaming_diloco"}


@pytest.mark.parametrize("rate", [1e7, 1e8, 1e9, 1e10])
def test_alternatives_are_the_best_of_each_kind_the_measured_ones_first(rate: float) -> None:
    facts = facts_from(params=125 * 10**6, step_time=0.9, bandwidth=rate, one_way=5e-3, nodes=8)
    advice = advice_on(facts)
    rows = {row.recipe: row for row in advice.rows}
    found = [rows[text] for text in advice.alternatives]
    if advice.recommendation != "ddp()":
        assert found.pop(0) is advice.rows[0]

    def kind(row: Row) -> tuple[str, bool]:
        return row.recipe.partition("(")[0], "codec=" in row.recipe

    assert len({kind(row) for row in [advice.row, *found]}) == len(found) + 1
    for row in found:
        alike = [other for other in advice.rows[1:] if kind(other) == kind(row)]
        assert row.progress == max(other.progress for other in alike)
        assert row.progress >= LEAST_SHARE * advice.row.progress
    order = [(row.steps_from.startswith("assumed"), -row.progress) for row in found]
    assert order == sorted(order) and (found or rate < 1e8)


def test_own_recipes_are_the_first_alternatives() -> None:
    own = [f"power_sgd({rank})" for rank in range(1, 8)]
    assert advice_on(TEXT, own[:2]).alternatives[:3] == ("power_sgd(1)", "power_sgd(2)", "ddp()")
    assert advice_on(TEXT, own).alternatives == tuple(own[:MOST_ALTERNATIVES])


def test_what_needs_more_steps_than_assumed_is_no_alternative() -> None:
    rows = advice_on(replace(TEXT, rate=1e5)).rows
    sparse = [row for row in rows if row.recipe.startswith("sparse_loco")]
    assert sparse and not set(sparse) & set(alternatives(rows, rows[0]))


def test_every_text_is_its_recipe() -> None:
    """Every recipe that can be recommended."""
    for facts in (TEXT, facts_from(params=10**6, step_time=1, bandwidth=1e8, one_way=0, nodes=16)):
        for c in choices(facts):
            assert parse_recipe(c.text) == c.recipe


def pasted(rank: int, code: str) -> la.Synchronizer:
    model = nn.Linear(3, 2)
    known = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    exec(code, {"laconic": la}, known)
    return known["sync"]  # type: ignore[return-value]


@pytest.mark.parametrize("rate", [1e11, 1e8, 1e6])
def test_the_code_can_be_pasted(rate: float) -> None:
    found = advice_on(Facts(2, TEXT.shapes, 4, 0.15, rate, 1e-4))
    (sync, _) = la.simulate(lambda rank: pasted(rank, found.code), workers=2)
    assert sync.recipe == parse_recipe(found.recommendation)


@pytest.mark.parametrize("text", ["power_sgd", " power_sgd ", "slowmo(sgp, 48)", "ddp( )"])
def test_the_code_of_a_recipe_without_parentheses_can_be_pasted(text: str) -> None:
    code = f"sync = laconic.attach(model, optimizer, {qualified(text)})"
    (sync, _, _) = la.simulate(lambda rank: pasted(rank, code), workers=3)
    assert sync.recipe == parse_recipe(text)


def test_two_workers_are_not_told_to_gossip_nor_three_to_have_momentum() -> None:
    names = {n: [c.text for c in choices(Facts(n, ((64,),), 4, 1, 1e8, 0))] for n in (2, 3, 16)}
    assert not any(text.startswith("sgp") for text in names[2])
    assert any(text.startswith("sgp") for text in names[3])
    assert not any(text.startswith("slowmo") for text in names[3])
    assert any("momentum=0.6" in text for text in names[16])


def test_steps_grow_with_the_period() -> None:
    periods = [steps_of(la.local_sgd(h)).factor for h in (4, 16, 64, 256)]
    assert periods[0] > 1 and periods == sorted(set(periods))
    assert steps_of(la.ddp()).factor == steps_of(la.ddp(codec="int8")).factor == 1
    assert steps_of(la.ddp(codec="bfloat16")).factor == 1
    assert 1 < steps_of(la.ddp(codec="int4")).factor < periods[0]


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("ddp()", "the same mathematics"),
        ("ddp(codec='int8')", "measured (benchmarks.factors)"),
        ("ddp(codec='bfloat16')", "assumed equal to Int8 gradients"),
        ("ddp(codec='int4')", "measured (benchmarks.factors)"),
        ("ddp(codec='int2')", "assumed equal to Int4 gradients"),
        ("power_sgd(2)", "assumed equal to power_sgd(4, codec='int8')"),
        ("power_sgd(4, codec='int8')", "measured (benchmarks.factors)"),
        (f"streaming_diloco(16, {LIKE})", "measured (benchmarks.factors)"),
        (f"streaming_diloco(16, {LIKE.replace('1', '2', 1)})", "taken from delay=1"),
        (f"streaming_diloco(256, {LIKE})", "extrapolated from streaming_diloco(64)"),
        ("streaming_diloco(16, lr=0.4, momentum=0.9)", "assumed equal to streaming_diloco(16)"),
        ("local_sgd(16)", "assumed equal to streaming_diloco(16)"),
        ("sgp()", "assumed equal to streaming_diloco(4)"),
    ],
)
def test_it_is_told_where_steps_are_from(text: str, source: str) -> None:
    recipe = parse_recipe(text)
    assert isinstance(recipe, tuple)
    assert steps_of(recipe).source == source


# -- measured ----


def training(
    rank: int, fail: bool = False, pause: Callable[[], object] = lambda: None
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        if fail:
            raise RuntimeError("out of batches")
        optimizer.zero_grad()
        nn.functional.mse_loss(model(torch.randn(8, 40)), torch.ones(8, 30)).backward()
        optimizer.step()
        pause()

    return model, optimizer, step


def advised(
    rank: int, nprocs: int = 1, pause: Callable[[], object] = lambda: None, **options: Any
) -> la.Advice:
    model, optimizer, step = training(rank, pause=pause)
    return la.advise(model, step, optimizer=optimizer, steps=4, nprocs_per_node=nprocs, **options)


def test_workers_are_measured_and_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = controlled(monkeypatch)
    found = la.simulate(
        lambda rank: advised(rank, recipes=("power_sgd(2)",), pause=partial(clock.sleep, 0.01)),
        workers=3,
        link=lambda link: Throttled(link, "20mbit", 0.004),
    )
    first = found[0]
    assert all(other == first for other in found)
    assert first.facts.workers == 3 and first.facts.elements == 21_330
    assert first.facts.rate == pytest.approx(20e6, rel=0.01)
    assert first.facts.net("peers").rate == pytest.approx(20e6, rel=0.01)
    assert first.facts.one_way == pytest.approx(0.002, rel=0.05)
    assert first.facts.compute == pytest.approx(0.01, rel=0.01)
    assert len(first.computes or ()) == 3 and first.facts.compute == max(first.computes or ())
    assert first.facts.largest > 0.25, "fragments by layers are unequal"
    assert first.facts.skew == 0.0, "they take turns"
    assert first.rows[-1].recipe == "power_sgd(2)"
    assert first.held == 4 * 4 * 21_330 + 4 * 4  # and AdamW's own steps, a number for each tensor
    for c in choices(first.facts):
        assert all(work_key(r) in first.facts.work for r in c.recipe), c.text
    assert 0 < first.facts.backward < 1


def test_workers_of_two_ranks() -> None:
    found = la.simulate(lambda rank: advised(rank, nprocs=2), workers=4)
    facts = found[0].facts
    assert (facts.workers, facts.ranks) == (2, 2)
    assert set(facts.nets) == {"workers", "peers", "replica", "world", "direct"}
    assert "nprocs_per_node=2" in found[0].code
    assert all(other == found[0] for other in found)


def over_gloo(rank: int) -> str:
    model, optimizer, step = training(rank)
    found = la.advise(model, step, optimizer=optimizer, steps=4, link=gloo.link_of(2))
    return found.to_json()


def test_over_processes(pool: gloo.Pool) -> None:
    first, second = pool.run(over_gloo, ranks=2)
    assert first == second
    told = json.loads(first)
    assert told["facts"]["parameters"] == 21_330 and told["facts"]["rate"] > 0
    assert told["recommendation"] in {row["recipe"] for row in told["rows"]}


@pytest.mark.parametrize(
    ("computes", "m_1", "m_4", "found"),
    [
        ((0.03, 0.03), 0.03, 0.03, (0.03, 0.0)),  # alike
        ((0.05, 0.03), 0.05, 0.05, (0.05, 0.0)),  # one is slower
        ((0.04, 0.04), 0.05, 0.045, (0.04, 0.01)),  # slow in turn: 0.04 + 0.01 / sqrt(4)
        ((0.05, 0.05), 0.05, 0.045, (0.05, 0.0)),  # not faster together than alone
        ((0.03, 0.06), 0.03, 0.03, (0.04, 0.0)),  # the processors' time is shared
    ],
)
def test_waiting_for_the_slowest_is_told_from_computing(
    computes: tuple[float, ...], m_1: float, m_4: float, found: tuple[float, float]
) -> None:
    assert compute_and_skew(computes, m_1, m_4, 4) == pytest.approx(found)


def slept(rank: int) -> tuple[float, float]:
    model, optimizer, step = training(rank)

    def sleeps() -> None:
        step()
        time.sleep(0.05 if rank == 1 else 0.03)

    link = gloo.link_of(2)
    facts = la.advise(model, sleeps, optimizer=optimizer, steps=16, link=link).facts
    return facts.compute, facts.skew


def test_a_slower_rank_decides(pool: gloo.Pool) -> None:
    first, second = pool.run(slept, ranks=2)
    assert first == second
    # no less than the harmonic mean, however busy the machine; the rest is `compute_and_skew`
    assert first[0] >= statistics.harmonic_mean([0.03, 0.05]) and first[1] >= 0


def groups() -> int:
    """Process groups that this process is a member of."""
    return len(dist.distributed_c10d._world.pg_map)


def failing(rank: int, where: str) -> tuple[str, int]:
    """What a rank is told where rank 1 of four has no memory left; and the process groups that
    stay behind."""

    def exhausted(*_: Any) -> None:
        raise MemoryError("no room\nfor it")

    model, _, step = training(rank)
    before = groups()
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            at: dict[str, tuple[Any, str]] = {
                "a step": (nn.Linear, "forward"),
                "a rehearsal": (NullLink, "reduce_scatter"),  # between two of its meetings
                "preparing": (measure, "_peak"),
                "a collective": (TcpLink, "swap"),
            }
            patched.setattr(*at[where], exhausted)
        with pytest.raises((ValueError, la.LinkError)) as raised:
            la.advise(model, step, steps=2, nprocs_per_node=2, timeout=60.0)
    return f"{raised.typename}: {raised.value}", groups() - before


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("a step", "step_fn raised MemoryError: no room for it"),
        (
            "a rehearsal",
            "timing OuterStep and ShardedMean raised MemoryError: no room for it",
        ),
        ("preparing", "MemoryError: no room for it"),
    ],
)
def test_what_fails_on_one_rank_fails_on_all_in_the_same_words(
    pool: gloo.Pool, where: str, told: str
) -> None:
    expected = [(f"FailedError: rank 1: {told}", 0)] * 4
    expected[1] = (f"FailedError: {told}".replace("room for", "room\nfor"), 0)
    assert pool.run(failing, where, ranks=4) == expected


def test_a_collective_that_fails_on_one_rank_is_lost_on_all(pool: gloo.Pool) -> None:
    answers = pool.run(failing, "a collective", ranks=4)
    assert all(text.startswith("LinkError") and left == 0 for text, left in answers)
    assert "swap of" in answers[1][0] and "no room" in answers[1][0]


def test_an_error_in_a_step_is_one_of_simulated_workers_too() -> None:
    def one(rank: int) -> str:
        model, _, step = training(rank, fail=rank == 1)
        with pytest.raises(ValueError) as raised:
            la.advise(model, step, steps=2)
        return str(raised.value)

    told = "step_fn raised RuntimeError: out of batches"
    assert la.simulate(one, workers=2) == [f"rank 1: {told}", told]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "steps": ({"steps": 1}, "steps must be an integer of at least 2, not 1"),
    "a recipe": ({"recipes": ("nonsense",)}, "no recipe 'nonsense'"),
    "its timeout": ({"timeout": -1.0}, "timeout must be a finite number"),
    "the optimizer": ({"other": True}, "the ranks' arguments differ: model, optimizer"),
}
"""What rank 1 alone has wrong, and what it is told."""


def asking(rank: int, what: str) -> tuple[str, int]:
    model, optimizer, step = training(rank)
    given, before = dict(WRONG[what][0]) if rank == 1 else {}, groups()
    params = [model[0].weight] if given.pop("other", False) else list(model.parameters())
    optimizer = torch.optim.AdamW(params)
    with pytest.raises(ValueError) as raised:
        la.advise(model, step, optimizer=optimizer, **{"steps": 2, "timeout": 20.0, **given})
    return str(raised.value), groups() - before


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_on_one_rank_is_told_to_all(pool: gloo.Pool, what: str) -> None:
    said = pool.run(asking, what, ranks=4)
    assert said[1][0].startswith(WRONG[what][1]) and [left for _, left in said] == [0] * 4
    assert said[0] == said[2] == said[3] and "rank" in said[0][0]


def test_sharded_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("laconic.advisor.advise")
    monkeypatch.setattr(module, "is_sharded", lambda p: p.dim() == 2)
    with pytest.raises(ValueError, match="sharded"):
        la.simulate(advised, workers=2)


def test_gradients_that_come_at_once_are_not_taken_for_some_that_nobody_saw() -> None:
    def one(rank: int, seen: bool) -> float:
        model = nn.Linear(300, 300, bias=False)

        def step() -> None:
            if seen:
                model(torch.ones(8, 300)).sum().backward()

        return la.advise(model, step, steps=2).facts.backward

    assert la.simulate(lambda rank: one(rank, True), workers=2) == [0.0, 0.0]
    assert la.simulate(lambda rank: one(rank, False), workers=2) == [BACKWARD, BACKWARD]


def over_own_groups(rank: int) -> tuple[str, int]:
    model, optimizer, step = training(rank)
    before = groups()
    found = la.advise(model, step, optimizer=optimizer, steps=2, nprocs_per_node=2)
    return found.to_json(), groups() - before


def test_process_groups_made_for_measuring_are_destroyed(pool: gloo.Pool) -> None:
    answers = pool.run(over_own_groups, ranks=4)
    assert answers == [(answers[0][0], 0)] * 4


def test_one_worker_has_nobody_to_talk_to() -> None:
    with pytest.raises(ValueError, match="only one worker"):
        la.simulate(advised, workers=1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"steps": 1}, "steps"),
        ({"step_fn": None}, "step_fn"),
        ({"model": nn.ReLU()}, "no parameter"),
        ({"recipes": ("nonsense(3)",)}, "nonsense"),
        ({"recipes": ("auto()",)}, "nothing to predict"),
        ({"recipes": ("hierarchical(2, 8)",)}, "groups"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], named: str) -> None:
    def one(rank: int) -> None:
        model, _, step = training(rank)
        given: dict[str, Any] = {"model": model, "step_fn": step, "steps": 2, **options}
        la.advise(given.pop("model"), given.pop("step_fn"), **given)

    with pytest.raises(ValueError, match=named):
        la.simulate(one, workers=2)


# -- the command ----

NUMBERS = [
    "--params", "1.3B", "--step-time", "0.9s", "--bandwidth", "1gbit", "--latency", "60ms",
    "--nodes", "8",
]  # fmt: skip


def but(option: str, value: str) -> list[str]:
    """The same with another value of this option."""
    at = NUMBERS.index(option) + 1
    return [*NUMBERS[:at], value, *NUMBERS[at + 1 :]]


def test_the_answer_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *NUMBERS]) == 0
    lines = capsys.readouterr().out.splitlines()
    match = re.fullmatch(
        r"Use (.+): ([\d.]+) s per step, (\d+)% of the speed without communication "
        r"\(ddp\(\): ([\d.]+) s\)\. It is expected to need (\d+)% more steps than ddp\(\) \(.*\), "
        r"and makes up to ([\d,.]+) times as much progress per second\.",
        lines[0],
    )
    assert match, lines[0]
    facts = facts_from(params=1_300_000_000, step_time=0.9, bandwidth=1e9, one_way=0.03, nodes=8)
    advice = advice_on(facts)
    assert match[1] == advice.recommendation
    seconds, share, ddp, steps, progress = (float(match[k].replace(",", "")) for k in range(2, 7))
    assert seconds == pytest.approx(advice.row.seconds, rel=5e-3)
    assert share == round(100 * advice.row.share)
    assert ddp == pytest.approx(advice.rows[0].seconds, rel=5e-3)
    assert 1 + steps / 100 == pytest.approx(advice.row.steps)
    assert progress == pytest.approx(advice.row.progress, rel=5e-3)
    code = [line.strip() for line in lines[3:6]]
    assert code[0] == "import laconic"
    assert code[1].startswith(f"{advice.code}  #") and code[2].startswith("sync.finish()  #")
    table = [line.split("  ")[0] for line in lines[8:] if line and not line.startswith(" ")]
    assert table[: 1 + len(advice.alternatives)] == [advice.recommendation, *advice.alternatives]
    assert "sparse_loco" not in "".join(lines) and len(lines) < 30
    assert str(advice).splitlines() == lines[: len(str(advice).splitlines())]


def shown(facts: Facts, *recipes: str) -> str:
    return "\n".join(show.answer(advice_on(facts, recipes)))


MODEL = facts_from(params=125 * 10**6, step_time=0.9, bandwidth=1e8, one_way=5e-3, nodes=8)


def test_it_says_what_the_steps_were_measured_with() -> None:
    from benchmarks import factors

    from laconic.lab.race import workloads

    workers, elements, steps = MEASURED_WORKERS, MEASURED_ELEMENTS, MEASURED_STEPS
    assert (workers, steps) == (factors.WORKERS, factors.STEPS)
    assert sum(p.numel() for p in workloads.load("text").model().parameters()) == elements
    said = shown(MODEL).splitlines()[1]
    assert "4 workers that train a transformer of 865,280 parameters on text" in said
    assert "Your model is 144 times as large" in said
    same = replace(TEXT, shapes=((845, 1024),))
    assert "Your model is equally large" in shown(same).splitlines()[1]
    assert "Your model is 0.5 times as large" in shown(replace(TEXT, shapes=((845, 512),)))


def test_steps_that_were_not_measured_are_not_called_measured() -> None:
    said = shown(MODEL)
    assert re.search(r"\nstreaming_diloco\(16, delay=4, outer='muon'\) +0\.9 +100% +~1\.06 ", said)
    assert "It is expected to need 6% more steps than ddp() (taken from delay=2)" in said
    assert "makes up to 74 times as much progress per second" in said
    assert "\n    steps: taken from delay=2; 6% more steps for the same loss, on text" in said
    assert "measured with a delay" not in said
    faster = facts_from(params=125 * 10**6, step_time=0.9, bandwidth=5e8, one_way=5e-3, nodes=8)
    measured = advice_on(faster)
    assert measured.recommendation == "streaming_diloco(8, delay=2, outer='muon')"
    assert measured.row.steps_from in KNOWN
    assert " It needs no more steps than ddp(), and makes up to " in measured.reason


@pytest.mark.parametrize("muon", [True, False])
@pytest.mark.parametrize("elements", [10**6, 125 * 10**6, 10**9])
def test_the_rule_of_the_page_on_choosing_is_what_it_recommends(elements: int, muon: bool) -> None:
    """``docs/choose.md``: the shortest period in which the model can be sent in four bits, and a
    delay that covers one of four fragments."""
    step, nodes = 0.9, 8
    periods = (8, 12, 16, 24, 32, 48, 64) if muon else (8, 16, 32, 64)
    for ratio in (25, 40, 50, 90, 100, 140, 220, 300, 420):  # of sending to backward
        sending = ratio * BACKWARD * step
        rate = 2 * (nodes - 1) / nodes * 32 * elements / sending
        facts = Facts(nodes, ((elements // 1000, 1000),), 4, step, rate, 1e-5, muon=muon)
        period = next(p for p in periods if p * step >= 1.4 * sending / 8)
        delay = math.ceil((1.25 * sending / 32 + step / 2) / step)
        recipe = advice_on(facts).recommendation
        assert recipe.startswith(f"streaming_diloco({period}, delay={delay}"), (ratio, recipe)


def test_the_example_of_the_page_on_choosing() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "choose.md").read_text().split())
    advice = advice_on(MODEL, ["streaming_diloco(8, delay=4, outer='muon')"])
    assert f"`{advice.recommendation}`, at 0.9 s a step" in page
    assert advice.row.seconds == pytest.approx(0.9)
    (short,) = (row for row in advice.rows if row.own)
    assert "With a period of 8, a step would take 1.6 s" in page
    assert short.seconds == pytest.approx(1.6, abs=0.05)


def test_an_outer_step_that_is_free_is_among_the_assumptions() -> None:
    said = "encoding, copying, the outer step in Muon's direction, and waiting for"
    assert said in shown(MODEL)
    assert said not in shown(replace(MODEL, turning=0.1)) + shown(replace(MODEL, muon=False))


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "sparse_loco"])
def test_steps_that_are_assumed_are_shown_as_assumed(name: str) -> None:
    for period in (4, 16, 64, 100, 256):
        own = f"{name}({period})"
        lines = shown(MODEL, own).splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith(f"{own} "))
        assert "  ~1." in lines[at]
        assert lines[at + 1].startswith("    steps: assumed equal to streaming_diloco(")
        assert ("needed more than 2 steps" in lines[at + 1]) == (name == "sparse_loco")
        assert not lines[at + 1].endswith(OWN)


def test_long_runs_of_papers_do_not_contradict_the_steps() -> None:
    quality = next(row.quality for row in advice_on(MODEL).rows if row.recipe == "diloco(256)")
    assert quality.startswith("in long runs as good as synchronous training")
    assert quality.endswith("the steps here are those of short runs")


@pytest.mark.parametrize(
    ("own", "steps", "quality"),
    [
        ("streaming_diloco(8, outer='muon')", "1.00", "no more steps for the same loss, on text"),
        ("streaming_diloco(16, outer='muon')", "1.06", "6% more steps for the same loss, on text"),
        ("streaming_diloco(16)", "~1.50", "steps: taken from delay=1; 50% more steps for"),
        ("streaming_diloco(16, momentum=0.3)", "~1.50", "steps: assumed equal to streaming_diloco"),
        ("streaming_diloco(12, outer='muon')", "~1.03", "steps: interpolated between measured"),
        ("streaming_diloco(256)", "~1.82", "steps: extrapolated from streaming_diloco(64); like "),
        ("local_sgd(2, delay=2, codec='int4')", "1.30", "30% more steps for the same loss, on te"),
        (
            "diloco(100)",
            "~1.74",
            "steps: assumed equal to streaming_diloco(128); as for diloco(64)",
        ),
        ("diloco(16, pace='own')", "~1.50", "steps: assumed equal to streaming_diloco(16); as eq"),
        ("power_sgd(4, codec='int8')", "1.47", "47% more steps for the same loss, on text"),
        ("power_sgd(2)", "~1.47", "steps: assumed equal to power_sgd(4, codec='int8'); a recipe "),
        ("ddp(codec='int4')", "1.02", "2% more steps for the same loss on text"),
        ("slowmo(sgp(), 48)", "~1.37", "steps: assumed equal to streaming_diloco(4); a recipe wi"),
        ("easgd(16)", "?", OWN),
        ("demo()", "?", OWN),
        ("noloco(50)", "?", OWN),
    ],
)
def test_what_is_known_of_own_recipes(own: str, steps: str, quality: str) -> None:
    lines = shown(MODEL, own).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"{own} "))
    assert lines[at].split()[-2] == steps and (lines[at].split()[-1] == "?") == (steps == "?")
    assert lines[at + 1].startswith(f"    {quality}")
    (row,) = (row for row in advice_on(MODEL, [own]).rows if row.own)
    assert row.recipe == own and (row.steps_from == UNKNOWN) == (steps == "?")
    assert row.steps == 1 or steps != "?"


def test_an_own_recipe_that_is_compared_anyway_is_shown_once() -> None:
    for own in ("ddp()", advice_on(MODEL).recommendation, "local_sgd(16)"):
        advice = advice_on(MODEL, [own])
        table = [row.recipe for row in advice.rows]
        assert table == [row.recipe for row in advice_on(MODEL).rows]
        beside = [advice.recommendation, *advice.alternatives]
        assert beside.count(own) == 1 and beside.count("ddp()") == 1


def test_all_recipes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "advice.png"
    options = ["--plot", str(picture), "--recipe", "power_sgd(2)"]
    assert main(["advise", *NUMBERS, *options]) == 0
    short = capsys.readouterr().out
    assert main(["advise", *NUMBERS, *options, "--all"]) == 0
    whole = capsys.readouterr().out
    assert whole.startswith(short.removesuffix("\n--all adds a table of all recipes.\n"))
    said = " ".join(whole.split())
    assert "1,300,000,000 parameters of 4 bytes" in said and "power_sgd(2)" in said
    facts = facts_from(params=10**9, step_time=0.9, bandwidth=1e9, one_way=0.03, nodes=8)
    assert all(f"\n{c.text.partition('(')[0]}(" in whole for c in choices(facts))
    # 2 * 7/8 * 5.2 GB at 1 Gbit/s, and 2 latencies for each of 199 buckets
    assert "H = 3: 84.7 s * (1 - 1/3) = 56.5 s against 540 ms: faster" in said
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("width", [80, 100, 160])
def test_text_fits_the_terminal(width: int) -> None:
    facts = facts_from(params=10**8, step_time=0.9, bandwidth=1e9, one_way=0.03, nodes=8)
    for line in show.everything(advice_on(facts), width):
        assert len(line) < width or "sync = laconic.attach" in line, line


def test_without_plots_and_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Advice needs no package but torch."""
    for name in ("matplotlib", "matplotlib.figure", "rich", "rich.console", "numpy"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["advise", *NUMBERS, "--all"]) == 0
    assert capsys.readouterr().out.startswith("Use ")
    assert main(["advise", *NUMBERS, "--plot", "advice.png"]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"laconic: --plot needs matplotlib: {install('lab')}\n"
    assert not captured.out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *NUMBERS, "--nprocs-per-node", "8", "--json"]) == 0
    said = capsys.readouterr().out
    assert main(["advise", *NUMBERS, "--per-node", "8", "--json"]) == 0
    assert capsys.readouterr().out == said
    told = json.loads(said)
    assert set(told) == {
        "facts", "rows", "guide", "recommendation", "code", "reason", "computes", "held", "peak",
        "slow", "alternatives",
    }  # fmt: skip
    row = next(row for row in told["rows"] if row["recipe"] == "local_sgd(16)")
    assert set(row) == {
        "recipe", "period", "seconds", "hidden", "megabytes", "memory", "speedup", "share",
        "steps", "steps_from", "quality", "own", "progress",
    }  # fmt: skip
    facts = facts_from(
        params=1_300_000_000, step_time=0.9, bandwidth=1e9, one_way=0.03, nodes=8, nprocs_per_node=8
    )
    assert row["seconds"] == predict(la.local_sgd(16), facts).seconds
    assert told["guide"][0]["pays_here"] is True
    assert told["facts"]["parameters"] == 1_300_000_000 and told["peak"] is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], "--params, --step-time, --bandwidth, --latency, --nodes"),
        (NUMBERS[2:], "needs --params"),
        (but("--params", "many"), "not a count: 'many'"),
        (but("--params", "1.5"), "not a count"),
        (but("--params", "1300000000B"), "params must be at most 1e+13, not 1.3e+18"),
        (but("--step-time", "0.9x"), "not a duration"),
        (but("--bandwidth", "fast"), "not a rate"),
        (but("--latency", "1mbit"), "not a latency"),
        (but("--latency", "5"), "give 0, or a positive number with us, ms, s, min, h or d"),
        (but("--bandwidth", "100"), "give a positive number with bit, kbit, mbit or gbit"),
        (["--workload", "digits", "--bandwidth", "100"], "not a rate: '100'"),
        (["--workload", "digits", "--bandwidth-host", "1=10"], "not a rate: '10'"),
        (but("--nodes", "1"), "nodes"),
        ([*NUMBERS, "--dtype", "int3"], "'float32'"),
        ([*NUMBERS, "--backward-share", "2"], "backward-share"),
        ([*NUMBERS, "--local-bandwidth", "1gbit"], "nprocs-per-node > 1"),
        ([*NUMBERS, "--hosts", "3"], "--hosts applies only to a measurement"),
        ([*NUMBERS, "--recipe", "nonsense"], "nonsense"),
        ([*NUMBERS, "--plot", "advice.docx"], "png"),
        ([*NUMBERS, "--workload", "text"], "is measured with --workload"),
        (["--workload", "chess"], "digits"),
        (["--workload", "digits", "--hosts", "1"], "cannot communicate"),
        (["--workload", "digits", "--hosts", "0"], "hosts"),
        (["--workload", "digits", "--recipe", "nonsense"], "nonsense"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    assert main(["advise", *options]) == 2
    captured = capsys.readouterr()
    assert named in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize("workers", [2, 3, 4, 8, 16])
def test_all_that_is_compared_was_rehearsed(workers: int) -> None:
    known = rehearsals(rehearsed(workers))
    facts = replace(TEXT, workers=workers)
    for c in choices(facts):
        assert {work_key(r) for r in c.recipe} <= set(known), c.text


def test_the_streaming_recipe_is_the_one_whose_quality_was_measured() -> None:
    (found,) = (c for c in choices(TEXT) if c.text.startswith("streaming_diloco(16"))
    delay = found.recipe[0].delay
    assert found.recipe == parse_recipe(f"streaming_diloco(16, {LIKE.replace('1', str(delay), 1)})")


@pytest.mark.parametrize("workers", [2, 4, 16])
@pytest.mark.parametrize("rate", [1e5, 1e7, 1e9])
def test_what_auto_chooses_from_is_in_the_advice(workers: int, rate: float) -> None:
    """And nothing of its kind beside it, such as a period that auto leaves out."""
    facts = replace(TEXT, workers=workers, rate=rate)
    mine = {c.text: c.recipe for c in candidates(facts)}
    found = {c.text: c.recipe for c in choices(facts)}
    delayed = [t for t in found if t.startswith("local_sgd(") and "delay" in t]
    kinds = ("ddp(", "streaming_diloco(", *delayed)
    assert {t: r for t, r in found.items() if t.startswith(kinds)} == mine


def test_ranks_that_measure_different_things_are_told_so() -> None:
    def one(rank: int) -> str:
        model, _, step = training(rank)
        with pytest.raises(ValueError, match="arguments differ") as raised:
            la.advise(model, step, steps=2 + rank)
        return str(raised.value)

    assert len(set(la.simulate(one, workers=2))) == 1


def test_a_model_that_averages_its_gradients_is_refused(pool: gloo.Pool) -> None:
    assert pool.run(wrapped, ranks=1) == [
        "the model already averages its gradients: give model.module"
    ]


def wrapped(rank: int) -> str:
    model, _, step = training(rank)
    try:
        wrapped_model = DistributedDataParallel(model, process_group=gloo._groups[1])
        la.advise(wrapped_model, step, link=gloo.link_of(1))
    except ValueError as error:
        return str(error)
    return ""


def test_a_network_of_long_latency_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first message takes longer than the last one of a sweep should."""
    monkeypatch.setattr(measure, "LONG", 0.01)
    pause = partial(controlled(monkeypatch).sleep, 0.01)
    found = la.simulate(
        lambda rank: advised(rank, pause=pause),
        workers=2,
        link=lambda link: Throttled(link, "50mbit", 0.02),
    )
    for advice in found:
        assert advice.facts.one_way == pytest.approx(0.01, rel=0.01)
