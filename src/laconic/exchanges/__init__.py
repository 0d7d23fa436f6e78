"""With whom a message is exchanged and how it is encoded."""

from laconic.exchanges.alone import Alone
from laconic.exchanges.mean import Mean, ShardedMean

__all__ = ["Alone", "Mean", "ShardedMean"]
