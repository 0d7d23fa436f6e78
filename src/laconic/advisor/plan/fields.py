"""Read a cluster from a file in YAML or JSON. Errors name the file and the field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from laconic.advisor.plan.cluster import Cluster, Failures, Site
from laconic.errors import did_you_mean, install
from laconic.units import parse_count, parse_duration, parse_rate, parse_share

T = TypeVar("T")

EXAMPLE = (files("laconic.advisor.plan") / "example.yaml").read_text(encoding="utf-8")
"""What ``laconic plan --example`` prints."""


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise ValueError(f"not a price: {text!r}; give a number from 0 up, such as 2.5")
    return price


PARSERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("name", "dtype", "policy"), str),
    **dict.fromkeys(("params", "workers", "checkpoint", "min_workers"), parse_count),
    **dict.fromkeys(("bandwidth", "uplink", "download"), parse_rate),
    **dict.fromkeys(
        ("step_time", "latency", "jitter", "mtbf", "repair", "restart"), parse_duration
    ),
    **dict.fromkeys(("detection", "save"), parse_duration),
    **dict.fromkeys(("spread", "backward_share", "loss"), parse_share),
    **dict.fromkeys(("price", "egress"), _price),
}
"""How each field is read, in whatever part of the file it is."""


def read(path: Path) -> Cluster:
    """Return the cluster that the file describes. Raises ``ValueError`` for one that is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file in UTF-8") from None
    return of(_json(text, path) if path.suffix.lower() == ".json" else _yaml(text, path), str(path))


def of(values: Any, name: str = "cluster") -> Cluster:
    """Return the cluster that ``values`` describe, as from JSON. ``name`` is for errors."""
    top = dict(_mapping(values, name, ""))
    about = top.pop("failures", {})
    failures = _made(Failures, about, name, "failures.")
    if about and "mtbf" not in about:
        raise ValueError(
            f"{name}: failures has no effect without failures.mtbf, the mean time between two "
            "failures of one worker, such as 30d"
        )
    sites = top.pop("sites", None)
    if not isinstance(sites, list):
        raise ValueError(f"{name}: sites must be a list of sites, each with fields")
    known = [_made(Site, site, name, f"sites[{k}].") for k, site in enumerate(sites)]
    return _made(Cluster, top, name, "", sites=tuple(known), failures=failures)


def _mapping(values: Any, name: str, where: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        part = where.rstrip(".") or "the file"
        raise ValueError(f"{name}: {part} must have fields with values, not be {values!r}")
    return values


def _parsed(values: Any, name: str, where: str, names: list[str]) -> dict[str, Any]:
    """Return the fields of one part of the file. ``where``: what comes before a field's name."""
    found = {}
    for key, value in _mapping(values, name, where).items():
        if key not in names:
            meant = did_you_mean(key, names)
            raise ValueError(
                f"{name}: unknown field {where}{key}{meant}: choose from {', '.join(names)}"
            )
        if not isinstance(value, (str, int, float)) or isinstance(value, bool):
            raise ValueError(f"{name}: {where}{key}: must be a number or text, not {value!r}")
        try:
            found[key] = PARSERS[key](str(value))
        except ValueError as error:
            raise ValueError(f"{name}: {where}{key}: {error}") from None
    return found


def _made(kind: Callable[..., T], values: Any, name: str, where: str, **more: Any) -> T:
    """Return a ``kind`` with the fields in ``values`` and ``more``."""
    every = fields(kind)  # type: ignore[arg-type]
    found = {**more, **_parsed(values, name, where, [f.name for f in every if f.name in PARSERS])}
    for field in every:
        if field.default is field.default_factory is MISSING and field.name not in found:
            raise ValueError(f"{name}: {where}{field.name} is missing")
    try:
        return kind(**found)
    except ValueError as error:  # begins with the name of a field
        raise ValueError(f"{name}: {where}{error}") from None


def _json(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from None


def _yaml(text: str, path: Path) -> Any:
    """Return the values of a file in YAML, with numbers as text."""
    try:
        import yaml
    except ImportError:
        raise ImportError(
            f"{path}: YAML needs PyYAML: {install('plan')}; or write the same in JSON"
        ) from None
    try:
        return yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = "" if mark is None else f", line {mark.line + 1}"
        raise ValueError(f"{path}{at}: {getattr(error, 'problem', 'not YAML')}") from None
