"""With whom a message is exchanged and how it is encoded."""

from laconic.exchanges.alone import Alone
from laconic.exchanges.coded import CodedMean, GatheredMean, coded
from laconic.exchanges.demo import FastComponents
from laconic.exchanges.leader import Leader
from laconic.exchanges.low_rank import LowRank
from laconic.exchanges.mean import Mean, ShardedMean
from laconic.exchanges.push import Push

__all__ = [
    "Alone",
    "CodedMean",
    "FastComponents",
    "GatheredMean",
    "Leader",
    "LowRank",
    "Mean",
    "Push",
    "ShardedMean",
    "coded",
]
