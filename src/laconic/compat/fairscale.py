"""SlowMoDistributedDataParallel: fairscale's wrapper, implemented by laconic's rounds."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from laconic.algorithms import recipes
from laconic.algorithms.compile import within_workers
from laconic.algorithms.exchanges import Mean, Push, ShardedMean
from laconic.algorithms.round import NamedRecipe, Recipe, Round, unchanged
from laconic.algorithms.schedules import every
from laconic.algorithms.topology import Graph
from laconic.algorithms.updates import Average, Mix, PushSum, Replace, RoundedAverage
from laconic.attach import check_free, claim, release
from laconic.buckets import is_sharded, module_buffers, sums
from laconic.compat.gossip_graphs import (
    GraphManager,
    NPeerDynamicDirectedExponentialGraph,
    UniformMixing,
)
from laconic.compat.profile import LogLines, Profile
from laconic.engine.driver import Driver
from laconic.engine.model_checks import check_devices, check_unwrapped
from laconic.engine.saved_state import WRAPPER
from laconic.engine.session import Settings
from laconic.engine.synchronizer import Stats, Synchronizer
from laconic.errors import TIMEOUT, check_bool, check_float, check_int
from laconic.links import Link
from laconic.links.agreement import agree
from laconic.links.rank_sets import layout_of, own_link, sets_of

EXTRA = "_extra_state"
HALF = (torch.float16, torch.bfloat16)
SETTINGS = (
    "nprocs_per_node",
    "slowmo_base_algorithm",
    "slowmo_momentum",
    "slowmo_lr",
    "slowmo_memory_efficient",
    "slowmo_frequency",
    "slowmo_num_shards",
    "localsgd_frequency",
    "slowmo_sgp_average_params",
)
T = TypeVar("T")
FP32 = Tensor | Sequence[Tensor] | Mapping[Any, Any] | None


class SlowMoBaseAlgorithm(str, Enum):
    """The algorithm that averages approximately between slow steps."""

    LOCALSGD = "localsgd"
    SGP = "sgp"


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

    ``module``: the module to train. ``nprocs_per_node``: ranks per node, the same on every node.
    ``broadcast_buffers``: average the module's floating-point buffers with the rounds (fairscale
    broadcasts them in every forward pass). ``slowmo_base_algorithm``: a `SlowMoBaseAlgorithm`.
    ``slowmo_memory_efficient``: shard the slow step's state, two float32 numbers per parameter,
    over ``slowmo_num_shards`` ranks (all, if there are fewer; rounded up to a multiple of
    nprocs_per_node). ``localsgd_frequency``: calls between averages of local SGD.

    For SGP: ``graph``, ``mixing``: see `GraphManager`, `UniformMixing`. ``push_sum=False``: gossip
    without push weights, on regular graphs. ``overlap``: send messages while training continues,
    and fold them in max(1, ``synch_freq``) calls later; this is then also the number of calls
    between messages. ``slowmo_sgp_average_params``: average exactly in the slow step even without
    slowmo_memory_efficient. Otherwise each node takes the slow step from its own x
    (SGP-SlowMo-noaverage).

    ``verbose``: write a line of JSON for every call to the logger ``laconic.slowmo``.
    ``profile_mode``: after every slowmo_frequency calls, rank 0 prints where the time went, and
    every rank writes a torch profiler trace of the calls up to the second slow step to the current
    directory. ``process_rank``, ``process_world_size``, and the sizes of the groups are checked
    against the values that laconic finds; laconic creates its own process groups. ``comm_device``
    must be the parameters' device. ``use_streams`` has no effect.

    When to use it, and how to set it (fairscale's guide; ``docs/slowmo.md`` has the reasons): use
    it on more than two nodes with a slow network, where ``t_allreduce * (1 - 1/localsgd_frequency)
    > t_backward`` (in full ``t_allreduce > t_backward + t_allreduce/localsgd_frequency``; with SGP
    use 2 for localsgd_frequency). ``slowmo_momentum`` grows with the number of nodes: 0 below 4,
    0.2 for 4, 0.5 for 8, 0.6 for 16; tune it over {0, 0.1, 0.2, 0.4, 0.6}. Keep localsgd_frequency
    at 3 and slowmo_frequency a multiple of it. Use slowmo_memory_efficient with local SGD, but not
    with SGP.

    Raises ``ValueError`` on every rank for invalid arguments, and `laconic.LinkError` if a rank is
    lost.
    """

    def __init__(
        self,
        module: nn.Module,
        nprocs_per_node: int,
        broadcast_buffers: bool = True,
        slowmo_base_algorithm: SlowMoBaseAlgorithm = SlowMoBaseAlgorithm.LOCALSGD,
        slowmo_momentum: float = 0.5,
        slowmo_memory_efficient: bool = True,
        slowmo_frequency: int = 48,
        slowmo_lr: float = 1.0,
        slowmo_num_shards: int = 32,
        localsgd_frequency: int = 3,
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
    ) -> None:
        super().__init__()
        switches = {
            "broadcast_buffers": broadcast_buffers,
            "slowmo_memory_efficient": slowmo_memory_efficient,
            "push_sum": push_sum,
            "overlap": overlap,
            "use_streams": use_streams,
            "slowmo_sgp_average_params": slowmo_sgp_average_params,
            "verbose": verbose,
            "profile_mode": profile_mode,
        }
        for name, value in switches.items():
            check_bool(name, value)
        device = _device_of(module, comm_device)
        self.module = module
        self.nprocs_per_node = nprocs_per_node
        self.slowmo_base_algorithm = _base_algorithm(slowmo_base_algorithm)
        self.slowmo_momentum = check_float("slowmo_momentum", slowmo_momentum, 0.0, 1.0)
        self.slowmo_lr = check_float("slowmo_lr", slowmo_lr, 0.0, strict=True)
        self.slowmo_memory_efficient = slowmo_memory_efficient
        self.slowmo_frequency = check_int("slowmo_frequency", slowmo_frequency, 1)
        self.localsgd_frequency = check_int("localsgd_frequency", localsgd_frequency, 1)
        self.slowmo_sgp_average_params = slowmo_sgp_average_params
        check_int("slowmo_num_shards", slowmo_num_shards, 1)
        check_int("synch_freq", synch_freq, 0)
        world = own_link(device, TIMEOUT)
        _on_all_ranks(world, lambda: _check_module(module))
        layout = layout_of(world, nprocs_per_node, None, [])
        expected = {
            "process_rank": (process_rank, world.rank),
            "process_world_size": (process_world_size, world.size),
            "the size of global_group": (_size_of(global_group), world.size),
            "the size of master_group": (_size_of(master_group), len(layout)),
            "the size of local_node_group": (_size_of(local_node_group), nprocs_per_node),
        }
        _on_all_ranks(world, lambda: _check_expected(expected))
        nodes = len(layout)
        # slices are per node, because each rank of a node owns a part of the node's slice
        owners = -(-slowmo_num_shards // nprocs_per_node) if slowmo_memory_efficient else None
        self.slowmo_num_shards = min(owners, nodes) * nprocs_per_node if owners else 1
        node = world.rank // nprocs_per_node
        manager = _on_all_ranks(world, lambda: _graph(graph, mixing, node, nodes))
        if self.slowmo_base_algorithm is SlowMoBaseAlgorithm.SGP:
            base = _gossip(manager, push_sum, overlap, synch_freq)
        else:
            if overlap:
                raise ValueError(
                    "overlap=True needs slowmo_base_algorithm=SlowMoBaseAlgorithm.SGP; local SGD "
                    "overlaps with laconic.attach(..., laconic.local_sgd(period, delay=...))"
                )
            base = (Round(every(localsgd_frequency), _average(module), Mean()),)
        rounds = self._rounds(base if nodes > 1 else (), owners)
        if nodes == 1 and broadcast_buffers and module_buffers(module)[0]:
            together = Round(
                every(localsgd_frequency), Replace(), Mean(), module_buffers, over="world"
            )
            rounds = (together, *rounds)
        if nprocs_per_node > 1:
            rounds = (*within_workers(rounds), *rounds)
        sgp = self.slowmo_base_algorithm is SlowMoBaseAlgorithm.SGP
        idle = {
            "use_streams=False": not use_streams,
            "synch_freq (only for overlap=True)": synch_freq > 0 and not overlap,
            "graph, mixing (only for SGP)": not sgp and (graph or mixing) is not None,
        }
        self._warn(nodes, [name for name, unused in idle.items() if unused])
        sets = sets_of(world, layout, None, False)
        rounds = NamedRecipe(rounds, self._text())
        settings = Settings(broadcast_buffers, unchanged, hooked=False)
        self._driver = Driver(module, None, rounds, sets, device, settings)
        self._sync = Synchronizer(self._driver)
        weakref.finalize(self, self._sync.detach).atexit = False
        self._device = device
        self._binding_finished = self._detached = False
        self._problem: str | None = None
        self._common_start: Tensor | None = None
        self._fp32: FP32 = None
        self._masters: list[tuple[Tensor, Tensor]] = []
        self._loaded: Mapping[str, Any] | None = None
        self._foreign: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._before_step: weakref.WeakKeyDictionary[Optimizer, list[Tensor]] = (
            weakref.WeakKeyDictionary()
        )
        self._seen_version = self._versions()
        self._profile: Profile | None = None
        if profile_mode:
            self._profile = Profile(self._sync, world.rank, slowmo_frequency, world.threaded)
        if verbose:
            self._sync.record([LogLines()])
        self.register_state_dict_post_hook(_without_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_with_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_loaded)  # type: ignore[no-untyped-call]
        _wrappers.add(self)
        _watch_optimizers()

    # -- the recipe ----

    @property
    def _slow_step_on(self) -> bool:
        return (self.slowmo_momentum, self.slowmo_lr) != (0.0, 1.0)

    def _text(self) -> str:
        """Return the recipe's name for messages: the settings that define it."""
        names = ["slowmo_momentum", "slowmo_frequency", "slowmo_lr"]
        if self.slowmo_base_algorithm is SlowMoBaseAlgorithm.LOCALSGD:
            names.append("localsgd_frequency")
        base = f"slowmo_base_algorithm={self.slowmo_base_algorithm.value!r}"
        settings = [base, *(f"{name}={getattr(self, name)}" for name in names)]
        return f"{WRAPPER}{', '.join(settings)})"

    def _rounds(self, base: Recipe, owners: int | None) -> Recipe:
        """Add the slow step to ``base``. It replaces rounds of ``base`` if it averages exactly.

        ``owners``: the number of nodes that store the slow step's state; None: all of them.
        """
        if not self._slow_step_on:
            return base
        local = self.slowmo_base_algorithm is SlowMoBaseAlgorithm.LOCALSGD
        average = local or owners is not None or self.slowmo_sgp_average_params or not base
        period, momentum, lr = self.slowmo_frequency, self.slowmo_momentum, self.slowmo_lr
        sharded = owners is not None
        *skipped, slow = recipes.slowmo(
            base, period, momentum, lr, sharded=sharded, average=average
        )
        if sharded:
            slow = replace(slow, exchange=ShardedMean(owners))
        return (*(skipped if average else base), slow)

    def _warn(self, nodes: int, idle: Sequence[str]) -> None:
        local = self.slowmo_base_algorithm is SlowMoBaseAlgorithm.LOCALSGD
        slow_over_base = self._slow_step_on and nodes > 1
        uneven = self.slowmo_frequency % self.localsgd_frequency != 0
        if nodes == 1:
            warnings.warn(
                "there is one node only: the base algorithm is off, because its ranks average "
                f"gradients anyway; the slow step is {'on' if self._slow_step_on else 'off'}",
                stacklevel=3,
            )
        if slow_over_base and local and uneven:
            warnings.warn(
                f"slowmo_frequency={self.slowmo_frequency} is not a multiple of localsgd_frequency="
                f"{self.localsgd_frequency}: the distances between averages are uneven",
                stacklevel=3,
            )
        if slow_over_base and not local and self.slowmo_memory_efficient:
            warnings.warn(
                "slowmo_memory_efficient=True sends an all-reduce at every slow step of SGP; False "
                "sends none, and stores two float32 numbers per parameter on every rank",
                stacklevel=3,
            )
        if idle:
            warnings.warn(f"these arguments have no effect: {', '.join(idle)}", stacklevel=3)

    # -- training ----

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's own forward pass. Never communicates."""
        if self._driver.bound is None:
            self._seen_version = self._versions()
        if self._profile is None:
            return self.module(*inputs, **kwargs)
        with self._profile.part("forward"):
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
        self._identify(optimizer, fp32_params)
        if not self._binding_finished:
            self._finish_binding()
        if self._profile is None:
            self._driver.advance()
        else:
            self._profile.call(self._driver.advance)
        _copy(self._masters)

    @torch.no_grad()
    def bind(self, optimizer: Optimizer, fp32_params: FP32 = None) -> None:
        """Name the optimizer before its first step. Every rank must call it.

        `perform_slowmo` usually finds the optimizer by itself. Call this if you resume a run with
        gossip on uneven graphs or with overlap, and the optimizer updates masters.
        """
        self._seen_version = self._versions()
        self._identify(optimizer, fp32_params)
        if not self._binding_finished:
            self._finish_binding()

    def _identify(self, optimizer: Optimizer, fp32_params: FP32) -> None:
        """Bind to ``optimizer``, or check that it is the bound one."""
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                "optimizer must be a torch.optim.Optimizer, or the one inside a wrapper, not "
                f"{type(optimizer).__name__}"
            )
        if fp32_params is not None and fp32_params is not self._fp32:
            self._masters = _pairs(list(self.module.parameters()), fp32_params)
            self._fp32 = fp32_params
            held = [p for group in optimizer.param_groups for p in group["params"]]
            storages = {p.untyped_storage().data_ptr() for p in held}
            if any(m.untyped_storage().data_ptr() not in storages for _, m in self._masters):
                self._masters, self._fp32 = [], None
                raise ValueError("fp32_params must share storage with the optimizer's parameters")
        if not self._masters and not self._holds(optimizer):
            raise ValueError(
                "the optimizer holds none of the module's parameters: if it updates float32 "
                "copies of them, pass these as fp32_params="
            )
        bound = self._driver.bound
        if bound is None:
            self._bind_moved(optimizer)
        elif optimizer is not bound and not _same_parameters(optimizer, bound):
            raise ValueError(
                "perform_slowmo was given another optimizer than the one that moved the module's "
                "parameters first: use one optimizer for all of them, with the same groups"
            )
        elif optimizer is not bound and not _same_groups(optimizer, bound):
            self._follow(optimizer)

    def _bind(self, optimizer: Optimizer) -> None:
        """Bind to an optimizer that has not changed x since the start (or since x was loaded).

        Does not communicate: the optimizer may be about to step, and ranks whose GradScaler skips
        that step are not here.
        """
        try:
            check_free(optimizer)
        except ValueError:
            raise ValueError(
                "this optimizer is attached already: one optimizer moves one wrapped module. Wrap "
                "a module that contains both, or first call detach() on the other wrapper"
            ) from None
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if any(p.device != self._device for p in held):
            raise ValueError(
                f"the module was on {self._device} when it was wrapped: move it before wrapping it"
            )
        self._before_step.clear()
        self._driver.bind(optimizer)
        claim(optimizer, self._sync)
        if self._loaded is not None:
            self._problem, self._loaded = self._driver.load_here(self._loaded), None
        else:
            self._common_start = sums(held)

    def _follow(self, optimizer: Optimizer) -> None:
        """Replace the bound optimizer by another one over the same parameters."""
        check_free(optimizer)
        assert self._driver.bound is not None
        release(self._driver.bound)
        self._driver.follow(optimizer)
        claim(optimizer, self._sync)

    def _finish_binding(self) -> None:
        """Finish binding, with checks that need all ranks to be here."""
        self._binding_finished = True
        self._driver.agree_on_binding(self._common_start, self._problem)
        bound = self._driver.bound
        assert bound is not None, "an optimizer must be bound first"
        held = [p for group in bound.param_groups for p in group["params"]]
        known = {id(p) for p in held}
        own = [p for p in self.module.parameters() if p.requires_grad]
        missing = sum(id(p) not in known for p in own)
        if missing and not self._masters:
            warnings.warn(
                f"{missing} trainable parameters of the module are not in the optimizer, so they "
                "are not averaged",
                stacklevel=2,
            )
        if not self._masters and any(p.dtype == torch.float16 for p in held):
            warnings.warn(
                "the optimizer updates float16 parameters: to lose less precision, use float32 "
                "masters and pass them as fp32_params=",
                stacklevel=2,
            )

    def _bind_moved(self, optimizer: Optimizer) -> None:
        """Bind to an optimizer whose step on the module's own parameters was not observed.

        The step was skipped, or it changed masters. In that case their start was saved.
        """
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if not self._masters and self._versions() != self._seen_version:
            raise ValueError(
                "the module's parameters have changed, and no step of this optimizer was seen: its "
                "class must call torch.optim.Optimizer's __init__, and its step() must run hooks"
            )
        start = self._before_step.pop(optimizer, None)
        moved = [p.clone() for p in held]
        for p, values in zip(held, start or moved, strict=True):
            p.copy_(values)
        self._bind(optimizer)
        if start is None:
            return
        if self._driver.run.reweighted:
            raise ValueError(
                "this run was resumed, and its push weights are not 1: call model.bind(optimizer, "
                "fp32_params) after loading and before the first step"
            )
        self._driver.begin_step(closure=True)
        for p, values in zip(held, moved, strict=True):
            p.copy_(values)

    def _about_to_step(self, optimizer: Optimizer) -> None:
        """Handle that ``optimizer``, which may be unrelated, is about to take a step."""
        bound = self._driver.bound
        if optimizer is bound or optimizer in self._foreign:
            return
        if not self._holds(optimizer):
            held = [p for group in optimizer.param_groups for p in group["params"]]
            own = list(self.module.parameters())
            fits = sum(p.numel() for p in held) == sum(p.numel() for p in own)
            if bound is None and fits and any(p.dtype in HALF for p in own):
                if optimizer not in self._before_step:  # its parameters may be masters
                    self._before_step[optimizer] = [p.detach().clone() for p in held]
            else:
                self._foreign.add(optimizer)
        elif bound is None:
            self._bind(optimizer)
        elif not _same_parameters(optimizer, bound):
            raise ValueError(
                "a second optimizer moves parameters of this module: use one optimizer for all of "
                "them, with the same groups"
            )
        elif not _same_groups(optimizer, bound):
            self._follow(optimizer)

    def _holds(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer holds a parameter of the module."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return any(id(p) in held for p in self.module.parameters())

    def _versions(self) -> int:
        """Return a number that grows with every in-place change of a parameter."""
        return sum(p._version for p in self.module.parameters())

    # -- state ----

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SETTINGS and name in self.__dict__:
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
        return self._sync.step if self._loaded is None else int(self._loaded["step"])

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
        if self._driver.bound is None:
            return {"slowmo": self._loaded}
        return {"slowmo": self._sync.state_dict()}

    def set_extra_state(self, state: Mapping[str, Any] | None) -> None:
        """Store what `get_extra_state` returned until the module's own state is loaded."""
        if state is not None and "slowmo" not in state:
            raise ValueError(
                f"this is not what get_extra_state() returned: it has the keys {list(state)}, and "
                "not 'slowmo'"
            )
        self._loaded = None if state is None else state["slowmo"]
        if self._loaded is None and self._driver.bound is not None:
            raise ValueError(
                "this state has no SlowMo state, and training has already started: to start afresh "
                "from other weights call detach() and wrap the module again"
            )
        if state is None:
            warnings.warn(
                "the state has no SlowMo state: counters, anchor, and momentum start again from "
                "these weights, which must be the same on every rank",
                stacklevel=2,
            )

    def _restore_pending(self) -> None:
        """Load the pending state into the synchronizer, if the optimizer is bound."""
        self._seen_version = self._versions()
        if self._loaded is not None and self._driver.bound is not None:
            self._sync.load_state_dict(self._loaded)
            self._loaded = None

    # -- for the user's loop ----

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context that accumulates gradients. See `Synchronizer.no_sync`."""
        return self._sync.no_sync()

    @contextmanager
    def consensus(self) -> Iterator[nn.Module]:
        """Return a context in which the module holds the mean of all ranks' parameters.

        Use it for validation between slow steps, when nodes differ. Every rank must enter it.
        """
        saved = [p.detach().clone() for p, _ in self._masters]
        with self._sync.consensus() as module:
            _copy(self._masters)
            try:
                yield module
            finally:
                _copy([(p, values) for (p, _), values in zip(self._masters, saved, strict=True)])

    @torch.no_grad()
    def finish(self) -> None:
        """Leave every rank with the mean of all ranks' parameters. Every rank must call it.

        After a slow step, the parameters already are this mean.
        """
        self._sync.finish()
        _copy(self._masters)

    @torch.no_grad()
    def copy_masters(self) -> None:
        """Copy the float32 masters, if there are any, to the module."""
        _copy(self._masters)

    def detach(self) -> None:
        """Stop averaging: `perform_slowmo` then does nothing. Does not communicate."""
        self._detached = True
        _wrappers.discard(self)
        self._sync.detach()

    def stats(self) -> Stats:
        """Return counters of this rank. See `Synchronizer.stats`."""
        return self._sync.stats()


# -- a hook on all optimizers: before the first step x is the common start, so needs no copy ----

_wrappers: weakref.WeakSet[SlowMoDistributedDataParallel] = weakref.WeakSet()
_hook_handles: list[Any] = []


def _watch_optimizers() -> None:
    """Register one hook for the whole process, once.

    torch iterates over such hooks while one of them waits for other workers, so none may be added
    or removed later.
    """
    if not _hook_handles:
        # not as a decorator, because that imports torch's compiler, which takes a second
        hook = torch.compiler.disable(_about_to_step)  # type: ignore[no-untyped-call]
        _hook_handles.append(register_optimizer_step_pre_hook(hook))


@torch.no_grad()
def _about_to_step(optimizer: Optimizer, *_: Any) -> None:
    for wrapper in list(_wrappers):
        wrapper._about_to_step(optimizer)


@torch.no_grad()
def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy masters to the module's parameters."""
    for p, master in pairs:
        p.copy_(master.reshape(p.shape))


def _same_parameters(one: Optimizer, other: Optimizer) -> bool:
    groups = ([[id(p) for p in group["params"]] for group in o.param_groups] for o in (one, other))
    return next(groups) == next(groups)


def _same_groups(one: Optimizer, other: Optimizer) -> bool:
    """Return whether they share their groups, as an optimizer and its wrapper do."""
    return [id(g) for g in one.param_groups] == [id(g) for g in other.param_groups]


# -- the constructor's arguments ----


def _device_of(module: nn.Module, comm_device: torch.device | str | None) -> torch.device:
    params = list(module.parameters()) if isinstance(module, nn.Module) else []
    if not any(p.requires_grad for p in params):
        raise ValueError("module must be an nn.Module with a parameter that requires a gradient")
    device = params[0].device
    if device.type == "meta":
        raise ValueError("the module's parameters are on the meta device: materialize them first")
    if any(is_sharded(p) for p in params):
        raise ValueError(
            "the module's parameters are sharded (FSDP): use laconic.attach(..., "
            "laconic.slowmo(...), mesh=) instead of this wrapper"
        )
    if comm_device is not None and torch.device(comm_device).type != device.type:
        raise ValueError(
            f"comm_device must be the parameters' device, {device}, or None, not {comm_device}"
        )
    return device


def _check_module(module: nn.Module) -> None:
    check_unwrapped(module)
    check_devices(module, ())


def _base_algorithm(given: SlowMoBaseAlgorithm) -> SlowMoBaseAlgorithm:
    try:
        return SlowMoBaseAlgorithm(given)
    except ValueError:
        choices = ", ".join(str(choice) for choice in SlowMoBaseAlgorithm)
        raise ValueError(f"slowmo_base_algorithm must be one of {choices}, not {given!r}") from None


def _on_all_ranks(world: Link, check: Callable[[], T]) -> T:
    """Return what ``check`` returns. If it raises on any rank, all ranks raise."""
    problem, result = None, None
    try:
        result = check()
    except ValueError as error:
        problem = str(error)
    agree(world.gather, problem)
    return result  # type: ignore[return-value]


def _check_expected(expected: Mapping[str, tuple[int | None, int]]) -> None:
    """Check sizes of process groups: laconic creates its own, which must have the same ranks."""
    for name, (given, found) in expected.items():
        if given is not None and given != found:
            raise ValueError(f"{name} is {given}, where laconic finds {found}")


def _size_of(group: object) -> int | None:
    """Return the size of a group; None for no group, or one that this rank does not belong to."""
    return group.size() if isinstance(group, dist.ProcessGroup) else None


def _average(module: nn.Module) -> Average | RoundedAverage:
    """Return the average of local SGD, in the module's precision if it has float32 masters."""
    dtypes = {p.dtype for p in module.parameters()}
    half = len(dtypes) == 1 and dtypes <= set(HALF)
    return RoundedAverage(dtypes.pop()) if half else Average()


def _graph(
    graph: GraphManager | None, mixing: UniformMixing | None, node: int, nodes: int
) -> GraphManager:
    if mixing is not None and not isinstance(mixing, UniformMixing):
        raise ValueError(f"mixing must be a laconic.UniformMixing, not {mixing!r}")
    graph = graph or (mixing.graph_manager if mixing is not None else None)
    graph = graph or NPeerDynamicDirectedExponentialGraph(node, nodes)
    if not isinstance(graph, GraphManager):
        names = ", ".join(kind.__name__ for kind in GraphManager.__subclasses__())
        raise ValueError(f"graph must be one of laconic's {names}, not {graph!r}")
    if mixing is not None and mixing.graph_manager is not graph:
        raise ValueError("graph and mixing must belong to the same graph: omit one of them")
    if (graph.rank, graph.world_size) != (node, nodes):
        raise ValueError(
            f"graph is of node {graph.rank} of {graph.world_size}, but this is node {node} of "
            f"{nodes}: its rank and world_size count nodes"
        )
    return graph


def _gossip(manager: GraphManager, push_sum: bool, overlap: bool, synch_freq: int) -> Recipe:
    """Return SGP's rounds. With ``overlap``, one round is in flight at any time."""
    period, delay = (max(synch_freq, 1),) * 2 if overlap else (1, 0)
    graph: Graph = manager.graph
    if push_sum:
        return (Round(every(period), PushSum(), Push(graph), delay=delay),)
    if not manager.is_regular_graph():
        raise ValueError(
            f"push_sum=False needs a graph in which every node receives as much as it sends, "
            f"unlike {type(manager).__name__} with {manager.world_size} nodes: use push_sum=True"
        )
    return (Round(every(period), Mix(), Push(graph), delay=delay),)


def _pairs(params: Sequence[Tensor], fp32: FP32) -> list[tuple[Tensor, Tensor]]:
    """Pair each parameter of the module with its float32 master."""
    if isinstance(fp32, Mapping):
        if len(fp32) != 1:
            raise ValueError(f"fp32_params must be a dict with one entry, not {len(fp32)}")
        fp32 = next(iter(fp32.values()))
    sizes = [p.numel() for p in params]
    if not isinstance(fp32, Tensor):
        masters = [m.detach() for m in fp32 or ()]
    else:
        fits = fp32.numel() == sum(sizes)
        masters = list(torch.split(fp32.detach().view(-1), sizes)) if fits else []
    if [m.numel() for m in masters] != sizes or any(m.dtype != torch.float32 for m in masters):
        raise ValueError(
            "fp32_params must be float32: one flat tensor, a list of one tensor per parameter, or "
            f"a dict with one such entry, with the sizes of module.parameters(): {sum(sizes)} in "
            "total"
        )
    return list(zip(params, masters, strict=True))


# -- state_dict keys without the wrapper's prefix ----


def _without_prefix(
    wrapper: nn.Module, state: dict[str, Any], prefix: str, _: Mapping[str, Any]
) -> None:
    inner = f"{prefix}module."
    for key in [key for key in state if key.startswith(inner) and key != inner + EXTRA]:
        state[prefix + key[len(inner) :]] = state.pop(key)


def _loaded(wrapper: nn.Module, _: object) -> None:
    assert isinstance(wrapper, SlowMoDistributedDataParallel)
    wrapper._restore_pending()


def _with_prefix(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Accept keys of `state_dict` and of the bare module, and keys with the prefix ``module.``.

    DistributedDataParallel and fairscale add that prefix.
    """
    inner = f"{prefix}module."
    own = {prefix + EXTRA, inner + EXTRA}
    assert isinstance(wrapper, SlowMoDistributedDataParallel)
    extra = state.get(prefix + EXTRA)
    if extra is not None and not (isinstance(extra, Mapping) and "slowmo" in extra):
        state[inner + EXTRA] = state.pop(prefix + EXTRA)  # the bare module's own
    weight = state.pop(f"{prefix}ps_weight", None)  # in fairscale's states of SGP
    numerator = state.pop(f"{prefix}is_sgp_ps_numerator", False)
    if numerator and weight is not None and float(weight) != 1.0:
        raise ValueError(
            f"divide these weights by their push weight, {float(weight):g}, before loading them"
        )
    names = [name for name in wrapper.module.state_dict() if name != EXTRA]
    bare, wrapped = (sum(start + name in state for name in names) for start in (prefix, inner))
    if bare >= wrapped:
        for key in [key for key in state if key.startswith(prefix) and key not in own]:
            state[inner + key[len(prefix) :]] = state.pop(key)
    state.setdefault(prefix + EXTRA, None)
