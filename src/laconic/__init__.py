"""laconic: train PyTorch models data-parallel over slow networks by talking less."""

from typing import TYPE_CHECKING, Any

from laconic import codecs, links
from laconic.algorithms import exchanges, recipes, topology, updates
from laconic.algorithms.exchange import Arrival, Exchange
from laconic.algorithms.recipes import (
    d_psgd,
    ddp,
    demo,
    diloco,
    downpour,
    eamsgd,
    easgd,
    hierarchical,
    local_sgd,
    lsgd,
    noloco,
    post_local_sgd,
    power_sgd,
    sgp,
    slowmo,
    sparse_loco,
    streaming_diloco,
)
from laconic.algorithms.round import GradientRound, Recipe, Round
from laconic.algorithms.schedules import after, any_of, every, until
from laconic.algorithms.update import Clock, Update
from laconic.attach import attach, init
from laconic.auto import auto
from laconic.checkpoint import load, save
from laconic.compat.comm_optimizer import CommOptimizer
from laconic.compat.dist_optimizer import EASGD, LSGD, DistOptimizer
from laconic.compat.fairscale import SlowMoDistributedDataParallel
from laconic.compat.gossip_graphs import (
    DynamicBipartiteExponentialGraph,
    DynamicBipartiteLinearGraph,
    DynamicDirectedExponentialGraph,
    DynamicDirectedLinearGraph,
    GraphManager,
    NPeerDynamicDirectedExponentialGraph,
    RingGraph,
    UniformMixing,
)
from laconic.compat.slowmo_arguments import SlowMoBaseAlgorithm
from laconic.elastic import Elastic
from laconic.engine.synchronizer import Stats, Synchronizer, WorkersView
from laconic.errors import LinkError
from laconic.links import simulate
from laconic.links.elastic.faults import Faults, Trace
from laconic.links.quorum.port import Closing
from laconic.metrics import JsonLines, Metrics, TensorBoard
from laconic.sampler import ElasticSampler

if TYPE_CHECKING:
    from laconic.advisor import Advice, advise

__version__ = "0.1.0"

__all__ = [
    "EASGD",
    "LSGD",
    "Advice",
    "Arrival",
    "Clock",
    "Closing",
    "CommOptimizer",
    "DistOptimizer",
    "DynamicBipartiteExponentialGraph",
    "DynamicBipartiteLinearGraph",
    "DynamicDirectedExponentialGraph",
    "DynamicDirectedLinearGraph",
    "Elastic",
    "ElasticSampler",
    "Exchange",
    "Faults",
    "GradientRound",
    "GraphManager",
    "JsonLines",
    "LinkError",
    "Metrics",
    "NPeerDynamicDirectedExponentialGraph",
    "Recipe",
    "RingGraph",
    "Round",
    "SlowMoBaseAlgorithm",
    "SlowMoDistributedDataParallel",
    "Stats",
    "Synchronizer",
    "TensorBoard",
    "Trace",
    "UniformMixing",
    "Update",
    "WorkersView",
    "advise",
    "after",
    "any_of",
    "attach",
    "auto",
    "codecs",
    "d_psgd",
    "ddp",
    "demo",
    "diloco",
    "downpour",
    "eamsgd",
    "easgd",
    "every",
    "exchanges",
    "hierarchical",
    "init",
    "links",
    "load",
    "local_sgd",
    "lsgd",
    "noloco",
    "post_local_sgd",
    "power_sgd",
    "recipes",
    "save",
    "sgp",
    "simulate",
    "slowmo",
    "sparse_loco",
    "streaming_diloco",
    "topology",
    "until",
    "updates",
]


def __getattr__(name: str) -> Any:
    """The advisor, which is built on all of the above, when it is asked for."""
    if name in ("Advice", "advise"):
        import laconic.advisor

        return getattr(laconic.advisor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
