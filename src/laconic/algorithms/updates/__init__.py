"""The mathematics of rounds: one update per file, with the formula on the first line."""

from laconic.algorithms.updates.average import Average, Replace, RoundedAverage
from laconic.algorithms.updates.delayed_nesterov import DelayedNesterov
from laconic.algorithms.updates.elastic import Elastic
from laconic.algorithms.updates.leader_pull import LeaderPull
from laconic.algorithms.updates.mix import Mix
from laconic.algorithms.updates.muon_step import MuonStep
from laconic.algorithms.updates.outer_step import OuterStep
from laconic.algorithms.updates.own_step import OwnStep
from laconic.algorithms.updates.push_sum import PushSum
from laconic.algorithms.updates.slow_momentum import SlowMomentum, momentum_for

__all__ = [
    "Average",
    "DelayedNesterov",
    "Elastic",
    "LeaderPull",
    "Mix",
    "MuonStep",
    "OuterStep",
    "OwnStep",
    "PushSum",
    "Replace",
    "RoundedAverage",
    "SlowMomentum",
    "momentum_for",
]
