"""Recipes of your own for `laconic compare`: every public function of this file is one.

    laconic compare "sign_pull(8, 0.01)" "slowmo(random_half(4), period=16)" \
        --rules examples/my_rules.py
"""

from dataclasses import dataclass

import torch

from laconic import Recipe, Round, Update, every
from laconic.algorithms.exchanges import Mean


@dataclass(frozen=True)
class SignPull(Update):
    """x <- x - size * sign(x - mean(x)): as far for every coordinate, however far it is off."""

    size: float
    replaces = False  # what arrives does not become x: `fold` says what does

    def fold(self, x, received, sent, state, clock):
        return x - self.size * torch.sign(x - received)


@dataclass(frozen=True)
class RandomHalf(Update):
    """x <- mean(x) in a random half of the coordinates, the same half on all workers."""

    replaces = False

    def fold(self, x, received, sent, state, clock):
        generator = torch.Generator().manual_seed(clock.step)
        half = torch.rand(x.shape, generator=generator) < 0.5
        return torch.where(half.to(x.device), received, x)


def sign_pull(period: int, size: float = 0.01) -> Recipe:
    return (Round(every(period), SignPull(size), Mean()),)


def random_half(period: int) -> Recipe:
    return (Round(every(period), RandomHalf(), Mean()),)
