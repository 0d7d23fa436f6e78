"""benchmarks.larger trains what it says, and its seconds follow from a step and a network."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from benchmarks import larger

from laconic.lab.race import workloads
from laconic.lab.race.workloads import ByteTransformer, lr_factor
from laconic.predict import Facts

WIDTH, STEPS = 32, 3


def test_ddp_of_two_workers_is_one_process_with_both_batches() -> None:
    """Gradients are means, so two workers take the steps of one with a batch twice as large."""
    task = workloads.load("text")
    torch.manual_seed(5)
    model = ByteTransformer(WIDTH)
    lr = larger.LR * 128 / WIDTH
    adamw = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    streams = [task.batches(rank, 2, 5) for rank in range(2)]
    for step in range(1, STEPS + 1):
        adamw.param_groups[0]["lr"] = lr * lr_factor(step, STEPS, task)
        adamw.zero_grad()
        (sum(task.loss(model, next(each)) for each in streams) / 2).backward()
        adamw.step()
    with torch.no_grad():
        expected = sum(float(task.loss(model, batch)) for batch in task.validation)
    expected /= len(task.validation)
    assert larger.train("ddp()", WIDTH, 2, STEPS, 5) == pytest.approx(expected, abs=1e-4)


def test_seconds_are_those_of_the_bytes_where_the_network_is_slow() -> None:
    shapes = ((1000, 1000),)
    facts = Facts(4, shapes, 4, 0.5, 1e7, 0.0)
    sent = 4e6 * 2 * 3 / 4 * 8 / 1e7  # a ring or its equal: 2(n-1)/n of the bytes
    assert larger.seconds_of("local_sgd(24)", facts) == pytest.approx(0.5 + sent / 24)
    fast = replace(facts, rate=math.inf)
    assert larger.seconds_of("local_sgd(24)", fast) == pytest.approx(0.5)


def test_the_table_marks_the_choice_of_auto() -> None:
    model = ByteTransformer(WIDTH)
    shapes = tuple(tuple(p.shape) for p in model.parameters())
    facts = Facts(4, shapes, 4, 0.01, math.inf, 1e-4, muon=True)
    choices = [larger.chosen(replace(facts, rate=rate)) for rate in larger.RATES.values()]
    text = larger.table(facts, STEPS, {row: 2.5 for row in [*larger.ROWS, *choices]})
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert sum(line.count("**") // 2 for line in rows) == len(larger.RATES)
    for choice, column in zip(choices, range(3, 6), strict=True):
        (row,) = (line for line in rows if f"`{choice}`" in line)
        assert row.split("|")[column].strip().startswith("**")


def test_the_wide_models_have_as_many_parameters_as_the_page_says() -> None:
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in ByteTransformer(w).parameters()) for w in (128, 384, 768)]
    assert sizes == [865_280, 7_313_920, 28_783_360]
