"""Every recipe that the golden digests name: it equals its reference, it goes on bit for bit over
another link, and with other workers, and sends as many bytes as it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laconic.algorithms.recipes import RECIPES

from tests.support import gloo
from tests.support.contract import Setting, check, check_others
from tests.support.recipes import ROWS, tagged

SETTINGS = [
    # processes, ranks of a worker, optimizer
    (3, 1, "adamw"),
    (4, 2, "nesterov"),
    (2, 1, "sgd"),
    (4, 1, "adamw"),
    (3, 1, "nesterov"),
    (4, 2, "adamw"),
    (2, 1, "nesterov"),
    (4, 1, "sgd"),
    (1, 1, "adamw"),
]
SAVES = 5, 7, 4, 8


def setting_of(name: str) -> Setting:
    """Settings in turn, in which the row's needs are met."""
    place, tags = [*ROWS].index(name), ROWS[name].tags
    workers, ranks, optimizer = SETTINGS[place % len(SETTINGS)]
    if "whole" in tags or "golden" in tags:
        ranks = 1
    if "gossip" in tags and workers // ranks < 3:
        workers, ranks = 4 - place % 2, 1
    if "golden" in tags or "grouped" in tags:
        workers = 4 if "grouped" in tags else min(max(workers, 2), 3 + ("gossip" in tags))
    origin = "threads" if place % 2 else "processes"
    return Setting(name, workers, ranks, optimizer, SAVES[place % len(SAVES)], origin)  # type: ignore[arg-type]


def test_every_recipe_has_a_row() -> None:
    names = {name.partition("(")[0].partition(",")[0] for name in ROWS}
    assert names >= RECIPES.keys()


@pytest.mark.parametrize("name", tagged("golden"))
def test_contract(pool: gloo.Pool, name: str, tmp_path: Path) -> None:
    setting, place = setting_of(name), [*ROWS].index(name)
    first = check(setting, tmp_path, pool)
    workers = setting.workers + (-1, 0, 2)[place % 3]
    lost = setting.workers - 1 if place % 3 == 1 else -1
    check_others(setting, tmp_path, first, workers, lost)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
@given(
    st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (4, 2)]),
    st.sampled_from(["sgd", "nesterov", "adamw"]),
    st.integers(1, 10),
    st.sampled_from(["threads", "processes"]),
)
@settings(max_examples=3, deadline=None, suppress_health_check=[*HealthCheck])
def test_contract_of_drawn_settings(
    pool: gloo.Pool,
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    workers: tuple[int, int],
    optimizer: str,
    save: int,
    origin: str,
) -> None:
    ranks = 1 if "whole" in ROWS[name].tags else workers[1]
    setting = Setting(name, workers[0], ranks, optimizer, save, origin)  # type: ignore[arg-type]
    check(setting, tmp_path_factory.mktemp("saved"), pool)
