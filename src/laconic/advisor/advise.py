"""`laconic.advise`: on the user's own machines, with the user's own step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Literal

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.advisor.advice import Advice, advice_on
from laconic.advisor.bench import Bench
from laconic.advisor.choices import PLAIN, rehearsed
from laconic.advisor.measure import Measured, measure, trained
from laconic.algorithms.round import Recipe, describe
from laconic.attach import check_free
from laconic.buckets import is_sharded
from laconic.device import common_device
from laconic.errors import TIMEOUT, check_float, check_int, in_words
from laconic.links.link import Link
from laconic.links.rank_sets import agreed_link, layout_of, sets_of


def advise(
    model: nn.Module,
    step_fn: Callable[[], object],
    *,
    optimizer: Optimizer | None = None,
    recipes: Sequence[str] = (),
    nprocs_per_node: int | Literal["env"] = 1,
    steps: int = 20,
    link: Link | None = None,
    timeout: float = TIMEOUT,
) -> Advice:
    """Measure ``step_fn`` and the network, and say which recipe will pay.

    Call it on every rank, under torchrun, after `laconic.init` and before `laconic.attach`.
    ``step_fn()`` runs one local step (forward, backward, optimiser) of ``model``, and is called
    some three times ``steps`` times, at least 27: the model trains on, each rank's by itself.
    ``optimizer``: whose parameters and state count; None: all parameters that are trained.
    ``recipes``: others to predict beside the advisor's, as text. ``nprocs_per_node``, ``link``,
    ``timeout``: as for `laconic.attach`.

    Seconds and bytes in the result are of one step. All ranks get the same. Raises ``ValueError``
    on every rank where there is one worker alone, where an argument is wrong or, in the same words,
    where ``step_fn`` or a rehearsed round raised on one of them (an exhausted memory, say), and
    `laconic.LinkError` where a rank is lost. The process groups made for it end with it.
    """
    found = measured(
        model,
        step_fn,
        partial(rehearsed, own=recipes),
        optimizer=optimizer,
        nprocs_per_node=nprocs_per_node,
        steps=steps,
        link=link,
        timeout=timeout,
    )
    at = found.computes, found.held, found.peak
    return advice_on(found.facts, recipes, computes=at[0], held=at[1], peak=at[2])


def measured(
    model: nn.Module,
    step_fn: Callable[[], object],
    recipes: Callable[[int], Sequence[Recipe]],
    *,
    optimizer: Optimizer | None = None,
    nprocs_per_node: int | Literal["env"] = 1,
    steps: int = 20,
    link: Link | None = None,
    timeout: float = TIMEOUT,
) -> Measured:
    """What `advise` measures, for the ``recipes`` that so many workers are to compare."""
    params: list[Tensor] = []
    problem, patience = None, TIMEOUT
    try:
        patience = check_float("timeout", timeout, 0.0, strict=True)
        check_int("steps", steps, 2)
        params = trained(model, optimizer)
        _check(model, step_fn, params, optimizer)
        recipes(PLAIN.workers)  # raises for what is none
    except Exception as error:  # the other ranks are to hear of it
        problem = in_words(error)
    device = params[0].device if params else common_device()
    with ExitStack() as made:
        world = agreed_link(problem, link, device, patience)
        if link is None:
            made.callback(world.close)
        layout = layout_of(world, nprocs_per_node, None, [])
        sets = sets_of(world, layout, None, False)
        for other in (sets["workers"], sets["replica"]):
            if other is not world:
                made.callback(other.close)
        if sets["workers"].size < 2:
            raise ValueError(
                f"there is one worker of {world.size} rank(s), and nobody to talk to: start more "
                "(torchrun), or give numbers to laconic advise"
            )
        bench = Bench(world, sets["workers"], sets["replica"], device)
        compared = recipes(sets["workers"].size)
        _check_alike(bench, params, compared, steps)
        with bench.together():
            return measure(bench, model, step_fn, compared, steps, optimizer)


def _check(
    model: nn.Module,
    step_fn: Callable[[], object],
    params: Sequence[Tensor],
    optimizer: Optimizer | None,
) -> None:
    if not callable(step_fn):
        raise ValueError(f"step_fn must be a function that runs one local step, not {step_fn!r}")
    if isinstance(model, DistributedDataParallel):
        raise ValueError("the model averages its gradients already: give model.module")
    if optimizer is not None:
        check_free(optimizer)
    if any(is_sharded(p) for p in params):
        raise ValueError(
            "the parameters are sharded (FSDP), which takes a network of its own: measure a whole "
            "model, or give numbers to laconic advise"
        )


def _check_alike(
    bench: Bench, params: Sequence[Tensor], recipes: Sequence[Recipe], steps: int
) -> None:
    """Ranks that measure different things would wait for each other in vain."""
    shapes = [(tuple(p.shape), str(p.dtype)) for p in params]
    text = f"{steps} {shapes} {[describe(recipe) for recipe in recipes]}"
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
    said = bench.everyone(float(digest))
    if bool((said != said[0]).any()):
        raise ValueError(
            "the ranks do not ask for the same: model, optimizer, steps and recipes must be alike"
        )
