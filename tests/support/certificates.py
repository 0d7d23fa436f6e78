"""Certificates for tests, made by the cryptography package."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from laconic.links import tls

DAY = datetime.timedelta(days=1)


class Authority:
    """A certificate authority in the folder ``path``."""

    def __init__(self, path: Path, name: str = "a test's authority") -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        certificate = self._begun(self._name, self._key, 10 * DAY).add_extension(constraints, True)
        (path / "ca.pem").write_bytes(self._signed(certificate))

    def variables(self, name: str = "worker", valid: datetime.timedelta = DAY) -> dict[str, str]:
        """The variables for a process with a certificate of its own, ``valid`` for so long from
        now: negative, if it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        files = {n: self.path / f"{name}.{n}.pem" for n in ("key", "cert")}
        files["key"].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        files["cert"].write_bytes(self._signed(self._begun(subject, key, valid)))
        return {
            tls.TRANSPORT: tls.ON,
            tls.KEY: str(files["key"]),
            tls.CERTIFICATE: str(files["cert"]),
            tls.CA_FILE: str(self.path / "ca.pem"),
        }

    def _begun(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, valid: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name)
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        return builder.not_valid_before(now - 5 * DAY).not_valid_after(now + valid)

    def _signed(self, builder: x509.CertificateBuilder) -> bytes:
        signed = builder.sign(self._key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)
