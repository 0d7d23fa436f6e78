"""Compile a recipe: the rounds that it asks for implicitly, and what follows from its rounds."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

from laconic.algorithms.exchanges import Mean, QuorumMean
from laconic.algorithms.recipes import RECIPES, WITH_GROUPS
from laconic.algorithms.round import (
    AnyRound,
    GradientRound,
    Recipe,
    Round,
    gradient_rounds,
    recipe_text,
    renamed,
    workers_differ,
)
from laconic.algorithms.schedules import Every, Schedule, Unless, any_of, every
from laconic.algorithms.updates import Average, Mix, OwnStep, Replace
from laconic.parts import Fragment, is_of_optimizer, module_buffers, optimizer_state


def parameter_rounds(recipe: Recipe, *, buffers: bool) -> list[Round]:
    """The recipe's parameter rounds, each followed by the average of optimizer state if it asks for
    one. With ``buffers``, also the average of module buffers at all of them."""
    rounds: list[Round] = []
    for r in recipe:
        if isinstance(r, Round):
            rounds.append(r)
            if r.optimizer_state == "average":
                rounds.append(Round(r.when, Average(), Mean(), optimizer_state, over=r.over))
    return rounds + buffer_rounds(rounds) if buffers else rounds


def buffer_rounds(rounds: Sequence[Round]) -> list[Round]:
    """Rounds for module buffers at these parameter ``rounds``, with the same delays; of rounds on
    fragments at the first, so once per period. Where a round gossips, buffers are mixed with those
    of the same peers: an average over all workers would defeat the purpose. Elsewhere they are
    averaged over the ranks that the round is over: of a group, or of all workers."""
    found: dict[str, Round] = {}
    first: dict[tuple[int, str], Fragment] = {}
    for r in rounds:
        if is_of_optimizer(r.part) or r.exchange.identical or isinstance(r.update, OwnStep):
            continue  # x may differ after it, or workers agree before it
        if isinstance(r.part, Fragment):
            kind = r.part.count, r.part.by
            if first.setdefault(kind, r.part) != r.part:
                continue
        over = "world" if r.over == "workers" else r.over  # a worker's ranks have buffers each
        like = Round(every(1), Replace(), Mean(), module_buffers, over=over, delay=r.delay)
        if isinstance(r.exchange, QuorumMean):  # it closes with the round itself
            exchange = replace(r.exchange, codec=None, anchored=False)
            like = replace(like, when=r.when, exchange=exchange, over=r.over)
        elif r.exchange.out_degree is not None:
            like = replace(like, update=Mix(), exchange=r.exchange, over=r.over)
        same = found.get(repr(like))
        when = r.when if same is None else any_of(same.when, r.when)
        found[repr(like)] = replace(like, when=when)
    return list(found.values())


def check_quorum(recipe: Recipe, workers: int | None, *, plain: bool) -> None:
    """Raise ``ValueError`` if ``recipe`` has rounds with a quorum that cannot be reached, or beside
    rounds that wait for all. ``workers``: how many there are, None if unknown. ``plain``: workers
    are of one rank."""
    with_quorum = [r for r in recipe if isinstance(r.exchange, QuorumMean)]
    for r in with_quorum:
        update, exchange = r.update, r.exchange
        assert isinstance(exchange, QuorumMean), "selected above"
        most = exchange.workers
        if most is not None and workers is not None and most > workers:
            raise ValueError(
                f"quorum must be at most the number of workers, {workers}, not {most}: use 1 to "
                f"{workers}, or None for all"
            )
        anchored = update.anchor is not None and update.slots.get(update.anchor) == "owner"
        keeps = isinstance(r, Round) and r.optimizer_state != "average"
        regular = isinstance(r.when, Every) and r.over in ("world", "workers") and not r.delay
        if not (update.combines_only and anchored and exchange.anchored and keeps and regular):
            raise ValueError(
                f"{r.name} cannot have a quorum: it is a Round over the workers, due every so many "
                "steps, without delay, which keeps or resets the optimizer's state, and its update "
                "has an anchor, whose combine gives the new x, and nothing else. OuterStep, "
                "DelayedNesterov and SlowMomentum are such updates"
            )
    rules = {(r.when, r.exchange) for r in with_quorum}
    if len(rules) > len({r.when for r in with_quorum}):
        raise ValueError("rounds with a quorum that are due at the same steps have the same rules")
    if with_quorum and len(with_quorum) < len(recipe):
        other = next(r for r in recipe if r not in with_quorum)
        raise ValueError(
            f"{other.name} waits for all workers, and {with_quorum[0].name} does not: give all "
            "rounds of the recipe a quorum"
        )
    if with_quorum and not plain:
        raise ValueError(
            "quorum= and pace='own' are for workers of one rank, so far: leave out "
            "nprocs_per_node= and mesh="
        )


def check_buffers(recipe: Recipe, buffers: str, *, elastic: bool) -> None:
    """Raise ``ValueError`` if ``buffers`` are shared after every step, and not all workers meet
    there."""
    if buffers == "broadcast" and (elastic or has_quorum(recipe)):
        why = "workers come and go" if elastic else "rounds have a quorum"
        raise ValueError(
            "buffers='broadcast' sends rank 0's buffers to all workers after every step, and here "
            f"{why}: use buffers='average' or 'keep'"
        )


def check_offload(recipe: Recipe, offload: bool) -> None:
    """Raise ``ValueError`` for ``offload`` if no round of ``recipe`` keeps state that only rounds
    use."""
    rounds = [r for r in recipe if isinstance(r, Round)]
    if offload and not any(
        r.exchange.slots or (r.update.slots and not r.update.in_every_step) for r in rounds
    ):
        raise ValueError(
            "offload=True keeps anchors, outer momenta and residuals of parameter rounds in host "
            f"memory between rounds, and {recipe_text(recipe)} has none: leave it out, or use a "
            "recipe that has, such as laconic.diloco(8)"
        )


def check_order(recipe: Recipe, *, sharded: bool, queues: bool) -> None:
    """Raise ``ValueError`` if ``recipe`` sends while FSDP exchanges shards, both by the
    accelerator's own collectives (``queues``): the ranks might start them in different orders, and
    wait for each other forever."""
    beside = [r for r in recipe if isinstance(r, GradientRound) or r.delay]
    if beside and sharded and queues:
        raise ValueError(
            f"{beside[0].name} sends while FSDP exchanges shards, and with link='nccl' the two can "
            "deadlock: use link='tcp', or a recipe without delay= whose rounds average parameters"
        )


def check_identical(recipe: Recipe) -> None:
    """Raise ``ValueError`` if a round of ``recipe`` counts on equal workers that may differ."""
    for r in recipe:
        if r.exchange.identical and workers_differ(recipe):
            raise ValueError(
                f"{r.name} sends nothing, and the other rounds let workers differ: use "
                "exchanges.Mean in place of Identical, or a base such as laconic.ddp()"
            )


def has_quorum(recipe: Recipe) -> bool:
    """Return whether ``recipe`` has rounds that do not wait for all workers."""
    return any(isinstance(r.exchange, QuorumMean) for r in recipe)


def replicated(recipe: Recipe) -> Recipe:
    """``recipe`` for workers that come and go: every worker keeps all outer state. Raises
    ``ValueError`` for rounds for which that is impossible."""
    rounds: list[AnyRound] = []
    for r in recipe:
        if r.over not in ("world", "workers"):
            raise ValueError(
                f"{r.name} is inside groups of workers, or inside a worker: where workers come and "
                "go, rounds are over all workers"
            )
        try:
            rounds.append(replace(r, exchange=r.exchange.replicated()))
        except ValueError as error:
            names = ", ".join(name for name in (*RECIPES, "auto") if name not in STATIC)
            raise ValueError(f"{r.name}: {error}. Recipes for elastic runs: {names}") from None
    return renamed(recipe, rounds)


STATIC = ("hierarchical", "lsgd", "power_sgd")
"""The recipes that are not for workers that come and go: they have groups or a leader, or send
matrices."""


def score_window(recipe: Recipe) -> int:
    """Over how many losses its rounds want the workers' scores; 0: they want none."""
    return max((r.exchange.score_window for r in recipe), default=0)


def in_groups(recipe: Recipe) -> bool:
    """Whether any of its rounds is inside a group of workers."""
    return any(r.over == "group" for r in recipe)


def warn_of_groups(recipe: Recipe, group_size: int | None) -> None:
    """Warn where groups are asked for that no round is about. Not an error: another recipe may
    follow by `Synchronizer.switch`."""
    if group_size and not in_groups(recipe):  # others are errors
        warnings.warn(
            f"group_size={group_size} has no effect: the recipe has no rounds inside groups of "
            f"workers. Leave it out, or attach a recipe that has, such as {WITH_GROUPS}",
            stacklevel=3,
        )


def check_groups(recipe: Recipe, grouped: bool) -> None:
    """Raise ``ValueError`` if ``recipe`` has rounds inside groups of workers, and there are no
    groups (``grouped``)."""
    if not grouped and in_groups(recipe):
        raise ValueError(
            "the recipe has rounds inside groups of workers: give the number of workers in a "
            "group, such as attach(..., group_size=4)"
        )


def with_replicas(recipe: Recipe) -> Recipe:
    """``recipe`` for workers of several ranks: gradients are averaged inside each worker, too, at
    every step at which the recipe does not average them over all ranks. A gradient round over the
    workers becomes one over all ranks, which gives the same mean."""
    rounds: list[AnyRound] = []
    for r in recipe:
        if isinstance(r, GradientRound) and r.over == "group":
            raise ValueError(
                "a gradient round over 'group' needs workers of one rank: use over='world', or "
                "workers without nprocs_per_node and mesh"
            )
        over_workers = isinstance(r, GradientRound) and r.over == "workers"
        rounds.append(replace(r, over="world") if over_workers else r)
    when: Schedule = every(1)
    over_all = [r.when for r in gradient_rounds(tuple(rounds)) if r.over == "world"]
    if over_all:
        when = Unless(when, any_of(*over_all))
    return (GradientRound(when, Average(), Mean(), over="replica"), *rounds)
