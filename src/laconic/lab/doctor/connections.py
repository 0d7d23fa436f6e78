"""Check how this host's connections to others are secured, and how they avoid congestion."""

from __future__ import annotations

from laconic.lab.doctor.finding import Finding
from laconic.links import congestion, job_secret, tls

GROUP = "connections"
BBR_REMEDY = (
    "load it on every host (modprobe tcp_bbr), and allow it to users: "
    'sysctl net.ipv4.tcp_allowed_congestion_control="reno cubic bbr"'
)


def connections() -> list[Finding]:
    """Return what laconic's own connections on this host use."""
    return [security(), congestion_control()]


def security() -> Finding:
    """Return whether TLS is on, and the secret is shared over the network."""
    try:
        found, secret = tls.contexts(), job_secret.read()
    except ValueError as error:
        return Finding("problem", GROUP, str(error), "correct the variable or the file")
    if found is not None:
        text = "TLS is on: what workers send can be neither read nor changed on the way"
    elif secret is not None:
        text = "TLS is off, and workers prove that they have the secret: packets can be read"
    else:
        text = "TLS is off: who reads packets can read the model, and can take a worker's place"
    return Finding("ok", GROUP, text)


def congestion_control() -> Finding:
    """Return which congestion control connections use."""
    try:
        name = congestion.chosen()
    except ValueError as error:
        return Finding("problem", GROUP, str(error), "correct the variable")
    if name:
        text = f"{congestion.VARIABLE}={name}: all connections use it"
    elif congestion.LONG in congestion.available():
        least = f"{1e3 * congestion.LONG_SECONDS:g} ms"
        text = f"connections with round trips of {least} or more use BBR, the others the system's"
    else:
        text = "BBR is not available: connections use the system's congestion control"
    return Finding("ok", GROUP, text)


def advice(round_trip: float, lost: float) -> Finding:
    """Return what connections use between hosts with this round trip in seconds, where this share
    of packets is ``lost``."""
    name = congestion.name_for(round_trip).upper() or "the system's congestion control"
    text = f"with round trips of {1e3 * round_trip:.3g} ms, laconic's connections use {name}"
    if round_trip >= congestion.LONG_SECONDS and congestion.LONG not in congestion.available():
        return Finding("warning", "between hosts", f"{text}, and BBR is not available", BBR_REMEDY)
    if lost > 0:
        text += f"; {100 * lost:.2g}% of the packets were sent again"
    return Finding("ok", "between hosts", text)
