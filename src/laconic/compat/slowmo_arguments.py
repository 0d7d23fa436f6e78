"""The arguments of SlowMoDistributedDataParallel, checked, and the rounds that they mean."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
import torch.distributed as dist
from torch import nn

from laconic.algorithms import recipes
from laconic.algorithms.exchanges import Mean, Push, ShardedMean
from laconic.algorithms.round import Recipe, Round
from laconic.algorithms.schedules import every
from laconic.algorithms.topology import Graph
from laconic.algorithms.updates import Average, Mix, PushSum, Replace, RoundedAverage
from laconic.buckets import is_sharded, module_buffers
from laconic.compat.gossip_graphs import (
    GraphManager,
    NPeerDynamicDirectedExponentialGraph,
    UniformMixing,
)
from laconic.engine.model_checks import check_devices, check_tensors, check_unwrapped
from laconic.engine.saved_state import WRAPPER
from laconic.links import Link

HALF = (torch.float16, torch.bfloat16)
SizedGroup = tuple[dist.ProcessGroup | None, int]
"""A process group, and the size that it must have."""


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
class SlowStep:
    """The wrapper's arguments of the same names that define the slow step and its base."""

    slowmo_base_algorithm: SlowMoBaseAlgorithm
    slowmo_momentum: float
    slowmo_lr: float
    slowmo_memory_efficient: bool
    slowmo_frequency: int
    localsgd_frequency: int
    slowmo_sgp_average_params: bool

    @property
    def slow_step_on(self) -> bool:
        """Whether there is a slow step."""
        return (self.slowmo_momentum, self.slowmo_lr) != (0.0, 1.0)

    @property
    def base_is_idle(self) -> bool:
        """Whether slow steps are more frequent than local SGD's averages, and replace them all."""
        local = self.slowmo_base_algorithm is SlowMoBaseAlgorithm.LOCALSGD
        base, slow = self.localsgd_frequency, self.slowmo_frequency
        return local and self.slow_step_on and base > slow and not base % slow

    def text(self) -> str:
        """Return the recipe's name for messages: the settings that define it."""
        names = ["slowmo_momentum", "slowmo_frequency", "slowmo_lr"]
        if self.slowmo_base_algorithm is SlowMoBaseAlgorithm.LOCALSGD:
            names.append("localsgd_frequency")
        base = f"slowmo_base_algorithm={self.slowmo_base_algorithm.value!r}"
        settings = [base, *(f"{name}={getattr(self, name)}" for name in names)]
        return f"{WRAPPER}{', '.join(settings)})"

    def base(
        self,
        module: nn.Module,
        manager: GraphManager,
        push_sum: bool,
        overlap: bool,
        synch_freq: int,
    ) -> Recipe:
        """Return the rounds of the base algorithm."""
        if self.slowmo_base_algorithm is SlowMoBaseAlgorithm.SGP:
            return _gossip(manager, push_sum, overlap, synch_freq)
        if overlap:
            raise ValueError(
                "overlap=True needs slowmo_base_algorithm=SlowMoBaseAlgorithm.SGP; local SGD "
                "overlaps with laconic.attach(..., laconic.local_sgd(period, delay=...))"
            )
        return (Round(every(self.localsgd_frequency), _average(module), Mean()),)

    def buffers(self) -> Round:
        """Return a round that averages the module's buffers, where there is no other round."""
        return Round(
            every(self.localsgd_frequency), Replace(), Mean(), module_buffers, over="world"
        )

    def rounds(self, base: Recipe, owners: int | None) -> Recipe:
        """Add the slow step to ``base``. It replaces rounds of ``base`` if it averages exactly.

        ``owners``: the number of nodes that store the slow step's state; None: all of them.
        """
        if not self.slow_step_on:
            return base
        local = self.slowmo_base_algorithm is SlowMoBaseAlgorithm.LOCALSGD
        average = local or owners is not None or self.slowmo_sgp_average_params or not base
        period, momentum, lr = self.slowmo_frequency, self.slowmo_momentum, self.slowmo_lr
        sharded = owners is not None
        if self.base_is_idle:
            base = ()
        stored = sharded or not average  # without an average, every worker keeps its own state
        *skipped, slow = recipes.slowmo(base, period, momentum, lr, sharded=stored, average=average)
        if sharded:
            slow = replace(slow, exchange=ShardedMean(owners))
        return (*(skipped if average else base), slow)

    def warn(self, nodes: int, idle: Sequence[str]) -> None:
        """Warn the caller of the caller of settings that work against each other, and of arguments
        without an effect, such as those in ``idle``."""
        local = self.slowmo_base_algorithm is SlowMoBaseAlgorithm.LOCALSGD
        slow_over_base = self.slow_step_on and nodes > 1
        uneven = self.slowmo_frequency % self.localsgd_frequency != 0
        if nodes == 1:
            warnings.warn(
                "there is one node only: the base algorithm is off, because its ranks average "
                f"gradients anyway; the slow step is {'on' if self.slow_step_on else 'off'}",
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
        unused = list(idle)
        if self.base_is_idle:
            unused.append("localsgd_frequency (a multiple of slowmo_frequency)")
        if unused:
            warnings.warn(f"these arguments have no effect: {', '.join(unused)}", stacklevel=3)


def device_of(module: nn.Module, comm_device: torch.device | str | None) -> torch.device:
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


def check_module(module: nn.Module) -> None:
    check_unwrapped(module)
    check_devices(module, ())
    check_tensors(module, ())


def base_algorithm(given: SlowMoBaseAlgorithm) -> SlowMoBaseAlgorithm:
    try:
        return SlowMoBaseAlgorithm(given)
    except ValueError:
        choices = ", ".join(str(choice) for choice in SlowMoBaseAlgorithm)
        raise ValueError(f"slowmo_base_algorithm must be one of {choices}, not {given!r}") from None


def check_ranks(
    world: Link,
    process_rank: int | None,
    process_world_size: int | None,
    global_group: SizedGroup,
    master_group: SizedGroup,
    local_node_group: SizedGroup,
) -> None:
    """Check ranks and sizes: laconic creates its own process groups, of the same ranks. A group
    that is None, or that this rank does not belong to, is not checked."""
    checks: dict[str, tuple[int | None, int]] = {
        "process_rank": (process_rank, world.rank),
        "process_world_size": (process_world_size, world.size),
    }
    groups = {"global": global_group, "master": master_group, "local_node": local_node_group}
    for name, (group, size) in groups.items():
        given = group.size() if isinstance(group, dist.ProcessGroup) else None
        checks[f"the size of {name}_group"] = given, size
    for name, (given, found) in checks.items():
        if given is not None and given != found:
            raise ValueError(f"{name} is {given}, where laconic finds {found}")


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
