"""Rounds and recipes. An algorithm is a recipe: a tuple of rounds, which are data.

A round says when workers communicate, what they send and how they fold in what comes back (its
update), with whom (its exchange), and over which tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import ClassVar, Literal, get_args

from laconic.algorithms.exchange import Exchange
from laconic.algorithms.identity import plain
from laconic.algorithms.schedules import Schedule, always_due
from laconic.algorithms.update import Scope, Sends, Update
from laconic.errors import check_choice, check_int, refuse
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
        check_choice("optimizer_state", self.optimizer_state, get_args(OptimizerState))
        check_choice("over", self.over, SETS)
        name = type(self.update).__name__
        check_choice(f"{name}.sends", self.update.sends, get_args(Sends))
        check_choice(f"{name}.scope", self.update.scope, get_args(Scope))
        refuse(self._problems())

    def _problems(self) -> dict[str, object]:
        """What is wrong, and whether it is."""
        update, exchange, part = self.update, self.exchange, self.part
        u, e = type(update).__name__, type(exchange).__name__
        tensors = update.scope == "tensors"
        return {
            f"{e}.run must be a coroutine: async def run": not iscoroutinefunction(exchange.run),
            f"{e} is for rounds on gradients: use GradientRound": exchange.scope == "tensors",
            f"{u} sends changes of the parameters, which {e} would take relative to the last "
            "result: give the exchange relative=False": (
                update.sends == "change" and exchange.accepts == "model"
            ),
            f"{e} averages changes of the parameters, and {u} sends parameters: give the exchange "
            "relative=True": update.sends == "model" and exchange.accepts == "change",
            f"{u} has a weight that travels with its messages, which {e} would leave out: use "
            "exchanges.Push, or another one with an `out_degree`": (
                update.weight is not None and exchange.out_degree is None
            ),
            f"{u} has the anchor {update.anchor!r}, which is not among its slots "
            f"({', '.join(update.slots) or 'none'})": (
                update.anchor is not None and update.anchor not in update.slots
            ),
            f"{u} would replace x by what arrives {self.delay} steps late, and lose the steps "
            "since: give it a `fold` for rounds with a delay, such as "
            "x.sub_(sent).add_(received) with keeps_sent = True, or use delay=0": (
                self.delay and type(update).fold is Update.fold
            ),
            f"{u} needs whole tensors, and a fragment by bytes may cut one: use "
            'Fragment(..., by="layers")': (
                tensors and isinstance(part, Fragment) and part.by == "bytes"
            ),
            "a round of the optimizer's state, whose tensors come and go, is folded at once: "
            "use delay=0": (is_of_optimizer(part) and self.delay),
            "a round of the optimizer's state needs an update and an exchange that keep no state "
            "of their own (so no codec): such state begins with what all workers start with, and "
            "the optimizer has none then": (
                is_of_optimizer(part) and (exchange.slots or update.slots)
            ),
        }

    @property
    def quiesces_others(self) -> bool:
        """Whether all other rounds fold what they have in flight first: an anchor of all parameters
        contains it."""
        return self.update.anchor is not None and self.part is parameters

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
        update, exchange, sends = self.update, self.exchange, type(self.update).send
        combines_only = update.combines_only and not update.slots and sends is Update.send
        refuse(
            {
                f"{type(exchange).__name__}.run must be a coroutine: async def run": (
                    not iscoroutinefunction(exchange.run)
                ),
                f"{type(update).__name__} needs whole tensors, which rounds on gradients do not "
                "have: use it in a Round": update.scope == "tensors",
                f"{type(update).__name__} uses the learning rate, which rounds on gradients do not "
                "know: use it in a Round": update.uses_lr,
                "a round on gradients is Average, or an update with nothing but a `combine`, over "
                "an exchange that brings a mean and is not relative": (
                    not combines_only
                    or not (exchange.agrees and exchange.communicates)
                    or exchange.accepts == "model"
                ),
            }
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


def first_sent(recipe: Recipe) -> AnyRound:
    """The first round of ``recipe`` that sends anything, or its first round."""
    return next((r for r in recipe if r.exchange.communicates), recipe[0])


def fragments_of(r: AnyRound) -> int:
    """How many fragments ``r``'s tensors are one of."""
    return r.part.count if isinstance(r, Round) and isinstance(r.part, Fragment) else 1


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
