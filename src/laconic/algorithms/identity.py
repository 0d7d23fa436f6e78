"""Text that tells recipes apart, alike in every process."""

from __future__ import annotations

import dataclasses
import dis
import functools
import hashlib
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace

ADDRESS = re.compile(r" at (0x[0-9a-fA-F]+)")


def plain(value: object) -> str:
    """``repr(value)`` without addresses. A function, and an object without a ``repr`` of its own,
    shows a hash instead: of its code, constants, and defaults, and of the numbers, strings,
    containers, and functions that it refers to. Its bytecode depends on the version of Python."""
    text = repr(value)
    if not ADDRESS.search(text):
        return text
    hashes = {id(part): _hash(part) for part in _anonymous(value)}
    return ADDRESS.sub(lambda found: hashes.get(int(found[1], 16), ""), text)


def _hash(value: object) -> str:
    return " " + hashlib.sha256(_definition(value, {}, ()).encode()).hexdigest()[:8]


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
    if isinstance(value, (Namespace, SimpleNamespace)) or type(value).__repr__ is object.__repr__:
        return _parts(getattr(value, "__dict__", {}))
    return list(value) if isinstance(value, (tuple, list, set, frozenset)) else []


def _definition(value: object, seen: dict[int, int], above: tuple[object, ...]) -> str:
    """What ``value`` is, and for a function what it does. A function that was ``seen`` before shows
    its number there, and what refers to itself (``above``) only its name."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, (type, ModuleType)):
        return f"{getattr(value, '__module__', '')}.{value.__name__}"
    name = f"{type(value).__name__} {getattr(value, '__qualname__', '')}"
    if id(value) in seen or any(value is other for other in above):
        return f"{name} {seen.get(id(value), '')}"
    parts = _parts(value)
    if isinstance(value, FunctionType):
        seen[id(value)] = len(seen)
        around = [value.__globals__.get(each) for each in _globals(value.__code__)]
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        parts = [value.__code__, value.__defaults__, value.__kwdefaults__, *around, *cells]
    elif isinstance(value, CodeType):
        names = value.co_names, value.co_varnames, value.co_freevars
        parts = [value.co_code, *names, *value.co_consts]
    if isinstance(value, (set, frozenset)):  # in an order that is the same in every process
        parts.sort(key=lambda part: _definition(part, dict(seen), (*above, value)))
    texts = [_definition(part, seen, (*above, value)) for part in parts]
    return f"{name}({', '.join(texts)})"


def _globals(code: CodeType) -> list[str]:
    """The names of globals that ``code`` reads."""
    found = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    for inner in code.co_consts:
        found |= {*_globals(inner)} if isinstance(inner, CodeType) else set()
    return sorted(found)
