"""TLS settings: mistakes are errors that name the variable and the file, before anything
connects."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from laconic.links import tls

from tests.support import job_keys
from tests.support.job_keys import turn_off, turn_on

PREFIX = "GLOO_DEVICE_TRANSPORT_TCP_TLS_"


def test_off_without_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    turn_off(monkeypatch)
    assert tls.contexts() is None
    for value in ("", "TCP", "UV"):
        monkeypatch.setenv(tls.TRANSPORT, value)
        assert tls.contexts() is None
    monkeypatch.setenv(tls.SWITCH, "0")
    assert tls.contexts() is None
    monkeypatch.setenv(tls.SWITCH, "yes")
    with pytest.raises(ValueError, match="LACONIC_TLS must be 1 or 0, not 'yes'"):
        tls.contexts()


@pytest.mark.parametrize("variable", [tls.TRANSPORT, tls.SWITCH])
def test_on_by_either_variable(
    monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs, variable: str
) -> None:
    turn_on(monkeypatch, jobs.one)
    monkeypatch.delenv(tls.SWITCH)
    assert tls.contexts() is None
    monkeypatch.setenv(variable, "1" if variable == tls.SWITCH else tls.ON)
    contexts = tls.contexts()
    assert contexts is not None and contexts is tls.contexts(), "made once"
    for context in contexts:
        assert context.verify_mode == ssl.CERT_REQUIRED and not context.check_hostname
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
    assert contexts.server.num_tickets == 0
    turn_on(monkeypatch, jobs.other)
    assert tls.contexts() not in (None, contexts), "other settings"


@pytest.mark.parametrize("missing", ["PKEY", "CERT", "CA_FILE"])
def test_a_variable_is_missing(
    monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs, missing: str
) -> None:
    turn_on(monkeypatch, jobs.one, **{missing: ""})
    with pytest.raises(ValueError, match=f"LACONIC_TLS=1 needs {PREFIX}{missing} too: `lac"):
        tls.contexts()


@pytest.mark.parametrize("which", ["PKEY", "CERT", "CA_FILE"])
def test_a_file_is_missing_or_another(
    monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs, which: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.pem"
    turn_on(monkeypatch, jobs.one, **{which: path})
    named = rf"{path} \({PREFIX}{which}\)"
    with pytest.raises(ValueError, match=f"cannot read {named}: No such file"):
        tls.contexts()
    path.write_text("something else")
    with pytest.raises(ValueError, match=f"{named} contains no (private key|certificate) in PEM"):
        tls.contexts()
    kind = "PRIVATE KEY" if which == "PKEY" else "CERTIFICATE"
    path.write_text(f"-----BEGIN {kind}-----\nAAAA\n-----END {kind}-----\n")
    with pytest.raises(ValueError, match=rf"{path} \(.*cannot be used: "):
        tls.contexts()


def test_the_key_of_another_certificate(
    monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs
) -> None:
    turn_on(monkeypatch, jobs.one, PKEY=jobs.other / "key.pem")
    with pytest.raises(ValueError, match=rf"key.pem \({PREFIX}PKEY\) is not the key of the cert"):
        tls.contexts()


def test_a_certificate_of_another_ca(monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs) -> None:
    turn_on(monkeypatch, jobs.one, CA_FILE=jobs.other / "ca.pem")
    with pytest.raises(ValueError, match=rf"cert.pem \({PREFIX}CERT\) is not signed by the CA .*"):
        tls.contexts()


def test_an_expired_certificate(monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs) -> None:
    turn_on(monkeypatch, jobs.expired)
    with pytest.raises(ValueError, match=rf"^the certificate .*cert.pem \({PREFIX}CERT\) has exp"):
        tls.contexts()
    turn_on(monkeypatch, jobs.expired_ca)
    with pytest.raises(ValueError, match=rf"^the CA's certificate .*ca.pem \({PREFIX}CA_FILE\) ha"):
        tls.contexts()


def test_a_key_with_a_passphrase(
    monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs, tmp_path: Path
) -> None:
    """Nobody is asked for it."""
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key((jobs.one / "key.pem").read_bytes(), None)
    path = tmp_path / "key.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"1234"),
        )
    )
    turn_on(monkeypatch, jobs.one, PKEY=path)
    with pytest.raises(ValueError, match="is protected by a passphrase"):
        tls.contexts()


def test_a_directory_of_cas(
    monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs, tmp_path: Path
) -> None:
    turn_on(monkeypatch, jobs.one, CA_FILE="", CA_PATH=tmp_path)
    with pytest.raises(ValueError, match="is not signed by the CA"):
        tls.contexts()
    turn_on(monkeypatch, jobs.one, CA_FILE="", CA_PATH=tmp_path / "none")
    with pytest.raises(ValueError, match=rf"none \({PREFIX}CA_PATH\) is not a directory"):
        tls.contexts()


def connect(server: ssl.SSLContext, client: ssl.SSLContext) -> str:
    """What a client reads from a server; raises the client's error."""
    ours, theirs = socket.socketpair()

    def work() -> None:
        with suppress(OSError), server.wrap_socket(theirs, server_side=True) as connection:
            connection.sendall(b"hello")

    ours.settimeout(5)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        with client.wrap_socket(ours) as connection:
            return connection.recv(5).decode()
    finally:
        ours.close()
        thread.join(5)
        theirs.close()
        assert not thread.is_alive()


def test_only_workers_of_one_job_understand_each_other(
    monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs
) -> None:
    turn_on(monkeypatch, jobs.one)
    one = tls.contexts()
    turn_on(monkeypatch, jobs.other)
    other = tls.contexts()
    assert one is not None and other is not None
    assert connect(one.server, one.client) == "hello"
    for server, client in ((one.server, other.client), (other.server, one.client)):
        with pytest.raises(ssl.SSLCertVerificationError):
            connect(server, client)
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(OSError):  # it has no certificate
        connect(one.server, nobody)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.load_cert_chain(jobs.one / "cert.pem", jobs.one / "key.pem")
    with pytest.raises(OSError):  # TLS 1.2
        connect(one.server, old)
