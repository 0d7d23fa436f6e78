"""CommOptimizer: SDTL's wrapper, which adds communication to any torch optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.algorithms import recipes
from laconic.algorithms.round import Recipe
from laconic.attach import attach
from laconic.engine.synchronizer import Synchronizer
from laconic.errors import TIMEOUT, check_choice, check_float, check_int
from laconic.links import Link
from laconic.links.rank_sets import refused_by_all
from laconic.links.simulated import current_link

KEY = "communication"
"""The key of the communication state in a `CommOptimizer`'s state_dict."""
HOOKS = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")


class CommOptimizer(Optimizer):
    """Wrap ``optimizer``, and communicate after each of its steps, as `laconic.attach` does.

    This is a torch optimizer in all respects. ``param_groups``, ``state``, and ``defaults`` are
    those of ``optimizer``, so you can step, schedule or add groups to either of the two. Save and
    load this one.

    Create it after loading the model's weights, and call `finish` at the end of training. ``sync``
    is the `Synchronizer`, which has further methods, such as ``sync.consensus()``; None without
    communication.

    Args:
        optimizer: the torch optimizer of this worker.
        dist_optim_name: ``"EASGD"`` (`laconic.easgd`), ``"LSGD"`` (`laconic.lsgd` with one global
            leader), ``"DDP"`` (`laconic.ddp`), or None (no communication). ``"DDP"`` and None use
            none of the three numbers. Calls that name an algorithm by a setting give them all the
            same, so a warning names those that differ from their defaults. None takes nothing of
            what follows them.
        world_size: the number of ranks, each of which is a worker.
        comm_period: local steps between rounds, at least 1: with 4, rounds follow steps 4, 8, 12.
            ``"EASGD"`` and ``"LSGD"`` need it.
        dist_pulling_strength: of the pull in a round, which they need, too. EASGD: in (0, 1], the
            fraction of its distance to the mean that the center moves. LSGD: in [0, 1), the
            fraction of its distance to the leader that a worker moves.
        local_pulling_strength: of the pull toward the center over one period, in [0, 1).
        model: the module, to average its floating-point buffers with the rounds. None: they stay
            each worker's own.
        scaler: the loop's GradScaler, so that steps that it skips are counted.
        link: a `Link` to use in place of torch's process group. None: that group.
        timeout: seconds after which a rank that does not answer is an error on all others.

    Raises ``ValueError`` on every rank for invalid arguments, and `laconic.LinkError` if a rank is
    lost.

    Examples:
        >>> optimizer = laconic.CommOptimizer(
        ...     optimizer, "EASGD", world_size=1, comm_period=4, dist_pulling_strength=0.9
        ... )
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.finish()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        dist_optim_name: str | None,
        world_size: int,
        comm_period: int | None = None,
        dist_pulling_strength: float | None = None,
        local_pulling_strength: float = 0.0,
        *,
        model: nn.Module | None = None,
        scaler: torch.amp.GradScaler | None = None,
        link: Link | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        alone = dist_optim_name is None  # then the other ranks do not wait for this one
        if alone and ((model, scaler, link) != (None, None, None) or timeout != TIMEOUT):
            raise ValueError(
                "model, scaler, link and timeout have no effect with dist_optim_name=None: leave "
                "them out"
            )
        with nullcontext() if alone else refused_by_all(link, timeout):
            if not isinstance(optimizer, Optimizer) or isinstance(optimizer, CommOptimizer):
                raise ValueError(
                    "optimizer must be a torch.optim.Optimizer that is not a CommOptimizer, not "
                    f"{optimizer!r}"
                )
            check_int("world_size", world_size, 1)
            numbers: dict[str, Any] = {
                "comm_period": comm_period,
                "dist_pulling_strength": dist_pulling_strength,
                "local_pulling_strength": local_pulling_strength,
            }
            recipe = _recipe(dist_optim_name, **numbers)
            if recipe is not None:
                _check_ranks(world_size, link)
            if model is None:
                model = nn.ParameterList(p for g in optimizer.param_groups for p in g["params"])
        unused = [name for name, given in numbers.items() if given]
        if dist_optim_name in (None, "DDP") and unused:
            warnings.warn(
                f"these arguments have no effect with dist_optim_name={dist_optim_name!r}: "
                f"{', '.join(unused)}",
                stacklevel=2,
            )
        self.sync: Synchronizer | None = None
        if recipe is not None:
            self.sync = attach(model, optimizer, recipe, scaler=scaler, link=link, timeout=timeout)
        self.optimizer = optimizer
        self._made = False  # ignore the groups that torch's constructor adds: `optimizer` has them
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._made = True
        for kind in HOOKS:  # the inner optimizer calls them
            name = f"_optimizer_{kind}_hooks"
            setattr(self, name, getattr(optimizer, name))

    @property
    def local_optimizer(self) -> Optimizer:
        """The inner optimizer, under the name that SDTL's guide uses."""
        return self.optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the inner optimizer and communicate. Return the loss of ``closure``."""
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

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
        communication = {} if self.sync is None else {KEY: self.sync.state_dict()}
        return {**self.optimizer.state_dict(), **communication}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Every rank must call this with its own state, after loading the model's.
        """
        if self.sync is None:
            self.optimizer.load_state_dict(dict(state_dict))
            return
        with self.sync.driver.session.checked("load_state_dict()", 0):
            state = dict(state_dict)
            if KEY not in state:
                raise ValueError(
                    "this state has no communication state: load the state of a plain optimizer "
                    "before wrapping it"
                )
            communication = state.pop(KEY)
            self.optimizer.load_state_dict(state)
        self.sync.load_state_dict(communication)

    def parts_to_save(self) -> tuple[Optimizer, Synchronizer | None]:
        """Return what `laconic.save` stores in the place of this optimizer."""
        return self.optimizer, self.sync

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "CommOptimizer holds connections, so it cannot be copied or pickled: save with "
            "laconic.save or state_dict() on every rank"
        )

    # -- for the user's loop ----

    def report_loss(self, loss: Tensor | float) -> None:
        """Report the training loss of this step's batch, before `step`.

        LSGD chooses its leader by it. Has no effect for other algorithms.
        """
        if self.sync is not None:
            self.sync.report_loss(loss)

    def finish(self) -> None:
        """Leave every worker with the consensus model. Every rank must call it."""
        if self.sync is not None:
            self.sync.finish()


def _check_ranks(world_size: int, link: Link | None) -> None:
    if isinstance(link, str):  # a choice of `attach`
        raise ValueError(f"link must be a laconic.links.Link or None, not {link!r}")
    here = current_link.get() if link is None else link
    size = getattr(here, "size", dist.get_world_size() if dist.is_initialized() else world_size)
    if world_size != size:
        raise ValueError(f"world_size must be the number of ranks, {size}, not {world_size}")


def _recipe(
    name: str | None,
    comm_period: Any,
    dist_pulling_strength: Any,
    local_pulling_strength: float,
) -> Recipe | None:
    """Return the rounds that SDTL's arguments mean; None: nothing is communicated."""
    if name is None:
        return None
    check_choice("dist_optim_name (or None)", name, ("EASGD", "LSGD", "DDP"))
    if name == "DDP":
        return recipes.ddp()
    period = check_int("comm_period", comm_period, 1)
    pull = check_float("local_pulling_strength", local_pulling_strength, 0.0, 1.0)
    if name == "EASGD":
        c = check_float("dist_pulling_strength", dist_pulling_strength, 0.0, strict=True, most=1.0)
        return recipes.easgd(period, c, pull=pull)
    c = check_float("dist_pulling_strength", dist_pulling_strength, 0.0, 1.0)
    return recipes.lsgd(period, local_period=0, pull=c, drift=pull)
