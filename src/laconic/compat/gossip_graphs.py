"""Graphs and mixing for the gossip of SlowMoDistributedDataParallel, under fairscale's names.

Each class is a graph of `laconic.algorithms.topology`, as seen from one node. The formulas are
there. Unlike fairscale's, these graphs create no process group for each edge.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from laconic.algorithms.topology import Graph
from laconic.errors import check_int


class GraphManager:
    """A gossip graph, as seen by node ``rank`` of ``world_size`` nodes. Use one of its subclasses.

    Args:
        rank: this node, from 0.
        world_size: how many nodes there are.
        nprocs_per_node: for compatibility with fairscale: here every rank of a node sends its part.
        local_rank: the same.
        peers_per_itr: to how many nodes each node sends in one gossip, at least 1.

    Examples:
        >>> laconic.RingGraph(rank=0, world_size=4).get_peers()  # sends to, receives from
        ([1], [3])
    """

    name: ClassVar[str] = ""
    """The graph's name in `laconic.algorithms.topology`."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        nprocs_per_node: int = 1,
        local_rank: int = 0,
        peers_per_itr: int = 1,
    ) -> None:
        if not self.name:
            names = [kind.__name__ for kind in GraphManager.__subclasses__()]
            raise ValueError(f"GraphManager is abstract: graph must be one of {', '.join(names)}")
        self.world_size = check_int("world_size", world_size, 1)
        self.rank = check_int("rank", rank, 0)
        if rank >= world_size:
            raise ValueError(f"rank {rank} must be below world_size {world_size}: both count nodes")
        self.graph = Graph(self.name, peers_per_itr, repeats=True)
        self._gossips = 0

    def get_peers(self, rotate: bool = False) -> tuple[list[int], list[int]]:
        """Return the nodes to which this one sends, and those that send to it.

        ``rotate``: move on to the next gossip first.
        """
        self._gossips += rotate
        at = self.rank, self.world_size, self._gossips
        return list(self.graph.out_peers(*at)), list(self.graph.in_peers(*at))

    def is_regular_graph(self) -> bool:
        """Return whether every node has as many in-peers as out-peers, so push weights stay 1."""
        return not (self.name.startswith("bipartite") and self.world_size % 2)


class NPeerDynamicDirectedExponentialGraph(GraphManager):
    """Hops ``j*(p+1)^i``: with one peer 1, 2, 4, ... This is the default graph.

    The arguments are those of `GraphManager`.

    Examples:
        >>> graph = laconic.NPeerDynamicDirectedExponentialGraph(rank=0, world_size=8)
        >>> graph.get_peers(rotate=True)  # in the second gossip
        ([2], [6])
    """

    name = "exponential"


class DynamicDirectedExponentialGraph(GraphManager):
    """Hops 1, -1, 2, -2, 4, -4, ...

    The arguments are those of `GraphManager`.

    Examples:
        >>> laconic.DynamicDirectedExponentialGraph(rank=0, world_size=8).get_peers(rotate=True)
        ([7], [1])
    """

    name = "directed_exponential"


class DynamicBipartiteExponentialGraph(GraphManager):
    """Hops 1, -1, 3, -3, 5, -5, 9, -9, ...; odd and even nodes send only to each other.

    The arguments are those of `GraphManager`.

    Examples:
        >>> laconic.DynamicBipartiteExponentialGraph(rank=0, world_size=8).get_peers(rotate=True)
        ([7], [1])
    """

    name = "bipartite_exponential"


class DynamicDirectedLinearGraph(GraphManager):
    """Hops 1, -1, 3, -3, 5, -5, ...: all odd distances.

    The arguments are those of `GraphManager`.

    Examples:
        >>> laconic.DynamicDirectedLinearGraph(rank=0, world_size=8).get_peers(rotate=True)
        ([7], [1])
    """

    name = "directed_linear"


class DynamicBipartiteLinearGraph(GraphManager):
    """All distances in both directions; odd and even nodes send only to each other.

    The arguments are those of `GraphManager`.

    Examples:
        >>> laconic.DynamicBipartiteLinearGraph(rank=0, world_size=8).get_peers(rotate=True)
        ([7], [1])
    """

    name = "bipartite_linear"


class RingGraph(GraphManager):
    """The next node, and with two peers also the previous one.

    The arguments are those of `GraphManager`.

    Examples:
        >>> laconic.RingGraph(rank=0, world_size=8).get_peers(rotate=True)
        ([1], [7])
    """

    name = "ring"


class UniformMixing:
    """The same share for each out-peer and for the node itself: ``1/(peers + 1)``.

    Assran et al. 2019. Gossip here has no other mixing.

    Args:
        graph: the graph.
        device: for compatibility with fairscale.

    Examples:
        >>> graph = laconic.RingGraph(rank=0, world_size=4)
        >>> laconic.UniformMixing(graph).graph_manager is graph
        True
    """

    def __init__(self, graph: GraphManager, device: torch.device | str | None = None) -> None:
        if not isinstance(graph, GraphManager):
            raise ValueError(f"graph must be a GraphManager, not {graph!r}")
        self.graph_manager = graph
