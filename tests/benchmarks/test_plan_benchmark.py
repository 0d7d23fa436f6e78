"""The benchmarks of plans: the schedule by layers, the settings of emulated runs, the tables."""

from __future__ import annotations

import pytest
from benchmarks.plan import emulated, published
from benchmarks.plan.published import Model

from laconic.advisor.plan.simulate import check_plannable, recipe_of


def test_the_schedule_by_layers_is_what_it_is_by_hand() -> None:
    """Two layers, 0.5 s forward and 1 s backward each, a reduction takes 2 s. From the start of a
    step: the upper layer's backward ends at 2 s and the lower one's at 3. The upper reduction runs
    from 2 to 4 s, the lower one to 6, so forward passes of the next step wait until then."""
    model = Model("tiny", 2 * 10**9, 2, 3.0, {}, {})
    rate = 16 / 2  # Gbit/s
    assert published.layer_by_layer(model, 0, rate) == pytest.approx(3.0 / 6.0)
    # every other step: 3 s for the one between
    assert published.layer_by_layer(model, 2, rate) == pytest.approx(6.0 / 9.0)
    assert published.layer_by_layer(model, 0, 1e12) == pytest.approx(1.0)


def test_the_least_rate_is_one_of_the_grid() -> None:
    assert published.least_rate(lambda rate: rate / 200) == pytest.approx(222.3, rel=1e-3)
    assert [round(rate, 1) for rate in published.GRID if 8 < rate < 50] == [
        9.1, 11.0, 13.3, 16.0, 19.3, 23.3, 28.1, 33.9, 40.9, 49.4
    ]  # fmt: skip


def test_the_fit_of_a_single_learner_is_the_median_of_its_row() -> None:
    repair, pause = published.fitted()
    assert 70 < repair < 90 and 9 < pause < 15


def test_there_are_24_settings_that_can_be_planned() -> None:
    found = emulated.settings()
    assert len(found) == 24 and len({(s.name, s.recipe) for s in found}) == 24
    for setting in found:
        known = emulated.cluster(setting, [(host, 5.0) for host in setting.kill])
        check_plannable(recipe_of(setting.recipe, known), setting.recipe, known)
        assert known.failures.happen == bool(setting.kill)
    assert sum(bool(s.kill) for s in found) == 5
    assert {s.period for s in found} == {1, 8, 16}


def test_the_table_has_the_newest_run_of_each_setting() -> None:
    line = {"number": 0, "name": "far apart", "recipe": "ddp()", "steps": 20, "killed": []}
    plan = emulated.planned_for(line)
    first, newest = {**line, "measured": 9.0}, {**line, "measured": plan / 1.05}
    text = "\n".join(emulated.rows([first, newest]))
    assert f"| far apart | `ddp()` | {plan / 1.05:.4f} | {plan:.4f} | +5.0% |" in text
    assert "1 of 24 settings: the median error is 5.0% (bound 5%), the largest 5.0%" in text


def test_a_plan_has_the_pace_after_the_warmup_and_the_kill_at_its_time() -> None:
    """A kill costs the others their wait, and nothing else while three are left."""
    setting = next(s for s in emulated.settings() if s.kill and s.recipe == "local_sgd(8)")
    calm = emulated.planned(setting, 96)
    killed = emulated.planned(setting, 96, [(1, 5.0)])
    assert calm * 0.8 < killed < calm * 1.1
