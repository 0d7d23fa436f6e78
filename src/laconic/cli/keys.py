"""``laconic keys``: make the keys by which the workers of a job recognize each other."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from laconic.cli.options import declare
from laconic.errors import check_int

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate

_SKEW = timedelta(hours=1)
"""Certificates become valid this long before they are made, because hosts' clocks differ."""
CA, CA_KEY, CERTIFICATE, KEY, SECRET = "ca.pem", "ca-key.pem", "cert.pem", "key.pem", "secret"


def add(parser: Any) -> None:
    """Add the description and the options of the command."""
    parser.description = (
        "Make the files with which the workers and the coordinator of one job encrypt their "
        "connections and refuse strangers: a certificate authority (CA) for this job, a "
        "certificate with its key, and a secret. Print the environment variables to set. Copy the "
        "directory to every host."
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write the files")
    declare(parser, "--days --keep-ca --ca --show", days=365)


def run(arguments: argparse.Namespace) -> int:
    """Write the files, print the variables and return 0."""
    directory: Path = arguments.directory
    if arguments.show:
        for name in (CA, CERTIFICATE, KEY, SECRET):
            _read(directory / name)
        print(text(directory.resolve(), kept=(directory / CA_KEY).exists()))
        return 0
    import cryptography  # noqa: F401

    check_int("--days", arguments.days, 1)
    if arguments.days > 36500:
        raise ValueError(f"--days must be at most 36500, not {arguments.days}")
    if arguments.ca is None:
        authority, secret = Authority.make(arguments.days), secrets.token_hex(32) + "\n"
    else:
        authority, secret = Authority.read(arguments.ca), _read(arguments.ca / SECRET).decode()
    certificate, key = authority.sign(arguments.days)
    private = {KEY: key, SECRET: secret.encode()}
    if arguments.keep_ca:
        private[CA_KEY] = authority.key_pem()
    write(directory, {CA: authority.pem(), CERTIFICATE: certificate}, private)
    print(text(directory.resolve(), kept=arguments.keep_ca))
    return 0


class Authority(NamedTuple):
    """The CA of one job."""

    certificate: Certificate
    key: EllipticCurvePrivateKey

    @classmethod
    def make(cls, days: float) -> Authority:
        """A new CA, valid for this many ``days``. A negative number makes one that has expired."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"CA of laconic job {secrets.token_hex(4)}")
        public = key.public_key()
        usage = _usage(key_cert_sign=True, crl_sign=True)
        built = (
            _begin(days)
            .subject_name(name)
            .issuer_name(name)
            .public_key(public)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        )
        return cls(built.sign(key, hashes.SHA256()), key)

    @classmethod
    def read(cls, directory: Path) -> Authority:
        """The CA that ``--keep-ca`` has written; raises ``ValueError``."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        if not (directory / CA_KEY).exists():
            raise ValueError(f"{directory} has no {CA_KEY}: it was made without --keep-ca")
        try:
            certificate = x509.load_pem_x509_certificate(_read(directory / CA))
            key = load_pem_private_key(_read(directory / CA_KEY), None)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{CA} and {CA_KEY} in {directory} are not a CA: {error}") from error
        if (
            not isinstance(key, ec.EllipticCurvePrivateKey)
            or key.public_key() != certificate.public_key()
        ):
            raise ValueError(f"{CA_KEY} in {directory} is not the key of its {CA}")
        return cls(certificate, key)

    def sign(self, days: float) -> tuple[bytes, bytes]:
        """A certificate for both sides of a connection, and its private key, as PEM. The
        certificate is valid for this many ``days``, but no longer than the CA's."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding
        from cryptography.x509.oid import ExtendedKeyUsageOID as Uses

        key = ec.generate_private_key(ec.SECP256R1())
        public, authority = key.public_key(), self.key.public_key()
        uses = x509.ExtendedKeyUsage([Uses.SERVER_AUTH, Uses.CLIENT_AUTH])
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority)
        built = (
            _begin(days, self.certificate)
            .subject_name(_name("laconic worker"))
            .issuer_name(self.certificate.subject)
            .public_key(public)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(uses, critical=False)
            .add_extension(issuer, critical=False)
        )
        signed = built.sign(self.key, hashes.SHA256())
        return signed.public_bytes(Encoding.PEM), _private_pem(key)

    def pem(self) -> bytes:
        """The certificate."""
        from cryptography.hazmat.primitives.serialization import Encoding

        return self.certificate.public_bytes(Encoding.PEM)

    def key_pem(self) -> bytes:
        """The private key."""
        return _private_pem(self.key)


def write(directory: Path, public: dict[str, bytes], private: dict[str, bytes]) -> None:
    """Write the files, none of which may exist. Only their owner can read the ``private`` ones."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Files of an earlier job would not match the new ones.
    for name in (CA, CA_KEY, CERTIFICATE, KEY, SECRET):
        if os.path.lexists(directory / name):
            raise ValueError(
                f"{directory / name} exists and may be in use: choose another directory"
            )
    for files, mode in ((private, 0o600), (public, 0o644)):
        for name, data in files.items():
            number = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(number, "wb") as file:
                file.write(data)


def text(directory: Path, *, kept: bool) -> str:
    """The command's output: the variables, and notes as comments, so that a shell can evaluate all
    of it."""
    from laconic.links import job_secret, tls

    values = {
        tls.SWITCH: 1,
        tls.KEY: directory / KEY,
        tls.CERTIFICATE: directory / CERTIFICATE,
        tls.CA_FILE: directory / CA,
        job_secret.VARIABLE: directory / SECRET,
    }
    lines = ["# Copy the directory to every host, and set these where workers and coordinators run"]
    lines += [f"export {name}={shlex.quote(str(value))}" for name, value in values.items()]
    if kept:
        lines.append(f"# {CA_KEY} can admit workers to the job: keep it off the workers' hosts")
    return "\n".join(lines)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def _begin(days: float, within: Certificate | None = None) -> Any:
    from cryptography import x509

    now = datetime.now(timezone.utc)
    begin, end = now - _SKEW, now + timedelta(days=days)
    if within is not None:
        end = min(end, within.not_valid_after_utc)
    begin = min(begin, end - _SKEW)
    serial = x509.random_serial_number()
    begun = x509.CertificateBuilder().serial_number(serial)
    return begun.not_valid_before(begin).not_valid_after(end)


def _name(text: str) -> Any:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _usage(**uses: bool) -> Any:
    from cryptography import x509

    every = dict.fromkeys(
        [
            *["digital_signature", "content_commitment", "key_encipherment", "data_encipherment"],
            *["key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"],
        ],
        False,
    )
    return x509.KeyUsage(**(every | uses))


def _private_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
