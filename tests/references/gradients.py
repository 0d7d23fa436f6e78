"""Plain-loop references of recipes that exchange gradients at every step."""

from __future__ import annotations

from collections.abc import Sequence
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


def divisor(size: int, target: int) -> int:
    """The largest divisor of `size` that is not above `target`: chunks always divide a tensor."""
    return max(d for d in range(1, min(size, target) + 1) if size % d == 0)


def cosines(size: int) -> Array:
    """The orthonormal DCT-II: row f, column j is cos(pi*(2*j + 1)*f/(2*size)), times
    sqrt(1/size) in row 0 and sqrt(2/size) in the others."""
    f, j = np.arange(size)[:, None], np.arange(size)[None, :]
    scales = np.sqrt(np.where(f == 0, 1.0, 2.0) / size)
    return np.asarray(scales * np.cos(np.pi * (2 * j + 1) * f / (2 * size)))


@dataclass
class DeMo(Recipe):
    """every step, for each tensor and each of its chunks:

        m_i <- beta*m_i + g_i
        c_i = DCT(m_i) ;  sent_i = the k entries of c_i with the largest magnitude
        m_i <- m_i - inverse DCT(sent_i)
        mean = of every coefficient, the mean over the workers that sent it; 0 where none did
        g <- sign(inverse DCT(mean)), for an SGD step without momentum: x <- x - lr*g

    Peng, Quesnelle, Kingma 2024 (2411.19870), in the order of the authors' code, where m takes in
    lr*g: the same at a constant lr. Chunks are h x w, h the largest divisor of the rows not above
    `chunk`, w of the columns; a vector is one row. Where an entry of the inverse DCT is nearly 0,
    rounding decides its sign, so no side of a chunk has more than powers of two here."""

    decay: float = 0.999
    k: int = 32
    chunk: int = 64

    def start(self, x0: Params, n: int) -> None:
        self.m = [scale(0.0, x0) for _ in range(n)]

    def gradients(self, t: int, grads: list[Params]) -> list[Params]:
        result = {}
        for name, like in grads[0].items():
            for m, g in zip(self.m, grads, strict=True):
                m[name] = self.decay * m[name] + g[name]
            update = self.exchange([matrix(m[name]) for m in self.m])
            assert np.abs(update[update != 0]).min() > 1e-9, "rounding would decide a sign"
            result[name] = np.sign(update).reshape(like.shape)
        return [copy(result) for _ in grads]

    def exchange(self, m: Sequence[Array]) -> Array:
        """Every worker's momentum of one tensor -> the update; what was sent leaves ``m``."""
        update = np.zeros_like(m[0])
        height, width = (divisor(size, self.chunk) for size in update.shape)
        down, across = cosines(height), cosines(width)
        for i in range(0, update.shape[0], height):
            for j in range(0, update.shape[1], width):
                here = (slice(i, i + height), slice(j, j + width))
                total, senders = np.zeros((height, width)), np.zeros((height, width))
                for own in m:
                    c = down @ own[here] @ across.T
                    kept = np.argsort(-np.abs(c.reshape(-1)), kind="stable")[: self.k]
                    chosen = np.isin(np.arange(c.size), kept).reshape(c.shape)
                    own[here] -= down.T @ (c * chosen) @ across
                    total, senders = total + c * chosen, senders + chosen
                update[here] = down.T @ (total / np.maximum(senders, 1)) @ across
        return update
