"""Workers given by a DeviceMesh: whole models on every rank, and models sharded by FSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic as la
from laconic.engine.session import Choice
from laconic.errors import NotFiniteError

from tests.support import gloo
from tests.support.loops import close, data, descend, equal, joined, loss_of, refusal, train

RECIPES: dict[str, la.Recipe] = {
    "ddp, coded": la.ddp(codec="int8"),
    "local_sgd, late": la.local_sgd(4, delay=2, optimizer_state="average"),
    "slowmo over sgp": la.slowmo(la.sgp(delay=2), 5, momentum=0.5),
    "diloco, muon": la.diloco(4, outer="muon"),
    "diloco, unsharded": la.diloco(4, sharded=False),
    "outer_step, muon": la.outer_step(la.ddp(), 3, outer="muon"),
    "outer_step, own": la.outer_step(la.local_sgd(4), 3, outer="muon", average=False),
}
SLOW = ["diloco, unsharded", "outer_step, muon"]
LOCAL = la.local_sgd(2)


def build(seed: int = 0) -> nn.Sequential:
    """Blocks of their own; of the last one some ranks have no part."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def mesh_of(shape: tuple[int, ...] = (2, 2)) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("workers", "shards")[: len(shape)])


def sharded(recipe: la.Recipe, seed: int = 0) -> tuple[nn.Sequential, Any, la.Synchronizer]:
    """A model of which each worker's two ranks have a half."""
    mesh, model = mesh_of(), build(seed)
    fully_shard(model[0], mesh=mesh["shards"])
    fully_shard(model, mesh=mesh["shards"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with torch.no_grad():
        model(torch.ones(1, 5, dtype=torch.float64))  # it may be evaluated before it is attached
    return model, optimizer, la.attach(model, optimizer, recipe, mesh=mesh, timeout=60)


def full(model: Any) -> Tensor:
    return torch.cat([p.full_tensor().detach().ravel() for p in model.parameters()])


def run_sharded(rank: int, recipe: la.Recipe) -> tuple[Tensor, Tensor, Tensor]:
    """The parameters after the last step, the consensus, and what the model says of a batch in a
    validation, after which the outermost module's parameters, which FSDP holds whole from a forward
    pass on, are the worker's own."""
    model, optimizer, sync = sharded(recipe)
    said = Tensor()
    for t, x in enumerate(data(4, 10)[rank]):
        descend(optimizer, loss_of(model, x))
        if t in (2, 6):
            with torch.no_grad(), sync.consensus():
                said = model(data()[0][0])
                model(x)
            with torch.no_grad():
                model(x)
    end = full(model)
    with sync.consensus():
        consensus = full(model)
    sync.finish()
    assert torch.equal(consensus, full(model))
    sync.detach()
    return end, consensus, said


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in RECIPES]
)
def test_workers_sharded_by_fsdp(pool: gloo.Pool, name: str) -> None:
    """As two workers with whole models and all batches of their ranks, which validate nothing."""
    recipe = RECIPES[name]
    runs = pool.run(run_sharded, recipe, ranks=4)
    assert all(map(torch.equal, runs[0], runs[1])) and all(map(torch.equal, runs[2], runs[3]))
    assert equal([consensus for _, consensus, _ in runs]) and equal([said for *_, said in runs])

    def whole(rank: int) -> Tensor:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        la.attach(model, optimizer, recipe)
        return train(model, optimizer, joined(data(4, 10)[2 * rank : 2 * rank + 2]))[-1]

    expected = la.simulate(whole, workers=2)
    if name == "ddp, coded":  # whose buckets are others
        assert torch.equal(runs[0][0], runs[2][0]) and close(runs[0][0], expected[0], 0.02)
    else:
        assert all(close(runs[2 * w][0], expected[w], 1e-9) for w in range(2))


def chosen(rank: int) -> Choice:
    model, optimizer, sync = sharded(la.auto())  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:  # of all matrices, on any machine
        patch.setattr("laconic.policy.chooser.turning", lambda *_: 1.0)
        for x in data(4, 20)[rank]:
            descend(optimizer, loss_of(model, x))
    sync.detach()
    return sync.choices[0]


def test_auto_takes_muons_direction_of_sharded_matrices(pool: gloo.Pool) -> None:
    found = pool.run(chosen, ranks=4)
    assert found == [found[0]] * 4 and found[0].facts.muon
    assert found[0].facts.turning == 0.5, "a worker's two ranks share them"


def states(rank: int, recipe: la.Recipe, folder: str) -> tuple[bool, list[float]]:
    """Whether a sharded run that was saved goes on bit for bit, and the shards of its momenta at
    the save."""
    model, optimizer, sync = sharded(recipe)
    for x in data(4)[rank][:5]:
        descend(optimizer, loss_of(model, x))
    la.save(folder, model, optimizer)
    found = momenta(optimizer)

    def tail() -> Tensor:
        for x in data(4)[rank][5:]:
            descend(optimizer, loss_of(model, x))
        shards: Any = list(model.parameters())
        return torch.cat([p.to_local().detach().ravel() for p in shards])

    expected = tail()
    sync.detach()
    model, optimizer, sync = sharded(recipe, 2)
    la.load(folder, model, optimizer)
    same = torch.equal(expected, tail())
    sync.detach()
    return same, found


def momenta(optimizer: torch.optim.Optimizer) -> list[float]:
    states = [optimizer.state[p]["exp_avg"] for p in optimizer.param_groups[0]["params"]]
    return [float(x) for state in states for x in state.to_local().ravel()]


def after_a_loss(rank: int, recipe: la.Recipe, folder: str) -> list[float]:
    model, optimizer, sync = sharded(recipe, 2)
    la.load(folder, model, optimizer)
    sync.detach()
    return momenta(optimizer)


def test_a_sharded_run_goes_on_bit_for_bit(pool: gloo.Pool, tmp_path: Path) -> None:
    """A lost shard is replaced by the same shard of another worker."""
    for recipe in (
        la.slowmo(la.local_sgd(4, delay=3), 6, momentum=0.5),
        la.streaming_diloco(4, 2, 2, codec="int8", outer="muon"),
    ):
        runs = pool.run(states, recipe, str(tmp_path), ranks=4)
        assert all(same for same, _ in runs)
        shards = [found for _, found in runs]
        assert all(shards.count(shard) == 1 for shard in shards), "they are apart"
    next(tmp_path.glob("rank-3-*.pt")).unlink()
    found = pool.run(after_a_loss, recipe, str(tmp_path), ranks=4)
    assert found == [*shards[:3], shards[1]]


def poisoned(rank: int, recipe: la.Recipe, closure: bool) -> str:
    """One worker's gradient is NaN in its first row, which its first rank holds."""
    mesh = mesh_of()
    torch.manual_seed(0)
    model = nn.Linear(5, 4).double()
    fully_shard(model, mesh=mesh["shards"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = la.attach(model, optimizer, recipe, mesh=mesh, timeout=60)
    weight = torch.ones(4)
    t = 0
    try:
        for t in range(6):
            weight[0] = float("nan") if rank < 2 and t == 1 else 1.0
            loss = (model(data(4)[rank][t]) * weight).square().mean()
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


@pytest.mark.parametrize(
    ("recipe", "closure", "last"),
    [(la.ddp(codec="int8"), True, 1), (la.local_sgd(2, delay=1, codec="int8"), False, 2)],
)
def test_what_one_shard_refuses_is_refused_on_all_ranks(
    pool: gloo.Pool, recipe: la.Recipe, closure: bool, last: int
) -> None:
    for rank, said in enumerate(pool.run(poisoned, recipe, closure, ranks=4)):
        assert said.startswith(f"step {last}:"), said
        assert ("another rank of this worker" if rank % 2 else "ranks [0] of its link") in said


# -- mistakes ----


SHARDS = {
    "hsdp": lambda: mesh_of(),
    "all": lambda: mesh_of((4,)),
    "columns": lambda: mesh_of()["workers"],
    "rows": lambda: mesh_of()["shards"],
    "none": lambda: None,
}
MISSHARDED = [
    ("hsdp", "none", "over a mesh of 2 dimensions"),
    ("all", "hsdp", "over 4 ranks, which are not the ranks of one worker"),
    ("columns", "hsdp", "over 2 ranks, which are not the ranks of one worker"),
    ("rows", "all", "over 2 ranks, which are not the ranks of one worker"),
]
"""What a model is sharded over, the mesh that `laconic.attach` is given, and what it says."""


def missharded(rank: int) -> list[str]:
    model, mesh = nn.Linear(2, 2), mesh_of()

    def said(recipe: la.Recipe = LOCAL, **options: Any) -> str:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return refusal(lambda: la.attach(model, optimizer, recipe, **options))

    assert "one or two axes" in said(mesh=init_device_mesh("cpu", (1, 2, 2)))
    assert "either mesh or nprocs_per_node" in said(mesh=mesh, nprocs_per_node=2)
    assert "group_size must" in said(mesh=mesh, group_size=3)
    fully_shard(model, mesh=mesh["shards"])
    assert "mesh=" in said()
    found = []
    for shards, given, _ in MISSHARDED:
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=SHARDS[shards]())
        found.append(said(mesh=SHARDS[given]()))
    return found


def test_a_model_is_sharded_over_the_ranks_of_its_worker(pool: gloo.Pool) -> None:
    """Where FSDP has ranks of other workers, too, it averages gradients over them at every step,
    and what laconic takes for one shard is another's."""
    (first, *others) = pool.run(missharded, ranks=4)
    assert all(other == first for other in others)
    for said, (*_, words) in zip(first, MISSHARDED, strict=True):
        assert words in said and "fully_shard(model, mesh=mesh['shards'])" in said


def sharded_in_part(rank: int) -> list[str]:
    """What `laconic.attach` says of a block that FSDP has not sharded; and, of one that was frozen,
    the step after it was thawed."""
    mesh = mesh_of()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[1], mesh=mesh["shards"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = [refusal(lambda: la.attach(model, optimizer, LOCAL, mesh=mesh))]
    model[0].requires_grad_(False)
    with la.attach(model, optimizer, LOCAL, mesh=mesh) as sync:
        descend(optimizer, model(torch.ones(2, 4)).sum())
        model[0].requires_grad_(True)
        found.append(refusal(lambda: descend(optimizer, model(torch.ones(2, 4)).sum())))
        sync.detach()
    return found


@pytest.mark.fault("what FSDP had left whole, the ranks of a worker trained apart, and no one saw")
def test_a_model_is_sharded_as_a_whole(pool: gloo.Pool) -> None:
    for attached, thawed in pool.run(sharded_in_part, ranks=4):
        for said in (attached, thawed):
            assert "the optimizer trains '0.weight', which is not sharded" in said
