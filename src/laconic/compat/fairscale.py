"""SlowMoDistributedDataParallel: fairscale's wrapper, implemented by laconic's rounds."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from laconic.compat.gossip_graphs import GraphManager, UniformMixing
from laconic.compat.slowmo_arguments import LOCAL, SHARDS, SLOW, Arguments, SlowMoBaseAlgorithm
from laconic.compat.slowmo_binding import FP32, Binding, copy
from laconic.compat.state_keys import with_prefix, without_prefix
from laconic.engine.driver import Driver
from laconic.engine.recorder import Stats
from laconic.engine.session import Settings
from laconic.engine.synchronizer import Synchronizer
from laconic.errors import TIMEOUT
from laconic.links.agreement import on_all_ranks
from laconic.links.rank_sets import agreed_link, layout_of, refused_by_all, sets_of

FIXED = {field.name for field in fields(Arguments)} - {"module"}
"""The arguments that are readable as attributes of the wrapper."""


class SlowMoDistributedDataParallel(nn.Module):
    """Data-parallel training with little communication between nodes: SlowMo over local SGD or SGP.

    Wang et al., ICLR 2020, arXiv 1910.00643, Algorithm 1. The signature is fairscale's, so users
    change only the import. After ``optimizer.step()`` call `perform_slowmo`. With n the number of
    its calls, counted from 1:

        backward:                     g <- mean of g over the node's ranks, while backward runs
        n % localsgd_frequency == 0:  x <- mean(x) over nodes      (SGP: one gossip at every call)
        n % slowmo_frequency == 0:    u <- slowmo_momentum*u + (a - mean(x))/lr
                                      a <- a - slowmo_lr*lr*u ;  x <- a

    lr is the current learning rate of the parameter's group. a is the last common x. It starts as
    rank 0's parameters, which the constructor broadcasts. If both rounds are due, only the slow
    step runs, because it averages exactly. ``slowmo_momentum=0, slowmo_lr=1`` disable it.

    Arguments without an effect, such as ``push_sum=False`` without SGP, are ignored, so that calls
    written for fairscale keep working; a warning names them.

    Args:
        module: the module to train.
        nprocs_per_node: ranks per node, the same on every node.
        broadcast_buffers: average the module's floating-point buffers with the rounds (fairscale
            broadcasts them in every forward pass).
        slowmo_base_algorithm: a `SlowMoBaseAlgorithm`, ``"localsgd"``, or ``"sgp"``.
        slowmo_momentum: of the slow steps, in [0, 1).
        slowmo_memory_efficient: shard the slow step's state, two float32 numbers per parameter.
        slowmo_frequency: calls between slow steps, at least 1.
        slowmo_lr: the slow learning rate, above 0.
        slowmo_num_shards: has no effect: that state is sharded over all ranks.
        localsgd_frequency: calls between averages of local SGD, at least 1.
        graph: for SGP: a `GraphManager`. None: `NPeerDynamicDirectedExponentialGraph`.
        mixing: for SGP: a `UniformMixing`. None: the graph's own.
        push_sum: for SGP: gossip with push weights. False: without, on regular graphs.
        overlap: for SGP: send messages while training continues, and fold them in max(1,
            ``synch_freq``) calls later; this is then also the number of calls between messages.
        synch_freq: see ``overlap``.
        use_streams: has no effect.
        slowmo_sgp_average_params: for SGP: average exactly in the slow step even without
            slowmo_memory_efficient. False: each node takes the slow step from its own x
            (SGP-SlowMo-noaverage).
        verbose: has no effect: ``synchronizer.record`` writes what happens.
        profile_mode: has no effect: ``synchronizer.calls`` has the time of each collective.
        process_rank: checked against the rank that laconic finds, unless None.
        process_world_size: checked against the number of ranks that laconic finds, unless None.
        global_group: its size is checked, unless None. laconic creates its own process groups.
        master_group: the same.
        local_node_group: the same.
        comm_device: must be the parameters' device, unless None.
        timeout: laconic's own: seconds after which a rank that does not answer is an error on all
            others.

    When to use it, and how to set it (fairscale's guide; ``docs/slowmo.md`` has the reasons): use
    it on more than two nodes with a slow network, where ``t_allreduce * (1 - 1/localsgd_frequency)
    > t_backward`` (in full ``t_allreduce > t_backward + t_allreduce/localsgd_frequency``; with SGP
    use 2 for localsgd_frequency). ``slowmo_momentum`` grows with the number of nodes: 0 below 4,
    0.2 for 4, 0.5 for 8, 0.6 for 16; tune it over {0, 0.1, 0.2, 0.4, 0.6}. Keep localsgd_frequency
    at 3 and slowmo_frequency a multiple of it. Use slowmo_memory_efficient with local SGD, but not
    with SGP.

    Raises ``ValueError`` on every rank for invalid arguments, and `laconic.LinkError` if a rank is
    lost.

    Examples:
        >>> net = laconic.SlowMoDistributedDataParallel(model, nprocs_per_node=1)
        >>> net(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> net.perform_slowmo(optimizer)
        >>> net.num_updates
        1
    """

    def __init__(
        self,
        module: nn.Module,
        nprocs_per_node: int,
        broadcast_buffers: bool = True,
        slowmo_base_algorithm: SlowMoBaseAlgorithm = SlowMoBaseAlgorithm.LOCALSGD,
        slowmo_momentum: float = 0.5,
        slowmo_memory_efficient: bool = True,
        slowmo_frequency: int = SLOW,
        slowmo_lr: float = 1.0,
        slowmo_num_shards: int = SHARDS,
        localsgd_frequency: int = LOCAL,
        graph: GraphManager | None = None,
        mixing: UniformMixing | None = None,
        push_sum: bool = True,
        overlap: bool = False,
        synch_freq: int = 0,
        use_streams: bool = True,
        slowmo_sgp_average_params: bool = False,
        verbose: bool = False,
        profile_mode: bool = False,
        process_rank: int | None = None,
        process_world_size: int | None = None,
        global_group: dist.ProcessGroup | None = None,
        master_group: dist.ProcessGroup | None = None,
        local_node_group: dist.ProcessGroup | None = None,
        comm_device: torch.device | str | None = None,
        *,
        timeout: float = TIMEOUT,
    ) -> None:
        arguments = dict(locals())
        super().__init__()
        with refused_by_all(None, timeout):
            given = Arguments.of(arguments)
        device = next(module.parameters()).device
        world = agreed_link(None, device, timeout)
        layout = layout_of(world, nprocs_per_node, None, [])
        nodes = len(layout)
        with on_all_ranks(world.gather):
            given.check_ranks(world, nodes)
            recipe = given.recipe(world.rank // nprocs_per_node, nodes)
            given.warn(nodes)
        self.module = module
        vars(self).update({name: getattr(given, name) for name in FIXED})
        vars(self)["slowmo_num_shards"] = world.size if slowmo_memory_efficient else 1
        sets = sets_of(world, layout, None, False, device, timeout)
        settings = Settings(
            "average" if broadcast_buffers else "keep", lambda recipe: recipe, hooked=False
        )
        self._driver = Driver(module, None, recipe, sets, settings)
        self._sync = Synchronizer(self._driver)
        weakref.finalize(self, self._sync.detach).atexit = False
        self._binding = Binding(module, self._sync, device)
        self._detached = False
        self.register_state_dict_post_hook(without_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(with_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_loaded)  # type: ignore[no-untyped-call]

    # -- training ----

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's own forward pass. Never communicates."""
        if self._driver.session.optimizer is None:
            self._binding.note_versions()
        return self.module(*inputs, **kwargs)

    @torch.no_grad()
    def perform_slowmo(self, optimizer: Optimizer, fp32_params: FP32 = None) -> None:
        """Run the base algorithm and the slow step, if they are due.

        Call it on every rank after every ``optimizer.step()``. Call ``zero_grad(set_to_none=True)``
        first, so that it can use the memory of the gradients. One optimizer updates the whole
        module. Another optimizer over the same parameters may replace it at any time.

        ``fp32_params``: the float32 masters of a half-precision module, if the optimizer updates
        these instead of the module's parameters. Pass one flat tensor, a list of one tensor per
        parameter, or a dict with one such entry, in the order of ``module.parameters()`` and
        sharing storage with the optimizer's parameters. Averages of local SGD are then sent in the
        module's precision, if all its parameters have the same, and rounding errors stay in the
        masters. Gossip and slow steps are sent in float32. Afterwards the masters are copied to the
        module.
        """
        if self._detached:
            return
        self._binding.follow(optimizer, fp32_params)
        self._driver.advance()
        self._binding.copy_masters()

    @torch.no_grad()
    def bind(self, optimizer: Optimizer, fp32_params: FP32 = None) -> None:
        """Name the optimizer before its first step. Every rank must call it.

        `perform_slowmo` usually finds the optimizer by itself. Call this if you resume a run with
        gossip on uneven graphs or with overlap, and the optimizer updates masters.
        """
        self._binding.note_versions()
        self._binding.follow(optimizer, fp32_params)

    # -- state ----

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIXED:
            raise AttributeError(
                f"{name} is fixed when the module is wrapped: to change it, call detach() and wrap "
                "the module again"
            )
        super().__setattr__(name, value)

    @property
    def synchronizer(self) -> Synchronizer:
        """The synchronizer, for metrics."""
        return self._sync

    @property
    def num_updates(self) -> int:
        """Number of calls of `perform_slowmo` so far."""
        waiting = self._binding.waiting
        return self._sync.step if waiting is None else int(waiting["step"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "SlowMoDistributedDataParallel holds connections, so it cannot be copied or pickled: "
            "copy or pickle model.module, and save with laconic.save or model.state_dict() on "
            "every rank"
        )

    def get_extra_state(self) -> Mapping[str, Any]:
        """Return SlowMo's own state on this rank.

        `state_dict` stores it next to the module's state, whose keys are those without the wrapper.
        Does not communicate. Every rank saves its own.
        """
        if self._driver.session.optimizer is None:
            return {"slowmo": self._binding.waiting}
        return {"slowmo": self._sync.state_dict()}

    def set_extra_state(self, state: Mapping[str, Any] | None) -> None:
        """Store what `get_extra_state` returned until the module's own state is loaded."""
        if state is not None and "slowmo" not in state:
            raise ValueError(f"this is not what get_extra_state() returned: {list(state)}")
        self._binding.waiting = None if state is None else state["slowmo"]
        if self._binding.waiting is None and self._driver.session.optimizer is not None:
            raise ValueError(
                "this checkpoint has no SlowMo state, and training has already started: to start "
                "over from other weights, call detach() and wrap the module again"
            )
        if state is None:
            warnings.warn(
                "the state has no SlowMo state: counters, anchor, and momentum start again from "
                "these weights, which must be the same on every rank",
                stacklevel=2,
            )

    def parts_to_save(self) -> tuple[nn.Module, Synchronizer]:
        """Return what `laconic.save` stores in the place of this wrapper."""
        return self.module, self._sync

    # -- for the user's loop ----

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context that accumulates gradients. See `Synchronizer.no_sync`."""
        return self._sync.no_sync()

    @contextmanager
    def consensus(self) -> Iterator[nn.Module]:
        """Return a context in which the module holds the mean of all ranks' parameters.

        Use it for validation between slow steps, when nodes differ. Every rank must enter it.
        """
        saved = [p.detach().clone() for p, _ in self._binding.masters]
        with self._sync.consensus() as module:
            self._binding.copy_masters()
            try:
                yield module
            finally:
                params = [p for p, _ in self._binding.masters]
                copy(list(zip(params, saved, strict=True)))

    @torch.no_grad()
    def finish(self) -> None:
        """Leave every rank with the mean of all ranks' parameters. Every rank must call it.

        After a slow step, the parameters already are this mean.
        """
        self._sync.finish()
        self._binding.copy_masters()

    @torch.no_grad()
    def copy_masters(self) -> None:
        """Copy the float32 masters, if there are any, to the module."""
        self._binding.copy_masters()

    def detach(self) -> None:
        """Stop averaging: `perform_slowmo` then does nothing. Does not communicate."""
        self._detached = True
        self._binding.end()
        self._sync.detach()

    def stats(self) -> Stats:
        """Return counters of this rank. See `Synchronizer.stats`."""
        return self._sync.stats()


def _loaded(wrapper: nn.Module, _: object) -> None:
    assert isinstance(wrapper, SlowMoDistributedDataParallel)
    wrapper._binding.restore()
