"""``laconic tune --emulated``."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from laconic.advisor.tune.runs import Length, Task
from laconic.lab.race import runner


def test_emulated_hosts_train_as_simulated_workers_do() -> None:
    settings = runner.Settings((), hosts=1, per_host=2, workload="digits", seconds=None, steps=8)
    here = Task(settings, Length("steps", 24), compute=1e-3)
    hosts = replace(here, emulated=True, race=replace(here.race, hosts=2, per_host=1))
    told: list[tuple[int, int]] = []
    real = hosts.run("local_sgd(3)", 2.0, lambda step, steps, _: told.append((step, steps)))
    assert real.loss == pytest.approx(here.run("local_sgd(3)", 2.0, lambda *_: None).loss, rel=1e-4)
    assert told == [(step, 24) for step in range(3, 25, 3)]
    assert real.steps == 24 and real.seconds_per_step > 0


def test_a_coded_recipe_that_diverges_on_hosts_has_diverged() -> None:
    settings = runner.Settings((), hosts=2, per_host=1, workload="digits", seconds=None, steps=8)
    here = Task(settings, Length("steps", 16), emulated=True)
    lost = here.run("local_sgd(2, codec='int4')", 1e30, lambda *_: None)
    assert lost.loss == math.inf
