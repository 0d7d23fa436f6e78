"""Exchanges by themselves."""

from __future__ import annotations

from typing import Any

from laconic.algorithms.exchange import Arrival, Exchange
from laconic.links.link import complete, one_by_one


def sent_by(exchange: Exchange, link: Any, *at: Any) -> Arrival:
    """`Exchange.run` to its end."""
    return complete(exchange.run(one_by_one(link), *at))
