"""TLS settings: mistakes are errors that name the variable and the file, before anything
connects."""

from __future__ import annotations

import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from laconic.links import tls

from tests.support import job_keys
from tests.support.job_keys import turn_off, turn_on

PREFIX = "GLOO_DEVICE_TRANSPORT_TCP_TLS_"


def test_on_by_either_variable(monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs) -> None:
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
    turn_on(monkeypatch, jobs.one)
    monkeypatch.delenv(tls.SWITCH)
    assert tls.contexts() is None
    for variable, value in ((tls.TRANSPORT, tls.ON), (tls.SWITCH, "1")):
        turn_on(monkeypatch, jobs.one)
        monkeypatch.delenv(tls.SWITCH)
        monkeypatch.setenv(variable, value)
        contexts = tls.contexts()
        assert contexts is not None and contexts is tls.contexts(), "made once"
        turn_on(monkeypatch, jobs.other)
        assert tls.contexts() not in (None, contexts), "other settings"


@pytest.mark.parametrize("which", ["PKEY", "CERT", "CA_FILE"])
def test_a_file_is_missing_or_another(
    monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs, which: str, tmp_path: Path
) -> None:
    path, kind = tmp_path / "file.pem", "PRIVATE KEY" if which == "PKEY" else "CERTIFICATE"
    turn_on(monkeypatch, jobs.one, **{which: ""})
    with pytest.raises(ValueError, match=f"LACONIC_TLS=1 needs {PREFIX}{which} too: `lac"):
        tls.contexts()
    turn_on(monkeypatch, jobs.one, **{which: path})
    named = rf"{path} \({PREFIX}{which}\)"
    for text, said in {
        None: f"cannot read {named}: No such file",
        "something else": f"{named} contains no (private key|certificate) in PEM",
        f"-----BEGIN {kind}-----\nAAAA\n-----END {kind}-----\n": f"{named}.* cannot be used: ",
    }.items():
        if text is not None:
            path.write_text(text)
        with pytest.raises(ValueError, match=said):
            tls.contexts()


def test_files_that_do_not_go_together(
    monkeypatch: pytest.MonkeyPatch, jobs: job_keys.Jobs, tmp_path: Path
) -> None:
    """A key of another certificate, or with a passphrase, which nobody is asked for; a certificate
    of another CA, and one that has expired."""
    from cryptography.hazmat.primitives import serialization as s

    key = s.load_pem_private_key((jobs.one / "key.pem").read_bytes(), None)
    coded = s.BestAvailableEncryption(b"1234")
    protected = tmp_path / "key.pem"
    protected.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, coded))
    one, none = jobs.one, tmp_path / "none"
    for folder, changed, said in (
        (one, {"PKEY": jobs.other / "key.pem"}, rf"key.pem \({PREFIX}PKEY\) is not the key of the"),
        (one, {"PKEY": protected}, "is protected by a passphrase"),
        (one, {"CA_FILE": jobs.other / "ca.pem"}, rf"cert.pem \({PREFIX}CERT\) is not signed by"),
        (one, {"CA_FILE": "", "CA_PATH": tmp_path}, "is not signed by the CA"),
        (one, {"CA_FILE": "", "CA_PATH": none}, rf"none \({PREFIX}CA_PATH\) is not a directory"),
        (jobs.expired, {}, rf"^the certificate .*cert.pem \({PREFIX}CERT\) has expired"),
        (jobs.expired_ca, {}, rf"^the CA's certificate .*ca.pem \({PREFIX}CA_FILE\) has expired"),
    ):
        turn_on(monkeypatch, folder, **changed)
        with pytest.raises(ValueError, match=said):
            tls.contexts()


def connect(server: ssl.SSLContext, client: ssl.SSLContext) -> str:
    """What a client reads from a server; raises the client's error."""
    ours, theirs = socket.socketpair()

    def work() -> None:
        with suppress(OSError), server.wrap_socket(theirs, server_side=True) as connection:
            connection.sendall(b"hello")

    ours.settimeout(60)
    with ThreadPoolExecutor(1) as pool, theirs, ours:
        pool.submit(work)
        with client.wrap_socket(ours) as connection:
            return connection.recv(5).decode()


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
    nobody, old = (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) for _ in range(2))
    old.load_cert_chain(jobs.one / "cert.pem", jobs.one / "key.pem")
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    for client in (nobody, old):  # without a certificate, and with TLS 1.2
        client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
        with pytest.raises(OSError):
            connect(one.server, client)
