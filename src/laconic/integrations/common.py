"""What the integrations have in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from laconic.algorithms.auto import Auto
from laconic.algorithms.round import Recipe, workers_differ
from laconic.attach import init
from laconic.elastic import COORDINATOR_VARIABLE, Elastic
from laconic.engine.synchronizer import Synchronizer
from laconic.errors import TIMEOUT, LinkError, refuse
from laconic.links.rank_sets import refused_by_all

FOLDER = "laconic"
"""The folder for every rank's state, in the folder of a checkpoint."""


def refuse_on_all(options: Mapping[str, Any], problems: Mapping[str, object]) -> None:
    """As `refuse`, on all ranks, before an `attach` with ``options``, where the others wait."""
    with refused_by_all(options.get("link"), options.get("timeout", TIMEOUT)):
        refuse(problems)


def is_elastic(options: Mapping[str, Any]) -> bool:
    """Whether `attach` with these ``options`` joins a run whose workers come and go."""
    return options.get("elastic") is not None or bool(os.environ.get(COORDINATOR_VARIABLE))


def with_others(options: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` for `attach` in an elastic run, in which newcomers also receive the state of
    ``others``."""
    elastic = options.get("elastic") or Elastic()
    refuse(
        {f"elastic must be a laconic.Elastic, not {elastic!r}": not isinstance(elastic, Elastic)}
    )
    return {**options, "elastic": replace(elastic, others={**others, **(elastic.others or {})})}


def check_processes(options: Mapping[str, Any], advice: str) -> None:
    """Raise ``ValueError`` if the trainer has not connected the processes that torchrun has
    started; ``advice``: what to set. Makes a process group where there is one process alone, unless
    workers come and go."""
    started = os.environ.get("WORLD_SIZE", "1")
    if is_elastic(options):
        refuse(
            {
                f"{started} processes were started together, and workers that come and go are "
                "started one by one: use a torchrun for each, with --nproc-per-node=1": (
                    started != "1"
                )
            }
        )
        return
    refuse_on_all(
        options,
        {
            f"{started} processes were started, and the trainer has not connected them: "
            f"{advice}": not dist.is_initialized() and started != "1"
        },
    )
    init()


def averages_gradients(recipe: Recipe | Auto) -> bool:
    """Whether ``recipe`` averages gradients in such a way that workers stay alike."""
    return not isinstance(recipe, Auto) and not workers_differ(recipe)


def consensus(sync: Synchronizer | None) -> AbstractContextManager[object]:
    """A context in which the model holds the consensus weights, as far as ``sync`` is attached."""
    return nullcontext() if sync is None or not sync.attached else sync.consensus()


def no_sync(sync: Synchronizer | None) -> AbstractContextManager[None]:
    """A context in which no gradients are averaged, as far as ``sync`` is attached."""
    return nullcontext() if sync is None or not sync.attached else sync.no_sync()


def defer_averaging(accelerator: Any, sync_of: Callable[[Any], Synchronizer | None]) -> None:
    """Let ``accelerator.no_sync(model)``, which Accelerate enters while batches accumulate, also
    enter the `no_sync` of ``sync_of(model)``."""
    without = accelerator.no_sync

    @contextmanager
    def both(model: Any) -> Iterator[None]:
        with without(model), no_sync(sync_of(model)):
            yield

    accelerator.no_sync = both


def report(sync: Synchronizer) -> dict[str, float]:
    """Return what a log should have about ``sync``: bytes sent and rounds so far, and seconds of
    waiting."""
    stats = sync.stats()
    return {
        "laconic_bytes_sent": float(stats.bytes_sent),
        "laconic_rounds": float(stats.rounds),
        "laconic_seconds_waiting": round(stats.seconds_waiting, 3),
    }


def share_model(sync: Synchronizer) -> None:
    """Copy rank 0's model to all ranks."""
    session = sync.driver.session
    session.call("sharing the model")
    session.share(session.state())


def leave(sync: Synchronizer | None, error: BaseException) -> None:
    """Tell the other ranks that this one stops because of ``error``."""
    if sync is not None and sync.attached:
        sync.__exit__(type(error), error, error.__traceback__)


def load_state(load: Callable[[], object], folder: object) -> None:
    """Load every rank's state by ``load``. An error says where the state should be."""
    try:
        load()
    except LinkError:
        raise
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{error} (laconic stores the state of all ranks in {folder}; a checkpoint that "
            "another trainer or strategy has saved has none)"
        ) from error
