"""What an advice consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from laconic.units import three_digits


@dataclass(frozen=True)
class Row:
    """The prediction for a recipe.

    ``seconds``: per step. ``hidden``: share of communication that overlaps with training.
    ``megabytes``: sent per step to other workers by a rank. ``memory``: bytes that rounds keep on a
    rank. ``speedup``: relative to DDP. ``share``: of the speed without communication. ``steps``:
    needed per step of DDP. ``steps_from``: the source of ``steps``, from `steps_of`; or that they
    are unknown and count as 1. ``quality``: what the literature or this repository says. ``own``:
    whether the user asked for the recipe.
    """

    recipe: str
    period: int | None
    seconds: float
    hidden: float
    megabytes: float
    memory: float
    speedup: float
    share: float
    steps: float
    steps_from: str
    quality: str
    own: bool = False

    @property
    def progress(self) -> float:
        """Progress per second relative to DDP: its seconds, over ``seconds * steps``."""
        return self.speedup / self.steps


@dataclass(frozen=True)
class Guide:
    """fairscale's rule of thumb for one ``frequency`` H.

    Local SGD, with free slow steps, is faster than DDP if

        allreduce * (1 - 1/H) > backward + node         average within a node after backward
        allreduce * (1 - 1/H) > max(backward, node)     average during backward, as laconic does

    All values are in seconds: ``allreduce`` of the model over the nodes, ``backward`` of a step,
    and ``node``, an average of gradients inside a node, with the buckets of the rows. ``saved`` is
    the left side. For SGP the guide uses H = 2, which is 2(n-1)/n for many nodes.
    """

    frequency: float
    allreduce: float
    backward: float
    node: float

    @property
    def saved(self) -> float:
        return self.allreduce * (1 - 1 / self.frequency)

    @property
    def pays_there(self) -> bool:
        """Whether it is faster with fairscale."""
        return self.saved > self.backward + self.node

    @property
    def pays_here(self) -> bool:
        """Whether it is faster with laconic."""
        return self.saved > max(self.backward, self.node)


@dataclass(frozen=True)
class Slow:
    """A rank that the others wait for.

    ``what``: "steps" if its steps take ``factor`` times as long as the median rank's, "network" if
    its network is so many times slower. ``ddp``: seconds per step of ddp(), and ``ddp_without`` if
    the rank were as fast as the median rank. ``gain``: how many times as many steps all ranks
    together would take if none waited for slower ones; None for a network. ``ranks``: how many
    ranks were compared.
    """

    rank: int
    what: Literal["steps", "network"]
    factor: float
    ddp: float
    ddp_without: float
    gain: float | None
    ranks: int

    def __str__(self) -> str:
        """Return a sentence."""
        factor = f"{self.factor:.2g} times"
        waiting = (
            f"a step of ddp() takes {three_digits(self.ddp)} s because the others wait for it, and "
            f"would take {three_digits(self.ddp_without)} s otherwise"
        )
        if self.gain is None:
            return (
                f"The network of rank {self.rank} is {factor} slower than the median rank's: "
                f"{waiting}."
            )
        other = "the median rank" if self.ranks > 2 else f"rank {1 - self.rank}"
        return (
            f"Rank {self.rank} computes {factor} as long as {other}: {waiting}. If none waited, "
            f"all together would take {self.gain:.2g} times as many steps per second."
        )
