"""Defaults that depend on the run, recipes that print as their call, and misspelled names."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from benchmarks.traps import run_ranks
from torch import Tensor, nn

import laconic as la
from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.recipes import RECIPES
from laconic.algorithms.round import NamedRecipe, Round, describe, is_recipe, recipe_text
from laconic.algorithms.updates import SlowMomentum, momentum_for
from laconic.auto import Chooser
from laconic.candidates import candidates, made
from laconic.cli import main
from laconic.codecs import CODECS
from laconic.errors import check_choice, did_you_mean
from laconic.predict import Facts

LOOSE: Any = la
ROOT = Path(__file__).parents[2]
BY_WORKERS = {1: 0.0, 2: 0.0, 3: 0.0, 4: 0.2, 7: 0.2, 8: 0.5, 15: 0.5, 16: 0.6, 99: 0.6}


def trained(recipe: la.Recipe, workers: int, steps: int = 9) -> list[Tensor]:
    """Parameters after each of so many steps, of worker 0."""

    def run(rank: int) -> list[Tensor]:
        torch.manual_seed(rank)
        model = nn.Linear(3, 2).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        la.attach(model, optimizer, recipe)
        trace = []
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 3, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
            trace.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        return trace

    return la.simulate(run, workers=workers)[0]


# -- slow momentum ----


def test_slow_momentum_by_workers() -> None:
    assert {n: momentum_for(n) for n in BY_WORKERS} == BY_WORKERS


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("sharded", [True, False])
def test_slow_momentum_is_that_of_the_workers_of_the_run(workers: int, sharded: bool) -> None:
    make = partial(la.slowmo, la.local_sgd(1), 3, sharded=sharded)
    found = trained(make(), workers)
    same = trained(make(momentum=momentum_for(workers)), workers)
    assert all(map(torch.equal, found, same))
    other = trained(make(momentum=0.3), workers)
    assert not torch.equal(found[-1], other[-1])


def test_slow_momentum_changes_with_the_workers_of_a_resumed_run() -> None:
    """Nothing of it is fixed when the recipe is made, or in a saved state."""
    assert describe(la.slowmo(None)) == describe(la.slowmo(None, momentum=None))
    assert "momentum=None" in describe(la.slowmo(None))
    slow = la.slowmo(None)[0].update
    assert isinstance(slow, SlowMomentum) and slow.momentum is None


def test_the_wrapper_keeps_the_momentum_of_fairscale() -> None:
    parameters = inspect.signature(la.SlowMoDistributedDataParallel).parameters
    assert parameters["slowmo_momentum"].default == 0.5


# -- streaming DiLoCo and auto ----


@pytest.mark.parametrize("muon", [False, True])
def test_what_auto_chooses_from(muon: bool) -> None:
    facts = Facts(4, ((845, 1024),), 4, 0.15, 1e7, 1e-3, muon=muon)
    outer: Literal["muon"] | None = "muon" if muon else None
    periods = []
    for candidate in candidates(facts):
        first = candidate.recipe[0]
        assert parse_recipe(candidate.text) == candidate.recipe
        assert made(candidate.recipe) is None or made(candidate.recipe).text == candidate.text
        if isinstance(first, Round):
            period = first.when.period  # type: ignore[attr-defined]
            if candidate.text.startswith("local_sgd("):
                delayed = la.local_sgd(period, delay=first.delay, codec="int4")
                assert candidate.recipe == delayed and period == 2
                continue
            periods.append(period)
            streaming = la.streaming_diloco(period, delay=first.delay, outer=outer)
            assert candidate.recipe == streaming
    between = [12, 24, 48] if muon else []
    assert periods == sorted([8, 16, 32, 64, 128, 256, 512, *between]), "not 4: many messages"
    default = la.streaming_diloco()
    assert default == la.streaming_diloco(16, 4, 2, 0.5, "int4", lr=0.7, momentum=0.6)


def test_a_choice_that_was_saved_in_full_is_that_of_now() -> None:
    """Another spelling of the same recipe is no change, which would cost models on the network."""

    def run(rank: int) -> str:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = la.attach(model, optimizer, la.auto())
        state = sync.state_dict()
        chooser: Chooser = sync.driver.session.policy  # type: ignore[assignment]
        old = "streaming_diloco(8, 4, 2, codec='int4', lr=0.7, momentum=0.6)"
        chooser.load_state_dict({**state["auto"], "text": old})
        return chooser.now.text

    assert la.simulate(run, workers=2) == ["streaming_diloco(8, delay=2)"] * 2


# -- groups ----


@pytest.mark.parametrize("local_period", [None, 0])
def test_lsgd_has_one_leader_unless_groups_are_asked_for(local_period: int | None) -> None:
    assert la.lsgd(4, local_period=local_period) == la.lsgd(4)
    assert [r.over for r in la.lsgd(4)] == ["workers"]
    assert [r.over for r in la.lsgd(4, local_period=1)] == ["group", "workers"]
    assert len(trained(la.lsgd(4), 2)) == 9


@pytest.mark.parametrize(
    ("recipe", "warned"),
    [
        (la.ddp(), True),
        (la.lsgd(4), True),
        (la.auto(), True),
        (la.slowmo(la.local_sgd(2)), True),
        (la.hierarchical(1, 2), False),
        (la.slowmo(la.lsgd(4, local_period=2)), False),
    ],
)
def test_groups_that_no_round_is_about_are_warned_of(recipe: Any, warned: bool) -> None:
    def run(rank: int) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        la.attach(model, optimizer, recipe, group_size=2)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        la.simulate(run, workers=4)
    said = [str(warning.message) for warning in caught]
    assert bool(said) == warned
    assert all("group_size=2 has no effect" in text for text in said)
    assert all("lsgd(16, local_period=4)" in text for text in said)
    assert all(warning.filename == __file__ for warning in caught), "the line that attaches"


def test_another_recipe_may_have_the_groups() -> None:
    def run(rank: int) -> int:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = la.attach(model, optimizer, la.local_sgd(2), group_size=2)
        sync.switch(la.hierarchical(1, 2))
        sync.switch(la.local_sgd(2))
        return sync.step

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "group_size=2 has no effect")
        assert la.simulate(run, workers=4) == [0] * 4


# -- recipes as text ----

TEXTS: dict[str, la.Recipe] = {
    "ddp()": la.ddp(codec=None),
    "ddp(codec='int4')": la.ddp(codec="int4"),
    "local_sgd(12)": la.local_sgd(period=12, delay=0),
    "local_sgd(12, delay=3)": la.local_sgd(12, delay=3),
    "post_local_sgd(100, 4)": la.post_local_sgd(100, period=4),
    "slowmo(local_sgd(3))": la.slowmo(la.local_sgd(3), period=48),
    "slowmo(local_sgd(3), period=12)": la.slowmo(la.local_sgd(3), 12),
    "slowmo(None, momentum=0.2)": la.slowmo(base=None, momentum=0.2),
    "slowmo(slowmo(local_sgd(3), period=12))": la.slowmo(la.slowmo(la.local_sgd(3), 12)),
    "streaming_diloco(8, delay=1)": la.streaming_diloco(8, 4, 1),
    "streaming_diloco()": la.streaming_diloco(16),
    "sgp(peers=2)": la.sgp("exponential", 2),
    "sgp('ring')": la.sgp("ring"),
    "eamsgd(4)": la.eamsgd(4),
    "lsgd(4)": la.lsgd(4),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_recipe_prints_as_its_call(text: str) -> None:
    recipe = TEXTS[text]
    assert repr(recipe) == str(recipe) == recipe_text(recipe) == text
    assert parse_recipe(text) == recipe
    for same in (pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe), copy.copy(recipe)):
        assert same == recipe and repr(same) == text


def test_recipes_are_alike_by_their_rounds_and_not_by_their_text() -> None:
    given, default = la.lsgd(4, local_period=0), la.lsgd(4)
    assert repr(given) != repr(default)
    assert given == default == tuple(default) and hash(given) == hash(tuple(default))
    assert describe(given) == describe(default) == describe(tuple(default))
    assert "Round(" in describe(default) and is_recipe(default)
    plain = (*la.ddp(), *la.local_sgd(4))
    assert type(plain) is tuple and "Round(" in repr(plain)
    assert type(la.ddp() + la.local_sgd(4)) is tuple
    assert repr(NamedRecipe(plain)) == repr(plain)


def test_a_recipe_of_the_users_own_is_called_by_its_call_too() -> None:
    def mine(period: int, scale: float = 1.0) -> tuple[Round, ...]:
        return tuple(la.local_sgd(period))

    assert repr(parse_recipe("mine(4)", {"mine": mine})) == "mine(4)"
    assert (
        repr(parse_recipe("slowmo(mine(4, 2.0))", {"mine": mine})) == "slowmo(mine(4, scale=2.0))"
    )


def test_what_a_recipe_function_is_like_can_still_be_asked() -> None:
    for name, function in RECIPES.items():
        assert function.__name__ == name and function.__doc__
        assert inspect.signature(function).return_annotation == "Recipe"


def test_an_outer_optimizer_has_no_address_in_the_text() -> None:
    recipe = la.diloco(4, outer=lambda tensors: torch.optim.SGD(tensors, 0.1))
    assert " at 0x" not in recipe_text(recipe) and "lambda" in recipe_text(recipe)


def resumed(saved: la.Recipe, now: la.Recipe, change: Callable[[dict[str, Any]], None]) -> str:
    """What a run is told that loads the state of another."""

    def run(rank: int) -> str:
        syncs = []
        for recipe in (saved, now):
            model = nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            syncs.append(la.attach(model, optimizer, recipe))
        state = syncs[0].state_dict()
        change(state)
        with pytest.raises(ValueError) as caught:
            syncs[1].load_state_dict(state)
        return str(caught.value)

    return la.simulate(run, workers=1)[0]


def test_a_run_under_another_recipe_is_told_how_to_change_it() -> None:
    said = resumed(la.local_sgd(12), la.local_sgd(24), lambda state: None)
    assert said == (
        "the state was saved under local_sgd(12), and this run follows local_sgd(24) (arguments at "
        "their defaults are left out): attach the saved recipe, load, then call sync.switch(...)"
    )


def test_a_state_without_a_text_is_told_by_its_rounds() -> None:
    """As a version before this one saved it."""
    said = resumed(la.local_sgd(12), la.local_sgd(24), lambda state: state.pop("text"))
    assert "saved under (Round(when=Every(period=12)" in said and "follows local_sgd(24)" in said


def test_a_state_without_a_text_of_the_same_rounds_is_loaded() -> None:
    def run(rank: int) -> int:
        states = []
        for recipe in (la.lsgd(4, local_period=0), la.lsgd(4)):
            model = nn.Linear(2, 2)
            torch.manual_seed(0)
            nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            sync = la.attach(model, optimizer, recipe)
            states.append(sync.state_dict())
        states[0].pop("text")
        sync.load_state_dict(states[0])
        return sync.step

    assert la.simulate(run, workers=1) == [0]


def test_other_options_are_told_from_another_recipe() -> None:
    def reseed(state: dict[str, Any]) -> None:
        state["recipe"] = state["recipe"].replace("seed=0", "seed=7")

    said = resumed(la.local_sgd(12), la.local_sgd(12), reseed)
    assert "with buffers=average, seed=7, and this run has buffers=average, seed=0" in said


# -- misspelled names ----

MISSPELLED: dict[str, tuple[Callable[[], object], str]] = {
    "an option": (
        lambda: LOOSE.local_sgd(perod=3),
        "local_sgd has no option 'perod' (did you mean 'period'?): its options are period, delay, "
        "codec, optimizer_state",
    ),
    "an option of auto": (
        lambda: LOOSE.auto(taget=0.5),
        "auto has no option 'taget' (did you mean 'target'?): its options are target",
    ),
    "nothing like it": (
        lambda: LOOSE.ddp(xyz=3),
        "ddp has no option 'xyz': its options are codec",
    ),
    "too many": (lambda: LOOSE.ddp(1), "ddp(*, codec=None): too many positional arguments"),
    "too few": (
        lambda: LOOSE.hierarchical(2),
        "hierarchical(group_period, period, *, codec=None): missing a required argument: 'period'",
    ),
    "a codec": (lambda: la.ddp(codec="in4"), "not 'in4' (did you mean 'int4'?)"),
    "a graph": (lambda: la.sgp("rin"), "not 'rin' (did you mean 'ring'?)"),
    "a recipe": (
        lambda: parse_recipe("Local_SDG(3)"),
        "no recipe 'Local_SDG' in 'Local_SDG(3)' (did you mean 'local_sgd'?): choose from ddp, ",
    ),
    "an option in text": (
        lambda: parse_recipe("slowmo(local_sgd(3), perriod=4)"),
        "slowmo has no option 'perriod' (did you mean 'period'?): its options are base, period, ",
    ),
}


@pytest.mark.parametrize("what", MISSPELLED)
def test_what_was_meant_is_named(what: str) -> None:
    call, said = MISSPELLED[what]
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_the_nearest_is_named_if_one_is_near() -> None:
    assert did_you_mean("INT4", CODECS) == " (did you mean 'int4'?)"
    assert did_you_mean("zzz", CODECS) == did_you_mean(3, CODECS) == ""
    with pytest.raises(ValueError, match=r"must be one of 'keep', 'reset', not 'kep' \(did you"):
        check_choice("state", "kep", ("keep", "reset"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", "--hots", "3"], "unrecognized arguments: --hots (did you mean '--hosts'?)"),
        (["tune", "ddp", "--paramm=x=1"], "--paramm=x=1 (did you mean '--param'?)"),
        (
            ["report", "x", "--zzz"],
            "laconic report: unrecognized arguments: --zzz; see laconic report --help\n",
        ),
    ],
)
def test_a_misspelled_option_of_a_command_is_told_the_nearest(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


# -- a call on one rank alone ----

SAVING = """
import os, torch, laconic
laconic.init()
rank = int(os.environ["RANK"])
torch.manual_seed(rank)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
sync = laconic.attach(model, optimizer, laconic.local_sgd(2), timeout=20)
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    if step == 2 and rank == 0:
        laconic.save({path!r}, model, optimizer, sync)
"""


def test_a_save_on_one_rank_alone_is_one_traceback_on_each(tmp_path: Path) -> None:
    first, other = run_ranks(SAVING.format(path=str(tmp_path / "checkpoint")), 2)
    for ended in (first, other):
        assert ended.code == 1
        assert ended.err.count("Traceback (most recent call last)") == 1
        assert "laconic.errors.LinkError" in ended.last_line
        assert "rank 0: laconic.save (every rank must call it" in ended.last_line
        assert "rank 1: Average round after 4 steps" in ended.last_line
    assert "call laconic.save on every rank" in first.last_line
    assert len(first.err.splitlines()) < 15


# -- the tutorial at a part of its work ----


def test_the_third_chapter_holds_at_another_scale() -> None:
    """Its batches are uneven at every scale, which a claim about weights rests on."""
    scale = "0.1"
    ended = subprocess.run(
        [sys.executable, "-m", "tutorial", "3"],
        env={**os.environ, "TUTORIAL_SCALE": scale, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=230,
    )
    assert ended.returncode == 0, ended.stderr
    assert f"scaled to {scale} of the work" in ended.stdout
