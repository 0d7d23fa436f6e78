"""D = mean(a - x) ;  m <- mu*m + D ;  a <- a - eta*S(D + mu*m) ;  x <- merge(x, a)

S gives the step of a matrix Muon's direction, and keeps its length: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.
Its polynomials: Amsel et al. 2025, arXiv 2505.16932. DiLoCo: Douillard et al. 2023, arXiv
2311.08105, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.algorithms.update import Clock, Slot, State
from laconic.algorithms.updates.outer_step import OuterStep
from laconic.device import full_precision

POLYNOMIALS = (
    (14.9373, -146.249, 486.661, -625.53, 272.151),
    (6.75962, -16.3497, 13.8421, -4.55616, 0.508882),
    (4.18824, -8.77688, 7.94461, -2.95883, 0.38272),
)
"""Odd polynomials of degree 9, p_0 s + p_1 s^3 + ... + p_4 s^9. The first comes nearest to 1 for s
in [0.002, 1], the second in [0.0299, 1.97], the third in [0.201, 1.8]: each interval is what the
polynomial before makes of its own. No composition of three such polynomials comes nearer to 1
(arXiv 2505.16932)."""
MARGIN = 1.01
"""How far the largest eigenvalue stays from the end of the first interval. Beyond the end, the
polynomials grow so fast that rounding errors alone could make a singular value large."""


@dataclass(frozen=True)
class MuonStep(OuterStep):
    """DiLoCo's outer step, in Muon's direction for matrices::

        D = mean(a - x) ;  m <- mu*m + D ;  s = D + mu*m
        for every matrix s = U S V^T:  o = U V^T, approximately ;  s <- o * ||s|| / ||o||
        a <- a - eta*s ;  x <- a

    So the step is as long as that of `OuterStep`, and ``lr``, which is eta (> 0), means the same.
    ``momentum`` is mu (0 <= mu < 1). Matrices are all parameters of two dimensions that are both
    above 1, embeddings and output layers among them; all others take Nesterov's step. o is computed
    by three polynomials of degree 9 (see `orthogonal`), in float32 or wider. Delays and ``merge``
    are those of `OuterStep`. Every worker stores ``a`` and ``m``, and computes the same step. Where
    FSDP has sharded the model, the ranks of a worker share the matrices.
    """

    slots: ClassVar[dict[str, Slot]] = {"anchor": "everywhere", "m": "everywhere"}
    replaces = False
    scope = "tensors"
    sends = "change"
    usual_lr = 1.0
    usual_merge = "loscar"

    def send(self, x: Tensor, state: State, clock: Clock) -> Tensor:
        return (state["anchor"] - x).to(x.dtype)

    def combine(self, mean: Tensor, state: State, clock: Clock) -> Tensor:
        return mean

    def fold(
        self, x: Tensor, received: Tensor, sent: Tensor | None, state: State, clock: Clock
    ) -> Tensor:
        a = state["anchor"]
        step = received.to(a.dtype, copy=True)
        if self.momentum:
            m = state["m"].mul_(self.momentum).add_(step)  # m <- mu*m + D
            step.add_(m, alpha=self.momentum)
        clock.tensors.map(step, turned, lambda shape: operations(shape) > 0)
        a.sub_(step, alpha=self.lr)
        if not clock.delay:
            return x.copy_(a)
        return super().fold(x, a.to(x.dtype), sent, state, clock)


def operations(shape: Sequence[int]) -> int:
    """The floating-point operations of `orthogonal` for a matrix of this ``shape``; 0 for others,
    which it does not turn."""
    if len(shape) != 2 or min(shape) < 2:
        return 0
    a, b = min(shape), max(shape)
    return 4 * a * a * b + 24 * a**3


def turned(s: Tensor) -> Tensor:
    """Return o * ||s|| / ||o|| for ``o = orthogonal(s)``; zeros for zeros."""
    most = _nonzero(s.abs().amax())  # squares of tiny and huge elements would be lost
    s = s / most
    o = orthogonal(s)
    ratio = torch.linalg.vector_norm(s) / _nonzero(torch.linalg.vector_norm(o))
    return o.mul_(ratio).mul_(most)


def orthogonal(s: Tensor) -> Tensor:
    """Return U V^T of ``s = U S V^T``, approximately; zeros for zeros. ``s`` must have two
    dimensions, and be float32 or wider. Of r singular values, those above 0.0021 r^(1/8) times the
    largest become 0.77 to 1.23; smaller ones become less.

    A polynomial replaces X by P X, where P is a polynomial of G = X X^T. All such matrices commute,
    so G becomes P G P, and X is multiplied only once, by the product of all P. First, G is divided
    by its trace, so that the square of a small G does not vanish, and then by `MARGIN` times
    ||G^2||^(1/2), which is at least its largest eigenvalue. G itself must neither overflow nor
    vanish: `turned` sees to that.
    """
    x = s.mH if s.shape[0] > s.shape[1] else s
    with full_precision(s.device):  # P is large for small singular values
        g = x @ x.mH
        trace = _nonzero(torch.linalg.vector_norm(g.diagonal(), 1))
        square = g.div_(trace) @ g
        most = MARGIN * _nonzero(torch.linalg.vector_norm(square).sqrt())
        g, square = g.div_(most), square.div_(most * most)
        product = factor = _polynomial(g, square, POLYNOMIALS[0])
        for of in POLYNOMIALS[1:]:
            g = factor @ g @ factor
            factor = _polynomial(g, g @ g, of)
            product = factor @ product
        x = product.div_((trace * most).sqrt()) @ x
    return x.mH if s.shape[0] > s.shape[1] else x


def _polynomial(g: Tensor, square: Tensor, of: Sequence[float]) -> Tensor:
    """p_0 + p_1 G + ... + p_4 G^4, where ``of`` has the p, and ``square`` is G^2."""
    upper = torch.add(of[4] * square, g, alpha=of[3])
    upper.diagonal().add_(of[2])
    whole = torch.addmm(g, square, upper, beta=of[1])
    whole.diagonal().add_(of[0])
    return whole


def _nonzero(x: Tensor) -> Tensor:
    """``x``, or 1 where it is 0."""
    return torch.where(x == 0, 1, x)
