"""Every option of every recipe has an effect or is refused: alone, and beside every other one."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.algorithms.compile import has_quorum
from laconic.algorithms.recipes import RECIPES
from laconic.algorithms.round import describe
from laconic.algorithms.schedules import Schedule

from tests.support.loops import descend

Options = dict[str, Any]


def heavy_ball(tensors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, 0.3, momentum=0.5)


VALUES: dict[str, tuple[Any, ...]] = {
    **{"average": (False,), "base": (None,), "beta": (0.5,), "by": ("layers", "bytes")},
    **{"codec": ("int8",), "delay": (1,), "drift": (0.4,), "fragments": (2,), "grace": (0.9,)},
    **{"graph": ("complete",), "group_period": (1,), "local_drift": (0.4,), "local_period": (2,)},
    **{"local_pull": (0.4,), "lr": (0.4,), "merge": ("loscar",), "mix": (0.2,)},
    **{"momentum": (0.3,), "optimizer_state": ("average", "reset"), "outer": ("muon", heavy_ball)},
    **{"pace": ("own",), "peers": (2,), "period": (3,), "pull": (0.3,), "quorum": (2,)},
    **{"rank": (1,), "sharded": (False,), "start": (5,), "window": (1,)},
}
"""Of every option of a recipe, values other than its default. A recipe need not take all of them:
some are for others that have an option of that name."""
STANDS = ("by", "merge")
"""Options whose None stands for one of their values, which others decide."""
GIVEN: dict[str, Any] = {"period": 4, "group_period": 2, "base": la.local_sgd(2)}
"""Where defaults are missing, or too large for a few steps."""
NEEDED: tuple[Options, ...] = ({}, {"delay": 2}, {"quorum": 2}, {"local_period": 2})
"""What other options need."""
STEPS, SECONDS = 8, (1.0, 1.2, 1.45, 1.9)


def train(recipe: la.Recipe, rank: int) -> bytes:
    """Train, and return a digest of everything except times."""
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(12, 12), torch.randn(5)])
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    grouped = any(r.over == "group" for r in recipe)
    sync = la.attach(model, optimizer, recipe, group_size=2 if grouped else None)
    for step in range(STEPS):
        numbers = torch.Generator().manual_seed(100 * step + rank)
        target = [torch.randn(p.shape, generator=numbers) for p in model]
        loss = torch.stack([(p - t).square().sum() for p, t in zip(model, target, strict=True)])
        descend(optimizer, loss.sum(), sync)
    stats, digest = sync.stats(), hashlib.sha256()
    state = [sync.state_dict(), optimizer.state_dict(), dict(model.named_parameters())]
    for name, t in tensors(state):
        digest.update(f"{name} {tuple(t.shape)}".encode() + t.detach().double().numpy().tobytes())
    digest.update(f"{stats.rounds} {stats.bytes_by_collective}".encode())
    if has_quorum(recipe):  # the others' rounds need this worker until then
        sync.finish()
    return digest.digest()


def tensors(state: object, at: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        yield at, state
    for key, value in state.items() if isinstance(state, Mapping) else ():
        yield from tensors(value, f"{at}.{key}")
    for key, value in enumerate(state) if isinstance(state, (list, tuple)) else ():
        yield from tensors(value, f"{at}.{key}")


class Runs:
    """What recipes have done, by their rounds."""

    def __init__(self, recipe: Callable[..., la.Recipe]) -> None:
        self.recipe, self.seen = recipe, dict[str, tuple[bytes, ...]]()
        self.options = dict(inspect.signature(recipe).parameters)
        self.given = {name: GIVEN[name] for name in self.options if name in GIVEN}
        if self.options.keys() >= {"start", "period"}:
            self.given["start"] = 2

    def of(self, options: Options) -> tuple[bytes, ...] | None:
        """None: these options are refused."""
        recipe = self.made(options)
        if recipe is not None and (text := describe(recipe)) not in self.seen:
            of_four = any(r.over == "group" or r.exchange.out_degree is not None for r in recipe)
            seconds = SECONDS[: 4 if of_four else 3 if has_quorum(recipe) else 2]
            run = partial(train, recipe)
            uneven = seconds if has_quorum(recipe) else None
            self.seen[text] = (*la.simulate(run, len(seconds), step_seconds=uneven),)
        return None if recipe is None else self.seen[text]

    def made(self, options: Options) -> la.Recipe | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return self.recipe(**{**self.given, **options})
            except ValueError:
                return None


def changes(runs: Runs, beside: Options, every_two: bool) -> Iterator[Options]:
    """Every option with every value, and ``every_two`` of them, with each value of both; or else
    some two of them, with the first value of both, where they need nothing."""
    names = [name for name in runs.options if name not in beside]
    each = {name: [{name: value} for value in VALUES[name]] for name in names}
    for name in names:
        yield from each[name]
    twos = list(itertools.combinations(names, 2))
    for first, second in twos if every_two else [] if beside else twos[::3]:
        count = max(len(each[first]), len(each[second])) if every_two else 1
        pairs = zip(itertools.cycle(each[first]), itertools.cycle(each[second]), strict=False)
        for one, other in itertools.islice(pairs, count):
            yield {**one, **other}


@pytest.mark.fault("options without effect were accepted, alone or beside others")
@pytest.mark.parametrize("every_two", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RECIPES)
def test_every_option_has_an_effect_or_is_refused(name: str, every_two: bool) -> None:
    runs, ignored = Runs(RECIPES[name]), set()
    for needed in (each for each in NEEDED if each.keys() <= runs.options.keys()):
        for options in changes(runs, needed, every_two):
            if needed and all(runs.of({key: options[key]}) for key in options):
                continue  # they need nothing else, and were tried without it
            whole = {**needed, **options}
            found = runs.of(whole)
            for option in options:
                less = {key: value for key, value in whole.items() if key != option}
                if found is None or runs.of(less) != found:
                    continue
                stands = runs.options[option].default is None and option in STANDS
                if not stands or runs.made(whole) != runs.made(less):
                    ignored.add(f"{option} in {name}({whole})")
    assert not ignored, "\n".join(sorted(ignored))


BAD: dict[type, tuple[Any, ...]] = {
    int: (-1, True, 2.5, "2", math.nan),
    float: (-1.0, True, "0.5", math.nan, math.inf),
    str: ("bogus", 3, True, ""),
    bool: (1, 0.0, "yes"),
}


@cache
def bad_values(option: str) -> list[Any]:
    kinds = {type(value) for value in VALUES[option]} & BAD.keys()
    bad = [value for kind in kinds for value in BAD[kind] if type(value) not in kinds - {kind}]
    return bad or [3, "bogus"]


@pytest.mark.parametrize("name", RECIPES)
def test_bad_values_are_refused_when_the_recipe_is_made(name: str) -> None:
    runs, accepted = Runs(RECIPES[name]), []
    for option in runs.options:
        for value in bad_values(option):
            try:
                RECIPES[name](**{**runs.given, option: value})
            except ValueError as error:
                assert option in str(error) or "codec" in str(error), str(error)
            else:
                accepted.append(f"{name}({option}={value!r})")
    assert not accepted


NEVER = {
    "base": (lambda: la.slowmo(la.local_sgd(8), 4), "replaced by a slow step"),
    "groups": (lambda: la.hierarchical(8, 4), "is a multiple of period=4"),
    "unknown": (lambda: la.diloco(8, quorum=1, merge="bogus"), "merge must be one of"),  # type: ignore[arg-type]
    "complete": (lambda: la.sgp("complete", 2), "peers= has no effect with graph='complete'"),
    "ring": (lambda: la.sgp("ring", 3), "peers must be 1 or 2"),
    "start": (lambda: la.post_local_sgd(-1, 4), "start must be"),
}


@pytest.mark.fault("rounds that never run, and values that were never read, were accepted")
@pytest.mark.parametrize("name", NEVER)
def test_what_never_happens_is_refused(name: str) -> None:
    recipe, message = NEVER[name]
    with pytest.raises(ValueError, match=message):
        recipe()


@pytest.mark.fault("every(6, offset=8) was due at step 2, and not first at step 8")
@pytest.mark.parametrize("period, offset", [(6, 0), (6, 1), (6, 6), (6, 8), (1, 3), (4, 12)])
def test_an_offset_is_the_first_step(period: int, offset: int) -> None:
    due = [step for step in range(1, 40) if la.every(period, offset=offset)(step)]
    assert due == [*range(offset or period, 40, period)]


def made(lr: float) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    return lambda tensors: torch.optim.SGD(tensors, lr)


FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "a constant": (lambda t: torch.optim.SGD(t, 0.1), lambda t: torch.optim.SGD(t, 0.2)),
    "another call": (lambda t: torch.optim.SGD(t, 0.1), lambda t: torch.optim.Adam(t, 0.1)),
    "a closure": (made(0.1), made(0.2)),
    "a default": (
        lambda t, lr=0.1: torch.optim.SGD(t, lr),
        lambda t, lr=0.2: torch.optim.SGD(t, lr),
    ),
}


@pytest.mark.fault("two functions as outer= counted as the same recipe, whatever they did")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_recipes_with_different_functions_differ(name: str) -> None:
    def run(rank: int) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        la.attach(model, optimizer, la.diloco(2, outer=FUNCTIONS[name][rank]))

    with pytest.raises(ValueError, match=r"ranks \[1\] attach something other than rank 0"):
        la.simulate(run, 2)


@pytest.mark.fault("a function whose helpers call each other took time exponential in their number")
def test_a_function_with_many_helpers_is_told_apart() -> None:
    def text(lr: float, last: int) -> str:
        helpers: list[Any] = [made(lr), made(0.5)]
        for _ in range(40):
            three = (*helpers[-2:], helpers[last])
            helpers.append(lambda t, three=three: [each(t) for each in three])
        return describe(la.diloco(4, outer=helpers[-1]))

    whole = [text(lr, last) for last in (-1, -2) for lr in (0.1, 0.2)]
    assert len(set(whole)) == 4 and text(0.1, -1) == whole[0]


@pytest.mark.fault("two lambdas as schedules counted as the same recipe")
def test_recipes_with_different_schedules_differ() -> None:
    def text(period: int) -> str:
        when: Schedule = lambda step: step % period == 0  # noqa: E731
        return describe((la.Round(when, la.updates.Average(), la.exchanges.Mean()),))

    assert text(2) == text(2) != text(3) and " at 0x" not in text(2)


@pytest.mark.fault("a delayed round with RoundedAverage lost the steps since it was sent")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_delayed_round_keeps_every_step(workers: int) -> None:
    update, exchange = la.updates.RoundedAverage(torch.bfloat16), la.exchanges.Mean()

    def run(rank: int) -> Tensor:
        model = nn.ParameterList([torch.zeros(3)])
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        round_ = la.Round(la.every(3), update, exchange, delay=2)
        with la.attach(model, optimizer, (round_,)):
            for _ in range(9):
                model[0].grad = torch.full((3,), -1.0 - 2 * rank)
                optimizer.step()
        return next(model.parameters()).detach()

    for x in la.simulate(run, workers):
        assert torch.equal(x, torch.full((3,), 9.0 * workers))
