"""Tensors of every make: how they share buckets, which are averaged, shared, or refused; and the
buffers of modules: averaged at rounds, kept, or rank 0's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic import buckets
from laconic.engine import gradient_channels

from tests.support.loops import RECIPES, WORKERS, close, data, descend, equal, flat, sgd, train

# -- through a run ----


def strange_run(rank: int, recipe: la.Recipe) -> list[Tensor]:
    """Three steps of a loss whose gradient is the rank plus the parameter itself. Loading a
    checkpoint may rebind ``p.data``, as here before the last one."""
    torch.manual_seed(0)
    strange = {
        "plain": torch.randn(3, 5),
        "transposed": torch.randn(3, 4).T,
        "channels_last": torch.randn(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        "sliced": torch.randn(3, 6)[:, ::2],
        "scalar": torch.randn(()),
        "in_double": torch.randn(5, dtype=torch.float64),
        "empty": torch.randn(0, 2),
    }
    model = nn.ParameterDict({name: nn.Parameter(value) for name, value in strange.items()})
    optimizer = sgd(model)
    if rank >= 0:
        la.attach(model, optimizer, recipe)
    for step in range(3):
        if step == 2:
            model["plain"].data = model["plain"].data.clone()
        optimizer.zero_grad()
        own = 1 if rank < 0 else rank
        losses = [(0.5 * p.square() + own * p).sum().double() for p in model.values()]
        torch.stack(losses).sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("recipe", "most"), [(la.ddp(), 8), (la.local_sgd(1), 40), (la.slowmo(None, 1, 0.0, 1.0), None)]
)
def test_parameters_of_every_make_are_averaged(
    recipe: la.Recipe, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients ``x + rank`` have the mean ``x + 1`` over three workers."""
    if most is not None:
        monkeypatch.setattr(buckets, "BUCKET_BYTES", most)
        monkeypatch.setattr(gradient_channels, "FIRST_BYTES", most)
    expected = strange_run(-1, ())
    for run in la.simulate(partial(strange_run, recipe=recipe), workers=3):
        for x, p in zip(run, expected, strict=True):
            assert x.dtype == p.dtype and torch.allclose(x, p, rtol=0.0, atol=1e-6)


# -- tensors that are not plain ----


class Opaque(Tensor):
    """Quantized weights that do not tell what they consist of."""

    q: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, q: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, q.shape, dtype=torch.float32)

    def __init__(self, q: Tensor, scale: Tensor) -> None:
        self.q, self.scale = q, scale

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, f: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if f is torch.ops.aten.detach.default:
            return cls(args[0].q, args[0].scale)
        plain = [x.q.float() * x.scale if isinstance(x, cls) else x for x in args]
        return f(*plain, **kwargs or {})


class Scaled(Opaque):
    """As torchao and optimum-quanto make them."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["q", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], *_: Any) -> Tensor:
        return Scaled(parts["q"], parts["scale"])


def jagged(value: float) -> Tensor:
    rows = [torch.full((2, 3), value), torch.full((4, 3), value)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


UINT4: torch.dtype = torch.uint4  # type: ignore[attr-defined]
SHARED: dict[str, Callable[[float], Tensor]] = {
    "expanded": lambda v: torch.full((3,), v).expand(4, 3),
    "overlapping": lambda v: torch.full((6,), v).as_strided((4, 3), (1, 1)),
    "sparse": lambda v: (torch.eye(3) * (1 + v)).to_sparse(),
    "jagged": jagged,
    "wrapper": lambda v: Scaled(torch.full((3,), int(v), dtype=torch.int8), torch.tensor(v + 1)),
    "inference mode": torch.inference_mode()(lambda v: torch.full((3,), v)),
    "float8": lambda v: torch.full((3,), v).to(torch.float8_e4m3fn),
    "4 bits": lambda v: torch.full((2, 3), int(v), dtype=torch.uint8).view(UINT4).t(),
}
REFUSED: dict[str, Callable[[float], Tensor]] = {
    "quantized": lambda v: torch.quantize_per_tensor(torch.full((3,), v), 0.1, 0, torch.qint8),
    "mkldnn": lambda v: torch.full((3, 3), v).to_mkldnn(),
    "nested": lambda v: torch.nested.nested_tensor([torch.full((2,), v), torch.full((3,), v)]),
}


def shown(t: Tensor) -> str:
    t = t.t().view(torch.uint8) if t.dtype is UINT4 else t
    t = t.values() if t.is_nested else t
    return repr(t + 0 if isinstance(t, Scaled) else t)


def odd_run(rank: int, make: Callable[[float], Tensor], start: Sequence[float]) -> list[str]:
    """A strange buffer and a strange frozen parameter after a few rounds, as they print."""
    model, odd = nn.Linear(3, 1), make(start[rank])
    optimizer = sgd(model)
    model.register_buffer("b", odd)
    model.register_buffer("none", None)
    if odd.is_floating_point() and not odd.is_nested:
        model.register_parameter("p", nn.Parameter(make(start[rank]), requires_grad=False))
    with la.attach(model, optimizer, la.local_sgd(2)) as sync:
        for _ in range(4):
            descend(optimizer, model(torch.ones(2, 3) * rank).sum())
        with sync.consensus():
            pass
    return [shown(t) for t in (*model.buffers(), *[*model.parameters()][2:])]


@pytest.mark.fault("attach ended in torch's error for expanded, sparse tensors, or did not share")
@pytest.mark.filterwarnings("ignore")  # torch's, about nested and sparse tensors
@pytest.mark.parametrize("kind", SHARED)
def test_frozen_tensors_of_every_kind_are_shared(kind: str) -> None:
    for start in [(0.0, 0.0), (2.0, 0.0)]:
        run = partial(odd_run, make=SHARED[kind], start=start)
        (alone,), both = (la.simulate(run, workers=workers) for workers in (1, 2))
        assert both == [alone, alone]


@pytest.mark.filterwarnings("ignore")  # torch's, about nested and quantized tensors
@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_that_cannot_be_written_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=r"'[bp]' is nested, quantized or of a layout"):
        odd_run(0, REFUSED[kind], [0.0])


class Holder(nn.Module):
    def __init__(self, kind: type[Opaque], trained: bool) -> None:
        super().__init__()
        weight = kind(torch.ones(3, dtype=torch.int8), torch.tensor(1.0))
        self.w = nn.Parameter(weight, requires_grad=trained)


def freed() -> nn.Module:
    module = nn.Linear(3, 3)
    module.weight.untyped_storage().resize_(0)
    return module


@pytest.mark.fault("a LazyLinear ended attach in torch's error, which names no tensor")
@pytest.mark.parametrize(
    ("module", "text"),
    [
        (lambda: nn.LazyLinear(1), "'0.weight' has no shape yet.*run one batch"),
        (lambda: Holder(Opaque, False), "'0.w' is a Opaque.*keep it outside"),
        (lambda: Holder(Scaled, True), "the optimizer trains '0.w', a Scaled.*freeze it"),
        (freed, "'0.weight' has no memory.*before the first forward pass"),
    ],
    ids=["lazy", "opaque", "trained", "freed"],
)
def test_what_cannot_be_trained_is_named(module: Any, text: str) -> None:
    model = nn.Sequential(module(), nn.Linear(3, 1))
    with pytest.raises(ValueError, match=text):
        la.attach(model, sgd(model), la.local_sgd(2))


# -- buffers ----


@pytest.mark.parametrize("recipe", ["local_sgd", "no average", "easgd"])
def test_buffers_are_averaged_at_rounds(recipe: str) -> None:
    """Counters are left alone."""
    steps = 4 if recipe == "no average" else 3

    def run(rank: int) -> tuple[Tensor, Tensor]:
        """The running mean before the last step's round, and after it."""
        torch.manual_seed(rank)
        norm, before = nn.BatchNorm1d(4).double(), list[Tensor]()
        model = nn.Sequential(nn.Linear(5, 4).double(), norm, nn.Linear(4, 2).double())
        mean, counter = norm.get_buffer("running_mean"), norm.get_buffer("num_batches_tracked")
        mean += rank
        optimizer = sgd(model)
        optimizer.register_step_post_hook(lambda *_: before.append(mean.clone()))
        la.attach(model, optimizer, RECIPES[recipe], buffers="average")
        assert mean.tolist() == [0.0] * 4, "rank 0's at the start"
        counter += 100 * rank
        train(model, optimizer, data()[rank][:steps])
        assert int(counter) == steps + 100 * rank
        return before[-1], mean.clone()

    runs = la.simulate(run, workers=WORKERS)
    mean = torch.stack([before for before, _ in runs]).mean(0)
    assert not equal([before for before, _ in runs])
    assert all(close(after, mean, 1e-14) for _, after in runs)


@pytest.mark.fault("rounds inside groups averaged buffers among all workers")
@pytest.mark.fault("under gossip, ranks of a worker cut different buffers, and failed")
@pytest.mark.parametrize(("recipe", "ranks"), [("group", 1), ("group", 2), ("gossip", 2)])
def test_buffers_are_averaged_over_the_ranks_of_their_round(recipe: str, ranks: int) -> None:
    """Of two workers, each of so many ranks."""
    groups: dict[str, Any] = {"group_size": 2} if recipe == "group" else {}
    rounds = la.hierarchical(2, 6) if groups else la.d_psgd()

    def run(rank: int) -> list[list[float]]:
        model: Any = nn.Linear(4, 4)
        model.register_buffer("rank", torch.zeros(3))
        model.register_buffer("odd", torch.zeros(1))
        optimizer = sgd(model)
        sync = la.attach(model, optimizer, rounds, nprocs_per_node=ranks, **groups)
        optimizer.step()
        model.rank.fill_(rank)
        model.odd.fill_(rank % 2)  # with two ranks, the first ones are equal, and the others
        before = sync.stats().bytes_by_set["world"]
        optimizer.step()
        assert sync.stats().bytes_by_set["world"] == before
        found = [model.rank.mean().item(), model.odd.item()]
        sync.load_state_dict(sync.state_dict())
        while sync.step < 6:
            optimizer.step()
        return [found, [model.rank.mean().item(), model.odd.item()]]

    workers = (4 if groups else 2) * ranks
    means = [(2 * ranks * (rank // (2 * ranks)) + ranks - 0.5, 0.5) for rank in range(workers)]
    everyone = [(workers - 1) / 2, 0.5]
    assert la.simulate(run, workers=workers) == [[[*mean], everyone] for mean in means]


@pytest.mark.fault("constant buffers (causal masks, rotary tables) were sent with every round")
@pytest.mark.parametrize("recipe", [la.local_sgd(2, delay=1), la.streaming_diloco(8, 4)])
def test_buffers_that_no_rank_changes_are_not_sent(recipe: la.Recipe) -> None:
    def sent(rank: int, mask: bool) -> int:
        model = nn.Sequential(nn.Linear(5, 40), nn.Linear(40, 2)).double()
        if mask:
            model.register_buffer("mask", torch.ones(100, 100))
        optimizer = sgd(model)
        with la.attach(model, optimizer, recipe) as sync:
            train(model, optimizer, data(2, 16)[rank])
        return sync.stats().bytes_sent

    without, with_mask = (la.simulate(partial(sent, mask=m), workers=2)[0] for m in (False, True))
    assert with_mask < 1.05 * without


@pytest.mark.fault("recipes of fragments sent all buffers with every fragment")
def test_buffers_are_sent_once_per_period_of_fragments() -> None:
    def run(rank: int) -> tuple[list[float], int]:
        model: Any = nn.Linear(4, 4)
        model.register_buffer("rank", torch.tensor([float(rank)]))
        optimizer = sgd(model)
        seen = []
        with la.attach(model, optimizer, la.streaming_diloco(4, 2)) as sync:
            for _ in range(8):
                optimizer.step()
                seen.append(float(model.rank))
                model.rank.fill_(rank)
        return seen, sync.stats().rounds

    seen, rounds = la.simulate(run, workers=2)[0]
    assert sum(value == 0.5 for value in seen) == 2
    assert rounds >= 4 + 2, "rounds of buffers count, too"


@pytest.mark.fault(
    "no choice gave all ranks rank 0's buffers before each forward pass, as DDP does"
)
@pytest.mark.parametrize("recipe", [la.ddp(), la.streaming_diloco(4, 2)])
def test_buffers_of_rank_0_before_every_forward_pass(recipe: la.Recipe) -> None:
    """`buffers="broadcast"`."""

    def run(rank: int) -> tuple[list[Any], list[Any], Tensor]:
        """The running mean and the counter before each forward pass and after it."""
        torch.manual_seed(rank)
        norm, starts, ends = nn.BatchNorm1d(4), list[Any](), list[Any]()
        model = nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 2))
        optimizer = sgd(model)
        with la.attach(model, optimizer, recipe, buffers="broadcast"):
            for _ in range(6):
                starts.append([buffer.tolist() for buffer in norm.buffers()])
                optimizer.zero_grad()
                model(torch.randn(4, 3)).square().mean().backward()
                ends.append([buffer.tolist() for buffer in norm.buffers()])
                optimizer.step()
        return starts, ends, flat(model)

    (starts, ends, x), (others, apart, y) = la.simulate(run, workers=2)
    assert starts == others and starts[1:] == ends[:-1], "rank 0's"
    assert ends != apart and torch.equal(x, y)
