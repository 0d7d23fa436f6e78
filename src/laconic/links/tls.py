"""The TLS settings of a job, from the environment variables of gloo's TLS transport.

GLOO_DEVICE_TRANSPORT=TCP_TLS or LACONIC_TLS=1 turns TLS on. The second does not affect torch's
gloo. torch's wheels build gloo without TLS, and such a gloo rejects the first. `contexts` reads the
variables and checks the files before any connection is made. A mistake raises an error that names
the variable and the file.
"""

from __future__ import annotations

import functools
import os
import ssl
from typing import Any, NamedTuple, NoReturn

from laconic.links import job_secret

TRANSPORT = "GLOO_DEVICE_TRANSPORT"
KEY, CERTIFICATE = "GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY", "GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT"
CA_FILE = "GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE"
ON = "TCP_TLS"
"""The value of `TRANSPORT` with which TLS is on."""
SWITCH = "LACONIC_TLS"


class Contexts(NamedTuple):
    """For the side that accepts a connection, and for the side that makes it."""

    server: ssl.SSLContext
    client: ssl.SSLContext


class _Socket(ssl.SSLSocket):
    """A socket that is always connected when it is wrapped. ``wrap_socket`` calls ``getpeername``
    to find out whether it is, and raises if the peer has already reset the connection. By then it
    owns the descriptor, which nobody can close. Here the handshake reports the reset instead."""

    def getpeername(self) -> Any:
        try:
            return super().getpeername()
        except OSError:
            return None


class Settings(NamedTuple):
    """The files that the variables name; the empty string where a variable is not set."""

    key: str
    certificate: str
    ca_file: str


def settings() -> Settings | None:
    """The settings of this process; None: TLS is off. Raises ``ValueError`` if TLS is on and a
    variable is missing."""
    by_gloo = os.environ.get(TRANSPORT, "").strip().upper() == ON
    by_switch = os.environ.get(SWITCH, "").strip()
    if by_switch not in ("", "0", "1"):
        raise ValueError(f"{SWITCH} must be 1 or 0, not {by_switch!r}")
    if not by_gloo and by_switch != "1":
        return None
    names = KEY, CERTIFICATE, CA_FILE
    found = Settings(*(os.environ.get(name, "") for name in names))
    missing = [name for name, value in zip(names, found, strict=True) if not value]
    if missing:
        raise ValueError(
            f"{TRANSPORT + '=' + ON if by_gloo else SWITCH + '=1'} needs {' and '.join(missing)} "
            "too: `laconic keys` makes the files and prints the variables"
        )
    return found


def contexts() -> Contexts | None:
    """The contexts of this process, made once per settings; None: TLS is off.

    Each side presents its certificate, and verifies that the job's CA has signed the other's. The
    protocol is TLS 1.3. Names in certificates are not compared with host names: workers know each
    other by addresses, which change behind NATs and differ per network. The proof that counts is
    the signature of the job's own CA, which signs nothing but the job's certificates. There are no
    session tickets, since connections last as long as the run.

    Raises ``ValueError`` if a file is missing, unreadable or expired, if the key is not that of the
    certificate, or if the CA has not signed it.
    """
    found = settings()
    return None if found is None else _contexts(found)


@functools.cache
def _contexts(files: Settings) -> Contexts:
    for variable, path in zip((KEY, CERTIFICATE, CA_FILE), files, strict=True):
        job_secret.read_file(variable, path)
    made = Contexts(
        _context(ssl.PROTOCOL_TLS_SERVER, files), _context(ssl.PROTOCOL_TLS_CLIENT, files)
    )
    made.server.num_tickets = 0
    try:
        _meet(made)
    except ssl.SSLCertVerificationError as error:
        raise ValueError(
            f"the CA {files.ca_file} ({CA_FILE}) does not accept the certificate "
            f"{files.certificate} ({CERTIFICATE}): {error.verify_message}. Make new files with "
            "`laconic keys`, or correct this host's clock"
        ) from error
    except ssl.SSLError as error:
        raise ValueError(
            f"{files.certificate} ({CERTIFICATE}) cannot be used for TLS 1.3: {_reason(error)}"
        ) from error
    return made


def _context(protocol: int, files: Settings) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.sslsocket_class = _Socket

    def password() -> NoReturn:  # else OpenSSL asks at the terminal
        raise ValueError(
            f"{files.key} ({KEY}) is protected by a passphrase: use a key without one, which only "
            "its owner can read"
        )

    try:
        context.load_verify_locations(files.ca_file)
    except (ssl.SSLError, OSError) as error:
        name = f"{files.ca_file} ({CA_FILE})"
        raise ValueError(f"{name} cannot be used: {_reason(error)}") from error
    try:
        context.load_cert_chain(files.certificate, files.key, password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(
                f"{files.key} ({KEY}) is not the key of the certificate {files.certificate} "
                f"({CERTIFICATE})"
            ) from error
        raise ValueError(
            f"{files.certificate} ({CERTIFICATE}) and {files.key} ({KEY}) cannot be used: "
            f"{_reason(error)}"
        ) from error
    return context


def _meet(made: Contexts) -> None:
    """Do a handshake between both sides in memory, so that each verifies the certificate as another
    process would. Raises `ssl.SSLError`."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = made.client.wrap_bio(to_client, to_server)
    server = made.server.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)
