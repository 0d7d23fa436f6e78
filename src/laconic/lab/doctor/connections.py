"""Check how this host's connections to others are secured, and how they control congestion."""

from __future__ import annotations

from laconic.lab.doctor.finding import Finding
from laconic.links import congestion, job_secret, tls

GROUP = "connections"


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


def settings() -> dict[str, str]:
    """Return the settings of this host's connections, for comparison with other hosts.

    A value is "invalid" if this host's own findings include a problem with it.
    """
    found = {}
    for name, read in (
        ("TLS", _switch),
        ("secret", _fingerprint),
        (congestion.VARIABLE, congestion.chosen),
    ):
        try:
            found[name] = read()
        except ValueError:
            found[name] = "invalid"
    return found


def _switch() -> str:
    return "off" if tls.contexts() is None else "on"


def _fingerprint() -> str:
    return job_secret.fingerprint()[:16] or "none"
