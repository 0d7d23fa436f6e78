"""Every option of a front end has an effect, or is refused: it changes the parameters, what is
sent, what is written or said, or raises ``ValueError``. A new option is missing in the tables here.
"""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laconic as la

Options = Mapping[str, Any]
STEPS = 6


def training(rank: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model with BatchNorm, its optimizer, and the gradients of one more batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)

    def backward() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=generator)).square().mean().backward()

    return model, optimizer, backward


def seen(model: nn.Module, sync: la.Synchronizer | None, *more: object) -> str:
    """What a user sees of a run."""
    digest = hashlib.sha256()
    for t in (*model.parameters(), *model.buffers()):
        digest.update(t.detach().double().numpy().tobytes())
    stats = sync and sync.stats()
    return f"{digest.hexdigest()} {stats and stats.bytes_by_collective} {more}"


def observed(run: Callable[[], object]) -> str:
    """What ``run`` shows, also by warnings; "refused" for a ``ValueError``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = run()
        except ValueError:
            return "refused"
    return f"{found} {sorted({str(w.message) for w in caught})}"


def check(run: Callable[..., object], options: Options, beside: Options) -> None:
    plain = observed(partial(run, **beside))
    assert plain != "refused"
    changed = {name: {**beside, name: value} for name, value in options.items()}
    same = [name for name, given in changed.items() if observed(partial(run, **given)) == plain]
    assert not same, f"no effect beside {dict(beside)}: {same}"


def parameters(function: Callable[..., object]) -> set[str]:
    return {*inspect.signature(function).parameters} - {"self"}


# -- attach ----


def attached(rank: int, recipe: la.Recipe, options: Options, scaled: bool) -> str:
    model, optimizer, backward = training(rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    more: dict[str, Any] = {"scaler": scaler} if scaled else {}
    with la.attach(model, optimizer, recipe, **options, **more) as sync:
        for step in range(STEPS):
            backward()
            scaler.scale(torch.zeros(()))
            if step == 1:  # on all workers
                next(model.parameters()).grad[0] = torch.inf  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
    return seen(model, sync, sync.step, sync.workers)


def attach(recipe: la.Recipe, scaler: bool = False, **options: Any) -> object:
    return la.simulate(partial(attached, recipe=recipe, options=options, scaled=scaler), 4)


def over_links(timeout: float | None = None) -> object:
    """Over links that are given, of which each has a time-out of its own."""
    options = {} if timeout is None else {"timeout": timeout}
    links: dict[int, la.links.Link] = {}

    def run(rank: int) -> str:
        return attached(rank, la.local_sgd(2), {"link": links[rank], **options}, scaled=False)

    return la.simulate(run, 2, link=lambda link: links.setdefault(link.rank, link))


GIVEN = {"model", "optimizer", "recipe"}
ELSEWHERE = {"mesh", "elastic", "link"}
"""Need processes, or a coordinator: a test without them would train nothing."""


def test_options_of_attach(tmp_path: Path) -> None:
    alike = {"nprocs_per_node": 2, "buffers": "keep", "scaler": True, "offload": True}
    written = tmp_path / "run.jsonl"
    check(attach, alike, {"recipe": la.local_sgd(2)})
    check(attach, {"seed": 1}, {"recipe": la.sgp("random")})
    check(attach, {"buffers": "broadcast"}, {"recipe": la.ddp()})
    groups = [attach(la.hierarchical(1, 2), group_size=size) for size in (1, 2)]
    assert groups[0] != groups[1]
    check(over_links, {"timeout": 5.0}, {})
    attach(la.local_sgd(2), metrics=written)
    assert written.read_text()
    tested = {*alike, "seed", "timeout", "metrics", "group_size"}
    assert parameters(la.attach) == GIVEN | ELSEWHERE | tested


# -- the drop-ins ----


def stepped(name: str | None, workers: int = 3, own_model: bool = False, **options: Any) -> object:
    def worker(rank: int) -> str:
        model, optimizer, backward = training(rank)
        more = {"model": model} if own_model else {}
        optimizer = la.CommOptimizer(optimizer, name, workers, **options, **more)  # type: ignore[arg-type]
        for _ in range(STEPS):
            backward()
            optimizer.step()
        found = seen(model, optimizer.sync)
        optimizer.finish()
        return f"{found} {seen(model, optimizer.sync)}"

    return la.simulate(worker, workers)


@pytest.mark.parametrize("name", ["EASGD", "LSGD", "DDP", None])
def test_options_of_the_optimizer_of_sdtl(name: str | None) -> None:
    numbers = {"comm_period": 3, "dist_pulling_strength": 0.5, "local_pulling_strength": 0.1}
    beside: dict[str, Any] = {"name": name}
    if name in ("EASGD", "LSGD"):
        beside |= {"comm_period": 2, "dist_pulling_strength": 0.25}
    check(stepped, {**numbers, "own_model": True}, beside)
    for option in ("timeout", "link") if name is None else ():
        given: dict[str, Any] = {option: 5.0}
        assert observed(partial(stepped, name, **given)) == "refused"
    own = {"optimizer", "dist_optim_name", "world_size", "model", "scaler", "link", "timeout"}
    assert parameters(la.CommOptimizer) == own | {*numbers}


SLOWMO: Options = {
    "broadcast_buffers": False,
    "slowmo_momentum": 0.25,
    "slowmo_memory_efficient": False,
    "slowmo_frequency": 2,
    "slowmo_lr": 0.5,
    "slowmo_num_shards": 1,
    "localsgd_frequency": 2,
    "graph": la.RingGraph,
    "mixing": la.UniformMixing,
    "push_sum": False,
    "overlap": True,
    "synch_freq": 2,
    "use_streams": False,
    "slowmo_sgp_average_params": True,
    "verbose": True,
    "profile_mode": True,
    "process_rank": 7,
    "process_world_size": 7,
    "comm_device": "meta",
}
NOT_THERE = {"global_group", "master_group", "local_node_group", "timeout"}
"""Process groups, whose size is checked, and a time without which nothing is waited for, need
processes."""


def slowmo(nodes: int = 3, nprocs_per_node: int = 1, **options: Any) -> object:
    def worker(rank: int) -> str:
        model, optimizer, backward = training(rank)
        own = dict(options)
        if "graph" in own:
            own["graph"] = la.RingGraph(rank, nodes)
        if "mixing" in own:
            own["mixing"] = la.UniformMixing(la.RingGraph(rank, nodes))
        wrapper = la.SlowMoDistributedDataParallel(model, nprocs_per_node, **own)
        for _ in range(STEPS):
            backward()
            optimizer.step()
            wrapper.perform_slowmo(optimizer)
        found = seen(model, wrapper.synchronizer)
        wrapper.finish()
        return found

    return la.simulate(worker, nodes * nprocs_per_node)


@pytest.mark.parametrize("algorithm", la.SlowMoBaseAlgorithm)
def test_options_of_the_wrapper_of_fairscale(algorithm: la.SlowMoBaseAlgorithm) -> None:
    """fairscale ignores some, so here a warning names them."""
    beside: Options = {"slowmo_base_algorithm": algorithm, "slowmo_frequency": 3}
    options = {name: value for name, value in SLOWMO.items() if name not in beside}
    check(slowmo, options, beside)
    wrapper = la.SlowMoDistributedDataParallel.__init__
    rest = {"module", "nprocs_per_node", "slowmo_base_algorithm"} | NOT_THERE
    assert parameters(wrapper) == rest | {*SLOWMO}
