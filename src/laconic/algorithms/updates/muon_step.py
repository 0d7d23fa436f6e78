"""D = mean(a - x) ;  m <- mu*m + D ;  a <- a - eta*S(D + mu*m) ;  x <- merge(x, a)

S gives the step of a matrix Muon's direction, and keeps its length: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.
DiLoCo: Douillard et al. 2023, arXiv 2311.08105, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.algorithms.update import Clock, Slot, State
from laconic.algorithms.updates.outer_step import OuterStep

COEFFICIENTS = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
"""Those of Muon: singular values come near 1, between about 0.7 and 1.2."""


@dataclass(frozen=True)
class MuonStep(OuterStep):
    """DiLoCo's outer step, in Muon's direction for matrices::

        D = mean(a - x) ;  m <- mu*m + D ;  s = D + mu*m
        for every matrix s = U S V^T:  o = U V^T, approximately ;  s <- o * ||s|| / ||o||
        a <- a - eta*s ;  x <- a

    So the step is as long as that of `OuterStep`, and ``lr``, which is eta (> 0), means the same.
    ``momentum`` is mu (0 <= mu < 1). Matrices are all parameters of two dimensions that are both
    above 1, embeddings and output layers among them; all others take Nesterov's step. o is computed
    by 5 Newton-Schulz iterations, in float32 or wider. Delays and ``merge`` are those of
    `OuterStep`. Every worker stores ``a`` and ``m``, and computes the same step. For models that
    are not sharded.
    """

    slots: ClassVar[dict[str, Slot]] = {"anchor": "everywhere", "m": "everywhere"}
    replaces = False
    whole = True
    sends_changes = True

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
        start = 0
        for shape in clock.shapes:
            if len(shape) == 2 and min(shape) > 1:
                s = step[start : start + shape.numel()].view(shape)
                o = orthogonal(s)
                length = torch.linalg.vector_norm(o)
                s.copy_(o.mul_(torch.linalg.vector_norm(s) / torch.where(length > 0, length, 1)))
            start += shape.numel()
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
    if is_long(shape):
        return 4 * a * a * b + (8 * ITERATIONS - 6) * a**3
    return ITERATIONS * (4 * a * a * b + 2 * a**3)


def is_long(shape: Sequence[int]) -> bool:
    """Whether `orthogonal` iterates on the square of a matrix of this ``shape``, and not on the
    matrix itself, which takes more operations then."""
    return max(shape) > 1.5 * min(shape)


def orthogonal(s: Tensor) -> Tensor:
    """Return U V^T of ``s = U S V^T``, approximately, as a new tensor; zeros for zeros. ``s`` must
    have two dimensions.

    An iteration is X <- P X with P = pI + qG + rG^2 and G = X X^T, all of which commute. If X is
    long, the iterations are on G <- P G P and on the product of all P, which multiplies X once."""
    x = s.mH if s.shape[0] > s.shape[1] else s
    length = torch.linalg.vector_norm(x)
    x = x / torch.where(length > 0, length, 1)
    p, q, r = COEFFICIENTS
    with torch.autocast(s.device.type, enabled=False):
        if is_long(s.shape):
            x = _product(x @ x.mH) @ x
        else:
            for _ in range(ITERATIONS):
                square = x @ x.mH
                x = p * x + (q * square + r * square @ square) @ x
    return (x.mH if s.shape[0] > s.shape[1] else x).clone()


def _product(square: Tensor) -> Tensor:
    """The product of the P of all iterations, from the first G."""
    p, q, r = COEFFICIENTS
    product = None
    for left in reversed(range(ITERATIONS)):
        factor = torch.addmm(square, square, square, beta=q, alpha=r)
        factor.diagonal().add_(p)
        product = factor if product is None else factor @ product
        if left:
            square = factor @ square @ factor
    assert product is not None, "there are iterations"
    return product
