"""The result of a race between recipes: its data, as JSON, and the fair ways to compare it.

Losses are compared twice, always: at equal time, which is what a user waits for, and after equal
steps, which is what an algorithm costs. The row without communication is shown beside the others
and never competes: its workers never talk, so it is the compute alone, and its loss is the mean
over the workers of each one's own model.

Symbols: t, seconds of training (validation excluded); MB, 10^6 bytes sent per host; loss, in
nats, of the consensus model on the validation set; None wherever a figure is not finite.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

from laconic.units import format_rate

NO_COMMUNICATION = "no communication"
"""Name of the row whose workers never talk."""


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _plain(value: object) -> object:
    """What JSON can hold: numbers that are not finite become None, tuples lists, others text."""
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


@dataclass(frozen=True)
class Point:
    """One validation: `seconds` on the training clock and `megabytes` sent per host so far;
    `distance` of the workers' models from their mean just before the round that the validation
    follows (`laconic.lab.race.worker.Run.distance`)."""

    step: int
    seconds: float
    megabytes: float
    loss: float | None
    distance: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", _finite(self.loss))
        object.__setattr__(self, "distance", _finite(self.distance))


Status = Literal["ok", "diverged", "failed", "absent"]
"""How a row ended."""
Span = tuple[float, float, Literal["compute", "send", "wait"]]
"""From when to when, in seconds, a worker did what."""


@dataclass(frozen=True)
class Rounds:
    """Rounds that follow each other regularly: after the steps `first`, `first + every`, ...,
    `last`, `bytes` sent per host each time. A single one has `every` 0."""

    first: int
    last: int
    every: int
    bytes: int

    def steps(self) -> range:
        """The steps after which they come."""
        return range(self.first, self.last + 1, self.every or 1)


@dataclass(frozen=True)
class Row:
    """One recipe's run.

    Args:
        recipe: its name with arguments, or `NO_COMMUNICATION`.
        status: "absent" for another library that cannot run here, which is no failure.
        error: why it failed, diverged or is absent; the first line is shown.
        steps, seconds: what it did, on the training clock.
        seconds_per_step: a median, say, that a hiccup does not move; NaN where there is none.
        loss: at the end; None where it is not finite.
        ledger_bytes_per_step: payload sent per host, by laconic's own ledger; NaN for a peer.
        interface_bytes_per_step: sent per host by the network interface's counter, with headers.
        waiting: share of the seconds spent waiting for the network, 0 to 1; NaN for a peer.
        curve: validations in the order of time.
        notes: anything a reader must know; shown below the table.
        timeline: what each rank did when, from the start of the training and without the
            validations; of a long run, its beginning and its end. None of a peer.
        rounds: what was sent when; none of a peer.
        source: the directory it comes from, where several runs are joined.
        seed: of the model and the batches; a recipe has one row for each.
        peer: whether it is another library, whose bytes are known from the interface alone.
    """

    recipe: str
    status: Status
    error: str | None
    steps: int
    seconds: float
    seconds_per_step: float
    loss: float | None
    ledger_bytes_per_step: float
    interface_bytes_per_step: float | None
    waiting: float
    curve: tuple[Point, ...]
    notes: tuple[str, ...] = ()
    timeline: tuple[tuple[Span, ...], ...] = ()
    rounds: tuple[Rounds, ...] = ()
    source: str = ""
    seed: int = 0
    peer: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", _finite(self.loss))
        object.__setattr__(self, "interface_bytes_per_step", _finite(self.interface_bytes_per_step))

    @property
    def name(self) -> str:
        """How texts call it: the recipe, and where it comes from if that must be told."""
        return f"{self.recipe} [{self.source}]" if self.source else self.recipe


@dataclass(frozen=True)
class Result:
    """A race: its rows and all that is needed to run it again.

    `settings` holds workload, parameters, hosts, per_host, bandwidth (bit/s), host_bandwidth (of
    single hosts), slow_hosts (how many times as long they compute), latency (s), group_size
    (workers), seconds or steps, seed, seeds (where there are several, each recipe has a row for
    each), network ("emulated" or "throttled"), data and rules. A key that is missing or None is
    left out of the texts. Values that JSON has no word for become text.
    """

    rows: tuple[Row, ...]
    settings: dict[str, object]
    machine: dict[str, str]
    versions: dict[str, str]
    command: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", _plain(self.settings))

    def to_json(self) -> str:
        """Standard JSON: a number that is not finite is null."""
        text = json.dumps(_plain(asdict(self)), indent=1, allow_nan=False)
        # what holds nothing else goes on one line: a span of a timeline would take five
        return re.sub(r"([\[{])\n\s*([^\[\]{}]*?)\s*([\]}])", _on_one_line, text)

    @classmethod
    def from_json(cls, text: str) -> Result:
        """The result that `to_json` wrote. Raises `ValueError` for anything else."""
        try:
            fields = json.loads(text)
            rows = tuple(_row(row) for row in fields["rows"])
            return cls(**{**fields, "rows": rows})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"this is not the result of a race: {error}") from error


def _on_one_line(match: re.Match[str]) -> str:
    opening, inside, closing = match.groups()
    return opening + re.sub(r"\n\s*", " ", inside) + closing


def _row(fields: dict[str, Any]) -> Row:
    numbers = ("seconds", "seconds_per_step", "ledger_bytes_per_step", "waiting")
    return Row(
        **{
            **fields,
            **{name: math.nan for name in numbers if fields[name] is None},
            "curve": tuple(Point(**point) for point in fields["curve"]),
            "notes": tuple(fields["notes"]),
            "timeline": tuple(
                tuple((start, end, kind) for start, end, kind in rank)
                for rank in fields.get("timeline", ())
            ),
            "rounds": tuple(Rounds(**rounds) for rounds in fields.get("rounds", ())),
        }
    )


def read(path: Path) -> Result:
    """The result in a file, or in the `results.json` of a directory, as `write` left it.

    Raises:
        ValueError: there is none, or it is not a result.
    """
    path = path / "results.json" if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read a result from {path}: {error}") from error
    return Result.from_json(text)


# --- comparing ------------------------------------------------------------------------------------

Axis = Callable[[Point], float]
STEPS: Axis = attrgetter("step")
SECONDS: Axis = attrgetter("seconds")
LATE = 1.05
"""How far beyond its time, as a ratio, a row may end and count as in time."""
MEGABYTES: Axis = attrgetter("megabytes")


def line(row: Row, axis: Axis) -> list[tuple[float, float]]:
    """The row's (position, loss) pairs along `axis`, those whose loss is finite."""
    return [(axis(point), point.loss) for point in row.curve if point.loss is not None]


def interpolated(pairs: Sequence[tuple[float, float]], position: float) -> float | None:
    """The value there, linear between the (position, value) pairs; None outside of them."""
    if pairs and position == pairs[-1][0]:
        return pairs[-1][1]
    for (left, before), (right, after) in pairwise(pairs):
        if left <= position < right:
            return before + (after - before) * (position - left) / (right - left)
    return None


def loss_at(row: Row, axis: Axis, position: float) -> float | None:
    """Loss of the row there, linear between validations; None outside its curve."""
    return interpolated(line(row, axis), position)


def reached(row: Row, axis: Axis, loss: float) -> float | None:
    """Where along `axis` the row was first at ``loss``, linear between validations; None where it
    never was."""
    pairs = line(row, axis)
    for (left, before), (right, after) in pairwise(pairs):
        if after <= loss < before:
            return left + (right - left) * (before - loss) / (before - after)
    return None


def competing(result: Result) -> list[Row]:
    """The rows that are compared: they communicate, finished, and have a curve, as have all the
    other runs of the recipe."""
    return [row for runs in grouped(result.rows) if _compete(runs) for row in runs]


def _compete(runs: Sequence[Row]) -> bool:
    return runs[0].recipe != NO_COMMUNICATION and all(map(_finished, runs))


def finished(result: Result) -> list[Row]:
    """The rows that came to the end and have a curve, the one without communication included."""
    return [row for row in result.rows if _finished(row)]


def _finished(row: Row) -> bool:
    return row.status == "ok" and bool(line(row, STEPS))


def common(result: Result, axis: Axis) -> float | None:
    """Where along `axis` the rows are compared; None when none finished.

    Over time it is the time that each was given. Over steps (and in a race of a number of steps)
    it is how far all came; a row without communication that stopped far short of the others does
    not hold them back.
    """
    budget = number(result, "seconds")
    if axis is SECONDS and budget is not None and finished(result):
        return budget
    rivals: list[float] = []
    silent: list[float] = []
    for row in finished(result):
        ends = silent if row.recipe == NO_COMMUNICATION else rivals
        ends.append(line(row, axis)[-1][0])
    if not rivals:
        return min(silent, default=None)
    return min(rivals + [end for end in silent if end > 0.9 * min(rivals)])


def compared(result: Result, row: Row, axis: Axis) -> float | None:
    """The row's loss where rows are compared along `axis`; None where it has none.

    A row that ended before the time given to it was up has, at that time, what it ended with; so
    has one that ended a trifle late, whose last step was planned to be in time.
    """
    position, pairs = common(result, axis), line(row, axis)
    if position is None or not pairs:
        return None
    end = pairs[-1][0]
    if axis is SECONDS and number(result, "seconds") is not None and end <= LATE * position:
        position = end
    return loss_at(row, axis, position)


@dataclass(frozen=True)
class Summary:
    """`n` figures: their mean, and as their spread the sample standard deviation,
    sqrt(sum((value - mean)^2) / (n - 1)), which is 0 for a single one."""

    mean: float
    spread: float
    n: int


def summary(values: Iterable[float | None]) -> Summary | None:
    """Of all values; None where there is none, or one is missing or not finite."""
    figures = [_finite(value) for value in values]
    known = [value for value in figures if value is not None]
    if not known or len(known) < len(figures):
        return None
    spread = statistics.stdev(known) if len(known) > 1 else 0.0
    return Summary(statistics.fmean(known), spread, len(known))


def grouped(rows: Iterable[Row]) -> list[tuple[Row, ...]]:
    """The runs of each recipe, one for each seed, in the order in which recipes come first; apart
    by the source of joined results."""
    runs: dict[tuple[str, bool, str], tuple[Row, ...]] = {}
    for row in rows:
        key = row.recipe, row.peer, row.source
        runs[key] = (*runs.get(key, ()), row)
    return list(runs.values())


def repeats(result: Result) -> int:
    """How many runs of a recipe there are at most."""
    return max(map(len, grouped(result.rows)), default=0)


def compared_runs(result: Result, runs: Iterable[Row], axis: Axis) -> Summary | None:
    """Loss of a recipe's runs where rows are compared along `axis`."""
    return summary(compared(result, row, axis) for row in runs)


def _losses(result: Result, axis: Axis) -> dict[str, float]:
    losses = {runs[0].name: compared_runs(result, runs, axis) for runs in grouped(finished(result))}
    return {name: loss.mean for name, loss in losses.items() if loss is not None}


def equal_steps(result: Result) -> dict[str, float]:
    """Validation loss of each recipe that finished, at the largest step that all of them reached;
    the mean over its runs."""
    return _losses(result, STEPS)


def equal_time(result: Result) -> dict[str, float]:
    """Validation loss that each recipe that finished has to show when the time given to each is
    up; in a race of a number of steps, when the first of them ended. The mean over its runs."""
    return _losses(result, SECONDS)


# --- words ----------------------------------------------------------------------------------------


def three_digits(value: float | None) -> str:
    """Three significant digits, no exponent; a dash where there is no figure."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 6)}f}"


def brief(value: float) -> str:
    """Like `three_digits`, without zeros at the end: 30, 2.5, 100."""
    text = three_digits(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def loss_format(result: Result) -> Callable[[float | None], str]:
    """As many decimals in every text on this result as its smallest loss needs."""
    smallest = min([*equal_time(result).values(), *equal_steps(result).values()], default=1.0)
    decimals = 2 if smallest >= 1 else 3 if smallest >= 0.1 else 4
    return lambda loss: "–" if loss is None else f"{loss:.{decimals}f}"


def number(result: Result, key: str) -> float | None:
    """A setting that is a number; None when it is missing or anything else."""
    value = result.settings.get(key)
    return float(value) if isinstance(value, (int, float)) else None


def bandwidth(result: Result) -> str:
    """Like "100 Mbit/s"; empty where the network has no limit."""
    bits = number(result, "bandwidth")
    return format_rate(bits) if bits and math.isfinite(bits) else ""


def network(result: Result) -> str:
    """The network in words: hosts, bandwidth, latency, and whether it was emulated or throttled."""
    parts = []
    hosts, each = number(result, "hosts"), number(result, "per_host")
    if hosts is not None:
        processes = f" × {each:.0f} process{'es' * (each != 1)}" if each is not None else ""
        parts.append(f"{hosts:.0f} host{'s' * (hosts != 1)}{processes}")
    size = number(result, "group_size")
    parts.append(f"groups of {size:.0f}" if size else "")
    parts.append(bandwidth(result))
    for host, bits in _by_host(result, "host_bandwidth"):
        parts.append(f"host {host}: {format_rate(bits)}")
    for host, factor in _by_host(result, "slow_hosts"):
        parts.append(f"host {host} computes {brief(factor)} times as long")
    latency = number(result, "latency")
    parts.append(f"{brief(latency * 1e3)} ms latency" if latency else "")
    if result.settings.get("network") == "throttled":
        parts.append("throttled link: this system does not permit network namespaces")
    elif result.settings.get("network") == "emulated":
        parts.append("emulated with network namespaces")
    return ", ".join(part for part in parts if part)


def _by_host(result: Result, key: str) -> list[tuple[str, float]]:
    """A setting that single hosts have."""
    values = result.settings.get(key)
    items = values.items() if isinstance(values, dict) else ()
    return sorted(items, key=lambda item: int(item[0]))


def task(result: Result) -> str:
    """The workload in words: name, data, parameters, what each recipe was given, seed."""
    parts = []
    workload, data = result.settings.get("workload"), result.settings.get("data")
    if workload is not None:
        parts.append(f"workload {workload}" + (f" ({data})" if data else ""))
    parameters, seconds = number(result, "parameters"), number(result, "seconds")
    parts.append(f"{parameters:,.0f} parameters" if parameters else "")
    steps = number(result, "steps")
    if seconds:
        parts.append(f"{brief(seconds)} s per recipe")
    elif steps:
        parts.append(f"{steps:,.0f} steps per recipe")
    parts.append(_runs(result))
    return ", ".join(part for part in parts if part)


def _runs(result: Result) -> str:
    """How often each recipe ran."""
    counts = {len(runs) for runs in grouped(result.rows) if runs[0].status != "absent"}
    if max(counts, default=1) == 1:
        seed = number(result, "seed")
        return "one run each" + (f", seed {seed:.0f}" if seed is not None else "")
    least, most = min(counts), max(counts)
    seeds = ", ".join(map(str, dict.fromkeys(row.seed for row in result.rows)))
    return f"{most if least == most else f'{least} to {most}'} runs each, seeds {seeds}"


def megabytes_per_step(row: Row) -> float:
    """What each host sent per step: payload, or of a peer all that its interface counted;
    announcements of a few bytes are nothing."""
    sent = row.interface_bytes_per_step if row.peer else row.ledger_bytes_per_step
    megabytes = (sent or 0.0) / 1e6
    return megabytes if megabytes >= 5e-5 else 0.0


def differences(result: Result) -> list[str]:
    """In what the runs differ that were joined, a line for each; empty for a single run."""
    runs = result.settings.get("runs")
    if not isinstance(runs, dict):
        return []
    lines = []
    for source, settings in runs.items():
        hidden = {"seed"} if settings.get("seeds") else set()  # it is the first of them
        known = {k: v for k, v in settings.items() if v is not None and k not in hidden}
        told = ", ".join(f"{key.replace('_', ' ')} {_told(key, known[key])}" for key in known)
        lines += [f"[{source}]: {told}"] if told else []
    return lines


def _told(key: str, value: object) -> str:
    if isinstance(value, dict):
        parts = (f"{_told(key, item)} of host {host}" for host, item in value.items())
        return ", ".join(parts) or "alike"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if key.endswith("bandwidth") and isinstance(value, (int, float)) and math.isfinite(value):
        return format_rate(value)
    if key == "latency" and isinstance(value, (int, float)):
        return f"{brief(value * 1e3)} ms"
    return brief(value) if isinstance(value, float) else str(value)


def reason(row: Row) -> str:
    """Why a row has no result, in one line: "diverged: ...". Empty for a row that finished."""
    if row.status == "ok":
        return ""
    lines = (row.error or "").strip().splitlines()
    return row.status + (f": {shorten(lines[0], 160, placeholder=' …')}" if lines else "")
