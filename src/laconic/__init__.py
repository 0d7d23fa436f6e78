"""laconic: train PyTorch models data-parallel over slow networks by talking less."""

from laconic import links, recipes
from laconic.attach import attach, init
from laconic.errors import LinkError
from laconic.links import simulate
from laconic.metrics import JsonLines, Metrics, TensorBoard
from laconic.recipes import ddp, diloco, local_sgd, post_local_sgd, slowmo
from laconic.round import Clock, Exchange, Recipe, Round, Update
from laconic.schedules import after, any_of, every, until
from laconic.synchronizer import Stats, Synchronizer

__version__ = "0.1.0"

__all__ = [
    "Clock",
    "Exchange",
    "JsonLines",
    "LinkError",
    "Metrics",
    "Recipe",
    "Round",
    "Stats",
    "Synchronizer",
    "TensorBoard",
    "Update",
    "after",
    "any_of",
    "attach",
    "ddp",
    "diloco",
    "every",
    "init",
    "links",
    "local_sgd",
    "post_local_sgd",
    "recipes",
    "simulate",
    "slowmo",
    "until",
]
