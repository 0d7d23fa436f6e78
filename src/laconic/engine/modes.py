"""Optimizers with modes, such as schedule-free ones: ``train()`` puts the weights at which one
computes gradients into the parameters, and ``eval()`` those that one evaluates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from laconic.engine.joint_optimizer import members
from laconic.tensors import local


@runtime_checkable
class Modal(Protocol):
    """An optimizer with modes. Setting a mode twice does nothing the second time."""

    param_groups: list[dict[str, Any]]

    def train(self) -> object:
        """Put the training weights into the parameters."""

    def eval(self) -> object:
        """Put the weights to evaluate into the parameters."""


def modal(optimizer: Optimizer | None) -> list[Modal]:
    """The optimizers with modes among ``optimizer``'s members."""
    every = () if optimizer is None else members(optimizer)
    return [each for each in every if isinstance(each, Modal)]


def in_training(optimizer: Optimizer | None) -> list[Modal]:
    """Those with modes that are in train mode."""
    return [each for each in modal(optimizer) if _trains(each)]


def _trains(optimizer: Modal) -> bool:
    """Whether its ``train_mode``, in the groups or its own, is set."""
    own = vars(optimizer).get("train_mode", True)
    return any(group.get("train_mode", own) for group in optimizer.param_groups)


@contextmanager
def training_weights(optimizer: Optimizer | None) -> Iterator[None]:
    """A context in which optimizers with modes are in train mode: rounds are about its weights."""
    evaluating = [each for each in modal(optimizer) if not _trains(each)]
    for each in evaluating:
        each.train()
    try:
        yield
    finally:
        for each in evaluating:
            each.eval()


@contextmanager
def evaluation(optimizer: Optimizer | None, params: Sequence[Tensor]) -> Iterator[None]:
    """A context in which optimizers with modes are in eval mode, and ``params`` may be overwritten.
    Afterward modes and states are those of before, whatever is called inside, and ``params`` are so
    up to rounding."""
    every, training = modal(optimizer), in_training(optimizer)
    if not every:
        yield
        return
    for each in training:
        each.eval()
    evaluated = [local(p).clone() for p in params]
    try:
        yield
    finally:
        for each in every:
            each.eval()
        for p, values in zip(params, evaluated, strict=True):
            local(p).copy_(values)  # some keep the weights of the other mode in their state
        for each in training:
            each.train()
