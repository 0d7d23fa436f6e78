"""laconic in the Trainer of Hugging Face Transformers.

    trainer = LaconicTrainer(model, arguments, train_dataset=data, recipe=laconic.auto())
    trainer.train()

Start the program as for the Trainer's own data parallelism: with torchrun or ``accelerate launch``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from laconic.integrations.versions import check_versions

check_versions("transformers")

import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint
from transformers.training_args import ParallelMode
from transformers.utils import logging

from laconic.algorithms.auto import Auto
from laconic.algorithms.parse import as_recipe
from laconic.algorithms.round import Recipe
from laconic.attach import attach
from laconic.checkpoint import load, save
from laconic.engine.synchronizer import Synchronizer
from laconic.errors import refuse
from laconic.integrations import common
from laconic.integrations.common import FOLDER
from laconic.sampler import ElasticSampler

logger = logging.get_logger(__name__)
OF_DDP = (
    "ddp_find_unused_parameters",
    "ddp_bucket_cap_mb",
    "ddp_broadcast_buffers",
    "ddp_static_graph",
)


class LaconicMixin:
    """Trains a Trainer's model by ``recipe``. Put it before the class of the trainer:

        class Mine(LaconicMixin, SFTTrainer): ...

    ``attach_options``: further arguments for `laconic.attach`, such as ``metrics``.

    The model is not wrapped in DistributedDataParallel. Gradients are averaged once per optimizer
    step, however many batches it accumulates, and before they are clipped. Evaluation, the best
    model and saved models use the consensus weights. Each checkpoint folder has every rank's state,
    so ``resume_from_checkpoint`` continues bit for bit. When training ends, all ranks hold the
    consensus model. `sync` is the synchronizer. The log has the bytes sent and the rounds so far.

    With recipes that communicate more than gradients, ``average_tokens_across_devices`` is switched
    off, because it sends a message in every step.

    With ``elastic`` among the options, workers come and go. Each is a process alone, which saves
    its checkpoints in an ``output_dir`` of its own. The samples are dealt by an `ElasticSampler`,
    so training ends after ``max_steps``. A newcomer receives the model, the optimizer, the schedule
    and the step. A checkpoint to resume from is read when the run begins, and not by newcomers.

    Raises ``ValueError`` for settings that contradict this: DeepSpeed, FSDP, several GPUs in one
    process, ``auto_find_batch_size``, ``enable_jit_checkpoint``.
    """

    def __init__(
        self,
        *arguments: Any,
        recipe: Recipe | Auto | str,
        attach_options: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self.recipe = as_recipe(recipe)
        self.attach_options = dict(attach_options or {})
        self.sync: Synchronizer | None = None
        self._resumed_from: str | None = None
        self._sampler: ElasticSampler | None = None
        super().__init__(*arguments, **more)
        # first: other callbacks see the model attached at the beginning, and the consensus at the
        # end
        self.callback_handler.callbacks.insert(0, _Rounds(self))  # type: ignore[attr-defined]

    # -- before training ----

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        _check(self)
        accelerator = self.accelerator  # type: ignore[attr-defined]
        prepare = accelerator.prepare_model

        def without_wrapper(
            model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
        ) -> nn.Module:
            prepared: nn.Module = prepare(model, device_placement, evaluation_mode=True)
            return prepared

        accelerator.prepare_model = without_wrapper
        common.defer_averaging(accelerator, lambda _: self.sync)
        arguments = self.args  # type: ignore[attr-defined]
        if common.is_elastic(self.attach_options):
            arguments.ignore_data_skip = True  # the sampler has its own state
        if not common.averages_gradients(self.recipe) and arguments.average_tokens_across_devices:
            arguments.average_tokens_across_devices = False
            logger.info(
                "average_tokens_across_devices is switched off: it sends a message in every step"
            )

    def attach(self) -> None:
        """Attach the synchronizer: called when training begins."""
        arguments = self.args  # type: ignore[attr-defined]
        options = {"timeout": float(arguments.ddp_timeout), **self.attach_options}
        common.check_processes(options, "for CPUs, pass TrainingArguments(use_cpu=True)")
        model, optimizer, accelerator = self._plain()
        elastic = common.is_elastic(options)
        if elastic:
            options = common.with_others(options, self._others())
        self.sync = attach(model, optimizer, self.recipe, scaler=accelerator.scaler, **options)
        resumed, self._resumed_from = self._resumed_from, None
        if elastic and not self.sync.step:  # the run begins: a worker may have no checkpoint
            self._load(Path(resumed or arguments.output_dir) / FOLDER, missing_ok=True)
        elif resumed is not None and not elastic:
            self._load(Path(resumed) / FOLDER)
        if elastic:  # which may have begun without this worker
            state = self.state  # type: ignore[attr-defined]
            state.global_step = self._globalstep_last_logged = self.sync.step
            self._initial_global_step = self.sync.step

    def _load(self, folder: Path, **options: bool) -> None:
        """Load the state that `save` has stored in ``folder``."""
        model, optimizer, _ = self._plain()
        loading = partial(
            load, folder, model, optimizer, self.sync, others=self._others(), **options
        )
        common.load_state(loading, folder)

    def finish(self) -> None:
        """Leave the consensus model on every rank: called when training ends."""
        if self.sync is not None and self.sync.attached:
            with self.sync:
                pass

    def _agree_on_checkpoint(self, given: str | bool | None) -> None:
        """Raise ``ValueError`` on every rank, if only some of them have the checkpoint."""
        if not given or not dist.is_initialized():
            return
        folder = given if isinstance(given, str) else get_last_checkpoint(self.args.output_dir)  # type: ignore[attr-defined]
        there = folder is not None and (Path(folder) / TRAINER_STATE_NAME).is_file()
        ranks: list[bool] = [there] * dist.get_world_size()
        dist.all_gather_object(ranks, there)
        missing = [rank for rank, has in enumerate(ranks) if not has]
        if missing and len(missing) < len(ranks):
            raise ValueError(
                f"ranks {missing} do not have the checkpoint, and the others do: to resume, all "
                "hosts need its folder, shared or copied"
            )

    def _plain(self) -> tuple[nn.Module, Any, Any]:
        """The model and the optimizer without Accelerate's wrappers, and the accelerator."""
        accelerator = self.accelerator  # type: ignore[attr-defined]
        model = accelerator.unwrap_model(self.model_wrapped, keep_torch_compile=False)  # type: ignore[attr-defined]
        optimizer = self.optimizer  # type: ignore[attr-defined]
        return model, getattr(optimizer, "optimizer", optimizer), accelerator

    def _others(self) -> dict[str, Any]:
        scaler = self.accelerator.scaler  # type: ignore[attr-defined]
        found = {"scheduler": self.lr_scheduler, "data": self._sampler, "scaler": scaler}  # type: ignore[attr-defined]
        return {name: each for name, each in found.items() if each is not None}

    # -- the trainer's methods ----

    def train(self, resume_from_checkpoint: str | bool | None = None, **more: Any) -> Any:
        """As the trainer's."""
        self._resumed_from = None
        self._agree_on_checkpoint(resume_from_checkpoint)
        try:
            return super().train(resume_from_checkpoint, **more)  # type: ignore[misc]
        except BaseException as error:
            common.leave(self.sync, error)
            raise
        finally:
            _forget_preparation(self.model)  # type: ignore[attr-defined]

    def get_train_dataloader(self) -> Any:
        """As the trainer's. Where workers come and go, Accelerate does not prepare it: what that
        reads ahead would be lost with a worker."""
        if not common.is_elastic(self.attach_options):
            return super().get_train_dataloader()  # type: ignore[misc]
        accelerator = self.accelerator  # type: ignore[attr-defined]
        prepare = accelerator.prepare
        accelerator.prepare = lambda loader: loader
        try:
            return super().get_train_dataloader()  # type: ignore[misc]
        finally:
            accelerator.prepare = prepare

    def _get_train_sampler(self, *arguments: Any) -> Any:
        if not common.is_elastic(self.attach_options):
            return super()._get_train_sampler(*arguments)  # type: ignore[misc]
        given = self.args  # type: ignore[attr-defined]
        seed = given.seed if given.data_seed is None else given.data_seed
        data, shuffle = self.train_dataset, _strategy(given) == "random"  # type: ignore[attr-defined]
        self._sampler = ElasticSampler(data, seed=seed, shuffle=shuffle)
        return self._sampler

    def evaluation_loop(self, *arguments: Any, **more: Any) -> Any:
        """As the trainer's, with the consensus weights."""
        with common.consensus(self.sync):
            return super().evaluation_loop(*arguments, **more)  # type: ignore[misc]

    def save_model(self, *arguments: Any, **more: Any) -> Any:
        """As the trainer's, with the consensus weights. During training, every rank must call
        it."""
        with common.consensus(self.sync):
            return super().save_model(*arguments, **more)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *arguments: Any, **more: Any) -> None:
        """As the trainer's, with the bytes sent, the rounds and the seconds of waiting so far."""
        if self.sync is not None and "loss" in logs:
            logs.update(common.report(self.sync))
        super().log(logs, *arguments, **more)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if self.sync is not None and self.sync.attached:
            model, optimizer, _ = self._plain()
            save(Path(output_dir) / FOLDER, model, optimizer, self.sync, others=self._others())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self._resumed_from = checkpoint  # not the base class's: `attach` loads this rank's own

    def _load_best_model(self) -> None:
        sync = self.sync
        if sync is not None and sync.attached:
            sync.finish()
        super()._load_best_model()  # type: ignore[misc]
        if sync is not None and sync.attached:
            best = Path(self.state.best_model_checkpoint)  # type: ignore[attr-defined]
            files = best.iterdir() if best.is_dir() else ()
            found = any(file.suffix in (".safetensors", ".bin") for file in files)
            if sync.mean(float(found)) < 1:  # hosts without the folder of rank 0
                common.share_model(sync)
            sync.detach()


class LaconicTrainer(LaconicMixin, Trainer):
    """The Trainer of Transformers, training by ``recipe``: see `LaconicMixin`."""


class _Rounds(TrainerCallback):
    """Attaches when everything is prepared, and finishes."""

    def __init__(self, trainer: LaconicMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.attach()

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if self._trainer.sync is not None and common.is_elastic(self._trainer.attach_options):
            state.global_step = self._trainer.sync.step  # a newcomer's first step skips some

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._trainer.finish()


def _forget_preparation(model: nn.Module) -> None:
    """Have the next trainer or accelerator prepare ``model`` anew, with a wrapper of its own."""
    vars(model).pop("_is_accelerate_prepared", None)


def _elastic_problems(trainer: Any) -> dict[str, object]:
    """Messages about settings that contradict workers that come and go, and whether they do."""
    arguments = trainer.args
    if not common.is_elastic(trainer.attach_options):
        return {}
    grouped = getattr(arguments, "group_by_length", False)
    strategy = "group_by_length" if grouped else _strategy(arguments)
    return {
        "workers come and go, so an epoch has no fixed number of steps: set max_steps": (
            arguments.max_steps <= 0
        ),
        "workers come and go, so samples are dealt one by one: set train_sampling_strategy to "
        f"'random' or 'sequential', not {strategy!r}": strategy not in ("random", "sequential"),
        "a newcomer cannot evaluate before its first step: leave eval_on_start out": (
            arguments.eval_on_start
        ),
        "a newcomer does not have the best model: leave load_best_model_at_end out": (
            arguments.load_best_model_at_end
        ),
    }


def _strategy(arguments: Any) -> str:
    """How samples are chosen; older versions know only one order."""
    return str(getattr(arguments, "train_sampling_strategy", "random"))


def _check(trainer: Any) -> None:
    """Raise ``ValueError`` for settings that contradict training by a recipe."""
    arguments = trainer.args
    modes = (ParallelMode.DISTRIBUTED, ParallelMode.NOT_PARALLEL, ParallelMode.NOT_DISTRIBUTED)
    parallelism = getattr(arguments, "parallelism_config", None)
    ddp = [name for name in OF_DDP if getattr(arguments, name, None) is not None]
    refuse(
        {
            "laconic does not wrap the model in DistributedDataParallel: leave "
            f"{', '.join(ddp)} out": ddp,
            "laconic cannot be combined with DeepSpeed: leave `deepspeed` out": arguments.deepspeed,
            "laconic cannot be combined with the Trainer's FSDP: leave `fsdp` out; for sharded "
            "models, call laconic.attach(mesh=) in a loop of your own": arguments.fsdp,
            "laconic cannot be combined with parallelism_config: leave it out": (
                parallelism is not None and parallelism.total_size > 1
            ),
            "one process uses several GPUs, which averages all gradients at every step: start one "
            "process per GPU with torchrun": arguments.n_gpu > 1,
            "auto_find_batch_size may start training again on some ranks and not on others: set "
            "per_device_train_batch_size": arguments.auto_find_batch_size,
            **_elastic_problems(trainer),
            "enable_jit_checkpoint saves at another step on each rank: leave it out, and save "
            "every `save_steps`": getattr(arguments, "enable_jit_checkpoint", False),
            f"laconic does not support the Trainer's mode {arguments.parallel_mode.value!r}: start "
            "one process per worker with torchrun": arguments.parallel_mode not in modes,
            "laconic cannot be combined with DeepSpeed or FSDP: `accelerate launch` has set one of "
            "them; choose plain multi-process training": (
                trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
            ),
        }
    )
