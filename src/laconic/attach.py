"""`init` and `attach`: the lines that a user adds to a training loop."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.algorithms.auto import Auto
from laconic.algorithms.compile import (
    check_buffers,
    check_groups,
    check_identical,
    check_order,
    check_quorum,
    check_whole,
    replicated,
    warn_of_groups,
    with_replicas,
)
from laconic.algorithms.parse import as_recipe
from laconic.algorithms.round import Recipe, describe, recipe_text, renamed
from laconic.buckets import is_sharded, reshard
from laconic.device import accelerator, select_own
from laconic.elastic import Elastic
from laconic.engine import elastic_runs
from laconic.engine.driver import Driver
from laconic.engine.elastic_runs import Joined, asked_for
from laconic.engine.ending import watch
from laconic.engine.joint_optimizer import as_one, members
from laconic.engine.model_checks import check_devices, check_tensors, check_unwrapped
from laconic.engine.session import Buffers, Settings
from laconic.engine.steps import check_steps
from laconic.engine.synchronizer import Synchronizer
from laconic.errors import TIMEOUT, check_bool, check_choice, check_float, check_int
from laconic.links import Link, job_secret, rendezvous, slurm, tls
from laconic.links.agreement import on_all_ranks
from laconic.links.attempts import open_store
from laconic.links.rank_sets import agreed_link, inside_of, layout_of, refused_by_all, sets_of
from laconic.links.simulated import current_link, single_link
from laconic.links.staged import StagedLink
from laconic.links.torch_link import CHOICES, Choice
from laconic.metrics import MetricsArgument, agree_on_metrics, check_metrics
from laconic.policy.candidates import start
from laconic.policy.chooser import Chooser

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_attached: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Synchronizer]] = (
    weakref.WeakKeyDictionary()
)
"""Weak on both sides: an attached optimizer's hooks keep its synchronizer alive."""
_on_link: weakref.WeakKeyDictionary[Link, weakref.ref[Synchronizer]] = weakref.WeakKeyDictionary()
_by_scaler: weakref.WeakKeyDictionary[torch.amp.GradScaler, list[weakref.ref[Synchronizer]]] = (
    weakref.WeakKeyDictionary()
)
"""Its keys are the scalers whose class `_watch` has replaced."""


def init() -> None:
    """Set up torch's process group from torchrun's environment variables, or from those of Slurm's
    ``srun``, or for one process without them.

    Does nothing if a process group exists already. Under ``srun`` it sets torchrun's variables
    (RANK, LOCAL_RANK and others). Uses NCCL where CUDA is available, gloo elsewhere. Selects GPU
    LOCAL_RANK, or GPU 0 if the process sees only one (CUDA_VISIBLE_DEVICES). When torchrun restarts
    the ranks after a failure (``--max-restarts``), they rendezvous again: keys left in the store by
    an earlier attempt are ignored. From then on the other ranks notice when this process ends, and
    their `attach` names it.

    Raises ``ValueError`` if there are fewer GPUs than ranks on this host, or if one of Slurm's
    variables is missing.

    Examples:
        >>> laconic.init()
        >>> torch.distributed.get_world_size()  # without torchrun
        1
    """
    if dist.is_initialized():
        return
    os.environ.update(slurm.torchrun_variables(os.environ))
    if os.environ.get("WORLD_SIZE", "1") == "1" or tls.TRANSPORT in os.environ:
        tls.contexts(), job_secret.read()  # `attach` raises it on all ranks, but gloo comes first
    backend = select_own()
    if "RANK" in os.environ:
        store, rank, size = open_store()
    else:
        store, rank, size = dist.HashStore(), 0, 1  # type: ignore[attr-defined]
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    except RuntimeError as error:
        if "unsupported gloo device" not in str(error) or tls.settings() is None:
            raise
        raise ValueError(
            f"this torch is built without TLS in gloo: unset {tls.TRANSPORT}, and set "
            f"{tls.SWITCH}=1, which encrypts laconic's own connections (docs/security.md)"
        ) from error
    rendezvous.publish()


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    recipe: Recipe | Auto | str,
    *,
    nprocs_per_node: int | Literal["env"] = 1,
    group_size: int | None = None,
    mesh: DeviceMesh | None = None,
    buffers: Literal["average", "keep", "broadcast"] = "average",
    scaler: torch.amp.GradScaler | None = None,
    link: Link | Choice | None = None,
    timeout: float = TIMEOUT,
    seed: int = 0,
    metrics: MetricsArgument = None,
    elastic: Elastic | None = None,
    offload: bool = False,
) -> Synchronizer:
    """Train ``model`` together with the other ranks by ``recipe``.

    All ranks start from rank 0's parameters and buffers. From then on the optimizer's own
    ``step()`` runs the rounds; the training loop stays as it is. At its end call ``sync.finish()``,
    or use the synchronizer in a ``with``.

    Args:
        model: the plain module, on one device. Buffers may be on the CPU and parameters on a GPU if
            the process group takes CPU tensors, as that of `laconic.init` does. A model in torch's
            DistributedDataParallel, which averages all gradients at every step, is an error.
        optimizer: any torch optimizer, or a list, such as Muon for the matrices and AdamW for the
            rest. The loop then calls ``step()`` of each once per training step, in any order; the
            last one runs the rounds. With gossip that is weighted (`sgp`), compute all gradients
            before the first of them steps.
        recipe: what a recipe function returns, such as ``laconic.local_sgd(8)``, or
            ``laconic.auto()``; or the text of such a call, as the command line takes it:
            ``"local_sgd(8)"``.
        nprocs_per_node: how many ranks are one worker. ``"env"``: torchrun's LOCAL_WORLD_SIZE.
            Their gradients are averaged in every backward pass, and each communicates its part of
            the rounds.
        group_size: how many consecutive workers are one group, for recipes with rounds inside
            groups.
        mesh: a DeviceMesh of (workers) or (workers, ranks of a worker), ranks in ascending order,
            in place of ``nprocs_per_node``. It is required if a worker's parameters are sharded
            over its ranks (FSDP's ``fully_shard``, over the one-dimensional mesh of these ranks).
            Each rank then communicates its shard, and FSDP averages gradients inside the worker.
        buffers: ``"average"``: rounds average the module's floating-point and complex buffers, as
            far as they differ; with `ddp`, which has no such rounds, `finish` does. ``"keep"``:
            each worker keeps its own. ``"broadcast"``: all ranks get rank 0's buffers after every
            step, as before every forward pass in torch's DistributedDataParallel. Choose it for
            buffers that the forward pass reads in training and that gradients depend on: codebooks,
            queues, running normalizers. Not for elastic runs or rounds with a quorum.
        scaler: the loop's GradScaler, so that steps that it skips are counted.
        link: how messages of a model on a GPU travel between workers. ``"tcp"``: by way of host
            memory and laconic's own connections. ``"nccl"``. ``"auto"`` or None: the faster of the
            two. Or a `Link` to use in place of torch's process group.
        timeout: seconds after which a rank that does not answer is an error on all others; in an
            elastic run, the longest that a worker may be silent. A `Link` as ``link`` has its own.
        seed: for a recipe's random choices, such as pairs: at least 0, the same on all ranks.
        metrics: where the run's metrics go: a file, as lines of JSON; a directory, for one file per
            rank; `laconic.TensorBoard`; or a list of these. ``laconic watch`` shows them. None:
            nowhere.
        elastic: workers come and go; see `Elastic`. No process group is needed then. None:
            LACONIC_COORDINATOR in the environment, if it is set, makes the run elastic.
        offload: keep what parameter rounds store between rounds (anchors, outer momenta, residuals)
            in pinned host memory, and on the GPU only while it is computed with, one bucket (25
            MiB) at a time. The results are the same bits. For models on a GPU.

    Returns the `Synchronizer`. Raises ``ValueError`` on every rank for arguments that cannot work,
    and `laconic.LinkError` later if a rank is lost.

    Examples:
        >>> sync = laconic.attach(model, optimizer, laconic.local_sgd(8), seed=1)
        >>> for _ in range(16):
        ...     loss = model(torch.randn(8, 4)).square().mean()
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        >>> sync.finish()
        >>> sync.stats().rounds
        2
    """
    given: Any = link if hasattr(link, "gather") else None
    choice: Any = "auto" if link is None or given is not None else link
    alone = isinstance(elastic, Elastic)  # such a worker waits for no other one yet
    with refused_by_all(single_link() if alone else given, timeout, choice):
        check_choice("link", choice, CHOICES)
        check_float("timeout", timeout, 0.0, strict=True)
        check_unwrapped(model)
        reshard(model)
        optimizer = as_one(optimizer)
        recipe = as_recipe(recipe)
        rounds = start(2).recipe if isinstance(recipe, Auto) else recipe
        _check(model, optimizer)
        check_devices(model, _params(optimizer), cpu_buffers=True if given is not None else None)
        params = _params(optimizer)
        check_tensors(model, params)
        check_groups(rounds, group_size is not None)
        warn_of_groups(rounds, group_size)
        check_choice("buffers", buffers, get_args(Buffers))
        check_int("seed", seed, 0)
        if check_bool("offload", offload) and all(p.device.type == "cpu" for p in params):
            raise ValueError(
                "offload=True keeps state in host memory, where that of a model on the CPU is "
                "anyway: leave it out, or move the model to a GPU"
            )
        elastic = asked_for(elastic, link, nprocs_per_node, group_size, mesh)
        if elastic is not None:
            rounds = replicated(rounds)
            elastic_runs.check(elastic, recipe, params)
        check_buffers(rounds, buffers, elastic=elastic is not None)
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise ValueError(f"scaler must be a torch.amp.GradScaler, not {scaler!r}")
        places = check_metrics(metrics)
        previous = _alive(_on_link.get(given)) if given is not None else None
        if previous is not None:
            previous.drain()
            if previous.attached and given.threaded:
                raise ValueError(
                    "this link has another synchronizer attached, and their messages would mix: "
                    "make a link for each, or call sync.detach() first"
                )
    device = params[0].device
    with ExitStack() as on_error:
        joined: Joined | None = None
        if elastic is None:
            if choice == "auto" and any(is_sharded(p) for p in params):
                choice = "tcp"  # see `check_order`
            world = agreed_link(given, device, timeout, choice)
        else:
            about = recipe_text(rounds), describe(rounds)
            about = (recipe.text, recipe.text) if isinstance(recipe, Auto) else about
            joined = elastic_runs.join(elastic, about, params, buffers, seed, timeout)
            world = joined.link if accelerator(device) is None else StagedLink(joined.link, device)
        if given is None:
            on_error.callback(world.close)
        sharded = any(is_sharded(p) for p in params)
        shards = [p for p in (*params, *model.parameters()) if is_sharded(p)]
        ranks = layout_of(world, nprocs_per_node, mesh, shards)
        inside = inside_of(world, device, timeout) if given is None else None
        sets = sets_of(world, ranks, group_size, sharded, inside)
        for other in sets.values():
            if other is not world:
                on_error.callback(other.close)
        number = None if joined is None else joined.number
        places = agree_on_metrics(places, world, number)

        def arrange(recipe: Recipe) -> Recipe:
            check_buffers(recipe, buffers, elastic=False)  # that was checked above
            check_identical(recipe)
            check_order(recipe, sharded=sharded, queues=world.queues)
            check_whole(recipe, sharded=sharded, ranks=len(ranks[0]))
            plain = joined is None and len(ranks[0]) == 1 and device.type == "cpu"
            check_quorum(recipe, None if joined else len(ranks), plain=plain)
            if joined is not None:
                return replicated(recipe)
            if sharded:
                alone = (replace(r, over="workers") if r.over == "world" else r for r in recipe)
                return renamed(recipe, alone)
            whole = with_replicas(recipe) if len(ranks[0]) > 1 else recipe
            return renamed(recipe, whole)

        workers = sets["workers"].size if joined is None else 2  # or more, at any time
        policy = Chooser(recipe, workers) if isinstance(recipe, Auto) else None
        rounds = rounds if policy is None else policy.recipe
        if joined is None:
            with on_all_ranks(world.gather):
                arrange(rounds)
        # a disabled scaler does not check for overflow
        scale = scaler.get_scale if scaler is not None and scaler.is_enabled() else None
        at = buffers, arrange, seed, scale, policy
        elastic_link = None if joined is None else joined.link
        settings = Settings(*at, elastic=elastic_link, offload=offload)
        driver = Driver(model, optimizer, rounds, sets, device, settings)
        on_error.pop_all()  # the synchronizer keeps the links open
    if joined is not None:
        try:
            joined.take_part(driver)
        except BaseException:
            driver.detach()
            raise
    sync = Synchronizer(driver)
    sync.record(places, number)
    if scaler is not None:
        _watch(scaler)
        if scaler.is_enabled():
            driver.use_scaler(scaler)
            _by_scaler[scaler].append(weakref.ref(sync))
    claim(optimizer, sync)
    if joined is None and sync.workers > 1:
        watch(driver.ending)
    if given is not None:
        _on_link[given] = weakref.ref(sync)
    return sync


def claim(optimizer: Optimizer, sync: Synchronizer) -> None:
    """Record that ``sync`` follows ``optimizer``."""
    for each in (optimizer, *members(optimizer)):
        _attached[each] = weakref.ref(sync)


def synchronizer_of(optimizer: object) -> Synchronizer | None:
    """The synchronizer attached to ``optimizer`` last, if it still exists."""
    return _alive(_attached.get(optimizer)) if isinstance(optimizer, Optimizer) else None


def synchronizer_near(*given: object) -> Synchronizer | None:
    """The attached synchronizer that one of ``given`` is, or belongs to, or else the one attached
    last: over its link an argument that is wrong can be an error on all ranks."""
    link = current_link.get()
    attached = [s for s in map(_alive, _attached.values()) if s is not None and s.attached]
    here = [s for s in attached if link is None or s.driver.session.world.link is link]
    for x in given:
        own = synchronizer_of(x) or getattr(x, "synchronizer", None) or getattr(x, "sync", x)
        here += [s for s in here if s.driver.session.model is x]
        here += [own] if isinstance(own, Synchronizer) else []
    return here[-1] if here else None


def release(optimizer: Optimizer) -> None:
    """Record that no synchronizer follows ``optimizer``."""
    _attached.pop(optimizer, None)


def check_free(optimizer: Optimizer, params: Sequence[Tensor] = ()) -> None:
    """Raise if a synchronizer follows ``optimizer``, or another one that holds any of ``params``:
    both would average their gradients."""
    for sync in map(synchronizer_of, members(optimizer)):
        if sync is not None and sync.attached:
            raise ValueError("this optimizer is attached already: call sync.detach() first")
    own = {id(p) for p in params}
    for sync in filter(None, map(_alive, list(_attached.values()))):
        if sync.attached and own.intersection(map(id, sync.driver.session.params())):
            raise ValueError(
                "the model's parameters are attached already, with another optimizer or in another "
                "simulated worker: call sync.detach() first, or make a model for each worker"
            )


def _alive(reference: weakref.ref[Synchronizer] | None) -> Synchronizer | None:
    return None if reference is None else reference()


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _check(model: nn.Module, optimizer: Optimizer) -> None:
    for each in members(optimizer):
        check_steps(each)
    known = {id(p) for p in model.parameters()}
    params = _params(optimizer)
    if not params or not any(id(p) in known for p in params):
        raise ValueError(
            "the optimizer has no parameter of the model: make it from model.parameters()"
        )
    if any(p.device.type == "meta" for p in params):
        raise ValueError("the model's parameters are on the meta device: materialize them first")
    check_free(optimizer, params)


def _synchronizers_of(scaler: torch.amp.GradScaler) -> list[Synchronizer]:
    """The attached synchronizers with ``scaler``, in the order of `attach`."""
    synchronizers = [_alive(reference) for reference in _by_scaler[scaler]]
    return [sync for sync in synchronizers if sync is not None and sync.attached]


def _watch(scaler: torch.amp.GradScaler) -> None:
    """Have synchronizers count the steps that ``scaler`` skips, which the optimizer's hooks do not
    see, and see its updates. One scaler may serve several optimizers."""
    if scaler not in _by_scaler:
        _by_scaler[scaler] = []
        scaler.__class__ = _watched(type(scaler))


def _watched(kind: type[Any]) -> type[Any]:
    """A subclass of ``kind``, a GradScaler, whose methods synchronizers notice. Copies, pickled or
    not, are of ``kind`` itself."""

    class Watched(kind):  # type: ignore[misc]
        def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
            for other in _synchronizers_of(self):
                other.driver.scaler_steps()
            sync = synchronizer_of(optimizer)
            before = None if sync is None else sync.step
            result: float | None = super().step(optimizer, *args, **kwargs)
            if sync is not None and sync.attached and sync.driver.hooked and sync.step == before:
                sync.driver.skip(optimizer)
            return result

        def update(self, *args: Any, **kwargs: Any) -> None:
            super().update(*args, **kwargs)
            for sync in _synchronizers_of(self):
                sync.driver.scaler_updated()

        def __reduce_ex__(self, protocol: Any) -> Any:
            return object.__new__, (kind,), *super().__reduce_ex__(protocol)[2:]

    return Watched
