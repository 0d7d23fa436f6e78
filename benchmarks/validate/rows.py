"""The recipes and networks to predict and measure."""

from __future__ import annotations

from dataclasses import dataclass

ROWS = (
    "ddp()",
    "ddp(codec='int4')",
    "local_sgd(4)",
    "local_sgd(16)",
    "slowmo(local_sgd(4), period=8, momentum=0.2)",
    "slowmo(local_sgd(4), period=32, momentum=0.2)",
    "sgp()",
    "sgp(delay=1)",
    "diloco(8, momentum=0.3)",
    "diloco(32, momentum=0.3)",
    "streaming_diloco(8, 4, 1, codec='int4')",
    "streaming_diloco(32, 4, 2, codec='int4')",
)
"""Six recipes with two settings each of the codec, the period or the delay."""
HOSTS = (2, 3, 4)
RATES = (20e6, 100e6, 500e6)
"""In bit/s."""


@dataclass(frozen=True, order=True)
class Network:
    """``hosts`` with ``per_host`` processes each, joined at ``rate`` bit/s."""

    per_host: int
    hosts: int
    rate: float


def networks(per_host: int = 1) -> list[Network]:
    """All of them."""
    return [Network(per_host, hosts, rate) for hosts in HOSTS for rate in RATES]


QUICK = Network(1, 4, 100e6)
