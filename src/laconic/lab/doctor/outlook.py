"""Predict which recipe `laconic.auto` would choose on the measured network, for an example."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.advisor.numbers import facts_from
from laconic.algorithms.auto import Auto
from laconic.lab.doctor.finding import Finding
from laconic.policy.candidates import candidates
from laconic.policy.choice import choose
from laconic.policy.predict import predict
from laconic.units import format_rate, format_seconds, three_digits

GROUP = "training"


PARAMS, STEP_TIME = 100_000_000, 1.0
"""Of an example: parameters in float32, and the seconds that a step computes."""


@dataclass(frozen=True)
class Outlook:
    """The recipe that `laconic.auto` would choose on a network, and what it is based on.

    ``rate`` is in bit/s of each host, ``round_trip`` in seconds. ``seconds`` are predicted per step
    of ``recipe``, ``ddp`` per step of ``ddp()``."""

    params: int
    step_time: float
    workers: int
    rate: float
    round_trip: float
    recipe: str
    seconds: float
    ddp: float


def outlook(workers: int, rate: float, round_trip: float) -> Outlook:
    """Return the outlook for one worker on each host. Messages take half of ``round_trip``."""
    facts = facts_from(
        params=PARAMS,
        step_time=STEP_TIME,
        bandwidth=rate,
        one_way=round_trip / 2,
        workers=workers,
    )
    chosen, _ = choose(Auto(), facts, None, {})
    seconds = {c.text: predict(c.recipe, facts).seconds for c in candidates(facts)}
    return Outlook(
        params=PARAMS,
        step_time=STEP_TIME,
        workers=workers,
        rate=rate,
        round_trip=round_trip,
        recipe=chosen,
        seconds=seconds[chosen],
        ddp=seconds["ddp()"],
    )


def outlook_findings(found: Outlook) -> list[Finding]:
    """Return the outlook as findings."""
    text = (
        f"for example, with {found.params:,} parameters, steps that compute "
        f"for {format_seconds(found.step_time)}, one worker per host, {format_rate(found.rate)} "
        f"and {format_seconds(found.round_trip)} per round trip, auto() would choose "
        f"{found.recipe}: {format_seconds(found.seconds)} per step, "
        f"{found.step_time / found.seconds:.0%} of the speed without communication"
    )
    if found.recipe != "ddp()":
        text += f"; ddp() would take {format_seconds(found.ddp)}"
    more = f"to compare all recipes, or with the numbers of your model: {command(found)}"
    return [Finding("ok", GROUP, text), Finding("ok", GROUP, more)]


def command(found: Outlook) -> str:
    """Return the command that compares all recipes on this network."""
    return (
        f"laconic advise --params {found.params} --step-time {found.step_time:g}s "
        f"--bandwidth {three_digits(found.rate / 1e6).replace(',', '')}mbit "
        f"--latency {three_digits(1e3 * found.round_trip)}ms --workers {found.workers} --all"
    )
