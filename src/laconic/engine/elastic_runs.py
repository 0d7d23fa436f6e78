"""What `laconic.attach` does for a run whose workers come and go."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from laconic.algorithms.auto import Auto
from laconic.algorithms.round import Recipe, describe, recipe_text
from laconic.device import accelerator
from laconic.elastic import COORDINATOR_VARIABLE, Elastic
from laconic.engine.donor import Donor, PolicyState
from laconic.engine.driver import Driver
from laconic.engine.joint_optimizer import class_names, members
from laconic.engine.newcomers import Newcomer
from laconic.engine.reports import Reports
from laconic.engine.saved_state import Stateful
from laconic.errors import check_int
from laconic.links import Link
from laconic.links.agreement import agree, on_all_ranks
from laconic.links.elastic.faults import Trace, record
from laconic.links.elastic.inside import Inside, Watch
from laconic.links.elastic.leases import Need
from laconic.links.elastic.link import ElasticLink
from laconic.links.elastic.rank_link import RankLink, WorldLink
from laconic.links.elastic.simulated import SimulatedElasticLink, current_part
from laconic.links.elastic.start import start
from laconic.links.null import NullLink
from laconic.links.rank_sets import check_dimensions, check_shards
from laconic.links.simulated import current_link
from laconic.links.staged import StagedLink
from laconic.links.tcp import TcpLink
from laconic.links.torch_link import world_link
from laconic.sampler import ElasticSampler
from laconic.tensors import is_sharded, packed, unpacked
from laconic.version import __version__

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Joined:
    """A worker that has found the others. ``others``: the user's objects that a newcomer needs the
    state of, by name. ``inside``: the ranks of the worker, and their connections, for collectives
    and for `Inside`."""

    link: ElasticLink | RankLink
    others: Mapping[str, Stateful]
    inside: Inside = field(default_factory=Inside)
    ranks: TcpLink | None = None

    @property
    def number(self) -> int | None:
        """Of a newcomer's metrics file; None: the rank."""
        number = (self.link.members.number - 1) * self.inside.size + self.inside.rank
        return number if self.link.replaying else None

    def sets(self, device: torch.device) -> dict[str, Link]:
        """The links by set of ranks, of a worker of several ranks with shards on ``device``."""
        link, ranks = self.link, self.ranks
        assert isinstance(link, RankLink) and ranks is not None, "there are several ranks"
        alone = NullLink()
        world = cast("Link", WorldLink(link))
        found: dict[str, Link] = {"world": world, "workers": link, "shards": ranks}
        if accelerator(device) is not None:
            found = {name: StagedLink(each, device) for name, each in found.items()}
        return {**found, "replica": alone}

    def take_part(self, driver: Driver) -> None:
        """Take part in the rounds of ``driver``: at once, or as a newcomer from its first step on.
        A newcomer has loaded another worker's state when this returns."""
        try:
            self._check_channels(driver)
            others, policy = dict(self.others), driver.session.policy
            if policy is not None:
                others["laconic: policy"] = PolicyState(policy.handover, policy.take_over)
            donor = Donor(driver, self.link, others)
            if self.link.replaying:
                Newcomer(driver, self.link, donor).begin()
            else:
                donor.open()
        except BaseException:
            driver.detach()
            raise

    def _check_channels(self, driver: Driver) -> None:
        """Raise ``ValueError`` if ranks would exchange different numbers of buckets."""
        run = driver.run
        counts = [len(r.channels) for r in run.rounds] + [len(g.channels) for g in run.gradients]
        everyone = self.inside.gather(counts or [0])
        if any(row != everyone[0] for row in everyone):
            raise ValueError(
                "the shards of this worker's ranks differ so much in size that their rounds have "
                f"{' and '.join(str(sum(row)) for row in everyone)} buckets: in an elastic run, "
                "sizes that the number of ranks divides avoid that, such as a padded vocabulary"
            )


def asked_for(elastic: Elastic | None, link: Link | str | None, group: object) -> Elastic | None:
    """The argument ``elastic`` of `laconic.attach`, or what the environment asks for. Raises
    ``ValueError`` for other arguments that exclude it."""
    own = link is not None and not isinstance(link, str)
    if current_part.get() is not None and not own:
        elastic = elastic or Elastic()  # a simulated run with faults
    if elastic is None:
        if own or current_link.get() is not None or not os.environ.get(COORDINATOR_VARIABLE):
            return None
        elastic = Elastic()
    if not isinstance(elastic, Elastic):
        raise ValueError(f"elastic must be a laconic.Elastic, not {elastic!r}")
    given = {"link": link, "group_size": group}
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise ValueError(
            f"{' and '.join(named)} cannot be used with elastic= or {COORDINATOR_VARIABLE}: there "
            "each worker comes and goes on its own, and connects to all others"
        )
    return elastic


def ranks_of_worker(
    nprocs_per_node: int | Literal["env"], mesh: DeviceMesh | None, params: Sequence[Tensor]
) -> int:
    """How many ranks are one worker of an elastic run. Raises ``ValueError`` where they are not all
    ranks of the process group, or ``params`` are not sharded over them."""
    sharded = [p for p in params if is_sharded(p)]
    check_dimensions(sharded)
    if mesh is None:
        given = os.environ.get("LOCAL_WORLD_SIZE", "1") if nprocs_per_node == "env" else None
        ranks = check_int("nprocs_per_node (or 'env')", int(given or nprocs_per_node), 1)
    elif not hasattr(mesh, "ndim") or mesh.ndim > 1 or nprocs_per_node != 1:
        raise ValueError(
            "in an elastic run, mesh is of the ranks of this worker, such as "
            f"init_device_mesh('cuda', (8,)), without nprocs_per_node, not {mesh!r}"
        )
    else:
        ranks = mesh.size()
    if sharded and mesh is None:
        raise ValueError(
            "the parameters are sharded (FSDP): pass the mesh of this worker's ranks, as "
            "attach(..., mesh=init_device_mesh('cuda', (8,)))"
        )
    if ranks == 1:
        if mesh is not None:
            raise ValueError("the mesh has one rank: leave it out, and fully_shard, too")
        return 1
    group = dist.get_world_size() if dist.is_initialized() else 0
    if group != ranks or current_part.get() is not None:
        raise ValueError(
            f"{ranks} ranks are one worker, and the process group has {group or 'no'} ranks: in an "
            "elastic run, each worker has a process group of its own. Start each by its own "
            f"`torchrun --standalone --nproc-per-node={ranks}`, and call laconic.init()"
        )
    if not sharded:
        raise ValueError(
            f"{ranks} ranks are one worker, and each has the whole model: in an elastic run, shard "
            "it over them by fully_shard(model, mesh=mesh), or have each rank be a worker, without "
            "nprocs_per_node and mesh"
        )
    check_shards(sharded, list(range(ranks)))
    return ranks


def check(elastic: Elastic, recipe: Recipe | Auto, ranks: int) -> None:
    """Raise ``ValueError`` for a recipe that a trace cannot repeat, what workers of several
    ``ranks`` cannot do, and objects that have no state to send."""
    part = current_part.get()
    if isinstance(recipe, Auto) and part is not None and isinstance(part[0].plan, Trace):
        raise ValueError(
            "a trace cannot repeat auto(), which chooses by the time that steps take: attach one "
            "of its choices, which sync.choices lists"
        )
    if ranks > 1 and isinstance(recipe, Auto):
        raise ValueError(
            "auto() is for workers of one rank in elastic runs: attach one of its choices, such as "
            "laconic.diloco(100)"
        )
    for name, value in (elastic.others or {}).items():
        if ranks > 1 and isinstance(value, ElasticSampler):
            raise ValueError(
                f"others: {name!r} is an ElasticSampler, which deals samples to workers of one "
                f"rank, and this worker has {ranks}: draw each rank's samples by sync.step and "
                "its own seed"
            )
        if not isinstance(value, Stateful):
            raise ValueError(
                f"others: {name!r} must have state_dict() and load_state_dict(), as a scheduler "
                f"has, not be {value!r}"
            )
        _check_state(name, value.state_dict())


def _check_state(name: str, state: Any) -> None:
    """Raise ``ValueError`` for a ``state`` that cannot be sent to another worker."""
    try:
        unpacked(packed(state))
    except (AttributeError, RuntimeError, TypeError, pickle.PickleError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"others[{name!r}].state_dict() has something that cannot be sent to another worker: "
            f"it may have numbers, strings, tensors, and lists and dicts of these ({reason})"
        ) from None


def join(
    elastic: Elastic,
    recipe: Recipe | Auto,
    rounds: Recipe,
    optimizer: Optimizer,
    params: Sequence[Tensor],
    buffers: str,
    seed: int,
    timeout: float,
    ranks: int = 1,
) -> Joined:
    """Find the other workers, which must run the same ``recipe``, of these ``rounds``, with the
    same ``optimizer`` and parameters, and as many ``ranks``. All ranks of a worker must call it."""
    others = dict(elastic.others or {})
    samplers = {k: s for k, s in others.items() if isinstance(s, ElasticSampler)}
    reports = Reports(samplers)
    rest = {k: each for k, each in others.items() if k not in samplers}
    part = current_part.get()
    if part is not None:
        return Joined(SimulatedElasticLink(*part, reports), rest)
    text, definition = recipe_text(rounds), describe(rounds)
    if isinstance(recipe, Auto):
        text = definition = recipe.text
    shapes = repr([(tuple(p.shape), str(p.dtype), p.requires_grad) for p in params])
    sizes = ", ".join(str(len(group["params"])) for group in optimizer.param_groups)
    about = {
        "version of laconic": __version__,
        "recipe": text,
        "optimizer": f"{class_names(members(optimizer))} (parameters by group: {sizes})",
        "number of ranks per worker": str(ranks),
        "settings": f"buffers={buffers!r}, seed={seed}",
        "definition of the recipe": hashlib.sha256(definition.encode()).hexdigest()[:16],
        "model": hashlib.sha256(shapes.encode()).hexdigest()[:16],
        "list of others": ", ".join(sorted(others)) or "none",
        **{f"sampler ({name})": sampler.about() for name, sampler in sorted(samplers.items())},
    }
    need = Need(elastic.workers or elastic.min_workers or 2, elastic.workers, elastic.min_workers)
    within = elastic.wait, timeout
    trace = elastic.trace_directory()
    if trace is not None:
        trace.mkdir(parents=True, exist_ok=True)

    def recording(id: str) -> Callable[[dict[str, Any]], None]:
        return (lambda event: None) if trace is None else partial(record, trace / f"{id}.jsonl")

    def begin() -> ElasticLink:
        return start(elastic.address(), elastic.job, about, need, *within, reports, recording)

    if ranks == 1:
        return Joined(begin(), rest)
    return _join_as_rank(begin, elastic.wait + timeout, reports, rest)


def _join_as_rank(
    begin: Callable[[], ElasticLink],
    timeout: float,
    reports: Reports,
    others: Mapping[str, Stateful],
) -> Joined:
    """As `join`, in a worker of several ranks, of which rank 0 calls ``begin()``."""
    everyone = world_link(torch.device("cpu"), timedelta(seconds=timeout), "tcp")
    assert isinstance(everyone, TcpLink)
    agree(everyone.gather, None)  # with `refused_by_all`
    all_ranks = [list(range(everyone.size))]
    jobs, inside, watched = (everyone.split(all_ranks) for _ in range(3))
    watch = Watch(watched)
    try:
        with on_all_ranks(inside.gather):
            outer = begin() if inside.rank == 0 else None
        link = RankLink(Inside(jobs), outer, reports)
        watch.over = lambda: link.over
        link.tell()
    except BaseException:
        watch.over = lambda: True  # the ranks have not joined a run, and need not end together
        raise
    return Joined(link, others, Inside(inside), everyone)
