"""What users import from here, and the modules that define it. At run time `__init__.py` reads this
file, and imports a module when one of its names is asked for."""

# isort: off
# fmt: off
from laconic.version import __version__ as __version__
from laconic import codecs as codecs, links as links
from laconic.advisor.show import Advice as Advice
from laconic.advisor.advise import advise as advise
from laconic.algorithms import (
    exchanges as exchanges, recipes as recipes, topology as topology, updates as updates,
)
from laconic.algorithms.exchange import Arrival as Arrival, Exchange as Exchange
from laconic.algorithms.diloco_recipes import (
    diloco as diloco, outer_step as outer_step,
    streaming_diloco as streaming_diloco,
)
from laconic.algorithms.recipes import (
    d_psgd as d_psgd, ddp as ddp, easgd as easgd,
    hierarchical as hierarchical, local_sgd as local_sgd, lsgd as lsgd,
    post_local_sgd as post_local_sgd, power_sgd as power_sgd, sgp as sgp, slowmo as slowmo,
)
from laconic.algorithms.round import (
    GradientRound as GradientRound, Recipe as Recipe, Round as Round,
)
from laconic.algorithms.schedules import (
    after as after, any_of as any_of, every as every, until as until,
)
from laconic.algorithms.update import Clock as Clock, Update as Update
from laconic.attach import attach as attach, init as init
from laconic.algorithms.auto import auto as auto
from laconic.checkpoint import load as load, save as save
from laconic.compat.comm_optimizer import CommOptimizer as CommOptimizer
from laconic.compat.fairscale import (
    SlowMoDistributedDataParallel as SlowMoDistributedDataParallel,
)
from laconic.compat.gossip_graphs import (
    DynamicBipartiteExponentialGraph as DynamicBipartiteExponentialGraph,
    DynamicBipartiteLinearGraph as DynamicBipartiteLinearGraph,
    DynamicDirectedExponentialGraph as DynamicDirectedExponentialGraph,
    DynamicDirectedLinearGraph as DynamicDirectedLinearGraph, GraphManager as GraphManager,
    NPeerDynamicDirectedExponentialGraph as NPeerDynamicDirectedExponentialGraph,
    RingGraph as RingGraph, UniformMixing as UniformMixing,
)
from laconic.compat.slowmo_arguments import SlowMoBaseAlgorithm as SlowMoBaseAlgorithm
from laconic.elastic import Elastic as Elastic
from laconic.engine.recorder import Stats as Stats
from laconic.engine.synchronizer import Synchronizer as Synchronizer, WorkersView as WorkersView
from laconic.errors import LinkError as LinkError
from laconic.links import simulate as simulate
from laconic.links.elastic.faults import Faults as Faults, Trace as Trace
from laconic.links.polls import Closing as Closing
from laconic.metrics import JsonLines as JsonLines
from laconic.muon import muon as muon
from laconic.sampler import ElasticSampler as ElasticSampler

MODULE_OF: dict[str, str]
__all__: list[str]
