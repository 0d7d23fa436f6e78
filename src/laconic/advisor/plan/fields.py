"""Read a cluster from a file in YAML or JSON. Errors name the file, the line and the field."""

from __future__ import annotations

import json
import math
import re
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
latency: 80ms         # a round trip between sites, as ping shows it
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
  - {between: [paris, oslo], latency: 30ms}

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
    text = text_of(path)
    try:
        if path.suffix.lower() != ".json":
            values, lines = _yaml(text, path)
            return of(values, str(path), lines)
        return of(json.loads(text, object_pairs_hook=_different), str(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from None
    except _TwiceError as error:
        raise ValueError(f"{path}: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} has too many lists or fields inside each other") from None


def text_of(path: FilePath) -> str:
    """Return the text of a file. Raises ``ValueError`` if it is not in UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not a text file in UTF-8: byte {error.start + 1} cannot be read"
        ) from None


class _TwiceError(ValueError):
    """A field is given twice."""


def _different(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _TwiceError(f"{key} is given twice")
        found[key] = value
    return found


def of(values: Any, name: str = "cluster", lines: Mapping[str, int] | None = None) -> Cluster:
    """Return the cluster that ``values`` describe, as from JSON. ``name`` and ``lines`` are for
    errors: of what, and where each field is."""
    top = _Fields(values, "", name, lines or {})
    prices = top.section("prices")
    hour = prices.take("worker_hour", _price, 0.0)
    fails = top.section("failures")
    sites = tuple(_site(each, hour) for each in top.sections("sites"))
    names = [site.name for site in sites]
    gigabyte = prices.take("gigabyte", _price, 0.0)
    prices.end()
    return top.make(
        Cluster,
        parameters=top.need("parameters", parse_count),
        sites=sites,
        links=tuple(_link(each, names) for each in top.sections("links", needed=False)),
        failures=_failures(fails),
        gigabyte=gigabyte,
        **top.given(
            step=parse_duration,
            dtype=str,
            spread=parse_share,
            distribution=str,
            backward=parse_share,
            latency=parse_duration,
            jitter=parse_duration,
            loss=parse_share,
            tokens=parse_count,
            chips=parse_count,
            slices=parse_count,
        ),
    )


def _site(fields: _Fields, hour: float) -> Site:
    return fields.make(
        Site,
        name=fields.need("name", str),
        workers=fields.need("workers", parse_count),
        rate=fields.need("rate", parse_rate),
        price=fields.take("price", _price, hour),
        **fields.given(
            uplink=parse_rate,
            download=parse_rate,
            latency=parse_duration,
            step=parse_duration,
        ),
    )


def _link(fields: _Fields, names: Sequence[str]) -> Path:
    return fields.make(
        Path,
        between=fields.need("between", _Pair(names)),
        **fields.given(latency=parse_duration, rate=parse_rate),
    )


def _failures(fields: _Fields) -> Failures:
    found = fields.make(
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
    fields.check_with("mtbf", "the mean time between two failures of one chip, such as 30d")
    return found


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise ValueError(f"not a price: {text!r}; give a number from 0 up, such as 2.5")
    return price


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
        """Return a ``kind`` of these fields, which are all; its errors begin with a field's
        name."""
        try:
            made = kind(**fields)
        except ValueError as error:
            key, _, rest = str(error).partition(" ")
            if re.split(r"[.[]", key)[0] not in self._values:
                key, rest = "", str(error)
            raise self._error(key, rest) from None
        self.end()
        return made

    def check_with(self, key: str, what: str) -> None:
        """Raise ``ValueError`` if there are fields, and ``key``, which says ``what``, is not."""
        if self._values and key not in self._values:
            other = next(iter(self._values))
            raise self._error(other, f"has no effect without {self._path}.{key}, {what}")

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
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = f"U+{ord(text[error.position]):04X}"
        raise ValueError(
            f"{path}, line {line}: the character {character} is not allowed in YAML: remove it"
        ) from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {error}") from None
    if node is None:
        raise ValueError(f"{path} is empty: see laconic plan --example")
    lines: dict[str, int] = {}

    def plain(node: Any, at: str, above: tuple[Any, ...]) -> Any:
        lines.setdefault(at, node.start_mark.line + 1)
        if node in above:
            raise ValueError(f"{path}, line {lines[at]}: {at}: an alias (*) to a part it is in")
        above = (*above, node)
        if isinstance(node, yaml.MappingNode):
            found = {}
            for key, value in node.value:
                line = key.start_mark.line + 1
                name = name_of(key, line)
                where = f"{at}.{name}" if at else name
                if name in found:
                    raise ValueError(
                        f"{path}, line {line}: {where}: is given twice, first in line "
                        f"{lines[where]}"
                    )
                lines[where] = line
                found[name] = plain(value, where, above)
            return found
        if isinstance(node, yaml.SequenceNode):
            return [plain(each, f"{at}[{k}]", above) for k, each in enumerate(node.value)]
        return None if node.tag.endswith(":null") else node.value

    def name_of(key: Any, line: int) -> str:
        if not isinstance(key, yaml.ScalarNode):
            raise ValueError(
                f"{path}, line {line}: the name of a field must be text, not a list or fields"
            )
        if key.tag.endswith(":merge"):
            raise ValueError(
                f"{path}, line {line}: merge keys (<<) are not supported: write the fields here, "
                "or use an alias (*) to a whole part"
            )
        return str(key.value)

    return plain(node, "", ()), lines
