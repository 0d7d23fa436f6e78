"""Defaults in the reference's tables and signatures as their values, and not as names of constants.

An extension of griffe, which mkdocstrings uses to read the sources (mkdocs.yml).
"""

from __future__ import annotations

import ast
import importlib
from typing import Any

import griffe


class Defaults(griffe.Extension):
    """Replaces defaults that are names, such as ``TIMEOUT``, by their values."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        for parameter in func.parameters:
            parameter.default = _value(func.module.path, parameter.default)


def _value(module: str, default: Any) -> Any:
    if default is None:
        return None
    try:
        ast.literal_eval(str(default))
    except ValueError:  # a name, or more
        value = vars(importlib.import_module(module)).get(str(default))
        return repr(value) if isinstance(value, (bool, float, int, str)) else default
    return default
