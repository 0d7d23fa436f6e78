"""What chapter 7 runs: training on hosts joined by a slow network, and the cost model before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from laconic.lab.emulation.network import Network
from laconic.lab.race import runner
from laconic.lab.race.result import Result, Row
from laconic.lab.race.workloads import ByteTransformer
from laconic.policy.facts import Facts
from laconic.units import format_rate
from tutorial.toy import FULL

HOSTS = 2
ONE_WAY = 1e-3
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

    Recipes train one after the other, each for ``seconds`` of training or for ``steps``, from the
    same start and with the same batches. ``alone``: train without any communication first. Yields
    the result so far after each. Raises ``RuntimeError`` if one failed or diverged.
    """
    settings = runner.Settings(
        recipes=tuple(recipes),
        network=Network(HOSTS, rate),
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


def shapes() -> tuple[tuple[int, ...], ...]:
    """The shapes of the transformer's tensors."""
    return tuple(tuple(parameter.shape) for parameter in ByteTransformer().parameters())


def on_paper(rate: float, compute: float) -> Facts:
    """What a prediction needs. It leaves out what was not measured: the processor time of packing
    and coding, and differences in speed between hosts."""
    return Facts(
        workers=HOSTS, shapes=shapes(), itemsize=4, compute=compute, rate=rate, one_way=ONE_WAY
    )


def draw(rows: dict[tuple[float, str], Row], rates: Sequence[float], names: Iterable[str]) -> None:
    """Plot the losses of each recipe by seconds, for each rate."""
    import matplotlib.pyplot as plt  # predictions and checks do without

    figure, panels = plt.subplots(1, len(rates), figsize=(10, 3.6), sharey=True)
    for axes, rate in zip(panels, rates, strict=True):
        for name in names:
            curve = [p for p in rows[rate, name].curve if p.step]  # from the first validation on
            axes.plot([p.seconds for p in curve], [p.loss for p in curve], "o-", ms=3, label=name)
        axes.set(title=format_rate(rate), xlabel="seconds", xlim=(0, None))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("validation loss (nats per byte)")
    panels[0].legend(fontsize=8)
    figure.tight_layout()
