"""The arguments of SlowMoDistributedDataParallel, checked, and the rounds that they mean."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from laconic.algorithms import recipes
from laconic.algorithms.compile import with_replicas
from laconic.algorithms.exchanges import Mean, Push, ShardedMean
from laconic.algorithms.round import NamedRecipe, Recipe, Round
from laconic.algorithms.schedules import every
from laconic.algorithms.topology import Graph
from laconic.algorithms.updates import Average, Mix, PushSum, Replace, RoundedAverage
from laconic.compat.gossip_graphs import (
    GraphManager,
    NPeerDynamicDirectedExponentialGraph,
    UniformMixing,
)
from laconic.engine.model_checks import check_devices, check_tensors, check_unwrapped
from laconic.engine.saved_state import WRAPPER
from laconic.errors import check_bool, check_float, check_int
from laconic.links import Link
from laconic.parts import module_buffers
from laconic.tensors import is_sharded

SLOW, SHARDS, LOCAL = 48, 32, 3
"""The defaults of slowmo_frequency, slowmo_num_shards and localsgd_frequency."""
SWITCHES = (
    "broadcast_buffers",
    "slowmo_memory_efficient",
    "push_sum",
    "overlap",
    "use_streams",
    "slowmo_sgp_average_params",
    "verbose",
    "profile_mode",
)
LEAST = {"slowmo_frequency": 1, "localsgd_frequency": 1, "slowmo_num_shards": 1, "synch_freq": 0}
"""The least values of whole numbers."""
HALF = (torch.float16, torch.bfloat16)


class SlowMoBaseAlgorithm(str, Enum):
    """The algorithm that averages approximately between slow steps.

    ``LOCALSGD`` is local SGD, and ``SGP`` stochastic gradient push.

    Examples:
        >>> laconic.SlowMoBaseAlgorithm("sgp")
        <SlowMoBaseAlgorithm.SGP: 'sgp'>
    """

    LOCALSGD = "localsgd"
    SGP = "sgp"


@dataclass(frozen=True)
class Arguments:
    """The wrapper's arguments of the same names."""

    module: nn.Module
    nprocs_per_node: int
    broadcast_buffers: bool
    slowmo_base_algorithm: SlowMoBaseAlgorithm
    slowmo_momentum: float
    slowmo_memory_efficient: bool
    slowmo_frequency: int
    slowmo_lr: float
    slowmo_num_shards: int
    localsgd_frequency: int
    graph: GraphManager | None
    mixing: UniformMixing | None
    push_sum: bool
    overlap: bool
    synch_freq: int
    use_streams: bool
    slowmo_sgp_average_params: bool
    verbose: bool
    profile_mode: bool
    process_rank: int | None
    process_world_size: int | None
    global_group: dist.ProcessGroup | None
    master_group: dist.ProcessGroup | None
    local_node_group: dist.ProcessGroup | None
    comm_device: torch.device | str | None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Arguments:
        """Those of the arguments ``given``, by name, that this class has. Raises ``ValueError``
        for what cannot be used."""
        check_module(given["module"], given["comm_device"])
        for name in SWITCHES:
            check_bool(name, given[name])
        checked: dict[str, Any] = {
            "slowmo_base_algorithm": base_algorithm(given["slowmo_base_algorithm"]),
            "slowmo_momentum": check_float("slowmo_momentum", given["slowmo_momentum"], 0.0, 1.0),
            "slowmo_lr": check_float("slowmo_lr", given["slowmo_lr"], 0.0, strict=True),
        }
        for name, least in LEAST.items():
            checked[name] = check_int(name, given[name], least)
        return cls(**{f.name: checked.get(f.name, given[f.name]) for f in fields(cls)})

    def check_ranks(self, world: Link, nodes: int) -> None:
        """Check the ranks and sizes that are stated: laconic creates its own process groups, of
        the same ranks. Groups that this rank does not belong to are not checked."""
        checks = [
            ("process_rank", self.process_rank, world.rank),
            ("process_world_size", self.process_world_size, world.size),
        ]
        sizes = {"global": world.size, "master": nodes, "local_node": self.nprocs_per_node}
        for name, size in sizes.items():
            group = getattr(self, f"{name}_group")
            own = group.size() if isinstance(group, dist.ProcessGroup) else None
            checks.append((f"the size of {name}_group", own, size))
        for name, stated, found in checks:
            if stated is not None and stated != found:
                raise ValueError(f"{name} is {stated}, where laconic finds {found}")

    @property
    def local(self) -> bool:
        """Whether the base is local SGD."""
        return self.slowmo_base_algorithm is SlowMoBaseAlgorithm.LOCALSGD

    @property
    def slow_step_on(self) -> bool:
        """Whether there is a slow step."""
        return (self.slowmo_momentum, self.slowmo_lr) != (0.0, 1.0)

    @property
    def base_is_idle(self) -> bool:
        """Whether slow steps are more frequent than local SGD's averages, and replace them all."""
        base, slow = self.localsgd_frequency, self.slowmo_frequency
        return self.local and self.slow_step_on and base > slow and not base % slow

    def text(self) -> str:
        """Return the recipe's name for messages: the settings that define it."""
        names = ["slowmo_momentum", "slowmo_frequency", "slowmo_lr"]
        if self.local:
            names.append("localsgd_frequency")
        base = f"slowmo_base_algorithm={self.slowmo_base_algorithm.value!r}"
        settings = [base, *(f"{name}={getattr(self, name)}" for name in names)]
        return f"{WRAPPER}{', '.join(settings)})"

    def recipe(self, node: int, nodes: int) -> Recipe:
        """Return all rounds for ``node`` of so many ``nodes``."""
        manager = graph_of(self.graph, self.mixing, node, nodes)
        base = self._base(manager)
        rounds = self._with_slow_step(base if nodes > 1 else ())
        if nodes == 1 and self.broadcast_buffers and module_buffers(self.module)[0]:
            when = every(self.localsgd_frequency)  # there is no other round that averages them
            rounds = (Round(when, Replace(), Mean(), module_buffers, over="world"), *rounds)
        rounds = with_replicas(rounds) if self.nprocs_per_node > 1 else rounds
        return NamedRecipe(rounds, self.text())

    def _base(self, manager: GraphManager) -> Recipe:
        """Return the rounds of the base algorithm."""
        if not self.local:
            return _gossip(manager, self.push_sum, self.overlap, self.synch_freq)
        if self.overlap:
            raise ValueError(
                "overlap=True needs slowmo_base_algorithm=SlowMoBaseAlgorithm.SGP; local SGD "
                "overlaps with laconic.attach(..., laconic.local_sgd(period, delay=...))"
            )
        return (Round(every(self.localsgd_frequency), _average(self.module), Mean()),)

    def _with_slow_step(self, base: Recipe) -> Recipe:
        """Add the slow step to ``base``. It replaces rounds of ``base`` if it averages exactly."""
        if not self.slow_step_on:
            return base
        sharded = self.slowmo_memory_efficient
        average = self.local or sharded or self.slowmo_sgp_average_params or not base
        period, momentum, lr = self.slowmo_frequency, self.slowmo_momentum, self.slowmo_lr
        if self.base_is_idle:
            base = ()
        stored = sharded or not average  # without an average, every worker keeps its own state
        *skipped, slow = recipes.slowmo(base, period, momentum, lr, sharded=stored, average=average)
        if sharded:
            slow = replace(slow, exchange=ShardedMean())
        return (*(skipped if average else base), slow)

    def _unused(self) -> list[str]:
        """The arguments that have no effect beside the others."""
        on, local, efficient = self.slow_step_on, self.local, self.slowmo_memory_efficient
        sharded = on and efficient
        idle = {
            "use_streams=False": not self.use_streams,
            "verbose (see synchronizer.record)": self.verbose,
            "profile_mode (see synchronizer.calls)": self.profile_mode,
            "synch_freq (only for overlap=True)": self.synch_freq > 0 and not self.overlap,
            "graph, mixing (only for SGP)": local and bool(self.graph or self.mixing),
            "push_sum=False (only for SGP)": local and not self.push_sum,
            "slowmo_sgp_average_params (only for SGP, without slowmo_memory_efficient)": (
                self.slowmo_sgp_average_params and (local or sharded or not on)
            ),
            "slowmo_num_shards (all ranks have a shard)": self.slowmo_num_shards != SHARDS,
            "slowmo_memory_efficient=False (only for slow steps)": not (efficient or on),
            "slowmo_frequency (only for slow steps)": not on and self.slowmo_frequency != SLOW,
            "localsgd_frequency (only for local SGD)": not local
            and self.localsgd_frequency != LOCAL,
            "localsgd_frequency (a multiple of slowmo_frequency)": self.base_is_idle,
        }
        return [name for name, is_idle in idle.items() if is_idle]

    def warn(self, nodes: int) -> None:
        """Warn the caller of the caller of settings that work against each other, and of arguments
        without an effect."""
        over_base = self.slow_step_on and nodes > 1
        unused = self._unused()
        told = {
            "there is one node only: the base algorithm is off, because its ranks average "
            f"gradients anyway; the slow step is {'on' if self.slow_step_on else 'off'}": (
                nodes == 1
            ),
            f"slowmo_frequency={self.slowmo_frequency} is not a multiple of localsgd_frequency="
            f"{self.localsgd_frequency}: the distances between averages are uneven": (
                over_base and self.local and self.slowmo_frequency % self.localsgd_frequency
            ),
            "slowmo_memory_efficient=True sends an all-reduce at every slow step of SGP; False "
            "sends none, and stores two float32 numbers per parameter on every rank": (
                over_base and not self.local and self.slowmo_memory_efficient
            ),
            f"these arguments have no effect: {', '.join(unused)}": unused,
        }
        for text, applies in told.items():
            if applies:
                warnings.warn(text, stacklevel=3)


def check_module(module: nn.Module, comm_device: torch.device | str | None) -> None:
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
    check_unwrapped(module)
    check_devices(module, ())
    check_tensors(module, ())


def base_algorithm(given: SlowMoBaseAlgorithm) -> SlowMoBaseAlgorithm:
    try:
        return SlowMoBaseAlgorithm(given)
    except ValueError:
        choices = ", ".join(str(choice) for choice in SlowMoBaseAlgorithm)
        raise ValueError(f"slowmo_base_algorithm must be one of {choices}, not {given!r}") from None


def graph_of(
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


def _average(module: nn.Module) -> Average | RoundedAverage:
    """Return the average of local SGD, in the module's precision if it has float32 masters."""
    dtypes = {p.dtype for p in module.parameters()}
    half = len(dtypes) == 1 and dtypes <= set(HALF)
    return RoundedAverage(dtypes.pop()) if half else Average()


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
