"""Workers given by a DeviceMesh: whole models on every rank, and models sharded by FSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic as la
from laconic.algorithms.exchanges import Mean
from laconic.algorithms.update import Update
from laconic.errors import NotFiniteError

from tests.references import reference
from tests.references import reference_decade as decade
from tests.support import gloo, training
from tests.support.exact_rows import ROWS
from tests.support.training import OPTIMIZERS, Job, largest_difference, same_bits

SHARDED = [
    "ddp",
    "local_sgd(4)",
    "local_sgd(4, delay=2)",
    "slowmo(sgp(delay=2), 5)",
    "diloco(4)",
    "diloco(4, unsharded)",
    "easgd(2, 0.5, pull=0.3)",
    "local_sgd(4, average)",
]


def joined(job: Job) -> reference.Data:
    """The batches of two workers of two ranks, as one worker each would see them."""
    one, two, three, four = job.data()

    def join(a: reference.Batch, b: reference.Batch) -> reference.Batch:
        return np.concatenate([a[0], b[0]]), np.concatenate([a[1], b[1]])

    return [list(map(join, one, two)), list(map(join, three, four))]


def whole(rank: int, job: Job) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2))
    return training.train(job, rank, gloo.link_of(4), mesh=mesh)


def sharded(rank: int, job: Job) -> list[Any]:
    """The same training, each worker's model sharded over its two ranks; where it ends."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "shards"))
    model, _ = training.build(job, rank - rank % 2)  # the ranks of a worker start alike
    fully_shard(model, mesh=mesh["shards"])
    by_name = dict(zip(reference.NAMES, model.parameters(), strict=True))
    groups = [
        {"params": [by_name[name] for name in names], "lr": 1.0} for names in reference.GROUPS
    ]
    optimizer = OPTIMIZERS[job.optimizer][0](groups)
    sync = la.attach(model, optimizer, job.recipe, link=gloo.link_of(4), mesh=mesh)

    def values() -> dict[str, Any]:
        return {k: p.full_tensor().detach().clone().numpy() for k, p in by_name.items()}

    for t in range(1, job.steps + 1):
        training.step(job, model, optimizer, job.data()[rank][t - 1], t, sync)
    with sync.consensus(mean=False):
        consensus = values()
    sync.detach()
    return [(values(), consensus)]


@pytest.mark.parametrize("row", SHARDED)
def test_workers_sharded_by_fsdp(pool: gloo.Pool, row: str) -> None:
    recipe, expected = ROWS[row]
    job = Job(recipe, 4, steps=12, optimizer="adamw")
    runs = pool.run(sharded, job, ranks=4)
    rules, init = OPTIMIZERS[job.optimizer][1], reference.initial(2, job.seed)
    trace = decade.run(expected, 2, job.steps, rules, job.lr, joined(job), init)
    end = reference.Trace(trace.workers[-1:], trace.consensus[-1:])
    assert largest_difference([runs[0], runs[2]], end) < 1e-10
    assert same_bits([runs[0], runs[2]], [runs[1], runs[3]])


def test_a_mesh_of_workers_is_nprocs_per_node(pool: gloo.Pool) -> None:
    recipe = ROWS["slowmo(sgp(), 4)"][0]
    job = Job(recipe, 4, options=(("nprocs_per_node", 2),))
    runs = pool.run(whole, Job(recipe, 4), ranks=4)
    assert same_bits(runs, training.simulated(job))


def mistaken(rank: int, shape: tuple[int, ...], options: dict[str, Any]) -> str:
    mesh = init_device_mesh("cpu", shape)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        la.attach(model, optimizer, la.local_sgd(2), link=gloo.link_of(4), mesh=mesh, **options)
    except ValueError as error:
        return str(error)
    return "nothing"


def narrow(rank: int, recipe: la.Recipe) -> list[list[float]]:
    """Parameters after some steps of a model with less in a dimension than it has shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "shards"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    fully_shard(model, mesh=mesh["shards"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with la.attach(model, optimizer, recipe, link=gloo.link_of(4), mesh=mesh):
        for t in range(4):
            model(torch.full((2, 3), 1.0 + rank + t)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.full_tensor().flatten().tolist() for p in model.parameters()]


@pytest.mark.parametrize("recipe", [la.ddp(), la.ddp(codec="int8"), la.local_sgd(2)])
def test_a_rank_without_a_part_of_some_parameter(pool: gloo.Pool, recipe: la.Recipe) -> None:
    runs = pool.run(narrow, recipe, ranks=4)
    assert runs == [runs[0]] * 4
    assert runs != pool.run(narrow, la.local_sgd(9), ranks=4)


def moved(rank: int) -> list[float]:
    """Parameters after a round before which FSDP has moved a shard to another place, as it does
    in some versions of torch to pad it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "shards"))
    model = torch.nn.Linear(1, 5, bias=False)
    fully_shard(model, mesh=mesh["shards"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with la.attach(model, optimizer, la.local_sgd(1), link=gloo.link_of(4), mesh=mesh):
        for _ in range(2):
            model(torch.full((1, 1), 1.0 + rank // 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            weight: Any = model.weight
            weight._local_tensor = weight._local_tensor.detach().clone()
    whole: list[float] = weight.full_tensor().flatten().tolist()
    return whole


def test_shards_that_move_are_still_averaged(pool: gloo.Pool) -> None:
    runs = pool.run(moved, ranks=4)
    assert runs == [runs[0]] * 4


def unsaid(rank: int) -> str:
    model = torch.nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        la.attach(model, optimizer, la.local_sgd(2), link=gloo.link_of(4))
    except ValueError as error:
        return str(error)
    return "nothing"


class Matrices(Update):
    """Of whole tensors."""

    whole = True


def in_shards(rank: int) -> str:
    """What is said of an update of whole tensors, for a sharded model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=mesh["b"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe = (la.Round(la.every(2), Matrices(), Mean()),)
    try:
        la.attach(model, optimizer, recipe, link=gloo.link_of(4), mesh=mesh)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_mistakes_are_told_alike(pool: gloo.Pool) -> None:
    cases = {
        "one or two axes": ((1, 2, 2), {}),
        "either mesh or nprocs_per_node": ((2, 2), {"nprocs_per_node": 2}),
        "group_size must": ((2, 2), {"group_size": 3}),
    }
    for words, (shape, options) in cases.items():
        said = pool.run(mistaken, shape, options, ranks=4)
        assert len(set(said)) == 1 and words in said[0], said
    said = pool.run(unsaid, ranks=4)
    assert len(set(said)) == 1 and "mesh=" in said[0]
    said = pool.run(in_shards, ranks=4)
    assert len(set(said)) == 1 and "Matrices needs whole tensors" in said[0]


def lost_shard(rank: int, folder: str) -> list[float]:
    """Load all ranks' states but the last one's: what each rank's anchor is then, and was."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=mesh["b"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with la.attach(model, optimizer, la.diloco(2), link=gloo.link_of(4), mesh=mesh) as sync:
        for t in range(3):
            model(torch.randn(2, 4) + t + rank).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        sync.finish()
        states: list[Any] = [None] * 4
        torch.distributed.all_gather_object(states, sync.state_dict())
        before = momenta(states[rank])
        states[3] = None
        sync.load_state_dict(states)
        after = momenta(sync.state_dict())
    return [float(before), float(after)]


def momenta(state: Any) -> torch.Tensor:
    (round,) = state["rounds"]
    return torch.cat([channel["anchor"] for channel in round["state"]]).abs().sum()


def test_a_state_of_all_ranks_gives_each_its_own_shard(pool: gloo.Pool, tmp_path: Path) -> None:
    found = pool.run(lost_shard, str(tmp_path), ranks=4)
    for before, after in found[:3]:  # their slices of the outer state are all there
        assert after == pytest.approx(before, rel=1e-6)


def missharded(rank: int, shape: tuple[int, ...], shards: str, given: str) -> str:
    """What is said of a model sharded over ``shards``, where ``given`` is attach's mesh."""
    over: dict[str, Any] = {
        "hsdp": lambda: init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")),
        "all": lambda: init_device_mesh("cpu", (4,)),
        "columns": lambda: init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))["a"],
        "rows": lambda: init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))["b"],
    }
    meshes: dict[str, Any] = {
        "none": lambda: None,
        "line": lambda: init_device_mesh("cpu", (4,)),
        "grid": lambda: init_device_mesh("cpu", (2, 2)),
    }
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=over[shards]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mesh = meshes[given]()
    try:
        la.attach(model, optimizer, la.local_sgd(2), link=gloo.link_of(4), mesh=mesh).detach()
    except ValueError as error:
        return str(error)
    return "attached"


@pytest.mark.parametrize(
    ("shards", "given", "words"),
    [
        ("hsdp", "none", "over a mesh of 2 dimensions"),
        ("hsdp", "grid", "over a mesh of 2 dimensions"),
        ("all", "line", "over 4 ranks, which are not the ranks of one worker"),
        ("all", "grid", "over 4 ranks, which are not the ranks of one worker"),
        ("columns", "grid", "over 2 ranks, which are not the ranks of one worker"),
        ("rows", "line", "over 2 ranks, which are not the ranks of one worker"),
        ("rows", "grid", "attached"),
    ],
)
def test_a_model_is_sharded_over_the_ranks_of_its_worker(
    pool: gloo.Pool, shards: str, given: str, words: str
) -> None:
    """Where FSDP has ranks of other workers, too, it averages gradients over them at every step,
    and what laconic takes for one shard is another's."""
    said = pool.run(missharded, (2, 2), shards, given, ranks=4)
    assert len(set(said)) == 1 and words in said[0], said
    assert words == "attached" or ("fully_shard(model, mesh=mesh['shards'])" in said[0])


class Nested(torch.nn.Module):
    """Blocks sharded each on their own, between parameters of the outermost module."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(3, 8)
        self.blocks = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2)))
        self.leave = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.leave(self.blocks(self.enter(x).tanh()).tanh())
        return out


def nested(rank: int) -> tuple[Nested, torch.optim.Optimizer, Any]:
    """The same start on the two ranks of a worker."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "shards"))
    torch.manual_seed(0)
    model = Nested()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shards"])
    fully_shard(model, mesh=mesh["shards"])
    return model, torch.optim.SGD(model.parameters(), lr=0.1), mesh


def batch(rank: int, t: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * t + rank)
    return torch.randn(2, 3, generator=generator)


def validating(rank: int, validate: bool) -> tuple[list[float], list[float], list[float]]:
    """What a validation in the middle says, the parameters at the end, and what is said of it."""
    model, optimizer, mesh = nested(rank)
    said: list[list[float]] = []

    def look() -> None:
        with torch.no_grad():
            said.append(model(torch.ones(1, 3)).flatten().tolist())

    if validate:
        look()  # before it is attached
    with la.attach(model, optimizer, la.local_sgd(4), link=gloo.link_of(4), mesh=mesh) as sync:
        for t in range(6):
            model(batch(rank, t)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if validate and t in (1, 4):
                look()
                with sync.consensus():
                    look()
        if validate:
            look()
    look()
    held = [float(v) for p in optimizer.param_groups[0]["params"] for v in p.full_tensor().ravel()]
    return held, said[2] if validate else [], said[-1]


def test_a_validation_is_of_the_consensus_and_changes_nothing(pool: gloo.Pool) -> None:
    """FSDP holds the outermost module's parameters whole from a forward pass on."""
    plain = pool.run(validating, False, ranks=4)
    runs = pool.run(validating, True, ranks=4)
    ends, within, after = zip(*runs, strict=True)
    assert list(ends) == [end for end, _, _ in plain] == [ends[0]] * 4
    assert list(within) == [within[0]] * 4
    assert list(after) == [said for _, _, said in plain] == [after[0]] * 4


def lags(rank: int) -> list[float]:
    """What the owners' codes left out of the step before, by step."""
    model, optimizer, mesh = nested(rank)
    sync = la.attach(model, optimizer, la.ddp(codec="int4"), link=gloo.link_of(4), mesh=mesh)
    found = []
    for t in range(3):
        model(batch(rank, t)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        (saved,) = sync.state_dict()["gradients"]
        found.append(max(float(state["lag"].abs().max()) for state in saved["carried"]))
    sync.detach()
    return found


def test_buckets_stay_as_they_are_in_a_backward_pass_of_nested_shards(pool: gloo.Pool) -> None:
    """Or what owners have left over would be given back, and bases of low rank begin anew."""
    runs = pool.run(lags, ranks=4)
    assert all(lag > 0 for lag in runs[0] + runs[1])  # what worker 1 owns is padding


def poisoned(rank: int, recipe: la.Recipe, closure: bool) -> str:
    """One worker's gradient is NaN in its first row, which its first rank holds."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "shards"))
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4)
    fully_shard(model, mesh=mesh["shards"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = la.attach(model, optimizer, recipe, link=gloo.link_of(4), mesh=mesh)
    weight = torch.ones(4)
    try:
        for t in range(6):
            weight[0] = float("nan") if rank < 2 and t == 1 else 1.0
            loss = (model(batch(rank, t)) * weight).square().mean()
            if closure:
                optimizer.step(loss.backward)
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
    except NotFiniteError as error:
        return f"step {t}: {error}"
    finally:
        sync.detach()
    return "nothing"


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize(
    "recipe",
    [
        la.ddp(codec="int8"),
        la.local_sgd(2, codec="int8"),
        la.local_sgd(2, delay=1, codec="int8"),
        la.diloco(2, codec="top64"),
    ],
)
def test_what_one_shard_refuses_is_refused_on_all_ranks(
    pool: gloo.Pool, recipe: la.Recipe, closure: bool
) -> None:
    said = pool.run(poisoned, recipe, closure, ranks=4)
    last = 2 if any(r.delay for r in recipe) else 1
    assert {s.split(":")[0] for s in said} == {f"step {last}"}, said
    assert "ranks [0] of its link" in said[0] and "ranks [0] of its link" in said[2]
    assert "another shard" in said[1] and "another shard" in said[3]


def evaluated(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "shards"))
    model = torch.nn.Linear(3, 4)
    fully_shard(model, mesh=mesh["shards"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(torch.ones(1, 3))
    try:
        la.attach(model, optimizer, la.local_sgd(2), link=gloo.link_of(4), mesh=mesh).detach()
    except ValueError as error:
        return str(error)
    return "attached"


def test_a_sharded_model_may_be_evaluated_before_it_is_attached(pool: gloo.Pool) -> None:
    assert pool.run(evaluated, ranks=4) == ["attached"] * 4
