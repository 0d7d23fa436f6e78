"""Exchange measurements between ranks, and raise an error of one rank on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.errors import LinkError, error_text
from laconic.links.agreement import agree
from laconic.links.link import Link

MOST_FIGURES = 6
"""Maximum number of figures per rank and call."""


class FailedError(ValueError):
    """Something failed on at least one rank. All ranks raise it: see `agree`."""


@contextmanager
def error_context(what: str) -> Iterator[None]:
    """Attribute an error inside the block to ``what``."""
    try:
        yield
    except (LinkError, FailedError):
        raise
    except Exception as error:
        raise RuntimeError(f"{what} raised {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Bench:
    """The links to measure on: all ranks, one rank per worker, and the ranks of this worker."""

    world: Link
    workers: Link
    replica: Link
    device: torch.device

    def gather(self, *figures: float) -> Tensor:
        """Return all ranks' figures by rank. Raises `FailedError` if a rank has failed."""
        return self._gather(figures, None)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather()

    @contextmanager
    def shared_errors(self) -> Iterator[None]:
        """Raise an error inside the block on all ranks, at their next `gather` or `barrier`.

        Until then, all their calls must be inside this block as well.
        """
        try:
            yield
        except (LinkError, FailedError):
            raise  # the other ranks raise it too
        except Exception as error:
            try:
                self._gather((), error_text(error))
            except FailedError as failed:
                raise failed from error

    def _gather(self, figures: Sequence[float], problem: str | None) -> Tensor:
        """Gather rows of equal width for every call, since a failed rank may be at any of them."""
        row = [float(problem is not None), *figures, *[0.0] * (MOST_FIGURES - len(figures))]
        tensor = torch.tensor(row, dtype=torch.float64, device=self.device)
        gathered = self.world.gather(tensor).cpu()
        try:
            agree(self.world.gather, problem, gathered[:, 0])
        except ValueError as failed:
            raise FailedError(str(failed)) from None
        return gathered[:, 1 : 1 + len(figures)]
