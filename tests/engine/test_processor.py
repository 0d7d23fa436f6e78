"""The processor time of messages: measured, and what it does to a prediction."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import laconic as la
from laconic import processor
from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.updates.muon_step import operations
from laconic.auto import _busiest
from laconic.candidates import candidates, largest_fragment, takes_muon, turning
from laconic.engine.joint_optimizer import JointOptimizer
from laconic.predict import Facts, predict, undisturbed
from laconic.processor import Usage

from tests.support.clock import controlled

FACTS = Facts(4, ((256, 256),) * 16, 4, 0.1, 1e8, 1e-4)


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_usage_counts_the_running_of_the_calling_thread_alone() -> None:
    before = Usage.now(10.0, 1.0)
    other = threading.Thread(target=spin, args=(0.1,))
    other.start()
    spin(0.05)
    other.join()
    used = Usage.now(30.0, 1.5).since(before)
    assert used.bytes == 20 and used.work == 0.5
    assert 0.05 <= used.running < 0.15, "not what the other thread has used"
    assert used.ready >= 0


def test_usage_without_figures_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "OWN", Path("/nowhere/schedstat"))
    assert Usage.now(0.0, 0.0).ready == 0


@pytest.mark.parametrize(
    ("work", "running", "ready", "contention"),
    [
        (1.0, 10.0, 0.0, 0.0),  # idle processors
        (1.0, 10.0, 1.0, 1.0),  # a processor each: messages take it from training
        (1.0, 10.0, 10.0, 2.0),  # two threads of training for each processor
        (0.0, 10.0, 10.0, 0.0),
        (1.0, 0.0, 1.0, 0.0),
    ],
)
def test_contention(work: float, running: float, ready: float, contention: float) -> None:
    used = Usage(8.0, work, running, ready)
    assert used.contention == pytest.approx(contention)
    assert used.carry == pytest.approx(work / 8)
    assert Usage(0.0, work, running, ready).carry == 0


@pytest.mark.parametrize(
    "text",
    ["ddp()", "ddp(codec='int4')", "local_sgd(2, delay=2, codec='int4')", "streaming_diloco(8)"],
)
def test_a_step_measured_beside_messages_is_that_without_them(text: str) -> None:
    recipe = parse_recipe(text)
    assert isinstance(recipe, tuple)
    facts = replace(FACTS, carry=2e-9, contention=2.0)
    alone = replace(facts, compute=undisturbed(recipe, facts).compute)
    assert alone.compute < facts.compute
    stretch = predict(recipe, alone).seconds - predict(recipe, replace(alone, carry=0.0)).seconds
    # the rounds overlap with a step that is longer by their own work: second order
    assert alone.compute + stretch == pytest.approx(facts.compute, rel=2e-3)


def test_nothing_is_taken_off_where_processors_are_idle() -> None:
    recipe = la.streaming_diloco(8)
    assert undisturbed(recipe, replace(FACTS, carry=1.0)).compute == FACTS.compute
    zero = replace(FACTS, compute=0.0, carry=1.0, contention=1.0)
    assert undisturbed(recipe, zero).compute == 0


def test_rounds_and_jobs_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    controlled(monkeypatch)

    def run(rank: int) -> tuple[float, float]:
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = la.attach(model, optimizer, la.local_sgd(2))
        session = sync.driver.session
        counts = [session.round_seconds]
        for _ in range(2):
            model(torch.full((1, 64), 1.0 + rank)).sum().backward()
            optimizer.step()
            counts.append(session.round_seconds)
        return counts[1] - counts[0], counts[2] - counts[1]

    for without, with_round in la.simulate(run, workers=2):
        assert 0 <= without < with_round


# -- when outer steps have Muon's direction ----


def test_turning_steps_into_muons_direction_stops_training() -> None:
    """By as much as the period is short, whatever the network."""
    slow = replace(FACTS, turning=0.08)
    for period in (8, 16):
        muon = la.streaming_diloco(period, outer="muon")
        more = predict(muon, slow).seconds - predict(muon, FACTS).seconds
        assert more == pytest.approx(0.08 / period)
        nesterov = la.streaming_diloco(period)
        assert predict(nesterov, slow) == predict(nesterov, FACTS)
    once = predict(la.diloco(4, outer="muon"), slow).seconds
    assert once - predict(la.diloco(4, outer="muon"), FACTS).seconds == pytest.approx(0.02)


def test_turning_takes_time_by_the_operations_of_matrices() -> None:
    device = torch.device("cpu")
    assert turning([(64,), (64, 3, 3, 3), (1, 9)], device) == 0
    assert 0 < turning([(192, 192)], device) < turning([(768, 768)] * 8, device)
    assert operations((4, 7)) == operations((7, 4)) == 4 * 16 * 7 + 24 * 64, "two, and 12 squares"


def test_the_largest_fragment_by_layers() -> None:
    even = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    uneven = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 24, bias=False))
    one = nn.ModuleDict({"all": nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})})
    for model, share in ((even, 0.25), (uneven, 0.75), (one, 1.0)):
        assert largest_fragment(model, [list(model.parameters())]) == pytest.approx(share)


def test_a_delay_hides_the_largest_fragment() -> None:
    facts = replace(FACTS, rate=2e7, muon=True)
    delays = [
        next(c for c in candidates(f) if c.text.startswith("streaming")).recipe[0].delay
        for f in (facts, replace(facts, largest=0.25), replace(facts, largest=0.75))
    ]
    assert delays[0] == delays[1] < delays[2]


def test_a_mix_that_is_given_is_used() -> None:
    assert la.streaming_diloco(outer="muon")[0].update.merge == "loscar"  # type: ignore[union-attr]
    mixed = la.streaming_diloco(outer="muon", mix=0.3)[0].update
    assert (mixed.merge, mixed.mix) == ("mix", 0.3)  # type: ignore[union-attr]
    assert la.streaming_diloco() == la.streaming_diloco(mix=0.5, merge="mix", lr=0.7, by="bytes")


def test_what_slows_down_training_is_that_of_the_rank_that_suffers_most() -> None:
    """Not the mean with newcomers, which have sent nothing yet."""
    rows = torch.tensor([[0.0, 0.0], [2e-9, 1.0], [1e-9, 1.5]], dtype=torch.float64)
    assert _busiest(rows) == (2e-9, 1.0)


def test_muon_is_for_adam_and_sgd_and_matrices() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(1, 1, 3))
    shapes = [p.shape for p in model.parameters()]
    adam = torch.optim.AdamW(model.parameters())
    assert takes_muon(adam, shapes)
    assert takes_muon(torch.optim.NAdam(model.parameters()), shapes)
    assert takes_muon(torch.optim.SGD(model.parameters(), lr=0.1), shapes)
    assert not takes_muon(torch.optim.Adagrad(model.parameters()), shapes), "not measured"
    assert not takes_muon(None, shapes)
    kernels = [(64, 3, 3, 3), (8, 8)]
    assert math.prod(kernels[0]) > 64 and not takes_muon(adam, kernels)
    assert not takes_muon(adam, [(1, 64), (64,)]), "a row is not a matrix"
    muon = JointOptimizer(la.muon(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))))
    assert not takes_muon(muon, [(8, 8)]), "every group must be of a kind that was measured"
