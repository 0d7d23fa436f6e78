"""What chapter 7 runs: training on hosts joined by a slow network, and the cost model before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from laconic.lab.race import runner
from laconic.lab.race.result import Result, Row
from laconic.lab.race.workloads import ByteTransformer
from laconic.predict import Facts
from tutorial.toy import FULL

HOSTS = 2
LATENCY = 1e-3
"""Seconds of a message, for predictions: what it takes to wake a process on the other host."""


def train(
    recipes: Sequence[str],
    rate: float,
    *,
    seconds: float | None = None,
    steps: int | None = None,
    alone: bool = False,
) -> Iterator[Result]:
    """Train the lab's transformer under each recipe, on hosts that send ``rate`` bit/s each.

    One recipe after the other, each for so many ``seconds`` of training or so many ``steps``, from
    the same start and with the same batches. ``alone``: first of all without any communication.
    Yields the result so far after each. Raises ``RuntimeError`` where one failed or diverged.
    """
    settings = runner.Settings(
        recipes=tuple(recipes),
        hosts=HOSTS,
        bandwidth=rate,
        seconds=seconds,
        steps=steps,
        data=None if FULL else __file__,  # little to learn, and little to validate on
        validations=5,
        baseline=alone,
    )
    settings.check()
    for result in runner.run(settings, "python -m tutorial 7", lambda name, event: None):
        row = result.rows[-1]
        if row.status != "ok":
            raise RuntimeError(f"{row.recipe} {row.status}: {row.error}")
        yield result


def sent(row: Row) -> float:
    """Bytes that a host sent per step for the recipe's rounds, by laconic's own ledger."""
    return sum(rounds.bytes * len(rounds.steps()) for rounds in row.rounds) / row.steps


def shapes() -> tuple[tuple[int, ...], ...]:
    """Of the transformer's tensors."""
    return tuple(tuple(parameter.shape) for parameter in ByteTransformer().parameters())


def on_paper(rate: float, compute: float) -> Facts:
    """All that a prediction needs, but for what was not measured: what packing and coding take of
    the processor, and how far hosts are from being equally fast."""
    return Facts(
        workers=HOSTS, shapes=shapes(), itemsize=4, compute=compute, rate=rate, latency=LATENCY
    )
