"""Which ranks there are, which of them make up one worker, and the links between them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.algorithms.exchanges import Mean
from laconic.algorithms.round import GradientRound, Recipe
from laconic.algorithms.schedules import Schedule, Unless, any_of, every
from laconic.algorithms.updates import Average
from laconic.errors import check_int, in_words
from laconic.links import Link, Throttled, TorchLink
from laconic.links.simulated import current_link, single_link

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BANDWIDTH_VARIABLE = "LACONIC_BANDWIDTH"
LATENCY_VARIABLE = "LACONIC_LATENCY"
"""Set by ``laconic lab`` where the system cannot slow down each host's card, or delay packets: the
link over torch's process group then takes as long as that rate (of each rank) and latency say."""


def own_link(device: torch.device, timeout: float) -> Link:
    """This process's link to all ranks: the simulated worker's, or over torch's process group."""
    simulated = current_link.get()
    if simulated is not None:
        return simulated
    if not dist.is_initialized():
        raise ValueError(
            "no process group: call laconic.init() (under torchrun, or for one process) or "
            "torch.distributed.init_process_group(), run inside laconic.simulate, or pass link="
        )
    link = TorchLink.world(device, timedelta(seconds=timeout))
    bandwidth, latency = os.environ.get(BANDWIDTH_VARIABLE), os.environ.get(LATENCY_VARIABLE)
    if bandwidth is None and latency is None:
        return link
    return Throttled(link, bandwidth, latency or 0.0)


def raise_on_all(problem: str | None, everyone: Tensor, what: str) -> None:
    """``ValueError`` on every rank where any has a ``problem``: ``everyone`` holds by rank whether
    it has, and ``what`` says which they then have in common."""
    failed = [rank for rank, value in enumerate(everyone.flatten().tolist()) if value]
    if failed:
        raise ValueError(problem or f"ranks {failed} {what}: see there")


def agreed_link(
    problem: str | None, link: Link | None, device: torch.device, timeout: float, what: str
) -> Link:
    """``link``, or this process's to all ranks, once they have told each other that none has a
    ``problem``: else ``ValueError`` on every rank, which says ``what`` those ranks could not do,
    instead of one that has left and others that wait for it."""
    world = None
    try:
        world = link or own_link(device, timeout)
        everyone = world.gather(torch.tensor([float(problem is not None)]))
        raise_on_all(problem, everyone, f"could not {what}")
    except BaseException as error:
        if link is None and world is not None:
            world.close()
        if problem is None or not isinstance(error, Exception):
            raise
        raise ValueError(problem) from None  # whether there was anyone to tell or not
    return world


def common_device() -> torch.device:
    """Where ranks meet that have no parameter to say so: on the card if all others do."""
    cards = dist.is_initialized() and "nccl" in str(dist.get_backend_config())
    # by its number, as another thread may have another current device
    return torch.device("cuda", torch.cuda.current_device()) if cards else torch.device("cpu")


def layout_of(
    world: Link,
    nprocs_per_node: int | Literal["env"],
    mesh: DeviceMesh | None,
    sharded: Sequence[Tensor],
) -> list[list[int]]:
    """The ranks of each worker, alike on every rank. ``sharded``: the model's sharded parameters,
    each of which must be over the ranks of its worker."""
    problem, layout, launched = None, [[0]], 0
    try:
        launched = 0 if current_link.get() else int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        _check_dimensions(sharded)
        layout = _layout(world, nprocs_per_node, mesh, bool(sharded))
        _check_shards(sharded, layout[world.rank // len(layout[0])])
    except Exception as error:
        problem = in_words(error)
    inner = len(layout[0])
    said = world.gather(torch.tensor([problem is not None, inner, launched], dtype=torch.int64))
    failed, everyone, on_host = said.unbind(1)
    raise_on_all(problem, failed, "have no such workers")
    if world.size % inner or bool((everyone != inner).any()):
        raise ValueError(
            "nprocs_per_node (or the mesh's second axis) must be alike on all ranks and divide "
            f"their number: there are {world.size} ranks, and they say {everyone.tolist()}"
        )
    if mesh is None and bool((on_host % inner != 0).any()):
        raise ValueError(
            f"nprocs_per_node={inner} must divide the number of ranks on every host: by rank, "
            f"there are {on_host.tolist()} on its host (LOCAL_WORLD_SIZE)"
        )
    return layout


def _check_dimensions(sharded: Sequence[Tensor]) -> None:
    """A mesh of two dimensions is FSDP's that shards over one and replicates over the other."""
    for p in sharded:
        over = p.device_mesh  # type: ignore[attr-defined]
        if over.ndim != 1:
            raise ValueError(
                f"the parameters are sharded over a mesh of {over.ndim} dimensions, and FSDP would "
                "average over all its ranks at every step: shard them over the ranks of one worker "
                "alone, as mesh = init_device_mesh('cuda', (workers, ranks of a worker), "
                "mesh_dim_names=('workers', 'shards')); fully_shard(model, mesh=mesh['shards']); "
                "attach(..., mesh=mesh)"
            )


def _check_shards(sharded: Sequence[Tensor], worker: list[int]) -> None:
    """The parameters are sharded over the ranks of this rank's ``worker``, and no others."""
    for p in sharded:
        over: list[int] = p.device_mesh.mesh.flatten().tolist()  # type: ignore[attr-defined]
        if over != worker:
            raise ValueError(
                f"the parameters are sharded over {len(over)} ranks, which are not the ranks of "
                f"one worker (by mesh= a worker is {len(worker)} neighboring ranks): shard them "
                "inside each worker, as mesh = init_device_mesh('cuda', (workers, ranks of a "
                "worker), mesh_dim_names=('workers', 'shards')); fully_shard(model, "
                "mesh=mesh['shards']); attach(..., mesh=mesh)"
            )


def _layout(
    world: Link, nprocs_per_node: int | Literal["env"], mesh: DeviceMesh | None, sharded: bool
) -> list[list[int]]:
    """What this rank takes for the ranks of each worker."""
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
        whole: list[list[int]] = mesh.mesh.reshape(mesh.size(0), -1).tolist()
        return whole
    if nprocs_per_node == "env":
        inner = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    else:
        inner = check_int("nprocs_per_node (or 'env')", nprocs_per_node, 1)
    return [list(range(i, i + inner)) for i in range(0, world.size, inner)]


def sets_of(
    world: Link, layout: list[list[int]], group_size: int | None, sharded: bool
) -> dict[str, Link]:
    """The named sets of ranks. Those of one worker are its ``replica`` where each holds the whole
    model, and its ``shards`` where each holds a part of it; the other is of this rank alone."""
    problem, grouped = None, 0
    try:
        grouped = 0 if group_size is None else check_int("group_size", group_size, 1)
    except ValueError as error:
        problem = str(error)
    said = world.gather(torch.tensor([problem is not None, grouped], dtype=torch.int64))
    raise_on_all(problem, said[:, 0], "have no such groups")
    everyone = said[:, 1].tolist()
    if any(said != grouped for said in everyone):
        raise ValueError(f"group_size must be alike on all ranks: they say {everyone}")
    if grouped and len(layout) % grouped:
        raise ValueError(
            f"group_size must divide the number of workers: {grouped} does not divide {len(layout)}"
        )
    sets = {"world": world, "workers": world, "replica": single_link(), "shards": single_link()}
    if len(layout[0]) > 1:
        sets["workers"] = world.split(list(zip(*layout, strict=True)))
        sets["shards" if sharded else "replica"] = world.split(layout)
    if grouped:
        workers = range(len(layout))
        sets["group"] = sets["workers"].split(
            [workers[i : i + grouped] for i in workers[::grouped]]
        )
    return sets


def within_workers(recipe: Recipe) -> Recipe:
    """Gradients averaged inside a worker wherever the recipe does not average them over all."""
    when: Schedule = every(1)
    over_all = [r.when for r in recipe if isinstance(r, GradientRound) and r.over == "world"]
    if over_all:
        when = Unless(when, any_of(*over_all))
    return (GradientRound(when, Average(), Mean(), over="replica"),)
