"""How well a worker does, for recipes with a leader: the mean of its latest losses, or, where no
loss is reported, how much its gradients promise.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laconic.buckets import local

DECAY = 0.9


class Score(NamedTuple):
    """A worker's score; the lowest leads. ``kind``: 0 none, 1 of gradients, 2 of losses, -1 of
    ranks that do not all have one of the same kind."""

    value: float = math.inf
    kind: float = 0.0


NO_SCORE = Score()


class Scores:
    """Keeps what the score of this worker is made of.

    Losses: the mean of the last ``window`` reported (Teng et al. 2019, section 5). Else the
    first-order decrease of the loss by gradients, ``s <- 0.9*s + 0.1*sum((x_prev - x)*g)``, a
    heuristic of the Synchronous Distributed Training Library; it costs a copy of x at every step.
    """

    def __init__(self, params: Callable[[], Sequence[Tensor]], window: int) -> None:
        self._params = params
        self._losses: deque[float] = deque(maxlen=window)
        self._decrease: float | None = None
        self._before: list[Tensor] = []

    def report(self, loss: float) -> None:
        """The loss of one batch."""
        self._losses.append(loss)
        self._before = []

    def before_step(self) -> None:
        """The optimiser is about to move x."""
        if not self._losses:
            self._before = [local(p).clone() for p in self._params()]

    def skip_step(self) -> None:
        """It does not: a GradScaler skips it, as gradients are infinite."""
        self._before = []

    def after_step(self) -> None:
        """The optimiser has moved x."""
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
        """The score over the last ``window`` losses."""
        if self._losses:
            latest = list(self._losses)[-window:]
            return Score(sum(latest) / len(latest), 2.0)
        return NO_SCORE if self._decrease is None else Score(self._decrease, 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "decrease": self._decrease}

    def loader(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """What puts back what `state_dict` returned."""
        losses = [float(loss) for loss in state["losses"]]
        decrease = None if state["decrease"] is None else float(state["decrease"])

        def put_back() -> None:
            self._losses.clear()
            self._losses.extend(losses)
            self._decrease = decrease

        return put_back


def of_worker(scores: Tensor) -> Score:
    """A worker's score from those of its ranks (one a row): their mean."""
    values, kinds = scores.unbind(1)
    alike = bool((kinds == kinds[0]).all())
    return Score(float(values.mean()), float(kinds[0])) if alike else Score(kind=-1.0)


def elect(scores: Tensor) -> int:
    """The leader's place among ``scores`` (one `Score` a row). NaN never leads. Raises
    ``ValueError``, alike on every rank, where scores are missing or of different kinds."""
    values, kinds = scores.unbind(1)
    if bool((kinds == 0).any()):
        raise ValueError(
            "no leader can be chosen: call sync.report_loss(loss) in every step, or let "
            "optimizer.step() see gradients"
        )
    if bool((kinds != kinds[0]).any()) or float(kinds[0]) < 0:
        raise ValueError("some ranks report a loss and others do not: call it on every rank")
    return int(torch.argmin(values.nan_to_num(nan=math.inf)))
