"""What of PyTorch works with laconic: the rows of `docs/compatibility.md` that no other file tests.

Most are compared with one process that trains on all workers' batches, which `ddp()` must equal.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import laconic as la

from tests.support import gloo
from tests.support.loops import close, descend, flat

STEPS, BATCH, WORDS = 6, 4, 11
Make = Callable[[nn.Module], Optimizer]


class Language(nn.Module):
    """Predicts words, by an output layer that may share the weights of the embedding."""

    def __init__(self, tied: bool = False, sparse: bool = False, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(WORDS, 6, sparse=sparse)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.output = nn.Linear(6, WORDS, bias=False)
        self.recompute = recompute
        if tied:
            self.output.weight = self.embedding.weight
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        x = checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)
        logits: Tensor = self.output(x)
        return logits


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["inner.0", "inner.2"], init_lora_weights=False)
    adapted: nn.Module = get_peft_model(Language(), config).double()
    return adapted


def losses(model: nn.Module, workers: list[int]) -> Any:
    """The loss of each step on the batches of ``workers``, joined."""
    for step in range(STEPS):
        words = []
        for worker in workers:
            generator = torch.Generator().manual_seed(100 * step + worker)
            words.append(torch.randint(0, WORDS, (2, BATCH), generator=generator))
        x, y = torch.cat(words, 1)
        yield cross_entropy(model(x), y)


def train(model: nn.Module, optimizer: Optimizer, workers: list[int]) -> None:
    for loss in losses(model, workers):
        descend(optimizer, loss)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.AdamW(trainable(model), 0.05, **options)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), 0.5)


def together(build: Callable[[], nn.Module], make: Make, recipe: la.Recipe) -> Any:
    """The parameters that two workers end with, the model, and the bytes that one sent. All start
    from rank 0's, of a frozen base, too."""

    def run(rank: int) -> tuple[Tensor, nn.Module, int]:
        model, fresh = build(), build()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(rank)
        optimizer = make(model)
        with la.attach(model, optimizer, recipe) as sync:
            before = sync.stats().bytes_sent
            train(model, optimizer, [rank])
            sent = sync.stats().bytes_sent - before
            fresh.load_state_dict(sync.consensus_state_dict())
        assert torch.equal(flat(fresh), flat(model))
        return flat(model), model, sent

    one, other = la.simulate(run, workers=2)
    assert torch.equal(one[0], other[0])
    return one


ROWS: dict[str, tuple[Callable[[], nn.Module], Make]] = {
    "for-loop": (Language, partial(adamw, foreach=False)),
    "foreach": (Language, partial(adamw, foreach=True)),
    "fused": (Language, partial(adamw, fused=True)),
    "activation checkpointing": (partial(Language, recompute=True), adamw),
    "tied weights": (partial(Language, tied=True), adamw),
    "lora": (lora, adamw),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "lora")) for n in ROWS]
)
def test_ways_to_train_are_those_of_one_process(name: str) -> None:
    """And rounds send each trained parameter once, and nothing else."""
    build, make = ROWS[name]
    alone = build()
    train(alone, make(alone), [0, 1])
    assert close(together(build, make, la.ddp())[0], flat(alone))
    size = 8 * sum(p.numel() for p in trainable(alone))
    for recipe in (la.local_sgd(3), la.diloco(3)):
        one, model, sent = together(build, make, recipe)
        assert not close(one, flat(alone), 1e-3)
        assert STEPS // 3 * size <= sent < STEPS // 3 * size * 1.05 + 500
        if name == "tied weights":
            assert model.output.weight is model.embedding.weight
        if name == "activation checkpointing":
            assert torch.equal(one, together(Language, make, recipe)[0])


def test_sparse_embeddings_with_rounds_on_parameters_alone() -> None:
    """A worker's steps may be sparse, and what is averaged is the parameter; elsewhere the error
    says what to do."""
    sparse = partial(Language, sparse=True)
    for recipe in (la.local_sgd(3), la.diloco(3, delay=1)):
        assert close(together(sparse, sgd, recipe)[0], together(Language, sgd, recipe)[0])
    for recipe in (la.ddp(), la.ddp(codec="int4")):
        with pytest.raises(ValueError, match="use sparse=False"):
            together(sparse, sgd, recipe)


def test_the_mean_of_the_workers_emas_is_the_ema_of_their_mean() -> None:
    """An average of weights over time is linear in them, so that it needs no messages until its
    end."""
    decay = 0.9

    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = Language()
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
        optimizer = adamw(model)
        expected = torch.zeros(())
        with la.attach(model, optimizer, la.local_sgd(3)) as sync:
            for step, loss in enumerate(losses(model, [rank])):
                descend(optimizer, loss)
                ema.update_parameters(model)
                with sync.consensus():
                    own = flat(model)
                expected = own if step == 0 else decay * expected + (1 - decay) * own
            sync.average(ema.parameters())
        return flat(ema), expected

    (one, expected), (other, _) = la.simulate(run, workers=2)
    assert torch.equal(one, other) and close(one, expected)


# -- torch.compile ----


@contextmanager
def dynamo() -> Iterator[None]:
    """What torch has compiled is forgotten, and its own warnings are not shown."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def compiled(rank: int, recipe: la.Recipe, backend: str | None, inner: bool) -> tuple[Tensor, bool]:
    """Parameters after training, and whether the consensus has the plain model's names. ``inner``:
    the plain model is attached, and not what torch.compile returns."""
    model = Language()
    optimizer, names = adamw(model), [*model.state_dict()]
    with dynamo():
        run: Any = model if backend is None else torch.compile(model, backend=backend)
        with la.attach(model if inner else run, optimizer, recipe, link=gloo.link_of(2)) as sync:
            train(run, optimizer, [rank])
            shipped = [name.removeprefix("_orig_mod.") for name in sync.consensus_state_dict()]
    return flat(model), shipped == names


@pytest.mark.parametrize(
    ("recipe", "backend", "inner"),
    [
        (la.ddp(codec="int8"), "aot_eager", False),
        pytest.param(la.streaming_diloco(4), "aot_eager", True, marks=pytest.mark.slow),
        pytest.param(la.ddp(), "inductor", False, marks=pytest.mark.slow),
    ],
)
def test_torch_compile_changes_no_bit(
    pool: gloo.Pool, recipe: la.Recipe, backend: str, inner: bool
) -> None:
    """But for inductor, whose kernels are others."""
    (plain, _), _ = pool.run(compiled, recipe, None, True, ranks=2)
    (one, named), (other, _) = pool.run(compiled, recipe, backend, inner, ranks=2)
    assert torch.equal(one, other) and named
    assert close(one, plain, 1e-10 if backend == "inductor" else 0.0)


def compiled_steps(rank: int) -> tuple[int, int, Tensor]:
    model = Language()
    optimizers = [torch.optim.AdamW([p], lr=0.1) for p in model.parameters()]
    with dynamo():
        steps = [torch.compile(each.step, backend="eager") for each in optimizers]
        sync = la.attach(model, optimizers, la.local_sgd(2), link=gloo.link_of(2))
        for loss in losses(model, [rank]):
            model.zero_grad()
            loss.backward()
            for call in steps:
                call()
    sync.detach()
    return sync.step, sync.stats().rounds, flat(model)


@pytest.mark.fault("torch.compile(optimizer.step) died in Dynamo, in the optimizer's hooks")
def test_rounds_follow_a_compiled_step(pool: gloo.Pool) -> None:
    first, second = pool.run(compiled_steps, ranks=2)
    assert torch.equal(first[2], second[2])
    assert first[:2] == second[:2] == (STEPS, STEPS // 2)


def compiled_autograd(rank: int) -> None:
    model = Language()
    with dynamo(), torch._dynamo.config.patch(compiled_autograd=True):
        sync = la.attach(model, adamw(model), la.ddp(codec="int8"), link=gloo.link_of(1))
        backward = torch.compile(lambda: next(losses(model, [rank])).backward(), backend="eager")
        with pytest.raises(ValueError, match=r"set torch._dynamo.config.compiled_autograd = False"):
            backward()
    sync.detach()


@pytest.mark.fault("compiled autograd died in Dynamo, in the hooks of gradients")
def test_compiled_autograd_is_refused_where_gradients_are_averaged(pool: gloo.Pool) -> None:
    pool.run(compiled_autograd, ranks=1)
