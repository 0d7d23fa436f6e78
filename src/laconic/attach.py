"""`init` and `attach`: the lines that a user adds to a training loop."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
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
    check_offload,
    check_order,
    check_quorum,
    has_quorum,
    replicated,
    warn_of_groups,
    with_replicas,
)
from laconic.algorithms.parse import as_recipe
from laconic.algorithms.round import Recipe, renamed
from laconic.device import accelerator, select_own
from laconic.elastic import Elastic
from laconic.engine import attached, elastic_runs
from laconic.engine.driver import Driver
from laconic.engine.elastic_runs import Joined, asked_for
from laconic.engine.ending import watch
from laconic.engine.joint_optimizer import as_one, check_steps, members
from laconic.engine.model_checks import check_devices, check_tensors, check_unwrapped
from laconic.engine.session import Buffers, Sets, Settings
from laconic.engine.synchronizer import Synchronizer
from laconic.errors import TIMEOUT, check_bool, check_choice, check_float, check_int
from laconic.links import Link, job_secret, rendezvous, tls
from laconic.links.agreement import on_all_ranks
from laconic.links.attempts import check_launcher, open_store
from laconic.links.null import NullLink
from laconic.links.rank_sets import agreed_link, layout_of, refused_by_all, sets_of
from laconic.links.staged import StagedLink
from laconic.links.torch_link import CHOICES, Choice
from laconic.metrics import MetricsArgument, check_metrics
from laconic.policy.candidates import start
from laconic.policy.chooser import Chooser
from laconic.tensors import is_sharded, reshard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def init() -> None:
    """Set up torch's process group from torchrun's environment variables, or for one process
    without them.

    Does nothing if a process group exists already. Uses NCCL where CUDA is available, gloo
    elsewhere. Selects GPU LOCAL_RANK, or GPU 0 if the process sees only one (CUDA_VISIBLE_DEVICES).
    When torchrun restarts the ranks after a failure (``--max-restarts``), they rendezvous again:
    keys left in the store by an earlier attempt are ignored. From then on the other ranks notice
    when this process ends, and their `attach` names it.

    Raises ``ValueError`` if there are fewer GPUs than ranks on this host, or if Slurm's ``srun``
    has started several processes and nothing has set torchrun's variables.

    Examples:
        >>> laconic.init()
        >>> torch.distributed.get_world_size()  # without torchrun
        1
    """
    if dist.is_initialized():
        return
    check_launcher(os.environ)
    if os.environ.get("WORLD_SIZE", "1") == "1" or tls.TRANSPORT in os.environ:
        tls.contexts(), job_secret.read()  # `attach` raises it on all ranks, but gloo comes first
    backend = select_own()
    if "RANK" in os.environ:
        store, rank, size = open_store()
    else:
        store, rank, size = dist.HashStore(), 0, 1  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
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
        model: the plain module, with its buffers on one device, made in this process (``mp.spawn``
            puts models that it passes on into memory that all processes share). A model in torch's
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
            the rounds. Not for elastic runs.
        group_size: how many consecutive workers are one group, for recipes with rounds inside
            groups.
        mesh: a DeviceMesh of (workers) or (workers, ranks of a worker), ranks in ascending order,
            in place of ``nprocs_per_node``. It is required if a worker's parameters are sharded
            over its ranks (FSDP's ``fully_shard``, over the one-dimensional mesh of these ranks).
            Each rank then communicates its shard, and FSDP averages gradients inside the worker. In
            an elastic run, where each worker has a process group of its own, the mesh of its ranks.
        buffers: ``"average"``: rounds average the module's floating-point and complex buffers, as
            far as they differ, over the ranks that they average parameters over: those inside a
            group do so inside it. With `ddp`, which has no such rounds, `finish` does. ``"keep"``:
            each worker keeps its own. ``"broadcast"``: all ranks get rank 0's buffers after every
            step, as before every forward pass in torch's DistributedDataParallel. Choose it for
            buffers that the forward pass reads in training and that gradients depend on: codebooks,
            queues, running normalizers. Not for elastic runs or rounds with a quorum.
        scaler: the loop's GradScaler, so that steps that it skips are counted. The newcomers of an
            elastic run get its state.
        link: how messages of a model on a GPU travel between workers. ``"tcp"``: by way of host
            memory and laconic's own connections. ``"nccl"``. ``"auto"`` or None: NCCL where all
            ranks are on one host, each with a GPU of its own, and no round has a quorum. Or a
            `Link` to use in place of torch's process group.
        timeout: seconds after which a rank that does not answer is an error on all others; in an
            elastic run, the longest that a worker may be silent. A `Link` as ``link`` has its own.
        seed: for a recipe's random choices, such as pairs: at least 0, the same on all ranks.
        metrics: the file that gets the run's metrics, as lines of JSON, or a `laconic.JsonLines`.
            With ``{rank}`` in its path, one file per rank. None: nowhere.
        elastic: workers come and go; see `Elastic`. Workers of one rank need no process group
            then. None: LACONIC_COORDINATOR in the environment, if it is set, makes the run elastic.
        offload: keep what parameter rounds store between rounds (anchors, outer momenta, residuals)
            in pinned host memory, and on the GPU only while it is computed with, one bucket (25
            MiB) at a time. The results are the same bits. For models on a GPU, and recipes that do
            store some.

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
    # a worker of an elastic run waits for no other one yet
    alone = isinstance(elastic, Elastic) and nprocs_per_node == 1 and mesh is None
    with refused_by_all(NullLink() if alone else given, timeout, choice):
        check_choice("link", choice, CHOICES)
        check_float("timeout", timeout, 0.0, strict=True)
        optimizer, params = _check(model, optimizer, given, scaler, offload)
        if scaler is not None and not scaler.is_enabled():
            scaler = None  # it does nothing
        recipe = as_recipe(recipe)
        rounds = start(2).recipe if isinstance(recipe, Auto) else recipe
        warn_of_groups(rounds, group_size)
        check_choice("buffers", buffers, get_args(Buffers))
        check_int("seed", seed, 0)
        elastic, ranks = asked_for(elastic, link, group_size), 1
        if elastic is not None:
            rounds = replicated(rounds)
            ranks = elastic_runs.ranks_of_worker(nprocs_per_node, mesh, params)
            if scaler is not None:  # gradients that are averaged are scaled alike
                others = {**(elastic.others or {}), "laconic: scaler": scaler}
                elastic = replace(elastic, others=others)
            elastic_runs.check(elastic, recipe, ranks)
        check_buffers(rounds, buffers, elastic=elastic is not None)
        choice = "tcp" if choice == "auto" and has_quorum(rounds) else choice
        check_offload(rounds, offload and not isinstance(recipe, Auto))  # which may choose others
        records = check_metrics(metrics)
        attached.check_free_link(given)
    joined = None
    if elastic is not None:
        trained = optimizer, params
        joined = elastic_runs.join(elastic, recipe, rounds, *trained, buffers, seed, timeout, ranks)
    with ExitStack() as on_error:
        at = joined, given, choice, timeout
        sets = _meet(model, params, *at, nprocs_per_node, mesh, group_size, on_error)
        arrange = partial(_arrange, sets, params, buffers, joined is not None)
        settings = Settings(buffers, arrange, seed, scaler, offload=offload)
        number = None if joined is None else joined.number
        if joined is not None:
            settings = replace(settings, elastic=joined.link, inside=joined.inside)
        if isinstance(recipe, Auto):
            workers = 2 if joined is not None else sets["workers"].size  # or more, later
            settings = replace(settings, policy=(policy := Chooser(recipe, workers)))
            recipe = policy.recipe
        with on_all_ranks(sets["world"].gather):
            records = records and records.of(sets["world"].rank if number is None else number)
            if joined is None:
                arrange(recipe)
        driver = Driver(model, optimizer, recipe, sets, settings)
        on_error.pop_all()  # the synchronizer keeps the links open
    if joined is not None:
        joined.take_part(driver)
    sync = Synchronizer(driver)
    attached.claim(sync)
    if scaler is not None:
        attached.watch(scaler)
    if joined is None and sync.workers > 1:
        watch(driver.ending)
    if records is not None:
        sync.record(records, number)
    return sync


def _check(
    model: nn.Module, optimizer: Any, given: Link | None, scaler: object, offload: bool
) -> tuple[Optimizer, list[Tensor]]:
    """Raise for what cannot be attached. Return the optimizers as one, and its parameters."""
    check_unwrapped(model)
    reshard(model)
    one = as_one(optimizer)
    for each in members(one):
        check_steps(each)
    known = {id(p) for p in model.parameters()}
    params = [p for group in one.param_groups for p in group["params"]]
    if not params or not any(id(p) in known for p in params):
        raise ValueError(
            "the optimizer has no parameter of the model: make it from model.parameters()"
        )
    if any(p.device.type == "meta" for p in params):
        raise ValueError("the model's parameters are on the meta device: materialize them first")
    attached.check_free(one, params)
    check_devices(model, params)
    check_tensors(model, params)
    if check_bool("offload", offload) and all(p.device.type == "cpu" for p in params):
        raise ValueError(
            "offload=True keeps state in host memory, where that of a model on the CPU is "
            "anyway: leave it out, or move the model to a GPU"
        )
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ValueError(f"scaler must be a torch.amp.GradScaler, not {scaler!r}")
    return one, params


def _meet(
    model: nn.Module,
    params: Sequence[Tensor],
    joined: Joined | None,
    given: Link | None,
    choice: Choice,
    timeout: float,
    nprocs_per_node: int | Literal["env"],
    mesh: DeviceMesh | None,
    group_size: int | None,
    on_error: ExitStack,
) -> Sets:
    """Find the other ranks. Returns the links by set of ranks, to be closed ``on_error``."""
    device, sharded = params[0].device, any(is_sharded(p) for p in params)
    if joined is not None and joined.inside.size > 1:
        on_error.callback(joined.link.close)
        return joined.sets(device)
    if joined is None:
        choice = "tcp" if choice == "auto" and sharded else choice  # see `check_order`
        world = agreed_link(given, device, timeout, choice)
    else:
        world = joined.link if accelerator(device) is None else StagedLink(joined.link, device)
    if given is None:
        on_error.callback(world.close)
    shards = [p for p in (*params, *model.parameters()) if is_sharded(p)]
    layout = layout_of(world, nprocs_per_node, mesh, shards)
    at = world, layout, group_size, sharded, device
    sets = sets_of(*at, timeout if given is None else None)
    for other in sets.values():
        if other is not world:
            on_error.callback(other.close)
    return sets


def _arrange(
    sets: Sets, params: Sequence[Tensor], buffers: str, elastic: bool, recipe: Recipe
) -> Recipe:
    """``recipe`` for these sets of ranks. Raises ``ValueError`` where it does not fit them."""
    sharded, ranks = any(is_sharded(p) for p in params), sets["replica"].size * sets["shards"].size
    check_groups(recipe, "group" in sets)
    check_buffers(recipe, buffers, elastic=False)  # `attach` has checked that
    check_identical(recipe)
    check_order(recipe, sharded=sharded, queues=sets["world"].queues)
    check_quorum(recipe, None if elastic else sets["workers"].size, plain=ranks == 1)
    recipe = replicated(recipe) if elastic else recipe
    if sharded:
        alone = (replace(r, over="workers") if r.over == "world" else r for r in recipe)
        return renamed(recipe, alone)
    return renamed(recipe, with_replicas(recipe)) if ranks > 1 else recipe
