"""laconic: train PyTorch models data-parallel over slow networks by talking less."""

import ast
import pkgutil
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from laconic.version import __version__ as __version__

_IMPORTS = [
    node
    for node in ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"").body
    if isinstance(node, ast.ImportFrom)
]
MODULE_OF = {a.name: str(node.module) for node in _IMPORTS for a in node.names}
"""What users import from here, and the modules that define it. A module is imported when one of its
names is asked for: torch alone takes a second."""
del MODULE_OF["__version__"]

__all__ = sorted(MODULE_OF)


class _Package(ModuleType):
    """This package. Some of its functions have the name of the module that defines them, which
    would take their place when that module is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and MODULE_OF.get(name) == f"{__name__}.{name}"):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """By name, as other modules: Ray and others send functions that use ``laconic``."""
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    module = MODULE_OF.get(name, __name__)
    if module != __name__ and hasattr(import_module(module), name):
        value = getattr(import_module(module), name)
    elif not name.startswith("_") and find_spec(f"{module}.{name}") is not None:
        value = import_module(f"{module}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
