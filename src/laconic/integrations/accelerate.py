"""laconic in a training loop of Hugging Face Accelerate.

    model, optimizer, sync = laconic.integrations.accelerate.attach(
        accelerator, model, optimizer, laconic.auto()
    )
    loader, scheduler = accelerator.prepare(loader, scheduler)
    ...
    sync.finish()

`attach` takes the place of ``accelerator.prepare(model, optimizer)``. All other code remains.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from laconic.integrations.versions import check_versions

check_versions("accelerate")

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.algorithms.auto import Auto
from laconic.algorithms.round import Recipe
from laconic.attach import attach as attach_to
from laconic.checkpoint import load, save
from laconic.engine.synchronizer import Synchronizer
from laconic.integrations.common import (
    FOLDER,
    check_processes,
    defer_averaging,
    load_state,
    refuse_on_all,
)

SUPPORTED = [DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU]
PREPARED = "_is_accelerate_prepared"


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    recipe: Recipe | Auto | str,
    **options: Any,
) -> tuple[nn.Module, AcceleratedOptimizer, Synchronizer]:
    """Prepare ``model`` and ``optimizer`` for training by ``recipe``, and return both with the
    synchronizer.

    Call it instead of ``accelerator.prepare(model, optimizer)``: it does the same, except that the
    model is not wrapped in DistributedDataParallel. ``options`` are passed to `laconic.attach`.

    Under ``accelerator.accumulate(model)``, gradients are averaged once for each optimizer step.
    Steps that the GradScaler skips are counted. ``accelerator.save_state`` saves the consensus
    weights as the model, and the state of every rank in the subfolder ``laconic``;
    ``accelerator.load_state`` loads both, so that training continues bit for bit. Call both on
    every rank. Validate inside ``with sync.consensus():``, and call ``sync.finish()`` at the end.

    A prepared scheduler takes as many steps per optimizer step as there are processes, unless
    ``split_batches`` is set, as under DistributedDataParallel.

    Raises ``ValueError`` on every rank if the accelerator uses DeepSpeed, FSDP, tensor parallelism
    or Megatron-LM, or if ``model`` or ``optimizer`` was prepared before.
    """
    kind = accelerator.distributed_type
    parallelism = getattr(accelerator, "parallelism_config", None)
    refuse_on_all(
        options,
        {
            f"laconic cannot be combined with Accelerate's {kind.value}: use plain multi-process "
            "training (`accelerate launch --multi_gpu` or --multi_cpu); for sharded models, call "
            "laconic.attach(mesh=) with FSDP2 and no Accelerator": kind not in SUPPORTED,
            "laconic cannot be combined with Accelerate's parallelism_config: leave it out": (
                parallelism is not None and parallelism.total_size > 1
            ),
            "laconic does not wrap the model in DistributedDataParallel: leave "
            "DistributedDataParallelKwargs out": getattr(accelerator, "ddp_handler", None),
            "model was prepared before, which averages all gradients at every step: pass the plain "
            "model, before accelerator.prepare": isinstance(model, DistributedDataParallel),
            "optimizer was prepared before: pass the plain optimizer": isinstance(
                optimizer, AcceleratedOptimizer
            ),
        },
    )
    check_processes(options, "for CPUs, pass Accelerator(cpu=True)")
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    stepping = accelerator.prepare_optimizer(optimizer)
    setattr(stepping, PREPARED, True)
    plain = accelerator.unwrap_model(prepared, keep_torch_compile=False)
    sync = attach_to(plain, optimizer, recipe, scaler=accelerator.scaler, **options)
    defer_averaging(accelerator, lambda model: sync if model in (prepared, plain) else None)
    _State(accelerator, prepared, plain, optimizer, sync).keep()
    return prepared, stepping, sync


class _State:
    """Saves and loads the state of every rank with the accelerator's own state."""

    def __init__(
        self,
        accelerator: Accelerator,
        prepared: nn.Module,
        plain: nn.Module,
        optimizer: Optimizer,
        sync: Synchronizer,
    ) -> None:
        self._accelerator, self._prepared = accelerator, prepared
        self._of = plain, optimizer, sync
        number = getattr(accelerator, "_laconic_attached", 0)
        accelerator._laconic_attached = number + 1
        self._name = f"{FOLDER}_{number}" if number else FOLDER
        self._loads_from: Path | None = None

    def keep(self) -> None:
        """Save and load with the accelerator from now on."""
        load_own = self._accelerator.load_state
        self._accelerator.register_save_state_pre_hook(self._before_saving)
        self._accelerator.register_load_state_pre_hook(self._before_loading)

        def load_all(*arguments: Any, **more: Any) -> None:
            load_own(*arguments, **more)
            self._load()

        self._accelerator.load_state = load_all

    def _others(self) -> dict[str, Any]:
        """What may differ between ranks, besides: after an overflow, one of them skips a step."""
        accelerator = self._accelerator
        found = {f"scheduler {i}": each for i, each in enumerate(accelerator._schedulers)}
        return found if accelerator.scaler is None else {**found, "scaler": accelerator.scaler}

    def _before_saving(
        self, models: list[nn.Module], weights: list[dict[str, Tensor]], folder: str
    ) -> None:
        plain, _, sync = self._of
        if not sync.attached:
            return
        save(Path(folder) / self._name, *self._of, others=self._others())
        agreed = sync.consensus_state_dict()
        for index, each in enumerate(models[: len(weights)]):
            if each is self._prepared:
                _replace(weights[index], agreed, list(plain.state_dict()))

    def _before_loading(self, _: list[nn.Module], folder: str) -> None:
        self._loads_from = Path(folder) / self._name

    def _load(self) -> None:
        folder, self._loads_from = self._loads_from, None
        if folder is not None and self._of[2].attached:
            load_state(partial(load, folder, *self._of, others=self._others()), folder)


def _replace(weights: dict[str, Any], agreed: dict[str, Any], names: list[str]) -> None:
    """Replace what is in ``weights`` by those of ``agreed``, whose ``names`` have the same
    order. Names that share a tensor still do."""
    shared: dict[tuple[int, torch.Size, tuple[int, ...]], Tensor] = {}
    for own, name in zip(list(weights), names, strict=True):
        before = weights[own]
        if not isinstance(before, Tensor):  # extra state
            weights[own] = agreed[name]
            continue
        key = before.data_ptr(), before.shape, before.stride()
        weights[own] = shared.setdefault(key, agreed[name].contiguous())
