"""Check how this host's connections to others are secured, and how they control congestion."""

from __future__ import annotations

from collections.abc import Callable

from laconic.lab.doctor.finding import Finding
from laconic.links import congestion, job_secret, tls

GROUP = "connections"


def connections() -> list[Finding]:
    """Return what laconic's own connections on this host use."""
    found = []
    for describe in (_security, _congestion_control):
        try:
            found.append(Finding("ok", GROUP, describe()))
        except ValueError as error:
            found.append(Finding("problem", GROUP, str(error), "correct the variable or the file"))
    return found


def _security() -> str:
    """Return whether TLS is on, and the secret is shared over the network."""
    found, secret = tls.contexts(), job_secret.read()
    if found is not None:
        return "TLS is on: what workers send can be neither read nor changed on the way"
    if secret is not None:
        return "TLS is off, and workers prove that they have the secret: packets can be read"
    return "TLS is off: who reads packets can read the model, and can take a worker's place"


def _congestion_control() -> str:
    return f"congestion control: {congestion.chosen() or 'by the round trip of each connection'}"


def settings() -> dict[str, str]:
    """Return the settings of this host's connections, for comparison with other hosts.

    A value is "invalid" if this host's own findings include a problem with it.
    """
    settings: dict[str, Callable[[], str]] = {
        "TLS": lambda: "off" if tls.contexts() is None else "on",
        job_secret.VARIABLE: lambda: job_secret.fingerprint()[:16] or "none",
        congestion.VARIABLE: lambda: congestion.chosen() or "none",
    }
    found = {}
    for name, read in settings.items():
        try:
            found[name] = read()
        except ValueError:
            found[name] = "invalid"
    return found
