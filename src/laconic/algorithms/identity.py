"""Text that tells recipes apart, alike in every process."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType

ADDRESS = re.compile(r" at (0x[0-9a-fA-F]+)")


def plain(value: object) -> str:
    """``repr(value)`` without addresses. A function, and an object without a ``repr`` of its own,
    shows a hash instead: of its code, constants, and defaults, and of the numbers, strings, lists,
    and functions in its closure. Its bytecode depends on the version of Python."""
    text = repr(value)
    if not ADDRESS.search(text):
        return text
    hashes = {id(part): _hash(part) for part in _anonymous(value)}
    return ADDRESS.sub(lambda found: hashes.get(int(found[1], 16), ""), text)


def _hash(value: object) -> str:
    return " " + hashlib.sha256(_definition(value, {}).encode()).hexdigest()[:8]


def _anonymous(value: object) -> Iterator[object]:
    """The functions and objects in ``value`` whose ``repr`` has an address. laconic's own functions
    are told by their names."""
    own = str(getattr(value, "__module__", "")).startswith("laconic.")
    if (isinstance(value, FunctionType) and not own) or type(value).__repr__ is object.__repr__:
        yield value
    for part in _parts(value):
        yield from _anonymous(part)


def _parts(value: object) -> list[object]:
    """What ``value`` consists of."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, f.name) for f in dataclasses.fields(value)]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *_parts(value.keywords)]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, Mapping):
        return [part for item in value.items() for part in item]
    if type(value).__repr__ is object.__repr__:
        return _parts(getattr(value, "__dict__", {}))
    return list(value) if isinstance(value, (tuple, list)) else []


def _definition(value: object, seen: dict[int, int]) -> str:
    """What ``value`` is, and for a function what it does. What was ``seen`` before shows its number
    there."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__name__}"
    name, parts = f"{type(value).__name__} {getattr(value, '__qualname__', '')}", _parts(value)
    if id(value) in seen:
        return f"{name} {seen[id(value)]}"
    if isinstance(value, CodeType):
        parts = [value.co_code, value.co_names, *value.co_consts]
    elif isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        parts = [value.__code__, value.__defaults__, value.__kwdefaults__, *cells]
    if isinstance(value, FunctionType) or type(value).__repr__ is object.__repr__:
        seen[id(value)] = len(seen)
    return f"{name}({', '.join(_definition(part, seen) for part in parts)})"
