"""Other libraries that race against laconic's recipes, in the same training loop.

An adapter is a file that defines a function ``peer``. Its arguments are the options of the row, and
it returns a `Rival`. The repository's adapters are in ``benchmarks/peers``. They are used for
measurements and are not part of the library.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.algorithms.parse import parse_call
from laconic.algorithms.round import Recipe
from laconic.lab.race import user_files

ADAPTERS = Path(__file__).resolve().parents[4] / "benchmarks" / "peers"


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Attached:
    """A model that another library trains.

    ``model`` computes the loss; it may be wrapped. ``step`` runs the optimizer's step and
    everything the library does after it. ``consensus`` returns the consensus in the order of the
    model's parameters, or None for the mean of the workers. ``close`` releases resources.
    """

    model: nn.Module
    step: Callable[[], object]
    consensus: Callable[[], Sequence[Tensor] | None] = _nothing
    close: Callable[[], None] = _nothing


@dataclass(frozen=True)
class Rival:
    """Another library's way of training.

    ``package`` is the requirement to install, as for pip. ``rounds`` is a recipe that communicates
    at the same steps, after which the race validates. ``attach`` applies the library to a model and
    its optimizer, in an existing process group.
    """

    package: str
    rounds: Recipe
    attach: Callable[[nn.Module, Optimizer], Attached]

    def version(self) -> str | None:
        """Return the installed version of the package, or None."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return None

    @property
    def name(self) -> str:
        """The package name without its version."""
        return self.package.partition("==")[0]


def find(text: str) -> Rival:
    """Return the library that ``text`` names: an adapter of the repository, or a file.

    ``text`` may have options, as in ``torch-postlocal(period=24)``. Raises ``ValueError`` for
    anything else.
    """
    name, parenthesis, options = text.strip().partition("(")
    path = Path(name) if name.endswith(".py") else ADAPTERS / f"{name.replace('-', '_')}.py"
    if not name.endswith(".py"):
        if not ADAPTERS.is_dir():
            raise ValueError(
                f"no peer {name!r}: the adapters are in benchmarks/peers of laconic's repository, "
                "which this installation lacks; give a file, such as --peer ADAPTER.py"
            )
        names = [p.stem.replace("_", "-") for p in ADAPTERS.glob("[!_]*.py")]
        if name not in names:
            raise ValueError(f"no peer {name!r}: choose from {', '.join(sorted(names))}")
    function = getattr(user_files.load(path, importable=False), "peer", None)
    if not callable(function):
        raise ValueError(f"{path} has no function 'peer'")
    rival = parse_call(f"{path.stem}{parenthesis}{options}", {path.stem: function}, "peer")
    if not isinstance(rival, Rival):
        raise ValueError(f"{path}: peer must return a laconic.lab.race.rivals.Rival, not {rival!r}")
    return rival
