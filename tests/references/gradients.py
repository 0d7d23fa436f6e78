"""Plain-loop references of recipes that exchange gradients at every step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.references.coded import Codec, CodedMean
from tests.references.problem import NAMES, Array, Params, Recipe, copy, mean, scale

BUCKET = NAMES[::-1]  # gradients are coded as one vector, in the order in which they become ready


@dataclass
class DDP(Recipe):
    """every step: g <- mean(g), before the local optimizer; coded relative to 0."""

    codec: Codec | None = None

    def start(self, x0: Params, n: int) -> None:
        self.mean = CodedMean(self.codec, [BUCKET], x0, n, relative=False)

    def gradients(self, t: int, grads: list[Params]) -> list[Params]:
        received = self.mean(grads)
        return [copy(received) for _ in grads]


def matrix(g: Array) -> Array:
    return g.reshape(1, -1) if g.ndim < 2 else g.reshape(g.shape[0], -1)


@dataclass
class PowerSGD(Recipe):
    """every step, for each matrix:

        M_i = g_i + e_i ;  P = mean(M_i Q) ;  P <- orthonormal(P) ;  Q <- mean(M_i^T P)
        g <- P Q^T ;  e_i = M_i - P Q^T ;  Q is where the next step starts

    Vectors: g <- mean(g); all in the first `begin` steps. Vogels et al. 2019 (1905.13727),
    Algorithms 1 and 2. `basis` is the first Q of all matrices, one below the other in the order of
    BUCKET. Only the span of its columns matters."""

    rank: int
    basis: Array  # (columns of all matrices, rank)
    begin: int = 0

    def start(self, x0: Params, n: int) -> None:
        self.q: dict[str, Array] = {}
        self.e = [scale(0.0, x0) for _ in range(n)]
        row = 0
        for name in BUCKET:
            rows, columns = matrix(x0[name]).shape
            if x0[name].ndim > 1 and self.rank * (rows + columns) < rows * columns:
                self.q[name] = self.basis[row : row + columns]
                row += columns

    def gradients(self, t: int, grads: list[Params]) -> list[Params]:
        result = mean(grads)
        for name in self.q if t > self.begin else ():
            inputs = [g[name] + e[name] for g, e in zip(grads, self.e, strict=True)]
            left = np.linalg.qr(mean([{"": m @ self.q[name]} for m in inputs])[""])[0]
            self.q[name] = mean([{"": m.T @ left} for m in inputs])[""]
            result[name] = left @ self.q[name].T
            for e, m in zip(self.e, inputs, strict=True):
                e[name] = m - result[name]
        return [copy(result) for _ in grads]
