"""With whom a message is exchanged, and how it is encoded."""

from laconic.algorithms.exchanges.coded import CodedMean, ReplicatedMean
from laconic.algorithms.exchanges.leader import Leader
from laconic.algorithms.exchanges.low_rank import LowRank
from laconic.algorithms.exchanges.mean import Alone, Identical, Mean, ShardedMean
from laconic.algorithms.exchanges.push import Push
from laconic.algorithms.exchanges.quorum import QuorumMean

__all__ = [
    "Alone",
    "CodedMean",
    "Identical",
    "Leader",
    "LowRank",
    "Mean",
    "Push",
    "QuorumMean",
    "ReplicatedMean",
    "ShardedMean",
]
