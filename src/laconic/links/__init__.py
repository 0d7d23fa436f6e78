"""Links: the only seam between an algorithm and the network."""

from laconic.links.link import Link
from laconic.links.metered import Ledger, Metered
from laconic.links.simulation import simulate
from laconic.links.throttled import Throttled
from laconic.links.torch_link import TorchLink, world_link

__all__ = ["Ledger", "Link", "Metered", "Throttled", "TorchLink", "simulate", "world_link"]
