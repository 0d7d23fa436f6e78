"""CommOptimizer: a wrapper that adds communication to any torch optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.compat.dist_optimizer import EASGD, LSGD, NO_STATS, DistOptimizer, Gradients
from laconic.engine.attached import claim
from laconic.engine.recorder import Stats
from laconic.engine.synchronizer import Synchronizer
from laconic.errors import TIMEOUT, check_choice, check_int
from laconic.links import Link
from laconic.links.rank_sets import refused_by_all

KEY = "communication"
"""The key of the communication state in a `CommOptimizer`'s state_dict."""


class CommOptimizer(Optimizer):
    """Wrap ``optimizer``, and run a `DistOptimizer` after each of its steps.

    This is a torch optimizer in all respects. ``param_groups``, ``state``, and ``defaults`` are
    those of ``optimizer``, so you can schedule or add groups to either of the two. Step, unscale,
    and load this one. Steps that a GradScaler skips are counted. A copy (deepcopy, pickle) joins
    the other ranks' copies when it is first stepped, and continues as the original would have.
    Under ``"DDP"``, call ``copy.dist_optimizer.join()`` before the copy's first backward pass.

    Create it after loading the model's weights, and call `finish` at the end of training. ``sync``
    is the `Synchronizer`, which has further methods, such as ``sync.no_sync()`` for ``"DDP"``.

    Args:
        optimizer: the torch optimizer of this worker.
        dist_optim_name: ``"EASGD"``, ``"LSGD"``, ``"DDP"`` (gradients are averaged during
            backward), None (no communication), or your own `DistOptimizer` class. ``"DDP"`` and
            None use none of the three numbers. Calls that name an algorithm by a setting give them
            all the same, so a warning names those that differ from their defaults. None takes
            nothing of what follows them.
        world_size: the number of ranks, each of which is a worker.
        comm_period: local steps between rounds, at least 1. ``"EASGD"`` and ``"LSGD"`` need it.
        dist_pulling_strength: of the pull in a round: see `EASGD` and `LSGD`, which need it.
        local_pulling_strength: of the pull toward the center over one period, in [0, 1).
        model: the module, to average its floating-point buffers with the rounds. None: they stay
            each worker's own.
        link: a `Link` to use in place of torch's process group. None: that group.
        timeout: seconds after which a rank that does not answer is an error on all others.

    Examples:
        >>> optimizer = laconic.CommOptimizer(
        ...     optimizer, "EASGD", world_size=1, comm_period=4, dist_pulling_strength=0.9
        ... )
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.finish()
    """

    _step_supports_amp_scaling = True  # makes torch.amp.GradScaler leave skipping to `step`

    def __init__(
        self,
        optimizer: Optimizer,
        dist_optim_name: str | type[DistOptimizer] | None,
        world_size: int,
        comm_period: int | None = None,
        dist_pulling_strength: float | None = None,
        local_pulling_strength: float = 0.0,
        *,
        model: nn.Module | None = None,
        link: Link | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        alone = dist_optim_name is None  # then the other ranks do not wait for this one
        with nullcontext() if alone else refused_by_all(link, timeout):
            if not isinstance(optimizer, Optimizer) or isinstance(optimizer, CommOptimizer):
                raise ValueError(
                    "optimizer must be a torch.optim.Optimizer that is not a CommOptimizer, not "
                    f"{optimizer!r}"
                )
            check_int("world_size", world_size, 1)
            kind = _kind(dist_optim_name)
        numbers_given = {
            "comm_period": comm_period is not None,
            "dist_pulling_strength": dist_pulling_strength is not None,
            "local_pulling_strength": local_pulling_strength != 0.0,
        }
        if kind is None and (model is not None or link is not None or timeout != TIMEOUT):
            raise ValueError(
                "model, link and timeout have no effect with dist_optim_name=None: leave them out"
            )
        if kind in (None, Gradients) and any(numbers_given.values()):
            warnings.warn(
                f"these arguments have no effect with dist_optim_name={dist_optim_name!r}: "
                f"{', '.join(name for name, given in numbers_given.items() if given)}",
                stacklevel=2,
            )
        numbers: tuple[Any, ...] = (local_pulling_strength, dist_pulling_strength, comm_period)
        if kind is Gradients:
            numbers = (0.0, 0.0, 1)
        self.optimizer = optimizer
        self._made = False  # ignore the groups that torch's constructor adds: `optimizer` has them
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._made, self._loss_reported = True, False
        self.dist_optimizer: DistOptimizer | None = None
        if kind is not None:
            self.dist_optimizer = kind(
                optimizer, world_size, *numbers, model=model, link=link, timeout=timeout
            )
            if self.dist_optimizer.sync is not None:
                claim(self, self.dist_optimizer.sync)

    @property
    def local_optimizer(self) -> Optimizer:
        """The inner optimizer, under the name that SDTL's guide uses."""
        return self.optimizer

    @property
    def sync(self) -> Synchronizer | None:
        """The synchronizer. None without communication, and for a copy before its first step."""
        return None if self.dist_optimizer is None else self.dist_optimizer.sync

    # -- one step ----

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the inner optimizer and communicate. Return the loss of ``closure``.

        That loss counts as reported unless `report_loss` was called for this step.
        """
        dist = self.dist_optimizer
        if dist is None or dist.detached:
            return self._local_step(closure)
        dist.join()
        loss = self._local_step(closure)
        if loss is not None and not self._loss_reported:
            dist.report_loss(loss)
        self._loss_reported = False
        dist.step()
        return loss

    def _local_step(self, closure: Callable[[], Any] | None) -> Any:
        """Step the inner optimizer, for a GradScaler if one calls.

        The scaler has then set ``found_inf``, and ``grad_scale`` (None if gradients are already
        unscaled).
        """
        inner: Any = self.optimizer
        found = getattr(self, "found_inf", None)
        if found is None:
            return inner.step() if closure is None else inner.step(closure)
        if closure is not None:
            raise ValueError(
                "a GradScaler cannot unscale the gradients of a closure: call step() without one"
            )
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if float(found):
            return None
        if getattr(inner, "_step_supports_amp_scaling", False):  # a fused optimizer
            inner.grad_scale, inner.found_inf = scale, found
            try:
                return inner.step()
            finally:
                del inner.grad_scale, inner.found_inf
        if scale is not None:
            scaler = torch.amp.GradScaler(scale.device.type, init_scale=float(scale))
            scaler.scale(scale)  # makes the scaler copy the scale to this device
            scaler.unscale_(inner)
        return inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    # -- the inner optimizer's groups and state ----

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's parameter groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        if self._made:
            self.optimizer.param_groups = value

    @property
    def state(self) -> Any:
        """The inner optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        if self._made:
            self.optimizer.state = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer. It joins at the next step, with rank 0's values."""
        if self._made:
            self.optimizer.add_param_group(param_group)

    # -- saving ----

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, with the communication state added.

        The communication state is this rank's own, under ``"communication"``: every rank saves its
        own. Starts no communication.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = self.optimizer.state_dict()
        if self.dist_optimizer is not None:
            state[KEY] = self.dist_optimizer.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Every rank must call this with its own state, after loading the model's. The state of a
        plain optimizer is accepted, too. Communication then starts again from rank 0's parameters.
        """
        dist = self.dist_optimizer
        with nullcontext() if dist is None else dist.loading():
            state = dict(state_dict)
            for before in self._optimizer_load_state_dict_pre_hooks.values():
                changed = before(self, state)
                state = state if changed is None else dict(changed)
            communication = state.pop(KEY, None)
            self.optimizer.load_state_dict(state)
        if dist is None and communication is not None:
            warnings.warn(
                "dist_optim_name is None, so the communication state is ignored", stacklevel=2
            )
        elif self.dist_optimizer is not None:
            if communication is None:
                warnings.warn(
                    "this state has no communication state: communication starts again, with rank "
                    "0's parameters on every rank",
                    stacklevel=2,
                )
            self.dist_optimizer.load_state_dict(communication)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes except torch's hooks, and ``step`` as wrapped by a scheduler."""
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("step", "_zero_grad_profile_name")
            and not name.startswith("_optimizer_")
        }

    # -- for the user's loop ----

    def report_loss(self, loss: Tensor | float) -> None:
        """Report the training loss of this step's batch, before `step`.

        LSGD chooses its leader by it. Has no effect for other algorithms.
        """
        if self.dist_optimizer is not None:
            self.dist_optimizer.report_loss(loss)
            self._loss_reported = True

    def finish(self) -> None:
        """Leave every worker with the consensus model. Every rank must call it."""
        if self.dist_optimizer is not None:
            self.dist_optimizer.finish()

    def consensus(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters hold the consensus weights, for validation.

        Every rank must enter it. See `Synchronizer.consensus`.
        """
        return nullcontext() if self.dist_optimizer is None else self.dist_optimizer.consensus()

    def detach(self) -> None:
        """Stop communicating. Steps are then those of the inner optimizer alone."""
        if self.dist_optimizer is not None:
            self.dist_optimizer.detach()

    def stats(self) -> Stats:
        """Return the bytes, rounds, and waiting time so far, on this rank."""
        return NO_STATS if self.dist_optimizer is None else self.dist_optimizer.stats()


_KINDS: dict[str, type[DistOptimizer]] = {"EASGD": EASGD, "LSGD": LSGD, "DDP": Gradients}


def _kind(name: object) -> type[DistOptimizer] | None:
    if name is None or (isinstance(name, type) and issubclass(name, DistOptimizer)):
        return name
    return _KINDS[check_choice("dist_optim_name (or None)", name, _KINDS)]
