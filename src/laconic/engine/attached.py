"""Which synchronizer follows which optimizer, GradScaler and link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.engine.consensus import ScalerAlignment
from laconic.engine.joint_optimizer import members
from laconic.engine.synchronizer import Synchronizer
from laconic.links import Link
from laconic.links.simulated import current_link

_made: WeakKeyDictionary[Synchronizer, None] = WeakKeyDictionary()
"""All that exist and follow an optimizer, whose hooks keep them alive, in the order of
`laconic.attach`."""


def claim(sync: Synchronizer) -> None:
    """Record that ``sync`` follows its optimizer from now on."""
    _made.pop(sync, None)
    _made[sync] = None


def synchronizer_of(optimizer: object) -> Synchronizer | None:
    """The synchronizer attached to ``optimizer`` last, if it still exists; that of a front end is
    its ``sync``."""
    own, every = getattr(optimizer, "sync", None), ((s, s.driver.session.bound) for s in _all())
    found = [s for s, o in every if s is own or id(optimizer) in map(id, (o, *members(o)))]
    return found[-1] if found else None


def synchronizer_near(*given: object) -> Synchronizer | None:
    """The attached synchronizer that one of ``given`` is, or belongs to, or else the one attached
    last: over its link an argument that is wrong can be an error on all ranks."""
    link = current_link.get()
    here = [s for s in _attached() if link is None or s.driver.session.world.link is link]
    for x in given:
        own = synchronizer_of(x) or getattr(x, "synchronizer", None) or getattr(x, "sync", x)
        here += [s for s in here if s.driver.session.model is x]
        here += [own] if isinstance(own, Synchronizer) else []
    return here[-1] if here else None


def check_free(optimizer: Optimizer, params: Sequence[Tensor] = ()) -> None:
    """Raise if a synchronizer follows ``optimizer``, or another one that holds any of ``params``:
    both would average their gradients."""
    for sync in map(synchronizer_of, members(optimizer)):
        if sync is not None and sync.attached:
            raise ValueError("this optimizer is attached already: call sync.detach() first")
    own = {id(p) for p in params}
    if any(own.intersection(map(id, sync.driver.session.params())) for sync in _attached()):
        raise ValueError(
            "the model's parameters are attached already, with another optimizer or in another "
            "simulated worker: call sync.detach() first, or make a model for each worker"
        )


def check_free_link(link: Link | None) -> None:
    """Wait until nothing is in flight over ``link``; raise if a synchronizer still sends over it,
    in a thread of its own."""
    for sync in (s for s in _all() if s.driver.session.world.link is link):
        sync.drain()
        if sync.attached and sync.driver.session.world.threaded:
            raise ValueError(
                "this link has another synchronizer attached, and their messages would mix: "
                "make a link for each, or call sync.detach() first"
            )


def watch(scaler: torch.amp.GradScaler) -> None:
    """Have synchronizers count the steps that ``scaler`` skips, which the optimizer's hooks do not
    see, and see its updates. One scaler may serve several optimizers."""
    if not isinstance(scaler, _Watched):
        scaler.__class__ = type("Watched", (_Watched, type(scaler)), {})


class _Watched(torch.amp.GradScaler):
    """Before a scaler's own class: methods that synchronizers notice. Copies, pickled or not, are
    of the own class."""

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        for alignment in self._alignments():
            alignment.in_use = True
        sync = synchronizer_of(optimizer)
        before = None if sync is None else sync.step
        result = super().step(optimizer, *args, **kwargs)
        if sync is not None and sync.attached and sync.step == before:
            sync.driver.skip(optimizer)
        return result

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        for alignment in self._alignments():
            alignment.in_use = False
            alignment.align()

    def _alignments(self) -> list[ScalerAlignment]:
        return [a for s in _attached() if (a := s.driver.alignment).scaler is self]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, type(self).__bases__[1:], *super().__reduce_ex__(protocol)[2:]


def _attached() -> list[Synchronizer]:
    return [sync for sync in _all() if sync.attached]


def _all() -> list[Synchronizer]:
    return [sync for one in _made.keyrefs() if (sync := one()) is not None]  # threads may add
