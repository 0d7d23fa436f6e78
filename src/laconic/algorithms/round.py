"""The four questions every algorithm answers: when to communicate, what to send and how to fold in
what came back, with whom, and over which tensors.

An algorithm is a tuple of `Round` values. Symbols are those of the papers:

======  =====================================================================================
``x``   this worker's parameters (a flat tensor: one bucket, or any stretch of one)
``a``   the anchor: the last parameters the workers agreed on; starts as the common ``x0``
``d``   the pseudo-gradient ``a - x``
``u``   outer (slow) momentum
``lr``  the *current* learning rate of the parameter group the tensor belongs to
``n``   number of workers
``H``   period: local steps between two rounds
``y``   ``x`` as it was when a delayed message was sent
======  =====================================================================================
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from laconic.algorithms.schedules import Schedule
from laconic.algorithms.scores import NO_SCORE, Score
from laconic.buckets import Fragment, Selector, optimizer_state, parameters
from laconic.errors import check_choice, check_int
from laconic.links.cost import Cost
from laconic.links.link import Link

State = dict[str, Tensor]
"""The state of one update on one bucket: named tensors, alike in name on every rank."""

Slot = Literal["owner", "everywhere", "private", "pooled"]
"""Where a state tensor lives. ``owner``: the same value on every worker and needed only where a
message is combined, so a sharded exchange keeps one slice per worker. ``everywhere``: the same
value, needed on every worker. ``private``: this worker's own. ``pooled``: this worker's own, and of
all workers' only the mean counts, which is what each of another number of workers goes on with."""

OptimizerState = Literal["keep", "average", "reset"]
Combine = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Clock:
    """What updates and exchanges may know beside tensors: the step (from 1), its group's current
    ``lr`` (NaN unless the update uses it and the optimiser has one), how many rounds of its kind
    were executed before this one, the round's delay in steps, how many workers take part and which
    of them this is, the ``weight`` of the message (of what is sent, None if the update gives it
    none; in `Update.fold` of what arrived), to how many peers it goes, this worker's score where
    the exchange asks for one, the seed of the run, and the number of the bucket."""

    step: int
    lr: float
    executed: int
    delay: int
    workers: int
    worker: int = 0
    weight: float | None = None
    out_degree: int = 0
    score: Score = NO_SCORE
    seed: int = 0
    bucket: int = 0


class Arrival(NamedTuple):
    """What an exchange brings: a tensor as long as the message, and the sum of its weights.
    ``lent``: the tensor is state of the exchange's, and only to be read, before its next round."""

    flat: Tensor
    weight: float = 1.0
    lent: bool = False


class Update:
    """The mathematics of a round, written for one flat tensor ``x``; every default does nothing.

    All methods are elementwise in ``x`` and its state, so the same lines run on a bucket, on the
    slice a worker owns, or on one parameter. ``init`` is called when training starts, with the
    common ``x0``; the others in the order in which they stand here.
    """

    slots: ClassVar[Mapping[str, Slot]] = {}
    """Where each state tensor lives; those not listed live with the ``owner``."""
    anchor: ClassVar[str | None] = None
    """The state tensor that the last outer step or elastic round left, if there is one."""
    uses_lr: ClassVar[bool] = False
    """Whether ``clock.lr`` enters: buckets then hold one parameter group each."""
    replaces: ClassVar[bool] = False
    """Whether without a delay what arrives simply replaces x, whatever `fold` says: it is then
    called for delayed rounds only, and no second copy of x is made."""
    weight: ClassVar[str | None] = None
    """The state tensor (a number) that rides with every message; None: messages have no weight."""
    models: ClassVar[int] = 1
    """How many times as long as x its message is."""
    settles: ClassVar[bool] = False
    """Whether every other round must come to rest first, as an outer step asks."""

    def init(self, x: Tensor) -> State:
        """State for the common start ``x``, a copy that the state may keep: tensors of its size,
        or of no dimension."""
        return {}

    def before_step(self, x: Tensor, state: State, clock: Clock) -> None:
        """Before the user's optimiser moves ``x``; in place."""

    def after_step(self, x: Tensor, state: State, clock: Clock) -> None:
        """After every step of the user's optimiser, before any round; in place. A recipe's last
        round comes first, so that the innermost has the last word."""

    def send(self, x: Tensor, state: State, clock: Clock) -> Tensor:
        """The message for the exchange, from a copy of x that it may overwrite. Not a tensor of the
        state: the exchange overwrites the message."""
        return x

    def depart(self, x: Tensor, state: State, clock: Clock) -> None:
        """Right after a message that is to be folded later has left; in place, on a whole bucket
        (x itself, where `send` was given a copy). Rounds without a delay do not call it."""

    def combine(self, mean: Tensor, state: State, clock: Clock) -> Tensor:
        """The outer step: from the workers' mean, what is handed out to all of them. Runs where
        the mean arrives, which may be a slice of the bucket (a sharded exchange, a worker of
        several ranks), and perhaps beside the training: so it is given the state that lives with
        the ``owner``, and numbers, alone. Mathematics with other state belongs in `fold`. May
        overwrite ``mean``, but not keep it."""
        return mean

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        """The new ``x``; may overwrite the old, and ``received``. ``sent`` is ``y`` where the
        update keeps it and the round has a delay, else None."""
        return received

    def settle(self, x: Tensor, state: State, averaged: bool) -> None:
        """Come to rest: push weights back to 1 (what is in flight was folded before); ``x`` is a
        whole bucket, in place. ``averaged``: the mean of x over workers is what counts next."""

    @property
    def keeps_sent(self) -> bool:
        """Whether a delayed `fold` needs ``y``."""
        return False

    @property
    def pulls(self) -> bool:
        """Whether `after_step` does anything, which a setting may decide."""
        return self.overrides("after_step")

    def overrides(self, *methods: str) -> bool:
        """Whether any of these methods is not the default, which does nothing."""
        return any(getattr(type(self), name) is not getattr(Update, name) for name in methods)


class Exchange:
    """With whom a message is exchanged and how it is encoded."""

    slots: ClassVar[Mapping[str, Slot]] = {}
    """Where each tensor of its own state lives, if it keeps any."""
    communicates: ClassVar[bool] = True
    """Whether anything is sent at all."""
    agrees: ClassVar[bool] = False
    """Whether all workers hold the same result afterwards."""
    whole: ClassVar[bool] = False
    """Whether a bucket must hold whole tensors, as `shaped` may need."""
    for_gradients: ClassVar[bool] = False
    """Whether it is for gradients alone, whose messages do not build on those before."""
    gossips: ClassVar[bool] = False
    """Whether messages go to peers alone; module buffers then go the same way."""

    @property
    def direct(self) -> bool:
        """Whether every rank sends to every other, where others let sums travel: as it does where
        a message is coded, which is when there is something to keep."""
        return bool(self.slots)

    @property
    def averages(self) -> bool:
        """Whether what it brings is the mean of the messages, whatever the rounds before."""
        return False

    @property
    def scored(self) -> int:
        """Over how many losses it wants the workers' scores; 0: it wants none."""
        return 0

    def owners(self, n: int) -> int | None:
        """Over how many of ``n`` ranks, the first ones, ``owner`` state is cut up, and so what each
        combines; None: every rank combines, and keeps, everything."""
        return None

    def region(self, link: Link, length: int) -> slice:
        """The stretch of a bucket on which this rank combines, and keeps ``owner`` state for."""
        owners = self.owners(link.size)
        if owners is None:
            return slice(0, length)
        each = length // owners
        return slice(min(link.rank, owners) * each, min(link.rank + 1, owners) * each)

    def multiple(self, n: int) -> int:
        """What the length of a message between ``n`` ranks must be a multiple of."""
        return math.lcm(n, self.owners(n) or n)

    def shaped(self, shapes: Sequence[torch.Size]) -> Exchange:
        """What runs on a bucket of stretches of tensors of these shapes, one after the other, and
        its padding; if not ``whole``, of a tensor that is cut, several stretches."""
        return self

    def init(self, x: Tensor, owned: slice) -> State:
        """State for the common start ``x`` of what this rank carries (zeros for gradients), a copy
        that the state may keep: tensors of its size, and of ``owner`` state the stretch
        ``owned``. A tensor of two dimensions has a size of its own, and is alike on all workers."""
        return {}

    def cost(self, length: int, itemsize: int, n: int) -> Cost:
        """What a rank sends, of ``n``, for a message of ``length`` elements of ``itemsize`` bytes:
        what `run` makes the link count, as the mean over the ranks."""
        return Cost(0, 0)

    def give_back(self, state: State, owned: slice, n: int) -> None:
        """Move what this rank keeps as the owner of the stretch ``owned``, one of ``n`` ranks, into
        state as long as the message, before the latter alone is taken over into other buckets."""

    def rest(self, x: Tensor, state: State) -> None:
        """All workers hold ``x`` now, which they have from elsewhere: none of what they agreed on
        is still owed to them."""

    def out_degree(self, clock: Clock) -> int:
        """To how many peers a message goes; 0 where it is not sent to peers."""
        return 0

    def run(
        self, link: Link, message: Tensor, combine: Combine, clock: Clock, state: State
    ) -> Arrival:
        """Carry ``message`` (which it may overwrite) over ``link``, call ``combine`` where a mean
        arrives, and return the result. ``state`` is what `init` made for these tensors."""
        raise NotImplementedError


@dataclass(frozen=True)
class Round:
    """One kind of communication, as data. A recipe is a tuple of these."""

    when: Schedule
    update: Update
    exchange: Exchange
    part: Selector | Fragment = parameters
    on: Literal["params", "gradients"] = "params"
    over: str = "workers"
    delay: int = 0
    optimizer_state: OptimizerState = "keep"

    def __post_init__(self) -> None:
        check_int("delay", self.delay, 0)
        check_choice("optimizer_state", self.optimizer_state, ("keep", "average", "reset"))
        check_choice("on", self.on, ("params", "gradients"))
        check_choice("over", self.over, ("world", "workers", "group", "replica"))
        if self.on == "params" and self.exchange.for_gradients:
            raise ValueError(f"{type(self.exchange).__name__} is for rounds on gradients alone")
        if self.update.models > 1 and self.exchange.slots:
            kept, made = type(self.exchange).__name__, type(self.update).__name__
            raise ValueError(
                f"{kept} keeps state for messages as long as the parameters, and those of {made} "
                f"are {self.update.models} times as long"
            )
        if self.part is optimizer_state and (
            self.exchange.slots or self.update.init(torch.zeros(1))
        ):
            raise ValueError(
                "a round of the optimiser's state is of an update and an exchange that keep none "
                "of their own (no codec), which would begin with what all workers start with"
            )
        if self.on == "gradients" and not self._is_plain_mean():
            raise ValueError(
                "a round on gradients is Average, or an update with nothing but a `combine`, "
                "over a mean that is not relative, of all parameters, without a delay"
            )

    def _is_plain_mean(self) -> bool:
        rest = (self.part, self.delay, self.optimizer_state)
        methods = ("before_step", "after_step", "send", "settle")
        plain = self.update.replaces and not self.update.overrides(*methods)
        plain = plain and self.exchange.averages and not self.update.init(torch.zeros(1))
        return plain and rest == (parameters, 0, "keep")

    @property
    def name(self) -> str:
        """How messages to the user call this round."""
        kind = "gradient round" if self.on == "gradients" else "round"
        part = self.part
        of = f" of fragment {part.index + 1}/{part.count}" if isinstance(part, Fragment) else ""
        return f"{type(self.update).__name__} {kind}{of}"


Recipe = tuple[Round, ...]


class NamedRecipe(tuple[Round, ...]):
    """A recipe that prints as the ``text`` of the call that made it, such as ``local_sgd(12)``.

    It equals every other tuple of the same rounds, whatever its text. What is made of its rounds
    (a slice, a sum of recipes) is a plain tuple.
    """

    text: str | None

    def __new__(cls, rounds: Iterable[Round], text: str | None = None) -> NamedRecipe:
        recipe = super().__new__(cls, rounds)
        recipe.text = text
        return recipe

    def __repr__(self) -> str:
        return super().__repr__() if self.text is None else self.text

    def __reduce__(self) -> tuple[type[NamedRecipe], tuple[Recipe, str | None]]:
        return NamedRecipe, (tuple(self), self.text)


def renamed(recipe: Recipe, rounds: Iterable[Round]) -> Recipe:
    """``rounds``, which were made of those of ``recipe``, under its text."""
    return NamedRecipe(rounds, recipe.text if isinstance(recipe, NamedRecipe) else None)


def unchanged(recipe: Recipe) -> Recipe:
    """``recipe`` itself."""
    return recipe


def is_recipe(value: object) -> bool:
    """Whether ``value`` is a tuple of rounds."""
    return isinstance(value, tuple) and all(isinstance(r, Round) for r in value)


def describe(recipe: Recipe) -> str:
    """All rounds of a recipe as text, alike in every process: see `plain`. Recipes of the same
    rounds have the same text, however they were spelled."""
    return plain(tuple(recipe))


def recipe_text(recipe: Recipe) -> str:
    """A recipe as messages to the user call it: by the call that made it where that is known, else
    by all its rounds."""
    return plain(recipe)


def plain(value: object) -> str:
    """``repr(value)``, with functions by name, without their addresses."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
