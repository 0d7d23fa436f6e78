"""Where the advisor measures, and how its ranks meet: an error on one of them is one on all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.errors import LinkError, in_words
from laconic.links.link import Link

MOST_FIGURES = 6
"""That a rank brings to a meeting."""
MOST_BYTES = 512
"""Of an error's words that other ranks are told."""


class FailedError(ValueError):
    """Something failed on one rank or more; all ranks raise it, in the same words."""


@contextmanager
def named(what: str) -> Iterator[None]:
    """An error inside is told as one of ``what``."""
    try:
        yield
    except (LinkError, FailedError):
        raise
    except Exception as error:
        raise RuntimeError(f"{what} raised {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Bench:
    """Where to measure: the links of all ranks, of one rank of each worker, and of the own
    worker's; on ``device``."""

    world: Link
    workers: Link
    replica: Link
    device: torch.device

    def everyone(self, *figures: float) -> Tensor:
        """All ranks' figures, by rank; they meet here. Raises `FailedError` where one has failed in
        the meantime."""
        return self._meet(figures, None)

    def meet(self) -> None:
        """Wait for all ranks."""
        self.everyone()

    @contextmanager
    def together(self) -> Iterator[None]:
        """An error inside is told to the other ranks when they next meet, which all meetings of
        theirs until then must be inside of this as well."""
        try:
            yield
        except (LinkError, FailedError):
            raise  # the others know
        except Exception as error:
            try:
                self._meet((), in_words(error))
            except FailedError as told:
                raise told from error

    def _meet(self, figures: Sequence[float], problem: str | None) -> Tensor:
        """Of one width, whatever they are about, so that who failed can be at any of them."""
        row = [float(problem is not None), *figures, *[0.0] * (MOST_FIGURES - len(figures))]
        said = self.world.gather(torch.tensor(row, dtype=torch.float64, device=self.device)).cpu()
        failed = [rank for rank, value in enumerate(said[:, 0].tolist()) if value]
        if failed:
            who = ", ".join(map(str, failed))
            raise FailedError(f"rank {who}: {self._words(problem, failed[0])}")
        return said[:, 1 : 1 + len(figures)]

    def _words(self, problem: str | None, rank: int) -> str:
        """What that rank says went wrong."""
        own = " ".join((problem or "").split()).encode()[:MOST_BYTES].ljust(MOST_BYTES)
        rows = self.world.gather(torch.tensor(list(own), dtype=torch.uint8, device=self.device))
        return bytes(rows[rank].tolist()).decode(errors="ignore").strip()
