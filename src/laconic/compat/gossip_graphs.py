"""The graphs and mixing of SlowMoDistributedDataParallel's gossip, under fairscale's names.

Each class is one of `laconic.algorithms.topology`'s graphs, seen from one node; formulas are there.
They are pure: no process group is made for an edge, as fairscale does.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from laconic.algorithms.topology import Graph
from laconic.errors import check_int


class GraphManager:
    """Who gossips with whom, as node ``rank`` of ``world_size`` nodes sees it.

    ``peers_per_itr``: to how many nodes each one sends in one gossip. ``nprocs_per_node`` and
    ``local_rank`` are there for fairscale's sake: every rank of a node carries its part.
    """

    name: ClassVar[str] = ""
    """In `laconic.algorithms.topology`."""
    dynamic: ClassVar[bool] = True

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
            raise ValueError(f"graph must be one of {', '.join(names)}")
        self.world_size = check_int("world_size", world_size, 1)
        self.rank = check_int("rank", rank, 0)
        self.nprocs_per_node = check_int("nprocs_per_node", nprocs_per_node, 1)
        self.local_rank = check_int("local_rank", local_rank, 0)
        if rank >= world_size or local_rank >= nprocs_per_node:
            raise ValueError(
                f"rank {rank} must be below world_size {world_size} (both count nodes), and "
                f"local_rank {local_rank} below nprocs_per_node {nprocs_per_node}"
            )
        self.graph = Graph(self.name, peers_per_itr, repeats=True)
        self._gossips = 0

    @property
    def peers_per_itr(self) -> int:
        """To how many nodes each one sends in one gossip."""
        return self.graph.peers

    def get_peers(self, rotate: bool = False) -> tuple[list[int], list[int]]:
        """The nodes to which this one sends, and those that send to it; ``rotate``: in the next
        gossip, and from now on."""
        self._gossips += rotate
        at = self.rank, self.world_size, self._gossips
        return list(self.graph.out_peers(*at)), list(self.graph.in_peers(*at))

    def is_regular_graph(self) -> bool:
        """Whether every node has as many in-peers as out-peers, so that push weights stay 1."""
        return not (self.is_bipartite_graph() and self.world_size % 2)

    def is_bipartite_graph(self) -> bool:
        """Whether odd and even nodes talk to each other only."""
        return self.name.startswith("bipartite")

    def is_dynamic_graph(self) -> bool:
        """Whether peers change from one gossip to the next."""
        return self.dynamic

    def is_passive(self, rank: int | None = None) -> bool:
        """Whether a node is one of the even ones of a bipartite graph."""
        return self.is_bipartite_graph() and (self.rank if rank is None else rank) % 2 == 0


class NPeerDynamicDirectedExponentialGraph(GraphManager):
    """Hops ``j*(p+1)^i``: with one peer 1, 2, 4, ... The default."""

    name = "exponential"


class DynamicDirectedExponentialGraph(GraphManager):
    """Hops 1, -1, 2, -2, 4, -4, ..."""

    name = "directed_exponential"


class DynamicBipartiteExponentialGraph(GraphManager):
    """Hops 1, -1, 3, -3, 5, -5, 9, -9, ...; odd and even nodes talk to each other only."""

    name = "bipartite_exponential"


class DynamicDirectedLinearGraph(GraphManager):
    """Hops 1, -1, 3, -3, 5, -5, ...: all odd distances."""

    name = "directed_linear"


class DynamicBipartiteLinearGraph(GraphManager):
    """All distances, both ways; odd and even nodes talk to each other only."""

    name = "bipartite_linear"


class RingGraph(GraphManager):
    """The next node; with two peers also the one before."""

    name = "ring"
    dynamic = False


class UniformMixing:
    """The same share for each out-peer and for oneself: ``1/(peers + 1)`` (Assran et al. 2019).

    ``device`` is there for fairscale's sake.
    """

    def __init__(self, graph: GraphManager, device: torch.device | str | None = None) -> None:
        if not isinstance(graph, GraphManager):
            raise ValueError(f"graph must be a GraphManager, not {graph!r}")
        self.graph_manager = graph
        self.device = device

    def is_uniform(self) -> bool:
        """Whether all shares are alike: they are."""
        return True

    def is_regular(self) -> bool:
        """Whether push weights stay 1."""
        return self.graph_manager.is_regular_graph()

    def get_mixing_weights(self, residual_adjusted: bool = True) -> dict[str | int, torch.Tensor]:
        """``"lo"``: one's own share; ``"uniform"`` and each out-peer: the others', as multiples of
        ``lo`` where ``residual_adjusted``."""
        peers, _ = self.graph_manager.get_peers()
        lo = torch.tensor([1.0 / (len(peers) + 1)], device=self.device)
        share = torch.ones_like(lo) if residual_adjusted else lo.clone()
        return {"lo": lo, "uniform": share, **{peer: share.clone() for peer in peers}}
