"""The mathematics of a round.

Symbols are those of the papers:

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

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from laconic.algorithms.scores import NO_SCORE, Score

State = MutableMapping[str, Tensor]
"""The state of one update on one bucket: named tensors, with the same names on every rank."""

Slot = Literal["owner", "everywhere", "private"]
"""Where a state tensor lives.

``owner``: the same value on every worker, needed only where a message is combined; a sharded
exchange keeps one slice per worker. ``everywhere``: the same value, needed on every worker.
``private``: this worker's own; when a checkpoint is loaded by another number of workers, each gets
the mean."""


Sends = Literal["model", "change"]
"""What messages are: parameters, or changes of them."""
Scope = Literal["elements", "tensors"]
"""What mathematics is about: each element alone, or whole tensors, such as matrices."""


class Tensors:
    """The tensors that x consists of, one after the other, before padding. ``shapes``: theirs."""

    def __init__(self, shapes: Sequence[torch.Size] = ()) -> None:
        self.shapes = tuple(shapes)

    def map(
        self,
        flat: Tensor,
        function: Callable[[Tensor], Tensor],
        where: Callable[[torch.Size], bool] = lambda shape: True,
    ) -> None:
        """Replace every tensor in ``flat``, which is as long as x, by ``function`` of it.

        ``where``: of which shapes; others stay. Where FSDP has sharded the model, each tensor is
        brought together for that on the worker's ranks, one of which calls ``function``, so every
        rank must make the call.
        """
        if not self.shapes:
            raise ValueError(
                'clock.tensors is for `send` and `fold` of an update with scope = "tensors"'
            )
        start = 0
        for shape in self.shapes:
            if where(shape):
                piece = flat[start : start + shape.numel()].view(shape)
                piece.copy_(function(piece))
            start += shape.numel()


@dataclass(frozen=True)
class Clock:
    """What updates and exchanges know besides tensors.

    Args:
        step: optimizer steps, from 1.
        lr: the group's current learning rate. It is an error to read it in a round whose update
            does not have `Update.uses_lr`.
        executed: rounds of this kind before this one.
        delay: the round's, in steps.
        workers: how many take part.
        worker: which of them this is.
        weight: of the message sent, None if the update gives it none; in `Update.fold`, of what
            arrived.
        out_degree: how many peers the message goes to.
        score: this worker's, if the exchange asks for one.
        seed: the run's.
        tensors: with the `Update.scope` ``"tensors"``, those in x: see `Tensors.map`.
        arrived: in a round with a quorum, how many of the workers contribute; elsewhere 0.

    Examples:
        >>> clock = laconic.Clock(step=8, lr=0.1, executed=0, delay=0, workers=4)
        >>> laconic.updates.Average().combine(torch.ones(2), {}, clock)
        tensor([1., 1.])
    """

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
    tensors: Tensors = field(default_factory=Tensors)
    arrived: int = 0


EveryStep = Callable[[Tensor, State, Clock], None]


class Update:
    """The mathematics of a round, for one flat tensor ``x``.

    Unless its ``scope`` is ``"tensors"``, all methods are elementwise in ``x`` and its state, so
    the same lines run on a bucket, on the slice that a worker owns, or on one parameter.
    `before_step`, `after_step` and `quiesce` are methods that an update may have, and are None
    where it has not.

    Class attributes say what the formula needs. ``slots``: where each state tensor of `init` lives:

        "owner"       the same on all workers, and used in `combine`: each stores a slice of it
        "everywhere"  the same on all workers, and used in `send` or `fold`
        "private"     of each worker; with other workers, a checkpoint gives each the mean

    ``anchor``: the state tensor with the last common model. ``uses_lr``: the formula contains
    ``clock.lr``. ``replaces``: without a delay, what arrives is the new x, and `fold` is called for
    delayed rounds only. ``sends``: ``"model"``, or ``"change"`` where messages are changes, such as
    a - x. ``weight``: a state tensor, a number, that travels with each message. ``scope``:
    ``"elements"``, or ``"tensors"`` where x consists of whole tensors.

    Examples:
        >>> class HalfWay(laconic.Update):  # x <- (x + mean(x)) / 2
        ...     def fold(self, x, received, sent, state, clock):
        ...         return x.add_(received).mul_(0.5)
        >>> half = laconic.Round(laconic.every(8), HalfWay(), laconic.exchanges.Mean())
        >>> sync = laconic.attach(model, optimizer, (half,))
    """

    slots: ClassVar[Mapping[str, Slot]] = {}
    """Every state tensor, and where it lives. Empty: the update keeps no state."""
    anchor: ClassVar[str | None] = None
    """The state tensor that holds the result of the last outer step or elastic round, if any."""
    uses_lr: ClassVar[bool] = False
    """Whether the formula contains ``clock.lr``. Each bucket then holds one parameter group, and
    each group must have an ``"lr"``."""
    replaces: ClassVar[bool] = False
    """Whether, without a delay, what arrives replaces x. `fold` is then called for delayed rounds
    only, and no second copy of x is made."""
    weight: ClassVar[str | None] = None
    """The state tensor, a number, that travels with every message; None if there is none."""
    scope: ClassVar[Scope] = "elements"
    """``"tensors"``: the mathematics is about whole tensors, such as matrices: see
    ``clock.tensors``. `combine` may still get a slice, so it belongs in `send` and `fold`, and its
    state is ``everywhere``."""
    sends: ClassVar[Sends] = "model"
    """``"change"``: messages are changes, such as a - x, and not x. The exchange must then not code
    them relative to the last result."""

    def init(self, x: Tensor) -> State:
        """Make the state for the common start ``x``, a copy that the state may keep. State tensors
        have x's size, or no dimension."""
        return {}

    def send(self, x: Tensor, state: State, clock: Clock) -> Tensor:
        """Return the message, made from a copy of x that may be overwritten. It must not be a
        tensor of the state, because the exchange overwrites it."""
        return x

    def combine(self, mean: Tensor, state: State, clock: Clock) -> Tensor:
        """Take the outer step: from the workers' mean, return what all of them receive.

        It runs where the mean arrives, which may be a slice of the bucket (a sharded exchange, a
        worker of several ranks), and perhaps while training goes on. So it gets only numbers and
        the state that lives with the ``owner``. Mathematics with other state belongs in `fold`. May
        overwrite ``mean``, but not keep it."""
        return mean

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        """Return the new ``x``. May overwrite ``x`` and ``received``. ``sent`` is ``y``, the ``x``
        of when the message was sent, where `keeps_sent` and the round has a delay; else None."""
        return received

    @property
    def keeps_sent(self) -> bool:
        """Whether a delayed `fold` needs ``y``."""
        return False

    before_step: EveryStep | None = None
    """``before_step(x, state, clock)`` is called for each parameter before the user's optimizer
    moves it, and may change x in place. If the update has a `weight`, its `after_step` undoes
    that."""
    after_step: EveryStep | None = None
    """``after_step(x, state, clock)``, for each parameter, may change x in place after every step
    of the user's optimizer, before any round. The rounds of a recipe come last to first, so that
    the innermost has the last word."""
    quiesce: Callable[[Tensor, State, bool], None] | None = None
    """``quiesce(x, state, averaged)`` has work to do before x counts as the model, at an outer step
    above, at a switch, at the end: it resets push weights to 1, or the like. What was in flight has
    been folded. ``x`` is a whole bucket, changed in place. ``averaged``: the mean of x over workers
    counts next."""

    @property
    def combines_only(self) -> bool:
        """Whether all that it does is to combine what arrives to the new x."""
        others = self.in_every_step or self.quiesce is not None or self.scope == "tensors"
        return self.replaces and not others

    @property
    def in_every_step(self) -> bool:
        """Whether every step of training uses the state, and not only a round. `after_step` is
        called only then: a setting may switch it off."""
        return self.before_step is not None or self.after_step is not None


class _WithoutRate(Clock):
    """``clock`` in a round whose ``update`` does not say that it uses the learning rate."""

    def __init__(self, clock: Clock, update: Update) -> None:
        self.__dict__.update(vars(clock), given=clock, user=type(update).__name__)

    @property
    def lr(self) -> float:
        raise ValueError(
            f"clock.lr is not known, because {vars(self)['user']} does not say that it is used: "
            "give that class uses_lr = True"
        )

    def __repr__(self) -> str:
        return repr(vars(self)["given"])


class Seen(UserDict[str, Tensor]):
    """``state`` as a ``method`` of ``update`` may use it. `combine` runs where the owners' slices
    are, and all other methods where the rest of the state is; numbers are in both places."""

    def __init__(self, state: State, update: Update, method: str) -> None:
        self.data: State = state  # type: ignore[assignment]
        self._update, self._method = update, method

    def __getitem__(self, name: str) -> Tensor:
        if self._may_use(name):
            return self.data[name]
        used = f"{type(self._update).__name__}.{self._method} uses state[{name!r}]"
        if self._method == "combine":
            slot = self._update.slots[name]
            raise ValueError(
                f'{used}, whose slot is "{slot}": `combine` has state with the slot "owner" only'
            )
        raise ValueError(
            f'{used}, of which each worker may have a slice, because its slot is "owner": that is '
            'for `combine`. For other methods give it the slot "everywhere"'
        )

    def __contains__(self, name: object) -> bool:
        return name in self.data and self._may_use(str(name))

    def __iter__(self) -> Iterator[str]:
        return filter(self._may_use, self.data)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _may_use(self, name: str) -> bool:
        slot, combines = self._update.slots.get(name), self._method == "combine"
        return slot is None or (slot == "owner") == combines or not self.data[name].dim()


def rated(update: Update, clock: Clock) -> Clock:
    """``clock``, whose ``lr`` is an error unless ``update`` says that it is used."""
    return clock if update.uses_lr else _WithoutRate(clock, update)


def seen_by(update: Update, method: str, state: State, clock: Clock) -> tuple[State, Clock]:
    """What a method of ``update`` gets: an error where it uses what the update's class does not
    declare."""
    return Seen(state, update, method), rated(update, clock)


def computed(
    update: Update, method: str, tensors: Sequence[Tensor | None], state: State, clock: Clock
) -> Tensor:
    """Return what ``method`` of ``update`` makes of ``tensors``. Raises ``ValueError`` if it must
    not be."""
    value = getattr(update, method)(*tensors, *seen_by(update, method, state, clock))
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{type(update).__name__}.{method} must return a tensor, not {type(value).__name__}"
        )
    if method == "send" and (name := next((k for k, t in state.items() if t is value), None)):
        raise ValueError(
            f"{type(update).__name__}.send must not return state[{name!r}] itself, because the "
            f"exchange overwrites the message: return state[{name!r}].clone()"
        )
    return value
