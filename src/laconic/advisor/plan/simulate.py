"""One simulated run of a recipe on a cluster."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from laconic.advisor.advice import memory
from laconic.advisor.plan.cluster import Cluster
from laconic.advisor.plan.quorum import Quorum
from laconic.advisor.plan.rounds import Rounds
from laconic.advisor.plan.together import Together
from laconic.algorithms.auto import Auto
from laconic.algorithms.compile import check_quorum, has_quorum, in_groups
from laconic.algorithms.parse import parse_recipe
from laconic.algorithms.round import Recipe
from laconic.errors import check_int


@dataclass(frozen=True)
class Result:
    """What a simulated run took.

    ``seconds``: until every step was taken. ``shares``: of all workers' time, by what it was spent
    on (`laconic.advisor.plan.run.CAUSES`, and failures). ``goodput``: the share of it in steps
    that count in the model; ``utilization``: the share in any steps. ``bytes``: sent by a worker on
    average; ``crossed``: by all workers to other sites. ``memory``: bytes that rounds keep on
    a worker. ``money``: of all workers' hours and of what left the sites. ``failures``, ``joins``
    and ``restarts``: how many. ``events``: ``(seconds, worker, what)`` of failures.
    """

    seconds: float
    steps: int
    shares: dict[str, float]
    goodput: float
    utilization: float
    bytes: float
    crossed: float
    memory: float
    money: float
    failures: int
    joins: int
    restarts: int
    events: tuple[tuple[float, int, str], ...]


def recipe_of(text: str, cluster: Cluster) -> Recipe:
    """Return the recipe that ``text`` describes. Raises ``ValueError`` for one that cannot be
    planned."""
    recipe = parse_recipe(text)
    if isinstance(recipe, Auto):
        raise ValueError(
            f"{text} chooses its recipe during training: plan without a recipe, which compares its "
            "choices"
        )
    check_plannable(recipe, text, cluster)
    return recipe


def check_plannable(recipe: Recipe, text: str, cluster: Cluster) -> None:
    """Raise ``ValueError`` for a ``recipe`` that cannot run on the ``cluster``, or in a plan."""
    if in_groups(recipe):
        raise ValueError(f"{text} has rounds inside groups of workers, which plan does not support")
    check_quorum(recipe, cluster.workers, plain=True)
    fails = cluster.failures
    if has_quorum(recipe) and fails.happen and fails.policy == "elastic":
        raise ValueError(
            f"{text} has rounds with a quorum, which plan does not simulate in elastic runs: use "
            "policy static with a checkpoint"
        )
    Rounds(recipe, cluster)


def simulate_plan(
    recipe: Recipe, cluster: Cluster, steps: int, seed: int = 0, *, first: int = 0
) -> Result:
    """Simulate ``steps`` steps of a run of ``recipe`` on ``cluster``, after step ``first``.

    Equal arguments give equal results. Where rounds close with a quorum, workers take different
    numbers of steps: ``steps`` is their mean. Raises ``ValueError`` for a recipe that cannot run
    there.
    """
    check_int("steps", steps, 1)
    check_plannable(recipe, str(recipe), cluster)
    generator = torch.Generator().manual_seed(seed)
    rounds = Rounds(recipe, cluster)
    run: Quorum | Together
    if has_quorum(recipe):
        run = Quorum(rounds, generator)
        log = run.run(steps)
    else:
        run = Together(rounds, generator)
        log = run.run(steps, first)
    seconds, n = float(run.now.max()), cluster.workers
    total = n * seconds
    hours = seconds / 3600 * sum(site.workers * site.price for site in cluster.sites)
    return Result(
        seconds=seconds,
        steps=steps,
        shares=log.shares(total),
        goodput=log.useful / total,
        utilization=log.spent["compute"] / total,
        bytes=log.sent / n,
        crossed=log.crossed,
        memory=memory(rounds.all, cluster.facts()),
        money=hours + log.crossed / 1e9 * cluster.egress,
        failures=log.failures,
        joins=log.joins,
        restarts=log.restarts,
        events=tuple(log.events),
    )
