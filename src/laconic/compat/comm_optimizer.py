"""CommOptimizer: an optimiser that communicates, around any torch optimiser."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.attach import claim
from laconic.compat.dist_optimizer import EASGD, LSGD, NO_STATS, DistOptimizer, Gradients
from laconic.engine.synchronizer import Stats, Synchronizer
from laconic.errors import TIMEOUT, check_choice, check_int
from laconic.links import Link

KEY = "communication"
"""Beside ``"state"`` and ``"param_groups"`` in the state_dict of a `CommOptimizer`."""


class CommOptimizer(Optimizer):
    """``optimizer``, each of whose steps is followed by what a `DistOptimizer` does.

    ``dist_optim_name``: ``"EASGD"``, ``"LSGD"``, ``"DDP"`` (gradients averaged during backward;
    the numbers below do not matter) or None (no communication); or a `DistOptimizer` class of your
    own. The other arguments are those of `DistOptimizer`, of `EASGD` and of `LSGD`.

    A torch optimiser in all respects. ``param_groups``, ``state`` and ``defaults`` are those of
    ``optimizer``, whichever of the two is scheduled or given more groups; step, unscale and load
    this one. Steps that a GradScaler skips are counted. A copy (deepcopy, pickle) joins the other
    ranks' copies by itself when it is stepped, and goes on as the original would have; under
    ``"DDP"`` call ``copy.dist_optimizer.join()`` before its first backward pass.

    Make it after loading the model's weights, and call `finish` at the end of training. ``sync`` is
    the `Synchronizer` at work, with more to ask for, as ``sync.no_sync()`` under ``"DDP"``.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves skipping to `step`

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
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, CommOptimizer):
            raise ValueError(
                f"optimizer must be a torch.optim.Optimizer, not wrapped yet, not {optimizer!r}"
            )
        check_int("world_size", world_size, 1)
        kind = _kind(dist_optim_name)
        numbers: tuple[Any, ...] = (local_pulling_strength, dist_pulling_strength, comm_period)
        if kind is Gradients:
            numbers = (0.0, 0.0, 1)
        self.optimizer = optimizer
        self._made = False  # torch's constructor adds groups, which the inner optimiser has
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._made, self._told = True, False
        self.dist_optimizer: DistOptimizer | None = None
        if kind is not None:
            self.dist_optimizer = kind(
                optimizer, world_size, *numbers, model=model, link=link, timeout=timeout
            )
            if self.dist_optimizer.sync is not None:
                claim(self, self.dist_optimizer.sync)

    @property
    def local_optimizer(self) -> Optimizer:
        """The inner optimiser, as the guide calls it."""
        return self.optimizer

    @property
    def sync(self) -> Synchronizer | None:
        """What runs the rounds; None without communication, and for a copy not stepped yet."""
        return None if self.dist_optimizer is None else self.dist_optimizer.sync

    # -- one step ----

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of the inner optimiser, and what follows it; returns ``closure``'s loss, which
        counts as reported unless `report_loss` was called for this step."""
        dist = self.dist_optimizer
        if dist is None or dist.detached:
            return self._local_step(closure)
        dist.join()
        loss = self._local_step(closure)
        if loss is not None and not self._told:
            dist.report_loss(loss)
        self._told = False
        dist.step()
        return loss

    def _local_step(self, closure: Callable[[], Any] | None) -> Any:
        """A GradScaler has set ``grad_scale`` (None where gradients are unscaled already) and
        ``found_inf`` if it calls."""
        inner: Any = self.optimizer
        found = getattr(self, "found_inf", None)
        if found is None:
            return inner.step() if closure is None else inner.step(closure)
        if closure is not None:
            raise ValueError("a closure cannot be used with a GradScaler: it is not unscaled")
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if float(found):
            return None
        if getattr(inner, "_step_supports_amp_scaling", False):  # a fused one
            inner.grad_scale, inner.found_inf = scale, found
            try:
                return inner.step()
            finally:
                del inner.grad_scale, inner.found_inf
        if scale is not None:
            scaler = torch.amp.GradScaler(scale.device.type, init_scale=float(scale))
            scaler.scale(scale)  # makes its own copy of the scale, on that device
            scaler.unscale_(inner)
        return inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    # -- the inner optimiser's groups and state ----

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimiser's."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        if self._made:
            self.optimizer.param_groups = value

    @property
    def state(self) -> Any:
        """The inner optimiser's."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        if self._made:
            self.optimizer.state = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the inner optimiser; the group joins with rank 0's values at the next step."""
        if self._made:
            self.optimizer.add_param_group(param_group)

    # -- saving ----

    def state_dict(self) -> dict[str, Any]:
        """The inner optimiser's, with this rank's communication state under ``"communication"``.
        Every rank saves its own; starts no communication."""
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
        """Put back what `state_dict` returned; every rank must call it, with its own, after loading
        the model's. A plain optimiser's is taken, too: communication then starts afresh, from rank
        0's parameters."""
        state = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state)
            state = state if changed is None else dict(changed)
        communication = state.pop(KEY, None)
        self.optimizer.load_state_dict(state)
        if self.dist_optimizer is None and communication is not None:
            warnings.warn(
                "the communication state is left out, as dist_optim_name is None", stacklevel=2
            )
        elif self.dist_optimizer is not None:
            if communication is None:
                warnings.warn(
                    "this is the state of an optimizer alone: communication starts afresh, with "
                    "rank 0's parameters on every rank",
                    stacklevel=2,
                )
            self.dist_optimizer.load_state_dict(communication)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        """All but torch's hooks, and ``step`` as a scheduler has wrapped it."""
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("step", "_zero_grad_profile_name")
            and not name.startswith("_optimizer_")
        }

    # -- for the user's loop ----

    def report_loss(self, loss: Tensor | float) -> None:
        """Tell the training loss of this step's batch, by which LSGD chooses the leader; before
        `step`. For others it does nothing."""
        if self.dist_optimizer is not None:
            self.dist_optimizer.report_loss(loss)
            self._told = True

    def finish(self) -> None:
        """Leave every worker with the consensus model; every rank must call it."""
        if self.dist_optimizer is not None:
            self.dist_optimizer.finish()

    def consensus(self) -> AbstractContextManager[None]:
        """A context in which the parameters hold the consensus weights, for validation; every rank
        must enter it. See `Synchronizer.consensus`."""
        return nullcontext() if self.dist_optimizer is None else self.dist_optimizer.consensus()

    def detach(self) -> None:
        """Communicate no more: steps are then the inner optimiser's alone."""
        if self.dist_optimizer is not None:
            self.dist_optimizer.detach()

    def stats(self) -> Stats:
        """Bytes, rounds and waiting so far, on this rank."""
        return NO_STATS if self.dist_optimizer is None else self.dist_optimizer.stats()


_KINDS: dict[str, type[DistOptimizer]] = {"EASGD": EASGD, "LSGD": LSGD, "DDP": Gradients}


def _kind(name: object) -> type[DistOptimizer] | None:
    if name is None or (isinstance(name, type) and issubclass(name, DistOptimizer)):
        return name
    return _KINDS[check_choice("dist_optim_name (or None)", name, _KINDS)]
