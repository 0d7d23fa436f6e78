"""Print how far each row of the race is from ``auto()``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.race.networks import Network
from benchmarks.race.page import Line, best, networks, task
from benchmarks.race.runs import Entry
from laconic.lab.race.comparison import summary
from laconic.units import three_digits

AUTO = "auto()"
LEGEND = (
    "loss: the mean over the seeds; ± the sample standard deviation. Differences: over the seeds "
    "that both rows have; positive is worse than auto(). *: the lowest mean of the rows with all "
    "seeds."
)


def lines(entries: Sequence[Entry], wanted: Sequence[Network] | None = None) -> Iterator[str]:
    """Yield a table for each network of ``wanted``, or of all runs.

    Raises ``ValueError`` for a network without runs.
    """
    known = networks(entries)
    if missing := [network for network in wanted or () if network not in known]:
        names = "; ".join(map(str, known)) or "none"
        raise ValueError(f"no runs on {missing[0]}; the journal has runs on {names}")
    yield task(entries)
    for network in known if wanted is None else wanted:
        yield ""
        yield from _table(network, known)
    yield ""
    yield LEGEND


def _table(network: Network, known: dict[Network, list[Line]]) -> Iterator[str]:
    rows = known[network]
    head, references = ["row", "seeds", "loss", "s per step", "to auto()"], [_auto(rows)]
    if network != network.alone:
        head.append(f"to auto() at {network.alone}")
        references.append(_auto(known.get(network.alone, [])))
    winner = best(rows)
    yield str(network)
    cells = [head, *(_cells(one, one is winner, references) for one in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        first, *others = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        yield "  ".join((first, *others)).rstrip()


def _cells(one: Line, wins: bool, references: Sequence[Line | None]) -> list[str]:
    seeds = ",".join(map(str, sorted(one.seeds)))
    pace = three_digits(one.pace) if one.finished else "–"
    loss = _with_spread(one.losses, "") + " *" * wins
    lost = [f"seed {e.job.seed} {e.run.status}" for e in one.entries if e.run.status != "ok"]
    loss += f" ({', '.join(lost)})" if lost else ""
    differences = [_with_spread(_differences(one, other), "+") for other in references]
    return [one.text, seeds or "–", loss, pace, *differences]


def _differences(one: Line, other: Line | None) -> list[float]:
    """Return the row's losses minus those of ``other``, by seed."""
    others = {} if other is None else other.by_seed
    return [loss - others[seed] for seed, loss in one.by_seed.items() if seed in others]


def _with_spread(values: Sequence[float], sign: str) -> str:
    found = summary(values)
    if found is None:
        return "–"
    spread = f" ± {found.spread:.3f}" if found.n > 1 else ""
    return f"{found.mean:{sign}.3f}{spread}"


def _auto(rows: Sequence[Line]) -> Line | None:
    return next((one for one in rows if one.text == AUTO), None)
