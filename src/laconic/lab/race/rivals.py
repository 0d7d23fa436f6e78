"""Other libraries in a race, beside laconic's recipes, in the same training loop.

An adapter is a file that defines ``peer``, a function whose arguments are the row's options and
which returns a `Peer`. Those of the repository lie in ``benchmarks/peers``: they are part of
measuring and not of the library.
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
    """A model in the hands of another library.

    ``model``: to compute the loss with, wrapped or not. ``step``: the optimizer's step and all
    that the library does after it. ``seek``: go on as if so many steps had been taken, so that
    single steps can be timed. ``consensus``: what the workers agree on, in the order of the
    model's parameters; None: the mean of theirs. ``close``: end what was started.
    """

    model: nn.Module
    step: Callable[[], object]
    seek: Callable[[int], None]
    consensus: Callable[[], Sequence[Tensor] | None] = _nothing
    close: Callable[[], None] = _nothing


@dataclass(frozen=True)
class Peer:
    """Another library's way of training. ``package``: what must be installed, as pip is told.
    ``rounds``: a recipe that communicates when it does, by which the race is planned.
    ``attach``: puts a model and its optimizer in its hands, in a process group that exists."""

    package: str
    rounds: Recipe
    attach: Callable[[nn.Module, Optimizer], Attached]

    def version(self) -> str | None:
        """Of the package, as installed here; None where it is not."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return None

    @property
    def name(self) -> str:
        """The package without its version."""
        return self.package.partition("==")[0]


def find(text: str) -> Peer:
    """The peer that ``text`` names: an adapter of the repository or a file, with or without
    options, as ``torch-postlocal(period=24)``. Raises ``ValueError`` for anything else."""
    name, parenthesis, options = text.strip().partition("(")
    path = Path(name) if name.endswith(".py") else ADAPTERS / f"{name.replace('-', '_')}.py"
    if not name.endswith(".py"):
        if not ADAPTERS.is_dir():
            raise ValueError(
                f"no peer {name!r} here: the adapters lie in benchmarks/peers of laconic's "
                "repository, which this installation is not in; give a file, --peer ADAPTER.py"
            )
        names = [p.stem.replace("_", "-") for p in ADAPTERS.glob("[!_]*.py")]
        if name not in names:
            raise ValueError(f"no peer {name!r}: choose from {', '.join(sorted(names))}")
    function = getattr(user_files.load(path, importable=False), "peer", None)
    if not callable(function):
        raise ValueError(f"{path} has no function 'peer'")
    peer = parse_call(f"{path.stem}{parenthesis}{options}", {path.stem: function}, "peer")
    if not isinstance(peer, Peer):
        raise ValueError(f"{path}: peer must return a laconic.lab.race.rivals.Peer, not {peer!r}")
    return peer
