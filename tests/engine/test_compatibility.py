"""What of PyTorch works with laconic: the rows of `docs/compatibility.md` that no other file tests.

Most are compared with one process that trains on all workers' batches, which `ddp()` must equal.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoints
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import laconic as la

from tests.support import gloo
from tests.support.loops import flat, sgd

WORKERS, STEPS, BATCH, WORDS = 2, 6, 4, 11
dcp: Any = checkpoints  # which torch does not export by name
Make = Callable[[nn.Module], Optimizer]


class Language(nn.Module):
    """Predicts words, by an output layer that may share the weights of the embedding."""

    def __init__(
        self, *, tied: bool = False, sparse: bool = False, recompute: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6, sparse=sparse)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.output = nn.Linear(6, WORDS, bias=False)
        self.recompute = recompute
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        x = checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)
        logits: Tensor = self.output(x)
        return logits


def language(**options: bool) -> Language:
    torch.manual_seed(3)
    return Language(**options).double()


def batch(step: int, worker: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + worker)
    words = torch.randint(0, WORDS, (2, BATCH), generator=generator)
    return words[0], words[1]


def train(model: nn.Module, optimizer: Optimizer, workers: list[int], clip: float = 0.0) -> None:
    """Train on the batches of ``workers``, joined."""
    for step in range(STEPS):
        x, y = (torch.cat(parts) for parts in zip(*(batch(step, w) for w in workers), strict=True))
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 0.05, **options)


def together(build: Callable[[], nn.Module], make: Make, recipe: la.Recipe) -> list[Tensor]:
    """The parameters that each worker has in the end."""

    def run(rank: int) -> Tensor:
        model = build()
        optimizer = make(model)
        with la.attach(model, optimizer, recipe):
            train(model, optimizer, [rank])
        return flat(model)

    return la.simulate(run, workers=WORKERS)


def alone(build: Callable[[], nn.Module], make: Make) -> Tensor:
    """Those of one process that has all batches."""
    model = build()
    train(model, make(model), [*range(WORKERS)])
    return flat(model)


def largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


# -- optimizers, and models that compute otherwise ----


def test_fused_and_foreach_optimizers() -> None:
    for kind in ("for-loop", "foreach", "fused"):
        make = partial(adamw, foreach=kind == "foreach", fused=kind == "fused")
        runs = together(language, make, la.ddp())
        assert torch.equal(*runs) and largest(runs[0], alone(language, make)) < 1e-12


def test_activation_checkpointing_changes_no_bit() -> None:
    for recipe in (la.ddp(), la.ddp(codec="int8"), la.diloco(3)):
        plain = together(language, adamw, recipe)
        again = together(partial(language, recompute=True), adamw, recipe)
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_tied_weights_are_averaged_once_and_stay_tied() -> None:
    build = partial(language, tied=True)
    runs = together(build, adamw, la.ddp())
    assert torch.equal(*runs) and largest(runs[0], alone(build, adamw)) < 1e-12

    def run(rank: int) -> int:
        model = build()
        optimizer = adamw(model)
        with la.attach(model, optimizer, la.diloco(3)) as sync:
            before = sync.stats().bytes_sent
            train(model, optimizer, [rank])
            sent = sync.stats().bytes_sent - before
        assert model.output.weight is model.embedding.weight
        return sent

    once = sum(p.numel() for p in build().parameters()) * 8
    assert all(sent < 1.05 * (STEPS // 3) * once for sent in la.simulate(run, workers=WORKERS))


@pytest.mark.parametrize("recipe", [la.local_sgd(3), la.diloco(3, delay=1)])
def test_sparse_embeddings_with_rounds_on_parameters(recipe: la.Recipe) -> None:
    """A worker's steps may be sparse: what is averaged is the parameter."""

    sparse = together(partial(language, sparse=True), lambda m: sgd(m, 0.5), recipe)
    dense = together(language, lambda m: sgd(m, 0.5), recipe)
    assert all(largest(a, b) < 1e-12 for a, b in zip(sparse, dense, strict=True))


def test_sparse_gradients_are_refused_with_what_to_do() -> None:
    for recipe in (la.ddp(), la.ddp(codec="int4")):
        with pytest.raises(ValueError, match="use sparse=False"):
            together(partial(language, sparse=True), lambda m: sgd(m, 0.5), recipe)


# -- models of which a part is trained, or of which there are two ----


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(r=2, target_modules=["inner.0", "inner.2"], init_lora_weights=False)
    adapted: nn.Module = get_peft_model(language(), config).double()
    return adapted


@pytest.mark.slow
def test_lora_sends_the_adapters_only() -> None:
    runs = together(lora, adamw, la.ddp())
    assert torch.equal(*runs) and largest(runs[0], alone(lora, adamw)) < 1e-12

    def run(rank: int) -> tuple[int, int]:
        model = lora()
        optimizer = adamw(model)
        with la.attach(model, optimizer, la.local_sgd(3)) as sync:
            before = sync.stats().bytes_sent
            train(model, optimizer, [rank])
            sent = sync.stats().bytes_sent - before
        return sent, sum(p.numel() for p in model.parameters() if p.requires_grad) * 8

    for sent, trained in la.simulate(run, workers=WORKERS):
        assert STEPS // 3 * trained <= sent < 1.5 * STEPS // 3 * trained


def test_the_mean_of_the_workers_emas_is_the_ema_of_their_mean() -> None:
    """An average of weights over time is linear in them: no messages until its end."""

    def run(rank: int) -> tuple[Tensor, list[Tensor]]:
        model, means = language(), list[Tensor]()
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = adamw(model)
        with la.attach(model, optimizer, la.local_sgd(3)) as sync:
            for step in range(STEPS):
                x, y = batch(step, rank)
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
                ema.update_parameters(model)
                with sync.consensus():
                    means.append(flat(model))
            sync.average(ema.parameters())
        return flat(ema), means

    (one, means), (other, _) = la.simulate(run, workers=WORKERS)
    expected = reduce(lambda old, new: 0.9 * old + 0.1 * new, means)
    assert torch.equal(one, other) and largest(one, expected) < 1e-12


# -- torch.compile ----


def compiled(rank: int, recipe: la.Recipe, backend: str | None, inner: bool) -> tuple[Tensor, bool]:
    """Parameters after training, and whether the consensus has the plain model's names. ``inner``:
    the plain model is attached, and not what torch.compile returns."""
    torch._dynamo.reset()
    model = language()
    run: Any = model if backend is None else torch.compile(model, backend=backend)
    optimizer = adamw(model)
    names = [*model.state_dict()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        with la.attach(model if inner else run, optimizer, recipe, link=gloo.link_of(2)) as sync:
            train(run, optimizer, [rank])
            shipped = [name.removeprefix("_orig_mod.") for name in sync.consensus_state_dict()]
    return flat(model), shipped == names


@pytest.mark.parametrize(
    ("recipe", "inner"),
    [(la.ddp(codec="int8"), False), pytest.param(la.ddp(), True, marks=pytest.mark.slow)],
)
def test_torch_compile_changes_no_bit(pool: gloo.Pool, recipe: la.Recipe, inner: bool) -> None:
    plain = pool.run(compiled, recipe, None, True, ranks=2)
    runs = pool.run(compiled, recipe, "aot_eager", inner, ranks=2)
    for (a, _), (b, named) in zip(plain, runs, strict=True):
        assert torch.equal(a, b) and named


@pytest.mark.slow
def test_torch_compile_with_its_own_kernels(pool: gloo.Pool) -> None:
    plain = pool.run(compiled, la.ddp(), None, True, ranks=2)
    runs = pool.run(compiled, la.ddp(), "inductor", False, ranks=2)
    assert torch.equal(runs[0][0], runs[1][0])
    assert largest(runs[0][0], plain[0][0]) < 1e-10


def compiled_steps(rank: int) -> tuple[int, int, Tensor]:
    torch._dynamo.reset()
    model = language()
    optimizers = [torch.optim.AdamW([p], lr=0.1) for p in model.parameters()]
    steps = [torch.compile(each.step, backend="eager") for each in optimizers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        sync = la.attach(model, optimizers, la.local_sgd(2), link=gloo.link_of(2))
        for step in range(4):
            x, y = batch(step, rank)
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            for call in steps:
                call()
    sync.detach()
    return sync.step, sync.stats().rounds, flat(model)


@pytest.mark.fault("torch.compile(optimizer.step) died in Dynamo, in the optimizer's hooks")
def test_rounds_follow_a_compiled_step(pool: gloo.Pool) -> None:
    first, second = pool.run(compiled_steps, ranks=2)
    assert torch.equal(first[2], second[2]) and first[:2] == second[:2] == (4, 2)


def compiled_autograd(rank: int) -> str:
    torch._dynamo.reset()
    model = language()
    sync = la.attach(model, adamw(model), la.ddp(codec="int8"), link=gloo.link_of(1))
    x, y = batch(0, rank)

    def backward() -> None:
        cross_entropy(model(x), y).backward()

    with torch._dynamo.config.patch(compiled_autograd=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        with pytest.raises(ValueError) as caught:
            torch.compile(backward, backend="eager")()
    sync.detach()
    return str(caught.value)


@pytest.mark.fault("compiled autograd died in Dynamo, in the hooks of gradients")
def test_compiled_autograd_is_refused_where_gradients_are_averaged(pool: gloo.Pool) -> None:
    (said,) = pool.run(compiled_autograd, ranks=1)
    assert "set torch._dynamo.config.compiled_autograd = False" in said


# -- FSDP2 ----


def sharded(model: nn.Module) -> Any:
    """``model``, sharded over the two ranks of each of two workers; returns the mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "shards"))
    fully_shard(model, mesh=mesh["shards"])
    return mesh


def full(p: Any) -> Tensor:
    whole: Tensor = p.full_tensor().detach()
    return whole


def clipped(rank: int) -> Tensor:
    model = language()
    mesh = sharded(model)
    optimizer = adamw(model)
    with la.attach(model, optimizer, la.ddp(), link=gloo.link_of(4), mesh=mesh):
        train(model, optimizer, [rank], clip=0.5)
    return torch.cat([full(p).flatten() for p in model.parameters()])


def test_clipping_of_dtensors(pool: gloo.Pool) -> None:
    runs = pool.run(clipped, ranks=4)
    model = language()
    train(model, adamw(model), [*range(4)], clip=0.5)
    assert all(torch.equal(runs[0], other) for other in runs)
    assert largest(runs[0], flat(model)) < 1e-6  # before torch 2.13 it rounds to float32


def exported(rank: int, folder: str) -> tuple[dict[str, Any], Tensor]:
    """What rank 0 gets as the full model; and the consensus, as torch.distributed.checkpoint gives
    it back."""
    model = language()
    mesh = sharded(model)
    optimizer = adamw(model)
    with la.attach(model, optimizer, la.diloco(4), link=gloo.link_of(4), mesh=mesh) as sync:
        train(model, optimizer, [rank])
        with sync.consensus():
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            whole = get_model_state_dict(model, options=options)
        if mesh.get_coordinate()[0] == 0:  # its ranks have all parts
            writer = dcp.FileSystemWriter(folder)
            group = mesh["shards"].get_group()
            dcp.save(
                {"model": sync.consensus_state_dict()}, storage_writer=writer, process_group=group
            )
        else:
            sync.consensus_state_dict()
    torch.distributed.barrier()
    again = language()
    loaded = {"model": again.state_dict()}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return whole, flat(again)


def test_a_sharded_model_is_exported_whole_and_through_torchs_checkpoints(
    pool: gloo.Pool, tmp_path: Path
) -> None:
    runs = pool.run(exported, str(tmp_path / "saved"), ranks=4)
    model = language()
    model.load_state_dict(runs[0][0])
    assert all(torch.equal(flat(model), loaded) for _, loaded in runs)
