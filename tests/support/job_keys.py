"""Keys and certificates of jobs, as ``laconic keys`` makes them, and some that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from laconic.cli import main
from laconic.cli.keys import CA, CERTIFICATE, KEY, SECRET, write
from laconic.links import job_secret, tls

if TYPE_CHECKING:
    from laconic.cli.authority import Authority

VARIABLES = (tls.TRANSPORT, tls.SWITCH, *(tls.KEY, tls.CERTIFICATE, tls.CA_FILE))


class Jobs:
    """Directories with the files of two jobs, ``one`` and ``other``, and of one whose certificate,
    ``expired``, or CA, ``expired_ca``, is not valid any more."""

    def __init__(self, directory: Path) -> None:
        from laconic.cli.authority import Authority

        self.one, self.other = directory / "one", directory / "other"
        main(["keys", str(self.other)])
        self.expired, self.expired_ca = directory / "expired", directory / "expired_ca"
        authority, ended = Authority.make(1.0), Authority.make(-1.0)
        self._write(self.one, authority, *authority.sign(1.0))
        self._write(self.expired, authority, *authority.sign(-1.0))
        self._write(self.expired_ca, ended, *ended.sign(-1.0))

    def _write(self, to: Path, authority: Authority, certificate: bytes, key: bytes) -> None:
        write(to, {CA: authority.pem(), CERTIFICATE: certificate}, {KEY: key, SECRET: b"5e" * 32})


def variables(directory: Path, *, secret: bool = False) -> dict[str, str]:
    """The variables that turn TLS on with the files in ``directory``; and ``secret``: that name its
    secret."""
    files = {tls.KEY: KEY, tls.CERTIFICATE: CERTIFICATE, tls.CA_FILE: CA}
    if secret:
        files[job_secret.VARIABLE] = SECRET
    return {tls.SWITCH: "1"} | {name: str(directory / file) for name, file in files.items()}


def turn_on(patch: pytest.MonkeyPatch, directory: Path, **changed: object) -> None:
    """Turn TLS on with the files in ``directory``; ``changed``: other values of the last parts of
    variables' names."""
    turn_off(patch)
    for name, value in variables(directory).items():
        patch.setenv(name, value)
    for part, other in changed.items():
        patch.setenv(f"GLOO_DEVICE_TRANSPORT_TCP_TLS_{part}", str(other))


def turn_off(patch: pytest.MonkeyPatch) -> None:
    """Turn TLS off."""
    for name in VARIABLES:
        patch.delenv(name, raising=False)
