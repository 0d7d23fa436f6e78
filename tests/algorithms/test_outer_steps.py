"""Outer steps in Muon's direction, and over a base; what recipes refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as la
from laconic.algorithms.updates.muon_step import orthogonal, turned
from laconic.device import full_precision

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


def own_steps(**options: Any) -> la.Recipe:
    return la.outer_step(la.local_sgd(4), 2, average=False, **options)


def disturbed(what: Callable[[la.Synchronizer], None], first: str) -> Tensor:
    """The model of a worker with two optimizers, after six steps with own outer steps; between the
    optimizers of the third step, ``what``."""

    def run(rank: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
        one, two = (torch.optim.SGD(layer.parameters(), 0.1) for layer in model)
        sync = la.attach(model, [one, two], first)
        for step in range(6):
            x = torch.ones(2, 3, dtype=torch.float64) * (step + 1 + rank)
            model(x).square().mean().backward()
            one.step()
            if step == 2:
                what(sync)
            two.step()
            model.zero_grad()
        sync.detach()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    return torch.cat(la.simulate(run, 2))


OWN_TEXT = "outer_step(local_sgd(4), 2, outer='muon', average=False)"


def test_own_steps_count_a_step_that_is_begun_once() -> None:
    """Its beginning is known where the consensus is looked at, or a recipe begins, in between."""

    def look(sync: la.Synchronizer) -> None:
        with sync.consensus():
            pass

    undisturbed = disturbed(lambda sync: None, OWN_TEXT)
    assert torch.equal(disturbed(look, OWN_TEXT), undisturbed)
    begun = disturbed(lambda sync: sync.switch(OWN_TEXT), "local_sgd(4)")
    assert begun.abs().max() < 1.5 * undisturbed.abs().max()


# -- what is refused ----


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: la.diloco(4, outer="adam"), "outer must be 'muon', None, or a function"),  # type: ignore[arg-type]
        (lambda: la.diloco(4, outer="muon", quorum=1), "MuonStep waits for all workers"),
        (lambda: la.streaming_diloco(4, delay=0, outer="muon", pace="own"), "waits for all"),
        (lambda: la.streaming_diloco(4, outer="muon", by="bytes"), 'by="layers"'),
        (lambda: la.outer_step(la.ddp(), average=False), "average= has no effect"),
        (lambda: own_steps(codec="int8"), "codec= has no effect with average=False"),
        (lambda: own_steps(optimizer_state="average"), "optimizer_state= has no effect"),
        (lambda: own_steps(outer=torch.optim.Adam), "outer must be None or 'muon'"),
        (lambda: la.outer_step(la.diloco(8, quorum=1), 4, average=False), "without quorum="),
    ],
)
def test_what_cannot_be_is_said_when_the_recipe_is_made(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
