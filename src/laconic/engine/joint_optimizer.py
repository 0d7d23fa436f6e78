"""Several optimizers as one, such as Muon for the matrices beside AdamW for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from laconic.engine.steps import Hook, StepHooks


class JointOptimizer(Optimizer):
    """``optimizers`` as one, for the engine. The user's loop still calls each of them.

    A step is taken when each has stepped once, or was skipped, in any order. ``param_groups`` are
    those of the optimizers one after the other; groups added after `keep_order` come last.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # not super().__init__, which would copy the groups
        self.optimizers = tuple(optimizers)
        self._groups: list[tuple[int, int]] = []
        """The group's optimizer, and its place there, by group."""
        self._done: set[int] = set()
        """The optimizers that have stepped, or were skipped, in this step."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """All groups, in the order in which they were added."""
        return [self.optimizers[number].param_groups[k] for number, k in self._order()]

    def keep_order(self) -> None:
        """Groups added from now on come after those of now. Every rank must call it at the same
        place."""
        self._groups = self._order()

    def _order(self) -> list[tuple[int, int]]:
        sizes = [len(optimizer.param_groups) for optimizer in self.optimizers]
        order = [(number, k) for number, k in self._groups if k < sizes[number]]  # some may be gone
        for number, size in enumerate(sizes):
            known = sum(owner == number for owner, _ in self._groups)
            order += [(number, k) for k in range(known, size)]
        return order

    @property
    def state(self) -> Mapping[Tensor, Any]:  # type: ignore[override]
        """The state of each parameter, to be read, or changed inside: see `forget`."""
        return {p: state for each in self.optimizers for p, state in each.state.items()}

    def state_dict(self) -> dict[str, Any]:
        """Every optimizer's."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)

    def reset(self) -> None:
        """Forget which optimizers have stepped: a state was loaded."""
        self._done.clear()

    def skip(self, optimizer: Optimizer) -> bool:
        """Record that the step of ``optimizer`` was skipped, unless it was taken. Returns whether
        that completes the step of all, whose hook is not called."""
        return self._complete(self._number(optimizer))

    def before(
        self,
        hook: Hook,
        optimizer: Optimizer,
        positional: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        """Call ``hook`` before ``optimizer`` steps."""
        if self._number(optimizer) in self._done:
            missing = [o for k, o in enumerate(self.optimizers) if k not in self._done]
            raise ValueError(
                f"{type(optimizer).__name__} stepped twice before {class_names(missing)} did: in "
                "each training step call step() once on each optimizer given to laconic.attach"
            )
        if any(callable(value) for value in (*positional[1:], options.get("closure"))):
            raise ValueError(
                "closures work with one optimizer only: call backward() before the optimizers step"
            )
        hook(self, (self,), {})

    def after(self, hook: Hook, optimizer: Optimizer, *_: Any) -> None:
        """Call ``hook`` if all have stepped when ``optimizer`` has."""
        if self._complete(self._number(optimizer)):
            hook(self, (self,), {})

    def _complete(self, number: int) -> bool:
        self._done.add(number)
        complete = len(self._done) == len(self.optimizers)
        if complete:
            self._done.clear()
        return complete

    def _number(self, optimizer: Optimizer) -> int:
        return next(k for k, own in enumerate(self.optimizers) if own is optimizer)


def listen(optimizer: Optimizer, before: Hook, after: Hook) -> list[StepHooks]:
    """Call ``before`` before each of its members steps, since gradients may come between, and
    ``after`` after the last of them has stepped."""
    if isinstance(optimizer, JointOptimizer):
        before, after = partial(optimizer.before, before), partial(optimizer.after, after)
    return [StepHooks(each, before, after) for each in members(optimizer)]


def class_names(optimizers: Sequence[Optimizer]) -> str:
    """The classes' names, such as ``Muon, AdamW``."""
    return ", ".join(type(optimizer).__name__ for optimizer in optimizers)


def members(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers that the user's loop calls."""
    return optimizer.optimizers if isinstance(optimizer, JointOptimizer) else (optimizer,)


def forget(optimizer: Optimizer, p: Tensor) -> None:
    """Clear the state of this parameter."""
    for each in members(optimizer):
        each.state.pop(p, None)


def as_one(optimizer: Optimizer | Sequence[Optimizer]) -> Optimizer:
    """``optimizer``, or a list of optimizers as one. Raises ``ValueError`` if a list is empty, or a
    parameter is in two of them."""
    if not isinstance(optimizer, (list, tuple)):
        return optimizer  # type: ignore[return-value]
    others = [o for o in optimizer if not isinstance(o, Optimizer)]
    if not optimizer or others:
        raise ValueError(f"optimizer must be an optimizer or a list of optimizers: {optimizer!r}")
    params = [p for o in optimizer for group in o.param_groups for p in group["params"]]
    if len({id(p) for p in params}) < len(params):
        raise ValueError(
            f"a parameter is in two of the optimizers ({class_names(optimizer)}): give each its own"
        )
    return optimizer[0] if len(optimizer) == 1 else JointOptimizer(optimizer)
