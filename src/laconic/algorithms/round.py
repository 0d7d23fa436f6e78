"""Rounds and recipes. An algorithm is a recipe: a tuple of rounds, which are data.

A round says when workers communicate, what they send and how they fold in what comes back (its
update), with whom (its exchange), and over which tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from laconic.algorithms.exchange import Exchange
from laconic.algorithms.identity import plain
from laconic.algorithms.schedules import Schedule, always_due, every
from laconic.algorithms.update import Update
from laconic.errors import check_choice, check_int
from laconic.parts import Fragment, Selector, is_of_optimizer, parameters

OptimizerState = Literal["keep", "average", "reset"]
SETS = ("world", "workers", "group", "replica")
"""The named sets of ranks: all, the workers, the workers of a group, the ranks of one worker."""


@dataclass(frozen=True)
class Round:
    """One kind of communication about parameters, as data.

    Args:
        when: after which steps it is due: a schedule, such as ``laconic.every(8)``.
        update: what is sent, and how what arrives is folded in.
        exchange: with whom messages are exchanged, and how they are encoded.
        part: which tensors: a selector, or a `Fragment`. By default all parameters.
        over: over which set of ranks: ``"world"``, ``"workers"``, ``"group"``, or ``"replica"``
            (the ranks of one worker).
        delay: steps between sending and folding, at least 0.
        optimizer_state: what happens to the local optimizer's state at the round: ``"keep"``,
            ``"average"``, or ``"reset"``.

    Examples:
        >>> update, mean = laconic.updates.Average(), laconic.exchanges.Mean()
        >>> average = laconic.Round(laconic.every(8), update, mean)
        >>> sync = laconic.attach(model, optimizer, (average,))
    """

    when: Schedule
    update: Update
    exchange: Exchange
    part: Selector | Fragment = parameters
    over: str = "workers"
    delay: int = 0
    optimizer_state: OptimizerState = "keep"

    def __post_init__(self) -> None:
        check_int("delay", self.delay, 0)
        check_choice("optimizer_state", self.optimizer_state, ("keep", "average", "reset"))
        check_choice("over", self.over, SETS)
        update, exchange = type(self.update).__name__, type(self.exchange).__name__
        if self.exchange.whole:
            raise ValueError(f"{exchange} is for rounds on gradients: use GradientRound")
        if self.update.models > 1 and self.exchange.slots:
            raise ValueError(
                f"{exchange} keeps state for messages as long as the parameters, and those of "
                f"{update} are {self.update.models} times as long"
            )
        if self.update.sends_changes and self.exchange.takes == "parameters":
            raise ValueError(
                f"{update} sends changes of the parameters, which {exchange} would take relative "
                "to the last result: give the exchange relative=False"
            )
        if self.exchange.takes == "changes" and not self.update.sends_changes:
            raise ValueError(
                f"{exchange} averages changes of the parameters, and {update} sends parameters: "
                "give the exchange relative=True"
            )
        if self.update.weight is not None and not self.exchange.carries_weight:
            raise ValueError(
                f"{update} has a weight that travels with its messages, which {exchange} would "
                "leave out: use exchanges.Push, or another one with carries_weight = True"
            )
        if self.update.anchor is not None and self.update.anchor not in self.update.slots:
            raise ValueError(
                f"{update} has the anchor {self.update.anchor!r}, which is not among its slots "
                f"({', '.join(self.update.slots) or 'none'})"
            )
        if self.delay and type(self.update).fold is Update.fold:
            raise ValueError(
                f"{update} would replace x by what arrives {self.delay} steps late, and lose the "
                "steps since: give it a `fold` for rounds with a delay, such as "
                "x.sub_(sent).add_(received) with keeps_sent = True, or use delay=0"
            )
        if self.update.whole and self.update.in_every_step:
            raise ValueError(
                f"{update} is about whole tensors, and changes x in every step, which is done "
                "tensor by tensor: leave out `before_step` and `after_step`, or `whole`"
            )
        if self.update.whole and isinstance(self.part, Fragment) and self.part.by == "bytes":
            raise ValueError(
                f"{update} needs whole tensors, and a fragment by bytes may "
                'cut one: use Fragment(..., by="layers")'
            )
        if is_of_optimizer(self.part) and (self.exchange.slots or self.update.slots):
            raise ValueError(
                "a round of the optimizer's state needs an update and an exchange that keep no "
                "state of their own (so no codec): such state begins with what all workers start "
                "with, and the optimizer has none then"
            )

    @property
    def name(self) -> str:
        """What messages to the user call this round."""
        part = self.part
        of = f" of fragment {part.index + 1}/{part.count}" if isinstance(part, Fragment) else ""
        return f"{type(self.update).__name__} round{of}"


@dataclass(frozen=True)
class GradientRound:
    """An average of gradients during backward passes, as data.

    Args:
        when: in which steps it is due: a schedule, such as ``laconic.every(1)``.
        update: `Average`, or another one that only has a `combine` and keeps no state.
        exchange: with whom messages are exchanged, and how they are encoded.
        over: over which set of ranks: ``"world"``, ``"workers"``, ``"group"``, or ``"replica"``
            (the ranks of one worker).

    Examples:
        >>> update, mean = laconic.updates.Average(), laconic.exchanges.Mean()
        >>> average = laconic.GradientRound(laconic.every(1), update, mean)
        >>> sync = laconic.attach(model, optimizer, (average,))
    """

    when: Schedule
    update: Update
    exchange: Exchange
    over: str = "workers"

    delay: ClassVar[int] = 0
    """It is complete when ``backward()`` returns."""

    def __post_init__(self) -> None:
        check_choice("over", self.over, SETS)
        update = self.update
        combines_only = update.combines_only and not update.slots
        if update.whole:
            raise ValueError(
                f"{type(update).__name__} needs whole tensors, which rounds on gradients do not "
                "have: use it in a Round"
            )
        if not combines_only or type(update).send is not Update.send or not self.exchange.averages:
            raise ValueError(
                "a round on gradients is Average, or an update with nothing but a `combine`, over "
                "an exchange that brings a mean and is not relative"
            )

    @property
    def name(self) -> str:
        """What messages to the user call this round."""
        return f"{type(self.update).__name__} gradient round"


AnyRound = Round | GradientRound
Recipe = tuple[AnyRound, ...]


def gradient_rounds(recipe: Recipe) -> list[GradientRound]:
    """The recipe's rounds on gradients."""
    return [r for r in recipe if isinstance(r, GradientRound)]


def workers_differ(recipe: Recipe) -> bool:
    """Whether workers can hold different x: always, unless gradients are averaged in every step,
    and what else happens is the same on all workers."""
    averaged = [r.when for r in gradient_rounds(recipe) if r.over in ("world", "workers")]
    others = (r for r in recipe if not isinstance(r, GradientRound))
    return not always_due(*averaged) or not all(r.exchange.identical for r in others)


def fragments_of(r: AnyRound) -> int:
    """How many fragments ``r``'s tensors are one of."""
    return r.part.count if isinstance(r, Round) and isinstance(r.part, Fragment) else 1


def typical(r: AnyRound) -> AnyRound:
    """``r`` at every step, over the workers, without delay, of the first fragment: rounds that
    are equal then cost the processors the same."""
    if isinstance(r, GradientRound):
        return replace(r, when=every(1), over="workers")
    part = Fragment(0, r.part.count, r.part.by) if isinstance(r.part, Fragment) else r.part
    exchange = r.exchange.typical()
    return replace(r, when=every(1), delay=0, part=part, over="workers", exchange=exchange)


class NamedRecipe(tuple[AnyRound, ...]):
    """A recipe that prints as the ``text`` of the call that made it, such as ``local_sgd(12)``.

    It equals every other tuple of the same rounds, whatever its text. What is made of its rounds
    (a slice, a sum of recipes) is a plain tuple.
    """

    text: str | None

    def __new__(cls, rounds: Iterable[AnyRound], text: str | None = None) -> NamedRecipe:
        recipe = super().__new__(cls, rounds)
        recipe.text = text
        return recipe

    def __repr__(self) -> str:
        return super().__repr__() if self.text is None else self.text

    def __reduce__(self) -> tuple[type[NamedRecipe], tuple[Recipe, str | None]]:
        return NamedRecipe, (tuple(self), self.text)


def renamed(recipe: Recipe, rounds: Iterable[AnyRound]) -> Recipe:
    """``rounds``, which were made of those of ``recipe``, under its text."""
    return NamedRecipe(rounds, recipe.text if isinstance(recipe, NamedRecipe) else None)


def is_recipe(value: object) -> bool:
    """Whether ``value`` is a tuple of rounds."""
    return isinstance(value, tuple) and all(isinstance(r, AnyRound) for r in value)


def describe(recipe: Recipe) -> str:
    """All rounds of a recipe as text, alike in every process: see `plain`. Recipes of the same
    rounds have the same text, however they were spelled."""
    return plain(tuple(recipe))


def recipe_text(recipe: Recipe) -> str:
    """A recipe as messages to the user call it: by the call that made it where that is known, else
    by all its rounds."""
    return plain(recipe)
