"""Defaults in the reference's tables and signatures as their values, and not as names of constants.

An extension of griffe, which mkdocstrings uses to read the sources (mkdocs.yml).
"""

from __future__ import annotations

import importlib
from typing import Any

import griffe


class Defaults(griffe.Extension):
    """Replaces defaults that are constants, such as ``TIMEOUT``, by their values."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        for parameter in func.parameters:
            name = str(parameter.default)
            if name.isidentifier() and name.isupper():
                module = importlib.import_module(func.module.path)
                parameter.default = repr(vars(module)[name])
