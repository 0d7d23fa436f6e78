"""MuLoCo, DES-LOC and radial-directional averages: identities, traffic, errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.algorithms.compile import check_whole
from laconic.algorithms.exchanges import RadialMean, RadialQuorumMean
from laconic.algorithms.exchanges.quorum import Contribution
from laconic.algorithms.update import Clock
from laconic.algorithms.updates import MuonStep, OuterStep
from laconic.algorithms.updates.muon_step import orthogonal, turned
from laconic.device import full_precision
from laconic.errors import NotFiniteError
from laconic.links.simulated import current_link

from tests.support.exchanges import sent_by
from tests.support.loops import descend

SHAPES = (torch.Size([5, 7]), torch.Size([3]), torch.Size([2, 2]), torch.Size([1]))
LENGTH = sum(shape.numel() for shape in SHAPES)
CLOCK = Clock(1, math.nan, 0, 0, 1)


def split(flat: Tensor) -> tuple[Tensor, ...]:
    return torch.split(flat[:LENGTH], [shape.numel() for shape in SHAPES])


def radial(messages: list[Tensor], x0: Tensor, codec: Any = None, rounds: int = 1) -> list[Tensor]:
    """What workers with these ``messages`` receive in every of the ``rounds``."""
    exchange = RadialMean(codec).shaped(SHAPES)

    def worker(rank: int) -> list[Tensor]:
        link = current_link.get()
        assert link is not None
        state = exchange.init(x0.clone(), slice(0, len(x0)))
        found = []
        for k in range(rounds):
            state["reference"].copy_(x0)
            clock = Clock(k + 1, math.nan, k, 0, link.size, rank)
            received = sent_by(exchange, link, messages[rank].clone(), lambda x: x, clock, state)
            found.append(received.flat.clone())
        return found

    runs = la.simulate(worker, workers=len(messages))
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
    return runs[0]


def test_the_shortest_changes_stay_finite() -> None:
    """Of one number: its inverse would be infinite."""
    x0, shapes = torch.zeros(1), (torch.Size([1]),)
    y = torch.full((1,), 1e-40)
    quorum = RadialQuorumMean(shapes=shapes)
    assert torch.equal(quorum.mean([Contribution(y, None, 1)] * 2, x0, 2), y)

    def worker(rank: int) -> Tensor:
        link = current_link.get()
        assert link is not None
        exchange = RadialMean(shapes=shapes)
        state = exchange.init(x0.clone(), slice(0, 1))
        return sent_by(exchange, link, y.clone(), lambda x: x, CLOCK, state).flat.clone()

    assert all(torch.equal(received, y) for received in la.simulate(worker, workers=2))


@pytest.mark.parametrize(("codec", "most"), [("float16", 1e-4), ("int8", 3e-3)])
def test_what_a_code_of_directions_leaves_out_is_sent_later(codec: str, most: float) -> None:
    """The mean over 60 rounds with the same changes has their direction, and the codes in each."""
    draw = partial(torch.randn, LENGTH, generator=torch.Generator().manual_seed(5))
    x0, ds = draw(), [d / d.norm() for d in (draw(), draw(), draw())]
    (exact,) = radial([x0 - d for d in ds], x0)
    rounds = radial([x0 - d for d in ds], x0, la.codecs.codec_of(codec), 60)
    directions = [torch.cat([p / p.norm() for p in split(x0 - r)]) for r in rounds]
    wanted = torch.cat([p / p.norm() for p in split(x0 - exact)])
    assert (torch.stack(directions).mean(0) - wanted).abs().max() < most
    for r in rounds:
        for ours, plain in zip(split(x0 - r), split(x0 - exact), strict=True):
            assert float(ours.norm()) == pytest.approx(float(plain.norm()), rel=1e-5)


def test_a_code_suits_large_tensors_beside_small_ones() -> None:
    """The direction of a number is 1 or -1. Beside it, the elements of a long unit vector would all
    be coded as zero."""
    shapes = (torch.Size([200]), torch.Size([1]))
    exchange = RadialMean(la.codecs.Int4(block=256)).shaped(shapes)
    d = torch.randn(201, generator=torch.Generator().manual_seed(2))

    def worker(rank: int) -> Tensor:
        link = current_link.get()
        assert link is not None
        state = exchange.init(torch.zeros(201), slice(0, 201))
        return sent_by(exchange, link, -d, lambda x: x, CLOCK, state).flat.clone()

    received = la.simulate(worker, workers=2)[0]
    assert (received[:200] + d[:200]).norm() < 0.2 * d[:200].norm()


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("codec", [None, "int8"])
def test_what_is_not_finite_is_an_error_on_every_rank(bad: float, codec: str | None) -> None:
    """1e30 is finite, but its square is not in float32."""

    def worker(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        recipe = la.diloco(3, momentum=0.5, average="rda", codec=codec)
        sync = la.attach(model, optimizer, recipe)
        for t in range(1, 6):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * t + rank))
            descend(optimizer, model(x).square().mean())
        before = repr(sync.state_dict()["rounds"])
        optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():
            if rank == 1:
                model.weight[0, 0] = bad
        with pytest.raises(NotFiniteError, match=r"ranks \[1\] had NaN, infinite, or too large"):
            optimizer.step()
        assert before == repr(sync.state_dict()["rounds"])

    la.simulate(worker, workers=3)


# -- Muon ----


def test_the_direction_of_complex_and_broken_matrices_and_under_autocast() -> None:
    generator = torch.Generator().manual_seed(1)
    s = torch.randn(6, 4, generator=generator, dtype=torch.complex128)
    before = s.clone()
    u, _, vh = torch.linalg.svd(s, full_matrices=False)
    values = (u.mH @ orthogonal(s) @ vh.mH).diagonal()
    assert torch.equal(s, before)
    assert values.real.min() > 0.77 and values.real.max() < 1.23 and values.imag.abs().max() < 1e-9
    real = s.real.float()
    with torch.autocast("cpu", torch.bfloat16):
        inside = orthogonal(real)
    assert torch.equal(inside, orthogonal(real))
    real[2, 1] = float("nan")
    assert orthogonal(real).isnan().all()


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="needs torch 2.9")
def test_the_direction_is_computed_in_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """As bfloat16 it would be wrong by several times its length. Only accelerators and some
    processors can tell, so what torch is told is compared."""
    backends: Any = torch.backends
    kinds, inside = (backends.cuda.matmul, backends.mkldnn.matmul), list[list[str]]()

    def told(*precisions: str) -> list[str]:
        for kind, precision in zip(kinds, precisions, strict=False):
            kind.fp32_precision = precision
        return [kind.fp32_precision for kind in kinds]

    def noted(*given: Any) -> Any:
        inside.append(told())
        return norm(*given)

    norm, before = torch.linalg.vector_norm, told()
    monkeypatch.setattr(torch.linalg, "vector_norm", noted)
    try:
        told("tf32", "bf16")
        orthogonal(torch.eye(3))
        assert inside and all(each == ["tf32", "ieee"] for each in inside), "CUDA's stays as it is"
        assert told() == ["tf32", "bf16"]
        with full_precision(torch.device("cuda")):
            assert told() == ["ieee", "bf16"]
        assert told() == ["tf32", "bf16"]
    finally:
        told(*before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_direction_does_not_depend_on_the_scale(dtype: torch.dtype) -> None:
    """Squares of the elements are beyond the dtype, and the smallest elements are denormal."""
    s = torch.randn((6, 4), generator=torch.Generator().manual_seed(1), dtype=dtype)
    expected = turned(s)
    assert torch.allclose(expected.norm(), s.norm())
    tiny, huge = torch.finfo(dtype).tiny, torch.finfo(dtype).max
    for scale in (tiny, tiny**0.75, tiny**0.5, huge**0.5, huge / 100):
        assert torch.allclose(turned(scale * s) / scale, expected, rtol=1e-4, atol=1e-4)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.conv = nn.Conv1d(8, 8, 3)
        self.head = nn.Linear(8, 11)


def test_muon_trains_the_matrices_of_hidden_layers() -> None:
    model = Transformer()
    names = {id(p): name for name, p in model.named_parameters()}
    first, second = la.muon(model, 0.01)
    assert type(first).__name__ == "Muon" and type(second).__name__ == "AdamW"

    def of(optimizer: torch.optim.Optimizer) -> list[str]:
        return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]

    assert of(first) == ["mix.weight"]
    assert sorted([*of(first), *of(second)]) == sorted(names.values())
    assert {g["lr"] for o in (first, second) for g in o.param_groups} == {0.01}
    model.norm.requires_grad_(False)
    assert "norm.weight" not in of(la.muon(model)[1])
    with pytest.raises(ValueError, match=r"no matrix for Muon.*torch\.optim\.AdamW"):
        la.muon(model, adamw=("mix",))
    for options, said in (
        ({"lr": 0.0}, "lr must be"),
        ({"momentum": 2.0}, "momentum must be"),
        ({"weight_decay": -1.0}, "weight_decay must be"),
        ({"adamw": ["mix", "haed"]}, "no parameter has a name that begins with 'haed'"),
    ):
        with pytest.raises(ValueError, match=said):
            la.muon(model, **options)
    bag = nn.Sequential(nn.EmbeddingBag(5, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    assert [p.shape for p in la.muon(bag)[0].param_groups[0]["params"]] == [(4, 4)]


@pytest.mark.fault("outer_step() sent nothing where gradients were averaged in some steps only")
def test_an_outer_step_sends_nothing_only_over_gradients_of_every_step() -> None:
    every, after, until = la.every, la.after, la.until
    for equal, schedules in (
        (True, [lambda step: False, every(1)]),
        (True, [until(9, every(1)), after(9, every(1))]),
        (True, [every(2), every(4, offset=1), la.any_of(every(4, offset=3), every(9))]),
        (False, [every(2)]),
        (False, [every(1, offset=2)]),
        (False, [until(100, every(1))]),
        (False, [until(9, every(1)), after(10, every(1))]),
        (False, [every(1, unless=until(30, every(30)))]),
        (False, [lambda step: True]),
    ):
        mean = la.updates.Average(), la.exchanges.Mean()
        base = tuple(la.GradientRound(schedule, *mean) for schedule in schedules)
        for recipe in (la.outer_step(base, 4), la.slowmo(base, 4)):
            assert recipe[-1].exchange.communicates != equal, schedules
    assert not la.outer_step(la.power_sgd(4, start=3), 4)[-1].exchange.communicates


# -- what is refused ----


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: la.diloco(4, average="median"), "average must be one of"),  # type: ignore[arg-type]
        (lambda: la.diloco(4, outer="adam"), "outer must be 'muon', None, or a function"),  # type: ignore[arg-type]
        (lambda: la.muloco(4, outer="adamw"), "outer must be one of"),  # type: ignore[arg-type]
        (lambda: la.muloco(4, merge="eager"), "merge must be one of"),  # type: ignore[arg-type]
        (lambda: la.diloco(4, delay=2, merge="eager", average="rda"), "omit average="),
        (lambda: la.diloco(4, delay=2, merge="eager", outer="muon"), "omit outer="),
        (lambda: la.diloco(4, quorum=2, average="rda", codec="int8"), "use codec=None"),
        (lambda: la.diloco(4, outer="muon", quorum=1), "outer='muon' waits for all workers"),
        (lambda: la.streaming_diloco(4, delay=0, outer="muon", pace="own"), "waits for all"),
        (lambda: la.diloco(4, average="rda", codec="int2"), "4 bits or more .* 'int8'"),
        (lambda: la.Round(la.every(4), MuonStep(0.7, 0.6), RadialMean()), "relative=False"),
        (
            lambda: la.Round(la.every(4), OuterStep(0.7, 0.6), RadialMean(relative=False)),
            "relative=True",
        ),
        (lambda: la.diloco(4, quorum=2, average="median"), "average must be one of"),  # type: ignore[arg-type]
        (lambda: la.streaming_diloco(4, outer="muon", by="bytes"), 'by="layers"'),
        (lambda: la.des_loc(0), "period must be an integer"),
        (lambda: la.des_loc(4, first=0), "first must be an integer"),
        (lambda: la.des_loc(4, second=1.5), "second must be"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_said_when_the_recipe_is_made(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_whole_tensors_are_needed_where_ranks_have_parts() -> None:
    rda, muon = la.diloco(4, average="rda"), la.diloco(4, outer="muon")
    check_whole(rda, sharded=False, ranks=1)
    check_whole(muon, sharded=False, ranks=2)
    check_whole(la.power_sgd(2), sharded=False, ranks=2)
    with pytest.raises(ValueError, match=r"RadialMean.*average='mean'"):
        check_whole(rda, sharded=False, ranks=2)
    with pytest.raises(ValueError, match=r"RadialMean.*average='mean'"):
        check_whole(rda, sharded=True, ranks=1)
    check_whole(muon, sharded=True, ranks=1)


@pytest.mark.parametrize(("elements", "chunk"), [(32, 8), (32, 16), (30, 5)])
def test_chunks_begin_anew_in_the_slice_of_each_rank(elements: int, chunk: int) -> None:
    """So where chunks end with the slices, a worker of two ranks is like one of one."""

    def run(rank: int, ranks: int) -> Tensor:
        x = nn.Parameter(torch.zeros(elements, dtype=torch.float64))
        model, optimizer = nn.ParameterList([x]), torch.optim.SGD([x], 0.1)
        recipe = la.sparse_loco(2, 2, chunk)
        with la.attach(model, optimizer, recipe, nprocs_per_node=ranks) as sync:
            for step in range(8):
                numbers = torch.Generator().manual_seed(100 * (rank // ranks) + step)
                x.grad = torch.randn(elements, generator=numbers, dtype=torch.float64)
                optimizer.step()
            with sync.consensus(mean=False):
                return x.detach().clone()

    alone, *_ = la.simulate(lambda rank: run(rank, 1), 2)
    both = la.simulate(lambda rank: run(rank, 2), 4)
    assert all(torch.equal(x, alone) for x in both)
