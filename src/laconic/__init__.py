"""laconic: train PyTorch models data-parallel over slow networks by talking less."""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from laconic.version import __version__ as __version__

if TYPE_CHECKING:  # an alias makes a name public
    # isort: off
    # fmt: off
    from laconic import codecs as codecs, links as links
    from laconic.advisor.show import Advice as Advice
    from laconic.advisor.advise import advise as advise
    from laconic.algorithms import (
        exchanges as exchanges, recipes as recipes, topology as topology, updates as updates,
    )
    from laconic.algorithms.exchange import Arrival as Arrival, Exchange as Exchange
    from laconic.algorithms.diloco_recipes import (
        des_loc as des_loc, diloco as diloco, muloco as muloco, outer_step as outer_step,
        sparse_loco as sparse_loco, streaming_diloco as streaming_diloco,
    )
    from laconic.algorithms.elastic_recipes import (
        downpour as downpour, eamsgd as eamsgd, easgd as easgd, lsgd as lsgd,
    )
    from laconic.algorithms.recipes import (
        d_psgd as d_psgd, ddp as ddp, demo as demo, hierarchical as hierarchical,
        local_sgd as local_sgd, noloco as noloco, post_local_sgd as post_local_sgd,
        power_sgd as power_sgd, sgp as sgp, slowmo as slowmo,
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
    from laconic.links.quorum.port import Closing as Closing
    from laconic.metrics import (
        JsonLines as JsonLines, Metrics as Metrics, TensorBoard as TensorBoard,
    )
    from laconic.muon import muon as muon
    from laconic.sampler import ElasticSampler as ElasticSampler
    # fmt: on
    # isort: on


NAMES_BY_MODULE = {
    module: names.split()
    for module, names in {
        "laconic.advisor.show": "Advice",
        "laconic.advisor.advise": "advise",
        "laconic.algorithms.auto": "auto",
        "laconic.algorithms.exchange": "Arrival Exchange",
        "laconic.algorithms.recipes": (
            "d_psgd ddp demo des_loc diloco downpour eamsgd easgd hierarchical local_sgd lsgd "
            "muloco noloco outer_step post_local_sgd power_sgd sgp slowmo sparse_loco "
            "streaming_diloco"
        ),
        "laconic.algorithms.round": "GradientRound Recipe Round",
        "laconic.algorithms.schedules": "after any_of every until",
        "laconic.algorithms.update": "Clock Update",
        "laconic.attach": "attach init",
        "laconic.checkpoint": "load save",
        "laconic.compat.comm_optimizer": "CommOptimizer",
        "laconic.compat.fairscale": "SlowMoDistributedDataParallel",
        "laconic.compat.gossip_graphs": (
            "DynamicBipartiteExponentialGraph DynamicBipartiteLinearGraph "
            "DynamicDirectedExponentialGraph DynamicDirectedLinearGraph GraphManager "
            "NPeerDynamicDirectedExponentialGraph RingGraph UniformMixing"
        ),
        "laconic.compat.slowmo_arguments": "SlowMoBaseAlgorithm",
        "laconic.elastic": "Elastic",
        "laconic.engine.recorder": "Stats",
        "laconic.engine.synchronizer": "Synchronizer WorkersView",
        "laconic.errors": "LinkError",
        "laconic.links": "simulate",
        "laconic.links.elastic.faults": "Faults Trace",
        "laconic.links.quorum.port": "Closing",
        "laconic.muon": "muon",
        "laconic.metrics": "JsonLines Metrics TensorBoard",
        "laconic.sampler": "ElasticSampler",
    }.items()
}
_SUBMODULES = {
    "codecs": "laconic.codecs",
    "exchanges": "laconic.algorithms.exchanges",
    "links": "laconic.links",
    "recipes": "laconic.algorithms.recipes",
    "topology": "laconic.algorithms.topology",
    "updates": "laconic.algorithms.updates",
}
"""What users import from here, and the modules that define it. A module is imported when one of its
names is asked for: torch alone takes a second."""
_MODULE_OF = {name: module for module, names in NAMES_BY_MODULE.items() for name in names}

__all__ = sorted([*_MODULE_OF, *_SUBMODULES])  # for type checkers: the aliases above


class _Package(ModuleType):
    """This package. Some of its functions have the name of the module that defines them, which
    would take their place when that module is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and _MODULE_OF.get(name) == f"{__name__}.{name}"):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """By name, as other modules: Ray and others send functions that use ``laconic``."""
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    own = f"{__name__}.{name}"
    if name in _MODULE_OF:
        value = getattr(import_module(_MODULE_OF[name]), name)
    elif name in _SUBMODULES or (not name.startswith("_") and find_spec(own) is not None):
        value = import_module(_SUBMODULES.get(name, own))
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
