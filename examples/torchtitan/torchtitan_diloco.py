"""DiLoCo between sites in torchtitan. Each site trains a copy of the model, sharded by FSDP2.

    pip install torchtitan==0.3.0
    export PYTHONPATH=examples/torchtitan
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m torchtitan.train --module torchtitan_diloco --config llama3_8b \\
        --parallelism.data-parallel-replicate-degree 4 --period 100

The replicas of torchtitan's HSDP, here 4, are laconic's workers: their gradients are not averaged.
To its ranks a site is the world: the batch size, the loss in the log, and clipping are the site's.
Only the data are divided among all ranks. All sites write to one checkpoint folder.
"""

from dataclasses import dataclass, fields, replace
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.distributed import ParallelDims
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.llama3 import config_registry
from torchtitan.tools.utils import device_type
from torchtitan.trainer import Trainer

import laconic

MESHES = "torchtitan.distributed.parallel_dims.init_device_mesh"


class SitesTrainer(Trainer):
    """torchtitan's trainer in each site, with laconic between them."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        period: int = 100

    def init_distributed(self) -> ParallelDims:
        """The dimensions of this site: all meshes are made from its row of ``self.mesh``."""
        ranks, parallelism = super().init_distributed().world_size, self.config.parallelism
        sites = parallelism.data_parallel_replicate_degree
        shape = sites, ranks // sites
        self.mesh = init_device_mesh(device_type, shape, mesh_dim_names=("sites", "world"))
        one = replace(parallelism, data_parallel_replicate_degree=1)
        dims = ParallelDims.from_config(one, world_size=shape[1])
        with mock.patch(MESHES, lambda *_, **__: self.mesh["world"]):
            dims.build_mesh()
        return dims

    def train(self) -> None:
        super().train()
        self.sync.finish()


class SitesCheckpoint(CheckpointManager):
    """torchtitan's checkpoint of the consensus model, and in its folder every rank's own state."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def __init__(self, config: Config, *, states: dict[str, Any], **parts: Any) -> None:
        super().__init__(config, states=states, **parts)
        self.trainer = states["train_state"]

    def load(self, step: int = -1) -> bool:
        """Load, and then attach: torchtitan takes an optimizer step of its own before it loads."""
        found, trainer = super().load(step), self.trainer
        self.parts = trainer.model_parts[0], list(trainer.optimizers)
        recipe = laconic.diloco(trainer.config.period)
        trainer.sync = laconic.attach(*self.parts, recipe, mesh=trainer.mesh)
        if trainer.step:  # it resumes
            laconic.load(f"{self.folder}/step-{trainer.step}/laconic", *self.parts)
        return found

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            return False
        laconic.save(f"{self.folder}/step-{curr_step}/laconic", *self.parts)
        with self.trainer.sync.consensus():
            return super()._save(curr_step, last_step)


class SitesData(HuggingFaceTextDataLoader):
    """Every rank of every site reads data of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTextDataLoader.Config):
        pass

    def __init__(self, config: Config, **options: Any) -> None:
        everyone = {"dp_world_size": dist.get_world_size(), "dp_rank": dist.get_rank()}
        super().__init__(config, **options | everyone)


def with_sites(config: Trainer.Config) -> SitesTrainer.Config:
    """Make any of torchtitan's text configurations one of several sites."""

    def as_of(kind: type, part: Any, **changes: Any) -> Any:
        return kind.Config(**{f.name: getattr(part, f.name) for f in fields(part)} | changes)

    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"
    data = as_of(SitesData, config.dataloader)
    checkpoint = as_of(SitesCheckpoint, config.checkpoint)
    return as_of(SitesTrainer, config, dataloader=data, checkpoint=checkpoint)


def llama3_debugmodel() -> SitesTrainer.Config:
    return with_sites(config_registry.llama3_debugmodel())


def llama3_8b() -> SitesTrainer.Config:
    return with_sites(config_registry.llama3_8b())
