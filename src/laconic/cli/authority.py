"""The certificate authority (CA) of one job, which signs the certificates of its workers."""

from __future__ import annotations

import inspect
import secrets
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_SKEW = timedelta(hours=1)
"""Certificates become valid this long before they are made, because hosts' clocks differ."""
_USES = tuple(inspect.signature(x509.KeyUsage).parameters)
"""What a key may be used for."""


class Authority(NamedTuple):
    """The certificate of the CA and its key, which is not stored."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(cls, days: float) -> Authority:
        """A new CA, valid for this many ``days``. A negative number makes one that has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"CA of laconic job {secrets.token_hex(4)}")
        public = key.public_key()
        built = (
            _begin(days, name, public)
            .issuer_name(name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        )
        return cls(built.sign(key, hashes.SHA256()), key)

    def sign(self, days: float) -> tuple[bytes, bytes]:
        """A certificate for both sides of a connection, valid for this many ``days``, and its
        private key, as PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        built = (
            _begin(days, _name("laconic worker"), key.public_key())
            .issuer_name(self.certificate.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage("digital_signature"), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(issuer, critical=False)
        )
        signed = built.sign(self.key, hashes.SHA256())
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return signed.public_bytes(Encoding.PEM), private

    def pem(self) -> bytes:
        """The certificate of the CA."""
        return self.certificate.public_bytes(Encoding.PEM)


def _begin(
    days: float, subject: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.now(timezone.utc)
    end = now + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - _SKEW)
        .not_valid_after(end)
        .subject_name(subject)
        .public_key(key)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*uses: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{use: use in uses for use in _USES})
