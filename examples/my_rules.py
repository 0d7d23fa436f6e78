"""Your own recipes for `laconic compare`: every public function of this file is a recipe.

    laconic compare "sign_pull(8, 0.01)" "slowmo(random_half(4), period=16)" \
        --rules examples/my_rules.py
"""

from dataclasses import dataclass

import torch

from laconic import Recipe, Round, Update, every
from laconic.algorithms.exchanges import Mean


@dataclass(frozen=True)
class SignPull(Update):
    """x <- x - size * sign(x - mean(x)): every coordinate moves equally far."""

    size: float
    replaces = False  # x is not replaced by what arrives; `fold` computes it

    def fold(self, x, received, sent, state, clock):
        return x - self.size * torch.sign(x - received)


@dataclass(frozen=True)
class RandomHalf(Update):
    """x <- mean(x) for a random half of the coordinates, the same half on all workers."""

    replaces = False

    def fold(self, x, received, sent, state, clock):
        generator = torch.Generator().manual_seed(clock.step)
        half = torch.rand(x.shape, generator=generator) < 0.5
        return torch.where(half.to(x.device), received, x)


def sign_pull(period: int, size: float = 0.01) -> Recipe:
    return (Round(every(period), SignPull(size), Mean()),)


def random_half(period: int) -> Recipe:
    return (Round(every(period), RandomHalf(), Mean()),)
