"""laconic as a strategy of Lightning's Trainer.

trainer = Trainer(accelerator="cpu", devices=4, strategy=LaconicStrategy(laconic.auto()))
trainer.fit(model, data)
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from laconic.integrations.versions import check_versions

check_versions("lightning")

from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import LBFGS, Optimizer

from laconic.algorithms.auto import Auto
from laconic.algorithms.parse import as_recipe
from laconic.algorithms.round import Recipe
from laconic.attach import attach
from laconic.checkpoint import load, save
from laconic.checkpoints.random_state import load_random_state, random_state
from laconic.engine.synchronizer import Synchronizer
from laconic.errors import refuse
from laconic.integrations import common
from laconic.integrations.common import FOLDER

OPTIONS = (
    "accelerator",
    "checkpoint_io",
    "cluster_environment",
    "parallel_devices",
    "precision_plugin",
    "process_group_backend",
    "start_method",
    "timeout",
)


class LaconicStrategy(DDPStrategy):
    """Trains by ``recipe``, with one process for each device.

    ``attach_options``: further arguments for `laconic.attach`, such as ``metrics``. ``options`` are
    those of DDPStrategy that are not about DistributedDataParallel: ``process_group_backend``,
    ``timeout``, ``cluster_environment`` and others.

    The model is not wrapped. While batches accumulate, gradients are not averaged. With manual
    optimization, put ``with self.trainer.strategy.sync.no_sync():`` around backward passes that are
    not followed by a step. Several optimizers take one step each in every training step.

    Validation, checkpoints and the model after training are the consensus. Beside every checkpoint
    ``NAME.ckpt`` there is a folder ``NAME.ckpt.laconic`` with every rank's state, so that
    ``fit(ckpt_path=)`` continues bit for bit, if the data loader does, too. A checkpoint with
    weights only has no such folder. Every ``log_every_n_steps``, the loggers receive the bytes sent
    and the rounds so far. `sync` is the synchronizer, while training.

    With recipes that communicate more than gradients, Lightning's message about SIGTERM, which
    rank 0 sends before every batch, is left out: each rank handles the signals that it receives.

    With ``elastic`` among the options, workers come and go. Each is a Trainer with one device and a
    ``default_root_dir`` of its own, and data from an `ElasticSampler` among the ``others`` of
    `laconic.Elastic`, where the schedules need not be. Training ends after ``max_steps``. A
    newcomer begins at the step, and with the state, of the others; it reads no checkpoint.

    Raises ``ValueError`` for options that are for DistributedDataParallel, and for settings of the
    Trainer that contradict workers that come and go.
    """

    def __init__(
        self,
        recipe: Recipe | Auto | str,
        *,
        attach_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        other = sorted(options.keys() - set(OPTIONS))
        refuse(
            {
                "LaconicStrategy does not wrap the model in DistributedDataParallel: leave "
                f"{', '.join(other)} out; options: {', '.join(OPTIONS)}": other
            }
        )
        super().__init__(**options)
        self.recipe = as_recipe(recipe)
        self.attach_options = dict(attach_options or {})
        self.sync: Synchronizer | None = None
        self._validating: AbstractContextManager[Any] | None = None
        self._loaded_from: Any = None
        self._random_state: Any = None
        self._folders: dict[str, Path] = {}
        """By the name of a checkpoint's file on this rank: the folder with the ranks' state."""
        self._logged = 0
        self._joined_late = False
        """Whether this worker has joined an elastic run that had begun."""

    # -- setting up ----

    def configure_ddp(self) -> None:
        """Does nothing: the model is not wrapped."""

    def setup(self, trainer: Any) -> None:
        """As the base class, and attach the synchronizer before training."""
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._logged = 0
        options = dict(self.attach_options)
        if self._timeout is not None:
            options.setdefault("timeout", self._timeout.total_seconds())
        common.check_processes(options, "pass devices= and num_nodes= to the Trainer")
        scaler = getattr(self.precision_plugin, "scaler", None)
        module, optimizers = self._attached_to()
        loop, elastic = trainer.fit_loop.epoch_loop, common.is_elastic(options)
        if elastic:
            refuse(_elastic_problems(trainer))
            schedules = enumerate(config.scheduler for config in self.lr_scheduler_configs)
            options = common.with_others(options, {f"scheduler {k}": each for k, each in schedules})
            # else it may end training with exit code 0, before this worker has left the run
            trainer._signal_connector._sigterm_notifier_fn = lambda *_: None
        self.sync = attach(module, optimizers, self.recipe, scaler=scaler, **options)
        self._joined_late = elastic and self.sync.step > 0
        self._follow(trainer)
        if hasattr(loop, "_broadcast_sigterm_tensor") and not common.averages_gradients(
            self.recipe
        ):
            loop._broadcast_sigterm_tensor = lambda: None

    def _follow(self, trainer: Any) -> None:
        """In an elastic run that had begun, count the steps that others have taken."""
        if self._joined_late and self.sync is not None:
            _skip(trainer, self.sync.step - trainer.global_step)

    def _attached_to(self) -> tuple[nn.Module, Any]:
        """The module, and its optimizer or the list of several."""
        module, optimizers = self.lightning_module, list(self.optimizers)
        assert module is not None, "connected"
        return module, optimizers[0] if len(optimizers) == 1 else optimizers

    # -- training ----

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **options: Any,
    ) -> Any:
        """As the base class, but the closure, which computes the gradients, is called before the
        optimizer's step and not within it."""
        sync, plugin = self.sync, self.precision_plugin
        before = 0 if sync is None else sync.step
        if getattr(plugin, "scaler", None) is not None or isinstance(optimizer, LBFGS):
            result = super().optimizer_step(optimizer, closure, model, **options)
        else:
            result = closure()
            plugin._after_closure(model or self.lightning_module, optimizer)
            optimizer.step(**options)
        module = self.lightning_module
        if sync is not None and module is not None:  # a newcomer's first step ends with the others'
            _skip(module.trainer, sync.step - before - 1)
        return result

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """While batches accumulate, gradients are not averaged."""
        with common.no_sync(self.sync):
            yield

    def on_train_start(self) -> None:
        """Begin at the step of the other workers. Or continue with the random state of a checkpoint
        from the middle of an epoch: making the data loader's iterator has drawn from it once more.
        After the end of an epoch, a run that was not interrupted makes another iterator, too."""
        state, self._random_state = self._random_state, None
        module = self.lightning_module
        if module is not None:
            self._follow(module.trainer)
        if state is None or module is None or not module.trainer.fit_loop.restarted_mid_epoch:
            return
        load_random_state(state)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Log what the synchronizer has done so far."""
        module, sync = self.lightning_module, self.sync
        if sync is None or module is None or sync.step == self._logged:
            return
        trainer = module.trainer
        if trainer.log_every_n_steps and sync.step % trainer.log_every_n_steps == 0:
            self._logged = sync.step
            for each in trainer.loggers:
                each.log_metrics(common.report(sync), step=trainer.global_step)

    def on_train_end(self) -> None:
        """Leave the consensus model on every rank."""
        if self.sync is not None and self.sync.attached:
            self.sync.finish()

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks that this one stops."""
        with suppress(Exception):
            self._exit_consensus()
        common.leave(self.sync, exception)

    def teardown(self) -> None:
        """As the base class."""
        if self.sync is not None and self.sync.attached:
            self.sync.detach()
        super().teardown()

    # -- the consensus ----

    def on_validation_start(self) -> None:
        """Validate the consensus weights, or the mean of the workers' moving averages."""
        self._average_moving_averages()
        self._enter_consensus()

    def on_validation_end(self) -> None:
        """Restore this rank's own weights."""
        self._exit_consensus()

    def _average_moving_averages(self) -> None:
        """Replace what WeightAveraging keeps, which it swaps in to validate and saves as the model,
        by its mean over the workers. The mean of moving averages is that of the mean."""
        module, sync = self.lightning_module, self.sync
        if sync is None or not sync.attached or module is None:
            return
        for each in module.trainer.callbacks:
            if isinstance(each, WeightAveraging) and not common.averages_gradients(self.recipe):
                average = each._average_model
                assert average is not None, "made before training"
                tensors = (*average.parameters(), *average.buffers())
                sync.average(t for t in tensors if t.is_floating_point())

    def _enter_consensus(self) -> None:
        self._validating = common.consensus(self.sync)
        self._validating.__enter__()

    def _exit_consensus(self) -> bool:
        """Leave the context, and return whether there was one."""
        context, self._validating = self._validating, None
        if context is not None:
            context.__exit__(None, None, None)
        return context is not None

    # -- checkpoints ----

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The consensus weights; during training, every rank must call it."""
        if self.sync is None or not self.sync.attached:
            own: dict[str, Any] = super().lightning_module_state_dict()
            return own
        self._average_moving_averages()
        return self.sync.consensus_state_dict()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """As the base class, and save every rank's state beside the checkpoint."""
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if self.sync is None or not self.sync.attached or "optimizer_states" not in checkpoint:
            return
        # a name with a metric in it may differ between ranks
        folder = _folder(self.broadcast(str(filepath)))
        self._folders[str(filepath)] = folder
        within = self._exit_consensus()
        try:
            save(folder, *self._attached_to(), self.sync, others=self._others())
        finally:
            if within:
                self._enter_consensus()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """As the base class."""
        self._loaded_from = checkpoint_path
        if weights_only is None:
            return super().load_checkpoint(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """As the base class, and load every rank's state."""
        super().load_optimizer_state_dict(checkpoint)
        loaded, self._loaded_from = self._loaded_from, None
        if self.sync is not None and loaded is not None and not self._joined_late:
            folder, others = _folder(loaded, resolve=True), self._others()
            loading = partial(load, folder, *self._attached_to(), self.sync, others=others)
            common.load_state(loading, folder)
            self._random_state = random_state()

    def remove_checkpoint(self, filepath: Any) -> None:
        """As the base class, and remove the folder with the ranks' state."""
        super().remove_checkpoint(filepath)
        folder = self._folders.pop(str(filepath), None)
        if self.local_rank == 0:  # an earlier run's folder has the name of its checkpoint
            shutil.rmtree(folder or _folder(filepath), ignore_errors=True)

    def _others(self) -> dict[str, Any]:
        scaler = getattr(self.precision_plugin, "scaler", None)
        return {} if scaler is None else {"scaler": scaler}


def _elastic_problems(trainer: Any) -> dict[str, object]:
    """Messages about settings that contradict workers that come and go, and whether they do."""
    connector = trainer._accelerator_connector
    return {
        "workers come and go, so an epoch has no fixed number of steps: set max_steps": (
            trainer.max_steps <= 0
        ),
        "workers come and go, so the Trainer cannot share out the samples: pass "
        "use_distributed_sampler=False, and a DataLoader with a laconic.ElasticSampler": (
            connector.use_distributed_sampler
        ),
        "workers come and go, and validate after the same steps: pass "
        "check_val_every_n_epoch=None with val_check_interval=STEPS, or limit_val_batches=0": (
            trainer.check_val_every_n_epoch is not None and trainer.limit_val_batches
        ),
        "workers come and go, and each is a Trainer of its own: pass devices=1 and num_nodes=1": (
            trainer.world_size > 1
        ),
    }


def _skip(trainer: Any, steps: int) -> None:
    """Have ``trainer`` count ``steps`` that other workers have taken."""
    if steps <= 0:
        return
    loop = trainer.fit_loop.epoch_loop
    batches = steps * trainer.accumulate_grad_batches
    counts = [
        (loop.automatic_optimization.optim_progress.optimizer.step.total, steps),
        (loop.manual_optimization.optim_step_progress.total, steps),
        (loop.batch_progress.total, batches),
    ]
    for total, count in counts:
        total.ready += count
        total.completed += count
    loop._batches_that_stepped += steps


def _folder(checkpoint: Any, resolve: bool = False) -> Path:
    """The folder with the ranks' state that belongs to the file ``checkpoint``; ``resolve``: which
    may be a link to another one."""
    text = str(checkpoint)
    refuse({f"laconic saves to local folders only, not to {text}": "://" in text})
    path = Path(text).resolve() if resolve else Path(text)
    return path.with_name(f"{path.name}.{FOLDER}")
