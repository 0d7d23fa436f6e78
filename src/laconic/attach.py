"""The front door: one line added to a training loop."""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from laconic.errors import check_float, check_int
from laconic.exchanges import Mean
from laconic.links import Link, Throttled, TorchLink
from laconic.links.simulated import current_link, single_link
from laconic.metrics import MetricsArgument, agree_on_metrics, check_metrics
from laconic.round import Recipe, Round, is_recipe
from laconic.schedules import Schedule, Unless, any_of, every
from laconic.synchronizer import Synchronizer
from laconic.tensors import is_sharded
from laconic.updates import Average

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BANDWIDTH_VARIABLE = "LACONIC_BANDWIDTH"
LATENCY_VARIABLE = "LACONIC_LATENCY"
"""Set by ``laconic lab`` where the system cannot slow down each host's card, or delay packets: the
link over torch's process group then takes as long as that rate (of each rank) and latency say."""

_attached: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Synchronizer]] = (
    weakref.WeakKeyDictionary()
)
"""Weak on both sides: an attached optimiser's hooks keep its synchroniser alive."""
_carried: weakref.WeakKeyDictionary[Link, weakref.ref[Synchronizer]] = weakref.WeakKeyDictionary()
_watched: weakref.WeakSet[torch.amp.GradScaler] = weakref.WeakSet()


def init() -> None:
    """Set up torch's process group from torchrun's environment, or for one process without it.

    NCCL where CUDA is there (and the card of LOCAL_RANK becomes the current one), gloo elsewhere.
    Does nothing if a process group exists already.
    """
    if dist.is_initialized():
        return
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, init_method="tcp://127.0.0.1:0", rank=0, world_size=1)


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    recipe: Recipe,
    *,
    nprocs_per_node: int | Literal["env"] = 1,
    group_size: int | None = None,
    mesh: DeviceMesh | None = None,
    buffers: Literal["average", "keep"] = "average",
    scaler: torch.amp.GradScaler | None = None,
    link: Link | None = None,
    timeout: float = 600.0,
    seed: int = 0,
    metrics: MetricsArgument = None,
) -> Synchronizer:
    """Have ``recipe`` keep this rank's ``model`` in step with the other ranks'.

    All ranks start from rank 0's parameters and buffers. From then on the optimiser's own
    ``step()`` runs the rounds; the training loop stays as it is. At its end call
    ``sync.finish()``, or use the synchroniser in a ``with``.

    ``nprocs_per_node``: ranks that make up one worker (``"env"``: torchrun's LOCAL_WORLD_SIZE);
    their gradients are averaged in every backward pass, and each carries its part of the rounds.
    ``mesh``: the same by a DeviceMesh of (workers) or (workers, ranks of a worker), ranks in
    ascending order; needed where a worker's parameters are sharded over its ranks (FSDP): each
    then carries its shard, and gradients inside the worker are FSDP's business.
    ``group_size``: neighbouring workers that make up one group, for recipes with rounds inside
    groups.
    ``buffers``: average the module's floating-point buffers with the rounds, or keep each
    worker's. ``scaler``: the GradScaler, so that steps it skips are counted. ``link``: the
    network to use in place of torch's process group. ``timeout``: seconds after which, on that
    process group, a rank that does not answer is an error on all others. ``seed``: of what a
    recipe draws at random (pairs), alike on all ranks. ``metrics``: a file for lines of JSON about
    the run, a directory for one file from each rank, `laconic.TensorBoard`, or a list of such;
    ``laconic watch`` shows them.

    Raises ``ValueError`` for what cannot work, on every rank, and `laconic.LinkError` later where
    a rank is lost.
    """
    _check(model, optimizer, recipe, group_size)
    check_int("seed", seed, 0)
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ValueError(f"scaler must be a torch.amp.GradScaler, not {scaler!r}")
    check_float("timeout", timeout, 0.0, strict=True)
    places = check_metrics(metrics)
    carried = _alive(_carried.get(link)) if link is not None else None
    if carried is not None and carried.attached and link is not None and link.threaded:
        raise ValueError(
            "this link carries another synchroniser's rounds, and two would mix up their messages: "
            "make a link for each, or call sync.detach() first"
        )
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    world = link or current_link.get() or _torch_link(device, timedelta(seconds=timeout))
    sharded = any(is_sharded(p) for group in optimizer.param_groups for p in group["params"])
    layout = _layout(world, nprocs_per_node, mesh, sharded)
    sets = _sets(world, layout, group_size, sharded)
    places = agree_on_metrics(places, world)
    if sharded:
        recipe = tuple(replace(r, over="workers") if r.over == "world" else r for r in recipe)
    elif len(layout[0]) > 1:
        recipe = (*_within_workers(recipe), *recipe)
    sync = Synchronizer(model, optimizer, recipe, sets, device, buffers, seed)
    sync.record(places)
    if scaler is not None:
        _count_skipped_steps(scaler)
    _attached[optimizer] = weakref.ref(sync)
    if link is not None:
        _carried[link] = weakref.ref(sync)
    return sync


def _synchronizer(optimizer: Optimizer) -> Synchronizer | None:
    """The one that was attached to ``optimizer`` last, if it still exists."""
    return _alive(_attached.get(optimizer))


def _alive(held: weakref.ref[Synchronizer] | None) -> Synchronizer | None:
    return None if held is None else held()


def _check(model: nn.Module, optimizer: Optimizer, recipe: Recipe, group_size: int | None) -> None:
    if not is_recipe(recipe):
        raise ValueError(
            f"recipe must be what a recipe function returns, as laconic.local_sgd(12), not "
            f"{recipe!r}"
        )
    if group_size is None and any(r.over == "group" for r in recipe):
        raise ValueError(
            "the recipe has rounds inside groups of workers: say how many make up one, as "
            "attach(..., group_size=4)"
        )
    known = {id(p) for p in model.parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if not params or not any(id(p) in known for p in params):
        raise ValueError("the optimizer holds no parameter of the model")
    if any(p.device.type == "meta" for p in params):
        raise ValueError("the model's parameters are on the meta device: materialise them first")
    before = _synchronizer(optimizer)
    if before is not None and before.attached:
        raise ValueError("this optimizer is attached already: call sync.detach() first")


def _torch_link(device: torch.device, timeout: timedelta) -> Link:
    if not dist.is_initialized():
        raise ValueError(
            "no process group: call laconic.init() (under torchrun, or for one process) or "
            "torch.distributed.init_process_group(), run inside laconic.simulate, or pass link="
        )
    link = TorchLink.world(device, timeout)
    bandwidth, latency = os.environ.get(BANDWIDTH_VARIABLE), os.environ.get(LATENCY_VARIABLE)
    if bandwidth is None and latency is None:
        return link
    return Throttled(link, bandwidth, latency or 0.0)


def _layout(
    world: Link, nprocs_per_node: int | Literal["env"], mesh: DeviceMesh | None, sharded: bool
) -> list[list[int]]:
    """The ranks of each worker, alike on every rank."""
    if sharded and mesh is None:
        raise ValueError(
            "the parameters are sharded (FSDP): pass the mesh of (workers, ranks of a worker), as "
            "attach(..., mesh=init_device_mesh('cuda', (4, 8)))"
        )
    if mesh is not None:
        if nprocs_per_node != 1:
            raise ValueError("give either mesh or nprocs_per_node")
        if mesh.ndim > 2 or mesh.mesh.flatten().tolist() != list(range(world.size)):
            raise ValueError(
                f"the mesh must be of all {world.size} ranks in ascending order, with one or two "
                f"axes (workers, ranks of a worker), not {mesh}"
            )
        layout = mesh.mesh.reshape(mesh.size(0), -1).tolist()
    else:
        if nprocs_per_node == "env":
            inner = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        else:
            inner = check_int("nprocs_per_node (or 'env')", nprocs_per_node, 1)
        layout = [list(range(i, i + inner)) for i in range(0, world.size, inner)]
    inner = len(layout[0])
    everyone = world.gather(torch.tensor([inner])).flatten().tolist()
    if world.size % inner or any(said != inner for said in everyone):
        raise ValueError(
            "nprocs_per_node (or the mesh's second axis) must be alike on all ranks and divide "
            f"their number: there are {world.size} ranks, and they say {everyone}"
        )
    return layout


def _sets(
    world: Link, layout: list[list[int]], group_size: int | None, sharded: bool
) -> dict[str, Link]:
    """The named sets of ranks."""
    grouped = 0 if group_size is None else check_int("group_size", group_size, 1)
    everyone = world.gather(torch.tensor([grouped])).flatten().tolist()
    if any(said != grouped for said in everyone):
        raise ValueError(f"group_size must be alike on all ranks: they say {everyone}")
    if grouped and len(layout) % grouped:
        raise ValueError(
            f"group_size must divide the number of workers: {grouped} does not divide {len(layout)}"
        )
    sets = {"world": world, "workers": world, "replica": single_link()}
    if len(layout[0]) > 1:
        sets["workers"] = world.split(list(zip(*layout, strict=True)))
        if not sharded:
            sets["replica"] = world.split(layout)
    if grouped:
        workers = range(len(layout))
        sets["group"] = sets["workers"].split(
            [workers[i : i + grouped] for i in workers[::grouped]]
        )
    return sets


def _within_workers(recipe: Recipe) -> Recipe:
    """Gradients averaged inside a worker wherever the recipe does not average them over all."""
    when: Schedule = every(1)
    over_all = [r.when for r in recipe if r.on == "gradients" and r.over == "world"]
    if over_all:
        when = Unless(when, any_of(*over_all))
    return (Round(when, Average(), Mean(), on="gradients", over="replica"),)


def _count_skipped_steps(scaler: torch.amp.GradScaler) -> None:
    """Have the synchroniser of an optimiser hear of the steps that ``scaler`` skips, which the
    optimiser's own hooks do not see. One scaler may serve several optimisers."""
    if scaler in _watched:
        return
    original = scaler.step

    def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        sync = _synchronizer(optimizer)
        before = None if sync is None else sync.step
        result = original(optimizer, *args, **kwargs)
        if sync is not None and sync.attached and sync.step == before:
            sync.step_skipped()
        return result

    scaler.step = step  # type: ignore[method-assign]
    _watched.add(scaler)
