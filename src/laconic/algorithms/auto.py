"""The recipe `auto`, which `laconic.policy` chooses while training goes on."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.algorithms.named import named
from laconic.errors import check_bool, check_float


@dataclass(frozen=True)
class Auto:
    """The result of `laconic.auto`, in place of a recipe, which is chosen during training."""

    target: float | None = None
    outer: bool = True

    @property
    def text(self) -> str:
        """The call that makes it."""
        options = [] if self.target is None else [f"target={self.target:g}"]
        options += [] if self.outer else ["outer=False"]
        return f"auto({', '.join(options)})"


@named
def auto(target: float | None = None, *, outer: bool = True) -> Auto:
    """Measure the first steps and the network, then choose codec, period and overlap.

    Choose again when they change. Every rank makes the same choice. The logger ``laconic`` and
    `Synchronizer.choices` give the reasons. The candidates are `ddp` with and without codecs, and,
    with Int4 and a delay that hides their messages, `local_sgd` every two steps and
    `streaming_diloco` for several periods. For optimizers of Adam's kind and SGD, where most
    elements are in matrices, `ddp` also has an `outer_step`, and `streaming_diloco` takes its own,
    in Muon's direction.

    Args:
        target: the least speed, as a share in (0, 1] of the speed without communication. Only
            recipes that are predicted to reach it are considered, or the fastest one if none does.
            None: the recipe with the most progress per second, even if its steps are slower.
        outer: whether to take outer steps in Muon's direction, a second optimizer beside yours.
            They change the effective learning rate: try lower and higher ones. False: `ddp` has
            none, and those of `streaming_diloco` are Nesterov's.

    Examples:
        >>> sync = laconic.attach(model, optimizer, laconic.auto())
        >>> [choice.text for choice in sync.choices]  # one worker has nothing to choose
        []
    """
    if target is not None:
        check_float("target", target, 0.0, strict=True, most=1.0)
    return Auto(target, check_bool("outer", outer))
