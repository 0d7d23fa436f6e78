"""The mathematics: one update a file, the formula first."""

from laconic.updates.average import Average
from laconic.updates.outer_step import OuterStep
from laconic.updates.slow_momentum import SlowMomentum

__all__ = ["Average", "OuterStep", "SlowMomentum"]
