"""A secret that all workers of a job have before they connect, from the file that
LACONIC_SECRET_FILE names.

Without it, one worker generates a secret and shares it over torch's store, where anyone who reads
packets can read it. With it, only a random salt is sent, and every worker derives
the same secrets from the file and the salt:

    secret = HMAC-SHA256(file, purpose, name, salt)

Workers compare their `fingerprint`, so that a wrong file raises an error that says so. It reveals
nothing about a secret of 32 random bytes, such as ``laconic keys`` makes.
"""

from __future__ import annotations

import hmac
import os

VARIABLE = "LACONIC_SECRET_FILE"
LEAST_BYTES = 16
_REMEDY = "give every worker the same file"


def read() -> bytes | None:
    """The secret; None: LACONIC_SECRET_FILE is not set. Raises ``ValueError`` if the file cannot be
    read or is too short."""
    path = os.environ.get(VARIABLE, "")
    if not path:
        return None
    found = read_file(VARIABLE, path).strip()
    if len(found) < LEAST_BYTES:
        raise ValueError(
            f"{path} ({VARIABLE}) has {len(found)} bytes, and a secret must have at least "
            f"{LEAST_BYTES}: `laconic keys` makes one"
        )
    return found


def read_file(variable: str, path: str) -> bytes:
    """What is in the file at ``path``, which a ``variable`` names. Raises ``ValueError``."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except (OSError, ValueError) as error:  # ValueError: a null character
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"cannot read {path} ({variable}): {reason}") from error


def derive(secret: bytes, purpose: str, name: str = "", salt: bytes = b"") -> bytes:
    """The secret for ``purpose``, and within it for ``name``."""
    parts = b"laconic", purpose.encode(), name.encode(), salt
    return hmac.digest(secret, b"".join(len(p).to_bytes(8, "big") + p for p in parts), "sha256")


def fingerprint() -> str:
    """A string that is equal for equal secrets; empty if LACONIC_SECRET_FILE is not set."""
    secret = read()
    return "" if secret is None else derive(secret, "fingerprint").hex()


def difference(who: str, own: str, first: str) -> str:
    """The error text for ``who``, whose fingerprint ``own`` differs from ``first``, that of the
    first worker."""
    if not own:
        return f"{who} has no {VARIABLE}, and the first worker has: {_REMEDY}"
    if not first:
        return f"{who} has {VARIABLE}, and the first worker has none: {_REMEDY}"
    return f"{who} has another secret in {VARIABLE} than the first worker: {_REMEDY}"
