"""The networks of the race: rate, latency, jitter, loss, and TCP's congestion control."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from laconic.lab.emulation import network as lab
from laconic.units import format_rate, parse_duration, parse_rate, parse_share

FORM = "RATE[/LATENCY[+-JITTER][/LOSS[/CONTROL]]]"
EXAMPLES = "50mbit, 50mbit/80ms, 50mbit/80ms+-10ms/0.1% or 50mbit/80ms/0.1%/bbr"
_PER_SECOND = re.compile(r"(?<=bit)/s(?=\s*(/|$))", re.IGNORECASE)
"""In a rate such as "50 Mbit/s"."""


@dataclass(frozen=True, order=True)
class Network:
    """A network between hosts.

    ``rate``: bit/s of each host. ``latency``: seconds that a packet and its answer take together;
    ``jitter``: seconds by which that varies; ``loss``: the share of packets that are lost each way.
    ``control``: the hosts' default congestion control of TCP; the lab's if empty.
    """

    rate: float
    latency: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    control: str = ""

    def of(self, hosts: int, seed: int = 0) -> lab.Network:
        """Return the lab's network. ``seed`` is that of jitter and loss."""
        values = self.rate, self.latency, self.jitter, self.loss
        return lab.Network(hosts, *values, seed=seed, congestion_control=self.control or None)

    @property
    def alone(self) -> Network:
        """The network with this rate and nothing else."""
        return Network(self.rate)

    @property
    def parts(self) -> tuple[str, ...]:
        """The rate, and what else there is, for display."""
        _, _, *words = str(self.of(1)).split(", ")
        words += [f"TCP {self.control}"] if self.control else []
        return (format_rate(self.rate), *words)

    def __str__(self) -> str:
        """Return the network for display, such as "50 Mbit/s, 80 ms latency, 0.1% loss"."""
        return ", ".join(self.parts)

    def document(self) -> dict[str, object]:
        """Return the network for a line of the journal."""
        fields = asdict(self)
        return {"bandwidth": fields.pop("rate"), **{k: v for k, v in fields.items() if v}}


def parse_network(text: str) -> Network:
    """Return the network `text`, such as "50mbit/80ms/0.1%": rate, latency, loss.

    Raises ``ValueError`` for anything else.
    """
    parts = _PER_SECOND.sub("", text).split("/")
    try:
        if len(parts) > 4 or not all(part.strip() for part in parts):
            raise ValueError(f"not a network: {text!r}")
        rate, delay, loss, control = [*parts, *("0", "0", "")[len(parts) - 1 :]]
        latency, _, jitter = delay.partition("+-")
        return Network(
            parse_rate(rate),
            parse_duration(latency),
            parse_duration(jitter or "0"),
            parse_share(loss),
            control.strip().lower(),
        )
    except ValueError as error:
        raise ValueError(f"{error}; a network is {FORM}, such as {EXAMPLES}") from None
