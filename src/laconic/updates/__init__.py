"""The mathematics of rounds: one file each, the formula on its first line."""

from laconic.updates.average import Average, Replace, RoundedAverage
from laconic.updates.eager import Eager
from laconic.updates.elastic import Downpour, Elastic
from laconic.updates.leader_pull import LeaderPull
from laconic.updates.mix import Mix
from laconic.updates.noloco import NoLoCo
from laconic.updates.outer_step import OuterStep
from laconic.updates.push_sum import PushSum
from laconic.updates.sign import Sign
from laconic.updates.slow_momentum import SlowMomentum, momentum_for

__all__ = [
    "Average",
    "Downpour",
    "Eager",
    "Elastic",
    "LeaderPull",
    "Mix",
    "NoLoCo",
    "OuterStep",
    "PushSum",
    "Replace",
    "RoundedAverage",
    "Sign",
    "SlowMomentum",
    "momentum_for",
]
