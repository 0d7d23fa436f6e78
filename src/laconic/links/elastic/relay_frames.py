"""What a donor and a newcomer send each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from torch import Tensor

from laconic.links.calls import Call


@dataclass(frozen=True)
class Snapshot:
    """All state of the donor after ``step`` steps, by rank of the worker, `packed`."""

    step: int
    state: list[Tensor]


@dataclass(frozen=True)
class Record:
    """What the collectives of a unit have brought, the ids of the ``workers`` that took part, and
    what they have said of themselves (`Call.digest`)."""

    call: Call
    workers: Sequence[str]
    outputs: Sequence[Tensor]
    digests: Sequence[int] = ()


@dataclass(frozen=True)
class StepSettings:
    """The numbers in the optimizer's parameter groups, for the step after ``step`` steps."""

    step: int
    groups: list[dict[str, Any]]


@dataclass(frozen=True)
class Start:
    """The newcomer takes part from the unit ``serial`` on, which begins ``call``. ``groups``: the
    numbers in the optimizer's parameter groups for its first step; ``others``: the state of the
    user's objects then, by name, and of the policy, `packed`. ``digest``: of the model and the
    optimizer then, where all workers have the same. ``present``: how many workers take part, and
    the newcomer's rank."""

    serial: int
    call: Call
    digest: int
    groups: list[dict[str, Any]]
    others: Tensor | None
    present: tuple[int, int]


@dataclass(frozen=True)
class Refusal:
    """The newcomer cannot take part, and ``why``. No other donor would help."""

    why: str


Frame = Snapshot | Record | StepSettings | Start | Refusal
KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Frame)}
"""By the name that a frame travels under."""
