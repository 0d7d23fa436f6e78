"""The result of a race between recipes, as data and as JSON.

Symbols: t, seconds of training without validation; MB, 10^6 bytes sent per host; loss, in nats, of
the consensus model on the validation set. A value that is not finite is None.

Two kinds of rows are shown for reference and do not compete. In the row without communication,
workers never communicate: it shows the compute time alone, and its loss is the mean of the workers'
own models. On a free network, a recipe shows what communication costs the others.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

NO_COMMUNICATION = "no communication"
"""Name of the row whose workers never communicate."""
FREE_NETWORK = ", free network"
"""End of the name of a row whose hosts are not slowed by a network."""


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _plain(value: object) -> object:
    """Convert to JSON types: nonfinite numbers become None, tuples lists, other objects text."""
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


@dataclass(frozen=True)
class Point:
    """One validation, after `seconds` of training and `megabytes` sent per host.

    `distance` is the distance of the workers' models from their mean just before the round that
    precedes the validation (`laconic.lab.race.entrant.Entrant.distance`).
    """

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


@dataclass(frozen=True)
class Row:
    """One recipe's run.

    Args:
        recipe: the recipe with its arguments, perhaps with `FREE_NETWORK`, or `NO_COMMUNICATION`.
        status: "absent" for what cannot run here, which is not a failure.
        error: why the run failed, diverged or is absent. Only the first line is shown.
        steps, seconds: length of the run on the training clock, the mean over workers.
        seconds_per_step: NaN if there is none.
        loss: final loss; None if it is not finite.
        ledger_bytes_per_step: payload sent per host, from laconic's ledger; NaN for other
        libraries. interface_bytes_per_step: bytes sent per host with headers, from the interface's
        counter. waiting: share of the time spent waiting for the network, 0 to 1; NaN for other
        libraries. curve: validations by time. notes: remarks shown below the table.
        seed: of the model and the batches. A recipe has one row per seed.
        peer: whether the row is another library, whose bytes are known from the interface only.
        worker_steps: by rank. They differ under a recipe whose rounds close with a quorum.
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
    seed: int = 0
    peer: bool = False
    worker_steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", _finite(self.loss))
        object.__setattr__(self, "interface_bytes_per_step", _finite(self.interface_bytes_per_step))

    @property
    def reference(self) -> bool:
        """Whether the row is shown for reference, and does not compete."""
        return self.recipe == NO_COMMUNICATION or self.free

    @property
    def free(self) -> bool:
        """Whether no network slowed the hosts."""
        return self.recipe.endswith(FREE_NETWORK)


@dataclass(frozen=True)
class Result:
    """A race: its rows and everything needed to repeat it.

    `settings` contains workload, parameters, hosts, per_host, bandwidth (bit/s), host_bandwidth
    (overrides for single hosts), slow_hosts (compute time factors), latency (s, of a round trip),
    jitter (s), loss (0 to 1), each with overrides such as host_latency, network_seed,
    congestion_control, group_size (workers), seconds or steps, seed, seeds (each recipe has a row
    per seed), network ("emulated" or "throttled"), lr_scale, data and rules. Texts omit a key that
    is missing or None. Values that JSON does not support become text.
    """

    rows: tuple[Row, ...]
    settings: dict[str, object]
    machine: dict[str, str]
    versions: dict[str, str]
    command: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", _plain(self.settings))

    def to_json(self) -> str:
        """Return standard JSON, in which a nonfinite number is null."""
        return json.dumps(_plain(asdict(self)), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Result:
        """Parse what `to_json` wrote. Raises `ValueError` for anything else."""
        try:
            fields = json.loads(text)
            rows = tuple(_row(row) for row in fields["rows"])
            return cls(**{**fields, "rows": rows})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"not the result of a race: {error}") from error


def _row(fields: dict[str, Any]) -> Row:
    # Files of earlier versions have more.
    fields = {k: v for k, v in fields.items() if k not in ("rounds", "source", "timeline")}
    numbers = ("seconds", "seconds_per_step", "ledger_bytes_per_step", "waiting")
    return Row(
        **{
            **fields,
            **{name: math.nan for name in numbers if fields[name] is None},
            "curve": tuple(Point(**point) for point in fields["curve"]),
            "notes": tuple(fields["notes"]),
            "worker_steps": tuple(fields.get("worker_steps", ())),
        }
    )


def read(path: Path) -> Result:
    """Read a result from a file, or from the `results.json` of a directory.

    Raises:
        ValueError: the file is missing or is not a result.
    """
    path = path / "results.json" if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
        return Result.from_json(text)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"cannot read a result from {path}: {reason}; give a directory that laconic compare "
            "has written"
        ) from error


Axis = Callable[[Point], float]
STEPS: Axis = attrgetter("step")
SECONDS: Axis = attrgetter("seconds")
MEGABYTES: Axis = attrgetter("megabytes")


def line(row: Row, axis: Axis) -> list[tuple[float, float]]:
    """Return the row's (position, loss) pairs along `axis` with a finite loss."""
    return [(axis(point), point.loss) for point in row.curve if point.loss is not None]


def repeats(result: Result) -> int:
    """Return the largest number of runs of a recipe."""
    return max(Counter((row.recipe, row.peer) for row in result.rows).values(), default=0)


def number(result: Result, key: str) -> float | None:
    """Return a setting that is a number, or None."""
    value = result.settings.get(key)
    return float(value) if isinstance(value, (int, float)) else None


def megabytes_per_step(row: Row) -> float:
    """Return the megabytes each host sent per step: payload, or for another library all traffic.

    Messages of a few bytes count as zero.
    """
    sent = row.interface_bytes_per_step if row.peer else row.ledger_bytes_per_step
    megabytes = (sent or 0.0) / 1e6
    return megabytes if megabytes >= 5e-5 else 0.0
