"""Special cases: what a recipe becomes at the edge of its settings is another, known, algorithm.

`test_reference_*` closed forms are few-line loops that share nothing with the library."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import laconic as la
from laconic.algorithms.updates import momentum_for

from tests.references import gradients, outer, parameters, problem
from tests.references.problem import NAMES, Recipe
from tests.support.training import (
    OPTIMIZERS,
    Job,
    changing_lr,
    constant_lr,
    largest_difference,
    same_bits,
    simulated,
)

STEPS, CLOSE = 14, 1e-10
Runs = list[list[Any]]


def apart(one: Runs, other: Runs, consensus: bool = False) -> float:
    """The largest difference between the workers' parameters."""
    return max(
        float(np.abs(a[which][k] - b[which][k]).max())
        for run, run2 in zip(one, other, strict=True)
        for a, b in zip(run, run2, strict=True)
        for which in (0, consensus)
        for k in NAMES
    )


# -- against closed forms ----

SLOW = la.slowmo(None, 4, 0.6, 0.9)
FORMS: dict[str, tuple[la.Recipe, Callable[..., problem.Trace], int, dict[str, Any]]] = {
    "lookahead": (
        la.slowmo(None, 4, 0.0, 0.7),
        lambda *to: outer.blocks(outer.lookahead(0.7), 4, *to),
        1,
        {"optimizer": "adamw"},
    ),
    "heavy ball": (
        SLOW,
        lambda *to: outer.blocks(outer.heavy_ball(0.6, 0.9), 4, *to),
        3,
        {"lr": constant_lr},
    ),
    **{
        f"large batch momentum, {n} workers": (
            la.slowmo(base, 1, 0.6, 0.8),
            lambda n, steps, _, *to: outer.large_batch_momentum(0.6, 0.8, n, steps, *to),
            n,
            {"optimizer": "sgd"},
        )
        for n, base in ((1, None), (3, la.ddp()), (4, la.local_sgd(1)))
    },
}


def expected(job: Job, form: Callable[..., problem.Trace]) -> problem.Trace:
    rules, init = OPTIMIZERS[job.optimizer][1], problem.initial(job.workers, job.seed)
    return form(job.workers, STEPS, rules, job.lr, job.data(), init)


@pytest.mark.parametrize("name", FORMS)
def test_slowmo_becomes(name: str) -> None:
    recipe, form, workers, options = FORMS[name]
    job = Job(recipe, workers, STEPS, **options)
    assert largest_difference(simulated(job), expected(job, form)) < CLOSE


def test_slowmo_at_a_changing_rate_is_no_heavy_ball() -> None:
    """What tells SlowMo from it is that u is in units of the gradient."""
    job = Job(SLOW, 2, STEPS, lr=changing_lr)
    assert largest_difference(simulated(job), expected(job, FORMS["heavy ball"][1])) > 1e-4


# -- recipes that become other recipes ----

local, slow = parameters.LocalSGD, partial(la.slowmo, None, 4, 0.0)
plain_sgd, never = partial(torch.optim.SGD, lr=1.0), 10**6
IDENTITIES: dict[str, tuple[la.Recipe, Recipe]] = {
    "slowmo(local_sgd), beta 0, alpha 1": (la.slowmo(la.local_sgd(2), 6, 0.0, 1.0), local(2)),
    "slowmo by workers: no momentum below 4": (la.slowmo(None, 4), local(4)),
    "slowmo over what never arrives": (
        la.slowmo(la.local_sgd(2, delay=2), 2, momentum=0.5),
        outer.SlowMo(None, 2),
    ),
    "post_local_sgd that starts at once": (la.post_local_sgd(0, 3, delay=2), local(3, 2)),
    "post_local_sgd that never starts": (la.post_local_sgd(never, 1), gradients.DDP()),
    "diloco lr 1, momentum 0": (la.diloco(4, 1.0, 0.0), local(4)),
    "diloco of torch's plain SGD at lr 1": (la.diloco(4, outer=plain_sgd), local(4)),
    "power_sgd of full rank": (la.power_sgd(99), gradients.DDP()),
    "a period longer than the run": (la.local_sgd(STEPS + 1), Recipe()),
    "slowmo, average": (slow(1.0, optimizer_state="average"), local(4, optimizer_state="average")),
    # with Nesterov's momentum
    "slowmo unsharded, beta 0, alpha 1": (slow(1.0, sharded=False), local(4)),
    "slowmo, reset": (slow(1.0, optimizer_state="reset"), local(4, optimizer_state="reset")),
    "slowmo without momentum": (slow(0.6), outer.DiLoCo(4, 0.6, 0.0)),
    "local_sgd(1)": (la.local_sgd(1), gradients.DDP()),
    "local_sgd(1, average)": (la.local_sgd(1, optimizer_state="average"), gradients.DDP()),
    "a message that does not arrive within the run": (
        la.post_local_sgd(2, STEPS - 2, delay=STEPS - 2),
        local(never, begin=2),
    ),
}


@pytest.mark.parametrize(("place", "name"), [*enumerate(IDENTITIES)])
def test_identity(place: int, name: str) -> None:
    recipe, other = IDENTITIES[name]
    optimizer = ("adamw", "nesterov")[place > 9]
    job = Job(recipe, 2 + place % 2, STEPS, optimizer)
    trace = job.expected(other)
    worst = 0.0  # of x alone, as an anchor lags
    for rank, run in enumerate(simulated(job)):
        for t, (x, _) in enumerate(run):
            want = trace.workers[t][rank]
            worst = max(worst, *(float(np.abs(x[k] - want[k]).max()) for k in NAMES))
    assert worst < CLOSE


def test_local_sgd_at_every_step_of_adam_is_not_ddp() -> None:
    """The identity needs an optimizer that is linear in the gradient: the bounds here can tell
    recipes apart."""
    job = Job(la.local_sgd(1), 3, STEPS, "adamw")
    assert largest_difference(simulated(job), job.expected(gradients.DDP())) > 1e-4


slowmo, diloco = partial(la.slowmo, la.local_sgd(2), 6, 0.5), partial(la.diloco, 4)
EQUALS: dict[str, tuple[la.Recipe, la.Recipe, int, float]] = {
    # a recipe, another one, workers, the largest difference
    "streaming_diloco of one fragment": (
        la.streaming_diloco(4, 1, 2, codec="int4"),
        la.diloco(4, momentum=0.6, delay=2, codec="int4"),
        3,
        0.0,
    ),
    "float32": (diloco(0.6), diloco(0.6, codec="float32"), 2, 1e-6),
    "float32, late": (la.local_sgd(3, delay=1), la.local_sgd(3, delay=1, codec="float32"), 2, 1e-6),
    "loscar": (la.local_sgd(4, delay=2), diloco(1.0, 0.0, delay=2, merge="loscar"), 2, 1e-12),
}
LAGS = ("loscar",)
"""Where an anchor lags: of these, x alone is compared."""


@pytest.mark.parametrize("name", EQUALS)
def test_recipes_that_are_equal(name: str) -> None:
    """Over all workers, their parameters and the consensus."""
    one, other, workers, most = EQUALS[name]
    first, second = (simulated(Job(recipe, workers, STEPS, "adamw")) for recipe in (one, other))
    if most == 0.0:
        assert same_bits(first, second)
    else:
        assert apart(first, second, consensus=name not in LAGS) <= most


def test_the_slow_momentum_of_so_many_workers() -> None:
    found = [momentum_for(workers) for workers in (3, 4, 7, 8, 15, 16)]
    assert found == [0.0, 0.2, 0.2, 0.5, 0.5, 0.6]


def test_fragments_by_bytes_move_each_element_once() -> None:
    """Tensors may be cut: of all three fragments, each element's anchor moves in exactly one."""
    job = Job(la.streaming_diloco(6, 3, 0, codec=None), 2, 12)
    moved = []
    run = simulated(job)[0]
    for before, after in itertools.pairwise(run):
        pairs = [(before[1][k], after[1][k]) for k in NAMES]
        moved.append(np.concatenate([(a != b).reshape(-1) for a, b in pairs]))
    due = [np.sum([moved[t - 2] for t in (k, k + 6) if t > 1], axis=0) for k in (2, 4, 6)]
    assert all((m > 0).sum() > 20 for m in due)
    assert (np.sum(due, axis=0) == 2).all()
    assert not any(moved[t - 2].any() for t in (3, 5, 7, 9, 11))
