"""The sets of ranks: all of them, those of one worker, groups of workers; and their links."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.device import common_device
from laconic.errors import TIMEOUT, check_float, check_int, error_text
from laconic.links.agreement import agree
from laconic.links.link import Link
from laconic.links.null import NullLink
from laconic.links.simulated import current_link
from laconic.links.throttled import Throttled
from laconic.links.torch_link import (
    Choice,
    check_choice_of_link,
    inner_link,
    own_backend,
    world_link,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BANDWIDTH_VARIABLE = "LACONIC_BANDWIDTH"
LATENCY_VARIABLE = "LACONIC_LATENCY"
"""Set by ``laconic lab`` where the system cannot slow down a host's network interface, or delay
packets: the link over torch's process group is then throttled to that rate per rank and round
trip."""

_SHARD_INSIDE = (
    "Shard them inside each worker: mesh = init_device_mesh('cuda', (workers, ranks_per_worker), "
    "mesh_dim_names=('workers', 'shards')); fully_shard(model, mesh=mesh['shards']); "
    "laconic.attach(..., mesh=mesh)"
)


def own_link(device: torch.device, timeout: float, choice: Choice = "auto") -> Link:
    """This process's link to all ranks: the simulated worker's, or one for torch's process
    group; see `world_link`."""
    simulated = current_link.get()
    if simulated is not None:
        return simulated
    if not dist.is_initialized():
        raise ValueError(
            "no process group: call laconic.init() (under torchrun, or for one process) or "
            "torch.distributed.init_process_group(), run inside laconic.simulate, or pass link="
        )
    link = world_link(device, timedelta(seconds=timeout), choice)
    bandwidth, latency = os.environ.get(BANDWIDTH_VARIABLE), os.environ.get(LATENCY_VARIABLE)
    if bandwidth is None and latency is None:
        return link
    return Throttled(link, bandwidth, latency or 0.0)


def agreed_link(
    link: Link | None,
    device: torch.device,
    timeout: float,
    choice: Choice = "auto",
    problem: str | None = None,
) -> Link:
    """``link``, or else this process's link to all ranks, if no rank has a ``problem``, such as an
    argument of this function that is wrong. Otherwise raises ``ValueError`` on every rank."""
    seconds = TIMEOUT
    try:
        seconds = check_float("timeout", timeout, 0.0, strict=True)
        if link is not None and not hasattr(link, "gather"):
            given, link = link, None
            raise ValueError(f"link must be a laconic.links.Link or None, not {given!r}")
        if link is not None and timeout != TIMEOUT:
            raise ValueError(
                f"timeout={timeout:g} would have no effect on the link that was given, which has "
                "its own: leave timeout= out, or link="
            )
        if link is None and current_link.get() is None:
            check_choice_of_link(choice, device)
    except ValueError as error:
        problem, choice, device = problem or str(error), "auto", common_device()
    # the link over which the others agree before they try the accelerator's own
    choice = "tcp" if problem is not None and choice == "auto" else choice
    world = None
    try:
        world = link or own_link(device, seconds, choice)
        agree(world.gather, problem)
    except BaseException as error:
        if link is None and world is not None:
            world.close()
        if problem is None or not isinstance(error, Exception):
            raise
        raise ValueError(problem) from None  # also where the other ranks cannot be reached
    return world


@contextmanager
def refused_by_all(link: Link | None, timeout: float, choice: Choice = "auto") -> Iterator[None]:
    """A context for checks before `agreed_link`, where the other ranks wait for this one: what one
    of them raises is raised on every rank."""
    try:
        yield
    except Exception as error:
        agreed_link(link, common_device(), timeout, choice, error_text(error))


def layout_of(
    world: Link,
    nprocs_per_node: int | Literal["env"],
    mesh: DeviceMesh | None,
    sharded: Sequence[Tensor],
) -> list[list[int]]:
    """The ranks of each worker, the same on every rank. ``sharded``: the model's sharded
    parameters, each of which must be sharded over the ranks of its worker."""
    problem, layout, launched = None, [[0]], 0
    try:
        launched = 0 if current_link.get() else int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        check_dimensions(sharded)
        layout = _layout(world, nprocs_per_node, mesh, bool(sharded))
        check_shards(sharded, layout[world.rank // len(layout[0])])
    except Exception as error:
        problem = error_text(error)
    inner = len(layout[0])
    said = world.gather(torch.tensor([problem is not None, inner, launched], dtype=torch.int64))
    failed, everyone, on_host = said.unbind(1)
    agree(world.gather, problem, failed)
    if world.size % inner or bool((everyone != inner).any()):
        raise ValueError(
            "nprocs_per_node (or the mesh's second axis) must be the same on all ranks and divide "
            f"their number: there are {world.size} ranks; by rank, it is {everyone.tolist()}"
        )
    if mesh is None and bool((on_host % inner != 0).any()):
        raise ValueError(
            f"nprocs_per_node={inner} must divide the number of ranks on every host: by rank, "
            f"there are {on_host.tolist()} on its host (LOCAL_WORLD_SIZE)"
        )
    return layout


def check_dimensions(sharded: Sequence[Tensor]) -> None:
    """Refuse a mesh of two dimensions: FSDP shards over one and replicates over the other."""
    for p in sharded:
        over = p.device_mesh  # type: ignore[attr-defined]
        if over.ndim != 1:
            raise ValueError(
                f"the parameters are sharded over a mesh of {over.ndim} dimensions, and FSDP would "
                f"average over all its ranks at every step. {_SHARD_INSIDE}"
            )


def check_shards(sharded: Sequence[Tensor], worker: list[int]) -> None:
    """Refuse parameters that are not sharded over exactly the ranks of ``worker``."""
    for p in sharded:
        over: list[int] = p.device_mesh.mesh.flatten().tolist()  # type: ignore[attr-defined]
        if over != worker:
            raise ValueError(
                f"the parameters are sharded over {len(over)} ranks, which are not the ranks of "
                "one worker (according to mesh=, a worker is "
                f"{len(worker)} consecutive ranks). {_SHARD_INSIDE}"
            )


def _layout(
    world: Link, nprocs_per_node: int | Literal["env"], mesh: DeviceMesh | None, sharded: bool
) -> list[list[int]]:
    """The ranks of each worker, according to this rank's arguments."""
    if sharded and mesh is None:
        raise ValueError(
            "the parameters are sharded (FSDP): pass the mesh of (workers, ranks of a worker), as "
            "attach(..., mesh=init_device_mesh('cuda', (4, 8)))"
        )
    if mesh is not None:
        if not hasattr(mesh, "ndim"):
            raise ValueError(f"mesh must be a torch DeviceMesh or None, not {mesh!r}")
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
    world: Link,
    layout: list[list[int]],
    group_size: int | None,
    sharded: bool,
    device: torch.device,
    timeout: float | None,
) -> dict[str, Link]:
    """The links of the named sets of ranks. The ranks of one worker are its ``replica`` if each has
    the whole model, and its ``shards`` if each has a part of it; the other set is this rank
    alone. ``timeout``: in seconds, of the link inside a replica, where that is not ``world``'s own
    way: accelerators of one host exchange faster by themselves. None: as between workers."""
    problem, grouped = None, 0
    try:
        grouped = 0 if group_size is None else check_int("group_size", group_size, 1)
    except ValueError as error:
        problem = str(error)
    said = world.gather(torch.tensor([problem is not None, grouped], dtype=torch.int64))
    agree(world.gather, problem, said[:, 0])
    everyone = said[:, 1].tolist()
    if any(said != grouped for said in everyone):
        raise ValueError(
            f"group_size must be the same on all ranks; by rank, it is {everyone} (0: not given)"
        )
    if grouped and len(layout) % grouped:
        raise ValueError(
            f"group_size must divide the number of workers: {grouped} does not divide {len(layout)}"
        )
    sets = {"world": world, "workers": world, "replica": NullLink(), "shards": NullLink()}
    crossing = list(zip(*layout, strict=True))  # the ranks at the same place in their workers
    if len(layout[0]) > 1:
        sets["workers"] = world.split(crossing)
        if sharded:  # a few numbers, beside FSDP's own collectives
            sets["shards"] = world.split(layout)
        elif timeout is None or world.queues or own_backend(device) is None:
            sets["replica"] = world.split(layout)
        else:
            sets["replica"] = inner_link(layout, device, timedelta(seconds=timeout))
    if grouped:
        # of the world, so that every rank names the same sets, as torch's process groups need
        starts = range(0, len(layout), grouped)
        sets["group"] = world.split([ranks[i : i + grouped] for ranks in crossing for i in starts])
    return sets
