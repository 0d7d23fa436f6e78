"""The steps of optimizers: hooks around each, and a warning where parameters move without one; and
several optimizers as one, such as Muon for the matrices beside AdamW for the rest.
"""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from laconic.device import not_compiled


class JointOptimizer(Optimizer):
    """``optimizers`` as one, for the engine. The user's loop still calls each of them.

    A step is taken when each has stepped once, or was skipped, in any order. ``param_groups`` are
    those of the optimizers one after the other.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # not super().__init__, which would copy the groups
        self.optimizers = tuple(optimizers)
        self.stepped: set[int] = set()
        """The positions of those that have stepped, or were skipped, in a step that others have
        not taken."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """All groups."""
        return [group for each in self.optimizers for group in each.param_groups]

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

    def restart(self, stepped: Sequence[int]) -> None:
        """Those at these positions have ``stepped``: a state was loaded."""
        self.stepped = set(stepped)

    def done(self, optimizer: Optimizer) -> bool:
        """Record that ``optimizer`` has stepped, or that its step was skipped. Returns whether that
        completes the step of all."""
        self.stepped.add(self.optimizers.index(optimizer))
        complete = len(self.stepped) == len(self.optimizers)
        if complete:
            self.stepped.clear()
        return complete

    def before(self, hook: Hook, optimizer: Optimizer, args: tuple[Any, ...], options: Any) -> None:
        """Call ``hook`` before ``optimizer`` steps."""
        if self.optimizers.index(optimizer) in self.stepped:
            missing = [o for k, o in enumerate(self.optimizers) if k not in self.stepped]
            raise ValueError(
                f"{type(optimizer).__name__} stepped twice before {class_names(missing)} did: in "
                "each training step call step() once on each optimizer given to laconic.attach"
            )
        if has_closure(args, options):
            raise ValueError(
                "closures work with one optimizer only: call backward() before the optimizers step"
            )
        hook(self, (self,), {})

    def after(self, hook: Hook, optimizer: Optimizer, *_: Any) -> None:
        """Call ``hook`` if all have stepped when ``optimizer`` has."""
        if self.done(optimizer):
            hook(self, (self,), {})


def listen(optimizer: Optimizer, before: Hook, after: Hook, *, watch: bool) -> list[StepHooks]:
    """Call ``before`` before each of its members steps, since gradients may come between, and
    ``after`` after the last of them has stepped. ``watch``: see `StepHooks`."""
    if isinstance(optimizer, JointOptimizer):
        before, after = partial(optimizer.before, before), partial(optimizer.after, after)
    return [StepHooks(each, before, after, watch) for each in members(optimizer)]


def has_closure(args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Whether ``step``, called with these arguments, computes gradients by a closure. The first of
    ``args`` is the optimizer."""
    return any(callable(each) for each in (*args[1:], options.get("closure")))


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


Hook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]
WRAPPER = Optimizer.profile_hook_step(lambda: None).__code__
"""The code of torch's wrapper around each class's ``step``, which calls the hooks."""
ABSTRACT_STEP = getattr(Optimizer.step, "__wrapped__", Optimizer.step)
"""`Optimizer.step`, which raises, without the wrapper that an instance may have put on it."""
MOVES = 3
"""After how many steps of other optimizers there is a warning."""


class StepHooks(RemovableHandle):
    """Calls ``before`` and ``after`` around each step of ``optimizer``. With ``watch``, warns if
    that never steps, and others move its parameters.

    A `step` that calls the parent class's is one step, although torch calls hooks in both: it wraps
    the ``step`` of every class that was instantiated.
    """

    def __init__(self, optimizer: Optimizer, before: Hook, after: Hook, watch: bool) -> None:
        optimizer._patch_step_function()  # a wrapper class may have skipped Optimizer.__init__
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            if type(hooks := getattr(optimizer, name)) is dict:  # it has no weak references
                setattr(optimizer, name, OrderedDict(hooks))
        self._before, self._after = before, after
        self._base: int | None = None
        """How many of torch's wrappers were at work when this step began; None outside a step.
        Wrappers above it may raise, and the step go on. A newcomer takes steps inside ``before``.
        """
        self._handles = [
            optimizer.register_step_pre_hook(not_compiled(self._enter)),
            optimizer.register_step_post_hook(not_compiled(self._leave)),
        ]
        self._watch = [_warn_of_unseen_steps(optimizer)] if watch else []

    def _enter(self, optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        while self._watch:
            self._watch.pop().remove()
        at_work = _wrappers_at_work(optimizer)
        if self._base is not None and at_work > self._base:
            if has_closure(args, options):
                self._before(optimizer, args, options)  # perhaps the class's own closure
            return
        self._base = None
        self._before(optimizer, args, options)
        self._base = at_work

    def _leave(self, optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if _wrappers_at_work(optimizer) == self._base:
            self._base = None
            self._after(optimizer, args, options)

    def remove(self) -> None:
        """Call them no more."""
        for handle in (*self._handles, *self._watch):
            handle.remove()


def _wrappers_at_work(optimizer: Optimizer) -> int:
    """How many of torch's wrappers around ``optimizer``'s ``step`` are on this thread's stack."""
    count, frame = 0, sys._getframe()
    while frame is not None:
        if frame.f_code is WRAPPER and frame.f_locals.get("self") is optimizer:
            count += 1
        frame = frame.f_back  # type: ignore[assignment]
    return count


def _warn_of_unseen_steps(attached: Optimizer) -> RemovableHandle:
    """Warn if other optimizers move the parameters of ``attached``, until the handle is removed,
    with its first step."""
    own = {id(p) for group in attached.param_groups for p in group["params"]}
    name, alive, moves = type(attached).__name__, ref(attached), 0

    def on_step(optimizer: Optimizer, *_: Any) -> None:
        nonlocal moves
        if alive() is None:  # others may have the ids of its parameters
            return
        moves += any(id(p) in own for group in optimizer.param_groups for p in group["params"])
        if moves == MOVES:
            warnings.warn(
                f"the parameters move, and {name}.step() was never called: laconic communicates "
                "after each step() of the attached optimizer. Attach the optimizer whose step() "
                "the loop calls, or the one inside (SAM: base_optimizer)",
                stacklevel=2,
            )

    return register_optimizer_step_post_hook(not_compiled(on_step))


def check_steps(optimizer: Optimizer) -> None:
    """Raise ``ValueError`` if ``optimizer`` is none that laconic can follow."""
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}: attach "
            "the optimizer inside it"
        )
    if "_optimizer_step_pre_hooks" not in vars(optimizer):  # made by torch's __init__
        raise ValueError(
            f"{type(optimizer).__name__} has no hooks of torch's Optimizer, which run the rounds: "
            "attach the optimizer inside it, or have it call super().__init__(...)"
        )
    step = type(optimizer).step
    if getattr(step, "__wrapped__", step) is ABSTRACT_STEP:
        raise ValueError(
            f"{type(optimizer).__name__} has no step() of its own, after which laconic could "
            "communicate: attach the optimizer inside it, whose step() it calls"
        )
