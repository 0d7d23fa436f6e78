"""Read a cluster from a file in YAML or JSON. Errors name the file, the line and the field."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, TypeVar

from laconic.advisor.plan.cluster import Cluster, Failures, Path, Site
from laconic.errors import check_choice, did_you_mean, install
from laconic.units import parse_count, parse_duration, parse_rate, parse_share

T = TypeVar("T")

EXAMPLE = """\
# A cluster for: laconic plan --cluster FILE
parameters: 1b        # of the model
dtype: float32        # of parameters and messages
step: 1s              # computing, of one step on one worker
spread: 5%            # standard deviation of step times, relative to their mean
latency: 40ms         # one way, between sites; half of a ping
loss: 0%              # packets that are lost
tokens: 64k           # of one worker in one step, for the expected loss

sites:
  - name: paris
    workers: 3
    rate: 1gbit       # at which each worker sends
    uplink: 500mbit   # shared by its workers, toward other sites; leave out if it is not limited
    download: 1gbit   # at which each worker receives; leave out if it is as it sends
    price: 2.0        # of a worker per hour
  - {name: oslo, workers: 3, rate: 1gbit, uplink: 500mbit, price: 1.8}
  - {name: ohio, workers: 2, rate: 1gbit, uplink: 500mbit, price: 2.5, step: 1.2s}

links:                # where a connection differs from the others
  - {between: [paris, oslo], latency: 15ms}

failures:
  mtbf: 30d           # between two failures of one worker
  repair: 10min       # until a machine is back
  restart: 30s        # until its process runs
  policy: elastic     # or static, with a checkpoint

prices:
  gigabyte: 0.05      # that leaves a site
"""
"""What ``laconic plan --example`` prints."""


def read(path: FilePath) -> Cluster:
    """Return the cluster that the file describes. Raises ``ValueError`` for one that is none."""
    text = path.read_text(encoding="utf-8")
    if path.suffix.lower() == ".json":
        try:
            return of(json.loads(text), str(path))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from None
    values, lines = _yaml(text, path)
    return of(values, str(path), lines)


def of(values: Any, name: str = "cluster", lines: Mapping[str, int] | None = None) -> Cluster:
    """Return the cluster that ``values`` describe, as from JSON. ``name`` and ``lines`` are for
    errors: of what, and where each field is."""
    top = _Fields(values, "", name, lines or {})
    prices = top.section("prices")
    hour = prices.take("worker_hour", _number, 0.0)
    fails = top.section("failures")
    sites = tuple(_site(each, hour) for each in top.sections("sites"))
    names = [site.name for site in sites]
    cluster = top.make(
        Cluster,
        parameters=top.need("parameters", parse_count),
        sites=sites,
        links=tuple(_link(each, names) for each in top.sections("links", needed=False)),
        failures=_failures(fails),
        gigabyte=prices.take("gigabyte", _number, 0.0),
        **top.given(
            step=parse_duration,
            dtype=str,
            spread=_share,
            distribution=str,
            backward=_share,
            latency=parse_duration,
            jitter=parse_duration,
            loss=parse_share,
            tokens=parse_count,
            chips=parse_count,
            slices=parse_count,
        ),
    )
    for each in (prices, fails, top):
        each.end()
    return cluster


def _site(fields: _Fields, hour: float) -> Site:
    site = fields.make(
        Site,
        name=fields.need("name", str),
        workers=fields.need("workers", parse_count),
        rate=fields.need("rate", parse_rate),
        price=fields.take("price", _number, hour),
        **fields.given(
            uplink=parse_rate,
            download=parse_rate,
            latency=parse_duration,
            step=parse_duration,
        ),
    )
    fields.end()
    return site


def _link(fields: _Fields, names: Sequence[str]) -> Path:
    link = fields.make(
        Path,
        between=fields.need("between", _Pair(names)),
        **fields.given(latency=parse_duration, rate=parse_rate),
    )
    fields.end()
    return link


def _failures(fields: _Fields) -> Failures:
    return fields.make(
        Failures,
        **fields.given(
            mtbf=parse_duration,
            repair=parse_duration,
            repairs=str,
            restart=parse_duration,
            detection=parse_duration,
            policy=str,
            checkpoint=parse_count,
            save=parse_duration,
            min_workers=parse_count,
            reconfigure=parse_duration,
        ),
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"not a number: {text!r}; give one such as 2.5") from None


def _share(text: str) -> float:
    return parse_share(text)


class _Pair:
    """Parses the names of two of the sites."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def __call__(self, value: Any) -> tuple[str, str]:
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
            raise ValueError(f"must be the names of two sites, such as [a, b], not {value!r}")
        first, second = (check_choice("site", str(each), self._names) for each in value)
        return first, second


class _Fields:
    """The fields of one part of a file."""

    def __init__(self, values: Any, path: str, name: str, lines: Mapping[str, int]) -> None:
        self._path, self._name, self._lines = path, name, lines
        if not isinstance(values, Mapping):
            raise self._error("", f"must have fields with values, not be {values!r}")
        self._values = dict(values)
        self._known: list[str] = []

    def _error(self, key: str, text: str) -> ValueError:
        where = ".".join(part for part in (self._path, key) if part)
        line = self._lines.get(where, self._lines.get(self._path))
        at = f"{self._name}, line {line}" if line is not None else self._name
        return ValueError(f"{at}: {where}: {text}" if where else f"{at}: {text}")

    def take(self, key: str, parse: Callable[[Any], T], default: T) -> T:
        """Return a field, or the ``default`` if it is not there."""
        self._known.append(key)
        return self._parsed(key, parse) if key in self._values else default

    def need(self, key: str, parse: Callable[[Any], T]) -> T:
        """Return a field that must be there."""
        self._known.append(key)
        if key not in self._values:
            raise self._error("", f"{key} is missing")
        return self._parsed(key, parse)

    def given(self, **parsers: Callable[[Any], Any]) -> dict[str, Any]:
        """Return those of these fields that are there."""
        self._known += parsers
        return {k: self._parsed(k, parse) for k, parse in parsers.items() if k in self._values}

    def _parsed(self, key: str, parse: Callable[[Any], T]) -> T:
        value = self._values[key]
        if isinstance(value, bool) or value is None or isinstance(value, Mapping):
            raise self._error(key, f"must be a number or text, not {value!r}")
        text = value if isinstance(parse, _Pair) else str(value)
        try:
            return parse(text)
        except ValueError as error:
            raise self._error(key, str(error)) from None

    def make(self, kind: Callable[..., T], **fields: Any) -> T:
        """Return a ``kind`` of these fields; its errors begin with a field's name."""
        try:
            return kind(**fields)
        except ValueError as error:
            key, _, rest = str(error).partition(" ")
            raise self._error(key if key in self._values else "", rest or key) from None

    def section(self, key: str) -> _Fields:
        """Return a part with fields of its own; without any if it is not there."""
        self._known.append(key)
        path = f"{self._path}.{key}" if self._path else key
        return _Fields(self._values.get(key, {}), path, self._name, self._lines)

    def sections(self, key: str, *, needed: bool = True) -> list[_Fields]:
        """Return a list of parts."""
        self._known.append(key)
        values = self._values.get(key)
        if values is None and not needed:
            return []
        if not isinstance(values, list) or (needed and not values):
            raise self._error(key, f"must be a list of {key}, each with fields")
        return [
            _Fields(each, f"{key}[{k}]", self._name, self._lines) for k, each in enumerate(values)
        ]

    def end(self) -> None:
        """Raise ``ValueError`` for a field that nothing reads."""
        unknown = next((key for key in self._values if key not in self._known), None)
        if unknown is not None:
            choices = ", ".join(sorted(self._known))
            meant = did_you_mean(unknown, self._known)
            raise self._error(str(unknown), f"unknown field{meant}: choose from {choices}")


def _yaml(text: str, path: FilePath) -> tuple[Any, dict[str, int]]:
    """Return the values of a file in YAML, with numbers as text, and the line of each field."""
    try:
        import yaml
    except ImportError:
        raise ImportError(
            f"{path}: YAML needs PyYAML: {install('plan')}; or write the same in JSON"
        ) from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = "" if mark is None else f", line {mark.line + 1}"
        raise ValueError(f"{path}{at}: {error.problem}") from None
    if node is None:
        raise ValueError(f"{path} is empty: see laconic plan --example")
    lines: dict[str, int] = {}

    def plain(node: Any, at: str) -> Any:
        lines.setdefault(at, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            found = {}
            for key, value in node.value:
                where = f"{at}.{key.value}" if at else str(key.value)
                lines[where] = key.start_mark.line + 1
                found[str(key.value)] = plain(value, where)
            return found
        if isinstance(node, yaml.SequenceNode):
            return [plain(each, f"{at}[{k}]") for k, each in enumerate(node.value)]
        return None if node.tag.endswith(":null") else node.value

    return plain(node, ""), lines
