"""SlowMoDistributedDataParallel: fairscale's wrapper by its signature, over laconic's rounds."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from laconic.attach import check_free, claim
from laconic.errors import check_bool, check_float, check_int
from laconic.exchanges import Alone, Mean, Push, ShardedMean
from laconic.gossip_graphs import GraphManager, NPeerDynamicDirectedExponentialGraph, UniformMixing
from laconic.links import Link
from laconic.profile import LogLines, Profile
from laconic.ranks import layout_of, own_link, sets_of, within_workers
from laconic.round import Exchange, Recipe, Round
from laconic.schedules import Unless, every
from laconic.synchronizer import Stats, Synchronizer
from laconic.topology import Graph
from laconic.updates import Average, Mix, PushSum, RoundedAverage, SlowMomentum

TIMEOUT = 600.0
EXTRA = "_extra_state"
HALF = (torch.float16, torch.bfloat16)
FP32 = Tensor | Sequence[Tensor] | Mapping[Any, Any] | None


class SlowMoBaseAlgorithm(str, Enum):
    """What averages approximately between slow steps."""

    LOCALSGD = "localsgd"
    SGP = "sgp"


class SlowMoDistributedDataParallel(nn.Module):
    """Data-parallel training with few messages between nodes: SlowMo over local SGD or SGP.

    Wang et al., ICLR 2020, arXiv 1910.00643, Algorithm 1; the signature is fairscale's, so that a
    user changes the import only. After ``optimizer.step()`` call `perform_slowmo`; with n its
    calls, counted from 1::

        backward:                     g <- mean of g over the node's ranks, while backward runs
        n % localsgd_frequency == 0:  x <- mean(x) over nodes      (SGP: one gossip at every call)
        n % slowmo_frequency == 0:    u <- slowmo_momentum*u + (a - mean(x))/lr
                                      a <- a - slowmo_lr*lr*u ;  x <- a

    lr is the current one of the parameter's group; a is the last x that all agreed on, first the
    common start, rank 0's parameters, which the constructor broadcasts. Where both fall due the
    slow step alone runs: it averages exactly. ``slowmo_momentum=0, slowmo_lr=1`` switch it off.

    ``module``: what trains; ``nprocs_per_node``: ranks per node, the same on every node.
    ``broadcast_buffers``: average the module's floating-point buffers with the rounds (fairscale
    broadcasts them in every forward pass). ``slowmo_base_algorithm``: a `SlowMoBaseAlgorithm`.
    ``slowmo_memory_efficient``: the slow step's state, two float32 numbers a parameter, is cut up
    over ``slowmo_num_shards`` ranks (all, if there are fewer; rounded up to a multiple of
    nprocs_per_node). ``localsgd_frequency``: calls between averages of local SGD.

    For SGP: ``graph``, ``mixing``: see `GraphManager`, `UniformMixing`; ``push_sum=False``: gossip
    without push weights, on regular graphs; ``overlap``: messages travel while training goes on and
    are folded max(1, ``synch_freq``) calls later, which is then also how often one is sent;
    ``slowmo_sgp_average_params``: average exactly in the slow step also where it is not memory
    efficient; without, each node makes the slow step from its own x (SGP-SlowMo-noaverage).

    ``verbose``: a line of JSON for every call to the logger ``laconic.slowmo``.
    ``profile_mode``: after every slowmo_frequency calls rank 0 prints where the time went, and
    every rank writes a torch profiler trace of the calls up to the second slow step to the current
    directory. ``process_rank`` to ``local_node_group`` are checked against what laconic finds,
    which makes process groups of its own; ``comm_device`` must be the parameters'.

    When it pays, and how to set it (fairscale's guide; ``docs/slowmo.md`` has the reasons): on more
    than two nodes with a slow network, where ``t_allreduce * (1 - 1/localsgd_frequency) >
    t_backward`` (in full ``t_allreduce > t_backward + t_allreduce/localsgd_frequency``; with SGP
    put 2 for localsgd_frequency). ``slowmo_momentum`` grows with the nodes: 0 below 4, 0.2 for 4,
    0.5 for 8, 0.6 for 16; tune it over {0, 0.1, 0.2, 0.4, 0.6}. Keep localsgd_frequency at 3 and
    slowmo_frequency a multiple of it; memory efficient with local SGD, not with SGP.

    Raises ``ValueError`` for what cannot work, on every rank, and `laconic.LinkError` where a rank
    is lost.
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
        layout = layout_of(world, nprocs_per_node, None, False)
        _check_groups(
            world, nprocs_per_node, process_rank, process_world_size, global_group, local_node_group
        )
        nodes = len(layout)
        owners = min(-(-slowmo_num_shards // nprocs_per_node), nodes)  # on each rank of a node
        self.slowmo_num_shards = owners * nprocs_per_node if slowmo_memory_efficient else 1
        chosen = _graph(graph, mixing, world.rank // nprocs_per_node, nodes)
        if self.slowmo_base_algorithm is SlowMoBaseAlgorithm.SGP:
            base = _gossip(chosen, push_sum, overlap, synch_freq)
        else:
            if overlap:
                raise ValueError(
                    "overlap=True is for slowmo_base_algorithm=SlowMoBaseAlgorithm.SGP; local SGD "
                    "overlaps as laconic.attach(..., laconic.local_sgd(period, delay=...))"
                )
            base = (Round(every(localsgd_frequency), _average(module), Mean()),)
        rounds = self._rounds(base if nodes > 1 else ())
        if nprocs_per_node > 1:
            rounds = (*within_workers(rounds), *rounds)
        self._warn(nodes, use_streams, synch_freq > 0 and not overlap)
        buffers = "average" if broadcast_buffers else "keep"
        sets = sets_of(world, layout, None, False)
        self._sync = Synchronizer(module, None, rounds, sets, device, buffers)
        self._start: list[Tensor] = []
        self._masters: list[tuple[Tensor, Tensor]] = []
        self._loaded: Mapping[str, Any] | None = None
        self._profile: Profile | None = None
        if profile_mode:
            self._profile = Profile(self._sync, world.rank, slowmo_frequency, world.threaded)
        if verbose:
            self._sync.record([LogLines()])
        self.register_state_dict_post_hook(_without_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_with_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_put_back)  # type: ignore[no-untyped-call]
        _waiting.add(self)
        _watch_optimizers()

    # -- the recipe ----

    @property
    def _slow_step_on(self) -> bool:
        return (self.slowmo_momentum, self.slowmo_lr) != (0.0, 1.0)

    def _rounds(self, base: Recipe) -> Recipe:
        """``base`` with the slow step, which takes its place where it averages exactly."""
        if not self._slow_step_on:
            return base
        exchange: Exchange
        if self.slowmo_memory_efficient:
            exchange = ShardedMean(self.slowmo_num_shards // self.nprocs_per_node)
        else:
            local = self.slowmo_base_algorithm is SlowMoBaseAlgorithm.LOCALSGD
            exchange = Mean() if local or self.slowmo_sgp_average_params or not base else Alone()
        slow = every(self.slowmo_frequency)
        if exchange.agrees:
            base = tuple(replace(r, when=Unless(r.when, slow)) for r in base)
        return (*base, Round(slow, SlowMomentum(self.slowmo_momentum, self.slowmo_lr), exchange))

    def _warn(self, nodes: int, use_streams: bool, idle_synch_freq: bool) -> None:
        local = self.slowmo_base_algorithm is SlowMoBaseAlgorithm.LOCALSGD
        slow_over_base = self._slow_step_on and nodes > 1
        uneven = self.slowmo_frequency % self.localsgd_frequency != 0
        if nodes == 1:
            warnings.warn(
                "there is one node only: the base algorithm is off, as its ranks average gradients "
                f"anyhow; the slow step is {'on' if self._slow_step_on else 'off'}",
                stacklevel=3,
            )
        if slow_over_base and local and uneven:
            warnings.warn(
                f"slowmo_frequency={self.slowmo_frequency} is no multiple of localsgd_frequency="
                f"{self.localsgd_frequency}: averages fall at uneven distances",
                stacklevel=3,
            )
        if slow_over_base and not local and self.slowmo_memory_efficient:
            warnings.warn(
                "slowmo_memory_efficient=True sends an all-reduce at every slow step of SGP; False "
                "sends none, and keeps two float32 numbers a parameter on every rank",
                stacklevel=3,
            )
        if not use_streams:
            warnings.warn("use_streams=False has no effect", stacklevel=3)
        if idle_synch_freq:
            warnings.warn("synch_freq has no effect without overlap=True", stacklevel=3)

    # -- training ----

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own forward pass; no communication, in training or out of it."""
        if self._sync.bound is None and not self._start and torch.is_grad_enabled():
            # masters in float32 are known when they have been moved already
            self._start = [p.detach().clone() for p in self._half_parameters()]
        if self._profile is None:
            return self.module(*inputs, **kwargs)
        with self._profile.part("forward"):
            return self.module(*inputs, **kwargs)

    def _half_parameters(self) -> list[Tensor]:
        half = any(p.dtype in HALF for p in self.module.parameters())
        return list(self.module.parameters()) if half else []

    @torch.no_grad()
    def perform_slowmo(self, optimizer: Optimizer, fp32_params: FP32 = None) -> None:
        """The base algorithm and the slow step, where they fall due; call it on every rank after
        every ``optimizer.step()``, and ``zero_grad(set_to_none=True)`` before it, whose memory it
        can then use.

        ``fp32_params``: the float32 masters of a half-precision module, which the optimiser moves
        in its parameters' place: one flat tensor, a list of one per parameter, or a dict with one
        such entry, in the order of ``module.parameters()`` and sharing storage with the
        optimiser's. Averages of local SGD then travel in the module's precision and what rounding
        cuts off stays in the masters; slow steps travel in float32; both are copied back to the
        module.
        """
        if fp32_params is not None:
            self._masters = _pairs(list(self.module.parameters()), fp32_params)
        if self._sync.bound is None and self._holds(optimizer):
            self._bind(optimizer)  # its first step was skipped: any other would have been seen
        elif self._sync.bound is None:
            self._bind_moved(optimizer)
        elif optimizer is not self._sync.bound:
            self._check_same(optimizer)
        before = self._sync.rounds
        if self._profile is None:
            self._sync.advance()
        else:
            self._profile.call(self._sync.advance)
        if self._masters and self._sync.rounds != before:
            for p, master in self._masters:
                p.view(-1).copy_(master)

    def _holds(self, optimizer: Optimizer) -> bool:
        """Whether it holds a parameter of the module."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return any(id(p) in held for p in self.module.parameters())

    def bind(self, optimizer: Optimizer) -> None:
        """Name the optimiser before its first step. `perform_slowmo` finds it by itself, but for
        one that moves float32 masters when a run is resumed."""
        self._bind(optimizer)

    @torch.no_grad()
    def _bind(self, optimizer: Optimizer) -> None:
        """The optimiser is known, and has not moved x since the start (or since it was loaded)."""
        if not isinstance(optimizer, Optimizer):
            raise ValueError(f"optimizer must be a torch.optim.Optimizer, not {optimizer!r}")
        check_free(optimizer)
        self._start = []
        _waiting.discard(self)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        own = [p for p in self.module.parameters() if p.requires_grad]
        left = [p for p in own if id(p) not in held]
        if left and len(left) < len(own):
            warnings.warn(
                f"{len(left)} trainable parameters of the module are not in the optimizer, and are "
                "not averaged: give one optimizer all of them",
                stacklevel=2,
            )
        self._sync.bind(optimizer)
        claim(optimizer, self._sync)
        self._put_back()

    def _bind_moved(self, optimizer: Optimizer) -> None:
        """To an optimiser that was not seen to step on the module's own parameters, and has moved
        its masters once: from the start kept in the module's precision."""
        if not self._masters:
            raise ValueError(
                "the optimizer holds none of the module's parameters: where it moves float32 "
                "copies of them, pass these as fp32_params="
            )
        if self._loaded is not None:
            raise ValueError(
                "this run was resumed, and its optimizer moves float32 masters: call "
                "model.bind(optimizer) after loading and before the first step"
            )
        if not self._start:
            raise ValueError(
                "no forward pass of this wrapper came first: call model(x), not model.module(x)"
            )
        storages = {
            p.untyped_storage().data_ptr() for g in optimizer.param_groups for p in g["params"]
        }
        if any(m.untyped_storage().data_ptr() not in storages for _, m in self._masters):
            raise ValueError("fp32_params must share storage with the optimizer's parameters")
        moved = [master.clone() for _, master in self._masters]
        for start, (_, master) in zip(self._start, self._masters, strict=True):
            master.copy_(start.view(-1))
        self._bind(optimizer)
        self._sync.begin_step(closure=True)
        for (_, master), values in zip(self._masters, moved, strict=True):
            master.copy_(values)

    def _check_same(self, optimizer: Optimizer) -> None:
        bound = self._sync.bound
        assert bound is not None
        held, given = (
            [[id(p) for p in g["params"]] for g in o.param_groups] for o in (bound, optimizer)
        )
        if held != given:
            raise ValueError(
                "perform_slowmo was given another optimizer than the one that moved the module's "
                "parameters first: give it the same at every call"
            )

    # -- state ----

    @property
    def synchronizer(self) -> Synchronizer:
        """What does the work; `laconic.save` and metrics take it."""
        return self._sync

    @property
    def num_updates(self) -> int:
        """Calls of `perform_slowmo` so far."""
        return self._sync.step

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "SlowMoDistributedDataParallel holds connections and cannot be copied or pickled: copy "
            "or pickle model.module, and save with laconic.save or model.state_dict() on every rank"
        )

    def get_extra_state(self) -> Mapping[str, Any]:
        """SlowMo's own state on this rank, which `state_dict` stores beside the module's, whose
        keys are as without the wrapper; starts no communication. Every rank saves its own."""
        if self._sync.bound is None:
            return {"slowmo": self._loaded}
        return {"slowmo": self._sync.state_dict()}

    def set_extra_state(self, state: Mapping[str, Any] | None) -> None:
        """Keep what `get_extra_state` returned until the module's own state is loaded, too."""
        if state is None:
            if self._sync.bound is not None:
                raise ValueError(
                    "this state has no SlowMo state, and training goes on already: to start afresh "
                    "from other weights wrap the module again"
                )
            warnings.warn(
                "the state has no SlowMo state: counters, anchor and momentum start afresh from "
                "these weights, which must be the same on every rank",
                stacklevel=2,
            )
            return
        if "slowmo" not in state:
            raise ValueError(f"this is not what get_extra_state() returned: {list(state)}")
        self._loaded = state["slowmo"]

    def _put_back(self) -> None:
        """What was loaded into the synchroniser, once it knows its optimiser."""
        if self._loaded is not None and self._sync.bound is not None:
            self._sync.load_state_dict(self._loaded)
            self._loaded = None

    # -- for the user's loop ----

    def no_sync(self) -> AbstractContextManager[None]:
        """See `Synchronizer.no_sync`: to accumulate gradients over several backward passes."""
        return self._sync.no_sync()

    def consensus(self) -> AbstractContextManager[nn.Module]:
        """See `Synchronizer.consensus`: for validation between slow steps, where nodes differ."""
        return self._sync.consensus()

    def finish(self) -> None:
        """See `Synchronizer.finish`: at the end every rank holds the consensus model."""
        self._sync.finish()

    def stats(self) -> Stats:
        """See `Synchronizer.stats`."""
        return self._sync.stats()


# -- the optimiser, seen at its first step: x is the common start then, and no copy is needed ----

_waiting: weakref.WeakSet[SlowMoDistributedDataParallel] = weakref.WeakSet()
_watching: list[Any] = []


def _watch_optimizers() -> None:
    """One hook for the whole process, once: torch iterates over such hooks while one of them waits
    for other workers, so that none may come or go."""
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_about_to_step))


def _about_to_step(optimizer: Optimizer, *_: Any) -> None:
    for front in list(_waiting):
        if front._holds(optimizer):
            front._bind(optimizer)


# -- what the constructor is given ----


def _device_of(module: nn.Module, comm_device: torch.device | str | None) -> torch.device:
    params = list(module.parameters()) if isinstance(module, nn.Module) else []
    if not any(p.requires_grad for p in params):
        raise ValueError("module must be an nn.Module with a parameter that requires a gradient")
    device = params[0].device
    if device.type == "meta":
        raise ValueError("the module's parameters are on the meta device: materialise them first")
    if comm_device is not None and torch.device(comm_device).type != device.type:
        raise ValueError(
            f"comm_device must be the parameters' device, {device}, or None, not {comm_device}"
        )
    return device


def _base_algorithm(given: SlowMoBaseAlgorithm) -> SlowMoBaseAlgorithm:
    try:
        return SlowMoBaseAlgorithm(given)
    except ValueError:
        choices = ", ".join(str(choice) for choice in SlowMoBaseAlgorithm)
        raise ValueError(f"slowmo_base_algorithm must be one of {choices}, not {given!r}") from None


def _check_groups(
    world: Link,
    nprocs_per_node: int,
    rank: int | None,
    size: int | None,
    global_group: dist.ProcessGroup | None,
    local_node_group: dist.ProcessGroup | None,
) -> None:
    """laconic makes process groups of its own; those given must be of the same ranks."""
    expected = {
        "process_rank": (rank, world.rank),
        "process_world_size": (size, world.size),
        "the size of global_group": (_size_of(global_group), world.size),
        "the size of local_node_group": (_size_of(local_node_group), nprocs_per_node),
    }
    for name, (given, found) in expected.items():
        if given is not None and given != found:
            raise ValueError(f"{name} is {given}, where laconic finds {found}")


def _size_of(group: dist.ProcessGroup | None) -> int | None:
    return None if group is None else group.size()


def _average(module: nn.Module) -> Average | RoundedAverage:
    """Averages travel in the module's precision where it has masters in another."""
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
        raise ValueError("graph and mixing must be of the same graph")
    if (graph.rank, graph.world_size) != (node, nodes):
        raise ValueError(
            f"graph is of node {graph.rank} of {graph.world_size}, where this is node {node} of "
            f"{nodes}: its rank and world_size count nodes"
        )
    return graph


def _gossip(manager: GraphManager, push_sum: bool, overlap: bool, synch_freq: int) -> Recipe:
    """SGP's rounds; with ``overlap`` one is under way at any time."""
    period, delay = (max(synch_freq, 1),) * 2 if overlap else (1, 0)
    graph: Graph = manager.graph
    if push_sum:
        return (Round(every(period), PushSum(), Push(graph), delay=delay),)
    if not manager.is_regular_graph():
        raise ValueError(
            f"push_sum=False needs a graph in which every node gets as much as it sends, and "
            f"{type(manager).__name__} of {manager.world_size} nodes is none"
        )
    return (Round(every(period), Mix(), Push(graph), delay=delay),)


def _pairs(params: Sequence[Tensor], fp32: FP32) -> list[tuple[Tensor, Tensor]]:
    """Parameters of the module, each with its flat float32 master."""
    if isinstance(fp32, Mapping):
        if len(fp32) != 1:
            raise ValueError(f"fp32_params must be a dict with one entry, not {len(fp32)}")
        fp32 = next(iter(fp32.values()))
    sizes = [p.numel() for p in params]
    if not isinstance(fp32, Tensor):
        masters = [m.detach().view(-1) for m in fp32 or ()]
    else:
        fits = fp32.numel() == sum(sizes)
        masters = list(torch.split(fp32.detach().view(-1), sizes)) if fits else []
    if [m.numel() for m in masters] != sizes or any(m.dtype != torch.float32 for m in masters):
        raise ValueError(
            "fp32_params must be float32, and one flat tensor, a list of one tensor per parameter, "
            f"or a dict with one such entry, of module.parameters()' sizes: {sum(sizes)} in all"
        )
    return list(zip(params, masters, strict=True))


# -- state_dict keys as without the wrapper ----


def _without_prefix(
    front: nn.Module, state: dict[str, Any], prefix: str, _: Mapping[str, Any]
) -> None:
    inner = f"{prefix}module."
    for key in [key for key in state if key.startswith(inner) and key != inner + EXTRA]:
        state[prefix + key[len(inner) :]] = state.pop(key)


def _put_back(front: nn.Module, _: object) -> None:
    assert isinstance(front, SlowMoDistributedDataParallel)
    front._put_back()


def _with_prefix(front: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Keys as `state_dict` and the bare module have them, or as DistributedDataParallel and
    fairscale do, which begin them with ``module.``."""
    inner = f"{prefix}module."
    own = {prefix + EXTRA, inner + EXTRA}
    assert isinstance(front, SlowMoDistributedDataParallel)
    names = [name for name in front.module.state_dict() if name != EXTRA]
    bare, wrapped = (sum(start + name in state for name in names) for start in (prefix, inner))
    if bare >= wrapped:
        for key in [key for key in state if key.startswith(prefix) and key not in own]:
            state[inner + key[len(prefix) :]] = state.pop(key)
    state.setdefault(prefix + EXTRA, None)
