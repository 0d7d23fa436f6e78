"""`save` and `load` a checkpoint; `laconic.checkpoints` describes its files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from laconic.checkpoints import loading, saving
from laconic.checkpoints.all_ranks import AllRanks
from laconic.checkpoints.training_state import TrainingState
from laconic.engine.attached import synchronizer_near
from laconic.engine.synchronizer import LOAD, SAVE, Synchronizer
from laconic.errors import LinkError, WorkersChangedError, check_bool, error_text

T = TypeVar("T")
_EVERY_RANK = (
    "Each rank saves its own parameters, optimizer state and private state: call laconic.save on "
    "every rank"
)


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    sync: Synchronizer | None = None,
    *,
    others: Mapping[str, Any] | None = None,
) -> None:
    """Save a checkpoint in the directory ``path``, and replace the one that is there.

    Every rank must call it, after the same number of steps, between steps: gradients are not saved.
    Each rank saves its own model, optimizer, synchronizer with rounds in flight, and random state:
    Python's, torch's on the CPU, torch's on the current CUDA device if it is in use, and NumPy's
    global one if NumPy is loaded. The counters of wrappers are saved too. So are parameters that
    the optimizer has beside the model's, such as float32 masters.

    Args:
        path: the directory of the checkpoint.
        model: the module, or a `SlowMoDistributedDataParallel`.
        optimizer: the optimizer, the list that was given to `laconic.attach`, or a `CommOptimizer`.
        sync: the synchronizer. None: the one attached to ``optimizer``.
        others: each rank's own objects to save, by name. They have ``state_dict()`` and
            ``load_state_dict()`` (a scheduler, a GradScaler), or are plain data (numbers, strings,
            tensors, lists, dicts; ``generator.get_state()``). None: nothing else.

    However the call ends, on any rank (a killed process, a full disk, a power loss), the directory
    has either the previous checkpoint or the new one, complete. It needs space for both. A
    directory has one checkpoint: use several to keep several. If a worker of an elastic run is lost
    meanwhile, the others save again without it.

    Raises `OSError` on every rank, naming the ranks that could not write, and ``ValueError`` for
    state that cannot be saved; the previous checkpoint then stays. Raises `laconic.LinkError` if
    not all ranks call it, once the others reach another call of laconic's, such as a round.

    Examples:
        >>> sync = laconic.attach(model, optimizer, laconic.local_sgd(8))
        >>> lr = torch.optim.lr_scheduler.LinearLR(optimizer)
        >>> laconic.save("checkpoint", model, optimizer, others={"lr": lr, "epoch": 3})
    """
    try:
        _on_all_ranks(SAVE, path, (model, optimizer, sync, others), saving.save)
    except LinkError as error:
        raise LinkError(f"{error}. {_EVERY_RANK}", ranks=error.ranks) from None


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    sync: Synchronizer | None = None,
    *,
    others: Mapping[str, Any] | None = None,
    missing_ok: bool = False,
) -> dict[str, Any]:
    """Load the checkpoint that `save` wrote to the directory ``path``. The run then continues bit
    for bit.

    Every rank must call it, after `laconic.attach`, with a model and optimizer built as before.
    (With a wrapped module whose optimizer moves float32 masters, call it after ``bind(optimizer,
    fp32_params)``.) Objects with a ``load_state_dict``, dicts and lists in ``others`` are restored
    in place. **Numbers, strings and tensors cannot be: use those that it returns.** That is all
    plain data that was saved in ``others`` (tensors on the CPU), and ``"step"``, the steps taken.

    Args:
        path: the directory of the checkpoint.
        model: the module, or a `SlowMoDistributedDataParallel`.
        optimizer: the optimizer, the list that was given to `laconic.attach`, or a `CommOptimizer`.
        sync: the synchronizer. None: the one attached to ``optimizer``.
        others: the objects whose state was saved, by name, and perhaps plain data. None: there are
            no objects.
        missing_ok: if no rank finds a checkpoint, as in a run's first attempt, load nothing and
            return nothing. False: that is an error.

    A rank's file may be in any rank's directory: ranks send each other files that some of them
    cannot see. If the number of ranks or workers has changed, or files are lost (a host with its
    directory), every rank continues from the consensus of the remaining workers: the model that
    ``sync.finish()`` would have left. One log line says so. Outer state is divided again, and
    starts again where it is lost; private state is averaged over the workers
    (`laconic.engine.loading`). Rank r loads its own optimizer state, ``others``, and all that
    ``finish()`` does not average. If its file is lost, it loads those of a remaining rank (with a
    sharded model, one with the same shard). Random state is loaded only from a rank's own file and
    with the same number of ranks and workers, so that no two ranks draw the same numbers.

    Raises ``ValueError`` (`OSError` for unreadable files) on every rank if any rank cannot load;
    then nothing has changed. Needs memory for a copy of the model's and the optimizer's state. To
    continue from a consensus it needs memory for three more copies of the model and for all ranks'
    state, and disk space for received files, until the next save. Files are read as plain data:
    their code is never run.

    Examples:
        >>> sync = laconic.attach(model, optimizer, laconic.local_sgd(8))
        >>> laconic.load("checkpoint", model, optimizer, missing_ok=True)  # the first attempt
        {}
        >>> laconic.save("checkpoint", model, optimizer, others={"epoch": 3})
        >>> state = laconic.load("checkpoint", model, optimizer)
        >>> epoch = state["epoch"]
    """
    work = partial(loading.load, missing_ok=missing_ok)
    return _on_all_ranks(LOAD, path, (model, optimizer, sync, others), work, missing_ok)


def _on_all_ranks(
    call: str,
    path: str | os.PathLike[str],
    given: Sequence[Any],
    work: Callable[[Path, TrainingState, AllRanks], T],
    missing_ok: bool = False,
) -> T:
    """Do the ``work`` of ``call`` with the directory, the objects (`TrainingState.of` ``given``),
    and the ranks; again if one is lost meanwhile. What is wrong with an argument on one of them is
    an error on all."""
    while True:
        problem = None
        try:
            training = TrainingState.of(*given)
            training.sync.driver.session.refuse_in_consensus("laconic.save or load")
            check_bool("missing_ok", missing_ok)
            if not isinstance(path, (str, os.PathLike)):
                raise ValueError(f"path must be the path of a directory, not {path!r}")
            meeting, folder = training.sync, Path(path).expanduser()
        except Exception as error:
            near, problem = synchronizer_near(*given), error_text(error)
            if near is None:
                raise
            meeting = near
        name = f"laconic.save to {path}" if call == SAVE else f"laconic.load of {path}"
        with suppress(WorkersChangedError), meeting.gathering(call, problem) as gather:
            return work(folder, training, AllRanks(name, gather))
