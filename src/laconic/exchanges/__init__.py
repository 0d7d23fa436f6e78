"""With whom a message is exchanged and how it is encoded."""

from laconic.exchanges.alone import Alone
from laconic.exchanges.leader import Leader
from laconic.exchanges.mean import Mean, ShardedMean
from laconic.exchanges.push import Push

__all__ = ["Alone", "Leader", "Mean", "Push", "ShardedMean"]
