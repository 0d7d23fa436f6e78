"""Rounds average the module's buffers, as far as training changes them. `laconic.policy.predict`,
`laconic.auto` and `laconic.advise` count what that sends."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import laconic as la
from laconic.cli import main
from laconic.policy.facts import Facts
from laconic.policy.predict import predict

from tests.support.loops import data, sgd, train

WORKERS, FEATURES = 4, 32
RECIPES = {
    "ddp": la.ddp(),
    "streaming_diloco": la.streaming_diloco(8),
    "delayed": la.local_sgd(4, delay=2, codec="int4"),
    "sgp": la.sgp(),
    "quorum": la.diloco(4, quorum=2),
}


def training(kind: str, rank: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], object]]:
    """BatchNorm's statistics are ``changing``; a causal mask is ``constant``."""
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(FEATURES)] if kind == "changing" else []
    model = nn.Sequential(nn.Linear(5, FEATURES), *norm, nn.Linear(FEATURES, 4)).double()
    if kind == "constant":
        model.register_buffer("mask", torch.ones(FEATURES, FEATURES).tril())
    optimizer = sgd(model, 0.01)
    return model, optimizer, lambda: train(model, optimizer, data()[rank % 3][:1])


@cache
def measured(kind: str) -> Facts:
    """What `laconic.advise` measures of the model."""

    def worker(rank: int) -> Facts:
        model, optimizer, step = training(kind, rank)
        return la.advise(model, step, optimizer=optimizer, steps=2).facts

    return replace(la.simulate(worker, 2)[0], workers=WORKERS, nets={}, rates=(), computes=())


def sent(kind: str, recipe: la.Recipe, buffers: Any) -> float:
    """The bytes that a mean worker sends per step."""

    def worker(rank: int) -> int:
        model, optimizer, step = training(kind, rank)
        sync = la.attach(model, optimizer, recipe, buffers=buffers)
        for _ in range(8):
            step()
        before = sync.stats().bytes_sent
        for _ in range(8):
            step()
        return sync.stats().bytes_sent - before

    return sum(la.simulate(worker, WORKERS)) / WORKERS / 8


@pytest.mark.parametrize("kind", ["changing", pytest.param("constant", marks=pytest.mark.slow)])
def test_as_many_bytes_are_predicted_as_are_sent(kind: str) -> None:
    facts = measured(kind)
    assert facts.buffers == ((8 * FEATURES,) * 2 if kind == "changing" else (4 * FEATURES**2,))
    assert facts.changing == (16 * FEATURES if kind == "changing" else 0)
    for name, recipe in RECIPES.items():
        assert predict(recipe, facts).bytes == pytest.approx(sent(kind, recipe, "average")), name
    # buffers that rank 0 shares in every step; the counter of batches is as on rank 0
    model, *_ = training(kind, 0)
    sizes = tuple(b.numel() * b.element_size() for b in model.buffers())
    facts = replace(facts, buffers=sizes, broadcast=True)
    found = predict(la.local_sgd(4), facts)
    assert found.bytes == pytest.approx(sent(kind, la.local_sgd(4), "broadcast"))
    far = replace(facts, rate=1e9, one_way=0.1)
    alone = replace(far, buffers=(), changing=0, broadcast=False)
    more = predict(la.local_sgd(4), far).seconds - predict(la.local_sgd(4), alone).seconds
    messages = 4 if kind == "changing" else 1  # two of digests, and a broadcast in two
    assert more == pytest.approx(0.1 * messages, rel=1e-3)


def test_auto_and_the_command_count_what_a_run_sends(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = (8 * FEATURES,) * 2
    for buffers, sizes in (("average", numbers), ("keep", ()), ("broadcast", (*numbers, 8))):

        def worker(rank: int, mode: Any = buffers) -> Any:
            model, optimizer, step = training("changing", rank)
            sync = la.attach(model, optimizer, la.auto(), buffers=mode)
            while not sync.choices:
                step()
            return sync.choices[0].facts

        facts = la.simulate(worker, 2)[0]
        assert facts.buffers == sizes and facts.changing == sum(sizes)
        assert facts.broadcast == (buffers == "broadcast")
    options = "advise --params 1M --step-time 0.1s --bandwidth 1gbit --workers 2 --json"
    found = []
    for more in ([], ["--buffers", "1M"]):
        assert main([*options.split(), "local_sgd(4)", *more]) == 0
        said = capsys.readouterr()
        assert "assuming a round trip of 1 ms" in said.err, "without --latency"
        rows = json.loads(said.out)["rows"]
        found += [float(r["megabytes"]) for r in rows if r["recipe"] == "local_sgd(4)"]
    assert found[1] == pytest.approx(2 * found[0], rel=1e-4)
