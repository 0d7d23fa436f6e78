"""Buckets, selectors and schedules: pure code, tested by property and against brute force."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import laconic as la
from laconic import buckets
from laconic.buckets import (
    Bucket,
    Scratch,
    bucketize,
    mean_in_rank_order,
    state_dtype,
)
from laconic.engine import gradient_rounds

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


# -- tensors of every make ----


def plain(x: Tensor) -> Tensor:
    return x.clone()


def transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT if x.dim() > 1 else x.clone()


def sliced(x: Tensor) -> Tensor:
    """Every other element along the last dimension of something twice as large."""
    if not x.dim():
        return x.clone()
    room = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), 77)
    room[..., ::2] = x
    return room[..., ::2]


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.clone()


MAKES: list[Callable[[Tensor], Tensor]] = [plain, transposed, sliced, channels_last]
SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)
ONE = st.tuples(SHAPES, st.sampled_from(DTYPES), st.sampled_from(MAKES))
GROUPS = st.lists(st.lists(ONE, max_size=5), min_size=1, max_size=4)


def numbered(specs: list[list[Any]]) -> list[list[Tensor]]:
    """Tensors as specified, every element with a number of its own (as far as the dtype can)."""
    count, groups = 1, []
    for group in specs:
        made = []
        for shape, dtype, make in group:
            size = math.prod(shape)
            values = torch.arange(count, count + size) % 250 + 1
            made.append(make(values.to(dtype).reshape(shape)))
            count += size
        groups.append(made)
    return groups


def packed(bucket: Bucket) -> Tensor:
    """The bucket packed into room that was not clean."""
    out = bucket.empty()
    out.fill_(99)
    assert bucket.pack(out) is out
    return out


@settings(deadline=None, max_examples=300)
@given(GROUPS, st.integers(1, 5), st.integers(1, 64), st.none() | st.integers(1, 64))
def test_every_element_is_in_exactly_one_bucket(
    specs: list[Any], n: int, most: int, first: int | None
) -> None:
    groups = numbered(specs)
    buckets = bucketize(groups, n, most_bytes=most, first_bytes=first)
    covered: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for bucket in buckets:
        for segment in bucket.segments:
            index = bucket.group
            places = [i for i, t in enumerate(groups[index]) if t is segment.tensor]
            assert len(places) == 1, "a segment of another group"
            assert (segment.tensor.dtype, segment.tensor.device) == (bucket.dtype, bucket.device)
            covered.setdefault((index, places[0]), []).append((segment.start, segment.stop))
    for index, group in enumerate(groups):
        for place, tensor in enumerate(group):
            stretches = covered.get((index, place), [])
            ends = [0, *(stop for _, stop in stretches)]
            assert [start for start, _ in stretches] == ends[:-1], "in order, without a gap"
            assert ends[-1] == tensor.numel(), "nothing dropped"
            assert all(start < stop for start, stop in stretches)


@settings(deadline=None, max_examples=300)
@given(GROUPS, st.integers(1, 5), st.integers(1, 64), st.none() | st.integers(1, 64))
def test_pack_then_unpack_is_the_identity(
    specs: list[Any], n: int, most: int, first: int | None
) -> None:
    groups = numbered(specs)
    before = [[t.clone() for t in group] for group in groups]
    layouts = [[(t.stride(), t.data_ptr()) for t in group] for group in groups]
    buckets = bucketize(groups, n, most_bytes=most, first_bytes=first)
    flats = [packed(bucket) for bucket in buckets]
    for group in groups:
        for tensor in group:
            tensor.fill_(0)
    for bucket, flat in reversed(list(zip(buckets, flats, strict=True))):
        bucket.unpack(flat)
    for group, old in zip(groups, before, strict=True):
        assert all(map(torch.equal, group, old))
    assert layouts == [[(t.stride(), t.data_ptr()) for t in group] for group in groups]


@settings(deadline=None, max_examples=300)
@given(GROUPS, st.integers(1, 5), st.integers(1, 64), st.none() | st.integers(1, 64))
def test_buckets_are_padded_and_no_larger_than_they_may_be(
    specs: list[Any], n: int, most: int, first: int | None
) -> None:
    groups = numbered(specs)
    seen = set()
    for bucket in bucketize(groups, n, most_bytes=most, first_bytes=first):
        assert bucket.length % n == 0 and 0 <= bucket.length - bucket.numel < n
        flat = packed(bucket)
        assert len(flat) == bucket.length and flat.dtype == bucket.dtype
        assert not flat[bucket.numel :].any(), "padding is zero"
        kind = (bucket.group, bucket.dtype)
        limit = first if first is not None and kind not in seen else most
        seen.add(kind)
        whole = [s for s in bucket.segments if not s.tensor.is_contiguous()]
        if not whole:  # strided tensors are taken whole, however large
            assert bucket.numel <= max(limit // bucket.dtype.itemsize, 1)
        views = [s.view() for s in bucket.segments]
        assert torch.equal(torch.cat(views), flat[: bucket.numel])
        assert [len(v) for v in bucket.split(flat)] == [len(v) for v in views]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_tensor_larger_than_a_bucket_is_cut(n: int) -> None:
    large, small = torch.arange(1000.0), torch.arange(3.0)
    buckets = bucketize([[small, large, small.clone()]], n, most_bytes=400, first_bytes=40)
    assert [bucket.numel for bucket in buckets] == [10, *[100] * 9, 96]
    assert len([s for b in buckets for s in b.segments if s.tensor is large]) == 11
    everything = torch.cat([packed(b)[: b.numel] for b in buckets])
    assert torch.equal(everything, torch.cat([small, large, small]))


def test_a_strided_tensor_is_never_cut() -> None:
    strided = torch.arange(600.0).reshape(20, 30).t()
    buckets = bucketize([[torch.ones(5), strided, torch.ones(5)]], 2, most_bytes=40)
    (home,) = [b for b in buckets if any(s.tensor is strided for s in b.segments)]
    assert [(s.start, s.stop) for s in home.segments if s.tensor is strided] == [(0, 600)]
    home.unpack(-packed(home))
    assert torch.equal(strided, -torch.arange(600.0).reshape(20, 30).t())


def test_tensors_without_dimension_or_without_elements() -> None:
    scalar, empty = torch.tensor(3.0), torch.empty(0, 4)
    (bucket,) = bucketize([[scalar, empty]], 4)
    assert (bucket.numel, bucket.length) == (1, 4)
    assert packed(bucket).tolist() == [3.0, 0.0, 0.0, 0.0]
    bucket.unpack(torch.tensor([5.0, 1.0, 1.0, 1.0]))
    assert scalar.item() == 5.0 and not scalar.dim()
    assert bucketize([[empty]], 2) == []
    assert bucketize([[], []], 2) == []


def test_the_same_shapes_give_the_same_buckets() -> None:
    def layout(tensors: list[list[Tensor]]) -> list[Any]:
        found = bucketize(tensors, 3, most_bytes=24)
        pieces = [[(s.start, s.stop) for s in b.segments] for b in found]
        return [[b.group, b.dtype, b.length, p] for b, p in zip(found, pieces, strict=True)]

    shapes = [[(3, 4), (5,)], [(2, 2, 2), ()]]
    zeros, ones = ([[make(s) for s in g] for g in shapes] for make in (torch.zeros, torch.ones))
    assert layout(zeros) == layout(ones)


def test_rebound_storage_is_followed() -> None:
    """A bucket looks its tensors up at every use: loading a checkpoint may rebind ``p.data``."""
    p = nn.Parameter(torch.zeros(4))
    (bucket,) = bucketize([[p]], 2)
    p.data = torch.arange(4.0)
    assert packed(bucket).tolist() == [0.0, 1.0, 2.0, 3.0]
    bucket.unpack(torch.full((4,), 7.0))
    assert p.tolist() == [7.0] * 4


def test_default_size() -> None:
    """25 MiB, and a length that any number of workers divides."""
    tensor = torch.empty(30 * 2**18, dtype=torch.float32)
    assert [b.numel * 4 for b in bucketize([[tensor]], 3)] == [25 * 2**20, 5 * 2**20]
    assert buckets.BUCKET_BYTES == 25 * 2**20


# -- through a whole run ----


def strange_model(with_empty: bool = False) -> nn.Module:
    """Parameters of every make: strided, without dimension, perhaps without elements."""
    torch.manual_seed(0)
    model = nn.Module()
    strange = {
        "plain": torch.randn(3, 5),
        "transposed": transposed(torch.randn(4, 3)),
        "channels_last": channels_last(torch.randn(2, 3, 2, 2)),
        "sliced": sliced(torch.randn(3, 3)),
        "scalar": torch.randn(()),
        "in_double": torch.randn(5, dtype=torch.float64),
    }
    if with_empty:
        strange["empty"] = torch.randn(0, 2)
    for name, value in strange.items():
        model.register_parameter(name, nn.Parameter(value))
    return model


def strange_run(recipe: la.Recipe, own: int, with_empty: bool = False) -> list[Tensor]:
    """Three steps of a loss whose gradient is ``own`` plus the parameter itself."""
    model = strange_model(with_empty)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    la.attach(model, optimizer, recipe)
    for _ in range(3):
        optimizer.zero_grad()
        losses = [(0.5 * p.square() + own * p).sum().double() for p in model.parameters()]
        torch.stack(losses).sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("most", [8, 40, None])
@pytest.mark.parametrize("recipe", [la.ddp(), la.local_sgd(1), la.slowmo(None, 1, 0.0, 1.0)])
def test_parameters_of_every_make_are_averaged(
    recipe: la.Recipe, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients ``x + rank`` have the mean ``x + 1`` over three workers."""
    if most is not None:
        monkeypatch.setattr(buckets, "BUCKET_BYTES", most)
        monkeypatch.setattr(gradient_rounds, "FIRST_BYTES", most)
    expected = list(strange_model().parameters())
    with torch.no_grad():
        for _ in range(3):
            for p in expected:
                p.sub_(p + 1.0, alpha=0.1)
    for run in la.simulate(lambda rank: strange_run(recipe, rank), workers=3):
        for x, p in zip(run, expected, strict=True):
            assert x.dtype == p.dtype
            assert torch.allclose(x, p, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("recipe", [la.ddp(), la.local_sgd(1), la.diloco(2)])
def test_a_parameter_without_elements_is_no_trouble(recipe: la.Recipe) -> None:
    without = la.simulate(lambda rank: strange_run(recipe, rank), workers=2)
    with_it = la.simulate(lambda rank: strange_run(recipe, rank, True), workers=2)
    for run, other in zip(without, with_it, strict=True):
        assert len(other) == len(run) + 1
        assert all(map(torch.equal, run, other))


# -- the smaller pieces ----


@settings(deadline=None)
@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=8), st.sampled_from(DTYPES[:4])
)
def test_the_mean_is_summed_in_order_in_float32_at_least(
    values: list[float], dtype: torch.dtype
) -> None:
    xs = [torch.tensor([v, 2 * v]).to(dtype) for v in values]
    kept = [x.clone() for x in xs]
    total = torch.zeros(2, dtype=state_dtype(dtype))
    for x in xs:
        total = total + x.to(total.dtype)
    expected = total / len(xs)
    mean = mean_in_rank_order(xs)
    assert mean.dtype == expected.dtype and torch.equal(mean, expected)
    assert all(map(torch.equal, xs, kept)), "what was brought is left alone"
    assert torch.equal(mean_in_rank_order(xs, reuse=True), expected)


def test_state_dtypes() -> None:
    assert state_dtype(torch.bfloat16) == state_dtype(torch.float16) == torch.float32
    assert state_dtype(torch.float32) == torch.float32
    assert state_dtype(torch.float64) == torch.float64


def test_scratch_is_reused_by_kind() -> None:
    scratch, cpu = Scratch(), torch.device("cpu")
    large = scratch.take(10, torch.float32, cpu)
    small = scratch.take(4, torch.float32, cpu)
    other = scratch.take(4, torch.float64, cpu)
    assert (len(large), len(small)) == (10, 4)
    assert small.data_ptr() == large.data_ptr() != other.data_ptr()
    assert len(scratch.take(11, torch.float32, cpu)) == 11


def test_selectors() -> None:
    linear, norm = nn.Linear(2, 3), nn.BatchNorm1d(3)
    model = nn.Sequential(linear, norm)
    groups = [{"params": list(part.parameters())} for part in (linear, norm)]
    optimizer = torch.optim.Adam(groups)
    found = buckets.parameters(model, optimizer)
    assert [[id(p) for p in group.values()] for group in found] == [
        [id(p) for p in group["params"]] for group in groups
    ]
    assert [len(group) for group in buckets.optimizer_state(model, optimizer)] == [0, 0]
    (buffers,) = buckets.module_buffers(model, optimizer)
    own = norm.running_mean, norm.running_var
    assert [b.data_ptr() for b in buffers.values()] == [b.data_ptr() for b in own]


def test_optimizer_state_is_the_momenta_of_the_parameters_that_have_some() -> None:
    """Counters are alike on all workers; a parameter without a gradient has no state yet."""
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    model = nn.ParameterList([used, unused])
    optimizer = torch.optim.Adam(model.parameters())
    used.grad = torch.ones(2)
    optimizer.step()
    (state,) = buckets.optimizer_state(model, optimizer)
    own = optimizer.state[used]
    assert {id(t) for t in state.values()} == {id(own["exp_avg"]), id(own["exp_avg_sq"])}


# -- schedules against brute force ----

STEPS = range(1, 60)
LEAVES = st.integers(1, 9).map(lambda period: (la.every(period), lambda t: t in multiples(period)))


def multiples(period: int) -> set[int]:
    return set(range(period, 1000, period))


def wrapped(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A schedule made from others, and the same as a plain predicate."""

    def after(start: int, pair: Any) -> Any:
        return la.after(start, pair[0]), lambda t: t > start and pair[1](t)

    def until(end: int, pair: Any) -> Any:
        return la.until(end, pair[0]), lambda t: t <= end and pair[1](t)

    def unless(period: int, pair: Any) -> Any:
        def predicate(t: int) -> bool:
            return t in multiples(period) and not pair[1](t)

        return la.every(period, unless=pair[0]), predicate

    def any_of(pairs: list[Any]) -> Any:
        return la.any_of(*(s for s, _ in pairs)), lambda t: any(p(t) for _, p in pairs)

    steps = st.integers(0, 70)
    return st.one_of(
        st.builds(after, steps, inner),
        st.builds(until, steps, inner),
        st.builds(unless, st.integers(1, 9), inner),
        st.builds(any_of, st.lists(inner, min_size=1, max_size=3)),
    )


@settings(deadline=None, max_examples=200)
@given(st.recursive(LEAVES, wrapped, max_leaves=6))
def test_schedules_are_what_they_say(pair: Any) -> None:
    schedule, predicate = pair
    assert [schedule(t) for t in STEPS] == [predicate(t) for t in STEPS]
    assert schedule == schedule and hash(schedule) == hash(replace(schedule))
    assert [schedule(t) for t in reversed(STEPS)] == [predicate(t) for t in reversed(STEPS)]


def test_schedules_compare_by_value_and_print_what_they_are() -> None:
    assert la.every(3) == la.every(3) != la.every(4)
    assert la.any_of(la.every(3), la.every(3)) == la.every(3)
    assert la.after(2, la.every(3)) != la.until(2, la.every(3))
    assert repr(la.every(3, unless=la.every(6))).count("period=") == 2


def due(recipe: la.Recipe, kind: type, upto: int = 24) -> list[int]:
    return [t for t in range(1, upto + 1) if any(r.when(t) for r in recipe if isinstance(r, kind))]


def test_when_the_recipes_communicate() -> None:
    assert due(la.ddp(), la.GradientRound, 5) == [1, 2, 3, 4, 5]
    assert due(la.local_sgd(6), la.Round) == [6, 12, 18, 24]
    assert due(la.post_local_sgd(8, 4), la.Round) == [12, 16, 20, 24]
    assert due(la.post_local_sgd(8, 4), la.GradientRound) == list(range(1, 9))
    assert due(la.diloco(10), la.Round) == [10, 20]
    base, slow = la.slowmo(la.local_sgd(4), 6)
    assert due((base,), la.Round) == [4, 8, 16, 20]
    assert due((slow,), la.Round) == [6, 12, 18, 24]
    assert due(la.slowmo(la.ddp(), 6), la.GradientRound) == list(range(1, 25))


# -- tensors that are not plain ----


class Opaque(Tensor):
    """Quantized weights that do not tell what they consist of."""

    q: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, q: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, q.shape, dtype=torch.float32)  # type: ignore

    def __init__(self, q: Tensor, scale: Tensor) -> None:
        self.q, self.scale = q, scale

    @classmethod
    def __torch_dispatch__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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


def quantized(value: float) -> Tensor:
    return torch.quantize_per_tensor(torch.full((3,), value), 0.1, 0, torch.qint8)


def jagged(value: float) -> Tensor:
    rows = [torch.full((2, 3), value), torch.full((4, 3), value)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def made_in_inference_mode(value: float) -> Tensor:
    with torch.inference_mode():
        return torch.full((3,), value)


SHARED: dict[str, Callable[[float], Tensor]] = {
    "expanded": lambda v: torch.full((3,), v).expand(4, 3),
    "overlapping": lambda v: torch.full((6,), v).as_strided((4, 3), (1, 1)),
    "transposed": lambda v: torch.full((4, 3), v).t(),
    "empty": lambda v: torch.zeros(0, 3),
    "conjugate": lambda v: torch.full((3,), 1j * v).conj(),
    "negative": lambda v: torch._neg_view(torch.full((3,), v)),
    "sparse": lambda v: (torch.eye(3) * (1 + v)).to_sparse(),
    "sparse rows": lambda v: (torch.eye(3) * (1 + v)).to_sparse_csr(),
    "jagged": jagged,
    "wrapper": lambda v: Scaled(torch.full((3,), int(v), dtype=torch.int8), torch.tensor(v + 1)),
    "inference mode": made_in_inference_mode,
    "bool": lambda v: torch.full((3,), bool(v)),
    "uint16": lambda v: torch.full((3,), int(v), dtype=torch.uint16),
    "float8": lambda v: torch.full((3,), v).to(torch.float8_e4m3fn),
    "4 bits": lambda v: torch.full((2, 3), int(v), dtype=torch.uint8).view(torch.uint4).t(),
}
COMPARED: dict[str, Callable[[float], Tensor]] = {
    "quantized": quantized,
    "mkldnn": lambda v: torch.full((3, 3), v).to_mkldnn(),
    "nested": lambda v: torch.nested.nested_tensor([torch.full((2,), v), torch.full((3,), v)]),
}


def odd_run(rank: int, make: Callable[[float], Tensor], start: Sequence[float]) -> list[str]:
    """A strange buffer and a strange frozen parameter after a few rounds, as they print."""
    model = nn.Linear(3, 1)
    model.register_buffer("b", make(start[rank]))
    model.register_buffer("none", None)
    if make(0.0).is_floating_point() and not make(0.0).is_nested:
        model.p = nn.Parameter(make(start[rank]), requires_grad=False)
    optimizer = torch.optim.SGD([model.weight, model.bias], 0.1)
    with la.attach(model, optimizer, la.local_sgd(2)) as sync:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 3) * rank).sum().backward()
            optimizer.step()
        with sync.consensus():
            pass
    shown = [model.b, *(p for p in model.parameters() if not p.requires_grad)]
    shown = [t.t().view(torch.uint8) if t.dtype is torch.uint4 else t for t in shown]
    shown = [t.values() if t.is_nested else t for t in shown]
    return [repr(t + 0 if isinstance(t, Scaled) else t) for t in shown]


@pytest.mark.fault(
    "attach ended in torch's error for expanded, sparse, quantized tensors, or did not share"
)
@pytest.mark.filterwarnings("ignore")  # torch's, about nested, sparse and quantized tensors
@pytest.mark.parametrize("kind", [*SHARED, *COMPARED])
def test_frozen_tensors_of_every_kind_are_shared(kind: str) -> None:
    make = {**SHARED, **COMPARED}[kind]
    for start in [(0.0, 0.0), (2.0, 0.0)][: 2 if kind in SHARED else 1]:
        run = partial(odd_run, make=make, start=start)
        (alone,), both = (la.simulate(run, workers=workers) for workers in (1, 2))
        assert both == [alone, alone]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", COMPARED)
def test_what_cannot_be_written_must_be_equal(kind: str) -> None:
    run = partial(odd_run, make=COMPARED[kind], start=(1.0, 0.0))
    with pytest.raises(ValueError, match=r"'[bp]' is .*differ between ranks: .*Load the same"):
        la.simulate(run, workers=2)


@pytest.mark.fault("a LazyLinear ended attach in torch's error, which names no tensor")
@pytest.mark.parametrize(
    ("module", "text"),
    [
        (lambda: nn.LazyLinear(1), "'0.weight' has no shape yet.*run one batch"),
        (lambda: Holder(Opaque, False), "'0.w' is a Opaque.*keep it outside"),
        (lambda: Holder(Scaled, True), "the optimizer trains '0.w', a Scaled.*freeze it"),
    ],
    ids=["lazy", "opaque", "trained"],
)
def test_what_cannot_be_trained_is_named(module: Any, text: str) -> None:
    model = nn.Sequential(module(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=text):
        la.attach(model, optimizer, la.local_sgd(2))


class Holder(nn.Module):
    def __init__(self, kind: type[Opaque], trained: bool) -> None:
        super().__init__()
        weight = kind(torch.ones(3, dtype=torch.int8), torch.tensor(1.0))
        self.w = nn.Parameter(weight, requires_grad=trained)
