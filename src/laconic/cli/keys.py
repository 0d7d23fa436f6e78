"""``laconic keys``: make the keys by which the workers of a job recognize each other."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
from pathlib import Path
from typing import Any

from laconic.cli.options import declare, given

CA, CERTIFICATE, KEY, SECRET = "ca.pem", "cert.pem", "key.pem", "secret"


def add(parser: Any) -> None:
    """Add the description and the options of the command."""
    parser.description = (
        "Make the files with which the workers and the coordinator of one job encrypt their "
        "connections and refuse strangers: a certificate authority (CA) for this job, a "
        "certificate with its key, and a secret. Print the environment variables to set. Copy the "
        "directory to every host; there, the same command only prints the variables."
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="where the files are")
    declare(parser, "--days", days=365)


def run(arguments: argparse.Namespace) -> int:
    """Write the files if there are none, print the variables and return 0."""
    directory: Path = arguments.directory
    names = (CA, CERTIFICATE, KEY, SECRET)
    if any(os.path.lexists(directory / name) for name in names):
        if given(arguments, "--days"):
            raise ValueError(f"{directory} has keys already: leave out --days, or name another DIR")
        for name in names:
            (directory / name).read_bytes()  # raises
    else:
        from laconic.cli.authority import Authority

        authority = Authority.make(arguments.days)
        certificate, key = authority.sign(arguments.days)
        private = {KEY: key, SECRET: secrets.token_hex(32).encode() + b"\n"}
        write(directory, {CA: authority.pem(), CERTIFICATE: certificate}, private)
    print(text(directory.resolve()))
    return 0


def write(directory: Path, public: dict[str, bytes], private: dict[str, bytes]) -> None:
    """Write the files, none of which may exist. Only their owner can read the ``private`` ones."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for files, mode in ((private, 0o600), (public, 0o644)):
        for name, data in files.items():
            number = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(number, "wb") as file:
                file.write(data)


def text(directory: Path) -> str:
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
    return "\n".join(lines)
