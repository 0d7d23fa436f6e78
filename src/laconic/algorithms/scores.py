"""Scores of workers, for recipes with a leader.

A score is the mean of a worker's latest losses. If no loss is reported, it is the decrease of the
loss that the worker's gradients predict.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laconic.tensors import local

DECAY = 0.9


class Score(NamedTuple):
    """A worker's score. The lowest leads.

    ``kind``: 0 for none, 1 for gradients, 2 for losses, and -1 if the worker's ranks do not all
    have a score of the same kind.
    """

    value: float = math.inf
    kind: float = 0.0


NO_SCORE = Score()


class Scores:
    """Collects what this worker's score is computed from.

    With losses: the mean of the last ``window`` reported (Teng et al. 2019, section 5). Without
    losses: the first-order decrease of the loss predicted by gradients,
    ``s <- 0.9*s + 0.1*sum((x_prev - x)*g)``, a heuristic of the Synchronous Distributed Training
    Library. This costs a copy of x at every step. With a ``window`` of 0 nothing is collected.
    """

    def __init__(self, params: Callable[[], Sequence[Tensor]], window: int) -> None:
        self._params = params
        self._losses: deque[float] = deque(maxlen=window)
        self._decrease: float | None = None
        self._before: list[Tensor] = []

    def report(self, loss: float) -> None:
        """Record the loss of one batch."""
        self._losses.append(loss)
        self._before = []

    def before_step(self) -> None:
        """Copy x before the optimizer changes it, if no losses are reported."""
        if self._losses.maxlen and not self._losses:
            self._before = [local(p).clone() for p in self._params()]

    def skip_step(self) -> None:
        """Discard the copy of x: a GradScaler skips this step because of infinite gradients."""
        self._before = []

    def after_step(self) -> None:
        """Update the gradient score, after the optimizer has changed x."""
        if not self._before:
            return
        pairs = zip(self._params(), self._before, strict=False)
        moved = [
            float(torch.sum((before - local(p)) * local(p.grad), dtype=torch.float64))
            for p, before in pairs
            if p.grad is not None
        ]
        if moved:
            self._decrease = DECAY * (self._decrease or 0.0) + (1 - DECAY) * sum(moved)
        self._before = []

    def now(self, window: int) -> Score:
        """Return the score over the last ``window`` losses."""
        if self._losses:
            latest = list(self._losses)[-window:]
            return Score(sum(latest) / len(latest), 2.0)
        return NO_SCORE if self._decrease is None else Score(self._decrease, 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "decrease": self._decrease}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._losses = deque(state["losses"], self._losses.maxlen)
        self._decrease = state["decrease"]


def of_worker(scores: Tensor) -> Score:
    """Return a worker's score: the mean over those of its ranks (one per row)."""
    values, kinds = scores.unbind(1)
    same_kind = bool((kinds == kinds[0]).all())
    return Score(float(values.mean()), float(kinds[0])) if same_kind else Score(kind=-1.0)


def elect(scores: Tensor) -> int:
    """Return the index of the leader among ``scores`` (one `Score` per row). NaN never leads.

    Raises the same ``ValueError`` on every rank if scores are missing or of different kinds.
    """
    values, kinds = scores.unbind(1)
    if bool((kinds == 0).any()):
        raise ValueError(
            "no leader can be chosen without scores: call sync.report_loss(loss) in every step, or "
            "give the parameters gradients before optimizer.step()"
        )
    if bool((kinds != kinds[0]).any()) or float(kinds[0]) < 0:
        raise ValueError(
            "some ranks have reported a loss and others have not: call sync.report_loss(loss) on "
            "every rank"
        )
    return int(torch.argmin(values.nan_to_num(nan=math.inf)))
